"""Pods as the kernel knows them: found in the cgroup tree, and read again and again.

Theory of operation. Each directory below kubepods that is named like a pod is one; its parent tells the QoS class, its
children are the containers (`inside`). Their names, and what the API says of them, come later (`who`).

Promises of `PodReader`:

1. Every `PodUsage` says in `read_at` when its memory was read. A pod of an earlier sample is handed out again, with
   its old `read_at`, only if the caller allows it, its usage barely moved, and it is younger than `carry_s`, or two
   fifths of that more where haste is asked for. When it is read again, what was told of its containers is kept while
   they are as many and hold as many threads as then, for at most a minute, or five while the API tells of the pod and
   tells the same. Where its usage barely moved even that is looked at only once a minute.
2. A cgroup that goes away while it is read leaves the sample without it; never an exception, never a pod of zeros.
3. A removed and re-made cgroup is another pod cgroup: they are told apart by inode number, which cgroupfs never reuses.
4. The tree is listed again unless it is certain that the same pods are there: as many directories as then, and the
   descriptor of each of them still alive.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.model import Note, NoteKind, Pod, PodUsage, QOSClass
from nodeagent.sampling.hostfs.cgroups import Hierarchy, Kubepods, container_id, pod_uid, qos_of
from nodeagent.sampling.hostfs.fd_cache import FdCache
from nodeagent.sampling.hostfs.host import Host, Unreadable
from nodeagent.sampling.hostfs.parse import parse_count
from nodeagent.sampling.node.psi import some_avg10
from nodeagent.sampling.pods.pod_containers import (
    MOST_CGROUPS,
    UNKNOWN_LINKS,
    ApiPodFacts,
    ContainerReader,
    PodContainers,
    api_pod_facts,
    estimate_request,
)

# For how long a pod's reading may be handed out while it barely moves: every second calm look. (The kubelet's own
# per-pod samples are up to 15 s old, however much they moved: KUBELET-CONTRACT.)
CARRY_S: Final = 20.0
# How much longer where there is haste, as a share of it.
_HASTE: Final = 0.4
# How far its usage may move meanwhile: 1% of the smallest default threshold. A thread more is some 30 KiB of kernel
# memory, a process more at least that, so that a storm of either shows as well, and pids.current needs no look.
_CARRY_BYTES: Final = 1 << 20
# How long they need none.
_UNCHECKED_S: Final = 60.0


class PodCgroup(NamedTuple):
    """A pod's directory in the cgroup tree."""

    uid: str
    qos: QOSClass
    path: str
    """Below the hierarchy's root."""
    inode: int


class CachedPod(NamedTuple):
    """A pod as it was read last."""

    usage: PodUsage
    usage_file: str
    usage_text: bytes
    """What it held: the usual pod moves so little that the same text comes again."""
    inside: PodContainers | None
    """None when nothing of the pod could be read."""
    due_at: float
    """When it is to be read again in any case."""
    seen: bool
    """Some process of it was seen once: it is not hidden from us, and without any it ends."""


class _Listing(NamedTuple):
    """The pods that were found, and how to see that they still are those."""

    pods: list[PodCgroup]
    links: tuple[tuple[str, int], ...] | None
    """Of each directory that was listed. None: not cgroupfs, which alone counts children in links and makes
    descriptors useless with their cgroup."""


class _Row(NamedTuple):
    """The pods as they were read last, in columns: a look at 500 pods that did not move touches little else, while a
    ramp has everything out of the caches (2.6 ms by pod, 1.5 by column)."""

    pods: Sequence[PodCgroup]
    known: list[CachedPod]
    files: Sequence[str]
    texts: list[bytes]
    """What each file held."""
    due_at: list[float]
    """When each is to be read again in any case."""


class _Terms(NamedTuple):
    """What holds for all pods of one reading."""

    now: float
    capacity: int | None
    names: Mapping[str, str]
    fresh: bool
    notes: list[Note]


def find_pods(host: Host, hierarchy: Hierarchy, kubepods: Kubepods) -> list[PodCgroup]:
    """The pod cgroups, by path. A QoS directory that vanished has no pods; raises Unreadable only for
    kubepods itself."""
    return _list_pods(host, hierarchy, kubepods).pods


def _list_pods(host: Host, hierarchy: Hierarchy, kubepods: Kubepods) -> _Listing:
    top = hierarchy.memory or ""
    found: list[PodCgroup] = []
    classes: list[tuple[str, QOSClass]] = []
    # Before they are listed: what comes meanwhile makes the next look differ.
    links = [(top + kubepods.path, _children(host, top + kubepods.path))]
    listed = host.subdirectories(top + kubepods.path)
    same = len(listed) == links[0][1]
    for name, inode in listed:
        path = f"{kubepods.path}/{name}"
        qos = qos_of(name)
        if qos is not None:
            classes.append((path, QOSClass.BURSTABLE if qos == "burstable" else QOSClass.BEST_EFFORT))
        elif (uid := pod_uid(name)) is not None:
            found.append(PodCgroup(uid, QOSClass.GUARANTEED, path, inode))
    others = len(listed) - len(found) - len(classes)
    for place, qos_class in classes:
        links.append((top + place, _children(host, top + place)))
        try:
            listed = host.subdirectories(top + place)
        except Unreadable:
            same = False
            continue  # removed between the two looks
        same = same and len(listed) == links[-1][1]
        for name, inode in listed:
            uid = pod_uid(name)
            if uid is None:
                others += 1
            else:
                found.append(PodCgroup(uid, qos_class, f"{place}/{name}", inode))
    found.sort(key=lambda pod: pod.path)
    return _Listing(found, tuple(links) if same and not others else None)


def _children(host: Host, place: str) -> int:
    """How many directories are in a directory of cgroupfs, by its links; `UNKNOWN_LINKS` for any other directory and
    for none. Of the file systems whose directories have no size only those that are made of kernfs count links."""
    try:
        seen = os.stat(host.real(place))
    except OSError:
        return UNKNOWN_LINKS
    return seen.st_nlink - 2 if seen.st_size == 0 and seen.st_nlink >= 2 else UNKNOWN_LINKS


class PodReader:
    """Reads the pods of one hierarchy again and again."""

    def __init__(
        self,
        host: Host,
        hierarchy: Hierarchy,
        kubepods: Kubepods,
        kept: FdCache,
        *,
        stalls: bool = True,
        limits: bool = True,
        carry_s: float = CARRY_S,
    ) -> None:
        """`stalls`: read each pod's own memory pressure as well. `limits`: read the memory limit also of pods that the
        API tells of. `carry_s`: the age up to which a reading may be handed out again."""
        self._host = host
        self._hierarchy = hierarchy
        self._kubepods = kubepods
        self._kept = kept
        self._last: dict[tuple[str, int], CachedPod] = {}
        self._pressure_files = stalls
        self._insides = ContainerReader(host, hierarchy, limits=limits)
        self._carry_s = carry_s
        self._listed: tuple[tuple[str, int], ...] | None = None
        self._row = _Row([], [], [], [], [])
        self._usages: tuple[PodUsage, ...] = ()
        self._now_in: list[bytes] | None = None
        """The texts of the row's files now, for the `read` that follows a `find`."""
        self._api_pods: Sequence[Pod] | None = None
        self._told: dict[str, ApiPodFacts] = {}
        """By the UID in the cgroup's name."""

    def find(self) -> Sequence[PodCgroup]:
        """The pods that are there now: the same list as long as they are the same. Raises Unreadable when kubepods
        itself cannot be listed."""
        self._now_in = self._still_there()
        if self._now_in is not None:
            return self._row.pods
        listing = _list_pods(self._host, self._hierarchy, self._kubepods)
        self._listed = listing.links
        return listing.pods

    def _still_there(self) -> list[bytes] | None:
        """What the pods' files hold now if the pods are those of the last reading, else None. As many directories as
        then and none of them gone: nobody can have come."""
        host = self._host
        if self._listed is None or any(_children(host, place) != count for place, count in self._listed):
            return None
        return self._kept.numbers(self._row.files)

    def read(
        self,
        cgroups: Sequence[PodCgroup],
        *,
        now: float,
        capacity: int | None,
        names: Mapping[str, str],
        fresh: bool,
        late_s: float = 0.0,
        api_pods: Sequence[Pod] | None = None,
        wall_offset: float = 0.0,
    ) -> tuple[tuple[PodUsage, ...], tuple[Note, ...]]:
        """Those pods, and what could not be read. `capacity` is MemTotal, `names` maps container ids to names, `fresh`
        forbids to hand out anything read before `now`, `late_s` allows to hand out for so much longer what has not
        moved, but no longer than two fifths of `carry_s`. What `api_pods` tell is not asked of the host; None: nothing.
        `wall_offset` is wall clock minus CLOCK_BOOTTIME. The same tuple again where no pod was read anew."""
        due = now - min(late_s, self._carry_s * _HASTE)
        texts, self._now_in = self._now_in, None
        if api_pods is not self._api_pods and self._hear(api_pods, now=now, wall_offset=wall_offset):
            texts = None
        terms = _Terms(now, capacity, names, fresh, [])
        if not fresh and cgroups is self._row.pods and texts is not None:
            answer = self._read_moved(texts, terms, due=due)
            if answer is not None:
                return answer
        known: dict[tuple[str, int], CachedPod] = {}
        # Before anything is read: a cgroup made again at the same path must not be read through the old descriptors.
        self._forget(self._last.keys() - {(cgroup.path, cgroup.inode) for cgroup in cgroups})
        closed = self._kept.closed
        for cgroup in cgroups:
            key = (cgroup.path, cgroup.inode)
            before = self._last.get(key)
            still = before is not None and not fresh and self._is_still(before)
            if before is None or not still or due >= before.due_at:
                before = self._pod(cgroup, before, terms, still=still)
            if before is not None:
                known[key] = before
        self._forget(self._last.keys() - known.keys())
        self._last = known
        if self._kept.closed != closed or len(known) != len(cgroups):
            self._listed = None  # somebody went: the next look lists
        pods = list(known.values())
        self._row = _Row(
            cgroups,
            pods,
            [pod.usage_file for pod in pods],
            [pod.usage_text for pod in pods],
            [pod.due_at for pod in pods],
        )
        self._usages = tuple([pod.usage for pod in pods])
        return self._usages, tuple(terms.notes)

    def _read_moved(
        self, texts: Sequence[bytes], terms: _Terms, *, due: float
    ) -> tuple[tuple[PodUsage, ...], tuple[Note, ...]] | None:
        """The same for the pods of the row, whose files hold `texts` now: those that moved, or were to be read anew by
        the time `due`, are read. None when one of them has gone."""
        row, closed = self._row, self._kept.closed
        changed = False
        for index, (text, before, due_at) in enumerate(zip(texts, row.texts, row.due_at, strict=True)):
            still = text == before or _about(row.known[index], text)
            if still and due < due_at:
                continue
            cgroup = row.pods[index]
            # Of one that moves both numbers are to be of the same moment.
            pod = self._pod(cgroup, row.known[index], terms, still=still, usage=text if still else None)
            if pod is None:
                return None
            changed = True
            self._last[cgroup.path, cgroup.inode] = row.known[index] = pod
            row.texts[index], row.due_at[index] = pod.usage_text, pod.due_at
        if self._kept.closed != closed:
            self._listed = None
        if changed:
            self._usages = tuple([pod.usage for pod in row.known])
        return self._usages, tuple(terms.notes)

    def with_container_memory(self, usage: PodUsage) -> PodUsage:
        """`usage` with the working set of each of its containers, read now; None for those that are gone."""
        files = self._hierarchy.memory_files
        place = f"{self._hierarchy.memory}{usage.cgroup}"
        try:
            names = self._host.listdir(place)
        except Unreadable:
            return usage
        sets: dict[str, int | None] = {}
        for name in names:
            identity = container_id(name)
            if identity is None:
                continue
            where = f"{place}/{name}"
            try:
                used, stat = self._host.read(f"{where}/{files.usage}"), self._host.read(f"{where}/{files.stat}")
            except Unreadable:
                continue
            sets[identity] = files.numbers(used, stat).working_set
        known = (
            container._replace(memory_working_set=sets.get(container.container_id)) for container in usage.containers
        )
        return usage._replace(containers=tuple(known))

    def _forget(self, keys: Iterable[tuple[str, int]]) -> None:
        for key in keys:
            self._kept.forget(self._last.pop(key).usage_file)

    def _hear(self, api_pods: Sequence[Pod] | None, *, now: float, wall_offset: float) -> bool:
        """Take in what the API tells now. True when there are pods of which it did and does no more: they are due at
        once."""
        self._api_pods = api_pods
        self._told = api_pod_facts(api_pods or (), now=now, wall_offset=wall_offset, before=self._told)
        lost = [
            key
            for key, known in self._last.items()
            if known.inside is not None and known.inside.pod is not None and known.usage.cgroup_uid not in self._told
        ]
        for key in lost:
            self._last[key] = self._last[key]._replace(due_at=float("-inf"))
        return bool(lost)

    # --- one pod

    def _is_still(self, known: CachedPod) -> bool:
        """Whether the pod's usage is about what it was."""
        try:
            text = self._kept.read(known.usage_file)
        except Unreadable:
            return False
        return text == known.usage_text or _about(known, text)

    def _due_at(self, usage: PodUsage, cgroup: PodCgroup, before: CachedPod | None) -> float:
        """When a pod is to be read again though it did not move; at once when its memory is not known.

        The first time at any moment in `carry_s`, which its UID tells, so that not all come due in one sample (10 ms
        for 110 pods). One that was due keeps its turn, however late it came: else all would come due at once after some
        rare samples."""
        if usage.memory_usage is None:
            return float("-inf")
        now, carry_s = usage.read_at, self._carry_s
        if before is not None and now - carry_s * 2 / 3 <= before.due_at <= now:
            return before.due_at + carry_s
        return now + carry_s * (1 - int(cgroup.uid.replace("-", "")[:2], 16) / 256)

    def _pod(
        self, cgroup: PodCgroup, before: CachedPod | None, terms: _Terms, *, still: bool, usage: bytes | None = None
    ) -> CachedPod | None:
        """Read one pod; None when its cgroup is gone. `before` is its last reading, `still` says that its usage barely
        moved since, `usage` is what its file holds, where that was read just now."""
        hierarchy, now, notes = self._hierarchy, terms.now, terms.notes
        place = f"{hierarchy.memory}{cgroup.path}"
        usage_file = f"{place}/{hierarchy.memory_files.usage}"
        try:
            if usage is None:
                usage = self._kept.read(usage_file)
            stat = self._host.read(f"{place}/{hierarchy.memory_files.stat}")
            inside = self._look_inside(cgroup, place, before and before.inside, terms, still=still)
        except Unreadable as error:
            if not self._host.exists(place):
                return None
            notes.append(Note(NoteKind.POD, str(error), about=cgroup.uid))
            unread = PodUsage(cgroup.uid, cgroup.qos, cgroup.path, read_at=now)
            seen = before is not None and before.seen
            return CachedPod(unread, usage_file, b"", None, self._due_at(unread, cgroup, before), seen)
        numbers = hierarchy.memory_files.numbers(usage, stat)
        if numbers.reason:
            notes.append(Note(NoteKind.POD, numbers.reason, about=cgroup.uid))
        # pids.current counts what has ended until its parent has taken note of it, cgroup.procs does not.
        seen = inside.visible or (before is not None and before.seen)
        hidden = bool(inside.threads) and not seen
        if hidden:
            message = "its processes are outside our PID namespace and cannot be counted"
            notes.append(Note(NoteKind.POD, message, about=cgroup.uid))
        processes = sum([c.process_count or 0 for c in inside.containers])
        if inside.left_out:
            # Nobody hides in cgroups of his own: no pod has more processes than threads.
            processes = max(processes, inside.threads or 0)
            message = f"more than {MOST_CGROUPS} cgroups below its containers: each thread counts as a process"
            notes.append(Note(NoteKind.POD, message, about=cgroup.uid))
        used = PodUsage(
            cgroup_uid=cgroup.uid,
            qos_class=cgroup.qos,
            cgroup=cgroup.path,
            read_at=now,
            memory_working_set=numbers.working_set,
            memory_usage=numbers.usage,
            memory_unreclaimable=numbers.unreclaimable,
            memory_limit=inside.limit,
            memory_stall_some_avg10=self._stall(cgroup.path),
            memory_request_estimate=estimate_request(cgroup.qos, inside.scores, inside.limit, terms.capacity),
            process_count=None if hidden else processes,
            thread_count=inside.threads,
            started_at=inside.started_at,
            containers=inside.containers,
        )
        return CachedPod(used, usage_file, usage, inside, self._due_at(used, cgroup, before), seen)

    def _look_inside(
        self, cgroup: PodCgroup, place: str, before: PodContainers | None, terms: _Terms, *, still: bool
    ) -> PodContainers:
        """What is in the pod, as long as it may be what was told last. Raises Unreadable."""
        insides, known, now, fresh = self._insides, self._told.get(cgroup.uid), terms.now, terms.fresh
        lasts = before is not None and not fresh and insides.still_valid(before, terms.names, known, now)
        if before is not None and lasts and still and now - before.checked_at < _UNCHECKED_S:
            return before
        threads = self._threads(cgroup.path)
        # Before the names: who comes meanwhile makes the next look differ. A fresh look takes nothing over.
        links = UNKNOWN_LINKS if fresh else insides.links(place)
        if before is not None and lasts and (threads, links) == (before.threads, before.links):
            return before._replace(checked_at=now)
        facts = before.facts if before is not None else {}
        return insides.read(place, cgroup.qos, links, threads, facts, terms.names, known, now)

    def _threads(self, path: str) -> int | None:
        if self._hierarchy.pids is None:
            return None
        try:
            return parse_count(self._host.read(f"{self._hierarchy.pids}{path}/pids.current"))
        except Unreadable:
            return None  # gone, or without the pids controller: the same "not known"

    def _stall(self, path: str) -> float | None:
        if self._hierarchy.unified is None or not self._pressure_files:
            return None
        try:
            return some_avg10(self._host.read(f"{self._hierarchy.unified}{path}/memory.pressure"))
        except Unreadable:
            # A kernel without PSI has no such file anywhere; a hybrid tree may lack the path. Ask once.
            self._pressure_files = self._host.exists(f"{self._hierarchy.unified}{self._kubepods.path}/memory.pressure")
            return None


def _about(known: CachedPod, text: bytes) -> bool:
    """Whether a pod whose usage file holds `text` uses about what it did."""
    last, usage = known.usage.memory_usage, parse_count(text)
    return last is not None and usage is not None and abs(usage - last) < _CARRY_BYTES

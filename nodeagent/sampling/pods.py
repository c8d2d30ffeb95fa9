"""Pods as the kernel knows them: found in the cgroup tree, named by the log directories, joined with what the API says.

Theory of operation. Each directory below kubepods that is named like a pod is one; its parent tells the QoS class, its
children are the containers. The kubelet gives the sandbox (pause) container oom_score_adj -998 and each other container
a value that follows from its memory request, so the container's first process tells both what the container is and,
roughly, what it asked for. The sandbox is left out of process counts, as in the kubelet's own.

Promises of `PodReader`:

1. Every `PodUsage` says in `read_at` when its memory was read. A pod of an earlier sample is handed out again, with
   its old `read_at`, only if the caller allows it, its usage barely moved, and it is younger than `carry_s`, or a third
   of that more where haste is asked for. When it is read again, what was told of its containers is kept while they are
   as many and hold as many threads as then, for at most `_INSIDE_S`.
2. A cgroup that goes away while it is read leaves the sample without it; never an exception, never a pod of zeros.
3. A removed and re-made cgroup is another pod cgroup: they are told apart by inode number, which cgroupfs never reuses.
4. The tree is listed again unless it is certain that the same pods are there: as many directories as then, and the
   descriptor of each of them still alive.
"""

import os
from collections.abc import Iterable, Mapping, Sequence

from nodeagent.lean import Final, NamedTuple
from nodeagent.model import ContainerUsage, Note, Pod, PodSource, PodUsage, PodView, QOSClass
from nodeagent.sampling.cgroup import (
    CONTAINER_ID_LENGTH,
    Hierarchy,
    Kubepods,
    container_id,
    parse_limit,
    pod_uid,
    qos_of,
)
from nodeagent.sampling.host import Host, Unreadable
from nodeagent.sampling.kept import KeptFiles
from nodeagent.sampling.numbers import count
from nodeagent.sampling.pressure import some_avg10

SANDBOX_ADJ: Final = -998
"""What the kubelet gives a pod's sandbox (pause) container, and no other."""

# For how long a pod's reading may be handed out while it barely moves. The kubelet's own per-pod samples are up to 15 s
# old (KUBELET-CONTRACT).
CARRY_S: Final = 15.0
# Pods are read again after 50% to 100% of that, each at its own moment, so that not all come due in one sample (10 ms
# for 110 pods).
_CARRY_STEPS: Final = 64
# How far its usage may move meanwhile: 1% of the smallest default threshold. A thread more is some 30 KiB of kernel
# memory, a process more at least that, so that a storm of either shows as well, and pids.current needs no look.
_CARRY_BYTES: Final = 1 << 20
# How long what is known of a pod's containers may be kept while nothing shows that it changed. Reading it is two thirds
# of a pod's full reading.
_INSIDE_S: Final = 60.0
_UNKNOWN_LINKS: Final = -1
# A container's oom_score_adj is the shim's until runc sets it, some ms after the process is in the cgroup. From this
# age on it is taken as final and not read again.
_SETTLED_S: Final = 5.0
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_RENAME_S: Final = 10.0


class PodCgroup(NamedTuple):
    """A pod's directory in the cgroup tree."""

    uid: str
    qos: QOSClass
    path: str
    """Below the hierarchy's root."""
    inode: int


class ContainerFacts(NamedTuple):
    """What a container's first process tells. It does not change while the container lives."""

    oom_score_adj: int | None
    started_at: float | None
    seen_at: float
    """When the container was first seen."""
    read_at: float


class Inside(NamedTuple):
    """What is in a pod's cgroup, but for its memory."""

    read_at: float
    links: int
    """Of its directory: its child cgroups are some of them; or `_UNKNOWN_LINKS`."""
    limit: int | None
    threads: int | None
    """Of the pod, when its containers were about to be read."""
    containers: tuple[ContainerUsage, ...]
    scores: tuple[int | None, ...]
    """oom_score_adj of each container."""
    started_at: float | None
    visible: bool
    """Some process was seen; false in an empty pod, or when all of them are outside our PID namespace."""
    facts: dict[str, ContainerFacts]
    """By the name of the container's cgroup, to be handed in again at the next reading."""


class _Known(NamedTuple):
    """A pod as it was read last."""

    usage: PodUsage
    usage_file: str
    usage_text: bytes
    """What it held: the usual pod moves so little that the same text comes again."""
    inside: Inside | None
    """None when nothing of the pod could be read."""
    due_at: float
    """When it is to be read again in any case."""


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
    known: list[_Known]
    files: Sequence[str]
    texts: list[bytes]
    """What each file held."""
    due_at: list[float]
    """When each is to be read again in any case."""


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
    """How many directories are in a directory of cgroupfs, by its links; `_UNKNOWN_LINKS` for any other directory and
    for none. Of the file systems whose directories have no size only those that are made of kernfs count links."""
    try:
        seen = os.stat(host.real(place))
    except OSError:
        return _UNKNOWN_LINKS
    return seen.st_nlink - 2 if seen.st_size == 0 and seen.st_nlink >= 2 else _UNKNOWN_LINKS


class PodReader:
    """Reads the pods of one hierarchy again and again."""

    def __init__(
        self,
        host: Host,
        hierarchy: Hierarchy,
        kubepods: Kubepods,
        kept: KeptFiles,
        *,
        stalls: bool = True,
        carry_s: float = CARRY_S,
    ) -> None:
        """`stalls`: read each pod's own memory pressure as well. `carry_s`: the age up to which a reading may be handed
        out again."""
        self._host = host
        self._hierarchy = hierarchy
        self._kubepods = kubepods
        self._kept = kept
        self._last: dict[tuple[str, int], _Known] = {}
        self._pressure_files = stalls
        self._carry_s = carry_s
        self._listed: tuple[tuple[str, int], ...] | None = None
        self._row = _Row([], [], [], [], [])
        self._usages: tuple[PodUsage, ...] = ()
        self._now_in: list[bytes] | None = None
        """The texts of the row's files now, for the `read` that follows a `find`."""

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
    ) -> tuple[tuple[PodUsage, ...], tuple[Note, ...]]:
        """Those pods, and what could not be read. `capacity` is MemTotal, `names` maps container ids to names, `fresh`
        forbids to hand out anything read before `now`, `late_s` allows to hand out for so much longer what has not
        moved, but no longer than a third of `carry_s`. The same tuple again where no pod was read anew."""
        due = now - min(late_s, self._carry_s / 3)
        texts, self._now_in = self._now_in, None
        if not fresh and cgroups is self._row.pods and texts is not None:
            answer = self._read_moved(texts, now=now, due=due, capacity=capacity, names=names)
            if answer is not None:
                return answer
        known: dict[tuple[str, int], _Known] = {}
        notes: list[Note] = []
        # Before anything is read: a cgroup made again at the same path must not be read through the old descriptors.
        self._forget(self._last.keys() - {(cgroup.path, cgroup.inode) for cgroup in cgroups})
        closed = self._kept.closed
        for cgroup in cgroups:
            key = (cgroup.path, cgroup.inode)
            before = self._last.get(key)
            if before is None or fresh or not self._unmoved(before, due):
                before = self._pod(cgroup, before, now=now, capacity=capacity, names=names, fresh=fresh, notes=notes)
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
        return self._usages, tuple(notes)

    def _read_moved(
        self, texts: Sequence[bytes], *, now: float, due: float, capacity: int | None, names: Mapping[str, str]
    ) -> tuple[tuple[PodUsage, ...], tuple[Note, ...]] | None:
        """The same for the pods of the row, whose files hold `texts` now: those that moved, or were to be read anew by
        the time `due`, are read. None when one of them has gone."""
        row, notes, closed = self._row, list[Note](), self._kept.closed
        changed = False
        for index, (text, before, due_at) in enumerate(zip(texts, row.texts, row.due_at, strict=True)):
            if due < due_at and (text == before or _about(row.known[index], text)):
                continue
            cgroup, known = row.pods[index], row.known[index]
            pod = self._pod(cgroup, known, now=now, capacity=capacity, names=names, fresh=False, notes=notes)
            if pod is None:
                return None
            changed = True
            self._last[cgroup.path, cgroup.inode] = row.known[index] = pod
            row.texts[index], row.due_at[index] = pod.usage_text, pod.due_at
        if self._kept.closed != closed:
            self._listed = None
        if changed:
            self._usages = tuple([pod.usage for pod in row.known])
        return self._usages, tuple(notes)

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

    # --- one pod

    def _unmoved(self, known: _Known, due: float) -> bool:
        """Whether the last reading of this pod still is about right, and was not to be taken anew by the time `due`."""
        if due >= known.due_at:
            return False
        try:
            text = self._kept.read(known.usage_file)
        except Unreadable:
            return False
        return text == known.usage_text or _about(known, text)

    def _due_at(self, usage: PodUsage, inode: int) -> float:
        """When a pod is to be read again though it did not move; at once when its memory is not known."""
        if usage.memory_usage is None:
            return float("-inf")
        return usage.read_at + self._carry_s * (1 - inode % _CARRY_STEPS / (2 * _CARRY_STEPS))

    def _pod(
        self,
        cgroup: PodCgroup,
        before: _Known | None,
        *,
        now: float,
        capacity: int | None,
        names: Mapping[str, str],
        fresh: bool,
        notes: list[Note],
    ) -> _Known | None:
        """Read one pod; None when its cgroup is gone. `before` is its last reading."""
        hierarchy, host = self._hierarchy, self._host
        place = f"{hierarchy.memory}{cgroup.path}"
        usage_file = f"{place}/{hierarchy.memory_files.usage}"
        try:
            usage = self._kept.read(usage_file)
            stat = host.read(f"{place}/{hierarchy.memory_files.stat}")
            threads = self._threads(cgroup.path)
            inside = before.inside if before is not None else None
            if inside is None or fresh or not self._same_inside(inside, place, threads, names, now):
                facts = inside.facts if inside is not None else {}
                # Before the names: who comes meanwhile makes the next look differ. A fresh look takes nothing over.
                links = _UNKNOWN_LINKS if fresh else self._links(place)
                inside = self._inside(place, cgroup.qos, links, threads, facts, names, now)
        except Unreadable as error:
            if not host.exists(place):
                return None
            notes.append(Note(f"pod {cgroup.uid}", str(error)))
            unread = PodUsage(cgroup.uid, cgroup.qos, cgroup.path, read_at=now)
            return _Known(unread, usage_file, b"", None, self._due_at(unread, cgroup.inode))
        numbers = hierarchy.memory_files.numbers(usage, stat)
        if numbers.reason:
            notes.append(Note(f"pod {cgroup.uid}", numbers.reason))
        hidden = bool(threads) and not inside.visible
        if hidden:
            notes.append(Note(f"pod {cgroup.uid}", "its processes are outside our PID namespace and cannot be counted"))
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
            memory_request_estimate=estimate_request(cgroup.qos, inside.scores, inside.limit, capacity),
            process_count=None if hidden else sum([c.process_count or 0 for c in inside.containers]),
            thread_count=threads,
            started_at=inside.started_at,
            containers=inside.containers,
        )
        return _Known(used, usage_file, usage, inside, self._due_at(used, cgroup.inode))

    def _same_inside(
        self, inside: Inside, place: str, threads: int | None, names: Mapping[str, str], now: float
    ) -> bool:
        """Whether nothing shows that the pod holds anything else than it did, and nothing more is to be learned."""
        if threads is None or threads != inside.threads or not 0 <= now - inside.read_at < _INSIDE_S:
            return False
        settled = all(fact.read_at - fact.seen_at > _SETTLED_S for fact in inside.facts.values())
        named = not any(known.name is None and known.container_id in names for known in inside.containers)
        return settled and named and inside.links == self._links(place)

    def _links(self, place: str) -> int:
        """Directories of cgroupfs have 2 + (number of children) links."""
        try:
            return os.stat(self._host.real(place)).st_nlink
        except OSError:
            return _UNKNOWN_LINKS  # gone meanwhile

    def _limit(self, place: str) -> int | None:
        try:
            return parse_limit(self._host.read(f"{place}/{self._hierarchy.memory_files.limit}"))
        except Unreadable:
            return None  # the model's None: none, or not readable

    def _threads(self, path: str) -> int | None:
        if self._hierarchy.pids is None:
            return None
        try:
            return count(self._host.read(f"{self._hierarchy.pids}{path}/pids.current"))
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

    # --- its containers

    def _inside(
        self,
        place: str,
        qos: QOSClass,
        links: int,
        threads: int | None,
        before: Mapping[str, ContainerFacts],
        names: Mapping[str, str],
        now: float,
    ) -> Inside:
        """Look at the containers. Those that vanish meanwhile are left out; raises Unreadable when the pod did."""
        children = sorted([name for name in self._host.listdir(place) if len(name) >= CONTAINER_ID_LENGTH])
        found = [(name, identity) for name in children if (identity := container_id(name)) is not None]
        unnamed = [name for name, identity in found if identity not in names]
        # Every container has a log link but the sandbox. It is asked all the same: a container that was just made has
        # none yet, or none that we listed.
        sandbox = unnamed[0] if len(unnamed) == 1 and len(found) > 1 else None
        containers: list[ContainerUsage] = []
        scores: list[int | None] = []
        facts: dict[str, ContainerFacts] = {}
        visible, sandbox_start = False, None
        for name, identity in found:
            try:
                processes = self._processes(f"{place}/{name}")
            except Unreadable:
                continue
            visible = visible or bool(processes)
            # Where the sandbox is known nothing but it has to tell when the pod started, and only the score of
            # Burstable pods' containers tells a request.
            start = sandbox is None or name == sandbox
            score = start or qos is QOSClass.BURSTABLE
            fact = before.get(name)
            if (score or start) and (fact is None or fact.read_at - fact.seen_at <= _SETTLED_S):
                fact = self._facts(fact, processes, now, score=score, start=start)
            if fact is not None:
                facts[name] = fact
                if fact.oom_score_adj == SANDBOX_ADJ or (fact.oom_score_adj is None and name == sandbox):
                    sandbox_start = fact.started_at
                    continue
            scores.append(fact.oom_score_adj if fact else None)
            containers.append(ContainerUsage(identity, names.get(identity), None, len(processes)))
        started = sandbox_start if sandbox_start is not None else _earliest(facts.values())
        limit = self._limit(place)
        return Inside(now, links, limit, threads, tuple(containers), tuple(scores), started, visible, facts)

    def _processes(self, where: str) -> list[bytes]:
        """PIDs in a container's cgroup and those below it (a systemd inside a container makes some)."""
        processes = self._host.read(f"{where}/cgroup.procs").split()
        try:
            if self._links(where) == 2:  # spares listing 40 files
                return processes
            children = self._host.subdirectories(where)
        except Unreadable:
            return processes  # gone meanwhile
        for name, _inode in children:
            try:
                processes += self._processes(f"{where}/{name}")
            except Unreadable:
                continue  # threaded (its processes are listed by the parent), or gone
        return processes

    def _facts(
        self, before: ContainerFacts | None, processes: list[bytes], now: float, *, score: bool, start: bool
    ) -> ContainerFacts:
        """Ask the container's first process for its score, or since when it runs, or both."""
        # The lowest PID is the container's first process but for a wrap of the counter; others may have changed their
        # score themselves. 0 is a process outside our PID namespace.
        first = min([pid for pid in map(count, processes[:64]) if pid], default=None)
        seen_at = now if before is None else before.seen_at
        if first is None:
            return ContainerFacts(None, None, seen_at, now)
        return ContainerFacts(
            oom_score_adj=_oom_score_adj(self._host, first) if score else None,
            started_at=_started_at(self._host, first) if start else None,
            seen_at=seen_at,
            read_at=now,
        )


def _about(known: _Known, text: bytes) -> bool:
    """Whether a pod whose usage file holds `text` uses about what it did."""
    last, usage = known.usage.memory_usage, count(text)
    return last is not None and usage is not None and abs(usage - last) < _CARRY_BYTES


def estimate_request(
    qos: QOSClass, scores: Sequence[int | None], limit: int | None, capacity: int | None
) -> int | None:
    """A pod's memory request in bytes as far as the host tells it, or None.

    BestEffort: 0. Guaranteed: the cgroup's limit, which the kubelet sets to the sum of the requests. Burstable: the
    kubelet gives each container oom_score_adj = 1000 - 1000 * request / MemTotal, kept within 3..999
    (pkg/kubelet/qos/policy.go); turned round and summed, right to 0.1% of MemTotal for each container. None when a
    score is not such a number (node-critical pods have -997) or there is no container.
    """
    if qos is QOSClass.BEST_EFFORT:
        return 0
    if qos is QOSClass.GUARANTEED:
        return limit
    if capacity is None or not scores:
        return None
    request = 0
    for score in scores:
        if score is None or not 3 <= score <= 999:
            return None
        request += (1000 - score) * capacity // 1000
    return request


def _oom_score_adj(host: Host, pid: int) -> int | None:
    try:
        text = host.read(f"/proc/{pid}/oom_score_adj").strip()
    except Unreadable:
        return None
    digits = text.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > 4 or int(digits) > 1000:
        return None
    return int(text)


def _started_at(host: Host, pid: int) -> float | None:
    """Start of a process on CLOCK_BOOTTIME: field 22 of /proc/PID/stat (proc(5)); the command before it, in
    parentheses, may hold anything."""
    try:
        fields = host.read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except Unreadable:
        return None
    ticks = count(fields[19]) if len(fields) > 19 else None
    return None if ticks is None else ticks / _TICKS


def _earliest(facts: Iterable[ContainerFacts]) -> float | None:
    return min((fact.started_at for fact in facts if fact.started_at is not None), default=None)


# --- names -----------------------------------------------------------------------------------------------------------


class PodName(NamedTuple):
    """Who a pod is, by its log directory."""

    namespace: str
    name: str


def parse_log_directory(name: str) -> tuple[str, PodName] | None:
    """(UID, who) of `<namespace>_<name>_<uid>`. None of the three can hold an underscore; the name may hold dots."""
    parts = name.split("_")
    if len(parts) != 3 or not all(parts):
        return None
    return parts[2], PodName(parts[0], parts[1])


def parse_log_link(name: str) -> tuple[str, str] | None:
    """(container id, container name) of `<pod>_<namespace>_<container>-<id>.log` in /var/log/containers."""
    if not name.endswith(".log") or name.count("_") != 2:
        return None
    container, dash, identity = name.removesuffix(".log").rpartition("_")[2].rpartition("-")
    return (identity, container) if dash and container and container_id(identity) else None


class PodNames:
    """Names of pods and containers, listed again only when there is someone new."""

    def __init__(self, host: Host, *, pod_logs_dir: str) -> None:
        self._host = host
        self._pods_dir = pod_logs_dir
        self._links_dir = f"{os.path.dirname(pod_logs_dir.rstrip('/'))}/containers"
        self.pods: dict[str, PodName] = {}
        self.containers: dict[str, str] = {}
        self.reason = ""
        """Why there are no names; empty when there are."""
        self.missed = False
        """Set by the reader of pods: some container has no name yet."""
        self._listed_for: frozenset[str] | None = None
        self._listed_at = 0.0

    def refresh(self, uids: frozenset[str], *, now: float) -> None:
        """Look again if these are other pods than last time, or names were missing some seconds ago."""
        complete = uids <= self.pods.keys() and not self.missed
        if uids == self._listed_for and (complete or now - self._listed_at < _RENAME_S):
            return
        self._listed_for, self._listed_at, self.missed = uids, now, False
        try:
            self.pods = dict(filter(None, map(parse_log_directory, self._host.listdir(self._pods_dir))))
            self.reason = ""
        except Unreadable as error:
            self.pods, self.reason = {}, str(error)
        try:
            self.containers = dict(filter(None, map(parse_log_link, self._host.listdir(self._links_dir))))
        except Unreadable:
            self.containers = {}  # an old convenience of the kubelet: containers go by their id without it


# --- the API's view and the kernel's ---------------------------------------------------------------------------------


class Joined(NamedTuple):
    """What was joined, and what came of it."""

    usages: Sequence[PodUsage]
    api_pods: Sequence[Pod] | None
    views: tuple[PodView, ...]
    """Every pod that either side knows, API pods first in their order."""
    known: Mapping[str, tuple[Pod, PodUsage, PodView]]
    """By UID, of the API's pods that have a cgroup."""


def join(
    usages: Sequence[PodUsage],
    api_pods: Sequence[Pod] | None,
    *,
    names: Mapping[str, PodName],
    wall_offset: float,
    before: Joined | None = None,
) -> Joined:
    """Bring the two sides together.

    A pod of the API has the usage of the cgroup that carries its `cgroup_uid`, or None. Cgroups that the API does not
    know, or all when it was not asked (None), become pods with source HOST. `wall_offset` is wall clock minus
    CLOCK_BOOTTIME, for the start time of those. What was joined `before` is taken over where neither side changed.
    """
    by_uid = {usage.cgroup_uid: usage for usage in usages}
    last = before.known if before is not None else {}
    known: dict[str, tuple[Pod, PodUsage, PodView]] = {}
    views = []
    for pod in api_pods or ():
        usage = by_uid.pop(pod.cgroup_uid, None)
        if usage is None:
            views.append(PodView(pod, None))
            continue
        same = last.get(pod.uid)
        if same is None or same[0] is not pod or same[1] is not usage:
            same = (pod, usage, PodView(pod, _named(usage, pod)))
        known[pod.uid] = same
        views.append(same[2])
    views += [PodView(_host_pod(usage, names, wall_offset), usage) for usage in by_uid.values()]
    return Joined(usages, api_pods, tuple(views), known)


def _named(usage: PodUsage, pod: Pod) -> PodUsage:
    """The usage with the containers' names as the API has them."""
    names = {container.container_id: container.name for container in pod.containers if container.container_id}
    if all(names.get(known.container_id, known.name) == known.name for known in usage.containers):
        return usage
    renamed = (known._replace(name=names.get(known.container_id, known.name)) for known in usage.containers)
    return usage._replace(containers=tuple(renamed))


def _host_pod(usage: PodUsage, names: Mapping[str, PodName], wall_offset: float) -> Pod:
    who = names.get(usage.cgroup_uid)
    return Pod(
        uid=usage.cgroup_uid,
        cgroup_uid=usage.cgroup_uid,
        namespace=who.namespace if who else None,
        name=who.name if who else None,
        source=PodSource.HOST,
        qos_class=usage.qos_class,
        started_wall=None if usage.started_at is None else usage.started_at + wall_offset,
    )

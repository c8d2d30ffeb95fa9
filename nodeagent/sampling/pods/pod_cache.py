"""The pods of one cgroup hierarchy, each value read again only where it may have changed.

Promises:

1. `PodUsage.read_at` is the time of the pod's memory reading. A value is never older than the table `pod_ages.AGES`
   allows, and the memory of a pod never older than two thirds of `sampling.staleAfter`.
2. A cgroup that is removed while it is read is left out of the sample. It is never an exception and never a pod of
   zeros.
3. A cgroup that was removed and made again is another pod cgroup: its inode number differs.
4. The directories are listed again unless it is certain that the pods are the same: each directory has as many children
   as before, and the kept descriptor of each pod still reads.

Theory of operation. A full sample reads one number of each pod, its usage, through a kept descriptor. Only a pod that
moved, or whose memory reading has reached its age, is read further; the table decides which of its other values are
read then. While memory or PIDs are short that age is some seconds, because a level usage may hide any change.
"""

import operator
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Final, NamedTuple

from nodeagent.model import Note, NoteKind, Pod, PodUsage, Tier
from nodeagent.sampling.hostfs import parse
from nodeagent.sampling.hostfs.cgroup_memory import MemoryNumbers
from nodeagent.sampling.hostfs.cgroups import Hierarchy, Kubepods
from nodeagent.sampling.hostfs.fd_cache import FdCache
from nodeagent.sampling.hostfs.host import Host, Unreadable
from nodeagent.sampling.node import psi
from nodeagent.sampling.pods import pod_ages, pod_cgroups, pod_containers, protected_cache
from nodeagent.sampling.pods.pod_ages import Change
from nodeagent.sampling.pods.pod_cgroups import CgroupListing, PodCgroup
from nodeagent.sampling.pods.pod_containers import FirstProcess, PodContainers
from nodeagent.sampling.pods.protected_cache import ProtectedPod


class PodMemory(NamedTuple):
    """memory.stat, memory.swap.current and memory.pressure of a pod."""

    read_at: float
    numbers: MemoryNumbers
    swap: int | None
    stall_some_avg10: float | None


class PodCounts(NamedTuple):
    """The two cheap numbers that change with a pod's processes and containers."""

    read_at: float
    threads: int | None
    links: int | None
    """Links of the pod's directory: 2 + its child cgroups. None: gone meanwhile."""


class PodValues(NamedTuple):
    """The cached values of a pod, one for each row of `pod_ages.AGES`."""

    usage: bytes
    """The text of the usage file: a pod that did not move shows the same text again."""
    memory: PodMemory
    counts: PodCounts
    containers: PodContainers
    first_processes: Mapping[str, FirstProcess]


_ALWAYS_DUE: Final = dict.fromkeys(Tier, float("-inf"))


class CachedPod(NamedTuple):
    """A pod as it was read last."""

    cgroup: PodCgroup
    values: PodValues | None
    """None: not readable."""
    usage: PodUsage
    due_at: float
    """When its memory is read again although it did not move; always due if its memory is unknown or corrects
    MemAvailable."""
    due_if_short_at: Mapping[Tier, float]
    """The same while memory or PIDs are short, by the tier that acts."""
    had_processes: bool
    """A process was visible once. So the pod is not outside our PID namespace, and without processes it is ending."""


class _Sample(NamedTuple):
    """The inputs that all pods of one sample share."""

    now: float
    capacity: int | None
    names: Mapping[str, str]
    versions: Mapping[str, Pod]
    fresh: bool
    short: Tier | None
    swap_total: int | None
    notes: list[Note]


class PodCache:
    """Reads the pods of one hierarchy. Not thread-safe: one owner."""

    def __init__(
        self,
        host: Host,
        hierarchy: Hierarchy,
        kubepods: Kubepods,
        files: FdCache,
        *,
        stale_after_s: float,
        stalls: bool = True,
    ) -> None:
        """`stale_after_s`: decisions reject a reading older than this. `stalls`: read each pod's memory pressure too,
        one file more for each."""
        self._host = host
        self._hierarchy = hierarchy
        self._kubepods = kubepods
        self._files = files
        self._memory_age_s = pod_ages.memory_age_s(stale_after_s)
        self._stalls = stalls
        self._swap_file = hierarchy.memory_files.swap
        """Empty: there is none, or the kernel does not count swap by cgroup."""
        self._containers = pod_containers.ContainerReader(host, hierarchy)
        self._listing: CgroupListing | None = None
        self._cgroups: Sequence[PodCgroup] = ()
        """Of the last reading."""
        self._pods: list[CachedPod] = []
        """Of the last reading; one for each of `_cgroups` unless the listing is outdated."""
        self._usage_files: Sequence[str] = ()
        self._usage_texts: list[bytes] | None = None
        """The texts of these files, from `list_pods` for the `read` that follows."""
        self._result: tuple[PodUsage, ...] = ()
        self.protected_cache = 0
        """Page cache of the pods of the last reading that memory.min protects."""
        self._api_pods: Sequence[Pod] | None = None
        self._versions: Mapping[str, Pod] = {}
        """The pods that the API server lists, by the UID in the cgroup's name."""

    def list_pods(self) -> Sequence[PodCgroup]:
        """The pod cgroups: the same sequence while they are unchanged. Raises Unreadable if they cannot be listed."""
        self._usage_texts = None
        if self._is_listing_valid():
            self._usage_texts = self._files.numbers(self._usage_files)
            if self._usage_texts is not None:
                return self._cgroups
        self._listing = pod_cgroups.list_pods(self._host, self._hierarchy, self._kubepods)
        return self._listing.pods

    def _is_listing_valid(self) -> bool:
        """True if the last listing was read, and no pod was added since."""
        listing = self._listing
        return (
            listing is not None and listing.pods is self._cgroups and pod_cgroups.has_same_counts(self._host, listing)
        )

    def read(
        self,
        listed: Sequence[PodCgroup],
        *,
        now: float,
        capacity: int | None,
        names: Mapping[str, str],
        fresh: bool,
        swap_total: int | None,
        short: Tier | None = None,
        api_pods: Sequence[Pod] | None = None,
    ) -> tuple[tuple[PodUsage, ...], tuple[Note, ...]]:
        """The usage of each pod, and what could not be read. The same tuple again if no pod was read.

        Args:
            listed: what `list_pods` returned.
            capacity: MemTotal.
            names: container names by container id.
            fresh: read every pod now, whatever the ages of its values.
            swap_total: SwapTotal. With 0 no pod has anything in swap, and one file less is read for each.
            short: the tier that acts on a shortage of memory or PIDs.
            api_pods: the pods that the API server lists.
        """
        if api_pods is not self._api_pods:
            self._api_pods, self._versions = api_pods, {pod.cgroup_uid: pod for pod in api_pods or ()}
        texts: Sequence[bytes | None] | None = self._usage_texts
        self._usage_texts = None
        closed = self._files.closed
        if texts is None:
            before = self._match(listed)
            texts = [self._usage_text(pod) for pod in before]
        else:
            before = list[CachedPod | None](self._pods)
        sample = _Sample(now, capacity, names, self._versions, fresh, short, swap_total, [])
        pods = [
            pod
            if pod is not None
            and not fresh
            and text is not None
            and now < (pod.due_at if short is None else pod.due_if_short_at[short])
            and not _moved(pod, text)
            else self._read_pod(cgroup, pod, text, sample)
            for cgroup, pod, text in zip(listed, before, texts, strict=True)
        ]
        self._store(listed, pods)
        if self._files.closed != closed:
            self._listing = None  # a cgroup was removed
        return self._result, tuple(sample.notes)

    def with_container_memory(self, usage: PodUsage) -> PodUsage:
        """`usage` with the working set of each container, read now."""
        return self._containers.with_memory(usage)

    def _match(self, listed: Sequence[PodCgroup]) -> list[CachedPod | None]:
        """The cached pod of each cgroup. Descriptors of removed cgroups are closed first: a cgroup that was made again
        at the same path must not be read through the old one."""
        known = {(pod.cgroup.path, pod.cgroup.inode): pod for pod in self._pods}
        matched = [known.pop((cgroup.path, cgroup.inode), None) for cgroup in listed]
        self._drop(pod.cgroup for pod in known.values())
        return matched

    def _store(self, listed: Sequence[PodCgroup], pods: Sequence[CachedPod | None]) -> None:
        before = self._pods
        self._pods = [pod for pod in pods if pod is not None]
        if len(self._pods) != len(pods):
            self._drop(cgroup for cgroup, pod in zip(listed, pods, strict=True) if pod is None)
            self._listing = None
        if listed is not self._cgroups or len(self._pods) != len(before):
            self._cgroups = listed
            self._usage_files = tuple([self._usage_file(pod.cgroup) for pod in self._pods])
        elif all(map(operator.is_, self._pods, before)):
            return
        self._result = tuple([pod.usage for pod in self._pods])
        self.protected_cache = protected_cache.protected_cache(
            self._host, self._hierarchy, self._kubepods, [found for pod in self._pods if (found := _protected_pod(pod))]
        )

    def _drop(self, cgroups: Iterable[PodCgroup]) -> None:
        for cgroup in cgroups:
            self._files.drop(self._usage_file(cgroup))

    def _usage_file(self, cgroup: PodCgroup) -> str:
        return f"{self._hierarchy.memory}{cgroup.path}/{self._hierarchy.memory_files.usage}"

    def _usage_text(self, pod: CachedPod | None) -> bytes | None:
        """None for a new pod, or if it is not readable."""
        if pod is None:
            return None
        try:
            return self._files.read(self._usage_file(pod.cgroup))
        except Unreadable:
            return None

    # --- one pod

    def _read_pod(
        self, cgroup: PodCgroup, before: CachedPod | None, text: bytes | None, sample: _Sample
    ) -> CachedPod | None:
        """Read a pod again, as far as the table asks for it; None if its cgroup is gone. `text` is its usage file."""
        directory = f"{self._hierarchy.memory}{cgroup.path}"
        had_processes = before is not None and before.had_processes
        changes: set[Change] = {Change.SAMPLE}
        if before is None or text is None or _moved(before, text):
            changes.add(Change.USAGE_MOVED)
        elif sample.short is not None:
            changes.add(Change.SHORT)
        try:
            values = self._read_values(cgroup, directory, before and before.values, changes, sample)
        except Unreadable as error:
            if error.gone and not self._host.exists(directory):
                return None
            sample.notes.append(Note(NoteKind.POD, str(error), about=cgroup.uid))
            unread = PodUsage(cgroup.uid, cgroup.qos, cgroup.path, read_at=sample.now, system_partition=cgroup.system)
            return CachedPod(cgroup, None, unread, float("-inf"), _ALWAYS_DUE, had_processes)
        # pids.current counts a process that has ended until its parent waits for it; cgroup.procs does not.
        had_processes = had_processes or values.containers.has_processes
        usage, notes = _pod_usage(cgroup, values, sample, visible=had_processes)
        sample.notes.extend(notes)
        due_at, due_if_short_at = float("-inf"), _ALWAYS_DUE
        if usage.memory_usage is not None and not values.containers.minimum:
            due_at = _due_at(usage, self._memory_age_s)
            due_if_short_at = {
                tier: _due_at(usage, min(self._memory_age_s, age_s)) for tier, age_s in pod_ages.SHORT_AGES_S.items()
            }
        return CachedPod(cgroup, values, usage, due_at, due_if_short_at, had_processes)

    def _read_values(
        self,
        cgroup: PodCgroup,
        directory: str,
        before: PodValues | None,
        changes: set[Change],
        sample: _Sample,
    ) -> PodValues:
        """Memory, and the values below it in the table if they are outdated. Raises Unreadable."""
        # Read with memory.stat, so that both are of one moment.
        usage = self._files.read(self._usage_file(cgroup))
        stat = self._host.read(f"{directory}/{self._hierarchy.memory_files.stat}")
        numbers = self._hierarchy.memory_files.numbers(usage, stat)
        swap = self._swap(directory, numbers, sample.swap_total)
        memory = PodMemory(sample.now, numbers, swap, self._stall(cgroup.path))
        version = sample.versions.get(cgroup.uid)

        def is_outdated(value: str, read_at: float, changes: Set[Change]) -> bool:
            age_s = sample.now - read_at
            return sample.fresh or pod_ages.is_outdated(value, changes, age_s=age_s, listed=version is not None)

        # Counted before the containers are listed: a container that comes in between changes the next count.
        counts = before.counts if before is not None else None
        if counts is None or is_outdated("counts", counts.read_at, changes):
            counts = PodCounts(sample.now, self._threads(cgroup.path), self._links(directory))
        containers = before.containers if before is not None else None
        if before is not None:
            changes |= _container_changes(before, counts, version, sample.names)
        if containers is None or is_outdated("containers", containers.read_at, changes):
            containers = self._containers.read(
                directory,
                cgroup.qos,
                names=sample.names,
                version=version,
                first_processes=before.first_processes if before is not None else {},
                now=sample.now,
            )
        return PodValues(usage, memory, counts, containers, containers.first_processes)

    def _threads(self, path: str) -> int | None:
        """None: gone, or without the pids controller."""
        if self._hierarchy.pids is None:
            return None
        try:
            return parse.parse_count(self._host.read(f"{self._hierarchy.pids}{path}/pids.current"))
        except Unreadable:
            return None

    def _links(self, directory: str) -> int | None:
        """None: gone."""
        try:
            return os.stat(self._host.real(directory)).st_nlink
        except OSError:
            return None

    def _swap(self, directory: str, numbers: MemoryNumbers, swap_total: int | None) -> int | None:
        """None: unknown, or the kernel does not count it."""
        if swap_total == 0:
            return 0
        if not self._swap_file:
            return numbers.swap
        try:
            return parse.parse_count(self._host.read(f"{directory}/{self._swap_file}"))
        except Unreadable:
            # A kernel without swap accounting has no such file anywhere. Tested once.
            kubepods = f"{self._hierarchy.memory}{self._kubepods.path}"
            self._swap_file = self._swap_file if self._host.exists(f"{kubepods}/{self._swap_file}") else ""
            return None

    def _stall(self, path: str) -> float | None:
        if self._hierarchy.unified is None or not self._stalls:
            return None
        try:
            return psi.some_avg10(self._host.read(f"{self._hierarchy.unified}{path}/memory.pressure"))
        except Unreadable:
            # A kernel without PSI has no such file anywhere; a hybrid tree may lack the path. Tested once.
            self._stalls = self._host.exists(f"{self._hierarchy.unified}{self._kubepods.path}/memory.pressure")
            return None


def _due_at(usage: PodUsage, age_s: float) -> float:
    """When the memory of the pod reaches this age.

    Each pod has a fixed moment in every period of that age, which its UID gives, and a reading is valid until the next
    one. So not all pods are due in one sample (10 ms for 110), also after some rare samples.
    """
    phase_s = age_s * int(usage.cgroup_uid.replace("-", "")[:4], 16) / 0x10000
    return usage.read_at + age_s - (usage.read_at - phase_s) % age_s


def _protected_pod(pod: CachedPod) -> ProtectedPod | None:
    """The pod if it has a memory.min and its memory is known."""
    if pod.values is None or not (minimum := pod.values.containers.minimum):
        return None
    usage, cache = pod.usage.memory_usage, pod.usage.memory_file_cache
    return None if usage is None or cache is None else ProtectedPod(pod.cgroup.path, usage, cache, minimum)


def _moved(pod: CachedPod, text: bytes) -> bool:
    """True if the usage differs from the cached one by `MOVED_BYTES`, or either is unknown."""
    if pod.values is not None and text == pod.values.usage:
        return False
    before, usage = pod.usage.memory_usage, parse.parse_count(text)
    return before is None or usage is None or abs(usage - before) >= pod_ages.MOVED_BYTES


def _container_changes(
    before: PodValues, counts: PodCounts, version: Pod | None, names: Mapping[str, str]
) -> set[Change]:
    """The changes after which containers are read again."""
    changes = set[Change]()
    known = before.containers
    if (counts.threads, counts.links) != (before.counts.threads, before.counts.links) or counts.threads is None:
        changes.add(Change.COUNTS_CHANGED)
    if known.version is not version:
        changes.add(Change.VERSION_CHANGED)
    if any(container.name is None and container.container_id in names for container in known.containers):
        changes.add(Change.NAME_FOUND)
    if any(process.young for process in before.first_processes.values()):
        changes.add(Change.YOUNG)
    return changes


def _pod_usage(cgroup: PodCgroup, values: PodValues, sample: _Sample, *, visible: bool) -> tuple[PodUsage, list[Note]]:
    """The values as the model's `PodUsage`, and what is unknown. `visible`: a process of the pod was visible once."""
    notes: list[Note] = []
    _, memory, counts, containers, _ = values
    if memory.numbers.reason:
        notes.append(Note(NoteKind.POD, memory.numbers.reason, about=cgroup.uid))
    process_count: int | None = sum([container.process_count or 0 for container in containers.containers])
    if not containers.complete:
        # Processes may be in cgroups that were not read. No pod has more processes than threads.
        process_count = max(process_count or 0, counts.threads or 0)
        limit = pod_containers.MAX_POD_CGROUPS
        message = f"more than {limit} cgroups below its containers: each thread counts as a process"
        notes.append(Note(NoteKind.POD, message, about=cgroup.uid))
    if counts.threads and not visible:
        process_count = None
        message = "process count unknown: its processes are outside our PID namespace"
        notes.append(Note(NoteKind.POD, message, about=cgroup.uid))
    usage = PodUsage(
        cgroup_uid=cgroup.uid,
        qos_class=cgroup.qos,
        cgroup=cgroup.path,
        read_at=memory.read_at,
        memory_working_set=memory.numbers.working_set,
        memory_usage=memory.numbers.usage,
        memory_unreclaimable=memory.numbers.unreclaimable,
        memory_file_cache=memory.numbers.file_cache,
        memory_swap=memory.swap,
        memory_swap_cached=memory.numbers.swap_cached,
        memory_protected=containers.protected,
        memory_limit=containers.limit,
        memory_stall_some_avg10=memory.stall_some_avg10,
        memory_request_estimate=pod_containers.estimate_request(
            cgroup.qos, containers.scores, containers.limit, sample.capacity
        ),
        process_count=process_count,
        thread_count=counts.threads,
        started_at=containers.started_at,
        containers=containers.containers,
        system_partition=cgroup.system,
    )
    return usage, notes

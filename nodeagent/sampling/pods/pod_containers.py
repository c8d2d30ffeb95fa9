"""The containers of a pod: their processes, and the facts of each container's first process.

Theory of operation. The kubelet gives the sandbox (pause) container oom_score_adj -998 and each other container a value
that follows from its memory request. So the container's first process shows whether it is the sandbox and, roughly, the
request. The sandbox is left out of process counts, as in the kubelet's own.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.model import ContainerUsage, Pod, PodUsage, QOSClass
from nodeagent.sampling.hostfs import cgroup_memory, cgroups, parse
from nodeagent.sampling.hostfs.cgroups import Hierarchy
from nodeagent.sampling.hostfs.host import Host, Unreadable
from nodeagent.sampling.pods import pod_ages
from nodeagent.sampling.pods.pod_ages import Change

SANDBOX_ADJ: Final = -998
"""The kubelet's oom_score_adj of a pod's sandbox (pause) container, and of no other."""
MAX_POD_CGROUPS: Final = 256
"""Cgroups that are read in one pod: 15 ms. A systemd inside a container makes a hundred. A pod that makes more must not
delay the sample of all other pods."""
# Processes of which the first is determined: the lowest PID stands at the start of cgroup.procs.
_FIRST_PIDS: Final = 64
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class FirstProcess(NamedTuple):
    """A container's first process. Its facts do not change while the container runs."""

    oom_score_adj: int | None
    started_at: float | None
    first_listed_at: float
    """When the container was listed for the first time."""
    read_at: float

    @property
    def young(self) -> bool:
        """True if runc may not have set the score yet."""
        return self.read_at - self.first_listed_at <= pod_ages.YOUNG_S


class PodContainers(NamedTuple):
    """The containers of a pod, without their memory."""

    read_at: float
    version: Pod | None
    """The pod as the API server listed it then; None if it did not."""
    containers: tuple[ContainerUsage, ...]
    scores: tuple[int | None, ...]
    """oom_score_adj of each container."""
    started_at: float | None
    limit: int | None
    minimum: int | None
    """The pod cgroup's memory.min; None: not readable, or v1."""
    protected: int | None
    """The larger of it and memory.low."""
    has_processes: bool
    """False in an empty pod, or if all processes are outside our PID namespace."""
    complete: bool
    """False: there are more cgroups below the containers than `MAX_POD_CGROUPS`, so processes are missing."""
    first_processes: Mapping[str, FirstProcess]
    """By the name of the container's cgroup."""


class _Processes(NamedTuple):
    """The processes of one container and of the cgroups that it made (a systemd inside makes some)."""

    pids: list[bytes]
    cgroups: int
    complete: bool


class ContainerReader:
    """Reads the containers of one hierarchy's pods."""

    def __init__(self, host: Host, hierarchy: Hierarchy) -> None:
        self._host = host
        self._hierarchy = hierarchy

    def read(
        self,
        directory: str,
        qos: QOSClass,
        *,
        names: Mapping[str, str],
        version: Pod | None,
        first_processes: Mapping[str, FirstProcess],
        now: float,
    ) -> PodContainers:
        """The containers of the pod cgroup at `directory`. A container that is removed meanwhile is left out.

        Args:
            names: container names by container id.
            version: the pod as the API server lists it.
            first_processes: those of the last reading; they are read again only if young.

        Raises:
            Unreadable: the pod cgroup is gone.
        """
        found = self._list(directory)
        unnamed = [name for name, identity in found if identity not in names]
        # Every container but the sandbox has a log link. The score is read all the same: a container that was just
        # made has no link yet, or none at the time of the last listing.
        likely_sandbox = unnamed[0] if len(unnamed) == 1 and len(found) > 1 else None
        members = self._members(directory, [name for name, _ in found])
        # Of a pod that the API server lists the request is known.
        scores = qos is QOSClass.BURSTABLE and version is None
        processes = self._first_processes(members, likely_sandbox, first_processes, now, scores=scores)
        sandboxes = {name for name, process in processes.items() if _is_sandbox(process, likely=name == likely_sandbox)}
        containers = [(name, identity) for name, identity in found if name in members and name not in sandboxes]
        protections = self._protections(directory)
        return PodContainers(
            read_at=now,
            version=version,
            containers=tuple(
                [
                    ContainerUsage(identity, names.get(identity), None, len(members[name].pids))
                    for name, identity in containers
                ]
            ),
            scores=tuple([processes[name].oom_score_adj if name in processes else None for name, _ in containers]),
            started_at=_earliest(processes[name] for name in sandboxes) or _earliest(processes.values()),
            limit=self._limit(directory),
            minimum=protections[0] if protections else None,
            protected=max([each for each in protections if each is not None], default=None),
            has_processes=any(each.pids for each in members.values()),
            complete=all(each.complete for each in members.values()),
            first_processes=processes,
        )

    def with_memory(self, usage: PodUsage) -> PodUsage:
        """`usage` with the working set of each of its containers, read now; None for a container that is gone."""
        files = self._hierarchy.memory_files
        directory = f"{self._hierarchy.memory}{usage.cgroup}"
        try:
            found = self._list(directory)
        except Unreadable:
            return usage
        working_sets: dict[str, int | None] = {}
        for name, identity in found:
            try:
                used = self._host.read(f"{directory}/{name}/{files.usage}")
                stat = self._host.read(f"{directory}/{name}/{files.stat}")
            except Unreadable:
                continue
            working_sets[identity] = files.numbers(used, stat).working_set
        containers = [
            container._replace(memory_working_set=working_sets.get(container.container_id))
            for container in usage.containers
        ]
        return usage._replace(containers=tuple(containers))

    def _list(self, directory: str) -> list[tuple[str, str]]:
        """(name, container id) of the containers' cgroups, sorted. Raises Unreadable."""
        names = sorted([name for name in self._host.listdir(directory) if len(name) >= cgroups.CONTAINER_ID_LENGTH])
        return [(name, identity) for name in names if (identity := cgroups.container_id(name)) is not None]

    def _members(self, directory: str, names: Sequence[str]) -> dict[str, _Processes]:
        """The processes of each container, by the name of its cgroup; a container that is gone is left out."""
        members: dict[str, _Processes] = {}
        cgroups_left = MAX_POD_CGROUPS
        for name in names:
            found = self._processes(f"{directory}/{name}", max_cgroups=max(1, cgroups_left))
            if found is not None:
                members[name] = found
                cgroups_left -= found.cgroups
        return members

    def _processes(self, directory: str, *, max_cgroups: int) -> _Processes | None:
        """None if the container is gone."""
        try:
            pids = self._host.read(f"{directory}/cgroup.procs").split()
        except Unreadable:
            return None
        below = cgroups.cgroups_below(self._host, directory, most=max_cgroups)
        for inner in below.directories[1:]:
            try:
                pids += self._host.read(f"{inner}/cgroup.procs").split()
            except Unreadable:
                continue  # threaded (the parent lists its processes), or gone
        return _Processes(pids, len(below.directories), below.complete)

    def _first_processes(
        self,
        members: Mapping[str, _Processes],
        likely_sandbox: str | None,
        before: Mapping[str, FirstProcess],
        now: float,
        *,
        scores: bool,
    ) -> dict[str, FirstProcess]:
        """The first process of each container, as far as it is of use.

        If the sandbox is likely, its process alone is read, because it gives the pod's start; the others only for
        their `scores`. Each file of a process that is read takes 0.9 KiB of kernel memory while the process runs.
        """
        processes: dict[str, FirstProcess] = {}
        for name, found in members.items():
            start = likely_sandbox is None or name == likely_sandbox
            if not (start or scores):
                continue
            process = before.get(name)
            if process is None or _is_outdated(process, now):
                first_listed_at = process.first_listed_at if process is not None else now
                process = self._first_process(found.pids, first_listed_at, now, start=start)
            processes[name] = process
        return processes

    def _first_process(self, pids: Sequence[bytes], first_listed_at: float, now: float, *, start: bool) -> FirstProcess:
        """The facts of a container's first process; None in both if there is none. `start`: read its start time too."""
        # The lowest PID is the first process unless the counter wrapped; others may have changed their score
        # themselves. 0 is a process outside our PID namespace.
        pid = min([pid for pid in map(parse.parse_count, pids[:_FIRST_PIDS]) if pid], default=None)
        if pid is None:
            return FirstProcess(None, None, first_listed_at, now)
        started_at = _started_at(self._host, pid) if start else None
        return FirstProcess(_oom_score_adj(self._host, pid), started_at, first_listed_at, now)

    def _limit(self, directory: str) -> int | None:
        """None: no limit, or not readable."""
        try:
            return cgroup_memory.parse_limit(self._host.read(f"{directory}/{self._hierarchy.memory_files.limit}"))
        except Unreadable:
            return None

    def _protections(self, directory: str) -> list[int | None]:
        """memory.min and memory.low, None for one that is not readable; empty on v1."""
        amounts: list[int | None] = []
        for name in self._hierarchy.memory_files.protections:
            try:
                amounts.append(cgroup_memory.parse_protection(self._host.read(f"{directory}/{name}")))
            except Unreadable:
                amounts.append(None)
        return amounts


def estimate_request(
    qos: QOSClass, scores: Sequence[int | None], limit: int | None, capacity: int | None
) -> int | None:
    """A pod's memory request in bytes as its cgroup and its processes show it, or None.

    BestEffort: 0. Guaranteed: the cgroup's limit, which the kubelet sets to the sum of the requests. Burstable: the
    kubelet gives each container oom_score_adj = 1000 - 1000 * request / MemTotal, kept within 3..999
    (pkg/kubelet/qos/policy.go); the inverse, summed over the containers, is right to 0.1% of MemTotal for each. None if
    a score is outside of that range (node-critical pods have -997), or there is no container.
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


def _is_outdated(process: FirstProcess, now: float) -> bool:
    changes = {Change.YOUNG} if process.young else set[Change]()
    return pod_ages.is_outdated("first_processes", changes, age_s=now - process.read_at, listed=False)


def _is_sandbox(process: FirstProcess, *, likely: bool) -> bool:
    return process.oom_score_adj == SANDBOX_ADJ or (process.oom_score_adj is None and likely)


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
    """Start of a process on CLOCK_BOOTTIME: field 22 of /proc/PID/stat (proc(5)). The command before it, in
    parentheses, may contain any character."""
    try:
        fields = host.read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except Unreadable:
        return None
    ticks = parse.parse_count(fields[19]) if len(fields) > 19 else None
    return None if ticks is None else ticks / _TICKS


def _earliest(processes: Iterable[FirstProcess]) -> float | None:
    return min((process.started_at for process in processes if process.started_at is not None), default=None)

"""What is in a pod's cgroup: its containers, how many processes they hold, and what their first processes tell.

Theory of operation. The kubelet gives the sandbox (pause) container oom_score_adj -998 and each other container a value
that follows from its memory request, so the container's first process tells both what the container is and, roughly,
what it asked for. The sandbox is left out of process counts, as in the kubelet's own. Of a pod that the API tells of
(`Told`) no process is asked where it is certain which container is the sandbox: each file that is looked at costs
0.9 KiB of kernel memory for as long as it is there.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.model import ContainerKind, ContainerUsage, Pod, QOSClass
from nodeagent.sampling.hostfs.cgroups import CONTAINER_ID_LENGTH, Hierarchy, cgroups_below, container_id, parse_limit
from nodeagent.sampling.hostfs.host import Host, Unreadable
from nodeagent.sampling.hostfs.parse import parse_count

SANDBOX_ADJ: Final = -998
"""What the kubelet gives a pod's sandbox (pause) container, and no other."""

# How long what is known of a pod's containers may be kept while nothing shows that it changed: reading it is two thirds
# of a pod's full reading. The API tells of a new container by a new version of its pod.
_INSIDE_S: Final = 60.0
_TOLD_S: Final = 300.0
UNKNOWN_LINKS: Final = -1
MOST_CGROUPS: Final = 256
"""Of one pod that are looked into: 15 ms. A systemd inside a container makes a hundred; a pod that makes more must not
hold up the look at all others."""
# A container's oom_score_adj is the shim's until runc sets it, some ms after the process is in the cgroup. From this
# age on it is taken as final and not read again.
_SETTLED_S: Final = 5.0
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class ContainerFacts(NamedTuple):
    """What a container's first process tells. It does not change while the container lives."""

    oom_score_adj: int | None
    started_at: float | None
    seen_at: float
    """When the container was first seen."""
    read_at: float


class ApiPodFacts(NamedTuple):
    """A pod whose request and start the API tells."""

    pod: Pod
    started_at: float


class PodContainers(NamedTuple):
    """What is in a pod's cgroup, but for its memory."""

    read_at: float
    checked_at: float
    """When threads and links were last seen to be these."""
    links: int
    """Of its directory: its child cgroups are some of them; or `UNKNOWN_LINKS`."""
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
    pod: Pod | None
    """What the API told of the pod, which was not asked of the host then."""
    left_out: bool
    """There are more cgroups below its containers than `MOST_CGROUPS`: there are more processes than were counted."""
    sandbox: str | None
    """The container id that was taken for the sandbox because nobody names it; None when the processes were asked."""


class ContainerReader:
    """Looks into the pods of one hierarchy."""

    def __init__(self, host: Host, hierarchy: Hierarchy, *, limits: bool) -> None:
        """`limits`: read the memory limit also of pods that the API tells of."""
        self._host = host
        self._hierarchy = hierarchy
        self._limits = limits

    def still_valid(
        self, inside: PodContainers, names: Mapping[str, str], known: ApiPodFacts | None, now: float
    ) -> bool:
        """Whether what was told may still be right, and nothing more is to be learned, as far as that is to be seen
        without a look at the pod."""
        if inside.threads is None or not 0 <= now - inside.read_at < (_INSIDE_S if known is None else _TOLD_S):
            return False
        if inside.pod is not (known.pod if known is not None else None) or inside.sandbox in names:
            return False
        settled = all(fact.read_at - fact.seen_at > _SETTLED_S for fact in inside.facts.values())
        return settled and not any(each.name is None and each.container_id in names for each in inside.containers)

    def read(
        self,
        place: str,
        qos: QOSClass,
        links: int,
        threads: int | None,
        before: Mapping[str, ContainerFacts],
        names: Mapping[str, str],
        known: ApiPodFacts | None,
        now: float,
    ) -> PodContainers:
        """Look at the containers. Those that vanish meanwhile are left out; raises Unreadable when the pod did."""
        children = sorted([name for name in self._host.listdir(place) if len(name) >= CONTAINER_ID_LENGTH])
        found = [(name, identity) for name in children if (identity := container_id(name)) is not None]
        unnamed = [name for name, identity in found if identity not in names]
        # Every container has a log link but the sandbox. It is asked all the same: a container that was just made has
        # none yet, or none that we listed.
        sandbox = unnamed[0] if len(unnamed) == 1 and len(found) > 1 else None
        certain = certain_sandbox([identity for _, identity in found], names, known.pod) if known is not None else None
        containers: list[ContainerUsage] = []
        scores: list[int | None] = []
        facts: dict[str, ContainerFacts] = {}
        visible, sandbox_start, cgroups_left, left_out = False, None, MOST_CGROUPS, False
        for name, identity in found:
            try:
                processes = self._host.read(f"{place}/{name}/cgroup.procs").split()
            except Unreadable:
                continue
            below = cgroups_below(self._host, f"{place}/{name}", most=max(1, cgroups_left))
            cgroups_left -= len(below.places)
            left_out = left_out or not below.complete
            processes += self._processes(below.places[1:])
            visible = visible or bool(processes)
            if certain is not None:
                if identity != certain:
                    containers.append(ContainerUsage(identity, names.get(identity), None, len(processes)))
                continue
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
        if certain is not None and known is not None:
            started = known.started_at
        return PodContainers(
            read_at=now,
            checked_at=now,
            links=links,
            limit=self._limit(place) if self._limits or known is None else None,
            threads=threads,
            containers=tuple(containers),
            scores=tuple(scores),
            started_at=started,
            visible=visible,
            facts=facts,
            pod=known.pod if known is not None else None,
            left_out=left_out,
            sandbox=certain,
        )

    def _processes(self, places: Iterable[str]) -> list[bytes]:
        """PIDs in the cgroups that a container has made (a systemd inside makes some)."""
        processes: list[bytes] = []
        for place in places:
            try:
                processes += self._host.read(f"{place}/cgroup.procs").split()
            except Unreadable:
                continue  # threaded (its processes are listed by the parent), or gone
        return processes

    def _facts(
        self, before: ContainerFacts | None, processes: list[bytes], now: float, *, score: bool, start: bool
    ) -> ContainerFacts:
        """Ask the container's first process for its score, or since when it runs, or both."""
        # The lowest PID is the container's first process but for a wrap of the counter; others may have changed their
        # score themselves. 0 is a process outside our PID namespace.
        first = min([pid for pid in map(parse_count, processes[:64]) if pid], default=None)
        seen_at = now if before is None else before.seen_at
        if first is None:
            return ContainerFacts(None, None, seen_at, now)
        return ContainerFacts(
            oom_score_adj=_oom_score_adj(self._host, first) if score else None,
            started_at=_started_at(self._host, first) if start else None,
            seen_at=seen_at,
            read_at=now,
        )

    def links(self, place: str) -> int:
        """Directories of cgroupfs have 2 + (number of children) links."""
        try:
            return os.stat(self._host.real(place)).st_nlink
        except OSError:
            return UNKNOWN_LINKS  # gone meanwhile

    def _limit(self, place: str) -> int | None:
        try:
            return parse_limit(self._host.read(f"{place}/{self._hierarchy.memory_files.limit}"))
        except Unreadable:
            return None  # the model's None: none, or not readable


def api_pod_facts(
    api_pods: Iterable[Pod], *, now: float, wall_offset: float, before: Mapping[str, ApiPodFacts]
) -> dict[str, ApiPodFacts]:
    """The pods of which the API tells enough, by `cgroup_uid`. One that says that it started before this boot, or has
    yet to start, is left out: the node knows better. A start that was told `before` stays on CLOCK_BOOTTIME where it
    was, however the wall clock jumps."""
    known = {}
    for pod in api_pods:
        last = before.get(pod.cgroup_uid)
        if last is not None and last.pod.started_wall == pod.started_wall:
            known[pod.cgroup_uid] = last if last.pod is pod else last._replace(pod=pod)
        elif pod.started_wall is not None and 0 <= pod.started_wall - wall_offset <= now:
            known[pod.cgroup_uid] = ApiPodFacts(pod, pod.started_wall - wall_offset)
    return known


def certain_sandbox(found: Sequence[str], names: Mapping[str, str], pod: Pod) -> str | None:
    """Which of the container ids in a pod's cgroup is its sandbox, where that is certain; None where it is not.

    It is the only one that neither the API nor a log link (`names`) names, with every container that is to run there by
    the id that the API has: so it is none that was just made, as on a runtime without sandboxes. An ephemeral container
    stands in the spec before it is made, without an id.
    """
    lasting = {container.container_id for container in pod.containers if container.kind is not ContainerKind.INIT}
    if pod.ephemeral or not lasting or not lasting <= set(found):
        return None
    told_of = {container.container_id for container in pod.containers}
    unnamed = [identity for identity in found if identity not in names and identity not in told_of]
    return unnamed[0] if len(unnamed) == 1 else None


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
    ticks = parse_count(fields[19]) if len(fields) > 19 else None
    return None if ticks is None else ticks / _TICKS


def _earliest(facts: Iterable[ContainerFacts]) -> float | None:
    return min((fact.started_at for fact in facts if fact.started_at is not None), default=None)

"""Reads the whole node into one `NodeSnapshot`, cheaply and again and again.

Promises:

1. A snapshot has an observation for every signal; what could not be read is None with its reason. `sample` and
   `sample_node` never raise, whatever the host's files say.
2. The clock that stamps the numbers is read before them, so nothing is younger than it says.
3. Descriptors are bounded (`_KEPT_SHARE` of the process' limit, at most `_KEPT_MOST`) and closed when their cgroup
   goes, and all by `close`.
4. What rarely changes (hierarchies, kubepods, disk layout) is looked up again every `_RELOOK_S`, every `_MISSING_S`
   while there is no kubepods, and at once when the pods could not be listed.

One owner: a Sampler is not thread-safe.
"""

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import CgroupUsage, NodeSnapshot, Note, NoteKind, Observation, Pod, PodUsage, PodView, Signal
from nodeagent.sampling.hostfs import cgroups
from nodeagent.sampling.hostfs.fd_cache import FdCache
from nodeagent.sampling.hostfs.host import Clocks, FileSystem, Host, Statvfs, Unreadable
from nodeagent.sampling.node import filesystems, memory, pids, psi, signals
from nodeagent.sampling.pods import pod_names, pod_reader

_RELOOK_S: Final = 60.0
# An agent may be up before the kubelet. A minute without a sight of its pods was lost to the OOM killer on a ramp of
# 50 MiB/s: the pods were known from the API, but not what they use. A relook takes 0.2 ms.
_MISSING_S: Final = 1.0
# A kept cgroup descriptor holds 4.3 KiB of kernel memory (MEASURED, the kernel): one for each of 1,000 pods is
# 4.3 MiB.
_KEPT_MOST: Final = 2048
_KEPT_SHARE: Final = 0.5
# Cgroups outside kubepods that a report names: the largest of the first two levels.
_TOP_CGROUPS: Final = 10
# A node has some 80 services: three files of each are 1 ms, too much at 50 Hz.
_TOP_S: Final = 30.0


class HostLayout(NamedTuple):
    """What rarely changes."""

    hierarchy: cgroups.Hierarchy
    kubepods: cgroups.Kubepods | None
    no_kubepods: str
    memory: memory.MemoryPaths
    layout: filesystems.Layout
    stall_files: psi.StallFiles
    notes: tuple[Note, ...]
    looked_at: float


class FilesystemReading(NamedTuple):
    """The last look at the file systems."""

    layout: filesystems.Layout
    observations: Mapping[Signal, Observation]


class NodeLimits(NamedTuple):
    """The last look at what rarely changes."""

    places: memory.MemoryPaths
    memory: memory.MemoryLimits
    mem_available: Observation
    pids: int | None


class Sampler:
    """The node below one host root."""

    def __init__(
        self,
        host: Host,
        config: SamplingConfig,
        *,
        node_name: str,
        boottime: Callable[[], float] | None = None,
        wall: Callable[[], float] | None = None,
        statvfs: Statvfs | None = None,
        pod_stalls: bool = True,
        pod_limits: bool = True,
    ) -> None:
        """`boottime` and `wall` default to the host's clocks, `statvfs` to a direct call, which may hang on a dead
        mount: a daemon gives one with a deadline. `pod_stalls`: read each pod's own memory pressure as well, one file
        more for each, which only a threshold with `requireStall` needs. `pod_limits`: read each pod's own memory limit
        also where the API tells of the pod: for the same threshold, and for reports."""
        self._host = host
        self._config = config
        self._node_name = node_name
        self._clocks = host.clocks if boottime is None else lambda: Clocks(boottime(), 0.0)
        self._wall = wall or host.wall
        self._statvfs = statvfs or host.statvfs
        self._pod_stalls = pod_stalls
        self._pod_limits = pod_limits
        self._kept = FdCache(host, limit=_kept_limit())
        self._names = pod_names.PodNames(host, pod_logs_dir=config.pod_logs_dir)
        self._around: HostLayout | None = None
        self._disks: FilesystemReading | None = None
        self._limits: NodeLimits | None = None
        self._pod_reader: pod_reader.PodReader | None = None
        self._usages: tuple[PodUsage, ...] = ()
        """Of the last sample."""
        self._found: Sequence[pod_reader.PodCgroup] = ()
        self._uids: frozenset[str] = frozenset()
        """Of what was found."""
        self._mirrors = pod_names.Mirrors()
        self._joined: pod_names.JoinedPods | None = None
        self._top: tuple[CgroupUsage, ...] | None = None
        self._top_at = 0.0

    @property
    def kept_descriptors(self) -> int:
        """How many files are held open now."""
        return len(self._kept)

    def close(self) -> None:
        """Close every descriptor. A later sample would open them again."""
        self._kept.close()

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def relook(self) -> None:
        """Look at the next sample where everything is: after a mount, a cgroup root or a runtime changed."""
        self._around = None

    def surroundings(self) -> HostLayout:
        """Where the controllers, the pods and the disks are, as the samples see them."""
        return self._surroundings(self._clocks().boottime)

    def with_container_memory(self, usage: PodUsage) -> PodUsage:
        """`usage` with each container's working set read now: what the text of an eviction names. A sample leaves them
        out, because reading them for every pod would take as long as all the rest."""
        return self._pod_reader.with_container_memory(usage) if self._pod_reader is not None else usage

    # --- samples

    def sample_node(self, *, disks: bool = True, limits: bool = True) -> NodeSnapshot:
        """Only the node's signals: no stalls, no memory by kind, no pods, no cgroups. Without `disks` those of the file
        systems are the last ones, with the time of that: reading them, in threads, takes as long as the rest. Without
        `limits` so are MemTotal, pid_max, threads-max and the limit of all pods, which rarely change, and MemAvailable.
        """
        # At once: of a machine that sleeps between two of them it would not be known when.
        (now, suspended_s), wall_time = self._clocks(), self._wall()
        around = self._surroundings(now)
        if disks or self._disks is None or self._disks.layout is not around.layout:
            readings = filesystems.read(around.layout, self._statvfs, now=now)
            self._disks = FilesystemReading(around.layout, signals.observe_disks(readings))
        if limits or self._limits is None or self._limits.places is not around.memory:
            self._limits = self._read_limits(around.memory, now)
        known, places = self._limits, around.memory
        facts = signals.NodeFacts(
            limits=known.memory,
            places=places,
            memory=memory.read_memory(self._kept, places),
            pids=pids.read_pids(self._kept, known.pids, now=now),
            now=now,
        )
        return NodeSnapshot(
            node=self._node_name,
            taken_at=now,
            wall_time=wall_time,
            observations=signals.observations(facts, self._disks.observations),
            mem_available=known.mem_available,
            layout=around.layout.kind,
            notes=self._host.notes + around.notes,
            suspended_s=suspended_s,
        )

    def sample(
        self,
        api_pods: Sequence[Pod] | None = None,
        pods_synced_at: float | None = None,
        *,
        fresh: bool = True,
        late_s: float = 0.0,
        node: NodeSnapshot | None = None,
    ) -> NodeSnapshot:
        """The whole node.

        `api_pods` are the pods of this node as the API knows them, current at `pods_synced_at`; None: all pods come
        from the host. With `fresh` every pod is read now; without it a pod that barely moved keeps its last reading
        (see `PodReader`), with the time of that; for `late_s` longer than usual where there is haste. `node` is what
        `sample_node` just gave; without it the node is read.
        """
        snapshot = node if node is not None else self.sample_node()
        now = snapshot.taken_at
        around = self._surroundings(now)
        stalls, stall_notes = psi.read_psi(self._kept, around.stall_files, now=now)
        usages, notes = self._look(around, snapshot, api_pods, fresh=fresh, late_s=late_s)
        if usages and self._names.reason and api_pods is None:
            notes += (Note(NoteKind.PODS, f"pods have no names: {self._names.reason}"),)
        return snapshot._replace(
            memory=memory.read_node(self._host, self._kept),
            stalls=stalls,
            pods=self._join(usages, self._confirmed(api_pods), snapshot),
            pods_synced_at=pods_synced_at if api_pods is not None else None,
            cgroups=self._top_cgroups(around, now),
            notes=snapshot.notes + stall_notes + notes,
        )

    def node_last(self, snapshot: NodeSnapshot) -> NodeSnapshot:
        """The snapshot with the node's signals read now, after its pods: what a pod lets go of meanwhile is counted
        twice, as held and as free, and not as neither. It is of that time: looking at the pods of a node in trouble may
        take a second, and what is newer than its snapshot is not believed."""
        return assemble_snapshot(snapshot, self.sample_node())

    def read_again(
        self,
        before: NodeSnapshot,
        api_pods: Sequence[Pod],
        pods_synced_at: float | None,
        *,
        pod_uids: frozenset[str],
        disks: bool,
    ) -> NodeSnapshot:
        """The node now, with these few pods alone: for a second look right before acting, at a fraction of a sample.
        `disks` as in `sample_node`.

        A pod's object is the API's newest (`api_pods`); its usage is that of `before`, or None when its cgroup is gone.
        A pod that the API no longer has is left out.
        """
        top = self.surroundings().hierarchy.memory
        usages = {view.pod.uid: view.usage for view in before.pods if view.pod.uid in pod_uids}
        views = []
        for pod in self._confirmed(api_pods) or ():
            if pod.uid in usages:
                usage = usages[pod.uid]
                there = usage is not None and top is not None and self._host.exists(top + usage.cgroup)
                views.append(PodView(pod, usage if there else None))
        return self.sample_node(disks=disks)._replace(pods=tuple(views), pods_synced_at=pods_synced_at)

    # --- parts

    def _read_limits(self, places: memory.MemoryPaths, now: float) -> NodeLimits:
        found = memory.read_limits(self._kept, places)
        by_kernel = signals.observe_mem_available(found, now=now)
        return NodeLimits(places, found, by_kernel, pids.read_limit(self._kept))

    def _surroundings(self, now: float) -> HostLayout:
        around = self._around
        if around is not None and now - around.looked_at < (_RELOOK_S if around.kubepods else _MISSING_S):
            return around
        hierarchy = cgroups.detect_hierarchy(self._host)
        kubepods, missing = cgroups.find_kubepods(self._host, hierarchy, cgroup_root=self._config.cgroup_root)
        starved: list[str] = []

        def statvfs(path: str) -> FileSystem:
            try:
                return self._statvfs(path)
            except Unreadable as error:
                if error.errno == errno.EAGAIN:
                    starved.append(path)
                raise

        layout = filesystems.detect_layout(self._host, self._config, statvfs)
        files = psi.files(self._host, hierarchy, kubepods)
        if around is None or (around.hierarchy, around.kubepods) != (hierarchy, kubepods):
            self._kept.close()
            self._pod_reader = self._reader(hierarchy, kubepods) if kubepods else None
        notes = cgroups.hierarchy_notes(hierarchy, kubepods) + (
            (Note(NoteKind.DISKS, layout.note),) if layout.note else ()
        )
        places = memory.places(hierarchy, kubepods, no_kubepods=missing)
        # What could not be asked for want of a PID is asked soon: until then disks are not where they seem to be.
        looked_at = now - max(0.0, _RELOOK_S - _MISSING_S) if starved else now
        self._around = HostLayout(hierarchy, kubepods, missing, places, layout, files, notes, looked_at)
        return self._around

    def _reader(self, hierarchy: cgroups.Hierarchy, kubepods: cgroups.Kubepods) -> pod_reader.PodReader:
        # What is handed out again must not be too old for a decision, also when it is made in haste.
        carry_s = min(pod_reader.CARRY_S, self._config.stale_after_s * 2 / 3)
        return pod_reader.PodReader(
            self._host,
            hierarchy,
            kubepods,
            self._kept,
            stalls=self._pod_stalls,
            limits=self._pod_limits,
            carry_s=carry_s,
        )

    def _look(
        self,
        around: HostLayout,
        snapshot: NodeSnapshot,
        api_pods: Sequence[Pod] | None,
        *,
        fresh: bool,
        late_s: float,
    ) -> tuple[tuple[PodUsage, ...], tuple[Note, ...]]:
        """The pods as the kernel knows them; the same tuple as long as none was read anew."""
        now = snapshot.taken_at
        if self._pod_reader is None:
            return (), (Note(NoteKind.PODS, around.no_kubepods),)
        try:
            found = self._pod_reader.find()
        except Unreadable as error:
            self._around = None
            return (), (Note(NoteKind.PODS, f"the pods' cgroup cannot be listed: {error}"),)
        if found is not self._found:
            self._found, self._uids = found, frozenset([cgroup.uid for cgroup in found])
        self._names.refresh(self._uids, now=now)
        usages, notes = self._pod_reader.read(
            found,
            now=now,
            capacity=snapshot.mem_available.capacity,
            names=self._names.containers,
            fresh=fresh,
            late_s=late_s,
            api_pods=self._confirmed(api_pods),
            wall_offset=snapshot.wall_time - now,
        )
        if usages is not self._usages:
            self._usages = usages
            self._names.missed = any(c.name is None for usage in usages for c in usage.containers)
        return usages, notes

    def _confirmed(self, api_pods: Sequence[Pod] | None) -> Sequence[Pod] | None:
        """The API's pods with the cgroups of mirror pods, by the pod cgroups and log directories of the last sample."""
        if api_pods is None:
            return None
        return self._mirrors.confirm(api_pods, uids=self._uids, names=self._names.pods)

    def _join(
        self, usages: tuple[PodUsage, ...], api_pods: Sequence[Pod] | None, snapshot: NodeSnapshot
    ) -> tuple[PodView, ...]:
        """Joined once for the same objects: a calm turn has those of the last one."""
        joined = self._joined
        if joined is None or usages is not joined.usages or api_pods is not joined.api_pods:
            offset = snapshot.wall_time - snapshot.taken_at
            joined = self._joined = pod_names.join_pods(
                usages, api_pods, names=self._names.pods, wall_offset=offset, before=joined
            )
        return joined.views

    def _top_cgroups(self, around: HostLayout, now: float) -> tuple[CgroupUsage, ...]:
        """They only say where memory is that no pod holds, so they may be `_TOP_S` old."""
        if self._top is None or not 0 <= now - self._top_at < _TOP_S:
            self._top = cgroups.largest_outside(self._host, around.hierarchy, around.kubepods, most=_TOP_CGROUPS)
            self._top_at = now
        return self._top


def assemble_snapshot(snapshot: NodeSnapshot, node: NodeSnapshot) -> NodeSnapshot:
    """The snapshot with the node's signals, and the time, of a later look at the node alone."""
    return snapshot._replace(
        taken_at=node.taken_at,
        wall_time=node.wall_time,
        observations=node.observations,
        mem_available=node.mem_available,
        suspended_s=node.suspended_s,
    )


def _kept_limit() -> int:
    soft = os.sysconf("SC_OPEN_MAX")  # RLIMIT_NOFILE without the resource module, 0.3 ms of a report; -1: no limit
    return _KEPT_MOST if soft < 0 else min(_KEPT_MOST, int(soft * _KEPT_SHARE))

"""Reads the whole node into one `NodeSnapshot`, again and again, at a low price.

Promises:

1. A snapshot has an observation for every signal; a value that could not be read is None with its reason. `sample` and
   `sample_node` never raise, whatever the host's files contain.
2. The clock is read before the files, so no value is newer than its time.
3. The number of open descriptors is bounded (`_FD_SHARE` of the process's limit, at most `_MAX_FDS`). A descriptor is
   closed when its cgroup is removed, and all of them by `close`.
4. The host layout (hierarchies, kubepods, file systems) is detected again every `_LAYOUT_S`, every `_NO_KUBEPODS_S`
   while there is no kubepods, soon if file systems are unknown because one did not answer, and at once if the pods
   could not be listed.

Not thread-safe: one owner.
"""

import errno
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import (
    CgroupUsage,
    DiskLayout,
    NodeSnapshot,
    Note,
    NoteKind,
    Observation,
    OwnLimit,
    Pod,
    PodUsage,
    PodView,
    Signal,
    Tier,
)
from nodeagent.sampling.hostfs import cgroups
from nodeagent.sampling.hostfs.fd_cache import FdCache
from nodeagent.sampling.hostfs.host import Clocks, FileSystem, Host, Statvfs, Unreadable
from nodeagent.sampling.node import filesystems, memory, page_cache, pids, psi, signals, zfs_cache
from nodeagent.sampling.pods import pod_join, pod_names
from nodeagent.sampling.pods.own_limits import OwnLimitReader
from nodeagent.sampling.pods.pod_cache import PodCache
from nodeagent.sampling.pods.pod_cgroups import PodCgroup
from nodeagent.sampling.snapshot import PodReading, SnapshotParts, assemble_snapshot

# A detection takes 0.2 ms.
_LAYOUT_S: Final = 60.0
# An agent may start before the kubelet. With a minute here, a ramp of 50 MiB/s ended at the OOM killer: the API server
# listed the pods, but their usage was unknown.
_NO_KUBEPODS_S: Final = 1.0
# A kept cgroup descriptor takes 4.3 KiB of kernel memory (performance.md R4): 1,000 pods take 4.3 MiB.
_MAX_FDS: Final = 2048
_FD_SHARE: Final = 0.5
# Cgroups outside kubepods that a report lists: the largest of the first two levels.
_TOP_CGROUPS: Final = 10
# A node has some 80 services: three files of each take 1 ms, too much at 50 Hz.
_TOP_CGROUPS_S: Final = 30.0


class HostLayout(NamedTuple):
    """Where the controllers, the pods and the file systems are; rarely changes."""

    hierarchy: cgroups.Hierarchy
    kubepods: cgroups.Kubepods | None
    no_kubepods: str
    """Why `kubepods` is None."""
    memory: memory.MemoryPaths
    layout: filesystems.Layout
    stall_files: psi.StallFiles
    notes: tuple[Note, ...]
    detected_at: float
    page_cache_blocked: str = ""
    """Why page cache of pods cannot be reclaimed; empty if it can."""
    zfs: bool = False
    """The cache of ZFS is part of the node's memory."""


class FilesystemReading(NamedTuple):
    """The last reading of the file systems."""

    layout: filesystems.Layout
    observations: Mapping[Signal, Observation]


class NodeLimits(NamedTuple):
    """The last reading of the limits, which rarely change."""

    paths: memory.MemoryPaths
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
    ) -> None:
        """`boottime` and `wall` default to the host's clocks. `statvfs` defaults to a direct call, which may hang on a
        dead mount; a daemon passes one with a timeout. `pod_stalls`: read each pod's memory pressure too, one file more
        for each pod, which only a threshold with `requireStall` needs."""
        self._host = host
        self._config = config
        self._node_name = node_name
        self._clocks = host.clocks if boottime is None else lambda: Clocks(boottime(), 0.0)
        self._wall = wall or host.wall
        self._statvfs = statvfs or host.statvfs
        self._pod_stalls = pod_stalls
        self._files = FdCache(host, limit=_max_descriptors())
        self._names = pod_names.PodNames(host, pod_logs_dir=config.pod_logs_dir)
        self._mirrors = pod_join.MirrorPods()
        self._layout: HostLayout | None = None
        self._filesystems: FilesystemReading | None = None
        self._limits: NodeLimits | None = None
        self._pods: PodCache | None = None
        self._own_limits: OwnLimitReader | None = None
        """None until they are read."""
        self._cgroups: Sequence[PodCgroup] = ()
        """Of the last sample, as the next three."""
        self._uids: frozenset[str] = frozenset()
        self._usages: tuple[PodUsage, ...] = ()
        self._joined: pod_join.JoinedPods | None = None
        self._top: tuple[CgroupUsage, ...] | None = None
        self._top_at = 0.0

    def close(self) -> None:
        """Close every descriptor. A later sample would open them again."""
        self._files.close()
        self._close_own_limits()

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def host_layout(self) -> HostLayout:
        """The layout that the samples use."""
        return self._detected(self._clocks().boottime)

    def with_container_memory(self, usage: PodUsage) -> PodUsage:
        """`usage` with each container's working set, read now: for the text of an eviction. A sample has none, because
        reading them for every pod would take as long as the rest of it."""
        return self._pods.with_container_memory(usage) if self._pods is not None else usage

    def working_set_reader(self, signal: Signal) -> Callable[[], int | None]:
        """Reads a memory signal by the working set. It may be called in another thread."""
        host, paths = self._host, self.host_layout().memory
        return lambda: page_cache.working_set_available(host, paths, signal)

    # --- samples

    def sample_node(self, *, disks: bool = True, limits: bool = True) -> NodeSnapshot:
        """The node's signals alone: no stalls, no memory by kind, no pods, no cgroups.

        Args:
            disks: read the file systems; else the last observations are used, with their time. Reading them, in
                threads, takes as long as the rest.
            limits: read MemTotal, pid_max, threads-max, the limit of all pods and MemAvailable; else the last ones are
                used.
        """
        # Together: otherwise a suspend in between could not be dated.
        (now, suspended_s), wall_time = self._clocks(), self._wall()
        layout = self._detected(now)
        if disks or self._filesystems is None or self._filesystems.layout is not layout.layout:
            readings = filesystems.read_filesystems(layout.layout, self._statvfs, now=now)
            self._filesystems = FilesystemReading(layout.layout, signals.observe_disks(readings))
        if limits or self._limits is None or self._limits.paths is not layout.memory:
            self._limits = self._read_limits(layout, now)
        facts = signals.NodeFacts(
            limits=self._limits.memory,
            paths=layout.memory,
            memory=memory.read_memory(self._files, layout.memory),
            pids=pids.read_pids(self._files, self._limits.pids, now=now),
            now=now,
        )
        node = NodeSnapshot(
            node=self._node_name,
            taken_at=now,
            wall_time=wall_time,
            observations=signals.observations(facts, self._filesystems.observations),
            mem_available=self._limits.mem_available,
            layout=layout.layout.kind,
            notes=self._host.notes + layout.notes,
            suspended_s=suspended_s,
            allocatable_by_kernel=signals.observe_allocatable_by_kernel(facts),
            page_cache_blocked=layout.page_cache_blocked,
        )
        return node.with_protected_cache(self._protected_cache())

    def sample(
        self,
        api_pods: Sequence[Pod] | None = None,
        pods_synced_at: float | None = None,
        *,
        fresh: bool = True,
        node: NodeSnapshot | None = None,
    ) -> NodeSnapshot:
        """The node and its pods, without the parts that only a running agent has.

        Args:
            api_pods: as in `read_pods`.
            pods_synced_at: the time at which that list was current.
            fresh: as in `read_pods`.
            node: the result of `sample_node`; None: the node is read.
        """
        node = node if node is not None else self.sample_node()
        pods = self.read_pods(node, api_pods, fresh=fresh)
        synced_at = pods_synced_at if api_pods is not None else None
        return assemble_snapshot(SnapshotParts(node, pods, pods_synced_at=synced_at))

    def read_pods(
        self,
        node: NodeSnapshot,
        api_pods: Sequence[Pod] | None = None,
        *,
        fresh: bool = True,
        short: Tier | None = None,
    ) -> PodReading:
        """The pods, and what is read together with them, right after `node`.

        Args:
            api_pods: the pods of this node as the API server lists them; None: all pods come from the host.
            fresh: read every pod now; else a pod that barely moved keeps its last reading, with its time
                (`pod_ages.AGES`).
            short: the tier that acts on a shortage of memory or PIDs: such a reading is younger.
        """
        now = node.taken_at
        layout = self._detected(now)
        stalls, stall_notes = psi.read_psi(self._files, layout.stall_files, now=now)
        usages, notes = self._read_pods(layout, node, api_pods, fresh=fresh, short=short)
        if usages and self._names.reason and api_pods is None:
            notes += (Note(NoteKind.PODS, f"pods have no names: {self._names.reason}"),)
        return PodReading(
            pods=self._join(usages, self._confirmed(api_pods), node),
            memory=memory.read_node_memory(self._host, self._files),
            stalls=stalls,
            cgroups=self._top_cgroups(layout, now),
            notes=stall_notes + notes,
            protected_cache=self._protected_cache(),
        )

    def read_again(self, before: Sequence[PodView], api_pods: Sequence[Pod], *, pod_uids: frozenset[str]) -> PodReading:
        """These pods alone: for the recheck right before acting, at a fraction of a sample's price.

        A pod's object is the newest of the API server (`api_pods`); its usage is that of `before`, or None if its
        cgroup is gone. A pod that the API server does not list is left out.
        """
        root = self.host_layout().hierarchy.memory
        usages = {view.pod.uid: view.usage for view in before if view.pod.uid in pod_uids}
        views = []
        for pod in self._confirmed(api_pods) or ():
            if pod.uid in usages:
                usage = usages[pod.uid]
                exists = usage is not None and root is not None and self._host.exists(root + usage.cgroup)
                views.append(PodView(pod, usage if exists else None))
        return PodReading(tuple(views))

    def read_own_limits(
        self, pods: Sequence[PodUsage], *, now: float, fresh: Collection[str] = ()
    ) -> Mapping[str, tuple[OwnLimit, ...]]:
        """The own limits of these pods, by the UID of the cgroup (`OwnLimitReader.read`). Right after a node sample."""
        hierarchy, limits = self._detected(now).hierarchy, self._limits
        if hierarchy.memory is None or limits is None:
            return {}
        if self._own_limits is None:
            self._own_limits = OwnLimitReader(self._host, hierarchy)
        return self._own_limits.read(pods, now=now, swap_total=limits.memory.swap_total, fresh=fresh)

    # --- parts

    def _close_own_limits(self) -> None:
        if self._own_limits is not None:
            self._own_limits.close()
            self._own_limits = None

    def _read_limits(self, layout: HostLayout, now: float) -> NodeLimits:
        limits = memory.read_limits(self._files, layout.memory)
        if layout.zfs:
            limits = limits._replace(zfs_cache=zfs_cache.evictable(self._host))
        mem_available = signals.observe_mem_available(limits, now=now)
        return NodeLimits(layout.memory, limits, mem_available, pids.read_limit(self._files))

    def _protected_cache(self) -> int:
        """Of the last reading of the pods; 0 before the first one."""
        return self._pods.protected_cache if self._pods is not None else 0

    def _detected(self, now: float) -> HostLayout:
        """The host layout, detected again if it is too old."""
        before = self._layout
        if before is not None and now - before.detected_at < (_LAYOUT_S if before.kubepods else _NO_KUBEPODS_S):
            return before
        hierarchy = cgroups.detect_hierarchy(self._host)
        kubepods, no_kubepods = cgroups.find_kubepods(self._host, hierarchy, cgroup_root=self._config.cgroup_root)
        if kubepods is None and before is not None and self._has_kubepods(before):
            # The detection lacked a descriptor or memory.
            self._layout = before._replace(detected_at=now - _LAYOUT_S + _NO_KUBEPODS_S)
            return self._layout
        layout, retry_s = self._detect_filesystems()
        if before is None or (before.hierarchy, before.kubepods) != (hierarchy, kubepods):
            self._files.close()
            self._close_own_limits()
            self._pods = self._pod_cache(hierarchy, kubepods) if kubepods else None
        notes = cgroups.hierarchy_notes(hierarchy, kubepods)
        if layout.note:
            notes += (Note(NoteKind.DISKS, layout.note),)
        self._layout = HostLayout(
            hierarchy=hierarchy,
            kubepods=kubepods,
            no_kubepods=no_kubepods,
            memory=memory.memory_paths(hierarchy, kubepods, no_kubepods=no_kubepods),
            layout=layout,
            stall_files=psi.stall_files(self._host, hierarchy, kubepods),
            notes=notes,
            detected_at=now - max(0.0, _LAYOUT_S - retry_s),
            page_cache_blocked=page_cache.reclaim_blocked(self._host, hierarchy, kubepods),
            zfs=zfs_cache.is_part_of_memory(self._host),
        )
        return self._layout

    def _has_kubepods(self, layout: HostLayout) -> bool:
        kubepods = layout.kubepods
        return kubepods is not None and self._host.exists(f"{layout.hierarchy.memory}{kubepods.path}")

    def _detect_filesystems(self) -> tuple[filesystems.Layout, float]:
        """The layout, and after which time to detect it again. A known one stays while a file system does not answer: a
        busy disk or a missing PID shows nothing about what is mounted. An unknown one is detected again soon."""
        unanswered: list[int | None] = []

        def statvfs(path: str) -> FileSystem:
            try:
                return self._statvfs(path)
            except Unreadable as error:
                if error.errno in (errno.EAGAIN, errno.ETIMEDOUT):
                    unanswered.append(error.errno)
                raise

        layout = filesystems.detect_layout(self._host, self._config, statvfs)
        if not unanswered or layout.kind is not DiskLayout.UNKNOWN:
            return layout, _LAYOUT_S
        if self._layout is not None and self._layout.layout.kind is not DiskLayout.UNKNOWN:
            return self._layout.layout, _LAYOUT_S
        # A timeout takes up to 0.2 s of the loop, so a detection with five of them is repeated after 5 s.
        return layout, _NO_KUBEPODS_S * max(1, unanswered.count(errno.ETIMEDOUT))

    def _pod_cache(self, hierarchy: cgroups.Hierarchy, kubepods: cgroups.Kubepods) -> PodCache:
        return PodCache(
            self._host,
            hierarchy,
            kubepods,
            self._files,
            stale_after_s=self._config.stale_after_s,
            stalls=self._pod_stalls,
        )

    def _read_pods(
        self,
        layout: HostLayout,
        snapshot: NodeSnapshot,
        api_pods: Sequence[Pod] | None,
        *,
        fresh: bool,
        short: Tier | None,
    ) -> tuple[tuple[PodUsage, ...], tuple[Note, ...]]:
        """The usage of the pods, and what is unknown; the same tuple while no pod was read again."""
        if self._pods is None:
            return (), (Note(NoteKind.PODS, layout.no_kubepods),)
        try:
            listed = self._pods.list_pods()
        except Unreadable as error:
            if error.gone:
                self._layout, self._usages = None, ()
            # Else nothing shows that a pod is gone, and the time of the last readings shows their age.
            return self._usages, (Note(NoteKind.PODS, f"the pods' cgroup cannot be listed: {error}"),)
        if listed is not self._cgroups:
            self._cgroups, self._uids = listed, frozenset([cgroup.uid for cgroup in listed])
        self._names.refresh(self._uids, now=snapshot.taken_at)
        usages, notes = self._pods.read(
            listed,
            now=snapshot.taken_at,
            capacity=snapshot.mem_available.capacity,
            names=self._names.containers,
            fresh=fresh,
            short=short,
            swap_total=self._limits.memory.swap_total if self._limits is not None else None,
            api_pods=self._confirmed(api_pods),
        )
        if usages is not self._usages:
            self._usages = usages
            self._names.container_unnamed = any(c.name is None for usage in usages for c in usage.containers)
        return usages, notes

    def _confirmed(self, api_pods: Sequence[Pod] | None) -> Sequence[Pod] | None:
        """The pods of the API server with the cgroups of mirror pods, by the pod cgroups and log directories of the
        last sample."""
        if api_pods is None:
            return None
        return self._mirrors.confirm(api_pods, uids=self._uids, names=self._names.pods)

    def _join(
        self, usages: tuple[PodUsage, ...], api_pods: Sequence[Pod] | None, snapshot: NodeSnapshot
    ) -> tuple[PodView, ...]:
        """Joined once for the same objects: on a calm node those of the last sample."""
        joined = self._joined
        if joined is None or usages is not joined.usages or api_pods is not joined.api_pods:
            offset = snapshot.wall_time - snapshot.taken_at
            joined = self._joined = pod_join.join_pods(
                usages, api_pods, names=self._names.pods, wall_offset=offset, before=joined
            )
        return joined.views

    def _top_cgroups(self, layout: HostLayout, now: float) -> tuple[CgroupUsage, ...]:
        """The largest cgroups outside kubepods. No decision depends on them, so they may be `_TOP_CGROUPS_S` old."""
        if self._top is None or not 0 <= now - self._top_at < _TOP_CGROUPS_S:
            self._top = cgroups.largest_outside(self._host, layout.hierarchy, layout.kubepods, most=_TOP_CGROUPS)
            self._top_at = now
        return self._top


def _max_descriptors() -> int:
    soft = os.sysconf("SC_OPEN_MAX")  # RLIMIT_NOFILE without the resource module, 0.3 ms of a report; -1: no limit
    return _MAX_FDS if soft < 0 else min(_MAX_FDS, int(soft * _FD_SHARE))

"""Attributes disk usage to pods: measures what each pod holds on disk.

`PodDiskMeter` walks the paths of all pods in slices, so that one huge tree does not delay the others. Promises:

1. A number is never more than what is on disk. An unfinished tree counts with its entries so far, because the largest
   pod may be the one that cannot be counted in time; `PodDisk.unknown` lists it.
2. The next call continues an unfinished walk. Until the walk ends, the path counts with its last complete usage, if
   that is at most `_USAGE_MAX_AGE_S` old; also if the walk ended without a part that it could not read.
   `PodDisk.read_at` is the age of the oldest part.
3. Memory and descriptors are bounded: see the constants.
"""

import functools
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from nodeagent.model import PodUsage
from nodeagent.sampling.disk import path_usage, pod_disk, pod_paths, project_quota, unattributed, walk_cache
from nodeagent.sampling.disk.deleted_files import DeletedFiles, DeletedScan, Target
from nodeagent.sampling.disk.ended_layers import EndedLayers
from nodeagent.sampling.disk.path_usage import PathUsage
from nodeagent.sampling.disk.pod_disk import PodDisk
from nodeagent.sampling.disk.pod_paths import Kind, PodPath, PodPaths
from nodeagent.sampling.disk.walk import CountMode, TreeWalk
from nodeagent.sampling.disk.walk_cache import WalkCache
from nodeagent.sampling.hostfs import processes
from nodeagent.sampling.hostfs.host import Host, Unreadable

_SLICE_ENTRIES: Final = 50_000
"""Entries of one tree before the next tree continues: 75 ms of CPU."""
_MAX_OPEN_WALKS: Final = 8
"""Each holds as many descriptors as its tree is deep, at most 128."""
_RESUME_MAX_AGE_S: Final = 300.0
"""An unfinished walk that began earlier starts again: its first numbers are too old."""
_USAGE_MAX_AGE_S: Final = 600.0
"""An older usage does not describe the disk any more."""
_FULL_READ_EVERY_S: Final = 600.0
"""The files of a quiet pod are read this often: `write_rates` lists the writes that it misses until then."""
_DELETED_FILES_SHARE: Final = 0.25
"""Share of a measurement's time for the open files of the pods' processes."""


class WalkProgress(NamedTuple):
    """How far a measurement is."""

    paths: int
    done: int
    entries: int
    """Files and directories read."""


class _CachedTree(NamedTuple):
    """What an earlier walk of a path left."""

    cache: WalkCache
    started_at: float
    full_read_at: float
    """When the last walk began that read every file."""


class PodDiskMeter:
    """Measures the paths of pods. Not thread-safe: it belongs to one worker."""

    def __init__(self, host: Host, *, kubelet_dir: str, pod_logs_dir: str, cgroups: str = "") -> None:
        """`cgroups`: the mount point of the hierarchy that `PodUsage.cgroup` is a path in. Without it neither open
        files nor project quotas are read."""
        self._host = host
        self._cgroups = cgroups
        self._kubelet_dir = kubelet_dir
        self._pod_logs_dir = pod_logs_dir
        self._trees: dict[PodPath, _CachedTree] = {}
        self._cached_bytes = 0
        """Approximate size of all caches."""
        self._paused: dict[PodPath, TreeWalk] = {}
        self._begun_at: dict[PodPath, float] = {}
        self._open_files = DeletedScan(host)
        self._ended_layers = EndedLayers()
        self._complete_usages: dict[PodPath, PathUsage] = {}
        """The last complete usage of each path, for a measurement without enough time."""
        self.complete = False
        """The last measurement walked every path to its end, so that no number comes from an earlier one."""
        self.progress = WalkProgress(0, 0, 0)
        """May be read by any thread."""

    def close(self) -> None:
        """Close the descriptors of unfinished walks."""
        for walk in self._paused.values():
            walk.close()
        self._paused.clear()

    def measure(
        self,
        pods: Sequence[PodUsage],
        *,
        until: float,
        count: CountMode = CountMode.BYTES_AND_INODES,
        unwritten: Callable[[str, float], bool] = lambda _uid, _since: False,
        recount: bool = False,
        stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, PodDisk]:
        """UID -> what the pod holds. Ends at time.monotonic() `until`, or as soon as `stop` returns True.

        `unwritten(uid, since)` is True if the pod has certainly written nothing since that CLOCK_BOOTTIME. With
        `recount` these pods are a part of all pods, and every cached number of them is dropped.
        """
        if self._host.recorded:
            return {}
        began = time.monotonic()
        found = pod_paths.find_pod_paths(
            self._host, pods, kubelet_dir=self._kubelet_dir, pod_logs_dir=self._pod_logs_dir
        )
        found = self._ended_layers.add_to(
            found,
            {pod.cgroup_uid: None for pod in pods},
            all_pods=not recount,
            now=time.clock_gettime(time.CLOCK_BOOTTIME),
        )
        if recount:
            self._drop_caches(found.paths)
        else:
            self._drop_ended(found)
        self.progress = WalkProgress(len(found.paths), 0, 0)
        # Before the walks, so that slow walks leave time for deleted files.
        deleted_until = began + (until - began) * _DELETED_FILES_SHARE
        deleted = self._read_deleted(pods, found, until=deleted_until, stop=stop, recount=recount)
        usages = self._read_quotas(pods, found)
        quota_kinds: dict[str, set[Kind]] = {}
        for path in usages:
            quota_kinds.setdefault(path.uid, set()).add(path.kind)
        self._advance_progress(0, done=len(usages))
        self._walk_all(found, usages, count, unwritten, until=until, stop=stop)
        self.complete = not stop() and all(path in usages and path not in self._paused for path in found.paths)
        self._use_earlier(found, usages, count)
        by_pod: dict[str, list[PodPath]] = {}
        for path in found.paths:
            by_pod.setdefault(path.uid, []).append(path)
        nodefs = unattributed.file_system_of(self._host, self._kubelet_dir)
        logs_on_nodefs = unattributed.file_system_of(self._host, self._pod_logs_dir) == nodefs
        disks = {
            pod.cgroup_uid: pod_disk.add_up(
                pod,
                by_pod.get(pod.cgroup_uid, ()),
                usages,
                unknown=found.unknown.get(pod.cgroup_uid, ()),
                logs_on_nodefs=logs_on_nodefs,
            )
            for pod in pods
        }
        for uid, files in deleted.items():
            kinds = frozenset(quota_kinds.get(uid, ()))
            disks[uid] = pod_disk.with_deleted_files(disks[uid], files, quota_kinds=kinds)
        return disks if recount else {uid: disk._replace(periodic=True) for uid, disk in disks.items()}

    def _walk_all(
        self,
        found: PodPaths,
        usages: dict[PodPath, PathUsage],
        count: CountMode,
        unwritten: Callable[[str, float], bool],
        *,
        until: float,
        stop: Callable[[], bool],
    ) -> None:
        """Add the usage of every path that has none yet; a walk without enough time is paused."""
        walks: deque[tuple[PodPath, TreeWalk]] = deque()

        def over() -> bool:
            return stop() or time.monotonic() >= until

        try:
            for path in sorted((path for path in found.paths if path not in usages), key=self._order):
                if over():
                    break
                walk = self._start(path, usages, count, unwritten)
                if walk is not None:
                    walks.appendleft((path, walk))
                    self._walk_slice(walks, usages, until)
                while len(walks) >= _MAX_OPEN_WALKS and not over():
                    self._walk_slice(walks, usages, until)
            while walks and not over():
                self._walk_slice(walks, usages, until)
        finally:
            for path, walk in walks:
                usages[path] = path_usage.from_walk(walk.usage)
                self._paused[path] = walk

    def _use_earlier(self, found: PodPaths, usages: dict[PodPath, PathUsage], count: CountMode) -> None:
        """Give each path that was not counted to its end its last complete usage, unless more was counted now."""
        oldest = time.clock_gettime(time.CLOCK_BOOTTIME) - _USAGE_MAX_AGE_S

        def counted(usage: PathUsage) -> tuple[int, int]:
            return 0 if count is CountMode.INODES else usage.bytes or 0, usage.inodes or 0

        for path in found.paths:
            now, before = usages.get(path), self._complete_usages.get(path)
            ended = now is not None and path not in self._paused
            usable = (
                before is not None
                and before.read_at >= oldest
                and (count is CountMode.INODES or before.bytes is not None)
                and (now is None or counted(before) >= counted(now))
                and (now is None or not ended or (now.reason != "" and not before.reason))
            )
            if before is not None and usable:
                usages[path] = before
                self.complete = False
            elif now is not None and ended:
                self._complete_usages[path] = now

    def _order(self, path: PodPath) -> float:
        """Unfinished walks first, then paths never measured, then the oldest: no path waits for ever, even if the time
        never suffices for all."""
        return -1.0 if path in self._paused else self._begun_at.get(path, 0.0)

    # --- project quotas and deleted files

    def _read_quotas(self, pods: Sequence[PodUsage], found: PodPaths) -> dict[PodPath, PathUsage]:
        """The usage of the paths that have a project quota and need no walk."""
        cgroups = {pod.cgroup_uid: pod.cgroup for pod in pods} if self._cgroups else {}
        confined: dict[str, bool] = {}

        def is_confined(uid: str) -> bool:
            if uid not in confined:
                confined[uid] = False
                if uid in cgroups:
                    below = processes.processes_below(self._host, f"{self._cgroups}{cgroups[uid]}")
                    confined[uid] = below.complete and project_quota.all_confined(self._host, below.pids)
            return confined[uid]

        devices = project_quota.quota_devices(found.mounts)
        quotas = project_quota.read_quotas(self._host, found.paths, devices=devices, confined=is_confined)
        self._abandon(quotas.keys() & self._paused.keys())
        return {path: path_usage.from_quota(quota) for path, quota in quotas.items()}

    def _read_deleted(
        self, pods: Sequence[PodUsage], found: PodPaths, *, until: float, stop: Callable[[], bool], recount: bool
    ) -> dict[str, DeletedFiles]:
        """UID -> the deleted files that the pod's processes hold open."""
        if not self._cgroups:
            return {}
        directories: dict[str, set[str]] = {pod.cgroup_uid: {self._kubelet_dir} for pod in pods}
        for path in found.paths:
            directories[path.uid].add(path.base)
        known: dict[str, int | None] = {}
        targets = []
        for pod in pods:
            layers = {found.layers[c.container_id].device for c in pod.containers if c.container_id in found.layers}
            devices = {self._device(directory, known) for directory in directories[pod.cgroup_uid]} - {None}
            cgroup = f"{self._cgroups}{pod.cgroup}"
            targets.append(
                Target(
                    pod.cgroup_uid,
                    functools.partial(self._list_processes, cgroup, pod.thread_count),
                    frozenset(layers),
                    frozenset(device for device in devices if device is not None),
                )
            )
        return self._open_files.scan(targets, until=until, stop=stop, partial=recount)

    def _list_processes(self, cgroup: str, threads: int | None) -> tuple[Sequence[int], bool]:
        """The PIDs in a pod's cgroup, and whether the list is complete: cgroup v1 does not list processes outside our
        PID namespace."""
        below = processes.processes_below(self._host, cgroup)
        return below.pids, below.complete and bool(below.pids or not threads)

    def _device(self, directory: str, known: dict[str, int | None]) -> int | None:
        """st_dev of a directory; None if it does not exist, so that no file of it can be open either."""
        if directory not in known:
            try:
                known[directory] = os.stat(self._host.real(self._host.resolve(directory))).st_dev
            except (OSError, Unreadable):
                known[directory] = None
        return known[directory]

    # --- caches

    def _drop_ended(self, found: PodPaths) -> None:
        """Drop what is cached of paths that are gone, and walks that began too long ago."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        paths = set(found.paths)
        self._trees = {path: tree for path, tree in self._trees.items() if path in paths}
        self._cached_bytes = sum(tree.cache.size for tree in self._trees.values())
        self._begun_at = {path: at for path, at in self._begun_at.items() if path in paths}
        self._complete_usages = {path: usage for path, usage in self._complete_usages.items() if path in paths}
        self._abandon(
            [
                path
                for path, walk in self._paused.items()
                if path not in paths or now - walk.usage.started_at > _RESUME_MAX_AGE_S
            ]
        )

    def _drop_caches(self, paths: Sequence[PodPath]) -> None:
        for path in paths:
            self._complete_usages.pop(path, None)
            if (tree := self._trees.pop(path, None)) is not None:
                self._cached_bytes -= tree.cache.size
        self._abandon(self._paused.keys() & set(paths))

    def _abandon(self, paths: Iterable[PodPath]) -> None:
        for path in paths:
            self._paused.pop(path).close()

    # --- one walk

    def _start(
        self,
        path: PodPath,
        usages: dict[PodPath, PathUsage],
        count: CountMode,
        unwritten: Callable[[str, float], bool],
    ) -> TreeWalk | None:
        """A walk; None if the path needs none, and its usage was added."""
        now = self._begun_at[path] = time.clock_gettime(time.CLOCK_BOOTTIME)
        paused = self._paused.pop(path, None)
        if paused is not None:
            if (paused.usage.bytes is None) == (count is CountMode.INODES):
                return paused
            paused.close()
        tree = self._trees.get(path)
        quiet = tree is not None and now - tree.full_read_at < _FULL_READ_EVERY_S
        other_bytes = self._cached_bytes - (tree.cache.size if tree is not None else 0)
        try:
            if path.kind in (Kind.LAYER, Kind.VOLUME):
                walk = TreeWalk(
                    pod_paths.open_path(self._host, path),
                    count=count,
                    previous=tree.cache if tree is not None else None,
                    unwritten=tree is not None and quiet and unwritten(path.uid, tree.started_at),
                    cache_bytes=max(0, walk_cache.MAX_CACHE_BYTES - other_bytes),
                )
                self._advance_progress(walk.usage.inodes, done=0)
                return walk
            usages[path] = path_usage.read_path(self._host, path)
        except (OSError, Unreadable) as error:
            usages[path] = path_usage.from_error(error)
            if isinstance(error, FileNotFoundError):
                self._ended_layers.remove(path)
        self._advance_progress(0)
        return None

    def _walk_slice(
        self, walks: deque[tuple[PodPath, TreeWalk]], usages: dict[PodPath, PathUsage], until: float
    ) -> None:
        """Continue the first walk for one slice; it then goes to the end of the queue, or is finished."""
        path, walk = walks.popleft()
        before = walk.usage.inodes
        over = walk.step(entries=_SLICE_ENTRIES, until=until)
        self._advance_progress(walk.usage.inodes - before, done=over)
        if not over:
            walks.append((path, walk))
            return
        usage = walk.usage
        usages[path] = path_usage.from_walk(usage)
        if (cache := walk.cache) is not None:
            tree = self._trees.get(path)
            full_read_at = tree.full_read_at if tree is not None and usage.reused else usage.started_at
            self._cached_bytes += cache.size - (tree.cache.size if tree is not None else 0)
            self._trees[path] = _CachedTree(cache, usage.started_at, full_read_at)
        walk.close()

    def _advance_progress(self, entries: int, *, done: int = 1) -> None:
        before = self.progress
        self.progress = WalkProgress(before.paths, before.done + done, before.entries + entries)

"""Whose bytes and inodes: what each pod holds on disk, and what nobody in a pod does.

`Meter` counts the places of the pods one after another, in turns, so that one huge tree does not keep the others from
being counted. Promises:

1. A number is never more than what is there. A tree that was not walked to its end counts with what was seen of it,
   because the pod that cannot be counted in time is the one that is looked for; `PodDisk.unknown` says so.
2. A walk that did not end in time is continued by the next call; until it ends the place counts with its last whole
   sum, if that is not older than `_KEPT_S`. `PodDisk.read_at` is the age of the oldest part.
3. Memory and descriptors are bounded: see the constants.
"""

import functools
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.model import ContainerUsage, DiskUsage, DiskUsageQuality, PodUsage, VolumeUsage
from nodeagent.sampling.disk.deleted_files import DeletedFiles, DeletedScan, Target
from nodeagent.sampling.disk.pod_paths import Kind, PodPath, PodPaths, find_places, open_place
from nodeagent.sampling.disk.project_quota import Quota, all_confined, quota_devices, read_quotas
from nodeagent.sampling.disk.walk import CountMode, TreeUsage, TreeWalk
from nodeagent.sampling.disk.walk_cache import WalkCache
from nodeagent.sampling.hostfs.host import Host, Unreadable
from nodeagent.sampling.hostfs.processes import processes_below

# Entries that one tree may take before the next one gets its turn: 75 ms of CPU.
_TURN: Final = 50_000
# Walks that may be open at once, each with as many descriptors as its tree is deep (at most 128).
_AT_ONCE: Final = 8
# What all trees together may remember: 400,000 names. Who comes first is remembered first.
_REMEMBER: Final = 8 << 20
# A walk that was left unfinished longer than this is begun anew: its first numbers are too old.
_RESUME_S: Final = 300.0
# A sum that is older says nothing any more of what is there.
_KEPT_S: Final = 600.0
# However quiet a pod is, its files are asked for this often: `writes.py` says what goes unseen until then.
_TRUSTED_S: Final = 600.0
# Plain files in one log directory that are asked for. The kubelet keeps 5 for each container by default.
_LOG_FILES: Final = 10_000
# The part of a measurement's time that the open files of the pods' processes may take.
_DELETED_SHARE: Final = 0.25


class Held(NamedTuple):
    """A part of what a pod holds."""

    bytes: int
    inodes: int


class PodDisk(NamedTuple):
    """What one pod holds on disk."""

    uid: str
    disk: DiskUsage
    containers: Mapping[str, DiskUsage]
    """By container id: its layer."""
    logs: Mapping[str, DiskUsage]
    """By container name: its logs."""
    volumes: tuple[VolumeUsage, ...]
    other_bytes: int
    """Files that the kubelet counts against the pod's limit, but not in ranking: etc-hosts and what lies directly in
    the pod's log directory."""
    other_inodes: int
    read_at: float
    """When the oldest of these numbers was read, CLOCK_BOOTTIME."""
    complete: bool
    """Every place was found and walked to its end. False: the sums are lower bounds."""
    unknown: tuple[str, ...]
    """What is not counted, or only in part, and why."""
    deleted: DeletedFiles | None = None
    """None when the processes' open files were not looked at."""
    deleted_layers: Held = Held(0, 0)
    """Of these, what is in layers and in no other number."""
    deleted_volumes: Held = Held(0, 0)
    """The same of everything else."""
    routine: bool = False
    """Counted in its turn: some of the numbers may be of an earlier walk."""


class Progress(NamedTuple):
    """How far a measurement is."""

    places: int
    done: int
    entries: int
    """Files and directories that were looked at."""


class _Sum:
    """Bytes and inodes of one tree."""

    __slots__ = ("bytes", "complete", "inodes", "read_at", "reason")

    def __init__(self, read_at: float) -> None:
        self.bytes: int | None = 0
        self.inodes: int | None = 0
        self.complete = True
        self.reason = ""
        self.read_at = read_at


class _Known(NamedTuple):
    """What an earlier measurement left."""

    remembered: WalkCache
    started_at: float
    asked_at: float
    """When the last walk began that asked for every file."""


class PodDiskMeter:
    """Counts pods' places. Not thread-safe: it belongs to one worker."""

    def __init__(self, host: Host, *, kubelet_dir: str, pod_logs_dir: str, cgroups: str = "") -> None:
        """`cgroups`: where the hierarchy is mounted on the host in which `PodUsage.cgroup` is a path. Without it the
        pods' open files are not looked at, and no quota is taken."""
        self._host = host
        self._cgroups = cgroups
        self._kubelet_dir = kubelet_dir
        self._pod_logs_dir = pod_logs_dir
        self._known: dict[PodPath, _Known] = {}
        self._remembered = 0
        """About the bytes that these take."""
        self._paused: dict[PodPath, TreeWalk] = {}
        self._measured: dict[PodPath, float] = {}
        """When each place was last begun."""
        self._open_files = DeletedScan(host)
        self._sums: dict[PodPath, _Sum] = {}
        """The last whole sum of each place, for when there is no time for it."""
        self.whole = False
        """Every place was walked to its end by the last measurement, so that no number is of an earlier one."""
        self.progress = Progress(0, 0, 0)
        """May be read by any thread."""

    def close(self) -> None:
        """Gives up the descriptors of unfinished walks."""
        for walking in self._paused.values():
            walking.close()
        self._paused.clear()

    def measure(
        self,
        pods: Sequence[PodUsage],
        *,
        until: float,
        count: CountMode = CountMode.BYTES_AND_INODES,
        unwritten: Callable[[str, float], bool] = lambda _uid, _since: False,
        anew: bool = False,
        stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, PodDisk]:
        """What these pods hold, by UID; not later than time.monotonic() `until`, or when `stop` says so.

        `unwritten(uid, since)`: whether this pod is known to have written nothing since that CLOCK_BOOTTIME. `anew`:
        these pods are a few of all, and nothing of what was known of them counts.
        """
        if self._host.recorded:
            return {}
        began = time.monotonic()
        found = find_places(self._host, pods, kubelet_dir=self._kubelet_dir, pod_logs_dir=self._pod_logs_dir)
        if anew:
            self._drop(found.places)
        else:
            self._forget(found)
        self.progress = Progress(len(found.places), 0, 0)
        # Before the walks: whoever keeps these busy must not keep deleted files from being seen.
        deleted = self._deleted(pods, found, until=began + (until - began) * _DELETED_SHARE, stop=stop, anew=anew)
        sums = self._quotas(pods, found)
        quotas: dict[str, set[Kind]] = {}
        for place in sums:
            quotas.setdefault(place.uid, set()).add(place.kind)
        self._step(0, done=len(sums))
        turns: deque[tuple[PodPath, TreeWalk]] = deque()

        def over() -> bool:
            return stop() or time.monotonic() >= until

        try:
            for place in sorted((place for place in found.places if place not in sums), key=self._when):
                if over():
                    break
                started = self._start(place, sums, count, unwritten)
                if started is not None:
                    turns.appendleft((place, started))
                    self._turn(turns, sums, until)
                while len(turns) >= _AT_ONCE and not over():
                    self._turn(turns, sums, until)
            while turns and not over():
                self._turn(turns, sums, until)
        finally:
            for place, walking in turns:
                sums[place] = _summed(walking.tally)
                self._paused[place] = walking
        self.whole = not stop() and all(place in sums and place not in self._paused for place in found.places)
        self._fill_up(found, sums, count)
        by_pod: dict[str, list[PodPath]] = {}
        for place in found.places:
            by_pod.setdefault(place.uid, []).append(place)
        disks = {pod.cgroup_uid: _pod_disk(pod, found, by_pod.get(pod.cgroup_uid, ()), sums) for pod in pods}
        for uid, held in deleted.items():
            disks[uid] = _with_deleted(disks[uid], held, frozenset(quotas.get(uid, ())))
        return disks if anew else {uid: disk._replace(routine=True) for uid, disk in disks.items()}

    def _fill_up(self, found: PodPaths, sums: dict[PodPath, _Sum], count: CountMode) -> None:
        """What there was no time for counts with its last whole sum, unless what was seen of it now is more already."""
        oldest = time.clock_gettime(time.CLOCK_BOOTTIME) - _KEPT_S
        for place in found.places:
            now, before = sums.get(place), self._sums.get(place)
            if now is not None and place not in self._paused:
                self._sums[place] = now
                continue
            if before is None or before.read_at < oldest or (count is not CountMode.INODES and before.bytes is None):
                continue
            if now is None or (before.bytes or 0, before.inodes or 0) >= (now.bytes or 0, now.inodes or 0):
                sums[place] = before

    def _when(self, place: PodPath) -> float:
        """Unfinished walks go on first, then what was never measured, then the oldest: so every place has its turn even
        if there is never time for all."""
        return -1.0 if place in self._paused else self._measured.get(place, 0.0)

    def _quotas(self, pods: Sequence[PodUsage], found: PodPaths) -> dict[PodPath, _Sum]:
        """The places that a project quota tells, so that they are not walked."""
        cgroups = {pod.cgroup_uid: pod.cgroup for pod in pods} if self._cgroups else {}
        confined: dict[str, bool] = {}

        def is_confined(uid: str) -> bool:
            if uid not in confined:
                confined[uid] = False
                if uid in cgroups:
                    processes = processes_below(self._host, f"{self._cgroups}{cgroups[uid]}")
                    confined[uid] = processes.complete and all_confined(self._host, processes.pids)
            return confined[uid]

        devices = quota_devices(found.mounts)
        quotas = read_quotas(self._host, found.places, devices=devices, confined=is_confined)
        self._abandon(quotas.keys() & self._paused.keys())
        return {place: _of_quota(quota) for place, quota in quotas.items()}

    def _deleted(
        self, pods: Sequence[PodUsage], found: PodPaths, *, until: float, stop: Callable[[], bool], anew: bool
    ) -> dict[str, DeletedFiles]:
        """What the pods' processes hold of deleted files, by UID."""
        if not self._cgroups:
            return {}
        places: dict[str, set[str]] = {pod.cgroup_uid: {self._kubelet_dir} for pod in pods}
        for place in found.places:
            places[place.uid].add(place.base)
        known: dict[str, int | None] = {}
        targets = []
        for pod in pods:
            layers = {found.layers[c.container_id].device for c in pod.containers if c.container_id in found.layers}
            devices = {self._device(path, known) for path in places[pod.cgroup_uid]} - {None}
            directory = f"{self._cgroups}{pod.cgroup}"
            targets.append(
                Target(
                    pod.cgroup_uid,
                    functools.partial(self._processes, directory, pod.thread_count),
                    frozenset(layers),
                    frozenset(device for device in devices if device is not None),
                )
            )
        return self._open_files.look(targets, until=until, stop=stop, only=anew)

    def _processes(self, directory: str, threads: int | None) -> tuple[Sequence[int], bool]:
        """The PIDs in a pod's cgroup, and whether these are all: with cgroup v1 those outside our PID namespace are not
        even listed."""
        processes = processes_below(self._host, directory)
        return processes.pids, processes.complete and bool(processes.pids or not threads)

    def _device(self, path: str, known: dict[str, int | None]) -> int | None:
        """st_dev of a directory; None where there is none, so that nothing of it can be held open either."""
        if path not in known:
            try:
                known[path] = os.stat(self._host.real(self._host.resolve(path))).st_dev
            except (OSError, Unreadable):
                known[path] = None
        return known[path]

    def _forget(self, found: PodPaths) -> None:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        places = set(found.places)
        self._known = {place: known for place, known in self._known.items() if place in places}
        self._remembered = sum(known.remembered.size for known in self._known.values())
        self._measured = {place: at for place, at in self._measured.items() if place in places}
        self._sums = {place: known for place, known in self._sums.items() if place in places}
        self._abandon(
            [
                place
                for place, walking in self._paused.items()
                if place not in places or now - walking.tally.started_at > _RESUME_S
            ]
        )

    def _drop(self, places: Sequence[PodPath]) -> None:
        """What is known of these places: none of their files is taken over, no walk goes on."""
        for place in places:
            self._sums.pop(place, None)
            if (known := self._known.pop(place, None)) is not None:
                self._remembered -= known.remembered.size
        self._abandon(self._paused.keys() & set(places))

    def _abandon(self, places: Iterable[PodPath]) -> None:
        for place in places:
            self._paused.pop(place).close()

    def _start(
        self,
        place: PodPath,
        sums: dict[PodPath, _Sum],
        count: CountMode,
        unwritten: Callable[[str, float], bool],
    ) -> TreeWalk | None:
        """A walk, when the place needs one; else its sum is there at once."""
        now = self._measured[place] = time.clock_gettime(time.CLOCK_BOOTTIME)
        paused = self._paused.pop(place, None)
        if paused is not None:
            if (paused.tally.bytes is None) == (count is CountMode.INODES):
                return paused
            paused.close()
        known = self._known.get(place)
        trusted = known is not None and now - known.asked_at < _TRUSTED_S and unwritten(place.uid, known.started_at)
        others = self._remembered - (known.remembered.size if known is not None else 0)
        try:
            if place.kind in (Kind.LAYER, Kind.VOLUME):
                walking = TreeWalk(
                    open_place(self._host, place),
                    count=count,
                    previous=known.remembered if known is not None else None,
                    unwritten=trusted,
                    remember=max(0, _REMEMBER - others),
                )
                self._step(walking.tally.inodes, done=0)
                return walking
            sums[place] = _read_now(self._host, place)
        except (OSError, Unreadable) as error:
            sums[place] = _failed(error)
        self._step(0)
        return None

    def _turn(self, turns: deque[tuple[PodPath, TreeWalk]], sums: dict[PodPath, _Sum], until: float) -> None:
        place, walking = turns.popleft()
        before = walking.tally.inodes
        over = walking.step(entries=_TURN, until=until)
        self._step(walking.tally.inodes - before, done=over)
        if not over:
            turns.append((place, walking))
            return
        sums[place] = _summed(walking.tally)
        remembered = walking.remembered
        if remembered is not None:
            tally, known = walking.tally, self._known.get(place)
            asked = known.asked_at if known is not None and tally.reused else tally.started_at
            self._remembered += remembered.size - (known.remembered.size if known is not None else 0)
            self._known[place] = _Known(remembered, tally.started_at, asked)
        walking.close()

    def _step(self, entries: int, *, done: int = 1) -> None:
        so_far = self.progress
        self.progress = Progress(so_far.places, so_far.done + done, so_far.entries + entries)


# --- one place -------------------------------------------------------------------------------------------------------


def _summed(tally: TreeUsage) -> _Sum:
    result = _Sum(tally.started_at)
    result.bytes, result.inodes = tally.bytes, tally.inodes
    result.complete = tally.complete and not tally.unknown
    if not tally.complete:
        result.reason = "not walked to its end in time: a lower bound"
    elif tally.unknown:
        result.reason = f"{tally.unknown} parts unreadable: {tally.unknown_reason}"
    return result


def _of_quota(quota: Quota) -> _Sum:
    result = _Sum(quota.read_at)
    result.bytes, result.inodes = quota.bytes, quota.inodes
    return result


def _failed(error: OSError | Unreadable) -> _Sum:
    result = _Sum(time.clock_gettime(time.CLOCK_BOOTTIME))
    if isinstance(error, FileNotFoundError):
        return result  # nothing is there: that is 0
    result.bytes = result.inodes = None
    result.complete = False
    result.reason = error.reason if isinstance(error, Unreadable) else error.strerror or str(error)
    return result


def _read_now(host: Host, place: PodPath) -> _Sum:
    """Of a place that needs no walk. Raises OSError."""
    result = _Sum(time.clock_gettime(time.CLOCK_BOOTTIME))
    if place.kind is Kind.HOSTS:
        fd = open_place(host, place, parent=True)
        try:
            found = os.stat(place.below[-1], dir_fd=fd, follow_symlinks=False)
        finally:
            os.close(fd)
        if stat.S_ISREG(found.st_mode):
            result.bytes, result.inodes = found.st_blocks * 512, 1
        return result
    fd = open_place(host, place)
    try:
        if place.kind is Kind.MEMORY_VOLUME:
            numbers = os.fstatvfs(fd)
            result.bytes = (numbers.f_blocks - numbers.f_bfree) * numbers.f_frsize
            result.inodes = numbers.f_files - numbers.f_ffree
        else:
            _plain_files(fd, result)
    finally:
        os.close(fd)
    return result


def _plain_files(fd: int, result: _Sum) -> None:
    """Plain files directly in a directory, each name of them, as the kubelet counts logs."""
    blocks = files = 0
    with os.scandir(fd) as entries:
        for looked, entry in enumerate(entries):
            if looked >= _LOG_FILES:
                result.complete, result.reason = False, f"more than {_LOG_FILES} log files: a lower bound"
                break
            if not entry.is_file(follow_symlinks=False):
                continue
            try:
                blocks += entry.stat(follow_symlinks=False).st_blocks
            except FileNotFoundError:
                continue  # rotated away
            files += 1
    result.bytes, result.inodes = blocks * 512, files


# --- one pod ---------------------------------------------------------------------------------------------------------


def _pod_disk(pod: PodUsage, found: PodPaths, mine: Iterable[PodPath], sums: Mapping[PodPath, _Sum]) -> PodDisk:
    unknown = list(found.unknown.get(pod.cgroup_uid, ()))
    read_at = time.clock_gettime(time.CLOCK_BOOTTIME)
    layers: dict[str, DiskUsage] = {}
    logs: dict[str, DiskUsage] = {}
    volumes: list[VolumeUsage] = []
    other_bytes = other_inodes = 0
    for place in mine:
        total = sums.get(place)
        if total is None:
            unknown.append(f"{place.kind.value} {place.name}: not looked at in time")
            total = _Sum(read_at)
            total.bytes = total.inodes = None
        elif total.reason:
            unknown.append(f"{place.kind.value} {place.name}: {total.reason}")
        read_at = min(read_at, total.read_at)
        if place.kind is Kind.LAYER:
            layers[place.name] = DiskUsage(rootfs_bytes=total.bytes, rootfs_inodes=total.inodes)
        elif place.kind is Kind.LOGS:
            logs[place.name] = DiskUsage(logs_bytes=total.bytes, logs_inodes=total.inodes)
        elif place.kind in (Kind.VOLUME, Kind.MEMORY_VOLUME):
            memory = place.kind is Kind.MEMORY_VOLUME
            volumes.append(VolumeUsage(place.name, total.bytes, total.inodes, memory))
        else:
            other_bytes += total.bytes or 0
            other_inodes += total.inodes or 0
    on_disk = [volume for volume in volumes if not volume.memory_backed]
    unfound = len(layers) < len(pod.containers) and not layers
    disk = DiskUsage(
        rootfs_bytes=None if unfound else _total(usage.rootfs_bytes for usage in layers.values()),
        rootfs_inodes=None if unfound else _total(usage.rootfs_inodes for usage in layers.values()),
        logs_bytes=_total(usage.logs_bytes for usage in logs.values()),
        logs_inodes=_total(usage.logs_inodes for usage in logs.values()),
        volumes_bytes=_total(volume.used_bytes for volume in on_disk),
        volumes_inodes=_total(volume.used_inodes for volume in on_disk),
    )
    return PodDisk(
        pod.cgroup_uid, disk, layers, logs, tuple(volumes), other_bytes, other_inodes, read_at, not unknown,
        tuple(unknown),
    )  # fmt: skip


def _with_deleted(disk: PodDisk, deleted: DeletedFiles, by_quota: frozenset[Kind]) -> PodDisk:
    """`by_quota`: of which places a quota tells what they hold, deleted files included."""
    layers, volumes = Held(0, 0), Held(0, 0)
    if Kind.LAYER not in by_quota:
        layers = Held(deleted.layer_bytes, deleted.layer_files)
    if Kind.VOLUME not in by_quota:
        volumes = Held(deleted.bytes - deleted.layer_bytes, deleted.files - deleted.layer_files)
    return disk._replace(deleted=deleted, deleted_layers=layers, deleted_volumes=volumes)


def _total(parts: Iterable[int | None]) -> int | None:
    """The sum of what is known; None when there are parts and none of them is."""
    known = list(parts)
    numbers = [part for part in known if part is not None]
    return sum(numbers) if numbers or not known else None


def with_disk_usage(usage: PodUsage, found: PodDisk | None) -> PodUsage:
    """The pod's usage with what was measured of its disk; as it is when nothing was."""
    if found is None:
        return usage
    containers = tuple(_container(container, found) for container in usage.containers)
    disk = found.disk._replace(other_bytes=found.other_bytes, other_inodes=found.other_inodes)
    deleted = found.deleted
    if deleted is not None and (deleted.bytes or deleted.complete):
        disk = disk._replace(
            deleted_layer_bytes=found.deleted_layers.bytes,
            deleted_layer_inodes=found.deleted_layers.inodes,
            deleted_volume_bytes=found.deleted_volumes.bytes,
            deleted_volume_inodes=found.deleted_volumes.inodes,
        )
    sight = DiskUsageQuality(
        read_at=found.read_at,
        complete=found.complete,
        unknown=found.unknown,
        # Where the kernel lets us look at nobody's open files, nothing was looked for.
        deleted_bytes=deleted.bytes if deleted is not None and (deleted.bytes or deleted.complete) else None,
        deleted_pid=deleted.pid if deleted is not None else None,
        periodic=found.routine,
    )
    return usage._replace(disk=disk, containers=containers, volumes=found.volumes, disk_usage_quality=sight)


def _container(container: ContainerUsage, found: PodDisk) -> ContainerUsage:
    layer = found.containers.get(container.container_id, DiskUsage())
    log = found.logs.get(container.name or "", DiskUsage())
    return container._replace(
        disk=DiskUsage(
            rootfs_bytes=layer.rootfs_bytes,
            rootfs_inodes=layer.rootfs_inodes,
            logs_bytes=log.logs_bytes,
            logs_inodes=log.logs_inodes,
            volumes_bytes=0,
            volumes_inodes=0,
        )
    )

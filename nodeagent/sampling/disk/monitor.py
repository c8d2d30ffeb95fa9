"""Monitors disk usage and write rates for the loop: decides when to walk, and publishes the newest results.

Promises:

1. No call waits for a disk. Walks run in the thread of `DiskWorker`; the loop's thread reads only files of /proc and
   /sys/fs/cgroup. `usage` starts nothing; `set_targets` alone chooses the pods of the next walk.
2. Nothing is walked while no disk is near a threshold and no storage limit applies.
3. Every number has its time and its completeness (`PodUsage.disk_usage_quality`). The disk usage of a pod without a
   measurement is unknown.

Theory of operation. Each sync calls `request_walks`, which acts by urgency:

    calm       Nothing.
    slow       `localStorageLimits` is on, or a disk is near a threshold or full of images alone, which may last for
               weeks: a walk every `_SLOW_S`, as often as the kubelet walks volumes.
    soon       A threshold is crossed soon: walks with pauses, and write rates, so that the first walk is complete and
               the rates are known at the crossing.
    crossed    One walk after the other, at most `_CROSSED_WALK_S` each. The result so far is published, and the next
               walk continues. Every `_UNATTRIBUTED_EVERY_S` also the usage outside of pods.

A longer walk that still runs at a crossing is ended early, so that its result is published. A pause is a multiple of
the last walk's duration, so that walks take a fixed share of the time for any size of trees.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import (
    DISK_SIGNALS,
    SIGNAL_TABLE,
    NodeSnapshot,
    Note,
    NoteKind,
    PodUsage,
    PodView,
    Signal,
    UnattributedDisk,
    Unit,
)
from nodeagent.sampling.disk import pod_paths, unattributed, write_rates
from nodeagent.sampling.disk.attribution import PodDiskMeter
from nodeagent.sampling.disk.measurement import DiskMeasurement
from nodeagent.sampling.disk.pod_disk import DiskAmount, PodDisk
from nodeagent.sampling.disk.pod_paths import PodPart
from nodeagent.sampling.disk.traces import Traces
from nodeagent.sampling.disk.unattributed import PodDirectories, UsedSpace
from nodeagent.sampling.disk.walk import CountMode
from nodeagent.sampling.disk.walk_worker import DiskWorker, SignalFileSystem, WalkRequest, WalkResult
from nodeagent.sampling.hostfs import cgroups
from nodeagent.sampling.hostfs.cgroups import Hierarchy
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.node.filesystems import Layout

_CROSSED_WALK_S: Final = 2.0
"""Timeout of a walk below a threshold: its result is published then. 200,000 files take 0.35 s (performance.md R4)."""
_WALK_S: Final = 20.0
"""Timeout of any other walk."""
# (shortest pause, multiple of the last walk's duration): half of a core's time if crossed, a fifth if soon, a tenth if
# slow.
_CROSSED_PAUSE: Final = (0.5, 1.0)
_SOON_PAUSE: Final = (10.0, 4.0)
_SLOW_S: Final = 60.0
_SLOW_PAUSE: Final = (_SLOW_S, 9.0)
_WRITES_EVERY_S: Final = 0.25
"""One sample of the write counters of 110 pods reads 220 small files: 2.2 ms (measured)."""
_WRITES_FRESH_S: Final = 2.0
"""Older write counters show of no pod that it has written nothing."""
_UNATTRIBUTED_EVERY_S: Final = 60.0
_UNATTRIBUTED_TIMEOUT_S: Final = 5.0
_MAX_CGROUPS: Final = 256
"""Cgroups of one pod that are searched for processes."""
_MAX_NAMED: Final = 3
"""Host directories in a note."""
_SHOWN_S: Final = 120.0
"""How long results are published after the last need for them."""


class DiskUrgency(NamedTuple):
    """How urgent disk usage is."""

    crossed: frozenset[Signal] = frozenset()
    """Signals below a threshold that counts."""
    soon: frozenset[Signal] = frozenset()
    """Disk signals that cross a threshold soon."""
    lasting: frozenset[Signal] = frozenset()
    """Signals that are near a threshold, or below one that counts as not met (`policy.kubelet_first`)."""


class DiskMonitor:
    """Monitors the disks of one host. Belongs to the loop's thread."""

    def __init__(
        self, host: Host, config: SamplingConfig, *, limits: bool = False, wake: Callable[[], None] = lambda: None
    ) -> None:
        """`limits`: the pods' own local-storage limits are enforced. Another thread calls `wake` after each new
        result."""
        self._host = host
        self._config = config
        self._limits = limits
        self._wake = wake
        self._writes = write_rates.WriteHistory()
        self._processes = write_rates.ProcessWrites()
        self._writes_at = float("-inf")
        self._now = float("-inf")
        self._writes_trouble = ""
        self._worker: DiskWorker | None = None
        self._worker_key: tuple[str, str, str] | None = None
        self._requested_at = float("-inf")
        self._requested_short = False
        self._unattributed_at = float("-inf")
        self._needed_at = float("-inf")
        self._pods: tuple[PodUsage, ...] = ()
        self._traces = Traces()
        self._recount_uids: frozenset[str] = frozenset()

    def close(self, *, timeout_s: float = 1.0) -> None:
        """End the worker; wait at most `timeout_s` for its thread."""
        if self._worker is not None:
            self._worker.close(timeout_s=timeout_s)
            self._worker = None

    # --- each sync

    def request_walks(self, node: NodeSnapshot, urgency: DiskUrgency, *, hierarchy: Hierarchy, layout: Layout) -> None:
        """Sample the write counters and request a walk, if they are due."""
        if self._host.recorded:
            return
        if self._worker is not None:
            self._traces.add(self._worker.latest().file_systems)
        disks = frozenset(each for each in urgency.crossed if SIGNAL_TABLE[each].unit is not Unit.PIDS) & DISK_SIGNALS
        urgent = disks | urgency.soon
        measured = urgent | urgency.lasting
        now = self._now = node.taken_at
        if measured or self._limits:
            self._needed_at = now
        if urgent and now - self._writes_at >= _WRITES_EVERY_S:
            self._writes_at = now
            self._sample_writes(node, urgent, hierarchy)
        if self._pods and (measured or self._limits):
            self._request_walk(node, disks, urgent, measured, hierarchy, layout)

    def recount(self, uids: Iterable[str]) -> None:
        """Measure these pods alone in the next walk, which the next sync requests after the end of the running one."""
        self._recount_uids = frozenset(uids)

    def set_targets(self, pods: Iterable[PodView]) -> None:
        """The pods that the next walk measures."""
        self._pods = tuple([view.usage for view in pods if view.usage is not None])

    def usage(self, now: float) -> DiskMeasurement | None:
        """The newest results. None if nothing needed them for `_SHOWN_S`."""
        if now - self._needed_at > _SHOWN_S or self._host.recorded:
            return None
        latest = self.progress()
        if latest is not None:
            # Of the same walk as the pods: with an older trace, growth that is in no pod could cost a pod.
            self._traces.add(latest.file_systems)
        pods = latest.pods if latest is not None else {}
        rates = {usage.cgroup_uid: self._writes.rate(usage.cgroup_uid) for usage in self._pods}
        return DiskMeasurement(
            pods=pods,
            write_rates={uid: rate for uid, rate in rates.items() if rate is not None},
            unattributed=latest.unattributed if latest is not None else (),
            traces=self._traces.latest(deleted_known=not _deleted_unknown(pods.values())),
            notes=self._notes(latest),
        )

    def progress(self) -> WalkResult | None:
        """The worker's progress and results; None before the first need. May be called by any thread."""
        worker = self._worker
        return worker.progress() if worker is not None else None

    # --- parts

    def _notes(self, latest: WalkResult | None) -> tuple[Note, ...]:
        messages: list[str] = []
        if latest is not None:
            if latest.trouble:
                messages.append(latest.trouble)
            elif latest.finished_at is None and latest.running:
                messages.append("disk usage of pods not known yet: first walk running")
            messages += [_unattributed_text(each) for each in latest.unattributed]
            if unknown := _deleted_unknown(latest.pods.values()):
                messages.append(f"deleted files that {unknown} pods may keep open are unknown")
        if self._writes_trouble:
            messages.append(f"write rates unknown for some pods: {self._writes_trouble}")
        return tuple(Note(NoteKind.DISKS, message) for message in messages)

    def _sample_writes(self, node: NodeSnapshot, urgent: Iterable[Signal], hierarchy: Hierarchy) -> None:
        pods = self._pods
        if hierarchy.unified is not None and hierarchy.unified == hierarchy.memory:
            devices = frozenset[bytes]()
            for signal in urgent:
                device = node.observations[signal].device
                devices |= write_rates.disk_names(self._host, device) if device is not None else frozenset()
            paths = [(pod.cgroup_uid, f"{hierarchy.unified}{pod.cgroup}") for pod in pods]
            self._writes_trouble = write_rates.sample_cgroups(self._host, self._writes, paths, devices=devices)
        elif hierarchy.pids is not None:
            groups = [(pod.cgroup_uid, self._cgroups(f"{hierarchy.pids}{pod.cgroup}")) for pod in pods]
            self._writes_trouble = self._processes.sample(self._host, self._writes, groups)

    def _is_unwritten(self, uid: str, since: float) -> bool:
        """True if the pod has certainly written nothing since. Called by the worker's thread."""
        return self._now - self._writes_at <= _WRITES_FRESH_S and self._writes.quiet(uid, since)

    def _cgroups(self, pod: str) -> list[str]:
        return cgroups.cgroups_below(self._host, pod, most=_MAX_CGROUPS).directories

    def _request_walk(
        self,
        node: NodeSnapshot,
        crossed: frozenset[Signal],
        urgent: frozenset[Signal],
        measured: frozenset[Signal],
        hierarchy: Hierarchy,
        layout: Layout,
    ) -> None:
        """Request a walk for the signals `measured` if the pause since the last one is over."""
        worker = self._worker_for(hierarchy, layout)
        latest, now = worker.latest(), node.taken_at
        if latest.running or (latest.finished_at or 0.0) < self._requested_at:
            if crossed and not self._requested_short and now - self._requested_at > _CROSSED_WALK_S:
                worker.cancel()
                self._requested_short = True
            if now - self._requested_at < _WALK_S * 3:
                return
        if pods := self._pods_to_recount(latest):
            self._requested_at, self._requested_short = now, False
            worker.request(WalkRequest(pods, timeout_s=_WALK_S, recount=True))
            return
        pause, times = _CROSSED_PAUSE if crossed else _SOON_PAUSE if urgent else _SLOW_PAUSE
        ended = latest.finished_at if latest.finished_at is not None else float("-inf")
        if now - ended < max(pause, times * latest.took_s):
            return
        outside: tuple[SignalFileSystem, ...] = ()
        if crossed and now - self._unattributed_at >= _UNATTRIBUTED_EVERY_S and latest.finished_at is not None:
            self._unattributed_at = now
            outside = file_systems(node, crossed, layout)
        only_inodes = not self._limits and all(SIGNAL_TABLE[signal].unit is Unit.INODES for signal in measured)
        self._requested_at, self._requested_short = now, bool(crossed)
        worker.request(
            WalkRequest(
                self._pods,
                timeout_s=_CROSSED_WALK_S if crossed else _WALK_S,
                mode=CountMode.INODES if only_inodes else CountMode.BYTES_AND_INODES,
                file_systems=_measured_signals(file_systems(node, measured, layout), only_inodes=only_inodes),
                unattributed=outside,
                unattributed_timeout_s=_UNATTRIBUTED_TIMEOUT_S,
            )
        )

    def _pods_to_recount(self, latest: WalkResult) -> tuple[PodUsage, ...]:
        """The pods of `recount`, except those that a recount has measured since."""
        uids = {uid for uid in self._recount_uids if uid not in latest.pods or latest.pods[uid].periodic}
        self._recount_uids = frozenset()
        return tuple([usage for usage in self._pods if usage.cgroup_uid in uids])

    def _worker_for(self, hierarchy: Hierarchy, layout: Layout) -> DiskWorker:
        """The worker; a new one if the cgroups, the kubelet's directory or the container runtime's store moved."""
        store = layout.store.containers if layout.store is not None else ""
        kubelet = layout.kubelet or self._config.kubelet_dir
        key = (hierarchy.pids or "", store, kubelet)
        if self._worker is not None and self._worker_key == key:
            return self._worker
        self.close(timeout_s=0.0)
        self._worker_key = key
        self._traces.clear()
        quiet = hierarchy.unified is not None and hierarchy.unified == hierarchy.memory
        directories = PodDirectories(kubelet, self._config.pod_logs_dir, store)
        host, config = self._host, self._config

        def measure_unattributed(
            file_system: SignalFileSystem, pods: Sequence[PodDisk], until: float
        ) -> UnattributedDisk:
            return unattributed.measure_unattributed(
                host,
                file_system.path,
                attributed=pods,
                directories=directories,
                until=until,
                signals=file_system.signals,
            )

        def split_by_part(used: UsedSpace, pod: PodDisk) -> Mapping[PodPart, DiskAmount]:
            present = unattributed.directories_on(host, directories, used)
            return unattributed.parts_on(pod, directories, present)

        self._worker = DiskWorker(
            lambda: PodDiskMeter(
                host, kubelet_dir=kubelet, pod_logs_dir=config.pod_logs_dir, cgroups=hierarchy.pids or ""
            ),
            unwritten=self._is_unwritten if quiet else lambda _uid, _since: False,
            wake=self._wake,
            measure_unattributed=measure_unattributed,
            read_used_space=lambda file_system: unattributed.read_used_space(host, file_system.path),
            split_by_part=split_by_part,
            list_parts_left=lambda: pod_paths.parts_left(host, kubelet_dir=kubelet, pod_logs_dir=config.pod_logs_dir),
        )
        return self._worker


def _measured_signals(systems: Iterable[SignalFileSystem], *, only_inodes: bool) -> tuple[SignalFileSystem, ...]:
    """The file systems with those of their signals that a walk measures."""
    if not only_inodes:
        return tuple(systems)
    inodes = frozenset(signal for signal in DISK_SIGNALS if SIGNAL_TABLE[signal].unit is Unit.INODES)
    return tuple(each._replace(signals=tuple(s for s in each.signals if s in inodes)) for each in systems)


def _deleted_unknown(pods: Iterable[PodDisk]) -> int:
    """The number of pods whose open files were not all read."""
    return sum(pod.deleted is None or not pod.deleted.complete for pod in pods)


def _unattributed_text(disk: UnattributedDisk) -> str:
    names = "/".join(dict.fromkeys(signal.partition(".")[0] for signal in disk.signals))
    largest = [f"{each.path} {each.bytes >> 20}Mi, {each.inodes} inodes" for each in disk.largest[:_MAX_NAMED]]
    outside = f"{disk.unattributed_bytes >> 20}Mi and {disk.unattributed_inodes} inodes of {names} are in no pod"
    return "; ".join((outside, *largest))


def file_systems(node: NodeSnapshot, signals: Iterable[Signal], layout: Layout) -> tuple[SignalFileSystem, ...]:
    """The file systems of these signals, each once, with all its disk signals."""
    store = layout.store
    paths = {"nodefs": layout.nodefs}
    if store is not None:
        paths |= {"imagefs": store.images, "containerfs": store.containers}
    devices = {signal: node.observations[signal].device for signal in Signal if signal in DISK_SIGNALS}
    found: dict[int, SignalFileSystem] = {}
    for signal in sorted(signals):
        path, device = paths.get(signal.partition(".")[0]), devices.get(signal)
        if path is not None and device is not None and device not in found:
            found[device] = SignalFileSystem(path, tuple([each for each, other in devices.items() if other == device]))
    return tuple(found.values())

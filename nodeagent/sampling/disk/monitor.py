"""The disks as the loop sees them: when to walk, who writes meanwhile, and what is known of each pod.

Promises:

1. No call waits for a disk: walks run in the thread of `DiskWorker`, and this thread reads only files of /proc and
   /sys/fs/cgroup. `usage` reads and changes nothing; `set_targets` alone chooses the pods of the next walk.
2. Nothing is walked while no disk is near a threshold and no limit applies.
3. Every number says when it was read and whether it is whole (`PodUsage.disk_sight`); a pod that was not measured keeps
   its unknown disk.

Theory of operation. `request_walks` is called in every sync. What it does depends on how urgent disks are:

    calm       nothing
    limits     `localStorageLimits` is on: a walk every `_LIMITS_S`, as often as a kubelet walks volumes
    near       a threshold may be crossed soon: walks with pauses, and write rates, so that the first walk has ended and
               the writers are known when it is
    crossed    walk after walk, each for `_SHORT_S`: what was counted until then is published, the next one goes on from
               there. Once in `_REST_S` also what is in no pod.

A walk that began in calmer times and is still running when a threshold is crossed is cut short, so that what it has is
known at once. Pauses are multiples of what the last walk took, so that walking never takes more than a fixed share of
the time however large the trees are.
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
from nodeagent.sampling.hostfs.cgroups import Hierarchy, cgroups_below
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.node.filesystems import Layout

# How long one walk may take before what it has is published. 200,000 files take 0.35 s (performance.md R4).
_SHORT_S: Final = 2.0
_LONG_S: Final = 20.0
# Shortest pauses between walks, and pauses as multiples of what the last walk took: half of one core's time under
# pressure, a fifth near it, a tenth for limits.
_CROSSED_PAUSE: Final = (0.5, 1.0)
_NEAR_PAUSE: Final = (10.0, 4.0)
_LIMITS_S: Final = 60.0
_LIMITS_PAUSE: Final = (_LIMITS_S, 9.0)
# One sample of 110 pods' writes reads 220 small files: 2.2 ms (measured).
_WRITES_S: Final = 0.25
_REST_S: Final = 60.0
_REST_BUDGET_S: Final = 5.0
# Cgroups of one pod in which its processes are looked for.
_CGROUPS: Final = 256
# Host directories that a note names.
_NAMED: Final = 3
# What was measured is shown this long after the last need for it.
_REMEMBER_S: Final = 120.0


class DiskUrgency(NamedTuple):
    """How urgent disks are now."""

    crossed: frozenset[Signal] = frozenset()
    """Signals below a threshold."""
    near: frozenset[Signal] = frozenset()
    """Disk signals that may be soon."""


class DiskMonitor:
    """Watches the disks of one host. Belongs to the loop's thread."""

    def __init__(
        self, host: Host, config: SamplingConfig, *, limits: bool = False, wake: Callable[[], None] = lambda: None
    ) -> None:
        """`limits`: pods are held to their own local-storage limits. `wake` is called from another thread when
        something new is known."""
        self._host = host
        self._config = config
        self._limits = limits
        self._wake = wake
        self._writes = write_rates.WriteHistory()
        self._processes = write_rates.ProcessWrites()
        self._writes_at = float("-inf")
        self._writes_trouble = ""
        self._worker: DiskWorker | None = None
        self._where: tuple[str, str, str] | None = None
        self._asked_at = float("-inf")
        self._asked_short = False
        self._rest_at = float("-inf")
        self._needed_at = float("-inf")
        self._pods: tuple[PodUsage, ...] = ()
        self._traces = Traces()
        self._anew: frozenset[str] = frozenset()

    def close(self, *, timeout_s: float = 1.0) -> None:
        """Give up the worker; its thread is waited for as long as this."""
        if self._worker is not None:
            self._worker.close(timeout_s=timeout_s)
            self._worker = None

    # --- each look at the node

    def request_walks(self, node: NodeSnapshot, need: DiskUrgency, *, hierarchy: Hierarchy, layout: Layout) -> None:
        """Take in a look at the node: sample the writers and ask for a walk where that is due."""
        if self._host.recorded:
            return
        if self._worker is not None:
            self._traces.add(self._worker.latest().file_systems)
        disks = frozenset(each for each in need.crossed if SIGNAL_TABLE[each].unit is not Unit.PIDS) & DISK_SIGNALS
        urgent = disks | need.near
        now = node.taken_at
        if urgent or self._limits:
            self._needed_at = now
        if urgent and now - self._writes_at >= _WRITES_S:
            self._writes_at = now
            self._sample_writes(node, urgent, hierarchy)
        if self._pods and (urgent or self._limits):
            self._ask(node, disks, urgent, hierarchy, layout)

    def recount(self, uids: Iterable[str]) -> None:
        """These pods alone are counted next, as soon as the walk under way has ended; at the next look at the node."""
        self._anew = frozenset(uids)

    def set_targets(self, pods: Iterable[PodView]) -> None:
        """The pods that the next walk measures."""
        self._pods = tuple([view.usage for view in pods if view.usage is not None])

    def usage(self, now: float) -> DiskMeasurement | None:
        """What is known of the disks. None if nothing needed it for `_REMEMBER_S`."""
        if now - self._needed_at > _REMEMBER_S or self._host.recorded:
            return None
        latest = self._worker.latest() if self._worker is not None else None
        pods = latest.pods if latest is not None else {}
        rates = {usage.cgroup_uid: self._writes.rate(usage.cgroup_uid) for usage in self._pods}
        return DiskMeasurement(
            pods=pods,
            write_rates={uid: rate for uid, rate in rates.items() if rate is not None},
            unattributed=latest.unattributed if latest is not None else (),
            traces=self._traces.latest(deleted_known=not _deleted_unknown(pods.values())),
            notes=self._notes(),
        )

    def progress(self) -> WalkResult | None:
        """What the worker is at; None before the first need. May be called by any thread."""
        worker = self._worker
        return worker.progress() if worker is not None else None

    # --- parts

    def _notes(self) -> tuple[Note, ...]:
        notes: tuple[Note, ...] = ()
        if self._worker is not None:
            known = self._worker.latest()
            if known.trouble:
                notes = (Note(NoteKind.DISKS, known.trouble),)
            elif known.finished_at is None and known.running:
                notes = (Note(NoteKind.DISKS, "what the pods hold on disk is being counted, nothing is known yet"),)
        if self._worker is not None:
            notes = (*notes, *(_in_no_pod(rest) for rest in self._worker.latest().unattributed))
        if self._worker is not None and (unknown := _deleted_unknown(self._worker.latest().pods.values())):
            notes = (
                *notes,
                Note(NoteKind.DISKS, f"deleted files that {unknown} pods may keep open are unknown"),
            )
        if self._writes_trouble:
            notes = (*notes, Note(NoteKind.DISKS, f"who writes is not known of every pod: {self._writes_trouble}"))
        return notes

    def _sample_writes(self, node: NodeSnapshot, urgent: Iterable[Signal], hierarchy: Hierarchy) -> None:
        pods = self._pods
        if hierarchy.unified is not None and hierarchy.unified == hierarchy.memory:
            devices = frozenset[bytes]()
            for signal in urgent:
                device = node.observations[signal].device
                devices |= write_rates.disk_names(self._host, device) if device is not None else frozenset()
            places = [(pod.cgroup_uid, f"{hierarchy.unified}{pod.cgroup}") for pod in pods]
            self._writes_trouble = write_rates.sample_cgroups(self._host, self._writes, places, devices=devices)
        elif hierarchy.pids is not None:
            groups = [(pod.cgroup_uid, self._cgroups(f"{hierarchy.pids}{pod.cgroup}")) for pod in pods]
            self._writes_trouble = self._processes.sample(self._host, self._writes, groups)

    def _cgroups(self, pod: str) -> list[str]:
        return cgroups_below(self._host, pod, most=_CGROUPS).directories

    def _ask(
        self,
        node: NodeSnapshot,
        crossed: frozenset[Signal],
        urgent: frozenset[Signal],
        hierarchy: Hierarchy,
        layout: Layout,
    ) -> None:
        """Ask for a walk when the last one is long enough ago."""
        worker = self._worker_for(hierarchy, layout)
        known, now = worker.latest(), node.taken_at
        if known.running or (known.finished_at or 0.0) < self._asked_at:
            if crossed and not self._asked_short and now - self._asked_at > _SHORT_S:
                worker.cancel()
                self._asked_short = True
            if now - self._asked_at < _LONG_S * 3:
                return
        if pods := self._to_count_anew(known):
            self._asked_at, self._asked_short = now, False
            worker.request(WalkRequest(pods, timeout_s=_LONG_S, recount=True))
            return
        pause, times = _CROSSED_PAUSE if crossed else _NEAR_PAUSE if urgent else _LIMITS_PAUSE
        ended = known.finished_at if known.finished_at is not None else float("-inf")
        if now - ended < max(pause, times * known.took_s):
            return
        rests: tuple[SignalFileSystem, ...] = ()
        if crossed and now - self._rest_at >= _REST_S and known.finished_at is not None:
            self._rest_at = now
            rests = file_systems(node, crossed, layout)
        only_inodes = not self._limits and all(SIGNAL_TABLE[signal].unit is Unit.INODES for signal in urgent)
        self._asked_at, self._asked_short = now, bool(crossed)
        worker.request(
            WalkRequest(
                self._pods,
                timeout_s=_SHORT_S if crossed else _LONG_S,
                mode=CountMode.INODES if only_inodes else CountMode.BYTES_AND_INODES,
                file_systems=_counted(file_systems(node, urgent, layout), only_inodes=only_inodes),
                unattributed=rests,
                unattributed_timeout_s=_REST_BUDGET_S,
            )
        )

    def _to_count_anew(self, known: WalkResult) -> tuple[PodUsage, ...]:
        """Those that were counted while the decision was made that asks for them have no need of it any more."""
        anew = {uid for uid in self._anew if uid not in known.pods or known.pods[uid].periodic}
        self._anew = frozenset()
        return tuple([usage for usage in self._pods if usage.cgroup_uid in anew])

    def _worker_for(self, hierarchy: Hierarchy, layout: Layout) -> DiskWorker:
        """The worker, made anew when the cgroups or the runtime's store are elsewhere."""
        store = layout.store.containers if layout.store is not None else ""
        kubelet = layout.kubelet or self._config.kubelet_dir
        where = (hierarchy.pids or "", store, kubelet)
        if self._worker is not None and self._where == where:
            return self._worker
        self.close(timeout_s=0.0)
        self._where = where
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
            present = unattributed.directories_on(host, directories, used.device)
            return unattributed.parts_on(pod, directories, present)

        self._worker = DiskWorker(
            lambda: PodDiskMeter(
                host, kubelet_dir=kubelet, pod_logs_dir=config.pod_logs_dir, cgroups=hierarchy.pids or ""
            ),
            unwritten=self._writes.quiet if quiet else lambda _uid, _since: False,
            wake=self._wake,
            measure_unattributed=measure_unattributed,
            read_used_space=lambda file_system: unattributed.read_used_space(host, file_system.path),
            split_by_part=split_by_part,
            list_parts_left=lambda: pod_paths.parts_left(host, kubelet_dir=kubelet, pod_logs_dir=config.pod_logs_dir),
        )
        return self._worker


def _counted(wanted: Iterable[SignalFileSystem], *, only_inodes: bool) -> tuple[SignalFileSystem, ...]:
    """The file systems with those of their signals that a walk tells of."""
    if not only_inodes:
        return tuple(wanted)
    inodes = frozenset(signal for signal in DISK_SIGNALS if SIGNAL_TABLE[signal].unit is Unit.INODES)
    return tuple(each._replace(signals=tuple(s for s in each.signals if s in inodes)) for each in wanted)


def _deleted_unknown(pods: Iterable[PodDisk]) -> int:
    """Of how many pods not all open files could be looked at."""
    return sum(pod.deleted is None or not pod.deleted.complete for pod in pods)


def _in_no_pod(rest: UnattributedDisk) -> Note:
    """At most one in `_REST_S`."""
    names = "/".join(dict.fromkeys(signal.partition(".")[0] for signal in rest.signals))
    largest = [f"{each.path} {each.bytes >> 20}Mi, {each.inodes} inodes" for each in rest.largest[:_NAMED]]
    held = f"{rest.unattributed_bytes >> 20}Mi and {rest.unattributed_inodes} inodes of {names} are in no pod"
    return Note(NoteKind.DISKS, "; ".join((held, *largest)))


def file_systems(node: NodeSnapshot, signals: Iterable[Signal], layout: Layout) -> tuple[SignalFileSystem, ...]:
    """The file systems behind these signals, each once, with all disk signals that it is behind."""
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

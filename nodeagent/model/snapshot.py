"""One sample of the node: everything that a decision reads."""

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple

from nodeagent.model.notes import Note
from nodeagent.model.pods import PodView
from nodeagent.model.refusals import Refusal
from nodeagent.model.signals import MEMORY_SIGNALS, MemoryModel, Signal, StallScope
from nodeagent.model.units import MAX_PLAUSIBLE
from nodeagent.model.zombies import ZombieCount

MIN_SUSPEND_S: Final = 0.1
"""A shorter difference between CLOCK_BOOTTIME and CLOCK_MONOTONIC is no suspend: the clocks are read one after the
other."""


_LESS_PROTECTED: Final = " - page cache below memory.min"


class Observation(NamedTuple):
    """The reading of one signal."""

    signal: Signal
    available: int | None
    """May be negative for `pid.available`. None: could not be read, see `reason`."""
    capacity: int | None
    """The base of percentages."""
    read_at: float
    source: str
    """The files of the numbers, for people: `/proc/meminfo - /sys/fs/cgroup/memory.stat`."""
    reason: str = ""
    """Why `available` is None."""
    device: int | None = None
    """st_dev of the file system behind a disk signal, which identifies signals on one device."""

    @property
    def implausible(self) -> str:
        """Why the numbers are unknown or cannot be true, whatever their age; empty if they can. Comparisons are written
        so that NaN fails them."""
        available, capacity = self.available, self.capacity
        if type(available) is int and type(capacity) is int and 0 <= available <= capacity <= MAX_PLAUSIBLE:
            return "" if capacity else "a capacity of 0 is implausible"
        if available is None:
            return self.reason or "not read"
        if type(available) is not int:
            return f"available is no whole number: {available!r}"
        if capacity is None:
            return "its capacity is unknown"
        if type(capacity) is not int:
            return f"capacity is no whole number: {capacity!r}"
        if not 0 < capacity <= MAX_PLAUSIBLE:
            return f"a capacity of {capacity} is implausible"
        if available > capacity:
            return f"{available} available of {capacity} is implausible"
        if available < 0 and (self.signal is not Signal.PID or available < -MAX_PLAUSIBLE):
            return f"{available} available is implausible"
        return ""


class MemoryFigures(NamedTuple):
    """Both figures of a memory signal, in bytes available; None: unknown or implausible."""

    working_set: int | None
    """The kubelet's: active page cache counts as used, kernel memory does not."""
    by_kernel: int | None
    """The kernel's: page cache that can be dropped counts as available."""


class HugePages(NamedTuple):
    """One HugeTLB pool of the node. Pre-allocated pages are invisible to `memory.available`."""

    page_size: int
    total: int
    free: int
    reserved: int


class SwapDevice(NamedTuple):
    """A swap device of /proc/swaps; sizes in bytes."""

    path: str
    kind: str
    """`partition` or `file`, as the kernel writes it, or `zram`."""
    size: int
    used: int
    memory: int | None = None
    """What a zram device takes of the memory for `used`. None: on a disk, or not readable."""


class NodeMemory(NamedTuple):
    """/proc/meminfo in bytes."""

    total: int
    free: int
    mem_available: int | None
    buffers: int
    cached: int
    anon: int
    shmem: int
    dirty: int
    slab_reclaimable: int
    slab_unreclaimable: int
    kernel_stack: int
    page_tables: int
    swap_total: int
    swap_free: int
    hugepages: tuple[HugePages, ...] = ()
    hugetlb: int = 0
    swaps: tuple[SwapDevice, ...] = ()
    """Empty without swap."""

    @property
    def zram(self) -> int:
        """Memory that the zram devices take for what is swapped to them."""
        return sum([device.memory or 0 for device in self.swaps])


class Stall(NamedTuple):
    """Pressure stall information of one scope and resource: percent of wall time, and the running total in us."""

    scope: StallScope
    resource: str
    some_avg10: float
    some_avg60: float
    some_total_us: int
    full_avg10: float | None
    full_avg60: float | None
    full_total_us: int | None
    read_at: float


class DiskLayout(enum.StrEnum):
    """The file systems behind the node's disk signals (KUBELET-CONTRACT: single, dedicated imagefs, split)."""

    SINGLE = "single"
    DEDICATED_IMAGEFS = "dedicated-imagefs"
    SPLIT = "split"
    UNKNOWN = "unknown"


class CgroupUsage(NamedTuple):
    """A cgroup outside kubepods, to list the largest holders outside pods."""

    path: str
    memory_working_set: int | None
    process_count: int | None


class HostDirectory(NamedTuple):
    """A directory of the host, without the files of pods in it."""

    path: str
    bytes: int
    inodes: int
    complete: bool
    """False: a lower bound."""


class UnattributedDisk(NamedTuple):
    """The part of a file system that is in no pod."""

    signals: tuple[Signal, ...]
    """The signals that this file system is behind."""
    used_bytes: int
    attributed_bytes: int
    used_inodes: int
    attributed_inodes: int
    largest: tuple[HostDirectory, ...]
    """Largest first, as far as the walk had time."""
    read_at: float

    @property
    def unattributed_bytes(self) -> int:
        return max(0, self.used_bytes - self.attributed_bytes)

    @property
    def unattributed_inodes(self) -> int:
        return max(0, self.used_inodes - self.attributed_inodes)


class DiskPoint(NamedTuple):
    """The usage of a file system at one time."""

    at: float
    used_bytes: int
    attributed_bytes: int
    """The usage of pods there."""
    used_inodes: int
    attributed_inodes: int


class DiskTrace(NamedTuple):
    """The growth of a file system, and how much of it is in pods."""

    signals: tuple[Signal, ...]
    """The signals that this file system is behind."""
    first: DiskPoint
    """Some minutes ago, or the first measurement."""
    recent: DiskPoint
    """Some seconds ago."""
    last: DiskPoint
    deleted_known: bool
    """The open files of all pods were readable. False: deleted files may belong to a pod."""


class NodeSnapshot(NamedTuple):
    """Everything that one decision reads, assembled once from the readings of `sampling` and the pods of `kube`."""

    node: str
    taken_at: float
    wall_time: float
    observations: Mapping[Signal, Observation]
    """One for each signal, always; those that could not be read have `available` None and a reason."""
    mem_available: Observation
    """`memory.available` by the MemAvailable model."""
    memory: NodeMemory | None = None
    stalls: tuple[Stall, ...] = ()
    layout: DiskLayout = DiskLayout.UNKNOWN
    pods: tuple[PodView, ...] = ()
    pods_synced_at: float | None = None
    """When the API server's list of the pods was last current; None: pods come from the host alone."""
    cgroups: tuple[CgroupUsage, ...] = ()
    notes: tuple[Note, ...] = ()
    own_pod_uid: str = ""
    """metadata.uid of the pod this agent runs in; empty when it does not run in a pod."""
    api_unreachable_since: float | None = None
    """Since when no request to the API server was answered. None: the last one was answered, or none was sent (an idle
    watch is no sign of trouble), or no API server is configured."""
    soft_tier_blocked_by: Refusal | None = None
    """What the soft tier waits for before it evicts: taint, PDBs, eviction slot. None: nothing."""
    unattributed_disks: tuple[UnattributedDisk, ...] = ()
    """For each file system the part in no pod; empty if not measured."""
    disk_traces: tuple[DiskTrace, ...] = ()
    """The growth of each file system; empty if not measured."""
    suspended_s: float = 0.0
    """How long the machine was suspended since it booted."""
    protected_cache: int = 0
    """Page cache of pods that memory.min protects: `mem_available` and `allocatable_by_kernel` are less this."""
    allocatable_by_kernel: Observation | None = None
    """`allocatableMemory.available` with page cache counted as available: limit of kubepods - (usage - reclaimable file
    pages and slab). None: not sampled."""

    zombies: ZombieCount | None = None
    """The newest count; None: not counted."""
    page_cache_blocked: str = ""
    """Why the page cache of pods cannot be reclaimed on this host (no memory.reclaim, or not writable); empty if it
    can."""
    eviction_requests: bool = False
    """The API server serves EvictionRequests (KEP-4563), and the configuration uses them."""

    allocatable_memory: int | None = None
    """The Node's status.allocatable, in bytes. None: not known."""
    unused_images: int | None = None
    """Bytes of the images on the node that no pod uses, by the Node's status.images. None: not known."""

    def with_protected_cache(self, amount: int | None) -> "NodeSnapshot":
        """The node with the kernel's figures less this protected page cache instead of `protected_cache`. None: it was
        not read again."""
        if amount is None or amount == self.protected_cache:
            return self
        pods = self.allocatable_by_kernel
        return self._replace(
            mem_available=_less_protected(self.mem_available, self.protected_cache, amount),
            allocatable_by_kernel=None if pods is None else _less_protected(pods, self.protected_cache, amount),
            protected_cache=amount,
        )

    def observe(self, signal: Signal, model: MemoryModel = MemoryModel.WORKING_SET) -> Observation:
        """The observation for a threshold with this memory model.

        For `MemoryModel.LOWER` it is the lower of the two plausible figures, and `source` names which one. Of two
        figures the older time counts, because their minimum is known only as of then. With one plausible figure it is
        that one; whether page cache alone is short is then unknown (`policy.memory_shortage`).
        """
        if model is MemoryModel.WORKING_SET or signal not in MEMORY_SIGNALS:
            return self.observations[signal]
        by_kernel = self._by_kernel(signal)
        return by_kernel if model is MemoryModel.MEM_AVAILABLE else _lower(self.observations[signal], by_kernel)

    def memory_figures(self, signal: Signal) -> MemoryFigures:
        """Both figures of a memory signal."""
        working_set, by_kernel = self.observations.get(signal), self._by_kernel(signal)
        return MemoryFigures(
            None if working_set is None or working_set.implausible else working_set.available,
            None if by_kernel.implausible else by_kernel.available,
        )

    def _by_kernel(self, signal: Signal) -> Observation:
        if signal is Signal.MEMORY:
            return self.mem_available
        found = self.allocatable_by_kernel
        return found if found is not None else Observation(signal, None, None, self.taken_at, "", "not sampled")


def _lower(working_set: Observation, by_kernel: Observation) -> Observation:
    """The lower of two figures. Of two implausible ones the kubelet's, with its reason."""
    if by_kernel.implausible:
        return working_set
    if working_set.implausible:
        return by_kernel
    one, other = working_set.available, by_kernel.available
    assert one is not None
    assert other is not None
    lower = by_kernel if other <= one else working_set
    read_at = min(working_set.read_at, by_kernel.read_at)
    return lower if lower.read_at == read_at else lower._replace(read_at=read_at)


def _less_protected(observation: Observation, before: int, amount: int) -> Observation:
    """The observation less `amount` instead of less `before`."""
    if observation.available is None:
        return observation
    available = max(0, observation.available + before - amount)
    source = observation.source.removesuffix(_LESS_PROTECTED) + (_LESS_PROTECTED if amount else "")
    return observation._replace(available=available, source=source)

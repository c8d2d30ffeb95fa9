"""The eviction signals and the thresholds on them."""

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple


class Signal(enum.StrEnum):
    """An eviction signal, by the name that the kubelet's configuration gives it."""

    MEMORY = "memory.available"
    ALLOCATABLE_MEMORY = "allocatableMemory.available"
    NODEFS = "nodefs.available"
    NODEFS_INODES = "nodefs.inodesFree"
    IMAGEFS = "imagefs.available"
    IMAGEFS_INODES = "imagefs.inodesFree"
    CONTAINERFS = "containerfs.available"
    CONTAINERFS_INODES = "containerfs.inodesFree"
    PID = "pid.available"


class ConditionType(enum.StrEnum):
    """A pressure condition of a Node object."""

    MEMORY_PRESSURE = "MemoryPressure"
    DISK_PRESSURE = "DiskPressure"
    PID_PRESSURE = "PIDPressure"


class Unit(enum.StrEnum):
    """The unit of a signal."""

    BYTES = "bytes"
    INODES = "inodes"
    PIDS = "pids"


class SignalFacts(NamedTuple):
    """One row of the signal table."""

    signal: Signal
    resource: str
    """The resource name in the kubelet's texts (KUBELET-CONTRACT: `The node was low on resource: ...`)."""
    condition: ConditionType
    unit: Unit
    urgency: int
    """The order in which thresholds are planned: memory 0, disk bytes 1, inodes 2, PIDs 3."""


SIGNAL_TABLE: Final[Mapping[Signal, SignalFacts]] = {
    facts.signal: facts
    for facts in (
        SignalFacts(Signal.MEMORY, "memory", ConditionType.MEMORY_PRESSURE, Unit.BYTES, 0),
        SignalFacts(Signal.ALLOCATABLE_MEMORY, "memory", ConditionType.MEMORY_PRESSURE, Unit.BYTES, 0),
        SignalFacts(Signal.NODEFS, "ephemeral-storage", ConditionType.DISK_PRESSURE, Unit.BYTES, 1),
        SignalFacts(Signal.NODEFS_INODES, "inodes", ConditionType.DISK_PRESSURE, Unit.INODES, 2),
        SignalFacts(Signal.IMAGEFS, "ephemeral-storage", ConditionType.DISK_PRESSURE, Unit.BYTES, 1),
        SignalFacts(Signal.IMAGEFS_INODES, "inodes", ConditionType.DISK_PRESSURE, Unit.INODES, 2),
        SignalFacts(Signal.CONTAINERFS, "ephemeral-storage", ConditionType.DISK_PRESSURE, Unit.BYTES, 1),
        SignalFacts(Signal.CONTAINERFS_INODES, "inodes", ConditionType.DISK_PRESSURE, Unit.INODES, 2),
        SignalFacts(Signal.PID, "pids", ConditionType.PID_PRESSURE, Unit.PIDS, 3),
    )
}

MEMORY_SIGNALS: Final = frozenset({Signal.MEMORY, Signal.ALLOCATABLE_MEMORY})
DISK_BYTE_SIGNALS: Final = frozenset({Signal.NODEFS, Signal.IMAGEFS, Signal.CONTAINERFS})
DISK_INODE_SIGNALS: Final = frozenset({Signal.NODEFS_INODES, Signal.IMAGEFS_INODES, Signal.CONTAINERFS_INODES})
DISK_SIGNALS: Final = DISK_BYTE_SIGNALS | DISK_INODE_SIGNALS
IMAGEFS_SIGNALS: Final = (Signal.IMAGEFS, Signal.IMAGEFS_INODES)
BYTES_OF_INODES: Final[Mapping[Signal, Signal]] = {
    Signal.NODEFS_INODES: Signal.NODEFS,
    Signal.IMAGEFS_INODES: Signal.IMAGEFS,
    Signal.CONTAINERFS_INODES: Signal.CONTAINERFS,
}
"""The signal of the same file system's bytes."""
CONTAINERFS_SIGNALS: Final = (Signal.CONTAINERFS, Signal.CONTAINERFS_INODES)


class Tier(enum.StrEnum):
    SOFT = "soft"
    HARD = "hard"


MIN_GRACE_S: Final = 1
"""The shortest grace that is requested, the kubelet's own minimum: 0 would remove the object while its containers still
run (KUBELET-CONTRACT 14)."""


class MemoryModel(enum.StrEnum):
    """How `memory.available` and `allocatableMemory.available` are computed."""

    LOWER = "lower"
    """Whichever of the two below is lower; a shortage of the working-set figure alone is page cache and evicts no
    pod."""
    WORKING_SET = "workingset"
    """The kubelet's: MemTotal - (usage - inactive_file) of the root cgroup."""
    MEM_AVAILABLE = "memavailable"
    """The kernel's own estimate: MemAvailable of /proc/meminfo."""


class Amount(NamedTuple):
    """A threshold value as configured: either a quantity or a percentage of the signal's capacity."""

    quantity: int | None
    """Bytes, inodes or PIDs, rounded up to a whole number; None when this is a percentage."""
    percentage: float | None
    """Percent, 0 to 100 and above, as written (`10%` is 10.0); None when this is a quantity."""
    text: str
    """As configured, for reports and messages."""
    at_least: int | None = None
    """Lower bound of a percentage in the signal's unit."""
    at_most: int | None = None
    """Upper bound of a percentage in the signal's unit."""


class KubeletLevel(NamedTuple):
    """A threshold of the kubelet, and how far one of the agent's must be above it."""

    kubelet: Amount
    margin: Amount
    margin_of_capacity: bool
    """A percentage in `margin` is one of the capacity; False: of the kubelet's threshold."""


class StallScope(enum.StrEnum):
    """The cgroup whose pressure stall information (PSI) is read."""

    NODE = "node"
    KUBEPODS = "kubepods"
    SYSTEM = "system"


class StallRequirement(NamedTuple):
    """A stall that must be present as well before a met threshold is due."""

    scope: StallScope
    resource: str
    """`memory` or `io`; never `cpu`."""
    kind: str
    """`some` or `full`."""
    window: str
    """`avg10` or `avg60`."""
    at_least: float
    """Percent of wall time stalled, 0 to 100."""


class Threshold(NamedTuple):
    """One eviction threshold. Its identity is (signal, grace period, value), as in the kubelet."""

    signal: Signal
    value: Amount
    grace_period_s: float = 0.0
    min_reclaim: Amount | None = None
    memory_model: MemoryModel = MemoryModel.WORKING_SET
    require_stall: StallRequirement | None = None
    exhaustion_within_s: float | None = None
    """Soft thresholds only: the grace also ends if the trend predicts exhaustion within this time."""
    above_kubelet: tuple[KubeletLevel, ...] = ()
    """The kubelet's own thresholds of this signal: the threshold is at least this far above each of them. It is not
    part of the identity. Empty: they are not known, or `aboveKubelet` is off."""
    configured_grace_s: float | None = None
    """The grace period of the configuration, if `grace_period_s` is shorter because of the kubelet's. The identity has
    this one."""

    @property
    def hard(self) -> bool:
        """A threshold without grace is hard, whichever map it was configured in (the kubelet's rule)."""
        return self.grace_period_s == 0.0

"""The signal table: one row for each signal, which makes its observation from what was read of the node.

A new signal is one family file (memory, pids, filesystems) that reads it, and one row here.
"""

from collections.abc import Callable, Mapping

from nodeagent.lean import Final, NamedTuple
from nodeagent.model import Observation, Signal
from nodeagent.sampling import filesystems
from nodeagent.sampling.memory import MEMINFO, MemoryFacts


class NodeFacts(NamedTuple):
    """Everything that one look at the node gave."""

    memory: MemoryFacts
    pids: Observation
    disks: filesystems.Readings
    now: float


def _memory(facts: NodeFacts) -> Observation:
    memory = facts.memory
    used = memory.root.value
    if memory.total is None or used is None:
        reason = memory.meminfo_reason if memory.total is None else memory.root.reason
        return Observation(Signal.MEMORY, None, memory.total, facts.now, memory.root_source, reason)
    return Observation(Signal.MEMORY, max(0, memory.total - used), memory.total, facts.now, memory.root_source)


def _allocatable_memory(facts: NodeFacts) -> Observation:
    memory, signal = facts.memory, Signal.ALLOCATABLE_MEMORY
    used, limit = memory.pods.value, memory.pods_limit
    if limit is None or used is None:
        return Observation(signal, None, limit, facts.now, memory.pods_source, memory.pods_reason)
    return Observation(signal, max(0, limit - used), limit, facts.now, memory.pods_source)


def _nodefs(facts: NodeFacts) -> Observation:
    return filesystems.observe_bytes(Signal.NODEFS, facts.disks.nodefs, facts.disks.layout.nodefs, facts.disks.read_at)


def _nodefs_inodes(facts: NodeFacts) -> Observation:
    return filesystems.observe_inodes(
        Signal.NODEFS_INODES, facts.disks.nodefs, facts.disks.layout.nodefs, facts.disks.read_at
    )


def _images(facts: NodeFacts) -> str:
    store = facts.disks.layout.store
    return store.images if store else "(no image store)"


def _containers(facts: NodeFacts) -> str:
    store = facts.disks.layout.store
    return store.containers if store else "(no image store)"


def _imagefs(facts: NodeFacts) -> Observation:
    return filesystems.observe_bytes(Signal.IMAGEFS, facts.disks.imagefs, _images(facts), facts.disks.read_at)


def _imagefs_inodes(facts: NodeFacts) -> Observation:
    return filesystems.observe_inodes(Signal.IMAGEFS_INODES, facts.disks.imagefs, _images(facts), facts.disks.read_at)


def _containerfs(facts: NodeFacts) -> Observation:
    return filesystems.observe_bytes(
        Signal.CONTAINERFS, facts.disks.containerfs, _containers(facts), facts.disks.read_at
    )


def _containerfs_inodes(facts: NodeFacts) -> Observation:
    signal = Signal.CONTAINERFS_INODES
    return filesystems.observe_inodes(signal, facts.disks.containerfs, _containers(facts), facts.disks.read_at)


def _pid(facts: NodeFacts) -> Observation:
    return facts.pids


READERS: Final[Mapping[Signal, Callable[[NodeFacts], Observation]]] = {
    Signal.MEMORY: _memory,
    Signal.ALLOCATABLE_MEMORY: _allocatable_memory,
    Signal.NODEFS: _nodefs,
    Signal.NODEFS_INODES: _nodefs_inodes,
    Signal.IMAGEFS: _imagefs,
    Signal.IMAGEFS_INODES: _imagefs_inodes,
    Signal.CONTAINERFS: _containerfs,
    Signal.CONTAINERFS_INODES: _containerfs_inodes,
    Signal.PID: _pid,
}


def observe(facts: NodeFacts) -> dict[Signal, Observation]:
    """One observation for each signal, always."""
    return {signal: read(facts) for signal, read in READERS.items()}


def observe_mem_available(facts: NodeFacts) -> Observation:
    """`memory.available` by the kernel's own estimate (MemAvailable) instead of the working set."""
    memory = facts.memory
    source = f"{MEMINFO} MemAvailable"
    if memory.mem_available is None or memory.total is None:
        reason = memory.meminfo_reason or f"{MEMINFO} has no MemAvailable"
        return Observation(Signal.MEMORY, None, memory.total, facts.now, source, reason)
    return Observation(Signal.MEMORY, memory.mem_available, memory.total, facts.now, source)

"""The signal tables: one row for each signal, a function that makes its observation from the readings of the node.

A new signal is one reader in its module (memory, pids, filesystems) and one row here.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from nodeagent.model import Observation, Signal
from nodeagent.sampling.node import filesystems
from nodeagent.sampling.node import memory as node_memory
from nodeagent.sampling.node.filesystems import Readings
from nodeagent.sampling.node.memory import MemoryLimits, MemoryPaths, MemoryReading


class NodeFacts(NamedTuple):
    """The readings of memory and PIDs."""

    limits: MemoryLimits
    paths: MemoryPaths
    memory: MemoryReading
    pids: Observation
    now: float


def _memory(facts: NodeFacts) -> Observation:
    total, used, source = facts.limits.total, facts.memory.root.value, facts.paths.root_source
    if total is None or used is None:
        reason = facts.limits.meminfo_reason if total is None else facts.memory.root.reason
        return Observation(Signal.MEMORY, None, total, facts.now, source, reason)
    return Observation(Signal.MEMORY, max(0, total - used), total, facts.now, source)


def _allocatable_memory(facts: NodeFacts) -> Observation:
    limit, used, source = facts.limits.pods, facts.memory.pods.value, facts.paths.pods_source
    if limit is None or used is None:
        reason = facts.memory.pods.reason if used is None else facts.limits.pods_reason
        return Observation(Signal.ALLOCATABLE_MEMORY, None, limit, facts.now, source, reason)
    return Observation(Signal.ALLOCATABLE_MEMORY, max(0, limit - used), limit, facts.now, source)


def observe_allocatable_by_kernel(facts: NodeFacts) -> Observation:
    """`allocatableMemory.available` with the page cache that reclaim can drop counted as available."""
    limit, used, source = facts.limits.pods, facts.memory.pods_without_cache.value, facts.paths.pods_cache_source
    if limit is None or used is None:
        reason = facts.memory.pods_without_cache.reason if used is None else facts.limits.pods_reason
        return Observation(Signal.ALLOCATABLE_MEMORY, None, limit, facts.now, source, reason)
    return Observation(Signal.ALLOCATABLE_MEMORY, max(0, limit - used), limit, facts.now, source)


def _pid(facts: NodeFacts) -> Observation:
    return facts.pids


def _images(disks: Readings) -> str:
    store = disks.layout.store
    return store.images if store else "(no image store)"


def _containers(disks: Readings) -> str:
    store = disks.layout.store
    return store.containers if store else "(no image store)"


def _nodefs(disks: Readings) -> Observation:
    return filesystems.observe_bytes(Signal.NODEFS, disks.nodefs, disks.layout.nodefs, disks.read_at)


def _nodefs_inodes(disks: Readings) -> Observation:
    return filesystems.observe_inodes(Signal.NODEFS_INODES, disks.nodefs, disks.layout.nodefs, disks.read_at)


def _imagefs(disks: Readings) -> Observation:
    return filesystems.observe_bytes(Signal.IMAGEFS, disks.imagefs, _images(disks), disks.read_at)


def _imagefs_inodes(disks: Readings) -> Observation:
    return filesystems.observe_inodes(Signal.IMAGEFS_INODES, disks.imagefs, _images(disks), disks.read_at)


def _containerfs(disks: Readings) -> Observation:
    return filesystems.observe_bytes(Signal.CONTAINERFS, disks.containerfs, _containers(disks), disks.read_at)


def _containerfs_inodes(disks: Readings) -> Observation:
    return filesystems.observe_inodes(Signal.CONTAINERFS_INODES, disks.containerfs, _containers(disks), disks.read_at)


READERS: Final[Mapping[Signal, Callable[[NodeFacts], Observation]]] = {
    Signal.MEMORY: _memory,
    Signal.ALLOCATABLE_MEMORY: _allocatable_memory,
    Signal.PID: _pid,
}
DISK_READERS: Final[Mapping[Signal, Callable[[Readings], Observation]]] = {
    Signal.NODEFS: _nodefs,
    Signal.NODEFS_INODES: _nodefs_inodes,
    Signal.IMAGEFS: _imagefs,
    Signal.IMAGEFS_INODES: _imagefs_inodes,
    Signal.CONTAINERFS: _containerfs,
    Signal.CONTAINERFS_INODES: _containerfs_inodes,
}


def observe_disks(disks: Readings) -> dict[Signal, Observation]:
    """One observation for each signal of a file system; an unknown one has its reason."""
    return {signal: read(disks) for signal, read in DISK_READERS.items()}


def observations(facts: NodeFacts, disks: Mapping[Signal, Observation]) -> dict[Signal, Observation]:
    """One observation for each signal; an unknown one has its reason. `disks` is the result of `observe_disks`."""
    return {signal: read(facts) for signal, read in READERS.items()} | dict(disks)


def observe_mem_available(memory: MemoryLimits, *, now: float) -> Observation:
    """`memory.available` from the kernel's own estimate (MemAvailable) and the cache of ZFS, without a working set."""
    source = f"{node_memory.MEMINFO} MemAvailable"
    if memory.mem_available is None or memory.total is None:
        reason = memory.meminfo_reason or f"{node_memory.MEMINFO} has no MemAvailable"
        return Observation(Signal.MEMORY, None, memory.total, now, source, reason)
    available = memory.mem_available + memory.zfs_cache
    if not memory.zfs_cache or available > memory.total:  # a cache that is not of this memory
        return Observation(Signal.MEMORY, memory.mem_available, memory.total, now, source)
    return Observation(Signal.MEMORY, available, memory.total, now, f"{source} + evictable cache of ZFS")

"""Read what a pod holds of one signal's resource.

Every function returns None where the amount is unknown: not measured, too old or not plausible. An unknown amount never
makes a pod a victim.
"""

from typing import Final, NamedTuple

from nodeagent.config.schema import Config
from nodeagent.model import (
    DISK_INODE_SIGNALS,
    MEMORY_SIGNALS,
    DiskLayout,
    DiskUsage,
    MemoryModel,
    NodeSnapshot,
    PodUsage,
    Signal,
    units,
)
from nodeagent.policy import plausibility

DISK_MAX_AGE_S: Final = 600.0
"""Older disk usage counts as unknown. Five times the kubelet's limit, because the walk of a full disk with millions of
files takes minutes."""

_IMAGE_SIGNALS: Final = frozenset({Signal.IMAGEFS, Signal.IMAGEFS_INODES})
_NODE_SIGNALS: Final = frozenset({Signal.NODEFS, Signal.NODEFS_INODES})


class MemoryRule(NamedTuple):
    """What counts in the memory usage of a pod, beside its working set or in its place."""

    swap_limit: int = 0
    """The most swap of a pod that counts."""
    page_cache: bool = True
    """Active page cache counts, as in the working set. Otherwise only what the kernel cannot drop."""


WORKING_SET: Final = MemoryRule()


def holds_no_pod_data(signal: Signal, layout: DiskLayout) -> bool:
    """True for imagefs of a split layout: it holds images alone, and no eviction frees anything there."""
    return layout is DiskLayout.SPLIT and signal in _IMAGE_SIGNALS


def signal_usage(
    usage: PodUsage | None,
    signal: Signal,
    layout: DiskLayout,
    *,
    limit: int = units.MAX_PLAUSIBLE,
    memory: MemoryRule = WORKING_SET,
    kubelet: bool = False,
) -> int | None:
    """The pod's usage of the signal's resource: memory, PIDs, or disk usage.

    An amount above `limit` is not plausible. `kubelet`: what the kubelet's order counts, processes instead of PIDs and
    logs wherever they are.
    """
    if usage is None:
        return None
    if signal in MEMORY_SIGNALS:
        return memory_usage(usage, memory, limit=limit)
    if signal is Signal.PID:
        return plausibility.plausible(usage.process_count, limit=limit) if kubelet else pids(usage, limit=limit)
    return disk_usage(usage.disk, signal, layout, limit=limit, kubelet=kubelet)


def pids(usage: PodUsage, *, limit: int = units.MAX_PLAUSIBLE) -> int | None:
    """The PIDs that the pod holds: one for each thread, as `pid.available` counts them. If its threads are unknown, its
    processes, a lower bound."""
    threads = plausibility.plausible(usage.thread_count, limit=limit)
    return threads if threads is not None else plausibility.plausible(usage.process_count, limit=limit)


def memory_rule(snapshot: NodeSnapshot, *, config: Config) -> MemoryRule:
    """The working set alone with the kubelet's order (kubernetes/kubernetes#129578).

    In our own order swap counts up to SwapTotal, or not if that is unknown. Page cache counts only where the kubelet's
    figure alone decides: no other shortage is one of page cache, and a pod that reads files would be evicted for the
    memory of another.
    """
    if config.ranking.kubelet:
        return WORKING_SET
    models = {each.memory_model for each in config.thresholds if each.signal is Signal.MEMORY}
    swap = plausibility.plausible(snapshot.memory.swap_total) if snapshot.memory is not None else None
    return MemoryRule(swap or 0, page_cache=models == {MemoryModel.WORKING_SET})


def memory_usage(usage: PodUsage, rule: MemoryRule, *, limit: int = units.MAX_PLAUSIBLE) -> int | None:
    """The pod's own working set, else the sum over its containers, without page cache and with what it has in swap as
    the rule says. Without a reading of what the kernel cannot drop the working set counts."""
    working_set = usage.memory_working_set
    used = plausibility.plausible(working_set if working_set is not None else _containers_memory(usage), limit=limit)
    if used is None:
        return None
    if not rule.page_cache:
        kept = plausibility.plausible(usage.memory_unreclaimable, limit=limit)
        used = used if kept is None else min(used, kept)
    return used + swap_usage(usage, limit=rule.swap_limit) if rule.swap_limit else used


def swap_usage(usage: PodUsage, *, limit: int) -> int:
    """What the pod has in swap and not in memory as well; 0 if it is unknown or above `limit`, so that the usage is
    then the working set alone."""
    swap = plausibility.plausible(usage.memory_swap, limit=limit) or 0
    return max(0, swap - (plausibility.plausible(usage.memory_swap_cached) or 0))


def _containers_memory(usage: PodUsage) -> int | None:
    """The working set of a pod whose own cgroup could not be read; None unless every container's was read."""
    each = [plausibility.plausible(container.memory_working_set) for container in usage.containers]
    return sum(size for size in each if size is not None) if each and None not in each else None


def disk_usage(
    disk: DiskUsage,
    signal: Signal,
    layout: DiskLayout,
    *,
    limit: int = units.MAX_PLAUSIBLE,
    kubelet: bool = False,
) -> int | None:
    """What the pod holds on the signal's file system, with deleted files that are held open and layers of containers
    that have ended.

    KUBELET-CONTRACT 5 has the table of parts for each layout. If only some parts were measured, it is their sum, a
    lower bound. None also for an unknown layout. Logs on a file system of their own count for a `kubelet` alone.
    """
    if layout is DiskLayout.UNKNOWN:
        return None
    if holds_no_pod_data(signal, layout):
        return 0
    layers: tuple[int | None, ...]
    logs_and_volumes: tuple[int | None, ...]
    if signal in DISK_INODE_SIGNALS:
        layers = disk.rootfs_inodes, disk.deleted_layer_inodes, disk.ended_layer_inodes
        logs_and_volumes = disk.volumes_inodes, disk.deleted_volume_inodes, disk.logs_inodes
    else:
        layers = disk.rootfs_bytes, disk.deleted_layer_bytes, disk.ended_layer_bytes
        logs_and_volumes = disk.volumes_bytes, disk.deleted_volume_bytes, disk.logs_bytes
    if not (disk.logs_on_nodefs or kubelet):
        logs_and_volumes = logs_and_volumes[:-1]
    parts: tuple[int | None, ...] = layers + logs_and_volumes
    if layout is DiskLayout.DEDICATED_IMAGEFS:
        parts = logs_and_volumes if signal in _NODE_SIGNALS else layers
    measured = [part for part in (plausibility.plausible(part, limit=limit) for part in parts) if part is not None]
    return plausibility.plausible(sum(measured), limit=limit) if measured else None


def disk_usage_expired(usage: PodUsage, *, at: float, max_age_s: float = DISK_MAX_AGE_S) -> bool:
    """True if the pod's disk usage was measured longer ago than `max_age_s`."""
    return usage.disk_usage_quality is not None and at - usage.disk_usage_quality.read_at > max_age_s


def written_bytes(
    usage: PodUsage | None, *, at: float, max_age_s: float, limit: int = units.MAX_PLAUSIBLE
) -> int | None:
    """What the pod wrote since its writes are counted: the best estimate of what it holds before the first disk walk.

    None if it wrote nothing, or its counters were read longer ago than `max_age_s`.
    """
    writing = usage.writing if usage is not None else None
    if writing is None or not writing.written > 0 or at - writing.read_at > max_age_s:
        return None
    return plausibility.plausible(min(writing.written, limit))

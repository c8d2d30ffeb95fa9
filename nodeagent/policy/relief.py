"""Predict what evictions free, and select the least harmful set of pods that covers a deficit.

Promises:

1. Relief is what an eviction really frees: memory that the kernel could not reclaim otherwise, disk that is deleted
   with the pod, threads. Clean page cache is no relief, also not what memory.min or memory.low protects, and neither
   is swap, except for the memory that zram takes for it.
2. The selected set covers the deficit with as few pods as possible out of the shortest prefix of the eviction order
   that covers it; among sets of that size it is the first in the order. No member is superfluous.
3. If all candidates together cannot cover the deficit, the refusal lists the largest other holders with their amounts.

Theory of operation. The rank decides which pod is evicted first, the relief decides whether its eviction matters. The
order is cut where the pods so far suffice, and no pod behind the cut is evicted, however large. Within the cut, a small
pod is left out if the others cover the deficit without it.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from nodeagent.config import resolve
from nodeagent.config.schema import Config, ReliefConfig
from nodeagent.model import (
    MEMORY_SIGNALS,
    SIGNAL_TABLE,
    DiskLayout,
    HostDirectory,
    MemoryModel,
    NodeSnapshot,
    PodUsage,
    Refusal,
    RefusalCode,
    Signal,
    Unit,
    ZombieHolder,
    units,
)
from nodeagent.policy import plausibility, pod_usage

UNREAD_SHARE: Final = 0.5
"""Share of the working set that counts as relief if memory.stat of a pod could not be read. The working set contains
the active page cache, so the true share is between 0 (all cache) and 1. A larger share evicts pods without effect, a
smaller one evicts more pods than needed."""
TOP_DIRECTORIES: Final = 3
"""How many host directories a futility message lists for a disk."""
TOP_CGROUPS: Final = 3
"""How many cgroups outside kubepods a futility message lists."""


# --- what an eviction frees ------------------------------------------------------------------------------------------


class SwapMemory(NamedTuple):
    """The memory that swap takes: zram only."""

    share: float
    """Of a byte in swap, on average: 0 to 1."""
    limit: int
    """More swap than this is not plausible for one pod."""


NO_SWAP_MEMORY: Final = SwapMemory(0.0, 0)


def predicted_relief(
    usage: PodUsage | None,
    signal: Signal,
    layout: DiskLayout,
    *,
    limit: int = units.MAX_PLAUSIBLE,
    swap_memory: SwapMemory = NO_SWAP_MEMORY,
) -> int | None:
    """What evicting the pod frees: bytes, inodes or PIDs; None if unknown.

    For memory it is `memory_unreclaimable`, else half of the working set, and the memory that its swap takes. Children
    that live too short to be in a sample are not counted here; `candidates` adds them.
    """
    if usage is None:
        return None
    if signal in MEMORY_SIGNALS:
        freed = plausibility.plausible(usage.memory_unreclaimable, limit=limit)
        if freed is None:
            working_set = plausibility.plausible(usage.memory_working_set, limit=limit)
            freed = int(working_set * UNREAD_SHARE) if working_set is not None else None
        if freed is not None and swap_memory.share:
            swap = plausibility.plausible(usage.memory_swap, limit=swap_memory.limit) or 0
            freed += int(swap * swap_memory.share)
        return freed
    if signal is Signal.PID:
        return pod_usage.pids(usage, limit=limit)
    return pod_usage.disk_usage(usage.disk, signal, layout, limit=limit)


def swap_memory(snapshot: NodeSnapshot, *, config: Config) -> SwapMemory:
    """What zram takes for all that is in swap.

    The kernel does not show which device has a pod's pages, so beside a disk each pod has its share of the zram.
    Nothing where the kubelet's figure alone decides, which does not see zram, and with the kubelet's order.
    """
    memory = snapshot.memory
    models = {each.memory_model for each in config.thresholds if each.signal is Signal.MEMORY}
    if memory is None or config.ranking.kubelet or models <= {MemoryModel.WORKING_SET}:
        return NO_SWAP_MEMORY
    total, free, zram = (plausibility.plausible(each) for each in (memory.swap_total, memory.swap_free, memory.zram))
    if total is None or free is None or not zram or total <= free:
        return NO_SWAP_MEMORY
    return SwapMemory(min(1.0, zram / (total - free)), total)


def minimum_relief(rules: ReliefConfig, deficit: int) -> int:
    """The least relief that counts for this deficit, at least 1."""
    return max(1, resolve.resolve_amount(rules.minimum_relief, capacity=deficit) or 0)


def unseen_pids(snapshot: NodeSnapshot) -> int:
    """PIDs in use that no pod and no other known cgroup holds in this sample.

    They belong to the kernel, to unlisted cgroups, and to children that ended between the count of the node and the
    count of their pod.
    """
    observation = snapshot.observations[Signal.PID]
    if type(observation.available) is not int or (capacity := plausibility.plausible(observation.capacity)) is None:
        return 0
    pods = [predicted_relief(usage, Signal.PID, snapshot.layout) for _, usage in snapshot.pods]
    attributed = _plausible_sum([*pods, *(group.process_count for group in snapshot.cgroups)])
    return max(0, capacity - observation.available - attributed)


def unattributed_amount(signal: Signal, snapshot: NodeSnapshot) -> int:
    """What is in use and attributed to no pod and no other known part of the node: the most that a pod of unknown usage
    may hold. `units.MAX_PLAUSIBLE` if even that is unknown."""
    observation = snapshot.observations[signal]
    if type(observation.available) is not int or (capacity := plausibility.plausible(observation.capacity)) is None:
        return units.MAX_PLAUSIBLE
    if signal is Signal.PID:
        return unseen_pids(snapshot)
    if signal in MEMORY_SIGNALS:
        attributed = _plausible_sum([usage.memory_working_set for _, usage in snapshot.pods if usage is not None])
        if signal is Signal.MEMORY:  # allocatable memory is used by pods alone
            attributed += _plausible_sum([group.memory_working_set for group in snapshot.cgroups])
    else:
        attributed = _plausible_sum(_disk_usages(signal, snapshot))
        attributed += sum(size for size, _ in _host_directories(signal, snapshot))
    return max(0, capacity - observation.available - attributed)


# --- the least harmful set -------------------------------------------------------------------------------------------


def least_harmful_set(reliefs: Sequence[int], deficit: int, *, max_pods: int) -> tuple[int, ...]:
    """Indices of the victims in `reliefs`, which is in eviction order and contains only pods whose relief counts.

    If more than `max_pods` pods are needed, or all of them do not suffice, it is the `max_pods` largest of the prefix;
    the next decision continues from there.
    """
    total = cut = 0
    for cut, relief in enumerate(reliefs, start=1):  # noqa: B007
        total += relief
        if total >= deficit:
            break
    largest = sorted(range(cut), key=lambda index: (-reliefs[index], index))
    covered = size = 0
    for size, index in enumerate(largest, start=1):  # noqa: B007
        covered += reliefs[index]
        if covered >= deficit:
            break
    if size > max_pods or covered < deficit:
        return tuple(sorted(largest[:max_pods]))
    return _first_of_size(reliefs[:cut], deficit, size=size)


def _first_of_size(reliefs: Sequence[int], deficit: int, *, size: int) -> tuple[int, ...]:
    """Of all sets of `size` that cover the deficit, the first in the order."""
    tops: list[tuple[int, ...]] = [()]  # from the back: the `size - 1` largest behind each index, largest first
    for relief in reversed(reliefs[1:]):
        behind = tops[-1]
        if len(behind) < size - 1 or (behind and relief > behind[-1]):
            behind = tuple(sorted((*behind, relief), reverse=True)[: size - 1])
        tops.append(behind)
    tops.reverse()
    selected: list[int] = []
    missing = deficit
    for index, relief in enumerate(reliefs):
        left = size - len(selected)
        if left and relief + sum(tops[index][: left - 1]) >= missing:
            selected.append(index)
            missing -= relief
    return tuple(selected)


# --- futility --------------------------------------------------------------------------------------------------------


def futility_refusal(
    signal: Signal, *, deficit: int, evictable: int, candidates: int, snapshot: NodeSnapshot
) -> Refusal:
    """Why the candidates cannot cover the deficit, with the largest other holders of the resource."""
    unit = SIGNAL_TABLE[signal].unit
    holders = other_holders(signal, snapshot)
    listed = f"; largest other holders: {', '.join(holders)}" if holders else ""
    missing = f"{signal.value}: {units.format_amount(deficit, unit)} missing"
    if not candidates:
        return Refusal(RefusalCode.NO_CANDIDATES, f"{missing}, no candidate frees enough{listed}")
    freed = units.format_amount(evictable, unit)
    return Refusal(RefusalCode.FUTILE, f"{missing}, all {candidates} candidates would free {freed}{listed}")


def other_holders(signal: Signal, snapshot: NodeSnapshot) -> tuple[str, ...]:
    """What holds the resource apart from candidates, with amounts: largest holders outside kubepods first."""
    if signal in MEMORY_SIGNALS:
        return (*_top_cgroups(snapshot), *_node_memory(snapshot))
    if signal is Signal.PID:
        pods = _plausible_sum([pod_usage.pids(usage) for _, usage in snapshot.pods if usage is not None])
        groups = [(plausibility.plausible(group.process_count) or 0, group.path) for group in snapshot.cgroups]
        groups.sort(key=lambda row: (-row[0], row[1]))
        zombies = [f"zombies of {each.unit} {each.zombies}" for each in _host_zombies(snapshot)[:TOP_CGROUPS]]
        holders = [f"{path} {count}" for count, path in groups[:TOP_CGROUPS] if count]
        return (*zombies, *holders, f"all pods {pods}")
    return _disk_holders(signal, snapshot)


def _host_zombies(snapshot: NodeSnapshot) -> tuple[ZombieHolder, ...]:
    return snapshot.zombies.of_host if snapshot.zombies is not None else ()


def _disk_holders(signal: Signal, snapshot: NodeSnapshot) -> tuple[str, ...]:
    observation, unit = snapshot.observe(signal), SIGNAL_TABLE[signal].unit
    capacity, available = plausibility.plausible(observation.capacity), plausibility.plausible(observation.available)
    if capacity is None or available is None:
        return ()
    usages = _disk_usages(signal, snapshot)
    pods = _plausible_sum(usages)
    rest = units.format_amount(max(0, capacity - available - pods), unit)
    if usages and all(plausibility.plausible(each) is None for each in usages):
        holders = [f"{rest} in use, disk usage of pods unknown"]
    else:
        holders = [f"pods {units.format_amount(pods, unit)}", f"not attributed to pods {rest}"]
    for size, directory in _host_directories(signal, snapshot)[:TOP_DIRECTORIES]:
        at_least = "" if directory.complete else "at least "
        holders.append(f"{directory.path} {at_least}{units.format_amount(size, unit)}")
    deleted, pod = max(
        [
            (plausibility.plausible(usage.disk_usage_quality.deleted_bytes) or 0, pod.key)
            for pod, usage in snapshot.pods
            if usage and usage.disk_usage_quality
        ],
        default=(0, ""),
    )
    if unit is Unit.BYTES and deleted > 0:
        holders.append(f"deleted files held open by {pod} {units.format_amount(deleted)}")
    return tuple(holders)


def _disk_usages(signal: Signal, snapshot: NodeSnapshot) -> list[int | None]:
    usages = [usage for _, usage in snapshot.pods if usage is not None]
    return [pod_usage.disk_usage(usage.disk, signal, snapshot.layout) for usage in usages]


def _host_directories(signal: Signal, snapshot: NodeSnapshot) -> list[tuple[int, HostDirectory]]:
    """Size and directory, the largest of the signal's file system first, without empty ones."""
    disk = next((disk for disk in snapshot.unattributed_disks if signal in disk.signals), None)
    if disk is None:
        return []
    in_bytes = SIGNAL_TABLE[signal].unit is Unit.BYTES
    sizes = [(plausibility.plausible(each.bytes if in_bytes else each.inodes) or 0, each) for each in disk.largest]
    return sorted([row for row in sizes if row[0]], key=lambda row: (-row[0], row[1].path))


def _top_cgroups(snapshot: NodeSnapshot) -> tuple[str, ...]:
    groups = [(plausibility.plausible(group.memory_working_set) or 0, group.path) for group in snapshot.cgroups]
    groups.sort(key=lambda row: (-row[0], row[1]))
    return tuple([f"{path} {units.format_amount(size)}" for size, path in groups[:TOP_CGROUPS] if size])


def _node_memory(snapshot: NodeSnapshot) -> tuple[str, ...]:
    memory = snapshot.memory
    if memory is None:
        return ()
    pods = _plausible_sum([usage.memory_working_set for _, usage in snapshot.pods if usage is not None])
    groups = _plausible_sum([group.memory_working_set for group in snapshot.cgroups])
    total, available = (
        plausibility.plausible(memory.total),
        plausibility.plausible(snapshot.observations[Signal.MEMORY].available),
    )
    parts = [("pods", pods), ("shmem", _plausible_sum([memory.shmem]))]
    parts.append(("slab", _plausible_sum([memory.slab_reclaimable, memory.slab_unreclaimable])))
    parts.append(("hugepages", _plausible_sum([memory.hugetlb])))
    parts.append(("zram", _plausible_sum([memory.zram])))
    if total is not None and available is not None:
        parts.append(("not attributed", max(0, total - available - pods - groups)))
    return tuple([f"{name} {units.format_amount(size)}" for name, size in parts if size > 0])


def _plausible_sum(values: Sequence[int | None]) -> int:
    return sum(plausibility.plausible(value) or 0 for value in values)

"""What evictions would free, how much is missing, and the least harmful set of pods that covers it.

Promises:

1. Only what an eviction would really free counts: memory that reclaim alone would not give back, disk that goes with
   the pod, threads. Clean page cache is nobody's relief.
2. The chosen set covers the deficit with as few pods as possible out of the shortest prefix of the eviction order that
   covers it; among sets of that size it is the one that stands first. No member is superfluous.
3. If all candidates together cannot cover the deficit that is said, with numbers of where the resource is instead.

Theory of operation. Rank says who should go first, relief says whether it would matter. The order is cut where the pods
so far would suffice: nobody behind the cut is touched, however large. Within the cut a small pod whose share others
must bring anyway is left alone.
"""

from collections.abc import Sequence
from typing import Final

from nodeagent.config.resolve import resolve
from nodeagent.config.schema import ReliefConfig
from nodeagent.model import (
    MEMORY_SIGNALS,
    SIGNAL_TABLE,
    DiskLayout,
    HostDirectory,
    NodeSnapshot,
    PodUsage,
    Refusal,
    RefusalCode,
    Signal,
    Unit,
    units,
)
from nodeagent.policy import pod_usage
from nodeagent.policy.plausibility import plausible

UNREAD_SHARE: Final = 0.5
"""Share of the working set that counts as relief when memory.stat of a pod could not be read. The working set still
has the active page cache, so the truth lies between 0 (all of it cache) and 1: too high evicts in vain, too low evicts
more pods than needed."""
TOP_DIRECTORIES: Final = 3
"""How many host directories it names for a disk."""
TOP_CGROUPS: Final = 3
"""How many cgroups outside kubepods a futility text names."""


def predicted_relief(
    usage: PodUsage | None, signal: Signal, layout: DiskLayout, *, limit: int = units.MAX_PLAUSIBLE
) -> int | None:
    """What evicting the pod is expected to free: bytes, inodes or (for `pid.available`) threads.

    None: not known. For memory it is `memory_unreclaimable`, else half of the working set. For a pod that forks
    `line_up` adds children that were not seen.
    """
    if usage is None:
        return None
    if signal in MEMORY_SIGNALS:
        freed = usage.memory_unreclaimable
        if type(freed) is int and 0 <= freed <= limit:  # `sound`, without the call
            return freed
        freed = None
        if (working_set := plausible(usage.memory_working_set, limit=limit)) is not None:
            freed = int(working_set * UNREAD_SHARE)
        return freed
    if signal is Signal.PID:
        threads = plausible(usage.thread_count, limit=limit)
        return threads if threads is not None else plausible(usage.process_count, limit=limit)
    return pod_usage.disk_usage(usage.disk, signal, layout, limit=limit)


def unseen_pids(snapshot: NodeSnapshot) -> int:
    """PIDs in use that neither a pod nor another known cgroup was seen to hold: those of the kernel, of what is not
    listed, and of children that were gone when their pod was counted, a moment after the node."""
    seen = snapshot.observations[Signal.PID]
    if type(seen.available) is not int or (capacity := plausible(seen.capacity)) is None:
        return 0
    held = [predicted_relief(usage, Signal.PID, snapshot.layout) for _, usage in snapshot.pods]
    return max(0, capacity - seen.available - _sum_of([*held, *(group.process_count for group in snapshot.cgroups)]))


def unattributed_amount(signal: Signal, snapshot: NodeSnapshot) -> int:
    """What is used of the signal's resource and neither a pod nor another known part of the node is seen to hold: the
    most that a pod may hold of which that is not known. `units.MAX_PLAUSIBLE` where not even that can be told."""
    seen = snapshot.observations[signal]
    if type(seen.available) is not int or (capacity := plausible(seen.capacity)) is None:
        return units.MAX_PLAUSIBLE
    if signal is Signal.PID:
        return unseen_pids(snapshot)
    used = capacity - seen.available
    if signal in MEMORY_SIGNALS:
        held = _sum_of([usage.memory_working_set for _, usage in snapshot.pods if usage is not None])
        if signal is Signal.MEMORY:  # of the other one only pods take
            held += _sum_of([group.memory_working_set for group in snapshot.cgroups])
    else:
        disks = [
            pod_usage.disk_usage(usage.disk, signal, snapshot.layout) for _, usage in snapshot.pods if usage is not None
        ]
        held = _sum_of(disks) + sum(size for size, _ in _host_directories(signal, snapshot))
    return max(0, used - held)


def minimum(rules: ReliefConfig, deficit: int) -> int:
    """The least relief that makes evicting a pod worth while for this deficit, at least 1."""
    return max(1, resolve(rules.minimum_relief, capacity=deficit) or 0)


def least_harmful(reliefs: Sequence[int], deficit: int, *, max_pods: int) -> tuple[int, ...]:
    """Indices of the victims in `reliefs`, which is in eviction order and has only pods that matter.

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
    """Of all sets of `size` that cover the deficit, the one that stands first in the order."""
    tops: list[tuple[int, ...]] = [()]  # from the back: the `size - 1` largest behind each index, largest first
    for relief in reversed(reliefs[1:]):
        behind = tops[-1]
        if len(behind) < size - 1 or (behind and relief > behind[-1]):
            behind = tuple(sorted((*behind, relief), reverse=True)[: size - 1])
        tops.append(behind)
    tops.reverse()
    chosen: list[int] = []
    missing = deficit
    for index, relief in enumerate(reliefs):
        left = size - len(chosen)
        if left and relief + sum(tops[index][: left - 1]) >= missing:
            chosen.append(index)
            missing -= relief
    return tuple(chosen)


# --- the futility brake ----------------------------------------------------------------------------------------------


def futile(signal: Signal, *, deficit: int, evictable: int, candidates: int, snapshot: NodeSnapshot) -> Refusal:
    """The candidates together cannot cover the deficit, or there is none: say so, and where the resource is instead."""
    unit = SIGNAL_TABLE[signal].unit
    where = other_holders(signal, snapshot)
    held = f"; where it is: {', '.join(where)}" if where else ""
    missing = f"{signal.value}: {units.format_amount(deficit, unit)} are missing"
    if not candidates:
        return Refusal(
            RefusalCode.NO_CANDIDATES, f"{missing} and no pod that may be evicted holds enough to matter{held}"
        )
    freed = units.format_amount(evictable, unit)
    return Refusal(RefusalCode.FUTILE, f"{missing} and evicting all {candidates} candidates would free {freed}{held}")


def other_holders(signal: Signal, snapshot: NodeSnapshot) -> tuple[str, ...]:
    """Where the resource is if not in pods that may be evicted, largest holders outside kubepods first."""
    if signal in MEMORY_SIGNALS:
        return (*_top_cgroups(snapshot), *_node_memory(snapshot))
    if signal is Signal.PID:
        ours = _sum_of([usage.process_count for _, usage in snapshot.pods if usage is not None])
        tops = [(plausible(group.process_count) or 0, group.path) for group in snapshot.cgroups]
        tops.sort(key=lambda row: (-row[0], row[1]))
        return (*(f"{path} {count}" for count, path in tops[:TOP_CGROUPS] if count), f"all pods {ours} processes")
    observation = snapshot.observe(signal)
    capacity, available = plausible(observation.capacity), plausible(observation.available)
    if capacity is None or available is None:
        return ()
    unit = SIGNAL_TABLE[signal].unit
    of_pods = [
        pod_usage.disk_usage(usage.disk, signal, snapshot.layout) for _, usage in snapshot.pods if usage is not None
    ]
    pods = _sum_of(of_pods)
    rest = max(0, capacity - available - pods)
    if of_pods and all(plausible(each) is None for each in of_pods):
        parts = [f"{units.format_amount(rest, unit)} in use, and what pods hold of it is not known"]
    else:
        parts = [f"pods {units.format_amount(pods, unit)}", f"not attributed to pods {units.format_amount(rest, unit)}"]
    for size, directory in _host_directories(signal, snapshot)[:TOP_DIRECTORIES]:
        parts.append(f"{directory.path} {'' if directory.complete else 'at least '}{units.format_amount(size, unit)}")
    held = [
        (plausible(usage.disk_usage_quality.deleted_bytes) or 0, pod.key)
        for pod, usage in snapshot.pods
        if usage and usage.disk_usage_quality
    ]
    deleted, who = max(held, default=(0, ""))
    if unit is Unit.BYTES and deleted > 0:
        parts.append(f"deleted files held open by {who} {units.format_amount(deleted)}")
    return tuple(parts)


def _host_directories(signal: Signal, snapshot: NodeSnapshot) -> list[tuple[int, HostDirectory]]:
    """Size and directory, the largest of that file system, those that hold nothing left out."""
    rest = next((rest for rest in snapshot.unattributed_disks if signal in rest.signals), None)
    if rest is None:
        return []
    in_bytes = SIGNAL_TABLE[signal].unit is Unit.BYTES
    sizes = [(plausible(each.bytes if in_bytes else each.inodes) or 0, each) for each in rest.largest]
    return sorted([row for row in sizes if row[0]], key=lambda row: (-row[0], row[1].path))


def _top_cgroups(snapshot: NodeSnapshot) -> tuple[str, ...]:
    tops = [(plausible(group.memory_working_set) or 0, group.path) for group in snapshot.cgroups]
    tops.sort(key=lambda row: (-row[0], row[1]))
    return tuple([f"{path} {units.format_amount(size)}" for size, path in tops[:TOP_CGROUPS] if size])


def _node_memory(snapshot: NodeSnapshot) -> tuple[str, ...]:
    memory = snapshot.memory
    if memory is None:
        return ()
    pods = _sum_of([usage.memory_working_set for _, usage in snapshot.pods if usage is not None])
    groups = _sum_of([group.memory_working_set for group in snapshot.cgroups])
    total, available = plausible(memory.total), plausible(snapshot.observations[Signal.MEMORY].available)
    parts = [("pods", pods), ("shmem", _sum_of([memory.shmem]))]
    parts.append(("slab", _sum_of([memory.slab_reclaimable, memory.slab_unreclaimable])))
    parts.append(("hugepages", _sum_of([memory.hugetlb])))
    if total is not None and available is not None:
        parts.append(("not attributed", max(0, total - available - pods - groups)))
    return tuple([f"{name} {units.format_amount(size, Unit.BYTES)}" for name, size in parts if size > 0])


def _sum_of(values: Sequence[int | None]) -> int:
    return sum(plausible(value) or 0 for value in values)

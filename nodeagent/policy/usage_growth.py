"""Measure how fast each pod's usage grows, in units per second.

Theory of operation. `record_sample` keeps some samples of memory and PIDs, and two complete disk walks of each pod, at
least `SAMPLE_DISTANCE_S` apart. Memory and PIDs grow from the newer kept sample that is old enough; inodes grow from
one walk to the next; bytes on disk grow by the pod's write rate, because its walks are far apart. PIDs also count the
fork rate, because no sample contains children that live for milliseconds. Each sample also keeps the memory that is in
use and in no pod.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from nodeagent.model import (
    DISK_BYTE_SIGNALS,
    DISK_INODE_SIGNALS,
    DISK_SIGNALS,
    DiskLayout,
    DiskUsage,
    NodeSnapshot,
    PodUsage,
    Signal,
    units,
)
from nodeagent.policy import plausibility, pod_usage, relief
from nodeagent.policy.pod_usage import MemoryRule

SAMPLES: Final = 6
"""Half a minute: a pod whose usage swings (garbage collection, a pool of threads) has not grown since all of them."""
SAMPLE_DISTANCE_S: Final = 5.0
"""Distance of two kept samples: longer than the noise of single forks and allocations, shorter than a fork bomb
needs for a whole PID table (about 16 s at 2,000/s)."""
SAMPLE_MAX_AGE_S: Final = 60.0
"""An older sample (a stopped agent) is no base for growth."""
WALK_MIN_DISTANCE_S: Final = 0.5
"""Two walks that are nearer give no growth: the shortest pause between walks below a threshold. In the first
`SAMPLE_DISTANCE_S` after the crossing there are no others."""
WALK_MAX_DISTANCE_S: Final = pod_usage.DISK_MAX_AGE_S
"""Two walks that are further apart give no growth."""
PROJECTION_S: Final = 10.0
"""How far ahead the key `projectedUsage` computes: one sync of the kubelet. A bomb of 2,000 forks/s (performance.md R1)
then counts 20,000 more PIDs, a server that starts its 200 workers at most a few hundred."""

GrowthRate = Callable[[PodUsage | None, int | None], float]
"""From a pod's usage, and its amount of the signal's resource, to units per second; 0 where growth is unknown."""


class SampledUsage(NamedTuple):
    """What a pod used in one sample, in bytes and PIDs. None: unknown."""

    memory: int | None
    pids: int | None


class DiskWalk(NamedTuple):
    """The result of one complete walk of one pod."""

    at: float
    disk: DiskUsage


class Growth(NamedTuple):
    """By how much a pod has grown, and within what time."""

    amount: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.amount / self.seconds


NO_GROWTH: Final = Growth(0, 1.0)


class GrowthState(NamedTuple):
    """The kept samples, by pod, because the UIDs are most of what is recorded."""

    times: tuple[float, ...] = ()
    """Of the samples, at most `SAMPLES`, the newest last."""
    used: Mapping[str, tuple[SampledUsage, ...]] = {}
    """By cgroup UID the usage in the newest samples, without a gap, the newest last."""
    walks: Mapping[str, tuple[DiskWalk, ...]] = {}
    """By cgroup UID the last two walks, the newest last: each pod has its own time of walk."""
    outside: tuple[int | None, ...] = ()
    """Beside `times`: the bytes of memory that are in use and in no pod. None: unknown."""


# --- record ----------------------------------------------------------------------------------------------------------


def record_sample(
    state: GrowthState, snapshot: NodeSnapshot, *, memory_rule: MemoryRule = pod_usage.WORKING_SET
) -> GrowthState:
    """The state with this snapshot's usage, if the newest kept sample is old enough. `memory_rule` as in the ranking:
    by it a pod that is swapped out or in neither shrinks nor grows."""
    taken_at, walks = snapshot.taken_at, record_walks(state.walks, snapshot)
    if state.times and 0 <= taken_at - state.times[-1] < SAMPLE_DISTANCE_S:
        return state._replace(walks=walks)
    if state.times and not state.times[-1] < taken_at:  # the clock of another boot
        state = GrowthState()
    used = {
        usage.cgroup_uid: (
            *state.used.get(usage.cgroup_uid, ())[1 - SAMPLES :],
            SampledUsage(pod_usage.memory_usage(usage, memory_rule), pod_usage.pids(usage)),
        )
        for _, usage in snapshot.pods
        if usage is not None
    }
    outside = (*state.outside[1 - SAMPLES :], memory_outside_pods(snapshot, memory_rule))
    return GrowthState((*state.times[1 - SAMPLES :], taken_at), used, walks, outside)


def memory_outside_pods(snapshot: NodeSnapshot, memory_rule: MemoryRule) -> int | None:
    """The bytes of memory that are in use and in no pod (MemTotal - MemAvailable - pods). Only differences between
    samples mean something: MemAvailable is an estimate.

    None: unknown. So it is where page cache counts as usage of the pods, because MemAvailable counts it as free.
    """
    memory = snapshot.mem_available
    available, capacity = (plausibility.plausible(each) for each in (memory.available, memory.capacity))
    if memory_rule.page_cache or available is None or capacity is None:
        return None
    in_pods = 0
    for pod, usage in snapshot.pods:
        used = pod_usage.memory_usage(usage, memory_rule) if usage is not None else None
        if used is None and (usage is not None or any(each.running for each in pod.containers)):
            return None
        in_pods += used or 0
    return capacity - available - in_pods


def record_walks(
    walks: Mapping[str, tuple[DiskWalk, ...]], snapshot: NodeSnapshot
) -> Mapping[str, tuple[DiskWalk, ...]]:
    """The kept walks of the pods in the snapshot whose disk usage is measured."""
    usages = [usage for _, usage in snapshot.pods if usage is not None and usage.disk_usage_quality is not None]
    found = [(usage.cgroup_uid, _with_walk(walks.get(usage.cgroup_uid, ()), usage)) for usage in usages]
    return {uid: kept for uid, kept in found if kept}


def _with_walk(kept: tuple[DiskWalk, ...], usage: PodUsage) -> tuple[DiskWalk, ...]:
    """The kept walks and the one in `usage`, if it is new and complete: after an incomplete walk, a lower bound, the
    next one would look like growth."""
    quality = usage.disk_usage_quality
    if quality is None or not quality.complete or (kept and 0 <= quality.read_at - kept[-1].at < SAMPLE_DISTANCE_S):
        return kept
    before = kept[-1:] if kept and kept[-1].at < quality.read_at else ()
    return (*before, DiskWalk(quality.read_at, usage.disk))


# --- rates -----------------------------------------------------------------------------------------------------------


def growth_rate(state: GrowthState, signal: Signal, layout: DiskLayout, *, at: float) -> GrowthRate:
    """How fast a pod grows, for ranking. A pod that the kept sample does not contain has grown from zero since."""
    if signal in DISK_BYTE_SIGNALS:
        return _write_rate
    if signal in DISK_INODE_SIGNALS:
        return walk_growth_rate(state, signal, layout)
    bases = _usable_samples(state, at=at)
    if not bases:
        return _fork_rate if signal is Signal.PID else _no_growth
    base, forks = bases[0], signal is Signal.PID

    def sampled_growth(usage: PodUsage | None, used: int | None) -> float:
        if usage is None:
            return 0.0
        before = _used_at(state, base, usage.cgroup_uid, signal) or 0
        grown = 0.0 if used is None else (used - before) / (at - state.times[base])
        return max(grown, _fork_rate(usage, used)) if forks else grown

    return sampled_growth


def walk_growth_rate(
    state: GrowthState, signal: Signal, layout: DiskLayout, *, min_distance_s: float = SAMPLE_DISTANCE_S
) -> GrowthRate:
    """How fast a pod grows on a disk, from one complete walk to the next, so far apart if there are such."""

    def walk_growth(usage: PodUsage | None, used: int | None) -> float:
        return _walk_growth(state, usage, used, signal, layout, min_distance_s).per_second

    return walk_growth


def certain_growth_rate(state: GrowthState, signal: Signal, *, at: float) -> GrowthRate:
    """How fast a pod certainly grows: the least growth since any kept sample that contains it, which the two newest
    must. It is 0 for disks, because a pod may delete what it writes."""
    bases = _usable_samples(state, at=at)
    if not bases or signal in DISK_SIGNALS:
        return _no_growth

    def least_growth(usage: PodUsage | None, used: int | None) -> float:
        if usage is None or used is None:
            return 0.0
        if signal is Signal.PID:
            used = pod_usage.pids(usage) or 0  # in the kubelet's order the usage counts processes
        rates: list[float] = []
        for base in bases:
            before = _used_at(state, base, usage.cgroup_uid, signal)
            if before is None:
                break
            rates.append((used - before) / (at - state.times[base]))
        return max(0.0, min(rates)) if len(rates) >= min(2, len(bases)) else 0.0

    return least_growth


def growth_outside_pods(state: GrowthState, snapshot: NodeSnapshot, *, memory_rule: MemoryRule) -> float:
    """How fast, in bytes per second, memory certainly grows that is in no pod: the least growth since any kept sample.
    0: it does not grow, or that is unknown."""
    used, at = memory_outside_pods(snapshot, memory_rule), snapshot.taken_at
    bases = _usable_samples(state, at=at)
    before = [state.outside[base] if len(state.outside) >= -base else None for base in bases]
    if used is None or len(bases) < 2:
        return 0.0
    rates = [
        0.0 if amount is None else (used - amount) / (at - state.times[base])
        for base, amount in zip(bases, before, strict=True)
    ]
    return max(0.0, min(rates))


def measured_growth_rate(
    state: GrowthState, signal: Signal, snapshot: NodeSnapshot, *, loss_per_s: float | None
) -> GrowthRate:
    """How fast a pod grows by the evidence that explains at least half of what the signal loses now (`loss_per_s`)."""
    if signal in DISK_SIGNALS:
        return _measured_on_disk(state, signal, snapshot, loss_per_s)
    certain = certain_growth_rate(state, signal, at=snapshot.taken_at)
    return _measured_pids(certain, snapshot, loss_per_s) if signal is Signal.PID else certain


def _measured_pids(certain: GrowthRate, snapshot: NodeSnapshot, loss_per_s: float | None) -> GrowthRate:
    """How fast the threads of a pod become more. Where that does not explain the loss it is at least what the pod forks
    and no sample contains: the children of a fork bomb may end within milliseconds."""
    usages = [usage for _, usage in snapshot.pods if usage is not None]
    if loss_per_s and sum([certain(usage, pod_usage.pids(usage)) for usage in usages]) * 2 >= loss_per_s:
        return certain
    unseen = relief.unseen_pids(snapshot)

    def growth_or_forks(usage: PodUsage | None, used: int | None) -> float:
        return max(certain(usage, used), min(unseen, expected_forks(usage)) / PROJECTION_S)

    return growth_or_forks


def _measured_on_disk(
    state: GrowthState, signal: Signal, snapshot: NodeSnapshot, loss_per_s: float | None
) -> GrowthRate:
    """How fast a pod grows from one walk to the next.

    Between walks that are far apart a pod may have written much and be idle since, and one that has just begun seems
    slow. So the newest evidence counts that explains the loss:

    1. what a pod writes now, if the last two walks show as much: one that stopped since the first of them is idle;
    2. what it wrote while its writes were watched, if they show as much: it may pause for a moment;
    3. the same if earlier walks show as much: it may pause for longer. But a pod that was watched from its start on may
       have written everything then;
    4. the last two walks. A pod that allocates without a write (fallocate), or on a file system whose writes are
       charged to no pod (ZFS), explains nothing by its writes.
    """
    at, layout = snapshot.taken_at, snapshot.layout
    far_apart = walk_growth_rate(state, signal, layout)
    if not loss_per_s:
        return far_apart

    between_last_walks = walk_growth_rate(state, signal, layout, min_distance_s=WALK_MIN_DISTANCE_S)

    def growth_by_writes(usage: PodUsage | None, used: int | None) -> float:
        grown, wrote = _walk_growth(state, usage, used, signal, layout, SAMPLE_DISTANCE_S), _written(usage, at=at)
        return Growth(min(grown.amount, wrote.amount), min(grown.seconds, wrote.seconds)).per_second

    def growth_by_both(usage: PodUsage | None, used: int | None) -> float:
        return min(growth_by_writes(usage, used), between_last_walks(usage, used))

    def growth_now(usage: PodUsage | None, used: int | None) -> float:
        writes_per_s = 0.0 if _written(usage, at=at) is NO_GROWTH else _write_rate(usage, used)
        return min(writes_per_s, between_last_walks(usage, used))

    newest = [between_last_walks]
    if signal in DISK_BYTE_SIGNALS:
        newest = [growth_now, growth_by_both, growth_by_writes, between_last_walks]
    usages = [usage for _, usage in snapshot.pods if usage is not None]
    for rate in newest:
        grown = [rate(usage, pod_usage.disk_usage(usage.disk, signal, layout)) for usage in usages]
        if sum(each for each in grown if each > 0) * 2 >= loss_per_s:
            return rate
    return far_apart


def expected_forks(usage: PodUsage | None) -> int:
    """The number of children that the pod starts in `PROJECTION_S`, short-lived ones included."""
    return int(min(_fork_rate(usage, None) * PROJECTION_S, units.MAX_PLAUSIBLE))


def _usable_samples(state: GrowthState, *, at: float) -> list[int]:
    """The kept samples of a useful age, the newest first, which is -1."""
    newest_first = enumerate(reversed(state.times), 1)
    return [-number for number, taken_at in newest_first if SAMPLE_DISTANCE_S / 2 <= at - taken_at <= SAMPLE_MAX_AGE_S]


def _used_at(state: GrowthState, sample: int, uid: str, signal: Signal) -> int | None:
    """What the pod used in this sample; None if that is unknown."""
    kept = state.used.get(uid, ())
    if len(kept) < -sample:
        return None
    return kept[sample].pids if signal is Signal.PID else kept[sample].memory


def _no_growth(_usage: PodUsage | None, _used: int | None) -> float:
    return 0.0


def _write_rate(usage: PodUsage | None, _used: int | None) -> float:
    return usage.writing.bytes_per_s if usage is not None and usage.writing else 0.0


def _written(usage: PodUsage | None, *, at: float) -> Growth:
    """What the pod wrote while its writes were watched; nothing where that is unknown."""
    writing = usage.writing if usage is not None else None
    if writing is None or writing.watched_s <= 0.0 or at - writing.read_at > SAMPLE_DISTANCE_S:
        return NO_GROWTH
    return Growth(writing.written, writing.watched_s)


def _fork_rate(usage: PodUsage | None, _used: int | None) -> float:
    forks = usage.forks_per_s if usage is not None else None
    return forks if forks is not None and 0.0 <= forks <= units.MAX_PLAUSIBLE else 0.0


def _walk_growth(
    state: GrowthState,
    usage: PodUsage | None,
    used: int | None,
    signal: Signal,
    layout: DiskLayout,
    min_distance_s: float,
) -> Growth:
    """Growth from an earlier walk to the one in `usage`, or from zero if the pod started and no walk is earlier;
    nothing if neither is known or it is too long ago."""
    quality = usage.disk_usage_quality if usage is not None else None
    if usage is None or used is None or quality is None or not quality.complete:
        return NO_GROWTH
    bases: list[Growth] = []
    for walk in state.walks.get(usage.cgroup_uid, ()):
        count, seconds = pod_usage.disk_usage(walk.disk, signal, layout), quality.read_at - walk.at
        if count is not None and WALK_MIN_DISTANCE_S <= seconds <= WALK_MAX_DISTANCE_S:
            bases.append(Growth(used - count, seconds))
    if bases:
        far_enough = [base for base in bases if base.seconds >= min_distance_s]
        return far_enough[-1] if far_enough else bases[0]
    lived_s = quality.read_at - usage.started_at if usage.started_at is not None else 0.0
    return Growth(used, lived_s) if SAMPLE_DISTANCE_S <= lived_s <= WALK_MAX_DISTANCE_S else NO_GROWTH

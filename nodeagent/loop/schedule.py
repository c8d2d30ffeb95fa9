"""When each source of the node is read, and how long the loop sleeps.

Theory of operation. A sync begins with a node sample: the signals alone, 10 us. `plan_next` takes it and evaluates
every row of `SOURCES`. A row is one function `due(view, state)`, which returns the time on CLOCK_BOOTTIME at which its
source is due. NEVER means that nothing needs it. A time that has passed means in this sync. Limits and file systems
are read with the node sample, so for them it means in the next sync.

    source        due
    node          RATE of every signal, between `SHORTEST_S` and the interval; at most `SOFT_SAMPLE_S` below a threshold
    limits        RATE of memory, CALM at most; every sync if a threshold is crossed, unknown or uses MemAvailable (the
                  lower of both figures does)
    filesystems   RATE of each disk, CALM at most; every sync if crossed, near or soon; after `UNKNOWN_S` if unknown
    own limits    with each node sample, which is taken as soon as a pod of `ownLimit` may be near its limit
    full sample   every sync below a hard threshold or with an eviction in flight; at each crossing; as soon as a pod is
                  near a memory limit of its own, and every interval while it is; every
                  `SOFT_SAMPLE_S` below a soft one; every interval while only page cache is short; else CALM. Waits for
                  a hard crossing that is imminent
    prearm        if a hard threshold is crossed within `PREARM_AHEAD_S`
    growth cap    if a hard memory threshold is crossed within `GROWTH_CAP_AHEAD_S`

RATE is `SAFETY` * headroom / max(recent fill, fastest measured fill). Headroom is the distance to the threshold, and
below the threshold the distance to exhaustion. The fastest measured fill keeps a calm node from sleeping through a ramp
that has not started yet: cgroup v2 sends no event at a memory level.

A memory threshold that uses the lower of both figures has two levels: the lower figure, whose crossing changes a
condition, and what evictions count (`policy.memory_shortage`), whose crossing makes them due. A node may be full of
page cache for days, so the first one alone makes no sync urgent.

CALM is the interval for the first `CALM_AFTER` full samples and while work is pending, then `CALM_S`.

The node row is the next wake-up: it is the minimum over all signals, and every other row is evaluated after a node
sample. File systems are read by threads, because a dead one may never answer, and that takes longer than all the rest;
the limits are a third of a node sample. So neither is read at 50 Hz while something else runs short.
"""

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.config import resolve
from nodeagent.model import (
    DISK_SIGNALS,
    MEMORY_SIGNALS,
    SIGNAL_TABLE,
    MemoryModel,
    NodeSnapshot,
    Observation,
    Signal,
    Threshold,
    Tier,
    Unit,
)
from nodeagent.policy import memory_shortage

SHORTEST_S: Final = 0.02
"""50 Hz: what a decision near a threshold is worth (performance.md R4)."""
SAFETY: Final = 0.5
"""Sleep half of the time that is left, so that the fastest ramp is sampled before it arrives."""
FILL_HALF_LIFE_S: Final = 30.0
"""A fill rate counts for half after this: a burst is often followed by another."""

FASTEST: Final[Mapping[Unit, float]] = {Unit.BYTES: float(1 << 30), Unit.INODES: 50_000.0, Unit.PIDS: 25_000.0}
"""Per second. Bytes: the fastest memory ramp measured, ~950 MiB/s, first touch by one process (a disk fills slower).
Inodes and PIDs: about what one process makes of empty files, and the fastest fork storm measured (23,000/s)."""

SOFT_SAMPLE_S: Final = 0.25
"""Below soft thresholds alone a full sample is due this often: their grace is counted in seconds, and a ramp that goes
on must not reach the hard threshold during a decision that only waits. On a slow node (emulated, where a decision took
100 ms) 1 GiB/s went 190 MiB below the hard threshold before it was sampled."""

CALM_S: Final = 10.0
"""While no threshold is crossed the pods are read and a decision is made no more often than this. Only the ranking
needs them, and it needs one earlier sample that is 2.5 to 60 s old, to find the pods that grow. For 500 pods both take
10 times the CPU of a node sample. A kubelet syncs as rarely (KUBELET-CONTRACT, one sync)."""
CALM_AFTER: Final = 5
"""So many consecutive full samples without a crossed threshold make the node calm: a start waits for some fresh ones
(`startup.freshSamples`), and what was crossed a moment ago may be crossed again."""

IMMINENT_S: Final = 1.0
"""A hard crossing is imminent within this time at the fastest recent fill. Memory and PIDs only. A disk loses at most
20 MiB while a condition is published."""
MAX_POSTPONE_S: Final = 1.25
"""A full sample that is due waits for an imminent crossing at most this long: publishing a condition starts five
threads, and the syncs of the loop then took 120 to 340 ms instead of 10 (emulated), which is 100 to 300 MiB of the
fastest ramp."""

PREARM_AHEAD_S: Final = 0.05
"""The next node sample may find a hard threshold crossed if that is within this time at the present fill."""
PREARM_EVERY_S: Final = 0.1
"""Shortest pause between two prearms. One takes 5 ms for 500 pods, and a node may stay just above its threshold for
hours."""
PREARM_VALID_S: Final = 0.08
"""A prearmed pod reading is used by a decision that begins within this time."""

GROWTH_CAP_AHEAD_S: Final = 0.5
"""A growth cap is due if a hard memory crossing is within this time at the present fill. On a slow node (emulated) it
takes 100 ms to predict the victim, and its limit is right however early it is set."""
GROWTH_CAP_EVERY_S: Final = 0.25
"""Shortest pause between two predictions, which take as long as a prearm."""

UNKNOWN_S: Final = 1.0
"""A disk whose threshold cannot be judged is read again after this: a mount may come back, but the inodes of btrfs are
never known. Limits are then read in every sync: that is cheap, and for memory a second is long."""

SOON_S: Final = 60.0
"""A disk crosses its threshold soon if it does so within this time at its recent fill: long enough to walk some
millions of files before (200,000 take 0.35 s, performance.md R4)."""
NEAR_SHARE: Final = 0.1
"""A disk is near its threshold while its headroom is at most this share of the threshold's value."""

OWN_LIMIT_SOON_S: Final = 0.5
"""Own limits that are read again within this time are near: connections to the API server are opened."""

NEVER: Final = float("inf")
NOT_YET: Final = float("-inf")

_FASTEST: Final[Mapping[Signal, float]] = {signal: FASTEST[row.unit] for signal, row in SIGNAL_TABLE.items()}

Stream = tuple[Signal, MemoryModel, int | None]
"""What a threshold is compared with: the observation by a memory model, or (with its value) what evictions for a
threshold of `MemoryModel.LOWER` count."""


class SignalLevel(NamedTuple):
    """One stream at the last node sample."""

    available: int
    read_at: float
    fill_per_s: float
    """Fastest recent fill, decaying."""
    now_per_s: float = 0.0
    """Fill between the last two samples."""


class ScheduleState(NamedTuple):
    """What one call of `plan_next` leaves for the next."""

    levels: Mapping[Stream, SignalLevel] = {}
    crossed_before: frozenset[tuple[Stream, int]] = frozenset()
    """Thresholds that were crossed at the last full sample, by stream and value."""
    full_sample_at: float | None = None
    """When the last full sample was taken; None before the first one and after a reload."""
    postponed_since: float | None = None
    """Since when a full sample is due that waits for an imminent crossing."""
    calm: int = 0
    """Consecutive full samples without a crossed threshold; counted up to `CALM_AFTER`."""
    limits_at: float = NOT_YET
    """From when on MemTotal, MemAvailable and the limits are read again."""
    filesystems_at: float = NOT_YET
    """From when on the file systems are read again."""
    near_before: frozenset[str] = frozenset()
    """`ScheduleInputs.near_own_limit` at the last full sample."""
    prearmed_at: float = NOT_YET
    capped_at: float = NOT_YET


class ScheduleInputs(NamedTuple):
    """What decides on the next sources, besides the state."""

    node: NodeSnapshot
    """The newest node sample. Its time is the present."""
    thresholds: tuple[Threshold, ...]
    interval_s: float
    calm_s: float = CALM_S
    work_pending: bool = False
    """Decisions follow something that goes on although no threshold is crossed, such as a threshold that is met until
    its minimum reclaim is regained, or a condition that is True."""
    eviction_in_flight: bool = False
    """An eviction awaits its release."""
    startup_wait_s: float = 0.0
    """How long a calm start still waits for the API server to list the pods."""
    can_cap_growth: bool = True
    """A growth cap has an effect: mode enforce, a configured brake and cgroup v2."""
    near_own_limit: frozenset[str] = frozenset()
    """UIDs of the pods near a memory limit of their own."""
    own_limits_s: float = NEVER
    """When the own limits of pods are read again, with a node sample."""


class Schedule(NamedTuple):
    """What the loop does next."""

    sleep_s: float
    full_sample: bool
    """Sample the pods and decide, now."""
    under_pressure: bool
    """A threshold is crossed now."""
    headroom: Mapping[Signal, int]
    """Distance to the nearest threshold that is not crossed, of each signal that has one."""
    crossed: frozenset[Signal] = frozenset()
    """Signals below one of their thresholds."""
    own_limit_near: bool = False
    """A pod is or may soon be near a memory limit of its own."""
    near: frozenset[Signal] = frozenset()
    """Disk signals that are near a threshold."""
    soon: frozenset[Signal] = frozenset()
    """Disk signals that cross a threshold soon at their recent fill."""
    short: Tier | None = None
    """Memory or PIDs are short, and this tier may evict pods for it: now, or perhaps in the next sync."""
    prearm: bool = False
    """Sample and rank the pods now, without a decision: the next sync may have to decide."""
    growth_cap: bool = False
    """Predict the victim of the next hard memory threshold and cap its growth."""


class Source(enum.StrEnum):
    """What the loop reads or does at a time of its own."""

    NODE = "node"
    LIMITS = "limits"
    FILESYSTEMS = "filesystems"
    FULL_SAMPLE = "full sample"
    PREARM = "prearm"
    GROWTH_CAP = "growth cap"


class ThresholdLevel(NamedTuple):
    """A threshold against the newest sample."""

    threshold: Threshold
    stream: Stream
    value: int
    headroom: int
    """To the threshold; negative once it is crossed."""
    level: SignalLevel
    may_act: bool
    """False: the crossing of this level changes a condition, and evicts no pod."""
    crossed: bool
    time_left_s: float
    """RATE: the share of the time to the threshold, or to exhaustion below it, that may be slept."""

    @property
    def near(self) -> bool:
        """True for a disk that is near its threshold. It may stay there for weeks."""
        return self.threshold.signal in DISK_SIGNALS and 0 <= self.headroom <= NEAR_SHARE * self.value

    @property
    def soon(self) -> bool:
        """True for a disk that crosses its threshold soon at its recent fill."""
        return self.threshold.signal in DISK_SIGNALS and 0 <= self.headroom < self.level.fill_per_s * SOON_S

    def crosses_within(self, seconds: float, *, fill_per_s: float) -> bool:
        return self.may_act and self.threshold.hard and 0 <= self.headroom < fill_per_s * seconds


class ScheduleView(NamedTuple):
    """The inputs, with every threshold judged once for all rows."""

    inputs: ScheduleInputs
    now: float
    known: tuple[ThresholdLevel, ...]
    unknown: frozenset[Signal]
    """Signals with a threshold that could not be judged. The next full sample reports them."""
    crossed: frozenset[tuple[Stream, int]]
    """As `ScheduleState.crossed_before`."""
    may_act: bool
    """A threshold is crossed for which pods may be evicted now or after its grace."""
    hard_crossed: bool
    """The same for a hard threshold."""

    @property
    def starting(self) -> bool:
        """True while a calm start waits for the API server."""
        pressed = self.may_act or self.inputs.eviction_in_flight
        return self.inputs.startup_wait_s > 0.0 and not pressed

    @property
    def filesystems_age_s(self) -> float:
        return self.now - self.inputs.node.observe(Signal.NODEFS).read_at

    def calm_every_s(self, state: ScheduleState) -> float:
        """CALM."""
        interval_s = self.inputs.interval_s
        if self.inputs.work_pending or state.calm < CALM_AFTER:
            return interval_s
        return max(interval_s, self.inputs.calm_s)


def plan_next(inputs: ScheduleInputs, state: ScheduleState) -> tuple[Schedule, ScheduleState]:
    """What is done in this sync and how long the loop sleeps after it, and the state for the next call."""
    view, levels = _judge(inputs, state)
    now = view.now
    due = {source: row(view, state) for source, row in SOURCES.items()}
    full_sample = due[Source.FULL_SAMPLE] <= now
    prearm = due[Source.PREARM] <= now and not full_sample
    growth_cap = due[Source.GROWTH_CAP] <= now and not full_sample
    schedule = Schedule(
        min(inputs.interval_s, max(SHORTEST_S, due[Source.NODE] - now)),  # a sum of large floats is rounded
        full_sample,
        bool(view.crossed),
        _nearest(view.known),
        crossed=frozenset([each.threshold.signal for each in view.known if each.crossed]),
        near=frozenset([each.threshold.signal for each in view.known if each.near]),
        soon=frozenset([each.threshold.signal for each in view.known if each.soon]),
        own_limit_near=bool(inputs.near_own_limit) or inputs.own_limits_s < OWN_LIMIT_SOON_S,
        short=_short(view.known),
        prearm=prearm,
        growth_cap=growth_cap,
    )
    after = state._replace(
        levels=levels,
        postponed_since=None if full_sample else _postponed_since(view, state),
        limits_at=due[Source.LIMITS],
        filesystems_at=due[Source.FILESYSTEMS],
        prearmed_at=now if prearm else min(state.prearmed_at, now),
        capped_at=now if growth_cap else min(state.capped_at, now),
    )
    return schedule, _after_full_sample(view, after) if full_sample else after


def _after_full_sample(view: ScheduleView, state: ScheduleState) -> ScheduleState:
    restless = view.crossed or view.inputs.work_pending or view.inputs.eviction_in_flight
    calm = 0 if restless else min(state.calm + 1, CALM_AFTER)
    near = view.inputs.near_own_limit
    return state._replace(crossed_before=view.crossed, near_before=near, full_sample_at=view.now, calm=calm)


# --- the rows --------------------------------------------------------------------------------------------------------


def node_due(view: ScheduleView, _state: ScheduleState) -> float:
    """The signal that may be used up first; a disk counts from when it was read."""
    times = [view.inputs.interval_s, view.inputs.own_limits_s]
    if view.may_act:
        times.append(SOFT_SAMPLE_S)
    if view.starting:
        times.append(view.inputs.startup_wait_s)
    for each in view.known:
        age_s = view.filesystems_age_s if each.threshold.signal in DISK_SIGNALS else 0.0
        times.append(each.time_left_s - age_s)
    return view.now + max(SHORTEST_S, min(times))


def limits_due(view: ScheduleView, state: ScheduleState) -> float:
    """A virtual machine that gets more memory when it has little must not lose a pod for it."""
    thresholds = view.inputs.thresholds
    if view.crossed or view.unknown - DISK_SIGNALS:
        return view.now
    if any(each.memory_model is not MemoryModel.WORKING_SET for each in thresholds):
        return view.now  # MemAvailable stands beside MemTotal in /proc/meminfo
    left_s = [each.time_left_s for each in view.known if each.threshold.signal in MEMORY_SIGNALS]
    return view.inputs.node.mem_available.read_at + min([view.calm_every_s(state), *left_s])


def filesystems_due(view: ScheduleView, state: ScheduleState) -> float:
    """A disk that is crossed, near or soon crossed is read in every sync."""
    disks = [each for each in view.known if each.threshold.signal in DISK_SIGNALS]
    if any(each.crossed or each.near or each.soon for each in disks):
        return view.now
    times = [view.calm_every_s(state), *(each.time_left_s for each in disks)]
    if view.unknown & DISK_SIGNALS:
        times.append(UNKNOWN_S)
    return view.now - view.filesystems_age_s + min(times)


def full_sample_due(view: ScheduleView, state: ScheduleState) -> float:
    """The decision. A full sample that waits for an imminent hard crossing is due when that wait ends."""
    if view.hard_crossed or view.inputs.eviction_in_flight:
        return view.now
    if view.starting:
        return view.now + view.inputs.startup_wait_s
    since = _postponed_since(view, state)
    return _regular_sample_due(view, state) if since is None else since + MAX_POSTPONE_S


def prearm_due(view: ScheduleView, state: ScheduleState) -> float:
    """The pods are read and ranked in time that would be slept away, so that the decision finds the victim ready."""
    soon = any(each.crosses_within(PREARM_AHEAD_S, fill_per_s=each.level.now_per_s) for each in view.known)
    return state.prearmed_at + PREARM_EVERY_S if soon and not view.starting else NEVER


def growth_cap_due(view: ScheduleView, state: ScheduleState) -> float:
    """Slightly earlier, predict the victim so that the executor can cap its memory.high."""
    memory = [each for each in view.known if each.threshold.signal in MEMORY_SIGNALS]
    soon = any(each.crosses_within(GROWTH_CAP_AHEAD_S, fill_per_s=each.level.now_per_s) for each in memory)
    possible = view.inputs.can_cap_growth and not view.starting
    return state.capped_at + GROWTH_CAP_EVERY_S if soon and possible else NEVER


SOURCES: Final[Mapping[Source, Callable[[ScheduleView, ScheduleState], float]]] = {
    Source.NODE: node_due,
    Source.LIMITS: limits_due,
    Source.FILESYSTEMS: filesystems_due,
    Source.FULL_SAMPLE: full_sample_due,
    Source.PREARM: prearm_due,
    Source.GROWTH_CAP: growth_cap_due,
}


def _regular_sample_due(view: ScheduleView, state: ScheduleState) -> float:
    """When a full sample is due that waits for nothing. A time in the future belongs to another boot: now."""
    last = state.full_sample_at
    changed = view.crossed ^ state.crossed_before
    if last is None or last > view.now or any(_may_act(stream) for stream, _ in changed):
        return view.now
    near = view.inputs.near_own_limit
    if near - state.near_before:
        return view.now
    if view.may_act or changed:
        return last + min(view.inputs.interval_s, SOFT_SAMPLE_S)
    return last + (view.inputs.interval_s if view.crossed or near else view.calm_every_s(state))


def _postponed_since(view: ScheduleView, state: ScheduleState) -> float | None:
    """Since when a full sample that is due waits for an imminent hard crossing: what it starts would delay the syncs in
    between. None if it does not wait. A threshold that is no longer crossed is decided on at once."""
    last, since = state.full_sample_at, state.postponed_since if state.postponed_since is not None else view.now
    if last is None or last > view.now or _regular_sample_due(view, state) > view.now:
        return None
    waits = _crossing_imminent(view.known) and view.crossed >= state.crossed_before
    return since if waits and 0.0 <= view.now - since < MAX_POSTPONE_S else None


def _crossing_imminent(known: Iterable[ThresholdLevel]) -> bool:
    swift = (each for each in known if each.threshold.signal not in DISK_SIGNALS)
    return any(each.crosses_within(IMMINENT_S, fill_per_s=each.level.fill_per_s) for each in swift)


# --- the sample ------------------------------------------------------------------------------------------------------


def _judge(inputs: ScheduleInputs, state: ScheduleState) -> tuple[ScheduleView, Mapping[Stream, SignalLevel]]:
    """Every threshold against the sample, and the level of each stream that has a threshold and is known."""
    known: list[ThresholdLevel] = []
    unknown: set[Signal] = set()
    levels: dict[Stream, SignalLevel] = {}
    for threshold in inputs.thresholds:
        observation = inputs.node.observe(threshold.signal, threshold.memory_model)
        value = resolve.resolve_threshold(threshold, capacity=observation.capacity)
        for stream, available in _streams(threshold, value, observation, inputs.node):
            level = levels.get(stream)
            if level is None and available is not None:
                level = levels[stream] = _next_level(state.levels.get(stream), available, observation.read_at)
            if level is None or value is None:
                unknown.add(threshold.signal)
            else:
                known.append(_threshold_level(threshold, stream, value, level))
    crossed = [each for each in known if each.crossed]
    acting = [each for each in crossed if each.may_act]
    view = ScheduleView(
        inputs,
        inputs.node.taken_at,
        tuple(known),
        frozenset(unknown),
        frozenset([(each.stream, each.value) for each in crossed]),
        may_act=bool(acting),
        hard_crossed=any(each.threshold.hard for each in acting),
    )
    return view, levels


def _threshold_level(threshold: Threshold, stream: Stream, value: int, level: SignalLevel) -> ThresholdLevel:
    headroom, may_act = level.available - value, _may_act(stream)
    crossed = headroom < 0
    left_s = SAFETY * (level.available if crossed else headroom) / max(level.fill_per_s, _FASTEST[threshold.signal])
    if not may_act:
        left_s = NEVER if crossed else max(SOFT_SAMPLE_S, left_s)
    return ThresholdLevel(threshold, stream, value, headroom, level, may_act, crossed, left_s)


def _streams(
    threshold: Threshold, value: int | None, observation: Observation, node: NodeSnapshot
) -> Sequence[tuple[Stream, int | None]]:
    """The streams that the threshold is compared with, and what is available by each."""
    signal, model = threshold.signal, threshold.memory_model
    first = (signal, model, None), observation.available
    if value is None or not memory_shortage.uses_both(threshold):
        return (first,)
    return first, ((signal, model, value), memory_shortage.available(node, threshold, level=value))


def _short(levels: Iterable[ThresholdLevel]) -> Tier | None:
    """The tier for which the usage of pods decides now, or soon about its victim. None while only page cache is short:
    that may last for days."""
    of_pods = [each for each in levels if each.threshold.signal not in DISK_SIGNALS and each.may_act]
    if any(
        (each.crossed and each.threshold.hard)
        or each.crosses_within(GROWTH_CAP_AHEAD_S, fill_per_s=each.level.now_per_s)
        for each in of_pods
    ):
        return Tier.HARD
    return Tier.SOFT if any(each.crossed for each in of_pods) else None


def _may_act(stream: Stream) -> bool:
    """False if only a condition follows from the crossing of a threshold by this stream."""
    signal, model, value = stream
    return value is not None or model is not MemoryModel.LOWER or signal not in MEMORY_SIGNALS


def _next_level(before: SignalLevel | None, available: int, read_at: float) -> SignalLevel:
    if before is None or read_at <= before.read_at:
        return SignalLevel(available, read_at, before.fill_per_s if before else 0.0)
    passed_s = read_at - before.read_at
    rate = max(0.0, (before.available - available) / passed_s)
    decayed: float = before.fill_per_s * 0.5 ** (passed_s / FILL_HALF_LIFE_S)
    return SignalLevel(available, read_at, max(rate, decayed), rate)


def _nearest(known: Iterable[ThresholdLevel]) -> Mapping[Signal, int]:
    nearest: dict[Signal, int] = {}
    for each in known:
        if not each.crossed:
            signal = each.threshold.signal
            nearest[signal] = min(each.headroom, nearest.get(signal, each.headroom))
    return nearest

"""When an eviction threshold is met, since when, and when it may act.

Theory of operation
===================

Each threshold is a small machine of its own. It looks at one *stream* of samples (its signal, by its memory model) and
is in one of three states:

    clear     not met
    running   met, its grace period not over
    past      met for its grace period: it may act, and from now on minimum reclaim makes it sticky

With `v` its value and `r` its minimum reclaim for the observed capacity, `a` what is available, `g` its grace period:

    from      sample                    to                           why
    --------  ------------------------  ---------------------------  -------------------------------------------------
    clear     v > a                     running, first observed now  equality is healthy; g = 0 passes on to `past`
    running   v > a                     running; past after g        g <= now - first observed, or exhaustion is near
    running   v <= a                    clear                        a grace that is interrupted starts anew
    past      v + r > a                 past                         once past, met until minimum reclaim is regained
    past      v + r <= a                clear
    any       unknown                   unchanged, its clock stopped  unknown is never pressure, nor relief
    any       unknown for too long      clear                        `sampling.staleAfter`; so is a gap between samples
                                                                     (suspend, the agent was down)
    any       the machine slept         unchanged, its clock stopped  a shorter sleep than that (`slept`)
    any       not configured any more   (forgotten)                  identity: signal, model, grace period, value

This is the kubelet's sync loop (KUBELET-CONTRACT, one sync, steps 5 to 11) but for the unknown samples: the kubelet
forgets a threshold at the first of them. Here one failed read neither starts a grace, nor continues, nor ends it: the
time from the last good sample to the next one is taken out of the grace. With `ranking.order: kubelet` the kubelet's
rule holds.

`met` is the level's affair alone: reports and conditions follow it at once. `due` is asked for more, all of it now:

    the grace period is over; or `exhaustionWithin` is set and the trend says that there will be nothing left within it
    the sample is new: read strictly later than the one of the previous judgement
    the stream has given `startup.freshSamples` good samples in a row since the start (`observe_only` starts it anew)
    the stall that it requires is seen (stall.py)

`exhaustionWithin` is a trigger beside the grace, never beside the level: a ramp towards a level still far away does
not act, and the same ramp below it does not wait.

A sample is unknown when it says so, and also when it cannot be true: no whole number, negative where nothing can be,
more available than there is, no or an unbelievable capacity, read too long ago, or read in the future.

State is a value: the caller keeps it, hands it in again, and may write it to disk. Times in it are CLOCK_BOOTTIME.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from nodeagent.config.resolve import as_fraction, resolve
from nodeagent.config.schema import Config
from nodeagent.model import (
    DiskLayout,
    MemoryModel,
    NodeSnapshot,
    Observation,
    Signal,
    SignalState,
    SignalVerdict,
    Threshold,
    ThresholdVerdict,
    units,
)
from nodeagent.policy import stall, trend

TREND_CONFIDENCE: Final = 0.6
"""A trend below this does not make a threshold act: on a signal that wobbles around a level the line explains less."""

USED_UP: Final = 0.1
"""Below this share of a threshold its signal counts as used up."""


class ThresholdState(NamedTuple):
    """What judging remembers. Keys are threshold identities and stream names; a fresh state has seen nothing."""

    first_observed: Mapping[str, float] = {}
    """Identity -> when it was first observed met, moved forward by the time its stream was unknown."""
    past_grace: tuple[str, ...] = ()
    """Identities met for their grace period."""
    read_at: Mapping[str, float] = {}
    """Stream -> read_at of its last good sample."""
    good_samples: Mapping[str, int] = {}
    """Stream -> new good samples in a row since the start; stays at `startup.freshSamples` once there."""
    unknown_since: Mapping[str, float] = {}
    """Stream -> when it became unknown."""
    history: Mapping[str, trend.History] = {}
    used_up_since: Mapping[str, float] = {}
    """Identity -> since when its signal is used up, moved forward by the time its stream was unknown."""


def history_of(state: ThresholdState, threshold: Threshold) -> trend.History:
    """The last good samples of the signal that the threshold is about."""
    return state.history.get(_stream(threshold), ())


def used_up(available: int, value: int) -> bool:
    """Whether so little is left that the signal cannot fall much further."""
    return available < value * USED_UP


def observe_only(state: ThresholdState) -> ThresholdState:
    """The state after a start or a change of configuration: nothing acts until enough fresh samples have come in.

    First-observed times survive: a grace period that was running keeps running.
    """
    return state._replace(good_samples={})


# --- which thresholds there are --------------------------------------------------------------------------------------


def effective(config: Config, layout: DiskLayout) -> tuple[Threshold, ...]:
    """The configured thresholds with those that follow from them.

    Hard `memory.available` also guards `allocatableMemory.available` where node allocatable is enforced.
    `containerfs.*` is never the user's: it follows nodefs (single and split layouts) or imagefs (dedicated imagefs);
    with an unknown layout there is none.
    """
    own = tuple(each for each in config.thresholds if each.signal not in _CONTAINERFS)
    return (*own, *(_allocatable(own) if config.enforce_node_allocatable else ()), *_containerfs(own, layout))


_CONTAINERFS: Final = (Signal.CONTAINERFS, Signal.CONTAINERFS_INODES)

_CONTAINERFS_FOLLOWS: Final[Mapping[DiskLayout, Mapping[Signal, Signal]]] = {
    DiskLayout.SINGLE: {
        Signal.NODEFS: Signal.CONTAINERFS,
        Signal.NODEFS_INODES: Signal.CONTAINERFS_INODES,
    },
    DiskLayout.SPLIT: {
        Signal.NODEFS: Signal.CONTAINERFS,
        Signal.NODEFS_INODES: Signal.CONTAINERFS_INODES,
    },
    DiskLayout.DEDICATED_IMAGEFS: {
        Signal.IMAGEFS: Signal.CONTAINERFS,
        Signal.IMAGEFS_INODES: Signal.CONTAINERFS_INODES,
    },
    DiskLayout.UNKNOWN: {},
}


def _allocatable(thresholds: tuple[Threshold, ...]) -> tuple[Threshold, ...]:
    # The pods' cgroup has no MemAvailable of its own, so the copy always looks at the working set.
    return tuple(
        each._replace(signal=Signal.ALLOCATABLE_MEMORY, memory_model=MemoryModel.WORKING_SET)
        for each in thresholds
        if each.signal is Signal.MEMORY and each.hard
    )


def _containerfs(thresholds: tuple[Threshold, ...], layout: DiskLayout) -> tuple[Threshold, ...]:
    follows = _CONTAINERFS_FOLLOWS[layout]
    return tuple(each._replace(signal=follows[each.signal]) for each in thresholds if each.signal in follows)


@lru_cache(maxsize=256)
def identity(threshold: Threshold) -> str:
    """What makes it the same threshold from one sample to the next: signal, memory model, grace period and value."""
    value = threshold.value
    amount = value.quantity if value.quantity is not None else f"{as_fraction(value.percentage)}*"
    return f"{_stream(threshold)}<{amount}~{threshold.grace_period_s:g}"


def _stream(threshold: Threshold) -> str:
    if threshold.signal is Signal.MEMORY and threshold.memory_model is MemoryModel.MEM_AVAILABLE:
        return _MEM_AVAILABLE_STREAM
    return threshold.signal.value


_MEM_AVAILABLE_STREAM: Final = f"{Signal.MEMORY.value}/{MemoryModel.MEM_AVAILABLE.value}"


# --- which samples are believed --------------------------------------------------------------------------------------


def unusable(observation: Observation, *, now: float, stale_after_s: float) -> str:
    """Why a sample is not known; empty when it can be believed. Comparisons are written so that NaN fails them."""
    available, capacity = observation.available, observation.capacity
    if available is None:
        return observation.reason or "not read"
    if type(available) is not int:
        return f"available is no whole number: {available!r}"
    if capacity is None:
        return "its capacity is not known"
    if type(capacity) is not int:
        return f"capacity is no whole number: {capacity!r}"
    if not 0 < capacity <= units.MAX_PLAUSIBLE:
        return f"a capacity of {capacity} cannot be"
    if available > capacity:
        return f"{available} available of {capacity} cannot be"
    if available < 0 and (observation.signal is not Signal.PID or available < -units.MAX_PLAUSIBLE):
        return f"{available} available cannot be"
    age = now - observation.read_at
    if not age <= stale_after_s:
        return f"its sample is {age:.1f}s old, stale after {stale_after_s:g}s"
    if not age >= -stall.CLOCK_SLACK_S:
        return f"its sample is from {-age:.1f}s in the future"
    return ""


class _StreamSample(NamedTuple):
    """One stream at this judgement."""

    name: str
    observation: Observation
    unknown: str
    """Why the sample is not known; empty when it is good."""
    is_new: bool
    """Read strictly later than the previous good sample."""
    good_samples: int
    history: trend.History
    stopped_s: float
    """How long the clocks of its thresholds stood still: unknown until just now."""
    keeps: bool
    """Whether what its thresholds were before still counts."""


def _read_stream(
    name: str, observation: Observation, state: ThresholdState, *, now: float, config: Config
) -> _StreamSample:
    stale_after_s = config.sampling.stale_after_s
    unknown = unusable(observation, now=now, stale_after_s=stale_after_s)
    tolerance_s = 0.0 if config.ranking.kubelet else stale_after_s
    since = _unknown_since(name, state, now=now, tolerance_s=tolerance_s)
    good = state.good_samples.get(name, 0)
    history = state.history.get(name, ())
    if unknown:
        still_starting = good < _fresh_samples(config)
        return _StreamSample(
            name,
            observation,
            unknown,
            is_new=False,
            good_samples=0 if still_starting else good,
            history=history,
            stopped_s=0.0,
            keeps=now - since < tolerance_s,
        )
    previous = state.read_at.get(name)
    # A time ahead of ours is from before a reboot: it must not make every sample look old.
    is_new = previous is None or observation.read_at > previous or previous > now + stall.CLOCK_SLACK_S
    available = observation.available
    assert available is not None
    return _StreamSample(
        name,
        observation,
        unknown,
        is_new=is_new,
        good_samples=min(good + is_new, max(good, _fresh_samples(config))),
        history=trend.extend(history, read_at=observation.read_at, available=available) if is_new else history,
        stopped_s=now - since,
        keeps=now - since <= tolerance_s,
    )


def _unknown_since(name: str, state: ThresholdState, *, now: float, tolerance_s: float) -> float:
    """Since when a stream is unknown; `now` when it is not. Nobody looking for too long (the machine was suspended,
    the agent was down) is as unknown as a failed read."""
    since = state.unknown_since.get(name, now)
    last = state.read_at.get(name, now)
    if tolerance_s and now - last > tolerance_s:
        since = min(since, last)
    return min(since, now)


def after_suspend(state: ThresholdState, slept_s: float, *, now: float) -> ThresholdState:
    """The state after so long a sleep of the machine, in which no grace period passed."""
    return state._replace(
        first_observed={key: min(at + slept_s, now) for key, at in state.first_observed.items()},
        unknown_since={name: min(at + slept_s, now) for name, at in state.unknown_since.items()},
        used_up_since={key: min(at + slept_s, now) for key, at in state.used_up_since.items()},
    )


def _fresh_samples(config: Config) -> int:
    return 0 if config.ranking.kubelet else config.startup.fresh_samples


# --- judging ---------------------------------------------------------------------------------------------------------


def judge(
    snapshot: NodeSnapshot,
    state: ThresholdState,
    *,
    now: float,
    config: Config,
    thresholds: tuple[Threshold, ...],
) -> tuple[tuple[SignalVerdict, ...], ThresholdState]:
    """One verdict for each signal, in the order of `Signal`, and the state for the next judgement.

    `now` is CLOCK_BOOTTIME. `thresholds` are `effective` ones; two of one identity are judged as one. A verdict's
    observation is the working set's unless all thresholds of the signal look at MemAvailable; a signal without
    thresholds is `ok` or `unknown`.
    """
    by_signal: dict[Signal, list[Threshold]] = {}
    for threshold in thresholds:
        by_signal.setdefault(threshold.signal, []).append(threshold)
    verdicts: list[SignalVerdict] = []
    after = _Next()
    past_before = frozenset(state.past_grace)
    for signal in _SIGNALS:
        streams: dict[str, _StreamSample] = {}
        judged: list[ThresholdVerdict] = []
        for threshold in by_signal.get(signal, ()):
            name = _stream(threshold)
            if name not in streams:
                seen = _observed(snapshot, signal, threshold.memory_model)
                streams[name] = _read_stream(name, seen, state, now=now, config=config)
            judged.append(
                _judge_one(
                    threshold, streams[name], state, after, past_before, snapshot=snapshot, now=now, config=config
                )
            )
        if not streams:
            streams[signal.value] = _read_stream(
                signal.value,
                _observed(snapshot, signal, MemoryModel.WORKING_SET),
                state,
                now=now,
                config=config,
            )
        for stream in streams.values():
            after.remember(stream, state, now=now)
        verdicts.append(_signal_verdict(streams, judged))
    return tuple(verdicts), after.state()


_SIGNALS: Final = tuple(Signal)


def _observed(snapshot: NodeSnapshot, signal: Signal, model: MemoryModel) -> Observation:
    try:
        return snapshot.observe(signal, model)
    except KeyError:
        return Observation(signal, None, None, snapshot.taken_at, "", reason="not sampled")


class _Next:
    """The state while it is being made."""

    __slots__ = ("first_observed", "good_samples", "history", "past_grace", "read_at", "unknown_since", "used_up_since")

    def __init__(self) -> None:
        self.first_observed: dict[str, float] = {}
        self.past_grace: list[str] = []
        self.read_at: dict[str, float] = {}
        self.good_samples: dict[str, int] = {}
        self.unknown_since: dict[str, float] = {}
        self.history: dict[str, trend.History] = {}
        self.used_up_since: dict[str, float] = {}

    def remember(self, stream: _StreamSample, before: ThresholdState, *, now: float) -> None:
        name = stream.name
        self.good_samples[name] = stream.good_samples
        if stream.history:
            self.history[name] = stream.history
        if stream.unknown:
            last_good = before.read_at.get(name, now)  # what lies between it and the failed read is not known either
            self.unknown_since[name] = min(before.unknown_since.get(name, last_good), now)
            if stream.keeps and name in before.read_at:
                self.read_at[name] = before.read_at[name]
        else:
            self.read_at[name] = stream.observation.read_at

    def state(self) -> ThresholdState:
        return ThresholdState(
            self.first_observed,
            tuple(self.past_grace),
            self.read_at,
            self.good_samples,
            self.unknown_since,
            self.history,
            self.used_up_since,
        )


def _judge_one(
    threshold: Threshold,
    stream: _StreamSample,
    state: ThresholdState,
    after: _Next,
    past_before: frozenset[str],
    *,
    snapshot: NodeSnapshot,
    now: float,
    config: Config,
) -> ThresholdVerdict:
    """One row of the table above: the threshold's next state goes into `after`."""
    key = identity(threshold)
    first = state.first_observed.get(key) if stream.keeps else None
    was_past = stream.keeps and key in past_before
    if stream.unknown:
        if first is not None:
            after.first_observed[key] = first
            if key in state.used_up_since:
                after.used_up_since[key] = state.used_up_since[key]
            if was_past:
                after.past_grace.append(key)
        return ThresholdVerdict(threshold, None, False, None, False, f"not known: {stream.unknown}")
    available, capacity = stream.observation.available, stream.observation.capacity
    value = resolve(threshold.value, capacity=capacity)
    if available is None or value is None:
        return ThresholdVerdict(threshold, value, False, None, False)
    reclaim = _reclaim(threshold, capacity) if was_past else 0
    if not value + reclaim > available:
        return ThresholdVerdict(threshold, value, False, None, False)
    since = now if first is None else min(first + stream.stopped_s, now)
    after.first_observed[key] = since
    if used_up(available, value):
        used_up_at = state.used_up_since.get(key) if first is not None else None
        after.used_up_since[key] = now if used_up_at is None else min(used_up_at + stream.stopped_s, now)
    held_back = _still_in_grace(threshold, stream, held_s=elapsed(since, now))
    if not held_back:
        after.past_grace.append(key)
        held_back = _held_back(threshold, stream, snapshot=snapshot, now=now, config=config)
    return ThresholdVerdict(threshold, value, True, since, not held_back, held_back)


def _reclaim(threshold: Threshold, capacity: int | None) -> int:
    if threshold.min_reclaim is None:
        return 0
    return resolve(threshold.min_reclaim, capacity=capacity) or 0


def elapsed(since: float, now: float) -> float:
    """Seconds from one instant to another, to the nanosecond: as exact as the kubelet's durations."""
    return round(now - since, 9)


def _still_in_grace(threshold: Threshold, stream: _StreamSample, *, held_s: float) -> str:
    """What a grace period still waits for; empty when it is over, or when waiting would be waiting for the end."""
    if held_s >= threshold.grace_period_s or _exhausted_soon(threshold, stream):
        return ""
    return f"met for {held_s:.1f}s of its grace period of {threshold.grace_period_s:g}s"


def _exhausted_soon(threshold: Threshold, stream: _StreamSample) -> bool:
    if threshold.exhaustion_within_s is None:
        return False
    heading = trend.estimate(stream.history)
    return (
        heading is not None
        and heading.to_exhaustion_s is not None
        and heading.to_exhaustion_s <= threshold.exhaustion_within_s
        and heading.confidence >= TREND_CONFIDENCE
    )


def _held_back(
    threshold: Threshold, stream: _StreamSample, *, snapshot: NodeSnapshot, now: float, config: Config
) -> str:
    """Why a threshold past its grace does not act now; empty when it is due."""
    wanted = _fresh_samples(config)
    if stream.good_samples < wanted:
        return f"observing only: {stream.good_samples} of {wanted} fresh samples since the start"
    if not stream.is_new:
        return "no new sample since the last judgement"
    if threshold.require_stall is not None:
        key = stall.check_stall(threshold.require_stall, snapshot, now=now, stale_after_s=config.sampling.stale_after_s)
        if not key.holds:
            return key.reason
    return ""


def _signal_verdict(streams: Mapping[str, _StreamSample], judged: list[ThresholdVerdict]) -> SignalVerdict:
    shown = next(iter(streams.values()))
    for stream in streams.values():
        if stream.name != _MEM_AVAILABLE_STREAM:
            shown = stream
    observation = shown.observation
    if shown.unknown:
        # What cannot be true is not passed on as a fact: readers of the verdict see it as unknown, and why.
        observation = observation._replace(available=None, reason=shown.unknown)
    values = [verdict.value for verdict in judged if verdict.value is not None and not verdict.met]
    return SignalVerdict(
        observation,
        _state(streams.values(), judged),
        tuple(judged),
        None if shown.unknown else trend.estimate(shown.history, values=values),
    )


def _state(streams: Iterable[_StreamSample], judged: list[ThresholdVerdict]) -> SignalState:
    """By level: a soft threshold that is met shows while its grace still runs."""
    met = [verdict.threshold.grace_period_s for verdict in judged if verdict.met]
    if met:
        return SignalState.HARD if 0.0 in met else SignalState.SOFT
    return SignalState.UNKNOWN if any(stream.unknown for stream in streams) else SignalState.OK

"""When an eviction threshold is met, since when, and when it is due.

Theory of operation. Each threshold is a small machine (`TRANSITIONS`). It reads one *stream* of samples: its signal, by
its memory model. With `v` its value, `r` its minimum reclaim for the observed capacity, `a` the available amount and
`g` its grace period, the guard `_event` compares:

* CLEAR and IN_GRACE: met if v > a. Equality is healthy.
* PAST_GRACE: met if v + r > a. Once past its grace, a threshold stays met until minimum reclaim is regained.
* The grace is over if g <= now - first observed, or if `exhaustionWithin` is set and the trend predicts exhaustion
  within it. `exhaustionWithin` shortens the grace, never the level: a ramp towards a threshold far away is not met.
* Unknown is never pressure, nor relief. A failed read neither starts nor continues nor ends a grace: the time from the
  last good sample to the next one is taken out of it. Too long are `sampling.staleAfter` without a good sample, a gap
  between two samples, or the time while the agent was not running.
* A shorter suspend of the machine stops the clock as well (`after_suspend`).

The state of a threshold that is no longer configured is dropped. Its identity is signal, memory model, grace period and
value.

This is the kubelet's sync loop (KUBELET-CONTRACT, one sync, steps 5 to 11) except for unknown samples: the kubelet
drops the state at the first one, and with `ranking.order: kubelet` this module does too.

Reports and conditions follow `met` at once. A threshold is `due` if all of this holds too:

* its stage is PAST_GRACE;
* the sample is new: it was read later than the sample of the previous judgement;
* the stream has given `startup.freshSamples` good samples in a row since the start (`observe_only` resets the count);
* the stall that it requires is present (`stall`).

A sample is unknown if its reader reports so, and also if it cannot be true: not a whole number, negative where nothing
can be, more available than there is, no or an implausible capacity, read too long ago, or read in the future.

The state is a value: the caller keeps it, passes it again, and may write it to disk. Its times are CLOCK_BOOTTIME.
"""

import enum
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from nodeagent.config import resolve
from nodeagent.config.schema import Config
from nodeagent.model import (
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
from nodeagent.model.machines import Machine
from nodeagent.policy import effective_thresholds, stall, trend

TREND_CONFIDENCE: Final = 0.6
"""A trend below this never makes a threshold due: if a signal oscillates around a level, the line explains less."""

USED_UP: Final = 0.1
"""Below this share of a threshold its signal counts as used up."""


class ThresholdStage(enum.StrEnum):
    """Stage of a threshold."""

    CLEAR = "clear"
    """Not met."""
    IN_GRACE = "in-grace"
    """Met, and its grace period is not over."""
    PAST_GRACE = "past-grace"
    """Met for its grace period: it may act, and minimum reclaim keeps it met."""


class ThresholdEvent(enum.StrEnum):
    """What a sample shows of a threshold."""

    MET = "met"
    MET_GRACE_OVER = "met-grace-over"
    NOT_MET = "not-met"
    UNKNOWN = "unknown"
    UNKNOWN_TOO_LONG = "unknown-too-long"


_S, _E = ThresholdStage, ThresholdEvent

TRANSITIONS: Final[Mapping[tuple[ThresholdStage, ThresholdEvent], ThresholdStage]] = {
    (_S.CLEAR, _E.MET): _S.IN_GRACE,
    (_S.CLEAR, _E.MET_GRACE_OVER): _S.PAST_GRACE,
    (_S.CLEAR, _E.NOT_MET): _S.CLEAR,
    (_S.CLEAR, _E.UNKNOWN): _S.CLEAR,
    (_S.CLEAR, _E.UNKNOWN_TOO_LONG): _S.CLEAR,
    (_S.IN_GRACE, _E.MET): _S.IN_GRACE,
    (_S.IN_GRACE, _E.MET_GRACE_OVER): _S.PAST_GRACE,
    (_S.IN_GRACE, _E.NOT_MET): _S.CLEAR,
    (_S.IN_GRACE, _E.UNKNOWN): _S.IN_GRACE,
    (_S.IN_GRACE, _E.UNKNOWN_TOO_LONG): _S.CLEAR,
    (_S.PAST_GRACE, _E.MET): _S.IN_GRACE,
    (_S.PAST_GRACE, _E.MET_GRACE_OVER): _S.PAST_GRACE,
    (_S.PAST_GRACE, _E.NOT_MET): _S.CLEAR,
    (_S.PAST_GRACE, _E.UNKNOWN): _S.PAST_GRACE,
    (_S.PAST_GRACE, _E.UNKNOWN_TOO_LONG): _S.CLEAR,
}

MACHINE: Final[Machine[ThresholdStage, ThresholdEvent]] = Machine(
    "Thresholds",
    "nodeagent/policy/thresholds.py",
    ThresholdStage,
    ThresholdEvent,
    TRANSITIONS,
    meanings={
        _E.MET: "the signal is below the value; in `past-grace`, below value and minimum reclaim",
        _E.MET_GRACE_OVER: "met, and the grace period is over or `exhaustionWithin` ends it early",
        _E.NOT_MET: "the signal is at or above that level",
        _E.UNKNOWN: "the sample is unknown",
        _E.UNKNOWN_TOO_LONG: (
            "unknown for `sampling.staleAfter`, or so long a gap between two samples; with `ranking.order: kubelet` "
            "any unknown sample"
        ),
    },
    remarks={
        (_S.IN_GRACE, _E.UNKNOWN): "its clock is stopped",
        (_S.PAST_GRACE, _E.UNKNOWN): "its clock is stopped",
        (_S.PAST_GRACE, _E.MET): "`exhaustionWithin` had ended the grace early, and the trend no longer holds",
    },
)


class ThresholdState(NamedTuple):
    """What one judgement leaves to the next. Keys are threshold identities and stream names."""

    first_observed: Mapping[str, float] = {}
    """Identity -> when it was first observed met, moved forward by the time its stream was unknown."""
    past_grace: tuple[str, ...] = ()
    """Identities in the stage PAST_GRACE. Those of `first_observed` that are not here are IN_GRACE, others CLEAR."""
    read_at: Mapping[str, float] = {}
    """Stream -> read_at of its last good sample."""
    good_samples: Mapping[str, int] = {}
    """Stream -> new good samples in a row since the start; stays at `startup.freshSamples` once there."""
    unknown_since: Mapping[str, float] = {}
    """Stream -> when it became unknown."""
    history: Mapping[str, trend.History] = {}
    used_up_since: Mapping[str, float] = {}
    """Identity -> since when its signal is used up, moved forward by the time its stream was unknown."""


def stage_of(state: ThresholdState, key: str) -> ThresholdStage:
    """The stage of the threshold with this identity."""
    if key not in state.first_observed:
        return ThresholdStage.CLEAR
    return ThresholdStage.PAST_GRACE if key in state.past_grace else ThresholdStage.IN_GRACE


def history_of(state: ThresholdState, threshold: Threshold) -> trend.History:
    """The last good samples of the threshold's signal."""
    return state.history.get(effective_thresholds.stream_name(threshold), ())


def used_up(available: int, value: int) -> bool:
    """Whether so little is available that the signal cannot fall much further."""
    return available < value * USED_UP


def observe_only(state: ThresholdState) -> ThresholdState:
    """The state after a start or a change of configuration: no threshold is due until enough fresh samples.

    First-observed times survive: a grace period that runs goes on.
    """
    return state._replace(good_samples={})


# --- plausible samples -----------------------------------------------------------------------------------------------


def unusable(observation: Observation, *, now: float, stale_after_s: float) -> str:
    """Why a sample is unknown; empty if it is plausible. Comparisons are written so that NaN fails them."""
    available, capacity = observation.available, observation.capacity
    if available is None:
        return observation.reason or "not read"
    if type(available) is not int:
        return f"available is no whole number: {available!r}"
    if capacity is None:
        return "its capacity is unknown"
    if type(capacity) is not int:
        return f"capacity is no whole number: {capacity!r}"
    if not 0 < capacity <= units.MAX_PLAUSIBLE:
        return f"a capacity of {capacity} is implausible"
    if available > capacity:
        return f"{available} available of {capacity} is implausible"
    if available < 0 and (observation.signal is not Signal.PID or available < -units.MAX_PLAUSIBLE):
        return f"{available} available is implausible"
    age = now - observation.read_at
    if not age <= stale_after_s:
        return f"its sample is {age:.1f}s old, limit {stale_after_s:g}s"
    if not age >= -stall.CLOCK_SLACK_S:
        return f"its sample is from {-age:.1f}s in the future"
    return ""


class _StreamSample(NamedTuple):
    """One stream at this judgement."""

    name: str
    observation: Observation
    unknown: str
    """Why the sample is unknown; empty if it is good."""
    is_new: bool
    """Read later than the previous good sample."""
    good_samples: int
    history: trend.History
    stopped_s: float
    """How long the clocks of its thresholds stood still: the stream was unknown until now."""
    is_continuous: bool
    """It was not unknown for too long: the stages of its thresholds still count."""


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
            is_continuous=now - since < tolerance_s,
        )
    previous = state.read_at.get(name)
    # A time in the future is from before a reboot: it must not make every sample seem old.
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
        is_continuous=now - since <= tolerance_s,
    )


def _unknown_since(name: str, state: ThresholdState, *, now: float, tolerance_s: float) -> float:
    """Since when a stream is unknown; `now` if it is known. Too long without a sample (the machine was suspended, the
    agent was not running) counts as unknown too."""
    since = state.unknown_since.get(name, now)
    last = state.read_at.get(name, now)
    if tolerance_s and now - last > tolerance_s:
        since = min(since, last)
    return min(since, now)


def after_suspend(state: ThresholdState, slept_s: float, *, now: float) -> ThresholdState:
    """The state after a suspend of the machine, during which no grace period passed."""
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

    `now` is CLOCK_BOOTTIME. `thresholds` are those of `effective_thresholds`; two of one identity are judged as one.
    A verdict's observation is the working set's unless all thresholds of the signal use MemAvailable; a signal without
    thresholds is `ok` or `unknown`.
    """
    by_signal: dict[Signal, list[Threshold]] = {}
    for threshold in thresholds:
        by_signal.setdefault(threshold.signal, []).append(threshold)
    verdicts: list[SignalVerdict] = []
    after = _NextState()
    for signal in _SIGNALS:
        streams: dict[str, _StreamSample] = {}
        judged: list[ThresholdVerdict] = []
        for threshold in by_signal.get(signal, ()):
            name = effective_thresholds.stream_name(threshold)
            if name not in streams:
                observation = _observed(snapshot, signal, threshold.memory_model)
                streams[name] = _read_stream(name, observation, state, now=now, config=config)
            judged.append(_judge_one(threshold, streams[name], state, after, snapshot=snapshot, now=now, config=config))
        if not streams:
            streams[signal.value] = _read_stream(
                signal.value,
                _observed(snapshot, signal, MemoryModel.WORKING_SET),
                state,
                now=now,
                config=config,
            )
        for stream in streams.values():
            after.put_stream(stream, state, now=now)
        verdicts.append(_signal_verdict(streams, judged))
    return tuple(verdicts), after.state()


_SIGNALS: Final = tuple(Signal)


def _observed(snapshot: NodeSnapshot, signal: Signal, model: MemoryModel) -> Observation:
    try:
        return snapshot.observe(signal, model)
    except KeyError:
        return Observation(signal, None, None, snapshot.taken_at, "", reason="not sampled")


class _NextState:
    """The state of the next judgement, while it is built."""

    __slots__ = ("first_observed", "good_samples", "history", "past_grace", "read_at", "unknown_since", "used_up_since")

    def __init__(self) -> None:
        self.first_observed: dict[str, float] = {}
        self.past_grace: list[str] = []
        self.read_at: dict[str, float] = {}
        self.good_samples: dict[str, int] = {}
        self.unknown_since: dict[str, float] = {}
        self.history: dict[str, trend.History] = {}
        self.used_up_since: dict[str, float] = {}

    def put(self, key: str, stage: ThresholdStage, first_observed: float | None, used_up_at: float | None) -> None:
        """Store the stage of a threshold that is not CLEAR."""
        if stage is ThresholdStage.CLEAR or first_observed is None:
            return
        self.first_observed[key] = first_observed
        if stage is ThresholdStage.PAST_GRACE:
            self.past_grace.append(key)
        if used_up_at is not None:
            self.used_up_since[key] = used_up_at

    def put_stream(self, stream: _StreamSample, before: ThresholdState, *, now: float) -> None:
        name = stream.name
        self.good_samples[name] = stream.good_samples
        if stream.history:
            self.history[name] = stream.history
        if stream.unknown:
            last_good = before.read_at.get(name, now)  # what lies between it and the failed read is not known either
            self.unknown_since[name] = min(before.unknown_since.get(name, last_good), now)
            if stream.is_continuous and name in before.read_at:
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
    after: _NextState,
    *,
    snapshot: NodeSnapshot,
    now: float,
    config: Config,
) -> ThresholdVerdict:
    """The verdict on one threshold; its next stage goes into `after`."""
    key = effective_thresholds.identity(threshold)
    before = stage_of(state, key)
    if not stream.is_continuous:
        before = TRANSITIONS[before, ThresholdEvent.UNKNOWN_TOO_LONG]
    known = before is not ThresholdStage.CLEAR
    first = state.first_observed[key] if known else None
    since = now if first is None else min(first + stream.stopped_s, now)
    value = None if stream.unknown else resolve.resolve_threshold(threshold, capacity=stream.observation.capacity)
    event = _event(threshold, stream, before, value=value, met_s=elapsed(since, now))
    stage = TRANSITIONS[before, event]
    if event is ThresholdEvent.UNKNOWN:
        after.put(key, stage, first, state.used_up_since.get(key))
        return ThresholdVerdict(threshold, None, False, None, False, f"unknown: {stream.unknown}")
    if stage is ThresholdStage.CLEAR:
        return ThresholdVerdict(threshold, value, False, None, False)
    used_up_at = None
    if used_up(stream.observation.available or 0, value or 0):
        earlier = state.used_up_since.get(key) if known else None
        used_up_at = now if earlier is None else min(earlier + stream.stopped_s, now)
    after.put(key, stage, since, used_up_at)
    if stage is ThresholdStage.IN_GRACE:
        met, grace = units.format_duration(elapsed(since, now)), units.format_duration(threshold.grace_period_s)
        reason = f"met for {met} of its grace period of {grace}"
    else:
        reason = _not_due_reason(threshold, stream, snapshot=snapshot, now=now, config=config)
    return ThresholdVerdict(threshold, value, True, since, not reason, reason)


def _event(
    threshold: Threshold, stream: _StreamSample, stage: ThresholdStage, *, value: int | None, met_s: float
) -> ThresholdEvent:
    """Guard: what the sample shows. `value` is the threshold for this capacity, None if that is unknown; `met_s` is for
    how long the threshold is met if it is."""
    available = stream.observation.available
    if stream.unknown:
        return ThresholdEvent.UNKNOWN
    if available is None or value is None:
        return ThresholdEvent.NOT_MET
    reclaim = _min_reclaim(threshold, stream.observation.capacity) if stage is ThresholdStage.PAST_GRACE else 0
    if not value + reclaim > available:
        return ThresholdEvent.NOT_MET
    if met_s >= threshold.grace_period_s or _exhausted_soon(threshold, stream):
        return ThresholdEvent.MET_GRACE_OVER
    return ThresholdEvent.MET


def _min_reclaim(threshold: Threshold, capacity: int | None) -> int:
    if threshold.min_reclaim is None:
        return 0
    return resolve.resolve_amount(threshold.min_reclaim, capacity=capacity) or 0


def elapsed(since: float, now: float) -> float:
    """Seconds between two times, to the nanosecond: as exact as the kubelet's durations."""
    return round(now - since, 9)


def _exhausted_soon(threshold: Threshold, stream: _StreamSample) -> bool:
    if threshold.exhaustion_within_s is None:
        return False
    estimate = trend.estimate(stream.history)
    return (
        estimate is not None
        and estimate.to_exhaustion_s is not None
        and estimate.to_exhaustion_s <= threshold.exhaustion_within_s
        and estimate.confidence >= TREND_CONFIDENCE
    )


def _not_due_reason(
    threshold: Threshold, stream: _StreamSample, *, snapshot: NodeSnapshot, now: float, config: Config
) -> str:
    """Why a threshold past its grace is not due now; empty if it is."""
    needed = _fresh_samples(config)
    if stream.good_samples < needed:
        return f"observing only: {stream.good_samples} of {needed} fresh samples since the start"
    if not stream.is_new:
        return "no new sample since the last judgement"
    if threshold.require_stall is None:
        return ""
    check = stall.check_stall(threshold.require_stall, snapshot, now=now, stale_after_s=config.sampling.stale_after_s)
    return "" if check.holds else check.reason


def _signal_verdict(streams: Mapping[str, _StreamSample], judged: list[ThresholdVerdict]) -> SignalVerdict:
    shown = next(iter(streams.values()))
    for stream in streams.values():
        if stream.name != effective_thresholds.MEM_AVAILABLE_STREAM:
            shown = stream
    observation = shown.observation
    if shown.unknown:
        # An implausible value is not passed on: the verdict shows it as unknown, with the reason.
        observation = observation._replace(available=None, reason=shown.unknown)
    values = [verdict.value for verdict in judged if verdict.value is not None and not verdict.met]
    return SignalVerdict(
        observation,
        _state(streams.values(), judged),
        tuple(judged),
        None if shown.unknown else trend.estimate(shown.history, values=values),
    )


def _state(streams: Iterable[_StreamSample], judged: list[ThresholdVerdict]) -> SignalState:
    """By level alone: a soft threshold that is met counts while its grace still runs."""
    met = [verdict.threshold.grace_period_s for verdict in judged if verdict.met]
    if met:
        return SignalState.HARD if 0.0 in met else SignalState.SOFT
    return SignalState.UNKNOWN if any(stream.unknown for stream in streams) else SignalState.OK

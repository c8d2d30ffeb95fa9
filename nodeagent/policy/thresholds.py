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

The state of a threshold that is no longer configured is dropped, and so is that of one that counts as not met because
of images (`clear`). Its identity is signal, memory model, grace period and
value.

This is the kubelet's sync loop (KUBELET-CONTRACT, one sync, steps 5 to 11) except for unknown samples: the kubelet
drops the state at the first one, and with `ranking.order: kubelet` this module does too.

Reports and conditions follow `met` at once. A threshold is `due` if all of this holds too:

* its stage is PAST_GRACE;
* the sample is new: it was read later than the sample of the previous judgement;
* the stream has given `startup.freshSamples` good samples in a row since the start (`observe_only` resets the count);
* the stall that it requires is present (`stall`).

`streams` has the rules for an unknown sample. A memory threshold of `MemoryModel.LOWER` has two machines: it is met by
the lower of both figures, and due only for more than page cache (`memory_shortage`). `exhaustionWithin` and the grace
of the second machine follow the kernel's figure.

The state is a value: the caller keeps it, passes it again, and may write it to disk. Its times are CLOCK_BOOTTIME.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.config import resolve
from nodeagent.config.schema import Config
from nodeagent.model import (
    MEMORY_SIGNALS,
    MemoryFigures,
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
from nodeagent.policy import effective_thresholds, memory_shortage, stall, streams, trend
from nodeagent.policy.streams import StreamMemory, StreamSample

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

    def stream(self, name: str) -> StreamMemory:
        """What the last judgement left of a stream."""
        return StreamMemory(
            self.read_at.get(name),
            self.good_samples.get(name, 0),
            self.unknown_since.get(name),
            self.history.get(name, ()),
        )


def stage_of(state: ThresholdState, key: str) -> ThresholdStage:
    """The stage of the threshold with this identity."""
    if key not in state.first_observed:
        return ThresholdStage.CLEAR
    return ThresholdStage.PAST_GRACE if key in state.past_grace else ThresholdStage.IN_GRACE


def history_of(state: ThresholdState, threshold: Threshold) -> trend.History:
    """The last good samples of the threshold's signal, by the memory model that shows losses."""
    name = effective_thresholds.stream_of(threshold.signal, memory_shortage.release_model(threshold))
    return state.history.get(name, ())


def used_up(available: int, value: int) -> bool:
    """Whether so little is available that the signal cannot fall much further."""
    return available < value * USED_UP


def observe_only(state: ThresholdState) -> ThresholdState:
    """The state after a start or a change of configuration: no threshold is due until enough fresh samples.

    First-observed times survive: a grace period that runs goes on.
    """
    return state._replace(good_samples={})


def clear(state: ThresholdState, left: Iterable[ThresholdVerdict]) -> ThresholdState:
    """The state with these thresholds CLEAR: they count as not met, and begin a new grace when they are."""
    keys = {effective_thresholds.identity(each.threshold) for each in left}
    if not keys:
        return state
    return state._replace(
        first_observed={key: at for key, at in state.first_observed.items() if key not in keys},
        past_grace=tuple([key for key in state.past_grace if key not in keys]),
        used_up_since={key: at for key, at in state.used_up_since.items() if key not in keys},
    )


def after_suspend(state: ThresholdState, slept_s: float, *, now: float) -> ThresholdState:
    """The state after a suspend of the machine, during which no grace period passed."""
    return state._replace(
        first_observed={key: min(at + slept_s, now) for key, at in state.first_observed.items()},
        unknown_since={name: min(at + slept_s, now) for name, at in state.unknown_since.items()},
        used_up_since={key: min(at + slept_s, now) for key, at in state.used_up_since.items()},
    )


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
    A verdict's observation is that of the first of `_SHOWN` that a threshold of the signal uses; a signal without
    thresholds is `ok` or `unknown`.
    """
    by_signal: dict[Signal, list[Threshold]] = {}
    for threshold in thresholds:
        by_signal.setdefault(threshold.signal, []).append(threshold)
    verdicts: list[SignalVerdict] = []
    judgement = _Judgement(snapshot, state, now, config)
    for signal in _SIGNALS:
        own = by_signal.get(signal, ())
        judgement.streams = {}
        judged = [_judge_one(threshold, judgement) for threshold in own]
        models = {threshold.memory_model for threshold in own}
        shown = judgement.stream(signal, next((each for each in _SHOWN if each in models), MemoryModel.WORKING_SET))
        for stream in judgement.streams.values():
            judgement.after.put_stream(stream, state, now=now)
        used = [judgement.stream(signal, model) for model in models] or [shown]
        figures = snapshot.memory_figures(signal) if signal in MEMORY_SIGNALS else None
        verdicts.append(_signal_verdict(shown, used, judged, figures))
    return tuple(verdicts), judgement.after.state()


_SIGNALS: Final = tuple(Signal)
_SHOWN: Final = (MemoryModel.LOWER, MemoryModel.WORKING_SET, MemoryModel.MEM_AVAILABLE)


class _Judgement:
    """One judgement while it is made."""

    __slots__ = ("after", "config", "now", "snapshot", "state", "streams")

    def __init__(self, snapshot: NodeSnapshot, state: ThresholdState, now: float, config: Config) -> None:
        self.snapshot = snapshot
        self.state = state
        self.now = now
        self.config = config
        self.after = _NextState()
        self.streams: dict[MemoryModel, StreamSample] = {}
        """Of the signal that is judged now."""

    def stream(self, signal: Signal, model: MemoryModel) -> StreamSample:
        """The stream of a signal by a memory model, read once."""
        found = self.streams.get(model)
        if found is None:
            name = effective_thresholds.stream_of(signal, model)
            observation = _observed(self.snapshot, signal, model)
            found = self.streams[model] = streams.read_stream(
                name, observation, self.state.stream(name), now=self.now, config=self.config
            )
        return found


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

    def put_stream(self, stream: StreamSample, before: ThresholdState, *, now: float) -> None:
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


class _Step(NamedTuple):
    """One machine at this judgement."""

    event: ThresholdEvent
    stage: ThresholdStage
    since: float
    """When it was first observed met, if it is."""
    value: int | None


def _judge_one(threshold: Threshold, judgement: _Judgement) -> ThresholdVerdict:
    """The verdict on one threshold; its next stage goes into `after`."""
    stream = judgement.stream(threshold.signal, threshold.memory_model)
    key = effective_thresholds.identity(threshold)
    if memory_shortage.uses_both(threshold):
        return _judge_both(threshold, key, stream, judgement)
    step = _advance(threshold, key, stream, judgement)
    if step.event is ThresholdEvent.UNKNOWN:
        return _unknown(threshold, stream)
    return _verdict(threshold, step, stream, judgement)


def _judge_both(threshold: Threshold, key: str, stream: StreamSample, judgement: _Judgement) -> ThresholdVerdict:
    """The verdict on a threshold of `MemoryModel.LOWER`, which has two machines: whether the lower figure is below it
    (met), and whether more than page cache is short (due). Each has its grace, so that a spike on a node full of page
    cache, whose threshold may be met for days, is no shortage of days."""
    by_kernel = judgement.stream(threshold.signal, MemoryModel.MEM_AVAILABLE)
    figures = judgement.snapshot.memory_figures(threshold.signal)
    if by_kernel.unknown:  # also one with a time that cannot be true
        figures = figures._replace(by_kernel=None)
    met = _advance(threshold, f"{key}{_MET}", stream, judgement)
    short = _advance(threshold, key, stream if stream.unknown else by_kernel, judgement, figures=figures)
    if met.event is ThresholdEvent.UNKNOWN:
        return _unknown(threshold, stream)
    unknown = short.event is ThresholdEvent.UNKNOWN
    if short.stage is not ThresholdStage.CLEAR and not unknown:
        return _verdict(threshold, short, stream, judgement)
    if met.stage is ThresholdStage.CLEAR or met.value is None:
        return _verdict(threshold, met, stream, judgement)
    refusal = memory_shortage.page_cache_refusal(threshold.signal, figures, level=met.value)
    assert refusal is not None  # more than page cache would be short, or its machine would not be CLEAR
    code = refusal.code if met.stage is ThresholdStage.PAST_GRACE else None
    return ThresholdVerdict(threshold, met.value, True, met.since, False, refusal.message, code)


_MET: Final = "|met"
"""Behind the identity of a threshold of `MemoryModel.LOWER`: the machine of its lower figure."""


def _unknown(threshold: Threshold, stream: StreamSample) -> ThresholdVerdict:
    return ThresholdVerdict(threshold, None, False, None, False, f"unknown: {stream.unknown}")


def _verdict(threshold: Threshold, step: _Step, stream: StreamSample, judgement: _Judgement) -> ThresholdVerdict:
    """The verdict on a known threshold."""
    if step.stage is ThresholdStage.CLEAR:
        return ThresholdVerdict(threshold, step.value, False, None, False)
    if step.stage is ThresholdStage.IN_GRACE:
        met = units.format_duration(elapsed(step.since, judgement.now))
        reason = f"met for {met} of its grace period of {units.format_duration(threshold.grace_period_s)}"
    else:
        reason = _not_due_reason(threshold, stream, judgement)
    return ThresholdVerdict(threshold, step.value, True, step.since, not reason, reason)


def _advance(
    threshold: Threshold,
    key: str,
    stream: StreamSample,
    judgement: _Judgement,
    *,
    figures: MemoryFigures | None = None,
) -> _Step:
    """Advance the machine of this key. With `figures` page cache is not counted as short.

    While the working-set figure is unknown, the kernel's alone may be a shortage, but it ends none: that is unknown
    too, until the figure has been unknown for `sampling.staleAfter`.
    """
    state, now = judgement.state, judgement.now
    before = stage_of(state, key)
    if not stream.is_continuous:
        before = TRANSITIONS[before, ThresholdEvent.UNKNOWN_TOO_LONG]
    known = before is not ThresholdStage.CLEAR
    first = state.first_observed[key] if known else None
    since = now if first is None else min(first + stream.stopped_s, now)
    value = None if stream.unknown else resolve.resolve_threshold(threshold, capacity=stream.observation.capacity)
    event = _event(threshold, stream, before, value=value, met_s=elapsed(since, now), figures=figures)
    if (
        event is ThresholdEvent.NOT_MET
        and first is not None
        and figures is not None
        and figures.working_set is None
        and judgement.stream(threshold.signal, MemoryModel.WORKING_SET).is_continuous
    ):
        event = ThresholdEvent.UNKNOWN
        first = since + max(0.0, now - max(since, state.read_at.get(stream.name, now)))
    stage = TRANSITIONS[before, event]
    if event is ThresholdEvent.UNKNOWN:
        judgement.after.put(key, stage, first, state.used_up_since.get(key))
        return _Step(event, stage, since, value)
    used_up_at = None
    if used_up(stream.observation.available or 0, value or 0):
        earlier = state.used_up_since.get(key) if known else None
        used_up_at = now if earlier is None else min(earlier + stream.stopped_s, now)
    judgement.after.put(key, stage, since, used_up_at)
    return _Step(event, stage, since, value)


def _event(
    threshold: Threshold,
    stream: StreamSample,
    stage: ThresholdStage,
    *,
    value: int | None,
    met_s: float,
    figures: MemoryFigures | None,
) -> ThresholdEvent:
    """Guard: what the sample shows. `value` is the threshold for this capacity, None if that is unknown; `met_s` is for
    how long the threshold is met if it is."""
    if stream.unknown:
        return ThresholdEvent.UNKNOWN
    if value is None:
        return ThresholdEvent.NOT_MET
    level = value
    if stage is ThresholdStage.PAST_GRACE:
        level += resolve.resolve_reclaim(threshold, capacity=stream.observation.capacity)
    available = stream.observation.available if figures is None else memory_shortage.counted(figures, level=level)
    if available is None or not level > available:
        return ThresholdEvent.NOT_MET
    if met_s >= threshold.grace_period_s or _exhausted_soon(threshold, stream):
        return ThresholdEvent.MET_GRACE_OVER
    return ThresholdEvent.MET


def elapsed(since: float, now: float) -> float:
    """Seconds between two times, to the nanosecond: as exact as the kubelet's durations."""
    return round(now - since, 9)


def _exhausted_soon(threshold: Threshold, stream: StreamSample) -> bool:
    if threshold.exhaustion_within_s is None:
        return False
    estimate = trend.estimate(stream.history)
    return (
        estimate is not None
        and estimate.to_exhaustion_s is not None
        and estimate.to_exhaustion_s <= threshold.exhaustion_within_s
        and estimate.confidence >= TREND_CONFIDENCE
    )


def _not_due_reason(threshold: Threshold, stream: StreamSample, judgement: _Judgement) -> str:
    """Why a threshold past its grace is not due now; empty if it is."""
    needed = streams.fresh_samples(judgement.config)
    if stream.good_samples < needed:
        return f"observing only: {stream.good_samples} of {needed} fresh samples since the start"
    if not stream.is_new:
        return "no new sample since the last judgement"
    if threshold.require_stall is None:
        return ""
    stale_after_s = judgement.config.sampling.stale_after_s
    check = stall.check_stall(
        threshold.require_stall, judgement.snapshot, now=judgement.now, stale_after_s=stale_after_s
    )
    return "" if check.holds else check.reason


def _signal_verdict(
    shown: StreamSample,
    used: Iterable[StreamSample],
    judged: list[ThresholdVerdict],
    figures: MemoryFigures | None,
) -> SignalVerdict:
    observation = shown.observation
    if shown.unknown:
        # An implausible value is not passed on: the verdict shows it as unknown, with the reason.
        observation = observation._replace(available=None, reason=shown.unknown)
    values = [verdict.value for verdict in judged if verdict.value is not None and not verdict.met]
    return SignalVerdict(
        observation,
        signal_state(used, judged),
        tuple(judged),
        None if shown.unknown else trend.estimate(shown.history, values=values),
        figures,
    )


def signal_state(used: Iterable[StreamSample], judged: Sequence[ThresholdVerdict]) -> SignalState:
    """By level alone: a soft threshold that is met counts while its grace still runs."""
    met = [verdict.threshold.grace_period_s for verdict in judged if verdict.met]
    if met:
        return SignalState.HARD if 0.0 in met else SignalState.SOFT
    return SignalState.UNKNOWN if any(stream.unknown for stream in used) else SignalState.OK

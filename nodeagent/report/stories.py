"""The story of a decision: the minutes before and after it, as moments and as curves.

1. Everything in it is recorded: samples, decisions and what came of them. Nothing is simulated.
2. Without samples the moments come from the records alone, and `missing` states why.
3. A long row of equal refusals is one moment with its number.

Theory of operation. The window is ten minutes before the decision and three after it. The samples in it become a
`History`; its windows, and the decisions, outcomes, reliefs, reclaim actions and OOM kills in the window, become
moments in the order of time. Names in a moment are as recorded: escape them for the place where they are shown.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from nodeagent.model import GOOD_OUTCOMES, SIGNAL_TABLE, RecordedSample, Signal, Unit, units
from nodeagent.report import downsampling, explain_oom, history, history_values, record_fields, zombie_text
from nodeagent.report.cells import BAD, DIM, GOOD, WARN
from nodeagent.report.downsampling import Point
from nodeagent.report.history_values import History, Series
from nodeagent.report.record_fields import JsonObject
from nodeagent.report.recorded_decisions import RecordedDecision

BEFORE_S: Final = 600.0
AFTER_S: Final = 180.0
MAX_POD_CURVES: Final = 5
"""Besides the victims."""
SIGNAL_CURVES: Final = 4


class Moment(NamedTuple):
    """Something that happened."""

    at: float
    """Epoch seconds."""
    text: str
    """Not escaped."""
    style: str = ""
    number: int = 1
    """How many equal moments it stands for."""
    until: float | None = None
    """Of the last of them."""


class Curve(NamedTuple):
    """A series of the window with what a reader compares."""

    name: str
    """Not escaped."""
    unit: str
    points: tuple[Point, ...]
    falls: bool
    """The lowest value matters (what is available); False: the highest (usage, stalls)."""
    victim: bool = False

    @property
    def first(self) -> float | None:
        return next((point.value for point in self.points if point.value is not None), None)

    @property
    def last(self) -> float | None:
        return next((point.value for point in reversed(self.points) if point.value is not None), None)

    @property
    def extreme(self) -> float | None:
        known = [point.value for point in self.points if point.value is not None]
        return (min if self.falls else max)(known, default=None)

    def value_at(self, at: float) -> float | None:
        """The last value until then."""
        before = [point.value for point in self.points if point.at <= at]
        return before[-1] if before else None


SAME_S: Final = 0.1
"""The times of a sample are rounded to a 64th of a second."""


class Story(NamedTuple):
    """A decision, or OOM kills, with the minutes around it."""

    recorded: RecordedDecision
    at: float | None
    """Epoch seconds of the decision; None: not recorded."""
    began: float
    ended: float
    history: History | None
    """None: no samples."""
    moments: tuple[Moment, ...] = ()
    missing: str = ""
    """Why there are no samples."""
    configuration: str = ""
    """The configuration in force as YAML; empty: not recorded."""
    trouble: tuple[str, ...] = ()
    """Parts of the recording that could not be read."""
    zombies: str = ""
    """Of a decision about PIDs: the zombies of the last sample before it, if they are a notable part. Not escaped."""

    @property
    def victims(self) -> Sequence[JsonObject]:
        return record_fields.items(self.recorded.decision, "victims")

    @property
    def signal(self) -> Signal:
        """The signal that the decision is about."""
        return acting_signal(self.recorded.decision)


def window(recorded: RecordedDecision, *, since: float | None = None) -> tuple[float | None, float, float]:
    """Time of the decision, begin and end of its window, in epoch seconds."""
    first = next((each for each in (recorded.decision, *recorded.outcomes, *recorded.reliefs) if each), {})
    at = record_fields.number(first.get("wallTime"))
    if at is None:
        return None, 0.0, 0.0
    return at, at - BEFORE_S if since is None else min(since, at), at + AFTER_S


def build(
    recorded: RecordedDecision,
    decisions: Iterable[RecordedDecision],
    samples: Iterable[RecordedSample],
    *,
    since: float | None = None,
    missing: str = "",
    configuration: str = "",
) -> Story:
    """The story of `recorded`. `samples`: those of its window; `decisions`: all that are recorded."""
    at, began, ended = window(recorded, since=since)
    signal, counted = acting_signal(recorded.decision), _Zombies(at)
    found = history.history(
        counted.watch(samples) if signal is Signal.PID else samples, top=MAX_POD_CURVES + 8, signal=signal
    )
    if not found.samples:
        missing = missing or "no sample of these minutes is recorded"
    near = [each for each in decisions if _is_within(each, began, ended)]
    moments = [
        *(() if not found.samples else _of_history(found)),
        *_of_decisions(near, recorded.id),
    ]
    return Story(
        recorded,
        at,
        began,
        ended,
        history=found if found.samples else None,
        moments=_collapsed(sorted(moments, key=lambda moment: moment.at)),
        missing="" if found.samples else missing,
        configuration=configuration,
        zombies=counted.text,
    )


class _Zombies:
    """The zombies of the last sample that is not later than the decision."""

    def __init__(self, at: float | None) -> None:
        self.text = ""
        self._at = at

    def watch(self, samples: Iterable[RecordedSample]) -> Iterator[RecordedSample]:
        for sample in samples:
            if self._at is not None and sample.wall_time <= self._at + SAME_S:
                snapshot = sample.snapshot
                self.text = zombie_text.zombies_text(snapshot) if zombie_text.notable(snapshot) else ""
            yield sample


def acting_signal(decision: JsonObject) -> Signal:
    """The signal that a decision acts on, else the one that pods are ranked for, else memory."""
    threshold = record_fields.mapping(record_fields.mapping(decision, "actingOn"), "threshold")
    found = (_signal(threshold.get("signal")), _signal(decision.get("rankedFor")))
    return next((signal for signal in found if signal is not None), Signal.MEMORY)


# --- curves ----------------------------------------------------------------------------------------------------------


def curves(story: Story) -> tuple[Curve, ...]:
    """The signal that was short, others whose thresholds were met, stalls, then the victims and the largest pods."""
    found = story.history
    if found is None:
        return ()
    met = {window.threshold.signal for window in found.met}
    signals = sorted(
        (each for each in found.signals if each.signal is story.signal or each.signal in met),
        key=lambda each: each.signal is not story.signal,
    )
    stalls = [each for each in found.stalls if any((point.value or 0.0) >= 1.0 for point in each.points)]
    victims = {record_fields.pod_name(victim) for victim in story.victims}
    pods = [each for each in found.pods if each.name in victims]
    others = [each for each in found.pods if each.name not in victims and each.name != history_values.OTHER_PODS]
    unit = SIGNAL_TABLE[story.signal].unit
    rest = [each for each in found.pods if each.name == history_values.OTHER_PODS]
    hidden = others[MAX_POD_CURVES:]
    return (
        *(_curve(each, falls=True) for each in signals[:SIGNAL_CURVES]),
        *(_curve(each) for each in stalls[:2]),
        *(_curve(each)._replace(victim=True) for each in pods),
        *(_curve(each) for each in others[:MAX_POD_CURVES]),
        *([Curve(history_values.OTHER_PODS, unit, _sum([*hidden, *rest]), falls=False)] if hidden or rest else []),
    )


def columns(curve: Curve, began: float, ended: float, width: int) -> list[float | None]:
    """One value for each of `width` equal parts of the time: the extreme one in it, else the last one before it."""
    found: list[float | None] = [None] * width
    pick = min if curve.falls else max
    step = (ended - began) / width
    last: Point | None = None
    number = 0
    for column in range(width):
        end = began + (column + 1) * step
        inside: list[float] = []
        while number < len(curve.points) and (curve.points[number].at < end or column == width - 1):
            last = curve.points[number]
            if last.value is not None and last.at >= began:
                inside.append(last.value)
            number += 1
        if inside:
            found[column] = pick(inside)
        elif last is not None and end - step - last.at <= downsampling.GAP_S:
            found[column] = last.value
    return found


def _curve(series: Series, *, falls: bool = False) -> Curve:
    return Curve(series.name, series.unit, series.points, falls)


def _sum(series: Sequence[Series]) -> tuple[Point, ...]:
    return tuple(
        Point(points[0].at, sum(point.value or 0.0 for point in points))
        for points in zip(*(each.points for each in series), strict=True)
    )


def amount(value: float | None, unit: str) -> str:
    """A value of a curve for people."""
    if value is None:
        return units.UNKNOWN_TEXT
    return f"{value:.1f}%" if unit == history_values.PERCENT else units.format_amount(int(value), Unit(unit))


def growth(story: Story, *, most: int = 3) -> tuple[tuple[str, float], ...]:
    """The pods that grew most from the begin of the window to the decision: name and amount."""
    at = story.at
    if story.history is None or at is None:
        return ()
    found = []
    for series in story.history.pods:
        curve = _curve(series)
        first, here = curve.first, curve.value_at(at)
        if series.name != history_values.OTHER_PODS and first is not None and here is not None and here > first:
            found.append((series.name, here - first))
    return tuple(sorted(found, key=lambda each: -each[1])[:most])


# --- moments ---------------------------------------------------------------------------------------------------------


def _of_history(found: History) -> Iterable[Moment]:
    for window in found.met:
        name, hard = window.name, window.threshold.hard
        yield Moment(window.began, f"{name} is met", BAD if hard else WARN)
        if not hard and window.due is not None:
            yield Moment(window.due, f"{name}: its grace period is over", WARN)
        if window.ended is not None:
            yield Moment(window.ended, f"{name} is no longer met", GOOD)
    for condition in found.conditions:
        yield Moment(condition.began, f"{condition.type.value} becomes True", WARN)
        if condition.ended is not None:
            yield Moment(condition.ended, f"{condition.type.value} becomes False", GOOD)
    for first, second in _gaps(found):
        yield Moment(first, f"no samples for {units.format_duration(second - first)}", DIM)


def _gaps(found: History) -> list[tuple[float, float]]:
    if not found.signals:
        return []
    points = found.signals[0].points
    return [
        (point.at, following.at)
        for point, following in itertools.pairwise(points)
        if point.value is None and following.at - point.at > downsampling.GAP_S
    ]


def _of_decisions(decisions: Iterable[RecordedDecision], own: str) -> Iterable[Moment]:
    for recorded in decisions:
        at = record_fields.number(recorded.decision.get("wallTime"))
        if at is not None:
            if explain_oom.is_oom(recorded.decision):
                yield from _of_kills(recorded, at)
                continue
            yield Moment(at, _decision_text(recorded, own), BAD if recorded.decision.get("victims") else WARN)
        names = {
            str(each.get("uid")): record_fields.pod_name(each)
            for each in record_fields.items(recorded.decision, "victims")
        }
        for outcome in recorded.outcomes:
            when = _wall(recorded, outcome)
            kind = str(outcome.get("kind"))
            uid = str(outcome.get("podUid"))
            status = outcome.get("httpStatus")
            text = f"{names.get(uid, f'uid/{uid}')}: {kind}" + (f" (HTTP {status})" if status is not None else "")
            if when is not None:
                yield Moment(when, text, GOOD if kind in GOOD_OUTCOMES else BAD)
        for relief in recorded.reliefs:
            when = record_fields.number(relief.get("wallTime"))
            if when is not None:
                yield Moment(when, f"{recorded.id}: {relief_text(relief)}", GOOD)
        for reclaim in recorded.reclaims:
            when = record_fields.number(reclaim.get("wallTime"))
            gained = units.format_amount(
                record_fields.integer(reclaim.get("gained")), _unit(reclaim.get("signal")), signed=True
            )
            if when is not None:
                yield Moment(when, f"reclaim action {reclaim.get('name')} ({reclaim.get('result')}): {gained}")
        for hook in recorded.hooks:
            when, result = record_fields.number(hook.get("wallTime")), str(hook.get("result"))
            color = GOOD if result in ("done", "dry-run") else WARN
            if when is not None:
                yield Moment(when, f"hook before an eviction: {result}", color)
        for resize in recorded.resizes:
            when, result = record_fields.number(resize.get("wallTime")), str(resize.get("result"))
            if when is not None:
                yield Moment(when, f"resize of {record_fields.pod_name(resize)}: {result}")


def _of_kills(recorded: RecordedDecision, at: float) -> Iterable[Moment]:
    found_at = record_fields.number(recorded.decision.get("at"))
    killed_at = record_fields.number(recorded.decision.get("killedAt"))
    when = at - max(0.0, found_at - killed_at) if found_at is not None and killed_at is not None else at
    for kill in history.oom_kills([{**recorded.decision, "record": "oom"}]):
        number = units.UNKNOWN_TEXT if kill.number is None else kill.number
        lost = ", before an eviction could free memory" if kill.race_lost else ""
        yield Moment(when, f"OOM kill in {kill.subject} (processes: {number}){lost}", BAD)


def _decision_text(recorded: RecordedDecision, own: str) -> str:
    decision = recorded.decision
    which = "this decision" if recorded.id == own else "a decision"
    victims = [record_fields.pod_name(victim) for victim in record_fields.items(decision, "victims")]
    if victims:
        which = which if recorded.id == own else f"decision {recorded.id}"
        return f"{which}: evict {', '.join(victims)}"
    for refusals, nothing in (
        (record_fields.eviction_refusals(decision), "evicts no pod"),
        (record_fields.resize_refusals(decision), "raises no limit"),
    ):
        if refusals:
            return f"{which} {nothing}: {', '.join([code for code, _ in refusals])}"
    return f"{which}: nothing was due"


def relief_text(relief: JsonObject) -> str:
    """`+3Gi measured of 3Gi predicted`."""
    unit = _unit(relief.get("signal"))
    measured = units.format_amount(record_fields.integer(relief.get("measured")), unit, signed=True)
    return (
        f"{measured} measured of {units.format_amount(record_fields.integer(relief.get('predicted')), unit)} predicted"
    )


def _collapsed(moments: Sequence[Moment]) -> tuple[Moment, ...]:
    """Equal moments in a row as one."""
    found: list[Moment] = []
    for moment in moments:
        before = found[-1] if found else None
        if before is not None and (before.text, before.style) == (moment.text, moment.style):
            found[-1] = before._replace(number=before.number + 1, until=moment.at)
        else:
            found.append(moment)
    return tuple(found)


def _is_within(recorded: RecordedDecision, began: float, ended: float) -> bool:
    at = record_fields.number(recorded.decision.get("wallTime"))
    return at is not None and began <= at <= ended


def _wall(recorded: RecordedDecision, outcome: JsonObject) -> float | None:
    """When an outcome came: by its own clock, else when it was recorded."""
    made_at = record_fields.number(recorded.decision.get("madeAt"))
    wall = record_fields.number(recorded.decision.get("wallTime"))
    at = record_fields.number(outcome.get("at"))
    if None in (made_at, wall, at):
        return record_fields.number(outcome.get("wallTime"))
    assert made_at is not None
    assert wall is not None
    assert at is not None
    return wall + max(0.0, at - made_at)


def _unit(signal: object) -> Unit:
    known = _signal(signal)
    return Unit.BYTES if known is None else SIGNAL_TABLE[known].unit


def _signal(name: object) -> Signal | None:
    return next((signal for signal in Signal if signal.value == name), None)

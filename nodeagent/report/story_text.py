"""The story of a decision as sections of text and as JSON: in short, the curves, and what happened when."""

from typing import Any, Final

from nodeagent.model import units
from nodeagent.report import explain, explain_oom, record_fields, sparkline, stories, wording
from nodeagent.report.cells import BAD, DIM, STRONG, WARN, Cell, Section
from nodeagent.report.record_fields import JsonObject
from nodeagent.report.stories import Curve, Moment, Story

CURVE_WIDTH: Final = 45
MAX_MOMENTS: Final = 40
"""Moments in text; JSON has all."""
MAX_TROUBLE: Final = 5
"""Unreadable parts of a recording in text; JSON has all."""
_KEPT_BEFORE: Final = 15
"""Of these, moments before the decision."""


def sections(story: Story) -> tuple[Section, ...]:
    """The whole report of one decision: the story on top of its tables."""
    tables = explain.sections(story.recorded)
    return (
        *tables[:1],
        *(each for each in (_short(story), _curves(story), _moments(story)) if each.lines),
        *tables[1:],
    )


# --- in short --------------------------------------------------------------------------------------------------------


def summary(story: Story) -> tuple[tuple[str, str], ...]:
    """What was seen, decided, done and came of it: a word and a sentence each. Not escaped."""
    if explain_oom.is_oom(story.recorded.decision):
        found = [("seen", _seen(story))]
    elif not story.recorded.decision:
        found = [("done", _done(story)), ("came of it", _result(story))]
    else:
        found = [
            ("seen", _seen(story)),
            ("decided", _decided(story)),
            ("done", _done(story)),
            ("came of it", _result(story)),
        ]
    return tuple((word, text) for word, text in found if text)


def _seen(story: Story) -> str:
    parts = []
    curve = next((each for each in stories.curves(story) if each.falls and each.name == story.signal.value), None)
    at = story.at
    if curve is not None and at is not None:
        here = curve.value_at(at)
        if curve.first is not None and here is not None:
            verb = "fell" if here < curve.first else "went"
            parts.append(
                f"{curve.name} {verb} from {stories.amount(curve.first, curve.unit)} to "
                f"{stories.amount(here, curve.unit)} in the {units.format_duration(at - _first_at(curve, at))} before"
            )
    elif (observed := _observed(story)) is not None:
        parts.append(observed)
    acting = record_fields.mapping(story.recorded.decision, "actingOn")
    if acting:
        parts.append(_threshold(story, acting))
    grown = [
        f"{name} (+{units.format_amount(int(more), explain.unit_of(story.signal.value))})"
        for name, more in stories.growth(story)
    ]
    if story.zombies:
        parts.append(story.zombies)
    if grown:
        parts.append(f"the pods that grew most: {', '.join(grown)}")
    return "; ".join(parts)


def _observed(story: Story) -> str | None:
    """The signal as the decision read it."""
    for verdict in record_fields.items(story.recorded.decision, "signals"):
        observation = record_fields.mapping(verdict, "observation")
        if observation.get("signal") == story.signal.value:
            unit = explain.unit_of(story.signal.value)
            available = units.format_amount(record_fields.integer(observation.get("available")), unit)
            capacity = units.format_amount(record_fields.integer(observation.get("capacity")), unit)
            return f"{story.signal.value} was {available} of {capacity}"
    return None


def _threshold(story: Story, acting: JsonObject) -> str:
    threshold = record_fields.mapping(acting, "threshold")
    grace = record_fields.number(threshold.get("gracePeriodSeconds"))
    value = units.format_amount(record_fields.integer(acting.get("value")), explain.unit_of(threshold.get("signal")))
    made_at = record_fields.number(story.recorded.decision.get("madeAt"))
    since = record_fields.number(acting.get("activeSince"))
    met = ""
    if made_at is not None and since is not None:
        met = f", met for {units.format_duration(max(0.0, made_at - since))}"
    after = f" after its grace period of {units.format_duration(grace)}" if grace else ""
    return f"the {'soft' if grace else 'hard'} threshold of {value} was due{after}{met}"


def _decided(story: Story) -> str:
    decision = story.recorded.decision
    ranking = record_fields.items(decision, "ranking")
    if not story.victims:
        for refusals, nothing in (
            (record_fields.eviction_refusals(decision), "to evict no pod"),
            (record_fields.resize_refusals(decision), "to raise no limit"),
        ):
            if refusals:
                return f"{nothing}: " + "; ".join([f"{code}: {message}" for code, message in refusals])
        return "that nothing was due"
    parts = []
    for victim in story.victims[:3]:
        ranked = next((each for each in ranking if each.get("uid") == victim.get("uid")), {})
        keys = "; ".join(str(key.get("text")) for key in record_fields.items(ranked, "keys"))
        place = f", rank {ranked.get('rank')} of {len(ranking)}" if ranked else ""
        parts.append(f"to evict {record_fields.pod_name(victim)}{place}" + (f" ({keys})" if keys else ""))
    more = len(story.victims) - len(parts)
    refused = sum(bool(record_fields.items(each, "refusals")) for each in ranking)
    return (
        "; ".join(parts)
        + (f" and {more} more" if more else "")
        + (f"; {refused} pods were protected or not evicted now" if refused else "")
    )


def _done(story: Story) -> str:
    parts = []
    names = {str(each.get("uid")): record_fields.pod_name(each) for each in story.victims}
    for outcome in story.recorded.outcomes:
        uid = str(outcome.get("podUid"))
        status = outcome.get("httpStatus")
        took = explain.took(story.recorded.decision, outcome)
        parts.append(
            f"{names.get(uid, f'uid/{uid}')}: {outcome.get('kind')}"
            + (f" (HTTP {status})" if status is not None else "")
            + (f" after {took}" if took else "")
        )
    parts += [f"reclaim action {each.get('name')}: {each.get('result')}" for each in story.recorded.reclaims]
    parts += [f"hook before an eviction: {each.get('result')}" for each in story.recorded.hooks]
    if not parts and story.victims:
        return "no outcome is recorded"
    return "; ".join(parts)


def _result(story: Story) -> str:
    parts = [stories.relief_text(each) for each in story.recorded.reliefs]
    at = story.at
    if story.history is not None and at is not None:
        ends = [
            window.ended
            for window in story.history.met
            if window.threshold.signal is story.signal and window.ended is not None and window.ended >= at
        ]
        lasting = any(each.threshold.signal is story.signal and each.ended is None for each in story.history.met)
        if lasting:
            parts.append(f"{story.signal.value} was still below a threshold {_after(story)} later")
        elif ends:
            parts.append(f"no threshold of {story.signal.value} was met {units.format_duration(max(ends) - at)} later")
    if not parts and story.victims:
        return "no relief is recorded"
    return "; ".join(parts)


def _after(story: Story) -> str:
    ended = story.history.ended if story.history is not None else None
    return units.format_duration(max(0.0, (ended or 0.0) - (story.at or 0.0)))


def _short(story: Story) -> Section:
    lines = [Cell(f"{word}: {wording.escape_terminal(text)}") for word, text in summary(story)]
    if story.missing:
        lines.append(Cell(f"no curves: {wording.escape_terminal(story.missing)}", DIM))
    lines += [Cell(f"not readable: {wording.escape_terminal(each)}", WARN) for each in story.trouble[:MAX_TROUBLE]]
    return Section("IN SHORT" if lines else "", lines=tuple(lines))


# --- curves ----------------------------------------------------------------------------------------------------------


def _curves(story: Story) -> Section:
    found = stories.curves(story)
    at = story.at
    if not found or at is None:
        return Section("")
    began, ended = span(story, found)
    rows = curve_rows(story)
    widths = [max(len(row[number]) for row in rows) for number in range(len(rows[0]))]
    styles = ["", *(BAD if curve.victim else STRONG if curve.falls else "" for curve in found)]
    lines = [
        Cell(aligned(row, widths), style if number else DIM)
        for number, (row, style) in enumerate(zip(rows, styles, strict=True))
    ]
    title = f"THE {units.format_duration(at - began)} BEFORE AND {units.format_duration(ended - at)} AFTER"
    return Section(title, lines=tuple(lines))


def curve_rows(story: Story) -> list[tuple[str, ...]]:
    """Name, curve, first, extreme, value at the decision and last value, with a heading. Escaped for a terminal."""
    found = stories.curves(story)
    at = story.at or 0.0
    began, ended = span(story, found)
    rows: list[tuple[str, ...]] = [("", axis(began, at, ended, CURVE_WIDTH), "FIRST", "EXTREME", "DECISION", "LAST")]
    for curve in found:
        values = stories.columns(curve, began, ended, CURVE_WIDTH)
        drawn = sparkline.sparkline(values, CURVE_WIDTH, low=0.0)
        numbers = (curve.first, curve.extreme, curve.value_at(at), curve.last)
        name = wording.escape_terminal(curve.name)
        rows.append((name, drawn.ljust(CURVE_WIDTH), *(stories.amount(number, curve.unit) for number in numbers)))
    return rows


def span(story: Story, found: tuple[Curve, ...]) -> tuple[float, float]:
    """The time that the curves show: from the first to the last sample in the window."""
    times = [curve.points[end].at for curve in found if curve.points for end in (0, -1)]
    if story.history is not None:
        times += [time for time in (story.history.began, story.history.ended) if time is not None]
    began, ended = min(times, default=story.began), max(times, default=story.ended)
    at = story.at or began
    return min(began, at), max(ended, at, began + 1.0)


def axis(began: float, at: float, ended: float, width: int) -> str:
    """`-10m              |0       +5m`: where the decision is in the curves below."""
    place = min(width - 1, int((at - began) / (ended - began) * width))
    left, right = f"-{units.format_duration(at - began)}", f"+{units.format_duration(ended - at)}"
    line = (left if len(left) < place else "").ljust(place) + "|"
    room = width - len(line)
    return (line + (right.rjust(room) if len(right) < room else "")).ljust(width)


def aligned(row: tuple[str, ...], widths: list[int]) -> str:
    """A row of curves as one line."""
    name, drawn, *numbers = row
    cells = [
        name.ljust(widths[0]),
        drawn,
        *(text.rjust(width) for text, width in zip(numbers, widths[2:], strict=True)),
    ]
    return "  ".join(cells).rstrip()


def _first_at(curve: Curve, at: float) -> float:
    return next((point.at for point in curve.points if point.value is not None), at)


# --- moments ---------------------------------------------------------------------------------------------------------


def _moments(story: Story) -> Section:
    if story.at is None or not story.moments:
        return Section("")
    shown = shown_moments(story)
    width = max(len(when(moment, story.at)) for moment in shown)
    lines = [
        Cell(
            f"{when(moment, story.at).rjust(width)}  {wording.escape_terminal(moment_text(moment, story.at))}",
            moment.style,
        )
        for moment in shown
    ]
    if (more := len(story.moments) - len(shown)) > 0:
        lines.append(Cell(f"and {more} more moments: -o json has them all", DIM))
    return Section(f"WHAT HAPPENED, FROM {wording.rfc3339(story.at)}", lines=tuple(lines))


def shown_moments(story: Story) -> tuple[Moment, ...]:
    """At most `MAX_MOMENTS`, those nearest to the decision."""
    at = story.at or 0.0
    before = [moment for moment in story.moments if moment.at < at]
    after = [moment for moment in story.moments if moment.at >= at]
    kept = before[-max(_KEPT_BEFORE, MAX_MOMENTS - len(after)) :]
    return (*kept, *after[: MAX_MOMENTS - len(kept)])


def when(moment: Moment, at: float) -> str:
    """`-4m 32s`, `0s`, `+17ms`."""
    offset = moment.at - at
    return (
        units.format_duration(0.0)
        if abs(offset) < 0.0005
        else f"{'+' if offset > 0 else ''}{units.format_duration(offset)}"
    )


def moment_text(moment: Moment, at: float) -> str:
    """The text with how often it happened. Not escaped."""
    if moment.number == 1 or moment.until is None:
        return moment.text
    return f"{moment.text} ({moment.number} times until {when(moment._replace(at=moment.until), at)})"


# --- JSON ------------------------------------------------------------------------------------------------------------


def to_json(story: Story) -> dict[str, Any]:
    """The decision as `explain.to_json`, with its story."""
    return {
        **explain.to_json(story.recorded),
        "story": {
            "summary": dict(summary(story)),
            "missing": story.missing or None,
            "unreadable": list(story.trouble),
            "moments": [
                {
                    "time": wording.rfc3339(moment.at),
                    "offsetSeconds": None if story.at is None else round(moment.at - story.at, 3),
                    "text": moment.text,
                    "count": moment.number,
                }
                for moment in story.moments
            ],
            "series": [
                {
                    "name": curve.name,
                    "unit": curve.unit,
                    "points": [[round(point.at, 3), point.value] for point in curve.points],
                }
                for curve in stories.curves(story)
            ],
        },
    }

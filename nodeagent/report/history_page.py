"""The history of a recording as the blocks of an HTML page: `check`, `explain`, `snapshot`, `replay` and `demo` use it.

A signal that had a threshold met comes first, with its grace periods, the times of its condition and its damping in
lanes below; then the usage of the pods; then stalls. Signals that stayed calm are folded. Two signals of one file
system are one chart.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from nodeagent.model import SIGNAL_TABLE, Method, Signal, Unit
from nodeagent.report import chart_scales, charts, history_values, html_page
from nodeagent.report.charts import Band, Line, Mark
from nodeagent.report.history_values import EvictionMark, History, OomKillMark, Series
from nodeagent.report.html_page import Html

_STALL_SHOWN: Final = 1.0
"""Percent: a node that never stalled longer has no chart of it."""
_TOO_FAR: Final = 30.0
"""A threshold above this multiple of the highest value is not drawn: it would flatten the line."""


def blocks(
    history: History,
    *,
    evictions: Iterable[EvictionMark] = (),
    oom_kills: Iterable[OomKillMark] = (),
    marks: Iterable[Mark] = (),
    pods_of: Signal = Signal.MEMORY,
) -> tuple[Html, ...]:
    """The charts of this history; a sentence if it has no samples. `pods_of`: the signal of `history.pods`."""
    if history.began is None or history.ended is None:
        return (html_page.paragraph("The recording has no samples of this time.", "dim"),)
    span = (history.began, max(history.ended, history.began + 1.0))
    events = (*event_marks(evictions, oom_kills), *marks)
    met = {window.threshold.signal for window in history.met}
    first: list[Html] = []
    calm: list[Html] = []
    for series in _distinct(history.signals):
        if series.signal is None or not _has_thresholds(history, series.signal):
            continue
        busy = series.signal in met
        chart = signal_chart(history, series, marks=events if busy or series.signal is pods_of else (), span=span)
        (first if busy or series.signal is pods_of else calm).append(chart)
    found = [*first]
    if history.pods:
        found.append(pods_chart(history.pods, pods_of, marks=events, span=span))
    found.extend(_stalls(history, span))
    if calm:
        found.append(html_page.details(f"{len(calm)} further signal{'s' * (len(calm) != 1)}, no threshold met", *calm))
    return tuple(found)


def event_marks(evictions: Iterable[EvictionMark], oom_kills: Iterable[OomKillMark]) -> tuple[Mark, ...]:
    """Evictions and OOM kills as marks of a chart."""
    marks = [
        Mark(
            each.at,
            f"{_EVICTION_WORDS.get(each.method, 'eviction')}: {each.pod} "
            f"({', '.join(filter(None, (each.signal, each.tier, each.outcome)))}), decision {each.plan_id}",
        )
        for each in evictions
    ]
    for kill in oom_kills:
        number = "" if kill.number in (None, 1) else f", {kill.number} processes"
        race = ", before this agent could act" if kill.race_lost else ""
        marks.append(Mark(kill.at, f"OOM kill: {kill.subject}{number}{race}, report {kill.report_id}"))
    return tuple(marks)


_EVICTION_WORDS: Final = {
    Method.DELETE.value: "deletion",
    Method.KILL.value: "kill",
    Method.REQUEST.value: "EvictionRequest",
}


def signal_chart(
    history: History, series: Series, *, marks: Sequence[Mark] = (), span: tuple[float, float] | None = None
) -> Html:
    """One signal against its thresholds, with its windows of time."""
    highest = max((point.value for point in series.points if point.value is not None), default=0.0)
    limits = [
        Line(each.name, each.points, each.tier.value)
        for each in history.thresholds
        if each.threshold.signal is series.signal
        and any(point.value is not None and point.value <= max(1.0, highest) * _TOO_FAR for point in each.points)
    ]
    capacity = "" if series.capacity is None else f"capacity {chart_scales.value_text(series.capacity, series.unit)}"
    bands = () if series.signal is None else _bands(history, series.signal)
    return charts.time_chart(
        series.name,
        [Line("available", series.points), *limits],
        unit=series.unit,
        bands=bands,
        marks=marks,
        note=capacity,
        span=span,
    )


def pods_chart(
    pods: Sequence[Series],
    signal: Signal = Signal.MEMORY,
    *,
    marks: Sequence[Mark] = (),
    span: tuple[float, float] | None = None,
) -> Html:
    """Usage of the pods upon each other, the largest at the bottom."""
    title = (
        "Memory of the pods" if signal in (Signal.MEMORY, Signal.ALLOCATABLE_MEMORY) else f"Usage of {signal} by pod"
    )
    shown = len(pods) - (pods[-1].name == history_values.OTHER_PODS)
    note = f"the {shown} largest; working set" if SIGNAL_TABLE[signal].unit is Unit.BYTES else f"the {shown} largest"
    lines = [Line(each.name, each.points) for each in pods]
    return charts.time_chart(title, lines, unit=pods[0].unit, stacked=True, marks=marks, note=note, span=span)


def _has_thresholds(history: History, signal: Signal) -> bool:
    return signal is Signal.MEMORY or any(each.threshold.signal is signal for each in history.thresholds)


def _distinct(signals: Iterable[Series]) -> Iterable[Series]:
    """Without signals that repeat another one: nodefs and imagefs of one file system."""
    seen: set[tuple[charts.Points, str]] = set()
    for series in signals:
        if (series.points, series.unit) not in seen:
            seen.add((series.points, series.unit))
            yield series


def _bands(history: History, signal: Signal) -> tuple[Band, ...]:
    condition = SIGNAL_TABLE[signal].condition
    bands = []
    for window in history.met:
        if window.threshold.signal is signal and not window.threshold.hard:
            due = window.due
            text = "not due before it ended" if due is None else "then due"
            bands.append(
                Band(f"grace period of {window.name}", window.began, window.ended if due is None else due, text)
            )
    for held in history.conditions:
        if held.type is condition:
            until = held.ended if held.relieved is None else held.relieved
            bands.append(Band(held.type.value, held.began, until, held.message, "hard"))
            if held.relieved is not None:
                text = "no threshold is met any more, the condition stays True"
                bands.append(Band(f"damping of {held.type.value}", held.relieved, held.ended, text, "wait"))
    return tuple(bands)


def _stalls(history: History, span: tuple[float, float]) -> Iterable[Html]:
    lines = [
        Line(each.name, each.points)
        for each in history.stalls
        if any(point.value is not None and point.value >= _STALL_SHOWN for point in each.points)
    ]
    if lines:
        note = "share of time in which some or all tasks waited, average of 10 s"
        yield charts.time_chart(
            "Memory stalls (PSI)", lines[: charts.COLOURS], unit=chart_scales.PERCENT, note=note, span=span
        )

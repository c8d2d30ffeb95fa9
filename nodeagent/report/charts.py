"""Charts as inline SVG: signals against thresholds, stacked usage, curves. For the blocks of `html_page`.

1. Nothing is invented: an unknown value is a gap in a line, every axis contains zero, and ends are those of the data.
2. A chart has a title, a description with its lowest and last values, a legend, a list of its events and a data table:
   what the picture shows is also there as text.
3. Texts keep their size on a phone: shapes stretch with the page, letters do not.

Theory of operation. The outer `svg` has no view box, so that its pixels are the page's; its letters are placed at
percentages of the width. The shapes are in an innermost `svg` that stretches to any width, with strokes that do not.
Colours and dashes are classes of `page_style`, because the Content-Security-Policy forbids style attributes.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from nodeagent.model import Unit
from nodeagent.report import chart_scales, html_page
from nodeagent.report.cells import Cell, Column
from nodeagent.report.chart_scales import Scale
from nodeagent.report.html_page import Html

COLOURS: Final = 8
"""Colours of `page_style`; one more, grey, is for the rest."""
MAX_EVENTS: Final = 40
"""Events of one chart; further ones are counted."""
_HEIGHT: Final = 210
"""Pixels from the lowest to the highest value."""
_FLAGS: Final = 24
"""Pixels above the plot if it has events."""
_LABELS: Final = 20
"""Pixels below the plot for its times."""
_LANE: Final = 30
"""Pixels of one lane: its name and its bars."""
_SIDE: Final = 1000.0
"""The view box of the shapes is a square of this side."""
_HITS: Final = 90
"""Stripes with the values at one time as tooltips."""
_DATA_ROWS: Final = 40
_NAME: Final = 90
"""Letters of a name in a legend."""

Points = Sequence[tuple[float, float | None]]
"""Times (epoch seconds) or x values, in ascending order, and values; None: unknown."""


class Line(NamedTuple):
    """One curve."""

    name: str
    points: Points
    style: str = "line"
    """`line`, or `hard` and `soft` for thresholds, which are drawn as steps."""


class Band(NamedTuple):
    """A stretch of time, such as a grace period. Bands of one name are in one lane below the plot."""

    name: str
    began: float
    ended: float | None
    """None: it lasts."""
    text: str = ""
    """Further facts, for its tooltip and for readers without the picture."""
    style: str = "soft"
    """`soft` (grace), `hard` (a condition), or `wait` (damping)."""


class Mark(NamedTuple):
    """Something that happened at one time."""

    at: float
    text: str
    minor: bool = False
    """False: an eviction or an OOM kill, in red. True: anything else."""


def time_chart(
    title: str,
    lines: Sequence[Line],
    *,
    unit: str = Unit.BYTES,
    stacked: bool = False,
    bands: Sequence[Band] = (),
    marks: Sequence[Mark] = (),
    note: str = "",
    span: tuple[float, float] | None = None,
) -> Html:
    """Values over time. `stacked`: the lines, which have the same times, as areas upon each other; lines with the style
    of a threshold stay lines. `span` is the shown time; None: that of the lines. `note` stands below the title."""
    times = [at for line in lines for at, _ in line.points]
    if not times:
        return _empty(title, "No samples.")
    began, ended = span or (min(times), max(times))
    x = chart_scales.time_scale(began, ended)
    chart = _Chart(title, lines, x=x, unit=unit, stacked=stacked, note=note, x_name="time (UTC)")
    chart.bands = bands
    chart.marks = sorted((mark for mark in marks if x.low <= mark.at <= x.high), key=lambda mark: mark.at)
    return chart.draw()


def curve_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_name: str,
    x_unit: str = Unit.BYTES,
    unit: str = chart_scales.COUNT,
    note: str = "",
) -> Html:
    """Values over another value than time: what another threshold would have cost."""
    places = [at for line in lines for at, _ in line.points]
    if not places:
        return _empty(title, "No values.")
    scale = chart_scales.value_scale(min(places), max(places), x_unit, ticks=6)
    low, high = min(places), max(places)
    x = Scale(low, max(high, low + 1e-9), tuple(tick for tick in scale.ticks if low <= tick <= high))
    return _Chart(title, lines, x=x, unit=unit, note=note, x_name=x_name, x_unit=x_unit).draw()


def _empty(title: str, words: str) -> Html:
    caption = f"<figcaption>{html_page.text(title)}</figcaption>"
    return Html(f'<figure class="chart">{caption}<div class="empty">{html_page.text(words)}</div></figure>')


class _Chart:
    def __init__(
        self,
        title: str,
        lines: Sequence[Line],
        *,
        x: Scale,
        unit: str,
        note: str,
        x_name: str,
        x_unit: str | None = None,
        stacked: bool = False,
    ) -> None:
        self.title, self.note, self.unit, self.x, self.x_name, self.x_unit = title, note, unit, x, x_name, x_unit
        self.bands: Sequence[Band] = ()
        self.marks: Sequence[Mark] = ()
        self.stacked = stacked
        self.lines = [line._replace(points=_finite(line.points)) for line in lines]
        self.data = [line for line in self.lines if line.style == "line"]
        self.limits = [line for line in self.lines if line.style != "line"]
        self.stacks = _stack(self.data) if stacked else []
        shown = [value for stack in self.stacks for _, _, value in stack] if stacked else []
        shown += [value for line in self.lines for _, value in line.points if value is not None]
        self.y = chart_scales.value_scale(min(shown, default=0.0), max(shown, default=1.0), unit)

    # --- the whole

    def draw(self) -> Html:
        lanes = list(dict.fromkeys(band.name for band in self.bands))
        top = _FLAGS if self.marks else 8
        height = top + _HEIGHT + _LABELS + _LANE * len(lanes)
        parts = [
            f'<svg class="plot" role="img" height="{height}" aria-label="{self._summary()}">',
            *self._y_labels(top),
            self._y_grid(top),
            f'<svg y="{top}" width="100%" height="{_HEIGHT}" viewBox="0 0 1000 1000" preserveAspectRatio="none">',
            *self._shades(),
            *(self._areas() if self.stacked else ()),
            *[part for line in self.limits for part in self._limit(line)],
            *([] if self.stacked else [self._line(line, number) for number, line in enumerate(self.data)]),
            *self._marks_in_plot(),
            *self._hits(),
            "</svg>",
            *self._limit_labels(top),
            *self._x_labels(top + _HEIGHT),
            *[part for number, name in enumerate(lanes) for part in self._lane(name, top + _HEIGHT + _LABELS, number)],
            *self._flags(top),
            "</svg>",
        ]
        note = f"<small>{html_page.text(self.note)}</small>" if self.note else ""
        return Html(
            f'<figure class="chart"><figcaption>{html_page.text(self.title)}{note}</figcaption>'
            f"{self._legend()}{''.join(parts)}{self._events()}{self._bands_as_text()}{self._data_table()}</figure>"
        )

    def _summary(self) -> str:
        words = [f"{self.title}, from {self._x_text(self.x.low)} to {self._x_text(self.x.high)}."]
        for line in self.lines[:12]:
            known = [(value, at) for at, value in line.points if value is not None]
            if known:
                lowest, highest, last = min(known), max(known), known[-1]
                words.append(
                    f"{short_name(line.name)}: lowest {self._text(lowest[0])} at {self._x_text(lowest[1])}, "
                    f"highest {self._text(highest[0])} at {self._x_text(highest[1])}, last {self._text(last[0])}."
                )
        if self.marks:
            words.append(f"{len(self.marks)} events.")
        return html_page.text(" ".join(words))

    # --- axes

    def _y_grid(self, top: int) -> str:
        rows = [top + _HEIGHT * (1 - self.y.place(tick)) for tick in self.y.ticks]
        return "".join(
            f'<line class="{"axis" if tick == 0 else "grid"}" x1="0" x2="100%" y1="{row:.1f}" y2="{row:.1f}"/>'
            for tick, row in zip(self.y.ticks, rows, strict=True)
        )

    def _y_labels(self, top: int) -> Iterable[str]:
        for tick in self.y.ticks:
            row = top + _HEIGHT * (1 - self.y.place(tick)) + 4
            yield f'<text class="end" x="-6" y="{row:.1f}">{self._text(tick)}</text>'

    def _x_labels(self, row: int) -> Iterable[str]:
        for number, tick in enumerate(self.x.ticks):
            place = 100 * self.x.place(tick)
            anchor = "" if place < 4 else "end" if place > 96 else "middle"
            sparse = " sparse" if number % 2 else ""
            yield f'<text class="{anchor}{sparse}" x="{place:.2f}%" y="{row + 14}">{self._x_text(tick)}</text>'

    def _limit_labels(self, top: int) -> Iterable[str]:
        """The value of each threshold at the right end, unless another label is there."""
        taken: list[float] = []
        for line in sorted(self.limits, key=lambda each: each.style != "hard"):
            value = next((value for _, value in reversed(line.points) if value is not None), None)
            if value is None:
                continue
            row = max(top + 10.0, top + _HEIGHT * (1 - self.y.place(value)) - 4)
            if all(abs(row - other) >= 12 for other in taken):
                taken.append(row)
                words = f"{line.style} {self._text(value)}"
                yield f'<text class="end halo" x="99.7%" y="{row:.1f}">{words}</text>'

    # --- shapes

    def _at(self, at: float, value: float) -> str:
        return f"{_SIDE * self.x.place(at):.1f},{_SIDE * (1 - self.y.place(value)):.1f}"

    def _line(self, line: Line, number: int) -> str:
        shapes = []
        for run in _runs(line.points):
            places = " ".join(self._at(at, value) for at, value in run)
            if len(run) == 1:
                places += " " + places  # a dot, by its round ends
            shapes.append(f'<polyline class="line l{min(number, COLOURS)}" points="{places}"/>')
        return "".join(shapes)

    def _limit(self, line: Line) -> Iterable[str]:
        for run in _runs(line.points):
            places = self._at(*run[0])
            for before, after in itertools.pairwise(run):
                places += f" {self._at(after[0], before[1])} {self._at(*after)}"
            if line.style == "hard":
                bottom = self.y.low
                yield (
                    f'<polygon class="below" points="{self._at(run[0][0], bottom)} {places} '
                    f'{self._at(run[-1][0], bottom)}"/>'
                )
            yield f'<polyline class="{line.style}" points="{places}"/>'

    def _areas(self) -> Iterable[str]:
        for number, stack in enumerate(self.stacks):
            if stack:
                upper = " ".join(self._at(at, high) for at, _, high in stack)
                lower = " ".join(self._at(at, low) for at, low, _ in reversed(stack))
                yield f'<polygon class="area a{self._colour(number)}" points="{upper} {lower}"/>'

    def _colour(self, number: int) -> int:
        """The last of many is the rest, in grey."""
        return COLOURS if number >= COLOURS or (len(self.data) > COLOURS and number == len(self.data) - 1) else number

    def _shades(self) -> Iterable[str]:
        for band in self.bands:
            left, width = self._extent(band, _SIDE)
            if width > 0 and band.style != "wait":
                colour = "a2" if band.style == "soft" else "flag"
                yield f'<rect class="band {colour}" x="{left:.1f}" width="{width:.1f}" height="1000"/>'

    def _extent(self, band: Band, side: float) -> tuple[float, float]:
        left = side * self.x.place(band.began)
        return left, side * self.x.place(self.x.high if band.ended is None else band.ended) - left

    def _marks_in_plot(self) -> Iterable[str]:
        for mark in self.marks[:MAX_EVENTS]:
            place = _SIDE * self.x.place(mark.at)
            yield f'<line class="event{_minor(mark)}" x1="{place:.1f}" x2="{place:.1f}" y1="0" y2="1000"/>'

    def _hits(self) -> Iterable[str]:
        """Transparent stripes with the values at their time."""
        for at, left, right, values in self._at_times(_HITS):
            words = "\n".join([self._x_text(at), *values])
            yield (
                f'<rect class="hit" x="{left:.1f}" width="{max(0.0, right - left):.1f}" height="1000">'
                f"<title>{html_page.text(words.replace(chr(10), ' | '))}</title></rect>"
            )

    def _at_times(self, most: int) -> Iterable[tuple[float, float, float, list[str]]]:
        """At most `most` times with their stripe and the known values there."""
        times = _thinned(sorted({at for line in self.data for at, _ in line.points}), most)
        places = [_SIDE * self.x.place(at) for at in times]
        lookups = [(line.name, dict(line.points)) for line in self.data]
        for number, at in enumerate(times):
            left = 0.0 if number == 0 else (places[number - 1] + places[number]) / 2
            right = _SIDE if number == len(times) - 1 else (places[number] + places[number + 1]) / 2
            values = [
                f"{short_name(name)} {self._text(found[at])}" for name, found in lookups if found.get(at) is not None
            ]
            yield at, left, right, values[:10]

    # --- lanes and events

    def _lane(self, name: str, top: int, number: int) -> Iterable[str]:
        row = top + _LANE * number
        yield f'<text x="0" y="{row + 13}">{html_page.text(short_name(name))}</text>'
        yield f'<rect class="track" y="{row + 18}" width="100%" height="7" rx="2"/>'
        for band in self.bands:
            if band.name == name:
                left, width = self._extent(band, 100.0)
                words = html_page.text(self._band_text(band))
                colour = {"soft": "a2", "hard": "flag"}.get(band.style, "a8")
                yield (
                    f'<rect class="lane {colour}" x="{left:.2f}%" y="{row + 18}" width="{max(0.3, width):.2f}%" '
                    f'height="7" rx="2"><title>{words}</title></rect>'
                )

    def _band_text(self, band: Band) -> str:
        ended = "the end" if band.ended is None else self._x_text(band.ended)
        facts = f": {band.text}" if band.text else ""
        length = (self.x.high if band.ended is None else band.ended) - band.began
        return f"{short_name(band.name)} {self._x_text(band.began)} to {ended} ({_duration(length)}){facts}"

    def _flags(self, top: int) -> Iterable[str]:
        for number, mark in enumerate(self.marks[:MAX_EVENTS], 1):
            place = 100 * self.x.place(mark.at)
            yield (
                f'<circle class="flag{_minor(mark)}" cx="{place:.2f}%" cy="{top - 12}" r="9">'
                f"<title>{html_page.text(mark.text)}</title></circle>"
                f'<text class="number" x="{place:.2f}%" y="{top - 8.5}">{number}</text>'
            )

    def _events(self) -> str:
        if not self.marks:
            return ""
        rows = [
            f'<li><b class="{_minor(mark).strip()}">{number}</b><time>{self._x_text(mark.at)}</time>'
            f"<bdi>{html_page.text(mark.text, limit=400)}</bdi></li>"
            for number, mark in enumerate(self.marks[:MAX_EVENTS], 1)
        ]
        if len(self.marks) > MAX_EVENTS:
            rows.append(f"<li>{len(self.marks) - MAX_EVENTS} more events</li>")
        return f'<ol class="events" aria-label="Events">{"".join(rows)}</ol>'

    # --- as text

    def _legend(self) -> str:
        rows = []
        for number, line in enumerate(self.data):
            known = [value for _, value in line.points if value is not None]
            words = f"lowest {self._text(min(known))}, last {self._text(known[-1])}" if known else "no values"
            if self.stacked:
                words = f"at most {self._text(max(known))}" if known else "no values"
            area = f'<rect class="a{self._colour(number)}" width="100%" height="100%" rx="2"/>'
            key = f'<svg aria-hidden="true">{area}</svg>'
            rows.append(
                f'<li>{key}<bdi>{html_page.text(short_name(line.name))}</bdi> <span class="dim">{words}</span></li>'
            )
        for line in self.limits:
            key = f'<svg aria-hidden="true"><line class="{line.style}" x1="0" x2="100%" y1="50%" y2="50%"/></svg>'
            rows.append(f"<li>{key}<bdi>{html_page.text(short_name(line.name))}</bdi></li>")
        return f'<ul class="legend">{"".join(rows)}</ul>' if rows else ""

    def _bands_as_text(self) -> str:
        if not self.bands:
            return ""
        rows = [f"<li>{html_page.text(self._band_text(band))}</li>" for band in self.bands[:MAX_EVENTS]]
        if len(self.bands) > MAX_EVENTS:
            rows.append(f"<li>{len(self.bands) - MAX_EVENTS} more</li>")
        return html_page.details("Times as text", Html(f'<ol class="events">{"".join(rows)}</ol>'))

    def _data_table(self) -> str:
        times = _thinned(sorted({at for line in self.data for at, _ in line.points}), _DATA_ROWS)
        lookups = [dict(line.points) for line in self.data]
        columns = (Column(self.x_name), *[Column(short_name(line.name), right=True) for line in self.data])
        rows = [
            (Cell(self._x_text(at)), *[Cell(self._text(found.get(at)) if at in found else "") for found in lookups])
            for at in times
        ]
        table = html_page.table(columns, rows, name=f"Data of: {self.title}")
        return html_page.details(f"Data table ({len(rows)} of the times)", table)

    def _text(self, value: float | None) -> str:
        return chart_scales.value_text(value, self.unit)

    def _x_text(self, at: float) -> str:
        if self.x_unit is not None:
            return chart_scales.value_text(at, self.x_unit)
        return chart_scales.time_text(at, self.x.high - self.x.low)


# --- points ----------------------------------------------------------------------------------------------------------


def _finite(points: Points) -> Points:
    """The points whose place is a number; values that are none are unknown."""
    return [
        (at, value if value is not None and math.isfinite(value) else None) for at, value in points if math.isfinite(at)
    ]


def _runs(points: Points) -> list[list[tuple[float, float]]]:
    """The parts between the gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    for at, value in points:
        if value is not None:
            runs[-1].append((at, value))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _stack(lines: Sequence[Line]) -> list[list[tuple[float, float, float]]]:
    """For each line its time, lower and upper edge. A gap in a line has no height."""
    edges: dict[float, float] = {}
    stacks = []
    for line in lines:
        stack = []
        for at, value in line.points:
            low = edges.get(at, 0.0)
            edges[at] = low + max(0.0, value or 0.0)
            stack.append((at, low, edges[at]))
        stacks.append(stack)
    return stacks


def _thinned(times: Sequence[float], most: int) -> Sequence[float]:
    if len(times) <= most:
        return times
    return [times[number * (len(times) - 1) // (most - 1)] for number in range(most)]


def short_name(name: str) -> str:
    """A name for a legend: its middle is cut if it is endless."""
    return name if len(name) <= _NAME else f"{name[: _NAME * 2 // 3]}\u2026{name[-_NAME // 4 :]}"


def _minor(mark: Mark) -> str:
    return " other" if mark.minor else ""


def _duration(seconds: float) -> str:
    return chart_scales.value_text(max(0.0, seconds), chart_scales.SECONDS)

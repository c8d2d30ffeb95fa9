"""The live view of `check --watch`: signals as bars and curves, and the pods that would be evicted first.

1. It fits the terminal: columns are left out on a narrow one, rows on a low one, and what is left out is counted.
2. The worst state and its numbers are always the first line.
3. An unknown value is `?` and a gap, never an empty bar.
"""

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, Protocol

from nodeagent.model import SIGNAL_TABLE, RankedPod, Signal, SignalState, SignalVerdict, Unit, units
from nodeagent.policy import headroom
from nodeagent.report import node_report, sections, sparkline, terminal, wording
from nodeagent.report.node_report import Report

if TYPE_CHECKING:
    from rich.console import Console, RenderableType, ScreenContext
    from rich.table import Table
    from rich.text import Text

KEPT: Final = 600
"""Values of a signal: 20 minutes at the default interval."""
_STYLES: Final = {
    SignalState.OK: "green",
    SignalState.SOFT: "yellow",
    SignalState.HARD: "bold red",
    SignalState.UNKNOWN: "yellow",
}
_ORDER: Final = (SignalState.HARD, SignalState.SOFT, SignalState.UNKNOWN, SignalState.OK)
_WIDE: Final = 100
"""Columns for curves; below `_NARROW` bars are left out as well."""
_NARROW: Final = 64
_TINY: Final = 52
"""Below it the numbers stay whole and thresholds are left out."""
_MIN_BAR, _MAX_BAR = 8, 24


class View(Protocol):
    """What a screen shows."""

    def render(self, width: int, height: int) -> "RenderableType":
        """What fits into so many columns and lines."""


class LiveView:
    """The newest report, and the values of its signals so far."""

    def __init__(self, *, every_s: float) -> None:
        self._every_s = every_s
        self._values: dict[Signal, deque[float | None]] = {}
        self._report: Report | None = None
        self._count = 0

    def add(self, report: Report) -> None:
        """Show this report from now on."""
        self._report = report
        self._count += 1
        for verdict in report.plan.signals:
            values = self._values.setdefault(verdict.signal, deque(maxlen=KEPT))
            values.append(_available(report, verdict))

    def render(self, width: int, height: int) -> "RenderableType":
        """What fits into so many columns and lines."""
        from rich.console import Group
        from rich.text import Text

        report = self._report
        if report is None:
            return Text("sampling", no_wrap=True)
        lines: list[RenderableType] = [
            Text(sections.summary(report), style=_STYLES[node_report.state(report)], no_wrap=True, overflow="ellipsis")
        ]
        facts = f"{wording.rfc3339(report.snapshot.wall_time)}  mode {report.mode}  pods: {report.pods_source}"
        lines.append(Text(wording.escape_terminal(facts), style="dim", no_wrap=True, overflow="ellipsis"))
        rows = max(1, height - 3)
        shared = node_report.shared_file_systems(report.snapshot)
        signals = [each for each in report.plan.signals if each.signal not in shared and each.thresholds]
        signals.sort(key=lambda each: _ORDER.index(each.state))  # the worst first: rows may be left out
        if rows > len(signals) + 4:
            lines.append(Text())
            rows -= 1
        shown = signals[: max(1, rows - 1)]
        lines.append(self._signal_table(report, shown, width))
        rows -= len(shown) + 1
        if rows >= 4 and report.plan.ranking:
            lines.append(Text())
            lines.append(_pod_table(report, width, rows - 2))
        foot = f"q quits   every {units.format_duration(self._every_s)}   sample {self._count}"
        lines.append(Text(foot, style="dim", no_wrap=True, overflow="ellipsis"))
        return Group(*lines)

    def _signal_table(self, report: Report, signals: Iterable[SignalVerdict], width: int) -> "Table":
        table = _grid()
        thresholds, bars, curves = width >= _TINY, width >= _NARROW, width >= _WIDE
        bar_width = max(_MIN_BAR, min(_MAX_BAR, width // 6))
        curve_width = max(12, width - bar_width - 72)
        longest = None if thresholds else max(8, width - 20)
        table.add_column("SIGNAL", no_wrap=True, overflow="ellipsis", max_width=longest)
        if bars:
            table.add_column("", no_wrap=True, width=bar_width)
        table.add_column("AVAILABLE", justify="right", no_wrap=True, min_width=9)
        if thresholds:
            table.add_column("THRESHOLD", no_wrap=True, min_width=12)
        table.add_column("STATE", no_wrap=True, min_width=7)
        if curves:
            table.add_column("LAST SAMPLES", no_wrap=True, width=curve_width)
        for verdict in signals:
            style, unit = _STYLES[verdict.state], SIGNAL_TABLE[verdict.signal].unit
            available, capacity = _available(report, verdict), verdict.observation.capacity
            leading = headroom.leading_threshold(report.snapshot, verdict)
            share = None if available is None or not capacity else available / capacity
            mark = None if leading is None or not leading.value or not capacity else leading.value / capacity
            cells = [_styled(str(verdict.signal), "bold")]
            if bars:
                cells.append(_styled(sparkline.bar(share, bar_width, mark), style))
            cells.append(_styled(units.format_amount(None if available is None else round(available), unit)))
            threshold = "none" if leading is None else _threshold_text(leading.threshold.hard, leading.value, unit)
            if thresholds:
                cells.append(_styled(threshold, "dim"))
            cells.append(_styled(str(verdict.state), style))
            if curves:
                recent = list(self._values[verdict.signal])[-curve_width:]
                cells.append(_styled(sparkline.sparkline(recent, curve_width, low=0), style))
            table.add_row(*cells)
        return table


def _available(report: Report, verdict: SignalVerdict) -> float | None:
    """What the leading threshold is compared with."""
    leading = headroom.leading_threshold(report.snapshot, verdict)
    if leading is None:
        return verdict.observation.available
    return headroom.available_amount(report.snapshot, leading.threshold)


def _threshold_text(hard: bool, value: int | None, unit: Unit) -> str:
    return f"{'hard' if hard else 'soft'} {units.format_amount(value, unit)}"


def _pod_table(report: Report, width: int, most: int) -> "Table":
    """The first pods in eviction order; what does not fit is counted in the title."""
    ranking, unit = report.plan.ranking, SIGNAL_TABLE[report.plan.ranked_for].unit
    shown = ranking[:most]
    more = f" of {len(ranking)}" if len(ranking) > len(shown) else ""
    victims = {victim.pod.uid for victim in report.plan.victims}
    table = _grid()
    bars = width >= _NARROW
    bar_width = max(_MIN_BAR, min(_MAX_BAR, width // 6))
    largest = max([ranked.usage or 0 for ranked in ranking], default=0)
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column(f"FIRST {len(shown)}{more} PODS FOR {report.plan.ranked_for}", no_wrap=True, overflow="ellipsis")
    if bars:
        table.add_column("", no_wrap=True, width=bar_width)
    table.add_column("USAGE", justify="right", no_wrap=True)
    if width >= _WIDE:
        table.add_column("WHY", no_wrap=True, overflow="ellipsis", ratio=1)
    for ranked in shown:
        style = "bold red" if ranked.view.pod.uid in victims else "dim" if ranked.refusals else ""
        cells = [_styled(str(ranked.rank), "dim"), _styled(wording.escape_terminal(ranked.view.pod.key), style)]
        if bars:
            share = None if ranked.usage is None or not largest else ranked.usage / largest
            cells.append(_styled(sparkline.bar(share, bar_width), style or "blue"))
        cells.append(_styled(units.format_amount(ranked.usage, unit)))
        if width >= _WIDE:
            cells.append(_styled(wording.escape_terminal(_why(ranked)), "dim" if ranked.refusals else ""))
        table.add_row(*cells)
    return table


def _why(ranked: RankedPod) -> str:
    if ranked.refusals:
        return wording.refusal_text([(each.code, each.message) for each in ranked.refusals])
    return "; ".join([key.text for key in ranked.keys])


def _grid() -> "Table":
    from rich.table import Table

    return Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim", expand=True)


def _styled(words: str, style: str = "") -> "Text":
    from rich.text import Text

    return Text(words, style=style)  # never a plain string: rich reads `[red]` in one as markup


class Screen:
    """The alternate screen of the terminal."""

    def __init__(self, console: "Console", context: "ScreenContext") -> None:
        self._console = console
        self._context = context

    def show(self, view: View) -> None:
        """Draw the view from the top left corner. Nothing is cleared before, so that it does not flicker."""
        from rich.control import Control

        self._console.control(Control.home())
        self._context.update(view.render(self._console.width, self._console.height))


@contextlib.contextmanager
def screen(*, force: bool = False) -> Iterator[Screen]:
    """The alternate screen without a cursor; the terminal is as before afterwards. `force`: colours also with
    NO_COLOR."""
    console = terminal.console(force=force)
    with console.screen() as context:
        yield Screen(console, context)

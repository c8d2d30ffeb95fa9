"""The pictures of `nodeagent demo`: both lanes as charts of letters, at any time of the incident, in any size.

1. A frame has at most the given lines and columns, however few; what does not fit is left out, least important first.
2. A column shows the lowest memory of its stretch of time, so that a short dip stays visible.

Theory of operation. A row of a chart stands for as much memory as the kubelet's threshold, so that the borders of the
thresholds are borders of rows, and the rows are named after what happens in them. A line is a sequence of cells.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from nodeagent.report import demo_story, sparkline, terminal
from nodeagent.report.cells import BAD, DIM, GOOD, STRONG, WARN, Cell
from nodeagent.report.demo_story import Lane, Story

if TYPE_CHECKING:
    from rich.console import RenderableType

Line = list[Cell]

ROWS: Final = 5
"""Of a chart. More memory than they stand for is a full column."""
_LABELS: Final = 25
"""Columns right of a chart."""
_MIN_CHART: Final = 24
"""With fewer columns for the chart, it has no labels."""
_MOMENTS: Final = 3
"""Lines that the moments need before a chart gets a further row."""
_ENDED: Final = " recording ended"
_WHO: Final = 10
_MARK: Final = "\u25bc"


def frame(story: Story, at: float, *, width: int, height: int, speed: float) -> list[Line]:
    """The picture at the time `at`."""
    lines = [_title(story, at, speed), [Cell(demo_story.headline(story), DIM)]]
    rows = max(1, min(ROWS, (height - len(lines) - 3 * len(story.lanes) - _MOMENTS - 1) // len(story.lanes)))
    for lane in story.lanes:
        lines += [[], *chart(story, lane, at=at, width=width, rows=rows)]
    rest = height - len(lines) - 1
    if rest > 0:
        lines += [[], *_moments(story, at)[-rest:]]
    return [cut(line, width) for line in lines[:height]]


def charts(story: Story, *, width: int) -> list[Line]:
    """Both charts at the end."""
    drawn: list[Line] = []
    for lane in story.lanes:
        drawn += [[], *chart(story, lane, at=story.ended, width=width, rows=ROWS)]
    return [cut(line, width) for line in drawn[1:]]


def act(story: Story, at: float) -> str:
    """The part of the incident."""
    if at < 0:
        return "calm"
    acted = [lane.acted_at for lane in story.lanes]
    return "outcome" if all(each is not None and each <= at for each in acted) else "ramp"


def _title(story: Story, at: float, speed: float) -> Line:
    return [
        Cell("nodeagent demo", STRONG),
        Cell(f"  {demo_story.seconds(at)}  ", STRONG),
        Cell(act(story, at).upper().ljust(8), {"calm": GOOD, "ramp": WARN, "outcome": STRONG}[act(story, at)]),
        Cell(f"recorded {story.recorded}, played {speed:g} times as fast", DIM),
    ]


def _moments(story: Story, at: float) -> list[Line]:
    """What has happened until then."""
    return [
        [
            Cell(f"{demo_story.seconds(moment.at)}  ", DIM),
            Cell(f"{moment.who.ljust(_WHO)}  ", STRONG if lane is story.beside else ""),
            Cell(moment.text, moment.style),
        ]
        for lane, moment in demo_story.moments(story, until=at)
    ]


class Player:
    """The frame of a time, for `live_view.Screen`."""

    def __init__(self, story: Story, *, speed: float) -> None:
        """It begins at the beginning."""
        self.at = story.began
        self._story = story
        self._speed = speed

    def render(self, width: int, height: int) -> "RenderableType":
        """What fits into so many columns and lines."""
        return terminal.group(frame(self._story, self.at, width=width, height=height, speed=self._speed))


# --- a chart ---------------------------------------------------------------------------------------------------------


def chart(story: Story, lane: Lane, *, at: float, width: int, rows: int) -> list[Line]:
    """A line with the newest value and what follows from it, then the chart."""
    columns = max(1, width - _LABELS)
    labels = columns >= _MIN_CHART
    values = _columns(story, lane, at, columns if labels else max(1, width))
    lines = [_head(lane, at), _mark(story, lane, at, len(values))]
    bands = _bands(story, rows)
    for row in reversed(range(rows)):
        line = _row(story, values, bands[row])
        if row == 0 and lane.curve[-1].at < at:
            line = _note_end(line, _column(story, lane.curve[-1].at, len(values)) + 1, len(values))
        if labels:
            text, style = _label(story, bands[row])
            line.append(Cell(f" {text}", style))
        lines.append(line)
    return lines


def _head(lane: Lane, at: float) -> Line:
    point = next((each for each in reversed(lane.curve) if each.at <= at), None)
    outlook = next((each for each in reversed(lane.outlook) if each.at <= at), None)
    available = "" if point is None else f"  {demo_story.amount(point.available)} available"
    line = [Cell(lane.name.upper(), STRONG), Cell(available)]
    if outlook is not None:
        line.append(Cell(f"  {outlook.text}", outlook.style))
    return line


def _mark(story: Story, lane: Lane, at: float, columns: int) -> Line:
    """The act, above its column."""
    if lane.acted_at is None or at < lane.acted_at:
        return []
    column = _column(story, lane.acted_at, columns)
    after = "" if lane.delay_s is None else f", {lane.delay_s:.1f} s after {demo_story.amount(story.hard)}"
    text = f"{lane.actor}{after}"
    before = f"{text} {_MARK}"
    if len(before) <= column + 1:
        return [Cell(before.rjust(column + 1), lane.style)]
    return [Cell(f"{' ' * column}{_MARK} {text}", lane.style)]


def _column(story: Story, at: float, columns: int) -> int:
    return max(0, min(columns - 1, int((at - story.began) / (story.ended - story.began) * columns)))


def _bands(story: Story, rows: int) -> list[tuple[int, int]]:
    """The memory that each row stands for, lowest first."""
    step = story.kubelet * ROWS // rows
    return [(row * step, (row + 1) * step) for row in range(rows)]


def _label(story: Story, band: tuple[int, int]) -> tuple[str, str]:
    """What happens in this row."""
    low, _ = band
    if low < story.kubelet:
        return f"{demo_story.amount(story.kubelet)}: kubelet, hard", BAD
    if low < story.hard:
        return f"{demo_story.amount(story.hard)}: nodeagent, hard", BAD
    if low < story.soft:
        return f"{demo_story.amount(story.soft)}: nodeagent, soft", WARN
    return "", ""


def _columns(story: Story, lane: Lane, at: float, width: int) -> list[int | None]:
    """The lowest memory of each column's stretch of time; None: later than `at`, or not known."""
    values: list[int | None] = [None] * width
    for point in lane.curve:
        if story.began <= point.at <= at:
            column = _column(story, point.at, width)
            before = values[column]
            values[column] = point.available if before is None else min(before, point.available)
    return values


def _row(story: Story, values: Sequence[int | None], band: tuple[int, int]) -> Line:
    """One row; neighbours of one style are one cell."""
    line: Line = []
    for value in values:
        letter, style = _letter(value, band), _style(story, value)
        if line and line[-1].style == style:
            line[-1] = Cell(line[-1].text + letter, style)
        else:
            line.append(Cell(letter, style))
    return line


def _note_end(line: Line, ended: int, columns: int) -> Line:
    """The row with a note where the recording has ended, if there is room for it."""
    if ended + len(_ENDED) > columns:
        return line
    return [*cut(line, ended), Cell(_ENDED, DIM), Cell(" " * (columns - ended - len(_ENDED)))]


def _letter(value: int | None, band: tuple[int, int]) -> str:
    low, high = band
    if value is None or value <= low:
        # The lowest row shows that a value is known, however small.
        return sparkline.LEVELS[0] if value is not None and low == 0 else " "
    return sparkline.LEVELS[min(len(sparkline.LEVELS) - 1, (value - low) * len(sparkline.LEVELS) // (high - low))]


def _style(story: Story, value: int | None) -> str:
    if value is None:
        return ""
    return BAD if value < story.hard else WARN if value < story.soft else GOOD


def cut(line: Line, width: int) -> Line:
    """At most `width` columns."""
    left = max(0, width)
    kept: Line = []
    for cell in line:
        if len(cell.text) > left:
            if left:
                kept.append(Cell(cell.text[: left - 1] + "\u2026", cell.style))
            break
        kept.append(cell)
        left -= len(cell.text)
    return kept


def plain(lines: Sequence[Line]) -> str:
    """Without styles, for a pipe."""
    return "".join("".join(cell.text for cell in line).rstrip() + "\n" for line in lines)

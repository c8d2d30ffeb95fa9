"""The report on a terminal: colours, bars and tables that fit the width. The only module that imports rich."""

import io
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from nodeagent.report import wording
from nodeagent.report.cells import BAD, DIM, GOOD, STRONG, WARN, Cell, Column, Section

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

_STYLES: Final = {
    GOOD: "green",
    WARN: "yellow",
    BAD: "bold red",
    DIM: "dim",
    STRONG: "bold",
    "": "",
}

_BAR_WIDTH: Final = 8
_GAP: Final = 2
_MIN_LAST_WIDTH: Final = 30
"""With less width than this, the last column is printed below each row."""
_INDENT: Final = 4

_FULL, _EMPTY = "\u2588", "\u2591"

_SVG: Final = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: {char_height}px; \
line-height: {line_height}px; }}
.{unique_id}-title {{ font-family: sans-serif; font-size: 18px; font-weight: bold; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""rich's own format without the fonts that it loads from the network."""


def console(*, force: bool) -> "Console":
    """A console on standard output. `force`: colours also without a terminal or with NO_COLOR."""
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704 - called in an except block; rich itself exits with 1, which means `soft`

    if force:
        return Terminal(force_terminal=True, no_color=False, highlight=False, color_system="standard")
    return Terminal(highlight=False)


def draw(target: "Console", sections: Iterable[Section]) -> None:
    """Print all sections on `target`, with a blank line between them."""
    for number, section in enumerate(sections):
        if number:
            target.print()
        for part in _parts(section, target.width):
            target.print(part)


def print_lines(target: "Console", lines: Iterable[Sequence[Cell]]) -> None:
    """Print lines of cells as they are, cut at the width of the terminal."""
    for line in lines:
        target.print(_line(line), no_wrap=True, overflow="ellipsis", crop=True)


def as_svg(
    title: str, *, before: Iterable[Section], lines: Iterable[Sequence[Cell]], after: Iterable[Section], width: int
) -> str:
    """Sections and lines as a terminal of this width shows them, as a picture that loads nothing."""
    from rich.console import Console

    target = Console(
        record=True, file=io.StringIO(), width=width, force_terminal=True, color_system="standard", highlight=False
    )
    draw(target, before)
    target.print()
    print_lines(target, lines)
    target.print()
    draw(target, after)
    return target.export_svg(title=title, code_format=_SVG, unique_id="terminal")


def group(lines: Iterable[Sequence[Cell]]) -> "RenderableType":
    """Lines of cells below each other."""
    from rich.console import Group

    return Group(*[_line(line) for line in lines])


def _line(line: Sequence[Cell]) -> "Text":
    from rich.text import Text

    text = Text(no_wrap=True, overflow="crop")
    for cell in line:
        text.append(wording.escape_terminal(cell.text), style=_STYLES[cell.style])
    return text


def _parts(section: Section, width: int) -> Iterable["RenderableType"]:
    from rich.text import Text

    if section.title:
        yield Text(section.title, style="bold cyan")
    if section.rows:
        yield from _table(section, width)
    for line in section.lines:
        yield Text(wording.escape_terminal(line.text), style=_STYLES[line.style])


def _table(section: Section, width: int) -> Iterable["RenderableType"]:
    """The rows, with bars if they fit. A last column of texts is folded into the remaining width, or printed below each
    row if that is too narrow."""
    for bars in (True, False):
        widths = _widths(section, bars=bars)
        last = widths[-1] if section.columns[-1].right else min(widths[-1], _MIN_LAST_WIDTH)
        if _total([*widths[:-1], last]) <= width:
            grid = _grid(section.columns, widths[:-1])
            for row in section.rows:
                grid.add_row(*[_text(cell, bars=bars) for cell in row])
            yield grid
            return
    yield from _stacked(section, _folded(section, _widths(section, bars=False)[:-1], width))


def _stacked(section: Section, widths: list[int]) -> Iterable["RenderableType"]:
    """Each row without its last cell, and that cell below the row and its continuation rows (empty first cell)."""
    from rich.padding import Padding

    columns = section.columns[:-1]
    remarks: list[Text] = []
    grid = _grid(columns, widths)
    for number, row in enumerate(section.rows):
        if number and row[0].text and remarks:
            yield grid
            yield from [Padding(remark, (0, 0, 0, _INDENT)) for remark in remarks]
            grid, remarks = _grid(columns, widths, header=False), []
        grid.add_row(*[_text(cell, bars=False) for cell in row[:-1]])
        if row[-1].text:
            remarks.append(_text(row[-1], bars=False))
    yield grid
    yield from [Padding(remark, (0, 0, 0, _INDENT)) for remark in remarks]


def _grid(columns: Sequence[Column], widths: Sequence[int], *, header: bool = True) -> "Table":
    """An empty table with columns of these widths; one more column gets the remaining width."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim", show_header=header)
    for column, width in zip_longest(columns, widths):
        table.add_column(column.title, justify="right" if column.right else "left", width=width, overflow="fold")
    return table


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _widths(section: Section, *, bars: bool) -> list[int]:
    """The width of each column that needs no folding."""
    table = [[column.title for column in section.columns]]
    table += [[_text(cell, bars=bars).plain for cell in row] for row in section.rows]
    return [max(map(len, column)) for column in zip(*table, strict=True)]


def _folded(section: Section, widths: list[int], width: int) -> list[int]:
    """Widths for a narrower terminal: the widest column of texts is folded, preferably one whose cells have spaces."""
    excess = _total(widths) - width
    if excess <= 0:
        return widths
    texts = [number for number in range(len(widths)) if not section.columns[number].right]
    words = [number for number in texts if any(" " in row[number].text for row in section.rows)]
    widest = max(words or texts, key=lambda number: widths[number])
    return [max(8, each - excess) if number == widest else each for number, each in enumerate(widths)]


def _text(cell: Cell, *, bars: bool) -> "Text":
    from rich.text import Text

    text = Text(wording.escape_terminal(cell.text), style=_STYLES[cell.style])
    if cell.share is None or not bars:
        return text
    filled = round(min(1.0, cell.share) * _BAR_WIDTH)
    bar = Text(_FULL * filled + _EMPTY * (_BAR_WIDTH - filled) + " ", style=_bar_style(cell.share))
    return bar.append_text(text)


def _bar_style(share: float) -> str:
    """Bars show the available share. The verdict of the thresholds is in the state column."""
    return "red" if share < 0.05 else "yellow" if share < 0.15 else "green"

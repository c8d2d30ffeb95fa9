"""The report on a terminal: colours, bars, tables that fit the width. The only module that imports rich, and late."""

from collections.abc import Iterable

from nodeagent.lean import TYPE_CHECKING, Final
from nodeagent.report import layout
from nodeagent.report.layout import Cell, Section

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

_STYLES: Final = {
    layout.GOOD: "green",
    layout.WARN: "yellow",
    layout.BAD: "bold red",
    layout.DIM: "dim",
    layout.STRONG: "bold",
    "": "",
}

_BAR_WIDTH: Final = 8
_NARROW: Final = 110
"""Below this many columns there are no bars, and every cell may wrap: a table of eight columns needs the room."""

_FULL, _EMPTY = "\u2588", "\u2591"


def console(*, force: bool) -> "Console":
    """A console on standard output. `force`: colours although it is no terminal, or although NO_COLOR is set."""
    from rich.console import Console

    if force:
        return Console(force_terminal=True, no_color=False, highlight=False, color_system="standard")
    return Console(highlight=False)


def draw(target: "Console", sections: Iterable[Section]) -> None:
    """Print all sections on `target`, with a blank line between them."""
    for number, section in enumerate(sections):
        if number:
            target.print()
        for part in _parts(section, wide=target.width >= _NARROW):
            target.print(part)


def _parts(section: Section, *, wide: bool) -> Iterable["RenderableType"]:
    from rich.text import Text

    if section.title:
        yield Text(section.title, style="bold cyan")
    if section.rows:
        yield _table(section, wide=wide)
    for line in section.lines:
        yield Text(line.text, style=_STYLES[line.style])


def _table(section: Section, *, wide: bool) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    last = len(section.columns) - 1
    for number, column in enumerate(section.columns):
        free = number == last and not column.right
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=not free and wide,
            overflow="fold",
            ratio=1 if free and wide else None,
        )
    for row in section.rows:
        table.add_row(*(_text(cell, wide=wide) for cell in row))
    return table


def _text(cell: Cell, *, wide: bool) -> "Text":
    from rich.text import Text

    text = Text(cell.text, style=_STYLES[cell.style])
    if cell.share is None or not wide:
        return text
    filled = round(min(1.0, cell.share) * _BAR_WIDTH)
    bar = Text(_FULL * filled + _EMPTY * (_BAR_WIDTH - filled) + " ", style=_bar_style(cell.share))
    return bar.append_text(text)


def _bar_style(share: float) -> str:
    """Bars show what is left: short is dangerous. The threshold's own verdict stands in the state column."""
    return "red" if share < 0.05 else "yellow" if share < 0.15 else "green"

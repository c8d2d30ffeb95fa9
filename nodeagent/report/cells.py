"""Sections of text as tables of cells, independent of colours, widths and terminals.

`text.py` aligns them for a pipe, `terminal.py` draws them in colour, `html_page.py` makes pages of them.
"""

from typing import Final, NamedTuple

GOOD: Final = "good"
WARN: Final = "warn"
BAD: Final = "bad"
DIM: Final = "dim"
STRONG: Final = "strong"


class Cell(NamedTuple):
    """One text with its style."""

    text: str
    style: str = ""
    share: float | None = None
    """For a cell that a terminal may draw as a bar: 0 (empty) to 1 (full)."""


class Column(NamedTuple):
    title: str
    right: bool = False
    """Numbers are aligned to the right."""


class Section(NamedTuple):
    """A table, or only lines if it has no columns."""

    title: str
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()
    lines: tuple[Cell, ...] = ()
    """Printed below the rows."""

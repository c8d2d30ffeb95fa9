"""Markdown of texts from outside this program: names and messages of tenants, which may contain any character.

1. A text stays text: nothing in it becomes markup, a link, a mention, an HTML element or a new line.
2. Only this module makes Markdown from foreign texts.

CommonMark lets a backslash escape ASCII punctuation. GitHub and GitLab also turn `@name`, `#1`, `www.` and `https://`
into links after that, so a character without width breaks those.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from nodeagent.report import wording

_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]<>|~$&])")
_LINKS: Final = re.compile(r"(@|#|!|:(?=//)|\bwww(?=\.)|\bmailto(?=:))", re.IGNORECASE)
_BREAK: Final = "&#8203;"
"""A space without width."""
_LEADING: Final = re.compile(r"^(\s*)([-+=]+(?=\s|$)|\d+(?=[.)](?:\s|$)))")
_FENCE: Final = re.compile(r"`{3,}")


def text(words: str) -> str:
    """`words` as text within a line or a cell of a table."""
    escaped = _SPECIAL.sub(r"\\\1", wording.escape_terminal(words))
    escaped = _LINKS.sub(rf"\1{_BREAK}", escaped)
    return _LEADING.sub(rf"\1{_BREAK}\2", escaped)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> list[str]:
    """A table of texts that are escaped here. `right`: the columns of numbers."""
    numbers = frozenset(right)
    lines = [_row(columns), "| " + " | ".join("---:" if n in numbers else "---" for n in range(len(columns))) + " |"]
    return [*lines, *map(_row, rows), ""]


def code(words: str, language: str = "") -> list[str]:
    """A block of code. Its fence is longer than any in it."""
    longest = max((len(found) for found in _FENCE.findall(words)), default=2)
    fence = "`" * (longest + 1)
    lines = [wording.escape_terminal(line) for line in words.splitlines()]
    return [f"{fence}{language}", *lines, fence, ""]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(text(cell) for cell in cells) + " |"

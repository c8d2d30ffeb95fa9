"""The report for a pipe, a file or a pager: aligned lines, nothing truncated, no escape sequences."""

from collections.abc import Iterable

from nodeagent.report import wording
from nodeagent.report.cells import Section

_GAP = "  "


def render(sections: Iterable[Section]) -> str:
    """All sections with a blank line between them and a newline at the end."""
    return "\n\n".join("\n".join(_lines(section)) for section in sections) + "\n"


def _lines(section: Section) -> Iterable[str]:
    if section.title:
        yield wording.escape_terminal(section.title)
    if section.rows:
        table = [[column.title for column in section.columns]]
        table.extend([wording.escape_terminal(cell.text) for cell in row] for row in section.rows)
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        aligned = [
            (str.rjust if column.right else str.ljust, width)
            for column, width in zip(section.columns, widths, strict=True)
        ]
        for row in table:
            padded = [align(text, width) for text, (align, width) in zip(row, aligned, strict=True)]
            yield _GAP.join(padded).rstrip()
    for cell in section.lines:
        yield wording.escape_terminal(cell.text)

"""One self-contained HTML page of a report: to attach to a ticket, to print, to read on a phone.

1. No script, no network: the Content-Security-Policy of the page allows its own style sheet and nothing else, so that
   also a name that slipped through unescaped could not run or fetch anything.
2. Every text from outside this program passes `text`: markup is escaped, control characters and bidirectional overrides
   are spelled out, right-to-left names are isolated, endless ones cut.
3. The page works with the keyboard, a screen reader, without colours, in the dark, on 320 pixels and on paper.

`Html` is markup that is already safe. Only functions of this module and of `charts` make it, from plain strings.
"""

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from typing import Final, NewType

from nodeagent.report import page_style, wording
from nodeagent.report.cells import BAD, DIM, GOOD, STRONG, WARN, Cell, Column, Section

Html = NewType("Html", str)
"""Markup without foreign parts."""

MAX_TEXT: Final = 2000
"""Letters of one text. A condition's message is at most 1024, a name 253."""
ROWS_SHOWN: Final = 25
"""Rows of a table before the rest is folded."""
_LONG_WORD: Final = 28
"""Letters; `allocatableMemory.available` has 27."""
_LONG_TITLE: Final = 14
_STYLES: Final = frozenset({GOOD, WARN, BAD, DIM, STRONG})

_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(page_style.CSS.encode()).digest()).decode()
POLICY: Final = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; img-src data:; base-uri 'none'; form-action 'none'"
)
"""The Content-Security-Policy of every page. A server adds `frame-ancestors`, which works in a header only."""


def page(title: str, blocks: Iterable[Html], *, refresh_s: int | None = None) -> str:
    """A whole document with `title` as its heading. `refresh_s`: the browser loads it again after this time."""
    refresh = "" if refresh_s is None else f'<meta http-equiv="refresh" content="{refresh_s:d}">\n'
    name = text(title)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
{refresh}<link rel="icon" href="data:,">
<title>{name}</title>
<style>{page_style.CSS}</style>
</head>
<body>
<a class="skip" href="#report">Skip to the report</a>
<header><h1>{name}</h1></header>
<main id="report" tabindex="-1">
{chr(10).join(blocks)}
</main>
</body>
</html>
"""


def text(words: str, *, limit: int = MAX_TEXT) -> Html:
    """`words` as harmless markup, in its middle cut to `limit` letters."""
    if len(words) > limit:
        words = f"{words[: limit * 2 // 3]} \u2026 {words[-(limit // 3) :]} ({len(words)} characters)"
    return Html(html.escape(wording.escape_terminal(words), quote=True))


def paragraph(words: str, style: str = "") -> Html:
    """`words` as a paragraph. `style` is one of `sections` (GOOD, WARN, BAD, DIM, STRONG)."""
    return Html(f"<p{class_of(style)}>{text(words)}</p>")


def verdict(words: str, style: str = "") -> Html:
    """The most important sentence of the page, in a box in the colour of `style`."""
    return Html(f'<p class="verdict {_known(style)}">{text(words)}</p>')


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """Names and values as a list of definitions."""
    rows = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in pairs)
    return Html(f'<dl class="facts">{rows}</dl>')


def link(words: str, target: str) -> Html:
    """A paragraph with a link to `target`, a constant of the program."""
    return Html(f'<p><a href="{text(target)}">{text(words)}</a></p>')


def group(title: str, *blocks: Html) -> Html:
    """Blocks below a heading; nothing without blocks."""
    return Html(f"<section><h2>{text(title)}</h2>{''.join(blocks)}</section>") if blocks else Html("")


def details(title: str, *blocks: Html, opened: bool = False) -> Html:
    """Blocks that the reader opens."""
    state = " open" if opened else ""
    return Html(f"<details{state}><summary>{text(title)}</summary>{''.join(blocks)}</details>")


def preformatted(words: str) -> Html:
    """A configuration or a log, line by line."""
    lines = [text(line) for line in words.splitlines()]
    return Html(f'<pre tabindex="0">{chr(10).join(lines)}</pre>')


def section(content: Section, *, level: int = 2) -> Html:
    """A section of the text report: its title, its table and the lines below."""
    title = f"<h{level}>{text(content.title)}</h{level}>" if content.title else ""
    rows = table(content.columns, content.rows, name=content.title) if content.rows else ""
    lines = "".join(paragraph(line.text, line.style) for line in content.lines)
    return Html(f"<section>{title}{rows}{lines}</section>")


def sections(contents: Iterable[Section]) -> tuple[Html, ...]:
    """`section` of each."""
    return tuple(section(each) for each in contents)


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], *, name: str = "") -> Html:
    """A table that turns into cards on a phone; rows after the first `ROWS_SHOWN` are folded."""
    shown = _table(columns, rows[:ROWS_SHOWN], name)
    if more := rows[ROWS_SHOWN:]:
        return Html(shown + details(f"{len(more)} more rows", _table(columns, more, f"{name}, further rows")))
    return shown


def _table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], name: str) -> Html:
    label = f' aria-label="{text(name, limit=200)}"' if name else ""
    head = "".join(
        f'<th scope="col"{class_of("", right=column.right)}><span{_long(column.title, _LONG_TITLE)}>'
        f"{text(column.title)}</span></th>"
        for column in columns
    )
    body = "".join(
        f"<tr>{''.join(_cell(column, cell) for column, cell in zip(columns, row, strict=True))}</tr>" for row in rows
    )
    rows_of_table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return Html(f'<div class="scroll"><table{label}>{rows_of_table}</table></div>')


def _cell(column: Column, cell: Cell) -> str:
    bar = "" if cell.share is None else share_bar(cell.share)
    title = f' data-title="{text(column.title)}"' if column.title else ""
    long = _long(cell.text, _LONG_WORD)
    if not cell.text and not bar:
        return "<td></td>"
    return f"<td{class_of(cell.style, right=column.right)}{title}>{bar}<bdi{long}>{text(cell.text)}</bdi></td>"


def _long(words: str, limit: int) -> str:
    """A class for a word that no column can hold. Others are not broken: `unknown` must not become `unknow n`."""
    return ' class="long"' if any(len(word) > limit for word in words.split()) else ""


def share_bar(share: float) -> Html:
    """A small bar, filled to `share` (0 to 1). It repeats a number, so that a screen reader passes over it."""
    filled = 100 * min(1.0, max(0.0, share))
    colour = "bad" if share < 0.05 else "warn" if share < 0.15 else "good"
    return Html(
        f'<svg class="bar" aria-hidden="true"><rect class="{colour}" width="{filled:.1f}%" height="100%"/></svg>'
    )


def _known(style: str) -> str:
    return style if style in _STYLES else ""


def class_of(style: str, *, right: bool = False) -> str:
    """The class attribute of a style, with a blank before it; empty for none."""
    names = " ".join(filter(None, (_known(style), "num" if right else "")))
    return f' class="{names}"' if names else ""

"""Foreign texts in Markdown stay texts."""

import html
import re

import markdown_it
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.report import markdown, wording

PARSER = markdown_it.MarkdownIt("commonmark").enable(["table", "strikethrough"])
HOSTILE = [
    "**bold** _x_ `code` ~~gone~~",
    "<script>alert(1)</script>",
    "[click](javascript:alert(1))",
    "![x](http://evil.example/x.png)",
    "a | b || c",
    "&lt;b&gt; &#60;",
    "# heading",
    "- item",
    "1. item",
    "1) item",
    "> quote",
    "---",
    "===",
    "\\",
    "``` fence",
    "line\nbreak\r\n\n# two",
    "\x1b[31m\u202e",
    "<!-- comment",
    "[x]: http://evil.example",
]


def shown(document: str) -> str:
    """The text that a reader sees."""
    rendered = re.sub(r"<[^>]*>", "", PARSER.render(document))
    return html.unescape(rendered).replace("\u200b", "").strip()


@pytest.mark.parametrize("words", HOSTILE)
@pytest.mark.parametrize("frame", ["{}", "* {}", "# {}", "before {} after"])
def test_a_hostile_text_is_shown_as_it_is(words: str, frame: str) -> None:
    document = frame.format(markdown.text(words))
    plain = PARSER.render(frame.format("x"))
    assert re.findall(r"<(\w+)", PARSER.render(document)) == re.findall(r"<(\w+)", plain)
    expected = " ".join(wording.escape_terminal(words).split())
    assert expected in " ".join(shown(document).split())


@given(st.text(max_size=60))
def test_any_text_is_one_cell_of_a_table(words: str) -> None:
    document = "\n".join(markdown.table(("A", "B"), [(words, "end")]))
    rendered = PARSER.render(document)
    assert re.findall(r"<(\w+)", rendered) == ["table", "thead", "tr", "th", "th", "tbody", "tr", "td", "td"]
    cell = html.unescape(re.findall(r"<td>(.*?)</td>", rendered, re.DOTALL)[0]).replace("\u200b", "")
    assert " ".join(cell.split()) == " ".join(wording.escape_terminal(words).replace("\u200b", "").split())


@given(st.text(alphabet="`~ab\n", max_size=60))
def test_no_text_leaves_its_block_of_code(words: str) -> None:
    document = "\n".join([*markdown.code(words), "after"])
    assert re.findall(r"<(\w+)", PARSER.render(document)) == ["pre", "code", "p"]


@pytest.mark.parametrize(
    "words", ["@everyone", "#17", "see www.evil.example", "http://evil.example", "mailto:a@b.example"]
)
def test_a_ticket_system_finds_no_mention_and_no_link(words: str) -> None:
    written = markdown.text(words)
    assert "&#8203;" in written
    assert not re.search(r"@\w|#\d|www\.|://|mailto:", written.replace("&#8203;", "\u200b"))

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.report import html_page, page_style
from nodeagent.report.cells import Cell, Column, Section
from nodeagent.report.sections import sections
from tests.support import reports

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style><script>alert(1)</script>",
    "&lt;b&gt;",
    "\u202egnp.exe",
    "\x1b[31mred\x07",
    "\ud800",
)


class Elements(HTMLParser):
    """The elements and attributes of a page, as a browser's parser sees them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.extend(attrs)

    def handle_data(self, data: str) -> None:
        self.words += data


def page_with(name: str) -> str:
    cells = Section(
        name, (Column(name), Column("N", right=True)), ((Cell(name, name), Cell(name, share=0.5)),), (Cell(name),)
    )
    return html_page.page(
        name,
        [
            html_page.verdict(name, name),
            html_page.facts([(name, name)]),
            html_page.section(cells),
            html_page.details(name, html_page.preformatted(name)),
            html_page.group(name, html_page.paragraph(name, name)),
        ],
    )


HARMLESS = Elements(page_with("plain"))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_adds_no_element_and_no_attribute(name: str) -> None:
    found = Elements(page_with(name))
    assert found.tags == HARMLESS.tags
    assert {key for key, _ in found.attributes} == {key for key, _ in HARMLESS.attributes}


@given(st.text(max_size=60))
def test_no_text_at_all_adds_an_element(name: str) -> None:
    # An empty name has fewer attributes, not more, and each further line of a <pre> is text.
    assert set(Elements(page_with(name)).tags) <= set(HARMLESS.tags)


def test_control_characters_and_bidirectional_overrides_are_spelled_out() -> None:
    page = page_with("\u202egnp.exe\x1b[31m")
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert "\\u202egnp.exe\\x1b[31m" in page


def test_a_page_can_be_written_as_utf_8_whatever_the_names_are() -> None:
    page_with("\ud800\udcff").encode("utf-8")


def test_an_endless_name_is_cut_and_its_length_is_told() -> None:
    page = html_page.page("title", [html_page.paragraph("x" * 10_000)])
    assert "x" * 2000 not in page
    assert "(10000 characters)" in page


def test_the_policy_allows_the_style_sheet_of_the_page_and_nothing_else() -> None:
    page = html_page.page("title", [])
    style = re.findall("<style>(.*?)</style>", page, re.DOTALL)
    assert style == [page_style.CSS]
    digest = base64.b64encode(hashlib.sha256(style[0].encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'sha256-{digest}'" in page
    assert "unsafe" not in page


def test_a_page_has_no_script_and_loads_nothing() -> None:
    found = Elements(html_page.page("title", html_page.sections(sections(reports.report()))))
    assert "script" not in found.tags
    assert {value for key, value in found.attributes if key in ("src", "href")} == {"data:,", "#report"}
    assert not [key for key, _ in found.attributes if key.startswith("on") or key == "style"]


def test_a_report_keeps_every_cell_of_its_tables() -> None:
    content = sections(reports.report())
    words = Elements(html_page.page("title", html_page.sections(content))).words
    for section in content:
        for row in section.rows:
            for cell in row:
                assert cell.text in words


def test_many_rows_are_folded_and_none_is_lost() -> None:
    rows = [(Cell(f"pod-{number}"),) for number in range(110)]
    table = html_page.table([Column("POD")], rows)
    assert "<summary>85 more rows</summary>" in table
    assert table.count("<td") == 110


def test_an_unknown_style_is_no_class() -> None:
    assert html_page.paragraph("words", 'x" onclick="y') == "<p>words</p>"


def test_a_page_is_loaded_again_only_if_that_is_asked_for() -> None:
    assert "refresh" not in html_page.page("title", [])
    assert '<meta http-equiv="refresh" content="10">' in html_page.page("title", [], refresh_s=10)

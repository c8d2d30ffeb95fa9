"""Measured figures stand on docs/performance.md and docs/scale.md; another page quotes them only as they are there."""

import re
from pathlib import Path

import pytest

from tests.support.pages import PAGES, prose
from tests.support.paths import REPOSITORY

FIGURES = [REPOSITORY / "docs" / "performance.md", REPOSITORY / "docs" / "scale.md"]
OTHER = [page for page in PAGES if page not in FIGURES and page.name != "KUBELET-CONTRACT.md"]
MEASURED = re.compile(
    r"(?<!at most )(?<!up to )(?<!up to every )(?<!more than )"  # a bound of the code, not a measurement
    r"(?<![\d.,])(?:\d[\d.,]*(?:% of a core| (?:ms|us)\b| MiB a day| MiB/s| requests a second| wake-ups)"
    r"|\d+ of \d+ (?:runs|ramps|streams|nodes))"
)


def quoted(text: str) -> set[str]:
    """The figures in a text that only a measurement can give."""
    return set(MEASURED.findall(" ".join(text.split())))


@pytest.fixture(scope="module")
def measured() -> str:
    return " ".join(" ".join(page.read_text("utf-8") for page in FIGURES).split())


@pytest.mark.parametrize("page", OTHER, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_a_page_quotes_only_figures_of_the_last_run(page: Path, measured: str) -> None:
    text = prose(page)
    assert {figure for figure in quoted(text) if figure not in measured} == set()


def test_a_figure_without_a_run_is_found(measured: str) -> None:
    text = "It lost 3 of 977 ramps, takes\n0.977% of a core and up to 5 ms, and answers after 977 ms."
    assert {figure for figure in quoted(text) if figure not in measured} == {
        "3 of 977 ramps",
        "0.977% of a core",
        "977 ms",
    }

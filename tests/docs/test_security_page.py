"""The page about security: each line about a stolen token names tests that exist."""

import re
from typing import Final

from tests.support.paths import REPOSITORY

PAGE: Final = (REPOSITORY / "docs" / "security.md").read_text("utf-8")
HOME: Final = "tests/deploy/test_admission.py"


def shown_by() -> dict[str, str]:
    """The last cell of each line of the table, by the first."""
    section = PAGE.partition("### What a stolen token can do")[2].partition("\n### ")[0]
    cells = [line.strip("| ").split("|") for line in section.splitlines() if line.startswith("| ")]
    return {line[0].strip(): line[-1] for line in cells[2:]}


def test_each_line_about_a_stolen_token_names_a_test() -> None:
    assert len(shown_by()) > 10
    assert [action for action, tests in shown_by().items() if "test_" not in tests] == []


def test_each_test_that_is_named_exists() -> None:
    named = [(path or HOME, name) for path, name in re.findall(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`", PAGE)]
    assert len(named) > 15
    missing = [
        (path, name)
        for path, name in named
        if not re.search(rf"^def {name}\(", (REPOSITORY / path).read_text("utf-8"), re.MULTILINE)
    ]
    assert missing == []

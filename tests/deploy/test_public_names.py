"""A public name of a release is not removed without its row in docs/support.md."""

import re
from pathlib import Path

import pytest

import nodeagent
from tests.support import public_names
from tests.support.paths import REPOSITORY

RELEASES = sorted((REPOSITORY / "tests" / "data" / "public-names").glob("*.txt"))
ROW = re.compile(r"^\| `(?P<name>[^`]+)` \| (?P<deprecated>\d+\.\d+) \| (?P<removed>\d+\.\d+) \| .+ \|$", re.MULTILINE)


def missing_names(released: list[str], current: list[str], support_page: str) -> list[str]:
    """Names that are gone without a row, or whose row removes them in the minor version that deprecated them."""
    removed = {
        row["name"] for row in ROW.finditer(support_page) if _number(row["removed"]) > _number(row["deprecated"])
    }
    return [name for name in released if name not in set(current) and name not in removed]


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.stem)
def test_no_public_name_of_a_release_is_gone_without_notice(release: Path) -> None:
    page = (REPOSITORY / "docs" / "support.md").read_text("utf-8")
    assert missing_names(release.read_text("utf-8").splitlines(), public_names.names(), page) == []


def test_the_names_of_this_version_are_stored() -> None:
    """A new name joins them: `python -m tests.support.public_names > tests/data/public-names/VERSION.txt`."""
    stored = REPOSITORY / "tests" / "data" / "public-names" / f"{nodeagent.__version__}.txt"
    assert stored.read_text("utf-8").splitlines() == public_names.names()


def test_a_removed_name_needs_a_row_with_a_minor_version_between() -> None:
    released = ["key a", "key b", "key c"]
    page = "| `key b` | 0.2 | 0.3 | `key d` |\n| `key c` | 0.3 | 0.3 | `key e` |\n"
    assert missing_names(released, ["key a"], page) == ["key c"]
    assert missing_names(released, ["key a"], "") == ["key b", "key c"]

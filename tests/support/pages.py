"""The pages of the documentation."""

import re
from pathlib import Path
from typing import Final

from tests.support.paths import REPOSITORY

PAGES: Final = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])
_FENCE: Final = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """The page without its code: brackets there are no links, and hashes no headings."""
    return _FENCE.sub("", page.read_text("utf-8"))

"""Prints the shell commands of the fenced block that follows `<!-- test-command -->` in a Markdown file."""

import re
import sys
from pathlib import Path

BLOCK = re.compile(r"^<!-- test-command -->\s*\n```[^\n]*\n(?P<commands>.*?)^```\s*$", re.MULTILINE | re.DOTALL)


def commands(markdown: str) -> str:
    """The block's text. ValueError unless there is exactly one such block and it is not empty."""
    found = [match["commands"].strip() for match in BLOCK.finditer(markdown)]
    if len(found) != 1 or not found[0]:
        msg = f"expected one non-empty fenced block after <!-- test-command -->, found {len(found)}"
        raise ValueError(msg)
    return found[0]


if __name__ == "__main__":
    try:
        print(commands(Path(sys.argv[1]).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        sys.exit(f"{sys.argv[1]}: {error}")

"""One line on a terminal that says how far a long look is: written over as it goes on, and gone before the report.

Nothing is written where nobody watches: standard error is no terminal, or a dumb one.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Final, TextIO

from nodeagent.report.wording import escape_terminal

EVERY_S: Final = 0.2


class ProgressLine:
    """The line. Not for two threads."""

    def __init__(self, stream: TextIO | None = None, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`stream` is standard error where none is named."""
        self._stream = stream = sys.stderr if stream is None else stream
        self._monotonic = monotonic
        self._watched = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._written_at = float("-inf")

    def show(self, text: str) -> None:
        """Write the line anew, unless that was done just now. What does not fit the terminal is cut."""
        now = self._monotonic()
        if not self._watched or now - self._written_at < EVERY_S:
            return
        self._written_at = now
        width = os.get_terminal_size(self._stream.fileno()).columns or 80
        self._stream.write(f"\r{escape_terminal(text)[: width - 1]}\x1b[K")
        self._stream.flush()

    def clear(self) -> None:
        """Take the line away."""
        if self._written_at != float("-inf"):
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._written_at = float("-inf")

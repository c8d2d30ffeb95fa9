"""One line on a terminal with the progress of a long measurement, overwritten in place and erased before the report.

Nothing is written if standard error is not a terminal, or a dumb one.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Final, TextIO

from nodeagent.report import wording

UPDATE_EVERY_S: Final = 0.2


class ProgressLine:
    """The line. Not thread-safe."""

    def __init__(self, stream: TextIO | None = None, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`stream` defaults to standard error."""
        self._stream = stream = sys.stderr if stream is None else stream
        self._monotonic = monotonic
        self._active = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._written_at = float("-inf")

    def show(self, text: str) -> None:
        """Overwrite the line, at most every `UPDATE_EVERY_S`. Text beyond the width of the terminal is cut."""
        now = self._monotonic()
        if not self._active or now - self._written_at < UPDATE_EVERY_S:
            return
        self._written_at = now
        width = os.get_terminal_size(self._stream.fileno()).columns or 80
        self._stream.write(f"\r{wording.escape_terminal(text)[: width - 1]}\x1b[K")
        self._stream.flush()

    def clear(self) -> None:
        """Erase the line."""
        if self._written_at != float("-inf"):
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._written_at = float("-inf")

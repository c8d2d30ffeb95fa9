"""The progress line of a long measurement."""

import io
import os
from collections.abc import Iterator

import pytest

from nodeagent.report.progress import UPDATE_EVERY_S, ProgressLine


class Terminal:
    """A real one; `read` gives what was written to it."""

    def __init__(self) -> None:
        self._ours, theirs = os.openpty()
        self.stream = open(theirs, "w", encoding="utf-8")  # noqa: SIM115 - closed by `close`

    def read(self) -> str:
        self.stream.write("END")
        self.stream.flush()
        written = ""
        while not written.endswith("END"):
            written += os.read(self._ours, 4096).decode()
        return written.removesuffix("END")

    def close(self) -> None:
        self.stream.close()
        os.close(self._ours)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    made = Terminal()
    yield made
    made.close()


def test_the_line_is_written_over_now_and_then_and_taken_away(terminal: Terminal) -> None:
    now = 100.0
    line = ProgressLine(terminal.stream, monotonic=lambda: now)
    line.show("one")
    line.show("too soon")
    now += UPDATE_EVERY_S
    line.show("two")
    line.clear()
    assert terminal.read() == "\rone\x1b[K\rtwo\x1b[K\r\x1b[K"


def test_a_name_cannot_give_the_terminal_orders(terminal: Terminal) -> None:
    ProgressLine(terminal.stream).show("/pod\x1b[2J\n")
    assert "\x1b[2J" not in terminal.read()


def test_where_nothing_was_shown_nothing_is_taken_away(terminal: Terminal) -> None:
    ProgressLine(terminal.stream).clear()
    assert terminal.read() == ""


def test_a_file_or_a_dumb_terminal_gets_no_progress_line(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setenv("TERM", "dumb")
    for stream in (file, terminal.stream):
        line = ProgressLine(stream)
        line.show("one")
        line.clear()
    assert file.getvalue() == ""
    assert terminal.read() == ""

"""The live view of `check --watch`, on a real terminal."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from typing import Final

import pytest
from rich.console import Console

from nodeagent.commands import exit_codes
from nodeagent.model import SignalState
from nodeagent.report.live_view import LiveView
from tests.support import reports
from tests.support.paths import REPOSITORY

FULL: Final = REPOSITORY / "tests" / "data" / "nodes" / "cgroupv2-memory-pressure"
ALTERNATE, NORMAL = "\x1b[?1049h", "\x1b[?1049l"
HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"
DEADLINE_S: Final = 30.0


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, *arguments: str, size: tuple[int, int] = (24, 110), **changes: str) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(*size)
        self.before = termios.tcgetattr(self.slave)
        dropped = ("NO_COLOR", "COLUMNS", "LINES", "KUBECONFIG", "KUBERNETES_SERVICE_HOST")
        variables = {name: value for name, value in os.environ.items() if name not in dropped}
        variables |= {"PYTHONPATH": str(REPOSITORY), "TERM": "xterm-256color", "PYTHONUTF8": "1", **changes}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "nodeagent", "check", "--no-api", *arguments],
            env=variables,
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - it starts no thread
        )
        self.output = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, done: Callable[[str], bool]) -> str:
        """The output since the last call, when it is as wanted."""
        began, found = time.monotonic(), ""
        while not done(found):
            assert time.monotonic() - began < DEADLINE_S, found
            found += self._read(0.2)
        self.output += found
        return found

    def _read(self, timeout_s: float) -> str:
        if not select.select([self.master], [], [], timeout_s)[0]:
            return ""
        try:
            return os.read(self.master, 65536).decode("utf-8", "replace")
        except OSError:  # the program has closed it
            return ""

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def end(self) -> int:
        """Wait for the program and return its exit code."""
        began = time.monotonic()
        while self.process.poll() is None:
            assert time.monotonic() - began < DEADLINE_S
            self.output += self._read(0.1)
        self.output += self._read(0.1)
        return self.process.returncode

    def restored(self) -> bool:
        """True if the terminal is as it was."""
        return (
            self.output.count(ALTERNATE) == self.output.count(NORMAL) == 1
            and self.output.rindex(SHOWN) > self.output.rindex(HIDDEN)
            and termios.tcgetattr(self.slave) == self.before
        )


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    with contextlib.ExitStack() as cleanup:

        def start(*arguments: str, **more: object) -> Terminal:
            made = Terminal("--host-root", str(FULL), *arguments, **more)  # type: ignore[arg-type]
            cleanup.callback(os.close, made.slave)
            cleanup.callback(os.close, made.master)
            cleanup.callback(made.process.wait)
            cleanup.callback(made.process.kill)
            return made

        yield start


def plain(output: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)


def footer(output: str) -> bool:
    return "q quits" in output


def test_the_view_shows_the_state_the_signals_and_the_first_pods(terminal: Callable[..., Terminal]) -> None:
    seen = terminal("--watch", "60")
    words = plain(seen.read_until(footer))
    assert "HARD lab-node: memory.available" in words
    assert re.search(r"memory\.available +\S*[│█▏▎▍▌▋▊▉░]+ +111Mi +hard 200Mi +hard", words)
    assert re.search(r"1 +default/hog-besteffort +█+ +1\.5", words)
    seen.press(b"q")
    assert seen.end() == exit_codes.exit_code_of(SignalState.HARD)
    assert seen.restored()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_terminal_is_as_before_after_a_signal(terminal: Callable[..., Terminal], number: signal.Signals) -> None:
    seen = terminal("--watch", "60")
    seen.read_until(footer)
    seen.process.send_signal(number)
    code = seen.end()
    assert code == (exit_codes.INTERRUPTED if number is signal.SIGINT else 128 + number)
    assert seen.restored()
    assert "Traceback" not in seen.output


def test_a_resize_draws_again_at_once_and_a_narrow_terminal_drops_columns(terminal: Callable[..., Terminal]) -> None:
    seen = terminal("--watch", "60")
    assert "LAST SAMPLES" in plain(seen.read_until(footer))
    seen.resize(12, 40)
    small = plain(seen.read_until(footer))
    assert "LAST SAMPLES" not in small
    assert re.search(r"memory\.avail\S* +111Mi +hard", small)
    assert max(len(line.rstrip("\r")) for line in small.split("\n")) <= 40
    seen.press(b"\x03")
    assert seen.end() == exit_codes.INTERRUPTED
    assert seen.restored()


def test_the_view_is_renewed_with_each_sample(terminal: Callable[..., Terminal]) -> None:
    seen = terminal("--watch", "0.2")
    seen.read_until(lambda output: "sample 3" in output)
    seen.press(b"q")
    seen.end()
    assert seen.restored()


def test_without_colours_the_view_has_none(terminal: Callable[..., Terminal]) -> None:
    seen = terminal("--watch", "60", NO_COLOR="1")
    output = seen.read_until(footer)
    assert not re.findall(r"\x1b\[[0-9;]*3[0-9]m", output)
    assert "█" in output
    seen.press(b"q")
    seen.end()


@pytest.mark.parametrize("changes", [{"TERM": "dumb"}, {"PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"}])
def test_a_terminal_that_cannot_draw_gets_one_report_after_the_other(
    terminal: Callable[..., Terminal], changes: dict[str, str]
) -> None:
    seen = terminal("--watch", "0.2", **changes)
    output = seen.read_until(lambda output: output.count("HARD lab-node") >= 2)
    assert ALTERNATE not in output
    assert "SIGNALS" in output
    seen.press(b"\x03")
    assert seen.end() == exit_codes.INTERRUPTED


def test_a_name_that_looks_like_markup_is_shown_as_it_is() -> None:

    view = LiveView(every_s=2.0)
    pod = reports.ranked(reports.pod_view("[red]x[/red]\x1b[2J", working_set=1 << 20), 1)
    view.add(reports.report(pods=(pod,)))
    console = Console(width=120, height=30, force_terminal=True)
    with console.capture() as captured:
        console.print(view.render(120, 30))
    assert "default/[red]x[/red]\\x1b[2J" in plain(captured.get())
    assert "\x1b[2J" not in captured.get()

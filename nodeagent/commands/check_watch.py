"""`nodeagent check --watch` on a terminal: a live view that is left with q or Ctrl-C.

1. The terminal is as before afterwards, whatever ends the command: q, Ctrl-C, SIGTERM, SIGHUP, an error.
2. A key, a resize and a signal are handled at once, not at the next sample.
3. On anything but a terminal nothing of this runs: a pipe gets one report after the other.

Theory of operation. The alternate screen keeps the scrollback. Keys are read without echo and line editing; Ctrl-C
stays a signal, Ctrl-Z is off, because a stopped view would leave its screen behind. A signal writes a byte to a pipe,
so that one `select` waits for keys, signals and the next sample.
"""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

from nodeagent.commands import exit_codes, standard_streams
from nodeagent.report import live_view, node_report
from nodeagent.report.live_view import LiveView, Screen
from nodeagent.report.node_report import Report

QUIT_KEYS: Final = b"qQ\x04\x1b"
"""q, Ctrl-D and Escape."""
_STOPPED_BY_SIGNAL: Final = 128


def run(make_report: Callable[[], Report], *, every_s: float) -> int:
    """Show a report every `every_s` seconds until the user leaves; returns the last exit code.

    Raises what `make_report` raises, KeyboardInterrupt after Ctrl-C and SystemExit after SIGTERM or SIGHUP.
    """
    view = LiveView(every_s=every_s)
    code = exit_codes.OK
    with signals() as woken, keys() as keyboard, live_view.screen() as screen:
        while True:
            due = time.monotonic() + every_s
            report = make_report()
            code = exit_codes.exit_code_of(node_report.state(report))
            view.add(report)
            _draw(screen, view)
            while (left := due - time.monotonic()) > 0:
                ready, _, _ = select.select(
                    [descriptor for descriptor in (woken, keyboard) if descriptor >= 0], [], [], left
                )
                if keyboard in ready:
                    pressed = os.read(keyboard, 64)
                    if not pressed or any(key in QUIT_KEYS for key in pressed[:1]):
                        return code
                if woken in ready:
                    os.read(woken, 64)
                    _draw(screen, view)


def _draw(screen: Screen, view: LiveView) -> None:
    """Raises OutputError if the terminal is gone."""
    try:
        screen.show(view)
    except OSError as error:
        standard_streams.output_failed(error)


@contextlib.contextmanager
def signals() -> Iterator[int]:
    """A descriptor that becomes readable after a resize. SIGTERM and SIGHUP end the command by SystemExit."""

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(_STOPPED_BY_SIGNAL + number)

    def resized(_number: int, _frame: FrameType | None) -> None:
        """The byte in the pipe is what counts."""

    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    handlers = {signal.SIGTERM: stop, signal.SIGHUP: stop, signal.SIGWINCH: resized}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    descriptor_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(descriptor_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


@contextlib.contextmanager
def keys() -> Iterator[int]:
    """The descriptor of the keyboard; -1 if standard input is no terminal."""
    if not sys.stdin.isatty():
        yield -1
        return
    import termios

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    changed = termios.tcgetattr(descriptor)
    changed[3] &= ~(termios.ICANON | termios.ECHO)
    changed[6][termios.VMIN], changed[6][termios.VTIME] = 1, 0
    changed[6][termios.VSUSP] = b"\0"
    termios.tcsetattr(descriptor, termios.TCSADRAIN, changed)
    try:
        yield descriptor
    finally:
        with contextlib.suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

"""Programs on a pseudo-terminal, and the screen that its user sees."""

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyte

_CHUNK = 65536


class Ended(NamedTuple):
    """A program that has ended on a terminal."""

    code: int
    screen: str
    """The lines of the last screen."""
    output: str
    """Everything that it wrote, with escape sequences."""
    took_s: float


def run(
    command: Sequence[str],
    *,
    columns: int = 80,
    rows: int = 24,
    environment: Mapping[str, str] | None = None,
    keys: str = "",
    keys_at: str = "",
    timeout_s: float = 60.0,
) -> Ended:
    """Run a program on a terminal of this size. `keys` are pressed as soon as it has written `keys_at`."""
    began = time.monotonic()
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.execve(command[0], list(command), {"TERM": "xterm-256color", **(environment or {})})
    written = b""
    try:
        while time.monotonic() < began + timeout_s:
            if not select.select([terminal], [], [], 1.0)[0]:
                continue
            try:
                data = os.read(terminal, _CHUNK)
            except OSError:  # EIO: nobody has the other end open
                break
            if not data:
                break
            written += data
            if keys and keys_at.encode() in written:
                os.write(terminal, keys.encode())
                keys = ""
    finally:
        os.close(terminal)
    _, status = os.waitpid(pid, 0)
    screen = pyte.Screen(max(1, columns), max(1, rows))
    pyte.ByteStream(screen).feed(written)
    output = written.decode("utf-8", "replace")
    return Ended(os.waitstatus_to_exitcode(status), "\n".join(screen.display), output, time.monotonic() - began)


def colours(output: str) -> set[str]:
    """The foreground colours that were set."""
    return {
        part for found in re.findall(r"\x1b\[([0-9;]*)m", output) for part in found.split(";") if part.startswith("3")
    }

"""The three standard streams of a command, each of which may be closed, full or without a reader.

A closed stream is replaced by /dev/null before anything else is opened. Otherwise a socket or file gets its number and
the report is written into it. Python also sets a closed stream to None, which ends the first `print`.
"""

import os
import sys


class OutputError(Exception):
    """Standard output cannot be written, for example to a full disk. The message is for the user."""


def open_missing() -> None:
    """Open /dev/null for every closed standard stream, and make each accept every character."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # open() returns the lowest free number, which is this one. Children inherit standard streams.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - open until the process ends
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - open until the process ends
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - open until the process ends
    # A report may contain names in any script, and the terminal may use ISO 8859-1.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def write_output(text: str) -> None:
    """Write to standard output and flush. Raises OutputError."""
    try:
        if text:
            sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        output_failed(error)


def output_failed(error: OSError) -> None:
    """Handle a failed write. A reader that has closed the pipe (`| head`) is no failure.

    Raises OutputError for any other error.
    """
    _discard(1)  # Python flushes the buffer at exit and would report the error again
    if not isinstance(error, BrokenPipeError):
        raise OutputError(f"standard output cannot be written: {error.strerror or error}") from error


def write_error(text: str) -> None:
    """Write to standard error; a failure is ignored, because there is no other stream to report it on."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        _discard(2)


def _discard(fd: int) -> None:
    try:
        null = os.open(os.devnull, os.O_WRONLY)
    except OSError:
        return
    os.dup2(null, fd)
    os.close(null)

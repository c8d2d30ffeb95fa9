"""The three standard streams of a command that may be started with any of them closed, full, or read by nobody.

A stream that is closed is /dev/null instead, before anything is opened: a socket or a file that got its number would
have the report written into it, and Python has None for it, which ends the first `print`.
"""

import os
import sys


class OutputError(Exception):
    """The disk is full, for example; the message is for the user."""


def open_missing() -> None:
    """Open /dev/null for every standard stream that is closed, and let none refuse a character."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest free number is given, which is this one. Children inherit standard streams.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as we run
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as we run
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as we run
    # A name in any script may stand in a report, and the terminal be one of ISO 8859-1.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def write_output(text: str) -> None:
    """On standard output, at once. Raises OutputError."""
    try:
        if text:
            sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        output_failed(error)


def output_failed(error: OSError) -> None:
    """What this error of writing means: nothing when the reader (`| head`) has what it wanted; the exit code says as
    much without it. Raises OutputError for any other."""
    _discard(1)  # Python writes what is buffered at its end, and would complain again
    if not isinstance(error, BrokenPipeError):
        raise OutputError(f"standard output cannot be written: {error.strerror or error}") from error


def write_error(text: str) -> None:
    """On standard error, if that can be written: where it cannot, nobody is there to be told."""
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

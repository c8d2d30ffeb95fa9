"""The faults: system calls that fail, kernel files with other contents, damaged stored files, answers of an API."""

import builtins
import errno
import io
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

ERRNOS: Final = ("ENOENT", "EIO", "EACCES", "ENODEV", "EMFILE", "ENOMEM", "EINTR")
CALLS: Final = (
    *("open", "read", "pread", "write", "lseek", "fsync", "ftruncate", "stat", "fstat", "lstat", "statvfs", "scandir"),
    *("listdir", "readlink", "rename", "replace", "unlink", "mkdir", "getxattr", "setxattr", "removexattr", "access"),
)
"""Functions of `os` that the loop calls. `close` does not fail in a way that a program could answer."""


class Call(NamedTuple):
    """One system call of a sync."""

    name: str
    number: int
    """Counted from 0, all functions together."""


@contextmanager
def counted() -> Iterator[list[Call]]:
    """The system calls of this thread, in their order."""
    calls: list[Call] = []

    def before(name: str) -> None:
        calls.append(Call(name, len(calls)))

    with _patched(before):
        yield calls


@contextmanager
def failing(number: int, code: str) -> Iterator[None]:
    """This one call of this thread fails."""
    seen = 0

    def before(name: str) -> None:
        nonlocal seen
        seen += 1
        if seen - 1 == number:
            value = getattr(errno, code)
            raise OSError(value, os.strerror(value), f"injected into {name}")

    with _patched(before):
        yield


@contextmanager
def _patched(before: Callable[[str], None]) -> Iterator[None]:
    thread = threading.get_ident()
    places: list[tuple[Any, str]] = [*((os, name) for name in CALLS), (io, "open"), (builtins, "open")]
    originals = [getattr(module, name) for module, name in places]

    def patch(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if threading.get_ident() == thread:
                before(name)
            return original(*arguments, **keywords)

        return call

    for (module, name), original in zip(places, originals, strict=True):
        setattr(module, name, patch(name, original))
    try:
        yield
    finally:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, original)


# --- kernel files ----------------------------------------------------------------------------------------------------

VALUES: Final = {
    "missing": b"",
    "negative": b"-1",
    "huge": b"18446744073709551615",
    "endless": b"9" * 5000,
    "NUL": b"\0",
    "no number": b"x",
}
"""What stands in place of a number."""
_NUMBER: Final = re.compile(rb"(?<![\w.])\d+(?:\.\d+)?")
FIELDS_AT_MOST: Final = 24
"""Of one file. A longer file has many fields of one kind."""


def variants(data: bytes) -> Iterator[tuple[str, bytes]]:
    """The file with each field replaced, each line missing, and cut or emptied as a whole, with the name of the
    fault."""
    yield "empty", b""
    yield "NUL", b"\0" * len(data)
    yield "garbage", bytes(range(256)) * 4
    for part in (1, 2, 3):
        yield "truncated", data[: len(data) * part // 4]
    yield "truncated", data[:-2]
    lines = data.split(b"\n")
    for number in _spread(range(len(lines) - 1), FIELDS_AT_MOST):
        yield "line missing", b"\n".join([*lines[:number], *lines[number + 1 :]])
        yield "line doubled", b"\n".join([*lines[: number + 1], *lines[number:]])
    for match in _spread(list(_NUMBER.finditer(data)), FIELDS_AT_MOST):
        for name, value in VALUES.items():
            yield name, data[: match.start()] + value + data[match.end() :]


def _spread(items: Sequence[Any], most: int) -> Sequence[Any]:
    return items if len(items) <= most else items[:: -(-len(items) // most)]


# --- stored files ----------------------------------------------------------------------------------------------------


def flips(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Each byte changed in one bit and in all, the file cut at each byte, and parts repeated."""
    for at in range(len(data)):
        yield "bit flipped", data[:at] + bytes([data[at] ^ (1 << (at % 8))]) + data[at + 1 :]
        yield "byte flipped", data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]
        yield "cut", data[:at]
    for at in range(0, len(data), 64):
        yield "block doubled", data[: at + 64] + data[at:]
        yield "block zeroed", data[:at] + b"\0" * len(data[at : at + 64]) + data[at + 64 :]
    yield "doubled", data + data

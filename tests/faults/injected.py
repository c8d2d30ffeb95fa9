"""The faults: system calls that fail, kernel files with other contents, damaged stored files, answers of an API."""

import builtins
import errno
import io
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
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


Around = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Stands in for a function: its name, the function, its arguments."""
_write, _readlink, _stat = os.write, os.readlink, os.stat


@contextmanager
def counted() -> Iterator[list[Call]]:
    """The system calls of this thread, in their order."""
    calls: list[Call] = []

    def count(name: str, original: Callable[..., Any], given: tuple[Any, ...], more: dict[str, Any]) -> Any:
        calls.append(Call(name, len(calls)))
        return original(*given, **more)

    with _patched(count):
        yield calls


@contextmanager
def failing(number: int, code: str) -> Iterator[None]:
    """This one call of this thread fails."""
    value = getattr(errno, code)

    def fail(name: str, *_: object) -> None:
        raise OSError(value, os.strerror(value), f"injected into {name}")

    with _at(number, fail):
        yield


@contextmanager
def killing(number: int, *, amid: bool = False) -> Iterator[None]:
    """SIGKILL ends this process as it enters this call of this thread. `amid`: if it is a write, after half of the
    data."""

    def kill(name: str, _: object, given: tuple[Any, ...], __: object) -> None:
        if amid and name == "write":
            descriptor, data = given
            _write(descriptor, bytes(data)[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    with _at(number, kill):
        yield


@contextmanager
def _at(number: int, instead: Around) -> Iterator[None]:
    seen = itertools.count()

    def call(name: str, original: Callable[..., Any], given: tuple[Any, ...], more: dict[str, Any]) -> Any:
        if next(seen) == number:
            return instead(name, original, given, more)
        return original(*given, **more)

    with _patched(call):
        yield


@contextmanager
def full(directory: Path, *, first: int = 0, only: bool = False) -> Iterator[list[str]]:
    """The file system of the directory is full for all threads: whatever needs space there fails with ENOSPC, from the
    call with the number `first` on, or `only` that one. Yields the names of all such calls."""
    calls: list[str] = []
    lock = threading.Lock()

    def refused(name: str) -> bool:
        with lock:
            number = len(calls)
            calls.append(name)
        return number == first if only else number >= first

    def call(name: str, original: Callable[..., Any], given: tuple[Any, ...], more: dict[str, Any]) -> Any:
        if _needs_space(name, given, more, str(directory)) and refused(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"injected into {name}")
        return original(*given, **more)

    class File(io.FileIO):
        def write(self, data: Any) -> int:
            if refused("write"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    def fdopen(fd: int, mode: str = "r", *given: Any, **more: Any) -> Any:
        if _below(fd, str(directory)) and mode in ("ab", "wb"):
            return io.BufferedWriter(File(fd, mode))
        return original_fdopen(fd, mode, *given, **more)

    original_fdopen = os.fdopen
    os.fdopen = fdopen
    try:
        with _patched(call, all_threads=True):
            yield calls
    finally:
        os.fdopen = original_fdopen


@contextmanager
def wall_clock(offset_s: Callable[[], float]) -> Iterator[None]:
    """The wall clock of this process is off by so much."""
    original = time.time
    time.time = lambda: original() + offset_s()
    try:
        yield
    finally:
        time.time = original


def _needs_space(name: str, given: tuple[Any, ...], more: dict[str, Any], directory: str) -> bool:
    if name in ("write", "fsync"):
        return _below(given[0], directory)
    if name == "open":
        flags = given[1] if len(given) > 1 else 0
        return isinstance(flags, int) and bool(flags & os.O_CREAT) and _is_new(given, more, directory)
    return name in ("mkdir", "rename", "replace") and _below(given[0], directory)


def _is_new(given: tuple[Any, ...], more: dict[str, Any], directory: str) -> bool:
    """An open file needs no space if it exists."""
    path = os.fspath(given[0])
    if (parent := more.get("dir_fd")) is not None:
        path = f"{_readlink(f'/proc/self/fd/{parent}')}/{path}"
    if not _below(path, directory):
        return False
    try:
        _stat(path)
    except OSError:
        return True
    return False


def _below(place: Any, directory: str) -> bool:
    path = _readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else os.fspath(place)
    return path == directory or path.startswith(f"{directory}/")


@contextmanager
def _patched(around: Around, *, all_threads: bool = False) -> Iterator[None]:
    thread = threading.get_ident()
    places: list[tuple[Any, str]] = [*((os, name) for name in CALLS), (io, "open"), (builtins, "open")]
    originals = [getattr(module, name) for module, name in places]

    def patch(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if all_threads or threading.get_ident() == thread:
                return around(name, original, arguments, keywords)
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

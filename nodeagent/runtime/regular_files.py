"""Reads files that a user names: regular ones only, so that a pipe, a socket or a device can neither block nor feed us.

A named pipe without a writer blocks its reader, and Python resumes that after a signal for which it has a handler;
/dev/zero never ends; opening a tape or a watchdog acts. So the type is asked for before the file is opened, and again
of what was opened (it may have been replaced meanwhile).
"""

import errno
import os
import stat
from typing import Final

_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | os.O_NOFOLLOW
_CHUNK: Final = 1 << 20
_TYPES: Final = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


class NotRegularError(OSError):
    """There is something by this name, but no file with a content."""


def open_to_read(path: str | os.PathLike[str]) -> int:
    """A descriptor of this regular file. Raises OSError, NotRegularError; ValueError for a null byte in the path."""
    refuse_special(os.stat(path), path)
    fd = os.open(path, _READ)
    try:
        refuse_special(os.fstat(fd), path)
    except OSError:
        os.close(fd)
        raise
    return fd


def read(path: str | os.PathLike[str], *, max_bytes: int) -> bytes:
    """The content of this regular file, at most `max_bytes` of it. Raises as `open_to_read` does."""
    fd = open_to_read(path)
    try:
        return read_from(fd, max_bytes=max_bytes)
    finally:
        os.close(fd)


def read_from(fd: int, *, max_bytes: int) -> bytes:
    """What can be read from here on, at most `max_bytes`. Raises OSError."""
    chunks = []
    while max_bytes > 0 and (chunk := os.read(fd, min(max_bytes, _CHUNK))):
        chunks.append(chunk)
        max_bytes -= len(chunk)
    return b"".join(chunks)


def open_to_replace(path: str | os.PathLike[str]) -> int:
    """A descriptor of this file, made or emptied, to write it anew. A pipe, socket or device of that name is removed.
    Raises OSError."""
    try:
        return _open_to_write(path, os.O_TRUNC)
    except OSError as error:
        # ENXIO: a socket, or a named pipe that nobody reads.
        if not isinstance(error, NotRegularError) and error.errno != errno.ENXIO:
            raise
    os.unlink(path)
    return _open_to_write(path, os.O_EXCL)


def open_to_append(path: str | os.PathLike[str]) -> int:
    """A descriptor that writes at the end of this file, which is made when it is not there. Raises OSError,
    NotRegularError."""
    return _open_to_write(path, os.O_APPEND)


def _open_to_write(path: str | os.PathLike[str], flag: int) -> int:
    # For the agent's user alone: names of pods, and what they use.
    fd = os.open(path, _WRITE | flag, 0o600)
    try:
        refuse_special(os.fstat(fd), path)
    except OSError:
        os.close(fd)
        raise
    return fd


def refuse_special(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    """Raises NotRegularError, or IsADirectoryError, when this is no regular file."""
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    kind = next((name for is_kind, name in _TYPES if is_kind(status.st_mode)), "a special file")
    raise NotRegularError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))

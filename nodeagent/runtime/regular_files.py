"""Opens and reads only regular files, so that a pipe, a socket or a device at a path cannot block or flood the agent.

A named pipe without a writer blocks its reader, and Python resumes the read after a handled signal. /dev/zero never
ends. The open of a tape or a watchdog has an effect. So the type is checked before the open, and again after it,
because the file may have been replaced.
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
    """The path names a pipe, a socket or a device."""


def open_to_read(path: str | os.PathLike[str]) -> int:
    """A descriptor of this regular file. Raises OSError and NotRegularError, and ValueError for a null byte in the
    path."""
    refuse_special(os.stat(path), path)
    fd = os.open(path, _READ)
    try:
        refuse_special(os.fstat(fd), path)
    except OSError:
        os.close(fd)
        raise
    return fd


def read_file(path: str | os.PathLike[str], *, max_bytes: int) -> bytes:
    """The content of this regular file, at most `max_bytes`. Raises as `open_to_read` does."""
    fd = open_to_read(path)
    try:
        return read_descriptor(fd, max_bytes=max_bytes)
    finally:
        os.close(fd)


def read_descriptor(fd: int, *, max_bytes: int) -> bytes:
    """The rest of an open file, at most `max_bytes`. Raises OSError."""
    chunks = []
    while max_bytes > 0 and (chunk := os.read(fd, min(max_bytes, _CHUNK))):
        chunks.append(chunk)
        max_bytes -= len(chunk)
    return b"".join(chunks)


def open_to_replace(path: str | os.PathLike[str]) -> int:
    """A descriptor of this file, created or truncated. A pipe, socket or device at the path is removed. Raises
    OSError."""
    try:
        return _open_to_write(path, os.O_TRUNC)
    except OSError as error:
        # ENXIO: a socket, or a named pipe without a reader.
        if not isinstance(error, NotRegularError) and error.errno != errno.ENXIO:
            raise
    os.unlink(path)
    return _open_to_write(path, os.O_EXCL)


def open_to_append(path: str | os.PathLike[str]) -> int:
    """A descriptor that appends to this file, which is created if it does not exist. Raises OSError and
    NotRegularError."""
    return _open_to_write(path, os.O_APPEND)


def _open_to_write(path: str | os.PathLike[str], flag: int) -> int:
    # Readable for the agent's user alone: the files contain names and usages of pods.
    fd = os.open(path, _WRITE | flag, 0o600)
    try:
        refuse_special(os.fstat(fd), path)
    except OSError:
        os.close(fd)
        raise
    return fd


def refuse_special(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    """Raises NotRegularError or IsADirectoryError unless this is a regular file."""
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    kind = next((name for is_kind, name in _TYPES if is_kind(status.st_mode)), "a special file")
    raise NotRegularError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))

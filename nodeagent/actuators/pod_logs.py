"""Removes old logs of ended containers below a directory of pod logs.

In `<directory>/<pod>/<container>/` the log of each start of a container is `<n>.log`, and a rotated one is
`<n>.log.<stamp>`, with or without `.gz`. A log with a smaller number than the newest start belongs to an ended
container and is removed. Of a pod in `ended`, all but the newest log of each container are removed, so that its last
output stays.

Nothing outside that directory can be removed: every step down opens one name with O_NOFOLLOW, and only regular files
with such names are unlinked."""

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

_LOG: Final = re.compile(r"([0-9]{1,9})\.log(\.[0-9A-Za-z-]+(\.gz)?)?", re.ASCII)
_GONE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Another program removed it, or it is no directory."""
_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class RemovedLogs(NamedTuple):
    """The removed files."""

    files: int
    bytes: int
    """Allocated, st_blocks * 512."""
    complete: bool
    """False if the deadline passed first."""
    refused: int = 0
    """Files and directories that the agent may not change or read."""
    refusal: str = ""
    """Why, for the first of them, with its path."""


class _Removal:
    """What has been removed so far, and what could not be."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._files = self._bytes = self._refused = 0
        self._refusal = ""

    def removed(self, status: os.stat_result) -> None:
        self._files += 1
        self._bytes += status.st_blocks * 512 if status.st_nlink == 1 else 0

    def failed(self, error: OSError, *names: str) -> None:
        if error.errno in _GONE:
            return
        self._refused += 1
        self._refusal = self._refusal or f"{'/'.join((self._directory, *names))}: {error.strerror}"

    def result(self, *, complete: bool) -> RemovedLogs:
        return RemovedLogs(self._files, self._bytes, complete, self._refused, self._refusal)


def remove_old_logs(directory: str, *, ended: Callable[[str], bool], until: float) -> RemovedLogs:
    """Remove old logs until `until` on time.monotonic(). `ended` returns True for a pod's directory name if all its
    containers have ended.

    Raises:
        OSError: the directory cannot be listed.
    """
    removal = _Removal(directory)
    top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for pod in sorted(os.listdir(top)):
            with _open_directory(top, removal, pod) as below:
                for container in sorted(os.listdir(below)) if below is not None else ():
                    if time.monotonic() >= until:
                        return removal.result(complete=False)
                    with _open_directory(below, removal, pod, container) as logs:
                        if logs is not None:
                            _remove(logs, removal, pod, container, newest_only=ended(pod))
    finally:
        os.close(top)
    return removal.result(complete=True)


@contextlib.contextmanager
def _open_directory(parent: int | None, removal: _Removal, *names: str) -> Iterator[int | None]:
    """The directory with the last of these names; None if it is no directory, is gone, or cannot be read."""
    try:
        fd = os.open(names[-1], _FLAGS, dir_fd=parent)
    except OSError as error:
        removal.failed(error, *names)
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _remove(directory: int, removal: _Removal, pod: str, container: str, *, newest_only: bool) -> None:
    """Remove the old logs of one container."""
    logs = [
        (int(match[1]), name, match[2] is not None) for name in os.listdir(directory) if (match := _LOG.fullmatch(name))
    ]
    newest = max((number for number, _, _ in logs), default=0)
    for number, name, rotated in logs:
        if number == newest and not (newest_only and rotated):
            continue
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                continue
            os.unlink(name, dir_fd=directory)
        except OSError as error:
            removal.failed(error, pod, container, name)
            continue
        removal.removed(status)

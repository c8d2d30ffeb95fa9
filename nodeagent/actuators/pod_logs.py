"""Removes old logs of ended containers below a directory of pod logs.

In `<directory>/<pod>/<container>/` the log of each start of a container is `<n>.log`, and a rotated one is
`<n>.log.<stamp>`, with or without `.gz`. A log with a smaller number than the newest start belongs to an ended
container and is removed. Of a pod in `ended`, all but the newest log of each container are removed, so that its last
output stays.

Nothing outside that directory can be removed: every step down opens one name with O_NOFOLLOW, and only regular files
with such names are unlinked."""

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

_LOG: Final = re.compile(r"([0-9]{1,9})\.log(\.[0-9A-Za-z-]+(\.gz)?)?", re.ASCII)
_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class RemovedLogs(NamedTuple):
    """The removed files."""

    files: int
    bytes: int
    """Allocated, st_blocks * 512."""
    complete: bool
    """False if the deadline passed first."""


def remove_old_logs(directory: str, *, ended: Callable[[str], bool], until: float) -> RemovedLogs:
    """Remove old logs until `until` on time.monotonic(). `ended` returns True for a pod's directory name if all its
    containers have ended.

    Raises:
        OSError: the directory cannot be listed.
    """
    files = size = 0
    top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for pod in sorted(os.listdir(top)):
            with _open_directory(top, pod) as below:
                for container in sorted(os.listdir(below)) if below is not None else ():
                    if time.monotonic() >= until:
                        return RemovedLogs(files, size, complete=False)
                    with _open_directory(below, container) as logs:
                        for blocks in _remove(logs, newest_only=ended(pod)) if logs is not None else ():
                            files, size = files + 1, size + blocks * 512
    finally:
        os.close(top)
    return RemovedLogs(files, size, complete=True)


@contextlib.contextmanager
def _open_directory(parent: int | None, name: str) -> Iterator[int | None]:
    """The directory of that name; None if it is no directory, or is gone."""
    try:
        fd = os.open(name, _FLAGS, dir_fd=parent)
    except OSError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _remove(directory: int, *, newest_only: bool) -> Iterator[int]:
    """Remove the old logs of one container; yields the blocks of each."""
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
        except OSError:
            continue  # another program removed it, or the agent has no right to
        yield status.st_blocks if status.st_nlink == 1 else 0

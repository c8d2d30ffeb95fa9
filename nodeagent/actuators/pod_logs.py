"""Removes logs of containers that have ended, below a directory of pod logs.

In `<directory>/<pod>/<container>/` the log of each start of a container is `<n>.log`, and what was rotated away
`<n>.log.<stamp>`, with or without `.gz`. Whatever has a smaller number than the newest start is of a container that has
ended, and is removed; of the pods in `ended` all but the newest log of each container, so that its last words stay.

Nothing outside that directory can be removed: every step down is an open of one name with O_NOFOLLOW, and only plain
files with such names are unlinked.
"""

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

_LOG: Final = re.compile(r"([0-9]{1,9})\.log(\.[0-9A-Za-z-]+(\.gz)?)?", re.ASCII)
_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Removed(NamedTuple):
    """What was removed."""

    files: int
    bytes: int
    """Allocated, st_blocks * 512."""
    complete: bool
    """False: the deadline cut it short."""


def remove_old_logs(directory: str, *, ended: Callable[[str], bool], until: float) -> Removed:
    """Remove old logs until time.monotonic() `until`. `ended` tells of a pod's directory name whether its containers
    have all ended.

    Raises:
        OSError: the directory cannot be listed.
    """
    files = size = 0
    top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for pod in sorted(os.listdir(top)):
            with _opened(top, pod) as below:
                for container in sorted(os.listdir(below)) if below is not None else ():
                    if time.monotonic() >= until:
                        return Removed(files, size, complete=False)
                    with _opened(below, container) as place:
                        for blocks in _remove(place, newest_only=ended(pod)) if place is not None else ():
                            files, size = files + 1, size + blocks * 512
    finally:
        os.close(top)
    return Removed(files, size, complete=True)


@contextlib.contextmanager
def _opened(parent: int | None, name: str) -> Iterator[int | None]:
    """A directory of that name; None when it is none, or has gone."""
    try:
        fd = os.open(name, _FLAGS, dir_fd=parent)
    except OSError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _remove(place: int, *, newest_only: bool) -> Iterator[int]:
    """Remove the old logs of one container; yields the blocks of each."""
    found = [
        (int(match[1]), name, match[2] is not None) for name in os.listdir(place) if (match := _LOG.fullmatch(name))
    ]
    newest = max((number for number, _, _ in found), default=0)
    for number, name, rotated in found:
        if number == newest and not (newest_only and rotated):
            continue
        try:
            seen = os.stat(name, dir_fd=place, follow_symlinks=False)
            if not stat.S_ISREG(seen.st_mode):
                continue
            os.unlink(name, dir_fd=place)
        except OSError:
            continue  # somebody else removed it, or it is not ours to remove
        yield seen.st_blocks if seen.st_nlink == 1 else 0

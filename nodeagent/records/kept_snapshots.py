"""The snapshot files that the agent has made by itself: their directory, their number and their bytes.

1. There are never more files or bytes than the limits: the oldest are removed before a new one gets its name.
2. A file appears complete or not at all. What a killed process left half written is removed by the next one.
3. Only files with a name of this module are ever removed.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final, NamedTuple

from nodeagent.records.snapshot_file import Manifest, SnapshotError, SnapshotFile

_NAME: Final = re.compile(r"\d{8}T\d{6}Z-[a-z-]{1,32}(?:-[0-9a-f]{1,16}-(?:oom)?[0-9]{1,12})?\.zip")
_PARTIAL: Final = ".partial"
MAX_LISTED: Final = 1000


class KeptSnapshot(NamedTuple):
    """One file."""

    path: Path
    size: int
    manifest: Manifest


def file_name(reason: str, identity: str, *, wall: float) -> str:
    """`20261124T190000Z-eviction-1a2b3c4d-17.zip`: sorted by time. The id is left out if it is not one of a plan."""
    stem = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(wall))}-{reason}"
    with_id = f"{stem}-{identity}.zip"
    return with_id if _NAME.fullmatch(with_id) else f"{stem}.zip"


def listed(directory: Path) -> tuple[KeptSnapshot, ...]:
    """The files that can be read, oldest first. Never raises."""
    found = []
    for path, size in _files(directory)[:MAX_LISTED]:
        with contextlib.suppress(SnapshotError), SnapshotFile(path) as file:
            found.append(KeptSnapshot(path, size, file.manifest))
    return tuple(found)


def keep(
    directory: Path, name: str, write: Callable[[IO[bytes]], object], *, most: int, max_bytes: int
) -> tuple[Path, int]:
    """Write a new file and remove the oldest. Returns its path and size. Raises OSError, and what `write` raises;
    then nothing new is there."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for entry in os.scandir(directory):
        if entry.name.endswith(_PARTIAL) and _NAME.fullmatch(entry.name.removesuffix(_PARTIAL)):
            os.unlink(entry.path)
    path = directory / name
    partial = directory / f"{name}{_PARTIAL}"
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            write(file)
            file.flush()
            os.fsync(fd)
            size = os.fstat(fd).st_size
        _make_room(directory, most=most - 1, max_bytes=max_bytes - size)
        os.rename(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    return path, size


def _make_room(directory: Path, *, most: int, max_bytes: int) -> None:
    files = _files(directory)
    total = sum(size for _, size in files)
    while files and (len(files) > most or total > max_bytes):
        path, size = files.pop(0)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        total -= size


def _files(directory: Path) -> list[tuple[Path, int]]:
    """Path and size, oldest first: the names begin with the time."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                found += [(Path(entry.path), entry.stat(follow_symlinks=False).st_size)]
    return sorted(found)

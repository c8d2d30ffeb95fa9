"""The files of a recorder's directory: bounded, and safe against what else may lie there.

Promises:

1. All files together have at most `max_bytes`; the oldest are removed first. Other files are never touched.
2. A process that is killed at any moment leaves files that a reader can use: completed groups are appended, and the
   group in progress is a file of its own, whose entries are appended one by one.
3. A symbolic link is not followed, neither as the directory itself nor in it. Parents of the directory may be links.
4. Whatever else has the name of a segment, such as a directory, is left alone, and the segment gets another number.
5. One process writes: a second one gets an error, also from another container.

Theory of operation. Every process begins a segment with a new number: `samples-N.rec` for completed groups,
`samples-N-tail.rec` for the group in progress. A completed group is appended first, then the tail is truncated; a
reader counts a group that is in both once. No file stays open for writing, so that the file system can be mounted
read-only at any time. The directory stays open for reading, with a lock that ends with the process. Nothing is flushed
to the device: a crash of the machine may cost the last half minute, which the checksums show.
"""

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Final, NamedTuple

from nodeagent.records import recorder_paths
from nodeagent.runtime import regular_files

SEGMENTS: Final = 16
"""Into how many segments the bound is divided: dropping the oldest costs this share of the past."""
MAX_SEGMENTS: Final = 500
"""More are left only by a process that restarts again and again."""
MAX_NUMBER: Final = 10**8
"""The next number is above those below this: ten restarts a second reach it in four months. What has a larger number
was put there."""
MAX_TRIES: Final = 1000
"""Numbers that are tried for a new segment."""
RESERVE_SHARE: Final = 0.05
MAX_RESERVE_BYTES: Final = 64 << 20
"""The file system is short if less is free: 5% of it, at most 64 MiB. What else is on it needs the rest."""


class _Found(NamedTuple):
    number: int
    name: str
    size: int


class SegmentFiles:
    """The segment of one process. Every method raises OSError."""

    def __init__(self, directory: Path, *, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._directory_fd = -1
        self._number = 0
        self._tail_version: os.stat_result | None = None
        self._header_size = 0
        self.total = 0
        """Bytes of all segments in the directory."""
        self.ignored = ""
        """The path of one entry of the directory that has the name of a segment and is none."""
        self._main_size = 0
        self._tail_size = 0

    @property
    def is_open(self) -> bool:
        return self._tail_version is not None

    @property
    def segment_is_full(self) -> bool:
        """By its groups: a header alone, however large, leaves room for one."""
        return self._main_size - self._header_size > self._max_bytes // SEGMENTS

    def open_segment(self, header: bytes) -> None:
        """Begin a new segment in the directory, which is created."""
        self.close()
        try:
            self._open_directory()
            self._make_room(2 * len(header), new_segment=True)
            self._create_segment(header)
        except OSError:
            self.close()
            raise
        self._header_size = self._main_size = self._tail_size = len(header)
        self.total += 2 * len(header)

    def append_entry(self, frame: bytes) -> None:
        """Append one entry to the group in progress."""
        self._make_room(len(frame))
        self._append(self._tail, frame, size=self._tail_size)
        self._tail_size += len(frame)
        self.total += len(frame)

    def complete_group(self, frame: bytes) -> None:
        """Append the completed group and empty the tail."""
        self._make_room(len(frame))
        self._append(self._main, frame, size=self._main_size)
        self._main_size += len(frame)
        self.total += len(frame) - (self._tail_size - self._header_size)
        fd = self._open(self._tail)
        try:
            os.ftruncate(fd, self._header_size)
        finally:
            os.close(fd)
        self._tail_size = self._header_size

    def lost(self) -> bool:
        """True if the segment is no longer in the directory: one of them was removed or replaced."""
        if self._tail_version is None:
            return True
        try:
            named = os.stat(self._directory / self._tail, follow_symlinks=False)
        except OSError:
            return True
        return not os.path.samestat(named, self._tail_version)

    def device(self) -> int:
        """st_dev of the directory, or of where it will be created."""
        return device_of(self._directory)

    def is_short(self) -> bool:
        """True if the file system has no room for a recording."""
        return is_short(self._directory)

    def close(self) -> None:
        """Forget the segment; the next one gets a new number."""
        if self._directory_fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._directory_fd)
        self._directory_fd, self._tail_version = -1, None

    @property
    def _main(self) -> str:
        return f"samples-{self._number}{recorder_paths.SUFFIX}"

    @property
    def _tail(self) -> str:
        return f"samples-{self._number}{recorder_paths.TAIL}{recorder_paths.SUFFIX}"

    def _open(self, name: str, flags: int = 0) -> int:
        flags |= os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=self._directory_fd)
        try:
            regular_files.refuse_special(os.fstat(fd), name)
        except OSError:
            os.close(fd)
            raise
        return fd

    def _append(self, name: str, data: bytes, *, size: int) -> None:
        fd = self._open(name)
        try:
            _write(fd, data)
        except OSError:
            with contextlib.suppress(OSError):  # half a frame would be reported as damage
                os.ftruncate(fd, size)
            raise
        finally:
            os.close(fd)

    def _open_directory(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._directory_fd = os.open(self._directory, flags)
        except NotADirectoryError as error:
            if self._directory.is_symlink():
                raise OSError(errno.ELOOP, "a symbolic link, not a directory", str(self._directory)) from error
            raise
        try:
            fcntl.flock(self._directory_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError(error.errno, "another process records in this directory", str(self._directory)) from error
        except OSError:
            return  # a file system without locks

    def _create_segment(self, header: bytes) -> None:
        """Two files with a number that nothing in the directory has."""
        numbers = [
            int(match[1]) for match in map(recorder_paths.SEGMENT.match, os.listdir(self._directory_fd)) if match
        ]
        self._number = max([each for each in numbers if each < MAX_NUMBER], default=0)
        for _ in range(MAX_TRIES):
            self._number += 1
            try:
                self._create(self._main, header)
            except FileExistsError:
                continue
            try:
                self._tail_version = self._create(self._tail, header)
            except FileExistsError:
                os.unlink(self._main, dir_fd=self._directory_fd)
                continue
            return
        raise FileExistsError(errno.EEXIST, "no free number for a segment", str(self._directory))

    def _create(self, name: str, header: bytes) -> os.stat_result:
        fd = self._open(name, os.O_CREAT | os.O_EXCL)
        try:
            _write(fd, header)
            return os.fstat(fd)
        finally:
            os.close(fd)

    def _list(self) -> list[_Found]:
        """The segment files, oldest first; sets `total`."""
        found = []
        for name in os.listdir(self._directory_fd):
            if match := recorder_paths.SEGMENT.match(name):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=self._directory_fd, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        found.append(_Found(int(match[1]), name, status.st_size))
                    else:
                        self.ignored = str(self._directory / name)
        self.total = sum(each.size for each in found)
        return sorted(found)

    def _make_room(self, size: int, *, new_segment: bool = False) -> None:
        """Remove the oldest segments until `size` more bytes fit."""
        if self.total + size <= self._max_bytes and not new_segment:
            return
        found = [each for each in self._list() if new_segment or each.number != self._number]
        while found and (self.total + size > self._max_bytes or len(found) > 2 * MAX_SEGMENTS):
            oldest = found.pop(0)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(oldest.name, dir_fd=self._directory_fd)
            self.total -= oldest.size
        if self.total + size > self._max_bytes:
            raise OSError(errno.EFBIG, f"one group needs more than the bound of {self._max_bytes} bytes")


def device_of(directory: Path) -> int:
    """st_dev of the directory, or of where it will be created. Raises OSError."""
    return os.stat(_existing(directory)).st_dev


def is_short(directory: Path, *, further: int = 0) -> bool:
    """True if the file system of the directory has not the reserve and `further` bytes. Raises OSError."""
    space = os.statvfs(_existing(directory))
    free, size = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    return free < min(int(size * RESERVE_SHARE), MAX_RESERVE_BYTES) + further


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]

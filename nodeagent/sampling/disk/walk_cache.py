"""Caches what a walk read of each directory, for the next walk of the same tree.

* The *names* in a directory are the same as before if its ctime is the same, because no program can set a ctime. The
  next walk does not read the directory again, but it reads its files, whose sizes change without a change of the
  directory. This is exact. A directory changed less than `SETTLED_S` before it was read is not cached: the next change
  could have the same ctime.
* If the caller knows that nothing was written (`unwritten=True`: a dead container's layer, a pod whose cgroup has
  written nothing and has no dirty pages), the walk also reuses the *sums* of unchanged directories, except if a file
  has several links. A write that the caller missed is found by the next ordinary walk.
"""

import os
from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

SETTLED_S: Final = 2.0
"""A directory is cached only if its last change is this old. The clock of a file system's time stamps ticks every 1 to
10 ms (ext4, xfs, btrfs) or every second (ext3)."""
MAX_CACHE_BYTES: Final = 8 << 20
"""Cache of all trees together: 400,000 names. The first trees fill it."""
_MAX_NAMES: Final = 16384
"""A directory with more names is read each time, because caching would keep its names in memory twice."""
_RECORD_BYTES: Final = 400

Stamp = tuple[int, int]
"""A ctime: seconds, nanoseconds."""


class DirectoryRecord:
    """The cached content of one directory."""

    __slots__ = ("ctime", "dirs", "file_blocks", "files", "inode", "names", "size")

    def __init__(self, frame: "Frame", names: bytes | None) -> None:
        self.inode = frame.inode
        self.ctime = frame.ctime
        self.names = names
        """Joined by NUL; None if the directory must be read again, because only subdirectories are cached."""
        self.files = frame.files
        """Entries that are not directories."""
        self.file_blocks = -1 if frame.linked else frame.file_blocks
        """Their blocks; -1 if they cannot be reused (not counted, or a file has several links)."""
        self.dirs: dict[bytes, DirectoryRecord | None] = frame.dirs
        self.size = _RECORD_BYTES + len(names or b"") + 100 * len(frame.dirs)
        """Approximate bytes, without subdirectories."""

    def has_names_of(self, inode: int, ctime: Stamp) -> bool:
        """True if a directory with this inode and ctime still has the cached names."""
        return self.names is not None and self.inode == inode and self.ctime == ctime

    def is_leaf(self, inode: int, ctime: Stamp) -> bool:
        """True if a directory with this inode and ctime has no subdirectories and still has the cached files, unless
        one was written to."""
        return self.file_blocks >= 0 and not self.dirs and self.has_names_of(inode, ctime)


class WalkCache(NamedTuple):
    """The cache of one tree. Opaque to callers."""

    root: DirectoryRecord
    device: int
    size: int
    """Approximate bytes."""


PendingDirectory = tuple[bytes, int, Stamp, DirectoryRecord | None]
"""A subdirectory that was counted but not entered: name, inode, ctime, cache. A plain tuple, because each directory
needs one."""


class ScandirIterator(Protocol):
    """The type of the result of os.scandir."""

    def __iter__(self) -> Iterator["os.DirEntry[str]"]: ...
    def __next__(self) -> "os.DirEntry[str]": ...
    def close(self) -> None: ...


class Frame:
    """A directory on the way down."""

    __slots__ = (
        "cacheable", "cached", "ctime", "dirs", "entries", "fd", "file_blocks", "files", "inode", "linked", "name",
        "name_chunks", "name_count", "pending", "set_aside", "unchanged",
    )  # fmt: skip

    def __init__(self, name: bytes, inode: int, ctime: Stamp, cached: DirectoryRecord | None) -> None:
        self.name = name
        self.inode = inode
        self.ctime = ctime
        self.fd = -1
        """-1 while it is closed."""
        self.entries: ScandirIterator | None = None
        """The stream of a large directory; None at its end."""
        self.pending: list[PendingDirectory] = []
        self.set_aside = 0
        """Pending subdirectories at the moment when this directory was closed early."""
        self.cached = cached
        self.unchanged = cached is not None and cached.has_names_of(inode, ctime)
        """It still has the cached names."""
        self.cacheable = False
        """May be cached for the next walk."""
        self.name_chunks: list[bytes] = []
        self.name_count = 0
        self.files = 0
        self.file_blocks = 0
        self.linked = False
        self.dirs: dict[bytes, DirectoryRecord | None] = {}

    def set_identity(self, inode: int, ctime: Stamp) -> None:
        """Set the inode and ctime of the open directory: its owner may have replaced it since it was listed."""
        if self.inode != inode or self.ctime != ctime:
            self.inode, self.ctime = inode, ctime
            self.unchanged = self.cached is not None and self.cached.has_names_of(inode, ctime)

    def add_names(self, joined: bytes, names: int) -> None:
        """Add the names of one chunk to the cache, unless there are too many."""
        self.name_chunks.append(joined)
        self.name_count += names
        if self.name_count > _MAX_NAMES:
            self.cacheable = False
            self.name_chunks.clear()
            self._drop_unknown()

    def record(self) -> DirectoryRecord | None:
        """What to cache of this directory after its end; None if nothing."""
        cached = self.cached if self.unchanged else None
        if self.cacheable and cached is not None and not self.dirs:  # unchanged, and without subdirectories
            cached.files = self.files
            cached.file_blocks = -1 if self.linked else self.file_blocks
            return cached
        if self.cacheable:
            return DirectoryRecord(self, cached.names if cached is not None else b"\0".join(self.name_chunks))
        self._drop_unknown()
        return DirectoryRecord(self, None) if self.dirs else None

    def _drop_unknown(self) -> None:
        """Drop uncached subdirectories: without the names of the directory they have no use."""
        self.dirs = {name: below for name, below in self.dirs.items() if below is not None}

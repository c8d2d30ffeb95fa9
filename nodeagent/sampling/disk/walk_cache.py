"""What a walk remembers of each directory for the next walk of the same tree, and when that may be used.

* The *names* in a directory whose ctime did not change are the same, for nobody can set a ctime (a directory touched
  less than `SETTLED_S` before it was read is not remembered: the next change could carry the same stamp). So its files
  are asked for again, as their sizes change without the directory knowing, but the directory itself is not read. This
  is exact.
* If the caller knows that nobody wrote (`unwritten=True`: a dead container's layer, a pod whose cgroup has written
  nothing and holds no dirty pages), then the *sums* of unchanged directories are taken over as well, except where
  a file had several links. A write that the caller did not know of stays unseen until the next ordinary walk.
"""

import os
from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

# A directory is remembered only when it last changed this long before it was read: file systems stamp with a clock that
# ticks every 1 to 10 ms (ext4, xfs, btrfs) or every second (ext3).
SETTLED_S: Final = 2.0
# What one walk may remember: 8 MiB hold 200,000 names in 4,000 directories twice over.
REMEMBER_BYTES: Final = 8 << 20
# A directory with more names is read again each time rather than remembered: its names would be held twice at once.
_NAMES: Final = 16384
_RECORD_BYTES: Final = 400

Stamp = tuple[int, int]
"""A ctime: seconds, nanoseconds."""


class DirectoryRecord:
    """What is remembered of one directory."""

    __slots__ = ("ctime", "dirs", "file_blocks", "files", "inode", "names", "size")

    def __init__(self, frame: "Frame", names: bytes | None) -> None:
        self.inode = frame.inode
        self.ctime = frame.ctime
        self.names = names
        """Joined by NUL; None when the directory itself must be read again (only something below it is known)."""
        self.files = frame.files
        """Entries that are no directories."""
        self.file_blocks = -1 if frame.linked else frame.file_blocks
        """Their blocks; -1 when that is not to be taken over (not counted, or one has several links)."""
        self.dirs: dict[bytes, DirectoryRecord | None] = frame.dirs
        self.size = _RECORD_BYTES + len(names or b"") + 100 * len(frame.dirs)
        """About the bytes that it takes, what is below it aside."""

    def is_of(self, inode: int, ctime: Stamp) -> bool:
        """Whether the names in this directory are those that were remembered."""
        return self.names is not None and self.inode == inode and self.ctime == ctime

    def is_leaf(self, inode: int, ctime: Stamp) -> bool:
        """Whether this is still what a directory without subdirectories holds, if nobody wrote to its files."""
        return self.file_blocks >= 0 and not self.dirs and self.is_of(inode, ctime)


class WalkCache(NamedTuple):
    """What a later walk of the same tree can use. Opaque."""

    root: DirectoryRecord
    device: int
    size: int
    """About the bytes that it takes."""


PendingDirectory = tuple[bytes, int, Stamp, DirectoryRecord | None]
"""A subdirectory that was counted but not entered: name, inode, ctime, and what is remembered of it. A plain tuple: one
is made for each directory."""


class ScandirIterator(Protocol):
    """What os.scandir gives."""

    def __iter__(self) -> Iterator["os.DirEntry[str]"]: ...
    def __next__(self) -> "os.DirEntry[str]": ...
    def close(self) -> None: ...


class Frame:
    """A directory that is being walked."""

    __slots__ = (
        "aside", "ctime", "dirs", "entries", "fd", "file_blocks", "files", "fit", "inode", "kept", "kept_names",
        "linked", "name", "old", "pending", "same",
    )  # fmt: skip

    def __init__(self, name: bytes, inode: int, ctime: Stamp, old: DirectoryRecord | None) -> None:
        self.name = name
        self.inode = inode
        self.ctime = ctime
        self.fd = -1
        """-1 while it is not held open."""
        self.entries: ScandirIterator | None = None
        """The stream of a large directory; None when it was read to its end."""
        self.pending: list[PendingDirectory] = []
        self.aside = 0
        """How many of the pending ones were set aside when this was closed."""
        self.old = old
        self.same = old is not None and old.is_of(inode, ctime)
        """The names in it are those that were remembered."""
        self.fit = False
        """Fit to be remembered."""
        self.kept: list[bytes] = []
        self.kept_names = 0
        self.files = 0
        self.file_blocks = 0
        self.linked = False
        self.dirs: dict[bytes, DirectoryRecord | None] = {}

    def opened(self, inode: int, ctime: Stamp) -> None:
        """What it is now that it is held: its owner may have put another one in its place."""
        if self.inode != inode or self.ctime != ctime:
            self.inode, self.ctime = inode, ctime
            self.same = self.old is not None and self.old.is_of(inode, ctime)

    def keep(self, joined: bytes, names: int) -> None:
        """Remembers the names of one chunk, unless there are too many."""
        self.kept.append(joined)
        self.kept_names += names
        if self.kept_names > _NAMES:
            self.fit = False
            self.kept.clear()
            self._drop_unknown()

    def record(self) -> DirectoryRecord | None:
        """What to remember of this directory, walked to its end; None when there is nothing worth it."""
        old = self.old if self.same else None
        if self.fit and old is not None and not self.dirs:  # a directory of files that is as it was
            old.files = self.files
            old.file_blocks = -1 if self.linked else self.file_blocks
            return old
        if self.fit:
            return DirectoryRecord(self, old.names if old is not None else b"\0".join(self.kept))
        self._drop_unknown()
        return DirectoryRecord(self, None) if self.dirs else None

    def _drop_unknown(self) -> None:
        """Without its names, only subdirectories of which something is remembered are worth keeping."""
        self.dirs = {name: below for name, below in self.dirs.items() if below is not None}

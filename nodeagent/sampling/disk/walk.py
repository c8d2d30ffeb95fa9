"""Counts what a directory tree holds, in bytes and inodes, at about the speed of `du`.

Promises:

1. Nothing outside the tree is opened or counted, whatever its owner does meanwhile. Every step down is an open of one
   name relative to a held descriptor with O_NOFOLLOW; the only step up is to the very directory (device and inode) that
   we came from; mount points, bind mounts of the same device included, are not crossed.
2. Bytes are `st_blocks * 512`, inodes are one for each entry and one for the root; a file with several links is counted
   once.
3. Memory and open descriptors do not grow with the tree: see the constants below.
4. What could not be seen is counted as unknown, with the first reason; what vanished meanwhile is simply gone.
5. A walk stops between two chunks, at any moment, and goes on from there; closing it gives up its descriptors.

Theory of operation. A stack of frames, one for each directory on the way down, replaces recursion. A directory is read
in chunks, each entry asked for by one `statx`, and the subdirectories of a chunk are walked before the next chunk is
read. Only the deepest `_OPEN_FRAMES` directories are held open: a parent that was closed is reached again through its
child's `..`.

Entries are asked for in batches, by `map` over a ctypes function: `os.stat` spends 0.2 us of 0.7 us on making an object
of twenty fields of which we want three, and a loop in Python as much again. With both, a walk takes 1.5 times the CPU
of `du`, without them 1.3 times (200,000 files in 4,000 directories, Linux 6.18, Python 3.11). `statx` has one layout
on every architecture, and it alone tells mount points of the same device.

A second walk may be given what the first one remembered:

* The *names* in a directory whose ctime did not change are the same, for nobody can set a ctime (a directory touched
  less than `SETTLED_S` before it was read is not remembered: the next change could carry the same stamp). So its files
  are asked for again, as their sizes change without the directory knowing, but the directory itself is not read. This
  is exact.
* If the caller knows that nobody wrote (`unwritten=True`: a dead container's layer, a pod whose cgroup has written
  nothing and holds no dirty pages), then the *sums* of unchanged directories are taken over as well, except where
  a file had several links. A write that the caller did not know of stays unseen until the next ordinary walk.
"""

import ctypes
import enum
import errno
import os
import struct
import sys
import time
from collections.abc import Iterator
from itertools import islice, repeat
from types import TracebackType
from typing import Final, NamedTuple, Protocol

# Entries of a large directory between two looks at budget and deadline, and names held at once in each: 1 ms of CPU and
# 0.1 MiB.
_CHUNK: Final = 1024
# Entries asked for in one batch: 64 KiB of answers. 64 cost 1% more CPU, 1024 the same.
_BATCH: Final = 256
# A directory of at most this size is read in one go, which spares 70 ns for each entry: on ext4 it has at most 5,461
# entries (12 bytes each), on xfs and btrfs fewer, so that it takes 7 ms and 0.4 MiB.
_SMALL: Final = 65536
# Directories held open at once, of which those with more than _CHUNK entries need two descriptors: 64 is far below the
# usual limit of 1024 descriptors, and deeper than the trees that people make.
_OPEN_FRAMES: Final = 64
# Subdirectories that closing a directory before its end may set aside. Only a chain of directories that are
# all deeper than _OPEN_FRAMES and wider than _CHUNK gets here; what is beyond is counted as unknown.
_SET_ASIDE: Final = 65536
# Files with several links are remembered in bitmaps of 32,768 inode numbers: 4 KiB each, at most 16 MiB. Inode numbers
# are dense (ext4, xfs, btrfs), so that 10 million such files take 1.3 MiB. Beyond it links are counted each.
_PAGE_SHIFT: Final = 15
_PAGE_MASK: Final = (1 << (_PAGE_SHIFT - 3)) - 1
_PAGES: Final = 4096
# A directory is remembered only when it last changed this long before it was read: file systems stamp with a clock that
# ticks every 1 to 10 ms (ext4, xfs, btrfs) or every second (ext3).
SETTLED_S: Final = 2.0
# What one walk may remember: 8 MiB hold 200,000 names in 4,000 directories twice over.
REMEMBER_BYTES: Final = 8 << 20
# A directory with more names is read again each time rather than remembered: its names would be held twice at once.
_NAMES: Final = 16384
_RECORD_BYTES: Final = 400

_BIT: Final = tuple(1 << i for i in range(8))
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
# AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT | AT_STATX_DONT_SYNC: with the last a mount point that hangs (FUSE, NFS) is seen
# to be one without asking its server; local file systems ignore it.
_AT_FOLLOW: Final = 0x800 | 0x4000
_AT_NOFOLLOW: Final = 0x100 | _AT_FOLLOW
_AT_EMPTY_PATH: Final = 0x1000
# STATX_TYPE | NLINK | CTIME | INO | SIZE | BLOCKS; device and the attribute MOUNT_ROOT come by themselves.
_WANTED: Final = 0x0001 | 0x0004 | 0x0080 | 0x0100 | 0x0200 | 0x0400
_MOUNT_ROOT: Final = 0x2000
# Where struct statx (256 bytes) has its fields, in units of 8, 4 and 1 bytes (include/uapi/linux/stat.h).
_SLOT: Final = 256
_LONGS, _WORDS = _SLOT // 8, _SLOT // 4
_INO, _BLOCKS = 4, 6
_NLINK: Final = 4
_MAJOR: Final = 34
_DIRECTORY: Final = struct.Struct("=8xQ16xQQQ40xqI28xQ")
"""stx_attributes, stx_ino, stx_size, stx_blocks, stx_ctime (seconds, nanoseconds), device (major, minor as one)."""
_TYPE: Final = 29 if sys.byteorder == "little" else 28
"""The byte of stx_mode whose upper half is the file type."""
_MARK: Final = 9 if sys.byteorder == "little" else 14
"""The byte of stx_attributes with MOUNT_ROOT in it."""
_ONE: Final = struct.pack("=I", 1)
_REGULAR: Final = 8
_IS_DIRECTORY: Final = bytes(byte >> 4 == 4 for byte in range(256))
# What the kernel says of an entry that is no longer what it was when its name was read.
_GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})


class Count(enum.Enum):
    """What a walk is asked for."""

    BYTES_AND_INODES = "bytes and inodes"
    INODES = "inodes"
    """Only names are read, no file is asked for: a third of the price. Files with several links still count once."""


class Tally(NamedTuple):
    """What a walk has counted so far."""

    bytes: int | None
    """Allocated, st_blocks * 512. None when only inodes were counted."""
    inodes: int
    directories: int
    """Of these inodes; the tree's root included."""
    complete: bool
    """The whole tree was walked. False: the numbers are what was seen up to now, a lower bound."""
    vanished: int
    """Entries that were gone, or had become something else, when we came to them."""
    unknown: int
    """Files and directories that could not be looked at: each may hide anything."""
    unknown_reason: str
    """Of the first of them; empty when there is none."""
    mounts: int
    """Mount points, which are not entered, and count for nothing."""
    links_exact: bool
    """False: so many files with several links that some may have been counted more than once."""
    reused: int
    """Files whose numbers are those of the walk before (`unwritten`)."""
    started_at: float
    """CLOCK_BOOTTIME."""
    read_at: float
    """When the last number was read."""


class _Record:
    """What is remembered of one directory."""

    __slots__ = ("ctime", "dirs", "file_blocks", "files", "inode", "names")

    def __init__(self, frame: "_Frame", names: bytes | None) -> None:
        self.inode = frame.inode
        self.ctime = frame.ctime
        self.names = names
        """Joined by NUL; None when the directory itself must be read again (only something below it is known)."""
        self.files = frame.files
        """Entries that are no directories."""
        self.file_blocks = -1 if frame.linked else frame.file_blocks
        """Their blocks; -1 when that is not to be taken over (not counted, or one has several links)."""
        self.dirs: dict[bytes, _Record | None] = frame.dirs

    def is_leaf(self, inode: int, ctime: tuple[int, int]) -> bool:
        """Whether this is still what a directory without subdirectories holds, if nobody wrote to its files."""
        return (
            self.ctime == ctime
            and self.inode == inode
            and not self.dirs
            and self.names is not None
            and self.file_blocks >= 0
        )

    @property
    def size(self) -> int:
        """About the bytes that it takes, what is below it aside."""
        return _RECORD_BYTES + len(self.names or b"") + 100 * len(self.dirs)


_Pending = tuple[bytes, int, tuple[int, int], _Record | None]
"""Name, inode, ctime, and what is remembered of it."""


class ScandirIterator(Protocol):
    """What os.scandir gives."""

    def __iter__(self) -> Iterator["os.DirEntry[str]"]: ...
    def __next__(self) -> "os.DirEntry[str]": ...
    def close(self) -> None: ...


class Remembered(NamedTuple):
    """What a later walk of the same tree can use. Opaque."""

    root: _Record
    device: int
    size: int
    """About the bytes that it takes."""


class _Frame:
    """A directory that is being walked."""

    __slots__ = (
        "aside", "ctime", "dirs", "entries", "fd", "file_blocks", "files", "fit", "inode", "kept", "kept_names",
        "linked", "name", "old", "pending", "same",
    )  # fmt: skip

    def __init__(self, name: bytes, inode: int, ctime: tuple[int, int], old: _Record | None) -> None:
        self.name = name
        self.inode = inode
        self.ctime = ctime
        self.fd = -1
        """-1 while it is not held open."""
        self.entries: ScandirIterator | None = None
        """The stream of a large directory; None when it was read to its end."""
        self.pending: list[_Pending] = []
        """Subdirectories that were counted but not entered."""
        self.aside = 0
        """How many of them were set aside by `_park`."""
        self.old = old
        self.same = old is not None and old.names is not None and old.inode == inode and old.ctime == ctime
        """The names in it are those that were remembered."""
        self.fit = False
        """Fit to be remembered."""
        self.kept: list[bytes] = []
        self.kept_names = 0
        self.files = 0
        self.file_blocks = 0
        self.linked = False
        self.dirs: dict[bytes, _Record | None] = {}

    def opened(self, inode: int, ctime: tuple[int, int]) -> None:
        """What it is now that it is held: its owner may have put another one in its place."""
        if self.inode != inode or self.ctime != ctime:
            self.inode, self.ctime = inode, ctime
            old = self.old
            self.same = old is not None and old.names is not None and old.inode == inode and old.ctime == ctime

    def keep(self, joined: bytes, names: int) -> None:
        """Remembers the names of one chunk, unless there are too many."""
        self.kept.append(joined)
        self.kept_names += names
        if self.kept_names > _NAMES:
            self.fit = False
            self.kept.clear()
            self.drop_unknown()

    def drop_unknown(self) -> None:
        """Without its names, only subdirectories of which something is remembered are worth keeping."""
        self.dirs = {name: below for name, below in self.dirs.items() if below is not None}


class _Answers:
    """Asks the kernel for a batch of entries, and holds its answers until the next batch."""

    __slots__ = ("_references", "_statx", "byte", "long", "word")

    def __init__(self) -> None:
        buffer = ctypes.create_string_buffer(_BATCH * _SLOT)
        self._statx = ctypes.CDLL(None).statx
        # Made once: it would cost each call 12 ns. They keep the buffer alive.
        self._references = [ctypes.byref(buffer, slot * _SLOT) for slot in range(_BATCH)]
        self.byte = memoryview(buffer).cast("B")
        self.long, self.word = self.byte.cast("Q"), self.byte.cast("I")

    def ask(self, fd: int, names: list[bytes]) -> list[int]:
        """Asks for the entries with these names, at most _BATCH of them. The slots that were refused have no answer."""
        replies = list(map(self._statx, repeat(fd), names, repeat(_AT_NOFOLLOW), repeat(_WANTED), self._references))
        return [slot for slot, reply in enumerate(replies) if reply] if any(replies) else []

    def ask_self(self, fd: int) -> bool:
        """Asks for an open directory, into slot 0."""
        reply: int = self._statx(fd, b"", _AT_NOFOLLOW | _AT_EMPTY_PATH, _WANTED, self._references[0])
        return reply == 0

    def ask_through(self, fd: int, name: bytes) -> bool:
        """Asks for what a link leads to, into slot 0."""
        reply: int = self._statx(fd, name, _AT_FOLLOW, _WANTED, self._references[0])
        return reply == 0

    def blank(self, slot: int) -> None:
        self.byte[slot * _SLOT : (slot + 1) * _SLOT] = bytes(_SLOT)

    def blocks(self, count: int) -> int:
        """Sum over the first `count` slots."""
        return sum(self.long[_BLOCKS : count * _LONGS : _LONGS].tolist())

    def special(self, count: int) -> list[int]:
        """The slots, of the first `count`, that hold a directory, a mount point, or a file with more than one link."""
        types = bytes(self.byte[_TYPE : count * _SLOT : _SLOT]).translate(_IS_DIRECTORY)
        links = bytes(self.word[_NLINK : count * _WORDS : _WORDS])
        marks = bytes(self.byte[_MARK : count * _SLOT : _SLOT])
        if links == _ONE * count and 1 not in types and marks.count(0) == count:
            return []
        return [
            slot
            for slot in range(count)
            if types[slot] or self.is_mount_point(slot) or links[slot * 4 : slot * 4 + 4] != _ONE
        ]

    def is_mount_point(self, slot: int) -> bool:
        return self.byte[slot * _SLOT + _MARK] & (_MOUNT_ROOT >> 8) != 0

    def is_directory(self, slot: int) -> bool:
        return self.byte[slot * _SLOT + _TYPE] >> 4 == 4

    def block(self, slot: int) -> int:
        return self.long[slot * _LONGS + _BLOCKS]

    def inode(self, slot: int) -> int:
        return self.long[slot * _LONGS + _INO]

    def directory(self, slot: int) -> "_Directory":
        """What is needed of a directory."""
        mark, inode, size, blocks, seconds, nanoseconds, device = _DIRECTORY.unpack_from(self.byte, slot * _SLOT)
        return mark & _MOUNT_ROOT, inode, size, blocks, (seconds, nanoseconds), device


class OpenFiles:
    """Looks at what the links in /proc/<pid>/fd lead to, by what the kernel knows of it: a file whose server is dead
    does not hold us up."""

    def __init__(self) -> None:
        self._answers = _Answers()

    def nameless(self, directory: int, name: str) -> tuple[int, int, int] | None:
        """(st_dev, inode, bytes) of a regular file that has no name any more; None of anything else."""
        answers = self._answers
        if not answers.ask_through(directory, name.encode()):
            return None  # closed meanwhile
        if answers.byte[_TYPE] >> 4 != _REGULAR or answers.word[_NLINK]:
            return None
        device = os.makedev(answers.word[_MAJOR], answers.word[_MAJOR + 1])
        return device, answers.inode(0), answers.block(0) * 512


_Directory = tuple[int, int, int, int, tuple[int, int], int]
"""Not 0 for a mount point; inode, size, blocks, ctime, device."""


class Walk:
    """One walk over one tree. Not thread-safe. Use it as a context manager, or close it."""

    def __init__(
        self,
        root: int,
        *,
        count: Count = Count.BYTES_AND_INODES,
        previous: Remembered | None = None,
        unwritten: bool = False,
        remember: int = 0,
        settled_s: float = SETTLED_S,
    ) -> None:
        """`root` is a fresh descriptor of the directory, which the walk takes over and closes, also when this raises.

        `previous` is what an earlier walk of this tree remembered and `remember` about how many bytes this one may
        remember; a walk for inodes alone uses neither. `settled_s`: how long a directory must have been left alone to
        be remembered. Raises OSError: no directory, or a kernel without statx.
        """
        self._answers = _Answers()
        self._names_only = count is Count.INODES
        self._unwritten = unwritten
        self._remember = self._remember_left = 0 if self._names_only else remember
        self._remembering = self._remember > 0
        self._settled_s = settled_s
        self._pages: dict[int, bytearray] = {}
        self._links_exact = True
        self._blocks = self._inodes = self._directories = self._entries = self._reused = 0
        self._vanished = self._unknown = self._mounts = self._open = self._set_aside = 0
        self._unknown_reason = ""
        self._started_at = self._read_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._complete = False
        self._result: _Record | None = None
        self._frames: list[_Frame] = []
        try:
            self._enter_root(root, previous)
        except BaseException:
            os.close(root)
            raise

    def _enter_root(self, root: int, previous: Remembered | None) -> None:
        answers = self._answers
        if not answers.ask_self(root):
            os.fstat(root)  # raises what the kernel said
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        if not answers.is_directory(0):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        _, inode, size, self._blocks, ctime, self._device = answers.directory(0)
        known = previous.root if previous is not None and previous.device == self._device else None
        frame = _Frame(b"", inode, ctime, None if self._names_only else known)
        self._inodes = self._directories = 1
        frame.fd = root
        self._open = 1
        self._frames.append(frame)
        self._read(frame, size)

    def __enter__(self) -> "Walk":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives up what is open. The tally stays."""
        for frame in self._frames:
            self._shut(frame)
        self._frames.clear()
        self._pages.clear()

    @property
    def tally(self) -> Tally:
        """What was counted up to now."""
        return Tally(
            bytes=None if self._names_only else self._blocks * 512,
            inodes=self._inodes,
            directories=self._directories,
            complete=self._complete,
            vanished=self._vanished,
            unknown=self._unknown,
            unknown_reason=self._unknown_reason,
            mounts=self._mounts,
            links_exact=self._links_exact,
            reused=self._reused,
            started_at=self._started_at,
            read_at=self._read_at,
        )

    @property
    def remembered(self) -> Remembered | None:
        """For the next walk of this tree; None until this one is complete, and when there is nothing."""
        if self._result is None:
            return None
        return Remembered(self._result, self._device, self._remember - self._remember_left)

    def step(self, *, entries: int | None = None, until: float | None = None) -> bool:
        """Walks on: to the end, or for about `entries` more entries, or until time.monotonic() is `until`.

        True when the walk is over. Never raises OSError: what cannot be read is counted as unknown.
        """
        goal = None if entries is None else self._entries + entries
        frames = self._frames
        while frames:
            if goal is not None and self._entries >= goal:
                break
            if until is not None and time.monotonic() >= until:
                break
            frame = frames[-1]
            if frame.pending:
                self._descend(frame)
            elif frame.entries is not None:
                self._read_chunk(frame)
            else:
                self._leave(frame)
        self._read_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        return not frames

    # --- down and up

    def _descend(self, frame: _Frame) -> None:
        name, inode, ctime, old = frame.pending.pop()
        if frame.aside:
            frame.aside -= 1
            self._set_aside -= 1
        child = _Frame(name, inode, ctime, old)
        try:
            child.fd = os.open(name, _OPEN, dir_fd=frame.fd)
        except OSError as error:
            self._lost(frame, error)
            return
        self._open += 1
        self._begin(child)
        if child.pending or child.entries is not None:
            self._frames.append(child)
            if self._open > _OPEN_FRAMES:
                self._park(self._frames[-self._open])
            return
        if self._remembering:
            self._note(frame, child)
        self._shut(child)

    def _begin(self, frame: _Frame) -> None:
        """Looks at what was opened, and starts to read it."""
        if not self._answers.ask_self(frame.fd):
            self._refused(frame, b".")
            return
        mount_point, inode, size, _, ctime, device = self._answers.directory(0)
        if mount_point or device != self._device:
            self._mounts += 1
            if self._names_only:  # which counted it by its name alone
                self._inodes -= 1
                self._directories -= 1
            return
        frame.opened(inode, ctime)
        self._read(frame, size)

    def _read(self, frame: _Frame, size: int) -> None:
        """Reads a directory, if it is small or remembered; else only opens its stream."""
        if frame.same and frame.old is not None and frame.old.names is not None:
            frame.fit = True
            if self._unwritten and frame.old.file_blocks >= 0:
                frame.files, frame.file_blocks = frame.old.files, frame.old.file_blocks
                self._take_over(frame.old)
                self._count(frame, list(frame.old.dirs))
            elif frame.old.names:
                self._count(frame, frame.old.names.split(b"\0"))
            return
        frame.fit = self._remembering and frame.ctime[0] + frame.ctime[1] * 1e-9 + self._settled_s < time.time()
        try:
            if self._names_only or size > _SMALL:
                frame.entries = os.scandir(frame.fd)
                if size <= _SMALL:
                    self._read_chunk(frame)
            else:
                self._count_joined(frame, "\0".join(os.listdir(frame.fd)))
        except OSError as error:
            self._lost(frame, error)

    def _take_over(self, old: _Record) -> None:
        """Counts the files of an unchanged directory by what was remembered of them."""
        self._inodes += old.files
        self._blocks += old.file_blocks
        self._reused += old.files

    def _park(self, frame: _Frame) -> None:
        """Closes a directory that we shall come back to through its child's `..`, having read it to its end."""
        already = len(frame.pending)
        while frame.entries is not None:
            if self._set_aside + len(frame.pending) - already > _SET_ASIDE:
                self._miss(frame, "directories too deep and too wide at once")
                break
            self._read_chunk(frame)
        frame.aside = len(frame.pending)
        self._set_aside += frame.aside
        self._shut(frame)

    def _leave(self, frame: _Frame) -> None:
        """Back to the parent, or to the end."""
        self._frames.pop()
        if self._frames:
            parent = self._frames[-1]
            if self._remembering:
                self._note(parent, frame)
            if parent.fd < 0:
                self._reopen(parent, frame)
        else:
            self._complete = True
            if self._remembering:
                self._result = self._record(frame)
        self._shut(frame)

    def _reopen(self, parent: _Frame, child: _Frame) -> None:
        """Up through `..`, which is followed only to the very directory that we came from: its owner may have moved
        the child to anywhere meanwhile."""
        if child.fd >= 0:
            try:
                fd = os.open("..", _OPEN, dir_fd=child.fd)
            except OSError as error:
                self._lost(parent, error)
            else:
                known = self._answers.ask_self(fd)
                _, inode, _, _, _, device = self._answers.directory(0)
                if known and inode == parent.inode and device == self._device:
                    parent.fd = fd
                    self._open += 1
                    return
                os.close(fd)
        if parent.pending:
            self._miss(parent, "moved during the walk", len(parent.pending))
        self._set_aside -= parent.aside
        parent.aside = 0
        parent.pending.clear()
        parent.fit = False

    def _shut(self, frame: _Frame) -> None:
        if frame.entries is not None:
            frame.entries.close()
            frame.entries = None
        if frame.fd >= 0:
            os.close(frame.fd)
            frame.fd = -1
            self._open -= 1

    # --- counting

    def _read_chunk(self, frame: _Frame) -> None:
        """Reads on in a stream."""
        entries = frame.entries
        assert entries is not None
        try:
            chunk = list(islice(entries, _CHUNK))
        except OSError as error:
            entries.close()
            frame.entries = None
            self._lost(frame, error)
            return
        if len(chunk) < _CHUNK:
            entries.close()
            frame.entries = None
        if self._names_only:
            self._count_names(frame, chunk)
            return
        self._count_joined(frame, "\0".join([entry.name for entry in chunk]))

    def _count_joined(self, frame: _Frame, names: str) -> None:
        """Counts the entries with these names, joined by NUL, of a directory that is being read."""
        if not names:
            return
        joined = os.fsencode(names)
        split = joined.split(b"\0")
        if frame.fit:
            frame.keep(joined, len(split))
        self._count(frame, split)

    def _count(self, frame: _Frame, names: list[bytes]) -> None:
        """Asks for each entry and counts it."""
        answers = self._answers
        self._entries += len(names)
        for start in range(0, len(names), _BATCH):
            batch = names[start : start + _BATCH] if len(names) > _BATCH else names
            count = len(batch)
            refused = answers.ask(frame.fd, batch)
            for slot in refused:
                answers.blank(slot)
                self._refused(frame, batch[slot])
            files, blocks = count - len(refused), answers.blocks(count)
            for slot in answers.special(count):
                if answers.is_directory(slot):
                    self._found_directory(frame, slot, batch[slot])
                elif answers.is_mount_point(slot):
                    self._mounts += 1
                elif slot in refused or self._first_link(frame, slot):
                    continue
                files -= 1
                blocks -= answers.block(slot)
            frame.files += files
            frame.file_blocks += blocks
            self._inodes += files
            self._blocks += blocks

    def _first_link(self, frame: _Frame, slot: int) -> bool:
        """Whether a file with several links is counted here."""
        frame.linked = True
        return self._first(self._answers.inode(slot))

    def _count_names(self, frame: _Frame, chunk: list["os.DirEntry[str]"]) -> None:
        """Counts distinct inode numbers, which the directory itself tells, so that no entry is asked for."""
        self._entries += len(chunk)
        page: bytearray | None = None
        last = -1
        files = 0
        for entry in chunk:
            try:
                directory = entry.is_dir(follow_symlinks=False)
            except OSError as error:  # a file system that does not tell types, so that is_dir has to ask
                self._lost(frame, error)
                continue
            inode = entry.inode()
            if directory:
                self._inodes += 1
                self._directories += 1
                frame.pending.append((os.fsencode(entry.name), inode, (0, 0), None))
                continue
            if inode >> _PAGE_SHIFT != last:
                last = inode >> _PAGE_SHIFT
                page = self._page(last)
            if page is None:
                files += 1
                continue
            at, bit = inode >> 3 & _PAGE_MASK, _BIT[inode & 7]
            held = page[at]
            if not held & bit:
                page[at] = held | bit
                files += 1
        self._inodes += files

    def _first(self, inode: int) -> bool:
        """Whether this inode is seen for the first time."""
        page = self._page(inode >> _PAGE_SHIFT)
        if page is None:
            return True
        at, bit = inode >> 3 & _PAGE_MASK, _BIT[inode & 7]
        if page[at] & bit:
            return False
        page[at] |= bit
        return True

    def _page(self, key: int) -> bytearray | None:
        """The bitmap of 32,768 inode numbers; None when there are too many to tell."""
        page = self._pages.get(key)
        if page is None and len(self._pages) < _PAGES:
            page = self._pages[key] = bytearray(_PAGE_MASK + 1)
        if page is None:
            self._links_exact = False
        return page

    def _found_directory(self, frame: _Frame, slot: int, name: bytes) -> None:
        mount_point, inode, _, blocks, ctime, device = self._answers.directory(slot)
        if mount_point or device != self._device:
            self._mounts += 1
            return
        self._inodes += 1
        self._directories += 1
        self._blocks += blocks
        old = frame.old.dirs.get(name) if frame.old is not None else None
        if self._unwritten and old is not None and old.is_leaf(inode, ctime):
            self._take_over(old)
            self._keep(frame, name, old)
            return
        if frame.fit:
            frame.dirs[name] = None
        frame.pending.append((name, inode, ctime, old))

    def _keep(self, frame: _Frame, name: bytes, old: _Record) -> None:
        """Remembers a subdirectory by the record that there is, as far as there is room."""
        if self._remember_left > 0:
            frame.dirs[name] = old
            self._remember_left -= old.size
        elif frame.fit:
            frame.dirs[name] = None

    # --- what could not be counted

    def _refused(self, frame: _Frame, name: bytes) -> None:
        """statx said no. Asks once more for the reason, which ctypes would make every call pay for."""
        try:
            os.stat(name, dir_fd=frame.fd, follow_symlinks=False)
        except OSError as error:
            self._lost(frame, error)
        else:
            self._miss(frame, "changed while being looked at")

    def _lost(self, frame: _Frame, error: OSError) -> None:
        if error.errno in _GONE:
            self._vanished += 1
            frame.fit = False
        else:
            self._miss(frame, error.strerror or str(error))

    def _miss(self, frame: _Frame, reason: str, parts: int = 1) -> None:
        self._unknown += parts
        self._unknown_reason = self._unknown_reason or reason
        frame.fit = False

    # --- remembering

    def _note(self, parent: _Frame, child: _Frame) -> None:
        record = self._record(child)
        if record is not None:
            parent.dirs[child.name] = record

    def _record(self, frame: _Frame) -> _Record | None:
        """What to remember of a directory that was walked to its end; None when there is nothing worth it."""
        old = frame.old if frame.same else None
        if (
            old is not None and frame.fit and not frame.dirs and self._remember_left > 0
        ):  # a directory of files that is as it was
            old.files = frame.files
            old.file_blocks = -1 if frame.linked else frame.file_blocks
            self._remember_left -= old.size
            return old
        names = None
        if frame.fit and self._remember_left > 0:
            names = old.names if old is not None else b"\0".join(frame.kept)
        if names is None:
            frame.drop_unknown()
            if not frame.dirs:
                return None
        record = _Record(frame, names)
        self._remember_left -= record.size
        return record

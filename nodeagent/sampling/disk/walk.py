"""Counts the bytes and inodes of a directory tree, at about the speed of `du`.

Promises:

1. Nothing outside the tree is opened or counted, whatever its owner changes during the walk. A step down opens one name
   relative to an open descriptor with O_NOFOLLOW. A return must lead to the same directory (device and inode) that the
   walk came from. Mount points are not crossed, including bind mounts of the same device.
2. Bytes are `st_blocks * 512`. Each entry counts one inode, the root as well. A file with several links counts once.
3. Memory and open descriptors do not grow with the tree: see the constants below.
4. What cannot be read counts as unknown, with the first reason. What vanished during the walk does not count.
5. A walk can pause after any chunk and continue later. Closing it closes its descriptors.

Theory of operation. A stack of frames, one for each directory on the way down, replaces recursion. A directory is read
in chunks, with one `statx` for each entry. The subdirectories of a chunk are walked before the next chunk is read. Only
the root and the deepest of `_MAX_OPEN_FRAMES` directories stay open; a closed parent is opened again through its
child's `..`. If the owner has moved or removed that child, it is opened from the root by the names on the way down, so
that the walk loses only directories that are no longer there.

`statx` reads entries in batches, `walk_cache` lets a second walk skip the unchanged directories, and `seen_inodes`
recognizes files with several links. `python -m benchmarks.walk` compares a walk with `du`.
"""

import enum
import errno
import os
import sys
import time
from itertools import islice
from types import TracebackType
from typing import Final, NamedTuple

from nodeagent.sampling.disk import walk_cache
from nodeagent.sampling.disk.seen_inodes import SeenInodes
from nodeagent.sampling.disk.statx import BATCH, StatxBatch
from nodeagent.sampling.disk.walk_cache import DirectoryRecord, Frame, WalkCache

_CHUNK: Final = 1024
"""Entries of a large directory between two checks of limit and deadline: 1 ms of CPU and 0.1 MiB of names."""
_SMALL_BYTES: Final = 65536
"""A directory of at most this size is read at once, which saves 70 ns for each entry. On ext4 it has at most 5,461
entries (12 bytes each), on xfs and btrfs fewer: 7 ms and 0.4 MiB."""
_MAX_OPEN_FRAMES: Final = 64
"""Directories open at once; one with more than `_CHUNK` entries needs two descriptors. 64 is far below the usual limit
of 1024 descriptors, and above the depth of usual trees."""
_MAX_SET_ASIDE: Final = 65536
"""Subdirectories in memory because their parent was closed early. Only a chain of directories that are all deeper than
`_MAX_OPEN_FRAMES` and wider than `_CHUNK` reaches it; the rest then counts as unknown."""
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
# As in os.fsencode, whose call costs a small directory 0.3 us more.
_ENCODING: Final = sys.getfilesystemencoding()
_ENCODE_ERRORS: Final = sys.getfilesystemencodeerrors()
# Errors for an entry that was removed or replaced after its name was read.
_GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})
_MOVED: Final = "moved during the walk"


class CountMode(enum.Enum):
    """What a walk counts."""

    BYTES_AND_INODES = "bytes and inodes"
    INODES = "inodes"
    """No `statx`, only names: a third of the cost. Files with several links still count once."""


class TreeUsage(NamedTuple):
    """The numbers of a walk so far."""

    bytes: int | None
    """Allocated, st_blocks * 512. None if only inodes were counted."""
    inodes: int
    directories: int
    """Of these inodes; the root of the tree counts."""
    complete: bool
    """The whole tree was walked. False: the numbers are a lower bound."""
    vanished: int
    """Entries that were removed or replaced before the walk reached them."""
    unknown: int
    """Files and directories that could not be read, of unknown size."""
    unknown_reason: str
    """The reason of the first one; empty if there is none."""
    mounts: int
    """Mount points. They are not entered and not counted."""
    links_exact: bool
    """False: so many files with several links that some may count more than once."""
    reused: int
    """Files whose numbers come from the cache (`unwritten`)."""
    started_at: float
    """CLOCK_BOOTTIME."""
    read_at: float
    """When the last number was read, CLOCK_BOOTTIME."""


class TreeWalk:
    """One walk of one tree. Not thread-safe. Use it as a context manager, or close it."""

    def __init__(
        self,
        root: int,
        *,
        count: CountMode = CountMode.BYTES_AND_INODES,
        previous: WalkCache | None = None,
        unwritten: bool = False,
        cache_bytes: int = 0,
        settled_s: float = walk_cache.SETTLED_S,
    ) -> None:
        """The walk owns `root`, a descriptor of the directory, and closes it, also if this raises.

        `previous` is the cache of an earlier walk of this tree; `cache_bytes` limits the cache of this one,
        approximately. A walk that counts inodes alone uses neither. `settled_s`: minimum age of a directory's last
        change for the cache. Raises OSError: not a directory, or a kernel without statx.
        """
        self._statx = StatxBatch()
        self._names_only = count is CountMode.INODES
        self._unwritten = unwritten
        self._cache_bytes = self._cache_left = 0 if self._names_only else cache_bytes
        self._caching = self._cache_bytes > 0
        self._settled_s = settled_s
        self._seen = SeenInodes()
        self._blocks = self._inodes = self._directories = self._entries = self._reused = 0
        self._vanished = self._unknown = self._mounts = self._open = self._set_aside = 0
        self._unknown_reason = ""
        self._started_at = self._read_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._complete = False
        self._root_record: DirectoryRecord | None = None
        self._frames: list[Frame] = []
        try:
            self._enter_root(root, previous)
        except BaseException:
            os.close(root)
            raise

    def _enter_root(self, root: int, previous: WalkCache | None) -> None:
        statx = self._statx
        if not statx.read_directory(root):
            os.fstat(root)  # raises the error of the kernel
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        if not statx.is_directory(0):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        _, inode, size, self._blocks, ctime, self._device = statx.directory(0)
        known = previous.root if previous is not None and previous.device == self._device else None
        frame = Frame(b"", inode, ctime, None if self._names_only else known)
        self._inodes = self._directories = 1
        frame.fd = root
        self._open = 1
        self._frames.append(frame)
        self._read(frame, size)

    def __enter__(self) -> "TreeWalk":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all descriptors. The usage stays."""
        for frame in self._frames:
            self._close_frame(frame)
        self._frames.clear()
        self._seen.clear()

    @property
    def usage(self) -> TreeUsage:
        """The numbers so far."""
        return TreeUsage(
            bytes=None if self._names_only else self._blocks * 512,
            inodes=self._inodes,
            directories=self._directories,
            complete=self._complete,
            vanished=self._vanished,
            unknown=self._unknown,
            unknown_reason=self._unknown_reason,
            mounts=self._mounts,
            links_exact=self._seen.exact,
            reused=self._reused,
            started_at=self._started_at,
            read_at=self._read_at,
        )

    @property
    def cache(self) -> WalkCache | None:
        """For the next walk of this tree; None until this walk is complete, and if nothing could be cached."""
        if self._root_record is None:
            return None
        return WalkCache(self._root_record, self._device, self._cache_bytes - self._cache_left)

    def step(self, *, entries: int | None = None, until: float | None = None) -> bool:
        """Continue to the end, for about `entries` more entries, or until time.monotonic() is `until`.

        Returns True at the end of the tree. Never raises OSError: what cannot be read counts as unknown.
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

    def _descend(self, frame: Frame) -> None:
        name, inode, ctime, cached = frame.pending.pop()
        if frame.set_aside:
            frame.set_aside -= 1
            self._set_aside -= 1
        child = Frame(name, inode, ctime, cached)
        try:
            child.fd = os.open(name, _OPEN, dir_fd=frame.fd)
        except OSError as error:
            self._count_error(frame, error)
            return
        self._enter(child)
        if child.pending or child.entries is not None:
            self._frames.append(child)
            self._open += 1
            if self._open > _MAX_OPEN_FRAMES:
                self._park(self._frames[1 - self._open])  # the first after the root, which stays open
            return
        if self._caching:
            self._cache_child(frame, child)
        os.close(child.fd)

    def _enter(self, frame: Frame) -> None:
        """Begin to read a directory that was just opened."""
        if not self._statx.read_directory(frame.fd):
            self._count_failure(frame, b".")
            return
        mount_point, inode, size, _, ctime, device = self._statx.directory(0)
        if mount_point or device != self._device:
            self._mounts += 1
            if self._names_only:  # the parent has counted it by its name alone
                self._inodes -= 1
                self._directories -= 1
            return
        frame.set_identity(inode, ctime)
        self._read(frame, size)

    def _read(self, frame: Frame, size: int) -> None:
        """Read a small or cached directory; open the stream of a large one."""
        if frame.unchanged and frame.cached is not None and frame.cached.names is not None:
            frame.cacheable = True
            if self._unwritten and frame.cached.file_blocks >= 0:
                frame.files, frame.file_blocks = frame.cached.files, frame.cached.file_blocks
                self._reuse_files(frame.cached)
                self._count(frame, list(frame.cached.dirs))
            elif frame.cached.names:
                self._count(frame, frame.cached.names.split(b"\0"))
            return
        frame.cacheable = self._caching and frame.ctime[0] + frame.ctime[1] * 1e-9 + self._settled_s < time.time()
        try:
            if self._names_only or size > _SMALL_BYTES:
                frame.entries = os.scandir(frame.fd)
                if size <= _SMALL_BYTES:
                    self._read_chunk(frame)
            else:
                self._count_joined(frame, "\0".join(os.listdir(frame.fd)))
        except OSError as error:
            self._count_error(frame, error)

    def _reuse_files(self, cached: DirectoryRecord) -> None:
        """Count the files of an unchanged directory from the cache."""
        self._inodes += cached.files
        self._blocks += cached.file_blocks
        self._reused += cached.files

    def _park(self, frame: Frame) -> None:
        """Read a directory to its end and close it. The walk returns to it through its child's `..`."""
        already = len(frame.pending)
        while frame.entries is not None:
            if self._set_aside + len(frame.pending) - already > _MAX_SET_ASIDE:
                self._count_unknown(frame, "directories too deep and too wide at once")
                break
            self._read_chunk(frame)
        frame.set_aside = len(frame.pending)
        self._set_aside += frame.set_aside
        self._close_frame(frame)

    def _leave(self, frame: Frame) -> None:
        """Return to the parent, or end the walk at the root."""
        self._frames.pop()
        if self._frames:
            parent = self._frames[-1]
            if self._caching:
                self._cache_child(parent, frame)
            if parent.fd < 0 and self._reopen(parent, b"..", frame):
                self._return_from_root()
        else:
            self._complete = True
            if self._caching:
                self._root_record = self._make_record(frame)
        self._close_frame(frame)

    def _reopen(self, closed: Frame, name: bytes, near: Frame) -> str:
        """Open a closed directory by its name in an open one. Returns why that failed, also if the name now leads to
        another directory; empty if it is open."""
        try:
            fd = os.open(name, _OPEN, dir_fd=near.fd)
        except OSError as error:
            return _MOVED if error.errno in _GONE else error.strerror or str(error)
        known = self._statx.read_directory(fd)
        mount_point, inode, _, _, _, device = self._statx.directory(0)
        if not known or mount_point or inode != closed.inode or device != self._device:
            os.close(fd)
            return _MOVED
        closed.fd = fd
        self._open += 1
        return ""

    def _return_from_root(self) -> None:
        """Open the last frame from the root, or the deepest one that is still there; the rest is lost."""
        frames = self._frames
        self._entries += len(frames)
        for depth in range(1, len(frames)):
            above = frames[depth - 1]
            reason = self._reopen(frames[depth], frames[depth].name, above)
            if reason:
                for lost in frames[depth:]:
                    self._set_aside -= lost.set_aside
                    if lost.pending:
                        self._count_unknown(lost, reason, len(lost.pending))
                del frames[depth:]
                return
            if depth > 1:
                self._close_frame(above)

    def _close_frame(self, frame: Frame) -> None:
        if frame.entries is not None:
            frame.entries.close()
            frame.entries = None
        if frame.fd >= 0:
            os.close(frame.fd)
            frame.fd = -1
            self._open -= 1

    # --- counting

    def _read_chunk(self, frame: Frame) -> None:
        """Read and count the next chunk of a large directory."""
        entries = frame.entries
        assert entries is not None
        try:
            chunk = list(islice(entries, _CHUNK))
        except OSError as error:
            entries.close()
            frame.entries = None
            self._count_error(frame, error)
            return
        if len(chunk) < _CHUNK:
            entries.close()
            frame.entries = None
        if self._names_only:
            self._count_names(frame, chunk)
            return
        self._count_joined(frame, "\0".join([entry.name for entry in chunk]))

    def _count_joined(self, frame: Frame, names: str) -> None:
        """Count the entries with these names, joined by NUL, and add them to the cache."""
        if not names:
            return
        joined = names.encode(_ENCODING, _ENCODE_ERRORS)
        split = joined.split(b"\0")
        if frame.cacheable:
            frame.add_names(joined, len(split))
        self._count(frame, split)

    def _count(self, frame: Frame, names: list[bytes]) -> None:
        """Read each entry with `statx` and count it."""
        self._entries += len(names)
        if len(names) <= BATCH:
            self._count_batch(frame, names)
            return
        for start in range(0, len(names), BATCH):
            self._count_batch(frame, names[start : start + BATCH])

    def _count_batch(self, frame: Frame, names: list[bytes]) -> None:
        statx = self._statx
        failed = statx.read_entries(frame.fd, names)
        for slot in failed:
            self._count_failure(frame, names[slot])
        files = len(names)
        blocks, special = statx.sums(files)
        for slot in special:
            if slot in failed:
                pass
            elif statx.is_directory(slot):
                self._found_directory(frame, slot, names[slot])
            elif statx.is_mount_point(slot):
                self._mounts += 1
            elif self._first_link(frame, slot):
                continue
            files -= 1
            blocks -= statx.block(slot)
        frame.files += files
        frame.file_blocks += blocks
        self._inodes += files
        self._blocks += blocks

    def _first_link(self, frame: Frame, slot: int) -> bool:
        """True if this is the first link to a file with several links."""
        frame.linked = True
        return self._seen.add((self._statx.inode(slot),)) == 1

    def _count_names(self, frame: Frame, chunk: list["os.DirEntry[str]"]) -> None:
        """Count distinct inode numbers, which the directory lists, so that no `statx` is needed."""
        self._entries += len(chunk)
        inodes: list[int] = []
        for entry in chunk:
            try:
                directory = entry.is_dir(follow_symlinks=False)
            except OSError as error:  # a file system that lists no types, so that is_dir calls stat
                self._count_error(frame, error)
                continue
            if directory:
                self._inodes += 1
                self._directories += 1
                frame.pending.append((os.fsencode(entry.name), entry.inode(), (0, 0), None))
            else:
                inodes.append(entry.inode())
        self._inodes += self._seen.add(inodes)

    def _found_directory(self, frame: Frame, slot: int, name: bytes) -> None:
        mount_point, inode, _, blocks, ctime, device = self._statx.directory(slot)
        if mount_point or device != self._device:
            self._mounts += 1
            return
        self._inodes += 1
        self._directories += 1
        self._blocks += blocks
        cached = frame.cached.dirs.get(name) if frame.cached is not None else None
        if self._unwritten and cached is not None and cached.is_leaf(inode, ctime):
            self._reuse_files(cached)
            self._cache_leaf(frame, name, cached)
            return
        if frame.cacheable:
            frame.dirs[name] = None
        frame.pending.append((name, inode, ctime, cached))

    def _cache_leaf(self, frame: Frame, name: bytes, cached: DirectoryRecord) -> None:
        """Keep the existing cache of a subdirectory if the limit allows."""
        if self._cache_left > 0:
            frame.dirs[name] = cached
            self._cache_left -= cached.size
        elif frame.cacheable:
            frame.dirs[name] = None

    # --- unknown and vanished entries

    def _count_failure(self, frame: Frame, name: bytes) -> None:
        """Count a failed `statx`. `os.stat` finds the reason; errno through ctypes would slow down every call."""
        try:
            os.stat(name, dir_fd=frame.fd, follow_symlinks=False)
        except OSError as error:
            self._count_error(frame, error)
        else:
            self._count_unknown(frame, "changed during the walk")

    def _count_error(self, frame: Frame, error: OSError) -> None:
        if error.errno in _GONE:
            self._vanished += 1
            frame.cacheable = False
        else:
            self._count_unknown(frame, error.strerror or str(error))

    def _count_unknown(self, frame: Frame, reason: str, parts: int = 1) -> None:
        self._unknown += parts
        self._unknown_reason = self._unknown_reason or reason
        frame.cacheable = False

    # --- the cache

    def _cache_child(self, parent: Frame, child: Frame) -> None:
        record = self._make_record(child)
        if record is not None:
            parent.dirs[child.name] = record

    def _make_record(self, frame: Frame) -> DirectoryRecord | None:
        """What to cache of a directory after its end; None if nothing, or if the limit is reached."""
        if self._cache_left <= 0:
            frame.cacheable = False
        record = frame.record()
        if record is not None:
            self._cache_left -= record.size
        return record

"""Runs statx(2) on many entries of a directory, at little more than the cost of the system calls.

Theory of operation. `starmap` calls a ctypes function for a batch of entries, and each result fills a slot of one
buffer. The wanted fields of all slots are then read at once. `os.stat` spends 0.2 us of 1.3 us on an object of twenty
fields, of which the walk needs three; a loop in Python costs as much again. `statx` has one layout on every
architecture, and it alone marks mount points of the same device. (`fstatat` takes 4% less time and does neither.)
"""

import ctypes
import os
import struct
import sys
from itertools import repeat, starmap
from typing import Final, NamedTuple

# Entries of one batch: a buffer of 64 KiB. 64 entries cost 1% more CPU, 1024 the same.
BATCH: Final = 256

# AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT | AT_STATX_DONT_SYNC: with the last one the kernel reports a mount point without
# a request to its server, which may hang (FUSE, NFS). Local file systems ignore the flag.
_AT_FOLLOW: Final = 0x800 | 0x4000
_AT_NOFOLLOW: Final = 0x100 | _AT_FOLLOW
_AT_EMPTY_PATH: Final = 0x1000
# STATX_TYPE | NLINK | CTIME | INO | SIZE | BLOCKS; the device and the attribute MOUNT_ROOT are always set.
_WANTED: Final = 0x0001 | 0x0004 | 0x0080 | 0x0100 | 0x0200 | 0x0400
_MOUNT_ROOT: Final = 0x2000
# Offsets in struct statx (256 bytes), in units of 8, 4 and 1 bytes (include/uapi/linux/stat.h).
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
"""The byte of stx_attributes that contains MOUNT_ROOT."""
_ONE: Final = struct.pack("=I", 1)
_REGULAR: Final = 8
_IS_DIRECTORY: Final = bytes(byte >> 4 == 4 for byte in range(256))


Directory = tuple[int, int, int, int, tuple[int, int], int]
"""Not 0 for a mount point; inode, size, blocks, ctime, device. A plain tuple, because each directory needs one."""


class StatxBatch:
    """The statx results of one batch of entries, until the next batch replaces them."""

    __slots__ = ("_byte", "_flags", "_long", "_mask", "_references", "_statx", "_word")

    def __init__(self) -> None:
        self._byte = bytearray(BATCH * _SLOT)
        self._long, self._word = memoryview(self._byte).cast("Q"), memoryview(self._byte).cast("I")
        self._statx = ctypes.CDLL(None).statx
        self._flags, self._mask = repeat(_AT_NOFOLLOW), repeat(_WANTED)
        # Made once, because it costs 12 ns. The references keep the buffer alive.
        buffer = (ctypes.c_char * len(self._byte)).from_buffer(self._byte)
        self._references = [ctypes.byref(buffer, slot * _SLOT) for slot in range(BATCH)]

    def read_entries(self, fd: int, names: list[bytes]) -> list[int]:
        """Read the entries with these names, at most BATCH. Returns the slots that failed, which are zero then."""
        # starmap over zip reuses one tuple, unlike map: 2% less.
        replies = list(starmap(self._statx, zip(repeat(fd), names, self._flags, self._mask, self._references)))  # noqa: RUF058
        if not any(replies):
            return []
        failed = [slot for slot, reply in enumerate(replies) if reply]
        for slot in failed:
            self._byte[slot * _SLOT : (slot + 1) * _SLOT] = bytes(_SLOT)
        return failed

    def read_directory(self, fd: int) -> bool:
        """Read an open directory into slot 0. False if that failed."""
        reply: int = self._statx(fd, b"", _AT_NOFOLLOW | _AT_EMPTY_PATH, _WANTED, self._references[0])
        return reply == 0

    def read_link_target(self, fd: int, name: bytes) -> bool:
        """Read the target of a link into slot 0. False if that failed."""
        reply: int = self._statx(fd, name, _AT_FOLLOW, _WANTED, self._references[0])
        return reply == 0

    def sums(self, count: int) -> tuple[int, list[int]]:
        """(blocks, special) of the first `count` slots: the sum of their blocks, and the slots that failed or that are
        a directory, a mount point, or a file with more than one link."""
        end = count * _SLOT
        blocks = sum(self._long[_BLOCKS : count * _LONGS : _LONGS].tolist())
        types = self._byte[_TYPE:end:_SLOT].translate(_IS_DIRECTORY)
        links = bytes(self._word[_NLINK : count * _WORDS : _WORDS])
        if links == _ONE * count and 1 not in types and self._byte[_MARK:end:_SLOT].count(0) == count:
            return blocks, []
        return blocks, [
            slot
            for slot in range(count)
            if types[slot] or self.is_mount_point(slot) or links[slot * 4 : slot * 4 + 4] != _ONE
        ]

    def is_mount_point(self, slot: int) -> bool:
        return self._byte[slot * _SLOT + _MARK] & (_MOUNT_ROOT >> 8) != 0

    def is_directory(self, slot: int) -> bool:
        return self._byte[slot * _SLOT + _TYPE] >> 4 == 4

    def block(self, slot: int) -> int:
        """In units of 512 bytes."""
        return self._long[slot * _LONGS + _BLOCKS]

    def inode(self, slot: int) -> int:
        return self._long[slot * _LONGS + _INO]

    def directory(self, slot: int) -> Directory:
        mark, inode, size, blocks, seconds, nanoseconds, device = _DIRECTORY.unpack_from(self._byte, slot * _SLOT)
        return mark & _MOUNT_ROOT, inode, size, blocks, (seconds, nanoseconds), device

    def deleted_file(self) -> "DeletedFile | None":
        """Slot 0 if it is a regular file without a name, else None."""
        if self._byte[_TYPE] >> 4 != _REGULAR or self._word[_NLINK]:
            return None
        device = os.makedev(self._word[_MAJOR], self._word[_MAJOR + 1])
        return DeletedFile(device, self.inode(0), self.block(0) * 512)


class DeletedFile(NamedTuple):
    """A file that was deleted but is still open."""

    device: int
    """st_dev."""
    inode: int
    bytes: int


class OpenFiles:
    """Reads the targets of the links in /proc/<pid>/fd, from the kernel's cache alone: a dead file server does not
    block the scan."""

    def __init__(self) -> None:
        self._statx = StatxBatch()

    def read(self, directory: int, name: str) -> tuple[bool, DeletedFile | None]:
        """(whether the kernel shows the target, the target if it is a deleted regular file)."""
        readable = self._statx.read_link_target(directory, name.encode())
        return readable, self._statx.deleted_file() if readable else None

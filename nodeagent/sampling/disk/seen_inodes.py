"""A set of inode numbers, so that a walk counts a file with several links once.

Bitmaps of 32,768 inode numbers store the set, 4 KiB each, at most 16 MiB. Inode numbers are dense (ext4, xfs, btrfs):
10 million files take 1.3 MiB. Beyond the limit every link counts, and `exact` is False.
"""

from collections.abc import Iterable
from typing import Final

_PAGE_SHIFT: Final = 15
_PAGE_MASK: Final = (1 << (_PAGE_SHIFT - 3)) - 1
_PAGES: Final = 4096
_BIT: Final = tuple(1 << i for i in range(8))


class SeenInodes:
    """Inode numbers of one file system."""

    def __init__(self) -> None:
        self.exact = True
        """False: the set is full, so that some inodes may have been counted more than once."""
        self._pages: dict[int, bytearray] = {}

    def clear(self) -> None:
        """Drop all numbers; `exact` stays."""
        self._pages.clear()

    def add(self, inodes: Iterable[int]) -> int:
        """Add these numbers. Returns how many of them are new."""
        page: bytearray | None = None
        last = -1
        new = 0
        for inode in inodes:
            if inode >> _PAGE_SHIFT != last:
                last = inode >> _PAGE_SHIFT
                page = self._page(last)
            if page is None:
                new += 1
                continue
            at, bit = inode >> 3 & _PAGE_MASK, _BIT[inode & 7]
            byte = page[at]
            if not byte & bit:
                page[at] = byte | bit
                new += 1
        return new

    def _page(self, key: int) -> bytearray | None:
        """The bitmap with this number; None if there are too many."""
        page = self._pages.get(key)
        if page is None and len(self._pages) < _PAGES:
            page = self._pages[key] = bytearray(_PAGE_MASK + 1)
        if page is None:
            self.exact = False
        return page

"""Tells files with several links that were counted already from those that are seen for the first time.

They are remembered in bitmaps of 32,768 inode numbers, 4 KiB each and at most 16 MiB. Inode numbers are dense (ext4,
xfs, btrfs), so that 10 million such files take 1.3 MiB. Beyond it each link is counted, and `exact` says so.
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
        """False: there were so many that some may have been taken for new ones."""
        self._pages: dict[int, bytearray] = {}

    def clear(self) -> None:
        """Forgets all; `exact` stays."""
        self._pages.clear()

    def new(self, inodes: Iterable[int]) -> int:
        """How many of these are seen for the first time; now they have been seen."""
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
            held = page[at]
            if not held & bit:
                page[at] = held | bit
                new += 1
        return new

    def _page(self, key: int) -> bytearray | None:
        """The bitmap with this number; None when there are too many."""
        page = self._pages.get(key)
        if page is None and len(self._pages) < _PAGES:
            page = self._pages[key] = bytearray(_PAGE_MASK + 1)
        if page is None:
            self.exact = False
        return page

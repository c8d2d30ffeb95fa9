"""Files that are read again and again, kept open.

Promises:

1. `read` returns the content of now: the kernel makes the text of a /proc or cgroup file again for each pread at offset
   0.
2. A descriptor whose cgroup was removed is closed and the path opened again, so a cgroup that was made again is read.
3. At most `limit` descriptors; beyond it files are opened, read and closed.
4. No descriptor of the process leaks: `close` and `drop` close what they drop.

Not thread-safe: one owner.
"""

import os
from collections.abc import Sequence
from typing import Final

from nodeagent.sampling.hostfs import host as hostfs
from nodeagent.sampling.hostfs.host import Host

# Larger than the files that are read most (meminfo 1.5 KiB, a v2 memory.stat 1.7 KiB), small enough to be allocated
# without a mmap.
_READ_BYTES: Final = 8192
# A file that is one number: 19 digits and a newline.
_NUMBER_BYTES: Final = 32


class FdCache:
    """Open descriptors by path."""

    def __init__(self, host: Host, *, limit: int) -> None:
        self._host = host
        self._limit = limit
        self._descriptors: dict[str, int] = {}
        self._numbers: tuple[Sequence[str], list[int]] | None = None
        """The last argument of `numbers` and its descriptors; None as soon as one of them was closed."""
        self.closed = 0
        """How many descriptors were closed: while it is unchanged, every file is the one that was opened first."""

    def __len__(self) -> int:
        return len(self._descriptors)

    def read(self, path: str, size: int = _READ_BYTES) -> bytes:
        """The whole content now; `size` is its usual maximum. Raises Unreadable."""
        descriptor = self._descriptors.get(path)
        if descriptor is None:
            return self._read_new(path)
        try:
            data = os.pread(descriptor, size, 0)
            if len(data) == size:
                os.lseek(descriptor, 0, os.SEEK_SET)
                data = hostfs.read_all(descriptor)
        except OSError:
            # ENODEV: the cgroup is gone. Whatever the error is, opening the path again shows the state of now.
            self.drop(path)
            return self._read_new(path)
        return data

    def numbers(self, paths: Sequence[str]) -> list[bytes] | None:
        """The content now of files with one number each, in their order; None unless all of them are open and still
        there. For the same sequence object again it costs little more than the system calls: half of `read`."""
        if self._numbers is None or self._numbers[0] is not paths:
            if not all(path in self._descriptors for path in paths):
                return None
            self._numbers = (paths, [self._descriptors[path] for path in paths])
        pread = os.pread
        try:
            return [pread(descriptor, _NUMBER_BYTES, 0) for descriptor in self._numbers[1]]
        except OSError:
            return None

    def _read_new(self, path: str) -> bytes:
        descriptor = self._host.open(path)
        keep = len(self._descriptors) < self._limit
        try:
            data = hostfs.read_all(descriptor)
        except OSError as error:
            keep = False
            raise hostfs.unreadable(path, error) from error
        finally:
            if keep:
                self._descriptors[path] = descriptor
            else:
                os.close(descriptor)
        return data

    def drop(self, *paths: str) -> None:
        """Close the descriptors of these paths, if they are open."""
        for path in paths:
            descriptor = self._descriptors.pop(path, None)
            if descriptor is not None:
                self._numbers = None
                self.closed += 1
                os.close(descriptor)

    def close(self) -> None:
        """Close all."""
        self.drop(*list(self._descriptors))

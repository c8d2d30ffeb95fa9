"""Files that are read again and again, kept open.

Promises:

1. `read` gives the content of now: the kernel makes the text of a /proc or cgroup file anew for each pread at offset 0.
2. A descriptor whose cgroup was removed is closed and the path opened again, so a re-made cgroup is read, not missed.
3. Never more than `limit` descriptors; beyond it files are opened, read and closed.
4. A descriptor of the process is never leaked: `close` and `forget` close what they drop.
"""

import os
from collections.abc import Sequence
from typing import Final

from nodeagent.sampling.hostfs.host import Host, Unreadable, read_all, unreadable

# Larger than the hot files (meminfo 1.5 KiB, a v2 memory.stat 1.7 KiB), small enough to be allocated without a mmap.
_SIZE: Final = 8192
# A file that is one number: 19 digits and a newline.
_NUMBER: Final = 32


class FdCache:
    """Descriptors by path. Not thread-safe: one owner."""

    def __init__(self, host: Host, *, limit: int) -> None:
        self._host = host
        self._limit = limit
        self._open: dict[str, int] = {}
        self._row: tuple[Sequence[str], list[int]] | None = None
        """What `numbers` was asked for last; None as soon as one of its descriptors may be another file's."""
        self.closed = 0
        """How many descriptors were closed: as long as it is the same every file is the one that was opened first."""

    def __len__(self) -> int:
        return len(self._open)

    def read(self, path: str, size: int = _SIZE) -> bytes:
        """The whole content now; `size` is what it usually fits in. Raises Unreadable."""
        descriptor = self._open.get(path)
        if descriptor is None:
            return self._read_new(path)
        try:
            data = os.pread(descriptor, size, 0)
            if len(data) == size:
                os.lseek(descriptor, 0, os.SEEK_SET)
                data = read_all(descriptor)
        except OSError:
            # ENODEV: the cgroup is gone. Whatever it is, opening again tells what is true now.
            self.forget(path)
            return self._read_new(path)
        return data

    def numbers(self, paths: Sequence[str]) -> list[bytes] | None:
        """The content now of files that are one number each, in their order; None unless all of them are kept and still
        there. For the same sequence again it costs little more than the system calls: half of `read` for each."""
        row = self._row
        if row is None or row[0] is not paths:
            kept = self._open
            if not all(path in kept for path in paths):
                return None
            row = self._row = (paths, [kept[path] for path in paths])
        pread = os.pread
        try:
            return [pread(descriptor, _NUMBER, 0) for descriptor in row[1]]
        except OSError:
            return None

    def _read_new(self, path: str) -> bytes:
        descriptor = self._host.open(path)
        keep = len(self._open) < self._limit
        try:
            data = read_all(descriptor)
        except OSError as error:
            keep = False
            raise unreadable(path, error) from error
        finally:
            if keep:
                self._open[path] = descriptor
            else:
                os.close(descriptor)
        return data

    def forget(self, *paths: str) -> None:
        """Close these, if they are open."""
        for path in paths:
            descriptor = self._open.pop(path, None)
            if descriptor is not None:
                self._row = None
                self.closed += 1
                os.close(descriptor)

    def close(self) -> None:
        """Close all."""
        self.forget(*list(self._open))


__all__ = ["FdCache", "Unreadable"]

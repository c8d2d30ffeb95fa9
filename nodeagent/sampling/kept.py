"""Files that are read again and again, kept open.

Promises:

1. `read` gives the content of now: the kernel makes the text of a /proc or cgroup file anew for each pread at offset 0.
2. A descriptor whose cgroup was removed is closed and the path opened again, so a re-made cgroup is read, not missed.
3. Never more than `limit` descriptors; beyond it files are opened, read and closed.
4. A descriptor of the process is never leaked: `close` and `forget` close what they drop.
"""

import os

from nodeagent.lean import Final
from nodeagent.sampling.host import Host, Unreadable, read_all, unreadable

# Larger than the hot files (meminfo 1.5 KiB, a v2 memory.stat 1.7 KiB), small enough to be allocated without a mmap.
_SIZE: Final = 8192


class KeptFiles:
    """Descriptors by path. Not thread-safe: one owner."""

    def __init__(self, host: Host, *, limit: int) -> None:
        self._host = host
        self._limit = limit
        self._open: dict[str, int] = {}

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
            os.close(self._open.pop(path))
            return self._read_new(path)
        return data

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
                os.close(descriptor)

    def close(self) -> None:
        """Close all."""
        self.forget(*list(self._open))


__all__ = ["KeptFiles", "Unreadable"]

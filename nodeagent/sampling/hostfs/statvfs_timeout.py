"""statvfs with a timeout: a dead NFS or FUSE mount blocks one thread, never the loop.

Promises:

1. A call returns or raises within the deadline, whatever the mount does.
2. Each path has at most one outstanding call. While it hangs, every further call fails at once and reports for how long
   it has been hanging.
3. A result that comes after its deadline is dropped; the next call reads again.

The threads are daemons, because no thread that hangs in the kernel can be ended and it must not keep the process alive.
"""

import errno
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final

from nodeagent.runtime import workers
from nodeagent.sampling.hostfs.host import FileSystem, Statvfs, Unreadable

# A local file system answers in microseconds, a healthy NFS server in some ms. Each dead mount delays one sample by at
# most this.
STATVFS_DEADLINE_S: Final = 0.2
# From here on the thread is reported as stuck too. The signal is unknown since the deadline; a slow disk recovers.
STATVFS_STUCK_S: Final = 5.0


class StatvfsWithTimeout:
    """Calls `statvfs` in a separate thread for each path. One caller."""

    def __init__(
        self,
        statvfs: Statvfs,
        *,
        deadline_s: float = STATVFS_DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._statvfs = statvfs
        self._deadline_s = deadline_s
        self._clock = clock
        self._workers: dict[str, _PathWorker] = {}

    def __call__(self, path: str) -> FileSystem:
        """The result of `statvfs`. Raises Unreadable, with ETIMEDOUT after the deadline."""
        worker = self._workers.get(path)
        if worker is None:
            worker = self._workers[path] = _PathWorker(self._statvfs, path, self._clock)
        return worker.call(self._deadline_s)

    @property
    def hanging(self) -> tuple[str, ...]:
        """Paths whose call has not returned."""
        return tuple(path for path, worker in self._workers.items() if worker.hanging)

    def close(self) -> None:
        """End the threads that do not hang."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()


class _PathWorker:
    """One path and its thread."""

    def __init__(self, statvfs: Statvfs, path: str, clock: Callable[[], float]) -> None:
        self._statvfs, self._path, self._clock = statvfs, path, clock
        self._requests: SimpleQueue[bool] = SimpleQueue()
        self._results: SimpleQueue[FileSystem | Unreadable] = SimpleQueue()
        self._called_at: float | None = None
        """None: no call is outstanding."""
        self._thread = workers.make_thread(self._work, name=f"statvfs {path}")
        workers.start(self._thread)

    def _work(self) -> None:
        while self._requests.get():
            try:
                with workers.step("statvfs", limit_s=STATVFS_STUCK_S):
                    result: FileSystem | Unreadable = self._statvfs(self._path)
            except Unreadable as error:
                result = error
            except Exception as error:  # without a result the path would hang for ever
                result = Unreadable(self._path, 0, f"{type(error).__name__}: {error}")
            self._results.put(result)

    @property
    def hanging(self) -> bool:
        return self._called_at is not None and self._results.empty()

    def call(self, deadline_s: float) -> FileSystem:
        if not workers.start(self._thread):
            raise Unreadable(self._path, errno.EAGAIN, "no PID left for a statvfs thread")
        if self.hanging:
            raise self._timeout()
        if self._called_at is not None:
            self._results.get()  # late: it shows an earlier state
        self._called_at = self._clock()
        self._requests.put(True)
        try:
            result = self._results.get(timeout=deadline_s)
        except Empty as error:
            raise self._timeout() from error
        self._called_at = None
        if isinstance(result, Unreadable):
            raise result
        return result

    def _timeout(self) -> Unreadable:
        since_s = self._clock() - (self._called_at or 0.0)
        return Unreadable(self._path, errno.ETIMEDOUT, f"statvfs has not answered for {since_s:.1f} s: a dead mount?")

    def close(self) -> None:
        self._requests.put(False)

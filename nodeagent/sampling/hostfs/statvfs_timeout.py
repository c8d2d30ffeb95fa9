"""statvfs with a deadline: a dead NFS or FUSE mount costs one thread, never the loop.

Promises:

1. A call returns or raises within the deadline, whatever the mount does.
2. One call is outstanding for each path: while it hangs no other is made, and every further one fails at once with how
   long it has been hanging.
3. An answer that comes after its deadline is thrown away; the next call asks anew.

The threads are daemons, because nothing can end a thread that hangs in the kernel: it must not keep the process.
"""

import errno
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final

from nodeagent.runtime import workers
from nodeagent.sampling.hostfs.host import FileSystem, Statvfs, Unreadable

# A local file system answers in microseconds, a healthy NFS server in some ms. A sample is late by at most this for
# each dead mount, and only once.
DEADLINE_S: Final = 0.2
# From here on the thread is told of, too: the signal is unknown since the deadline, and a slow disk comes back.
STUCK_S: Final = 5.0


class StatvfsWithTimeout:
    """Calls `read` in a thread of its own for each path. One caller."""

    def __init__(
        self, read: Statvfs, *, deadline_s: float = DEADLINE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._deadline_s = deadline_s
        self._clock = clock
        self._askers: dict[str, _Asker] = {}

    def __call__(self, path: str) -> FileSystem:
        """As `read`; Unreadable with ETIMEDOUT when there is no answer in time."""
        asker = self._askers.get(path)
        if asker is None:
            asker = self._askers[path] = _Asker(self._read, path, self._clock)
        return asker.ask(self._deadline_s)

    @property
    def hanging(self) -> tuple[str, ...]:
        """Paths whose call has not come back."""
        return tuple(path for path, asker in self._askers.items() if asker.hanging)

    def close(self) -> None:
        """Let the threads end that are not hanging."""
        for asker in self._askers.values():
            asker.close()
        self._askers.clear()


class _Asker:
    """One path and its thread."""

    def __init__(self, read: Statvfs, path: str, clock: Callable[[], float]) -> None:
        self._read, self._path, self._clock = read, path, clock
        self._questions: SimpleQueue[bool] = SimpleQueue()
        self._answers: SimpleQueue[FileSystem | Unreadable] = SimpleQueue()
        self._asked_at: float | None = None
        self._thread = workers.make_thread(self._work, name=f"statvfs {path}")
        workers.start(self._thread)

    def _work(self) -> None:
        while self._questions.get():
            try:
                with workers.step("statvfs", limit_s=STUCK_S):
                    answer: FileSystem | Unreadable = self._read(self._path)
            except Unreadable as error:
                answer = error
            except Exception as error:  # a question that is never answered would hang for ever
                answer = Unreadable(self._path, 0, f"{type(error).__name__}: {error}")
            self._answers.put(answer)

    @property
    def hanging(self) -> bool:
        return self._asked_at is not None and self._answers.empty()

    def ask(self, deadline_s: float) -> FileSystem:
        if not workers.start(self._thread):
            raise Unreadable(self._path, errno.EAGAIN, "there is no PID left for a thread to ask for it")
        if self.hanging:
            raise self._late()
        if self._asked_at is not None:
            self._answers.get()  # came too late: from then, not from now
        self._asked_at = self._clock()
        self._questions.put(True)
        try:
            answer = self._answers.get(timeout=deadline_s)
        except Empty as error:
            raise self._late() from error
        self._asked_at = None
        if isinstance(answer, Unreadable):
            raise answer
        return answer

    def _late(self) -> Unreadable:
        since = self._clock() - (self._asked_at or 0.0)
        return Unreadable(self._path, errno.ETIMEDOUT, f"statvfs has not answered for {since:.1f} s: a dead mount?")

    def close(self) -> None:
        self._questions.put(False)

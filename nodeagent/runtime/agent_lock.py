"""Locks the node, so that at most one agent acts on it.

Promises:

1. At most one process acts. The kernel releases the lock when that process ends, also after SIGKILL.
2. The lock needs no writable file: flock(2) on two directories works on read-only mounts and through bind mounts
   (measured for cgroup v1 and v2, across mount namespaces).
3. A directory that was replaced is locked again before the lock counts as held.

Theory of operation. A node has one cgroup directory of all pods, independent of an agent's state directory; the state
directory exists before the kubelet has created a pod. An acting agent locks both. A directory that does not exist, or
that cannot be locked at all, needs no lock. A dry run holds neither lock, so that it does not block an acting agent: it
locks its state directory during a write only. An agent without the lock runs as a dry run and writes nothing. When it
gets the lock it executes itself again, and so does an agent that has lost the lock.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from typing import Final

_STARVED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that do not depend on the lock: another process may hold it."""


class DirectoryLock:
    """flock(2) on the directory that a path names."""

    def __init__(self) -> None:
        self._fd = -1

    def take(self, path: str) -> bool:
        """Take or keep the lock. False while another process holds it; True if there is nothing to lock."""
        fd = -1
        try:
            if self._fd >= 0 and os.path.samestat(os.fstat(self._fd), os.stat(path)):
                return True
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            return not (isinstance(error, BlockingIOError) or error.errno in _STARVED)
        self.release()
        self._fd = fd
        return True

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class AgentLock:
    """The lock of the agent that acts on this node."""

    def __init__(self, *, state_dir: str, kubepods: Callable[[], str | None]) -> None:
        """`kubepods` returns the cgroup directory of all pods, None if there is none yet. It is called until the
        directory exists, and again after its removal."""
        self._state_dir = state_dir
        self._find_kubepods = kubepods
        self._kubepods: str | None = None
        self._node, self._state = DirectoryLock(), DirectoryLock()
        self.held = False
        """This process holds the lock."""

    def take(self) -> str:
        """Take the lock until `release` or the end of this process, or keep it. Returns the directory that another
        process has locked; empty if this process holds the lock."""
        if self._kubepods is None or not os.path.isdir(self._kubepods):
            self._kubepods = self._find_kubepods()
        if self._kubepods is not None and not self._node.take(self._kubepods):
            return f"{self._kubepods}{_holder(self._kubepods)}"
        if not self._state.take(self._state_dir):
            if not self.held:
                self._node.release()  # else two agents with one directory each would wait for ever
            return f"{self._state_dir}{_holder(self._state_dir)}"
        self.held = True
        return ""

    def release(self) -> None:
        self.held = False
        self._node.release()
        self._state.release()

    @contextlib.contextmanager
    def writing(self) -> Iterator[bool]:
        """The context value is True if the state directory may be written to."""
        if self.held:
            yield not self.take()
            return
        try:
            yield self._state.take(self._state_dir)
        finally:
            self._state.release()


def _holder(path: str) -> str:
    """The process that has locked a directory, if the kernel lists it."""
    try:
        status = os.stat(path)
        inode = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        with open("/proc/locks", encoding="ascii", errors="replace") as file:
            rows = [line.split() for line in file]
    except OSError:
        return ""
    pids = [row[4] for row in rows if len(row) > 5 and row[1] == "FLOCK" and row[5] == inode]
    return f" is locked by process {pids[0]}" if pids else " is locked"

"""One acting agent on a node: the lock that it holds for as long as it lives.

Promises:

1. At most one process acts. The kernel lets go of the lock when that process ends, however it ends.
2. The lock does not depend on what can be written: flock(2) on two directories, which works on read-only mounts and
   through any bind mount of them (measured for cgroup v1 and v2, across mount namespaces).
3. A directory that was replaced is locked anew before it counts as ours.

Theory of operation. The directory of all pods' cgroups is one per node, whatever the state directory of an agent is;
the state directory is there also before a kubelet has made any pod. An agent that acts holds both. What does not exist,
or cannot be locked at all, is locked by nobody. A dry run holds neither, so that it keeps nobody from acting: it takes
the lock of its state directory for the moment of a write. An agent that finds the lock taken runs as a dry run that
writes nothing; when it gets the lock it executes itself anew, and so does one that has lost it.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from typing import Final

_STARVED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Says nothing about the lock: somebody else may hold it."""


class DirectoryLock:
    """flock(2) on the directory that a path names."""

    def __init__(self) -> None:
        self._fd = -1

    def take(self, path: str) -> bool:
        """Take the lock, or keep it. False while another process has it. True also where there is nothing to lock."""
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
        """Let go of it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class AgentLock:
    """The lock of the agent that acts on this node."""

    def __init__(self, *, state_dir: str, kubepods: Callable[[], str | None]) -> None:
        """`kubepods` finds the directory of all pods' cgroups; None where there is none yet. It is asked until there
        is, and again when that has gone."""
        self._state_dir = state_dir
        self._find_kubepods = kubepods
        self._kubepods: str | None = None
        self._node, self._state = DirectoryLock(), DirectoryLock()
        self.held = False
        """Taken by this process."""

    def take(self) -> str:
        """Take the lock for as long as this process lives, or keep it. Returns what another process holds; empty when
        it is ours."""
        if self._kubepods is None or not os.path.isdir(self._kubepods):
            self._kubepods = self._find_kubepods()
        if self._kubepods is not None and not self._node.take(self._kubepods):
            return f"{self._kubepods}{_holder(self._kubepods)}"
        if not self._state.take(self._state_dir):
            if not self.held:
                self._node.release()  # or two that have one directory each would both wait for ever
            return f"{self._state_dir}{_holder(self._state_dir)}"
        self.held = True
        return ""

    def release(self) -> None:
        """Let go of it."""
        self.held = False
        self._node.release()
        self._state.release()

    @contextlib.contextmanager
    def writing(self) -> Iterator[bool]:
        """Whether the state directory may be written to, in this context."""
        if self.held:
            yield not self.take()
            return
        try:
            yield self._state.take(self._state_dir)
        finally:
            self._state.release()


def _holder(path: str) -> str:
    """Which process has locked a directory, where the kernel tells."""
    try:
        seen = os.stat(path)
        inode = f"{os.major(seen.st_dev):02x}:{os.minor(seen.st_dev):02x}:{seen.st_ino}"
        with open("/proc/locks", encoding="ascii", errors="replace") as file:
            rows = [line.split() for line in file]
    except OSError:
        return ""
    pids = [row[4] for row in rows if len(row) > 5 and row[1] == "FLOCK" and row[5] == inode]
    return f" is locked by process {pids[0]}" if pids else " is locked"

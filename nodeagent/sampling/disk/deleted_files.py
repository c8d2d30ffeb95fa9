"""Deleted files that processes of pods still hold: no walk sees them, and the disk is full of them all the same.

Promises:

1. A file counts once, however many processes and pods hold it: for the pod that was seen to hold it before, else for
   the first of those that do.
2. Only regular files without a name on a disk of the pods count; memory (memfd, tmpfs) never does.
3. A scan ends by its deadline and goes on from there in the next one: each pod has its turn. What one pod holds is
   never more than what was seen of it, and `DeletedFiles.complete` says whether that is all.

Theory of operation. A file is held by a descriptor (/proc/<pid>/fd) or by a mapping (/proc/<pid>/map_files). Threads
may have a table of descriptors of their own, and live on when the first thread has ended: kcmp(2) tells which threads
share one. The kernel shows all of this only with CAP_SYS_PTRACE, mappings only with CAP_CHECKPOINT_RESTORE as well.
What it shows to nobody is a descriptor that is under way in a socket, or that an io_uring keeps.
"""

import ctypes
import errno
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.sampling.disk.statx import OpenFiles
from nodeagent.sampling.hostfs.host import Host, Unreadable

# Descriptors, processes and threads of one pod that are looked at: 3 us for each descriptor, 40 us for each process.
_FDS: Final = 100_000
_PIDS: Final = 2000
_THREADS: Final = 4000
# Tables of descriptors of one process: a thread has its own only where somebody meant to.
_TABLES: Final = 16
# How often the time is looked at: 3 ms.
_PIECE: Final = 1000
_GONE: Final = (errno.ENOENT, errno.ESRCH)
_KCMP: Final = {"x86_64": 312, "aarch64": 272, "riscv64": 272, "s390x": 343, "ppc64le": 354}
_KCMP_FILES: Final = 2

FileId = tuple[int, int]
"""st_dev and inode number."""


class DeletedFiles(NamedTuple):
    """Files that no longer have a name but are held, so that their bytes are in no walk."""

    bytes: int
    files: int
    pid: int | None
    """The process that holds the largest of them."""
    complete: bool
    """All of the pod's open files were looked at."""
    layer_bytes: int = 0
    """Of these, what is in containers' layers."""
    layer_files: int = 0


class Target(NamedTuple):
    """A pod whose processes are to be looked at."""

    uid: str
    processes: Callable[[], tuple[Sequence[int], bool]]
    """PIDs, and whether these are all."""
    layers: frozenset[int]
    """st_dev of files in its containers' layers."""
    disks: frozenset[int]
    """st_dev of its other places."""


class _Held(NamedTuple):
    files: Mapping[FileId, tuple[int, int]]
    """(bytes, PID)"""
    complete: bool


class DeletedScan:
    """Looks at the pods' open files, again and again. Not thread-safe."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._held: dict[str, _Held] = {}
        self._holders: dict[FileId, str] = {}
        """Who counts for a file."""
        self._looked_at: dict[str, float] = {}

    def look(
        self, targets: Sequence[Target], *, until: float, stop: Callable[[], bool] = lambda: False, only: bool = False
    ) -> dict[str, DeletedFiles]:
        """What these pods hold, by UID; a pod that there was no time for counts as when it was looked at last, and is
        missing where it never was. `only`: these are a few of all pods."""
        if not only:
            uids = {target.uid for target in targets}
            self._held = {uid: held for uid, held in self._held.items() if uid in uids}
            self._looked_at = {uid: at for uid, at in self._looked_at.items() if uid in uids}
        for target in sorted(targets, key=lambda target: self._looked_at.get(target.uid, 0.0)):
            if stop() or time.monotonic() >= until:
                break
            self._looked_at[target.uid] = time.monotonic()
            self._held[target.uid] = self._of_pod(target, until)
        self._settle()
        return {target.uid: self._counted(target) for target in targets if target.uid in self._held}

    def _counted(self, target: Target) -> DeletedFiles:
        held = self._held[target.uid]
        mine = {file: found for file, found in held.files.items() if self._holders[file] == target.uid}
        return _sum(_Held(mine, held.complete), target.layers)

    def _of_pod(self, target: Target, until: float) -> _Held:
        pids, complete = target.processes()
        looking = _Looking(self._host, target.layers | target.disks, until)
        looking.processes(pids)
        return _Held(looking.found, complete and looking.complete)

    def _settle(self) -> None:
        """Who counts for each file: who did before, if it still holds it, else the first that holds it."""
        holders: dict[FileId, str] = {}
        for uid, held in self._held.items():
            for file in held.files:
                if file not in holders or self._holders.get(file) == uid:
                    holders[file] = uid
        self._holders = holders


def _sum(held: _Held, layers: frozenset[int]) -> DeletedFiles:
    files = held.files
    in_layers = [size for file, (size, _) in files.items() if file[0] in layers]
    largest = max(files.values(), default=None)
    return DeletedFiles(
        bytes=sum(size for size, _ in files.values()),
        files=len(files),
        pid=largest[1] if largest is not None else None,
        complete=held.complete,
        layer_bytes=sum(in_layers),
        layer_files=len(in_layers),
    )


def deleted_files(
    host: Host, pids: Sequence[int], devices: frozenset[int], *, until: float = float("inf")
) -> DeletedFiles:
    """What these processes hold of deleted files on these devices (of disks, and of overlay mounts: st_dev). Each file
    counts once. Processes that have ended hold nothing; one that may not be looked at makes the answer incomplete.
    Never raises."""
    looking = _Looking(host, devices, until)
    looking.processes(pids)
    return _sum(_Held(looking.found, looking.complete), frozenset())


class _Looking:
    """One look at the processes of one pod."""

    def __init__(self, host: Host, devices: frozenset[int], until: float) -> None:
        self._host = host
        self._devices = devices
        self._until = until
        self._open_files = OpenFiles()
        self._inodes: set[int] = set()
        self._fds_left = _FDS
        self._threads_left = _THREADS
        self.found: dict[FileId, tuple[int, int]] = {}
        self.complete = True

    def processes(self, pids: Sequence[int]) -> None:
        if len(pids) > _PIDS:
            self.complete = False
        for pid in pids[:_PIDS]:
            if time.monotonic() >= self._until:
                self.complete = False
                return
            self._descriptors(pid, f"/proc/{pid}/fd")
            for thread in self._other_tables(pid):
                self._descriptors(pid, f"/proc/{pid}/task/{thread}/fd")
            self._mappings(pid)

    def _descriptors(self, pid: int, path: str) -> None:
        try:
            directory = os.open(self._host.real(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            self._missed(error)
            return
        try:
            with os.scandir(directory) as entries:
                for number, entry in enumerate(entries, start=1):
                    if self._fds_left <= 0 or (number % _PIECE == 0 and time.monotonic() >= self._until):
                        self.complete = False
                        return
                    self._fds_left -= 1
                    if not self._take(pid, directory, entry.name):
                        # The kernel lists descriptors to whoever may read the directory, and refuses to say where they
                        # lead.
                        return
        except OSError as error:
            self._missed(error)
        finally:
            os.close(directory)

    def _take(self, pid: int, directory: int, name: str) -> bool:
        """Count what a link leads to, if it is a deleted file. False: we may not know."""
        answered, found = self._open_files.ask(directory, name)
        if found is not None and found.device in self._devices:
            self.found[found.device, found.inode] = (found.bytes, pid)
            self._inodes.add(found.inode)
        if answered:
            return True
        try:
            os.readlink(name, dir_fd=directory)
        except OSError as error:
            if error.errno in _GONE:
                return True  # closed meanwhile
        self.complete = False
        return False

    def _other_tables(self, pid: int) -> Iterator[int]:
        """Threads of this process, one for each table of descriptors that the process itself does not have."""
        try:
            names = self._host.listdir(f"/proc/{pid}/task")
        except Unreadable as error:
            if error.errno not in _GONE:
                self.complete = False
            return
        threads = [int(name) for name in names if name.isdigit() and name != str(pid)]
        if len(threads) > self._threads_left:
            self.complete = False
        threads = threads[: self._threads_left]
        self._threads_left -= len(threads)
        tables = [pid]
        for thread in threads:
            same = [_same_table(thread, other) for other in tables]
            if None in same:
                # Not to be told (seccomp, no right): the first thread may have ended, and with it its table.
                if len(tables) == 1 and _has_ended(self._host, pid):
                    tables.append(thread)
                    yield thread
            elif True not in same:
                if len(tables) > _TABLES:
                    self.complete = False
                    return
                tables.append(thread)
                yield thread

    def _mappings(self, pid: int) -> None:
        """Files that are mapped and no longer open. Only few processes have any: the list of mappings tells which."""
        try:
            maps = self._host.read(f"/proc/{pid}/maps")
        except Unreadable as error:
            if error.errno not in _GONE:
                self.complete = False
            return
        rows = [line.split(None, 5) for line in maps.split(b"\n") if line.endswith(b" (deleted)")] if maps else []
        # Shared memory (memfd, SysV, /dev/zero) stands there as deleted as well, on a device of the kernel's own.
        wanted = {row[4]: row[0] for row in rows if len(row) == 6 and self._may_count(row[3], row[4])}
        if not wanted:
            return
        try:
            directory = os.open(self._host.real(f"/proc/{pid}/map_files"), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            self._missed(error)
            return
        try:
            for span in wanted.values():
                self._take(pid, directory, _map_file(span))
        finally:
            os.close(directory)

    def _may_count(self, device: bytes, inode: bytes) -> bool:
        """Whether this mapping is of a file that counts and was not counted by its descriptor. An overlay's file has
        another device here, and the same number."""
        major, _, minor = device.partition(b":")
        return os.makedev(int(major, 16), int(minor, 16)) in self._devices and int(inode) not in self._inodes

    def _missed(self, error: OSError) -> None:
        self.complete = self.complete and error.errno in _GONE


def _map_file(span: bytes) -> str:
    """The name in map_files: as in maps, but without leading zeros."""
    start, _, end = span.decode("ascii").partition("-")
    return f"{int(start, 16):x}-{int(end, 16):x}"


def _has_ended(host: Host, pid: int) -> bool:
    """Whether the process's first thread has, while others go on."""
    try:
        return host.read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[:1] == [b"Z"]
    except Unreadable:
        return False


def _same_table(thread: int, other: int) -> bool | None:
    """Whether two threads share one table of descriptors; None when the kernel does not tell."""
    number = _KCMP.get(platform.machine())
    if number is None:
        return None
    reply: int = ctypes.CDLL(None).syscall(number, thread, other, _KCMP_FILES, 0, 0)
    return None if reply < 0 else reply == 0

"""Finds deleted files that processes of pods hold open: they use disk space, but no walk finds them.

Promises:

1. A file counts once, however many processes and pods hold it: for the pod that held it in the last scan, else for the
   first pod that holds it.
2. Only regular files without a name count, and only on a disk of the pods; memory (memfd, tmpfs) never counts.
3. A scan ends by its deadline, and the next one starts with the pods scanned longest ago. A pod's sum never exceeds
   what was read, and `DeletedFiles.complete` is False if something was not read.

Theory of operation. A file is held by a descriptor (/proc/<pid>/fd) or by a mapping (/proc/<pid>/map_files). A thread
may have its own table of descriptors, and may outlive the first thread; kcmp(2) compares the tables of two threads. The
kernel shows descriptors only with CAP_SYS_PTRACE, and mappings only with CAP_CHECKPOINT_RESTORE as well. It never shows
a descriptor in flight in a socket, or one that an io_uring keeps.
"""

import ctypes
import errno
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.sampling.disk.statx import OpenFiles
from nodeagent.sampling.hostfs.host import Host, Unreadable

_MAX_FDS: Final = 100_000
"""Descriptors read for one pod: 3 us each."""
_MAX_PIDS: Final = 2000
"""Processes read for one pod: 40 us each."""
_MAX_THREADS: Final = 4000
_MAX_TABLES: Final = 16
"""Descriptor tables of one process. A thread has its own only after unshare(CLONE_FILES)."""
_CLOCK_EVERY: Final = 1000
"""Descriptors between two checks of the deadline: 3 ms."""
_GONE: Final = (errno.ENOENT, errno.ESRCH)
_SPAN: Final = re.compile(rb"[0-9a-f]{1,16}-[0-9a-f]{1,16}")
"""The addresses of a mapping, as in /proc/PID/maps."""
_KCMP: Final = {"x86_64": 312, "aarch64": 272, "riscv64": 272, "s390x": 343, "ppc64le": 354}
_KCMP_FILES: Final = 2

FileId = tuple[int, int]
"""st_dev and inode number."""


class DeletedFiles(NamedTuple):
    """Files without a name that processes hold open, so that no walk counts them."""

    bytes: int
    files: int
    pid: int | None
    """The process that holds the largest of them."""
    complete: bool
    """All open files of the pod were read."""
    layer_bytes: int = 0
    """Of these, bytes in containers' layers."""
    layer_files: int = 0


class Target(NamedTuple):
    """A pod to scan."""

    uid: str
    processes: Callable[[], tuple[Sequence[int], bool]]
    """PIDs, and whether the list is complete."""
    layers: frozenset[int]
    """st_dev of files in its containers' layers."""
    disks: frozenset[int]
    """st_dev of its other paths."""


class _PodFiles(NamedTuple):
    files: Mapping[FileId, tuple[int, int]]
    """(bytes, PID)"""
    complete: bool


class DeletedScan:
    """Scans the open files of pods repeatedly. Not thread-safe."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._files: dict[str, _PodFiles] = {}
        """UID -> what its last scan found."""
        self._owners: dict[FileId, str] = {}
        """The pod that each file counts for."""
        self._scanned_at: dict[str, float] = {}

    def scan(
        self,
        targets: Sequence[Target],
        *,
        until: float,
        stop: Callable[[], bool] = lambda: False,
        partial: bool = False,
    ) -> dict[str, DeletedFiles]:
        """UID -> the pod's deleted files. A pod without time for a scan has the result of its last one, and is missing
        if there is none. `partial`: the targets are a part of all pods, and the results of other pods are kept."""
        if not partial:
            uids = {target.uid for target in targets}
            self._files = {uid: files for uid, files in self._files.items() if uid in uids}
            self._scanned_at = {uid: at for uid, at in self._scanned_at.items() if uid in uids}
        for target in sorted(targets, key=lambda target: self._scanned_at.get(target.uid, 0.0)):
            if stop() or time.monotonic() >= until:
                break
            self._scanned_at[target.uid] = time.monotonic()
            self._files[target.uid] = self._scan_pod(target, until)
        self._assign_owners()
        return {target.uid: self._owned_by(target) for target in targets if target.uid in self._files}

    def _owned_by(self, target: Target) -> DeletedFiles:
        found = self._files[target.uid]
        owned = {file: size for file, size in found.files.items() if self._owners[file] == target.uid}
        return _sum(_PodFiles(owned, found.complete), target.layers)

    def _scan_pod(self, target: Target, until: float) -> _PodFiles:
        pids, complete = target.processes()
        scan = _PodScan(self._host, target.layers | target.disks, until)
        scan.read_processes(pids)
        return _PodFiles(scan.found, complete and scan.complete)

    def _assign_owners(self) -> None:
        """A file counts for the same pod as before if that pod still holds it, else for the first that holds it."""
        owners: dict[FileId, str] = {}
        for uid, found in self._files.items():
            for file in found.files:
                if file not in owners or self._owners.get(file) == uid:
                    owners[file] = uid
        self._owners = owners


def _sum(found: _PodFiles, layers: frozenset[int]) -> DeletedFiles:
    files = found.files
    in_layers = [size for file, (size, _) in files.items() if file[0] in layers]
    largest = max(files.values(), default=None)
    return DeletedFiles(
        bytes=sum(size for size, _ in files.values()),
        files=len(files),
        pid=largest[1] if largest is not None else None,
        complete=found.complete,
        layer_bytes=sum(in_layers),
        layer_files=len(in_layers),
    )


class _PodScan:
    """One scan of the processes of one pod."""

    def __init__(self, host: Host, devices: frozenset[int], until: float) -> None:
        self._host = host
        self._devices = devices
        self._until = until
        self._open_files = OpenFiles()
        self._inodes: set[int] = set()
        self._fds_left = _MAX_FDS
        self._threads_left = _MAX_THREADS
        self.found: dict[FileId, tuple[int, int]] = {}
        self.complete = True

    def read_processes(self, pids: Sequence[int]) -> None:
        if len(pids) > _MAX_PIDS:
            self.complete = False
        for pid in pids[:_MAX_PIDS]:
            if time.monotonic() >= self._until:
                self.complete = False
                return
            self._read_descriptors(pid, f"/proc/{pid}/fd")
            for thread in self._threads_with_own_table(pid):
                self._read_descriptors(pid, f"/proc/{pid}/task/{thread}/fd")
            self._read_mappings(pid)

    def _read_descriptors(self, pid: int, path: str) -> None:
        try:
            directory = os.open(self._host.real(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            self._count_error(error)
            return
        try:
            with os.scandir(directory) as entries:
                for number, entry in enumerate(entries, start=1):
                    if self._fds_left <= 0 or (number % _CLOCK_EVERY == 0 and time.monotonic() >= self._until):
                        self.complete = False
                        return
                    self._fds_left -= 1
                    if not self._count_target(pid, directory, entry.name):
                        return  # the kernel lists the descriptors, but refuses their targets
        except OSError as error:
            self._count_error(error)
        finally:
            os.close(directory)

    def _count_target(self, pid: int, directory: int, name: str) -> bool:
        """Count the target of a link if it is a deleted file. False: the kernel refuses to show the target."""
        readable, found = self._open_files.read(directory, name)
        if found is not None and found.device in self._devices:
            self.found[found.device, found.inode] = (found.bytes, pid)
            self._inodes.add(found.inode)
        if readable:
            return True
        try:
            os.readlink(name, dir_fd=directory)
        except OSError as error:
            if error.errno in _GONE:
                return True  # closed meanwhile
        self.complete = False
        return False

    def _threads_with_own_table(self, pid: int) -> Iterator[int]:
        """One thread of this process for each further descriptor table."""
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
            same = [_share_table(thread, other) for other in tables]
            if None in same:
                # kcmp refused (seccomp, no right): the first thread may have ended, and its table with it.
                if len(tables) == 1 and _main_thread_ended(self._host, pid):
                    tables.append(thread)
                    yield thread
            elif True not in same:
                if len(tables) > _MAX_TABLES:
                    self.complete = False
                    return
                tables.append(thread)
                yield thread

    def _read_mappings(self, pid: int) -> None:
        """Count files that are mapped but not open. Few processes have any: the list of mappings is read first."""
        try:
            maps = self._host.read(f"/proc/{pid}/maps")
        except Unreadable as error:
            if error.errno not in _GONE:
                self.complete = False
            return
        rows = [line.split(None, 5) for line in maps.split(b"\n") if line.endswith(b" (deleted)")] if maps else []
        # Shared memory (memfd, SysV, /dev/zero) is listed as deleted as well, on a device of the kernel.
        wanted = {row[4]: row[0] for row in rows if len(row) == 6 and self._is_uncounted(row[3], row[4])}
        if not wanted:
            return
        try:
            directory = os.open(self._host.real(f"/proc/{pid}/map_files"), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            self._count_error(error)
            return
        try:
            for span in wanted.values():
                if not _SPAN.fullmatch(span):
                    self.complete = False
                    continue
                self._count_target(pid, directory, _map_files_name(span))
        finally:
            os.close(directory)

    def _is_uncounted(self, device: bytes, inode: bytes) -> bool:
        """True if the mapped file counts and was not counted through a descriptor. A file on an overlay has another
        device here, but the same inode number."""
        major, _, minor = device.partition(b":")
        try:
            return os.makedev(int(major, 16), int(minor, 16)) in self._devices and int(inode) not in self._inodes
        except (ValueError, OverflowError):  # a malformed line
            self.complete = False
            return False

    def _count_error(self, error: OSError) -> None:
        self.complete = self.complete and error.errno in _GONE


def _map_files_name(span: bytes) -> str:
    """The name in map_files: the name in maps without leading zeros."""
    return "-".join(f"{int(bound, 16):x}" for bound in span.split(b"-"))


def _main_thread_ended(host: Host, pid: int) -> bool:
    """True if the first thread of the process has ended while others run."""
    try:
        return host.read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[:1] == [b"Z"]
    except Unreadable:
        return False


def _share_table(thread: int, other: int) -> bool | None:
    """True if two threads share one descriptor table; None if kcmp is not available or refused."""
    number = _KCMP.get(platform.machine())
    if number is None:
        return None
    reply: int = ctypes.CDLL(None).syscall(number, thread, other, _KCMP_FILES, 0, 0)
    return None if reply < 0 else reply == 0

"""The host under an injected root: every path the samplers read is relative to it.

The same code reads `/` (a systemd unit), `/host` (the DaemonSet), a recorded node and a test's temporary tree.
Promises:

1. No answer is about another machine. Under a root other than `/`, symbolic links are resolved inside the root, and
   file system numbers are returned only if they are provably the host's: the root's /proc is a mounted procfs, and our
   mount that covers the path has the device of the mount that covers it in the host's own mount table.
2. A failed read raises `Unreadable` with the path and the reason, whatever the kernel's error is.
3. A recording (a tree with `listing/capture.json`) returns the file system numbers, names and time of the moment it was
   made. Its notes report that it is a recording.
"""

import errno
import math
import os
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from nodeagent.model import Note, NoteKind
from nodeagent.sampling.hostfs import mounts
from nodeagent.sampling.hostfs.mounts import Mount

# O_NONBLOCK: a named pipe in place of a file must not block the loop.
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
# The first read fits nearly every file; a larger buffer costs more to allocate than a second read.
_FIRST_READ: Final = 4096
_NEXT_READ: Final = 65536
# A seq_file returns at most about a page for each read, so a short read is not the end of the file, unless it is so
# short that a further line (all are far below 2 KiB) would have fitted. Saves a system call for most files.
_SURELY_COMPLETE: Final = 2048
# TASK_COMM_LEN is 16; kernel threads of workqueues have longer names.
_MAX_COMMAND: Final = 64
_MAX_FILE_BYTES: Final = 64 << 20
_MAX_LINKS: Final = 40
# How long a proof of promise 1 is valid. Reading two mount tables of 400 lines takes about 2 ms. A mount that changes
# on the host alone is rare, and is found a minute later.
_PROOF_S: Final = 60.0
# Reading a clock takes some 50 ns, a suspend of the machine at least a second.
_CLOCKS_APART_S: Final = 0.001
_CLOCK_TRIES: Final = 5
_NOT_THIS_HOST: Final = "not provably the file system of that host"


class Unreadable(Exception):  # noqa: N818 - named for the state of the file
    """A file or directory of the host that could not be read."""

    def __init__(self, path: str, errno_: int, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.errno = errno_
        """As in errno.h; 0 if the content, not the kernel, is the reason."""
        self.reason = reason

    @property
    def gone(self) -> bool:
        """True if it does not exist any more (ENODEV: its cgroup was removed). Every other error may be one of this
        process, which has no descriptor or memory left."""
        return self.errno in (errno.ENOENT, errno.ENODEV)

    def __reduce__(self) -> tuple[type["Unreadable"], tuple[str, int, str]]:
        return Unreadable, (self.path, self.errno, self.reason)


class Clocks(NamedTuple):
    """One instant."""

    boottime: float
    """Seconds on CLOCK_BOOTTIME."""
    suspended_s: float
    """The part of `boottime` in which the machine was suspended."""


class FileSystem(NamedTuple):
    """One file system's numbers, in bytes and inodes."""

    available: int
    """For an ordinary user (f_bavail x f_frsize), as the kubelet counts."""
    capacity: int
    inodes_free: int
    inodes: int
    """0 on file systems without a fixed number of inodes (btrfs)."""
    device: int
    """Device of the mount, equal for all subvolumes of one btrfs."""


Statvfs = Callable[[str], FileSystem]
"""Reads the file system that contains a path; raises Unreadable, also after a timeout."""


class _Proof(NamedTuple):
    """The proof that a path's file system is the host's."""

    st_dev: int
    """At the time of the proof: a different one needs a new proof."""
    device: int
    at: float


class Host:
    """A live host below `root`."""

    recorded: bool = False

    def __init__(self, root: str = "/", *, clock_gettime: Callable[[int], float] = time.clock_gettime) -> None:
        self._clock_gettime = clock_gettime
        self.root = os.path.abspath(root)
        self._prefix = "" if self.root == "/" else self.root
        self._proofs: dict[str, _Proof] = {}

    @property
    def notes(self) -> tuple[Note, ...]:
        """Notes about this source for the reader of a report."""
        return ()

    # --- time

    def boottime(self) -> float:
        """Seconds on CLOCK_BOOTTIME."""
        return self._clock_gettime(time.CLOCK_BOOTTIME)

    def clocks(self) -> Clocks:
        """CLOCK_BOOTTIME and its lead over CLOCK_MONOTONIC, both read at one instant. A preemption between the two
        readings would look like a suspend, so they are read again, at most `_CLOCK_TRIES` times."""
        shortest_s, clocks = float("inf"), Clocks(0.0, 0.0)
        for _ in range(_CLOCK_TRIES):
            before = self._clock_gettime(time.CLOCK_MONOTONIC)
            boottime = self._clock_gettime(time.CLOCK_BOOTTIME)
            took_s = self._clock_gettime(time.CLOCK_MONOTONIC) - before
            if took_s < shortest_s:
                shortest_s, clocks = took_s, Clocks(boottime, boottime - before)
            if took_s < _CLOCKS_APART_S:
                break
        return clocks

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    # --- files

    def real(self, path: str) -> str:
        """Where `path` is on this machine, without following its links: for /proc and /sys, where no link leaves the
        root."""
        return self._prefix + path

    def resolve(self, path: str) -> str:
        """The host's own path of the target of `path`: links are followed inside the root, parts that do not exist stay
        unchanged. Raises Unreadable on a loop of links."""
        done = "/"
        todo = [part for part in reversed(path.split("/")) if part not in ("", ".")]
        links = 0
        while todo:
            part = todo.pop()
            if part == "..":
                done = os.path.dirname(done)
                continue
            here = os.path.join(done, part)
            try:
                target = os.readlink(self._prefix + here)
            except OSError:
                done = here
                continue
            links += 1
            if links > _MAX_LINKS:
                raise Unreadable(path, errno.ELOOP, os.strerror(errno.ELOOP))
            todo += [p for p in reversed(target.split("/")) if p not in ("", ".")]
            if target.startswith("/"):
                done = "/"
        return done

    def _at(self, path: str) -> str:
        if not self._prefix or path.startswith(("/proc/", "/sys/")):
            return self._prefix + path
        return self._prefix + self.resolve(path)

    def open(self, path: str) -> int:
        """A read-only descriptor; the caller closes it. Raises Unreadable."""
        try:
            return os.open(self._at(path), _FLAGS)
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from error

    def read(self, path: str, *, max_bytes: int = _MAX_FILE_BYTES) -> bytes:
        """The whole content. Raises Unreadable, also for a file that is larger."""
        try:
            descriptor = os.open(self._at(path) if self._prefix else path, _FLAGS)
            try:
                data = os.read(descriptor, _FIRST_READ)
                return data if len(data) < _SURELY_COMPLETE else data + read_all(descriptor, max_bytes=max_bytes)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from error

    def text(self, path: str) -> str:
        """The content as UTF-8; invalid bytes become surrogates. Raises Unreadable."""
        return self.read(path).decode("utf-8", "surrogateescape")

    def listdir(self, path: str) -> list[str]:
        """Names in a directory, in no order. Raises Unreadable."""
        try:
            return os.listdir(self._at(path))
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from error

    def entries(self, path: str) -> list[tuple[str, int]]:
        """(name, inode number) of everything in a directory, in no order. Raises Unreadable."""
        try:
            with os.scandir(self._at(path)) as entries:
                return [(entry.name, entry.inode()) for entry in entries]
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from error

    def subdirectories(self, path: str) -> list[tuple[str, int]]:
        """(name, inode number) of the directories in a directory, in no order. Raises Unreadable."""
        try:
            with os.scandir(self._at(path)) as entries:
                return [(entry.name, entry.inode()) for entry in entries if entry.is_dir(follow_symlinks=False)]
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from error

    def processes(self) -> list[int]:
        """PID of every process. Raises Unreadable when /proc cannot be listed."""
        return [int(name) for name in self.listdir("/proc") if name.isascii() and name.isdigit()]

    def commands(self, pids: Iterable[int]) -> list[tuple[int, bytes]]:
        """(PID, command name) of these processes; 5 us each. A process that has ended is left out."""
        proc = self._at("/proc/")
        found = []
        for pid in pids:
            try:
                descriptor = os.open(f"{proc}{pid}/comm", _FLAGS)
            except OSError:
                continue
            try:
                found.append((pid, os.read(descriptor, _MAX_COMMAND).rstrip()))
            except OSError:
                continue
            finally:
                os.close(descriptor)
        return found

    def exists(self, path: str) -> bool:
        """True if the path exists and we may see it."""
        try:
            return os.path.exists(self._at(path))
        except (Unreadable, ValueError):
            return False

    # --- file systems

    def device(self, path: str) -> int:
        """The device of the file system of `path`, equal for two paths on one file system. Raises Unreadable."""
        return self.statvfs(path).device

    def statvfs(self, path: str) -> FileSystem:
        """The file system that contains `path`; may block on a dead mount. Raises Unreadable, also if the numbers are
        not provably this host's."""
        resolved = self.resolve(path) if self._prefix else path
        try:
            st_dev = os.stat(self._prefix + resolved).st_dev
            numbers = os.statvfs(self._prefix + resolved)
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from error
        proof = self._proofs.get(resolved)
        now = time.monotonic()
        if proof is None or proof.st_dev != st_dev or now - proof.at > _PROOF_S:
            proof = self._proofs[resolved] = _Proof(st_dev, self._mount_device(resolved, st_dev), now)
        return _file_system(numbers, proof.device)

    def mounts(self) -> list[Mount]:
        """The host's mount table, in mount order. Raises Unreadable."""
        return mounts.parse_mounts(self.read("/proc/1/mountinfo"))

    def _mount_device(self, path: str, st_dev: int) -> int:
        """The device of the mount that contains `path`. Raises Unreadable unless it is the host's (promise 1)."""
        if not self._prefix:
            if os.major(st_dev):
                return st_dev
            # btrfs gives each subvolume its own st_dev; the mount table has one device for all of them.
            mount = mounts.covering_mount(_own_mounts(), os.path.realpath(path))
            return mount.device if mount else st_dev
        own = _own_mounts()
        proc = mounts.covering_mount(own, os.path.realpath(self._prefix + "/proc"))
        if proc is None or proc.fstype != "proc":
            reason = f"{self._prefix}/proc is a copy, not a mounted procfs, so {path} there is {_NOT_THIS_HOST}"
            raise Unreadable(path, 0, reason)
        there = os.path.realpath(self._prefix) + path
        host = self.mounts()
        ours, theirs = mounts.covering_mount(own, there), mounts.covering_mount(host, path)
        if ours is not None and theirs is not None and ours.point == there and theirs.point != path:
            # A hostPath mounts the path for us. The host has no mount there, but perhaps a link, which was followed on
            # the host and is invisible here: it is enough that the host has that device at all.
            theirs = next((mount for mount in host if mount.device == ours.device), theirs)
        if ours is None or theirs is None or ours.device != theirs.device:
            reason = (
                f"host: {_mount_text(theirs)}; this process: {_mount_text(ours)}: {_NOT_THIS_HOST} (mount propagation?)"
            )
            raise Unreadable(path, 0, reason)
        return ours.device


def _mount_text(mount: Mount | None) -> str:
    return "no mount" if mount is None else f"{mount.source} at {mount.point}"


_STATVFS: Final = ("f_bavail", "f_frsize", "f_blocks", "f_ffree", "f_files", "st_dev")


class RecordedHost(Host):
    """One recorded moment of a host. Overrides what a tree of plain files lacks: time, file system numbers and the
    directories of which only a listing was recorded."""

    recorded = True

    def __init__(self, root: str) -> None:
        import json

        super().__init__(root)
        try:
            capture = json.loads(self.read("/listing/capture.json"))
            self._wall = float(capture["start"])
            self._uptime = float(self.read("/proc/uptime").split()[0])
            self._statvfs: dict[str, dict[str, int]] = {}
            self._statvfs_changed_at = 0
            self._load_statvfs()
            self._directories = _directories(self._listed(json.loads))
            if not math.isfinite(self._uptime):
                raise ValueError(f"uptime {self._uptime}")
            time.gmtime(self._wall)  # raises for a time outside the calendar
        except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise Unreadable("/listing", 0, f"not a valid recording: {type(error).__name__}: {error}") from error

    def _load_statvfs(self) -> None:
        """Read the numbers again if their file changed, as in a test that fills the disk of the node."""
        changed_at = os.stat(f"{self.root}/listing/statvfs.json").st_mtime_ns
        if changed_at != self._statvfs_changed_at:
            import json

            found = json.loads(self.read("/listing/statvfs.json"))
            if not isinstance(found, dict):
                raise ValueError("not a map of paths")
            self._statvfs = found
            self._statvfs_changed_at = changed_at

    def _listed(self, loads: "object") -> list[str]:
        paths: list[str] = []
        for name in ("var-log-pods", "var-log-containers", "var-lib-kubelet-pods"):
            if os.path.exists(f"{self.root}/listing/{name}.json"):
                paths += [str(entry["path"]) for entry in loads(self.read(f"/listing/{name}.json"))]  # type: ignore[operator]
        return paths

    @property
    def notes(self) -> tuple[Note, ...]:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._wall))
        return (Note(NoteKind.HOST, f"{self.root} is a recording of {stamp}, not a live host"),)

    def boottime(self) -> float:
        return self._uptime

    def clocks(self) -> Clocks:
        return Clocks(self._uptime, 0.0)

    def wall(self) -> float:
        return self._wall

    def listdir(self, path: str) -> list[str]:
        names = self._directories.get(path.rstrip("/"))
        return sorted(names) if names is not None else super().listdir(path)

    def exists(self, path: str) -> bool:
        return path in self._statvfs or path.rstrip("/") in self._directories or super().exists(path)

    def mounts(self) -> list[Mount]:
        for path in ("/proc/1/mountinfo", "/proc/self/mountinfo"):
            if os.path.exists(self.root + path):
                return mounts.parse_mounts(self.read(path))
        raise Unreadable("/proc/1/mountinfo", errno.ENOENT, os.strerror(errno.ENOENT))

    def statvfs(self, path: str) -> FileSystem:
        try:
            self._load_statvfs()
        except (OSError, ValueError, RecursionError) as error:
            raise Unreadable(path, 0, f"listing/statvfs.json: {error}") from error
        if not self.exists(path):
            raise Unreadable(path, errno.ENOENT, os.strerror(errno.ENOENT))
        table = self.mounts()
        known = path
        while known not in self._statvfs:
            if known == "/":
                raise Unreadable(path, 0, "the recording lacks its file system")
            known = os.path.dirname(known)
        if mounts.covering_mount(table, known) != mounts.covering_mount(table, path):
            raise Unreadable(path, 0, "the recording lacks its file system")
        row = self._statvfs[known]
        try:
            if not all(type(row[name]) is int for name in _STATVFS):
                raise TypeError("a value is not an integer")
            return FileSystem(
                available=row["f_bavail"] * row["f_frsize"],
                capacity=row["f_blocks"] * row["f_frsize"],
                inodes_free=row["f_ffree"],
                inodes=row["f_files"],
                device=row["st_dev"],
            )
        except (KeyError, TypeError) as error:
            raise Unreadable(path, 0, f"listing/statvfs.json: {type(error).__name__}: {error}") from error


def open_host(root: str = "/") -> Host:
    """The host at `root`: recorded if it holds `listing/capture.json`, else live. Raises Unreadable when `root` is not
    a directory or its recording is damaged."""
    if not os.path.isdir(root):
        raise Unreadable(root, errno.ENOTDIR, "not a directory")
    if os.path.exists(os.path.join(root, "listing", "capture.json")):
        return RecordedHost(root)
    return Host(root)


# --- reading ---------------------------------------------------------------------------------------------------------


def unreadable(path: str, error: OSError | ValueError) -> Unreadable:
    """The kernel's error about `path` as an `Unreadable`. A ValueError is a NUL byte in the path."""
    if isinstance(error, OSError):
        return Unreadable(path, error.errno or 0, error.strerror or str(error))
    return Unreadable(path, errno.EINVAL, str(error))


def read_all(descriptor: int, *, max_bytes: int = _MAX_FILE_BYTES) -> bytes:
    """From the descriptor's position to the end. Raises OSError, also for more bytes."""
    data = os.read(descriptor, _FIRST_READ)
    if len(data) < _SURELY_COMPLETE:
        return data
    chunks = [data]
    total = len(data)
    while data := os.read(descriptor, _NEXT_READ):
        chunks.append(data)
        total += len(data)
        if total > max_bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return b"".join(chunks)


def _own_mounts() -> list[Mount]:
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            return mounts.parse_mounts(file.read())
    except OSError as error:
        raise unreadable("/proc/self/mountinfo", error) from error


def _file_system(numbers: os.statvfs_result, device: int) -> FileSystem:
    return FileSystem(
        available=numbers.f_bavail * numbers.f_frsize,
        capacity=numbers.f_blocks * numbers.f_frsize,
        inodes_free=numbers.f_ffree,
        inodes=numbers.f_files,
        device=device,
    )


def _directories(paths: list[str]) -> dict[str, set[str]]:
    """Directory -> names in it, for every listed path below its listing's top."""
    directories: dict[str, set[str]] = {}
    for path in paths:
        parent, name = os.path.split(path)
        directories.setdefault(parent, set()).add(name)
    return directories

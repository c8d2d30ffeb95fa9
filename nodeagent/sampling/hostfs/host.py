"""The host under an injected root: every path the samplers read is relative to it.

The same code reads `/` (a systemd unit), `/host` (the DaemonSet), a recorded node and a test's temporary tree.
Promises:

1. No answer is about another machine. Under a root that is not `/`, symbolic links are resolved inside the root, and
   file system numbers are given only when they are provably the host's: the root's /proc is a mounted procfs, and our
   mount that covers the path has the device of the mount that covers it in the host's own mount table.
2. What cannot be read is an `Unreadable` with the path and the reason, whatever the kernel said.
3. A recording (a tree with `listing/capture.json`) answers file system numbers, names and the time from the moment it
   was made, and says in its notes that it is one.
"""

import errno
import math
import os
import time
from collections.abc import Iterable
from typing import Final, NamedTuple

from nodeagent.model import Note

# O_NONBLOCK: a named pipe in place of a file must not hold us.
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
# The first read fits nearly every file; a larger buffer costs more to allocate than a second read.
_FIRST: Final = 4096
_CHUNK: Final = 65536
# A seq_file gives at most about a page for each read, so a short read is not the end of the file, unless it is so short
# that a further line (all are far below 2 KiB) would have fitted. Spares a system call for most files.
_SURELY_SHORT: Final = 2048
_COMMAND: Final = 64
"""TASK_COMM_LEN is 16; kernel threads of workqueues have longer ones."""
_MAX_FILE: Final = 64 << 20
_MAX_LINKS: Final = 40
# How long a proof of promise 1 holds. Reading two mount tables of 400 lines takes about 2 ms; a mount that changes on
# the host without changing here is rare, and seen a minute later.
_PROOF_S: Final = 60.0
# A clock takes some 50 ns to read, a sleep of the machine at least a second.
_CLOCKS_APART_S: Final = 0.001
_CLOCK_TRIES: Final = 5
_NOT_THIS_HOST: Final = "not provably the file system of that host"


class Unreadable(Exception):  # noqa: N818 - named for what is the matter
    """A file or directory of the host that could not be read."""

    def __init__(self, path: str, errno_: int, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.errno = errno_
        """As in errno.h; 0 when the content, not the kernel, is the trouble."""
        self.reason = reason

    def __reduce__(self) -> tuple[type["Unreadable"], tuple[str, int, str]]:
        return Unreadable, (self.path, self.errno, self.reason)


class Clocks(NamedTuple):
    """One instant."""

    boottime: float
    """Seconds on CLOCK_BOOTTIME."""
    suspended_s: float
    """Of them, those in which the machine was suspended."""


class FileSystem(NamedTuple):
    """One file system's numbers, in bytes and inodes."""

    available: int
    """For an ordinary user (f_bavail x f_frsize), as the kubelet counts."""
    capacity: int
    inodes_free: int
    inodes: int
    """0 on file systems without a fixed number of inodes (btrfs)."""
    device: int
    """Device of the mount; the same for all subvolumes of one btrfs."""


class Mount(NamedTuple):
    """One line of a mountinfo file."""

    device: int
    root: str
    point: str
    fstype: str
    source: str
    super_options: str


class _Proof(NamedTuple):
    """That a path's file system is the host's."""

    seen: int
    """st_dev when it was proven: another one needs another proof."""
    device: int
    at: float


class Host:
    """A live host below `root`."""

    recorded: bool = False

    def __init__(self, root: str = "/") -> None:
        self.root = os.path.abspath(root)
        self._prefix = "" if self.root == "/" else self.root
        self._proofs: dict[str, _Proof] = {}

    @property
    def notes(self) -> tuple[Note, ...]:
        """What the reader of a report should know about this source."""
        return ()

    # --- time

    def boottime(self) -> float:
        """Seconds on CLOCK_BOOTTIME."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def clocks(self) -> Clocks:
        """CLOCK_BOOTTIME, and how far it is ahead of CLOCK_MONOTONIC by the same reading. If we did not run between
        the readings of the two, which would look like a sleep, they are read again, a few times at most."""
        shortest_s, found = float("inf"), Clocks(0.0, 0.0)
        for _ in range(_CLOCK_TRIES):
            before = time.clock_gettime(time.CLOCK_MONOTONIC)
            boottime = time.clock_gettime(time.CLOCK_BOOTTIME)
            took_s = time.clock_gettime(time.CLOCK_MONOTONIC) - before
            if took_s < shortest_s:
                shortest_s, found = took_s, Clocks(boottime, boottime - before)
            if took_s < _CLOCKS_APART_S:
                break
        return found

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    # --- files

    def real(self, path: str) -> str:
        """Where `path` is on this machine, without following its links: for /proc and /sys, which have none that leave
        the root."""
        return self._prefix + path

    def resolve(self, path: str) -> str:
        """The host's own name of what `path` leads to: links followed inside the root. Parts that do not exist stay as
        they are. Raises Unreadable on a loop of links."""
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
        """A read-only descriptor, which the caller closes. Raises Unreadable."""
        try:
            return os.open(self._at(path), _FLAGS)
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from error

    def read(self, path: str) -> bytes:
        """The whole content. Raises Unreadable, also for files above 64 MiB."""
        try:
            descriptor = os.open(self._at(path) if self._prefix else path, _FLAGS)
            try:
                data = os.read(descriptor, _FIRST)
                return data if len(data) < _SURELY_SHORT else data + read_all(descriptor)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from error

    def text(self, path: str) -> str:
        """The content as UTF-8; bytes that are none are kept as surrogates. Raises Unreadable."""
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
        """(PID, command name) of these processes; 5 us each. Those that end are left out."""
        proc = self._at("/proc/")
        found = []
        for pid in pids:
            try:
                descriptor = os.open(f"{proc}{pid}/comm", _FLAGS)
            except OSError:
                continue
            try:
                found.append((pid, os.read(descriptor, _COMMAND).rstrip()))
            except OSError:
                continue
            finally:
                os.close(descriptor)
        return found

    def exists(self, path: str) -> bool:
        """Whether something is there that we may see."""
        try:
            return os.path.exists(self._at(path))
        except (Unreadable, ValueError):
            return False

    # --- file systems

    def device(self, path: str) -> int:
        """The device that tells whether two paths are on one file system. Raises Unreadable."""
        return self.statvfs(path).device

    def statvfs(self, path: str) -> FileSystem:
        """The file system that holds `path`; may block on a dead mount. Raises Unreadable, also when the numbers would
        not provably be this host's."""
        resolved = self.resolve(path) if self._prefix else path
        try:
            seen = os.stat(self._prefix + resolved).st_dev
            numbers = os.statvfs(self._prefix + resolved)
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from error
        proof = self._proofs.get(resolved)
        now = time.monotonic()
        if proof is None or proof.seen != seen or now - proof.at > _PROOF_S:
            proof = self._proofs[resolved] = _Proof(seen, self._mount_device(resolved, seen), now)
        return _file_system(numbers, proof.device)

    def mounts(self) -> list[Mount]:
        """The host's mount table, in mount order. Raises Unreadable."""
        return parse_mounts(self.read("/proc/1/mountinfo"))

    def _mount_device(self, path: str, seen: int) -> int:
        """The device of the mount that holds `path`. Raises Unreadable unless it is the host's (promise 1)."""
        if not self._prefix:
            if os.major(seen):
                return seen
            # btrfs gives each subvolume its own st_dev; the mount table has one device for all of them.
            mount = covering_mount(_own_mounts(), os.path.realpath(path))
            return mount.device if mount else seen
        own = _own_mounts()
        proc = covering_mount(own, os.path.realpath(self._prefix + "/proc"))
        if proc is None or proc.fstype != "proc":
            reason = f"{self._prefix}/proc is no mounted procfs but a copy, so {path} there is {_NOT_THIS_HOST}"
            raise Unreadable(path, 0, reason)
        there = os.path.realpath(self._prefix) + path
        host = self.mounts()
        ours, theirs = covering_mount(own, there), covering_mount(host, path)
        if ours is not None and theirs is not None and ours.point == there and theirs.point != path:
            # Mounted for us by name (a hostPath), where the host has no mount but perhaps a link, which was followed
            # outside and cannot be seen from here: it is enough that the host has that device at all.
            theirs = next((mount for mount in host if mount.device == ours.device), theirs)
        if ours is None or theirs is None or ours.device != theirs.device:
            reason = f"the host has {_told(theirs)} there, we see {_told(ours)}: {_NOT_THIS_HOST} (mount propagation?)"
            raise Unreadable(path, 0, reason)
        return ours.device


def _told(mount: Mount | None) -> str:
    return "nothing" if mount is None else f"{mount.source} at {mount.point}"


_STATVFS: Final = ("f_bavail", "f_frsize", "f_blocks", "f_ffree", "f_files", "st_dev")


class RecordedHost(Host):
    """One recorded moment of a host. Overrides what a tree of plain files cannot answer: time, file system numbers and
    the directories of which only a listing was kept."""

    recorded = True

    def __init__(self, root: str) -> None:
        import json

        super().__init__(root)
        try:
            capture = json.loads(self.read("/listing/capture.json"))
            self._wall = float(capture["start"])
            self._uptime = float(self.read("/proc/uptime").split()[0])
            self._statvfs: dict[str, dict[str, int]] = {}
            self._statvfs_of = 0
            self._load_statvfs()
            self._directories = _directories(self._listed(json.loads))
            if not math.isfinite(self._uptime):
                raise ValueError(f"uptime {self._uptime}")
            time.gmtime(self._wall)  # a time that some calendar has
        except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise Unreadable(
                "/listing", 0, f"not a recording we understand: {type(error).__name__}: {error}"
            ) from error

    def _load_statvfs(self) -> None:
        """Read the numbers again if their file changed, as it does when a test makes the node's disk fill."""
        changed = os.stat(f"{self.root}/listing/statvfs.json").st_mtime_ns
        if changed != self._statvfs_of:
            import json

            found = json.loads(self.read("/listing/statvfs.json"))
            if not isinstance(found, dict):
                raise ValueError("not a map of paths")
            self._statvfs = found
            self._statvfs_of = changed

    def _listed(self, loads: "object") -> list[str]:
        paths: list[str] = []
        for name in ("var-log-pods", "var-log-containers", "var-lib-kubelet-pods"):
            if os.path.exists(f"{self.root}/listing/{name}.json"):
                paths += [str(entry["path"]) for entry in loads(self.read(f"/listing/{name}.json"))]  # type: ignore[operator]
        return paths

    @property
    def notes(self) -> tuple[Note, ...]:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._wall))
        return (Note("host", f"{self.root} is a recording made at {stamp}, not a live host"),)

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
                return parse_mounts(self.read(path))
        raise Unreadable("/proc/1/mountinfo", errno.ENOENT, os.strerror(errno.ENOENT))

    def statvfs(self, path: str) -> FileSystem:
        try:
            self._load_statvfs()
        except (OSError, ValueError, RecursionError) as error:
            raise Unreadable(path, 0, f"listing/statvfs.json: {error}") from error
        if not self.exists(path):
            raise Unreadable(path, errno.ENOENT, os.strerror(errno.ENOENT))
        mounts = self.mounts()
        known = path
        while known not in self._statvfs:
            if known == "/":
                raise Unreadable(path, 0, "the recording has no numbers of its file system")
            known = os.path.dirname(known)
        if covering_mount(mounts, known) != covering_mount(mounts, path):
            raise Unreadable(path, 0, "the recording has no numbers of its file system")
        row = self._statvfs[known]
        try:
            if not all(type(row[name]) is int for name in _STATVFS):
                raise TypeError("a number that is none")
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
    """What the kernel said about `path`, as our error. A ValueError is a NUL byte in the path."""
    if isinstance(error, OSError):
        return Unreadable(path, error.errno or 0, error.strerror or str(error))
    return Unreadable(path, errno.EINVAL, str(error))


def read_all(descriptor: int) -> bytes:
    """From the descriptor's position to the end. Raises OSError."""
    data = os.read(descriptor, _FIRST)
    if len(data) < _SURELY_SHORT:
        return data
    chunks = [data]
    total = len(data)
    while data := os.read(descriptor, _CHUNK):
        chunks.append(data)
        total += len(data)
        if total > _MAX_FILE:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return b"".join(chunks)


def parse_mounts(data: bytes) -> list[Mount]:
    """Lines of a mountinfo file (proc(5)), in mount order. Lines that are no mount are left out."""
    mounts = []
    for line in data.decode("utf-8", "surrogateescape").split("\n"):
        left, found, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        if not found or len(fields) < 6 or len(tail) < 2:
            continue
        major, _, minor = fields[2].partition(":")
        if not (major.isascii() and major.isdigit() and minor.isascii() and minor.isdigit()):
            continue
        if len(major) > 4 or len(minor) > 7:  # 12 and 20 bits
            continue
        mounts.append(
            Mount(
                device=os.makedev(int(major), int(minor)),
                root=_unescape(fields[3]),
                point=_unescape(fields[4]),
                fstype=tail[0],
                source=_unescape(tail[1]),
                super_options=tail[2] if len(tail) > 2 else "",
            )
        )
    return mounts


def covering_mount(mounts: list[Mount], path: str) -> Mount | None:
    """The mount that holds `path`: the longest mount point above it, and of those at one point the one on top."""
    best: Mount | None = None
    for mount in mounts:
        point = mount.point
        covers = point == "/" or path == point or path.startswith(point + "/")
        if covers and (best is None or len(point) >= len(best.point)):
            best = mount
    return best


def _own_mounts() -> list[Mount]:
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            return parse_mounts(file.read())
    except OSError as error:
        raise unreadable("/proc/self/mountinfo", error) from error


def _unescape(field: str) -> str:
    r"""Spaces, tabs, newlines and backslashes are `\040`, `\011`, `\012` and `\134` in mountinfo."""
    if "\\" not in field:
        return field
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, char)
    return field


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

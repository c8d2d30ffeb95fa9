"""Wake-ups: descriptors that become ready when the node may be in trouble.

A wake-up is a hint that makes the loop sample now; only the sample is a verdict. So a spurious one costs a sample, and
a facility that the host lacks costs latency, never correctness: what could not be opened is a note in the report.

* `pressure_trigger`: PSI (Documentation/accounting/psi.rst). Without CAP_SYS_RESOURCE the kernel allows only windows
  that are a multiple of 2 s; then the hint comes later but still long before a 10 s poll.
* `MemoryLevel`: cgroup v1 memory thresholds (Documentation/admin-guide/cgroup-v1/memory.rst, section 9): the kernel
  wakes us 0.7 ms after usage crosses a level. v2 has nothing like it; there the loop polls by headroom.
* `TreeWatch`: inotify on cgroup directories and event files: pods coming and going, `memory.events`, `cgroup.events`.
"""

import contextlib
import ctypes
import functools
import os
import select
import struct
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from nodeagent.model import Note, NoteKind

PRIVILEGED_TRIGGER: Final = b"some 50000 1000000\0"
"""50 ms of stall in any 1 s window: on the measured ramps this fires while there is still memory to reclaim."""
UNPRIVILEGED_TRIGGER: Final = b"some 100000 2000000\0"
"""The same share of the shortest window that a process without CAP_SYS_RESOURCE may ask for."""
TRIGGERS: Final = (PRIVILEGED_TRIGGER, UNPRIVILEGED_TRIGGER)

IN_MODIFY: Final = 0x2
IN_CREATE: Final = 0x100
IN_DELETE: Final = 0x200
IN_ONLYDIR: Final = 0x01000000
IN_IGNORED: Final = 0x8000
"""A watch ended because what it watched is gone."""
_EVENT: Final = struct.Struct("iIII")


class EventSource(NamedTuple):
    """One descriptor for the loop's epoll."""

    name: str
    fd: int
    events: int
    drain: Callable[[], None]
    """Takes what is there, so that the descriptor can become ready again."""
    close: Callable[[], None]


def psi_trigger(path: str, *, triggers: tuple[bytes, ...] = TRIGGERS) -> EventSource | Note:
    """A trigger on one PSI file, the first of `triggers` that the kernel takes; a note when it takes none.

    The first event after creation can be spurious (MEASURED.md): it is a hint like any other.
    """
    refused = ""
    for trigger in triggers:
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            os.write(fd, trigger)
        except OSError as error:
            refused = os.strerror(error.errno or 0)
            if fd >= 0:
                os.close(fd)
            continue
        return EventSource("psi", fd, select.EPOLLPRI, _nothing, functools.partial(os.close, fd))
    return Note(NoteKind.WAKE_UPS, f"no PSI trigger on {path}: {refused}")


class MemcgThreshold:
    """A cgroup v1 memory threshold that can be moved.

    Promises:

    1. At most one level is armed, but for the moment in which the next one takes its place; the kernel wakes for
       crossings in either direction.
    2. A level that was passed while it was being armed wakes as well.
    3. `arm` may be called from another thread than the rest. It holds its caller for 13 to 32 ms (measured: the kernel
       waits for a grace period of its readers before it answers the write), so that `wanted` skips moves that do not
       matter.
    """

    IGNORED_MOVE: Final = 1 << 20
    """A level that is late by less is right: page cache moves the level a little with every sample, and a MiB is a
    millisecond of the fastest ramp measured."""
    EARLY: Final = 8
    """How early to wake: by this part of what may still grow. What is armed then serves until it is passed, or would be
    late; a wake-up that comes early costs one sample, and the rest of the way is left."""
    LEAST_EARLY: Final = 32 << 20
    """But by at least so much, which is time to arm once more on the fastest ramp; nearer than twice this what is armed
    is the crossing itself, for what woke a hair before it would wait for the next look."""
    PAST: Final = 256 << 10
    """By so much the crossing must be over: a CPU charges a cgroup in batches of 64 pages."""

    def __init__(self, directory: str, *, name: str = "memcg") -> None:
        """`directory` is a memory cgroup. Raises OSError where there is no `cgroup.event_control`."""
        self.name = name
        self._usage = os.open(f"{directory}/memory.usage_in_bytes", os.O_RDONLY | os.O_CLOEXEC)
        self._control = -1
        self._lock = threading.Lock()
        """For the eventfd: its number may be another file's as soon as it is closed."""
        self._eventfd = -1
        self._armed: int | None = None
        # What the loop waits for outlives every level: an epoll that holds the present level's eventfd.
        self._epoll = select.epoll()
        try:
            self._control = os.open(f"{directory}/cgroup.event_control", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            self.close()
            raise

    def source(self) -> EventSource:
        return EventSource(self.name, self._epoll.fileno(), select.EPOLLIN, self._drain, self.close)

    def wanted(self, growth: int) -> int | None:
        """The level to arm so that the loop wakes when the cgroup's usage has grown by `growth` bytes from now, or
        somewhat before; None when the armed one does that. Raises OSError when the cgroup is gone."""
        now = self._used()
        crossing = now + growth + self.PAST
        if self._armed is not None and now < self._armed < crossing + self.IGNORED_MOVE:
            return None
        early = max(growth // self.EARLY, self.LEAST_EARLY)
        return crossing - early if growth >= 2 * self.LEAST_EARLY else crossing

    def arm(self, level: int) -> None:
        """Wake when the cgroup's usage crosses `level` bytes. Raises OSError."""
        eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            os.write(self._control, b"%d %d %d" % (eventfd, self._usage, max(0, level)))
            if self._used() >= level:
                os.eventfd_write(eventfd, 1)
        except OSError:
            os.close(eventfd)
            raise
        with self._lock:
            self._disarm()
            self._epoll.register(eventfd, select.EPOLLIN)
            self._eventfd, self._armed = eventfd, level

    def close(self) -> None:
        """Disarm and close. Closing twice is harmless."""
        with self._lock:
            self._disarm()
        for fd in (self._usage, self._control):
            if fd >= 0:
                os.close(fd)
        self._usage = self._control = -1
        self._epoll.close()

    def _used(self) -> int:
        return int(os.pread(self._usage, 32, 0))

    def _disarm(self) -> None:
        if self._eventfd >= 0:
            os.close(self._eventfd)  # the kernel drops the threshold, and the epoll its entry, with the last descriptor
        self._eventfd, self._armed = -1, None

    def _drain(self) -> None:
        with self._lock:
            if self._eventfd >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._eventfd)


class CgroupTreeWatch:
    """inotify on cgroup directories (children made and removed) and on files the kernel notifies (`memory.events`)."""

    def __init__(self) -> None:
        """Raises OSError when the host has no inotify instance to give."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise _errno()
        self._watched: dict[str, int] = {}

    def source(self) -> EventSource:
        return EventSource("cgroup", self._fd, select.EPOLLIN, self._drain, lambda: os.close(self._fd))

    def follow(self, directories: set[str], files: set[str]) -> tuple[Note, ...]:
        """Watch exactly these from now on. Returns what could not be watched; a cgroup that went is no news."""
        wanted = dict.fromkeys(directories, IN_CREATE | IN_DELETE | IN_ONLYDIR) | dict.fromkeys(files, IN_MODIFY)
        for path in self._watched.keys() - wanted.keys():
            self._libc.inotify_rm_watch(self._fd, self._watched.pop(path))  # fails harmlessly where the cgroup is gone
        notes = []
        for path in wanted.keys() - self._watched.keys():
            watch = self._libc.inotify_add_watch(self._fd, os.fsencode(path), wanted[path])
            if watch >= 0:
                self._watched[path] = watch
            elif not isinstance(error := _errno(), FileNotFoundError | NotADirectoryError):
                notes.append(Note(NoteKind.WAKE_UPS, f"no inotify watch on {path}: {error.strerror}"))
        return tuple(notes)

    def _drain(self) -> None:
        gone = set()
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._fd, 65536):
                offset = 0
                while offset < len(data):
                    watch, mask, _, length = _EVENT.unpack_from(data, offset)
                    if mask & IN_IGNORED:
                        gone.add(watch)
                    offset += _EVENT.size + length
        if gone:
            self._watched = {path: watch for path, watch in self._watched.items() if watch not in gone}


def _errno() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _nothing() -> None:
    """PSI triggers are ready again by themselves."""

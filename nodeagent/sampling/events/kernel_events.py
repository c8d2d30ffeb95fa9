"""Opens descriptors that become ready if the node may be under pressure: PSI, memcg thresholds, inotify.

A wake-up is a hint: the loop takes a sample at once, and only the sample is a verdict. A spurious wake-up costs a
sample. A facility that the host lacks costs latency, never correctness; a note reports it.

* `psi_trigger`: PSI (Documentation/accounting/psi.rst). Without CAP_SYS_RESOURCE the kernel accepts only windows that
  are a multiple of 2 s; the hint is then later, but earlier than a poll every 10 s.
* `MemcgThreshold`: memory thresholds of cgroup v1 (Documentation/admin-guide/cgroup-v1/memory.rst, section 9). The loop
  wakes up 0.7 ms after usage crosses the level. cgroup v2 has no such thresholds; there the loop polls by headroom.
* `CgroupTreeWatch`: inotify on cgroup directories (created and removed pods) and on `memory.events`, `cgroup.events`.
"""

import contextlib
import ctypes
import errno
import functools
import os
import select
import struct
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from nodeagent.model import Note, NoteKind
from nodeagent.sampling.hostfs import parse

PRIVILEGED_TRIGGER: Final = b"some 50000 1000000\0"
"""50 ms of stall in any window of 1 s: on the measured ramps it fires while memory can still be reclaimed."""
UNPRIVILEGED_TRIGGER: Final = b"some 100000 2000000\0"
"""The same share of the shortest window without CAP_SYS_RESOURCE."""
TRIGGERS: Final = (PRIVILEGED_TRIGGER, UNPRIVILEGED_TRIGGER)

IN_MODIFY: Final = 0x2
IN_CREATE: Final = 0x100
IN_DELETE: Final = 0x200
IN_ONLYDIR: Final = 0x01000000
IN_IGNORED: Final = 0x8000
"""A watch ended because its file is gone."""
_EVENT: Final = struct.Struct("iIII")


class EventSource(NamedTuple):
    """One descriptor for the loop's epoll."""

    name: str
    fd: int
    events: int
    drain: Callable[[], None]
    """Reads the pending events, so that the descriptor can become ready again."""
    close: Callable[[], None]


def psi_trigger(*paths: str, triggers: tuple[bytes, ...] = TRIGGERS) -> EventSource | Note:
    """A trigger on the first of `paths`, which show the same pressure, with the first of `triggers` that the kernel
    accepts there; or one note with the reason of each path if it accepts none.

    The first event after creation can be spurious (performance.md R4).
    """
    refused: dict[str, str] = {}
    for path in paths:
        for trigger in triggers:
            fd = -1
            try:
                fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                os.write(fd, trigger)
            except OSError as error:
                refused[path] = os.strerror(error.errno or 0)
                if fd >= 0:
                    os.close(fd)
                continue
            return EventSource("psi", fd, select.EPOLLPRI, _no_drain, functools.partial(os.close, fd))
    reasons = "; ".join(f"{path}: {reason}" for path, reason in refused.items())
    return Note(NoteKind.WAKE_UPS, f"no PSI trigger on {reasons}")


class MemcgThreshold:
    """A cgroup v1 memory threshold that can be moved.

    Promises:

    1. At most one level is armed, except while a new one replaces it. The kernel reports crossings in both directions.
    2. A level that usage crosses while it is being armed wakes the loop as well.
    3. `arm` may be called from another thread than the other methods. It blocks its caller for 13 to 32 ms (measured:
       the kernel waits for a grace period before the write returns). `next_level` avoids moves that do not matter.
    """

    TOLERANCE: Final = 1 << 20
    """A level that is late by less stays: page cache moves the level with every sample, and 1 MiB is 1 ms of the
    fastest ramp measured."""
    EARLY_DIVISOR: Final = 8
    """The level is this fraction of the remaining growth before the crossing. It stays armed until usage passes it or
    until it would be late. An early wake-up costs one sample and leaves time for the next level."""
    MIN_EARLY: Final = 32 << 20
    """The smallest distance before the crossing: time to arm once more on the fastest ramp. Nearer than twice this, the
    level is the crossing itself: a wake-up just before it would leave the crossing to the next sample."""
    OVERSHOOT: Final = 256 << 10
    """How far beyond the crossing the level is: a CPU charges a cgroup in batches of 64 pages."""

    def __init__(self, directory: str, *, name: str = "memcg") -> None:
        """`directory` is a memory cgroup. Raises OSError without `cgroup.event_control`."""
        self.name = name
        self._usage = os.open(f"{directory}/memory.usage_in_bytes", os.O_RDONLY | os.O_CLOEXEC)
        self._control = -1
        self._lock = threading.Lock()
        """For the eventfd: after its close the number may belong to another file."""
        self._eventfd = -1
        self._armed: int | None = None
        # The loop waits for this epoll, which outlives every level and contains the eventfd of the current one.
        self._epoll = select.epoll()
        try:
            self._control = os.open(f"{directory}/cgroup.event_control", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            self.close()
            raise

    def source(self) -> EventSource:
        return EventSource(self.name, self._epoll.fileno(), select.EPOLLIN, self._drain, self.close)

    def next_level(self, growth: int) -> int | None:
        """The level to arm for a wake-up when usage has grown by `growth` bytes from now, or slightly before. None if
        the armed level suffices. Raises OSError if the cgroup is gone."""
        now = self._usage_now()
        crossing = now + growth + self.OVERSHOOT
        if self._armed is not None and now < self._armed < crossing + self.TOLERANCE:
            return None
        early = max(growth // self.EARLY_DIVISOR, self.MIN_EARLY)
        return crossing - early if growth >= 2 * self.MIN_EARLY else crossing

    def arm(self, level: int) -> None:
        """Wake the loop when usage crosses `level` bytes. Raises OSError."""
        eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            os.write(self._control, b"%d %d %d" % (eventfd, self._usage, max(0, level)))
            if self._usage_now() >= level:
                os.eventfd_write(eventfd, 1)
        except OSError:
            os.close(eventfd)
            raise
        with self._lock:
            self._disarm()
            self._epoll.register(eventfd, select.EPOLLIN)
            self._eventfd, self._armed = eventfd, level

    def close(self) -> None:
        """Disarm and close. May be called twice."""
        with self._lock:
            self._disarm()
        for fd in (self._usage, self._control):
            if fd >= 0:
                os.close(fd)
        self._usage = self._control = -1
        self._epoll.close()

    def _usage_now(self) -> int:
        """Raises OSError, also for a malformed number."""
        usage = parse.parse_count(os.pread(self._usage, 32, 0))
        if usage is None:
            raise OSError(errno.EIO, "the usage is not a number")
        return usage

    def _disarm(self) -> None:
        if self._eventfd >= 0:
            os.close(self._eventfd)  # also removes the threshold and the epoll's entry
        self._eventfd, self._armed = -1, None

    def _drain(self) -> None:
        with self._lock:
            if self._eventfd >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._eventfd)


class CgroupTreeWatch:
    """inotify on cgroup directories (child cgroups created and removed) and on event files (`memory.events`)."""

    def __init__(self) -> None:
        """Raises OSError if the host has no free inotify instance."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise _errno()
        self._watched: dict[str, int] = {}

    def source(self) -> EventSource:
        return EventSource("cgroup", self._fd, select.EPOLLIN, self._drain, lambda: os.close(self._fd))

    def follow(self, directories: set[str], files: set[str]) -> tuple[Note, ...]:
        """Watch exactly these. Returns a note for each path that cannot be watched, unless the cgroup is gone."""
        wanted = dict.fromkeys(directories, IN_CREATE | IN_DELETE | IN_ONLYDIR) | dict.fromkeys(files, IN_MODIFY)
        for path in self._watched.keys() - wanted.keys():
            self._libc.inotify_rm_watch(self._fd, self._watched.pop(path))  # fails without effect if the cgroup is gone
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


def _no_drain() -> None:
    """A PSI trigger needs no read to become ready again."""

"""Measures disks in a thread of its own: on request, at idle I/O priority, without a wait for the result.

Promises:

1. `request` and `latest` return at once, even if a disk hangs.
2. One measurement runs at a time. Of the requests that arrive meanwhile, the newest is the next one.
3. A thread that hangs (a dead mount) is abandoned `_GRACE_S` after its deadline, and a new thread takes the next
   request. With `_MAX_ABANDONED` abandoned threads there are no measurements until one of them returns;
   `latest().trouble` reports it.
4. The result of an abandoned thread is dropped.

A thread inside a system call on a dead mount cannot be ended. So each thread has a `PodDiskMeter` of its own, and
threads share nothing but the fields under the lock.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.model import PodUsage, Signal, UnattributedDisk
from nodeagent.runtime import workers
from nodeagent.sampling.disk.attribution import PodDiskMeter, WalkProgress
from nodeagent.sampling.disk.pod_disk import DiskAmount, PodDisk
from nodeagent.sampling.disk.pod_paths import PodPart
from nodeagent.sampling.disk.unattributed import UsedSpace
from nodeagent.sampling.disk.walk import CountMode
from nodeagent.sampling.hostfs.host import Unreadable

_GRACE_S: Final = 10.0
"""How long a thread may exceed its deadline. One slice of a walk takes 75 ms of CPU, which can be seconds at idle
priority on a busy disk."""
_MAX_ABANDONED: Final = 4


class SignalFileSystem(NamedTuple):
    """A file system and the signals that measure it."""

    path: str
    signals: tuple[Signal, ...]


class FileSystemUsage(NamedTuple):
    """The used space of a file system at the start of a measurement of all pods, and each pod's share of it."""

    file_system: SignalFileSystem
    at: float
    used: DiskAmount
    pods: Mapping[PodPart, DiskAmount]
    parts_left: frozenset[PodPart] | None = None
    """Parts that still have files on disk, also of ended pods; None if unknown."""


class WalkRequest(NamedTuple):
    """What to measure."""

    pods: tuple[PodUsage, ...]
    timeout_s: float
    """Wall time for the pods."""
    mode: CountMode = CountMode.BYTES_AND_INODES
    file_systems: tuple[SignalFileSystem, ...] = ()
    """Read the used space of these as well."""
    unattributed: tuple[SignalFileSystem, ...] = ()
    """Measure what these hold outside of pods, after the result for the pods is published."""
    unattributed_timeout_s: float = 0.0
    """Further wall time for each of these."""
    recount: bool = False
    """Read every file of these pods without a cache. The results of all other pods stay."""


MeasureUnattributed = Callable[[SignalFileSystem, Sequence[PodDisk], float], UnattributedDisk]
"""(file system, pods, time.monotonic() by which to end) -> what is in no pod. Raises Unreadable."""
ReadUsedSpace = Callable[[SignalFileSystem], UsedSpace]
"""Raises Unreadable."""
SplitByPart = Callable[[UsedSpace, PodDisk], Mapping[PodPart, DiskAmount]]
"""What each part of a pod holds on the file system."""
ListPartsLeft = Callable[[], frozenset[PodPart]]
"""The parts that still have files on disk. Raises Unreadable."""


class WalkResult(NamedTuple):
    """The newest measurements."""

    pods: Mapping[str, PodDisk]
    """By UID; empty before the first measurement. Every number has its own `read_at`."""
    finished_at: float | None
    """CLOCK_BOOTTIME; None before the end of the first measurement."""
    running: bool
    progress: WalkProgress
    """Of the running measurement, else of the last one."""
    trouble: str
    """Why measurements fail or do not start; empty if they work."""
    unattributed: tuple[UnattributedDisk, ...] = ()
    """Of the last request with `unattributed`."""
    took_s: float = 0.0
    """Wall time of the last measurement of all pods."""
    file_systems: tuple[FileSystemUsage, ...] = ()
    """Of the last measurement of all pods that walked every path to its end."""


class _Job:
    """One thread and the fields that it shares with its caller."""

    __slots__ = ("deadline", "meter", "stop", "thread", "wake")

    def __init__(self, meter: PodDiskMeter) -> None:
        self.meter = meter
        self.thread: threading.Thread | None = None
        self.wake = threading.Event()
        self.stop = threading.Event()
        self.deadline: float | None = None
        """time.monotonic() by which it must finish; None while it waits for a request."""


class DiskWorker:
    """Measures in a thread of its own. Its methods belong to the loop's thread, except `progress`."""

    def __init__(
        self,
        make_meter: Callable[[], PodDiskMeter],
        *,
        unwritten: Callable[[str, float], bool] = lambda _uid, _since: False,
        wake: Callable[[], None] = lambda: None,
        measure_unattributed: MeasureUnattributed | None = None,
        read_used_space: ReadUsedSpace | None = None,
        split_by_part: SplitByPart | None = None,
        list_parts_left: ListPartsLeft | None = None,
        grace_s: float = _GRACE_S,
    ) -> None:
        """`make_meter` is called once for each thread. The thread calls `unwritten` (see `PodDiskMeter.measure`) and,
        after each measurement, `wake`. It calls `measure_unattributed` for `WalkRequest.unattributed`, and the other
        three for `WalkRequest.file_systems`."""
        self._make_meter = make_meter
        self._unwritten = unwritten
        self._wake = wake
        self._measure_unattributed = measure_unattributed
        self._read_used_space = read_used_space
        self._split_by_part = split_by_part
        self._list_parts_left = list_parts_left
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._next: WalkRequest | None = None
        self._pods: Mapping[str, PodDisk] = {}
        self._finished_at: float | None = None
        self._failure = ""
        self._unattributed: tuple[UnattributedDisk, ...] = ()
        self._file_systems: tuple[FileSystemUsage, ...] = ()
        self._took_s = 0.0
        self._job: _Job | None = None
        self._abandoned: list[_Job] = []

    def request(self, request: WalkRequest) -> None:
        """Request a measurement. It replaces a request that has not begun."""
        with self._lock:
            self._next = request
        self._abandon_stuck()
        if self._job is None and len(self._abandoned) < _MAX_ABANDONED:
            self._job = job = _Job(self._make_meter())
            job.thread = workers.start_thread(lambda: self._run(job), name="disk")
            if job.thread is None:  # no PID is free: the loop continues without disk usage
                self._job = None
                job.meter.close()
                with self._lock:
                    self._next, self._failure = None, "disk walk not started: no PID is free for its thread"
        if (job_now := self._job) is not None:
            job_now.wake.set()

    def latest(self) -> WalkResult:
        """The newest measurements. Abandons a thread that hangs."""
        self._abandon_stuck()
        return self.progress()

    def progress(self) -> WalkResult:
        """The newest measurements. May be called by any thread."""
        job = self._job
        with self._lock:
            trouble = self._failure
            if self._abandoned:
                trouble = f"{len(self._abandoned)} disk walks hang in the kernel, probably on a dead mount"
            running = job is not None and job.deadline is not None
            progress = job.meter.progress if job is not None else WalkProgress(0, 0, 0)
            return WalkResult(
                self._pods,
                self._finished_at,
                running,
                progress,
                trouble,
                unattributed=self._unattributed,
                took_s=self._took_s,
                file_systems=self._file_systems,
            )

    def cancel(self) -> None:
        """End the running measurement after its current slice. Its numbers so far are published."""
        with self._lock:
            self._next = None
        if self._job is not None:
            self._job.stop.set()

    def close(self, *, timeout_s: float = 1.0) -> None:
        """End the thread; wait at most `timeout_s` for it."""
        job, self._job = self._job, None
        if job is None or job.thread is None:
            return
        with self._lock:
            self._next = None
        job.deadline = -1.0
        job.stop.set()
        job.wake.set()
        job.thread.join(timeout_s)

    def _abandon_stuck(self) -> None:
        self._abandoned = [job for job in self._abandoned if job.thread is not None and job.thread.is_alive()]
        job = self._job
        deadline = job.deadline if job is not None else None  # read once: the thread removes it at its end
        if job is not None and deadline is not None and time.monotonic() > deadline + self._grace_s:
            job.stop.set()
            self._abandoned.append(job)
            self._job = None

    # --- in the thread

    def _run(self, job: _Job) -> None:
        set_idle_io_priority()
        try:
            while self._job is job:
                job.wake.wait()
                job.wake.clear()
                with self._lock:
                    request, self._next = self._next, None
                if request is not None and self._job is job:
                    further_s = len(request.unattributed) * request.unattributed_timeout_s
                    with workers.step("a disk walk", limit_s=request.timeout_s + further_s + self._grace_s):
                        self._measure(job, request)
        except BaseException:
            # The next request starts another thread.
            with self._lock:
                self._job = None if self._job is job else self._job
            raise
        finally:
            job.meter.close()

    def _measure(self, job: _Job, request: WalkRequest) -> None:
        began = time.monotonic()
        until = began + request.timeout_s
        job.stop.clear()
        job.deadline = until + len(request.unattributed) * request.unattributed_timeout_s
        pods: Mapping[str, PodDisk] = {}
        failure = ""

        def must_stop() -> bool:
            return job.stop.is_set() or self._job is not job

        file_systems: tuple[FileSystemUsage, ...] = ()
        try:
            used = self._read_used(request)
            pods = job.meter.measure(
                request.pods,
                until=until,
                count=request.mode,
                unwritten=self._unwritten,
                recount=request.recount,
                stop=must_stop,
            )
            if job.meter.complete and not request.recount:
                file_systems = self._attribute(used, pods)
        except Exception as error:  # the thread must survive every error, and the report contains it
            failure = f"measuring disks failed: {type(error).__name__}: {error}"
        with self._lock:
            if self._job is not job:
                return
            self._failure = failure
            if not failure:
                self._pods = {**self._pods, **pods} if request.recount else pods
                self._finished_at = time.clock_gettime(time.CLOCK_BOOTTIME)
                self._file_systems = file_systems or self._file_systems
                if not request.recount:
                    self._took_s = time.monotonic() - began
                if not request.unattributed:
                    job.deadline = None
            else:
                job.deadline = None
        self._wake()
        if request.unattributed and not failure:
            self._find_unattributed(job, request, pods)

    def _read_used(self, request: WalkRequest) -> list[tuple[SignalFileSystem, UsedSpace]]:
        """Read before the walks, so that a write during them does not count as unattributed."""
        if self._read_used_space is None:
            return []
        used = []
        for file_system in request.file_systems:
            with contextlib.suppress(Unreadable, OSError):  # its signal has the reason
                used.append((file_system, self._read_used_space(file_system)))
        return used

    def _attribute(
        self, used: Sequence[tuple[SignalFileSystem, UsedSpace]], pods: Mapping[str, PodDisk]
    ) -> tuple[FileSystemUsage, ...]:
        split = self._split_by_part
        if split is None:
            return ()
        left: frozenset[PodPart] | None = None
        if used and self._list_parts_left is not None:
            with contextlib.suppress(Unreadable):
                left = self._list_parts_left()
        return tuple(
            FileSystemUsage(
                file_system,
                space.read_at,
                DiskAmount(space.bytes, space.inodes),
                {part: amount for disk in pods.values() for part, amount in split(space, disk).items()},
                left,
            )
            for file_system, space in used
        )

    def _find_unattributed(self, job: _Job, request: WalkRequest, pods: Mapping[str, PodDisk]) -> None:
        found = []
        for file_system in request.unattributed:
            if self._measure_unattributed is None or job.stop.is_set():
                break
            until = time.monotonic() + request.unattributed_timeout_s
            try:
                found.append(self._measure_unattributed(file_system, list(pods.values()), until))
            except (Unreadable, OSError):
                continue  # its signal has the reason
            except Exception as error:  # the thread must survive every error, and the report contains it
                with self._lock:
                    self._failure = f"measuring disks failed: {type(error).__name__}: {error}"
        with self._lock:
            if self._job is not job:
                return
            self._unattributed = tuple(found)
            job.deadline = None
        self._wake()


def set_idle_io_priority() -> bool:
    """Give this thread the idle I/O class: it uses the disk only while no other process does. False if the kernel
    refuses. The CPU priority stays, because walks matter most on a busy node."""
    import ctypes
    import platform

    # psutil's ionice does the same for 12 MiB. The numbers come from the kernel's system call tables.
    number = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "s390x": 282, "ppc64le": 273}.get(platform.machine())
    if number is None:
        return False
    which_process, this_thread, idle = 1, 0, 3 << 13
    reply: int = ctypes.CDLL(None).syscall(number, which_process, this_thread, idle)
    return reply == 0

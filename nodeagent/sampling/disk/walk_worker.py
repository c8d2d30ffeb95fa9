"""The thread that walks: on request only, at idle I/O priority, never waited for.

Promises:

1. `request` and `latest` return at once, whatever the disks do.
2. One measurement is under way at a time; a request made meanwhile is the next one, and only the newest is kept.
3. A thread that does not come back (a mount that hangs) is abandoned after its deadline and `_PATIENCE_S`; a new one
   takes the next request. At most `_ABANDONED` such threads are abandoned: then there are no measurements until
   one of them returns, and `latest().trouble` says so.
4. What an abandoned thread finds later is thrown away.

A thread inside a system call on a dead mount cannot be ended. So each thread has a `Meter` of its own, which an
abandoned one keeps: nothing is shared but the mailbox.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.model import PodUsage, Signal, UnattributedDisk
from nodeagent.runtime import workers
from nodeagent.sampling.disk.attribution import Held, PodDisk, PodDiskMeter, Progress
from nodeagent.sampling.disk.pod_paths import PodPart
from nodeagent.sampling.disk.unattributed import Used
from nodeagent.sampling.disk.walk import CountMode
from nodeagent.sampling.hostfs.host import Unreadable

# How much longer than its deadline a thread may take before it is given up: one turn of a walk takes 75 ms of CPU, at
# idle priority on a busy disk some seconds.
_PATIENCE_S: Final = 10.0
_ABANDONED: Final = 4


class FileSystemOf(NamedTuple):
    """A file system whose rest is to be found."""

    path: str
    signals: tuple[Signal, ...]
    """The signals that it is behind."""


class Account(NamedTuple):
    """What a file system held when a measurement of all pods began, and what each of them was found to hold there."""

    wanted: FileSystemOf
    at: float
    used: Held
    pods: Mapping[PodPart, Held]
    left: frozenset[PodPart] | None = None
    """Parts of which files are left on disk, of pods that have ended too; None when that is not known."""


class Request(NamedTuple):
    """What is to be measured."""

    pods: tuple[PodUsage, ...]
    timeout_s: float
    """Wall time that it may take."""
    what: CountMode = CountMode.BYTES_AND_INODES
    accounts: tuple[FileSystemOf, ...] = ()
    """Of these file systems also how much they hold."""
    rests: tuple[FileSystemOf, ...] = ()
    """Of these file systems also what is in no pod, after the pods were published."""
    rest_budget_s: float = 0.0
    """Wall time that each of them may take on top."""
    anew: bool = False
    """Every file of these pods is asked for now, whatever is known of them; what is known of other pods stays."""


FindRest = Callable[[FileSystemOf, Sequence[PodDisk], float], UnattributedDisk]
"""(the file system, what the pods hold, time.monotonic() by which to end) -> the rest. Raises Unreadable."""


FindUsed = Callable[[FileSystemOf], Used]
"""What a file system holds now. Raises Unreadable."""
FindHeld = Callable[[Used, PodDisk], Mapping[PodPart, Held]]
"""What of it a pod holds."""
FindLeft = Callable[[], frozenset[PodPart]]
"""Of which parts of which pods files are left. Raises Unreadable."""


class WalkResult(NamedTuple):
    """The newest that is known."""

    pods: Mapping[str, PodDisk]
    """By UID; empty before the first measurement. Every number has its own `read_at`."""
    finished_at: float | None
    """CLOCK_BOOTTIME; None before the first measurement has ended."""
    running: bool
    progress: Progress
    """Of the measurement under way, or of the last one."""
    trouble: str
    """Why measurements fail or do not take place; empty when they do."""
    rests: tuple[UnattributedDisk, ...] = ()
    """Of the last request that asked for them."""
    took_s: float = 0.0
    """Wall time of the last measurement of all pods."""
    accounts: tuple[Account, ...] = ()
    """Of the last measurement of all pods that walked every place to its end."""


class _Job:
    """One thread and what it shares with the outside."""

    __slots__ = ("deadline", "meter", "stop", "thread", "wake")

    def __init__(self, meter: PodDiskMeter) -> None:
        self.meter = meter
        self.thread: threading.Thread | None = None
        self.wake = threading.Event()
        self.stop = threading.Event()
        self.deadline: float | None = None
        """time.monotonic() by which it should have come back; None while it waits for a request."""


class DiskWorker:
    """Measures in a thread of its own. Its methods belong to one thread, the loop's, except `glance`."""

    def __init__(
        self,
        make_meter: Callable[[], PodDiskMeter],
        *,
        unwritten: Callable[[str, float], bool] = lambda _uid, _since: False,
        wake: Callable[[], None] = lambda: None,
        find_rest: FindRest | None = None,
        find_used: FindUsed | None = None,
        find_held: FindHeld | None = None,
        find_left: FindLeft | None = None,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """`make_meter` is called once for each thread. That thread calls `unwritten` (see Meter.measure), `wake`
        after each measurement, `find_rest` for what `Request.rests` asks, `find_used`, `find_held` and
        `find_left` for `Request.accounts`."""
        self._make_meter = make_meter
        self._unwritten = unwritten
        self._wake = wake
        self._find_rest = find_rest
        self._find_used = find_used
        self._find_held = find_held
        self._find_left = find_left
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._next: Request | None = None
        self._pods: Mapping[str, PodDisk] = {}
        self._finished_at: float | None = None
        self._failure = ""
        self._rests: tuple[UnattributedDisk, ...] = ()
        self._accounts: tuple[Account, ...] = ()
        self._took_s = 0.0
        self._job: _Job | None = None
        self._lost: list[_Job] = []

    def request(self, request: Request) -> None:
        """Asks for a measurement. It replaces one that was asked for and has not begun."""
        with self._lock:
            self._next = request
        self._look_after()
        if self._job is None and len(self._lost) < _ABANDONED:
            self._job = job = _Job(self._make_meter())
            job.thread = workers.start_thread(lambda: self._run(job), name="disk")
            if job.thread is None:  # no PID left for it: the loop goes on without disks
                self._job = None
                job.meter.close()
                with self._lock:
                    self._next, self._failure = None, "no thread to count disks: there is no PID left for it"
        if (ours := self._job) is not None:
            ours.wake.set()

    def latest(self) -> WalkResult:
        """What is known now."""
        self._look_after()
        return self.glance()

    def glance(self) -> WalkResult:
        """The same, for any thread."""
        job = self._job
        with self._lock:
            trouble = self._failure
            if self._lost:
                trouble = f"{len(self._lost)} walks hang in the kernel: is a mount dead?"
            running = job is not None and job.deadline is not None
            progress = job.meter.progress if job is not None else Progress(0, 0, 0)
            return WalkResult(
                self._pods,
                self._finished_at,
                running,
                progress,
                trouble,
                rests=self._rests,
                took_s=self._took_s,
                accounts=self._accounts,
            )

    def cancel(self) -> None:
        """Ends the measurement under way after its present turn; what it has counted is published."""
        with self._lock:
            self._next = None
        if self._job is not None:
            self._job.stop.set()

    def close(self, *, timeout_s: float = 1.0) -> None:
        """Ends the thread, and waits for it as long as this at most."""
        job, self._job = self._job, None
        if job is None or job.thread is None:
            return
        with self._lock:
            self._next = None
        job.deadline = -1.0  # tells the thread that it is no longer wanted
        job.stop.set()
        job.wake.set()
        job.thread.join(timeout_s)

    def _look_after(self) -> None:
        self._lost = [job for job in self._lost if job.thread is not None and job.thread.is_alive()]
        job = self._job
        deadline = job.deadline if job is not None else None  # once: the thread takes it away when it is done
        if job is not None and deadline is not None and time.monotonic() > deadline + self._patience_s:
            job.stop.set()
            self._lost.append(job)
            self._job = None

    # --- in the thread

    def _run(self, job: _Job) -> None:
        be_idle()
        try:
            while self._job is job:
                job.wake.wait()
                job.wake.clear()
                with self._lock:
                    request, self._next = self._next, None
                if request is not None and self._job is job:
                    limit_s = request.timeout_s + len(request.rests) * request.rest_budget_s + self._patience_s
                    with workers.step("a walk", limit_s=limit_s):
                        self._measure(job, request)
        except BaseException:
            # The next request makes another one.
            with self._lock:
                self._job = None if self._job is job else self._job
            raise
        finally:
            job.meter.close()

    def _measure(self, job: _Job, request: Request) -> None:
        began = time.monotonic()
        until = began + request.timeout_s
        job.stop.clear()
        job.deadline = until + len(request.rests) * request.rest_budget_s
        pods: Mapping[str, PodDisk] = {}
        failure = ""

        def unwanted() -> bool:
            return job.stop.is_set() or self._job is not job

        accounts: tuple[Account, ...] = ()
        try:
            used = self._used(request)
            pods = job.meter.measure(
                request.pods,
                until=until,
                count=request.what,
                unwritten=self._unwritten,
                anew=request.anew,
                stop=unwanted,
            )
            if job.meter.whole and not request.anew:
                accounts = self._account(used, pods)
        except Exception as error:  # whatever it is, the thread must live, and the report say so
            failure = f"measuring disks failed: {type(error).__name__}: {error}"
        with self._lock:
            if self._job is not job:
                return
            self._failure = failure
            if not failure:
                self._pods = {**self._pods, **pods} if request.anew else pods
                self._finished_at = time.clock_gettime(time.CLOCK_BOOTTIME)
                self._accounts = accounts or self._accounts
                if not request.anew:
                    self._took_s = time.monotonic() - began
                if not request.rests:
                    job.deadline = None
            else:
                job.deadline = None
        self._wake()
        if request.rests and not failure:
            self._find_rests(job, request, pods)

    def _used(self, request: Request) -> list[tuple[FileSystemOf, Used]]:
        """Before anything is counted: what is written meanwhile must not look as if it were in no pod."""
        find_used = self._find_used
        if find_used is None:
            return []
        used = []
        for wanted in request.accounts:
            with contextlib.suppress(Unreadable, OSError):  # its signal says why by itself
                used.append((wanted, find_used(wanted)))
        return used

    def _account(self, used: Sequence[tuple[FileSystemOf, Used]], pods: Mapping[str, PodDisk]) -> tuple[Account, ...]:
        find_held = self._find_held
        if find_held is None:
            return ()
        left: frozenset[PodPart] | None = None
        if used and self._find_left is not None:
            with contextlib.suppress(Unreadable):
                left = self._find_left()
        return tuple(
            Account(
                wanted,
                there.read_at,
                Held(there.bytes, there.inodes),
                {part: held for disk in pods.values() for part, held in find_held(there, disk).items()},
                left,
            )
            for wanted, there in used
        )

    def _find_rests(self, job: _Job, request: Request, pods: Mapping[str, PodDisk]) -> None:
        found = []
        for wanted in request.rests:
            if self._find_rest is None or job.stop.is_set():
                break
            try:
                found.append(self._find_rest(wanted, list(pods.values()), time.monotonic() + request.rest_budget_s))
            except (Unreadable, OSError):
                continue  # its signal says why by itself
            except Exception as error:  # the thread must live, and the report say so
                with self._lock:
                    self._failure = f"measuring disks failed: {type(error).__name__}: {error}"
        with self._lock:
            if self._job is not job:
                return
            self._rests = tuple(found)
            job.deadline = None
        self._wake()


def be_idle() -> bool:
    """Gives this thread the idle I/O class, in which it gets the disk only when nobody else wants it; false where the
    kernel does not let it. Its CPU priority stays: walking is wanted most when the node is busy."""
    import ctypes
    import platform

    # psutil's ionice does the same for 12 MiB. The numbers are those of the kernel's system call tables.
    number = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "s390x": 282, "ppc64le": 273}.get(platform.machine())
    if number is None:
        return False
    who_process, this_thread, idle = 1, 0, 3 << 13
    reply: int = ctypes.CDLL(None).syscall(number, who_process, this_thread, idle)
    return reply == 0

"""The threads beside the loop: begun here, and watched here, so that one that is stuck or has died is told of.

Promises:

1. A thread that ends by an error is known, with the error, until another one of its name is begun.
2. A thread that takes longer for a step than it may is known, with the step.
3. `begin` and `start` never raise, and `stuck` only reads what threads have written down: whatever they do, the loop
   goes on.
4. A worker that lasts (`thread_of`) starts again after any error, in the same thread, which needs
   no PID: after `AGAIN_S`, then twice as long each time, up to `AGAIN_LAST_S`. Its failures are counted.
5. A worker that could not be started for want of a PID (`start`) is started later by `start_waiting`, in the order in
   which they were made; the loop calls that.

Theory of operation. Where a thread does what may hang (a request, a system call on a foreign disk, a write to a log
that somebody reads), it says so with `at`, and until when it should be through. The limits are above the deadlines of
what is done there: it is the deadline that did not hold which is told. A thread that waits for work is at nothing.
Nobody can end a thread that hangs in the kernel; what may be done about it (abandon it, go on without) is its owner's
affair.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from nodeagent.model import Note, NoteKind

REMEMBERED: Final = 32
"""Threads that died, by name: there are some twenty names."""
LONGEST_MESSAGE: Final = 500
"""Of an error, which may quote what somebody sent."""
AGAIN_S: Final = 0.5
"""Until a worker that failed starts again, the first time."""
AGAIN_LAST_S: Final = 30.0
"""The longest such wait: what fails at once costs two attempts a minute."""
RAN_S: Final = 60.0
"""A worker that ran so long without a failure works again; the next failure is a first one."""
FAILED_S: Final = 300.0
"""A worker that has been failing for so long will not mend itself: a fresh process may (`failed`)."""
WAIT_S: Final = 0.5
WAIT_LAST_S: Final = 5.0
"""Between two attempts to start what had no PID, first and last. One costs a clone(2) that the kernel refuses."""


class Stuck(NamedTuple):
    """A thread that does not do its work."""

    kind: str
    """Its name without numbers and what it is about: `evict` of `evict-3`, `statvfs` of `statvfs /mnt`."""
    name: str
    message: str


class _Failing(NamedTuple):
    """A worker that fails and starts again; instants on time.monotonic()."""

    since: float
    """When the first of its failures in a row was."""
    until: float
    """When it will have run for `RAN_S`, unless it fails again."""
    in_a_row: int
    message: str


class _Step(NamedTuple):
    what: str
    until: float
    """On time.monotonic()."""
    limit_s: float


class _Worker:
    """One thread, as it tells of itself."""

    __slots__ = ("name", "step")

    def __init__(self, name: str) -> None:
        self.name = name
        self.step: _Step | None = None


class _Register:
    """All threads of the process, as `threading.enumerate` has them; there is one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: set[_Worker] = set()
        self.died: dict[str, str] = {}
        self.failing: dict[str, _Failing] = {}
        self.failures: dict[str, int] = {}
        """By kind, since the start."""
        self.waiting: dict[threading.Thread, None] = {}
        """Made, and not started for want of a PID; oldest first."""
        self.wait_until = 0.0
        self.wait_s = WAIT_S
        self.here = threading.local()


_register: Final = _Register()


def start_thread(work: Callable[[], object], *, name: str) -> threading.Thread | None:
    """Start a thread for one job, which does not keep the process. None when the kernel has no PID left for it; `stuck`
    says so until it succeeds."""
    thread = threading.Thread(target=_run, args=(work, name, False), name=name, daemon=True)
    return thread if _start(thread) else None


def start(thread: threading.Thread) -> bool:
    """Start a thread of `thread_of`; False when there is no PID left for it: `start_waiting` tries again."""
    if _start(thread):
        with _register.lock:
            _register.waiting.pop(thread, None)
        return True
    with _register.lock:
        _register.waiting[thread] = None
    return False


def settled(name: str) -> None:
    """What had no PID for a thread of this name was done without one."""
    with _register.lock:
        _register.died.pop(name, None)


def make_thread(work: Callable[[], object], *, name: str) -> threading.Thread:
    """A thread for a worker that lasts (promise 4), not started yet."""
    return threading.Thread(target=_run, args=(work, name, True), name=name, daemon=True)


def start_waiting(now: float | None = None) -> float:
    """Start what had no PID, if it is time to try again. Returns the seconds until the next attempt; infinite: nothing
    waits. One thread calls this."""
    now = time.monotonic() if now is None else now
    while (thread := next(iter(_register.waiting), None)) is not None:
        if now < _register.wait_until:
            return _register.wait_until - now
        if not _start(thread):
            wait_s, _register.wait_s = _register.wait_s, min(2 * _register.wait_s, WAIT_LAST_S)
            _register.wait_until = now + wait_s
            return wait_s
        with _register.lock:
            _register.waiting.pop(thread, None)
        _register.wait_s = WAIT_S
    return float("inf")


def join(thread: threading.Thread, timeout_s: float) -> None:
    """Wait for the end of a thread that was told to end, at most so long; one that still waits for a PID is not
    started any more."""
    with _register.lock:
        if thread in _register.waiting:
            del _register.waiting[thread]
            _register.died.pop(thread.name, None)
    if thread.is_alive():
        thread.join(timeout_s)


@contextlib.contextmanager
def step(what: str, *, limit_s: float) -> Iterator[None]:
    """The present thread is at this, for at most so long. In a thread that was not begun here it has no effect."""
    worker: _Worker | None = getattr(_register.here, "worker", None)
    if worker is None:
        yield
        return
    before = worker.step
    worker.step = _Step(what, time.monotonic() + limit_s, limit_s)
    try:
        yield
    finally:
        worker.step = before


def stuck_workers(now: float | None = None) -> tuple[Stuck, ...]:
    """Who does not do its work at this time.monotonic() (None: now), by name. From any thread."""
    now = time.monotonic() if now is None else now
    with _register.lock:
        found = [(name, message) for name, message in _register.died.items()]
        found += [(name, f"fails and starts again: {each.message}") for name, each in _failing(now)]
        running = list(_register.running)
    for worker in running:
        step = worker.step
        if step is not None and now > step.until:
            found.append((worker.name, f"has been at {step.what} for more than {step.limit_s:.0f}s"))
    return tuple(Stuck(_kind(name), name, message) for name, message in sorted(found))


def stuck_notes() -> tuple[Note, ...]:
    """The same for the log and the report."""
    return tuple(Note(NoteKind.WORKERS, f"the thread {each.name} {each.message}") for each in stuck_workers())


def failed(now: float | None = None) -> tuple[str, ...]:
    """Workers that have been failing for more than `FAILED_S`, for a probe: a fresh process may do better. One that has
    no PID, or hangs in the kernel, is not among them: a restart would not help it. From any thread."""
    now = time.monotonic() if now is None else now
    with _register.lock:
        return tuple(
            f"worker {name}: has been failing for {now - each.since:.0f}s, at most {FAILED_S:g}s: {each.message}"
            for name, each in _failing(now)
            if now - each.since > FAILED_S
        )


def failures() -> dict[str, int]:
    """How often workers have failed since the start, by kind. From any thread."""
    with _register.lock:
        return dict(_register.failures)


def _failing(now: float) -> list[tuple[str, _Failing]]:
    return [(name, each) for name, each in sorted(_register.failing.items()) if now < each.until]


def _start(thread: threading.Thread) -> bool:
    if thread.ident is not None:  # by somebody else, since
        return True
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        _died(thread.name, f"could not be begun: {error}")
        return False
    return True


def _run(work: Callable[[], object], name: str, lasts: bool) -> None:
    worker = _Worker(name)
    _register.here.worker = worker
    with _register.lock:
        _register.running.add(worker)
        _register.died.pop(name, None)
        _register.failing.pop(name, None)
    try:
        while True:
            try:
                work()
            except Exception as error:  # whatever it is: the loop tells of it, and goes on
                worker.step = None
                wait_s = _failed(name, _text(error), lasts=lasts)
                if not lasts:
                    return
            else:
                return
            # Not in the handler: the error's frames, and what they hold, are gone by now.
            time.sleep(wait_s)
    finally:
        with _register.lock:
            _register.running.discard(worker)


def _failed(name: str, message: str, *, lasts: bool) -> float:
    """Note a failure. Returns how long to wait before the next try."""
    now, kind = time.monotonic(), _kind(name)
    with _register.lock:
        _register.failures[kind] = _register.failures.get(kind, 0) + 1
        if lasts:
            before = _register.failing.pop(name, None)
            in_a_row, since = 1, now
            if before is not None and now < before.until:
                in_a_row, since = before.in_a_row + 1, before.since
            wait_s = min(AGAIN_S * 2.0 ** min(in_a_row - 1, 10), AGAIN_LAST_S)
            _register.failing[name] = _Failing(since, now + wait_s + RAN_S, in_a_row, message)
            while len(_register.failing) > REMEMBERED:
                del _register.failing[next(iter(_register.failing))]
            return wait_s
    _died(name, f"has died: {message}")
    return 0.0


def _died(name: str, message: str) -> None:
    with _register.lock:
        _register.died.pop(name, None)
        _register.died[name] = message
        while len(_register.died) > REMEMBERED:
            del _register.died[next(iter(_register.died))]


def _text(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:LONGEST_MESSAGE]
    except Exception:  # MemoryError again, or a text that cannot be made
        return type(error).__name__


def _kind(name: str) -> str:
    return name.partition(" ")[0].rstrip("-0123456789")

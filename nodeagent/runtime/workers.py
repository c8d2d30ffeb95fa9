"""Starts and watches the threads beside the loop, so that a stuck or dead thread is reported.

Promises:

1. A thread that ends with an error is reported, with the error, until another thread of its name starts.
2. A thread that exceeds the limit of a step is reported, with the step.
3. `start_thread` and `start` never raise. `stuck_workers` only reads what the threads have stored, so that no thread
   can block the loop.
4. A lasting worker (`make_thread`) runs again after any error, in the same thread, which needs no PID: after
   `WORKER_RETRY_S`, then twice as long each time, up to `MAX_WORKER_RETRY_S`. Its failures are counted.
5. A lasting worker without a free PID (`start`) is started later by `start_waiting`, oldest first. The loop calls it.

Theory of operation. A thread marks what may hang (a request, a system call on a foreign disk, a write to a log pipe) as
a `step` with a time limit. The limit is above the deadline of the step: only a step that outlives its own deadline is
reported. A thread that waits for work has no step. A thread that hangs in the kernel cannot be ended; its owner decides
whether to abandon it.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeVar

from nodeagent.model import Note, NoteKind

MAX_REPORTED: Final = 32
"""Dead or failing threads, by name: there are about twenty names."""
MAX_MESSAGE_CHARS: Final = 500
"""Of an error, which may quote a server's reply."""
WORKER_RETRY_S: Final = 0.5
"""First wait before a failed worker runs again."""
MAX_WORKER_RETRY_S: Final = 30.0
"""Longest such wait: a worker that fails at once costs two attempts per minute."""
RECOVERED_AFTER_S: Final = 60.0
"""A worker that ran this long without a failure has recovered; its next failure counts as the first."""
FAILED_S: Final = 300.0
"""A worker that has failed this long will not recover, but a new process may: see `failing_workers`."""
START_RETRY_S: Final = 0.5
MAX_START_RETRY_S: Final = 5.0
"""First and longest wait between two attempts to start a thread without a free PID. An attempt costs a failed
clone(2)."""


class Stuck(NamedTuple):
    """A thread that is stuck, dead or failing."""

    kind: str
    """Its name without number and argument: `evict` of `evict-3`, `statvfs` of `statvfs /mnt`."""
    name: str
    message: str


class _Failing(NamedTuple):
    """A worker that fails and runs again; times are time.monotonic()."""

    since: float
    """When the first of its consecutive failures was."""
    until: float
    """When it will have recovered, unless it fails again."""
    consecutive: int
    message: str


class _Step(NamedTuple):
    what: str
    until: float
    """On time.monotonic()."""
    limit_s: float


class _Worker:
    """One thread and its current step."""

    __slots__ = ("name", "step")

    def __init__(self, name: str) -> None:
        self.name = name
        self.step: _Step | None = None


class _Registry:
    """All threads of the process that were started here; there is one registry."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: set[_Worker] = set()
        self.died: dict[str, str] = {}
        self.failing: dict[str, _Failing] = {}
        self.failures: dict[str, int] = {}
        """By kind, since the start."""
        self.waiting: dict[threading.Thread, None] = {}
        """Threads without a free PID, oldest first."""
        self.wait_until = 0.0
        self.wait_s = START_RETRY_S
        self.here = threading.local()


_registry: Final = _Registry()


def start_thread(work: Callable[[], object], *, name: str) -> threading.Thread | None:
    """Start a daemon thread for one job. None if no PID is free; `stuck_workers` reports that until a thread of this
    name starts."""
    thread = threading.Thread(target=_run, args=(work, name, False), name=name, daemon=True)
    return thread if _start(thread) else None


def start(thread: threading.Thread) -> bool:
    """Start a thread of `make_thread`. False if no PID is free: `start_waiting` tries again."""
    if _start(thread):
        with _registry.lock:
            _registry.waiting.pop(thread, None)
        return True
    with _registry.lock:
        _registry.waiting[thread] = None
    return False


def clear_failed_start(name: str) -> None:
    """Stop reporting a thread that had no free PID: its work was done without a thread."""
    with _registry.lock:
        _registry.died.pop(name, None)


def make_thread(work: Callable[[], object], *, name: str) -> threading.Thread:
    """A thread for a lasting worker (promise 4), not started yet."""
    return threading.Thread(target=_run, args=(work, name, True), name=name, daemon=True)


def start_waiting(now: float | None = None) -> float:
    """Start the threads without a PID, if the next attempt is due. Returns the seconds until the next attempt, infinite
    if no thread waits. Only the loop calls this."""
    now = time.monotonic() if now is None else now
    while (thread := next(iter(_registry.waiting), None)) is not None:
        if now < _registry.wait_until:
            return _registry.wait_until - now
        if not _start(thread):
            wait_s, _registry.wait_s = _registry.wait_s, min(2 * _registry.wait_s, MAX_START_RETRY_S)
            _registry.wait_until = now + wait_s
            return wait_s
        with _registry.lock:
            _registry.waiting.pop(thread, None)
        _registry.wait_s = START_RETRY_S
    return float("inf")


def join(thread: threading.Thread, timeout_s: float) -> None:
    """Wait at most `timeout_s` for the end of a thread. A thread that still waits for a PID is not started later."""
    with _registry.lock:
        if thread in _registry.waiting:
            del _registry.waiting[thread]
            _registry.died.pop(thread.name, None)
    if thread.is_alive():
        thread.join(timeout_s)


@contextlib.contextmanager
def step(what: str, *, limit_s: float) -> Iterator[None]:
    """Mark a step of the current thread with its time limit. Without effect in a thread that was not started here."""
    worker: _Worker | None = getattr(_registry.here, "worker", None)
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
    """The stuck, dead and failing threads at this time.monotonic() (None: now), by name. May be called by any
    thread."""
    now = time.monotonic() if now is None else now
    with _registry.lock:
        found = [(name, message) for name, message in _registry.died.items()]
        found += [(name, f"fails and runs again: {each.message}") for name, each in _failing(now)]
        running = list(_registry.running)
    for worker in running:
        step = worker.step
        if step is not None and now > step.until:
            found.append((worker.name, f"stuck in {step.what} for more than {step.limit_s:.0f}s"))
    return tuple(Stuck(_kind(name), name, message) for name, message in sorted(found))


def stuck_notes() -> tuple[Note, ...]:
    """The same as notes, for log and report."""
    return tuple(Note(NoteKind.WORKERS, f"thread {each.name} {each.message}") for each in stuck_workers())


def failing_workers(now: float | None = None) -> tuple[str, ...]:
    """The workers that have failed for more than `FAILED_S`, for the liveness probe: a new process may succeed. Workers
    without a PID and workers that hang in the kernel are not included, because a restart does not help them. May be
    called by any thread."""
    now = time.monotonic() if now is None else now
    with _registry.lock:
        return tuple(
            f"worker {name} failing for {now - each.since:.0f}s, limit {FAILED_S:g}s: {each.message}"
            for name, each in _failing(now)
            if now - each.since > FAILED_S
        )


def failure_counts() -> dict[str, int]:
    """Failures of workers since the start, by kind. May be called by any thread."""
    with _registry.lock:
        return dict(_registry.failures)


def _failing(now: float) -> list[tuple[str, _Failing]]:
    return [(name, each) for name, each in sorted(_registry.failing.items()) if now < each.until]


def _start(thread: threading.Thread) -> bool:
    if thread.ident is not None:  # started meanwhile
        return True
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        _report_death(thread.name, f"could not be started: {error}")
        return False
    return True


def _run(work: Callable[[], object], name: str, lasts: bool) -> None:
    worker = _Worker(name)
    _registry.here.worker = worker
    with _registry.lock:
        _registry.running.add(worker)
        _registry.died.pop(name, None)
        _registry.failing.pop(name, None)
    try:
        while True:
            try:
                work()
            except Exception as error:  # the loop reports it and continues
                worker.step = None
                wait_s = _count_failure(name, error_text(error), lasts=lasts)
                if not lasts:
                    return
            else:
                return
            # Not in the handler, so that the error's frames and their objects are freed before.
            time.sleep(wait_s)
    finally:
        with _registry.lock:
            _registry.running.discard(worker)


def _count_failure(name: str, message: str, *, lasts: bool) -> float:
    """Count a failure. Returns the seconds until the next attempt."""
    now, kind = time.monotonic(), _kind(name)
    with _registry.lock:
        _registry.failures[kind] = _registry.failures.get(kind, 0) + 1
        if lasts:
            before = _registry.failing.pop(name, None)
            consecutive, since = 1, now
            if before is not None and now < before.until:
                consecutive, since = before.consecutive + 1, before.since
            wait_s = min(WORKER_RETRY_S * 2.0 ** min(consecutive - 1, 10), MAX_WORKER_RETRY_S)
            _registry.failing[name] = _Failing(since, now + wait_s + RECOVERED_AFTER_S, consecutive, message)
            while len(_registry.failing) > MAX_REPORTED:
                del _registry.failing[next(iter(_registry.failing))]
            return wait_s
    _report_death(name, f"has died: {message}")
    return 0.0


def _report_death(name: str, message: str) -> None:
    with _registry.lock:
        _registry.died.pop(name, None)
        _registry.died[name] = message
        while len(_registry.died) > MAX_REPORTED:
            del _registry.died[next(iter(_registry.died))]


def error_text(error: Exception) -> str:
    """The type and the message of an error, bounded. Never raises."""
    try:
        return f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS]
    except Exception:  # another MemoryError, or __str__ fails
        return type(error).__name__


def _kind(name: str) -> str:
    return name.partition(" ")[0].rstrip("-0123456789")


T = TypeVar("T")


def drain(results: "queue.SimpleQueue[T]") -> tuple[T, ...]:
    """What a worker has put there since the last call, oldest first; never waits."""
    found = []
    while True:
        try:
            found.append(results.get_nowait())
        except queue.Empty:
            return tuple(found)

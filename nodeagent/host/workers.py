"""The threads beside the loop: begun here, and watched here, so that one that is stuck or has died is told of.

Promises:

1. A thread that ends by an error is known, with the error, until another one of its name is begun.
2. A thread that takes longer for a step than it may is known, with the step.
3. `begin` never raises, and `stuck` only reads what threads have written down: whatever they do, the loop goes on.

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

from nodeagent.lean import Final, NamedTuple
from nodeagent.model import Note

SUBJECT: Final = "workers"
REMEMBERED: Final = 32
"""Threads that died, by name: there are some twenty names."""


class Stuck(NamedTuple):
    """A thread that does not do its work."""

    kind: str
    """Its name without numbers and what it is about: `evict` of `evict-3`, `statvfs` of `statvfs /mnt`."""
    name: str
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
        self.here = threading.local()


_register: Final = _Register()


def begin(work: Callable[[], object], *, name: str) -> threading.Thread | None:
    """Start a thread that does not keep the process. None when the kernel has no PID left for one; `stuck` says so
    until it succeeds."""
    thread = thread_of(work, name=name)
    return thread if start(thread) else None


def start(thread: threading.Thread) -> bool:
    """The same for a thread of `thread_of`; False when there is no PID left for it: it may be tried again."""
    try:
        thread.start()
    except RuntimeError as error:
        _died(thread.name, f"could not be begun: {error}")
        return False
    return True


def thread_of(work: Callable[[], object], *, name: str) -> threading.Thread:
    """The same, not started yet."""
    return threading.Thread(target=_run, args=(work, name), name=name, daemon=True)


@contextlib.contextmanager
def at(what: str, *, limit_s: float) -> Iterator[None]:
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


def stuck(now: float | None = None) -> tuple[Stuck, ...]:
    """Who does not do its work at this time.monotonic() (None: now), by name. From any thread."""
    now = time.monotonic() if now is None else now
    with _register.lock:
        found = [(name, message) for name, message in _register.died.items()]
        running = list(_register.running)
    for worker in running:
        step = worker.step
        if step is not None and now > step.until:
            found.append((worker.name, f"has been at {step.what} for more than {step.limit_s:.0f}s"))
    return tuple(Stuck(_kind(name), name, message) for name, message in sorted(found))


def notes() -> tuple[Note, ...]:
    """The same for the log and the report."""
    return tuple(Note(SUBJECT, f"the thread {each.name} {each.message}") for each in stuck())


def _run(work: Callable[[], object], name: str) -> None:
    worker = _Worker(name)
    _register.here.worker = worker
    with _register.lock:
        _register.running.add(worker)
        _register.died.pop(name, None)
    try:
        work()
    except Exception as error:  # whatever it is: the loop tells of it, and goes on
        _died(name, f"has died: {type(error).__name__}: {error}")
    finally:
        with _register.lock:
            _register.running.discard(worker)


def _died(name: str, message: str) -> None:
    with _register.lock:
        _register.died[name] = message
        while len(_register.died) > REMEMBERED:
            del _register.died[next(iter(_register.died))]


def _kind(name: str) -> str:
    return name.partition(" ")[0].rstrip("-0123456789")

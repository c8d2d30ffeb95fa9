"""Runs one input of a target under limits, and searches for inputs that break its property.

The search mutates inputs and keeps those that reach lines of nodeagent that no input reached before. It needs nothing
but the interpreter, and tries the same inputs for the same seed.
"""

import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

from tests.fuzz import mutation
from tests.support.paths import REPOSITORY

CORPUS: Final = REPOSITORY / "tests" / "data" / "fuzz"
LIMIT_S: Final = 2.0
"""CPU of one input. The slowest honest one takes 30 ms, or 0.3 s with its lines counted."""
LIMIT_BYTES: Final = 192 << 20
"""By which one input may raise the peak of the process's memory."""
MAX_INPUT_BYTES: Final = 64 << 10
KEPT_BYTES: Final = 4096
"""Longest input that is written to the corpus for the lines that it reaches; what finds a defect has no limit."""
_SETTLED_CALLS: Final = 500
_PACKAGE: Final = str(REPOSITORY / "nodeagent") + "/"


class Target(NamedTuple):
    """A parser."""

    name: str
    """Also the directory of its corpus."""
    parse: Callable[[bytes], object]
    """Parses the bytes, and asserts what holds for every result."""
    errors: tuple[type[Exception], ...] = ()
    """Documented ones; any other exception is a defect."""
    seeds: tuple[bytes, ...] = ()
    tokens: tuple[bytes, ...] = ()
    """Words of its grammar, for the mutations."""


class Finding(NamedTuple):
    """An input that breaks the property of its target."""

    target: str
    what: str
    """`crash`, `hang` or `memory`."""
    data: bytes
    text: str
    """The traceback, or the figure."""
    place: str
    """Where it was raised, to report one defect once."""


class HangError(BaseException):
    """Raised into a target that takes too long. No `except Exception` catches it."""


def kept(target: Target) -> Iterator[tuple[str, bytes]]:
    """Name and content of each input of the corpus."""
    directory = CORPUS / target.name
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        yield path.name, path.read_bytes()


def keep(target: Target, data: bytes, *, why: str) -> Path:
    """Write an input to the corpus; `why` begins its name."""
    import hashlib

    path = CORPUS / target.name / f"{why}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def try_input(target: Target, data: bytes, *, limit_s: float = LIMIT_S) -> Finding | None:
    """The defect that this input shows, if there is one."""
    before = _reset_peak()
    try:
        with _cpu_limit(limit_s):
            target.parse(data)
    except target.errors:
        pass
    except HangError as error:
        return Finding(target.name, "hang", data, _last_lines(error), _place(error))
    except Exception as error:
        return Finding(target.name, "crash", data, _last_lines(error), f"{type(error).__name__} {_place(error)}")
    grown = _peak() - before
    if grown > LIMIT_BYTES:
        return Finding(target.name, "memory", data, f"{grown >> 20} MiB for {len(data)} bytes", "memory")
    return None


def _reset_peak() -> int:
    """Forget the peak of the process's memory (proc(5), clear_refs), and return the new one in bytes."""
    with suppress(OSError):  # a kernel without it: only what exceeds all earlier peaks is found
        Path("/proc/self/clear_refs").write_bytes(b"5")
    return _peak()


def _peak() -> int:
    """The peak of the process's memory in bytes."""
    (kibibytes,) = re.findall(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kibibytes) << 10


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    def hang(_number: int, _frame: FrameType | None) -> None:
        raise HangError(f"more than {seconds:g} s of CPU")

    before = signal.signal(signal.SIGVTALRM, hang)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _last_lines(error: BaseException) -> str:
    lines = traceback.format_exception(error, limit=-6)
    return "".join(lines)[-3000:]


def _place(error: BaseException) -> str:
    """The deepest line of nodeagent in the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f"{frame.filename.removeprefix(_PACKAGE)}:{frame.lineno}" for frame in frames if _PACKAGE in frame.filename]
    return ours[-1] if ours else "outside"


class Coverage:
    """The lines of nodeagent that were executed. A function without a new line in its last calls is not traced any
    more, because that takes ten times as long."""

    def __init__(self) -> None:
        self._lines: set[tuple[CodeType, int]] = set()
        self._calls: dict[CodeType, int] = {}
        """Calls of a function since its last new line; -1: not of nodeagent."""

    def __len__(self) -> int:
        return len(self._lines)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the lines of this thread."""
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, _event: str, _argument: object) -> Any:
        code = frame.f_code
        calls = self._calls.get(code)
        if calls is None:
            calls = self._calls[code] = 0 if code.co_filename.startswith(_PACKAGE) else -1
        if not 0 <= calls < _SETTLED_CALLS:
            return None
        self._calls[code] = calls + 1
        return self._line

    def _line(self, frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line":
            line = (frame.f_code, frame.f_lineno)
            if line not in self._lines:
                self._lines.add(line)
                self._calls[frame.f_code] = 0
        return self._line


class Searched(NamedTuple):
    """The result of a search."""

    inputs: int
    lines: int
    reached: tuple[bytes, ...]
    """The inputs that reached new lines."""
    findings: tuple[Finding, ...]


def search(
    target: Target, *, seconds: float, seed: int = 1, most: int | None = None, limit_s: float = LIMIT_S
) -> Searched:
    """Mutate the seeds and the corpus for this much CPU, at most four times as long, or until `most` inputs were
    tried."""
    rng = random.Random(f"{target.name} {seed}")
    coverage = Coverage()
    begin = [*target.seeds, *(data for _, data in kept(target))] or [b""]
    pool: list[bytes] = []
    reached: list[bytes] = []
    findings: dict[str, Finding] = {}
    cpu_until, until = time.process_time() + seconds, time.monotonic() + 4.0 * seconds
    tried = 0
    for data in _inputs(rng, begin, pool, target):
        if tried == most or time.process_time() >= cpu_until or time.monotonic() >= until:
            break
        tried += 1
        lines = len(coverage)
        with coverage.counted():
            finding = try_input(target, data, limit_s=limit_s)
        if finding is not None:
            findings.setdefault(finding.place, finding)
        elif len(coverage) > lines or tried <= len(begin):
            pool.append(data)
            if tried > len(begin):
                reached.append(data)
    return Searched(tried, len(coverage), tuple(reached), tuple(findings.values()))


def smallest(target: Target, inputs: Iterable[bytes]) -> list[bytes]:
    """Those of the inputs that together reach the lines which seeds and corpus do not reach, short ones first."""
    coverage = Coverage()
    chosen = []
    known = [*target.seeds, *(data for _, data in kept(target))]
    for number, data in enumerate([*known, *sorted(inputs, key=len)]):
        lines = len(coverage)
        with coverage.counted():
            finding = try_input(target, data)
        if number >= len(known) and finding is None and len(coverage) > lines and len(data) <= KEPT_BYTES:
            chosen.append(data)
    return chosen


def _inputs(rng: random.Random, begin: Iterable[bytes], pool: list[bytes], target: Target) -> Iterator[bytes]:
    """The first inputs, then mutations of what is in the pool by then."""
    yield from begin
    while True:
        one, other = (rng.choice(pool), rng.choice(pool)) if pool else (b"", b"")
        yield mutation.mutate(rng, one, other, target.tokens)[:MAX_INPUT_BYTES]

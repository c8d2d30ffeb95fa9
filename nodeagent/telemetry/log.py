"""The log: structlog events, one line each, that can never hold up a decision.

Promises:

1. Logging never waits for its reader. Lines go to a bounded queue which a thread writes out; when the reader (a full
   disk, a stopped pipe) does not take them, new lines are dropped, counted, and the count is told when it flows again.
   While there is no PID for that thread lines are written as they come, as far as the reader takes them at once.
2. A line is one line: values are encoded as JSON (or quoted on a console), so text from pods cannot forge a line or
   move a terminal's cursor, and no text keeps a line from being written.
3. What would repeat in a loop is said once, and again every `REPEAT_S` with the number of times it was held back: give
   the event a `once=` key. A changed key is a new event.
"""

import collections
import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any, Final, cast

from nodeagent.records.utf8 import writable
from nodeagent.runtime import workers

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

QUEUE_LINES: Final = 2000
"""Lines kept for a reader that is slow: about 1 MiB at the usual 500 bytes, some minutes of a busy node."""
REPEAT_S: Final = 300.0
"""How often a lasting fact is said again. Rare enough to be read, often enough to be found in a log's last hour."""
REPEAT_KEYS: Final = 2000
"""Bound on remembered keys: a few for each of 500 pods. What does not fit is counted, not written: forgetting a key
that still repeats would write all of them in every turn of the loop."""
UNREAD_S: Final = 30.0
"""A reader that does not read for so long is no pause any more: it is told where it can be, which is not the log."""
LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}

LogEvent = MutableMapping[str, Any]


class LineWriter:
    """Writes lines to a file descriptor from its own thread, dropping what the reader does not take (promise 1)."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lines: collections.deque[bytes] = collections.deque()
        self._dropped = 0
        self._lost = 0
        self._wake = threading.Condition()
        self._closing = threading.Event()
        self._thread = workers.make_thread(self._write_out, name="log")
        workers.start(self._thread)

    @property
    def dropped(self) -> int:
        """Lines dropped and not yet told."""
        return self._dropped

    @property
    def dropped_total(self) -> int:
        """Lines dropped since the start, for the metrics."""
        return self._lost

    def line(self, text: bytes) -> None:
        """Queue one line, without its newline."""
        with self._wake:
            if len(self._lines) >= QUEUE_LINES:
                self._dropped += 1
                self._lost += 1
                return
            self._lines.append(text)
            self._wake.notify()
            if self._thread.ident is None:
                self._write_taken(0.0)

    debug = info = warning = error = critical = line  # structlog hands a rendered event to the method of its level

    def close(self, timeout_s: float = 1.0) -> None:
        """Write out what is queued, but do not wait longer than this for a reader that does not read."""
        with self._wake:
            self._closing.set()
            self._wake.notify()
        workers.join(self._thread, timeout_s)
        if self._thread.ident is None:
            with self._wake:
                self._write_taken(timeout_s)

    def _write_taken(self, timeout_s: float) -> None:
        """While there is no PID for the thread: write what the reader takes without waiting, or within this time."""
        until, ready = time.monotonic() + timeout_s, select.poll()
        with contextlib.suppress(OSError):  # as in `_write_out`
            ready.register(self._fd, select.POLLOUT)
            while self._lines:
                left = self._lines.popleft() + b"\n"
                while left:
                    # What poll promises of a pipe is room for PIPE_BUF bytes.
                    if not ready.poll(max(0.0, until - time.monotonic()) * 1000):
                        self._lines.appendleft(left.removesuffix(b"\n"))
                        return
                    left = left[os.write(self._fd, left[: select.PIPE_BUF]) :]

    def _write_out(self) -> None:
        while True:
            with self._wake:
                while not self._lines and not self._closing.is_set():
                    self._wake.wait()
                if not self._lines:
                    return
                batch = list(self._lines)
                self._lines.clear()
                dropped, self._dropped = self._dropped, 0
            if dropped:
                batch.append(
                    b'{"event":"log lines dropped: the reader did not take them","count":%d,"level":"warning"}'
                    % dropped
                )
            try:
                with workers.step("writing the log", limit_s=UNREAD_S):
                    _write_all(self._fd, b"\n".join(batch) + b"\n")
            except OSError:
                # The reader is gone or the disk is full. There is nowhere left to say so but the counter.
                with self._wake:
                    self._dropped += len(batch) - bool(dropped) + dropped
                    self._lost += len(batch) - bool(dropped)
                if self._closing.wait(1.0):  # only this thread waits
                    return


class RepeatFilter:
    """A structlog processor that keeps promise 3."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: collections.OrderedDict[str, tuple[float, int]] = collections.OrderedDict()
        """By key, longest ago first: when it was said, how often it was held back since."""
        self._overflow = 0

    def __call__(self, _logger: object, _method: str, event: LogEvent) -> LogEvent:
        import structlog

        once = event.pop("once", None)
        if once is None:
            return event
        key = f"{event.get('event')}\0{once}"
        now = self._clock()
        said_at, held_back = self._seen.get(key, (None, 0))
        if said_at is not None and now - said_at < REPEAT_S:
            self._seen[key] = (said_at, held_back + 1)
            raise structlog.DropEvent
        if said_at is None and not self._room(now):
            self._overflow += 1
            raise structlog.DropEvent
        self._seen[key] = (now, 0)
        self._seen.move_to_end(key)
        if held_back:
            event["repeated"] = held_back
        if self._overflow:
            event["others_held_back"], self._overflow = self._overflow, 0
        return event

    def _room(self, now: float) -> bool:
        """Whether a new key can be remembered: the one that was said longest ago goes if it is silent by now."""
        if len(self._seen) < REPEAT_KEYS:
            return True
        oldest, (said_at, _) = next(iter(self._seen.items()))
        if now - said_at < REPEAT_S:
            return False
        del self._seen[oldest]
        return True


def open_log(
    *, level: str, style: str, fd: int = 1, clock: Callable[[], float] = time.monotonic
) -> tuple["FilteringBoundLogger", LineWriter]:
    """The program's logger and the writer to close at the end.

    Args:
        level: debug, info, warning or error.
        style: json, console, or auto: console when `fd` is a terminal.
        fd: where lines go; stdout for a daemon, as both systemd and Kubernetes collect it.
        clock: seconds, for `Repeats`.
    """
    structlog = _import_structlog()
    console = style == "console" or (style == "auto" and os.isatty(fd))
    writer = LineWriter(fd)
    processors: list[Any] = [
        RepeatFilter(clock=clock),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.ExceptionRenderer(),
    ]
    if console:
        processors += [
            _escape_control,
            structlog.dev.ConsoleRenderer(colors=os.isatty(fd) and "NO_COLOR" not in os.environ),
            _encode,
        ]
    else:
        processors.append(structlog.processors.JSONRenderer(serializer=_json_line()))
    logger = structlog.wrap_logger(
        writer,
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        context_class=dict,
        cache_logger_on_first_use=True,
    )
    return cast("FilteringBoundLogger", logger), writer


def _import_structlog() -> Any:
    """Import structlog without rich, which it would load for tracebacks we never print: 98 -> 50 ms, 27 -> 22 MiB."""
    if "structlog" not in sys.modules and "rich" not in sys.modules:
        sys.modules["rich"] = None  # type: ignore[assignment]
        try:
            import structlog
        finally:
            del sys.modules["rich"]
    import structlog

    return structlog


def _json_line() -> Callable[..., bytes]:
    """A serializer to one line of JSON that is harmless on a terminal as well, as `kubectl logs` would print it."""
    import msgspec

    encode = msgspec.json.Encoder(enc_hook=str).encode

    def serialize(event: LogEvent, **_: object) -> bytes:
        try:
            line = encode(event)
        except UnicodeEncodeError:
            line = encode(writable(event))
        if line.isascii() and b"\x7f" not in line:
            return line
        # JSON only escapes C0; DEL, C1 controls and bidirectional overrides move a terminal's cursor just as well.
        text = line.decode("utf-8")
        return "".join(char if char.isprintable() else _json_escape(char) for char in text).encode("utf-8")

    return serialize


def _json_escape(char: str) -> str:
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def _escape_control(_logger: object, _method: str, event: LogEvent) -> LogEvent:
    """Keep a terminal safe from text that pods chose (promise 2); JSON does this by itself."""
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[key] = value.encode("unicode_escape").decode("ascii")
    return event


def _encode(_logger: object, _method: str, rendered: str) -> bytes:
    return rendered.encode("utf-8", "backslashreplace")


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]

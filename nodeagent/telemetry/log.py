"""The log: structlog events, one line each, that never delay a decision.

1. Logging never waits for its reader. Lines go to a bounded queue, which a thread writes out. If the reader (a full
   disk, a stopped pipe) does not accept them, new lines are dropped and counted, and the count is logged later. While
   there is no PID for that thread, the caller writes as much as the reader accepts at once.
2. A line is one line: values are encoded as JSON (or quoted on a console), so that text from pods cannot forge a line
   or move a terminal's cursor, and no text prevents a line from being written.
3. An event with a `once=` key is logged once, and again every `LOG_REPEAT_S` with the number of repetitions. A changed
   key is a new event.
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

from nodeagent.records import utf8
from nodeagent.runtime import workers

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

QUEUE_LINES: Final = 2000
"""Queued lines for a slow reader: about 1 MiB at the usual 500 bytes, some minutes of a busy node."""
LOG_REPEAT_S: Final = 300.0
"""How often a lasting fact is logged again: rare enough to keep the log readable, and in every hour of it."""
REPEAT_KEYS: Final = 2000
"""Bound of the stored keys: a few for each of 500 pods. Further events are counted, not written: dropping a key that
still repeats would write all of them in every sync."""
UNREAD_S: Final = 30.0
"""A reader that does not read for this long makes the log thread a stuck worker, which metrics and `check` report."""
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
        """Dropped lines that are not logged yet."""
        return self._dropped

    @property
    def dropped_total(self) -> int:
        """Dropped lines since the start, for the metrics."""
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
                self._write_accepted(0.0)

    debug = info = warning = error = critical = line  # structlog calls the method of the level

    def close(self, timeout_s: float = 1.0) -> None:
        """Write out the queue, waiting at most this long for the reader."""
        with self._wake:
            self._closing.set()
            self._wake.notify()
        workers.join(self._thread, timeout_s)
        if self._thread.ident is None:
            with self._wake:
                self._write_accepted(timeout_s)

    def _write_accepted(self, timeout_s: float) -> None:
        """Write what the reader accepts within this time. Used while there is no PID for the thread."""
        until, ready = time.monotonic() + timeout_s, select.poll()
        with contextlib.suppress(OSError):  # as in `_write_out`
            ready.register(self._fd, select.POLLOUT)
            while self._lines:
                left = self._lines.popleft() + b"\n"
                while left:
                    # For a pipe, poll guarantees space for PIPE_BUF bytes.
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
                batch.append(b'{"event":"log lines dropped","count":%d,"level":"warning"}' % dropped)
            try:
                with workers.step("writing the log", limit_s=UNREAD_S):
                    _write_all(self._fd, b"\n".join(batch) + b"\n")
            except OSError:
                # The reader is gone or the disk is full: only the counter can show it.
                with self._wake:
                    self._dropped += len(batch) - bool(dropped) + dropped
                    self._lost += len(batch) - bool(dropped)
                if self._closing.wait(1.0):  # only this thread waits
                    return


class RepeatFilter:
    """A structlog processor that keeps promise 3."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._repeats: collections.OrderedDict[str, tuple[float, int]] = collections.OrderedDict()
        """By key, oldest first: when it was logged, and how often it was suppressed since."""
        self._overflow = 0

    def __call__(self, _logger: object, _method: str, event: LogEvent) -> LogEvent:
        import structlog

        once = event.pop("once", None)
        if once is None:
            return event
        key = f"{event.get('event')}\0{once}"
        now = self._clock()
        logged_at, suppressed = self._repeats.get(key, (None, 0))
        if logged_at is not None and now - logged_at < LOG_REPEAT_S:
            self._repeats[key] = (logged_at, suppressed + 1)
            raise structlog.DropEvent
        if logged_at is None and not self._has_space(now):
            self._overflow += 1
            raise structlog.DropEvent
        self._repeats[key] = (now, 0)
        self._repeats.move_to_end(key)
        if suppressed:
            event["repeated"] = suppressed
        if self._overflow:
            event["others_suppressed"], self._overflow = self._overflow, 0
        return event

    def _has_space(self, now: float) -> bool:
        """True if a new key can be stored. The oldest key is dropped if it did not repeat within `LOG_REPEAT_S`."""
        if len(self._repeats) < REPEAT_KEYS:
            return True
        oldest, (logged_at, _) = next(iter(self._repeats.items()))
        if now - logged_at < LOG_REPEAT_S:
            return False
        del self._repeats[oldest]
        return True


def open_log(
    *, level: str, style: str, fd: int = 1, clock: Callable[[], float] = time.monotonic
) -> tuple["FilteringBoundLogger", LineWriter]:
    """The program's logger and the writer to close at the end.

    Args:
        level: debug, info, warning or error.
        style: json, console, or auto: console when `fd` is a terminal.
        fd: where lines go; stdout for a daemon, as both systemd and Kubernetes collect it.
        clock: seconds, for `RepeatFilter`.
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
    """Import structlog without rich, which it imports for tracebacks that are never printed: saves 50 ms and 5 MiB."""
    if "structlog" not in sys.modules and "rich" not in sys.modules:
        sys.modules["rich"] = None  # type: ignore[assignment]
        try:
            import structlog
        finally:
            del sys.modules["rich"]
    import structlog

    return structlog


def _json_line() -> Callable[..., bytes]:
    """A serializer to one line of JSON that is also safe on a terminal, for `kubectl logs`."""
    import msgspec

    encode = msgspec.json.Encoder(enc_hook=str).encode

    def serialize(event: LogEvent, **_: object) -> bytes:
        try:
            line = encode(event)
        except UnicodeEncodeError:
            line = encode(utf8.writable(event))
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

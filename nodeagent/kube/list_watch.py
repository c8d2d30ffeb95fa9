"""A copy of some API objects, kept current by list and watch in a thread.

Theory of operation. LIST returns all objects and a resourceVersion; WATCH from that version returns every later change.
A bookmark (about once a minute, and just before the server ends the watch) means that no change was missed so far. The
server ends each watch after `timeoutSeconds`; the next one continues from the last version. Everything is listed again
only if the server no longer has that version (410, as a status or as an event inside a 200), cannot use it (500), or
sends an invalid event.

Promises:

1. A dead connection is detected: bookmarks arrive every minute, so `IDLE_S` without a byte ends the watch.
2. `synced_at` is the latest time at which the copy was current: when the last list was sent, or when the last event or
   bookmark arrived. It does not change while nothing arrives.
3. Each failure waits longer, with jitter, and obeys Retry-After. A success must last before it counts: a server that
   answers every list and breaks every watch does not get requests at full speed.
4. An unreadable object affects only itself; the handler gets either a complete list or one complete event.
5. If an empty list is probably wrong (`doubts_empty`), it does not count for long: unless the watch delivers an object,
   everything is listed again, after `DOUBT_FIRST_S` at first and `DOUBT_LAST_S` in the end.
"""

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol
from urllib.parse import urlencode

import msgspec

from nodeagent.kube import objects
from nodeagent.kube.api_errors import ApiError, TooLargeError
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.line_stream import LineStream
from nodeagent.kube.list_stream import Listing
from nodeagent.kube.transport import Transport
from nodeagent.model import OutcomeKind
from nodeagent.runtime import clock, workers

IDLE_S: Final = 80.0
"""Longest time without a byte of a watch. Bookmarks arrive 57 s after the start and then about every minute."""
WATCH_S: Final = 300.0
"""`timeoutSeconds` of a watch: this to 1.5 times as much, so that the watches of a fleet do not end together."""
WATCH_SUCCESS_S: Final = 5.0
"""A watch that lasted so long was a success. After a shorter one the back-off grows further."""

LIST_SUCCESS_S: Final = 60.0
"""A list that was used for so long was a success. After a shorter time the back-off grows further: a server that lets
every watch expire gets two to four lists a minute in the end."""

DOUBT_FIRST_S: Final = 2.0
DOUBT_LAST_S: Final = 60.0
"""Length of the watch after a doubted empty list, first and last. `timeoutSeconds` are whole seconds."""

_event_decoder = objects.Decoder(objects.WatchEvent)
_status_decoder = objects.Decoder(objects.StatusObject)
_meta_decoder = objects.Decoder(objects.MetaOnly)


class Handler(Protocol):
    """Stores the objects. Called by the list-watch's thread."""

    def replace(self, items: Iterable[msgspec.Raw], /) -> None:
        """Replace all objects, once the iteration has ended. If it raises, nothing may change. The items arrive from
        the network: do not iterate under a lock."""

    def apply(self, kind: str, item: msgspec.Raw, /) -> None:
        """One object was ADDED, MODIFIED or DELETED."""

    def changed(self) -> None:
        """The copy, its age or its trouble has changed; also called after each of the above."""


class _StartOverError(Exception):
    """The stored resourceVersion cannot be used any more."""


class ListWatch:
    """A thread that feeds a `Handler`."""

    def __init__(
        self,
        transport: Transport,
        path: str,
        handler: Handler,
        *,
        field_selector: str = "",
        name: str = "watch",
        clock: Callable[[], float] = clock.boottime,
        idle_s: float = IDLE_S,
        watch_s: float = WATCH_S,
        backoff: RetryBackoff | None = None,
        spread_s: float = 0.0,
        doubts_empty: bool = False,
    ) -> None:
        """`spread_s`: the first list waits for a random part of this, because a whole fleet may start at once.
        `doubts_empty`: at least one object normally exists."""
        self._transport = transport
        self._path = path
        self._handler = handler
        self._field_selector = field_selector
        self._clock = clock
        self._idle_s = idle_s
        self._watch_s = watch_s
        self._backoff = backoff or RetryBackoff()
        self._rng = random.Random()  # noqa: S311 - spreads load, guards nothing
        self._spread_s = spread_s
        self._doubts_empty = doubts_empty
        self._doubt = RetryBackoff(first_s=DOUBT_FIRST_S, last_s=DOUBT_LAST_S)
        self._doubt_s = 0.0
        self._empty = False
        """The last list is doubted: it had no object, and the watch has delivered none."""
        self._stopping = threading.Event()
        self._relisting = threading.Event()
        """Set while an existing object is missing in the copy."""
        self._started = False
        self._stream: LineStream | None = None
        self._version = ""
        self._from_cache = True
        self._listed_at: float | None = None
        """When the last list was complete."""
        self.synced_at: float | None = None
        """CLOCK_BOOTTIME; None before the first list."""
        self.reason = "not listed yet"
        """The trouble now; empty if there is none."""
        self.failures = 0
        """Failed lists and broken watches since the start, for the metrics."""
        self.relists = 0
        """Lists since the start."""
        self._thread = workers.make_thread(self._run, name=name)

    def start(self) -> None:
        """Start; returns at once. If no PID is left for the thread, `reason` states that, and the next call tries
        again. Once started, a call changes nothing."""
        if not self._started:
            self._started = workers.start(self._thread)
            if not self._started:
                self.reason = "no PID left for its thread"

    def relist(self) -> None:
        """List everything again now, because an existing object is missing in the copy. A watch in use ends: its
        connection may be dead. Returns at once; a back-off after failures continues."""
        self._relisting.set()
        stream = self._stream
        if stream is not None:
            stream.abort()

    def stop(self, *, wait_s: float = 2.0) -> None:
        """End the watch and its thread. Waits for the thread for at most this long."""
        self._stopping.set()
        stream = self._stream
        if stream is not None:
            stream.abort()
        workers.join(self._thread, wait_s)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            # A defect of the agent: the thread starts again and lists again.
            self._start_over()
            self.failures += 1
            self.reason = f"{type(error).__name__}: {error}"
            self._handler.changed()
            raise
        else:
            self.reason = "the watch has ended"
            self._handler.changed()

    def _loop(self) -> None:
        self._stopping.wait(self._rng.uniform(0.0, self._spread_s))
        while not self._stopping.is_set():
            started_at = self._clock()
            try:
                if self._relisting.is_set():
                    # Not from the server's cache, which may be outdated.
                    self._version, self._from_cache = "", False
                if not self._version:
                    self._relisting.clear()
                    self._list()
                self._watch()
                if self._relisting.is_set():
                    continue
                wait_s = 0.0
                if self._empty:
                    self._start_over()
                    wait_s = started_at + self._doubt_s - self._clock()
                elif self._clock() - started_at >= WATCH_SUCCESS_S:
                    self._count_success()
                else:
                    # The server ended the watch at once: wait, or this loop would spin.
                    wait_s = self._backoff.failed()
            except _StartOverError as error:
                self._start_over()
                wait_s = self._report_failure(str(error), retry_after_s=None)
            except ApiError as error:
                lasted_s = self._clock() - started_at
                # For a version in the server's future (its data was restored from a backup) it sends nothing at all.
                silent = lasted_s >= self._idle_s and (self.synced_at is None or self.synced_at < started_at)
                # The next list skips an event that is too long. The API server answers a version that is no number
                # with 500, and would do so for ever.
                invalid = error.kind is OutcomeKind.INVALID or (error.status == 500 and error.from_api)
                useless = error.expired or invalid or isinstance(error, TooLargeError)
                if useless or silent or self._empty:
                    self._start_over()
                elif lasted_s >= WATCH_SUCCESS_S:
                    self._count_success()
                wait_s = self._report_failure(error.message, retry_after_s=error.retry_after_s)
            if wait_s > 0.0:
                self._stopping.wait(wait_s)

    def _count_success(self) -> None:
        """The watch has lasted. If the list before it has lasted, too, reset the back-off."""
        if self._listed_at is not None and self._clock() - self._listed_at >= LIST_SUCCESS_S:
            self._backoff.succeeded()

    def _start_over(self) -> None:
        """List again, and not from the server's cache, which may be outdated."""
        self._count_success()
        self._version, self._from_cache, self._listed_at = "", False, None

    def _report_failure(self, reason: str, *, retry_after_s: float | None) -> float:
        if self._stopping.is_set():
            return 0.0
        self.reason = reason
        self.failures += 1
        self._handler.changed()
        return self._backoff.failed(retry_after_s)

    def _list(self) -> None:
        sent_at = self._clock()
        query = {}
        if self._field_selector:
            query["fieldSelector"] = self._field_selector
        # The first list may come from the server's cache, which is cheap. After a 410 that cache may be outdated, so
        # the list is then a consistent read.
        if self._from_cache:
            query["resourceVersion"] = "0"
        self.relists += 1
        listing = Listing(self._transport, self._path, query)
        empty = True

        def items() -> Iterator[msgspec.Raw]:
            nonlocal empty
            for item in listing:
                empty = False
                yield msgspec.Raw(item)

        self._handler.replace(items())
        self._version, self._listed_at = listing.version, self._clock()
        self._empty = empty and self._doubts_empty
        if self._empty:
            self._doubt_s = self._doubt.failed()
        else:
            self._doubt.succeeded()
        self._mark_synced(sent_at)

    def _watch(self) -> None:
        timeout_s = int(self._doubt_s if self._empty else self._watch_s * self._rng.uniform(1.0, 1.5)) or 1
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(timeout_s),
        }
        if self._field_selector:
            query["fieldSelector"] = self._field_selector
        # The server ends the watch; the limit here is only for a server that sends bytes for ever.
        with self._transport.stream(
            f"{self._path}?{urlencode(query)}", idle_s=self._idle_s, total_s=timeout_s + self._idle_s
        ) as stream:
            self._stream = stream
            try:
                if self._stopping.is_set() or self._relisting.is_set():
                    return
                for line in stream.lines():
                    self._event(line)
            finally:
                self._stream = None

    def _event(self, line: bytes) -> None:
        try:
            event = _event_decoder.decode(line)
        except objects.UnreadableError as error:
            raise _StartOverError(f"the watch sent an unreadable event: {error}") from error
        if event.type == "ERROR":
            self._error(event.object)
        version = _version(event.object)
        if event.type in ("ADDED", "MODIFIED", "DELETED"):
            self._handler.apply(event.type, event.object)
            self._empty = False
        if version:
            self._version = version
        self._mark_synced(self._clock())

    def _error(self, raw: msgspec.Raw) -> None:
        try:
            status = _status_decoder.decode(raw)
        except objects.UnreadableError as error:
            raise _StartOverError(f"the watch failed without a readable reason: {error}") from error
        raise _StartOverError(f"{status.code} {status.reason}: {status.message}")

    def _mark_synced(self, at: float) -> None:
        self.synced_at = at
        self.reason = ""
        self._handler.changed()


def _version(raw: msgspec.Raw) -> str:
    """metadata.resourceVersion; "" if it is unreadable."""
    try:
        return _meta_decoder.decode(raw).metadata.resource_version
    except objects.UnreadableError:
        return ""

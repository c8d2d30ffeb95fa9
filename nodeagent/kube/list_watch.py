"""Keeps a copy of some API objects current by list and watch, in a thread of its own.

Theory of operation. LIST gives all objects and a resourceVersion; WATCH from that version gives every change after it.
A bookmark (about once a minute, and just before the server ends the watch) says that nothing was missed so far.
The server ends each watch after `timeoutSeconds`; the next one goes on from the last version seen. Only when the server
no longer knows that version (410, as a status or as an event inside a 200), or says something that makes no sense, is
everything listed again.

Promises:

1. A connection that has gone silent is noticed: bookmarks come every minute, so `IDLE_S` without a byte ends the watch.
2. `synced_at` is the latest moment at which the copy was known to be current: when the last list was asked for, or when
   the last event or bookmark came. It does not move while nothing is heard.
3. Failures wait longer each time, with jitter, and obey Retry-After. A success must last before it counts as one: a
   server that answers every list and breaks every watch is not asked at full speed.
4. What cannot be decoded costs its own object only; what the handler gets is either a whole list or one whole event.
5. Where an empty list is probably wrong (`doubts_empty`), it is not believed for long: unless the watch brings an
   object, it is asked for again, after `DOUBT_FIRST_S` at first and `DOUBT_LAST_S` in the end.
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
from nodeagent.kube.timestamps import boottime
from nodeagent.kube.transport import Transport
from nodeagent.model import OutcomeKind
from nodeagent.runtime import workers

IDLE_S: Final = 80.0
"""Longest silence of a watch. Bookmarks were seen 57 s after the start and then about every minute."""
WATCH_S: Final = 300.0
"""`timeoutSeconds` of a watch: this to half as much again, so that a fleet does not come back at once."""
LASTED_S: Final = 5.0
"""A watch that held this long was a success. Below it the back-off goes on growing."""

LISTED_S: Final = 60.0
"""A list that served this long was a success. Below it the back-off goes on growing: a server that lets every watch
expire is asked for two to four lists a minute in the end."""

DOUBT_FIRST_S: Final = 2.0
DOUBT_LAST_S: Final = 60.0
"""How long an empty list is watched from where it is doubted: first and last. `timeoutSeconds` are whole seconds."""

_event_decoder = objects.Decoder(objects.WatchEvent)
_status_decoder = objects.Decoder(objects.StatusObject)
_meta_decoder = objects.Decoder(objects.MetaOnly)


class Handler(Protocol):
    """Who keeps the objects. Called by the list-watch's thread."""

    def replace(self, items: Iterable[msgspec.Raw], /) -> None:
        """These are all objects there are, once the iteration has ended; it may raise, and then nothing has changed.
        They come from the network: hold no lock meanwhile."""

    def apply(self, kind: str, item: msgspec.Raw, /) -> None:
        """One object was ADDED, MODIFIED or DELETED."""

    def changed(self) -> None:
        """Something about the copy or its age or its trouble is new; called after each of the above, too."""


class _StartOverError(Exception):
    """The version we have is of no use any more."""


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
        clock: Callable[[], float] = boottime,
        idle_s: float = IDLE_S,
        watch_s: float = WATCH_S,
        backoff: RetryBackoff | None = None,
        spread_s: float = 0.0,
        doubts_empty: bool = False,
    ) -> None:
        """`spread_s`: the first list waits for a random part of this, where a whole fleet may begin at once.
        `doubts_empty`: there is at least one object, as a rule."""
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
        """The list that is watched from is doubted: it has no object, and the watch has brought none."""
        self._stopping = threading.Event()
        self._relisting = threading.Event()
        """Set while the copy is known to lack an object."""
        self._begun = False
        self._stream: LineStream | None = None
        self._version = ""
        self._from_cache = True
        self._listed_at: float | None = None
        """When the list was complete that is watched from."""
        self.synced_at: float | None = None
        """CLOCK_BOOTTIME; None before the first list."""
        self.reason = "not listed yet"
        """What is wrong now; empty while all is well."""
        self.failures = 0
        """Failed lists and broken watches since the start, for the metrics."""
        self.relists = 0
        """Lists since the start."""
        self._thread = workers.make_thread(self._run, name=name)

    def start(self) -> None:
        """Begin. Returns at once; the handler hears of the first list. Where no PID is left for the thread, `reason`
        says so, and the next call tries again; once begun, a call changes nothing."""
        if not self._begun:
            self._begun = workers.start(self._thread)
            if not self._begun:
                self.reason = "there is no PID left for its thread"

    def relist(self) -> None:
        """List everything again, now: the copy lacks an object that is known to exist. A watch in use ends, for it may
        be silent because its connection is dead. Returns at once; a back-off after failures goes on."""
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
            # A defect of ours: the thread starts again, and what it knew is not built upon.
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
            began = self._clock()
            try:
                if self._relisting.is_set():
                    # Not from the server's cache, which may be what is behind.
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
                    wait_s = began + self._doubt_s - self._clock()
                elif self._clock() - began >= LASTED_S:
                    self._proven()
                else:
                    # The server ended the watch right after it began: do not spin.
                    wait_s = self._backoff.failed()
            except _StartOverError as error:
                self._start_over()
                wait_s = self._trouble(str(error), retry_after_s=None)
            except ApiError as error:
                lasted_s = self._clock() - began
                # From a version that the server has not reached (its data was set back) it says nothing at all.
                silent = lasted_s >= self._idle_s and (self.synced_at is None or self.synced_at < began)
                # An event that is too long is skipped by the next list.
                useless = error.expired or error.kind is OutcomeKind.INVALID or isinstance(error, TooLargeError)
                if useless or silent or self._empty:
                    self._start_over()
                elif lasted_s >= LASTED_S:
                    self._proven()
                wait_s = self._trouble(error.message, retry_after_s=error.retry_after_s)
            if wait_s > 0.0:
                self._stopping.wait(wait_s)

    def _proven(self) -> None:
        """The watch has lasted; if the list before it has, too, the next failure is a first one."""
        if self._listed_at is not None and self._clock() - self._listed_at >= LISTED_S:
            self._backoff.succeeded()

    def _start_over(self) -> None:
        """List again, and not from the cache that may be the one that is behind."""
        self._proven()
        self._version, self._from_cache, self._listed_at = "", False, None

    def _trouble(self, reason: str, *, retry_after_s: float | None) -> float:
        if self._stopping.is_set():
            return 0.0
        self.reason = reason
        self.failures += 1
        self._handler.changed()
        return self._backoff.failed(retry_after_s)

    def _list(self) -> None:
        asked_at = self._clock()
        query = {}
        if self._field_selector:
            query["fieldSelector"] = self._field_selector
        # The first list may come from the server's cache, which is cheap for it. After a 410 that cache may be the one
        # that is behind, so then the list is read consistently.
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
        self._heard(asked_at)

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
        # The server ends the watch; the client's own limit is only for a server that drips bytes and never does.
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
            raise _StartOverError(f"the watch said something that is no event: {error}") from error
        if event.type == "ERROR":
            self._error(event.object)
        version = _version(event.object)
        if event.type in ("ADDED", "MODIFIED", "DELETED"):
            self._handler.apply(event.type, event.object)
            self._empty = False
        if version:
            self._version = version
        self._heard(self._clock())

    def _error(self, raw: msgspec.Raw) -> None:
        try:
            status = _status_decoder.decode(raw)
        except objects.UnreadableError as error:
            raise _StartOverError(f"the watch failed and did not say why: {error}") from error
        raise _StartOverError(f"{status.code} {status.reason}: {status.message}")

    def _heard(self, at: float) -> None:
        self.synced_at = at
        self.reason = ""
        self._handler.changed()


def _version(raw: msgspec.Raw) -> str:
    """metadata.resourceVersion, or "" when not even that can be read."""
    try:
        return _meta_decoder.decode(raw).metadata.resource_version
    except objects.UnreadableError:
        return ""

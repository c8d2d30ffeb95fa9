"""Lists objects and yields them one by one, so that memory does not grow with the list.

Promises:

1. Of a list one object is held at a time, and one chunk of the connection. A server that answers from its watch cache
   ignores `limit` and sends everything at once: thirty pods of 1.2 MB were a body of 34 MiB.
2. An object is at most `MOST_OBJECT_BYTES` long. In place of a longer one comes an empty one, which fails to decode as
   any unreadable object does: no tenant can spoil the list of its neighbours.
3. A list that is cut off, is no JSON or has no end raises after what came of it was yielded: whoever keeps the objects
   replaces what it has only when the iteration has ended.
4. A list has an end, whatever its pages name as the next one.

Theory of operation. The API server writes a list as one JSON object:

    {"kind":"PodList","metadata":{"resourceVersion":"519"},"items":[{...},{...}]}

The ends of the items are found by counting braces outside strings, in C (a regular expression): 13 ms for a MiB of
pods. What is outside the items is small and parsed as a whole.
"""

import re
from collections.abc import Generator, Iterator
from typing import Final
from urllib.parse import urlencode

from nodeagent.kube import objects
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.line_stream import MAX_LINE_BYTES
from nodeagent.kube.transport import Transport
from nodeagent.model import OutcomeKind

PAGE: Final = 500
"""Objects per page of a list, as client-go asks for."""
MOST_PAGES: Final = 50
"""Of one list: 25,000 objects. The longest list that is asked for is that of a cluster's nodes, of 5,000 as a rule."""
MOST_OBJECT_BYTES: Final = MAX_LINE_BYTES
LONGEST_S: Final = 60.0
"""For one page, as long as it comes: a server ends its own requests after that. The silence between two chunks is
bounded by the transport's time-out."""
MOST_ENVELOPE_BYTES: Final = 1 << 20
"""What is outside the items: kind, version, metadata. Real ones have 200 bytes."""
_SCAN_BYTES: Final = 256 << 10
"""Scanned at once: a string that goes on is scanned again from its beginning, so this is no small number."""

_BEGIN: Final = re.compile(rb'"items"\s*:\s*(\[|null)')
_BRACE: Final = re.compile(rb'[^"{}]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"{}]*+)*+([{}])', re.DOTALL)
"""Up to the next brace outside strings. Possessive, so that nothing is tried twice."""
_BETWEEN: Final = re.compile(rb"[\s,]*")

_list_decoder = objects.Decoder(objects.ObjectList)


class Listing:
    """One list. Iterate over it once; `version` is known when the iteration has ended."""

    def __init__(self, transport: Transport, path: str, query: dict[str, str]) -> None:
        """`query`: a selector and a resourceVersion, as they go into the first page's address."""
        self._transport = transport
        self._path = path
        self._query = {"limit": str(PAGE), **query}
        self.version = ""
        """metadata.resourceVersion."""

    def __iter__(self) -> Iterator[bytes]:
        """The JSON of each object. Raises `ApiError`."""
        named: set[str] = set()
        while True:
            meta = yield from self._page()
            if not meta.continue_:
                self.version = meta.resource_version
                return
            if meta.continue_ in named:
                raise _unreadable("its pages go round in a circle")
            named.add(meta.continue_)
            if len(named) >= MOST_PAGES:
                raise _unreadable(f"it has more than {MOST_PAGES} pages")
            self._query["continue"] = meta.continue_
            self._query.pop("resourceVersion", None)

    def _page(self) -> Generator[bytes, None, objects.ListMeta]:
        splitter = _Splitter()
        transport = self._transport
        with transport.stream(
            f"{self._path}?{urlencode(self._query)}", idle_s=transport.request_timeout_s, total_s=LONGEST_S
        ) as stream:
            for chunk in stream.chunks():
                yield from splitter.take(chunk)
        yield from splitter.end()
        return splitter.meta()


class _Splitter:
    """Finds the items of one page in what has come of it."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._envelope = bytearray()
        """What is outside the items."""
        self._inside = False
        """Between the brackets of the items."""
        self._item: int | None = None
        """Where in the buffer the item begins that is being scanned."""
        self._skipping = False
        """That item is too long; its beginning is thrown away."""
        self._depth = 0
        self._scanned = 0
        """So far every brace was counted."""
        self._seen = 0
        """How much the buffer held after the last scan."""

    def take(self, chunk: bytes) -> Iterator[bytes]:
        self._buffer += chunk
        if len(self._buffer) - self._seen >= _SCAN_BYTES:
            yield from self._scan()
            self._seen = len(self._buffer)

    def end(self) -> Iterator[bytes]:
        yield from self._scan()
        if self._inside or not self._envelope:
            raise _unreadable("it ends in the middle" if self._inside else "it has no items")

    def meta(self) -> objects.ListMeta:
        try:
            return _list_decoder.decode(bytes(self._envelope + self._buffer)).metadata
        except objects.UnreadableError as error:
            raise _unreadable(str(error)) from error

    def _scan(self) -> Iterator[bytes]:
        if not self._envelope and (begin := _BEGIN.search(self._buffer)) is not None:
            # A match reads from the buffer as it is now: first what it says, then the buffer.
            self._inside = begin[1] == b"["
            self._envelope += self._buffer[: begin.end()]
            del self._buffer[: len(self._envelope)]
        if self._inside:
            yield from self._items()
        if not self._inside and len(self._envelope) + len(self._buffer) > MOST_ENVELOPE_BYTES:
            raise _unreadable("it is no list")

    def _items(self) -> Iterator[bytes]:
        buffer, at = self._buffer, self._scanned
        done = 0
        while True:
            if self._item is None:
                between = _BETWEEN.match(buffer, at)
                at = done = between.end() if between else at
                if at == len(buffer):
                    break
                if buffer[at : at + 1] == b"]":
                    self._inside = False
                    break
                if buffer[at : at + 1] != b"{":
                    raise _unreadable("an item is no object")
                self._item = at
            found = _BRACE.match(buffer, at)
            if found is None:
                break
            at = found.end()
            self._depth += 1 if found[1] == b"{" else -1
            if self._depth == 0:
                yield b"{}" if self._skipping else bytes(buffer[self._item : at])
                self._item, self._skipping, done = None, False, at
        if self._item is not None and len(buffer) - self._item > MOST_OBJECT_BYTES:
            # What is scanned of it is not needed any more; a string that has not ended is.
            self._skipping, done = True, at
            if len(buffer) - at > MOST_OBJECT_BYTES:
                raise _unreadable(f"a string of it is larger than {MOST_OBJECT_BYTES >> 20} MiB")
        del buffer[:done]
        self._scanned = at - done
        self._item = None if self._item is None else max(0, self._item - done)


def _unreadable(why: str) -> ApiError:
    return ApiError(OutcomeKind.SERVER_ERROR, f"the list cannot be read: {why}")

"""Lists objects and yields them one by one, so that memory does not grow with the list.

Promises:

1. Only one object of a list is in memory at a time, and one chunk of the connection. A server that answers from its
   watch cache ignores `limit` and sends everything at once: thirty pods of 1.2 MB were a body of 34 MiB.
2. An object has at most `MAX_OBJECT_BYTES`. A longer one is replaced by an empty one, which fails to decode as any
   unreadable object does: no tenant can make the list of other tenants unreadable.
3. A list that is cut off, is no JSON or has no end raises after its first objects were yielded. So the handler replaces
   its objects only when the iteration has ended.
4. A list has an end, whatever its pages refer to as the next page.

Theory of operation. The API server writes a list as one JSON object:

    {"kind":"PodList","metadata":{"resourceVersion":"519"},"items":[{...},{...}]}

The ends of the items are found by counting braces outside strings, in C (a regular expression): 13 ms for a MiB of
pods. The text outside the items is small and parsed as a whole.
"""

import re
from collections.abc import Generator, Iterator
from typing import Final
from urllib.parse import urlencode

from nodeagent.kube import line_stream, objects
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.transport import Transport
from nodeagent.model import OutcomeKind

PAGE: Final = 500
"""Objects per page of a list, as client-go asks for."""
MAX_PAGES: Final = 50
"""Of one list: 25,000 objects. The longest list is that of a cluster's nodes, normally up to 5,000."""
MAX_OBJECT_BYTES: Final = line_stream.MAX_LINE_BYTES
PAGE_TIMEOUT_S: Final = 60.0
"""For one whole page: a server ends its own requests after that. The wait between two chunks has the transport's
timeout."""
MAX_ENVELOPE_BYTES: Final = 1 << 20
"""Of the text outside the items: kind, version, metadata. Real lists have 200 bytes."""
_SCAN_BYTES: Final = 256 << 10
"""Scanned at once: an incomplete string is scanned again from its start, so the number must not be small."""

_BEGIN: Final = re.compile(rb'"items"\s*:\s*(\[|null)')
_BRACE: Final = re.compile(rb'[^"{}]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"{}]*+)*+([{}])', re.DOTALL)
"""Up to the next brace outside strings. Possessive, so that it never backtracks."""
_BETWEEN: Final = re.compile(rb"[\s,]*")

_list_decoder = objects.Decoder(objects.ObjectList)


class Listing:
    """One list. Iterate over it once; `version` is set when the iteration has ended."""

    def __init__(
        self, transport: Transport, path: str, query: dict[str, str], *, as_service_account: bool = False
    ) -> None:
        """`query`: a selector and a resourceVersion for the first page. `as_service_account`: never as the own node,
        which may not list the objects of others."""
        self._transport = transport
        self._path = path
        self._user = "" if as_service_account else None
        self._query = {"limit": str(PAGE), **query}
        self.version = ""
        """metadata.resourceVersion."""

    def __iter__(self) -> Iterator[bytes]:
        """The JSON of each object. Raises `ApiError`."""
        tokens: set[str] = set()
        while True:
            meta = yield from self._page()
            if not meta.continue_:
                self.version = meta.resource_version
                return
            if meta.continue_ in tokens:
                raise _unreadable("its pages form a cycle")
            tokens.add(meta.continue_)
            if len(tokens) >= MAX_PAGES:
                raise _unreadable(f"it has more than {MAX_PAGES} pages")
            self._query["continue"] = meta.continue_
            self._query.pop("resourceVersion", None)

    def _page(self) -> Generator[bytes, None, objects.ListMeta]:
        splitter = _Splitter()
        transport = self._transport
        with transport.stream(
            f"{self._path}?{urlencode(self._query)}",
            idle_s=transport.request_timeout_s,
            total_s=PAGE_TIMEOUT_S,
            user=self._user,
        ) as stream:
            for chunk in stream.chunks():
                yield from splitter.feed(chunk)
        yield from splitter.end()
        return splitter.meta()


class _Splitter:
    """Finds the items of one page in its chunks."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._envelope = bytearray()
        """The text outside the items."""
        self._in_items = False
        """True between the brackets of the items."""
        self._item: int | None = None
        """Start of the current item in the buffer."""
        self._skipping = False
        """The current item is too long; its start is dropped."""
        self._depth = 0
        self._scanned = 0
        """Up to here every brace was counted."""
        self._buffered = 0
        """Length of the buffer after the last scan."""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        self._buffer += chunk
        if len(self._buffer) - self._buffered >= _SCAN_BYTES:
            yield from self._scan()
            self._buffered = len(self._buffer)

    def end(self) -> Iterator[bytes]:
        yield from self._scan()
        if self._in_items or not self._envelope:
            raise _unreadable("it ends in the middle" if self._in_items else "it has no items")

    def meta(self) -> objects.ListMeta:
        try:
            return _list_decoder.decode(bytes(self._envelope + self._buffer)).metadata
        except objects.UnreadableError as error:
            raise _unreadable(str(error)) from error

    def _scan(self) -> Iterator[bytes]:
        if not self._envelope and (begin := _BEGIN.search(self._buffer)) is not None:
            # A match refers to the buffer: read it before the buffer changes.
            self._in_items = begin[1] == b"["
            self._envelope += self._buffer[: begin.end()]
            del self._buffer[: len(self._envelope)]
        if self._in_items:
            yield from self._items()
        if not self._in_items and len(self._envelope) + len(self._buffer) > MAX_ENVELOPE_BYTES:
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
                    self._in_items = False
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
        if self._item is not None and len(buffer) - self._item > MAX_OBJECT_BYTES:
            # The scanned part is not needed any more; an incomplete string is.
            self._skipping, done = True, at
            if len(buffer) - at > MAX_OBJECT_BYTES:
                raise _unreadable(f"a string of it is larger than {MAX_OBJECT_BYTES >> 20} MiB")
        del buffer[:done]
        self._scanned = at - done
        self._item = None if self._item is None else max(0, self._item - done)


def _unreadable(reason: str) -> ApiError:
    return ApiError(OutcomeKind.SERVER_ERROR, f"the list cannot be read: {reason}")

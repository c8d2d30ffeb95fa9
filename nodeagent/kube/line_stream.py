"""A streaming answer of the API server, read chunk by chunk or line by line."""

import socket
from collections.abc import Iterator
from typing import Final

from nodeagent.kube import api_errors, api_responses, kubernetes_client
from nodeagent.kube.deadline_http import RequestLimits

with kubernetes_client.without_unused_modules():
    import urllib3

MAX_LINE_BYTES: Final = 12 << 20
"""One watch event, or one object of a list. etcd stores 1.5 MiB of an object, and JSON makes up to six bytes of one
(`<` becomes `\\u003c`), so that every object that a tenant can create fits."""


class LineStream:
    """The chunks or lines of a streaming answer, as they arrive. Iterate in one thread; `abort` from any."""

    def __init__(self, response: urllib3.BaseHTTPResponse, limits: RequestLimits) -> None:
        self._response = response
        self._limits = limits
        self._aborted = False

    def lines(self) -> Iterator[bytes]:
        """Each complete line, without its newline. Ends when the server ends the stream; an incomplete last line is
        dropped. Raises `ApiError` after the idle time without a byte, at the deadline, or when the connection breaks.
        """
        rest = bytearray()
        for chunk in self.chunks():
            rest += chunk
            if b"\n" not in chunk:
                if len(rest) > MAX_LINE_BYTES:
                    raise api_errors.too_large(MAX_LINE_BYTES)
                continue
            *complete, rest = rest.split(b"\n")
            yield from (bytes(line) for line in complete if line)

    def chunks(self) -> Iterator[bytes]:
        """Each chunk, until the server ends the stream. Raises `ApiError` as `lines` does."""
        while chunk := self._read():
            yield chunk

    def abort(self) -> None:
        """Make `lines` end now."""
        self._aborted = True
        _shut_down(self._limits.socket)

    def close(self) -> None:
        """Close the connection: a watch that was not read to its end cannot be used again."""
        self._response.close()

    def _read(self) -> bytes:
        try:
            return self._response.read1(api_responses.CHUNK_BYTES, decode_content=False)
        except Exception as error:
            # Whatever http.client raises for a response that `abort` closed meanwhile, or for a malformed answer.
            if self._aborted:
                return b""
            raise api_errors.no_answer(error) from error


def _shut_down(sock: socket.socket | None) -> None:
    if sock is None:
        return
    try:
        # Not SSLSocket's own shutdown, which removes the TLS state under a thread that is reading.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        return  # already closed: no thread waits on it

"""Unary gRPC calls over a Unix socket.

1. Every call has a deadline, for the connection as for the answer, and the server knows it (`grpc-timeout`).
2. An answer is at most `MAX_ANSWER` large; the kubelet's limit for the CRI is the same.
3. A failure is a GrpcError: one of gRPC's status codes and its message. The next call makes a new connection.

`h2` speaks HTTP/2 without I/O. grpcio does all of this and more in 20 MB of native code, which the image and its scans
would carry for six calls (https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md).
"""

import socket
import struct
import time
import urllib.parse
from types import TracebackType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from h2.connection import H2Connection
    from h2.events import Event

MAX_ANSWER: Final = 16 << 20
"""Bytes of one answer (`maxMsgSize` of the kubelet's CRI client)."""
_PREFIX: Final = struct.Struct(">?I")
"""Before each message: whether it is compressed, and its length."""
_READ: Final = 65536
_WINDOW: Final = 1 << 20
"""Flow-control window: how much the server sends before it waits for us."""
UNAVAILABLE: Final = "14"
DEADLINE_EXCEEDED: Final = "4"
NOT_FOUND: Final = "5"
INTERNAL: Final = "13"
"""Status codes of gRPC."""


class GrpcError(Exception):
    """A call failed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message or f"gRPC status {code}")
        self.code = code
        """gRPC's status code; one of ours if no answer came: UNAVAILABLE, DEADLINE_EXCEEDED, INTERNAL."""


class GrpcClient:
    """Calls one server, one call at a time. Not thread-safe. Use it as a context manager, or close it."""

    def __init__(self, path: str) -> None:
        """`path` of the server's socket; it is connected with the first call."""
        self._path = path
        self._socket: socket.socket | None = None
        self._http: H2Connection | None = None

    def __enter__(self) -> "GrpcClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
        self._socket = self._http = None

    def call(self, method: str, request: bytes, *, timeout_s: float) -> bytes:
        """The answer to a request; `method` is `/package.Service/Method`. Raises GrpcError."""
        from h2.exceptions import H2Error

        until = time.monotonic() + timeout_s
        try:
            return self._call(method, request, until)
        except GrpcError as error:
            if error.code in (UNAVAILABLE, DEADLINE_EXCEEDED, INTERNAL):
                self.close()
            raise
        except TimeoutError as error:
            self.close()
            raise GrpcError(DEADLINE_EXCEEDED, f"{self._path}: no answer in {timeout_s:g}s") from error
        except (OSError, H2Error) as error:
            self.close()
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise GrpcError(UNAVAILABLE, f"{self._path}: {reason}") from error

    def _call(self, method: str, request: bytes, until: float) -> bytes:
        connection, http = self._connect(until)
        stream = http.get_next_available_stream_id()
        left_ms = max(1, int((until - time.monotonic()) * 1000))
        http.send_headers(
            stream,
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", method),
                (":authority", "localhost"),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                ("grpc-timeout", f"{left_ms}m"),
            ],
        )
        body = _PREFIX.pack(False, len(request)) + request  # far below the window, which the server renews
        http.send_data(stream, body, end_stream=True)
        answer = _Answer(stream)
        while not answer.ended:
            self._send(connection, http, until)
            connection.settimeout(_left(until))
            data = connection.recv(_READ)
            if not data:
                raise GrpcError(UNAVAILABLE, f"{self._path}: the server closed the connection")
            for event in http.receive_data(data):
                answer.add(event, http)
        self._send(connection, http, until)
        return answer.message()

    def _connect(self, until: float) -> "tuple[socket.socket, H2Connection]":
        if self._socket is not None and self._http is not None:
            return self._socket, self._http
        from h2.config import H2Configuration
        from h2.connection import H2Connection

        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(_left(until))
            connection.connect(self._path)
        except BaseException:
            connection.close()
            raise
        http = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        http.initiate_connection()
        http.increment_flow_control_window(_WINDOW)
        self._socket, self._http = connection, http
        return connection, http

    @staticmethod
    def _send(connection: socket.socket, http: "H2Connection", until: float) -> None:
        if data := http.data_to_send():
            connection.settimeout(_left(until))
            connection.sendall(data)


class _Answer:
    """What has come of the answer on one stream."""

    def __init__(self, stream: int) -> None:
        self.ended = False
        self._stream = stream
        self._headers: dict[str, str] = {}
        self._body = bytearray()

    def add(self, event: "Event", http: "H2Connection") -> None:
        from h2 import events

        if isinstance(event, events.ConnectionTerminated):
            raise GrpcError(UNAVAILABLE, "the server ended the connection")
        if getattr(event, "stream_id", None) != self._stream:
            return
        if isinstance(event, events.ResponseReceived | events.TrailersReceived):
            self._headers |= {str(name): str(value) for name, value in event.headers or ()}
        elif isinstance(event, events.DataReceived):
            self._body += event.data or b""
            if len(self._body) > MAX_ANSWER:
                raise GrpcError(INTERNAL, f"the answer has more than {MAX_ANSWER} bytes")
            http.acknowledge_received_data(event.flow_controlled_length or 0, self._stream)
        elif isinstance(event, events.StreamReset):
            raise GrpcError(INTERNAL, f"the server reset the stream: error {event.error_code}")
        elif isinstance(event, events.StreamEnded):
            self.ended = True

    def message(self) -> bytes:
        status = self._headers.get("grpc-status", "")
        if status != "0":
            message = urllib.parse.unquote(self._headers.get("grpc-message", ""))
            raise GrpcError(status or INTERNAL, message or f"HTTP status {self._headers.get(':status')}")
        if len(self._body) < _PREFIX.size:
            raise GrpcError(INTERNAL, "an answer without a message")
        compressed, size = _PREFIX.unpack_from(self._body)
        if compressed or len(self._body) != _PREFIX.size + size:
            raise GrpcError(INTERNAL, "an answer that is compressed or not one message")
        return bytes(self._body[_PREFIX.size :])


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left

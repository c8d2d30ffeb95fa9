"""The HTTP server of the double."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from tests.fake_kube.messages import Answer, Request

if TYPE_CHECKING:
    from tests.fake_kube.server import ApiServer


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *args: Any) -> None:
        self._open: set[Any] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that closes its connection is no error."""

    def cut(self) -> None:
        import socket

        for request in tuple(self._open):
            try:
                request.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


class CutError(Exception):
    """Raised by `instead`, `on_answer` and `on_watch`: the connection is cut here."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    api: "ApiServer"
    _numbers = iter(range(1, 1 << 30))

    def setup(self) -> None:
        super().setup()
        self.number = next(self._numbers)

    def handle_any(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length) if length else b""
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            body = raw
        split = urlsplit(self.path)
        request = Request(
            self.command,
            split.path,
            {key: values[-1] for key, values in parse_qs(split.query).items()},
            {key.lower(): value for key, value in self.headers.items()},
            body,
            time.monotonic(),
            self.number,
        )
        try:
            self._answer(request)
        except CutError:
            # An end in the middle: no last chunk, or less than the Content-Length.
            self.close_connection = True

    def _answer(self, request: Request) -> None:
        if self.api.delay_s:
            threading.Event().wait(self.api.delay_s)
        if self.api.at_request:
            self.api.at_request(request, False)
        replaced = self.api.instead(request) if self.api.instead else None
        # Both at once for a test that waits for what the request did.
        with self.api.store.changed:
            answer = replaced if replaced is not None else self.api.answer(request)
            self.api.note(request)
        if self.api.at_request:
            self.api.at_request(request, True)
        if isinstance(answer, Answer):
            self._send(request, answer)
        else:
            self._stream(self.api.on_watch(request, answer) if self.api.on_watch else answer)

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = handle_any  # noqa: N815 - http.server's names

    def _send(self, request: Request, answer: Answer) -> None:
        newline = b"\n" if isinstance(answer.body, dict) else b""
        body = (
            answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body, separators=(",", ":")).encode()
        )
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        for name, value in answer.headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body + newline)))
        if self.api.on_answer is None:
            self.end_headers()
            self.wfile.write(body + newline)
            return
        head = b"".join(self._headers_buffer) + b"\r\n"
        self._headers_buffer: list[bytes] = []
        for piece in self.api.on_answer(request, head, body + newline):
            self.wfile.write(piece)

    def _stream(self, lines: Iterator[bytes | None]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in lines:
            if line is not None:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        """Requests are kept in `ApiServer.requests`."""

"""A TCP server whose connections are driven by the test, for what an HTTP library would never send.

    with RawServer(lambda connection, number: connection.sendall(b"garbage")) as server:
        server.kubeconfig(path)

The function gets each accepted connection and its number, from 1; the connection is closed when it returns. A function
that wants to keep silent waits on `server.over`, which is set at the end of the test.
"""

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path

Drive = Callable[[socket.socket, int], object]


class RawServer:
    """Listens on loopback; a context manager."""

    def __init__(self, drive: Drive) -> None:
        self._drive = drive
        self.over = threading.Event()
        self.connections = 0
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> "RawServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for connection in self._open:
            connection.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def kubeconfig(self, path: Path) -> Path:
        path.write_text(
            json.dumps(
                {
                    "current-context": "raw",
                    "clusters": [{"name": "raw", "cluster": {"server": self.url}}],
                    "users": [{"name": "raw", "user": {"token": "t"}}],
                    "contexts": [{"name": "raw", "context": {"cluster": "raw", "user": "raw"}}],
                }
            )
        )
        return path

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection, self.connections), daemon=True).start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        # A client that hangs up in the middle, or the end of the test, is not an error here.
        with contextlib.suppress(OSError):
            self._drive(connection, number)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def read_request(connection: socket.socket) -> bytes:
    """The next request's head and body; b"" when the client has gone."""
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = connection.recv(65536)
        if not chunk:
            return b""
        data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(x[15:]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def response(body: bytes, *, status: str = "200 OK", headers: bytes = b"") -> bytes:
    """A whole answer with a length."""
    return (
        b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n"
        % (status.encode(), len(body), headers)
    ) + body


CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)

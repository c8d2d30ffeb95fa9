"""Serves `/metrics`, `/healthz` and `/readyz` to whoever connects, from one thread that the loop never waits for.

Promises:

1. One thread, whoever connects: sockets do not block, at most `CONNECTIONS` are open, each lives `DEADLINE_S` at most,
   and `PER_S` are taken in a second; the rest waits in the kernel's queue. A slow client costs a descriptor, no more.
2. A well-behaved client gets through: when all connections are taken, the one that has dawdled longest makes room.
3. GET and HEAD only, `REQUEST_BYTES` at most, one request for each connection. No body is read, no file is touched, no
   name is looked up, nothing can be changed from outside.
4. A page that fails is a 500 for its reader and a line for the log, never an end of the thread.

A server of our own because `http.server` gives each client a thread (unbounded, against promise 1) or serves one at a
time (a slow one then blocks the kubelet's probe). It costs no import that the daemon has not paid for.
"""

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from nodeagent.host import workers

CONNECTIONS: Final = 16
"""Prometheus, two probes and a person with curl: four. Each costs a descriptor and at most a page (30 KiB)."""
DEADLINE_S: Final = 5.0
"""From accepting a connection to its end; a kubelet's probe gives up after 1 s, Prometheus after 10 s."""
PER_S: Final = 50
"""Connections taken in a second. A page costs 0.4 ms of the interpreter that the loop shares: 2% at this rate."""
REQUEST_BYTES: Final = 8192
"""Prometheus sends 400 bytes, a browser two thousand."""

_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
TEXT: Final = "text/plain; charset=utf-8"


class Page(NamedTuple):
    """An answer."""

    body: bytes
    status: int = 200
    content_type: str = TEXT


Maker = Callable[[str], Page]
"""Makes a page; it is given the request's Accept header. Called in the server's thread."""


class AddressError(Exception):
    """The address cannot be served on; the message says why."""


class _Client:
    __slots__ = ("answer", "asked", "deadline", "sock")

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.deadline = deadline
        self.asked = b""
        self.answer: memoryview | None = None
        """What is still to be sent; None while the request is read."""


class Server:
    """Serves pages until it is closed."""

    def __init__(self, address: str, pages: Mapping[str, Maker], *, failed: Callable[[str], None]) -> None:
        """Bind and begin. `address` is `host:port`, `[v6]:port` or `:port` (every address of the host); port 0 takes
        any. `failed` is told of pages that could not be made; it is called from the server's thread.

        Raises:
            AddressError: it cannot be bound.
        """
        self._pages = pages
        self._failed = failed
        self._listener = _bind(address)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._listening = True
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._clients: dict[int, _Client] = {}
        """By descriptor, oldest first."""
        self._taken = 0
        self._second_ends = 0.0
        self._thread = workers.thread_of(self._run, name="http")
        workers.start(self._thread)

    def close(self) -> None:
        """Stop serving; open connections are dropped."""
        with contextlib.suppress(OSError):  # closed before
            self._waker.send(b"\0")
        workers.join(self._thread, 2.0)
        self._waker.close()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                ready = self._selector.select(self._patience())
                for key, _ in ready:
                    if key.fileobj is self._wake:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    elif (client := self._clients.get(key.fd)) is not None:
                        self._serve(client)
                self._tidy(time.monotonic())
        finally:
            for client in list(self._clients.values()):
                self._drop(client)
            self._listener.close()
            self._wake.close()
            self._selector.close()

    def _patience(self) -> float | None:
        """How long nothing can become due by itself."""
        now = time.monotonic()
        due = [client.deadline for client in self._clients.values()]
        if not self._listening:
            due.append(self._second_ends)
        return max(0.0, min(due) - now) if due else None

    def _tidy(self, now: float) -> None:
        for client in [client for client in self._clients.values() if client.deadline <= now]:
            self._drop(client)
        if not self._listening and now >= self._second_ends:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._listening = True

    def _accept(self) -> None:
        now = time.monotonic()
        if now >= self._second_ends:
            self._taken, self._second_ends = 0, now + 1.0
        if self._taken >= PER_S:
            self._selector.unregister(self._listener)
            self._listening = False
            return
        self._taken += 1
        try:
            sock, _ = self._listener.accept()
        except OSError:
            # The client is gone again, or we are out of descriptors: count it, so that this cannot spin.
            self._taken = PER_S
            return
        sock.setblocking(False)
        if len(self._clients) >= CONNECTIONS:
            self._drop(next(iter(self._clients.values())))
        client = _Client(sock, now + DEADLINE_S)
        self._clients[sock.fileno()] = client
        self._selector.register(sock, selectors.EVENT_READ)

    def _serve(self, client: _Client) -> None:
        try:
            if client.answer is None:
                self._read(client)
            else:
                self._send(client)
        except BlockingIOError:
            return
        except OSError:
            self._drop(client)

    def _read(self, client: _Client) -> None:
        data = client.sock.recv(4096)
        if not data:
            self._drop(client)
            return
        client.asked += data
        if len(client.asked) > REQUEST_BYTES:
            answer = _answer(Page(b"request too large\n", 431))
        elif b"\r\n\r\n" in client.asked or b"\n\n" in client.asked:
            answer = self._reply(client.asked)
        else:
            return
        client.answer = memoryview(answer)
        self._selector.modify(client.sock, selectors.EVENT_WRITE)
        self._send(client)

    def _send(self, client: _Client) -> None:
        assert client.answer is not None
        client.answer = client.answer[client.sock.send(client.answer) :]
        if not client.answer:
            with contextlib.suppress(OSError):  # the client was faster
                client.sock.shutdown(socket.SHUT_WR)
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        self._clients.pop(client.sock.fileno(), None)
        self._selector.unregister(client.sock)
        client.sock.close()

    # --- answering ---------------------------------------------------------------------------------------------------

    def _reply(self, asked: bytes) -> bytes:
        head = asked.decode("latin-1").replace("\r\n", "\n").partition("\n\n")[0].split("\n")
        words = head[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _answer(Page(b"not HTTP/1\n", 400))
        method, target, _ = words
        if method not in ("GET", "HEAD"):
            return _answer(Page(b"GET and HEAD only\n", 405), allow=True)
        maker = self._pages.get(target.partition("?")[0])
        if maker is None:
            known = "\n".join(sorted(self._pages))
            return _answer(Page(f"there are:\n{known}\n".encode(), 404), head_only=method == "HEAD")
        accept = next((line[7:].strip() for line in head[1:] if line[:7].lower() == "accept:"), "")
        try:
            page = maker(accept)
        except Exception as error:
            # A defect of ours must neither end the thread nor pass in silence.
            self._failed(f"{target.partition('?')[0]}: {type(error).__name__}: {error}")
            page = Page(b"this page could not be made; the log says why\n", 500)
        return _answer(page, head_only=method == "HEAD")


def _answer(page: Page, *, head_only: bool = False, allow: bool = False) -> bytes:
    head = (
        f"HTTP/1.1 {page.status} {_REASONS[page.status]}\r\nContent-Type: {page.content_type}\r\n"
        f"Content-Length: {len(page.body)}\r\nConnection: close\r\nCache-Control: no-store\r\n"
        f"X-Content-Type-Options: nosniff\r\n{'Allow: GET, HEAD' + chr(13) + chr(10) if allow else ''}\r\n"
    )
    return head.encode("ascii") + (b"" if head_only else page.body)


def _bind(address: str) -> socket.socket:
    host, colon, port_text = address.rpartition(":")
    if not colon or not port_text.isascii() or not port_text.isdigit() or int(port_text) > 65535:
        raise AddressError(f"{address}: must be host:port or :port")
    port, host = int(port_text), host.strip("[]")
    try:
        if host:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return _listen(family, host, port)
        try:
            return _listen(socket.AF_INET6, "::", port)
        except OSError:  # no IPv6 on this host
            return _listen(socket.AF_INET, "", port)
    except OSError as error:
        raise AddressError(f"{address}: {error.strerror or error}") from error


def _listen(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6 and host == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((host, port))
        sock.listen(CONNECTIONS)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock

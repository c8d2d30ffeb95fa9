"""Serves `/metrics`, `/healthz`, `/readyz` and the live page from one thread that the loop never waits for.

1. One thread serves all clients: sockets do not block, at most `MAX_CONNECTIONS` are open, each for at most
   `MAX_CONNECTION_S`, and at most `MAX_ACCEPTED_PER_S` are accepted each second. A slow client takes a descriptor.
2. A flood from one address leaves other clients their answers, above all the kubelet's probes: limits apply to each
   address. No address has more than `MAX_PEER_CONNECTIONS`; its next connection replaces its oldest. If all connections
   are in use, the oldest of the address with the most is closed. Connections above a rate limit are closed unread.
3. Only GET and HEAD, at most `MAX_REQUEST_BYTES`, one request for each connection. No body is read, no file is opened,
   no name is resolved, and no client can change anything.
4. A page that fails is a 500 for its client and a line in the log; the thread continues.

`http.server` is not used: it starts a thread for each client (against promise 1) or serves one at a time, so that a
slow client blocks the kubelet's probe.
"""

import contextlib
import selectors
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from nodeagent.runtime import workers

MAX_CONNECTIONS: Final = 32
"""Prometheus, two probes and a user with curl need four. Each costs a descriptor and at most a page (30 KiB)."""
MAX_PEER_CONNECTIONS: Final = 8
MAX_CONNECTION_S: Final = 5.0
"""From accepting a connection to its end; a kubelet's probe times out after 1 s, Prometheus after 10 s."""
MAX_ACCEPTED_PER_S: Final = 4000
"""Accepted connections. At this rate most are closed unread, which takes 12 us each."""
PEER_PER_S: Final = 400
"""Connections of one address that are read: a probe takes 0.1 ms of the interpreter that the loop shares. A lower limit
would help an attacker that shares the kubelet's address (a NodePort)."""
MANY_PER_S: Final = 500
"""After this many reads in a second, only addresses with fewer than `FEW_PER_S` are read until the second ends."""
FEW_PER_S: Final = 10
PAGES_PER_S: Final = 50
"""Pages other than probes, 0.4 ms each. The first page of an address counts against twice this limit."""
PEER_PAGES_PER_S: Final = 10
PROBES: Final = frozenset({"/healthz", "/readyz"})
MAX_REQUEST_BYTES: Final = 8192
"""Prometheus sends 400 bytes, a browser two thousand."""

_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
# Connections are accepted in slices of a second, so that a flood cannot block the queue, which buffers in between.
_SLICE_S: Final = 0.05
_QUEUE: Final = 1024
# Close with a reset: an orderly close leaves state in the kernel for a minute.
_RESET: Final = struct.pack("ii", 1, 0)
PLAIN_TEXT: Final = "text/plain; charset=utf-8"


class Page(NamedTuple):
    """The answer to one request."""

    body: bytes
    status: int = 200
    content_type: str = PLAIN_TEXT
    headers: tuple[tuple[str, str], ...] = ()
    """Further ones, from constants only."""


class Request(NamedTuple):
    """What a page may depend on."""

    accept: str = ""
    host: str = ""
    """The name and port by which the client reached the server; empty: it sent none."""
    peer: str = ""
    """The client's address."""
    query: str = ""
    """Behind the question mark."""


PageBuilder = Callable[[Request], Page]
"""Builds a page. Called in the server's thread."""


class AddressError(Exception):
    """The address cannot be bound. The message contains the reason."""


class _Client:
    __slots__ = ("answer", "deadline", "peer", "request", "sock")

    def __init__(self, sock: socket.socket, peer: str, deadline: float) -> None:
        self.sock = sock
        self.peer = peer
        self.deadline = deadline
        self.request = b""
        self.answer: memoryview | None = None
        """The bytes that are not sent yet; None while the request is read."""


class Server:
    """Serves pages until it is closed."""

    def __init__(self, address: str, pages: Mapping[str, PageBuilder], *, failed: Callable[[str], None]) -> None:
        """Bind and start. `address` is `host:port`, `[v6]:port` or `:port` (every address of the host); port 0 binds
        any. `failed` is called with the error of a page, from the server's thread.

        Raises:
            AddressError: the address cannot be bound.
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
        self._accepted = 0
        """Accepted connections in this slice."""
        self._slice_ends = 0.0
        self._second_ends = 0.0
        self._reads_by_peer: Counter[str] = Counter()
        """Connections that were read in this second, by address."""
        self._pages_by_peer: Counter[str] = Counter()
        self._reads = self._page_count = 0
        self._thread = workers.make_thread(self._run, name="http")
        workers.start(self._thread)

    def close(self) -> None:
        """Stop serving; open connections are dropped."""
        with contextlib.suppress(OSError):  # already closed
            self._waker.send(b"\0")
        workers.join(self._thread, 2.0)
        self._waker.close()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        finally:
            # After an error, for example of the selector, the thread restarts with the same listener.
            for client in list(self._clients.values()):
                self._drop(client)
        self._listener.close()
        self._wake.close()
        self._selector.close()

    def _loop(self) -> None:
        while True:
            ready = self._selector.select(self._timeout_s())
            for key, _ in ready:
                if key.fileobj is self._wake:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif (client := self._clients.get(key.fd)) is not None:
                    self._serve(client)
            self._close_expired(time.monotonic())

    def _timeout_s(self) -> float | None:
        """Time until the next deadline; None: there is none."""
        now = time.monotonic()
        due = [client.deadline for client in self._clients.values()]
        if not self._listening:
            due.append(self._slice_ends)
        return max(0.0, min(due) - now) if due else None

    def _close_expired(self, now: float) -> None:
        for client in [client for client in self._clients.values() if client.deadline <= now]:
            self._drop(client)
        if not self._listening and now >= self._slice_ends:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._listening = True

    def _accept(self) -> None:
        """Accept all pending connections within the limit of this slice."""
        now = time.monotonic()
        self._reset_counts(now)
        if now >= self._slice_ends:
            self._accepted, self._slice_ends = 0, now + _SLICE_S
        while self._accepted < MAX_ACCEPTED_PER_S * _SLICE_S:
            self._accepted += 1
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue  # the client has closed it
            except OSError:
                break  # out of descriptors: wait for the next slice instead of spinning
            self._admit(sock, str(address[0]), now)
        self._selector.unregister(self._listener)
        self._listening = False

    def _reset_counts(self, now: float) -> None:
        if now >= self._second_ends:
            self._second_ends = now + 1.0
            self._reads_by_peer.clear()
            self._pages_by_peer.clear()
            self._reads = self._page_count = 0

    def _admit(self, sock: socket.socket, peer: str, now: float) -> None:
        read = self._reads_by_peer[peer]
        if read >= PEER_PER_S or (read >= FEW_PER_S and self._reads >= MANY_PER_S):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            sock.close()
            return
        self._reads_by_peer[peer] += 1
        self._reads += 1
        sock.setblocking(False)
        self._close_surplus(peer)
        client = _Client(sock, peer, now + MAX_CONNECTION_S)
        self._clients[sock.fileno()] = client
        self._selector.register(sock, selectors.EVENT_READ)
        # Answer a request that has already arrived before other connections can replace this one.
        self._serve(client)

    def _close_surplus(self, peer: str) -> None:
        """Close a connection if one more of this address would exceed a limit."""
        connections = Counter(client.peer for client in self._clients.values())
        if connections[peer] >= MAX_PEER_CONNECTIONS:
            self._drop(next(client for client in self._clients.values() if client.peer == peer))
        elif len(self._clients) >= MAX_CONNECTIONS:
            # max() returns the first, which is the oldest, of the address with the most.
            self._drop(max(self._clients.values(), key=lambda client: connections[client.peer]))

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
        except Exception as error:
            # MemoryError or a defect: this client gets no answer, the thread continues.
            self._failed(f"a request: {type(error).__name__}: {error}")
            self._drop(client)

    def _read(self, client: _Client) -> None:
        data = client.sock.recv(4096)
        if not data:
            self._drop(client)
            return
        client.request += data
        if len(client.request) > MAX_REQUEST_BYTES:
            answer = _answer(Page(b"request too large\n", 431))
        elif b"\r\n\r\n" in client.request or b"\n\n" in client.request:
            answer = self._reply(client)
        else:
            return
        client.answer = memoryview(answer)
        self._selector.modify(client.sock, selectors.EVENT_WRITE)
        self._send(client)

    def _send(self, client: _Client) -> None:
        assert client.answer is not None
        client.answer = client.answer[client.sock.send(client.answer) :]
        if not client.answer:
            with contextlib.suppress(OSError):  # the client has closed it
                client.sock.shutdown(socket.SHUT_WR)
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        self._clients.pop(client.sock.fileno(), None)
        with contextlib.suppress(KeyError):  # it was never registered
            self._selector.unregister(client.sock)
        client.sock.close()

    # --- answering ---------------------------------------------------------------------------------------------------

    def _reply(self, client: _Client) -> bytes:
        head = client.request.decode("latin-1").replace("\r\n", "\n").partition("\n\n")[0].split("\n")
        words = head[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _answer(Page(b"not HTTP/1\n", 400))
        method, target, _ = words
        if method not in ("GET", "HEAD"):
            return _answer(Page(b"GET and HEAD only\n", 405), allow=True)
        path, _, query = target.partition("?")
        builder = self._pages.get(path)
        if builder is None:
            known = "\n".join(sorted(self._pages))
            return _answer(Page(f"pages:\n{known}\n".encode(), 404), head_only=method == "HEAD")
        if path not in PROBES and not self._may_have_page(client.peer):
            return _answer(Page(b"too many requests in this second\n", 429), head_only=method == "HEAD")
        request = Request(_header(head, "accept:"), _header(head, "host:"), client.peer, query)
        try:
            page = builder(request)
        except Exception as error:
            # A defect must not end the thread, and must be logged.
            self._failed(f"{path}: {type(error).__name__}: {error}")
            page = Page(b"internal error; see the log\n", 500)
        return _answer(page, head_only=method == "HEAD")

    def _may_have_page(self, peer: str) -> bool:
        self._reset_counts(time.monotonic())
        of_peer = self._pages_by_peer[peer]
        if of_peer >= PEER_PAGES_PER_S or self._page_count >= (PAGES_PER_S if of_peer else 2 * PAGES_PER_S):
            return False
        self._pages_by_peer[peer] += 1
        self._page_count += 1
        return True


def _header(head: list[str], name: str) -> str:
    """The value of the first header with this name (lower case, with its colon); empty: not sent."""
    return next((line[len(name) :].strip() for line in head[1:] if line[: len(name)].lower() == name), "")


def _answer(page: Page, *, head_only: bool = False, allow: bool = False) -> bytes:
    further = "".join(f"{name}: {value}\r\n" for name, value in page.headers)
    head = (
        f"HTTP/1.1 {page.status} {_REASONS[page.status]}\r\nContent-Type: {page.content_type}\r\n"
        f"Content-Length: {len(page.body)}\r\nConnection: close\r\nCache-Control: no-store\r\n"
        f"X-Content-Type-Options: nosniff\r\n{further}{'Allow: GET, HEAD' + chr(13) + chr(10) if allow else ''}\r\n"
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
        sock.listen(_QUEUE)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock

"""Serves `/metrics`, `/healthz` and `/readyz` to whoever connects, from one thread that the loop never waits for.

Promises:

1. One thread, whoever connects: sockets do not block, at most `CONNECTIONS` are open, each lives `DEADLINE_S` at most,
   and in a second at most `TAKEN_PER_S` are taken from the kernel's queue. A slow client costs a descriptor, no more.
2. A well-behaved client gets through, above all a kubelet with its probes: limits hold for each address by itself. No
   address has more than `PEER_CONNECTIONS`, its own oldest makes room for its next one; when all are taken, the oldest
   of the address that has most does. Who floods is closed unread, and the queue never stands still for it.
3. GET and HEAD only, `REQUEST_BYTES` at most, one request for each connection. No body is read, no file is touched, no
   name is looked up, nothing can be changed from outside.
4. A page that fails is a 500 for its reader and a line for the log, never an end of the thread.

A server of our own because `http.server` gives each client a thread (unbounded, against promise 1) or serves one at a
time (a slow one then blocks the kubelet's probe). It costs no import that the daemon has not paid for.
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

CONNECTIONS: Final = 32
"""Prometheus, two probes and a person with curl: four. Each costs a descriptor and at most a page (30 KiB)."""
PEER_CONNECTIONS: Final = 8
DEADLINE_S: Final = 5.0
"""From accepting a connection to its end; a kubelet's probe gives up after 1 s, Prometheus after 10 s."""
TAKEN_PER_S: Final = 4000
"""Connections taken in a second, most of them to be closed unread at this rate: 12 us each."""
PEER_PER_S: Final = 400
"""Connections of one address in a second that are read at all: a probe costs 0.1 ms of the interpreter that the loop
shares. Closer limits would help whoever reaches us by the kubelet's own address (a NodePort)."""
MANY_PER_S: Final = 500
"""When so many were read in a second, only addresses with fewer than `FEW_PER_S` are read until it is over."""
FEW_PER_S: Final = 10
PAGES_PER_S: Final = 50
"""Pages other than probes that are made in a second: 0.4 ms each. Twice as many where each is its address's first."""
PEER_PAGES_PER_S: Final = 10
PROBES: Final = frozenset({"/healthz", "/readyz"})
REQUEST_BYTES: Final = 8192
"""Prometheus sends 400 bytes, a browser two thousand."""

_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
# Connections are taken in slices of a second, so that the queue moves on in a flood; it holds what comes in between.
_SLICE_S: Final = 0.05
_QUEUE: Final = 1024
# Close with a reset: no state is left in the kernel, as the end of an answered connection leaves it for a minute.
_RESET: Final = struct.pack("ii", 1, 0)
TEXT: Final = "text/plain; charset=utf-8"


class Page(NamedTuple):
    """An answer."""

    body: bytes
    status: int = 200
    content_type: str = TEXT


PageBuilder = Callable[[str], Page]
"""Makes a page; it is given the request's Accept header. Called in the server's thread."""


class AddressError(Exception):
    """The address cannot be served on; the message says why."""


class _Client:
    __slots__ = ("answer", "asked", "deadline", "peer", "sock")

    def __init__(self, sock: socket.socket, peer: str, deadline: float) -> None:
        self.sock = sock
        self.peer = peer
        self.deadline = deadline
        self.asked = b""
        self.answer: memoryview | None = None
        """What is still to be sent; None while the request is read."""


class Server:
    """Serves pages until it is closed."""

    def __init__(self, address: str, pages: Mapping[str, PageBuilder], *, failed: Callable[[str], None]) -> None:
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
        """In this slice."""
        self._slice_ends = 0.0
        self._second_ends = 0.0
        self._read_of: Counter[str] = Counter()
        """Connections in this second, by address, but for those that were closed unread."""
        self._pages_of: Counter[str] = Counter()
        self._read_in_all = self._pages_in_all = 0
        self._thread = workers.make_thread(self._run, name="http")
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
            self._loop()
        finally:
            # After an error, such as a selector that takes no more, the thread begins again on the same listener.
            for client in list(self._clients.values()):
                self._drop(client)
        self._listener.close()
        self._wake.close()
        self._selector.close()

    def _loop(self) -> None:
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

    def _patience(self) -> float | None:
        """How long nothing can become due by itself."""
        now = time.monotonic()
        due = [client.deadline for client in self._clients.values()]
        if not self._listening:
            due.append(self._slice_ends)
        return max(0.0, min(due) - now) if due else None

    def _tidy(self, now: float) -> None:
        for client in [client for client in self._clients.values() if client.deadline <= now]:
            self._drop(client)
        if not self._listening and now >= self._slice_ends:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._listening = True

    def _accept(self) -> None:
        """Take all that wait, as far as this slice of a second allows."""
        now = time.monotonic()
        self._count_anew(now)
        if now >= self._slice_ends:
            self._taken, self._slice_ends = 0, now + _SLICE_S
        while self._taken < TAKEN_PER_S * _SLICE_S:
            self._taken += 1
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue  # the client is gone again
            except OSError:
                break  # we are out of descriptors: later, so that this cannot spin
            self._take(sock, str(address[0]), now)
        self._selector.unregister(self._listener)
        self._listening = False

    def _count_anew(self, now: float) -> None:
        if now >= self._second_ends:
            self._second_ends = now + 1.0
            self._read_of.clear()
            self._pages_of.clear()
            self._read_in_all = self._pages_in_all = 0

    def _take(self, sock: socket.socket, peer: str, now: float) -> None:
        read = self._read_of[peer]
        if read >= PEER_PER_S or (read >= FEW_PER_S and self._read_in_all >= MANY_PER_S):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            sock.close()
            return
        self._read_of[peer] += 1
        self._read_in_all += 1
        sock.setblocking(False)
        self._make_room(peer)
        client = _Client(sock, peer, now + DEADLINE_S)
        self._clients[sock.fileno()] = client
        self._selector.register(sock, selectors.EVENT_READ)
        # What has been asked already is answered before others that were waiting as well can need its room.
        self._serve(client)

    def _make_room(self, peer: str) -> None:
        """For one more connection of this address."""
        number = Counter(client.peer for client in self._clients.values())
        if number[peer] >= PEER_CONNECTIONS:
            self._drop(next(client for client in self._clients.values() if client.peer == peer))
        elif len(self._clients) >= CONNECTIONS:
            # The first, and so the oldest, of those with most.
            self._drop(max(self._clients.values(), key=lambda client: number[client.peer]))

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
            # MemoryError, or a defect of ours: it costs this client its answer, never the thread.
            self._failed(f"a request: {type(error).__name__}: {error}")
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
            with contextlib.suppress(OSError):  # the client was faster
                client.sock.shutdown(socket.SHUT_WR)
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        self._clients.pop(client.sock.fileno(), None)
        with contextlib.suppress(KeyError):  # the selector would not take it
            self._selector.unregister(client.sock)
        client.sock.close()

    # --- answering ---------------------------------------------------------------------------------------------------

    def _reply(self, client: _Client) -> bytes:
        head = client.asked.decode("latin-1").replace("\r\n", "\n").partition("\n\n")[0].split("\n")
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
        if target.partition("?")[0] not in PROBES and not self._may_have_page(client.peer):
            return _answer(Page(b"too many requests in this second\n", 429), head_only=method == "HEAD")
        accept = next((line[7:].strip() for line in head[1:] if line[:7].lower() == "accept:"), "")
        try:
            page = maker(accept)
        except Exception as error:
            # A defect of ours must neither end the thread nor pass in silence.
            self._failed(f"{target.partition('?')[0]}: {type(error).__name__}: {error}")
            page = Page(b"this page could not be made; the log says why\n", 500)
        return _answer(page, head_only=method == "HEAD")

    def _may_have_page(self, peer: str) -> bool:
        self._count_anew(time.monotonic())
        of_peer = self._pages_of[peer]
        if of_peer >= PEER_PAGES_PER_S or self._pages_in_all >= (PAGES_PER_S if of_peer else 2 * PAGES_PER_S):
            return False
        self._pages_of[peer] += 1
        self._pages_in_all += 1
        return True


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
        sock.listen(_QUEUE)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock

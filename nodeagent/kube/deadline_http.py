"""Connections of `http.client` on which nothing is sent and no read waits after the deadline of its request.

A socket's own timeout restarts with every byte, so that a slow server could hold a thread without a limit. Here each
read gets the rest of the request's time."""

import io
import socket
import threading
from http.client import HTTPResponse
from typing import Any, Final

from nodeagent.runtime import clock

UNACKNOWLEDGED_S: Final = 4.0
"""A connection is lost when sent bytes are not acknowledged for so long: Linux sends them four times in 3 s (tcp(7),
TCP_USER_TIMEOUT). A request that the server has received may take longer."""
SOCKET_OPTIONS: Final = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNACKNOWLEDGED_S * 1000)),
)


class RequestLimits:
    """The limits and the progress of the request that a thread drives. Shared with its connection."""

    __slots__ = ("deadline", "handed_over", "idle_s", "socket", "uncertain")

    def __init__(self, *, deadline: float, idle_s: float) -> None:
        self.deadline = deadline
        """CLOCK_BOOTTIME: a suspend counts."""
        self.idle_s = idle_s
        self.socket: socket.socket | None = None
        self.handed_over = False
        """True if bytes of the present try may have left this machine. False is certain: the socket was given none."""
        self.uncertain = False
        """True if an earlier try was handed over and got no answer: the server may have carried it out."""

    def left_s(self) -> float:
        """Seconds until the deadline. Raises TimeoutError after it."""
        left_s = self.deadline - clock.boottime()
        if left_s <= 0:
            msg = "the request's deadline has passed"
            raise TimeoutError(msg)
        return left_s


current = threading.local()
"""`limits`: those of the request that the thread drives."""


class DeadlineReader(io.RawIOBase):
    """Reads a socket until the request's deadline at most."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, limits: RequestLimits) -> None:
        self._raw = raw
        self._sock = sock
        self._limits = limits

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(min(self._limits.left_s(), self._limits.idle_s))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class DeadlineResponse(HTTPResponse):
    """http.client's response, reading its headers and its body through `DeadlineReader`."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        limits: RequestLimits = current.limits
        limits.socket = sock
        raw = self.fp.detach()
        self.fp = io.BufferedReader(DeadlineReader(raw, sock, limits))


def with_deadline(connection: Any) -> Any:
    """The official package's class of connection, with `DeadlineResponse`, and with each request sent as one piece:
    http.client sends head and body one after the other, and an agent that stops in between (killed, or throttled by its
    CPU limit) leaves half a request with the server. The speed is the same: 145 us to loopback and back."""

    class DeadlineConnection(connection):  # type: ignore[misc]
        response_class = DeadlineResponse
        _pieces: list[bytes] | None = None

        def request(self, *args: Any, **kwargs: Any) -> None:
            self._pieces = []
            try:
                super().request(*args, **kwargs)
                content = b"".join(self._pieces)
            finally:
                self._pieces = None
            if self.sock is None and self.auto_open:
                # `send` would connect as well, but a failure of `send` does not prove that nothing was sent.
                self.connect()
            limits: RequestLimits = current.limits
            limits.left_s()  # connecting may take longer: a DNS look-up has no limit, each address has its own
            limits.handed_over = True
            super().send(content)

        def send(self, data: Any) -> None:
            if self._pieces is None:
                super().send(data)
            else:
                self._pieces.append(data)

    return DeadlineConnection

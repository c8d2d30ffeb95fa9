"""Tells the service manager how we are: readiness, watchdog, status, reload and stop (sd_notify(3)).

Promises:

1. Never blocks and never fails the caller: the datagram is sent without waiting, and a manager that is gone is ignored
   (it kills us or it does not; there is nobody left to tell).
2. Where there is no service manager, `Silent` takes the messages, so that callers have no `if`.
"""

import os
import socket
import time
from collections.abc import Mapping
from typing import Protocol


class Notifier(Protocol):
    """What the agent says to its service manager."""

    watchdog_s: float | None
    """The manager wants to hear `alive` at least this often; None when it does not watch."""

    def ready(self) -> None: ...
    def alive(self) -> None: ...
    def status(self, text: str) -> None: ...
    def reloading(self) -> None: ...
    def stopping(self) -> None: ...
    def close(self) -> None: ...


class NullNotifier:
    """No service manager: nothing is sent."""

    watchdog_s: float | None = None

    def ready(self) -> None:
        """Does nothing."""

    def alive(self) -> None:
        """Does nothing."""

    def status(self, text: str) -> None:
        """Does nothing."""

    def reloading(self) -> None:
        """Does nothing."""

    def stopping(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class Systemd:
    """systemd's notification socket."""

    def __init__(self, address: str, *, watchdog_s: float | None) -> None:
        self.watchdog_s = watchdog_s
        # systemd names abstract sockets with a leading @, the kernel with a leading NUL.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

    def ready(self) -> None:
        self._send("READY=1")

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        self._send("STATUS=" + text.replace("\n", " "))

    def reloading(self) -> None:
        """A reload begins (Type=notify-reload wants the CLOCK_MONOTONIC stamp). `ready()` ends it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def close(self) -> None:
        self._socket.close()

    def _send(self, message: str) -> None:
        try:
            self._socket.sendto(message.encode(), self._address)
        except OSError:
            # Promise 1. A full or vanished socket means the manager is not listening; the next message tries again.
            return


def notifier(environ: Mapping[str, str] | None = None) -> Notifier:
    """The notifier for this process, from NOTIFY_SOCKET and WATCHDOG_USEC / WATCHDOG_PID."""
    env = os.environ if environ is None else environ
    address = env.get("NOTIFY_SOCKET", "")
    if not address:
        return NullNotifier()
    watchdog_s = None
    usec = env.get("WATCHDOG_USEC", "")
    if usec.isdigit() and int(usec) > 0 and env.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
        watchdog_s = int(usec) / 1e6
    return Systemd(address, watchdog_s=watchdog_s)

"""Notifies the service manager of readiness, watchdog, status, reload and stop (sd_notify(3)).

Promises:

1. A notification never blocks and never raises. The datagram is sent without waiting, and a missing manager is ignored.
2. Without a service manager `NullNotifier` takes the notifications, so that callers need no `if`.
"""

import os
import socket
import time
from collections.abc import Mapping
from typing import Protocol


class Notifier(Protocol):
    """The notifications to the service manager."""

    watchdog_s: float | None
    """The manager requires `alive` at least this often; None without a watchdog."""

    def ready(self) -> None: ...
    def alive(self) -> None: ...
    def status(self, text: str) -> None: ...
    def reloading(self) -> None: ...
    def stopping(self) -> None: ...
    def close(self) -> None: ...


class NullNotifier:
    """Sends nothing, because there is no service manager."""

    watchdog_s: float | None = None

    def ready(self) -> None: ...
    def alive(self) -> None: ...
    def status(self, text: str) -> None: ...
    def reloading(self) -> None: ...
    def stopping(self) -> None: ...
    def close(self) -> None: ...


class SystemdNotifier:
    """Sends to systemd's notification socket."""

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
        """Begin a reload; `ready` ends it. Type=notify-reload requires the CLOCK_MONOTONIC stamp."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def close(self) -> None:
        self._socket.close()

    def _send(self, message: str) -> None:
        try:
            self._socket.sendto(message.encode(), self._address)
        except OSError:
            return  # promise 1: the socket is full or gone, and the next notification tries again


def open_notifier(environ: Mapping[str, str] | None = None) -> Notifier:
    """The notifier for NOTIFY_SOCKET and WATCHDOG_USEC / WATCHDOG_PID in the environment."""
    env = os.environ if environ is None else environ
    address = env.get("NOTIFY_SOCKET", "")
    if not address:
        return NullNotifier()
    watchdog_s = None
    usec = env.get("WATCHDOG_USEC", "")
    if usec.isdigit() and int(usec) > 0 and env.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
        watchdog_s = int(usec) / 1e6
    return SystemdNotifier(address, watchdog_s=watchdog_s)

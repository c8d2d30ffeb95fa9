"""What the loop sleeps on: a timer, signals, hand-overs from other threads, and any descriptor that a room registers.

Promises:

1. One `select.epoll`, no polling: a wake-up costs 67 us (asyncio: 269 us, MEASURED.md).
2. A wake-up is a hint. It says that something may have happened, never what is true; the loop samples to find out.
3. Hand-overs from threads (`wake`) are never lost and never block: they add to an eventfd.
"""

import os
import select
import signal
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Final, Self

WORKER: Final = "worker"
SIGNAL: Final = "signal"
TIMER: Final = "timer"


class Wakeups:
    """The one place where the loop sleeps. Use as a context manager: signal handlers are put back at the end."""

    def __init__(self, signals: Iterable[signal.Signals] = ()) -> None:
        self._epoll = select.epoll()
        self._sources: dict[int, tuple[str, Callable[[], None]]] = {}
        self._pending_signals: list[signal.Signals] = []
        self._eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.register(self._eventfd, WORKER, self._drain_eventfd)
        # Handlers run between two bytecodes of the main thread; this pipe is what makes epoll return for them. (One
        # byte a signal: an eventfd would refuse it.)
        self._signal_reader, self._signal_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.register(self._signal_reader, SIGNAL, self._drain_signals)
        self._old_wakeup_fd = signal.set_wakeup_fd(self._signal_writer, warn_on_full_buffer=False) if signals else -1
        self._old_handlers = {number: signal.signal(number, self._on_signal) for number in signals}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        if self._old_handlers:
            signal.set_wakeup_fd(self._old_wakeup_fd)
        self._epoll.close()
        for fd in (self._eventfd, self._signal_reader, self._signal_writer):
            os.close(fd)

    def wake(self) -> None:
        """Wake the loop; from any thread."""
        os.eventfd_write(self._eventfd, 1)

    def register(self, fd: int, reason: str, drain: Callable[[], None], events: int = select.EPOLLIN) -> None:
        """Wake for `reason` when this descriptor is ready; `drain` takes what is there, so it can be ready again."""
        self._epoll.register(fd, events)
        self._sources[fd] = (reason, drain)

    def unregister(self, fd: int) -> None:
        """Stop waking for a descriptor, before it is closed."""
        self._epoll.unregister(fd)
        del self._sources[fd]

    def wait(self, timeout_s: float) -> tuple[frozenset[str], tuple[signal.Signals, ...]]:
        """Sleep until something happens, at most this long: the reasons (`timer` when time is up) and the signals."""
        reasons = set()
        for fd, _ in self._epoll.poll(max(0.0, timeout_s)):
            reason, drain = self._sources[fd]
            drain()
            reasons.add(reason)
        signals = tuple(self._pending_signals)
        del self._pending_signals[: len(signals)]  # another one may have come since
        return frozenset(reasons or {TIMER}), signals

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._pending_signals.append(signal.Signals(number))

    def _drain_eventfd(self) -> None:
        os.eventfd_read(self._eventfd)

    def _drain_signals(self) -> None:
        os.read(self._signal_reader, 512)

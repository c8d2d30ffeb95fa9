"""Lets the loop sleep until a timeout, a signal, a call of `wake` by another thread, or an event on a descriptor.

Promises:

1. One `select.epoll`, no polling: a wake-up costs 67 us (asyncio: 269 us, docs/performance.md R4).
2. A wake-up is a hint that something may have changed. Only the loop's next sample is a verdict.
3. `wake` never blocks, and no call of it is lost: it adds to an eventfd.
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
    """The loop's epoll. Use it as a context manager: the end restores the signal handlers."""

    def __init__(self, signals: Iterable[signal.Signals] = ()) -> None:
        self._epoll = select.epoll()
        self._sources: dict[int, tuple[str, Callable[[], None]]] = {}
        self._pending_signals: list[signal.Signals] = []
        self._eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.register(self._eventfd, WORKER, self._drain_eventfd)
        # Handlers run between two bytecodes of the main thread; this pipe makes epoll return for them. It gets one byte
        # for each signal, which an eventfd would refuse.
        self._signal_reader, self._signal_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.register(self._signal_reader, SIGNAL, self._drain_signals)
        self._old_wakeup_fd = signal.set_wakeup_fd(self._signal_writer, warn_on_full_buffer=False) if signals else -1
        self._old_handlers = {number: signal.signal(number, self._on_signal) for number in signals}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)
        if self._old_handlers:
            signal.set_wakeup_fd(self._old_wakeup_fd)
        self._epoll.close()
        for fd in (self._eventfd, self._signal_reader, self._signal_writer):
            os.close(fd)

    def wake(self) -> None:
        """Wake the loop. May be called by any thread."""
        os.eventfd_write(self._eventfd, 1)

    def register(self, fd: int, reason: str, drain: Callable[[], None], events: int = select.EPOLLIN) -> None:
        """Wake the loop for `reason` when this descriptor is ready. `drain` reads the pending events."""
        self._epoll.register(fd, events)
        self._sources[fd] = (reason, drain)

    def unregister(self, fd: int) -> None:
        """Remove a descriptor, before it is closed."""
        self._epoll.unregister(fd)
        del self._sources[fd]

    def wait(self, timeout_s: float) -> tuple[frozenset[str], tuple[signal.Signals, ...]]:
        """Sleep until an event, at most `timeout_s`. Returns the reasons (`timer` after the timeout) and the
        signals."""
        reasons = set()
        for fd, _ in self._epoll.poll(max(0.0, timeout_s)):
            reason, drain = self._sources[fd]
            drain()
            reasons.add(reason)
        return frozenset(reasons or {TIMER}), self.signals()

    def signals(self) -> tuple[signal.Signals, ...]:
        """The signals since the last call, also after the end of the context."""
        signals = tuple(self._pending_signals)
        del self._pending_signals[: len(signals)]  # another one may have arrived meanwhile
        return signals

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._pending_signals.append(signal.Signals(number))

    def _drain_eventfd(self) -> None:
        os.eventfd_read(self._eventfd)

    def _drain_signals(self) -> None:
        os.read(self._signal_reader, 512)

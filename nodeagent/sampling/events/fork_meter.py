"""Measures fork rates: new processes and threads per second by pod, and detects a fork storm.

Theory of operation. The process connector reports every fork of the machine, but the loop must not wake up for each. So
the meter has its own descriptor: an epoll with the connector and a timer, of which one at a time is armed:

    idle      The connector is armed. Without forks there is no wake-up.
    polling   The timer is armed. When it fires, the pending events are drained. The timer is set again: to
              `CALM_DRAIN_S` after some events, to `STORM_DRAIN_S` after many. After no events the meter is idle again.
              Only an overrun of the receive buffer wakes the loop before the timer.

So the loop wakes up at most every `STORM_DRAIN_S`, and a storm is known at most `CALM_DRAIN_S` after its start. A
wake-up by this descriptor alone, without `storm`, needs no sample: nothing else has changed.

A process counts for the pod of its parent, a thread for the pod of its process (`fork_attribution`).
"""

import contextlib
import ctypes
import os
import select
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol

from nodeagent.model import Note, NoteKind
from nodeagent.sampling.events import process_connector
from nodeagent.sampling.events.fork_attribution import ForkAttribution
from nodeagent.sampling.events.kernel_events import EventSource
from nodeagent.sampling.events.process_connector import Connector, ConnectorError
from nodeagent.sampling.hostfs.host import Host

CALM_DRAIN_S: Final = 0.25
"""Between two drains while processes fork. The fastest storm measured (23,000/s) uses 5,750 PIDs meanwhile, an eighth
of the smallest default PID table (32,768, 18% in use). Cost: 4 wake-ups of 40 us per second."""
STORM_DRAIN_S: Final = 0.1
"""Between two drains during a storm: a quarter of the time in which 23,000/s fill the receive buffer."""
STORM_PER_S: Final = 1000.0
"""Processes and threads. A fork bomb made 2,000/s (performance.md R1). Exec probes in 110 pods make about 100/s,
and a JVM starts some hundred threads once. A storm is a hint: the loop takes a sample."""
STORM_LASTS_S: Final = 1.0
"""`storm` stays True for this long, so that a late loop does not miss it."""
WINDOW_S: Final = 1.0
"""Rates are means over this time."""
SUSTAINED_S: Final = 5.0
"""Sustained rates are means over this time. A server that starts 200 workers at once has 40/s; a fork bomb of 2,000/s
still has 2,000/s."""

_NEVER: Final = float("-inf")


class ForkCounts(NamedTuple):
    """Events since the meter was opened."""

    forks: int = 0
    """New processes."""
    threads: int = 0
    """New threads of existing processes: the PID limit counts both."""
    lost: int = 0
    """Forks and threads that did not fit the receive buffer, so that their kind and pod are unknown."""


class ForkMeter(Protocol):
    """Measures forks. `NoForks` stands for a host without a process connector."""

    def fileno(self) -> int: ...
    def source(self) -> EventSource | None: ...
    def drain(self, now: float, /) -> None: ...
    def rates(self, now: float, /) -> Mapping[str, float]: ...

    def sustained(self, now: float, /) -> Mapping[str, float]: ...

    def storm(self, now: float, /) -> bool: ...
    def close(self) -> None: ...


def open_meter(host: Host) -> tuple[ForkMeter, tuple[Note, ...]]:
    """A meter for this host; `NoForks` with a note if the host cannot measure forks."""
    if host.recorded:
        return NoForks(), (Note(NoteKind.FORKS, "no fork rates: recorded node"),)
    try:
        return ConnectorMeter(process_connector.open_connector(), host), ()
    except ConnectorError as error:
        reason = str(error)
    except OSError as error:
        reason = error.strerror or str(error)
    return NoForks(), (Note(NoteKind.FORKS, f"no fork rates: {reason}"),)


class NoForks:
    """Fork rates are unknown; `pid.available` is still sampled."""

    def fileno(self) -> int:
        return -1

    def source(self) -> EventSource | None:
        return None

    def drain(self, _now: float, /) -> None: ...

    def rates(self, _now: float, /) -> Mapping[str, float]:
        return {}

    def sustained(self, _now: float, /) -> Mapping[str, float]:
        return {}

    def storm(self, _now: float, /) -> bool:
        """False: unknown is never pressure."""
        return False

    def close(self) -> None: ...


class _Drained(NamedTuple):
    """The events of one drain."""

    since: float
    at: float
    by_pod: Mapping[str, int]


class ConnectorMeter:
    """The meter over the process connector. One owner."""

    def __init__(
        self,
        connector: Connector,
        host: Host,
        *,
        clock: Callable[[], float] | None = None,
        storm_per_s: float = STORM_PER_S,
    ) -> None:
        """`clock` stamps the drains of the loop's epoll; by default CLOCK_BOOTTIME of the host. The meter owns the
        connector and closes it, also if this raises OSError."""
        self._connector = connector
        self._clock = clock or host.boottime
        self._attribution = ForkAttribution(host)
        self._recent: deque[_Drained] = deque()
        self._drained_at = self._clock()
        self.events = ForkCounts()
        """All events so far, for the metrics."""
        self._storm_per_s = storm_per_s
        self._storm_at = _NEVER
        with contextlib.ExitStack() as opened:
            opened.callback(connector.close)
            self._timer = _Timer()
            opened.callback(self._timer.close)
            self._epoll = opened.enter_context(select.epoll())
            self._epoll.register(self._timer.fileno(), select.EPOLLIN)
            self._epoll.register(connector.fileno(), select.EPOLLIN)
            self._opened = opened.pop_all()

    def fileno(self) -> int:
        """Readable when it is time to `drain`."""
        return self._epoll.fileno()

    def source(self) -> EventSource | None:
        """For the loop's epoll. Its drain reads the clock of the meter."""
        return EventSource("forks", self.fileno(), select.EPOLLIN, lambda: self.drain(self._clock()), self.close)

    def drain(self, now: float, /) -> None:
        """Count the events since the last drain and arm the timer or the connector. May be called at any time."""
        since, self._drained_at = self._drained_at, now
        batch = self._connector.drain()
        self.events = ForkCounts(
            self.events.forks + len(batch.parents),
            self.events.threads + len(batch.owners),
            self.events.lost + batch.lost,
        )
        if batch.parents or batch.owners or batch.lost:
            forks, threads = self._attribution.count_by_pod(batch.parents, batch.children, batch.owners, now=now)
            self._recent.append(_Drained(since, now, Counter(forks) + Counter(threads)))
        while self._recent and self._recent[0].at <= now - SUSTAINED_S:
            self._recent.popleft()
        number = len(batch.parents) + len(batch.owners) + batch.lost
        # Of an idle meter the first event arrives alone, long after `since`. That is no storm.
        if batch.lost or number > self._storm_per_s * max(now - since, STORM_DRAIN_S / 2):
            self._storm_at = now
            self._wake_after(STORM_DRAIN_S)
        elif number:
            self._wake_after(CALM_DRAIN_S)
        else:
            self._timer.stop()
            self._epoll.modify(self._connector.fileno(), select.EPOLLIN)

    def _wake_after(self, seconds: float) -> None:
        self._timer.after(seconds)
        # An epoll always reports errors: an overrun of the buffer wakes the loop before the timer.
        self._epoll.modify(self._connector.fileno(), 0)

    def rates(self, now: float, /) -> Mapping[str, float]:
        """New processes and threads per second over the last `WINDOW_S`, by pod cgroup UID, `processes.HOST` or
        `UNKNOWN_POD`."""
        return self._mean(now, WINDOW_S)

    def sustained(self, now: float, /) -> Mapping[str, float]:
        """The same over the last `SUSTAINED_S`."""
        return self._mean(now, SUSTAINED_S)

    def storm(self, now: float, /) -> bool:
        """True if a drain of the last `STORM_LASTS_S` found more than `storm_per_s`, or an overrun."""
        return now - self._storm_at < STORM_LASTS_S

    def close(self) -> None:
        """Stop listening."""
        self._opened.close()

    def _mean(self, now: float, window_s: float) -> Mapping[str, float]:
        """Events per second. A drain that began before the window counts with its share inside the window."""
        begin = now - window_s
        sums: dict[str, float] = {}
        for drained in self._recent:
            if drained.at <= begin:
                continue
            share = 1.0
            if drained.since < begin:
                share = (drained.at - begin) / (drained.at - drained.since)
            for pod, number in drained.by_pod.items():
                sums[pod] = sums.get(pod, 0.0) + share * number / window_s
        return sums


class _Timer:
    """A timerfd."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def fileno(self) -> int:
        return int(self._fd)

    def after(self, seconds: float) -> None:
        """Fire once after this time. Replaces the time set before."""
        integer = int(seconds)
        # struct itimerspec: no repetition, then the time. Setting it also clears an expiration.
        self._set(struct.pack("qqqq", 0, 0, integer, int((seconds - integer) * 1e9)))

    def stop(self) -> None:
        self._set(bytes(32))

    def close(self) -> None:
        os.close(self._fd)

    def _set(self, when: bytes) -> None:
        self._libc.timerfd_settime(self._fd, 0, when, None)

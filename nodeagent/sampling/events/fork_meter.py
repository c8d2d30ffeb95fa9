"""Who forks how fast: processes and threads per second by pod, and whether it is a storm.

Theory of operation. The process connector tells every fork of the machine. It must not wake the loop for each, so the
meter has a descriptor of its own, an epoll that holds the connector and a timer, of which one at a time is armed:

    asleep     the connector is armed; a machine on which nothing forks wakes nobody
    looking    the timer is armed; when it fires what came meanwhile is drained at once. Again in `CALM_S` while there
               was anything, in `STORM_S` while it was a lot; back to `asleep` when there was nothing. Only an overrun
               of the receive buffer wakes before the timer

So the loop wakes at most every `STORM_S`, and a storm is known at most `CALM_S` after it began. Whoever wakes only for
this descriptor and finds no `storm` may sleep on: nothing else has changed.

A process is charged to the pod of its parent, a thread to the pod of its process (origins.py).
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

from nodeagent.model import NodeSnapshot, Note, NoteKind
from nodeagent.sampling.events.fork_attribution import Origins
from nodeagent.sampling.events.kernel_events import EventSource
from nodeagent.sampling.events.process_connector import Connector, ConnectorError, open_connector
from nodeagent.sampling.hostfs.host import Host

CALM_S: Final = 0.25
"""Between looks while something forks: the fastest storm measured (23,000/s) makes 5,750 PIDs meanwhile, an eighth of
the smallest default PID table (32,768 with 18% in use), for 4 wake-ups of 40 us a second."""
STORM_S: Final = 0.1
"""Between looks during a storm: a quarter of what the receive buffer holds at 23,000/s."""
STORM_PER_S: Final = 1000.0
"""Processes and threads. A fork bomb measured 2,000/s (MEASURED.md section 1); a node whose kubelet runs exec probes in
110 pods makes about 100/s, a starting JVM some hundred threads once. It is a hint: it makes the loop sample."""
STORM_LASTS_S: Final = 1.0
"""A storm is remembered for so long, so that a loop that was late still sees it."""
WINDOW_S: Final = 1.0
"""Rates are means over this."""
SUSTAINED_S: Final = 5.0
"""What a pod does all the time is a mean over this: a server that starts its 200 workers at once then forks 40 a
second, a bomb of 2,000 a second stays one."""

_NEVER: Final = float("-inf")


class ForkCounts(NamedTuple):
    """How many there have been since the meter was opened."""

    forks: int = 0
    threads: int = 0
    lost: int = 0


class ForkRate(NamedTuple):
    """Events per second, of the whole machine."""

    forks: float
    """New processes."""
    threads: float
    """New threads of existing processes: the PID limit counts both."""
    lost: float
    """Of either, whose kind and origin are not known because the receive buffer was full."""

    @property
    def all(self) -> float:
        return self.forks + self.threads + self.lost


class ForkMeter(Protocol):
    """Measures forks; `NoForks` where the host does not tell."""

    def fileno(self) -> int: ...
    def source(self) -> EventSource | None: ...
    def drain(self, now: float, /) -> None: ...
    def rates(self, now: float, /) -> Mapping[str, float]: ...
    def thread_rates(self, now: float, /) -> Mapping[str, float]: ...
    def sustained(self, now: float, /) -> Mapping[str, float]: ...
    def total(self, now: float, /) -> ForkRate: ...
    def storm(self, now: float, /) -> bool: ...
    def close(self) -> None: ...


def open_meter(host: Host) -> tuple[ForkMeter, tuple[Note, ...]]:
    """A meter for this host, and why it is none that measures."""
    if host.recorded:
        return NoForks(), (Note(NoteKind.FORKS, "a recording forks no more"),)
    try:
        return ConnectorMeter(open_connector(), host), ()
    except ConnectorError as error:
        why = str(error)
    except OSError as error:
        why = error.strerror or str(error)
    return NoForks(), (Note(NoteKind.FORKS, f"fork rates are not known: {why}"),)


class NoForks:
    """Nothing is known of forks; `pid.available` is still sampled."""

    def fileno(self) -> int:
        """-1: there is nothing to wait for."""
        return -1

    def source(self) -> EventSource | None:
        """None: there is nothing to register."""
        return None

    def drain(self, _now: float, /) -> None:
        """Does nothing."""

    def rates(self, _now: float, /) -> Mapping[str, float]:
        """Empty."""
        return {}

    def thread_rates(self, _now: float, /) -> Mapping[str, float]:
        """Empty."""
        return {}

    def sustained(self, _now: float, /) -> Mapping[str, float]:
        """Empty."""
        return {}

    def total(self, _now: float, /) -> ForkRate:
        """Zeros: not known to be a storm."""
        return ForkRate(0.0, 0.0, 0.0)

    def storm(self, _now: float, /) -> bool:
        """False: unknown is never pressure."""
        return False

    def close(self) -> None:
        """Does nothing."""


class _Drained(NamedTuple):
    """What one drain found."""

    since: float
    at: float
    forks: Mapping[str, int]
    threads: Mapping[str, int]
    lost: int

    @property
    def number(self) -> int:
        return sum(self.forks.values()) + sum(self.threads.values()) + self.lost


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
        """`clock` stamps the drains that the loop's epoll asks for; by default the host's CLOCK_BOOTTIME. Takes the
        connector over, also when it raises OSError."""
        self._connector = connector
        self._clock = clock or host.boottime
        self._origins = Origins(host)
        self._recent: deque[_Drained] = deque()
        self._drained_at = self._clock()
        self.events = ForkCounts()
        """What the drains have found so far: counters for metrics."""
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
        """For the loop's epoll; its drain takes the time from the meter's clock."""
        return EventSource("forks", self.fileno(), select.EPOLLIN, lambda: self.drain(self._clock()), self.close)

    def drain(self, now: float, /) -> None:
        """Take what came since the last time and arrange when to be woken next. May be called at any time."""
        since, self._drained_at = self._drained_at, now
        found = self._connector.drain()
        self.events = ForkCounts(
            self.events.forks + len(found.parents),
            self.events.threads + len(found.owners),
            self.events.lost + found.lost,
        )
        if found.parents or found.owners or found.lost:
            forks, threads = self._origins.of(found.parents, found.children, found.owners, now=now)
            self._recent.append(_Drained(since, now, forks, threads, found.lost))
        while self._recent and self._recent[0].at <= now - SUSTAINED_S:
            self._recent.popleft()
        number = len(found.parents) + len(found.owners) + found.lost
        # After a sleep the first event comes alone, and `since` is long ago: that is no storm, but worth a look soon.
        if found.lost or number > self._storm_per_s * max(now - since, STORM_S / 2):
            self._storm_at = now
            self._wake_after(STORM_S)
        elif number:
            self._wake_after(CALM_S)
        else:
            self._timer.stop()
            self._epoll.modify(self._connector.fileno(), select.EPOLLIN)

    def _wake_after(self, seconds: float) -> None:
        self._timer.after(seconds)
        # An epoll reports errors also of what it is not asked about: an overrun wakes us before the timer does.
        self._epoll.modify(self._connector.fileno(), 0)

    def rates(self, now: float, /) -> Mapping[str, float]:
        """New processes per second over the last `WINDOW_S`, by pod cgroup UID, `HOST` or `UNKNOWN`."""
        return self._mean(now, lambda drained: drained.forks)

    def thread_rates(self, now: float, /) -> Mapping[str, float]:
        """The same for new threads."""
        return self._mean(now, lambda drained: drained.threads)

    def sustained(self, now: float, /) -> Mapping[str, float]:
        """New processes and threads together, per second over the last `SUSTAINED_S`."""
        return self._mean(now, lambda drained: Counter(drained.forks) + Counter(drained.threads), SUSTAINED_S)

    def total(self, now: float, /) -> ForkRate:
        """Of the whole machine. Right also when events were lost."""
        lost = self._mean(now, lambda drained: {"": drained.lost}).get("", 0.0)
        return ForkRate(sum(self.rates(now).values()), sum(self.thread_rates(now).values()), lost)

    def storm(self, now: float, /) -> bool:
        """Whether a drain of the last `STORM_LASTS_S` found more than `storm_per_s`, or an overrun."""
        return now - self._storm_at < STORM_LASTS_S

    def close(self) -> None:
        """Stop listening."""
        self._opened.close()

    def _mean(
        self, now: float, what: Callable[[_Drained], Mapping[str, int]], window_s: float = WINDOW_S
    ) -> Mapping[str, float]:
        """Events per second. A drain that reaches back beyond the window counts with the share that is inside."""
        begin = now - window_s
        sums: dict[str, float] = {}
        for drained in self._recent:
            if drained.at <= begin:
                continue
            share = 1.0
            if drained.since < begin:
                share = (drained.at - begin) / (drained.at - drained.since)
            for origin, number in what(drained).items():
                sums[origin] = sums.get(origin, 0.0) + share * number / window_s
        return sums


def apply(snapshot: NodeSnapshot, rates: Mapping[str, float]) -> NodeSnapshot:
    """The snapshot with the rate of each pod that has one (`ForkMeter.sustained`)."""
    if not rates:
        return snapshot
    pods = [
        view._replace(usage=view.usage._replace(forks_per_s=rates[view.usage.cgroup_uid]))
        if view.usage is not None and view.usage.cgroup_uid in rates
        else view
        for view in snapshot.pods
    ]
    return snapshot._replace(pods=tuple(pods))


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
        """Fire once, so much later; what was set before is forgotten."""
        whole = int(seconds)
        # struct itimerspec: no repetition, then the time; setting it also takes what had fired.
        self._set(struct.pack("qqqq", 0, 0, whole, int((seconds - whole) * 1e9)))

    def stop(self) -> None:
        self._set(bytes(32))

    def close(self) -> None:
        os.close(self._fd)

    def _set(self, when: bytes) -> None:
        self._libc.timerfd_settime(self._fd, 0, when, None)

"""How many more threads the kernel would make: `pid.available` (KUBELET-CONTRACT, signals)."""

from typing import Final

from nodeagent.model import Observation, Signal
from nodeagent.sampling.hostfs import parse
from nodeagent.sampling.hostfs.fd_cache import FdCache
from nodeagent.sampling.hostfs.host import Unreadable

_LIMITS: Final = ("/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max")
_LOADAVG: Final = "/proc/loadavg"
_SOURCE: Final = f"min of {' and '.join(_LIMITS)} - {_LOADAVG}"


def read_limit(kept: FdCache) -> int | None:
    """The smaller of pid_max and threads-max, whichever is readable. Never raises."""
    limits = [limit for path in _LIMITS if (limit := _limit(kept, path)) is not None]
    return min(limits, default=None)


def read_pids(kept: FdCache, capacity: int | None, *, now: float) -> Observation:
    """`capacity`, the limit, minus the threads that exist; may be negative. Never raises."""
    if capacity is None:
        return Observation(Signal.PID, None, None, now, _SOURCE, f"neither {' nor '.join(_LIMITS)} is readable")
    try:
        running = parse_loadavg(kept.read(_LOADAVG))
    except Unreadable as error:
        return Observation(Signal.PID, None, capacity, now, _SOURCE, str(error))
    if running is None:
        return Observation(Signal.PID, None, capacity, now, _SOURCE, f"{_LOADAVG} is malformed")
    return Observation(Signal.PID, capacity - running, capacity, now, _SOURCE)


def _limit(kept: FdCache, path: str) -> int | None:
    try:
        return parse.parse_count(kept.read(path)) or None  # no kernel has 0: such a file is broken
    except Unreadable:
        return None


def parse_loadavg(data: bytes) -> int | None:
    """Threads that exist: after the slash in the fourth field of /proc/loadavg; None when malformed."""
    fields = data.split()
    if len(fields) < 4:
        return None
    return parse.parse_count(fields[3].partition(b"/")[2])

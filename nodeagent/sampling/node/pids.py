"""`pid.available`: the number of threads that the kernel can still make (KUBELET-CONTRACT, signals)."""

from typing import Final

from nodeagent.model import Observation, Signal
from nodeagent.sampling.hostfs import parse
from nodeagent.sampling.hostfs.fd_cache import FdCache
from nodeagent.sampling.hostfs.host import Unreadable

_LIMITS: Final = ("/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max")
_LOADAVG: Final = "/proc/loadavg"
_SOURCE: Final = f"min of {' and '.join(_LIMITS)} - {_LOADAVG}"


def read_limit(files: FdCache) -> int | None:
    """The smaller of pid_max and threads-max; one of them if the other is not readable; None without both."""
    limits = [limit for path in _LIMITS if (limit := _limit(files, path)) is not None]
    return min(limits, default=None)


def read_pids(files: FdCache, capacity: int | None, *, now: float) -> Observation:
    """`capacity`, the limit, minus the existing threads; may be negative. Never raises."""
    if capacity is None:
        return Observation(Signal.PID, None, None, now, _SOURCE, f"neither {' nor '.join(_LIMITS)} is readable")
    try:
        running = parse_loadavg(files.read(_LOADAVG))
    except Unreadable as error:
        return Observation(Signal.PID, None, capacity, now, _SOURCE, str(error))
    if running is None:
        return Observation(Signal.PID, None, capacity, now, _SOURCE, f"{_LOADAVG} is malformed")
    return Observation(Signal.PID, capacity - running, capacity, now, _SOURCE)


def _limit(files: FdCache, path: str) -> int | None:
    try:
        return parse.parse_count(files.read(path)) or None  # no kernel reports 0: the file is broken
    except Unreadable:
        return None


def parse_loadavg(data: bytes) -> int | None:
    """Number of existing threads: after the slash in the fourth field of /proc/loadavg; None if malformed."""
    fields = data.split()
    if len(fields) < 4:
        return None
    return parse.parse_count(fields[3].partition(b"/")[2])

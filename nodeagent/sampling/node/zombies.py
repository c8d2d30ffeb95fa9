"""Counts zombies: processes that have ended and that their parents have not waited for. Each holds a PID.

Promises:

1. Not on the loop: `count_zombies` reads one file for each process, 6 to 18 us each and at most `MAX_PROCESSES`, with a
   pause after each `CHUNK`. It ends after `MAX_S`. The caller runs it in a worker.
2. `ZombieCounter` counts at most every `EVERY_S`, and takes at most `CPU_SHARE` of a core; while PIDs are short, at
   most every `SHORT_S`. An old count is None.
3. An unreadable process is treated as missing. A count of a part of the processes says so (`complete`).

Theory of operation. No cgroup.procs lists a zombie, so only /proc has it. Field 3 of /proc/PID/stat is Z also for a
process whose first thread has ended while others run; it is no zombie, and its number of threads (field 20) is above 1.
While a process runs, each that was read takes about 1.8 KiB of kernel memory, which the kernel reclaims if it needs it.
"""

import time
from collections.abc import Callable
from typing import Final, NamedTuple

from nodeagent.sampling.hostfs.host import Host, Unreadable

MAX_PROCESSES: Final = 20_000
"""About 0.3 s of CPU, and 36 MiB of kernel memory that can be reclaimed. The lowest PIDs are read first."""
MAX_S: Final = 5.0
"""Wall time of one count. A node without CPU or memory is slow."""
CHUNK: Final = 200
PAUSE_S: Final = 0.005
"""After each `CHUNK`, so that the loop, which shares the interpreter, is not slowed down for long."""
EVERY_S: Final = 60.0
CPU_SHARE: Final = 1e-4
"""Of a core: a node with 1,000 processes is counted every two minutes."""
SHORT_S: Final = 10.0
"""Least time between two counts while PIDs are short, where who holds them matters more than `CPU_SHARE`: 20,000
processes take 3% of a core."""
OLD_S: Final = 3600.0
"""A count that is older is unknown: 20,000 processes take half of it at `CPU_SHARE`."""
_STATE, _PARENT, _THREADS = 0, 1, 17
"""Fields 3, 4 and 20 of proc(5), after the command."""


class ParentZombies(NamedTuple):
    """A process and its zombies."""

    pid: int
    """0: the parent is outside our PID namespace."""
    zombies: int


class Zombies(NamedTuple):
    """The zombies of the node."""

    total: int
    parents: tuple[ParentZombies, ...]
    """All parents, the one with the most zombies first."""
    complete: bool
    """False: not all processes were read, so there may be more."""


def count_zombies(
    host: Host,
    *,
    max_processes: int = MAX_PROCESSES,
    max_s: float = MAX_S,
    pause: Callable[[float], object] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
) -> Zombies | None:
    """The zombies now; None if /proc cannot be listed. Never raises."""
    try:
        pids = sorted(host.processes())
    except Unreadable:
        return None
    parents: dict[int, int] = {}
    until, complete = monotonic() + max_s, len(pids) <= max_processes
    for index, pid in enumerate(pids[:max_processes], start=1):
        try:
            parent = _parent_of_zombie(host.read(f"/proc/{pid}/stat"))
        except Unreadable:
            continue  # ended meanwhile
        if parent is not None:
            parents[parent] = parents.get(parent, 0) + 1
        if index % CHUNK == 0:
            if monotonic() > until:
                complete = False
                break
            pause(PAUSE_S)
    ordered = sorted(parents.items(), key=lambda each: (-each[1], each[0]))
    return Zombies(sum(parents.values()), tuple([ParentZombies(*each) for each in ordered]), complete)


def _parent_of_zombie(stat: bytes) -> int | None:
    """The parent of the process with this /proc/PID/stat; None if it is no zombie, or if the file is malformed."""
    fields = stat.rpartition(b")")[2].split()  # the command before them may contain any character
    if len(fields) <= _THREADS or fields[_STATE] != b"Z" or fields[_THREADS] not in (b"0", b"1"):
        return None
    return int(fields[_PARENT]) if fields[_PARENT].isdigit() else None


class ZombieCounter:
    """Counts again and again. One thread calls `step`, any thread reads `latest`."""

    def __init__(
        self,
        host: Host,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        thread_time: Callable[[], float] = time.thread_time,
    ) -> None:
        self._host = host
        self._monotonic = monotonic
        self._thread_time = thread_time
        self._due_at = float("-inf")
        self._soon = False
        self._counted: tuple[float, Zombies | None] = (float("-inf"), None)

    @property
    def latest(self) -> Zombies | None:
        """The newest count; None if there is none, or if it is older than `OLD_S`."""
        counted_at, zombies = self._counted
        return zombies if self._monotonic() - counted_at <= OLD_S else None

    def due_soon(self) -> bool:
        """Have the next `step` count, because PIDs are short. False: the last count is still young enough."""
        if self._monotonic() - self._counted[0] < SHORT_S:
            return False
        self._soon = True
        return True

    def step(self) -> None:
        """Count if it is due. Never raises."""
        now = self._monotonic()
        if now < self._due_at and not self._soon:
            return
        self._soon = False
        began = self._thread_time()
        zombies = count_zombies(self._host)
        self._counted = (now, zombies)
        self._due_at = now + max(EVERY_S, (self._thread_time() - began) / CPU_SHARE) - 1.0

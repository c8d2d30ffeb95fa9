"""Processes of the host, for people and records: the largest of a pod.

Off the sampling path: psutil is imported by the function that needs it (26 ms).
"""

from typing import Final, NamedTuple

from nodeagent.model import PodUsage
from nodeagent.sampling.cgroup import Hierarchy
from nodeagent.sampling.host import Host, Unreadable

# A fork bomb's cgroup may list 30,000 PIDs: looking at all of them takes seconds, and a record needs the largest few.
_LOOK_AT_MOST: Final = 2000
_DEPTH: Final = 4


class ProcessFacts(NamedTuple):
    """One process of a pod."""

    pid: int
    name: str
    """Command name; may hold any character: escape it before it is shown."""
    rss: int
    """Resident set in bytes; pages shared with others count in full."""


def largest(host: Host, hierarchy: Hierarchy, usage: PodUsage, *, most: int = 5) -> tuple[ProcessFacts, ...]:
    """The pod's processes with the largest resident sets, largest first. Those that end meanwhile, are outside our PID
    namespace or not ours to see are left out; of a pod with thousands only the first 2,000 are looked at."""
    if hierarchy.memory is None:
        return ()
    pids = pids_below(host, f"{hierarchy.memory}{usage.cgroup}")[:_LOOK_AT_MOST]
    found = _from_files(host, pids) if host.recorded else _from_psutil(host, pids)
    return tuple(sorted(found, key=lambda process: (-process.rss, process.pid))[:most])


def pids_below(host: Host, place: str, *, depth: int = _DEPTH) -> list[int]:
    """Processes in a cgroup and in those below it, so many levels down; those that are gone have none."""
    try:
        pids = [int(pid) for pid in host.read(f"{place}/cgroup.procs").split() if pid.isdigit() and pid != b"0"]
        children = host.subdirectories(place) if depth else []
    except Unreadable:
        return []
    for name, _inode in children:
        pids += pids_below(host, f"{place}/{name}", depth=depth - 1)
    return pids


def _from_psutil(host: Host, pids: list[int]) -> list[ProcessFacts]:
    import psutil

    # psutil looks at one /proc for the whole process; the host's may be another (/host/proc).
    before, psutil.PROCFS_PATH = psutil.PROCFS_PATH, host.real("/proc")
    found = []
    try:
        for pid in pids:
            try:
                process = psutil.Process(pid)
                with process.oneshot():
                    found.append(ProcessFacts(pid, process.name(), process.memory_info().rss))
            except psutil.Error:
                continue  # ended, or not ours to see
    finally:
        psutil.PROCFS_PATH = before
    return found


def _from_files(host: Host, pids: list[int]) -> list[ProcessFacts]:
    """A recording has only some files of each process."""
    found = []
    for pid in pids:
        try:
            head, _, tail = host.text(f"/proc/{pid}/stat").rpartition(")")
            pages = int(tail.split()[21])  # field 24: resident pages
        except (Unreadable, ValueError, IndexError):
            continue
        found.append(ProcessFacts(pid, head.partition("(")[2], pages * 4096))
    return found

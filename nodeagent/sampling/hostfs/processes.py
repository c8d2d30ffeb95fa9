"""Processes of the host, for people and records: the largest of a pod.

Off the sampling path: psutil is imported by the function that needs it (26 ms).
"""

import errno
from typing import Final, NamedTuple

from nodeagent.model import PodUsage
from nodeagent.sampling.hostfs.cgroups import Hierarchy, cgroups_below
from nodeagent.sampling.hostfs.host import Host, Unreadable

# A fork bomb's cgroup may list 30,000 PIDs: looking at all of them takes seconds, and a record needs the largest few.
_LOOK_AT_MOST: Final = 2000
MOST_CGROUPS: Final = 4096
"""Of one pod that are looked into: 60 ms. A systemd inside a container makes a hundred."""


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
    pids = processes_below(host, f"{hierarchy.memory}{usage.cgroup}").pids[:_LOOK_AT_MOST]
    found = _from_files(host, pids) if host.recorded else _from_psutil(host, pids)
    return tuple(sorted(found, key=lambda process: (-process.rss, process.pid))[:most])


class Processes(NamedTuple):
    """The processes of a cgroup."""

    pids: list[int]
    complete: bool
    """False: there are more cgroups below it than were looked at, one could not be read, or processes are outside our
    PID namespace."""


def processes_below(host: Host, place: str, *, most_cgroups: int = MOST_CGROUPS) -> Processes:
    """Processes in a cgroup and in those below it; those that are gone have none. Never raises."""
    groups = cgroups_below(host, place, most=most_cgroups)
    pids: list[int] = []
    complete = groups.complete
    for group in groups.places:
        try:
            found = [int(pid) for pid in host.read(f"{group}/cgroup.procs").split() if pid.isdigit()]
            complete = complete and 0 not in found  # a process outside our PID namespace
            pids += [pid for pid in found if pid]
        except Unreadable as error:
            # Gone, or threaded: then its processes are its parent's.
            complete = complete and error.errno in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP)
    return Processes(pids, complete)


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

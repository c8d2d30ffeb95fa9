"""Names the pod or the systemd unit of each parent that does not wait for its children.

A zombie counts in `pids.current` of its own cgroup until its parent waits for it or ends. Ending the pod of the parent
ends both. Of a parent outside of pods no eviction frees anything.
"""

from typing import Final

from nodeagent.model import ZombieCount, ZombieHolder
from nodeagent.sampling.hostfs import processes
from nodeagent.sampling.hostfs.host import Host, Unreadable
from nodeagent.sampling.node.zombies import ParentZombies, Zombies

MAX_PARENTS: Final = 256
"""Parents that are looked up, those with the most zombies first: two files each, 30 us."""
MAX_HOLDERS: Final = 16
_UNITS: Final = (".service", ".scope", ".socket", ".mount", ".swap")


def name_holders(host: Host, zombies: Zombies) -> ZombieCount:
    """The count with its holders. Never raises: a parent that is gone has neither pod nor unit."""
    found: dict[tuple[str, str], list[ParentZombies]] = {}
    for parent in zombies.parents[:MAX_PARENTS]:
        found.setdefault(_owner(host, parent.pid), []).append(parent)
    holders = [
        ZombieHolder(sum(parent.zombies for parent in parents), uid, unit, parents[0].pid, _command(host, parents[0]))
        for (uid, unit), parents in found.items()
    ]
    holders.sort(key=lambda holder: (-holder.zombies, holder.pid))
    return ZombieCount(zombies.total, tuple(holders[:MAX_HOLDERS]), zombies.complete, host.boottime())


def _owner(host: Host, pid: int) -> tuple[str, str]:
    """(UID of the pod, unit outside of pods) of a process; both empty if it is not visible."""
    uid = processes.pod_uid_of_process(host, pid) if pid else None
    if uid is None:
        return "", ""
    if uid != processes.HOST:
        return uid, ""
    try:
        lines = host.text(f"/proc/{pid}/cgroup").splitlines()
    except Unreadable:
        return "", ""
    # Hierarchies of cgroup v1 without systemd have a shorter path, most often `/`.
    paths = [line.split(":", 2)[2] for line in lines if line.count(":") >= 2]
    path = max(paths, key=len, default="/")
    for part in reversed(path.split("/")):
        if part.endswith(_UNITS):
            return "", part
    return "", path


def _command(host: Host, parent: ParentZombies) -> str:
    return next((name.decode("utf-8", "replace") for _, name in host.commands([parent.pid])), "")

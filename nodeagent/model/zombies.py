"""Processes that have ended and that their parents have not waited for, by the pod or unit of the parent."""

from typing import NamedTuple


class ZombieHolder(NamedTuple):
    """A pod, a service or another cgroup of the host whose processes do not wait for their children."""

    zombies: int
    pod_uid: str
    """UID in the name of the pod's cgroup; empty outside of pods."""
    unit: str
    """The systemd unit, or the path of the cgroup; empty for a pod, and if the parent is gone or in another PID
    namespace."""
    pid: int
    """The parent with the most zombies."""
    command: str
    """Its name; empty if it is unknown."""


class ZombieCount(NamedTuple):
    """The zombies of the node. Each holds a PID until its parent waits for it or ends."""

    total: int
    holders: tuple[ZombieHolder, ...]
    """Those with the most zombies first; at most some dozens, so that they may be less than the total."""
    complete: bool
    """False: not all processes were read, so there may be more."""
    read_at: float
    """CLOCK_BOOTTIME."""

    @property
    def of_host(self) -> tuple[ZombieHolder, ...]:
        """The known holders outside of pods: no eviction ends them."""
        return tuple([holder for holder in self.holders if holder.unit])

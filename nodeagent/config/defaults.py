"""Define nodeagent's built-in thresholds, and the kubelet's defaults for comparison.

Each built-in threshold is met before the kubelet's default, so that the agent, which respects PDBs, acts first and the
kubelet remains the backstop.

Built-in memory thresholds follow the capacity: 2% (hard) and 3% (soft) of MemTotal, at least 200Mi and 300Mi, at most
1Gi and 1536Mi. A value that a configuration sets is that value on every node.

| signal | value | reason |
| --- | --- | --- |
| memory | at least twice the kubelet's | its sample is 3 to 9 s old; it lost every ramp of 50 MiB/s with 300Mi left |
| memory | 2% and 3% | a larger node has more CPUs and pods, which use memory up faster; so do the kernel's reserves |
| memory | at most 1Gi and 1536Mi | an eviction takes a time that does not grow with the node |
| disks | 2% of the capacity above the kubelet's | an eviction finishes in time on a file system of usual size |
| PIDs | 5% | the kubelet has no default, and a full PID table stops the kubelet itself |
"""

from collections.abc import Mapping
from typing import Final

from nodeagent.model import Amount, Signal, units


def _quantity(count: int, text: str) -> Amount:
    return Amount(count, None, text)


def _percent(percentage: float) -> Amount:
    return Amount(None, percentage, f"{percentage:g}%")


def _bounded(percentage: float, *, at_least_mib: int, at_most_mib: int) -> Amount:
    bounds = [units.format_quantity(mib * _MIB) for mib in (at_least_mib, at_most_mib)]
    text = f"{percentage:g}%, at least {bounds[0]}, at most {bounds[1]}"
    return Amount(None, percentage, text, at_least=at_least_mib * _MIB, at_most=at_most_mib * _MIB)


_MIB: Final = 1024 * 1024

EVICTION_HARD: Final[Mapping[Signal, Amount]] = {
    Signal.MEMORY: _bounded(2.0, at_least_mib=200, at_most_mib=1024),
    Signal.NODEFS: _percent(12.0),
    Signal.NODEFS_INODES: _percent(7.0),
    Signal.IMAGEFS: _percent(17.0),
    Signal.IMAGEFS_INODES: _percent(7.0),
    Signal.PID: _percent(5.0),
}
EVICTION_SOFT: Final[Mapping[Signal, Amount]] = {
    Signal.MEMORY: _bounded(3.0, at_least_mib=300, at_most_mib=1536),
    Signal.NODEFS: _percent(15.0),
    Signal.NODEFS_INODES: _percent(10.0),
    Signal.IMAGEFS: _percent(20.0),
    Signal.IMAGEFS_INODES: _percent(10.0),
    Signal.PID: _percent(10.0),
}
EVICTION_SOFT_GRACE_PERIOD: Final[Mapping[Signal, float]] = {
    Signal.MEMORY: 30.0,
    Signal.NODEFS: 120.0,
    Signal.NODEFS_INODES: 120.0,
    Signal.IMAGEFS: 120.0,
    Signal.IMAGEFS_INODES: 120.0,
    Signal.PID: 30.0,
}
"""Seconds. Memory and PIDs run out in seconds, disks in minutes."""

KUBELET_EVICTION_HARD: Final[Mapping[Signal, Amount]] = {
    Signal.MEMORY: _quantity(100 * _MIB, "100Mi"),
    Signal.NODEFS: _percent(10.0),
    Signal.NODEFS_INODES: _percent(5.0),
    Signal.IMAGEFS: _percent(15.0),
    Signal.IMAGEFS_INODES: _percent(5.0),
}
"""The defaults of Kubernetes 1.36, which have no soft threshold and none for PIDs."""

KUBELET_MARGINS: Final[Mapping[tuple[bool, bool], Amount]] = {
    (True, False): _bounded(50.0, at_least_mib=100, at_most_mib=512),
    (True, True): _bounded(100.0, at_least_mib=200, at_most_mib=1024),
    (False, False): _percent(2.0),
    (False, True): _percent(5.0),
}
"""How far a threshold is kept above the kubelet's (`aboveKubelet`), by (memory signal, ours is soft and the kubelet's
hard). The margins are those between the built-in thresholds and the kubelet's defaults.

| signal | same tier | soft above hard | reason |
| --- | --- | --- | --- |
| memory | 50% of the kubelet's, 100Mi to 512Mi | 100%, 200Mi to 1Gi | a ramp of 50 MiB/s takes 2 s for 100Mi |
| disks, inodes, PIDs | 2% of the capacity | 5% of the capacity | an eviction finishes in time |
"""

KUBELET_GRACE_LEAD_S: Final = 10.0
KUBELET_GRACE_SHARE: Final = 2 / 3
"""A soft grace period ends so long before the kubelet's of the same signal (`aboveKubelet`), and is at least this share
of it: an eviction that is due may still wait 10 s for reclaimed page cache or for the kubelet's image garbage
collection, and a longer lead would evict for a spike that the kubelet lets pass."""

KUBELET_TRANSITION_PERIOD_S: Final = 300.0
"""The kubelet's evictionPressureTransitionPeriod, also if it is set to 0."""

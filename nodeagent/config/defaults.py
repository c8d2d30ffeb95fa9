"""What applies without any file: nodeagent's own thresholds, and the kubelet's for comparison.

Every signal of ours is met before a kubelet with its own defaults would meet it, so that the agent, which respects
budgets and says why, acts first and the kubelet stays the backstop. The hard memory threshold is twice the kubelet's:
its view is 3 to 9 s old, and at 50 MiB/s it lost every race against the OOM killer with 300Mi to go. The disk shares
are 2% of the capacity (1/50th) above the kubelet's, enough for an eviction to finish on a file system of usual size.
The kubelet has no default for PIDs at all, and a full PID table stops the kubelet itself.
"""

from collections.abc import Mapping
from typing import Final

from nodeagent.model import Amount, Signal


def _quantity(count: int, text: str) -> Amount:
    return Amount(count, None, text)


def _percent(percentage: float) -> Amount:
    return Amount(None, percentage, f"{percentage:g}%")


_MIB: Final = 1024 * 1024

EVICTION_HARD: Final[Mapping[Signal, Amount]] = {
    Signal.MEMORY: _quantity(200 * _MIB, "200Mi"),
    Signal.NODEFS: _percent(12.0),
    Signal.NODEFS_INODES: _percent(7.0),
    Signal.IMAGEFS: _percent(17.0),
    Signal.IMAGEFS_INODES: _percent(7.0),
    Signal.PID: _percent(5.0),
}
EVICTION_SOFT: Final[Mapping[Signal, Amount]] = {
    Signal.MEMORY: _quantity(300 * _MIB, "300Mi"),
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
"""A kubelet's own (Kubernetes 1.36); it has no soft thresholds and none for PIDs by default."""

KUBELET_TRANSITION_PERIOD_S: Final = 300.0
"""A kubelet's evictionPressureTransitionPeriod, also when it is set to 0."""

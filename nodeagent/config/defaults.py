"""Define nodeagent's built-in thresholds, and the kubelet's defaults for comparison.

Each built-in threshold is met before the kubelet's default, so that the agent, which respects PDBs, acts first and the
kubelet remains the backstop.

| signal | value | reason |
| --- | --- | --- |
| memory | twice the kubelet's | the kubelet's sample is 3 to 9 s old; at 50 MiB/s it lost every ramp with 300Mi left |
| disks | 2% of the capacity above the kubelet's | an eviction finishes in time on a file system of usual size |
| PIDs | 5% | the kubelet has no default, and a full PID table stops the kubelet itself |
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
"""The defaults of Kubernetes 1.36, which have no soft threshold and none for PIDs."""

KUBELET_TRANSITION_PERIOD_S: Final = 300.0
"""The kubelet's evictionPressureTransitionPeriod, also if it is set to 0."""

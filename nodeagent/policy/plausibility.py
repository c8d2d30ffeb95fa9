"""Decide which numbers a decision uses."""

from typing import Final

from nodeagent.config.schema import Config
from nodeagent.model import DISK_BYTE_SIGNALS, MEMORY_SIGNALS, NodeSnapshot, Signal
from nodeagent.model.units import MAX_PLAUSIBLE

MAX_CLOCK_SKEW_S: Final = 1.0
"""A time stamp further ahead of `now` is not plausible. Less can be two reads of a clock in different order."""
CAPACITY_FACTOR: Final = 1024
"""A pod's bytes on a disk are plausible up to this many times the disk: files that share blocks (`cp` on XFS and btrfs
makes such copies) or are compressed do add up to more. In the kubelet's order so is every usage, because a kubelet uses
any number. A wrong number is usually far larger."""


def plausible(value: object, *, limit: int = MAX_PLAUSIBLE) -> int | None:
    """`value` if it is a whole number from 0 to `limit`, else None.

    Anything else (negative, NaN, a float, more than the node has) is a damaged reading. It counts as unknown, because
    an unknown never makes a pod a victim.
    """
    return value if type(value) is int and 0 <= value <= limit else None


def usage_limit(snapshot: NodeSnapshot, signal: Signal, *, config: Config) -> int:
    """The largest plausible usage of one pod: the node's memory, the inodes of the file system, the PID limit; for the
    bytes of a disk and with the kubelet's order `CAPACITY_FACTOR` times that."""
    if signal in MEMORY_SIGNALS:
        capacity = snapshot.memory.total if snapshot.memory is not None else None
        capacity = capacity or snapshot.observations[Signal.MEMORY].capacity
    else:
        capacity = snapshot.observations[signal].capacity
    if type(capacity) is not int or capacity <= 0:
        return MAX_PLAUSIBLE
    if signal in DISK_BYTE_SIGNALS or config.ranking.kubelet:
        return min(MAX_PLAUSIBLE, capacity * CAPACITY_FACTOR)
    return capacity


def used(snapshot: NodeSnapshot, signal: Signal) -> int:
    """What is in use of the signal's resource; `MAX_PLAUSIBLE` if that is unknown."""
    observation = snapshot.observations[signal]
    available, capacity = plausible(observation.available), plausible(observation.capacity)
    return MAX_PLAUSIBLE if available is None or capacity is None else max(0, capacity - available)

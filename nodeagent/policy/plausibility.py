"""Decide which numbers a decision uses."""

from typing import Final

from nodeagent.config.schema import Config
from nodeagent.model import MEMORY_SIGNALS, NodeSnapshot, Signal
from nodeagent.model.units import MAX_PLAUSIBLE

MAX_CLOCK_SKEW_S: Final = 1.0
"""A time stamp further ahead of `now` is not plausible. Less can be two reads of a clock in different order."""
KUBELET_FACTOR: Final = 1024
"""Kubelet's order: a pod's usage is plausible up to this many times what the node has. A kubelet uses any number,
and files that share blocks or are compressed do add up to more than their disk. A wrong number is usually far larger.
"""


def plausible(value: object, *, limit: int = MAX_PLAUSIBLE) -> int | None:
    """`value` if it is a whole number from 0 to `limit`, else None.

    Anything else (negative, NaN, a float, more than the node has) is a damaged reading. It counts as unknown, because
    an unknown never makes a pod a victim.
    """
    return value if type(value) is int and 0 <= value <= limit else None


def usage_limit(snapshot: NodeSnapshot, signal: Signal, *, config: Config) -> int:
    """The largest plausible usage of one pod: the node's memory, the file system, the PID limit; with the kubelet's
    order `KUBELET_FACTOR` times that."""
    if signal in MEMORY_SIGNALS:
        capacity = snapshot.memory.total if snapshot.memory is not None else None
        capacity = capacity or snapshot.observations[Signal.MEMORY].capacity
    else:
        capacity = snapshot.observations[signal].capacity
    if type(capacity) is not int or capacity <= 0:
        return MAX_PLAUSIBLE
    return min(MAX_PLAUSIBLE, capacity * KUBELET_FACTOR) if config.ranking.kubelet else capacity

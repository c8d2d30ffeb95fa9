"""Which thresholds there are: the configured ones and those that follow from them."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from nodeagent.config import resolve
from nodeagent.config.schema import Config
from nodeagent.model import CONTAINERFS_SIGNALS, MEMORY_SIGNALS, DiskLayout, MemoryModel, Signal, Threshold


def effective(config: Config, layout: DiskLayout) -> tuple[Threshold, ...]:
    """The configured thresholds and the derived ones.

    Hard `memory.available` also gives `allocatableMemory.available` where node allocatable is enforced. `containerfs.*`
    cannot be configured: it follows nodefs (single and split layouts) or imagefs (dedicated imagefs); with an unknown
    layout there is none.
    """
    own = tuple(each for each in config.thresholds if each.signal not in CONTAINERFS_SIGNALS)
    return (*own, *(_allocatable(own) if config.enforce_node_allocatable else ()), *_containerfs(own, layout))


_CONTAINERFS_FOLLOWS: Final[Mapping[DiskLayout, Mapping[Signal, Signal]]] = {
    DiskLayout.SINGLE: {
        Signal.NODEFS: Signal.CONTAINERFS,
        Signal.NODEFS_INODES: Signal.CONTAINERFS_INODES,
    },
    DiskLayout.SPLIT: {
        Signal.NODEFS: Signal.CONTAINERFS,
        Signal.NODEFS_INODES: Signal.CONTAINERFS_INODES,
    },
    DiskLayout.DEDICATED_IMAGEFS: {
        Signal.IMAGEFS: Signal.CONTAINERFS,
        Signal.IMAGEFS_INODES: Signal.CONTAINERFS_INODES,
    },
    DiskLayout.UNKNOWN: {},
}


def _allocatable(thresholds: tuple[Threshold, ...]) -> tuple[Threshold, ...]:
    return tuple(
        each._replace(signal=Signal.ALLOCATABLE_MEMORY)
        for each in thresholds
        if each.signal is Signal.MEMORY and each.hard
    )


def _containerfs(thresholds: tuple[Threshold, ...], layout: DiskLayout) -> tuple[Threshold, ...]:
    follows = _CONTAINERFS_FOLLOWS[layout]
    return tuple(each._replace(signal=follows[each.signal]) for each in thresholds if each.signal in follows)


@lru_cache(maxsize=256)
def identity(threshold: Threshold) -> str:
    """The key of the threshold from one sample to the next: signal, memory model, configured grace period and value.
    Neither the capacity nor the kubelet's thresholds change it."""
    value = threshold.value
    amount = value.quantity if value.quantity is not None else f"{resolve.as_fraction(value.percentage)}*"
    if value.at_least is not None or value.at_most is not None:
        amount = f"{amount}[{value.at_least},{value.at_most}]"
    grace_s = threshold.grace_period_s if threshold.configured_grace_s is None else threshold.configured_grace_s
    return f"{stream_name(threshold)}<{amount}~{grace_s:g}"


def stream_name(threshold: Threshold) -> str:
    """The stream of samples that the threshold reads: its signal, by its memory model."""
    return stream_of(threshold.signal, threshold.memory_model)


def stream_of(signal: Signal, model: MemoryModel) -> str:
    """The name of the stream of a signal by a memory model."""
    if model is MemoryModel.WORKING_SET or signal not in MEMORY_SIGNALS:
        return signal.value
    return f"{signal.value}/{model.value}"

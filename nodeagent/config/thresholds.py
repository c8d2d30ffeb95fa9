"""Build thresholds from the kubelet's four maps and `signals`, by the kubelet's rules.

1. `0%` and `100%`, written exactly so, are no thresholds.
2. A grace period without a threshold has no effect.
3. Minimum reclaim applies to every threshold of its signal.
4. A soft threshold with `0s` is a hard threshold.
5. containerfs thresholds are left out, because they follow nodefs or imagefs.

The memory model is ours: the lower of both figures, unless `signals` or the kubelet-compatible mode has another.
"""

from nodeagent.config.schema import DROPPED, EvictionConfig, RankingConfig, Refinement, RequireStall
from nodeagent.model import (
    CONTAINERFS_SIGNALS,
    MEMORY_SIGNALS,
    Amount,
    MemoryModel,
    Signal,
    StallRequirement,
    Threshold,
)


def make_thresholds(eviction: EvictionConfig, *, memory_model: MemoryModel) -> tuple[Threshold, ...]:
    """The thresholds in the order of the signal table, hard before soft. A soft threshold without a grace period is
    left out; `rules.py` reports it. `memory_model` is that of memory.available where `signals` names none."""
    made: dict[Threshold, None] = {}
    for signal in Signal:
        if signal in CONTAINERFS_SIGNALS:
            continue
        hard = eviction.eviction_hard.get(signal)
        if hard is not None and hard.text not in DROPPED:
            made[_threshold(eviction, signal, hard, 0.0, memory_model)] = None
        soft = eviction.eviction_soft.get(signal)
        grace = eviction.eviction_soft_grace_period.get(signal)
        if soft is not None and soft.text not in DROPPED and grace is not None:
            made[_threshold(eviction, signal, soft, grace, memory_model)] = None
    return tuple(made)


def refinement(eviction: EvictionConfig, signal: Signal, *, hard: bool) -> Refinement:
    """The refinement of this signal's hard or soft threshold in `signals`."""
    general = eviction.signals.get(signal)
    if general is None:
        return Refinement()
    tier = general.hard if hard else general.soft
    return Refinement(
        memory_model=tier.memory_model or general.memory_model,
        require_stall=tier.require_stall or general.require_stall,
        exhaustion_within_s=None if hard else tier.exhaustion_within_s or general.exhaustion_within_s,
    )


def default_memory_model(ranking: RankingConfig) -> MemoryModel:
    """The memory model of a configuration that names none: the kubelet's in the kubelet-compatible mode."""
    return MemoryModel.WORKING_SET if ranking.kubelet else MemoryModel.LOWER


def _threshold(
    eviction: EvictionConfig, signal: Signal, value: Amount, grace_period_s: float, memory_model: MemoryModel
) -> Threshold:
    hard = grace_period_s == 0.0
    refined = refinement(eviction, signal, hard=hard)
    # allocatableMemory.available follows memory.available, also if it is configured itself.
    wanted = refinement(eviction, Signal.MEMORY, hard=hard).memory_model or memory_model
    return Threshold(
        signal,
        value,
        grace_period_s=grace_period_s,
        min_reclaim=eviction.eviction_minimum_reclaim.get(signal),
        memory_model=wanted if signal in MEMORY_SIGNALS else MemoryModel.WORKING_SET,
        require_stall=_stall(refined.require_stall),
        exhaustion_within_s=refined.exhaustion_within_s,
    )


def _stall(wanted: RequireStall | None) -> StallRequirement | None:
    if wanted is None:
        return None
    return StallRequirement(wanted.scope, wanted.resource, wanted.kind, wanted.window, wanted.at_least)

"""Predict the victims of the next hard memory threshold, so that the executor can cap their memory in advance.

Theory of operation. The prediction is a decision of `engine.decide` on the same snapshot with memory right below the
nearest hard threshold. The state that this decision returns is dropped.
"""

from typing import Final, NamedTuple

from nodeagent.config import resolve
from nodeagent.config.schema import Config
from nodeagent.model import MEMORY_SIGNALS, MemoryModel, NodeSnapshot, Observation, Signal, Threshold, Tier
from nodeagent.policy import candidates, effective_thresholds, engine, memory_shortage
from nodeagent.policy.state import PolicyState

_OVERSHOOT: Final = 80
"""A cgroup grows by 1/80 above `memory.high` before it is throttled: from there on by 10 ms for each 64 pages, and by
the square of the excess (mm/memcontrol.c, calculate_high_delay)."""


class PredictedVictim(NamedTuple):
    """A pod that the next hard memory threshold would evict."""

    pod_uid: str
    cgroup: str
    limit: int
    """The `memory.high` in bytes that lets the pod grow up to the threshold and hardly beyond."""


class _NearestThreshold(NamedTuple):
    """The hard memory threshold that is crossed next."""

    threshold: Threshold
    observation: Observation
    value: int
    headroom: int


def preview_victims(
    snapshot: NodeSnapshot, state: PolicyState, *, now: float, config: Config, cache: candidates.RankingCache
) -> tuple[PredictedVictim, ...]:
    """The predicted victims; none if no hard memory threshold is ahead. The arguments are those of `engine.decide`."""
    nearest = _nearest_threshold(snapshot, config)
    if nearest is None:
        return ()
    plan, _ = engine.decide(_crossed(snapshot, nearest), state, now=now, config=config, cache=cache, always_rank=False)
    victims = [victim for victim in plan.victims if victim.tier is Tier.HARD and victim.cgroup and not victim.limit]
    usages = {view.pod.uid: view.usage.memory_usage for view in snapshot.pods if view.usage is not None}
    return tuple(
        PredictedVictim(victim.pod.uid, victim.cgroup, _memory_high(used + nearest.headroom // len(victims)))
        for victim in victims
        if (used := usages.get(victim.pod.uid)) is not None
    )


def _memory_high(usage: int) -> int:
    """The `memory.high` that throttles a cgroup at this usage."""
    return usage - usage // _OVERSHOOT


def _nearest_threshold(snapshot: NodeSnapshot, config: Config) -> _NearestThreshold | None:
    ahead = []
    for threshold in effective_thresholds.effective(config, snapshot.layout):
        if not threshold.hard or threshold.signal not in MEMORY_SIGNALS:
            continue
        observation = snapshot.observe(threshold.signal, threshold.memory_model)
        value = resolve.resolve_threshold(threshold, capacity=observation.capacity)
        available = None if value is None else memory_shortage.available(snapshot, threshold, level=value)
        if available is not None and value is not None and available >= value:
            ahead.append(_NearestThreshold(threshold, observation, value, available - value))
    return min(ahead, key=lambda each: each.headroom, default=None)


def _crossed(snapshot: NodeSnapshot, nearest: _NearestThreshold) -> NodeSnapshot:
    """The snapshot with that memory right below its threshold, by every figure that the threshold uses."""
    lowered = nearest.observation._replace(available=nearest.value - 1)
    signal, model = nearest.threshold.signal, nearest.threshold.memory_model
    if model is not MemoryModel.MEM_AVAILABLE:
        snapshot = snapshot._replace(observations={**snapshot.observations, signal: lowered})
    if model is MemoryModel.WORKING_SET:
        return snapshot
    if signal is Signal.MEMORY:
        return snapshot._replace(mem_available=lowered)
    return snapshot._replace(allocatable_by_kernel=lowered)

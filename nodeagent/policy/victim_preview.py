"""Who would have to go if memory ran out the next moment: for what is to be in place before it does.

Nothing is decided here. The policy is asked what it would decide of the same snapshot if memory stood right below the
nearest hard threshold, by the same rules, and what it would remember of that is thrown away.
"""

from typing import Final, NamedTuple

from nodeagent.config.resolve import resolve
from nodeagent.config.schema import Config
from nodeagent.model import MEMORY_SIGNALS, MemoryModel, NodeSnapshot, Observation, Signal, Threshold, Tier
from nodeagent.policy import engine, thresholds
from nodeagent.policy.state import PolicyState


class PredictedVictim(NamedTuple):
    """A pod that would be a victim."""

    pod_uid: str
    cgroup: str
    limit: int
    """`memory.high` in bytes, with which it gets to the threshold and hardly beyond."""


_BEYOND: Final = 80
"""A cgroup gets 1/80 beyond `memory.high` before it has to wait: from there on 10 ms for each 64 pages, and longer by
the square of what it is beyond (mm/memcontrol.c, calculate_high_delay)."""


class _Nearest(NamedTuple):
    """The hard threshold of memory that is crossed next."""

    threshold: Threshold
    observation: Observation
    value: int
    headroom: int


def preview_victims(
    snapshot: NodeSnapshot, state: PolicyState, *, now: float, config: Config, memo: engine.RankingCache
) -> tuple[PredictedVictim, ...]:
    """The victims of that decision; none where no hard threshold of memory is ahead. The arguments are `decide`'s."""
    nearest = _nearest(snapshot, config)
    if nearest is None:
        return ()
    plan, _ = engine.decide(_below(snapshot, nearest), state, now=now, config=config, memo=memo, always_rank=False)
    hard = [victim for victim in plan.victims if victim.tier is Tier.HARD and victim.cgroup and not victim.limit]
    uses = {view.pod.uid: view.usage.memory_usage for view in snapshot.pods if view.usage is not None}
    return tuple(
        PredictedVictim(victim.pod.uid, victim.cgroup, _limit(used + nearest.headroom // len(hard)))
        for victim in hard
        if (used := uses.get(victim.pod.uid)) is not None
    )


def _limit(usage: int) -> int:
    """The `memory.high` that slows a cgroup down at this usage."""
    return usage - usage // _BEYOND


def _nearest(snapshot: NodeSnapshot, config: Config) -> _Nearest | None:
    ahead = []
    for threshold in thresholds.effective(config, snapshot.layout):
        if not threshold.hard or threshold.signal not in MEMORY_SIGNALS:
            continue
        observation = snapshot.observe(threshold.signal, threshold.memory_model)
        available, value = observation.available, resolve(threshold.value, capacity=observation.capacity)
        if available is not None and value is not None and available >= value:
            ahead.append(_Nearest(threshold, observation, value, available - value))
    return min(ahead, key=lambda each: each.headroom, default=None)


def _below(snapshot: NodeSnapshot, nearest: _Nearest) -> NodeSnapshot:
    """The snapshot with that memory right below its threshold."""
    lowered = nearest.observation._replace(available=nearest.value - 1)
    signal = nearest.threshold.signal
    if signal is Signal.MEMORY and nearest.threshold.memory_model is MemoryModel.MEM_AVAILABLE:
        return snapshot._replace(mem_available=lowered)
    return snapshot._replace(observations={**snapshot.observations, signal: lowered})

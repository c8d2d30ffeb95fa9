"""Why a shortage of the node ended in OOM kills: what the last samples were, and which pods would have been evicted.

Theory of operation. The last decision before the kill says whether a threshold was met and what kept it from evicting.
The pods that would have been evicted are the victims of `engine.decide` on the snapshot of that decision with nothing
available; the state that it returns is dropped.
"""

from collections.abc import Sequence
from typing import Final

from nodeagent.config import above_kubelet
from nodeagent.config.schema import Config, Mode, StartupConfig
from nodeagent.model import (
    MEMORY_SIGNALS,
    LostRace,
    MemoryModel,
    MemorySample,
    NodeSnapshot,
    Observation,
    OomCause,
    OomKill,
    Plan,
    RaceLoss,
    Signal,
    ThresholdVerdict,
)
from nodeagent.policy import candidates, engine
from nodeagent.policy.in_flight import EvictionStage
from nodeagent.policy.state import PolicyState

MAX_PODS: Final = 5
"""Pods that each list of a lost race names."""
MAX_REFUSALS: Final = 3
_NEWER_S: Final = 0.001


def not_running() -> LostRace:
    """The race of an agent that was not running."""
    return LostRace(RaceLoss.NOT_RUNNING, "", None, None, met=False)


def assess(
    kills: Sequence[OomKill],
    samples: Sequence[MemorySample],
    *,
    before: float,
    plan: Plan,
    snapshot: NodeSnapshot,
    state: PolicyState,
    config: Config,
    cache: candidates.RankingCache,
) -> LostRace | None:
    """The lost race of these kills; None if each of them has a limit of its own.

    Args:
        kills: of one reading.
        samples: the last node samples, oldest first.
        before: samples up to this time were taken before the first kill.
        plan: the last decision, made on `snapshot`.
        state: the policy state after that decision, and before the kills.
        config: the configuration of that decision.
        cache: as in `engine.decide`.
    """
    causes = {kill.cause for kill in kills if kill.cause.race}
    if not causes:
        return None
    signal = Signal.MEMORY if OomCause.NODE in causes else Signal.ALLOCATABLE_MEMORY
    verdict = next((each for each in plan.signals if each.signal is signal), None)
    judged = verdict.thresholds if verdict is not None else ()
    capacity = verdict.observation.capacity if verdict is not None else None
    hard = [each for each in judged if each.threshold.hard and each.value is not None]
    nearest = max(hard, key=lambda each: each.value or 0, default=None)
    last = next((each for each in reversed(samples) if each.at <= before), None)
    victims, refusals = _would_be(signal, snapshot, state, config=config, cache=cache)
    met = any(each.met for each in judged)
    planned = [each for each in state.in_flight.entries if each.signal in MEMORY_SIGNALS]
    in_flight = tuple([each.pod for each in planned if each.stage is not EvictionStage.DRY_RUN][:MAX_PODS])
    # A dry run has selected its victims before, and counts them as released.
    victims = tuple([each.pod for each in planned if each.stage is EvictionStage.DRY_RUN][:MAX_PODS]) or victims
    own = tuple([f"{each.code}: {each.message}" for each in plan.eviction_refusals][:MAX_REFUSALS])
    return LostRace(
        loss=_loss(nearest, met=met, in_flight=bool(in_flight), acts=config.mode is Mode.ENFORCE),
        threshold=above_kubelet.short_value(nearest.threshold, capacity=capacity) if nearest is not None else "",
        deficit=_deficit(signal, nearest, last, snapshot),
        before_s=None if last is None else max(0.0, before - last.at),
        met=met,
        in_flight=in_flight,
        victims=victims,
        refusals=own or ((*refusals,)[:MAX_REFUSALS] if not victims else ()),
    )


def _loss(nearest: ThresholdVerdict | None, *, met: bool, in_flight: bool, acts: bool) -> RaceLoss:
    if nearest is None:
        return RaceLoss.NO_THRESHOLD
    if not met and not in_flight:
        return RaceLoss.NOT_MET
    if not acts:
        return RaceLoss.DRY_RUN
    return RaceLoss.IN_FLIGHT if in_flight else RaceLoss.REFUSED


def _deficit(
    signal: Signal, nearest: ThresholdVerdict | None, last: MemorySample | None, snapshot: NodeSnapshot
) -> int | None:
    if nearest is None or nearest.value is None:
        return None
    if signal is Signal.ALLOCATABLE_MEMORY:
        available = snapshot.observations[signal].available
    elif last is None:
        return None
    elif nearest.threshold.memory_model is MemoryModel.WORKING_SET:
        available = last.working_set_available
    elif nearest.threshold.memory_model is MemoryModel.MEM_AVAILABLE:
        available = last.mem_available
    else:
        available = last.lowest
    return None if available is None else nearest.value - available


def _would_be(
    signal: Signal,
    snapshot: NodeSnapshot,
    state: PolicyState,
    *,
    config: Config,
    cache: candidates.RankingCache,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(pods that would be evicted with nothing available, why none would be)."""
    # A sample counts once: this one is newer.
    at = snapshot.taken_at + _NEWER_S

    def nothing(observation: Observation) -> Observation:
        return observation._replace(available=0, read_at=at)

    observations = {**snapshot.observations, signal: nothing(snapshot.observations[signal])}
    changed = snapshot._replace(taken_at=at, observations=observations)
    if signal is Signal.MEMORY:
        changed = changed._replace(mem_available=nothing(snapshot.mem_available))
    elif snapshot.allocatable_by_kernel is not None:
        changed = changed._replace(allocatable_by_kernel=nothing(snapshot.allocatable_by_kernel))
    config = config._replace(startup=StartupConfig(fresh_samples=1))
    plan, _ = engine.decide(changed, state, now=at, config=config, cache=cache, always_rank=False)
    victims = tuple([victim.pod.key for victim in plan.victims][:MAX_PODS])
    return victims, tuple([f"{each.code}: {each.message}" for each in plan.eviction_refusals])

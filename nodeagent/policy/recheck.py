"""The recheck right before acting: a victim is evicted only if a second sample confirms the decision.

Promises:

1. A victim passes only on a sample newer than the decision's.
2. It passes only if its threshold is still met (minimum reclaim included), for more than page cache, and if the same
   pod still runs and is still not protected.
"""

from nodeagent.config import resolve
from nodeagent.config.schema import Config
from nodeagent.model import SIGNAL_TABLE, Method, NodeSnapshot, Refusal, RefusalCode, Tier, Victim, units
from nodeagent.policy import (
    last_resort,
    local_storage_limits,
    memory_shortage,
    own_limits,
    preconditions,
    protection,
    streams,
)
from nodeagent.policy.in_flight import EvictionStage, InFlightEviction
from nodeagent.policy.state import PolicyState


def recheck(
    victim: Victim, snapshot: NodeSnapshot, state: PolicyState, *, now: float, config: Config
) -> Refusal | None:
    """Why a planned victim must not be evicted after all, or None."""
    entry = next((each for each in reversed(state.in_flight.entries) if each.pod_uid == victim.pod.uid), None)
    if entry is None or entry.stage is not EvictionStage.PLANNED:
        return Refusal(RefusalCode.NOT_PLANNED, f"{victim.pod.key} has no planned eviction in flight")
    if not snapshot.taken_at > entry.sample_at:
        return Refusal(RefusalCode.RECHECK_NOT_NEWER, "the second sample is not newer than the decision's")
    return (
        _blocked(victim, snapshot, now=now, config=config)
        or (None if victim.limit else _recovered(victim, snapshot, now=now, config=config))
        or _changed(victim, entry, snapshot, config=config)
    )


def _blocked(victim: Victim, snapshot: NodeSnapshot, *, now: float, config: Config) -> Refusal | None:
    if victim.method is Method.KILL:
        return preconditions.snapshot_too_old(snapshot, now=now, config=config) or (
            None if last_resort.kill_allowed(snapshot, now=now, config=config) else last_resort.API_REACHABLE
        )
    if victim.limit == own_limits.OWN_LIMIT:
        tier_block = preconditions.own_limit_blocked(snapshot)
    elif victim.limit:
        tier_block = None  # taint and eviction slot belong to a shortage of the node
    else:
        tier_block = preconditions.soft_tier_blocked(snapshot, victim.tier)
    return preconditions.blocks_all_evictions(snapshot, now=now, config=config) or tier_block


def _recovered(victim: Victim, snapshot: NodeSnapshot, *, now: float, config: Config) -> Refusal | None:
    threshold = victim.threshold
    observation = snapshot.observe(threshold.signal, threshold.memory_model)
    unusable = streams.unusable(observation, now=now, stale_after_s=config.sampling.stale_after_s)
    value = resolve.resolve_threshold(threshold, capacity=observation.capacity)
    if unusable or value is None or observation.available is None:
        return Refusal(
            RefusalCode.SIGNAL_UNKNOWN, f"{threshold.signal.value} is unknown now: {unusable or observation.reason}"
        )
    level = value + resolve.resolve_reclaim(threshold, capacity=observation.capacity)
    if observation.available < level:
        if not memory_shortage.uses_both(threshold):
            return None
        figures = snapshot.memory_figures(threshold.signal)
        return memory_shortage.page_cache_refusal(threshold.signal, figures, level=level)
    unit = SIGNAL_TABLE[threshold.signal].unit
    return Refusal(
        RefusalCode.RECOVERED,
        f"{threshold.signal.value} has recovered to {units.format_amount(observation.available, unit)}, threshold "
        f"{units.format_amount(level, unit)}",
    )


def _changed(victim: Victim, entry: InFlightEviction, snapshot: NodeSnapshot, *, config: Config) -> Refusal | None:
    pod = victim.pod
    view = next((each for each in snapshot.pods if each.pod.uid == pod.uid), None)
    if view is None:
        return Refusal(RefusalCode.POD_GONE, f"{pod.key} with UID {pod.uid} is no longer on this node")
    if view.usage is None:
        return Refusal(RefusalCode.NOT_RUNNING, f"{pod.key} has no cgroup any more")
    if view.pod.terminating and entry.buckets:
        return Refusal(RefusalCode.TERMINATING, f"{pod.key} is terminating already")
    if snapshot.own_pod_uid and pod.uid == snapshot.own_pod_uid:
        return protection.OWN_POD
    if victim.limit == own_limits.OWN_LIMIT:
        if not own_limits.near_limits((view,), at=snapshot.taken_at, config=config):
            return Refusal(RefusalCode.RECOVERED, f"{pod.key} is no longer near its {victim.limit}")
    elif victim.limit and not local_storage_limits.violations((view,), layout=snapshot.layout, at=snapshot.taken_at):
        return Refusal(RefusalCode.RECOVERED, f"{pod.key} no longer exceeds {victim.limit}")
    # The hard tier waited for the claims before it chose the victim.
    lifted = (RefusalCode.CLAIMS_UNKNOWN,) if victim.tier is Tier.HARD and not victim.limit else ()
    refusals = protection.object_refusals(view.pod, config.protection)
    return next((refusal for refusal in refusals if refusal.code not in lifted), None)

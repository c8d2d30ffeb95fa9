"""Evictions of pods near a memory limit of their own (`ownLimit`): the protections of the soft tier, limits of its own.

Promises:

1. The Eviction API with the pod's whole grace period: PodDisruptionBudgets are respected, preStop runs.
2. One pod of an owner at a time: not while another pod of it terminates or is being evicted, nor in its back-off.
3. A node that shuts down ends its pods itself; any other maintenance does not keep the kernel from killing one.
4. Its tokens and back-offs are its own. Otherwise a pod that fills its own limit on purpose could use up those that
   protect the node, and keep other pods of its owner from being evicted under pressure.
"""

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from nodeagent.config.schema import Config
from nodeagent.model import NodeSnapshot, Pod, Refusal, RefusalCode, Tier
from nodeagent.policy import backoffs, in_flight, own_limits, preconditions, protection, rate_limits
from nodeagent.policy.in_flight import EvictionStage, InFlightState
from nodeagent.policy.own_limits import NearLimit
from nodeagent.policy.rate_limits import RateLimitState

BUCKETS: Final = (rate_limits.OWN_LIMIT,)


class OwnLimitSelection(NamedTuple):
    """The pods to evict before they reach a limit of their own."""

    chosen: tuple[NearLimit, ...]
    limit_state: RateLimitState
    refusals: tuple[Refusal, ...]
    """Why other pods near a limit are not evicted."""


def by_urgency(snapshot: NodeSnapshot, config: Config) -> list[NearLimit]:
    """The pods near a limit of their own, those that reach it first first."""
    return sorted(own_limits.near_limits(snapshot.pods, at=snapshot.taken_at, config=config), key=_urgency)


def select_near_limit(
    near: Sequence[NearLimit],
    snapshot: NodeSnapshot,
    *,
    limit_state: RateLimitState,
    in_flight_state: InFlightState,
    busy: Collection[str] = (),
    now: float,
    config: Config,
) -> OwnLimitSelection:
    """Those of the pods `near` a limit to evict now, in their order, with their tokens taken: those that opted in, at
    most `relief.maxVictims` in one decision. `busy`: UIDs of pods whose limit is being raised."""
    near = [each for each in near if own_limits.opted_in(each.view.pod, config) and each.view.pod.uid not in busy]
    if not near:
        return OwnLimitSelection((), limit_state, ())
    block = (
        preconditions.blocks_all_evictions(snapshot, now=now, config=config)
        or preconditions.own_limit_blocked(snapshot)
        or backoffs.remaining(limit_state.api, now=now)
    )
    if block is not None:
        return OwnLimitSelection((), limit_state, (block,))
    leaving = {rate_limits.own_limit_owner_of(view.pod): view.pod.key for view in snapshot.pods if view.pod.terminating}
    leaving |= _evicted_owners(in_flight_state, now=now)
    entries = {entry.pod_uid: entry for entry in in_flight_state.entries}
    chosen: list[NearLimit] = []
    refusals: list[Refusal] = []
    for each in near:
        pod = each.view.pod
        if len(chosen) >= config.relief.max_victims:
            break
        refusal = _protection(each, snapshot, config=config)
        if refusal is None and pod.uid in entries:
            refusal = in_flight.already_in_flight(entries[pod.uid])
        if refusal is None and (sibling := leaving.get(rate_limits.own_limit_owner_of(pod))) is not None:
            refusal = Refusal(RefusalCode.EVICTION_IN_FLIGHT, f"{sibling} of the same owner is leaving")
        refusal = refusal or _backoff(pod, limit_state, now=now)
        if refusal is None:
            taken = rate_limits.take_tokens(limit_state, BUCKETS, now=now, limits=config.rate_limits)
            if isinstance(taken, Refusal):
                refusal = taken
            else:
                limit_state = taken
                leaving[rate_limits.own_limit_owner_of(pod)] = pod.key
                chosen.append(each)
        if refusal is not None:
            refusals.append(Refusal(refusal.code, f"{pod.key} is near its {own_limits.OWN_LIMIT}: {refusal.message}"))
    return OwnLimitSelection(tuple(chosen), limit_state, tuple(refusals))


def _evicted_owners(state: InFlightState, *, now: float) -> dict[str, str]:
    """The pods that are being evicted, for the node or for a limit, by the owner that `own_limit_owner_of` names."""
    owners: dict[str, str] = {}
    for entry in state.entries:
        if entry.limit == own_limits.OWN_LIMIT:
            owners[entry.owner] = entry.pod
        elif entry.stage is EvictionStage.DRY_RUN and now > entry.until:
            pass  # a real eviction would be over by now
        elif entry.stage is not EvictionStage.GONE:
            owners[rate_limits.own_limit_owner(entry.owner)] = entry.pod
    return owners


def _urgency(near: NearLimit) -> tuple[float, str]:
    return (near.left_s if near.left_s is not None else float("inf"), near.view.pod.key)


def _protection(near: NearLimit, snapshot: NodeSnapshot, *, config: Config) -> Refusal | None:
    """The first reason why this pod must not be evicted, or None."""
    pod, usage = near.view
    if snapshot.own_pod_uid and pod.uid == snapshot.own_pod_uid:
        return protection.OWN_POD
    context = protection.RuleContext(
        config.protection, Tier.SOFT, "memory limit", snapshot.taken_at, snapshot.wall_time
    )
    reasons = (
        *protection.object_refusals(pod, config.protection),
        *protection.momentary_refusals(pod, usage, near.own.used, context),
    )
    return reasons[0] if reasons else None


def _backoff(pod: Pod, limit_state: RateLimitState, *, now: float) -> Refusal | None:
    """A pod that was evicted for the node lately is a reason too: its owner is short of one already."""
    return (
        backoffs.remaining(limit_state.pods.get(pod.uid), now=now)
        or backoffs.remaining(limit_state.owners.get(rate_limits.own_limit_owner_of(pod)), now=now)
        or backoffs.remaining(limit_state.owners.get(rate_limits.owner_of(pod)), now=now)
    )

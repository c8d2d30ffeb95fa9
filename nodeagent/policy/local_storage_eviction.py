"""Evictions of pods that exceed their own local-storage limits; off unless `localStorageLimits` is on.

The disk usage that shows a violation may be minutes old, and the pod may have deleted files since. So it is measured
again first, and the pod is evicted if that measurement confirms it.

Each pod over a limit is evicted for itself: there is no deficit, no ranking and no relief. Protections, rate limits and
back-offs decide, pods in the order of their names, at most `relief.maxVictims` in one decision. The grace is that of
the hard tier, as in the kubelet (KUBELET-CONTRACT 6).
"""

from typing import NamedTuple

from nodeagent.config.schema import Config
from nodeagent.model import NodeSnapshot, PodView, Refusal, RefusalCode, Tier
from nodeagent.policy import backoffs, in_flight, local_storage_limits, protection, rate_limits
from nodeagent.policy.in_flight import InFlightState
from nodeagent.policy.local_storage_limits import Violation
from nodeagent.policy.rate_limits import RateLimitState


class OverLimitSelection(NamedTuple):
    """The pods to evict for a limit of their own."""

    violations: tuple[Violation, ...]
    limit_state: RateLimitState
    refusals: tuple[Refusal, ...]
    """Why other pods over a limit are not evicted."""
    recount: tuple[str, ...] = ()
    """UIDs (of cgroups) of pods that would be evicted if a new measurement confirmed it."""


def select_over_limit(
    snapshot: NodeSnapshot, *, limit_state: RateLimitState, in_flight_state: InFlightState, now: float, config: Config
) -> OverLimitSelection:
    """The pods to evict now because they exceed a limit of their own, with their tokens taken."""
    found = local_storage_limits.violations(snapshot.pods, layout=snapshot.layout, at=snapshot.taken_at)
    chosen: list[Violation] = []
    refusals: list[Refusal] = []
    recount: list[str] = []
    entries = {entry.pod_uid: entry for entry in in_flight_state.entries}
    for violation in sorted(found, key=lambda each: each.view.pod.key):
        pod = violation.view.pod
        if len(chosen) >= config.relief.max_victims:
            break
        refusal = protection_for(violation.view, violation.used, snapshot, config=config)
        if refusal is None and pod.uid in entries:
            refusal = in_flight.already_in_flight(entries[pod.uid])
        if refusal is None:
            refusal = backoffs.limit_on(backoffs.active_limits(limit_state, now=now, limits=config.rate_limits), pod)
        if refusal is None and (refusal := _needs_recount(violation.view, at=snapshot.taken_at)) is not None:
            recount.append(pod.cgroup_uid)
        if refusal is None:
            taken = rate_limits.take_tokens(
                limit_state, rate_limits.bucket_keys(pod, violation.limit), now=now, limits=config.rate_limits
            )
            if isinstance(taken, Refusal):
                refusal = taken
            else:
                limit_state = taken
                chosen.append(violation)
        if refusal is not None:
            refusals.append(Refusal(refusal.code, f"{pod.key} exceeds {violation.limit.value}: {refusal.message}"))
    return OverLimitSelection(tuple(chosen), limit_state, tuple(refusals), tuple(recount))


def _needs_recount(view: PodView, *, at: float) -> Refusal | None:
    quality = view.usage.disk_usage_quality if view.usage is not None else None
    if quality is None or not quality.periodic:
        return None
    age_s = max(0.0, at - quality.read_at)
    return Refusal(RefusalCode.WAITS_FOR_RECOUNT, f"disk usage is {age_s:.0f}s old; measuring again")


def protection_for(view: PodView, used: int, snapshot: NodeSnapshot, *, config: Config) -> Refusal | None:
    """The first reason why this pod must not be evicted for a limit of its own, or None."""
    pod, usage = view
    if snapshot.own_pod_uid and pod.uid == snapshot.own_pod_uid:
        return protection.OWN_POD
    fresh = usage is not None and 0 <= snapshot.taken_at - usage.read_at <= config.sampling.stale_after_s
    context = protection.RuleContext(
        config.protection, Tier.HARD, "local storage", snapshot.taken_at, snapshot.wall_time
    )
    reasons = (
        *protection.object_refusals(pod, config.protection),
        *protection.momentary_refusals(pod, usage, used if fresh else None, context),
    )
    return reasons[0] if reasons else None

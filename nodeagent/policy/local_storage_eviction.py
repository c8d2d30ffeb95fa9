"""Evictions of pods that exceed their own local-storage limits: a kubelet's affair, ours only where that is configured.

A pod is found over its limit by a walk that may be minutes old, and may have deleted files since. So what it holds is
counted anew first, and it goes when that number says the same.

Each pod over a limit goes for itself, so there is no deficit, no ranking and no relief to weigh: protections, budgets
and back-off decide, pods in the order of their names, at most `relief.maxVictims` in one decision. The grace is the
hard one, as the kubelet's is (KUBELET-CONTRACT 6).
"""

from typing import NamedTuple

from nodeagent.config.schema import Config
from nodeagent.model import NodeSnapshot, PodView, Refusal, RefusalCode, Tier
from nodeagent.policy import backoffs, in_flight, local_storage_limits, protection, rate_limits
from nodeagent.policy.local_storage_limits import Violation


class OverLimitSelection(NamedTuple):
    """Who goes for a limit of his own."""

    violations: tuple[Violation, ...]
    budgets: rate_limits.RateLimitState
    refusals: tuple[Refusal, ...]
    """Why others that exceed a limit stay."""
    count_anew: tuple[str, ...] = ()
    """UIDs (of cgroups) of those that would go if a walk made for them said so."""


def select_over_limit(
    snapshot: NodeSnapshot,
    *,
    budgets: rate_limits.RateLimitState,
    book: in_flight.InFlightState,
    now: float,
    config: Config,
) -> OverLimitSelection:
    """The pods that are to go now because they exceed a limit of their own, with their tokens taken."""
    found = local_storage_limits.violations(snapshot.pods, layout=snapshot.layout, at=snapshot.taken_at)
    chosen: list[Violation] = []
    refusals: list[Refusal] = []
    count_anew: list[str] = []
    under_way = {entry.pod_uid: entry for entry in book.entries}
    for violation in sorted(found, key=lambda each: each.view.pod.key):
        pod = violation.view.pod
        if len(chosen) >= config.relief.max_victims:
            break
        refusal = protection_for(violation.view, violation.used, snapshot, config=config)
        if refusal is None and pod.uid in under_way:
            refusal = in_flight.already_in_flight(under_way[pod.uid])
        if refusal is None:
            refusal = backoffs.limit_on(backoffs.active_limits(budgets, now=now, limits=config.rate_limits), pod)
        if refusal is None and (refusal := _needs_recount(violation.view, at=snapshot.taken_at)) is not None:
            count_anew.append(pod.cgroup_uid)
        if refusal is None:
            taken = rate_limits.take_tokens(
                budgets, rate_limits.bucket_keys(pod, violation.limit), now=now, limits=config.rate_limits
            )
            if isinstance(taken, Refusal):
                refusal = taken
            else:
                budgets = taken
                chosen.append(violation)
        if refusal is not None:
            refusals.append(Refusal(refusal.code, f"{pod.key} exceeds {violation.limit.value}: {refusal.message}"))
    return OverLimitSelection(tuple(chosen), budgets, tuple(refusals), tuple(count_anew))


def _needs_recount(view: PodView, *, at: float) -> Refusal | None:
    sight = view.usage.disk_usage_quality if view.usage is not None else None
    if sight is None or not sight.periodic:
        return None
    return Refusal(
        RefusalCode.WAITS_FOR_RECOUNT, f"counted {max(0.0, at - sight.read_at):.0f}s ago, and is being counted anew"
    )


def protection_for(view: PodView, used: int, snapshot: NodeSnapshot, *, config: Config) -> Refusal | None:
    """The first reason why this pod is not to be evicted for a limit of its own."""
    pod, usage = view
    if snapshot.own_pod_uid and pod.uid == snapshot.own_pod_uid:
        return protection.OWN_POD
    fresh = usage is not None and 0 <= snapshot.taken_at - usage.read_at <= config.sampling.stale_after_s
    scene = protection.RuleContext(config.protection, Tier.HARD, "local storage", snapshot.taken_at, snapshot.wall_time)
    reasons = (
        *protection.object_refusals(pod, config.protection),
        *protection.momentary_refusals(pod, usage, used if fresh else None, scene),
    )
    return reasons[0] if reasons else None

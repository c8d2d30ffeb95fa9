"""Separate the candidates from pods that are out of reach: a possible victim that cannot be evicted now.

A ranked pod that is not evicted has one of three kinds of reasons:

1. A permanent one, from what the pod is or from the configuration (static, own, DaemonSet, namespace...). The pod is no
   victim; other pods are selected as if it did not exist, unless it grows and would soon use up what they free
   (`selection`).
2. A rate limit or a back-off, or a claim that is not looked up yet: `Replacement.NEVER`. The pod is evicted later or
   not at all, and no other pod is evicted in its place.
3. A temporary one (usage unreadable, not listed by the API server, a PodDisruptionBudget, an eviction that is stuck, a
   hook that failed, an owner that lacks replicas, no node that takes it, a finished pod whose cgroup still exists):
   `Replacement.IF_SUFFICIENT`. If it holds more than other pods, they are evicted only if they alone clear the deficit
   (`selection`).

Theory of operation. `split_candidates` goes once over the ranked pods. A pod of the second kind is selected like a
candidate and dropped afterwards. A pod of the third kind whose usage is unknown holds at most what is attributed to
nothing else on the node, so a small unreadable pod never protects the pod that fills the node.
"""

import enum
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from nodeagent.config.schema import Config, OnBlocked
from nodeagent.model import (
    NodeSnapshot,
    Pod,
    PodSource,
    RankedPod,
    Refusal,
    RefusalCode,
    RefusalKind,
    ThresholdVerdict,
    Tier,
    Trend,
)
from nodeagent.policy import backoffs, in_flight, plausibility, rate_limits, relief
from nodeagent.policy.candidates import MinimumRelief, RankedPods

CLAIMS_WAIT_S: Final = 2.0
"""How long the hard tier waits for the lookup of a pod's claims. Two GETs take 10 ms. A longer wait would pass the
eviction to other pods or let the node run out; most claims are on network volumes."""
CLAIMS_WAIT_SHARE: Final = 0.25
"""The wait for claims is at most this share of the time until nothing is left."""
SOON_LISTED_S: Final = 60.0
"""A younger pod that only the host shows is about to be listed: no other pod is evicted in its place. An older one may
be an orphan that no API server will ever list."""
STUCK_AFTER_FAILURES: Final = 5
"""After more failed requests in a row (31 s of waits) a pod counts as stuck, no longer as one that is retried soon."""

_TEMPORARY: Final = frozenset(
    {
        RefusalCode.CLAIMS_UNKNOWN,
        RefusalCode.UNKNOWN_POD,
        RefusalCode.UNNAMED_POD,
        RefusalCode.FINISHED,
        RefusalCode.TERMINATING,
        RefusalCode.NOT_RUNNING,
        RefusalCode.USAGE_UNKNOWN,
        RefusalCode.TOO_YOUNG,
        RefusalCode.DISRUPTION_BUDGET,
    }
)
"""Protections that pass, or that stand for something unknown."""
_STUCK: Final = backoffs.BLOCKED | {RefusalCode.NOT_KILLED, RefusalCode.DENIED}
"""Codes of back-offs whose end another party decides: a PodDisruptionBudget, the kernel, an admission webhook."""


class Replacement(enum.Enum):
    """When other pods are evicted in the place of a pod that is out of reach."""

    NEVER = enum.auto()
    IF_SUFFICIENT = enum.auto()
    """Smaller pods, only if they alone clear the deficit."""


class OutOfReach(NamedTuple):
    """A pod that may be the right victim and cannot be evicted now."""

    pod: RankedPod
    replacement: Replacement
    refusal: Refusal
    amount: int
    """What evicting it would free; if unknown, the most that it may hold."""
    amount_known: bool
    """False also means that its rank is not reliable."""
    soon_listed: bool = False
    """The API server is about to list it: no other pod is evicted in its place, even if that were sufficient."""


class ReachContext(NamedTuple):
    """What decides which pods are in reach."""

    snapshot: NodeSnapshot
    tier: Tier
    kill: bool
    """The last resort: no request is sent, so no limit of requests applies."""
    minimum: MinimumRelief
    releasing: frozenset[str]
    """UIDs of pods whose release is pending and already subtracted from the deficit."""
    in_flight: in_flight.InFlightState
    limit_state: rate_limits.RateLimitState
    soft_refusals: Mapping[str, Refusal]
    """By pod UID: why the soft tier does not evict a pod whose hook failed, whose owner lacks replicas, or that no
    other node takes."""
    now: float
    config: Config


def end_claims_wait(
    ranked_pods: RankedPods,
    verdict: ThresholdVerdict,
    trend: Trend | None,
    *,
    minimum: MinimumRelief,
    now: float,
    config: Config,
) -> None:
    """Hard tier: remove `claims-unknown` from each pod whose claims were waited for long enough."""
    if not verdict.threshold.hard:
        return
    left_s = trend.to_exhaustion_s if trend is not None else None
    wait_s = CLAIMS_WAIT_S if left_s is None else min(CLAIMS_WAIT_S, left_s * CLAIMS_WAIT_SHARE)
    met_at = verdict.active_since if verdict.active_since is not None else now
    for ranked in list(ranked_pods.pods):
        pod = ranked.view.pod
        if not pod.claims_unknown or now - max(met_at, pod.claims_asked_at or 0.0) < wait_s:
            continue
        refusals = tuple([refusal for refusal in ranked.refusals if refusal.code is not RefusalCode.CLAIMS_UNKNOWN])
        if not refusals and ranked.refusals and (ranked.relief or 0) < minimum.relief and not config.ranking.kubelet:
            refusals = (minimum.refusal,)
        ranked_pods.set_refusals(ranked, refusals)


def split_candidates(ranked_pods: RankedPods, context: ReachContext) -> tuple[list[RankedPod], list[OutOfReach]]:
    """The candidates and the pods that are out of reach, both in eviction order.

    A pod that only a limit or an eviction in flight excludes gets that refusal in `ranked_pods`.
    """
    find_limit = _limit_finder(context)
    entries = {entry.pod_uid: entry for entry in context.in_flight.entries}
    unattributed = _unattributed(ranked_pods, context)
    candidates: list[RankedPod] = []
    out_of_reach: list[OutOfReach] = []
    for ranked in list(ranked_pods.pods):
        pod = ranked.view.pod
        limit = find_limit(pod) if find_limit is not None else None
        if limit is None and pod.uid in context.soft_refusals:
            limit = Replacement.IF_SUFFICIENT, context.soft_refusals[pod.uid]
        if pod.uid in entries:
            limit = Replacement.IF_SUFFICIENT, in_flight.already_in_flight(entries[pod.uid])
        if ranked.refusals:
            excluded = _protected_out_of_reach(ranked, limit, unattributed, ranked_pods, context)
        elif limit is not None:
            replacement, refusal = limit
            refused = ranked_pods.set_refusals(ranked, (refusal,))
            excluded = OutOfReach(refused, replacement, refusal, ranked.relief or 0, amount_known=True)
        else:
            excluded = None
            if pod.uid not in context.releasing:
                candidates.append(ranked)
        if excluded is not None and pod.uid not in context.releasing:
            out_of_reach.append(excluded)
    return candidates, out_of_reach


def _protected_out_of_reach(
    ranked: RankedPod,
    limit: tuple[Replacement, Refusal] | None,
    unattributed: int,
    ranked_pods: RankedPods,
    context: ReachContext,
) -> OutOfReach | None:
    """The protected pod as one that is out of reach; None if a protection is permanent or the pod holds too little."""
    if any(refusal.code not in _TEMPORARY for refusal in ranked.refusals):
        return None
    replacement, refusal = limit if limit is not None else (Replacement.IF_SUFFICIENT, ranked.refusals[0])
    amount = ranked.relief
    if amount is None:
        if _holds_nothing(ranked) or ranked_pods.by_writes:
            return None
        amount, replacement = (
            max(unattributed, _unbelieved_relief(ranked, ranked_pods, context)),
            Replacement.IF_SUFFICIENT,
        )
    elif any(each.code is RefusalCode.CLAIMS_UNKNOWN for each in ranked.refusals):
        replacement = Replacement.NEVER
    if amount < context.minimum.relief:
        return None
    soon_listed = ranked.view.pod.source is PodSource.HOST and _started_recently(ranked, context)
    return OutOfReach(ranked, replacement, refusal, amount, ranked.relief is not None, soon_listed)


def _unattributed(ranked_pods: RankedPods, context: ReachContext) -> int:
    """The most that a pod of unknown usage may hold; 0 if the usage of every pod is known."""
    if all(ranked.relief is not None for ranked in ranked_pods.pods):
        return 0
    limit = plausibility.usage_limit(context.snapshot, ranked_pods.signal, config=context.config)
    return min(limit, relief.unattributed_amount(ranked_pods.signal, context.snapshot))


def _unbelieved_relief(ranked: RankedPod, ranked_pods: RankedPods, context: ReachContext) -> int:
    """The relief by a usage that is too old or stands beside an implausible request: good enough as a bound."""
    signal, snapshot = ranked_pods.signal, context.snapshot
    limit = plausibility.usage_limit(snapshot, signal, config=context.config)
    swap_memory = relief.swap_memory(snapshot, config=context.config)
    freed = relief.predicted_relief(ranked.view.usage, signal, snapshot.layout, limit=limit, swap_memory=swap_memory)
    return freed or 0


def _limit_finder(context: ReachContext) -> Callable[[Pod], tuple[Replacement, Refusal] | None] | None:
    """A function from a pod to the limit that excludes it now; None if no limit is active."""
    now, limit_state = context.now, context.limit_state
    if context.kill:
        return lambda pod: _limit_on_kill(pod, limit_state, now=now)
    deletes = context.tier is Tier.HARD and context.config.escalation.on_blocked is OnBlocked.DELETE
    ignored = backoffs.BLOCKED if deletes else frozenset()
    active = backoffs.active_limits(limit_state, now=now, limits=context.config.rate_limits, ignored=ignored)
    if not backoffs.any_limit(active):
        return None

    def find_limit(pod: Pod) -> tuple[Replacement, Refusal] | None:
        refusal = backoffs.limit_on(active, pod)
        if refusal is None:
            return None
        backoff = limit_state.pods.get(pod.uid) if pod.uid in active.pods else None
        stuck = backoff is not None and is_stuck(backoff)
        return (Replacement.IF_SUFFICIENT if stuck else Replacement.NEVER), refusal

    return find_limit


def lasting_protection(ranked: RankedPod) -> Refusal | None:
    """The protection of the pod by what it is or by the configuration; None if it has none or one that passes."""
    lasting = [refusal for refusal in ranked.refusals if refusal.code not in _TEMPORARY]
    return next((refusal for refusal in lasting if refusal.code.kind is RefusalKind.PROTECTION), None)


def is_stuck(backoff: rate_limits.Backoff) -> bool:
    """Whether the end of a pod's back-off is not to be waited for."""
    return backoff.code in _STUCK or backoff.times > STUCK_AFTER_FAILURES


def _limit_on_kill(
    pod: Pod, limit_state: rate_limits.RateLimitState, *, now: float
) -> tuple[Replacement, Refusal] | None:
    """What excludes a pod from being killed. Back-offs and rate limits of requests do not."""
    backoff = limit_state.pods.get(pod.uid)
    refusal = None
    if backoff is not None and backoff.code is RefusalCode.NOT_KILLED:
        refusal = backoffs.remaining(backoff, now=now)
    if refusal is None and pod.source is not PodSource.API:
        refusal = Refusal(RefusalCode.UNKNOWN_POD, "the API server never listed this pod")
    return (Replacement.IF_SUFFICIENT, refusal) if refusal is not None else None


def _started_recently(ranked: RankedPod, context: ReachContext) -> bool:
    usage = ranked.view.usage
    started_at = usage.started_at if usage is not None else None
    return started_at is not None and context.snapshot.taken_at - started_at < SOON_LISTED_S


def _holds_nothing(ranked: RankedPod) -> bool:
    """True for a pod without a cgroup that is finished, or of which the kubelet reports no running container."""
    view = ranked.view
    return view.usage is None and (view.pod.finished or not any(each.running for each in view.pod.containers))

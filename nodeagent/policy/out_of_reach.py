"""Which ranked pods are out of reach for now, so that no other pod is evicted in the place of one of them.

Three kinds of reasons keep a ranked pod from being evicted:

1. What the pod is, or what the administrator configured (static, own, DaemonSet, namespace...): it is no victim at all,
   and others are chosen as if it were not there.
2. A limit of ours that passes (owner back-off, an empty bucket, a request that failed lately) or a claim that is not
   looked up yet: `WAITS`. It is evicted later or not at all. Nobody is evicted in its place.
3. A reason of the moment (usage unreadable, known to the host alone, a PodDisruptionBudget, an eviction that is stuck,
   a finished pod whose cgroup is not removed yet): `LARGER`. Where it holds more than the others, they are evicted only
   if they alone cure the deficit (`choice`).

Theory of operation. `sort_out` goes once over a lineup. A pod of the second kind is selected like any candidate and
dropped after that. A pod of the third kind whose usage is not known may hold whatever is attributed to nothing else on
the node, and no more than that: a tiny unreadable pod never shields the pod that fills the node.
"""

import enum
from collections.abc import Callable
from typing import Final, NamedTuple

from nodeagent.config.schema import Config, OnBlocked
from nodeagent.model import (
    NodeSnapshot,
    Pod,
    PodSource,
    RankedPod,
    Refusal,
    RefusalCode,
    ThresholdVerdict,
    Tier,
    Trend,
)
from nodeagent.policy import in_flight, rate_limits, relief
from nodeagent.policy.candidates import MinimumRelief, RankedPods

CLAIMS_WAIT_S: Final = 2.0
"""How long the hard tier waits until the claims of a pod are looked up. Two GETs take 10 ms. A server that needs longer
or refuses does not turn the eviction to others: most claims are on network volumes, and the node runs out meanwhile.
"""
CLAIMS_SHARE: Final = 0.25
"""Of the time until nothing is left: no longer than that is waited for claims."""
UNLISTED_S: Final = 60.0
"""A pod that is younger than this and known to the host alone is about to be listed: nobody is evicted in its place. An
older one may be an orphan that no API server will ever list."""
TRANSIENT_FAILURES: Final = 5
"""After so many failed requests in a row (31 s of waits) a pod counts as stuck, and not as one that is asked for again
at once."""

_MOMENTARY: Final = frozenset(
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
"""Codes of protections that pass, or that stand for something that is not known."""
_STUCK: Final = rate_limits.BLOCKED | {RefusalCode.NOT_KILLED}
"""Codes of back-offs of a pod that somebody else decides about: a disruption budget, the kernel."""


class Rule(enum.StrEnum):
    WAITS = "waits"
    """Nobody is evicted in its place."""
    LARGER = "larger"
    """Somebody smaller is evicted in its place only if that alone cures the deficit."""


class OutOfReach(NamedTuple):
    """A pod that may be the right victim and cannot be evicted now."""

    pod: RankedPod
    rule: Rule
    refusal: Refusal
    amount: int
    """What evicting it would free; where that is not known, the most that it may hold."""
    known: bool
    """Whether the amount, and so the rank, is known."""
    listed_soon: bool = False
    """Nobody smaller is evicted in its place, even if that would cure: the API server is about to list it."""


class Facts(NamedTuple):
    """What pods are sorted by, in one decision."""

    snapshot: NodeSnapshot
    tier: Tier
    kill: bool
    """The last resort: no request is sent, so no limit of requests holds."""
    minimum: MinimumRelief
    coming: frozenset[str]
    """UIDs of pods whose release is pending: the deficit is what is missing beside them."""
    in_flight: in_flight.InFlightState
    budgets: rate_limits.RateLimitState
    now: float
    config: Config


def lift_claims(
    lineup: RankedPods,
    verdict: ThresholdVerdict,
    trend: Trend | None,
    *,
    minimum: MinimumRelief,
    now: float,
    config: Config,
) -> None:
    """Take `claims-unknown` from the pods of which the hard tier has waited long enough for the claims."""
    if not verdict.threshold.hard:
        return
    left_s = trend.to_exhaustion_s if trend is not None else None
    wait_s = CLAIMS_WAIT_S if left_s is None else min(CLAIMS_WAIT_S, left_s * CLAIMS_SHARE)
    met_at = verdict.active_since if verdict.active_since is not None else now
    for index, ranked in enumerate(lineup.pods):
        pod = ranked.view.pod
        if not pod.claims_unknown or now - max(met_at, pod.claims_asked_at or 0.0) < wait_s:
            continue
        refusals = tuple([refusal for refusal in ranked.refusals if refusal.code is not RefusalCode.CLAIMS_UNKNOWN])
        if not refusals and ranked.refusals and (ranked.relief or 0) < minimum.relief and not config.ranking.kubelet:
            refusals = (minimum.refusal,)
        lineup.pods[index] = ranked._replace(refusals=refusals)


def sort_out(lineup: RankedPods, facts: Facts) -> tuple[list[RankedPod], list[OutOfReach]]:
    """The candidates, and the pods that are out of reach, both in eviction order. The lineup gets the refusals."""
    limit_on = _limits(facts)
    under_way = {entry.pod_uid: entry for entry in facts.in_flight.entries}
    candidates: list[RankedPod] = []
    beyond: list[OutOfReach] = []
    most, unattributed = in_flight.usage_limit(facts.snapshot, lineup.signal, config=facts.config), None
    for index, ranked in enumerate(lineup.pods):
        pod, refusals = ranked.view.pod, ranked.refusals
        if not (refusals or under_way or limit_on or facts.coming):
            candidates.append(ranked)
            continue
        rule, refusal = Rule.LARGER, None
        if pod.uid in under_way:
            refusal = in_flight.already_in_flight(under_way[pod.uid])
        elif limit_on is not None and (held := limit_on(pod)) is not None:
            rule, refusal = held
        if refusal is not None and not refusals:
            ranked = lineup.pods[index] = ranked._replace(refusals=(refusal,))  # noqa: PLW2901
        if pod.uid in facts.coming or any(each.code not in _MOMENTARY for each in refusals):
            continue
        if not refusals:
            if refusal is None:
                candidates.append(ranked)
            else:
                beyond.append(OutOfReach(ranked, rule, refusal, ranked.relief or 0, known=True))
            continue
        amount, known = ranked.relief, ranked.relief is not None
        if amount is None:
            if _holds_nothing(ranked) or lineup.by_writes:
                continue
            if unattributed is None:
                unattributed = min(most, relief.unattributed(lineup.signal, facts.snapshot))
            # What a usage says that is too old, or that may not be compared with an impossible request, is a hint.
            last = relief.predicted_relief(ranked.view.usage, lineup.signal, facts.snapshot.layout, limit=most) or 0
            amount, rule = max(unattributed, last), Rule.LARGER
        elif any(each.code is RefusalCode.CLAIMS_UNKNOWN for each in refusals):
            rule = Rule.WAITS
        if amount >= facts.minimum.relief:
            soon = pod.source is PodSource.HOST and _young(ranked, facts)
            beyond.append(OutOfReach(ranked, rule, refusal or refusals[0], amount, known, soon))
    return candidates, beyond


def _limits(facts: Facts) -> Callable[[Pod], tuple[Rule, Refusal] | None] | None:
    """What tells whether a limit of ours holds a pod, and what that means for the others; None where none does."""
    now, budgets, escalation = facts.now, facts.budgets, facts.config.escalation
    if facts.kill:
        return lambda pod: _limit_on_kill(pod, budgets, now=now)
    insists = facts.tier is Tier.HARD and escalation.on_blocked is OnBlocked.DELETE
    ignored = rate_limits.BLOCKED if insists else frozenset()
    holds = rate_limits.holds(budgets, now=now, limits=facts.config.rate_limits, ignored=ignored)
    if not rate_limits.holds_any(holds):
        return None

    def limit_on(pod: Pod) -> tuple[Rule, Refusal] | None:
        refusal = rate_limits.limit_on(holds, pod)
        if refusal is None:
            return None
        wait = budgets.pods.get(pod.uid) if pod.uid in holds.pods else None
        stuck = wait is not None and (wait.code in _STUCK or wait.times > TRANSIENT_FAILURES)
        return (Rule.LARGER if stuck else Rule.WAITS), refusal

    return limit_on


def _limit_on_kill(pod: Pod, budgets: rate_limits.RateLimitState, *, now: float) -> tuple[Rule, Refusal] | None:
    """What keeps a pod from being killed. Back-offs and buckets of requests that nobody answered do not."""
    wait = budgets.pods.get(pod.uid)
    refusal = (
        rate_limits.waiting(wait, now=now) if wait is not None and wait.code in _STUCK - rate_limits.BLOCKED else None
    )
    if refusal is None and pod.source is not PodSource.API:
        refusal = Refusal(RefusalCode.UNKNOWN_POD, "the API server never listed this pod")
    return (Rule.LARGER, refusal) if refusal is not None else None


def _young(ranked: RankedPod, facts: Facts) -> bool:
    usage = ranked.view.usage
    started_at = usage.started_at if usage is not None else None
    return started_at is not None and facts.snapshot.taken_at - started_at < UNLISTED_S


def _holds_nothing(ranked: RankedPod) -> bool:
    """A pod without a cgroup that is finished, or none of whose containers the kubelet has reported as running."""
    view = ranked.view
    return view.usage is None and (view.pod.finished or not any(each.running for each in view.pod.containers))

"""Between a decision and the next: the check right before acting, and what became of the requests.

Promises:

1. `recheck` lets an eviction pass only on a sample newer than the one that the decision saw.
2. `settle` takes every outcome in once: the same one again changes nothing.
3. Nothing is spent twice, and what is not proven to have failed stays spent.
"""

from collections.abc import Iterable
from typing import Final

from nodeagent.config.resolve import resolve
from nodeagent.config.schema import Config
from nodeagent.model import (
    SIGNAL_TABLE,
    Method,
    NodeSnapshot,
    Outcome,
    OutcomeKind,
    ReclaimOutcome,
    Refusal,
    RefusalCode,
    Tier,
    Victim,
    units,
)
from nodeagent.policy import in_flight, last_resort, local_storage_limits, protection, rate_limits, reclaim, thresholds
from nodeagent.policy.in_flight import EvictionStage, InFlightEviction
from nodeagent.policy.plausibility import MAX_CLOCK_SKEW_S
from nodeagent.policy.state import PolicyState

# --- right before acting ---------------------------------------------------------------------------------------------


def recheck(
    victim: Victim, snapshot: NodeSnapshot, state: PolicyState, *, now: float, config: Config
) -> Refusal | None:
    """Why a planned victim must not be evicted after all, by a sample newer than the one that it was chosen by.

    None: the threshold is still met (minimum reclaim included), and the same pod still runs and is still no protected
    one.
    """
    entry = next((each for each in reversed(state.in_flight.entries) if each.pod_uid == victim.pod.uid), None)
    if entry is None or entry.stage is not EvictionStage.PLANNED:
        return Refusal(RefusalCode.NOT_PLANNED, f"{victim.pod.key} is not in the ledger as planned")
    if not snapshot.taken_at > entry.sample_at:
        return Refusal(RefusalCode.RECHECK_NOT_NEWER, "the sample is not newer than the one of the decision")
    return (
        _no_ground(victim, snapshot, now=now, config=config)
        or (None if victim.limit else _recovered(victim, snapshot, now=now, config=config))
        or _changed(victim, entry, snapshot, config=config)
    )


def _no_ground(victim: Victim, snapshot: NodeSnapshot, *, now: float, config: Config) -> Refusal | None:
    if victim.method is Method.KILL:
        still = last_resort.kill_allowed(snapshot, now=now, config=config)
        return snapshot_too_old(snapshot, now=now, config=config) or (None if still else last_resort.API_IS_BACK)
    return blocks_all_evictions(snapshot, now=now, config=config) or soft_tier_blocked(snapshot, victim.tier)


def _recovered(victim: Victim, snapshot: NodeSnapshot, *, now: float, config: Config) -> Refusal | None:
    threshold = victim.threshold
    observation = snapshot.observe(threshold.signal, threshold.memory_model)
    unusable = thresholds.unusable(observation, now=now, stale_after_s=config.sampling.stale_after_s)
    value = resolve(threshold.value, capacity=observation.capacity)
    if unusable or value is None or observation.available is None:
        return Refusal(
            RefusalCode.SIGNAL_UNKNOWN,
            f"{threshold.signal.value} is not known any more: {unusable or observation.reason}",
        )
    reclaim = resolve(threshold.min_reclaim, capacity=observation.capacity) if threshold.min_reclaim else 0
    level = value + (reclaim or 0)
    if observation.available < level:
        return None
    unit = SIGNAL_TABLE[threshold.signal].unit
    return Refusal(
        RefusalCode.RECOVERED,
        f"{threshold.signal.value} is {units.format_amount(observation.available, unit)} again, at least "
        f"{units.format_amount(level, unit)}",
    )


def _changed(victim: Victim, entry: InFlightEviction, snapshot: NodeSnapshot, *, config: Config) -> Refusal | None:
    pod = victim.pod
    view = next((each for each in snapshot.pods if each.pod.uid == pod.uid), None)
    if view is None:
        return Refusal(RefusalCode.POD_GONE, f"{pod.key} with UID {pod.uid} is not on this node any more")
    if view.usage is None:
        return Refusal(RefusalCode.NOT_RUNNING, f"{pod.key} has no cgroup any more")
    if view.pod.terminating and entry.buckets:
        return Refusal(RefusalCode.TERMINATING, f"{pod.key} is terminating already")
    if snapshot.own_pod_uid and pod.uid == snapshot.own_pod_uid:
        return protection.OWN_POD
    if victim.limit and not local_storage_limits.violations((view,), layout=snapshot.layout, at=snapshot.taken_at):
        return Refusal(RefusalCode.RECOVERED, f"{pod.key} does not exceed {victim.limit} any more")
    # The hard tier has waited for the claims before it chose.
    lifted = (RefusalCode.CLAIMS_UNKNOWN,) if victim.tier is Tier.HARD and not victim.limit else ()
    standing = protection.object_refusals(view.pod, config.protection)
    return next((refusal for refusal in standing if refusal.code not in lifted), None)


def blocks_all_evictions(snapshot: NodeSnapshot, *, now: float, config: Config) -> Refusal | None:
    """Why this snapshot is no ground for evicting anybody, or None."""
    if (old := snapshot_too_old(snapshot, now=now, config=config)) is not None:
        return old
    if snapshot.pods_synced_at is None:
        return Refusal(RefusalCode.PODS_NEVER_SYNCED, "the API has not told which pods run here")
    age_s = now - snapshot.pods_synced_at
    if not -MAX_CLOCK_SKEW_S <= age_s <= config.cluster.pods_max_age_s:
        limit_s = config.cluster.pods_max_age_s
        return Refusal(RefusalCode.PODS_STALE, f"the API's view of the pods is {age_s:.1f}s old, at most {limit_s:g}s")
    return None


def snapshot_too_old(snapshot: NodeSnapshot, *, now: float, config: Config) -> Refusal | None:
    """Why the node's own numbers are too old for anything, or None."""
    age_s = now - snapshot.taken_at
    if -MAX_CLOCK_SKEW_S <= age_s <= config.sampling.stale_after_s:
        return None
    return Refusal(
        RefusalCode.SNAPSHOT_STALE, f"the snapshot is {age_s:.1f}s old, at most {config.sampling.stale_after_s:g}s"
    )


def soft_tier_blocked(snapshot: NodeSnapshot, tier: Tier) -> Refusal | None:
    """What the soft tier waits for, or None. The hard tier waits for nothing."""
    return None if tier is Tier.HARD else snapshot.soft_tier_blocked_by


# --- how it went -----------------------------------------------------------------------------------------------------


_NOTHING_EVICTED: Final = frozenset(
    {
        OutcomeKind.BLOCKED_BY_PDB,
        OutcomeKind.TOO_MANY_REQUESTS,
        OutcomeKind.PDB_CONFLICT,
        OutcomeKind.NOT_FOUND,
        OutcomeKind.CONFLICT,
        OutcomeKind.INVALID,
        OutcomeKind.FORBIDDEN,
        OutcomeKind.UNAUTHORIZED,
        OutcomeKind.UNREACHABLE,
        OutcomeKind.RECHECK_REFUSED,
        OutcomeKind.NOT_KILLED,
    }
)
"""Outcomes that prove that this request evicted nothing: tokens come back. A time-out and a server error prove nothing:
the request may have been carried out. A dry run keeps its tokens, so that a rehearsal shows the pace of the real thing.
"""

_NO_API: Final = frozenset(
    {
        OutcomeKind.TOO_MANY_REQUESTS,
        OutcomeKind.FORBIDDEN,
        OutcomeKind.UNAUTHORIZED,
        OutcomeKind.SERVER_ERROR,
        OutcomeKind.TIMED_OUT,
        OutcomeKind.UNREACHABLE,
    }
)
"""Outcomes that the next pod would meet as well: nothing is sent for a while."""

_CODES: Final = {
    OutcomeKind.BLOCKED_BY_PDB: RefusalCode.BLOCKED_BY_PDB,
    OutcomeKind.TOO_MANY_REQUESTS: RefusalCode.TOO_MANY_REQUESTS,
    OutcomeKind.PDB_CONFLICT: RefusalCode.PDB_CONFLICT,
    OutcomeKind.NOT_FOUND: RefusalCode.NOT_FOUND,
    OutcomeKind.CONFLICT: RefusalCode.CONFLICT,
    OutcomeKind.INVALID: RefusalCode.INVALID,
    OutcomeKind.FORBIDDEN: RefusalCode.FORBIDDEN,
    OutcomeKind.UNAUTHORIZED: RefusalCode.UNAUTHORIZED,
    OutcomeKind.SERVER_ERROR: RefusalCode.SERVER_ERROR,
    OutcomeKind.TIMED_OUT: RefusalCode.TIMED_OUT,
    OutcomeKind.UNREACHABLE: RefusalCode.UNREACHABLE,
    OutcomeKind.NOT_KILLED: RefusalCode.NOT_KILLED,
}
"""The refusal of a back-off that an outcome starts."""

_NOT_THE_API: Final = frozenset(
    {OutcomeKind.DRY_RUN, OutcomeKind.RECHECK_REFUSED, OutcomeKind.KILLED, OutcomeKind.NOT_KILLED}
)
"""Outcomes that say nothing about the API."""

_POD_WAITS: Final = {
    OutcomeKind.BLOCKED_BY_PDB: rate_limits.POD_BACKOFF_S,
    OutcomeKind.PDB_CONFLICT: rate_limits.POD_BACKOFF_MAX_S,
    OutcomeKind.NOT_FOUND: rate_limits.POD_RETRY_S,
    OutcomeKind.CONFLICT: rate_limits.POD_RETRY_S,
    OutcomeKind.INVALID: rate_limits.POD_RETRY_S,
    OutcomeKind.NOT_KILLED: rate_limits.POD_BACKOFF_MAX_S,
}
"""Outcomes that are this pod's alone, and how long it is left alone at first when the server does not say; doubled with
each repetition. Two budgets on one pod do not heal by themselves. A server that is behind, or a proxy in trouble, says
404, 409 or 400 of a pod that is still there: it is asked again soon, and nobody is evicted in its place (`reach`)."""

GONE_S: Final = 1.0
"""How long a pod that the API server does not know any more is expected to vanish from the node. If it does, what it
held counts as pending release; if not, it is asked for again."""


def apply_outcome(
    state: PolicyState, outcomes: Outcome | Iterable[Outcome], *, now: float, config: Config
) -> PolicyState:
    """Take in how requests ended. An outcome that was taken in before, or that belongs to no entry, changes nothing."""
    each_of: Iterable[Outcome] = (outcomes,) if isinstance(outcomes, Outcome) else outcomes
    for outcome in each_of:
        state = _settle_one(state, outcome, now=now, config=config)
    return state


def apply_reclaim(state: PolicyState, outcome: ReclaimOutcome) -> PolicyState:
    """Take in how an action ended that was tried before evicting."""
    return state._replace(reclaims=reclaim.settle(state.reclaims, outcome))


def _settle_one(state: PolicyState, outcome: Outcome, *, now: float, config: Config) -> PolicyState:
    entry = in_flight.entry_for(state.in_flight, plan_id=outcome.plan_id, pod_uid=outcome.pod_uid)
    if entry is None or entry.stage not in (EvictionStage.PLANNED, EvictionStage.UNCERTAIN):
        return state
    kind, budgets = outcome.kind, state.rate_limits
    if kind in _NOTHING_EVICTED and entry.stage is EvictionStage.PLANNED:
        budgets = rate_limits.return_tokens(budgets, entry.buckets, now=now, limits=config.rate_limits)
        budgets = rate_limits.undo_in_place(budgets, SIGNAL_TABLE[entry.signal].resource, entry.plan_id)
    if kind in _NO_API:
        wait_s = outcome.retry_after_s
        if wait_s is None and kind is OutcomeKind.FORBIDDEN:
            wait_s = (
                rate_limits.API_BACKOFF_MAX_S
            )  # rights are not mended within seconds; a rotated token arrives in them
        budgets = rate_limits.back_off_api(
            budgets, entry.plan_id, now=now, code=_CODES[kind], why=_why(entry, outcome), retry_after_s=wait_s
        )
    elif kind not in _NOT_THE_API:
        budgets = rate_limits.api_answered(budgets)
    if kind in _POD_WAITS:
        budgets = rate_limits.back_off_pod(
            budgets,
            entry.pod_uid,
            now=now,
            code=_CODES[kind],
            why=_why(entry, outcome),
            retry_after_s=outcome.retry_after_s,
            first_s=_POD_WAITS[kind],
        )
    if kind in (OutcomeKind.ACCEPTED, OutcomeKind.DRY_RUN) and entry.buckets:
        budgets = rate_limits.back_off_owner(budgets, entry.owner, now=now, limits=config.rate_limits)
    return state._replace(
        in_flight=in_flight.replace(state.in_flight, entry, by=_after(entry, kind, now=now)), rate_limits=budgets
    )


def _after(entry: InFlightEviction, kind: OutcomeKind, *, now: float) -> InFlightEviction | None:
    """What becomes of the entry; None when nothing is under way for it."""
    until = now + entry.grace_s + in_flight.SLACK_S
    if kind is OutcomeKind.ACCEPTED:
        return entry._replace(stage=EvictionStage.ACCEPTED, until=until)
    if kind is OutcomeKind.KILLED:
        return entry._replace(stage=EvictionStage.KILLED, until=now + in_flight.KILLED_S)
    if kind in (OutcomeKind.TIMED_OUT, OutcomeKind.SERVER_ERROR):
        return entry._replace(stage=EvictionStage.UNCERTAIN, until=until)
    if kind is OutcomeKind.DRY_RUN:
        return entry._replace(stage=EvictionStage.DRY_RUN, until=until)
    if kind is OutcomeKind.NOT_FOUND:
        return entry._replace(stage=EvictionStage.UNLISTED, until=now + GONE_S)
    return None


def _why(entry: InFlightEviction, outcome: Outcome) -> str:
    status = f" (HTTP {outcome.http_status})" if outcome.http_status is not None else ""
    return f"evicting {entry.pod}: {outcome.kind.value}{status}: {outcome.message}"

"""What the outcome of a request changes: its event, its tokens and its back-offs, one row for each kind.

Promises:

1. An outcome is applied once: the same outcome again changes nothing.
2. A token returns only for an outcome that proves that nothing was evicted.
"""

import enum
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from nodeagent.config.schema import Config
from nodeagent.model import SIGNAL_TABLE, HookOutcome, Outcome, OutcomeKind, ReclaimOutcome, RefusalCode, ResizeOutcome
from nodeagent.policy import backoffs, eviction_hook, eviction_request, in_flight, rate_limits, reclaim, resizes
from nodeagent.policy.in_flight import EvictionEvent, EvictionStage, InFlightEviction
from nodeagent.policy.state import PolicyState


class ApiEffect(enum.StrEnum):
    """What an outcome shows of the API server."""

    NOTHING = "nothing"
    ANSWERED = "answered"
    """Its back-off ends."""
    BACK_OFF = "back-off"
    """The next pod would meet the same failure: nothing is sent for a while."""


class OutcomeRule(NamedTuple):
    """One row."""

    event: EvictionEvent
    api: ApiEffect
    code: RefusalCode | None = None
    """Of the back-off that it starts."""
    pod_backoff_s: float | None = None
    """The first back-off of the pod, unless the server sets one; doubled with each repetition. None: no back-off."""
    """The back-off of the API, unless the server sets one. None: the usual, doubling one."""
    owner_backoff: bool = False
    """The other pods of its owner are not evicted for a while."""

    @property
    def returns_tokens(self) -> bool:
        """Nothing was evicted. After a timeout or a server error this is not proven. A dry run keeps its tokens, so
        that it shows the pace of real evictions."""
        return self.event in (EvictionEvent.NOT_EVICTED, EvictionEvent.NOT_LISTED, EvictionEvent.REQUEST_ENDED)


_NOT_EVICTED: Final = EvictionEvent.NOT_EVICTED

OUTCOME_RULES: Final[Mapping[OutcomeKind, OutcomeRule]] = {
    OutcomeKind.ACCEPTED: OutcomeRule(EvictionEvent.ACCEPTED_BY_API, ApiEffect.ANSWERED, owner_backoff=True),
    OutcomeKind.DRY_RUN: OutcomeRule(EvictionEvent.NOT_SENT, ApiEffect.NOTHING, owner_backoff=True),
    OutcomeKind.BLOCKED_BY_PDB: OutcomeRule(
        _NOT_EVICTED, ApiEffect.ANSWERED, RefusalCode.BLOCKED_BY_PDB, pod_backoff_s=backoffs.POD_BACKOFF_S
    ),
    OutcomeKind.TOO_MANY_REQUESTS: OutcomeRule(_NOT_EVICTED, ApiEffect.BACK_OFF, RefusalCode.TOO_MANY_REQUESTS),
    # Two PDBs on one pod need an administrator.
    OutcomeKind.PDB_CONFLICT: OutcomeRule(
        _NOT_EVICTED, ApiEffect.ANSWERED, RefusalCode.PDB_CONFLICT, pod_backoff_s=backoffs.POD_BACKOFF_MAX_S
    ),
    # A lagging server or a failing proxy answers 404, 409 or 400 for a pod that still runs. It is requested again soon,
    # and no other pod is evicted in its place (`out_of_reach`).
    OutcomeKind.NOT_FOUND: OutcomeRule(
        EvictionEvent.NOT_LISTED, ApiEffect.ANSWERED, RefusalCode.NOT_FOUND, pod_backoff_s=backoffs.POD_RETRY_S
    ),
    OutcomeKind.CONFLICT: OutcomeRule(
        _NOT_EVICTED, ApiEffect.ANSWERED, RefusalCode.CONFLICT, pod_backoff_s=backoffs.POD_RETRY_S
    ),
    OutcomeKind.INVALID: OutcomeRule(
        _NOT_EVICTED, ApiEffect.ANSWERED, RefusalCode.INVALID, pod_backoff_s=backoffs.POD_RETRY_S
    ),
    # Whatever its status: one for another pod may pass.
    OutcomeKind.DENIED: OutcomeRule(
        _NOT_EVICTED, ApiEffect.ANSWERED, RefusalCode.DENIED, pod_backoff_s=backoffs.POD_RETRY_S
    ),
    # Until a restarted API server has read its roles, it answers 403 to everything; a rotated token arrives within
    # seconds as well.
    OutcomeKind.FORBIDDEN: OutcomeRule(_NOT_EVICTED, ApiEffect.BACK_OFF, RefusalCode.FORBIDDEN),
    OutcomeKind.UNAUTHORIZED: OutcomeRule(_NOT_EVICTED, ApiEffect.BACK_OFF, RefusalCode.UNAUTHORIZED),
    OutcomeKind.SERVER_ERROR: OutcomeRule(EvictionEvent.NO_ANSWER, ApiEffect.BACK_OFF, RefusalCode.SERVER_ERROR),
    OutcomeKind.TIMED_OUT: OutcomeRule(EvictionEvent.NO_ANSWER, ApiEffect.BACK_OFF, RefusalCode.TIMED_OUT),
    OutcomeKind.UNREACHABLE: OutcomeRule(_NOT_EVICTED, ApiEffect.BACK_OFF, RefusalCode.UNREACHABLE),
    OutcomeKind.RECHECK_REFUSED: OutcomeRule(_NOT_EVICTED, ApiEffect.NOTHING),
    OutcomeKind.KILLED: OutcomeRule(EvictionEvent.KILLED, ApiEffect.NOTHING),
    OutcomeKind.NOT_KILLED: OutcomeRule(
        _NOT_EVICTED, ApiEffect.NOTHING, RefusalCode.NOT_KILLED, pod_backoff_s=backoffs.POD_BACKOFF_MAX_S
    ),
    # No outcome of an EvictionRequest backs off the API: the hard tier would wait for its webhooks.
    OutcomeKind.REQUESTED: OutcomeRule(EvictionEvent.REQUESTED, ApiEffect.NOTHING),
    OutcomeKind.NOT_REQUESTED: OutcomeRule(_NOT_EVICTED, ApiEffect.NOTHING),
    OutcomeKind.REQUEST_UNCERTAIN: OutcomeRule(EvictionEvent.NO_ANSWER, ApiEffect.NOTHING),
    # The tokens return, because the eviction that follows takes them again.
    OutcomeKind.REQUEST_FAILED: OutcomeRule(EvictionEvent.REQUEST_ENDED, ApiEffect.NOTHING),
    # Of a request whose eviction in flight has ended before: it changes `eviction_request` alone.
    OutcomeKind.REQUEST_WITHDRAWN: OutcomeRule(EvictionEvent.REQUEST_ENDED, ApiEffect.NOTHING),
    # For reports alone: the snapshot that shows it has changed the state before.
    OutcomeKind.EVICTED_BY_OTHERS: OutcomeRule(EvictionEvent.ACCEPTED_BY_API, ApiEffect.NOTHING),
}


def apply_outcome(
    state: PolicyState, outcomes: Outcome | Iterable[Outcome], *, now: float, config: Config
) -> PolicyState:
    """The state after these outcomes. An outcome that was applied before, or that has no eviction in flight, changes
    nothing."""
    for outcome in (outcomes,) if isinstance(outcomes, Outcome) else outcomes:
        state = _apply(state, outcome, now=now, config=config)
    return state


def apply_reclaim(state: PolicyState, outcome: ReclaimOutcome) -> PolicyState:
    """The state after the end of a reclaim action."""
    return state._replace(reclaims=reclaim.apply_outcome(state.reclaims, outcome))


def apply_hook(state: PolicyState, outcome: HookOutcome, *, config: Config) -> PolicyState:
    """The state after the end of a hook."""
    after, limits = eviction_hook.apply_outcome(state.hooks, state.rate_limits, outcome, config=config)
    return state._replace(hooks=after, rate_limits=limits)


def apply_resize(state: PolicyState, outcome: ResizeOutcome, *, config: Config) -> PolicyState:
    """The state after the answer to a resize."""
    after, limits = resizes.apply_outcome(state.resizes, state.rate_limits, outcome, config=config)
    return state._replace(resizes=after, rate_limits=limits)


def _apply(state: PolicyState, outcome: Outcome, *, now: float, config: Config) -> PolicyState:
    state = state._replace(eviction_requests=eviction_request.apply_outcome(state.eviction_requests, outcome))
    entry = in_flight.entry_for(state.in_flight, plan_id=outcome.plan_id, pod_uid=outcome.pod_uid)
    rule, limits = OUTCOME_RULES[outcome.kind], state.rate_limits
    if entry is None or not in_flight.is_answered_by(entry, rule.event):
        return state
    # A request whose answer was lost gives them back when it ends, as at its deadline: the eviction takes them again.
    is_certain = entry.stage is not EvictionStage.UNCERTAIN or rule.event is EvictionEvent.REQUEST_ENDED
    if rule.returns_tokens and is_certain:
        limits = rate_limits.return_tokens(limits, entry.buckets, now=now, limits=config.rate_limits)
        limits = backoffs.undo_replacement(limits, SIGNAL_TABLE[entry.signal].resource, entry.plan_id)
    limits = _with_backoffs(limits, entry, outcome, rule, now=now)
    enforced = state.enforced_limits
    if rule.owner_backoff and entry.buckets:
        limits = backoffs.back_off_owner(limits, entry.owner, entry.plan_id, now=now, limits=config.rate_limits)
        if enforced is not None and outcome.kind.evicted:
            # Of a request that was sent before the dry run. Tokens return to the dry run alone: they may be its own.
            enforced = backoffs.back_off_owner(enforced, entry.owner, entry.plan_id, now=now, limits=config.rate_limits)
    return state._replace(
        in_flight=in_flight.apply_outcome(state.in_flight, entry, rule.event, now=now),
        rate_limits=limits,
        enforced_limits=enforced,
    )


def _with_backoffs(
    limits: rate_limits.RateLimitState, entry: InFlightEviction, outcome: Outcome, rule: OutcomeRule, *, now: float
) -> rate_limits.RateLimitState:
    """The limits with the back-offs of the API and of the pod."""
    status = f" (HTTP {outcome.http_status})" if outcome.http_status is not None else ""
    why = f"evicting {entry.pod}: {outcome.kind.value}{status}: {outcome.message}"
    if rule.api is ApiEffect.ANSWERED:
        limits = backoffs.api_answered(limits)
    elif rule.api is ApiEffect.BACK_OFF and rule.code is not None:
        limits = backoffs.back_off_api(
            limits, entry.plan_id, now=now, code=rule.code, why=why, retry_after_s=outcome.retry_after_s
        )
    if rule.pod_backoff_s is not None and rule.code is not None:
        limits = backoffs.back_off_pod(
            limits,
            entry.pod_uid,
            now=now,
            code=rule.code,
            why=why,
            retry_after_s=outcome.retry_after_s,
            first_s=rule.pod_backoff_s,
        )
    return limits

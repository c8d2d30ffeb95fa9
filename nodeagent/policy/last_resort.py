"""Decide when the last resort applies: killing a pod through its cgroup while the API server is unreachable.

Promises:

1. It applies only if `escalation.lastResort` is configured, only in the hard tier, and only after every request was
   unanswered for `lastResortAfter`. A silent watch or an old list of the pods is no such outage.
2. Protections apply as for evictions, by the last answer of the API server. A pod that the API server never listed is
   never killed, whatever `protection.unknownPods` is.
3. It has its own rate limit, which no eviction changes and which survives restarts.

Theory of operation. While a kill is allowed and its bucket has a token, the victims of a hard decision get
`Method.KILL`. With an empty bucket, requests are sent as before. Back-offs and rate limits of evictions do not apply,
because they come from requests that the API server did not answer.
"""

from typing import Final

from nodeagent.config.schema import Config, LastResort
from nodeagent.model import NodeSnapshot, Refusal, RefusalCode, Tier
from nodeagent.policy import rate_limits

API_REACHABLE: Final = Refusal(
    RefusalCode.API_REACHABLE, "the API server answers again, or has not been unreachable for long enough"
)


def kill_allowed(snapshot: NodeSnapshot, *, now: float, config: Config) -> bool:
    """True if kills are configured and the API server has been unreachable for long enough."""
    unreachable_since = snapshot.api_unreachable_since
    return (
        config.escalation.last_resort is LastResort.CGROUP_KILL
        and unreachable_since is not None
        and snapshot.pods_synced_at is not None
        and now - unreachable_since >= config.escalation.last_resort_after_s
    )


def kill_due(
    snapshot: NodeSnapshot, tier: Tier, limit_state: rate_limits.RateLimitState, *, now: float, config: Config
) -> tuple[bool, tuple[Refusal, ...]]:
    """Whether the victims are killed now; with the refusal if only the empty bucket prevents it."""
    if tier is not Tier.HARD or not kill_allowed(snapshot, now=now, config=config):
        return False, ()
    refusal = rate_limits.limit_reached(limit_state, rate_limits.LAST_RESORT, now=now, limits=config.rate_limits)
    return refusal is None, () if refusal is None else (refusal,)

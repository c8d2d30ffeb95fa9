"""The last resort: to end a pod's processes through its cgroup while the API server is out of reach.

Promises:

1. Only where `escalation.lastResort` says so, only in the hard tier, and only when every request has gone unanswered
   for `lastResortAfter`. A watch on which nothing happens, or a view of the pods that is merely old, is no such outage.
2. Whom it would spare the agent spares here too: protections rest on what the API server said last. A pod that it never
   spoke of is never ended, whatever `protection.unknownPods` says.
3. It has a budget of its own, which no eviction fills or empties and which survives restarts.

Theory of operation. While it is open and its bucket has a token, a decision of the hard tier takes its victims with
`Method.KILL` instead of handing them to an API server that does not answer; the bucket empty, requests are tried as
before. Back-offs and buckets of evictions do not hold it: they are empty because of requests that nobody answered.
"""

from typing import Final

from nodeagent.config.schema import Config, LastResort
from nodeagent.model import NodeSnapshot, Refusal, RefusalCode, Tier
from nodeagent.policy import rate_limits

API_REACHABLE: Final = Refusal(
    RefusalCode.API_REACHABLE, "the API server answers again, or has not been out of reach for long enough"
)


def kill_allowed(snapshot: NodeSnapshot, *, now: float, config: Config) -> bool:
    """Whether the API server has been out of reach for long enough, and this was asked for."""
    lost_at = snapshot.api_unreachable_since
    return (
        config.escalation.last_resort is LastResort.CGROUP_KILL
        and lost_at is not None
        and snapshot.pods_synced_at is not None
        and now - lost_at >= config.escalation.last_resort_after_s
    )


def kill_due(
    snapshot: NodeSnapshot, tier: Tier, budgets: rate_limits.RateLimitState, *, now: float, config: Config
) -> tuple[bool, tuple[Refusal, ...]]:
    """Whether victims are to be ended now; if it is only the bucket that forbids it, the reason."""
    if tier is not Tier.HARD or not kill_allowed(snapshot, now=now, config=config):
        return False, ()
    spent = rate_limits.limit_reached(budgets, rate_limits.LAST_RESORT, now=now, limits=config.rate_limits)
    return spent is None, () if spent is None else (spent,)

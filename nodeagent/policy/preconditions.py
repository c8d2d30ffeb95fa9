"""What must hold before any pod is evicted: a recent sample, a current list of the pods, an unblocked soft tier."""

from nodeagent.config.schema import Config
from nodeagent.model import NodeSnapshot, Refusal, RefusalCode, Tier
from nodeagent.policy import plausibility


def blocks_all_evictions(snapshot: NodeSnapshot, *, now: float, config: Config) -> Refusal | None:
    """Why this snapshot allows no eviction, or None."""
    if (stale := snapshot_too_old(snapshot, now=now, config=config)) is not None:
        return stale
    if snapshot.pods_synced_at is None:
        return Refusal(RefusalCode.PODS_NEVER_SYNCED, "the API server has not listed the pods of this node yet")
    age_s = now - snapshot.pods_synced_at
    if not -plausibility.MAX_CLOCK_SKEW_S <= age_s <= config.cluster.pods_max_age_s:
        limit_s = config.cluster.pods_max_age_s
        return Refusal(RefusalCode.PODS_STALE, f"the list of the pods is {age_s:.1f}s old, limit {limit_s:g}s")
    return None


def snapshot_too_old(snapshot: NodeSnapshot, *, now: float, config: Config) -> Refusal | None:
    """Why the numbers of the node are too old for any decision, or None."""
    age_s = now - snapshot.taken_at
    if -plausibility.MAX_CLOCK_SKEW_S <= age_s <= config.sampling.stale_after_s:
        return None
    return Refusal(
        RefusalCode.SNAPSHOT_STALE, f"the sample is {age_s:.1f}s old, limit {config.sampling.stale_after_s:g}s"
    )


def soft_tier_blocked(snapshot: NodeSnapshot, tier: Tier) -> Refusal | None:
    """What the soft tier waits for, or None. The hard tier never waits."""
    return None if tier is Tier.HARD else snapshot.soft_tier_blocked_by


def own_limit_blocked(snapshot: NodeSnapshot) -> Refusal | None:
    """What an eviction for the pod's own memory limit waits for, or None.

    A shutdown ends the pod itself, with preStop and a grace period. A cordon does not: the kernel would kill the pod.
    Taint and eviction slot belong to a shortage of the node.
    """
    block = snapshot.soft_tier_blocked_by
    return block if block is not None and block.code is RefusalCode.NODE_SHUTDOWN else None

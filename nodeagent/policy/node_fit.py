"""Room on other nodes: with `protection.nodeFit` the soft tier evicts only a pod that another node takes.

Promises:

1. Only the soft tier asks here, and only with `protection.nodeFit`. A pod over or near a limit of its own is not asked
   for either: the kubelet or the kernel ends it anyway.
2. Unknown is no room: a pod that was not read lately waits, without a limit in time. The hard tier is the limit.
3. A reading from before our last eviction does not count: the replacement of that pod may have taken the room.

Theory of operation. `kube.node_fit` reads the pods that `lookups` names, in eviction order, so that the next choice is
known when the first one finds no room. A pod that no node takes is out of reach like one whose PodDisruptionBudget
forbids its eviction: smaller pods are evicted in its place only if they alone clear the deficit.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from nodeagent.config.schema import Config
from nodeagent.model import NodeFit, NodeFitLookup, NodeSnapshot, Pod, RankedPod, Refusal, RefusalCode, Tier, units
from nodeagent.policy.rate_limits import RateLimitState

FRESH_S: Final = 300.0
"""How long a reading counts. It is repeated every two minutes while it is wanted. Longer would promise room that others
have taken meanwhile; shorter would list the nodes of the cluster more often."""
SETTLE_S: Final = 10.0
"""How long after an eviction its replacement may take to be bound to a node, where it counts."""
MAX_LOOKUPS: Final = 8
"""Pods that one decision wants."""


def refusals(
    snapshot: NodeSnapshot, tier: Tier, *, limit_state: RateLimitState, now: float, config: Config
) -> Mapping[str, Refusal]:
    """By pod UID: why a pod is not evicted because no other node takes it. Empty for the hard tier."""
    if tier is not Tier.SOFT or not config.protection.node_fit:
        return {}
    since = _counts_since(limit_state, now=now)
    found = {}
    for view in snapshot.pods:
        fit = view.pod.node_fit
        if fit is not None and not fit.node and _is_read(fit, since, now=now):
            found[view.pod.uid] = Refusal(RefusalCode.NO_NODE_FITS, fit.reason)
    return found


def check(pod: Pod, *, limit_state: RateLimitState, now: float, config: Config) -> Refusal | None:
    """Why the pod that the soft tier would evict now waits until it is known whether another node takes it."""
    fit = pod.node_fit or NodeFit()
    if not config.protection.node_fit or _is_read(fit, _counts_since(limit_state, now=now), now=now):
        return None
    age = (
        "" if fit.read_at is None else f"; the last reading is {units.format_duration(max(0.0, now - fit.read_at))} old"
    )
    why = fit.trouble or ("not read yet" if fit.read_at is None else "being read again")
    message = f"{pod.key}: whether another node takes it is unknown ({why}{age}); no limit in time in the soft tier"
    return Refusal(RefusalCode.WAITS_FOR_NODES, message)


def lookups(
    selected: Iterable[RankedPod],
    ranking: Iterable[RankedPod],
    unfit: Mapping[str, Refusal],
    *,
    limit_state: RateLimitState,
    now: float,
    config: Config,
) -> tuple[NodeFitLookup, ...]:
    """The pods to read: the one that would be evicted, then those in the eviction order that nothing else protects."""
    if not config.protection.node_fit:
        return ()
    since = _counts_since(limit_state, now=now)
    open_to_it = [each for each in ranking if not each.refusals or each.view.pod.uid in unfit]
    uids = dict.fromkeys(each.view.pod.uid for each in (*selected, *open_to_it))
    return tuple([NodeFitLookup(uid, since) for uid in list(uids)[:MAX_LOOKUPS]])


def _counts_since(limit_state: RateLimitState, *, now: float) -> float:
    """Only a reading that began later than this counts."""
    evictions = [backoff.last for backoff in limit_state.owners.values() if backoff.last <= now]
    return max(evictions) + SETTLE_S if evictions else 0.0


def _is_read(fit: NodeFit, since: float, *, now: float) -> bool:
    return fit.read_at is not None and fit.read_at >= since and 0 <= now - fit.read_at <= FRESH_S

"""Back-offs, and every limit that keeps a single pod from being evicted now.

Promises:

1. A back-off ends: after its time, or when the API server answers.
2. Back-offs of different nodes end at different times, so that a fleet does not return at once.

Theory of operation. Owners back off after an eviction, pods after a refused request, and the API after a request that
no server answered. Each repetition doubles the time. `ActiveLimits` collects the back-offs and the empty buckets of one
instant; it is built once for a decision, because most of the time it is empty.
"""

import zlib
from collections.abc import Mapping
from typing import Final, NamedTuple

from nodeagent.config.schema import Config, RateLimits
from nodeagent.model import Pod, Refusal, RefusalCode
from nodeagent.policy import node_fit, rate_limits
from nodeagent.policy.rate_limits import Backoff, BucketLevel, RateLimitState, Replacements

API_BACKOFF_S: Final = 1.0
"""First back-off after a request that failed because of the API server; doubles up to `API_BACKOFF_MAX_S`. Short,
because a hard threshold may be met; not zero, because a fleet must not flood an API server in trouble."""
API_BACKOFF_MAX_S: Final = 30.0
"""Trades load on a failing API server against the delay after it recovers: about the length of one kubelet cleanup."""
POD_BACKOFF_S: Final = 10.0
"""First back-off of a pod after a refusal by its PodDisruptionBudget without a Retry-After: the disruption controller's
own Retry-After (KUBELET-CONTRACT 14)."""
POD_BACKOFF_MAX_S: Final = 300.0
JITTER: Final = 0.25
"""Back-offs are lengthened by up to this share, by a hash of their subject, so that a fleet does not return at once."""

POD_RETRY_S: Final = 1.0
"""First back-off of a pod after a failure that may be temporary (404, 409, 400, 422, a webhook): longer than the lag of
a watch, shorter than the node can wait."""

_EMPTY: Final = RateLimitState()
BLOCKED: Final = frozenset({RefusalCode.BLOCKED_BY_PDB, RefusalCode.PDB_CONFLICT})
"""Back-offs after a refusal by a PodDisruptionBudget: in the hard tier `onBlocked: delete` overrides them."""


def back_off_owner(
    state: RateLimitState, owner: str, plan_id: str, *, now: float, limits: RateLimits
) -> RateLimitState:
    """The state after an eviction: the owner's other pods back off for 1, 2, 4... times `owner_backoff_s`. The pods of
    one owner may be evicted on many nodes at once, so its plan is what differs between nodes."""
    earlier = state.owners.get(owner)
    count = earlier.times + 1 if earlier and now - earlier.last <= 2 * limits.owner_backoff_max_s else 1
    wait_s = _jittered(doubled(limits.owner_backoff_s, count, limit=limits.owner_backoff_max_s), plan_id, count)
    evictions = "1 eviction" if count == 1 else f"{count} evictions in a row"
    why = f"owner back-off: {evictions}, next in {wait_s:.0f}s"
    return state._replace(
        owners={**state.owners, owner: Backoff(count, now + wait_s, now, RefusalCode.OWNER_BACKOFF, why)}
    )


def back_off_pod(
    state: RateLimitState,
    uid: str,
    *,
    now: float,
    code: RefusalCode,
    why: str,
    retry_after_s: float | None,
    first_s: float = POD_BACKOFF_S,
) -> RateLimitState:
    """The state after a refused request for a pod: it backs off for the server's Retry-After, else for `first_s`,
    doubled with each repetition."""
    earlier = state.pods.get(uid)
    count = earlier.times + 1 if earlier else 1
    wait_s = _retry_after(retry_after_s, POD_BACKOFF_MAX_S)
    if wait_s is None:
        wait_s = _jittered(doubled(first_s, count, limit=POD_BACKOFF_MAX_S), uid, count)
    text = f"{why}; next request in {wait_s:.0f}s"
    return state._replace(pods={**state.pods, uid: Backoff(count, now + wait_s, now, code, text)})


def back_off_api(
    state: RateLimitState, subject: str, *, now: float, code: RefusalCode, why: str, retry_after_s: float | None
) -> RateLimitState:
    """The state after a request that failed because of the API server: nothing is sent for a while. Requests that
    fail at the same time count once."""
    if state.api is not None and state.api.last <= now < state.api.until:
        return state
    count = state.api.times + 1 if state.api else 1
    wait_s = _retry_after(retry_after_s, API_BACKOFF_MAX_S)
    if wait_s is None:
        wait_s = _jittered(doubled(API_BACKOFF_S, count, limit=API_BACKOFF_MAX_S), subject, count)
    text = f"{why}, {count} in a row; next request in {wait_s:.1f}s"
    return state._replace(api=Backoff(count, now + wait_s, now, code, text))


def api_answered(state: RateLimitState) -> RateLimitState:
    """The state without the back-off of the API: it answered."""
    return state if state.api is None else state._replace(api=None)


def remaining(backoff: Backoff | None, *, now: float) -> Refusal | None:
    """The refusal of a back-off that is not over, or None."""
    if backoff is None or not backoff.last <= now < backoff.until:  # a clock before `last` is another boot's
        return None
    return Refusal(backoff.code, f"{backoff.why} ({backoff.until - now:.0f}s left)")


def record_replacement(
    state: RateLimitState, resource: str, plan_id: str, evictions: int, *, now: float
) -> RateLimitState:
    """The state after evictions in the place of a larger pod that is out of reach."""
    return state._replace(replacements={**state.replacements, resource: Replacements(plan_id, now, evictions)})


def undo_replacement(state: RateLimitState, resource: str, plan_id: str) -> RateLimitState:
    """The state after one of these evictions is proven to have evicted nothing."""
    earlier = state.replacements.get(resource)
    if earlier is None or earlier.plan_id != plan_id:
        return state
    others = {name: each for name, each in state.replacements.items() if name != resource}
    if earlier.evictions > 1:
        others[resource] = earlier._replace(evictions=earlier.evictions - 1)
    return state._replace(replacements=others)


def replaced_ago_s(state: RateLimitState, resource: str, *, now: float, for_s: float) -> float | None:
    """Seconds since the last evictions in the place of another pod, or None if that is `for_s` or more. A lost state
    counts as evictions when it was lost, a clock that ran backwards as 0 s."""
    earlier = state.replacements.get(resource)
    times = [at for at in (earlier.at if earlier is not None else None, state.spent_at) if at is not None]
    ago_s = max(0.0, now - max(times)) if times else for_s
    return ago_s if ago_s < for_s else None


class ActiveLimits(NamedTuple):
    """The back-offs and empty buckets at one time: by pod UID, by owner UID, by namespace."""

    pods: Mapping[str, Refusal]
    owners: Mapping[str, Refusal]
    namespaces: Mapping[str, Refusal]
    others: Mapping[str, Refusal]
    """For owners and namespaces that are not in the state, by kind: their buckets were lost and are still empty."""
    known: frozenset[str]
    """The buckets of the state, and those of namespaces with a bucket of their own."""


def active_limits(
    state: RateLimitState, *, now: float, limits: RateLimits, ignored: frozenset[str] = frozenset()
) -> ActiveLimits:
    """Every limit on single pods, owners or namespaces at `now`, except pod back-offs with a code in `ignored`."""
    pods = {
        uid: refusal
        for uid, backoff in state.pods.items()
        if backoff.code not in ignored and (refusal := remaining(backoff, now=now)) is not None
    }
    owners = {
        uid: refusal for uid, backoff in state.owners.items() if (refusal := remaining(backoff, now=now)) is not None
    }
    namespaces: dict[str, Refusal] = {}
    # A lost bucket of a namespace with a size of its own is not covered by `others`.
    own = dict.fromkeys(f"{rate_limits.NAMESPACE}/{name}" for name in limits.namespaces)
    for key in {**state.levels, **own}:
        kind, _, name = key.partition("/")
        if (
            kind in (rate_limits.NAMESPACE, rate_limits.OWNER)
            and (refusal := rate_limits.limit_reached(state, key, now=now, limits=limits)) is not None
        ):
            if kind == rate_limits.NAMESPACE:
                namespaces[name] = refusal
            else:
                owners.setdefault(name, refusal)
    others: dict[str, Refusal] = {}
    if state.spent_at is not None:
        for kind in (rate_limits.NAMESPACE, rate_limits.OWNER):
            if (refusal := rate_limits.limit_reached(state, f"{kind}/(any other)", now=now, limits=limits)) is not None:
                others[kind] = refusal
    return ActiveLimits(pods, owners, namespaces, others, frozenset((*state.levels, *own)))


def any_limit(limits: ActiveLimits) -> bool:
    """Whether any pod is limited."""
    return bool(limits.pods or limits.owners or limits.namespaces or limits.others)


def limit_on(limits: ActiveLimits, pod: Pod) -> Refusal | None:
    """The limit on `pod`, or None."""
    owner = rate_limits.owner_of(pod)
    refusal = limits.pods.get(pod.uid) or limits.owners.get(owner) or limits.namespaces.get(pod.namespace or "")
    if refusal is None and limits.others:
        if f"{rate_limits.OWNER}/{owner}" not in limits.known:
            refusal = limits.others.get(rate_limits.OWNER)
        if refusal is None and f"{rate_limits.NAMESPACE}/{pod.namespace}" not in limits.known:
            refusal = limits.others.get(rate_limits.NAMESPACE)
    return refusal


def pruned(state: RateLimitState, *, now: float, config: Config) -> RateLimitState:
    """The state without what has no effect any more: full buckets, back-offs long over.

    After a clock that ran backwards the buckets count as empty at `now`, and refill from there.
    """
    if state == _EMPTY:
        return state
    limits = config.rate_limits
    levels = {}
    for key, content in state.levels.items():
        bucket = rate_limits.bucket_of(key, limits)
        if now < content.since:
            levels[key] = BucketLevel(0, now)
        elif rate_limits.refilled(content, bucket, now=now).tokens < bucket.burst:
            levels[key] = content
    spent_at = None if state.spent_at is None else min(state.spent_at, now)
    if spent_at is not None and all(
        rate_limits.is_full(bucket, since=spent_at, now=now) for bucket in rate_limits.buckets(limits)
    ):
        spent_at = None
    # Node fit and `replacementWait` ask for the last eviction of an owner, however short its back-off is.
    keep_owner_s = max(
        2 * limits.owner_backoff_max_s, node_fit.FRESH_S + node_fit.SETTLE_S, config.protection.replacement_wait_s
    )
    owners = {uid: backoff for uid, backoff in state.owners.items() if 0 <= now - backoff.last <= keep_owner_s}
    pods = {uid: backoff for uid, backoff in state.pods.items() if 0 <= now - backoff.last <= 2 * POD_BACKOFF_MAX_S}
    api = state.api if state.api is not None and 0 <= now - state.api.last <= 2 * API_BACKOFF_MAX_S else None
    replacements = {name: each._replace(at=min(each.at, now)) for name, each in state.replacements.items()}
    return RateLimitState(levels, spent_at, owners, pods, api, replacements)


def doubled(first_s: float, count: int, *, limit: float) -> float:
    """`first_s` doubled with each repetition, at most `limit`."""
    return min(limit, first_s * 2.0 ** min(count - 1, 30))


def _retry_after(retry_after_s: float | None, limit: float) -> float | None:
    """The server's Retry-After, bounded; None if it set none."""
    return min(retry_after_s, limit) if retry_after_s is not None and retry_after_s > 0 else None


def _jittered(wait_s: float, subject: str, count: int) -> float:
    """`wait_s` lengthened by a share that differs between subjects. A hash, because policy has no randomness."""
    return wait_s * (1.0 + JITTER * (zlib.crc32(f"{subject}#{count}".encode()) % 1000) / 1000)

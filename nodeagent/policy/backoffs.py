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

from nodeagent.config.schema import RateLimits
from nodeagent.model import Pod, Refusal, RefusalCode
from nodeagent.policy import rate_limits
from nodeagent.policy.rate_limits import Backoff, BucketLevel, InPlace, RateLimitState

API_BACKOFF_S: Final = 1.0
"""First wait after a request that failed for want of the API; doubles up to `API_BACKOFF_MAX_S`. Short, because a hard
threshold may be met; not zero, because a fleet in trouble must not hammer an API server in trouble."""
API_BACKOFF_MAX_S: Final = 30.0
"""Trades load on a broken API server against the delay after it recovers: about the length of one kubelet cleanup."""
POD_BACKOFF_S: Final = 10.0
"""First wait before a pod whose disruption budget refused is tried again without a Retry-After: the disruption
controller's own Retry-After (KUBELET-CONTRACT 14)."""
POD_BACKOFF_MAX_S: Final = 300.0
JITTER: Final = 0.25
"""Waits are lengthened by up to this share, by a hash of their subject, so that a fleet does not return at once."""

POD_RETRY_S: Final = 1.0
"""First wait before a pod is tried again whose request failed for a reason that may pass (404, 409, 400, 422): longer
than a watch is behind, shorter than the node can wait."""

BLOCKED: Final = frozenset({RefusalCode.BLOCKED_BY_PDB, RefusalCode.PDB_CONFLICT})
"""Codes of waits of pods whose PodDisruptionBudget refused: in the hard tier `onBlocked: delete` overrides them."""


def back_off_owner(state: RateLimitState, owner: str, *, now: float, limits: RateLimits) -> RateLimitState:
    """After an eviction spare the owner's other pods for 1, 2, 4... times `owner_backoff_s`."""
    earlier = state.owners.get(owner)
    count = earlier.times + 1 if earlier and now - earlier.last <= 2 * limits.owner_backoff_max_s else 1
    wait_s = doubled(limits.owner_backoff_s, count, most=limits.owner_backoff_max_s)
    why = f"a pod of the same owner was evicted, {count} in a row: spared for {wait_s:.0f}s"
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
    """Leave one pod alone after a request for it was refused: as long as the server said, else `first_s` doubled with
    each repetition."""
    earlier = state.pods.get(uid)
    count = earlier.times + 1 if earlier else 1
    wait_s = _server_said(retry_after_s, POD_BACKOFF_MAX_S)
    if wait_s is None:
        wait_s = _jittered(doubled(first_s, count, most=POD_BACKOFF_MAX_S), uid, count)
    text = f"{why}; not tried again for {wait_s:.0f}s"
    return state._replace(pods={**state.pods, uid: Backoff(count, now + wait_s, now, code, text)})


def back_off_api(
    state: RateLimitState, subject: str, *, now: float, code: RefusalCode, why: str, retry_after_s: float | None
) -> RateLimitState:
    """Send nothing for a while after a request that failed for want of the API. Requests that fail side by side count
    once."""
    if state.api is not None and state.api.last <= now < state.api.until:
        return state
    count = state.api.times + 1 if state.api else 1
    wait_s = _server_said(retry_after_s, API_BACKOFF_MAX_S)
    if wait_s is None:
        wait_s = _jittered(doubled(API_BACKOFF_S, count, most=API_BACKOFF_MAX_S), subject, count)
    text = f"{why}, {count} in a row; next request in {wait_s:.1f}s"
    return state._replace(api=Backoff(count, now + wait_s, now, code, text))


def api_answered(state: RateLimitState) -> RateLimitState:
    """Forget the failures of the API: it answered."""
    return state if state.api is None else state._replace(api=None)


def remaining(wait: Backoff | None, *, now: float) -> Refusal | None:
    """The refusal of a back-off that is not over, or None."""
    if wait is None or not wait.last <= now < wait.until:  # a clock before `last` is another boot's
        return None
    return Refusal(wait.code, f"{wait.why} ({wait.until - now:.0f}s left)")


def note_in_place(state: RateLimitState, resource: str, plan_id: str, evictions: int, *, now: float) -> RateLimitState:
    """Remember that pods are evicted in the place of a larger one that is out of reach."""
    return state._replace(in_place={**state.in_place, resource: InPlace(plan_id, now, evictions)})


def undo_in_place(state: RateLimitState, resource: str, plan_id: str) -> RateLimitState:
    """One of these evictions is proven to have evicted nothing."""
    known = state.in_place.get(resource)
    if known is None or known.plan_id != plan_id:
        return state
    others = {name: each for name, each in state.in_place.items() if name != resource}
    if known.evictions > 1:
        others[resource] = known._replace(evictions=known.evictions - 1)
    return state._replace(in_place=others)


def in_place_since(state: RateLimitState, resource: str, *, now: float, for_s: float) -> float | None:
    """Seconds since pods were evicted in the place of another one, if that is less than `for_s`. A lost state counts as
    if that was when it was lost, a clock that ran backwards as no time."""
    known = state.in_place.get(resource)
    times = [at for at in (known.at if known is not None else None, state.spent_at) if at is not None]
    ago_s = max(0.0, now - max(times)) if times else for_s
    return ago_s if ago_s < for_s else None


class ActiveLimits(NamedTuple):
    """Who is held back at one instant, and why: by pod UID, by owner UID, by namespace."""

    pods: Mapping[str, Refusal]
    owners: Mapping[str, Refusal]
    namespaces: Mapping[str, Refusal]
    others: Mapping[str, Refusal]
    """For owners and namespaces that the state does not know, by kind: their buckets were lost and are still empty."""
    seen: Mapping[str, BucketLevel]
    """The buckets that the state knows."""


def active_limits(
    state: RateLimitState, *, now: float, limits: RateLimits, ignored: frozenset[str] = frozenset()
) -> ActiveLimits:
    """Everything that holds single pods, owners or namespaces back at `now`, but for pod back-offs with a code in
    `ignored`. Built once for a decision, because most of the time there is nothing in it."""
    pods = {
        uid: refusal
        for uid, wait in state.pods.items()
        if wait.code not in ignored and (refusal := remaining(wait, now=now)) is not None
    }
    owners = {uid: refusal for uid, wait in state.owners.items() if (refusal := remaining(wait, now=now)) is not None}
    namespaces: dict[str, Refusal] = {}
    for key in state.levels:
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
    return ActiveLimits(pods, owners, namespaces, others, state.levels)


def any_limit(holds: ActiveLimits) -> bool:
    """Whether any pod could be held back at all."""
    return bool(holds.pods or holds.owners or holds.namespaces or holds.others)


def limit_on(holds: ActiveLimits, pod: Pod) -> Refusal | None:
    """Why `pod` is held back, or None."""
    owner = rate_limits.owner_of(pod)
    refusal = holds.pods.get(pod.uid) or holds.owners.get(owner) or holds.namespaces.get(pod.namespace or "")
    if refusal is None and holds.others:
        if f"{rate_limits.OWNER}/{owner}" not in holds.seen:
            refusal = holds.others.get(rate_limits.OWNER)
        if refusal is None and f"{rate_limits.NAMESPACE}/{pod.namespace}" not in holds.seen:
            refusal = holds.others.get(rate_limits.NAMESPACE)
    return refusal


def pruned(state: RateLimitState, *, now: float, limits: RateLimits) -> RateLimitState:
    """The same state without what has no effect any more: full buckets, back-offs long over.

    Also where a clock that ran backwards is noticed: what it had counts as spent at `now`, and grows again from there.
    """
    if not (state.levels or state.owners or state.pods or state.in_place or state.spent_at is not None):
        return state
    levels = {}
    for key, held in state.levels.items():
        bucket = rate_limits.bucket_of(key, limits)
        if now < held.since:
            levels[key] = BucketLevel(0, now)
        elif rate_limits.refilled(held, bucket, now=now).tokens < bucket.burst:
            levels[key] = held
    spent_at = None if state.spent_at is None else min(state.spent_at, now)
    if spent_at is not None and all(
        rate_limits.is_full(bucket, since=spent_at, now=now) for bucket in rate_limits.buckets(limits)
    ):
        spent_at = None
    keep_owner_s = 2 * limits.owner_backoff_max_s
    owners = {uid: wait for uid, wait in state.owners.items() if 0 <= now - wait.last <= keep_owner_s}
    pods = {uid: wait for uid, wait in state.pods.items() if 0 <= now - wait.last <= 2 * POD_BACKOFF_MAX_S}
    in_place = {name: each._replace(at=min(each.at, now)) for name, each in state.in_place.items()}
    return state._replace(levels=levels, spent_at=spent_at, owners=owners, pods=pods, in_place=in_place)


def doubled(first_s: float, count: int, *, most: float) -> float:
    """`first_s` doubled with each repetition, at most `most`."""
    return min(most, first_s * 2.0 ** min(count - 1, 30))


def _server_said(retry_after_s: float | None, most: float) -> float | None:
    """The server's Retry-After if it makes sense, bounded."""
    return min(retry_after_s, most) if retry_after_s is not None and retry_after_s > 0 else None


def _jittered(wait_s: float, subject: str, count: int) -> float:
    """`wait_s` lengthened by a share that differs between subjects. A hash, because policy has no randomness."""
    return wait_s * (1.0 + JITTER * (zlib.crc32(f"{subject}#{count}".encode()) % 1000) / 1000)

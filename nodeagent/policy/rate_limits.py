"""How much may be done: token buckets, back-off per owner, per pod and for the API.

Promises:

1. In any stretch of time a bucket lets through at most `burst` evictions and one more for each full refill interval of
   that time, whatever is sampled, however often the process dies, as long as the state is persisted before acting.
2. A token comes back only when it is proven that nothing was evicted for it.
3. A limit that was hit is a `Refusal` with the numbers, never silence.

Theory of operation. A bucket is a whole number of tokens and the instant from which the next one grows, so refilling in
a million small steps gives exactly what one big step gives. A bucket that is not in the state is full, or, when the
state was lost (`spent_at`), was empty at that instant. A clock that ran backwards means another boot (CLOCK_BOOTTIME
never does so within one): the bucket counts as spent, from now on.
"""

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from nodeagent.config.schema import RateLimits, TokenBucket
from nodeagent.model import Pod, Refusal, RefusalCode

NODE: Final = "node"
NAMESPACE: Final = "namespace"
OWNER: Final = "owner"
SIGNAL: Final = "signal"
LAST_RESORT: Final = "last-resort"

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
_EMPTY: Final = {
    NODE: RefusalCode.RATE_LIMIT_NODE,
    NAMESPACE: RefusalCode.RATE_LIMIT_NAMESPACE,
    OWNER: RefusalCode.RATE_LIMIT_OWNER,
    SIGNAL: RefusalCode.RATE_LIMIT_SIGNAL,
    LAST_RESORT: RefusalCode.RATE_LIMIT_LAST_RESORT,
}
"""The refusal of an empty bucket, by its kind."""
FOR_ALL: Final = frozenset({_EMPTY[NODE], _EMPTY[SIGNAL], _EMPTY[LAST_RESORT]})
"""Codes of empty buckets that let no other pod through either."""

BLOCKED: Final = frozenset({RefusalCode.BLOCKED_BY_PDB, RefusalCode.PDB_CONFLICT})
"""Codes of waits of pods whose PodDisruptionBudget refused: in the hard tier `onBlocked: delete` overrides them."""


class BucketLevel(NamedTuple):
    """What is in a bucket."""

    tokens: int
    since: float
    """From when the next token grows; of no meaning while the bucket is full."""


class Backoff(NamedTuple):
    """A back-off that doubles."""

    times: int
    until: float
    last: float
    code: RefusalCode
    why: str


class InPlace(NamedTuple):
    """Evictions in the place of a larger pod that was out of reach."""

    plan_id: str
    at: float
    evictions: int
    """Those of the plan that are not proven to have evicted nothing."""


class RateLimitState(NamedTuple):
    """All that holds evictions back. Plain data; keys are `node`, `namespace/NAME`, `owner/UID`, `signal/NAME`,
    `last-resort`."""

    levels: Mapping[str, BucketLevel] = {}
    spent_at: float | None = None
    """When the state was lost: buckets that are not in `levels` were empty then. None: they are full."""
    owners: Mapping[str, Backoff] = {}
    """Owners whose pods are spared, by owner UID."""
    pods: Mapping[str, Backoff] = {}
    """Pods that are left alone for a while, by UID."""
    api: Backoff | None = None
    """Set while requests fail for want of the API."""
    in_place: Mapping[str, InPlace] = {}
    """The last of each resource."""


def owner_of(pod: Pod) -> str:
    """UID of the controller, or the pod's own where it has none."""
    return pod.owner.uid if pod.owner is not None and pod.owner.uid else pod.uid


def bucket_keys(pod: Pod, signal: str) -> tuple[str, ...]:
    """The buckets that evicting `pod` for `signal` (or for a limit of its own) takes a token from."""
    return (NODE, f"{NAMESPACE}/{pod.namespace}", f"{OWNER}/{owner_of(pod)}", f"{SIGNAL}/{signal}")


def bucket_of(key: str, limits: RateLimits) -> TokenBucket:
    """The size of the bucket that `key` names."""
    kind = key.partition("/")[0]
    if kind == LAST_RESORT:
        return limits.last_resort
    if kind == NODE:
        return limits.node
    if kind == NAMESPACE:
        return limits.namespace
    return limits.owner if kind == OWNER else limits.signal


def refilled(level: BucketLevel, bucket: TokenBucket, *, now: float) -> BucketLevel:
    """The bucket at `now`. Whole tokens only; the fraction stays in `since`."""
    elapsed = now - level.since
    if not 0 <= elapsed < math.inf:  # backwards, or not a number
        return BucketLevel(0, now)
    if bucket.per_hour <= 0:
        return BucketLevel(min(level.tokens, bucket.burst), level.since)
    interval_s = 3600.0 / bucket.per_hour
    grown = int(elapsed / interval_s)
    if level.tokens + grown >= bucket.burst:
        return BucketLevel(bucket.burst, now)
    return BucketLevel(level.tokens + grown, level.since + grown * interval_s)


def level(state: RateLimitState, key: str, *, now: float, limits: RateLimits) -> BucketLevel:
    """What is in the bucket `key` at `now`."""
    bucket = bucket_of(key, limits)
    stored = state.levels.get(key)
    if stored is None:
        if state.spent_at is None:
            return BucketLevel(bucket.burst, now)
        stored = BucketLevel(0, state.spent_at)
    return refilled(stored, bucket, now=now)


def spent(state: RateLimitState, *, now: float) -> RateLimitState:
    """Every bucket empty at `now`. Waits go on: to have waited too long does no harm."""
    return state._replace(levels={}, spent_at=now)


def limit_reached(state: RateLimitState, key: str, *, now: float, limits: RateLimits) -> Refusal | None:
    """Why the bucket `key` lets nothing through now, or None."""
    held = level(state, key, now=now, limits=limits)
    if held.tokens > 0:
        return None
    bucket = bucket_of(key, limits)
    kind, _, name = key.partition("/")
    subject = f"{kind} {name}" if name else kind
    if bucket.per_hour > 0 and bucket.burst > 0:
        next_s = max(0.0, held.since + 3600.0 / bucket.per_hour - now)
        refill = f"refilled at {bucket.per_hour:g} an hour, next in {next_s:.0f}s"
    else:
        refill = "never refilled"
    return Refusal(_EMPTY[kind], f"budget of {subject} is used up: {bucket.burst} evictions at once, {refill}")


def take_tokens(
    state: RateLimitState, keys: tuple[str, ...], *, now: float, limits: RateLimits
) -> RateLimitState | Refusal:
    """Take one token from each of `keys`, or none at all and say which bucket is empty."""
    levels = dict(state.levels)
    for key in keys:
        held = level(state, key, now=now, limits=limits)
        if held.tokens < 1:
            refusal = limit_reached(state, key, now=now, limits=limits)
            assert refusal is not None
            return refusal
        levels[key] = BucketLevel(held.tokens - 1, held.since)
    return state._replace(levels=levels)


def return_tokens(state: RateLimitState, keys: tuple[str, ...], *, now: float, limits: RateLimits) -> RateLimitState:
    """Undo one `take` of `keys`, for an attempt that is proven to have evicted nothing."""
    levels = dict(state.levels)
    for key in keys:
        held = level(state, key, now=now, limits=limits)
        levels[key] = BucketLevel(min(held.tokens + 1, bucket_of(key, limits).burst), held.since)
    return state._replace(levels=levels)


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


def waiting(wait: Backoff | None, *, now: float) -> Refusal | None:
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


def holds(
    state: RateLimitState, *, now: float, limits: RateLimits, ignored: frozenset[str] = frozenset()
) -> ActiveLimits:
    """Everything that holds single pods, owners or namespaces back at `now`, but for pod back-offs with a code in
    `ignored`. Built once for a decision, because most of the time there is nothing in it."""
    pods = {
        uid: refusal
        for uid, wait in state.pods.items()
        if wait.code not in ignored and (refusal := waiting(wait, now=now)) is not None
    }
    owners = {uid: refusal for uid, wait in state.owners.items() if (refusal := waiting(wait, now=now)) is not None}
    namespaces: dict[str, Refusal] = {}
    for key in state.levels:
        kind, _, name = key.partition("/")
        if kind in (NAMESPACE, OWNER) and (refusal := limit_reached(state, key, now=now, limits=limits)) is not None:
            if kind == NAMESPACE:
                namespaces[name] = refusal
            else:
                owners.setdefault(name, refusal)
    others: dict[str, Refusal] = {}
    if state.spent_at is not None:
        for kind in (NAMESPACE, OWNER):
            if (refusal := limit_reached(state, f"{kind}/(any other)", now=now, limits=limits)) is not None:
                others[kind] = refusal
    return ActiveLimits(pods, owners, namespaces, others, state.levels)


def holds_any(holds: ActiveLimits) -> bool:
    """Whether any pod could be held back at all."""
    return bool(holds.pods or holds.owners or holds.namespaces or holds.others)


def limit_on(holds: ActiveLimits, pod: Pod) -> Refusal | None:
    """Why `pod` is held back, or None."""
    owner = owner_of(pod)
    refusal = holds.pods.get(pod.uid) or holds.owners.get(owner) or holds.namespaces.get(pod.namespace or "")
    if refusal is None and holds.others:
        if f"{OWNER}/{owner}" not in holds.seen:
            refusal = holds.others.get(OWNER)
        if refusal is None and f"{NAMESPACE}/{pod.namespace}" not in holds.seen:
            refusal = holds.others.get(NAMESPACE)
    return refusal


def pruned(state: RateLimitState, *, now: float, limits: RateLimits) -> RateLimitState:
    """The same state without what has no effect any more: full buckets, back-offs long over.

    Also where a clock that ran backwards is noticed: what it had counts as spent at `now`, and grows again from there.
    """
    if not (state.levels or state.owners or state.pods or state.in_place or state.spent_at is not None):
        return state
    levels = {}
    for key, held in state.levels.items():
        bucket = bucket_of(key, limits)
        if now < held.since:
            levels[key] = BucketLevel(0, now)
        elif refilled(held, bucket, now=now).tokens < bucket.burst:
            levels[key] = held
    spent_at = None if state.spent_at is None else min(state.spent_at, now)
    if spent_at is not None and all(_full(bucket, since=spent_at, now=now) for bucket in _all(limits)):
        spent_at = None
    keep_owner_s = 2 * limits.owner_backoff_max_s
    owners = {uid: wait for uid, wait in state.owners.items() if 0 <= now - wait.last <= keep_owner_s}
    pods = {uid: wait for uid, wait in state.pods.items() if 0 <= now - wait.last <= 2 * POD_BACKOFF_MAX_S}
    in_place = {name: each._replace(at=min(each.at, now)) for name, each in state.in_place.items()}
    return state._replace(levels=levels, spent_at=spent_at, owners=owners, pods=pods, in_place=in_place)


def _all(limits: RateLimits) -> tuple[TokenBucket, ...]:
    return (limits.node, limits.namespace, limits.owner, limits.signal, limits.last_resort)


def _full(bucket: TokenBucket, *, since: float, now: float) -> bool:
    """A bucket that was empty at `since` is full again."""
    return refilled(BucketLevel(0, since), bucket, now=now).tokens >= bucket.burst


def doubled(first_s: float, count: int, *, most: float) -> float:
    """`first_s` doubled with each repetition, at most `most`."""
    return min(most, first_s * 2.0 ** min(count - 1, 30))


def _server_said(retry_after_s: float | None, most: float) -> float | None:
    """The server's Retry-After if it makes sense, bounded."""
    return min(retry_after_s, most) if retry_after_s is not None and retry_after_s > 0 else None


def _jittered(wait_s: float, subject: str, count: int) -> float:
    """`wait_s` lengthened by a share that differs between subjects. A hash, because policy has no randomness."""
    import zlib  # not at the top: a report waits for nobody

    return wait_s * (1.0 + JITTER * (zlib.crc32(f"{subject}#{count}".encode()) % 1000) / 1000)

"""How many evictions are allowed: token buckets for the node, namespaces, owners, signals and for single features.

Promises:

1. In any stretch of time a bucket lets through at most `burst` evictions and one more for each full refill interval of
   that time, whatever is sampled, however often the process dies, as long as the state is persisted before acting.
2. A token returns only when it is proven that nothing was evicted for it.
3. A limit that is reached gives a `Refusal` with the numbers.

Theory of operation. A bucket is a whole number of tokens and the time from which the next one grows, so that many small
refills give exactly what one large refill gives. A bucket that is not in the state is full; if the state was lost
(`spent_at`), it was empty at that time. A clock that ran backwards means another boot (CLOCK_BOOTTIME never does so
within one): the bucket counts as empty from now on.
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
HOOK: Final = "hook"
OWN_LIMIT: Final = "own-limit"
RESIZE: Final = "resize"

_EMPTY: Final = {
    NODE: RefusalCode.RATE_LIMIT_NODE,
    NAMESPACE: RefusalCode.RATE_LIMIT_NAMESPACE,
    OWNER: RefusalCode.RATE_LIMIT_OWNER,
    SIGNAL: RefusalCode.RATE_LIMIT_SIGNAL,
    LAST_RESORT: RefusalCode.RATE_LIMIT_LAST_RESORT,
    HOOK: RefusalCode.RATE_LIMIT_HOOK,
    OWN_LIMIT: RefusalCode.RATE_LIMIT_OWN_LIMIT,
    RESIZE: RefusalCode.RATE_LIMIT_RESIZE,
}
"""The refusal of an empty bucket, by its kind."""
FOR_ALL: Final = frozenset({_EMPTY[NODE], _EMPTY[SIGNAL], _EMPTY[LAST_RESORT]})
"""Codes of empty buckets that stop every pod."""


class BucketLevel(NamedTuple):
    """The content of a bucket."""

    tokens: int
    since: float
    """From when the next token grows; without meaning while the bucket is full."""


class Backoff(NamedTuple):
    """A back-off of an owner, a pod or the API."""

    times: int
    until: float
    last: float
    code: RefusalCode
    why: str


class Replacements(NamedTuple):
    """Evictions in the place of a larger pod that was out of reach."""

    plan_id: str
    at: float
    evictions: int
    """The evictions of the plan, without those that are proven to have evicted nothing."""


class RateLimitState(NamedTuple):
    """Rate limits and back-offs. The keys of buckets are `node`, `namespace/NAME`, `owner/UID`, `signal/NAME`,
    `last-resort`, `hook`, `own-limit`, `resize`."""

    levels: Mapping[str, BucketLevel] = {}
    spent_at: float | None = None
    """When the state was lost: buckets that are not in `levels` were empty then. None: they are full."""
    owners: Mapping[str, Backoff] = {}
    """By owner UID; `own-limit/UID` after an eviction for a memory limit of the pod's own."""
    pods: Mapping[str, Backoff] = {}
    """By pod UID."""
    api: Backoff | None = None
    """Set while requests fail because of the API server."""
    replacements: Mapping[str, Replacements] = {}
    """The last of each resource."""


def owner_of(pod: Pod) -> str:
    """UID of the controller, or the pod's own where it has none."""
    return pod.owner.uid if pod.owner is not None and pod.owner.uid else pod.uid


def own_limit_owner_of(pod: Pod) -> str:
    """The owner in back-offs and evictions in flight for a memory limit of the pod's own: apart from those under
    pressure."""
    return own_limit_owner(owner_of(pod))


def own_limit_owner(owner: str) -> str:
    """The same, from what `owner_of` returns."""
    return f"{OWN_LIMIT}/{owner}"


def bucket_keys(pod: Pod, signal: str) -> tuple[str, ...]:
    """The buckets that evicting `pod` for `signal` (or for a limit of its own) takes a token from."""
    return (NODE, f"{NAMESPACE}/{pod.namespace}", f"{OWNER}/{owner_of(pod)}", f"{SIGNAL}/{signal}")


def bucket_of(key: str, limits: RateLimits) -> TokenBucket:
    """The size of the bucket that `key` names."""
    kind = key.partition("/")[0]
    if kind == LAST_RESORT:
        return limits.last_resort
    if kind == HOOK:
        return limits.hook
    if kind == OWN_LIMIT:
        return limits.own_limit
    if kind == RESIZE:
        return limits.resize
    if kind == NODE:
        return limits.node
    if kind == NAMESPACE:
        return limits.namespaces.get(key.removeprefix(f"{NAMESPACE}/"), limits.namespace)
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
    """The content of the bucket `key` at `now`."""
    bucket = bucket_of(key, limits)
    stored = state.levels.get(key)
    if stored is None:
        if state.spent_at is None:
            return BucketLevel(bucket.burst, now)
        stored = BucketLevel(0, state.spent_at)
    return refilled(stored, bucket, now=now)


def spent(state: RateLimitState, *, now: float) -> RateLimitState:
    """The state with every bucket empty at `now`. Back-offs go on: a back-off that is too long does no harm."""
    return state._replace(levels={}, spent_at=now)


def limit_reached(state: RateLimitState, key: str, *, now: float, limits: RateLimits) -> Refusal | None:
    """Why the bucket `key` allows no eviction now, or None."""
    content = level(state, key, now=now, limits=limits)
    if content.tokens > 0:
        return None
    bucket = bucket_of(key, limits)
    kind, _, name = key.partition("/")
    subject = f"{kind} {name}" if name else kind
    if bucket.per_hour > 0 and bucket.burst > 0:
        next_s = max(0.0, content.since + 3600.0 / bucket.per_hour - now)
        refill = f"{bucket.per_hour:g} per hour, next in {next_s:.0f}s"
    else:
        refill = "never refilled"
    return Refusal(_EMPTY[kind], f"rate limit of {subject} reached: burst {bucket.burst}, {refill}")


def take_tokens(
    state: RateLimitState, keys: tuple[str, ...], *, now: float, limits: RateLimits
) -> RateLimitState | Refusal:
    """The state with one token taken from each of `keys`, or the refusal of the first empty bucket."""
    levels = dict(state.levels)
    for key in keys:
        content = level(state, key, now=now, limits=limits)
        if content.tokens < 1:
            refusal = limit_reached(state, key, now=now, limits=limits)
            assert refusal is not None
            return refusal
        levels[key] = BucketLevel(content.tokens - 1, content.since)
    return state._replace(levels=levels)


def return_tokens(state: RateLimitState, keys: tuple[str, ...], *, now: float, limits: RateLimits) -> RateLimitState:
    """Undo one `take_tokens` of `keys`, for an attempt that is proven to have evicted nothing."""
    levels = dict(state.levels)
    for key in keys:
        content = level(state, key, now=now, limits=limits)
        levels[key] = BucketLevel(min(content.tokens + 1, bucket_of(key, limits).burst), content.since)
    return state._replace(levels=levels)


def buckets(limits: RateLimits) -> tuple[TokenBucket, ...]:
    """The buckets of all kinds, and those of single namespaces."""
    kinds = (limits.node, limits.namespace, limits.owner, limits.signal)
    return (*kinds, limits.last_resort, limits.hook, limits.own_limit, limits.resize, *limits.namespaces.values())


def is_full(bucket: TokenBucket, *, since: float, now: float) -> bool:
    """Whether a bucket that was empty at `since` is full again."""
    return refilled(BucketLevel(0, since), bucket, now=now).tokens >= bucket.burst

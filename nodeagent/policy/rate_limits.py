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


def buckets(limits: RateLimits) -> tuple[TokenBucket, ...]:
    return (limits.node, limits.namespace, limits.owner, limits.signal, limits.last_resort)


def is_full(bucket: TokenBucket, *, since: float, now: float) -> bool:
    """A bucket that was empty at `since` is full again."""
    return refilled(BucketLevel(0, since), bucket, now=now).tokens >= bucket.burst

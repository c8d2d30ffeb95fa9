"""The replacements of earlier victims: the soft tier evicts no pod of an owner that still lacks ready replicas.

Promises:

1. Only the soft tier asks here, and only with `protection.replacementWait`.
2. Unknown is never a reason to evict: a pod whose owner was not read lately waits for that. Neither that wait nor the
   one for a missing replica lasts longer than `replacementWait`; then the pod is evicted, and a note says why.
3. Only owners that matter are read: that of the pod that would be evicted, and those whose replicas are waited for.

Theory of operation. A look-up (`kube.owner_lookup`) gives how many replicas the owner wants and how many are ready.
Pods of the owner on this node that run and are not ready are placed already and do not count as missing. A missing
replica is one that was not created yet (a quota), is not scheduled, or does not start. Its time runs from the first
look-up that found it missing, that of an unknown owner from the first request or the last reading; both from our last
eviction of a pod of the owner, if that is later.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from nodeagent.config.schema import Config
from nodeagent.model import (
    LOOKED_UP_OWNERS,
    NodeSnapshot,
    Note,
    NoteKind,
    OwnerLookup,
    Pod,
    Refusal,
    RefusalCode,
    Tier,
    units,
)
from nodeagent.policy import rate_limits
from nodeagent.policy.rate_limits import RateLimitState

FRESH_S: Final = 30.0
"""How long a look-up counts. A wanted owner is read three times as often."""
SETTLE_S: Final = 5.0
"""How long after an eviction a controller may take to write its status: an earlier reading does not know of it."""


class OwnerStep(NamedTuple):
    """What the owner of the pod to evict changes."""

    waits: Refusal | None = None
    note: Note | None = None


_NOTHING: Final = OwnerStep()
MAX_LOOKUPS: Final = 16
"""Owners that one decision wants."""


def refusals(
    snapshot: NodeSnapshot, tier: Tier, *, limit_state: RateLimitState, now: float, config: Config
) -> Mapping[str, Refusal]:
    """By pod UID: why a pod is not evicted because its owner lacks replicas. Empty for the hard tier."""
    wait_s = config.protection.replacement_wait_s
    if tier is not Tier.SOFT or not wait_s or all(view.pod.replicas is None for view in snapshot.pods):
        return {}
    not_ready = _not_ready(snapshot)
    found = {}
    for view in snapshot.pods:
        pod = view.pod
        if not _is_read(pod, limit_state, now=now) or not _missing(pod, not_ready):
            continue
        left_s = _since(pod, limit_state, now=now) + wait_s - now
        if left_s > 0:
            message = f"{_lacks(pod, not_ready)}; waiting up to {left_s:.0f}s for its replacement"
            found[pod.uid] = Refusal(RefusalCode.OWNER_INCOMPLETE, message)
    return found


def lookups(pods: Iterable[Pod], *, config: Config) -> tuple[OwnerLookup, ...]:
    """The owners of these pods that are to be read."""
    if not config.protection.replacement_wait_s:
        return ()
    found = dict.fromkeys(lookup for pod in pods if (lookup := owner_lookup(pod)) is not None)
    return tuple(found)[:MAX_LOOKUPS]


def check(
    pod: Pod,
    snapshot: NodeSnapshot,
    *,
    limit_state: RateLimitState,
    now: float,
    config: Config,
) -> OwnerStep:
    """Whether the pod that would be evicted now waits for a look-up of its owner."""
    wait_s, lookup = config.protection.replacement_wait_s, owner_lookup(pod)
    if not wait_s or lookup is None:
        return _NOTHING
    not_ready = _not_ready(snapshot)
    if _is_read(pod, limit_state, now=now):
        if not _missing(pod, not_ready):
            return _NOTHING
        text = f"{pod.key}: {_lacks(pod, not_ready)}, for more than {units.format_duration(wait_s)}"
        return OwnerStep(note=Note(NoteKind.OWNERS, f"{text}: no longer waited for"))
    trouble = pod.replicas.trouble if pod.replicas is not None and pod.replicas.trouble else "not read yet"
    subject = f"{pod.key}: its owner {lookup.owner.kind} {lookup.owner.name} is unknown ({trouble})"
    left_s = _unknown_since(pod, limit_state, now=now) + wait_s - now
    if left_s > 0:
        return OwnerStep(Refusal(RefusalCode.WAITS_FOR_OWNER, f"{subject}; waiting up to {left_s:.0f}s"))
    text = f"{subject} for more than {units.format_duration(wait_s)}: no longer waited for"
    return OwnerStep(note=Note(NoteKind.OWNERS, text))


def owner_lookup(pod: Pod) -> OwnerLookup | None:
    """The look-up of the pod's owner; None for a kind that has no replicas, or that the agent does not know."""
    owner = pod.owner
    if owner is None or not pod.namespace or (owner.api_version, owner.kind) not in LOOKED_UP_OWNERS:
        return None
    return OwnerLookup(pod.namespace, owner)


def _not_ready(snapshot: NodeSnapshot) -> Counter[str]:
    """By UID of the owner: its pods on this node that are placed and not ready."""
    return Counter(
        view.pod.owner.uid
        for view in snapshot.pods
        if view.pod.owner is not None and not (view.pod.ready or view.pod.finished or view.pod.terminating)
    )


def _is_read(pod: Pod, limit_state: RateLimitState, *, now: float) -> bool:
    """Whether the owner was read lately, and after our last eviction of a pod of it."""
    replicas = pod.replicas
    if replicas is None or replicas.read_at is None or not 0 <= now - replicas.read_at <= FRESH_S:
        return False
    last = _last_eviction(pod, limit_state, now=now)
    return last is None or replicas.read_at >= last + SETTLE_S


def _last_eviction(pod: Pod, limit_state: RateLimitState, *, now: float) -> float | None:
    """Of a pod of the owner, for the node or for a limit of the pod's own."""
    owners = (rate_limits.owner_of(pod), rate_limits.own_limit_owner_of(pod))
    backoffs = [backoff for owner in owners if (backoff := limit_state.owners.get(owner)) is not None]
    return max([backoff.last for backoff in backoffs if backoff.last <= now], default=None)


def _unknown_since(pod: Pod, limit_state: RateLimitState, *, now: float) -> float:
    """When its owner was last known, or first wanted; not before our last eviction of a pod of it."""
    if pod.replicas is None:
        return now
    times = (pod.replicas.asked_at, pod.replicas.read_at, _last_eviction(pod, limit_state, now=now))
    return max([each for each in times if each is not None and each <= now], default=now)


def _since(pod: Pod, limit_state: RateLimitState, *, now: float) -> float:
    replicas = pod.replicas
    first = replicas.incomplete_since if replicas is not None and replicas.incomplete_since is not None else now
    last = _last_eviction(pod, limit_state, now=now)
    return first if last is None else max(first, last)


def _missing(pod: Pod, not_ready: Counter[str]) -> int:
    replicas, owner = pod.replicas, pod.owner
    if replicas is None or owner is None:
        return 0
    return max(0, replicas.desired - replicas.ready - not_ready[owner.uid])


def _lacks(pod: Pod, not_ready: Counter[str]) -> str:
    replicas, owner = pod.replicas, pod.owner
    assert replicas is not None
    assert owner is not None
    missing = _missing(pod, not_ready)
    return f"its owner {owner.kind} {owner.name} lacks {missing} of {replicas.desired} replicas on other nodes"

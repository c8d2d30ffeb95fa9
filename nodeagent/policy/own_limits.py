"""Pods that are about to reach a memory limit of their own, where the kernel kills without preStop and grace period.

Off unless `ownLimit` is on. It is not node pressure: no condition, no taint, no ranking and no relief follow from it.

Theory of operation. `near_limits` gives a pod that opted in if one of three holds for one of its limits, in this order.
The trend reaches the limit before the grace period and a margin are over; a linear growth from zero says nothing, so it
counts only from a share of the limit on, and only above what the pod has used before. The kernel reclaims for the limit
and the tasks stall. Or hardly anything is left, whatever the trend. What counts is what reclaim cannot free, so a pod
full of page cache is not near its limit. An unknown limit or usage gives no reading (`sampling.pods.own_limits`).
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from nodeagent.config.schema import Config
from nodeagent.model import OwnLimit, Pod, PodSource, PodView, units
from nodeagent.policy import protection, trend

OWN_LIMIT: Final = "memory.max"
"""`Victim.limit` of these evictions, and the name of the limit in texts."""
ANNOTATION: Final = "nodeagent.io/own-limit"
STALL_SHARE: Final = 0.9
"""From this share of the limit on stalls count: below it the kernel frees page cache and does not kill."""
MIN_CONFIDENCE: Final = 0.7
"""The line must explain this share of the spread of the readings: 0.9 to 1 on ramps, 0.2 to 0.6 on a heap that a
garbage collector empties within the readings."""
STILL_GROWS: Final = 0.25
"""The latest growth must be at least this share of the trend: a growth that has stopped reaches nothing."""


class NearLimit(NamedTuple):
    """A pod near one of its limits."""

    view: PodView
    own: OwnLimit
    left_s: float | None
    """Until the limit is reached, by the trend; None without one."""
    facts: str
    """What it uses of which limit, and why it is near it; a clause for texts."""


class _Growth(NamedTuple):
    rate_per_s: float
    left_s: float


def opted_in(pod: Pod, config: Config) -> bool:
    """Whether the pod is evicted before it reaches its own limit: by its namespace, or by its own annotation where pods
    may protect themselves."""
    return config.own_limit.enabled and _opted_in(pod, "evict", config.own_limit.namespaces, config)


def resize_opted_in(pod: Pod, config: Config) -> bool:
    """Whether the limit of the pod's containers is raised before it is reached, in the same way."""
    rules = config.own_limit.resize
    return config.own_limit.enabled and rules.enabled and _opted_in(pod, "resize", rules.namespaces, config)


def _opted_in(pod: Pod, word: str, namespaces: Sequence[str], config: Config) -> bool:
    preference = pod.annotations.get(ANNOTATION)
    if pod.source is not PodSource.API or preference == "never":
        return False
    if preference == word and protection.trusted(pod, config.protection):
        return True
    return pod.namespace in namespaces or protection.EVERY_NAMESPACE in namespaces


def watched(pod: Pod, config: Config) -> bool:
    """Whether the limits of the pod are read."""
    return opted_in(pod, config) or resize_opted_in(pod, config)


def near_limits(views: Iterable[PodView], *, at: float, config: Config) -> tuple[NearLimit, ...]:
    """The pods near a limit of their own, the first limit of each pod. `at`: a reading older than `sampling.staleAfter`
    before this is unknown."""
    if not config.own_limit.enabled:
        return ()
    found = []
    for view in views:
        if view.usage is None or not view.usage.own_limits or not watched(view.pod, config):
            continue
        near = (_near(view, own, config) for own in view.usage.own_limits if usable(own, at, config))
        if (first := next((each for each in near if each is not None), None)) is not None:
            found.append(first)
    return tuple(found)


def usable(own: OwnLimit, at: float, config: Config) -> bool:
    """Whether a reading is plausible and, at `at`, recent."""
    plausible = own.limit > 0 and 0 <= own.used <= units.MAX_PLAUSIBLE and own.headroom >= own.limit - own.used
    return plausible and 0 <= at - own.read_at <= config.sampling.stale_after_s


def _near(view: PodView, own: OwnLimit, config: Config) -> NearLimit | None:
    rules = config.own_limit
    swappable = own.headroom - (own.limit - own.used)
    filled = own.used - swappable
    """What would be used if everything that may be swapped out were."""
    if filled < min(rules.trend_above, STALL_SHARE, rules.share) * own.limit:
        return None
    growth = _growth(own)
    if (
        growth is not None
        and _warm(view.pod, own, config)
        and filled >= rules.trend_above * own.limit
        and filled > own.peak
    ):
        lead_s = lead_time_s(view.pod, config)
        if growth.left_s <= lead_s:
            per_s = units.format_amount(round(growth.rate_per_s))
            reason = f"grows {per_s} a second and reaches it in {growth.left_s:.1f}s"
            return _result(view, own, growth.left_s, reason)
    left_s = growth.left_s if growth is not None else None
    stall = own.stall_some_avg10
    if own.reclaimed_lately and stall is not None and stall >= rules.stall and filled >= STALL_SHARE * own.limit:
        return _result(view, own, left_s, f"stalls on memory {stall:.0f}% of the time and is reclaimed from")
    if filled >= rules.share * own.limit:
        return _result(view, own, left_s, f"has {units.format_amount(own.headroom)} left")
    return None


def _warm(pod: Pod, own: OwnLimit, config: Config) -> bool:
    """Whether the container is watched for `minimumAge`: every restart fills a heap anew, and most stop in time."""
    since = own.watched_since
    return since is not None and own.read_at - since >= protection.minimum_age_s(pod, config.protection)


def lead_time_s(pod: Pod, config: Config) -> float:
    """How long before its limit a pod is evicted: its grace period, which preStop is part of, and the margin."""
    grace_s = pod.termination_grace_s
    return (grace_s if 0 <= grace_s < units.MAX_PLAUSIBLE else 0.0) + config.own_limit.margin_s


def _growth(own: OwnLimit) -> _Growth | None:
    """The growth by the last readings; None without a clear and lasting one."""
    found = trend.estimate(own.history)
    if found is None or found.confidence < MIN_CONFIDENCE or not found.rate_per_s < 0:
        return None
    rate, latest = -found.rate_per_s, trend.latest_rate(own.history)
    if latest is None or -latest < STILL_GROWS * rate:
        return None
    return _Growth(rate, max(0.0, own.headroom / rate))


def _result(view: PodView, own: OwnLimit, left_s: float | None, reason: str) -> NearLimit:
    name = container_name(view, own)
    subject = f"Container {name}" if name else f"Pod {view.pod.name}"
    used, limit = units.format_amount(own.used), units.format_spec_quantity(own.limit)
    return NearLimit(view, own, left_s, f"{subject} was using {used} of its memory limit {limit}, {reason}")


def container_name(view: PodView, own: OwnLimit) -> str:
    """The name of the container whose limit it is, or its id without a name; empty for the limit of the pod."""
    if not own.container_id:
        return ""
    containers = view.usage.containers if view.usage is not None else ()
    names = [each.name for each in containers if each.container_id == own.container_id]
    return (names[0] if names else None) or own.container_id[:12]

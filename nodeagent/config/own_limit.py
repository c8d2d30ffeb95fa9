"""The section `ownLimit`: pods near a memory limit of their own. The conventions are those of `schema.py`."""

from typing import Annotated, NamedTuple

from nodeagent.config import bounds
from nodeagent.config.bounds import Range


class OwnLimitConfig(NamedTuple):
    enabled: bool = False
    """Evict pods that opted in and are about to reach their own memory limit, with preStop and their whole grace
    period, before the kernel kills them. Costs a few files of each such pod each second. The rate limit is
    `rateLimits.ownLimit`."""
    namespaces: Annotated[tuple[str, ...], bounds.NAMESPACES] = ()
    """Namespaces whose pods opt in, except those with the annotation `nodeagent.io/own-limit: never`. `"*"`: every
    namespace. In `protection.trustedNamespaces` a pod opts in by the annotation `nodeagent.io/own-limit: evict`."""
    trend_above: Annotated[float, Range(0.4, 1)] = 0.7
    """The trend counts from this share of the limit on: the pod is evicted if it reaches its limit within its grace
    period and `margin`. Only what reclaim cannot free counts as used, so no page cache."""
    share: Annotated[float, Range(0.4, 1)] = 0.98
    """From this share of the limit on the pod is evicted without a trend."""
    margin_s: Annotated[float, Range(0, 600)] = 5.0
    """Time for the request and for its way to the kubelet, added to the pod's grace period."""
    stall: Annotated[float, Range(1, 100)] = 25.0
    """From 90% of the limit on: a pod that the kernel reclaims from for its limit and whose tasks stall on memory
    (PSI `some`, average over 10 s) for at least this percentage of the time is evicted without a trend. Needs
    cgroup v2."""

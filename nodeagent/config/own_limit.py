"""The section `ownLimit`: pods near a memory limit of their own. The conventions are those of `schema.py`."""

from typing import Annotated, NamedTuple

from nodeagent.config import bounds
from nodeagent.config.bounds import Range


class ResizeConfig(NamedTuple):
    enabled: bool = False
    """Raise the memory limit of a container that is about to reach it, in place, instead of evicting its pod. Pods opt
    in apart from evictions. Needs Kubernetes 1.33 or later, a ServiceAccount and the rights of examples/resize.yaml.
    The rate limit is `rateLimits.resize`."""
    namespaces: Annotated[tuple[str, ...], bounds.NAMESPACES] = ()
    """Namespaces whose pods opt in, except those with the annotation `nodeagent.io/own-limit: never`. `"*"`: every
    namespace. In `protection.trustedNamespaces` a pod opts in by the annotation `nodeagent.io/own-limit: resize`."""
    step: Annotated[float, Range(0.05, 1)] = 0.25
    """A raise adds this share of the limit. The node must have it: above its memory thresholds, and of its allocatable
    memory beyond the requests of all pods and earlier raises."""
    ceiling: Annotated[float, Range(1.05, 16)] = 2.0
    """Highest limit, as a multiple of the one before the first raise."""
    node_share: Annotated[float, Range(0.01, 1)] = 0.25
    """Highest limit, as a share of the node's allocatable memory, whatever the first one was."""
    undo_after_s: Annotated[float, Range(60, bounds.MAX_DURATION_S)] = 1800.0
    """The limit from before the first raise is restored after the container has used less than `trendAbove` of it for
    so long, page cache not above it. Needs Kubernetes 1.34 or later; before that the limit stays."""


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
    resize: ResizeConfig = ResizeConfig()
    """Raises of the limit in place of evictions (docs/own-limit.md)."""

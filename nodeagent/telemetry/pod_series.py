"""Series of single pods (`metrics.perPod`): those with the largest usage, and no others.

1. A scrape has at most `top` series of each family, however many pods the node has.
2. A pod that is gone, or no longer among the largest, has no series.
3. An unmeasured amount has no series, never a zero: disks are measured only while disks matter.

A pure function of the last snapshot, called by the thread that renders a scrape.
"""

import heapq
from collections.abc import Callable, Iterator

from nodeagent.config.schema import Config
from nodeagent.model import DiskLayout, NodeSnapshot, PodView, Signal
from nodeagent.policy import pod_usage, requests
from nodeagent.policy.pod_usage import MemoryRule

PodName = tuple[str, str]
"""Namespace and name: the labels."""


def samples(snapshot: NodeSnapshot, *, config: Config) -> Iterator[tuple[str, PodName, int]]:
    """(name of the metric, labels, value), the largest first; nothing if `metrics.perPod.top` is 0."""
    top = config.metrics.per_pod.top
    if not top:
        return
    rule = pod_usage.memory_rule(snapshot, config=config)
    amounts: dict[str, Callable[[PodView], int | None]] = {
        "nodeagent_pod_disk_bytes": lambda view: _disk(view, Signal.NODEFS, snapshot),
        "nodeagent_pod_disk_inodes": lambda view: _disk(view, Signal.NODEFS_INODES, snapshot),
        "nodeagent_pod_memory_above_request_bytes": lambda view: _memory(view, rule, snapshot, config),
    }
    for metric, amount_of in amounts.items():
        for name, amount in _largest(snapshot, amount_of, top):
            yield metric, name, amount


def _largest(snapshot: NodeSnapshot, amount_of: Callable[[PodView], int | None], top: int) -> list[tuple[PodName, int]]:
    """The pods with the largest amounts. Two pods of one name, the first of which is terminating, are one series."""
    found: dict[PodName, int] = {}
    for view in snapshot.pods:
        namespace, name = view.pod.namespace, view.pod.name
        amount = amount_of(view) if namespace and name else None
        if namespace and name and amount is not None:
            found[namespace, name] = max(amount, found.get((namespace, name), amount))
    return heapq.nlargest(top, found.items(), key=lambda each: (each[1], each[0]))


def _disk(view: PodView, signal: Signal, snapshot: NodeSnapshot) -> int | None:
    """What the pod holds on all file systems of the node together; a lower bound if only parts were measured."""
    usage = view.usage
    if usage is None or pod_usage.disk_usage_expired(usage, at=snapshot.taken_at):
        return None
    return pod_usage.disk_usage(usage.disk, signal, DiskLayout.SINGLE)


def _memory(view: PodView, rule: MemoryRule, snapshot: NodeSnapshot, config: Config) -> int | None:
    usage = view.usage
    if usage is None or snapshot.taken_at - usage.read_at > config.sampling.stale_after_s:
        return None
    used = pod_usage.memory_usage(usage, rule)
    request = requests.ranking_request(view, signal=Signal.MEMORY)
    return None if used is None or request is None else used - request

"""The second key: a threshold may ask for pressure stall information (PSI) beside its level.

Three promises:

1. Stall alone never evicts. This module only answers whether a key holds; `thresholds.py` asks it about thresholds
   whose level is met, and about no others.
2. What is not known does not turn the key: no PSI, a stale or impossible value, a pod at its limit whose own stall is
   not known. CPU pressure never turns it.
3. Stall that pods bring upon themselves by standing at their own memory limit is not the node's: it is discounted.

Why the third: reclaim inside a limited cgroup is charged to every ancestor. A pod that does heavy file I/O at its own
limit raises the memory and I/O pressure of the whole node while most of its memory is free; talos (issues 12526 and
13746) and systemd-oomd (issue 23606) killed bystanders for it.

The arithmetic: at any moment that counts as `some` for an ancestor, some task below it stalls, so the ancestor's
`some` is at most the sum over its parts. What remains after subtracting the limited pods' `some` is therefore a
lower bound of the stall that has another cause; `full` is at most `some`, so subtracting the same is at worst too
generous to the pods. Pods are only known by avg10; it stands for their avg60 too.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from nodeagent.model import NodeSnapshot, PodView, Stall, StallRequirement, StallScope, Threshold

AT_LIMIT: Final = 0.98
"""Share of its own limit from which a pod counts as standing at it: reclaim starts below the limit itself, since
charges come in batches of up to 64 pages per CPU."""


CLOCK_SLACK_S: Final = 1.0
"""A sample may be this much younger than `now`: taken while the decision was being prepared."""


class StallCheck(NamedTuple):
    """Whether the second key holds, and the numbers behind it."""

    holds: bool
    reason: str


def check_stall(
    requirement: StallRequirement, snapshot: NodeSnapshot, *, now: float, stale_after_s: float
) -> StallCheck:
    """Whether the required stall is seen in this snapshot, pods at their own limit discounted."""
    name = f"{requirement.resource} {requirement.kind} {requirement.window} of {requirement.scope.value}"
    if requirement.resource == "cpu":
        return StallCheck(False, f"{name}: CPU pressure is never used")
    stall = _find(requirement, snapshot)
    if stall is None:
        return StallCheck(False, f"{name} is not known: this node reports no such PSI")
    if not 0.0 <= now - stall.read_at + CLOCK_SLACK_S <= stale_after_s + CLOCK_SLACK_S:
        return StallCheck(False, f"{name} is not known: read {now - stall.read_at:.1f}s ago")
    seen = _value(stall, kind=requirement.kind, window=requirement.window)
    if seen is None or not 0.0 <= seen <= 100.0:
        return StallCheck(False, f"{name} is not known: {seen} is no percentage")
    if not seen >= requirement.at_least:
        return StallCheck(False, f"{name} is {seen:g}%, needs {requirement.at_least:g}%")
    return _discounted(requirement, snapshot, name=name, seen=seen)


def _find(requirement: StallRequirement, snapshot: NodeSnapshot) -> Stall | None:
    for stall in snapshot.stalls:
        if stall.scope is requirement.scope and stall.resource == requirement.resource:
            return stall
    return None


def _value(stall: Stall, *, kind: str, window: str) -> float | None:
    return {
        ("some", "avg10"): stall.some_avg10,
        ("some", "avg60"): stall.some_avg60,
        ("full", "avg10"): stall.full_avg10,
        ("full", "avg60"): stall.full_avg60,
    }.get((kind, window))


def _discounted(requirement: StallRequirement, snapshot: NodeSnapshot, *, name: str, seen: float) -> StallCheck:
    if requirement.scope is StallScope.SYSTEM:
        return StallCheck(True, f"{name} is {seen:g}%")
    limited = 0.0
    for view in snapshot.pods:
        if view.usage is None or not at_own_limit(view):
            continue
        own = view.usage.memory_stall_some_avg10
        if own is None or not 0.0 <= own <= 100.0:
            return StallCheck(
                False, f"{name} is {seen:g}%, but {view.pod.key} is at its own limit and its stall is not known"
            )
        limited += own
    rest = max(0.0, seen - limited)
    if rest >= requirement.at_least:
        return StallCheck(True, f"{name} is {seen:g}%")
    return StallCheck(False, f"{name} is {seen:g}%, {rest:g}% without the pods at their own limit")


def at_own_limit(view: PodView) -> bool:
    """Whether a pod, or one of its containers, stands at its own memory limit.

    The pod is held to its limit with its page cache; of a container only the working set is known, so a container
    that fills its limit with file cache alone is seen where the whole pod is limited.
    """
    usage = view.usage
    if usage is None:
        return False
    used = usage.memory_usage if usage.memory_usage is not None else usage.memory_working_set
    if _reaches(used, usage.memory_limit):
        return True
    limits = {container.name: container.limits.memory for container in view.pod.containers}
    names = {container.container_id: container.name for container in view.pod.containers if container.container_id}
    return any(
        _reaches(container.memory_working_set, limits.get(container.name or names.get(container.container_id, "")))
        for container in usage.containers
    )


def _reaches(used: int | None, limit: int | None) -> bool:
    return used is not None and limit is not None and limit > 0 and used >= AT_LIMIT * limit


def needs_pod_stalls(thresholds: Iterable[Threshold]) -> bool:
    """Whether any of these needs the pods' own stalls."""
    return any(threshold.require_stall is not None for threshold in thresholds)

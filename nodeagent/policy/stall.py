"""Check the required stall of a threshold: pressure stall information (PSI) as a second condition beside its level.

Promises:

1. Stall alone never evicts. `thresholds` calls this module only for thresholds whose level is met.
2. An unknown stall does not fulfil the requirement: no PSI, a stale or implausible value, a pod at its limit whose own
   stall is unknown. CPU pressure never fulfils it.
3. Stall that pods cause at their own memory limit is subtracted.

Theory of operation. Reclaim inside a limited cgroup is charged to every ancestor. A pod with heavy file I/O at its own
limit raises the memory and I/O pressure of the whole node while most of the node's memory is free; talos (issues 12526
and 13746) and systemd-oomd (issue 23606) killed other processes for it.

At any moment that counts as `some` for an ancestor, a task below it stalls, so the ancestor's `some` is at most the sum
over its parts. The rest after subtracting the limited pods' `some` is therefore a lower bound of the stall with another
cause. `full` is at most `some`, so the same subtraction is at worst too large. Only avg10 of pods is read; it also
stands for their avg60.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from nodeagent.model import NodeSnapshot, PodView, Stall, StallRequirement, StallScope, Threshold

AT_LIMIT: Final = 0.98
"""Share of its own limit from which a pod counts as being at it: reclaim starts below the limit itself, because charges
come in batches of up to 64 pages per CPU."""

CLOCK_SLACK_S: Final = 1.0
"""A sample may be this much newer than `now`, because it is read while the decision is prepared."""


class StallCheck(NamedTuple):
    """The result of the check, with its numbers."""

    holds: bool
    reason: str


def check_stall(
    requirement: StallRequirement, snapshot: NodeSnapshot, *, now: float, stale_after_s: float
) -> StallCheck:
    """Whether the snapshot contains the required stall, without the stall of pods at their own limit."""
    name = f"{requirement.resource} {requirement.kind} {requirement.window} of {requirement.scope.value}"
    if requirement.resource == "cpu":
        return StallCheck(False, f"{name}: CPU pressure is never used")
    stall = _find(requirement, snapshot)
    if stall is None:
        return StallCheck(False, f"{name} unknown: this node reports no such PSI")
    if not 0.0 <= now - stall.read_at + CLOCK_SLACK_S <= stale_after_s + CLOCK_SLACK_S:
        return StallCheck(False, f"{name} unknown: read {now - stall.read_at:.1f}s ago")
    value = _value(stall, kind=requirement.kind, window=requirement.window)
    if value is None or not 0.0 <= value <= 100.0:
        return StallCheck(False, f"{name} unknown: {value} is not a percentage")
    if not value >= requirement.at_least:
        return StallCheck(False, f"{name} is {value:g}%, needs {requirement.at_least:g}%")
    return _discounted(requirement, snapshot, name=name, value=value)


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


def _discounted(requirement: StallRequirement, snapshot: NodeSnapshot, *, name: str, value: float) -> StallCheck:
    if requirement.scope is StallScope.SYSTEM:
        return StallCheck(True, f"{name} is {value:g}%")
    limited = 0.0
    for view in snapshot.pods:
        if view.usage is None or not at_own_limit(view):
            continue
        own = view.usage.memory_stall_some_avg10
        if own is None or not 0.0 <= own <= 100.0:
            return StallCheck(
                False, f"{name} is {value:g}%, but {view.pod.key} is at its own limit and its stall is unknown"
            )
        limited += own
    rest = max(0.0, value - limited)
    if rest >= requirement.at_least:
        return StallCheck(True, f"{name} is {value:g}%")
    return StallCheck(False, f"{name} is {value:g}%, {rest:g}% without the pods at their own limit")


def at_own_limit(view: PodView) -> bool:
    """True if a pod, or one of its containers, is at its own memory limit.

    A pod's limit includes its page cache. Of a container only the working set is read, so a container that fills its
    limit with file cache alone counts only if the whole pod is limited.
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
    """True if any threshold needs the pods' own stalls."""
    return any(threshold.require_stall is not None for threshold in thresholds)

"""Tell a disk that images fill from one that pods fill.

A kubelet keeps images that nobody uses until the disk is 85% full (`imageGCHighThresholdPercent`): healthy nodes are
between 80% and 85% full for weeks. The built-in thresholds of imagefs, 20% and 17%, are above that, because a kubelet
evicts pods at 15%. Evictions would help no such node, and the condition would keep pods off it.

So a built-in threshold of imagefs counts as not met while `COLLECTED_BELOW` percent of the capacity are left, unless
pods fill the disk: at the rate of the last ten minutes within an hour, or at that of the last half minute within
`SOON_FULL_S`. With less left, the kubelet has had its chance. A threshold of another value is judged as it is written.
So is every one if the agent removes images itself (a reclaim action of kind `images`), with `reclaim.waitForKubelet:
0s` and with the kubelet's order.
"""

from collections.abc import Sequence
from typing import Final

from nodeagent.config import defaults
from nodeagent.config.schema import Config, ReclaimKind
from nodeagent.model import (
    NodeSnapshot,
    RefusalCode,
    Signal,
    SignalVerdict,
    ThresholdVerdict,
    units,
)
from nodeagent.policy import fresh_usage, reclaim, thresholds

COLLECTED_BELOW: Final = 14
"""Percent of the capacity. At 15% a kubelet collects images at once, because its own threshold is met; while nothing
fills the disk within ten minutes, the next percent takes 40 s."""
PODS_FILL_S: Final = 3600.0
"""Pods that fill the disk within this time at the rate of the last ten minutes are the cause of the pressure."""
_BUILT_IN: Final = frozenset({defaults.EVICTION_HARD[Signal.IMAGEFS], defaults.EVICTION_SOFT[Signal.IMAGEFS]})
_SIGNALS: Final = frozenset({Signal.IMAGEFS, Signal.CONTAINERFS})
"""The thresholds of containerfs are those of imagefs where both are one file system apart from nodefs."""


def without_images(
    judged: Sequence[SignalVerdict], snapshot: NodeSnapshot, *, now: float, config: Config
) -> tuple[SignalVerdict, ...]:
    """The verdicts; a built-in threshold of imagefs that only images are below is not met."""
    if config.ranking.kubelet or not config.reclaim.wait_for_kubelet_s:
        return tuple(judged)
    return tuple(
        [
            _without_images(verdict, snapshot, now=now, config=config) if verdict.signal in _SIGNALS else verdict
            for verdict in judged
        ]
    )


def _without_images(verdict: SignalVerdict, snapshot: NodeSnapshot, *, now: float, config: Config) -> SignalVerdict:
    available, capacity = verdict.observation.available, verdict.observation.capacity
    if available is None or capacity is None or available * 100 < capacity * COLLECTED_BELOW:
        return verdict
    removes_images = any(
        action.kind is ReclaimKind.IMAGES and reclaim.has_effect(action, verdict.signal, snapshot.layout)
        for action in config.reclaim.actions
    )
    images_alone = [each for each in verdict.thresholds if each.met and each.threshold.value in _BUILT_IN]
    if removes_images or not images_alone or _pods_fill_it(verdict, snapshot, available, now=now):
        return verdict
    reason = (
        f"{verdict.signal.value}: {units.format_amount(available)} of {units.format_amount(capacity)} are left, and "
        "pods do not fill it; the kubelet removes images that nobody uses below 15%"
    )
    judged = tuple([_not_met(each, reason) if each in images_alone else each for each in verdict.thresholds])
    return verdict._replace(thresholds=judged, state=thresholds.signal_state((), judged))


def _not_met(verdict: ThresholdVerdict, reason: str) -> ThresholdVerdict:
    return verdict._replace(
        met=False, active_since=None, due=False, not_due_reason=reason, not_due_code=RefusalCode.IMAGES_FIRST
    )


def _pods_fill_it(verdict: SignalVerdict, snapshot: NodeSnapshot, available: int, *, now: float) -> bool:
    trace = fresh_usage.newest_trace(snapshot, verdict.signal, now=now)
    if trace is None or trace.first.at == trace.last.at:
        trend = verdict.trend
        return (
            trend is not None and trend.to_exhaustion_s is not None and trend.to_exhaustion_s <= fresh_usage.SOON_FULL_S
        )
    for since, within_s in ((trace.first, PODS_FILL_S), (trace.recent, fresh_usage.SOON_FULL_S)):
        rest, pods = fresh_usage.growth(since, trace, verdict.signal)
        if pods > max(0, rest) and pods / (trace.last.at - since.at) * within_s >= available:
            return True
    return False

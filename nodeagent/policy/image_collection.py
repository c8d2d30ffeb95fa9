"""Tell a disk that images fill from one that pods fill.

A kubelet keeps images that nobody uses until the disk is 85% full (`imageGCHighThresholdPercent`): healthy nodes are
between 80% and 85% full for weeks. The built-in thresholds of imagefs, 20% and 17%, are above that, because a kubelet
evicts pods at 15%. Evictions would help no such node, and the condition would keep pods off it.

So a built-in threshold of imagefs counts as not met until the kubelet has had its chance to remove images (`level`),
unless pods fill the disk and images do not make up for it:

* pods fill it at the rate of the last ten minutes within an hour, or at that of the last half minute within
  `SOON_FULL_S`;
* the images that no pod uses, by the Node's status, are not known, or too few: without them, at the level at which the
  kubelet removes them, the threshold would still be met.

A threshold of another value is judged as it is written. So is every one if the agent removes images itself (a reclaim
action of kind `images`), with `reclaim.waitForKubelet: 0s` and with the kubelet's order.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from nodeagent.config import defaults, resolve
from nodeagent.config.schema import Config, ReclaimKind
from nodeagent.model import (
    Amount,
    NodeSnapshot,
    RefusalCode,
    Signal,
    SignalVerdict,
    Threshold,
    ThresholdVerdict,
    units,
)
from nodeagent.policy import fresh_usage, reclaim, thresholds

KUBELET_COLLECTS_BELOW: Final = Amount(None, 15.0, "15%")
"""Of a kubelet that is not configured: its threshold of imagefs is met, so it removes images at once. The periodic
collection begins there too."""
ITS_CHANCE: Final = Amount(None, 1.0, "1%")
"""Of the capacity, below the kubelet's level: while nothing fills the disk within ten minutes, this takes 40 s."""
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
    if available is None or capacity is None:
        return verdict
    removes_images = any(
        action.kind is ReclaimKind.IMAGES and reclaim.has_effect(action, verdict.signal, snapshot.layout)
        for action in config.reclaim.actions
    )
    waiting = [
        each
        for each in verdict.thresholds
        if each.met and each.threshold.value in _BUILT_IN and available >= level(each.threshold, capacity=capacity)
    ]
    if removes_images or not waiting:
        return verdict
    filled = _pods_fill_it(verdict, snapshot, available, now=now)
    judged = tuple(
        [
            _not_met(each, _reason(verdict, each.threshold, capacity, snapshot.unused_images, filled=filled))
            if each in waiting and not (filled and _is_met_without_images(each, snapshot.unused_images, capacity))
            else each
            for each in verdict.thresholds
        ]
    )
    return verdict._replace(thresholds=judged, state=thresholds.signal_state((), judged))


def level(threshold: Threshold, *, capacity: int) -> int:
    """What is left, in bytes, when the kubelet has had its chance to remove images."""
    return _kubelet_collects_below(threshold, capacity) - (resolve.resolve_amount(ITS_CHANCE, capacity=capacity) or 0)


def left_to_kubelet(judged: Iterable[SignalVerdict]) -> tuple[ThresholdVerdict, ...]:
    """The thresholds that count as not met because of images, of a result of `without_images`."""
    return tuple(
        [each for verdict in judged for each in verdict.thresholds if each.not_due_code is RefusalCode.IMAGES_FIRST]
    )


def next_thresholds(judged: Iterable[SignalVerdict]) -> Mapping[Threshold, Threshold]:
    """The built-in thresholds of a disk that only images fill, each with itself at the level at which it counts."""
    return {
        each.threshold: each.threshold._replace(
            value=_bytes(level(each.threshold, capacity=capacity)), above_kubelet=()
        )
        for verdict in judged
        if (capacity := verdict.observation.capacity) is not None and left_to_kubelet((verdict,))
        for each in verdict.thresholds
        if each.threshold.value in _BUILT_IN and not each.met
    }


def _bytes(amount: int) -> Amount:
    return Amount(amount, None, units.format_quantity(amount))


def _kubelet_collects_below(threshold: Threshold, capacity: int) -> int:
    levels = [KUBELET_COLLECTS_BELOW, *[each.kubelet for each in threshold.above_kubelet]]
    return max([resolve.resolve_amount(each, capacity=capacity) or 0 for each in levels])


def _is_met_without_images(verdict: ThresholdVerdict, unused: int | None, capacity: int) -> bool:
    """True if the threshold would be met after the kubelet has removed the unused images; also if these are unknown."""
    if unused is None or verdict.value is None:
        return True
    return _kubelet_collects_below(verdict.threshold, capacity) + unused < verdict.value


def _reason(verdict: SignalVerdict, threshold: Threshold, capacity: int, unused: int | None, *, filled: bool) -> str:
    """Why the threshold is not met."""
    available = verdict.observation.available or 0
    left = f"{verdict.signal.value}: {units.format_amount(available)} of {units.format_amount(capacity)} are left"
    collects = units.format_amount(_kubelet_collects_below(threshold, capacity))
    if filled and unused is not None:
        return (
            f"{left}; pods fill it, and below {collects} the kubelet removes images that nobody uses, "
            f"{units.format_amount(unused)} now"
        )
    return f"{left}, and pods do not fill it; below {collects} the kubelet removes images that nobody uses"


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

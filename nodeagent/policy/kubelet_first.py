"""Leave a disk to the kubelet that pods do not fill, or that the removal of unused images would relieve.

The built-in thresholds of disks are above a kubelet's, so that pods that fill a disk are evicted before a kubelet does
it. A disk that stays where it is needs no eviction: many healthy nodes are 85% to 90% full for months. And a kubelet
keeps images that nobody uses until the disk is 85% full (`imageGCHighThresholdPercent`). Evictions would help no such
node, and the condition would keep pods off it.

So a built-in threshold of a disk counts as not met

* while pods do not fill the disk (`_pods_fill_it`), until the kubelet's own threshold of that signal is crossed
  (`stable-disk`);
* while pods fill it, but the images that no pod uses, by the Node's status, would free enough: until the kubelet has
  had its chance to remove them (`images-first`).

A threshold of another value is judged as it is written. So is every one of a signal for which a reclaim action is
configured, and each with `reclaim.waitForKubelet: 0s` and with the kubelet's order.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.config import defaults, resolve
from nodeagent.config.schema import Config, ReclaimKind
from nodeagent.model import (
    CONTAINERFS_SIGNALS,
    DISK_SIGNALS,
    SIGNAL_TABLE,
    Amount,
    DiskLayout,
    DiskPoint,
    DiskTrace,
    NodeSnapshot,
    Note,
    NoteKind,
    RefusalCode,
    Signal,
    SignalVerdict,
    Threshold,
    ThresholdVerdict,
    Unit,
    units,
)
from nodeagent.policy import fresh_usage, reclaim, thresholds

KUBELET_BYTES: Final = defaults.KUBELET_EVICTION_HARD[Signal.NODEFS]
"""Where a kubelet whose configuration is not known acts, also for imagefs: a kubelet of EKS has no threshold there, one
of k3s has 5%, and their nodes may be below the default of 15% for months."""
KUBELET_INODES: Final = defaults.KUBELET_EVICTION_HARD[Signal.NODEFS_INODES]
KUBELET_COLLECTS_BELOW: Final = Amount(None, 15.0, "15%")
"""Where a kubelet removes images: its periodic collection by default, and its own threshold of imagefs."""
ITS_CHANCE: Final = Amount(None, 1.0, "1%")
"""Of the capacity, below the level at which a kubelet removes images: a disk that fills within an hour takes four
minutes for this, and the collection comes every five."""
PODS_FILL_S: Final = 3600.0
"""Pods that fill the disk within this time at the rate of the last ten minutes are the cause of the pressure."""
HARD_LEAD_S: Final = 120.0
"""Pods that fill a disk more slowly are evicted this long before the kubelet would evict. An eviction of the hard tier
takes half a minute at most."""
SOFT_LEAD_S: Final = 600.0
"""As above, in the soft tier: a grace period, a termination, and rather before the hard tier."""


_CODES: Final = frozenset({RefusalCode.STABLE_DISK, RefusalCode.IMAGES_FIRST})


def _built_in(*signals: Signal) -> frozenset[Amount]:
    return frozenset(
        amounts[signal] for signal in signals for amounts in (defaults.EVICTION_HARD, defaults.EVICTION_SOFT)
    )


_BUILT_IN: Final[Mapping[Signal, frozenset[Amount]]] = {
    **{signal: _built_in(signal) for signal in DISK_SIGNALS.difference(CONTAINERFS_SIGNALS)},
    Signal.CONTAINERFS: _built_in(Signal.NODEFS, Signal.IMAGEFS),
    Signal.CONTAINERFS_INODES: _built_in(Signal.NODEFS_INODES, Signal.IMAGEFS_INODES),
}
"""The thresholds of containerfs are those of nodefs or imagefs."""


class _Filling(NamedTuple):
    """How pods fill the file system of a signal."""

    per_s: float = 0.0
    """At the rate of the last ten minutes. 0: they do not, or something else fills it faster."""
    soon_full: bool = False
    """At the present rate it is full within `fresh_usage.SOON_FULL_S`."""


def leave_to_kubelet(
    judged: Sequence[SignalVerdict], snapshot: NodeSnapshot, *, now: float, config: Config
) -> tuple[SignalVerdict, ...]:
    """The verdicts; the built-in thresholds of disks that are left to the kubelet are not met."""
    if config.ranking.kubelet or not config.reclaim.wait_for_kubelet_s:
        return tuple(judged)
    return tuple(
        [
            _without_left(verdict, snapshot, now=now, config=config) if verdict.signal in DISK_SIGNALS else verdict
            for verdict in judged
        ]
    )


def _without_left(verdict: SignalVerdict, snapshot: NodeSnapshot, *, now: float, config: Config) -> SignalVerdict:
    available, capacity = verdict.observation.available, verdict.observation.capacity
    if available is None or capacity is None or not any(_is_built_in(each) and each.met for each in verdict.thresholds):
        return verdict
    if any(reclaim.has_effect(action, verdict.signal, snapshot.layout) for action in config.reclaim.actions):
        return verdict
    filling = _filling(verdict, snapshot, available, now=now)
    judged = tuple([_judge(each, available, capacity, snapshot, filling) for each in verdict.thresholds])
    if judged == verdict.thresholds:
        return verdict
    return verdict._replace(thresholds=judged, state=thresholds.signal_state((), judged))


def _judge(
    verdict: ThresholdVerdict, available: int, capacity: int, snapshot: NodeSnapshot, filling: _Filling
) -> ThresholdVerdict:
    """The verdict, which is not met if the threshold is left to the kubelet."""
    threshold, value = verdict.threshold, verdict.value
    if not (verdict.met and _is_built_in(verdict)) or value is None:
        return verdict
    if not _pods_fill_it(threshold, available, capacity, filling):
        code = RefusalCode.STABLE_DISK
    elif _images_suffice(threshold, value, capacity, snapshot):
        code = RefusalCode.IMAGES_FIRST
    else:
        return verdict
    if available < _counts_below(threshold, code, capacity, snapshot.layout):
        return verdict
    reason = _reason(threshold, code, available, capacity, snapshot)
    return verdict._replace(met=False, active_since=None, due=False, not_due_reason=reason, not_due_code=code)


def left_to_kubelet(judged: Iterable[SignalVerdict]) -> tuple[ThresholdVerdict, ...]:
    """The thresholds that count as not met, of a result of `leave_to_kubelet`."""
    return tuple([each for verdict in judged for each in verdict.thresholds if each.not_due_code in _CODES])


def notes(left: Iterable[ThresholdVerdict]) -> tuple[Note, ...]:
    """Why these thresholds count as not met. No refusal: a healthy disk may be left to the kubelet for months."""
    return tuple(dict.fromkeys([Note(NoteKind.KUBELET, each.not_due_reason) for each in left]))


def next_thresholds(judged: Iterable[SignalVerdict], layout: DiskLayout) -> Mapping[Threshold, Threshold]:
    """The thresholds of the signals that are left to the kubelet, each with itself at the level at which it counts."""
    return {
        each.threshold: _at_level(each.threshold, left[0].not_due_code, capacity, layout)
        for verdict in judged
        if (left := left_to_kubelet((verdict,))) and (capacity := verdict.observation.capacity) is not None
        for each in verdict.thresholds
        if _is_built_in(each) and not each.met
    }


def _at_level(threshold: Threshold, code: RefusalCode | None, capacity: int, layout: DiskLayout) -> Threshold:
    value = resolve.resolve_threshold(threshold, capacity=capacity) or 0
    level = min(value, _counts_below(threshold, code, capacity, layout))
    text = units.format_amount(level, SIGNAL_TABLE[threshold.signal].unit)
    return threshold._replace(value=Amount(level, None, text), above_kubelet=())


def _is_built_in(verdict: ThresholdVerdict) -> bool:
    return verdict.threshold.value in _BUILT_IN[verdict.threshold.signal]


# --- levels


def _counts_below(threshold: Threshold, code: RefusalCode | None, capacity: int, layout: DiskLayout) -> int:
    """The level below which the threshold is no longer left to the kubelet for this reason."""
    if not _images_free(threshold.signal, layout):
        return _kubelet_acts_below(threshold, capacity)
    collected = _kubelet_collects_below(threshold, capacity) - _resolve(ITS_CHANCE, capacity)
    return collected if code is RefusalCode.IMAGES_FIRST else min(collected, _kubelet_acts_below(threshold, capacity))


def _kubelet_acts_below(threshold: Threshold, capacity: int) -> int:
    """The kubelet's own threshold of this signal."""
    known = [each.kubelet for each in threshold.above_kubelet]
    unknown = KUBELET_BYTES if SIGNAL_TABLE[threshold.signal].unit is Unit.BYTES else KUBELET_INODES
    return max([_resolve(each, capacity) for each in known or [unknown]])


def _kubelet_collects_below(threshold: Threshold, capacity: int) -> int:
    levels = [KUBELET_COLLECTS_BELOW, *[each.kubelet for each in threshold.above_kubelet]]
    return max([_resolve(each, capacity) for each in levels])


def _resolve(amount: Amount, capacity: int) -> int:
    return resolve.resolve_amount(amount, capacity=capacity) or 0


# --- facts


def _images_suffice(threshold: Threshold, value: int, capacity: int, snapshot: NodeSnapshot) -> bool:
    """True if the threshold is not met after the kubelet has removed the unused images; False if they are unknown."""
    unused = snapshot.unused_images
    if not unused or not _images_free(threshold.signal, snapshot.layout):
        return False
    return _kubelet_collects_below(threshold, capacity) + unused >= value


def _images_free(signal: Signal, layout: DiskLayout) -> bool:
    """Whether the removal of images frees bytes of this signal."""
    no_effect = reclaim.NO_EFFECT.get((ReclaimKind.IMAGES, layout), ())
    return SIGNAL_TABLE[signal].unit is Unit.BYTES and signal not in no_effect


def _pods_fill_it(threshold: Threshold, available: int, capacity: int, filling: _Filling) -> bool:
    lead_s = HARD_LEAD_S if threshold.hard else SOFT_LEAD_S
    left_to_kubelets = available - _kubelet_acts_below(threshold, capacity)
    return filling.soon_full or (
        filling.per_s > 0.0 and (filling.per_s * PODS_FILL_S >= available or filling.per_s * lead_s >= left_to_kubelets)
    )


def _filling(verdict: SignalVerdict, snapshot: NodeSnapshot, available: int, *, now: float) -> _Filling:
    trace = fresh_usage.newest_trace(snapshot, verdict.signal, now=now)
    if trace is None or trace.first.at == trace.last.at:
        full_in_s = verdict.trend.to_exhaustion_s if verdict.trend is not None else None
        return _Filling(soon_full=full_in_s is not None and full_in_s <= fresh_usage.SOON_FULL_S)
    per_s, recent_per_s = [_rate(since, trace, verdict.signal) for since in (trace.first, trace.recent)]
    return _Filling(per_s, recent_per_s * fresh_usage.SOON_FULL_S >= available)


def _rate(since: DiskPoint, trace: DiskTrace, signal: Signal) -> float:
    """What pods add in a second, if nothing else adds more; else 0."""
    rest, pods = fresh_usage.growth(since, trace, signal)
    return pods / (trace.last.at - since.at) if pods > max(0, rest) else 0.0


# --- words


def _reason(threshold: Threshold, code: RefusalCode, available: int, capacity: int, snapshot: NodeSnapshot) -> str:
    """Why the threshold is not met."""

    def words(amount: int) -> str:
        return units.format_amount(amount, SIGNAL_TABLE[threshold.signal].unit)

    left = f"{threshold.signal.value}: {words(available)} of {words(capacity)} are left"
    if code is RefusalCode.IMAGES_FIRST:
        return (
            f"{left}; pods fill it, and below {words(_kubelet_collects_below(threshold, capacity))} the kubelet "
            f"removes images that nobody uses, {words(snapshot.unused_images or 0)} now"
        )
    level = _counts_below(threshold, code, capacity, snapshot.layout)
    return f"{left}, and pods are not seen to fill it; left to the kubelet until {words(level)} are left"

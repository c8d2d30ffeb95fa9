"""Series of the last decision and its snapshot: signals, thresholds, pods, disks and conditions as they are now.

Pure functions, called by the thread that renders a scrape. An unknown value has no series, never a zero.
"""

import collections
from collections.abc import Iterator
from typing import Final

from nodeagent.model import (
    ConditionStatus,
    MemoryModel,
    NodeSnapshot,
    Plan,
    QOSClass,
    SignalState,
    SignalVerdict,
    Trend,
)
from nodeagent.policy import headroom
from nodeagent.telemetry import label_counts, metric_families
from nodeagent.telemetry.exposition import Sample


def samples(plan: Plan, snapshot: NodeSnapshot) -> Iterator[Sample]:
    """Those of each signal, then those of the node."""
    for verdict in plan.signals:
        yield from _signal(verdict, plan, snapshot)
    yield from _node(plan, snapshot)


def _signal(verdict: SignalVerdict, plan: Plan, snapshot: NodeSnapshot) -> Iterator[Sample]:
    signal, observation = str(verdict.signal), verdict.observation
    unit = metric_families.unit_word(signal)
    if observation.available is not None:
        yield Sample(f"nodeagent_signal_available_{unit}", (signal,), observation.available)
    if observation.capacity is not None:
        yield Sample(f"nodeagent_signal_capacity_{unit}", (signal,), observation.capacity)
    for state in SignalState:
        yield Sample("nodeagent_signal_state", (signal, state), int(verdict.state is state))
    yield from _thresholds(verdict, unit, plan, snapshot)
    if verdict.trend is not None:
        yield from _trend(verdict.trend, signal, unit)


def _thresholds(verdict: SignalVerdict, unit: str, plan: Plan, snapshot: NodeSnapshot) -> Iterator[Sample]:
    """One threshold for each tier: of two (a soft threshold without grace is hard) the one that is met first."""
    first = {}
    for each in sorted(verdict.thresholds, key=lambda each: each.value or 0):
        first["hard" if each.threshold.hard else "soft"] = each
    for tier, each in first.items():
        labels = (str(verdict.signal), tier)
        if each.value is not None:
            yield Sample(f"nodeagent_threshold_{unit}", labels, each.value)
        margin = headroom.threshold_headroom(snapshot, each)
        if margin is not None:
            yield Sample(f"nodeagent_threshold_headroom_{unit}", labels, margin)
        met_s = plan.made_at - each.active_since if each.met and each.active_since is not None else 0.0
        yield Sample("nodeagent_threshold_met", labels, int(each.met))
        yield Sample("nodeagent_threshold_met_seconds", labels, max(0.0, met_s))
        yield Sample("nodeagent_threshold_due", labels, int(each.due))


def _trend(trend: Trend, signal: str, unit: str) -> Iterator[Sample]:
    yield Sample(f"nodeagent_signal_change_{unit}_per_second", (signal,), trend.rate_per_s)
    for name, seconds in (("threshold", trend.to_threshold_s), ("exhaustion", trend.to_exhaustion_s)):
        value = seconds if seconds is not None else float("inf")
        yield Sample(f"nodeagent_signal_time_to_{name}_seconds", (signal,), value)
    yield Sample("nodeagent_signal_trend_confidence_ratio", (signal,), trend.confidence)


_FIGURES: Final = (MemoryModel.WORKING_SET, MemoryModel.MEM_AVAILABLE)
"""In the order of `MemoryFigures`."""


def _node(plan: Plan, snapshot: NodeSnapshot) -> Iterator[Sample]:
    for verdict in plan.signals:
        for model, available in zip(_FIGURES, verdict.figures or (), strict=False):
            if available is not None:
                yield Sample("nodeagent_memory_figure_bytes", (verdict.signal, model), available)
    if snapshot.memory is not None:
        yield Sample("nodeagent_swap_total_bytes", (), snapshot.memory.swap_total)
        yield Sample("nodeagent_swap_free_bytes", (), snapshot.memory.swap_free)
        yield Sample("nodeagent_zram_memory_bytes", (), snapshot.memory.zram)
    if snapshot.zombies is not None:
        yield Sample("nodeagent_zombies", (), snapshot.zombies.total)
        yield Sample("nodeagent_zombies_of_host", (), sum(holder.zombies for holder in snapshot.zombies.of_host))
    for stall in snapshot.stalls:
        for kind, total_us in (("some", stall.some_total_us), ("full", stall.full_total_us)):
            if total_us is not None:
                labels = (stall.scope.value, stall.resource, kind)
                yield Sample("nodeagent_pressure_stalled_seconds", labels, total_us / 1e6)
    pods = collections.Counter(view.pod.qos_class for view in snapshot.pods)
    for qos in QOSClass:
        yield Sample("nodeagent_pods", (qos,), pods[qos])
    qualities = [view.usage.disk_usage_quality for view in snapshot.pods if view.usage is not None]
    if any(qualities):
        yield Sample("nodeagent_disk_pods_incomplete", (), sum(not each.complete for each in qualities if each))
    for disk in snapshot.unattributed_disks:
        for signal in disk.signals:
            if metric_families.unit_word(signal) == "bytes":
                yield Sample("nodeagent_disk_unattributed_bytes", (signal,), disk.unattributed_bytes)
            else:
                yield Sample("nodeagent_disk_unattributed_inodes", (signal,), disk.unattributed_inodes)
    refused = collections.Counter(pod.refusals[0].code for pod in plan.ranking if pod.refusals)
    for code, count in refused.most_common(label_counts.MAX_METRIC_SERIES):
        yield Sample("nodeagent_pods_refused", (code,), count)
    for condition in plan.conditions:
        for status in ConditionStatus:
            yield Sample("nodeagent_condition_wanted", (condition.type, status), int(condition.status is status))

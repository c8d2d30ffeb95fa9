"""A recording as series and windows of time: what charts, stories and comparisons are made of.

1. Every collector reads its samples once, oldest first, so that a recording of a week never is in memory.
2. Peaks survive: of every stretch of time the lowest and the highest value are kept (`downsampling`).
3. An unknown value is a gap, never zero.

Theory of operation. `history` feeds all collectors in one pass. The x axis is wall time in epoch seconds, because boot
time starts again with every boot. A time that the agent knows on CLOCK_BOOTTIME (since when a threshold is met) is
converted with the sample that has it.

Windows are what a sample concluded, not recomputed: a recording that was imported from elsewhere has none.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from nodeagent.model import (
    SIGNAL_TABLE,
    ConditionStatus,
    ConditionType,
    DiskLayout,
    NodeSnapshot,
    RecordedSample,
    Signal,
    StallScope,
    Threshold,
    ThresholdVerdict,
)
from nodeagent.policy import effective_thresholds, pod_usage
from nodeagent.report import history_values, record_fields
from nodeagent.report.downsampling import Downsampler, Point
from nodeagent.report.history_values import (
    ConditionWindow,
    EvictionMark,
    History,
    OomKillMark,
    Series,
    ThresholdSeries,
    ThresholdWindow,
)

STRETCHES: Final = 300
"""A chart is about 900 pixels wide, and a stretch has two points."""

# --- series ----------------------------------------------------------------------------------------------------------


class SignalCollector:
    """`available` of each signal as its thresholds compare it, in the order of `SIGNAL_TABLE`. A signal that was never
    read has none."""

    def __init__(self, *, stretches: int = STRETCHES) -> None:
        self._series = {signal: Downsampler(stretches) for signal in SIGNAL_TABLE}
        self._capacities: dict[Signal, int] = {}

    def add(self, sample: RecordedSample) -> None:
        at = sample.snapshot.wall_time
        judged = {verdict.observation.signal: verdict.observation for verdict in sample.signals}
        read = sample.snapshot.observations
        for signal, series in self._series.items():
            observation = judged.get(signal) or read.get(signal)
            if observation is None or observation.implausible:
                series.add(at, None)
                continue
            series.add(at, observation.available)
            capacity = observation.capacity
            if capacity is not None and capacity > self._capacities.get(signal, 0):
                self._capacities[signal] = capacity

    def result(self) -> tuple[Series, ...]:
        return tuple(
            Series(signal.value, SIGNAL_TABLE[signal].unit, points, signal, self._capacities.get(signal))
            for signal, points in ((signal, series.points()) for signal, series in self._series.items())
            if any(point.value is not None for point in points)
        )


class StallCollector:
    """PSI avg10 of a resource in percent, `some` and `full` of each scope that was read."""

    def __init__(self, resource: str = "memory", *, stretches: int = STRETCHES) -> None:
        self._resource = resource
        self._stretches = stretches
        self._series: dict[tuple[StallScope, str], Downsampler] = {}

    def add(self, sample: RecordedSample) -> None:
        at = sample.snapshot.wall_time
        for stall in sample.snapshot.stalls:
            if stall.resource == self._resource:
                self._add(stall.scope, "some", at, stall.some_avg10)
                self._add(stall.scope, "full", at, stall.full_avg10)

    def _add(self, scope: StallScope, kind: str, at: float, value: float | None) -> None:
        series = self._series.get((scope, kind))
        if series is None:
            if value is None:
                return
            series = self._series[scope, kind] = Downsampler(self._stretches)
        series.add(at, value if value is not None and math.isfinite(value) else None)

    def result(self) -> tuple[Series, ...]:
        return tuple(
            Series(f"{self._resource} {kind} ({scope.value})", history_values.PERCENT, series.points())
            for (scope, kind), series in self._series.items()
        )


class _Lowest:
    """The sample with the least available of each stretch of time, at most `2 * stretches` of them."""

    def __init__(self, signal: Signal, stretches: int) -> None:
        self._signal = signal
        self._most = 2 * stretches
        self._width = 0.1
        self._kept: list[tuple[float, float, NodeSnapshot]] = []
        """Begin of the stretch, available, snapshot."""
        self._end = -math.inf

    def add(self, snapshot: NodeSnapshot) -> None:
        observation = snapshot.observations.get(self._signal)
        unknown = observation is None or observation.available is None
        available = math.inf if unknown else float(observation.available)  # type: ignore[union-attr, arg-type]
        at = snapshot.wall_time
        if not math.isfinite(at):
            return
        if at < self._end and self._kept:
            start, lowest, _ = self._kept[-1]
            if available < lowest:
                self._kept[-1] = (start, available, snapshot)
            return
        if len(self._kept) >= self._most:
            self._coarsen()
        self._kept.append((at, available, snapshot))
        self._end = at + self._width

    def snapshots(self) -> list[NodeSnapshot]:
        return [snapshot for _, _, snapshot in self._kept]

    def _coarsen(self) -> None:
        while len(self._kept) >= self._most:
            self._width *= 2
            kept: list[tuple[float, float, NodeSnapshot]] = []
            for each in self._kept:
                if kept and not each[0] - kept[-1][0] >= self._width:
                    if each[1] < kept[-1][1]:
                        kept[-1] = (kept[-1][0], *each[1:])
                else:
                    kept.append(each)
            self._kept = kept


class PodUsageCollector:
    """Usage of the pods with the highest peaks, largest first, then the sum of all others as `OTHER_PODS`.

    All have the same times, so that they can be stacked. Of each stretch of time the sample with the least available is
    taken. A pod that did not exist, or whose usage is unknown, is a gap.
    """

    def __init__(self, signal: Signal = Signal.MEMORY, *, top: int = 8, stretches: int = STRETCHES) -> None:
        self._signal = signal
        self._top = top
        self._lowest = _Lowest(signal, stretches)

    def add(self, sample: RecordedSample) -> None:
        self._lowest.add(sample.snapshot)

    def result(self) -> tuple[Series, ...]:
        snapshots = self._lowest.snapshots()
        each = [usage_by_pod(snapshot, self._signal) for snapshot in snapshots]
        peaks: dict[str, int] = {}
        names: dict[str, str] = {}
        for snapshot, usages in zip(snapshots, each, strict=True):
            names.update((view.pod.uid, view.pod.key) for view in snapshot.pods if view.pod.uid not in names)
            for uid, usage in usages.items():
                peaks[uid] = max(usage, peaks.get(uid, 0))
        largest = sorted(peaks, key=lambda uid: (-peaks[uid], names[uid], uid))[: self._top]
        unit = SIGNAL_TABLE[self._signal].unit
        times = [snapshot.wall_time for snapshot in snapshots]
        found = [
            Series(
                names[uid],
                unit,
                tuple(Point(at, usages.get(uid)) for at, usages in zip(times, each, strict=True)),
                self._signal,
            )
            for uid in largest
        ]
        if len(peaks) > len(largest):
            shown = frozenset(largest)
            sums = [sum(usage for uid, usage in usages.items() if uid not in shown) for usages in each]
            points = tuple(map(Point, times, sums))
            found.append(Series(history_values.OTHER_PODS, unit, points, self._signal))
        return tuple(found)


def usage_by_pod(snapshot: NodeSnapshot, signal: Signal = Signal.MEMORY) -> dict[str, int]:
    """Usage by the pod's UID, without pods whose usage is unknown. For memory the working set."""
    layout = snapshot.layout if snapshot.layout is not DiskLayout.UNKNOWN else DiskLayout.SINGLE
    found = {view.pod.uid: pod_usage.signal_usage(view.usage, signal, layout) for view in snapshot.pods}
    return {uid: usage for uid, usage in found.items() if usage is not None}


# --- thresholds and conditions --------------------------------------------------------------------------------------


class _Met:
    """A threshold and the window in progress."""

    __slots__ = ("began", "due", "last", "points", "threshold")

    def __init__(self, threshold: Threshold) -> None:
        self.threshold = threshold
        self.points: list[Point] = []
        self.last = 0.0
        self.began: float | None = None
        self.due: float | None = None


class ThresholdCollector:
    """Every threshold that was in force: its value, and when it was met."""

    def __init__(self) -> None:
        self._thresholds: dict[Threshold, _Met] = {}
        self._by_identity: dict[str, _Met] = {}
        self._done: list[ThresholdWindow] = []

    def add(self, sample: RecordedSample) -> None:
        at = sample.snapshot.wall_time
        for signal in sample.signals:
            for verdict in signal.thresholds:
                self._add(verdict, at, sample.snapshot.taken_at)

    def _add(self, verdict: ThresholdVerdict, at: float, taken_at: float) -> None:
        met = self._of(verdict.threshold)
        value = verdict.value
        if not met.points or met.points[-1].value != value:
            met.points.append(Point(at, value))
        met.last = at
        if verdict.met:
            if met.began is None:
                since = taken_at if verdict.active_since is None else verdict.active_since
                met.began = at - max(0.0, taken_at - since)
            if met.due is None and verdict.due:
                met.due = at
        elif met.began is not None:
            self._done.append(ThresholdWindow(met.threshold, met.began, met.due, at))
            met.began = met.due = None

    def _of(self, threshold: Threshold) -> _Met:
        # The thresholds of most samples are one and the same objects: the text of the identity is made once for each.
        found = self._thresholds.get(threshold)
        if found is None:
            identity = effective_thresholds.identity(threshold)
            found = self._by_identity.setdefault(identity, _Met(threshold))
            self._thresholds[threshold] = found
        return found

    def series(self) -> tuple[ThresholdSeries, ...]:
        """The values, in the order of the signals; hard ones last."""
        order = list(SIGNAL_TABLE)
        found = [
            ThresholdSeries(
                met.threshold,
                SIGNAL_TABLE[met.threshold.signal].unit,
                (*met.points, *([met.points[-1]._replace(at=met.last)] if met.points[-1].at != met.last else [])),
            )
            for met in self._by_identity.values()
        ]
        return tuple(sorted(found, key=lambda each: (order.index(each.threshold.signal), each.threshold.hard)))

    def windows(self) -> tuple[ThresholdWindow, ...]:
        """The times in which each threshold was met, oldest first."""
        lasting = [
            ThresholdWindow(met.threshold, met.began, met.due, None)
            for met in self._by_identity.values()
            if met.began is not None
        ]
        return tuple(sorted((*self._done, *lasting), key=lambda each: each.began))


class _Held:
    """A condition that is True."""

    __slots__ = ("began", "message", "relieved")

    def __init__(self, began: float) -> None:
        self.began = began
        self.relieved: float | None = None
        self.message = ""


class ConditionCollector:
    """The times in which each condition was True, oldest first."""

    def __init__(self) -> None:
        self._held: dict[ConditionType, _Held] = {}
        self._done: list[ConditionWindow] = []

    def add(self, sample: RecordedSample) -> None:
        at, taken_at = sample.snapshot.wall_time, sample.snapshot.taken_at
        for verdict in sample.conditions:
            held = self._held.get(verdict.type)
            if verdict.status is not ConditionStatus.TRUE:
                if held is not None:
                    del self._held[verdict.type]
                    self._done.append(ConditionWindow(verdict.type, held.began, at, held.relieved, held.message))
                continue
            if held is None:
                held = self._held[verdict.type] = _Held(at - max(0.0, taken_at - verdict.since))
            held.message = verdict.message
            if _any_met(sample, verdict.type):
                held.relieved = None
            elif held.relieved is None:
                held.relieved = at

    def result(self) -> tuple[ConditionWindow, ...]:
        lasting = [
            ConditionWindow(kind, held.began, None, held.relieved, held.message) for kind, held in self._held.items()
        ]
        return tuple(sorted((*self._done, *lasting), key=lambda each: (each.began, each.type)))


def _any_met(sample: RecordedSample, condition: ConditionType) -> bool:
    return any(
        threshold.met
        for verdict in sample.signals
        if SIGNAL_TABLE[verdict.observation.signal].condition is condition
        for threshold in verdict.thresholds
    )


# --- marks -----------------------------------------------------------------------------------------------------------


def evictions(records: Iterable[Mapping[str, Any]]) -> tuple[EvictionMark, ...]:
    """The victims of the decisions in these records, with the outcome of each."""
    marks: list[EvictionMark] = []
    outcomes: dict[tuple[str, str], str] = {}
    for record in records:
        if record.get("record") == "outcome":
            outcomes[str(record.get("planId")), str(record.get("podUid"))] = str(record.get("kind"))
        elif record.get("record") == "decision" and (at := record_fields.number(record.get("wallTime"))) is not None:
            marks.extend(_mark(victim, str(record.get("id")), at) for victim in record_fields.items(record, "victims"))
    return tuple(mark._replace(outcome=outcomes.get((mark.plan_id, mark.uid), "")) for mark in marks)


def _mark(victim: Mapping[str, Any], plan_id: str, at: float) -> EvictionMark:
    threshold = record_fields.mapping(victim, "threshold")
    uid = str(victim.get("uid"))
    return EvictionMark(
        at=at,
        pod=record_fields.pod_name(victim),
        uid=uid,
        plan_id=plan_id,
        signal=str(threshold.get("signal")),
        tier=str(victim.get("tier")),
        method=str(victim.get("method")),
        outcome="",
    )


def oom_kills(records: Iterable[Mapping[str, Any]]) -> tuple[OomKillMark, ...]:
    """The OOM kills in these records."""
    return tuple(
        OomKillMark(
            at=at,
            subject=str(kill.get("pod") or record_fields.mapping(kill, "place").get("path") or "not attributed"),
            report_id=str(record.get("id")),
            number=record_fields.integer(kill.get("number")),
            race_lost=bool(record_fields.mapping(record, "race").get("loss")),
        )
        for record in records
        if record.get("record") == "oom" and (at := record_fields.number(record.get("wallTime"))) is not None
        for kill in record_fields.items(record, "kills")
    )


# --- everything ------------------------------------------------------------------------------------------------------


def history(
    samples: Iterable[RecordedSample], *, top: int = 8, signal: Signal = Signal.MEMORY, stretches: int = STRETCHES
) -> History:
    """Everything in one pass; `pods` by their usage of `signal`."""
    signals, stalls = SignalCollector(stretches=stretches), StallCollector(stretches=stretches)
    thresholds, conditions = ThresholdCollector(), ConditionCollector()
    pods = PodUsageCollector(signal, top=top, stretches=stretches)
    count, began, ended = 0, None, None
    for sample in samples:
        count += 1
        ended = sample.snapshot.wall_time
        began = ended if began is None else began
        for collector in (signals, stalls, thresholds, conditions, pods):
            collector.add(sample)
    return History(
        samples=count,
        began=began,
        ended=ended,
        signals=signals.result(),
        stalls=stalls.result(),
        thresholds=thresholds.series(),
        pods=pods.result(),
        conditions=conditions.result(),
        met=thresholds.windows(),
    )

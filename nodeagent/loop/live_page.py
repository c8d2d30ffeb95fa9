"""The live page at `/`: the last hour of this node, from values that the loop keeps while it passes.

1. The loop is never blocked: it stores references and a few numbers (`remember`); a page is built in the thread of the
   endpoint, at most every `BUILD_EVERY_S`, whoever asks how often.
2. Memory is bounded: `KEPT` rows of numbers, without the snapshots they came from.
3. It reads only: no file, no request, nothing of the decision.

Theory of operation. A row has the available amount of each signal, the largest pods, which thresholds were met and
which conditions True. There is a row every `ROW_EVERY_S`, and every second while a threshold is met, so that the
minutes that matter are dense. The newest snapshot and plan are kept whole, for the tables. Both threads exchange one
tuple at a time.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from nodeagent.config.schema import Config
from nodeagent.model import (
    SIGNAL_TABLE,
    ConditionStatus,
    ConditionType,
    NodeSnapshot,
    Plan,
    Signal,
    Threshold,
    Unit,
)
from nodeagent.policy import ranking
from nodeagent.report import history_values
from nodeagent.report.downsampling import Point
from nodeagent.report.history_values import (
    ConditionWindow,
    EvictionMark,
    History,
    Series,
    ThresholdSeries,
    ThresholdWindow,
)

if TYPE_CHECKING:
    from nodeagent.report.html_page import Html

BUILD_EVERY_S: Final = 2.0
"""A page takes some tens of milliseconds of the interpreter that the loop shares (docs/performance.md)."""
BUILD_EVERY_UNDER_PRESSURE_S: Final = 10.0
"""While a threshold is due the interpreter is needed elsewhere."""
REFRESH_S: Final = 10
"""The browser loads it again. `/?still` does not."""
ROW_EVERY_S: Final = 10.0
ROW_EVERY_UNDER_PRESSURE_S: Final = 1.0
KEPT: Final = 360
"""An hour of calm, or six minutes of pressure."""
KEPT_EVICTIONS: Final = 40
PODS: Final = 8
STILL: Final = "still"


class _Row(NamedTuple):
    wall_time: float
    available: tuple[float | None, ...]
    """In the order of `SIGNAL_TABLE`."""
    pods: tuple[tuple[str, int], ...]
    """Name and working set of the largest, then the sum of the others under `OTHER_PODS`."""
    met: tuple[tuple[Threshold, bool], ...]
    """The thresholds that were met, and whether each was due."""
    conditions: tuple[ConditionType, ...]
    """Those that were True."""


class _Latest(NamedTuple):
    snapshot: NodeSnapshot
    plan: Plan


class LivePage:
    """Keeps the last hour and makes the page of it."""

    def __init__(
        self,
        *,
        config: Callable[[], Config],
        config_source: str,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._config_source = config_source
        self._monotonic = monotonic
        self._latest: _Latest | None = None
        self._rows: deque[_Row] = deque(maxlen=KEPT)
        self._evictions: deque[EvictionMark] = deque(maxlen=KEPT_EVICTIONS)
        self._built: tuple[float, _Latest, str, tuple[Html, ...]] | None = None

    # --- in the loop -------------------------------------------------------------------------------------------------

    def remember(self, plan: Plan, snapshot: NodeSnapshot, *, acts: bool) -> None:
        """Keep this sample. Called once for each decision."""
        self._latest = _Latest(snapshot, plan)
        for victim in plan.victims:
            self._evictions.append(
                EvictionMark(
                    at=snapshot.wall_time,
                    pod=victim.pod.key,
                    uid=victim.pod.uid,
                    plan_id=plan.id,
                    signal=str(victim.threshold.signal),
                    tier=str(victim.tier),
                    method=str(victim.method),
                    outcome="" if acts else "dry-run",
                )
            )
        rows = self._rows
        pressed = any(each.met for verdict in plan.signals for each in verdict.thresholds)
        every_s = ROW_EVERY_UNDER_PRESSURE_S if pressed else ROW_EVERY_S
        # The first sample after the pressure is a row at once: the line would otherwise rise slowly where it jumped.
        same = bool(rows) and bool(rows[-1].met) == pressed
        if same and 0 <= snapshot.wall_time - rows[-1].wall_time < every_s:
            return
        rows.append(_row(plan, snapshot))

    # --- in the thread of the endpoint -------------------------------------------------------------------------------

    def document(self, query: str) -> tuple[bytes, str]:
        """The page for this query, and its Content-Security-Policy."""
        from nodeagent.report import html_page

        still = query == STILL
        title, blocks = self._blocks()
        links = html_page.link("Load this page again every 10 seconds", "/")
        if not still:
            links = html_page.link("Stop loading it again", f"/?{STILL}")
        page = html_page.page(title, [links, *blocks], refresh_s=None if still else REFRESH_S)
        return page.encode("utf-8"), html_page.POLICY

    def _blocks(self) -> "tuple[str, tuple[Html, ...]]":
        # Imported for the first reader: an agent whose page nobody opens does not hold the modules.
        from nodeagent.report import check_page, html_page
        from nodeagent.report.node_report import Report

        latest, built, now = self._latest, self._built, self._monotonic()
        if latest is None:
            return "nodeagent", (html_page.paragraph("no sample yet"),)
        due = any(each.due for verdict in latest.plan.signals for each in verdict.thresholds)
        every_s = BUILD_EVERY_UNDER_PRESSURE_S if due else BUILD_EVERY_S
        if built is not None and (built[1] is latest or now - built[0] < every_s):
            return built[2], built[3]
        config = self._config()
        report = Report(
            snapshot=latest.snapshot,
            plan=ranking.with_key_texts(latest.plan),
            mode=config.mode.value,
            config_source=self._config_source,
            pods_source="this host alone" if latest.snapshot.pods_synced_at is None else "the API server",
            notes=(*latest.snapshot.notes, *latest.plan.notes),
        )
        history = _history(list(self._rows), latest)
        blocks = check_page.blocks(report, history=history, evictions=list(self._evictions))
        self._built = (now, latest, check_page.title(report), blocks)
        return self._built[2], blocks


def _row(plan: Plan, snapshot: NodeSnapshot) -> _Row:
    seen = {verdict.signal: verdict.observation for verdict in plan.signals}
    available = tuple(
        [
            None if observation is None or observation.implausible else observation.available
            for observation in map(seen.get, SIGNAL_TABLE)
        ]
    )
    usage = [
        (view.usage.memory_working_set, number)
        for number, view in enumerate(snapshot.pods)
        if view.usage is not None and view.usage.memory_working_set is not None
    ]
    largest = heapq.nlargest(PODS, usage)
    pods = [(snapshot.pods[number].pod.key, amount) for amount, number in largest]
    if len(usage) > len(largest):
        rest = sum([amount for amount, _ in usage]) - sum([amount for amount, _ in largest])
        pods.append((history_values.OTHER_PODS, rest))
    met = tuple([(each.threshold, each.due) for verdict in plan.signals for each in verdict.thresholds if each.met])
    conditions = tuple([each.type for each in plan.conditions if each.status is ConditionStatus.TRUE])
    return _Row(snapshot.wall_time, available, tuple(pods), met, conditions)


def _history(rows: list[_Row], latest: _Latest) -> History:
    newest = _row(latest.plan, latest.snapshot)
    if not rows or newest.wall_time > rows[-1].wall_time:
        rows.append(newest)
    began, ended = rows[0].wall_time, rows[-1].wall_time
    signals = tuple(
        Series(
            signal.value,
            facts.unit,
            tuple([Point(row.wall_time, row.available[number]) for row in rows]),
            signal,
            latest.snapshot.observations[signal].capacity,
        )
        for number, (signal, facts) in enumerate(SIGNAL_TABLE.items())
        if any(row.available[number] is not None for row in rows)
    )
    thresholds = tuple(
        ThresholdSeries(
            each.threshold, SIGNAL_TABLE[verdict.signal].unit, (Point(began, each.value), Point(ended, each.value))
        )
        for verdict in latest.plan.signals
        for each in verdict.thresholds
    )
    return History(
        samples=len(rows),
        began=began,
        ended=ended,
        signals=signals,
        stalls=(),
        thresholds=thresholds,
        pods=_pods(rows),
        conditions=_conditions(rows),
        met=_met(rows),
    )


def _pods(rows: list[_Row]) -> tuple[Series, ...]:
    """The pods with the highest peaks of the hour. A pod that was not among the largest of a row counts there among the
    others."""
    peaks: dict[str, int] = {}
    for row in rows:
        for name, amount in row.pods:
            if name != history_values.OTHER_PODS:
                peaks[name] = max(amount, peaks.get(name, 0))
    names = sorted(peaks, key=lambda name: (-peaks[name], name))[:PODS]
    kept = frozenset(names)
    lookups = [(row.wall_time, dict(row.pods)) for row in rows]
    series = [
        Series(name, Unit.BYTES, tuple([Point(at, found.get(name)) for at, found in lookups]), Signal.MEMORY)
        for name in names
    ]
    others = [Point(at, sum([each for name, each in found.items() if name not in kept])) for at, found in lookups]
    if any(point.value for point in others):
        series.append(Series(history_values.OTHER_PODS, Unit.BYTES, tuple(others), Signal.MEMORY))
    return tuple(series)


def _conditions(rows: list[_Row]) -> tuple[ConditionWindow, ...]:
    windows: list[ConditionWindow] = []
    held: dict[ConditionType, tuple[float, float | None]] = {}
    for row in rows:
        met = {SIGNAL_TABLE[threshold.signal].condition for threshold, _ in row.met}
        for kind in row.conditions:
            began, relieved = held.get(kind, (row.wall_time, None))
            held[kind] = (began, None if kind in met else relieved or row.wall_time)
        for kind in [kind for kind in held if kind not in row.conditions]:
            began, relieved = held.pop(kind)
            windows.append(ConditionWindow(kind, began, row.wall_time, relieved, ""))
    windows += [ConditionWindow(kind, began, None, relieved, "") for kind, (began, relieved) in held.items()]
    return tuple(sorted(windows, key=lambda each: (each.began, each.type)))


def _met(rows: list[_Row]) -> tuple[ThresholdWindow, ...]:
    windows: list[ThresholdWindow] = []
    held: dict[Threshold, tuple[float, float | None]] = {}
    for row in rows:
        now = dict(row.met)
        for threshold, due in now.items():
            began, since = held.get(threshold, (row.wall_time, None))
            held[threshold] = (began, since if since is not None or not due else row.wall_time)
        for threshold in [threshold for threshold in held if threshold not in now]:
            began, since = held.pop(threshold)
            windows.append(ThresholdWindow(threshold, began, since, row.wall_time))
    windows += [ThresholdWindow(threshold, *times, None) for threshold, times in held.items()]
    return tuple(sorted(windows, key=lambda each: each.began))

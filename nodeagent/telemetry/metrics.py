"""The metrics: the loop stores values that it already has, and a scrape renders them.

1. An observation is a few assignments, without a lock, a growing allocation or a system call. The server's thread makes
   all texts.
2. Series are bounded: the table in `metric_families` times words from fixed lists (signals, tiers, codes), and
   `MAX_METRIC_SERIES` bounds each counter. Names of pods are labels of `pod_series` alone, and only on request.
3. An unknown value has no series, never a zero. Counters with known labels begin at 0 (`initial_series`).

Theory of operation. The loop's thread calls `observe_*`, any thread may call `render`. Current values (signals,
conditions) are computed at the scrape from the last plan and snapshot, which are immutable. Counters are dicts of
integers: a scrape copies them in one step of the interpreter, and may be one observation behind. Counters of other
packages are read at the scrape (`RuntimeCounters`). Ages are computed at the scrape on CLOCK_BOOTTIME, so that they
grow while the loop is stuck and ignore clock jumps.
"""

import collections
import contextlib
import enum
import itertools
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent import __version__
from nodeagent.actuators.conditions import ConditionConflict
from nodeagent.config.schema import Config, Mode
from nodeagent.model import (
    SIGNAL_TABLE,
    ConditionStatus,
    HookOutcome,
    MemoryModel,
    NodeSnapshot,
    OomReport,
    Outcome,
    Plan,
    QOSClass,
    ReclaimOutcome,
    ResizeOutcome,
    SignalState,
    SignalVerdict,
    Trend,
    Unit,
    Victim,
)
from nodeagent.policy import headroom
from nodeagent.records.sample_recorder import RecorderCounts
from nodeagent.telemetry import exposition, initial_series, metric_families, pod_series
from nodeagent.telemetry.exposition import Histogram, Series

MAX_METRIC_SERIES: Final = 500
"""Bound of each counter; further series count as `other`. Evictions have 9 signals x 3 QoS classes x 2 tiers x 15
outcomes = 810 possible series, of which a node has a handful."""
OTHER: Final = "other"
MAX_AWAITED_VICTIMS: Final = 256
"""Victims without an outcome: a decision has at most `relief.maxVictims`, and an outcome follows within seconds."""
STAGE_BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Seconds. A sample takes under 1 ms, a decision some ms, a request some 10 ms; a kubelet is 3 to 9 s late."""
RELIEF_BOUNDS: Final = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
"""Seconds. With a brake and a kill memory is released within one, otherwise after a grace period of 1 to 30 s."""


class SyncStage(enum.StrEnum):
    """The stages that are timed."""

    SAMPLE = "sample"
    """The pods of a full sample, joined with the pods that the API server lists; without the node's own signals."""
    DECIDE = "decide"
    """The policy, from snapshot to plan."""
    SAVE = "save"
    """Writing the state, including fsync and rename."""
    RECHECK = "recheck"
    """The recheck before acting: a second sample and a second verdict."""
    SYNC = "sync"
    """One sync, without its sleep."""
    START_DELAY = "start-delay"
    """How much later than planned a sync started; 0 if it was in time or woken earlier."""
    WAKE_TO_DECISION = "wake-to-decision"
    """From the return of epoll to a plan."""
    DECISION_TO_OUTCOME = "decision-to-outcome"
    """From the plan to the API server's answer for a victim."""


class Failure(enum.StrEnum):
    """Failures of the agent itself."""

    STATE_SAVE = "state-save"
    """The state could not be written."""
    RECORD = "record"
    """A decision or outcome could not be recorded."""
    SYNC = "sync"
    """A sync ended with an error."""
    REPORT = "report"
    """A part that only reports (the recorder of samples, a snapshot, the live page...) ended with an error."""


# --- values of other packages ----------------------------------------------------------------------------------------


class WatchCounters(NamedTuple):
    """Counters of one list and watch since the start."""

    name: str
    """`pods`, `node`...: a fixed word, never a name from the cluster."""
    failures: int
    relists: int


class WalkCounters(NamedTuple):
    """Progress of the walk worker."""

    running: bool
    paths: int
    paths_done: int
    entries: int
    took_s: float
    finished_at: float | None
    """CLOCK_BOOTTIME; None before the first walk has ended."""


class RuntimeCounters(NamedTuple):
    """Counters of other packages; read at each scrape by the server's thread."""

    pods_synced_at: float | None = None
    """CLOCK_BOOTTIME; None: the pods were never listed."""
    condition_conflicts: Sequence[ConditionConflict] = ()
    asserted: frozenset[str] = frozenset()
    """Types of the standard conditions whose True was written by this agent."""
    tainted: frozenset[str] = frozenset()
    """Types of the conditions whose taint is on the Node."""
    watches: Sequence[WatchCounters] = ()
    condition_writes: int = 0
    events_dropped: int = 0
    log_lines_dropped: int = 0
    brakes_active: int = 0
    oom_scores_raised: int = 0
    eviction_requests_in_flight: int = 0
    api_identity: str = ""
    """Whose rights the requests for pods use: `node` or `serviceAccount`; empty: no answer of the API server yet."""
    workers_stuck: Sequence[str] = ()
    """The kind of each stuck thread (`runtime.workers`)."""
    worker_failures: Mapping[str, int] = {}
    """How often workers ended with an error and restarted, by kind."""
    workers_failed: Sequence[str] = ()
    """Workers that have failed for so long that only a new process may help, with the reason."""
    walk: WalkCounters | None = None
    """None: no disk was near a threshold yet."""
    recorder: RecorderCounts | None = None
    """None: samples are not recorded."""
    profiles: Mapping[str, bool] = {}
    """The profiles of the configuration, and whether each applies to this node."""


class Liveness(NamedTuple):
    """The values that the probes judge; instants on CLOCK_BOOTTIME."""

    synced_at: float
    """End of the last sync; before the first, the start of the agent."""
    sampled_at: float | None
    signals_known: int
    """Known signals of the last full sample."""
    pods_synced_at: float | None
    workers_failed: Sequence[str] = ()
    """Workers that only a new process may repair, with the reason."""


class _Awaited(NamedTuple):
    victim: Victim
    made_at: float


class _Counts:
    """Integers by label values, bounded. Those that are `known` begin at 0."""

    __slots__ = ("_labels", "_values")

    def __init__(self, labels: int, known: Iterable[initial_series.Labels] = ()) -> None:
        self._labels = labels
        self._values: dict[tuple[str, ...], int] = dict.fromkeys(known, 0)

    def add(self, *labels: str, by: int = 1) -> None:
        values = self._values
        if labels not in values and len(values) >= MAX_METRIC_SERIES:
            labels = (OTHER,) * self._labels
        values[labels] = values.get(labels, 0) + by

    def series(self, known: Iterable[initial_series.Labels] = ()) -> list[Series]:
        """Of `known`, what was not counted yet is 0."""
        return list((dict.fromkeys(known, 0) | self._values.copy()).items())


class Metrics:
    """The metrics of one agent since its start."""

    def __init__(
        self,
        config: Config,
        *,
        boottime: Callable[[], float],
        runtime_counters: Callable[[], RuntimeCounters] = RuntimeCounters,
    ) -> None:
        """`runtime_counters` is called by the thread that renders; it must not block."""
        self._config = config
        self._boottime = boottime
        self._runtime_counters = runtime_counters
        self._started_wall = time.time()
        self._last: tuple[Plan, NodeSnapshot] | None = None
        self._synced_at = boottime()
        self._syncs = 0
        self._reloaded: bool | None = None
        self._awaited: collections.OrderedDict[tuple[str, str], _Awaited] = collections.OrderedDict()
        self._stages = {stage: Histogram(STAGE_BOUNDS) for stage in SyncStage}
        self._relief_duration = Histogram(RELIEF_BOUNDS)
        self._decisions = _Counts(1, initial_series.single(initial_series.DECISIONS))
        self._refusals = _Counts(1)
        self._evictions = _Counts(4)
        self._predicted = _Counts(1)
        self._measured = _Counts(1)
        self._shortfalls = _Counts(1)
        self._reclaims = _Counts(2)
        self._hooks = _Counts(1)
        self._resizes = _Counts(1)
        self._gained = {unit: _Counts(1) for unit in metric_families.UNIT_WORDS.values()}
        self._oom_kills = _Counts(2, initial_series.OOM_KILLS)
        self._lost_races = _Counts(1, initial_series.single(initial_series.LOST_RACES))
        self._page_cache_reclaimed = 0
        self._wakeups = _Counts(1)
        self._failures = _Counts(1, initial_series.single(Failure))
        self._reloads = _Counts(1, initial_series.single(initial_series.RELOADS))

    # --- observing: the loop's thread only

    def observe_sync(self, *, at: float, reasons: Iterable[str] = ()) -> None:
        """A sync ended; `reasons` are those that `Wakeups.wait` returned before it."""
        self._synced_at = at
        self._syncs += 1
        for reason in reasons:
            self._wakeups.add(reason)

    def observe_plan(self, plan: Plan, snapshot: NodeSnapshot) -> None:
        """A decision was made on this snapshot. Call it before the victims are handed over."""
        self._last = (plan, snapshot)
        due = bool(plan.refusals) or plan.acting_on is not None
        self._decisions.add("evict" if plan.victims else "refuse" if due else "calm")
        for refusal in plan.refusals:
            self._refusals.add(refusal.code)
        for victim in plan.victims:
            self._awaited[plan.id, victim.pod.uid] = _Awaited(victim, plan.made_at)
        while len(self._awaited) > MAX_AWAITED_VICTIMS:
            self._awaited.popitem(last=False)
        for report in plan.relief_reports:
            self._predicted.add(report.signal, by=max(0, report.predicted))
            self._measured.add(report.signal, by=max(0, report.measured))
            self._shortfalls.add(report.signal, by=int(2 * report.measured < report.predicted))
            self._relief_duration.observe(report.took_s)
        for gain in plan.reclaim_reports:
            self._reclaims.add(gain.name, gain.result)
            self._gained[_unit(gain.signal)].add(gain.name, by=max(0, gain.gained))

    def observe_outcome(self, outcome: Outcome) -> None:
        """Count an outcome. The labels of a victim that was not observed are `other`."""
        awaited = self._awaited.pop((outcome.plan_id, outcome.pod_uid), None)
        if awaited is None:
            self._evictions.add(OTHER, OTHER, OTHER, outcome.kind)
            return
        victim = awaited.victim
        self._evictions.add(victim.limit or victim.threshold.signal, victim.pod.qos_class, victim.tier, outcome.kind)
        if outcome.http_status is not None or outcome.kind == "accepted":
            self._stages[SyncStage.DECISION_TO_OUTCOME].observe(max(0.0, outcome.at - awaited.made_at))

    def observe_reclaim(self, outcome: ReclaimOutcome) -> None:
        """Count the page cache that an action has reclaimed. Its gain comes with a later plan."""
        self._page_cache_reclaimed += outcome.reclaimed

    def observe_hook(self, outcome: HookOutcome) -> None:
        """Count the end of a hook."""
        self._hooks.add(outcome.result)

    def observe_resize(self, outcome: ResizeOutcome) -> None:
        """Count what came of a resize."""
        self._resizes.add(outcome.result)

    def observe_stage(self, stage: SyncStage, seconds: float) -> None:
        """One pass through a stage."""
        self._stages[stage].observe(seconds)

    @contextlib.contextmanager
    def timed(self, stage: SyncStage) -> Iterator[None]:
        """Time the body as one pass through a stage; a body that raises is not counted."""
        began = self._boottime()
        yield
        self.observe_stage(stage, self._boottime() - began)

    def observe_oom_kills(self, report: OomReport) -> None:
        """Count OOM kills, and the race that was lost."""
        for kill in report.kills:
            self._oom_kills.add(kill.cause, kill.victim, by=kill.number)
        if report.race is not None:
            self._lost_races.add(report.race.loss)

    def observe_failure(self, failure: Failure) -> None:
        """Count a failure of the agent itself."""
        self._failures.add(failure)

    def observe_reload(self, config: Config | None) -> None:
        """The configuration was reloaded; None: it is invalid and the old one stays in force."""
        self._reloaded = config is not None
        self._reloads.add("applied" if config is not None else "invalid")
        self._config = config if config is not None else self._config

    # --- reading: any thread

    def liveness(self) -> Liveness:
        """The values that the probes judge."""
        last = self._last
        counters = self._runtime_counters()
        if last is None:
            return Liveness(self._synced_at, None, 0, counters.pods_synced_at, counters.workers_failed)
        known = sum(verdict.observation.available is not None for verdict in last[0].signals)
        return Liveness(self._synced_at, last[1].taken_at, known, counters.pods_synced_at, counters.workers_failed)

    def render(self, *, openmetrics: bool = False) -> bytes:
        """The exposition, in the order of `FAMILIES`."""
        series: dict[str, list[Series]] = {}
        for name, labels, value in self._all():
            series.setdefault(name, []).append((labels, value))
        families = [family for family in metric_families.FAMILIES if family.name in series]
        return exposition.render(((family, series[family.name]) for family in families), openmetrics=openmetrics)

    def _all(self) -> Iterator["_Sample"]:
        now, counters, last = self._boottime(), self._runtime_counters(), self._last
        python = sys.version.partition(" ")[0]
        yield _Sample("nodeagent_build_info", (__version__, python), 1)
        yield _Sample("nodeagent_enforcing", (), int(self._config.mode is Mode.ENFORCE))
        if last is not None:
            plan, snapshot = last
            for verdict in plan.signals:
                yield from _signal(verdict, plan, snapshot)
            yield from _node(plan, snapshot)
            yield from itertools.starmap(_Sample, pod_series.samples(snapshot, config=self._config))
            yield _Sample("nodeagent_sample_age_seconds", (), max(0.0, now - snapshot.taken_at))
        if counters.walk is not None:
            yield from _walk(counters.walk, now)
        yield from _cluster(counters, now)
        yield from self._counted()
        yield _Sample("nodeagent_sync_age_seconds", (), max(0.0, now - self._synced_at))
        if self._reloaded is not None:
            yield _Sample("nodeagent_config_last_reload_successful", (), int(self._reloaded))
        for name, applies in counters.profiles.items():
            yield _Sample("nodeagent_profile_active", (name,), int(applies))
        yield _Sample("nodeagent_log_lines_dropped", (), counters.log_lines_dropped)
        yield _Sample("nodeagent_brakes_active", (), counters.brakes_active)
        yield _Sample("nodeagent_oom_scores_raised", (), counters.oom_scores_raised)
        if counters.recorder is not None:
            yield from _recorder(counters.recorder)
        yield from _own_cost(self._started_wall)

    def _counted(self) -> Iterator["_Sample"]:
        yield _Sample("nodeagent_syncs", (), self._syncs)
        plan = self._last[0] if self._last is not None else None
        evictions = initial_series.evictions(self._config, plan) if plan is not None else ()
        relief = tuple(initial_series.relief(plan)) if plan is not None else ()
        for labels, value in self._evictions.series(evictions):
            yield _Sample("nodeagent_evictions", labels, value)
        for name, counts in (
            ("nodeagent_decisions", self._decisions),
            ("nodeagent_refusals", self._refusals),
            ("nodeagent_reclaims", self._reclaims),
            ("nodeagent_hooks", self._hooks),
            ("nodeagent_resizes", self._resizes),
            ("nodeagent_oom_kills", self._oom_kills),
            ("nodeagent_lost_races", self._lost_races),
            ("nodeagent_wakeups", self._wakeups),
            ("nodeagent_failures", self._failures),
            ("nodeagent_config_reloads", self._reloads),
        ):
            for labels, value in counts.series():
                yield _Sample(name, labels, value)
        for word, counts in (("predicted", self._predicted), ("measured", self._measured)):
            for labels, value in counts.series(relief):
                unit = _unit(labels[0])
                yield _Sample(f"nodeagent_relief_{word}_{unit}", labels, value)
        for labels, value in self._shortfalls.series(relief):
            yield _Sample("nodeagent_relief_shortfalls", labels, value)
        for unit, counts in self._gained.items():
            for labels, value in counts.series():
                yield _Sample(f"nodeagent_reclaim_gained_{unit}", labels, value)
        yield _Sample("nodeagent_page_cache_reclaimed_bytes", (), self._page_cache_reclaimed)
        for stage, histogram in self._stages.items():
            yield _Sample("nodeagent_stage_duration_seconds", (stage,), histogram)
        yield _Sample("nodeagent_relief_duration_seconds", (), self._relief_duration)


# --- rows ------------------------------------------------------------------------------------------------------------


class _Sample(NamedTuple):
    name: str
    labels: tuple[str, ...]
    value: int | float | Histogram


_UNITS: Final = {str(signal): metric_families.UNIT_WORDS[facts.unit] for signal, facts in SIGNAL_TABLE.items()}


def _unit(signal: str) -> str:
    return _UNITS.get(signal, metric_families.UNIT_WORDS[Unit.BYTES])


def _signal(verdict: SignalVerdict, plan: Plan, snapshot: NodeSnapshot) -> Iterator[_Sample]:
    signal, observation = str(verdict.signal), verdict.observation
    unit = _unit(signal)
    if observation.available is not None:
        yield _Sample(f"nodeagent_signal_available_{unit}", (signal,), observation.available)
    if observation.capacity is not None:
        yield _Sample(f"nodeagent_signal_capacity_{unit}", (signal,), observation.capacity)
    for state in SignalState:
        yield _Sample("nodeagent_signal_state", (signal, state), int(verdict.state is state))
    yield from _thresholds(verdict, unit, plan, snapshot)
    if verdict.trend is not None:
        yield from _trend(verdict.trend, signal, unit)


def _thresholds(verdict: SignalVerdict, unit: str, plan: Plan, snapshot: NodeSnapshot) -> Iterator[_Sample]:
    """One threshold for each tier: of two (a soft threshold without grace is hard) the one that is met first."""
    first = {}
    for each in sorted(verdict.thresholds, key=lambda each: each.value or 0):
        first["hard" if each.threshold.hard else "soft"] = each
    for tier, each in first.items():
        labels = (str(verdict.signal), tier)
        if each.value is not None:
            yield _Sample(f"nodeagent_threshold_{unit}", labels, each.value)
        margin = headroom.threshold_headroom(snapshot, each)
        if margin is not None:
            yield _Sample(f"nodeagent_threshold_headroom_{unit}", labels, margin)
        met_s = plan.made_at - each.active_since if each.met and each.active_since is not None else 0.0
        yield _Sample("nodeagent_threshold_met", labels, int(each.met))
        yield _Sample("nodeagent_threshold_met_seconds", labels, max(0.0, met_s))
        yield _Sample("nodeagent_threshold_due", labels, int(each.due))


def _trend(trend: Trend, signal: str, unit: str) -> Iterator[_Sample]:
    yield _Sample(f"nodeagent_signal_change_{unit}_per_second", (signal,), trend.rate_per_s)
    for name, seconds in (("threshold", trend.to_threshold_s), ("exhaustion", trend.to_exhaustion_s)):
        value = seconds if seconds is not None else float("inf")
        yield _Sample(f"nodeagent_signal_time_to_{name}_seconds", (signal,), value)
    yield _Sample("nodeagent_signal_trend_confidence_ratio", (signal,), trend.confidence)


_FIGURES: Final = (MemoryModel.WORKING_SET, MemoryModel.MEM_AVAILABLE)
"""In the order of `MemoryFigures`."""


def _node(plan: Plan, snapshot: NodeSnapshot) -> Iterator[_Sample]:
    for verdict in plan.signals:
        for model, available in zip(_FIGURES, verdict.figures or (), strict=False):
            if available is not None:
                yield _Sample("nodeagent_memory_figure_bytes", (verdict.signal, model), available)
    if snapshot.memory is not None:
        yield _Sample("nodeagent_swap_total_bytes", (), snapshot.memory.swap_total)
        yield _Sample("nodeagent_swap_free_bytes", (), snapshot.memory.swap_free)
        yield _Sample("nodeagent_zram_memory_bytes", (), snapshot.memory.zram)
    if snapshot.zombies is not None:
        yield _Sample("nodeagent_zombies", (), snapshot.zombies.total)
        yield _Sample("nodeagent_zombies_of_host", (), sum(holder.zombies for holder in snapshot.zombies.of_host))
    for stall in snapshot.stalls:
        for kind, total_us in (("some", stall.some_total_us), ("full", stall.full_total_us)):
            if total_us is not None:
                labels = (stall.scope.value, stall.resource, kind)
                yield _Sample("nodeagent_pressure_stalled_seconds", labels, total_us / 1e6)
    pods = collections.Counter(view.pod.qos_class for view in snapshot.pods)
    for qos in QOSClass:
        yield _Sample("nodeagent_pods", (qos,), pods[qos])
    qualities = [view.usage.disk_usage_quality for view in snapshot.pods if view.usage is not None]
    if any(qualities):
        yield _Sample("nodeagent_disk_pods_incomplete", (), sum(not each.complete for each in qualities if each))
    for disk in snapshot.unattributed_disks:
        for signal in disk.signals:
            if _unit(signal) == "bytes":
                yield _Sample("nodeagent_disk_unattributed_bytes", (signal,), disk.unattributed_bytes)
            else:
                yield _Sample("nodeagent_disk_unattributed_inodes", (signal,), disk.unattributed_inodes)
    refused = collections.Counter(pod.refusals[0].code for pod in plan.ranking if pod.refusals)
    for code, count in refused.most_common(MAX_METRIC_SERIES):
        yield _Sample("nodeagent_pods_refused", (code,), count)
    for condition in plan.conditions:
        for status in ConditionStatus:
            yield _Sample("nodeagent_condition_wanted", (condition.type, status), int(condition.status is status))


def _cluster(counters: RuntimeCounters, now: float) -> Iterator[_Sample]:
    if counters.pods_synced_at is not None:
        yield _Sample("nodeagent_pods_view_age_seconds", (), max(0.0, now - counters.pods_synced_at))
    for conflict in counters.condition_conflicts:
        labels = (str(conflict.type),)
        yield _Sample("nodeagent_condition_asserted", labels, int(str(conflict.type) in counters.asserted))
        yield _Sample("nodeagent_taint_present", labels, int(str(conflict.type) in counters.tainted))
        yield _Sample("nodeagent_condition_true_by_other", labels, int(conflict.true_by_other))
        yield _Sample("nodeagent_condition_overwrites", labels, conflict.overwrites)
        yield _Sample("nodeagent_condition_wanted_seconds", labels, conflict.wanted_s)
        yield _Sample("nodeagent_condition_true_seconds", labels, conflict.true_s)
    yield _Sample("nodeagent_condition_writes", (), counters.condition_writes)
    yield _Sample("nodeagent_eviction_requests_in_flight", (), counters.eviction_requests_in_flight)
    if counters.api_identity:
        yield _Sample("nodeagent_api_identity", (counters.api_identity,), 1)
    for worker, number in collections.Counter(counters.workers_stuck).items():
        yield _Sample("nodeagent_workers_stuck", (worker,), number)
    for worker, number in counters.worker_failures.items():
        yield _Sample("nodeagent_worker_failures", (worker,), number)
    for watch in counters.watches:
        yield _Sample("nodeagent_api_watch_failures", (watch.name,), watch.failures)
        yield _Sample("nodeagent_api_relists", (watch.name,), watch.relists)
    yield _Sample("nodeagent_events_dropped", (), counters.events_dropped)


def _recorder(recorder: RecorderCounts) -> Iterator[_Sample]:
    yield _Sample("nodeagent_recorder_samples", (), recorder.samples)
    yield _Sample("nodeagent_recorder_samples_dropped", (), recorder.dropped)
    yield _Sample("nodeagent_recorder_failures", (), recorder.failures)
    yield _Sample("nodeagent_recorder_bytes", ("disk",), recorder.disk_bytes)
    yield _Sample("nodeagent_recorder_bytes", ("memory",), recorder.memory_bytes)


def _walk(walk: WalkCounters, now: float) -> Iterator[_Sample]:
    yield _Sample("nodeagent_disk_walk_running", (), int(walk.running))
    yield _Sample("nodeagent_disk_walk_paths", (), walk.paths)
    yield _Sample("nodeagent_disk_walk_paths_done", (), walk.paths_done)
    yield _Sample("nodeagent_disk_walk_entries", (), walk.entries)
    if walk.finished_at is not None:
        yield _Sample("nodeagent_disk_walk_duration_seconds", (), walk.took_s)
        yield _Sample("nodeagent_disk_walk_age_seconds", (), max(0.0, now - walk.finished_at))


def _own_cost(started_wall: float) -> Iterator[_Sample]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    yield _Sample("process_cpu_seconds", (), used.ru_utime + used.ru_stime)
    yield _Sample("process_max_fds", (), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield _Sample("process_start_time_seconds", (), started_wall)
    try:
        with open("/proc/self/statm", "rb") as file:
            yield _Sample("process_resident_memory_bytes", (), int(file.read().split()[1]) * resource.getpagesize())
        yield _Sample("process_open_fds", (), len(os.listdir("/proc/self/fd")) - 1)  # minus this listing
    except OSError:  # out of descriptors, or no /proc: unknown, so no series
        return

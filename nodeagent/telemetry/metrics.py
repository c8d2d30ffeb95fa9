"""What can be scraped: the loop hands in values that it has anyway, a scrape writes them out.

Promises:

1. Never in the way: an observation is a few assignments, without a lock, an allocation that grows, or a system call.
   All texts are made by the thread that is scraped.
2. Bounded: the series are those of the table in `families` times words from fixed lists (signals, tiers, codes). No
   name of a pod, namespace, node or owner is ever a label, and `MOST_SERIES` bounds each counter whatever is handed in.
3. What is not known has no series, never a zero.

Theory of operation. One thread (the loop) calls `observe_*`; any other may call `render`. What is true now (signals,
conditions) is kept as the last plan and snapshot, which are immutable, and reckoned at the scrape. What is counted is a
dict of integers: a scrape takes a copy, which is one step for the interpreter, and may be one observation behind. What
other rooms count is asked for at the scrape (`Figures`). Ages are reckoned at the scrape on CLOCK_BOOTTIME, so that
they grow while the loop stands still and no clock jump moves them.
"""

import collections
import contextlib
import enum
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent import __version__
from nodeagent.config.schema import Config, Mode
from nodeagent.model import (
    SIGNAL_TABLE,
    ConditionStatus,
    NodeSnapshot,
    Outcome,
    Plan,
    QOSClass,
    SignalState,
    SignalVerdict,
    Trend,
    Unit,
    Victim,
)
from nodeagent.policy import headroom
from nodeagent.telemetry.condition_conflicts import Contested
from nodeagent.telemetry.exposition import Histogram, Series, render
from nodeagent.telemetry.metric_families import FAMILIES, UNIT_WORDS

MOST_SERIES: Final = 500
"""Of one counter. All evictions there can be are 9 signals x 3 QoS classes x 2 tiers x 15 outcomes = 810, of which a
node sees a handful; what is beyond the bound is counted under `other`."""
OTHER: Final = "other"
REMEMBERED_VICTIMS: Final = 256
"""Victims whose outcome is awaited: a decision has at most `relief.maxVictims`, an outcome follows within seconds."""
STAGE_BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Seconds. A sample of 110 pods takes 0.6 ms, a decision 2 ms, a request some 10 ms; a kubelet is 3 to 9 s late."""
RELIEF_BOUNDS: Final = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
"""Seconds. With a brake and a kill memory is back within one, without them after the grace of 1 to 30 s."""


class SyncStage(enum.StrEnum):
    """What is timed."""

    SAMPLE = "sample"
    """A whole sample, but for the node's own signals: the pods, joined with what the API server says of them."""
    DECIDE = "decide"
    """The policy, from snapshot to plan."""
    SAVE = "save"
    """Writing the state, fsync and rename included."""
    RECHECK = "recheck"
    """The second look before acting: another sample, and the policy asked again."""
    SYNC = "sync"
    """One turn of the loop, its sleep not included."""
    START_DELAY = "start-delay"
    """How much later than planned a turn began; 0 where it was in time or woken before."""
    WAKE_TO_DECISION = "wake-to-decision"
    """From the return of epoll to a plan."""
    DECISION_TO_OUTCOME = "decision-to-outcome"
    """From the plan to the API server's answer for a victim; measured by `observe_outcome` itself."""


class Failure(enum.StrEnum):
    """What went wrong in the agent itself."""

    STATE_SAVE = "state-save"
    """The state could not be written."""
    RECORD = "record"
    """A decision or outcome could not be recorded."""
    SYNC = "sync"
    """A turn of the loop ended in an error."""


# --- what is handed in -----------------------------------------------------------------------------------------------


class WatchCounters(NamedTuple):
    """One list and watch since the start."""

    name: str
    """`pods`, `node`...: a word of ours, never a name from the cluster."""
    failures: int
    relists: int


class WalkCounters(NamedTuple):
    """How far the disks' worker is."""

    running: bool
    places: int
    done: int
    entries: int
    took_s: float
    finished_at: float | None
    """CLOCK_BOOTTIME; None before the first walk has ended."""


class RuntimeCounters(NamedTuple):
    """What other rooms count and the loop does not know; asked for at each scrape, from the scraped thread."""

    pods_synced_at: float | None = None
    """CLOCK_BOOTTIME; None: the API has not told of any pod."""
    contests: Sequence[Contested] = ()
    asserted: frozenset[str] = frozenset()
    """Standard conditions that are True because we wrote it, by type."""
    tainted: frozenset[str] = frozenset()
    """Conditions whose taint is seen on the Node, by type."""
    watches: Sequence[WatchCounters] = ()
    condition_writes: int = 0
    events_dropped: int = 0
    log_lines_dropped: int = 0
    brakes_active: int = 0
    eviction_requests_in_flight: int = 0
    workers_stuck: Sequence[str] = ()
    """Kinds of the threads that do not do their work, one for each (`host.workers`)."""
    worker_failures: Mapping[str, int] = {}
    """How often workers ended by an error and started again, by kind."""
    workers_failed: Sequence[str] = ()
    """Workers that have been failing for so long that only a fresh process may help, with the reason."""
    walk: WalkCounters | None = None
    """None: no disk was near a threshold yet."""


class Liveness(NamedTuple):
    """What the probes look at; instants on CLOCK_BOOTTIME."""

    turned_at: float
    """When the loop last turned; when the agent was made, before the first turn."""
    sampled_at: float | None
    signals_known: int
    """Signals of the last whole sample that could be read."""
    pods_synced_at: float | None
    workers_failed: Sequence[str] = ()
    """Workers that only a fresh process may mend, with the reason."""


class _Awaited(NamedTuple):
    victim: Victim
    made_at: float


class _Counts:
    """Integers by label values, bounded."""

    __slots__ = ("_labels", "_values")

    def __init__(self, labels: int) -> None:
        self._labels = labels
        self._values: dict[tuple[str, ...], int] = {}

    def add(self, *labels: str, by: int = 1) -> None:
        values = self._values
        if labels not in values and len(values) >= MOST_SERIES:
            labels = (OTHER,) * self._labels
        values[labels] = values.get(labels, 0) + by

    def series(self) -> list[Series]:
        return list(self._values.copy().items())


class Metrics:
    """One agent's figures since its start."""

    def __init__(
        self,
        config: Config,
        *,
        boottime: Callable[[], float],
        figures: Callable[[], RuntimeCounters] = RuntimeCounters,
    ) -> None:
        """`figures` is called by the thread that renders; it must not block."""
        self._config = config
        self._boottime = boottime
        self._figures = figures
        self._started_wall = time.time()
        self._seen: tuple[Plan, NodeSnapshot] | None = None
        self._synced_at = boottime()
        self._syncs = 0
        self._reloaded: bool | None = None
        self._awaited: collections.OrderedDict[tuple[str, str], _Awaited] = collections.OrderedDict()
        self._stages = {stage: Histogram(STAGE_BOUNDS) for stage in SyncStage}
        self._relief_duration = Histogram(RELIEF_BOUNDS)
        self._decisions = _Counts(1)
        self._refusals = _Counts(1)
        self._evictions = _Counts(4)
        self._predicted = _Counts(1)
        self._measured = _Counts(1)
        self._shortfalls = _Counts(1)
        self._reclaims = _Counts(2)
        self._gained = {unit: _Counts(1) for unit in UNIT_WORDS.values()}
        self._wakeups = _Counts(1)
        self._failures = _Counts(1)
        self._reloads = _Counts(1)

    # --- observing, all from the loop's thread

    def observe_sync(self, *, at: float, reasons: Iterable[str] = ()) -> None:
        """The loop turned; `reasons` are those that `Wakeups.wait` returned before it."""
        self._synced_at = at
        self._syncs += 1
        for reason in reasons:
            self._wakeups.add(reason)

    def observe_plan(self, plan: Plan, snapshot: NodeSnapshot) -> None:
        """A decision was made on this snapshot. Call it before the victims are handed over."""
        self._seen = (plan, snapshot)
        due = bool(plan.refusals) or plan.acting_on is not None
        self._decisions.add("evict" if plan.victims else "refuse" if due else "calm")
        for refusal in plan.refusals:
            self._refusals.add(refusal.code)
        for victim in plan.victims:
            self._awaited[plan.id, victim.pod.uid] = _Awaited(victim, plan.made_at)
        while len(self._awaited) > REMEMBERED_VICTIMS:
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
        """What became of a victim of a plan that was observed; of any other only the outcome is known."""
        awaited = self._awaited.pop((outcome.plan_id, outcome.pod_uid), None)
        if awaited is None:
            self._evictions.add(OTHER, OTHER, OTHER, outcome.kind)
            return
        victim = awaited.victim
        self._evictions.add(victim.threshold.signal, victim.pod.qos_class, victim.tier, outcome.kind)
        if outcome.http_status is not None or outcome.kind == "accepted":
            self._stages[SyncStage.DECISION_TO_OUTCOME].observe(max(0.0, outcome.at - awaited.made_at))

    def observe_stage(self, stage: SyncStage, seconds: float) -> None:
        """One pass through a stage."""
        self._stages[stage].observe(seconds)

    @contextlib.contextmanager
    def timed(self, stage: SyncStage) -> Iterator[None]:
        """One pass through a stage is what runs inside; one that raises is not counted."""
        began = self._boottime()
        yield
        self.observe_stage(stage, self._boottime() - began)

    def observe_failure(self, what: Failure) -> None:
        """Something went wrong in the agent itself."""
        self._failures.add(what)

    def observe_reload(self, config: Config | None) -> None:
        """The configuration was read again; None: it is invalid and the old one stays in force."""
        self._reloaded = config is not None
        self._reloads.add("applied" if config is not None else "invalid")
        self._config = config if config is not None else self._config

    # --- telling, from any thread

    def vitals(self) -> Liveness:
        """For the probes."""
        seen = self._seen
        figures = self._figures()
        if seen is None:
            return Liveness(self._synced_at, None, 0, figures.pods_synced_at, figures.workers_failed)
        known = sum(verdict.observation.available is not None for verdict in seen[0].signals)
        return Liveness(self._synced_at, seen[1].taken_at, known, figures.pods_synced_at, figures.workers_failed)

    def render(self, *, openmetrics: bool = False) -> bytes:
        """The exposition, in the order of `FAMILIES`."""
        found: dict[str, list[Series]] = {}
        for name, labels, value in self._all():
            found.setdefault(name, []).append((labels, value))
        return render(
            ((family, found[family.name]) for family in FAMILIES if family.name in found), openmetrics=openmetrics
        )

    def _all(self) -> Iterator["_Row"]:
        now, figures, seen = self._boottime(), self._figures(), self._seen
        python = sys.version.partition(" ")[0]
        yield _Row("nodeagent_build_info", (__version__, python), 1)
        yield _Row("nodeagent_enforcing", (), int(self._config.mode is Mode.ENFORCE))
        if seen is not None:
            plan, snapshot = seen
            for verdict in plan.signals:
                yield from _signal(verdict, plan, snapshot)
            yield from _node(plan, snapshot)
            yield _Row("nodeagent_sample_age_seconds", (), max(0.0, now - snapshot.taken_at))
        if figures.walk is not None:
            yield from _walk(figures.walk, now)
        yield from _cluster(figures, now)
        yield from self._counted()
        yield _Row("nodeagent_sync_age_seconds", (), max(0.0, now - self._synced_at))
        if self._reloaded is not None:
            yield _Row("nodeagent_config_last_reload_successful", (), int(self._reloaded))
        yield _Row("nodeagent_log_lines_dropped", (), figures.log_lines_dropped)
        yield _Row("nodeagent_brakes_active", (), figures.brakes_active)
        yield from _own_cost(self._started_wall)

    def _counted(self) -> Iterator["_Row"]:
        yield _Row("nodeagent_syncs", (), self._syncs)
        for name, counts in (
            ("nodeagent_decisions", self._decisions),
            ("nodeagent_refusals", self._refusals),
            ("nodeagent_evictions", self._evictions),
            ("nodeagent_relief_shortfalls", self._shortfalls),
            ("nodeagent_reclaims", self._reclaims),
            ("nodeagent_wakeups", self._wakeups),
            ("nodeagent_failures", self._failures),
            ("nodeagent_config_reloads", self._reloads),
        ):
            for labels, value in counts.series():
                yield _Row(name, labels, value)
        for word, counts in (("predicted", self._predicted), ("measured", self._measured)):
            for labels, value in counts.series():
                unit = _unit(labels[0])
                yield _Row(f"nodeagent_relief_{word}_{unit}", labels, value)
        for unit, counts in self._gained.items():
            for labels, value in counts.series():
                yield _Row(f"nodeagent_reclaim_gained_{unit}", labels, value)
        for stage, histogram in self._stages.items():
            yield _Row("nodeagent_stage_duration_seconds", (stage,), histogram)
        yield _Row("nodeagent_relief_duration_seconds", (), self._relief_duration)


# --- rows ------------------------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    name: str
    labels: tuple[str, ...]
    value: int | float | Histogram


_UNITS: Final = {str(signal): UNIT_WORDS[facts.unit] for signal, facts in SIGNAL_TABLE.items()}


def _unit(signal: str) -> str:
    return _UNITS.get(signal, UNIT_WORDS[Unit.BYTES])


def _signal(verdict: SignalVerdict, plan: Plan, snapshot: NodeSnapshot) -> Iterator[_Row]:
    signal, seen = str(verdict.signal), verdict.observation
    unit = _unit(signal)
    if seen.available is not None:
        yield _Row(f"nodeagent_signal_available_{unit}", (signal,), seen.available)
    if seen.capacity is not None:
        yield _Row(f"nodeagent_signal_capacity_{unit}", (signal,), seen.capacity)
    for state in SignalState:
        yield _Row("nodeagent_signal_state", (signal, state), int(verdict.state is state))
    yield from _thresholds(verdict, unit, plan, snapshot)
    if verdict.trend is not None:
        yield from _trend(verdict.trend, signal, unit)


def _thresholds(verdict: SignalVerdict, unit: str, plan: Plan, snapshot: NodeSnapshot) -> Iterator[_Row]:
    """One of each tier: of two (a soft threshold without grace is hard) the one that is met first."""
    first = {}
    for each in sorted(verdict.thresholds, key=lambda each: each.value or 0):
        first["hard" if each.threshold.hard else "soft"] = each
    for tier, each in first.items():
        labels = (str(verdict.signal), tier)
        if each.value is not None:
            yield _Row(f"nodeagent_threshold_{unit}", labels, each.value)
        room = headroom.threshold_headroom(snapshot, each)
        if room is not None:
            yield _Row(f"nodeagent_threshold_headroom_{unit}", labels, room)
        met_s = plan.made_at - each.active_since if each.met and each.active_since is not None else 0.0
        yield _Row("nodeagent_threshold_met", labels, int(each.met))
        yield _Row("nodeagent_threshold_met_seconds", labels, max(0.0, met_s))
        yield _Row("nodeagent_threshold_due", labels, int(each.due))


def _trend(trend: Trend, signal: str, unit: str) -> Iterator[_Row]:
    yield _Row(f"nodeagent_signal_change_{unit}_per_second", (signal,), trend.rate_per_s)
    for name, seconds in (("threshold", trend.to_threshold_s), ("exhaustion", trend.to_exhaustion_s)):
        value = seconds if seconds is not None else float("inf")
        yield _Row(f"nodeagent_signal_time_to_{name}_seconds", (signal,), value)
    yield _Row("nodeagent_signal_trend_confidence_ratio", (signal,), trend.confidence)


def _node(plan: Plan, snapshot: NodeSnapshot) -> Iterator[_Row]:
    if snapshot.mem_available.available is not None:
        yield _Row("nodeagent_memory_mem_available_bytes", (), snapshot.mem_available.available)
    for stall in snapshot.stalls:
        for kind, total_us in (("some", stall.some_total_us), ("full", stall.full_total_us)):
            if total_us is not None:
                labels = (stall.scope.value, stall.resource, kind)
                yield _Row("nodeagent_pressure_stalled_seconds", labels, total_us / 1e6)
    pods = collections.Counter(view.pod.qos_class for view in snapshot.pods)
    for qos in QOSClass:
        yield _Row("nodeagent_pods", (qos,), pods[qos])
    sights = [view.usage.disk_usage_quality for view in snapshot.pods if view.usage is not None]
    if any(sights):
        yield _Row("nodeagent_disk_pods_incomplete", (), sum(not sight.complete for sight in sights if sight))
    for rest in snapshot.unattributed_disks:
        for signal in rest.signals:
            if _unit(signal) == "bytes":
                yield _Row("nodeagent_disk_unattributed_bytes", (signal,), rest.unattributed_bytes)
            else:
                yield _Row("nodeagent_disk_unattributed_inodes", (signal,), rest.unattributed_inodes)
    refused = collections.Counter(pod.refusals[0].code for pod in plan.ranking if pod.refusals)
    for code, count in refused.most_common(MOST_SERIES):
        yield _Row("nodeagent_pods_refused", (code,), count)
    for condition in plan.conditions:
        for status in ConditionStatus:
            yield _Row("nodeagent_condition_wanted", (condition.type, status), int(condition.status is status))


def _cluster(figures: RuntimeCounters, now: float) -> Iterator[_Row]:
    if figures.pods_synced_at is not None:
        yield _Row("nodeagent_pods_view_age_seconds", (), max(0.0, now - figures.pods_synced_at))
    for contest in figures.contests:
        labels = (str(contest.type),)
        yield _Row("nodeagent_condition_asserted", labels, int(str(contest.type) in figures.asserted))
        yield _Row("nodeagent_taint_present", labels, int(str(contest.type) in figures.tainted))
        yield _Row("nodeagent_condition_true_by_other", labels, int(contest.true_by_other))
        yield _Row("nodeagent_condition_overwrites", labels, contest.overwrites)
        yield _Row("nodeagent_condition_wanted_seconds", labels, contest.wanted_s)
        yield _Row("nodeagent_condition_true_seconds", labels, contest.true_s)
    yield _Row("nodeagent_condition_writes", (), figures.condition_writes)
    yield _Row("nodeagent_eviction_requests_in_flight", (), figures.eviction_requests_in_flight)
    for worker, number in collections.Counter(figures.workers_stuck).items():
        yield _Row("nodeagent_workers_stuck", (worker,), number)
    for worker, number in figures.worker_failures.items():
        yield _Row("nodeagent_worker_failures", (worker,), number)
    for watch in figures.watches:
        yield _Row("nodeagent_api_watch_failures", (watch.name,), watch.failures)
        yield _Row("nodeagent_api_relists", (watch.name,), watch.relists)
    yield _Row("nodeagent_events_dropped", (), figures.events_dropped)


def _walk(walk: WalkCounters, now: float) -> Iterator[_Row]:
    yield _Row("nodeagent_disk_walk_running", (), int(walk.running))
    yield _Row("nodeagent_disk_walk_paths", (), walk.places)
    yield _Row("nodeagent_disk_walk_paths_done", (), walk.done)
    yield _Row("nodeagent_disk_walk_entries", (), walk.entries)
    if walk.finished_at is not None:
        yield _Row("nodeagent_disk_walk_duration_seconds", (), walk.took_s)
        yield _Row("nodeagent_disk_walk_age_seconds", (), max(0.0, now - walk.finished_at))


def _own_cost(started_wall: float) -> Iterator[_Row]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    yield _Row("process_cpu_seconds", (), used.ru_utime + used.ru_stime)
    yield _Row("process_max_fds", (), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield _Row("process_start_time_seconds", (), started_wall)
    try:
        with open("/proc/self/statm", "rb") as file:
            yield _Row("process_resident_memory_bytes", (), int(file.read().split()[1]) * resource.getpagesize())
        yield _Row("process_open_fds", (), len(os.listdir("/proc/self/fd")) - 1)  # less the one that lists them
    except OSError:  # out of descriptors, or no /proc: not known, so no series
        return

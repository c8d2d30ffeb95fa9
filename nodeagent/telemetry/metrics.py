"""The metrics: the loop stores values that it already has, and a scrape renders them.

1. An observation is a few assignments, without a lock, a growing allocation or a system call. The server's thread makes
   all texts.
2. Series are bounded: the table in `metric_families` times words from fixed lists (signals, tiers, codes), and
   `label_counts` bounds each counter. Names of pods are labels of `pod_series` alone, and only on request.
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
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from nodeagent import __version__
from nodeagent.config.schema import Config, Mode
from nodeagent.model import (
    HookOutcome,
    NodeSnapshot,
    OomReport,
    Outcome,
    OutcomeKind,
    Plan,
    ReclaimOutcome,
    ResizeOutcome,
    Victim,
)
from nodeagent.telemetry import (
    decision_series,
    exposition,
    initial_series,
    label_counts,
    metric_families,
    pod_series,
    runtime_counters,
)
from nodeagent.telemetry.exposition import Histogram, Sample, Series
from nodeagent.telemetry.label_counts import LabelCounts
from nodeagent.telemetry.runtime_counters import RuntimeCounters

MAX_AWAITED_VICTIMS: Final = 256
"""Victims without a last outcome: a decision has at most `relief.maxVictims`, and it follows within seconds, that of an
EvictionRequest in its deadline."""
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
        self._decisions = LabelCounts(1, initial_series.single(initial_series.DECISIONS))
        self._refusals = LabelCounts(1)
        self._evictions = LabelCounts(4)
        self._predicted = LabelCounts(1)
        self._measured = LabelCounts(1)
        self._shortfalls = LabelCounts(1)
        self._reclaims = LabelCounts(2)
        self._hooks = LabelCounts(1)
        self._resizes = LabelCounts(1)
        self._gained = {unit: LabelCounts(1) for unit in metric_families.UNIT_WORDS.values()}
        self._oom_kills = LabelCounts(2, initial_series.OOM_KILLS)
        self._lost_races = LabelCounts(1, initial_series.single(initial_series.LOST_RACES))
        self._page_cache_reclaimed = 0
        self._wakeups = LabelCounts(1)
        self._failures = LabelCounts(1, initial_series.single(Failure))
        self._reloads = LabelCounts(1, initial_series.single(initial_series.RELOADS))

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
        due = plan.acting_on is not None or bool(plan.eviction_refusals)
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
            self._gained[metric_families.unit_word(gain.signal)].add(gain.name, by=max(0, gain.gained))

    def observe_outcome(self, outcome: Outcome) -> None:
        """Count an outcome. The labels of a victim that was not observed are `other`."""
        key = outcome.plan_id, outcome.pod_uid
        awaited = self._awaited.get(key) if outcome.kind.followed else self._awaited.pop(key, None)
        if awaited is None:
            other = label_counts.OTHER
            self._evictions.add(other, other, other, outcome.kind)
            return
        victim = awaited.victim
        self._evictions.add(victim.limit or victim.threshold.signal, victim.pod.qos_class, victim.tier, outcome.kind)
        if outcome.http_status is not None or outcome.kind is OutcomeKind.ACCEPTED:
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

    def observe_reload(self, config: Config | None, *, in_force: bool = True) -> None:
        """The configuration was reloaded; None: it is invalid and the old one stays in force. `in_force` False: an
        earlier file is still rejected."""
        self._reloaded = config is not None and in_force
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

    def _all(self) -> Iterator[Sample]:
        now, counters, last = self._boottime(), self._runtime_counters(), self._last
        python = sys.version.partition(" ")[0]
        yield Sample("nodeagent_build_info", (__version__, python), 1)
        yield Sample("nodeagent_enforcing", (), int(self._config.mode is Mode.ENFORCE))
        if last is not None:
            plan, snapshot = last
            yield from decision_series.samples(plan, snapshot)
            yield from itertools.starmap(Sample, pod_series.samples(snapshot, config=self._config))
            yield Sample("nodeagent_sample_age_seconds", (), max(0.0, now - snapshot.taken_at))
        yield from runtime_counters.samples(counters, now=now)
        yield from self._counted()
        yield Sample("nodeagent_sync_age_seconds", (), max(0.0, now - self._synced_at))
        if self._reloaded is not None:
            yield Sample("nodeagent_config_last_reload_successful", (), int(self._reloaded))
        yield from runtime_counters.own_cost(self._started_wall)

    def _counted(self) -> Iterator[Sample]:
        yield Sample("nodeagent_syncs", (), self._syncs)
        plan = self._last[0] if self._last is not None else None
        evictions = initial_series.evictions(self._config, plan) if plan is not None else ()
        relief = tuple(initial_series.relief(plan)) if plan is not None else ()
        for labels, value in self._evictions.series(evictions):
            yield Sample("nodeagent_evictions", labels, value)
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
                yield Sample(name, labels, value)
        for word, counts in (("predicted", self._predicted), ("measured", self._measured)):
            for labels, value in counts.series(relief):
                unit = metric_families.unit_word(labels[0])
                yield Sample(f"nodeagent_relief_{word}_{unit}", labels, value)
        for labels, value in self._shortfalls.series(relief):
            yield Sample("nodeagent_relief_shortfalls", labels, value)
        for unit, counts in self._gained.items():
            for labels, value in counts.series():
                yield Sample(f"nodeagent_reclaim_gained_{unit}", labels, value)
        yield Sample("nodeagent_page_cache_reclaimed_bytes", (), self._page_cache_reclaimed)
        for stage, histogram in self._stages.items():
            yield Sample("nodeagent_stage_duration_seconds", (stage,), histogram)
        yield Sample("nodeagent_relief_duration_seconds", (), self._relief_duration)

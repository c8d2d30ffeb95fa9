"""The life of the agent: start, one sync after another, reload, stop.

Promises:

1. One snapshot, one decision. Everything that is passed on is a value; the only memory is the state store.
2. The loop waits for nothing but its next wake-up: the API server, the log and the service manager have threads of
   their own.
3. A sync that fails is logged and the next one starts. The watchdog is fed only by syncs that succeeded. A defect in
   what only reports fails no sync.
4. A new configuration is validated first and acts first in a later sync, after enough fresh samples. One that cannot be
   used changes nothing.

Theory of operation. `run` calls `loop.sync.sync` and sleeps until the time that it returns, a wake-up source or a
signal. `Components` are made from the configuration and replaced as a whole by a reload, between two syncs; `Runtime`
lasts as long as the process.
"""

import functools
import math
import signal
from collections.abc import Callable
from typing import Final

from nodeagent.actuators.conditions import OwnedCondition
from nodeagent.actuators.event_writer import EventReason
from nodeagent.actuators.session import Session
from nodeagent.config import above_kubelet, config_file, show
from nodeagent.config.load import LoadedConfig
from nodeagent.config.problems import ConfigError
from nodeagent.config.schema import Config, Mode, OnExit
from nodeagent.loop import node_profiles, sample_recording
from nodeagent.loop.components import Components, Runtime
from nodeagent.loop.cost_check import CostCheck
from nodeagent.loop.executor import Executor
from nodeagent.loop.live_page import LivePage
from nodeagent.loop.observe import Observer
from nodeagent.loop.oom_monitor import OomMonitor
from nodeagent.loop.own_limit_watch import OwnLimitWatch
from nodeagent.loop.reporting import Part, Reporting
from nodeagent.loop.state_store import StateStore
from nodeagent.loop.sync import sync
from nodeagent.model import ConditionType, NodeSnapshot, Note, NoteKind, Plan
from nodeagent.policy import page_cache
from nodeagent.policy import state as policy_states
from nodeagent.policy.state import PolicyState
from nodeagent.records.flight_recorder import DecisionInputs
from nodeagent.runtime import workers
from nodeagent.runtime.wakeups import Wakeups
from nodeagent.sampling.events import fork_storm
from nodeagent.telemetry import condition_conflicts, decision_log, endpoint
from nodeagent.telemetry.decision_log import DecisionLog
from nodeagent.telemetry.endpoint import Endpoint
from nodeagent.telemetry.http_server import AddressError
from nodeagent.telemetry.metrics import Failure, Metrics, SyncStage
from nodeagent.telemetry.runtime_counters import RuntimeCounters, WalkCounters

STATUS_EVERY_S: Final = 30.0
"""How often the one-line status of the service manager is renewed."""
LATE_S: Final = 1.0
"""A sync that starts this late is reported: the fastest ramp measured takes a GiB in it."""
FORKS_ALONE: Final = frozenset({"forks"})
FILE: Final = "file"
LABELS: Final = "labels"
MAX_CONSECUTIVE_FAILURES: Final = 10
"""One sync may fail for a reason that passes. After ten the process exits, because a fresh one may work."""


class Agent:
    """One node's agent."""

    def __init__(
        self,
        components: Components,
        runtime: Runtime,
        *,
        rebuild: Callable[[Components, LoadedConfig], Components],
        policy: PolicyState,
    ) -> None:
        """`rebuild` makes the components of a new configuration from those of the old one. `policy` is the state that
        an earlier process saved, or an initial one."""
        self._components = components
        self._runtime = runtime
        self._rebuild = rebuild
        self._log = runtime.log
        self.wakeup_sources = runtime.wakeup_sources
        self.metrics = Metrics(self._config, boottime=runtime.boottime, runtime_counters=self._counters)
        self.reporting = Reporting(
            runtime.log,
            count=functools.partial(self.metrics.observe_failure, Failure.REPORT),
            monotonic=runtime.monotonic,
        )
        unrecorded = functools.partial(self.metrics.observe_failure, Failure.RECORD)
        self.decision_log = DecisionLog(runtime.log, runtime.recorder, unrecorded=unrecorded)
        self._store = StateStore(
            policy,
            runtime.store,
            restorable_until=runtime.restorable_until,
            lock=runtime.lock,
            brakes=runtime.brakes,
            oom_scores=runtime.oom_scores,
            owned=self._owned_conditions,
            status_notes=lambda: self.reporting.run(Part.STATUS, self._status_notes) or self.reporting.notes(),
            oom=lambda: self.oom_monitor.state,
            node_labels=lambda: runtime.profiles.saved,
            metrics=self.metrics,
            log=runtime.log,
        )
        own_limits = OwnLimitWatch()
        self.executor = Executor(
            runtime,
            components=lambda: self._components,
            store=self._store,
            decision_log=self.decision_log,
            metrics=self.metrics,
            own_limits=own_limits,
        )
        self.observer = Observer(
            runtime,
            components=lambda: self._components,
            store=self._store,
            metrics=self.metrics,
            can_cap_growth=self.executor.can_cap_growth,
            own_limits=own_limits,
        )
        self.oom_monitor = OomMonitor(
            runtime,
            components=lambda: self._components,
            store=self._store,
            decision_log=self.decision_log,
            metrics=self.metrics,
            cache=self.observer.ranking_cache,
            latest=lambda: self.observer.latest,
        )
        self.live_page = LivePage(config=lambda: self._config, config_source=runtime.file.path or "built-in defaults")
        self._endpoint = Endpoint(
            endpoint.build_pages(
                self.metrics,
                config=lambda: self._config,
                boottime=runtime.boottime,
                live_page=self.live_page.document,
            ),
            failed=lambda reason: self._log.warning("metrics page failed", reason=reason, once=reason),
        )
        self._kubelet = runtime.kubelet.latest
        """The kubelet's thresholds above which those of the configuration are kept."""
        self._rejected: dict[str, str] = {}
        """Why the newest configuration is not in force: of the file, or with the profiles of new labels."""
        self._cost_check = CostCheck()
        self._retry_threads_s = float("inf")
        """When threads that found no PID are started again."""
        self._status_at = float("-inf")
        self._wake_reasons: frozenset[str] = frozenset()
        self._woke_at = runtime.monotonic()

    @property
    def session(self) -> Session:
        return self._components.session

    @property
    def acts(self) -> bool:
        """False in a dry run."""
        return self._config.mode is Mode.ENFORCE

    @property
    def _config(self) -> Config:
        return self._components.config

    def serve(self) -> None:
        """Serve metrics and probes at the configured address. Raises AddressError."""
        self._endpoint.move(self._config.metrics.address)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def run(self, wakeups: Wakeups, *, syncs: int | None = None) -> bool:
        """Sync until SIGTERM or SIGINT, or `syncs` times. Returns True if the process must start again: it may act now
        and could not before, or the other way round."""
        if source := self._runtime.forks.source():
            wakeups.register(source.fd, source.name, source.drain, source.events)
        self.decision_log.log_notes(self._runtime.startup_notes)
        if self.acts:
            self._store.save_first(now=self._runtime.boottime())
        if self._runtime.sample_recorder is not None:
            self.reporting.run(Part.SAMPLES, self._runtime.sample_recorder.start)
        self._runtime.notifier.ready()
        if syncs is not None:
            self.observer.skip_startup_wait()
        failures = 0
        while syncs is None or syncs > 0:
            if syncs is None and self._changes_role():
                return True
            syncs = None if syncs is None else syncs - 1
            began, began_awake = self._runtime.boottime(), self._runtime.monotonic()
            try:
                sleep_s = self.sync()
                self.update_wakeup_sources(wakeups)
            except Exception:
                failures += 1
                self.metrics.observe_failure(Failure.SYNC)
                if failures >= MAX_CONSECUTIVE_FAILURES:
                    raise
                self._log.exception("sync failed", consecutive=failures)
                sleep_s = self._config.sampling.interval_s
            else:
                failures = 0
                self._runtime.notifier.alive()
                self.metrics.observe_sync(at=began, reasons=self._wake_reasons)
                self.metrics.observe_stage(SyncStage.SYNC, self._runtime.monotonic() - began_awake)
            if self._wait(wakeups, sleep_s, began=began, began_awake=began_awake):
                return False
        return False

    def sync(self) -> float:
        """See `loop.sync`."""
        return sync(self)

    def stop(self, *, restarting: bool = False) -> None:
        """Release the brakes, clear (or mark) what the agent set on the Node, and keep the rest for the next process.
        `restarting`: the service goes on in this process."""
        if not restarting:
            self._runtime.notifier.stopping()
        self._endpoint.close()
        # An eviction whose answer came in now was carried out, and nobody would know.
        self.session.finish_requests()
        self.reporting.run(Part.DECISIONS, self.executor.apply_outcomes)
        self._runtime.brakes.close()
        self._runtime.oom_scores.close()
        self._runtime.reclaim_runner.close()
        self._runtime.hook_runner.close()
        clear = self._config.conditions.on_exit is OnExit.CLEAR
        if left := self.session.stop(clear=clear, mark=not clear):
            self._log.warning("cleanup incomplete", what=left)
        self._store.close(now=self._runtime.boottime())
        if self._runtime.sample_recorder is not None:
            self.reporting.run(Part.SAMPLES, self._runtime.sample_recorder.stop)
        self._components.disks.close()
        self._components.sampler.close()

    def _changes_role(self) -> bool:
        lock = self._runtime.lock
        if lock is None or not (self._runtime.standby or lock.held):
            return False
        other = lock.take()
        if bool(other) == self._runtime.standby:
            return False
        if not other and (error := self._startup_error()) is not None:
            # The next process would end with it. The lock stays free, for one that can start.
            lock.release()
            if self._rejected.get(FILE) != "; ".join(map(str, error.problems)):
                self._reject(FILE, error)
            return False
        self._log.warning("another agent acts on this node" if other else "no other agent acts any more", lock=other)
        return True

    def _startup_error(self) -> ConfigError | None:
        """Why this process could not start again with its file."""
        try:
            self._runtime.file.load()
        except ConfigError as error:
            return error
        return None

    def _wait(self, wakeups: Wakeups, sleep_s: float, *, began: float, began_awake: float) -> bool:
        """Sleep until a wake-up; reload a new configuration. Returns True if the agent must stop. The sync began at
        `began`, and at `began_awake` on the clock that stops while the machine is suspended: it may have been suspended
        in the middle of the sync."""
        boottime = self._runtime.boottime
        sleep_s = min(sleep_s, (self._runtime.notifier.watchdog_s or float("inf")) / 3)
        until = began + sleep_s
        reasons, signals = wakeups.wait(until - boottime())
        while reasons == FORKS_ALONE and not signals and not self._runtime.forks.storm(boottime()):
            # Forks are counted. They are no reason for a sync unless they are a storm.
            reasons, signals = wakeups.wait(until - boottime())
        self._wake_reasons, self._woke_at = reasons, self._runtime.monotonic()
        self._observe_delay(self._woke_at - (began_awake + sleep_s))
        for number in signals:
            if number in (signal.SIGTERM, signal.SIGINT):
                self._log.info("stopping", signal=number.name)
                return True
        if signal.SIGHUP in signals or self._runtime.file.changed(now=boottime()):
            self._runtime.kubelet.read_soon()
            self._reload()
        self._follow_labels()
        self._follow_kubelet()
        return False

    def _observe_delay(self, late_s: float) -> None:
        """A sync starts `late_s` later than planned, while the machine was awake."""
        self.metrics.observe_stage(SyncStage.START_DELAY, max(0.0, late_s))
        if late_s >= LATE_S:
            # By powers of two, so that a slow node is one line and not one for each sync.
            at_least_s = 2.0 ** math.floor(math.log2(late_s))
            self.decision_log.log_notes((Note(NoteKind.LOOP, f"sync started at least {at_least_s:g}s late"),))

    def _reload(self) -> None:
        """Read the file again."""
        self._runtime.notifier.reloading()
        try:
            loaded = self._runtime.file.load()
        except ConfigError as error:
            self._reject(FILE, error)
        else:
            self._replace(FILE, self._runtime.profiles.apply(loaded))
        self._runtime.notifier.ready()

    def _follow_labels(self) -> None:
        """Apply the profiles of changed labels of the node, as a reload."""
        if not self._runtime.profiles.observe(self.session.node_labels()):
            return
        before = self._components.loaded
        after = self._runtime.profiles.apply(before)
        if after.active != before.active:
            self.decision_log.log_profiles(show.active_profiles(before), show.active_profiles(after))
            self._replace(LABELS, after)

    def _replace(self, cause: str, loaded: LoadedConfig) -> None:
        """Promise 4. A file that was rejected stays so while only the labels change."""
        acted = self.acts
        try:
            # First: the components that `rebuild` replaces do not come back.
            self._endpoint.move(loaded.config.metrics.address)
            try:
                components = self._rebuild(self._components, loaded)
            except ConfigError:
                self._endpoint.move(self._config.metrics.address)
                raise
        except (ConfigError, AddressError) as error:
            self._reject(cause, error)
            return
        for settled in (FILE, LABELS) if cause == FILE else (LABELS,):
            self._rejected.pop(settled, None)
        self.decision_log.log_config_changes(config_file.config_changes(self._components.loaded, components.loaded))
        self._components = components
        self.metrics.observe_reload(components.config, in_force=not self._rejected)
        self.observer.reset()
        self._store.apply(policy_states.restored, instance=self._store.policy_state.instance)
        if self.acts and not acted:
            self._store.save_first(now=self._runtime.boottime())
        elif acted and not self.acts:
            self._stop_acting()

    def _stop_acting(self) -> None:
        """A dry run from now on: another agent may act on this node at once."""
        self._runtime.brakes.close()
        self._runtime.oom_scores.close()
        self._store.save(now=self._runtime.boottime(), urgent=True)
        if self._runtime.lock is not None:
            self._runtime.lock.release()

    def _reject(self, cause: str, error: ConfigError | AddressError) -> None:
        self.metrics.observe_reload(None)
        problems = [str(each) for each in error.problems] if isinstance(error, ConfigError) else [str(error)]
        self._rejected[cause] = "; ".join(problems)
        self._log.error("configuration rejected", problems=problems)
        self.session.emit_node_event(EventReason.CONFIGURATION_REJECTED, self._rejected[cause], action="Reloading")

    def _follow_kubelet(self) -> None:
        """Keep the thresholds above the kubelet's if those have changed. Their grace periods go on; none is due before
        enough fresh samples, as after a reload."""
        self._runtime.kubelet.follow_k3s()
        latest = self._runtime.kubelet.latest
        before, after = self._kubelet.known, latest.known
        if latest is self._kubelet or after is None:
            return
        self._kubelet = latest
        if after != before:
            self.decision_log.log_kubelet_thresholds(before, after)
            loaded = self._components.loaded
            config = above_kubelet.keep_above(loaded.config, after)
            self._components = self._components._replace(loaded=loaded._replace(config=config))
            self.observer.forget_thresholds()
            self._store.apply(policy_states.restored, instance=self._store.policy_state.instance)

    def update_wakeup_sources(self, wakeups: Wakeups) -> None:
        """Open the wake-up sources of the cgroups that the pods are in now."""
        layout, sources = self._components.sampler.host_layout(), self.wakeup_sources
        if not sources.stale(layout.hierarchy, layout.kubepods):
            return
        for source in sources.sources:
            wakeups.unregister(source.fd)
        sources.open(layout.hierarchy, layout.kubepods)
        for source in sources.sources:
            wakeups.register(source.fd, source.name, source.drain, source.events)

    # --- steps of a sync ---------------------------------------------------------------------------------------------

    def check_own_cost(self) -> None:
        """What the agent costs, and threads that found no PID."""
        verdict = self._cost_check.check(self._runtime.boottime(), interval_factor=self.observer.interval_factor)
        self.observer.interval_factor = verdict.interval_factor
        self.decision_log.log_notes(verdict.notes)
        self._retry_threads_s = workers.start_waiting()

    def decide(self, snapshot: NodeSnapshot) -> Plan:
        """The plan; the store has the new policy state."""
        plan = self._store.decide(snapshot, config=self._config, cache=self.observer.ranking_cache)
        self.metrics.observe_stage(SyncStage.WAKE_TO_DECISION, self._runtime.monotonic() - self._woke_at)
        return plan

    def record(self, plan: Plan, snapshot: NodeSnapshot) -> None:
        """Log, flight recorder, service status, what a later report of OOM kills needs, periodic save."""
        now, loaded = snapshot.taken_at, self._components.loaded
        run, samples, snapshots = self.reporting.run, self._runtime.sample_recorder, self._runtime.auto_snapshots
        recorded = run(Part.DECISIONS, self._log_plan, plan, snapshot)
        if samples is not None:
            run(Part.SAMPLES, sample_recording.record_decision, samples, plan, snapshot, loaded, exact=bool(recorded))
        if now - self._status_at >= STATUS_EVERY_S:
            self._status_at = now
            run(Part.STATUS, lambda: self._runtime.notifier.status(decision_log.status(plan, snapshot)))
        if snapshots is not None:
            run(Part.SNAPSHOTS, snapshots.observe_plan, plan, now=now, wall=snapshot.wall_time)
            run(Part.SNAPSHOTS, snapshots.step, now=now, loaded=loaded)
        run(Part.OOM_KILLS, self.oom_monitor.remember, plan, snapshot)
        run(Part.PAGE, self.live_page.remember, plan, snapshot, acts=self.acts)
        self._store.save(now=now, urgent=False)

    def _log_plan(self, plan: Plan, snapshot: NodeSnapshot) -> bool:
        inputs = DecisionInputs(
            snapshot=snapshot,
            state=self._store.state_before,
            now=snapshot.taken_at,
            thresholds=self.observer.thresholds(snapshot.layout),
            fresh_samples=self._config.startup.fresh_samples,
            kubelet=self._kubelet.known or (),
        )
        return self.decision_log.log_plan(plan, acts=self.acts, notes=self._plan_notes(snapshot), inputs=inputs)

    def record_between(self, node: NodeSnapshot) -> None:
        """The flight recorder also gets samples without a decision near a threshold."""
        if self._runtime.sample_recorder is not None:
            self.reporting.run(Part.SAMPLES, self._runtime.sample_recorder.record_between, node)

    def next_deadline_s(self, now: float) -> float:
        """Seconds until the next brake deadline or the next start of a waiting thread; infinite without either."""
        deadlines = [brake.until - now for brake in self._runtime.brakes.active if brake.until > now]
        return min([self._retry_threads_s, *deadlines])

    # --- reports -----------------------------------------------------------------------------------------------------

    def _plan_notes(self, snapshot: NodeSnapshot) -> tuple[Note, ...]:
        runtime, now = self._runtime, snapshot.taken_at
        return (
            *snapshot.notes,
            *self.session.notes(),
            *self.wakeup_sources.notes,
            *runtime.other_oom_handlers(),
            *runtime.kubelet.latest.notes,
            *runtime.profiles.notes(self._components.loaded),
            *above_kubelet.notes(self._config.thresholds, snapshot),
            *workers.stuck_notes(),
            *runtime.brakes.take_notes(),
            *runtime.oom_scores.take_notes(),
            *self._components.missing,
            *self._reporting_notes(),
            *((fork_storm.note(runtime.forks.rates(now), snapshot.pods),) if runtime.forks.storm(now) else ()),
        )

    def _reporting_notes(self) -> tuple[Note, ...]:
        samples, snapshots = self._runtime.sample_recorder, self._runtime.auto_snapshots
        return (
            *(self.reporting.run(Part.SAMPLES, sample_recording.notes, samples) or ()),
            *(snapshots.notes if snapshots is not None else ()),
            *self.reporting.notes(),
        )

    def _owned_conditions(self) -> tuple[OwnedCondition, ...]:
        return self.session.owned()  # of the present session: a reload may replace it

    def _status_notes(self) -> tuple[Note, ...]:
        """What `check` reports of this agent, besides what it reads itself."""
        session, runtime = self.session, self._runtime
        rejected: tuple[Note, ...] = ()
        if self._rejected:
            why = "; ".join(self._rejected.values())
            text = f"new configuration rejected, still using the old one: {why}"
            rejected = (Note(NoteKind.CONFIGURATION, text),)
        return (
            *runtime.startup_notes,
            *workers.stuck_notes(),
            *condition_conflicts.conflict_notes(session.conflicts()),
            *session.notes(),
            *runtime.profiles.notes(self._components.loaded),
            *rejected,
            *self._components.missing,
            *page_cache.note(self._components.sampler.host_layout().page_cache_blocked, config=self._config),
            *self.wakeup_sources.notes,
            *runtime.other_oom_handlers(),
            *runtime.oom_scores.notes,
            *self.oom_monitor.notes(),
            *self._reporting_notes(),
        )

    def _counters(self) -> RuntimeCounters:
        """What other packages count, for a scrape; called from the endpoint's thread."""
        session = self.session
        counts = session.counts()
        disks = self._components.disks.progress()
        return RuntimeCounters(
            pods_synced_at=counts.pods_synced_at,
            condition_conflicts=session.conflicts(),
            asserted=frozenset(each.type for each in session.owned()),
            tainted=frozenset(kind.value for kind in ConditionType if session.tainted(kind)),
            watches=counts.watches,
            condition_writes=counts.condition_writes,
            events_dropped=counts.events_dropped,
            log_lines_dropped=self._runtime.lines_dropped(),
            brakes_active=len(self._runtime.brakes.active),
            oom_scores_raised=self._runtime.oom_scores.pods,
            api_evictions_in_flight=counts.in_flight,
            api_identity=counts.api_identity,
            workers_stuck=[each.kind for each in workers.stuck_workers()],
            worker_failures=workers.failure_counts(),
            workers_failed=workers.failing_workers(),
            profiles=node_profiles.active(self._components.loaded),
            recorder=sample_recording.counts(self._runtime.sample_recorder),
            walk=WalkCounters(disks.running, *disks.progress, disks.took_s, disks.finished_at) if disks else None,
        )

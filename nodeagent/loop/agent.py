"""The loop: when to sample, what to hand to the policy, and whom to hand its plan to.

Promises:

1. One snapshot, one decision. Everything that changes hands is a value; the only memory is the state that the policy
   returns.
2. The loop waits for nothing but its next wake-up: the API, the log and the service manager are other threads' work.
3. A turn that fails is told and the next one starts afresh; the watchdog is fed only by turns that succeeded.
4. A new configuration is validated first and acts first in a later turn, after enough fresh samples; one that cannot be
   used changes nothing.
"""

import functools
import math
import signal
from collections.abc import Callable, Mapping
from typing import Final

from nodeagent.actuators.conditions import OwnedCondition
from nodeagent.config.config_file import config_changes
from nodeagent.config.load import LoadedConfig
from nodeagent.config.problems import ConfigError
from nodeagent.config.schema import Config, Mode, OnExit
from nodeagent.loop import schedule as pacing
from nodeagent.loop.components import Components, Runtime
from nodeagent.loop.executor import Executor
from nodeagent.loop.state_store import StateStore
from nodeagent.model import (
    ConditionStatus,
    ConditionType,
    DiskLayout,
    NodeSnapshot,
    Note,
    NoteKind,
    Plan,
    PodSource,
    Threshold,
)
from nodeagent.policy import candidates, engine, in_flight, thresholds, victim_preview
from nodeagent.policy import state as policy_state
from nodeagent.policy.state import PolicyState
from nodeagent.records.flight_recorder import DecisionInputs
from nodeagent.runtime import own_cost, workers
from nodeagent.runtime.self_protection import SpareDescriptors
from nodeagent.runtime.wakeups import Wakeups
from nodeagent.sampling.disk.monitor import DiskUrgency
from nodeagent.sampling.events import fork_meter
from nodeagent.sampling.sampler import assemble_snapshot
from nodeagent.telemetry import condition_conflicts
from nodeagent.telemetry.decision_log import DecisionLog, status
from nodeagent.telemetry.endpoint import Endpoint, build_pages
from nodeagent.telemetry.http_server import AddressError
from nodeagent.telemetry.metrics import Failure, Metrics, RuntimeCounters, SyncStage, WalkCounters, WatchCounters

STARTUP_API_WAIT_S: Final = 3.0
"""For how long after its start a calm agent looks at no pod before the API has told of them, which takes 0.3 s: what it
tells need not be asked of each pod's processes."""
STATUS_EVERY_S: Final = 30.0
"""How often the service manager's one-line status is renewed."""
UNLISTED_S: Final = 1.5
"""A pod that is older than this and known to the host alone is missing in the API's view: a kubelet starts only pods
that the API server has sent to it, and a watch is no further behind than that."""
LATE_S: Final = 1.0
"""From here on a late turn is told: in it the fastest ramp measured takes a GiB."""
FORKS_ALONE: Final = frozenset({"forks"})
FAILURES_IN_A_ROW: Final = 10
"""A turn may fail for a reason that passes; ten in a row will not, and a fresh process may do better."""


class Agent:
    """One node's agent."""

    def __init__(
        self,
        parts: Components,
        means: Runtime,
        *,
        rebuild: Callable[[Components, LoadedConfig], Components],
        policy: PolicyState,
    ) -> None:
        """`rebuild` makes the parts of a new configuration from those of the old one; `policy` is what an earlier
        process has left, or an initial state."""
        self._parts = parts
        self._means = means
        self._rebuild = rebuild
        self._alarms, self._holds, self._forks = means.wakeup_sources, means.brakes, means.forks
        self._hooks = means.reclaim_runner
        self._log, self._boottime = means.log, means.boottime
        self._metrics = Metrics(self._config, boottime=means.boottime, runtime_counters=self._figures)
        unrecorded = functools.partial(self._metrics.observe_failure, Failure.RECORD)
        self._teller = DecisionLog(means.log, means.recorder, unrecorded=unrecorded)
        self._keeper = StateStore(
            policy,
            means.store,
            restorable_until=means.restorable_until,
            lock=means.lock,
            holds=means.brakes,
            owned=self._owned,
            says=self._status_notes,
            metrics=self._metrics,
            log=means.log,
        )
        self._actor = Executor(means, keeper=self._keeper, teller=self._teller, metrics=self._metrics)
        self._endpoint = Endpoint(
            build_pages(self._metrics, config=lambda: self._config, boottime=means.boottime),
            failed=lambda trouble: self._log.warning("metrics page failed", reason=trouble, once=trouble),
        )
        self._refused = ""
        """Why the newest configuration is not in force."""
        self._spare = SpareDescriptors()
        self._cost: own_cost.ProcessCost | None = None
        self._stretch = 1.0
        """Of the calm sampling interval, while the agent costs more than it should."""
        self._ranking_cache = candidates.RankingCache()
        self._prepared: NodeSnapshot | None = None
        """Taken when a threshold was about to be crossed, for the decision on that."""
        self._pace = pacing.ScheduleState()
        self._counting = False
        """Whether the last decision waits for what pods hold on disk."""
        self._effective: dict[DiskLayout, tuple[Threshold, ...]] = {}
        self._status_at = float("-inf")
        self._woken: frozenset[str] = frozenset()
        """Why the present turn was taken, and when."""
        self._woke_at = self._began_at = means.monotonic()

    @property
    def _config(self) -> Config:
        return self._parts.config

    def _owned(self) -> tuple[OwnedCondition, ...]:
        return self._parts.session.owned()

    def _status_notes(self) -> tuple[Note, ...]:
        """What the report of `check` is to say of this agent, beside what it sees itself."""
        session, means = self._parts.session, self._means
        own = (
            *means.startup_notes,
            *workers.stuck_notes(),
            *condition_conflicts.conflict_notes(session.conflicts()),
            *session.notes(),
        )
        if self._refused:
            own += (Note(NoteKind.CONFIGURATION, f"a new one was refused, the old one stays: {self._refused}"),)
        return (*own, *self._parts.missing, *self._alarms.notes, *means.other_oom_handlers())

    def serve(self) -> None:
        """Serve metrics and probes where the configuration says. Raises AddressError."""
        self._endpoint.move(self._config.metrics.address)

    def _figures(self) -> RuntimeCounters:
        """What other rooms count, for a scrape; called from the endpoint's thread."""
        session = self._parts.session
        counts = session.counts()
        disks = self._parts.disks.progress()
        return RuntimeCounters(
            pods_synced_at=counts.pods_synced_at,
            condition_conflicts=session.conflicts(),
            asserted=frozenset(each.type for each in session.owned()),
            tainted=frozenset(kind.value for kind in ConditionType if session.tainted(kind)),
            watches=tuple(WatchCounters(*each) for each in counts.watches),
            condition_writes=counts.condition_writes,
            events_dropped=counts.events_dropped,
            log_lines_dropped=self._means.lines_dropped(),
            brakes_active=len(self._holds.active),
            eviction_requests_in_flight=counts.in_flight,
            workers_stuck=[each.kind for each in workers.stuck_workers()],
            worker_failures=workers.failure_counts(),
            workers_failed=workers.failing_workers(),
            walk=WalkCounters(disks.running, *disks.progress, disks.took_s, disks.finished_at) if disks else None,
        )

    # --- the loop ----------------------------------------------------------------------------------------------------

    def run(self, wakeups: Wakeups, *, turns: int | None = None) -> bool:
        """Turn until SIGTERM or SIGINT (or for so many turns). True when the process is to begin anew, because it may
        act now and could not before, or the other way round."""
        if source := self._forks.source():
            wakeups.register(source.fd, source.name, source.drain, source.events)
        self._teller.log_notes(self._means.startup_notes)
        if self._config.mode is Mode.ENFORCE:
            self._keeper.prove(now=self._boottime())
        self._means.notifier.ready()
        if turns is not None:
            self._began_at = float("-inf")  # each of so few turns is to decide
        failures = 0
        while turns is None or turns > 0:
            if turns is None and self._changes_role():
                return True
            turns = None if turns is None else turns - 1
            began, began_awake = self._boottime(), self._means.monotonic()
            try:
                sleep_s = self.sync()
                self.update_wakeup_sources(wakeups)
            except Exception:
                failures += 1
                self._metrics.observe_failure(Failure.SYNC)
                if failures >= FAILURES_IN_A_ROW:
                    raise
                self._log.exception("sync failed", consecutive=failures)
                sleep_s = self._config.sampling.interval_s
            else:
                failures = 0
                self._means.notifier.alive()
                self._metrics.observe_sync(at=began, reasons=self._woken)
                self._metrics.observe_stage(SyncStage.SYNC, self._means.monotonic() - began_awake)
            if self._wait(wakeups, sleep_s, began=began, began_awake=began_awake):
                return False
        return False

    def _changes_role(self) -> bool:
        lock = self._means.lock
        if lock is None or not (self._means.standby or lock.held):
            return False
        other = lock.take()
        if bool(other) == self._means.standby:
            return False
        self._log.warning("another agent acts on this node" if other else "no other agent acts any more", lock=other)
        return True

    def sync(self) -> float:
        """Look; when it matters sample everything, decide, act and tell. Returns how long to sleep."""
        self.check_own_cost()
        # Threads that had no PID when they were made: the loop is the one that is there.
        waiting_s = workers.start_waiting()
        self._actor.apply_outcomes(self._parts)
        # What an eviction brought back is measured as soon as its pod is gone, before others take it.
        waits = in_flight.awaits_release(self._keeper.policy.in_flight)
        before, sampling, now = self._pace, self._config.sampling, self._boottime()
        node = self._parts.sampler.sample_node(
            disks=waits or now >= before.filesystems_at, limits=waits or now >= before.limits_at
        )
        left_s = self.startup_wait_s()
        pace, self._pace = pacing.plan_next(
            pacing.ScheduleInputs(
                node,
                self._thresholds(node.layout),
                own_cost.longer_interval(sampling.interval_s, self._stretch, stale_after_s=sampling.stale_after_s),
                calm_s=min(pacing.CALM_S, sampling.stale_after_s / 2),
                work_pending=self.work_pending(node.taken_at),
                eviction_in_flight=waits,
                startup_wait_s=left_s,
                can_cap_growth=self._actor.can_cap_growth(self._config),
            ),
            before,
        )
        around = self._parts.sampler.host_layout()
        need = DiskUrgency(crossed=pace.crossed, near=pace.near)
        self._parts.disks.request_walks(node, need, hierarchy=around.hierarchy, layout=around.layout)
        if pace.full_sample:
            self.decide_and_act(node)
        elif pace.prearm or pace.growth_cap:
            self.prearm(node, guard=pace.growth_cap)
        if pace.under_pressure:
            # After the decision, which would share the interpreter with the threads that this sets going.
            self._parts.session.prewarm()
        self._alarms.arm(pace.headroom)
        # What has a time of its own does not wait for the next look, which may be a minute away.
        times = [hold.until for hold in self._holds.active]
        return min([pace.sleep_s, waiting_s, *[at - node.taken_at for at in times if at > node.taken_at]])

    def stop(self, *, anew: bool = False) -> None:
        """Let go what is held, take back (or mark) what we have set on the Node, and keep the rest for the next
        process. `anew`: the service goes on in this one."""
        if not anew:
            self._means.notifier.stopping()
        self._endpoint.close()
        self._holds.close()
        self._hooks.close()
        clear = self._config.conditions.on_exit is OnExit.CLEAR
        if left := self._parts.session.stop(clear=clear, mark=not clear):
            self._log.warning("cleanup incomplete", what=left)
        self._keeper.close(now=self._boottime())
        self._parts.disks.close()
        self._parts.sampler.close()

    def _wait(self, wakeups: Wakeups, sleep_s: float, *, began: float, began_awake: float) -> bool:
        """Sleep until something happens; a new configuration is taken here. True when it is time to go. The turn began
        at `began`, `began_awake` on the clock that stands still while the machine is suspended: it may have slept in
        the middle of the turn."""
        sleep_s = min(sleep_s, (self._means.notifier.watchdog_s or float("inf")) / 3)
        until = began + sleep_s
        reasons, signals = wakeups.wait(until - self._boottime())
        while reasons == FORKS_ALONE and not signals and not self._forks.storm(self._boottime()):
            # Somebody forks: counted, and no reason to look at the node, unless it is a storm.
            reasons, signals = wakeups.wait(until - self._boottime())
        self._woken, self._woke_at = reasons, self._means.monotonic()
        self._late(self._woke_at - (began_awake + sleep_s))
        for number in signals:
            if number in (signal.SIGTERM, signal.SIGINT):
                self._log.info("stopping", signal=number.name)
                return True
        if signal.SIGHUP in signals or self._means.file.changed(now=self._boottime()):
            self._reload()
        return False

    def _late(self, late_s: float) -> None:
        """A turn begins this much later than planned, while the machine was awake."""
        self._metrics.observe_stage(SyncStage.START_DELAY, max(0.0, late_s))
        if late_s >= LATE_S:
            # By powers of two, so that a node that crawls is one line and not one for each turn.
            at_least_s = 2.0 ** math.floor(math.log2(late_s))
            self._teller.log_notes((Note(NoteKind.LOOP, f"sync started at least {at_least_s:g}s late"),))

    def _reload(self) -> None:
        """Promise 4."""
        self._means.notifier.reloading()
        try:
            loaded = self._means.file.load()
            # First: what `rebuild` has replaced does not come back.
            self._endpoint.move(loaded.config.metrics.address)
            try:
                parts = self._rebuild(self._parts, loaded)
            except ConfigError:
                self._endpoint.move(self._config.metrics.address)
                raise
        except (ConfigError, AddressError) as error:
            self._metrics.observe_reload(None)
            problems = [str(each) for each in error.problems] if isinstance(error, ConfigError) else [str(error)]
            self._refused = "; ".join(problems)
            self._log.error("configuration rejected", problems=problems)
            self._parts.session.emit_node_event("ConfigurationRejected", self._refused, action="Reloading")
        else:
            self._refused = ""
            self._teller.log_config_changes(config_changes(self._parts.loaded, loaded))
            self._parts = parts
            self._metrics.observe_reload(parts.config)
            self._effective.clear()
            self._prepared = None
            self._pace = self._pace._replace(
                full_sample_at=None, calm=0, filesystems_at=pacing.NOT_YET, limits_at=pacing.NOT_YET
            )
            policy = self._keeper.policy
            self._keeper.policy = policy_state.restored(policy, instance=policy.instance)
        self._means.notifier.ready()

    def check_own_cost(self) -> None:
        """Descriptors at every turn, CPU and memory now and then."""
        notes: tuple[Note, ...] = ()
        if trouble := self._spare.check():
            notes = (trouble,)
        now = self._boottime()
        if self._cost is None or now - self._cost.read_at >= own_cost.READ_EVERY_S:
            before, self._cost = self._cost, own_cost.read_cost(now)
            verdict = own_cost.assess_cost(before, self._cost, own_cost.CostLimits(), interval_factor=self._stretch)
            self._stretch = verdict.interval_factor
            if verdict.trim:
                own_cost.trim_memory()
            notes += verdict.notes
        self._teller.log_notes(notes)

    def update_wakeup_sources(self, wakeups: Wakeups) -> None:
        """Have the wake-up sources for where the pods are now."""
        around = self._parts.sampler.host_layout()
        if not self._alarms.stale(around.hierarchy, around.kubepods):
            return
        for source in self._alarms.sources:
            wakeups.unregister(source.fd)
        self._alarms.open(around.hierarchy, around.kubepods)
        for source in self._alarms.sources:
            wakeups.register(source.fd, source.name, source.drain, source.events)

    # --- parts of a turn ---------------------------------------------------------------------------------------------

    def _thresholds(self, layout: DiskLayout) -> tuple[Threshold, ...]:
        if layout not in self._effective:
            self._effective[layout] = thresholds.effective(self._config, layout)
        return self._effective[layout]

    def work_pending(self, now: float) -> bool:
        """Whether decisions follow something that goes on although no threshold is crossed."""
        policy = self._keeper.policy
        measuring = any(not run.measured for run in policy.reclaims.runs.values())
        held = any(each.status is ConditionStatus.TRUE for each in policy.conditions.conditions.values())
        return bool(policy.thresholds.first_observed) or held or measuring or self._counting or self._forks.storm(now)

    def startup_wait_s(self) -> float:
        left_s, view = self._began_at + STARTUP_API_WAIT_S - self._means.monotonic(), self._parts.session.pods()
        return left_s if view.awaited and view.synced_at is None else 0.0

    def observe_pods(self, node: NodeSnapshot) -> NodeSnapshot:
        """Every pod that moved is read now; one that barely did keeps its last reading (0.6 ms instead of 10 ms for 110
        pods), which stands where it stood in any order."""
        # Asked first: when nothing is waited for, the budgets are in the view that is read after it.
        soft_waits_for = self._parts.session.soft_tier_block()
        view = self._parts.session.pods()
        known = view.synced_at is not None
        snapshot = self._parts.sampler.sample(
            view.pods if known else None,
            view.synced_at,
            fresh=False,
            node=node,
        )
        if known:
            self._parts.session.report_missing(_unlisted(snapshot, listed=len(view.pods)))
        if in_flight.awaits_release(self._keeper.policy.in_flight):
            # Gone from its victim and not yet free on the node, what comes back would look like a need for one more.
            snapshot = self._parts.sampler.node_last(snapshot)
        snapshot = fork_meter.apply(snapshot, self._forks.sustained(snapshot.taken_at))
        return self._parts.disks.apply(snapshot).with_surroundings(
            own_pod_uid=self._means.own_pod_uid,
            api_unreachable_since=view.unreachable_since,
            soft_tier_blocked_by=soft_waits_for,
        )

    def prearm(self, node: NodeSnapshot, *, guard: bool) -> None:
        """Do before a hard threshold is crossed what takes time or comes too late then."""
        snapshot = self._prepared = self.observe_pods(node)
        self._ranking_cache.prepare(snapshot, config=self._config)
        if guard:
            now = snapshot.taken_at
            victims = victim_preview.preview_victims(
                snapshot, self._keeper.policy, now=now, config=self._config, cache=self._ranking_cache
            )
            self._actor.cap_growth(victims, self._config, now=now)

    def decide_and_act(self, node: NodeSnapshot) -> None:
        with self._metrics.timed(SyncStage.SAMPLE):
            prepared, self._prepared = self._prepared, None
            if prepared is not None and 0.0 <= node.taken_at - prepared.taken_at <= pacing.PREARM_VALID_S:
                snapshot = assemble_snapshot(prepared, node)
            else:
                snapshot = self.observe_pods(node)
        before = self._keeper.policy
        with self._metrics.timed(SyncStage.DECIDE):
            plan, self._keeper.policy = engine.decide(
                snapshot,
                before,
                now=snapshot.taken_at,
                config=self._config,
                cache=self._ranking_cache,
                always_rank=False,
            )
        self._metrics.observe_stage(SyncStage.WAKE_TO_DECISION, self._means.monotonic() - self._woke_at)
        # What holds a victim in place comes before everything that wakes other threads or takes time to tell.
        saved = self._actor.brake(plan, self._parts) if plan.victims else True
        # So does the second look: while others are awake each of its reads may wait for them (3 ms instead of 0.4).
        fresh = self._actor.recheck(plan, snapshot, self._parts) if plan.victims else snapshot
        self._metrics.observe_plan(plan, snapshot)
        self._parts.session.publish(plan.conditions)
        self._parts.session.announce(plan)
        if plan.victims:
            self._teller.log_victims(plan, acts=self._config.mode is Mode.ENFORCE)
            self._actor.evict(plan, fresh, self._parts, saved=saved)
        if plan.reclaims:
            self._actor.start_reclaim(plan, snapshot, self._parts)
        self._parts.disks.recount(plan.recount)
        self._counting = bool(plan.recount)
        self.record(plan, snapshot, before)
        self._keeper.save(now=snapshot.taken_at, at_once=False)

    def record(self, plan: Plan, snapshot: NodeSnapshot, before: PolicyState) -> None:
        notes = (*snapshot.notes, *self._parts.session.notes(), *self._alarms.notes, *self._means.other_oom_handlers())
        notes += (*workers.stuck_notes(), *self._holds.take_notes(), *self._parts.missing)
        if self._forks.storm(snapshot.taken_at):
            notes += (_storm_note(self._forks.rates(snapshot.taken_at)),)
        inputs = DecisionInputs(
            snapshot=snapshot,
            state=before,
            now=snapshot.taken_at,
            thresholds=self._thresholds(snapshot.layout),
            fresh_samples=self._config.startup.fresh_samples,
        )
        self._teller.log_plan(plan, acts=self._config.mode is Mode.ENFORCE, notes=notes, inputs=inputs)
        if snapshot.taken_at - self._status_at >= STATUS_EVERY_S:
            self._status_at = snapshot.taken_at
            self._means.notifier.status(status(plan, snapshot))


def _unlisted(snapshot: NodeSnapshot, *, listed: int) -> frozenset[str]:
    """UIDs of the cgroups of pods that the API server should have listed by now. In a snapshot its own stand first."""
    at = snapshot.taken_at
    return frozenset(
        [
            usage.cgroup_uid
            for pod, usage in snapshot.pods[listed:]
            if pod.source is PodSource.HOST
            and usage is not None
            and (usage.started_at is None or at - usage.started_at >= UNLISTED_S)
        ]
    )


def _storm_note(rates: Mapping[str, float]) -> Note:
    """Who forks, by hundreds a second, so that a lasting storm is one note."""
    busiest = sorted(rates.items(), key=lambda each: -each[1])[:3]
    words = ", ".join(f"{uid} about {round(rate, -2):.0f}/s" for uid, rate in busiest)
    return Note(NoteKind.FORKS, f"a fork storm: {words}")

"""The loop: when to sample, what to hand to the policy, and whom to hand its plan to.

Promises:

1. One snapshot, one decision. Everything that changes hands is a value; the only memory is the state that the policy
   returns, and it is on disk before a request that depends on it leaves.
2. The loop waits for nothing but its next wake-up: the API, the log and the service manager are other threads' work.
3. Nobody is evicted on an old sight of things: right before a victim is handed over, the node is sampled again and the
   policy asked again.
4. A turn that fails is told and the next one starts afresh; the watchdog is fed only by turns that succeeded.
5. A new configuration is validated first and acts first in a later turn, after enough fresh samples; one that cannot be
   used changes nothing.
"""

import contextlib
import functools
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from nodeagent.cluster.conditions import OwnedCondition
from nodeagent.cluster.session import Session
from nodeagent.config.load import Loaded
from nodeagent.config.problems import ConfigError
from nodeagent.config.schema import Brake, Config, HardKill, Mode
from nodeagent.config.watch import ConfigFile, changes
from nodeagent.host import cost
from nodeagent.host import hooks as jobs
from nodeagent.host.brake import BrakeKind, Hold
from nodeagent.host.holds import THAW_AFTER_GRACE_S, Holds
from nodeagent.host.hooks import Hooks
from nodeagent.host.notify import Notifier
from nodeagent.host.protect import SpareDescriptors
from nodeagent.host.wakeup import Wakeups
from nodeagent.journal.records import Inputs, Recorder
from nodeagent.journal.state import StateFile
from nodeagent.journal.teller import Teller, status
from nodeagent.model import (
    ConditionType,
    DiskLayout,
    Method,
    NodeSnapshot,
    Note,
    Outcome,
    OutcomeKind,
    Plan,
    ReclaimOutcome,
    ReclaimResult,
    Threshold,
    Tier,
    Victim,
)
from nodeagent.policy import engine, thresholds
from nodeagent.policy import pace as pacing
from nodeagent.policy import state as policy_state
from nodeagent.policy.state import PolicyState
from nodeagent.report.metrics import Failure, Figures, Metrics, Stage, WatchFigures
from nodeagent.report.pages import Endpoint, pages
from nodeagent.report.server import AddressError
from nodeagent.sampling.alarms import Alarms
from nodeagent.sampling.disk.watch import DiskWatch, Need
from nodeagent.sampling.forks import ForkMeter
from nodeagent.sampling.sampler import Sampler

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

SAVE_EVERY_S: Final = 10.0
"""State is saved at once when a plan acts, and this often otherwise: what a crash may lose is at most this much of a
running grace period, which then takes that much longer. A save takes 0.3 ms on a tmpfs."""
STATUS_EVERY_S: Final = 30.0
"""How often the service manager's one-line status is renewed."""
FORKS_ALONE: Final = frozenset({"forks"})
FAILURES_IN_A_ROW: Final = 10
"""A turn may fail for a reason that passes; ten in a row will not, and a fresh process may do better."""


class AgentState(NamedTuple):
    """All that survives a restart."""

    policy: PolicyState
    owned: tuple[OwnedCondition, ...] = ()
    """Conditions that we have set on the Node."""
    holds: tuple[Hold, ...] = ()
    """Cgroups that are held, or were about to be."""


class Parts(NamedTuple):
    """What a configuration makes, and a new one makes anew."""

    loaded: Loaded
    sampler: Sampler
    session: Session
    disks: DiskWatch


class Means(NamedTuple):
    """What the process has to work with, whatever its configuration is."""

    file: ConfigFile
    alarms: Alarms
    holds: Holds
    hooks: Hooks
    forks: ForkMeter
    neighbours: Callable[[], tuple[Note, ...]]
    """Who else kills on this node."""
    store: StateFile | None
    """None where there is no directory to write to."""
    recorder: Recorder | None
    """None likewise."""
    found: tuple[Note, ...]
    """What was found at the start that the reader should know."""
    log: "FilteringBoundLogger"
    lines_dropped: Callable[[], int]
    """Of the log."""
    notifier: Notifier
    boottime: Callable[[], float]
    own_pod_uid: str = ""


class Agent:
    """One node's agent."""

    def __init__(
        self, parts: Parts, means: Means, *, rebuild: Callable[[Parts, Loaded], Parts], state: AgentState
    ) -> None:
        """`rebuild` makes the parts of a new configuration from those of the old one."""
        self._parts = parts
        self._means = means
        self._rebuild = rebuild
        self._policy = state.policy
        self._alarms, self._holds, self._forks = means.alarms, means.holds, means.forks
        self._hooks = means.hooks
        self._log, self._boottime = means.log, means.boottime
        self._metrics = Metrics(self._config, boottime=means.boottime, figures=self._figures)
        unrecorded = functools.partial(self._metrics.observe_failure, Failure.RECORD)
        self._teller = Teller(means.log, means.recorder, unrecorded=unrecorded)
        self._endpoint = Endpoint(
            pages(self._metrics, config=lambda: self._config, boottime=means.boottime),
            failed=lambda trouble: self._log.warning("page not made", reason=trouble, once=trouble),
        )
        self._victims: dict[str, Victim] = {}
        """Handed over and not answered yet, by UID."""
        self._spare = SpareDescriptors()
        self._cost: cost.Cost | None = None
        self._stretch = 1.0
        """Of the calm sampling interval, while the agent costs more than it should."""
        self._memo = engine.Memo()
        self._pace = pacing.PaceState()
        self._effective: dict[DiskLayout, tuple[Threshold, ...]] = {}
        self._saved_at = float("-inf")
        self._status_at = float("-inf")
        self._woken: frozenset[str] = frozenset()
        """Why the present turn was taken, and when."""
        self._woke_at = means.boottime()

    @property
    def _config(self) -> Config:
        return self._parts.loaded.config

    def serve(self) -> None:
        """Serve metrics and probes where the configuration says. Raises AddressError."""
        self._endpoint.move(self._config.metrics.address)

    def _figures(self) -> Figures:
        """What other rooms count, for a scrape; called from the endpoint's thread."""
        session = self._parts.session
        counts = session.counts()
        return Figures(
            pods_synced_at=counts.pods_synced_at,
            contests=session.contests(),
            asserted=frozenset(each.type for each in session.owned()),
            fenced=frozenset(kind.value for kind in ConditionType if session.fenced(kind)),
            watches=tuple(WatchFigures(*each) for each in counts.watches),
            condition_writes=counts.condition_writes,
            events_dropped=counts.events_dropped,
            log_lines_dropped=self._means.lines_dropped(),
            brakes_held=len(self._holds.held),
            requests_in_flight=counts.in_flight,
        )

    # --- the loop ----------------------------------------------------------------------------------------------------

    def run(self, wakeups: Wakeups, *, turns: int | None = None) -> None:
        """Turn until SIGTERM or SIGINT (or for so many turns)."""
        if source := self._forks.source():
            wakeups.register(source.fd, source.name, source.drain, source.events)
        self._teller.notes(self._means.found)
        self._means.notifier.ready()
        failures = 0
        while turns is None or turns > 0:
            turns = None if turns is None else turns - 1
            began = self._boottime()
            try:
                sleep_s = self.turn()
                self.watch(wakeups)
            except Exception:
                failures += 1
                self._metrics.observe_failure(Failure.TURN)
                if failures >= FAILURES_IN_A_ROW:
                    raise
                self._log.exception("a turn of the loop failed", in_a_row=failures)
                sleep_s = self._config.sampling.interval_s
            else:
                failures = 0
                self._means.notifier.alive()
                self._metrics.observe_turn(at=began, reasons=self._woken)
                self._metrics.observe_stage(Stage.TURN, self._boottime() - began)
            if self._pause(wakeups, sleep_s, began=began):
                return

    def turn(self) -> float:
        """Look; when it matters sample everything, decide, act and tell. Returns how long to sleep."""
        self._look_after_itself()
        self._settle(self._parts.session.outcomes())
        self._settle_reclaims(self._hooks.finished())
        self._holds.expire(now=self._boottime())
        node = self._parts.sampler.sample_node()
        pace, self._pace = pacing.look(
            node,
            self._pace,
            now=node.taken_at,
            thresholds=self._thresholds(node.layout),
            interval_s=self._config.sampling.interval_s * self._stretch,
        )
        if pace.pressed:
            self._parts.session.warm()
        around = self._parts.sampler.surroundings()
        need = Need(crossed=pace.crossed, near=pace.near)
        self._parts.disks.tick(node, need, hierarchy=around.hierarchy, layout=around.layout)
        # What an eviction brought back is measured as soon as its pod is gone, before others take it.
        if pace.whole or self._policy.ledger.entries:
            self._decide()
        self._alarms.arm(pace.headroom)
        return pace.sleep_s

    def stop(self) -> None:
        """Let go what is held, take back what we have set on the Node, and keep the rest for the next process."""
        self._means.notifier.stopping()
        self._endpoint.close()
        self._holds.close()
        self._hooks.close()
        if left := self._parts.session.stop(clear=True):
            self._log.warning("left behind", what=left)
        self._save(now=self._boottime(), at_once=True)
        self._parts.disks.close()
        self._parts.sampler.close()

    def _pause(self, wakeups: Wakeups, sleep_s: float, *, began: float) -> bool:
        """Sleep until something happens; a new configuration is taken here. True when it is time to go."""
        until = began + min(sleep_s, (self._means.notifier.watchdog_s or float("inf")) / 3)
        reasons, signals = wakeups.wait(until - self._boottime())
        while reasons == FORKS_ALONE and not signals and not self._forks.storm(self._boottime()):
            # Somebody forks: counted, and no reason to look at the node, unless it is a storm.
            reasons, signals = wakeups.wait(until - self._boottime())
        self._woken, self._woke_at = reasons, self._boottime()
        for number in signals:
            if number in (signal.SIGTERM, signal.SIGINT):
                self._log.info("stopping", signal=number.name)
                return True
        if signal.SIGHUP in signals or self._means.file.changed(now=self._boottime()):
            self._reload()
        return False

    def _reload(self) -> None:
        """Promise 5."""
        self._means.notifier.reloading()
        try:
            loaded = self._means.file.load()
            parts = self._rebuild(self._parts, loaded)
            self._endpoint.move(parts.loaded.config.metrics.address)
        except (ConfigError, AddressError) as error:
            self._metrics.observe_reload(None)
            problems = [str(each) for each in error.problems] if isinstance(error, ConfigError) else [str(error)]
            self._log.error("configuration refused, the old one stays", problems=problems)
            self._parts.session.tell_node("ConfigurationRefused", "; ".join(problems), action="Reloading")
        else:
            self._teller.changes(changes(self._parts.loaded, loaded))
            self._parts = parts
            self._metrics.observe_reload(parts.loaded.config)
            self._effective.clear()
            self._policy = policy_state.restored(self._policy, instance=self._policy.instance)
        self._means.notifier.ready()

    def _look_after_itself(self) -> None:
        """Descriptors at every turn, CPU and memory now and then."""
        notes: tuple[Note, ...] = ()
        if trouble := self._spare.check():
            notes = (trouble,)
        now = self._boottime()
        if self._cost is None or now - self._cost.read_at >= cost.READ_EVERY_S:
            before, self._cost = self._cost, cost.read(now)
            verdict = cost.judge(before, self._cost, cost.Budget(), stretch=self._stretch)
            self._stretch = verdict.stretch
            if verdict.trim:
                cost.trim()
            notes += verdict.notes
        self._teller.notes(notes)

    def watch(self, wakeups: Wakeups) -> None:
        """Have the wake-up sources for where the pods are now."""
        around = self._parts.sampler.surroundings()
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

    def _sample(self) -> NodeSnapshot:
        """Every pod that moved is read now; one that barely did keeps its last reading (0.6 ms instead of 10 ms for 110
        pods), which stands where it stood in any order."""
        view = self._parts.session.pods()
        known = view.synced_at is not None
        snapshot = self._parts.sampler.sample(view.pods if known else None, view.synced_at, fresh=False)
        return self._parts.disks.apply(snapshot)._replace(
            own_pod_uid=self._means.own_pod_uid,
            api_lost_at=view.lost_at,
            soft_waits_for=self._parts.session.soft_wait(),
        )

    def _decide(self) -> None:
        with self._timed(Stage.SAMPLE):
            snapshot = self._sample()
        before = self._policy
        with self._timed(Stage.DECIDE):
            plan, self._policy = engine.decide(
                snapshot, before, now=snapshot.taken_at, config=self._config, memo=self._memo, always_rank=False
            )
        self._metrics.observe_stage(Stage.WAKE_TO_DECISION, self._boottime() - self._woke_at)
        # What holds a victim in place comes before everything that wakes other threads or takes time to tell.
        saved = self._hold(plan) if plan.victims else True
        self._metrics.observe_plan(plan, snapshot)
        self._parts.session.publish(plan.conditions)
        self._parts.session.decided(plan)
        if plan.victims:
            self._teller.intends(plan, acts=self._config.mode is Mode.ENFORCE)
            self._act(plan, snapshot, saved=saved)
        if plan.reclaims:
            self._reclaim(plan, snapshot)
        self._tell(plan, snapshot, before)
        self._save(now=snapshot.taken_at, at_once=False)

    @contextlib.contextmanager
    def _timed(self, stage: Stage) -> Iterator[None]:
        began = self._boottime()
        yield
        self._metrics.observe_stage(stage, self._boottime() - began)

    def _look_again(self, plan: Plan, snapshot: NodeSnapshot) -> NodeSnapshot:
        view = self._parts.session.pods()
        uids = frozenset(victim.pod.uid for victim in plan.victims)
        again = self._parts.sampler.look_again(snapshot, view.pods, view.synced_at, pod_uids=uids)
        again = self._parts.disks.apply(again, whole=False)
        return again._replace(own_pod_uid=self._means.own_pod_uid, api_lost_at=snapshot.api_lost_at)

    def _hold(self, plan: Plan) -> bool:
        """Hold the victims, where that is wanted. The tokens that they cost, and what is held, are on disk before;
        False when that could not be."""
        held = self._plan_holds(plan) if self._config.mode is Mode.ENFORCE else []
        saved = self._save(now=plan.made_at, at_once=True)
        for victim in held:
            self._holds.apply(victim.pod.uid)
        return saved

    def _act(self, plan: Plan, snapshot: NodeSnapshot, *, saved: bool) -> None:
        """Look a second time and hand the victims over."""
        if self._config.mode is Mode.DRY_RUN:
            self._settle([_outcome(plan, victim, OutcomeKind.DRY_RUN, "", self._boottime()) for victim in plan.victims])
            return
        with self._timed(Stage.RECHECK):
            fresh = self._look_again(plan, snapshot)
        for victim in plan.victims:
            refusal = engine.recheck(victim, fresh, self._policy, now=fresh.taken_at, config=self._config)
            why = refusal.message if refusal else ""
            if not why and not saved and (victim.tier is Tier.SOFT or victim.method is Method.KILL):
                # Budgets must hold across crashes; without a saved state only what cannot wait is done.
                why = "the state could not be saved"
            if why:
                self._settle([_outcome(plan, victim, OutcomeKind.RECHECK_REFUSED, why, self._boottime())])
            elif victim.method is Method.KILL:
                self._kill(plan, self._reworded(victim, plan, fresh))
            else:
                self._victims[victim.pod.uid] = victim
                self._parts.session.evict(plan.id, self._reworded(victim, plan, fresh))

    def _reclaim(self, plan: Plan, snapshot: NodeSnapshot) -> None:
        """Begin what is tried before anybody is evicted. That it was begun is on disk before."""
        acts = self._config.mode is Mode.ENFORCE
        self._teller.reclaiming(plan, acts=acts)
        saved = self._save(now=plan.made_at, at_once=True)
        actions = {action.name: action for action in self._config.reclaim.actions}
        running = frozenset(view.usage.cgroup_uid for view in snapshot.pods if view.usage is not None)
        logs = self._config.sampling.pod_logs_dir
        for order in plan.reclaims:
            if not acts or not (saved or order.tier is Tier.HARD):
                result = ReclaimResult.FAILED if acts else ReclaimResult.DRY_RUN
                why = "the state could not be saved" if acts else ""
                self._settle_reclaims([ReclaimOutcome(plan.id, order.name, result, why, self._boottime())])
                continue
            job = jobs.job_of(
                actions[order.name],
                order,
                pod_logs=lambda: self._hooks.here(logs),
                # Where no pod is seen at all it is our sight that has ended.
                ended=lambda name: bool(running) and name.rpartition("_")[2] not in running,
                stop=self._hooks.closing,
            )
            self._hooks.start(plan.id, order.name, job, timeout_s=order.until - plan.made_at)

    def _settle_reclaims(self, outcomes: Sequence[ReclaimOutcome]) -> None:
        for outcome in outcomes:
            self._policy = engine.settle_reclaim(self._policy, outcome)
            self._teller.reclaimed(outcome)

    def _kill(self, plan: Plan, victim: Victim) -> None:
        """The last resort. What the kernel says is the outcome; the API server hears of it when it is back."""
        trouble = self._holds.end(victim.cgroup, pod_uid=victim.pod.uid)
        kind = OutcomeKind.NOT_KILLED if trouble else OutcomeKind.KILLED
        self._settle([_outcome(plan, victim, kind, trouble, self._boottime())])
        if not trouble:
            self._parts.session.killed(plan.id, victim)

    def _reworded(self, victim: Victim, plan: Plan, fresh: NodeSnapshot) -> Victim:
        """Samples leave out what each container uses; the message names it."""
        view = next(view for view in fresh.pods if view.pod.uid == victim.pod.uid)
        if view.usage is None:
            return victim
        usage = self._parts.sampler.with_container_memory(view.usage)
        return engine.reworded(victim, view._replace(usage=usage), plan=plan)

    def _plan_holds(self, plan: Plan) -> list[Victim]:
        escalation = self._config.escalation
        if escalation.brake is Brake.NONE:
            return []
        kind = BrakeKind(escalation.brake.value)
        hard = [victim for victim in plan.victims if victim.tier is Tier.HARD and victim.cgroup]
        for victim in hard:
            until = plan.made_at + escalation.brake_deadline_s
            if kind is BrakeKind.FREEZE and self._holds.frozen_cannot_die:
                until = min(until, plan.made_at + victim.grace_period_s + THAW_AFTER_GRACE_S)
            self._holds.plan(victim.cgroup, kind, pod_uid=victim.pod.uid, until=until)
        return hard

    def _release_or_end(self, outcome: Outcome) -> None:
        """A victim that is on its way is ended at once where that was asked for; one that is not is let go."""
        victim = self._victims.pop(outcome.pod_uid, None)
        if outcome.kind is OutcomeKind.ACCEPTED:
            kill = self._config.escalation.hard_kill is HardKill.CGROUP
            if kill and victim is not None and victim.tier is Tier.HARD and victim.cgroup:
                self._holds.end(victim.cgroup, pod_uid=outcome.pod_uid)
        elif outcome.kind is not OutcomeKind.TIMED_OUT:  # after a time-out it may be terminating: the deadline decides
            self._holds.drop(outcome.pod_uid)

    def _settle(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self._release_or_end(outcome)
            self._policy = engine.settle(self._policy, outcome, now=outcome.at, config=self._config)
            self._metrics.observe_outcome(outcome)
            self._teller.outcome(outcome)

    def _tell(self, plan: Plan, snapshot: NodeSnapshot, before: PolicyState) -> None:
        told, self._holds.notes = tuple(self._holds.notes), []
        if self._forks.storm(snapshot.taken_at):
            told += (_storm_note(self._forks.rates(snapshot.taken_at)),)
        notes = (*snapshot.notes, *self._parts.session.notes(), *self._alarms.notes, *self._means.neighbours(), *told)
        inputs = Inputs(
            snapshot=snapshot,
            state=before,
            now=snapshot.taken_at,
            thresholds=self._thresholds(snapshot.layout),
            fresh_samples=self._config.startup.fresh_samples,
        )
        self._teller.decision(plan, acts=self._config.mode is Mode.ENFORCE, notes=notes, inputs=inputs)
        if snapshot.taken_at - self._status_at >= STATUS_EVERY_S:
            self._status_at = snapshot.taken_at
            self._means.notifier.status(status(plan, snapshot))

    def _save(self, *, now: float, at_once: bool) -> bool:
        """Save the state when it is due. False when it could not be."""
        if self._means.store is None:
            return False
        if not at_once and now - self._saved_at < SAVE_EVERY_S:
            return True
        self._saved_at = now
        try:
            with self._timed(Stage.SAVE):
                self._means.store.save(AgentState(self._policy, self._parts.session.owned(), self._holds.held))
        except OSError as error:
            self._metrics.observe_failure(Failure.STATE_SAVE)
            self._log.error("state not saved", reason=error.strerror, file=error.filename, once="state")
            return False
        return True


def _outcome(plan: Plan, victim: Victim, kind: OutcomeKind, message: str, at: float) -> Outcome:
    return Outcome(plan.id, victim.pod.uid, kind, message, at)


def _storm_note(rates: Mapping[str, float]) -> Note:
    """Who forks, by hundreds a second, so that a lasting storm is one note."""
    busiest = sorted(rates.items(), key=lambda each: -each[1])[:3]
    words = ", ".join(f"{uid} about {round(rate, -2):.0f}/s" for uid, rate in busiest)
    return Note("forks", f"a fork storm: {words}")

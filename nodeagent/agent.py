"""The loop: when to sample, what to hand to the policy, and whom to hand its plan to.

Promises:

1. One snapshot, one decision. Everything that changes hands is a value; the only memory is the state that the policy
   returns, and it is on disk before a request that depends on it leaves.
2. The loop waits for nothing but its next wake-up: the API, the log and the service manager are other threads' work.
3. Nobody is evicted on an old sight of things: right before a victim is handed over, the node is sampled again and the
   policy asked again.
4. A turn that fails is told and the next one starts afresh; only a configuration that cannot be used ends the program.
"""

import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from nodeagent.cluster.conditions import OwnedCondition
from nodeagent.cluster.session import Session
from nodeagent.config.schema import Brake, Config, HardKill, Mode
from nodeagent.host.brake import BrakeKind, Hold
from nodeagent.host.holds import THAW_AFTER_GRACE_S, Holds
from nodeagent.host.notify import Notifier
from nodeagent.host.wakeup import Wakeups
from nodeagent.journal.records import Recorder
from nodeagent.journal.state import StateFile
from nodeagent.model import (
    ConditionStatus,
    DiskLayout,
    NodeSnapshot,
    Outcome,
    OutcomeKind,
    Plan,
    SignalState,
    SignalVerdict,
    Threshold,
    Tier,
    Victim,
)
from nodeagent.policy import engine, ranking, thresholds
from nodeagent.policy import pace as pacing
from nodeagent.policy.state import PolicyState
from nodeagent.sampling.alarms import Alarms
from nodeagent.sampling.sampler import Sampler

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

SAVE_EVERY_S: Final = 10.0
"""State is saved at once when a plan acts, and this often otherwise: what a crash may lose is at most this much of a
running grace period, which then takes that much longer. A save takes 0.3 ms on a tmpfs."""
TELL_PODS: Final = 10
"""Pods named in a log line; the record has all of them."""
STATUS_EVERY_S: Final = 30.0
"""How often the service manager's one-line status is renewed."""


class AgentState(NamedTuple):
    """All that survives a restart."""

    policy: PolicyState
    owned: tuple[OwnedCondition, ...] = ()
    """Conditions that we have set on the Node."""
    holds: tuple[Hold, ...] = ()
    """Cgroups that are held, or were about to be."""


class Agent:
    """One node's agent."""

    def __init__(
        self,
        *,
        config: Config,
        sampler: Sampler,
        session: Session,
        alarms: Alarms,
        holds: Holds,
        state: AgentState,
        store: StateFile | None,
        recorder: Recorder | None,
        log: "FilteringBoundLogger",
        notifier: Notifier,
        boottime: Callable[[], float],
        own_pod_uid: str = "",
    ) -> None:
        """`store` and `recorder` are None where there is no directory to write to."""
        self._config = config
        self._sampler = sampler
        self._session = session
        self._alarms = alarms
        self._holds = holds
        self._victims: dict[str, Victim] = {}
        """Handed over and not answered yet, by UID."""
        self._policy = state.policy
        self._store = store
        self._recorder = recorder
        self._log = log
        self._notifier = notifier
        self._boottime = boottime
        self._own_pod_uid = own_pod_uid
        self._memo = engine.Memo()
        self._pace = pacing.PaceState()
        self._effective: dict[DiskLayout, tuple[Threshold, ...]] = {}
        self._saved_at = float("-inf")
        self._status_at = float("-inf")
        self._told: dict[str, object] = {}
        self.plan: Plan | None = None
        """The last decision, for the report."""

    # --- the loop ----------------------------------------------------------------------------------------------------

    def run(self, wakeups: Wakeups, *, turns: int | None = None) -> None:
        """Turn until SIGTERM or SIGINT (or for so many turns)."""
        self._notifier.ready()
        watchdog_s = self._notifier.watchdog_s or float("inf")
        while turns is None or turns > 0:
            turns = None if turns is None else turns - 1
            began = self._boottime()
            sleep_s = self.turn()
            self._watch(wakeups)
            self._notifier.alive()
            took = self._boottime() - began
            _, signals = wakeups.wait(min(sleep_s, watchdog_s / 3) - took)
            if any(number in (signal.SIGTERM, signal.SIGINT) for number in signals):
                self._log.info("stopping", signal=signals[0].name)
                return

    def turn(self) -> float:
        """Look; when it matters sample everything, decide, act and tell. Returns how long to sleep."""
        self._settle(self._session.outcomes())
        self._holds.expire(now=self._boottime())
        node = self._sampler.sample_node()
        pace, self._pace = pacing.look(
            node,
            self._pace,
            now=node.taken_at,
            thresholds=self._thresholds(node.layout),
            interval_s=self._config.sampling.interval_s,
        )
        if pace.pressed:
            self._session.warm()
        if pace.whole:
            self._decide(fresh=pace.pressed)
        self._alarms.arm(pace.headroom)
        return pace.sleep_s

    def stop(self) -> None:
        """Let go what is held, take back what we have set on the Node, and keep the rest for the next process."""
        self._notifier.stopping()
        self._holds.close()
        if left := self._session.stop(clear=True):
            self._log.warning("left behind", what=left)
        self._save(now=self._boottime(), at_once=True)

    def _watch(self, wakeups: Wakeups) -> None:
        """Have the wake-up sources for where the pods are now."""
        around = self._sampler.surroundings()
        before = self._alarms.sources
        if not self._alarms.stale(around.hierarchy, around.kubepods):
            return
        for source in before:
            wakeups.unregister(source.fd)
        self._alarms.open(around.hierarchy, around.kubepods)
        for source in self._alarms.sources:
            wakeups.register(source.fd, source.name, source.drain, source.events)

    # --- parts of a turn ---------------------------------------------------------------------------------------------

    def _thresholds(self, layout: DiskLayout) -> tuple[Threshold, ...]:
        if layout not in self._effective:
            self._effective[layout] = thresholds.effective(self._config, layout)
        return self._effective[layout]

    def _sample(self, *, fresh: bool) -> NodeSnapshot:
        view = self._session.pods()
        known = view.synced_at is not None
        snapshot = self._sampler.sample(view.pods if known else None, view.synced_at, fresh=fresh)
        return snapshot._replace(own_pod_uid=self._own_pod_uid)

    def _decide(self, *, fresh: bool) -> None:
        snapshot = self._sample(fresh=fresh)
        plan, self._policy = engine.decide(
            snapshot,
            self._policy,
            now=snapshot.taken_at,
            config=self._config,
            memo=self._memo,
            always_rank=False,
        )
        self.plan = plan
        self._session.publish(plan.conditions)
        if plan.victims:
            self._act(plan)
        self._tell(plan, snapshot)
        self._save(now=snapshot.taken_at, at_once=False)

    def _act(self, plan: Plan) -> None:
        """Hold the victims, look a second time, hand them over. The tokens that they cost, and what is held, are on
        disk before."""
        if self._config.mode is Mode.DRY_RUN:
            self._save(now=plan.made_at, at_once=True)
            self._settle([_outcome(plan, victim, OutcomeKind.DRY_RUN, "", self._boottime()) for victim in plan.victims])
            return
        held = self._plan_holds(plan)
        saved = self._save(now=plan.made_at, at_once=True)
        for victim in held:
            self._holds.apply(victim.pod.uid)
        fresh = self._sample(fresh=True)
        for victim in plan.victims:
            refusal = engine.recheck(victim, fresh, self._policy, now=fresh.taken_at, config=self._config)
            why = refusal.message if refusal else ""
            if not why and not saved and victim.tier is Tier.SOFT:
                # Budgets must hold across crashes; without a saved state only what cannot wait is done.
                why = "the state could not be saved"
            if why:
                self._settle([_outcome(plan, victim, OutcomeKind.RECHECK_REFUSED, why, self._boottime())])
            else:
                self._victims[victim.pod.uid] = victim
                self._session.evict(plan.id, victim)

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
            level = (
                "info" if outcome.kind in (OutcomeKind.ACCEPTED, OutcomeKind.DRY_RUN, OutcomeKind.GONE) else "warning"
            )
            getattr(self._log, level)(
                "eviction " + outcome.kind.value,
                id=outcome.plan_id,
                pod_uid=outcome.pod_uid,
                message=outcome.message,
                status=outcome.http_status,
            )
            if self._recorder is not None:
                self._recorded(self._recorder.outcome(outcome, wall_time=time.time()))

    def _save(self, *, now: float, at_once: bool) -> bool:
        """Save the state when it is due. False when it could not be."""
        if self._store is None:
            return False
        if not at_once and now - self._saved_at < SAVE_EVERY_S:
            return True
        self._saved_at = now
        try:
            self._store.save(AgentState(self._policy, self._session.owned(), self._holds.held))
        except OSError as error:
            self._log.error("state not saved", reason=error.strerror, file=error.filename, once="state")
            return False
        return True

    # --- telling -----------------------------------------------------------------------------------------------------

    def _tell(self, plan: Plan, snapshot: NodeSnapshot) -> None:
        """One line for each thing that changed; lasting facts once and then rarely."""
        for verdict in plan.signals:
            if self._news(f"signal {verdict.signal}", verdict.state):
                self._log.info("signal", **_signal_line(verdict))
        for condition in plan.conditions:
            if self._news(f"condition {condition.type}", (condition.status, condition.reason)):
                level = "warning" if condition.status is ConditionStatus.TRUE else "info"
                getattr(self._log, level)(
                    "condition", type=condition.type, status=condition.status, reason=condition.reason,
                    message=condition.message,
                )  # fmt: skip
        if plan.victims:
            self._tell_victims(plan)
        self._tell_refusals(plan)
        told, self._holds.notes = tuple(self._holds.notes), []
        for note in (*snapshot.notes, *self._session.notes(), *self._alarms.notes, *told, *plan.notes):
            self._log.info("note", subject=note.subject, message=note.message, once=f"{note.subject}\0{note.message}")
        if snapshot.taken_at - self._status_at >= STATUS_EVERY_S:
            self._status_at = snapshot.taken_at
            self._notifier.status(_status(plan, snapshot))

    def _tell_victims(self, plan: Plan) -> None:
        verb = "would evict" if self._config.mode is Mode.DRY_RUN else "evicting"
        for victim in plan.victims:
            self._log.warning(
                verb,
                id=plan.id,
                pod=victim.pod.key,
                uid=victim.pod.uid,
                tier=victim.tier,
                signal=victim.threshold.signal,
                grace_s=victim.grace_period_s,
                predicted_relief=victim.predicted_relief,
                message=victim.message,
            )
        if self._recorder is not None:
            self._recorded(self._recorder.decision(ranking.explained(plan), wall_time=time.time()))

    def _tell_refusals(self, plan: Plan) -> None:
        """Why nobody, or not more, goes; the first pods in rank with what spares them. Recorded when it changes."""
        for refusal in plan.refusals:
            spared = {pod.view.pod.key: pod.refusals[0].message for pod in plan.ranking[:TELL_PODS] if pod.refusals}
            self._log.info(
                "not evicting", code=refusal.code, reason=refusal.message, spared=spared, id=plan.id, once=refusal.code
            )
        codes = tuple(refusal.code for refusal in plan.refusals)
        if self._news("refusals", codes) and codes and not plan.victims and self._recorder is not None:
            self._recorded(self._recorder.decision(ranking.explained(plan), wall_time=time.time()))

    def _recorded(self, trouble: str) -> None:
        if trouble:
            self._log.warning("decision not recorded", reason=trouble, once="recorder")

    def _news(self, subject: str, value: object) -> bool:
        if self._told.get(subject) == value:
            return False
        self._told[subject] = value
        return True


def _outcome(plan: Plan, victim: Victim, kind: OutcomeKind, message: str, at: float) -> Outcome:
    return Outcome(plan.id, victim.pod.uid, kind, message, at)


def _signal_line(verdict: SignalVerdict) -> dict[str, Any]:
    seen = verdict.observation
    line: dict[str, Any] = {"signal": verdict.signal, "state": verdict.state, "available": seen.available}
    if seen.reason:
        line["reason"] = seen.reason
    met = [met for met in verdict.thresholds if met.met]
    if met:
        line["threshold"] = met[0].threshold.value.text
        line["threshold_value"] = met[0].value
        line["held_back"] = met[0].held_back
    return line


def _status(plan: Plan, snapshot: NodeSnapshot) -> str:
    states = [verdict.state for verdict in plan.signals]
    worst = next((s for s in (SignalState.HARD, SignalState.SOFT, SignalState.UNKNOWN) if s in states), SignalState.OK)
    pressure = [str(c.type) for c in plan.conditions if c.status is ConditionStatus.TRUE]
    return f"{worst}; {len(snapshot.pods)} pods; " + (", ".join(pressure) or "no pressure")

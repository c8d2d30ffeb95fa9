"""Does what a plan says: hold, look again, hand over, end, reclaim; and takes in what came of it.

Promises:

1. What an act costs and what it leaves behind (tokens, entries of the ledger, holds) is on disk before the act, but for
   a hold that says itself whose it is. Where that cannot be, only the hard tier's evictions are done, and those only
   when no later process can restore the tokens that they cost (see `keeper`).
2. Nobody is evicted on an old sight of things: right before a victim is handed over, the node is sampled again and the
   policy asked again.
3. Every victim and every reclaim order has exactly one outcome, and every outcome reaches the policy, the metrics and
   the log.
4. A victim that is not on its way is not held: whatever the outcome, or its lack, its hold ends (see `host.holds`).
5. In a dry run nothing outside this process changes.

Theory of operation. All calls come from the loop's thread and none waits for the API server. In a turn:

    settle      first: what has come of earlier turns
    guard       when a hard threshold of memory is about to be crossed
    hold        as soon as there is a plan with victims; saves
    evict       after the plan was published; `hold`'s answer says whether the state could be saved
    reclaim     where the plan orders it; saves
"""

from collections.abc import Iterable, Sequence
from typing import Final

from nodeagent.actuators import reclaim_runner as jobs
from nodeagent.actuators.brakes import THAW_AFTER_GRACE_S
from nodeagent.actuators.cgroup_brake import BrakeKind
from nodeagent.config.schema import BrakeMode, Config, HardKill, Mode
from nodeagent.loop.components import Components, Runtime
from nodeagent.loop.state_store import StateStore
from nodeagent.model import (
    DISK_SIGNALS,
    Method,
    NodeSnapshot,
    Outcome,
    OutcomeKind,
    Plan,
    ReclaimOutcome,
    ReclaimResult,
    Tier,
    Victim,
)
from nodeagent.policy import chosen_victims, outcomes, recheck
from nodeagent.policy.victim_preview import PredictedVictim
from nodeagent.telemetry.decision_log import DecisionLog
from nodeagent.telemetry.metrics import Metrics, SyncStage

GROWTH_CAP_S: Final = 1.0
"""For how long a pod is kept from growing past a threshold that was about to be crossed and then was not."""
SIGHT_S: Final = 5.0
"""A second look is good for so long: as long as an eviction may wait for its answer. A process that was stopped after
it, or a node that stood still, acts on what it sees next."""


class Executor:
    """The hands of one agent. `parts` are handed in at each call, for a reload replaces them."""

    def __init__(self, means: Runtime, *, keeper: StateStore, teller: DecisionLog, metrics: Metrics) -> None:
        self._holds, self._hooks = means.brakes, means.reclaim_runner
        self._boottime, self._own_pod_uid = means.boottime, means.own_pod_uid
        self._keeper = keeper
        self._teller = teller
        self._metrics = metrics
        self._victims: dict[str, Victim] = {}
        """Handed over and not answered yet, by UID."""

    def apply_outcomes(self, parts: Components) -> None:
        """Take in what came of earlier turns, and let go what is held beyond its deadline."""
        self._settle(parts.session.outcomes(), config=parts.config)
        self._settle_reclaims(self._hooks.finished())
        self._holds.expire(now=self._boottime())

    # --- victims -----------------------------------------------------------------------------------------------------

    def brake(self, plan: Plan, parts: Components) -> bool:
        """Hold the victims, where that is wanted, and save the tokens that they cost, and what is held. False when that
        could not be."""
        held = self._plan_holds(plan, parts.config) if parts.config.mode is Mode.ENFORCE else []
        unmarked = [victim for victim in held if not self._holds.apply(victim.pod.uid, saved=False)]
        saved = self._keeper.save(now=plan.made_at, at_once=True)
        for victim in unmarked if saved else ():
            self._holds.apply(victim.pod.uid, saved=True)
        return saved

    def cap_growth(self, victims: Sequence[PredictedVictim], config: Config, *, now: float) -> None:
        """Keep the memory of those who would have to go from passing the threshold before we see it crossed. Others who
        were guarded are let go."""
        self._holds.uncap_others(keep=[each.pod_uid for each in victims])
        for each in victims:
            until = now + min(GROWTH_CAP_S, config.escalation.brake_deadline_s)
            self._holds.cap_growth(each.cgroup, each.limit, pod_uid=each.pod_uid, until=until)

    def can_cap_growth(self, config: Config) -> bool:
        """Whether `guard` may be asked for."""
        brakes = config.mode is Mode.ENFORCE and config.escalation.brake is not BrakeMode.NONE
        return brakes and self._holds.can_cap_growth

    def evict(self, plan: Plan, fresh: NodeSnapshot, parts: Components, *, saved: bool) -> None:
        """Judge the victims a second time and hand them over. `fresh` is the answer of `look_again`, `saved` that of
        `hold`."""
        config = parts.config
        if config.mode is Mode.DRY_RUN:
            outcomes = [self._outcome(plan, victim, OutcomeKind.DRY_RUN) for victim in plan.victims]
            self._settle(outcomes, config=config)
            return
        for victim in plan.victims:
            refusal = recheck.recheck(victim, fresh, self._keeper.policy, now=fresh.taken_at, config=config)
            why = refusal.message if refusal else ""
            if not why and self._boottime() - fresh.taken_at > SIGHT_S:
                why = "the second look at the node is too old: this process stood still since"
            if not why and not saved:
                why = self._unsaved(victim)
            if why:
                self._settle([self._outcome(plan, victim, OutcomeKind.RECHECK_REFUSED, why)], config=config)
            elif victim.method is Method.KILL:
                self._kill(plan, _reworded(victim, plan, fresh, parts), parts)
            else:
                self._victims[victim.pod.uid] = victim
                parts.session.evict(plan.id, _reworded(victim, plan, fresh, parts))

    def _unsaved(self, victim: Victim) -> str:
        """Why this victim stays while the state cannot be saved: rate limits must hold across crashes. Without a saved
        state only what cannot wait is done; empty for that."""
        if victim.tier is Tier.SOFT or victim.method is Method.KILL:
            return "the state could not be saved"
        if not self._keeper.may_act_unsaved(now=self._boottime()):
            return "the state could not be saved, and another agent could still restore the tokens of the last one"
        return ""

    def recheck(self, plan: Plan, snapshot: NodeSnapshot, parts: Components) -> NodeSnapshot:
        """The node and the victims once more. `snapshot` is what the plan was made on."""
        with self._metrics.timed(SyncStage.RECHECK):
            # Read anew, and in the order of the first sample: a seat may be lost, or a taint taken away, since then.
            soft_waits_for = parts.session.soft_tier_block()
            view = parts.session.pods()
            uids = frozenset(victim.pod.uid for victim in plan.victims)
            disks = any(victim.threshold.signal in DISK_SIGNALS for victim in plan.victims)
            again = parts.sampler.read_again(snapshot, view.pods, view.synced_at, pod_uids=uids, disks=disks)
            again = parts.disks.apply(again, whole=False)
        return again.with_surroundings(
            own_pod_uid=self._own_pod_uid,
            api_unreachable_since=view.unreachable_since,
            soft_tier_blocked_by=soft_waits_for,
        )

    def _plan_holds(self, plan: Plan, config: Config) -> list[Victim]:
        escalation = config.escalation
        if escalation.brake is BrakeMode.NONE:
            return []
        kind = BrakeKind(escalation.brake.value)
        hard = [victim for victim in plan.victims if victim.tier is Tier.HARD and victim.cgroup]
        for victim in hard:
            until = plan.made_at + escalation.brake_deadline_s
            if kind is BrakeKind.FREEZE and self._holds.frozen_cannot_die:
                until = min(until, plan.made_at + victim.grace_period_s + THAW_AFTER_GRACE_S)
            self._holds.plan(victim.cgroup, kind, pod_uid=victim.pod.uid, until=until)
        return hard

    def _kill(self, plan: Plan, victim: Victim, parts: Components) -> None:
        """The last resort. What the kernel says is the outcome; the API server hears of it when it is back."""
        trouble = self._end(victim)
        kind = OutcomeKind.NOT_KILLED if trouble else OutcomeKind.KILLED
        self._settle([self._outcome(plan, victim, kind, trouble)], config=parts.config)
        if not trouble:
            parts.session.announce_kill(plan.id, victim)

    def _end(self, victim: Victim) -> str:
        """End its processes. Returns why that was not possible; empty when it was."""
        if self._holds.plan_kill(victim.cgroup, pod_uid=victim.pod.uid):
            self._keeper.save(now=self._boottime(), at_once=True)
        return self._holds.kill(victim.cgroup, pod_uid=victim.pod.uid)

    def _outcome(self, plan: Plan, victim: Victim, kind: OutcomeKind, message: str = "") -> Outcome:
        return Outcome(plan.id, victim.pod.uid, kind, message, self._boottime())

    def _settle(self, results: Iterable[Outcome], *, config: Config) -> None:
        for outcome in results:
            self._release_or_end(outcome, config)
            self._keeper.policy = outcomes.apply_outcome(self._keeper.policy, outcome, now=outcome.at, config=config)
            self._metrics.observe_outcome(outcome)
            self._teller.log_outcome(outcome)

    def _release_or_end(self, outcome: Outcome, config: Config) -> None:
        """A victim that is on its way is ended at once where that was asked for; one that is not is let go."""
        victim = self._victims.pop(outcome.pod_uid, None)
        if outcome.kind is OutcomeKind.ACCEPTED:
            kill = config.escalation.hard_kill is HardKill.CGROUP
            if kill and victim is not None and victim.tier is Tier.HARD and victim.cgroup:
                self._end(victim)
        elif outcome.kind is not OutcomeKind.TIMED_OUT:  # after a time-out it may be terminating: the deadline decides
            self._holds.release(outcome.pod_uid)

    # --- reclaim -----------------------------------------------------------------------------------------------------

    def start_reclaim(self, plan: Plan, snapshot: NodeSnapshot, parts: Components) -> None:
        """Begin what is tried before anybody is evicted."""
        config = parts.config
        acts = config.mode is Mode.ENFORCE
        self._teller.log_reclaim_orders(plan, acts=acts)
        saved = self._keeper.save(now=plan.made_at, at_once=True)
        actions = {action.name: action for action in config.reclaim.actions}
        running = frozenset(view.usage.cgroup_uid for view in snapshot.pods if view.usage is not None)
        for order in plan.reclaims:
            if not acts or not (saved or order.tier is Tier.HARD):
                result = ReclaimResult.FAILED if acts else ReclaimResult.DRY_RUN
                why = "the state could not be saved" if acts else ""
                self._settle_reclaims([ReclaimOutcome(plan.id, order.name, result, why, self._boottime())])
                continue
            job = jobs.build_job(
                actions[order.name],
                order,
                pod_logs_dir=lambda: self._hooks.local_path(config.sampling.pod_logs_dir),
                # Where no pod is seen at all it is our sight that has ended.
                ended=lambda name: bool(running) and name.rpartition("_")[2] not in running,
                stop=self._hooks.closing,
            )
            self._hooks.start(plan.id, order.name, job, timeout_s=order.until - plan.made_at)

    def _settle_reclaims(self, results: Iterable[ReclaimOutcome]) -> None:
        for outcome in results:
            self._keeper.policy = outcomes.apply_reclaim(self._keeper.policy, outcome)
            self._teller.log_reclaim_outcome(outcome)


def _reworded(victim: Victim, plan: Plan, fresh: NodeSnapshot, parts: Components) -> Victim:
    """Samples leave out what each container uses; the message names it."""
    view = next(view for view in fresh.pods if view.pod.uid == victim.pod.uid)
    if view.usage is None:
        return victim
    usage = parts.sampler.with_container_memory(view.usage)
    return chosen_victims.with_current_text(victim, view._replace(usage=usage), plan=plan)

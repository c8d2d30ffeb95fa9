"""Acts on a plan: brakes, rechecks, evicts or kills, reclaims, runs hooks, resizes; and applies the outcomes.

Promises:

1. What an act costs and leaves behind (tokens, evictions in flight, brakes) is on disk before the act, except a brake
   that is marked on its cgroup. If the save fails, only hard evictions through the API are sent, and those only if no
   later process can restore the tokens that they cost (see `state_store`).
2. No pod is evicted on the decision's sample alone: right before a victim is handed over, the node is sampled again and
   the policy decides again.
3. Every victim, reclaim order, hook and resize has exactly one outcome, except that those of an EvictionRequest follow
   each other (requested, then evicted by others, failed or withdrawn). Every outcome reaches the policy, the metrics
   and the log.
4. A victim that is not evicted keeps no brake: whatever the outcome, or without one, its brake ends (see
   `actuators.brakes`).
5. In a dry run nothing outside this process changes.

Theory of operation. All calls come from the loop's thread and none waits for the API server. `loop.sync` has their
order and the reasons for it.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from nodeagent.actuators import brakes, eviction_hook_jobs, page_cache, reclaim_runner
from nodeagent.actuators.cgroup_brake import BrakeKind
from nodeagent.config.schema import BrakeMode, Config, HardKill, Mode
from nodeagent.loop.components import Components, Runtime
from nodeagent.loop.own_limit_watch import OwnLimitWatch
from nodeagent.loop.state_store import StateStore
from nodeagent.model import (
    DISK_SIGNALS,
    HookOutcome,
    HookResult,
    Method,
    NodeSnapshot,
    Outcome,
    OutcomeKind,
    Plan,
    ReclaimOrder,
    ReclaimOutcome,
    ReclaimResult,
    ResizeOutcome,
    ResizeResult,
    Signal,
    Tier,
    Victim,
)
from nodeagent.policy import chosen_victims, eviction_request, oom_preference, outcomes, recheck
from nodeagent.policy.victim_preview import PredictedVictim
from nodeagent.sampling.snapshot import SnapshotParts, assemble_snapshot
from nodeagent.telemetry.decision_log import DecisionLog
from nodeagent.telemetry.metrics import Metrics, SyncStage

GROWTH_CAP_S: Final = 1.0
"""How long a growth cap stays on a pod if the crossing that was near does not come."""
RECHECK_VALID_S: Final = 5.0
"""A recheck is valid this long, as long as an eviction may wait for its response. A process that was stopped after it,
or a node that was suspended, acts on its next sample."""


class Executor:
    """The actuators of one agent, as the loop uses them."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        components: Callable[[], Components],
        store: StateStore,
        decision_log: DecisionLog,
        metrics: Metrics,
        own_limits: OwnLimitWatch,
    ) -> None:
        """`components` returns those in force: a reload replaces them."""
        self._brakes, self._reclaim_runner = runtime.brakes, runtime.reclaim_runner
        self._oom_scores = runtime.oom_scores
        self._hook_runner = runtime.hook_runner
        self._boottime, self._own_pod_uid = runtime.boottime, runtime.own_pod_uid
        self._components = components
        self._store = store
        self._decision_log = decision_log
        self._metrics = metrics
        self._own_limits = own_limits
        self._submitted: dict[tuple[str, str], Victim] = {}
        """Victims without an outcome, by plan and UID: an eviction overtakes the EvictionRequest of the same pod."""

    @property
    def _config(self) -> Config:
        return self._components().config

    @property
    def _acts(self) -> bool:
        return self._config.mode is Mode.ENFORCE

    def apply_outcomes(self) -> None:
        """Apply the outcomes since the last sync, and release the brakes whose deadline has passed."""
        self._apply(self._components().session.outcomes())
        self._apply_reclaims(self._reclaim_runner.finished())
        self._apply_hooks(eviction_hook_jobs.outcome(each) for each in self._hook_runner.finished())
        self._apply_resizes(self._components().session.resize_outcomes())
        self._brakes.expire(now=self._boottime())
        self._oom_scores.put_back_leftover()

    # --- victims -----------------------------------------------------------------------------------------------------

    def brake(self, plan: Plan) -> bool:
        """Brake the victims, if that is configured, and save the tokens that they cost and the brakes. False if the
        save failed."""
        if not plan.victims:
            return True
        braked = self._plan_brakes(plan) if self._acts else []
        unmarked = [victim for victim in braked if not self._brakes.apply(victim.pod.uid, saved=False)]
        saved = self._store.save(now=plan.made_at, urgent=True)
        for victim in unmarked if saved else ():
            self._brakes.apply(victim.pod.uid, saved=True)
        return saved

    def can_cap_growth(self) -> bool:
        """True if `cap_growth` has an effect."""
        may_brake = self._acts and self._config.escalation.brake is not BrakeMode.NONE
        return may_brake and self._brakes.can_cap_growth

    def cap_growth(self, victims: Sequence[PredictedVictim], *, now: float) -> None:
        """Lower memory.high of the predicted victims, so that none passes the threshold before the next sample. The
        growth caps of other pods are released."""
        deadline_s = min(GROWTH_CAP_S, self._config.escalation.brake_deadline_s)
        self._brakes.uncap_others(keep=[victim.pod_uid for victim in victims])
        for victim in victims:
            self._brakes.cap_growth(victim.cgroup, victim.limit, pod_uid=victim.pod_uid, until=now + deadline_s)

    def prefer_for_oom(self, plan: Plan, snapshot: NodeSnapshot) -> None:
        """Raise oom_score_adj of the pods that would be evicted next, if that is configured; put back the others."""
        targets = oom_preference.targets(plan, config=self._config)
        if targets is None:
            return
        total = snapshot.observations[Signal.MEMORY].capacity
        if self._oom_scores.plan(targets, node_bytes=total, now=plan.made_at, acts=self._acts):
            self._oom_scores.apply(saved=self._store.save(now=plan.made_at, urgent=True))

    def recheck(self, plan: Plan, snapshot: NodeSnapshot) -> NodeSnapshot:
        """The second sample: the node now and the victims of the plan. `snapshot` is the plan's, and the result if it
        has no victims."""
        if not plan.victims:
            return snapshot
        components = self._components()
        with self._metrics.timed(SyncStage.RECHECK):
            # Read again, in the order of the first sample: an eviction slot or a taint may be gone since then.
            soft_tier_block = components.session.soft_tier_block()
            view = components.session.pods()
            uids = frozenset(victim.pod.uid for victim in plan.victims)
            pods = components.sampler.read_again(snapshot.pods, view.pods, pod_uids=uids)
            disks = any(victim.threshold.signal in DISK_SIGNALS for victim in plan.victims)
            node = components.sampler.sample_node(disks=disks)
            limited = frozenset(victim.pod.cgroup_uid for victim in plan.victims if victim.limit)
            if limited:
                self._own_limits.read(components.sampler, now=node.taken_at, config=self._config, fresh=limited)
            return assemble_snapshot(
                SnapshotParts(
                    node,
                    pods,
                    pods_synced_at=view.synced_at,
                    own_limits=self._own_limits.limits if limited else {},
                    disks=components.disks.usage(node.taken_at),
                    api_unreachable_since=view.unreachable_since,
                    soft_tier_blocked_by=soft_tier_block,
                    eviction_requests=components.session.eviction_requests_served(),
                    own_pod_uid=self._own_pod_uid,
                )
            )

    def evict(self, plan: Plan, sample: NodeSnapshot, *, saved: bool) -> None:
        """Decide on each victim again and hand it over; then EvictionRequests: how they ended by the plan's sample, and
        what becomes of the others. `sample` is the result of `recheck`, `saved` that of `brake`. A dry run ends where a
        victim would be handed over, and needs no saved state: it evicts nothing."""
        for victim in plan.victims:
            if reason := self._refusal(victim, sample, saved=saved or not self._acts):
                self._apply([self._outcome(plan, victim, OutcomeKind.RECHECK_REFUSED, reason)])
            elif not self._acts:
                self._apply([self._outcome(plan, victim, OutcomeKind.DRY_RUN)])
            elif victim.method is Method.KILL:
                self._kill(plan, self._with_current_text(victim, plan, sample))
            else:
                self._submitted[plan.id, victim.pod.uid] = victim
                self._components().session.evict(plan.id, self._with_current_text(victim, plan, sample))
        self._apply(plan.outcomes)
        if not self._acts:
            return
        requests = self._store.policy_state.eviction_requests
        self._components().session.follow_eviction_requests(eviction_request.orders(requests))

    def _refusal(self, victim: Victim, sample: NodeSnapshot, *, saved: bool) -> str:
        """Why this victim is not evicted after all; empty if it is."""
        refusal = recheck.recheck(victim, sample, self._store.policy_state, now=sample.taken_at, config=self._config)
        if refusal:
            return refusal.message
        if self._boottime() - sample.taken_at > RECHECK_VALID_S:
            return f"recheck is older than {RECHECK_VALID_S:.0f}s: the process was stopped since"
        return "" if saved else self._unsaved(victim)

    def _unsaved(self, victim: Victim) -> str:
        """Why this victim is not evicted while the state cannot be saved; empty if it is. Rate limits must hold across
        crashes, so only an act that cannot wait is done."""
        if victim.tier is Tier.SOFT or victim.method is Method.KILL:
            return "state not saved: only hard evictions through the API may act"
        if not self._store.may_act_unsaved(now=self._boottime()):
            return "state not saved: another process could still restore the tokens of the last one"
        return ""

    def _with_current_text(self, victim: Victim, plan: Plan, sample: NodeSnapshot) -> Victim:
        """The victim with what each of its containers uses in its message; a sample does not read that."""
        view = next(view for view in sample.pods if view.pod.uid == victim.pod.uid)
        if view.usage is None:
            return victim
        usage = self._components().sampler.with_container_memory(view.usage)
        return chosen_victims.with_current_text(victim, view._replace(usage=usage), plan=plan)

    def _plan_brakes(self, plan: Plan) -> list[Victim]:
        escalation = self._config.escalation
        if escalation.brake is BrakeMode.NONE:
            return []
        kind = BrakeKind(escalation.brake.value)
        hard = [victim for victim in plan.victims if victim.tier is Tier.HARD and victim.cgroup]
        for victim in hard:
            until = plan.made_at + escalation.brake_deadline_s
            if kind is BrakeKind.FREEZE and self._brakes.frozen_cannot_die:
                until = min(until, plan.made_at + victim.grace_period_s + brakes.THAW_AFTER_GRACE_S)
            self._brakes.plan(victim.cgroup, kind, pod_uid=victim.pod.uid, until=until)
        return hard

    def _kill(self, plan: Plan, victim: Victim) -> None:
        """The last resort. The result of the kernel is the outcome; the Event is sent when the API server is back."""
        failure = self._kill_processes(victim)
        kind = OutcomeKind.NOT_KILLED if failure else OutcomeKind.KILLED
        self._apply([self._outcome(plan, victim, kind, failure)])
        if not failure:
            self._components().session.announce_kill(plan.id, victim)

    def _kill_processes(self, victim: Victim) -> str:
        """Returns why that failed; empty on success."""
        if self._brakes.plan_kill(victim.cgroup, pod_uid=victim.pod.uid):
            self._store.save(now=self._boottime(), urgent=True)
        return self._brakes.kill(victim.cgroup, pod_uid=victim.pod.uid)

    # --- outcomes ----------------------------------------------------------------------------------------------------

    def _outcome(self, plan: Plan, victim: Victim, kind: OutcomeKind, message: str = "") -> Outcome:
        return Outcome(plan.id, victim.pod.uid, kind, message, self._boottime())

    def _apply(self, results: Iterable[Outcome]) -> None:
        for outcome in results:
            self._kill_or_release(outcome)
            self._store.apply(outcomes.apply_outcome, outcome, now=outcome.at, config=self._config)
            self._metrics.observe_outcome(outcome)
            self._decision_log.log_outcome(outcome)

    def _kill_or_release(self, outcome: Outcome) -> None:
        """Kill an accepted victim if that is configured; release the brake of one that is not evicted. After a timeout
        the pod may be terminating, so the deadline of the brake decides. The soft tier brakes no pod: a brake belongs
        to the hard eviction that has overtaken an EvictionRequest, never to that."""
        victim = self._submitted.pop((outcome.plan_id, outcome.pod_uid), None)
        if outcome.kind.of_request:
            return
        if outcome.kind is OutcomeKind.ACCEPTED:
            kill = self._acts and self._config.escalation.hard_kill is HardKill.CGROUP
            if kill and victim is not None and victim.tier is Tier.HARD and victim.cgroup:
                self._kill_processes(victim)
        elif outcome.kind is not OutcomeKind.TIMED_OUT:
            self._brakes.release(outcome.pod_uid)

    # --- reclaim -----------------------------------------------------------------------------------------------------

    def start_reclaim(self, plan: Plan, snapshot: NodeSnapshot) -> None:
        """Start the reclaim actions that the plan orders."""
        if not plan.reclaims:
            return
        self._decision_log.log_reclaim_orders(plan, acts=self._acts)
        saved = self._store.save(now=plan.made_at, urgent=True)
        # With what the API server lists: if the cgroups could not be listed, those of an earlier sample are here.
        pod_cgroups = frozenset(
            view.usage.cgroup_uid if view.usage is not None else view.pod.cgroup_uid
            for view in snapshot.pods
            if view.usage is not None or not view.pod.finished
        )
        for order in plan.reclaims:
            if not self._acts:
                self._apply_reclaims([self._reclaim_outcome(plan, order, ReclaimResult.DRY_RUN)])
            elif order.targets:
                self._start_page_cache(plan, order)
            elif not saved and order.tier is not Tier.HARD:
                failed = self._reclaim_outcome(plan, order, ReclaimResult.FAILED, "state not saved")
                self._apply_reclaims([failed])
            else:
                self._start_job(plan, order, pod_cgroups)

    def _start_job(self, plan: Plan, order: ReclaimOrder, pod_cgroups: frozenset[str]) -> None:
        config, runner = self._config, self._reclaim_runner
        action = next(action for action in config.reclaim.actions if action.name == order.name)
        job = reclaim_runner.build_job(
            action,
            order,
            pod_logs_dir=lambda: runner.local_path(config.sampling.pod_logs_dir),
            cri_socket=lambda: config.sampling.cri_socket and runner.local_path(config.sampling.cri_socket),
            # Without any pod cgroup the reading has failed, and no pod counts as ended.
            ended=lambda name: bool(pod_cgroups) and name.rpartition("_")[2] not in pod_cgroups,
            stop=runner.closing,
        )
        runner.start(plan.id, order.name, job, timeout_s=order.until - plan.made_at)

    def _start_page_cache(self, plan: Plan, order: ReclaimOrder) -> None:
        """Also if the state could not be saved: it evicts no pod."""
        sampler, runner = self._components().sampler, self._reclaim_runner
        cgroups = sampler.host_layout().hierarchy.memory
        if cgroups is None:
            failed = self._reclaim_outcome(plan, order, ReclaimResult.FAILED, "no memory controller")
            self._apply_reclaims([failed])
            return
        paths = page_cache.Paths(Path(runner.local_path(cgroups)), Path(runner.local_path("/proc/meminfo")))
        job = page_cache.build_job(order, paths, figure=sampler.working_set_reader(order.signal), stop=runner.closing)
        runner.start(plan.id, order.name, job, timeout_s=order.until - plan.made_at)

    def _reclaim_outcome(
        self, plan: Plan, order: ReclaimOrder, result: ReclaimResult, message: str = ""
    ) -> ReclaimOutcome:
        return ReclaimOutcome(plan.id, order.name, result, message, self._boottime())

    def _apply_reclaims(self, results: Iterable[ReclaimOutcome]) -> None:
        for outcome in results:
            self._store.apply(outcomes.apply_reclaim, outcome)
            self._metrics.observe_reclaim(outcome)
            self._decision_log.log_reclaim_outcome(outcome)

    # --- hooks -------------------------------------------------------------------------------------------------------

    def start_hooks(self, plan: Plan, snapshot: NodeSnapshot) -> None:
        """Start the hooks that the plan orders. The soft tier can wait: without a saved state none starts, so that no
        crash starts one twice."""
        if not plan.hooks:
            return
        self._decision_log.log_hook_orders(plan, acts=self._acts)
        saved = self._store.save(now=plan.made_at, urgent=True)
        config, runner = self._config, self._hook_runner
        for order in plan.hooks:
            if not self._acts or not saved:
                result = HookResult.FAILED if self._acts else HookResult.DRY_RUN
                message = "not run: state not saved" if self._acts else "dry run"
                again, now = self._acts, self._boottime()
                self._apply_hooks([HookOutcome(plan.id, order.pod_uid, result, message, now, ordered_again=again)])
                continue
            deadline_s = order.until - plan.made_at
            job = eviction_hook_jobs.build_job(
                config.hooks.before_eviction,
                order,
                plan_id=plan.id,
                node=snapshot.node,
                deadline_s=deadline_s,
                stop=runner.closing,
            )
            runner.start(plan.id, order.pod_uid, job, timeout_s=deadline_s)

    def _apply_hooks(self, results: Iterable[HookOutcome]) -> None:
        for outcome in results:
            self._store.apply(outcomes.apply_hook, outcome, config=self._config)
            self._metrics.observe_hook(outcome)
            self._decision_log.log_hook_outcome(outcome)

    # --- resizes -----------------------------------------------------------------------------------------------------

    def resize(self, plan: Plan) -> None:
        """Request the resizes that the plan orders, and announce what came of earlier ones. Without a saved state none
        is requested, so that no crash requests one twice."""
        session = self._components().session
        for report in plan.resize_reports:
            self._report_resize(report)
        if not plan.resizes:
            return
        self._decision_log.log_resize_orders(plan, acts=self._acts)
        saved = self._store.save(now=plan.made_at, urgent=True)
        for order in plan.resizes:
            if self._acts and saved:
                session.resize(plan.id, order)
                continue
            result = ResizeResult.NOT_SENT if self._acts else ResizeResult.DRY_RUN
            message = "state not saved" if self._acts else "dry run"
            where = (order.pod_uid, order.namespace, order.name, order.container)
            self._apply_resizes([ResizeOutcome(plan.id, *where, result, message, self._boottime())])

    def _apply_resizes(self, results: Iterable[ResizeOutcome]) -> None:
        for outcome in results:
            self._store.apply(outcomes.apply_resize, outcome, config=self._config)
            self._report_resize(outcome)

    def _report_resize(self, outcome: ResizeOutcome) -> None:
        self._metrics.observe_resize(outcome)
        self._decision_log.log_resize_outcome(outcome)
        self._components().session.announce_resize(outcome)

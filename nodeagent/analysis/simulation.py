"""Run the policy over the samples of a recording, with any configuration: what it would have done.

Promises:

1. The decisions are those of `policy.engine.decide`, from a fresh state, one for each sample, as the agent makes them.
   Nothing is sent and nothing is changed.
2. Calm samples are passed over (`calm_samples`), which changes the speed and not the result.
3. What a recording cannot tell is not guessed without a word: `LIMITS` has the assumptions, `Simulation.remarks` those
   that this recording met.

Theory of operation. A victim counts as accepted by the API server at once, and leaves as `absent_pods` describes.
Reclaim actions end at once without a gain. A sample of another boot starts a state of its own with empty rate limits,
as the agent does after a reboot. Time between two samples counts for the state of the first one, unless they are
further apart than `sampling.staleAfter`: such a gap is not recorded time.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

from nodeagent.analysis.absent_pods import AbsentPods
from nodeagent.analysis.calm_samples import CalmSamples
from nodeagent.config.schema import Config, Mode
from nodeagent.model import (
    ConditionStatus,
    ConditionType,
    HookOutcome,
    HookResult,
    Method,
    NodeSnapshot,
    Outcome,
    OutcomeKind,
    Plan,
    ReclaimOutcome,
    ReclaimResult,
    RefusalCode,
    Signal,
    SignalState,
    Tier,
    Victim,
)
from nodeagent.policy import candidates, engine, outcomes
from nodeagent.policy import state as policy_state
from nodeagent.policy.state import PolicyState

INSTANCE: Final = "replay"
"""The first part of the plan ids."""
MIN_DOWN_S: Final = 1.0
"""A machine that booted this long after the last sample, by the wall clock, was restarted in between; so was one whose
time since the boot fell by this much."""
MAX_TROUBLE: Final = 20
"""Reasons of samples without a decision that are kept."""

LIMITS: Final = (
    "Every eviction is assumed to be accepted at once: PodDisruptionBudgets, admission and a failing API server may "
    "refuse it. What the soft tier waited for (taint, eviction slot) is as recorded.",
    "An evicted pod ends with its grace period, and its usage is then taken off each later sample that still has it. "
    "Its replacement, which may start on this node again, is unknown.",
    "The other pods behave as recorded. With the memory of an evicted pod free they might have grown in another order.",
    "Pods that the recorded agent evicted are gone from the recording. What they would have used is unknown.",
    "Reclaim actions free nothing. Brakes, growth caps and kills by the kernel are not simulated.",
    "Decisions are made at the recorded samples. The usage of small pods may be older than its sample.",
)
"""What a recording cannot tell."""


class SimulatedEviction(NamedTuple):
    """A pod that would have been evicted."""

    wall_time: float
    plan_id: str
    pod: str
    """`namespace/name`."""
    uid: str
    signal: Signal
    tier: Tier
    method: Method
    grace_s: float
    available: int | None
    """Of the signal, in the sample of the decision."""
    threshold: int | None
    """The value of the threshold for this capacity."""
    predicted_relief: int | None
    limit: str
    """The limit of its own that the pod exceeded; empty for node pressure."""


class ConditionTotals(NamedTuple):
    """A condition over the recorded time."""

    true_s: float = 0.0
    raises: int = 0
    """Changes to True. More than one is a flap, unless they are far apart."""


class Closest(NamedTuple):
    """The lowest amount of a signal that was sampled, victims taken off."""

    available: int
    capacity: int
    wall_time: float


class Simulation(NamedTuple):
    """The result of one configuration."""

    name: str
    samples: int
    decided: int
    """Samples that were not passed over."""
    first_wall: float | None
    last_wall: float | None
    recorded_s: float
    """The time that counts, without gaps."""
    gap_s: float
    evictions: tuple[SimulatedEviction, ...]
    conditions: Mapping[ConditionType, ConditionTotals]
    hard_s: float
    """Time in which a hard threshold was met."""
    soft_s: float
    """Time in which a threshold was met, and no hard one."""
    closest: Mapping[Signal, Closest]
    refusals: Mapping[RefusalCode, int]
    """Decisions that had this refusal for the node (not for a single pod)."""
    reclaims: int
    """Orders of reclaim actions."""
    boots: int
    left_out: int
    """Samples that are not newer than the one before them."""
    trouble: tuple[str, ...]
    """Why samples have no decision."""


class Simulator:
    """One configuration over the samples of one recording, oldest first."""

    def __init__(self, config: Config, *, name: str = "", pass_over: bool = True) -> None:
        """`pass_over` False decides on every sample."""
        # Recorded samples do not have the replicas of owners and the room on other nodes.
        protection = config.protection._replace(replacement_wait_s=0.0, node_fit=False)
        self.config = config._replace(mode=Mode.ENFORCE, protection=protection)
        self.name = name
        self.state: PolicyState | None = None
        self._pass_over = pass_over
        self._calm = CalmSamples(self.config)
        self._is_calm = False
        self._absent = AbsentPods(self.config)
        self._cache = candidates.RankingCache()
        self._totals = _Totals(config.sampling.stale_after_s)

    def feed(self, snapshot: NodeSnapshot) -> Plan | None:
        """Take the next sample. Returns the decision on it; None if it was passed over or cannot be decided on."""
        totals = self._totals
        if totals.is_other_boot(snapshot):
            self._restart(snapshot)
        elif totals.samples and not totals.last_at < snapshot.taken_at:
            totals.left_out += 1  # recorded twice
            return None
        try:
            return self._take(snapshot)
        except Exception as error:
            # The policy relies on invariants of a snapshot, which an altered file may break.
            totals.add_trouble(snapshot, f"{type(error).__name__}: {error}")
            return None

    def _take(self, snapshot: NodeSnapshot) -> Plan | None:
        """Count the sample, and decide on it unless it is passed over."""
        if self._absent:
            snapshot = self._absent.without(snapshot)
        self._totals.add_sample(snapshot)
        if self._is_calm:
            if self._calm.passes(snapshot):
                self._totals.hard = self._totals.soft = False
                return None
            self.state = self._calm.leave()
            self._is_calm = False
        return self._decide(snapshot)

    def result(self) -> Simulation:
        """The totals so far."""
        return self._totals.result(self.name)

    def _restart(self, snapshot: NodeSnapshot) -> None:
        first = self.state is None
        self.state = policy_state.initial(INSTANCE, now=snapshot.taken_at, tokens_spent=not first)
        self._is_calm = False
        self._absent.clear()
        self._cache = candidates.RankingCache()
        self._totals.boots += 1

    def _decide(self, snapshot: NodeSnapshot) -> Plan:
        assert self.state is not None
        now = snapshot.taken_at
        plan, state = engine.decide(
            snapshot, self.state, now=now, config=self.config, cache=self._cache, always_rank=False
        )
        for victim in plan.victims:
            kind = OutcomeKind.KILLED if victim.method is Method.KILL else OutcomeKind.ACCEPTED
            outcome = Outcome(plan.id, victim.pod.uid, kind, "simulated", now)
            state = outcomes.apply_outcome(state, outcome, now=now, config=self.config)
            self._absent.add(victim, snapshot)
        for order in plan.reclaims:
            ended = ReclaimOutcome(plan.id, order.name, ReclaimResult.DRY_RUN, "simulated", now)
            state = outcomes.apply_reclaim(state, ended)
        for hook in plan.hooks:
            done = HookOutcome(plan.id, hook.pod_uid, HookResult.DRY_RUN, "simulated", now)
            state = outcomes.apply_hook(state, done, config=self.config)
        self.state = state
        self._totals.add_plan(plan, snapshot)
        if self._pass_over and not plan.victims:
            self._is_calm = self._calm.enter(state, snapshot)
        return plan


class _Totals:
    """The result while it grows."""

    def __init__(self, stale_after_s: float) -> None:
        self.stale_after_s = stale_after_s
        self.samples = self.decided = self.boots = self.reclaims = self.left_out = 0
        self.last_wall = self.last_at = 0.0
        self.first_wall: float | None = None
        self.recorded_s = self.gap_s = 0.0
        self.hard_s = self.soft_s = 0.0
        self.hard = self.soft = False
        self.true: tuple[ConditionType, ...] = ()
        self.true_s = dict.fromkeys(ConditionType, 0.0)
        self.raises: Counter[ConditionType] = Counter()
        self.lowest: dict[Signal, int] = {}
        self.closest: dict[Signal, Closest] = {}
        self.refusals: Counter[RefusalCode] = Counter()
        self.evictions: list[SimulatedEviction] = []
        self.trouble: list[str] = []

    def is_other_boot(self, snapshot: NodeSnapshot) -> bool:
        """Whether no state of before applies to this sample: the first one, or one of another boot."""
        if not self.samples:
            return True
        at, wall = snapshot.taken_at, snapshot.wall_time
        # A Prometheus shows the last values of before for some time after the boot.
        return wall - at > self.last_wall + MIN_DOWN_S or (wall > self.last_wall and at < self.last_at - MIN_DOWN_S)

    def add_sample(self, snapshot: NodeSnapshot) -> None:
        """Count the time since the last sample, and the lowest amounts of this one."""
        at, wall = snapshot.taken_at, snapshot.wall_time
        if self.samples:
            passed_s = at - self.last_at
            if 0.0 < passed_s <= self.stale_after_s:
                self.recorded_s += passed_s
                if self.hard:
                    self.hard_s += passed_s
                elif self.soft:
                    self.soft_s += passed_s
                for condition in self.true:
                    self.true_s[condition] += passed_s
            else:
                self.gap_s += max(0.0, passed_s if passed_s > 0.0 else wall - self.last_wall)
        else:
            self.first_wall = wall
        self.samples += 1
        self.last_at, self.last_wall = at, wall
        lowest = self.lowest
        for signal, observation in snapshot.observations.items():
            available = observation[1]
            if available is not None and available < lowest.get(signal, _NEVER) and not observation.implausible:
                self._closer(signal, available, observation.capacity or 0, wall)
        _, available, capacity, *_ = snapshot.mem_available
        if (
            available is not None
            and available < lowest.get(Signal.MEMORY, 0)
            and not snapshot.mem_available.implausible
        ):
            self._closer(Signal.MEMORY, available, capacity or 0, wall)

    def _closer(self, signal: Signal, available: int, capacity: int, wall: float) -> None:
        self.lowest[signal] = available
        self.closest[signal] = Closest(available, capacity, wall)

    def add_plan(self, plan: Plan, snapshot: NodeSnapshot) -> None:
        """What the decision on the last sample found and ordered."""
        self.decided += 1
        states = {verdict.state for verdict in plan.signals}
        self.hard = SignalState.HARD in states
        self.soft = SignalState.SOFT in states
        true = tuple([each.type for each in plan.conditions if each.status is ConditionStatus.TRUE])
        for condition in true:
            if condition not in self.true:
                self.raises[condition] += 1
        self.true = true
        self.reclaims += len(plan.reclaims)
        self.refusals.update({refusal.code for refusal in plan.refusals})
        self.evictions += [_eviction(victim, plan, snapshot) for victim in plan.victims]

    def add_trouble(self, snapshot: NodeSnapshot, reason: str) -> None:
        """A sample without a decision."""
        if len(self.trouble) < MAX_TROUBLE:
            self.trouble.append(f"sample at {snapshot.wall_time:.0f}: {reason}")

    def result(self, name: str) -> Simulation:
        return Simulation(
            name=name,
            samples=self.samples,
            decided=self.decided,
            first_wall=self.first_wall,
            last_wall=self.last_wall if self.samples else None,
            recorded_s=self.recorded_s,
            gap_s=self.gap_s,
            evictions=tuple(self.evictions),
            conditions={each: ConditionTotals(self.true_s[each], self.raises[each]) for each in ConditionType},
            hard_s=self.hard_s,
            soft_s=self.soft_s,
            closest={signal: self.closest[signal] for signal in Signal if signal in self.closest},
            refusals=dict(self.refusals),
            reclaims=self.reclaims,
            boots=self.boots,
            left_out=self.left_out,
            trouble=tuple(self.trouble),
        )


_NEVER: Final = 1 << 63


def _eviction(victim: Victim, plan: Plan, snapshot: NodeSnapshot) -> SimulatedEviction:
    threshold = victim.threshold
    verdicts = [each for signal in plan.signals for each in signal.thresholds if each.threshold == threshold]
    return SimulatedEviction(
        wall_time=snapshot.wall_time,
        plan_id=plan.id,
        pod=victim.pod.key,
        uid=victim.pod.uid,
        signal=threshold.signal,
        tier=victim.tier,
        method=victim.method,
        grace_s=victim.grace_period_s,
        available=snapshot.observe(threshold.signal, threshold.memory_model).available,
        threshold=verdicts[0].value if verdicts else None,
        predicted_relief=victim.predicted_relief,
        limit=victim.limit,
    )

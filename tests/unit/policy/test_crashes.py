"""No rate limit is exceeded on a node whose agent decides, acts, crashes and restarts at any step.

The agent persists its state after each decision and before it acts. What `apply_outcome` adds afterwards is persisted
with the next decision, so a crash loses it.
"""

from collections.abc import Mapping

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nodeagent.config.schema import RankingConfig, RateLimits, ReliefConfig, TokenBucket
from nodeagent.model import Outcome, OutcomeKind, Owner, PodView, QOSClass, Signal, Victim
from nodeagent.policy import engine, outcomes, rate_limits, state
from nodeagent.policy.state import PolicyState
from tests.support.nodes import GI, MI, NOW, WALL, config, hard, snapshot, soft, view

LIMITS = RateLimits(
    node=TokenBucket(4, 60.0),
    namespace=TokenBucket(3, 40.0),
    owner=TokenBucket(2, 20.0),
    signal=TokenBucket(3, 50.0),
    owner_backoff_s=5.0,
    owner_backoff_max_s=20.0,
)
OWNERS = {"web": "shop", "cart": "shop", "job": "batch"}

evicting = {
    "accepted": OutcomeKind.ACCEPTED,
    "evicted but timed out": OutcomeKind.TIMED_OUT,
    "evicted but 504": OutcomeKind.SERVER_ERROR,
}
sparing = {
    "timed out": OutcomeKind.TIMED_OUT,
    "blocked": OutcomeKind.BLOCKED_BY_PDB,
    "unreachable": OutcomeKind.UNREACHABLE,
    "throttled": OutcomeKind.TOO_MANY_REQUESTS,
    "re-check": OutcomeKind.RECHECK_REFUSED,
}
answers = st.sampled_from([*evicting, *sparing, "crash before sending", "crash after sending"])


class Node(RuleBasedStateMachine):
    """Pods of three owners that are replaced as soon as they are gone, under changing memory and PID pressure, with an
    agent whose process ends at the worst moments."""

    @initialize(spent=st.booleans(), kubelet=st.booleans(), hard_tier=st.booleans())
    def start(self, spent: bool, kubelet: bool, hard_tier: bool) -> None:
        limit = hard if hard_tier else soft
        self.config = config(
            limit(),
            limit(Signal.PID, 1000),
            rate_limits=LIMITS,
            ranking=RankingConfig(kubelet=kubelet),
            relief=ReliefConfig(failures_before_stop=10_000),
        )
        self.now = NOW
        self.born = 0
        self.pods: dict[str, PodView] = {}
        for owner in OWNERS:
            for _ in range(3):
                self.replica(owner)
        self.spent = spent
        self.state = state.initial("first", now=self.now, tokens_spent=spent)
        self.disk = msgspec.json.encode(self.state)
        self.evicted: dict[str, list[float]] = {}
        self.uids: list[str] = []

    def replica(self, owner: str) -> None:
        self.born += 1
        of = view(
            f"{owner}-{self.born}",
            GI,
            namespace=OWNERS[owner],
            owner=Owner("ReplicaSet", owner, owner),
            qos=QOSClass.BURSTABLE,
            usage_more={"process_count": 900, "thread_count": 900},
        )
        self.pods[of.pod.uid] = of

    @rule(seconds=st.sampled_from([0.02, 1.0, 7.0, 30.0, 61.0, 400.0]))
    def evicted_pods_are_gone(self, seconds: float) -> None:
        self.now += seconds
        for uid, of in list(self.pods.items()):
            if of.pod.deletion_wall is not None and of.pod.deletion_wall <= WALL + self.now - NOW:
                del self.pods[uid]

    @rule(
        seconds=st.sampled_from([0.02, 5.0, 20.0, 45.0]),
        available=st.fixed_dictionaries(
            {
                Signal.MEMORY: st.sampled_from([100 * MI, 100 * MI, 100 * MI, 8 * GI]),
                Signal.PID: st.sampled_from([10, 900, 20_000]),
            }
        ),
        answered=st.lists(answers, min_size=5, max_size=5),
    )
    def decide_and_act(self, seconds: float, available: Mapping[Signal, int], answered: list[str]) -> None:
        self.now += seconds
        node = snapshot(*self.pods.values(), at=self.now, available=dict(available))
        plan, self.state = engine.decide(node, self.state, now=self.now, config=self.config)
        self.disk = msgspec.json.encode(self.state)
        results = []
        for victim, answer in zip(plan.victims, answered, strict=False):
            if answer in evicting or answer == "crash after sending":
                self.evict(victim)
            if answer.startswith("crash"):
                self.crash()
                return
            kind = evicting.get(answer) or sparing[answer]
            results.append(Outcome(plan.id, victim.pod.uid, kind, "", self.now))
        self.state = outcomes.apply_outcome(self.state, results, now=self.now, config=self.config)

    def evict(self, victim: Victim) -> None:
        uid = victim.pod.uid
        assert uid in self.pods
        assert uid not in self.uids, "no pod is evicted twice"
        self.uids.append(uid)
        for key in rate_limits.bucket_keys(victim.pod, victim.threshold.signal):
            self.evicted.setdefault(key, []).append(self.now)
        leaving = victim.pod._replace(
            deletion_wall=WALL + self.now - NOW + victim.grace_period_s, deletion_grace_s=victim.grace_period_s
        )
        self.pods[uid] = self.pods[uid]._replace(pod=leaving)
        assert victim.pod.owner is not None
        self.replica(victim.pod.owner.uid)

    @rule()
    def crash(self) -> None:
        self.state = state.restored(msgspec.json.decode(self.disk, type=PolicyState), instance="next")

    @invariant()
    def no_window_has_more_than_burst_and_refill(self) -> None:
        for key, times in self.evicted.items():
            bucket = rate_limits.bucket_of(key, LIMITS)
            interval_s = 3600.0 / bucket.per_hour
            for first in range(len(times)):
                for last in range(first, len(times)):
                    allowed = bucket.burst + int((times[last] - times[first]) / interval_s + 1e-6)
                    assert last - first + 1 <= allowed, (key, times[first : last + 1])
            if self.spent:
                assert len(times) <= int((times[-1] - NOW) / interval_s + 1e-6)


Node.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestNode = Node.TestCase

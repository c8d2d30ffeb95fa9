"""No smaller pod is evicted in the place of a larger one that is out of reach."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from nodeagent.config.schema import (
    Config,
    EscalationConfig,
    LastResort,
    OnFutile,
    ProtectionConfig,
    RankingConfig,
    RateLimits,
    ReliefConfig,
    TokenBucket,
)
from nodeagent.model import (
    CgroupUsage,
    DiskUsage,
    DisruptionBudget,
    Method,
    NodeSnapshot,
    Outcome,
    OutcomeKind,
    Owner,
    Plan,
    Pod,
    PodSource,
    PodView,
    QOSClass,
    RefusalCode,
    Resources,
    Signal,
    Threshold,
    Tier,
)
from nodeagent.policy import backoffs, engine, out_of_reach, outcomes, rate_limits, recheck, selection
from nodeagent.policy.state import PolicyState, initial
from tests.support import nodes
from tests.support.nodes import CAPACITY, GI, MI, NOW, PLENTY, WALL, attributed, config, hard, quantity, snapshot, soft

SERVICES = 9 * GI
KUBELET = RankingConfig(kubelet=True)
STEP_S = 0.25


class HogView(NamedTuple):
    """What the agent reads of the hog of a simulated node, `for_s` seconds after the start."""

    view: Callable[[PodView, float], PodView | None] = lambda view, for_s: view
    answer: Callable[[float, int], OutcomeKind] = lambda for_s, times: OutcomeKind.ACCEPTED
    """To the n-th request for it."""
    dies: bool = True
    """True if an accepted eviction ends it."""


class SimulatedNode:
    """A node on which a hog grows among other pods, with a policy that acts on it."""

    def __init__(
        self,
        settings: Config,
        seen: HogView,
        *,
        rate: float = 30.0 * MI,
        hog: int = int(4.1 * GI),
        sibling: int = 0,
        burst_s: float = 0.0,
        others: int = 6,
        each: int = 300 * MI,
        unaccounted: int = 0,
    ) -> None:
        self.settings, self.seen, self.rate, self.burst_s = settings, seen, rate, burst_s
        self.sizes: dict[str, float] = {f"other-{n}": each for n in range(others)}
        self.unaccounted = unaccounted
        self.seen_of_all: Callable[[PodView, float], PodView] = lambda view, for_s: view
        self.sizes["hog"] = hog
        if sibling:
            self.sizes["sibling"] = sibling
        self.began, self.at = NOW, NOW
        self.leaves: dict[str, float] = {}
        self.evicted: list[str] = []
        self.asked: dict[str, int] = {}
        self.plans: list[Plan] = []
        self.state = initial("simulated", now=NOW)

    @property
    def for_s(self) -> float:
        return self.at - self.began

    def hog_size(self, size: float) -> int:
        if not self.burst_s:
            return int(size + self.rate * self.for_s)
        return int(size + self.rate * self.burst_s * (self.for_s // self.burst_s))

    def size_of(self, name: str) -> int:
        return self.hog_size(self.sizes[name]) if name in ("hog", "sibling") else int(self.sizes[name])

    def snapshot(self) -> NodeSnapshot:
        used = SERVICES + self.unaccounted + sum(self.size_of(name) for name in self.sizes)
        available = max(0, CAPACITY[Signal.MEMORY] - used)
        views = []
        for name in self.sizes:
            owner = Owner("ReplicaSet", "hog", "rs-hog") if name in ("hog", "sibling") else None
            more: dict[str, Any] = {"owner": owner} if owner else {}
            if name in self.leaves:
                more |= {"deletion_wall": WALL + self.leaves[name] - NOW, "deletion_grace_s": 1.0}
            view: PodView | None = nodes.view(name, self.size_of(name), namespace="hog" if owner else "other", **more)
            assert view is not None
            if name == "hog":
                view = self.seen.view(view, self.for_s)
            if view is not None:
                views.append(self.seen_of_all(view, self.for_s))
        services = (CgroupUsage("/system.slice/database.service", SERVICES, 9),)
        return snapshot(*views, at=self.at, available={Signal.MEMORY: available}, cgroups=services)

    def step(self) -> None:
        for name, until in list(self.leaves.items()):
            if self.at >= until and (name != "hog" or self.seen.dies):
                del self.sizes[name], self.leaves[name]
        plan, self.state = engine.decide(self.snapshot(), self.state, now=self.at, config=self.settings)
        self.plans.append(plan)
        for victim in plan.victims:
            name = str(victim.pod.name)
            self.asked[name] = self.asked.get(name, 0) + 1
            kind = OutcomeKind.ACCEPTED
            if name == "hog":
                kind = self.seen.answer(self.for_s, self.asked[name])
            if kind is OutcomeKind.ACCEPTED:
                self.evicted.append(name)
                self.leaves.setdefault(name, self.at + 1.0)
            outcome = Outcome(plan.id, victim.pod.uid, kind, "simulated", self.at + 0.01)
            self.state = outcomes.apply_outcome(self.state, outcome, now=self.at + 0.01, config=self.settings)
        self.at += STEP_S

    def run(self, seconds: float) -> "SimulatedNode":
        until = self.at + seconds
        while self.at < until:
            self.step()
        return self

    @property
    def others(self) -> list[str]:
        return [name for name in self.evicted if name.startswith("other")]

    @property
    def reasons(self) -> set[str]:
        return {refusal.code for plan in self.plans for refusal in plan.refusals}


def acting(tier: Tier = Tier.HARD, **more: Any) -> Config:
    threshold: Threshold = hard() if tier is Tier.HARD else soft(grace_s=1.0)
    more.setdefault("rate_limits", RateLimits())
    return config(threshold, **more)


def unreadable(view: PodView, until_s: float, for_s: float) -> PodView:
    assert view.usage is not None
    if for_s >= until_s:
        return view
    return view._replace(usage=view.usage._replace(memory_working_set=None, memory_unreclaimable=None))


def by_the_host(view: PodView, *, age_s: float) -> PodView:
    """The pod as only the host knows it."""
    assert view.usage is not None
    pod = Pod(view.pod.uid, view.pod.uid, "hog", "hog", PodSource.HOST, QOSClass.BURSTABLE)
    return PodView(pod, view.usage._replace(started_at=view.usage.read_at - age_s))


def claimed(view: PodView, *, asked_at: float = NOW) -> PodView:
    return view._replace(pod=view.pod._replace(claims_unknown="403 Forbidden", claims_asked_at=asked_at))


def thrice(kind: OutcomeKind) -> Callable[[float, int], OutcomeKind]:
    return lambda for_s, times: kind if times <= 3 else OutcomeKind.ACCEPTED


NEVER = float("inf")
FOR_EVER: dict[str, tuple[Tier, HogView]] = {
    "its usage cannot be read": (Tier.HARD, HogView(lambda view, for_s: unreadable(view, NEVER, for_s))),
    "its usage cannot be read, soft": (Tier.SOFT, HogView(lambda view, for_s: unreadable(view, NEVER, for_s))),
    "only the host knows it": (Tier.HARD, HogView(lambda view, for_s: by_the_host(view, age_s=5 + for_s))),
    "an old orphan": (Tier.HARD, HogView(lambda view, for_s: by_the_host(view, age_s=5000.0))),
    "it has no cgroup": (Tier.HARD, HogView(lambda view, for_s: view._replace(usage=None))),
    "429 always": (Tier.HARD, HogView(answer=lambda for_s, times: OutcomeKind.BLOCKED_BY_PDB)),
    "two PDBs match": (Tier.HARD, HogView(answer=lambda for_s, times: OutcomeKind.PDB_CONFLICT)),
    "400 always": (Tier.HARD, HogView(answer=lambda for_s, times: OutcomeKind.INVALID)),
    "404 always": (Tier.HARD, HogView(answer=lambda for_s, times: OutcomeKind.NOT_FOUND)),
    "409 always": (Tier.HARD, HogView(answer=lambda for_s, times: OutcomeKind.CONFLICT)),
    "timeouts always": (Tier.HARD, HogView(answer=lambda for_s, times: OutcomeKind.TIMED_OUT)),
    "the kubelet is dead": (Tier.HARD, HogView(dies=False)),
    "the kubelet is dead, soft": (Tier.SOFT, HogView(dies=False)),
    "no disruption is allowed": (
        Tier.SOFT,
        HogView(
            lambda view, for_s: view._replace(pod=view.pod._replace(disruption_budgets=(DisruptionBudget("b", 0),)))
        ),
    ),
    "its claim is not looked up": (Tier.SOFT, HogView(lambda view, for_s: claimed(view))),
}
"""Reasons for which a growing hog stays out of reach."""


@pytest.mark.parametrize("order", ["ours", "kubelet"])
@pytest.mark.parametrize("name", FOR_EVER)
def test_while_a_growing_hog_is_out_of_reach_no_other_pod_is_evicted(name: str, order: str) -> None:
    tier, seen = FOR_EVER[name]
    settings = acting(tier, ranking=KUBELET if order == "kubelet" else RankingConfig())
    simulated = SimulatedNode(settings, seen).run(100)
    assert simulated.others == []
    last = " ".join(refusal.message for refusal in simulated.plans[-1].refusals)
    assert "hog/hog" in last, "each decision has the reason it waits for"


def test_while_a_finished_pod_still_holds_the_memory_no_other_pod_is_evicted() -> None:
    finished = HogView(lambda view, for_s: view._replace(pod=view.pod._replace(phase="Failed")))
    assert SimulatedNode(acting(), finished).run(60).others == []


FOR_A_WHILE: dict[str, tuple[Tier, HogView, float]] = {
    "usage unreadable for 20 s": (Tier.HARD, HogView(lambda view, for_s: unreadable(view, 20, for_s)), 30),
    "not listed for 20 s": (
        Tier.HARD,
        HogView(lambda view, for_s: by_the_host(view, age_s=5 + for_s) if for_s < 20 else view),
        30,
    ),
    "claims never known, hard": (Tier.HARD, HogView(lambda view, for_s: claimed(view)), 30),
    "claims known after 20 s, soft": (
        Tier.SOFT,
        HogView(lambda view, for_s: claimed(view) if for_s < 20 else view),
        40,
    ),
    **{
        f"{kind.value} three times": (
            Tier.HARD,
            HogView(answer=thrice(kind)),
            60,
        )
        for kind in (OutcomeKind.INVALID, OutcomeKind.NOT_FOUND, OutcomeKind.CONFLICT, OutcomeKind.UNREACHABLE)
    },
    "too young for a minute, soft": (
        Tier.SOFT,
        HogView(
            lambda view, for_s: view._replace(
                usage=view.usage._replace(started_at=view.usage.read_at - for_s) if view.usage else None
            )
        ),
        90,
    ),
}


@pytest.mark.parametrize("order", ["ours", "kubelet"])
@pytest.mark.parametrize("name", FOR_A_WHILE)
def test_a_hog_that_comes_into_reach_is_evicted_and_no_pod_before_it(name: str, order: str) -> None:
    tier, seen, seconds = FOR_A_WHILE[name]
    protection = ProtectionConfig(minimum_age_s=60.0 if name.startswith("too young") else 0.0)
    settings = acting(tier, protection=protection, ranking=KUBELET if order == "kubelet" else RankingConfig())
    simulated = SimulatedNode(settings, seen).run(seconds)
    assert (simulated.others, "hog" in simulated.evicted) == ([], True)


@pytest.mark.parametrize(
    "budgets",
    [
        RateLimits(),
        RateLimits(owner_backoff_s=0.0, owner=TokenBucket(1, 30.0)),
        RateLimits(owner_backoff_s=0.0, namespace=TokenBucket(1, 30.0)),
    ],
    ids=["owner back-off", "empty bucket of the owner", "empty bucket of the namespace"],
)
@pytest.mark.parametrize("order", ["ours", "kubelet"])
def test_the_second_replica_of_a_leak_is_evicted_later_and_no_pod_in_its_place(budgets: RateLimits, order: str) -> None:
    settings = acting(rate_limits=budgets, ranking=KUBELET if order == "kubelet" else RankingConfig())
    simulated = SimulatedNode(settings, HogView(), hog=2 * GI, sibling=int(2.1 * GI), rate=40.0 * MI).run(200)
    assert simulated.others == []
    assert sorted(simulated.evicted) == ["hog", "sibling"]


def test_beside_a_stuck_pod_without_growth_other_pods_that_suffice_are_evicted() -> None:
    simulated = SimulatedNode(acting(), HogView(dies=False), rate=0.0, hog=int(4.4 * GI)).run(90)
    assert len(simulated.others) == 1
    assert simulated.evicted[0] == "hog"


def test_a_stuck_pod_that_grows_in_bursts_causes_at_most_one_replacement_in_ten_minutes() -> None:
    simulated = SimulatedNode(
        acting(), HogView(dies=False), rate=2.0 * MI, burst_s=60.0, hog=int(4.6 * GI), others=12, each=170 * MI
    )
    simulated.run(selection.REPLACEMENT_INTERVAL_S - 60)
    taken = [plan for plan in simulated.plans if any(str(v.pod.name).startswith("other") for v in plan.victims)]
    assert len(taken) <= 1
    assert "out-of-reach" in simulated.reasons


def test_a_replacement_that_evicted_nothing_may_be_repeated() -> None:
    state = backoffs.note_in_place(rate_limits.RateLimitState(), "memory", "p-1", 2, now=NOW)
    assert backoffs.in_place_since(state, "memory", now=NOW + 5, for_s=600) == 5
    assert backoffs.in_place_since(state, "inodes", now=NOW + 5, for_s=600) is None
    assert backoffs.in_place_since(state, "memory", now=NOW + 600, for_s=600) is None
    assert backoffs.undo_in_place(state, "memory", "p-2") == state
    once = backoffs.undo_in_place(state, "memory", "p-1")
    assert backoffs.in_place_since(once, "memory", now=NOW + 5, for_s=600) == 5
    assert (
        backoffs.in_place_since(backoffs.undo_in_place(once, "memory", "p-1"), "memory", now=NOW + 5, for_s=600) is None
    )


def test_after_a_lost_state_no_pod_is_replaced_for_a_while() -> None:
    lost = rate_limits.RateLimitState(spent_at=NOW)
    assert backoffs.in_place_since(lost, "memory", now=NOW + 1, for_s=600) == 1


def tiny_without_usage(view: PodView, for_s: float) -> PodView:
    return unreadable(view, NEVER, for_s) if view.pod.name == "other-0" else view


@pytest.mark.parametrize("order", ["ours", "kubelet"])
@pytest.mark.parametrize("tier", Tier)
def test_a_tiny_unreadable_pod_does_not_protect_a_pod_that_grows_fast(order: str, tier: Tier) -> None:
    """Unattributed memory may belong to the tiny pod, but the hog causes the loss."""
    settings = acting(tier, ranking=KUBELET if order == "kubelet" else RankingConfig())
    simulated = SimulatedNode(settings, HogView(), rate=60.0 * MI, hog=int(1.1 * GI), unaccounted=3 * GI)
    simulated.seen_of_all = tiny_without_usage
    simulated.run(12)
    assert simulated.evicted == ["hog"], "before the memory is used up"


def test_two_replicas_that_grow_beside_a_tiny_unreadable_pod_are_both_evicted() -> None:
    settings = acting(rate_limits=RateLimits(owner_backoff_s=10.0))
    simulated = SimulatedNode(
        settings, HogView(), rate=30.0 * MI, hog=int(0.6 * GI), sibling=int(0.5 * GI), unaccounted=3 * GI
    )
    simulated.seen_of_all = tiny_without_usage
    simulated.run(60)
    assert sorted(simulated.evicted) == ["hog", "sibling"]


@pytest.mark.parametrize("signal", [Signal.NODEFS, Signal.PID])
def test_a_used_up_resource_beside_an_unreadable_pod_gets_help_in_the_end(signal: Signal) -> None:
    def node(at: float) -> NodeSnapshot:
        most = 20 * GI if signal is Signal.NODEFS else 4000
        dark = nodes.view("dark", MI, usage_more={"process_count": None, "thread_count": None})
        large = nodes.view(
            "large",
            MI,
            usage_more={"disk": DiskUsage(rootfs_bytes=most), "process_count": most, "thread_count": most},
        )
        return snapshot(dark, large, at=at, available={signal: 0})

    settings = config(hard(signal, 5 * GI if signal is Signal.NODEFS else 1000))
    state = initial("t", now=NOW)
    when: list[float] = []
    for step in range(int(selection.REPLACEMENT_INTERVAL_S) + 20):
        plan, state = engine.decide(node(NOW + step), state, now=NOW + step, config=settings)
        when += [step for _ in plan.victims]
    assert len(when) == 1
    assert selection.REPLACEMENT_INTERVAL_S <= when[0] <= selection.REPLACEMENT_INTERVAL_S + 5


def test_a_resize_to_more_than_exists_does_not_put_a_pod_out_of_reach() -> None:
    """Any editor of the pod may request it, and the kubelet keeps the allocated amount."""
    hog = nodes.view("hog", 2 * GI, request=100 * MI)
    [container] = hog.pod.containers
    wanted = container._replace(requests=Resources(memory=9 * 10**18), allocated=Resources(memory=100 * MI))
    resized = hog._replace(pod=hog.pod._replace(containers=(wanted,)))
    others = [nodes.view(name, 900 * MI) for name in ("a", "b")]
    assert decide(pressed(resized, *others), config(hard()))[0] == ["hog"]


def test_right_after_a_release_the_signal_still_falls_as_fast_as_before() -> None:
    """The step up hides the loss from the trend, and other pods would replace it (random run 5029)."""
    history = tuple((NOW + at, left * MI) for at, left in enumerate((900, 870, 840, 1140, 1110, 1080)))
    assert selection.expected_loss(history, available=1080 * MI, value=GI) == 30 * MI * selection.LOSS_HORIZON_S


def test_a_short_outage_of_the_usage_of_a_slow_hog_evicts_no_other_pod() -> None:
    """Five of them alone would suffice for a minute (random run 9198)."""
    dark = HogView(lambda view, for_s: unreadable(view, 20, for_s))
    simulated = SimulatedNode(acting(), dark, rate=10.0 * MI, hog=int(4.2 * GI)).run(60)
    assert simulated.evicted == ["hog"]


def test_a_hog_that_stays_out_of_reach_is_waited_for_briefly() -> None:
    dark = HogView(lambda view, for_s: unreadable(view, NEVER, for_s))
    simulated = SimulatedNode(acting(), dark, rate=0.0, hog=int(4.25 * GI))
    simulated.run(selection.LARGER_WAIT_S - 1)
    assert (simulated.others, "out-of-reach" in simulated.reasons) == ([], True)
    simulated.run(3)
    assert len(simulated.others) == 1


def beside_an_unreadable_replica(
    *, others: int, each: int, hog: int, sibling: int, hog_priority: int = 0
) -> SimulatedNode:
    """Two replicas that grow, one of them without a readable cgroup."""
    seen = HogView(lambda view, for_s: view._replace(pod=view.pod._replace(priority=hog_priority)))
    simulated = SimulatedNode(acting(), seen, rate=10.0 * MI, hog=hog, sibling=sibling, others=others, each=each)
    simulated.seen_of_all = lambda view, for_s: view._replace(usage=None) if view.pod.name == "sibling" else view
    return simulated.run(20)


def test_growth_of_a_pod_that_is_not_evicted_does_not_make_others_sufficient() -> None:
    """It continues to grow (random run 9140)."""
    sizes = {"hog": int(0.5 * GI), "sibling": int(3.7 * GI)}
    assert beside_an_unreadable_replica(others=6, each=300 * MI, **sizes, hog_priority=1).others == []


def test_of_two_growing_pods_only_the_one_in_reach_is_evicted() -> None:
    simulated = beside_an_unreadable_replica(others=6, each=300 * MI, hog=int(0.3 * GI), sibling=int(3.9 * GI))
    assert simulated.evicted == ["hog"]


def test_a_signal_counts_as_used_up_from_the_moment_it_is_not_from_the_crossing() -> None:
    dark, large = no_usage("dark"), nodes.view("large", 3 * GI)
    settings = config(hard(), protection=ProtectionConfig())
    state = initial("t", now=NOW)
    when: list[float] = []
    for step in range(int(2 * selection.REPLACEMENT_INTERVAL_S) + 20):
        left = max(0, 700 * MI - step * MI)
        node = attributed(pressed(dark, large, available=left, at=NOW + step), unattributed=4 * GI)
        if left:
            node = node._replace(pods=(node.pods[0],))
        plan, state = engine.decide(node, state, now=NOW + step, config=settings)
        when += [step for _ in plan.victims]
    used_up = 700 - 102
    assert when[0] >= used_up + selection.REPLACEMENT_INTERVAL_S


# --- one decision ----------------------------------------------------------------------------------------------------


def decide(
    node: NodeSnapshot, settings: Config, before: PolicyState | None = None
) -> tuple[list[str], list[str], PolicyState]:
    """Victims, codes and the state after the last of six samples that show the same."""
    state = before or initial("t", now=node.taken_at)
    for back in (2.25, 2.0, 1.5, 1.0, 0.5):
        at = node.taken_at - back
        seen = {signal: each._replace(read_at=at) for signal, each in node.observations.items()}
        earlier = node._replace(taken_at=at, observations=seen, pods=(), pods_synced_at=at)
        _, state = engine.decide(earlier, state, now=at, config=settings)
    plan, state = engine.decide(node, state, now=node.taken_at, config=settings)
    return [str(each.pod.name) for each in plan.victims], [each.code for each in plan.refusals], state


def pressed(*pods: PodView, available: int = 200 * MI, **more: Any) -> NodeSnapshot:
    return snapshot(*pods, available={Signal.MEMORY: available}, **more)


def no_usage(name: str, **more: Any) -> PodView:
    return unreadable(nodes.view(name, MI, **more), NEVER, 0)


def test_one_tiny_unreadable_pod_does_not_protect_the_hog() -> None:
    node = attributed(pressed(no_usage("tiny"), nodes.view("hog", 2 * GI)), unattributed=GI)
    victims, _, _ = decide(
        node, config(hard(min_reclaim=quantity(8 * GI)), relief=ReliefConfig(on_futile=OnFutile.EVICT))
    )
    assert victims == ["hog"], "although it does not suffice: only 1 GiB is unattributed"


def test_an_unreadable_pod_that_may_hold_more_protects_others_only_while_they_do_not_suffice() -> None:
    node = attributed(
        pressed(no_usage("dark"), nodes.view("a", 600 * MI), nodes.view("b", 500 * MI)), unattributed=3 * GI
    )
    assert decide(node, config(hard()))[0] == ["a", "b"], "824 MiB are missing, and nothing more is used"
    settings = config(hard(), relief=ReliefConfig(max_victims=1))
    victims, codes, _ = decide(node, settings)
    assert (victims, codes) == ([], ["out-of-reach"])


def test_the_rate_of_loss_must_be_known_before_a_replacement() -> None:
    node = attributed(pressed(no_usage("dark"), nodes.view("a", 2 * GI)), unattributed=3 * GI)
    plan, _ = engine.decide(node, initial("t", now=NOW), now=NOW, config=config(hard()))
    assert plan.victims == ()
    assert "the rate at which the rest is used up is unknown" in plan.refusals[0].message


def test_the_refusal_contains_the_pod_its_amount_and_the_reason() -> None:
    node = pressed(by_the_host(nodes.view("hog", 2 * GI), age_s=5), nodes.view("a", 950 * MI))
    plan, _ = engine.decide(node, initial("t", now=NOW), now=NOW, config=config(hard()))
    (refusal,) = plan.refusals
    assert refusal.code == "out-of-reach"
    assert refusal.message == (
        "memory.available: hog/hog holds 2Gi and is out of reach (unknown-pod: the API server does not list "
        "this pod: owner, priority and PDBs unknown); the API server is about to list it: no other pod is evicted in "
        "its place"
    )


def test_a_pod_ranked_before_the_pod_out_of_reach_is_evicted_as_usual() -> None:
    """It does not replace the other pod: it would be the victim anyway."""
    blocked = nodes.view(
        "database", 4 * GI, priority=1000, request=6 * GI, disruption_budgets=(DisruptionBudget("b", 0),)
    )
    leak = nodes.view("leak", GI, qos=QOSClass.BEST_EFFORT)
    victims, _, _ = decide(pressed(blocked, leak), acting(Tier.SOFT, rate_limits=PLENTY))
    assert victims == ["leak"]


def test_of_a_set_with_a_pod_out_of_reach_only_the_others_are_evicted() -> None:
    hog = nodes.view("hog", 3 * GI, request=GI)
    stuck = by_the_host(nodes.view("stuck", 6 * GI), age_s=500)
    small = [nodes.view(f"small-{n}", 400 * MI, request=399 * MI) for n in range(4)]
    node = pressed(stuck, hog, *small)
    victims, codes, _ = decide(node, config(hard(min_reclaim=quantity(7 * GI))))
    assert (victims, codes) == ([], ["futile", "out-of-reach"])
    settings = config(hard(min_reclaim=quantity(7 * GI)), relief=ReliefConfig(on_futile=OnFutile.EVICT))
    victims, codes, _ = decide(node, settings)
    assert victims == ["hog"]
    assert "out-of-reach" in codes


def test_a_pod_that_is_as_large_is_evicted() -> None:
    stuck = by_the_host(nodes.view("stuck", 2 * GI), age_s=500)
    assert decide(pressed(stuck, nodes.view("other", 2 * GI)), config(hard()))[0] == ["other"]


def test_a_configured_protection_does_not_put_a_pod_out_of_reach() -> None:
    system = unreadable(nodes.view("system", MI, namespace="kube-system"), NEVER, 0)
    plan, _ = engine.decide(
        pressed(system, nodes.view("hog", 950 * MI)), initial("t", now=NOW), now=NOW, config=config(hard())
    )
    assert [str(each.pod.name) for each in plan.victims] == ["hog"]


@pytest.mark.parametrize(("asked_s", "expected"), [(1.9, []), (2.1, ["hog"]), (None, ["hog"])])
def test_the_hard_tier_waits_briefly_for_claims(asked_s: float | None, expected: list[str]) -> None:
    """None: the lookup started before the crossing."""
    hog = claimed(nodes.view("hog", 2 * GI), asked_at=NOW - (9 if asked_s is None else asked_s))
    others = [nodes.view(name, GI) for name in ("a", "b")]
    settings = config(hard())
    before = pressed(at=NOW - 2.5)
    _, state = engine.decide(before, initial("t", now=NOW - 2.5), now=NOW - 2.5, config=settings)
    plan, state = engine.decide(pressed(hog, *others), state, now=NOW, config=settings)
    assert [str(each.pod.name) for each in plan.victims] == expected
    if not expected:
        assert [each.code for each in plan.refusals] == ["claims-unknown"]
        return
    again = pressed(hog, at=NOW + 0.1)
    assert recheck.recheck(plan.victims[0], again, state, now=NOW + 0.1, config=settings) is None
    bound = hog._replace(pod=hog.pod._replace(claims_unknown="", node_bound="its claim data is local"))
    refusal = recheck.recheck(plan.victims[0], pressed(bound, at=NOW + 0.1), state, now=NOW + 0.1, config=settings)
    assert refusal is not None
    assert refusal.code == "node-bound", "a claim that is known to be local protects"


def test_unknown_claims_only_delay_the_shortening_of_a_terminating_pod() -> None:
    leaving = claimed(nodes.view("leaving", 2 * GI, deletion_wall=WALL + 3000, deletion_grace_s=3600.0), asked_at=NOW)
    others = [nodes.view(name, GI) for name in ("a", "b")]
    settings, state = config(hard()), initial("t", now=NOW)
    named = []
    for at in (NOW, NOW + 1, NOW + 2.5):
        plan, state = engine.decide(pressed(leaving, *others, at=at), state, now=at, config=settings)
        named.append([str(each.pod.name) for each in plan.victims])
    assert named == [[], [], ["leaving"]]


def test_a_pod_that_the_api_server_no_longer_lists_counts_as_released_when_its_cgroup_is_gone() -> None:
    settings = config(hard(Signal.NODEFS, 10 * GI))

    def holds(name: str, size: int) -> PodView:
        return nodes.view(name, MI, usage_more={"disk": DiskUsage(size, 1, 0, 0, 0, 0)})

    low: dict[Signal, int | None] = {Signal.NODEFS: 8 * GI}
    node = snapshot(holds("hog", 4 * GI), holds("a", 3 * GI), available=low)
    plan, state = engine.decide(node, initial("t", now=NOW), now=NOW, config=settings)
    assert [str(each.pod.name) for each in plan.victims] == ["hog"]
    state = outcomes.apply_outcome(
        state,
        Outcome(plan.id, plan.victims[0].pod.uid, OutcomeKind.NOT_FOUND, "404", NOW + 0.1),
        now=NOW + 0.1,
        config=settings,
    )
    later = snapshot(holds("a", 3 * GI), at=NOW + 0.5, available=low)
    plan, _ = engine.decide(later, state, now=NOW + 0.5, config=settings)
    assert plan.victims == ()
    assert [each.code for each in plan.refusals] == ["pending-release"]


def test_the_last_resort_kills_no_pod_in_the_place_of_one_that_the_kernel_did_not_kill() -> None:
    settings = config(
        hard(),
        escalation=EscalationConfig(last_resort=LastResort.CGROUP_KILL, last_resort_after_s=30.0),
        rate_limits=PLENTY._replace(last_resort=TokenBucket(9, 60.0)),
    )
    pods = [nodes.view("hog", 4 * GI), nodes.view("a", 800 * MI, request=799 * MI)]
    lost: dict[str, Any] = {"api_unreachable_since": NOW - 40}
    plan, state = engine.decide(pressed(*pods, **lost), initial("t", now=NOW), now=NOW, config=settings)
    assert [(str(each.pod.name), each.method) for each in plan.victims] == [("hog", Method.KILL)]
    refused = Outcome(plan.id, plan.victims[0].pod.uid, OutcomeKind.NOT_KILLED, "EPERM", NOW)
    state = outcomes.apply_outcome(state, refused, now=NOW, config=settings)
    for step in range(1, 9):
        at = NOW + step
        node = pressed(*pods, available=(200 - 9 * step) * MI, at=at, **lost)
        plan, state = engine.decide(node, state, now=at, config=settings)
        assert plan.victims == ()


# --- limits, as a law ------------------------------------------------------------------------------------------------

some_pods = st.lists(
    st.tuples(
        st.integers(1, 40),
        st.sampled_from(list(QOSClass)),
        st.sampled_from(["a", "b"]),
        st.sampled_from(["x", "y", "z"]),
        st.booleans(),
    ),
    min_size=1,
    max_size=9,
)


@given(rows=some_pods, missing=st.integers(1, 60), kubelet=st.booleans(), tier=st.sampled_from(list(Tier)))
def test_limits_never_add_a_victim(
    rows: list[tuple[int, QOSClass, str, str, bool]], missing: int, kubelet: bool, tier: Tier
) -> None:
    settings = acting(tier, rate_limits=PLENTY, ranking=KUBELET if kubelet else RankingConfig())
    pods, held = [], {}
    for number, (size, qos, namespace, owner, limited) in enumerate(rows):
        view = nodes.view(
            f"p{number}", size * 50 * MI, qos=qos, namespace=namespace, owner=Owner("ReplicaSet", owner, f"rs-{owner}")
        )
        pods.append(view)
        if limited:
            held[view.pod.uid] = rate_limits.Backoff(1, NOW + 60, NOW - 1, RefusalCode.INVALID, "refused")
    node = pressed(*pods, available=GI - missing * 20 * MI if missing < 51 else 0)
    state = initial("t", now=NOW - 9)
    _, state = engine.decide(pressed(at=NOW - 2), state, now=NOW - 2, config=settings)
    free, _ = engine.decide(node, state, now=NOW, config=settings)
    backoff = {"rs-x": rate_limits.Backoff(1, NOW + 60, NOW - 1, RefusalCode.OWNER_BACKOFF, "evicted")}
    empty = {"namespace/b": rate_limits.BucketLevel(0, NOW)}
    limits = state.rate_limits._replace(pods=held, owners=backoff, levels=empty)
    plan, _ = engine.decide(node, state._replace(rate_limits=limits), now=NOW, config=settings)
    without = {each.pod.uid for each in free.victims}
    with_limits = {each.pod.uid for each in plan.victims}
    limited_uids = {
        view.pod.uid
        for view in pods
        if view.pod.uid in held or view.pod.namespace == "b" or (view.pod.owner and view.pod.owner.uid == "rs-x")
    }
    assert with_limits == without - limited_uids
    if without - with_limits:
        assert any(each.message.endswith(selection.NO_REPLACEMENT) for each in plan.refusals)


@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=9),
    missing=st.integers(1, 50),
    falls=st.integers(0, 20),
)
def test_a_pod_smaller_than_the_one_out_of_reach_is_selected_only_if_that_suffices(
    rows: list[tuple[int, int]], missing: int, falls: int
) -> None:
    """The victims are those of the run in which every pod is in reach, or they suffice alone."""
    settings = acting(rate_limits=PLENTY)
    seen, reachable, stuck = [], [], {}
    for number, (size, kind) in enumerate(rows):
        view = nodes.view(f"p{number}", size * 50 * MI)
        reachable.append(view)
        if kind == 1:
            view = by_the_host(view, age_s=500)._replace(pod=view.pod._replace(source=PodSource.HOST))
        elif kind == 2:
            stuck[view.pod.uid] = rate_limits.Backoff(
                9, NOW + 60, NOW - 1, RefusalCode.INVALID, "refused for the ninth time"
            )
        seen.append(view)
    available = GI - missing * 20 * MI
    state = initial("t", now=NOW - 9)
    for step in range(5, 0, -1):
        at = NOW - step
        shot = pressed(at=at, available=available + falls * MI * step)
        _, state = engine.decide(shot, state, now=at, config=settings)
    free, _ = engine.decide(pressed(*reachable, available=available), state, now=NOW, config=settings)
    state = state._replace(rate_limits=state.rate_limits._replace(pods=stuck))
    plan, _ = engine.decide(pressed(*seen, available=available), state, now=NOW, config=settings)
    without = {each.pod.uid: each.predicted_relief or 0 for each in free.victims}
    chosen = {each.pod.uid: each.predicted_relief or 0 for each in plan.victims}
    free_uids = {view.pod.uid for view in seen if view.pod.source is PodSource.API} - stuck.keys()
    out = {uid: relief for uid, relief in without.items() if uid not in free_uids}
    if not out or not chosen or chosen.keys() <= without.keys():
        return
    largest_out = max(out.values())
    cures = sum(chosen.values()) >= GI - available + falls * MI * selection.LOSS_HORIZON_S
    assert max(chosen.values()) >= largest_out or cures


class Moment(NamedTuple):
    """Why the hog is out of reach for a period."""

    seconds: float
    trouble: str
    answer: OutcomeKind


moments = st.lists(
    st.builds(
        Moment,
        st.floats(0.5, 20.0),
        st.sampled_from(["", "unread", "unlisted", "orphan", "claims", "gone", "budget"]),
        st.sampled_from([kind for kind in OutcomeKind if kind is not OutcomeKind.DRY_RUN]),
    ),
    min_size=1,
    max_size=8,
)


@settings_of_hypothesis(deadline=None, max_examples=10)
@given(story=moments, dies=st.booleans(), kubelet=st.booleans(), tier=st.sampled_from(list(Tier)))
@example(  # accepted, and unreadable when the time for its release is over
    story=[
        Moment(6.0, "", OutcomeKind.ACCEPTED),
        Moment(1.0, "unlisted", OutcomeKind.ACCEPTED),
        Moment(15.0, "unread", OutcomeKind.ACCEPTED),
    ],
    dies=False,
    kubelet=False,
    tier=Tier.HARD,
)
def test_whatever_happens_to_a_growing_hog_no_other_pod_is_evicted(
    story: list[Moment], dies: bool, kubelet: bool, tier: Tier
) -> None:
    def moment(for_s: float) -> Moment:
        for each in story:
            for_s -= each.seconds
            if for_s < 0:
                return each
        return Moment(0.0, "", OutcomeKind.ACCEPTED)

    def seen(view: PodView, for_s: float) -> PodView:
        match moment(for_s).trouble:
            case "unread":
                return unreadable(view, NEVER, for_s)
            case "unlisted":
                return by_the_host(view, age_s=5.0)
            case "orphan":
                return by_the_host(view, age_s=500.0)
            case "claims":
                return claimed(view)
            case "gone":
                return view._replace(usage=None)
            case "budget":
                return view._replace(pod=view.pod._replace(disruption_budgets=(DisruptionBudget("b", 0),)))
        return view

    order = KUBELET if kubelet else RankingConfig()
    simulated = SimulatedNode(
        acting(tier, ranking=order), HogView(seen, lambda for_s, times: moment(for_s).answer, dies)
    )
    simulated.run(60)
    assert simulated.others == []


def test_the_constants_of_the_page_are_those_of_the_code() -> None:
    constants = (
        out_of_reach.CLAIMS_WAIT_S,
        selection.LOSS_HORIZON_S,
        selection.REPLACEMENT_INTERVAL_S,
        selection.LARGER_WAIT_S,
        selection.LARGER_WAIT_SHARE,
    )
    assert constants == (2.0, 60.0, 600.0, 20.0, 0.25)

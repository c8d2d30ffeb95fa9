"""The whole decision, from a snapshot to a plan, to outcomes, to the next decision."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.config.schema import (
    Config,
    EscalationConfig,
    Mode,
    OnBlocked,
    OnFutile,
    ProtectionConfig,
    RankingConfig,
    ReliefConfig,
    TokenBucket,
)
from nodeagent.model import (
    Amount,
    CgroupUsage,
    ContainerUsage,
    DiskUsage,
    DisruptionBudget,
    Method,
    NodeSnapshot,
    Outcome,
    OutcomeKind,
    Owner,
    Plan,
    PodView,
    QOSClass,
    Resources,
    Signal,
    Threshold,
    Tier,
    Victim,
)
from nodeagent.policy import backoffs, candidates, chosen_victims, engine, outcomes, rate_limits, recheck, state
from nodeagent.policy.in_flight import EvictionEvent, EvictionStage
from nodeagent.policy.state import PolicyState
from tests.support.nodes import GI, MI, NOW, PLENTY, WALL, attributed, config, hard, not_started, snapshot, soft, view

BE, BURSTABLE, GUARANTEED = QOSClass.BEST_EFFORT, QOSClass.BURSTABLE, QOSClass.GUARANTEED
FULL = {Signal.MEMORY: 100 * MI}
"""924 MiB are missing to the threshold of 1 GiB."""


def fresh() -> PolicyState:
    return state.initial("test", now=NOW)


def decide(
    node: NodeSnapshot, settings: Config | None = None, before: PolicyState | None = None, **more: Any
) -> tuple[Plan, PolicyState]:
    return engine.decide(node, before or fresh(), now=node.taken_at, config=settings or config(hard()), **more)


def victims(plan: Plan) -> list[str | None]:
    return [victim.pod.name for victim in plan.victims]


def codes(plan: Plan) -> list[str]:
    return [refusal.code for refusal in plan.refusals]


def refused(plan: Plan, name: str) -> list[str]:
    (found,) = [each for each in plan.ranking if each.view.pod.name == name]
    return [refusal.code for refusal in found.refusals]


def pressed(*pods: PodView, at: float = NOW, available: int = 100 * MI, **more: Any) -> NodeSnapshot:
    return snapshot(*pods, at=at, available={Signal.MEMORY: available}, **more)


def outcome(plan: Plan, kind: OutcomeKind, *, index: int = 0, at: float = NOW, **more: Any) -> Outcome:
    return Outcome(plan.id, plan.victims[index].pod.uid, kind, "the server's message", at, **more)


def settled(
    plan: Plan, after: PolicyState, kind: OutcomeKind, settings: Config | None = None, **more: Any
) -> PolicyState:
    return outcomes.apply_outcome(after, outcome(plan, kind, **more), now=NOW, config=settings or config(hard()))


# --- when nothing is to be done ---------------------------------------------------------------------------------------


def test_a_healthy_node_has_an_order_and_no_victims() -> None:
    plan, _ = decide(snapshot(view("b", 2 * GI), view("a", GI)))
    assert victims(plan) == []
    assert [each.view.pod.name for each in plan.ranking] == ["b", "a"]
    assert plan.ranked_for is Signal.MEMORY
    assert plan.acting_on is None
    assert plan.refusals == ()


def test_a_calm_node_need_not_be_ranked() -> None:
    assert decide(snapshot(view("a", GI)), always_rank=False)[0].ranking == ()
    assert decide(pressed(view("a", GI)), always_rank=False)[0].ranking != ()


def test_what_a_decision_asks_of_every_pod_is_known_before_it_matters() -> None:
    cache, settings, pods = candidates.RankingCache(), config(hard()), (view("a", GI), view("b", GI))
    decide(snapshot(*pods), settings, cache=cache, always_rank=False)
    known = len(cache)
    assert known == len(pods)
    prepared, _ = decide(pressed(*pods), settings, cache=cache, always_rank=False)
    assert len(cache) == known
    assert prepared == decide(pressed(*pods), settings, always_rank=False)[0]
    decide(snapshot(view("a", GI)), settings, cache=cache, always_rank=False)
    assert len(cache) == 1, "pods that are gone are forgotten"


def test_a_soft_threshold_in_its_grace_evicts_no_pod_and_shows_the_order_for_its_resource() -> None:
    node = snapshot(view("a", GI), available={Signal.PID: 10})
    plan, _ = decide(node, config(soft(Signal.PID, 1000, grace_s=60)))
    assert victims(plan) == []
    assert plan.ranked_for is Signal.PID


# --- the hard and the soft tier ---------------------------------------------------------------------------------------


def test_a_tiny_best_effort_pod_at_the_top_is_not_chosen_for_a_deficit_of_a_gibibyte() -> None:
    plan, _ = decide(pressed(view("tiny", MI, qos=BE), view("hog", 2 * GI)))
    assert victims(plan) == ["hog"]
    assert plan.ranking[0].view.pod.name == "tiny"
    assert refused(plan, "tiny") == ["below-minimum-relief"]


def test_a_pod_full_of_page_cache_is_not_evicted_for_memory() -> None:
    cache = view("cache", 8 * GI, qos=BE, usage_more={"memory_unreclaimable": 2 * MI})
    assert victims(decide(pressed(cache, view("hog", 2 * GI)))[0]) == ["hog"]


def test_the_hard_tier_takes_as_many_as_cover_the_deficit_and_no_more() -> None:
    pods = [view("a", 400 * MI, qos=BE), view("b", 600 * MI, qos=BE), view("c", 9 * GI, qos=GUARANTEED)]
    plan, _ = decide(pressed(*pods))
    assert sorted(str(name) for name in victims(plan)) == ["a", "b"]
    assert sum(victim.predicted_relief or 0 for victim in plan.victims) >= 924 * MI


def test_the_soft_tier_evicts_one_pod_and_then_decides_again() -> None:
    pods = [view("a", 400 * MI, qos=BE), view("b", 600 * MI, qos=BE)]
    settings = config(soft())
    _, after = decide(pressed(*pods, at=NOW - 1), settings)
    plan, _ = decide(pressed(*pods), settings, after)
    assert len(plan.victims) == 1
    assert plan.victims[0].tier is Tier.SOFT


def test_a_hard_decision_takes_no_more_than_max_victims() -> None:
    pods = [view(f"p{number}", 200 * MI) for number in range(9)]
    plan, _ = decide(pressed(*pods), config(hard(), relief=ReliefConfig(max_victims=2)))
    assert len(plan.victims) == 2


def test_the_deficit_includes_minimum_reclaim() -> None:
    reclaim = Amount(500 * MI, None, "500Mi")
    plan, _ = decide(pressed(view("a", 4 * GI)), config(hard(min_reclaim=reclaim)))
    assert plan.deficit is not None
    assert plan.deficit.amount == (1024 + 500 - 100) * MI


def test_hard_pids_are_served_before_soft_memory() -> None:
    pods = [view("hog", 4 * GI), view("bomb", MI, usage_more={"process_count": 9000, "thread_count": 9000})]
    settings = config(soft(), hard(Signal.PID, 1000))
    available: dict[Signal, int | None] = {Signal.MEMORY: 100 * MI, Signal.PID: 50}
    _, after = decide(snapshot(*pods, at=NOW - 1, available={Signal.MEMORY: 100 * MI}), settings)
    assert victims(decide(snapshot(*pods, available=available), settings, after)[0]) == ["bomb"]


def test_memory_is_served_before_pids_of_the_same_tier() -> None:
    pods = [view("hog", 4 * GI), view("bomb", MI, usage_more={"process_count": 9000, "thread_count": 9000})]
    node = snapshot(*pods, available={Signal.MEMORY: 100 * MI, Signal.PID: 50})
    assert victims(decide(node, config(hard(Signal.PID, 1000), hard()))[0]) == ["hog"]


def test_without_a_candidate_for_memory_the_next_resource_is_planned() -> None:
    bomb = view("bomb", MI, usage_more={"process_count": 9000, "thread_count": 9000})
    node = snapshot(bomb, available={Signal.MEMORY: 100 * MI, Signal.PID: 50})
    plan, _ = decide(node, config(hard(), hard(Signal.PID, 1000)))
    assert victims(plan) == ["bomb"]
    assert codes(plan) == ["futile"] or codes(plan) == ["no-candidates"]


@pytest.mark.parametrize("seen", [3, 30])
def test_a_fork_bomb_with_short_lived_children_is_evicted_and_fifty_other_pods_are_not(seen: int) -> None:
    """What fills the table is in the node's count and in no pod's."""
    innocents = [
        view(f"innocent-{n:02}", MI, qos=BE, usage_more={"process_count": 20, "thread_count": 40}) for n in range(50)
    ]
    forks = {"process_count": seen, "thread_count": seen, "forks_per_s": 3000.0}
    node = snapshot(*innocents, view("bomb", MI, usage_more=forks), available={Signal.PID: 500})
    settings = config(hard(Signal.PID, 2000))
    plan, after = decide(node, settings)
    assert victims(plan) == ["bomb"]
    after = settled(plan, after, OutcomeKind.ACCEPTED, settings)
    still = snapshot(*node.pods, at=NOW + 1, available={Signal.PID: 400})
    assert victims(decide(still, settings, after)[0]) == [], "its end is waited for"


def test_a_pod_with_few_forks_has_no_more_relief_than_the_unseen_pids() -> None:
    """The kernel's own threads belong to no pod: the leaking pod is evicted, not the pod that runs scripts."""
    leak = {"process_count": 900, "thread_count": 31_000}
    scripts = {"process_count": 9, "thread_count": 10, "forks_per_s": 200.0}
    node = snapshot(
        view("leak", MI, usage_more=leak), view("scripts", MI, usage_more=scripts), available={Signal.PID: 1500}
    )
    plan, _ = decide(node, config(hard(Signal.PID, 2000)))
    assert {each.view.pod.name: each.relief for each in plan.ranking} == {"leak": 31_000, "scripts": 10 + 258}
    assert victims(plan) == ["leak"]


def test_a_fork_bomb_is_evicted_and_fifty_other_pods_are_not() -> None:
    innocents = [
        view(f"i{number:02}", MI, qos=BE, usage_more={"process_count": 12, "thread_count": 20}) for number in range(50)
    ]
    bomb = view("bomb", MI, usage_more={"process_count": 20_000, "thread_count": 20_000})
    plan, _ = decide(snapshot(*innocents, bomb, available={Signal.PID: 100}), config(hard(Signal.PID, 3000)))
    assert victims(plan) == ["bomb"]


def test_a_starting_pod_without_stats_is_never_a_victim() -> None:
    starting = PodView(not_started(view("starting", qos=BE).pod), None)
    plan, _ = decide(pressed(starting, view("hog", 2 * GI)))
    assert victims(plan) == ["hog"]
    assert refused(plan, "starting") == ["not-running"]


def test_disk_pressure_evicts_the_pod_with_the_largest_disk_usage() -> None:
    filler = view("filler", MI, usage_more={"disk": DiskUsage(rootfs_bytes=60 * GI, logs_bytes=0, volumes_bytes=0)})
    idle = view("idle", MI, qos=BE, usage_more={"disk": DiskUsage(rootfs_bytes=0, logs_bytes=0, volumes_bytes=0)})
    unread = view("unread", MI, qos=BE)
    node = snapshot(filler, idle, unread, available={Signal.NODEFS: GI})
    plan, _ = decide(node, config(hard(Signal.NODEFS, 5 * GI)))
    assert victims(plan) == ["filler"]
    assert refused(plan, "unread") == ["usage-unknown"]


# --- what a victim carries --------------------------------------------------------------------------------------------


def test_a_hard_victim_gets_the_short_grace_and_the_kubelets_words() -> None:
    plan, _ = decide(pressed(view("hog", 2 * GI, request=GI, termination_grace_s=120.0)))
    (victim,) = plan.victims
    assert (victim.tier, victim.method, victim.grace_period_s) == (Tier.HARD, Method.EVICT, 1.0)
    assert victim.message.startswith("The node was low on resource: memory. Threshold quantity: ")
    assert victim.annotations["starved_resource"] == "memory"
    assert victim.predicted_relief == 2 * GI
    assert victim.cgroup == "/kubepods/poduid-shop-hog"


@pytest.mark.parametrize(
    ("own_s", "most_s", "expected"),
    [(120.0, 30.0, 30.0), (5.0, 30.0, 5.0), (0.0, 30.0, 1.0), (5.0, 0.0, 1.0), (2.5, 30.0, 3.0), (math.nan, 30.0, 1.0)],
)
def test_a_soft_victim_gets_its_own_grace_up_to_the_maximum(own_s: float, most_s: float, expected: float) -> None:
    of = view("a", termination_grace_s=own_s).pod
    assert chosen_victims.grace_s(of, Tier.SOFT, config=config(eviction_max_pod_grace_period_s=most_s)) == expected


def test_the_record_is_complete() -> None:
    plan, _ = decide(pressed(view("hog", 2 * GI), view("sys", GI, namespace="kube-system")))
    assert plan.id == "test-1"
    assert plan.rank_order == ("qos", "exceedsRequest", "priority", "usageOverRequest")
    assert plan.acting_on is not None
    assert plan.acting_on.threshold.signal is Signal.MEMORY
    assert plan.deficit is not None
    assert {verdict.signal for verdict in plan.signals} == set(Signal)
    assert all(verdict.observation.read_at == NOW for verdict in plan.signals)
    assert all(len(each.values) == 4 for each in plan.ranking)
    assert refused(plan, "sys") == ["namespace"]
    assert len(plan.conditions) == 3


def test_every_decision_has_an_id_of_its_own() -> None:
    first, after = decide(snapshot())
    second, _ = decide(snapshot(at=NOW + 1), before=after)
    assert (first.id, second.id) == ("test-1", "test-2")


# --- futility ---------------------------------------------------------------------------------------------------------


def futile(settings: Config, *, before: PolicyState | None = None) -> Plan:
    pods = [view("a", 100 * MI), view("b", 200 * MI)]
    held = (CgroupUsage("/system.slice/leak.service", 14 * GI, 3),)
    _, after = decide(pressed(*pods, at=NOW - 1, cgroups=held), settings, before)
    return decide(pressed(*pods, cgroups=held), settings, after)[0]


def test_the_soft_tier_evicts_no_pod_if_all_together_cannot_help_and_lists_the_largest_holders() -> None:
    plan = futile(config(soft(), relief=ReliefConfig(on_futile=OnFutile.EVICT)))
    assert victims(plan) == []
    assert codes(plan) == ["futile"]
    assert "all 2 candidates would free 300Mi" in plan.refusals[0].message
    assert "/system.slice/leak.service 14Gi" in plan.refusals[0].message
    assert any(condition.status == "True" for condition in plan.conditions)


def test_the_hard_tier_follows_on_futile() -> None:
    pods = [view("a", 100 * MI), view("b", 200 * MI)]
    assert victims(decide(pressed(*pods), config(hard(), relief=ReliefConfig(on_futile=OnFutile.STOP)))[0]) == []
    plan, _ = decide(pressed(*pods), config(hard(), relief=ReliefConfig(on_futile=OnFutile.EVICT)))
    assert sorted(str(name) for name in victims(plan)) == ["a", "b"]
    assert codes(plan) == ["futile"]


@pytest.mark.parametrize("kubelet", [False, True])
def test_evictions_that_do_not_help_stop_with_an_alarm(kubelet: bool) -> None:
    settings = config(hard(), relief=ReliefConfig(failures_before_stop=2), ranking=RankingConfig(kubelet=kubelet))
    pods = [view(f"p{number}", 2 * GI) for number in range(6)]
    after, at, plan = fresh(), NOW, None
    for _ in range(8):
        plan, after = decide(pressed(*pods, at=at), settings, after)
        if plan.victims:
            gone = {victim.pod.uid for victim in plan.victims}
            after = outcomes.apply_outcome(after, outcome(plan, OutcomeKind.ACCEPTED, at=at), now=at, config=settings)
            pods = [each for each in pods if each.pod.uid not in gone]
        at += 1.0
    assert plan is not None
    assert len(pods) == 4
    assert codes(plan) == ["circuit-breaker"]


def test_predicted_and_measured_relief_stand_side_by_side_in_a_later_plan() -> None:
    plan, after = decide(pressed(view("hog", 2 * GI)))
    after = settled(plan, after, OutcomeKind.ACCEPTED)
    _, after = decide(pressed(at=NOW + 1), before=after)
    later, _ = decide(pressed(at=NOW + 2, available=2 * GI), before=after)
    (report,) = later.relief_reports
    assert (report.plan_id, report.predicted, report.measured) == ("test-1", 2 * GI, 2 * GI - 100 * MI)
    assert later.notes[0].message == (
        "test-1: 1 evicted for memory.available, predicted relief 2Gi, measured 1.9Gi after 2.0s"
    )


# --- pending release --------------------------------------------------------------------------------------------------


def test_what_terminating_pods_release_stops_a_second_eviction() -> None:
    leaving = view("leaving", 2 * GI, deletion_wall=WALL + 3, deletion_grace_s=3.0)
    plan, _ = decide(pressed(leaving, view("hog", 4 * GI)))
    assert victims(plan) == []
    assert codes(plan) == ["pending-release"]
    assert plan.deficit == (Signal.MEMORY, 0, 2 * GI)
    assert "deficit of 924Mi is covered by the pending release of 2Gi by shop/leaving" in plan.refusals[0].message


def test_what_they_do_not_release_is_still_evicted_for() -> None:
    leaving = view("leaving", 300 * MI, deletion_wall=WALL + 3, deletion_grace_s=3.0)
    plan, _ = decide(pressed(leaving, view("hog", 4 * GI)))
    assert victims(plan) == ["hog"]
    assert plan.deficit == (Signal.MEMORY, 624 * MI, 300 * MI)


@pytest.mark.parametrize("kind", [None, OutcomeKind.ACCEPTED, OutcomeKind.TIMED_OUT])
def test_an_eviction_in_flight_stops_the_next_one(kind: OutcomeKind | None) -> None:
    pods = [view("hog", 2 * GI), view("other", 4 * GI, qos=GUARANTEED)]
    plan, after = decide(pressed(*pods))
    assert victims(plan) == ["hog"]
    if kind is not None:
        after = settled(plan, after, kind)
    again, _ = decide(pressed(*pods, at=NOW + 5), before=after)
    assert victims(again) == []


def test_a_victim_whose_memory_is_unmapped_and_not_yet_free_costs_no_second_pod() -> None:
    other = view("other", 2 * GI, qos=GUARANTEED)
    plan, after = decide(pressed(view("hog", 2 * GI), other))
    after = settled(plan, after, OutcomeKind.ACCEPTED)
    dying = view("hog", 2 * GI, usage_more={"memory_unreclaimable": 0}, deletion_wall=WALL + 1, deletion_grace_s=1.0)
    again, _ = decide(pressed(dying, other, at=NOW + 2), before=after)
    assert victims(again) == []
    assert codes(again) == ["pending-release"]


@pytest.mark.parametrize("tier", list(Tier))
def test_the_soft_tier_waits_for_the_release_and_the_hard_tier_does_not(tier: Tier) -> None:
    reclaim = Amount(3 * GI, None, "3Gi")
    threshold = soft(min_reclaim=reclaim) if tier is Tier.SOFT else hard(min_reclaim=reclaim)
    settings = config(threshold, relief=ReliefConfig(max_victims=1))
    pods = [view("hog", 2 * GI), view("other", 3 * GI, qos=GUARANTEED)]
    _, after = decide(snapshot(*pods, at=NOW - 2), settings)
    if tier is Tier.SOFT:
        _, after = decide(pressed(*pods, at=NOW - 1), settings, after)
    plan, after = decide(pressed(*pods), settings, after)
    (first,) = victims(plan)
    again, after = decide(pressed(*pods, at=NOW + 1), settings, after)
    if tier is Tier.SOFT:
        assert victims(again) == []
        assert codes(again) == ["waits-for-release"]
        assert f"shop/{first}" in again.refusals[0].message
    else:
        (second,) = victims(again)
        assert second != first
        assert refused(again, str(first)) == ["eviction-in-flight"]


def test_the_soft_tier_waits_for_what_is_evicted_for_the_other_signal_of_memory() -> None:
    reclaim = Amount(3 * GI, None, "3Gi")
    settings = config(soft(min_reclaim=reclaim), soft(Signal.ALLOCATABLE_MEMORY, min_reclaim=reclaim))
    pods = [view("hog", 2 * GI), view("other", 3 * GI, qos=GUARANTEED)]
    short: dict[Signal, int | None] = {Signal.MEMORY: 100 * MI, Signal.ALLOCATABLE_MEMORY: 100 * MI}
    after, named = fresh(), []
    for seconds in range(8):
        plan, after = decide(snapshot(*pods, at=NOW + seconds, available=short), settings, after)
        named += victims(plan)
    assert len(named) == 1
    assert set(codes(plan)) == {"waits-for-release"}


def test_an_eviction_for_another_resource_is_not_waited_for() -> None:
    bomb = view("bomb", MI, usage_more={"process_count": 9000, "thread_count": 9000})
    settings = config(soft(), soft(Signal.PID, 1000))
    pids: dict[Signal, int | None] = {Signal.PID: 50}
    _, after = decide(snapshot(bomb, view("hog", 2 * GI), at=NOW - 1, available=pids), settings)
    plan, after = decide(snapshot(bomb, view("hog", 2 * GI), available=pids), settings, after)
    assert victims(plan) == ["bomb"]
    _, after = decide(pressed(view("hog", 2 * GI), bomb, at=NOW + 1), settings, after)
    assert victims(decide(pressed(view("hog", 2 * GI), bomb, at=NOW + 2), settings, after)[0]) == ["hog"]


def test_a_pod_with_a_huge_grace_that_holds_what_is_missing_is_shortened_in_the_hard_tier() -> None:
    leaving = view("leaving", 2 * GI, deletion_wall=WALL + 3000, deletion_grace_s=3600.0)
    settings = config(hard(), rate_limits=PLENTY._replace(node=TokenBucket(1, 0.0)))
    plan, after = decide(pressed(leaving, view("hog", 4 * GI)), settings)
    assert victims(plan) == ["leaving"]
    assert plan.victims[0].grace_period_s == 1.0
    assert rate_limits.level(after.rate_limits, "node", now=NOW, limits=settings.rate_limits).tokens == 1
    again, _ = decide(pressed(leaving, view("hog", 4 * GI), at=NOW + 1), settings, after)
    assert victims(again) == [], "it is not shortened twice, and its release is waited for"


@pytest.mark.parametrize(
    ("kind", "waits_s"),
    [
        (kind, 40 if rule.event is EvictionEvent.NO_ANSWER or rule.api is outcomes.ApiEffect.BACK_OFF else 3)
        for kind, rule in outcomes.OUTCOME_RULES.items()
        if (rule.returns_tokens or rule.event is EvictionEvent.NO_ANSWER) and not kind.of_request
        # A terminating pod has no budget to respect, and is not killed. Who denies one by admission means it.
        if kind not in (OutcomeKind.BLOCKED_BY_PDB, OutcomeKind.PDB_CONFLICT, OutcomeKind.NOT_KILLED)
        if kind is not OutcomeKind.DENIED
    ]
    + [pytest.param(None, 40, id="the agent ended before the request")],
)
def test_a_shortening_that_failed_is_repeated_and_no_other_pod_is_evicted(
    kind: OutcomeKind | None, waits_s: int
) -> None:
    leaving = view("leaving", 2 * GI, deletion_wall=WALL + 3000, deletion_grace_s=3600.0)
    plan, after = decide(pressed(leaving, view("hog", 4 * GI)))
    assert victims(plan) == ["leaving"]
    after = state.restored(after, instance="again") if kind is None else settled(plan, after, kind)
    named: list[str | None] = []
    for seconds in range(1, waits_s):
        again, after = decide(pressed(leaving, view("hog", 4 * GI), at=NOW + seconds), before=after)
        named += victims(again)
    assert set(named) == {"leaving"}


def test_a_shortening_that_is_always_refused_ends_in_evictions_of_others() -> None:
    leaving, hog = view("leaving", 2 * GI, deletion_wall=WALL + 3000, deletion_grace_s=3600.0), view("hog", 4 * GI)
    after, named = fresh(), []
    for seconds in range(200):
        plan, after = decide(pressed(leaving, hog, at=NOW + seconds), before=after)
        named.append(victims(plan))
        if plan.victims and plan.victims[0].pod.name == "leaving":
            refusal = outcome(plan, OutcomeKind.INVALID, at=NOW + seconds)
            after = outcomes.apply_outcome(after, refusal, now=NOW + seconds, config=config(hard()))
    first = named.index(["hog"])
    assert 31 <= first <= 90
    assert named[:first].count(["leaving"]) == 6


def test_a_dry_run_of_a_shortening_is_no_shortening() -> None:
    leaving = view("leaving", 2 * GI, deletion_wall=WALL + 3000, deletion_grace_s=3600.0)
    dry = config(hard(), mode=Mode.DRY_RUN)
    plan, after = decide(pressed(leaving, view("hog", 4 * GI)), dry)
    after = settled(plan, after, OutcomeKind.DRY_RUN, dry)
    for seconds in range(1, 20):
        plan, after = decide(pressed(leaving, view("hog", 4 * GI), at=NOW + seconds), dry, after)
        assert victims(plan) == []
    enforced = config(hard(), mode=Mode.ENFORCE)
    plan, _ = decide(pressed(leaving, view("hog", 4 * GI), at=NOW + 20), enforced, after)
    assert victims(plan) == ["leaving"]


def test_a_pod_that_is_shortened_is_not_a_victim_beside_that() -> None:
    leaving = view("leaving", 500 * MI, deletion_wall=WALL + 3000, deletion_grace_s=3600.0)
    plan, _ = decide(pressed(leaving, view("hog", 4 * GI)))
    assert victims(plan) == ["leaving", "hog"]


def test_a_shortened_pod_that_still_hangs_is_not_waited_for_any_longer() -> None:
    leaving = view("leaving", 2 * GI, deletion_wall=WALL + 3000, deletion_grace_s=3600.0)
    plan, after = decide(pressed(leaving, view("hog", 4 * GI)))
    after = settled(plan, after, OutcomeKind.ACCEPTED)
    later, _ = decide(pressed(leaving, view("hog", 4 * GI), at=NOW + 30), before=after)
    assert victims(later) == ["hog"]


def test_a_pod_that_hangs_in_the_kernel_is_one_failure_although_its_eviction_was_shortened() -> None:
    settings = config(soft(value=2 * GI), hard(value=GI), eviction_max_pod_grace_period_s=60.0)
    hog = view("hog", 4 * GI, termination_grace_s=60.0)
    _, after = decide(snapshot(hog, at=NOW - 1, available={Signal.MEMORY: GI + MI}), settings)
    plan, after = decide(snapshot(hog, available={Signal.MEMORY: GI + MI}), settings, after)
    assert [(victim.tier, victim.grace_period_s) for victim in plan.victims] == [(Tier.SOFT, 60.0)]
    after = settled(plan, after, OutcomeKind.ACCEPTED, settings)
    leaving = view("hog", 4 * GI, deletion_wall=WALL + 60, deletion_grace_s=60.0)
    plan, after = decide(pressed(leaving, at=NOW + 1), settings, after)
    assert [(victim.tier, victim.grace_period_s) for victim in plan.victims] == [(Tier.HARD, 1.0)]
    after = settled(plan, after, OutcomeKind.ACCEPTED, settings, at=NOW + 1)
    hanging = view("hog", 4 * GI, deletion_wall=WALL + 2, deletion_grace_s=1.0)
    for seconds in range(2, 120):
        _, after = decide(pressed(hanging, at=NOW + seconds), settings, after)
    assert after.in_flight.entries == ()
    assert after.in_flight.failures["memory.available"].times == 1


@pytest.mark.parametrize("tier", list(Tier))
def test_no_pod_is_shortened_if_that_is_off_or_the_tier_is_soft(tier: Tier) -> None:
    leaving = view("leaving", 2 * GI, deletion_wall=WALL + 3000, deletion_grace_s=3600.0)
    settings = config(
        hard() if tier is Tier.HARD else soft(),
        escalation=EscalationConfig(shorten_terminating=tier is Tier.SOFT),
    )
    _, after = decide(snapshot(leaving, view("hog", 4 * GI), at=NOW - 1), settings)
    _, after = decide(pressed(leaving, view("hog", 4 * GI), at=NOW - 0.5), settings, after)
    plan, _ = decide(pressed(leaving, view("hog", 4 * GI)), settings, after)
    assert "leaving" not in victims(plan)


def test_a_protected_pod_is_not_shortened_either() -> None:
    leaving = view("leaving", 2 * GI, deletion_wall=WALL + 3000, deletion_grace_s=3600.0, namespace="kube-system")
    assert victims(decide(pressed(leaving, view("hog", 4 * GI)))[0]) == ["hog"]


# --- limits, back-off, escalation- ------------------------------------------------------------------------------------


def test_an_empty_bucket_is_refused_with_numbers_and_its_pods_are_not_replaced() -> None:
    settings = config(hard(), rate_limits=PLENTY._replace(namespace=TokenBucket(1, 12.0)))
    pods = [
        view("a1", 500 * MI, namespace="a"),
        view("a2", 490 * MI, namespace="a"),
        view("b1", 480 * MI, namespace="b", priority=9),
    ]
    plan, _ = decide(pressed(*pods), settings)
    assert victims(plan) == ["a1"]
    assert codes(plan) == ["rate-limit-namespace"]
    assert refused(plan, "a2") == ["rate-limit-namespace"]
    assert refused(plan, "b1") == []
    assert "12 per hour" in plan.refusals[0].message
    assert "a/a2" in plan.refusals[0].message
    assert plan.refusals[0].message.endswith("no other pod is evicted in its place")


def test_the_rest_of_a_set_is_evicted_and_its_rate_limited_pod_is_not_replaced() -> None:
    settings = config(hard(), rate_limits=PLENTY._replace(owner=TokenBucket(1, 12.0)))
    twin = Owner("ReplicaSet", "twin", "rs-twin")
    pods = [
        view("a", 600 * MI, owner=twin),
        view("b", 590 * MI, owner=twin),
        view("c", 3 * GI, priority=9),
    ]
    plan, after = decide(pressed(*pods), settings)
    assert victims(plan) == ["a"], "not c, the third, for b"
    assert rate_limits.level(after.rate_limits, "owner/rs-twin", now=NOW, limits=settings.rate_limits).tokens == 0


def test_the_rate_limit_of_the_node_stops_every_eviction() -> None:
    settings = config(hard(), rate_limits=PLENTY._replace(node=TokenBucket(1, 0.0)))
    pods = [view("a", 500 * MI), view("b", 500 * MI)]
    plan, _ = decide(pressed(*pods), settings)
    assert len(plan.victims) == 1
    assert codes(plan) == ["rate-limit-node"]


def test_after_an_eviction_the_other_pods_of_its_owner_back_off() -> None:
    owner = Owner("ReplicaSet", "web", "rs-web")
    pods = [view("web-1", 2 * GI, owner=owner), view("web-2", 2 * GI, owner=owner)]
    plan, after = decide(pressed(*pods))
    after = settled(plan, after, OutcomeKind.ACCEPTED)
    left = [each for each in pods if each.pod.uid != plan.victims[0].pod.uid]
    _, after = decide(pressed(*left, at=NOW + 1), before=after)
    again, after = decide(pressed(*left, at=NOW + 2), before=after)
    assert victims(again) == []
    assert codes(again) == ["owner-backoff"]
    wait_s = 60.0 * (1 + backoffs.JITTER)
    assert victims(decide(pressed(*left, at=NOW + 1 + wait_s), before=after)[0]) != []


def test_a_soft_victim_that_its_pdb_protects_is_followed_by_the_next_candidate() -> None:
    settings = config(soft())
    pods = [view("a", 2 * GI, qos=BE), view("b", 2 * GI)]
    _, after = decide(pressed(*pods, at=NOW - 1), settings)
    plan, after = decide(pressed(*pods), settings, after)
    assert victims(plan) == ["a"]
    after = settled(plan, after, OutcomeKind.BLOCKED_BY_PDB, settings)
    assert rate_limits.level(after.rate_limits, "node", now=NOW, limits=PLENTY).tokens == 1000
    again, _ = decide(pressed(*pods, at=NOW + 1), settings, after)
    assert victims(again) == ["b"]
    assert refused(again, "a") == ["blocked-by-pdb"]


@pytest.mark.parametrize(
    ("on_blocked", "expected", "method"),
    [(OnBlocked.WAIT, "b", Method.EVICT), (OnBlocked.DELETE, "a", Method.DELETE)],
)
def test_a_hard_victim_that_its_pdb_protects_backs_off_or_is_deleted_as_configured(
    on_blocked: OnBlocked, expected: str, method: Method
) -> None:
    settings = config(hard(), escalation=EscalationConfig(on_blocked=on_blocked))
    pods = [view("a", 2 * GI, qos=BE), view("b", 2 * GI)]
    plan, after = decide(pressed(*pods), settings)
    assert plan.victims[0].method is Method.EVICT
    after = settled(plan, after, OutcomeKind.BLOCKED_BY_PDB, settings)
    again, _ = decide(pressed(*pods, at=NOW + 1), settings, after)
    assert victims(again) == [expected]
    assert again.victims[0].method is method


def test_a_pod_that_admission_keeps_is_asked_for_again_and_the_next_one_is_evicted_meanwhile() -> None:
    kept, other = view("kept", 2 * GI, qos=BE), view("other", 2 * GI, namespace="elsewhere")
    plan, after = decide(pressed(kept, other))
    assert victims(plan) == ["kept"]
    after = settled(plan, after, OutcomeKind.DENIED, http_status=429)
    assert backoffs.remaining(after.rate_limits.api, now=NOW + 0.1) is None
    plan, after = decide(pressed(kept, other, at=NOW + 0.5), before=after)
    assert victims(plan) == ["other"]
    alone, after_alone = decide(pressed(kept))
    after_alone = settled(alone, after_alone, OutcomeKind.DENIED, http_status=429)
    asked = []
    for tenths in range(1, 100):
        again, after_alone = decide(pressed(kept, at=NOW + tenths / 10), before=after_alone)
        if victims(again):
            asked.append(tenths / 10)
            answer = outcome(again, OutcomeKind.DENIED, at=NOW + tenths / 10)
            after_alone = outcomes.apply_outcome(after_alone, answer, now=NOW + tenths / 10, config=config(hard()))
    assert len(asked) == 3
    assert asked[0] <= 1.3


def test_retry_after_of_a_pdb_refusal_is_obeyed() -> None:
    pods = [view("a", 2 * GI)]
    plan, after = decide(pressed(*pods))
    after = settled(plan, after, OutcomeKind.BLOCKED_BY_PDB, retry_after_s=10.0)
    assert victims(decide(pressed(*pods, at=NOW + 9), before=after)[0]) == []
    assert victims(decide(pressed(*pods, at=NOW + 10), before=after)[0]) == ["a"]


@pytest.mark.parametrize(
    ("kind", "back"),
    [
        (OutcomeKind.BLOCKED_BY_PDB, True),
        (OutcomeKind.TOO_MANY_REQUESTS, True),
        (OutcomeKind.PDB_CONFLICT, True),
        (OutcomeKind.NOT_FOUND, True),
        (OutcomeKind.CONFLICT, True),
        (OutcomeKind.INVALID, True),
        (OutcomeKind.DENIED, True),
        (OutcomeKind.FORBIDDEN, True),
        (OutcomeKind.UNAUTHORIZED, True),
        (OutcomeKind.UNREACHABLE, True),
        (OutcomeKind.RECHECK_REFUSED, True),
        (OutcomeKind.ACCEPTED, False),
        (OutcomeKind.DRY_RUN, False),
        (OutcomeKind.TIMED_OUT, False),
        (OutcomeKind.SERVER_ERROR, False),
    ],
)
def test_tokens_come_back_only_when_it_is_proven_that_nothing_was_evicted(kind: OutcomeKind, back: bool) -> None:
    plan, after = decide(pressed(view("a", 2 * GI)))
    after = settled(plan, after, kind)
    for key in rate_limits.bucket_keys(plan.victims[0].pod, Signal.MEMORY):
        assert rate_limits.level(after.rate_limits, key, now=NOW, limits=PLENTY).tokens == (1000 if back else 999)
    assert settled(plan, after, kind) == after, "an outcome counts once"


def test_every_kind_of_outcome_is_settled() -> None:
    for kind in OutcomeKind:
        plan, after = decide(pressed(view("a", 2 * GI)))
        left = settled(plan, after, kind).in_flight.entries
        stages = [entry.stage for entry in left]
        assert stages in (
            [],
            [EvictionStage.ACCEPTED],
            [EvictionStage.REQUESTED],
            [EvictionStage.UNCERTAIN],
            [EvictionStage.KILLED],
            [EvictionStage.UNLISTED],
            [EvictionStage.DRY_RUN],
        )


# --- dry run ----------------------------------------------------------------------------------------------------------


DRY_RUN = config(hard(), mode=Mode.DRY_RUN)


def after_dry_run(*pods: PodView, settings: Config = DRY_RUN) -> PolicyState:
    """The state after a dry run that named the first of these pods."""
    plan, after = decide(pressed(*pods), settings)
    assert victims(plan) == ["hog"]
    return settled(plan, after, OutcomeKind.DRY_RUN, settings)


@pytest.mark.parametrize("order", [RankingConfig(), RankingConfig(kubelet=True)])
@pytest.mark.parametrize("threshold", [hard(), soft()])
def test_a_dry_run_names_no_other_pod_while_its_victims_would_suffice(
    order: RankingConfig, threshold: Threshold
) -> None:
    settings = config(threshold, mode=Mode.DRY_RUN, ranking=order)
    pods = [view("hog", 2 * GI, qos=BE), view("next", 3 * GI, qos=GUARANTEED)]
    named: list[str | None] = []
    after = fresh()
    for at in [NOW + second for second in range(120)]:
        plan, after = decide(pressed(*pods, at=at), settings, after)
        named += victims(plan)
        results = [outcome(plan, OutcomeKind.DRY_RUN, index=index, at=at) for index in range(len(plan.victims))]
        after = outcomes.apply_outcome(after, results, now=at, config=settings)
    assert len(named) == 1
    assert codes(plan) == ["pending-release"]
    assert f"by shop/{named[0]} (dry run)" in plan.refusals[0].message


def test_a_dry_run_names_the_next_pod_if_the_deficit_exceeds_the_relief_of_the_first() -> None:
    before = after_dry_run(view("hog", GI, qos=BE), view("next", 3 * GI, qos=GUARANTEED))
    grown = [view("hog", GI, qos=BE), view("next", 4 * GI, qos=GUARANTEED)]
    settings = config(hard(value=2 * GI), mode=Mode.DRY_RUN)
    assert victims(decide(pressed(*grown, at=NOW + 1), settings, before)[0]) == ["next"]


def test_a_dry_run_victim_no_longer_counts_once_it_is_really_gone() -> None:
    before = after_dry_run(view("hog", 2 * GI, qos=BE), view("next", 3 * GI, qos=GUARANTEED))
    plan, after = decide(pressed(view("next", 3 * GI, qos=GUARANTEED), at=NOW + 1), DRY_RUN, before)
    assert victims(plan) == ["next"]
    assert plan.relief_reports == (), "it was not its doing"
    assert [entry.pod for entry in after.in_flight.entries] == ["shop/next"]


def test_a_dry_run_eviction_ends_with_the_pressure() -> None:
    hog = view("hog", 2 * GI, qos=BE)
    before = after_dry_run(hog)
    _, soon = decide(snapshot(hog, at=NOW + 5), DRY_RUN, before)
    assert soon.in_flight.entries, "an eviction would still be on its way"
    plan, after = decide(snapshot(hog, at=NOW + 600), DRY_RUN, soon)
    assert after.in_flight.entries == ()
    assert plan.relief_reports == ()
    assert after.in_flight.failures == {}
    assert victims(decide(pressed(hog, at=NOW + 1200), DRY_RUN, after)[0]) == ["hog"]


def test_in_enforce_mode_a_dry_run_eviction_does_not_count() -> None:
    hog = view("hog", 2 * GI, qos=BE)
    enforce = config(hard(), mode=Mode.ENFORCE)
    plan, after = decide(pressed(hog, at=NOW + 1), enforce, after_dry_run(hog))
    assert victims(plan) == ["hog"], "nor do its tokens, nor the back-off of its owner"
    assert [entry.plan_id for entry in after.in_flight.entries] == [plan.id]


def test_a_dry_run_begins_and_ends_with_the_tokens_that_real_evictions_have_left() -> None:
    limits = PLENTY._replace(node=TokenBucket(3, 0.0), owner_backoff_s=3600.0, owner_backoff_max_s=3600.0)
    enforce = config(hard(), mode=Mode.ENFORCE, rate_limits=limits)
    dry = enforce._replace(mode=Mode.DRY_RUN, thresholds=(hard(value=3 * GI),))

    def left(of: PolicyState) -> int:
        return rate_limits.level(of.rate_limits, "node", now=NOW, limits=limits).tokens

    plan, after = decide(pressed(view("first", 2 * GI)), enforce)
    assert (victims(plan), left(after)) == (["first"], 2)
    plan, after = decide(pressed(view("second", 2 * GI), at=NOW + 1), dry, after)
    assert (victims(plan), left(after)) == (["second"], 1)
    # The answer to the request that was sent before the dry run, and a dry run that a recheck refused.
    real = Outcome(f"{fresh().instance}-1", "uid-shop-first", OutcomeKind.ACCEPTED, "", NOW + 2)
    after = outcomes.apply_outcome(after, [real, outcome(plan, OutcomeKind.RECHECK_REFUSED)], now=NOW + 2, config=dry)
    assert left(after) == 2
    for round_trip in range(3):
        restarted = state.restored(after, instance=f"again-{round_trip}")
        _, after = decide(snapshot(view("second", GI), at=NOW + 3 + round_trip), dry, restarted)
    _, after = decide(snapshot(view("second", GI), at=NOW + 10), enforce, after)
    assert (left(after), after.enforced_limits) == (2, None)
    assert set(after.rate_limits.owners) == {"rs-shop-first"}
    assert state.spent(state.in_mode(after, dry_run=True), now=NOW).enforced_limits == rate_limits.spent(
        after.rate_limits, now=NOW
    )


@pytest.mark.parametrize(
    "kind",
    [
        OutcomeKind.UNREACHABLE,
        OutcomeKind.TOO_MANY_REQUESTS,
        OutcomeKind.FORBIDDEN,
        OutcomeKind.UNAUTHORIZED,
        OutcomeKind.SERVER_ERROR,
        OutcomeKind.TIMED_OUT,
    ],
)
def test_without_an_api_nothing_is_sent_for_a_while(kind: OutcomeKind) -> None:
    pods = [view("a", 2 * GI), view("b", 3 * GI, qos=GUARANTEED)]
    plan, after = decide(pressed(*pods))
    after = settled(plan, after, kind)
    again, _ = decide(pressed(*pods, at=NOW + 0.5), before=after)
    assert victims(again) == []
    assert codes(again) == [kind.value]


@pytest.mark.parametrize("kind", [OutcomeKind.UNAUTHORIZED, OutcomeKind.FORBIDDEN])
def test_a_refused_identity_is_tried_again_within_two_seconds(kind: OutcomeKind) -> None:
    """The token may be rotated by then, and a restarted API server may have read its roles."""
    pods = [view("a", 2 * GI)]
    plan, after = decide(pressed(*pods))
    after = settled(plan, after, kind)
    assert victims(decide(pressed(*pods, at=NOW + 2), before=after)[0]) == ["a"]


def test_outcomes_of_unknown_plans_change_nothing() -> None:
    plan, after = decide(pressed(view("a", 2 * GI)))
    stranger = outcome(plan, OutcomeKind.ACCEPTED)._replace(plan_id="other-7")
    assert outcomes.apply_outcome(after, [stranger], now=NOW, config=config(hard())) == after


# --- the check right before acting ------------------------------------------------------------------------------------


def planned() -> tuple[Victim, PolicyState]:
    plan, after = decide(pressed(view("hog", 2 * GI)))
    return plan.victims[0], after


def rechecked(node: NodeSnapshot, *, victim: Victim | None = None) -> str | None:
    chosen, after = planned()
    refusal = recheck.recheck(victim or chosen, node, after, now=node.taken_at, config=config(hard()))
    return None if refusal is None else refusal.code


def test_a_victim_passes_while_the_pressure_lasts_and_the_pod_runs() -> None:
    assert rechecked(pressed(view("hog", 2 * GI), at=NOW + 0.1)) is None


RECHECKS: list[tuple[str, NodeSnapshot]] = [
    ("recheck-not-newer", pressed(view("hog", 2 * GI))),
    ("recovered", pressed(view("hog", 2 * GI), at=NOW + 1, available=GI)),
    ("pod-gone", pressed(at=NOW + 1)),
    ("not-running", pressed(view("hog")._replace(usage=None), at=NOW + 1)),
    ("terminating", pressed(view("hog", GI, deletion_wall=WALL), at=NOW + 1)),
    ("finished", pressed(view("hog", GI, phase="Failed"), at=NOW + 1)),
    ("pods-stale", pressed(view("hog", GI), at=NOW + 1, pods_synced_at=NOW - 500)),
    ("own-pod", pressed(view("hog", GI), at=NOW + 1, own_pod_uid="uid-shop-hog")),
    ("signal-unknown", snapshot(view("hog", GI), at=NOW + 1, available={Signal.MEMORY: None})),
]


@pytest.mark.parametrize(("code", "node"), RECHECKS)
def test_a_victim_is_let_go_when_anything_has_changed(code: str, node: NodeSnapshot) -> None:
    assert rechecked(node) == code


def test_another_pod_of_the_same_name_is_not_the_victim() -> None:
    same_name = view("hog", 2 * GI)
    other = same_name._replace(pod=same_name.pod._replace(uid="another"))
    assert rechecked(pressed(other, at=NOW + 1)) == "pod-gone"


def test_a_victim_that_was_settled_is_not_evicted_again() -> None:
    plan, after = decide(pressed(view("hog", 2 * GI)))
    after = settled(plan, after, OutcomeKind.ACCEPTED)
    refusal = recheck.recheck(
        plan.victims[0], pressed(view("hog", 2 * GI), at=NOW + 1), after, now=NOW + 1, config=config(hard())
    )
    assert refusal is not None
    assert refusal.code == "not-planned"


# --- kubelet mode -----------------------------------------------------------------------------------------------------

KUBELET = RankingConfig(kubelet=True)


def test_kubelet_mode_takes_the_first_unprotected_pod_whatever_it_would_free_one_at_a_time() -> None:
    pods = [
        view("tiny-over", 2 * MI, request=MI, priority=-1),
        view("huge-over", 9 * GI, request=GI),
        view("sys", 9 * GI, namespace="kube-system", priority=-9),
    ]
    plan, _ = decide(pressed(*pods), config(hard(), ranking=KUBELET))
    assert [each.view.pod.name for each in plan.ranking] == ["sys", "tiny-over", "huge-over"]
    assert victims(plan) == ["tiny-over"]


def test_kubelet_mode_serves_soft_memory_before_hard_disk() -> None:
    held = {"disk": DiskUsage(rootfs_bytes=GI, logs_bytes=0, volumes_bytes=0)}
    pods = [view("a", 2 * GI), view("filler", MI, usage_more=held, priority=-1)]
    settings = config(soft(), hard(Signal.NODEFS, 5 * GI), ranking=KUBELET)
    available: dict[Signal, int | None] = {Signal.MEMORY: 100 * MI, Signal.NODEFS: GI}
    _, after = decide(snapshot(*pods, at=NOW - 1, available={Signal.MEMORY: 100 * MI}), settings)
    plan, _ = decide(snapshot(*pods, available=available), settings, after)
    assert plan.ranked_for is Signal.MEMORY


def test_kubelet_mode_waits_for_an_eviction_in_flight() -> None:
    settings = config(hard(), ranking=KUBELET)
    pods = [view("a", 2 * GI), view("b", 3 * GI, priority=1)]
    plan, after = decide(pressed(*pods), settings)
    after = settled(plan, after, OutcomeKind.ACCEPTED, settings)
    assert victims(decide(pressed(*pods, at=NOW + 5), settings, after)[0]) == []


# --- eviction preferences ---------------------------------------------------------------------------------------------


def test_trusted_preferences_move_pods_in_the_soft_tier_alone() -> None:
    rules = ProtectionConfig(trusted_namespaces=("shop",))
    pods = [
        view("avoids", 2 * GI, qos=BE, annotations={"nodeagent.io/evict": "avoid"}),
        view("prefers", 2 * GI, qos=GUARANTEED, request=4 * GI, annotations={"nodeagent.io/evict": "prefer"}),
    ]
    settings = config(soft(), protection=rules)
    _, after = decide(pressed(*pods, at=NOW - 1), settings)
    assert victims(decide(pressed(*pods), settings, after)[0]) == ["prefers"]
    assert victims(decide(pressed(*pods), config(hard(), protection=rules))[0]) == ["avoids"]


# --- what is not known ------------------------------------------------------------------------------------------------


STALE: list[tuple[str, dict[str, Any]]] = [
    ("pods-never-synced", {"pods_synced_at": None}),
    ("pods-stale", {"pods_synced_at": NOW - 121}),
    ("pods-stale", {"pods_synced_at": math.nan}),
    ("pods-stale", {"pods_synced_at": NOW + 3600}),
]


@pytest.mark.parametrize(("code", "more"), STALE)
def test_without_a_current_list_of_the_pods_no_pod_is_evicted(code: str, more: dict[str, Any]) -> None:
    plan, _ = decide(pressed(view("hog", 2 * GI), **more))
    assert victims(plan) == []
    assert codes(plan) == [code]
    assert plan.ranking[0].view.pod.name == "hog"


def test_the_same_refusal_of_several_signals_is_reported_once() -> None:
    node = snapshot(view("hog", 2 * GI), available={**FULL, Signal.PID: 10}, pods_synced_at=None)
    plan, _ = decide(node, config(hard(), hard(Signal.PID, 1000)))
    due = {each.threshold.signal for verdict in plan.signals for each in verdict.thresholds if each.due}
    assert due == {Signal.MEMORY, Signal.PID}
    assert codes(plan) == ["pods-never-synced"]


def test_stale_usage_of_a_pod_is_no_usage() -> None:
    stale = view("stale", GI)
    assert stale.usage is not None
    node = pressed(view("hog", 2 * GI))
    node = node._replace(pods=(*node.pods, stale._replace(usage=stale.usage._replace(read_at=NOW - 31))))
    plan, _ = decide(attributed(node, unattributed=GI))
    assert victims(plan) == ["hog"]
    assert refused(plan, "stale") == ["usage-unknown"]


def test_the_clock_of_the_caller_must_be_a_number() -> None:
    with pytest.raises(ValueError, match="finite"):
        engine.decide(snapshot(), fresh(), now=math.nan, config=config())


bad_numbers = st.sampled_from([None, -1, -(1 << 70), math.nan, math.inf, -math.inf, 1 << 63, 1 << 80, "9", 2.5])
bad_times = st.sampled_from([math.nan, math.inf, -math.inf, -1.0, NOW - 3600, NOW + 3600])


@settings(deadline=None)
@given(
    field=st.sampled_from(["available", "capacity", "read_at"]),
    number=bad_numbers,
    time=bad_times,
)
def test_a_bad_observation_never_leads_to_an_eviction(field: str, number: Any, time: float) -> None:
    node = pressed(view("hog", 2 * GI))
    change: dict[str, Any] = {field: time if field == "read_at" else number}
    broken = node.observations[Signal.MEMORY]._replace(**change)
    for limits in (config(hard()), config(hard()._replace(value=Amount(None, 10.0, "10%")))):
        if field == "capacity" and number is None and limits.thresholds[0].value.percentage is None:
            continue  # a quantity needs no capacity
        plan, _ = decide(node._replace(observations={**node.observations, Signal.MEMORY: broken}), limits)
        assert victims(plan) == []


@settings(deadline=None)
@given(
    field=st.sampled_from(["memory_working_set", "read_at"]),
    number=bad_numbers,
    time=bad_times,
)
def test_a_pod_with_bad_usage_is_never_a_victim(field: str, number: Any, time: float) -> None:
    bad = view("bad", 4 * GI, qos=BE)
    node = attributed(pressed(bad, view("hog", 5 * GI)))
    broken = node.pods[0].usage
    assert broken is not None
    change: dict[str, Any] = {field: time if field == "read_at" else number}
    broken = broken._replace(**change)
    plan, after = decide(node._replace(pods=(PodView(bad.pod, broken), node.pods[1])))
    assert victims(plan) == ["hog"]
    assert msgspec.json.decode(msgspec.json.encode(after), type=PolicyState) == after


@settings(deadline=None)
@given(number=bad_numbers)
def test_a_pod_that_bad_numbers_of_its_containers_stand_for_is_never_a_victim(number: Any) -> None:
    each = (ContainerUsage("1", "a", 4 * GI, 1), ContainerUsage("2", "b", number, 1))
    bad = view("bad", None, qos=BE, usage_more={"containers": each, "memory_unreclaimable": 4 * GI})
    for made in (config(hard()), config(hard(), ranking=RankingConfig(kubelet=True))):
        plan, _ = decide(attributed(pressed(bad, view("hog", 5 * GI))), made)
        assert victims(plan) == ["hog"]


@settings(deadline=None)
@given(number=bad_numbers)
def test_a_bad_unreclaimable_number_counts_no_more_than_half_of_the_working_set(number: Any) -> None:
    plan, _ = decide(pressed(view("hog", 2 * GI, usage_more={"memory_unreclaimable": number})))
    assert plan.ranking[0].relief == GI


@settings(deadline=None)
@given(number=st.sampled_from([-1, math.nan, math.inf, 1 << 70]))
def test_a_pod_with_an_impossible_request_is_never_a_victim(number: Any) -> None:
    bad = view("bad", 4 * GI, qos=BE)
    container = bad.pod.containers[0]._replace(requests=Resources(memory=number))
    bad = bad._replace(pod=bad.pod._replace(containers=(container,)))
    plan, _ = decide(attributed(pressed(bad, view("hog", 5 * GI))))
    assert victims(plan) == ["hog"]


@settings(deadline=None)
@given(taken_at=bad_times, wall_time=bad_times)
def test_a_snapshot_of_a_broken_clock_never_leads_to_an_eviction(taken_at: float, wall_time: float) -> None:
    node = pressed(view("hog", 2 * GI))._replace(taken_at=taken_at, wall_time=wall_time)
    plan, _ = engine.decide(node, fresh(), now=NOW, config=config(hard()))
    assert victims(plan) == []


@settings(deadline=None)
@given(
    deletion=st.sampled_from([math.nan, math.inf, -math.inf, -1.0, WALL - 1e9, WALL + 1e9]),
    grace=st.sampled_from([None, math.nan, -1.0, math.inf, 0.0]),
)
def test_a_terminating_pod_with_nonsense_for_a_grace_is_no_new_victim(deletion: float, grace: float | None) -> None:
    leaving = view("leaving", 2 * GI, deletion_wall=deletion, deletion_grace_s=grace)
    _, after = decide(pressed(leaving, view("hog", 4 * GI)), config(soft()))
    plan, _ = decide(pressed(leaving, view("hog", 4 * GI), at=NOW + 1), config(soft()), after)
    assert "leaving" not in victims(plan)


# --- state ------------------------------------------------------------------------------------------------------------


def test_the_state_survives_being_written_and_read_back() -> None:
    pods = [view("hog", 2 * GI), view("leaving", MI, deletion_wall=WALL + 9, deletion_grace_s=9.0)]
    plan, after = decide(pressed(*pods))
    for kind in (OutcomeKind.ACCEPTED, OutcomeKind.BLOCKED_BY_PDB, OutcomeKind.UNREACHABLE):
        then = settled(plan, after, kind)
        assert msgspec.json.decode(msgspec.json.encode(then), type=PolicyState) == then


def test_a_crash_between_saving_and_acting_evicts_no_pod_twice() -> None:
    node = pressed(view("hog", 2 * GI), view("other", 4 * GI, qos=GUARANTEED))
    plan, after = decide(node)
    reborn = state.restored(msgspec.json.decode(msgspec.json.encode(after), type=PolicyState), instance="again")
    for second in range(1, 10):
        again, reborn = decide(pressed(*node.pods, at=NOW + second), before=reborn)
        assert victims(again) == [], f"{victims(plan)} may be on its way for {second} s"
    assert again.id == "again-9"


def test_with_a_lost_state_buckets_start_empty() -> None:
    settings = config(hard(), rate_limits=PLENTY._replace(node=TokenBucket(5, 30.0)))
    before = state.initial("new", now=NOW, tokens_spent=True)
    plan, after = decide(pressed(view("hog", 2 * GI)), settings, before)
    assert victims(plan) == []
    assert set(codes(plan)) & {"rate-limit-node", "rate-limit-owner", "rate-limit-namespace"}
    plan, _ = decide(pressed(view("hog", 2 * GI), at=NOW + 120), settings, after)
    assert victims(plan) == ["hog"]


def test_a_cache_changes_the_speed_and_not_the_plan() -> None:
    cache = candidates.RankingCache()
    pods = [view(f"p{number}", number * 100 * MI, request=GI) for number in range(8)]
    changed = [each._replace(pod=each.pod._replace(priority=7, labels={"keep": ""})) for each in pods]
    for views in (pods, changed, pods[:4], changed):
        for rules in (config(hard()), config(hard(), protection=ProtectionConfig(labels=("keep",)))):
            with_cache, _ = decide(pressed(*views), rules, cache=cache)
            assert with_cache == decide(pressed(*views), rules)[0]


def test_a_pdb_protects_its_pods_in_the_soft_tier_by_its_headroom() -> None:
    settings = config(soft())
    pods = [view("a", 2 * GI, qos=BE, disruption_budgets=(DisruptionBudget("b", 0),)), view("b", 2 * GI)]
    _, after = decide(pressed(*pods, at=NOW - 1), settings)
    plan, _ = decide(pressed(*pods), settings, after)
    assert victims(plan) == ["b"]
    assert refused(plan, "a") == ["disruption-budget"]

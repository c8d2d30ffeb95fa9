"""The eviction order: total, stable, monotone, and the kubelet's if configured."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.config.schema import RankingConfig, RankingKey
from nodeagent.model import (
    DiskLayout,
    DiskUsage,
    NodeSnapshot,
    Owner,
    Plan,
    PodSource,
    PodView,
    QOSClass,
    RankedPod,
    Signal,
    Tier,
    Unit,
)
from nodeagent.policy import ranking, usage_growth
from nodeagent.policy.candidates import RankedPods, RankingCache, rank_pods
from tests.support.nodes import GI, MI, NOW, config, snapshot, usage, view

KUBELET = RankingConfig(kubelet=True)
BE, BURSTABLE, GUARANTEED = QOSClass.BEST_EFFORT, QOSClass.BURSTABLE, QOSClass.GUARANTEED


def rank(
    node: NodeSnapshot,
    signal: Signal = Signal.MEMORY,
    rules: RankingConfig = RankingConfig(),  # noqa: B008 - immutable
    growth: usage_growth.GrowthState = usage_growth.GrowthState(),  # noqa: B008 - immutable
) -> RankedPods:
    return rank_pods(node, signal, tier=Tier.SOFT, config=config(ranking=rules), growth=growth, cache=RankingCache())


def names(
    *pods: PodView,
    signal: Signal = Signal.MEMORY,
    rules: RankingConfig = RankingConfig(),  # noqa: B008 - immutable
    layout: DiskLayout = DiskLayout.SINGLE,
) -> list[str | None]:
    return [each.view.pod.name for each in rank(snapshot(*pods, layout=layout), signal, rules).pods]


def by(*keys: RankingKey) -> RankingConfig:
    return RankingConfig(order=keys)


def disk(name: str, **more: Any) -> PodView:
    return view(name, usage_more={"disk": DiskUsage(**more)})


# --- the default order ------------------------------------------------------------------------------------------------


def test_qos_class_comes_before_everything_else_by_default() -> None:
    order = names(
        view("guaranteed", 9 * GI, qos=GUARANTEED, request=GI, priority=-5),
        view("burstable", 5 * GI, request=GI),
        view("best-effort", 10 * MI, qos=BE, priority=1000),
    )
    assert order == ["best-effort", "burstable", "guaranteed"]


def test_within_a_class_pods_over_their_request_come_first_then_low_priority_then_most_over() -> None:
    order = names(
        view("within", 4 * GI, request=5 * GI, priority=-100),
        view("over-high-priority", 4 * GI, request=GI, priority=10),
        view("over-little", 2 * GI, request=GI),
        view("over-much", 3 * GI, request=GI),
    )
    assert order == ["over-much", "over-little", "over-high-priority", "within"]


def test_a_missing_priority_counts_as_zero() -> None:
    pods = [view("none", GI, priority=None), view("low", GI, priority=-1), view("high", GI, priority=1)]
    assert names(*pods) == ["low", "none", "high"]


def test_a_priority_that_only_the_api_knows_is_not_reported_as_zero() -> None:
    host, api = view("host", GI, priority=None, source=PodSource.HOST), view("api", GI, priority=None)
    ranked = rank(snapshot(host, api))
    assert len(ranked.pods) == 2
    for pod in ranked.pods:
        texts = [key.text for key in ranking.rank_keys(pod, ranked.order, unit=Unit.BYTES)]
        assert ("priority unknown" if pod.view.pod.name == "host" else "priority 0") in texts


@pytest.mark.parametrize(
    ("key", "first", "last"),
    [
        (RankingKey.QOS, view("a", qos=BE), view("b", qos=GUARANTEED)),
        (RankingKey.EXCEEDS_REQUEST, view("a", 2, request=1), view("b", 1, request=1)),
        (RankingKey.PRIORITY, view("a", priority=1), view("b", priority=2)),
        (RankingKey.USAGE_OVER_REQUEST, view("a", 5, request=1), view("b", 6, request=3)),
        (RankingKey.USAGE, view("a", 7), view("b", 6)),
        (
            RankingKey.POD_DELETION_COST,
            view("a", annotations={ranking.DELETION_COST: "-7"}),
            view("b", annotations={ranking.DELETION_COST: "3"}),
        ),
        (RankingKey.AGE, view("a", age_s=90.0), view("b", age_s=1000.0)),
    ],
)
def test_each_key_puts_one_pod_before_the_other(key: RankingKey, first: PodView, last: PodView) -> None:
    renamed = first._replace(pod=first.pod._replace(name="z"))  # so that the tie-break gives the opposite order
    assert names(renamed, last, rules=by(key)) == ["z", "b"]


def test_a_pod_with_another_replica_on_the_node_is_evicted_before_an_only_replica() -> None:
    owner = Owner("ReplicaSet", "twin", "rs-twin")
    pods = [view("alone"), view("twin-1", owner=owner), view("twin-2", owner=owner)]
    assert names(*pods, rules=by(RankingKey.DUPLICATE_ON_NODE)) == ["twin-1", "twin-2", "alone"]


def test_a_terminating_replica_does_not_count() -> None:
    owner = Owner("ReplicaSet", "twin", "rs-twin")
    pods = [view("a-alone"), view("twin-1", owner=owner), view("twin-2", owner=owner, deletion_wall=1.0)]
    ranked = rank(snapshot(*pods), rules=by(RankingKey.DUPLICATE_ON_NODE))
    assert [each.values for each in ranked.pods] == [(1.0,), (1.0,), (1.0,)]


def test_an_invalid_deletion_cost_counts_as_zero() -> None:
    odd = view("odd", annotations={ranking.DELETION_COST: "١٢"})
    assert rank(snapshot(odd), rules=by(RankingKey.POD_DELETION_COST)).pods[0].values == (0.0,)


# --- totality, stability, monotony ------------------------------------------------------------------------------------

some_pods = st.lists(
    st.builds(
        lambda number, memory, qos, priority, request: view(
            f"p{number}", memory, qos=qos, priority=priority, request=request
        ),
        st.integers(0, 10_000),
        st.one_of(st.none(), st.integers(0, 4 * GI)),
        st.sampled_from(QOSClass),
        st.one_of(st.none(), st.integers(-10, 10)),
        st.one_of(st.none(), st.integers(0, 2 * GI)),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda each: each.pod.uid,
)
some_rules = st.one_of(
    st.just(KUBELET), st.builds(lambda keys: RankingConfig(order=tuple(keys)), st.permutations(list(RankingKey)))
)


@settings(deadline=None)
@given(some_pods, some_rules, st.sampled_from(Signal), st.randoms(use_true_random=False))
def test_the_order_does_not_depend_on_how_pods_were_listed(
    pods: list[PodView], rules: RankingConfig, signal: Signal, chance: random.Random
) -> None:
    shuffled = list(pods)
    chance.shuffle(shuffled)
    assert names(*pods, signal=signal, rules=rules) == names(*shuffled, signal=signal, rules=rules)


@settings(deadline=None)
@given(some_pods, some_rules, st.integers(0, 11), st.integers(1, 4 * GI))
def test_more_usage_never_moves_a_pod_back(pods: list[PodView], rules: RankingConfig, index: int, more: int) -> None:
    index %= len(pods)
    victim = pods[index]
    before = victim.usage
    assert before is not None
    grown = victim._replace(usage=usage(victim.pod, (before.memory_working_set or 0) + more))
    rank = names(*pods, rules=rules).index(victim.pod.name)
    after = names(*pods[:index], grown, *pods[index + 1 :], rules=rules).index(victim.pod.name)
    assert after <= rank


@settings(deadline=None)
@given(some_pods, some_rules)
def test_a_pod_of_unknown_usage_is_behind_all_that_equal_it_on_the_keys_before_usage(
    pods: list[PodView], rules: RankingConfig
) -> None:
    ranked = rank(snapshot(*pods), rules=rules)
    needs_usage = {RankingKey.EXCEEDS_REQUEST, RankingKey.USAGE_OVER_REQUEST, RankingKey.USAGE, RankingKey.GROWTH}
    until = min(index for index, name in enumerate(ranked.order) if name in needs_usage)
    known: dict[tuple[float, ...], list[int]] = {}
    for each in ranked.pods:
        if each.usage is not None:
            known.setdefault(each.values[:until], []).append(each.rank)
    for each in ranked.pods:
        if each.usage is None:
            assert all(rank < each.rank for rank in known.get(each.values[:until], []))


def test_ranks_count_from_one_without_a_gap_and_protected_pods_keep_theirs() -> None:
    ranked = rank(snapshot(view("b", GI), view("a", 2 * GI, namespace="kube-system"), view("c", MI)))
    assert [(each.rank, each.view.pod.name) for each in ranked.pods] == [(1, "a"), (2, "b"), (3, "c")]
    assert [refusal.code for refusal in ranked.pods[0].refusals] == ["namespace"]


# --- PIDs -------------------------------------------------------------------------------------------------------------


def processes(name: str, count: int, **more: Any) -> PodView:
    return view(name, usage_more={"process_count": count, "thread_count": count}, **more)


def test_a_fork_bomb_is_ranked_before_fifty_other_pods() -> None:
    others = [processes(f"other-{number:02}", 10, qos=BE, priority=-1) for number in range(50)]
    assert names(*others, processes("bomb", 4000, qos=GUARANTEED, priority=100), signal=Signal.PID)[0] == "bomb"


def test_a_young_fork_bomb_is_ranked_first_by_its_growth() -> None:
    steady = processes("steady", 900)
    earlier = usage_growth.record_sample(
        usage_growth.GrowthState(), snapshot(steady, processes("bomb", 10), at=NOW - 6, wall_time=1.8e9)
    )
    ranked = rank(snapshot(steady, processes("bomb", 600)), Signal.PID, growth=earlier)
    assert [each.view.pod.name for each in ranked.pods] == ["bomb", "steady"]


def test_a_pod_that_the_kept_sample_does_not_contain_has_grown_from_zero() -> None:
    earlier = usage_growth.record_sample(usage_growth.GrowthState(), snapshot(processes("steady", 900), at=NOW - 6))
    ranked = rank(snapshot(processes("steady", 900), processes("new", 600)), Signal.PID, growth=earlier)
    assert ranked.pods[0].view.pod.name == "new"


def threads(name: str, count: int | None, processes: int | None = 1) -> PodView:
    return view(name, usage_more={"process_count": processes, "thread_count": count}, qos=GUARANTEED)


def test_a_pod_whose_one_process_leaks_threads_is_ranked_before_pods_with_more_processes() -> None:
    others = [view(f"i{n:02}", qos=BE, usage_more={"process_count": 12, "thread_count": 20}) for n in range(20)]
    assert names(*others, threads("leak", 28_000), signal=Signal.PID)[0] == "leak"


def test_a_young_thread_leak_is_ranked_first_by_its_growth() -> None:
    earlier = usage_growth.record_sample(
        usage_growth.GrowthState(), snapshot(threads("a-steady", 900), threads("leak", 10), at=NOW - 6)
    )
    ranked = rank(snapshot(threads("a-steady", 900), threads("leak", 600)), Signal.PID, growth=earlier)
    assert [each.view.pod.name for each in ranked.pods] == ["leak", "a-steady"]


@pytest.mark.parametrize("unknown", [None, -1])
def test_a_pod_of_unknown_threads_is_ranked_by_its_processes(unknown: int | None) -> None:
    pods = [threads("few", 30), threads("many", unknown, 40), threads("dark", unknown, None)]
    assert names(*pods, signal=Signal.PID) == ["many", "few", "dark"]


def test_an_old_sample_is_no_base_for_growth() -> None:
    earlier = usage_growth.record_sample(usage_growth.GrowthState(), snapshot(at=NOW - 600))
    ranked = rank(snapshot(processes("steady", 900), processes("new", 600)), Signal.PID, growth=earlier)
    assert ranked.pods[0].view.pod.name == "steady"


# --- the kubelet's order ----------------------------------------------------------------------------------------------


def test_the_kubelets_memory_order_ignores_the_qos_class() -> None:
    order = names(
        view("best-effort-within", 0, qos=BE),
        view("guaranteed-over", 3 * GI, qos=GUARANTEED, request=2 * GI),
        view("burstable-over-high", 9 * GI, request=GI, priority=5),
        rules=KUBELET,
    )
    assert order == ["guaranteed-over", "burstable-over-high", "best-effort-within"]


def test_kubelet_pid_order_is_priority_then_processes() -> None:
    pods = [processes("a", 10), processes("b", 20), processes("c", 5000, priority=1)]
    assert names(*pods, signal=Signal.PID, rules=KUBELET) == ["b", "a", "c"]


def test_kubelet_inode_order_is_any_use_then_priority_then_most_inodes() -> None:
    pods = [
        disk("none", rootfs_inodes=0, logs_inodes=0, volumes_inodes=0),
        disk("few", rootfs_inodes=5),
        disk("many", rootfs_inodes=500),
    ]
    pods.append(disk("high", rootfs_inodes=9000)._replace(pod=view("high", priority=7).pod))
    assert names(*pods, signal=Signal.NODEFS_INODES, rules=KUBELET) == ["many", "few", "high", "none"]


def test_imagefs_of_a_split_layout_ranks_by_priority_and_name_not_by_the_smallest_request() -> None:
    pods = [view("b", priority=1), view("a", priority=1), view("c", priority=0)]
    order = names(*pods, signal=Signal.IMAGEFS, rules=KUBELET, layout=DiskLayout.SPLIT)
    assert order == ["c", "a", "b"]


@pytest.mark.parametrize("rules", [RankingConfig(), KUBELET])
@pytest.mark.parametrize("signal", [Signal.MEMORY, Signal.NODEFS, Signal.NODEFS_INODES, Signal.PID])
def test_a_starting_pod_without_stats_is_last_among_its_equals(signal: Signal, rules: RankingConfig) -> None:
    starting = PodView(view("a-starting").pod, None)
    idle = view("idle", 0, usage_more={"disk": DiskUsage(0, 0, 0, 0, 0, 0), "process_count": 0})
    assert names(starting, idle, signal=signal, rules=rules) == ["idle", "a-starting"]


# --- texts ------------------------------------------------------------------------------------------------------------


def explained(*pods: PodView, signal: Signal = Signal.MEMORY, rules: RankingConfig) -> list[tuple[str, ...]]:
    ranked = rank(snapshot(*pods), signal, rules)
    plan = Plan("x-1", NOW, NOW, (), (), ranking=tuple(ranked.pods), ranked_for=signal, rank_order=ranked.order)
    explanation: tuple[RankedPod, ...] = ranking.with_key_texts(plan).ranking
    return [tuple(key.text for key in each.keys) for each in explanation]


def test_every_key_has_a_text_with_its_numbers() -> None:
    pods = view("a", 300 * MI, request=88 * MI, priority=7, annotations={ranking.DELETION_COST: "12"})
    assert explained(pods, rules=by(*RankingKey)) == [
        (
            "Burstable",
            "over its request of 88Mi",
            "priority 7",
            "uses 212Mi over its request",
            "uses 300Mi",
            "grows by 0 a second",
            "deletion cost 12",
            "started 3600s ago",
            "only replica on this node",
            "0 restarts",
        )
    ]


def test_every_key_of_the_configuration_has_a_function_and_a_text() -> None:
    assert set(RankingKey) <= set(ranking.KEYS)
    assert len(explained(view("a"), rules=by(*RankingKey))[0]) == len(RankingKey)


def test_an_unknown_value_has_a_text_of_its_own() -> None:
    unknown = PodView(view("a").pod._replace(started_wall=None, created_wall=None), None)
    texts = explained(unknown, rules=by(RankingKey.EXCEEDS_REQUEST, RankingKey.USAGE, RankingKey.AGE))
    assert texts == [("usage unknown", "usage unknown", "age unknown")]


def test_texts_of_pids_are_counts() -> None:
    texts = explained(processes("a", 4000), signal=Signal.PID, rules=by(RankingKey.USAGE_OVER_REQUEST))
    assert texts == [("4000 in 10s at its growth or fork rate", "uses 4000")]


def test_a_fork_bomb_of_short_lived_children_is_ranked_first_by_its_fork_rate() -> None:
    others = [processes(f"other-{number:02}", 50, qos=BE) for number in range(50)]
    bomb = processes("bomb", 12, qos=GUARANTEED)
    assert bomb.usage is not None
    bomb = bomb._replace(usage=bomb.usage._replace(forks_per_s=2000.0))
    for growth in (
        usage_growth.GrowthState(),
        usage_growth.record_sample(usage_growth.GrowthState(), snapshot(bomb, at=NOW - 6)),
    ):
        ranked = rank(snapshot(*others, bomb), Signal.PID, growth=growth)
        assert ranked.pods[0].view.pod.name == "bomb"


@pytest.mark.parametrize("absurd", [float("nan"), float("inf"), -1.0])
def test_an_implausible_fork_rate_changes_no_order(absurd: float) -> None:
    odd = processes("odd", 12)
    assert odd.usage is not None
    odd = odd._replace(usage=odd.usage._replace(forks_per_s=absurd))
    assert names(processes("many", 50), odd, signal=Signal.PID) == ["many", "odd"]

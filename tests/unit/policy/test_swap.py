"""What a decision makes of swap and zram: usage, order, relief, and a node whose swap is full."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config.schema import Config, RankingConfig
from nodeagent.model import (
    DiskLayout,
    MemoryModel,
    NodeMemory,
    NodeSnapshot,
    Plan,
    PodView,
    Signal,
    SwapDevice,
)
from nodeagent.policy import engine, pod_usage, ranking, relief, state, usage_growth
from nodeagent.policy.pod_usage import MemoryRule
from tests.support.nodes import CAPACITY, GI, MI, NOW, config, hard, pod, snapshot, usage, view

FILE = SwapDevice("/swapfile", "file", 4 * GI, 2 * GI)
ZRAM = SwapDevice("/dev/zram0", "zram", 4 * GI, 2 * GI, 512 * MI)
"""A quarter of what is swapped to it."""
LOWER = hard(memory_model=MemoryModel.LOWER)
KUBELET = {"ranking": RankingConfig(kubelet=True)}


def memory(*swaps: SwapDevice, total: int = 4 * GI, free: int = 2 * GI) -> NodeMemory:
    return NodeMemory(CAPACITY[Signal.MEMORY], GI, 8 * GI, 0, 0, 0, 0, 0, 0, 0, 0, 0, total, free, (), 0, swaps)


def swapped(name: str, memory_bytes: int | None, swap: int | None, **more: Any) -> PodView:
    return view(name, memory_bytes, usage_more={"memory_swap": swap}, **more)


def pressed(*pods: PodView, available: int = 900 * MI, node: NodeMemory | None = None) -> NodeSnapshot:
    return snapshot(*pods, available={Signal.MEMORY: available}, memory=node or memory(FILE))


def decide(node: NodeSnapshot, settings: Config | None = None) -> Plan:
    plan, _ = engine.decide(node, state.initial("test", now=NOW), now=NOW, config=settings or config(LOWER))
    return ranking.with_key_texts(plan)


def order(plan: Plan) -> list[str | None]:
    return [ranked.view.pod.name for ranked in plan.ranking]


# --- usage and order


def test_a_pod_that_was_swapped_out_does_not_look_small() -> None:
    big = swapped("big", 100 * MI, 900 * MI)
    plan = decide(pressed(swapped("small", 300 * MI, 0), big))
    assert order(plan) == ["big", "small"]
    assert [(ranked.usage, ranked.swap) for ranked in plan.ranking] == [(1000 * MI, 900 * MI), (300 * MI, 0)]


def test_swap_counts_against_the_request() -> None:
    plan = decide(
        pressed(swapped("over", 60 * MI, 90 * MI, request=100 * MI), swapped("within", 90 * MI, 0, request=100 * MI))
    )
    texts = {ranked.view.pod.name: "; ".join(key.text for key in ranked.keys) for ranked in plan.ranking}
    assert "over its request of 100Mi" in texts["over"]
    assert "uses 50Mi over its request, 90Mi of its usage in swap" in texts["over"]
    assert "within its request of 100Mi" in texts["within"]
    assert "swap" not in texts["within"]


def test_with_the_kubelets_order_the_working_set_alone_counts() -> None:
    """As in 1.36: ranking by swap is not decided (kubernetes/kubernetes#129578)."""
    node = pressed(swapped("small", 300 * MI, 0), swapped("big", 100 * MI, 900 * MI), node=memory(ZRAM))
    plan = decide(node, config(hard(), **KUBELET))
    assert order(plan) == ["small", "big"]
    assert [(each.usage, each.relief, each.swap) for each in plan.ranking] == [
        (300 * MI,) * 2 + (0,),
        (100 * MI,) * 2 + (0,),
    ]
    assert all("swap" not in victim.message for victim in plan.victims)


@pytest.mark.parametrize("swap", [None, -1, 5 * GI, 1 << 70, float("nan"), "1Gi"])
def test_swap_that_is_unknown_or_not_plausible_leaves_the_working_set(swap: Any) -> None:
    plan = decide(pressed(swapped("a", 300 * MI, swap), node=memory(ZRAM)))
    [ranked] = plan.ranking
    assert (ranked.usage, ranked.swap, ranked.relief, ranked.refusals) == (300 * MI, 0, 300 * MI, ())


def test_a_working_set_that_is_unknown_stays_unknown() -> None:
    [ranked] = decide(pressed(swapped("a", None, GI))).ranking
    assert ranked.usage is None
    assert [refusal.code for refusal in ranked.refusals] == ["usage-unknown"]


def test_a_pod_that_is_swapped_out_completely_has_its_swap_as_usage() -> None:
    [ranked] = decide(pressed(swapped("a", 0, GI))).ranking
    assert ranked.usage == GI


def test_memory_and_swap_may_exceed_the_memory_of_the_node() -> None:
    [ranked] = decide(pressed(swapped("a", CAPACITY[Signal.MEMORY] - GI, 3 * GI))).ranking
    assert ranked.usage == CAPACITY[Signal.MEMORY] + 2 * GI


def test_what_is_in_swap_and_in_memory_counts_once() -> None:
    twice = view("a", 300 * MI, usage_more={"memory_swap": 200 * MI, "memory_swap_cached": 150 * MI})
    [ranked] = decide(pressed(twice)).ranking
    assert (ranked.usage, ranked.swap) == (350 * MI, 50 * MI)


def test_the_node_without_its_meminfo_ranks_by_working_set() -> None:
    node = pressed(swapped("a", 300 * MI, GI))._replace(memory=None)
    assert pod_usage.memory_rule(node, config=config()).swap_limit == 0
    assert decide(node).ranking[0].usage == 300 * MI


@given(st.integers(0, 16 * GI), st.none() | st.integers(-GI, 1 << 65), st.integers(0, 1 << 65), st.integers(0, 8 * GI))
def test_swap_only_adds_to_the_usage_and_never_more_than_the_node_has(
    working_set: int, swap: int | None, cached: int, limit: int
) -> None:
    of = usage(pod("a"), working_set, memory_swap=swap, memory_swap_cached=cached)
    used = pod_usage.signal_usage(of, Signal.MEMORY, DiskLayout.SINGLE, limit=16 * GI, memory=MemoryRule(limit))
    assert used is not None
    assert working_set <= used <= working_set + limit


def test_being_swapped_out_or_in_is_no_growth() -> None:
    growth = usage_growth.GrowthState()
    for second, part in ((0, 0), (6, 100 * MI), (12, 200 * MI)):
        at = NOW + second
        node = snapshot(swapped("a", 300 * MI - part, part), at=at, memory=memory(FILE))
        growth = usage_growth.record_sample(growth, node, memory_rule=MemoryRule(4 * GI))
    back = usage(pod("a"), 300 * MI, memory_swap=0)
    assert usage_growth.growth_rate(growth, Signal.MEMORY, DiskLayout.SINGLE, at=NOW + 18)(back, 300 * MI) == 0


# --- relief


def test_swap_on_a_disk_is_no_relief_for_memory() -> None:
    [ranked] = decide(pressed(swapped("a", 300 * MI, GI))).ranking
    assert ranked.relief == 300 * MI


def test_a_pod_whose_memory_is_all_on_a_disk_is_not_evicted_for_memory() -> None:
    plan = decide(pressed(swapped("asleep", 0, 2 * GI), swapped("awake", 400 * MI, 0)))
    assert order(plan) == ["asleep", "awake"]
    assert [victim.pod.name for victim in plan.victims] == ["awake"]


def test_what_zram_takes_for_a_pod_is_freed_with_it() -> None:
    [ranked] = decide(pressed(swapped("a", 300 * MI, GI), node=memory(ZRAM))).ranking
    assert ranked.relief == 300 * MI + GI // 4


def test_beside_a_disk_each_pod_has_its_share_of_the_zram() -> None:
    node = memory(ZRAM, FILE, total=8 * GI, free=4 * GI)
    assert relief.swap_memory(pressed(node=node), config=config(LOWER)) == (0.125, 8 * GI)


@pytest.mark.parametrize(
    "node",
    [memory(FILE), memory(ZRAM, free=4 * GI), memory(ZRAM, free=5 * GI), memory(ZRAM._replace(memory=None)), memory()],
)
def test_without_known_zram_in_use_swap_takes_no_memory(node: NodeMemory) -> None:
    assert relief.swap_memory(pressed(node=node), config=config(LOWER)) == relief.NO_SWAP_MEMORY


@given(st.integers(0, 1 << 63), st.integers(0, 1 << 63), st.integers(0, 1 << 63), st.integers(0, 1 << 65))
def test_the_memory_of_swap_is_never_more_than_the_swap(total: int, free: int, zram: int, swap: int) -> None:
    node = pressed(node=memory(ZRAM._replace(memory=zram), total=total, free=free))
    share = relief.swap_memory(node, config=config(LOWER))
    assert 0 <= share.share <= 1
    of = usage(pod("a"), 0, memory_swap=swap)
    freed = relief.predicted_relief(of, Signal.MEMORY, DiskLayout.SINGLE, swap_memory=share)
    assert freed is not None
    assert 0 <= freed <= min(swap, total)


def test_zram_is_listed_among_what_holds_the_memory() -> None:
    assert "zram 512Mi" in relief.other_holders(Signal.MEMORY, pressed(node=memory(ZRAM)))


# --- the node


FULL_SWAP = FILE._replace(used=4 * GI)


def test_a_full_swap_alone_is_no_pressure() -> None:
    plan = decide(snapshot(swapped("a", GI, 4 * GI), memory=memory(FULL_SWAP, free=0)))
    assert plan.victims == ()
    assert not any(verdict.met for signal in plan.signals for verdict in signal.thresholds)


@pytest.mark.parametrize("node", [memory(FULL_SWAP, free=0), memory(FULL_SWAP, free=2 * GI), memory(total=0, free=0)])
@pytest.mark.parametrize("available", [1100 * MI, 900 * MI])
def test_the_memory_thresholds_alone_decide_whatever_is_left_of_the_swap(node: NodeMemory, available: int) -> None:
    plan = decide(pressed(swapped("a", GI, 0), available=available, node=node))
    assert len(plan.victims) == (available < GI)


def test_on_a_node_with_all_swap_used_the_largest_pod_by_memory_and_swap_is_evicted() -> None:
    pods = (
        swapped("cache", GI, 2 * GI, request=4 * GI),
        swapped("leak", GI, 2 * GI, request=512 * MI),
        swapped("web", 700 * MI, 0, request=512 * MI),
    )
    plan = decide(pressed(*pods, node=memory(FULL_SWAP, free=0)))
    assert order(plan) == ["leak", "web", "cache"]
    [victim] = plan.victims
    assert victim.pod.name == "leak"
    assert "Pod leak has 2Gi of its usage in swap. " in victim.message
    assert victim.predicted_relief == GI


@pytest.mark.parametrize("model", [MemoryModel.LOWER, MemoryModel.MEM_AVAILABLE])
def test_a_swap_heavy_node_with_zram_evicts_what_covers_the_deficit(model: MemoryModel) -> None:
    """900 MiB are missing: 500 MiB of its memory alone would not suffice, with its zram they do."""
    hog = swapped("hog", 500 * MI, 2 * GI)
    node = pressed(hog, swapped("web", 400 * MI, 0), available=124 * MI, node=memory(ZRAM))
    plan = decide(node, config(hard(memory_model=model)))
    assert [(victim.pod.name, victim.predicted_relief) for victim in plan.victims] == [("hog", 500 * MI + 512 * MI)]


def test_where_the_kubelets_figure_decides_zram_is_no_relief_because_the_figure_does_not_see_it() -> None:
    node = pressed(swapped("a", 300 * MI, GI), node=memory(ZRAM))
    [ranked] = decide(node, config(hard(memory_model=MemoryModel.WORKING_SET))).ranking
    assert (ranked.usage, ranked.relief) == (300 * MI + GI, 300 * MI)

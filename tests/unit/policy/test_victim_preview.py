"""The predicted victims are those of the next hard memory threshold, and a prediction changes nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config.schema import Config
from nodeagent.model import MemoryModel, NodeSnapshot, QOSClass, Signal, Threshold
from nodeagent.policy import candidates, engine, state, victim_preview
from tests.support.nodes import GI, MI, NOW, config, hard, not_started, quantity, snapshot, soft, view

GREEDY = view("greedy", 3 * GI, qos=QOSClass.BEST_EFFORT)
OTHER = view("other", 2 * GI, qos=QOSClass.BURSTABLE, request=4 * GI)


def _node(available: int, *pods: object, **more: object) -> NodeSnapshot:
    return snapshot(*(pods or (OTHER, GREEDY)), available={Signal.MEMORY: available}, **more)  # type: ignore[arg-type]


def _preview(node: NodeSnapshot, settings: Config | None = None) -> tuple[victim_preview.PredictedVictim, ...]:
    before = state.initial("test", now=NOW)
    return victim_preview.preview_victims(
        node, before, now=node.taken_at, config=settings or config(hard()), cache=candidates.RankingCache()
    )


@given(st.lists(st.tuples(st.sampled_from(QOSClass), st.integers(1, 64)), min_size=1, max_size=8))
def test_the_predicted_victims_are_those_of_the_crossing(pods: list[tuple[QOSClass, int]]) -> None:
    views = [view(f"p{index}", size * 64 * MI, qos=qos) for index, (qos, size) in enumerate(pods)]
    foreseen = _preview(_node(GI + 100 * MI, *views))
    crossed = _node(GI - 1, *views)
    plan, _ = engine.decide(crossed, state.initial("test", now=NOW), now=NOW, config=config(hard()))
    assert [each.pod_uid for each in foreseen] == [victim.pod.uid for victim in plan.victims] != []
    assert [each.cgroup for each in foreseen] == [victim.cgroup for victim in plan.victims]


def test_a_predicted_victim_may_grow_to_the_threshold_minus_the_kernels_overshoot() -> None:
    [greedy] = _preview(_node(GI + 100 * MI))
    until_crossed = 3 * GI + 100 * MI
    assert greedy.limit == until_crossed - until_crossed // 80
    [greedy] = _preview(_node(GI))
    assert greedy.limit == 3 * GI - 3 * GI // 80, "it is there, and not below"


def test_the_nearest_of_several_thresholds_counts() -> None:
    [greedy] = _preview(_node(GI + 100 * MI), config(hard(value=GI // 2), hard(value=GI), soft(value=GI + 50 * MI)))
    assert greedy.limit == (3 * GI + 100 * MI) * 79 // 80 + 1
    [greedy] = _preview(_node(GI - 100 * MI), config(hard(value=GI // 2), soft(value=GI, grace_s=1000.0)))
    assert greedy.limit == (3 * GI + GI // 2 - 100 * MI) * 79 // 80 + 1


def test_a_threshold_on_memavailable_counts_by_its_own_number() -> None:
    node = _node(8 * GI)
    node = node._replace(mem_available=node.mem_available._replace(available=GI + 200 * MI))
    [greedy] = _preview(node, config(hard(memory_model=MemoryModel.MEM_AVAILABLE)))
    assert greedy.limit == (3 * GI + 200 * MI) * 79 // 80 + 1


def test_on_a_node_full_of_page_cache_the_victim_of_a_real_shortage_is_predicted() -> None:
    node = _node(100 * MI)
    node = node._replace(mem_available=node.mem_available._replace(available=GI + 256 * MI + 200 * MI))
    [greedy] = _preview(node, config(hard(memory_model=MemoryModel.LOWER)))
    assert greedy.limit == (3 * GI + 200 * MI) * 79 // 80 + 1, "it may grow until more than page cache is short"


def test_several_predicted_victims_share_the_headroom() -> None:
    both = [view(name, 2 * GI, qos=QOSClass.BEST_EFFORT) for name in ("a", "b")]
    foreseen = _preview(_node(GI + 100 * MI, *both), config(hard(min_reclaim=quantity(3 * GI))))
    until_crossed = 2 * GI + 50 * MI
    assert [each.limit for each in foreseen] == [until_crossed - until_crossed // 80] * 2


@pytest.mark.parametrize(
    ("available", "threshold"),
    [
        (GI - 1, hard()),
        (2 * GI, soft()),
        (2 * GI, hard(Signal.PID, 1000)),
        (2 * GI, hard(Signal.NODEFS)),
    ],
    ids=["crossed already", "a soft one", "pids", "a disk"],
)
def test_there_is_no_prediction_without_a_hard_memory_threshold_ahead(available: int, threshold: Threshold) -> None:
    assert _preview(_node(available), config(threshold)) == ()


def test_unknown_usage_makes_no_predicted_victim() -> None:
    node = _node(GI + MI)
    unread = node.observations[Signal.MEMORY]._replace(available=None, reason="unreadable")
    assert _preview(node._replace(observations={**node.observations, Signal.MEMORY: unread})) == ()
    assert _preview(node._replace(pods_synced_at=None)) == ()
    assert GREEDY.usage is not None
    gone = GREEDY._replace(pod=not_started(GREEDY.pod), usage=None)
    assert [each.pod_uid for each in _preview(_node(GI + MI, gone, OTHER))] == [OTHER.pod.uid]


def test_a_prediction_does_not_change_the_snapshot() -> None:
    node = _node(GI + MI)
    before = (dict(node.observations), node.mem_available)
    assert _preview(node)
    assert (dict(node.observations), node.mem_available) == before

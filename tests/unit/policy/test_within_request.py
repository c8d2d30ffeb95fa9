"""Pods whose requests fit into allocatable memory lose no pod that stays within its own."""

import pytest

from nodeagent.config import load
from nodeagent.config.schema import Config, RankingConfig
from nodeagent.model import Plan, PodView, QOSClass, RefusalCode, Signal
from nodeagent.policy import engine
from nodeagent.policy.state import initial
from tests.support import nodes
from tests.support.nodes import GI, MI, NOW, snapshot

QOS = [QOSClass.GUARANTEED, QOSClass.BURSTABLE]


def packed(number: int, qos: QOSClass, *, mib: int = 990) -> list[PodView]:
    """Pods that request 1Gi each."""
    return [nodes.view(f"p{index}", mib * MI, request=GI, qos=qos) for index in range(number)]


def last_plan(*pods: PodView, signal: Signal = Signal.ALLOCATABLE_MEMORY, ranking: RankingConfig | None = None) -> Plan:
    """The plan with 90Mi of this memory left, or the first that evicts."""
    config: Config = load.defaults().config._replace(node_name="node-1")
    config = config if ranking is None else config._replace(ranking=ranking)
    state, plan = initial("t", now=NOW), None
    for number in range(6):
        at = NOW + 10.0 * number
        node = snapshot(*pods, at=at, available={signal: 90 * MI})
        if signal is Signal.ALLOCATABLE_MEMORY:
            node = node._replace(allocatable_by_kernel=node.observations[signal])
        plan, state = engine.decide(node, state, now=at, config=config)
        if plan.victims:
            break
    assert plan is not None
    return plan


@pytest.mark.parametrize("qos", QOS)
def test_a_node_that_is_full_by_its_requests_loses_no_pod(qos: QOSClass) -> None:
    plan = last_plan(*packed(8, qos))
    assert plan.victims == ()
    assert {each.code for each in plan.refusals} == {RefusalCode.NO_CANDIDATES}
    assert {each.code for pod in plan.ranking for each in pod.refusals} == {RefusalCode.WITHIN_REQUEST}


@pytest.mark.parametrize("qos", QOS)
def test_the_pod_that_uses_more_than_it_requests_is_evicted_although_it_holds_less(qos: QOSClass) -> None:
    over = nodes.view("over", 400 * MI, request=100 * MI)
    assert [victim.pod.name for victim in last_plan(*packed(8, qos), over).victims] == ["over"]


def test_the_memory_of_the_node_may_be_short_although_all_pods_stay_within_their_requests() -> None:
    assert last_plan(*packed(8, QOSClass.BURSTABLE), signal=Signal.MEMORY).victims


def test_the_kubelets_order_evicts_as_a_kubelet_does() -> None:
    assert last_plan(*packed(8, QOSClass.BURSTABLE), ranking=RankingConfig(kubelet=True)).victims

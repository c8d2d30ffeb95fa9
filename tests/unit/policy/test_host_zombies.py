"""PIDs that zombies of the host hold: nobody is evicted for them, and every other shortage is answered as before."""

from typing import Any

import pytest

from nodeagent.config.schema import RankingConfig
from nodeagent.model import NodeSnapshot, Plan, Signal, Tier, ZombieCount, ZombieHolder
from nodeagent.policy import engine, host_zombies, state
from tests.support.nodes import MI, NOW, config, hard, snapshot, soft, view

KUBELET = ZombieHolder(20_000, "", "kubelet.service", 812, "kubelet")
THRESHOLD = hard(Signal.PID, 2000)


def node(*, zombies: ZombieCount | None, available: int = 500, **pods: dict[str, Any]) -> NodeSnapshot:
    views = [view(name, MI, usage_more=usage) for name, usage in pods.items()]
    return snapshot(*views, available={Signal.PID: available})._replace(zombies=zombies)


def threads(number: int, **more: Any) -> dict[str, Any]:
    return {"process_count": number, "thread_count": number, **more}


def count(*holders: ZombieHolder, age_s: float = 1.0) -> ZombieCount:
    return ZombieCount(sum(each.zombies for each in holders), holders, complete=True, read_at=NOW - age_s)


def decide(taken: NodeSnapshot, settings: Any = None) -> Plan:
    before = state.initial("abcd1234", now=NOW - 10)
    return engine.decide(taken, before, now=NOW, config=settings or config(THRESHOLD))[0]


def victims(plan: Plan) -> list[str | None]:
    return [victim.pod.name for victim in plan.victims]


def test_no_pod_is_evicted_for_zombies_of_the_kubelet() -> None:
    plan = decide(node(zombies=count(KUBELET), web=threads(3000), api=threads(900)))
    assert victims(plan) == []
    [refusal] = plan.refusals
    assert refusal.code == "host-zombies"
    assert refusal.message == (
        "pid.available: 1500 missing, and zombies of the host hold 20000 (kubelet.service 20000 (kubelet, PID 812)), "
        "more than any candidate (at most 3000); no eviction ends them"
    )


def test_the_soft_tier_is_refused_as_well() -> None:
    threshold = soft(Signal.PID, 2000)
    settings = config(threshold)
    taken = node(zombies=count(KUBELET), web=threads(3000))
    plan, after = engine.decide(taken, state.initial("abcd1234", now=NOW - 10), now=NOW, config=settings)
    later = snapshot(*taken.pods, at=NOW + 5, available={Signal.PID: 500})._replace(zombies=taken.zombies)
    plan, _ = engine.decide(later, after, now=NOW + 5, config=settings)
    assert [verdict.threshold.hard for signal in plan.signals for verdict in signal.thresholds if verdict.due] == [
        False
    ]
    assert [refusal.code for refusal in plan.refusals] == ["host-zombies"]
    assert Tier.SOFT in plan.refusals[0].code.tiers


@pytest.mark.parametrize(
    ("zombies", "why"),
    [
        (None, "they were not counted"),
        (count(KUBELET, age_s=host_zombies.FRESH_S + 1), "the count is old"),
        (count(KUBELET, age_s=-1), "the count is of a later time"),
        (count(KUBELET._replace(zombies=1499)), "the threshold would be met without them"),
        (count(KUBELET._replace(zombies=3000)), "a candidate holds as much"),
        (count(ZombieHolder(20_000, "uid-web", "", 9, "sh")), "a pod does not wait for its children"),
        (count(ZombieHolder(20_000, "", "", 9, "")), "their parent is not visible"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_pod_is_evicted_although_there_are_zombies(zombies: ZombieCount | None, why: str) -> None:
    assert victims(decide(node(zombies=zombies, web=threads(3000), api=threads(900)))) == ["web"], why


def test_a_fork_bomb_is_evicted_beside_zombies_of_the_host() -> None:
    bomb = threads(4000, forks_per_s=3000.0)
    assert victims(decide(node(zombies=count(KUBELET), web=threads(900), bomb=bomb))) == ["bomb"]


def test_a_pod_that_holds_its_own_zombies_is_ranked_by_them() -> None:
    own = ZombieHolder(9000, "uid-careless", "", 9, "sh")
    taken = node(zombies=count(own, KUBELET._replace(zombies=40)), web=threads(900), careless=threads(9010))
    assert victims(decide(taken)) == ["careless"]


def test_the_order_of_the_kubelet_evicts_as_the_kubelet_does() -> None:
    settings = config(THRESHOLD, ranking=RankingConfig(kubelet=True))
    assert victims(decide(node(zombies=count(KUBELET), web=threads(3000)), settings)) == ["web"]


def test_a_futile_decision_names_zombies_of_the_host() -> None:
    plan = decide(node(zombies=count(KUBELET._replace(zombies=700)), web=threads(100)))
    [refusal] = [each for each in plan.refusals if each.code in ("futile", "no-candidates")]
    assert "zombies of kubelet.service 700" in refusal.message

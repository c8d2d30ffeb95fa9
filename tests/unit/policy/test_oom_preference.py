"""The OOM killer is to prefer the candidates at the top of the order, and no pod that would not be evicted."""

import pytest

from nodeagent.config.schema import Config
from nodeagent.model import OutcomeKind, Plan, PodSource, PodView, QOSClass, Signal, Threshold, Tier
from nodeagent.model.outcomes import Outcome
from nodeagent.policy import engine, oom_preference, outcomes, state
from tests.support.nodes import GI, MI, NOW, config, hard, snapshot, soft, view

SHORT: dict[Signal, int | None] = {Signal.MEMORY: GI - 100 * MI}


def settings(*thresholds: Threshold, **more: object) -> Config:
    made = config(*(thresholds or (soft(grace_s=1000.0),)), **more)
    return made._replace(escalation=made.escalation._replace(oom_score_adj=True))


def decide(*pods: PodView, using: Config | None = None, short: dict[Signal, int | None] | None = None) -> Plan:
    node = snapshot(*pods, available=SHORT if short is None else short)
    plan, _ = engine.decide(
        node, state.initial("test", now=NOW), now=NOW, config=using or settings(), always_rank=False
    )
    return plan


def names(plan: Plan, using: Config | None = None) -> list[str] | None:
    found = oom_preference.targets(plan, config=using or settings())
    return None if found is None else [each.pod for each in found]


PODS = [view(f"p{size}", size * GI, request=GI) for size in (2, 3, 4, 5)]


@pytest.mark.parametrize("threshold", [soft(grace_s=1000.0), soft(), hard()], ids=["in-its-grace", "soft", "hard"])
def test_the_first_three_candidates_in_every_tier_and_also_in_the_grace_period(threshold: Threshold) -> None:
    using = settings(threshold)
    assert names(decide(*PODS, using=using), using) == ["shop/p5", "shop/p4", "shop/p3"]


def test_nobody_without_a_shortage_or_without_the_key() -> None:
    assert names(decide(*PODS, short={})) == []
    assert names(decide(*PODS), config(soft())) == []


def test_an_unknown_signal_is_no_shortage() -> None:
    assert names(decide(*PODS, short={Signal.MEMORY: None})) == []


def test_no_protected_pod_and_none_that_only_the_host_knows() -> None:
    pods = [
        view("critical", 9 * GI, priority=2_000_000_000),
        view("static", 9 * GI, static="file"),
        view("system", 9 * GI, namespace="kube-system"),
        view("bare", 9 * GI, owner=None),
        view("unlisted", 9 * GI, source=PodSource.HOST),
        PODS[0],
    ]
    assert names(decide(*pods)) == ["shop/p2"]


def test_a_pod_that_would_free_too_little_is_not_killed_in_vain() -> None:
    small = view("small", MI // 2, qos=QOSClass.BEST_EFFORT)
    assert names(decide(small, PODS[0])) == ["shop/p2"]


def test_a_class_that_the_cgroup_tree_contradicts_is_not_touched() -> None:
    odd = view("odd", 9 * GI, qos=QOSClass.BURSTABLE)
    assert odd.usage is not None
    odd = odd._replace(usage=odd.usage._replace(qos_class=QOSClass.GUARANTEED))
    assert names(decide(odd, PODS[0])) == ["shop/p2"]


def test_a_pod_that_is_being_evicted_stays_the_first_one_until_it_is_gone() -> None:
    using = settings(hard())
    before = state.initial("test", now=NOW)
    node = snapshot(*PODS, available=SHORT)
    plan, after = engine.decide(node, before, now=NOW, config=using)
    [victim] = plan.victims
    accepted = Outcome(plan.id, victim.pod.uid, OutcomeKind.ACCEPTED, "", NOW)
    after = outcomes.apply_outcome(after, accepted, now=NOW, config=using)
    node = snapshot(*PODS, available=SHORT, at=NOW + 1)
    plan, _ = engine.decide(node, after, now=NOW + 1, config=using)
    assert victim.tier is Tier.HARD
    assert victim.pod.key in (names(plan, using) or [])


def test_while_another_resource_is_ranked_the_last_choice_stays() -> None:
    using = settings(soft(grace_s=1000.0), hard(Signal.PID, 1000))
    plan = decide(*PODS, using=using, short={**SHORT, Signal.PID: 10})
    assert plan.ranked_for is Signal.PID
    assert names(plan, using) is None

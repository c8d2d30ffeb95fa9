"""Pods over their own local-storage limits go first, where that is configured."""

from typing import Any

import pytest

from nodeagent.config.schema import Config, Mode, ReliefConfig, TokenBucket
from nodeagent.model import (
    DiskUsageQuality,
    EmptyDir,
    Method,
    NodeSnapshot,
    Outcome,
    OutcomeKind,
    Owner,
    Plan,
    PodView,
    Signal,
    Tier,
    VolumeUsage,
)
from nodeagent.policy import engine, outcomes, rate_limits, recheck, state
from tests.support.nodes import GI, MI, NOW, PLENTY, config, hard, snapshot, view


def over(name: str, used: int = 200 * MI, **more: Any) -> PodView:
    """A pod with an emptyDir `cache` of at most 100Mi."""
    volumes = (VolumeUsage("cache", used, 1, memory_backed=False),)
    return view(name, GI, empty_dirs=(EmptyDir("cache", False, 100 * MI),), usage_more={"volumes": volumes}, **more)


LIMITS = config(hard(), local_storage_limits=True)


def decide(node: NodeSnapshot, settings: Config = LIMITS) -> tuple[Plan, state.PolicyState]:
    return engine.decide(node, state.initial("test", now=NOW), now=node.taken_at, config=settings)


def names(plan: Plan) -> list[str | None]:
    return [victim.pod.name for victim in plan.victims]


def test_limits_are_the_kubelets_affair_unless_configured() -> None:
    assert names(decide(snapshot(over("a")), config(hard()))[0]) == []


def test_every_pod_over_its_limit_is_evicted_with_the_hard_grace_and_the_kubelets_text() -> None:
    plan, _ = decide(snapshot(over("b"), over("a"), over("fits", 100 * MI)))
    assert names(plan) == ["a", "b"]
    victim = plan.victims[0]
    assert (victim.tier, victim.method, victim.grace_period_s) == (Tier.HARD, Method.EVICT, 1.0)
    assert victim.message == 'Usage of EmptyDir volume "cache" exceeds the limit "100Mi". '
    assert victim.annotations == {}
    assert victim.limit == "emptydirfs.limit"
    assert plan.acting_on is None


def test_a_periodic_measurement_evicts_no_pod_and_is_repeated() -> None:
    counted, measured_for_it = over("counted"), over("measured")
    assert counted.usage is not None
    assert measured_for_it.usage is not None
    quality = DiskUsageQuality(NOW - 50.0, complete=True)
    counted = counted._replace(usage=counted.usage._replace(disk_usage_quality=quality._replace(periodic=True)))
    measured_for_it = measured_for_it._replace(usage=measured_for_it.usage._replace(disk_usage_quality=quality))
    plan, _ = decide(snapshot(counted, measured_for_it))
    assert names(plan) == ["measured"]
    assert plan.recount == (counted.pod.cgroup_uid,)
    [refusal] = plan.refusals
    assert refusal.code == "waits-for-recount"
    assert "shop/counted exceeds emptydirfs.limit: disk usage is 50s old; measuring again" in refusal.message


def test_no_pod_is_measured_again_that_would_not_be_evicted() -> None:
    guarded = over("guarded", namespace="kube-system")
    assert guarded.usage is not None
    quality = DiskUsageQuality(NOW - 50.0, complete=True, periodic=True)
    plan, _ = decide(snapshot(guarded._replace(usage=guarded.usage._replace(disk_usage_quality=quality))))
    assert (names(plan), plan.recount) == ([], ())


def test_limits_come_before_thresholds_and_then_no_threshold_acts_in_that_decision() -> None:
    node = snapshot(over("a"), view("hog", 4 * GI), available={Signal.MEMORY: 100 * MI})
    assert names(decide(node)[0]) == ["a"]


@pytest.mark.parametrize(
    ("code", "more"),
    [
        ("namespace", {"namespace": "kube-system"}),
        ("critical-priority", {"priority": 2_000_000_000}),
        ("daemon-set", {"owner": Owner("DaemonSet", "ds", "ds-uid")}),
    ],
)
def test_a_protected_pod_is_not_evicted_and_pressure_is_relieved_all_the_same(code: str, more: dict[str, Any]) -> None:
    node = snapshot(over("a", **more), view("hog", 4 * GI), available={Signal.MEMORY: 100 * MI})
    plan, _ = decide(node)
    assert names(plan) == ["hog"]
    assert [refusal.code for refusal in plan.refusals] == [code]
    assert "exceeds emptydirfs.limit" in plan.refusals[0].message


def test_rate_limits_apply_to_storage_limits_too() -> None:
    settings = LIMITS._replace(rate_limits=PLENTY._replace(node=TokenBucket(1, 1.0)))
    plan, _ = decide(snapshot(over("a"), over("b")), settings)
    assert names(plan) == ["a"]
    assert [refusal.code for refusal in plan.refusals] == ["rate-limit-node"]


def test_one_decision_takes_no_more_than_max_victims_for_limits_either() -> None:
    settings = LIMITS._replace(relief=ReliefConfig(max_victims=2))
    plan, _ = decide(snapshot(over("a"), over("b"), over("c")), settings)
    assert names(plan) == ["a", "b"]


def test_a_pod_on_its_way_is_not_evicted_twice_and_measures_nothing() -> None:
    plan, after = decide(snapshot(over("a")))
    outcome = Outcome(plan.id, plan.victims[0].pod.uid, OutcomeKind.ACCEPTED, "", NOW)
    after = outcomes.apply_outcome(after, outcome, now=NOW, config=LIMITS)
    again, after = engine.decide(snapshot(over("a"), at=NOW + 1), after, now=NOW + 1, config=LIMITS)
    assert names(again) == []
    for second in (2, 3):
        gone, after = engine.decide(snapshot(at=NOW + second), after, now=NOW + second, config=LIMITS)
        assert gone.relief_reports == ()
    assert after.in_flight.entries == ()
    assert after.in_flight.failures == {}


def test_tokens_of_a_blocked_eviction_come_back_to_the_bucket_of_the_limit() -> None:
    plan, after = decide(snapshot(over("a")))
    assert rate_limits.level(after.rate_limits, "signal/emptydirfs.limit", now=NOW, limits=PLENTY).tokens == 999
    outcome = Outcome(plan.id, plan.victims[0].pod.uid, OutcomeKind.BLOCKED_BY_PDB, "", NOW)
    after = outcomes.apply_outcome(after, outcome, now=NOW, config=LIMITS)
    assert rate_limits.level(after.rate_limits, "signal/emptydirfs.limit", now=NOW, limits=PLENTY).tokens == 1000


@pytest.mark.parametrize(("used", "code"), [(200 * MI, None), (50 * MI, "recovered")])
def test_the_recheck_compares_with_the_limit(used: int, code: str | None) -> None:
    plan, after = decide(snapshot(over("a")))
    refusal = recheck.recheck(plan.victims[0], snapshot(over("a", used), at=NOW + 1), after, now=NOW + 1, config=LIMITS)
    assert (refusal.code if refusal else None) == code


def test_without_a_current_list_of_the_pods_no_pod_is_evicted_for_a_limit() -> None:
    assert names(decide(snapshot(over("a"), pods_synced_at=None))[0]) == []


def test_in_a_dry_run_it_is_named_once() -> None:
    settings = LIMITS._replace(mode=Mode.DRY_RUN)
    plan, after = decide(snapshot(over("a")), settings)
    answer = Outcome(plan.id, plan.victims[0].pod.uid, OutcomeKind.DRY_RUN, "", NOW)
    after = outcomes.apply_outcome(after, answer, now=NOW, config=settings)
    again, _ = engine.decide(snapshot(over("a"), at=NOW + 3600), after, now=NOW + 3600, config=settings)
    assert names(again) == []

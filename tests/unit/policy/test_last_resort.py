"""When the API server is out of reach: which pod is killed through its cgroup, when, and how often."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config.schema import (
    ClusterConfig,
    Config,
    EscalationConfig,
    LastResort,
    ProtectionConfig,
    RateLimits,
    TokenBucket,
)
from nodeagent.model import (
    Method,
    NodeSnapshot,
    Outcome,
    OutcomeKind,
    Plan,
    Pod,
    PodSource,
    PodView,
    Refusal,
    RefusalCode,
    Signal,
    Threshold,
)
from nodeagent.policy import engine, outcomes, rate_limits, recheck, state
from nodeagent.policy.in_flight import EvictionStage
from nodeagent.policy.state import PolicyState
from tests.support.nodes import GI, MI, NOW, PLENTY, config, hard, snapshot, soft, view

KILL = EscalationConfig(last_resort=LastResort.CGROUP_KILL, last_resort_after_s=30.0)


def settings(threshold: Threshold | None = None, **more: Any) -> Config:
    return config(threshold or hard(), **({"escalation": KILL} | more))


def cut_off(*pods: PodView, lost_s: float | None = 31.0, at: float = NOW, **more: Any) -> NodeSnapshot:
    """924 MiB are missing, and the API server has not answered for so long."""
    lost_at = None if lost_s is None else at - lost_s
    return snapshot(*pods, at=at, available={Signal.MEMORY: 100 * MI}, api_unreachable_since=lost_at, **more)


def decide(node: NodeSnapshot, before: PolicyState | None = None, by: Config | None = None) -> tuple[Plan, PolicyState]:
    start = before or state.initial("test", now=NOW)
    return engine.decide(node, start, now=node.taken_at, config=by or settings())


def ways(plan: Plan) -> list[tuple[str | None, Method]]:
    return [(victim.pod.name, victim.method) for victim in plan.victims]


def codes(plan: Plan) -> list[str]:
    return [refusal.code for refusal in plan.refusals]


def answered(plan: Plan, after: PolicyState, kind: OutcomeKind, *, at: float = NOW) -> PolicyState:
    outcome = Outcome(plan.id, plan.victims[0].pod.uid, kind, "", at)
    return outcomes.apply_outcome(after, outcome, now=at, config=settings())


def test_the_hog_is_ended_when_nothing_was_answered_for_long_enough() -> None:
    plan, _ = decide(cut_off(view("hog", 2 * GI), view("small", MI)))
    assert ways(plan) == [("hog", Method.KILL)]


def test_without_last_resort_no_pod_is_killed() -> None:
    plan, _ = decide(cut_off(view("hog", 2 * GI), lost_s=3600.0), by=config(hard()))
    assert ways(plan) == [("hog", Method.EVICT)]


@pytest.mark.parametrize("lost_s", [None, 0.0, 29.9])
def test_before_that_time_the_eviction_is_requested_as_usual(lost_s: float | None) -> None:
    plan, _ = decide(cut_off(view("hog", 2 * GI), lost_s=lost_s))
    assert ways(plan) == [("hog", Method.EVICT)]


def test_the_soft_tier_never_ends_anybody() -> None:
    by = settings(soft())
    _, after = decide(cut_off(view("hog", 2 * GI)), by=by)
    plan, _ = decide(cut_off(view("hog", 2 * GI), at=NOW + 1), after, by)
    assert ways(plan) == [("hog", Method.EVICT)]


def test_an_old_view_of_the_pods_is_enough_for_it_and_for_nothing_else() -> None:
    by = settings(cluster=ClusterConfig(pods_max_age_s=60.0))
    node = cut_off(view("hog", 2 * GI), pods_synced_at=NOW - 600)
    assert ways(decide(node, by=by)[0]) == [("hog", Method.KILL)]
    plan, _ = decide(node._replace(api_unreachable_since=None), by=by)
    assert (ways(plan), codes(plan)) == ([], ["pods-stale"])


def test_pods_that_the_api_server_never_listed_are_not_killed() -> None:
    never = cut_off(view("hog", 2 * GI), pods_synced_at=None)
    assert codes(decide(never)[0]) == ["pods-never-synced"]
    by = settings(protection=ProtectionConfig(unknown_pods=False))
    stranger = cut_off(view("hog", 2 * GI, source=PodSource.HOST))
    plan, _ = decide(stranger, by=by)
    assert (ways(plan), codes(plan)) == ([], ["no-candidates", "out-of-reach"])
    assert "(unknown-pod: " in plan.refusals[1].message


def test_a_pod_without_a_cgroup_is_not_running_and_not_ended() -> None:
    gone: Pod = view("hog", 2 * GI).pod
    plan, _ = decide(cut_off(PodView(gone, None)))
    assert ways(plan) == []


def test_protections_apply_by_the_last_list_of_the_api_server() -> None:
    pods = (view("system", 4 * GI, namespace="kube-system"), view("critical", 4 * GI, priority=2_000_000_000))
    plan, _ = decide(cut_off(*pods, view("hog", 2 * GI)))
    assert ways(plan) == [("hog", Method.KILL)]


def test_kills_have_a_rate_limit_of_their_own_and_requests_are_tried_once_it_is_reached() -> None:
    plan, after = decide(cut_off(view("a", 2 * GI), view("b", 2 * GI)))
    assert len(plan.victims) == 1
    after = answered(plan, after, OutcomeKind.KILLED)
    later, _ = decide(cut_off(view("a", 2 * GI), view("b", 2 * GI), at=NOW + 10), after)
    assert [victim.method for victim in later.victims] == [Method.EVICT]
    assert "rate-limit-last-resort" in codes(later)


def test_buckets_that_unanswered_evictions_have_emptied_do_not_hold_the_last_resort() -> None:
    once = TokenBucket(1, 1.0)
    by = settings(rate_limits=RateLimits(node=once, namespace=once, owner=once, signal=once))
    plan, after = decide(cut_off(view("hog", 2 * GI), lost_s=None), by=by)
    after = answered(plan, after, OutcomeKind.TIMED_OUT, at=NOW + 5)
    later, _ = decide(cut_off(view("hog", 2 * GI), at=NOW + 40), after, by)
    assert ways(later) == [("hog", Method.KILL)]


def test_a_kill_that_the_kernel_refused_costs_nothing_and_is_not_repeated_on_that_pod() -> None:
    plan, after = decide(cut_off(view("hog", 2 * GI)))
    after = answered(plan, after, OutcomeKind.NOT_KILLED)
    assert rate_limits.level(after.rate_limits, rate_limits.LAST_RESORT, now=NOW, limits=PLENTY).tokens == 1
    later, _ = decide(cut_off(view("hog", 2 * GI), at=NOW + 10), after)
    assert (ways(later), codes(later)) == ([], ["no-candidates", "out-of-reach"])
    assert "shop/hog holds 2Gi and is out of reach (not-killed: " in later.refusals[1].message


def test_a_killed_pod_counts_as_leaving_for_a_moment_and_is_no_failed_eviction() -> None:
    plan, after = decide(cut_off(view("hog", 2 * GI)))
    after = answered(plan, after, OutcomeKind.KILLED)
    assert [entry.stage for entry in after.in_flight.entries] == [EvictionStage.KILLED]
    soon, after = decide(cut_off(view("hog", 2 * GI), at=NOW + 1), after)
    assert codes(soon)[0] == "pending-release"
    later, after = decide(cut_off(view("hog", 2 * GI), at=NOW + 20), after)
    assert after.in_flight.failures == {}
    assert later.victims


def test_the_recheck_lets_go_when_the_api_server_answers_again() -> None:
    plan, after = decide(cut_off(view("hog", 2 * GI)))
    (victim,) = plan.victims
    still = cut_off(view("hog", 2 * GI), at=NOW + 0.1, pods_synced_at=NOW - 600)
    assert recheck.recheck(victim, still, after, now=NOW + 0.1, config=settings()) is None
    back = still._replace(api_unreachable_since=None)
    refusal = recheck.recheck(victim, back, after, now=NOW + 0.1, config=settings())
    assert refusal is not None
    assert refusal.code == "api-reachable"


@given(
    steps=st.lists(st.tuples(st.sampled_from([0.5, 20.0, 300.0, 700.0]), st.booleans()), max_size=30),
    spent=st.booleans(),
)
def test_no_restarts_and_no_waiting_end_more_pods_than_the_bucket_allows(
    steps: list[tuple[float, bool]], spent: bool
) -> None:
    by = settings(rate_limits=PLENTY._replace(last_resort=TokenBucket(2, 6.0)))
    current, now, kills = state.initial("first", now=NOW, tokens_spent=spent), NOW, []
    for n, (seconds, crash) in enumerate(steps):
        now += seconds
        plan, current = decide(cut_off(view(f"pod-{n}", 2 * GI), at=now), current, by)
        disk = msgspec.json.encode(current)
        for victim in plan.victims:
            if victim.method is Method.KILL:
                kills.append(now)
                current = answered(plan, current, OutcomeKind.KILLED, at=now)
        if crash:
            current = state.restored(msgspec.json.decode(disk, type=PolicyState), instance=f"run-{n}")
    for first, begin in enumerate(kills):
        for count, end in enumerate(kills[first:], start=1):
            assert count <= 2 + int((end - begin) / 600.0 + 1e-9)
    if spent and kills:
        assert kills[0] - NOW >= 600.0


# --- what the soft tier waits for -------------------------------------------------------------------------------------

SLOT = Refusal(RefusalCode.WAITS_FOR_LEASE, "all 2 eviction slots of the zone are taken")


def waiting(at: float, *, note: Refusal | None = SLOT) -> NodeSnapshot:
    return snapshot(view("hog", 2 * GI), at=at, available={Signal.MEMORY: 100 * MI}, soft_tier_blocked_by=note)


def test_the_soft_tier_waits_without_spending_anything_and_the_hard_tier_does_not() -> None:
    by = config(soft())
    _, after = decide(waiting(NOW), by=by)
    plan, later = decide(waiting(NOW + 1), after, by)
    assert (ways(plan), codes(plan)) == ([], ["waits-for-lease"])
    assert later.rate_limits == after.rate_limits
    assert later.in_flight.entries == ()
    go, _ = decide(waiting(NOW + 2, note=None), later, by)
    assert ways(go) == [("hog", Method.EVICT)]
    assert ways(decide(waiting(NOW), by=config(hard()))[0]) == [("hog", Method.EVICT)]


def test_an_eviction_slot_that_is_lost_before_the_request_stops_it() -> None:
    by = config(soft())
    _, after = decide(waiting(NOW, note=None), by=by)
    plan, after = decide(waiting(NOW + 1, note=None), after, by)
    refusal = recheck.recheck(plan.victims[0], waiting(NOW + 1.1), after, now=NOW + 1.1, config=by)
    assert refusal is not None
    assert refusal.code == "waits-for-lease"

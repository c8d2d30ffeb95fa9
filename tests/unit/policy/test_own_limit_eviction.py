"""Pods near a memory limit of their own are evicted politely, one of an owner at a time, by limits of their own."""

import pytest

from nodeagent.config.own_limit import OwnLimitConfig
from nodeagent.config.schema import Config, Mode, TokenBucket
from nodeagent.model import (
    Method,
    NodeSnapshot,
    Outcome,
    OutcomeKind,
    Owner,
    OwnLimit,
    Plan,
    PodView,
    Refusal,
    RefusalCode,
    Signal,
    Tier,
)
from nodeagent.policy import engine, outcomes, recheck, state
from nodeagent.policy.state import PolicyState
from tests.support.nodes import GI, MI, NOW, PLENTY, WALL, config, hard, pod, snapshot, soft, usage

LIMIT = 512 * MI
SETTINGS = config(
    own_limit=OwnLimitConfig(enabled=True, namespaces=("shop",)),
    rate_limits=PLENTY._replace(own_limit=TokenBucket(10, 100_000.0), owner_backoff_s=60.0),
    mode=Mode.ENFORCE,
)


def near(name: str, used_mib: int = 505, *, at: float = NOW, **more: object) -> PodView:
    of = pod(name, **more)  # type: ignore[arg-type]
    own = OwnLimit("c" * 64, LIMIT, used_mib * MI, LIMIT - used_mib * MI, at)
    return PodView(of, usage(of, used_mib * MI, own_limits=(own,)))


def decide(
    node: NodeSnapshot, settings: Config = SETTINGS, before: PolicyState | None = None
) -> tuple[Plan, PolicyState]:
    return engine.decide(node, before or state.initial("test", now=NOW), now=node.taken_at, config=settings)


def names(plan: Plan) -> list[str | None]:
    return [victim.pod.name for victim in plan.victims]


def codes(plan: Plan) -> list[RefusalCode]:
    return [refusal.code for refusal in plan.refusals]


def answered(before: PolicyState, plan: Plan, kind: OutcomeKind, *, at: float = NOW) -> PolicyState:
    [victim] = plan.victims
    return outcomes.apply_outcome(before, Outcome(plan.id, victim.pod.uid, kind, "", at), now=at, config=SETTINGS)


def test_it_is_off_by_default() -> None:
    assert names(decide(snapshot(near("a")), config())[0]) == []


def test_a_pod_near_its_limit_is_evicted_with_its_whole_grace_and_no_condition() -> None:
    plan, after = decide(snapshot(near("a", termination_grace_s=120.0), near("b", 300)))
    [victim] = plan.victims
    assert (victim.pod.name, victim.tier, victim.method) == ("a", Tier.SOFT, Method.EVICT)
    assert victim.grace_period_s == 120.0, "longer than evictionMaxPodGracePeriod: it is not for the node"
    assert victim.limit == "memory.max"
    assert (plan.acting_on, plan.deficit) == (None, None)
    assert all(verdict.status.value != "True" for verdict in plan.conditions)
    [entry] = after.in_flight.entries
    assert (entry.buckets, entry.owner) == (("own-limit",), "own-limit/rs-shop-a")
    assert entry.until == NOW + 12 + 30 + 15, "evictions for the node wait no longer than for others"


def test_a_grace_of_zero_still_asks_for_a_second() -> None:
    """0 would delete the pod at once, without preStop."""
    [victim] = decide(snapshot(near("a", termination_grace_s=0.0)))[0].victims
    assert victim.grace_period_s == 1.0


def test_a_threshold_of_the_node_comes_first() -> None:
    hog = PodView(pod("hog"), usage(pod("hog"), 4 * GI))
    node = snapshot(near("a"), hog, available={Signal.MEMORY: 10 * MI})
    plan, _ = decide(node, SETTINGS._replace(thresholds=(hard(),)))
    assert names(plan) == ["hog"]


def test_neither_an_eviction_for_the_node_in_flight_nor_a_wait_of_the_soft_tier_delays_it() -> None:
    blocked = Refusal(RefusalCode.WAITS_FOR_TAINT, "the taint")
    settings = SETTINGS._replace(thresholds=(soft(),))
    node = snapshot(near("a"), available={Signal.MEMORY: GI - MI}, soft_tier_blocked_by=blocked)
    plan, _ = decide(node, settings)
    assert names(plan) == ["a"]


MAINTENANCE = [
    (RefusalCode.NODE_MAINTENANCE, True),  # cordoned or draining: the kernel kills the pod before the drain comes to it
    (RefusalCode.NODE_SHUTDOWN, False),  # the kubelet ends the pod, with preStop and a grace period
]


@pytest.mark.parametrize(("code", "evicted"), MAINTENANCE, ids=[str(code) for code, _ in MAINTENANCE])
def test_of_all_maintenance_a_shutdown_alone_keeps_it_from_being_evicted(code: RefusalCode, evicted: bool) -> None:
    block = Refusal(code, "the node is under maintenance: why")
    plan, after = decide(snapshot(near("a"), soft_tier_blocked_by=block))
    assert (names(plan), plan.refusals) == ((["a"], ()) if evicted else ([], (block,)))
    before, planned = decide(snapshot(near("a")))
    second = snapshot(near("a", at=NOW + 0.01), at=NOW + 0.01, soft_tier_blocked_by=block)
    refusal = recheck.recheck(before.victims[0], second, planned, now=NOW + 0.01, config=SETTINGS)
    assert refusal == (None if evicted else block)
    assert after.in_flight.entries == (planned.in_flight.entries if evicted else ())


def test_the_node_does_not_wait_for_its_release() -> None:
    plan, after = decide(snapshot(near("a", termination_grace_s=3600.0)))
    after = answered(after, plan, OutcomeKind.ACCEPTED)
    leaving = near("a", 5, termination_grace_s=3600.0, deletion_wall=WALL + 3600, deletion_grace_s=3600.0)
    hog = PodView(pod("hog"), usage(pod("hog"), 4 * GI))
    low: dict[Signal, int | None] = {Signal.MEMORY: 512 * MI}
    settings = SETTINGS._replace(thresholds=(soft(),))
    _, after = decide(snapshot(leaving, hog, at=NOW + 1, available=low), settings, after)
    plan, _ = decide(snapshot(leaving, hog, at=NOW + 2, available=low), settings, after)
    assert names(plan) == ["hog"]


@pytest.mark.parametrize(
    ("view", "code"),
    [
        (near("a", owner=Owner("DaemonSet", "a", "d")), RefusalCode.DAEMON_SET),
        (near("a", owner=None), RefusalCode.BARE_POD),
        (near("a", priority=2_000_000_000), RefusalCode.CRITICAL_PRIORITY),
        (near("a", age_s=10.0), RefusalCode.TOO_YOUNG),
        (near("a", deletion_wall=WALL + 5), RefusalCode.TERMINATING),
        (near("a", claims_unknown="claim data"), RefusalCode.CLAIMS_UNKNOWN),
    ],
)
def test_the_protections_of_the_soft_tier_apply(view: PodView, code: RefusalCode) -> None:
    plan, _ = decide(snapshot(view))
    assert names(plan) == []
    assert codes(plan) == [code]
    assert plan.refusals[0].message.startswith("shop/a is near its memory.max: ")


def test_of_an_owner_one_pod_leaves_at_a_time() -> None:
    owner = Owner("ReplicaSet", "web", "rs-web")
    pods = near("a", owner=owner), near("b", 508, owner=owner), near("other")
    plan, _ = decide(snapshot(*pods))
    assert names(plan) == ["a", "other"]
    assert codes(plan) == [RefusalCode.EVICTION_IN_FLIGHT]
    rolling = near("c", 5, owner=owner, deletion_wall=WALL + 20)
    plan, _ = decide(snapshot(rolling, pods[1]))
    assert names(plan) == [], "a rollout takes one away already"


def test_of_an_owner_no_pod_leaves_for_its_limit_while_another_is_evicted_for_the_node() -> None:
    owner = Owner("ReplicaSet", "web", "rs-web")
    hog = pod("hog", owner=owner)
    short = snapshot(near("a", owner=owner), PodView(hog, usage(hog, 4 * GI)), available={Signal.MEMORY: 10 * MI})
    settings = SETTINGS._replace(thresholds=(hard(),))
    plan, planned = decide(short, settings)
    assert names(plan) == ["hog"]
    relieved = snapshot(near("a", owner=owner), PodView(hog, usage(hog, 4 * GI)), at=NOW + 1)
    for before in (planned, state.restored(planned, instance="again")):
        again, _ = decide(relieved, settings, before)
        assert (names(again), codes(again)) == ([], [RefusalCode.EVICTION_IN_FLIGHT])
        assert "shop/hog of the same owner is leaving" in again.refusals[0].message
    uncertain = answered(planned, plan, OutcomeKind.TIMED_OUT)._replace(rate_limits=planned.rate_limits)
    assert names(decide(relieved, settings, uncertain)[0]) == []


def test_an_owner_backs_off_for_its_own_limits_and_not_for_the_node() -> None:
    owner = Owner("ReplicaSet", "web", "rs-web")
    plan, after = decide(snapshot(near("a", owner=owner)))
    after = answered(after, plan, OutcomeKind.ACCEPTED)
    _, after = decide(snapshot(near("b", 300, owner=owner), at=NOW + 1), before=after)  # a is gone
    plan, _ = decide(snapshot(near("b", at=NOW + 30, owner=owner), at=NOW + 30), before=after)
    assert codes(plan) == [RefusalCode.OWNER_BACKOFF]
    plan, _ = decide(snapshot(near("b", at=NOW + 90, owner=owner), at=NOW + 90), before=after)
    assert names(plan) == ["b"]
    big = PodView(pod("b", owner=owner), usage(pod("b"), 4 * GI))
    node = snapshot(big, at=NOW + 30, available={Signal.MEMORY: 10 * MI})
    plan, _ = decide(node, SETTINGS._replace(thresholds=(hard(),)), after)
    assert names(plan) == ["b"], "a pod that fills its own limit on purpose does not protect its siblings"


def test_its_tokens_are_its_own() -> None:
    few = SETTINGS._replace(rate_limits=PLENTY._replace(own_limit=TokenBucket(1, 6.0)))
    plan, after = decide(snapshot(near("a"), near("b")), few)
    assert names(plan) == ["a"]
    assert codes(plan) == [RefusalCode.RATE_LIMIT_OWN_LIMIT]
    assert set(after.rate_limits.levels) == {"own-limit"}


def test_a_refusal_by_a_pdb_returns_the_token_and_backs_off_the_pod() -> None:
    plan, after = decide(snapshot(near("a")))
    after = answered(after, plan, OutcomeKind.BLOCKED_BY_PDB)
    assert after.in_flight.entries == ()
    plan, _ = decide(snapshot(near("a", at=NOW + 1), at=NOW + 1), before=after)
    assert codes(plan) == [RefusalCode.BLOCKED_BY_PDB]


def test_a_dry_run_shows_the_pace_of_real_evictions_and_ends() -> None:
    dry_run = SETTINGS._replace(mode=Mode.DRY_RUN)
    plan, after = decide(snapshot(near("a")), dry_run)
    after = answered(after, plan, OutcomeKind.DRY_RUN)
    plan, after = decide(snapshot(near("a", at=NOW + 20), at=NOW + 20), dry_run, after)
    assert codes(plan) == [RefusalCode.EVICTION_IN_FLIGHT]
    plan, _ = decide(snapshot(near("a", at=NOW + 100), at=NOW + 100), dry_run, after)
    assert names(plan) == ["a"], "the kernel has killed it meanwhile, and it is near its limit again"


def test_without_a_current_list_of_the_pods_nothing_happens() -> None:
    plan, _ = decide(snapshot(near("a"), pods_synced_at=None))
    assert (names(plan), codes(plan)) == ([], [RefusalCode.PODS_NEVER_SYNCED])


def test_the_recheck_refuses_a_pod_that_has_freed_its_memory() -> None:
    plan, after = decide(snapshot(near("a")))
    [victim] = plan.victims

    def refused(view: PodView) -> Refusal | None:
        blocked = Refusal(RefusalCode.WAITS_FOR_LEASE, "a slot")
        node = snapshot(view, at=NOW + 0.01, soft_tier_blocked_by=blocked)
        return recheck.recheck(victim, node, after, now=NOW + 0.01, config=SETTINGS)

    assert refused(near("a", at=NOW + 0.01)) is None
    recovered = refused(near("a", 300, at=NOW + 0.01))
    assert recovered is not None
    assert recovered.code is RefusalCode.RECOVERED
    unread = PodView(pod("a"), usage(pod("a"), 505 * MI))
    gone = refused(unread)
    assert gone is not None
    assert gone.code is RefusalCode.RECOVERED, "unknown is never pressure"

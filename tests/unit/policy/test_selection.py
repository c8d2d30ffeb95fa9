"""Victims of one decision: limits add none, and a larger pod out of reach is replaced only if that suffices."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config.schema import (
    EscalationConfig,
    LastResort,
    OnFutile,
    RankingConfig,
    ReliefConfig,
    TokenBucket,
)
from nodeagent.model import (
    DiskUsage,
    DisruptionBudget,
    Method,
    Outcome,
    OutcomeKind,
    Owner,
    PodSource,
    PodView,
    QOSClass,
    RefusalCode,
    Signal,
    Tier,
)
from nodeagent.policy import engine, outcomes, rate_limits, recheck, selection
from nodeagent.policy.state import initial
from tests.support import nodes
from tests.support.nodes import GI, MI, NOW, PLENTY, WALL, attributed, config, hard, quantity, snapshot
from tests.support.simulated_node import (
    NEVER,
    acting,
    by_the_host,
    claimed,
    decide_steady,
    no_usage,
    pressed,
    unreadable,
)

KUBELET = RankingConfig(kubelet=True)


def test_one_tiny_unreadable_pod_does_not_protect_the_hog() -> None:
    node = attributed(pressed(no_usage("tiny"), nodes.view("hog", 2 * GI)), unattributed=GI)
    victims, _, _ = decide_steady(
        node, config(hard(min_reclaim=quantity(8 * GI)), relief=ReliefConfig(on_futile=OnFutile.EVICT))
    )
    assert victims == ["hog"], "although it does not suffice: only 1 GiB is unattributed"


def test_an_unreadable_pod_that_may_hold_more_protects_others_only_while_they_do_not_suffice() -> None:
    node = attributed(
        pressed(no_usage("dark"), nodes.view("a", 600 * MI), nodes.view("b", 500 * MI)), unattributed=3 * GI
    )
    assert decide_steady(node, config(hard()))[0] == ["a", "b"], "824 MiB are missing, and nothing more is used"
    settings = config(hard(), relief=ReliefConfig(max_victims=1))
    victims, codes, _ = decide_steady(node, settings)
    assert (victims, codes) == ([], ["out-of-reach"])


def test_the_rate_of_loss_must_be_known_before_a_replacement() -> None:
    node = attributed(pressed(no_usage("dark"), nodes.view("a", 2 * GI)), unattributed=3 * GI)
    plan, _ = engine.decide(node, initial("t", now=NOW), now=NOW, config=config(hard()))
    assert plan.victims == ()
    assert "the rate at which the rest is used up is unknown" in plan.refusals[0].message


def test_the_refusal_contains_the_pod_its_amount_and_the_reason() -> None:
    node = pressed(by_the_host(nodes.view("hog", 2 * GI), age_s=5), nodes.view("a", 950 * MI))
    plan, _ = engine.decide(node, initial("t", now=NOW), now=NOW, config=config(hard()))
    (refusal,) = plan.refusals
    assert refusal.code == "out-of-reach"
    assert refusal.message == (
        "memory.available: hog/hog holds 2Gi and is out of reach (unknown-pod: the API server does not list "
        "this pod: owner, priority and PDBs unknown); the API server is about to list it: no other pod is evicted in "
        "its place"
    )


def test_a_pod_ranked_before_the_pod_out_of_reach_is_evicted_as_usual() -> None:
    """It does not replace the other pod: it would be the victim anyway."""
    blocked = nodes.view(
        "database", 4 * GI, priority=1000, request=6 * GI, disruption_budgets=(DisruptionBudget("b", 0),)
    )
    leak = nodes.view("leak", GI, qos=QOSClass.BEST_EFFORT)
    victims, _, _ = decide_steady(pressed(blocked, leak), acting(Tier.SOFT, rate_limits=PLENTY))
    assert victims == ["leak"]


def test_of_a_set_with_a_pod_out_of_reach_only_the_others_are_evicted() -> None:
    hog = nodes.view("hog", 3 * GI, request=GI)
    stuck = by_the_host(nodes.view("stuck", 6 * GI), age_s=500)
    small = [nodes.view(f"small-{n}", 400 * MI, request=399 * MI) for n in range(4)]
    node = pressed(stuck, hog, *small)
    victims, codes, _ = decide_steady(node, config(hard(min_reclaim=quantity(7 * GI))))
    assert (victims, codes) == ([], ["futile", "out-of-reach"])
    settings = config(hard(min_reclaim=quantity(7 * GI)), relief=ReliefConfig(on_futile=OnFutile.EVICT))
    victims, codes, _ = decide_steady(node, settings)
    assert victims == ["hog"]
    assert "out-of-reach" in codes


def test_a_pod_that_is_as_large_is_evicted() -> None:
    stuck = by_the_host(nodes.view("stuck", 2 * GI), age_s=500)
    assert decide_steady(pressed(stuck, nodes.view("other", 2 * GI)), config(hard()))[0] == ["other"]


def test_a_configured_protection_does_not_put_a_pod_out_of_reach() -> None:
    system = unreadable(nodes.view("system", MI, namespace="kube-system"), NEVER, 0)
    plan, _ = engine.decide(
        pressed(system, nodes.view("hog", 950 * MI)), initial("t", now=NOW), now=NOW, config=config(hard())
    )
    assert [str(each.pod.name) for each in plan.victims] == ["hog"]


@pytest.mark.parametrize(("asked_s", "expected"), [(1.9, []), (2.1, ["hog"]), (None, ["hog"])])
def test_the_hard_tier_waits_briefly_for_claims(asked_s: float | None, expected: list[str]) -> None:
    """None: the lookup started before the crossing."""
    hog = claimed(nodes.view("hog", 2 * GI), asked_at=NOW - (9 if asked_s is None else asked_s))
    others = [nodes.view(name, GI) for name in ("a", "b")]
    settings = config(hard())
    before = pressed(at=NOW - 2.5)
    _, state = engine.decide(before, initial("t", now=NOW - 2.5), now=NOW - 2.5, config=settings)
    plan, state = engine.decide(pressed(hog, *others), state, now=NOW, config=settings)
    assert [str(each.pod.name) for each in plan.victims] == expected
    if not expected:
        assert [each.code for each in plan.refusals] == ["claims-unknown"]
        return
    again = pressed(hog, at=NOW + 0.1)
    assert recheck.recheck(plan.victims[0], again, state, now=NOW + 0.1, config=settings) is None
    bound = hog._replace(pod=hog.pod._replace(claims_unknown="", node_bound="its claim data is local"))
    refusal = recheck.recheck(plan.victims[0], pressed(bound, at=NOW + 0.1), state, now=NOW + 0.1, config=settings)
    assert refusal is not None
    assert refusal.code == "node-bound", "a claim that is known to be local protects"


def test_unknown_claims_only_delay_the_shortening_of_a_terminating_pod() -> None:
    leaving = claimed(nodes.view("leaving", 2 * GI, deletion_wall=WALL + 3000, deletion_grace_s=3600.0), asked_at=NOW)
    others = [nodes.view(name, GI) for name in ("a", "b")]
    settings, state = config(hard()), initial("t", now=NOW)
    named = []
    for at in (NOW, NOW + 1, NOW + 2.5):
        plan, state = engine.decide(pressed(leaving, *others, at=at), state, now=at, config=settings)
        named.append([str(each.pod.name) for each in plan.victims])
    assert named == [[], [], ["leaving"]]


def test_a_pod_that_the_api_server_no_longer_lists_counts_as_released_when_its_cgroup_is_gone() -> None:
    settings = config(hard(Signal.NODEFS, 10 * GI))

    def holds(name: str, size: int) -> PodView:
        return nodes.view(name, MI, usage_more={"disk": DiskUsage(size, 1, 0, 0, 0, 0)})

    low: dict[Signal, int | None] = {Signal.NODEFS: 8 * GI}
    node = snapshot(holds("hog", 4 * GI), holds("a", 3 * GI), available=low)
    plan, state = engine.decide(node, initial("t", now=NOW), now=NOW, config=settings)
    assert [str(each.pod.name) for each in plan.victims] == ["hog"]
    state = outcomes.apply_outcome(
        state,
        Outcome(plan.id, plan.victims[0].pod.uid, OutcomeKind.NOT_FOUND, "404", NOW + 0.1),
        now=NOW + 0.1,
        config=settings,
    )
    later = snapshot(holds("a", 3 * GI), at=NOW + 0.5, available=low)
    plan, _ = engine.decide(later, state, now=NOW + 0.5, config=settings)
    assert plan.victims == ()
    assert [each.code for each in plan.refusals] == ["pending-release"]


def test_the_last_resort_kills_no_pod_in_the_place_of_one_that_the_kernel_did_not_kill() -> None:
    settings = config(
        hard(),
        escalation=EscalationConfig(last_resort=LastResort.CGROUP_KILL, last_resort_after_s=30.0),
        rate_limits=PLENTY._replace(last_resort=TokenBucket(9, 60.0)),
    )
    pods = [nodes.view("hog", 4 * GI), nodes.view("a", 800 * MI, request=799 * MI)]
    lost: dict[str, Any] = {"api_unreachable_since": NOW - 40}
    plan, state = engine.decide(pressed(*pods, **lost), initial("t", now=NOW), now=NOW, config=settings)
    assert [(str(each.pod.name), each.method) for each in plan.victims] == [("hog", Method.KILL)]
    refused = Outcome(plan.id, plan.victims[0].pod.uid, OutcomeKind.NOT_KILLED, "EPERM", NOW)
    state = outcomes.apply_outcome(state, refused, now=NOW, config=settings)
    for step in range(1, 9):
        at = NOW + step
        node = pressed(*pods, available=(200 - 9 * step) * MI, at=at, **lost)
        plan, state = engine.decide(node, state, now=at, config=settings)
        assert plan.victims == ()


# --- limits -----------------------------------------------------------------------------------------------------------

some_pods = st.lists(
    st.tuples(
        st.integers(1, 40),
        st.sampled_from(list(QOSClass)),
        st.sampled_from(["a", "b"]),
        st.sampled_from(["x", "y", "z"]),
        st.booleans(),
    ),
    min_size=1,
    max_size=9,
)


@given(rows=some_pods, missing=st.integers(1, 60), kubelet=st.booleans(), tier=st.sampled_from(list(Tier)))
def test_limits_never_add_a_victim(
    rows: list[tuple[int, QOSClass, str, str, bool]], missing: int, kubelet: bool, tier: Tier
) -> None:
    settings = acting(tier, rate_limits=PLENTY, ranking=KUBELET if kubelet else RankingConfig())
    pods, pod_backoffs = [], {}
    for number, (size, qos, namespace, owner, limited) in enumerate(rows):
        view = nodes.view(
            f"p{number}", size * 50 * MI, qos=qos, namespace=namespace, owner=Owner("ReplicaSet", owner, f"rs-{owner}")
        )
        pods.append(view)
        if limited:
            pod_backoffs[view.pod.uid] = rate_limits.Backoff(1, NOW + 60, NOW - 1, RefusalCode.INVALID, "refused")
    node = pressed(*pods, available=GI - missing * 20 * MI if missing < 51 else 0)
    state = initial("t", now=NOW - 9)
    _, state = engine.decide(pressed(at=NOW - 2), state, now=NOW - 2, config=settings)
    free, _ = engine.decide(node, state, now=NOW, config=settings)
    backoff = {"rs-x": rate_limits.Backoff(1, NOW + 60, NOW - 1, RefusalCode.OWNER_BACKOFF, "evicted")}
    empty = {"namespace/b": rate_limits.BucketLevel(0, NOW)}
    limits = state.rate_limits._replace(pods=pod_backoffs, owners=backoff, levels=empty)
    plan, _ = engine.decide(node, state._replace(rate_limits=limits), now=NOW, config=settings)
    without = {each.pod.uid for each in free.victims}
    with_limits = {each.pod.uid for each in plan.victims}
    limited_uids = {
        view.pod.uid
        for view in pods
        if view.pod.uid in pod_backoffs
        or view.pod.namespace == "b"
        or (view.pod.owner and view.pod.owner.uid == "rs-x")
    }
    assert with_limits == without - limited_uids
    if without - with_limits:
        assert any(each.message.endswith(selection.NO_REPLACEMENT) for each in plan.refusals)


@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=9),
    missing=st.integers(1, 50),
    falls=st.integers(0, 20),
)
def test_a_pod_smaller_than_the_one_out_of_reach_is_selected_only_if_that_suffices(
    rows: list[tuple[int, int]], missing: int, falls: int
) -> None:
    """The victims are those of the run in which every pod is in reach, or they suffice alone."""
    settings = acting(rate_limits=PLENTY)
    views, reachable, stuck = [], [], {}
    for number, (size, kind) in enumerate(rows):
        view = nodes.view(f"p{number}", size * 50 * MI)
        reachable.append(view)
        if kind == 1:
            view = by_the_host(view, age_s=500)._replace(pod=view.pod._replace(source=PodSource.HOST))
        elif kind == 2:
            stuck[view.pod.uid] = rate_limits.Backoff(
                9, NOW + 60, NOW - 1, RefusalCode.INVALID, "refused for the ninth time"
            )
        views.append(view)
    available = GI - missing * 20 * MI
    state = initial("t", now=NOW - 9)
    for step in range(5, 0, -1):
        at = NOW - step
        shot = pressed(at=at, available=available + falls * MI * step)
        _, state = engine.decide(shot, state, now=at, config=settings)
    free, _ = engine.decide(pressed(*reachable, available=available), state, now=NOW, config=settings)
    state = state._replace(rate_limits=state.rate_limits._replace(pods=stuck))
    plan, _ = engine.decide(pressed(*views, available=available), state, now=NOW, config=settings)
    without = {each.pod.uid: each.predicted_relief or 0 for each in free.victims}
    chosen = {each.pod.uid: each.predicted_relief or 0 for each in plan.victims}
    free_uids = {view.pod.uid for view in views if view.pod.source is PodSource.API} - stuck.keys()
    out = {uid: relief for uid, relief in without.items() if uid not in free_uids}
    if not out or not chosen or chosen.keys() <= without.keys():
        return
    largest_out = max(out.values())
    cures = sum(chosen.values()) >= GI - available + falls * MI * selection.LOSS_HORIZON_S
    assert max(chosen.values()) >= largest_out or cures

"""No smaller pod is evicted in the place of a larger one that is out of reach."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from nodeagent.config.schema import (
    ProtectionConfig,
    RankingConfig,
    RateLimits,
    TokenBucket,
)
from nodeagent.model import (
    DiskUsage,
    DisruptionBudget,
    NodeSnapshot,
    OutcomeKind,
    PodView,
    Resources,
    Signal,
    Tier,
)
from nodeagent.policy import backoffs, engine, out_of_reach, rate_limits, selection
from nodeagent.policy.state import initial
from tests.support import nodes
from tests.support.nodes import GI, MI, NOW, attributed, config, hard, snapshot
from tests.support.simulated_node import (
    NEVER,
    HogView,
    SimulatedNode,
    acting,
    by_the_host,
    claimed,
    decide_steady,
    no_usage,
    pressed,
    unreadable,
)

KUBELET = RankingConfig(kubelet=True)


def thrice(kind: OutcomeKind) -> Callable[[float, int], OutcomeKind]:
    return lambda for_s, times: kind if times <= 3 else OutcomeKind.ACCEPTED


FOR_EVER: dict[str, tuple[Tier, HogView]] = {
    "its usage cannot be read": (Tier.HARD, HogView(lambda view, for_s: unreadable(view, NEVER, for_s))),
    "its usage cannot be read, soft": (Tier.SOFT, HogView(lambda view, for_s: unreadable(view, NEVER, for_s))),
    "only the host knows it": (Tier.HARD, HogView(lambda view, for_s: by_the_host(view, age_s=5 + for_s))),
    "an old orphan": (Tier.HARD, HogView(lambda view, for_s: by_the_host(view, age_s=5000.0))),
    "it has no cgroup": (Tier.HARD, HogView(lambda view, for_s: view._replace(usage=None))),
    "429 always": (Tier.HARD, HogView(answer=lambda for_s, times: OutcomeKind.BLOCKED_BY_PDB)),
    "two PDBs match": (Tier.HARD, HogView(answer=lambda for_s, times: OutcomeKind.PDB_CONFLICT)),
    "400 always": (Tier.HARD, HogView(answer=lambda for_s, times: OutcomeKind.INVALID)),
    "404 always": (Tier.HARD, HogView(answer=lambda for_s, times: OutcomeKind.NOT_FOUND)),
    "409 always": (Tier.HARD, HogView(answer=lambda for_s, times: OutcomeKind.CONFLICT)),
    "timeouts always": (Tier.HARD, HogView(answer=lambda for_s, times: OutcomeKind.TIMED_OUT)),
    "the kubelet is dead": (Tier.HARD, HogView(dies=False)),
    "the kubelet is dead, soft": (Tier.SOFT, HogView(dies=False)),
    "no disruption is allowed": (
        Tier.SOFT,
        HogView(
            lambda view, for_s: view._replace(pod=view.pod._replace(disruption_budgets=(DisruptionBudget("b", 0),)))
        ),
    ),
    "its claim is not looked up": (Tier.SOFT, HogView(lambda view, for_s: claimed(view))),
}
"""Reasons for which a growing hog stays out of reach."""


@pytest.mark.parametrize("order", ["ours", "kubelet"])
@pytest.mark.parametrize("name", FOR_EVER)
def test_while_a_growing_hog_is_out_of_reach_no_other_pod_is_evicted(name: str, order: str) -> None:
    tier, seen = FOR_EVER[name]
    settings = acting(tier, ranking=KUBELET if order == "kubelet" else RankingConfig())
    simulated = SimulatedNode(settings, seen).run(100)
    assert simulated.others == []
    last = " ".join(refusal.message for refusal in simulated.plans[-1].refusals)
    assert "hog/hog" in last, "each decision has the reason it waits for"


def test_while_a_finished_pod_still_holds_the_memory_no_other_pod_is_evicted() -> None:
    finished = HogView(lambda view, for_s: view._replace(pod=view.pod._replace(phase="Failed")))
    assert SimulatedNode(acting(), finished).run(60).others == []


FOR_A_WHILE: dict[str, tuple[Tier, HogView, float]] = {
    "usage unreadable for 20 s": (Tier.HARD, HogView(lambda view, for_s: unreadable(view, 20, for_s)), 30),
    "not listed for 20 s": (
        Tier.HARD,
        HogView(lambda view, for_s: by_the_host(view, age_s=5 + for_s) if for_s < 20 else view),
        30,
    ),
    "claims never known, hard": (Tier.HARD, HogView(lambda view, for_s: claimed(view)), 30),
    "claims known after 20 s, soft": (
        Tier.SOFT,
        HogView(lambda view, for_s: claimed(view) if for_s < 20 else view),
        40,
    ),
    **{
        f"{kind.value} three times": (
            Tier.HARD,
            HogView(answer=thrice(kind)),
            60,
        )
        for kind in (OutcomeKind.INVALID, OutcomeKind.NOT_FOUND, OutcomeKind.CONFLICT, OutcomeKind.UNREACHABLE)
    },
    "too young for a minute, soft": (
        Tier.SOFT,
        HogView(
            lambda view, for_s: view._replace(
                usage=view.usage._replace(started_at=view.usage.read_at - for_s) if view.usage else None
            )
        ),
        90,
    ),
}


@pytest.mark.parametrize("order", ["ours", "kubelet"])
@pytest.mark.parametrize("name", FOR_A_WHILE)
def test_a_hog_that_comes_into_reach_is_evicted_and_no_pod_before_it(name: str, order: str) -> None:
    tier, seen, seconds = FOR_A_WHILE[name]
    protection = ProtectionConfig(minimum_age_s=60.0 if name.startswith("too young") else 0.0)
    settings = acting(tier, protection=protection, ranking=KUBELET if order == "kubelet" else RankingConfig())
    simulated = SimulatedNode(settings, seen).run(seconds)
    assert (simulated.others, "hog" in simulated.evicted) == ([], True)


@pytest.mark.parametrize(
    "limits",
    [
        RateLimits(),
        RateLimits(owner_backoff_s=0.0, owner=TokenBucket(1, 30.0)),
        RateLimits(owner_backoff_s=0.0, namespace=TokenBucket(1, 30.0)),
    ],
    ids=["owner back-off", "empty bucket of the owner", "empty bucket of the namespace"],
)
@pytest.mark.parametrize("order", ["ours", "kubelet"])
def test_the_second_replica_of_a_leak_is_evicted_later_and_no_pod_in_its_place(limits: RateLimits, order: str) -> None:
    settings = acting(rate_limits=limits, ranking=KUBELET if order == "kubelet" else RankingConfig())
    simulated = SimulatedNode(settings, HogView(), hog=2 * GI, sibling=int(2.1 * GI), rate=40.0 * MI).run(200)
    assert simulated.others == []
    assert sorted(simulated.evicted) == ["hog", "sibling"]


def test_beside_a_stuck_pod_without_growth_other_pods_that_suffice_are_evicted() -> None:
    simulated = SimulatedNode(acting(), HogView(dies=False), rate=0.0, hog=int(4.4 * GI)).run(90)
    assert len(simulated.others) == 1
    assert simulated.evicted[0] == "hog"


def test_a_stuck_pod_that_grows_in_bursts_causes_at_most_one_replacement_in_ten_minutes() -> None:
    simulated = SimulatedNode(
        acting(), HogView(dies=False), rate=2.0 * MI, burst_s=60.0, hog=int(4.6 * GI), others=12, each=170 * MI
    )
    simulated.run(selection.REPLACEMENT_INTERVAL_S - 60)
    taken = [plan for plan in simulated.plans if any(str(v.pod.name).startswith("other") for v in plan.victims)]
    assert len(taken) <= 1
    assert "out-of-reach" in simulated.reasons


def test_a_replacement_that_evicted_nothing_may_be_repeated() -> None:
    state = backoffs.record_replacement(rate_limits.RateLimitState(), "memory", "p-1", 2, now=NOW)
    assert backoffs.replaced_ago_s(state, "memory", now=NOW + 5, for_s=600) == 5
    assert backoffs.replaced_ago_s(state, "inodes", now=NOW + 5, for_s=600) is None
    assert backoffs.replaced_ago_s(state, "memory", now=NOW + 600, for_s=600) is None
    assert backoffs.undo_replacement(state, "memory", "p-2") == state
    once = backoffs.undo_replacement(state, "memory", "p-1")
    assert backoffs.replaced_ago_s(once, "memory", now=NOW + 5, for_s=600) == 5
    assert (
        backoffs.replaced_ago_s(backoffs.undo_replacement(once, "memory", "p-1"), "memory", now=NOW + 5, for_s=600)
        is None
    )


def test_after_a_lost_state_no_pod_is_replaced_for_a_while() -> None:
    lost = rate_limits.RateLimitState(spent_at=NOW)
    assert backoffs.replaced_ago_s(lost, "memory", now=NOW + 1, for_s=600) == 1


def tiny_without_usage(view: PodView, for_s: float) -> PodView:
    return unreadable(view, NEVER, for_s) if view.pod.name == "other-0" else view


@pytest.mark.parametrize("order", ["ours", "kubelet"])
@pytest.mark.parametrize("tier", Tier)
def test_a_tiny_unreadable_pod_does_not_protect_a_pod_that_grows_fast(order: str, tier: Tier) -> None:
    """Unattributed memory may belong to the tiny pod, but the hog causes the loss."""
    settings = acting(tier, ranking=KUBELET if order == "kubelet" else RankingConfig())
    simulated = SimulatedNode(settings, HogView(), rate=60.0 * MI, hog=int(1.1 * GI), unaccounted=3 * GI)
    simulated.view_of_all = tiny_without_usage
    simulated.run(12)
    assert simulated.evicted == ["hog"], "before the memory is used up"


def test_two_replicas_that_grow_beside_a_tiny_unreadable_pod_are_both_evicted() -> None:
    settings = acting(rate_limits=RateLimits(owner_backoff_s=10.0))
    simulated = SimulatedNode(
        settings, HogView(), rate=30.0 * MI, hog=int(0.6 * GI), sibling=int(0.5 * GI), unaccounted=3 * GI
    )
    simulated.view_of_all = tiny_without_usage
    simulated.run(60)
    assert sorted(simulated.evicted) == ["hog", "sibling"]


@pytest.mark.parametrize("signal", [Signal.NODEFS, Signal.PID])
def test_a_used_up_resource_beside_an_unreadable_pod_gets_help_in_the_end(signal: Signal) -> None:
    def node(at: float) -> NodeSnapshot:
        most = 20 * GI if signal is Signal.NODEFS else 4000
        dark = nodes.view("dark", MI, usage_more={"process_count": None, "thread_count": None})
        large = nodes.view(
            "large",
            MI,
            usage_more={"disk": DiskUsage(rootfs_bytes=most), "process_count": most, "thread_count": most},
        )
        return snapshot(dark, large, at=at, available={signal: 0})

    settings = config(hard(signal, 5 * GI if signal is Signal.NODEFS else 1000))
    state = initial("t", now=NOW)
    when: list[float] = []
    for step in range(int(selection.REPLACEMENT_INTERVAL_S) + 20):
        plan, state = engine.decide(node(NOW + step), state, now=NOW + step, config=settings)
        when += [step for _ in plan.victims]
    assert len(when) == 1
    assert selection.REPLACEMENT_INTERVAL_S <= when[0] <= selection.REPLACEMENT_INTERVAL_S + 5


def test_a_resize_to_more_than_exists_does_not_put_a_pod_out_of_reach() -> None:
    """Any editor of the pod may request it, and the kubelet keeps the allocated amount."""
    hog = nodes.view("hog", 2 * GI, request=100 * MI)
    [container] = hog.pod.containers
    wanted = container._replace(requests=Resources(memory=9 * 10**18), allocated=Resources(memory=100 * MI))
    resized = hog._replace(pod=hog.pod._replace(containers=(wanted,)))
    others = [nodes.view(name, 900 * MI) for name in ("a", "b")]
    assert decide_steady(pressed(resized, *others), config(hard()))[0] == ["hog"]


def test_right_after_a_release_the_signal_still_falls_as_fast_as_before() -> None:
    """The step up hides the loss from the trend, and other pods would replace it (random run 5029)."""
    history = tuple((NOW + at, left * MI) for at, left in enumerate((900, 870, 840, 1140, 1110, 1080)))
    assert selection.expected_loss(history, available=1080 * MI, value=GI) == 30 * MI * selection.LOSS_HORIZON_S


def test_a_short_outage_of_the_usage_of_a_slow_hog_evicts_no_other_pod() -> None:
    """Five of them alone would suffice for a minute (random run 9198)."""
    dark = HogView(lambda view, for_s: unreadable(view, 20, for_s))
    simulated = SimulatedNode(acting(), dark, rate=10.0 * MI, hog=int(4.2 * GI)).run(60)
    assert simulated.evicted == ["hog"]


def test_a_hog_that_stays_out_of_reach_is_waited_for_briefly() -> None:
    dark = HogView(lambda view, for_s: unreadable(view, NEVER, for_s))
    simulated = SimulatedNode(acting(), dark, rate=0.0, hog=int(4.25 * GI))
    simulated.run(selection.LARGER_WAIT_S - 1)
    assert (simulated.others, "out-of-reach" in simulated.reasons) == ([], True)
    simulated.run(3)
    assert len(simulated.others) == 1


def beside_an_unreadable_replica(
    *, others: int, each: int, hog: int, sibling: int, hog_priority: int = 0
) -> SimulatedNode:
    """Two replicas that grow, one of them without a readable cgroup."""
    seen = HogView(lambda view, for_s: view._replace(pod=view.pod._replace(priority=hog_priority)))
    simulated = SimulatedNode(acting(), seen, rate=10.0 * MI, hog=hog, sibling=sibling, others=others, each=each)
    simulated.view_of_all = lambda view, for_s: view._replace(usage=None) if view.pod.name == "sibling" else view
    return simulated.run(20)


def test_growth_of_a_pod_that_is_not_evicted_does_not_make_others_sufficient() -> None:
    """It continues to grow (random run 9140)."""
    sizes = {"hog": int(0.5 * GI), "sibling": int(3.7 * GI)}
    assert beside_an_unreadable_replica(others=6, each=300 * MI, **sizes, hog_priority=1).others == []


def test_of_two_growing_pods_only_the_one_in_reach_is_evicted() -> None:
    simulated = beside_an_unreadable_replica(others=6, each=300 * MI, hog=int(0.3 * GI), sibling=int(3.9 * GI))
    assert simulated.evicted == ["hog"]


def test_a_signal_counts_as_used_up_from_the_moment_it_is_not_from_the_crossing() -> None:
    dark, large = no_usage("dark"), nodes.view("large", 3 * GI)
    settings = config(hard(), protection=ProtectionConfig())
    state = initial("t", now=NOW)
    when: list[float] = []
    for step in range(int(2 * selection.REPLACEMENT_INTERVAL_S) + 20):
        left = max(0, 700 * MI - step * MI)
        node = attributed(pressed(dark, large, available=left, at=NOW + step), unattributed=4 * GI)
        if left:
            node = node._replace(pods=(node.pods[0],))
        plan, state = engine.decide(node, state, now=NOW + step, config=settings)
        when += [step for _ in plan.victims]
    used_up = 700 - 102
    assert when[0] >= used_up + selection.REPLACEMENT_INTERVAL_S


class Moment(NamedTuple):
    """Why the hog is out of reach for a period."""

    seconds: float
    trouble: str
    answer: OutcomeKind


moments = st.lists(
    st.builds(
        Moment,
        st.floats(0.5, 20.0),
        st.sampled_from(["", "unread", "unlisted", "orphan", "claims", "gone", "budget"]),
        st.sampled_from([kind for kind in OutcomeKind if kind is not OutcomeKind.DRY_RUN]),
    ),
    min_size=1,
    max_size=8,
)


@settings_of_hypothesis(deadline=None, max_examples=10)
@given(story=moments, dies=st.booleans(), kubelet=st.booleans(), tier=st.sampled_from(list(Tier)))
@example(  # accepted, and unreadable when the time for its release is over
    story=[
        Moment(6.0, "", OutcomeKind.ACCEPTED),
        Moment(1.0, "unlisted", OutcomeKind.ACCEPTED),
        Moment(15.0, "unread", OutcomeKind.ACCEPTED),
    ],
    dies=False,
    kubelet=False,
    tier=Tier.HARD,
)
def test_whatever_happens_to_a_growing_hog_no_other_pod_is_evicted(
    story: list[Moment], dies: bool, kubelet: bool, tier: Tier
) -> None:
    def moment(for_s: float) -> Moment:
        for each in story:
            for_s -= each.seconds
            if for_s < 0:
                return each
        return Moment(0.0, "", OutcomeKind.ACCEPTED)

    def seen(view: PodView, for_s: float) -> PodView:
        match moment(for_s).trouble:
            case "unread":
                return unreadable(view, NEVER, for_s)
            case "unlisted":
                return by_the_host(view, age_s=5.0)
            case "orphan":
                return by_the_host(view, age_s=500.0)
            case "claims":
                return claimed(view)
            case "gone":
                return view._replace(usage=None)
            case "budget":
                return view._replace(pod=view.pod._replace(disruption_budgets=(DisruptionBudget("b", 0),)))
        return view

    order = KUBELET if kubelet else RankingConfig()
    simulated = SimulatedNode(
        acting(tier, ranking=order), HogView(seen, lambda for_s, times: moment(for_s).answer, dies)
    )
    simulated.run(60)
    assert simulated.others == []


def test_the_constants_of_the_page_are_those_of_the_code() -> None:
    constants = (
        out_of_reach.CLAIMS_WAIT_S,
        selection.LOSS_HORIZON_S,
        selection.REPLACEMENT_INTERVAL_S,
        selection.LARGER_WAIT_S,
        selection.LARGER_WAIT_SHARE,
    )
    assert constants == (2.0, 60.0, 600.0, 20.0, 0.25)

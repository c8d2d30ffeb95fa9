"""A suspend of the machine counts as no time: no sample was taken and no kubelet worked, so it causes no eviction."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config.schema import RankingConfig, RateLimits, ReliefConfig
from nodeagent.model import NodeSnapshot, Outcome, OutcomeKind, Plan, Signal
from nodeagent.policy import engine, outcomes, state
from nodeagent.policy.state import PolicyState
from tests.support import nodes
from tests.support.nodes import GI, MI, NOW, PLENTY

GRACE_S = 20.0
SHORT_S, LONG_S = 25.0, 3600.0
"""Shorter and longer than `sampling.staleAfter`."""
CALM, LOW = 8 * GI, GI // 2


def _node(awake_s: float, slept_s: float, available: int, *, leaving: bool = False) -> NodeSnapshot:
    at = NOW + awake_s + slept_s
    pods = [nodes.view("big", 4 * GI), nodes.view("small", 2 * GI)]
    if leaving:
        pods.append(nodes.view("leaving", 2 * GI, deletion_wall=nodes.WALL + 30.0, deletion_grace_s=30.0))
    return nodes.snapshot(*pods, at=at, available={Signal.MEMORY: available})._replace(suspended_s=500.0 + slept_s)


SOFT = nodes.config(nodes.soft(grace_s=GRACE_S, value=2 * GI))
HARD = nodes.config(nodes.hard(value=2 * GI))


def _decide(node: NodeSnapshot, before: PolicyState, config: object = SOFT) -> tuple[Plan, PolicyState]:
    plan, after = engine.decide(node, before, now=node.taken_at, config=config)  # type: ignore[arg-type]
    for victim in plan.victims:
        accepted = Outcome(plan.id, victim.pod.uid, OutcomeKind.ACCEPTED, "", node.taken_at)
        after = outcomes.apply_outcome(after, accepted, now=node.taken_at, config=config)  # type: ignore[arg-type]
    return plan, after


def _names(plan: Plan) -> list[str]:
    return [str(victim.pod.name) for victim in plan.victims]


def test_a_grace_period_continues_after_a_short_suspend() -> None:
    _, after = _decide(_node(0, 0, LOW), state.initial("t", now=NOW))
    _, after = _decide(_node(5, 0, LOW), after)
    for awake_s in (6, 15, 19.9):
        plan, after = _decide(_node(awake_s, SHORT_S, LOW), after)
        assert _names(plan) == []
    plan, _ = _decide(_node(20, SHORT_S, LOW), after)
    assert _names(plan) == ["big"]


def test_a_grace_period_starts_again_after_a_long_suspend() -> None:
    _, after = _decide(_node(0, 0, LOW), state.initial("t", now=NOW))
    for awake_s in (6, 20, 25.9):
        plan, after = _decide(_node(awake_s, LONG_S, LOW), after)
        assert _names(plan) == []
    plan, _ = _decide(_node(26, LONG_S, LOW), after)
    assert _names(plan) == ["big"]


def test_with_the_kubelets_order_a_grace_period_continues_after_any_suspend_as_in_the_kubelet() -> None:
    kubelet = SOFT._replace(ranking=RankingConfig(kubelet=True))
    _, after = _decide(_node(0, 0, LOW), state.initial("t", now=NOW), kubelet)
    plan, after = _decide(_node(6, LONG_S, LOW), after, kubelet)
    assert _names(plan) == []
    plan, _ = _decide(_node(20, LONG_S, LOW), after, kubelet)
    assert _names(plan) == ["big"]


def test_an_eviction_in_flight_is_waited_for_as_long_as_without_the_suspend() -> None:
    plan, after = _decide(_node(0, 0, LOW), state.initial("t", now=NOW), HARD)
    assert _names(plan) == ["big"]
    plan, after = _decide(_node(1, 0, LOW), after, HARD)
    for awake_s in (2, 10, 15.9):
        plan, after = _decide(_node(awake_s, LONG_S, LOW), after, HARD)
        assert _names(plan) == []
        assert not after.in_flight.failures, "it has not failed either"
    plan, after = _decide(_node(17, LONG_S, LOW), after, HARD)
    assert after.in_flight.failures, "the grace of a second and the slack of the eviction in flight are over"


def test_an_answer_after_the_suspend_does_not_extend_the_wait() -> None:
    plan, after = engine.decide(_node(0, 0, LOW), state.initial("t", now=NOW), now=NOW, config=HARD)
    woke_at = NOW + LONG_S + 1
    [victim] = plan.victims
    accepted = Outcome(plan.id, victim.pod.uid, OutcomeKind.ACCEPTED, "", woke_at)
    after = outcomes.apply_outcome(after, accepted, now=woke_at, config=HARD)
    _, after = _decide(_node(2, LONG_S, LOW), after, HARD)
    [entry] = after.in_flight.entries
    assert entry.until <= woke_at + 1 + entry.grace_s + 15.0


def test_a_pod_that_is_terminating_keeps_the_rest_of_its_grace() -> None:
    """Its grace is 30 s, 10 s of which are over; the soft tier waits for the rest and 15 s more."""
    soft = nodes.config(nodes.soft(value=2 * GI))
    _, after = _decide(_node(0, 0, CALM, leaving=True), state.initial("t", now=NOW), soft)
    _, after = _decide(_node(10, 0, CALM, leaving=True), after, soft)
    _, after = _decide(_node(11, LONG_S, LOW, leaving=True), after, soft)
    for awake_s in (12, 30, 44):
        plan, after = _decide(_node(awake_s, LONG_S, LOW, leaving=True), after, soft)
        assert _names(plan) == []
        assert "pending-release" in {refusal.code for refusal in plan.refusals}
    plan, _ = _decide(_node(46, LONG_S, LOW, leaving=True), after, soft)
    assert _names(plan) == ["big"]


def test_a_suspend_before_the_first_decision_or_shorter_than_the_error_of_two_clocks_does_not_count() -> None:
    fresh = state.initial("t", now=NOW)
    _, after = _decide(_node(0, LONG_S, LOW), fresh)
    node = _node(20, LONG_S, LOW)
    plan, _ = _decide(node._replace(suspended_s=node.suspended_s + 0.05), after)
    assert _names(plan) == ["big"]


# Without anything else that time changes: no rate limit, no back-off, no memory of failures.
SOFT_AND_HARD = nodes.config(
    nodes.soft(grace_s=5.0, value=2 * GI),
    nodes.hard(value=GI),
    rate_limits=RateLimits(PLENTY.node, PLENTY.namespace, PLENTY.owner, PLENTY.signal, owner_backoff_s=0.0),
    relief=ReliefConfig(failures_before_stop=1000),
)


def _victims_by_second(levels: list[int], suspends: list[float]) -> list[list[str]]:
    """The victims of each second in which the machine is awake."""
    after, victims = state.initial("t", now=NOW), []
    for second, (level, slept_s) in enumerate(zip(levels, accumulate(suspends), strict=True)):
        plan, after = _decide(_node(second, slept_s, level, leaving=True), after, SOFT_AND_HARD)
        victims.append(_names(plan))
    return victims


@given(
    st.lists(
        st.tuples(st.sampled_from([CALM, GI + 500 * MI, GI + 500 * MI, LOW]), st.sampled_from([0.0] * 8 + [3.0, 28.0])),
        min_size=1,
        max_size=60,
    )
)
def test_no_short_suspend_changes_the_victims_or_their_time(steps: list[tuple[int, float]]) -> None:
    levels = [level for level, _ in steps]
    suspends = [0.0, *(slept_s for _, slept_s in steps[1:])]  # one before the first sample is unknown
    assert _victims_by_second(levels, suspends) == _victims_by_second(levels, [0.0] * len(levels))

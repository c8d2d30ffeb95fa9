import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nodeagent.config.schema import Config, DampingConfig, RankingConfig
from nodeagent.model import (
    SIGNAL_TABLE,
    ConditionStatus,
    ConditionType,
    ConditionVerdict,
    Observation,
    Signal,
    SignalState,
    SignalVerdict,
    ThresholdVerdict,
)
from nodeagent.policy.conditions import ConditionState, update
from tests.support.threshold_samples import GI, MI, quantity
from tests.support.threshold_samples import hard as hard_at
from tests.support.threshold_samples import soft as soft_at

TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN
PERIOD = 300.0
KUBELET = Config(ranking=RankingConfig(kubelet=True), eviction_pressure_transition_period_s=PERIOD)
PLAIN = Config(damping=DampingConfig(jitter=0.0), eviction_pressure_transition_period_s=PERIOD)


def verdict(signal: Signal, state: SignalState, *, available: int = 200 * MI) -> SignalVerdict:
    """A verdict on a signal with a soft threshold of 500Mi and a hard one of 300Mi."""
    known = None if state is SignalState.UNKNOWN else available
    seen = Observation(signal, known, 8 * GI, 0.0, "test", "" if known is not None else "statvfs timed out")
    thresholds = (
        (soft_at(signal, 500 * MI, grace_s=30), state in (SignalState.SOFT, SignalState.HARD)),
        (hard_at(signal, 300 * MI), state is SignalState.HARD),
    )
    return SignalVerdict(
        seen,
        state,
        tuple(
            ThresholdVerdict(
                each._replace(value=quantity(each.value.quantity or 0)._replace(text=text)),
                each.value.quantity,
                met,
                0.0 if met else None,
                False,
            )
            for (each, met), text in zip(thresholds, ("500Mi", "300Mi"), strict=True)
        ),
    )


class Node:
    """`update` with the state kept between calls."""

    def __init__(self, config: Config, *, seed: str = "node-1") -> None:
        self.config = config
        self.state = ConditionState(seed=seed)

    def see(self, at: float, *verdicts: SignalVerdict) -> dict[ConditionType, ConditionVerdict]:
        results, self.state = update(verdicts, self.state, now=at, config=self.config)
        return {each.type: each for each in results}

    def memory(self, at: float, state: SignalState) -> ConditionVerdict:
        return self.see(at, verdict(Signal.MEMORY, state))[ConditionType.MEMORY_PRESSURE]


# --- the kubelet's timing ---------------------------------------------------------------------------------------------


def test_pressure_raises_a_condition_at_once_even_before_a_soft_grace_has_run() -> None:
    node = Node(KUBELET)
    assert node.memory(0, SignalState.OK).status is FALSE
    raised = node.memory(10, SignalState.SOFT)
    assert (raised.status, raised.since) == (TRUE, 10)


def test_a_condition_is_cleared_when_exactly_the_transition_period_has_passed() -> None:
    node = Node(KUBELET)
    node.memory(10, SignalState.HARD)
    assert node.memory(309.999, SignalState.OK).status is TRUE
    cleared = node.memory(310, SignalState.OK)
    assert (cleared.status, cleared.since) == (FALSE, 310)


def test_each_sighting_restarts_the_transition_period() -> None:
    node = Node(KUBELET)
    node.memory(0, SignalState.HARD)
    node.memory(200, SignalState.SOFT)
    assert node.memory(499, SignalState.OK).status is TRUE
    assert node.memory(500, SignalState.OK).status is FALSE


def test_each_signal_raises_its_own_condition_only() -> None:
    for signal in Signal:
        seen = Node(KUBELET).see(0, verdict(signal, SignalState.HARD))
        raised = [each for each, verdict in seen.items() if verdict.status is TRUE]
        assert raised == [SIGNAL_TABLE[signal].condition]


def test_one_of_several_signals_is_enough() -> None:
    node = Node(KUBELET)
    seen = node.see(0, verdict(Signal.NODEFS, SignalState.OK), verdict(Signal.IMAGEFS_INODES, SignalState.SOFT))
    assert seen[ConditionType.DISK_PRESSURE].status is TRUE


def test_a_signal_that_cannot_be_read_counts_as_not_observed_as_in_the_kubelet() -> None:
    node = Node(KUBELET)
    node.memory(0, SignalState.HARD)
    assert node.memory(299, SignalState.UNKNOWN).status is TRUE
    assert node.memory(300, SignalState.UNKNOWN).status is FALSE


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.booleans()), max_size=60))
def test_without_damping_the_status_is_the_kubelets_for_any_input(steps: list[tuple[int, bool]]) -> None:
    node = Node(KUBELET)
    now, last_seen = 0, -math.inf
    for pause, pressure in steps:
        now += pause
        if pressure:
            last_seen = now
        status = node.memory(now, SignalState.HARD if pressure else SignalState.OK).status
        assert status is (TRUE if now - last_seen < PERIOD else FALSE)


# --- unknown ----------------------------------------------------------------------------------------------------------


def test_nothing_is_claimed_before_the_first_sample() -> None:
    node = Node(PLAIN)
    assert node.memory(0, SignalState.UNKNOWN).status is UNKNOWN
    assert node.memory(1, SignalState.OK).status is FALSE


def test_a_condition_is_unknown_when_all_its_signals_have_been_for_longer_than_stale() -> None:
    node = Node(PLAIN)
    node.memory(0, SignalState.OK)
    assert node.memory(10, SignalState.UNKNOWN).status is FALSE
    assert node.memory(39.9, SignalState.UNKNOWN).status is FALSE
    lost = node.memory(40, SignalState.UNKNOWN)
    assert (lost.status, lost.message) == (UNKNOWN, "memory.available unknown: statvfs timed out")


def test_one_readable_signal_keeps_a_condition_known() -> None:
    node = Node(PLAIN)
    for at in (0, 60, 120):
        seen = node.see(at, verdict(Signal.NODEFS, SignalState.OK), verdict(Signal.IMAGEFS, SignalState.UNKNOWN))
    assert seen[ConditionType.DISK_PRESSURE].status is FALSE


def test_a_true_condition_stays_until_its_hold_ends_although_its_signals_are_unknown() -> None:
    node = Node(PLAIN)
    node.memory(0, SignalState.HARD)
    assert node.memory(100, SignalState.UNKNOWN).status is TRUE
    assert node.memory(299, SignalState.UNKNOWN).status is TRUE
    assert node.memory(300, SignalState.UNKNOWN).status is UNKNOWN


def test_one_failed_read_when_the_hold_ends_does_not_clear_a_condition() -> None:
    node = Node(PLAIN)
    node.memory(0, SignalState.HARD)
    node.memory(299, SignalState.OK)
    assert node.memory(300, SignalState.UNKNOWN).status is TRUE
    assert node.memory(301, SignalState.OK).status is FALSE


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1000), st.sampled_from([SignalState.OK, SignalState.UNKNOWN])), max_size=40))
def test_unknown_signals_never_raise_a_condition(steps: list[tuple[float, SignalState]]) -> None:
    node, now = Node(Config()), 0.0
    for pause, state in steps:
        now += pause
        assert node.memory(now, state).status is not TRUE


def test_a_condition_without_thresholds_is_false_with_a_reason() -> None:
    verdict = Node(PLAIN).see(0)[ConditionType.PID_PRESSURE]
    assert (verdict.status, verdict.message) == (FALSE, "no threshold configured")


# --- damping ----------------------------------------------------------------------------------------------------------


def flap(node: Node, *, times: int, every_s: float, start: float = 0.0) -> float:
    """Raise and release as fast as the period allows; the time of the last raise."""
    at = start
    for _ in range(times):
        at += every_s
        node.memory(at, SignalState.HARD)
        node.memory(at + 1, SignalState.OK)
    return at


SHORT = Config(eviction_pressure_transition_period_s=10.0, damping=DampingConfig(jitter=0.0))


def test_a_condition_that_does_not_flap_is_held_for_the_transition_period_alone() -> None:
    node = Node(SHORT)
    node.memory(0, SignalState.HARD)
    assert node.memory(10, SignalState.OK).status is FALSE


def released_at(node: Node, start: float, *, step_s: float = 1.0, give_up_s: float = 4000.0) -> float:
    at = start
    while node.memory(at, SignalState.OK).status is TRUE:
        at += step_s
        assert at < start + give_up_s
    return at


def test_a_condition_that_flaps_is_held_until_its_penalty_has_decayed() -> None:
    node = Node(SHORT)
    last = 0.0
    for _ in range(3):
        last = released_at(node, last + 10)
        node.memory(last, SignalState.HARD)
    # Three raises within half a minute: a penalty of nearly 3000, two half-lives above 750.
    assert 2 * 300.0 - 60 <= released_at(node, last + 1) - last <= 2 * 300.0


def test_the_penalty_holds_a_condition_no_longer_than_the_maximum() -> None:
    damping = DampingConfig(jitter=0.0, max_hold_s=120.0, half_life_s=3600.0)
    node = Node(SHORT._replace(damping=damping))
    last = 0.0
    for _ in range(4):
        last = released_at(node, last + 10)
        node.memory(last, SignalState.HARD)
    assert released_at(node, last + 1) - last == pytest.approx(120.0, abs=1.0)


def test_a_penalty_is_forgotten_with_time() -> None:
    node = Node(SHORT)
    last = 0.0
    for _ in range(3):
        last = released_at(node, last + 10)
        node.memory(last, SignalState.HARD)
    quiet = released_at(node, last + 1) + 3000.0
    node.memory(quiet, SignalState.HARD)
    assert released_at(node, quiet + 1) == quiet + 10


def test_nodes_that_were_raised_together_are_not_released_together() -> None:
    config = Config(eviction_pressure_transition_period_s=100.0)
    releases = []
    for number in range(200):
        node = Node(config, seed=f"node-{number}")
        node.memory(0, SignalState.HARD)
        releases.append(released_at(node, 99.0, step_s=0.5))
    assert min(releases) >= 100.0
    assert max(releases) <= 110.5
    # No half second takes more than a tenth of the fleet (a twentieth is the even share).
    assert max(releases.count(each) for each in set(releases)) <= 20


def test_jitter_is_drawn_at_each_raise_and_is_the_same_after_a_restart() -> None:
    config = Config(eviction_pressure_transition_period_s=1000.0, damping=DampingConfig(jitter=0.5, penalty=1.0))

    def two_releases() -> list[float]:
        node, start, holds = Node(config), 0.0, []
        for _ in range(2):
            node.memory(start, SignalState.HARD)
            until = released_at(node, start + 999.0)
            holds.append(until - start)
            start = until + 10.0
        return holds

    first, second = two_releases()
    assert first != second
    assert two_releases() == [first, second]


states = st.sampled_from([SignalState.OK, SignalState.SOFT, SignalState.HARD, SignalState.UNKNOWN])
dampings = st.builds(
    DampingConfig,
    penalty=st.floats(1, 1e6),
    suppress_above=st.floats(1, 1e6),
    release_below=st.floats(1, 1e6),
    half_life_s=st.floats(0.001, 1e5),
    max_hold_s=st.floats(0, 1e5),
    jitter=st.floats(0, 1),
    max_transitions_per_hour=st.integers(1, 12),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.5, 5.0, 40.0, 400.0]), states), min_size=20, max_size=150),
    dampings,
    st.sampled_from([0.001, 1.0, 300.0]),
)
def test_no_input_changes_a_condition_more_often_in_an_hour_than_configured(
    steps: list[tuple[float, SignalState]], damping: DampingConfig, period_s: float
) -> None:
    node = Node(Config(eviction_pressure_transition_period_s=period_s, damping=damping))
    now, changes = 0.0, []
    before: ConditionStatus | None = None
    for pause, state in steps:
        now += pause
        verdict = node.memory(now, state)
        if before is not None and verdict.status is not before:
            changes.append(now)
            assert verdict.since == now
        before = verdict.status
        # The bound never stands in the way of bad news.
        if state in (SignalState.SOFT, SignalState.HARD):
            assert verdict.status is TRUE
    limit = max(2, damping.max_transitions_per_hour)
    for index, start in enumerate(changes):
        assert sum(at < start + 3600.0 for at in changes[index:]) <= limit


def test_the_bound_is_reached_but_not_passed_by_the_worst_input() -> None:
    config = Config(
        eviction_pressure_transition_period_s=0.001,
        damping=DampingConfig(jitter=0.0, penalty=1.0, max_transitions_per_hour=6),
    )
    node, changes, before = Node(config), 0, UNKNOWN
    node.memory(0.0, SignalState.UNKNOWN)
    for step in range(1, 7200):
        status = node.memory(step * 0.5, SignalState.OK if step % 2 else SignalState.HARD).status
        changes += status is not before
        before = status
    assert changes == 6


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 600), states), max_size=40), dampings)
def test_a_held_condition_is_released_within_the_longest_hold(
    steps: list[tuple[float, SignalState]], damping: DampingConfig
) -> None:
    node, now = Node(Config(damping=damping)), 0.0
    for pause, state in steps:
        now += pause
        last = node.memory(now, state)
    assume(steps)
    assume(last.status is TRUE)
    longest = max(300.0 * (1 + damping.jitter), damping.max_hold_s, 3600.0) + 1e-6
    assert node.memory(now + longest, SignalState.OK).status is FALSE


# --- messages ---------------------------------------------------------------------------------------------------------


def test_a_conditions_message_has_the_numbers_of_its_change_and_does_not_follow_every_sample() -> None:
    node = Node(PLAIN)
    first = node.see(0, verdict(Signal.MEMORY, SignalState.SOFT, available=400 * MI))[ConditionType.MEMORY_PRESSURE]
    again = node.see(1, verdict(Signal.MEMORY, SignalState.SOFT, available=380 * MI))[ConditionType.MEMORY_PRESSURE]
    assert first.reason == "NodeAgentHasInsufficientMemory"
    assert first.message == again.message == "memory.available is 400Mi, below 500Mi (soft, 30s)"


def test_the_message_of_a_condition_changes_when_a_hard_threshold_is_met() -> None:
    node = Node(PLAIN)
    node.see(0, verdict(Signal.MEMORY, SignalState.SOFT, available=400 * MI))
    worse = node.see(1, verdict(Signal.MEMORY, SignalState.HARD, available=212 * MI))[ConditionType.MEMORY_PRESSURE]
    assert worse.message == "memory.available is 212Mi, below 300Mi (hard)"
    assert worse.since == 0
    better = node.see(2, verdict(Signal.MEMORY, SignalState.SOFT, available=400 * MI))[ConditionType.MEMORY_PRESSURE]
    assert better.message == worse.message


def test_the_state_is_plain_values_only() -> None:
    node = Node(PLAIN)
    node.memory(0, SignalState.HARD)
    for name, memory in node.state.conditions.items():
        assert isinstance(name, str)
        for value in memory:
            assert value is None or isinstance(value, str | float | int | bool | tuple)

"""The simulation makes the decisions of the policy, and takes its victims off the recording."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.analysis.simulation import Simulation, Simulator
from nodeagent.config.schema import Config
from nodeagent.model import ConditionType, NodeSnapshot, QOSClass, Signal
from nodeagent.policy import engine
from nodeagent.policy import state as policy_state
from tests.support.nodes import GI, MI, NOW, WALL, config, hard, snapshot, soft, view

HOG = 3 * GI


def leaking(second: int, *, at: float | None = None, gone_after: int | None = None) -> NodeSnapshot:
    """A node whose memory a pod takes: 20 MiB a second, from 1.5 GiB above the threshold of 1 GiB."""
    grown = second * 20 * MI
    pods = [view("web", 200 * MI), view("hog", HOG + grown, qos=QOSClass.BEST_EFFORT)]
    if gone_after is not None and second > gone_after:
        pods.pop()
        grown = -HOG
    when = NOW + second if at is None else at
    return snapshot(*pods, at=when, available={Signal.MEMORY: max(0, 5 * GI // 2 - grown)})


def simulate(samples: Iterable[NodeSnapshot], with_config: Config) -> Simulation:
    simulator = Simulator(with_config)
    for sample in samples:
        simulator.feed(sample)
    return simulator.result()


def run(with_config: Config, seconds: int, **more: int) -> Simulation:
    return simulate([leaking(second, **more) for second in range(seconds)], with_config)


def test_the_pod_that_takes_the_memory_is_evicted_once_and_its_usage_is_taken_off_later_samples() -> None:
    result = run(config(hard()), 120)
    [eviction] = result.evictions
    assert eviction.pod == "shop/hog"
    assert eviction.wall_time == WALL + 77
    assert eviction.threshold == GI
    assert eviction.available == 5 * GI // 2 - 77 * 20 * MI
    assert result.closest[Signal.MEMORY].available == eviction.available
    assert result.closest[Signal.MEMORY].wall_time == WALL + 77


def test_without_a_threshold_the_lowest_value_is_the_recorded_one() -> None:
    result = run(config(), 120)
    assert result.evictions == ()
    assert result.closest[Signal.MEMORY].available == 5 * GI // 2 - 119 * 20 * MI


def test_a_soft_victim_stays_for_its_grace_period() -> None:
    result = run(config(soft(value=2 * GI, grace_s=5.0)), 120)
    [eviction] = result.evictions
    assert (eviction.tier, eviction.grace_s) == ("soft", 30.0)
    assert result.closest[Signal.MEMORY].wall_time == eviction.wall_time + 29


def test_a_victim_that_the_recording_shows_gone_is_forgotten() -> None:
    result = run(config(hard()), 200, gone_after=90)
    assert [each.pod for each in result.evictions] == ["shop/hog"]
    assert result.closest[Signal.MEMORY].wall_time == WALL + 77


def test_time_under_pressure_is_counted_for_each_tier_and_condition() -> None:
    result = run(config(soft(value=2 * GI, grace_s=600.0), hard(value=GI)), 120)
    assert result.soft_s == 77 - 26
    assert result.hard_s == 1.0
    memory = result.conditions[ConditionType.MEMORY_PRESSURE]
    assert (memory.raises, memory.true_s) == (1, 119 - 26)
    assert result.conditions[ConditionType.DISK_PRESSURE].raises == 0
    assert result.recorded_s == 119


def test_a_gap_is_not_recorded_time() -> None:
    samples = [leaking(0), leaking(1), leaking(2, at=NOW + 500), leaking(3, at=NOW + 501)]
    result = simulate(samples, config(hard()))
    assert (result.recorded_s, result.gap_s) == (2.0, 499.0)


def after_boot(at: float, *, wall: float) -> NodeSnapshot:
    later = leaking(100)
    return later._replace(
        taken_at=at,
        wall_time=wall,
        observations={signal: each._replace(read_at=at) for signal, each in later.observations.items()},
        mem_available=later.mem_available._replace(read_at=at),
    )


def test_a_restart_of_the_machine_starts_a_state_of_its_own() -> None:
    result = simulate([leaking(0), leaking(1), after_boot(60.0, wall=WALL + 1000)], config(hard()))
    assert result.boots == 2
    assert result.samples == 3


def test_a_machine_that_seems_to_run_after_its_restart_was_restarted() -> None:
    """A Prometheus shows the last values until the next scrape."""
    samples = [leaking(0), leaking(15), leaking(30), after_boot(20.0, wall=WALL + 45), after_boot(35.0, wall=WALL + 60)]
    result = simulate(samples, config(hard()))
    assert (result.boots, result.samples, result.left_out) == (2, 5, 0)


def test_a_sample_that_was_recorded_twice_counts_once() -> None:
    result = simulate([leaking(0), leaking(1), leaking(1), leaking(0)], config(hard()))
    assert (result.boots, result.samples, result.left_out) == (1, 2, 2)


def test_a_sample_that_breaks_the_policy_is_listed_and_the_rest_goes_on() -> None:
    broken = leaking(1)._replace(pods=((None, None),))  # type: ignore[arg-type]
    result = simulate([leaking(0), broken, leaking(2)], config(hard()))
    assert len(result.trouble) == 1
    assert result.samples == 3


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.sampled_from((0.25, 1.0, 10.0)), st.integers(0, 130)), min_size=1, max_size=40))
def test_until_the_first_eviction_the_decisions_are_those_of_the_policy(steps: list[tuple[float, int]]) -> None:
    with_config = config(hard(), soft(value=2 * GI, grace_s=20.0))
    simulator = Simulator(with_config, pass_over=False)
    state, at = None, NOW
    for after_s, second in steps:
        at += after_s
        taken = leaking(second, at=at)
        state = state or policy_state.initial("replay", now=at)
        expected, state = engine.decide(taken, state, now=at, config=simulator.config, always_rank=False)
        assert simulator.feed(taken) == expected
        if expected.victims:
            break


@pytest.mark.parametrize("kubelet", [False, True])
def test_the_mode_of_the_configuration_changes_nothing(kubelet: bool) -> None:
    base = config(hard())
    dry = base._replace(ranking=base.ranking._replace(kubelet=kubelet))
    enforcing = dry._replace(mode=type(dry.mode).ENFORCE)
    assert run(dry, 120) == run(enforcing, 120)

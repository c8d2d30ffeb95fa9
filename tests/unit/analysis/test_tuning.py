"""False alarms, misses and lead time by the definitions of docs/replay.md."""

from collections.abc import Sequence

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.analysis import tuning
from nodeagent.analysis.tuning import Candidate, SignalTuning, Tuner
from nodeagent.config import load
from nodeagent.config.schema import Config
from nodeagent.model import Signal, Tier
from tests.support.nodes import GI, MI, NOW, WALL, config, hard, snapshot, soft

CONFIG = config(hard(value=GI), soft(value=2 * GI, grace_s=30.0))
FULL = 8 * GI


def tuned(
    levels: Sequence[int | None],
    *,
    with_config: Config = CONFIG,
    acts: tuple[float, ...] = (),
    kills: tuple[float, ...] = (),
    step_s: float = 1.0,
    within_s: float = 60.0,
) -> SignalTuning:
    """The memory of a recording with these levels, one each step."""
    tuner = Tuner(with_config, within_s=within_s)
    for at in acts:
        tuner.add_act(Signal.MEMORY, WALL + at, uid="leak")
    for at in kills:
        tuner.add_kill(WALL + at)
    for number, level in enumerate(levels):
        tuner.feed(snapshot(at=NOW + number * step_s, available={Signal.MEMORY: level}))
    return next(each for each in tuner.result().signals if each.signal is Signal.MEMORY)


def candidate(found: SignalTuning, level: int, grace_s: float) -> Candidate:
    return next(each for each in found.candidates if (each.level, each.grace_s) == (level, grace_s))


CALM = [FULL] * 100
DIP = [900 * MI] * 20


def test_a_level_that_recovers_on_its_own_is_a_false_alarm_of_every_grace_that_it_outlasts() -> None:
    found = tuned(CALM + DIP + CALM)
    assert candidate(found, GI, 0.0).false_alarms == 1
    assert candidate(found, GI, 10.0).false_alarms == 1
    assert candidate(found, GI, 30.0).alarms == 0
    assert candidate(found, GI, 0.0).met_s == 20.0
    assert candidate(found, GI, 0.0).missed is None
    assert found.exhaustions == ()


def test_an_exhaustion_within_an_alarm_is_caught_with_the_time_from_the_alarm_to_it() -> None:
    ramp = [FULL - second * 100 * MI for second in range(82)]
    found = tuned(CALM + ramp + CALM)
    exhausted = next(n for n, level in enumerate(ramp) if level <= 100 * MI)
    crossed = next(n for n, level in enumerate(ramp) if level < GI)
    at_once = candidate(found, GI, 0.0)
    assert (at_once.caught, at_once.missed, at_once.false_alarms) == (1, 0, 0)
    assert at_once.lead_s == (float(exhausted - crossed),)
    late = candidate(found, GI, 30.0)
    assert (late.caught, late.missed) == (0, 1)


def test_a_candidate_below_the_exhaustion_misses_it() -> None:
    small = config(hard(value=50 * MI))
    found = tuned([*CALM, 90 * MI, *CALM], with_config=small)
    assert candidate(found, 50 * MI, 0.0).missed == 1


def test_an_oom_kill_of_the_node_is_an_exhaustion_and_one_soon_after_belongs_to_it() -> None:
    found = tuned(CALM + DIP + CALM, kills=(110.0, 130.0, 190.0))
    assert [event.at for event in found.exhaustions] == [WALL + 110, WALL + 190]
    hit = candidate(found, GI, 0.0)
    assert (hit.caught, hit.missed, hit.false_alarms) == (1, 1, 0)
    assert hit.lead_s == (10.0,)


def test_an_alarm_that_the_agent_answered_is_no_false_alarm() -> None:
    found = tuned(CALM + DIP + CALM, acts=(105.0,))
    assert (candidate(found, GI, 0.0).answered, candidate(found, GI, 0.0).false_alarms) == (1, 0)
    assert found.hard is None
    assert "may have prevented one" in found.reason


def test_an_act_long_after_an_alarm_does_not_answer_it() -> None:
    found = tuned(CALM + DIP + CALM + CALM, acts=(250.0,))
    assert candidate(found, GI, 0.0).false_alarms == 1


def test_an_alarm_at_the_end_of_the_recording_is_open() -> None:
    found = tuned(CALM + DIP)
    assert (candidate(found, GI, 0.0).open, candidate(found, GI, 0.0).false_alarms) == (1, 0)


def test_a_gap_ends_an_episode_and_an_unknown_sample_does_not() -> None:
    assert candidate(tuned([*CALM, *DIP, None, *DIP, *CALM]), GI, 0.0).alarms == 1
    tuner = Tuner(CONFIG)
    for at in (0.0, 1.0, 2.0, 100.0, 101.0):
        tuner.feed(snapshot(at=NOW + at, available={Signal.MEMORY: 900 * MI}))
    found = next(each for each in tuner.result().signals if each.signal is Signal.MEMORY)
    assert candidate(found, GI, 0.0).alarms == 2
    assert candidate(found, GI, 0.0).met_s == 3.0


def test_of_those_that_miss_nothing_and_lead_long_enough_the_one_with_the_fewest_false_alarms_is_proposed() -> None:
    ramp = [FULL - second * 50 * MI for second in range(164)]
    found = tuned(CALM + [3 * GI] * 5 + CALM + ramp + CALM)
    assert found.hard is not None
    assert found.hard.missed == 0
    assert found.hard.false_alarms == 0
    assert (found.hard.shortest_lead_s or 0) >= tuning.LEAD_S[Tier.HARD]
    assert found.soft is not None
    assert found.soft.level > found.hard.level


def test_without_an_exhaustion_only_a_configured_threshold_with_false_alarms_is_replaced_by_a_lower_one() -> None:
    assert tuned(CALM).hard is None
    assert tuned(CALM).soft is None
    noisy = tuned(CALM + DIP + CALM)
    assert noisy.hard is not None
    assert noisy.hard.level < 900 * MI


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from((FULL, 3 * GI, GI, 900 * MI, 300 * MI, 50 * MI)), st.integers(1, 90)), max_size=12
    )
)
def test_the_counts_of_every_candidate_fit_together(parts: list[tuple[int, int]]) -> None:
    found = tuned([FULL, *[level for level, count in parts for _ in range(count)]])
    for each in found.candidates:
        assert each.false_alarms + each.answered + each.open <= each.alarms
        assert len(each.lead_s) == each.caught
        if found.exhaustions:
            assert each.missed == len(found.exhaustions) - each.caught
    for grace_s in tuning.GRACES_S:
        row = sorted([each for each in found.candidates if each.grace_s == grace_s], key=lambda each: each.level)
        assert [each.caught for each in row] == sorted(each.caught for each in row)


@pytest.mark.parametrize("levels", [CALM, CALM + DIP + CALM, [FULL - n * 50 * MI for n in range(164)]])
def test_the_stanza_is_a_valid_configuration_with_the_proposed_thresholds(levels: Sequence[int]) -> None:
    built_in = load.defaults().config
    tuner = Tuner(built_in)
    for number, level in enumerate(levels):
        tuner.feed(snapshot(at=NOW + number, available={Signal.MEMORY: level}))
    found = tuner.result()
    text = tuning.stanza(found, built_in)
    made = load.loads(text, name="stanza").config
    memory = next(each for each in found.signals if each.signal is Signal.MEMORY)
    values = {each.value.text for each in made.thresholds if each.signal is Signal.MEMORY}
    for proposed in (memory.hard, memory.soft):
        assert proposed is None or proposed.value.text in values
    kept = {each.signal for each in built_in.thresholds}
    assert {each.signal for each in made.thresholds} == kept
    assert set(yaml.safe_load(text)) == {
        "apiVersion",
        "kind",
        "evictionHard",
        "evictionSoft",
        "evictionSoftGracePeriod",
    }

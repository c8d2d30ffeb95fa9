"""The candidates of several nodes as one table."""

from collections.abc import Sequence

from nodeagent.analysis import fleet_tuning
from nodeagent.analysis.tuning import Candidate, SignalTuning, Tuner, Tuning
from nodeagent.model import Signal
from tests.support.nodes import GI, MI, NOW, config, hard, snapshot

CONFIG = config(hard(value=GI))
CALM = [8 * GI] * 100
DIP = [900 * MI] * 20
EMPTY = [50 * MI] * 20


def tuned(levels: Sequence[int | None]) -> Tuning:
    tuner = Tuner(CONFIG, within_s=60.0)
    for number, level in enumerate(levels):
        tuner.feed(snapshot(at=NOW + number, available={Signal.MEMORY: level}))
    return tuner.result()


def memory(*nodes: Sequence[int | None]) -> SignalTuning:
    found = fleet_tuning.combined([tuned(levels) for levels in nodes])
    return next(each for each in found.signals if each.signal is Signal.MEMORY)


def configured(found: SignalTuning) -> Candidate:
    return next(each for each in found.candidates if each.configured)


def test_an_exhaustion_of_one_node_answers_no_alarm_of_another() -> None:
    found = memory(CALM + DIP + CALM, CALM + EMPTY + CALM)
    both = configured(found)
    assert (both.alarms, both.false_alarms, both.caught, both.missed) == (2, 1, 1, 0)
    assert both.met_s == 40.0
    assert (found.samples, len(found.exhaustions), found.lowest) == (440, 1, 50 * MI)


def test_exhaustions_of_two_nodes_at_the_same_time_are_two() -> None:
    found = memory(CALM + EMPTY + CALM, CALM + EMPTY + CALM)
    assert len(found.exhaustions) == 2
    assert (configured(found).caught, configured(found).lead_s) == (2, (0.0, 0.0))


def test_without_an_exhaustion_of_any_node_misses_are_unknown() -> None:
    assert configured(memory(CALM, CALM + DIP + CALM)).missed is None


def test_a_signal_that_one_node_lacks_is_that_of_the_others() -> None:
    assert memory([None] * 50, CALM) == memory(CALM)


def test_without_samples_every_signal_is_unknown() -> None:
    assert fleet_tuning.combined([]).signals == ()

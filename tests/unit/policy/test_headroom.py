"""Headroom is what may be used before a threshold is met; the leading threshold determines a signal's state."""

import pytest

from nodeagent.model import MemoryModel, Observation, Signal, SignalState, SignalVerdict, Threshold, ThresholdVerdict
from nodeagent.policy import headroom
from tests.support.nodes import GI, MI, NOW, hard, snapshot, soft


def judged(threshold: Threshold, *, met: bool = False, value: int | None = GI) -> ThresholdVerdict:
    return ThresholdVerdict(threshold, value, met, None, False, "")


def signal_verdict(*thresholds: ThresholdVerdict) -> SignalVerdict:
    observation = snapshot().observations[Signal.MEMORY]
    return SignalVerdict(observation, SignalState.OK, thresholds)


def test_headroom_is_negative_below_the_threshold_and_unknown_without_a_sample_or_a_value() -> None:
    below = snapshot(available={Signal.MEMORY: GI - MI})
    assert headroom.threshold_headroom(below, judged(hard())) == -MI
    assert headroom.threshold_headroom(below, judged(hard(), value=None)) is None
    assert headroom.threshold_headroom(snapshot(available={Signal.MEMORY: None}), judged(hard())) is None


def test_a_memory_threshold_is_compared_with_the_number_of_its_memory_model() -> None:
    node = snapshot(available={Signal.MEMORY: 2 * GI})
    node = node._replace(mem_available=Observation(Signal.MEMORY, 3 * GI, 16 * GI, NOW, "test"))
    assert headroom.available_amount(node, hard()) == 2 * GI
    assert headroom.available_amount(node, hard(memory_model=MemoryModel.MEM_AVAILABLE)) == 3 * GI


@pytest.mark.parametrize(
    ("hard_met", "soft_met", "leading"),
    [(True, True, "hard"), (False, True, "soft"), (False, False, "soft")],
    ids=["a hard one that is met", "a soft one that is met", "the least headroom"],
)
def test_the_leading_threshold(hard_met: bool, soft_met: bool, leading: str) -> None:
    verdict = signal_verdict(judged(hard(), met=hard_met), judged(soft(), met=soft_met, value=2 * GI))
    found = headroom.leading_threshold(snapshot(), verdict)
    assert found is not None
    assert found.threshold.hard is (leading == "hard")


def test_without_a_known_headroom_no_threshold_leads() -> None:
    assert headroom.leading_threshold(snapshot(), signal_verdict()) is None
    assert headroom.leading_threshold(snapshot(), signal_verdict(judged(hard(), value=None))) is None

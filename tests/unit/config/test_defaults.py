"""nodeagent's built-in thresholds act before a kubelet with its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config import defaults, kubelet, load, resolve
from nodeagent.model import SIGNAL_TABLE, Signal, Unit
from nodeagent.policy import effective_thresholds

GIB = 2**30
CONFIGURED = tuple(defaults.EVICTION_HARD)
SMALLEST = {Unit.BYTES: 64 * 2**20, Unit.INODES: 1000, Unit.PIDS: 1000}


def test_every_signal_that_does_not_follow_another_has_a_hard_and_a_soft_threshold() -> None:
    following = {Signal.ALLOCATABLE_MEMORY, Signal.CONTAINERFS, Signal.CONTAINERFS_INODES}
    for hard in (True, False):
        assert {t.signal for t in load.defaults().config.thresholds if t.hard is hard} == set(Signal) - following


@pytest.mark.parametrize("signal", CONFIGURED)
@given(data=st.data())
def test_ours_is_met_earlier_than_a_kubelets_at_every_capacity(signal: Signal, data: st.DataObject) -> None:
    capacity = data.draw(st.integers(SMALLEST[SIGNAL_TABLE[signal].unit], 2**50))
    soft = resolve.resolve_amount(defaults.EVICTION_SOFT[signal], capacity=capacity)
    hard = resolve.resolve_amount(defaults.EVICTION_HARD[signal], capacity=capacity)
    theirs = defaults.KUBELET_EVICTION_HARD.get(signal)
    kubelets = 0 if theirs is None else resolve.resolve_amount(theirs, capacity=capacity)
    assert soft is not None
    assert hard is not None
    assert kubelets is not None
    assert soft > hard > kubelets


@given(st.dictionaries(st.sampled_from(list(Signal)), st.integers(SMALLEST[Unit.BYTES], 2**50)))
def test_the_comparison_finds_no_signal_on_which_a_default_kubelet_is_first(capacities: dict[Signal, int]) -> None:
    assert (
        kubelet.find_earlier_thresholds(
            load.defaults().config.thresholds, kubelet.read_settings().thresholds, capacities=capacities
        )
        == ()
    )


def test_the_defaults_are_what_the_documentation_states() -> None:
    stated = {(str(t.signal), t.value.text, t.grace_period_s): None for t in load.defaults().config.thresholds}
    assert list(stated) == [
        ("memory.available", "2%, at least 200Mi, at most 1Gi", 0.0),
        ("memory.available", "3%, at least 300Mi, at most 1536Mi", 30.0),
        ("nodefs.available", "12%", 0.0),
        ("nodefs.available", "15%", 120.0),
        ("nodefs.inodesFree", "7%", 0.0),
        ("nodefs.inodesFree", "10%", 120.0),
        ("imagefs.available", "17%", 0.0),
        ("imagefs.available", "20%", 120.0),
        ("imagefs.inodesFree", "7%", 0.0),
        ("imagefs.inodesFree", "10%", 120.0),
        ("pid.available", "5%", 0.0),
        ("pid.available", "10%", 30.0),
    ]


@pytest.mark.parametrize(
    ("capacity", "hard", "soft"),
    [
        (1 * GIB, 200, 300),
        (int(2.85 * GIB), 200, 300),
        (8 * GIB, 200, 300),
        (10 * GIB, 204, 307),
        (16 * GIB, 327, 491),
        (32 * GIB, 655, 983),
        (64 * GIB, 1024, 1536),
        (256 * GIB, 1024, 1536),
        (4096 * GIB, 1024, 1536),
    ],
)
def test_memory_thresholds_follow_the_capacity_between_two_bounds(capacity: int, hard: int, soft: int) -> None:
    amounts = (defaults.EVICTION_HARD[Signal.MEMORY], defaults.EVICTION_SOFT[Signal.MEMORY])
    values = [resolve.resolve_amount(each, capacity=capacity) for each in amounts]
    assert [(value or 0) // 2**20 for value in values] == [hard, soft]


def test_a_few_more_kilobytes_of_memory_do_not_change_the_identity_of_a_threshold() -> None:
    thresholds = load.defaults().config.thresholds
    assert len({effective_thresholds.identity(each) for each in thresholds}) == len(thresholds)
    memory = thresholds[0]
    values = {resolve.resolve_threshold(memory, capacity=16 * GIB + kib * 1024) for kib in (0, 64)}
    assert len(values) == 2, "the value moves with MemTotal; the identity is that of the configured value"

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nodeagent.config.schema import Config, RankingConfig, SamplingConfig, StartupConfig
from nodeagent.model import (
    DiskLayout,
    MemoryModel,
    Observation,
    Signal,
    SignalState,
    Stall,
    StallRequirement,
    StallScope,
    Threshold,
)
from nodeagent.policy.effective_thresholds import effective, identity
from nodeagent.policy.streams import unusable
from nodeagent.policy.thresholds import ThresholdState, judge, observe_only
from tests.support.threshold_samples import (
    EAGER,
    GI,
    KUBELET,
    MI,
    Judge,
    hard,
    percent,
    quantity,
    sample,
    snapshot,
    soft,
)

# --- which thresholds there are ---------------------------------------------------------------------------------------


def test_hard_memory_thresholds_also_apply_to_allocatable_memory_with_the_same_value_and_reclaim() -> None:
    memory = hard(Signal.MEMORY, 300 * MI, reclaim=50 * MI)
    config = Config(thresholds=(memory, soft(Signal.MEMORY, 500 * MI, grace_s=30)))
    copies = [each for each in effective(config, DiskLayout.UNKNOWN) if each.signal is Signal.ALLOCATABLE_MEMORY]
    assert copies == [memory._replace(signal=Signal.ALLOCATABLE_MEMORY)]


def test_a_soft_threshold_without_grace_is_hard_and_applies_to_allocatable_memory() -> None:
    config = Config(thresholds=(soft(Signal.MEMORY, 500 * MI, grace_s=0),))
    assert [each.signal for each in effective(config, DiskLayout.UNKNOWN)] == [Signal.MEMORY, Signal.ALLOCATABLE_MEMORY]


def test_without_node_allocatable_enforcement_there_is_no_allocatable_threshold() -> None:
    config = Config(thresholds=(hard(Signal.MEMORY, MI),), enforce_node_allocatable=False)
    assert effective(config, DiskLayout.SINGLE) == config.thresholds


@pytest.mark.parametrize("model", MemoryModel)
def test_the_allocatable_copy_uses_the_memory_model_of_the_original(model: MemoryModel) -> None:
    original = hard(Signal.MEMORY, MI)._replace(memory_model=model)
    copy = effective(Config(thresholds=(original,)), DiskLayout.UNKNOWN)[1]
    assert copy == original._replace(signal=Signal.ALLOCATABLE_MEMORY)


DISKS = (
    hard(Signal.NODEFS, percent(10)),
    soft(Signal.NODEFS, percent(15), grace_s=60),
    hard(Signal.NODEFS_INODES, percent(5)),
    hard(Signal.IMAGEFS, percent(20), reclaim=GI),
    hard(Signal.IMAGEFS_INODES, percent(6)),
)


@pytest.mark.parametrize("layout", [DiskLayout.SINGLE, DiskLayout.SPLIT])
def test_containerfs_follows_nodefs_when_writable_layers_are_there(layout: DiskLayout) -> None:
    added = effective(Config(thresholds=DISKS), layout)[len(DISKS) :]
    assert added == (
        hard(Signal.CONTAINERFS, percent(10)),
        soft(Signal.CONTAINERFS, percent(15), grace_s=60),
        hard(Signal.CONTAINERFS_INODES, percent(5)),
    )


def test_containerfs_follows_imagefs_when_that_is_dedicated() -> None:
    added = effective(Config(thresholds=DISKS), DiskLayout.DEDICATED_IMAGEFS)[len(DISKS) :]
    assert added == (
        hard(Signal.CONTAINERFS, percent(20), reclaim=GI),
        hard(Signal.CONTAINERFS_INODES, percent(6)),
    )


def test_containerfs_thresholds_of_the_user_are_ignored() -> None:
    config = Config(thresholds=(*DISKS, hard(Signal.CONTAINERFS, percent(99))))
    assert effective(config, DiskLayout.SINGLE) == effective(Config(thresholds=DISKS), DiskLayout.SINGLE)
    assert effective(config, DiskLayout.UNKNOWN) == DISKS


def test_containerfs_is_judged_from_the_first_sample() -> None:
    judged = Judge(*effective(Config(thresholds=DISKS), DiskLayout.SINGLE), config=KUBELET)
    low = sample(Signal.CONTAINERFS, 0, read_at=1.0)
    assert judged.see(1.0, snapshot(1.0, low))[Signal.CONTAINERFS].thresholds[0].due


def test_identity_is_signal_model_grace_and_value_but_not_reclaim() -> None:
    one = soft(Signal.MEMORY, 100, grace_s=30)
    assert identity(one) == identity(one._replace(min_reclaim=quantity(5)))
    assert identity(one) == identity(one._replace(value=one.value._replace(text="0.1k")))
    others = [
        one._replace(signal=Signal.PID),
        one._replace(grace_period_s=31.0),
        one._replace(value=quantity(101)),
        one._replace(value=percent(100)),
        one._replace(memory_model=MemoryModel.MEM_AVAILABLE),
    ]
    assert len({identity(each) for each in (one, *others)}) == 6


# --- the kubelet's sync, sentence by sentence -------------------------------------------------------------------------


def test_a_threshold_is_met_below_its_value_and_equality_is_healthy() -> None:
    judged = Judge(hard(Signal.MEMORY, 300), config=KUBELET)
    assert not judged.memory(1, 301).met
    assert not judged.memory(2, 300).met
    assert judged.memory(3, 299).due


def test_a_percentage_is_computed_from_the_capacity_of_each_sample() -> None:
    judged = Judge(hard(Signal.MEMORY, percent(70)), config=KUBELET)
    seen = [sample(Signal.MEMORY, 699, capacity=capacity, read_at=at) for at, capacity in ((1.0, 1000), (2.0, 1010))]
    verdicts = [judged.see(each.read_at, snapshot(each.read_at, each))[Signal.MEMORY].thresholds[0] for each in seen]
    assert [(each.value, each.met) for each in verdicts] == [(699, False), (706, True)]


def test_a_soft_threshold_is_due_when_it_has_been_met_for_exactly_its_grace_period() -> None:
    judged = Judge(soft(Signal.MEMORY, 300, grace_s=30), config=KUBELET)
    first = judged.memory(100, 200)
    assert (first.met, first.due, first.active_since) == (True, False, 100)
    assert not judged.memory(129.999, 200).due
    last = judged.memory(130, 200)
    assert last.due
    assert last.active_since == 100


def test_exactly_the_grace_period_counts_although_the_clock_is_a_binary_fraction() -> None:
    judged = Judge(soft(Signal.MEMORY, 300, grace_s=0.3), config=KUBELET)
    judged.memory(100.1, 200)
    assert judged.memory(100.4, 200).due  # 100.4 - 100.1 is 0.30000000000001137, 0.7 - 0.4 less than 0.3
    judged = Judge(soft(Signal.MEMORY, 300, grace_s=0.3), config=KUBELET)
    judged.memory(0.4, 200)
    assert judged.memory(0.7, 200).due


def test_a_soft_threshold_that_clears_for_one_sample_starts_a_new_grace() -> None:
    judged = Judge(soft(Signal.MEMORY, 300, grace_s=30), config=KUBELET)
    judged.memory(0, 200)
    assert judged.memory(20, 300).active_since is None
    assert judged.memory(25, 200).active_since == 25
    assert not judged.memory(50, 200).due
    assert judged.memory(55, 200).due


def test_a_soft_threshold_with_a_grace_of_0s_acts_at_once() -> None:
    assert Judge(soft(Signal.MEMORY, 300, grace_s=0), config=KUBELET).memory(1, 200).due


def test_a_threshold_once_met_stays_met_until_minimum_reclaim_is_regained() -> None:
    judged = Judge(hard(Signal.MEMORY, 300, reclaim=50), config=KUBELET)
    assert not judged.memory(1, 320).met
    assert judged.memory(2, 299).due
    assert judged.memory(3, 349).due
    assert not judged.memory(4, 350).met
    assert not judged.memory(5, 320).met


def test_minimum_reclaim_makes_a_threshold_sticky_only_after_its_grace_period() -> None:
    judged = Judge(soft(Signal.MEMORY, 300, grace_s=30, reclaim=50), config=KUBELET)
    judged.memory(0, 200)
    assert not judged.memory(29, 320).met
    judged.memory(30, 200)
    judged.memory(60, 200)
    sticky = judged.memory(61, 349)
    assert (sticky.met, sticky.due, sticky.active_since) == (True, True, 30)


def test_minimum_reclaim_may_be_a_percentage_of_the_capacity() -> None:
    judged = Judge(hard(Signal.MEMORY, 300 * MI, reclaim=percent(50)), config=KUBELET)
    judged.memory(1, 299 * MI)
    assert judged.memory(2, 4 * GI + 299 * MI).met
    assert not judged.memory(3, 4 * GI + 300 * MI).met


def test_a_threshold_acts_only_on_a_sample_newer_than_the_previous_judgements() -> None:
    judged = Judge(hard(Signal.MEMORY, 300), config=KUBELET)
    assert judged.memory(10, 200, read_at=9).due
    again = judged.memory(11, 200, read_at=9)
    assert again.met
    assert again.not_due_reason == "no new sample since the last judgement"
    assert judged.memory(12, 200, read_at=9.001).due


def test_thresholds_of_one_signal_have_their_own_times() -> None:
    judged = Judge(hard(Signal.MEMORY, 300), soft(Signal.MEMORY, 500, grace_s=10), config=KUBELET)

    def see(at: float, available: int) -> list[tuple[bool, bool]]:
        shot = snapshot(at, sample(Signal.MEMORY, available, read_at=at))
        return [(each.met, each.due) for each in judged.see(at, shot)[Signal.MEMORY].thresholds]

    assert see(0, 400) == [(False, False), (True, False)]
    assert see(5, 200) == [(True, True), (True, False)]
    assert see(10, 400) == [(False, False), (True, True)]


def test_a_threshold_that_is_removed_and_configured_again_starts_a_new_grace() -> None:
    judged = Judge(soft(Signal.MEMORY, 300, grace_s=30), config=KUBELET)
    judged.memory(0, 200)
    judged.thresholds = (soft(Signal.MEMORY, 301, grace_s=30),)
    assert judged.memory(40, 200).active_since == 40


# --- unknown is never pressure ----------------------------------------------------------------------------------------


def test_one_failed_read_neither_acts_nor_counts_nor_costs_the_grace() -> None:
    judged = Judge(soft(Signal.MEMORY, 300, grace_s=30))
    judged.memory(100, 200)
    judged.memory(110, 200)
    missing = judged.memory(115, None)
    assert (missing.met, missing.due, missing.active_since) == (False, False, None)
    assert missing.not_due_reason == "unknown: unreadable"
    # Nothing is known between the good samples at 110 and 120: those 10 s are no part of the grace.
    assert judged.memory(120, 200).active_since == 110
    assert not judged.memory(139.9, 200).due
    assert judged.memory(140, 200).due


def test_a_threshold_that_is_unknown_for_too_long_is_forgotten() -> None:
    judged = Judge(soft(Signal.MEMORY, 300, grace_s=60))
    for at in (0, 10, 20, 30):
        judged.memory(at, 200)
    for at in (40, 50, 60, 70):
        judged.memory(at, None)
    assert judged.memory(80, 200).active_since == 80


def test_a_long_gap_between_samples_is_as_unknown_as_a_failed_read() -> None:
    judged = Judge(soft(Signal.MEMORY, 300, grace_s=60))
    judged.memory(0, 200)
    woken = judged.memory(3600, 200)
    assert (woken.active_since, woken.due) == (3600, False)


def test_an_unknown_sample_does_not_end_the_stickiness_of_minimum_reclaim() -> None:
    judged = Judge(hard(Signal.MEMORY, 300, reclaim=50))
    judged.memory(1, 200)
    judged.memory(2, None)
    assert judged.memory(3, 349).due
    assert not judged.memory(4, 350).met


def test_a_threshold_is_forgotten_at_the_first_unknown_sample_as_in_the_kubelet() -> None:
    judged = Judge(soft(Signal.MEMORY, 300, grace_s=30), config=KUBELET)
    judged.memory(0, 200)
    judged.memory(10, None)
    assert judged.memory(20, 200).active_since == 20


BAD = {
    "missing": (None, 8 * GI),
    "a float": (1.0, 8 * GI),
    "NaN": (math.nan, 8 * GI),
    "a string": ("1", 8 * GI),
    "a bool": (True, 8 * GI),
    "negative": (-1, 8 * GI),
    "more than there is": (8 * GI + 1, 8 * GI),
    "of nothing": (0, 0),
    "of a negative capacity": (-2, -1),
    "of an unknown capacity": (1, None),
    "of NaN": (1, math.nan),
    "of an absurd capacity": (1, (1 << 62) + 1),
}


@pytest.mark.parametrize("what", BAD)
def test_a_value_that_cannot_be_true_is_unknown_and_never_due(what: str) -> None:
    available, capacity = BAD[what]
    seen = Observation(Signal.NODEFS, available, capacity, 5.0, "test")  # type: ignore[arg-type]
    judged = Judge(hard(Signal.NODEFS, 1 * GI), hard(Signal.NODEFS, percent(100)))
    verdict = judged.see(5.0, snapshot(5.0, seen))[Signal.NODEFS]
    assert verdict.state is SignalState.UNKNOWN
    assert verdict.observation.available is None
    assert verdict.observation.reason
    assert verdict.trend is None
    assert not any(each.met or each.due for each in verdict.thresholds)
    assert all(each.not_due_reason for each in verdict.thresholds)


@pytest.mark.parametrize(
    ("read_at", "believed"),
    [
        (70.0, True),
        (69.9, False),
        (100.5, True),
        (101.5, False),
        (math.nan, False),
        (math.inf, False),
        (-math.inf, False),
    ],
)
def test_a_sample_is_believed_for_the_configured_age_and_never_from_the_future(read_at: float, believed: bool) -> None:
    judged = Judge(hard(Signal.MEMORY, 300))
    assert judged.memory(100.0, 200, read_at=read_at).due is believed


def test_pids_may_be_overdrawn() -> None:
    judged = Judge(hard(Signal.PID, 100))
    seen = sample(Signal.PID, -5, capacity=32768, read_at=1.0)
    assert judged.see(1.0, snapshot(1.0, seen))[Signal.PID].thresholds[0].due


def test_a_percentage_that_is_no_number_is_never_met() -> None:
    judged = Judge(hard(Signal.MEMORY, percent(math.nan)))
    verdict = judged.memory(1, 0)
    assert (verdict.value, verdict.met) == (None, False)


def test_a_sample_missing_from_the_snapshot_is_unknown() -> None:
    judged = Judge(hard(Signal.PID, 100), hard(Signal.MEMORY, 100))
    verdicts = judged.see(1.0, snapshot(1.0)._replace(observations={}))
    assert {each.state for each in verdicts.values()} == {SignalState.UNKNOWN}
    assert verdicts[Signal.MEMORY].observation.reason == "not sampled"


def test_a_sample_time_from_before_a_reboot_does_not_make_new_samples_old() -> None:
    judged = Judge(hard(Signal.MEMORY, 300))
    judged.memory(1_000_000, 200)
    assert judged.memory(60, 200).due


# --- observing only ---------------------------------------------------------------------------------------------------


def test_nothing_acts_before_enough_fresh_samples_in_a_row() -> None:
    judged = Judge(hard(Signal.MEMORY, 300), config=Config(startup=StartupConfig(fresh_samples=3)))
    assert judged.memory(1, 200).not_due_reason == "observing only: 1 of 3 fresh samples since the start"
    assert not judged.memory(2, 200).due
    assert not judged.memory(3, None).due
    assert not judged.memory(4, 200).due
    assert not judged.memory(5, 200).due
    assert judged.memory(6, 200).due


def test_the_same_sample_seen_again_is_not_a_fresh_one() -> None:
    judged = Judge(hard(Signal.MEMORY, 300), config=Config(startup=StartupConfig(fresh_samples=2)))
    judged.memory(1, 200, read_at=1)
    judged.memory(2, 200, read_at=1)
    assert "1 of 2" in judged.memory(3, 200, read_at=1).not_due_reason


def test_a_signal_that_cannot_be_read_does_not_keep_the_others_from_acting() -> None:
    judged = Judge(hard(Signal.MEMORY, 300), hard(Signal.ALLOCATABLE_MEMORY, 300), config=Config())
    for at in (1.0, 2.0, 3.0):
        shot = snapshot(at, sample(Signal.MEMORY, 200, read_at=at), sample(Signal.ALLOCATABLE_MEMORY, None, read_at=at))
        verdicts = judged.see(at, shot)
    assert verdicts[Signal.MEMORY].thresholds[0].due


def test_after_a_restart_the_grace_goes_on_but_only_observed() -> None:
    config = Config(startup=StartupConfig(fresh_samples=2))
    judged = Judge(soft(Signal.MEMORY, 300, grace_s=10), config=config)
    for at in (0, 5, 10):
        last = judged.memory(at, 200)
    assert last.due
    judged.state = observe_only(judged.state)
    assert not judged.memory(12, 200).due
    resumed = judged.memory(13, 200)
    assert (resumed.due, resumed.active_since) == (True, 0)


# --- second keys ------------------------------------------------------------------------------------------------------

FULL = StallRequirement(StallScope.NODE, "memory", "full", "avg10", 10.0)


def psi(full_avg10: float | None, *, read_at: float) -> Stall:
    return Stall(StallScope.NODE, "memory", 50.0, 50.0, 0, full_avg10, full_avg10, 0, read_at)


def test_a_threshold_that_requires_a_stall_acts_only_while_both_are_seen() -> None:
    judged = Judge(hard(Signal.MEMORY, 300)._replace(require_stall=FULL))

    def see(at: float, available: int, stalls: tuple[Stall, ...]) -> tuple[bool, bool]:
        shot = snapshot(at, sample(Signal.MEMORY, available, read_at=at), stalls=stalls)
        verdict = judged.see(at, shot)[Signal.MEMORY].thresholds[0]
        return verdict.met, verdict.due

    assert see(1, 200, (psi(9.9, read_at=1),)) == (True, False)
    assert see(2, 200, (psi(10.0, read_at=2),)) == (True, True)
    assert see(3, 300, (psi(99.0, read_at=3),)) == (False, False)


def test_a_threshold_with_an_unknown_stall_is_not_due_and_has_a_reason() -> None:
    judged = Judge(hard(Signal.MEMORY, 300)._replace(require_stall=FULL))
    verdict = judged.memory(1, 200)
    assert verdict.met
    assert verdict.not_due_reason == "memory full avg10 of node unknown: this node reports no such PSI"


def ramp(judged: Judge, levels: list[int], *, start: float = 100.0) -> list[tuple[bool, bool]]:
    verdicts = [judged.memory(start + index, level) for index, level in enumerate(levels)]
    return [(each.met, each.due) for each in verdicts]


def test_near_exhaustion_ends_the_grace_of_a_soft_threshold_but_never_stands_in_for_its_level() -> None:
    threshold = soft(Signal.MEMORY, 1000, grace_s=600)._replace(exhaustion_within_s=10.0)
    falling = [1800, 1600, 1400, 1200, 1000, 800]  # exhausted in 4 s at the last one
    assert ramp(Judge(threshold), falling) == [(False, False)] * 5 + [(True, True)]
    assert ramp(Judge(threshold._replace(exhaustion_within_s=None)), falling)[-1] == (True, False)


def test_a_slow_leak_below_the_level_waits_for_the_grace() -> None:
    threshold = soft(Signal.MEMORY, 1000, grace_s=4)._replace(exhaustion_within_s=10.0)
    assert ramp(Judge(threshold), [900, 899, 898, 897, 896]) == [(True, False)] * 4 + [(True, True)]


def test_noise_below_the_level_does_not_end_the_grace() -> None:
    threshold = soft(Signal.MEMORY, 1000, grace_s=600)._replace(exhaustion_within_s=60.0)
    noisy = [500, 480, 510, 470, 505, 490, 500, 465, 500, 480]
    assert not any(due for _, due in ramp(Judge(threshold), noisy))


# --- reports ----------------------------------------------------------------------------------------------------------


def test_a_signal_is_soft_while_the_grace_of_its_soft_threshold_still_runs() -> None:
    judged = Judge(soft(Signal.MEMORY, 500, grace_s=30), hard(Signal.MEMORY, 300))
    states = [
        judged.see(at, snapshot(at, sample(Signal.MEMORY, available, read_at=at)))[Signal.MEMORY].state
        for at, available in ((1.0, 600), (2.0, 400), (3.0, 200))
    ]
    assert states == [SignalState.OK, SignalState.SOFT, SignalState.HARD]


def test_there_is_one_verdict_for_each_signal_in_order_with_or_without_thresholds() -> None:
    verdicts, _ = judge(snapshot(1.0), ThresholdState(), now=1.0, config=EAGER, thresholds=())
    assert [each.signal for each in verdicts] == list(Signal)
    assert {each.state for each in verdicts} == {SignalState.OK}


def test_each_threshold_uses_its_own_memory_model() -> None:
    by_kernel = hard(Signal.MEMORY, 300)._replace(memory_model=MemoryModel.MEM_AVAILABLE)
    judged = Judge(hard(Signal.MEMORY, 300), by_kernel)
    kernel = sample(Signal.MEMORY, 200, read_at=1.0)
    shot = snapshot(1.0, sample(Signal.MEMORY, 400, read_at=1.0), mem_available=kernel)
    verdict = judged.see(1.0, shot)[Signal.MEMORY]
    assert [each.met for each in verdict.thresholds] == [False, True]
    assert verdict.observation.available == 400
    assert Judge(by_kernel).see(1.0, shot)[Signal.MEMORY].observation.available == 200


def test_the_trend_has_the_time_to_the_nearest_threshold_that_is_not_met() -> None:
    judged = Judge(soft(Signal.MEMORY, 1000, grace_s=60), hard(Signal.MEMORY, 500))
    for index, level in enumerate([1500, 1300, 1100, 900]):
        at = 1.0 + index
        heading = judged.see(at, snapshot(at, sample(Signal.MEMORY, level, read_at=at)))[Signal.MEMORY].trend
    assert heading is not None
    assert heading.rate_per_s == -200
    assert heading.to_threshold_s == 2.0
    assert heading.to_exhaustion_s == 4.5


# --- against an independent reading of the contract -------------------------------------------------------------------


class Sync:
    """KUBELET-CONTRACT, one sync, steps 5 to 11, written down as it stands there: sets of thresholds by number."""

    def __init__(self, thresholds: list[Threshold]) -> None:
        self.thresholds = thresholds
        self.first_observed: dict[int, float] = {}
        self.met_prev: set[int] = set()
        self.last_sample: dict[Signal, float] = {}

    def step(self, seen: dict[Signal, Observation], now: float) -> tuple[set[int], set[int]]:
        """(active, acting)"""
        present = {signal: each for signal, each in seen.items() if each.available is not None}

        def below(index: int, *, with_reclaim: bool) -> bool:
            threshold = self.thresholds[index]
            found = present.get(threshold.signal)
            if found is None or found.available is None:
                return False
            limit = threshold.value.quantity or 0
            if with_reclaim and threshold.min_reclaim is not None:
                limit += threshold.min_reclaim.quantity or 0
            return limit > found.available

        active = {index for index in range(len(self.thresholds)) if below(index, with_reclaim=False)}
        active |= {index for index in self.met_prev if below(index, with_reclaim=True)}
        self.first_observed = {index: self.first_observed.get(index, now) for index in active}
        self.met_prev = {
            index for index in active if now - self.first_observed[index] >= self.thresholds[index].grace_period_s
        }
        acting = set()
        for index in self.met_prev:
            signal = self.thresholds[index].signal
            last = self.last_sample.get(signal)
            if last is None or present[signal].read_at > last:
                acting.add(index)
        self.last_sample = {signal: each.read_at for signal, each in present.items()}
        return active, acting


class KubeletMachine(RuleBasedStateMachine):
    """Two signals with three thresholds each, driven at random, judged by us and by the contract."""

    def __init__(self) -> None:
        super().__init__()
        self.thresholds = [
            each
            for signal in (Signal.MEMORY, Signal.NODEFS)
            for each in (
                hard(signal, 30, reclaim=10),
                soft(signal, 50, grace_s=20.0, reclaim=15),
                soft(signal, 70, grace_s=0.0),
            )
        ]
        self.contract = Sync(self.thresholds)
        self.ours = Judge(*self.thresholds, config=KUBELET)
        self.now = 1000.0
        self.read_at = 1000.0
        self.available: dict[Signal, int | None] = {Signal.MEMORY: 100, Signal.NODEFS: 100}
        self.outcome: tuple[set[int], set[int]] | None = None
        self.expected: tuple[set[int], set[int]] | None = None

    @rule(signal=st.sampled_from([Signal.MEMORY, Signal.NODEFS]), to=st.one_of(st.none(), st.integers(0, 100)))
    def change(self, signal: Signal, to: int | None) -> None:
        self.available[signal] = to

    @rule(seconds=st.sampled_from([0, 1, 5, 10, 20]), fresh=st.booleans())
    def sync(self, seconds: int, fresh: bool) -> None:
        self.now += seconds
        if fresh:
            self.read_at = self.now
        if self.now - self.read_at > 30:  # older is unknown to us; the kubelet has no such age
            self.read_at = self.now
        seen = {
            signal: sample(signal, level, capacity=100, read_at=self.read_at)
            for signal, level in self.available.items()
        }
        self.expected = self.contract.step(seen, self.now)
        verdicts = self.ours.see(self.now, snapshot(self.now, *seen.values()))
        flat = [*verdicts[Signal.MEMORY].thresholds, *verdicts[Signal.NODEFS].thresholds]
        assert [each.threshold for each in flat] == self.thresholds
        self.outcome = (
            {index for index, each in enumerate(flat) if each.met},
            {index for index, each in enumerate(flat) if each.due},
        )
        for index, each in enumerate(flat):
            assert each.active_since == self.contract.first_observed.get(index)

    @precondition(lambda self: self.outcome is not None)
    @invariant()
    def verdicts_match_the_contract(self) -> None:
        assert self.outcome == self.expected


TestKubeletMachine = KubeletMachine.TestCase
TestKubeletMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# --- properties -------------------------------------------------------------------------------------------------------

anything = st.one_of(
    st.none(), st.integers(), st.floats(), st.sampled_from([True, "1", math.nan, -1, 1 << 62, 1 << 63, 1 << 70])
)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(anything, anything, st.floats()), min_size=1, max_size=8),
    st.sampled_from(list(Signal)),
    st.booleans(),
)
def test_a_due_threshold_always_rests_on_a_sample_that_can_be_true(
    fields: list[tuple[object, object, float]], signal: Signal, kubelet: bool
) -> None:
    config = Config(ranking=RankingConfig(kubelet=kubelet), startup=StartupConfig(fresh_samples=1))
    judged = Judge(hard(signal, percent(100)), soft(signal, 1 << 61, grace_s=1e-9), config=config)
    for index, (available, capacity, read_at) in enumerate(fields):
        now = 1000.0 + index
        seen = Observation(signal, available, capacity, read_at, "test")  # type: ignore[arg-type]
        verdict = judged.see(now, snapshot(now, seen))[signal]
        if any(each.due or each.met for each in verdict.thresholds):
            assert type(available) is int
            assert type(capacity) is int
            assert (0 if signal is not Signal.PID else -(1 << 62)) <= available <= capacity <= 1 << 62
            assert now - 30.0 <= read_at <= now + 1.0
        else:
            assert verdict.state in (SignalState.OK, SignalState.UNKNOWN)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 60), st.one_of(st.none(), st.integers(0, 100))), min_size=1, max_size=40))
def test_a_soft_threshold_is_due_only_after_its_grace_of_known_pressure(steps: list[tuple[float, int | None]]) -> None:
    judged = Judge(soft(Signal.MEMORY, 50, grace_s=30.0))
    now, known_low, previous_low = 0.0, 0.0, False
    for pause, available in steps:
        now += pause
        verdict = judged.memory(now, available)
        low = available is not None and available < 50
        if low and previous_low:
            known_low += pause
        if available is not None and not low:
            known_low = 0.0
        previous_low = low
        if verdict.due:
            assert known_low >= 30.0 - 1e-6


def judged_every_way(build: Callable[[], Judge], samples: list[int | None]) -> list[list[bool]]:
    whole = build()
    without_restart = [whole.memory(index, level).due for index, level in enumerate(samples)]
    passed_on = build()
    with_restarts = []
    for index, level in enumerate(samples):
        passed_on.state = ThresholdState(*passed_on.state)
        with_restarts.append(passed_on.memory(index, level).due)
    return [without_restart, with_restarts]


@given(st.lists(st.one_of(st.none(), st.integers(0, 100)), max_size=20))
def test_judging_is_a_function_of_its_arguments(samples: list[int | None]) -> None:
    def build() -> Judge:
        return Judge(soft(Signal.MEMORY, 50, grace_s=3.0, reclaim=10))

    one, other = judged_every_way(build, samples)
    assert one == other


def test_the_reason_for_an_unusable_sample_has_the_numbers() -> None:
    old = sample(Signal.MEMORY, 1, read_at=50.0)
    assert unusable(old, now=100.0, stale_after_s=30.0) == "its sample is 50.0s old, limit 30s"
    too_much = sample(Signal.NODEFS, 11, capacity=10, read_at=100.0)
    assert unusable(too_much, now=100.0, stale_after_s=30.0) == "11 available of 10 is implausible"
    assert unusable(sample(Signal.MEMORY, 1, read_at=99.0), now=100.0, stale_after_s=30.0) == ""


def test_how_long_a_sample_is_believed_is_configured() -> None:
    judged = Judge(hard(Signal.MEMORY, 300), config=EAGER._replace(sampling=SamplingConfig(stale_after_s=2.0)))
    assert not judged.memory(100.0, 200, read_at=97.9).due
    assert judged.memory(101.0, 200, read_at=99.0).due

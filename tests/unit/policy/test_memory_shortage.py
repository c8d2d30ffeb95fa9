from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config.schema import Config, RankingConfig
from nodeagent.model import (
    MemoryFigures,
    MemoryModel,
    NodeSnapshot,
    Observation,
    Outcome,
    OutcomeKind,
    Plan,
    RefusalCode,
    Signal,
    SignalState,
    Threshold,
)
from nodeagent.policy import chosen_victims, engine, memory_shortage, outcomes, recheck
from nodeagent.policy.state import PolicyState, initial
from tests.support.nodes import GI, MI, NOW, config, hard, snapshot, soft, view

LEVEL = 200 * MI
BOTH = hard(Signal.MEMORY, LEVEL, memory_model=MemoryModel.LOWER)
AMOUNTS = st.one_of(st.none(), st.integers(0, 1000).map(lambda mib: mib * MI))


def figure(available: int | None, *, at: float = NOW, signal: Signal = Signal.MEMORY) -> Observation:
    reason = "" if available is not None else "made unreadable"
    return Observation(signal, available, 16 * GI, at, "made up", reason=reason)


def node(working_set: int | None, by_kernel: int | None, *, at: float = NOW) -> NodeSnapshot:
    """A node with one pod of 4 GiB, and these figures of the available memory."""
    made = snapshot(view("hog", 4 * GI), at=at)
    observations = {**made.observations, Signal.MEMORY: figure(working_set, at=at)}
    return made._replace(observations=observations, mem_available=figure(by_kernel, at=at))


def decide(made: NodeSnapshot, *thresholds: Threshold, state: PolicyState | None = None, **more: object) -> Plan:
    return step(made, *thresholds, state=state, **more)[0]


def step(
    made: NodeSnapshot, *thresholds: Threshold, state: PolicyState | None = None, **more: object
) -> tuple[Plan, PolicyState]:
    at = made.taken_at
    return engine.decide(made, state or initial("test", now=at), now=at, config=config(*thresholds, **more))


# --- the amount that counts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("working_set", "by_kernel", "counted"),
    [
        (900, 100, 100),  # slab: the kernel's figure is lower
        (100, 900, 800),  # page cache: at most half of the level is doubted
        (100, 300, 200),  # exactly 1.5 times the level: page cache only
        (100, 299, 199),
        (150, 220, 150),
        (None, 150, 150),
        (150, None, None),
        (None, None, None),
    ],
)
def test_the_working_set_figure_counts_within_half_a_threshold_below_the_kernels(
    working_set: int | None, by_kernel: int | None, counted: int | None
) -> None:
    assert memory_shortage.counted(MemoryFigures(working_set, by_kernel), level=200) == counted


def test_with_an_odd_level_exactly_one_and_a_half_times_is_rounded_up() -> None:
    assert memory_shortage.counted(MemoryFigures(0, 5), level=3) == 3
    assert memory_shortage.counted(MemoryFigures(0, 4), level=3) == 2


@pytest.mark.parametrize(("by_kernel", "short"), [(1155 * MI, True), (1156 * MI, False), (1349 * MI, False)])
def test_above_a_large_threshold_no_more_than_256_mi_of_the_kernels_figure_are_doubted(
    by_kernel: int, *, short: bool
) -> None:
    """A kubelet with 450Mi on a node of 2 GiB raises the soft threshold to 900Mi."""
    plan = decide(node(614 * MI, by_kernel), hard(Signal.MEMORY, 900 * MI, memory_model=MemoryModel.LOWER))
    assert bool(plan.victims) is short
    assert plan.conditions[0].status == "True"


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10**6))
def test_the_deficit_ends_the_shortage_by_the_nearer_of_two_ways(working_set: int, by_kernel: int, level: int) -> None:
    deficit = level - (memory_shortage.counted(MemoryFigures(working_set, by_kernel), level=level) or 0)
    lower = min(working_set, by_kernel)
    if lower < level and 2 * by_kernel < 3 * level:
        assert deficit == min(level - lower, (3 * level + 1) // 2 - by_kernel)
        freed = MemoryFigures(working_set + deficit, by_kernel + deficit)
        assert memory_shortage.counted(freed, level=level) == level
    else:
        assert deficit <= 0


# --- decisions -------------------------------------------------------------------------------------------------------


def test_a_node_whose_slab_hides_from_the_working_set_evicts_by_memavailable() -> None:
    plan = decide(node(1200 * MI, 150 * MI), BOTH)
    assert [victim.pod.name for victim in plan.victims] == ["hog"]
    assert plan.deficit is not None
    assert plan.deficit.amount == 50 * MI


def test_a_node_full_of_page_cache_has_the_condition_and_evicts_no_pod() -> None:
    plan = decide(node(50 * MI, 3 * GI), BOTH)
    assert plan.victims == ()
    assert plan.conditions[0].status == "True"
    [verdict] = plan.signals[0].thresholds
    assert (verdict.met, verdict.due, verdict.not_due_code) == (True, False, RefusalCode.PAGE_CACHE_ONLY)
    text = (
        "memory.available: no more than page cache is short: 50Mi by working set, 3Gi by MemAvailable, threshold 200Mi"
    )
    assert verdict.not_due_reason == text
    assert [(refusal.code, refusal.message) for refusal in plan.refusals] == [(RefusalCode.PAGE_CACHE_ONLY, text)]


def test_both_figures_low_evict_for_the_deficit_of_the_nearer_end() -> None:
    plan = decide(node(100 * MI, 250 * MI), BOTH)
    assert plan.deficit is not None
    assert plan.deficit.amount == 50 * MI  # 1.5 x 200Mi - 250Mi, less than 200Mi - 100Mi
    assert len(plan.victims) == 1


def test_without_memavailable_no_pod_is_evicted_for_the_working_set_figure_alone() -> None:
    plan = decide(node(50 * MI, None), BOTH)
    assert plan.victims == ()
    assert [refusal.code for refusal in plan.refusals] == [RefusalCode.PAGE_CACHE_UNKNOWN]
    assert plan.signals[0].thresholds[0].met


@pytest.mark.parametrize("implausible", [-1, 17 * GI], ids=["negative", "more than there is"])
def test_an_implausible_memavailable_counts_as_unknown(implausible: int) -> None:
    plan = decide(node(50 * MI, implausible), BOTH)
    assert (plan.victims, plan.signals[0].observation.available) == ((), 50 * MI)


def test_with_an_unreadable_working_set_memavailable_decides() -> None:
    assert len(decide(node(None, 150 * MI), BOTH).victims) == 1
    healthy = decide(node(None, 250 * MI), BOTH)
    assert (healthy.victims, healthy.signals[0].state) == ((), SignalState.OK)


def test_with_both_figures_unknown_the_signal_is_unknown() -> None:
    plan = decide(node(None, None), BOTH)
    assert (plan.victims, plan.refusals, plan.signals[0].state) == ((), (), SignalState.UNKNOWN)


def test_the_other_memory_models_decide_by_their_own_figure_alone() -> None:
    full_of_cache = node(50 * MI, 3 * GI)
    assert len(decide(full_of_cache, BOTH._replace(memory_model=MemoryModel.WORKING_SET)).victims) == 1
    assert decide(full_of_cache, BOTH._replace(memory_model=MemoryModel.MEM_AVAILABLE)).signals[0].state == "ok"


def test_allocatable_memory_tells_page_cache_apart_as_well() -> None:
    threshold = BOTH._replace(signal=Signal.ALLOCATABLE_MEMORY)
    made = node(8 * GI, 8 * GI)
    low = figure(50 * MI, signal=Signal.ALLOCATABLE_MEMORY)
    made = made._replace(observations={**made.observations, Signal.ALLOCATABLE_MEMORY: low})
    by_kernel = figure(2 * GI, signal=Signal.ALLOCATABLE_MEMORY)
    cached = decide(made._replace(allocatable_by_kernel=by_kernel), threshold)
    assert (cached.victims, cached.refusals[0].code) == ((), RefusalCode.PAGE_CACHE_ONLY)
    assert "2Gi without page cache" in cached.refusals[0].message
    assert len(decide(made._replace(allocatable_by_kernel=low), threshold).victims) == 1
    assert decide(made, threshold).refusals[0].code is RefusalCode.PAGE_CACHE_UNKNOWN


@given(AMOUNTS, AMOUNTS, st.integers(0, 300), st.sampled_from([Signal.MEMORY, Signal.ALLOCATABLE_MEMORY]))
def test_no_pod_is_a_victim_for_page_cache_and_every_real_shortage_has_one(
    working_set: int | None, by_kernel: int | None, reclaim_mib: int, signal: Signal
) -> None:
    reclaim = hard(value=reclaim_mib * MI).value
    threshold = BOTH._replace(signal=signal, min_reclaim=reclaim if reclaim_mib else None)
    made = node(8 * GI, 8 * GI)
    made = made._replace(observations={**made.observations, signal: figure(working_set, signal=signal)})
    kernel = figure(by_kernel, signal=signal)
    if signal is Signal.MEMORY:
        made = made._replace(mem_available=kernel)
    else:
        made = made._replace(allocatable_by_kernel=kernel)
    plan = decide(made, threshold)
    if by_kernel is None or 2 * by_kernel >= 3 * LEVEL:
        assert plan.victims == ()
    if by_kernel is not None and by_kernel < LEVEL:
        assert len(plan.victims) == 1
        assert all(refusal.code is not RefusalCode.PAGE_CACHE_ONLY for refusal in plan.refusals)


# --- from one sample to the next -------------------------------------------------------------------------------------


def test_the_grace_of_a_real_shortage_starts_when_more_than_page_cache_is_short() -> None:
    threshold = soft(Signal.MEMORY, LEVEL, grace_s=30.0, memory_model=MemoryModel.LOWER)
    state = initial("test", now=NOW)
    for after in range(0, 601, 20):
        plan, state = step(node(50 * MI, 3 * GI, at=NOW + after), threshold, state=state)
    assert [refusal.code for refusal in plan.refusals] == [RefusalCode.PAGE_CACHE_ONLY]
    for after in (601, 611, 621):
        plan, state = step(node(50 * MI, 150 * MI, at=NOW + after), threshold, state=state)
        assert (plan.victims, plan.refusals) == ((), ())
        assert "of its grace period of 30s" in plan.signals[0].thresholds[0].not_due_reason
    plan, state = step(node(50 * MI, 150 * MI, at=NOW + 631), threshold, state=state)
    assert len(plan.victims) == 1


def test_minimum_reclaim_counts_only_after_a_real_shortage() -> None:
    threshold = BOTH._replace(min_reclaim=hard(value=400 * MI).value)
    plan, state = step(node(50 * MI, 350 * MI), threshold)
    plan, state = step(node(50 * MI, 350 * MI, at=NOW + 1), threshold, state=state)
    assert (plan.victims, plan.refusals[0].code) == ((), RefusalCode.PAGE_CACHE_ONLY)
    plan, state = step(node(50 * MI, 190 * MI, at=NOW + 2), threshold, state=state)
    assert plan.deficit is not None
    assert plan.deficit.amount == 550 * MI
    plan, state = step(node(50 * MI, 350 * MI, at=NOW + 3), threshold, state=state)
    assert plan.signals[0].thresholds[0].due


# --- recheck, release, texts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("working_set", "by_kernel", "code"),
    [
        (50 * MI, 150 * MI, None),
        (50 * MI, 300 * MI, RefusalCode.PAGE_CACHE_ONLY),
        (50 * MI, None, RefusalCode.PAGE_CACHE_UNKNOWN),
        (None, 150 * MI, None),
        (250 * MI, 250 * MI, RefusalCode.RECOVERED),
        (None, None, RefusalCode.SIGNAL_UNKNOWN),
    ],
)
def test_the_recheck_tells_page_cache_apart_again(
    working_set: int | None, by_kernel: int | None, code: RefusalCode | None
) -> None:
    plan, state = step(node(50 * MI, 150 * MI), BOTH)
    [victim] = plan.victims
    second = node(working_set, by_kernel, at=NOW + 0.01)
    refusal = recheck.recheck(victim, second, state, now=NOW + 0.01, config=config(BOTH))
    assert (refusal.code if refusal else None) is code


def test_a_release_that_page_cache_takes_up_at_once_is_measured_by_the_kernel() -> None:
    plan, state = step(node(50 * MI, 150 * MI), BOTH)
    accepted = Outcome(plan.id, plan.victims[0].pod.uid, OutcomeKind.ACCEPTED, "", NOW)
    state = outcomes.apply_outcome(state, accepted, now=NOW, config=config(BOTH))
    for at, by_kernel in ((NOW + 1, 150 * MI), (NOW + 2, 4246 * MI)):
        gone = node(50 * MI, by_kernel, at=at)._replace(pods=())
        plan, state = step(gone, BOTH, state=state)
    [report] = plan.relief_reports
    assert (report.predicted, report.measured) == (4 * GI, 4 * GI)
    assert state.in_flight.failures == {}


def test_a_stale_figure_is_no_reason_to_evict() -> None:
    made = node(50 * MI, 150 * MI)
    stale = made._replace(mem_available=figure(150 * MI, at=NOW - 3600))
    plan = decide(stale, BOTH)
    assert (plan.victims, plan.signals[0].state) == ((), SignalState.UNKNOWN)
    lower = stale.observe(Signal.MEMORY, MemoryModel.LOWER)
    assert (lower.available, lower.read_at) == (50 * MI, NOW - 3600)


def test_a_message_has_both_figures_after_the_kubelets_text_only_if_both_are_used() -> None:
    by_kubelet, by_both = (
        decide(node(50 * MI, 150 * MI), BOTH._replace(memory_model=model)).victims[0].message
        for model in (MemoryModel.WORKING_SET, MemoryModel.LOWER)
    )
    assert by_both == by_kubelet + "Measured: 50Mi by working set, 150Mi by MemAvailable. "


def test_two_thresholds_of_different_models_quote_their_own_figure() -> None:
    by_kernel = BOTH._replace(memory_model=MemoryModel.MEM_AVAILABLE)
    lower_value = hard(Signal.MEMORY, 40 * MI)
    plan = decide(node(50 * MI, 150 * MI), by_kernel, lower_value)
    [victim] = plan.victims
    current = chosen_victims.with_current_text(victim, node(0, 0).pods[0], plan=plan)
    assert "available: 150Mi. " in current.message


def test_the_kubelet_compatible_mode_has_no_page_cache_rule_of_its_own() -> None:
    kubelet = Config(ranking=RankingConfig(kubelet=True)).ranking
    plan = decide(node(50 * MI, 3 * GI), hard(Signal.MEMORY, LEVEL), ranking=kubelet)
    assert len(plan.victims) == 1


@pytest.mark.parametrize("read_at", [NOW + 5, float("nan")])
@pytest.mark.parametrize(("working_set", "by_kernel"), [(100, 150), (500, 150), (100, 250)])
def test_a_figure_with_a_time_that_cannot_be_true_counts_as_unknown(
    working_set: int, by_kernel: int, read_at: float
) -> None:
    made = node(working_set * MI, by_kernel * MI)
    plan = decide(made._replace(mem_available=made.mem_available._replace(read_at=read_at)), BOTH)
    assert not plan.victims
    assert {refusal.code for refusal in plan.refusals} <= {RefusalCode.PAGE_CACHE_UNKNOWN}


# --- a working-set figure that is unreadable now and then


def _due_after(unreadable: Callable[[int], bool], *, seconds: int, by_kernel: int = 250) -> int | None:
    """After how many seconds a soft threshold of 30 s is due, on a node that is short by the lower figure."""
    both = soft(Signal.MEMORY, LEVEL, grace_s=30.0, memory_model=MemoryModel.LOWER)
    state = initial("test", now=NOW)
    for second in range(seconds):
        made = node(None if unreadable(second) else 100 * MI, by_kernel * MI, at=NOW + second)
        plan, state = step(made, both, state=state)
        if plan.acting_on is not None:
            return second
    return None


def test_an_unreadable_working_set_ends_no_grace_and_its_time_is_taken_out_of_it() -> None:
    assert _due_after(lambda _: False, seconds=40) == 30
    assert _due_after(lambda second: second % 10 == 9, seconds=60) == 33


def test_a_grace_ends_if_the_working_set_is_unreadable_for_long_and_the_kernels_figure_is_no_shortage() -> None:
    assert _due_after(lambda second: 5 <= second < 45, seconds=45 + 30) is None
    assert _due_after(lambda second: 5 <= second < 45, seconds=45 + 31) == 45 + 30


def test_the_kernels_figure_alone_continues_a_grace_while_the_working_set_is_unreadable() -> None:
    assert _due_after(lambda second: second >= 5, seconds=40, by_kernel=150) == 30

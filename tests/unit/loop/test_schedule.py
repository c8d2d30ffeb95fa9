"""The loop sleeps as long as the headroom allows, and never through a ramp."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.loop import schedule
from nodeagent.loop.schedule import Schedule, ScheduleInputs, ScheduleState, Source
from nodeagent.model import Amount, MemoryModel, NodeSnapshot, Observation, Signal, Threshold, Tier

MIB = 1 << 20
GIB = 1 << 30
HARD = Threshold(Signal.MEMORY, Amount(300 * MIB, None, "300Mi"))
SOFT = Threshold(Signal.MEMORY, Amount(500 * MIB, None, "500Mi"), grace_period_s=10.0)
INTERVAL_S = 10.0


def _node(available: int | None, *, at: float, mem_available: int | None = None) -> NodeSnapshot:
    memory = Observation(Signal.MEMORY, available, 8 * GIB, at, "test", reason="" if available is not None else "gone")
    observations = {
        signal: memory if signal is Signal.MEMORY else Observation(signal, None, None, at, "test", reason="not here")
        for signal in Signal
    }
    return NodeSnapshot("node", at, at, observations, memory._replace(available=mem_available))


def _plan(
    node: NodeSnapshot, state: ScheduleState, *thresholds: Threshold, interval_s: float = INTERVAL_S, **more: Any
) -> tuple[Schedule, ScheduleState]:
    return schedule.plan_next(ScheduleInputs(node, thresholds or (HARD,), interval_s, **more), state)


def test_far_from_every_threshold_the_loop_sleeps_for_one_interval() -> None:
    first, state = _plan(_node(300 * MIB + 40 * GIB, at=0.0), ScheduleState())
    assert first.sleep_s == INTERVAL_S
    assert first.full_sample, "the first node sample asks for a full sample"
    assert not _plan(_node(300 * MIB + 40 * GIB, at=5.0), state)[0].full_sample
    assert _plan(_node(300 * MIB + 40 * GIB, at=10.0), state)[0].full_sample


def test_on_a_calm_node_decisions_are_rarer_than_node_samples_and_no_node_sample_is_late() -> None:
    def full_samples(
        seconds: range, mib: int, state: ScheduleState, *, work_pending: bool = False
    ) -> tuple[list[int], ScheduleState]:
        taken = []
        for second in seconds:
            node = _node(mib * MIB, at=float(second))
            verdict, state = _plan(node, state, SOFT, interval_s=1.0, work_pending=work_pending)
            assert verdict.sleep_s <= 1.0
            taken += [second] if verdict.full_sample else []
        return taken, state

    taken, state = full_samples(range(20), 8000, ScheduleState())
    assert taken == [0, 1, 2, 3, 4, 14], "a start is not calm at once"
    taken, state = full_samples(range(20, 23), 400, state)
    assert taken == [20, 21, 22], "below a threshold it is not calm"
    taken, state = full_samples(range(23, 50), 8000, state)
    assert taken == [23, 24, 25, 26, 27, 37, 47], "nor right after"
    taken, state = full_samples(range(50, 53), 8000, state, work_pending=True)
    assert taken == [50, 51, 52], "nor while the minimum reclaim is missing"
    assert full_samples(range(53, 70), 8000, state)[0] == [53, 54, 55, 56, 57, 67]


def test_close_to_a_threshold_the_node_is_sampled_at_fifty_hertz() -> None:
    assert _plan(_node(301 * MIB, at=0.0), ScheduleState())[0].sleep_s == schedule.SHORTEST_S


def test_the_nearest_threshold_sets_the_sleep() -> None:
    sleeps = [
        _plan(_node(1524 * MIB, at=0.0), ScheduleState(), *order)[0].sleep_s for order in ((HARD, SOFT), (SOFT, HARD))
    ]
    assert sleeps == [pytest.approx(0.5)] * 2


@pytest.mark.parametrize("rate", [10 * MIB, 50 * MIB, 950 * MIB, GIB])
@pytest.mark.parametrize("start_gib", [1, 4, 32])
def test_a_ramp_of_up_to_a_gibibyte_per_second_is_sampled_within_two_samples_of_the_crossing(
    rate: int, start_gib: int
) -> None:
    at, state, samples_below = 0.0, ScheduleState(), 0
    while samples_below == 0:
        available = int(300 * MIB + start_gib * GIB - rate * at)
        verdict, state = _plan(_node(max(0, available), at=at), state)
        if available < 300 * MIB:
            assert verdict.full_sample
            assert 300 * MIB - available <= 2 * schedule.SHORTEST_S * rate
            samples_below += 1
        at += verdict.sleep_s


def test_below_a_threshold_the_distance_to_exhaustion_sets_the_sleep() -> None:
    assert _plan(_node(200 * MIB, at=0.0), ScheduleState())[0].sleep_s == pytest.approx(0.5 * 200 / 1024)
    assert _plan(_node(0, at=0.0), ScheduleState())[0].sleep_s == schedule.SHORTEST_S


def test_a_fill_above_the_fastest_measured_one_decays_slowly() -> None:
    calm = 300 * MIB + 60 * GIB
    _, state = _plan(_node(calm + 8 * GIB, at=0.0), ScheduleState())
    fast, state = _plan(_node(calm, at=1.0), state)
    assert fast.sleep_s == pytest.approx(0.5 * 60 / 8)
    later, state = _plan(_node(calm, at=31.0), state)
    assert later.sleep_s == pytest.approx(0.5 * 60 / 4)


def test_below_a_soft_threshold_alone_node_samples_are_cheap_so_that_the_hard_crossing_is_sampled_in_time() -> None:
    sampled, at, state = [], 0.0, ScheduleState()
    for available in (
        501 * MIB,
        499 * MIB,
        498 * MIB,
        497 * MIB,
        496 * MIB,
        290 * MIB,
        270 * MIB,
        490 * MIB,
        510 * MIB,
    ):
        verdict, state = _plan(_node(available, at=at), state, HARD, SOFT)
        sampled.append(verdict.full_sample)
        at += 0.02
    #            first soft crossed             hard, and still      back over each
    assert sampled == [True, True, False, False, False, True, True, True, True]


def test_a_soft_threshold_of_a_disk_is_never_postponed() -> None:
    soft, state, sampled = (
        DISK._replace(value=Amount(GIB + 80 * MIB, None, "1104Mi"), grace_period_s=600.0),
        ScheduleState(),
        [],
    )
    for step in range(60):  # 150 MiB/s: the fastest fill under which a kubelet was observed to lose a disk
        at, left = 0.02 * step, GIB + (140 - 3 * step) * MIB
        verdict, state = _plan(_with_disk(left, read_at=at, at=at), state, DISK, soft)
        sampled += [(left - GIB) // MIB] if verdict.full_sample else []
    assert sampled[:2] == [140, 77]


def test_a_soft_crossing_waits_for_an_imminent_hard_one_for_a_limited_time() -> None:
    ramp = [700 - 20 * step for step in range(25)]  # MiB: 1 GiB/s, in node samples of 20 ms
    sampled: list[int] = []
    state = ScheduleState()
    for step, mib in enumerate(ramp):
        verdict, state = _plan(_node(mib * MIB, at=0.02 * step), state, HARD, SOFT)
        sampled += [mib] if verdict.full_sample else []
    assert sampled == [700, *(mib for mib in ramp if mib < 300)]
    # The same, but it stops in between: the soft crossing is decided on.
    taken: list[float] = []
    state = ScheduleState()
    for step in range(100):
        verdict, state = _plan(_node(max(400, 700 - 20 * step) * MIB, at=0.02 * step), state, HARD, SOFT)
        taken += [0.02 * step] if verdict.full_sample else []
    crossed = 0.02 * 11
    assert taken[0] == 0.0
    assert taken[1] == pytest.approx(crossed + schedule.MAX_POSTPONE_S, abs=0.021)
    # Also where they are far apart: what a decision starts takes longer than one sync.
    early, state = SOFT._replace(value=Amount(1000 * MIB, None, "1000Mi")), ScheduleState()
    sampled = []
    for step in range(60):
        verdict, state = _plan(_node((1400 - 20 * step) * MIB, at=0.02 * step), state, HARD, early)
        sampled += [1400 - 20 * step] if verdict.full_sample else []
    assert sampled[:2] == [1400, 280]
    # Also long after the last full sample: the wait counts from when this one was due.
    _, state = _plan(_node(700 * MIB, at=0.0), ScheduleState(), HARD, SOFT)
    sampled = []
    for step, mib in enumerate(ramp):
        verdict, state = _plan(_node(mib * MIB, at=8.0 + 0.02 * step), state, HARD, SOFT)
        sampled += [mib] if verdict.full_sample else []
    assert sampled == [mib for mib in ramp if mib < 300]


def test_below_a_soft_threshold_the_sleep_is_short_however_much_is_available() -> None:
    soft = SOFT._replace(value=Amount(40 * GIB, None, "40Gi"))
    _, state = _plan(_node(39 * GIB, at=0.0), ScheduleState(), soft)
    verdict, state = _plan(_node(39 * GIB, at=0.1), state, soft)
    assert (verdict.sleep_s, verdict.full_sample) == pytest.approx((schedule.SOFT_SAMPLE_S, False))
    assert _plan(_node(39 * GIB, at=0.25), state, soft)[0].full_sample


def test_a_full_sample_is_due_in_every_sync_below_a_hard_threshold_and_once_after() -> None:
    _, state = _plan(_node(GIB, at=0.0), ScheduleState())
    below, state = _plan(_node(200 * MIB, at=0.1), state)
    again, state = _plan(_node(200 * MIB, at=0.2), state)
    over, state = _plan(_node(GIB, at=0.3), state)
    calm, state = _plan(_node(GIB, at=0.4), state)
    assert [below.full_sample, again.full_sample, over.full_sample, calm.full_sample] == [True, True, True, False]


def test_a_threshold_with_the_mem_available_model_is_compared_with_mem_available() -> None:
    threshold = HARD._replace(memory_model=MemoryModel.MEM_AVAILABLE)
    verdict, _ = _plan(_node(8 * GIB, at=0.0, mem_available=301 * MIB), ScheduleState(), threshold)
    assert verdict.sleep_s == schedule.SHORTEST_S


@given(
    st.lists(
        st.tuples(
            st.one_of(st.none(), st.integers(-(2**70), 2**70)),
            st.floats(allow_nan=False, min_value=-1e9, max_value=1e9),
        ),
        max_size=20,
    )
)
def test_whatever_is_read_the_sleep_stays_within_its_bounds(samples: list[tuple[int | None, float]]) -> None:
    state = ScheduleState()
    for available, at in samples:
        verdict, state = _plan(_node(available, at=at), state, HARD, SOFT)
        assert schedule.SHORTEST_S <= verdict.sleep_s <= INTERVAL_S


DISK = Threshold(Signal.NODEFS, Amount(GIB, None, "1Gi"))


def _with_disk(available: int | None, *, read_at: float, at: float, memory: int = 40 * GIB) -> NodeSnapshot:
    """nodefs of 100 GiB, read some time before the rest."""
    node = _node(memory, at=at)
    disk = Observation(Signal.NODEFS, available, 100 * GIB, read_at, "test", "" if available is not None else "gone")
    return node._replace(observations={**node.observations, Signal.NODEFS: disk})


def test_the_file_systems_are_not_read_more_often_while_memory_runs_out() -> None:
    verdict, state = _plan(_with_disk(60 * GIB, read_at=0.0, at=0.0, memory=310 * MIB), ScheduleState(), HARD, DISK)
    assert (verdict.sleep_s, state.filesystems_at) == pytest.approx((schedule.SHORTEST_S, INTERVAL_S))
    verdict, state = _plan(_with_disk(60 * GIB, read_at=0.0, at=4.0, memory=310 * MIB), state, HARD, DISK)
    assert (verdict.sleep_s, state.filesystems_at) == pytest.approx((schedule.SHORTEST_S, INTERVAL_S)), (
        "counted from when they were read"
    )


def test_file_systems_without_a_threshold_are_read_once_in_an_interval() -> None:
    _, state = _plan(_with_disk(0, read_at=3.0, at=5.0), ScheduleState())
    assert state.filesystems_at == pytest.approx(3.0 + INTERVAL_S)


def _far(at: float, read_at: float) -> NodeSnapshot:
    """Far from every threshold, its disk and its limits read some time before."""
    node = _with_disk(60 * GIB, read_at=read_at, at=at, memory=60 * GIB)
    return node._replace(mem_available=node.mem_available._replace(read_at=read_at))


def _calm_plan(node: NodeSnapshot, calm: int, *thresholds: Threshold, interval_s: float = 1.0) -> ScheduleState:
    state = ScheduleState(calm=calm, full_sample_at=node.taken_at)
    return _plan(node, state, *thresholds, interval_s=interval_s)[1]


@pytest.mark.parametrize(
    ("calm", "interval_s", "every_s"),
    [
        (schedule.CALM_AFTER, 1.0, schedule.CALM_S),
        (schedule.CALM_AFTER - 1, 1.0, 1.0),
        (schedule.CALM_AFTER, 20.0, 20.0),
    ],
    ids=["calm", "starting", "interval"],
)
def test_on_a_calm_node_file_systems_and_limits_are_read_as_rarely_as_the_pods(
    calm: int, interval_s: float, every_s: float
) -> None:
    state = _calm_plan(_far(4.0, read_at=3.0), calm, HARD, DISK, interval_s=interval_s)
    assert (state.filesystems_at, state.limits_at) == pytest.approx((3.0 + every_s, 3.0 + every_s))


def test_the_limits_are_read_again_before_memory_can_run_short() -> None:
    node = _far(4.0, read_at=3.0)
    for signal in (Signal.MEMORY, Signal.ALLOCATABLE_MEMORY):
        observed = Observation(signal, 300 * MIB + 6 * GIB, 8 * GIB, 4.0, "test")
        closer = node._replace(observations={**node.observations, signal: observed})
        state = _calm_plan(closer, schedule.CALM_AFTER, HARD._replace(signal=signal))
        assert state.limits_at == 3.0 + 0.5 * 6, "half the time to its threshold at 1 GiB/s"
    pids = Observation(Signal.PID, 25_000, 32_768, 4.0, "test")
    node = node._replace(observations={**node.observations, Signal.PID: pids})
    few = Threshold(Signal.PID, Amount(1000, None, "1000"))
    assert _calm_plan(node, schedule.CALM_AFTER, few).limits_at == 3.0 + schedule.CALM_S, (
        "a machine does not get more PIDs"
    )


def test_limits_are_read_in_every_sync_below_a_threshold_and_for_mem_available() -> None:
    below = _far(4.0, read_at=3.0)
    crossed = below.observations[Signal.MEMORY]._replace(available=499 * MIB)
    below = below._replace(observations={**below.observations, Signal.MEMORY: crossed})
    state = _calm_plan(below, schedule.CALM_AFTER, HARD, SOFT, DISK)
    assert state.limits_at == 4.0
    assert state.filesystems_at == 3.0 + schedule.CALM_S, "a disk has its own due time"
    by_kernel = HARD._replace(memory_model=MemoryModel.MEM_AVAILABLE)
    far = _far(4.0, read_at=3.0)
    far = far._replace(mem_available=far.mem_available._replace(available=7 * GIB))
    assert _calm_plan(far, schedule.CALM_AFTER, by_kernel).limits_at == 4.0


@pytest.mark.parametrize("signal", [Signal.PID, Signal.ALLOCATABLE_MEMORY])
def test_limits_are_read_in_every_sync_while_a_signal_with_a_threshold_is_unknown(signal: Signal) -> None:
    threshold = HARD._replace(signal=signal)
    assert _calm_plan(_far(4.0, read_at=4.0), schedule.CALM_AFTER, HARD, threshold).limits_at == 4.0


def test_a_disk_is_read_again_before_it_can_be_full() -> None:
    verdict, state = _plan(_with_disk(5 * GIB, read_at=2.0, at=3.0), ScheduleState(), HARD, DISK)
    assert state.filesystems_at == pytest.approx(2.0 + 0.5 * 4), "half the time to its threshold at 1 GiB/s"
    assert verdict.sleep_s == pytest.approx(1.0), "and the loop wakes up then"


@pytest.mark.parametrize("available", [GIB - 1, 0, GIB + 50 * MIB], ids=["crossed", "full", "near"])
def test_a_disk_that_is_crossed_or_near_is_read_in_every_sync(available: int) -> None:
    _, state = _plan(_with_disk(available, read_at=7.0, at=7.0), ScheduleState(), HARD, DISK)
    assert state.filesystems_at == 7.0


def test_a_disk_that_stays_near_its_threshold_is_in_no_hurry() -> None:
    """A healthy node may stay there for weeks."""
    nodefs, nothing = frozenset({Signal.NODEFS}), frozenset[Signal]()
    verdict, state = _plan(_with_disk(GIB + 50 * MIB, read_at=7.0, at=7.0), ScheduleState(), HARD, DISK)
    assert (verdict.near, verdict.soon) == (nodefs, nothing)
    verdict, state = _plan(_with_disk(GIB + 49 * MIB, read_at=8.0, at=8.0), state, HARD, DISK)
    assert (verdict.near, verdict.soon) == (nodefs, nodefs), "at 1 MiB/s there in 49 s"
    verdict, _ = _plan(_with_disk(3 * GIB, read_at=7.0, at=7.0), ScheduleState(), HARD, DISK)
    assert (verdict.near, verdict.soon) == (nothing, nothing)


def test_an_unknown_disk_is_read_again_once_a_second() -> None:
    verdict, state = _plan(_with_disk(None, read_at=6.5, at=7.0, memory=310 * MIB), ScheduleState(), HARD, DISK)
    assert (verdict.sleep_s, state.filesystems_at) == pytest.approx((schedule.SHORTEST_S, 6.5 + schedule.UNKNOWN_S))
    short = DISK._replace(signal=Signal.NODEFS_INODES)  # such as on btrfs: unknown although its bytes are known
    _, state = _plan(_with_disk(60 * GIB, read_at=7.0, at=7.0), ScheduleState(), DISK, short)
    assert state.filesystems_at == 7.0 + schedule.UNKNOWN_S
    _, state = _plan(_with_disk(GIB - 1, read_at=7.0, at=7.0), ScheduleState(), DISK, short)
    assert state.filesystems_at == 7.0, "but a crossed one is read in every sync"


def _due_at(what: str, *samples: tuple[float, int], thresholds: tuple[Threshold, ...] = (HARD,)) -> list[float]:
    """When `what`, `prearm` or `growth_cap`, is due in a series of node samples (time, MiB available). The last full
    sample is new."""
    state, taken = ScheduleState(full_sample_at=0.0), []
    for at, mib in samples:
        verdict, state = _plan(_node(mib * MIB, at=at), state, *thresholds)
        due = getattr(verdict, what)
        assert not (due and verdict.full_sample)
        taken += [at] if due else []
    return taken


def test_a_prearm_is_due_right_before_a_hard_crossing() -> None:
    ramp = [(0.02 * step, 400 - 20 * step) for step in range(8)]  # 1,000 MiB/s; crossed after 0.1 s
    assert _due_at("prearm", *ramp) == pytest.approx([0.06])
    assert _due_at("prearm", *ramp, thresholds=(HARD._replace(grace_period_s=10.0),)) == [], (
        "a soft threshold needs no prearm"
    )


def test_a_node_that_stays_just_above_a_threshold_prearms_at_most_ten_times_a_second() -> None:
    hovering = [(0.02 * step, 301 + step % 2) for step in range(500)]
    taken = _due_at("prearm", *hovering)
    assert 2 <= len(taken) <= 0.02 * 500 / schedule.PREARM_EVERY_S + 1


def test_a_fast_fill_that_has_stopped_needs_no_prearm() -> None:
    assert _due_at("prearm", (0.0, 800), (0.1, 320), (0.12, 320), (0.14, 320))[1:] == []


def test_a_growth_cap_is_due_half_a_second_before_a_hard_memory_crossing() -> None:
    ramp = [(0.02 * step, 1090 - 20 * step) for step in range(41)]  # 1,000 MiB/s; crossed after 0.8 s
    assert _due_at("growth_cap", *ramp) == pytest.approx([0.3, 0.56])
    assert _due_at("growth_cap", *ramp, thresholds=(HARD._replace(grace_period_s=10.0),)) == []


def test_a_disk_that_fills_is_prearmed_but_has_no_growth_cap() -> None:
    state, due = ScheduleState(full_sample_at=0.0), []
    for step in range(40):  # 1,000 MiB/s
        at, left = 0.02 * step, GIB + (790 - 20 * step) * MIB
        verdict, state = _plan(_with_disk(left, read_at=at, at=at), state, DISK)
        due.append((verdict.growth_cap, verdict.prearm))
    assert set(due) == {(False, False), (False, True)}


def test_memory_that_fills_slowly_or_not_at_all_has_no_growth_cap() -> None:
    assert _due_at("growth_cap", (0.0, 800), (0.1, 310), (0.12, 310), (0.14, 310), (1.0, 309))[1:] == []


def test_memory_is_short_below_its_thresholds_and_right_before_a_hard_one() -> None:
    ramp = [(0.02 * step, 1090 - 20 * step) for step in range(41)]  # 1,000 MiB/s; crossed after 0.8 s
    state, short = ScheduleState(full_sample_at=0.0), []
    for at, mib in ramp:
        verdict, state = _plan(_node(mib * MIB, at=at), state)
        short.append(verdict.short)
    assert short == [Tier.HARD if at >= 0.3 else None for at, _ in ramp]
    assert _plan(_node(510 * MIB, at=0.0), ScheduleState(), SOFT)[0].short is None
    assert _plan(_node(490 * MIB, at=0.0), ScheduleState(), SOFT)[0].short is Tier.SOFT
    assert not _plan(_with_disk(MIB, read_at=0.0, at=0.0), ScheduleState(), DISK)[0].short, "disks are walked"


def test_every_source_has_one_row_and_the_docstring_lists_it() -> None:
    assert list(schedule.SOURCES) == list(Source)
    assert len(set(schedule.SOURCES.values())) == len(Source)
    documented = {line.strip().partition("  ")[0] for line in (schedule.__doc__ or "").splitlines()}
    assert documented.issuperset(Source)


def test_an_eviction_in_flight_makes_a_full_sample_due_in_every_sync() -> None:
    node, state = _node(60 * GIB, at=0.1), ScheduleState(full_sample_at=0.0, calm=schedule.CALM_AFTER)
    assert not _plan(node, state)[0].full_sample
    verdict, after = _plan(node, state, eviction_in_flight=True)
    assert verdict.full_sample
    assert after.calm == 0, "relief is measured at the interval, not at the calm one"


def test_a_calm_start_waits_for_the_api_server_and_a_crossing_does_not() -> None:
    verdict, state = _plan(_node(300 * MIB + 40 * GIB, at=0.0), ScheduleState(), startup_wait_s=3.0)
    assert (verdict.full_sample, verdict.sleep_s) == (False, 3.0)
    assert _plan(_node(300 * MIB + 40 * GIB, at=3.0), state)[0].full_sample, "what was due stays due"
    assert _plan(_node(200 * MIB, at=0.1), state, startup_wait_s=2.9)[0].full_sample


def test_a_growth_cap_that_would_have_no_effect_is_never_due() -> None:
    _, state = _plan(_node(800 * MIB, at=0.0), ScheduleState(full_sample_at=0.0))
    node = _node(600 * MIB, at=0.2)
    assert _plan(node, state)[0].growth_cap
    assert not _plan(node, state, can_cap_growth=False)[0].growth_cap


# --- both figures of memory ------------------------------------------------------------------------------------------

BOTH = HARD._replace(memory_model=MemoryModel.LOWER)


def test_a_threshold_of_both_figures_is_approached_by_the_kernels() -> None:
    verdict, state = _plan(_node(8 * GIB, at=0.0, mem_available=301 * MIB), ScheduleState(), BOTH)
    assert verdict.sleep_s == schedule.SHORTEST_S
    assert state.limits_at == 0.0, "MemAvailable is read in every sync"
    below, _ = _plan(_node(8 * GIB, at=0.1, mem_available=299 * MIB), state, BOTH)
    assert (below.full_sample, below.under_pressure) == (True, True)


def test_on_a_node_full_of_page_cache_no_sync_is_urgent() -> None:
    state, taken = ScheduleState(), []
    for step in range(60):
        verdict, state = _plan(_node(100 * MIB, at=step / 2, mem_available=7 * GIB), state, BOTH, work_pending=True)
        taken += [step / 2] if verdict.full_sample else []
        assert verdict.sleep_s > 1.0
        assert not verdict.short
    assert taken == [0.0, 10.0, 20.0], "one decision in each interval, not one in each sync"


def test_a_real_shortage_on_a_node_full_of_page_cache_is_decided_at_once() -> None:
    _, state = _plan(_node(100 * MIB, at=0.0, mem_available=7 * GIB), ScheduleState(), BOTH)
    near, state = _plan(_node(100 * MIB, at=1.0, mem_available=470 * MIB), state, BOTH)
    assert (near.full_sample, near.prearm, near.growth_cap) == (False, True, True)
    assert near.headroom == {Signal.MEMORY: 20 * MIB}, "to 1.5 times the threshold by the kernel"
    short, state = _plan(_node(100 * MIB, at=1.1, mem_available=449 * MIB), state, BOTH)
    assert short.full_sample
    assert _plan(_node(100 * MIB, at=1.12, mem_available=449 * MIB), state, BOTH)[0].full_sample, "and in every sync"


def test_a_working_set_figure_that_hovers_around_a_threshold_causes_few_decisions() -> None:
    state, taken = ScheduleState(), 0
    for step in range(100):
        available = (299 if step % 2 else 301) * MIB
        verdict, state = _plan(_node(available, at=step * 0.02, mem_available=7 * GIB), state, BOTH)
        taken += verdict.full_sample
    assert taken <= 9, "2 seconds, 0.25 s apart"


def test_a_pod_near_its_own_limit_gets_a_decision_at_once_and_then_one_each_interval() -> None:
    def full(at: float, state: ScheduleState, near: frozenset[str]) -> tuple[bool, ScheduleState]:
        verdict, state = _plan(_node(7 * GIB, at=at), state, interval_s=1.0, near_own_limit=near)
        return verdict.full_sample, state

    state = ScheduleState()
    for second in range(8):
        _, state = full(float(second), state, frozenset())
    one, two = frozenset({"a"}), frozenset({"a", "b"})
    decisions = []
    for at, near in ((8.0, one), (8.2, one), (8.4, two), (8.6, two), (9.5, two), (9.7, one), (10.6, frozenset())):
        taken, state = full(at, state, near)
        decisions.append(taken)
    assert decisions == [True, False, True, False, True, False, False]


def test_the_next_reading_of_own_limits_bounds_the_sleep_and_connections_are_opened_before() -> None:
    state = _plan(_node(7 * GIB, at=0.0), ScheduleState(), interval_s=1.0)[1]
    far, state = _plan(_node(7 * GIB, at=1.0), state, interval_s=1.0, own_limits_s=5.0)
    assert (far.sleep_s, far.own_limit_near) == (1.0, False)
    soon, state = _plan(_node(7 * GIB, at=2.0), state, interval_s=1.0, own_limits_s=0.2)
    assert soon.sleep_s == pytest.approx(0.2)
    assert soon.own_limit_near
    assert not soon.under_pressure

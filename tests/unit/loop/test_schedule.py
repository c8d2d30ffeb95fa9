"""The loop sleeps as long as the headroom allows, and never through a ramp."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.loop import schedule
from nodeagent.loop.schedule import ScheduleState
from nodeagent.model import Amount, MemoryModel, NodeSnapshot, Observation, Signal, Threshold

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


def _look(node: NodeSnapshot, state: ScheduleState, *thresholds: Threshold) -> tuple[schedule.Schedule, ScheduleState]:
    return schedule.plan_next(node, state, now=node.taken_at, thresholds=thresholds or (HARD,), interval_s=INTERVAL_S)


def test_far_from_every_threshold_it_sleeps_the_whole_interval() -> None:
    first, state = _look(_node(300 * MIB + 40 * GIB, at=0.0), ScheduleState())
    assert first.sleep_s == INTERVAL_S
    assert first.full_sample, "the first look asks for a whole sample"
    assert not _look(_node(300 * MIB + 40 * GIB, at=5.0), state)[0].full_sample
    assert _look(_node(300 * MIB + 40 * GIB, at=10.0), state)[0].full_sample


def test_while_it_is_calm_decisions_are_rarer_than_looks_and_no_look_is_late() -> None:
    def wholes(
        seconds: range, mib: int, state: ScheduleState, *, unsettled: bool = False
    ) -> tuple[list[int], ScheduleState]:
        taken = []
        for second in seconds:
            node = _node(mib * MIB, at=float(second))
            verdict, state = schedule.plan_next(
                node, state, now=node.taken_at, thresholds=(SOFT,), interval_s=1.0, unsettled=unsettled
            )
            assert verdict.sleep_s <= 1.0
            taken += [second] if verdict.full_sample else []
        return taken, state

    taken, state = wholes(range(20), 8000, ScheduleState())
    assert taken == [0, 1, 2, 3, 4, 14], "a start settles first"
    taken, state = wholes(range(20, 23), 400, state)
    assert taken == [20, 21, 22], "below a threshold it is not calm"
    taken, state = wholes(range(23, 50), 8000, state)
    assert taken == [23, 24, 25, 26, 27, 37, 47], "nor right after"
    taken, state = wholes(range(50, 53), 8000, state, unsettled=True)
    assert taken == [50, 51, 52], "nor while the minimum reclaim is missing"
    assert wholes(range(53, 70), 8000, state)[0] == [53, 54, 55, 56, 57, 67]


def test_close_to_a_threshold_it_looks_at_fifty_hertz() -> None:
    assert _look(_node(301 * MIB, at=0.0), ScheduleState())[0].sleep_s == schedule.SHORTEST_S


def test_the_nearest_threshold_below_decides() -> None:
    sleeps = [
        _look(_node(1524 * MIB, at=0.0), ScheduleState(), *order)[0].sleep_s for order in ((HARD, SOFT), (SOFT, HARD))
    ]
    assert sleeps == [pytest.approx(0.5)] * 2


@pytest.mark.parametrize("rate", [10 * MIB, 50 * MIB, 950 * MIB, GIB])
@pytest.mark.parametrize("start_gib", [1, 4, 32])
def test_no_ramp_up_to_a_gibibyte_per_second_crosses_unseen_by_more_than_two_looks(rate: int, start_gib: int) -> None:
    at, state, looks_below = 0.0, ScheduleState(), 0
    while looks_below == 0:
        available = int(300 * MIB + start_gib * GIB - rate * at)
        verdict, state = _look(_node(max(0, available), at=at), state)
        if available < 300 * MIB:
            assert verdict.full_sample
            assert 300 * MIB - available <= 2 * schedule.SHORTEST_S * rate
            looks_below += 1
        at += verdict.sleep_s


def test_below_a_threshold_it_is_exhaustion_that_must_not_be_slept_through() -> None:
    assert _look(_node(200 * MIB, at=0.0), ScheduleState())[0].sleep_s == pytest.approx(0.5 * 200 / 1024)
    assert _look(_node(0, at=0.0), ScheduleState())[0].sleep_s == schedule.SHORTEST_S


def test_a_fill_faster_than_expected_is_remembered_and_forgotten_slowly() -> None:
    calm = 300 * MIB + 60 * GIB
    _, state = _look(_node(calm + 8 * GIB, at=0.0), ScheduleState())
    fast, state = _look(_node(calm, at=1.0), state)
    assert fast.sleep_s == pytest.approx(0.5 * 60 / 8)
    later, state = _look(_node(calm, at=31.0), state)
    assert later.sleep_s == pytest.approx(0.5 * 60 / 4)


def test_below_a_soft_threshold_alone_looks_are_cheap_so_that_the_hard_one_is_seen_in_time() -> None:
    whole, at, state = [], 0.0, ScheduleState()
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
        verdict, state = _look(_node(available, at=at), state, HARD, SOFT)
        whole.append(verdict.full_sample)
        at += 0.02
    #            first soft crossed             hard, and still      back over each
    assert whole == [True, True, False, False, False, True, True, True, True]


def test_a_soft_threshold_of_a_disk_waits_for_nothing() -> None:
    soft, state, whole = (
        DISK._replace(value=Amount(GIB + 80 * MIB, None, "1104Mi"), grace_period_s=600.0),
        ScheduleState(),
        [],
    )
    for step in range(60):  # 150 MiB/s: as fast as the disk that a kubelet was seen to lose
        at, left = 0.02 * step, GIB + (140 - 3 * step) * MIB
        verdict, state = _look(_with_disk(left, read_at=at, at=at), state, DISK, soft)
        whole += [(left - GIB) // MIB] if verdict.full_sample else []
    assert whole[:2] == [140, 77]


def test_a_soft_threshold_on_the_way_to_a_hard_one_waits_for_it_but_not_for_long() -> None:
    ramp = [700 - 20 * step for step in range(25)]  # MiB: 1 GiB/s, in looks of 20 ms
    whole: list[int] = []
    state = ScheduleState()
    for step, mib in enumerate(ramp):
        verdict, state = _look(_node(mib * MIB, at=0.02 * step), state, HARD, SOFT)
        whole += [mib] if verdict.full_sample else []
    assert whole == [700, *(mib for mib in ramp if mib < 300)]
    # The same, but it stops in between: the soft threshold has its turn.
    told: list[float] = []
    state = ScheduleState()
    for step in range(100):
        verdict, state = _look(_node(max(400, 700 - 20 * step) * MIB, at=0.02 * step), state, HARD, SOFT)
        told += [0.02 * step] if verdict.full_sample else []
    crossed = 0.02 * 11
    assert told[0] == 0.0
    assert told[1] == pytest.approx(crossed + schedule.MAX_POSTPONE_S, abs=0.021)
    # Also where they are far apart: what it sets going goes on for longer than a look.
    early, state = SOFT._replace(value=Amount(1000 * MIB, None, "1000Mi")), ScheduleState()
    whole = []
    for step in range(60):
        verdict, state = _look(_node((1400 - 20 * step) * MIB, at=0.02 * step), state, HARD, early)
        whole += [1400 - 20 * step] if verdict.full_sample else []
    assert whole[:2] == [1400, 280]
    # Long after the last whole sample as well: it waits since it was due, not since then.
    _, state = _look(_node(700 * MIB, at=0.0), ScheduleState(), HARD, SOFT)
    whole = []
    for step, mib in enumerate(ramp):
        verdict, state = _look(_node(mib * MIB, at=8.0 + 0.02 * step), state, HARD, SOFT)
        whole += [mib] if verdict.full_sample else []
    assert whole == [mib for mib in ramp if mib < 300]


def test_a_soft_grace_is_not_slept_through_however_much_there_is_left() -> None:
    soft = SOFT._replace(value=Amount(40 * GIB, None, "40Gi"))
    _, state = _look(_node(39 * GIB, at=0.0), ScheduleState(), soft)
    verdict, state = _look(_node(39 * GIB, at=0.1), state, soft)
    assert (verdict.sleep_s, verdict.full_sample) == (schedule.SOFT_SAMPLE_S, False)
    assert _look(_node(39 * GIB, at=0.25), state, soft)[0].full_sample


def test_a_whole_sample_is_due_while_a_hard_threshold_is_met_and_once_after() -> None:
    _, state = _look(_node(GIB, at=0.0), ScheduleState())
    below, state = _look(_node(200 * MIB, at=0.1), state)
    again, state = _look(_node(200 * MIB, at=0.2), state)
    over, state = _look(_node(GIB, at=0.3), state)
    calm, state = _look(_node(GIB, at=0.4), state)
    assert [below.full_sample, again.full_sample, over.full_sample, calm.full_sample] == [True, True, True, False]


def test_a_threshold_by_mem_available_looks_at_mem_available() -> None:
    threshold = HARD._replace(memory_model=MemoryModel.MEM_AVAILABLE)
    verdict, _ = _look(_node(8 * GIB, at=0.0, mem_available=301 * MIB), ScheduleState(), threshold)
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
        verdict, state = _look(_node(available, at=at), state, HARD, SOFT)
        assert schedule.SHORTEST_S <= verdict.sleep_s <= INTERVAL_S


DISK = Threshold(Signal.NODEFS, Amount(GIB, None, "1Gi"))


def _with_disk(available: int | None, *, read_at: float, at: float, memory: int = 40 * GIB) -> NodeSnapshot:
    """nodefs of 100 GiB, read some time before the rest."""
    node = _node(memory, at=at)
    disk = Observation(Signal.NODEFS, available, 100 * GIB, read_at, "test", "" if available is not None else "gone")
    return node._replace(observations={**node.observations, Signal.NODEFS: disk})


def test_while_memory_runs_out_the_disks_are_read_as_rarely_as_without_it() -> None:
    verdict, state = _look(_with_disk(60 * GIB, read_at=0.0, at=0.0, memory=310 * MIB), ScheduleState(), HARD, DISK)
    assert (verdict.sleep_s, state.disks_at) == (schedule.SHORTEST_S, INTERVAL_S)
    verdict, state = _look(_with_disk(60 * GIB, read_at=0.0, at=4.0, memory=310 * MIB), state, HARD, DISK)
    assert (verdict.sleep_s, state.disks_at) == (schedule.SHORTEST_S, INTERVAL_S), (
        "from when they were read, not looked at"
    )


def test_without_a_threshold_for_them_disks_are_read_once_in_an_interval() -> None:
    _, state = _look(_with_disk(0, read_at=3.0, at=5.0), ScheduleState())
    assert state.disks_at == pytest.approx(3.0 + INTERVAL_S)


def _far(at: float, read_at: float) -> NodeSnapshot:
    """Far from every threshold, its disk and its limits read some time before."""
    node = _with_disk(60 * GIB, read_at=read_at, at=at, memory=60 * GIB)
    return node._replace(mem_available=node.mem_available._replace(read_at=read_at))


def _calm_look(node: NodeSnapshot, calm: int, *thresholds: Threshold, interval_s: float = 1.0) -> ScheduleState:
    state = ScheduleState(calm=calm, full_sample_at=node.taken_at)
    return schedule.plan_next(node, state, now=node.taken_at, thresholds=thresholds, interval_s=interval_s)[1]


@pytest.mark.parametrize(
    ("calm", "interval_s", "every_s"),
    [
        (schedule.CALM_AFTER, 1.0, schedule.CALM_S),
        (schedule.CALM_AFTER - 1, 1.0, 1.0),
        (schedule.CALM_AFTER, 20.0, 20.0),
    ],
    ids=["calm", "starting", "interval"],
)
def test_a_calm_node_has_its_disks_and_its_limits_read_as_rarely_as_its_pods(
    calm: int, interval_s: float, every_s: float
) -> None:
    state = _calm_look(_far(4.0, read_at=3.0), calm, HARD, DISK, interval_s=interval_s)
    assert (state.disks_at, state.limits_at) == pytest.approx((3.0 + every_s, 3.0 + every_s))


def test_the_limits_are_read_again_before_memory_could_be_short() -> None:
    node = _far(4.0, read_at=3.0)
    for signal in (Signal.MEMORY, Signal.ALLOCATABLE_MEMORY):
        seen = Observation(signal, 300 * MIB + 6 * GIB, 8 * GIB, 4.0, "test")
        closer = node._replace(observations={**node.observations, signal: seen})
        state = _calm_look(closer, schedule.CALM_AFTER, HARD._replace(signal=signal))
        assert state.limits_at == 3.0 + 0.5 * 6, "half the time to its threshold at 1 GiB/s"
    pids = Observation(Signal.PID, 25_000, 32_768, 4.0, "test")
    node = node._replace(observations={**node.observations, Signal.PID: pids})
    few = Threshold(Signal.PID, Amount(1000, None, "1000"))
    assert _calm_look(node, schedule.CALM_AFTER, few).limits_at == 3.0 + schedule.CALM_S, (
        "no machine is given more of those"
    )


def test_limits_are_read_at_every_look_below_a_threshold_and_for_mem_available() -> None:
    below = _far(4.0, read_at=3.0)
    crossed = below.observations[Signal.MEMORY]._replace(available=499 * MIB)
    below = below._replace(observations={**below.observations, Signal.MEMORY: crossed})
    state = _calm_look(below, schedule.CALM_AFTER, HARD, SOFT, DISK)
    assert state.limits_at == 4.0
    assert state.disks_at == 3.0 + schedule.CALM_S, "a disk at its own pace"
    by_kernel = HARD._replace(memory_model=MemoryModel.MEM_AVAILABLE)
    far = _far(4.0, read_at=3.0)
    far = far._replace(mem_available=far.mem_available._replace(available=7 * GIB))
    assert _calm_look(far, schedule.CALM_AFTER, by_kernel).limits_at == 4.0


@pytest.mark.parametrize("signal", [Signal.PID, Signal.ALLOCATABLE_MEMORY])
def test_what_a_threshold_does_not_know_has_its_limit_read_at_every_look(signal: Signal) -> None:
    threshold = HARD._replace(signal=signal)
    assert _calm_look(_far(4.0, read_at=4.0), schedule.CALM_AFTER, HARD, threshold).limits_at == 4.0


def test_a_disk_is_read_again_before_it_could_be_full() -> None:
    verdict, state = _look(_with_disk(5 * GIB, read_at=2.0, at=3.0), ScheduleState(), HARD, DISK)
    assert state.disks_at == pytest.approx(2.0 + 0.5 * 4), "half the time to its threshold at 1 GiB/s"
    assert verdict.sleep_s == pytest.approx(1.0), "and the loop is there then"


@pytest.mark.parametrize("available", [GIB - 1, 0, GIB + 50 * MIB], ids=["crossed", "full", "near"])
def test_a_disk_that_is_crossed_or_near_is_read_at_every_look(available: int) -> None:
    _, state = _look(_with_disk(available, read_at=7.0, at=7.0), ScheduleState(), HARD, DISK)
    assert state.disks_at == 7.0


def test_a_disk_that_is_unknown_is_tried_again_every_second_and_not_fifty_times() -> None:
    verdict, state = _look(_with_disk(None, read_at=6.5, at=7.0, memory=310 * MIB), ScheduleState(), HARD, DISK)
    assert (verdict.sleep_s, state.disks_at) == (schedule.SHORTEST_S, 6.5 + schedule.UNKNOWN_S)
    short = DISK._replace(signal=Signal.NODEFS_INODES)  # of btrfs, say: unknown, whatever its bytes are
    _, state = _look(_with_disk(60 * GIB, read_at=7.0, at=7.0), ScheduleState(), DISK, short)
    assert state.disks_at == 7.0 + schedule.UNKNOWN_S
    _, state = _look(_with_disk(GIB - 1, read_at=7.0, at=7.0), ScheduleState(), DISK, short)
    assert state.disks_at == 7.0, "but one that is crossed is read at every look"


def _asks(what: str, *seen: tuple[float, int], thresholds: tuple[Threshold, ...] = (HARD,)) -> list[float]:
    """When that is asked for, `prepare` or `guard`, of looks (time, MiB available). The last whole one is new."""
    state, taken = ScheduleState(full_sample_at=0.0), []
    for at, mib in seen:
        verdict, state = _look(_node(mib * MIB, at=at), state, *thresholds)
        asked = getattr(verdict, what)
        assert not (asked and verdict.full_sample)
        taken += [at] if asked else []
    return taken


def test_pods_are_looked_at_right_before_a_hard_threshold_is_crossed() -> None:
    ramp = [(0.02 * look, 400 - 20 * look) for look in range(8)]  # 1,000 MiB/s; crossed after 0.1 s
    assert _asks("prearm", *ramp) == pytest.approx([0.06])
    assert _asks("prearm", *ramp, thresholds=(HARD._replace(grace_period_s=10.0),)) == [], "a grace period is no haste"


def test_who_hovers_above_a_threshold_prepares_for_it_ten_times_a_second_at_most() -> None:
    hovering = [(0.02 * look, 301 + look % 2) for look in range(500)]
    taken = _asks("prearm", *hovering)
    assert 2 <= len(taken) <= 0.02 * 500 / schedule.PREARM_EVERY_S + 1


def test_what_has_filled_fast_and_stands_still_now_is_not_prepared_for() -> None:
    assert _asks("prearm", (0.0, 800), (0.1, 320), (0.12, 320), (0.14, 320))[1:] == []


def test_who_is_to_be_guarded_is_asked_half_a_second_before_a_hard_threshold_of_memory_is_crossed() -> None:
    ramp = [(0.02 * look, 1090 - 20 * look) for look in range(41)]  # 1,000 MiB/s; crossed after 0.8 s
    assert _asks("growth_cap", *ramp) == pytest.approx([0.3, 0.56])
    assert _asks("growth_cap", *ramp, thresholds=(HARD._replace(grace_period_s=10.0),)) == []


def test_who_fills_a_disk_is_not_guarded_but_prepared_for() -> None:
    state, asked = ScheduleState(full_sample_at=0.0), []
    for look in range(40):  # 1,000 MiB/s
        at, left = 0.02 * look, GIB + (790 - 20 * look) * MIB
        verdict, state = _look(_with_disk(left, read_at=at, at=at), state, DISK)
        asked.append((verdict.growth_cap, verdict.prearm))
    assert set(asked) == {(False, False), (False, True)}


def test_who_creeps_or_stands_still_above_a_threshold_is_not_guarded() -> None:
    assert _asks("growth_cap", (0.0, 800), (0.1, 310), (0.12, 310), (0.14, 310), (1.0, 309))[1:] == []

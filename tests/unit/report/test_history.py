"""Series and windows of a recording."""

from typing import Any

from nodeagent.model import (
    ConditionType,
    NodeSnapshot,
    Observation,
    RecordedSample,
    Signal,
    Stall,
    StallScope,
    Unit,
)
from nodeagent.report import history, history_values
from nodeagent.report.downsampling import Point
from nodeagent.report.history_values import EvictionMark, OomKillMark
from tests.support import nodes, recordings
from tests.support.nodes import GI, MI, NOW, WALL

SOFT, HARD = nodes.soft(value=2 * GI, grace_s=10.0), nodes.hard(value=GI)


def falling(second: float) -> NodeSnapshot:
    """8 GiB, then below both thresholds from second 20 to 60, then 8 GiB again."""
    available = 8 * GI if second < 20 or second >= 60 else 1536 * MI if second < 40 else 512 * MI
    web, batch = nodes.view("web", GI), nodes.view("batch", int(second) * 10 * MI)
    return nodes.snapshot(web, batch, at=NOW + second, available={Signal.MEMORY: available})


def recorded(seconds: int = 120, **more: Any) -> tuple[RecordedSample, ...]:
    return recordings.record(falling, nodes.config(SOFT, HARD, **more), seconds=seconds)


def test_a_signal_series_has_the_lowest_value_and_the_capacity() -> None:
    series = {each.name: each for each in history.history(recorded()).signals}
    memory = series["memory.available"]
    assert (memory.unit, memory.signal, memory.capacity) == (Unit.BYTES, Signal.MEMORY, 16 * GI)
    assert memory.points[0] == Point(WALL, 8 * GI)
    assert min(point.value for point in memory.points if point.value is not None) == 512 * MI
    assert series["pid.available"].unit is Unit.PIDS


def test_a_signal_that_was_never_read_has_no_series() -> None:
    snapshot = nodes.snapshot(available={Signal.PID: None})
    names = [each.name for each in history.history([RecordedSample(snapshot)]).signals]
    assert "pid.available" not in names
    assert "memory.available" in names


def test_an_implausible_value_is_a_gap() -> None:
    good = nodes.snapshot()
    wrong = Observation(Signal.MEMORY, 1 << 70, 1 << 71, NOW + 1, "test")
    bad = nodes.snapshot(at=NOW + 1)._replace(observations={Signal.MEMORY: wrong})
    signals = history.history([RecordedSample(good), RecordedSample(bad)]).signals
    (series,) = [each for each in signals if each.signal is Signal.MEMORY]
    assert [point.value for point in series.points] == [8 * GI, None]


def test_a_threshold_series_steps_where_its_value_changes() -> None:
    series = history.history(recorded()).thresholds
    assert [(each.name, each.tier.value) for each in series] == [
        (f"memory.available < {2 * GI} (soft, 10s)", "soft"),
        (f"memory.available < {GI} (hard)", "hard"),
    ]
    assert series[0].points == (Point(WALL, 2 * GI), Point(WALL + 119, 2 * GI))


def test_a_grace_window_lasts_from_met_to_due() -> None:
    (window,) = history.history(recorded()).graces
    assert window.name == f"memory.available < {2 * GI} (soft, 10s)"
    assert window.began == WALL + 20
    assert window.ended == WALL + 30


def test_a_threshold_that_is_met_at_the_end_has_no_end() -> None:
    soft, hard = history.history(recorded(seconds=50)).met
    assert (soft.began, soft.due, soft.ended) == (WALL + 20, WALL + 30, None)
    assert (hard.began, hard.due, hard.ended) == (WALL + 40, WALL + 40, None)


def test_a_window_may_begin_before_the_recording() -> None:
    samples = recorded()[25:]
    (window,) = history.history(samples).graces
    assert window.began == WALL + 20


def test_a_condition_window_names_when_damping_alone_kept_it() -> None:
    samples = recorded(eviction_pressure_transition_period_s=30.0)
    (window,) = history.history(samples).conditions
    assert window.type is ConditionType.MEMORY_PRESSURE
    assert window.began == WALL + 20
    assert window.relieved == WALL + 60
    assert window.ended is not None
    assert window.ended >= WALL + 90
    assert window.message


def test_pods_are_stacked_by_their_peaks_with_the_rest_in_one() -> None:
    first, second = history.history(recorded(), top=1).pods
    assert (first.name, second.name) == ("shop/batch", history_values.OTHER_PODS)
    assert first.points[-1] == Point(WALL + 119, 1190 * MI)
    assert {point.value for point in second.points} == {GI}
    assert [point.at for point in first.points] == [point.at for point in second.points]


def test_a_stretch_of_pods_is_shown_at_the_lowest_point_of_the_node() -> None:
    def dip(second: float) -> NodeSnapshot:
        low = second == 777
        size = 5 * GI if low else GI
        return nodes.snapshot(
            nodes.view("web", size), at=NOW + second, available={Signal.MEMORY: (2 if low else 8) * GI}
        )

    samples = [RecordedSample(dip(float(second))) for second in range(2000)]
    (web,) = history.history(samples, stretches=20).pods
    assert len(web.points) <= 40
    assert Point(WALL + 777, 5 * GI) in web.points


def test_a_pod_that_did_not_exist_is_a_gap() -> None:
    samples = [
        RecordedSample(nodes.snapshot(at=NOW)),
        RecordedSample(nodes.snapshot(nodes.view("web", GI), at=NOW + 1)),
    ]
    (web,) = history.history(samples).pods
    assert [point.value for point in web.points] == [None, GI]


def test_stalls_are_percent_of_each_scope() -> None:
    stall = Stall(StallScope.NODE, "memory", 1.5, 1.0, 10, 0.5, 0.2, 5, NOW)
    samples = [RecordedSample(nodes.snapshot(stalls=(stall,)))]
    assert [(each.name, each.unit, each.points) for each in history.history(samples).stalls] == [
        ("memory some (node)", "percent", (Point(WALL, 1.5),)),
        ("memory full (node)", "percent", (Point(WALL, 0.5),)),
    ]


def test_a_recording_from_elsewhere_has_series_and_no_windows() -> None:
    samples = [RecordedSample(falling(float(second))) for second in range(90)]
    found = history.history(samples)
    assert (found.samples, found.began, found.ended) == (90, WALL, WALL + 89)
    assert found.signals
    assert found.pods
    assert (found.thresholds, found.conditions, found.met) == ((), (), ())


def test_no_samples_are_an_empty_history() -> None:
    assert history.history([]).began is None
    assert history.history([]).signals == ()


def test_evictions_have_the_outcome_of_each_victim() -> None:
    records: list[dict[str, Any]] = [
        {"record": "outcome", "planId": "p1", "podUid": "u1", "kind": "accepted"},
        {
            "record": "decision",
            "id": "p1",
            "wallTime": 5.0,
            "victims": [
                {
                    "namespace": "shop",
                    "name": "web",
                    "uid": "u1",
                    "tier": "hard",
                    "method": "evict",
                    "threshold": {"signal": "memory.available"},
                },
                {"uid": "u2"},
            ],
        },
        {"record": "decision", "id": "p2", "victims": [{"uid": "u3"}]},
        {"record": "decision", "id": "p3", "wallTime": 6.0, "victims": "many"},
    ]
    first, second = history.evictions(records)
    assert first == EvictionMark(5.0, "shop/web", "u1", "p1", "memory.available", "hard", "evict", outcome="accepted")
    assert (second.pod, second.outcome) == ("uid/u2", "")


def test_oom_kills_name_their_pod_or_cgroup() -> None:
    records: list[dict[str, Any]] = [
        {
            "record": "oom",
            "id": "o1",
            "wallTime": 7.0,
            "race": {"loss": "too late"},
            "kills": [{"pod": "shop/web", "number": 2}, {"place": {"path": "/system.slice/a.service"}, "number": None}],
        }
    ]
    assert history.oom_kills(records) == (
        OomKillMark(7.0, "shop/web", "o1", 2, race_lost=True),
        OomKillMark(7.0, "/system.slice/a.service", "o1", None, race_lost=True),
    )

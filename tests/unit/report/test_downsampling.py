"""Fewer points of a series, with the peaks kept."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.report.downsampling import GAP_S, Downsampler, Point

STEPS = st.lists(st.tuples(st.floats(0.01, GAP_S / 2), st.integers(0, 1000)), min_size=1, max_size=400)


def fed(values: list[tuple[float, float | None]], *, stretches: int = 5) -> tuple[Point, ...]:
    series = Downsampler(stretches)
    for at, value in values:
        series.add(at, value)
    return series.points()


@given(STEPS)
def test_the_lowest_and_the_highest_value_of_a_series_are_always_kept(steps: list[tuple[float, int]]) -> None:
    at, values = 0.0, []
    for step, value in steps:
        at += step
        values.append((at, float(value)))
    points = fed(list(values))
    kept = [point.value for point in points if point.value is not None]
    assert min(kept) == min(value for _, value in values)
    assert max(kept) == max(value for _, value in values)
    assert set(points) <= {Point(*each) for each in values}
    assert [point.at for point in points] == sorted(point.at for point in points)
    assert len(points) <= 20


def test_a_short_series_keeps_every_value() -> None:
    values = [(float(at), float(at % 3)) for at in range(9)]
    assert fed(list(values)) == tuple(Point(*each) for each in values)


def test_a_dip_of_one_sample_survives_a_day() -> None:
    values = [(float(at), 3.0 if at == 40_000 else 500.0) for at in range(86_400)]
    points = fed(list(values), stretches=100)
    assert len(points) <= 400
    assert Point(40_000.0, 3.0) in points


def test_a_time_without_samples_is_a_gap() -> None:
    points = fed([(0.0, 1.0), (1.0, 2.0), (500.0, 3.0)])
    assert points == (Point(0.0, 1.0), Point(1.0, 2.0), Point(1.0, None), Point(500.0, 3.0))


def test_unknown_values_are_a_gap_and_never_zero() -> None:
    points = fed([(0.0, 1.0), (1.0, None), (2.0, None), (3.0, 4.0)])
    assert points == (Point(0.0, 1.0), Point(1.0, None), Point(2.0, None), Point(3.0, 4.0))


def test_a_recording_of_gaps_alone_is_bounded() -> None:
    points = fed([(at * 1000.0, float(at)) for at in range(5000)])
    assert len(points) <= 30
    assert points[0].value == 0.0


@pytest.mark.parametrize("times", [[5.0, 4.0, 3.0, 2.0], [math.nan] * 50, [0.0, math.inf, 1.0] * 20, [1e300, -1e300]])
def test_times_of_a_damaged_recording_end_in_a_series(times: list[float]) -> None:
    points = fed([(at, 1.0) for at in times])
    assert bool(points) == any(map(math.isfinite, times))
    assert all(math.isfinite(point.at) for point in points)

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.policy import trend

MI = 1 << 20


def line(*levels: int, every_s: float = 1.0) -> trend.History:
    history: trend.History = ()
    for index, level in enumerate(levels):
        history = trend.extend(history, read_at=100.0 + index * every_s, available=level)
    return history


def test_a_steady_fill_has_its_rate_and_both_times() -> None:
    found = trend.estimate(line(900 * MI, 800 * MI, 700 * MI, 600 * MI), values=[100 * MI, 300 * MI])
    assert found is not None
    assert found.rate_per_s == -100 * MI
    assert found.to_threshold_s == 3.0
    assert found.to_exhaustion_s == 6.0
    assert found.confidence == 1.0


def test_a_signal_that_recovers_is_never_exhausted() -> None:
    found = trend.estimate(line(100, 200, 300, 400), values=[50])
    assert found is not None
    assert found.to_exhaustion_s is None
    assert found.to_threshold_s is None


def test_a_constant_signal_is_a_certain_trend_to_nowhere() -> None:
    found = trend.estimate(line(5, 5, 5, 5, 5), values=[5])
    assert found == (0.0, None, None, 1.0)


def test_a_single_outlier_does_not_turn_the_slope_around() -> None:
    found = trend.estimate(line(900, 800, 700, 5000, 500, 400))
    assert found is not None
    assert -110 <= found.rate_per_s <= -90


def test_noise_around_a_level_has_little_confidence() -> None:
    found = trend.estimate(line(500, 480, 510, 470, 505, 490))
    assert found is not None
    assert found.confidence < 0.6


def test_too_few_samples_are_no_trend() -> None:
    assert trend.estimate(line(3, 2, 1)) is None
    assert trend.estimate(()) is None


def test_a_sample_that_is_not_newer_changes_nothing() -> None:
    history = line(4, 3, 2)
    assert trend.extend(history, read_at=history[-1][0], available=1) is history
    assert trend.extend(history, read_at=history[0][0], available=1) is history


def test_close_samples_replace_one_another_so_that_the_view_stays_wide() -> None:
    history = line(*range(1000, 900, -1), every_s=0.02)
    assert history[-1][1] == 901
    assert abs(history[-1][0] - 101.98) < 1e-9
    assert history[-1][0] - history[0][0] >= (trend.SAMPLES - 2) * trend.SPACING_S


def test_points_beyond_the_horizon_are_dropped() -> None:
    history = trend.extend(line(4, 3, 2), read_at=100.0 + 2 * trend.HORIZON_S, available=1)
    assert [level for _, level in history] == [1]


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 1 << 50)), max_size=60))
def test_any_history_is_bounded_in_order_and_its_trend_is_a_number(points: list[tuple[float, int]]) -> None:
    history: trend.History = ()
    for at, level in points:
        history = trend.extend(history, read_at=at, available=level)
        assert len(history) <= trend.SAMPLES
        assert all(earlier[0] < later[0] for earlier, later in itertools.pairwise(history))
        found = trend.estimate(history, values=[1 << 20])
        if found is not None:
            assert math.isfinite(found.rate_per_s)
            assert 0.0 <= found.confidence <= 1.0
            assert found.to_exhaustion_s is None or found.to_exhaustion_s >= 0.0


def test_a_release_does_not_hide_the_fall_before_and_after_it() -> None:
    history = line(900 * MI, 870 * MI, 840 * MI, 1140 * MI, 1110 * MI, 1080 * MI)
    found = trend.estimate(history)
    assert found is not None
    assert found.rate_per_s > 0
    assert trend.between_neighbours(history) == -30 * MI
    assert trend.between_neighbours(history[:3]) is None


def test_the_latest_rate_ignores_a_closer_sample_and_needs_an_older_one() -> None:
    assert trend.latest_rate(()) is None
    assert trend.latest_rate(((0.0, 50), (0.1, 40))) is None
    assert trend.latest_rate(((0.0, 100), (1.0, 90))) == -10.0
    assert trend.latest_rate(((0.0, 100), (1.0, 90), (1.001, 90))) == pytest.approx(-10.0, rel=0.01)

import math

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.report import sparkline

VALUES = st.lists(st.none() | st.floats(-1e18, 1e18), max_size=200)


def test_a_curve_rises_with_its_values() -> None:
    assert sparkline.sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == sparkline.LEVELS


def test_an_unknown_value_is_a_gap_and_not_zero() -> None:
    assert sparkline.sparkline([7, None, math.nan, 7], 8, low=0, high=7) == "█  █"
    assert sparkline.sparkline([None, None], 8) == "  "


def test_a_dip_of_one_sample_among_hundreds_stays_visible() -> None:
    values = [100.0] * 400
    values[133] = 2.0
    assert sparkline.sparkline(values, 20, low=0, high=100).count("▁") == 1


def test_a_given_scale_is_kept_also_by_values_outside_it() -> None:
    assert sparkline.sparkline([-5, 50, 500], 3, low=0, high=100) == "▁▅█"


def test_equal_values_lie_at_the_bottom_of_their_own_scale() -> None:
    assert sparkline.sparkline([3, 3, 3], 8) == "▁▁▁"


@given(VALUES, st.integers(-1, 90))
def test_a_curve_is_never_wider_than_allowed(values: list[float | None], width: int) -> None:
    assert len(sparkline.sparkline(values, width)) == min(len(values), max(0, width))


@given(st.none() | st.floats(), st.integers(0, 90), st.none() | st.floats())
def test_a_bar_is_as_wide_as_asked(share: float | None, width: int, mark: float | None) -> None:
    assert len(sparkline.bar(share, width, mark)) == width


def test_a_bar_shows_its_share_in_eighths_of_a_letter() -> None:
    assert sparkline.bar(0, 4) == "░░░░"
    assert sparkline.bar(0.5, 4) == "██░░"
    assert sparkline.bar(1 / 32, 4) == "▏░░░"
    assert sparkline.bar(2.5, 4) == "████"


def test_an_unknown_share_is_no_empty_bar() -> None:
    assert sparkline.bar(None, 4) == "?   "


def test_the_mark_of_a_threshold_is_drawn_over_the_bar() -> None:
    assert sparkline.bar(1.0, 4, mark=0.5) == "██│█"
    assert sparkline.bar(0.0, 4, mark=1.0) == "░░░│"
    assert sparkline.bar(0.0, 4, mark=1.5) == "░░░░"

import math

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model import Unit
from nodeagent.report import chart_scales
from nodeagent.report.chart_scales import COUNT, PERCENT, SECONDS

VALUES = st.floats(-1e18, 1e18).map(lambda value: round(value, 6))
ALL_UNITS = [*[unit.value for unit in Unit], PERCENT, SECONDS, COUNT]


def test_an_axis_of_bytes_has_labels_at_powers_of_two() -> None:
    scale = chart_scales.value_scale(200 << 20, 3 << 30, Unit.BYTES)
    assert [chart_scales.value_text(tick, Unit.BYTES) for tick in scale.ticks] == ["0", "1Gi", "2Gi", "3Gi"]


def test_every_axis_contains_zero_so_that_a_small_change_looks_small() -> None:
    assert chart_scales.value_scale(9000, 9100, COUNT).low == 0
    assert chart_scales.value_scale(-50, -20, Unit.PIDS).high == 0


@given(VALUES, VALUES, st.sampled_from(ALL_UNITS))
def test_an_axis_contains_its_values_and_has_few_labels(one: float, other: float, unit: str) -> None:
    low, high = sorted((one, other))
    scale = chart_scales.value_scale(low, high, unit)
    assert scale.low <= low
    assert scale.high >= high
    assert 2 <= len(scale.ticks) <= 12
    assert all(math.isfinite(tick) for tick in scale.ticks)


@given(st.floats(-1e12, 1e12), st.floats(0, 1e9))
def test_the_times_of_an_axis_are_within_it(began: float, length: float) -> None:
    scale = chart_scales.time_scale(began, began + length)
    assert all(scale.low <= tick <= scale.high for tick in scale.ticks)
    assert len(scale.ticks) <= 8


def test_times_are_labelled_at_round_minutes() -> None:
    scale = chart_scales.time_scale(1_795_806_007, 1_795_806_607)
    assert [chart_scales.time_text(tick, 600) for tick in scale.ticks] == ["19:02", "19:04", "19:06", "19:08", "19:10"]


def test_a_label_is_as_exact_as_the_span_needs() -> None:
    at = 1_795_806_007
    spans = (60, 6000, 600_000)
    assert [chart_scales.time_text(at, span) for span in spans] == ["19:00:07", "19:00", "11-27 19:00"]


def test_numbers_have_the_form_of_their_unit() -> None:
    assert chart_scales.value_text(1.5 * (1 << 30), Unit.BYTES) == "1.5Gi"
    assert chart_scales.value_text(12.5, PERCENT) == "12.5%"
    assert chart_scales.value_text(300, SECONDS) == "5m"
    assert chart_scales.value_text(None, COUNT) == "?"
    assert chart_scales.value_text(math.inf, Unit.PIDS) == "?"


def test_a_time_outside_the_calendar_of_a_damaged_recording_is_unknown() -> None:
    assert chart_scales.time_text(1e30, 60) == "?"

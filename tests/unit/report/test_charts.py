import math
import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.report import chart_scales, charts
from nodeagent.report.charts import Band, Line, Mark

BEGAN = 1_795_806_000.0
MIB = 1 << 20


def every_second(*values: float | None) -> list[tuple[float, float | None]]:
    return [(BEGAN + number, value) for number, value in enumerate(values)]


def shapes(chart: str, kind: str, name: str) -> list[list[tuple[float, float]]]:
    """The places of each shape with this class, in the square of 1000."""
    found = re.findall(rf'<{kind} class="{name}" points="([^"]*)"', chart)
    return [[(float(x), float(y)) for x, y in (place.split(",") for place in each.split())] for each in found]


def test_a_gap_divides_a_line_and_is_not_bridged() -> None:
    chart = charts.time_chart("memory", [Line("memory", every_second(8, 8, None, 4, 4))], unit="pids")
    assert shapes(chart, "polyline", "line l0") == [[(0, 0), (250, 0)], [(750, 500), (1000, 500)]]


def test_a_number_that_is_none_is_a_gap() -> None:
    chart = charts.time_chart("memory", [Line("memory", every_second(8, math.nan, 4))], unit="pids")
    assert len(shapes(chart, "polyline", "line l0")) == 2


def test_a_threshold_is_a_step_at_the_time_of_its_change() -> None:
    limit = Line("hard", [(BEGAN, 2), (BEGAN + 5, 4), (BEGAN + 10, 4)], "hard")
    chart = charts.time_chart("pids", [Line("pids", every_second(*[8] * 11)), limit], unit="pids")
    assert shapes(chart, "polyline", "hard") == [[(0, 750), (500, 750), (500, 500), (1000, 500), (1000, 500)]]


def test_stacked_areas_lie_on_each_other() -> None:
    lines = [Line("one", every_second(1, 1)), Line("two", every_second(3, None))]
    chart = charts.time_chart("pods", lines, unit="pids", stacked=True)
    assert shapes(chart, "polygon", "area a0") == [[(0, 750), (1000, 750), (1000, 1000), (0, 1000)]]
    assert shapes(chart, "polygon", "area a1") == [[(0, 0), (1000, 750), (1000, 750), (0, 750)]]


def test_an_event_has_a_number_in_the_picture_and_its_words_below() -> None:
    marks = [Mark(BEGAN + 2, "OOM kill in shop/db"), Mark(BEGAN + 1, "evicted shop/web")]
    chart = charts.time_chart("memory", [Line("memory", every_second(8, 8, 8))], marks=marks)
    words = re.sub("<[^>]*>", " ", chart)
    assert re.search(r"1\s+19:00:01\s+evicted shop/web\s+2\s+19:00:02\s+OOM kill in shop/db", words)


def test_events_outside_the_shown_time_are_left_out() -> None:
    chart = charts.time_chart("memory", [Line("memory", every_second(8, 8))], marks=[Mark(BEGAN - 5, "earlier")])
    assert "earlier" not in chart


def test_a_band_has_its_times_and_its_length_as_text() -> None:
    bands = [Band("grace", BEGAN + 1, BEGAN + 3), Band("MemoryPressure", BEGAN + 2, None, "239Mi left", "hard")]
    chart = charts.time_chart("memory", [Line("memory", every_second(*[8] * 11))], bands=bands)
    assert "grace 19:00:01 to 19:00:03 (2s)" in chart
    assert "MemoryPressure 19:00:02 to the end (8s): 239Mi left" in chart


def test_the_description_has_the_lowest_and_the_last_value() -> None:
    chart = charts.time_chart("memory", [Line("available", every_second(900 * MIB, 100 * MIB, 500 * MIB))])
    label = re.findall('role="img"[^>]* aria-label="([^"]*)"', chart)[0]
    assert "available: lowest 100Mi at 19:00:01, highest 900Mi at 19:00:00, last 500Mi." in label


def test_the_values_are_also_a_table() -> None:
    chart = charts.time_chart("memory", [Line("available", every_second(900 * MIB, None))])
    assert "<bdi>900Mi</bdi>" in chart
    assert "<bdi>?</bdi>" in chart


def test_a_chart_without_samples_says_so() -> None:
    assert "No samples." in charts.time_chart("memory", [])
    assert "No values." in charts.curve_chart("memory", [Line("misses", [])], x_name="threshold")


def test_a_curve_has_the_unit_of_its_axis_and_not_of_time() -> None:
    curve = Line("false alarms", [(100 * MIB, 0), (700 * MIB, 12)])
    chart = charts.curve_chart("thresholds", [curve], x_name="threshold", unit=chart_scales.COUNT)
    assert "from 100Mi to 700Mi" in chart
    assert ">512Mi</text>" in chart


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", '"><b onclick="x">', "\u202eabc", "x" * 10_000])
def test_a_hostile_name_is_text_everywhere(name: str) -> None:
    chart = charts.time_chart(
        name,
        [Line(name, every_second(1, 2)), Line(name, every_second(1, 1), "hard")],
        bands=[Band(name, BEGAN, None, name)],
        marks=[Mark(BEGAN + 1, name)],
        note=name,
    )
    tags = {each.tag for each in ET.fromstring(chart).iter()}
    assert not tags & {"script", "b onclick"}
    assert "onclick" not in {key for each in ET.fromstring(chart).iter() for key in each.attrib}
    assert "\u202e" not in chart
    assert len(chart) < 60_000


@given(
    st.lists(st.tuples(st.floats(0, 4e9), st.none() | st.floats(-1e19, 1e19)), max_size=30),
    st.booleans(),
    st.lists(st.tuples(st.floats(0, 4e9), st.none() | st.floats(0, 4e9)), max_size=5),
)
def test_any_values_make_a_well_formed_chart(
    points: list[tuple[float, float | None]], stacked: bool, bands: list[tuple[float, float | None]]
) -> None:
    chart = charts.time_chart(
        "any",
        [Line("one", sorted(points, key=lambda each: each[0])), Line("two", points[:1], "hard")],
        stacked=stacked,
        bands=[Band("band", *each) for each in bands],
        marks=[Mark(at, "event") for at, _ in points],
    )
    root = ET.fromstring(chart)
    assert root.tag == "figure"
    assert "nan" not in chart
    assert "inf" not in re.sub("<[^>]*aria[^>]*>", "", chart)

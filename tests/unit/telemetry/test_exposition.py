"""What is written in the exposition formats is read back by the reference implementation as it was meant."""

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from nodeagent.telemetry.exposition import COUNTER, GAUGE, HISTOGRAM, Family, Histogram, Series, render

# What str.splitlines takes for a line's end and the format does not: their parser's business, not ours.
LABEL = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp"), include_characters='\n"\\'), max_size=20)


def samples(text: bytes, *, openmetrics: bool) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    read = read_openmetrics if openmetrics else read_text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in read(text.decode())
        for sample in family.samples
    }


@given(
    st.dictionaries(LABEL, st.floats(allow_nan=False) | st.integers(-(2**53), 2**53), min_size=1, max_size=5),
    st.sampled_from((GAUGE, COUNTER)),
    st.booleans(),
)
def test_every_label_and_value_comes_back(values: dict[str, float], kind: str, openmetrics: bool) -> None:
    family = Family("thing_seconds", kind, 'help with "quotes", \\ and\nlines', ("name",))
    if kind == COUNTER:
        values = {label: abs(value) for label, value in values.items()}
    text = render([(family, [((label,), value) for label, value in values.items()])], openmetrics=openmetrics)
    name = "thing_seconds_total" if kind == COUNTER else "thing_seconds"
    expected = {(name, (("name", label),)): float(value) for label, value in values.items()}
    assert samples(text, openmetrics=openmetrics) == expected


@given(st.lists(st.floats(0, 20), max_size=50))
def test_a_histogram_counts_each_value_once_and_its_buckets_never_decrease(values: list[float]) -> None:
    histogram = Histogram((0.1, 1.0, 10.0))
    for value in values:
        histogram.observe(value)
    family = Family("wait_seconds", HISTOGRAM, "Waiting.", ("stage",))
    rows: list[Series] = [(("a",), histogram)]
    for openmetrics in (False, True):
        read = samples(render([(family, rows)], openmetrics=openmetrics), openmetrics=openmetrics)
        counts = {dict(labels)["le"]: value for (name, labels), value in read.items() if name == "wait_seconds_bucket"}
        assert counts == {
            bound: sum(value <= float(bound) for value in values) for bound in ("0.1", "1.0", "10.0", "+Inf")
        }
        assert read["wait_seconds_count", (("stage", "a"),)] == len(values)
        assert math.isclose(read["wait_seconds_sum", (("stage", "a"),)], sum(values), abs_tol=1e-9)


def test_what_is_no_number_does_not_spoil_a_histogram() -> None:
    histogram = Histogram((1.0,))
    for value in (math.nan, math.inf, -math.inf, 0.5):
        histogram.observe(value)
    assert (histogram.buckets(), histogram.sum) == ([("1.0", 1), ("+Inf", 1)], 0.5)


def test_a_family_without_series_is_left_out_and_openmetrics_ends_with_its_mark() -> None:
    nothing: list[Series] = []
    assert render([(Family("empty", GAUGE, "Nothing."), nothing)]) == b""
    assert render([(Family("empty", GAUGE, "Nothing."), nothing)], openmetrics=True) == b"# EOF\n"


def test_a_lone_surrogate_from_a_broken_name_is_written_as_an_escape() -> None:
    text = render([(Family("thing", GAUGE, "Help.", ("name",)), [(("\udcff",), 1)])])
    assert text.endswith(b'thing{name="\\udcff"} 1\n')

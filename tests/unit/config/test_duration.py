"""Durations are read and written as Go does."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config.duration import MAX_NANOSECONDS, format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1m30s", 90.0),
        ("1.5h", 5400.0),
        ("1.5m", 90.0),
        ("300ms", 0.3),
        ("5us", 5e-6),
        ("5\u00b5s", 5e-6),
        ("5\u03bcs", 5e-6),
        ("1ns", 1e-9),
        ("0.5ns", 0.0),
        (".5s", 0.5),
        ("1.s", 1.0),
        ("+2s", 2.0),
        ("-1m", -60.0),
        ("0s", 0.0),
        ("0", 0.0),
        ("1h1h", 7200.0),
        ("1s1h", 3601.0),
        ("2562047h47m16.854775807s", MAX_NANOSECONDS / 1e9),
    ],
)
def test_a_duration_is_read_as_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("30", "write 30s"),
        ("1m30", "write 30s"),
        ("1d", "24h"),
        ("1w", "168h"),
        ("-", "no number"),
        ("s", "plain digits"),
        (".s", "plain digits"),
        ("1.5.5s", "plain digits"),
        ("1 s", "white space"),
        ("1s ", "white space"),
        (" 1s", "plain digits"),
        ("1_0s", "unknown unit"),
        ("1e3s", "unknown unit"),
        ("1S", "unknown unit"),
        ("1min", "unknown unit"),
        ("\uff11s", "plain digits"),
        ("-+1s", "plain digits"),
        ("infs", "plain digits"),
        ("2562047h47m16.854775808s", "292 years"),
        ("1" * 129, "longer than"),
    ],
)
def test_what_is_no_duration_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"),
        (300.0, "5m"),
        (5400.0, "1h30m"),
        (3601.5, "1h1.5s"),
        (90.0, "1m30s"),
        (0.3, "300ms"),
        (0.0015, "1.5ms"),
        (5e-6, "5us"),
        (1e-9, "1ns"),
        (-60.0, "-1m"),
    ],
)
def test_the_shortest_usual_form_is_written(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.integers(-MAX_NANOSECONDS, MAX_NANOSECONDS) | st.integers(-(10**10), 10**10))
def test_what_is_formatted_is_read_back_as_the_same_seconds(nanoseconds: int) -> None:
    seconds = nanoseconds / 1_000_000_000
    text = format_duration(seconds)
    if abs(nanoseconds) < MAX_NANOSECONDS - 2**10:  # a float near the limit may round to just above it
        assert parse_duration(text) == seconds
        assert format_duration(parse_duration(text)) == text


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_no_duration(seconds: float) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        format_duration(seconds)


@given(st.text(max_size=12) | st.text("0123456789.+-hmsunµ d", max_size=12))
def test_any_text_is_either_a_duration_or_a_reason(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert abs(parse_duration(text)) <= MAX_NANOSECONDS / 1e9

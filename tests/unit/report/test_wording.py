import re
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model import Unit
from nodeagent.report.wording import duration, escape_terminal, percent, quantity, rfc3339

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (None, "?"),
        (0, "0"),
        (1, "1B"),
        (1023, "1023B"),
        (1024, "1Ki"),
        (1536, "1.5Ki"),
        (300 * MIB, "300Mi"),
        (239 * MIB + 600_000, "240Mi"),
        (1023 * MIB + 900_000, "1Gi"),
        (3 * 1024 * MIB - 100 * MIB, "2.9Gi"),
        (-61 * MIB, "-61Mi"),
        (1 << 80, "1048576Ei"),
    ],
)
def test_bytes_are_shown_with_three_digits_and_a_binary_unit(amount: int | None, text: str) -> None:
    assert quantity(amount) == text


@given(st.integers(-(2**64), 2**64))
def test_shown_bytes_are_within_half_a_percent_of_the_truth(amount: int) -> None:
    match = re.fullmatch(r"(-?)([\d.]+)(B|Ki|Mi|Gi|Ti|Pi|Ei)?", quantity(amount))
    assert match
    scale = ("B", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei").index(match[3] or "B")
    shown = float(match[2]) * 1024**scale * (-1 if match[1] else 1)
    assert shown == pytest.approx(amount, rel=0.0051)
    assert len(match[2].replace(".", "")) <= 4


def test_headroom_has_a_sign_and_counts_have_no_unit() -> None:
    assert quantity(5 * MIB, signed=True) == "+5Mi"
    assert quantity(-5 * MIB, signed=True) == "-5Mi"
    assert quantity(123456, unit=Unit.INODES) == "123456"
    assert quantity(-3, unit=Unit.PIDS, signed=True) == "-3"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "?"),
        (0.0, "0s"),
        (0.35, "350ms"),
        (12.4, "12s"),
        (300.0, "5m"),
        (90.0, "1m 30s"),
        (3900.0, "1h 5m"),
        (270000.0, "3d 3h"),
        (-2.0, "-2s"),
    ],
)
def test_durations_show_the_two_units_that_matter(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_a_share_of_nothing_is_unknown() -> None:
    assert percent(1, 0) == percent(None, 5) == percent(5, None) == "?"
    assert percent(1, 12) == "8.3%"
    assert percent(99, 100) == "99%"


@given(st.text())
def test_no_text_reaches_a_terminal_with_a_control_character(text: str) -> None:
    shown = escape_terminal(text)
    assert shown.isprintable()
    shown.encode()  # lone surrogates (undecodable file names) are gone as well
    if text.isprintable():
        assert shown == text


def test_escape_sequences_and_forged_lines_are_shown_as_what_they_are() -> None:
    assert escape_terminal("\x1b[2Jweb\nOK node-1\u202e\udcff") == r"\x1b[2Jweb\x0aOK node-1\u202e\udcff"
    assert escape_terminal("données-日本") == "données-日本"


@given(st.floats(0, 4_000_000_000))
def test_stamps_are_rfc3339_in_utc_to_the_millisecond(wall_time: float) -> None:
    read = datetime.fromisoformat(rfc3339(wall_time))
    assert read.tzinfo == UTC
    assert read.timestamp() == pytest.approx(wall_time, abs=0.0011)


@given(st.sampled_from([float("inf"), float("-inf"), float("nan"), 1e20, -1e20]))
def test_a_time_that_no_calendar_has_is_unknown(wall_time: float) -> None:
    assert rfc3339(wall_time) == "?"

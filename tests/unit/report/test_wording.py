from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.report.wording import escape_terminal, rfc3339

MIB = 1024 * 1024


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

"""The types of values on the command line."""

import argparse

import pytest

from nodeagent.commands import arguments_common


@pytest.mark.parametrize(
    ("text", "ago_s"),
    [("90s", 90.0), ("1h30m", 5400.0), ("2d", 172_800.0), ("1d12h", 129_600.0), ("500ms", 0.5)],
)
def test_a_duration_counts_back_from_the_end(text: str, ago_s: float) -> None:
    assert arguments_common.since(text).wall(1_000_000.0) == 1_000_000.0 - ago_s


@pytest.mark.parametrize(
    "text", ["2026-11-24T13:05:00Z", "2026-11-24T13:05", "2026-11-24 15:05:00+02:00", "2026-11-24T13:05:00.000Z"]
)
def test_an_instant_is_the_same_whatever_the_end(text: str) -> None:
    assert {arguments_common.since(text).wall(now) for now in (0.0, 2e9)} == {1_795_525_500.0}


@pytest.mark.parametrize(
    "text", ["", "1", "0s", "-1h", "yesterday", "2026", "1w", "9" * 400 + "d", "0001-01-01T00:00Z9"]
)
def test_anything_else_is_refused_with_both_forms(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="neither a duration like 1h30m nor a time like"):
        arguments_common.since(text)

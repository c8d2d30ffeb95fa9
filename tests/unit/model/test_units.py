"""The forms of one number: for people, and as the kubelet writes it."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nodeagent.config.quantity import MAX_QUANTITY, parse_quantity
from nodeagent.model import Unit, units

KI = 1024
MI = 1024 * KI
MIB = MI


# --- for people ---


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
    assert units.format_amount(amount) == text


@given(st.integers(-(2**64), 2**64))
def test_shown_bytes_are_within_half_a_percent_of_the_truth(amount: int) -> None:
    match = re.fullmatch(r"(-?)([\d.]+)(B|Ki|Mi|Gi|Ti|Pi|Ei)?", units.format_amount(amount))
    assert match
    scale = ("B", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei").index(match[3] or "B")
    shown = float(match[2]) * 1024**scale * (-1 if match[1] else 1)
    assert shown == pytest.approx(amount, rel=0.0051)
    assert len(match[2].replace(".", "")) <= 4


def test_headroom_has_a_sign_and_counts_have_no_unit() -> None:
    assert units.format_amount(5 * MIB, signed=True) == "+5Mi"
    assert units.format_amount(-5 * MIB, signed=True) == "-5Mi"
    assert units.format_amount(123456, Unit.INODES) == "123456"
    assert units.format_amount(-3, Unit.PIDS, signed=True) == "-3"


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
    assert units.format_duration(seconds) == text


# --- as the kubelet writes it ---


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0"),
        (128 * MI, "128Mi"),
        (128_000_000, "128M"),
        (1000 * KI, "1000Ki"),
        (10**9, "1G"),
        (1, "1"),
        (1500, "1500"),
    ],
)
def test_an_amount_of_a_spec_is_quoted_as_its_author_most_likely_wrote_it(amount: int, text: str) -> None:
    assert units.format_spec_quantity(amount) == text


UNITS = {"Ki": 1024, "Mi": 1024**2, "Gi": 1024**3, "Ti": 1024**4, "Pi": 1024**5, "Ei": 1024**6}
UNITS |= {"k": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4, "P": 1000**5, "E": 1000**6, "": 1}


@given(st.integers(-(1 << 62), 1 << 62), st.booleans())
def test_a_quoted_quantity_reads_back_as_the_same_amount(amount: int, binary: bool) -> None:
    text = units.format_quantity(amount, binary=binary)
    parts = re.fullmatch(r"(-?\d+)([A-Za-z]*)", text)
    assert parts is not None
    assert int(parts[1]) * UNITS[parts[2]] == amount


@pytest.mark.parametrize(
    ("count", "binary", "decimal"),
    [
        (0, "0", "0"),
        (1536 * 2**20, "1536Mi", "1610612736"),
        (1024, "1Ki", "1024"),
        (1000, "1k", "1k"),
        (1500, "1500", "1500"),
        (-2048, "-2Ki", "-2048"),
        (3 * 2**60, "3Ei", "3458764513820540928"),
    ],
)
def test_the_canonical_form_has_the_largest_suffix_that_leaves_a_whole_number(
    count: int, binary: str, decimal: str
) -> None:
    assert (units.format_quantity(count), units.format_quantity(count, binary=False)) == (binary, decimal)


@given(st.integers(-MAX_QUANTITY, MAX_QUANTITY))
@example(2**60)
@example(10**18)
def test_what_is_formatted_is_read_back_as_the_same_number(count: int) -> None:
    assert parse_quantity(units.format_quantity(count)) == count
    assert parse_quantity(units.format_quantity(count, binary=False)) == count

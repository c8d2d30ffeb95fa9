"""Quantities are read and written as Kubernetes does."""

import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config.quantity import MAX_QUANTITY, parse_milli, parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-0", 0),
        ("100Mi", 100 * 2**20),
        ("1.5Gi", 1536 * 2**20),
        ("1Ki", 1024),
        ("2Ti", 2**41),
        ("1Pi", 2**50),
        ("1Ei", 2**60),
        ("1k", 1000),
        ("1M", 10**6),
        ("1G", 10**9),
        ("1T", 10**12),
        ("1P", 10**15),
        ("1E", 10**18),
        ("1E3", 1000),
        ("1e3", 1000),
        ("1e+3", 1000),
        ("15e-1", 2),
        ("+5", 5),
        (".5", 1),
        ("1.", 1),
        ("007", 7),
        ("250m", 1),
        ("1001m", 2),
        ("1u", 1),
        ("1n", 1),
        ("-1.5", -2),
        ("0.0000000000001", 1),
        ("8Ei", MAX_QUANTITY),
        ("1e999999999", MAX_QUANTITY),
        ("-1e999999999", -MAX_QUANTITY),
        ("1e-999999999", 1),
        ("0e999999999", 0),
    ],
)
def test_a_quantity_is_read_exactly_and_rounded_away_from_zero(text: str, value: int) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        (" 1", "white space"),
        ("1 ", "white space"),
        ("1 Mi", "white space"),
        ("1\n", "white space"),
        ("NaN", "plain digits"),
        ("inf", "plain digits"),
        ("Mi", "plain digits"),
        (".", "plain digits"),
        ("+-1", "plain digits"),
        ("\uff11", "plain digits"),
        ("\u0661", "plain digits"),
        ("1\uff11", "unknown suffix"),
        ("1_000", "grouped"),
        ("1,5", "unknown suffix"),
        ("1.1.1", "more than one dot"),
        ("1mi", "'Mi'\\?"),
        ("1MB", "'M'\\?"),
        ("1MiB", "'Mi'\\?"),
        ("1K", "'k'\\?"),
        ("1e", "unknown suffix"),
        ("1e1.5", "unknown suffix"),
        ("1e3Mi", "unknown suffix"),
        ("0x10", "unknown suffix"),
        ("10%", "percentage"),
        ("1" * 129, "longer than"),
    ],
)
def test_what_is_no_quantity_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_quantity(text)


@pytest.mark.parametrize(("text", "milli"), [("1", 1000), ("0.5", 500), ("250m", 250), ("1u", 1), ("2k", 2_000_000)])
def test_cpu_is_counted_in_thousandths_rounded_up(text: str, milli: int) -> None:
    assert parse_milli(text) == milli


@given(st.text(max_size=20) | st.text("0123456789.+-eEinumkKMGTP _%", max_size=12))
def test_any_text_is_either_a_quantity_or_a_reason(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert abs(parse_quantity(text)) <= MAX_QUANTITY


def test_it_agrees_with_the_kubernetes_client_where_both_can_read() -> None:
    from decimal import ROUND_UP, Decimal

    from kubernetes.utils import parse_quantity as reference

    random.seed(7)
    suffixes = ["", "n", "u", "m", "k", "M", "G", "T", "P", "Ki", "Mi", "Gi", "Ti", "Pi"]
    for _ in range(3000):
        number = str(random.randrange(10 ** random.randrange(1, 6)))
        if random.random() < 0.5:
            number += f".{random.randrange(10 ** random.randrange(1, 4))}"
        text = f"{random.choice(['', '-', '+'])}{number}{random.choice(suffixes)}"
        wanted = reference(text)
        for found, exact in ((parse_quantity(text), wanted), (parse_milli(text), wanted * 1000)):
            whole = int(exact.quantize(Decimal(1), rounding=ROUND_UP))
            assert found == max(-MAX_QUANTITY, min(whole, MAX_QUANTITY)), text

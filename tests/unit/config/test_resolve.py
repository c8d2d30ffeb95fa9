import math
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nodeagent.config import resolve
from nodeagent.config.amount import parse_amount
from nodeagent.model import Amount, KubeletLevel, Signal, Threshold, units


def percent(value: float) -> Amount:
    return Amount(None, value, f"{value}%")


@pytest.mark.parametrize(
    ("percentage", "capacity", "expected"),
    [
        (70.0, 1000, 699),  # float32(0.7) is below 0.7: the contract's example
        (10.0, 1000, 100),
        (5.0, 23167, 1158),  # as a real kubelet quoted it: `Threshold quantity: 1158`
        (0.5, 1000, 4),  # float32(0.005) is below 0.005 too
        (100.0, 8 << 30, 8 << 30),
        (150.0, 1000, 1500),
        (0.0, 1000, 0),
    ],
)
def test_a_percentage_is_the_truncated_product_with_its_float32_fraction(
    percentage: float, capacity: int, expected: int
) -> None:
    assert resolve.resolve_amount(percent(percentage), capacity=capacity) == expected


def test_a_percentage_is_not_multiplied_in_single_precision() -> None:
    # In float32 arithmetic the product would be rounded to 24 bits: 1717986944.
    assert resolve.resolve_amount(percent(20.0), capacity=8589934721) == 1717986969


def test_a_quantity_is_itself_whatever_the_capacity() -> None:
    assert resolve.resolve_amount(Amount(300, None, "300"), capacity=None) == 300
    assert resolve.resolve_amount(Amount(0, None, "0"), capacity=10) == 0


@pytest.mark.parametrize(
    ("amount", "capacity"),
    [
        (percent(10.0), None),
        (percent(math.nan), 1000),
        (percent(math.inf), 1000),
        (percent(1e300), 1000),
        (percent(-1.0), 1000),
        (percent(10.0), -1),
        (percent(10.0), 1 << 63),
        (percent(10_000.0), units.MAX_PLAUSIBLE),
        (Amount(-1, None, "-1"), 1000),
        (Amount(1 << 63, None, "8Ei"), 1000),
        (Amount(None, None, ""), 1000),
    ],
)
def test_an_amount_that_is_no_number_in_range_is_not_known(amount: Amount, capacity: int | None) -> None:
    assert resolve.resolve_amount(amount, capacity=capacity) is None


@given(st.floats(0, 100, width=32), st.integers(0, 1 << 53))
@example(70.0, 1000)
def test_it_agrees_with_the_fraction_divided_in_single_precision(percentage: float, capacity: int) -> None:
    # Independent of the code: the nearest float32 to the exact quotient, found from its neighbours.
    exact = percentage / 100.0
    (bits,) = struct.unpack("I", struct.pack("f", exact))
    around = [struct.unpack("f", struct.pack("I", each))[0] for each in (max(bits - 1, 0), bits, bits + 1)]
    nearest = min(around, key=lambda each: abs(each * 100 - percentage))
    assert resolve.resolve_amount(percent(percentage), capacity=capacity) == int(capacity * nearest)


@given(st.floats(0, 1e38))
@example(1 + 2**-24)  # halfway between two, the lower one even
@example(1 + 3 * 2**-24)
@example(2.0**60 + 1)
@example(0.1)
def test_a_float32_is_what_the_machine_makes_of_it(value: float) -> None:
    if value >= 2.0**-126:  # those below have fewer bits and are no percentage of anything
        assert resolve.float32(value) == struct.unpack("f", struct.pack("f", value))[0]


@pytest.mark.parametrize("value", [math.inf, float.fromhex("0x1.ffffffp+127"), 1e300])
def test_what_a_float32_cannot_hold_is_refused(value: float) -> None:
    with pytest.raises(OverflowError):
        resolve.float32(value)


@given(st.floats(0, 100), st.integers(1, 1 << 50), st.integers(0, 1 << 50))
def test_more_capacity_never_means_a_smaller_amount(percentage: float, capacity: int, more: int) -> None:
    smaller, larger = (
        resolve.resolve_amount(percent(percentage), capacity=capacity),
        resolve.resolve_amount(percent(percentage), capacity=capacity + more),
    )
    assert smaller is not None
    assert larger is not None
    assert smaller <= larger


@given(st.floats(0, 100), st.integers(0, 1 << 53))  # above that a capacity itself is rounded, in the kubelet as well
@example(100.0, (1 << 53) - 1)
def test_a_percentage_as_it_is_written_never_resolves_to_more_than_the_capacity(
    percentage: float, capacity: int
) -> None:
    value = resolve.resolve_amount(parse_amount(f"{percentage:.6f}%"), capacity=capacity)
    assert value is not None
    assert 0 <= value <= capacity


@given(
    percentage=st.floats(0.01, 100.0),
    capacity=st.integers(1, 2**60),
    bounds=st.tuples(st.integers(1, 2**40), st.integers(1, 2**40)),
)
def test_bounds_limit_a_percentage_and_change_nothing_between_them(
    percentage: float, capacity: int, bounds: tuple[int, int]
) -> None:
    low, high = sorted(bounds)
    plain = resolve.resolve_amount(percent(percentage), capacity=capacity)
    bounded = resolve.resolve_amount(percent(percentage)._replace(at_least=low, at_most=high), capacity=capacity)
    assert plain is not None
    assert bounded == min(max(plain, low), high)


def test_a_bounded_percentage_of_an_unknown_capacity_is_unknown() -> None:
    assert resolve.resolve_amount(percent(2.0)._replace(at_least=1), capacity=None) is None


def test_the_kubelets_threshold_raises_nothing_while_the_capacity_is_unknown() -> None:
    level = KubeletLevel(Amount(500, None, "500"), percent(50.0), margin_of_capacity=False)
    threshold = Threshold(Signal.MEMORY, Amount(100, None, "100"), above_kubelet=(level,))
    assert resolve.resolve_threshold(threshold, capacity=None) == 100
    assert resolve.resolve_threshold(threshold, capacity=10_000) == 750
    assert resolve.resolve_threshold(threshold, capacity=1_000) == 100, "500 of 1000 is half"
    assert resolve.resolve_threshold(threshold, capacity=1_100) == 550, "a raise ends at half of the capacity"

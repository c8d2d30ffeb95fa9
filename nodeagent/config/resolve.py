"""Convert a configured amount (a quantity or a percentage) to whole units, bit for bit as the kubelet does."""

from functools import lru_cache
from typing import Final

from nodeagent.model import Amount
from nodeagent.model.units import MAX_PLAUSIBLE

_FLOAT32_BITS: Final = 24
_BEYOND_FLOAT32: Final = float.fromhex("0x1.ffffffp+127")


def resolve_amount(amount: Amount, *, capacity: int | None) -> int | None:
    """The amount in bytes, inodes or PIDs.

    A percentage is `trunc(capacity * float32(float32(p) / 100))` with the product in double precision: the kubelet
    keeps the fraction as a Go float32, so 70% of 1000 is 699 (KUBELET-CONTRACT, configuration syntax).

    None: a percentage of an unknown capacity, or an amount outside the valid range (NaN, negative, above 2^62). Such a
    threshold is never met.
    """
    if amount.quantity is not None:
        return amount.quantity if _plausible(amount.quantity) else None
    if capacity is None or not _plausible(capacity):
        return None
    fraction = as_fraction(amount.percentage)
    if fraction is None:
        return None
    product = float(capacity) * fraction
    return int(product) if product <= MAX_PLAUSIBLE else None


@lru_cache(maxsize=256)
def as_fraction(percentage: float | None) -> float | None:
    """The float32 that the kubelet stores for a percentage; None if a float32 cannot represent it."""
    if percentage is None or not percentage >= 0.0:
        return None
    try:
        return float32(float32(percentage) / 100.0)
    except OverflowError:
        return None


def float32(value: float) -> float:
    """`value`, which is not negative, rounded to a 32 bit floating point number. Raises OverflowError above its range.

    It uses integers, because `nodeagent check` would load `struct` for this alone (0.4 ms).
    """
    # The quotient of two float32 computed in double precision and rounded once more is the correctly rounded float32
    # quotient: a double has more than twice its bits plus two.
    if value >= _BEYOND_FLOAT32:
        raise OverflowError(value)
    numerator, denominator = value.as_integer_ratio()
    excess = numerator.bit_length() - _FLOAT32_BITS
    if excess > 0:
        rest = numerator & ((1 << excess) - 1)
        numerator >>= excess
        half = 1 << (excess - 1)
        if rest > half or (rest == half and numerator & 1):
            numerator += 1
        numerator <<= excess
    return numerator / denominator


def _plausible(number: object) -> bool:
    return type(number) is int and 0 <= number <= MAX_PLAUSIBLE

"""Convert a configured amount (a quantity or a percentage) to whole units, bit for bit as the kubelet does, and a
threshold to the value that it is compared with.

Theory of operation. A threshold that must stay above the kubelet's (`Threshold.above_kubelet`) has the highest of its
configured value and those levels. A level is at most half of the capacity, and a threshold of the kubelet that is not
below that half is not followed: it is a slip or the file of another machine, and to act at it would evict most pods of
a healthy node.
"""

from functools import lru_cache
from typing import Final

from nodeagent.model import Amount, KubeletLevel, Threshold
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
    return _bounded(int(product), amount) if product <= MAX_PLAUSIBLE else None


def resolve_threshold(threshold: Threshold, *, capacity: int | None) -> int | None:
    """The value of the threshold in bytes, inodes or PIDs. None as in `resolve_amount`: it is never met."""
    value = resolve_amount(threshold.value, capacity=capacity)
    if value is None or not threshold.above_kubelet:
        return value
    levels = [resolve_level(each, capacity=capacity) for each in threshold.above_kubelet]
    return max(value, *[level or 0 for level in levels])


def resolve_level(level: KubeletLevel, *, capacity: int | None) -> int | None:
    """The amount that is the margin above the kubelet's threshold, at most half of the capacity. None: the capacity is
    unknown, the kubelet's threshold is zero and never met, or it is not followed (`beyond_half`)."""
    kubelet = resolve_amount(level.kubelet, capacity=capacity)
    if not kubelet or capacity is None or not _plausible(capacity) or kubelet >= capacity // 2:
        return None
    base = capacity if level.margin_of_capacity else kubelet
    margin = resolve_amount(level.margin, capacity=base)
    if level.margin_of_capacity and level.kubelet.percentage is not None and level.margin.percentage is not None:
        # 10% + 2% is exactly 12%: two roundings would add up to another number.
        total = resolve_amount(Amount(None, level.kubelet.percentage + level.margin.percentage, ""), capacity=capacity)
    else:
        total = kubelet + (margin or 0)
    return None if total is None else max(kubelet + 1, min(total, capacity // 2))


def beyond_half(level: KubeletLevel, *, capacity: int | None) -> bool:
    """True if the kubelet's threshold is half of the capacity or more, so that it is not followed."""
    kubelet = resolve_amount(level.kubelet, capacity=capacity)
    return kubelet is not None and capacity is not None and _plausible(capacity) and kubelet >= capacity // 2


def _bounded(number: int, amount: Amount) -> int:
    if amount.at_most is not None:
        number = min(number, amount.at_most)
    return number if amount.at_least is None else max(number, amount.at_least)


def resolve_reclaim(threshold: Threshold, *, capacity: int | None) -> int:
    """The minimum reclaim of the threshold; 0 if there is none or it is unknown."""
    if threshold.min_reclaim is None:
        return 0
    return resolve_amount(threshold.min_reclaim, capacity=capacity) or 0


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

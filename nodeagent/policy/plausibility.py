"""Numbers in decisions: which of them are to be believed, and how texts show them."""

from typing import Final

from nodeagent.model import Unit

ABSURD: Final = 1 << 62
"""Limit where no capacity is known. The kernel writes 2^63 less a page for `no limit`; nothing real comes near."""

MAX_CLOCK_SKEW_S: Final = 1.0
"""How far ahead of `now` a time stamp may lie before it is not believed: two reads of a clock in different order."""

_UNITS: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")


def plausible(value: object, *, limit: int = ABSURD) -> int | None:
    """`value` if it is a whole number from 0 to `limit`, else None.

    Anything else (None, negative, NaN, a float, more than the node has) is a reading gone wrong, and what is not known
    must never make a pod a victim.
    """
    return value if type(value) is int and 0 <= value <= limit else None


def figure(amount: int, unit: Unit = Unit.BYTES) -> str:
    """`amount` for people: `212Mi`, `1.5Gi`, or a plain count of inodes or PIDs."""
    if unit is not Unit.BYTES:
        return str(amount)
    sign, size = ("-", -amount) if amount < 0 else ("", amount)
    scale = min(max(size.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    value = size / (1 << 10 * scale)
    return (
        f"{sign}{value:.1f}".removesuffix(".0") + _UNITS[scale] if value < 100 else f"{sign}{value:.0f}{_UNITS[scale]}"
    )

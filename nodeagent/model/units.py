"""Numbers as texts show them: amounts and durations for people, quantities as the kubelet writes them.

One number has one form on one page: `format_amount` for people (three digits), `format_quantity` where a text copies
the kubelet byte for byte and may not round.
"""

import math
from typing import Final

from nodeagent.model.signals import Unit

MAX_PLAUSIBLE: Final = 1 << 62
"""Quantities and capacities above this are implausible. The kernel writes 2^63 less a page for "no limit", the kubelet
reads such a cgroup limit as `unlimited`."""

UNKNOWN_TEXT: Final = "?"
"""Shown for an unknown number; JSON has null instead."""

_MAX_BITS: Final = 128
"""No machine has a larger number: it is from a damaged record."""

_BINARY: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL: Final = ("", "k", "M", "G", "T", "P", "E")
_PERIODS: Final = ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s"))


def format_amount(amount: int | None, unit: Unit = Unit.BYTES, *, signed: bool = False) -> str:
    """`amount` with three digits and a binary unit (`1.46Gi`), or the plain count of inodes or PIDs. None is `?`.

    `signed` puts a plus before an amount that is not negative, for headroom.
    """
    if amount is None or amount.bit_length() > _MAX_BITS:
        return UNKNOWN_TEXT
    sign = "-" if amount < 0 else "+" if signed else ""
    size = abs(amount)
    if unit is not Unit.BYTES:
        return f"{sign}{size}"
    if size < 1024:
        return f"{sign}{size}B" if size else f"{sign}0"
    scale = min((size.bit_length() - 1) // 10, len(_BINARY) - 1)
    value = size / (1 << 10 * scale)
    if value >= 999.5 and scale + 1 < len(_BINARY):  # 1023.9Mi reads better as 1Gi
        scale += 1
        value /= 1024
    if value >= 99.95:
        return f"{sign}{value:.0f}{_BINARY[scale]}"
    text = (f"{value:.2f}" if value < 9.995 else f"{value:.1f}").rstrip("0").rstrip(".")
    return f"{sign}{text}{_BINARY[scale]}"


def format_duration(seconds: float | None) -> str:
    """The two largest units that matter: `350ms`, `12s`, `5m`, `1h 5m`, `3d 2h`. None is `?`."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN_TEXT
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if seconds < 1:
        return f"{round(seconds * 1000)}ms" if seconds else "0s"
    whole = round(seconds)
    for size, name, smaller, smaller_name in _PERIODS:
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size}{name} {rest}{smaller_name}" if rest else f"{whole // size}{name}"
    return f"{whole}s"


def format_quantity(amount: int, *, binary: bool = True) -> str:
    """The canonical Kubernetes form of a whole amount: the largest unit that leaves no fraction.

    Binary amounts below 1024 are written as decimal ones are (1000 is `1k`), as apimachinery does.
    """
    if binary and abs(amount) >= 1024:
        mantissa, unit = factored(amount, 1024)
        return f"{mantissa}{_BINARY[unit]}"
    mantissa, unit = factored(amount, 1000)
    return f"{mantissa}{_DECIMAL[unit]}"


def format_spec_quantity(amount: int) -> str:
    """An amount from a pod's spec in the form that its author most likely wrote.

    A quantity keeps its author's format (128M stays `128M`), which bytes alone do not show. The format with the smaller
    mantissa is taken: 128000000 is `128M` rather than `125000Ki`, 134217728 is `128Mi`.
    """
    binary, decimal = factored(amount, 1024), factored(amount, 1000)
    return format_quantity(amount, binary=binary[1] > 0 and abs(binary[0]) < abs(decimal[0]))


def factored(amount: int, base: int) -> tuple[int, int]:
    """(mantissa, power) with `amount` = mantissa * base^power, the power as large as a quantity's suffixes allow."""
    power = 0
    while amount and power < len(_BINARY) - 1 and amount % base == 0:
        amount //= base
        power += 1
    return amount, power

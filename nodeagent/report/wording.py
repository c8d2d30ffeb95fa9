"""Numbers and names as people read them in a report: short, aligned, and harmless to a terminal."""

import math
import time

from nodeagent.model import Unit

_BINARY_UNITS = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")

_MOST_BITS = 128
"""No machine has so much: it is a number of a damaged record."""

UNKNOWN = "?"
"""Shown for a number that is not known; JSON has null there."""


def quantity(amount: int | None, *, unit: Unit = Unit.BYTES, signed: bool = False) -> str:
    """`amount` with three significant digits and binary units (`1.46Gi`), or as a plain count for inodes and PIDs.

    `signed` puts a plus before what is not negative, for headroom. None is `?`.
    """
    if amount is None or amount.bit_length() > _MOST_BITS:
        return UNKNOWN
    sign = "-" if amount < 0 else "+" if signed else ""
    size = abs(amount)
    if unit is not Unit.BYTES:
        return f"{sign}{size}"
    if size < 1024:
        return f"{sign}{size}B" if size else f"{sign}0"
    scale = min((size.bit_length() - 1) // 10, len(_BINARY_UNITS) - 1)
    value = size / (1 << 10 * scale)
    if value >= 999.5 and scale + 1 < len(_BINARY_UNITS):  # 1023.9Mi reads better as 1Gi
        scale += 1
        value /= 1024
    if value >= 99.95:
        return f"{sign}{value:.0f}{_BINARY_UNITS[scale]}"
    text = (f"{value:.2f}" if value < 9.995 else f"{value:.1f}").rstrip("0").rstrip(".")
    return f"{sign}{text}{_BINARY_UNITS[scale]}"


def duration(seconds: float | None) -> str:
    """Seconds as the two largest units that matter: `350ms`, `12s`, `5m`, `1h 5m`, `3d 2h`. None is `?`."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 0:
        return "-" + duration(-seconds)
    if seconds < 1:
        return f"{round(seconds * 1000)}ms" if seconds else "0s"
    whole = round(seconds)
    for size, name, smaller, smaller_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size}{name} {rest}{smaller_name}" if rest else f"{whole // size}{name}"
    return f"{whole}s"


def trend_text(to_threshold_s: float | None, to_exhaustion_s: float | None, confidence: float | None) -> str:
    """Where a signal is going: `threshold in 40s, exhausted in 2m (confidence 93%)`; empty when nothing is being used
    up. None for the threshold: none lies ahead."""
    ahead = [] if to_threshold_s is None else [f"threshold in {duration(to_threshold_s)}"]
    ahead += [] if to_exhaustion_s is None else [f"exhausted in {duration(to_exhaustion_s)}"]
    sure = "" if confidence is None else f" (confidence {100 * confidence:.0f}%)"
    return ", ".join(ahead) + sure if ahead else ""


def percent(part: int | None, whole: int | None) -> str:
    """`part` of `whole` as `17%`, with one decimal below ten; `?` when either is not known or whole is not positive."""
    if part is None or whole is None or whole <= 0:
        return UNKNOWN
    value = 100 * part / whole
    return f"{value:.1f}%" if abs(value) < 9.95 else f"{value:.0f}%"


def rfc3339(wall_time: float) -> str:
    """Seconds since the epoch as a UTC stamp with milliseconds: `2026-11-20T23:52:28.123Z`. `?` for a time that no
    calendar has (a damaged record)."""
    try:
        milliseconds = round(wall_time * 1000)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
    except (OverflowError, ValueError, OSError):
        return UNKNOWN
    return f"{stamp}.{milliseconds % 1000:03d}Z"


def escape_terminal(text: str) -> str:
    """`text` with everything that could move a cursor, change colours or forge a line escaped as in Python source.

    Names and messages come from tenants: a pod's log directory or an annotation may hold any byte. Printable letters of
    every script stay; control characters (C0, C1, DEL), line separators, bidirectional overrides and undecodable
    bytes do not (all of these are what `str.isprintable` refuses).
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

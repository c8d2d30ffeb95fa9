"""Convert Go durations (`1m30s`, `1.5h`, `300ms`) to seconds and back.

The grammar is that of Go's `time.ParseDuration`, which reads the kubelet's configuration: an optional sign, then one or
more numbers, each with a unit (ns, us, ms, s, m, h). There is no unit for a day. A number without a unit is an error,
except a lone `0`. Fractions of a nanosecond are cut off, as in Go.
"""

from typing import Final

MAX_NANOSECONDS: Final = 2**63 - 1
"""Go stores durations as 64 bits of nanoseconds: 292 years."""

MAX_DURATION_TEXT: Final = 128
"""Longest text that is parsed."""

_UNITS: Final = {
    "ns": 1,
    "us": 1_000,
    "\N{MICRO SIGN}s": 1_000,
    "\N{GREEK SMALL LETTER MU}s": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}
_NUMBER: Final = "0123456789."


def parse_duration(text: str) -> float:
    """Seconds. Raises ValueError with what is wrong with the text."""
    if not text:
        raise ValueError("it is empty")
    if len(text) > MAX_DURATION_TEXT:
        raise ValueError(f"it is longer than {MAX_DURATION_TEXT} characters")
    negative = text[0] == "-"
    rest = text[1:] if text[0] in "+-" else text
    if rest == "0":
        return 0.0
    if not rest:
        raise ValueError("there is no number after the sign")
    total = 0
    while rest:
        nanoseconds, rest = _component(rest)
        total += nanoseconds
        if total > MAX_NANOSECONDS:
            raise ValueError("it is longer than 292 years")
    return (-total if negative else total) / 1_000_000_000


def format_duration(seconds: float) -> str:
    """The shortest usual form: `5m`, `1h30m`, `1.5s`, `300ms`. `parse_duration` returns the same number of seconds.

    Raises ValueError if `seconds` is not finite.
    """
    if seconds != seconds or seconds in (float("inf"), float("-inf")):
        raise ValueError(f"{seconds} is not a duration")
    numerator, denominator = abs(seconds).as_integer_ratio()
    nanoseconds = (2 * numerator * 1_000_000_000 + denominator) // (2 * denominator)
    sign = "-" if seconds < 0 and nanoseconds else ""
    if nanoseconds == 0:
        return "0s"
    for unit in ("s", "ms", "us"):
        if nanoseconds >= _UNITS[unit]:
            break
    else:
        unit = "ns"
    parts = []
    if unit == "s":
        for large in ("h", "m"):
            count, nanoseconds = divmod(nanoseconds, _UNITS[large])
            parts += [f"{count}{large}"] if count else []
    if nanoseconds:
        integer, fraction = divmod(nanoseconds, _UNITS[unit])
        digits = f"{fraction:0{len(str(_UNITS[unit])) - 1}d}".rstrip("0") if fraction else ""
        parts.append(f"{integer}.{digits}{unit}" if digits else f"{integer}{unit}")
    return sign + "".join(parts)


def _component(text: str) -> tuple[int, str]:
    """Nanoseconds of the first number with its unit, and the text behind it."""
    after = text.lstrip(_NUMBER)
    number = text[: len(text) - len(after)]
    integer, _, fraction = number.partition(".")
    if not (integer or fraction) or "." in fraction:
        raise ValueError(f"a number in plain digits is expected at {text!r}")
    unit = after[: next((i for i, letter in enumerate(after) if letter in _NUMBER), len(after))]
    if unit not in _UNITS:
        raise ValueError(_unit_error(number, unit))
    return int(integer + fraction) * _UNITS[unit] // 10 ** len(fraction), after[len(unit) :]


def _unit_error(number: str, unit: str) -> str:
    if not unit:
        return f"{number} has no unit (ns, us, ms, s, m, h): write {number}s for seconds"
    if unit in ("d", "w"):
        return f"there is no unit {unit!r}: write {'24h' if unit == 'd' else '168h'} for each"
    if unit.strip() != unit or not unit.isprintable():
        return "it has white space or unprintable characters"
    return f"unknown unit {unit!r} (known: ns, us, ms, s, m, h)"

"""Parse Kubernetes quantities (`100Mi`, `1.5Gi`, `250m`, `1e9`) into whole numbers.

The grammar and the rounding are those of `resource.Quantity`: an optional sign, ASCII digits with at most one dot, and
one suffix (n u m k M G T P E, Ki Mi Gi Ti Pi Ei, or a decimal exponent such as `e3`). A fraction of a unit is rounded
away from zero, so that a small request is never zero. Integers are sufficient; `decimal` costs 2 ms of import and
accepts `NaN`, `1_000` and full-width digits.
"""

from typing import Final

MAX_QUANTITY: Final = 2**63 - 1
"""Kubernetes stores quantities in 64 bits; larger ones count as this."""

MAX_QUANTITY_TEXT: Final = 128
"""Longest text that is parsed: 2^63 has 19 digits, the rest allows leading and trailing zeros."""

_SUFFIXES: Final = {
    "n": (10, -9),
    "u": (10, -6),
    "m": (10, -3),
    "": (10, 0),
    "k": (10, 3),
    "M": (10, 6),
    "G": (10, 9),
    "T": (10, 12),
    "P": (10, 15),
    "E": (10, 18),
    "Ki": (2, 10),
    "Mi": (2, 20),
    "Gi": (2, 30),
    "Ti": (2, 40),
    "Pi": (2, 50),
    "Ei": (2, 60),
}

_EXPONENT_LIMIT: Final = MAX_QUANTITY_TEXT + 64
"""Beyond it every mantissa of MAX_QUANTITY_TEXT digits is either larger than 64 bits or smaller than one millionth, so
that `1e999999999` costs nothing."""


def parse_quantity(text: str) -> int:
    """The quantity in whole units, rounded away from zero, at most +-MAX_QUANTITY.

    Raises ValueError with what is wrong with the text.
    """
    return _scaled(text, extra=0)


def parse_milli(text: str) -> int:
    """The quantity in thousandths, as for CPU (`0.5` is 500), rounded away from zero, at most +-MAX_QUANTITY.

    Raises ValueError with what is wrong with the text.
    """
    return _scaled(text, extra=3)


def _scaled(text: str, *, extra: int) -> int:
    """The quantity times 10^extra. Exact until the one rounding at the end."""
    negative, digits, ten, two = _split(text)
    mantissa = int(digits)
    ten += extra
    if mantissa == 0:
        return 0
    if ten > _EXPONENT_LIMIT:
        magnitude = MAX_QUANTITY
    elif ten < -_EXPONENT_LIMIT:
        magnitude = 1
    else:
        numerator = mantissa * 10 ** max(ten, 0) << two
        magnitude = min(-(-numerator // 10 ** max(-ten, 0)), MAX_QUANTITY)
    return -magnitude if negative else magnitude


def _split(text: str) -> tuple[bool, str, int, int]:
    """(negative, digits, power of ten, power of two) such that the quantity is digits * 10^ten * 2^two."""
    if not text:
        raise ValueError("it is empty")
    if len(text) > MAX_QUANTITY_TEXT:
        raise ValueError(f"it is longer than {MAX_QUANTITY_TEXT} characters")
    body = text[1:] if text[0] in "+-" else text
    suffix = body.lstrip("0123456789.")
    number = body[: len(body) - len(suffix)]
    integer, _, fraction = number.partition(".")
    if "." in fraction:
        raise ValueError(f"{number!r} has more than one dot")
    if not integer and not fraction:
        raise ValueError(
            "it has white space" if body[:1].isspace() else "it does not start with a number in plain digits"
        )
    scale = _SUFFIXES.get(suffix) or _exponent(suffix)
    if scale is None:
        raise ValueError(_suffix_error(suffix))
    base, power = scale
    ten, two = (power, 0) if base == 10 else (0, power)
    return text[0] == "-", integer + fraction, ten - len(fraction), two


def _exponent(suffix: str) -> tuple[int, int] | None:
    """`e3`, `E-2`: a power of ten; None if the suffix has another form."""
    digits = suffix[2:] if suffix[1:2] in ("+", "-") else suffix[1:]
    if suffix[0] not in "eE" or not digits or digits.strip("0123456789"):
        return None
    return 10, int(suffix[1:])


def _suffix_error(suffix: str) -> str:
    if suffix.strip() != suffix or not suffix.isprintable():
        return "it has white space or unprintable characters"
    if suffix.startswith("_"):
        return "digits cannot be grouped with '_'"
    if suffix == "%":
        return "a percentage cannot be used here"
    known = "n u m k M G T P E Ki Mi Gi Ti Pi Ei"
    unit = suffix.removesuffix("B").removesuffix("b")
    for right in (unit, *_SUFFIXES):
        if unit and right in _SUFFIXES and right.lower() == unit.lower():
            return f"unknown suffix {suffix!r}, did you mean {right!r}? (known: {known}, or an exponent like e3)"
    return f"unknown suffix {suffix!r} (known: {known}, or an exponent like e3)"

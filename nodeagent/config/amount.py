"""Read threshold values as the kubelet does: a quantity, or a percentage of a capacity.

`parse_threshold` also reads a percentage with bounds (`2%, at least 200Mi, at most 1Gi`), which no kubelet has.
Thresholds and minimum reclaim differ in the meaning of zero (`AmountRule`). The kubelet converts percentages to 32 bit
floating point, so that `100.000001%` is 100%. This module does the same.
"""

from typing import Final

from nodeagent.config import bounds, quantity, resolve
from nodeagent.config.bounds import AmountRule
from nodeagent.model import Amount

_DIGITS: Final = "0123456789"
_BOUNDS: Final = {"at least": "at_least", "at most": "at_most"}


def parse_amount(text: str, *, rule: AmountRule = AmountRule.THRESHOLD) -> Amount:
    """Raises ValueError with what is wrong with the text."""
    if text.endswith("%"):
        if rule is AmountRule.SIZE:
            raise ValueError("it is a percentage: write a quantity such as 40Mi")
        return Amount(None, _percentage(text, rule=rule), text)
    count = quantity.parse_quantity(text)
    if count < 0:
        raise ValueError("it is negative")
    if count == 0 and rule is AmountRule.THRESHOLD:
        raise ValueError('it is zero: a threshold must be above zero (write "0%" to have none)')
    if rule is AmountRule.SIZE and not bounds.MIN_SIZE <= count <= bounds.MAX_SIZE:
        raise ValueError("must be from 1Mi to 1Ti")
    if count == quantity.MAX_QUANTITY:
        raise ValueError(f"it is {quantity.MAX_QUANTITY} or more, all that 64 bits can hold: no node has as much")
    return Amount(count, None, text)


def parse_threshold(text: str) -> Amount:
    """A threshold, which may be a percentage with a lower and an upper bound. Raises ValueError as `parse_amount`."""
    first, *limits = text.split(", ")
    amount = parse_amount(first)
    for bound in limits:
        word, _, count = bound.rpartition(" ")
        field = _BOUNDS.get(word)
        if field is None:
            raise ValueError(f'{bound!r} is not "at least" or "at most" with a quantity')
        if amount.quantity is not None:
            raise ValueError("only a percentage has bounds")
        if getattr(amount, field) is not None:
            raise ValueError(f"{word!r} is there twice")
        amount = amount._replace(**{field: parse_amount(count).quantity})  # type: ignore[arg-type]
        if getattr(amount, field) is None:
            raise ValueError(f"{bound!r} is not a quantity")
    if amount.at_least is not None and amount.at_most is not None and amount.at_least > amount.at_most:
        raise ValueError('the quantity of "at least" is above that of "at most"')
    return amount._replace(text=text)


def _percentage(text: str, *, rule: AmountRule) -> float:
    number = text.rstrip("%")  # as in the kubelet: `15%%` is 15%
    if not _is_number(number):
        raise ValueError(f"{number!r} is not a plain number")
    value = float(number)
    try:
        share = resolve.float32(resolve.float32(value) / 100)
    except OverflowError:
        raise ValueError("the percentage is too large") from None
    if share < 0:
        raise ValueError("the percentage is negative")
    if share > 1 and rule is not AmountRule.RECLAIM:
        raise ValueError("the percentage is above 100%")
    if share <= 0 and rule is AmountRule.RECLAIM:
        raise ValueError(
            "the percentage must be above 0% (leave the entry out to reclaim nothing beyond the threshold)"
        )
    return abs(value)


def _is_number(text: str) -> bool:
    """True for ASCII digits with sign, dot and exponent: Go's ParseFloat without inf, nan and hexadecimal."""
    mantissa, marker, exponent = text.lower().partition("e")
    integer, _, fraction = _unsigned(mantissa).partition(".")
    if (integer + fraction).strip(_DIGITS) or not integer + fraction:
        return False
    exponent = _unsigned(exponent)
    return not marker or (exponent != "" and not exponent.strip(_DIGITS))


def _unsigned(text: str) -> str:
    return text[1:] if text[:1] in ("+", "-") else text

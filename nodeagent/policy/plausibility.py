"""Decide which numbers a decision believes."""

from typing import Final

from nodeagent.model.units import MAX_PLAUSIBLE

MAX_CLOCK_SKEW_S: Final = 1.0
"""A time stamp further ahead of `now` is not believed. Less can be two reads of a clock in different order."""


def plausible(value: object, *, limit: int = MAX_PLAUSIBLE) -> int | None:
    """`value` if it is a whole number from 0 to `limit`, else None.

    Anything else (negative, NaN, a float, more than the node has) is a damaged reading. It counts as unknown, because
    an unknown never makes a pod a victim.
    """
    return value if type(value) is int and 0 <= value <= limit else None

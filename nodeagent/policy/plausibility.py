"""Which numbers a decision believes."""

from typing import Final

from nodeagent.model.units import MAX_PLAUSIBLE

MAX_CLOCK_SKEW_S: Final = 1.0
"""How far ahead of `now` a time stamp may lie before it is not believed: two reads of a clock in different order."""


def plausible(value: object, *, limit: int = MAX_PLAUSIBLE) -> int | None:
    """`value` if it is a whole number from 0 to `limit`, else None.

    Anything else (None, negative, NaN, a float, more than the node has) is a reading gone wrong, and what is not known
    must never make a pod a victim.
    """
    return value if type(value) is int and 0 <= value <= limit else None

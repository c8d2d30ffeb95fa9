"""Scales of charts: round numbers for the axes, and numbers as their labels. Pure arithmetic."""

import math
import time
from typing import Final, NamedTuple

from nodeagent.model import Unit, units

PERCENT: Final = "percent"
SECONDS: Final = "seconds"
COUNT: Final = "count"

_TIME_STEPS_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_MAX_TICKS: Final = 400
_MIN_SPAN: Final = 1e-6


class Scale(NamedTuple):
    """One axis: its ends and the values that have a label."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """0 at the low end to 1 at the high end; values outside are at the end."""
        span = self.high - self.low
        return min(1.0, max(0.0, (value - self.low) / span)) if span > 0 else 0.0


def value_scale(low: float, high: float, unit: str, *, ticks: int = 4) -> Scale:
    """A scale with round ends around `low` and `high`; it always contains zero."""
    low, high = min(0.0, low), max(0.0, high)
    if high - low < _MIN_SPAN:
        high = low + 1.0
    step = _step((high - low) / ticks, unit)
    first, last = math.floor(low / step), math.ceil(high / step)
    return Scale(first * step, last * step, tuple(number * step for number in range(first, last + 1)))


def time_scale(began: float, ended: float, *, ticks: int = 6) -> Scale:
    """A scale from the first to the last time, with labels at full seconds, minutes or hours of UTC."""
    ended = max(ended, began + 1.0)
    wanted = (ended - began) / ticks
    step = next((step for step in _TIME_STEPS_S if step >= wanted), 86400 * math.ceil(wanted / 86400))
    first, last = math.ceil(began / step), math.floor(ended / step)
    return Scale(
        began, ended, tuple(float(number * step) for number in range(first, min(last, first + _MAX_TICKS) + 1))
    )


def _step(least: float, unit: str) -> float:
    """The smallest round number from `least` on: a power of two for bytes, 1, 2 or 5 by a power of ten otherwise."""
    if unit == Unit.BYTES:
        return 2.0 ** max(0, math.ceil(math.log2(least)))
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    return step if unit in (PERCENT, SECONDS) else max(1.0, step)


def value_text(value: float | None, unit: str) -> str:
    """`1.46Gi`, `87`, `12.5%`, `5m`; `?` for an unknown value."""
    if value is None or not math.isfinite(value):
        return units.UNKNOWN_TEXT
    if unit == PERCENT:
        return f"{value:.1f}".rstrip("0").rstrip(".") + "%"
    if unit == SECONDS:
        return units.format_duration(value)
    if unit in (Unit.BYTES, Unit.INODES, Unit.PIDS):
        return units.format_amount(round(value), Unit(unit))
    return f"{value:.2f}".rstrip("0").rstrip(".")


def time_text(at: float, span_s: float) -> str:
    """A time of UTC, as exact as a span of this length needs: `19:02:11`, `19:02`, `11-24 19:00`."""
    form = "%H:%M:%S" if span_s < 600 else "%H:%M" if span_s < 86400 else "%m-%d %H:%M"
    try:
        return time.strftime(form, time.gmtime(at))
    except (OverflowError, ValueError, OSError):
        return units.UNKNOWN_TEXT

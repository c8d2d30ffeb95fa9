"""Curves and bars made of letters, for terminals, log lines and Markdown.

1. An unknown value is a gap, never a number.
2. A short dip or peak stays visible: a column that stands for several values shows the one farthest from the mean.
3. Both are plain text of a known width, without colours.
"""

import math
from collections.abc import Sequence
from typing import Final

LEVELS: Final = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
GAP: Final = " "
"""An unknown value."""
_EIGHTHS: Final = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"
_FULL, _EMPTY, _MARK = "\u2588", "\u2591", "\u2502"


def sparkline(values: Sequence[float | None], width: int, low: float | None = None, high: float | None = None) -> str:
    """A curve of at most `width` letters, oldest value first. Fewer values than that give fewer letters.

    `low` and `high` are the ends of the scale; None: those of the values. None or NaN in `values` is a gap.
    """
    columns = _columns([value if value is not None and math.isfinite(value) else None for value in values], width)
    known = [value for value in columns if value is not None]
    if not known:
        return GAP * len(columns)
    bottom = min(known) if low is None else low
    top = max(known) if high is None else high
    return "".join(GAP if value is None else LEVELS[_level(value, bottom, top)] for value in columns)


def bar(share: float | None, width: int, mark: float | None = None) -> str:
    """A bar of exactly `width` letters, filled to `share` (0 to 1); `?` and blanks for an unknown share.

    `mark` is the place of a threshold on the same scale, drawn over the bar; None, or one outside the scale: no mark.
    """
    if width <= 0:
        return ""
    if share is None or not math.isfinite(share):
        return "?".ljust(width)
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    letters = _FULL * (eighths // 8)
    if eighths % 8:
        letters += _EIGHTHS[eighths % 8]
    letters = letters.ljust(width, _EMPTY)
    if mark is None or not 0.0 <= mark <= 1.0:
        return letters
    place = min(width - 1, int(mark * width))
    return letters[:place] + _MARK + letters[place + 1 :]


def _columns(values: Sequence[float | None], width: int) -> Sequence[float | None]:
    """At most `width` values, each the most extreme one of its part."""
    if width <= 0:
        return ()
    if len(values) <= width:
        return values
    known = [value for value in values if value is not None]
    mean = math.fsum(known) / len(known) if known else 0.0
    columns: list[float | None] = []
    for column in range(width):
        part = values[column * len(values) // width : (column + 1) * len(values) // width]
        present = [value for value in part if value is not None]
        columns.append(max(present, key=lambda value: abs(value - mean)) if present else None)
    return columns


def _level(value: float, low: float, high: float) -> int:
    if high <= low:
        return 0 if value <= low else len(LEVELS) - 1
    share = (value - low) / (high - low)
    return max(0, min(len(LEVELS) - 1, int(share * len(LEVELS))))

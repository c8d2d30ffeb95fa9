"""Fewer points of a series in one pass, with the peaks kept.

1. The lowest and the highest value of every stretch of time are kept with their own times, so that a dip of one sample
   is visible at every zoom.
2. Memory is bounded: at most `2 * stretches` stretches, whatever the length of the recording.
3. A time without samples, or with unknown values only, is a gap: a point with the value None. One shorter than a
   stretch is not visible.

Theory of operation. The length of a recording is not known before its end. Stretches begin short; whenever there are
twice as many as wanted, neighbours are merged in pairs and the stretch doubles. Times are in the order of arrival; one
that goes back (the wall clock was set) counts in the stretch in progress.
"""

import math
from typing import Final, NamedTuple

GAP_S: Final = 60.0
"""Samples further apart are a gap: a recorder writes one every 10 s in calm."""
_FIRST_STRETCH_S: Final = 0.1


class Point(NamedTuple):
    """One value of a series."""

    at: float
    """Epoch seconds."""
    value: float | None
    """None: unknown, or the begin of a gap."""


class _Stretch:
    __slots__ = ("gap_before", "high", "low", "start", "unknown")

    def __init__(self, start: float, *, gap_before: float | None) -> None:
        self.start = start
        self.low: Point | None = None
        self.high: Point | None = None
        self.unknown: float | None = None
        """When the first unknown value was read."""
        self.gap_before = gap_before
        """When the samples before this stretch ended, if there is a gap between."""

    def gap(self) -> float:
        """Seconds without samples before it."""
        return 0.0 if self.gap_before is None else self.start - self.gap_before

    def merge(self, later: "_Stretch") -> None:
        if later.low is not None and (self.low is None or later.low[1] < self.low[1]):  # type: ignore[operator]
            self.low = later.low
        if later.high is not None and (self.high is None or later.high[1] > self.high[1]):  # type: ignore[operator]
            self.high = later.high
        if self.unknown is None:
            self.unknown = later.unknown


class Downsampler:
    """Takes one value after the other and returns the points of a series."""

    def __init__(self, stretches: int) -> None:
        self._most = 2 * stretches
        self._width = _FIRST_STRETCH_S
        self._stretches: list[_Stretch] = []
        self._current: _Stretch | None = None
        self._end = 0.0
        """Of the stretch in progress."""
        self._last = 0.0

    def add(self, at: float, value: float | None) -> None:
        """Add the value at `at`; None: unknown. A time that is no number (a damaged recording) is ignored."""
        if not math.isfinite(at):
            return
        current = self._current
        gap = current is not None and at - self._last > GAP_S
        if current is None or at >= self._end or gap:
            current = self._begin(at, gap_before=self._last if gap else None)
        self._last = at
        if value is None:
            if current.unknown is None:
                current.unknown = at
            return
        low, high = current.low, current.high
        if low is None or value < low[1]:  # type: ignore[operator]
            current.low = low = Point(at, value)
        if high is None:
            current.high = low
        elif value > high[1]:  # type: ignore[operator]
            current.high = Point(at, value)

    def points(self) -> tuple[Point, ...]:
        """The series so far, oldest first."""
        found: list[Point] = []
        for stretch in self._stretches:
            if stretch.gap_before is not None:
                found.append(Point(stretch.gap_before, None))
            low, high = stretch.low, stretch.high
            if low is None or high is None:
                if stretch.unknown is not None:
                    found.append(Point(stretch.unknown, None))
            elif low.at == high.at:
                found.append(low)
            else:
                found.extend(sorted((low, high)))
        return tuple(found)

    def _begin(self, at: float, *, gap_before: float | None) -> _Stretch:
        if len(self._stretches) >= self._most:
            self._coarsen()
        stretch = _Stretch(at, gap_before=gap_before)
        self._stretches.append(stretch)
        self._current, self._end = stretch, at + self._width
        return stretch

    def _coarsen(self) -> None:
        while len(self._stretches) >= self._most:
            self._width *= 2
            kept: list[_Stretch] = []
            for stretch in self._stretches:
                before = kept[-1] if kept else None
                if before is None or stretch.gap() >= self._width or stretch.start - before.start >= self._width:
                    kept.append(stretch)
                else:
                    before.merge(stretch)
            self._stretches = kept

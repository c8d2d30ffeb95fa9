"""Estimate the trend of a signal: a robust slope through its last few samples.

The history is a value: at most `SAMPLES` points (read at, available), the newest last. The slope is the Theil-Sen
estimate, the median of the slopes between all pairs of points, so that a single outlier (a pod that exits, a page cache
that is dropped) does not reverse it.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Final

from nodeagent.model import Trend

History = tuple[tuple[float, int], ...]

SAMPLES: Final = 6
"""15 pairs: about 5 us per signal (python 3.11); twice as many samples would cost four times that. Two outliers of six
do not reverse the median of the slopes."""

SPACING_S: Final = 0.2
"""Closer samples replace one another, so that 50 Hz sampling does not narrow the view to 0.2 s of noise; a ramp of
1 GiB/s is still recognised within 0.6 s."""

ENOUGH: Final = 4
"""Fewer points fit any line."""

HORIZON_S: Final = 120.0
"""Older points do not count; twelve times the longest sampling interval."""


def extend(history: History, *, read_at: float, available: int) -> History:
    """The history with one more sample; unchanged when the sample is not newer than the last one."""
    if not history:
        return ((read_at, available),)
    if read_at <= history[-1][0]:
        return history
    kept = history
    if len(kept) > 1 and kept[-1][0] - kept[-2][0] < SPACING_S:
        kept = kept[:-1]
    if read_at - kept[0][0] > HORIZON_S:
        kept = tuple(point for point in kept if read_at - point[0] <= HORIZON_S)
    return (*kept[-(SAMPLES - 1) :], (read_at, available))


def estimate(history: History, *, values: Iterable[int] = ()) -> Trend | None:
    """The trend of the history, with the time until the nearest of the threshold `values` that is not met yet.

    None: fewer than `ENOUGH` samples. Confidence is the share of the samples' spread that the line explains: 1 if all
    points lie on it (also for a constant signal), 0 if it explains no more than the median. The result of an unchanged
    history is cached, because most samples of a file system add no point.
    """
    return _estimate(history, tuple(values)) if len(history) >= ENOUGH else None


@lru_cache(maxsize=64)
def _estimate(history: History, values: tuple[int, ...]) -> Trend:
    available = history[-1][1]
    levels = [level for _, level in history]
    if min(levels) == max(levels):
        return Trend(rate_per_s=0.0, to_threshold_s=None, to_exhaustion_s=None, confidence=1.0)
    rate = _median([(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(history, 2)])
    ahead = [value for value in values if value <= available]
    return Trend(
        rate_per_s=rate,
        to_threshold_s=_time_down(available - max(ahead), rate) if ahead else None,
        to_exhaustion_s=_time_down(available, rate),
        confidence=_confidence(history, levels, rate),
    )


def latest_rate(history: History) -> float | None:
    """The slope up to the last sample, in units per second, from the newest one that is at least `SPACING_S` older: two
    closer ones show a step or none at all. None for fewer than two samples, or none that is so old."""
    if not history:
        return None
    last_at, last = history[-1]
    for at, available in reversed(history[:-1]):
        if last_at - at >= SPACING_S:
            return (last - available) / (last_at - at)
    return None


def between_neighbours(history: History) -> float | None:
    """The median of the slopes between neighbouring samples, in units per second; None for fewer than `ENOUGH`.

    A step up, such as the release of an evicted pod, is one of these slopes, but up to nine of the fifteen slopes of
    the Theil-Sen estimate, which then rises although the signal falls before and after the step.
    """
    if len(history) < ENOUGH:
        return None
    return _median([(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairwise(history)])


def _time_down(distance: int, rate: float) -> float | None:
    """Seconds until `distance` is used up; None if the signal does not fall."""
    return max(0.0, distance / -rate) if rate < 0.0 else None


def _confidence(history: History, levels: list[int], rate: float) -> float:
    offsets = [level - rate * at for at, level in history]
    return max(0.0, 1.0 - _spread(offsets) / _spread(levels))


def _spread(numbers: list[int] | list[float]) -> float:
    """Sum of the distances from the median: the upper half of the numbers minus the lower half."""
    ordered = sorted(numbers)
    half = len(ordered) // 2
    return float(sum(ordered[-half:]) - sum(ordered[:half]))


def _median(numbers: list[int] | list[float]) -> float:
    ordered = sorted(numbers)
    half = len(ordered) // 2
    return float(ordered[half]) if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2.0

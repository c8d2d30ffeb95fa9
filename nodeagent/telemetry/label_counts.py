"""Counters by labels, bounded."""

from collections.abc import Iterable
from typing import Final

from nodeagent.telemetry import initial_series
from nodeagent.telemetry.exposition import Series

MAX_METRIC_SERIES: Final = 500
"""Bound of each counter; further series count as `other`. Evictions have more than a thousand possible series (signals
x QoS classes x tiers x outcomes), of which a node has a handful."""
OTHER: Final = "other"


class LabelCounts:
    """Integers by label values, bounded. Those that are `known` begin at 0."""

    __slots__ = ("_labels", "_values")

    def __init__(self, labels: int, known: Iterable[initial_series.Labels] = ()) -> None:
        self._labels = labels
        self._values: dict[tuple[str, ...], int] = dict.fromkeys(known, 0)

    def add(self, *labels: str, by: int = 1) -> None:
        values = self._values
        if labels not in values and len(values) >= MAX_METRIC_SERIES:
            labels = (OTHER,) * self._labels
        values[labels] = values.get(labels, 0) + by

    def series(self, known: Iterable[initial_series.Labels] = ()) -> list[Series]:
        """Of `known`, what was not counted yet is 0."""
        return list((dict.fromkeys(known, 0) | self._values.copy()).items())

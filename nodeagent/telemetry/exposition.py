"""Writes metrics in the Prometheus text format (0.0.4) or as OpenMetrics (1.0): pure functions from numbers to bytes.

This replaces prometheus_client, because a scrape takes time from the loop and memory from the node: a scrape takes a
third of its time, and its import costs 1.4 MiB of 40 MiB (docs/performance.md). Tests read both formats back with
prometheus_client, promtool and a real Prometheus.
"""

import bisect
import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

PROMETHEUS_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

GAUGE: Final = "gauge"
COUNTER: Final = "counter"
HISTOGRAM: Final = "histogram"


class Family(NamedTuple):
    """One metric: what all its series share."""

    name: str
    """Without `_total` of a counter."""
    kind: str
    help: str
    labels: tuple[str, ...] = ()


class Histogram:
    """Counts of observations by upper bound. One thread observes, others may read at any time."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend; values above the last one count as +Inf."""
        self._bounds = tuple(bounds)
        self.counts = [0] * (len(self._bounds) + 1)
        """Not cumulated; the last one is +Inf."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value. NaN and infinity are left out, because they would make the sum useless."""
        if not math.isfinite(value):
            return
        self.counts[bisect.bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, int]]:
        """(upper bound as text, observations up to it), from one copy of the counts, so that they never decrease."""
        total, rows = 0, []
        for bound, count in zip((*self._bounds, math.inf), list(self.counts), strict=True):
            total += count
            rows.append((number(bound), total))
        return rows


Value = int | float | Histogram
Series = tuple[tuple[str, ...], Value]


class Sample(NamedTuple):
    """One value of one metric."""

    name: str
    """Of the family."""
    labels: tuple[str, ...]
    value: Value


"""Label values in the family's order, and the number (a `Histogram` for a histogram)."""


def render(families: Iterable[tuple[Family, Iterable[Series]]], *, openmetrics: bool = False) -> bytes:
    """The exposition. A family without series is left out: an absent series means unknown."""
    lines: list[str] = []
    for family, series in families:
        rows = list(series)
        if rows:
            _head(lines, family, openmetrics=openmetrics)
            for labels, value in rows:
                _samples(lines, family, labels, value)
    if openmetrics:
        lines.append("# EOF")
    lines.append("")
    return "\n".join(lines).encode("utf-8", "backslashreplace")


def sample_name(family: Family) -> str:
    """The name in Prometheus: that of a counter ends in `_total`."""
    return f"{family.name}_total" if family.kind == COUNTER else family.name


def _head(lines: list[str], family: Family, *, openmetrics: bool) -> None:
    name = family.name if openmetrics else sample_name(family)
    text = family.help.replace("\\", "\\\\").replace("\n", "\\n")
    if openmetrics:
        text = text.replace('"', '\\"')
    lines.append(f"# HELP {name} {text}")
    lines.append(f"# TYPE {name} {family.kind}")


def _samples(lines: list[str], family: Family, labels: tuple[str, ...], value: Value) -> None:
    pairs = [f'{key}="{escape(text)}"' for key, text in zip(family.labels, labels, strict=True)]
    inside = ",".join(pairs)
    if not isinstance(value, Histogram):
        lines.append(f"{sample_name(family)}{{{inside}}} {number(value)}" if inside else
                     f"{sample_name(family)} {number(value)}")  # fmt: skip
        return
    comma = "," if inside else ""
    rows = value.buckets()
    lines += [f'{family.name}_bucket{{{inside}{comma}le="{bound}"}} {count}' for bound, count in rows]
    whole = f"{{{inside}}}" if inside else ""
    lines.append(f"{family.name}_sum{whole} {number(value.sum)}")
    lines.append(f"{family.name}_count{whole} {rows[-1][1]}")


def escape(text: str) -> str:
    """The value of a label, escaped for the quotes around it."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def number(value: float) -> str:
    """The text of a value: integers exactly, floats as the shortest text with the same value, NaN and +-Inf."""
    if isinstance(value, int):
        return str(int(value))
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)

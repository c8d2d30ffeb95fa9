"""The values of a history: series, windows of time and marks, all in wall time (epoch seconds)."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from nodeagent.model import ConditionType, Signal, Threshold, Tier, Unit
from nodeagent.report.downsampling import Point

OTHER_PODS: Final = "other pods"
PERCENT: Final = "percent"
"""The unit of stalls: percent of wall time."""


class Series(NamedTuple):
    """Values over time."""

    name: str
    """`memory.available`, a pod's `namespace/name`, `memory some (node)`."""
    unit: str
    """A `Unit`, or `PERCENT`."""
    points: tuple[Point, ...]
    """Oldest first. The time is epoch seconds; the value None is a gap."""
    signal: Signal | None = None
    """None: of stalls."""
    capacity: int | None = None
    """The largest that was read; None: unknown, or a series that has none."""


class ThresholdSeries(NamedTuple):
    """A threshold's value over time: a step where its percentage or the kubelet's threshold changed."""

    threshold: Threshold
    unit: Unit
    points: tuple[Point, ...]
    """The first, each change, and the last."""

    @property
    def name(self) -> str:
        return threshold_name(self.threshold)

    @property
    def tier(self) -> Tier:
        return Tier.HARD if self.threshold.hard else Tier.SOFT


class Window(NamedTuple):
    """A stretch of time."""

    name: str
    began: float
    """Epoch seconds. It may be before the first sample."""
    ended: float | None
    """None: it lasted at the end of the recording."""


class ConditionWindow(NamedTuple):
    """A time in which a condition was True."""

    type: ConditionType
    began: float
    """Epoch seconds; it may be before the first sample."""
    ended: float | None
    """None: it lasted at the end of the recording."""
    relieved: float | None
    """From when on no threshold was met and damping alone kept it True; None: it ended without damping, or lasted."""
    message: str
    """Of the last sample in which it was True."""


class ThresholdWindow(NamedTuple):
    """A time in which a threshold was met."""

    threshold: Threshold
    began: float
    """Epoch seconds; it may be before the first sample."""
    due: float | None
    """When pods could first be evicted for it; None: never."""
    ended: float | None
    """None: it was met at the end of the recording."""

    @property
    def name(self) -> str:
        return threshold_name(self.threshold)


class EvictionMark(NamedTuple):
    """A victim of a recorded decision."""

    at: float
    """Epoch seconds of the decision."""
    pod: str
    """`namespace/name`, as recorded: escape it for the place where it is shown."""
    uid: str
    plan_id: str
    signal: str
    tier: str
    method: str
    outcome: str
    """An `OutcomeKind`; empty: none recorded."""


class OomKillMark(NamedTuple):
    """OOM kills of one pod or cgroup."""

    at: float
    """Epoch seconds at which they were found."""
    subject: str
    """The pod's `namespace/name`, else the cgroup."""
    report_id: str
    number: int | None
    race_lost: bool


def threshold_name(threshold: Threshold) -> str:
    """`memory.available < 500Mi, soft (1m30s)` without the duration for a hard one."""
    tier = "hard" if threshold.hard else f"soft, {threshold.grace_period_s:g}s"
    return f"{threshold.signal.value} < {threshold.value.text} ({tier})"


class History(NamedTuple):
    """All series and windows of a recording, read in one pass."""

    samples: int
    began: float | None
    """Epoch seconds of the first sample; None: there is none."""
    ended: float | None
    signals: tuple[Series, ...]
    stalls: tuple[Series, ...]
    thresholds: tuple[ThresholdSeries, ...]
    pods: tuple[Series, ...]
    """Usage of memory."""
    conditions: tuple[ConditionWindow, ...]
    met: tuple[ThresholdWindow, ...]

    @property
    def graces(self) -> tuple[Window, ...]:
        """The grace periods: from when a soft threshold was met until it was due, or until it was no longer met."""
        return graces(self.met)


def graces(windows: Iterable[ThresholdWindow]) -> tuple[Window, ...]:
    """The grace periods within these windows."""
    return tuple(
        Window(window.name, window.began, window.ended if window.due is None else window.due)
        for window in windows
        if not window.threshold.hard
    )

"""When a cached value of a pod is read again: one table."""

from collections.abc import Mapping, Set
from enum import StrEnum
from typing import Final, NamedTuple

from nodeagent.model import Tier

MOVED_BYTES: Final = 1 << 20
"""1% of the smallest default threshold. A further thread takes some 30 KiB of kernel memory and a process at least as
much, so a storm of either moves the usage too, and pids.current need not be read."""
SHORT_AGES_S: Final[Mapping[Tier, float]] = {Tier.HARD: 1.0, Tier.SOFT: 5.0}
"""The age of memory and counts while memory or PIDs are short, by the tier that acts. At a limit of its own the heap of
a pod displaces its page cache and its usage stays level, so that a pod that did not move may hold gigabytes more. 110
pods take 4 ms instead of 0.6 at a hard crossing, and are due one by one in each second after it. A soft shortage may
last for hours."""
YOUNG_S: Final = 5.0
"""A container's oom_score_adj is the shim's until runc sets it, some ms after the process is in the cgroup. A score
that was read this long after the container was first listed is final."""


class Change(StrEnum):
    """An event after which a value is read again, whatever its age."""

    SAMPLE = "every full sample"
    USAGE_MOVED = "usage moved by 1 MiB"
    SHORT = "memory or PIDs are short, and the last reading is older than `SHORT_AGES_S`"
    COUNTS_CHANGED = "the number of threads or of child cgroups changed"
    VERSION_CHANGED = "the API server lists a new version of the pod, or lists it no more"
    NAME_FOUND = "a log link names a container that had no name"
    YOUNG = "a container was listed for the first time at most 5 s before the reading"


class Age(NamedTuple):
    """One row: what ends a cached value."""

    changes: frozenset[Change]
    max_age_s: float
    """Read again after this time without any of the changes."""
    max_age_listed_s: float
    """The same for a pod that the API server lists: a new container then comes with a new version of the pod."""


def _row(*changes: Change, max_age_s: float, max_age_listed_s: float | None = None) -> Age:
    return Age(frozenset(changes), max_age_s, max_age_s if max_age_listed_s is None else max_age_listed_s)


AGES: Final[Mapping[str, Age]] = {
    "usage": _row(Change.SAMPLE, max_age_s=0.0),
    # memory.stat, memory.swap.current and memory.pressure. What is swapped out leaves the usage, so it moves. The
    # kubelet's own samples of a pod are up to 15 s old, however far it moved.
    "memory": _row(Change.USAGE_MOVED, Change.SHORT, max_age_s=20.0),
    "counts": _row(Change.USAGE_MOVED, Change.SHORT, max_age_s=60.0),
    # Two thirds of the cost of a pod. Includes its memory.max, memory.min and memory.low.
    "containers": _row(
        Change.COUNTS_CHANGED,
        Change.VERSION_CHANGED,
        Change.NAME_FOUND,
        Change.YOUNG,
        max_age_s=60.0,
        max_age_listed_s=300.0,
    ),
    "first_processes": _row(Change.YOUNG, max_age_s=float("inf")),
}
"""By the field of `pod_cache.PodValues`. `usage` is read in every full sample. The rows below `memory` are applied when
`memory` is read again, so such a value may exceed its own age by the age of `memory`. A pod with a memory.min is read
in every full sample, because MemAvailable is corrected by it."""


def memory_age_s(stale_after_s: float) -> float:
    """The age of `memory` where a decision rejects a reading older than `stale_after_s`: it leaves a third of that for
    the time between the sample and the decision."""
    return min(AGES["memory"].max_age_s, stale_after_s * 2 / 3)


def is_outdated(value: str, changes: Set[Change], *, age_s: float, listed: bool) -> bool:
    """True if a value of this age is read again after these changes."""
    row = AGES[value]
    max_age_s = row.max_age_listed_s if listed else row.max_age_s
    return not row.changes.isdisjoint(changes) or not 0 <= age_s < max_age_s

"""How long the loop may sleep: the headroom of the scarcest signal divided by how fast it could be used up.

Theory of operation. A node's signals cost 10 us to read, so there are two samples: a cheap one of the node alone, as
often as its headroom asks for, and a whole one with all pods, which a decision needs. `look` takes in a sample and says
when the next cheap one is due and whether a whole one is due now:

    sleep = SAFETY * headroom / max(fastest fill seen lately, fastest fill to be expected)

between `SHORTEST_S` and `sampling.interval`. Headroom is the distance to the nearest threshold below, and once that is
crossed the distance to exhaustion. The fastest fill to be expected keeps a calm node from sleeping through a ramp that
nobody has seen yet: cgroup v2 wakes nobody for a level.

A whole sample is due when a threshold is crossed in either direction, at every look below a hard one, every
`SOFT_LOOK_S` below soft ones alone, and every `sampling.interval`. While a hard one is about to be crossed the others
wait a little: what they set going would be in the way.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from nodeagent.config.resolve import resolve
from nodeagent.model import SIGNAL_TABLE as TABLE
from nodeagent.model import ConditionType, NodeSnapshot, Signal, Threshold, Unit

SHORTEST_S: Final = 0.02
"""50 Hz: what a decision near a threshold is worth (MEASURED.md, the kernel)."""
SAFETY: Final = 0.5
"""Sleep half the time that is left, so that the fastest ramp is seen before it arrives, not as it does."""
MEMORY_DECAY_S: Final = 30.0
"""A fill rate counts for half after this; a burst is often followed by another."""

FASTEST: Final[Mapping[Unit, float]] = {Unit.BYTES: float(1 << 30), Unit.INODES: 50_000.0, Unit.PIDS: 25_000.0}
"""Per second. Bytes: the fastest memory ramp measured, ~950 MiB/s, first touch by one process (a disk fills slower).
Inodes and PIDs: about what one process makes of empty files, and the fastest fork storm measured (23,000/s)."""


SOFT_LOOK_S: Final = 0.25
"""Below soft thresholds alone a whole sample is due this often: their grace is counted in seconds, and a ramp that goes
on must not reach the hard threshold while the loop decides once more that it has to wait. On a slow node (emulated,
where a decision took 100 ms) 1 GiB/s went 190 MiB below the hard threshold unseen."""


IMMINENT_S: Final = 0.5
"""A hard threshold is about to be crossed when it would be within this time at the fastest fill seen lately."""
LATEST_S: Final = 1.25
"""Then a whole sample waits for the crossing, until the last one is this old: publishing a condition set five threads
going, and the looks of the loop then took 120 ms instead of 10 (emulated), which is 100 MiB of the fastest ramp."""

AHEAD_S: Final = 60.0
"""A disk is near its threshold when it would be there within this time at its fill rate: long enough to walk some
millions of files before (200,000 take 0.35 s, MEASURED.md, the kernel)."""
NEAR: Final = 0.1
"""A disk is near its threshold as well while its headroom is less than this share of the threshold's value."""


class Seen(NamedTuple):
    """One signal at the last look."""

    available: int
    read_at: float
    fill_per_s: float
    """Fastest fill lately, decaying."""


class PaceState(NamedTuple):
    """What looking remembers."""

    seen: Mapping[str, Seen] = {}
    below: frozenset[str] = frozenset()
    """Thresholds that were crossed at the last whole sample, by signal and value."""
    whole_at: float | None = None
    """When a whole sample was last asked for."""


class Pace(NamedTuple):
    """What the loop should do next."""

    sleep_s: float
    whole: bool
    """Take a whole sample and decide, now."""
    pressed: bool
    """A threshold is crossed now."""
    headroom: Mapping[Signal, int]
    """Distance to the nearest threshold that is not crossed, of each signal that has one."""
    crossed: frozenset[Signal] = frozenset()
    """Signals below one of their thresholds."""
    near: frozenset[Signal] = frozenset()
    """Disk signals that may be below one soon."""


def look(
    snapshot: NodeSnapshot,
    state: PaceState,
    *,
    now: float,
    thresholds: tuple[Threshold, ...],
    interval_s: float,
) -> tuple[Pace, PaceState]:
    """Take in a sample. A signal that is unknown has no say: the whole sample every `interval_s` reports it."""
    sleep_s = interval_s
    seen: dict[str, Seen] = {}
    below: set[str] = set()
    nearest: dict[Signal, int] = {}
    crossed: set[Signal] = set()
    near: set[Signal] = set()
    urgent = imminent = False
    for threshold in thresholds:
        observation = snapshot.observe(threshold.signal, threshold.memory_model)
        value = resolve(threshold.value, capacity=observation.capacity)
        if observation.available is None or value is None:
            continue
        stream = f"{threshold.signal}/{threshold.memory_model}"
        if stream not in seen:
            seen[stream] = _filled(state.seen.get(stream), observation.available, observation.read_at)
        headroom = observation.available - value
        if headroom < 0:
            below.add(f"{stream}<{value}")
            crossed.add(threshold.signal)
            urgent = urgent or threshold.hard
            headroom = observation.available
        else:
            imminent = imminent or (threshold.hard and headroom < seen[stream].fill_per_s * IMMINENT_S)
            nearest[threshold.signal] = min(headroom, nearest.get(threshold.signal, headroom))
            disk = TABLE[threshold.signal].condition is ConditionType.DISK_PRESSURE
            if disk and headroom <= max(NEAR * value, seen[stream].fill_per_s * AHEAD_S):
                near.add(threshold.signal)
        fastest = max(seen[stream].fill_per_s, _expected(threshold.signal))
        sleep_s = min(sleep_s, SAFETY * headroom / fastest)
    every_s = min(interval_s, SOFT_LOOK_S) if below else interval_s
    sleep_s = min(sleep_s, every_s)
    age_s = now - state.whole_at if state.whole_at is not None else -1.0
    waits = imminent and below >= state.below and 0.0 <= age_s < LATEST_S
    due = not 0.0 <= age_s < every_s or below != state.below
    whole = urgent or (due and not waits)
    after = PaceState(seen, frozenset(below) if whole else state.below, now if whole else state.whole_at)
    return Pace(
        max(SHORTEST_S, sleep_s), whole, bool(below), nearest, crossed=frozenset(crossed), near=frozenset(near)
    ), after


def _expected(signal: Signal) -> float:
    return FASTEST[TABLE[signal].unit]


def _filled(before: Seen | None, available: int, read_at: float) -> Seen:
    if before is None or read_at <= before.read_at:
        return Seen(available, read_at, before.fill_per_s if before else 0.0)
    passed = read_at - before.read_at
    rate = max(0.0, (before.available - available) / passed)
    remembered: float = before.fill_per_s * 0.5 ** (passed / MEMORY_DECAY_S)
    return Seen(available, read_at, max(rate, remembered))

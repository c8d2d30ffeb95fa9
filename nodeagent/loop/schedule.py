"""How long the loop may sleep: the headroom of the scarcest signal divided by how fast it could be used up.

Theory of operation. A node's signals cost 10 us to read, so there are two samples: a cheap one of the node alone, as
often as its headroom asks for, and a whole one with all pods, which a decision needs. `look` takes in a sample and says
when the next cheap one is due and whether a whole one is due now:

    sleep = SAFETY * headroom / max(fastest fill seen lately, fastest fill to be expected)

between `SHORTEST_S` and `sampling.interval`. Headroom is the distance to the nearest threshold below, and once that is
crossed the distance to exhaustion. The fastest fill to be expected keeps a calm node from sleeping through a ramp that
nobody has seen yet: cgroup v2 wakes nobody for a level.

The file systems are read by threads, for a dead one may never answer, and that takes longer than all the rest. They are
read when their own headroom asks for it, at every look only while one of them is crossed or near: while memory runs out
it is looked at 50 times a second, and they need not be. One that is unknown is tried again every second. Limits
(MemTotal, pid_max, what all pods may use) rarely change and are a third of a look. They are read when the headroom of
memory asks for it, for a virtual machine that is given more when it has little must not lose a pod for it, and at every
look while a threshold is crossed or what it looks at is unknown, or one looks at MemAvailable, which stands beside
MemTotal. Of a calm node neither is read more often than its pods are.

A whole sample is due when a threshold is crossed in either direction, at every look below a hard one, and every
`SOFT_LOOK_S` below soft ones alone. While none is crossed it would repeat the last one: the first `SETTLED` come every
`sampling.interval`, the others every `CALM_S` or more. While a hard one is about to be crossed the others wait a
little: what they set going would be in the way. Right before it is crossed the pods are looked at and lined up, in time
that would be slept away, so that the decision finds the victim at hand. Somewhat earlier it is asked who that would be,
for whoever can have the kernel keep it from outrunning the loop.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from nodeagent.config.resolve import resolve
from nodeagent.model import DISK_SIGNALS, MEMORY_SIGNALS, MemoryModel, NodeSnapshot, Signal, Threshold, Unit
from nodeagent.model import SIGNAL_TABLE as TABLE

SHORTEST_S: Final = 0.02
"""50 Hz: what a decision near a threshold is worth (MEASURED.md, the kernel)."""
SAFETY: Final = 0.5
"""Sleep half the time that is left, so that the fastest ramp is seen before it arrives, not as it does."""
MEMORY_DECAY_S: Final = 30.0
"""A fill rate counts for half after this; a burst is often followed by another."""

FASTEST: Final[Mapping[Unit, float]] = {Unit.BYTES: float(1 << 30), Unit.INODES: 50_000.0, Unit.PIDS: 25_000.0}
"""Per second. Bytes: the fastest memory ramp measured, ~950 MiB/s, first touch by one process (a disk fills slower).
Inodes and PIDs: about what one process makes of empty files, and the fastest fork storm measured (23,000/s)."""


SOFT_SAMPLE_S: Final = 0.25
"""Below soft thresholds alone a whole sample is due this often: their grace is counted in seconds, and a ramp that goes
on must not reach the hard threshold while the loop decides once more that it has to wait. On a slow node (emulated,
where a decision took 100 ms) 1 GiB/s went 190 MiB below the hard threshold unseen."""


CALM_S: Final = 10.0
"""While no threshold is crossed the pods are looked at and a decision is made no more often than this: ranking is what
needs them, and of the past it needs one look that is 2.5 to 60 s old, to tell who grows. For 500 pods both take 10
times the CPU of a look at the node alone. A kubelet looks as rarely (KUBELET-CONTRACT, one sync)."""
CALM_AFTER: Final = 5
"""So many whole samples in a row that find no threshold crossed make it calm: a start waits for some fresh ones
(`startup.freshSamples`), and what was crossed a moment ago may be so again."""


IMMINENT_S: Final = 1.0
"""A hard threshold is about to be crossed when it would be within this time at the fastest fill seen lately. Not one of
a disk: what one takes while a condition is published, 20 MiB, it has."""
MAX_POSTPONE_S: Final = 1.25
"""Then a whole sample that is due waits for the crossing, for so long at most: publishing a condition sets five threads
going, and the looks of the loop then took 120 to 340 ms instead of 10 (emulated), which is 100 to 300 MiB of the
fastest ramp."""

PREARM_AHEAD_S: Final = 0.05
"""The next look may find a hard threshold crossed, when it would be within this time as fast as it fills right now."""
PREARM_EVERY_S: Final = 0.1
"""No more often than this: for 500 pods that is 5 ms each, and a node may hover above its threshold for hours."""
PREARM_VALID_S: Final = 0.08
"""Pods that were looked at so long before a decision are as good as looked at in it."""

GROWTH_CAP_AHEAD_S: Final = 0.5
"""A pod is to be guarded that may cross a hard threshold of memory within this time, as fast as it fills right now: on
a slow node (emulated) it takes 100 ms to find out which one, and its limit is right however early it is set."""
GROWTH_CAP_EVERY_S: Final = 0.25

UNKNOWN_S: Final = 1.0
"""A disk that a threshold could not be held against is read again after this: a mount may come back, but the inodes of
btrfs will never be known. Limits are read again at every look: that is cheap, and for memory a second is long."""

AHEAD_S: Final = 60.0
"""A disk is near its threshold when it would be there within this time at its fill rate: long enough to walk some
millions of files before (200,000 take 0.35 s, MEASURED.md, the kernel)."""
NEAR: Final = 0.1
"""A disk is near its threshold as well while its headroom is less than this share of the threshold's value."""


_FASTEST: Final[Mapping[Signal, float]] = {signal: FASTEST[row.unit] for signal, row in TABLE.items()}

Stream = tuple[Signal, MemoryModel]
"""What a threshold looks at."""


class SignalLevel(NamedTuple):
    """One stream at the last look."""

    available: int
    read_at: float
    fill_per_s: float
    """Fastest fill lately, decaying."""
    now_per_s: float = 0.0
    """Fill between the last two looks."""


class ScheduleState(NamedTuple):
    """What looking remembers."""

    levels: Mapping[Stream, SignalLevel] = {}
    crossed_before: frozenset[tuple[Signal, MemoryModel, int]] = frozenset()
    """Thresholds that were crossed at the last whole sample, by what they look at and value."""
    full_sample_at: float | None = None
    """When a whole sample was last asked for."""
    due_at: float | None = None
    """Since when one is due that waits."""
    calm: int = 0
    """How many of them in a row found none crossed; counted up to `SETTLED`."""
    disks_at: float = float("-inf")
    """From when on the file systems are to be read again: those of the last look serve until then."""
    limits_at: float = float("-inf")
    """From when on MemTotal, MemAvailable and the limits are."""
    prearmed_at: float = float("-inf")
    """When pods were last to be looked at before a crossing."""
    capped_at: float = float("-inf")
    """When it was last asked who is to be guarded."""


class Schedule(NamedTuple):
    """What the loop should do next."""

    sleep_s: float
    full_sample: bool
    """Take a whole sample and decide, now."""
    under_pressure: bool
    """A threshold is crossed now."""
    headroom: Mapping[Signal, int]
    """Distance to the nearest threshold that is not crossed, of each signal that has one."""
    crossed: frozenset[Signal] = frozenset()
    """Signals below one of their thresholds."""
    near: frozenset[Signal] = frozenset()
    """Disk signals that may be below one soon."""
    prearm: bool = False
    """Look at the pods now, without a decision: the next look may have to decide."""
    growth_cap: bool = False
    """Find out which pod would have to go if memory were used up to its hard threshold."""


def plan_next(
    snapshot: NodeSnapshot,
    state: ScheduleState,
    *,
    now: float,
    thresholds: tuple[Threshold, ...],
    interval_s: float,
    calm_s: float = CALM_S,
    unsettled: bool = False,
) -> tuple[Schedule, ScheduleState]:
    """Take in a sample. A signal that is unknown has no say: the next whole sample reports it. `calm_s` replaces
    `CALM_S`. `unsettled`: decisions follow something that goes on although no threshold is crossed, such as one that is
    still met by its minimum reclaim or a condition that is to be taken back."""
    sleep_s = interval_s
    calm_every_s = interval_s if unsettled or state.calm < CALM_AFTER else max(interval_s, calm_s)
    disks_age_s = now - snapshot.observe(Signal.NODEFS).read_at
    disks_s = calm_every_s - disks_age_s
    limits_age_s = now - snapshot.mem_available.read_at
    limits_s = calm_every_s - limits_age_s
    seen: dict[Stream, SignalLevel] = {}
    below: set[tuple[Signal, MemoryModel, int]] = set()
    nearest: dict[Signal, int] = {}
    crossed: set[Signal] = set()
    near: set[Signal] = set()
    urgent = imminent = arrives = runs = False
    for threshold in thresholds:
        signal, model = threshold.signal, threshold.memory_model
        observation = snapshot.observe(signal, model)
        available, value = observation.available, resolve(threshold.value, capacity=observation.capacity)
        if model is MemoryModel.MEM_AVAILABLE:
            limits_s = 0.0
        if available is None or value is None:
            if signal in DISK_SIGNALS:
                disks_s = min(disks_s, UNKNOWN_S - disks_age_s)
            else:
                limits_s = 0.0
            continue
        stream = (signal, model)
        now_seen = seen.get(stream)
        if now_seen is None:
            now_seen = seen[stream] = _filled(state.levels.get(stream), available, observation.read_at)
        fill_per_s = now_seen.fill_per_s
        headroom = available - value
        if headroom < 0:
            below.add((signal, model, value))
            crossed.add(signal)
            urgent = urgent or threshold.hard
            headroom = available
        else:
            swift = threshold.hard and signal not in DISK_SIGNALS
            imminent = imminent or (swift and headroom < fill_per_s * IMMINENT_S)
            arrives = arrives or (threshold.hard and headroom < now_seen.now_per_s * PREARM_AHEAD_S)
            runs = runs or (
                threshold.hard and signal in MEMORY_SIGNALS and headroom < now_seen.now_per_s * GROWTH_CAP_AHEAD_S
            )
            nearest[signal] = min(headroom, nearest.get(signal, headroom))
            if signal in DISK_SIGNALS and headroom <= max(NEAR * value, fill_per_s * AHEAD_S):
                near.add(signal)
        due_s = SAFETY * headroom / max(fill_per_s, _FASTEST[signal])
        if signal in DISK_SIGNALS:
            due_s -= disks_age_s
            disks_s = min(disks_s, 0.0 if signal in crossed or signal in near else due_s)
        elif signal in MEMORY_SIGNALS:
            limits_s = min(limits_s, due_s - limits_age_s)
        sleep_s = min(sleep_s, due_s)
    if below:
        every_s = min(interval_s, SOFT_SAMPLE_S)
        sleep_s = min(sleep_s, every_s)
        limits_s = 0.0
    else:
        every_s = calm_every_s
    age_s = now - state.full_sample_at if state.full_sample_at is not None else -1.0
    due = not 0.0 <= age_s < every_s or below != state.crossed_before
    due_at = state.due_at if state.due_at is not None else now
    waits = imminent and below >= state.crossed_before and age_s >= 0.0 and 0.0 <= now - due_at < MAX_POSTPONE_S
    whole = urgent or (due and not waits)
    prepare = arrives and not whole and now - state.prearmed_at >= PREARM_EVERY_S
    guard = runs and not whole and now - state.capped_at >= GROWTH_CAP_EVERY_S
    after = state._replace(
        levels=seen,
        due_at=due_at if due and not whole else None,
        disks_at=now + disks_s,
        limits_at=now + limits_s,
        prearmed_at=now if prepare else min(state.prearmed_at, now),
        capped_at=now if guard else min(state.capped_at, now),
    )
    if whole:
        after = after._replace(
            crossed_before=frozenset(below),
            full_sample_at=now,
            calm=0 if below or unsettled else min(state.calm + 1, CALM_AFTER),
        )
    return Schedule(
        max(SHORTEST_S, sleep_s),
        whole,
        bool(below),
        nearest,
        crossed=frozenset(crossed),
        near=frozenset(near),
        prearm=prepare,
        growth_cap=guard,
    ), after


def _filled(before: SignalLevel | None, available: int, read_at: float) -> SignalLevel:
    if before is None or read_at <= before.read_at:
        return SignalLevel(available, read_at, before.fill_per_s if before else 0.0)
    passed = read_at - before.read_at
    rate = max(0.0, (before.available - available) / passed)
    remembered: float = before.fill_per_s * 0.5 ** (passed / MEMORY_DECAY_S)
    return SignalLevel(available, read_at, max(rate, remembered), rate)

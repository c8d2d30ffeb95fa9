"""Candidates for thresholds and grace periods, each with its false alarms, misses and lead time on one node.

Promises:

1. Nothing is changed. The result is a table, a curve, and a stanza of the configuration to paste.
2. A figure that the recordings cannot give is None, never zero: without an exhaustion there is no miss rate and no lead
   time.
3. Every candidate is measured by the same definitions (docs/replay.md has them as formulas).

Definitions. Let a(t) be the available amount of a signal, v the value of a candidate and g its grace period.

    episode       a longest run of samples with a(t) < v; it ends at the first sample with a(t) >= v, and at a gap of
                  more than `sampling.staleAfter`
    alarm         an episode that lasts at least g; its time is the episode's start + g
    exhaustion    a(t) <= x (`exhaustion_level`), or an OOM kill for which the node had no memory left; later ones
                  within N (`within_s`) of the first belong to it
    act           an eviction that the recorded agent carried out
    caught        an exhaustion within an episode whose alarm is not later; its lead time is exhaustion - alarm
    missed        any other exhaustion
    false alarm   an alarm without an exhaustion from the episode's start to N after its end, and without an act in
                  that time: the level recovered on its own
    answered      an alarm with an act and without an exhaustion: nobody knows whether it was needed

An episode that the end of the recording cuts off, without an exhaustion or act so far, counts as open.
"""

import bisect
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from nodeagent.config import resolve
from nodeagent.config.schema import API_VERSION, CONFIG_KIND, Config
from nodeagent.model import (
    CONTAINERFS_SIGNALS,
    MEMORY_SIGNALS,
    Amount,
    MemoryModel,
    NodeSnapshot,
    Signal,
    Tier,
)

PERCENTAGES: Final = (1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 12.0, 15.0, 20.0, 25.0, 30.0)
"""Values of the candidates, as shares of the capacity."""
GRACES_S: Final = (0.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Grace periods of the candidates; 0 is a hard threshold."""
EXHAUSTION_SHARE: Final = 0.01
"""A signal is exhausted at this share of its capacity..."""
EXHAUSTION_MOST: Final = {Signal.MEMORY: 100 << 20, Signal.ALLOCATABLE_MEMORY: 100 << 20}
"""...but memory at no more than the kubelet's built-in threshold."""
WITHIN_S: Final = 600.0
"""N of the definitions."""
LEAD_S: Final = {Tier.HARD: 15.0, Tier.SOFT: 60.0}
"""The lead time that a proposed threshold has at least: a kubelet's slowest release took 12.9 s (performance.md R1),
and a soft eviction gives its victim 30 s."""
MIN_SOFT_GRACE_S: Final = 30.0
"""The shortest grace period of a proposed soft threshold."""
TUNED: Final = (Signal.MEMORY, Signal.NODEFS, Signal.NODEFS_INODES, Signal.IMAGEFS, Signal.IMAGEFS_INODES, Signal.PID)
"""allocatableMemory follows memory, and containerfs follows nodefs or imagefs."""


class Event(NamedTuple):
    """An exhaustion, or an act of the recorded agent."""

    at: float
    """Wall time."""
    what: str


class Candidate(NamedTuple):
    """One value and grace period, and what came of it."""

    value: Amount
    grace_s: float
    level: int
    """The value for the last capacity."""
    alarms: int
    caught: int
    missed: int | None
    """None: the recordings have no exhaustion."""
    false_alarms: int
    answered: int
    open: int
    lead_s: tuple[float, ...]
    """Of each caught exhaustion, shortest first."""
    met_s: float
    """Time below the value."""
    configured: bool = False

    @property
    def shortest_lead_s(self) -> float | None:
        return self.lead_s[0] if self.lead_s else None


class SignalTuning(NamedTuple):
    """The candidates of one signal."""

    signal: Signal
    samples: int
    lowest: int
    capacity: int
    exhaustion_level: int
    exhaustions: tuple[Event, ...]
    acts: tuple[Event, ...]
    candidates: tuple[Candidate, ...]
    hard: Candidate | None
    """Proposed; None: no candidate is better than none, see `reason`."""
    soft: Candidate | None
    reason: str


class Tuning(NamedTuple):
    """The result."""

    signals: tuple[SignalTuning, ...]
    first_wall: float | None
    last_wall: float | None
    recorded_s: float
    unknown: tuple[Signal, ...]
    """Signals without one usable sample."""


def exhaustion_level(signal: Signal, capacity: int) -> int:
    """x of the definitions."""
    return min(int(capacity * EXHAUSTION_SHARE), EXHAUSTION_MOST.get(signal, capacity))


class Tuner:
    """Takes the samples of one node, oldest first, and what happened beside them."""

    def __init__(self, config: Config, *, within_s: float = WITHIN_S) -> None:
        self._config = config
        self._within_s = within_s
        self._gap_s = max(config.sampling.stale_after_s, 0.0)
        self._series = {signal: _Series(signal, config) for signal in TUNED}
        self._last_wall: float | None = None
        self._first_wall: float | None = None
        self._recorded_s = 0.0
        self._kills: list[Event] = []
        self._acts: dict[Signal, dict[tuple[float, str], Event]] = {}
        self.left_out = 0
        """Samples that are not newer than the last."""

    def feed(self, snapshot: NodeSnapshot) -> None:
        """Take the next sample. One that is not newer than the last is left out."""
        wall, last = snapshot.wall_time, self._last_wall
        if last is not None and not last < wall:
            self.left_out += 1
            return
        passed_s = 0.0 if last is None else wall - last
        gap = last is not None and passed_s > self._gap_s
        if last is None:
            self._first_wall = wall
        elif not gap:
            self._recorded_s += passed_s
        self._last_wall = wall
        for series in self._series.values():
            series.feed(snapshot, passed_s, gap=gap)

    def add_kill(self, wall: float) -> None:
        """An OOM kill for which the node had no memory left."""
        self._kills.append(Event(wall, "OOM kill"))

    def add_act(self, signal: Signal, wall: float, *, uid: str) -> None:
        """An eviction that the recorded agent carried out, which may be in several recordings of that time."""
        self._acts.setdefault(signal, {})[wall, uid] = Event(wall, "eviction")

    def result(self) -> Tuning:
        """The candidates with their figures."""
        known = [series for series in self._series.values() if series.samples]
        return Tuning(
            tuple([self._tuned(series) for series in known]),
            self._first_wall,
            self._last_wall,
            self._recorded_s,
            tuple([signal for signal, series in self._series.items() if not series.samples]),
        )

    def _tuned(self, series: "_Series") -> SignalTuning:
        end = self._last_wall or 0.0
        happened = sorted(series.exhaustions + (self._kills if series.signal is Signal.MEMORY else []))
        exhaustions = _merged(happened, self._within_s)
        acts = tuple(sorted(self._acts.get(series.signal, {}).values()))
        candidates = tuple(
            [
                _measured(row, grace_s, exhaustions, acts, end=end, within_s=self._within_s)
                for row in series.rows
                for grace_s in row.graces_s
            ]
        )
        hard, soft, reason = proposed(candidates, exhaustions, acts)
        return SignalTuning(
            series.signal,
            series.samples,
            series.lowest,
            series.capacity,
            exhaustion_level(series.signal, series.capacity),
            exhaustions,
            acts,
            candidates,
            hard,
            soft,
            reason,
        )


# --- episodes --------------------------------------------------------------------------------------------------------


class _Row:
    """The episodes of one value."""

    __slots__ = ("configured", "episodes", "graces_s", "level", "met_s", "since", "value")

    def __init__(self, value: Amount, graces_s: tuple[float, ...], *, configured: frozenset[float]) -> None:
        self.value = value
        self.graces_s = graces_s
        self.configured = configured
        self.level = 0
        self.since: float | None = None
        self.met_s = 0.0
        self.episodes: list[tuple[float, float]] = []
        """(first sample, end). An episode that goes on has no end yet and is not here."""


class _Series:
    """The samples of one signal, as episodes of each value."""

    def __init__(self, signal: Signal, config: Config) -> None:
        self.signal = signal
        self.samples = 0
        self.lowest = 0
        self.capacity = 0
        self.exhaustions: list[Event] = []
        self.rows = _rows(signal, config)
        own = [each for each in config.thresholds if each.signal is signal]
        self._model = own[0].memory_model if own and signal in MEMORY_SIGNALS else MemoryModel.WORKING_SET
        if self._model is MemoryModel.LOWER:
            # What is short beyond page cache decides about evictions, and the kernel's figure shows it.
            self._model = MemoryModel.MEM_AVAILABLE
        self._top = 0
        self._exhausted_at = 0
        self._last = 0.0
        self._was_exhausted = False
        self._open = 0

    def feed(self, snapshot: NodeSnapshot, passed_s: float, *, gap: bool) -> None:
        observation = snapshot.observe(self.signal, self._model)
        if self._model is MemoryModel.MEM_AVAILABLE and observation.available is None:
            observation = snapshot.observations[self.signal]
        available, capacity, wall = observation.available, observation.capacity, snapshot.wall_time
        if gap:
            self._end_all(self._last)
        if available is None or capacity is None or observation.implausible:
            return
        if capacity != self.capacity:
            self._resolve(capacity)
        if not self.samples or available < self.lowest:
            self.lowest = available
        self.samples += 1
        if available < self._top or self._open:
            self._step(available, wall, 0.0 if gap else passed_s)
        exhausted = available <= self._exhausted_at
        if exhausted and not self._was_exhausted:
            self.exhaustions.append(Event(wall, "exhausted"))
        self._was_exhausted = exhausted
        self._last = wall

    def _resolve(self, capacity: int) -> None:
        self.capacity = capacity
        for row in self.rows:
            row.level = resolve.resolve_amount(row.value, capacity=capacity) or 0
        self._top = max([row.level for row in self.rows], default=0)
        self._exhausted_at = exhaustion_level(self.signal, capacity)

    def _step(self, available: int, wall: float, passed_s: float) -> None:
        for row in self.rows:
            if row.since is not None:
                row.met_s += passed_s
            if available < row.level:
                if row.since is None:
                    row.since = wall
                    self._open += 1
            elif row.since is not None:
                row.episodes.append((row.since, wall))
                row.since = None
                self._open -= 1

    def _end_all(self, wall: float) -> None:
        for row in self.rows:
            if row.since is not None:
                row.episodes.append((row.since, wall))
                row.since = None
        self._open = 0
        self._was_exhausted = False


def _rows(signal: Signal, config: Config) -> list[_Row]:
    """A row for each configured value and for each share of the capacity."""
    own = [each for each in config.thresholds if each.signal is signal]
    graces: dict[Amount, set[float]] = {each.value: set() for each in own}
    for each in own:
        graces[each.value].add(each.grace_period_s)
    configured = [
        _Row(value, tuple(sorted({*GRACES_S, *used})), configured=frozenset(used)) for value, used in graces.items()
    ]
    taken = {each.value.percentage for each in own if each.value.at_least is None and each.value.at_most is None}
    shares = [
        _Row(Amount(None, share, f"{share:g}%"), GRACES_S, configured=frozenset())
        for share in PERCENTAGES
        if share not in taken
    ]
    return [*configured, *shares]


# --- figures ---------------------------------------------------------------------------------------------------------


def _merged(events: Sequence[Event], within_s: float) -> tuple[Event, ...]:
    """Events without those that belong to an earlier one."""
    kept: list[Event] = []
    for event in events:
        if not kept or event.at - kept[-1].at > within_s:
            kept.append(event)
    return tuple(kept)


def _measured(
    row: _Row,
    grace_s: float,
    exhaustions: Sequence[Event],
    acts: Sequence[Event],
    *,
    end: float,
    within_s: float,
) -> Candidate:
    """The figures of one value and grace period."""
    episodes = [*row.episodes, *([(row.since, None)] if row.since is not None else [])]
    exhausted = [event.at for event in exhaustions]
    acted = [event.at for event in acts]
    alarms = false_alarms = answered = still_open = 0
    leads: dict[float, float] = {}
    for start, stop in episodes:
        last = end if stop is None else stop
        if last - start < grace_s:
            continue
        alarm = start + grace_s
        alarms += 1
        caught = [at for at in exhausted if start <= at <= last]
        for at in caught:
            if alarm <= at:
                leads[at] = max(leads.get(at, 0.0), at - alarm)
        until = last + within_s
        if _any_between(exhausted, start, until):
            continue
        if _any_between(acted, start, until):
            answered += 1
        elif stop is None:
            still_open += 1
        else:
            false_alarms += 1
    return Candidate(
        row.value,
        grace_s,
        row.level,
        alarms,
        len(leads),
        len(exhausted) - len(leads) if exhausted else None,
        false_alarms,
        answered,
        still_open,
        tuple(sorted(leads.values())),
        row.met_s,
        grace_s in row.configured,
    )


def _any_between(times: Sequence[float], start: float, end: float) -> bool:
    place = bisect.bisect_left(times, start)
    return place < len(times) and times[place] <= end


def proposed(
    candidates: Sequence[Candidate], exhaustions: Sequence[Event], acts: Sequence[Event]
) -> tuple[Candidate | None, Candidate | None, str]:
    """The proposed hard and soft candidate, and why.

    With an exhaustion: of those that miss the fewest and lead long enough the one with the fewest false alarms, then
    the lowest. Without one nothing shows how early is early enough, so only a configured candidate with false alarms is
    replaced, by the nearest quiet one below it."""
    hard = [each for each in candidates if each.grace_s == 0.0]
    soft = [each for each in candidates if each.grace_s >= MIN_SOFT_GRACE_S]
    if exhaustions:
        best = _best(hard, LEAD_S[Tier.HARD])
        above = [each for each in soft if best is None or each.level > best.level]
        reason = "fewest misses with enough lead time, then fewest false alarms, then the lowest value"
        return best, _best(above, LEAD_S[Tier.SOFT]), reason
    if acts:
        return None, None, "none: there is no exhaustion, and evictions of the recorded agent may have prevented one"
    hard_noisy, soft_noisy = _noisy(hard), _noisy([each for each in candidates if each.grace_s > 0.0])
    if hard_noisy is None and soft_noisy is None:
        return None, None, "none: there is no exhaustion, and the configured thresholds gave no false alarm"
    reason = "there is no exhaustion, so misses are unknown: the nearest quiet value in place of one with false alarms"
    return _quieter(hard, hard_noisy), _quieter(soft, soft_noisy), reason


def _noisy(candidates: Iterable[Candidate]) -> Candidate | None:
    """The configured candidate, if it gave false alarms."""
    return next((each for each in candidates if each.configured and each.false_alarms), None)


def _quieter(candidates: Iterable[Candidate], noisy: Candidate | None) -> Candidate | None:
    """The highest candidate without an alarm that is not above this one, the shortest grace first."""
    if noisy is None:
        return None
    quiet = [each for each in candidates if each.level <= noisy.level and not each.false_alarms and not each.open]
    return max(quiet, key=lambda each: (each.level, -each.grace_s), default=None)


def _best(candidates: Iterable[Candidate], lead_s: float) -> Candidate | None:
    usable = [each for each in candidates if each.caught]
    enough = [each for each in usable if (each.shortest_lead_s or 0.0) >= lead_s]
    return min(
        enough or usable,
        key=lambda each: (each.missed or 0, each.false_alarms, each.level, each.grace_s),
        default=None,
    )


# --- the stanza ------------------------------------------------------------------------------------------------------


def stanza(tuning: Tuning, config: Config) -> str:
    """The thresholds to paste, as YAML that is a valid configuration by itself.

    Signals without a proposal keep their configured thresholds, because evictionHard and evictionSoft replace all
    others."""
    hard: dict[Signal, str] = {}
    soft: dict[Signal, tuple[str, float]] = {}
    proposed = {each.signal: each for each in tuning.signals}
    for signal in Signal:
        if signal in CONTAINERFS_SIGNALS:
            continue  # they follow nodefs or imagefs
        found = proposed.get(signal)
        own = [each for each in config.thresholds if each.signal is signal]
        hard_now = next((each for each in own if each.hard), None)
        soft_now = next((each for each in own if not each.hard), None)
        if found is not None and found.hard is not None:
            hard[signal] = found.hard.value.text
        elif hard_now is not None:
            hard[signal] = hard_now.value.text
        if found is not None and found.soft is not None:
            soft[signal] = (found.soft.value.text, found.soft.grace_s)
        elif soft_now is not None and (found is None or found.hard is None):
            soft[signal] = (soft_now.value.text, soft_now.grace_period_s)
    lines = []
    if hard:
        lines += ["evictionHard:", *[f'  {signal.value}: "{text}"' for signal, text in hard.items()]]
    if soft:
        lines += ["evictionSoft:", *[f'  {signal.value}: "{text}"' for signal, (text, _) in soft.items()]]
        lines += [
            "evictionSoftGracePeriod:",
            *[f"  {signal.value}: {grace_s:g}s" for signal, (_, grace_s) in soft.items()],
        ]
    return "\n".join([f"apiVersion: {API_VERSION}", f"kind: {CONFIG_KIND}", *lines, ""])

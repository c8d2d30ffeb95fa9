"""Pass over calm samples: the state that a decision on each of them would leave, at a fraction of its cost.

Promises:

1. `leave()` returns the very state that `engine.decide` on each passed sample would have returned, bit for bit, except
   that back-offs and full buckets which time alone has ended may still be listed: the next decision drops them before
   it reads them.
2. A passed sample has no due threshold, changes no condition, and orders nothing. A sample of which that is not certain
   is not passed: the caller decides on it.

Theory of operation. A state is *settled* if time alone changes nothing in it: no threshold is met or in its grace, no
condition is True or waits to become unknown, no eviction is in flight, no pod terminates, and no reclaim action runs.
From a settled state, a sample can change the verdict only through its streams. For each stream the same test is made as
by the policy: is the value plausible and fresh, as before, and at or above every threshold of the stream. Then all
thresholds stay CLEAR (`thresholds.TRANSITIONS`), all conditions keep their stage, and what remains of a decision is the
last reading and the history of each stream (`trend.extend`), the sequence number, and the disk walks and kept samples
of the usage of pods (`usage_growth`). Of the samples only the last two count, so they are recorded when the calm ends.

For a threshold of `MemoryModel.LOWER` both machines are CLEAR if the lower figure is not below the value: what
`memory_shortage.counted` gives is never less than the lower figure. That needs one capacity for both figures.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from nodeagent.config import resolve
from nodeagent.config.schema import Config
from nodeagent.model import (
    MIN_SUSPEND_S,
    ConditionStatus,
    DiskLayout,
    MemoryModel,
    NodeSnapshot,
    Signal,
    Threshold,
)
from nodeagent.model.units import MAX_PLAUSIBLE
from nodeagent.policy import effective_thresholds, memory_shortage, pod_usage, stall, streams, trend, usage_growth
from nodeagent.policy.state import PolicyState
from nodeagent.policy.usage_growth import DiskWalk, GrowthState

_SHOWN: Final = (MemoryModel.LOWER, MemoryModel.WORKING_SET, MemoryModel.MEM_AVAILABLE)
"""As in `thresholds`: the stream of a signal that its verdict shows."""


class _Stream(NamedTuple):
    """One stream that a judgement reads."""

    name: str
    signal: Signal
    model: MemoryModel
    thresholds: tuple[Threshold, ...]
    """Those that read it."""
    kernel: bool
    """It is the kernel's figure beside the lower one: both need the same capacity."""


class CalmSamples:
    """A settled state while it passes over samples. Without `enter`, or after a sample that was not passed, it holds
    nothing."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._stale_after_s = config.sampling.stale_after_s
        self._streams: dict[DiskLayout, tuple[_Stream, ...]] = {}
        self._levels: dict[tuple[str, int], int] = {}
        self._state: PolicyState | None = None
        self._layout = DiskLayout.UNKNOWN
        self._at = 0.0
        self._suspended_s = 0.0
        self._passed = 0
        self._read_at: dict[str, float] = {}
        self._history: dict[str, trend.History] = {}
        self._growth_at: float | None = None
        self._kept: list[NodeSnapshot] = []
        """The last samples, at most `usage_growth.SAMPLES`, whose usage `usage_growth` would have recorded."""
        self._walks: Mapping[str, tuple[DiskWalk, ...]] = {}

    def enter(self, state: PolicyState, snapshot: NodeSnapshot) -> bool:
        """Start from the state that the decision on this sample returned. False: it is not settled."""
        self._state = None
        if self._config.local_storage_limits or not _settled(state):
            return False
        thresholds = state.thresholds
        needed = streams.fresh_samples(self._config)
        for name, good in thresholds.good_samples.items():
            unknown = name in thresholds.unknown_since
            if unknown is (name in thresholds.read_at) or (good < needed and not (unknown and good == 0)):
                return False
        self._state, self._layout, self._at = state, snapshot.layout, snapshot.taken_at
        self._suspended_s = state.suspended_s or 0.0
        self._passed = 0
        self._read_at = dict(thresholds.read_at)
        self._history = dict(thresholds.history)
        self._growth_at = state.growth.times[-1] if state.growth.times else None
        self._kept, self._walks = [], state.growth.walks
        return True

    def passes(self, snapshot: NodeSnapshot) -> bool:
        """Whether this sample is calm; if so, it is taken into the state. False leaves the state of the last one."""
        state, at = self._state, snapshot.taken_at
        if (
            state is None
            or not self._at < at
            or snapshot.layout is not self._layout
            or not abs(snapshot.suspended_s - self._suspended_s) < MIN_SUSPEND_S
        ):
            return False
        new = self._new_readings(snapshot)
        if new is None:
            return False
        walked = False
        for pod, usage in snapshot.pods:
            if pod.deletion_wall is not None and usage is not None:
                return False
            walked = walked or (usage is not None and usage.disk_usage_quality is not None)
        if walked or self._walks:
            self._walks = usage_growth.record_walks(self._walks, snapshot)
        for name, read_at, available in new:
            self._read_at[name] = read_at
            self._history[name] = trend.extend(self._history.get(name, ()), read_at=read_at, available=available)
        self._at = at
        self._passed += 1
        if self._growth_at is None or not 0 <= at - self._growth_at < usage_growth.SAMPLE_DISTANCE_S:
            self._growth_at = at
            self._kept = [*self._kept[1 - usage_growth.SAMPLES :], snapshot]
        return True

    def leave(self) -> PolicyState | None:
        """The state after the last passed sample; None if nothing was entered. The caller decides next."""
        state = self._state
        if state is None or not self._passed:
            return state
        thresholds = state.thresholds._replace(
            read_at=self._read_at, history={name: each for name, each in self._history.items() if each}
        )
        return state._replace(
            sequence=state.sequence + self._passed, thresholds=thresholds, growth=self._recorded(state.growth)
        )

    # --- the streams of a sample

    def _new_readings(self, snapshot: NodeSnapshot) -> list[tuple[str, float, int]] | None:
        """(stream, read at, available) of every stream with a new reading; None if the sample is not certainly calm."""
        now, stale_after_s, levels = snapshot.taken_at, self._stale_after_s, self._levels
        new: list[tuple[str, float, int]] = []
        lower_capacity: int | None = None
        for stream in self._streams_of(snapshot.layout):
            name, signal, model, thresholds, kernel = stream
            if model is MemoryModel.WORKING_SET:
                observation = snapshot.observations.get(signal)
                if observation is None:
                    return None
            else:
                observation = snapshot.observe(signal, model)
            _, available, capacity, read_at, *_ = observation
            before = self._read_at.get(name)
            if not (
                type(available) is int
                and type(capacity) is int
                and 0 <= available <= capacity <= MAX_PLAUSIBLE
                and capacity
                and -stall.CLOCK_SLACK_S <= now - read_at <= stale_after_s
            ):
                if streams.unusable(observation, now=now, stale_after_s=stale_after_s) and before is None:
                    continue  # unknown, as before
                return None
            if before is None or read_at < before:
                return None
            if thresholds:
                level = levels.get((name, capacity))
                if level is None:
                    level = levels[name, capacity] = _highest(thresholds, capacity)
                if available < level:
                    return None
            if kernel and capacity != lower_capacity:
                return None
            if model is MemoryModel.LOWER:
                lower_capacity = capacity
            if read_at > before:
                new.append((name, read_at, available))
        return new

    def _streams_of(self, layout: DiskLayout) -> tuple[_Stream, ...]:
        found = self._streams.get(layout)
        if found is None:
            thresholds = effective_thresholds.effective(self._config, layout)
            found = self._streams[layout] = tuple(
                [stream for signal in Signal for stream in _streams_of_signal(signal, thresholds)]
            )
        return found

    # --- the usage of pods

    def _recorded(self, growth: GrowthState) -> GrowthState:
        for snapshot in self._kept:
            rule = pod_usage.memory_rule(snapshot, config=self._config)
            growth = usage_growth.record_sample(growth, snapshot, memory_rule=rule)
        return growth._replace(walks=self._walks)


def _settled(state: PolicyState) -> bool:
    """Whether time alone changes nothing in the state."""
    return (
        state.suspended_s is not None
        and not state.thresholds.first_observed
        and not state.in_flight.entries
        and not state.in_flight.departing
        and not state.hooks.runs
        and not state.resizes.entries
        and not state.reclaims.tried
        and all(run.measured for run in state.reclaims.runs.values())
        and all(
            (each.status is ConditionStatus.FALSE and each.unknown_since is None)
            or (each.status is ConditionStatus.UNKNOWN and each.unknown_since is not None)
            for each in state.conditions.conditions.values()
        )
    )


def _highest(thresholds: tuple[Threshold, ...], capacity: int) -> int:
    """The level that a calm reading does not fall below; 0 if no threshold has a value for this capacity."""
    return max([resolve.resolve_threshold(each, capacity=capacity) or 0 for each in thresholds])


def _streams_of_signal(signal: Signal, effective: tuple[Threshold, ...]) -> list[_Stream]:
    """The streams that `thresholds.judge` reads for a signal, the lower figure before the kernel's."""
    own = [each for each in effective if each.signal is signal]
    both = [each for each in own if memory_shortage.uses_both(each)]
    models = {each.memory_model for each in own}
    shown = next((each for each in _SHOWN if each in models), MemoryModel.WORKING_SET)
    names: dict[str, _Stream] = {}
    for model in (*_SHOWN,):
        if model not in models and model is not shown and not (both and model is MemoryModel.MEM_AVAILABLE):
            continue
        name = effective_thresholds.stream_of(signal, model)
        readers = tuple([each for each in own if effective_thresholds.stream_name(each) == name])
        names.setdefault(name, _Stream(name, signal, model, readers, bool(both) and model is MemoryModel.MEM_AVAILABLE))
    return list(names.values())

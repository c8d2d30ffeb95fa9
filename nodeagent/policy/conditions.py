"""The status of the node's pressure conditions, damped so that they do not flap.

Theory of operation. Each condition (memory, disk, PID) is a small machine (`TRANSITIONS`), advanced at each judgement.
The guard `_event` gives PRESSURE if some threshold of the condition's signals is met (hard or soft, whether or not its
grace is over), and NO_SAMPLE if none of its signals is known. A change to True is never delayed; every other change is
HELD while something below applies. Unknown never raises a condition.

From the last pressure on, three holds keep a condition True:

    transition  `evictionPressureTransitionPeriod`; exactly the period releases (the kubelet's rule)
    jitter      up to `damping.jitter` of that period more, drawn at each raise from the seed: a fleet that came under
                pressure together does not recover together
    penalty     RFC 2439: each raise adds `damping.penalty`, which halves every `damping.halfLife`. Above
                `damping.suppressAbove` the condition is suppressed: held until the penalty is below
                `damping.releaseBelow`, for `damping.maxHold` at most

The transition limit, `damping.maxTransitionsPerHour`, holds by construction. Call a change to anything but True a
*release*. A release is only made while the last hour has at most (limit - 2) changes. After it there are at most
(limit - 1), and the only change that can come before the next release is one raise: at most the limit. Time only takes
changes out of the hour. The limit is at least 2.

With `ranking.order: kubelet` only the transition period holds, unknown signals count as not met, and the status is
exactly the kubelet's at every judgement (KUBELET-CONTRACT, one sync, steps 8 and 9).
"""

import enum
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.config.schema import Config, DampingConfig
from nodeagent.model import SIGNAL_TABLE, ConditionStatus, ConditionType, ConditionVerdict, SignalState, SignalVerdict
from nodeagent.model.machines import Machine
from nodeagent.policy import messages, thresholds

HOUR_S: Final = 3600.0

KUBELET_DAMPING: Final = DampingConfig(
    penalty=0.0,
    suppress_above=float("inf"),
    release_below=float("inf"),
    jitter=0.0,
    max_transitions_per_hour=1 << 31,
)
"""No damping but the transition period: the kubelet's timing, to the instant."""


class ConditionStage(enum.StrEnum):
    """A condition's status, or START before its first judgement."""

    START = "start"
    FALSE = ConditionStatus.FALSE.value
    UNKNOWN = ConditionStatus.UNKNOWN.value
    TRUE = ConditionStatus.TRUE.value


class ConditionEvent(enum.StrEnum):
    """What the signals of a condition show."""

    PRESSURE = "pressure"
    NO_PRESSURE = "no-pressure"
    NO_SAMPLE = "no-sample"
    HELD = "held"


_S, _E = ConditionStage, ConditionEvent

TRANSITIONS: Final[Mapping[tuple[ConditionStage, ConditionEvent], ConditionStage]] = {
    (_S.START, _E.PRESSURE): _S.TRUE,
    (_S.START, _E.NO_PRESSURE): _S.FALSE,
    (_S.START, _E.NO_SAMPLE): _S.UNKNOWN,
    (_S.START, _E.HELD): _S.START,
    (_S.FALSE, _E.PRESSURE): _S.TRUE,
    (_S.FALSE, _E.NO_PRESSURE): _S.FALSE,
    (_S.FALSE, _E.NO_SAMPLE): _S.UNKNOWN,
    (_S.FALSE, _E.HELD): _S.FALSE,
    (_S.UNKNOWN, _E.PRESSURE): _S.TRUE,
    (_S.UNKNOWN, _E.NO_PRESSURE): _S.FALSE,
    (_S.UNKNOWN, _E.NO_SAMPLE): _S.UNKNOWN,
    (_S.UNKNOWN, _E.HELD): _S.UNKNOWN,
    (_S.TRUE, _E.PRESSURE): _S.TRUE,
    (_S.TRUE, _E.NO_PRESSURE): _S.FALSE,
    (_S.TRUE, _E.NO_SAMPLE): _S.UNKNOWN,
    (_S.TRUE, _E.HELD): _S.TRUE,
}

MACHINE: Final[Machine[ConditionStage, ConditionEvent]] = Machine(
    "Conditions",
    "nodeagent/policy/conditions.py",
    ConditionStage,
    ConditionEvent,
    TRANSITIONS,
    meanings={
        _E.PRESSURE: "some threshold of its signals is met",
        _E.NO_PRESSURE: "at least one of its signals is known, none of its thresholds is met, and no hold is left",
        _E.NO_SAMPLE: "none of its signals is known for `sampling.staleAfter`, and no hold is left",
        _E.HELD: (
            "neither pressure nor a release: unknown for less than `sampling.staleAfter`, or held by the transition "
            "period, jitter, penalty, or the transition limit"
        ),
    },
    remarks={
        (_S.START, _E.NO_SAMPLE): "at once",
        (_S.START, _E.HELD): "does not happen: nothing holds a condition before its first judgement",
    },
)


class ConditionMemory(NamedTuple):
    """What one judgement of a condition leaves to the next."""

    status: ConditionStatus
    since: float
    """When the status last changed."""
    message: str
    """Of that change. Its numbers do not follow every sample: each change would be a write to the API."""
    last_seen: float | None = None
    """When pressure was last seen."""
    hard: bool = False
    """The message names a hard threshold already."""
    penalty: float = 0.0
    """As it was at `penalty_at`."""
    penalty_at: float = 0.0
    suppressed: bool = False
    raises: int = 0
    """How often it was raised: jitter is drawn each time."""
    unknown_since: float | None = None
    changes: tuple[float, ...] = ()
    """When the status changed within the last hour."""


class ConditionState(NamedTuple):
    """The memories by condition type."""

    conditions: Mapping[str, ConditionMemory] = {}
    seed: str = ""
    """The node name, from which jitter is drawn. Empty: the configured node name."""


def update(
    verdicts: Sequence[SignalVerdict], state: ConditionState, *, now: float, config: Config
) -> tuple[tuple[ConditionVerdict, ...], ConditionState]:
    """One verdict for each condition, in the order of `ConditionType`, and the state for the next time."""
    seed = state.seed or config.node_name
    after: dict[str, ConditionMemory] = {}
    results: list[ConditionVerdict] = []
    for condition in _CONDITIONS:
        relevant = [
            verdict
            for verdict in verdicts
            if verdict.thresholds and SIGNAL_TABLE[verdict.signal].condition is condition
        ]
        before = state.conditions.get(condition.value)
        reading = _Reading.of(relevant, exact=config.ranking.kubelet)
        memory = _advance(before, reading, now, config, f"{seed}/{condition.value}")
        after[condition.value] = memory
        results.append(
            ConditionVerdict(
                condition,
                memory.status,
                messages.CONDITION_REASONS[condition, memory.status],
                memory.message,
                memory.since,
            )
        )
    return tuple(results), ConditionState(after, state.seed)


_CONDITIONS: Final = tuple(ConditionType)


class _Reading(NamedTuple):
    """The signals of a condition at one judgement."""

    pressure: bool
    hard: bool
    known: bool
    verdicts: Sequence[SignalVerdict]

    @classmethod
    def of(cls, verdicts: Sequence[SignalVerdict], *, exact: bool) -> "_Reading":
        met = [each for verdict in verdicts for each in verdict.thresholds if each.met]
        known = exact or not verdicts or any(verdict.state is not SignalState.UNKNOWN for verdict in verdicts)
        return cls(bool(met), any(each.threshold.hard for each in met), known, verdicts)


def _advance(
    before: ConditionMemory | None, reading: _Reading, now: float, config: Config, seed: str
) -> ConditionMemory:
    """The memory after one judgement; only this function changes a status."""
    damping = KUBELET_DAMPING if config.ranking.kubelet else config.damping
    stage = ConditionStage.START if before is None else ConditionStage(before.status.value)
    start = ConditionMemory(ConditionStatus.UNKNOWN, now, "", penalty_at=now)
    memory = _refreshed(before or start, reading, now, damping)
    event = _event(stage, memory, reading, now, config, damping, seed)
    after = TRANSITIONS[stage, event]
    if after is stage:
        return _still_pressed(memory, reading, now) if event is ConditionEvent.PRESSURE else memory
    status = ConditionStatus(after.value)
    changed = memory._replace(
        status=status,
        since=now,
        message=messages.condition_message(status, reading.verdicts),
        hard=False,
        suppressed=False,
        changes=(*memory.changes, now),
    )
    if event is ConditionEvent.PRESSURE:
        return _raised(changed, reading, now, damping)
    return changed._replace(changes=()) if before is None else changed


def _event(
    stage: ConditionStage,
    memory: ConditionMemory,
    reading: _Reading,
    now: float,
    config: Config,
    damping: DampingConfig,
    seed: str,
) -> ConditionEvent:
    """Guard: what the signals show, and whether a release is held."""
    if reading.pressure:
        return ConditionEvent.PRESSURE
    release = ConditionEvent.NO_PRESSURE if reading.known else ConditionEvent.NO_SAMPLE
    if stage is ConditionStage.START:
        return release
    unknown_s = 0.0 if memory.unknown_since is None else thresholds.elapsed(memory.unknown_since, now)
    if not reading.known and unknown_s < config.sampling.stale_after_s:
        return ConditionEvent.HELD
    if stage is ConditionStage.TRUE and _is_held(memory, now, config, damping, seed):
        return ConditionEvent.HELD
    limit_reached = len(memory.changes) > max(2, damping.max_transitions_per_hour) - 2
    return ConditionEvent.HELD if limit_reached else release


def _refreshed(memory: ConditionMemory, reading: _Reading, now: float, damping: DampingConfig) -> ConditionMemory:
    """The memory at `now`: what time alone changes."""
    suppressed = memory.suppressed
    if suppressed and memory.last_seen is not None:
        expired = thresholds.elapsed(memory.last_seen, now) >= damping.max_hold_s
        suppressed = not expired and not decayed(memory, now=now, damping=damping) < damping.release_below
    unknown_since = now if memory.unknown_since is None else memory.unknown_since
    return memory._replace(
        suppressed=suppressed,
        unknown_since=None if reading.known or reading.pressure else unknown_since,
        changes=tuple(at for at in memory.changes if now - at < HOUR_S),
    )


def _still_pressed(memory: ConditionMemory, reading: _Reading, now: float) -> ConditionMemory:
    if reading.hard and not memory.hard:
        message = messages.condition_message(ConditionStatus.TRUE, reading.verdicts)
        memory = memory._replace(hard=True, message=message)
    return memory._replace(last_seen=now)


def _raised(memory: ConditionMemory, reading: _Reading, now: float, damping: DampingConfig) -> ConditionMemory:
    penalty = min(decayed(memory, now=now, damping=damping) + damping.penalty, _ceiling(damping))
    return memory._replace(
        last_seen=now,
        hard=reading.hard,
        penalty=penalty,
        penalty_at=now,
        suppressed=penalty > damping.suppress_above,
        raises=memory.raises + 1,
    )


def _is_held(memory: ConditionMemory, now: float, config: Config, damping: DampingConfig, seed: str) -> bool:
    """Whether the transition period, jitter or the penalty still keeps a condition True."""
    if memory.last_seen is None:
        return False
    period_s = config.eviction_pressure_transition_period_s
    hold_s = period_s * (1.0 + damping.jitter * _draw(f"{seed}/{memory.raises}"))
    return memory.suppressed or thresholds.elapsed(memory.last_seen, now) < hold_s


def decayed(memory: ConditionMemory, *, now: float, damping: DampingConfig) -> float:
    """The penalty now; it halves every half-life."""
    if damping.half_life_s <= 0.0:
        return 0.0
    return memory.penalty * math.pow(0.5, (max(0.0, now - memory.penalty_at) / damping.half_life_s))


def _ceiling(damping: DampingConfig) -> float:
    """The largest penalty. RFC 2439 keeps none that needs longer than the maximum hold to decay to `release_below`; but
    one raise above `suppress_above` must fit, or nothing would ever be suppressed."""
    if damping.half_life_s <= 0.0:
        return 0.0
    decays_in_time = damping.release_below * math.pow(2.0, min(damping.max_hold_s / damping.half_life_s, 64.0))
    return max(decays_in_time, damping.suppress_above + damping.penalty)


def _draw(text: str) -> float:
    """A pseudorandom number in [0, 1), the same for the same text."""
    # CRC-32 alone maps neighbouring names to neighbouring numbers; murmur3's finaliser spreads them.
    mixed = zlib.crc32(text.encode())
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = (mixed ^ (mixed >> shift)) * factor & 0xFFFFFFFF
    return mixed / 2.0**32

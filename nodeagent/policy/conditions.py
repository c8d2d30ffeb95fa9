"""What the node's pressure conditions say, and how they are kept from flapping.

Theory of operation
===================

Each condition (memory, disk, PID) is a machine of its own. Its input at each judgement is one of

    pressure    some threshold of its signals is met (hard or soft, whether or not its grace has run)
    no pressure at least one of its signals is known, and nothing is met
    unknown     none of its signals is known

and its status moves like this:

    from      input                       to        when
    --------  --------------------------  --------  ------------------------------------------------------------------
    (start)   pressure                    True      at once
    (start)   no pressure                 False     at once
    (start)   unknown                     Unknown   at once: nothing is claimed without a sample
    not True  pressure                    True      at once, always: no damping, no budget delays bad news
    True      no pressure                 False     every hold is over
    True      unknown                     True      while it has been unknown for less than `sampling.staleAfter`
    True      unknown                     Unknown   later than that, every hold over; unknown never raises a condition
    False     unknown                     Unknown   after `sampling.staleAfter`
    Unknown   no pressure                 False     at once

The last two wait for the budget below, if it is spent.

Four holds keep a condition True, counted from when pressure was last seen:

    transition  `evictionPressureTransitionPeriod`; exactly the period releases (the kubelet's rule)
    jitter      up to `damping.jitter` of that period more, drawn anew at each raise from the seed: a fleet that came
                under pressure together does not come back together
    penalty     RFC 2439: each raise adds `damping.penalty`, which halves every `damping.halfLife`. Raised above
                `damping.suppressAbove` the condition is suppressed: held until the penalty is below
                `damping.releaseBelow`, but for `damping.maxHold` at most
    budget      `damping.maxTransitionsPerHour`, whatever the input and whatever else is configured

The budget holds by construction. Call a change to anything but True a *release*. A release is only made while the last
hour has at most (limit - 2) changes. After it there are at most (limit - 1), and the only change that can come before
the next release is one raise: at most the limit. Time only takes changes out of the hour. The limit is at least 2.

With `ranking.order: kubelet` only the transition period holds, unknown signals count as none, and the status is
exactly the kubelet's at every judgement (KUBELET-CONTRACT, one sync, steps 8 and 9).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.config.schema import Config, DampingConfig
from nodeagent.model import SIGNAL_TABLE, ConditionStatus, ConditionType, ConditionVerdict, SignalState, SignalVerdict
from nodeagent.policy import messages
from nodeagent.policy.thresholds import elapsed

HOUR_S: Final = 3600.0

KUBELET_DAMPING: Final = DampingConfig(
    penalty=0.0,
    suppress_above=float("inf"),
    release_below=float("inf"),
    jitter=0.0,
    max_transitions_per_hour=1 << 31,
)
"""No damping but the transition period: the kubelet's timing, to the instant."""


class ConditionMemory(NamedTuple):
    """What is remembered of one condition."""

    status: ConditionStatus
    since: float
    """When the status last changed."""
    message: str
    """Of that change; numbers in it do not follow every sample, or each would be a write to the API."""
    last_seen: float | None = None
    """When pressure was last seen."""
    hard: bool = False
    """Whether the message already tells of a hard threshold."""
    penalty: float = 0.0
    """As it was at `penalty_at`."""
    penalty_at: float = 0.0
    suppressed: bool = False
    raises: int = 0
    """How often it was raised: jitter is drawn anew each time."""
    unknown_since: float | None = None
    changes: tuple[float, ...] = ()
    """When the status changed within the last hour."""


class ConditionState(NamedTuple):
    """What damping remembers. The keys are condition types."""

    conditions: Mapping[str, ConditionMemory] = {}
    seed: str = ""
    """What tells this node from others, for jitter: its name. Empty: the configured node name."""


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
        memory = _step(
            before, _Input.of(relevant, exact=config.ranking.kubelet), now, config, f"{seed}/{condition.value}"
        )
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


class _Input(NamedTuple):
    """What a condition's signals say at this judgement."""

    pressure: bool
    hard: bool
    known: bool
    verdicts: Sequence[SignalVerdict]

    @classmethod
    def of(cls, verdicts: Sequence[SignalVerdict], *, exact: bool) -> "_Input":
        met = [each for verdict in verdicts for each in verdict.thresholds if each.met]
        known = exact or not verdicts or any(verdict.state is not SignalState.UNKNOWN for verdict in verdicts)
        return cls(bool(met), any(each.threshold.hard for each in met), known, verdicts)


def _step(before: ConditionMemory | None, seen: _Input, now: float, config: Config, seed: str) -> ConditionMemory:
    """One row of the table above."""
    damping = KUBELET_DAMPING if config.ranking.kubelet else config.damping
    if before is None:
        first = ConditionStatus.FALSE if seen.known else ConditionStatus.UNKNOWN
        before = ConditionMemory(first, now, messages.condition_message(first, seen.verdicts), penalty_at=now)
        if not seen.pressure:
            return before._replace(unknown_since=None if seen.known else now)
    memory = _refreshed(before, seen, now, damping)
    if seen.pressure:
        return _pressed(memory, seen, now, damping)
    if seen.known and memory.status is ConditionStatus.FALSE:
        return memory
    target = ConditionStatus.FALSE
    if not seen.known:
        unknown_s = 0.0 if memory.unknown_since is None else elapsed(memory.unknown_since, now)
        if memory.status is ConditionStatus.UNKNOWN or unknown_s < config.sampling.stale_after_s:
            return memory
        target = ConditionStatus.UNKNOWN
    if memory.status is ConditionStatus.TRUE and _held(memory, now, config, damping, seed):
        return memory
    if len(memory.changes) > max(2, damping.max_transitions_per_hour) - 2:
        return memory
    return _changed(memory, target, seen, now)


def _refreshed(memory: ConditionMemory, seen: _Input, now: float, damping: DampingConfig) -> ConditionMemory:
    """The memory with what time alone does to it."""
    suppressed = memory.suppressed
    if suppressed and memory.last_seen is not None:
        rested = elapsed(memory.last_seen, now) >= damping.max_hold_s
        suppressed = not rested and not decayed(memory, now=now, damping=damping) < damping.release_below
    return memory._replace(
        suppressed=suppressed,
        unknown_since=None
        if seen.known or seen.pressure
        else now
        if memory.unknown_since is None
        else memory.unknown_since,
        changes=tuple(at for at in memory.changes if now - at < HOUR_S),
    )


def _pressed(memory: ConditionMemory, seen: _Input, now: float, damping: DampingConfig) -> ConditionMemory:
    if memory.status is ConditionStatus.TRUE:
        if seen.hard and not memory.hard:
            message = messages.condition_message(ConditionStatus.TRUE, seen.verdicts)
            memory = memory._replace(hard=True, message=message)
        return memory._replace(last_seen=now)
    penalty = min(decayed(memory, now=now, damping=damping) + damping.penalty, _ceiling(damping))
    return _changed(memory, ConditionStatus.TRUE, seen, now)._replace(
        last_seen=now,
        hard=seen.hard,
        penalty=penalty,
        penalty_at=now,
        suppressed=penalty > damping.suppress_above,
        raises=memory.raises + 1,
    )


def _changed(memory: ConditionMemory, status: ConditionStatus, seen: _Input, now: float) -> ConditionMemory:
    return memory._replace(
        status=status,
        since=now,
        message=messages.condition_message(status, seen.verdicts),
        hard=False,
        suppressed=False,
        changes=(*memory.changes, now),
    )


def _held(memory: ConditionMemory, now: float, config: Config, damping: DampingConfig, seed: str) -> bool:
    """Whether the transition period, jitter or the penalty still holds a True condition."""
    if memory.last_seen is None:
        return False
    period_s = config.eviction_pressure_transition_period_s
    hold_s = period_s * (1.0 + damping.jitter * _draw(f"{seed}/{memory.raises}"))
    return memory.suppressed or elapsed(memory.last_seen, now) < hold_s


def decayed(memory: ConditionMemory, *, now: float, damping: DampingConfig) -> float:
    """The penalty now; it halves every half-life."""
    if damping.half_life_s <= 0.0:
        return 0.0
    return memory.penalty * math.pow(0.5, (max(0.0, now - memory.penalty_at) / damping.half_life_s))


def _ceiling(damping: DampingConfig) -> float:
    """RFC 2439: no penalty is worth keeping that takes longer than the maximum hold to decay to where it releases; but
    one raise above `suppress_above` must fit below, or nothing would ever be suppressed."""
    if damping.half_life_s <= 0.0:
        return 0.0
    decays_in_time = damping.release_below * math.pow(2.0, min(damping.max_hold_s / damping.half_life_s, 64.0))
    return max(decays_in_time, damping.suppress_above + damping.penalty)


def _draw(text: str) -> float:
    """A number in [0, 1) that looks random and is the same for the same text."""
    import zlib  # not at the top: a report draws nothing

    # CRC-32 alone maps neighbouring names to neighbouring numbers; murmur3's finaliser spreads them.
    mixed = zlib.crc32(text.encode())
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = (mixed ^ (mixed >> shift)) * factor & 0xFFFFFFFF
    return mixed / 2.0**32

"""What is tried before pods are evicted: configured actions, one after another, and the kubelet's own.

Promises:

1. An action runs for a signal that it is meant for and can help, while something is missing, and not again before
   its `minInterval`. What is written down here before it starts holds across crashes.
2. An eviction waits for an action at most until the action's deadline, then for one sample that shows its gain, and
   for each action once while its threshold is met. The hard tier waits no longer when the resource would be gone before
   the deadline and within `MARGIN_S`.
3. What an action brought back is measured: by the first sample after its end.
4. While a soft threshold stays met an action may run again, after its `minInterval` and `REPEAT_S`, beside evictions.

Theory of operation. A `Run` is made when an action is ordered, and walks

    ordered -> ended        its outcome came, or its deadline and `LOST_S` passed without one (a restart)
    ended   -> measured     a sample newer than its end gave its gain

One action runs at a time, so that each gain is one action's. A run that another threshold started is waited for like an
own one. Which actions a threshold has waited for is forgotten when it is no longer met. Before them, in the soft tier,
stands the kubelet: its image garbage collection is given `waitForKubelet` from the moment a disk threshold is due.
"""

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from nodeagent.config.schema import Config, ReclaimAction, ReclaimKind
from nodeagent.model import (
    SIGNAL_TABLE,
    ConditionType,
    Deficit,
    DiskLayout,
    NodeSnapshot,
    Observation,
    ReclaimOrder,
    ReclaimOutcome,
    ReclaimReport,
    ReclaimResult,
    Refusal,
    RefusalCode,
    Signal,
    ThresholdVerdict,
    Tier,
    Trend,
    units,
)
from nodeagent.policy import effective_thresholds

LOST_S: Final = 5.0
"""How long after its deadline an outcome may come: ending a process group takes less than 1 s."""


MARGIN_S: Final = 15.0
"""How long an eviction may take to bring something back: the kubelet's slowest release that was measured took 12.9 s
(performance.md R1). The hard tier waits for nothing when there is not more time than this."""

REPEAT_S: Final = 60.0
"""Pause before an action runs again while its soft threshold is still met: time in which other actions have their
turn, and the longest that an action without `minInterval` leaves unused what has become removable meanwhile."""

UNMEASURED_S: Final = 60.0
"""How long after its end a run is kept open for a sample of its signal: no other action runs before. Twice
`sampling.staleAfter`: a signal that is unknown for longer gives no gain that is the action's."""

_NODEFS: Final = frozenset({Signal.NODEFS, Signal.NODEFS_INODES})
_IMAGEFS: Final = frozenset({Signal.IMAGEFS, Signal.IMAGEFS_INODES})
_ALL: Final = frozenset(Signal)
IN_VAIN: Final[Mapping[tuple[ReclaimKind, DiskLayout], frozenset[Signal]]] = {
    (ReclaimKind.IMAGES, DiskLayout.DEDICATED_IMAGEFS): _NODEFS,
    (ReclaimKind.IMAGES, DiskLayout.SPLIT): _ALL - _IMAGEFS,
    (ReclaimKind.CONTAINER_LOGS, DiskLayout.DEDICATED_IMAGEFS): _ALL - _NODEFS,
    (ReclaimKind.CONTAINER_LOGS, DiskLayout.SPLIT): _IMAGEFS,
}
"""Signals of file systems that have no images, or no logs (KUBELET-CONTRACT 4). What commands clean nobody knows."""


class ReclaimRun(NamedTuple):
    """The last run of one action."""

    plan_id: str
    signal: Signal
    started_at: float
    until: float
    available: int
    """What the decision's sample had of the signal."""
    awaited_by: tuple[str, ...] = ()
    """Identities of the thresholds whose evictions wait for it."""
    ended_at: float | None = None
    result: ReclaimResult = ReclaimResult.FAILED
    measured: bool = False


class ReclaimState(NamedTuple):
    runs: Mapping[str, ReclaimRun] = {}
    """By name of the action."""
    tried: Mapping[str, tuple[str, ...]] = {}
    """By identity of a threshold: the actions that its evictions have waited for since it is met."""


class ReclaimAttempt(NamedTuple):
    """What is tried now."""

    state: ReclaimState
    orders: tuple[ReclaimOrder, ...] = ()
    waits: Refusal | None = None
    """Why evictions wait; None: they do not."""


class ReclaimObserved(NamedTuple):
    state: ReclaimState
    reports: tuple[ReclaimReport, ...]


def advance(state: ReclaimState, snapshot: NodeSnapshot, *, met: Collection[str], now: float) -> ReclaimObserved:
    """Bring the runs up to date: those whose outcome was lost have ended, those that have ended are measured. `met` are
    the identities of the thresholds that are met, or were when their signal was last known."""
    if not all(key in met for key in state.tried):
        state = state._replace(tried={key: names for key, names in state.tried.items() if key in met})
    if all(run.measured for run in state.runs.values()):
        return ReclaimObserved(state, ())
    runs: dict[str, ReclaimRun] = {}
    reports = []
    for name, before in state.runs.items():
        run = before
        if run.ended_at is None and not run.started_at <= now <= run.until + LOST_S:
            run = run._replace(ended_at=min(now, run.until), result=ReclaimResult.TIMED_OUT)
        seen = snapshot.observe(run.signal)
        if not run.measured and run.ended_at is not None and seen.available is not None and seen.read_at > run.ended_at:
            run = run._replace(measured=True)
            took_s = max(0.0, before.ended_at - run.started_at) if before.ended_at is not None else now - run.started_at
            reports.append(
                ReclaimReport(run.plan_id, name, run.signal, run.result, seen.available - run.available, took_s)
            )
        elif run.ended_at is not None and now - run.ended_at > UNMEASURED_S:
            run = run._replace(measured=True)
        runs[name] = run
    return ReclaimObserved(state._replace(runs=runs), tuple(reports))


def after_suspend(state: ReclaimState, slept_s: float) -> ReclaimState:
    """The runs after so long a sleep of the machine: those under way have their time yet."""
    runs = {
        name: run._replace(until=run.until + slept_s) if run.ended_at is None else run
        for name, run in state.runs.items()
    }
    return state._replace(runs=runs)


def apply_outcome(state: ReclaimState, outcome: ReclaimOutcome) -> ReclaimState:
    """Take in how an action ended. One that belongs to no run under way changes nothing."""
    run = state.runs.get(outcome.name)
    if run is None or run.plan_id != outcome.plan_id or run.ended_at is not None:
        return state
    ended = run._replace(ended_at=outcome.at, result=outcome.result)
    return state._replace(runs={**state.runs, outcome.name: ended})


def attempt(
    state: ReclaimState,
    verdict: ThresholdVerdict,
    observation: Observation,
    deficit: Deficit,
    *,
    layout: DiskLayout,
    trend: Trend | None,
    plan_id: str,
    now: float,
    config: Config,
) -> ReclaimAttempt:
    """What is tried for this threshold before anybody is evicted. `deficit` is above 0."""
    tier = Tier.HARD if verdict.threshold.hard else Tier.SOFT
    if (kubelet := _kubelets_turn(verdict, tier, now=now, config=config)) is not None:
        return ReclaimAttempt(state, (), kubelet)
    mine = [action for action in config.reclaim.actions if _may_help(action, deficit.signal, layout)]
    key = effective_thresholds.identity(verdict.threshold)
    for action in mine:
        run = state.runs.get(action.name)
        if run is None or run.measured:
            continue
        if action.name not in state.tried.get(key, ()):
            run = run._replace(awaited_by=(*run.awaited_by, key))
            state = _with_run(state, action, run, key)
        if key in run.awaited_by and (run.ended_at is None or observation.read_at <= run.ended_at):
            return ReclaimAttempt(state, (), _waiting(action, run, tier, trend, now=now))
    if not all(run.measured for run in state.runs.values()):
        return ReclaimAttempt(state)  # one that runs for another signal: the next look may have room
    tried = state.tried.get(key, ())
    for action in mine:
        if action.name not in tried and _rested(action, state.runs.get(action.name), now=now):
            started, order = _start(action, observation, deficit, tier, plan_id=plan_id, now=now)
            started = started._replace(awaited_by=(key,))
            waits = _waiting(action, started, tier, trend, now=now)
            return ReclaimAttempt(_with_run(state, action, started, key), (order,), waits)
    if tier is Tier.SOFT:
        again = [action for action in mine if action.name in tried and _may_repeat(action, state, now=now)]
        if again:
            longest_ago = min(again, key=lambda action: state.runs[action.name].started_at)
            started, order = _start(longest_ago, observation, deficit, tier, plan_id=plan_id, now=now)
            return ReclaimAttempt(_with_run(state, longest_ago, started), (order,))
    return ReclaimAttempt(state)


def _start(
    action: ReclaimAction, observation: Observation, deficit: Deficit, tier: Tier, *, plan_id: str, now: float
) -> tuple[ReclaimRun, ReclaimOrder]:
    available, until = observation.available or 0, now + action.timeout_s
    return (
        ReclaimRun(plan_id, deficit.signal, now, until, available),
        ReclaimOrder(action.name, deficit.signal, tier, deficit.amount, available, until),
    )


def _with_run(state: ReclaimState, action: ReclaimAction, run: ReclaimRun, tried_by: str = "") -> ReclaimState:
    """The state with this run, which the threshold `tried_by`, if any, waits for."""
    tried = state.tried
    if tried_by:
        tried = {**tried, tried_by: (*tried.get(tried_by, ()), action.name)}
    return ReclaimState({**state.runs, action.name: run}, tried)


def _rested(action: ReclaimAction, last: ReclaimRun | None, *, now: float) -> bool:
    """Whether its `minInterval` is over. A start in the future is none: the clock began anew."""
    return last is None or not 0 <= now - last.started_at < action.min_interval_s


def _may_repeat(action: ReclaimAction, state: ReclaimState, *, now: float) -> bool:
    last = state.runs.get(action.name)
    if last is None or last.ended_at is None:
        return False
    return _rested(action, last, now=now) and not 0 <= now - last.ended_at < REPEAT_S


def _may_help(action: ReclaimAction, signal: Signal, layout: DiskLayout) -> bool:
    return signal in action.signals and signal not in IN_VAIN.get((action.kind, layout), ())


def _kubelets_turn(verdict: ThresholdVerdict, tier: Tier, *, now: float, config: Config) -> Refusal | None:
    """Soft tier, disks: why the kubelet's own image garbage collection is waited for."""
    wait_s, threshold = config.reclaim.wait_for_kubelet_s, verdict.threshold
    disk = SIGNAL_TABLE[threshold.signal].condition is ConditionType.DISK_PRESSURE
    if tier is Tier.HARD or not disk or config.ranking.kubelet or verdict.active_since is None:
        return None
    left_s = verdict.active_since + threshold.grace_period_s + wait_s - now
    if not 0 < left_s <= wait_s:
        return None
    return Refusal(
        RefusalCode.WAITS_FOR_KUBELET,
        f"{threshold.signal.value}: the kubelet's own image garbage collection has {left_s:.0f}s more",
    )


def _waiting(action: ReclaimAction, run: ReclaimRun, tier: Tier, trend: Trend | None, *, now: float) -> Refusal | None:
    """Why evictions wait for this run; None when there is no time for that."""
    left_s = max(0.0, run.until - now)
    exhausted_s = trend.to_exhaustion_s if trend is not None else None
    if tier is Tier.HARD and exhausted_s is not None and exhausted_s <= min(left_s, MARGIN_S):
        return None
    return Refusal(
        RefusalCode.WAITS_FOR_RECLAIM,
        f"{run.signal.value}: {action.name} is tried before evicting, for at most {left_s:.0f}s more",
    )


def describe(report: ReclaimReport, actions: Collection[ReclaimAction] = ()) -> str:
    """A report in words, with a warning where the action ran as long as its `minInterval`."""
    gained = units.format_amount(report.gained, SIGNAL_TABLE[report.signal].unit)
    text = f"{report.plan_id}: {report.name} ({report.result}) took {report.took_s:.1f}s and brought back {gained}"
    too_short = [each for each in actions if each.name == report.name and 0 < each.min_interval_s <= report.took_s]
    if not too_short:
        return text
    return f"{text}; its minInterval of {too_short[0].min_interval_s:g}s is no longer than that"

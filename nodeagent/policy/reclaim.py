"""What is tried before pods are evicted: configured actions, one after another, and the kubelet's own.

Promises:

1. An action runs for a signal that it is meant for and can help, while something is missing, and not again before
   its `minInterval`. What is written down here before it starts holds across crashes.
2. An eviction waits for an action at most until the action's deadline, then for one sample that shows its gain. The
   hard tier waits for each action once in one pressure, and no longer when the resource would be gone before the
   deadline and within `MARGIN_S`.
3. What an action brought back is measured: by the first sample after its end.

Theory of operation. A `Run` is made when an action is ordered, and walks

    ordered -> ended        its outcome came, or its deadline and `LOST_S` passed without one (a restart)
    ended   -> measured     a sample newer than its end gave its gain

One action runs at a time, so that each gain is one action's. Before them, in the soft tier, stands the kubelet: its
image garbage collection is given `waitForKubelet` from the moment a disk threshold is due.
"""

from collections.abc import Mapping

from nodeagent.config.schema import Config, ReclaimAction, ReclaimKind
from nodeagent.lean import Final, NamedTuple
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
    Signal,
    ThresholdVerdict,
    Tier,
    Trend,
)
from nodeagent.policy.figures import figure

LOST_S: Final = 5.0
"""How long after its deadline an outcome may come: ending a process group takes less than 1 s."""


MARGIN_S: Final = 15.0
"""How long an eviction may take to bring something back: the kubelet's slowest release that was measured took 12.9 s
(MEASURED 1). The hard tier waits for nothing when there is not more time than this."""

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


class Run(NamedTuple):
    """The last run of one action."""

    plan_id: str
    signal: Signal
    started_at: float
    until: float
    available: int
    """What the decision's sample had of the signal."""
    pressure_since: float
    """When the threshold was first met: the name of this pressure."""
    ended_at: float | None = None
    result: ReclaimResult = ReclaimResult.FAILED
    measured: bool = False


class ReclaimState(NamedTuple):
    runs: Mapping[str, Run] = {}
    """By name of the action."""


class Tried(NamedTuple):
    """What is tried now."""

    state: ReclaimState
    orders: tuple[ReclaimOrder, ...] = ()
    waits: Refusal | None = None
    """Why evictions wait; None: they do not."""


class Seen(NamedTuple):
    state: ReclaimState
    reports: tuple[ReclaimReport, ...]


def observe(state: ReclaimState, snapshot: NodeSnapshot, *, now: float) -> Seen:
    """Bring the runs up to date: those whose outcome was lost have ended, those that have ended are measured."""
    if all(run.measured for run in state.runs.values()):
        return Seen(state, ())
    runs: dict[str, Run] = {}
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
        runs[name] = run
    return Seen(ReclaimState(runs), tuple(reports))


def slept(state: ReclaimState, slept_s: float) -> ReclaimState:
    """The runs after so long a sleep of the machine: those under way have their time yet."""
    runs = {
        name: run._replace(until=run.until + slept_s) if run.ended_at is None else run
        for name, run in state.runs.items()
    }
    return ReclaimState(runs)


def settle(state: ReclaimState, outcome: ReclaimOutcome) -> ReclaimState:
    """Take in how an action ended. One that belongs to no run under way changes nothing."""
    run = state.runs.get(outcome.name)
    if run is None or run.plan_id != outcome.plan_id or run.ended_at is not None:
        return state
    ended = run._replace(ended_at=outcome.at, result=outcome.result)
    return ReclaimState({**state.runs, outcome.name: ended})


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
) -> Tried:
    """What is tried for this threshold before anybody is evicted. `deficit` is above 0."""
    tier = Tier.HARD if verdict.threshold.hard else Tier.SOFT
    if (kubelet := _kubelets_turn(verdict, tier, now=now, config=config)) is not None:
        return Tried(state, (), kubelet)
    mine = [action for action in config.reclaim.actions if _may_help(action, deficit.signal, layout)]
    known = [(action, state.runs[action.name]) for action in mine if action.name in state.runs]
    for action, run in known:
        if not run.measured:
            return Tried(state, (), _waiting(action, run, tier, trend, now=now))
    since = verdict.active_since if verdict.active_since is not None else now
    for action in mine:
        last = state.runs.get(action.name)
        if last is not None and 0 <= now - last.started_at < action.min_interval_s:
            continue
        if last is not None and tier is Tier.HARD and last.pressure_since == since:
            continue
        if any(not other.measured for other in state.runs.values()):
            break  # one that runs for another signal: the next look may have room
        run = Run(plan_id, deficit.signal, now, now + action.timeout_s, observation.available or 0, since)
        order = ReclaimOrder(action.name, deficit.signal, tier, deficit.amount, observation.available or 0, run.until)
        after = ReclaimState({**state.runs, action.name: run})
        return Tried(after, (order,), _waiting(action, run, tier, trend, now=now))
    return Tried(state)


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
        "waits-for-kubelet",
        f"{threshold.signal.value}: the kubelet's own image garbage collection has {left_s:.0f}s more",
    )


def _waiting(action: ReclaimAction, run: Run, tier: Tier, trend: Trend | None, *, now: float) -> Refusal | None:
    """Why evictions wait for this run; None when there is no time for that."""
    left_s = max(0.0, run.until - now)
    exhausted_s = trend.to_exhaustion_s if trend is not None else None
    if tier is Tier.HARD and exhausted_s is not None and exhausted_s <= min(left_s, MARGIN_S):
        return None
    return Refusal(
        "reclaiming", f"{run.signal.value}: {action.name} is tried before evicting, for at most {left_s:.0f}s more"
    )


def told(report: ReclaimReport) -> str:
    """A report in words."""
    gained = figure(report.gained, SIGNAL_TABLE[report.signal].unit)
    return f"{report.plan_id}: {report.name} ({report.result}) took {report.took_s:.1f}s and brought back {gained}"

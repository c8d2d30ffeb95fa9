"""Reclaim before evictions: page cache, then configured actions, and the kubelet's own image garbage collection.

Promises:

1. An action runs only for its configured signals, only where it has an effect, only while there is a deficit, and not
   again before its `minInterval`. The state has the run before it starts, so this holds across crashes.
2. An eviction waits for an action at most until the action's deadline, then for one sample that shows its gain, and for
   each action once while its threshold is met. The hard tier stops waiting if the resource would be exhausted before
   the deadline and within `MARGIN_S`.
3. The gain of an action is measured by the first sample after its end.
4. While a soft threshold stays met, an action may run again, after its `minInterval` and `RECLAIM_REPEAT_S`, beside
   evictions.

Theory of operation. A `ReclaimRun` is added when an action is ordered. It ends with its outcome, or when its deadline
and `LOST_S` have passed without one (a restart). It is measured by the first sample after its end. One action runs at a
time, so that each gain belongs to one action; a run that another threshold started is waited for too. Page cache and
actions for disks or PIDs do not exclude each other, because neither changes the other's signal. The record of
waited-for actions ends when the threshold is no longer met. In the soft tier the kubelet comes first: its image garbage
collection gets `waitForKubelet` from the time when a disk threshold is due.
"""

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from nodeagent.config.schema import Config, ReclaimAction, ReclaimKind
from nodeagent.model import (
    IMAGEFS_SIGNALS,
    MEMORY_SIGNALS,
    SIGNAL_TABLE,
    ConditionType,
    Deficit,
    DiskLayout,
    MemoryModel,
    NodeSnapshot,
    Observation,
    ReclaimOrder,
    ReclaimOutcome,
    ReclaimReport,
    ReclaimResult,
    ReclaimTarget,
    Refusal,
    RefusalCode,
    Signal,
    SignalVerdict,
    ThresholdVerdict,
    Tier,
    Trend,
    units,
)
from nodeagent.policy import effective_thresholds, page_cache, preconditions

LOST_S: Final = 5.0
"""How long after its deadline an outcome may come: killing a process group takes less than 1 s."""

MARGIN_S: Final = 15.0
"""How long an eviction may take to bring something back: the kubelet's slowest release that was measured took 12.9 s
(performance.md R1). The hard tier waits for nothing when there is not more time than this."""

RECLAIM_REPEAT_S: Final = 60.0
"""Pause before an action runs again while its soft threshold is still met. Longer leaves removable data in place,
shorter keeps other actions from running."""

UNMEASURED_S: Final = 60.0
"""How long after its end a run waits for a sample of its signal; no other action runs meanwhile. Twice
`sampling.staleAfter`: after a longer unknown the change is not the action's gain."""

_NODEFS: Final = frozenset({Signal.NODEFS, Signal.NODEFS_INODES})
_ALL: Final = frozenset(Signal)
NO_EFFECT: Final[Mapping[tuple[ReclaimKind, DiskLayout], frozenset[Signal]]] = {
    (ReclaimKind.IMAGES, DiskLayout.DEDICATED_IMAGEFS): _NODEFS,
    (ReclaimKind.IMAGES, DiskLayout.SPLIT): _ALL.difference(IMAGEFS_SIGNALS),
    (ReclaimKind.CONTAINER_LOGS, DiskLayout.DEDICATED_IMAGEFS): _ALL - _NODEFS,
    (ReclaimKind.CONTAINER_LOGS, DiskLayout.SPLIT): frozenset(IMAGEFS_SIGNALS),
    **{(ReclaimKind.PAGE_CACHE, layout): _ALL - MEMORY_SIGNALS for layout in DiskLayout},
}
"""Signals of file systems without images, or without logs (KUBELET-CONTRACT 4), and what is no memory. The effect of
commands is unknown."""


class ReclaimRun(NamedTuple):
    """The last run of one action."""

    plan_id: str
    signal: Signal
    started_at: float
    until: float
    available: int
    """The signal in the decision's sample, by this memory model."""
    memory_model: MemoryModel = MemoryModel.WORKING_SET
    awaited_by: tuple[str, ...] = ()
    """Identities of the thresholds whose evictions wait for it."""
    ended_at: float | None = None
    result: ReclaimResult = ReclaimResult.FAILED
    measured: bool = False
    message: str = ""


class ReclaimState(NamedTuple):
    runs: Mapping[str, ReclaimRun] = {}
    """By name of the action."""
    tried: Mapping[str, tuple[str, ...]] = {}
    """By identity of a threshold: the actions that its evictions waited for since it is met."""


class ReclaimAttempt(NamedTuple):
    """What reclaim does for one threshold now."""

    state: ReclaimState
    orders: tuple[ReclaimOrder, ...] = ()
    waits: Refusal | None = None
    """Why evictions wait; None: they do not wait."""


class ReclaimObserved(NamedTuple):
    state: ReclaimState
    reports: tuple[ReclaimReport, ...]


def advance(state: ReclaimState, snapshot: NodeSnapshot, *, met: Collection[str], now: float) -> ReclaimObserved:
    """The state after a snapshot: runs whose outcome was lost are ended, ended runs are measured. `met` are the
    identities of the thresholds that are met, or were when their signal was last known."""
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
        observation = snapshot.observe(run.signal, run.memory_model)
        if (
            not run.measured
            and run.ended_at is not None
            and observation.available is not None
            and observation.read_at > run.ended_at
        ):
            run = run._replace(measured=True)
            took_s = max(0.0, before.ended_at - run.started_at) if before.ended_at is not None else now - run.started_at
            reports.append(
                ReclaimReport(
                    run.plan_id,
                    name,
                    run.signal,
                    run.result,
                    observation.available - run.available,
                    took_s,
                    run.message,
                )
            )
        elif run.ended_at is not None and now - run.ended_at > UNMEASURED_S:
            run = run._replace(measured=True)
        runs[name] = run
    return ReclaimObserved(state._replace(runs=runs), tuple(reports))


def without_dry_runs(state: ReclaimState) -> ReclaimState:
    """The state without the actions that a dry run did not run; evictions wait for them as if they were new."""
    dry = {name for name, run in state.runs.items() if run.result is ReclaimResult.DRY_RUN}
    return ReclaimState(
        runs={name: run for name, run in state.runs.items() if name not in dry},
        tried={key: tuple([name for name in names if name not in dry]) for key, names in state.tried.items()},
    )


def after_suspend(state: ReclaimState, slept_s: float) -> ReclaimState:
    """The state after a suspend of the machine: runs that have not ended keep their remaining time."""
    runs = {
        name: run._replace(until=run.until + slept_s) if run.ended_at is None else run
        for name, run in state.runs.items()
    }
    return state._replace(runs=runs)


def apply_outcome(state: ReclaimState, outcome: ReclaimOutcome) -> ReclaimState:
    """The state after the end of an action. An outcome without a running action changes nothing."""
    run = state.runs.get(outcome.name)
    if run is None or run.plan_id != outcome.plan_id or run.ended_at is not None:
        return state
    ended = run._replace(ended_at=outcome.at, result=outcome.result, message=outcome.message)
    return state._replace(runs={**state.runs, outcome.name: ended})


def attempt(
    state: ReclaimState,
    verdict: ThresholdVerdict,
    observation: Observation,
    deficit: Deficit,
    *,
    snapshot: NodeSnapshot,
    trend: Trend | None,
    plan_id: str,
    now: float,
    config: Config,
) -> ReclaimAttempt:
    """What runs for this threshold before an eviction. `deficit` is above 0."""
    tier = page_cache.tier(verdict.threshold)
    if (kubelet := _wait_for_kubelet(verdict, tier, now=now, config=config)) is not None:
        return ReclaimAttempt(state, (), kubelet)
    applicable = _applicable(state, verdict, snapshot, config=config)
    key = effective_thresholds.identity(verdict.threshold)
    for action in applicable:
        run = state.runs.get(action.name)
        if run is None or run.measured:
            continue
        if action.name not in state.tried.get(key, ()):
            run = run._replace(awaited_by=(*run.awaited_by, key))
            state = _with_run(state, action, run, key)
        if key in run.awaited_by and (run.ended_at is None or observation.read_at <= run.ended_at):
            return ReclaimAttempt(state, (), _wait_for_run(action, run, tier, trend, now=now))
    if _busy(state, deficit.signal):
        return ReclaimAttempt(state)  # a run for another signal comes first
    tried = state.tried.get(key, ())
    for action in applicable:
        if action.name not in tried and _interval_over(action, state.runs.get(action.name), now=now):
            if action.kind is ReclaimKind.PAGE_CACHE:
                started, order = _start_page_cache(action, verdict, snapshot, plan_id=plan_id, now=now, config=config)
            else:
                started, order = _start(action, observation, deficit, tier, plan_id=plan_id, now=now)
                started = started._replace(memory_model=verdict.threshold.memory_model)
            started = started._replace(awaited_by=(key,))
            waits = _wait_for_run(action, started, tier, trend, now=now)
            return ReclaimAttempt(_with_run(state, action, started, key), (order,), waits)
    if tier is Tier.SOFT:
        again = [action for action in applicable if action.name in tried and _may_repeat(action, state, now=now)]
        again = [action for action in again if action.kind is not ReclaimKind.PAGE_CACHE]
        if again:
            longest_ago = min(again, key=lambda action: state.runs[action.name].started_at)
            started, order = _start(longest_ago, observation, deficit, tier, plan_id=plan_id, now=now)
            started = started._replace(memory_model=verdict.threshold.memory_model)
            return ReclaimAttempt(_with_run(state, longest_ago, started), (order,))
    return ReclaimAttempt(state)


def attempt_page_cache(
    state: ReclaimState,
    judged: Collection[SignalVerdict],
    snapshot: NodeSnapshot,
    *,
    good_samples: Mapping[str, int],
    plan_id: str,
    now: float,
    config: Config,
) -> ReclaimAttempt:
    """Reclaim of page cache for memory thresholds that are met by page cache alone. No eviction waits for it.
    `good_samples`: see `ThresholdState`."""
    last = state.runs.get(page_cache.ACTION.name)
    met = [
        verdict
        for signal in judged
        for verdict in signal.thresholds
        if good_samples.get(effective_thresholds.stream_name(verdict.threshold), 0) >= config.startup.fresh_samples
        and page_cache.page_cache_only(snapshot, verdict)
    ]
    hard = any(verdict.threshold.hard for verdict in met)
    action = page_cache.action(last.result if last is not None else None, config=config, hard=hard)
    if not met or action is None or _busy(state, Signal.MEMORY) or not _interval_over(action, last, now=now):
        return ReclaimAttempt(state)
    if preconditions.snapshot_too_old(snapshot, now=now, config=config) or not page_cache.targets(
        snapshot, config=config
    ):
        return ReclaimAttempt(state)
    highest = max(met, key=lambda verdict: verdict.value or 0)
    run, order = _start_page_cache(action, highest, snapshot, plan_id=plan_id, now=now, config=config)
    return ReclaimAttempt(_with_run(state, action, run), (order,))


def _applicable(
    state: ReclaimState, verdict: ThresholdVerdict, snapshot: NodeSnapshot, *, config: Config
) -> list[ReclaimAction]:
    """The actions for this threshold, in their order. The hard tier does not wait for page cache."""
    signal = verdict.threshold.signal
    configured = [action for action in config.reclaim.actions if has_effect(action, signal, snapshot.layout)]
    last = state.runs.get(page_cache.ACTION.name)
    built_in = page_cache.action(last.result if last is not None else None, config=config)
    if built_in is None or verdict.threshold.hard:
        return configured
    running = last is not None and not last.measured
    if page_cache.before_soft_eviction(snapshot, verdict.threshold) and (
        running or page_cache.targets(snapshot, config=config)
    ):
        return [built_in, *configured]
    return configured


def _busy(state: ReclaimState, signal: Signal) -> bool:
    """True while a run is not measured whose gain could not be told from that of an action for this signal."""
    memory = signal in MEMORY_SIGNALS
    return any(not run.measured and (run.signal in MEMORY_SIGNALS) is memory for run in state.runs.values())


def _start_page_cache(
    action: ReclaimAction,
    verdict: ThresholdVerdict,
    snapshot: NodeSnapshot,
    *,
    plan_id: str,
    now: float,
    config: Config,
) -> tuple[ReclaimRun, ReclaimOrder]:
    threshold = verdict.threshold
    observation = page_cache.by_working_set(snapshot, threshold.signal)
    level = page_cache.level(threshold, verdict.value or 0, capacity=observation.capacity)
    deficit = Deficit(threshold.signal, max(0, level - (observation.available or 0)), 0)
    run, order = _start(action, observation, deficit, page_cache.tier(threshold), plan_id=plan_id, now=now)
    targets: tuple[ReclaimTarget, ...] = page_cache.targets(snapshot, config=config)
    return run, order._replace(level=level, targets=targets)


def _start(
    action: ReclaimAction, observation: Observation, deficit: Deficit, tier: Tier, *, plan_id: str, now: float
) -> tuple[ReclaimRun, ReclaimOrder]:
    available, until = observation.available or 0, now + action.timeout_s
    return (
        ReclaimRun(plan_id, deficit.signal, now, until, available),
        ReclaimOrder(action.name, deficit.signal, tier, deficit.amount, available, until),
    )


def _with_run(state: ReclaimState, action: ReclaimAction, run: ReclaimRun, tried_by: str = "") -> ReclaimState:
    """The state with this run, which the threshold `tried_by` (if any) waits for."""
    tried = state.tried
    if tried_by:
        tried = {**tried, tried_by: (*tried.get(tried_by, ()), action.name)}
    return ReclaimState({**state.runs, action.name: run}, tried)


def _interval_over(action: ReclaimAction, last: ReclaimRun | None, *, now: float) -> bool:
    """Whether its `minInterval` is over. A start in the future is another boot's."""
    return last is None or not 0 <= now - last.started_at < action.min_interval_s


def _may_repeat(action: ReclaimAction, state: ReclaimState, *, now: float) -> bool:
    last = state.runs.get(action.name)
    if last is None or last.ended_at is None:
        return False
    return _interval_over(action, last, now=now) and not 0 <= now - last.ended_at < RECLAIM_REPEAT_S


def has_effect(action: ReclaimAction, signal: Signal, layout: DiskLayout) -> bool:
    """Whether the action may free something of this signal."""
    return signal in action.signals and signal not in NO_EFFECT.get((action.kind, layout), ())


def _wait_for_kubelet(verdict: ThresholdVerdict, tier: Tier, *, now: float, config: Config) -> Refusal | None:
    """Soft tier, disks: why evictions wait for the kubelet's own image garbage collection."""
    wait_s, threshold = config.reclaim.wait_for_kubelet_s, verdict.threshold
    disk = SIGNAL_TABLE[threshold.signal].condition is ConditionType.DISK_PRESSURE
    if tier is Tier.HARD or not disk or config.ranking.kubelet or verdict.active_since is None:
        return None
    left_s = verdict.active_since + threshold.grace_period_s + wait_s - now
    if not 0 < left_s <= wait_s:
        return None
    return Refusal(
        RefusalCode.WAITS_FOR_KUBELET,
        f"{threshold.signal.value}: waiting up to {left_s:.0f}s for the kubelet's image garbage collection",
    )


def _wait_for_run(
    action: ReclaimAction, run: ReclaimRun, tier: Tier, trend: Trend | None, *, now: float
) -> Refusal | None:
    """Why evictions wait for this run; None if no time is left for that."""
    left_s = max(0.0, run.until - now)
    exhausted_s = trend.to_exhaustion_s if trend is not None else None
    if tier is Tier.HARD and exhausted_s is not None and exhausted_s <= min(left_s, MARGIN_S):
        return None
    return Refusal(
        RefusalCode.WAITS_FOR_RECLAIM,
        f"{run.signal.value}: reclaim action {action.name} runs first; waiting up to {left_s:.0f}s",
    )


def describe(report: ReclaimReport, actions: Collection[ReclaimAction] = ()) -> str:
    """The text of a report, with a warning if the action ran as long as its `minInterval`."""
    gained = units.format_amount(report.gained, SIGNAL_TABLE[report.signal].unit)
    text = f"{report.plan_id}: {report.name} ({report.result}) took {report.took_s:.1f}s and freed {gained}"
    too_short = [each for each in actions if each.name == report.name and 0 < each.min_interval_s <= report.took_s]
    if not too_short:
        return text
    return f"{text}; its minInterval of {too_short[0].min_interval_s:g}s is not longer"

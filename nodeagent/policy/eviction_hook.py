"""The hook before an eviction of the soft tier: when it runs, how long the eviction waits, and what its end changes.

Promises:

1. Only the soft tier asks here. The hard tier neither runs a hook nor waits for one, also for a pod whose hook runs.
2. A hook runs for the pod that would be evicted now, after every other check, and once in `repeatAfter` for one pod,
   whatever it returns and however often the process dies: the state has the run and its token before it starts. If
   that cannot be saved, it is not started, and neither of the two is kept.
3. An eviction waits for it at most until its deadline and `LOST_S`. One hook runs at a time.
4. While its result counts, the pod that it ran for stays the choice as long as its relief covers the deficit, so that
   no second pod is prepared for nothing.

Theory of operation. A `HookRun` is added when a hook is ordered. It ends with its outcome, or without one (the process
was killed) when its deadline and `LOST_S` have passed. An ended run is dropped after `repeatAfter`. `prepare` returns
either the wait, or how the hook ended, or why none runs.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.config.schema import BeforeEvictionHook, Config, HookFailure
from nodeagent.model import (
    Deficit,
    HookOrder,
    HookOutcome,
    HookResult,
    Observation,
    RankedPod,
    Refusal,
    RefusalCode,
    Tier,
    units,
)
from nodeagent.policy import rate_limits
from nodeagent.policy.rate_limits import RateLimitState

LOST_S: Final = 5.0
"""How long after its deadline an outcome may come: killing a process group takes less than 1 s."""
MAX_RUNS: Final = 1000
"""Runs that are remembered; the oldest is dropped. The rate limit allows 200 in the longest usual `repeatAfter`."""
_GOOD: Final = frozenset({HookResult.DONE, HookResult.DRY_RUN})


class HookRun(NamedTuple):
    """The last run for one pod."""

    plan_id: str
    pod: str
    """`namespace/name`, for texts."""
    started_at: float
    until: float
    ended_at: float | None = None
    result: HookResult = HookResult.TIMED_OUT
    message: str = ""


class HookState(NamedTuple):
    runs: Mapping[str, HookRun] = {}
    """By pod UID."""


class HookStep(NamedTuple):
    """What a hook changes for the eviction of one pod."""

    state: HookState
    limit_state: RateLimitState
    waits: Refusal | None = None
    """Why the pod is not evicted now."""
    order: HookOrder | None = None
    """The hook to run now."""
    text: str = ""
    """How the hook ended, or why none ran."""


def advance(state: HookState, *, now: float, config: Config) -> HookState:
    """The state at `now`: runs whose outcome was lost are ended, old ones are dropped. A start in the future is another
    boot's."""
    if not state.runs:
        return state
    runs: dict[str, HookRun] = {}
    for uid, before in state.runs.items():
        run = before
        if run.ended_at is None and not run.started_at <= now <= run.until + LOST_S:
            run = run._replace(ended_at=min(now, run.until), message="its result was lost")
        if run.ended_at is None or 0 <= now - run.ended_at < config.hooks.before_eviction.repeat_after_s:
            runs[uid] = run
    return state if runs == state.runs else HookState(runs)


def without_dry_runs(state: HookState) -> HookState:
    """The state without the hooks that a dry run did not run."""
    return HookState({uid: run for uid, run in state.runs.items() if run.result is not HookResult.DRY_RUN})


def apply_outcome(
    state: HookState, limit_state: RateLimitState, outcome: HookOutcome, *, config: Config
) -> tuple[HookState, RateLimitState]:
    """The state and the rate limits after the end of a hook. One that is ordered again leaves no run, and its token
    returns. An outcome without a running hook changes nothing."""
    run = state.runs.get(outcome.pod_uid)
    if run is None or run.plan_id != outcome.plan_id or run.ended_at is not None:
        return state, limit_state
    if outcome.ordered_again:
        runs, limits = {uid: each for uid, each in state.runs.items() if each is not run}, config.rate_limits
        after = rate_limits.return_tokens(limit_state, (rate_limits.HOOK,), now=outcome.at, limits=limits)
        return HookState(runs), after
    ended = run._replace(ended_at=outcome.at, result=outcome.result, message=outcome.message)
    return HookState({**state.runs, outcome.pod_uid: ended}), limit_state


def after_suspend(state: HookState, slept_s: float) -> HookState:
    """The state after a suspend of the machine: a running hook keeps its remaining time."""
    runs = {
        uid: run._replace(until=run.until + slept_s) if run.ended_at is None else run for uid, run in state.runs.items()
    }
    return HookState(runs)


def is_running(state: HookState) -> bool:
    """True if the outcome of a hook is awaited."""
    return any(run.ended_at is None for run in state.runs.values())


def failures(state: HookState, tier: Tier, *, config: Config) -> Mapping[str, Refusal]:
    """By pod UID: why a pod whose hook failed is not evicted. Empty for the hard tier, and with `onFailure: evict`."""
    hook = config.hooks.before_eviction
    if tier is not Tier.SOFT or not hook.enabled or hook.on_failure is not HookFailure.SKIP:
        return {}
    return {
        uid: Refusal(RefusalCode.HOOK_FAILED, _failure(run))
        for uid, run in state.runs.items()
        if run.ended_at is not None and run.result not in _GOOD
    }


def prefer_prepared(
    pods: list[RankedPod], state: HookState, deficit: int, tier: Tier, config: Config
) -> list[RankedPod]:
    """The candidates, or of them only the first that a hook has prepared and whose relief covers the deficit. The
    kubelet's order has no such exception."""
    if tier is not Tier.SOFT or not config.hooks.before_eviction.enabled or config.ranking.kubelet:
        return pods
    prepared = [pod for pod in pods if pod.view.pod.uid in state.runs and (pod.relief or 0) >= deficit]
    return prepared[:1] or pods


def prepare(
    state: HookState,
    selected: Sequence[RankedPod],
    deficit: Deficit,
    observation: Observation,
    *,
    limit_state: RateLimitState,
    after: RateLimitState,
    plan_id: str,
    now: float,
    config: Config,
) -> HookStep:
    """What happens before the one selected pod is evicted. `limit_state`: the rate limits without its tokens; `after`:
    with them."""
    hook, pod = config.hooks.before_eviction, selected[0].view.pod
    run = state.runs.get(pod.uid)
    if run is not None and run.ended_at is not None:
        return HookStep(state, after, text=_describe(run))
    running = run or next((each for each in state.runs.values() if each.ended_at is None), None)
    if running is not None:
        return HookStep(state, limit_state, _wait(running, now=now))
    taken = rate_limits.take_tokens(limit_state, (rate_limits.HOOK,), now=now, limits=config.rate_limits)
    if isinstance(taken, Refusal):
        if hook.on_failure is HookFailure.SKIP:
            return HookStep(state, limit_state, taken._replace(message=f"{pod.key}: {taken.message}"))
        return HookStep(state, after, text=f"not run: {taken.message}")
    run, order = _start(selected[0], deficit, observation, hook, plan_id=plan_id, now=now)
    runs = {**dict(list(state.runs.items())[-MAX_RUNS + 1 :]), pod.uid: run}
    return HookStep(HookState(runs), taken, _wait(run, now=now), order)


def _start(
    ranked: RankedPod, deficit: Deficit, observation: Observation, hook: BeforeEvictionHook, *, plan_id: str, now: float
) -> tuple[HookRun, HookOrder]:
    pod, usage = ranked.view
    until = now + hook.deadline_s
    order = HookOrder(
        pod_uid=pod.uid,
        namespace=pod.namespace or "",
        name=pod.name or "",
        cgroup=usage.cgroup if usage is not None else "",
        signal=deficit.signal,
        deficit=deficit.amount,
        available=observation.available or 0,
        until=until,
    )
    return HookRun(plan_id, pod.key, now, until), order


def _wait(run: HookRun, *, now: float) -> Refusal:
    left_s = max(0.0, run.until - now)
    return Refusal(
        RefusalCode.WAITS_FOR_HOOK, f"the hook before the eviction of {run.pod} runs; waiting up to {left_s:.0f}s"
    )


def _describe(run: HookRun) -> str:
    """Without what the hook has printed: this text is also in Events, which others may read than the log."""
    took = units.format_duration(max(0.0, (run.ended_at or run.started_at) - run.started_at))
    return f"{run.result} after {took}"


def _failure(run: HookRun) -> str:
    return f"hook before eviction {_describe(run)}" + (f": {run.message}" if run.message else "")

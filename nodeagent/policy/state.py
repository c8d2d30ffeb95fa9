"""The state of the policy: one plain value that the caller keeps, passes again, and writes to disk.

It is persisted *before* a plan is executed. A decision takes its tokens and adds its evictions in flight, so that a
process that dies at any step spends no token twice.
"""

from typing import NamedTuple

from nodeagent.model import MIN_SUSPEND_S
from nodeagent.policy import eviction_hook, in_flight, rate_limits, reclaim, resizes, thresholds
from nodeagent.policy.conditions import ConditionState
from nodeagent.policy.eviction_hook import HookState
from nodeagent.policy.eviction_request import RequestState
from nodeagent.policy.in_flight import InFlightState
from nodeagent.policy.rate_limits import RateLimitState
from nodeagent.policy.reclaim import ReclaimState
from nodeagent.policy.resizes import ResizeState
from nodeagent.policy.thresholds import ThresholdState
from nodeagent.policy.usage_growth import GrowthState


class PolicyState(NamedTuple):
    """What one decision leaves to the next. Serialisable: numbers, strings, tuples, and mappings from strings."""

    instance: str
    """Names this run of the agent in plan ids: `INSTANCE-SEQUENCE`."""
    sequence: int = 0
    thresholds: ThresholdState = ThresholdState()
    conditions: ConditionState = ConditionState()
    in_flight: InFlightState = InFlightState()
    rate_limits: RateLimitState = RateLimitState()
    growth: GrowthState = GrowthState()
    reclaims: ReclaimState = ReclaimState()
    hooks: HookState = HookState()
    eviction_requests: RequestState = RequestState()
    suspended_s: float | None = None
    """How long the machine was suspended since its boot, at the last decision."""
    resizes: ResizeState = ResizeState()
    enforced_limits: RateLimitState | None = None
    """In a dry run: what real evictions have left of the rate limits, while `rate_limits` are those of the dry run.
    None in the mode `enforce`."""


def initial(instance: str, *, now: float, tokens_spent: bool = False) -> PolicyState:
    """The state of an agent without an earlier state.

    `tokens_spent`: an earlier state existed and is lost (corrupt, or from before a reboot). Its spent tokens are
    unknown, so every bucket starts empty. False for a first start.
    """
    return PolicyState(instance, rate_limits=RateLimitState(spent_at=now if tokens_spent else None))


def in_mode(state: PolicyState, *, dry_run: bool) -> PolicyState:
    """The state for a decision in this mode. A dry run begins with the rate limits that real evictions have left; what
    it spends itself, and the hooks and actions that it did not run, end with it."""
    if dry_run:
        return state if state.enforced_limits is not None else state._replace(enforced_limits=state.rate_limits)
    if state.enforced_limits is None:
        return state
    return state._replace(
        rate_limits=state.enforced_limits,
        enforced_limits=None,
        hooks=eviction_hook.without_dry_runs(state.hooks),
        reclaims=reclaim.without_dry_runs(state.reclaims),
    )


def restored(state: PolicyState, *, instance: str) -> PolicyState:
    """The state of an earlier process on the same boot, for the process `instance`.

    Everything is kept (grace periods, damping, rate limits, evictions in flight), but no threshold is due before enough
    fresh samples.
    """
    same_process = state.instance == instance
    sequence = state.sequence if same_process else 0
    return state._replace(
        instance=instance,
        sequence=sequence,
        thresholds=thresholds.observe_only(state.thresholds),
        resizes=resizes.restored(state.resizes, watched=same_process),
    )


def spent(state: PolicyState, *, now: float) -> PolicyState:
    """The state with every bucket empty: the tokens spent since it was written are unknown."""
    enforced = state.enforced_limits
    return state._replace(
        rate_limits=rate_limits.spent(state.rate_limits, now=now),
        enforced_limits=None if enforced is None else rate_limits.spent(enforced, now=now),
    )


def after_suspend(state: PolicyState, suspended_s: float, *, now: float) -> PolicyState:
    """The state after a suspend of the machine, if there was one since the last decision.

    CLOCK_BOOTTIME includes it. No sample was taken meanwhile, so no grace period passed. The kubelet's timers stood
    still, so terminating pods have as much time left as before. Rate limits, back-offs and damping count the time: they
    limit what happens in wall time.
    """
    slept_s = suspended_s - state.suspended_s if state.suspended_s is not None else 0.0
    if state.suspended_s is not None and abs(slept_s) < MIN_SUSPEND_S:
        return state
    state = state._replace(suspended_s=suspended_s)
    if not slept_s > 0.0:
        return state
    return state._replace(
        thresholds=thresholds.after_suspend(state.thresholds, slept_s, now=now),
        in_flight=in_flight.after_suspend(state.in_flight, slept_s, now=now),
        reclaims=reclaim.after_suspend(state.reclaims, slept_s),
        hooks=eviction_hook.after_suspend(state.hooks, slept_s),
        resizes=resizes.after_suspend(state.resizes, slept_s),
    )

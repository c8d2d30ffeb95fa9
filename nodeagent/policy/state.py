"""Everything that decisions remember: one plain value that the caller keeps, hands in again, and writes to disk.

It is persisted *before* a plan is acted upon: tokens are taken and evictions written down in it when they are decided,
so that a process that dies at any step spends nothing twice.
"""

from typing import NamedTuple

from nodeagent.model import MIN_SUSPEND_S
from nodeagent.policy import in_flight, rate_limits, reclaim, thresholds
from nodeagent.policy.conditions import ConditionState
from nodeagent.policy.in_flight import InFlightState
from nodeagent.policy.rate_limits import RateLimitState
from nodeagent.policy.reclaim import ReclaimState
from nodeagent.policy.thresholds import ThresholdState, observe_only
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
    suspended_s: float | None = None
    """Of the machine, in all, at the last decision."""


def initial(instance: str, *, now: float, budgets_spent: bool = False) -> PolicyState:
    """The state of an agent that remembers nothing.

    `budgets_spent`: an earlier state existed and is lost (corrupt, or from before a reboot), so what it had spent is
    not known and every bucket starts empty. False for a first start, where nothing can have been spent.
    """
    return PolicyState(instance, rate_limits=RateLimitState(spent_at=now if budgets_spent else None))


def restored(state: PolicyState, *, instance: str) -> PolicyState:
    """The state of an earlier process on the same boot, for a process that calls itself `instance`.

    Everything is kept (grace periods, damping, budgets, evictions under way), but nothing acts before enough fresh
    samples have come in.
    """
    sequence = state.sequence if state.instance == instance else 0
    return state._replace(instance=instance, sequence=sequence, thresholds=observe_only(state.thresholds))


def spent(state: PolicyState, *, now: float) -> PolicyState:
    """The same with every bucket empty: what was spent since the state was written is not known."""
    return state._replace(rate_limits=rate_limits.spent(state.rate_limits, now=now))


def after_suspend(state: PolicyState, suspended_s: float, *, now: float) -> PolicyState:
    """The state after a sleep of the machine, if there was one since the last decision.

    CLOCK_BOOTTIME went on in it, but nobody looked, so a grace period has not passed; and the kubelet's timers stood
    still, so what it was ending has as much time left as before. Budgets, back-off and damping have passed: they say
    how often something may happen in the time that people live in.
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
    )

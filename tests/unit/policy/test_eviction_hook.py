"""The hook before an eviction: it runs first, the eviction waits a bounded time, and the hard tier never waits."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config.schema import BeforeEvictionHook, HookFailure, HooksConfig, TokenBucket
from nodeagent.model import HookOrder, HookOutcome, HookResult, Plan, PodView, Refusal, RefusalCode, Signal
from nodeagent.policy import engine as policy
from nodeagent.policy import eviction_hook, outcomes
from nodeagent.policy.eviction_hook import HookState
from nodeagent.policy.state import PolicyState, after_suspend, initial, restored
from tests.support import nodes
from tests.support.nodes import GI, MI, NOW, hard, soft

HOOK = BeforeEvictionHook(command=("/bin/dump",), deadline_s=10.0, repeat_after_s=300.0)
SKIP = HOOK._replace(on_failure=HookFailure.SKIP)
LOW = {Signal.MEMORY: 900 * MI}


class Node:
    """One node that goes through decisions."""

    def __init__(self, hook: BeforeEvictionHook = HOOK, *thresholds: Any, **more: Any) -> None:
        limits = more.pop("hook_bucket", TokenBucket(1000, 100_000.0))
        self.config = nodes.config(
            *(thresholds or (soft(),)),
            hooks=HooksConfig(hook),
            rate_limits=nodes.PLENTY._replace(hook=limits),
            **more,
        )
        self.state: PolicyState = initial("t", now=NOW)

    def decide(self, at: float, *pods: PodView, available: int = 900 * MI, **more: Any) -> Plan:
        seen = nodes.snapshot(
            *(pods or (nodes.view("fat", 3 * GI),)), at=NOW + at, available={Signal.MEMORY: available}, **more
        )
        plan, self.state = policy.decide(seen, self.state, now=NOW + at, config=self.config)
        return plan

    def ordered(self, at: float = 1.0, *pods: PodView) -> tuple[Plan, HookOrder]:
        """The first decision past the grace period, which orders the hook."""
        self.decide(at - 1.0, *pods)
        plan = self.decide(at, *pods)
        [order] = plan.hooks
        return plan, order

    def end(
        self, plan: Plan, order: HookOrder, at: float, result: HookResult = HookResult.DONE, text: str = "", **more: Any
    ) -> None:
        outcome = HookOutcome(plan.id, order.pod_uid, result, text, NOW + at, **more)
        self.state = outcomes.apply_hook(self.state, outcome, config=self.config)


def codes(plan: Plan) -> list[RefusalCode]:
    return [refusal.code for refusal in plan.refusals]


def names(plan: Plan) -> list[str | None]:
    return [victim.pod.name for victim in plan.victims]


def test_without_a_hook_nothing_is_waited_for() -> None:
    node = Node(BeforeEvictionHook())
    node.decide(0)
    plan = node.decide(1)
    assert (names(plan), plan.hooks, plan.victims[0].hook) == (["fat"], (), "")


def test_the_hook_of_the_victim_runs_first_and_its_end_evicts() -> None:
    node = Node()
    plan, order = node.ordered()
    assert (names(plan), codes(plan)) == ([], [RefusalCode.WAITS_FOR_HOOK])
    assert plan.refusals[0].message == "the hook before the eviction of shop/fat runs; waiting up to 10s"
    assert (order.key, order.signal, order.deficit, order.available) == ("shop/fat", Signal.MEMORY, 124 * MI, 900 * MI)
    assert order.until == NOW + 11
    waiting = node.decide(2)
    assert (names(waiting), codes(waiting), waiting.hooks) == ([], [RefusalCode.WAITS_FOR_HOOK], ())
    assert not [key for key in node.state.rate_limits.levels if key != "hook"], "waiting costs no token of an eviction"
    node.end(plan, order, 3.0)
    after = node.decide(3.5)
    assert (names(after), after.victims[0].hook, after.hooks) == (["fat"], "done after 2s", ())


def test_an_outcome_of_another_decision_or_a_second_one_changes_nothing() -> None:
    node = Node()
    plan, order = node.ordered()
    node.end(plan._replace(id="t-99"), order, 2.0)
    assert eviction_hook.is_running(node.state.hooks)
    node.end(plan, order, 3.0)
    node.end(plan, order, 4.0, HookResult.FAILED)
    assert node.state.hooks.runs[order.pod_uid].result is HookResult.DONE


@pytest.mark.parametrize("result", [HookResult.FAILED, HookResult.TIMED_OUT])
def test_a_failed_hook_evicts_or_skips_as_configured(result: HookResult) -> None:
    for hook, victims in ((HOOK, ["fat"]), (SKIP, [])):
        node = Node(hook)
        plan, order = node.ordered()
        node.end(plan, order, 3.0, result, "exit code 3: token=s3cret")
        after = node.decide(4)
        assert names(after) == victims
        if victims:
            assert after.victims[0].hook == f"{result} after 2s", "what it printed is in no Event"
        else:
            [fat] = after.ranking
            assert fat.refusals == (
                Refusal(RefusalCode.HOOK_FAILED, f"hook before eviction {result} after 2s: exit code 3: token=s3cret"),
            )
            assert not after.hooks, "it is not tried again before repeatAfter"


@pytest.mark.parametrize("hook", [HOOK, SKIP])
def test_a_hook_that_did_not_run_is_ordered_again_with_its_token(hook: BeforeEvictionHook) -> None:
    """The disk is full for a moment."""
    node = Node(hook, hook_bucket=TokenBucket(1, 0.0))
    plan, order = node.ordered()
    node.end(plan._replace(id="t-99"), order, 1.0, HookResult.FAILED, ordered_again=True)
    assert eviction_hook.is_running(node.state.hooks)
    node.end(plan, order, 1.0, HookResult.FAILED, ordered_again=True)
    assert node.state.hooks == HookState()
    plan = node.decide(2)
    [order] = plan.hooks
    assert (names(plan), codes(plan)) == ([], [RefusalCode.WAITS_FOR_HOOK])
    node.end(plan, order, 3.0)
    after = node.decide(3.5)
    assert (names(after), after.victims[0].hook) == (["fat"], "done after 1s")


def test_a_skipped_pod_is_tried_again_after_repeat_after() -> None:
    node = Node(SKIP)
    plan, order = node.ordered()
    node.end(plan, order, 3.0, HookResult.FAILED)
    assert not any(node.decide(at).hooks for at in range(4, 303, 7))
    assert node.decide(303.5).hooks


def test_other_pods_replace_a_skipped_one_only_by_the_rules_of_out_of_reach() -> None:
    """As for a PodDisruptionBudget: a smaller pod is evicted in its place if it alone clears the deficit."""
    pods = (nodes.view("fat", 3 * GI), nodes.view("small", 10 * MI))
    node = Node(SKIP)
    plan, order = node.ordered(1.0, *pods)
    assert order.name == "fat"
    node.end(plan, order, 3.0, HookResult.FAILED)
    after = node.decide(4, *pods)
    assert (names(after), after.hooks) == ([], ())


def test_a_hook_whose_end_was_lost_counts_as_timed_out_and_does_not_run_again() -> None:
    """kill -9 while it runs: the state has the run and its token."""
    node = Node()
    plan, order = node.ordered()
    node.state = restored(node.state, instance="u")
    while_running = node.decide(5)
    assert (codes(while_running), while_running.hooks) == ([RefusalCode.WAITS_FOR_HOOK], ())
    at_the_end = node.decide(11 + eviction_hook.LOST_S)
    assert (names(at_the_end), at_the_end.hooks) == ([], ())
    after = node.decide(11 + eviction_hook.LOST_S + 0.1)
    assert (names(after), after.victims[0].hook) == (["fat"], "timed-out after 10s")
    node.end(plan, order, 30.0)
    assert node.state.hooks.runs[order.pod_uid].result is HookResult.TIMED_OUT, "a late outcome changes nothing"


def test_a_hard_crossing_evicts_at_once_while_the_hook_runs() -> None:
    node = Node(HOOK, soft(), hard(value=512 * MI))
    node.ordered()
    plan = node.decide(2, available=100 * MI)
    assert (names(plan), plan.victims[0].hook, plan.hooks) == (["fat"], "", ())


@pytest.mark.parametrize("result", [None, HookResult.FAILED])
@pytest.mark.parametrize("hook", [HOOK, SKIP])
def test_the_hard_tier_runs_no_hook_and_no_failure_blocks_it(
    hook: BeforeEvictionHook, result: HookResult | None
) -> None:
    node = Node(hook, soft(), hard(value=512 * MI), hook_bucket=TokenBucket(1, 0.0))
    plan, order = node.ordered()
    if result is not None:
        node.end(plan, order, 2.0, result)
    node.state = node.state._replace(rate_limits=node.state.rate_limits._replace(levels={}, spent_at=None))
    after = node.decide(3, available=100 * MI)
    assert (names(after), after.hooks) == (["fat"], ())


def test_a_used_up_rate_limit_evicts_without_a_hook_or_waits() -> None:
    for hook, victims in ((HOOK, ["fat"]), (SKIP, [])):
        node = Node(hook, hook_bucket=TokenBucket(1, 1.0))
        plan, order = node.ordered(1.0, nodes.view("first", 3 * GI))
        node.end(plan, order, 2.0)
        assert names(node.decide(3, nodes.view("first", 3 * GI))) == ["first"]
        node.state = node.state._replace(in_flight=initial("t", now=NOW).in_flight)
        node.decide(99, nodes.view("fat", 3 * GI))
        after = node.decide(100, nodes.view("fat", 3 * GI))
        assert (names(after), after.hooks) == (victims, ())
        if victims:
            assert after.victims[0].hook.startswith("not run: rate limit of hook reached: burst 1, 1 per hour, next in")
        else:
            assert codes(after) == [RefusalCode.RATE_LIMIT_HOOK]
            assert after.refusals[0].message.startswith("shop/fat: rate limit of hook reached")


def test_the_prepared_pod_stays_the_choice_while_it_covers_the_deficit() -> None:
    old, new = nodes.view("a-old", 2 * GI), nodes.view("b-new", 5 * GI)
    node = Node()
    plan, order = node.ordered(1.0, old)
    assert order.name == "a-old"
    waiting = node.decide(2, old, new)
    assert (waiting.hooks, codes(waiting)) == ((), [RefusalCode.WAITS_FOR_HOOK])
    node.end(plan, order, 3.0)
    assert names(node.decide(4, old, new)) == ["a-old"]


def test_one_hook_runs_at_a_time() -> None:
    """The prepared pod no longer covers the deficit, so another one is chosen, and waits for the end of that hook."""
    small, new = nodes.view("a-small", 200 * MI), nodes.view("b-new", 5 * GI)
    node = Node()
    plan, order = node.ordered(1.0, small)
    waiting = node.decide(2, small, new, available=500 * MI)
    assert (waiting.hooks, codes(waiting)) == ((), [RefusalCode.WAITS_FOR_HOOK])
    assert "shop/a-small" in waiting.refusals[0].message
    node.end(plan, order, 3.0)
    [second] = node.decide(4, small, new, available=500 * MI).hooks
    assert second.name == "b-new"


def test_a_hook_waits_for_what_blocks_the_soft_tier_and_keeps_the_slot() -> None:
    block = Refusal(RefusalCode.WAITS_FOR_LEASE, "all slots are taken")
    node = Node()
    node.decide(0)
    plan = node.decide(1, soft_tier_blocked_by=block)
    assert (plan.hooks, codes(plan)) == ((), [RefusalCode.WAITS_FOR_LEASE])
    assert node.decide(2).hooks
    assert RefusalCode.WAITS_FOR_HOOK.wants_slot


def test_a_hook_that_runs_while_the_machine_is_suspended_keeps_its_time() -> None:
    node = Node()
    _, order = node.ordered()
    state = after_suspend(node.state._replace(suspended_s=0.0), 3600.0, now=NOW + 3602)
    assert state.hooks.runs[order.pod_uid].until == order.until + 3600


def test_a_run_of_another_boot_ends() -> None:
    node = Node()
    node.ordered()
    assert not eviction_hook.is_running(eviction_hook.advance(node.state.hooks, now=5.0, config=node.config))


steps = st.lists(
    st.tuples(st.floats(0.1, 40.0), st.sampled_from(["nothing", "done", "failed", "restart"])), max_size=40
)


@given(steps, st.sampled_from([HOOK, SKIP]))
def test_no_series_of_ends_and_restarts_runs_a_hook_more_often_than_allowed(
    taken: list[tuple[float, str]], hook: BeforeEvictionHook
) -> None:
    """For one pod once in repeatAfter, over all within the rate limit, and never two at a time."""
    node = Node(hook, hook_bucket=TokenBucket(2, 6.0))
    at, last = 0.0, None
    started: list[float] = []
    for after_s, event in taken:
        at += after_s
        plan = node.decide(at)
        if plan.hooks:
            assert len(plan.hooks) == 1
            assert not started or at - started[-1] >= hook.repeat_after_s
            started.append(at)
            last = (plan, plan.hooks[0])
        if last is not None and event in ("done", "failed"):
            node.end(*last, at, HookResult.DONE if event == "done" else HookResult.FAILED)
        if event == "restart":
            node.state = restored(node.state, instance="u")
        if plan.victims:  # nothing comes of it: the API server refuses each request
            node.state = node.state._replace(in_flight=initial("t", now=NOW).in_flight)
    for first in started:
        within = [each for each in started if first <= each <= first + 600.0]
        assert len(within) <= 2 + 1
    assert len(node.state.hooks.runs) <= 1


def test_old_runs_are_forgotten() -> None:
    assert HookState() == eviction_hook.advance(HookState(), now=NOW, config=Node().config)
    node = Node()
    plan, order = node.ordered()
    node.end(plan, order, 3.0)
    assert eviction_hook.advance(node.state.hooks, now=NOW + 302, config=node.config).runs
    assert not eviction_hook.advance(node.state.hooks, now=NOW + 303.1, config=node.config).runs


def test_a_hook_of_a_dry_run_does_not_count_in_enforce() -> None:
    ran = eviction_hook.HookRun("p-1", "shop/a", NOW, NOW + 5, ended_at=NOW + 1, result=HookResult.DONE)
    dry = ran._replace(result=HookResult.DRY_RUN)
    kept = eviction_hook.without_dry_runs(eviction_hook.HookState({"real": ran, "dry": dry}))
    assert kept.runs == {"real": ran}

"""A sync follows the numbered rules in the docstring of `loop.sync`, in their order."""

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from nodeagent.loop import sync as spine
from nodeagent.loop.schedule import Schedule
from nodeagent.model import Plan
from tests.support import nodes

PLAN = Plan("plan-1", 1.0, 1.0, (), ())


class Step(NamedTuple):
    """One recorded step of a sync and the rules that it stands for."""

    rules: tuple[int, ...]
    words: str
    """Its line of the docstring."""


STEPS = {
    "check_own_cost": Step((1,), "Own descriptors and cost first"),
    "executor.apply_outcomes": Step((2,), "Outcomes before anything reads the policy state"),
    "observer.observe_node": Step((3, 4, 5), "The node sample, then the schedule"),
    "observer.observe_pods": Step((6, 7, 8), "The pods, then the node's signals again"),
    "decide": Step((9,), "The store has the new state"),
    "executor.brake": Step((10,), "The brake is the first act"),
    "executor.recheck": Step((11,), "The recheck sample after the brake and before 15"),
    "metrics.observe_plan": Step((12,), "Plan metrics before the first outcome"),
    "decision_log.log_victims": Step((13,), "A victim's log line before its request"),
    "executor.evict": Step((14,), "A victim is registered before it is submitted"),
    "session.publish": Step((15,), "Conditions and taints"),
    "session.announce": Step((15,), "Node Event and slot request"),
    "executor.start_reclaim": Step((16,), "Reclaim orders"),
    "executor.start_hooks": Step((16,), "Hooks before evictions of the soft tier"),
    "executor.resize": Step((16,), "Resizes of pods: log, save, send"),
    "executor.prefer_for_oom": Step((16,), "oom_score_adj of the next victims"),
    "observer.follow": Step((17,), "Recounts are requested before the record"),
    "record": Step((18,), "The record last"),
    "oom_monitor.observe": Step((19,), "OOM kills are found and reported after everything that acts"),
    "session.prewarm": Step((20,), "API connections are prewarmed after the decision"),
    "wakeup_sources.arm": Step((21,), "memcg thresholds are armed last"),
    "next_deadline_s": Step((22,), "Brake deadlines and the startup wait bound the sleep"),
}
"""Every step of a sync that decides, in order."""
NOT_IN_A_SYNC = {23: "Start: the first rule 2 releases leftover brakes"}


class Recorder:
    """Stands for the agent or one of its components, and records every call."""

    acts = True

    def __init__(self, calls: list[str], results: dict[str, Any], prefix: str = "") -> None:
        self._calls, self._results, self._prefix = calls, results, prefix

    def __getattr__(self, name: str) -> Any:
        if name == "reporting":
            return Recorder(self._calls, self._results, "reporting.")
        if self._prefix == "reporting." and name == "run":
            return lambda _, work, *arguments, **more: work(*arguments, **more)
        if not self._prefix and name in (
            "observer",
            "executor",
            "metrics",
            "session",
            "decision_log",
            "wakeup_sources",
            "oom_monitor",
        ):
            return Recorder(self._calls, self._results, f"{name}.")
        return self._step(f"{self._prefix}{name}")

    def _step(self, step: str) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            self._calls.append(step)
            result = self._results.get(step)
            return result() if callable(result) else result

        return call


def run(**due: Any) -> tuple[list[str], float]:
    """The steps of one sync, and the sleep after it."""
    schedule = Schedule(5.0, full_sample=False, under_pressure=False, headroom={})._replace(**due)
    results = {
        "observer.observe_node": (nodes.snapshot(), schedule),
        "observer.observe_pods": nodes.snapshot(),
        "observer.prearm": (),
        "decide": PLAN,
        "next_deadline_s": 3.0,
    }
    calls: list[str] = []
    agent: Any = Recorder(calls, results)
    sleep_s = spine.sync(agent)
    return calls, sleep_s


def test_conditions_are_published_although_the_victims_could_not_be_handed_over() -> None:
    calls: list[str] = []

    def fail() -> None:
        raise OSError("no space")

    agent: Any = Recorder(calls, {"decide": PLAN, "executor.evict": fail})
    with pytest.raises(OSError, match="no space"):
        spine.decide_and_act(agent, nodes.snapshot())
    assert calls[-3:] == ["executor.evict", "session.publish", "session.announce"]


def rules() -> dict[int, str]:
    """The rules of the docstring, each on one line."""
    text = (spine.__doc__ or "").partition("\n1. ")
    found = re.split(r"\n(?=\d+\. )", text[1].lstrip() + text[2])
    return {int(rule.partition(".")[0]): " ".join(rule.partition(".")[2].split()) for rule in found}


def test_a_sync_that_crosses_a_hard_threshold_takes_every_step_in_the_order_of_the_rules() -> None:
    calls, sleep_s = run(full_sample=True, under_pressure=True)
    assert calls == list(STEPS)
    assert sleep_s == 3.0, "a deadline that is nearer than the schedule's sleep"


def test_the_docstring_numbers_its_rules_as_the_steps_are_ordered() -> None:
    text = rules()
    assert list(text) == list(range(1, 24))
    numbers = [number for step in STEPS.values() for number in step.rules]
    assert numbers == sorted(numbers)
    assert set(numbers) | set(NOT_IN_A_SYNC) == set(text)
    for step in STEPS.values():
        assert any(step.words in text[number] for number in step.rules), step
    for number, words in NOT_IN_A_SYNC.items():
        assert words in text[number]


def test_a_calm_sync_neither_reads_the_pods_nor_decides() -> None:
    calls, _ = run()
    assert calls == [
        "check_own_cost",
        "executor.apply_outcomes",
        "observer.observe_node",
        "record_between",
        "oom_monitor.observe",
        "wakeup_sources.arm",
        "next_deadline_s",
    ]


@pytest.mark.parametrize("growth_cap", [True, False])
def test_a_prearm_reads_the_pods_and_caps_growth_only_if_that_is_due(growth_cap: bool) -> None:
    calls, _ = run(prearm=True, growth_cap=growth_cap)
    assert calls[3:-3] == ["observer.prearm", *(["executor.cap_growth"] if growth_cap else [])]


def test_a_sync_fits_on_one_screen() -> None:
    """The two functions, with their comments: at most about 40 lines."""
    lines = inspect.getsource(spine.sync) + inspect.getsource(spine.decide_and_act)
    assert len(lines.splitlines()) <= 40

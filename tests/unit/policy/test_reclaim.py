"""Reclaim before evictions: when an action runs, how long evictions wait for it, and what it freed."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config.schema import Config, RankingConfig, ReclaimAction, ReclaimConfig, ReclaimKind
from nodeagent.model import (
    DiskLayout,
    DiskUsage,
    NodeSnapshot,
    Plan,
    PodView,
    ReclaimOutcome,
    ReclaimResult,
    Signal,
    Threshold,
)
from nodeagent.policy import engine, outcomes, reclaim
from nodeagent.policy.in_flight import InFlightState
from nodeagent.policy.state import PolicyState, initial
from tests.support import nodes
from tests.support.nodes import GI, MI, NOW, config, hard, snapshot, soft

IMAGES = ReclaimAction("images", timeout_s=20.0, min_interval_s=300.0)
JOURNAL = ReclaimAction("journal", timeout_s=5.0, min_interval_s=300.0)
PIDS = ReclaimAction("pids", signals=(Signal.PID,))
SOFT, HARD = soft(Signal.NODEFS, GI), hard(Signal.NODEFS, GI)


class Node:
    """One node that goes through decisions."""

    def __init__(self, threshold: Threshold, *actions: ReclaimAction, wait_s: float = 0.0, **more: Any) -> None:
        self.config: Config = config(threshold, reclaim=ReclaimConfig(actions, wait_s), **more)
        self.state: PolicyState = initial("t", now=NOW)

    def sample(self, at: float, available: int = 900 * MI, signal: Signal = Signal.NODEFS) -> Plan:
        seen: NodeSnapshot = snapshot(holder(NOW + at), at=NOW + at, available={signal: available})
        plan, self.state = engine.decide(seen, self.state, now=NOW + at, config=self.config)
        return plan

    def ended(self, plan: Plan, at: float, result: ReclaimResult = ReclaimResult.DONE) -> None:
        outcome = ReclaimOutcome(plan.id, plan.reclaims[0].name, result, "", NOW + at)
        self.state = outcomes.apply_reclaim(self.state, outcome)


def holder(at: float) -> PodView:
    return nodes.view("holder", usage_more={"disk": DiskUsage(volumes_bytes=2 * GI), "at": at})


def codes(plan: Plan) -> list[str]:
    return [refusal.code for refusal in plan.refusals]


def test_without_actions_nothing_is_waited_for() -> None:
    node = Node(HARD)
    assert node.sample(0).victims


def test_an_action_runs_first_and_no_pod_is_evicted_if_it_helps() -> None:
    node = Node(HARD, IMAGES)
    first = node.sample(0)
    assert (first.victims, codes(first)) == ((), ["waits-for-reclaim"])
    [order] = first.reclaims
    assert (order.name, order.signal, order.deficit, order.available) == ("images", Signal.NODEFS, 124 * MI, 900 * MI)
    assert order.until == NOW + 20
    waiting = node.sample(1)
    assert (waiting.reclaims, waiting.victims, codes(waiting)) == ((), (), ["waits-for-reclaim"])
    node.ended(first, 3)
    after = node.sample(4, available=3 * GI)
    assert (after.victims, codes(after)) == ((), [])
    [report] = after.reclaim_reports
    assert (report.name, report.gained, report.took_s) == ("images", 3 * GI - 900 * MI, 3.0)
    assert any("images (done) took 3.0s and freed 2.12Gi" in note.message for note in after.notes)
    assert not node.sample(5, available=3 * GI).reclaim_reports, "reported once"


@pytest.mark.parametrize(
    ("layout", "images", "logs"),
    [
        (DiskLayout.SINGLE, {"nodefs", "imagefs", "containerfs"}, {"nodefs", "imagefs", "containerfs"}),
        (DiskLayout.DEDICATED_IMAGEFS, {"imagefs", "containerfs"}, {"nodefs"}),
        (DiskLayout.SPLIT, {"imagefs"}, {"nodefs", "containerfs"}),
    ],
)
@pytest.mark.parametrize("short", ["available", "inodesFree"])
def test_images_and_logs_are_removed_only_where_they_are(
    layout: DiskLayout, images: set[str], logs: set[str], short: str
) -> None:
    tried: dict[ReclaimKind, set[str]] = {kind: set() for kind in ReclaimKind}
    for kind in ReclaimKind:
        action = ReclaimAction("it", kind)
        for name in ("nodefs", "imagefs", "containerfs"):
            # containerfs has the threshold of the file system that it is on
            source = (
                name if name != "containerfs" else "imagefs" if layout is DiskLayout.DEDICATED_IMAGEFS else "nodefs"
            )
            made = config(hard(Signal(f"{source}.{short}"), 1000), reclaim=ReclaimConfig((action,), 0.0))
            seen = snapshot(holder(NOW), layout=layout, available={Signal(f"{name}.{short}"): 10})
            plan, _ = engine.decide(seen, initial("t", now=NOW), now=NOW, config=made)
            assert plan.acting_on is not None
            if plan.reclaims:
                tried[kind].add(name)
    everywhere = {"nodefs", "imagefs", "containerfs"}
    assert tried == {
        ReclaimKind.IMAGES: images,
        ReclaimKind.CONTAINER_LOGS: logs,
        ReclaimKind.JOURNAL: everywhere,
        ReclaimKind.COMMAND: everywhere,
        ReclaimKind.PAGE_CACHE: set(),
    }


def test_actions_run_one_after_another_before_a_pod_is_evicted() -> None:
    node = Node(HARD, IMAGES, JOURNAL)
    first = node.sample(0)
    assert [order.name for order in first.reclaims] == ["images"]
    node.ended(first, 1)
    second = node.sample(2)
    assert [order.name for order in second.reclaims] == ["journal"]
    node.ended(second, 3, ReclaimResult.FAILED)
    third = node.sample(4)
    assert [victim.pod.name for victim in third.victims] == ["holder"]
    assert third.reclaim_reports[0].result is ReclaimResult.FAILED


def test_an_eviction_waits_for_a_sample_after_the_end_of_an_action() -> None:
    node = Node(HARD, IMAGES)
    first = node.sample(0)
    node.ended(first, 2)
    assert codes(node.sample(2)) == ["waits-for-reclaim"], "this sample is no younger than the end"
    assert node.sample(2.1).victims


@pytest.mark.parametrize("threshold", [SOFT, HARD])
def test_an_action_without_an_outcome_ends_after_its_deadline(threshold: Threshold) -> None:
    node = Node(threshold, JOURNAL)
    node.sample(0)
    first = node.sample(1) if threshold is SOFT else None
    assert first is None or first.reclaims
    assert codes(node.sample(5)) == ["waits-for-reclaim"]
    assert node.sample(20).victims


def test_the_hard_tier_does_not_wait_when_the_disk_would_be_full_before() -> None:
    node = Node(HARD, IMAGES)
    for step in range(5):
        node.sample(step, available=3 * GI - step * 400 * MI)
    crossing = node.sample(6, available=900 * MI)
    assert crossing.reclaims, "it is run all the same"
    assert crossing.victims


class Hour(NamedTuple):
    """What happened on a node in an hour, in seconds since its beginning."""

    started: dict[str, list[int]]
    evicted: list[int]


def hour(node: Node, takes_s: dict[str, float], available: Callable[[int], int] = lambda _: 900 * MI) -> Hour:
    """A decision every second, actions that bring nothing back, and victims that go at once."""
    done = Hour({name: [] for name in takes_s}, [])
    ends: dict[float, Plan] = {}
    for at in range(3600):
        for end in sorted(end for end in ends if end <= at):
            node.ended(ends.pop(end), end)
        plan = node.sample(at, available(at))
        for order in plan.reclaims:
            done.started[order.name].append(at)
            ends[at + takes_s[order.name]] = plan
        if plan.victims:
            done.evicted.append(at)
            node.state = node.state._replace(in_flight=InFlightState())
    return done


LONG = ReclaimAction("images", timeout_s=900.0)
"""With the default minInterval of 600 s."""


@pytest.mark.parametrize("takes_s", [0.5, 5.0])
@pytest.mark.parametrize("threshold", [SOFT, HARD])
def test_no_action_that_may_run_without_pause_delays_other_actions_or_evictions(
    threshold: Threshold, takes_s: float
) -> None:
    actions = (IMAGES._replace(min_interval_s=0.0), JOURNAL._replace(min_interval_s=0.0))
    seen = hour(Node(threshold, *actions), {"images": takes_s, "journal": takes_s})
    assert min(map(len, seen.started.values())) >= 1
    assert seen.evicted[0] <= 2 * takes_s + 5
    assert len(seen.evicted) > 3000, "each action was waited for once"


def test_an_action_that_takes_longer_than_its_interval_is_waited_for_once() -> None:
    seen = hour(Node(SOFT, LONG, JOURNAL), {"images": 700.0, "journal": 1.0})
    assert seen.started["images"][0] < seen.started["journal"][0] <= 705
    assert 700 <= seen.evicted[0] <= 710
    assert len(seen.evicted) > 2500


@pytest.mark.parametrize("threshold", [SOFT, HARD])
def test_in_one_pressure_the_soft_tier_repeats_an_action_beside_evictions_and_the_hard_tier_does_not(
    threshold: Threshold,
) -> None:
    interval_s = 300.0
    seen = hour(Node(threshold, JOURNAL._replace(min_interval_s=interval_s)), {"journal": 5.0})
    starts = seen.started["journal"]
    assert (len(starts) >= 11) if threshold is SOFT else (len(starts) == 1)
    assert all(later - earlier >= interval_s for earlier, later in itertools.pairwise(starts))
    assert {*range(starts[0] + 6, 3600)} == {*seen.evicted}


def test_in_the_next_pressure_an_action_is_waited_for_again() -> None:
    def two_pressures(at: int) -> int:
        return 5 * GI if 1000 <= at < 1010 else 900 * MI

    seen = hour(Node(SOFT, JOURNAL._replace(min_interval_s=1000.0)), {"journal": 5.0}, two_pressures)
    assert seen.started["journal"][:3] == [1, 1011, 2011]
    assert {*range(1000, 1020)} & {*seen.evicted} == {*range(1017, 1020)}, "and no eviction waits for the third"
    assert {*range(2005, 2030)} < {*seen.evicted}


def test_a_signal_that_is_not_known_for_a_moment_begins_no_new_pressure() -> None:
    node = Node(HARD, JOURNAL._replace(min_interval_s=0.0))
    first = node.sample(0)
    node.ended(first, 1)
    assert node.sample(2).victims
    node.state = node.state._replace(in_flight=InFlightState())
    for at in range(3, 60, 6):
        unknown = snapshot(holder(NOW + at), at=NOW + at, available={Signal.NODEFS: None})
        _, node.state = engine.decide(unknown, node.state, now=NOW + at, config=node.config)
        plan = node.sample(at + 3)
        assert (plan.reclaims, bool(plan.victims)) == ((), True)
        node.state = node.state._replace(in_flight=InFlightState())


def test_of_two_signals_neither_makes_the_other_wait_for_an_action_again() -> None:
    """The same action for both, free to run at any time, on a node that is short of both for an hour."""
    action = JOURNAL._replace(min_interval_s=0.0)
    made = config(SOFT, soft(Signal.NODEFS_INODES, 1000), reclaim=ReclaimConfig((action,), 0.0))
    state, evicted, ending = initial("t", now=NOW), [], None
    for at in range(600):
        if ending is not None and at >= ending[1]:
            outcome = ReclaimOutcome(ending[0].id, "journal", ReclaimResult.DONE, "", NOW + ending[1])
            state, ending = outcomes.apply_reclaim(state, outcome), None
        short: dict[Signal, int | None] = {Signal.NODEFS: 900 * MI, Signal.NODEFS_INODES: 10}
        plan, state = engine.decide(
            snapshot(holder(NOW + at), at=NOW + at, available=short), state, now=NOW + at, config=made
        )
        ending = (plan, at + 5.0) if plan.reclaims else ending
        if plan.victims:
            evicted.append(at)
            state = state._replace(in_flight=InFlightState())
    assert evicted
    assert {*range(20, 600)} == {at for at in evicted if at >= 20}


def test_an_action_without_a_measurable_gain_does_not_stop_other_actions() -> None:
    made = config(HARD, hard(Signal.PID, 1000), reclaim=ReclaimConfig((JOURNAL, PIDS), 0.0))
    plan, state = engine.decide(
        snapshot(holder(NOW), available={Signal.NODEFS: MI}), initial("t", now=NOW), now=NOW, config=made
    )
    state = outcomes.apply_reclaim(state, ReclaimOutcome(plan.id, "journal", ReclaimResult.DONE, "", NOW + 1))
    ordered = []
    for at in range(2, 100):
        seen = snapshot(holder(NOW + at), at=NOW + at, available={Signal.PID: 10, Signal.NODEFS: None})
        plan, state = engine.decide(seen, state, now=NOW + at, config=made)
        ordered += [(order.name, at) for order in plan.reclaims]
    assert ordered == [("pids", 62)]


def test_an_action_that_takes_as_long_as_its_interval_is_reported_so() -> None:
    node = Node(SOFT, IMAGES._replace(min_interval_s=3.0))
    node.sample(0)
    node.ended(node.sample(1), 4.0)
    [message] = [note.message for note in node.sample(5).notes if note.subject == "reclaim"]
    assert message.endswith("; its minInterval of 3s is not longer")


def test_an_action_for_another_signal_is_not_tried() -> None:
    node = Node(HARD, IMAGES._replace(signals=(Signal.IMAGEFS,)))
    plan = node.sample(0)
    assert plan.victims
    assert not plan.reclaims


def test_the_soft_tier_waits_for_the_kubelets_own_collection() -> None:
    node = Node(SOFT, wait_s=10.0)
    node.sample(0)
    assert codes(node.sample(5)) == ["waits-for-kubelet"]
    assert node.sample(10.1).victims


@pytest.mark.parametrize(
    "node",
    [
        Node(HARD, wait_s=10.0),
        Node(SOFT, wait_s=10.0, ranking=RankingConfig(kubelet=True)),
    ],
)
def test_the_hard_tier_and_the_kubelets_order_do_not_wait_for_it(node: Node) -> None:
    node.sample(0)
    if node.state.in_flight.entries:
        return
    assert node.sample(1).victims


def test_memory_does_not_wait_for_images() -> None:
    node = Node(soft(Signal.MEMORY, 20 * GI), IMAGES, wait_s=10.0)
    node.sample(0)
    assert not {"waits-for-kubelet", "waits-for-reclaim"} & set(codes(node.sample(5)))


@given(st.lists(st.tuples(st.floats(0.1, 30.0), st.booleans(), st.booleans()), max_size=40))
def test_no_sequence_of_samples_outcomes_and_restarts_runs_an_action_too_often(
    steps: list[tuple[float, bool, bool]],
) -> None:
    node = Node(HARD, JOURNAL._replace(min_interval_s=60.0), IMAGES._replace(min_interval_s=45.0))
    at, started, last = 0.0, [], None
    for pause_s, comes, enough in steps:
        at += pause_s
        if last is not None and comes:
            node.ended(last, at)
            last = None
        plan = node.sample(at, available=5 * GI if enough else 900 * MI)
        for order in plan.reclaims:
            started.append((order.name, NOW + at))  # the decision's own time: sums of floats differ in the last bit
            last = plan
        assert len(plan.reclaims) <= 1
    for name, interval_s in (("journal", 60.0), ("images", 45.0)):
        times = [when for which, when in started if which == name]
        assert all(later - earlier >= interval_s for earlier, later in itertools.pairwise(times))


def test_an_action_of_a_dry_run_does_not_count_in_enforce() -> None:
    ran = reclaim.ReclaimRun("p-1", Signal.NODEFS, NOW, NOW + 5, 0, ended_at=NOW + 1, result=ReclaimResult.DONE)
    dry = ran._replace(result=ReclaimResult.DRY_RUN)
    before = reclaim.ReclaimState({"real": ran, "dry": dry}, {"soft": ("real", "dry")})
    assert reclaim.without_dry_runs(before) == reclaim.ReclaimState({"real": ran}, {"soft": ("real",)})

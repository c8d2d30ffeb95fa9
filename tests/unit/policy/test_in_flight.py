"""Evictions in flight, their pending release, and their measured relief."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model import DiskUsage, MemoryModel, NodeSnapshot, OutcomeKind, PodView, Signal, Tier
from nodeagent.policy import circuit_breaker, in_flight, outcomes, pending_release
from nodeagent.policy.circuit_breaker import Failures
from nodeagent.policy.in_flight import EvictionEvent, EvictionStage, InFlightEviction, InFlightState
from tests.support.nodes import GI, MI, NOW, WALL, config, snapshot, view

CONFIG = config()


def entry(name: str, *, plan: str = "a-1", predicted: int = GI, **more: object) -> InFlightEviction:
    uid = f"uid-shop-{name}"
    base = InFlightEviction(
        plan_id=plan,
        pod_uid=uid,
        cgroup_uid=uid,
        pod=f"shop/{name}",
        owner=f"rs-shop-{name}",
        signal=Signal.MEMORY,
        memory_model=MemoryModel.WORKING_SET,
        tier=Tier.HARD,
        stage=EvictionStage.ACCEPTED,
        planned_at=NOW,
        sample_at=NOW,
        available=100 * MI,
        predicted=predicted,
        grace_s=1.0,
        until=NOW + 21,
        buckets=("node",),
    )
    return base._replace(**more)  # type: ignore[arg-type]


def observed(state: InFlightState, node: NodeSnapshot) -> in_flight.Observed:
    return in_flight.advance(state, node, now=node.taken_at, config=CONFIG)


def pending(state: InFlightState, node: NodeSnapshot, tier: Tier = Tier.SOFT) -> pending_release.PendingRelease:
    return pending_release.pending(state, node, Signal.MEMORY, tier=tier, now=node.taken_at, config=CONFIG)


def terminating(name: str, memory: int, *, grace_s: float) -> PodView:
    return view(name, memory, deletion_wall=WALL + grace_s, deletion_grace_s=grace_s)


# --- pending release --------------------------------------------------------------------------------------------------


def test_a_terminating_pod_counts_with_what_its_end_would_free() -> None:
    node = snapshot(terminating("old", 2 * GI, grace_s=20))
    assert pending(observed(InFlightState(), node).state, node) == pending_release.PendingRelease(
        2 * GI, ("shop/old",), (), frozenset({"uid-shop-old"})
    )


def test_a_pod_that_hangs_long_after_its_grace_no_longer_counts() -> None:
    state = observed(InFlightState(), snapshot(terminating("old", 2 * GI, grace_s=20))).state
    for seconds, amount in ((20.0, 2 * GI), (20.0 + in_flight.SLACK_S, 2 * GI), (20.1 + in_flight.SLACK_S, 0)):
        node = snapshot(terminating("old", 2 * GI, grace_s=20), at=NOW + seconds)
        state = observed(state, node).state
        assert pending(state, node).amount == amount


def test_a_jump_of_the_wall_clock_does_not_lengthen_a_grace() -> None:
    state = observed(InFlightState(), snapshot(terminating("old", GI, grace_s=20))).state
    later = snapshot(terminating("old", GI, grace_s=20), at=NOW + 40, wall_time=WALL - 9000)
    assert pending(observed(state, later).state, later).amount == 0


def test_a_grace_can_be_no_longer_than_the_pod_was_given() -> None:
    node = snapshot(terminating("old", GI, grace_s=20), wall_time=WALL - 9000)
    assert observed(InFlightState(), node).state.departing["uid-shop-old"].ends_at == NOW + 20


@pytest.mark.parametrize(("tier", "slow"), [(Tier.SOFT, False), (Tier.HARD, True)])
def test_the_hard_tier_does_not_wait_for_a_long_grace(tier: Tier, slow: bool) -> None:
    node = snapshot(terminating("old", GI, grace_s=25))
    found = pending(observed(InFlightState(), node).state, node, tier)
    assert bool(found.long_grace) is slow
    assert found.amount == (0 if slow else GI)


def test_an_hour_of_grace_is_neither_waited_for_nor_counted() -> None:
    node = snapshot(terminating("old", GI, grace_s=3600))
    assert pending(observed(InFlightState(), node).state, node).amount == 0


def test_an_eviction_in_flight_counts_before_the_api_shows_it() -> None:
    state, node = InFlightState((entry("hog", stage=EvictionStage.PLANNED),)), snapshot(view("hog", 3 * GI), at=NOW + 1)
    assert pending(observed(state, node).state, node).amount == 3 * GI


def test_a_time_out_counts_until_its_time_is_up_and_then_no_longer() -> None:
    state = InFlightState((entry("hog", stage=EvictionStage.UNCERTAIN),))
    node = snapshot(view("hog", GI), at=NOW + 21)
    assert pending(observed(state, node).state, node).amount == GI
    node = snapshot(view("hog", GI), at=NOW + 21.1)
    after = observed(state, node)
    assert pending(after.state, node).amount == 0
    assert after.state.entries == ()
    assert after.state.failures == {}


def test_a_pod_that_is_gone_counts_until_a_sample_is_newer_than_that() -> None:
    state = InFlightState((entry("hog"), entry("other")))  # `other` still there: nothing is measured yet
    gone = snapshot(view("other", MI), at=NOW + 2)
    after = observed(state, gone).state
    assert pending(after, gone).amount == GI + MI
    newer = snapshot(view("other", MI), at=NOW + 3)
    assert pending(observed(after, newer).state, newer).amount == MI


@pytest.mark.parametrize(
    ("usage", "amount"),
    [
        ({"memory_usage": 3 * GI, "memory_file_cache": 5 * MI}, GI),
        ({"memory_usage": 800 * MI, "memory_file_cache": 200 * MI}, 600 * MI),
        ({"memory_usage": 3 * GI, "memory_file_cache": 3 * GI}, 2 * MI),
        ({"memory_usage": 3 * GI, "memory_file_cache": None, "memory_working_set": 700 * MI}, 700 * MI),
        ({"memory_usage": None, "memory_working_set": None}, 2 * MI),
    ],
    ids=["as predicted", "half freed", "page cache", "cgroup v1", "not read"],
)
def test_memory_that_the_kernel_has_unmapped_and_not_freed_counts(usage: dict[str, int | None], amount: int) -> None:
    """As a killed pod with a CPU limit of 1% was seen: anon 0, 1202 MiB in use, MemAvailable unchanged."""
    state = InFlightState((entry("hog"),))
    dying = view("hog", GI, usage_more={"memory_unreclaimable": 2 * MI, **usage})
    for signal in (Signal.MEMORY, Signal.ALLOCATABLE_MEMORY):
        node = snapshot(dying, at=NOW + 1)
        found = pending_release.pending(state, node, signal, tier=Tier.HARD, now=node.taken_at, config=CONFIG)
        assert found.amount == amount
    disk = InFlightState((entry("hog", signal=Signal.NODEFS),))
    assert pending(disk, snapshot(dying, at=NOW + 1)).amount == 2 * MI, "not evicted for its memory"


# --- what entries become ----------------------------------------------------------------------------------------------


def test_a_planned_eviction_with_a_terminating_pod_is_accepted() -> None:
    state = InFlightState((entry("hog", stage=EvictionStage.PLANNED),))
    after = observed(state, snapshot(terminating("hog", GI, grace_s=1), at=NOW + 1))
    assert [each.stage for each in after.state.entries] == [EvictionStage.ACCEPTED]
    assert [each.pod_uid for each in after.confirmed] == ["uid-shop-hog"]


@pytest.mark.parametrize("stage", EvictionStage)
def test_every_eviction_awaits_its_release_except_a_dry_run_and_what_others_are_to_do(stage: EvictionStage) -> None:
    assert in_flight.awaits_release(InFlightState(entries=(entry("one", stage=stage),))) is (
        stage not in (EvictionStage.DRY_RUN, EvictionStage.REQUESTED)
    )


@pytest.mark.parametrize("stage", EvictionStage)
def test_a_soft_eviction_for_the_node_is_in_flight_until_its_pod_is_gone(stage: EvictionStage) -> None:
    one = entry("one", stage=stage, tier=Tier.SOFT)
    over = (EvictionStage.DRY_RUN, EvictionStage.GONE)
    assert in_flight.soft_in_flight(InFlightState((one,))) is (stage not in over)
    for other in (one._replace(tier=Tier.HARD), one._replace(limit="ownLimit")):
        assert not in_flight.soft_in_flight(InFlightState((other,)))


def test_the_snapshot_of_the_decision_itself_changes_nothing() -> None:
    state = InFlightState((entry("hog", stage=EvictionStage.PLANNED),))
    assert observed(state, snapshot()).state.entries == state.entries


@pytest.mark.parametrize(
    ("stage", "request_s"),
    [(EvictionStage.PLANNED, 0.0), (EvictionStage.REQUESTED, 60.0), (EvictionStage.UNCERTAIN, 60.0)],
)
def test_a_cgroup_that_cannot_be_read_once_is_not_taken_for_an_eviction(stage: EvictionStage, request_s: float) -> None:
    state = InFlightState((entry("hog", stage=stage, request_s=request_s),))
    after = observed(state, snapshot(view("hog")._replace(usage=None), at=NOW + 1))
    assert after.state.entries == state.entries
    assert after.confirmed == ()


def test_a_pod_without_a_cgroup_is_gone_after_a_lost_answer_although_the_list_is_older() -> None:
    """The kubelet may have another API server than the agent, whose list stands still."""
    state = InFlightState((entry("hog", stage=EvictionStage.UNCERTAIN),))
    after = observed(state, snapshot(view("hog")._replace(usage=None), at=NOW + 1))
    assert [each.stage for each in after.state.entries] == [EvictionStage.GONE]


# --- measured relief --------------------------------------------------------------------------------------------------


def measure(available: int, *entries: InFlightEviction, state: InFlightState | None = None) -> in_flight.Observed:
    """Victims gone at +2 s, a newer sample at +3 s."""
    first = observed((state or InFlightState())._replace(entries=entries), snapshot(at=NOW + 2))
    assert first.reports == ()
    return observed(first.state, snapshot(at=NOW + 3, available={Signal.MEMORY: available}))


def test_relief_is_measured_by_the_first_sample_after_the_last_victim_was_gone() -> None:
    after = measure(100 * MI + 3 * GI, entry("a"), entry("b", predicted=2 * GI))
    (report,) = after.reports
    assert (report.predicted, report.measured, report.took_s) == (3 * GI, 3 * GI, 3.0)
    assert report.pod_uids == ("uid-shop-a", "uid-shop-b")
    assert after.state == InFlightState()


def test_a_sample_read_before_the_cgroup_was_gone_measures_nothing() -> None:
    state = observed(InFlightState((entry("a"),)), snapshot(at=NOW + 2)).state
    late = snapshot(at=NOW + 3)
    stale = late.observations[Signal.MEMORY]._replace(read_at=NOW + 2)
    after = observed(state, late._replace(observations={**late.observations, Signal.MEMORY: stale}))
    assert after.reports == ()


def test_relief_of_less_than_half_is_a_failure_of_each_eviction() -> None:
    after = measure(100 * MI + GI // 2, entry("a"), entry("b"))
    assert after.state.failures == {"memory.available": Failures(2, NOW + 3)}


def test_relief_of_half_clears_earlier_failures() -> None:
    earlier = InFlightState(failures={"memory.available": Failures(2, NOW), "pid.available": Failures(1, NOW)})
    after = measure(100 * MI + GI, entry("a"), entry("b"), state=earlier)
    assert after.state.failures == {"pid.available": Failures(1, NOW)}


def test_an_accepted_eviction_that_never_ends_is_a_failure() -> None:
    after = observed(InFlightState((entry("hog"),)), snapshot(view("hog", GI), at=NOW + 22))
    assert after.state.failures == {"memory.available": Failures(1, NOW + 22)}


def test_a_failure_counts_once_for_a_pod_that_was_evicted_and_then_shortened() -> None:
    evicted, shortened = entry("hog", until=NOW + 30), entry("hog", plan="a-2", buckets=())
    after = observed(InFlightState((evicted, shortened)), snapshot(view("hog", GI), at=NOW + 22))
    assert after.state.entries == (evicted,)
    assert after.state.failures == {}
    after = observed(after.state, snapshot(view("hog", GI), at=NOW + 31))
    assert after.state.failures == {"memory.available": Failures(1, NOW + 31)}
    after = measure(100 * MI, evicted, shortened)
    assert [report.plan_id for report in after.reports] == ["a-1", "a-2"]
    assert after.state.failures == {"memory.available": Failures(1, NOW + 3)}


def test_a_pod_that_others_deleted_and_that_was_only_shortened_is_no_failed_eviction() -> None:
    shortened = entry("hog", buckets=())
    after = observed(InFlightState((shortened,)), snapshot(view("hog", GI), at=NOW + 22))
    assert after.state == InFlightState()
    assert measure(100 * MI, shortened).state.failures == {}
    together = measure(100 * MI, shortened, entry("other"))
    assert together.state.failures == {"memory.available": Failures(1, NOW + 3)}


def test_the_circuit_breaker_opens_after_enough_failures_and_closes_with_time() -> None:
    state = InFlightState(failures={"memory.available": Failures(3, NOW)})
    assert circuit_breaker.refusal(state.failures, Signal.PID, now=NOW, config=CONFIG) is None
    refusal = circuit_breaker.refusal(state.failures, Signal.MEMORY, now=NOW + 100, config=CONFIG)
    assert refusal is not None
    assert refusal.message == (
        "memory.available: 3 evictions in a row released less than half of the prediction; stopped for 500s more"
    )
    assert circuit_breaker.refusal(state.failures, Signal.MEMORY, now=NOW + 601, config=CONFIG) is None
    assert (
        circuit_breaker.refusal({"memory.available": Failures(2, NOW)}, Signal.MEMORY, now=NOW, config=CONFIG) is None
    )


def test_failures_long_ago_are_not_added_to() -> None:
    earlier = InFlightState(failures={"memory.available": Failures(2, NOW - 700)})
    assert measure(100 * MI, entry("a"), state=earlier).state.failures == {"memory.available": Failures(1, NOW + 3)}


# --- files go after the cgroup ----------------------------------------------------------------------------------------


def on_disk(name: str) -> InFlightEviction:
    return entry(name, signal=Signal.NODEFS, available=GI, predicted=2 * GI, until=NOW + 60)


def disks(at: float, available: int, *, one_device: bool = True) -> NodeSnapshot:
    node = snapshot(at=at, available={Signal.NODEFS: available, Signal.IMAGEFS: available})
    devices = {signal: 1 if one_device or signal is Signal.NODEFS else 2 for signal in (Signal.NODEFS, Signal.IMAGEFS)}
    seen = {**node.observations, **{s: node.observations[s]._replace(device=d) for s, d in devices.items()}}
    return node._replace(observations=seen)


def test_the_files_of_a_gone_pod_are_waited_for_and_count_as_they_come() -> None:
    state = observed(InFlightState((on_disk("filler"),)), disks(NOW + 1, GI)).state
    assert state.entries[0].stage is EvictionStage.GONE
    for at, available, to_come in ((2, GI, 2 * GI), (5, 2 * GI, GI), (6, 2 * GI + 700 * MI, GI - 700 * MI)):
        node = disks(NOW + at, available)
        seen = observed(state, node)
        assert not seen.reports
        found = pending_release.pending(
            seen.state, node, Signal.NODEFS, tier=Tier.HARD, now=node.taken_at, config=CONFIG
        )
        assert found.amount == to_come
        assert pending_release.wait_for_release(seen.state, node, now=node.taken_at, signal=Signal.NODEFS) is not None
    [report] = observed(state, disks(NOW + 7, GI + 1900 * MI)).reports
    assert report.measured == 1900 * MI


def test_files_of_containers_without_a_cgroup_still_count_as_pending() -> None:
    """A container that is killed leaves nothing to measure it by; its files stay until its pod is gone."""
    nothing = DiskUsage(rootfs_bytes=0, logs_bytes=0, volumes_bytes=0)
    emptied = view("filler", 0, usage_more={"disk": nothing})
    filler = on_disk("filler")._replace(pod_uid=emptied.pod.uid)
    node = disks(NOW + 1, GI)._replace(pods=(emptied,))
    state = observed(InFlightState((filler,)), node).state
    assert state.entries[0].stage is EvictionStage.ACCEPTED
    for signal in (Signal.NODEFS, Signal.IMAGEFS):
        found = pending_release.pending(state, node, signal, tier=Tier.HARD, now=node.taken_at, config=CONFIG)
        assert found.amount == 2 * GI
    assert (
        pending_release.pending(state, node, Signal.MEMORY, tier=Tier.HARD, now=node.taken_at, config=CONFIG).amount
        == 0
    )


def test_files_that_never_go_are_waited_for_only_so_long() -> None:
    state = observed(InFlightState((on_disk("filler"),)), disks(NOW + 1, GI)).state
    node = disks(NOW + 1 + in_flight.DISK_RELEASE_S, GI)
    [report] = observed(state, node).reports
    assert report.measured == 0


def test_what_comes_for_one_signal_comes_for_every_signal_of_that_file_system() -> None:
    state = observed(InFlightState((on_disk("filler"),)), disks(NOW + 1, GI)).state
    for one_device, amount in ((True, 2 * GI), (False, 0)):
        node = disks(NOW + 2, GI, one_device=one_device)
        found = pending_release.pending(state, node, Signal.IMAGEFS, tier=Tier.HARD, now=node.taken_at, config=CONFIG)
        assert found.amount == amount


# --- the machine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", sorted(set(EvictionStage) - in_flight.OPEN_STAGES))
def test_an_outcome_changes_nothing_once_another_one_came_first(stage: EvictionStage) -> None:
    answers = {rule.event for rule in outcomes.OUTCOME_RULES.values()}
    if stage is EvictionStage.REQUESTED:  # others may still fail to evict the pod
        answers -= {EvictionEvent.REQUEST_ENDED}
    assert {in_flight.TRANSITIONS[stage, event] for event in answers} == {stage}


def test_the_page_of_the_machine_has_each_answer_after_which_tokens_return() -> None:
    returning = {rule.event for rule in outcomes.OUTCOME_RULES.values() if rule.returns_tokens}
    wanted = {(EvictionStage.PLANNED, event) for event in returning}
    wanted |= {(stage, EvictionEvent.REQUEST_ENDED) for stage in (EvictionStage.UNCERTAIN, EvictionStage.REQUESTED)}
    assert {key for key, text in in_flight.MACHINE.remarks.items() if "tokens return" in text} == wanted


def test_every_kind_of_outcome_has_its_rule_and_a_back_off_its_code() -> None:
    assert set(outcomes.OUTCOME_RULES) == set(OutcomeKind)
    for rule in outcomes.OUTCOME_RULES.values():
        backs_off = rule.api is outcomes.ApiEffect.BACK_OFF or rule.pod_backoff_s is not None
        assert backs_off is (rule.code is not None)


@given(
    st.lists(
        st.sampled_from(["planned", "gone", "unreadable", "terminating", "running", *OutcomeKind]),
        max_size=12,
    )
)
def test_stages_change_only_along_the_table(steps: list[str]) -> None:
    state = InFlightState((entry("hog", stage=EvictionStage.PLANNED),))
    at = NOW
    for step in steps:
        before = state.entries
        at += 1
        if step in set(OutcomeKind):
            if before and before[0].stage in in_flight.OPEN_STAGES:
                event = outcomes.OUTCOME_RULES[OutcomeKind(step)].event
                state = in_flight.apply_outcome(state, before[0], event, now=at)
        else:
            views = {
                "gone": (),
                "unreadable": (view("hog")._replace(usage=None),),
                "terminating": (terminating("hog", GI, grace_s=30),),
            }.get(step, (view("hog", GI),))
            state = observed(state, snapshot(*views, at=at)).state
        reachable = _reachable(before[0].stage) if before else {None}
        assert (state.entries[0].stage if state.entries else None) in reachable


def _reachable(stage: EvictionStage) -> set[EvictionStage | None]:
    """After at most three events: the pod, its time, and its release come with one snapshot."""
    found: set[EvictionStage | None] = {stage}
    for _ in range(3):
        found |= {in_flight.TRANSITIONS[each, event] for each in found if each for event in EvictionEvent}
    return found

"""With `protection.nodeFit` the soft tier evicts only a pod that another node takes; the hard tier does not ask."""

import pytest

from nodeagent.config.schema import Config, ProtectionConfig
from nodeagent.model import NodeFit, NodeFitLookup, Owner, Plan, PodView, Refusal, RefusalCode, Signal
from nodeagent.policy import engine, node_fit
from nodeagent.policy.rate_limits import Backoff
from nodeagent.policy.state import PolicyState, initial
from tests.support import nodes
from tests.support.nodes import GI, MI, NOW, hard, soft


def config(*, on: bool = True) -> Config:
    return nodes.config(soft(), hard(value=256 * MI), protection=ProtectionConfig(node_fit=on))


def read(at: float, node: str = "") -> NodeFit:
    """What was read at a time, on the clock of the tests."""
    return NodeFit(NOW + at, node, "" if node else "none of 3 other nodes takes it (3 too little memory)")


def fat(fit: NodeFit | None, name: str = "web", memory: int = 3 * GI) -> PodView:
    return nodes.view(name, memory, node_fit=fit)


def decide(
    at: float, *pods: PodView, available: int = 900 * MI, on: bool = True, state: PolicyState | None = None
) -> Plan:
    """The second of two decisions, past the grace period."""
    state = state or initial("t", now=NOW)
    for when in (at - 1.0, at):
        seen = nodes.snapshot(*pods, at=NOW + when, available={Signal.MEMORY: available})
        plan, state = engine.decide(seen, state, now=NOW + when, config=config(on=on))
        if when == at - 1.0:
            state = state._replace(in_flight=initial("t", now=NOW).in_flight)
    return plan


def names(plan: Plan) -> list[str | None]:
    return [victim.pod.name for victim in plan.victims]


def codes(plan: Plan) -> list[RefusalCode]:
    return [refusal.code for refusal in plan.refusals]


def wanted(plan: Plan) -> list[str]:
    return [lookup.pod_uid for lookup in plan.node_fit_lookups]


def test_off_by_default_nothing_is_read_or_refused() -> None:
    assert not ProtectionConfig().node_fit
    plan = decide(1, fat(read(0)), on=False)
    assert (names(plan), plan.node_fit_lookups) == (["web"], ())


def test_unknown_is_no_room_however_long_it_lasts() -> None:
    for at in (1.0, 100_000.0):
        plan = decide(at, fat(None))
        assert (names(plan), codes(plan), wanted(plan)) == ([], [RefusalCode.WAITS_FOR_NODES], ["uid-shop-web"])
    assert plan.refusals[0].message == (
        "shop/web: whether another node takes it is unknown (not read yet); no limit in time in the soft tier"
    )


def test_why_it_cannot_be_read_is_in_the_message() -> None:
    plan = decide(400, fat(read(50, "worker-1")._replace(trouble="HTTP 403: no")))
    assert (names(plan), codes(plan)) == ([], [RefusalCode.WAITS_FOR_NODES])
    assert "is unknown (HTTP 403: no; the last reading is 5m 50s old)" in plan.refusals[0].message


def test_a_pod_that_another_node_takes_is_evicted() -> None:
    plan = decide(5, fat(read(4, "worker-1")))
    assert (names(plan), wanted(plan)) == (["web"], ["uid-shop-web"]), "it is read again while it is the choice"


def test_a_pod_that_no_node_takes_is_out_of_reach_and_still_read() -> None:
    plan = decide(5, fat(read(4)))
    assert (names(plan), wanted(plan)) == ([], ["uid-shop-web"])
    [refusal] = plan.ranking[0].refusals
    assert refusal.code is RefusalCode.NO_NODE_FITS
    assert refusal.message == "none of 3 other nodes takes it (3 too little memory)"


def test_the_next_pods_in_the_order_are_read_as_well_and_protected_ones_are_not() -> None:
    young = nodes.view("young", 2 * GI, age_s=1.0)
    plan = decide(5, fat(None), fat(None, "next", GI), young)
    assert wanted(plan) == ["uid-shop-web", "uid-shop-next"]


@pytest.mark.parametrize("at", [-200.0, 100.0], ids=["too old", "of the future"])
def test_an_old_reading_counts_as_none(at: float) -> None:
    for fit in (read(at, "worker-1"), read(at)):
        plan = decide(99, fat(fit)) if at > 0 else decide(at + node_fit.FRESH_S + 1.5, fat(fit))
        assert (names(plan), codes(plan)) == ([], [RefusalCode.WAITS_FOR_NODES])


def test_a_reading_from_before_our_last_eviction_counts_as_none() -> None:
    """The room may be that of the last victim's replacement, whoever its owner is."""
    state = initial("t", now=NOW)
    backoff = Backoff(1, NOW + 10.0, NOW + 10.0, RefusalCode.OWNER_BACKOFF, "")
    state = state._replace(rate_limits=state.rate_limits._replace(owners={"uid-another": backoff}))
    since = 10.0 + node_fit.SETTLE_S
    before = decide(30, fat(read(since - 0.1, "worker-1")), state=state)
    assert codes(before) == [RefusalCode.WAITS_FOR_NODES]
    assert before.node_fit_lookups == (NodeFitLookup("uid-shop-web", NOW + since),)
    assert names(decide(30, fat(read(since, "worker-1")), state=state)) == ["web"]


def test_the_hard_tier_asks_no_other_node() -> None:
    for fit in (None, read(4), NodeFit(trouble="no")):
        plan = decide(5, fat(fit), available=100 * MI)
        assert (names(plan), plan.node_fit_lookups) == (["web"], ())


def test_a_smaller_pod_is_evicted_in_its_place_only_if_it_clears_the_deficit() -> None:
    small = nodes.view("tiny", 50 * MI, node_fit=read(4, "worker-1"))
    assert names(decide(5, fat(read(4)), small)) == []


def test_room_is_asked_for_before_the_owner_and_before_an_eviction_slot() -> None:
    """A wait without an end must not hold what other nodes of the zone wait for."""
    settings = ProtectionConfig(node_fit=True, replacement_wait_s=600.0)
    slot = Refusal(RefusalCode.WAITS_FOR_LEASE, "the slots are taken")

    def decided(fit: NodeFit | None) -> Plan:
        view = nodes.view("web", 3 * GI, owner=Owner("ReplicaSet", "web", "rs"), node_fit=fit)
        state = initial("t", now=NOW)
        for when in (4.0, 5.0):
            seen = nodes.snapshot(view, at=NOW + when, available={Signal.MEMORY: 900 * MI})
            plan, state = engine.decide(
                seen._replace(soft_tier_blocked_by=slot),
                state,
                now=NOW + when,
                config=nodes.config(soft(), hard(value=256 * MI), protection=settings),
            )
        return plan

    unknown = decided(None)
    assert (codes(unknown), len(unknown.node_fit_lookups)) == ([RefusalCode.WAITS_FOR_NODES], 1)
    assert not RefusalCode.WAITS_FOR_NODES.wants_slot
    fitting = decided(read(4, "worker-1"))
    assert (codes(fitting), len(fitting.node_fit_lookups)) == ([RefusalCode.WAITS_FOR_LEASE], 1)


def test_what_is_read_at_once_is_bounded() -> None:
    plan = decide(5, *[fat(None, f"p{number}", GI) for number in range(30)])
    assert len(plan.node_fit_lookups) == node_fit.MAX_LOOKUPS


def test_the_pod_to_evict_of_every_due_threshold_is_read_first() -> None:
    settings = nodes.config(
        soft(), soft(Signal.PID, value=4096), protection=ProtectionConfig(node_fit=True, replacement_wait_s=600.0)
    )
    available: dict[Signal, int | None] = {Signal.MEMORY: 900 * MI, Signal.PID: 1000}
    pods = [fat(None, f"p{number}", GI) for number in range(12)]
    forks = nodes.view("forks", MI, usage_more={"process_count": 8000, "thread_count": 8000})
    state = initial("t", now=NOW)
    for when in (4.0, 5.0):
        seen = nodes.snapshot(*pods, forks, at=NOW + when, available=available)
        plan, state = engine.decide(seen, state, now=NOW + when, config=settings)
    assert set(codes(plan)) == {RefusalCode.WAITS_FOR_NODES}
    assert wanted(plan)[0].startswith("uid-shop-p")
    assert wanted(plan)[1] == "uid-shop-forks"
    assert len(wanted(plan)) == len(set(wanted(plan))) == node_fit.MAX_LOOKUPS

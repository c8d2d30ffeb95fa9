"""The soft tier spares the pods of an owner that lacks replicas, for a bounded time; the hard tier does not."""

from typing import Any

import pytest

from nodeagent.config.schema import Config, ProtectionConfig
from nodeagent.model import NoteKind, Owner, OwnerLookup, OwnerReplicas, Plan, PodView, RefusalCode, Signal
from nodeagent.policy import engine, replacement
from nodeagent.policy.rate_limits import Backoff
from nodeagent.policy.state import PolicyState, initial
from tests.support import nodes
from tests.support.nodes import GI, MI, NOW, hard, soft

WAIT_S = 600.0
DB = Owner("StatefulSet", "db", "uid-db")
LOOKUP = OwnerLookup("shop", DB)


def config(wait_s: float = WAIT_S) -> Config:
    return nodes.config(soft(), hard(value=256 * MI), protection=ProtectionConfig(replacement_wait_s=wait_s))


def read(at: float, ready: int, *, desired: int = 3, since: float | None = None, asked: float = 0.0) -> OwnerReplicas:
    """What was read at a time, on the clock of the tests."""
    incomplete = None if ready >= desired else NOW + (at if since is None else since)
    return OwnerReplicas(NOW + asked, NOW + at, desired, ready, incomplete)


def fat(replicas: OwnerReplicas | None, name: str = "db-0", memory: int = 3 * GI, **more: Any) -> PodView:
    return nodes.view(name, memory, owner=DB, replicas=replicas, **more)


def decide(
    at: float, *pods: PodView, available: int = 900 * MI, wait_s: float = WAIT_S, state: PolicyState | None = None
) -> Plan:
    """The second of two decisions, past the grace period."""
    state = state or initial("t", now=NOW)
    for when in (at - 1.0, at):
        seen = nodes.snapshot(*pods, at=NOW + when, available={Signal.MEMORY: available})
        plan, state = engine.decide(seen, state, now=NOW + when, config=config(wait_s))
        if when == at - 1.0:
            state = state._replace(in_flight=initial("t", now=NOW).in_flight)
    return plan


def names(plan: Plan) -> list[str | None]:
    return [victim.pod.name for victim in plan.victims]


def codes(plan: Plan) -> list[RefusalCode]:
    return [refusal.code for refusal in plan.refusals]


def test_off_by_default_nothing_is_read_or_waited_for() -> None:
    assert ProtectionConfig().replacement_wait_s == 0
    plan = decide(1, fat(read(1, ready=0)), wait_s=0.0)
    assert (names(plan), plan.owner_lookups) == (["db-0"], ())


def test_the_owner_of_the_victim_is_read_before_the_eviction() -> None:
    plan = decide(1, fat(None))
    assert (names(plan), codes(plan), plan.owner_lookups) == ([], [RefusalCode.WAITS_FOR_OWNER], (LOOKUP,))
    assert plan.refusals[0].message == (
        "shop/db-0: its owner StatefulSet db is unknown (not read yet); waiting up to 600s"
    )
    assert names(decide(5, fat(read(4, ready=3)))) == ["db-0"]


def test_a_pod_whose_owner_lacks_replicas_is_spared_and_its_owner_is_still_read() -> None:
    plan = decide(5, fat(read(4, ready=2)))
    assert (names(plan), plan.owner_lookups) == ([], (LOOKUP,))
    [refusal] = plan.ranking[0].refusals
    assert refusal.code is RefusalCode.OWNER_INCOMPLETE
    assert refusal.message == (
        "its owner StatefulSet db lacks 1 of 3 replicas on other nodes; waiting up to 599s for its replacement"
    )


def test_replicas_of_this_node_that_are_not_ready_are_placed_and_do_not_count() -> None:
    """Also the victim itself: a pod that fills the memory may have become unready by that."""
    assert names(decide(5, fat(read(4, ready=2), ready=False))) == ["db-0"]
    waiting = decide(5, fat(read(4, ready=1), ready=False))
    assert names(waiting) == []


def test_the_wait_for_a_replacement_ends_and_a_note_says_so() -> None:
    old = read(600, ready=2, since=1.0)
    assert names(decide(600.5, fat(old))) == []
    plan = decide(601.5, fat(old))
    assert names(plan) == ["db-0"]
    [note] = [note.message for note in plan.notes if note.kind is NoteKind.OWNERS]
    assert note.startswith("shop/db-0: its owner StatefulSet db lacks 1 of 3 replicas on other nodes, for more than 10")
    assert note.endswith(": no longer waited for")


def test_the_wait_for_an_owner_that_cannot_be_read_ends_too() -> None:
    unknown = OwnerReplicas(NOW, trouble="HTTP 403: no")
    plan = decide(599, fat(unknown))
    assert (names(plan), codes(plan)) == ([], [RefusalCode.WAITS_FOR_OWNER])
    assert "is unknown (HTTP 403: no); waiting up to 1s" in plan.refusals[0].message
    late = decide(601, fat(unknown))
    assert names(late) == ["db-0"]
    assert any("HTTP 403: no" in note.message and "no longer waited for" in note.message for note in late.notes)


@pytest.mark.parametrize("at", [100.0, -100.0], ids=["too old", "of the future"])
def test_an_old_reading_counts_as_none(at: float) -> None:
    plan = decide(200, fat(read(at if at > 0 else 300, ready=3, asked=200)))
    assert (names(plan), codes(plan)) == ([], [RefusalCode.WAITS_FOR_OWNER])


@pytest.mark.parametrize("key", [DB.uid, f"own-limit/{DB.uid}"], ids=["for the node", "for its own limit"])
def test_a_reading_from_before_our_last_eviction_of_the_owner_counts_as_none(key: str) -> None:
    state = initial("t", now=NOW)
    backoff = Backoff(1, NOW + 10.0, NOW + 10.0, RefusalCode.OWNER_BACKOFF, "")
    state = state._replace(rate_limits=state.rate_limits._replace(owners={key: backoff}))
    before = decide(20, fat(read(12, ready=3)), state=state)
    assert codes(before) == [RefusalCode.WAITS_FOR_OWNER], "the controller may not have written its status yet"
    assert names(decide(20, fat(read(10 + replacement.SETTLE_S, ready=3)), state=state)) == ["db-0"]
    # Its wait begins with the eviction, although a replica was missing before.
    waiting = decide(605, fat(read(604, ready=2, since=1.0)), state=state)
    assert "waiting up to 5s" in waiting.ranking[0].refusals[0].message


def test_an_owner_that_becomes_unknown_is_waited_for_from_its_last_reading() -> None:
    ready = read(900, ready=3)._replace(trouble="HTTP 500: no")
    assert "is unknown (HTTP 500: no); waiting up to 560s" in decide(940, fat(ready)).refusals[0].message
    assert codes(decide(1499, fat(ready))) == [RefusalCode.WAITS_FOR_OWNER]
    assert names(decide(1501, fat(ready))) == ["db-0"]


def test_an_owner_that_becomes_unknown_is_waited_for_from_our_last_eviction() -> None:
    """Its replica was missing for the whole wait, so that a pod was evicted, and no reading succeeded after that."""
    state = initial("t", now=NOW)
    backoff = Backoff(1, NOW + 601.0, NOW + 601.0, RefusalCode.OWNER_BACKOFF, "")
    state = state._replace(rate_limits=state.rate_limits._replace(owners={DB.uid: backoff}))
    unknown = read(600, ready=2, since=0.0)._replace(trouble="HTTP 500: no")
    waiting = decide(660, fat(unknown), state=state)
    assert (names(waiting), codes(waiting)) == ([], [RefusalCode.WAITS_FOR_OWNER])
    assert "is unknown (HTTP 500: no); waiting up to 541s" in waiting.refusals[0].message
    assert names(decide(1202, fat(unknown), state=state)) == ["db-0"]


def test_the_owner_of_a_less_urgent_threshold_is_read_too() -> None:
    """Memory leaks outside the pods; PIDs have a victim."""
    settings = nodes.config(
        soft(),
        soft(Signal.PID, value=4096),
        protection=ProtectionConfig(replacement_wait_s=WAIT_S),
    )
    available: dict[Signal, int | None] = {Signal.MEMORY: 600 * MI, Signal.PID: 1000}

    def decided(replicas: OwnerReplicas | None) -> Plan:
        view = fat(replicas, memory=10 * MI, usage_more={"process_count": 8000, "thread_count": 8000})
        state = initial("t", now=NOW)
        for when in (4.0, 5.0):
            seen = nodes.attributed(nodes.snapshot(view, at=NOW + when, available=available))
            plan, state = engine.decide(seen, state, now=NOW + when, config=settings)
        return plan

    unknown = decided(None)
    assert set(codes(unknown)) == {RefusalCode.FUTILE, RefusalCode.WAITS_FOR_OWNER}
    assert unknown.acting_on is not None
    assert (unknown.acting_on.threshold.signal, unknown.owner_lookups) == (Signal.MEMORY, (LOOKUP,))
    assert names(decided(read(4, ready=3))) == ["db-0"]


def test_the_hard_tier_waits_for_no_owner() -> None:
    for replicas in (None, read(4, ready=0), OwnerReplicas(NOW, trouble="no")):
        plan = decide(5, fat(replicas), available=100 * MI)
        assert (names(plan), plan.owner_lookups) == (["db-0"], ())


def test_a_smaller_pod_is_evicted_in_its_place_only_if_it_clears_the_deficit() -> None:
    owned = fat(read(4, ready=2))
    assert names(decide(5, owned, nodes.view("tiny", 50 * MI))) == []


@pytest.mark.parametrize(
    "owner",
    [None, Owner("Job", "j", "u", "batch/v1"), Owner("ReplicaSet", "r", "u", "other.example/v1")],
)
def test_owners_of_other_kinds_are_not_read(owner: Owner | None) -> None:
    of = nodes.pod("x", owner=owner)
    assert replacement.owner_lookup(of) is None


def test_what_is_read_at_once_is_bounded() -> None:
    pods = [nodes.pod(f"p{number}") for number in range(100)]
    assert len(replacement.lookups(pods, config=config())) == replacement.MAX_LOOKUPS
    assert replacement.lookups(pods, config=config(0.0)) == ()


def test_of_two_evictions_of_the_owner_the_later_one_counts() -> None:
    earlier, later = (Backoff(1, NOW + at, NOW + at, RefusalCode.OWNER_BACKOFF, "") for at in (1.0, 10.0))
    for node_s, own_s in ((earlier, later), (later, earlier)):
        state = initial("t", now=NOW)
        owners = {DB.uid: node_s, f"own-limit/{DB.uid}": own_s}
        state = state._replace(rate_limits=state.rate_limits._replace(owners=owners))
        plan = decide(20, fat(read(12, ready=3)), state=state)
        assert (names(plan), codes(plan)) == ([], [RefusalCode.WAITS_FOR_OWNER])

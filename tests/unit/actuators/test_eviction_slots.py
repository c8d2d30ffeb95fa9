"""The zone's eviction slots: never too many, none for ever, however far apart the clocks are."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.actuators.eviction_slots import EvictionSlots
from nodeagent.config.schema import EvictionRequestConfig, Mode
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.transport import Transport, connect
from nodeagent.model import Outcome, OutcomeKind, Refusal, RefusalCode, Signal, Tier
from nodeagent.policy import engine, outcomes
from nodeagent.policy import state as policy_state
from tests.fake_kube import ApiServer
from tests.support import nodes

Make = Callable[..., EvictionSlots]


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server


@pytest.fixture
def transport(api: ApiServer, tmp_path: Path) -> Iterator[Transport]:
    made = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))), request_timeout_s=5.0)
    yield made
    made.close()


@pytest.fixture
def node(transport: Transport) -> Iterator[Make]:
    made: list[EvictionSlots] = []

    def make(name: str, *, zone: str | None = "eu-1a", slots: int = 1, **more: Any) -> EvictionSlots:
        settings: dict[str, Any] = {
            "namespace": "nodeagent",
            "duration_s": 15.0,
            "keep_s": 60.0,
            "poll_s": (0.05, 0.1),
        }
        made.append(EvictionSlots(transport, holder=name, zone=lambda: zone, slots=slots, **(settings | more)))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.stop(clear=False)


def eventually(holds: Callable[[], object], *, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        threading.Event().wait(0.005)


def wants(agent: EvictionSlots) -> bool:
    """Want a slot; True if the agent has one."""
    agent.want()
    return agent.held()


def leases(api: ApiServer) -> dict[str, str]:
    """Holder by name."""
    with api.store.changed:
        return {name: entry["spec"]["holderIdentity"] for (_, name), entry in api.store.objects["leases"].items()}


def test_nothing_is_sent_before_the_soft_tier_would_act(api: ApiServer, node: Make) -> None:
    agent = node("a")
    threading.Event().wait(0.1)
    assert not api.requests
    assert not agent.held()


def test_a_slot_is_created_in_the_nodes_zone_and_renewed(api: ApiServer, node: Make) -> None:
    agent = node("a", zone="EU_West/1a", duration_s=1.0)
    agent.want()
    eventually(agent.held)
    assert leases(api) == {"nodeagent-evictions-eu-west-1a-0": "a"}
    assert api.wait_for(lambda: len(api.sent("PUT")) >= 3, 30), "renewed three times in a second each"
    eventually(agent.held)
    eventually(lambda: not agent.reason)


def test_nodes_without_a_zone_share_slots(api: ApiServer, node: Make) -> None:
    agent = node("a", zone="")
    agent.want()
    eventually(agent.held)
    assert list(leases(api)) == ["nodeagent-evictions-nozone-0"]


def test_while_the_zone_is_unknown_there_is_no_slot(api: ApiServer, node: Make) -> None:
    agent = node("a", zone=None)
    agent.want()
    eventually(lambda: "zone" in agent.reason)
    assert not api.requests
    assert not agent.held()


def test_the_next_node_acquires_a_slot_that_is_released(api: ApiServer, node: Make) -> None:
    first, second = node("a", keep_s=0.3), node("b")
    eventually(lambda: wants(first))
    second.want()
    eventually(lambda: wants(first) and "taken, by a" in second.reason)
    eventually(second.held)
    assert not first.held()
    assert leases(api) == {"nodeagent-evictions-eu-1a-0": "b"}


def test_a_clean_exit_releases_the_slot(api: ApiServer, node: Make) -> None:
    agent = node("a")
    agent.want()
    eventually(agent.held)
    agent.stop()
    assert leases(api) == {"nodeagent-evictions-eu-1a-0": ""}


def test_a_restarted_agent_finds_its_slot_again_and_acquires_no_second_one(api: ApiServer, node: Make) -> None:
    first = node("a", slots=3)
    first.want()
    eventually(first.held)
    first.stop(clear=False)
    second = node("a", slots=3)
    second.want()
    eventually(second.held)
    assert list(leases(api).values()) == ["a"]


@pytest.mark.parametrize("renewed", ["1970-01-01T00:00:00.000000Z", "2100-01-01T00:00:00.000000Z"])
def test_a_dead_nodes_slot_is_taken_over_after_its_duration_on_the_local_clock(
    api: ApiServer, node: Make, renewed: str
) -> None:
    spec = {"holderIdentity": "dead", "leaseDurationSeconds": 1, "renewTime": renewed, "acquireTime": renewed}
    api.store.put(
        "leases", {"metadata": {"name": "nodeagent-evictions-eu-1a-0", "namespace": "nodeagent"}, "spec": spec}, "ADDED"
    )
    agent = node("a")
    began = time.monotonic()
    agent.want()
    eventually(agent.held)
    assert time.monotonic() - began >= 1.0, "a whole duration from when we saw it first"


def test_a_holder_of_every_lease_counts_only_for_the_last_written_one(api: ApiServer, node: Make) -> None:
    spec = {"holderIdentity": "greedy", "leaseDurationSeconds": 3600}
    for name in ("eu-1a-0", "eu-1a-1", "eu-1b-0"):
        api.store.put(
            "leases", {"metadata": {"name": f"nodeagent-evictions-{name}", "namespace": "nodeagent"}, "spec": spec}, ""
        )
    agents = [node(name, slots=2) for name in ("a", "b")]
    for agent in agents:
        agent.want()
    eventually(lambda: all(agent.held() for agent in agents))
    last = node("c", zone="eu-1b")
    last.want()
    eventually(lambda: "taken, by greedy" in last.reason)
    assert leases(api)["nodeagent-evictions-eu-1b-0"] == "greedy"


def test_a_stale_lease_in_another_zone_does_not_cost_its_holder_the_new_one(api: ApiServer, node: Make) -> None:
    spec = {"holderIdentity": "a", "leaseDurationSeconds": 3600}
    left = {"metadata": {"name": "nodeagent-evictions-eu-1z-0", "namespace": "nodeagent"}, "spec": spec}
    api.store.put("leases", left, "ADDED")
    holder, other = node("a"), node("b")
    holder.want()
    eventually(holder.held)
    other.want()
    eventually(lambda: "taken, by a" in other.reason)
    assert holder.held()
    assert leases(api)["nodeagent-evictions-eu-1a-0"] == "a"


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_a_node_with_a_clock_an_hour_off_takes_no_slot_of_a_live_holder(transport: Transport, ahead_s: float) -> None:
    # Stepped in this thread, through ten durations of 15 s.
    now = [10_000.0]
    holder, other = (
        EvictionSlots(
            transport,
            holder=name,
            zone=lambda: "eu-1a",
            slots=1,
            namespace="nodeagent",
            duration_s=15.0,
            keep_s=1000.0,
            poll_s=(0.05, 0.1),
            clock=clock,
        )
        for name, clock in (("a", lambda: now[0]), ("b", lambda: now[0] + ahead_s))
    )
    holder.want()
    other.want()
    attempts = 0
    for _ in range(300):
        now[0] += 0.5
        if holder.wait_s() <= 0:
            holder.step()
        if holder.held() and other.wait_s() <= 0:
            other.step()
            attempts += 1
        assert not other.held()
        assert holder.held()
    assert attempts > 200, "the other has tried all the time"


class Evicting:
    """A node whose agent decides and evicts, with its slot; both are stepped in this thread."""

    def __init__(self, name: str, transport: Transport, clock: Callable[[], float], kind: OutcomeKind) -> None:
        requests = EvictionRequestConfig(enabled=kind is OutcomeKind.REQUESTED, deadline_s=120.0)
        self.config = nodes.config(
            nodes.soft(), nodes.hard(value=nodes.MI), mode=Mode.ENFORCE, eviction_max_pod_grace_period_s=120.0,
            eviction_request=requests,
        )  # fmt: skip
        self.kind, self.clock = kind, clock
        self.state = policy_state.initial(name, now=clock())
        self.available = 900 * nodes.MI
        self.leaves_at = float("inf")
        self.slots = EvictionSlots(
            transport,
            holder=name,
            zone=lambda: "eu-1a",
            slots=1,
            namespace="nodeagent",
            duration_s=60.0,
            clock=clock,
        )

    @property
    def evicts(self) -> bool:
        return self.clock() < self.leaves_at < float("inf")

    def sync(self) -> None:
        now = self.clock()
        wait = None if self.slots.held() else Refusal(RefusalCode.WAITS_FOR_LEASE, self.slots.reason)
        pods = (nodes.view("hog", 4 * nodes.GI, termination_grace_s=120.0),) if now < self.leaves_at else ()
        available = self.available if pods else 8 * nodes.GI
        seen = nodes.snapshot(*pods, at=now, available={Signal.MEMORY: available}, soft_tier_blocked_by=wait)
        seen = seen._replace(eviction_requests=self.config.eviction_request.enabled)
        plan, self.state = engine.decide(seen, self.state, now=now, config=self.config)
        for victim in plan.victims:
            assert victim.tier is Tier.SOFT
            self.leaves_at = now + 100.0
            outcome = Outcome(plan.id, victim.pod.uid, self.kind, "", now)
            self.state = outcomes.apply_outcome(self.state, outcome, now=now, config=self.config)
        if plan.wants_slot:
            self.slots.want()
        if self.slots.wait_s() <= 0:
            self.slots.step()


@pytest.mark.parametrize(
    ("kind", "recovers"),
    [
        (OutcomeKind.ACCEPTED, False),
        (OutcomeKind.ACCEPTED, True),
        (OutcomeKind.TIMED_OUT, True),
        (OutcomeKind.REQUESTED, False),
    ],
)
def test_a_node_keeps_its_slot_until_the_evicted_pod_is_gone(
    transport: Transport, kind: OutcomeKind, recovers: bool
) -> None:
    now = [nodes.NOW]
    fleet = [Evicting(name, transport, lambda: now[0], kind) for name in ("a", "b", "c")]
    most, evicted = 0, set()
    for _ in range(480):
        now[0] += 1.0
        for each in fleet:
            each.sync()
            if each.evicts and recovers:
                each.available = 8 * nodes.GI
        evicting = [n for n, each in enumerate(fleet) if each.evicts]
        most = max(most, len(evicting))
        evicted.update(evicting)
    assert most == 1
    assert evicted == {0, 1, 2}


def test_a_node_without_connection_gives_up_its_slot_before_another_may_take_it(api: ApiServer, node: Make) -> None:
    cut_off, other = node("a", duration_s=1.0), node("b", duration_s=1.0)
    cut_off.want()
    eventually(cut_off.held)
    other.want()
    eventually(lambda: "taken, by a" in other.reason)
    api.forbid("update", "leases")
    deadline = time.monotonic() + 60
    gave_up = False
    while not other.held():
        assert time.monotonic() < deadline, "no agent gives up, no agent takes over"
        if not gave_up and not cut_off.held():
            gave_up = True
            api.allow("update", "leases")
            cut_off.stop(clear=False)
        threading.Event().wait(0.002)
    assert not cut_off.held(), "read after the other agent had taken it"


def test_of_two_writers_of_one_slot_the_slower_is_refused_and_tries_the_next(api: ApiServer, node: Make) -> None:
    slow, fast = node("a"), node("b")
    slow.stop(clear=False)
    fast.stop(clear=False)
    fast._create("nodeagent-evictions-eu-1a-0")
    fast._release(timeout_s=None)
    name = "nodeagent-evictions-eu-1a-0"
    lease = slow._list(frozenset([name]))[name]
    assert fast._write(fast._list(frozenset([name]))[name], holder="b")
    assert not slow._write(lease, holder="a")
    assert not slow._create(name)
    assert leases(api) == {name: "b"}


def test_never_more_nodes_have_a_slot_than_there_are_slots(api: ApiServer, node: Make) -> None:
    api.delay_s = 0.01
    agents = [node(f"node-{n}", slots=2, keep_s=0.15) for n in range(6)]
    had: set[int] = set()
    deadline = time.monotonic() + 60
    while len(had) < len(agents):
        assert time.monotonic() < deadline, had
        # An agent with a slot before and after the pass had it all the time: no agent wants a second one.
        before = {n for n, agent in enumerate(agents) if agent.held()}
        holders = {n for n in before if agents[n].held()}
        assert len(holders) <= 2, holders
        had.update(before)
        for n, agent in enumerate(agents):
            if n not in had:
                agent.want()
        threading.Event().wait(0.002)
    assert set(leases(api)) <= {"nodeagent-evictions-eu-1a-0", "nodeagent-evictions-eu-1a-1"}


def test_without_the_right_there_is_no_slot_and_the_reason_states_it(api: ApiServer, node: Make) -> None:
    api.forbid("list", "leases")
    agent = node("a")
    agent.want()
    eventually(lambda: "forbidden" in agent.reason)
    assert not agent.held()

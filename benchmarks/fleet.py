"""API requests of a fleet: `python -m benchmarks.fleet [nodes [part of a scenario's name]]`.

The default is 5,000 nodes, which takes one or two minutes for each scenario.

First, one real node. `calm`: the workers of an agent against the HTTP double, with every period divided by
`COMPRESSION` (watches, heartbeats; the server sends bookmarks), counted and scaled to an hour. `episode`: a session
under pressure: taint, PDBs, Events, one eviction, recovery. Both run as the own node (`cluster.identity`); the requests
are the same without. Authorization checks are counted from the requests: one for each, and for each that impersonates
the node at most two more (`impersonate-on:...` for the request, `impersonate:associated-node`). The API server keeps
the second for 10 s and for all nodes of the account, so that in a fleet one more is left.

Then a simulation of the fleet: on every node memory falls below the soft threshold within the same second, as after a
faulty release, and recovers when one pod is gone. Simulated: the clock. Real: the decisions with damping, jitter, rate
limits and back-off (`policy.engine`), the back-off of every writer (`kube.backoff`) and the eviction slots
(`actuators.eviction_slots`, on a transport that is a function call). Modelled: the writers. A condition change is one
PATCH of the node's status, one PATCH of its taints and one Event. A kubelet resets a foreign True every 10 s, each in
its own phase, and one PATCH sets it again. Near a threshold four connections are opened, and the PDBs of five
namespaces are listed and watched, with the session's spread. The server replies 429 with Retry-After 1 above its
capacity. Latency and other clients are not modelled.
"""

import contextlib
import heapq
import itertools
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nodeagent.actuators.api_writers import EVENT_SPREAD_S
from nodeagent.actuators.conditions import NodeConditions
from nodeagent.actuators.eviction_slots import EvictionSlots
from nodeagent.actuators.session import PDB_SPREAD_S, TAINT_WAIT_S, ClusterSession
from nodeagent.config import load
from nodeagent.config.defaults import EVICTION_SOFT_GRACE_PERIOD
from nodeagent.config.schema import (
    ClusterIdentity,
    ConditionsConfig,
    Config,
    DampingConfig,
    FleetConfig,
    Mode,
    StandardConditions,
    StartupConfig,
)
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.api_responses import Response
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.list_watch import WATCH_S
from nodeagent.kube.node_identity import Identity
from nodeagent.kube.node_watch import NodeWatch
from nodeagent.kube.pod_watch import PodWatch
from nodeagent.kube.transport import connect
from nodeagent.model import (
    Amount,
    ConditionStatus,
    ConditionType,
    ConditionVerdict,
    DiskLayout,
    Method,
    NodeMemory,
    NodeSnapshot,
    Observation,
    Outcome,
    OutcomeKind,
    Owner,
    Plan,
    Pod,
    PodSource,
    PodUsage,
    PodView,
    QOSClass,
    Refusal,
    RefusalCode,
    Signal,
    Threshold,
    Tier,
    Victim,
)
from nodeagent.policy import engine, outcomes, state
from nodeagent.policy.candidates import RankingCache
from tests.fake_kube import ApiServer, Request, pod

MI, GI = 1 << 20, 1 << 30
COMPRESSION = 30.0
MEASURED_S = 60.0
NODES = 5000
ZONES = 3
HORIZON_S = 420.0
SYNC_S = 10.0
"""Mean time between two decisions under pressure. A real agent decides more often, but sends no more requests."""
GRACE_S = EVICTION_SOFT_GRACE_PERIOD[Signal.MEMORY]
GONE_AFTER_S = 10.0
KUBELET_S = 10.0
NAMESPACES = 5
PREWARMED_CONNECTIONS = 4

_VERBS = {"GET": "get", "POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}


# --- one node, for real ----------------------------------------------------------------------------------------------


def kind_of(request: Request) -> str:
    """`watch pods`, `patch nodes/status` ..."""
    parts = request.path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    if not parts:
        return "get version"
    if parts[0] == "namespaces":
        parts = parts[2:]
    verb = _VERBS[request.method]
    if verb == "get" and len(parts) == 1:
        verb = "watch" if "watch" in request.query else "list"
    return f"{verb} {'/'.join([parts[0], *parts[2:]])}"


class Traffic(NamedTuple):
    """Requests of one node."""

    kinds: Counter[str]
    impersonated: Counter[str]
    """Those of them that are sent as the node."""

    @property
    def all(self) -> int:
        return sum(self.kinds.values())

    def checks(self, more: int) -> int:
        """Authorization checks, with this many more for each request as the node."""
        return self.all + more * sum(self.impersonated.values())

    def scaled(self, by: float) -> "Traffic":
        return Traffic(*(Counter({kind: round(count * by) for kind, count in each.items()}) for each in self))


def traffic_of(requests: Iterable[Request]) -> Traffic:
    requests = tuple(requests)
    as_node = (request for request in requests if "impersonate-user" in request.headers)
    return Traffic(Counter(map(kind_of, requests)), Counter(map(kind_of, as_node)))


def calm() -> Traffic:
    """Requests per hour of a calm node."""
    with ApiServer(bookmark_s=60.0 / COMPRESSION) as api, tempfile.TemporaryDirectory() as directory:
        api.token_nodes[api.token] = api.node_name
        transport = connect(find_credentials(str(api.kubeconfig(Path(directory) / "kubeconfig"))))
        transport.impersonation.act_as(api.node_name, ClusterIdentity.AUTO)
        node = NodeWatch(transport, api.node_name, watch_s=WATCH_S / COMPRESSION)
        conditions = NodeConditions(transport, node, heartbeat_s=ConditionsConfig().heartbeat_s / COMPRESSION)
        pods = PodWatch(transport, api.node_name, watch_s=WATCH_S / COMPRESSION)
        for part in (node, conditions, pods):
            part.start()
        conditions.publish([verdict(ConditionStatus.FALSE)])
        threading.Event().wait(2.0)  # without the requests of the start
        before = len(api.requests)
        threading.Event().wait(MEASURED_S)
        counted = traffic_of(api.requests[before:])
        for stopping in (conditions, pods, node):
            stopping.stop()
    return counted.scaled(3600.0 / (MEASURED_S * COMPRESSION))


def episode() -> Traffic:
    """Requests of one node that evicts one pod and recovers, with eviction slots."""
    hog = pod("hog", uid="uid-hog", owner=("ReplicaSet", "hog"))
    with ApiServer(pods=[hog], linger_s=0.2) as api, tempfile.TemporaryDirectory() as directory:
        api.token_nodes[api.token] = api.node_name
        transport = connect(find_credentials(str(api.kubeconfig(Path(directory) / "kubeconfig"))))
        config = Config(mode=Mode.ENFORCE, fleet=FleetConfig(max_concurrent_evictions=20))
        session = ClusterSession(transport, config, Identity(api.node_name, "benchmark"), wake=lambda: None)
        session.start()
        session.publish([verdict(ConditionStatus.FALSE)])
        until(lambda: session.pods().synced_at is not None)
        session.publish([verdict(ConditionStatus.FALSE)])
        until(lambda: api.condition("NodeAgentMemoryPressure") is not None)
        before = len(api.requests)
        session.prewarm()
        session.publish([verdict(ConditionStatus.TRUE)])
        victim = Victim(
            session.pods().pods[0], "", Threshold(Signal.MEMORY, Amount(1, None, "1"), 30.0), Tier.SOFT, Method.EVICT,
            1.0, "The node was low on resource: memory. ", {}, None,
        )  # fmt: skip
        session.announce(Plan("b-1", 0.0, 0.0, (), (), victims=(victim,)))
        until(lambda: session.soft_tier_block() is None)
        session.evict("b-1", victim)
        until(session.outcomes)
        until(lambda: not session.pods().pods)
        session.publish([verdict(ConditionStatus.FALSE)])
        until(lambda: not api.node()["spec"].get("taints"))
        session.stop(clear=False)
        return traffic_of(api.requests[before:])


def verdict(status: ConditionStatus) -> ConditionVerdict:
    return ConditionVerdict(ConditionType.MEMORY_PRESSURE, status, "NodeAgentBenchmark", "", 0.0)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the session makes no progress")
        threading.Event().wait(0.005)


# --- the fleet, simulated --------------------------------------------------------------------------------------------


class Scenario(NamedTuple):
    name: str
    slots: int = 0
    standard: StandardConditions = StandardConditions.REASSERT
    capacity: int = 1_000_000
    """Requests per second that the server accepts."""
    jitter: float = DampingConfig().jitter


class LeaseList(NamedTuple):
    """The body of a list of Leases."""

    body: bytes

    def chunks(self) -> Iterator[bytes]:
        yield self.body


class World:
    """The simulated clock, and the API server."""

    def __init__(self, scenario: Scenario) -> None:
        self.now = 0.0
        self.scenario = scenario
        self.seconds: dict[str, Counter[int]] = {}
        """Requests by kind and second."""
        self.total: Counter[int] = Counter()
        self.refused = 0
        self.leases: dict[str, dict[str, Any]] = {}
        self._version = itertools.count(1)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._number), act))

    def run(self) -> None:
        while self._agenda and self._agenda[0][0] <= HORIZON_S:
            self.now, _, act = heapq.heappop(self._agenda)
            act()

    def send(self, kind: str) -> None:
        """One request. Raises ApiError (429) above the server's capacity."""
        second = int(self.now)
        self.total[second] += 1
        self.seconds.setdefault(kind, Counter())[second] += 1
        if self.total[second] > self.scenario.capacity:
            self.refused += 1
            raise ApiError(OutcomeKind.TOO_MANY_REQUESTS, "too many requests", status=429, retry_after_s=1.0)

    # --- the part of a transport that `EvictionSlots` uses

    request_timeout_s = 10.0

    @contextlib.contextmanager
    def stream(self, path: str, *, idle_s: float, total_s: float) -> Iterator["LeaseList"]:
        del path, idle_s, total_s
        self.send("list leases")
        listed = {"kind": "LeaseList", "metadata": {"resourceVersion": "1"}, "items": list(self.leases.values())}
        yield LeaseList(json.dumps(listed).encode())

    def request(self, method: str, path: str, *, body: bytes | None = None, timeout_s: float | None = None) -> Response:
        del path, timeout_s
        self.send(f"{_VERBS[method]} leases")
        lease = json.loads(body or b"{}")
        name = lease["metadata"]["name"]
        known = self.leases.get(name)
        version = lease["metadata"].get("resourceVersion")
        if (known is None) != (method == "POST") or (known and known["metadata"]["resourceVersion"] != version):
            raise ApiError(OutcomeKind.CONFLICT, "conflict", status=409)
        lease["metadata"]["resourceVersion"] = str(next(self._version))
        self.leases[name] = lease
        return Response(200, {}, json.dumps(lease).encode())


class Node:
    """One node and its agent."""

    def __init__(self, world: World, number: int, config: Config, rng: random.Random) -> None:
        self.world = world
        self.rng = rng
        self.name = f"node-{number}"
        self.config = config._replace(node_name=self.name)
        self.cache = RankingCache()
        self.state = state.initial(self.name, now=0.0)
        self.pods = pods_of(number)
        self.under_pressure = False
        self.status = ConditionStatus.FALSE
        self.taint_wanted_at: float | None = None
        self.taint_present = False
        self.asserting = False
        self.grace_ends_at = 0.0
        self.prewarmed = False
        self.next_sync_at = float("inf")
        self.next_slot_step_at = float("inf")
        self.evicting = 0
        self.evicted_at: list[float] = []
        self.slots: EvictionSlots | None = None
        if world.scenario.slots:
            self.slots = EvictionSlots(
                world,  # type: ignore[arg-type]
                holder=self.name,
                zone=lambda: f"zone-{number % ZONES}",
                slots=world.scenario.slots,
                namespace="nodeagent",
                duration_s=config.fleet.lease_duration_s,
                clock=lambda: world.now,
                wake=lambda: self.sync_at(world.now),
            )
        world.at(rng.random(), self.start_leak)
        self.kubelet_phase = rng.random() * KUBELET_S

    # --- events on the node

    def start_leak(self) -> None:
        self.under_pressure = True
        self.sync_at(self.world.now)

    def pod_gone(self) -> None:
        self.evicting -= 1
        self.under_pressure = False
        self.sync_at(self.world.now)

    # --- acts of the agent

    def sync_at(self, when: float) -> None:
        if when < self.next_sync_at:
            self.next_sync_at = when
            self.world.at(when, self.sync)

    def sync(self) -> None:
        now = self.world.now
        if now < self.next_sync_at:
            return  # an earlier sync has replaced this one
        self.next_sync_at = float("inf")
        if self.under_pressure and not self.prewarmed:
            self.prewarmed = True
            for _ in range(PREWARMED_CONNECTIONS):
                self.prewarm()
            for _ in range(NAMESPACES):
                self.world.at(now + self.rng.uniform(0.0, PDB_SPREAD_S), self.list_pdbs)
        node = snapshot(self, now)
        plan, self.state = engine.decide(
            node, self.state, now=now, config=self.config, cache=self.cache, always_rank=False
        )
        (memory,) = [each for each in plan.conditions if each.type is ConditionType.MEMORY_PRESSURE]
        if memory.status is not self.status:
            self.change_condition(memory.status)
        soft = any(refusal.code.wants_slot for refusal in plan.refusals)
        if self.slots is not None and (plan.victims or soft):
            self.slots.want()
            self.step_slots()
        for victim in plan.victims:
            self.evict(plan, victim)
        if self.under_pressure or self.status is ConditionStatus.TRUE:
            self.sync_at(now + self.rng.uniform(0.5, 1.5) * SYNC_S)
            if now < self.grace_ends_at:
                self.sync_at(self.grace_ends_at)

    def prewarm(self) -> None:
        """Open a connection; the result of the request does not matter."""
        with contextlib.suppress(ApiError):
            self.world.send("get version")

    def list_pdbs(self) -> None:
        self.send_until_accepted(
            "list poddisruptionbudgets", then=lambda: self.send_until_accepted("watch poddisruptionbudgets")
        )

    def change_condition(self, status: ConditionStatus) -> None:
        self.status = status
        up = status is ConditionStatus.TRUE
        self.grace_ends_at = self.world.now + GRACE_S if up else 0.0
        self.taint_wanted_at = self.world.now if up else None
        self.send_until_accepted("patch nodes/status")
        self.send_until_accepted("patch nodes", then=lambda: setattr(self, "taint_present", up))
        self.schedule_event()
        if up and self.world.scenario.standard is StandardConditions.REASSERT:
            phase = (self.kubelet_phase - self.world.now) % KUBELET_S
            self.world.at(self.world.now + phase, self.reset)

    def reset(self) -> None:
        """The kubelet has replaced the condition's True by False."""
        if self.status is ConditionStatus.TRUE:
            if not self.asserting:  # one worker writes the newest verdict, without a queue
                self.asserting = True
                self.send_until_accepted("patch nodes/status (again)", then=lambda: setattr(self, "asserting", False))
            self.world.at(self.world.now + KUBELET_S, self.reset)

    def soft_tier_block(self) -> Refusal | None:
        wanted = self.taint_wanted_at
        if wanted is not None and not self.taint_present and self.world.now - wanted < TAINT_WAIT_S:
            return Refusal(RefusalCode.WAITS_FOR_TAINT, "the taint")
        if self.slots is not None and not self.slots.held():
            return Refusal(RefusalCode.WAITS_FOR_LEASE, "an eviction slot")
        return None

    def evict(self, plan: Plan, victim: Victim) -> None:
        now = self.world.now
        kind, retry_s = OutcomeKind.ACCEPTED, None
        try:
            self.world.send("create pods/eviction")
        except ApiError as error:
            kind, retry_s = error.kind, error.retry_after_s
        outcome = Outcome(plan.id, victim.pod.uid, kind, "", now, retry_after_s=retry_s)
        self.state = outcomes.apply_outcome(self.state, outcome, now=now, config=self.config)
        self.schedule_event()
        if kind is OutcomeKind.ACCEPTED:
            self.schedule_event()
            self.evicting += 1
            self.evicted_at.append(now)
            self.pods = tuple([view for view in self.pods if view.pod.uid != victim.pod.uid])
            self.world.at(now + GONE_AFTER_S, self.pod_gone)

    def step_slots(self) -> None:
        """The worker of the eviction slots."""
        assert self.slots is not None
        if self.world.now >= self.next_slot_step_at:
            self.next_slot_step_at = float("inf")
        if (wait_s := self.slots.wait_s()) <= 0:
            self.slots.step()
            wait_s = max(1e-3, self.slots.wait_s())
        if wait_s < float("inf") and self.world.now + wait_s < self.next_slot_step_at:
            self.next_slot_step_at = self.world.now + wait_s
            self.world.at(self.next_slot_step_at, self.step_slots)

    def schedule_event(self) -> None:
        self.world.at(self.world.now + self.rng.uniform(0.0, EVENT_SPREAD_S), self.write_event)

    def write_event(self) -> None:
        """Not repeated after a failure."""
        try:
            self.world.send("create events")
        except ApiError:
            return

    def send_until_accepted(
        self, kind: str, *, then: Callable[[], None] = lambda: None, backoff: RetryBackoff | None = None
    ) -> None:
        """A request that is repeated until the server accepts it."""
        backoff = backoff or RetryBackoff(rng=self.rng)
        try:
            self.world.send(kind)
        except ApiError as error:
            wait_s = backoff.failed(error.retry_after_s)
            self.world.at(self.world.now + wait_s, lambda: self.send_until_accepted(kind, then=then, backoff=backoff))
            return
        then()


def pods_of(number: int) -> tuple[PodView, ...]:
    """Replicas of the leaking release, enough for every eviction within the rate limits."""
    views = []
    for index in range(8):
        uid = f"{number}-{index}"
        leaking = Pod(
            uid, uid, f"team-{index % NAMESPACES}", f"leak-{uid}", PodSource.API, QOSClass.BURSTABLE, priority=0,
            phase="Running", created_wall=0.0, started_wall=0.0, owner=Owner("ReplicaSet", "leak", "leak"), ready=True,
        )  # fmt: skip
        usage = PodUsage(
            uid, QOSClass.BURSTABLE, f"/kubepods/pod{uid}", 0.0, memory_working_set=700 * MI, memory_usage=700 * MI,
            memory_unreclaimable=700 * MI, process_count=1, thread_count=1,
        )  # fmt: skip
        views.append(PodView(leaking, usage))
    return tuple(views)


def snapshot(node: Node, now: float) -> NodeSnapshot:
    available = {signal: Observation(signal, 50 * GI, 100 * GI, now, "simulated") for signal in Signal}
    memory = 250 * MI if node.under_pressure else 4 * GI
    available[Signal.MEMORY] = Observation(Signal.MEMORY, memory, 16 * GI, now, "simulated")
    pods = tuple([PodView(view.pod, view.usage and view.usage._replace(read_at=now)) for view in node.pods])
    return NodeSnapshot(
        node.name,
        now,
        10_000.0 + now,
        available,
        available[Signal.MEMORY],
        memory=NodeMemory(16 * GI, memory, memory, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        layout=DiskLayout.SINGLE,
        pods=pods,
        pods_synced_at=now,
        soft_tier_blocked_by=node.soft_tier_block(),
    )


def simulate(scenario: Scenario, nodes: int) -> tuple[World, list[Node]]:
    config = load.defaults().config
    config = config._replace(
        startup=StartupConfig(fresh_samples=1),
        damping=config.damping._replace(jitter=scenario.jitter),
        conditions=config.conditions._replace(standard=scenario.standard),
        fleet=config.fleet._replace(max_concurrent_evictions=scenario.slots),
    )
    rng = random.Random(20261121)
    world = World(scenario)
    fleet = [Node(world, number, config, rng) for number in range(nodes)]
    world.run()
    return world, fleet


def report(scenario: Scenario, world: World, fleet: list[Node]) -> None:
    total = sum(world.total.values())
    print(f"\n{scenario.name}")
    each = f"{total / len(fleet):.1f} per node in {HORIZON_S / 60:.0f} min"
    print(f"  requests {total} ({each}), refused with 429: {world.refused}")
    print(f"  {'':32} {'total':>8} {'most in 1 s':>12} {'most in 10 s':>13} {'mean/s':>8}")
    rows = sorted(world.seconds.items(), key=lambda row: -sum(row[1].values()))
    for kind, seconds in [("all", world.total), *rows]:
        tens = Counter[int]()
        for second, count in seconds.items():
            tens[second // 10] += count
        number = sum(seconds.values())
        print(
            f"  {kind:32} {number:>8} {max(seconds.values()):>12} {max(tens.values()):>13} {number / HORIZON_S:>8.1f}"
        )
    first = sorted(node.evicted_at[0] for node in fleet if node.evicted_at)
    every = sorted(at for node in fleet for at in node.evicted_at)
    if first:
        most = max(
            sum(1 for at in every if begin <= at < begin + GONE_AFTER_S) for begin in sorted(set(map(int, every)))
        )
        half = first[len(first) // 2]
        print(
            f"  evictions {len(every)} on {len(first)} nodes; first evictions from {first[0]:.0f} s, half of them by "
            f"{half:.0f} s, last {first[-1]:.0f} s; most in {GONE_AFTER_S:.0f} s: {most}"
        )


SCENARIOS = (
    Scenario("default configuration"),
    Scenario("50 eviction slots in each of 3 zones", slots=50),
    Scenario("standard conditions off", standard=StandardConditions.OFF),
    Scenario("API server with a capacity of 500 requests per second", capacity=500),
    Scenario("without jitter at the end of conditions (for comparison)", jitter=0.0),
)


def show(traffic: Traffic) -> None:
    for kind, count in traffic.kinds.most_common():
        print(f"  {kind:32} {count:>6}{'  as the node' if kind in traffic.impersonated else ''}")
    checks = f"authorization checks {traffic.checks(0)}; as the node {traffic.checks(1)} to {traffic.checks(2)}"
    print(f"  {'all':32} {traffic.all:>6}, {checks}")


def main(arguments: list[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    nodes = int(arguments[0]) if arguments else NODES
    hour = calm()
    print(f"one calm node, requests per hour (measured {MEASURED_S:.0f} s at {COMPRESSION:.0f} times the speed):")
    show(hour)
    print(f"  {nodes} nodes, a second: {hour.all * nodes / 3600:.0f} requests; authorization checks:", end=" ")
    without, fleet_wide, at_most = (hour.checks(more) * nodes / 3600 for more in (0, 1, 2))
    print(f"{without:.0f} as the ServiceAccount, {fleet_wide:.0f} to {at_most:.0f} as the node")
    print("one node that evicts one pod and recovers (measured):")
    show(episode())
    print(f"{nodes} nodes that all cross the soft threshold within one second (simulated, {HORIZON_S / 60:.0f} min):")
    for scenario in [each for each in SCENARIOS if not arguments[1:] or arguments[1] in each.name]:
        world, fleet = simulate(scenario, nodes)
        report(scenario, world, fleet)


if __name__ == "__main__":
    main(sys.argv[1:])

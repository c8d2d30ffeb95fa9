"""What a fleet asks of the API server: `python -m benchmarks.fleet [nodes [part of a scenario's name]]`.

5,000 nodes are the default, and take a minute or two for each scenario.

First, one node for real. `calm`: the workers of an agent against the HTTP double with every period divided by
`COMPRESSION` (watches, heartbeats; bookmarks come from the server), counted and scaled back to an hour. `episode`: a
session that goes through pressure once: fence, budgets, Events, one eviction, recovery.

Then a simulation of the whole fleet: on every node memory falls below the soft threshold within the same second, as a
bad release makes it, and is back when one pod is gone. The clock is simulated; real are the decisions with
their damping, jitter, budgets and back-off (`policy.engine`), the back-off of every writer (`cluster.backoff`) and the
seats (`cluster.leases`, on a transport that is a function call). Modelled are the writers themselves: a change of
condition is one PATCH of the node's status, one of its taints and one Event; a kubelet puts a foreign True back every
10 s, each in its own phase, and one PATCH asserts it again; near a threshold four connections are opened and the
budgets of five namespaces listed and watched, spread as the session spreads them. The server refuses with 429 and
Retry-After 1 what goes over its capacity in a second. Latency is not modelled, and nobody else uses the server.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nodeagent.actuators.api_writers import EVENT_SPREAD_S
from nodeagent.actuators.conditions import NodeConditions
from nodeagent.actuators.eviction_slots import EvictionSlots
from nodeagent.actuators.session import PDB_SPREAD_S, TAINT_WAIT_S, ClusterSession
from nodeagent.config import load
from nodeagent.config.defaults import EVICTION_SOFT_GRACE_PERIOD
from nodeagent.config.schema import (
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
LOOK_S = 10.0
"""On average between two decisions under pressure; a real agent looks oftener, and asks for no more."""
GRACE_S = EVICTION_SOFT_GRACE_PERIOD[Signal.MEMORY]
GONE_AFTER_S = 10.0
KUBELET_S = 10.0
NAMESPACES = 5
WARM = 4

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


def calm() -> Counter[str]:
    """Requests an hour of a node where nothing happens."""
    with ApiServer(bookmark_s=60.0 / COMPRESSION) as api, tempfile.TemporaryDirectory() as directory:
        transport = connect(find_credentials(str(api.kubeconfig(Path(directory) / "kubeconfig"))))
        node = NodeWatch(transport, api.node_name, watch_s=WATCH_S / COMPRESSION)
        conditions = NodeConditions(transport, node, heartbeat_s=ConditionsConfig().heartbeat_s / COMPRESSION)
        pods = PodWatch(transport, api.node_name, watch_s=WATCH_S / COMPRESSION)
        for part in (node, conditions, pods):
            part.start()
        conditions.publish([verdict(ConditionStatus.FALSE)])
        threading.Event().wait(2.0)  # what a start costs is not calm
        begun = len(api.requests)
        threading.Event().wait(MEASURED_S)
        seen = Counter(kind_of(request) for request in api.requests[begun:])
        for stopping in (conditions, pods, node):
            stopping.stop()
    scale = 3600.0 / (MEASURED_S * COMPRESSION)
    return Counter({kind: round(count * scale) for kind, count in seen.items()})


def episode() -> Counter[str]:
    """Requests of one node that evicts one pod and recovers, fleet seats included."""
    hog = pod("hog", uid="uid-hog", owner=("ReplicaSet", "hog"))
    with ApiServer(pods=[hog], linger_s=0.2) as api, tempfile.TemporaryDirectory() as directory:
        transport = connect(find_credentials(str(api.kubeconfig(Path(directory) / "kubeconfig"))))
        config = Config(mode=Mode.ENFORCE, fleet=FleetConfig(max_concurrent_evictions=20))
        session = ClusterSession(transport, config, Identity(api.node_name, "benchmark"), wake=lambda: None)
        session.start()
        session.publish([verdict(ConditionStatus.FALSE)])
        until(lambda: session.pods().synced_at is not None)
        session.publish([verdict(ConditionStatus.FALSE)])
        until(lambda: api.condition("NodeAgentMemoryPressure") is not None)
        begun = len(api.requests)
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
        return Counter(kind_of(request) for request in api.requests[begun:])


def verdict(status: ConditionStatus) -> ConditionVerdict:
    return ConditionVerdict(ConditionType.MEMORY_PRESSURE, status, "NodeAgentBenchmark", "", 0.0)


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20.0
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit("the session does not get on")
        threading.Event().wait(0.005)


# --- the fleet, simulated --------------------------------------------------------------------------------------------


class Scenario(NamedTuple):
    name: str
    seats: int = 0
    standard: StandardConditions = StandardConditions.REASSERT
    capacity: int = 1_000_000
    """Requests a second that the server takes from us."""
    jitter: float = DampingConfig().jitter


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

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._number), what))

    def run(self) -> None:
        while self._agenda and self._agenda[0][0] <= HORIZON_S:
            self.now, _, what = heapq.heappop(self._agenda)
            what()

    def ask(self, kind: str) -> None:
        """One request. Raises ApiError (429) when the server has had enough this second."""
        second = int(self.now)
        self.total[second] += 1
        self.seconds.setdefault(kind, Counter())[second] += 1
        if self.total[second] > self.scenario.capacity:
            self.refused += 1
            raise ApiError(OutcomeKind.TOO_MANY_REQUESTS, "too many requests", status=429, retry_after_s=1.0)

    # --- what `Leases` uses of a transport

    def request(self, method: str, path: str, *, body: bytes | None = None, timeout_s: float | None = None) -> Response:
        del path, timeout_s
        verb = "list" if method == "GET" else _VERBS[method]
        self.ask(f"{verb} leases")
        if method == "GET":
            listed = {"metadata": {}, "items": list(self.leases.values())}
            return Response(200, {}, json.dumps(listed).encode())
        lease = json.loads(body or b"{}")
        name = lease["metadata"]["name"]
        known = self.leases.get(name)
        asked = lease["metadata"].get("resourceVersion")
        if (known is None) != (method == "POST") or (known and known["metadata"]["resourceVersion"] != asked):
            raise ApiError(OutcomeKind.CONFLICT, "conflict", status=409)
        lease["metadata"]["resourceVersion"] = str(next(self._version))
        self.leases[name] = lease
        return Response(200, {}, json.dumps(lease).encode())


class Node:
    """One agent and what happens to it."""

    def __init__(self, world: World, number: int, config: Config, chance: random.Random) -> None:
        self.world = world
        self.chance = chance
        self.name = f"node-{number}"
        self.config = config._replace(node_name=self.name)
        self.cache = RankingCache()
        self.state = state.initial(self.name, now=0.0)
        self.pods = pods_of(number)
        self.pressed = False
        self.status = ConditionStatus.FALSE
        self.fence_wanted_at: float | None = None
        self.fence_up = False
        self.asserting = False
        self.grace_ends_at = 0.0
        self.near = False
        self.looking_at = float("inf")
        self.pumping_at = float("inf")
        self.evicting = 0
        self.evicted_at: list[float] = []
        self.leases: EvictionSlots | None = None
        if world.scenario.seats:
            self.leases = EvictionSlots(
                world,  # type: ignore[arg-type]
                holder=self.name,
                zone=lambda: f"zone-{number % ZONES}",
                slots=world.scenario.seats,
                namespace="nodeagent",
                duration_s=config.fleet.lease_duration_s,
                clock=lambda: world.now,
                wake=lambda: self.look_at(world.now),
            )
        world.at(chance.random(), self.leak)
        self.kubelet_phase = chance.random() * KUBELET_S

    # --- what happens to it

    def leak(self) -> None:
        self.pressed = True
        self.look_at(self.world.now)

    def gone(self) -> None:
        self.evicting -= 1
        self.pressed = False
        self.look_at(self.world.now)

    # --- what its agent does

    def look_at(self, when: float) -> None:
        if when < self.looking_at:
            self.looking_at = when
            self.world.at(when, self.look)

    def look(self) -> None:
        now = self.world.now
        if now < self.looking_at:
            return  # this look was brought forward
        self.looking_at = float("inf")
        if self.pressed and not self.near:
            self.near = True
            for _ in range(WARM):
                self.warm()
            for _ in range(NAMESPACES):
                self.world.at(now + self.chance.uniform(0.0, PDB_SPREAD_S), self.list_budgets)
        node = snapshot(self, now)
        plan, self.state = engine.decide(
            node, self.state, now=now, config=self.config, cache=self.cache, always_rank=False
        )
        (memory,) = [each for each in plan.conditions if each.type is ConditionType.MEMORY_PRESSURE]
        if memory.status is not self.status:
            self.turned(memory.status)
        soft = any(
            refusal.code.startswith("waits-for") or refusal.code == "waits-for-release" for refusal in plan.refusals
        )
        if self.leases is not None and (plan.victims or soft):
            self.leases.want()
            self.pump()
        for victim in plan.victims:
            self.evict(plan, victim)
        if self.pressed or self.status is ConditionStatus.TRUE:
            self.look_at(now + self.chance.uniform(0.5, 1.5) * LOOK_S)
            if now < self.grace_ends_at:
                self.look_at(self.grace_ends_at)

    def warm(self) -> None:
        """A connection is open, whatever the answer says."""
        with contextlib.suppress(ApiError):
            self.world.ask("get version")

    def list_budgets(self) -> None:
        self.insist("list poddisruptionbudgets", then=lambda: self.insist("watch poddisruptionbudgets"))

    def turned(self, status: ConditionStatus) -> None:
        self.status = status
        up = status is ConditionStatus.TRUE
        self.grace_ends_at = self.world.now + GRACE_S if up else 0.0
        self.fence_wanted_at = self.world.now if up else None
        self.insist("patch nodes/status")
        self.insist("patch nodes", then=lambda: setattr(self, "fence_up", up))
        self.tell()
        if up and self.world.scenario.standard is StandardConditions.REASSERT:
            phase = (self.kubelet_phase - self.world.now) % KUBELET_S
            self.world.at(self.world.now + phase, self.reset)

    def reset(self) -> None:
        """The kubelet has put its False over our True."""
        if self.status is ConditionStatus.TRUE:
            if not self.asserting:  # one worker writes the newest verdict: nothing is queued
                self.asserting = True
                self.insist("patch nodes/status (again)", then=lambda: setattr(self, "asserting", False))
            self.world.at(self.world.now + KUBELET_S, self.reset)

    def waits_for(self) -> Refusal | None:
        wanted = self.fence_wanted_at
        if wanted is not None and not self.fence_up and self.world.now - wanted < TAINT_WAIT_S:
            return Refusal(RefusalCode.WAITS_FOR_TAINT, "the taint")
        if self.leases is not None and not self.leases.held():
            return Refusal(RefusalCode.WAITS_FOR_LEASE, "a seat")
        return None

    def evict(self, plan: Plan, victim: Victim) -> None:
        now = self.world.now
        kind, retry_s = OutcomeKind.ACCEPTED, None
        try:
            self.world.ask("create pods/eviction")
        except ApiError as error:
            kind, retry_s = error.kind, error.retry_after_s
        outcome = Outcome(plan.id, victim.pod.uid, kind, "", now, retry_after_s=retry_s)
        self.state = outcomes.apply_outcome(self.state, outcome, now=now, config=self.config)
        self.tell()
        if kind is OutcomeKind.ACCEPTED:
            self.tell()
            self.evicting += 1
            self.evicted_at.append(now)
            self.pods = tuple([view for view in self.pods if view.pod.uid != victim.pod.uid])
            self.world.at(now + GONE_AFTER_S, self.gone)

    def pump(self) -> None:
        """The seats' worker."""
        assert self.leases is not None
        if self.world.now >= self.pumping_at:
            self.pumping_at = float("inf")
        if (wait_s := self.leases.wait_s()) <= 0:
            self.leases.step()
            wait_s = max(1e-3, self.leases.wait_s())
        if wait_s < float("inf") and self.world.now + wait_s < self.pumping_at:
            self.pumping_at = self.world.now + wait_s
            self.world.at(self.pumping_at, self.pump)

    def tell(self) -> None:
        self.world.at(self.world.now + self.chance.uniform(0.0, EVENT_SPREAD_S), self.write_event)

    def write_event(self) -> None:
        """A courtesy, not repeated."""
        try:
            self.world.ask("create events")
        except ApiError:
            return

    def insist(
        self, kind: str, *, then: Callable[[], None] = lambda: None, backoff: RetryBackoff | None = None
    ) -> None:
        """A request that is repeated until it is taken."""
        backoff = backoff or RetryBackoff(rng=self.chance)
        try:
            self.world.ask(kind)
        except ApiError as error:
            wait_s = backoff.failed(error.retry_after_s)
            self.world.at(self.world.now + wait_s, lambda: self.insist(kind, then=then, backoff=backoff))
            return
        then()


def pods_of(number: int) -> tuple[PodView, ...]:
    """Replicas of the release that leaks; enough for every eviction that the budgets allow."""
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
    memory = 250 * MI if node.pressed else 4 * GI
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
        soft_tier_blocked_by=node.waits_for(),
    )


def simulate(scenario: Scenario, nodes: int) -> tuple[World, list[Node]]:
    config = load.defaults().config
    config = config._replace(
        startup=StartupConfig(fresh_samples=1),
        damping=config.damping._replace(jitter=scenario.jitter),
        conditions=config.conditions._replace(standard=scenario.standard),
        fleet=config.fleet._replace(max_concurrent_evictions=scenario.seats),
    )
    chance = random.Random(20261121)
    world = World(scenario)
    fleet = [Node(world, number, config, chance) for number in range(nodes)]
    world.run()
    return world, fleet


def report(scenario: Scenario, world: World, fleet: list[Node]) -> None:
    total = sum(world.total.values())
    print(f"\n{scenario.name}")
    each = f"{total / len(fleet):.1f} a node in {HORIZON_S / 60:.0f} min"
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
    Scenario("as configured by default"),
    Scenario("with 50 seats in each of 3 zones", seats=50),
    Scenario("standard conditions off", standard=StandardConditions.OFF),
    Scenario("an API server that takes 500 requests a second", capacity=500),
    Scenario("without jitter when conditions are released (for comparison)", jitter=0.0),
)


def main(arguments: list[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    nodes = int(arguments[0]) if arguments else NODES
    hour = calm()
    print(f"one node in calm, requests an hour (measured {MEASURED_S:.0f} s at {COMPRESSION:.0f} times the pace):")
    for kind, count in hour.most_common():
        print(f"  {kind:32} {count:>6}")
    print(f"  {'all':32} {sum(hour.values()):>6}, for {nodes} nodes {sum(hour.values()) * nodes / 3600:.0f} a second")
    once = episode()
    print("one node that evicts one pod and recovers (measured):")
    for kind, count in once.most_common():
        print(f"  {kind:32} {count:>6}")
    print(f"  {'all':32} {sum(once.values()):>6}")
    print(f"{nodes} nodes that all cross the soft threshold within one second (simulated, {HORIZON_S / 60:.0f} min):")
    for scenario in [each for each in SCENARIOS if not arguments[1:] or arguments[1] in each.name]:
        world, fleet = simulate(scenario, nodes)
        report(scenario, world, fleet)


if __name__ == "__main__":
    main(sys.argv[1:])

"""API requests of a fleet: `python -m benchmarks.fleet [nodes [part of a scenario's name]]`.

The default is 5,000 nodes, which takes one to seven minutes for each of the eleven scenarios.

First, one real node (`benchmarks.fleet_traffic`): its start, an hour of calm, one eviction. Then a simulation of the
fleet. In most scenarios memory falls below the soft threshold on every node within the same second, as after a faulty
release, and recovers when one pod is gone; others are an outage of the API server and a rolling update of the
DaemonSet. Simulated: the clock and the server (`benchmarks.fleet_world`). Real: the decisions with damping, jitter,
rate limits and back-off (`policy.engine`), the back-off of every writer (`kube.backoff`) and the eviction slots
(`actuators.eviction_slots`, on a transport that is a function call). Modelled: the writers and the watches. A condition
change is one PATCH of the node's status, one PATCH of its taints and one Event. A kubelet resets a foreign True every
10 s, each in its own phase, and one PATCH sets it again. Near a threshold four connections are opened, and the PDBs of
five namespaces are listed and watched, with the session's spread. The server replies 429 with Retry-After 1 above its
capacity. In an outage each request fails at once and each watch breaks. Latency and other clients are not modelled.
"""

import contextlib
import math
import random
import sys
from collections import Counter
from collections.abc import Callable

from benchmarks import fleet_traffic
from benchmarks.fleet_traffic import Traffic
from benchmarks.fleet_world import ATTEMPT, Heartbeat, Outage, Scenario, Watch, World
from nodeagent.actuators.api_writers import EVENT_SPREAD_S
from nodeagent.actuators.eviction_slots import EvictionSlots
from nodeagent.actuators.soft_tier_block import TAINT_WAIT_S
from nodeagent.config import load
from nodeagent.config.defaults import EVICTION_SOFT_GRACE_PERIOD
from nodeagent.config.schema import Config, StandardConditions, StartupConfig
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.cluster_readers import PDB_SPREAD_S
from nodeagent.model import (
    ConditionStatus,
    ConditionType,
    DiskLayout,
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
    Victim,
)
from nodeagent.policy import engine, outcomes, state
from nodeagent.policy.candidates import RankingCache

MI, GI = 1 << 20, 1 << 30
NODES = 5000
ZONES = 3
SYNC_S = 10.0
"""Mean time between two decisions under pressure. A real agent decides more often, but sends no more requests."""
GRACE_S = EVICTION_SOFT_GRACE_PERIOD[Signal.MEMORY]
GONE_AFTER_S = 10.0
KUBELET_S = 10.0
NAMESPACES = 5
PREWARMED_CONNECTIONS = 4
UNAVAILABLE = 0.1
"""`maxUnavailable` of the DaemonSet."""
READY_S = (7.0, 15.0)
"""From the start of a container until its probe answers, measured in the virtual machine (docs/performance.md)."""


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
        self.watches = tuple(Watch(world, resource, rng) for resource in ("pods", "nodes"))
        self.heartbeat = Heartbeat(world, rng)
        if world.scenario.pressure:
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

    def pods_synced_at(self) -> float:
        broken_since = self.watches[0].broken_since
        return self.world.now if broken_since is None else broken_since

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
        if self.slots is not None and plan.wants_slot:
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
    memory = 400 * MI if node.under_pressure else 4 * GI  # built-in thresholds: hard 2% = 327Mi, soft 3% = 491Mi
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
        pods_synced_at=node.pods_synced_at(),
        soft_tier_blocked_by=node.soft_tier_block(),
    )


def simulate(scenario: Scenario, nodes: int, start: Traffic) -> tuple[World, list[Node]]:
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
    if scenario.rolling_update:
        roll(world, fleet, start, rng)
    world.run()
    return world, fleet


def roll(world: World, fleet: list[Node], start: Traffic, rng: random.Random) -> None:
    """Replace the agent of each node, in the order and at the pace of a DaemonSet."""
    waiting = rng.sample(fleet, len(fleet))

    def replace_next() -> None:
        if not waiting:
            return
        node = waiting.pop()
        for watch in node.watches:
            watch.close()
        world.at(world.now + rng.uniform(*READY_S), lambda: begin(node))

    def begin(node: Node) -> None:
        for kind in start.kinds.elements():
            world.send(kind)
        for watch in node.watches:
            watch.reopen()
        replace_next()

    for _ in range(math.ceil(UNAVAILABLE * len(fleet))):
        world.at(0.0, replace_next)


def report(scenario: Scenario, world: World, fleet: list[Node]) -> None:
    total, horizon_s = sum(world.total.values()), scenario.horizon_s
    print(f"\n{scenario.name}")
    each = f"{total / len(fleet):.1f} per node in {horizon_s / 60:.0f} min"
    print(f"  requests {total} ({each}), refused with 429: {world.refused}")
    print(f"  {'':32} {'total':>8} {'most in 1 s':>12} {'most in 10 s':>13} {'mean/s':>8}")
    rows = sorted(world.seconds.items(), key=lambda row: -sum(row[1].values()))
    for kind, seconds in [("all", world.total), *rows]:
        tens = Counter[int]()
        for second, count in seconds.items():
            tens[second // 10] += count
        number = sum(seconds.values())
        print(
            f"  {kind:32} {number:>8} {max(seconds.values()):>12} {max(tens.values()):>13} {number / horizon_s:>8.1f}"
        )
    if scenario.outage:
        report_outage(scenario.outage, world, fleet)
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


def report_outage(outage: Outage, world: World, fleet: list[Node]) -> None:
    attempts = world.seconds.get(ATTEMPT, Counter())
    last_minute = [attempts[second] for second in range(int(outage.end) - 60, int(outage.end))]
    restored = sorted(
        watch.restored_at - outage.end for node in fleet for watch in node.watches if watch.restored_at is not None
    )
    still_broken = sum(watch.broken_since is not None for node in fleet for watch in node.watches)
    after = [world.total[second] for second in range(int(outage.end), int(outage.end) + 30)]
    print(
        f"  attempts a second in the last minute of the outage: {sum(last_minute) / 60:.0f}, at most "
        f"{max(last_minute)}; requests a second in the 30 s after it: {sum(after) / 30:.0f}, at most {max(after)}"
    )
    if restored:
        print(
            f"  watches open again: half of them after {restored[len(restored) // 2]:.0f} s, the last after "
            f"{restored[-1]:.0f} s; {still_broken} still broken at the end"
        )


OUTAGE = Outage(60.0, 360.0)
SCENARIOS = (
    Scenario("default configuration"),
    Scenario("50 eviction slots in each of 3 zones", slots=50),
    Scenario("standard conditions off", standard=StandardConditions.OFF),
    Scenario("API server with a capacity of 500 requests per second", capacity=500),
    Scenario("without jitter at the end of conditions (for comparison)", jitter=0.0),
    Scenario("calm, an outage of five minutes", pressure=False, outage=OUTAGE, horizon_s=660.0),
    Scenario(
        "calm, an outage after which the server has lost the history of its objects",
        pressure=False,
        outage=OUTAGE._replace(expired=True),
        horizon_s=660.0,
    ),
    Scenario(
        "calm, the same with a capacity of 500 requests per second",
        pressure=False,
        outage=OUTAGE._replace(expired=True),
        capacity=500,
        horizon_s=960.0,
    ),
    Scenario("pressure 20 s before an outage of two minutes", outage=Outage(20.0, 140.0), horizon_s=600.0),
    Scenario(
        "the same with 50 eviction slots in each of 3 zones", slots=50, outage=Outage(20.0, 140.0), horizon_s=600.0
    ),
    Scenario("calm, a rolling update", pressure=False, rolling_update=True, horizon_s=300.0),
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
    start = fleet_traffic.measure_start()
    print(f"one node, requests of its start (measured for {fleet_traffic.START_S:.0f} s):")
    show(start)
    hour = fleet_traffic.calm_hour()
    print(
        f"one calm node, requests per hour (measured {fleet_traffic.MEASURED_S:.0f} s at "
        f"{fleet_traffic.COMPRESSION:.0f} times the speed):"
    )
    show(hour)
    print(f"  {nodes} nodes, a second: {hour.all * nodes / 3600:.0f} requests; authorization checks:", end=" ")
    without, fleet_wide, at_most = (hour.checks(more) * nodes / 3600 for more in (0, 1, 2))
    print(f"{without:.0f} as the ServiceAccount, {fleet_wide:.0f} to {at_most:.0f} as the node")
    print("one node that evicts one pod and recovers (measured):")
    show(fleet_traffic.episode())
    print(f"{nodes} nodes, simulated; unless it says calm, all cross the soft threshold within one second:")
    for scenario in [each for each in SCENARIOS if not arguments[1:] or arguments[1] in each.name]:
        report(scenario, *simulate(scenario, nodes, start))


if __name__ == "__main__":
    main(sys.argv[1:])

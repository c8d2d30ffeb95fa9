"""On a calm node the loop decides more rarely than it samples, and nothing that is due waits for the next decision."""

import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from nodeagent.actuators.brakes import ActiveBrakes
from nodeagent.actuators.cgroup_brake import BrakeKind, CgroupBrake
from nodeagent.actuators.session import NoCluster
from nodeagent.config.config_file import ConfigFile
from nodeagent.config.load import LoadedConfig
from nodeagent.config.schema import SamplingConfig
from nodeagent.kube.pod_watch import PodsView
from nodeagent.loop import schedule
from nodeagent.loop.agent import Agent
from nodeagent.loop.components import Components
from nodeagent.loop.executor import GROWTH_CAP_S
from nodeagent.loop.observe import STARTUP_API_WAIT_S
from nodeagent.model import (
    ConditionStatus,
    ConditionType,
    MemoryModel,
    NodeSnapshot,
    Owner,
    Plan,
    Pod,
    PodSource,
    Signal,
    Tier,
)
from nodeagent.policy import state as policy_state
from nodeagent.policy.conditions import ConditionMemory, ConditionState
from nodeagent.policy.in_flight import EvictionStage, InFlightEviction, InFlightState
from nodeagent.policy.reclaim import ReclaimRun, ReclaimState
from nodeagent.runtime.wakeups import Wakeups
from nodeagent.sampling.disk.monitor import DiskMonitor
from nodeagent.sampling.events.fork_meter import ConnectorMeter, ForkMeter, NoForks
from nodeagent.sampling.events.process_connector import open_connector
from nodeagent.sampling.hostfs.host import FileSystem, Host, open_host
from nodeagent.sampling.sampler import Sampler
from nodeagent.sampling.snapshot import PodReading
from nodeagent.telemetry.log import LineWriter, open_log
from tests.support.pod_cgroups import NEEDS, usable
from tests.support.runtime import bare_runtime
from tests.support.trees import GI, MI, Node, TreePod, write_node

POD = TreePod("a/web")
BEGAN = 100_000.0
HEAD = (
    "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\nevictionSoft: {}\nevictionSoftGracePeriod: {}\n"
)
FAR = "evictionHard: {nodefs.available: 1Gi}\n"
"""Nothing that could be crossed within 20 s."""


class Clock:
    """It stands still until a test sets it."""

    now = BEGAN
    suspended_s = 0.0

    def __call__(self) -> float:
        return self.now

    def awake(self) -> float:
        """The clock that stops while the machine is suspended."""
        return self.now - self.suspended_s

    def suspend(self, seconds: float) -> None:
        self.now += seconds
        self.suspended_s += seconds


class Decisions(NoCluster):
    """A cluster that records when decisions were made."""

    def __init__(self) -> None:
        super().__init__("none here")
        self.at: list[float] = []
        self.last: Plan | None = None
        self.view = super().pods()
        """What an API server lists."""

    def pods(self) -> PodsView:
        return self.view

    def announce(self, plan: Plan) -> None:
        self.at.append(plan.made_at - BEGAN)
        self.last = plan


class RecordingSampler(Sampler):
    """A sampler that records its readings, and may be slow."""

    def __init__(self, host: Host, config: SamplingConfig, clock: Clock, full: list[str]) -> None:
        def statvfs(path: str) -> FileSystem:
            reading = host.statvfs(path)
            self.statvfs_at.append(clock.now - BEGAN)
            return reading._replace(available=0) if full else reading

        super().__init__(host, config, node_name="n", boottime=clock, statvfs=statvfs)
        self._clock = clock
        self.statvfs_at: list[float] = []
        self.nodes: list[NodeSnapshot] = []
        self.pods_at: list[float] = []
        self.after_node: Callable[[], None] = lambda: None
        self.after_pods: Callable[[], None] = lambda: None

    def sample_node(self, *, disks: bool = True, limits: bool = True) -> NodeSnapshot:
        node = super().sample_node(disks=disks, limits=limits)
        self.nodes.append(node)
        self.after_node()
        return node

    def read_pods(
        self,
        node: NodeSnapshot,
        api_pods: Sequence[Pod] | None = None,
        *,
        fresh: bool = True,
        short: Tier | None = None,
    ) -> PodReading:
        self.pods_at.append(self._clock.now - BEGAN)
        reading = super().read_pods(node, api_pods, fresh=fresh, short=short)
        self.after_pods()
        return reading


class Loop(NamedTuple):
    """An agent without an API server, on a calm node."""

    agent: Agent
    clock: Clock
    config: Path
    brakes: ActiveBrakes
    decisions: Decisions
    log: Path
    writer: LineWriter
    sampler: RecordingSampler
    full_disks: list[str]
    """Every file system is full while this is not empty."""
    rebuilt: list[LoadedConfig]

    def logged(self) -> str:
        """The log. Closes it."""
        self.writer.close(60.0)
        return self.log.read_text()

    def sync(self, after_s: float) -> float:
        """Sync this many seconds after the start. Returns how long the agent would sleep then."""
        self.clock.now = BEGAN + after_s
        return self.agent.sync()

    def settle(self) -> float:
        """Sync until the node is calm. Returns when that was."""
        at = max([STARTUP_API_WAIT_S, *self.decisions.at])
        while self.decisions.at[-2:] != [at - schedule.CALM_S, at]:
            at += 1.0
            self.sync(at)
            assert at < 120.0
        return at


StartLoop = Callable[..., Loop]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartLoop]:
    """Keywords are keys of `sampling`."""
    clock = Clock()
    (tmp_path / "node").mkdir()
    host = open_host(write_node(tmp_path / "node", Node(pods=(POD,))))
    log_path = tmp_path / "log"
    log, writer = open_log(level="info", style="json", fd=os.open(log_path, os.O_WRONLY | os.O_CREAT))
    brakes = ActiveBrakes(CgroupBrake(unified=tmp_path / "node/sys/fs/cgroup", freezer=None))
    config = tmp_path / "nodeagent.yaml"
    started: list[Agent] = []

    def loop(
        *,
        forks: ForkMeter | None = None,
        reclaims: ReclaimState | None = None,
        evictions: tuple[InFlightEviction, ...] = (),
        conditions: Mapping[str, ConditionMemory] | None = None,
        thresholds: str = FAR,
        **sampling: str,
    ) -> Loop:
        config.write_text(f"{HEAD}{thresholds}sampling: {sampling}\n")
        file = ConfigFile(str(config), overrides=())
        runtime = bare_runtime(host, file=file, brakes=brakes, log=log)
        runtime = runtime._replace(boottime=clock, monotonic=clock.awake, forks=forks or NoForks())
        loaded, decisions = file.load(), Decisions()
        full_disks, rebuilt = list[str](), list[LoadedConfig]()
        sampler = RecordingSampler(host, loaded.config.sampling, clock, full_disks)
        components = Components(loaded, sampler, decisions, DiskMonitor(host, loaded.config.sampling))
        policy = policy_state.initial("i", now=clock())._replace(
            reclaims=reclaims or ReclaimState(),
            in_flight=InFlightState(evictions),
            conditions=ConditionState(conditions or {}),
        )

        def rebuild(before: Components, loaded: LoadedConfig) -> Components:
            rebuilt.append(loaded)
            return before._replace(loaded=loaded)

        agent = Agent(components, runtime, rebuild=rebuild, policy=policy)
        started.append(agent)
        return Loop(agent, clock, config, brakes, decisions, log_path, writer, sampler, full_disks, rebuilt)

    yield loop
    for agent in started:
        agent.stop()
    writer.close()


def test_a_brake_is_released_at_its_deadline_however_rarely_the_node_is_sampled(
    start: StartLoop, tmp_path: Path
) -> None:
    loop = start(interval="20s")
    [freeze] = (tmp_path / "node/sys/fs/cgroup").glob(f"**/*pod{POD.cgroup_uid.replace('-', '[-_]')}*")
    (freeze / "cgroup.freeze").write_text("0")
    cgroup = f"/{freeze.relative_to(tmp_path / 'node/sys/fs/cgroup')}"
    loop.brakes.plan(cgroup, BrakeKind.FREEZE, pod_uid="u", until=BEGAN + 14.0)
    loop.brakes.apply("u", saved=True)
    assert loop.sync(10.0) == pytest.approx(4.0)
    loop.sync(14.0)
    assert not loop.brakes.active
    assert loop.sync(14.0) == 20.0, "and then no deadline is left"


def test_disks_that_are_far_from_their_thresholds_are_not_read_in_every_sync(start: StartLoop) -> None:
    loop = start(interval="20s")
    read_at = loop.sampler.statvfs_at
    for step in range(1, 2_300):
        loop.sync(step * 0.02)
    assert sorted(set(read_at)) == pytest.approx([0.02, 20.02, 40.02])
    read_at.clear()
    loop.full_disks.append("all")
    for second in (60.1, 60.2, 60.3):
        loop.sync(second)
    assert sorted(set(read_at)) == pytest.approx([60.1, 60.2, 60.3]), "a threshold is crossed"


def test_a_larger_limit_is_read_in_the_next_sync_near_a_threshold_and_rarely_far_from_it(
    start: StartLoop, tmp_path: Path
) -> None:
    # The kubelet's figure: MemAvailable is in the same file as MemTotal, and read in every sync.
    by_working_set = "signals: {memory.available: {memoryModel: workingset}}\n"
    loop = start(interval="1s", thresholds="evictionHard: {memory.available: 1Gi}\n" + by_working_set)

    def sync(after_s: float, available: int, total: int) -> tuple[int | None, int | None]:
        node = Node(memory_available=available, memory_total=total, allocatable_limit=64 * GI, pods=(POD,))
        write_node(tmp_path / "node", node)
        loop.sync(after_s)
        memory = loop.sampler.nodes[-1].observations[Signal.MEMORY]
        return memory.available, memory.capacity

    calm_at = loop.settle() + 1.0  # a second after the pods, for they are read since it is calm
    readings = [sync(calm_at, 40 * GI, 64 * GI)]
    readings += [sync(calm_at + second, 41 * GI, 65 * GI) for second in (1.0, 5.0, schedule.CALM_S)]
    assert readings == [(40 * GI, 64 * GI)] * 3 + [(41 * GI, 65 * GI)]
    for at, available in ((11.0, 1200 * MI), (12.0, 900 * MI)):  # near, and crossed
        sync(calm_at + at, available, 65 * GI)
        assert sync(calm_at + at + 0.1, available + GI, 66 * GI) == (available + GI, 66 * GI)


@pytest.mark.parametrize(("pause_s", "read_again"), [(0.02, False), (0.1, True)])
def test_a_prearmed_pod_reading_is_used_by_a_decision_right_after_it(
    start: StartLoop, tmp_path: Path, pause_s: float, read_again: bool
) -> None:
    loop = start(interval="1s", thresholds="evictionHard: {memory.available: 1Gi}\n")

    def sync(after_s: float, available: int) -> None:
        write_node(tmp_path / "node", Node(memory_available=available, pods=(POD,)))
        loop.sync(after_s)

    settled, pods_at = loop.settle(), loop.sampler.pods_at
    pods_at.clear()
    sync(settled + 1.00, 1300 * MI)
    sync(settled + 1.02, 1280 * MI)
    assert pods_at == [], "far from the threshold"
    sync(settled + 1.04, 1100 * MI)
    assert pods_at == pytest.approx([settled + 1.04]), "15 ms away from it"
    decided = len(loop.decisions.at)
    sync(settled + 1.04 + pause_s, 1000 * MI)
    assert len(loop.decisions.at) == decided + 1
    assert pods_at[1:] == pytest.approx([settled + 1.04 + pause_s] if read_again else [])
    assert loop.decisions.last is not None
    [memory] = [each.observation for each in loop.decisions.last.signals if each.signal is Signal.MEMORY]
    assert memory.available == 1000 * MI, "the node sample is the current one"
    assert loop.decisions.last.made_at == loop.clock.now
    assert loop.decisions.last.ranking, "and the pods are in it"


OWNER = Owner("ReplicaSet", "web", "rs")
API_POD = Pod(POD.cgroup_uid, POD.cgroup_uid, "a", "web", PodSource.API, POD.qos, phase="Running", owner=OWNER)
BRAKED = "mode: enforce\nescalation: {brake: freeze}\nevictionHard: {memory.available: 1Gi}\n"


def test_the_growth_of_a_predicted_victim_is_capped_until_it_is_evicted(start: StartLoop, tmp_path: Path) -> None:
    loop, tree = start(thresholds=BRAKED), tmp_path / "node/sys/fs/cgroup"
    [pod] = tree.glob(f"**/*pod{POD.cgroup_uid.replace('-', '[-_]')}*")
    (pod / "memory.high").write_text("max\n")
    (pod / "cgroup.freeze").write_text("0\n")
    uses = 3 * GI

    def limit(size: int) -> str:
        return str(size - size // 80)

    def sync(after_s: float, available: int, used: int) -> None:
        grown = POD._replace(working_set=used, inactive_file=0)
        write_node(tmp_path / "node", Node(memory_available=available, pods=(grown,)))
        loop.sync(after_s)

    def high() -> str:
        return (pod / "memory.high").read_text().strip()

    sync(0.0, 1700 * MI, uses)
    settled = loop.settle()
    loop.decisions.view = PodsView((API_POD,), loop.clock.now, "")
    sync(settled + 1.00, 1700 * MI, uses)
    assert high() == "max", "no fill yet"
    sync(settled + 1.10, 1500 * MI, uses + 200 * MI)
    assert high() == limit(uses + 200 * MI + 476 * MI), "0.24 s away from it, with 476 MiB left"
    sync(settled + 1.12, 1460 * MI, uses + 240 * MI)
    assert high() == limit(uses + 200 * MI + 476 * MI), "the same limit is right all the way"
    decided = len(loop.decisions.at)
    sync(settled + 1.14, 1000 * MI, uses + 700 * MI)
    assert len(loop.decisions.at) == decided + 1
    assert loop.decisions.last is not None
    assert [victim.pod.uid for victim in loop.decisions.last.victims] == [POD.cgroup_uid]
    # The clock stands still, so the recheck is not newer and refuses it: neither the brake nor the cap is left.
    assert high().startswith("max")  # a kernel's file has no rest of what was written before
    assert loop.brakes.active == ()


def test_a_growth_cap_without_a_crossing_is_released_at_its_deadline(start: StartLoop, tmp_path: Path) -> None:
    loop, tree = start(thresholds=BRAKED), tmp_path / "node/sys/fs/cgroup"
    [pod] = tree.glob(f"**/*pod{POD.cgroup_uid.replace('-', '[-_]')}*")
    (pod / "memory.high").write_text("max\n")
    write_node(tmp_path / "node", Node(memory_available=1700 * MI, pods=(POD,)))
    settled = loop.settle()
    loop.decisions.view = PodsView((API_POD,), loop.clock.now, "")
    for after_s, available in ((1.0, 1700 * MI), (1.1, 1500 * MI), (1.2, 9000 * MI)):
        write_node(tmp_path / "node", Node(memory_available=available, pods=(POD,)))
        sleep_s = loop.sync(settled + after_s)
    assert (pod / "memory.high").read_text().strip().isdigit()
    assert sleep_s == pytest.approx(GROWTH_CAP_S - 0.1), "the loop is there in time"
    loop.sync(settled + 1.1 + GROWTH_CAP_S)
    assert (pod / "memory.high").read_text().startswith("max")


def test_the_first_decision_waits_for_the_api_server_and_not_for_the_interval(start: StartLoop) -> None:
    loop = start(interval="20s")
    loop.decisions.view = PodsView((), None, "not listed yet")
    assert loop.sync(1.0) == pytest.approx(STARTUP_API_WAIT_S - 1.0)
    loop.sync(STARTUP_API_WAIT_S)
    assert loop.decisions.at == [STARTUP_API_WAIT_S]


def test_the_first_decision_does_not_wait_without_an_api_server(start: StartLoop) -> None:
    loop = start(interval="20s")
    assert loop.sync(1.0) == 20.0
    assert loop.decisions.at == [1.0]


@pytest.mark.parametrize("stale_after_s", [2.0, 8.0])
def test_no_full_sample_is_stale_before_the_next_one(start: StartLoop, stale_after_s: float) -> None:
    loop = start(staleAfter=f"{stale_after_s:g}s")
    for second in range(60):
        loop.sync(float(second))
    gaps = [later - earlier for earlier, later in zip(loop.decisions.at, loop.decisions.at[1:], strict=False)]
    assert max(gaps) <= stale_after_s / 2
    assert min(gaps[10:]) >= min(schedule.CALM_S, stale_after_s / 2) - 1.0, "and none without need"


def test_a_new_configuration_is_used_by_the_next_sync(start: StartLoop) -> None:
    loop = start()
    calm_at = loop.settle()
    with Wakeups((signal.SIGHUP,)) as wakeups:
        loop.clock.now = BEGAN + calm_at + 1.0
        loop.config.write_text(f"{HEAD}evictionHard: {{nodefs.available: 2Gi}}\n")
        os.kill(os.getpid(), signal.SIGHUP)
        loop.agent.run(wakeups, syncs=1)
    assert loop.decisions.at[-1] == calm_at, "not in the sync that loaded it"
    loop.sync(calm_at + 1.0)
    assert loop.decisions.at[-1] == calm_at + 1.0


@pytest.mark.parametrize(("suspended_s", "busy_s"), [(25.0, 0.0), (0.0, 25.0)], ids=["suspended", "busy"])
def test_a_machine_that_is_suspended_in_the_middle_of_a_sync_does_not_make_it_late(
    start: StartLoop, suspended_s: float, busy_s: float
) -> None:
    loop = start()

    def pass_time() -> None:
        loop.clock.now += busy_s
        loop.clock.suspend(suspended_s)

    loop.sampler.after_node = pass_time
    with Wakeups((signal.SIGHUP,)) as wakeups:
        loop.agent.run(wakeups, syncs=1)
    log = loop.logged()
    assert '"event":"condition changed"' in log
    assert ("sync started at least" in log) is (busy_s > 0.0)


def test_a_configuration_whose_address_is_in_use_replaces_nothing(start: StartLoop) -> None:
    loop = start()
    with socket.create_server(("127.0.0.1", 0)) as taken, Wakeups((signal.SIGHUP,)) as wakeups:
        for address in (f"127.0.0.1:{taken.getsockname()[1]}", "127.0.0.1:0"):
            loop.config.write_text(f"{HEAD}{FAR}metrics: {{address: '{address}'}}\n")
            os.kill(os.getpid(), signal.SIGHUP)
            loop.agent.run(wakeups, syncs=1)
    assert len(loop.rebuilt) == 1, "the second one"


def test_a_condition_is_released_when_its_hold_ends_and_not_at_the_next_rare_decision(start: StartLoop) -> None:
    memory = ConditionMemory(ConditionStatus.TRUE, BEGAN, "low", last_seen=BEGAN)
    loop = start(conditions={ConditionType.MEMORY_PRESSURE: memory})
    left: list[float] = []
    for second in range(4, 400):
        loop.sync(float(second))
        plan = loop.decisions.last
        assert plan is not None
        [verdict] = [each for each in plan.conditions if each.type is ConditionType.MEMORY_PRESSURE]
        if verdict.status is not ConditionStatus.TRUE:
            break
        left.append(plan.made_at)
    assert 300.0 <= loop.clock.now - BEGAN <= 330.0, "the transition period and its jitter"
    assert loop.clock.now - left[-1] == 1.0


def test_every_sync_decides_until_the_release_of_a_reclaim_action_is_measured(start: StartLoop) -> None:
    until = BEGAN + 30.0
    loop = start(reclaims=ReclaimState({"tidy": ReclaimRun("p", Signal.NODEFS, BEGAN, until, 1)}))
    for second in range(60):
        loop.sync(float(second))
    # Without an outcome it counts as ended when its timeout passes.
    assert set(range(3, 31)) <= set(loop.decisions.at)
    assert loop.settle() < 70.0


@pytest.mark.parametrize("in_flight", [True, False], ids=["an eviction in flight", "none"])
def test_the_node_is_sampled_again_after_its_pods_while_an_eviction_is_in_flight(
    start: StartLoop, tmp_path: Path, in_flight: bool
) -> None:
    eviction = InFlightEviction(
        plan_id="a-1",
        pod_uid="uid-shop-web",
        cgroup_uid="uid-shop-web",
        pod="shop/web",
        owner="rs-shop-web",
        signal=Signal.MEMORY,
        memory_model=MemoryModel.WORKING_SET,
        tier=Tier.HARD,
        stage=EvictionStage.ACCEPTED,
        planned_at=BEGAN,
        sample_at=BEGAN,
        available=100 * MI,
        predicted=GI,
        grace_s=1.0,
        until=BEGAN + 60.0,
        buckets=("node",),
    )
    loop = start(evictions=(eviction,) if in_flight else ())

    def free_memory() -> None:
        write_node(tmp_path / "node", Node(memory_available=6 * GI, pods=(POD,)))
        loop.clock.now += 1.0

    write_node(tmp_path / "node", Node(memory_available=4 * GI, pods=(POD,)))
    loop.sampler.after_pods = free_memory
    loop.sync(STARTUP_API_WAIT_S)
    plan = loop.decisions.last
    assert plan is not None
    [memory] = [each.observation for each in plan.signals if each.signal is Signal.MEMORY]
    assert (memory.available, plan.snapshot_taken_at - BEGAN - STARTUP_API_WAIT_S) == (
        (6 if in_flight else 4) * GI,
        in_flight,
    )


@pytest.mark.real_cgroup
@pytest.mark.skipif(not usable(), reason=NEEDS)
def test_a_node_with_a_fork_storm_is_not_calm(start: StartLoop) -> None:
    clock = Clock()
    meter = ConnectorMeter(open_connector(), open_host("/"), clock=clock, storm_per_s=1.0)
    try:
        loop = start(forks=meter)
        calm_at = loop.settle()
        for _ in range(20):
            os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
        meter.drain(BEGAN + calm_at + 1.5)
        loop.sync(calm_at + 2.0)
        assert loop.decisions.at[-1] == calm_at + 2.0
    finally:
        meter.close()

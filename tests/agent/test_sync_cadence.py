"""While it is calm the loop decides more rarely than it looks: nothing that has a time of its own waits for that."""

import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nodeagent.actuators.brakes import ActiveBrakes
from nodeagent.actuators.cgroup_brake import BrakeKind, CgroupBrake
from nodeagent.actuators.session import NoCluster
from nodeagent.config.config_file import ConfigFile
from nodeagent.config.load import LoadedConfig
from nodeagent.kube.pod_watch import PodsView
from nodeagent.loop import schedule
from nodeagent.loop.agent import STARTUP_API_WAIT_S, Agent
from nodeagent.loop.components import Components
from nodeagent.loop.executor import GROWTH_CAP_S
from nodeagent.model import ConditionStatus, ConditionType, NodeSnapshot, Owner, Plan, Pod, PodSource, Signal
from nodeagent.policy import state as policy_state
from nodeagent.policy.conditions import ConditionMemory, ConditionState
from nodeagent.policy.in_flight import InFlightEviction, InFlightState
from nodeagent.policy.reclaim import ReclaimRun, ReclaimState
from nodeagent.runtime.wakeups import Wakeups
from nodeagent.sampling.disk.monitor import DiskMonitor
from nodeagent.sampling.events.fork_meter import ConnectorMeter, ForkMeter, NoForks
from nodeagent.sampling.events.process_connector import open_connector
from nodeagent.sampling.events.wakeup_sources import WakeupSources
from nodeagent.sampling.hostfs.host import FileSystem, open_host
from nodeagent.sampling.node import filesystems
from nodeagent.sampling.sampler import Sampler
from nodeagent.telemetry.log import LineWriter, open_log
from tests.support.pod_cgroups import NEEDS, usable
from tests.support.runtime import bare_means
from tests.support.trees import GI, MI, Node, TreePod, write_node
from tests.unit.policy.test_in_flight import entry

POD = TreePod("a/web")
BEGAN = 100_000.0
HEAD = (
    "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\nevictionSoft: {}\nevictionSoftGracePeriod: {}\n"
)
FAR = "evictionHard: {nodefs.available: 1Gi}\n"
"""Nothing that could be crossed within 20 s."""


class Clock:
    """It stands still while nobody sets it."""

    now = BEGAN
    slept_s = 0.0

    def __call__(self) -> float:
        return self.now

    def awake(self) -> float:
        """The other clock, which does not count sleep."""
        return self.now - self.slept_s

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept_s += seconds


class Decisions(NoCluster):
    """When they were made."""

    def __init__(self) -> None:
        super().__init__("none here")
        self.at: list[float] = []
        self.last: Plan | None = None
        self.view = super().pods()
        """What an API server tells of."""

    def pods(self) -> PodsView:
        return self.view

    def announce(self, plan: Plan) -> None:
        self.at.append(plan.made_at - BEGAN)
        self.last = plan


class Loop(NamedTuple):
    """An agent without an API server, on a calm node."""

    agent: Agent
    clock: Clock
    config: Path
    holds: ActiveBrakes
    decisions: Decisions
    log: Path
    writer: LineWriter

    def said(self) -> str:
        """What it has logged; it logs no more."""
        self.writer.close(60.0)
        return self.log.read_text()

    def turn(self, after_s: float) -> float:
        """Take one so long after the start; how long the agent would sleep then."""
        self.clock.now = BEGAN + after_s
        return self.agent.sync()

    def settle(self) -> float:
        """Until it is calm; when that was."""
        at = max([STARTUP_API_WAIT_S, *self.decisions.at])
        while self.decisions.at[-2:] != [at - schedule.CALM_S, at]:
            at += 1.0
            self.turn(at)
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
    holds = ActiveBrakes(CgroupBrake(unified=tmp_path / "node/sys/fs/cgroup", freezer=None))
    config = tmp_path / "nodeagent.yaml"
    started: list[Agent] = []

    def loop(
        *,
        forks: ForkMeter | None = None,
        reclaims: ReclaimState | None = None,
        leaving: tuple[InFlightEviction, ...] = (),
        conditions: Mapping[str, ConditionMemory] | None = None,
        thresholds: str = FAR,
        **sampling: str,
    ) -> Loop:
        config.write_text(f"{HEAD}{thresholds}sampling: {sampling}\n")
        file = ConfigFile(str(config), overrides=())
        means = bare_means(host, file=file, alarms=WakeupSources(host), holds=holds, log=log)
        means = means._replace(boottime=clock, monotonic=clock.awake, forks=forks or NoForks())
        loaded, decisions = file.load(), Decisions()
        sampler = Sampler(host, loaded.config.sampling, node_name="n", boottime=clock)
        parts = Components(loaded, sampler, decisions, DiskMonitor(host, loaded.config.sampling))
        policy = policy_state.initial("i", now=clock())._replace(
            reclaims=reclaims or ReclaimState(),
            in_flight=InFlightState(leaving),
            conditions=ConditionState(conditions or {}),
        )
        rebuild: Any = lambda before, loaded: before._replace(loaded=loaded)  # noqa: E731
        agent = Agent(parts, means, rebuild=rebuild, policy=policy)
        started.append(agent)
        return Loop(agent, clock, config, holds, decisions, log_path, writer)

    yield loop
    for agent in started:
        agent.stop()
    writer.close()


def test_what_is_held_is_let_go_at_its_time_however_rarely_the_node_is_looked_at(
    start: StartLoop, tmp_path: Path
) -> None:
    loop = start(interval="20s")
    [freeze] = (tmp_path / "node/sys/fs/cgroup").glob(f"**/*pod{POD.cgroup_uid.replace('-', '[-_]')}*")
    (freeze / "cgroup.freeze").write_text("0")
    cgroup = f"/{freeze.relative_to(tmp_path / 'node/sys/fs/cgroup')}"
    loop.holds.plan(cgroup, BrakeKind.FREEZE, pod_uid="u", until=BEGAN + 14.0)
    loop.holds.apply("u", saved=True)
    assert loop.turn(10.0) == pytest.approx(4.0)
    loop.turn(14.0)
    assert not loop.holds.active
    assert loop.turn(14.0) == 20.0, "and then nothing is waited for"


def test_disks_that_are_far_from_their_thresholds_are_not_read_at_every_look(
    start: StartLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, read, at, full = start(interval="20s"), filesystems.read_filesystems, list[float](), False

    def note(*layout: Any, now: float) -> filesystems.Readings:
        at.append(now - BEGAN)
        seen = read(*layout, now=now)
        assert isinstance(seen.nodefs, FileSystem)
        return seen._replace(nodefs=seen.nodefs._replace(available=0)) if full else seen

    monkeypatch.setattr(filesystems, "read_filesystems", note)
    for look in range(1, 2_300):
        loop.turn(look * 0.02)
    assert at == pytest.approx([0.02, 20.02, 40.02])
    full = True
    for second in (60.1, 60.2, 60.3):
        loop.turn(second)
    assert at[3:] == pytest.approx([60.1, 60.2, 60.3]), "a threshold is crossed"


def test_a_limit_that_grows_is_seen_at_the_next_look_where_it_matters_and_rarely_where_not(
    start: StartLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, look = start(interval="1s", thresholds="evictionHard: {memory.available: 1Gi}\n"), Sampler.sample_node
    seen: list[tuple[int | None, int | None]] = []

    def note(sampler: Sampler, **what: bool) -> NodeSnapshot:
        node = look(sampler, **what)
        seen.append(node.observations[Signal.MEMORY][1:3])
        return node

    def turn(after_s: float, available: int, total: int) -> tuple[int | None, int | None]:
        node = Node(memory_available=available, memory_total=total, allocatable_limit=64 * GI, pods=(POD,))
        write_node(tmp_path / "node", node)
        loop.turn(after_s)
        return seen[-1]

    calm_at = loop.settle() + 1.0  # a second after the pods, for they are read since it is calm
    monkeypatch.setattr(Sampler, "sample_node", note)
    looks = [turn(calm_at, 40 * GI, 64 * GI)]
    looks += [turn(calm_at + second, 41 * GI, 65 * GI) for second in (1.0, 5.0, schedule.CALM_S)]
    assert looks == [(40 * GI, 64 * GI)] * 3 + [(41 * GI, 65 * GI)]
    for at, available in ((11.0, 1200 * MI), (12.0, 900 * MI)):  # near, and crossed
        turn(calm_at + at, available, 65 * GI)
        assert turn(calm_at + at + 0.1, available + GI, 66 * GI) == (available + GI, 66 * GI)


@pytest.mark.parametrize(("pause_s", "anew"), [(0.02, False), (0.1, True)])
def test_pods_that_were_looked_at_right_before_a_crossing_are_not_looked_at_again_in_it(
    start: StartLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause_s: float, anew: bool
) -> None:
    loop, sample, at = start(interval="1s", thresholds="evictionHard: {memory.available: 1Gi}\n"), Sampler.sample, []

    def note(sampler: Sampler, *given: Any, **more: Any) -> NodeSnapshot:
        at.append(loop.clock.now - BEGAN)
        return sample(sampler, *given, **more)

    def turn(after_s: float, available: int) -> None:
        write_node(tmp_path / "node", Node(memory_available=available, pods=(POD,)))
        loop.turn(after_s)

    settled = loop.settle()
    monkeypatch.setattr(Sampler, "sample", note)
    turn(settled + 1.00, 1300 * MI)
    turn(settled + 1.02, 1280 * MI)
    assert at == [], "far from the threshold"
    turn(settled + 1.04, 1100 * MI)
    assert at == pytest.approx([settled + 1.04]), "15 ms away from it"
    decided = len(loop.decisions.at)
    turn(settled + 1.04 + pause_s, 1000 * MI)
    assert len(loop.decisions.at) == decided + 1
    assert at[1:] == pytest.approx([settled + 1.04 + pause_s] if anew else [])
    assert loop.decisions.last is not None
    [memory] = [each.observation for each in loop.decisions.last.signals if each.signal is Signal.MEMORY]
    assert memory.available == 1000 * MI, "the node is seen as it is"
    assert loop.decisions.last.made_at == loop.clock.now
    assert loop.decisions.last.ranking, "and so are its pods"


OWNER = Owner("ReplicaSet", "web", "rs")
API_POD = Pod(POD.cgroup_uid, POD.cgroup_uid, "a", "web", PodSource.API, POD.qos, phase="Running", owner=OWNER)
BRAKED = "mode: enforce\nescalation: {brake: freeze}\nevictionHard: {memory.available: 1Gi}\n"


def test_who_would_have_to_go_is_kept_from_outrunning_the_loop_until_it_has_to(
    start: StartLoop, tmp_path: Path
) -> None:
    loop, tree = start(thresholds=BRAKED), tmp_path / "node/sys/fs/cgroup"
    [pod] = tree.glob(f"**/*pod{POD.cgroup_uid.replace('-', '[-_]')}*")
    (pod / "memory.high").write_text("max\n")
    (pod / "cgroup.freeze").write_text("0\n")
    uses = 3 * GI

    def limit(size: int) -> str:
        return str(size - size // 80)

    def turn(after_s: float, available: int, used: int) -> None:
        grown = POD._replace(working_set=used, inactive_file=0)
        write_node(tmp_path / "node", Node(memory_available=available, pods=(grown,)))
        loop.turn(after_s)

    def high() -> str:
        return (pod / "memory.high").read_text().strip()

    turn(0.0, 1700 * MI, uses)
    settled = loop.settle()
    loop.decisions.view = PodsView((API_POD,), loop.clock.now, "")
    turn(settled + 1.00, 1700 * MI, uses)
    assert high() == "max", "nothing moves"
    turn(settled + 1.10, 1500 * MI, uses + 200 * MI)
    assert high() == limit(uses + 200 * MI + 476 * MI), "0.24 s away from it, with 476 MiB left"
    turn(settled + 1.12, 1460 * MI, uses + 240 * MI)
    assert high() == limit(uses + 200 * MI + 476 * MI), "the same limit is right all the way"
    decided = len(loop.decisions.at)
    turn(settled + 1.14, 1000 * MI, uses + 700 * MI)
    assert len(loop.decisions.at) == decided + 1
    assert loop.decisions.last is not None
    assert [victim.pod.uid for victim in loop.decisions.last.victims] == [POD.cgroup_uid]
    # The clock stands still, so that the second look is not newer and spares it: nothing is left of either.
    assert high().startswith("max")  # a kernel's file has no rest of what was written before
    assert loop.holds.active == ()


def test_a_pod_that_was_guarded_in_vain_is_let_go_in_its_time(start: StartLoop, tmp_path: Path) -> None:
    loop, tree = start(thresholds=BRAKED), tmp_path / "node/sys/fs/cgroup"
    [pod] = tree.glob(f"**/*pod{POD.cgroup_uid.replace('-', '[-_]')}*")
    (pod / "memory.high").write_text("max\n")
    write_node(tmp_path / "node", Node(memory_available=1700 * MI, pods=(POD,)))
    settled = loop.settle()
    loop.decisions.view = PodsView((API_POD,), loop.clock.now, "")
    for after_s, available in ((1.0, 1700 * MI), (1.1, 1500 * MI), (1.2, 9000 * MI)):
        write_node(tmp_path / "node", Node(memory_available=available, pods=(POD,)))
        sleep_s = loop.turn(settled + after_s)
    assert (pod / "memory.high").read_text().strip().isdigit()
    assert sleep_s == pytest.approx(GROWTH_CAP_S - 0.1), "the loop is there in time"
    loop.turn(settled + 1.1 + GROWTH_CAP_S)
    assert (pod / "memory.high").read_text().startswith("max")


def test_the_first_decision_waits_for_the_api_and_not_for_the_second_look(start: StartLoop) -> None:
    loop = start(interval="20s")
    loop.decisions.view = PodsView((), None, "not heard of yet")
    assert loop.turn(1.0) == pytest.approx(STARTUP_API_WAIT_S - 1.0)
    loop.turn(STARTUP_API_WAIT_S)
    assert loop.decisions.at == [STARTUP_API_WAIT_S]


def test_the_first_decision_waits_for_nobody_where_there_is_no_api(start: StartLoop) -> None:
    loop = start(interval="20s")
    assert loop.turn(1.0) == 20.0
    assert loop.decisions.at == [1.0]


@pytest.mark.parametrize("stale_after_s", [2.0, 8.0])
def test_no_whole_sample_is_stale_before_the_next_one(start: StartLoop, stale_after_s: float) -> None:
    loop = start(staleAfter=f"{stale_after_s:g}s")
    for second in range(60):
        loop.turn(float(second))
    gaps = [later - earlier for earlier, later in zip(loop.decisions.at, loop.decisions.at[1:], strict=False)]
    assert max(gaps) <= stale_after_s / 2
    assert min(gaps[10:]) >= min(schedule.CALM_S, stale_after_s / 2) - 1.0, "and none without need"


def test_a_new_configuration_is_decided_by_at_the_next_turn(start: StartLoop) -> None:
    loop = start()
    calm_at = loop.settle()
    with Wakeups((signal.SIGHUP,)) as wakeups:
        loop.clock.now = BEGAN + calm_at + 1.0
        loop.config.write_text(f"{HEAD}evictionHard: {{nodefs.available: 2Gi}}\n")
        os.kill(os.getpid(), signal.SIGHUP)
        loop.agent.run(wakeups, turns=1)
    assert loop.decisions.at[-1] == calm_at, "not in the turn that took it"
    loop.turn(calm_at + 1.0)
    assert loop.decisions.at[-1] == calm_at + 1.0


@pytest.mark.parametrize(("slept_s", "busy_s"), [(25.0, 0.0), (0.0, 25.0)], ids=["asleep", "busy"])
def test_a_machine_that_sleeps_in_the_middle_of_a_turn_keeps_nobody_from_turning(
    start: StartLoop, monkeypatch: pytest.MonkeyPatch, slept_s: float, busy_s: float
) -> None:
    loop = start()
    look = Sampler.sample_node

    def look_and_sleep(sampler: Sampler, **what: bool) -> NodeSnapshot:
        seen = look(sampler, **what)
        loop.clock.now += busy_s
        loop.clock.sleep(slept_s)
        return seen

    monkeypatch.setattr(Sampler, "sample_node", look_and_sleep)
    with Wakeups((signal.SIGHUP,)) as wakeups:
        loop.agent.run(wakeups, turns=1)
    said = loop.said()
    assert '"event":"condition changed"' in said
    assert ("sync started at least" in said) is (busy_s > 0.0)


def test_a_configuration_whose_address_is_taken_replaces_nothing(
    start: StartLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = start()
    rebuilt: list[LoadedConfig] = []

    def rebuild(before: Components, loaded: LoadedConfig) -> Components:
        rebuilt.append(loaded)
        return before

    monkeypatch.setattr(loop.agent, "_rebuild", rebuild)
    with socket.create_server(("127.0.0.1", 0)) as taken, Wakeups((signal.SIGHUP,)) as wakeups:
        for address in (f"127.0.0.1:{taken.getsockname()[1]}", "127.0.0.1:0"):
            loop.config.write_text(f"{HEAD}{FAR}metrics: {{address: '{address}'}}\n")
            os.kill(os.getpid(), signal.SIGHUP)
            loop.agent.run(wakeups, turns=1)
    assert len(rebuilt) == 1, "the second one"


def test_a_condition_is_taken_back_at_its_time_and_not_at_the_next_rare_decision(start: StartLoop) -> None:
    memory = ConditionMemory(ConditionStatus.TRUE, BEGAN, "low", last_seen=BEGAN)
    loop = start(conditions={ConditionType.MEMORY_PRESSURE: memory})
    left: list[float] = []
    for second in range(4, 400):
        loop.turn(float(second))
        plan = loop.decisions.last
        assert plan is not None
        [verdict] = [each for each in plan.conditions if each.type is ConditionType.MEMORY_PRESSURE]
        if verdict.status is not ConditionStatus.TRUE:
            break
        left.append(plan.made_at)
    assert 300.0 <= loop.clock.now - BEGAN <= 330.0, "the transition period and its jitter"
    assert loop.clock.now - left[-1] == 1.0


def test_what_a_reclaim_action_brings_back_is_looked_for_until_it_is_measured(start: StartLoop) -> None:
    until = BEGAN + 30.0
    loop = start(reclaims=ReclaimState({"tidy": ReclaimRun("p", Signal.NODEFS, BEGAN, until, 1)}))
    for second in range(60):
        loop.turn(float(second))
    # Nothing was heard of it, so it counts as having ended when its time was up.
    assert set(range(3, 31)) <= set(loop.decisions.at)
    assert loop.settle() < 70.0


@pytest.mark.parametrize("is_leaving", [True, False], ids=["a pod is on its way out", "none is"])
def test_the_node_is_read_after_its_pods_while_one_of_them_is_on_its_way_out(
    start: StartLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_leaving: bool
) -> None:
    left = entry("web", planned_at=BEGAN, sample_at=BEGAN, until=BEGAN + 60.0)
    loop = start(leaving=(left,) if is_leaving else ())
    look = Sampler.sample

    def slow_look(sampler: Sampler, *arguments: Any, **keywords: Any) -> NodeSnapshot:
        seen = look(sampler, *arguments, **keywords)
        write_node(tmp_path / "node", Node(memory_available=6 * GI, pods=(POD,)))
        loop.clock.now += 1.0
        return seen

    write_node(tmp_path / "node", Node(memory_available=4 * GI, pods=(POD,)))
    monkeypatch.setattr(Sampler, "sample", slow_look)
    loop.turn(STARTUP_API_WAIT_S)
    plan = loop.decisions.last
    assert plan is not None
    [memory] = [each.observation for each in plan.signals if each.signal is Signal.MEMORY]
    assert (memory.available, plan.snapshot_taken_at - BEGAN - STARTUP_API_WAIT_S) == (
        (6 if is_leaving else 4) * GI,
        is_leaving,
    )


@pytest.mark.real_cgroup
@pytest.mark.skipif(not usable(), reason=NEEDS)
def test_a_fork_storm_is_no_calm(start: StartLoop) -> None:
    clock = Clock()
    meter = ConnectorMeter(open_connector(), open_host("/"), clock=clock, storm_per_s=1.0)
    try:
        loop = start(forks=meter)
        calm_at = loop.settle()
        for _ in range(20):
            os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
        meter.drain(BEGAN + calm_at + 1.5)
        loop.turn(calm_at + 2.0)
        assert loop.decisions.at[-1] == calm_at + 2.0
    finally:
        meter.close()

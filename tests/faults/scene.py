"""An agent that may act, on a node in a directory, with a cluster that accepts every eviction."""

import copy
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from nodeagent.actuators import brakes
from nodeagent.actuators.brakes import ActiveBrakes
from nodeagent.actuators.cgroup_brake import CgroupBrake
from nodeagent.actuators.session import NoCluster, Session
from nodeagent.config import load
from nodeagent.config.config_file import ConfigFile
from nodeagent.config.schema import Config
from nodeagent.kube.pod_watch import PodsView
from nodeagent.loop import state_store
from nodeagent.loop.agent import Agent
from nodeagent.loop.components import Components
from nodeagent.loop.state_store import AgentState, Recalled
from nodeagent.model import (
    Container,
    Outcome,
    OutcomeKind,
    Owner,
    Pod,
    PodSource,
    QOSClass,
    RecordingHeader,
    Resources,
    Signal,
    Victim,
)
from nodeagent.policy import state as policy_state
from nodeagent.records.flight_recorder import FlightRecorder
from nodeagent.records.sample_recorder import SampleRecorder
from nodeagent.records.state_file import StateFile
from nodeagent.runtime.agent_lock import AgentLock
from nodeagent.runtime.wakeups import Wakeups
from nodeagent.sampling.disk.monitor import DiskMonitor
from nodeagent.sampling.hostfs import cgroups
from nodeagent.sampling.hostfs.host import Clocks, RecordedHost, Statvfs
from nodeagent.sampling.pods import pod_cgroups
from nodeagent.sampling.sampler import Sampler
from nodeagent.telemetry.log import open_log
from tests.fuzz import scratch
from tests.support.runtime import bare_runtime
from tests.support.trees import GI, MI, Node, TreePod, write_node

HOG, WEB, CRITICAL = "shop/hog", "shop/web", "kube-system/critical"
PODS: Final = (
    TreePod(HOG, working_set=3 * GI, request=100 * MI),
    TreePod(WEB, working_set=200 * MI, request=500 * MI),
    TreePod(CRITICAL, working_set=300 * MI, request=100 * MI),
)
PRIORITIES: Final = {HOG: 0, WEB: 1000, CRITICAL: 2_000_001_000}
BURST: Final = 2
CONFIG: Final = f"""\
apiVersion: nodeagent.io/v1alpha1
kind: NodeAgentConfiguration
mode: enforce
evictionHard: {{memory.available: 1Gi}}
evictionSoft: {{}}
evictionSoftGracePeriod: {{}}
startup: {{freshSamples: 1}}
sampling: {{interval: 1s}}
escalation: {{brake: freeze}}
rateLimits:
  node: {{burst: {BURST}, perHour: 1}}
"""
BEGAN: Final = 100_000.0
CALM: Final = Node(memory_available=4 * GI, pods=PODS)
PRESSED: Final = CALM._replace(memory_available=300 * MI)


class Cluster(NoCluster):
    """Lists the pods and accepts every eviction. No pod ever ends."""

    def __init__(self, now: Any, evicted: list[str] | None = None) -> None:
        """`evicted`: what an earlier session has evicted; oldest first."""
        super().__init__("none")
        self._now = now
        self.evicted: list[str] = [] if evicted is None else evicted
        self.on_eviction: Callable[[str], None] = lambda _: None
        self._outcomes: list[Outcome] = []

    def pods(self) -> PodsView:
        return PodsView(tuple(map(_api_pod, PODS)), self._now(), "")

    def evict(self, plan_id: str, victim: Victim) -> None:
        self.evicted.append(victim.pod.key)
        self.on_eviction(victim.pod.key)
        self._outcomes.append(Outcome(plan_id, victim.pod.uid, OutcomeKind.ACCEPTED, "", self._now(), http_status=201))

    def outcomes(self) -> tuple[Outcome, ...]:
        taken, self._outcomes = tuple(self._outcomes), []
        return taken


class Scene:
    """One agent. `place` is empty and stays the caller's.

    `launch` builds an agent from what an earlier one has left in the place, as a new process does."""

    def __init__(
        self,
        place: Path,
        node: Node,
        *,
        connect: Callable[[Config], Session] | None = None,
        config: str = CONFIG,
        launch: bool = True,
    ) -> None:
        """`connect`: the session with an API server; without it `cluster` is the session. Without `launch` there is no
        agent yet, and no thread."""
        self.place = place
        self.root = place / "node"
        self.root.mkdir()
        self.state = place / "state"
        self.state.mkdir()
        self.write(node)
        self.groups = self.root / "sys/fs/cgroup"
        for pod in self.groups.glob("**/*pod*"):
            (pod / "cgroup.freeze").write_text("0")
        self.config_file = place / "nodeagent.yaml"
        self.config_file.write_text(f"{config}stateDir: {self.state}\n")
        self._connect_session = connect
        self.now = BEGAN
        self.suspended_s = 0.0
        """The part of `now` in which the machine was suspended."""
        self.wall_offset_s = 0.0
        """By how much the wall clock has jumped."""
        self.boot_id = "boot"
        self.blocked_s = 0.0
        """The longest time of a measured sync that cannot be due to a busy machine."""
        self.statvfs: Statvfs | None = None
        """In place of the node's."""
        self.locks = False
        """True: the agent locks its node, as `nodeagent run` does."""
        self.beside = ""
        """The lock of another agent that acts; empty if this one acts."""
        self.beside_since = float("-inf")
        """Since when the next agent has run beside another one that acts."""
        self.cluster = Cluster(lambda: self.now)
        if launch:
            self.launch()
            self.agent.observer.skip_startup_wait()
            assert self._samples is not None
            self._samples.start()

    def launch(self) -> None:
        """Build an agent, as `loop.assembly` does it. It takes its first sample in `start` or `sync`."""
        host = _Host(self)
        file = ConfigFile(str(self.config_file), overrides=())
        loaded = file.load()
        self._log = os.open(self.place / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        log, self._writer = open_log(level="warning", style="json", fd=self._log)
        self.lock = AgentLock(state_dir=str(self.state), kubepods=lambda: str(self.groups)) if self.locks else None
        self.beside = self.lock.take() if self.lock is not None else ""
        if self.beside:
            file = ConfigFile(str(self.config_file), overrides=load.overrides_from({}, mode="dry-run"))
            loaded = file.load()
        self.store = StateFile(self.state / "state", shape=AgentState, boot_id=self.boot_id)
        instance = f"i{self.now:.0f}"
        recalled = state_store.recall(
            self.store.load(), instance=instance, now=self.now, beside_since=self.beside_since
        )
        if self.beside:
            initial = AgentState(policy_state.initial(instance, now=self.now))
            recalled = Recalled(initial, float("-inf"), restored=False, message="")
        brake = CgroupBrake(unified=self.groups, freezer=None)
        hierarchy = cgroups.detect_hierarchy(host)
        kubepods, _ = cgroups.find_kubepods(host, hierarchy, cgroup_root=loaded.config.sampling.cgroup_root)
        pods = pod_cgroups.list_pods(host, hierarchy, kubepods).pods if kubepods is not None else ()
        leftover, notes = brakes.leftover_brakes(
            brake,
            [(pod.path, pod.uid) for pod in pods],
            saved=recalled.state.brakes if recalled.restored else None,
            acts=not self.beside,
        )
        runtime = bare_runtime(host, file=file, brakes=ActiveBrakes(brake, leftover, notes=notes), log=log)
        header = RecordingHeader("n", "0", "i", "boot", 0.0)
        self._samples = None
        if not self.beside:
            self._samples = SampleRecorder(self.state / "samples", max_bytes=1 << 20, header=lambda _: header)
        runtime = runtime._replace(
            boottime=self.tick,
            monotonic=lambda: self.tick() - self.suspended_s,
            store=None if self.beside else self.store,
            recorder=None if self.beside else FlightRecorder(self.state),
            sample_recorder=self._samples,
            lock=self.lock,
            standby=bool(self.beside),
            restorable_until=recalled.restorable_until,
        )
        self.cluster = Cluster(lambda: self.now, self.cluster.evicted)
        self.sampler = Sampler(host, loaded.config.sampling, node_name="n", statvfs=self.statvfs)
        self._disks = DiskMonitor(host, loaded.config.sampling)
        session = self.cluster if self._connect_session is None else self._connect_session(loaded.config)
        components = Components(loaded, self.sampler, session, self._disks)
        self.agent = Agent(components, runtime, rebuild=lambda before, _: before, policy=recalled.state.policy)

    def start(self) -> None:
        """The start of the loop and its first sync, as `nodeagent run --once` does it."""
        self.now += 1.0
        with Wakeups() as wakeups:
            wakeups.wake()
            self.agent.run(wakeups, syncs=1)

    def second(self, name: str) -> "Scene":
        """The same place for a second agent, with a state directory of this name. Not launched."""
        other = copy.copy(self)
        other.state = self.place / name
        other.state.mkdir(exist_ok=True)
        other.config_file = self.place / f"{name}.yaml"
        text = self.config_file.read_text().replace(f"stateDir: {self.state}\n", f"stateDir: {other.state}\n")
        other.config_file.write_text(text)
        return other

    def sync_in_role(self) -> bool:
        """One sync of `nodeagent run`, a second after the last one. True if the agent must start again instead, because
        it may act now and could not before, or the other way round."""
        self.now += 1.0
        self.agent.observer.skip_startup_wait()
        with _OneSync() as wakeups:
            return self.agent.run(wakeups)

    def tick(self) -> float:
        """The clock: a little later at each reading, because the recheck must be newer than the decision."""
        self.now += 1e-5
        return self.now

    def write(self, node: Node) -> None:
        """Change the node in place."""
        write_node(self.root, node)

    def sync(self) -> None:
        """One sync, a second after the last one."""
        self.now += 1.0
        self.agent.sync()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure a sync for `blocked_s`."""
        began, busy = time.monotonic(), _busy_s()
        yield
        self.blocked_s = max(self.blocked_s, time.monotonic() - began - (_busy_s() - busy))

    @property
    def evicted(self) -> list[str]:
        """The pods whose eviction was requested, as the cluster saw it; oldest first."""
        return self.cluster.evicted

    def defects(self) -> str:
        """What a reporting part raised; empty if none did."""
        return "; ".join(note.message for note in self.agent.reporting.notes())

    @property
    def unknown(self) -> str:
        """Why the memory signal is unknown; empty if it is known."""
        latest = self.agent.observer.latest
        if latest is None:
            return "no sample"
        memory = latest.observations[Signal.MEMORY]
        return memory.reason or memory.implausible

    @property
    def frozen(self) -> list[str]:
        """The pods whose cgroup is frozen."""
        return [str(path.parent) for path in self.groups.glob("**/*pod*/cgroup.freeze") if path.read_text() != "0"]

    def close(self) -> None:
        """Stop the agent."""
        self.agent.stop()
        self._writer.close()
        os.close(self._log)
        if self.lock is not None:
            self.lock.release()


def _busy_s() -> float:
    """For how long all threads of this process have run or waited for a processor."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            ran, waited, _ = path.read_text().split()
        except OSError:  # the thread has just ended
            continue
        total += int(ran) + int(waited)
    return total / 1e9


class _OneSync(Wakeups):
    """Ends the loop after the first sync."""

    def wait(self, _: float) -> tuple[frozenset[str], tuple[signal.Signals, ...]]:
        return frozenset(), (signal.SIGTERM,)


class _Host(RecordedHost):
    """The node of a scene, with its clocks."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(str(scene.root))
        self._scene = scene

    def boottime(self) -> float:
        return self._scene.tick()

    def clocks(self) -> Clocks:
        return Clocks(self._scene.tick(), self._scene.suspended_s)

    def wall(self) -> float:
        return super().wall() + self._scene.now - BEGAN + self._scene.wall_offset_s


@contextmanager
def scene(node: Node) -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(dir=scratch.PARENT) as name:
        made = Scene(Path(name), node)
        try:
            yield made
        finally:
            made.close()


def _api_pod(pod: TreePod) -> Pod:
    namespace, _, name = pod.key.partition("/")
    return Pod(
        pod.cgroup_uid,
        pod.cgroup_uid,
        namespace,
        name,
        PodSource.API,
        QOSClass.BURSTABLE,
        priority=PRIORITIES[pod.key],
        phase="Running",
        created_wall=1_799_990_000.0,
        started_wall=1_799_990_000.0,
        containers=(Container("c", requests=Resources(100, pod.request), running=True),),
        owner=Owner("ReplicaSet", name, f"rs-{name}"),
        ready=True,
    )

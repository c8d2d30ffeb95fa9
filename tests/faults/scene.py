"""An agent that may act, on a node in a directory, with a cluster that accepts every eviction."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from nodeagent.actuators.brakes import ActiveBrakes
from nodeagent.actuators.cgroup_brake import CgroupBrake
from nodeagent.actuators.session import NoCluster, Session
from nodeagent.config.config_file import ConfigFile
from nodeagent.config.schema import Config
from nodeagent.kube.pod_watch import PodsView
from nodeagent.loop.agent import Agent
from nodeagent.loop.components import Components
from nodeagent.loop.state_store import AgentState
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
from nodeagent.sampling.disk.monitor import DiskMonitor
from nodeagent.sampling.hostfs.host import open_host
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
_BEGAN: Final = 100_000.0
CALM: Final = Node(memory_available=4 * GI, pods=PODS)
PRESSED: Final = CALM._replace(memory_available=300 * MI)


class Cluster(NoCluster):
    """Lists the pods and accepts every eviction. No pod ever ends."""

    def __init__(self, now: Any) -> None:
        super().__init__("none")
        self._now = now
        self.evicted: list[str] = []
        self._outcomes: list[Outcome] = []

    def pods(self) -> PodsView:
        return PodsView(tuple(map(_api_pod, PODS)), self._now(), "")

    def evict(self, plan_id: str, victim: Victim) -> None:
        self.evicted.append(victim.pod.key)
        self._outcomes.append(Outcome(plan_id, victim.pod.uid, OutcomeKind.ACCEPTED, "", self._now(), http_status=201))

    def outcomes(self) -> tuple[Outcome, ...]:
        taken, self._outcomes = tuple(self._outcomes), []
        return taken


class Scene:
    """One agent. `place` is empty and stays the caller's."""

    def __init__(
        self, place: Path, node: Node, *, connect: Callable[[Config], Session] | None = None, config: str = CONFIG
    ) -> None:
        """`connect`: the session with an API server; without it `cluster` is the session."""
        self.place = place
        self.root = place / "node"
        self.root.mkdir()
        self.state = place / "state"
        self.state.mkdir()
        host = open_host(write_node(self.root, node))
        path = place / "nodeagent.yaml"
        path.write_text(f"{config}stateDir: {self.state}\n")
        file = ConfigFile(str(path), overrides=())
        loaded = file.load()
        self.now = _BEGAN
        self._log = os.open(place / "log", os.O_WRONLY | os.O_CREAT)
        log, self._writer = open_log(level="warning", style="json", fd=self._log)
        groups = self.root / "sys/fs/cgroup"
        for pod in groups.glob("**/*pod*"):
            (pod / "cgroup.freeze").write_text("0")
        runtime = bare_runtime(host, file=file, brakes=ActiveBrakes(CgroupBrake(unified=groups, freezer=None)), log=log)
        header = RecordingHeader("n", "0", "i", "boot", 0.0)
        self.store = StateFile(self.state / "state", shape=AgentState, boot_id="boot")
        runtime = runtime._replace(
            boottime=self._tick,
            monotonic=self._tick,
            store=self.store,
            recorder=FlightRecorder(self.state),
            sample_recorder=SampleRecorder(self.state / "samples", max_bytes=1 << 20, header=lambda: header),
        )
        self.cluster = Cluster(lambda: self.now)
        self.sampler = Sampler(host, loaded.config.sampling, node_name="n", boottime=self._tick)
        self._disks = DiskMonitor(host, loaded.config.sampling)
        session = self.cluster if connect is None else connect(loaded.config)
        components = Components(loaded, self.sampler, session, self._disks)
        self.agent = Agent(
            components,
            runtime,
            rebuild=lambda before, _: before,
            policy=policy_state.initial("i", now=self.now),
        )
        self.agent.observer.skip_startup_wait()
        assert runtime.sample_recorder is not None
        runtime.sample_recorder.start()

    def _tick(self) -> float:
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

    def close(self) -> None:
        self.agent.stop()
        self._writer.close()
        os.close(self._log)


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

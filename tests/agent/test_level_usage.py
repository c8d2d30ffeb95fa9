"""At a memory limit of its own the heap of a pod displaces its page cache, and its usage stays level."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.actuators.brakes import ActiveBrakes
from nodeagent.actuators.cgroup_brake import CgroupBrake
from nodeagent.actuators.session import NoCluster
from nodeagent.config.config_file import ConfigFile
from nodeagent.loop.agent import Agent
from nodeagent.loop.components import Components
from nodeagent.model import Plan, Signal
from nodeagent.policy import state as policy_state
from nodeagent.sampling.disk.monitor import DiskMonitor
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.sampler import Sampler
from nodeagent.telemetry.log import open_log
from tests.support.runtime import bare_runtime
from tests.support.trees import GI, MI, Node, TreePod, write_node

BEGAN = 100_000.0
CACHE = TreePod("a/hog", working_set=200 * MI, inactive_file=7 * GI)
HEAP = CACHE._replace(working_set=7 * GI, inactive_file=200 * MI)
OTHER = TreePod("a/other", working_set=GI)
CONFIG = (
    "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\nevictionSoft: {}\nevictionSoftGracePeriod: {}\n"
    "evictionHard: {memory.available: 1Gi}\n"
)


class Decisions(NoCluster):
    """A cluster that keeps the last plan."""

    plan: Plan | None = None

    def announce(self, plan: Plan) -> None:
        self.plan = plan


class Loop:
    """An agent whose clock stands still between two syncs."""

    def __init__(self, directory: Path) -> None:
        self.now, self._node = BEGAN, directory / "node"
        self._node.mkdir()
        config = directory / "nodeagent.yaml"
        config.write_text(CONFIG)
        host, file, self.decisions = (
            open_host(self._write(Node())),
            ConfigFile(str(config), overrides=()),
            Decisions("none here"),
        )
        loaded = file.load()
        sampler = Sampler(host, loaded.config.sampling, node_name="n", boottime=lambda: self.now)
        components = Components(loaded, sampler, self.decisions, DiskMonitor(host, loaded.config.sampling))
        log, self._writer = open_log(level="info", style="json", fd=os.open("/dev/null", os.O_WRONLY))
        brakes = ActiveBrakes(CgroupBrake(unified=self._node / "sys/fs/cgroup", freezer=None))
        runtime = bare_runtime(host, file=file, brakes=brakes, log=log)
        runtime = runtime._replace(boottime=lambda: self.now, monotonic=lambda: self.now)
        policy = policy_state.initial("i", now=BEGAN)
        self.agent = Agent(components, runtime, rebuild=lambda before, _: before, policy=policy)

    def _write(self, node: Node) -> str:
        return write_node(self._node, node._replace(memory_total=64 * GI, allocatable_limit=60 * GI))

    def sync(self, after_s: float, available: int, *pods: TreePod) -> None:
        self._write(Node(memory_available=available, pods=pods))
        self.now += after_s
        self.agent.sync()

    def stop(self) -> None:
        self.agent.stop()
        self._writer.close()

    def order(self) -> list[tuple[str | None, int | None]]:
        assert self.decisions.plan is not None
        assert self.decisions.plan.ranked_for is Signal.MEMORY
        return [(ranked.view.pod.name, ranked.usage) for ranked in self.decisions.plan.ranking]


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path)
    yield made
    made.stop()


def test_a_decision_ranks_a_pod_by_the_heap_that_displaced_its_page_cache(loop: Loop) -> None:
    for _ in range(8):
        loop.sync(2.0, 40 * GI, CACHE, OTHER)
    loop.sync(2.0, 900 * MI, HEAP, OTHER)
    assert loop.order() == [("hog", 7 * GI), ("other", GI)]


def test_a_prearmed_decision_does_so_too(loop: Loop) -> None:
    for _ in range(8):
        loop.sync(2.0, 1300 * MI, CACHE, OTHER)
    loop.sync(2.0, 1300 * MI, HEAP, OTHER)
    loop.sync(0.02, 1100 * MI, HEAP, OTHER)
    loop.sync(0.02, 900 * MI, HEAP, OTHER)
    assert loop.order() == [("hog", 7 * GI), ("other", GI)]

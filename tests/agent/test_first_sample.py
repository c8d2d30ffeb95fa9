"""A calm start waits a short time for the API server before the first pods are read."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeagent.actuators.brakes import ActiveBrakes
from nodeagent.actuators.cgroup_brake import CgroupBrake
from nodeagent.actuators.session import NoCluster
from nodeagent.config.config_file import ConfigFile
from nodeagent.kube.pod_watch import PodsView
from nodeagent.loop.agent import Agent
from nodeagent.loop.components import Components
from nodeagent.loop.observe import STARTUP_API_WAIT_S
from nodeagent.policy import state as policy_state
from nodeagent.sampling.disk.monitor import DiskMonitor
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.sampler import Sampler
from nodeagent.telemetry.log import open_log
from tests.support.runtime import bare_runtime
from tests.support.trees import GI, MI, Node, TreePod, write_node

PODS = tuple(TreePod(f"a/p{number}") for number in range(20))
BEGAN = 100_000.0


class Silent(NoCluster):
    """An API server that has not answered yet."""

    def pods(self) -> PodsView:
        return PodsView((), None, "not yet")


@pytest.fixture
def sync_at(tmp_path: Path) -> Iterator[Callable[[float, int], bool]]:
    """Sync this many seconds after the start with this much memory available. Returns True if the pods were read."""
    now = BEGAN
    host = open_host(write_node(tmp_path, Node(pods=PODS)))
    file = ConfigFile(None, overrides=())
    loaded = file.load()
    log, writer = open_log(level="error", style="json", fd=os.open(os.devnull, os.O_WRONLY))
    brakes = ActiveBrakes(CgroupBrake(unified=tmp_path / "sys/fs/cgroup", freezer=None))
    runtime = bare_runtime(host, file=file, brakes=brakes, log=log)
    runtime = runtime._replace(boottime=lambda: now, monotonic=lambda: now)
    with Sampler(host, loaded.config.sampling, node_name="n", boottime=lambda: now) as sampler:
        components = Components(loaded, sampler, Silent("not yet"), DiskMonitor(host, loaded.config.sampling))
        policy = policy_state.initial("i", now=now)
        agent = Agent(components, runtime, rebuild=lambda before, _: before, policy=policy)

        def sync(after_s: float, available: int) -> bool:
            nonlocal now
            now = BEGAN + after_s
            write_node(tmp_path, Node(memory_available=available, pods=PODS))
            agent.sync()
            return len(sampler._files) > len(PODS)

        yield sync
        agent.stop()
    writer.close()


def test_a_calm_start_waits_for_the_api_server_for_a_limited_time(sync_at: Callable[[float, int], bool]) -> None:
    assert not sync_at(0.0, 4 * GI)
    assert not sync_at(STARTUP_API_WAIT_S - 0.1, 4 * GI)
    assert sync_at(STARTUP_API_WAIT_S, 4 * GI)


def test_below_a_threshold_the_pods_are_read_at_once(sync_at: Callable[[float, int], bool]) -> None:
    assert sync_at(0.0, 50 * MI)

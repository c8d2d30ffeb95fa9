"""The first look at the pods waits for what the API tells of them, a little while and while it is calm."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeagent.actuators.brakes import ActiveBrakes
from nodeagent.actuators.cgroup_brake import CgroupBrake
from nodeagent.actuators.session import NoCluster
from nodeagent.config.config_file import ConfigFile
from nodeagent.kube.pod_watch import PodsView
from nodeagent.loop.agent import STARTUP_API_WAIT_S, Agent
from nodeagent.loop.components import Components
from nodeagent.policy import state as policy_state
from nodeagent.sampling.disk.monitor import DiskMonitor
from nodeagent.sampling.events.wakeup_sources import WakeupSources
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.sampler import Sampler
from nodeagent.telemetry.log import open_log
from tests.support.runtime import bare_means
from tests.support.trees import GI, MI, Node, TreePod, write_node

PODS = tuple(TreePod(f"a/p{number}") for number in range(20))
BEGAN = 100_000.0


class Silent(NoCluster):
    """There is an API server, and nothing has been heard of it."""

    def pods(self) -> PodsView:
        return PodsView((), None, "not yet")


@pytest.fixture
def turned(tmp_path: Path) -> Iterator[Callable[[float, int], bool]]:
    """Take a turn so many seconds after the start with so much memory available: whether the pods were looked at."""
    now = BEGAN
    host = open_host(write_node(tmp_path, Node(pods=PODS)))
    file = ConfigFile(None, overrides=())
    loaded = file.load()
    log, writer = open_log(level="error", style="json", fd=os.open(os.devnull, os.O_WRONLY))
    holds = ActiveBrakes(CgroupBrake(unified=tmp_path / "sys/fs/cgroup", freezer=None))
    means = bare_means(host, file=file, alarms=WakeupSources(host), holds=holds, log=log)._replace(
        boottime=lambda: now, monotonic=lambda: now
    )
    with Sampler(host, loaded.config.sampling, node_name="n", boottime=lambda: now) as sampler:
        parts = Components(loaded, sampler, Silent("not yet"), DiskMonitor(host, loaded.config.sampling))
        policy = policy_state.initial("i", now=now)
        agent = Agent(parts, means, rebuild=lambda parts, _: parts, policy=policy)

        def turn(after_s: float, available: int) -> bool:
            nonlocal now
            now = BEGAN + after_s
            write_node(tmp_path, Node(memory_available=available, pods=PODS))
            agent.sync()
            return sampler.kept_descriptors > len(PODS)

        yield turn
        agent.stop()
    writer.close()


def test_while_it_is_calm_the_api_is_waited_for_but_not_for_long(turned: Callable[[float, int], bool]) -> None:
    assert not turned(0.0, 4 * GI)
    assert not turned(STARTUP_API_WAIT_S - 0.1, 4 * GI)
    assert turned(STARTUP_API_WAIT_S, 4 * GI)


def test_below_a_threshold_nothing_is_waited_for(turned: Callable[[float, int], bool]) -> None:
    assert turned(0.0, 50 * MI)

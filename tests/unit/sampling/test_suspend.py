"""The machine is suspended in the middle of a sample."""

from pathlib import Path

import pytest

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import NodeSnapshot, Signal
from nodeagent.policy import engine, state
from nodeagent.sampling.hostfs.host import Clocks, FileSystem, RecordedHost
from nodeagent.sampling.sampler import Sampler
from tests.support import nodes
from tests.support.trees import GI, Node, TreePod, write_node

GRACE_S, MET_S, SUSPEND_S = 20.0, 5.0, 25.0


class SuspendingHost(RecordedHost):
    """A recorded host with a clock."""

    awake_s, suspended_s = 1000.0, 0.0
    suspends_for_s = 0.0
    """During the next statvfs."""

    def clocks(self) -> Clocks:
        return Clocks(self.awake_s + self.suspended_s, self.suspended_s)

    def statvfs(self, path: str) -> FileSystem:
        self.suspended_s, self.suspends_for_s = self.suspended_s + self.suspends_for_s, 0.0
        return super().statvfs(path)


@pytest.fixture
def host(tmp_path: Path) -> SuspendingHost:
    return SuspendingHost(str(write_node(tmp_path, Node(memory_available=GI, pods=(TreePod("default/web"),)))))


def test_the_suspended_time_of_a_sample_is_read_with_its_time(host: SuspendingHost) -> None:
    with Sampler(host, SamplingConfig(), node_name="n") as sampler:
        sampler.sample_node()
        host.suspends_for_s = SUSPEND_S
        samples = [sampler.sample_node() for _ in range(2)]
    assert [(each.taken_at, each.suspended_s) for each in samples] == [(1000.0, 0.0), (1000.0 + SUSPEND_S, SUSPEND_S)]


def test_no_grace_period_elapses_during_a_suspend(host: SuspendingHost) -> None:
    config = nodes.config(nodes.soft(grace_s=GRACE_S, value=2 * GI))
    after = state.initial("t", now=host.awake_s)

    def met_for_s(snapshot: NodeSnapshot) -> float:
        nonlocal after
        _, after = engine.decide(snapshot, after, now=snapshot.taken_at, config=config)
        [first] = after.thresholds.first_observed.values()
        return snapshot.taken_at - first

    with Sampler(host, SamplingConfig(), node_name="n") as sampler:
        assert met_for_s(sampler.sample()) == 0.0
        host.awake_s += MET_S
        host.suspends_for_s = SUSPEND_S
        assert met_for_s(sampler.sample()) == MET_S
        assert host.suspended_s == SUSPEND_S, "during the sample"
        host.awake_s += 1.0
        assert met_for_s(sampler.sample()) == pytest.approx(MET_S + 1.0)
        assert sampler.sample_node().observations[Signal.MEMORY].available == GI

"""The machine sleeps in the middle of a sample."""

from pathlib import Path

import pytest

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import NodeSnapshot, Signal
from nodeagent.policy import engine, state
from nodeagent.sampling.hostfs.host import Clocks, FileSystem, RecordedHost
from nodeagent.sampling.sampler import Sampler
from tests.support import nodes
from tests.support.trees import GI, Node, TreePod, write_node

GRACE_S, SEEN_S, SLEEP_S = 20.0, 5.0, 25.0


class Sleepy(RecordedHost):
    """A recorded host with a clock."""

    awake_s, slept_s = 1000.0, 0.0
    sleeps_s = 0.0
    """At the next question for a file system."""

    def clocks(self) -> Clocks:
        return Clocks(self.awake_s + self.slept_s, self.slept_s)

    def statvfs(self, path: str) -> FileSystem:
        self.slept_s, self.sleeps_s = self.slept_s + self.sleeps_s, 0.0
        return super().statvfs(path)


@pytest.fixture
def host(tmp_path: Path) -> Sleepy:
    return Sleepy(str(write_node(tmp_path, Node(memory_available=GI, pods=(TreePod("default/web"),)))))


def test_what_a_sample_says_of_sleep_is_of_the_instant_that_it_names(host: Sleepy) -> None:
    with Sampler(host, SamplingConfig(), node_name="n") as sampler:
        sampler.sample_node()
        host.sleeps_s = SLEEP_S
        seen = [sampler.sample_node() for _ in range(2)]
    assert [(each.taken_at, each.suspended_s) for each in seen] == [(1000.0, 0.0), (1000.0 + SLEEP_S, SLEEP_S)]


def test_no_grace_period_passes_in_it(host: Sleepy) -> None:
    config = nodes.config(nodes.soft(grace_s=GRACE_S, value=2 * GI))
    after = state.initial("t", now=host.awake_s)

    def met_for_s(snapshot: NodeSnapshot) -> float:
        nonlocal after
        _, after = engine.decide(snapshot, after, now=snapshot.taken_at, config=config)
        [first] = after.thresholds.first_observed.values()
        return snapshot.taken_at - first

    with Sampler(host, SamplingConfig(), node_name="n") as sampler:
        assert met_for_s(sampler.sample()) == 0.0
        host.awake_s += SEEN_S
        host.sleeps_s = SLEEP_S
        assert met_for_s(sampler.sample()) == SEEN_S
        assert host.slept_s == SLEEP_S, "while it looked"
        host.awake_s += 1.0
        assert met_for_s(sampler.sample()) == pytest.approx(SEEN_S + 1.0)
        assert sampler.sample_node().observations[Signal.MEMORY].available == GI

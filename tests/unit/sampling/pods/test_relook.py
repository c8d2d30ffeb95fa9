"""What rarely changes is looked up rarely, but pods that were not there are not missed for long."""

from pathlib import Path

import pytest

from nodeagent.config.schema import SamplingConfig
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.sampler import Sampler
from tests.support.trees import MI, Node, TreePod, write_node


def test_an_agent_that_is_up_before_the_kubelet_sees_its_pods_a_second_after_they_came(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node(kubepods=False))
    now = 1000.0
    with Sampler(open_host(root), SamplingConfig(), node_name="n", boottime=lambda: now) as sampler:
        assert sampler.sample().pods == ()
        assert sampler.surroundings().kubepods is None
        write_node(tmp_path, Node(pods=(TreePod("default/late", working_set=100 * MI),)))
        now += 1.0
        [view] = sampler.sample().pods
    assert view.usage is not None
    assert view.usage.memory_working_set == 100 * MI


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_second_look_that_finds_the_same_keeps_descriptors_and_readings(tmp_path: Path, version: str) -> None:
    root = write_node(tmp_path, Node(cgroup=version, pods=(TreePod("default/a"),)))
    now = 1000.0
    with Sampler(open_host(root), SamplingConfig(), node_name="n", boottime=lambda: now) as sampler:
        sampler.sample()
        around = sampler.surroundings()
        now += 57.0
        before = sampler.sample()
        now += 4.0  # sooner than any pod is due
        after = sampler.sample(fresh=False)
        assert sampler.surroundings() == around._replace(looked_at=now)
        assert after.pods[0].usage is before.pods[0].usage

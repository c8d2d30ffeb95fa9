"""The running agent lives within the memory that daemonset.yaml gives it, on 110 pods, in calm and pressure."""

from typing import Final

import pytest

from benchmarks.footprint import HOGS, Footprint, container_resources, measure
from tests.support.livenode import needs_cgroup_v1
from tests.support.manifests import container

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

PODS: Final = 110
"""What a kubelet runs at most by default."""
MOST: Final = 0.45
"""Share of the memory limit. Measured: 0.26 of it; a fresh node charges the agent's own files as well, some 20 MiB
(tests/vm/test_container.py), and a command of `kubectl exec` beside it takes some 30 MiB more."""


@pytest.fixture(scope="module")
def footprint() -> Footprint:
    return measure(PODS, calm_s=3.0)


def test_the_memory_limit_is_never_reached_and_leaves_a_reserve(footprint: Footprint) -> None:
    assert footprint.limit_hits == 0, footprint
    assert footprint.peak < MOST * container_resources().memory_limit, footprint


def test_it_has_started_long_before_a_probe_could_end_it(footprint: Footprint) -> None:
    start, probe = footprint.phases[0], container()["startupProbe"]
    assert start.name == "start"
    assert start.seconds < probe["periodSeconds"] * probe["failureThreshold"] / 10, footprint


def test_the_pod_that_fills_the_memory_is_evicted_in_time_with_these_cpu_shares(footprint: Footprint) -> None:
    assert footprint.evicted[0] == HOGS[0], footprint
    assert set(footprint.evicted) == set(HOGS), footprint

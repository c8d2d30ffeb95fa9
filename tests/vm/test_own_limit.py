"""A container that grows towards its own memory limit on a real cgroup v2 node: preStop and exit code 143 with the
agent, 137 by the kernel without it. `python -m benchmarks.own_limit_ramps` runs more of them."""

import json

import pytest

from tests.vm import own_limit_ramps
from tests.vm.ramps import Node

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]


def test_a_container_near_its_own_limit_ends_with_pre_stop_and_sigterm(node: Node) -> None:
    node.start_agent(**own_limit_ramps.CONFIGURATION)
    ramp = own_limit_ramps.run(node, 10, agent=True)
    assert ramp.polite, (ramp, node.log())
    assert set(ramp.graces) == {own_limit_ramps.GRACE_S}, "the whole grace period of the pod"
    assert ramp.evicted_at_mib is not None
    assert 0.7 * own_limit_ramps.LIMIT_MIB <= ramp.evicted_at_mib < own_limit_ramps.LIMIT_MIB, "trendAbove"
    logged = [json.loads(line) for line in node.log().splitlines() if line.startswith("{")]
    [victim] = {line["pod"] for line in logged if line["event"] == "evicting"}
    [limit] = {line["signal"] for line in logged if line["event"] == "evicting"}
    assert victim.startswith("shop/leak-")
    assert limit == "memory.max"
    assert node.published(), "no pressure of the node"


def test_the_kernel_kills_a_container_at_its_own_limit_without_an_agent(node: Node) -> None:
    node.stop_agent()
    ramp = own_limit_ramps.run(node, 50, agent=False)
    assert (ramp.exit_code, ramp.pre_stop_ended, ramp.graces) == (137, False, ())
    assert ramp.peak_mib >= own_limit_ramps.LIMIT_MIB - 2, "the last huge page did not fit"

"""The simulated fleet of `python -m benchmarks.fleet`, with a few nodes."""

from collections import Counter

import pytest

from benchmarks import fleet
from benchmarks.fleet_traffic import Traffic
from benchmarks.fleet_world import Scenario

NODES = 6
START = Traffic(Counter({"list pods": 2, "get nodes": 1}), Counter())


@pytest.mark.parametrize("scenario", fleet.SCENARIOS, ids=lambda scenario: scenario.name)
def test_each_node_under_pressure_evicts_one_pod_and_a_calm_one_none(scenario: Scenario) -> None:
    world, nodes = fleet.simulate(scenario, NODES, START)
    evictions = sum(world.seconds.get("create pods/eviction", Counter()).values())
    assert evictions == (NODES if scenario.pressure else 0)
    assert all(watch.broken_since is None for node in nodes for watch in node.watches)


def test_a_zone_has_as_many_evictions_at_once_as_slots() -> None:
    def most_at_once(slots: int) -> int:
        world, _ = fleet.simulate(Scenario("slots", slots=slots), NODES, START)
        return max(world.seconds["create pods/eviction"].values())

    assert most_at_once(0) == NODES
    assert most_at_once(1) <= fleet.ZONES

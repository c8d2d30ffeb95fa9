"""Memory ramps on a real cgroup v2 node: the bloated pod goes, the chill one lives, no OOM kill."""

from typing import Any, Final

import pytest

from tests.vm.ramps import HARD_MIB, MIB, Node, Ramp, Result

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

GENTLE: Final = (Ramp(10, 560), Ramp(50, 700), Ramp(100, 1200))
FAST: Final = Ramp(1024, 1500)


def escalation(brake: str) -> dict[str, Any]:
    return {"escalation": {"brake": brake, "hardKill": "cgroup"}}


def assert_won(result: Result) -> None:
    seen = (result.oom_kills, result.victims, result.alive)
    assert seen == (0, ("bloated",), frozenset({"chill"})), f"{result._replace(log='')}\n{result.log}"


@pytest.mark.parametrize("ramp", GENTLE, ids=lambda ramp: f"{ramp.mib_per_s} MiB a second")
def test_an_eviction_alone_wins_a_ramp_of(node: Node, ramp: Ramp) -> None:
    node.start_agent()
    assert_won(node.ramp(ramp))


@pytest.mark.parametrize("brake", ["throttle", "freeze"])
@pytest.mark.parametrize("ramp", [*GENTLE[1:], FAST], ids=lambda ramp: f"{ramp.mib_per_s} MiB a second")
def test_with_a_brake_and_a_kill_it_wins_a_ramp_of(node: Node, ramp: Ramp, brake: str) -> None:
    node.start_agent(**escalation(brake))
    result = node.ramp(ramp)
    assert_won(result)
    # Held in place by its cgroup, it cannot take what is left.
    assert result.lowest > HARD_MIB // 3 * MIB, result

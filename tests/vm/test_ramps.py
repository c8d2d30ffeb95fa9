"""Memory ramps on a real cgroup v2 node: the bloated pod goes, the chill one lives, no OOM kill."""

from typing import Any, Final

import pytest

from tests.vm.pods import start_pod
from tests.vm.ramps import HARD_MIB, MIB, Node, Ramp, Result

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

GENTLE: Final = (Ramp(10, 560), Ramp(50, 700), Ramp(100, 1200))
FAST: Final = Ramp(1024, 1500)
CAP: Final = """\
import os, signal, sys, time
from pathlib import Path
from nodeagent.actuators.cgroup_brake import CgroupBrake
from nodeagent.actuators.brakes import ActiveBrakes
top, cgroup = Path("/sys/fs/cgroup"), sys.argv[1]
pod = top / cgroup.lstrip("/")
used = lambda: int((pod / "memory.current").read_text())
brakes, limit = ActiveBrakes(CgroupBrake(unified=top, freezer=None)), used() + (64 << 20)
brakes.cap_growth(cgroup, limit, pod_uid="u", until=0.0)
pids = [int(pid) for procs in pod.glob("*/cgroup.procs") for pid in procs.read_text().split()]
for pid in pids:
    os.kill(pid, signal.SIGUSR1)
time.sleep(3)
capped = used()
brakes.close()
deadline = time.monotonic() + 20
while used() < 2 * capped and time.monotonic() < deadline:
    time.sleep(0.01)
print(limit, capped, used(), (pod / "memory.high").read_text().strip())
for pid in pids:
    os.kill(pid, signal.SIGKILL)
"""


def escalation(brake: str) -> dict[str, Any]:
    return {"escalation": {"brake": brake, "hardKill": "cgroup"}}


def assert_won(result: Result) -> None:
    seen = (result.oom_kills, result.victims, result.alive)
    assert seen == (0, ("bloated",), frozenset({"chill"})), f"{result._replace(log='')}\n{result.log}"
    assert "memory outside of pods grows" not in result.log, result.log


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


def test_the_kernel_keeps_a_capped_pod_near_its_growth_cap_while_no_agent_runs(node: Node) -> None:
    with node.cast() as cast:
        greedy = cast.add(start_pod(node.machine, "greedy", work="flood 1000000 500"))
        limit, capped, free, high = node.machine.run(
            ["/opt/nodeagent/bin/python", "-c", CAP, greedy.cgroup]
        ).stdout.split()
        assert int(limit) < int(capped) < 1.2 * int(limit), "it grew as far as that"
        assert int(free) >= 2 * int(capped)
        assert high == "max"

"""The machine really sleeps (ACPI S3) while the agent is at work: what was not sampled does not count, and no pod is
evicted for it.

CLOCK_BOOTTIME, on which everything of ours runs, goes on meanwhile; the kubelet's timers stand still.
"""

import time
from collections.abc import Iterator
from typing import Final

import pytest

from tests.vm.machine import Machine
from tests.vm.pods import go, kill_pod, start_pod
from tests.vm.ramps import Node, mem_available_mib

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

GRACE_S: Final = 20.0
SEEN_S: Final = 6.0
"""Of the grace, before the machine sleeps."""
GOES_ON_S: Final = 10.0
"""For what the agent does after it woke, on a busy host."""
LEAVES_S: Final = 5.0
"""The same where a victim is to go: for 16 s in all that the machine is awake it is waited for."""
AHEAD: Final = (
    "import time; now = time.clock_gettime; "
    "print(max(now(time.CLOCK_BOOTTIME) - now(time.CLOCK_MONOTONIC) for _ in range(9)))"
)
"""By how much the one clock is ahead of the other. A machine that stands still between two readings makes it less."""


def sleep(machine: Machine, seconds: int) -> float:
    """Has the machine sleep. Returns for how long it did, by its kernel's clocks."""
    before = float(machine.run(["python3", "-c", AHEAD]).stdout)
    machine.sleep(seconds)
    slept_s = float(machine.run(["python3", "-c", AHEAD]).stdout) - before
    assert abs(slept_s - seconds) < 5, machine.console()[-2000:]
    return slept_s


@pytest.fixture
def same_agent(node: Node) -> Iterator[None]:
    """The agent at the end is the one of the beginning: nothing has killed it, not even the watchdog."""
    yield
    output = node.machine.run(
        "systemctl show --value --property=NRestarts,ActiveState nodeagent.service"
    ).stdout.split()
    assert sorted(output) == ["0", "active"], node.log()
    assert '"level":"error"' not in node.log()


@pytest.mark.usefixtures("same_agent")
@pytest.mark.parametrize("asleep_s", [25, 40], ids=["shorter than staleAfter", "longer than staleAfter"])
def test_a_grace_period_does_not_pass_in_sleep(node: Node, asleep_s: int) -> None:
    machine = node.machine
    threshold = {"memory.available": f"{mem_available_mib(machine) - 300}Mi"}
    node.start_agent(
        evictionHard={}, evictionSoft=threshold, evictionSoftGracePeriod={"memory.available": f"{GRACE_S:g}s"}
    )
    with node.cast() as cast:
        began_at = time.monotonic()
        cast.add(start_pod(machine, "bloated", work="hold 600 1"))
        assert node.api.wait_for(lambda: _pressure(node) == "True", 60), node.log()
        time.sleep(SEEN_S)
        assert not cast.victims
        slept_s = sleep(machine, asleep_s)
        woke_at = time.monotonic()
        assert node.api.wait_for(lambda: node.api.sent("POST", "/eviction"), 60), node.log()
        [eviction] = node.api.sent("POST", "/eviction")
        assert eviction.at - began_at - slept_s >= GRACE_S, node.log()
        assert eviction.at - woke_at < GRACE_S + GOES_ON_S, node.log()


@pytest.mark.usefixtures("same_agent")
def test_a_victim_in_flight_is_waited_for_and_stays_braked(node: Node) -> None:
    machine = node.machine
    with node.cast() as cast:
        node.api.on_eviction = lambda entry, _body: cast.victims.append(entry["metadata"]["name"])
        cast.add(start_pod(machine, "chill", qos_class="Burstable", work="hold 500 1"))
        bloated = cast.add(start_pod(machine, "bloated", work="flood 600 50"))
        node.start_agent(
            evictionHard={"memory.available": "500Mi"},
            evictionSoft={},
            evictionSoftGracePeriod={},
            escalation={"brake": "throttle", "brakeDeadline": "10m"},
        )
        go(machine, bloated)
        assert node.api.wait_for(lambda: cast.victims, 60), node.log()
        sleep(machine, 40)
        time.sleep(LEAVES_S)  # the kubelet of a node that has just woken up
        assert cast.victims == ["bloated"], node.log()
        assert machine.run(f"cat /sys/fs/cgroup{bloated.cgroup}/memory.high").stdout != "max\n"
        kill_pod(machine, bloated)
        node.api.delete_pod(bloated.namespace, bloated.name)
        assert node.api.wait_for(lambda: _pressure(node) == "False", 60), node.log()
        assert cast.victims == ["bloated"]
        assert cast.alive() == {"chill"}


def _pressure(node: Node) -> str:
    condition = node.api.condition("NodeAgentMemoryPressure")
    return condition["status"] if condition else ""

"""What an agent that was killed has left held on cgroup v2 is let go by the next one, also when its state is lost."""

import re
from typing import Final

import pytest

from nodeagent.actuators.cgroup_brake import XATTR
from tests.vm.machine import Machine, wait_for_text
from tests.vm.pods import VmPod, start_pod
from tests.vm.ramps import HARD_MIB, Node, mem_available_mib

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

FORGETFUL: Final = "/etc/systemd/system/nodeagent.service.d/forgetful.conf"
READ: Final = """\
import os, sys
at = f"/sys/fs/cgroup{sys.argv[1]}"
print(os.getxattr(at, sys.argv[2]).decode() if sys.argv[2] in os.listxattr(at) else "no mark", end=" | ")
print(open(f"{at}/memory.high").read().strip(), open(f"{at}/cgroup.freeze").read().strip())
"""
HELD: Final = {"throttle": r"1 throttle max (\d+) \| \1 0", "freeze": r"1 freeze 0 1 \| max 1"}
RUNS: Final = "no mark | max 0"


def read(machine: Machine, pod: VmPod) -> str:
    """The mark, memory.high and cgroup.freeze of a pod."""
    return machine.run(["python3", "-c", READ, pod.cgroup, XATTR]).stdout.strip()


@pytest.mark.parametrize("brake", HELD)
def test_the_next_agent_releases_what_is_marked_and_nothing_else(node: Node, brake: str) -> None:
    machine = node.machine
    machine.write(FORGETFUL, "[Service]\nExecStartPre=/bin/rm -f /run/nodeagent/state\n")
    machine.run("systemctl daemon-reload")
    node.start_agent(escalation={"brake": brake, "brakeDeadline": "10m"})
    try:
        with node.cast() as cast:
            node.api.on_eviction = None  # a kubelet that is in no hurry
            others = cast.add(start_pod(machine, "others"))
            machine.run(f"echo 1 >/sys/fs/cgroup{others.cgroup}/cgroup.freeze")
            grows_to = mem_available_mib(machine) - HARD_MIB + 60
            bloated = cast.add(start_pod(machine, "bloated", work=f"ramp {grows_to} 100"))
            assert node.api.wait_for(lambda: node.api.sent("POST", "/eviction"), 180), node.log()
            held = read(machine, bloated)
            assert re.fullmatch(HELD[brake], held), node.log()

            before = machine.run("systemctl show --value --property=MainPID nodeagent.service").stdout
            machine.run("systemctl kill --signal=KILL nodeagent.service")
            assert read(machine, bloated) == held
            machine.run(
                "timeout 150 sh -c 'until systemctl is-active --quiet nodeagent.service && "
                f"test $(systemctl show --value --property=MainPID nodeagent.service) != {before.strip()}; "
                "do sleep 0.5; done'",
                timeout_s=180,
            )
            machine.run(
                f"timeout 60 sh -c 'until grep -qx max /sys/fs/cgroup{bloated.cgroup}/memory.high && "
                f"grep -qx 0 /sys/fs/cgroup{bloated.cgroup}/cgroup.freeze; do sleep 0.2; done'"
            )
            log = wait_for_text(node.log, "frozen by another program")  # after the release
            assert read(machine, bloated) == RUNS, log
            assert '"trust":"lost"' in log
            assert read(machine, others) == "no mark | max 1"
            assert bloated.cgroup not in log
    finally:
        machine.run(f"rm {FORGETFUL}; systemctl daemon-reload")

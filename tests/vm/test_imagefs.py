"""A container of a real containerd fills its own disk of images and layers; it goes before that is full."""

import uuid
from collections.abc import Iterator
from typing import Final

import pytest

from tests.vm.machine import Machine
from tests.vm.pods import VmPod, go
from tests.vm.ramps import MIB, Node
from tests.vm.test_containerd import IMAGE, MAKE_IMAGE
from tests.vm.test_pressure import free, raised_before_the_eviction

pytestmark = [pytest.mark.vm, pytest.mark.timeout(600)]

STORE: Final = "/var/lib/containerd"
LOWEST: Final = """\
import os, select, sys
lowest = 1 << 62
print("up")
while not select.select([sys.stdin], [], [], 0.01)[0]:
    numbers = os.statvfs(sys.argv[1])
    lowest = min(lowest, numbers.f_bavail * numbers.f_frsize)
print(lowest)
"""
"""Says what was left at least, when its stdin is closed."""
FILL: Final = "dd if=/dev/zero bs=1048576 count=15 >>/grows && sleep 0.1"
"""150 MiB/s, where the machine can do that: as fast as the disk that a kubelet was seen to lose."""


@pytest.fixture(scope="module")
def containerd(machine: Machine) -> Iterator[Machine]:
    machine.run("systemctl start containerd", timeout_s=120)
    machine.run(MAKE_IMAGE, timeout_s=120)
    yield machine
    machine.run("systemctl stop containerd; rm -rf /var/tmp/image")


def start_container(machine: Machine, name: str, script: str) -> VmPod:
    pod = VmPod("shop", name, str(uuid.uuid4()), "BestEffort", uuid.uuid4().hex * 2)
    log = f"/var/log/pods/{pod.namespace}_{pod.name}_{pod.uid}/main"
    script = f"echo 1000 >/proc/self/oom_score_adj; {script}; exec sleep 100000"
    machine.run(f"mkdir -p {log} && echo started >{log}/0.log")
    machine.run(
        ["ctr", "-n", "k8s.io", "run", "--detach", "--runc-systemd-cgroup",
         f"--cgroup={pod.slice}:cri-containerd:{pod.container_id}", IMAGE, pod.container_id, "/bin/sh", "-c", script],
        timeout_s=120,
    )  # fmt: skip
    return pod


def test_a_container_that_fills_the_image_file_system_goes_before_it_is_full(containerd: Machine, node: Node) -> None:
    machine = containerd
    left = free(machine, "avail", STORE)
    assert left > 350 * MIB
    node.start_agent(
        evictionHard={"imagefs.available": "250Mi"},
        evictionSoft={"imagefs.available": "330Mi"},  # publishes the condition and never acts here
        evictionSoftGracePeriod={"imagefs.available": "10m"},
        signals={},
        escalation={"hardKill": "cgroup"},
    )
    made: list[VmPod] = []
    with node.cast() as cast, machine.start(f"python3 -u -c '{LOWEST}' {STORE}") as watcher:
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == "up\n"
        try:
            for name, script in (
                ("chill", "dd if=/dev/zero of=/held bs=1048576 count=20"),
                ("filler", f"trap : USR1; sleep 100000 & wait; while {FILL}; do :; done"),
            ):
                made.append(cast.add(start_container(machine, name, script)))
            go(machine, made[1])
            assert node.wait_until_ended(made[1]), node.log()
            lowest = int(watcher.communicate(timeout=60)[0])
            # Before its layer is removed below the disk stays short, and chill would be the next one.
            assert cast.victims == ["filler"], node.log()
            assert cast.alive() == {"chill"}
            assert raised_before_the_eviction(node.api, "NodeAgentDiskPressure")
        finally:
            for pod in made:
                machine.run(
                    f"ctr -n k8s.io tasks delete --force {pod.container_id}; "
                    f"ctr -n k8s.io containers delete {pod.container_id}; "
                    f"ctr -n k8s.io snapshots delete {pod.container_id}",
                    check=False,
                    timeout_s=120,
                )
    assert lowest > 20 * MIB, f"{lowest >> 20} MiB of {left >> 20} were left\n{node.log()}"

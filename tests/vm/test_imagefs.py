"""A container of a real containerd fills its own disk of images and layers; it goes before that is full."""

import uuid
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from tests.vm.containers import IMAGE, MAKE_IMAGE, remove_containers
from tests.vm.disks import free, watched
from tests.vm.machine import Machine
from tests.vm.pods import VmPod, go
from tests.vm.published import raised_before_the_eviction
from tests.vm.ramps import MIB, Node

pytestmark = [pytest.mark.vm, pytest.mark.timeout(600)]

STORE: Final = "/var/lib/containerd"
FILL: Final = "dd if=/dev/zero bs=1048576 count=15 >>/grows; sleep 0.1"
"""150 MiB/s, where the machine can do that: as fast as the disk that a kubelet was seen to lose."""
FILL_SLOWLY: Final = "dd if=/dev/zero bs=1048576 count=3 >>/grows; sleep 0.1"
LITTER: Final = (
    "for i in 0 1 2 3 4 5 6 7 8 9; do for j in 0 1 2 3 4; do : >/n$n-$i$j; done; done; n=$((n+1)); sleep 0.1"
)
"""At most 500 files a second."""


@pytest.fixture(scope="module")
def containerd(machine: Machine) -> Iterator[Machine]:
    machine.run("systemctl start containerd", timeout_s=240)
    machine.run(MAKE_IMAGE, timeout_s=240)
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
        timeout_s=240,
    )  # fmt: skip
    # Detached is not begun: a signal that comes before the shell's trap is lost.
    machine.run(
        f"timeout 120 sh -c 'until cat /sys/fs/cgroup{pod.cgroup}/*/cgroup.procs | sed s,^,/proc/,\\;s,$,/comm, "
        "| xargs cat | grep -qx sleep; do sleep 0.2; done'",
        timeout_s=150,
    )
    return pod


def bytes_left(machine: Machine) -> tuple[str, str, str]:
    """A signal, what is short of it and what is nearly."""
    assert free(machine, "avail", STORE) > 350 * MIB
    return "imagefs.available", "250Mi", "330Mi"


def fewer_bytes_left(machine: Machine) -> tuple[str, str, str]:
    """The same where the filler has not yet as much as an idle container with 200 MiB."""
    assert free(machine, "avail", STORE) > 400 * MIB
    return "imagefs.available", "120Mi", "170Mi"


def inodes_left(machine: Machine) -> tuple[str, str, str]:
    """The same for files, with 50 s and more from where it is short to where there are none."""
    left = free(machine, "iavail", STORE)
    assert left > 20_000
    return "imagefs.inodesFree", f"{left - 6000}", f"{left - 1500}"


@pytest.mark.parametrize(
    ("fill", "held_mib", "thresholds"),
    [(FILL, 20, bytes_left), (FILL_SLOWLY, 200, fewer_bytes_left), (LITTER, 20, inodes_left)],
    ids=["bytes", "bytes-beside-a-larger-one", "inodes"],
)
def test_a_container_that_fills_the_image_file_system_is_evicted_before_it_is_full(
    containerd: Machine, node: Node, fill: str, held_mib: int, thresholds: Callable[[Machine], tuple[str, str, str]]
) -> None:
    machine = containerd
    signal, hard, soft = thresholds(machine)
    node.start_agent(
        evictionHard={signal: hard},
        evictionSoft={signal: soft},  # publishes the condition and never acts here
        evictionSoftGracePeriod={signal: "10m"},
        signals={},
        escalation={"hardKill": "cgroup"},
    )
    made: list[VmPod] = []
    with node.cast() as cast, watched(machine, STORE) as least:
        try:
            # The signal may also end the first command that it begins, which is one of many.
            for name, script in (
                ("chill", f"dd if=/dev/zero of=/held bs=1048576 count={held_mib}"),
                ("filler", f"trap : USR1; sleep 100000 & wait; while :; do {fill}; done"),
            ):
                made.append(cast.add(start_container(machine, name, script)))
            go(machine, made[1])
            assert node.wait_until_ended(made[1]), node.log()
            # Before its layer is removed below the disk stays short, and chill would be the next one.
            assert cast.victims == ["filler"], node.log()
            assert cast.alive() == {"chill"}
            assert raised_before_the_eviction(node.api, "NodeAgentDiskPressure")
        finally:
            remove_containers(machine, made)
    assert least.bytes > 20 * MIB, f"{least.bytes >> 20} MiB were left\n{node.log()}"
    assert least.inodes > 0, node.log()

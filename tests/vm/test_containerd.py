"""Real containers of a real containerd: what they hold, in memory and in their writable layers, is found.

The cgroups are as a kubelet with the systemd driver has them (`kubepods-besteffort-pod<uid>.slice`, one
`cri-containerd-<id>.scope` for each container); the image is made from the machine's own busybox. There is no kubelet
and no CRI: containers are started by `ctr`, without a sandbox.
"""

import json
import uuid
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.vm.containers import IMAGE, MAKE_IMAGE, remove_containers
from tests.vm.machine import Machine
from tests.vm.pods import VmPod

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

MIB: Final = 1 << 20
ATTRIBUTE: Final = """\
import json, sys, time
from nodeagent.config.schema import SamplingConfig
from nodeagent.sampling.disk.attribution import PodDiskMeter
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.sampler import Sampler
host = open_host("/")
with Sampler(host, SamplingConfig(), node_name="vm-node") as sampler:
    usages = [view.usage for view in sampler.sample().pods if view.usage is not None]
found = PodDiskMeter(host, kubelet_dir="/var/lib/kubelet", pod_logs_dir="/var/log/pods").measure(
    usages, until=time.monotonic() + 60)
json.dump({uid: {c: [d.rootfs_bytes, d.rootfs_inodes] for c, d in disk.containers.items()}
           for uid, disk in found.items()}, sys.stdout)
"""
"""What the agent's own disk worker would measure."""

WRITTEN_MIB: Final = {"writer": 48, "frugal": 3}


@pytest.fixture(scope="module")
def containers(machine: Machine) -> Iterator[dict[str, VmPod]]:
    """Two running containers that have written to their root file systems."""
    machine.run("systemctl start containerd", timeout_s=240)
    machine.run(MAKE_IMAGE, timeout_s=240)
    made = {}
    for name, mebibytes in WRITTEN_MIB.items():
        pod = VmPod("shop", name, str(uuid.uuid4()), "BestEffort", uuid.uuid4().hex * 2)
        log = f"/var/log/pods/{pod.namespace}_{pod.name}_{pod.uid}/main"
        # As a kubelet sets it. Without it a container inherits the shim's -998, which in a pod is the sandbox's mark.
        script = "echo 1000 >/proc/self/oom_score_adj && "
        script += f"dd if=/dev/zero of=/written bs=1048576 count={mebibytes} && echo there >/done && exec sleep 100000"
        machine.run(f"mkdir -p {log} && echo started >{log}/0.log")
        machine.run(
            ["ctr", "-n", "k8s.io", "run", "--detach", "--runc-systemd-cgroup",
             f"--cgroup={pod.slice}:cri-containerd:{pod.container_id}", IMAGE, pod.container_id,
             "/bin/sh", "-c", script],
            timeout_s=240,
        )  # fmt: skip
        machine.run(f"timeout 150 sh -c 'until test -s {upper(machine, pod)}/done; do sleep 0.2; done'")
        made[name] = pod
    machine.run("sync")
    yield made
    remove_containers(machine, made.values())
    for pod in made.values():
        machine.run(
            f"systemctl stop {pod.slice}; rm -rf /var/log/pods/{pod.namespace}_{pod.name}_{pod.uid}",
            check=False,
        )
    machine.run("systemctl stop containerd; rm -rf /var/tmp/image")


def upper(machine: Machine, pod: VmPod) -> str:
    """The container's writable layer, as the kernel's mount table has it; nothing of ours reads it."""
    mounts = machine.run("grep ' - overlay ' /proc/self/mountinfo").stdout
    [mount] = [line for line in mounts.splitlines() if pod.container_id in line]
    return next(option[9:] for option in mount.split()[-1].split(",") if option.startswith("upperdir="))


def test_containers_are_found_with_the_memory_that_the_kernel_charges_them(
    machine: Machine, containers: dict[str, VmPod]
) -> None:
    cgroups = " ".join(f"/sys/fs/cgroup{pod.cgroup}" for pod in containers.values())
    output = machine.run(
        f"/opt/nodeagent/bin/nodeagent check -o json --api never; for c in {cgroups}; do "
        "echo; cat $c/memory.current; grep -w inactive_file $c/memory.stat; cat $c/*.scope/cgroup.procs | wc -l; done",
        check=False,
    ).stdout
    report, end = json.JSONDecoder().raw_decode(output)
    kernel = output[end:].split("\n\n")[1:]
    reported: dict[str, Any] = {each["name"]: each for each in report["pods"]}
    assert reported.keys() == containers.keys()
    for (name, pod), text in zip(containers.items(), kernel, strict=True):
        current, _, inactive, processes = text.split()
        assert reported[name]["uid"] == pod.uid
        assert reported[name]["processCount"] == int(processes) == 1
        working_set = max(0, int(current) - int(inactive))
        assert abs(reported[name]["memoryWorkingSetBytes"] - working_set) <= MIB // 4


def test_a_container_is_charged_for_its_writable_layer(machine: Machine, containers: dict[str, VmPod]) -> None:
    found = json.loads(machine.run(["/opt/nodeagent/bin/python", "-c", ATTRIBUTE], timeout_s=240).stdout)
    assert found.keys() == {pod.uid for pod in containers.values()}
    for name, pod in containers.items():
        directory = upper(machine, pod)
        du = machine.run(f"du -s --block-size=1 {directory}; du -s --inodes {directory}").stdout.split()
        assert found[pod.uid] == {pod.container_id: [int(du[0]), int(du[2])]}
        assert int(du[0]) >= WRITTEN_MIB[name] * MIB

"""daemonset.yaml's pod, run by a real container runtime (runc): what it mounts and may do is enough, and why it asks.

Each test runs one command in a container of its own; tests/vm/test_daemonset_ramps.py runs the agent.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.manifests import Document, as_non_root, with_brake
from tests.vm import agent_container
from tests.vm.agent_container import BUNDLE, MEMORY_LIMIT
from tests.vm.dockerfile import Built
from tests.vm.machine import Machine
from tests.vm.pods import VmPod, kill_pod, start_pod

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

PEAK: Final = "/run/vm/peak"
"""Prints the highest memory charge of the last container."""
CGROUP: Final = "/nodeagent-container"
CHECK: Final = ("check", "--api", "never", "-o", "json")
LARGEST_IMAGE: Final = 95 << 20
"""Unpacked, as `du` counts it. Seen: 86 MB."""
TROUBLE: Final = re.compile(r"not provably|Permission denied|Operation not permitted|No such file")


@pytest.fixture(scope="module")
def image(machine: Machine, agent_image: Built) -> Built:
    """The image, unpacked in the machine at BUNDLE."""
    agent_container.unpack_image(machine, agent_image)
    return agent_image


def run_contained(
    machine: Machine,
    image: Built,
    command: tuple[str, ...],
    *,
    host_pid: bool = True,
    daemonset: Document | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command in the DaemonSet's container; its exit code and output."""
    environment = {"PATH": "/usr/bin:/bin", "NODE_NAME": "vm-node", **image.environment}
    spec = agent_container.runtime_spec(command, environment, cgroup=CGROUP, host_pid=host_pid, daemonset=daemonset)
    machine.write(agent_container.SPEC, json.dumps(spec))
    return machine.run(
        f"timeout 150 runc run --keep --bundle {BUNDLE} nodeagent; s=$?; cat /sys/fs/cgroup{CGROUP}/memory.peak "
        f">{PEAK}; runc delete --force nodeagent; exit $s",
        check=False,
    )


@pytest.fixture(scope="module")
def pods(machine: Machine) -> Iterator[list[VmPod]]:
    made = [
        start_pod(machine, "forker", qos_class="BestEffort", work="hold 8 4"),
        start_pod(machine, "steady", qos_class="Burstable", work="hold 8 2"),
    ]
    yield made
    for each in made:
        kill_pod(machine, each)


def check(machine: Machine, image: Built) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the report from inside the container, the report from outside), of a node where no agent has run."""
    machine.run("rm -rf /run/nodeagent/*")
    contained = run_contained(machine, image, (*image.command, *CHECK, "--host-root", "/host"))
    assert contained.returncode in (0, 1, 2), contained.stderr
    outside = machine.run(("/opt/nodeagent/bin/nodeagent", *CHECK), check=False).stdout
    inside: dict[str, Any] = json.loads(contained.stdout)
    return inside, json.loads(outside)


def test_the_image_is_small_and_has_what_it_needs(machine: Machine, image: Built) -> None:
    size = int(machine.run(f"du -s --block-size=1 {BUNDLE}/rootfs").stdout.split()[0])
    assert size < LARGEST_IMAGE
    coloured = run_contained(machine, image, (*image.command, "check", "--host-root", "/host", "--color", "always"))
    assert "\x1b[" in coloured.stdout, coloured.stderr
    dry_run = run_contained(machine, image, (*image.command, "run", "--host-root", "/host", "--dry-run", "--once"))
    assert dry_run.returncode == 0, dry_run.stderr
    assert '"event":"started"' in dry_run.stdout


def test_with_its_own_files_not_yet_in_memory_it_keeps_half_of_its_limit_free(machine: Machine, image: Built) -> None:
    """They are charged to whoever reads them first, as on a node that has just pulled the image. Seen: 54 MiB."""
    machine.run("sync; echo 3 >/proc/sys/vm/drop_caches")
    dry_run = run_contained(machine, image, (*image.command, "run", "--host-root", "/host", "--dry-run", "--once"))
    assert dry_run.returncode == 0, dry_run.stderr
    assert int(machine.run(f"cat {PEAK}").stdout) < MEMORY_LIMIT // 2


def test_the_container_sees_the_node_as_a_process_of_the_host_does(
    machine: Machine, image: Built, pods: list[VmPod]
) -> None:
    inside, outside = check(machine, image)
    for ours, theirs in zip(inside["signals"], outside["signals"], strict=True):
        assert (ours["name"], ours["capacity"]) == (theirs["name"], theirs["capacity"])
        assert (ours["available"] is None) == (theirs["available"] is None), ours["reason"]
    assert inside["diskLayout"] == outside["diskLayout"] == "dedicated-imagefs"
    known = ("name", "namespace", "uid", "qosClass", "processCount", "memoryRequestBytes")
    assert [{key: pod[key] for key in known} for pod in inside["pods"]] == [
        {key: pod[key] for key in known} for pod in outside["pods"]
    ]
    assert {pod["name"]: pod["processCount"] for pod in inside["pods"]} == {"forker": 4, "steady": 2}
    assert [note for note in inside["notes"] if TROUBLE.search(note["message"])] == []


def test_as_a_user_without_rights_it_sees_all_but_the_usage_of_pods_on_disks(
    machine: Machine, image: Built, pods: list[VmPod]
) -> None:
    """What examples/daemonset-non-root.yaml says. /var/lib/kubelet as a kubelet makes it."""
    inside, _ = check(machine, image)
    volume = pods[0].volume("data")
    machine.run(f"mkdir -p {volume} && chmod 750 /var/lib/kubelet")
    try:
        command = (*image.command, *CHECK, "--host-root", "/host", "--disk")
        ran = run_contained(machine, image, command, daemonset=as_non_root())
        assert ran.returncode in (0, 1, 2), ran.stderr
        seen: dict[str, Any] = json.loads(ran.stdout)
        with_rights: dict[str, Any] = json.loads(run_contained(machine, image, command).stdout)
    finally:
        machine.run(f"rmdir {volume}; chmod 755 /var/lib/kubelet")
    for ours, theirs in zip(seen["signals"], inside["signals"], strict=True):
        assert (ours["name"], ours["capacity"], ours["reason"]) == (
            theirs["name"],
            theirs["capacity"],
            theirs["reason"],
        )
        assert (ours["available"] is None) == (theirs["available"] is None)
    known = ("name", "namespace", "uid", "qosClass", "processCount", "memoryRequestBytes")
    assert [{key: pod[key] for key in known} for pod in seen["pods"]] == [
        {key: pod[key] for key in known} for pod in inside["pods"]
    ]
    disks = {pod["name"]: pod["disk"] for pod in seen["pods"]}
    for disk in disks.values():
        assert not disk["complete"]
        assert any("Permission denied" in reason for reason in disk["unknown"])
    (counted,) = (pod["disk"]["volumesBytes"] for pod in with_rights["pods"] if pod["name"] == pods[0].name)
    assert disks[pods[0].name]["volumesBytes"] == 0 < counted
    dry_run = run_contained(
        machine, image, (*image.command, "run", "--host-root", "/host", "--once"), daemonset=as_non_root()
    )
    assert dry_run.returncode == 0, dry_run.stderr


OPEN_TRIGGER: Final = """
import os, sys
for path in ("/host/proc/pressure/memory", "/proc/pressure/memory"):
    try:
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        os.write(fd, b"some 100000 2000000\\0")
        print("armed")
    except OSError as error:
        print(error.strerror)
"""


def test_the_containers_own_pressure_file_takes_the_psi_trigger_that_the_hosts_read_only_one_refuses(
    machine: Machine, image: Built
) -> None:
    """Without CAP_SYS_RESOURCE: a window of 2 s. No runtime masks or remounts /proc/pressure."""
    tried = run_contained(machine, image, ("python3", "-c", OPEN_TRIGGER))
    assert tried.stdout.splitlines() == ["Read-only file system", "armed"], tried.stderr


LATER: Final = "/var/lib/kubelet/pods/later"
WAIT_FOR_MOUNT: Final = f"""
import select
mounts = open("/proc/self/mountinfo")
changed = select.poll()
changed.register(mounts, select.POLLPRI)
open("/run/nodeagent/ready", "w").close()
while " /host{LATER} " not in (text := mounts.read()):
    assert changed.poll(20000), "no mount came"
    mounts.seek(0)
print([line for line in text.splitlines() if " /host{LATER} " in line][-1])
"""
"""In the container: print that it runs, then wait for the kernel's event of the mount."""


def test_a_volume_that_is_mounted_later_is_seen(machine: Machine, image: Built) -> None:
    """A long-lived container gets the mounts of pods that come after it (HostToContainer)."""
    machine.run(f"mkdir -p {LATER} /run/nodeagent && mkfifo /run/nodeagent/ready")
    machine.run(f"(timeout 150 cat /run/nodeagent/ready && mount -t tmpfs later {LATER}) >/dev/null 2>&1 &")
    try:
        waited = run_contained(machine, image, ("python3", "-c", WAIT_FOR_MOUNT))
        assert waited.returncode == 0, waited.stderr
        assert " - tmpfs later " in waited.stdout
    finally:
        machine.run(f"umount {LATER}; rmdir {LATER}; rm -f /run/nodeagent/ready", check=False)


def test_without_the_hosts_process_ids_the_kernel_shows_zeros(
    machine: Machine, image: Built, pods: list[VmPod]
) -> None:
    """Why daemonset.yaml sets hostPID: the kernel numbers processes for the reader's PID namespace."""
    procs = f"/host/sys/fs/cgroup{pods[0].cgroup}/cri-containerd-{pods[0].container_id}.scope/cgroup.procs"
    read = ("python3", "-c", f"print(open({procs!r}).read())")
    without = run_contained(machine, image, read, host_pid=False).stdout
    with_them = run_contained(machine, image, read, host_pid=True).stdout
    assert without.split() == ["0"] * 4
    assert len({int(number) for number in with_them.split()} - {0}) == 4


def test_the_container_can_change_nothing_of_the_host_but_its_state(machine: Machine, image: Built) -> None:
    attempts = {
        "/host/sys/fs/cgroup/kubepods.slice/memory.high": "max",
        "/host/proc/sys/kernel/pid_max": "4194304",
        "/host/var/lib/kubelet/new": "x",
        "/host/var/log/pods/new": "x",
        "/etc/new": "x",
    }
    for path, value in attempts.items():
        tried = run_contained(machine, image, ("python3", "-c", f"open({path!r}, 'w').write({value!r})"))
        assert tried.returncode != 0
        assert "Read-only file system" in tried.stderr, path
    write = "import os; open('/run/nodeagent/probe', 'w').write('x'); os.remove('/run/nodeagent/probe')"
    kept = run_contained(machine, image, ("python3", "-c", write))
    assert kept.returncode == 0, kept.stderr


BRAKE_AND_KILL: Final = """
import sys
from pathlib import Path
from nodeagent.actuators.cgroup_brake import BrakeKind, CgroupBrake
brake = CgroupBrake(unified=Path("/host/sys/fs/cgroup"), freezer=None)
braked = brake.plan_brake(sys.argv[1], BrakeKind(sys.argv[2]), pod_uid="x", until=0.0)
brake.apply(braked)
print(Path("/host/sys/fs/cgroup" + sys.argv[1], "cgroup.events").read_text())
brake.release(braked)
brake.kill(sys.argv[1])
"""
"""What the agent does to a victim, in the container."""


@pytest.mark.parametrize("kind", ["freeze", "throttle"])
def test_with_its_patch_the_container_can_brake_and_kill_a_pod(machine: Machine, image: Built, kind: str) -> None:
    victim = start_pod(machine, "victim", work="hold 8 3")
    try:
        python = str(Path(image.command[0]).with_name("python"))
        command = (python, "-c", BRAKE_AND_KILL, victim.cgroup, kind)
        without = run_contained(machine, image, command)
        assert "Read-only file system" in without.stderr
        assert machine.run(f"cat /sys/fs/cgroup{victim.cgroup}/cgroup.events").stdout == "populated 1\nfrozen 0\n"
        done = run_contained(machine, image, command, daemonset=with_brake())
        assert done.returncode == 0, done.stderr
        # A freeze takes effect a moment after it was written, if it does before it is released.
        assert done.stdout.startswith("populated 1")
        populated = f'grep -q "populated 1" /sys/fs/cgroup{victim.cgroup}/cgroup.events'
        gone = machine.run(f"timeout 120 sh -c 'while {populated}; do sleep 0.2; done'", check=False)
        assert gone.returncode == 0, "its processes live on"
    finally:
        kill_pod(machine, victim)

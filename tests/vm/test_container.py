"""daemonset.yaml's pod, run by a real container runtime (runc): what it mounts and may do is enough, and why it asks.

The container is made from the manifest: its mounts, capabilities, namespaces and command line. Its root is the
machine's own file system, read-only, in place of the image. Not from the manifest: the seccomp profile, which a
kubelet's runtime brings, and the network.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.deploy.manifests import container, pod_spec
from tests.vm.machine import Machine
from tests.vm.pods import VmPod, kill_pod, start_pod

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

BUNDLE: Final = "/run/vm/bundle"
NODEAGENT: Final = "/opt/nodeagent/bin/nodeagent"
CHECK: Final = (NODEAGENT, "check", "--host-root", "/host", "--api", "never", "-o", "json")
TROUBLE: Final = re.compile(r"not provably|Permission denied|Operation not permitted|No such file")


def runtime_spec(command: tuple[str, ...], *, host_pid: bool) -> dict[str, Any]:
    """The OCI configuration that a kubelet's runtime would make of the manifest."""
    capabilities = [f"CAP_{name}" for name in container()["securityContext"]["capabilities"]["add"]]
    namespaces = ["mount", "ipc", "uts", "network", "cgroup", *([] if host_pid else ["pid"])]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": pod_spec()["securityContext"]["runAsUser"], "gid": 0},
            "args": command,
            "env": ["PATH=/usr/bin:/bin", "NODE_NAME=vm-node"],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            "noNewPrivileges": not container()["securityContext"]["allowPrivilegeEscalation"],
            "oomScoreAdj": -997,
        },
        "root": {"path": f"{BUNDLE}/rootfs", "readonly": container()["securityContext"]["readOnlyRootFilesystem"]},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro", "nosuid", "noexec"]},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"},
            *host_mounts(),
        ],
        "linux": {
            "namespaces": [{"type": name} for name in namespaces],
            "resources": {"memory": {"limit": 96 << 20}},
            "cgroupsPath": "/nodeagent-container",
        },
    }


def host_mounts() -> Iterator[dict[str, Any]]:
    """The manifest's hostPath volumes as bind mounts. A container runtime makes them recursive."""
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in pod_spec()["volumes"] if "hostPath" in volume}
    for mount in container()["volumeMounts"]:
        if mount["name"] in paths:
            propagation = "rslave" if mount.get("mountPropagation") == "HostToContainer" else "rprivate"
            access = "ro" if mount.get("readOnly") else "rw"
            yield {
                "destination": mount["mountPath"],
                "type": "bind",
                "source": paths[mount["name"]],
                "options": ["rbind", access, propagation],
            }


def run_contained(machine: Machine, command: tuple[str, ...], *, host_pid: bool = True) -> tuple[int, str]:
    """(exit code, output) of a command in the DaemonSet's container."""
    machine.write(f"{BUNDLE}/config.json", json.dumps(runtime_spec(command, host_pid=host_pid)))
    machine.run(
        f"mkdir -p {BUNDLE}/rootfs /run/nodeagent && (mountpoint -q {BUNDLE}/rootfs || mount --bind / {BUNDLE}/rootfs)"
    )
    ran = machine.run(f"timeout 50 runc run --bundle {BUNDLE} nodeagent; s=$?; runc delete --force nodeagent; exit $s",
                      check=False)  # fmt: skip
    return ran.returncode, ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def pods(machine: Machine) -> Iterator[list[VmPod]]:
    made = [
        start_pod(machine, "forker", qos_class="BestEffort", work="hold 8 4"),
        start_pod(machine, "steady", qos_class="Burstable", work="hold 8 2"),
    ]
    yield made
    for each in made:
        kill_pod(machine, each)


def check(machine: Machine) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the report from inside the container, the report from outside)."""
    status, text = run_contained(machine, CHECK)
    assert status in (0, 1, 2), text
    outside = machine.run((NODEAGENT, "check", "--api", "never", "-o", "json"), check=False).stdout
    inside: dict[str, Any] = json.loads(text)
    return inside, json.loads(outside)


def test_the_container_sees_the_node_as_a_process_of_the_host_does(machine: Machine, pods: list[VmPod]) -> None:
    inside, outside = check(machine)
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
"""In the container: say that it runs, then wait until the kernel tells of the mount."""


def test_a_volume_that_is_mounted_later_is_seen(machine: Machine) -> None:
    """A long-lived container gets the mounts of pods that come after it (HostToContainer)."""
    machine.run(f"mkdir -p {LATER} /run/nodeagent && mkfifo /run/nodeagent/ready")
    machine.run(f"(timeout 50 cat /run/nodeagent/ready && mount -t tmpfs later {LATER}) >/dev/null 2>&1 &")
    try:
        status, text = run_contained(machine, ("python3", "-c", WAIT_FOR_MOUNT))
        assert status == 0, text
        assert " - tmpfs later " in text
    finally:
        machine.run(f"umount {LATER}; rmdir {LATER}; rm -f /run/nodeagent/ready", check=False)


def test_without_the_hosts_process_ids_the_kernel_shows_zeros(machine: Machine, pods: list[VmPod]) -> None:
    """Why daemonset.yaml says hostPID: the kernel numbers processes for the reader's PID namespace."""
    procs = f"/host/sys/fs/cgroup{pods[0].cgroup}/cri-containerd-{pods[0].container_id}.scope/cgroup.procs"
    _, without = run_contained(machine, ("cat", procs), host_pid=False)
    _, with_them = run_contained(machine, ("cat", procs), host_pid=True)
    assert without.split() == ["0"] * 4
    assert len({int(number) for number in with_them.split()} - {0}) == 4


def test_the_container_can_change_nothing_of_the_host_but_its_state(machine: Machine) -> None:
    attempts = {
        "/host/sys/fs/cgroup/kubepods.slice/memory.high": "max",
        "/host/proc/sys/kernel/pid_max": "4194304",
        "/host/var/lib/kubelet/new": "x",
        "/host/var/log/pods/new": "x",
        "/etc/new": "x",
    }
    for path, value in attempts.items():
        status, text = run_contained(machine, ("sh", "-c", f"echo {value} >{path}"))
        assert status != 0
        assert "Read-only file system" in text, path
    assert run_contained(machine, ("sh", "-c", "echo x >/run/nodeagent/probe && rm /run/nodeagent/probe"))[0] == 0

"""On a real cgroup v2 node `nodeagent check` reports what the kernel reports."""

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.vm.machine import Machine
from tests.vm.pods import VmPod, kill_pod, start_pod

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

MIB: Final = 1 << 20

KERNEL: Final = """\
import json, os, sys
root = "/sys/fs/cgroup"
def number(path): return int(open(path).read())
def stat(path): return {k: int(v) for k, v in (line.split() for line in open(path))}
def held(cgroup):
    procs = sum(len(open(os.path.join(d, "cgroup.procs")).readlines()) for d, _, _ in os.walk(root + cgroup))
    inactive = stat(root + cgroup + "/memory.stat")["inactive_file"]
    return {"working_set": number(root + cgroup + "/memory.current") - inactive, "processes": procs}
def disk(path):
    s = os.statvfs(path)
    return {"free": s.f_bavail * s.f_frsize, "size": s.f_blocks * s.f_frsize, "inodes": s.f_ffree}
node, meminfo = stat(root + "/memory.stat"), dict(line.split(":") for line in open("/proc/meminfo"))
total = int(meminfo["MemTotal"].split()[0]) * 1024
pids = min(number("/proc/sys/kernel/pid_max"), number("/proc/sys/kernel/threads-max"))
json.dump({
    "memory": {
        "capacity": total,
        "workingSetBytes": total - (node["anon"] + node["file"] - node["inactive_file"]),
        "memAvailableBytes": int(meminfo["MemAvailable"].split()[0]) * 1024,
    },
    "nodefs": disk("/var/lib/kubelet"), "imagefs": disk("/var/lib/containerd"),
    "pids": {"capacity": pids, "available": pids - int(open("/proc/loadavg").read().split()[3].split("/")[1])},
    "pods": {cgroup: held(cgroup) for cgroup in sys.argv[1:]},
    "all_pods": held("/kubepods.slice"),
}, sys.stdout)
"""
"""Reads the same facts with nothing of ours."""


@pytest.fixture(scope="module")
def pods(machine: Machine) -> Iterator[dict[str, VmPod]]:
    """Three pods, one of each QoS class, and a limit on all of them as a kubelet sets it."""
    made = {
        "bloated": start_pod(machine, "bloated", qos_class="BestEffort", work="hold 96 3"),
        "steady": start_pod(machine, "steady", qos_class="Burstable", work="hold 32 2"),
        "precious": start_pod(machine, "precious", qos_class="Guaranteed", work="hold 24 1"),
    }
    machine.run("systemctl set-property --runtime kubepods.slice MemoryMax=1500M")
    yield made
    for pod in made.values():
        kill_pod(machine, pod)
    machine.run("systemctl set-property --runtime kubepods.slice MemoryMax=infinity")


@pytest.fixture(scope="module")
def seen(machine: Machine, pods: dict[str, VmPod]) -> dict[str, Any]:
    """The report, and the numbers of the kernel right before and right after it."""
    reader = ["python3", "-c", KERNEL, *(pod.cgroup for pod in pods.values())]
    before = machine.run(reader).stdout
    ran = machine.run(["/opt/nodeagent/bin/nodeagent", "check", "-o", "json", "--api", "never"], check=False)
    after = machine.run(reader).stdout
    assert ran.returncode in (0, 1, 2), ran.stderr
    report = json.loads(ran.stdout)
    return {
        "status": ran.returncode,
        "report": report,
        "signals": {signal["name"]: signal for signal in report["signals"]},
        "kernel": (json.loads(before), json.loads(after)),
    }


def between(value: int, bounds: tuple[int, int], *, slack: int) -> bool:
    """Whether the value lies where the kernel's moved meanwhile, give or take."""
    return min(bounds) - slack <= value <= max(bounds) + slack


def test_the_machine_is_what_the_suite_is_about(bare_machine: Machine) -> None:
    output = bare_machine.run(
        "stat -fc %T /sys/fs/cgroup; cat /proc/pressure/memory /etc/hostname; findmnt -no SOURCE /var/lib/containerd"
    ).stdout
    assert output.startswith("cgroup2fs\nsome avg10=")
    assert output.endswith("vm-node\n/dev/vdb\n")
    assert bare_machine.run("systemctl is-system-running --wait", check=False).stdout == "running\n"


def test_both_figures_of_memory_are_the_kernels_within_what_the_check_itself_uses(seen: dict[str, Any]) -> None:
    signal = seen["signals"]["memory.available"]
    before, after = (kernel["memory"] for kernel in seen["kernel"])
    assert signal["capacity"] == before["capacity"]
    for figure in ("workingSetBytes", "memAvailableBytes"):
        assert between(signal["figures"][figure], (before[figure], after[figure]), slack=48 * MIB)
    assert signal["available"] == min(signal["figures"][figure] for figure in ("workingSetBytes", "memAvailableBytes"))


def test_disks_are_the_two_that_the_node_has(seen: dict[str, Any]) -> None:
    assert seen["report"]["diskLayout"] == "dedicated-imagefs"
    for name in ("nodefs", "imagefs"):
        before, after = (kernel[name] for kernel in seen["kernel"])
        assert seen["signals"][f"{name}.available"]["capacity"] == before["size"]
        assert between(
            seen["signals"][f"{name}.available"]["available"], (before["free"], after["free"]), slack=4 * MIB
        )
        assert between(
            seen["signals"][f"{name}.inodesFree"]["available"], (before["inodes"], after["inodes"]), slack=200
        )


def test_pids_are_the_kernels(seen: dict[str, Any]) -> None:
    before, after = (kernel["pids"] for kernel in seen["kernel"])
    assert seen["signals"]["pid.available"]["capacity"] == before["capacity"]
    assert between(seen["signals"]["pid.available"]["available"], (before["available"], after["available"]), slack=40)


def test_the_limit_of_all_pods_is_a_signal_of_its_own(seen: dict[str, Any]) -> None:
    signal = seen["signals"]["allocatableMemory.available"]
    # More than the sum over the pods: what pods that are gone have left in the kernel's caches is charged to it.
    before, after = (1500 * MIB - kernel["all_pods"]["working_set"] for kernel in seen["kernel"])
    assert signal["capacity"] == 1500 * MIB
    assert between(signal["available"], (before, after), slack=8 * MIB)


def test_every_pod_is_found_with_the_kernels_numbers(seen: dict[str, Any], pods: dict[str, VmPod]) -> None:
    reported = {pod["name"]: pod for pod in seen["report"]["pods"]}
    assert reported.keys() == pods.keys()
    for name, pod in pods.items():
        before, after = (kernel["pods"][pod.cgroup] for kernel in seen["kernel"])
        assert (reported[name]["namespace"], reported[name]["uid"]) == (pod.namespace, pod.uid)
        assert reported[name]["qosClass"] == pod.qos_class
        assert reported[name]["processCount"] == before["processes"] == after["processes"]
        assert between(
            reported[name]["memoryWorkingSetBytes"], (before["working_set"], after["working_set"]), slack=MIB // 4
        )
    assert seen["kernel"][0]["pods"][pods["bloated"].cgroup]["processes"] == 3
    assert seen["kernel"][0]["pods"][pods["bloated"].cgroup]["working_set"] > 96 * MIB


def test_a_calm_node_is_ok_and_the_exit_code_is_zero(seen: dict[str, Any]) -> None:
    states = {name: signal["state"] for name, signal in seen["signals"].items() if signal["thresholds"]}
    assert set(states.values()) == {"ok"}, states
    assert (seen["report"]["state"], seen["status"]) == ("ok", 0)

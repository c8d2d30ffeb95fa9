"""What memory.min and memory.low keep, on a real kernel: page cache below the one is not available, below the other it
is."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import pytest

from tests.vm.machine import Machine
from tests.vm.pods import VmPod, go, kill_pod, start_pod
from tests.vm.ramps import MIB, mem_available_mib

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

CACHE_MIB: Final = 600
PROTECTED_MIB: Final = 800
"""Of the pod and of the cgroups above it: more than the pod holds."""
LEFT_MIB: Final = 200
"""What a process leaves of MemAvailable: less than the page cache that is protected."""

TAKE: Final = """\
eater=/sys/fs/cgroup$2 reader=/sys/fs/cgroup$3 cache=0
count() {
    mapfile -t lines </proc/vmstat
    for line in "${lines[@]}"; do case $line in "oom_kill "*) kills=${line#* };; esac; done
}
count; before=$kills
exec 9<> <(:)
systemctl kill --signal=USR1 $1
while [ $SECONDS -lt 240 ] && [ $kills = $before ] && read -r held <$eater/memory.current && [ $held -le $4 ]; do
    read -r -t 0.1 -u 9; count
done
count
mapfile -t lines <$reader/memory.stat
for line in "${lines[@]}"; do case $line in *active_file*) cache=$((cache + ${line#* }));; esac; done
echo 1 >$eater/cgroup.kill
echo $((kills - before)) $((cache >> 20))
"""
"""Lets the pod begin and waits until it has what it wants or a process was killed. Then it prints OOM kills and the MiB
of page cache, and ends the pod. Only by builtins: a program that has to be read would take minutes in this shortage."""


class Shortage(NamedTuple):
    """What came of a process that took nearly all memory that the kernel calls available."""

    oom_kills: int
    cache_mib: int
    """Page cache of the reading pod afterwards."""


@contextlib.contextmanager
def reader(machine: Machine) -> Iterator[VmPod]:
    """A pod that has read a file twice and waits."""
    pod = start_pod(machine, "reader", work=f"stream /var/tmp 1 {CACHE_MIB} 2 4000")
    try:
        machine.run(f"mkfifo /run/vm/{pod.uid}.done")
        go(machine, pod)
        machine.run(f"timeout 100 cat /run/vm/{pod.uid}.done")
        yield pod
    finally:
        kill_pod(machine, pod)
        machine.run("rm -f /var/tmp/stream-* /run/vm/*.done")


@contextlib.contextmanager
def protection(machine: Machine, pod: VmPod, file: str) -> Iterator[None]:
    """memory.min or memory.low of the pod and, as a kubelet writes them, of the cgroups above."""
    parts = pod.cgroup.strip("/").split("/")
    cgroups = ["/sys/fs/cgroup/" + "/".join(parts[: depth + 1]) for depth in range(len(parts))]

    def write(amount: int) -> None:
        machine.run("; ".join(f"echo {amount} >{cgroup}/{file}" for cgroup in cgroups))

    write(PROTECTED_MIB * MIB)
    try:
        yield
    finally:
        write(0)


def shown_mib(machine: Machine) -> dict[str, int]:
    """MiB of MemAvailable by the kernel and by `nodeagent check`."""
    printed = machine.run("/opt/nodeagent/bin/nodeagent check -o json --api never", check=False).stdout
    report: dict[str, Any] = json.loads(printed)
    return {
        "kernel": mem_available_mib(machine),
        "nodeagent": report["memory"]["memAvailableModel"]["availableBytes"] // MIB,
    }


def cache_mib(machine: Machine, pod: VmPod) -> int:
    lines = machine.run(f"grep -E '^(in)?active_file' /sys/fs/cgroup{pod.cgroup}/memory.stat").stdout.splitlines()
    return sum(int(line.split()[1]) for line in lines) // MIB


def take_nearly_all(machine: Machine, pod: VmPod) -> Shortage:
    """Another pod takes all but `LEFT_MIB` of what the kernel calls available."""
    wanted_mib = mem_available_mib(machine) - LEFT_MIB
    eater = start_pod(machine, "eater", work=f"eat {wanted_mib}")
    try:
        arguments = (eater.slice, eater.cgroup, pod.cgroup, str(wanted_mib * MIB))
        kills, cache_mib = machine.run(["bash", "-c", TAKE, "take", *arguments], timeout_s=300).stdout.split()
        return Shortage(int(kills), int(cache_mib))
    finally:
        kill_pod(machine, eater)


def test_page_cache_below_memory_low_is_taken_before_the_oom_killer_acts(machine: Machine) -> None:
    with reader(machine) as pod, protection(machine, pod, "memory.low"):
        assert cache_mib(machine, pod) > 0.9 * CACHE_MIB
        shown = shown_mib(machine)
        assert abs(shown["kernel"] - shown["nodeagent"]) < 40, "nothing is subtracted"
        came = take_nearly_all(machine, pod)
        assert came.oom_kills == 0
        assert came.cache_mib < CACHE_MIB - LEFT_MIB, "best effort: it was available"


def test_page_cache_below_memory_min_stays_and_is_not_available(machine: Machine) -> None:
    with reader(machine) as pod, protection(machine, pod, "memory.min"):
        shown = shown_mib(machine)
        assert shown["kernel"] - shown["nodeagent"] > 0.8 * CACHE_MIB
        came = take_nearly_all(machine, pod)
        assert came.oom_kills > 0, "the kernel called this memory available"
        assert came.cache_mib > 0.9 * CACHE_MIB

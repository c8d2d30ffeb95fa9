"""Page cache before pods, on real kernels: what memory.reclaim drops, and what a kubelet then does not evict."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.vm import streams
from tests.vm.machine import Machine
from tests.vm.pods import VmPod, go, kill_pod, start_pod
from tests.vm.ramps import MIB, Node

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

SCRIPT: Final = Path(__file__).with_name("reclaim_once.py")
FILE_MIB: Final = 300
ANON_MIB: Final = 200


def reclaim(machine: Machine, pod: VmPod, amount_mib: int, *, keep: int = 0) -> dict[str, Any]:
    """What came of one reclaim of the pod."""
    machine.write("/run/vm/reclaim_once.py", SCRIPT.read_bytes())
    words = ["/opt/nodeagent/bin/python", "/run/vm/reclaim_once.py", pod.cgroup, str(amount_mib * MIB), str(keep)]
    done: dict[str, Any] = json.loads(machine.run(words).stdout)
    return done


def memory(machine: Machine, pod: VmPod) -> dict[str, int]:
    """The pod's memory.stat, and its memory.current and memory.swap.current."""
    directory = f"/sys/fs/cgroup{pod.cgroup}"
    lines = machine.run(f"cat {directory}/memory.stat").stdout.splitlines()
    found = {key: int(value) for key, value in (line.split() for line in lines)}
    current, swapped = machine.run(f"cat {directory}/memory.current {directory}/memory.swap.current").stdout.split()
    return {**found, "current": int(current), "swap.current": int(swapped)}


@contextlib.contextmanager
def pod_with_page_cache(machine: Machine) -> Iterator[VmPod]:
    """A pod that has read a file three times and holds anonymous memory."""
    pod = start_pod(machine, "reader", work=f"stream /var/tmp 1 {FILE_MIB} 3 4000 {ANON_MIB}")
    try:
        machine.run(f"mkfifo /run/vm/{pod.uid}.done")
        go(machine, pod)
        machine.run(f"timeout 100 cat /run/vm/{pod.uid}.done")
        yield pod
    finally:
        kill_pod(machine, pod)
        machine.run("rm -f /var/tmp/stream-* /run/vm/*.done")


@contextlib.contextmanager
def swap(machine: Machine) -> Iterator[None]:
    """The machine with a swap file."""
    machine.run(
        "dd if=/dev/zero of=/var/tmp/swap bs=1M count=300 status=none && chmod 600 /var/tmp/swap && "
        "mkswap -q /var/tmp/swap && swapon /var/tmp/swap"
    )
    try:
        yield
    finally:
        machine.run("swapoff /var/tmp/swap; rm -f /var/tmp/swap")


def test_page_cache_is_dropped_down_to_what_the_order_keeps_and_nothing_else(machine: Machine) -> None:
    with pod_with_page_cache(machine) as pod:
        before = memory(machine, pod)
        assert before["active_file"] > 0.9 * FILE_MIB * MIB, "read again, so the kubelet counts it as used"
        keep = before["current"] - 100 * MIB
        done = reclaim(machine, pod, 2 * FILE_MIB, keep=keep)
        after = memory(machine, pod)
        assert 80 * MIB <= done["reclaimed"] <= 101 * MIB, done
        assert keep <= after["current"] < keep + 20 * MIB
        assert after["anon"] >= before["anon"] - MIB
        assert after["active_file"] < before["active_file"] - 80 * MIB
        rest = reclaim(machine, pod, 2 * FILE_MIB)
        last = memory(machine, pod)
        assert rest["result"] == "stopped"
        assert "no more to reclaim" in rest["message"], "EAGAIN"
        assert last["active_file"] + last["inactive_file"] < 20 * MIB
        assert last["anon"] >= before["anon"] - MIB
        assert machine.run(f"cat /sys/fs/cgroup{pod.cgroup}/cgroup.procs", check=False).returncode == 0


def test_without_swappiness_a_pod_that_could_be_swapped_out_is_left_out(machine: Machine) -> None:
    with swap(machine), pod_with_page_cache(machine) as pod:
        done = reclaim(machine, pod, FILE_MIB)
        assert done["reclaimed"] == 0
        assert "could be swapped out" in done["message"]
        machine.run(f"echo 0 >/sys/fs/cgroup{pod.cgroup}/memory.swap.max")
        done = reclaim(machine, pod, FILE_MIB)
        assert done["reclaimed"] > 0.8 * FILE_MIB * MIB, "as a kubelet sets it for every container"
        assert memory(machine, pod)["swap.current"] == 0


def test_with_swappiness_no_anonymous_memory_is_swapped_out_on_the_newer_machine(newer_machine: Machine) -> None:
    machine = newer_machine
    with swap(machine), pod_with_page_cache(machine) as pod:
        before = memory(machine, pod)
        done = reclaim(machine, pod, FILE_MIB)
        after = memory(machine, pod)
        assert done["reclaimed"] > 0.8 * FILE_MIB * MIB, done
        assert (after["swap.current"], before["swap.current"]) == (0, 0)
        assert after["anon"] >= before["anon"] - MIB


def test_a_pod_that_streams_twice_the_memory_is_not_evicted_for_page_cache(node: Node) -> None:
    alone = streams.stream(node)
    assert alone.evicted, alone
    assert all(sync.mem_available > 2 * sync.available for sync in alone.syncs if sync.evicts), "by page cache alone"
    node.start_agent(**streams.CONFIGURATION)
    beside = streams.stream(node)
    assert not beside.evicted, (beside, node.log())
    assert beside.alive, node.log()
    logged = [json.loads(line) for line in node.log().splitlines() if line.startswith("{")]
    outcomes = [line for line in logged if line["event"].startswith("reclaim ") and line.get("action") == "pageCache"]
    assert any(line["event"] == "reclaim done" and "shop/reader" in line["message"] for line in outcomes), node.log()
    gains = [line["message"] for line in logged if line["event"] == "note" and "pageCache (done)" in line["message"]]
    assert any(" and freed " in gain for gain in gains), node.log()


def test_read_only_cgroups_are_one_note_with_the_remedy(node: Node) -> None:
    node.allow_brake(False)
    try:
        node.start_agent(**streams.CONFIGURATION)
        with node.cast() as cast:
            cast.add(start_pod(node.machine, "idle"))
            node.machine.run("sleep 12")  # a calm agent reads the pods every 10 s
        notes = [line for line in node.log().splitlines() if "page cache of pods is not reclaimed" in line]
        assert len(notes) == 1, node.log()
        assert "read-only: apply examples/daemonset-brake.yaml" in notes[0]
    finally:
        node.allow_brake(True)

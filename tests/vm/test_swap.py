"""A node with a swap file, then with zram: what is swapped out counts, and an eviction frees what it is said to."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.vm.machine import Machine
from tests.vm.pods import VmPod, start_pod
from tests.vm.ramps import MIB, Cast, Node, mem_available_mib

pytestmark = [pytest.mark.vm, pytest.mark.timeout(1200)]

ASLEEP_MIB: Final = 300
AWAKE_MIB: Final = 100
FILLER_MIB: Final = 200
BELOW_MIB: Final = 100
"""How far the filler brings the node below the threshold."""
SWAP_FILE: Final = "/var/tmp/swap"


@contextlib.contextmanager
def swap_file(machine: Machine) -> Iterator[None]:
    machine.run(
        f"dd if=/dev/zero of={SWAP_FILE} bs=1M count=512 status=none && chmod 600 {SWAP_FILE} && mkswap {SWAP_FILE} && "
        f"swapon {SWAP_FILE}"
    )
    try:
        yield
    finally:
        machine.run(f"swapoff {SWAP_FILE}; rm -f {SWAP_FILE}", check=False)


@contextlib.contextmanager
def zram(machine: Machine) -> Iterator[None]:
    machine.run(
        "modprobe zram num_devices=1 && echo 1G >/sys/block/zram0/disksize && mkswap /dev/zram0 && swapon /dev/zram0"
    )
    try:
        yield
    finally:
        machine.run("swapoff /dev/zram0; echo 1 >/sys/block/zram0/reset; modprobe -r zram", check=False)


def put_to_sleep(machine: Machine, pod: VmPod) -> int:
    """Swap out what the pod holds; the bytes that it has in swap then."""
    directory = f"/sys/fs/cgroup{pod.cgroup}"
    # A write fails with EAGAIN as long as the pages count as active; each one makes more of them inactive.
    machine.run(
        f"for i in $(seq 60); do [ $(cat {directory}/memory.swap.current) -gt {(ASLEEP_MIB - 30) * MIB} ] && break; "
        f"echo 64M >{directory}/memory.reclaim || sleep 0.2; done",
        check=False,
    )
    return int(machine.run(f"cat {directory}/memory.swap.current").stdout)


def check(machine: Machine, *arguments: str) -> str:
    """What `nodeagent check` prints; with a threshold met it ends with another status than 0."""
    return machine.run(["/opt/nodeagent/bin/nodeagent", "check", *arguments], check=False).stdout


@contextlib.contextmanager
def running_agent(node: Node, cast: Cast) -> Iterator[VmPod]:
    """The agent, and the pod that brings the node below its threshold. The agent does not run while that pod grows, so
    that its first sample of the pod is a whole one."""
    hard_mib = mem_available_mib(node.machine) - FILLER_MIB + BELOW_MIB
    node.start_agent(evictionHard={"memory.available": f"{hard_mib}Mi"}, evictionSoft={}, evictionSoftGracePeriod={})
    try:
        node.machine.run("systemctl kill --signal=STOP nodeagent.service")
        filler = cast.add(start_pod(node.machine, "filler", work=f"hold {FILLER_MIB} 1"))
        node.machine.run("systemctl kill --signal=CONT nodeagent.service")
        yield filler
    finally:
        node.stop_agent()


def pod_of(found: dict[str, Any], pod: VmPod) -> dict[str, Any]:
    [each] = [each for each in found["pods"] if each["uid"] == pod.uid]
    assert isinstance(each, dict)
    return each


def assert_ranked_by_memory_and_swap(found: dict[str, Any], asleep: VmPod, awake: VmPod, *, swap: int) -> None:
    sleeping = pod_of(found, asleep)
    assert abs(sleeping["memorySwapBytes"] - swap) < 16 * MIB
    assert sleeping["usage"] > (ASLEEP_MIB - 20) * MIB
    assert sleeping["memoryWorkingSetBytes"] < 100 * MIB
    assert sleeping["rank"] < pod_of(found, awake)["rank"], "the larger one first, wherever its memory is"
    assert any("of its usage in swap" in key["text"] for key in sleeping["keys"])


def test_what_is_in_a_swap_file_counts_in_the_order_and_is_no_relief(node: Node) -> None:
    machine = node.machine
    with swap_file(machine), node.cast() as cast:
        awake = cast.add(start_pod(machine, "awake", work=f"hold {AWAKE_MIB} 1"))
        asleep = cast.add(start_pod(machine, "asleep", work=f"noise {ASLEEP_MIB}"))
        swap = put_to_sleep(machine, asleep)
        assert swap > 200 * MIB
        found = json.loads(check(machine, "-o", "json"))
        assert_ranked_by_memory_and_swap(found, asleep, awake, swap=swap)
        assert pod_of(found, asleep)["relief"] < 100 * MIB
        [device] = found["memory"]["swap"]["devices"]
        assert (device["path"], device["kind"], device["memoryBytes"]) == (SWAP_FILE, "file", None)
        assert device["usedBytes"] >= swap
        assert f"file {SWAP_FILE}" in check(machine)
        with running_agent(node, cast) as filler:
            assert node.wait_until_ended(filler), node.log()
            assert cast.victims == ["filler"], node.log()
            assert cast.alive() == {"asleep", "awake"}


def test_what_zram_takes_for_a_pod_is_freed_by_its_eviction(node: Node) -> None:
    machine = node.machine
    with zram(machine), node.cast() as cast:
        awake = cast.add(start_pod(machine, "awake", work=f"hold {AWAKE_MIB} 1"))
        asleep = cast.add(start_pod(machine, "asleep", work=f"noise {ASLEEP_MIB}"))
        swap = put_to_sleep(machine, asleep)
        assert swap > 200 * MIB
        taken = int(machine.run("cat /sys/block/zram0/mm_stat").stdout.split()[2])
        assert taken > 200 * MIB, "noise does not compress"
        found = json.loads(check(machine, "-o", "json"))
        assert_ranked_by_memory_and_swap(found, asleep, awake, swap=swap)
        assert pod_of(found, asleep)["relief"] > 0.8 * taken
        [device] = found["memory"]["swap"]["devices"]
        assert (device["path"], device["kind"]) == ("/dev/zram0", "zram")
        assert 0.9 * taken < device["memoryBytes"] < 1.1 * taken
        assert "zram /dev/zram0: takes" in check(machine)
        with running_agent(node, cast):
            before = mem_available_mib(machine)
            assert node.wait_until_ended(asleep), node.log()
            assert cast.victims == ["asleep"], node.log()
            assert cast.alive() == {"filler", "awake"}
            assert mem_available_mib(machine) - before > 0.8 * taken / MIB, "the kernel has it back"

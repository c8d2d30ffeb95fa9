"""Swap devices, and the memory that zram takes."""

import contextlib
from pathlib import Path

import pytest

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import NodeMemory, SwapDevice
from nodeagent.sampling.hostfs.fd_cache import FdCache
from nodeagent.sampling.hostfs.host import Host, open_host
from nodeagent.sampling.node import swap
from nodeagent.sampling.sampler import Sampler
from tests.support.trees import GI, MI, Node, TreePod, write_node

HEADER = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
ZRAM = "/dev/zram0                              partition\t1048572\t\t524288\t\t100\n"
FILE = "/swap\\040file                            file\t\t2097148\t\t1024\t\t-2\n"
MM_STAT = "536870912 104857600 110100480        0 110100480     1024        0        0        0\n"


def _read(root: Path, swaps: str) -> tuple[SwapDevice, ...]:
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/swaps").write_text(swaps)
    host = Host(str(root))
    with contextlib.closing(FdCache(host, limit=8)) as files:
        return swap.read_swaps(host, files)


def _write_mm_stat(root: Path, text: str, name: str = "zram0") -> None:
    path = root / "sys/block" / name / "mm_stat"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_each_device_has_its_kind_its_size_and_what_it_holds(tmp_path: Path) -> None:
    _write_mm_stat(tmp_path, MM_STAT)
    zram, file = _read(tmp_path, HEADER + ZRAM + FILE)
    assert zram == SwapDevice("/dev/zram0", "zram", 1048572 << 10, 512 * MI, 105 * MI)
    assert file == SwapDevice("/swap\\040file", "file", 2097148 << 10, MI, None)


@pytest.mark.parametrize("text", ["", "1 2", "1 2 x 4\n", "1 2 -3 4\n"])
def test_a_zram_whose_memory_cannot_be_read_takes_an_unknown_amount(tmp_path: Path, text: str) -> None:
    _write_mm_stat(tmp_path, text)
    [device] = _read(tmp_path, HEADER + ZRAM)
    assert (device.kind, device.used, device.memory) == ("zram", 512 * MI, None)


@pytest.mark.parametrize(
    "swaps", ["", HEADER, HEADER + "/dev/sda2 partition\n", HEADER + "/dev/sda2 partition x y -1\n"]
)
def test_malformed_lines_and_no_lines_are_no_devices(tmp_path: Path, swaps: str) -> None:
    assert _read(tmp_path, swaps) == ()


def test_without_proc_swaps_there_are_no_devices(tmp_path: Path) -> None:
    host = Host(str(tmp_path))
    with contextlib.closing(FdCache(host, limit=8)) as files:
        assert swap.read_swaps(host, files) == ()


def test_zram_beside_other_names_is_told_by_its_device_alone(tmp_path: Path) -> None:
    devices = _read(
        tmp_path, HEADER + "/var/zram0.swap file 4 0 -2\n/dev/zram12 partition 4 0 5\n/dev/zram partition 4 0 5\n"
    )
    assert [device.kind for device in devices] == ["file", "zram", "partition"]


def _memory(root: str) -> NodeMemory:
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
        memory = sampler.sample().memory
    assert memory is not None
    return memory


def test_a_sample_contains_the_devices_of_a_node_with_swap(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node(swap_total=3 * GI, swap_free=2 * GI, pods=(TreePod("a/b"),)))
    (tmp_path / "proc/swaps").write_text(HEADER + ZRAM + FILE)
    _write_mm_stat(tmp_path, MM_STAT)
    memory = _memory(root)
    assert [device.kind for device in memory.swaps] == ["zram", "file"]
    assert (memory.swap_total, memory.swap_free, memory.zram) == (3 * GI, 2 * GI, 105 * MI)


def test_without_swap_no_device_is_read(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node())
    (tmp_path / "proc/swaps").write_text(HEADER + ZRAM)
    assert _memory(root).swaps == ()

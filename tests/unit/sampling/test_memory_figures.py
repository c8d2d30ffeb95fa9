"""Nodes from their files to the decision: what both figures of memory make of them with the built-in thresholds."""

import re
from pathlib import Path

import pytest

from nodeagent.config import load
from nodeagent.config.schema import SamplingConfig, StartupConfig
from nodeagent.model import MemoryFigures, MemoryModel, NodeSnapshot, Plan, RefusalCode, Signal, SignalState
from nodeagent.policy import engine
from nodeagent.policy.state import initial
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.sampler import Sampler
from tests.support import nodes
from tests.support.paths import RECORDED_NODES
from tests.support.trees import GI, MI, Node, TreePod, write_node

HOG = TreePod("shop/hog", working_set=2 * GI)


def sampled(root: str, *, owned: TreePod | None = HOG) -> NodeSnapshot:
    """The sample of this tree; the API server lists `owned`."""
    host = open_host(root)
    with Sampler(host, SamplingConfig(), node_name="n") as sampler:
        now = sampler.sample_node().taken_at
        listed = []
        if owned is not None:
            uid, wall = owned.cgroup_uid, host.wall() - 3600.0
            listed = [nodes.pod("hog")._replace(uid=uid, cgroup_uid=uid, created_wall=wall, started_wall=wall)]
        return sampler.sample(listed, now)


def decided(snapshot: NodeSnapshot) -> Plan:
    config = load.defaults().config._replace(startup=StartupConfig(fresh_samples=1))
    at = snapshot.taken_at
    return engine.decide(snapshot, initial("test", now=at), now=at, config=config)[0]


def codes(plan: Plan) -> set[RefusalCode]:
    return {refusal.code for refusal in plan.refusals}


def without(root: str, field: str) -> str:
    """The tree with a field of /proc/meminfo taken out."""
    meminfo = Path(root, "proc/meminfo")
    meminfo.write_text(re.sub(rf"^{field}:.*\n", "", meminfo.read_text(), flags=re.MULTILINE))
    return root


def test_a_node_of_8_gib_with_1_gib_of_slab_evicts_although_the_kubelet_sees_a_gigabyte(tmp_path: Path) -> None:
    node = Node(memory_available=1100 * MI, mem_available=100 * MI, pods=(HOG,))
    plan = decided(sampled(write_node(tmp_path, node)))
    assert [victim.pod.name for victim in plan.victims] == ["hog"]
    assert plan.deficit is not None
    assert plan.deficit.amount == 100 * MI
    assert plan.victims[0].message.startswith(
        "The node was low on resource: memory. Threshold quantity: 200Mi, available: 100Mi. "
    )
    assert plan.victims[0].message.endswith("Measured: 1.07Gi by working set, 100Mi by MemAvailable. ")


def test_a_node_full_of_page_cache_has_the_condition_and_loses_no_pod(tmp_path: Path) -> None:
    node = Node(memory_available=50 * MI, mem_available=6 * GI, pods=(HOG,))
    plan = decided(sampled(write_node(tmp_path, node)))
    assert (plan.victims, codes(plan)) == ((), {RefusalCode.PAGE_CACHE_ONLY})
    condition = plan.conditions[0]
    assert condition.status == "True"
    assert "50Mi by working set, 6Gi by MemAvailable" in condition.message
    assert condition.message.endswith(": page cache only, evicts no pod")


def test_a_node_with_both_figures_low_evicts_what_ends_the_shortage(tmp_path: Path) -> None:
    node = Node(memory_available=60 * MI, mem_available=240 * MI, pods=(HOG,))
    plan = decided(sampled(write_node(tmp_path, node)))
    assert len(plan.victims) == 1
    assert plan.deficit is not None
    assert plan.deficit.amount == 60 * MI


def test_without_memavailable_the_working_set_alone_evicts_no_pod_and_a_note_has_the_reason(tmp_path: Path) -> None:
    node = Node(memory_available=50 * MI, pods=(HOG,))
    plan = decided(sampled(without(write_node(tmp_path, node), "MemAvailable")))
    assert (plan.victims, codes(plan)) == ((), {RefusalCode.PAGE_CACHE_UNKNOWN})
    [note] = [note.message for note in plan.notes if note.subject == "memory"]
    assert note == (
        "memory.available by the kernel is unknown (/proc/meminfo has no MemAvailable): no pod is evicted for the "
        "working set alone"
    )


def test_more_memavailable_than_memory_counts_as_unknown(tmp_path: Path) -> None:
    node = Node(memory_available=50 * MI, mem_available=9 * GI, pods=(HOG,))
    plan = decided(sampled(write_node(tmp_path, node)))
    assert (plan.victims, codes(plan)) == ((), {RefusalCode.PAGE_CACHE_UNKNOWN})


def test_with_an_unreadable_working_set_memavailable_decides(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node(mem_available=100 * MI, pods=(HOG,)))
    (tmp_path / "sys/fs/cgroup/memory.stat").write_text("anon 1\n")
    plan = decided(sampled(root))
    assert len(plan.victims) == 1
    assert plan.signals[0].observation.source == "/proc/meminfo MemAvailable"


def test_a_node_of_256_gib_acts_at_its_own_level_by_either_figure(tmp_path: Path) -> None:
    big = Node(memory_total=256 * GI, allocatable_limit=250 * GI, pods=(HOG,))
    hidden = decided(
        sampled(write_node(tmp_path / "a", big._replace(memory_available=9 * GI, mem_available=1000 * MI)))
    )
    assert len(hidden.victims) == 1
    cached = decided(
        sampled(write_node(tmp_path / "b", big._replace(memory_available=500 * MI, mem_available=90 * GI)))
    )
    assert (cached.victims, codes(cached)) == ((), {RefusalCode.PAGE_CACHE_ONLY})


def test_memory_that_a_balloon_gives_back_ends_the_shortage_in_the_next_sample(tmp_path: Path) -> None:
    node = Node(memory_total=4 * GI, memory_available=150 * MI, pods=(HOG,))
    root = write_node(tmp_path, node)
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
        assert sampler.sample_node().observe(Signal.MEMORY, MemoryModel.LOWER).available == 150 * MI
        write_node(tmp_path, node._replace(memory_total=6 * GI, memory_available=2 * GI + 150 * MI))
        after = sampler.sample_node().observe(Signal.MEMORY, MemoryModel.LOWER)
    assert (after.available, after.capacity) == (2 * GI + 150 * MI, 6 * GI)


@pytest.mark.parametrize("version", ["v1", "v2", "hybrid"])
def test_page_cache_of_the_pods_is_available_in_the_second_figure_of_allocatable_memory(
    tmp_path: Path, version: str
) -> None:
    cached = HOG._replace(active_file=1 * GI, inactive_file=512 * MI, dirty_file=256 * MI)
    node = Node(version, pods=(cached,), allocatable_limit=3 * GI)
    snapshot = sampled(write_node(tmp_path, node), owned=None)
    # The dirty pages are in the stat of the pod alone: kubepods has those of all pods.
    stat = tmp_path / ("sys/fs/cgroup/" if version == "v2" else "sys/fs/cgroup/memory/") / "kubepods.slice/memory.stat"
    assert snapshot.memory_figures(Signal.ALLOCATABLE_MEMORY) == MemoryFigures(1 * GI, 2 * GI)
    stat.write_text(stat.read_text().replace("dirty 0", f"dirty {256 * MI}"))
    snapshot = sampled(str(tmp_path), owned=None)
    assert snapshot.memory_figures(Signal.ALLOCATABLE_MEMORY) == MemoryFigures(1 * GI, 2 * GI - 256 * MI)
    assert snapshot.observe(Signal.ALLOCATABLE_MEMORY, MemoryModel.LOWER).available == 1 * GI


def test_pods_at_their_limit_by_page_cache_alone_lose_no_pod(tmp_path: Path) -> None:
    cached = HOG._replace(working_set=3 * GI, active_file=2 * GI)
    plan = decided(sampled(write_node(tmp_path, Node(pods=(cached,), allocatable_limit=3 * GI)), owned=cached))
    assert (plan.victims, codes(plan)) == ((), {RefusalCode.PAGE_CACHE_ONLY})
    full = HOG._replace(working_set=3 * GI)
    plan = decided(sampled(write_node(tmp_path, Node(pods=(full,), allocatable_limit=3 * GI)), owned=full))
    assert len(plan.victims) == 1


def test_without_a_limit_of_the_pods_both_figures_of_allocatable_memory_are_unknown(tmp_path: Path) -> None:
    snapshot = sampled(write_node(tmp_path, Node(pods=(HOG,), allocatable_limit=None)))
    assert snapshot.memory_figures(Signal.ALLOCATABLE_MEMORY) == MemoryFigures(None, None)
    plan = decided(snapshot)
    assert (plan.victims, plan.refusals, plan.notes) == ((), (), ())


@pytest.mark.parametrize(
    ("name", "working_set_mib", "by_kernel_mib"),
    [("cgroupv2-memory-pressure", 342, 111), ("cgroupv2-imagefs-pressure", 2356, 2161)],
)
def test_on_a_recorded_node_the_kernels_figure_is_lower_and_decides(
    name: str, working_set_mib: int, by_kernel_mib: int
) -> None:
    plan = decided(sampled(str(RECORDED_NODES / name), owned=None))
    figures = plan.signals[0].figures
    assert figures is not None
    assert figures.working_set is not None
    assert figures.by_kernel is not None
    assert (figures.working_set // MI, figures.by_kernel // MI) == (working_set_mib, by_kernel_mib)
    assert plan.signals[0].observation.available == figures.by_kernel
    assert plan.signals[0].state is (SignalState.HARD if name.endswith("memory-pressure") else SignalState.OK)


def write_arc(root: Path, *, size: int, clean: int, least: int) -> None:
    """The lines of arcstats that matter, as OpenZFS writes a kstat of named numbers (type 4), among others."""
    numbers = {
        "hits": 1115656,
        "c_min": least,
        "c_max": 4 * GI,
        "size": size,
        "compressed_size": clean // 2,
        "mru_evictable_data": clean - 3 * MI,
        "mru_evictable_metadata": MI,
        "mfu_evictable_data": MI,
        "mfu_evictable_metadata": MI,
        "memory_available_bytes": 18446744073009551616,
    }
    file = root / "proc/spl/kstat/zfs/arcstats"
    file.parent.mkdir(parents=True)
    head = "12 1 0x01 98 26656 1920163911 654183491814\n" + f"{'name':<31} {'type':<4} data\n"
    file.write_text(head + "".join(f"{name:<31} {4:<4} {number}\n" for name, number in numbers.items()))


def arc_node(root: Path) -> str:
    """By MemAvailable a node that is short: 100 MiB of 8 GiB."""
    return write_node(root, Node(memory_available=4 * GI, mem_available=100 * MI, pods=(HOG,)))


def test_the_cache_of_zfs_is_available_and_costs_no_pod(tmp_path: Path) -> None:
    root = arc_node(tmp_path)
    before = sampled(root)
    assert before.mem_available.available == 100 * MI
    assert decided(before).victims
    write_arc(tmp_path, size=3 * GI, clean=2 * GI, least=256 * MI)
    after = sampled(root)
    assert after.mem_available.available == 100 * MI + 2 * GI
    assert after.mem_available.source == "/proc/meminfo MemAvailable + evictable cache of ZFS"
    assert not decided(after).victims


@pytest.mark.parametrize(
    ("size", "clean", "least", "counted"),
    [
        (3 * GI, 2 * GI, 2 * GI, GI),
        (GI, GI, 2 * GI, 0),
        (3 * GI, 100 * MI, 0, 100 * MI),
        (16 * GI, 16 * GI, 0, 0),
    ],
    ids=["above its minimum", "below its minimum", "mostly dirty", "more than the memory"],
)
def test_of_the_cache_of_zfs_counts_what_it_would_drop(
    tmp_path: Path, size: int, clean: int, least: int, counted: int
) -> None:
    root = arc_node(tmp_path)
    write_arc(tmp_path, size=size, clean=clean, least=least)
    assert sampled(root).mem_available.available == 100 * MI + counted


@pytest.mark.parametrize("text", ["", "size 4\n", "size 4 x\nc_min 4 0\n", "size 4 -1\n"])
def test_damaged_figures_of_zfs_count_nothing(tmp_path: Path, text: str) -> None:
    root = arc_node(tmp_path)
    write_arc(tmp_path, size=3 * GI, clean=2 * GI, least=0)
    (tmp_path / "proc/spl/kstat/zfs/arcstats").write_text(text)
    assert sampled(root).mem_available.available == 100 * MI


def test_in_a_container_of_lxcfs_the_cache_of_the_hosts_zfs_is_not_its_memory(tmp_path: Path) -> None:
    root = arc_node(tmp_path)
    write_arc(tmp_path, size=3 * GI, clean=2 * GI, least=0)
    mounts = tmp_path / "proc/1/mountinfo"
    lxcfs = "500 400 0:60 /proc/meminfo /proc/meminfo rw,nosuid,nodev,relatime - fuse.lxcfs lxcfs rw,user_id=0\n"
    mounts.write_text(mounts.read_text() + lxcfs)
    assert sampled(root).mem_available.available == 100 * MI

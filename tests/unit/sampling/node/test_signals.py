"""Every signal on every kind of node, also with a missing or broken file."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import MemoryModel, NodeSnapshot, Observation, Signal
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.node.signals import DISK_READERS, READERS
from nodeagent.sampling.sampler import Sampler
from tests.support.trees import GI, MI, Node, TreeDisk, TreePod, write_node


def _sample(root: str | Path, config: SamplingConfig | None = None) -> NodeSnapshot:
    with Sampler(open_host(str(root)), config or SamplingConfig(), node_name="n") as sampler:
        return sampler.sample()


def _read(root: str | Path, signal: Signal) -> Observation:
    return _sample(root).observations[signal]


@pytest.mark.parametrize("version", ["v1", "v2", "hybrid"])
def test_every_signal_is_read_on_every_hierarchy(tmp_path: Path, version: str) -> None:
    images = TreeDisk(available=2 * GI, capacity=20 * GI, inodes_free=11, inodes=111, device=(259, 2))
    node = Node(
        version,
        pods=(TreePod("a/b", working_set=1 * GI, inactive_file=MI),),
        imagefs=images,
        mem_available=3 * GI,
        memory_available=2 * GI,
    )
    snapshot = _sample(write_node(tmp_path, node))
    read = {signal: (o.available, o.capacity) for signal, o in snapshot.observations.items()}
    assert read == {
        Signal.MEMORY: (2 * GI, 8 * GI),
        Signal.ALLOCATABLE_MEMORY: (6 * GI, 7 * GI),
        Signal.NODEFS: (50 * GI, 100 * GI),
        Signal.NODEFS_INODES: (5_000_000, 6_553_600),
        Signal.IMAGEFS: (2 * GI, 20 * GI),
        Signal.IMAGEFS_INODES: (11, 111),
        Signal.CONTAINERFS: (2 * GI, 20 * GI),
        Signal.CONTAINERFS_INODES: (11, 111),
        Signal.PID: (32768 - 500, 32768),
    }
    other = snapshot.observe(Signal.MEMORY, MemoryModel.MEM_AVAILABLE)
    assert (other.available, other.capacity) == (3 * GI, 8 * GI)


def test_the_tables_have_a_row_for_each_signal() -> None:
    assert sorted([*READERS, *DISK_READERS]) == sorted(Signal)


def test_a_sample_without_limits_uses_the_last_ones_with_the_usage_of_now(tmp_path: Path) -> None:
    clock = 1.0
    before = Node(memory_available=2 * GI, pods_working_set=1 * GI, threads=500)
    after = before._replace(memory_total=9 * GI, memory_available=4 * GI, allocatable_limit=8 * GI, threads=600)
    after = after._replace(pid_max=1000, mem_available=5 * GI, pods_working_set=3 * GI)
    host = open_host(write_node(tmp_path, before))
    with Sampler(host, SamplingConfig(), node_name="n", boottime=lambda: clock) as sampler:
        sampler.sample_node(limits=False)
        write_node(tmp_path, after)
        clock = 2.0
        rarely, now = sampler.sample_node(limits=False), sampler.sample_node()
        clock = 3.0
        kept = sampler.sample_node(limits=False)
    signals = (Signal.MEMORY, Signal.ALLOCATABLE_MEMORY, Signal.PID)

    def numbers(snapshot: NodeSnapshot) -> list[tuple[int | None, int | None]]:
        return [(snapshot.observations[s].available, snapshot.observations[s].capacity) for s in signals]

    assert numbers(rarely) == [(3 * GI, 8 * GI), (4 * GI, 7 * GI), (32768 - 600, 32768)]
    assert numbers(now) == numbers(kept) == [(4 * GI, 9 * GI), (5 * GI, 8 * GI), (400, 1000)]
    assert [each.observations[Signal.PID].read_at for each in (rarely, now, kept)] == [2.0, 2.0, 3.0]
    by_kernel = [(each.mem_available.available, each.mem_available.read_at) for each in (rarely, now, kept)]
    assert by_kernel == [(2 * GI, 1.0), (5 * GI, 2.0), (5 * GI, 2.0)], "with the time at which it was read"


def test_a_sample_without_limits_reads_them_if_the_pods_have_moved_to_another_cgroup(tmp_path: Path) -> None:
    root, now = write_node(tmp_path, Node(kubepods=False)), 100.0
    with Sampler(open_host(root), SamplingConfig(), node_name="n", boottime=lambda: now) as sampler:
        assert sampler.sample_node(limits=False).observations[Signal.ALLOCATABLE_MEMORY].available is None
        write_node(tmp_path, Node(pods_working_set=1 * GI))
        now += 1.0
        assert sampler.sample_node(limits=False).observations[Signal.ALLOCATABLE_MEMORY].available == 6 * GI


def test_page_cache_that_can_be_dropped_is_available(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node(memory_total=8 * GI))
    stat = f"anon {2 * GI}\nfile {3 * GI}\ninactive_file {1 * GI}\n"
    (tmp_path / "sys/fs/cgroup/memory.stat").write_text(stat)
    assert _read(root, Signal.MEMORY).available == 4 * GI


# --- unknown, with a reason, and nothing else lost


@pytest.mark.parametrize(
    ("path", "lost"),
    [
        ("proc/meminfo", {Signal.MEMORY}),
        ("proc/loadavg", {Signal.PID}),
        ("sys/fs/cgroup/memory.stat", {Signal.MEMORY}),
        ("sys/fs/cgroup/kubepods.slice/memory.current", {Signal.ALLOCATABLE_MEMORY}),
        ("sys/fs/cgroup/kubepods.slice/memory.stat", {Signal.ALLOCATABLE_MEMORY}),
        ("sys/fs/cgroup/kubepods.slice/memory.max", {Signal.ALLOCATABLE_MEMORY}),
    ],
)
@pytest.mark.parametrize("content", [None, b"", b"\x00", b"-4 -4 -4 -4/-4 -4\n", b"MemTotal: many kB\nanon x\n"])
def test_a_missing_or_broken_file_makes_only_its_signals_unknown(
    tmp_path: Path, path: str, lost: set[Signal], content: bytes | None
) -> None:
    root = write_node(tmp_path, Node(pods=(TreePod("a/b"),)))
    if content is None:
        (tmp_path / path).unlink()
    else:
        (tmp_path / path).write_bytes(content)
    observations = _sample(root).observations
    assert {signal for signal, o in observations.items() if o.available is None} == lost
    assert all(observations[signal].reason for signal in lost)


def test_the_first_digits_of_a_limit_are_no_limit(tmp_path: Path) -> None:
    """The pods would exceed it, and one of them would be evicted on a calm node."""
    root = write_node(tmp_path, Node(pods=(TreePod("a/b"),)))
    path = tmp_path / "sys/fs/cgroup/kubepods.slice/memory.max"
    path.write_bytes(path.read_bytes()[:-2])
    observation = _read(root, Signal.ALLOCATABLE_MEMORY)
    assert observation.available is None
    assert observation.reason.endswith("memory.max is incomplete")


def test_a_pods_cgroup_without_limit_has_no_allocatable_signal(tmp_path: Path) -> None:
    for version in ("v1", "v2"):
        observation = _read(
            write_node(tmp_path / version, Node(version, allocatable_limit=None)), Signal.ALLOCATABLE_MEMORY
        )
        assert observation.available is None
        assert "no memory limit" in observation.reason


def test_without_a_kubelet_there_is_no_allocatable_signal(tmp_path: Path) -> None:
    observation = _read(write_node(tmp_path, Node(kubepods=False)), Signal.ALLOCATABLE_MEMORY)
    assert observation.available is None
    assert "no kubelet" in observation.reason


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None, max_examples=60
)
@given(data=st.data())
def test_a_node_with_any_file_replaced_by_any_bytes_is_still_sampled(tmp_path: Path, data: st.DataObject) -> None:
    root = write_node(tmp_path, Node(pods=(TreePod("a/b"), TreePod("a/c", logs=False))))
    files = sorted(path for top in ("proc", "sys", "etc") for path in (tmp_path / top).rglob("*") if path.is_file())
    for path in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=5)):
        if path.name != "uptime":  # the recording's own clock
            path.write_bytes(data.draw(st.binary(max_size=200)))
    snapshot = _sample(root)
    assert snapshot.observations.keys() == set(Signal)
    for observation in snapshot.observations.values():
        assert observation.available is not None or observation.reason

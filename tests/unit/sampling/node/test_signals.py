"""Every signal on every kind of node, and what happens when one of its files is missing or broken."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import DiskLayout, MemoryModel, NodeSnapshot, Observation, Signal, StallScope
from nodeagent.sampling.hostfs.host import FileSystem, Unreadable, open_host
from nodeagent.sampling.node import filesystems, memory, pids, psi
from nodeagent.sampling.node.signals import DISK_READERS, READERS
from nodeagent.sampling.sampler import Sampler
from tests.support.trees import GI, KI, MI, Node, TreeDisk, TreePod, write_node


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


def test_a_look_without_limits_has_those_of_the_last_one_and_the_use_of_now(tmp_path: Path) -> None:
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

    def numbers(seen: NodeSnapshot) -> list[tuple[int | None, int | None]]:
        return [(seen.observations[s].available, seen.observations[s].capacity) for s in signals]

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
def test_a_missing_or_broken_file_costs_its_signals_only(
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


# --- pids


def test_more_threads_than_allowed_is_a_negative_number(tmp_path: Path) -> None:
    assert _read(write_node(tmp_path, Node(threads=33_000)), Signal.PID).available == 32768 - 33_000


def test_the_smaller_limit_counts_and_one_is_enough(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node(pid_max=40_000, threads_max=30_000))
    assert _read(root, Signal.PID).capacity == 30_000
    (tmp_path / "proc/sys/kernel/threads-max").unlink()
    assert _read(root, Signal.PID).capacity == 40_000
    (tmp_path / "proc/sys/kernel/pid_max").write_text("0\n")
    assert _read(root, Signal.PID).capacity is None


@given(st.binary())
def test_any_bytes_are_a_number_of_threads_or_none(data: bytes) -> None:
    threads = pids.parse_loadavg(data)
    assert threads is None or threads >= 0


# --- meminfo


def test_huge_pages_of_every_size_are_shown(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node())
    meminfo = tmp_path / "proc/meminfo"
    text = meminfo.read_text().replace("HugePages_Total:       0", "HugePages_Total:      10")
    text = text.replace("HugePages_Free:        0", "HugePages_Free:        4")
    meminfo.write_text(text.replace("Hugetlb:               0", f"Hugetlb: {10 * 2 * KI + KI * KI}"))
    pools = tmp_path / "sys/kernel/mm/hugepages/hugepages-1048576kB"
    pools.mkdir(parents=True)
    for name, value in (("nr", 1), ("free", 1), ("resv", 0)):
        (pools / f"{name}_hugepages").write_text(f"{value}\n")
    found = _sample(root).memory
    assert found is not None
    assert found.hugepages == ((2 * MI, 10, 4, 0), (1 * GI, 1, 1, 0))
    assert found.hugetlb == 20 * MI + GI


def test_a_meminfo_that_lacks_a_field_is_no_meminfo_but_still_a_signal(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node())
    meminfo = tmp_path / "proc/meminfo"
    meminfo.write_text("".join(line for line in meminfo.read_text().splitlines(True) if "KernelStack" not in line))
    snapshot = _sample(root)
    assert snapshot.memory is None
    assert snapshot.observations[Signal.MEMORY].available == 4 * GI


@given(st.binary())
def test_any_bytes_are_a_meminfo_of_some_fields(data: bytes) -> None:
    fields = memory.parse_meminfo(data, memory.ALL_FIELDS)
    assert all(value >= 0 for value in fields.values())
    memory.node_memory(fields)


# --- stalls


def test_stalls_are_read_for_the_node_the_pods_and_the_system(tmp_path: Path) -> None:
    stalls = _sample(write_node(tmp_path, Node(stall_memory=12.5))).stalls
    assert {(s.scope, s.resource) for s in stalls} == {(s, r) for s in StallScope for r in ("memory", "io")}
    node = next(s for s in stalls if s.scope is StallScope.NODE and s.resource == "memory")
    assert (node.some_avg10, node.full_avg10, node.some_total_us) == (12.5, 12.5, 12500)


def test_a_kernel_without_psi_is_a_note_not_a_stall_of_zero(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node("v1"))
    (tmp_path / "proc/pressure/memory").unlink()
    (tmp_path / "proc/pressure/io").unlink()
    snapshot = _sample(root)
    assert snapshot.stalls == ()
    assert sum(note.subject == "psi" for note in snapshot.notes) == 2


def test_cpu_style_pressure_without_a_full_line_is_understood() -> None:
    some, full = psi.parse_psi(b"some avg10=1.50 avg60=0.00 avg300=0.00 total=7\n")
    assert (some, full) == ((1.5, 0.0, 7), None)


@given(
    st.one_of(st.binary(), st.from_regex(rb"(some|full) avg10=[0-9.]* avg60=[0-9.]* total=[0-9]*\n?", fullmatch=True))
)
def test_any_bytes_are_a_stall_or_none(data: bytes) -> None:
    for line in psi.parse_psi(data):
        assert line is None or (0 <= line.avg10 <= 100 and line.total_us >= 0)


# --- file systems


def test_one_device_is_one_file_system(tmp_path: Path) -> None:
    snapshot = _sample(write_node(tmp_path, Node()))
    assert snapshot.layout is DiskLayout.SINGLE
    assert snapshot.observations[Signal.NODEFS].device == snapshot.observations[Signal.IMAGEFS].device


def test_a_split_image_store_of_cri_o_is_a_split_layout(tmp_path: Path) -> None:
    images = TreeDisk(available=1 * GI, device=(259, 3))
    root = write_node(tmp_path, Node(runtime="cri-o", imagefs=images))
    dropins = tmp_path / "etc/crio/crio.conf.d"
    dropins.mkdir(parents=True)
    (dropins / "10-store.conf").write_text(
        '[crio]\nroot = "/var/lib/kubelet"\nimagestore = "/var/lib/containers/storage"\n'
    )
    snapshot = _sample(root)
    assert snapshot.layout is DiskLayout.SPLIT
    assert snapshot.observations[Signal.IMAGEFS].available == 1 * GI
    assert snapshot.observations[Signal.CONTAINERFS].available == 50 * GI


def test_cri_o_without_a_separate_image_store_has_one_imagefs(tmp_path: Path) -> None:
    snapshot = _sample(write_node(tmp_path, Node(runtime="cri-o", imagefs=TreeDisk(device=(259, 3)))))
    assert snapshot.layout is DiskLayout.DEDICATED_IMAGEFS
    assert "/var/lib/containers/storage" in snapshot.observations[Signal.IMAGEFS].source


def test_the_runtimes_configured_root_counts(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node())
    (tmp_path / "data/images").mkdir(parents=True)
    (tmp_path / "etc/containerd").mkdir(parents=True)
    (tmp_path / "etc/containerd/config.toml").write_text(
        "version = 3\nroot = '/data/images' # here\n[plugins.x]\nroot = \"/elsewhere\"\n"
    )
    assert "/data/images" in _read(root, Signal.IMAGEFS).source


def test_a_configured_image_directory_overrides_all(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node(runtime=""))
    (tmp_path / "images").mkdir()
    assert _sample(root, SamplingConfig(image_dir="/images")).observations[Signal.IMAGEFS].available == 50 * GI


def test_without_a_runtime_imagefs_is_unknown_and_says_why(tmp_path: Path) -> None:
    snapshot = _sample(write_node(tmp_path, Node(runtime="")))
    assert snapshot.layout is DiskLayout.UNKNOWN
    for signal in (Signal.IMAGEFS, Signal.CONTAINERFS_INODES):
        assert snapshot.observations[signal].available is None
        assert "no container runtime" in snapshot.observations[signal].reason
    assert snapshot.observations[Signal.NODEFS].available == 50 * GI


def test_of_two_runtimes_the_one_with_a_socket_is_taken(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node(runtime="cri-o"))
    (tmp_path / "var/lib/containerd").mkdir()
    (tmp_path / "run/crio").mkdir(parents=True)
    (tmp_path / "run/crio/crio.sock").touch()
    snapshot = _sample(root)
    assert "/var/lib/containers/storage" in snapshot.observations[Signal.IMAGEFS].source
    assert any("several container runtimes" in note.message for note in snapshot.notes)


def test_without_a_kubelet_nodefs_is_where_it_would_be_and_that_is_said(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node())
    (tmp_path / "var/lib/kubelet").rmdir()
    snapshot = _sample(root)
    assert snapshot.observations[Signal.NODEFS].source == "statvfs /var/lib"
    assert any("where it would be" in note.message for note in snapshot.notes)


def test_a_file_system_without_fixed_inodes_has_no_inode_signal(tmp_path: Path) -> None:
    observation = _read(write_node(tmp_path, Node(nodefs=TreeDisk(inodes=0, inodes_free=0))), Signal.NODEFS_INODES)
    assert observation.available is None
    assert "no fixed inodes" in observation.reason


def test_a_file_system_that_does_not_answer_is_unknown(tmp_path: Path) -> None:
    host = open_host(write_node(tmp_path, Node(imagefs=TreeDisk(device=(8, 1)))))

    def late(path: str) -> FileSystem:
        if "containerd" in path:
            raise Unreadable(path, 110, "no answer within 1 s")
        return host.statvfs(path)

    with Sampler(host, SamplingConfig(), node_name="n", statvfs=late) as sampler:
        snapshot = sampler.sample()
    assert snapshot.layout is DiskLayout.UNKNOWN
    assert snapshot.observations[Signal.NODEFS].available == 50 * GI
    assert "no answer" in snapshot.observations[Signal.IMAGEFS].reason


@given(st.text(), st.sampled_from(["", "crio"]))
def test_any_text_has_a_toml_string_or_not(text: str, section: str) -> None:
    value = filesystems.toml_string(text, section, "root")
    assert value is None or value in text


# --- whatever a tree says


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

"""When disks are walked, and which results the loop gets meanwhile."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import DiskLayout, NodeSnapshot, PodUsage, PodView, Signal
from nodeagent.sampling.disk.monitor import DiskMonitor, DiskUrgency
from nodeagent.sampling.hostfs.cgroup_memory import MemoryV1, MemoryV2
from nodeagent.sampling.hostfs.cgroups import Hierarchy
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.node.filesystems import Layout
from nodeagent.sampling.snapshot import PodReading, SnapshotParts, assemble_snapshot
from tests.support import nodes
from tests.support.disk_trees import EMPTY_DIR, ID, node, until_settled
from tests.support.disk_trees import pod as usage_of

CROSSED = DiskUrgency(crossed=frozenset({Signal.NODEFS}))
SOON = DiskUrgency(soon=frozenset({Signal.NODEFS}))
V2 = Hierarchy("v2", "/cg", MemoryV2(), "/cg", "/cg")
V1 = Hierarchy("v1", "/cg/memory", MemoryV1(), "/cg/pids", None)
LAYOUT = Layout(DiskLayout.SINGLE, "/var/lib/kubelet", None)


class MonitoredNode:
    """A node below a directory and its disk monitor, with a clock of its own."""

    def __init__(self, top: Path, hierarchy: Hierarchy, *, limits: bool = False) -> None:
        self.top = node(top)
        self.ended = threading.Event()
        self.hierarchy = hierarchy
        self.monitor = DiskMonitor(Host(str(top)), SamplingConfig(), limits=limits, wake=self.ended.set)
        self.usages: tuple[PodUsage, ...] = (usage_of("u1", (ID, "c")), usage_of("u2"))

    def snapshot(self, at: float | None = None) -> NodeSnapshot:
        now = time.clock_gettime(time.CLOCK_BOOTTIME) if at is None else at
        views = [PodView(nodes.pod(usage.cgroup_uid), usage) for usage in self.usages]
        return nodes.snapshot(*views, at=now)

    def sync(self, urgency: DiskUrgency, at: float | None = None) -> NodeSnapshot:
        snapshot = self.snapshot(at)
        self.monitor.request_walks(snapshot, urgency, hierarchy=self.hierarchy, layout=LAYOUT)
        self.monitor.set_targets(snapshot.pods)
        parts = SnapshotParts(snapshot, PodReading(snapshot.pods), disks=self.monitor.usage(snapshot.taken_at))
        return assemble_snapshot(parts)

    def measured(self, urgency: DiskUrgency) -> NodeSnapshot:
        """The snapshot after the end of the walk that is due now."""
        self.sync(urgency)
        self.sync(urgency)
        assert self.ended.wait(30)
        return self.sync(urgency)

    def volume(self, uid: str, size: int) -> Path:
        path = self.top / f"var/lib/kubelet/pods/{uid}/{EMPTY_DIR}/v"
        path.mkdir(parents=True, exist_ok=True)
        (path / "file").write_bytes(b"x" * size)
        return path


@pytest.fixture
def monitored(tmp_path: Path) -> Iterator[MonitoredNode]:
    opened = MonitoredNode(tmp_path, V2)
    yield opened
    opened.monitor.close()


def usages(snapshot: NodeSnapshot) -> dict[str, PodUsage]:
    return {view.usage.cgroup_uid: view.usage for view in snapshot.pods if view.usage is not None}


def test_without_a_near_threshold_there_are_no_walks_and_no_results(monitored: MonitoredNode) -> None:
    monitored.volume("u1", 100_000)
    before = threading.active_count()
    for _ in range(3):
        found = usages(monitored.sync(DiskUrgency(crossed=frozenset({Signal.MEMORY, Signal.PID}))))
    assert threading.active_count() <= before, "a thread of an earlier test may have ended meanwhile"
    assert found["u1"].disk_usage_quality is None
    assert found["u1"].writing is None


@pytest.mark.parametrize("urgency", [SOON, CROSSED])
def test_a_disk_that_fills_is_walked_and_each_number_has_its_time(
    monitored: MonitoredNode, urgency: DiskUrgency
) -> None:
    monitored.volume("u1", 100_000)
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    found = usages(monitored.measured(urgency))["u1"]
    assert found.disk.volumes_bytes == 102_400 + 4096
    assert found.disk_usage_quality is not None
    assert before <= found.disk_usage_quality.read_at <= time.clock_gettime(time.CLOCK_BOOTTIME)
    assert not found.disk_usage_quality.complete, "no overlay mount: the layer is unknown"
    assert "snapshotter" in found.disk_usage_quality.unknown[0]


def test_walks_have_pauses_above_a_threshold_and_short_ones_below_it(monitored: MonitoredNode) -> None:
    volume = monitored.volume("u1", 100_000)
    first = usages(monitored.measured(SOON))["u1"].disk_usage_quality
    assert first is not None
    (volume / "more").write_bytes(b"x" * 100_000)
    monitored.ended.clear()
    assert usages(monitored.sync(SOON, first.read_at + 5.0))["u1"].disk_usage_quality == first
    assert not monitored.ended.wait(0.2), "a walk 5 s after the last one"
    monitored.sync(CROSSED, first.read_at + 5.0)
    assert monitored.ended.wait(30)
    assert usages(monitored.sync(CROSSED))["u1"].disk.volumes_bytes == 2 * 102_400 + 4096


def test_limits_alone_are_a_reason_to_walk(tmp_path: Path) -> None:
    monitored = MonitoredNode(tmp_path, V2, limits=True)
    try:
        monitored.volume("u1", 100_000)
        assert usages(monitored.measured(DiskUrgency()))["u1"].disk.volumes_bytes == 102_400 + 4096
    finally:
        monitored.monitor.close()


def test_a_disk_that_may_stay_as_it_is_for_weeks_is_walked_slowly(monitored: MonitoredNode) -> None:
    lasting = DiskUrgency(lasting=frozenset({Signal.IMAGEFS}))
    volume = monitored.volume("u1", 100_000)
    first = usages(monitored.measured(lasting))["u1"].disk_usage_quality
    assert first is not None
    (volume / "more").write_bytes(b"x" * 100_000)
    monitored.ended.clear()
    monitored.sync(lasting, first.read_at + 50.0)
    assert not monitored.ended.wait(0.2), "a walk 50 s after the last one"
    monitored.sync(lasting, first.read_at + 70.0)
    assert monitored.ended.wait(30)
    found = usages(monitored.sync(lasting, first.read_at + 70.0))["u1"]
    assert found.disk.volumes_bytes == 2 * 102_400 + 4096
    assert found.writing is None


def test_old_write_counters_do_not_show_that_a_pod_has_written_nothing(tmp_path: Path) -> None:
    monitored = MonitoredNode(tmp_path, V2, limits=True)
    try:
        for uid in ("u1", "u2"):
            cgroup = monitored.top / f"cg/kubepods/pod{uid}"
            cgroup.mkdir(parents=True)
            (cgroup / "io.stat").write_text("8:0 rbytes=0 wbytes=4096\n")
            (cgroup / "memory.stat").write_text("file_dirty 0\nfile_writeback 0\n")
        file = monitored.volume("u1", 100_000) / "file"
        until_settled(file.parent)
        at = time.clock_gettime(time.CLOCK_BOOTTIME)
        monitored.sync(SOON, at - 1.0)
        monitored.sync(SOON, at)
        assert monitored.ended.wait(30)
        assert usages(monitored.sync(SOON, at))["u1"].disk.volumes_bytes == 102_400 + 4096
        file.write_bytes(b"x" * 200_000)
        monitored.ended.clear()
        later = at + 70.0
        monitored.sync(DiskUrgency(), later)
        assert monitored.ended.wait(30)
        assert usages(monitored.sync(DiskUrgency(), later))["u1"].disk.volumes_bytes == 200_704 + 4096
    finally:
        monitored.monitor.close()


def test_a_recount_reads_all_files_although_the_cache_of_a_quiet_pod_could_be_used(tmp_path: Path) -> None:
    monitored = MonitoredNode(tmp_path, V2, limits=True)
    try:
        volume = monitored.volume("u1", 100_000)
        monitored.volume("u2", 100_000)
        periodic = usages(monitored.measured(DiskUrgency()))
        assert periodic["u1"].disk_usage_quality is not None
        assert periodic["u1"].disk_usage_quality.periodic
        (volume / "file").write_bytes(b"x")
        monitored.ended.clear()
        monitored.monitor.recount(["u1"])
        monitored.sync(DiskUrgency())
        assert monitored.ended.wait(30), "the recount waits for the next walk of all pods"
        found = usages(monitored.sync(DiskUrgency()))
        assert found["u1"].disk.volumes_bytes == 2 * 4096
        assert found["u1"].disk_usage_quality is not None
        assert not found["u1"].disk_usage_quality.periodic
        assert found["u1"].disk_usage_quality.read_at > periodic["u1"].disk_usage_quality.read_at
        assert found["u2"].disk_usage_quality == periodic["u2"].disk_usage_quality, "the numbers of the other pods stay"
        monitored.ended.clear()
        monitored.monitor.recount(["u1"])  # by a decision without the new numbers
        monitored.sync(DiskUrgency())
        assert not monitored.ended.wait(0.3), "counted twice"
    finally:
        monitored.monitor.close()


def test_results_that_were_long_not_needed_are_not_published(monitored: MonitoredNode) -> None:
    monitored.volume("u1", 100_000)
    measured = monitored.measured(SOON)
    assert usages(monitored.sync(DiskUrgency(), measured.taken_at + 60.0))["u1"].disk_usage_quality is not None
    assert usages(monitored.sync(DiskUrgency(), measured.taken_at + 600.0))["u1"].disk_usage_quality is None


def test_traces_are_of_the_same_walk_as_the_pods_if_it_ends_during_a_sync(monitored: MonitoredNode) -> None:
    snapshot = monitored.snapshot()
    device = os.stat(monitored.top / "var/lib/kubelet").st_dev
    nodefs = snapshot.observations[Signal.NODEFS]._replace(device=device)
    snapshot = snapshot._replace(observations={**snapshot.observations, Signal.NODEFS: nodefs})
    monitored.monitor.set_targets(snapshot.pods)
    monitored.monitor.request_walks(snapshot, CROSSED, hierarchy=V2, layout=LAYOUT)
    assert monitored.ended.wait(30)
    usage = monitored.monitor.usage(snapshot.taken_at)
    assert usage is not None
    assert usage.pods.keys() == {"u1", "u2"}
    assert [trace.signals for trace in usage.traces] == [(Signal.NODEFS,)]


def test_a_walk_for_inodes_alone_has_no_bytes(monitored: MonitoredNode) -> None:
    monitored.volume("u1", 100_000)
    found = usages(monitored.measured(DiskUrgency(soon=frozenset({Signal.NODEFS_INODES}))))["u1"]
    assert (found.disk.volumes_bytes, found.disk.volumes_inodes) == (None, 2)


def test_write_rates_are_known_before_the_walk_ends(monitored: MonitoredNode) -> None:
    for uid in ("u1", "u2"):
        path = monitored.top / f"cg/kubepods/pod{uid}"
        path.mkdir(parents=True)
        (path / "io.stat").write_text("254:0 rbytes=0 wbytes=1000 rios=0 wios=0 dbytes=0 dios=0\n")
        (path / "memory.stat").write_text("file_dirty 0\nfile_writeback 0\n")
    at = time.clock_gettime(time.CLOCK_BOOTTIME)
    monitored.sync(DiskUrgency(), at)
    monitored.sync(SOON, at + 1.0)
    (monitored.top / "cg/kubepods/podu2/memory.stat").write_text("file_dirty 50000000\nfile_writeback 0\n")
    found = usages(monitored.sync(SOON, at + 2.0))
    assert found["u2"].writing is not None
    assert found["u2"].writing.written == 50_000_000
    assert found["u2"].writing.bytes_per_s > 0
    assert found["u1"].writing is not None
    assert found["u1"].writing.written == 0


def test_on_cgroup_v1_write_rates_come_from_the_counters_of_processes(tmp_path: Path) -> None:
    monitored = MonitoredNode(tmp_path, V1)
    try:
        path = monitored.top / f"cg/pids/kubepods/podu1/{ID}"
        path.mkdir(parents=True)
        (path / "cgroup.procs").write_text("11\n12\n")
        (path.parent / "cgroup.procs").write_text("")
        for pid, size in ((11, 5000), (12, 0)):
            (monitored.top / f"proc/{pid}").mkdir(parents=True)
            (monitored.top / f"proc/{pid}/io").write_text(f"rchar: 1\nwrite_bytes: {size}\ncancelled_write_bytes: 0\n")
        at = time.clock_gettime(time.CLOCK_BOOTTIME)
        monitored.sync(DiskUrgency(), at)
        monitored.sync(CROSSED, at + 1.0)
        (monitored.top / "proc/12/io").write_text("write_bytes: 70000\n")
        (path / "cgroup.procs").write_text("12\n13\n")  # 11 has ended; 13 ends before it is read
        writing = usages(monitored.sync(CROSSED, at + 2.0))["u1"].writing
        assert writing is not None
        assert writing.written == 70_000, "bytes that 11 wrote before the first sample do not count"
    finally:
        monitored.monitor.close()


@pytest.mark.skipif(not os.access("/proc/self/io", os.R_OK), reason="this kernel has no /proc/<pid>/io")
def test_the_kernel_counts_a_write_at_once(tmp_path: Path) -> None:
    from nodeagent.sampling.disk.write_rates import read_write_bytes

    host, before = Host("/"), read_write_bytes(Host("/"), os.getpid())
    (tmp_path / "file").write_bytes(b"x" * 1_000_000)
    assert read_write_bytes(host, os.getpid()) - before >= 1_000_000


def test_crossed_pid_or_memory_signals_start_no_walk(monitored: MonitoredNode) -> None:
    monitored.sync(DiskUrgency(crossed=frozenset({Signal.PID, Signal.MEMORY})))
    monitored.sync(DiskUrgency(crossed=frozenset({Signal.PID, Signal.MEMORY})))
    assert not monitored.ended.wait(0.2)

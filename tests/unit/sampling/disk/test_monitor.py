"""When disks are walked, and what the loop gets to know of them meanwhile."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import DiskLayout, NodeSnapshot, PodUsage, PodView, Signal
from nodeagent.sampling.disk.monitor import DiskMonitor, DiskUrgency
from nodeagent.sampling.hostfs.cgroups import Hierarchy, MemoryV1, MemoryV2
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.node.filesystems import Layout
from nodeagent.sampling.snapshot import PodReading, SnapshotParts, assemble_snapshot
from tests.support import nodes
from tests.support.disk_trees import EMPTY_DIR, ID, node
from tests.support.disk_trees import pod as usage_of

CROSSED = DiskUrgency(crossed=frozenset({Signal.NODEFS}))
NEAR = DiskUrgency(near=frozenset({Signal.NODEFS}))
V2 = Hierarchy("v2", "/cg", MemoryV2(), "/cg", "/cg")
V1 = Hierarchy("v1", "/cg/memory", MemoryV1(), "/cg/pids", None)
LAYOUT = Layout(DiskLayout.SINGLE, "/var/lib/kubelet", None)


class Scene:
    """A node below a directory, and the watch over it, with a clock of its own."""

    def __init__(self, top: Path, hierarchy: Hierarchy, *, limits: bool = False) -> None:
        self.top = node(top)
        self.ended = threading.Event()
        self.hierarchy = hierarchy
        self.watch = DiskMonitor(Host(str(top)), SamplingConfig(), limits=limits, wake=self.ended.set)
        self.usages: tuple[PodUsage, ...] = (usage_of("u1", (ID, "c")), usage_of("u2"))

    def snapshot(self, at: float | None = None) -> NodeSnapshot:
        now = time.clock_gettime(time.CLOCK_BOOTTIME) if at is None else at
        views = [PodView(nodes.pod(usage.cgroup_uid), usage) for usage in self.usages]
        return nodes.snapshot(*views, at=now)

    def tick(self, need: DiskUrgency, at: float | None = None) -> NodeSnapshot:
        snapshot = self.snapshot(at)
        self.watch.request_walks(snapshot, need, hierarchy=self.hierarchy, layout=LAYOUT)
        self.watch.set_targets(snapshot.pods)
        parts = SnapshotParts(snapshot, PodReading(snapshot.pods), disks=self.watch.usage(snapshot.taken_at))
        return assemble_snapshot(parts)

    def measured(self, need: DiskUrgency) -> NodeSnapshot:
        """After the walk that is due now has ended."""
        self.tick(need)
        self.tick(need)
        assert self.ended.wait(30)
        return self.tick(need)

    def volume(self, uid: str, size: int) -> Path:
        place = self.top / f"var/lib/kubelet/pods/{uid}/{EMPTY_DIR}/v"
        place.mkdir(parents=True, exist_ok=True)
        (place / "file").write_bytes(b"x" * size)
        return place


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path, V2)
    yield made
    made.watch.close()


def usages(snapshot: NodeSnapshot) -> dict[str, PodUsage]:
    return {view.usage.cgroup_uid: view.usage for view in snapshot.pods if view.usage is not None}


def test_nothing_is_walked_and_nothing_is_shown_while_no_disk_is_near(scene: Scene) -> None:
    scene.volume("u1", 100_000)
    before = threading.active_count()
    for _ in range(3):
        found = usages(scene.tick(DiskUrgency(crossed=frozenset({Signal.MEMORY, Signal.PID}))))
    assert threading.active_count() <= before, "one of an earlier test may have ended meanwhile"
    assert found["u1"].disk_usage_quality is None
    assert found["u1"].writing is None


@pytest.mark.parametrize("need", [NEAR, CROSSED])
def test_a_disk_that_is_near_is_walked_and_each_number_says_when_it_was_read(scene: Scene, need: DiskUrgency) -> None:
    scene.volume("u1", 100_000)
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    found = usages(scene.measured(need))["u1"]
    assert found.disk.volumes_bytes == 102_400 + 4096
    assert found.disk_usage_quality is not None
    assert before <= found.disk_usage_quality.read_at <= time.clock_gettime(time.CLOCK_BOOTTIME)
    assert not found.disk_usage_quality.complete, "no overlay mount: the layer is unknown"
    assert "snapshotter" in found.disk_usage_quality.unknown[0]


def test_walks_have_pauses_near_a_threshold_and_hardly_any_below_it(scene: Scene) -> None:
    volume = scene.volume("u1", 100_000)
    first = usages(scene.measured(NEAR))["u1"].disk_usage_quality
    assert first is not None
    (volume / "more").write_bytes(b"x" * 100_000)
    scene.ended.clear()
    assert usages(scene.tick(NEAR, first.read_at + 5.0))["u1"].disk_usage_quality == first
    assert not scene.ended.wait(0.2), "a walk 5 s after the last one"
    scene.tick(CROSSED, first.read_at + 5.0)
    assert scene.ended.wait(30)
    assert usages(scene.tick(CROSSED))["u1"].disk.volumes_bytes == 2 * 102_400 + 4096


def test_limits_alone_are_a_reason_to_walk(tmp_path: Path) -> None:
    scene = Scene(tmp_path, V2, limits=True)
    try:
        scene.volume("u1", 100_000)
        assert usages(scene.measured(DiskUrgency()))["u1"].disk.volumes_bytes == 102_400 + 4096
    finally:
        scene.watch.close()


def test_what_is_counted_anew_is_asked_for_although_a_quiet_pods_sums_could_be_taken_over(tmp_path: Path) -> None:
    scene = Scene(tmp_path, V2, limits=True)
    try:
        volume = scene.volume("u1", 100_000)
        scene.volume("u2", 100_000)
        routine = usages(scene.measured(DiskUrgency()))
        assert routine["u1"].disk_usage_quality is not None
        assert routine["u1"].disk_usage_quality.periodic
        (volume / "file").write_bytes(b"x")
        scene.ended.clear()
        scene.watch.recount(["u1"])
        scene.tick(DiskUrgency())
        assert scene.ended.wait(30), "it waits for the next walk of all"
        found = usages(scene.tick(DiskUrgency()))
        assert found["u1"].disk.volumes_bytes == 2 * 4096
        assert found["u1"].disk_usage_quality is not None
        assert not found["u1"].disk_usage_quality.periodic
        assert found["u1"].disk_usage_quality.read_at > routine["u1"].disk_usage_quality.read_at
        assert found["u2"].disk_usage_quality == routine["u2"].disk_usage_quality, "what is known of the others stays"
        scene.ended.clear()
        scene.watch.recount(["u1"])  # by a decision that has not seen it
        scene.tick(DiskUrgency())
        assert not scene.ended.wait(0.3), "counted twice"
    finally:
        scene.watch.close()


def test_what_was_measured_is_forgotten_when_it_was_long_not_needed(scene: Scene) -> None:
    scene.volume("u1", 100_000)
    seen = scene.measured(NEAR)
    assert usages(scene.tick(DiskUrgency(), seen.taken_at + 60.0))["u1"].disk_usage_quality is not None
    assert usages(scene.tick(DiskUrgency(), seen.taken_at + 600.0))["u1"].disk_usage_quality is None


def test_for_inodes_alone_no_file_is_asked_for_its_size(scene: Scene) -> None:
    scene.volume("u1", 100_000)
    found = usages(scene.measured(DiskUrgency(near=frozenset({Signal.NODEFS_INODES}))))["u1"]
    assert (found.disk.volumes_bytes, found.disk.volumes_inodes) == (None, 2)


def test_who_writes_is_known_before_the_walk_ends(scene: Scene) -> None:
    for uid in ("u1", "u2"):
        place = scene.top / f"cg/kubepods/pod{uid}"
        place.mkdir(parents=True)
        (place / "io.stat").write_text("254:0 rbytes=0 wbytes=1000 rios=0 wios=0 dbytes=0 dios=0\n")
        (place / "memory.stat").write_text("file_dirty 0\nfile_writeback 0\n")
    at = time.clock_gettime(time.CLOCK_BOOTTIME)
    scene.tick(DiskUrgency(), at)
    scene.tick(NEAR, at + 1.0)
    (scene.top / "cg/kubepods/podu2/memory.stat").write_text("file_dirty 50000000\nfile_writeback 0\n")
    found = usages(scene.tick(NEAR, at + 2.0))
    assert found["u2"].writing is not None
    assert found["u2"].writing.written == 50_000_000
    assert found["u2"].writing.bytes_per_s > 0
    assert found["u1"].writing is not None
    assert found["u1"].writing.written == 0


def test_on_cgroup_v1_the_accounts_of_processes_say_who_writes(tmp_path: Path) -> None:
    scene = Scene(tmp_path, V1)
    try:
        place = scene.top / f"cg/pids/kubepods/podu1/{ID}"
        place.mkdir(parents=True)
        (place / "cgroup.procs").write_text("11\n12\n")
        (place.parent / "cgroup.procs").write_text("")
        for pid, size in ((11, 5000), (12, 0)):
            (scene.top / f"proc/{pid}").mkdir(parents=True)
            (scene.top / f"proc/{pid}/io").write_text(f"rchar: 1\nwrite_bytes: {size}\ncancelled_write_bytes: 0\n")
        at = time.clock_gettime(time.CLOCK_BOOTTIME)
        scene.tick(DiskUrgency(), at)
        scene.tick(CROSSED, at + 1.0)
        (scene.top / "proc/12/io").write_text("write_bytes: 70000\n")
        (place / "cgroup.procs").write_text("12\n13\n")  # 11 has ended; 13 is gone before it is looked at
        writing = usages(scene.tick(CROSSED, at + 2.0))["u1"].writing
        assert writing is not None
        assert writing.written == 70_000, "what 11 had written before anybody looked does not count"
    finally:
        scene.watch.close()


@pytest.mark.skipif(not os.access("/proc/self/io", os.R_OK), reason="this kernel has no /proc/<pid>/io")
def test_the_kernel_counts_a_write_when_it_is_made(tmp_path: Path) -> None:
    from nodeagent.sampling.disk.write_rates import read_write_bytes

    host, before = Host("/"), read_write_bytes(Host("/"), os.getpid())
    (tmp_path / "file").write_bytes(b"x" * 1_000_000)
    assert read_write_bytes(host, os.getpid()) - before >= 1_000_000


def test_a_need_for_pids_or_memory_is_none_for_disks(scene: Scene) -> None:
    scene.tick(DiskUrgency(crossed=frozenset({Signal.PID, Signal.MEMORY})))
    scene.tick(DiskUrgency(crossed=frozenset({Signal.PID, Signal.MEMORY})))
    assert not scene.ended.wait(0.2)

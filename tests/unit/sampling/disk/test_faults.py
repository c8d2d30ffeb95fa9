"""The walk and its worker on file systems that are full, read-only, or dead."""

import contextlib
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from nodeagent.model import UnattributedDisk
from nodeagent.sampling.disk import unattributed
from nodeagent.sampling.disk.attribution import PodDiskMeter
from nodeagent.sampling.disk.deleted_files import DeletedFiles
from nodeagent.sampling.disk.unattributed import PodDirectories
from nodeagent.sampling.disk.walk import CountMode
from nodeagent.sampling.disk.walk_worker import DiskWorker, WalkRequest
from nodeagent.sampling.hostfs.host import Host
from tests.support.disk_trees import du, pod, scan_deleted, walk
from tests.support.mounts import dying_fuse, ext4, mounted, root_only, silent_fuse

pytestmark = root_only


def test_a_file_system_without_free_inodes_is_counted_to_the_last_one(tmp_path: Path) -> None:
    with ext4(tmp_path, inodes=128) as path:
        with contextlib.suppress(OSError):
            for number in range(1000):
                (path / f"{number % 7}").mkdir(exist_ok=True)
                (path / f"{number % 7}" / f"{number}").touch()
        numbers = os.statvfs(path)
        assert numbers.f_ffree == 0
        usage, _ = walk(path)
        assert (usage.bytes, usage.inodes) == du(path)
        assert walk(path, count=CountMode.INODES)[0].inodes == usage.inodes
        # The first ten inodes belong to the file system; of these only the root is in the tree.
        assert usage.inodes == numbers.f_files - 9


def test_a_full_file_system_is_counted_and_cached_without_a_write(tmp_path: Path) -> None:
    with ext4(tmp_path, size_mb=8) as path:
        with (path / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            file.writelines(bytes(65536) for _ in range(1000))
        assert os.statvfs(path).f_bavail == 0
        usage, cache = walk(path)
        assert (usage.bytes, usage.inodes) == du(path)
        assert walk(path, previous=cache)[0].bytes == usage.bytes


def test_a_file_system_that_becomes_read_only_is_counted_as_before(tmp_path: Path) -> None:
    with ext4(tmp_path) as path:
        (path / "a").mkdir()
        (path / "a" / "file").write_bytes(b"x" * 9000)
        before, cache = walk(path)
        subprocess.run(["mount", "-o", "remount,ro", path], check=True)
        after, _ = walk(path, previous=cache)
        assert (after.bytes, after.inodes, after.unknown) == (before.bytes, before.inodes, 0)


def test_a_hanging_mount_below_a_tree_does_not_block_the_walk(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with silent_fuse(tmp_path / "dead"):
        ended = threading.Event()
        usages = []

        def walk_it() -> None:
            usages.append(walk(tmp_path)[0])
            ended.set()

        thread = threading.Thread(target=walk_it, daemon=True)
        thread.start()
        returned = ended.wait(40)
    thread.join(20)
    assert returned, "the walk waits for a server that never replies"
    assert (usages[0].mounts, usages[0].inodes) == (1, 2)


def test_a_hanging_mount_does_not_block_the_measurement_of_unattributed_files(tmp_path: Path) -> None:
    found: list[UnattributedDisk] = []
    with mounted(tmp_path / "disk", "-t", "tmpfs", "tmpfs") as path:
        (path / "images").mkdir()
        (path / "images/blob").write_bytes(b"x" * 50_000)
        (path / "outside").symlink_to("/")

        def measure() -> None:
            where = PodDirectories(f"{path}/kubelet", f"{path}/logs", "")
            until = time.monotonic() + 15
            found.append(
                unattributed.measure_unattributed(Host("/"), str(path), attributed=[], directories=where, until=until)
            )

        with silent_fuse(path / "dead"):
            thread = threading.Thread(target=measure, daemon=True)
            thread.start()
            thread.join(40)
            returned = not thread.is_alive()
        thread.join(20)
    assert returned, "it waits for a server that never replies"
    assert [(each.path, each.bytes, each.inodes) for each in found[0].largest] == [(f"{path}/images", 53_248, 2)]


def test_a_deleted_open_file_of_a_dead_server_does_not_block_the_scan(tmp_path: Path) -> None:
    found: list[DeletedFiles] = []
    device = os.stat(tmp_path).st_dev
    with dying_fuse(tmp_path / "dead") as fd:
        assert os.readlink(f"/proc/self/fd/{fd}").endswith(" (deleted)")
        scan = threading.Thread(
            target=lambda: found.append(scan_deleted([os.getpid()], frozenset({device}))), daemon=True
        )
        scan.start()
        scan.join(40)
        returned = not scan.is_alive()
    assert returned, "it waits for a server that never replies"
    assert found[0].complete


def test_a_worker_thread_that_hangs_on_a_mount_is_abandoned_and_replaced(tmp_path: Path) -> None:
    """The kubelet's directory itself is on a dead mount, so that the thread can only be abandoned."""
    ended = threading.Event()
    directories = [str(tmp_path / "dead"), str(tmp_path / "alive")]
    (tmp_path / "alive" / "pods" / "u1").mkdir(parents=True)
    (tmp_path / "alive" / "pods" / "u1" / "etc-hosts").write_text("127.0.0.1 localhost")
    (tmp_path / "logs").mkdir()

    def meter() -> PodDiskMeter:
        return PodDiskMeter(Host("/"), kubelet_dir=directories.pop(0), pod_logs_dir=str(tmp_path / "logs"))

    with silent_fuse(tmp_path / "dead"):
        worker = DiskWorker(meter, wake=ended.set, grace_s=0.05)
        worker.request(WalkRequest((pod("u1"),), timeout_s=0.05))
        deadline = time.monotonic() + 40
        while not worker.latest().trouble:
            assert time.monotonic() < deadline, "the hanging thread was not noticed"
            os.sched_yield()
        assert "hang" in worker.latest().trouble
        assert worker.latest().finished_at is None
        requested_at = time.monotonic()
        worker.request(WalkRequest((pod("u1"),), timeout_s=10.0))
        assert time.monotonic() - requested_at < 1.0, "the request waited"
        assert ended.wait(40)
        latest = worker.latest()
        assert latest.pods["u1"].other_inodes == 1
    deadline = time.monotonic() + 40
    while worker.latest().trouble:
        assert time.monotonic() < deadline, "the thread that returned still counts as abandoned"
        os.sched_yield()
    assert worker.latest().pods["u1"].other_inodes == 1, "the abandoned thread's result was published"
    worker.close()

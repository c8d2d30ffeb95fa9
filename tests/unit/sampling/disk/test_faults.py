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
    with ext4(tmp_path, inodes=128) as place:
        with contextlib.suppress(OSError):
            for number in range(1000):
                (place / f"{number % 7}").mkdir(exist_ok=True)
                (place / f"{number % 7}" / f"{number}").touch()
        numbers = os.statvfs(place)
        assert numbers.f_ffree == 0
        usage, _ = walk(place)
        assert (usage.bytes, usage.inodes) == du(place)
        assert walk(place, count=CountMode.INODES)[0].inodes == usage.inodes
        # The first ten inodes are the file system's own; of these only the root is in the tree.
        assert usage.inodes == numbers.f_files - 9


def test_a_full_file_system_is_counted_and_remembered_without_writing(tmp_path: Path) -> None:
    with ext4(tmp_path, size_mb=8) as place:
        with (place / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            file.writelines(bytes(65536) for _ in range(1000))
        assert os.statvfs(place).f_bavail == 0
        usage, cache = walk(place)
        assert (usage.bytes, usage.inodes) == du(place)
        assert walk(place, previous=cache)[0].bytes == usage.bytes


def test_a_file_system_that_turns_read_only_is_counted_as_before(tmp_path: Path) -> None:
    with ext4(tmp_path) as place:
        (place / "a").mkdir()
        (place / "a" / "file").write_bytes(b"x" * 9000)
        before, cache = walk(place)
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        after, _ = walk(place, previous=cache)
        assert (after.bytes, after.inodes, after.unknown) == (before.bytes, before.inodes, 0)


def test_a_hanging_mount_below_a_tree_does_not_hold_up_the_walk(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with silent_fuse(tmp_path / "dead"):
        ended = threading.Event()
        tallies = []

        def walk_it() -> None:
            tallies.append(walk(tmp_path)[0])
            ended.set()

        thread = threading.Thread(target=walk_it, daemon=True)
        thread.start()
        returned = ended.wait(40)
    thread.join(20)
    assert returned, "the walk waits for a server that never answers"
    assert (tallies[0].mounts, tallies[0].inodes) == (1, 2)


def test_a_hanging_mount_is_not_touched_in_the_search_for_what_is_in_no_pod(tmp_path: Path) -> None:
    found: list[UnattributedDisk] = []
    with mounted(tmp_path / "disk", "-t", "tmpfs", "tmpfs") as place:
        (place / "images").mkdir()
        (place / "images/blob").write_bytes(b"x" * 50_000)
        (place / "outside").symlink_to("/")

        def look() -> None:
            where = PodDirectories(f"{place}/kubelet", f"{place}/logs", "")
            until = time.monotonic() + 15
            found.append(
                unattributed.measure_unattributed(Host("/"), str(place), attributed=[], directories=where, until=until)
            )

        with silent_fuse(place / "dead"):
            thread = threading.Thread(target=look, daemon=True)
            thread.start()
            thread.join(40)
            returned = not thread.is_alive()
        thread.join(20)
    assert returned, "it waits for a server that never answers"
    assert [(each.path, each.bytes, each.inodes) for each in found[0].largest] == [(f"{place}/images", 53_248, 2)]


def test_a_deleted_file_of_a_dead_server_that_is_held_open_does_not_hold_us_up(tmp_path: Path) -> None:
    found: list[DeletedFiles] = []
    device = os.stat(tmp_path).st_dev
    with dying_fuse(tmp_path / "dead") as held:
        assert os.readlink(f"/proc/self/fd/{held}").endswith(" (deleted)")
        looking = threading.Thread(
            target=lambda: found.append(scan_deleted([os.getpid()], frozenset({device}))), daemon=True
        )
        looking.start()
        looking.join(40)
        returned = not looking.is_alive()
    assert returned, "it waits for a server that never answers"
    assert found[0].complete


def test_a_worker_that_hangs_on_a_mount_is_given_up_and_another_takes_its_place(tmp_path: Path) -> None:
    """The kubelet's directory itself is on a dead mount: nothing can be done but to leave the thread behind."""
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
        asked = time.monotonic()
        worker.request(WalkRequest((pod("u1"),), timeout_s=10.0))
        assert time.monotonic() - asked < 1.0, "the request waited"
        assert ended.wait(40)
        latest = worker.latest()
        assert latest.pods["u1"].other_inodes == 1
    deadline = time.monotonic() + 40
    while worker.latest().trouble:
        assert time.monotonic() < deadline, "the thread that came back was not forgiven"
        os.sched_yield()
    assert worker.latest().pods["u1"].other_inodes == 1, "the abandoned thread's result was published"
    worker.close()

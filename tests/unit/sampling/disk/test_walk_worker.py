"""The disk worker: no waits, one measurement at a time, the newest request first."""

import os
import threading
import time
from pathlib import Path

from nodeagent.sampling.disk.walk import CountMode
from nodeagent.sampling.disk.walk_worker import DiskWorker, WalkRequest, set_idle_io_priority
from tests.support.disk_trees import EMPTY_DIR, meter, node, pod


def worker(top: Path, ended: threading.Event) -> DiskWorker:
    return DiskWorker(
        lambda: meter(top),
        wake=ended.set,
    )


def test_a_measurement_is_published_with_its_time(tmp_path: Path) -> None:
    path = node(tmp_path) / f"var/lib/kubelet/pods/u1/{EMPTY_DIR}/v"
    path.mkdir(parents=True)
    ended = threading.Event()
    disk_worker = worker(tmp_path, ended)
    assert disk_worker.latest().finished_at is None
    assert disk_worker.latest().pods == {}
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    disk_worker.request(WalkRequest((pod("u1"),), timeout_s=30.0))
    assert ended.wait(30)
    latest = disk_worker.latest()
    assert latest.pods["u1"].disk.volumes_bytes == 4096
    assert latest.finished_at is not None
    assert before <= latest.pods["u1"].read_at <= latest.finished_at
    assert (latest.running, latest.trouble) == (False, "")
    assert latest.progress.done == latest.progress.paths == 2
    ended.clear()
    (path / "new").mkdir()
    disk_worker.request(WalkRequest((pod("u1"),), timeout_s=30.0, mode=CountMode.INODES))
    assert ended.wait(30)
    assert disk_worker.latest().pods["u1"].disk.volumes_inodes == 2
    disk_worker.close()


def test_a_closed_worker_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    node(tmp_path)
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    ended = threading.Event()
    disk_worker = worker(tmp_path, ended)
    disk_worker.request(WalkRequest((pod("u1"),), timeout_s=30.0))
    assert ended.wait(30)
    disk_worker.close(timeout_s=30.0)
    assert threading.active_count() <= threads, "a thread of an earlier test may have ended meanwhile"
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_failed_measurement_is_reported_and_the_next_one_runs(tmp_path: Path) -> None:
    ended = threading.Event()
    calls = []

    def unwritten(uid: str, since: float) -> bool:
        calls.append(uid)
        raise ValueError("the history is broken")

    path = node(tmp_path) / f"var/lib/kubelet/pods/u1/{EMPTY_DIR}/v"
    (path / "x").mkdir(parents=True)
    while time.time() < os.stat(path).st_ctime + 2.1:  # only then it is cached, and `unwritten` is called
        os.sched_yield()
    disk_worker = DiskWorker(
        lambda: meter(tmp_path),
        wake=ended.set,
        unwritten=unwritten,
    )
    for _ in range(2):
        ended.clear()
        disk_worker.request(WalkRequest((pod("u1"),), timeout_s=30.0))
        assert ended.wait(30)
    assert calls == ["u1"]
    latest = disk_worker.latest()
    assert "the history is broken" in latest.trouble
    assert latest.pods["u1"].disk.volumes_inodes == 2, "the last numbers stay, with their age"
    disk_worker.close()


def test_only_the_walking_thread_has_idle_io_priority() -> None:
    import psutil

    classes: list[object] = []

    def change() -> None:
        classes.append(set_idle_io_priority())
        classes.append(psutil.Process(threading.get_native_id()).ionice().ioclass)

    before = psutil.Process().ionice()
    thread = threading.Thread(target=change)
    thread.start()
    thread.join()
    assert classes == [True, psutil.IOPRIO_CLASS_IDLE]
    assert psutil.Process().ionice() == before

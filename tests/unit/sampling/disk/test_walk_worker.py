"""The worker: never waited for, one measurement at a time, the newest request wins."""

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


def test_a_measurement_is_published_with_the_time_it_was_read(tmp_path: Path) -> None:
    place = node(tmp_path) / f"var/lib/kubelet/pods/u1/{EMPTY_DIR}/v"
    place.mkdir(parents=True)
    ended = threading.Event()
    working = worker(tmp_path, ended)
    assert working.latest().finished_at is None
    assert working.latest().pods == {}
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    working.request(WalkRequest((pod("u1"),), timeout_s=30.0))
    assert ended.wait(30)
    latest = working.latest()
    assert latest.pods["u1"].disk.volumes_bytes == 4096
    assert latest.finished_at is not None
    assert before <= latest.pods["u1"].read_at <= latest.finished_at
    assert (latest.running, latest.trouble) == (False, "")
    assert latest.progress.done == latest.progress.paths == 2
    ended.clear()
    (place / "new").mkdir()
    working.request(WalkRequest((pod("u1"),), timeout_s=30.0, mode=CountMode.INODES))
    assert ended.wait(30)
    assert working.latest().pods["u1"].disk.volumes_inodes == 2
    working.close()


def test_a_closed_worker_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    node(tmp_path)
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    ended = threading.Event()
    working = worker(tmp_path, ended)
    working.request(WalkRequest((pod("u1"),), timeout_s=30.0))
    assert ended.wait(30)
    working.close(timeout_s=30.0)
    assert threading.active_count() <= threads, "one of an earlier test may have ended meanwhile"
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_measurement_that_fails_is_told_and_the_next_one_is_made(tmp_path: Path) -> None:
    ended = threading.Event()
    made = []

    def word(uid: str, since: float) -> bool:
        made.append(uid)
        raise ValueError("the ledger is broken")

    place = node(tmp_path) / f"var/lib/kubelet/pods/u1/{EMPTY_DIR}/v"
    (place / "x").mkdir(parents=True)
    while time.time() < os.stat(place).st_ctime + 2.1:  # only then it is remembered, and the word is asked for
        os.sched_yield()
    working = DiskWorker(
        lambda: meter(tmp_path),
        wake=ended.set,
        unwritten=word,
    )
    for _ in range(2):
        ended.clear()
        working.request(WalkRequest((pod("u1"),), timeout_s=30.0))
        assert ended.wait(30)
    assert made == ["u1"]
    latest = working.latest()
    assert "the ledger is broken" in latest.trouble
    assert latest.pods["u1"].disk.volumes_inodes == 2, "the last good numbers stay, with their age"
    working.close()


def test_the_walking_thread_alone_is_idle_for_the_disks() -> None:
    import psutil

    classes: list[object] = []

    def ask() -> None:
        classes.append(set_idle_io_priority())
        classes.append(psutil.Process(threading.get_native_id()).ionice().ioclass)

    before = psutil.Process().ionice()
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert classes == [True, psutil.IOPRIO_CLASS_IDLE]
    assert psutil.Process().ionice() == before

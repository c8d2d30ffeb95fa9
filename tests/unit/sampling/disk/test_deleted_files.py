"""Deleted files of real processes: held by descriptors, by a thread's own table, by mappings."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from nodeagent.sampling.disk.deleted_files import DeletedFiles, DeletedScan, Target
from nodeagent.sampling.hostfs.host import Host
from tests.support.disk_trees import scan_deleted
from tests.support.mounts import mounted, root_only

MIB = 1 << 20

BEGIN = """
import ctypes, mmap, os, sys, threading
os.chdir(sys.argv[1])
def made(name="file"):
    file = open(name, "w+b")
    file.write(b"x" * (1 << 20))
    file.flush()
    os.unlink(name)
    return file
def ready():
    print("up", flush=True)
    sys.stdin.readline()
"""
OPEN = "file = made(); ready()"
MAPPED = "file = made(); mapping = mmap.mmap(file.fileno(), 1 << 20); file.close(); ready()"
# mmap in Python keeps a descriptor of its own: this one has none.
ONLY_MAPPED = """
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
file = made()
assert libc.mmap(None, ctypes.c_size_t(1 << 20), 1, 1, file.fileno(), ctypes.c_long(0)) != ctypes.c_void_p(-1).value
file.close()
ready()
"""
OWN_TABLE = """
def hold():
    assert ctypes.CDLL(None).unshare(0x400) == 0
    global file
    file = made()
    os.dup(file.fileno())
    ready_event.set()
    threading.Event().wait()
ready_event = threading.Event()
threading.Thread(target=hold, daemon=True).start()
ready_event.wait()
ready()
"""
FIRST_THREAD_ENDED = """
def hold():
    file = made()
    ready()
    os._exit(0)
threading.Thread(target=hold).start()
ctypes.CDLL(None).pthread_exit(None)
"""
MEMORY = """
file = open(os.memfd_create("file"), "wb")
file.write(b"x" * (1 << 20))
file.flush()
ready()
"""
FAR_BELOW = """
for _ in range(30):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
file = made()
ready()
"""


@contextmanager
def holder(program: str, path: Path) -> "Iterator[subprocess.Popen[bytes]]":
    path.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + program, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def device(path: Path) -> int:
    return os.stat(path).st_dev


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(OPEN, id="open"),
        pytest.param(MAPPED, id="open and mapped"),
        pytest.param(ONLY_MAPPED, id="only mapped", marks=root_only),
        pytest.param(OWN_TABLE, id="in the table of one thread", marks=root_only),
        pytest.param(FIRST_THREAD_ENDED, id="the first thread has ended", marks=root_only),
        pytest.param(FAR_BELOW, id="its path is longer than PATH_MAX"),
    ],
)
def test_a_deleted_file_counts_once_for_every_kind_of_holder(program: str, tmp_path: Path) -> None:
    with holder(program, tmp_path / "data") as process:
        found = scan_deleted([process.pid], frozenset({device(tmp_path)}))
    assert found == DeletedFiles(MIB, 1, process.pid, complete=True)


def test_memory_does_not_count(tmp_path: Path) -> None:
    with holder(MEMORY, tmp_path) as process:
        found = scan_deleted([process.pid], frozenset({device(tmp_path)}))
    assert found == DeletedFiles(0, 0, None, complete=True)


@root_only
def test_a_file_on_a_tmpfs_does_not_count(tmp_path: Path) -> None:
    with mounted(tmp_path / "memory", "-t", "tmpfs", "tmpfs") as memory, holder(OPEN, memory) as process:
        found = scan_deleted([process.pid], frozenset({device(tmp_path)}))
    assert found == DeletedFiles(0, 0, None, complete=True)


@root_only
def test_files_in_layers_and_in_volumes_are_distinct(tmp_path: Path) -> None:
    for name in ("lower", "upper", "work"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    with mounted(tmp_path / "merged", "-t", "overlay", "-o", options, "overlay") as merged, ExitStack() as started:
        pids = [started.enter_context(holder(OPEN, path)).pid for path in (merged, tmp_path / "volume")]
        layers = frozenset({device(merged)})
        target = Target("u1", lambda: (pids, True), layers, frozenset({device(tmp_path)}))
        found = DeletedScan(Host("/")).scan([target], until=time.monotonic() + 60)["u1"]
    assert (found.bytes, found.files) == (2 * MIB, 2)
    assert (found.layer_bytes, found.layer_files) == (MIB, 1)


def test_a_file_that_several_pods_hold_counts_for_the_first_holder(tmp_path: Path) -> None:
    path = tmp_path / "data"
    scan, disks = DeletedScan(Host("/")), frozenset({device(tmp_path)})
    with holder(OPEN, path) as first, ExitStack() as handed:

        def scan_pods(*holders: tuple[str, int]) -> dict[str, int]:
            targets = [Target(uid, lambda pid=pid: ([pid], True), frozenset(), disks) for uid, pid in holders]  # type: ignore[misc]
            found = scan.scan(targets, until=time.monotonic() + 60)
            return {uid: deleted.bytes for uid, deleted in found.items()}

        fd = next(
            int(name)
            for name in os.listdir(f"/proc/{first.pid}/fd")
            if os.readlink(f"/proc/{first.pid}/fd/{name}").endswith("(deleted)")
        )
        file = handed.enter_context(open(f"/proc/{first.pid}/fd/{fd}", "rb"))
        second = handed.enter_context(
            subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file.fileno(), stderr=subprocess.DEVNULL)
        )
        assert scan_pods(("u2", first.pid)) == {"u2": MIB}
        assert scan_pods(("u1", second.pid), ("u2", first.pid)) == {"u1": 0, "u2": MIB}
        assert scan_pods(("u1", second.pid)) == {"u1": MIB}, "the other pod has ended"
        second.communicate(b"")


def test_each_pod_is_scanned_and_keeps_its_result_until_its_next_scan(tmp_path: Path) -> None:
    with holder(OPEN, tmp_path / "data") as process:
        disks, scanned = frozenset({device(tmp_path)}), []

        def target(uid: str) -> Target:
            def processes() -> tuple[list[int], bool]:
                scanned.append(uid)
                return ([process.pid] if uid == "u2" else [], True)

            return Target(uid, processes, frozenset(), disks)

        scan, targets = DeletedScan(Host("/")), [target("u1"), target("u2")]
        for limit in (1, 2):  # time for one pod each
            scan.scan(targets, until=time.monotonic() + 60, stop=lambda limit=limit: len(scanned) >= limit)  # type: ignore[misc]
        assert scanned == ["u1", "u2"]
        found = scan.scan(targets, until=time.monotonic() - 1)
    assert found["u2"].bytes == MIB


def test_a_scan_cut_short_by_its_deadline_is_not_complete(tmp_path: Path) -> None:
    with holder(OPEN, tmp_path) as process:

        def processes_after_the_deadline() -> tuple[list[int], bool]:
            time.sleep(max(0.0, until - time.monotonic()))
            return [process.pid], True

        target = Target("u1", processes_after_the_deadline, frozenset(), frozenset({device(tmp_path)}))
        until = time.monotonic() + 0.05
        found = DeletedScan(Host("/")).scan([target], until=until)["u1"]
    assert not found.complete

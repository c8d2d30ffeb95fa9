"""Deleted files that are held, with real processes: by descriptors, by threads of their own, by mappings."""

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
MAPPED = "file = made(); held = mmap.mmap(file.fileno(), 1 << 20); file.close(); ready()"
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
    told.set()
    threading.Event().wait()
told = threading.Event()
threading.Thread(target=hold, daemon=True).start()
told.wait()
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
def holder(program: str, place: Path) -> "Iterator[subprocess.Popen[bytes]]":
    place.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + program, str(place)],
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


def device(place: Path) -> int:
    return os.stat(place).st_dev


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(OPEN, id="open"),
        pytest.param(MAPPED, id="open and mapped"),
        pytest.param(ONLY_MAPPED, id="only mapped", marks=root_only),
        pytest.param(OWN_TABLE, id="in the table of one thread", marks=root_only),
        pytest.param(FIRST_THREAD_ENDED, id="the first thread has ended", marks=root_only),
        pytest.param(FAR_BELOW, id="its path was longer than the kernel says"),
    ],
)
def test_a_deleted_file_counts_once_however_it_is_held(program: str, tmp_path: Path) -> None:
    with holder(program, tmp_path / "data") as process:
        found = scan_deleted([process.pid], frozenset({device(tmp_path)}))
    assert found == DeletedFiles(MIB, 1, process.pid, complete=True)


def test_memory_is_no_disk(tmp_path: Path) -> None:
    with holder(MEMORY, tmp_path) as process:
        found = scan_deleted([process.pid], frozenset({device(tmp_path)}))
    assert found == DeletedFiles(0, 0, None, complete=True)


@root_only
def test_a_file_on_a_tmpfs_is_no_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "memory", "-t", "tmpfs", "tmpfs") as memory, holder(OPEN, memory) as process:
        found = scan_deleted([process.pid], frozenset({device(tmp_path)}))
    assert found == DeletedFiles(0, 0, None, complete=True)


@root_only
def test_a_file_in_a_layer_is_told_from_one_in_a_volume(tmp_path: Path) -> None:
    for name in ("lower", "upper", "work"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    with mounted(tmp_path / "merged", "-t", "overlay", "-o", options, "overlay") as merged, ExitStack() as started:
        pids = [started.enter_context(holder(OPEN, place)).pid for place in (merged, tmp_path / "volume")]
        layers = frozenset({device(merged)})
        target = Target("u1", lambda: (pids, True), layers, frozenset({device(tmp_path)}))
        found = DeletedScan(Host("/")).scan([target], until=time.monotonic() + 60)["u1"]
    assert (found.bytes, found.files) == (2 * MIB, 2)
    assert (found.layer_bytes, found.layer_files) == (MIB, 1)


def test_a_file_that_pods_have_handed_on_counts_for_the_one_that_had_it(tmp_path: Path) -> None:
    place = tmp_path / "data"
    scan, disks = DeletedScan(Host("/")), frozenset({device(tmp_path)})
    with holder(OPEN, place) as first, ExitStack() as handed:

        def look(*holders: tuple[str, int]) -> dict[str, int]:
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
        assert look(("u2", first.pid)) == {"u2": MIB}
        assert look(("u1", second.pid), ("u2", first.pid)) == {"u1": 0, "u2": MIB}
        assert look(("u1", second.pid)) == {"u1": MIB}, "the other has gone"
        second.communicate(b"")


def test_each_pod_has_its_turn_and_keeps_what_was_seen_until_the_next_one(tmp_path: Path) -> None:
    with holder(OPEN, tmp_path / "data") as process:
        disks, asked = frozenset({device(tmp_path)}), []

        def target(uid: str) -> Target:
            def processes() -> tuple[list[int], bool]:
                asked.append(uid)
                return ([process.pid] if uid == "u2" else [], True)

            return Target(uid, processes, frozenset(), disks)

        scan, targets = DeletedScan(Host("/")), [target("u1"), target("u2")]
        for turn in (1, 2):  # time for one pod each
            scan.scan(targets, until=time.monotonic() + 60, stop=lambda turn=turn: len(asked) >= turn)  # type: ignore[misc]
        assert asked == ["u1", "u2"]
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

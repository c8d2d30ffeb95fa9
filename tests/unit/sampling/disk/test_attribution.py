"""Disk usage of pods in a tree like the kubelet's, with real overlay and tmpfs mounts."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from nodeagent.model import DiskLayout, DiskUsage, Signal
from nodeagent.policy import pod_usage
from nodeagent.sampling.disk import pod_paths, unattributed
from nodeagent.sampling.disk.attribution import PodDiskMeter
from nodeagent.sampling.disk.deleted_files import DeletedFiles
from nodeagent.sampling.disk.pod_disk import PodDisk, with_disk_usage
from nodeagent.sampling.disk.unattributed import PodDirectories
from nodeagent.sampling.disk.walk import CountMode
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.hostfs.mounts import parse_mounts
from tests.support.disk_trees import EMPTY_DIR, ID, live_meter, measure, meter, node, pod, scan_deleted, until_settled
from tests.support.livenode import until
from tests.support.mounts import btrfs, mounted, root_only
from tests.support.paths import DATA

DISK_DATA = DATA / "disk"
PIDS = Path("/sys/fs/cgroup/pids")
real_pids = pytest.mark.skipif(
    os.geteuid() != 0 or not os.access(PIDS, os.W_OK), reason="needs root and the cgroup v1 pids hierarchy"
)


# --- against the kubelet


def test_a_recorded_node_has_the_numbers_of_its_kubelet(tmp_path: Path) -> None:
    """The recording contains the names and sizes below the kubelet's directory and the log directory, and the mount
    table. Layers are built as they were: one directory with the three files that the runtime mounts over."""
    recorded = json.loads((DISK_DATA / "imagefs-pressure.json").read_text())
    node(tmp_path)
    (tmp_path / "proc/1/mountinfo").write_bytes((DISK_DATA / "imagefs-pressure.mountinfo").read_bytes())
    for entry in recorded["listing"]:
        path = tmp_path / entry["path"].lstrip("/")
        if entry["type"] == "d":
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x" * entry["size"])
    mounts = parse_mounts((DISK_DATA / "imagefs-pressure.mountinfo").read_bytes())
    found_layers = pod_paths.find_layers(Host(str(tmp_path)), mounts)
    layers = [found_layers[row["id"]] for row in recorded["containers"]]
    assert len(layers) == 4
    for layer in layers:
        etc = tmp_path / pod_paths.upper_directory(layer).lstrip("/") / "etc"
        etc.mkdir(parents=True)
        for name in ("hostname", "hosts", "resolv.conf"):
            (etc / name).touch()
    usages = [
        pod(truth["uid"], *((row["id"], row["name"]) for row in recorded["containers"] if row["uid"] == truth["uid"]))
        for truth in recorded["pods"]
    ]
    found = measure(tmp_path, *usages)
    compared = 0
    for truth, usage in zip(recorded["pods"], usages, strict=True):
        mine = with_disk_usage(usage, found[truth["uid"]])
        assert found[truth["uid"]].complete, found[truth["uid"]].unknown
        (container,) = truth["containers"]
        assert (mine.disk.logs_bytes, mine.disk.logs_inodes) == (container["logsBytes"], container["logsInodes"])
        if container["rootfsInodes"] == 5:  # the other pods had written files that were not recorded
            assert mine.containers[0].disk.rootfs_bytes == container["rootfsBytes"]
            assert mine.containers[0].disk.rootfs_inodes == container["rootfsInodes"]
            other = found[truth["uid"]]
            assert ephemeral(other) == (truth["ephemeralBytes"], truth["ephemeralInodes"])
            compared += 1
    assert compared == 3


def ephemeral(found: PodDisk) -> tuple[int, int]:
    """The kubelet's ephemeral-storage of a pod."""
    disk = found.disk
    assert disk.rootfs_bytes is not None
    assert disk.rootfs_inodes is not None
    return (
        disk.rootfs_bytes + (disk.logs_bytes or 0) + (disk.volumes_bytes or 0) + found.other_bytes,
        disk.rootfs_inodes + (disk.logs_inodes or 0) + (disk.volumes_inodes or 0) + found.other_inodes,
    )


# --- volumes


def test_only_volumes_that_are_the_pods_own_count(tmp_path: Path) -> None:
    path = node(tmp_path) / "var/lib/kubelet/pods/u1/volumes"
    for plugin in ("empty-dir", "configmap", "git-repo", "secret", "projected", "host-path", "csi", "nfs"):
        (path / f"kubernetes.io~{plugin}" / "v").mkdir(parents=True)
        (path / f"kubernetes.io~{plugin}" / "v" / "file").write_bytes(b"x" * 5000)
    found = measure(tmp_path, pod("u1"))["u1"]
    assert [volume.name for volume in found.volumes] == ["v", "v", "v"]
    assert found.disk.volumes_bytes == 3 * (4096 + 8192)
    assert found.disk.volumes_inodes == 6
    assert found.disk.rootfs_bytes == 0, "a pod without containers has no layers"


@root_only
def test_a_memory_backed_volume_is_memory_and_never_disk(tmp_path: Path) -> None:
    path = node(tmp_path) / f"var/lib/kubelet/pods/u1/{EMPTY_DIR}"
    (path / "disk").mkdir(parents=True)
    with mounted(path / "ram", "-t", "tmpfs", "tmpfs") as ram:
        (ram / "file").write_bytes(b"x" * 100_000)
        pod_meter = live_meter(tmp_path)
        found = pod_meter.measure([pod("u1")], until=time.monotonic() + 60)["u1"]
    by_name = {volume.name: volume for volume in found.volumes}
    assert by_name["ram"].memory_backed
    assert by_name["ram"].used_bytes == 102_400
    assert by_name["ram"].used_inodes == 2
    assert found.disk.volumes_bytes == by_name["disk"].used_bytes == 4096


@root_only
def test_another_file_system_mounted_on_a_volume_is_not_the_pods_own(tmp_path: Path) -> None:
    path = node(tmp_path) / f"var/lib/kubelet/pods/u1/{EMPTY_DIR}"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_bytes(b"x" * 100_000)
    with mounted(path / "v", "--bind", tmp_path / "other"):
        found = live_meter(tmp_path).measure([pod("u1")], until=time.monotonic() + 60)["u1"]
    assert found.volumes == ()
    assert not found.complete
    assert "not the pod's own" in found.unknown[0]


# --- layers


@root_only
@pytest.mark.parametrize("runtime", ["containerd", "cri-o"])
def test_a_writable_layer_is_found_through_the_mount_table(tmp_path: Path, runtime: str) -> None:
    node(tmp_path)
    store = tmp_path / "store"
    if runtime == "containerd":
        point = tmp_path / f"run/containerd/io.containerd.runtime.v2.task/k8s.io/{ID}/rootfs"
        upper = store / "snapshots" / "7" / "fs"
    else:
        point = store / "overlay" / "layer7" / "merged"
        upper = store / "overlay" / "layer7" / "diff"
        (store / "overlay-containers").mkdir(parents=True)
        rows = [{"id": ID, "layer": "layer7"}, {"id": "2" * 64, "layer": "gone"}, "not a row"]
        (store / "overlay-containers" / "containers.json").write_text(json.dumps(rows))
    lower, work = store / "lower", store / "work"
    for directory in (lower, work, upper):
        directory.mkdir(parents=True)
    (lower / "of the image").write_bytes(b"x" * 1_000_000)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    with mounted(point, "-t", "overlay", "overlay", "-o", options):
        (point / "written").write_bytes(b"x" * 40_960)
        (point / "of the image").unlink()  # leaves a whiteout: an inode without bytes
        usage = pod("u1", (ID, "main"), ("3" * 64, "other"))
        found = live_meter(tmp_path).measure([usage], until=time.monotonic() + 60)["u1"]
    mine = with_disk_usage(usage, found)
    assert mine.containers[0].disk.rootfs_bytes == 40_960 + 4096
    assert mine.containers[0].disk.rootfs_inodes == 3
    assert mine.containers[1].disk.rootfs_bytes is None
    assert not found.complete
    assert "other" in found.unknown[0]
    assert "snapshotter" in found.unknown[0]


def test_a_pod_without_a_known_layer_has_no_layer_usage(tmp_path: Path) -> None:
    node(tmp_path)
    usage = pod("u1", (ID, "main"))
    found = measure(tmp_path, usage)["u1"]
    assert found.disk.rootfs_bytes is None
    assert found.disk.rootfs_inodes is None
    assert found.disk.logs_bytes == 0


def test_overlay_paths_may_be_relative_and_contain_commas() -> None:
    line = rb"1 1 0:45 / %s rw - overlay overlay rw,lowerdir=/l,upperdir=%s,workdir=/w"
    (comma,) = parse_mounts(line % (b"/m", rb"/a\054b/fs"))
    assert pod_paths.upper_directory(comma) == "/a,b/fs"
    (relative,) = parse_mounts(line % (b"/store/overlay/abc/merged", b"abc/diff"))
    assert pod_paths.upper_directory(relative) == "/store/overlay/abc/diff"


# --- logs


def test_logs_are_the_plain_files_directly_in_a_containers_log_directory(tmp_path: Path) -> None:
    logs = node(tmp_path) / "var/log/pods" / "ns_name_u1"
    (logs / "main" / "deeper").mkdir(parents=True)
    (logs / "main" / "0.log").write_bytes(b"x" * 5000)
    (logs / "main" / "1.log.gz").write_bytes(b"x" * 100)
    (logs / "main" / "deeper" / "not a log").write_bytes(b"x" * 100_000)
    (logs / "main" / "link").symlink_to("/etc/passwd")
    (logs / "beside").write_bytes(b"x" * 5000)
    usage = pod("u1", (ID, "main"))
    found = measure(tmp_path, usage)["u1"]
    assert (found.disk.logs_bytes, found.disk.logs_inodes) == (8192 + 4096, 2)
    assert (found.other_bytes, found.other_inodes) == (8192, 1)
    assert with_disk_usage(usage, found).containers[0].disk.logs_bytes == 8192 + 4096


@root_only
@pytest.mark.parametrize("separate", [False, True])
def test_logs_on_a_file_system_of_their_own_are_told_from_those_on_nodefs(tmp_path: Path, separate: bool) -> None:
    top = node(tmp_path)
    with mounted(top / "var/log", "-t", "tmpfs", "tmpfs") if separate else contextlib.nullcontext():
        log = top / "var/log/pods/ns_name_u1/c/0.log"
        log.parent.mkdir(parents=True)
        log.write_bytes(b"x" * 8192)
        disk = measure(top, pod("u1", (ID, "c")))["u1"].disk
    assert (disk.logs_bytes, disk.logs_on_nodefs) == (8192, not separate)


def test_a_log_directory_that_is_a_symlink_is_not_followed(tmp_path: Path) -> None:
    node(tmp_path)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "file").write_bytes(b"x" * 100_000)
    (tmp_path / "var/log/pods/ns_name_u1").mkdir()
    (tmp_path / "var/log/pods/ns_name_u1/main").symlink_to(tmp_path / "secret")
    (tmp_path / "var/log/pods/ns_name_u2").symlink_to(tmp_path / "secret")
    (tmp_path / f"var/lib/kubelet/pods/u1/{EMPTY_DIR}").mkdir(parents=True)
    (tmp_path / f"var/lib/kubelet/pods/u1/{EMPTY_DIR}/v").symlink_to(tmp_path / "secret")
    found = measure(tmp_path, pod("u1"), pod("u2"))
    for uid in ("u1", "u2"):
        assert found[uid].disk.logs_bytes in (0, None)
        assert found[uid].disk.volumes_bytes == 0
        assert found[uid].other_bytes == 0


def test_the_administrators_own_symlinks_are_followed_inside_the_root(tmp_path: Path) -> None:
    node(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "var/lib/kubelet").rename(tmp_path / "data/kubelet")
    (tmp_path / "var/lib/kubelet").symlink_to("/data/kubelet")
    (tmp_path / f"data/kubelet/pods/u1/{EMPTY_DIR}/v").mkdir(parents=True)
    assert measure(tmp_path, pod("u1"))["u1"].disk.volumes_bytes == 4096


# --- time


def stop_after(calls: int) -> Callable[[], bool]:
    """Returns True from the next call after this many on."""
    results = itertools.chain([False] * calls, itertools.repeat(True))
    return lambda: next(results)


def test_an_unfinished_tree_is_a_lower_bound_and_continues_in_the_next_call(tmp_path: Path) -> None:
    path = node(tmp_path) / f"var/lib/kubelet/pods/u1/{EMPTY_DIR}/v"
    for number in range(200):
        (path / f"{number}" / "below").mkdir(parents=True)
        for name in range(300):
            (path / f"{number}" / f"{name}").touch()
    pod_meter = meter(tmp_path)
    first = pod_meter.measure([pod("u1")], until=time.monotonic() + 60, stop=stop_after(2))["u1"]
    assert first.disk.volumes_inodes is not None
    assert 0 < first.disk.volumes_inodes < 60_401
    assert not first.complete
    assert any("lower bound" in reason for reason in first.unknown)
    between = time.clock_gettime(time.CLOCK_BOOTTIME)
    second = pod_meter.measure([pod("u1")], until=time.monotonic() + 60)["u1"]
    assert second.disk.volumes_inodes == 60_401
    assert second.complete
    assert second.read_at < between, "the same walk is as old as its first number"


def test_every_pod_is_measured_even_if_the_time_never_suffices_for_all(tmp_path: Path) -> None:
    node(tmp_path)
    uids = [f"u{number}" for number in range(20)]
    for uid in uids:
        (tmp_path / f"var/lib/kubelet/pods/{uid}/{EMPTY_DIR}/v").mkdir(parents=True)
    pod_meter = meter(tmp_path)
    measured: set[str] = set()
    for _ in range(20):
        found = pod_meter.measure([pod(uid) for uid in uids], until=time.monotonic() + 60, stop=stop_after(6))
        measured |= {uid for uid, disk in found.items() if disk.disk.volumes_bytes}
    assert measured == set(uids)
    pod_meter.close()


def test_without_time_there_are_no_numbers_and_no_error(tmp_path: Path) -> None:
    node(tmp_path)
    (tmp_path / f"var/lib/kubelet/pods/u1/{EMPTY_DIR}/v").mkdir(parents=True)
    found = measure(tmp_path, pod("u1"), timeout_s=-1.0)["u1"]
    assert found.disk.volumes_bytes is None
    assert not found.complete


def test_inodes_alone_are_counted_without_bytes(tmp_path: Path) -> None:
    path = node(tmp_path) / f"var/lib/kubelet/pods/u1/{EMPTY_DIR}/v"
    (path / "a").mkdir(parents=True)
    found = meter(tmp_path).measure([pod("u1")], until=time.monotonic() + 60, count=CountMode.INODES)["u1"]
    assert found.disk.volumes_bytes is None
    assert found.disk.volumes_inodes == 2


def test_a_recount_uses_no_cache_and_keeps_the_caches_of_other_pods(tmp_path: Path) -> None:
    top = node(tmp_path)
    for uid in ("u1", "u2"):
        path = top / f"var/lib/kubelet/pods/{uid}/{EMPTY_DIR}/v"
        path.mkdir(parents=True)
        (path / "file").write_bytes(b"x" * 9000)
    pod_meter = meter(top)
    deadline = time.monotonic() + 60
    until_settled(path)
    pod_meter.measure([pod("u1"), pod("u2")], until=deadline)
    cache = set(pod_meter._trees)
    assert len(cache) == 2
    with open(top / f"var/lib/kubelet/pods/u1/{EMPTY_DIR}/v/file", "r+b") as file:
        file.truncate(1)

    def unwritten(_uid: str, _since: float) -> bool:
        return True

    reused = pod_meter.measure([pod("u1"), pod("u2")], until=deadline, unwritten=unwritten)
    assert reused["u1"].disk.volumes_bytes == 4096 + 12288
    recount = pod_meter.measure([pod("u1")], until=deadline, unwritten=unwritten, recount=True)
    assert recount["u1"].disk.volumes_bytes == 4096 + 4096
    assert set(pod_meter._trees) == cache
    pod_meter.close()


def test_usage_without_a_measurement_is_unchanged() -> None:
    usage = pod("u1", (ID, "main"))
    assert with_disk_usage(usage, None) is usage
    assert usage.disk == DiskUsage()


@pytest.mark.parametrize(
    ("deleted", "known"),
    [
        (DeletedFiles(0, 0, None, complete=False), None),
        (DeletedFiles(0, 0, None, complete=True), 0),
        (DeletedFiles(4096, 1, 7, complete=False), 4096),
    ],
)
def test_unreadable_open_files_are_unknown_and_not_zero(deleted: DeletedFiles, known: int | None) -> None:
    found = PodDisk("u1", DiskUsage(), {}, {}, (), 0, 0, 1.0, True, (), deleted)
    quality = with_disk_usage(pod("u1"), found).disk_usage_quality
    assert quality is not None
    assert quality.deleted_bytes == known


# --- the word that a pod wrote nothing


def test_a_quiet_pods_files_come_from_the_cache_and_another_pods_are_read(tmp_path: Path) -> None:
    node(tmp_path)
    for uid in ("u1", "u2"):
        path = tmp_path / f"var/lib/kubelet/pods/{uid}/{EMPTY_DIR}/v"
        path.mkdir(parents=True)
        (path / "file").write_bytes(b"x")
    until_settled(path)
    pod_meter = meter(tmp_path)
    calls: list[tuple[str, float]] = []

    def quiet(uid: str, since: float) -> bool:
        calls.append((uid, since))
        return uid == "u1"

    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    for _ in range(2):
        found = pod_meter.measure([pod("u1"), pod("u2")], until=time.monotonic() + 60, unwritten=quiet)
        for uid in ("u1", "u2"):
            with open(tmp_path / f"var/lib/kubelet/pods/{uid}/{EMPTY_DIR}/v/file", "ab") as file:
                file.write(b"x" * 100_000)
    assert found["u1"].disk.volumes_bytes == 4096 + 4096, "`unwritten` was True for it"
    assert found["u2"].disk.volumes_bytes == 4096 + 102_400
    assert {uid for uid, _ in calls} == {"u1", "u2"}
    assert all(since >= before for _, since in calls)


# --- deleted files and the rest


def test_a_deleted_open_file_is_found(tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    gone, stays = tmp_path / "gone", tmp_path / "stays"
    gone.write_bytes(b"x" * 100_000)
    with gone.open("ab") as out, stays.open("ab") as err, subprocess.Popen(
        ["cat"], stdin=subprocess.PIPE, stdout=out, stderr=err
    ) as holder:  # fmt: skip
        gone.unlink()
        assert holder.stdin is not None
        holder.stdin.write(b"y")
        holder.stdin.flush()
        # While a program is being loaded, what it has open changes under the scan.
        until(lambda: os.fstat(out.fileno()).st_size == 100_001, "what cat has read")
        found = scan_deleted([holder.pid, holder.pid], frozenset({device}))
        elsewhere = scan_deleted([holder.pid], frozenset({device + 1}))
        holder.communicate(b"")
    assert found == DeletedFiles(102_400, 1, holder.pid, complete=True)
    assert (elsewhere.bytes, elsewhere.files) == (0, 0)
    ended = scan_deleted([holder.pid], frozenset({device}))
    assert ended == DeletedFiles(0, 0, None, complete=True), "the process has ended"


SCAN = """
import os
from tests.support.disk_trees import scan_deleted
{become}
print(scan_deleted([os.getppid()], frozenset({{0}})).complete)
"""
WITHOUT_PTRACE = """
import ctypes, os, sys
drop_from_bounding_set, sys_ptrace = 24, 19
assert ctypes.CDLL(None).prctl(drop_from_bounding_set, sys_ptrace, 0, 0, 0) == 0
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""


@root_only
@pytest.mark.parametrize(
    "command",
    [["-c", SCAN.format(become="os.setuid(65534)")], ["-c", WITHOUT_PTRACE, SCAN.format(become="")]],
    ids=["another user", "root without CAP_SYS_PTRACE"],
)
def test_a_scan_that_the_kernel_refuses_is_not_complete(command: list[str]) -> None:
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


def held_open(file: BinaryIO) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file, stderr=subprocess.DEVNULL)


@real_pids
def test_the_deleted_open_files_of_a_pods_processes_count(tmp_path: Path) -> None:
    node(tmp_path)
    gone = tmp_path / "var/lib/kubelet/gone"
    gone.write_bytes(b"x" * 100_000)
    group = PIDS / f"nodeagent-test-{os.getpid()}"
    (group / "podu1" / ID).mkdir(parents=True)
    pod_meter = PodDiskMeter(
        Host("/"), kubelet_dir=f"{tmp_path}/var/lib/kubelet", pod_logs_dir=f"{tmp_path}/var/log/pods",
        cgroups=str(PIDS),
    )  # fmt: skip
    try:
        with gone.open("ab") as out, held_open(out) as holder:
            (group / "podu1" / ID / "cgroup.procs").write_text(str(holder.pid))
            gone.unlink()
            usage = pod("u1")._replace(cgroup=f"/{group.name}/podu1")
            found = pod_meter.measure([usage], until=time.monotonic() + 60)["u1"]
            holder.communicate(b"")
    finally:
        for directory in (group / "podu1" / ID, group / "podu1", group):
            directory.rmdir()
    assert found.deleted == DeletedFiles(102_400, 1, holder.pid, complete=True)
    assert pod_usage.disk_usage(with_disk_usage(usage, found).disk, Signal.NODEFS, DiskLayout.SINGLE) == 102_400


@root_only
def test_all_subvolumes_of_a_btrfs_are_one_file_system(tmp_path: Path) -> None:
    """Each has an st_dev of its own. What pods hold in another subvolume is no growth outside of pods."""
    with btrfs(tmp_path, "kubelet", "logs", "layers") as top:
        kubelet, logs, layers = (str(top / name) for name in ("kubelet", "logs", "layers"))
        assert os.stat(kubelet).st_dev != os.stat(logs).st_dev
        log = top / "logs/ns_name_u1/c/0.log"
        log.parent.mkdir(parents=True)
        log.write_bytes(b"x" * 40_960)
        host = Host("/")
        pod_meter = PodDiskMeter(host, kubelet_dir=kubelet, pod_logs_dir=logs)
        disk = pod_meter.measure([pod("u1")], until=time.monotonic() + 60)["u1"]
        pod_meter.close()
        directories = PodDirectories(kubelet, logs, layers)
        present = unattributed.directories_on(host, directories, unattributed.read_used_space(host, kubelet))
    assert disk.disk.logs_on_nodefs
    assert present == {kubelet, logs, layers}
    assert sum(part.bytes for part in unattributed.parts_on(disk, directories, present).values()) == 40_960


@root_only
def test_unattributed_usage_has_its_largest_directories(tmp_path: Path) -> None:
    with mounted(tmp_path / "root", "-t", "tmpfs", "tmpfs") as top:
        node(top)
        path = top / f"var/lib/kubelet/pods/u1/{EMPTY_DIR}/v"
        path.mkdir(parents=True)
        (path / "file").write_bytes(b"x" * 400_000)
        (top / "var/log/journal").mkdir()
        (top / "var/log/journal/old").write_bytes(b"x" * 800_000)
        (top / "home").mkdir()
        (top / "home/file").write_bytes(b"x" * 40_000)
        pods = measure(top, pod("u1"))
        where = PodDirectories("/var/lib/kubelet", "/var/log/pods", "/elsewhere")
        host, found = Host(str(top)), list(pods.values())
        rest = unattributed.measure_unattributed(
            host, "/var/lib/kubelet", attributed=found, directories=where, until=time.monotonic() + 60
        )
    assert rest.attributed_bytes == 401_408
    assert rest.unattributed_bytes == rest.used_bytes - 401_408
    assert 839_680 <= rest.unattributed_bytes < 900_000
    assert rest.largest[0].path == "/var/log/journal"
    assert rest.largest[0].bytes == 802_816
    by_path = {directory.path: directory.bytes for directory in rest.largest}
    assert by_path["/home"] == 40_960
    assert by_path["/var/lib/kubelet"] == 0, "all its files belong to the pod (directories are free on a tmpfs)"

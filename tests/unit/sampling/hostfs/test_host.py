"""An injected root: never the facts of another machine, always a reason."""

import errno
import os
import shutil
import time
from pathlib import Path

import pytest

from nodeagent.sampling.hostfs.host import (
    Host,
    RecordedHost,
    Unreadable,
    open_host,
)
from nodeagent.sampling.hostfs.mounts import covering_mount, parse_mounts
from tests.support.trees import Node, TreeDisk, write_node


def test_an_unreadable_file_is_an_error_with_path_and_reason(tmp_path: Path) -> None:
    with pytest.raises(Unreadable) as caught:
        Host(str(tmp_path)).read("/proc/meminfo")
    assert (caught.value.path, caught.value.errno) == ("/proc/meminfo", errno.ENOENT)
    assert "No such file" in str(caught.value)


def test_a_directory_in_place_of_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "proc/meminfo").mkdir(parents=True)
    with pytest.raises(Unreadable) as caught:
        Host(str(tmp_path)).read("/proc/meminfo")
    assert caught.value.errno == errno.EISDIR


def test_a_named_pipe_in_place_of_a_file_does_not_block_the_reader(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    os.mkfifo(tmp_path / "proc/meminfo")
    assert Host(str(tmp_path)).read("/proc/meminfo") == b""


@pytest.mark.parametrize("size", [0, 1, 2047, 2048, 4095, 4096, 4097, 65536, 300_000])
def test_a_file_of_any_length_is_read_completely(tmp_path: Path, size: int) -> None:
    content = bytes(i % 251 for i in range(size))
    (tmp_path / "file").write_bytes(content)
    assert Host(str(tmp_path)).read("/file") == content


def test_absolute_links_lead_inside_the_root(tmp_path: Path) -> None:
    (tmp_path / "mnt/big").mkdir(parents=True)
    (tmp_path / "mnt/big/name").write_text("the host's")
    (tmp_path / "var").mkdir()
    (tmp_path / "var/lib").symlink_to("/mnt/big")
    (tmp_path / "escape").symlink_to("../../../../../../mnt")
    host = Host(str(tmp_path))
    assert host.text("/var/lib/name") == "the host's"
    assert host.resolve("/escape/big/name") == "/mnt/big/name"
    assert host.exists("/var/lib/name")


def test_a_loop_of_links_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("/b")
    (tmp_path / "b").symlink_to("/a")
    with pytest.raises(Unreadable) as caught:
        Host(str(tmp_path)).read("/a")
    assert caught.value.errno == errno.ELOOP
    assert not Host(str(tmp_path)).exists("/a")


def test_a_copied_tree_never_shows_the_disk_of_this_machine(tmp_path: Path) -> None:
    # The recorded nodes' root is 254:0, as on many virtual machines: the device number alone would prove nothing.
    root = write_node(tmp_path, Node())
    own = covering_mount(parse_mounts(Path("/proc/self/mountinfo").read_bytes()), str(tmp_path))
    assert own is not None
    device = f"{os.major(own.device)}:{os.minor(own.device)}"
    (tmp_path / "proc/1/mountinfo").write_text(f"26 1 {device} / / rw - ext4 /dev/vda rw\n")
    shutil.rmtree(tmp_path / "listing")
    with pytest.raises(Unreadable, match="a copy, not a mounted procfs"):
        open_host(root).statvfs("/var/lib/kubelet")


def test_the_live_root_returns_its_own_file_systems() -> None:
    numbers, expected = Host("/").statvfs("/"), os.statvfs("/")
    assert numbers.capacity == expected.f_blocks * expected.f_frsize
    assert numbers.inodes == expected.f_files


@pytest.mark.skipif(os.geteuid() != 0, reason="bind mounts need root")
def test_the_real_root_mounted_elsewhere_returns_its_own_file_systems(tmp_path: Path) -> None:
    """The DaemonSet: `/` of the host, with its mounts, at `/host`."""
    mount = shutil.which("mount")
    assert mount is not None
    if os.system(f"{mount} --rbind --make-rslave / {tmp_path} 2>/dev/null") != 0:
        pytest.skip("this sandbox does not allow bind mounts")
    try:
        host = open_host(str(tmp_path))
        here, there = Host("/").statvfs("/"), host.statvfs("/")
        assert (there.capacity, there.inodes, there.device) == (here.capacity, here.inodes, here.device)
        assert host.read("/proc/sys/kernel/pid_max") == Path("/proc/sys/kernel/pid_max").read_bytes()
    finally:
        assert os.system(f"umount -l {tmp_path}") == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="bind mounts need root")
def test_a_mount_that_was_not_propagated_is_unknown_not_the_disk_below_it(tmp_path: Path) -> None:
    """`/` bound without its submounts: /proc is bound by hand, /dev/shm is the directory under the tmpfs."""
    if not os.path.ismount("/dev/shm"):
        pytest.skip("needs a tmpfs at /dev/shm")
    if os.system(f"mount --bind / {tmp_path} && mount --bind /proc {tmp_path}/proc") != 0:
        pytest.skip("this sandbox does not allow bind mounts")
    try:
        with pytest.raises(Unreadable, match="mount propagation"):
            open_host(str(tmp_path)).statvfs("/dev/shm" if (tmp_path / "dev/shm").exists() else "/dev")
    finally:
        assert os.system(f"umount -l {tmp_path}/proc && umount -l {tmp_path}") == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="bind mounts need root")
def test_a_host_path_that_is_a_link_on_the_host_is_the_mounted_file_system(tmp_path: Path) -> None:
    """A narrow DaemonSet: /proc and one directory, which the host reaches through a link to another disk."""
    if not os.path.ismount("/dev/shm"):
        pytest.skip("needs a tmpfs at /dev/shm")
    for place in ("proc", "var/lib/kubelet/pods"):
        (tmp_path / place).mkdir(parents=True)
    target = tmp_path / "var/lib/kubelet"
    if os.system(f"mount --bind /proc {tmp_path}/proc && mount --bind /dev/shm {target}") != 0:
        pytest.skip("this sandbox does not allow bind mounts")
    try:
        host = open_host(str(tmp_path))
        assert host.statvfs("/var/lib/kubelet").capacity == Host("/").statvfs("/dev/shm").capacity
    finally:
        assert os.system(f"umount -l {target} && umount -l {tmp_path}/proc") == 0


def test_a_recording_reads_file_systems_from_its_listing(tmp_path: Path) -> None:
    disk, images = TreeDisk(available=7 << 30), TreeDisk(available=3 << 30, device=(259, 2))
    host = open_host(write_node(tmp_path, Node(nodefs=disk, imagefs=images)))
    assert isinstance(host, RecordedHost)
    assert host.statvfs("/var/lib/kubelet").available == 7 << 30
    (tmp_path / "var/lib/containerd/some/where").mkdir(parents=True)
    assert host.statvfs("/var/lib/containerd/some/where").available == 3 << 30
    assert host.device("/var/lib/kubelet") != host.device("/var/lib/containerd")


def test_a_recording_does_not_guess_a_file_system_that_it_lacks(tmp_path: Path) -> None:
    host = open_host(write_node(tmp_path, Node()))
    with (tmp_path / "proc/1/mountinfo").open("a") as file:
        file.write("99 1 8:1 / /data rw - xfs /dev/sda1 rw\n")
    (tmp_path / "data/images").mkdir(parents=True)
    with pytest.raises(Unreadable, match="lacks its file system"):
        host.statvfs("/data/images")


def test_a_damaged_recording_is_an_error_not_a_live_host(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node())
    (tmp_path / "listing/capture.json").write_text("{")
    with pytest.raises(Unreadable, match="not a valid recording"):
        open_host(root)


def test_a_root_that_is_no_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="not a directory"):
        open_host(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("stalled", range(3))
def test_a_preemption_between_two_clock_readings_is_not_a_suspend(stalled: int) -> None:
    """The process does not run for a second right before the reading with that number."""
    slept_s, stalls = 300.0, {stalled}
    now = 1000.0
    reading = 0

    def clock_gettime(clock: int) -> float:
        nonlocal now, reading
        now += 1.0 if reading in stalls else 50e-9
        reading += 1
        return now if clock == time.CLOCK_BOOTTIME else now - slept_s

    boottime, suspended_s = Host("/", clock_gettime=clock_gettime).clocks()
    assert suspended_s == pytest.approx(slept_s, abs=0.001)
    assert boottime == pytest.approx(now, abs=0.001)


def test_a_process_that_is_often_preempted_takes_the_clock_readings_that_are_closest() -> None:
    apart = iter([0.0, 0.5, 0.5, 0.0, 0.01, 0.01, *[0.3] * 9])
    now = 1000.0

    def clock_gettime(clock: int) -> float:
        nonlocal now
        now += next(apart)
        return now if clock == time.CLOCK_BOOTTIME else now - 300.0

    assert Host("/", clock_gettime=clock_gettime).clocks().suspended_s == pytest.approx(300.0, abs=0.02)

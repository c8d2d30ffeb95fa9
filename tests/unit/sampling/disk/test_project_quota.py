"""Which quotas may be used as the usage of a pod. tests/vm/test_quota.py reads real quotas."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from nodeagent.sampling.disk.pod_paths import Kind, PodPath
from nodeagent.sampling.disk.project_quota import all_confined, quota_devices, read_quotas
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.hostfs.mounts import parse_mounts
from tests.support.disk_trees import EMPTY_DIR, live_meter, node, pod
from tests.support.mounts import ext4, root_only

HOSTS = "         0          0 4294967295\n"
OWN = "         0     131072      65536\n"


@pytest.mark.parametrize(
    ("maps", "confined"),
    [
        ([OWN], True),
        ([OWN, OWN + "     65536     200000       1000\n"], True),
        ([OWN, None], True),
        ([OWN, HOSTS], False),
        ([HOSTS], False),
        ([""], False),
        ([None], False),
        ([], False),
        ([OWN] * 513, False),
    ],
    ids=[
        "one", "two ranges", "one has ended", "one of the host's", "the host's", "no map yet", "all have ended",
        "no process", "too many processes",
    ],
)  # fmt: skip
def test_a_pod_is_confined_if_all_its_processes_are_in_a_user_namespace_of_its_own(
    tmp_path: Path, maps: list[str | None], confined: bool
) -> None:
    for pid, text in enumerate(maps, start=1):
        if text is not None:
            (tmp_path / f"proc/{pid}").mkdir(parents=True)
            (tmp_path / f"proc/{pid}/uid_map").write_text(text)
    assert all_confined(Host(str(tmp_path)), list(range(1, len(maps) + 1))) is confined


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare")
def test_the_kernel_shows_which_processes_are_in_the_hosts_user_namespace() -> None:
    process = subprocess.Popen(
        ["unshare", "--user", "--map-root-user", "sh", "-c", "echo up; read _"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        if process.stdout.readline() != "up\n":
            pytest.skip("user namespaces are not allowed here")
        host = Host("/")
        try:
            assert all_confined(host, [process.pid])
            assert not all_confined(host, [process.pid, os.getpid()])
        finally:
            process.kill()


def test_only_file_systems_mounted_with_project_quotas_are_read() -> None:
    table = b"""\
1 0 8:1 / / rw - ext4 /dev/sda1 rw,errors=remount-ro
2 1 8:2 / /a rw - xfs /dev/sda2 rw,attr2,inode64,prjquota
3 1 8:3 / /b rw - xfs /dev/sda3 rw,pqnoenforce
4 1 8:4 / /c rw - ext4 /dev/sda4 rw,usrquota,grpquota
5 1 8:5 / /prjquota rw - ext4 /dev/sda5 rw,prjquota
"""
    assert quota_devices(parse_mounts(table)) == {os.makedev(8, 2), os.makedev(8, 3), os.makedev(8, 5)}


@root_only
def test_a_file_system_whose_quota_cannot_be_read_is_walked(tmp_path: Path) -> None:
    with ext4(tmp_path, options="loop") as path:
        node(path)
        volume = path / f"var/lib/kubelet/pods/u1/{EMPTY_DIR}/v"
        volume.mkdir(parents=True)
        (volume / "file").write_bytes(b"x" * 9000)
        meter = live_meter(path)
        found = meter.measure([pod("u1")], until=time.monotonic() + 30)
        assert found["u1"].disk.volumes_inodes == 2
        assert meter.progress.entries > 0
        where = PodPath("u1", Kind.VOLUME, "v", str(volume.parent), ("v",))
        device = os.stat(volume).st_dev
        assert read_quotas(Host("/"), [where], devices=frozenset({device}), confined=lambda _uid: True) == {}

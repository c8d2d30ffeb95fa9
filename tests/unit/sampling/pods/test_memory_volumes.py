"""Memory-backed emptyDirs, from real tmpfs mounts and from mount tables."""

import os
import subprocess
from pathlib import Path

import pytest

from nodeagent.model import MemoryVolume
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.pods import memory_volumes

KUBELET = "/var/lib/kubelet"
UID = "1f0e2d3c-4b5a-4678-9abc-def012345678"
MIB = 1 << 20


def mounted(root: Path, *lines: tuple[str, str]) -> Host:
    """A host with these mounts (fstype, path)."""
    (root / "proc/1").mkdir(parents=True)
    (root / "proc/self").mkdir()
    table = "".join(f"{n} 1 0:{n} / {path} rw - {fstype} x rw\n" for n, (fstype, path) in enumerate(lines, start=50))
    for directory in ("1", "self"):
        (root / f"proc/{directory}/mountinfo").write_text(table)
    return Host(str(root))


def volume(name: str, plugin: str = "kubernetes.io~empty-dir") -> str:
    return f"{KUBELET}/pods/{UID}/volumes/{plugin}/{name}"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a tmpfs")
def test_a_real_volume_has_its_name_and_what_it_holds(tmp_path: Path) -> None:
    point = tmp_path / volume("cache").lstrip("/")
    point.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(point)], check=False).returncode:
        pytest.skip("needs a tmpfs mount, which this machine refuses")
    try:
        (point / "file").write_bytes(b"x" * 3 * MIB)
        host = mounted(tmp_path, ("tmpfs", volume("cache")))
        assert memory_volumes.read_memory_volumes(host, KUBELET) == (MemoryVolume(UID, "cache", 3 * MIB),)
    finally:
        subprocess.run(["umount", str(point)], check=True)


def test_only_tmpfs_mounts_of_empty_dirs_are_volumes_in_memory(tmp_path: Path) -> None:
    host = mounted(
        tmp_path,
        ("tmpfs", volume("gone")),
        ("ext4", volume("disk")),
        ("tmpfs", volume("token", "kubernetes.io~projected")),
        ("tmpfs", volume("cache") + "/below"),
        ("tmpfs", "/elsewhere" + volume("cache").removeprefix(KUBELET)),
    )
    assert memory_volumes.read_memory_volumes(host, KUBELET) == (MemoryVolume(UID, "gone", None),)


def test_without_a_mount_table_there_are_none(tmp_path: Path) -> None:
    assert memory_volumes.read_memory_volumes(Host(str(tmp_path)), KUBELET) == ()

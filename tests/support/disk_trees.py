"""Directory trees of pods for the disk tests, and the calls that measure them."""

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nodeagent.model import ContainerUsage, PodUsage, QOSClass
from nodeagent.sampling.disk import walk_cache
from nodeagent.sampling.disk.attribution import PodDiskMeter
from nodeagent.sampling.disk.deleted_files import DeletedFiles, DeletedScan, Target
from nodeagent.sampling.disk.pod_disk import PodDisk
from nodeagent.sampling.disk.walk import CountMode, TreeUsage, TreeWalk
from nodeagent.sampling.disk.walk_cache import MAX_CACHE_BYTES, WalkCache
from nodeagent.sampling.hostfs.host import Host

EMPTY_DIR: Final = "volumes/kubernetes.io~empty-dir"
ID: Final = "1" * 64
SETTLED_S: Final = 0.02
"""For the walks of the tests."""


def pod(uid: str, *containers: tuple[str, str]) -> PodUsage:
    """`containers`: (id, name)."""
    return PodUsage(
        uid, QOSClass.BURSTABLE, f"/kubepods/pod{uid}", 1.0,
        containers=tuple(ContainerUsage(identity, name, None, None) for identity, name in containers),
    )  # fmt: skip


def node(top: Path) -> Path:
    """The directories of a node without pods."""
    for name in ("var/lib/kubelet/pods", "var/log/pods", "proc/1"):
        (top / name).mkdir(parents=True)
    (top / "proc/1/mountinfo").write_text("")
    return top


def meter(top: Path) -> PodDiskMeter:
    return PodDiskMeter(Host(str(top)), kubelet_dir="/var/lib/kubelet", pod_logs_dir="/var/log/pods")


def live_meter(top: Path) -> PodDiskMeter:
    """The same tree as part of this machine, so that its mounts are in the real mount table."""
    return PodDiskMeter(Host("/"), kubelet_dir=f"{top}/var/lib/kubelet", pod_logs_dir=f"{top}/var/log/pods")


def measure(top: Path, *pods: PodUsage, timeout_s: float = 60.0) -> dict[str, PodDisk]:
    pod_meter = meter(top)
    try:
        return pod_meter.measure(pods, until=time.monotonic() + timeout_s)
    finally:
        pod_meter.close()


def scan_deleted(pids: Sequence[int], devices: frozenset[int]) -> DeletedFiles:
    """The deleted files of one pod with these processes."""
    target = Target("u1", lambda: (pids, True), frozenset(), devices)
    return DeletedScan(Host("/")).scan([target], until=time.monotonic() + 60)["u1"]


def walk(
    path: Path,
    *,
    count: CountMode = CountMode.BYTES_AND_INODES,
    previous: WalkCache | None = None,
    unwritten: bool = False,
) -> tuple[TreeUsage, WalkCache | None]:
    """One walk to the end of the tree."""
    with TreeWalk(
        os.open(path, os.O_RDONLY | os.O_DIRECTORY),
        count=count,
        previous=previous,
        unwritten=unwritten,
        cache_bytes=MAX_CACHE_BYTES,
        settled_s=SETTLED_S,
    ) as tree_walk:
        assert tree_walk.step()
        return tree_walk.usage, tree_walk.cache


def du(path: Path) -> tuple[int, int]:
    """(bytes, inodes) of GNU du."""
    blocks = subprocess.run(["du", "-sx", "--block-size=512", path], check=True, capture_output=True).stdout
    inodes = subprocess.run(["du", "-sx", "--inodes", path], check=True, capture_output=True).stdout
    return int(blocks.split()[0]) * 512, int(inodes.split()[0])


def until_settled(path: Path) -> None:
    """Wait until a directory may be cached."""
    while time.time() < os.stat(path).st_ctime + walk_cache.SETTLED_S + 0.1:
        os.sched_yield()

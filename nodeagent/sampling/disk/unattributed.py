"""Measures what a file system holds outside of pods, and lists its largest host directories.

A futile decision reports where the space is instead. The walk over the host's directories runs until a deadline, so it
belongs in a worker.
"""

import os
import time
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from nodeagent.model import HostDirectory, Signal, UnattributedDisk
from nodeagent.sampling.disk.pod_disk import DiskAmount, PodDisk
from nodeagent.sampling.disk.pod_paths import Part, PodPart
from nodeagent.sampling.disk.walk import TreeWalk
from nodeagent.sampling.hostfs.host import Host, Unreadable
from nodeagent.sampling.hostfs.mounts import Mount


class PodDirectories(NamedTuple):
    """The host directories that contain the pods' files."""

    kubelet: str
    logs: str
    layers: str
    """The store of the container runtime; empty if there is none."""


_OPENED: Final = ("/", "/var", "/var/lib", "/var/log")
"""Directories of which the subdirectories are listed instead, because most of a node's files are below them."""
_MOUNT_POINTS: Final = 1
"""Mount points of one file system that are walked; a second one has the same content."""
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NOT_WALKED: Final = frozenset({"/proc", "/sys", "/dev", "/run"})


def measure_unattributed(
    host: Host,
    path: str,
    *,
    attributed: Sequence[PodDisk],
    directories: PodDirectories,
    until: float,
    signals: tuple[Signal, ...] = (),
    limit: int = 8,
) -> UnattributedDisk:
    """What the file system of `path` holds outside of these pods, and its `limit` largest host directories among those
    walked until time.monotonic() `until`. `signals` are copied to the result. Raises Unreadable."""
    used = read_used_space(host, path)
    present = directories_on(host, directories, used)
    in_pods = [part for part in _in_directories(attributed, directories) if part[0] in present]
    amounts = [amount for pod in attributed for amount in parts_on(pod, directories, present).values()]
    found = walk_directories(host, used.device, until=until)
    outside = [_without_pods(directory, in_pods) for directory in found]
    return UnattributedDisk(
        signals=signals,
        used_bytes=used.bytes,
        attributed_bytes=sum(amount.bytes for amount in amounts),
        used_inodes=used.inodes,
        attributed_inodes=sum(amount.inodes for amount in amounts),
        largest=tuple(sorted(outside, key=lambda directory: -directory.bytes)[:limit]),
        read_at=used.read_at,
    )


class UsedSpace(NamedTuple):
    """The used bytes and inodes of a file system."""

    bytes: int
    inodes: int
    device: int
    """st_dev."""
    file_system: int | None
    """`file_system_of` its path."""
    read_at: float


def read_used_space(host: Host, path: str) -> UsedSpace:
    """The used space of the file system of `path`. Raises Unreadable."""
    read_at = host.boottime()
    file_system = file_system_of(host, path)
    fd = host.open(path)
    try:
        numbers = os.fstatvfs(fd)
        device = os.fstat(fd).st_dev
    except OSError as error:
        raise Unreadable(path, error.errno or 0, error.strerror or str(error)) from error
    finally:
        os.close(fd)
    used = (numbers.f_blocks - numbers.f_bfree) * numbers.f_frsize
    return UsedSpace(used, numbers.f_files - numbers.f_ffree, device, file_system, read_at)


def directories_on(host: Host, directories: PodDirectories, used: UsedSpace) -> frozenset[str]:
    """The directories that are on this file system."""
    return frozenset(path for path in directories if file_system_of(host, path) == used.file_system)


def file_system_of(host: Host, path: str) -> int | None:
    """The device of the mount, which on btrfs is the same for all subvolumes; st_dev if the mount is not known. None
    for no path and one that is missing."""
    if not path:
        return None
    try:
        return host.device(path)
    except Unreadable:
        return _device(host, path)


def parts_on(pod: PodDisk, directories: PodDirectories, present: frozenset[str]) -> dict[PodPart, DiskAmount]:
    """What each part of a pod holds in the directories that are `present` on a file system."""
    volumes, logs, layers = _in_directories([pod], directories)
    deleted_volumes = (directories.kubelet, *pod.deleted_volumes)
    deleted_layers = (directories.layers, *pod.deleted_layers)

    def total(*parts: tuple[str, int, int]) -> DiskAmount:
        found = [(size, inodes) for path, size, inodes in parts if path in present]
        return DiskAmount(sum(size for size, _ in found), sum(inodes for _, inodes in found))

    return {
        PodPart(pod.uid, Part.VOLUMES): total(volumes),
        PodPart(pod.uid, Part.CONTAINERS): total(logs, layers),
        PodPart(pod.uid, Part.DELETED): total(deleted_volumes, deleted_layers),
    }


def _in_directories(pods: Sequence[PodDisk], directories: PodDirectories) -> list[tuple[str, int, int]]:
    """(directory, bytes, inodes) for each of the directories: what the pods hold in it."""
    disks = [pod.disk for pod in pods]
    return [
        (
            directories.kubelet,
            sum(disk.volumes_bytes or 0 for disk in disks) + sum(pod.other_bytes for pod in pods),
            sum(disk.volumes_inodes or 0 for disk in disks) + sum(pod.other_inodes for pod in pods),
        ),
        (
            directories.logs,
            sum(disk.logs_bytes or 0 for disk in disks),
            sum(disk.logs_inodes or 0 for disk in disks),
        ),
        (
            directories.layers,
            sum((disk.rootfs_bytes or 0) + (disk.ended_layer_bytes or 0) for disk in disks),
            sum((disk.rootfs_inodes or 0) + (disk.ended_layer_inodes or 0) for disk in disks),
        ),
    ]


def _device(host: Host, path: str) -> int | None:
    """st_dev, without a look at the mount table."""
    try:
        return os.stat(host.real(host.resolve(path))).st_dev
    except (OSError, Unreadable):
        return None  # a missing directory is on no device


def _without_pods(directory: HostDirectory, in_pods: Iterable[tuple[str, int, int]]) -> HostDirectory:
    """The directory minus what pods hold in it."""
    size, inodes = directory.bytes, directory.inodes
    for path, pod_bytes, pod_inodes in in_pods:
        if path == directory.path or path.startswith(f"{directory.path}/"):
            size, inodes = size - pod_bytes, inodes - pod_inodes
    return directory._replace(bytes=max(0, size), inodes=max(0, inodes))


def walk_directories(host: Host, device: int, *, until: float) -> list[HostDirectory]:
    """Host directories on this device (st_dev) with their usage. At time.monotonic() `until` the walk stops: further
    directories are missing, and the last one is a lower bound.

    The list contains the directories one level below those of `_OPENED` and below the file system's mount point, the
    likeliest first. A mount point of another file system is not touched: its server may be dead.
    """
    try:
        mounts = host.mounts()
    except Unreadable:
        mounts = []
    opened = dict.fromkeys([*_own_mount_points(host, device, mounts), *reversed(_OPENED)])
    skipped = {*opened, *_NOT_WALKED, *(mount.point for mount in mounts if not _may_be(mount, device))}
    found: list[HostDirectory] = []
    for top in opened:
        try:
            names = [name for name, _ in host.subdirectories(top)]
            above = host.open(top)
        except Unreadable:
            continue
        try:
            for name in sorted(names):
                path = os.path.join(top, name)
                if time.monotonic() >= until:
                    return found
                if path not in skipped and (directory := _walk_directory(above, name, path, device, until)) is not None:
                    found.append(directory)
        finally:
            os.close(above)
    return found


def _walk_directory(above: int, name: str, path: str, device: int, until: float) -> HostDirectory | None:
    """The usage of a directory; None if it is gone or on another device."""
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=above)
    except OSError:
        return None  # removed, or replaced by a link
    if os.fstat(fd).st_dev != device:
        os.close(fd)
        return None
    with TreeWalk(fd) as walk:
        walk.step(until=until)
        usage = walk.usage
    return HostDirectory(path, usage.bytes or 0, usage.inodes, usage.complete)


def _own_mount_points(host: Host, device: int, mounts: Iterable[Mount]) -> list[str]:
    """Where the root of this file system is mounted. Bind mounts of its subdirectories are skipped."""
    points = [mount.point for mount in mounts if mount.root == "/" and _may_be(mount, device)]
    return [point for point in points if point not in _OPENED and _device(host, point) == device][:_MOUNT_POINTS]


def _may_be(mount: Mount, device: int) -> bool:
    """True if this may be a mount of the file system with this st_dev. A btrfs has a different st_dev for each
    subvolume, and none of them is in the mount table."""
    return mount.device == device or mount.fstype == "btrfs"

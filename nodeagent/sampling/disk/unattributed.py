"""What of a file system is in no pod, and in which host directories it is.

A futile decision has to say where the space is instead. This walks the host's larger directories on that file system
until a deadline, so it belongs into a worker.
"""

import os
import time
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from nodeagent.model import HostDirectory, Signal, UnattributedDisk
from nodeagent.sampling.disk.attribution import Held, PodDisk
from nodeagent.sampling.disk.pod_paths import Part, PodPart
from nodeagent.sampling.disk.walk import TreeWalk
from nodeagent.sampling.hostfs.host import Host, Unreadable
from nodeagent.sampling.hostfs.mounts import Mount


class PodDirectories(NamedTuple):
    """Where on the host the pods' files are."""

    kubelet: str
    logs: str
    layers: str
    """The runtime's store; empty when there is none."""


# Directories that are looked into one level deeper, because everything is in them.
_OPENED: Final = ("/", "/var", "/var/lib", "/var/log")
# Mount points of one file system that are looked into; a second one has the same content.
_MOUNT_POINTS: Final = 1
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NOT_WALKED: Final = frozenset({"/proc", "/sys", "/dev", "/run"})


def unattributed(
    host: Host,
    path: str,
    *,
    attributed: Sequence[PodDisk],
    directories: PodDirectories,
    until: float,
    signals: tuple[Signal, ...] = (),
    show: int = 8,
) -> UnattributedDisk:
    """What the file system that holds `path` uses beside these pods, and its largest host directories as far as they
    could be walked until time.monotonic() `until`. `signals` are only passed on. Raises Unreadable."""
    used = read_used(host, path)
    here = directories_on(host, directories, used.device)
    named = [part for part in _held(attributed, directories) if part[0] in here]
    held = [held_there(pod, directories, here) for pod in attributed]
    return UnattributedDisk(
        signals=signals,
        used_bytes=used.bytes,
        attributed_bytes=sum(part.bytes for part in held),
        used_inodes=used.inodes,
        attributed_inodes=sum(part.inodes for part in held),
        largest=tuple(
            sorted(
                (_less(directory, named) for directory in walk_directories(host, used.device, until=until)),
                key=lambda directory: -directory.bytes,
            )[:show]
        ),
        read_at=used.read_at,
    )


class Used(NamedTuple):
    """What a file system holds."""

    bytes: int
    inodes: int
    device: int
    """st_dev."""
    read_at: float


def read_used(host: Host, path: str) -> Used:
    """Of the file system that holds `path`. Raises Unreadable."""
    read_at = host.boottime()
    fd = host.open(path)
    try:
        numbers = os.fstatvfs(fd)
        device = os.fstat(fd).st_dev
    except OSError as error:
        raise Unreadable(path, error.errno or 0, error.strerror or str(error)) from error
    finally:
        os.close(fd)
    used = (numbers.f_blocks - numbers.f_bfree) * numbers.f_frsize
    return Used(used, numbers.f_files - numbers.f_ffree, device, read_at)


def directories_on(host: Host, directories: PodDirectories, device: int) -> frozenset[str]:
    """Those of the directories that are on this device (st_dev)."""
    return frozenset(path for path in directories if _device(host, path) == device)


def held_there(pod: PodDisk, directories: PodDirectories, here: frozenset[str]) -> Held:
    """What a pod holds in those of the directories that are `here`, deleted files included."""
    held = parts_there(pod, directories, here).values()
    return Held(sum(each.bytes for each in held), sum(each.inodes for each in held))


def parts_there(pod: PodDisk, directories: PodDirectories, here: frozenset[str]) -> dict[PodPart, Held]:
    """The same, by what of the pod it is."""
    volumes, logs, layers = _held([pod], directories)
    deleted_volumes = (directories.kubelet, *pod.deleted_volumes)
    deleted_layers = (directories.layers, *pod.deleted_layers)

    def total(*parts: tuple[str, int, int]) -> Held:
        found = [(size, inodes) for path, size, inodes in parts if path in here]
        return Held(sum(size for size, _ in found), sum(inodes for _, inodes in found))

    return {
        PodPart(pod.uid, Part.VOLUMES): total(volumes),
        PodPart(pod.uid, Part.CONTAINERS): total(logs, layers),
        PodPart(pod.uid, Part.DELETED): total(deleted_volumes, deleted_layers),
    }


def _held(pods: Sequence[PodDisk], directories: PodDirectories) -> list[tuple[str, int, int]]:
    """(directory, bytes, inodes) of what the pods hold there."""
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
            sum(disk.rootfs_bytes or 0 for disk in disks),
            sum(disk.rootfs_inodes or 0 for disk in disks),
        ),
    ]


def _device(host: Host, path: str) -> int | None:
    if not path:
        return None
    try:
        return os.stat(host.real(host.resolve(path))).st_dev
    except (OSError, Unreadable):
        return None  # not there, so nothing of it is on any device


def _less(directory: HostDirectory, held: Iterable[tuple[str, int, int]]) -> HostDirectory:
    """Without what pods hold in it."""
    size, inodes = directory.bytes, directory.inodes
    for path, bytes_, inodes_ in held:
        if path == directory.path or path.startswith(f"{directory.path}/"):
            size, inodes = size - bytes_, inodes - inodes_
    return directory._replace(bytes=max(0, size), inodes=max(0, inodes))


def walk_directories(host: Host, device: int, *, until: float) -> list[HostDirectory]:
    """Host directories on this device (st_dev), with all that is in them; those that time.monotonic() `until` left no
    time for are missing, the one it cut short is a lower bound.

    They are directories one level below those of _OPENED and below the file system's own mount point, the most likely
    ones first. What another file system is mounted on is not touched: its server may be dead.
    """
    try:
        mounts = host.mounts()
    except Unreadable:
        mounts = []
    opened = dict.fromkeys([*_own_mount_points(host, device, mounts), *reversed(_OPENED)])
    avoided = {*opened, *_NOT_WALKED, *(mount.point for mount in mounts if not _may_be(mount, device))}
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
                if path not in avoided and (directory := _walked(above, name, path, device, until)) is not None:
                    found.append(directory)
        finally:
            os.close(above)
    return found


def _walked(above: int, name: str, path: str, device: int, until: float) -> HostDirectory | None:
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=above)
    except OSError:
        return None  # gone, or a link now
    if os.fstat(fd).st_dev != device:
        os.close(fd)
        return None
    with TreeWalk(fd) as walking:
        walking.step(until=until)
        tally = walking.tally
    return HostDirectory(path, tally.bytes or 0, tally.inodes, tally.complete)


def _own_mount_points(host: Host, device: int, mounts: Iterable[Mount]) -> list[str]:
    """Where the whole of this file system is mounted; bind mounts of parts of it are found through the whole."""
    mine = [mount.point for mount in mounts if mount.root == "/" and _may_be(mount, device)]
    return [point for point in mine if point not in _OPENED and _device(host, point) == device][:_MOUNT_POINTS]


def _may_be(mount: Mount, device: int) -> bool:
    """Whether this may be a mount of the file system with this st_dev. A btrfs has another st_dev for each subvolume,
    none of which is in the mount table."""
    return mount.device == device or mount.fstype == "btrfs"

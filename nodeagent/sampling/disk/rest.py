"""What of a file system is in no pod, and in which host directories it is.

A futile decision has to say where the space is instead. This walks the host's larger directories on that file system
until a deadline, so it belongs into a worker.
"""

import os
import stat
import time
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from nodeagent.model import DiskRest, HostDirectory, Signal
from nodeagent.sampling.disk.attribution import PodDisk
from nodeagent.sampling.disk.walk import Walk
from nodeagent.sampling.host import Host, Unreadable


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
) -> DiskRest:
    """What the file system that holds `path` uses beside these pods, and its largest host directories as far as they
    could be walked until time.monotonic() `until`. `signals` are only passed on. Raises Unreadable."""
    read_at = host.boottime()
    fd = host.open(path)
    try:
        numbers = os.fstatvfs(fd)
        device = os.fstat(fd).st_dev
    except OSError as error:
        raise Unreadable(path, error.errno or 0, error.strerror or str(error)) from error
    finally:
        os.close(fd)
    held = [part for part in _held(attributed, directories) if _device(host, part[0]) == device]
    return DiskRest(
        signals=signals,
        used_bytes=(numbers.f_blocks - numbers.f_bfree) * numbers.f_frsize,
        attributed_bytes=sum(size for _, size, _ in held),
        used_inodes=numbers.f_files - numbers.f_ffree,
        attributed_inodes=sum(inodes for _, _, inodes in held),
        largest=tuple(
            sorted(
                (_less(directory, held) for directory in walk_directories(host, device, until=until)),
                key=lambda directory: -directory.bytes,
            )[:show]
        ),
        read_at=read_at,
    )


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
    time for are missing, the one it cut short is a lower bound."""
    found = []
    for path in _candidates(host, device):
        if time.monotonic() >= until:
            break
        try:
            fd = host.open(path)
        except Unreadable:
            continue
        try:
            here = os.fstat(fd)
        except OSError:
            os.close(fd)
            continue
        if here.st_dev != device or not stat.S_ISDIR(here.st_mode):
            os.close(fd)
            continue
        with Walk(fd) as walking:
            walking.step(until=until)
            tally = walking.tally
        found.append(HostDirectory(path, tally.bytes or 0, tally.inodes, tally.complete))
    return found


def _candidates(host: Host, device: int) -> list[str]:
    """Directories one level below those of _OPENED and below the file system's own mount points, the most likely ones
    first."""
    opened = [*_mount_points(host, device), *reversed(_OPENED)]
    paths = []
    for top in dict.fromkeys(opened):
        try:
            names = [name for name, _ in host.subdirectories(top)]
        except Unreadable:
            continue
        paths += [os.path.join(top, name) for name in sorted(names)]
    return [path for path in paths if path not in opened and path not in _NOT_WALKED]


def _mount_points(host: Host, device: int) -> list[str]:
    """Where the whole of this file system is mounted; bind mounts of parts of it are found through the whole."""
    try:
        mounts = host.mounts()
    except Unreadable:
        return []
    mine = [mount.point for mount in mounts if mount.root == "/" and mount.point not in _OPENED]
    return [point for point in mine if _device(host, point) == device][:_MOUNT_POINTS]

"""What one pod holds on disk: adds up its paths and its deleted files, and writes the sums into its usage."""

import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from nodeagent.model import ContainerUsage, DiskUsage, DiskUsageQuality, PodUsage, VolumeUsage
from nodeagent.sampling.disk.deleted_files import DeletedFiles
from nodeagent.sampling.disk.path_usage import PathUsage
from nodeagent.sampling.disk.pod_paths import Kind, PodPath


class DiskAmount(NamedTuple):
    """Bytes and inodes."""

    bytes: int
    inodes: int


class PodDisk(NamedTuple):
    """What one pod holds on disk."""

    uid: str
    disk: DiskUsage
    containers: Mapping[str, DiskUsage]
    """Container id -> its layer."""
    logs: Mapping[str, DiskUsage]
    """Container name -> its logs."""
    volumes: tuple[VolumeUsage, ...]
    other_bytes: int
    """Files that the kubelet counts against the pod's limit, but not in its ranking: etc-hosts and the files directly
    in the pod's log directory."""
    other_inodes: int
    read_at: float
    """When the oldest of these numbers was read, CLOCK_BOOTTIME."""
    complete: bool
    """Every path was found and walked to its end. False: the sums are lower bounds."""
    unknown: tuple[str, ...]
    """What is missing or partial, each with its reason."""
    deleted: DeletedFiles | None = None
    """None if the open files of its processes were not read."""
    deleted_layers: DiskAmount = DiskAmount(0, 0)
    """Deleted files in layers that no other number includes."""
    deleted_volumes: DiskAmount = DiskAmount(0, 0)
    """Deleted files outside of layers that no other number includes."""
    periodic: bool = False
    """Measured by a periodic walk: some numbers may come from an earlier walk."""


def add_up(
    pod: PodUsage,
    paths: Iterable[PodPath],
    usages: Mapping[PodPath, PathUsage],
    *,
    unknown: Iterable[str],
    logs_on_nodefs: bool = True,
) -> PodDisk:
    """The sums over a pod's paths. `unknown` lists the paths that were not found; a path without usage is unknown."""
    reasons = list(unknown)
    read_at = time.clock_gettime(time.CLOCK_BOOTTIME)
    running = {container.container_id for container in pod.containers}
    layers: dict[str, DiskUsage] = {}
    ended: list[PathUsage] = []
    logs: dict[str, DiskUsage] = {}
    volumes: list[VolumeUsage] = []
    other_bytes = other_inodes = 0
    for path in paths:
        usage = usages.get(path) or PathUsage(read_at, None, None, "not read in time")
        if usage.reason:
            reasons.append(f"{path.kind.value} {path.name}: {usage.reason}")
        read_at = min(read_at, usage.read_at)
        if path.kind is Kind.LAYER and path.name not in running:
            ended.append(usage)
        elif path.kind is Kind.LAYER:
            layers[path.name] = DiskUsage(rootfs_bytes=usage.bytes, rootfs_inodes=usage.inodes)
        elif path.kind is Kind.LOGS:
            logs[path.name] = DiskUsage(logs_bytes=usage.bytes, logs_inodes=usage.inodes)
        elif path.kind in (Kind.VOLUME, Kind.MEMORY_VOLUME):
            volumes.append(VolumeUsage(path.name, usage.bytes, usage.inodes, path.kind is Kind.MEMORY_VOLUME))
        else:
            other_bytes += usage.bytes or 0
            other_inodes += usage.inodes or 0
    on_disk = [volume for volume in volumes if not volume.memory_backed]
    no_layer = len(layers) < len(pod.containers) and not layers
    disk = DiskUsage(
        rootfs_bytes=None if no_layer else _total(usage.rootfs_bytes for usage in layers.values()),
        rootfs_inodes=None if no_layer else _total(usage.rootfs_inodes for usage in layers.values()),
        logs_bytes=_total(usage.logs_bytes for usage in logs.values()),
        logs_inodes=_total(usage.logs_inodes for usage in logs.values()),
        volumes_bytes=_total(volume.used_bytes for volume in on_disk),
        volumes_inodes=_total(volume.used_inodes for volume in on_disk),
        ended_layer_bytes=_total(usage.bytes for usage in ended) if ended else None,
        ended_layer_inodes=_total(usage.inodes for usage in ended) if ended else None,
        logs_on_nodefs=logs_on_nodefs,
    )
    return PodDisk(
        pod.cgroup_uid, disk, layers, logs, tuple(volumes), other_bytes, other_inodes, read_at, not reasons,
        tuple(reasons),
    )  # fmt: skip


def with_deleted_files(disk: PodDisk, deleted: DeletedFiles, *, quota_kinds: frozenset[Kind]) -> PodDisk:
    """The same with its deleted files. `quota_kinds`: paths of these kinds were read from a project quota, which
    includes deleted files."""
    layers, volumes = DiskAmount(0, 0), DiskAmount(0, 0)
    if Kind.LAYER not in quota_kinds:
        layers = DiskAmount(deleted.layer_bytes, deleted.layer_files)
    if Kind.VOLUME not in quota_kinds:
        volumes = DiskAmount(deleted.bytes - deleted.layer_bytes, deleted.files - deleted.layer_files)
    return disk._replace(deleted=deleted, deleted_layers=layers, deleted_volumes=volumes)


def _total(parts: Iterable[int | None]) -> int | None:
    """The sum of the known parts; None if there are parts and all of them are unknown."""
    values = list(parts)
    known = [value for value in values if value is not None]
    return sum(known) if known or not values else None


def with_disk_usage(usage: PodUsage, measured: PodDisk | None) -> PodUsage:
    """The pod's usage with its measured disk; unchanged if nothing was measured."""
    if measured is None:
        return usage
    containers = tuple(_with_container_disk(container, measured) for container in usage.containers)
    disk = measured.disk._replace(other_bytes=measured.other_bytes, other_inodes=measured.other_inodes)
    # A scan that the kernel refused for every process has read nothing: unknown, not zero.
    deleted = measured.deleted
    deleted_known = deleted is not None and bool(deleted.bytes or deleted.complete)
    if deleted_known:
        disk = disk._replace(
            deleted_layer_bytes=measured.deleted_layers.bytes,
            deleted_layer_inodes=measured.deleted_layers.inodes,
            deleted_volume_bytes=measured.deleted_volumes.bytes,
            deleted_volume_inodes=measured.deleted_volumes.inodes,
        )
    quality = DiskUsageQuality(
        read_at=measured.read_at,
        complete=measured.complete,
        unknown=measured.unknown,
        deleted_bytes=deleted.bytes if deleted is not None and deleted_known else None,
        deleted_pid=deleted.pid if deleted is not None else None,
        periodic=measured.periodic,
    )
    return usage._replace(disk=disk, containers=containers, volumes=measured.volumes, disk_usage_quality=quality)


def _with_container_disk(container: ContainerUsage, measured: PodDisk) -> ContainerUsage:
    layer = measured.containers.get(container.container_id, DiskUsage())
    log = measured.logs.get(container.name or "", DiskUsage())
    return container._replace(
        disk=DiskUsage(
            rootfs_bytes=layer.rootfs_bytes,
            rootfs_inodes=layer.rootfs_inodes,
            logs_bytes=log.logs_bytes,
            logs_inodes=log.logs_inodes,
            volumes_bytes=0,
            volumes_inodes=0,
        )
    )

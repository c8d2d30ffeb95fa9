"""Pods over their own local-storage limits: emptyDir sizes, pod and container ephemeral storage.

Off unless `localStorageLimits` is on: a kubelet with local-storage isolation enforces them already. This module finds
the violations alone; `local_storage_eviction` applies protections and rate limits.
"""

import enum
from collections.abc import Iterable
from typing import Final, NamedTuple

from nodeagent.model import ContainerKind, ContainerUsage, DiskLayout, DiskUsage, Pod, PodUsage, PodView
from nodeagent.policy import messages, pod_usage, requests

MAX_USAGE_AGE_S: Final = 240.0
"""Older disk usage proves nothing: twice the age that a kubelet allows."""


class StorageLimit(enum.StrEnum):
    """The exceeded limit, by the names of the kubelet's metrics."""

    EMPTY_DIR = "emptydirfs.limit"
    POD = "ephemeralpodfs.limit"
    CONTAINER = "ephemeralcontainerfs.limit"


class Violation(NamedTuple):
    """A pod over one of its limits."""

    view: PodView
    limit: StorageLimit
    used: int
    """Measured bytes, a lower bound."""
    allowed: int
    message: str
    """The kubelet's eviction message."""


def violations(views: Iterable[PodView], *, layout: DiskLayout, at: float | None = None) -> tuple[Violation, ...]:
    """The first violation of each pod that has one. A pod without a measurement has none; with `at`, neither has a pod
    whose measurement is older than `MAX_USAGE_AGE_S` before that.

    Comparisons are strict. An unmeasured part counts as 0, so a violation is certain.
    """
    found = (
        _first(view, view.usage, layout)
        for view in views
        if view.usage is not None
        and (at is None or not pod_usage.disk_usage_expired(view.usage, at=at, max_age_s=MAX_USAGE_AGE_S))
    )
    return tuple(violation for violation in found if violation is not None)


def _first(view: PodView, usage: PodUsage, layout: DiskLayout) -> Violation | None:
    return _empty_dir(view, usage) or _whole_pod(view, usage) or _container(view, usage, layout)


def _empty_dir(view: PodView, usage: PodUsage) -> Violation | None:
    used_by = {volume.name: volume.used_bytes for volume in usage.volumes}
    for volume in view.pod.empty_dirs:
        used, limit = used_by.get(volume.name), volume.size_limit
        if used is not None and limit is not None and used > limit > 0:
            message = messages.empty_dir_over_limit(volume.name, limit=limit)
            return Violation(view, StorageLimit.EMPTY_DIR, used, limit, message)
    return None


def _whole_pod(view: PodView, usage: PodUsage) -> Violation | None:
    """The kubelet limits the pod to the sum of its containers' limits as soon as one of them has one, so that a limit
    on a small sidecar evicts the pod for what an unlimited container may use. Here the sum is a limit only if every
    container that keeps running has one."""
    limit = requests.ephemeral_storage_limit(view.pod)
    if limit is None or not _all_limited(view.pod):
        return None
    used = pod_ephemeral_storage(usage)
    if used is None or used <= limit:
        return None
    return Violation(view, StorageLimit.POD, used, limit, messages.pod_over_storage_limit(limit=limit))


def _container(view: PodView, usage: PodUsage, layout: DiskLayout) -> Violation | None:
    by_name = {each.name: each for each in usage.containers if each.name is not None}
    by_id = {each.container_id: each for each in usage.containers}
    for container in view.pod.containers:
        limit = container.limits.ephemeral_storage
        measured = by_name.get(container.name) or by_id.get(container.container_id)
        if container.kind is not ContainerKind.REGULAR or not limit or measured is None:
            continue
        used = _container_storage(measured, layout)
        if used is not None and used > limit:
            message = messages.container_over_storage_limit(container.name, limit=limit)
            return Violation(view, StorageLimit.CONTAINER, used, limit, message)
    return None


def pod_ephemeral_storage(usage: PodUsage) -> int | None:
    """Writable layers, logs, local volumes, etc-hosts and the pod's own log files, as far as measured; None if none of
    it is."""
    disk = usage.disk
    return _known_sum(disk.rootfs_bytes, disk.logs_bytes, disk.volumes_bytes, disk.other_bytes)


def _container_storage(usage: ContainerUsage, layout: DiskLayout) -> int | None:
    """Logs, and the writable layer unless it is on a dedicated imagefs."""
    disk: DiskUsage = usage.disk
    if layout is DiskLayout.DEDICATED_IMAGEFS:
        return disk.logs_bytes
    return _known_sum(disk.logs_bytes, disk.rootfs_bytes)


def _all_limited(pod: Pod) -> bool:
    return all(
        container.limits.ephemeral_storage is not None
        for container in pod.containers
        if container.kind is not ContainerKind.INIT
    )


def _known_sum(*parts: int | None) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if known else None

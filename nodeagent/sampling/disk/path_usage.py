"""What one path of a pod holds: converts a walk or a quota, and reads the paths that need no walk."""

import os
import stat
import time
from typing import Final, NamedTuple

from nodeagent.sampling.disk import pod_paths
from nodeagent.sampling.disk.pod_paths import Kind, PodPath
from nodeagent.sampling.disk.project_quota import Quota
from nodeagent.sampling.disk.walk import TreeUsage
from nodeagent.sampling.hostfs.host import Host, Unreadable

_MAX_LOG_FILES: Final = 10_000
"""Plain files that are read in one log directory. The kubelet keeps 5 for each container by default."""


class PathUsage(NamedTuple):
    """Bytes and inodes of one path."""

    read_at: float
    """When the oldest number was read, CLOCK_BOOTTIME."""
    bytes: int | None = 0
    """None if unknown, or if only inodes were counted."""
    inodes: int | None = 0
    reason: str = ""
    """Why the numbers are unknown or lower bounds."""


def from_walk(usage: TreeUsage) -> PathUsage:
    reason = ""
    if not usage.complete:
        reason = "walk not finished in time: a lower bound"
    elif usage.unknown:
        reason = f"{usage.unknown} parts unreadable: {usage.unknown_reason}"
    return PathUsage(usage.started_at, usage.bytes, usage.inodes, reason)


def from_quota(quota: Quota) -> PathUsage:
    return PathUsage(quota.read_at, quota.bytes, quota.inodes)


def from_error(error: OSError | Unreadable) -> PathUsage:
    """Zero if the path does not exist, unknown for every other error."""
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    if isinstance(error, FileNotFoundError):
        return PathUsage(now)
    return PathUsage(now, None, None, error.reason if isinstance(error, Unreadable) else error.strerror or str(error))


def read_path(host: Host, path: PodPath) -> PathUsage:
    """The usage of a path that needs no walk. Raises OSError and Unreadable."""
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    if path.kind is Kind.HOSTS:
        fd = pod_paths.open_path(host, path, parent=True)
        try:
            status = os.stat(path.below[-1], dir_fd=fd, follow_symlinks=False)
        finally:
            os.close(fd)
        return PathUsage(now, status.st_blocks * 512, 1) if stat.S_ISREG(status.st_mode) else PathUsage(now)
    fd = pod_paths.open_path(host, path)
    try:
        if path.kind is not Kind.MEMORY_VOLUME:
            return _plain_files(fd, now)
        numbers = os.fstatvfs(fd)
    finally:
        os.close(fd)
    used = (numbers.f_blocks - numbers.f_bfree) * numbers.f_frsize
    return PathUsage(now, used, numbers.f_files - numbers.f_ffree)


def _plain_files(fd: int, now: float) -> PathUsage:
    """The plain files directly in a directory. Each name counts, as in the kubelet's log statistics."""
    blocks = files = 0
    reason = ""
    with os.scandir(fd) as entries:
        for number, entry in enumerate(entries):
            if number >= _MAX_LOG_FILES:
                reason = f"more than {_MAX_LOG_FILES} log files: a lower bound"
                break
            if not entry.is_file(follow_symlinks=False):
                continue
            try:
                blocks += entry.stat(follow_symlinks=False).st_blocks
            except FileNotFoundError:
                continue  # rotated away
            files += 1
    return PathUsage(now, blocks * 512, files, reason)

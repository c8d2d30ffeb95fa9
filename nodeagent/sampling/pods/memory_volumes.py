"""The memory-backed emptyDir volumes of pods and what they hold, which counts as memory of the pod (shmem).

They are the tmpfs mounts below the kubelet's directory. `statvfs` of a tmpfs reads two numbers and never waits.
"""

import os
import re
from typing import Final

from nodeagent.model import MemoryVolume
from nodeagent.sampling.hostfs.host import Host, Unreadable

_EMPTY_DIR: Final = re.compile(r"/pods/([^/]+)/volumes/kubernetes\.io~empty-dir/([^/]+)")
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def read_memory_volumes(host: Host, kubelet_dir: str) -> tuple[MemoryVolume, ...]:
    """The volumes, the largest first. Never raises: without a mount table there are none."""
    try:
        kubelet, mounts = host.resolve(kubelet_dir), host.mounts()
    except Unreadable:
        return ()
    found = {}
    for mount in mounts:
        match = _EMPTY_DIR.fullmatch(mount.point.removeprefix(kubelet)) if mount.fstype == "tmpfs" else None
        if match is not None and mount.point.startswith(kubelet):
            used = _used_bytes(host, mount.point)
            found[mount.point] = MemoryVolume(match[1], match[2], used)
    return tuple(sorted(found.values(), key=lambda volume: (-(volume.used_bytes or 0), volume.pod_uid, volume.name)))


def _used_bytes(host: Host, path: str) -> int | None:
    """None if the volume is gone, or not visible in our mounts."""
    try:
        fd = os.open(host.real(host.resolve(path)), _OPEN)
    except (OSError, Unreadable):
        return None
    try:
        numbers = os.fstatvfs(fd)
    finally:
        os.close(fd)
    return (numbers.f_blocks - numbers.f_bfree) * numbers.f_frsize

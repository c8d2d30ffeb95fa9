"""Page cache: whether this host can reclaim that of pods, and the figure that tells when it was enough."""

import os
from typing import Final

from nodeagent.model import Signal
from nodeagent.sampling.hostfs.cgroups import Hierarchy, Kubepods
from nodeagent.sampling.hostfs.fd_cache import FdCache
from nodeagent.sampling.hostfs.host import Host, Unreadable
from nodeagent.sampling.node import memory
from nodeagent.sampling.node.memory import MemoryPaths

_FILE: Final = "memory.reclaim"
_GRANT: Final = "apply examples/daemonset-brake.yaml (DaemonSet) or systemd/drop-ins/brake.conf (unit)"


def reclaim_blocked(host: Host, hierarchy: Hierarchy, kubepods: Kubepods | None) -> str:
    """Why no page cache of pods can be reclaimed, and how to change that; empty if it can, or while there are no pods.
    Reads only: a write would reclaim."""
    if host.recorded or hierarchy.memory is None or kubepods is None:
        return ""
    if hierarchy.memory != hierarchy.unified:
        return f"{_FILE} needs cgroup v2, and the memory controller of this host is on v1"
    path = f"{hierarchy.memory}{kubepods.path}/{_FILE}"
    if not host.exists(path):
        return f"this kernel has no {_FILE}, which needs Linux 5.19"
    real = host.real(path)
    if os.access(real, os.W_OK):
        return ""
    try:
        read_only = bool(os.statvfs(real).f_flag & os.ST_RDONLY)
    except OSError as error:
        return f"{path}: {error.strerror}"
    if read_only:
        return f"cgroups are mounted read-only: {_GRANT}"
    return f"user {os.getuid()} may not write {path}"


def working_set_available(host: Host, paths: MemoryPaths, signal: Signal) -> int | None:
    """The memory signal by the working set, now; None if it cannot be read. Keeps nothing, so that any thread may call
    it."""
    files = FdCache(host, limit=0)
    try:
        limits, used = memory.read_limits(files, paths), memory.read_memory(files, paths)
    except Unreadable:
        return None
    total, working_set = (limits.total, used.root.value) if signal is Signal.MEMORY else (limits.pods, used.pods.value)
    return None if total is None or working_set is None else max(0, total - working_set)

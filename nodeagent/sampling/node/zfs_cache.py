"""The cache of ZFS (ARC), which the kernel's MemAvailable does not contain although ZFS drops it when memory is short.

Without it a node whose programs use half of its memory and ZFS the other half has nothing available, and pods would be
evicted for a cache.

The amount is what ZFS offers the kernel's reclaim (OpenZFS, module/os/linux/zfs/arc_os.c, `arc_evictable_memory`): the
clean buffers, and no more than what is above `c_min`. `zfs_arc_pc_percent`, by default 0, is not considered. ZFS gives
it back within some time: a ramp may be faster.
"""

from typing import Final

from nodeagent.sampling.hostfs import parse
from nodeagent.sampling.hostfs.host import Host, Unreadable

ARCSTATS: Final = "/proc/spl/kstat/zfs/arcstats"
_MEMINFO: Final = "/proc/meminfo"
_CLEAN: Final = tuple(
    [b"%b_evictable_%b" % (state, kind) for state in (b"mru", b"mfu") for kind in (b"data", b"metadata")]
)


def is_part_of_memory(host: Host) -> bool:
    """True if ZFS is loaded and its cache is in the memory of /proc/meminfo. In a container of LXCFS it is not: there
    /proc/meminfo shows the container's memory, and the cache is the host's."""
    try:
        return host.exists(ARCSTATS) and not any(mount.point == _MEMINFO for mount in host.mounts())
    except Unreadable:
        return False


def evictable(host: Host) -> int:
    """Bytes; 0 if the file is not readable or lacks a number."""
    try:
        lines = [line.split() for line in host.read(ARCSTATS).splitlines()]
    except Unreadable:
        return 0
    numbers = {line[0]: parse.parse_count(line[2]) for line in lines if len(line) == 3}
    size, least, *clean = [numbers.get(name) for name in (b"size", b"c_min", *_CLEAN)]
    known = [amount for amount in clean if amount is not None]
    if size is None or least is None or len(known) < len(clean):
        return 0
    return max(0, min(sum(known), size - least))

"""The swap devices of the node, and the memory that zram takes for what is swapped to it.

zram keeps compressed pages in memory that no cgroup and no page list contains (Documentation/admin-guide/blockdev/
zram.rst): the kubelet's figure does not see it, MemAvailable lacks it.
"""

import re
from typing import Final

from nodeagent.model import SwapDevice
from nodeagent.sampling.hostfs import parse
from nodeagent.sampling.hostfs.fd_cache import FdCache
from nodeagent.sampling.hostfs.host import Host, Unreadable

SWAPS: Final = "/proc/swaps"
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
_ZRAM: Final = re.compile(r"/zram([0-9]{1,6})$", re.ASCII)
_USED_MEMORY: Final = 2
"""Column of `mem_used_total` in mm_stat."""


def read_swaps(host: Host, files: FdCache) -> tuple[SwapDevice, ...]:
    """The swap devices in use, in the kernel's order; empty if they cannot be listed."""
    try:
        lines = files.read(SWAPS).splitlines()[1:]
    except Unreadable:
        return ()
    return tuple([device for line in lines if (device := _device(host, line)) is not None])


def _device(host: Host, line: bytes) -> SwapDevice | None:
    """A device of its line `path type size used priority`, sizes in KiB; None if the line is malformed. Spaces in the
    path are written in octal."""
    fields = line.split()
    if len(fields) < 4:
        return None
    path, kind = (field.decode("utf-8", "replace") for field in fields[:2])
    size, used = (parse.parse_count(field) for field in fields[2:4])
    if size is None or used is None:
        return None
    zram = _ZRAM.search(path)
    if zram is None:
        return SwapDevice(path, kind, size * 1024, used * 1024)
    return SwapDevice(path, "zram", size * 1024, used * 1024, _zram_memory(host, f"zram{zram[1]}"))


def _zram_memory(host: Host, name: str) -> int | None:
    """`mem_used_total` of a zram device: its compressed pages and the overhead of its allocator; None if unreadable."""
    fields = _read_mm_stat(host, name).split()
    return parse.parse_count(fields[_USED_MEMORY]) if len(fields) > _USED_MEMORY else None


def _read_mm_stat(host: Host, name: str) -> bytes:
    """Empty if unreadable. The DaemonSet mounts no /sys/block of the host. sysfs is not namespaced, so the own one
    shows the same devices, if both roots belong to one boot."""
    path = f"/sys/block/{name}/mm_stat"
    try:
        return host.read(path)
    except Unreadable:
        pass
    own = Host()
    try:
        return own.read(path) if not host.recorded and host.text(_BOOT_ID) == own.text(_BOOT_ID) else b""
    except Unreadable:
        return b""

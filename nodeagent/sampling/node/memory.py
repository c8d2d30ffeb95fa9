"""The node's memory: /proc/meminfo, the root cgroup's working set, and that of the pods.

The kubelet's figure of `memory.available` (KUBELET-CONTRACT, signals) is MemTotal minus the root cgroup's working set,
which includes neither kernel memory nor pre-allocated huge pages, but active page cache. The kernel's figure is
MemAvailable. The pods' cgroup has no MemAvailable: the kernel's figure of `allocatableMemory.available` is its limit
minus the usage without page cache and slab that reclaim can drop.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from nodeagent.model import HugePages, NodeMemory, SwapDevice
from nodeagent.model.units import MAX_PLAUSIBLE
from nodeagent.sampling.hostfs import parse
from nodeagent.sampling.hostfs.cgroup_memory import MemoryFiles, WorkingSet
from nodeagent.sampling.hostfs.cgroups import Hierarchy, Kubepods
from nodeagent.sampling.hostfs.fd_cache import FdCache
from nodeagent.sampling.hostfs.host import Host, Unreadable
from nodeagent.sampling.node import swap

MEMINFO: Final = "/proc/meminfo"
_HUGEPAGES: Final = "/sys/kernel/mm/hugepages"
_REQUIRED_FIELDS: Final = {
    "total": b"MemTotal",
    "free": b"MemFree",
    "buffers": b"Buffers",
    "cached": b"Cached",
    "anon": b"AnonPages",
    "shmem": b"Shmem",
    "dirty": b"Dirty",
    "slab_reclaimable": b"SReclaimable",
    "slab_unreclaimable": b"SUnreclaim",
    "kernel_stack": b"KernelStack",
    "page_tables": b"PageTables",
    "swap_total": b"SwapTotal",
    "swap_free": b"SwapFree",
}
_OPTIONAL_FIELDS: Final = (
    b"MemAvailable",
    b"Hugetlb",
    b"Hugepagesize",
    b"HugePages_Total",
    b"HugePages_Free",
    b"HugePages_Rsvd",
)
# The fields that a threshold or the pods need.
_LIMIT_FIELDS: Final = (b"MemTotal", b"MemAvailable", b"SwapTotal")
ALL_FIELDS: Final = (*_REQUIRED_FIELDS.values(), *_OPTIONAL_FIELDS)


class MemoryPaths(NamedTuple):
    """The memory files of one hierarchy, and the sources that their observations name."""

    files: MemoryFiles
    root_source: str
    root_reason: str
    """Why there is no `root`."""
    pods_source: str
    pods_cache_source: str
    """Of the figure without page cache."""
    pods_reason: str
    """Why there are no `pods`."""
    root: str = ""
    """Empty: there is no memory controller."""
    root_usage: str = ""
    """Empty on v2, whose root has no usage file: memory.stat contains all."""
    root_stat: str = ""
    pods: str = ""
    pods_usage: str = ""
    pods_stat: str = ""
    pods_limit: str = ""


def memory_paths(hierarchy: Hierarchy, kubepods: Kubepods | None, *, no_kubepods: str) -> MemoryPaths:
    """`no_kubepods` is why `kubepods` is None."""
    top, files = hierarchy.memory, hierarchy.memory_files
    without = MemoryPaths(files, MEMINFO, hierarchy.reason, "kubepods cgroup", "kubepods cgroup", no_kubepods)
    if top is None:
        return without
    root = without._replace(
        root=top,
        root_usage="" if top == hierarchy.unified else f"{top}/{files.usage}",
        root_stat=f"{top}/{files.stat}",
        root_source=f"{MEMINFO} MemTotal - working set of {top}",
    )
    if kubepods is None:
        return root
    pods = f"{top}{kubepods.path}"
    return root._replace(
        pods=pods,
        pods_usage=f"{pods}/{files.usage}",
        pods_stat=f"{pods}/{files.stat}",
        pods_limit=f"{pods}/{files.limit}",
        pods_source=f"{pods}: {files.limit} - working set",
        pods_cache_source=f"{pods}: {files.limit} - usage without page cache",
    )


class MemoryLimits(NamedTuple):
    """The limits, which rarely change, and MemAvailable, which is in the same file. None has its reason beside it."""

    total: int | None
    """MemTotal in bytes."""
    mem_available: int | None
    meminfo_reason: str
    pods: int | None
    pods_reason: str
    swap_total: int | None = None
    """0 on a node without swap."""
    zfs_cache: int = 0
    """Bytes that ZFS drops when memory is short, which MemAvailable does not contain."""


class MemoryReading(NamedTuple):
    """The used memory of one reading."""

    root: WorkingSet
    pods: WorkingSet
    pods_without_cache: WorkingSet
    """The usage of the pods without page cache and slab that reclaim can drop."""


def read_limits(files: FdCache, paths: MemoryPaths) -> MemoryLimits:
    """Never raises."""
    try:
        meminfo = parse_meminfo(files.read(MEMINFO), _LIMIT_FIELDS)
        reason = "" if b"MemTotal" in meminfo else f"{MEMINFO} has no MemTotal"
    except Unreadable as error:
        meminfo, reason = {}, str(error)
    limit, why = _pods_limit(files, paths)
    swap_total = meminfo.get(b"SwapTotal")
    return MemoryLimits(meminfo.get(b"MemTotal"), meminfo.get(b"MemAvailable"), reason, limit, why, swap_total)


def read_memory(files: FdCache, paths: MemoryPaths) -> MemoryReading:
    """Never raises."""
    return MemoryReading(_root(files, paths), *_pods(files, paths))


# --- /proc/meminfo ---------------------------------------------------------------------------------------------------


def parse_meminfo(data: bytes, keys: Sequence[bytes]) -> dict[bytes, int]:
    """Bytes (pages for the HugePages_ counts) of these fields; malformed or missing ones are left out. Searches in C
    instead of splitting 55 lines: 12 us instead of 45 for all fields that are used."""
    data = b"\n" + data
    found: dict[bytes, int] = {}
    for key in keys:
        start = data.find(b"\n" + key + b":")
        if start < 0:
            continue
        start += len(key) + 2
        end = data.find(b"\n", start)
        text = data[start : end if end >= 0 else len(data)]
        in_kilobytes = text.endswith(b" kB")
        value = parse.parse_count(text[:-3] if in_kilobytes else text)
        if value is not None:
            value = value * 1024 if in_kilobytes else value
            if value < MAX_PLAUSIBLE:
                found[key] = value
    return found


def read_node_memory(host: Host, files: FdCache) -> NodeMemory | None:
    """meminfo as the model's `NodeMemory`; None if it is not readable or lacks a required field."""
    try:
        meminfo = parse_meminfo(files.read(MEMINFO), ALL_FIELDS)
    except Unreadable:
        return None
    swaps = swap.read_swaps(host, files) if meminfo.get(b"SwapTotal") else ()
    return node_memory(meminfo, _other_hugepages(host, meminfo), swaps)


def node_memory(
    meminfo: dict[bytes, int], other_pools: tuple[HugePages, ...] = (), swaps: tuple[SwapDevice, ...] = ()
) -> NodeMemory | None:
    """meminfo as the model's `NodeMemory`; None if a required field is missing."""
    try:
        fields = {name: meminfo[key] for name, key in _REQUIRED_FIELDS.items()}
    except KeyError:
        return None
    return NodeMemory(
        **fields,
        mem_available=meminfo.get(b"MemAvailable"),
        hugepages=_default_hugepages(meminfo) + other_pools,
        hugetlb=meminfo.get(b"Hugetlb", 0),
        swaps=swaps,
    )


def _default_hugepages(meminfo: dict[bytes, int]) -> tuple[HugePages, ...]:
    """The pool of the default size; empty if it has no pages."""
    size, total = meminfo.get(b"Hugepagesize"), meminfo.get(b"HugePages_Total")
    free, reserved = meminfo.get(b"HugePages_Free"), meminfo.get(b"HugePages_Rsvd")
    if not size or not total or free is None or reserved is None:
        return ()
    return (HugePages(size, total, free, reserved),)


def _other_hugepages(host: Host, meminfo: dict[bytes, int]) -> tuple[HugePages, ...]:
    """Pools of other sizes. meminfo has only their sum in `Hugetlb`, so they are read if it exceeds the default
    pool."""
    size = meminfo.get(b"Hugepagesize", 0)
    if meminfo.get(b"Hugetlb", 0) <= size * meminfo.get(b"HugePages_Total", 0):
        return ()
    try:
        names = host.listdir(_HUGEPAGES)
    except Unreadable:
        return ()
    pools = []
    for name in sorted(names):
        kilobytes = parse.parse_count(
            name.removeprefix("hugepages-").removesuffix("kB").encode("utf-8", "surrogateescape")
        )
        if kilobytes is None or kilobytes * 1024 == size:
            continue
        numbers = [_number(host, f"{_HUGEPAGES}/{name}/{count}_hugepages") for count in ("nr", "free", "resv")]
        total, free, reserved = numbers
        if total and free is not None and reserved is not None:
            pools.append(HugePages(kilobytes * 1024, total, free, reserved))
    return tuple(pools)


def _number(host: Host, path: str) -> int | None:
    try:
        return parse.parse_count(host.read(path))
    except Unreadable:
        return None


# --- cgroups ---------------------------------------------------------------------------------------------------------


def _root(files: FdCache, paths: MemoryPaths) -> WorkingSet:
    if not paths.root:
        return WorkingSet(None, paths.root_reason)
    try:
        usage = files.read(paths.root_usage) if paths.root_usage else b""
        working_set = paths.files.root_working_set(usage, files.read(paths.root_stat))
    except Unreadable as error:
        return WorkingSet(None, str(error))
    return _located(working_set, paths.root)


def _pods(files: FdCache, paths: MemoryPaths) -> tuple[WorkingSet, WorkingSet]:
    """The working set, and the usage without page cache, of the same contents."""
    if not paths.pods:
        unknown = WorkingSet(None, paths.pods_reason)
        return unknown, unknown
    try:
        usage, stat = files.read(paths.pods_usage), files.read(paths.pods_stat)
    except Unreadable as error:
        unknown = WorkingSet(None, str(error))
        return unknown, unknown
    working_set, without_cache = paths.files.working_set(usage, stat), paths.files.without_page_cache(usage, stat)
    return _located(working_set, paths.pods), _located(without_cache, paths.pods)


def _located(used: WorkingSet, cgroup: str) -> WorkingSet:
    """With the cgroup in the reason, if there is one."""
    return used if used.value is not None else WorkingSet(None, f"{cgroup}: {used.reason}")


def _pods_limit(files: FdCache, paths: MemoryPaths) -> tuple[int | None, str]:
    """(the limit, "") or (None, why there is none)."""
    if not paths.pods:
        return None, paths.pods_reason
    try:
        text = files.read(paths.pods_limit)
    except Unreadable as error:
        return None, str(error)
    if not text.endswith(b"\n"):  # the first digits of a limit are a limit that the pods exceed
        return None, f"{paths.pods_limit} is incomplete"
    limit = parse.parse_count(text)
    if limit is not None:
        return limit, ""
    unlimited = text.strip() == b"max" or text.strip().isdigit()
    return None, f"{paths.pods} has no memory limit" if unlimited else f"{paths.pods_limit} is not a number"

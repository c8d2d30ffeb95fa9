"""The node's memory: /proc/meminfo, the root cgroup's working set, and the pods' share.

`memory.available` is the kubelet's number (KUBELET-CONTRACT, signals): MemTotal minus the root cgroup's working set,
which does not see kernel memory or pre-allocated huge pages. MemAvailable, the kernel's own estimate, is the other
model.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from nodeagent.model import HugePages, NodeMemory
from nodeagent.model.units import MAX_PLAUSIBLE
from nodeagent.sampling.hostfs import parse
from nodeagent.sampling.hostfs.cgroups import Hierarchy, Kubepods, MemoryFiles, WorkingSet
from nodeagent.sampling.hostfs.fd_cache import FdCache
from nodeagent.sampling.hostfs.host import Host, Unreadable

MEMINFO: Final = "/proc/meminfo"
_HUGEPAGES: Final = "/sys/kernel/mm/hugepages"
_FIELDS: Final = {
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
_OTHERS: Final = (
    b"MemAvailable",
    b"Hugetlb",
    b"Hugepagesize",
    b"HugePages_Total",
    b"HugePages_Free",
    b"HugePages_Rsvd",
)
_HOT: Final = (b"MemTotal", b"MemAvailable")
"""What a threshold needs."""
ALL_FIELDS: Final = (*_FIELDS.values(), *_OTHERS)


class MemoryPaths(NamedTuple):
    """The memory files of one hierarchy, and what the observations made of them name as their source."""

    files: MemoryFiles
    root_source: str
    root_reason: str
    """Why there is no `root`."""
    pods_source: str
    pods_reason: str
    """Why there are no `pods`."""
    root: str = ""
    """Empty: there is no memory controller."""
    root_usage: str = ""
    """Empty on v2, where the root has none: everything is in memory.stat."""
    root_stat: str = ""
    pods: str = ""
    pods_usage: str = ""
    pods_stat: str = ""
    pods_limit: str = ""


def paths(hierarchy: Hierarchy, kubepods: Kubepods | None, *, no_kubepods: str) -> MemoryPaths:
    """`no_kubepods` is why `kubepods` is None."""
    top, files = hierarchy.memory, hierarchy.memory_files
    nowhere = MemoryPaths(files, MEMINFO, hierarchy.reason, "kubepods cgroup", no_kubepods)
    if top is None:
        return nowhere
    root = nowhere._replace(
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
    )


class MemoryLimits(NamedTuple):
    """What rarely changes, and MemAvailable, which stands beside it. Each None has its reason beside it."""

    total: int | None
    """MemTotal in bytes."""
    mem_available: int | None
    meminfo_reason: str
    pods: int | None
    pods_reason: str


class MemoryReading(NamedTuple):
    """What one look gave."""

    root: WorkingSet
    pods: WorkingSet


def read_limits(kept: FdCache, paths: MemoryPaths) -> MemoryLimits:
    """Never raises."""
    try:
        meminfo = parse_meminfo(kept.read(MEMINFO), _HOT)
        reason = "" if b"MemTotal" in meminfo else f"{MEMINFO} has no MemTotal"
    except Unreadable as error:
        meminfo, reason = {}, str(error)
    limit, why = _pods_limit(kept, paths)
    return MemoryLimits(meminfo.get(b"MemTotal"), meminfo.get(b"MemAvailable"), reason, limit, why)


def read_memory(kept: FdCache, paths: MemoryPaths) -> MemoryReading:
    """Never raises."""
    return MemoryReading(_root(kept, paths), _pods(kept, paths))


# --- /proc/meminfo ---------------------------------------------------------------------------------------------------


def parse_meminfo(data: bytes, keys: Sequence[bytes]) -> dict[bytes, int]:
    """Field -> bytes (or pages, for the HugePages_ counts) of these fields; malformed or missing ones are left out.
    Looks for them in C instead of splitting 55 lines: 12 us for all that are used here against 45."""
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


def read_node(host: Host, kept: FdCache) -> NodeMemory | None:
    """The whole of meminfo as the model has it; None when it cannot be read or a field is missing."""
    try:
        meminfo = parse_meminfo(kept.read(MEMINFO), ALL_FIELDS)
    except Unreadable:
        return None
    return node_memory(meminfo, _other_hugepages(host, meminfo))


def node_memory(meminfo: dict[bytes, int], others: tuple[HugePages, ...] = ()) -> NodeMemory | None:
    """meminfo as the model has it; None unless every field is there."""
    try:
        fields = {name: meminfo[key] for name, key in _FIELDS.items()}
    except KeyError:
        return None
    return NodeMemory(
        **fields,
        mem_available=meminfo.get(b"MemAvailable"),
        hugepages=_default_hugepages(meminfo) + others,
        hugetlb=meminfo.get(b"Hugetlb", 0),
    )


def _default_hugepages(meminfo: dict[bytes, int]) -> tuple[HugePages, ...]:
    """The pool of the default size, if it has pages."""
    size, total = meminfo.get(b"Hugepagesize"), meminfo.get(b"HugePages_Total")
    free, reserved = meminfo.get(b"HugePages_Free"), meminfo.get(b"HugePages_Rsvd")
    if not size or not total or free is None or reserved is None:
        return ()
    return (HugePages(size, total, free, reserved),)


def _other_hugepages(host: Host, meminfo: dict[bytes, int]) -> tuple[HugePages, ...]:
    """Pools of other sizes, which meminfo only has in its sum `Hugetlb`; looked for when that sum is larger than the
    default pool."""
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
        numbers = [_number(host, f"{_HUGEPAGES}/{name}/{what}_hugepages") for what in ("nr", "free", "resv")]
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


def _root(kept: FdCache, paths: MemoryPaths) -> WorkingSet:
    if not paths.root:
        return WorkingSet(None, paths.root_reason)
    try:
        usage = kept.read(paths.root_usage) if paths.root_usage else b""
        found = paths.files.root_working_set(usage, kept.read(paths.root_stat))
    except Unreadable as error:
        return WorkingSet(None, str(error))
    return found if found.value is not None else WorkingSet(None, f"{paths.root}: {found.reason}")


def _pods(kept: FdCache, paths: MemoryPaths) -> WorkingSet:
    if not paths.pods:
        return WorkingSet(None, paths.pods_reason)
    try:
        found = paths.files.working_set(kept.read(paths.pods_usage), kept.read(paths.pods_stat))
    except Unreadable as error:
        return WorkingSet(None, str(error))
    return found if found.value is not None else WorkingSet(None, f"{paths.pods}: {found.reason}")


def _pods_limit(kept: FdCache, paths: MemoryPaths) -> tuple[int | None, str]:
    """(the limit, why there is none)."""
    if not paths.pods:
        return None, paths.pods_reason
    try:
        text = kept.read(paths.pods_limit)
    except Unreadable as error:
        return None, str(error)
    limit = parse.parse_count(text)
    if limit is not None:
        return limit, ""
    unlimited = text.strip() == b"max" or text.strip().isdigit()
    return None, f"{paths.pods} has no memory limit" if unlimited else f"{paths.pods_limit} is no number"

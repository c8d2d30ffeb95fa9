"""The memory of a cgroup, from its files in both cgroup versions.

`MemoryFiles` is the protocol of both versions; v1 numbers are the hierarchical ones (`total_...`).
"""

from typing import Final, NamedTuple, Protocol

from nodeagent.model.units import MAX_PLAUSIBLE
from nodeagent.sampling.hostfs import parse

_INACTIVE_V1: Final = parse.line_starts("total_inactive_file")
_NUMBERS_V1: Final = parse.line_starts(
    "total_inactive_file",
    "total_active_file",
    "total_rss",
    "total_swap",
    "total_cache",
    "total_swapcached",
    "total_unevictable",
    "total_shmem",
    "total_dirty",
    "total_writeback",
)
_RECLAIMABLE_V1: Final = parse.line_starts("total_active_file", "total_inactive_file", "total_dirty", "total_writeback")
_RECLAIMABLE_V2: Final = parse.line_starts(
    "active_file", "inactive_file", "file_dirty", "file_writeback", "slab_reclaimable"
)
_BEYOND_V1: Final = parse.line_starts(
    "total_rss", "total_cache", "total_unevictable", "total_active_file", "total_inactive_file", "total_shmem"
)
_BEYOND_V2: Final = parse.line_starts(
    "anon", "file", "unevictable", "active_file", "inactive_file", "shmem", "kernel", "slab_reclaimable", "sock"
)
_INACTIVE_V2: Final = parse.line_starts("inactive_file")
_ROOT_V2: Final = parse.line_starts("inactive_file", "anon", "file")
_NUMBERS_V2: Final = parse.line_starts(
    "inactive_file",
    "active_file",
    "swapcached",
    "anon",
    "kernel",
    "slab_reclaimable",
    "file",
    "unevictable",
    "sock",
    "shmem",
    "file_dirty",
    "file_writeback",
)
_KERNEL_V2: Final = parse.line_starts(
    "kernel_stack", "pagetables", "sec_pagetables", "percpu", "vmalloc", "slab_unreclaimable"
)
"""Before Linux 5.18, which brought `kernel`."""
_EVENTS_V2: Final = parse.line_starts("high", "max")


class WorkingSet(NamedTuple):
    """max(0, usage - inactive_file) in bytes, as the kubelet computes it, or another part of the usage; None has its
    reason in `reason`."""

    value: int | None
    reason: str = ""


class MemoryNumbers(NamedTuple):
    """Memory of one cgroup in bytes; None has its reason in `reason`."""

    usage: int | None
    working_set: int | None
    """max(0, usage - inactive_file), as the kubelet computes it."""
    unreclaimable: int | None
    """anon + shmem + file pages that are dirty or locked (mlock), and on v2 kernel memory that is not reclaimable. v1
    does not report which part of its kernel memory is, so it is left out: a predicted relief is rather too small."""
    reason: str = ""
    file_cache: int | None = None
    """File pages that reclaim can drop without loss; shmem and locked pages are on other lists. None on v1, which has
    no file for such a reclaim."""
    swap: int | None = None
    """Bytes in swap. None: not in memory.stat, which contains it on v1 alone, and there only with swap accounting."""
    swap_cached: int = 0
    """Bytes that are in swap and in memory, and count in both. 0 before Linux 5.13."""


class MemoryFiles(Protocol):
    """The memory files of one cgroup version."""

    usage: str
    """File with the usage, including page cache; the v2 root has none."""
    stat: str
    limit: str
    swap: str
    """File with the bytes in swap; empty on v1, whose memory.stat contains them."""
    protections: tuple[str, ...]
    """Files with the amounts that reclaim does not take; empty on v1, whose soft limit is none."""
    swap_limits: tuple[str, str]
    """Files with the limit of swap and what counts against it; on v1 both include memory."""
    reclaims: str
    """File with how often the kernel has reclaimed for a limit of the cgroup."""

    def numbers(self, usage: bytes, stat: bytes) -> MemoryNumbers:
        """The numbers in the contents of `usage` and `stat`."""

    def working_set(self, usage: bytes, stat: bytes) -> WorkingSet:
        """The working set alone, at a fifth of the cost."""

    def without_page_cache(self, usage: bytes, stat: bytes) -> WorkingSet:
        """The usage less the file pages that reclaim can drop (clean ones) and the reclaimable slab."""

    def beyond_reclaim(self, stat: bytes) -> int | None:
        """Bytes that reclaim cannot free at all, so that a limit below them ends in an OOM kill: anonymous and shared
        memory, locked pages and kernel memory. Dirty pages are written back and then freed. None: unknown."""

    def reclaim_count(self, data: bytes) -> int | None:
        """The number in the contents of `reclaims`."""

    def root_working_set(self, usage: bytes, stat: bytes) -> WorkingSet:
        """The same for the hierarchy's root, which is the whole node. `usage` is empty if there is no such file."""


class MemoryV1:
    """Files of the v1 memory controller (Documentation/admin-guide/cgroup-v1/memory.rst)."""

    usage: str = "memory.usage_in_bytes"
    stat: str = "memory.stat"
    limit: str = "memory.limit_in_bytes"
    swap: str = ""
    protections: tuple[str, ...] = ()
    swap_limits: tuple[str, str] = ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes")
    reclaims: str = "memory.failcnt"

    def numbers(self, usage: bytes, stat: bytes) -> MemoryNumbers:
        inactive, active, anon, swap, file, cached, locked, *rest = parse.parse_keyed(stat, _NUMBERS_V1)
        unreclaimable = None
        if anon is not None:
            unreclaimable = anon + _held_file(file, locked, [active, inactive, cached], *rest)
        names = (self.usage, "total_inactive_file", "total_rss")
        return _numbers(parse.parse_count(usage), inactive, unreclaimable, names, swap=swap)

    def working_set(self, usage: bytes, stat: bytes) -> WorkingSet:
        [inactive] = parse.parse_keyed(stat, _INACTIVE_V1)
        return _working_set(parse.parse_count(usage), inactive, self.usage, "total_inactive_file")

    def without_page_cache(self, usage: bytes, stat: bytes) -> WorkingSet:
        """Slab is not subtracted: memory.stat of v1 does not have it."""
        return _without_page_cache(parse.parse_count(usage), parse.parse_keyed(stat, _RECLAIMABLE_V1), self.usage)

    def beyond_reclaim(self, stat: bytes) -> int | None:
        """Without kernel memory, because v1 does not report which part of it is reclaimable."""
        anon, file, locked, active, inactive, shmem = parse.parse_keyed(stat, _BEYOND_V1)
        return None if anon is None else anon + _held_file(file, locked, [active, inactive], shmem, None, None)

    def reclaim_count(self, data: bytes) -> int | None:
        return parse.parse_count(data)

    def root_working_set(self, usage: bytes, stat: bytes) -> WorkingSet:
        return self.working_set(usage, stat)


class MemoryV2:
    """Files of the v2 memory controller (Documentation/admin-guide/cgroup-v2.rst)."""

    usage: str = "memory.current"
    stat: str = "memory.stat"
    limit: str = "memory.max"
    swap: str = "memory.swap.current"
    protections: tuple[str, ...] = ("memory.min", "memory.low")
    swap_limits: tuple[str, str] = ("memory.swap.max", "memory.swap.current")
    reclaims: str = "memory.events"

    def numbers(self, usage: bytes, stat: bytes) -> MemoryNumbers:
        found = parse.parse_keyed(stat, _NUMBERS_V2)
        inactive, active, cached, anon, kernel, reclaimable, file, locked, sock, *rest = found
        unreclaimable = None
        if anon is not None:
            fixed = _sum(parse.parse_keyed(stat, _KERNEL_V2)) if kernel is None else max(0, kernel - (reclaimable or 0))
            held = _held_file(file, locked, [active, inactive, cached], *rest)
            unreclaimable = anon + fixed + (sock or 0) + held
        file_cache = None
        if inactive is not None and active is not None:
            file_cache = max(0, inactive + active - _sum(rest[-2:]))  # dirty and writeback pages must be written first
        names = (self.usage, "inactive_file", "anon")
        numbers = _numbers(parse.parse_count(usage), inactive, unreclaimable, names, file_cache=file_cache)
        return numbers._replace(swap_cached=cached) if cached else numbers

    def working_set(self, usage: bytes, stat: bytes) -> WorkingSet:
        [inactive] = parse.parse_keyed(stat, _INACTIVE_V2)
        return _working_set(parse.parse_count(usage), inactive, self.usage, "inactive_file")

    def without_page_cache(self, usage: bytes, stat: bytes) -> WorkingSet:
        return _without_page_cache(parse.parse_count(usage), parse.parse_keyed(stat, _RECLAIMABLE_V2), self.usage)

    def beyond_reclaim(self, stat: bytes) -> int | None:
        anon, file, locked, active, inactive, shmem, kernel, slab, sock = parse.parse_keyed(stat, _BEYOND_V2)
        if anon is None:
            return None
        fixed = _sum(parse.parse_keyed(stat, _KERNEL_V2)) if kernel is None else max(0, kernel - (slab or 0))
        return anon + fixed + (sock or 0) + _held_file(file, locked, [active, inactive], shmem, None, None)

    def reclaim_count(self, data: bytes) -> int | None:
        """`high` and `max`: the usage went above memory.high, or would have gone above memory.max."""
        high, most = parse.parse_keyed(data, _EVENTS_V2)
        return None if high is None and most is None else (high or 0) + (most or 0)

    def root_working_set(self, usage: bytes, stat: bytes) -> WorkingSet:  # noqa: ARG002 - of the protocol
        """The root has no memory.current: the kubelet uses anon + file instead."""
        inactive, anon, file = parse.parse_keyed(stat, _ROOT_V2)
        used = None if anon is None or file is None else anon + file
        return _working_set(used, inactive, "anon + file of memory.stat", "inactive_file")


# One instance of each, so that a hierarchy that is detected again equals the first one.
V1: Final[MemoryFiles] = MemoryV1()
V2: Final[MemoryFiles] = MemoryV2()


def _sum(numbers: list[int | None]) -> int:
    """Older kernels lack some of the numbers."""
    return sum([number or 0 for number in numbers])


def _held_file(
    file: int | None,
    unevictable: int | None,
    on_lists: list[int | None],
    shmem: int | None,
    dirty: int | None,
    writeback: int | None,
) -> int:
    """File pages that reclaim cannot drop: shared memory, and dirty or locked ones.

    Locked pages are on no list of file pages, but on that of unevictable pages, as locked anonymous ones are. Some may
    be dirty as well, so the larger of both numbers counts.
    """
    unlisted = (file or 0) - (shmem or 0) - _sum(on_lists)
    locked = max(0, min(unevictable or 0, unlisted))
    return (shmem or 0) + max(locked, _sum([dirty, writeback]))


def _working_set(used: int | None, inactive: int | None, usage_name: str, inactive_name: str) -> WorkingSet:
    if used is not None and inactive is not None:
        return WorkingSet(max(0, used - inactive))
    return WorkingSet(None, _missing((usage_name, used), (inactive_name, inactive)))


def _without_page_cache(used: int | None, reclaimable: list[int | None], usage_name: str) -> WorkingSet:
    active, inactive, dirty, writeback, *slab = reclaimable
    if used is None or active is None or inactive is None:
        missing = _missing((usage_name, used), ("active_file", active), ("inactive_file", inactive))
        return WorkingSet(None, missing)
    clean = max(0, active + inactive - (dirty or 0) - (writeback or 0))
    return WorkingSet(max(0, used - clean - _sum(slab)))


def _numbers(
    used: int | None,
    inactive: int | None,
    unreclaimable: int | None,
    names: tuple[str, str, str],
    *,
    file_cache: int | None = None,
    swap: int | None = None,
) -> MemoryNumbers:
    """`names` are the sources of the three numbers, for the reason if one is missing."""
    working_set = None if used is None or inactive is None else max(0, used - inactive)
    reason = ""
    if working_set is None or unreclaimable is None:
        reason = _missing(*zip(names, (used, inactive, unreclaimable), strict=True))
    return MemoryNumbers(used, working_set, unreclaimable, reason, file_cache, swap)


def _missing(*parts: tuple[str, int | None]) -> str:
    return "; ".join([f"{name} is missing or not a number" for name, value in parts if value is None])


def parse_limit(data: bytes) -> int | None:
    """Bytes; None if unlimited (`max`, or on v1 a number above 2^62) or not a number."""
    return parse.parse_count(data)


def parse_protection(data: bytes) -> int | None:
    """The bytes of memory.min or memory.low, `MAX_PLAUSIBLE` for `max`; None if it is not a number."""
    return MAX_PLAUSIBLE if data.strip() == b"max" else parse.parse_count(data)

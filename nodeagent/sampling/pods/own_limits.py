"""What the pods of `ownLimit` use of their own memory limits, each second or more often.

Promises:

1. Only files of the given pods are read, and below `DETAIL_SHARE` of a limit only its usage, through a kept descriptor.
2. A limit, a usage or a swap limit that is not readable gives no reading: unknown is never near a limit.
3. A cgroup that is gone is left out. `read` never raises.

Theory of operation. A limit is that of the pod's cgroup or of one of its containers; the nearer one kills. Limits of
cgroups that a container made are its own business. The usage of a cgroup contains page cache, and a cgroup that reads
files is full of it. Above `DETAIL_SHARE` memory.stat gives what reclaim cannot free, and the events and the pressure of
the cgroup are read with it. A limit is read again every `LIMIT_AGE_S`, because a resize in place changes it.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.model import ContainerUsage, OwnLimit, PodUsage
from nodeagent.sampling.hostfs import cgroup_memory, cgroups, parse
from nodeagent.sampling.hostfs.cgroups import Hierarchy
from nodeagent.sampling.hostfs.fd_cache import FdCache
from nodeagent.sampling.hostfs.host import Host, Unreadable
from nodeagent.sampling.node import memory, psi

DETAIL_SHARE: Final = 0.4
"""Below this share of its limit a cgroup is not near it, whatever its usage consists of: 3 us instead of 90."""
LIMIT_AGE_S: Final = 5.0
"""How long a limit and the list of the containers are used."""
DETAIL_AGE_S: Final = 5.0
"""How long the reading of a cgroup is used that moved by less than `MOVED_BYTES`."""
FULL_SHARE: Final = 0.85
"""From this share on the usage may be held level by the limit, or by the memory.high of MemoryQoS at 0.9 of it: page
cache makes way for the heap, and the usage shows nothing of that."""
FULL_AGE_S: Final = 1.0
"""`DETAIL_AGE_S` of such a cgroup, 90 us: most stay full of page cache for days."""
GROWING_AGE_S: Final = 0.15
"""The same while it has ever less left: a trend needs four readings, and `own_limit_watch` asks each 0.2 s for one."""
MOVED_BYTES: Final = 256 << 10
MAX_FDS: Final = 512
"""Usage files that are kept open; those of further cgroups are opened for each reading."""


class _Cgroup:
    """One cgroup with a limit, as it was read last. No dataclass: `check` imports this module and not those."""

    __slots__ = ("age_s", "container_id", "directory", "limit", "read_at", "reading", "usage")

    def __init__(self, container_id: str, directory: str) -> None:
        self.container_id = container_id
        self.directory = directory
        self.limit: int | None = None
        self.usage = 0
        self.read_at = float("-inf")
        self.age_s = 0.0
        """How long its reading is used if it does not move."""
        self.reading: OwnLimit | None = None


class _Pod(NamedTuple):
    """The cgroups of a pod."""

    containers: tuple[ContainerUsage, ...]
    listed_at: float
    cgroups: list[_Cgroup]
    limits: tuple[OwnLimit, ...]
    """Of the last reading; the same object while none of them was read again."""


class OwnLimitReader:
    """Reads the own limits of pods. Not thread-safe: one owner."""

    def __init__(self, host: Host, hierarchy: Hierarchy) -> None:
        self._host = host
        self._hierarchy = hierarchy
        self._files = FdCache(host, limit=MAX_FDS)
        self._pods: dict[str, _Pod] = {}

    def read(
        self, pods: Sequence[PodUsage], *, now: float, swap_total: int | None, fresh: Collection[str] = ()
    ) -> Mapping[str, tuple[OwnLimit, ...]]:
        """The own limits of these pods, by the UID of the cgroup; no entry for a pod without one. Those with a UID in
        `fresh` are read now, however little they moved."""
        known, self._pods = self._pods, {}
        swap = 0 if swap_total == 0 else self._swap_free()
        found: dict[str, tuple[OwnLimit, ...]] = {}
        for usage in pods:
            uid, containers = usage.cgroup_uid, usage.containers
            pod = known.pop(uid, None)
            if pod is None or not self._is_valid(pod, containers, now):
                pod = self._listed(usage.cgroup, containers, pod, now)
            self._pods[uid] = pod
            readings = [self._read(each, now, swap, fresh=uid in fresh) for each in pod.cgroups]
            limits = tuple([reading for reading in readings if reading is not None])
            if len(limits) != len(pod.limits) or any(
                new is not old for new, old in zip(limits, pod.limits, strict=True)
            ):
                pod = self._pods[uid] = pod._replace(limits=limits)
            if limits:
                found[uid] = pod.limits
        for pod in known.values():
            self._drop(pod.cgroups)
        return found

    def close(self) -> None:
        """Close the kept descriptors."""
        for pod in self._pods.values():
            self._drop(pod.cgroups)
        self._pods = {}

    def _is_valid(self, pod: _Pod, containers: tuple[ContainerUsage, ...], now: float) -> bool:
        """True if it still has these containers, and its limits are not too old."""
        same = pod.containers is containers or _ids(pod.containers) == _ids(containers)
        return same and 0 <= now - pod.listed_at < LIMIT_AGE_S

    def _listed(self, path: str, containers: tuple[ContainerUsage, ...], before: _Pod | None, now: float) -> _Pod:
        """The pod with its cgroups and their limits. Readings are kept where the cgroup is the same."""
        top = f"{self._hierarchy.memory}{path}"
        last = {each.directory: each for each in before.cgroups} if before is not None else {}
        directories, ids = [(top, "")], _ids(containers)
        try:
            for name in self._host.listdir(top):
                identity = cgroups.container_id(name)
                if identity is not None and identity in ids:
                    directories.append((f"{top}/{name}", identity))
        except Unreadable:
            pass  # the pod is gone
        found = [last.get(directory) or _Cgroup(identity, directory) for directory, identity in directories]
        self._drop([each for each in last.values() if each not in found])
        for each in found:
            each.limit = self._number(f"{each.directory}/{self._hierarchy.memory_files.limit}")
        limits = before.limits if before is not None else ()
        return _Pod(containers, now, [each for each in found if each.limit], limits)

    def _drop(self, dropped: Collection[_Cgroup]) -> None:
        for each in dropped:
            self._files.drop(f"{each.directory}/{self._hierarchy.memory_files.usage}")

    def _read(self, cgroup: _Cgroup, now: float, swap: int | None, *, fresh: bool) -> OwnLimit | None:
        """None: unknown."""
        files, limit = self._hierarchy.memory_files, cgroup.limit
        try:
            usage = parse.parse_count(self._files.read(f"{cgroup.directory}/{files.usage}"))
        except Unreadable:
            return None
        if usage is None or not limit:
            return None
        moved = abs(usage - cgroup.usage) >= MOVED_BYTES or not 0 <= now - cgroup.read_at < cgroup.age_s
        last = cgroup.reading
        if last is not None and last.limit == limit and not (moved or fresh):
            return last
        cgroup.usage, cgroup.read_at = usage, now
        if usage < DETAIL_SHARE * limit:
            cgroup.reading = OwnLimit(cgroup.container_id, limit, usage, limit - usage, now)
        else:
            cgroup.reading = self._detail(cgroup, limit, usage, now, swap)
        cgroup.age_s = DETAIL_AGE_S
        if usage >= FULL_SHARE * limit:
            cgroup.age_s = GROWING_AGE_S if _grew(last, cgroup.reading) else FULL_AGE_S
        return cgroup.reading

    def _detail(self, cgroup: _Cgroup, limit: int, usage: int, now: float, swap: int | None) -> OwnLimit | None:
        files = self._hierarchy.memory_files
        try:
            used = files.beyond_reclaim(self._host.read(f"{cgroup.directory}/{files.stat}"))
        except Unreadable:
            return None
        swap_left = self._swap_left(cgroup, limit, usage, swap)
        if used is None or swap_left is None:
            return None
        used = min(used, usage)
        return OwnLimit(
            cgroup.container_id,
            limit,
            used,
            limit - used + swap_left,
            now,
            reclaims=self._reclaims(cgroup),
            stall_some_avg10=self._stall(cgroup),
        )

    def _swap_left(self, cgroup: _Cgroup, limit: int, usage: int, swap: int | None) -> int | None:
        """What the cgroup may still swap out, of the `swap` that the node has free; None if that is unknown."""
        if not swap:
            return swap
        files = self._hierarchy.memory_files
        limit_file, usage_file = files.swap_limits
        if not self._host.exists(f"{cgroup.directory}/{usage_file}"):
            return swap  # the kernel does not count swap by cgroup
        used = self._number(f"{cgroup.directory}/{usage_file}")
        most = self._number(f"{cgroup.directory}/{limit_file}")
        if used is None:
            return None
        if most is None:  # `max`
            return swap
        if files is cgroup_memory.V1:  # both include memory
            most, used = most - limit, used - usage
        return max(0, min(swap, most - used))

    def _swap_free(self) -> int | None:
        try:
            return memory.parse_meminfo(self._host.read(memory.MEMINFO), (b"SwapFree",)).get(b"SwapFree")
        except Unreadable:
            return None

    def _reclaims(self, cgroup: _Cgroup) -> int | None:
        files = self._hierarchy.memory_files
        try:
            return files.reclaim_count(self._host.read(f"{cgroup.directory}/{files.reclaims}"))
        except Unreadable:
            return None

    def _stall(self, cgroup: _Cgroup) -> float | None:
        if self._hierarchy.unified != self._hierarchy.memory:
            return None  # the pressure files are in another tree
        try:
            return psi.some_avg10(self._host.read(f"{cgroup.directory}/memory.pressure"))
        except Unreadable:
            return None

    def _number(self, path: str) -> int | None:
        try:
            return parse.parse_count(self._host.read(path))
        except Unreadable:
            return None


def _grew(before: OwnLimit | None, after: OwnLimit | None) -> bool:
    return before is not None and after is not None and before.headroom - after.headroom >= MOVED_BYTES


def _ids(containers: tuple[ContainerUsage, ...]) -> list[str]:
    return [each.container_id for each in containers]

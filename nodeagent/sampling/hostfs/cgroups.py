"""Cgroups of the host: which hierarchies there are, where the pods are in them, and what a cgroup uses.

Theory of operation. A host has one unified hierarchy (v2), one hierarchy for each controller (v1), or a mixture
(hybrid: v1 controllers plus an empty or partly used v2). What matters is only where the *memory* and the *pids*
controller live, and where a v2 tree with pressure files is: `detect` finds the three. The kubelet makes the same path
below each of them, so one path names a pod's cgroup everywhere.

`MemoryFiles` is the protocol that both versions answer; v1 numbers are the hierarchical ones (`total_...`).
"""

import contextlib
import errno
import functools
import os
from typing import Final, NamedTuple, Protocol

from nodeagent.model import CgroupUsage, Note, NoteKind
from nodeagent.sampling.hostfs.host import Host, Unreadable
from nodeagent.sampling.hostfs.mounts import Mount
from nodeagent.sampling.hostfs.parse import keys, parse_count, parse_keyed

_V2_AT: Final = "/sys/fs/cgroup"
# How deep and how wide to look for a `kubepods` that is at none of the usual places: a node in a container of a
# container host (kind) is four levels down; 4096 directories take about 40 ms once.
_SEARCH_DEPTH: Final = 5
_SEARCH_WIDTH: Final = 4096
CONTAINER_ID_LENGTH: Final = 64
_USUAL_PARENTS: Final = ("", "/kubelet", "/kubelet.slice")


_INACTIVE_V1: Final = keys("total_inactive_file")
_HELD_V1: Final = keys("total_inactive_file", "total_rss", "total_shmem", "total_dirty", "total_writeback")
_INACTIVE_V2: Final = keys("inactive_file")
_ROOT_V2: Final = keys("inactive_file", "anon", "file")
_HELD_V2: Final = keys(
    "inactive_file", "anon", "kernel", "slab_reclaimable", "shmem", "sock", "file_dirty", "file_writeback"
)
_KERNEL_V2: Final = keys("kernel_stack", "pagetables", "sec_pagetables", "percpu", "vmalloc", "slab_unreclaimable")
"""Before Linux 5.18, which brought `kernel`."""


class WorkingSet(NamedTuple):
    """max(0, usage - inactive_file) in bytes, as the kubelet reckons it; None has its reason beside it."""

    value: int | None
    reason: str = ""


class MemoryNumbers(NamedTuple):
    """Memory of one cgroup in bytes. What is None has its reason in `reason`."""

    usage: int | None
    working_set: int | None
    """max(0, usage - inactive_file), as the kubelet reckons it."""
    unreclaimable: int | None
    """anon + shmem + dirty file pages, and on v2 kernel memory that is not reclaimable. v1 does not tell which of its
    kernel memory is, so there it is left out: relief is rather predicted too small."""
    reason: str = ""


class MemoryFiles(Protocol):
    """The memory files of one cgroup version."""

    usage: str
    """File with the usage, page cache included; the v2 root has none."""
    stat: str
    limit: str

    def numbers(self, usage: bytes, stat: bytes) -> MemoryNumbers:
        """From the contents of `usage` and `stat`."""

    def working_set(self, usage: bytes, stat: bytes) -> WorkingSet:
        """Of those only the working set, at a fifth of the cost."""

    def root_working_set(self, usage: bytes, stat: bytes) -> WorkingSet:
        """The same for the hierarchy's root: all of the node. `usage` is empty where there is no such file."""


class MemoryV1:
    """Files of the v1 memory controller (Documentation/admin-guide/cgroup-v1/memory.rst)."""

    usage: str = "memory.usage_in_bytes"
    stat: str = "memory.stat"
    limit: str = "memory.limit_in_bytes"

    def numbers(self, usage: bytes, stat: bytes) -> MemoryNumbers:
        inactive, anon, *others = parse_keyed(stat, _HELD_V1)
        held = None if anon is None else anon + _sum(others)
        return _numbers(parse_count(usage), inactive, held, self.usage, "total_inactive_file", "total_rss")

    def working_set(self, usage: bytes, stat: bytes) -> WorkingSet:
        [inactive] = parse_keyed(stat, _INACTIVE_V1)
        return _working_set(parse_count(usage), inactive, self.usage, "total_inactive_file")

    def root_working_set(self, usage: bytes, stat: bytes) -> WorkingSet:
        return self.working_set(usage, stat)


class MemoryV2:
    """Files of the v2 memory controller (Documentation/admin-guide/cgroup-v2.rst)."""

    usage: str = "memory.current"
    stat: str = "memory.stat"
    limit: str = "memory.max"

    def numbers(self, usage: bytes, stat: bytes) -> MemoryNumbers:
        inactive, anon, kernel, reclaimable, *others = parse_keyed(stat, _HELD_V2)
        held = None
        if anon is not None:
            fixed = _sum(parse_keyed(stat, _KERNEL_V2)) if kernel is None else max(0, kernel - (reclaimable or 0))
            held = anon + fixed + _sum(others)
        return _numbers(parse_count(usage), inactive, held, self.usage, "inactive_file", "anon")

    def working_set(self, usage: bytes, stat: bytes) -> WorkingSet:
        [inactive] = parse_keyed(stat, _INACTIVE_V2)
        return _working_set(parse_count(usage), inactive, self.usage, "inactive_file")

    def root_working_set(self, usage: bytes, stat: bytes) -> WorkingSet:  # noqa: ARG002 - v1 has one
        """The root has no memory.current: the kubelet takes anon + file instead."""
        inactive, anon, file = parse_keyed(stat, _ROOT_V2)
        used = None if anon is None or file is None else anon + file
        return _working_set(used, inactive, "anon + file of memory.stat", "inactive_file")


# One of each, so that a hierarchy that is found again equals itself.
V1: Final[MemoryFiles] = MemoryV1()
V2: Final[MemoryFiles] = MemoryV2()


def _sum(numbers: list[int | None]) -> int:
    """Of those that are there: older kernels lack some."""
    return sum([number or 0 for number in numbers])


def _working_set(used: int | None, inactive: int | None, usage_name: str, inactive_name: str) -> WorkingSet:
    if used is not None and inactive is not None:
        return WorkingSet(max(0, used - inactive))
    return WorkingSet(None, _missing((usage_name, used), (inactive_name, inactive)))


def _numbers(
    used: int | None, inactive: int | None, held: int | None, usage_name: str, inactive_name: str, anon_name: str
) -> MemoryNumbers:
    working_set = None if used is None or inactive is None else max(0, used - inactive)
    if working_set is not None and held is not None:
        return MemoryNumbers(used, working_set, held, "")
    missing = _missing((usage_name, used), (inactive_name, inactive), (anon_name, held))
    return MemoryNumbers(used, working_set, held, missing)


def _missing(*parts: tuple[str, int | None]) -> str:
    return "; ".join([f"{name} is missing or no number" for name, value in parts if value is None])


def parse_limit(data: bytes) -> int | None:
    """Bytes; None when unlimited (`max`, or on v1 a number above 2^62) or no number."""
    return parse_count(data)


# --- where the controllers are ---------------------------------------------------------------------------------------


class Hierarchy(NamedTuple):
    """Where the controllers are mounted on the host. Paths are below the host's root; None: not there."""

    version: str
    """`v2`, `v1`, `hybrid` (a v2 tree beside v1 controllers), or `none`."""
    memory: str | None
    memory_files: MemoryFiles
    pids: str | None
    unified: str | None
    """A v2 tree, which has the pressure files."""
    reason: str = ""
    """Why memory is None."""


def detect_hierarchy(host: Host) -> Hierarchy:
    """Find the hierarchies; never raises."""
    try:
        controllers = host.read(f"{_V2_AT}/cgroup.controllers").split()
        if b"memory" in controllers and b"pids" in controllers:
            # The usual case by far, told without the mount table, which on a full node is 100 KiB.
            return Hierarchy("v2", _V2_AT, V2, _V2_AT, _V2_AT)
    except Unreadable:
        pass  # no v2 at the usual place: the mount table tells what there is
    try:
        mounts = host.mounts()
    except Unreadable as error:
        return Hierarchy("none", None, V2, None, None, f"no cgroup v2 at {_V2_AT}, and {error}")
    return from_mounts(host, mounts)


def from_mounts(host: Host, mounts: list[Mount]) -> Hierarchy:
    """The hierarchies by a mount table. Where a controller is mounted twice the first mount of its root counts."""
    v1: dict[str, str] = {}
    unified: str | None = None
    for mount in mounts:
        if mount.fstype == "cgroup2" and unified is None:
            unified = mount.point
        elif mount.fstype == "cgroup":
            for option in mount.super_options.split(","):
                v1.setdefault(option, mount.point)
    delegated: list[bytes] = []
    if unified is not None:
        try:
            delegated = host.read(f"{unified}/cgroup.controllers").split()
        except Unreadable:
            unified = None
    memory = unified if b"memory" in delegated else v1.get("memory")
    pids = unified if b"pids" in delegated else v1.get("pids")
    files: MemoryFiles = V2 if memory is not None and memory == unified else V1
    if memory is None:
        version = "none"
    elif "memory" not in v1 and "pids" not in v1:
        version = "v2"
    else:
        version = "v1" if unified is None else "hybrid"
    reason = "" if memory else "no mounted cgroup hierarchy has the memory controller"
    return Hierarchy(version, memory, files, pids, unified, reason)


# --- where the pods are ----------------------------------------------------------------------------------------------


class Kubepods(NamedTuple):
    """The cgroup that holds all pods."""

    path: str
    """Below the hierarchy's root, starting with `/`."""
    systemd: bool
    """Named by the systemd driver (`.slice`)."""
    why: str = ""
    """Why this one, when there was a choice."""


def find_kubepods(host: Host, hierarchy: Hierarchy, *, cgroup_root: str = "") -> tuple[Kubepods | None, str]:
    """(the pods' cgroup, "") or (None, why there is none).

    `cgroup_root` is the kubelet's cgroupRoot, in either driver's spelling. Without it the usual places are looked at,
    then the tree below the root. Of several candidates the one with most pods is taken, of equals the higher one.
    """
    top = hierarchy.memory
    if top is None:
        return None, hierarchy.reason
    if cgroup_root.strip("/"):
        places = [place for parent in _spellings(cgroup_root) for place in _children(parent)]
        found = [place for place in places if host.exists(top + place)]
        if not found:
            return None, f"no kubepods cgroup under the configured cgroup root {cgroup_root} ({' or '.join(places)})"
    else:
        places = [place for parent in _USUAL_PARENTS for place in _children(parent)]
        found = [place for place in places if host.exists(top + place)] or _search(host, top)
        if not found:
            return None, f"no kubepods cgroup below {top}: no kubelet has made pods on this machine"
    return _choose(host, top, found), ""


def _spellings(cgroup_root: str) -> list[str]:
    """`/a/b` as the cgroupfs driver names it, and `/a.slice/a-b.slice` as systemd does."""
    parts = [part for part in cgroup_root.split("/") if part]
    plain = "".join(f"/{part}" for part in parts)
    if parts[-1].endswith(".slice"):
        return [plain]
    escaped = [part.replace("-", "_") for part in parts]
    return [plain, "".join(f"/{'-'.join(escaped[: i + 1])}.slice" for i in range(len(escaped)))]


def _children(parent: str) -> list[str]:
    """The names that `kubepods` may have in this parent."""
    last = parent.rsplit("/", 1)[-1]
    if not last.endswith(".slice"):
        return [f"{parent}/kubepods.slice", f"{parent}/kubepods"]
    return [f"{parent}/{last.removesuffix('.slice')}-kubepods.slice"]


def _search(host: Host, top: str) -> list[str]:
    """Every cgroup that is named like a kubepods, level by level, not looking inside those."""
    found: list[str] = []
    level, seen = [""], 0
    for _ in range(_SEARCH_DEPTH):
        following: list[str] = []
        for parent in level:
            seen += 1
            if seen > _SEARCH_WIDTH:
                return found
            try:
                names = [name for name, _ in host.subdirectories(top + parent)]
            except Unreadable:
                continue  # removed while we looked, or not ours to see
            for name in sorted(names):
                is_it = name in ("kubepods", "kubepods.slice") or name.endswith("-kubepods.slice")
                (found if is_it else following).append(f"{parent}/{name}")
        level = following
    return found


def _choose(host: Host, top: str, found: list[str]) -> Kubepods:
    if len(found) == 1:
        return Kubepods(found[0], found[0].endswith(".slice"))
    pods = {place: _pods_in(host, top + place) for place in found}
    best = min(found, key=lambda place: (-pods[place], place.count("/"), place))
    others = ", ".join(f"{place} ({pods[place]} pods)" for place in found if place != best)
    return Kubepods(best, best.endswith(".slice"), f"{best} has {pods[best]} pods; also found: {others}")


def _pods_in(host: Host, path: str) -> int:
    """Number of pod cgroups below a kubepods, both drivers."""
    number, todo = 0, [path]
    for place in todo:
        try:
            names = [name for name, _ in host.subdirectories(place)]
        except Unreadable:
            continue
        number += sum(pod_uid(name) is not None for name in names)
        if place == path:
            todo += [f"{place}/{name}" for name in names if qos_of(name) is not None]
    return number


class Below(NamedTuple):
    """A cgroup and those below it."""

    places: list[str]
    """Directories, each before those below it; the cgroup itself is the first."""
    complete: bool
    """False: there are more, or some cannot be listed."""


def cgroups_below(host: Host, place: str, *, most: int) -> Below:
    """The cgroup in the directory `place` and those below it, level by level, at most `most` in all. Never raises.

    A container may have made them: the kernel limits neither how many there are nor how deep, so that nothing here may
    recurse, and a name may be longer than a path can be.
    """
    places, complete = [place], True
    for parent in places:
        try:
            if os.stat(host.real(parent)).st_nlink == 2:  # no directory in it: spares listing 40 files
                continue
            names = [name for name, _ in host.subdirectories(parent)]
        except FileNotFoundError:
            continue  # gone meanwhile
        except OSError:
            complete = False
            continue
        except Unreadable as error:
            complete = complete and error.errno == errno.ENOENT
            continue
        left = most - len(places)
        complete = complete and len(names) <= left
        places += [f"{parent}/{name}" for name in names[:left]]
    return Below(places, complete)


def processes_outside(host: Host, hierarchy: Hierarchy, pod_uids: frozenset[str]) -> list[int]:
    """PID of every process but those in these pods' cgroups. What vanishes meanwhile is left out."""
    found: list[int] = []
    top = hierarchy.pids or hierarchy.memory
    todo = [top] if top is not None else []
    for place in todo:
        # A threaded cgroup of v2 has none to tell: they are its parent's.
        with contextlib.suppress(Unreadable):
            found += [int(pid) for pid in host.read(f"{place}/cgroup.procs").split()]
        if len(todo) >= _SEARCH_WIDTH:  # level by level: what the host has stands above what a container has made
            continue
        with contextlib.suppress(Unreadable):
            todo += [f"{place}/{name}" for name, _ in host.subdirectories(place) if pod_uid(name) not in pod_uids]
    return [pid for pid in found if pid]  # 0: outside of our PID namespace


def largest_outside(
    host: Host, hierarchy: Hierarchy, kubepods: Kubepods | None, *, most: int
) -> tuple[CgroupUsage, ...]:
    """The cgroups of the first two levels outside kubepods with the largest working sets, largest first. A cgroup whose
    children are listed is not listed itself, so that nothing is counted twice."""
    top = hierarchy.memory
    if top is None:
        return ()
    skip = kubepods.path if kubepods else ""
    found: list[CgroupUsage] = []
    for parent in _outside(host, top, "", skip):
        children = _outside(host, top, parent, skip)
        found += [_usage_of(host, hierarchy, path) for path in children or [parent]]
    found.sort(key=lambda usage: -(usage.memory_working_set or 0))
    return tuple(found[:most])


def _outside(host: Host, top: str, parent: str, skip: str) -> list[str]:
    """Children of `parent` that are not kubepods."""
    try:
        names = [name for name, _ in host.subdirectories(top + parent)]
    except Unreadable:
        return []
    return [path for name in sorted(names) if (path := f"{parent}/{name}") != skip]


def _usage_of(host: Host, hierarchy: Hierarchy, path: str) -> CgroupUsage:
    files = hierarchy.memory_files
    place = f"{hierarchy.memory}{path}"
    try:
        numbers = files.numbers(host.read(f"{place}/{files.usage}"), host.read(f"{place}/{files.stat}"))
        working_set = numbers.working_set
    except Unreadable:
        working_set = None
    try:
        processes = len(host.read(f"{place}/cgroup.procs").split())
    except Unreadable:
        return CgroupUsage(path, working_set, None)
    return CgroupUsage(path, working_set, processes)


# --- names -----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)  # asked for every directory of every sample
def pod_uid(name: str) -> str | None:
    """The UID in a pod cgroup's name: `pod<uid>` (cgroupfs) or `...-pod<uid with _>.slice` (systemd); None for any
    other name. Static pods have 32 hex digits without dashes."""
    if name.endswith(".slice"):
        _, found, uid = name.removesuffix(".slice").rpartition("-pod")
        uid = uid.replace("_", "-") if found else ""
    elif name.startswith("pod"):
        uid = name.removeprefix("pod")
    else:
        return None
    return uid if _is_uid(uid) else None


def _is_uid(uid: str) -> bool:
    """Hexadecimal digits with dashes at most between them: a metadata.uid or a config hash."""
    bare = uid.replace("-", "")
    return len(bare) == 32 and _is_hex(bare)


def qos_of(name: str) -> str | None:
    """`burstable` or `besteffort` for the cgroups that hold the pods of that class; None for any other name."""
    for qos in ("burstable", "besteffort"):
        if name == qos or name.endswith((f"-{qos}.slice",)):
            return qos
    return None


def container_id(name: str) -> str | None:
    """The container's id in its cgroup's name: `<64 hex>` or `<runtime>-<64 hex>.scope`; None for any other name, as
    for the cgroup that a container's own systemd makes, or CRI-O's `crio-conmon-<id>.scope`, which is no container."""
    if len(name) < CONTAINER_ID_LENGTH or "conmon" in name:
        return None
    last = name.removesuffix(".scope").rpartition("-")[2]
    return last if len(last) == CONTAINER_ID_LENGTH and _is_hex(last) else None


def _is_hex(text: str) -> bool:
    # strip() takes from the ends what is in the set, so nothing is left only if all of it is.
    return not text.strip("0123456789abcdef")


def hierarchy_notes(hierarchy: Hierarchy, kubepods: Kubepods | None) -> tuple[Note, ...]:
    """What a reader should know about the choice of hierarchy and of kubepods."""
    said = []
    if hierarchy.version == "hybrid":
        where = f"memory at {hierarchy.memory}, pids at {hierarchy.pids}, v2 at {hierarchy.unified}"
        said.append(Note(NoteKind.CGROUP, f"hybrid hierarchy: {where}"))
    if kubepods is not None and kubepods.why:
        said.append(Note(NoteKind.CGROUP, f"several kubepods cgroups: {kubepods.why}"))
    return tuple(said)

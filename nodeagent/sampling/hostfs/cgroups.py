"""Cgroups of the host: the mounted hierarchies and the place of the pods in them.

Theory of operation. A host has one unified hierarchy (v2), one hierarchy for each controller (v1), or a mixture
(hybrid: v1 controllers plus an empty or partly used v2). Only three places matter: the *memory* controller, the *pids*
controller and a v2 tree with pressure files; `detect_hierarchy` finds them. The kubelet makes the same path below each
of them, so one path names a pod's cgroup everywhere.
"""

import contextlib
import errno
import functools
import os
from typing import Final, NamedTuple

from nodeagent.model import CgroupUsage, Note, NoteKind
from nodeagent.sampling.hostfs import cgroup_memory, parse
from nodeagent.sampling.hostfs.cgroup_memory import MemoryFiles
from nodeagent.sampling.hostfs.host import Host, Unreadable
from nodeagent.sampling.hostfs.mounts import Mount

_V2_AT: Final = "/sys/fs/cgroup"
# Limits of the search for a `kubepods` that is at none of the usual places: a node in a container of a container host
# (kind) is four levels down; 4096 directories take about 40 ms once.
_SEARCH_DEPTH: Final = 5
_SEARCH_WIDTH: Final = 4096
CONTAINER_ID_LENGTH: Final = 64
_USUAL_PARENTS: Final = ("", "/kubelet", "/kubelet.slice")


# --- where the controllers are ---------------------------------------------------------------------------------------


class Hierarchy(NamedTuple):
    """Where the controllers are mounted on the host. Paths are below the host's root; None: not mounted."""

    version: str
    """`v2`, `v1`, `hybrid` (a v2 tree beside v1 controllers), or `none`."""
    memory: str | None
    memory_files: MemoryFiles
    pids: str | None
    unified: str | None
    """A v2 tree with pressure files."""
    reason: str = ""
    """Why memory is None."""


def detect_hierarchy(host: Host) -> Hierarchy:
    """The hierarchies of the host. Never raises."""
    try:
        controllers = host.read(f"{_V2_AT}/cgroup.controllers").split()
        if b"memory" in controllers and b"pids" in controllers:
            # The usual case, without the mount table, which has 100 KiB on a full node.
            return Hierarchy("v2", _V2_AT, cgroup_memory.V2, _V2_AT, _V2_AT)
    except Unreadable:
        pass  # no v2 at the usual place: the mount table has the others
    try:
        mounts = host.mounts()
    except Unreadable as error:
        return Hierarchy("none", None, cgroup_memory.V2, None, None, f"no cgroup v2 at {_V2_AT}, and {error}")
    return from_mounts(host, mounts)


def from_mounts(host: Host, mounts: list[Mount]) -> Hierarchy:
    """The hierarchies of a mount table. Of two mounts of one controller the first counts."""
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
    files: MemoryFiles = cgroup_memory.V2 if memory is not None and memory == unified else cgroup_memory.V1
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
    """The cgroup of all pods."""

    path: str
    """Below the hierarchy's root, starting with `/`."""
    systemd: bool
    """Named by the systemd driver (`.slice`)."""
    why: str = ""
    """Why this one, if there were several."""


def find_kubepods(host: Host, hierarchy: Hierarchy, *, cgroup_root: str = "") -> tuple[Kubepods | None, str]:
    """(the pods' cgroup, "") or (None, why there is none).

    `cgroup_root` is the kubelet's cgroupRoot, in either driver's spelling. Without it the usual places are tried, then
    the tree below the root is searched. Of several candidates the one with most pods is used, of equals the higher one.
    """
    top = hierarchy.memory
    if top is None:
        return None, hierarchy.reason
    if cgroup_root.strip("/"):
        paths = [path for parent in _spellings(cgroup_root) for path in _kubepods_in(parent)]
        found = [path for path in paths if host.exists(top + path)]
        if not found:
            return None, f"no kubepods cgroup under the configured cgroup root {cgroup_root} ({' or '.join(paths)})"
    else:
        paths = [path for parent in _USUAL_PARENTS for path in _kubepods_in(parent)]
        found = [path for path in paths if host.exists(top + path)] or _search(host, top)
        if not found:
            return None, f"no kubepods cgroup below {top}: no kubelet has made pods on this machine"
    return _select(host, top, found), ""


def _spellings(cgroup_root: str) -> list[str]:
    """`/a/b` of the cgroupfs driver, and `/a.slice/a-b.slice` of the systemd driver."""
    parts = [part for part in cgroup_root.split("/") if part]
    plain = "".join(f"/{part}" for part in parts)
    if parts[-1].endswith(".slice"):
        return [plain]
    escaped = [part.replace("-", "_") for part in parts]
    return [plain, "".join(f"/{'-'.join(escaped[: i + 1])}.slice" for i in range(len(escaped)))]


def _kubepods_in(parent: str) -> list[str]:
    """The paths that `kubepods` may have below this parent."""
    last = parent.rsplit("/", 1)[-1]
    if not last.endswith(".slice"):
        return [f"{parent}/kubepods.slice", f"{parent}/kubepods"]
    return [f"{parent}/{last.removesuffix('.slice')}-kubepods.slice"]


def _search(host: Host, top: str) -> list[str]:
    """Every cgroup with the name of a kubepods, level by level; their descendants are not searched."""
    found: list[str] = []
    level, visited = [""], 0
    for _ in range(_SEARCH_DEPTH):
        following: list[str] = []
        for parent in level:
            visited += 1
            if visited > _SEARCH_WIDTH:
                return found
            try:
                names = [name for name, _ in host.subdirectories(top + parent)]
            except Unreadable:
                continue  # removed meanwhile, or not readable for us
            for name in sorted(names):
                is_kubepods = name in ("kubepods", "kubepods.slice") or name.endswith("-kubepods.slice")
                (found if is_kubepods else following).append(f"{parent}/{name}")
        level = following
    return found


def _select(host: Host, top: str, found: list[str]) -> Kubepods:
    if len(found) == 1:
        return Kubepods(found[0], found[0].endswith(".slice"))
    pods = {path: _count_pods(host, top + path) for path in found}
    best = min(found, key=lambda path: (-pods[path], path.count("/"), path))
    others = ", ".join(f"{path} ({pods[path]} pods)" for path in found if path != best)
    return Kubepods(best, best.endswith(".slice"), f"{best} has {pods[best]} pods; also found: {others}")


def _count_pods(host: Host, path: str) -> int:
    """Number of pod cgroups below a kubepods, both drivers."""
    number, todo = 0, [PodParent(path)]
    for parent in todo:
        try:
            names = [name for name, _ in host.subdirectories(parent.path)]
        except Unreadable:
            continue
        number += sum(pod_uid(name) is not None for name in names)
        todo += [found for name in names if (found := parent.child(name)) is not None]
    return number


class PodParent(NamedTuple):
    """A directory that the kubelet makes pod cgroups in.

    Below `kubepods` are the Guaranteed pods, the directories of the two other QoS classes and, with the feature gate
    NodeSystemPartition (KEP-5894), `system` with the same three again.
    """

    path: str
    qos: str | None = None
    """`burstable` or `besteffort`; None: its pods are Guaranteed."""
    system: bool = False
    """In the system partition."""

    def child(self, name: str) -> "PodParent | None":
        """The directory of this name in it; None if it holds no pods (a pod cgroup, or none of the kubelet's)."""
        if self.qos is not None:
            return None
        path = f"{self.path}/{name}"
        if (qos := qos_of(name)) is not None:
            return PodParent(path, qos, self.system)
        if not self.system and (name == "system" or name.endswith("kubepods-system.slice")):
            return PodParent(path, system=True)
        return None


def pod_parents(host: Host, top: str) -> list[PodParent]:
    """The kubepods at `top` and its directories with pods. Raises Unreadable if `top` cannot be listed."""
    parents = [PodParent(top)]
    for parent in parents:
        try:
            names = [name for name, _ in host.subdirectories(parent.path)]
        except Unreadable:
            if parent.path == top:
                raise
            continue  # removed meanwhile
        parents += [found for name in names if (found := parent.child(name)) is not None]
    return parents


class Subtree(NamedTuple):
    """A cgroup and its descendants."""

    directories: list[str]
    """Each before its children; the cgroup itself is the first."""
    complete: bool
    """False: there are more, or some cannot be listed."""


def cgroups_below(host: Host, directory: str, *, most: int) -> Subtree:
    """The cgroup at `directory` and its descendants, level by level, at most `most` in all. Never raises.

    A container may have made them. The kernel limits neither their number nor their depth, so this may not recurse,
    and a name may be longer than a path can be.
    """
    directories, complete = [directory], True
    for parent in directories:
        try:
            if os.stat(host.real(parent)).st_nlink == 2:  # no child: saves listing 40 files
                continue
            names = [name for name, _ in host.subdirectories(parent)]
        except FileNotFoundError:
            continue  # removed meanwhile
        except OSError:
            complete = False
            continue
        except Unreadable as error:
            complete = complete and error.errno == errno.ENOENT
            continue
        left = most - len(directories)
        complete = complete and len(names) <= left
        directories += [f"{parent}/{name}" for name in names[:left]]
    return Subtree(directories, complete)


def processes_outside(host: Host, hierarchy: Hierarchy, pod_uids: frozenset[str]) -> list[int]:
    """PID of every process except those in these pods' cgroups. A process that ends meanwhile is left out."""
    found: list[int] = []
    top = hierarchy.pids or hierarchy.memory
    todo = [top] if top is not None else []
    for directory in todo:
        # A threaded cgroup of v2 lists none: the parent lists its processes.
        with contextlib.suppress(Unreadable):
            found += parse.parse_pids(host.read(f"{directory}/cgroup.procs"))
        if len(todo) >= _SEARCH_WIDTH:  # level by level: the cgroups of the host are above those of containers
            continue
        with contextlib.suppress(Unreadable):
            todo += [
                f"{directory}/{name}" for name, _ in host.subdirectories(directory) if pod_uid(name) not in pod_uids
            ]
    return [pid for pid in found if pid]  # 0: outside of our PID namespace


def largest_outside(
    host: Host, hierarchy: Hierarchy, kubepods: Kubepods | None, *, most: int
) -> tuple[CgroupUsage, ...]:
    """The cgroups of the first two levels outside kubepods with the largest working sets, largest first. A cgroup whose
    children are listed is not listed itself, so that no memory counts twice."""
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
    directory = f"{hierarchy.memory}{path}"
    try:
        numbers = files.numbers(host.read(f"{directory}/{files.usage}"), host.read(f"{directory}/{files.stat}"))
        working_set = numbers.working_set
    except Unreadable:
        working_set = None
    try:
        processes = len(host.read(f"{directory}/cgroup.procs").split())
    except Unreadable:
        return CgroupUsage(path, working_set, None)
    return CgroupUsage(path, working_set, processes)


# --- names -----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)  # called for every directory of every listing
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
    """True for hexadecimal digits with optional dashes: a metadata.uid or a config hash."""
    bare = uid.replace("-", "")
    return len(bare) == 32 and _is_hex(bare)


def qos_of(name: str) -> str | None:
    """`burstable` or `besteffort` for the cgroup of that class; None for any other name."""
    for qos in ("burstable", "besteffort"):
        if name == qos or name.endswith((f"-{qos}.slice",)):
            return qos
    return None


def container_id(name: str) -> str | None:
    """The container's id in its cgroup's name: `<64 hex>` or `<runtime>-<64 hex>.scope`. None for any other name: a
    cgroup that a container's own systemd made, or CRI-O's `crio-conmon-<id>.scope`, which is not a container."""
    if len(name) < CONTAINER_ID_LENGTH or "conmon" in name:
        return None
    last = name.removesuffix(".scope").rpartition("-")[2]
    return last if len(last) == CONTAINER_ID_LENGTH and _is_hex(last) else None


def _is_hex(text: str) -> bool:
    # strip() removes the characters of the set from both ends: the rest is empty only if all of them are in the set.
    return not text.strip("0123456789abcdef")


def hierarchy_notes(hierarchy: Hierarchy, kubepods: Kubepods | None) -> tuple[Note, ...]:
    """Notes about the choice of the hierarchy and of kubepods."""
    notes = []
    if hierarchy.version == "hybrid":
        where = f"memory at {hierarchy.memory}, pids at {hierarchy.pids}, v2 at {hierarchy.unified}"
        notes.append(Note(NoteKind.CGROUP, f"hybrid hierarchy: {where}"))
    if kubepods is not None and kubepods.why:
        notes.append(Note(NoteKind.CGROUP, f"several kubepods cgroups: {kubepods.why}"))
    return tuple(notes)

"""The kernel's counters of OOM kills: one for the whole node, and those of each cgroup.

Promises:

1. Each kill is counted once. What a cgroup counts beyond its children and itself belongs to children that are gone, so
   a container or pod whose cgroup no longer exists is counted in its parent (cgroup v2).
2. A cgroup that did not exist at the last reading begins with zero. A counter that is lower than before, or that
   belongs to another inode, begins with zero again.
3. A cgroup that vanishes while it is read is left out. Nothing here raises.

Theory of operation. /proc/vmstat `oom_kill` counts every kill of the node, by the limit of a cgroup or for the whole
node (mm/oom_kill.c, __oom_kill_process): 20 us for each reading. Only if it moved the cgroups are read. On cgroup v2
the counters of memory.events include the descendants, so a subtree whose counters did not move is not read. On cgroup
v1 memory.oom_control counts the cgroup alone and no causes, so all are read, and those that are gone are missing.
"""

import os
from collections.abc import Mapping
from typing import Final

from nodeagent.model import OomCount, OomEvents, OomLevel, OomPlace, OomTotals
from nodeagent.sampling.hostfs import cgroups, parse
from nodeagent.sampling.hostfs.cgroup_memory import MemoryV1
from nodeagent.sampling.hostfs.cgroups import Hierarchy
from nodeagent.sampling.hostfs.host import Host, Unreadable

VMSTAT: Final = "/proc/vmstat"
MAX_CGROUPS: Final = 4096
"""Cgroups that one reading visits: some 60 ms, and only after a kill. A container can make any number."""
MAX_KEPT_TOTALS: Final = 512
"""Cgroups with a kill whose counters are kept."""
MAX_DEPTH: Final = 12
_VMSTAT_BYTES: Final = 16384
# A seq_file returns about a page for each read; a shorter piece is the end.
_SURELY_COMPLETE: Final = 2048
_VMSTAT_KEY: Final = b"\noom_kill "
_EVENTS: Final = parse.line_starts("oom", "oom_kill", "oom_group_kill")
_CONTROL: Final = parse.line_starts("oom_kill")
NOTHING: Final = OomEvents()


class OomKillCounter:
    """`oom_kill` of /proc/vmstat through a kept descriptor."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._fd = -1

    def read(self) -> int | None:
        """Kills since boot; None if the kernel does not count them (before Linux 4.13) or the file is not readable."""
        try:
            if self._fd < 0:
                self._fd = self._host.open(VMSTAT)
            data = b"\n"
            while True:
                piece = os.pread(self._fd, _VMSTAT_BYTES, len(data) - 1)
                data += piece
                start = data.find(_VMSTAT_KEY)
                end = data.find(b"\n", start + len(_VMSTAT_KEY)) if start >= 0 else -1
                if end >= 0:
                    return parse.parse_count(data[start + len(_VMSTAT_KEY) : end])
                if len(piece) < _SURELY_COMPLETE:
                    return None
        except (OSError, Unreadable):
            self.close()
            return None

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def counts_limits(hierarchy: Hierarchy) -> bool:
    """True if a cgroup counts how often its limit was reached; without a kill this is all that a reading shows."""
    return not isinstance(hierarchy.memory_files, MemoryV1)


def place_of(path: str, kubepods: str) -> OomPlace:
    """What the cgroup at `path` (below the hierarchy's root) is. A cgroup that a container made counts as the
    container. `kubepods` is empty if there is none."""
    if not kubepods or not (path == kubepods or path.startswith(f"{kubepods}/")):
        return OomPlace(path or "/", OomLevel.HOST)
    here, parts = kubepods, path[len(kubepods) :].split("/")[1:]
    for position, name in enumerate(parts):
        here = f"{here}/{name}"
        uid = cgroups.pod_uid(name)
        if uid is None:
            continue
        child = parts[position + 1] if position + 1 < len(parts) else ""
        identity = cgroups.container_id(child) if child else None
        if identity is None:
            return OomPlace(here, OomLevel.POD, uid)
        return OomPlace(f"{here}/{child}", OomLevel.CONTAINER, uid, identity)
    return OomPlace(path, OomLevel.KUBEPODS)


class OomCgroups:
    """The counters of all cgroups. Not thread-safe: one owner."""

    def __init__(self, host: Host, totals: Mapping[str, OomTotals] | None = None) -> None:
        """`totals`: those of an earlier process on this boot."""
        self._host = host
        self._totals = dict(totals or {})
        self._visited = 0
        self._counts: list[OomCount] = []

    @property
    def totals(self) -> Mapping[str, OomTotals]:
        """The last counters of each cgroup that had an event."""
        return self._totals

    def read(self, hierarchy: Hierarchy, kubepods: str) -> tuple[OomCount, ...]:
        """The events since the last reading, each in its cgroup, parents after their children."""
        self._visited, self._counts = 0, []
        if hierarchy.memory is not None:
            if isinstance(hierarchy.memory_files, MemoryV1):
                self._read_v1(hierarchy.memory, kubepods)
            else:
                for name, inode in self._children(hierarchy.memory):
                    self._read_v2(hierarchy.memory, f"/{name}", inode, kubepods, depth=1)
        while len(self._totals) > MAX_KEPT_TOTALS:
            del self._totals[next(iter(self._totals))]
        return tuple(self._counts)

    def _children(self, directory: str) -> list[tuple[str, int]]:
        try:
            return sorted(self._host.subdirectories(directory))
        except Unreadable:
            return []

    # --- cgroup v2

    def _read_v2(self, top: str, path: str, inode: int, kubepods: str, *, depth: int) -> OomEvents | None:
        """The new events of a cgroup with its descendants; None if it is gone."""
        self._visited += 1
        if self._visited > MAX_CGROUPS:
            return NOTHING
        now = self._events(f"{top}{path}/memory.events")
        if now is None:
            return None
        before = self._before(path, inode, now)
        new = now.minus(before.all)
        if new == NOTHING:
            return NOTHING
        place = place_of(path, kubepods)
        present: list[str] = []
        below, own_now = NOTHING, None
        if place.level is OomLevel.CONTAINER or depth >= MAX_DEPTH:
            own = new
        else:
            own_now = self._events(f"{top}{path}/memory.events.local")
            children = self._children(f"{top}{path}")
            for name, child in children:
                found = self._read_v2(top, f"{path}/{name}", child, kubepods, depth=depth + 1)
                if found is None:
                    continue  # gone since it was listed: its kills are counted as those of a missing child
                below = below.plus(found)
                if identity := cgroups.pod_uid(name) or cgroups.container_id(name):
                    present.append(identity)
            self._forget(path, {name for name, _ in children})
            if own_now is not None:
                own = _not_negative(own_now.minus(before.own or NOTHING))
            elif children or place.level is not OomLevel.HOST:
                # Before Linux 5.2: its processes are in its children, its limit is its own.
                own = OomEvents(max(0, new.ooms - below.ooms), 0, 0)
            else:
                own = new
        gone = _not_negative(new.minus(below).minus(own))
        # A kill between the readings of two files is counted in the later one: it is not new the next time.
        counted = OomEvents(*[max(pair) for pair in zip(new, below.plus(own), strict=True)])
        self._totals.pop(path, None)
        self._totals[path] = OomTotals(inode, before.all.plus(counted), own_now)
        if own != NOTHING or gone != NOTHING:
            self._counts.append(OomCount(place, own, gone, frozenset(present)))
        return counted

    def _before(self, path: str, inode: int, now: OomEvents) -> OomTotals:
        before = self._totals.get(path)
        if before is None or before.inode != inode or any(n < b for n, b in zip(now, before.all, strict=True)):
            return OomTotals(inode, NOTHING, NOTHING)
        return before

    def _forget(self, path: str, names: set[str]) -> None:
        """Drop the counters of children that are gone."""
        start = f"{path}/"
        for known in [each for each in self._totals if each.startswith(start)]:
            if known[len(start) :].partition("/")[0] not in names:
                del self._totals[known]

    def _events(self, path: str) -> OomEvents | None:
        try:
            ooms, kills, group_kills = parse.parse_keyed(self._host.read(path), _EVENTS)
        except Unreadable:
            return None
        return None if kills is None else OomEvents(ooms or 0, kills, group_kills or 0)

    # --- cgroup v1

    def _read_v1(self, top: str, kubepods: str) -> None:
        kills: dict[OomPlace, int] = {}
        found: dict[str, OomTotals] = {}
        level = [("", 0)]
        for path, inode in level:
            self._visited += 1
            if self._visited > MAX_CGROUPS:
                break
            level += [(f"{path}/{name}", child) for name, child in self._children(f"{top}{path}")]
            try:
                [number] = parse.parse_keyed(self._host.read(f"{top}{path}/memory.oom_control"), _CONTROL)
            except Unreadable:
                continue
            if not number:
                continue
            now = OomEvents(kills=number)
            new = now.minus(self._before(path, inode, now).all)
            found[path] = OomTotals(inode, now, now)
            if new.kills:
                place = place_of(path, kubepods)
                kills[place] = kills.get(place, 0) + new.kills
        self._totals = found
        self._counts = [OomCount(place, OomEvents(kills=number), causes_known=False) for place, number in kills.items()]


def _not_negative(events: OomEvents) -> OomEvents:
    return OomEvents(*[max(0, number) for number in events])

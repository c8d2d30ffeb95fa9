"""Builds traces: how each file system fills, and how much of that belongs to pods, from successive walks.

An ended pod counts with its last amount while its files exist. The kubelet removes them some seconds after the cgroup,
or when the pod object is deleted; until then they must not count as unattributed. After the removal the pod counts as
zero, because its old amount would hide new files that belong to no pod.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from nodeagent.model import DiskPoint, DiskTrace
from nodeagent.sampling.disk.pod_disk import DiskAmount
from nodeagent.sampling.disk.pod_paths import PodPart
from nodeagent.sampling.disk.walk_worker import FileSystemUsage

_LENGTH_S: Final = 600.0
"""How far back a trace reaches."""
_RECENT_S: Final = 30.0
"""Age of the middle point of a trace: several walks, each of which takes seconds on a large node."""
_STEP_S: Final = 10.0
"""Shortest distance between two stored points."""


class Traces:
    """The file system usages of the last `_LENGTH_S`."""

    def __init__(self) -> None:
        self._usages: dict[tuple[str, ...], list[FileSystemUsage]] = {}
        """Signals of the file system -> its usages, oldest first."""
        self._measured_at: dict[PodPart, float] = {}
        """When each part was last measured."""

    def add(self, usages: Iterable[FileSystemUsage]) -> None:
        """Add the usages of a measurement. Adding the same measurement again has no effect."""
        for usage in usages:
            stored = self._usages.setdefault(usage.file_system.signals, [])
            if stored and usage.at <= stored[-1].at:
                continue
            self._measured_at |= dict.fromkeys(usage.pods, usage.at)
            before = stored[-1].pods if stored else {}
            if len(stored) > 1 and usage.at - stored[-2].at < _STEP_S:
                stored.pop()
            stored.append(usage._replace(pods={**_ended_pods(before, usage), **usage.pods}))
            while len(stored) > 1 and usage.at - stored[0].at > _LENGTH_S:
                stored.pop(0)
        oldest = min((stored[0].at for stored in self._usages.values()), default=0.0)
        gone = {part for part, at in self._measured_at.items() if at < oldest}
        for stored in self._usages.values() if gone else ():
            stored[:] = [
                each._replace(pods={part: amount for part, amount in each.pods.items() if part not in gone})
                for each in stored
            ]
        self._measured_at = {part: at for part, at in self._measured_at.items() if part not in gone}

    def clear(self) -> None:
        """Drop all traces."""
        self._usages.clear()
        self._measured_at.clear()

    def latest(self, *, deleted_known: bool) -> tuple[DiskTrace, ...]:
        """One trace for each file system."""
        traces = []
        for stored in self._usages.values():
            last = stored[-1]
            recent = next((each for each in reversed(stored) if last.at - each.at >= _RECENT_S), stored[0])
            traces.append(
                DiskTrace(last.file_system.signals, _point(stored[0]), _point(recent), _point(last), deleted_known)
            )
        return tuple(traces)


def _ended_pods(before: Mapping[PodPart, DiskAmount], now: FileSystemUsage) -> dict[PodPart, DiskAmount]:
    """The amounts of the measurement before; zero for a part whose files are gone."""
    left = now.parts_left
    return {part: amount if left is None or part in left else DiskAmount(0, 0) for part, amount in before.items()}


def _point(usage: FileSystemUsage) -> DiskPoint:
    pods = usage.pods.values()
    size, inodes = sum(each.bytes for each in pods), sum(each.inodes for each in pods)
    return DiskPoint(usage.at, usage.used.bytes, size, usage.used.inodes, inodes)

"""How file systems fill, and how much of that is some pod's: from the accounts of successive walks.

What a pod held that has ended counts as it was last, as long as its files are left: they are removed some seconds
after its cgroup, or stay until its object is deleted, and must not look as if they were in no pod. From then on it
counts as nothing: what it held would hide as much that has come since and is in no pod.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from nodeagent.model import DiskPoint, DiskTrace
from nodeagent.sampling.disk.attribution import Held
from nodeagent.sampling.disk.pod_paths import PodPart
from nodeagent.sampling.disk.walk_worker import Account

# How far back a trace goes: what came before is part of the node as it is.
_LONG_S: Final = 600.0
# What is happening now: some walks, of which a large node needs seconds.
_RECENT_S: Final = 30.0
# Points that are kept are so far apart.
_STEP_S: Final = 10.0


class Traces:
    """The accounts of the last minutes."""

    def __init__(self) -> None:
        self._accounts: dict[tuple[str, ...], list[Account]] = {}
        """By the signals of the file system, oldest first."""
        self._alive: dict[PodPart, float] = {}
        """When each part was last there."""

    def add(self, accounts: Iterable[Account]) -> None:
        """Take in what a measurement found; the same one again changes nothing."""
        for account in accounts:
            kept = self._accounts.setdefault(account.wanted.signals, [])
            if kept and account.at <= kept[-1].at:
                continue
            self._alive |= dict.fromkeys(account.pods, account.at)
            before = kept[-1].pods if kept else {}
            account = account._replace(pods={**_left(before, account), **account.pods})  # noqa: PLW2901
            if len(kept) > 1 and account.at - kept[-2].at < _STEP_S:
                kept.pop()
            kept.append(account)
            while len(kept) > 1 and account.at - kept[0].at > _LONG_S:
                kept.pop(0)
        oldest = min((kept[0].at for kept in self._accounts.values()), default=0.0)
        gone = {part for part, at in self._alive.items() if at < oldest}
        for kept in self._accounts.values() if gone else ():
            kept[:] = [
                each._replace(pods={part: held for part, held in each.pods.items() if part not in gone})
                for each in kept
            ]
        self._alive = {part: at for part, at in self._alive.items() if part not in gone}

    def clear(self) -> None:
        """Forget all of it."""
        self._accounts.clear()
        self._alive.clear()

    def known(self, *, deleted_known: bool) -> tuple[DiskTrace, ...]:
        """One for each file system."""
        traces = []
        for kept in self._accounts.values():
            last = kept[-1]
            recent = next((each for each in reversed(kept) if last.at - each.at >= _RECENT_S), kept[0])
            traces.append(DiskTrace(last.wanted.signals, _point(kept[0]), _point(recent), _point(last), deleted_known))
        return tuple(traces)


def _left(before: Mapping[PodPart, Held], account: Account) -> dict[PodPart, Held]:
    """What pods held before, and hold now as far as their files are left."""
    left = account.left
    return {part: held if left is None or part in left else Held(0, 0) for part, held in before.items()}


def _point(account: Account) -> DiskPoint:
    held = Held(sum(each.bytes for each in account.pods.values()), sum(each.inodes for each in account.pods.values()))
    return DiskPoint(account.at, account.used.bytes, held.bytes, account.used.inodes, held.inodes)

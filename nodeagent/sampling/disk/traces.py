"""How file systems fill, and how much of that is some pod's: from the accounts of successive walks.

What a pod held that has gone since counts as it was last: its files go some seconds after its cgroup, or stay until its
object is deleted, and must not look as if they were in no pod.
"""

from collections.abc import Iterable
from typing import Final

from nodeagent.model import DiskPoint, DiskTrace
from nodeagent.sampling.disk.attribution import Held
from nodeagent.sampling.disk.worker import Account

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
        self._alive: dict[str, float] = {}
        """When each pod was last there."""

    def add(self, accounts: Iterable[Account]) -> None:
        """Take in what a measurement found; the same one again changes nothing."""
        for account in accounts:
            kept = self._accounts.setdefault(account.wanted.signals, [])
            if kept and account.at <= kept[-1].at:
                continue
            self._alive |= dict.fromkeys(account.pods, account.at)
            account = account._replace(pods={**(kept[-1].pods if kept else {}), **account.pods})  # noqa: PLW2901
            if len(kept) > 1 and account.at - kept[-2].at < _STEP_S:
                kept.pop()
            kept.append(account)
            while len(kept) > 1 and account.at - kept[0].at > _LONG_S:
                kept.pop(0)
        oldest = min((kept[0].at for kept in self._accounts.values()), default=0.0)
        gone = {uid for uid, at in self._alive.items() if at < oldest}
        for kept in self._accounts.values() if gone else ():
            kept[:] = [
                each._replace(pods={uid: held for uid, held in each.pods.items() if uid not in gone}) for each in kept
            ]
        self._alive = {uid: at for uid, at in self._alive.items() if uid not in gone}

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


def _point(account: Account) -> DiskPoint:
    held = Held(sum(each.bytes for each in account.pods.values()), sum(each.inodes for each in account.pods.values()))
    return DiskPoint(account.at, account.used.bytes, held.bytes, account.used.inodes, held.inodes)

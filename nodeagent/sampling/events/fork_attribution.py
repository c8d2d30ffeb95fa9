"""Which pod a process is in, for many processes at a bounded price.

Theory of operation. A process is charged to the pod of its parent, a thread to the pod of its process. That is looked
up in /proc/<pid>/cgroup, of which one costs 15 us: known ones are kept for `_KEEP_S`, and each drain looks up at most
`LOOK_UPS` others of either kind, the busiest and the latest. A fork bomb has thousands of parents of two children each:
those that were not looked up are shared out as the latest of them were found to be. A parent that is gone is charged by
its child; when that is gone, too, to `UNKNOWN`.
"""

from collections import Counter
from collections.abc import Mapping
from heapq import nlargest
from typing import Final

from nodeagent.sampling.hostfs import processes
from nodeagent.sampling.hostfs.host import Host

UNKNOWN: Final = "unknown"
"""Stands for parents that were gone, with their children, before we looked."""

LOOK_UPS: Final = 16
"""New /proc/<pid>/cgroup reads in one drain: 0.25 ms."""
_LATEST: Final = 8
"""Of those for the parents that forked last; they are the likeliest to live."""
_KEEP_S: Final = 1.0
"""A PID may be another process' after 32,768 forks, which is 1.4 s of the fastest storm; and a container's first
process is moved into its cgroup after it was forked."""
_MOST_KEPT: Final = 1024


class Origins:
    """Which pod a process is in, found with a bounded number of looks."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._kept: dict[int, tuple[str, float]] = {}

    def of(
        self, parents: list[int], children: list[int], owners: list[int], *, now: float
    ) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """(forks, threads) by origin."""
        child_of = dict(zip(parents, children, strict=True))
        return self._charged(Counter(parents), child_of, now), self._charged(Counter(owners), {}, now)

    def _charged(self, numbers: Mapping[int, int], child_of: Mapping[int, int], now: float) -> Mapping[str, int]:
        """Events of these processes by origin; those of processes that are not looked up are shared out."""
        kept, charged = self._kept, Counter[str]()
        strangers: list[int] = []
        for pid, number in numbers.items():
            known = kept.get(pid)
            if known is None or now - known[1] >= _KEEP_S:
                strangers.append(pid)
            else:
                charged[known[0]] += number
        if len(strangers) <= LOOK_UPS:
            for pid in strangers:
                charged[self._look(pid, child_of.get(pid), now)] += numbers[pid]
            return charged
        busiest = nlargest(LOOK_UPS - _LATEST, strangers, key=numbers.__getitem__)
        for pid in busiest:
            charged[self._look(pid, child_of.get(pid), now)] += numbers[pid]
        looked_up = set(busiest)
        others = [pid for pid in strangers if pid not in looked_up]
        # A Counter keeps the order of first events.
        sampled = Counter([self._look(pid, child_of.get(pid), now) for pid in others[-_LATEST:]])
        _share_out(charged, sum([numbers[pid] for pid in others]), sampled)
        return charged

    def _look(self, pid: int, child: int | None, now: float) -> str:
        place = processes.pod_uid_of_process(self._host, pid)
        if place is None:
            return UNKNOWN if child is None else processes.pod_uid_of_process(self._host, child) or UNKNOWN
        self._kept.pop(pid, None)
        while len(self._kept) >= _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[pid] = (place, now)
        return place


def _share_out(charged: Counter[str], number: int, sampled: Counter[str]) -> None:
    """Add `number` events in the proportion of `sampled`, in whole ones that sum to it."""
    size, given = sampled.total(), 0
    for place, share in sampled.items():
        charged[place] += number * share // size
        given += number * share // size
    charged[sampled.most_common(1)[0][0]] += number - given

"""Attributes forks to pods, for many processes at a bounded cost.

Theory of operation. A process counts for the pod of its parent, a thread for the pod of its process. The pod is read
from /proc/<pid>/cgroup, which costs 15 us, and cached for `_CACHE_S`. Each drain reads at most `MAX_READS` uncached
processes of either kind: the busiest and the latest. A fork bomb has thousands of parents with two children each: the
unread ones are distributed in the proportion of the latest ones. If a parent is gone, its child is read; if the child
is gone as well, the fork counts for `UNKNOWN_POD`.
"""

from collections import Counter
from collections.abc import Mapping
from heapq import nlargest
from typing import Final

from nodeagent.sampling.hostfs import processes
from nodeagent.sampling.hostfs.host import Host

UNKNOWN_POD: Final = "unknown"
"""The pod of a process that was gone, as its child was, before it was read."""

MAX_READS: Final = 16
"""Reads of /proc/<pid>/cgroup in one drain: 0.25 ms."""
_LATEST: Final = 8
"""Of these, reads for the parents that forked last: most of them are still alive."""
_CACHE_S: Final = 1.0
"""The kernel may reuse a PID after 32,768 forks, which is 1.4 s of the fastest storm. And a container runtime moves the
first process of a container into its cgroup after the fork."""
_MAX_CACHED: Final = 1024


class ForkAttribution:
    """Counts forks and threads by pod."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._cache: dict[int, tuple[str, float]] = {}

    def count_by_pod(
        self, parents: list[int], children: list[int], owners: list[int], *, now: float
    ) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """(forks, threads), each by pod cgroup UID, `processes.HOST` or `UNKNOWN_POD`. Lists as in `ForkBatch`."""
        child_of = dict(zip(parents, children, strict=True))
        return self._charge(Counter(parents), child_of, now), self._charge(Counter(owners), {}, now)

    def _charge(self, numbers: Mapping[int, int], child_of: Mapping[int, int], now: float) -> Mapping[str, int]:
        """Events of these processes by pod. The events of unread processes are distributed."""
        charged = Counter[str]()
        uncached: list[int] = []
        for pid, number in numbers.items():
            known = self._cache.get(pid)
            if known is None or now - known[1] >= _CACHE_S:
                uncached.append(pid)
            else:
                charged[known[0]] += number
        if len(uncached) <= MAX_READS:
            for pid in uncached:
                charged[self._read_pod(pid, child_of.get(pid), now)] += numbers[pid]
            return charged
        busiest = nlargest(MAX_READS - _LATEST, uncached, key=numbers.__getitem__)
        for pid in busiest:
            charged[self._read_pod(pid, child_of.get(pid), now)] += numbers[pid]
        read_pids = set(busiest)
        unread = [pid for pid in uncached if pid not in read_pids]
        # A Counter keeps the order of first events.
        sampled = Counter([self._read_pod(pid, child_of.get(pid), now) for pid in unread[-_LATEST:]])
        _distribute(charged, sum([numbers[pid] for pid in unread]), sampled)
        return charged

    def _read_pod(self, pid: int, child: int | None, now: float) -> str:
        pod = processes.pod_uid_of_process(self._host, pid)
        if pod is None:
            return UNKNOWN_POD if child is None else processes.pod_uid_of_process(self._host, child) or UNKNOWN_POD
        self._cache.pop(pid, None)
        while len(self._cache) >= _MAX_CACHED:
            del self._cache[next(iter(self._cache))]
        self._cache[pid] = (pod, now)
        return pod


def _distribute(charged: Counter[str], number: int, sampled: Counter[str]) -> None:
    """Add `number` events in the proportion of `sampled`, as integers whose sum is `number`."""
    size, rest = sampled.total(), number
    for pod, share in sampled.items():
        charged[pod] += number * share // size
        rest -= number * share // size
    charged[sampled.most_common(1)[0][0]] += rest

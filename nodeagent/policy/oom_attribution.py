"""Attributes OOM kills to pods, containers and host cgroups, with their cause.

Promises:

1. Pure. The counts of the kills sum up to the kernel's own total; what no cgroup and no log line accounts for is one
   kill of that count without a place.
2. The counters decide how many were killed and where. The kernel log names the processes, the limit and a cgroup that
   is gone; it never adds a kill that no counter has.
3. Nothing here leads to an eviction.

Cause. With a log line it is the line's: the cgroup whose limit was reached, or the node. Without one it is the nearest
cgroup, from the processes upwards, whose counter `oom` has risen: its limit was reached. If none has, the node had no
memory left.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.model import (
    LoggedKill,
    OomCause,
    OomCount,
    OomEvents,
    OomKill,
    OomLevel,
    OomPlace,
    OomProcess,
    PodView,
)

MAX_PROCESSES: Final = 16
"""Processes that one kill names."""
SHORT_ID: Final = 12
"""Characters of a container id, as crictl prints it."""


class Attribution(NamedTuple):
    """The result."""

    kills: tuple[OomKill, ...]
    unused: tuple[LoggedKill, ...]
    """Log lines of no kill that is counted yet."""
    ahead: int
    """Kills in the counters of cgroups that the total does not contain yet: it was read earlier."""


def attribute(
    total: int | None, counts: Sequence[OomCount], log: Sequence[LoggedKill], pods: Mapping[str, PodView]
) -> Attribution:
    """The kills since the last reading.

    Args:
        total: new kills of the whole node; None: not counted, so the counters of the cgroups are all.
        counts: new events of each cgroup.
        log: the kernel log since then; empty if it is not readable.
        pods: the pods of the last samples, by the UID in the cgroup's name.
    """
    work = _Work({count.place.path: count for count in counts}, list(log), pods)
    kills: list[OomKill] = []
    for count in counts:
        kills += work.own(count)
    for count in counts:
        kills += work.gone(count)
    counted = sum(kill.number for kill in kills)
    rest = 0 if total is None else max(0, total - counted)
    kills += work.logged_only(rest)
    rest -= sum(kill.number for kill in kills) - counted
    if rest:
        kills.append(OomKill(rest, OomCause.UNKNOWN, None, processes=_processes(work.take_unplaced(rest))))
    return Attribution(tuple(kills), tuple(work.log), 0 if total is None else max(0, counted - total))


class _Work:
    """The log lines that are left, and what they are compared with."""

    def __init__(self, counts: Mapping[str, OomCount], log: list[LoggedKill], pods: Mapping[str, PodView]) -> None:
        self._counts = counts
        self.log = log
        self._pods = pods

    def own(self, count: OomCount) -> list[OomKill]:
        """The kills in a cgroup that exists."""
        number = count.own.kills
        if not number:
            return []
        lines = self._take(number, lambda place: place.path == count.place.path)
        return self._by_cause(count.place, number, lines, group=bool(count.own.group_kills))

    def gone(self, count: OomCount) -> list[OomKill]:
        """The kills in children of a cgroup that no longer exist."""
        number, start = count.gone.kills, f"{count.place.path}/"
        if not number:
            return []
        group = bool(count.gone.group_kills)
        lines = self._take(number, lambda place: place.path.startswith(start) or place.path == count.place.path)
        kills: list[OomKill] = []
        for place in dict.fromkeys(line.place for line in lines if line.place is not None):
            same = [line for line in lines if line.place == place]
            kills += self._by_cause(place, len(same), same, group=group)
        left = number - len(lines)
        if left:
            missing = kills[-1].place if kills and group else None
            kills += self._by_cause(missing or self._only_missing(count), left, [], group=group, gone=count)
        return kills

    def logged_only(self, most: int) -> list[OomKill]:
        """Kills that the total contains and no cgroup: of the root, or on cgroup v1 of a cgroup that is gone."""
        lines = self._take(most, lambda _: True)
        return [
            kill
            for place in dict.fromkeys(line.place for line in lines if line.place is not None)
            for same in [[line for line in lines if line.place == place]]
            for kill in self._by_cause(place, len(same), same, group=False)
        ]

    def take_unplaced(self, most: int) -> list[LoggedKill]:
        taken = [line for line in self.log if line.place is None][:most]
        self.log = [line for line in self.log if line not in taken]
        return taken

    def _take(self, most: int, matches: Callable[[OomPlace], bool]) -> list[LoggedKill]:
        taken = [line for line in self.log if line.place is not None and matches(line.place)][:most]
        self.log = [line for line in self.log if line not in taken]
        return taken

    def _by_cause(
        self, place: OomPlace, number: int, lines: Sequence[LoggedKill], *, group: bool, gone: OomCount | None = None
    ) -> list[OomKill]:
        """One kill for each cause. What has no line gets the cause of the last line, else that of the counters."""
        pod, container = self._names(place)
        base = OomKill(0, OomCause.UNKNOWN, place, pod, container, group)
        kills: dict[tuple[OomCause, str], OomKill] = {}
        for line in lines:
            cause, limit = _logged_cause(line, place)
            before = kills.get((cause, limit), base._replace(cause=cause, limit=limit))
            kills[cause, limit] = before._replace(
                number=before.number + 1, processes=(before.processes + _processes([line]))[:MAX_PROCESSES]
            )
        left = number - len(lines)
        if left and kills:
            key = next(reversed(kills))
            kills[key] = kills[key]._replace(number=kills[key].number + left)
        elif left:
            cause, limit = self._counted_cause(place, gone)
            kills[cause, limit] = base._replace(number=left, cause=cause, limit=limit)
        return list(kills.values())

    def _counted_cause(self, place: OomPlace, gone: OomCount | None) -> tuple[OomCause, str]:
        if gone is not None and gone.gone.ooms:
            of_host = gone.place.level is OomLevel.HOST
            of_pod = gone.place.level is OomLevel.KUBEPODS
            return (OomCause.HOST_LIMIT if of_host else OomCause.POD_LIMIT if of_pod else OomCause.CONTAINER_LIMIT), ""
        path = place.path
        while path:
            count = self._counts.get(path)
            if count is not None and count.own.ooms:
                return _cause_of_limit(count.place, place), path
            path = path.rpartition("/")[0]
        known = all(count.causes_known for count in self._counts.values())
        return (OomCause.NODE if known else OomCause.UNKNOWN), ""

    def _only_missing(self, count: OomCount) -> OomPlace:
        """The child that is gone, if only one can be meant; else the parent."""
        if count.place.level is OomLevel.POD:
            view = self._pods.get(count.place.cgroup_uid)
            containers = view.usage.containers if view is not None and view.usage is not None else ()
            missing = [each.container_id for each in containers if each.container_id not in count.present]
            if len(missing) == 1:
                return OomPlace(count.place.path, OomLevel.CONTAINER, count.place.cgroup_uid, missing[0])
        elif count.place.level is OomLevel.KUBEPODS:
            start = f"{count.place.path}/"
            paths = {uid: view.usage.cgroup for uid, view in self._pods.items() if view.usage is not None}
            gone = [
                uid
                for uid, path in paths.items()
                if path.startswith(start) and "/" not in path[len(start) :] and uid not in count.present
            ]
            if len(gone) == 1:
                return OomPlace(paths[gone[0]], OomLevel.POD, gone[0])
        return count.place

    def _names(self, place: OomPlace) -> tuple[str, str]:
        """(pod, container) as people know them."""
        if not place.cgroup_uid:
            return "", ""
        view = self._pods.get(place.cgroup_uid)
        if view is None:
            return f"uid/{place.cgroup_uid}", place.container_id[:SHORT_ID]
        by_id = {each.container_id: each.name for each in view.pod.containers if each.container_id}
        if view.usage is not None:
            by_id = {each.container_id: each.name or "" for each in view.usage.containers} | by_id
        return view.pod.key, by_id.get(place.container_id) or place.container_id[:SHORT_ID]


def merge_ooms(counts: Sequence[OomCount], earlier: Mapping[OomPlace, OomEvents]) -> tuple[OomCount, ...]:
    """The counts with `oom` events that were read shortly before, without their kill: the kernel counts the limit
    first, and writes its log before it kills."""
    merged = {count.place: count for count in counts}
    for place, events in earlier.items():
        count = merged.get(place, OomCount(place, OomEvents()))
        merged[place] = count._replace(own=count.own._replace(ooms=count.own.ooms + events.ooms))
    return tuple(merged.values())


def _logged_cause(line: LoggedKill, place: OomPlace) -> tuple[OomCause, str]:
    if line.limit is not None:
        return _cause_of_limit(line.limit, place), line.limit.path
    return (OomCause.NUMA if line.numa else OomCause.NODE), ""


def _cause_of_limit(limit: OomPlace, place: OomPlace) -> OomCause:
    if limit.level is OomLevel.HOST:
        # Of a cgroup above kubepods: it bounds all pods together.
        return OomCause.HOST_LIMIT if place.level is OomLevel.HOST else OomCause.ALLOCATABLE
    return {
        OomLevel.CONTAINER: OomCause.CONTAINER_LIMIT,
        OomLevel.POD: OomCause.POD_LIMIT,
        OomLevel.KUBEPODS: OomCause.ALLOCATABLE,
    }[limit.level]


def _processes(lines: Sequence[LoggedKill]) -> tuple[OomProcess, ...]:
    return tuple(OomProcess(line.pid, line.name, line.rss, line.at) for line in lines[:MAX_PROCESSES])

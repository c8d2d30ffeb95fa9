"""Who the pods are: named by their log directories, and joined with what the API says."""

import os
from collections.abc import Mapping, Sequence

from nodeagent.lean import Final, NamedTuple
from nodeagent.model import Pod, PodSource, PodUsage, PodView
from nodeagent.sampling.cgroup import container_id
from nodeagent.sampling.host import Host, Unreadable

_RENAME_S: Final = 10.0


class PodName(NamedTuple):
    """Who a pod is, by its log directory."""

    namespace: str
    name: str


def parse_log_directory(name: str) -> tuple[str, PodName] | None:
    """(UID, who) of `<namespace>_<name>_<uid>`. None of the three can hold an underscore; the name may hold dots."""
    parts = name.split("_")
    if len(parts) != 3 or not all(parts):
        return None
    return parts[2], PodName(parts[0], parts[1])


def parse_log_link(name: str) -> tuple[str, str] | None:
    """(container id, container name) of `<pod>_<namespace>_<container>-<id>.log` in /var/log/containers."""
    if not name.endswith(".log") or name.count("_") != 2:
        return None
    container, dash, identity = name.removesuffix(".log").rpartition("_")[2].rpartition("-")
    return (identity, container) if dash and container and container_id(identity) else None


class PodNames:
    """Names of pods and containers, listed again only when there is someone new."""

    def __init__(self, host: Host, *, pod_logs_dir: str) -> None:
        self._host = host
        self._pods_dir = pod_logs_dir
        self._links_dir = f"{os.path.dirname(pod_logs_dir.rstrip('/'))}/containers"
        self.pods: dict[str, PodName] = {}
        self.containers: dict[str, str] = {}
        self.reason = ""
        """Why there are no names; empty when there are."""
        self.missed = False
        """Set by the reader of pods: some container has no name yet."""
        self._listed_for: frozenset[str] | None = None
        self._listed_at = 0.0
        self._nameless = False
        """Whether one of those had no log directory."""

    def refresh(self, uids: frozenset[str], *, now: float) -> None:
        """Look again if these are other pods than last time, or names were missing some seconds ago. The very same set
        costs nothing."""
        same = uids is self._listed_for or uids == self._listed_for
        if same and (not (self._nameless or self.missed) or now - self._listed_at < _RENAME_S):
            return
        self._listed_for, self._listed_at, self.missed = uids, now, False
        try:
            self.pods = dict(filter(None, map(parse_log_directory, self._host.listdir(self._pods_dir))))
            self.reason = ""
        except Unreadable as error:
            self.pods, self.reason = {}, str(error)
        self._nameless = not uids <= self.pods.keys()
        try:
            self.containers = dict(filter(None, map(parse_log_link, self._host.listdir(self._links_dir))))
        except Unreadable:
            self.containers = {}  # an old convenience of the kubelet: containers go by their id without it


class _Pair(NamedTuple):
    """A pod of the API that has a cgroup."""

    place: int
    """Index of its view."""
    pod: Pod
    usage: PodUsage
    """As the kernel tells it; that of the view may name containers otherwise."""
    view: PodView


class Joined(NamedTuple):
    """What was joined, and what came of it."""

    usages: Sequence[PodUsage]
    api_pods: Sequence[Pod] | None
    views: tuple[PodView, ...]
    """Every pod that either side knows, API pods first in their order."""
    pairs: Mapping[str, _Pair]
    """By `cgroup_uid`."""


def join(
    usages: Sequence[PodUsage],
    api_pods: Sequence[Pod] | None,
    *,
    names: Mapping[str, PodName],
    wall_offset: float,
    before: Joined | None = None,
) -> Joined:
    """Bring the two sides together.

    A pod of the API has the usage of the cgroup that carries its `cgroup_uid`, or None. Cgroups that the API does not
    know, or all when it was not asked (None), become pods with source HOST. `wall_offset` is wall clock minus
    CLOCK_BOOTTIME, for the start time of those. What was joined `before` is taken over where neither side changed.
    """
    if before is not None and api_pods is before.api_pods and (again := _with_usages(before, usages)) is not None:
        return again
    by_uid = {usage.cgroup_uid: usage for usage in usages}
    last = before.pairs if before is not None else {}
    pairs: dict[str, _Pair] = {}
    views: list[PodView] = []
    for pod in api_pods or ():
        usage = by_uid.pop(pod.cgroup_uid, None)
        if usage is None:
            views.append(PodView(pod, None))
            continue
        same = last.get(pod.cgroup_uid)
        if same is not None and same.pod is pod and same.usage is usage:
            view = same.view
        else:
            view = PodView(pod, _named(usage, pod))
        pairs[pod.cgroup_uid] = _Pair(len(views), pod, usage, view)
        views.append(view)
    views += [PodView(_host_pod(usage, names, wall_offset), usage) for usage in by_uid.values()]
    return Joined(usages, api_pods, tuple(views), pairs)


def _with_usages(before: Joined, usages: Sequence[PodUsage]) -> Joined | None:
    """The same pods with what they use now; None unless they are the same, and each has its cgroup and its pod."""
    if not len(usages) == len(before.usages) == len(before.pairs):
        return None
    pairs, views = dict(before.pairs), list(before.views)
    for usage, last in zip(usages, before.usages, strict=True):
        if usage is last:
            continue
        uid = usage.cgroup_uid
        pair = pairs.get(uid)
        if pair is None or uid != last.cgroup_uid:
            return None
        place, pod, _, view = pair
        if usage.containers is last.containers and view.usage is last:
            view = PodView(pod, usage)  # whose names were right
        else:
            view = PodView(pod, _named(usage, pod))
        pairs[uid] = _Pair(place, pod, usage, view)
        views[place] = view
    return Joined(usages, before.api_pods, tuple(views), pairs)


def _named(usage: PodUsage, pod: Pod) -> PodUsage:
    """The usage with the containers' names as the API has them."""
    names = {container.container_id: container.name for container in pod.containers if container.container_id}
    if all(names.get(known.container_id, known.name) == known.name for known in usage.containers):
        return usage
    renamed = (known._replace(name=names.get(known.container_id, known.name)) for known in usage.containers)
    return usage._replace(containers=tuple(renamed))


def _host_pod(usage: PodUsage, names: Mapping[str, PodName], wall_offset: float) -> Pod:
    who = names.get(usage.cgroup_uid)
    return Pod(
        uid=usage.cgroup_uid,
        cgroup_uid=usage.cgroup_uid,
        namespace=who.namespace if who else None,
        name=who.name if who else None,
        source=PodSource.HOST,
        qos_class=usage.qos_class,
        started_wall=None if usage.started_at is None else usage.started_at + wall_offset,
    )

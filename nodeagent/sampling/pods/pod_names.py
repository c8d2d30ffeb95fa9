"""Who the pods are: named by their log directories, and joined with what the API says.

A cgroup belongs to the pod whose metadata.uid it carries. Of all pods only a mirror pod may have the cgroup of another
UID, that of its static pod, and its own object is the only one to say so: `confirm_mirrors` decides by what the host
shows, so that no annotation takes a pod's cgroup away from it.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Final, NamedTuple

from nodeagent.model import Pod, PodSource, PodUsage, PodView
from nodeagent.sampling.hostfs.cgroups import container_id
from nodeagent.sampling.hostfs.host import Host, Unreadable

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


class Mirrors:
    """Mirror pods as the host confirms them. The same objects get the same answer, object by object."""

    def __init__(self) -> None:
        self._asked: tuple[Sequence[Pod], Set[str], Mapping[str, PodName]] | None = None
        self._answer: Sequence[Pod] = ()
        self._joined: dict[str, tuple[Pod, Pod]] = {}
        """By metadata.uid: a pod as the API has it, and as it was answered."""

    def confirm(self, pods: Sequence[Pod], *, uids: Set[str], names: Mapping[str, PodName]) -> Sequence[Pod]:
        """`confirm_mirrors`, computed once for the same arguments."""
        asked = self._asked
        if asked is None or asked[0] is not pods or asked[1] is not uids or asked[2] is not names:
            before, self._joined = self._joined, {}
            answer = [
                pod if new is pod else self._kept(before, pod, new)
                for pod, new in zip(pods, confirm_mirrors(pods, uids=uids, names=names), strict=True)
            ]
            self._asked, self._answer = (pods, uids, names), answer if self._joined else pods
        return self._answer

    def _kept(self, before: Mapping[str, tuple[Pod, Pod]], pod: Pod, new: Pod) -> Pod:
        last = before.get(pod.uid)
        same = last is not None and last[0] is pod and last[1] == new
        _, answered = self._joined[pod.uid] = last if last is not None and same else (pod, new)
        return answered


def confirm_mirrors(pods: Sequence[Pod], *, uids: Set[str], names: Mapping[str, PodName]) -> Sequence[Pod]:
    """The pods, each mirror pod with the cgroup of its static pod, or as an ordinary pod where it cannot be one.

    `uids` are those of all pod cgroups, `names` what the log directories call them. A mirror pod has no cgroup of its
    own; no pod of the API has the UID that it names; the log directory of that UID has its name, which nobody but the
    kubelet writes, or the UID is a kubelet's hash where no directory can be read; and it is the only one to name it.
    What is not confirmed takes no cgroup: the cgroup then is that of a pod which only the host knows, and the object
    that of a pod which is not running. Neither can be evicted.
    """
    claims = [pod for pod in pods if pod.mirror_of]
    if not claims:
        return pods
    real = {pod.uid for pod in pods}
    possible = [pod for pod in claims if pod.uid not in uids and pod.mirror_of not in real and _is_named(pod, names)]
    count = Counter(pod.mirror_of for pod in possible)
    confirmed = {pod.uid for pod in possible if count[pod.mirror_of] == 1}
    return [_as_joined(pod, confirmed) if pod.mirror_of else pod for pod in pods]


def _is_named(pod: Pod, names: Mapping[str, PodName]) -> bool:
    """Whether the log directory of the static pod's UID has the name of this pod. Where none can be read, whether the
    UID is one that no API server gives: another pod, which the view of the API may lack, has none of these."""
    if not names:
        return not _by_api_server(pod.mirror_of)
    return names.get(pod.mirror_of) == PodName(pod.namespace or "", pod.name or "")


def _by_api_server(uid: str) -> bool:
    """The API server gives UIDs with dashes; a kubelet gives the MD5 of the manifest in hex (KUBELET-CONTRACT 13)."""
    return "-" in uid


def _as_joined(pod: Pod, confirmed: Set[str]) -> Pod:
    return pod._replace(cgroup_uid=pod.mirror_of) if pod.uid in confirmed else pod._replace(mirror_of="")


class _Pair(NamedTuple):
    """A pod of the API that has a cgroup."""

    place: int
    """Index of its view."""
    pod: Pod
    usage: PodUsage
    """As the kernel tells it; that of the view may name containers otherwise."""
    view: PodView


class JoinedPods(NamedTuple):
    """What was joined, and what came of it."""

    usages: Sequence[PodUsage]
    api_pods: Sequence[Pod] | None
    views: tuple[PodView, ...]
    """Every pod that either side knows, API pods first in their order."""
    pairs: Mapping[str, _Pair]
    """By `cgroup_uid`."""


def join_pods(
    usages: Sequence[PodUsage],
    api_pods: Sequence[Pod] | None,
    *,
    names: Mapping[str, PodName],
    wall_offset: float,
    before: JoinedPods | None = None,
) -> JoinedPods:
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
    return JoinedPods(usages, api_pods, tuple(views), pairs)


def _with_usages(before: JoinedPods, usages: Sequence[PodUsage]) -> JoinedPods | None:
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
    return JoinedPods(usages, before.api_pods, tuple(views), pairs)


def _named(usage: PodUsage, pod: Pod) -> PodUsage:
    """The usage with the containers' names as the API has them."""
    names = {container.container_id: container.name for container in pod.containers if container.container_id}
    if all(names.get(known.container_id, known.name) == known.name for known in usage.containers):
        return usage
    renamed = (known._replace(name=names.get(known.container_id, known.name)) for known in usage.containers)
    return usage._replace(containers=tuple(renamed))


def _host_pod(usage: PodUsage, names: Mapping[str, PodName], wall_offset: float) -> Pod:
    who = names.get(usage.cgroup_uid)
    static = "" if _by_api_server(usage.cgroup_uid) else "cgroup"
    return Pod(
        uid=usage.cgroup_uid,
        cgroup_uid=usage.cgroup_uid,
        namespace=who.namespace if who else None,
        name=who.name if who else None,
        source=PodSource.HOST,
        qos_class=usage.qos_class,
        started_wall=None if usage.started_at is None else usage.started_at + wall_offset,
        static=static,
    )

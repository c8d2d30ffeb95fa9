"""Joins the cgroups of the host with the pods of the API server.

A cgroup belongs to the pod whose metadata.uid is in its name. Only a mirror pod may have the cgroup of another UID,
that of its static pod, and only the mirror pod's own object, which a tenant may forge, names that UID.
`confirm_mirrors` checks the claim against the host, so that no annotation takes a cgroup away from its pod.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from nodeagent.model import Pod, PodSource, PodUsage, PodView
from nodeagent.sampling.pods.pod_names import PodName


class MirrorPods:
    """Confirmed mirror pods. The same objects give the same result, object by object."""

    def __init__(self) -> None:
        self._inputs: tuple[Sequence[Pod], Set[str], Mapping[str, PodName]] | None = None
        self._result: Sequence[Pod] = ()
        self._changed: dict[str, tuple[Pod, Pod]] = {}
        """By metadata.uid: a pod as the API server lists it, and as it was returned."""

    def confirm(self, pods: Sequence[Pod], *, uids: Set[str], names: Mapping[str, PodName]) -> Sequence[Pod]:
        """`confirm_mirrors`, computed once for the same arguments."""
        inputs = self._inputs
        if inputs is None or inputs[0] is not pods or inputs[1] is not uids or inputs[2] is not names:
            before, self._changed = self._changed, {}
            result = [
                pod if new is pod else self._same_object(before, pod, new)
                for pod, new in zip(pods, confirm_mirrors(pods, uids=uids, names=names), strict=True)
            ]
            self._inputs, self._result = (pods, uids, names), result if self._changed else pods
        return self._result

    def _same_object(self, before: Mapping[str, tuple[Pod, Pod]], pod: Pod, new: Pod) -> Pod:
        last = before.get(pod.uid)
        unchanged = last is not None and last[0] is pod and last[1] == new
        _, result = self._changed[pod.uid] = last if last is not None and unchanged else (pod, new)
        return result


def confirm_mirrors(pods: Sequence[Pod], *, uids: Set[str], names: Mapping[str, PodName]) -> Sequence[Pod]:
    """The pods, each mirror pod with the cgroup of its static pod, or as an ordinary pod if the claim is wrong.

    A claim is right if all of this holds: the mirror pod has no cgroup of its own; the API server lists no pod with the
    UID that it names; the log directory of that UID, which only the kubelet makes, has the mirror pod's name, or no log
    directory can be read and the UID is a kubelet's hash; no other mirror pod names the same UID.

    An unconfirmed claim takes no cgroup: the cgroup belongs to a pod with source HOST, and the object is a pod
    that does not run. Neither can be evicted.

    Args:
        uids: the UIDs of all pod cgroups.
        names: the names of the log directories, by UID.
    """
    claims = [pod for pod in pods if pod.mirror_of]
    if not claims:
        return pods
    listed = {pod.uid for pod in pods}
    possible = [pod for pod in claims if pod.uid not in uids and pod.mirror_of not in listed and _is_named(pod, names)]
    count = Counter(pod.mirror_of for pod in possible)
    confirmed = {pod.uid for pod in possible if count[pod.mirror_of] == 1}
    return [_judged(pod, confirmed) if pod.mirror_of else pod for pod in pods]


def _is_named(pod: Pod, names: Mapping[str, PodName]) -> bool:
    """True if the log directory of the static pod's UID has the name of this pod. Without log directories, true if the
    UID is none that an API server assigns: so it is no other pod that the API view lacks."""
    if not names:
        return not _is_from_api_server(pod.mirror_of)
    return names.get(pod.mirror_of) == PodName(pod.namespace or "", pod.name or "")


def _is_from_api_server(uid: str) -> bool:
    """An API server assigns UIDs with dashes; a kubelet uses the MD5 of the manifest in hex (KUBELET-CONTRACT 13)."""
    return "-" in uid


def _judged(pod: Pod, confirmed: Set[str]) -> Pod:
    return pod._replace(cgroup_uid=pod.mirror_of) if pod.uid in confirmed else pod._replace(mirror_of="")


class _Pair(NamedTuple):
    """A pod of the API server that has a cgroup."""

    position: int
    """Of its view."""
    pod: Pod
    usage: PodUsage
    """As it was read; the usage of the view may have other container names."""
    view: PodView


class JoinedPods(NamedTuple):
    """The result of a join, and its inputs."""

    usages: Sequence[PodUsage]
    api_pods: Sequence[Pod] | None
    views: tuple[PodView, ...]
    """Every pod that either side has, those of the API server first, in their order."""
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
    """Join both sides.

    A pod of the API server has the usage of the cgroup with its `cgroup_uid`, or None. Each other cgroup becomes a pod
    with source HOST.

    Args:
        api_pods: None: the pods are not listed, so every cgroup becomes a pod with source HOST.
        names: by UID, for those pods.
        wall_offset: wall clock minus CLOCK_BOOTTIME, for their start times.
        before: the last result, which is reused where neither side changed.
    """
    if before is not None and api_pods is before.api_pods and (same := _with_usages(before, usages)) is not None:
        return same
    by_uid = {usage.cgroup_uid: usage for usage in usages}
    last_pairs = before.pairs if before is not None else {}
    pairs: dict[str, _Pair] = {}
    views: list[PodView] = []
    for pod in api_pods or ():
        usage = by_uid.pop(pod.cgroup_uid, None)
        if usage is None:
            views.append(PodView(pod, None))
            continue
        last = last_pairs.get(pod.cgroup_uid)
        if last is not None and last.pod is pod and last.usage is usage:
            view = last.view
        else:
            view = PodView(pod, _with_api_names(usage, pod))
        pairs[pod.cgroup_uid] = _Pair(len(views), pod, usage, view)
        views.append(view)
    views += [PodView(_host_pod(usage, names, wall_offset), usage) for usage in by_uid.values()]
    return JoinedPods(usages, api_pods, tuple(views), pairs)


def _with_usages(before: JoinedPods, usages: Sequence[PodUsage]) -> JoinedPods | None:
    """The same pods with these usages; None unless the pods are the same, and each has a cgroup and an API object."""
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
        position, pod, _, view = pair
        if usage.containers is last.containers and view.usage is last:
            view = PodView(pod, usage)  # the names were right
        else:
            view = PodView(pod, _with_api_names(usage, pod))
        pairs[uid] = _Pair(position, pod, usage, view)
        views[position] = view
    return JoinedPods(usages, before.api_pods, tuple(views), pairs)


def _with_api_names(usage: PodUsage, pod: Pod) -> PodUsage:
    """The usage with the container names of the API server."""
    names = {container.container_id: container.name for container in pod.containers if container.container_id}
    if all(names.get(container.container_id, container.name) == container.name for container in usage.containers):
        return usage
    renamed = [
        container._replace(name=names.get(container.container_id, container.name)) for container in usage.containers
    ]
    return usage._replace(containers=tuple(renamed))


def _host_pod(usage: PodUsage, names: Mapping[str, PodName], wall_offset: float) -> Pod:
    name = names.get(usage.cgroup_uid)
    static = "" if _is_from_api_server(usage.cgroup_uid) else "cgroup"
    return Pod(
        uid=usage.cgroup_uid,
        cgroup_uid=usage.cgroup_uid,
        namespace=name.namespace if name else None,
        name=name.name if name else None,
        source=PodSource.HOST,
        qos_class=usage.qos_class,
        started_wall=None if usage.started_at is None else usage.started_at + wall_offset,
        static=static,
    )

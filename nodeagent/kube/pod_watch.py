"""The pods of this node as the API has them: one list for a report, a list and watch for the daemon.

Promises:

1. Only what decisions need is kept: memory does not grow with the number of events.
2. A pod that cannot be read is left out with a note, so that it stands as a pod which only the host knows (and which is
   protected); its neighbours are not affected.
3. The view says how old it is (`synced_at`) and what is wrong; whoever acts on it decides whether that is too old.
"""

import functools
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

import msgspec

from nodeagent.config import quantity
from nodeagent.kube import objects, placement
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.list_stream import Listing
from nodeagent.kube.list_watch import IDLE_S, WATCH_S, ListWatch
from nodeagent.kube.qos import qos_class
from nodeagent.kube.timestamps import boottime
from nodeagent.kube.transport import Transport
from nodeagent.model import (
    NO_RESOURCES,
    Container,
    ContainerKind,
    EmptyDir,
    Note,
    NoteKind,
    Owner,
    Pod,
    PodSource,
    QOSClass,
    Resources,
)

MIRROR: Final = "kubernetes.io/config.mirror"
"""On a mirror pod the UID that the static pod's cgroup and log directory carry, elsewhere what its author wrote."""
HASH: Final = "kubernetes.io/config.hash"
"""The UID of a static pod: the hash of its manifest, or the manifest's metadata.uid."""
SOURCE: Final = "kubernetes.io/config.source"
"""Set by a kubelet in its own list. The API server stores what a pod's author wrote."""
KEPT_ANNOTATIONS: Final = ("controller.kubernetes.io/pod-deletion-cost",)
KEPT_PREFIX: Final = "nodeagent.io/"
DEFAULT_GRACE_S: Final = 30.0
"""What the API server sets when terminationGracePeriodSeconds is left out."""
MOST_TEXT: Final = 16 << 10
"""Characters of labels that are kept of a pod, and of annotations; etcd would hold 1.5 MiB of them. What does not fit
does not count: a budget that selects by it is the API server's to know, and a wish of that size is none."""
MOST_PARTS: Final = 256
"""Containers of a kind, and volumes, that are kept of a pod: of 10,000 (1.2 MB in etcd) each pod would cost 8 MiB. The
rest counts as not asked for, which makes a pod no smaller."""
RELIST_S: Final = 2.0
"""Shortest time between two lists because a pod is missing. The wait doubles for each pod that stays missing (an
orphan's cgroup, a static pod that no API server lists), up to `RELIST_MAX_S`."""
RELIST_MAX_S: Final = 300.0
SPREAD_S: Final = 1.0
"""A missing pod is asked for after a random part of this: a DaemonSet starts a pod on all nodes of a fleet at once, and
an API server that is late with telling of them is not to be listed from all nodes in the same moment."""
_GONE: Final = 256
"""Deleted pods that are remembered."""
GONE_S: Final = 10.0
"""For how long a deleted pod is not missed: its cgroup stays for a moment after its object. One that stays for longer
may be a pod that a wrong answer took from the view, and only a list brings it back."""
_NOTES: Final = 20
"""Notes about unreadable pods that are kept; a broken webhook can spoil every pod of a node at once."""

_pod_decoder = objects.Decoder(objects.PodObject)
_meta_decoder = objects.Decoder(objects.MetaOnly)


class PodsView(NamedTuple):
    """The pods of this node as last heard of."""

    pods: tuple[Pod, ...]
    synced_at: float | None
    """CLOCK_BOOTTIME at which this was last known to be current; None: never."""
    reason: str
    """What is wrong with the connection now; empty when nothing is."""
    notes: tuple[Note, ...] = ()
    """Pods that could not be read."""
    lost_at: float | None = None
    """CLOCK_BOOTTIME since when the API server has answered nothing (`transport.Reach`); None while it does."""
    awaited: bool = True
    """Whether there is an API server that may tell of them."""


def list_pods(transport: Transport, node_name: str, *, keep_annotations: Sequence[str] = ()) -> PodsView:
    """The node's pods, once, from the server's cache. Raises `ApiError`."""
    asked_at = boottime()
    store = _Store(keep_annotations)
    query = {"fieldSelector": f"spec.nodeName={node_name}", "resourceVersion": "0"}
    store.replace(map(msgspec.Raw, Listing(transport, "/api/v1/pods", query)))
    return PodsView(store.pods(), asked_at, "", store.notes())


class _Missing(NamedTuple):
    """A pod that the view lacks."""

    ask_at: float
    wait_s: float = RELIST_S


class PodWatch:
    """The node's pods, kept current by a thread."""

    def __init__(
        self,
        transport: Transport,
        node_name: str,
        *,
        wake: Callable[[], None] = lambda: None,
        keep_annotations: Sequence[str] = (),
        clock: Callable[[], float] = boottime,
        idle_s: float = IDLE_S,
        watch_s: float = WATCH_S,
        backoff: RetryBackoff | None = None,
    ) -> None:
        """`wake` is called, from the thread, whenever the view has changed. `keep_annotations` are further keys that a
        decision looks at (the configuration's `protection.annotations`)."""
        self._store = _Store(keep_annotations, wake=wake, clock=clock)
        self._watch = ListWatch(
            transport,
            "/api/v1/pods",
            self._store,
            field_selector=f"spec.nodeName={node_name}",
            name="pods",
            clock=clock,
            idle_s=idle_s,
            watch_s=watch_s,
            backoff=backoff,
        )
        self._clock = clock
        self._rng = random.Random()  # noqa: S311 - spreads load, guards nothing
        self._missing: dict[str, _Missing] = {}
        self._relisted_at = float("-inf")

    def start(self) -> None:
        """Begin to list and watch; returns at once."""
        self._watch.start()

    def stop(self) -> None:
        """End the watch."""
        self._watch.stop()

    def lacks(self, cgroup_uids: frozenset[str]) -> None:
        """The node runs these pods and the view has none of them: list again, unless they were just seen deleted. That
        is done at most every `RELIST_S`, and ever more rarely for a pod that no list has. Returns at once; called by
        one thread."""
        missing = self._store.never_seen(cgroup_uids) if cgroup_uids else cgroup_uids
        if not missing:
            self._missing = {}
            return
        now = self._clock()
        self._missing = {
            uid: self._missing.get(uid) or _Missing(now + self._rng.uniform(0.0, SPREAD_S)) for uid in missing
        }
        due = [uid for uid, each in self._missing.items() if each.ask_at <= now]
        if not due or now < self._relisted_at + RELIST_S:
            return
        self._relisted_at = now
        for uid in due:
            wait_s = min(RELIST_MAX_S, self._missing[uid].wait_s * 2.0)
            self._missing[uid] = _Missing(now + wait_s * self._rng.uniform(1.0, 1.5), wait_s)
        self._watch.relist()

    def view(self) -> PodsView:
        """What is known now; never waits for the API."""
        synced_at = self._watch.synced_at
        return PodsView(self._store.pods(), synced_at, self._watch.reason, self._store.notes())

    @property
    def failures(self) -> int:
        """Failed lists and broken watches since the start."""
        return self._watch.failures

    @property
    def relists(self) -> int:
        """Lists since the start."""
        return self._watch.relists


class _Store:
    """The pods by UID. Written by one thread, read by any."""

    def __init__(
        self,
        keep_annotations: Sequence[str],
        *,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = boottime,
    ) -> None:
        # `key=value` is how the configuration may write a protection; the key is what has to be kept.
        self._keep = frozenset((*KEPT_ANNOTATIONS, *(entry.partition("=")[0] for entry in keep_annotations)))
        self._wake = wake
        self._clock = clock
        self._lock = threading.Lock()
        self._pods: dict[str, Pod] = {}
        self._notes: dict[str, Note] = {}
        self._gone: dict[str, float] = {}
        """When pods were deleted, by UID, also those of their cgroups; the last one last."""
        self._view: tuple[Pod, ...] | None = ()

    def replace(self, items: Iterable[msgspec.Raw]) -> None:
        pods: dict[str, Pod] = {}
        notes: dict[str, Note] = {}
        for item in items:
            self._put(item, pods, notes)
        with self._lock:
            for uid in self._pods.keys() - pods.keys():
                self._bury(self._pods[uid])
            self._pods, self._notes, self._view = pods, notes, None

    def apply(self, kind: str, item: msgspec.Raw) -> None:
        with self._lock:
            if kind == "DELETED":
                uid = _identity(item).uid
                if (pod := self._pods.pop(uid, None)) is not None:
                    self._bury(pod)
                self._notes.pop(uid, None)
            else:
                self._put(item, self._pods, self._notes)
            self._view = None

    def _bury(self, pod: Pod) -> None:
        now = self._clock()
        for uid in filter(None, (pod.uid, pod.cgroup_uid, pod.mirror_of)):
            self._gone.pop(uid, None)
            self._gone[uid] = now
        while len(self._gone) > _GONE:
            del self._gone[next(iter(self._gone))]

    def never_seen(self, cgroup_uids: frozenset[str]) -> frozenset[str]:
        """Those that are not here, were not deleted just now, and are not among the unreadable ones."""
        since = self._clock() - GONE_S
        with self._lock:
            gone = {uid for uid, at in self._gone.items() if at > since}
            return frozenset([uid for uid in cgroup_uids if not any(uid in x for x in (self._pods, gone, self._notes))])

    def changed(self) -> None:
        self._wake()

    def pods(self) -> tuple[Pod, ...]:
        with self._lock:
            if self._view is None:
                self._view = tuple(self._pods.values())
            return self._view

    def notes(self) -> tuple[Note, ...]:
        with self._lock:
            return tuple(self._notes.values())

    def _put(self, item: msgspec.Raw, pods: dict[str, Pod], notes: dict[str, Note]) -> None:
        try:
            pod = decode_pod(item, keep=self._keep)
        except Exception as error:  # whatever is the matter with it: its neighbours are not affected
            meta = _identity(item)
            pods.pop(meta.uid, None)
            if len(notes) < _NOTES:
                name = f"{meta.namespace}/{meta.name}" if meta.name else "a pod"
                notes[meta.uid or name] = Note(
                    NoteKind.POD, f"the API server lists it, but it cannot be decoded: {error}", about=name
                )
            return
        notes.pop(pod.uid, None)
        pods[pod.uid] = pod


def _identity(item: msgspec.Raw) -> objects.Meta:
    try:
        return _meta_decoder.decode(item).metadata
    except objects.UnreadableError:
        return objects.Meta()


# --- one pod ---------------------------------------------------------------------------------------------------------


def decode_pod(item: msgspec.Raw | bytes, *, keep: frozenset[str] = frozenset(KEPT_ANNOTATIONS)) -> Pod:
    """A pod from its JSON. Raises ValueError (`objects.UnreadableError`) when a field is not what it must be."""
    raw = _pod_decoder.decode(item)
    meta, spec, status = raw.metadata, raw.spec, raw.status
    if not meta.uid:
        raise ValueError("it has no UID")
    annotations = _bounded(
        (key, value) for key, value in (meta.annotations or {}).items() if key in keep or key.startswith(KEPT_PREFIX)
    )
    owner = _controller(meta)
    pod_level = spec.resources
    pod = Pod(
        uid=meta.uid,
        cgroup_uid=meta.uid,
        namespace=meta.namespace or None,
        name=meta.name or None,
        source=PodSource.API,
        qos_class=QOSClass(status.qos_class or QOSClass.BEST_EFFORT),
        priority=spec.priority,
        priority_class=spec.priority_class_name,
        phase=status.phase,
        resource_version=meta.resource_version,
        created_wall=_epoch(meta.creation_timestamp),
        started_wall=_epoch(status.start_time),
        deletion_wall=_epoch(meta.deletion_timestamp),
        deletion_grace_s=_seconds(meta.deletion_grace_period_seconds),
        termination_grace_s=DEFAULT_GRACE_S
        if (grace := spec.termination_grace_period_seconds) is None
        else float(grace),
        containers=_containers(spec, status),
        pod_requests=None if pod_level is None else _resources(pod_level.requests),
        pod_limits=None if pod_level is None else _resources(pod_level.limits),
        overhead=_resources(spec.overhead),
        resize_infeasible=_resize_infeasible(status),
        ephemeral=bool(spec.ephemeral_containers),
        host_pid=spec.host_pid,
        owner=None if owner is None else Owner(owner.kind, owner.name, owner.uid, owner.api_version),
        labels=_bounded((meta.labels or {}).items()),
        annotations=annotations,
        ready=any(c.type == "Ready" and c.status == "True" for c in status.conditions or ()),
        node_bound=placement.node_bound(raw),
        claims=tuple(
            v.persistent_volume_claim.claim_name
            for v in (spec.volumes or ())[:MOST_PARTS]
            if v.persistent_volume_claim is not None
        ),
        empty_dirs=tuple(
            EmptyDir(v.name, v.empty_dir.medium == "Memory", _whole(v.empty_dir.size_limit))
            for v in (spec.volumes or ())[:MOST_PARTS]
            if v.empty_dir is not None
        ),
        static=_static(meta),
        mirror_of=_mirror_of(meta, spec.node_name),
    )
    # An API server has set it in every pod since 1.9.
    return pod if status.qos_class else pod._replace(qos_class=qos_class(pod))


def _controller(meta: objects.Meta) -> objects.OwnerReference | None:
    return next((o for o in meta.owner_references or () if o.controller), None)


def _static(meta: objects.Meta) -> str:
    """The source of a static pod in a kubelet's own list (`/pods`); empty for a pod that an API server stores.

    Anybody may write the annotations, but only a kubelet lists a pod without a resourceVersion whose UID is its hash.
    """
    annotations = meta.annotations or {}
    source = annotations.get(SOURCE, "")
    by_kubelet = not meta.resource_version and annotations.get(HASH) == meta.uid
    return source if by_kubelet and source != "api" else ""


def _mirror_of(meta: objects.Meta, node_name: str) -> str:
    """The UID of the static pod that this object claims to mirror, if all of it is as a kubelet writes it: the Node as
    controller (admission plugin NodeRestriction asks for it), both hashes equal. Else empty.

    The garbage collector removes a pod whose owner does not exist, so that a forged reference needs the Node's UID.
    `sampling.who.confirm_mirrors` asks the host for the rest.
    """
    annotations = meta.annotations or {}
    owner, claimed = _controller(meta), annotations.get(MIRROR, "")
    if owner is None or (owner.api_version, owner.kind, owner.name) != ("v1", "Node", node_name):
        return ""
    return claimed if claimed == annotations.get(HASH) else ""


def with_mirrors_of(pods: tuple[Pod, ...], node_uid: str) -> tuple[Pod, ...]:
    """The pods; a mirror pod of another Node object, such as an earlier one of the same name, is no mirror pod here.
    The same tuple when there is none."""
    foreign = [bool(pod.mirror_of) and (pod.owner is None or pod.owner.uid != node_uid) for pod in pods]
    if not any(foreign):
        return pods
    return tuple([pod._replace(mirror_of="") if other else pod for pod, other in zip(pods, foreign, strict=True)])


def _bounded(texts: Iterable[tuple[str, str]]) -> dict[str, str]:
    """As many of them as fit into `MOST_TEXT`, in their order."""
    kept: dict[str, str] = {}
    left = MOST_TEXT
    for key, value in texts:
        left -= len(key) + len(value)
        if left < 0:
            break
        kept[key] = value
    return kept


def _containers(spec: objects.PodSpec, status: objects.PodStatus) -> tuple[Container, ...]:
    states = {s.name: s for s in (*(status.init_container_statuses or ()), *(status.container_statuses or ()))}
    found = [_container(c, ContainerKind.REGULAR, states.get(c.name)) for c in (spec.containers or ())[:MOST_PARTS]]
    for c in (spec.init_containers or ())[:MOST_PARTS]:
        kind = ContainerKind.SIDECAR if c.restart_policy == "Always" else ContainerKind.INIT
        found.append(_container(c, kind, states.get(c.name)))
    return tuple(found)


def _container(spec: objects.ContainerSpec, kind: ContainerKind, status: objects.ContainerStatus | None) -> Container:
    wanted = spec.resources or objects.ResourceRequirements()
    container = Container(spec.name, kind, requests=_resources(wanted.requests), limits=_resources(wanted.limits))
    if status is None:
        return container
    actual = status.resources
    return container._replace(
        allocated=None if status.allocated_resources is None else _resources(status.allocated_resources),
        # `resources: {}` is what a container without any has: reported, and empty.
        actual=None if actual is None else _resources(actual.requests),
        actual_limits=None if actual is None else _resources(actual.limits),
        container_id=status.container_id.partition("://")[2],
        restart_count=status.restart_count,
        running=status.state is not None and status.state.running is not None,
    )


def _resources(amounts: Mapping[str, str | int] | None) -> Resources:
    if not amounts:
        return NO_RESOURCES
    return Resources(
        cpu_milli=_milli(amounts.get("cpu")),
        memory=_whole(amounts.get("memory")),
        ephemeral_storage=_whole(amounts.get("ephemeral-storage")),
        others=any(name not in ("cpu", "memory", "ephemeral-storage") for name in amounts),
    )


# The same few quantities stand in every pod of a cluster.
@functools.lru_cache(maxsize=1024)
def _whole(amount: str | int | None) -> int | None:
    return None if amount is None else quantity.parse_quantity(str(amount))


@functools.lru_cache(maxsize=1024)
def _milli(amount: str | int | None) -> int | None:
    return None if amount is None else quantity.parse_milli(str(amount))


def _resize_infeasible(status: objects.PodStatus) -> bool:
    """The condition since 1.33, the field before."""
    return status.resize == "Infeasible" or any(
        c.type == "PodResizePending" and c.reason == "Infeasible" for c in status.conditions or ()
    )


def _epoch(moment: datetime | None) -> float | None:
    if moment is None:
        return None
    if moment.tzinfo is None:
        raise ValueError("a timestamp has no time zone")
    return moment.timestamp()


def _seconds(count: int | None) -> float | None:
    return None if count is None else float(count)

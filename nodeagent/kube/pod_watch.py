"""The pods of this node in the API server: one list for a report, list and watch for the agent.

Promises:

1. Only what decisions need is kept: memory does not grow with the number of events.
2. An unreadable pod is left out, with a note. It then counts as a pod that only the host shows, which is protected.
   Other pods are not affected.
3. The view has its age (`synced_at`) and its trouble; the caller decides whether it is too old.
"""

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from nodeagent.kube import list_watch, objects, pod_decoder
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.list_stream import Listing
from nodeagent.kube.list_watch import ListWatch
from nodeagent.kube.transport import Transport
from nodeagent.model import Note, NoteKind, Pod
from nodeagent.runtime import clock

RELIST_S: Final = 2.0
"""Least time between two lists because of a missing pod. The wait doubles for each pod that stays missing (an orphan's
cgroup, a static pod that no API server lists), up to `RELIST_MAX_S`."""
RELIST_MAX_S: Final = 300.0
SPREAD_S: Final = 1.0
"""A missing pod causes a list after a random part of this: a DaemonSet starts a pod on all nodes at once, and they must
not list together when the API server is late."""
_MAX_DELETED: Final = 256
"""Deleted pods that are stored."""
DELETED_S: Final = 10.0
"""A deleted pod does not count as missing for so long: its cgroup outlives its object by a moment. If it stays for
longer, a wrong answer may have removed the pod from the view, and only a list brings it back."""
_MAX_NOTES: Final = 20
"""Notes about unreadable pods; a broken webhook can make every pod of a node unreadable."""

_meta_decoder = objects.Decoder(objects.MetaOnly)


class PodsView(NamedTuple):
    """The pods of this node at the last event."""

    pods: tuple[Pod, ...]
    synced_at: float | None
    """CLOCK_BOOTTIME of the last time at which this was current; None: never."""
    reason: str
    """The trouble with the connection now; empty if there is none."""
    notes: tuple[Note, ...] = ()
    """Pods that could not be read."""
    unreachable_since: float | None = None
    """CLOCK_BOOTTIME since when the API server is unreachable (`ApiReachability`); None while it answers."""
    awaited: bool = True
    """False without an API server: no list will come."""
    allocatable_memory: int | None = None
    """Of the Node object, in bytes; None: not known."""
    unused_images: int | None = None
    """Bytes of the node's images that no pod uses; None: not known."""


def list_pods(transport: Transport, node_name: str, *, keep_annotations: Sequence[str] = ()) -> PodsView:
    """The node's pods by one list from the server's cache. Raises `ApiError`."""
    sent_at = clock.boottime()
    store = _Store(keep_annotations)
    query = {"fieldSelector": f"spec.nodeName={node_name}", "resourceVersion": "0"}
    store.replace(map(msgspec.Raw, Listing(transport, "/api/v1/pods", query)))
    return PodsView(store.pods(), sent_at, "", store.notes())


class _Missing(NamedTuple):
    """A pod of the node that the view does not contain."""

    list_at: float
    """CLOCK_BOOTTIME of the next list because of it."""
    wait_s: float = RELIST_S


class PodWatch:
    """The node's pods, by list and watch in a thread."""

    def __init__(
        self,
        transport: Transport,
        node_name: str,
        *,
        wake: Callable[[], None] = lambda: None,
        keep_annotations: Sequence[str] = (),
        clock: Callable[[], float] = clock.boottime,
        idle_s: float = list_watch.IDLE_S,
        watch_s: float = list_watch.WATCH_S,
        backoff: RetryBackoff | None = None,
    ) -> None:
        """`wake` is called from the thread after each change of the view. `keep_annotations`: further keys that a
        decision reads (the configuration's `protection.annotations`)."""
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
        """Start to list and watch; returns at once."""
        self._watch.start()

    def stop(self) -> None:
        """End the watch."""
        self._watch.stop()

    def report_missing(self, cgroup_uids: frozenset[str]) -> None:
        """The node runs these pods and the view contains none of them: list again, except if they were just deleted. At
        most every `RELIST_S`, and less and less often for a pod that no list contains. Returns at once; called by one
        thread."""
        missing = self._store.missing(cgroup_uids) if cgroup_uids else cgroup_uids
        if not missing:
            self._missing = {}
            return
        now = self._clock()
        self._missing = {
            uid: self._missing.get(uid) or _Missing(now + self._rng.uniform(0.0, SPREAD_S)) for uid in missing
        }
        due = [uid for uid, each in self._missing.items() if each.list_at <= now]
        if not due or now < self._relisted_at + RELIST_S:
            return
        self._relisted_at = now
        for uid in due:
            wait_s = min(RELIST_MAX_S, self._missing[uid].wait_s * 2.0)
            self._missing[uid] = _Missing(now + wait_s * self._rng.uniform(1.0, 1.5), wait_s)
        self._watch.relist()

    def view(self) -> PodsView:
        """The view now; never waits for the API server."""
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
        clock: Callable[[], float] = clock.boottime,
    ) -> None:
        # The configuration may contain `key=value`; the key alone is needed here.
        keys = (entry.partition("=")[0] for entry in keep_annotations)
        self._annotations = frozenset((*pod_decoder.KEPT_ANNOTATIONS, *keys))
        self._wake = wake
        self._clock = clock
        self._lock = threading.Lock()
        self._pods: dict[str, Pod] = {}
        self._notes: dict[str, Note] = {}
        self._deleted: dict[str, float] = {}
        """Times at which pods were deleted, by UID and by cgroup UID; the last one last."""
        self._view: tuple[Pod, ...] | None = ()

    def replace(self, items: Iterable[msgspec.Raw]) -> None:
        pods: dict[str, Pod] = {}
        notes: dict[str, Note] = {}
        for item in items:
            self._store_pod(item, pods, notes)
        with self._lock:
            for uid in self._pods.keys() - pods.keys():
                self._note_deleted(self._pods[uid])
            self._pods, self._notes, self._view = pods, notes, None

    def apply(self, kind: str, item: msgspec.Raw) -> None:
        with self._lock:
            if kind == "DELETED":
                uid = _identity(item).uid
                if (pod := self._pods.pop(uid, None)) is not None:
                    self._note_deleted(pod)
                self._notes.pop(uid, None)
            else:
                self._store_pod(item, self._pods, self._notes)
            self._view = None

    def _note_deleted(self, pod: Pod) -> None:
        now = self._clock()
        for uid in filter(None, (pod.uid, pod.cgroup_uid, pod.mirror_of)):
            self._deleted.pop(uid, None)
            self._deleted[uid] = now
        while len(self._deleted) > _MAX_DELETED:
            del self._deleted[next(iter(self._deleted))]

    def missing(self, cgroup_uids: frozenset[str]) -> frozenset[str]:
        """The UIDs of no pod that is listed or was just deleted. An unreadable pod is missing: the answer may have been
        damaged on its way, and only a list brings it back."""
        since = self._clock() - DELETED_S
        with self._lock:
            deleted = {uid for uid, at in self._deleted.items() if at > since}
            return cgroup_uids.difference(self._pods, deleted)

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

    def _store_pod(self, item: msgspec.Raw, pods: dict[str, Pod], notes: dict[str, Note]) -> None:
        try:
            pod = pod_decoder.decode_pod(item, annotations=self._annotations)
        except Exception as error:  # whatever it is: other pods are not affected
            meta = _identity(item)
            pods.pop(meta.uid, None)
            if len(notes) < _MAX_NOTES:
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

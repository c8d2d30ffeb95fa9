"""This node's own Node object by list and watch: its conditions, taints, zone and images."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from nodeagent.config import k3s, quantity
from nodeagent.kube import list_watch, objects
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.list_watch import ListWatch
from nodeagent.kube.node_images import NodeImage
from nodeagent.kube.transport import Transport
from nodeagent.runtime import clock

ZONE_LABEL: Final = "topology.kubernetes.io/zone"
MAX_K3S_ARGUMENTS: Final = 32 << 10
"""Characters of the annotation with the arguments of k3s, which other clients may write. A longer one is not read."""

_decoder = objects.Decoder(objects.NodeObject)
_words = objects.Decoder(list[str])


class NodeCondition(NamedTuple):
    """A condition of the Node object."""

    status: str
    reason: str
    message: str
    transition_wall: float | None
    """lastTransitionTime, epoch seconds."""


class NodeView(NamedTuple):
    """The Node object, as far as the writers need it."""

    name: str
    uid: str
    resource_version: str
    conditions: Mapping[str, NodeCondition]
    """By type."""
    taints: tuple[objects.Taint, ...]
    zone: str
    """Label topology.kubernetes.io/zone; empty without the label."""
    addresses: tuple[str, ...]
    labels: Mapping[str, str] = {}
    unschedulable: bool = False
    """Cordoned."""
    allocatable_memory: int | None = None
    """Bytes; None if it is not stated."""
    k3s_arguments: tuple[str, ...] = ()
    """Of the k3s that contains the kubelet; empty if no annotation has them."""
    images: tuple[NodeImage, ...] | None = None
    """None: not listed."""


class NodeWatch:
    """The watch of the own Node, with the field selector `metadata.name=`."""

    def __init__(
        self,
        transport: Transport,
        node_name: str,
        *,
        clock: Callable[[], float] = clock.boottime,
        idle_s: float = list_watch.IDLE_S,
        watch_s: float = list_watch.WATCH_S,
        backoff: RetryBackoff | None = None,
    ) -> None:
        self.node_name = node_name
        self._transport = transport
        self._listeners: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._view: NodeView | None = None
        self._trouble = ""
        self._watch = ListWatch(
            transport,
            "/api/v1/nodes",
            self,
            field_selector=f"metadata.name={node_name}",
            name="node",
            clock=clock,
            idle_s=idle_s,
            watch_s=watch_s,
            backoff=backoff,
            doubts_empty=True,
        )

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` from the watch's thread after each event. To be called before `start`."""
        self._listeners.append(listener)

    def start(self) -> None:
        """Start; returns at once."""
        self._watch.start()

    def stop(self) -> None:
        """End the watch."""
        self._watch.stop()

    def view(self) -> NodeView | None:
        """The newest version of the Node; None before the first list, and if the Node does not exist (`reason`)."""
        return self._view

    def fetch(self, *, timeout_s: float) -> None:
        """Read the Node if it was not read yet. Raises `ApiError`."""
        if self._view is None:
            path = f"/api/v1/nodes/{self.node_name}"
            self.update(self._transport.request("GET", path, timeout_s=timeout_s).body)

    @property
    def synced_at(self) -> float | None:
        """CLOCK_BOOTTIME of the last time at which the view was current."""
        return self._watch.synced_at

    @property
    def reason(self) -> str:
        """The trouble; empty if there is none."""
        return self._watch.reason or self._trouble

    @property
    def failures(self) -> int:
        """Failed lists and broken watches since the start."""
        return self._watch.failures

    @property
    def relists(self) -> int:
        """Lists since the start."""
        return self._watch.relists

    def update(self, body: bytes) -> None:
        """Store the Node of an answer to a write, before the watch delivers it."""
        self._store(msgspec.Raw(body))

    # --- called by the list-watch -----------------------------------------------------------------------------------

    def replace(self, items: Iterable[msgspec.Raw]) -> None:
        first: msgspec.Raw | None = None
        for item in items:
            first = first or item
        if first is None:
            with self._lock:
                self._view, self._trouble = None, f"there is no node {self.node_name}"
            return
        self._store(first, listed=True)

    def apply(self, kind: str, item: msgspec.Raw) -> None:
        if kind == "DELETED":
            with self._lock:
                self._view, self._trouble = None, f"the node {self.node_name} was deleted"
        else:
            self._store(item)

    def changed(self) -> None:
        for listener in self._listeners:
            listener()

    def _store(self, item: msgspec.Raw, *, listed: bool = False) -> None:
        try:
            view = decode_node(item)
        except (ValueError, OverflowError) as error:
            with self._lock:
                self._trouble = f"the Node object cannot be read: {error}"
            return
        with self._lock:
            # The answer to a write may be newer than the next event of the watch. A list always counts, because the
            # server may have been restored from an older backup.
            if listed or self._view is None or not is_older(view.resource_version, self._view.resource_version):
                self._view, self._trouble = view, ""


def decode_node(item: msgspec.Raw | bytes) -> NodeView:
    """A Node from its JSON. Raises ValueError (`objects.UnreadableError`), or OverflowError for a time out of range."""
    raw = _decoder.decode(item)
    return NodeView(
        name=raw.metadata.name,
        uid=raw.metadata.uid,
        resource_version=raw.metadata.resource_version,
        conditions={
            c.type: NodeCondition(
                c.status,
                c.reason,
                c.message,
                c.last_transition_time.timestamp() if c.last_transition_time else None,
            )
            for c in raw.status.conditions or ()
        },
        taints=tuple(raw.spec.taints or ()),
        zone=(raw.metadata.labels or {}).get(ZONE_LABEL, ""),
        addresses=tuple(a.address for a in raw.status.addresses or ()),
        labels=raw.metadata.labels or {},
        unschedulable=bool(raw.spec.unschedulable),
        allocatable_memory=_bytes((raw.status.allocatable or {}).get("memory")),
        images=_images(raw.status.images),
        k3s_arguments=_k3s_arguments((raw.metadata.annotations or {}).get(k3s.NODE_ARGS, "")),
    )


def _images(listed: Sequence[objects.ContainerImage] | None) -> tuple[NodeImage, ...] | None:
    return tuple([NodeImage(tuple(each.names or ()), max(0, each.size_bytes)) for each in listed]) if listed else None


def _k3s_arguments(annotation: str) -> tuple[str, ...]:
    try:
        return tuple(_words.decode(annotation.encode())) if 0 < len(annotation) <= MAX_K3S_ARGUMENTS else ()
    except ValueError:
        return ()


def _bytes(amount: str | int | None) -> int | None:
    """None: not stated, or no quantity."""
    try:
        return None if amount is None else quantity.parse_quantity(str(amount))
    except ValueError:
        return None


def is_older(one: str, other: str) -> bool:
    """True if the first resourceVersion of the same object is older. They are 64-bit numbers that only grow; for any
    other text this returns False."""
    return _is_version(one) and _is_version(other) and int(one) < int(other)


def _is_version(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 20

"""This node's own object, kept current by a watch: who owns which condition now, and which taints are really there."""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from nodeagent.kube import objects
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.list_watch import IDLE_S, WATCH_S, ListWatch
from nodeagent.kube.timestamps import boottime
from nodeagent.kube.transport import Transport

ZONE_LABEL: Final = "topology.kubernetes.io/zone"

_decoder = objects.Decoder(objects.NodeObject)


class NodeCondition(NamedTuple):
    """A condition as the Node object has it."""

    status: str
    reason: str
    message: str
    transition_wall: float | None
    """lastTransitionTime, epoch seconds."""


class NodeView(NamedTuple):
    """What decisions and writers need of the Node object."""

    name: str
    uid: str
    resource_version: str
    conditions: Mapping[str, NodeCondition]
    """By type."""
    taints: tuple[objects.Taint, ...]
    zone: str
    """Label topology.kubernetes.io/zone; empty when it has none."""
    addresses: tuple[str, ...]


class NodeWatch:
    """The own Node, by list and watch with `metadata.name=`."""

    def __init__(
        self,
        transport: Transport,
        node_name: str,
        *,
        clock: Callable[[], float] = boottime,
        idle_s: float = IDLE_S,
        watch_s: float = WATCH_S,
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
        """Call this, from the watch's thread, whenever something was heard. Before `start`."""
        self._listeners.append(listener)

    def start(self) -> None:
        """Begin; returns at once."""
        self._watch.start()

    def stop(self) -> None:
        """End the watch."""
        self._watch.stop()

    def view(self) -> NodeView | None:
        """The node as last seen; None before that, and when there is no such node (`reason`)."""
        return self._view

    def fetch(self, *, timeout_s: float) -> None:
        """Ask for the node if it was not seen yet. Raises `ApiError`."""
        if self._view is None:
            path = f"/api/v1/nodes/{self.node_name}"
            self.learn(self._transport.request("GET", path, timeout_s=timeout_s).body)

    @property
    def synced_at(self) -> float | None:
        """CLOCK_BOOTTIME at which the view was last known to be current."""
        return self._watch.synced_at

    @property
    def reason(self) -> str:
        """What is wrong; empty when nothing is."""
        return self._watch.reason or self._trouble

    @property
    def failures(self) -> int:
        """Failed lists and broken watches since the start."""
        return self._watch.failures

    @property
    def relists(self) -> int:
        """Lists since the start."""
        return self._watch.relists

    def learn(self, body: bytes) -> None:
        """Take in the Node that a write of ours was answered with, without waiting for the watch to bring it."""
        self._see(msgspec.Raw(body))

    # --- called by the list-watch -----------------------------------------------------------------------------------

    def replace(self, items: Iterable[msgspec.Raw]) -> None:
        first: msgspec.Raw | None = None
        for item in items:
            first = first or item
        if first is None:
            with self._lock:
                self._view, self._trouble = None, f"there is no node {self.node_name}"
            return
        self._see(first, listed=True)

    def apply(self, kind: str, item: msgspec.Raw) -> None:
        if kind == "DELETED":
            with self._lock:
                self._view, self._trouble = None, f"the node {self.node_name} was deleted"
        else:
            self._see(item)

    def changed(self) -> None:
        for listener in self._listeners:
            listener()

    def _see(self, item: msgspec.Raw, *, listed: bool = False) -> None:
        try:
            view = node_of(item)
        except (ValueError, OverflowError) as error:
            with self._lock:
                self._trouble = f"the Node object cannot be read: {error}"
            return
        with self._lock:
            # Our own write's answer may be newer than what the watch brings a moment later. A list is the truth, older
            # or not: the server may have been set back.
            if listed or self._view is None or not older(view.resource_version, self._view.resource_version):
                self._view, self._trouble = view, ""


def node_of(item: msgspec.Raw | bytes) -> NodeView:
    """A Node from its JSON. Raises ValueError (`objects.UnreadableError`), or OverflowError for a moment that no clock
    shows."""
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
    )


def older(one: str, other: str) -> bool:
    """Whether one resourceVersion of the same object is older. They are 64-bit numbers that only grow; where a server
    uses something else, nothing is older than anything."""
    return one.isdigit() and other.isdigit() and int(one) < int(other)

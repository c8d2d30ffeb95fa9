"""What the API server sent about the node and the run's pods, in the order in which it happened.

The API server numbers every change of every object (resourceVersion), so the order of a taint and an eviction is known
however late they arrive here.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec
import pytest

from nodeagent.kube.list_watch import ListWatch
from tests.e2e.cluster import Cluster, Json


class WatchedState(NamedTuple):
    """One state of one object."""

    at: float
    """time.monotonic() when it arrived."""
    version: int
    what: str
    """ADDED, MODIFIED, DELETED."""
    object: Json

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])

    @property
    def terminating(self) -> bool:
        return "deletionTimestamp" in self.object["metadata"]

    def condition(self, kind: str) -> Json:
        """A condition of the object by its type; empty when it has none."""
        conditions = self.object["status"].get("conditions", ())
        return next((c for c in conditions if c["type"] == kind), {})

    def has_status(self, kind: str, status: str) -> bool:
        return bool(self.condition(kind).get("status") == status)

    def tainted(self, key: str) -> bool:
        return any(taint["key"] == key for taint in self.object["spec"].get("taints", ()))


class WatchLog:
    """Two watches, from now until `close`."""

    def __init__(self, cluster: Cluster) -> None:
        self._changed = threading.Condition()
        self._nodes: list[WatchedState] = []
        self._pods: list[WatchedState] = []
        self._watches = (
            ListWatch(
                cluster.transport,
                "/api/v1/nodes",
                _Book(self._nodes, self._changed),
                field_selector=f"metadata.name={cluster.node_name}",
            ),
            ListWatch(cluster.transport, cluster.pod_path(), _Book(self._pods, self._changed)),
        )
        for watch in self._watches:
            watch.start()

    def close(self) -> None:
        for watch in self._watches:
            watch.stop()

    def node(self) -> list[WatchedState]:
        """Every state of the node, in order."""
        with self._changed:
            return sorted(self._nodes, key=lambda entry: entry.version)

    def pods(self, name: str = "") -> list[WatchedState]:
        """Every state of the run's pods, or of one of them, in order."""
        with self._changed:
            return sorted((e for e in self._pods if not name or e.name == name), key=lambda entry: entry.version)

    def seen(self, holds: Callable[[], object], timeout_s: float) -> bool:
        """Wait until it holds; checked after each change."""
        with self._changed:
            return bool(self._changed.wait_for(holds, timeout_s))

    def wait(self, holds: Callable[[], object], what: str, *, timeout_s: float) -> None:
        """Wait until it holds, or fail saying what was never seen."""
        if not self.seen(holds, timeout_s):
            pytest.fail(f"not seen within {timeout_s:.0f}s: {what}")

    def lost_s(self, kind: str, *, own: str, until: float) -> float:
        """How long a standard condition was not True while the agent's own one was, for each time that this began:
        until this moment (time.monotonic()) and by when their changes arrived."""
        states = [entry for entry in self.node() if entry.at <= until]
        ends = [entry.at for entry in states[1:]] + [until]
        spans = [
            (entry, end - entry.at) for entry, end in zip(states, ends, strict=True) if entry.has_status(own, "True")
        ]
        lost = [not entry.has_status(kind, "True") for entry, _ in spans]
        begun = sum(now and not before for before, now in zip([False, *lost], lost, strict=False))
        return sum(s for (_, s), gone in zip(spans, lost, strict=True) if gone) / max(begun, 1)


class _Book:
    """Where one watch writes its changes."""

    def __init__(self, entries: list[WatchedState], changed: threading.Condition) -> None:
        self._entries = entries
        self._changed = changed

    def replace(self, items: Iterable[msgspec.Raw]) -> None:
        for item in items:
            self.apply("ADDED", item)

    def apply(self, kind: str, item: msgspec.Raw) -> None:
        loaded: Json = json.loads(bytes(item))
        with self._changed:
            self._entries.append(
                WatchedState(time.monotonic(), int(loaded["metadata"]["resourceVersion"]), kind, loaded)
            )

    def changed(self) -> None:
        with self._changed:
            self._changed.notify_all()

"""The objects of the double, their versions, and what a watch replays."""

import threading
import uuid

from tests.fake_kube.messages import KINDS, Json, copy_of, rfc3339


class Store:
    """Every object by resource, namespace and name. `changed` guards all of it and wakes whoever waits for a change."""

    def __init__(self, *, first_version: int) -> None:
        self.objects: dict[str, dict[tuple[str, str], Json]] = {kind: {} for kind in KINDS}
        self.version = first_version
        self.oldest = first_version
        """A watch or a list from an older version is answered with 410."""
        self.history: list[tuple[int, str, str, Json]] = []
        """Version, resource, event type and object of each change since `oldest`."""
        self.changed = threading.Condition(threading.RLock())
        self.watch_generation = 0
        """Watches of an earlier generation end."""
        self.closing = False

    def put(self, kind: str, entry: Json, event: str) -> Json:
        """Store a copy under a new version; returns what is stored."""
        with self.changed:
            entry = copy_of(entry)
            metadata = entry["metadata"]
            metadata.setdefault("uid", str(uuid.uuid4()))
            metadata.setdefault("creationTimestamp", rfc3339())
            self.objects[kind][metadata.get("namespace", ""), metadata["name"]] = entry
            self.record(kind, entry, event)
            return entry

    def record(self, kind: str, entry: Json, event: str) -> None:
        """Give a changed object its next version and send it to the watches."""
        self.version += 1
        entry["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, kind, event, copy_of(entry)))
        self.changed.notify_all()

    def compact(self) -> None:
        """Drop the history: a watch from any version before now is answered with 410."""
        with self.changed:
            self.version += 1
            self.oldest = self.version
            self.history.clear()

    def end_watches(self) -> None:
        """End every open watch, as a server that restarts does."""
        with self.changed:
            self.watch_generation += 1
            self.changed.notify_all()

    def close(self) -> None:
        """End every watch for good."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()

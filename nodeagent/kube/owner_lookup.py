"""How many replicas the owners of possible victims want, and how many are ready.

Promises:

1. Only wanted owners are read, one GET at a time, in a thread that starts with the first one. No decision waits for it.
2. An owner is read again every `REFRESH_S` while it is wanted, and dropped when it was not wanted for `KEEP_S`. At most
   `MAX_OWNERS` are stored: one decision wants one.
3. After a failure the next request waits, longer each time, and obeys Retry-After; the owner keeps its reason.

Theory of operation. A single object, never a list: the status of a ReplicaSet or StatefulSet has what the pods of a
namespace would show, and the right to read it shows no pod.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Final
from urllib.parse import quote

from nodeagent.kube import objects
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.joined_pods import JoinedPods
from nodeagent.kube.transport import Transport
from nodeagent.model import OwnerLookup, OwnerReplicas, Pod
from nodeagent.runtime import clock, workers

REFRESH_S: Final = 10.0
"""How often a wanted owner is read."""
KEEP_S: Final = 60.0
"""How long an owner is stored after it was last wanted."""
MAX_OWNERS: Final = 32
MAX_WAIT_S: Final = 60.0
"""Longest wait after failures: a role without the right costs a request a minute, and only under soft pressure."""

_decoder = objects.Decoder(objects.ReplicatedObject)


def read_owner(transport: Transport, lookup: OwnerLookup) -> tuple[int, int]:
    """(replicas that the owner wants, replicas that are ready). Raises `ApiError`, `objects.UnreadableError`, and
    LookupError for another object of the same name."""
    namespace, name = quote(lookup.namespace), quote(lookup.owner.name)
    path = f"/apis/apps/v1/namespaces/{namespace}/replicasets/{name}"
    if lookup.owner.kind == "StatefulSet":
        path = f"/apis/apps/v1/namespaces/{namespace}/statefulsets/{name}"
    found = _decoder.decode(transport.request("GET", path).body)
    if found.metadata.uid != lookup.owner.uid:
        raise LookupError("another object has its name now")
    wanted = found.spec.replicas if found.spec.replicas is not None else 1
    # The controller has not written the status of this version yet: nothing counts as ready.
    current = found.status.observed_generation >= found.metadata.generation
    return max(0, wanted), max(0, found.status.ready_replicas) if current else 0


class OwnerReader:
    """The replicas of the wanted owners, read in a thread."""

    def __init__(
        self,
        transport: Transport,
        *,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = clock.boottime,
        backoff: RetryBackoff | None = None,
    ) -> None:
        """`wake` is called when an owner was read for the first time."""
        self._transport = transport
        self._wake = wake
        self._clock = clock
        self._backoff = backoff or RetryBackoff(last_s=MAX_WAIT_S)
        self._condition = threading.Condition()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._owners: dict[OwnerLookup, OwnerReplicas] = {}
        self._wanted_at: dict[OwnerLookup, float] = {}
        self._next_at: dict[OwnerLookup, float] = {}
        self._changes = 0
        self._joined = JoinedPods()
        self.reason = ""
        """Why reading fails now; empty if it does not."""

    def want(self, lookups: Iterable[OwnerLookup]) -> None:
        """Read these owners soon. Returns at once."""
        now = self._clock()
        with self._condition:
            for lookup in lookups:
                if lookup not in self._owners:
                    if len(self._owners) >= MAX_OWNERS:
                        self._drop(min(self._wanted_at, key=self._wanted_at.__getitem__))
                    self._owners[lookup], self._next_at[lookup] = OwnerReplicas(now), now
                    self._changes += 1
                    self._condition.notify_all()
                self._wanted_at[lookup] = now
            for lookup in [each for each, at in self._wanted_at.items() if now - at > KEEP_S]:
                self._drop(lookup)
            starts = bool(self._owners) and self._thread is None
        if starts:
            self._thread = workers.make_thread(self._run, name="owners")
            workers.start(self._thread)

    def with_replicas(self, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        """The pods with what is known of their owners. The same pods give the same tuple until that changes."""
        return self._joined.joined(pods, self._changes, self._join)

    def _join(self, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        with self._condition:
            known = {lookup.owner.uid: replicas for lookup, replicas in self._owners.items()}
        if not known:
            return pods
        return tuple(
            [
                pod._replace(replicas=known[pod.owner.uid]) if pod.owner and pod.owner.uid in known else pod
                for pod in pods
            ]
        )

    def stop(self) -> None:
        """End the thread, if there is one, after its present request."""
        self._stopping.set()
        with self._condition:
            self._condition.notify_all()

    def _drop(self, lookup: OwnerLookup) -> None:
        for stored in (self._owners, self._wanted_at, self._next_at):
            stored.pop(lookup, None)
        self._changes += 1

    def _run(self) -> None:
        while not self._stopping.is_set():
            lookup = self._next()
            if lookup is not None:
                self._stopping.wait(self._read(lookup))

    def _next(self) -> OwnerLookup | None:
        """The owner to read now; None after a wait, to be called again."""
        with self._condition:
            now = self._clock()
            for lookup in [each for each, at in self._wanted_at.items() if now - at > KEEP_S]:
                self._drop(lookup)
            if not self._next_at:
                self._condition.wait_for(lambda: self._stopping.is_set() or self._next_at)
                return None
            lookup = min(self._next_at, key=self._next_at.__getitem__)
            wait_s = self._next_at[lookup] - now
            if wait_s > 0:
                self._condition.wait(wait_s)
                return None
            return lookup

    def _read(self, lookup: OwnerLookup) -> float:
        """Read one owner. Returns the wait before the next request, in seconds."""
        wait_s, began = 0.0, self._clock()
        try:
            desired, ready = read_owner(self._transport, lookup)
        except (ApiError, objects.UnreadableError, LookupError) as error:
            retry_after_s = error.retry_after_s if isinstance(error, ApiError) else None
            wait_s = self._backoff.failed(retry_after_s)
            self.reason = trouble = str(error)
            self._store(lookup, lambda before: before._replace(trouble=trouble))
        else:
            self._backoff.succeeded()
            self.reason = ""

            def read(before: OwnerReplicas) -> OwnerReplicas:
                since = None if ready >= desired else before.incomplete_since or began
                return OwnerReplicas(before.asked_at, began, desired, ready, since)

            self._store(lookup, read)
        self._wake()
        return wait_s

    def _store(self, lookup: OwnerLookup, change: Callable[[OwnerReplicas], OwnerReplicas]) -> None:
        with self._condition:
            before = self._owners.get(lookup)
            if before is not None:
                self._owners[lookup] = change(before)
                self._next_at[lookup] = self._clock() + REFRESH_S
                self._changes += 1

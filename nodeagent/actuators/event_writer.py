"""Writes events.k8s.io/v1 Events about pods and the node. An eviction never waits for an Event.

With a node's credentials the Events are core/v1, the same objects under older names: the API server lets a node write
no others (its rules contain the core group only: bootstrappolicy/policy.go, NodeRules).

Promises:

1. `emit` never blocks. The queue is bounded; when it is full the oldest Event is dropped and counted: during a storm
   the newest Events matter more.
2. A repetition (the same `series`, or note) within `SERIES_S` extends the series of the first Event instead of a new
   one, with at most one write every `REFRESH_S`.
3. At most `EVENT_BURST` Events are written at once and `EVENTS_PER_S` per second after that; after a failure the next
   one waits, longer each time. A repetition that is not written waits for nothing, so repetitions without end keep no
   other Event from being written.
4. An Event that cannot be written is lost and counted. Logs and metrics have the same facts.
"""

import enum
import random
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import msgspec

from nodeagent.kube import timestamps, transport
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.transport import Transport
from nodeagent.model import OutcomeKind
from nodeagent.runtime import clock, workers

MAX_QUEUE: Final = 200
"""Events that wait to be written. A hard decision emits at most five, each 1 KiB."""
SERIES_S: Final = 360.0
"""As client-go: a series ends after six minutes without a repetition."""
REFRESH_S: Final = 30.0
"""Least time between two writes of one series."""
MAX_NOTE_BYTES: Final = 1024
"""The API server's limit for a note."""
EVENT_BURST: Final = 25.0
EVENTS_PER_S: Final = 1.0
"""The burst of client-go for one object; a decision with five victims emits eight Events."""
PLAN_ANNOTATION: Final = "nodeagent.io/plan"
"""On Events: the id of the decision or of the report, as in the log and the record."""
HOOK_ANNOTATION: Final = "nodeagent.io/hook"
"""On Events of a pod: how the hook before its eviction ended."""
_MAX_SERIES: Final = 256
"""Series that are stored; the oldest is dropped."""
CONTROLLER: Final = "nodeagent.io/nodeagent"
_CORE_NAMES: Final = {
    "regarding": "involvedObject",
    "note": "message",
    "reportingController": "reportingComponent",
}
"""Fields with another name in core/v1. Its own fields (source, count, first and last time) stay empty."""


class EventReason(enum.StrEnum):
    """Why an Event is written. Its value is the reason in the Event."""

    object: str
    """What the Event is about: `Pod`, `Node`."""
    warning: bool
    """False: its type is Normal."""
    meaning: str

    def __new__(cls, value: str, about: str, warning: bool, meaning: str) -> "EventReason":
        member = str.__new__(cls, value)
        member._value_ = value
        member.object, member.warning, member.meaning = about, warning, meaning
        return member

    EVICTED = (
        "Evicted",
        "Pod",
        True,
        "The API server accepted the pod's eviction, or others have evicted it for an EvictionRequest. The note is the "
        "kubelet's message, the annotations are the kubelet's (`starved_resource`, `offending_containers`...).",
    )
    POD_EVICTED = (
        "PodEvicted",
        "The pod's owner",
        True,
        "A pod of this ReplicaSet, StatefulSet, Job or other controller was evicted, or killed as the last resort. The "
        "note has the pod, the node, the resource, and the pod's usage and request.",
    )
    EVICTION_GRACE_SHORTENED = (
        "EvictionGraceShortened",
        "Pod",
        True,
        "Hard tier: the pod was terminating, its grace was cut.",
    )
    OOM_KILL_OBSERVED = (
        "OOMKillObserved",
        "Pod and its owner; Node",
        True,
        "The kernel's OOM killer ended processes of the pod, also others than the first one of a container. The note "
        "has the container, the processes if the kernel log is readable, whether a limit of the pod was reached or the "
        "node had no memory left, and for the latter why no eviction came first. On the Node: outside pods, or a "
        "shortage of the node.",
    )
    KILLED = ("Killed", "Pod", True, "Last resort: its processes were ended while the API was out of reach.")
    MEMORY_LIMIT_RAISED = (
        "MemoryLimitRaised",
        "Pod",
        False,
        "`ownLimit.resize`: a container was about to reach its memory limit, which was raised in place. The kubelet "
        "reports the new one.",
    )
    MEMORY_LIMIT_RESTORED = (
        "MemoryLimitRestored",
        "Pod",
        False,
        "`ownLimit.resize`: a container has its memory limit from before the raise again.",
    )
    MEMORY_LIMIT_UNCHANGED = (
        "MemoryLimitUnchanged",
        "Pod",
        True,
        "`ownLimit.resize`: a resize was refused by the API server, or not carried out by the kubelet. The note has "
        "the reason.",
    )
    EVICTION_THRESHOLD_MET = (
        "EvictionThresholdMet",
        "Node",
        True,
        "Pods are about to be evicted for the named resource.",
    )
    CONFIGURATION_REJECTED = (
        "ConfigurationRejected",
        "Node",
        True,
        "A changed configuration is not valid; the old one stays.",
    )
    NODE_HAS_INSUFFICIENT_MEMORY = (
        "NodeHasInsufficientMemory",
        "Node",
        False,
        "MemoryPressure has become True.",
    )
    NODE_HAS_SUFFICIENT_MEMORY = ("NodeHasSufficientMemory", "Node", False, "MemoryPressure has become False.")
    NODE_HAS_DISK_PRESSURE = ("NodeHasDiskPressure", "Node", False, "DiskPressure has become True.")
    NODE_HAS_NO_DISK_PRESSURE = ("NodeHasNoDiskPressure", "Node", False, "DiskPressure has become False.")
    NODE_HAS_INSUFFICIENT_PID = ("NodeHasInsufficientPID", "Node", False, "PIDPressure has become True.")
    NODE_HAS_SUFFICIENT_PID = ("NodeHasSufficientPID", "Node", False, "PIDPressure has become False.")


class KubernetesEvent(NamedTuple):
    """One Event to write."""

    kind: str
    """`Pod`, `Node` or the kind of a pod's owner."""
    namespace: str
    """Empty for a Node."""
    name: str
    uid: str
    reason: EventReason
    note: str
    action: str = "Evicting"
    annotations: Mapping[str, str] = {}
    at_wall: float | None = None
    """Time of the event, epoch seconds; None: now."""
    api_version: str = "v1"
    """Of the object."""
    urgent: bool = False
    """It is written at once, without the wait that spreads the Events of a fleet."""
    series: str = ""
    """What the Events of one series have in common besides the object, the reason and the action; empty: the note."""


def _series_key(event: KubernetesEvent) -> tuple[str, ...]:
    about = (event.kind, event.namespace, event.name, event.uid)
    return (*about, event.reason, event.action, event.series or event.note)


class _Series:
    __slots__ = ("count", "last_at", "path", "written_at")

    def __init__(self, path: str, now: float) -> None:
        self.path = path
        self.count = 1
        self.last_at = now
        self.written_at = now


class _WriteLimiter:
    """A token bucket for the writes of one process."""

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._tokens = burst
        self._filled_at: float | None = None

    def take(self, now: float) -> bool:
        """Take a token; False if there is none."""
        if self._filled_at is not None:
            self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._per_s)
        self._filled_at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class EventWriter:
    """The worker."""

    def __init__(
        self,
        transport: Transport,
        node_name: str,
        *,
        core: bool = False,
        clock: Callable[[], float] = clock.boottime,
        spread_s: float = 0.0,
    ) -> None:
        """`core`: write core/v1 Events, which a node's credentials need. `spread_s`: the first Event after a pause
        waits for a random part of this, because a whole fleet may write the same Event in the same second."""
        self._transport = transport
        self._clock = clock
        self._spread_s = spread_s
        self._rng = random.Random()  # noqa: S311 - spreads load, guards nothing
        self.node_name = node_name
        self._core = core
        self._queue: deque[tuple[KubernetesEvent, float]] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._urgent = False
        self._series: OrderedDict[tuple[str, ...], _Series] = OrderedDict()
        self._limiter = _WriteLimiter(EVENT_BURST, EVENTS_PER_S)
        self._backoff = RetryBackoff()
        self.dropped = 0
        """Number of Events that were not written, for the metrics."""
        self.reason = ""
        """Why the last Event was not written; empty if it was."""
        self._thread = workers.make_thread(self._run, name="events")

    def start(self) -> None:
        """Start to write; returns at once."""
        workers.start(self._thread)

    def emit(self, event: KubernetesEvent) -> None:
        """Write this Event soon. Never blocks."""
        with self._changed:
            if len(self._queue) >= MAX_QUEUE:
                self._queue.popleft()
                self.dropped += 1
            self._queue.append((event, time.time() if event.at_wall is None else event.at_wall))
            self._urgent = self._urgent or event.urgent
            self._changed.notify()

    def stop(self, *, timeout_s: float = 2.0) -> None:
        """Write the Events in the queue, for at most this long."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        workers.join(self._thread, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._changed.wait_for(lambda: self._queue or self._stopping)
                    spread_s = self._rng.uniform(0.0, self._spread_s)
                    self._changed.wait_for(lambda: self._stopping or self._urgent, spread_s)
                if not self._queue:
                    return
                event, wall = self._queue.popleft()
                self._urgent = self._urgent and bool(self._queue)
                if not self._is_counted_only(event):
                    while not self._stopping and not self._limiter.take(self._clock()):
                        self._changed.wait(1.0 / EVENTS_PER_S)
            try:
                self._write(event, wall)
                self.reason = ""
                self._backoff.succeeded()
            except ApiError as error:
                self.reason = error.message
                self.dropped += 1
                with self._changed:
                    wait_s = self._backoff.failed(error.retry_after_s)
                    if self._changed.wait_for(lambda: self._stopping, wait_s):
                        return  # a stop does not wait for a server that refuses

    def _is_counted_only(self, event: KubernetesEvent) -> bool:
        """Whether the Event only raises the count of a series that was written shortly before."""
        series, now = self._series.get(_series_key(event)), self._clock()
        return series is not None and now - series.last_at <= SERIES_S and now - series.written_at < REFRESH_S

    def _write(self, event: KubernetesEvent, wall: float) -> None:
        key = _series_key(event)
        now = self._clock()
        series = self._series.get(key)
        if series is None or now - series.last_at > SERIES_S:
            self._create(event, wall, key, now)
            return
        series.count += 1
        series.last_at = now
        if now - series.written_at < REFRESH_S:
            return
        body = {"series": {"count": series.count, "lastObservedTime": timestamps.rfc3339_micro(wall)}}
        try:
            self._transport.request(
                "PATCH", series.path, body=msgspec.json.encode(body), content_type=transport.STRATEGIC_MERGE
            )
            series.written_at = now
        except ApiError as error:
            if error.kind is not OutcomeKind.NOT_FOUND:
                raise
            # The API server deletes Events after an hour.
            self._create(event, wall, key, now)

    def _create(self, event: KubernetesEvent, wall: float, key: tuple[str, ...], now: float) -> None:
        # A Node has no namespace; its Events are in `default`.
        namespace = event.namespace or "default"
        # A cut name must not end in a character that may not precede a dot.
        name = f"{event.name[:200].rstrip('-.')}.{uuid.uuid4().hex[:16]}"
        path = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"
        if self._core:
            path = f"/api/v1/namespaces/{namespace}/events"
        self._transport.request("POST", path, body=self._body(event, wall, namespace, name))
        self._series[key] = _Series(f"{path}/{name}", now)
        self._series.move_to_end(key)
        while len(self._series) > _MAX_SERIES:
            self._series.popitem(last=False)

    def _body(self, event: KubernetesEvent, wall: float, namespace: str, name: str) -> bytes:
        regarding = {"kind": event.kind, "apiVersion": event.api_version, "name": event.name, "uid": event.uid}
        if event.namespace:
            regarding["namespace"] = event.namespace
        body: dict[str, object] = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace, "annotations": dict(event.annotations)},
            "eventTime": timestamps.rfc3339_micro(wall),
            "reportingController": CONTROLLER,
            "reportingInstance": self.node_name[:128],
            "action": event.action,
            "reason": event.reason,
            "regarding": regarding,
            "note": event.note.encode()[:MAX_NOTE_BYTES].decode("utf-8", "ignore"),
            "type": "Warning" if event.reason.warning else "Normal",
        }
        if self._core:
            body = {_CORE_NAMES.get(field, field): value for field, value in body.items()} | {"apiVersion": "v1"}
        return msgspec.json.encode(body)

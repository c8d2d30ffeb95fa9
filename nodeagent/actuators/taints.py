"""The agent's own NoSchedule taints, which keep the scheduler from refilling a node under pressure.

Theory of operation. `spec.taints` is an atomic list: a patch with one taint replaces all of them, and a directive to
delete one silently does nothing (measured). So the whole list is read from the watch of the own Node, changed, and
written under the resourceVersion it was read with. After a 409 another client has written: read the list again.

Promises:

1. Only taints with a key of nodeagent are added, changed or removed; all others are written back byte for byte.
2. `present` returns the taints that are *on the Node*, not those that were requested.
3. A taint that another client removes each time is written again at most as often as `Restraint` allows; a newly wanted
   taint does not wait for that.
4. `want` never blocks; the newest set is written. Without the right to write (node credentials), `reason` has the
   refusal, and the rest of the agent is not affected.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from nodeagent.actuators import conditions
from nodeagent.kube import objects, transport
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.backoff import Restraint, RetryBackoff
from nodeagent.kube.node_watch import NodeView, NodeWatch
from nodeagent.kube.transport import Transport
from nodeagent.model import ConditionStatus, ConditionType, OutcomeKind
from nodeagent.runtime import clock, workers

EFFECT: Final = "NoSchedule"
TAINT_KEYS: Final = {
    ConditionType.MEMORY_PRESSURE: "nodeagent.io/memory-pressure",
    ConditionType.DISK_PRESSURE: "nodeagent.io/disk-pressure",
    ConditionType.PID_PRESSURE: "nodeagent.io/pid-pressure",
}
_OWN_KEYS: Final = frozenset(TAINT_KEYS.values())
MAX_CONFLICTS: Final = 5
"""Immediate retries after a 409; after that the back-off applies. The kubelet does not write taints, so conflicts come
from the node controllers, one or two at a time."""


class NodeTaints:
    """The worker. Make it before `node.start()`."""

    def __init__(
        self,
        transport: Transport,
        node: NodeWatch,
        *,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = clock.boottime,
    ) -> None:
        """`wake` is called when the taints on the Node have changed."""
        self._transport = transport
        self._node = node
        self._clock = clock
        self._notify = wake
        self._last_present: frozenset[ConditionType] = frozenset()
        self._changed = threading.Condition()
        self._wanted: frozenset[str] | None = None
        self._wanted_since: dict[ConditionType, float] = {}
        """When each wanted taint was first requested; for the thread that wants."""
        self._stopping = False
        self._backoff = RetryBackoff()
        self._not_before = 0.0
        self._restraint = Restraint()
        self._last_written: frozenset[str] | None = None
        """The set that was written since it is wanted: to write it again is a repetition."""
        self._failure = ""
        """Why the last write failed; empty if it succeeded."""
        node.listen(self._wake)
        self._thread = workers.make_thread(self._run, name="taints")

    def start(self) -> None:
        """Start to write; returns at once."""
        workers.start(self._thread)

    def publish(self, statuses: Mapping[ConditionType, ConditionStatus]) -> None:
        """Want the taints of the conditions that are True. An unknown condition keeps its taint."""
        wanted = {kind for kind, status in statuses.items() if status is ConditionStatus.TRUE}
        unknown = {kind for kind, status in statuses.items() if status is ConditionStatus.UNKNOWN}
        self.want(wanted | unknown & self.present())

    def want(self, pressures: Iterable[ConditionType]) -> None:
        """The pressures that need a taint now. Until the first call nothing is written. Called by one thread."""
        now = self._clock()
        self._wanted_since = {pressure: self._wanted_since.get(pressure, now) for pressure in pressures}
        with self._changed:
            self._wanted = frozenset(TAINT_KEYS[pressure] for pressure in self._wanted_since)
            self._changed.notify()

    def missing(self) -> dict[ConditionType, float]:
        """The wanted pressures whose taint is not on the Node, with the CLOCK_BOOTTIME since when each is wanted. For
        the thread that wants."""
        present = self.present()
        return {pressure: since for pressure, since in self._wanted_since.items() if pressure not in present}

    @property
    def reason(self) -> str:
        """The trouble with writing; empty if there is none."""
        return self._failure or (conditions.CONFLICT_REASON if self._restraint.exhausted else "")

    def present(self) -> frozenset[ConditionType]:
        """The pressures whose taint is on the Node."""
        keys = _own_keys(self._node.view())
        return frozenset(pressure for pressure, key in TAINT_KEYS.items() if key in keys)

    def stop(self, *, clear: bool = True, timeout_s: float = 3.0) -> None:
        """Stop, and remove the own taints if `clear`. Raises `ApiError` if the server refuses that."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        workers.join(self._thread, timeout_s)
        if clear and _own_keys(self._node.view()):
            self._write(frozenset(), timeout_s=timeout_s)

    def _wake(self) -> None:
        with self._changed:
            present, before = self.present(), self._last_present
            self._last_present = present
            self._changed.notify()
        if present != before:
            self._notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._stopping and (wait_s := self._due_in_s()) > 0:
                    self._changed.wait(None if wait_s == float("inf") else wait_s)
                if self._stopping:
                    return
                wanted = self._last_written = self._wanted or frozenset()
            try:
                self._write(wanted, timeout_s=None)
                self._failure = ""
                self._backoff.succeeded()
            except ApiError as error:
                self._failure, self._last_written = error.message, None
                self._not_before = self._clock() + conditions.wait_after(error, self._backoff)

    def _due_in_s(self) -> float:
        """Seconds until the next write; 0: now; infinite: until something changes."""
        view, now = self._node.view(), self._clock()
        if self._wanted is None or view is None or _own_keys(view) == self._wanted:
            return float("inf")
        if now < self._not_before:
            return self._not_before - now
        return self._restraint.wait_s(now) if self._last_written == self._wanted else 0.0

    def _write(self, wanted: frozenset[str], *, timeout_s: float | None) -> None:
        path = f"/api/v1/nodes/{self._node.node_name}"
        for attempt in range(1, MAX_CONFLICTS + 1):
            view = self._node.view()
            if view is None or _own_keys(view) == wanted:
                return
            kept = [taint for taint in view.taints if taint.key not in _OWN_KEYS]
            kept += [objects.Taint(key=key, effect=EFFECT) for key in sorted(wanted)]
            body = msgspec.json.encode(
                {"metadata": {"resourceVersion": view.resource_version}, "spec": {"taints": kept}}
            )
            try:
                answer = self._transport.request(
                    "PATCH", path, body=body, content_type=transport.STRATEGIC_MERGE, timeout_s=timeout_s
                )
            except ApiError as error:
                if error.kind is not OutcomeKind.CONFLICT or attempt == MAX_CONFLICTS:
                    raise
                # Another client wrote in between, and the watch may not have delivered it yet.
                self._node.update(self._transport.request("GET", path, timeout_s=timeout_s).body)
                continue
            self._node.update(answer.body)
            return


def _own_keys(view: NodeView | None) -> frozenset[str]:
    if view is None:
        return frozenset()
    return frozenset(taint.key for taint in view.taints if taint.key in _OWN_KEYS and taint.effect == EFFECT)

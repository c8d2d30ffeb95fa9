"""The fence: our own NoSchedule taints, which keep the scheduler from refilling a node that is being emptied.

Theory of operation. `spec.taints` is an atomic list: a patch that names one taint replaces them all, and a directive to
delete one silently does nothing (measured). So the whole list is read from the watch of the own Node, changed, and
written back under the resourceVersion it was read with; a 409 means that somebody else wrote: read the list anew.

Promises:

1. Only taints whose key is ours are ever added, changed or removed; all others go back byte for byte as they came.
2. `up` says which of our taints were *seen back* on the Node, not which were asked for.
3. What somebody takes away each time is written again at most as often as `Restraint` says; what is newly wanted does
   not wait for that.
4. `want` never blocks; the newest wish is what is written. Without the right to write (node credentials), `reason` says
   so and the rest of the agent is not affected.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from nodeagent.actuators.conditions import CONTESTED, FORBIDDEN_S
from nodeagent.kube import objects
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.backoff import Restraint, RetryBackoff
from nodeagent.kube.node_watch import NodeView, NodeWatch
from nodeagent.kube.timestamps import boottime
from nodeagent.kube.transport import STRATEGIC_MERGE, Transport
from nodeagent.model import ConditionType, OutcomeKind
from nodeagent.runtime import workers

EFFECT: Final = "NoSchedule"
KEYS: Final = {
    ConditionType.MEMORY_PRESSURE: "nodeagent.io/memory-pressure",
    ConditionType.DISK_PRESSURE: "nodeagent.io/disk-pressure",
    ConditionType.PID_PRESSURE: "nodeagent.io/pid-pressure",
}
_OURS: Final = frozenset(KEYS.values())
CONFLICTS: Final = 5
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
        clock: Callable[[], float] = boottime,
    ) -> None:
        """`wake` is called when what is up has changed."""
        self._transport = transport
        self._node = node
        self._clock = clock
        self._tell = wake
        self._was_up: frozenset[ConditionType] = frozenset()
        self._changed = threading.Condition()
        self._wanted: frozenset[str] | None = None
        self._stopping = False
        self._backoff = RetryBackoff()
        self._not_before = 0.0
        self._restraint = Restraint()
        self._said: frozenset[str] | None = None
        """What was written since it is wanted: to write it once more is a repetition."""
        self._failure = ""
        """Why the last write failed; empty when it did not."""
        node.listen(self._wake)
        self._thread = workers.make_thread(self._run, name="taints")

    def start(self) -> None:
        """Begin to write; returns at once."""
        workers.start(self._thread)

    def want(self, pressures: Iterable[ConditionType]) -> None:
        """The taints that should be up now. Until the first call nothing is touched."""
        with self._changed:
            self._wanted = frozenset(KEYS[pressure] for pressure in pressures)
            self._changed.notify()

    @property
    def reason(self) -> str:
        """What is wrong with writing; empty when nothing is."""
        return self._failure or (CONTESTED if self._restraint.contested else "")

    def present(self) -> frozenset[ConditionType]:
        """Our taints as the Node really has them."""
        there = _ours(self._node.view())
        return frozenset(pressure for pressure, key in KEYS.items() if key in there)

    def stop(self, *, clear: bool = True, timeout_s: float = 3.0) -> None:
        """Stop, and take our taints down if `clear`. Raises `ApiError` when the server refuses that."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        workers.join(self._thread, timeout_s)
        if clear and _ours(self._node.view()):
            self._write(frozenset(), timeout_s=timeout_s)

    def _wake(self) -> None:
        with self._changed:
            up, before = self.present(), self._was_up
            self._was_up = up
            self._changed.notify()
        if up != before:
            self._tell()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._stopping and (wait_s := self._due_in_s()) > 0:
                    self._changed.wait(None if wait_s == float("inf") else wait_s)
                if self._stopping:
                    return
                wanted = self._said = self._wanted or frozenset()
            try:
                self._write(wanted, timeout_s=None)
                self._failure = ""
                self._backoff.succeeded()
            except ApiError as error:
                self._failure, self._said = error.message, None
                wait_s = self._backoff.failed(error.retry_after_s)
                self._not_before = self._clock() + (FORBIDDEN_S if error.status == 403 else wait_s)

    def _due_in_s(self) -> float:
        """Until something has to be written; 0: now; infinite: until there is news."""
        view, now = self._node.view(), self._clock()
        if self._wanted is None or view is None or _ours(view) == self._wanted:
            return float("inf")
        if now < self._not_before:
            return self._not_before - now
        return self._restraint.ask(now) if self._said == self._wanted else 0.0

    def _write(self, wanted: frozenset[str], *, timeout_s: float | None) -> None:
        path = f"/api/v1/nodes/{self._node.node_name}"
        for attempt in range(1, CONFLICTS + 1):
            view = self._node.view()
            if view is None or _ours(view) == wanted:
                return
            kept = [taint for taint in view.taints if taint.key not in _OURS]
            kept += [objects.Taint(key=key, effect=EFFECT) for key in sorted(wanted)]
            body = msgspec.json.encode(
                {"metadata": {"resourceVersion": view.resource_version}, "spec": {"taints": kept}}
            )
            try:
                answer = self._transport.request(
                    "PATCH", path, body=body, content_type=STRATEGIC_MERGE, timeout_s=timeout_s
                )
            except ApiError as error:
                if error.kind is not OutcomeKind.CONFLICT or attempt == CONFLICTS:
                    raise
                # Somebody wrote in between, and the watch may not have brought it yet.
                self._node.learn(self._transport.request("GET", path, timeout_s=timeout_s).body)
                continue
            self._node.learn(answer.body)
            return


def _ours(view: NodeView | None) -> frozenset[str]:
    if view is None:
        return frozenset()
    return frozenset(taint.key for taint in view.taints if taint.key in _OURS and taint.effect == EFFECT)

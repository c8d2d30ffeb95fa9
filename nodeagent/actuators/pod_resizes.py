"""Requests resizes of pods in place (`pods/resize`), without making the loop wait.

Promises:

1. `submit` only encodes and enqueues. A request that was not sent before its deadline is never sent.
2. Every request has the UID and the resourceVersion of the pod that was decided on: another pod of the same name, and
   one that somebody has changed since, are not resized.
3. Only the memory of one container is in the request.
4. Every order becomes exactly one `ResizeOutcome`. "Nothing has changed" is claimed only if that is certain. No request
   is repeated: the policy decides on a newer sample.
"""

import contextlib
import queue
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from nodeagent.kube import api_errors, objects, transport
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.transport import Transport
from nodeagent.model import MemoryAmounts, OutcomeKind, ResizeOrder, ResizeOutcome, ResizeResult, units
from nodeagent.runtime import clock, workers

_RESULTS: Final = {
    OutcomeKind.FORBIDDEN: ResizeResult.FORBIDDEN,
    OutcomeKind.UNAUTHORIZED: ResizeResult.FORBIDDEN,
    OutcomeKind.NOT_FOUND: ResizeResult.NOT_FOUND,
    OutcomeKind.TOO_MANY_REQUESTS: ResizeResult.NOT_SENT,
    OutcomeKind.UNREACHABLE: ResizeResult.NOT_SENT,
    OutcomeKind.CONFLICT: ResizeResult.REFUSED,
    OutcomeKind.INVALID: ResizeResult.REFUSED,
    OutcomeKind.DENIED: ResizeResult.REFUSED,
}
"""What a failure proves; every other one is uncertain."""


class _Request(NamedTuple):
    plan_id: str
    order: ResizeOrder
    body: bytes
    deadline: float
    """CLOCK_BOOTTIME: a suspend counts."""


class _Answer(msgspec.Struct):
    kind: str
    metadata: objects.Meta = msgspec.field(default_factory=objects.Meta)


_answer_decoder: Final = msgspec.json.Decoder(_Answer)


class PodResizer:
    """One worker that sends resizes. `take` returns their outcomes."""

    def __init__(
        self,
        transport: Transport,
        *,
        wake: Callable[[], None] = lambda: None,
        timeout_s: float | None = None,
        clock: Callable[[], float] = clock.boottime,
        outcomes: "queue.SimpleQueue[ResizeOutcome] | None" = None,
    ) -> None:
        """`wake` is called after each outcome. `outcomes`: where they are put, instead of a queue for `take`."""
        self._transport = transport
        self._wake = wake
        self._timeout_s = transport.request_timeout_s if timeout_s is None else timeout_s
        self._clock = clock
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[ResizeOutcome] = queue.SimpleQueue() if outcomes is None else outcomes
        self._thread = workers.make_thread(self._work, name="resize")
        self._started = False

    def submit(self, plan_id: str, order: ResizeOrder) -> None:
        """Request this resize. Never blocks; the outcome follows."""
        if not self._started:
            self._started = True
            workers.start(self._thread)
        self._requests.put(_Request(plan_id, order, resize_body(order), self._clock() + self._timeout_s))

    def take(self) -> tuple[ResizeOutcome, ...]:
        """The outcomes since the last call, oldest first; never waits."""
        return workers.drain(self._outcomes)

    def stop(self) -> None:
        """Let the request in flight end; send no others."""
        if self._started:
            self._requests.put(None)
            workers.join(self._thread, self._timeout_s)

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            order, result, message, error = request.order, ResizeResult.ACCEPTED, "", None
            try:
                self._send(request)
            except ApiError as failure:
                error = failure
                result, message = _result(failure, order), failure.message
            except Exception as failure:
                # A defect of the agent must not end the worker, and it is unknown here whether the request was sent.
                result, message = ResizeResult.UNCERTAIN, f"it may have been sent: {api_errors.explain(failure)}"
            self._outcomes.put(
                ResizeOutcome(
                    request.plan_id,
                    order.pod_uid,
                    order.namespace,
                    order.name,
                    order.container,
                    result,
                    message,
                    self._clock(),
                    retry_after_s=error.retry_after_s if error else None,
                    http_status=error.status if error else None,
                )
            )
            # If the loop cannot be woken, it reads the outcome in its next sync.
            with contextlib.suppress(Exception):
                self._wake()

    def _send(self, request: _Request) -> None:
        order = request.order
        answer = self._transport.request(
            "PATCH",
            f"/api/v1/namespaces/{order.namespace}/pods/{order.name}/resize",
            body=request.body,
            content_type=transport.STRATEGIC_MERGE,
            timeout_s=request.deadline - self._clock(),
        )
        try:
            pod = _answer_decoder.decode(answer.body)
            accepted = pod.kind == "Pod" and pod.metadata.uid == order.pod_uid
        except (msgspec.DecodeError, ValueError, RecursionError):
            accepted = False
        if not accepted:
            raise api_errors.foreign(answer.status, "a body that is not this pod")


def _result(error: ApiError, order: ResizeOrder) -> ResizeResult:
    """What a failed request proves."""
    if error.uncertain:
        return ResizeResult.UNCERTAIN
    if error.status in (404, 405) and f'pods "{order.name}"' not in error.message:
        # A server without the subresource answers with a Status about no object, or with plain text.
        return ResizeResult.NOT_SERVED
    if error.status is not None and not error.from_api:
        return ResizeResult.UNCERTAIN
    return _RESULTS.get(error.kind, ResizeResult.UNCERTAIN)


def resize_body(order: ResizeOrder) -> bytes:
    """A strategic merge patch with the memory of one container; lists of containers merge by name."""
    resources = {"limits": {"memory": units.format_spec_quantity(order.to.limit)}, **_request(order.to)}
    container = {"name": order.container, "resources": resources}
    return msgspec.json.encode(
        {
            "metadata": {"uid": order.pod_uid, "resourceVersion": order.resource_version},
            "spec": {"initContainers" if order.sidecar else "containers": [container]},
        }
    )


def _request(to: MemoryAmounts) -> dict[str, dict[str, str]]:
    return {} if to.request is None else {"requests": {"memory": units.format_spec_quantity(to.request)}}

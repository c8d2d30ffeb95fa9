"""Evicts pods through the API: several at once, each with a deadline, without making the loop wait.

Promises:

1. `submit` only encodes and enqueues. A request that was not sent before its deadline is never sent: after an outage no
   stale eviction goes out.
2. Every request contains the pod's UID, so a new pod of the same name is never evicted.
3. Every answer has its `OutcomeKind` and becomes exactly one `Outcome` for each victim. "Accepted" is only what the API
   defines as that. "Not evicted" is claimed only if it is certain.
4. DELETE, which ignores PodDisruptionBudgets, is used only for a victim with that method. The pod gets the condition
   DisruptionTarget first, which a Job's podFailurePolicy reads.
5. A 400, 404, 409 or 422 may be temporary: the pod is listed, and if it exists the eviction is sent once more, as after
   a 5xx of the API server. No other request is repeated: the policy decides on a newer sample.
"""

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple
from urllib.parse import urlencode

import msgspec

from nodeagent.kube import api_errors, objects, timestamps, transport
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.api_responses import Response
from nodeagent.kube.transport import Transport
from nodeagent.model import MIN_GRACE_S, Method, Outcome, OutcomeKind, Victim
from nodeagent.runtime import clock, workers

WORKERS: Final = 4
"""Requests in flight. A hard decision takes at most five victims; an eviction is answered in 3 to 20 ms."""
PREWARM_EVERY_S: Final = 45.0
"""`prewarm` opens connections again after this; the server closes idle ones after 90 s."""
PREWARM_RETRY_S: Final = 1.0
"""Wait of `prewarm` after connections could not be opened."""
SERVER_RETRY_S: Final = 1.0
"""Pause before an eviction is sent a second time after a 5xx of the API server: etcd elects a leader in about that
time. The request has the pod's UID, so a second one evicts nothing more."""
EVICTION_RETRY_S: Final = 0.3
"""Pause before a refused eviction is sent a second time: a pod's status is updated within milliseconds, and a hard
decision cannot wait for long."""
STOP_S: Final = 5.0
"""Longest wait of a stop for requests in flight; a later process finds their evictions in the state file, uncertain."""
_TEMPORARY: Final = frozenset({400, 404, 409, 422})
"""Answers that may change within a moment (a conflict, an API server that lags)."""
_MARK_SHARE: Final = 0.4
"""At most this share of the deadline is used for the condition DisruptionTarget before a DELETE."""


class _Request(NamedTuple):
    plan_id: str
    victim: Victim
    path: str
    body: bytes
    deadline: float
    """CLOCK_BOOTTIME: a suspend counts."""


class _Status(msgspec.Struct):
    """The answer to an eviction, and possibly to a deletion."""

    kind: str
    status: msgspec.Raw
    """A word in a Status, an object in a Pod."""
    metadata: objects.Meta = msgspec.field(default_factory=objects.Meta)


class _Identity(msgspec.Struct):
    metadata: objects.Meta


class _PodList(msgspec.Struct):
    kind: str
    items: list[_Identity] | None = None


_answer_decoder: Final = msgspec.json.Decoder(_Status)
_list_decoder: Final = msgspec.json.Decoder(_PodList)


class EvictionSender:
    """Workers that send evictions. `take` returns their outcomes."""

    def __init__(
        self,
        transport: Transport,
        *,
        node_name: str = "",
        wake: Callable[[], None] = lambda: None,
        timeout_s: float | None = None,
        threads: int = WORKERS,
        clock: Callable[[], float] = clock.boottime,
        dry_run: bool = False,
        outcomes: "queue.SimpleQueue[Outcome] | None" = None,
    ) -> None:
        """`wake` is called after each outcome. `dry_run`: the server checks the request and evicts nothing.
        `node_name`: a node's credentials can list only the pods of this node. `outcomes`: where they are put, instead
        of a queue for `take`."""
        self._transport = transport
        self._node_name = node_name
        self._wake = wake
        self._timeout_s = transport.request_timeout_s if timeout_s is None else timeout_s
        self._clock = clock
        self._dry_run = dry_run
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue() if outcomes is None else outcomes
        self._in_flight = 0
        self._count_lock = threading.Lock()
        self._prewarming = threading.Lock()
        self._prewarmed_at = -math.inf
        self._threads = [workers.make_thread(self._work, name=f"evict-{n}") for n in range(threads)]
        for thread in self._threads:
            workers.start(thread)

    def submit(self, plan_id: str, victim: Victim) -> None:
        """Evict this victim. Never blocks; the outcome follows."""
        pod = victim.pod
        if not pod.namespace or not pod.name or not pod.uid:
            self._add_outcome(plan_id, victim, OutcomeKind.INVALID, "the pod's namespace, name or UID is unknown")
            return
        if victim.method not in (Method.EVICT, Method.DELETE):
            reason = f"not sent: no eviction of the API has the method {victim.method}"
            self._add_outcome(plan_id, victim, not_sent_kind(victim), reason)
            return
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
        delete = victim.method is Method.DELETE
        try:
            body = (_deletion_body if delete else eviction_body)(victim, dry_run=self._dry_run)
            request = _Request(
                plan_id, victim, path if delete else f"{path}/eviction", body, self._clock() + self._timeout_s
            )
        except Exception as error:
            # The loop continues, and the policy gets the outcome.
            self._add_outcome(plan_id, victim, OutcomeKind.UNREACHABLE, f"not sent: {api_errors.explain(error)}")
            return
        with self._count_lock:
            self._in_flight += 1
        self._requests.put(request)

    def take(self) -> tuple[Outcome, ...]:
        """The outcomes since the last call, oldest first; never waits."""
        return workers.drain(self._outcomes)

    @property
    def in_flight(self) -> int:
        """Victims without an outcome yet."""
        return self._in_flight

    def prewarm(self, connections: int = WORKERS) -> None:
        """Pressure is near: open connections, at most every `PREWARM_EVERY_S`. Returns at once."""
        if time.monotonic() - self._prewarmed_at < PREWARM_EVERY_S or not self._prewarming.acquire(blocking=False):
            return
        self._prewarmed_at = time.monotonic()
        if workers.start_thread(lambda: self._open_connections(connections), name="prewarm") is None:
            # A fork bomb leaves no PID for a thread; the eviction then opens its own connection.
            self._prewarmed_at += PREWARM_RETRY_S - PREWARM_EVERY_S
            self._prewarming.release()

    def stop(self) -> None:
        """Let requests in flight end, for at most `STOP_S`; send no others."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._requests.put(None)
        until = time.monotonic() + min(self._timeout_s, STOP_S)
        for thread in threads:
            workers.join(thread, max(0.0, until - time.monotonic()))

    # --- the workers ------------------------------------------------------------------------------------------------

    def _open_connections(self, connections: int) -> None:
        try:
            self._transport.prewarm(connections)
        except ApiError:
            # The eviction itself reports the error; try again soon, but not in every sync.
            self._prewarmed_at = time.monotonic() - PREWARM_EVERY_S + PREWARM_RETRY_S
        finally:
            self._prewarming.release()

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            kind, message, error = OutcomeKind.ACCEPTED, "", None
            try:
                self._evict(request)
            except ApiError as failure:
                kind, message, error = failure.kind, failure.message, failure
            except Exception as failure:
                # A defect of the agent must not end the worker, and it is unknown here whether the request was sent.
                kind, message = OutcomeKind.TIMED_OUT, f"the eviction may have been sent: {api_errors.explain(failure)}"
            with self._count_lock:
                self._in_flight -= 1
            self._add_outcome(request.plan_id, request.victim, kind, message, error)

    def _evict(self, request: _Request) -> None:
        """Send the request, and once more after a temporary refusal, if the pod still exists."""
        try:
            self._send(request)
            return
        except ApiError as error:
            if error.kind is OutcomeKind.SERVER_ERROR and error.from_api and (error.status or 0) >= 500:
                self._send_after_server_error(request, error)
                return
            denied = error.kind is OutcomeKind.DENIED or error.status not in _TEMPORARY
            if denied and api_errors.NOT_ON_NODE not in error.message:
                raise
            first = error
        self._listed(request, first)
        time.sleep(max(0.0, min(EVICTION_RETRY_S, request.deadline - self._clock())))
        try:
            self._send(request)
        except ApiError as second:
            if first.kind is OutcomeKind.SERVER_ERROR:
                # Not an answer of the API server: the first request may have been carried out.
                raise first from second
            if second.status != 404 or second.kind is OutcomeKind.SERVER_ERROR:
                raise
            # If the pod counts as gone, another pod is evicted: that needs more than a 404.
            if self._listed(request, second):
                kind, detail = OutcomeKind.INVALID, "although the API server lists the pod"
            else:
                kind, detail = OutcomeKind.SERVER_ERROR, "and the API server does not list the node's pods"
            raise ApiError(kind, f"{second.message}: twice, {detail}", status=404) from second

    def _send_after_server_error(self, request: _Request, first: ApiError) -> None:
        time.sleep(max(0.0, min(SERVER_RETRY_S, request.deadline - self._clock())))
        try:
            self._send(request)
        except ApiError as second:
            # The first request may have been carried out, whatever this answer is.
            raise first from second

    def _listed(self, request: _Request, refusal: ApiError) -> bool:
        """True if the API server lists the victim, False if it does not answer. Raises ApiError if no pod or another
        pod has its name."""
        pod = request.victim.pod
        selector = f"metadata.name={pod.name}" + (f",spec.nodeName={self._node_name}" if self._node_name else "")
        path = f"/api/v1/namespaces/{pod.namespace}/pods?{urlencode({'fieldSelector': selector})}"
        try:
            answer = self._transport.request("GET", path, timeout_s=request.deadline - self._clock())
            listed = _list_decoder.decode(answer.body)
        except (ApiError, msgspec.DecodeError, ValueError, RecursionError):
            return False
        if listed.kind != "PodList":
            return False
        uids = [each.metadata.uid for each in listed.items or ()]
        if pod.uid in uids:
            return True
        if refusal.kind is OutcomeKind.SERVER_ERROR:
            # Not an answer of the API server: this eviction itself may have removed the pod.
            raise refusal
        kind = OutcomeKind.CONFLICT if uids and refusal.status != 404 else OutcomeKind.NOT_FOUND
        message = f"{refusal.message}; the API server does not list the pod any more"
        raise ApiError(kind, message, status=refusal.status) from refusal

    def _send(self, request: _Request) -> None:
        # A deadline that has passed in the queue, or in suspend, makes the transport refuse before it sends.
        left_s = request.deadline - self._clock()
        try:
            if request.victim.method is Method.DELETE:
                self._add_disruption_target(request, timeout_s=left_s * _MARK_SHARE)
                left_s = request.deadline - self._clock()
                answer = self._transport.request("DELETE", request.path, body=request.body, timeout_s=left_s)
            else:
                answer = self._transport.request("POST", request.path, body=request.body, timeout_s=left_s)
        except ApiError as error:
            raise _as_proven(error) from error
        _check_accepted(answer, request.victim)

    def _add_disruption_target(self, request: _Request, *, timeout_s: float) -> None:
        """Add the condition DisruptionTarget before a DELETE."""
        try:
            self._transport.request(
                "PATCH",
                f"{request.path}/status{'?dryRun=All' if self._dry_run else ''}",
                body=_disruption_target(request.victim, at=time.time()),
                content_type=transport.STRATEGIC_MERGE,
                timeout_s=timeout_s,
            )
        except ApiError as error:
            if error.kind is OutcomeKind.NOT_FOUND:
                raise
            if error.kind is OutcomeKind.CONFLICT or error.status == 422:
                error.kind = OutcomeKind.CONFLICT
                raise
            # Not allowed or not answered: the condition informs other controllers, the DELETE saves the node.

    def _add_outcome(
        self, plan_id: str, victim: Victim, kind: OutcomeKind, message: str, error: ApiError | None = None
    ) -> None:
        self._outcomes.put(
            Outcome(
                plan_id=plan_id,
                pod_uid=victim.pod.uid,
                kind=kind,
                message=message,
                at=self._clock(),
                retry_after_s=error.retry_after_s if error else None,
                http_status=error.status if error else None,
            )
        )
        # If the loop cannot be woken, it reads the outcome in its next sync.
        with contextlib.suppress(Exception):
            self._wake()


def not_sent_kind(victim: Victim) -> OutcomeKind:
    """The outcome of a victim for which nothing left the node."""
    return OutcomeKind.NOT_REQUESTED if victim.method is Method.REQUEST else OutcomeKind.UNREACHABLE


def _check_accepted(answer: Response, victim: Victim) -> None:
    """Raise ApiError for any answer but those of the API: a Status with Success, or the pod itself after a DELETE."""
    delete = victim.method is Method.DELETE
    try:
        decoded = _answer_decoder.decode(answer.body)
        if decoded.kind == "Status" and msgspec.json.decode(decoded.status) == "Success":
            return
        if decoded.kind == "Pod" and delete and decoded.metadata.uid == victim.pod.uid:
            return
        what = f"an object of kind {decoded.kind[:40]!r}"
    except (msgspec.DecodeError, ValueError, RecursionError):
        what = "a body that the API does not define"
    message = f"HTTP {answer.status} with {what}: whether the pod was evicted is not known"
    raise ApiError(OutcomeKind.SERVER_ERROR, message, status=answer.status)


def _as_proven(error: ApiError) -> ApiError:
    """The error with a kind that the answer proves: a refusal counts only if the API server sent it and the request was
    sent once."""
    if error.status is None:
        return error
    if error.uncertain:
        message = f"the connection broke after the request was sent; sent again, it was answered: {error.message}"
        return ApiError(OutcomeKind.TIMED_OUT, message)
    if not error.from_api and error.kind is not OutcomeKind.SERVER_ERROR:
        message = f"{error.message}; whether the pod was evicted is not known"
        return ApiError(OutcomeKind.SERVER_ERROR, message, status=error.status, retry_after_s=error.retry_after_s)
    return error


def eviction_body(victim: Victim, *, dry_run: bool = False) -> bytes:
    """A policy/v1 Eviction with its deleteOptions."""
    return msgspec.json.encode(
        {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": victim.pod.name, "namespace": victim.pod.namespace},
            "deleteOptions": _delete_options(victim, dry_run=dry_run),
        }
    )


def _deletion_body(victim: Victim, *, dry_run: bool) -> bytes:
    """The body of a DELETE. It contains the grace period, because with a body the server ignores the query."""
    return msgspec.json.encode(
        {"apiVersion": "v1", "kind": "DeleteOptions", **_delete_options(victim, dry_run=dry_run)}
    )


def _delete_options(victim: Victim, *, dry_run: bool) -> dict[str, object]:
    options: dict[str, object] = {
        "gracePeriodSeconds": max(MIN_GRACE_S, math.ceil(victim.grace_period_s)),
        "preconditions": {"uid": victim.pod.uid},
    }
    if dry_run:
        options["dryRun"] = ["All"]
    return options


def _disruption_target(victim: Victim, *, at: float) -> bytes:
    """A patch that the server refuses for another pod of the same name (422), because of the UID."""
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "TerminationByNodeAgent",
        "message": victim.message,
        "lastTransitionTime": timestamps.rfc3339(at),
    }
    return msgspec.json.encode({"metadata": {"uid": victim.pod.uid}, "status": {"conditions": [condition]}})

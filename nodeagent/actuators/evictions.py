"""Evicts pods through the API: several at once, each with a deadline, never in the way of the loop.

Promises:

1. `submit` only encodes and enqueues. What could not be sent before its deadline is not sent any more: after an outage
   nothing stale goes out.
2. Every request names the pod by UID, so a successor with the same name is never hit.
3. Every answer is told apart (`OutcomeKind`) and comes back as exactly one `Outcome` for each victim. Accepted is only
   what the API defines as that. That nothing was evicted is claimed only where it is known.
4. DELETE, which no budget stops, is used only for a victim whose method says so; the pod is marked as disrupted first,
   so that a Job's podFailurePolicy can tell.

5. A 400, 404, 409 or 422 may be a moment's: the pod is listed, and where it is still there it is asked for once more.

Other answers are not asked for again: a refusal or a time-out goes back to the policy, which looks at a newer sample.
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

from nodeagent.kube import api_errors, objects
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.api_responses import Response
from nodeagent.kube.timestamps import boottime, rfc3339
from nodeagent.kube.transport import STRATEGIC_MERGE, Transport
from nodeagent.model import MIN_GRACE_S, Method, Outcome, OutcomeKind, Victim
from nodeagent.runtime import workers

WORKERS: Final = 4
"""Requests in flight. A hard decision takes at most five victims; an eviction is answered in 3 to 20 ms."""
WARM_FOR_S: Final = 45.0
"""Connections opened by `warm` are opened again after this; the server closes idle ones after 90 s."""
WARM_AGAIN_S: Final = 1.0
"""After connections could not be opened it is tried again at the first hint after this."""
ASK_AGAIN_S: Final = 0.3
"""Pause before a refused eviction is asked for a second time: a pod's status is updated within milliseconds, and a hard
decision cannot wait for long."""
_ASK_AGAIN: Final = frozenset({400, 404, 409, 422})
"""Answers about this one request or pod that may be gone the next moment (a conflict, an API server that lags)."""
_MARK_SHARE: Final = 0.4
"""Of the deadline, at most this much goes into marking the pod before a DELETE."""


class _Job(NamedTuple):
    plan_id: str
    victim: Victim
    path: str
    body: bytes
    deadline: float
    """CLOCK_BOOTTIME: what the machine was suspended counts."""


class _Status(msgspec.Struct):
    """What answers an eviction, and may answer a deletion."""

    kind: str
    status: msgspec.Raw
    """Of a Status a word, of a Pod an object."""
    metadata: objects.Meta = msgspec.field(default_factory=objects.Meta)


class _Identity(msgspec.Struct):
    metadata: objects.Meta


class _PodList(msgspec.Struct):
    kind: str
    items: list[_Identity] | None = None


_answer_decoder: Final = msgspec.json.Decoder(_Status)
_list_decoder: Final = msgspec.json.Decoder(_PodList)


class EvictionSender:
    """Workers that send evictions. Read what became of them with `take`."""

    def __init__(
        self,
        transport: Transport,
        *,
        node_name: str = "",
        wake: Callable[[], None] = lambda: None,
        timeout_s: float | None = None,
        threads: int = WORKERS,
        clock: Callable[[], float] = boottime,
        dry_run: bool = False,
    ) -> None:
        """`wake` is called when an outcome is there. `dry_run` asks the server to check and do nothing. A node's
        credentials may list pods with its `node_name` only."""
        self._transport = transport
        self._node_name = node_name
        self._wake = wake
        self._timeout_s = transport.request_timeout_s if timeout_s is None else timeout_s
        self._clock = clock
        self._dry_run = dry_run
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._in_flight = 0
        self._counting = threading.Lock()
        self._warming = threading.Lock()
        self._warmed_at = -math.inf
        self._threads = [workers.make_thread(self._work, name=f"evict-{n}") for n in range(threads)]
        for thread in self._threads:
            workers.start(thread)

    def submit(self, plan_id: str, victim: Victim) -> None:
        """Have this victim evicted. Never blocks; the outcome follows."""
        pod = victim.pod
        if not pod.namespace or not pod.name or not pod.uid:
            self._answer(plan_id, victim, OutcomeKind.INVALID, "the pod's namespace, name or UID is not known")
            return
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
        evict = victim.method is Method.EVICT
        try:
            body = eviction_body(victim, dry_run=self._dry_run) if evict else _options(victim, dry_run=self._dry_run)
            job = _Job(plan_id, victim, f"{path}/eviction" if evict else path, body, self._clock() + self._timeout_s)
        except Exception as error:
            # The loop goes on, and the policy hears of it.
            self._answer(plan_id, victim, OutcomeKind.UNREACHABLE, f"not sent: {api_errors.explain(error)}")
            return
        with self._counting:
            self._in_flight += 1
        self._jobs.put(job)

    def take(self) -> tuple[Outcome, ...]:
        """The outcomes since the last call, oldest first; never waits."""
        taken = []
        while True:
            try:
                taken.append(self._outcomes.get_nowait())
            except queue.Empty:
                return tuple(taken)

    @property
    def in_flight(self) -> int:
        """Victims without an outcome yet."""
        return self._in_flight

    def prewarm(self, connections: int = WORKERS) -> None:
        """Pressure is near: see to it that connections are open. Returns at once and asks the server rarely."""
        if time.monotonic() - self._warmed_at < WARM_FOR_S or not self._warming.acquire(blocking=False):
            return
        self._warmed_at = time.monotonic()
        if workers.start_thread(lambda: self._warm(connections), name="prewarm") is None:
            # A fork bomb leaves no PID for a thread, which is no reason not to evict it on a cold connection.
            self._warmed_at += WARM_AGAIN_S - WARM_FOR_S
            self._warming.release()

    def stop(self) -> None:
        """Let requests in flight end; start no others."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            workers.join(thread, self._timeout_s)

    # --- the workers ------------------------------------------------------------------------------------------------

    def _warm(self, connections: int) -> None:
        try:
            self._transport.prewarm(connections)
        except ApiError:
            # The eviction itself will say what is wrong; try again soon, but not in every turn of the loop.
            self._warmed_at = time.monotonic() - WARM_FOR_S + WARM_AGAIN_S
        finally:
            self._warming.release()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            kind, message, error = OutcomeKind.ACCEPTED, "", None
            try:
                self._evict(job)
            except ApiError as failure:
                kind, message, error = failure.kind, failure.message, failure
            except Exception as failure:
                # A defect of ours must not take a worker away, and whether the request had left is not known here.
                kind, message = OutcomeKind.TIMED_OUT, f"the eviction may have been sent: {api_errors.explain(failure)}"
            with self._counting:
                self._in_flight -= 1
            self._answer(job.plan_id, job.victim, kind, message, error)

    def _evict(self, job: _Job) -> None:
        """Ask, and after a refusal that may be a moment's once more, if the pod is still there."""
        try:
            self._send(job)
            return
        except ApiError as error:
            if error.status not in _ASK_AGAIN:
                raise
            first = error
        self._listed(job, first)
        time.sleep(max(0.0, min(ASK_AGAIN_S, job.deadline - self._clock())))
        try:
            self._send(job)
        except ApiError as second:
            if first.kind is OutcomeKind.SERVER_ERROR:
                # Not the API's: it may have been passed on, whatever became of the second.
                raise first from second
            if second.status != 404 or second.kind is OutcomeKind.SERVER_ERROR:
                raise
            # Whoever is told that a pod is gone takes another one: that needs more than a 404.
            if self._listed(job, second):
                kind, why = OutcomeKind.INVALID, "although the API server lists the pod"
            else:
                kind, why = OutcomeKind.SERVER_ERROR, "and the API server does not list the node's pods"
            raise ApiError(kind, f"{second.message}: twice, {why}", status=404) from second

    def _listed(self, job: _Job, refusal: ApiError) -> bool:
        """Whether the API server lists the victim; False where it does not answer that. Raises when another pod has its
        name, or none."""
        pod = job.victim.pod
        selector = f"metadata.name={pod.name}" + (f",spec.nodeName={self._node_name}" if self._node_name else "")
        path = f"/api/v1/namespaces/{pod.namespace}/pods?{urlencode({'fieldSelector': selector})}"
        try:
            answer = self._transport.request("GET", path, timeout_s=job.deadline - self._clock())
            listed = _list_decoder.decode(answer.body)
        except (ApiError, msgspec.DecodeError, ValueError, RecursionError):
            return False
        if listed.kind != "PodList":
            return False
        uids = [each.metadata.uid for each in listed.items or ()]
        if pod.uid in uids:
            return True
        if refusal.kind is OutcomeKind.SERVER_ERROR:
            # Not the API's answer: it may be our own eviction by which the pod has gone.
            raise refusal
        kind = OutcomeKind.CONFLICT if uids and refusal.status != 404 else OutcomeKind.NOT_FOUND
        message = f"{refusal.message}; the API server does not list the pod any more"
        raise ApiError(kind, message, status=refusal.status) from refusal

    def _send(self, job: _Job) -> None:
        # A deadline that has passed in the queue, or in suspend, makes the transport refuse before it sends.
        left = job.deadline - self._clock()
        try:
            if job.victim.method is Method.EVICT:
                answer = self._transport.request("POST", job.path, body=job.body, timeout_s=left)
            else:
                self._mark(job, timeout_s=left * _MARK_SHARE)
                left = job.deadline - self._clock()
                answer = self._transport.request("DELETE", job.path, body=job.body, timeout_s=left)
        except ApiError as error:
            raise _as_proven(error) from error
        _check_accepted(answer, job.victim)

    def _mark(self, job: _Job, *, timeout_s: float) -> None:
        """The DisruptionTarget condition before a DELETE."""
        try:
            self._transport.request(
                "PATCH",
                f"{job.path}/status{'?dryRun=All' if self._dry_run else ''}",
                body=_disruption_target(job.victim, at=time.time()),
                content_type=STRATEGIC_MERGE,
                timeout_s=timeout_s,
            )
        except ApiError as error:
            if error.kind is OutcomeKind.NOT_FOUND:
                raise
            if error.kind is OutcomeKind.CONFLICT or error.status == 422:
                error.kind = OutcomeKind.CONFLICT
                raise
            # Not allowed or not answered: the mark is for others' book-keeping, the DELETE is for the node.

    def _answer(
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
        # Where the loop cannot be woken it finds the outcome in its next turn.
        with contextlib.suppress(Exception):
            self._wake()


def _check_accepted(answer: Response, victim: Victim) -> None:
    """Raise unless this is what the API defines: a Status with Success, or to a DELETE the pod itself."""
    evict = victim.method is Method.EVICT
    try:
        said = _answer_decoder.decode(answer.body)
        if said.kind == "Status" and msgspec.json.decode(said.status) == "Success":
            return
        if said.kind == "Pod" and not evict and said.metadata.uid == victim.pod.uid:
            return
        what = f"an object of kind {said.kind[:40]!r}"
    except (msgspec.DecodeError, ValueError, RecursionError):
        what = "a body that the API does not define"
    message = f"HTTP {answer.status} with {what}: whether the pod was evicted is not known"
    raise ApiError(OutcomeKind.SERVER_ERROR, message, status=answer.status)


def _as_proven(error: ApiError) -> ApiError:
    """The same, with a kind that claims no more than the answer proves: a refusal is one only if the API server gave it
    and the request was sent once."""
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
    """policy/v1 Eviction with its deleteOptions."""
    return msgspec.json.encode(
        {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": victim.pod.name, "namespace": victim.pod.namespace},
            "deleteOptions": _delete_options(victim, dry_run=dry_run),
        }
    )


def _options(victim: Victim, *, dry_run: bool) -> bytes:
    """The body of a DELETE. The grace stands here because with a body the server ignores the query's."""
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
    """The UID in the patch makes the server refuse it for another pod of the same name (422)."""
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "TerminationByNodeAgent",
        "message": victim.message,
        "lastTransitionTime": rfc3339(at),
    }
    return msgspec.json.encode({"metadata": {"uid": victim.pod.uid}, "status": {"conditions": [condition]}})

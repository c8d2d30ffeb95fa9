"""Evicts pods through the API: several at once, each with a deadline, never in the way of the loop.

Promises:

1. `submit` only encodes and enqueues. What could not be sent before its deadline is not sent any more: after an outage
   nothing stale goes out.
2. Every request names the pod by UID, so a successor with the same name is never hit.
3. Every answer is told apart (`OutcomeKind`) and comes back as exactly one `Outcome` for each victim.
4. DELETE, which no budget stops, is used only for a victim whose method says so; the pod is marked as disrupted first,
   so that a Job's podFailurePolicy can tell.

Requests are not repeated here: a refusal or a time-out goes back to the policy, which looks at a newer sample.
"""

import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from nodeagent.cluster.clock import boottime, stamp
from nodeagent.cluster.transport import JSON, STRATEGIC_MERGE, ApiError, Transport
from nodeagent.host import workers
from nodeagent.model import Method, Outcome, OutcomeKind, Victim

WORKERS: Final = 4
"""Requests in flight. A hard decision takes at most five victims; an eviction is answered in 3 to 20 ms."""
SHORTEST_GRACE_S: Final = 1
"""0 would remove the object at once while its containers still run (KUBELET-CONTRACT §14)."""
WARM_FOR_S: Final = 45.0
"""Connections opened by `warm` are opened again after this; the server closes idle ones after 90 s."""
WARM_AGAIN_S: Final = 1.0
"""After connections could not be opened it is tried again at the first hint after this."""
_MARK_SHARE: Final = 0.4
"""Of the deadline, at most this much goes into marking the pod before a DELETE."""


class _Job(NamedTuple):
    plan_id: str
    victim: Victim
    path: str
    body: bytes
    deadline: float
    """CLOCK_BOOTTIME: what the machine was suspended counts."""


class Evictor:
    """Workers that send evictions. Read what became of them with `take`."""

    def __init__(
        self,
        transport: Transport,
        *,
        wake: Callable[[], None] = lambda: None,
        timeout_s: float | None = None,
        threads: int = WORKERS,
        clock: Callable[[], float] = boottime,
        dry_run: bool = False,
    ) -> None:
        """`wake` is called when an outcome is there. `dry_run` asks the server to check and do nothing."""
        self._transport = transport
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
        self._threads = [workers.thread_of(self._work, name=f"evict-{n}") for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, plan_id: str, victim: Victim) -> None:
        """Have this victim evicted. Never blocks; the outcome follows."""
        if not victim.pod.namespace or not victim.pod.name:
            self._answer(plan_id, victim, OutcomeKind.INVALID, "the pod's name is not known")
            return
        with self._counting:
            self._in_flight += 1
        path = f"/api/v1/namespaces/{victim.pod.namespace}/pods/{victim.pod.name}"
        evict = victim.method is Method.EVICT
        self._jobs.put(
            _Job(
                plan_id,
                victim,
                f"{path}/eviction" if evict else path,
                eviction_body(victim, dry_run=self._dry_run) if evict else _options(victim, dry_run=self._dry_run),
                self._clock() + self._timeout_s,
            )
        )

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

    def warm(self, connections: int = WORKERS) -> None:
        """Pressure is near: see to it that connections are open. Returns at once and asks the server rarely."""
        if time.monotonic() - self._warmed_at < WARM_FOR_S or not self._warming.acquire(blocking=False):
            return
        self._warmed_at = time.monotonic()
        if workers.begin(lambda: self._warm(connections), name="warm") is None:
            # A fork bomb leaves no PID for a thread, which is no reason not to evict it on a cold connection.
            self._warmed_at += WARM_AGAIN_S - WARM_FOR_S
            self._warming.release()

    def stop(self) -> None:
        """Let requests in flight end; start no others."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(self._timeout_s)

    # --- the workers ------------------------------------------------------------------------------------------------

    def _warm(self, connections: int) -> None:
        try:
            self._transport.warm(connections)
        except ApiError:
            # The eviction itself will say what is wrong; try again soon, but not in every turn of the loop.
            self._warmed_at = time.monotonic() - WARM_FOR_S + WARM_AGAIN_S
        finally:
            self._warming.release()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            kind, message, error = OutcomeKind.ACCEPTED, "", None
            try:
                self._send(job)
            except ApiError as failure:
                kind, message, error = failure.kind, failure.message, failure
            except Exception as failure:
                # A defect of ours must not take a worker away, and the loop must hear of it.
                kind, message = OutcomeKind.INVALID, f"{type(failure).__name__}: {failure}"
            with self._counting:
                self._in_flight -= 1
            self._answer(job.plan_id, job.victim, kind, message, error)

    def _send(self, job: _Job) -> None:
        # A deadline that has passed in the queue, or in suspend, makes the transport refuse before it sends.
        left = job.deadline - self._clock()
        if job.victim.method is Method.EVICT:
            self._transport.request("POST", job.path, body=job.body, timeout_s=left)
            return
        self._mark(job, timeout_s=left * _MARK_SHARE)
        left = job.deadline - self._clock()
        self._transport.request("DELETE", job.path, body=job.body, content_type=JSON, timeout_s=left)

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
            if error.kind is OutcomeKind.GONE:
                raise
            if error.kind is OutcomeKind.REPLACED or error.status == 422:
                raise ApiError(OutcomeKind.REPLACED, error.message, status=error.status) from error
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
        self._wake()


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
        "gracePeriodSeconds": max(SHORTEST_GRACE_S, math.ceil(victim.grace_period_s)),
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
        "lastTransitionTime": stamp(at),
    }
    return msgspec.json.encode({"metadata": {"uid": victim.pod.uid}, "status": {"conditions": [condition]}})

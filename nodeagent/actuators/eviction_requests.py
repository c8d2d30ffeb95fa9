"""EvictionRequests in the API: whether the server serves them, made for victims, followed, withdrawn.

Written from KEP-4563 (kubernetes/enhancements at 64765b4b, keps/sig-node/4563-eviction-request-api), not from
recordings. The KEP names the requester `spec.requesterName`, the API as released in Kubernetes 1.37
`spec.requester`: both are sent, because a server drops the field that it does not know.

Promises:

1. No call waits. One thread discovers, creates, reads and withdraws, one request at a time, each with a deadline.
2. A request that was not sent before its deadline is never sent. Each victim gets one outcome for that, and "not
   requested" is claimed only if it is certain. A request that exists may get two more: "failed", "withdrawn".
3. Only requests of this agent are changed: the name contains the pod's UID, and each change contains the requester,
   which the API server lets nobody change.
4. A withdrawal is confirmed only by an answer that shows it, or by one that shows that no request of this agent exists
   or can still come in. Until then it is repeated, with the reason; no other request waits for that.
5. What is open or to be withdrawn comes from the policy's state with each decision (`follow`), so that a restart goes
   on where the last process stopped.

Theory of operation. The EvictionRequest's controller makes an Eviction (of the same API group) for the pod, whose
responders act one after the other; the last one, the controller's own, uses the pod's eviction subresource. The
requester sees the end: the pod leaves, or the condition `Failed` is True. It withdraws with `spec.intent: Withdrawn`.
The pod owns the request (ownerReferences), so the API server removes it with the pod, also if the agent is gone.
"""

import queue
import threading
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple
from urllib.parse import quote

import msgspec

from nodeagent.kube import api_errors, objects
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.transport import Transport
from nodeagent.model import EvictionRequestOrder, Outcome, OutcomeKind, Victim
from nodeagent.runtime import clock, workers

GROUP: Final = "lifecycle.k8s.io"
RESOURCE: Final = "evictionrequests"
ROOT: Final = "/apis/lifecycle.k8s.io/v1alpha1"
REQUESTER: Final = "nodeagent.io/nodeagent"
MERGE: Final = "application/merge-patch+json"
POLL_S: Final = 5.0
"""How often an open request is read. Its end is in the list of the pods at once; only `Failed` is seen by this."""
DISCOVERY_S: Final = 600.0
"""How often the API server is asked whether it serves the resource: that changes with its version and flags alone."""
MAX_WAIT_S: Final = 60.0
"""Longest wait after failures."""
LATE_S: Final = 60.0
"""How long a creation without a complete answer may still be carried out: the API server ends requests after this
(`--request-timeout`)."""
MAX_CONFIRMED: Final = 64
"""Requests of which the outcome "requested" is not given again; a few are open at a time."""
_EVICTION: Final = "Eviction"
_WITHDRAWN: Final = "Withdrawn"


class _Resource(msgspec.Struct):
    name: str = ""


class _ResourceList(msgspec.Struct):
    resources: list[_Resource] | None = None


class _PodTarget(msgspec.Struct):
    name: str = ""
    uid: str = ""


class _Target(msgspec.Struct):
    pod: _PodTarget | None = None


class _Spec(msgspec.Struct, rename="camel"):
    target: _Target = msgspec.field(default_factory=_Target)
    requester: str = ""
    requester_name: str = ""
    intent: str = ""


class _Condition(msgspec.Struct):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class _Status(msgspec.Struct, rename="camel"):
    conditions: list[_Condition] | None = None
    observed_generation: int | None = None


class _Metadata(msgspec.Struct):
    generation: int = 0


class _EvictionRequest(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


_resources: Final = objects.Decoder(_ResourceList)
_request: Final = objects.Decoder(_EvictionRequest)


class _Creation(NamedTuple):
    plan_id: str
    victim: Victim
    deadline: float
    """CLOCK_BOOTTIME."""


class _Followed:
    """One order, and when its object is read or withdrawn next."""

    def __init__(self, order: EvictionRequestOrder, *, since: float, next_at: float, backoff: RetryBackoff) -> None:
        self.order = order
        self.since = since
        self.next_at = next_at
        self.backoff = backoff
        self.trouble = ""
        self.ended = False
        """Its last outcome was given: the policy drops it, or orders something else."""


class EvictionRequests:
    """The worker for EvictionRequests. `take` returns its outcomes."""

    def __init__(
        self,
        transport: Transport,
        *,
        wake: Callable[[], None] = lambda: None,
        timeout_s: float | None = None,
        clock: Callable[[], float] = clock.boottime,
        poll_s: float = POLL_S,
        make_backoff: Callable[[], RetryBackoff] = lambda: RetryBackoff(last_s=MAX_WAIT_S),
        outcomes: "queue.SimpleQueue[Outcome] | None" = None,
    ) -> None:
        """`wake` is called after each outcome, and when the resource is served or no longer served. `outcomes`: where
        they are put, instead of a queue for `take`."""
        self._transport = transport
        self._wake = wake
        self._timeout_s = transport.request_timeout_s if timeout_s is None else timeout_s
        self._clock = clock
        self._poll_s = poll_s
        self._make_backoff = make_backoff
        self._backoff = make_backoff()
        """Of the discovery."""
        self._condition = threading.Condition()
        self._stopping = False
        self._creations: queue.SimpleQueue[_Creation] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue() if outcomes is None else outcomes
        self._followed: dict[tuple[str, str], _Followed] = {}
        self._confirmed: list[tuple[str, str]] = []
        """The last requests that are known to exist, by plan and UID."""
        self._discover_at = clock()
        self.served = False
        """The API server serves the resource, by its last answer."""
        self._discovery_trouble = ""
        self._thread = workers.make_thread(self._run, name="eviction-requests")

    @property
    def reason(self) -> str:
        """Why EvictionRequests are not used, or what fails; empty if nothing does."""
        troubles = (self._discovery_trouble, *[each.trouble for each in self._followed.values()])
        return "; ".join(dict.fromkeys(trouble for trouble in troubles if trouble))

    def start(self) -> None:
        workers.start(self._thread)

    def submit(self, plan_id: str, victim: Victim) -> None:
        """Make the request for this victim. Never blocks; the outcome follows."""
        self._creations.put(_Creation(plan_id, victim, self._clock() + self._timeout_s))
        with self._condition:
            self._condition.notify_all()

    def follow(self, orders: Iterable[EvictionRequestOrder]) -> None:
        """All requests that are open or to be withdrawn; those that are missing are done."""
        now = self._clock()
        with self._condition:
            before, self._followed = self._followed, {}
            for order in orders:
                key = order.plan_id, order.pod_uid
                known = before.get(key)
                if known is None or known.order.withdraw is not order.withdraw:
                    next_at = now if order.withdraw else now + self._poll_s
                    known = _Followed(order, since=now, next_at=next_at, backoff=self._make_backoff())
                self._followed[key] = known
            if self._followed != before:
                self._condition.notify_all()

    def take(self) -> tuple[Outcome, ...]:
        """The outcomes since the last call, oldest first; never waits."""
        return workers.drain(self._outcomes)

    def stop(self) -> None:
        """End the thread after its present request. Open requests stay: the next process follows them."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        workers.join(self._thread, self._timeout_s)

    def withdraw_all(self) -> str:
        """Withdraw every open request, after `stop`. Returns what could not be withdrawn; to be called again then."""
        troubles = []
        for followed in [each for each in self._followed.values() if not each.ended]:
            try:
                trouble = self._withdraw(followed)
            except (ApiError, objects.UnreadableError) as error:
                trouble = str(error)
            if trouble:
                troubles.append(f"an EvictionRequest is not withdrawn: {trouble}")
        return "; ".join(dict.fromkeys(troubles))

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            try:
                creation = self._creations.get_nowait()
            except queue.Empty:
                self._next_step()
            else:
                self._create(creation)

    def _next_step(self) -> None:
        """Discover, read or withdraw what is due, or wait."""
        with self._condition:
            if self._stopping or not self._creations.empty():
                return  # a request is made before it is withdrawn
            now = self._clock()
            due = [each for each in self._followed.values() if not each.ended]
            followed = min(due, key=lambda each: each.next_at, default=None)
            if followed is not None and self._discover_at <= followed.next_at:
                followed = None
            wait_s = (self._discover_at if followed is None else followed.next_at) - now
            if wait_s > 0:
                self._condition.wait(wait_s)
                return
        # What fails is due again after what is due now: no failure keeps another request from being withdrawn.
        if followed is None:
            self._discovery_trouble, again_s = self._attempt(lambda: self._discover(now), self._backoff)
            if again_s:
                self._discover_at = self._clock() + again_s
        else:
            step = self._withdraw if followed.order.withdraw else self._read
            followed.trouble, again_s = self._attempt(lambda: step(followed), followed.backoff)
            if again_s:
                followed.next_at = self._clock() + again_s

    def _attempt(self, step: Callable[[], str], backoff: RetryBackoff) -> tuple[str, float]:
        """What is wrong, as `step` returns it or fails with, and after how long it is repeated; 0: as it has set."""
        try:
            trouble = step()
        except (ApiError, objects.UnreadableError) as error:
            return str(error), backoff.failed(error.retry_after_s if isinstance(error, ApiError) else None)
        backoff.succeeded()
        return trouble, 0.0

    def _discover(self, now: float) -> str:
        before = self.served
        try:
            found = _resources.decode(self._transport.request("GET", ROOT).body).resources or ()
            self.served = any(each.name == RESOURCE for each in found)
        except ApiError as error:
            if error.status not in (403, 404):
                raise
            self.served = False
        self._discover_at = now + DISCOVERY_S
        if before is not self.served:
            self._wake()
        return "" if self.served else f"the API server serves no {RESOURCE} in {ROOT}: the Eviction API is used"

    def _create(self, creation: _Creation) -> None:
        plan_id, victim, _ = creation
        kind, message = OutcomeKind.REQUESTED, ""
        try:
            message = self._send(creation)
        except ApiError as error:
            kind = OutcomeKind.NOT_REQUESTED if _is_certain(error) else OutcomeKind.REQUEST_UNCERTAIN
            message = error.message
            if error.status == 404:
                self._discover_at = self._clock()
        except Exception as error:
            # A defect of the agent must not end the worker, and it is unknown here whether the request was sent.
            kind, message = OutcomeKind.REQUEST_UNCERTAIN, f"it may have been sent: {api_errors.explain(error)}"
        if kind is not OutcomeKind.NOT_REQUESTED:
            self._follow_made(plan_id, victim)
        self._put(plan_id, victim.pod.uid, kind, message)

    def _follow_made(self, plan_id: str, victim: Victim) -> None:
        """The policy orders the same with its next decision. A reload to a dry run may come before."""
        order = EvictionRequestOrder(plan_id, victim.pod.uid, victim.pod.namespace or "", withdraw=False)
        now = self._clock()
        made = _Followed(order, since=now, next_at=now + self._poll_s, backoff=self._make_backoff())
        with self._condition:
            self._followed.setdefault((plan_id, victim.pod.uid), made)

    def _send(self, creation: _Creation) -> str:
        """Create the object, or take up the one of an earlier request. Returns what is worth knowing. Raises
        ApiError."""
        pod = creation.victim.pod
        if not pod.namespace or not pod.name or not pod.uid:
            raise ApiError(OutcomeKind.UNREACHABLE, "the pod's namespace, name or UID is unknown")
        path = _collection(pod.namespace)
        try:
            made = self._transport.request(
                "POST", path, body=body_of(creation.plan_id, creation.victim), timeout_s=self._left_s(creation)
            )
            _check_intent(_decoded(made.body), pod.uid, _EVICTION)
            return ""
        except ApiError as error:
            if error.status != 409 or error.uncertain:
                raise
            conflict = error
        named = f"{path}/{name_of(pod.uid)}"
        try:
            found = _decoded(self._transport.request("GET", named, timeout_s=self._left_s(creation)).body)
        except ApiError as error:
            # There is one, which may be an open one of this agent.
            error.uncertain = not (error.status == 404 and error.from_api)
            raise
        if not _is_own(found, pod.uid):
            raise conflict
        if found.spec.intent != _EVICTION:
            patch = _intent(_EVICTION)
            self._transport.request("PATCH", named, body=patch, content_type=MERGE, timeout_s=self._left_s(creation))
        return "it existed already"

    def _left_s(self, creation: _Creation) -> float:
        return creation.deadline - self._clock()

    def _read(self, followed: _Followed) -> str:
        """Read an open request. The outcome is given if it exists, and again if it has failed."""
        order = followed.order
        try:
            found = _decoded(self._transport.request("GET", _path(order)).body)
        except ApiError as error:
            if error.status != 404 or not error.from_api:
                raise
            self._end(followed, OutcomeKind.REQUEST_FAILED, "the EvictionRequest does not exist any more")
            return ""
        followed.next_at = self._clock() + self._poll_s
        if not _is_own(found, order.pod_uid):
            self._end(followed, OutcomeKind.REQUEST_FAILED, "another EvictionRequest has its name")
        elif found.spec.intent != _EVICTION:
            self._end(followed, OutcomeKind.REQUEST_FAILED, f"its intent is {found.spec.intent[:40]!r} now")
        elif (failed := _failed(found)) is not None:
            self._end(followed, OutcomeKind.REQUEST_FAILED, f"{failed.reason}: {failed.message}"[:500])
        elif (order.plan_id, order.pod_uid) not in self._confirmed:
            # After an answer that was lost, or a restart.
            self._put(order.plan_id, order.pod_uid, OutcomeKind.REQUESTED, "it exists")
        return ""

    def _withdraw(self, followed: _Followed) -> str:
        order, message = followed.order, ""
        try:
            patched = self._transport.request("PATCH", _path(order), body=_intent(_WITHDRAWN), content_type=MERGE)
            _check_intent(_decoded(patched.body), order.pod_uid, _WITHDRAWN)
        except ApiError as error:
            if error.status == 404 and error.from_api:
                if self._can_be_late(followed):
                    followed.next_at = self._clock() + self._poll_s
                    return "an EvictionRequest is to be withdrawn that may still be made"
            elif error.status != 422 or self._is_open(order):
                raise  # also the 404 of a group that is not served at present: the object may be stored
            message = error.message  # gone, or not this agent's: nothing is left to withdraw
        self._end(followed, OutcomeKind.REQUEST_WITHDRAWN, message)
        return ""

    def _can_be_late(self, followed: _Followed) -> bool:
        """Whether an object that does not exist may still come in: its creation had no complete answer."""
        confirmed = (followed.order.plan_id, followed.order.pod_uid) in self._confirmed
        return not confirmed and self._clock() - followed.since < LATE_S

    def _is_open(self, order: EvictionRequestOrder) -> bool:
        found = _decoded(self._transport.request("GET", _path(order)).body)
        return _is_own(found, order.pod_uid) and found.spec.intent != _WITHDRAWN

    def _end(self, followed: _Followed, kind: OutcomeKind, message: str) -> None:
        followed.ended = True
        self._put(followed.order.plan_id, followed.order.pod_uid, kind, message)

    def _put(self, plan_id: str, pod_uid: str, kind: OutcomeKind, message: str) -> None:
        if kind is OutcomeKind.REQUESTED:
            self._confirmed = [*self._confirmed, (plan_id, pod_uid)][-MAX_CONFIRMED:]
        self._outcomes.put(Outcome(plan_id, pod_uid, kind, message, self._clock()))
        self._wake()


def name_of(pod_uid: str) -> str:
    """The name of the request for a pod: one for each pod, and the same in every process."""
    return f"nodeagent-{pod_uid}"


def body_of(plan_id: str, victim: Victim) -> bytes:
    """The EvictionRequest for this victim. The pod's name in its owner reference must be that of the UID."""
    pod = victim.pod
    return msgspec.json.encode(
        {
            "apiVersion": f"{GROUP}/v1alpha1",
            "kind": "EvictionRequest",
            "metadata": {
                "name": name_of(pod.uid),
                "namespace": pod.namespace,
                "annotations": {"nodeagent.io/plan": plan_id, "nodeagent.io/message": victim.message},
                "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid}],
            },
            "spec": {
                "target": {"pod": {"name": pod.name, "uid": pod.uid}},
                "requester": REQUESTER,
                "requesterName": REQUESTER,
                "intent": _EVICTION,
            },
        }
    )


def _intent(intent: str) -> bytes:
    """A patch. With another requester than the object's the API server refuses it (422, immutable)."""
    return msgspec.json.encode({"spec": {"intent": intent, "requester": REQUESTER, "requesterName": REQUESTER}})


def _path(order: EvictionRequestOrder) -> str:
    return f"{_collection(order.namespace)}/{name_of(quote(order.pod_uid))}"


def _collection(namespace: str) -> str:
    return f"/apis/lifecycle.k8s.io/v1alpha1/namespaces/{quote(namespace)}/evictionrequests"


def _decoded(body: bytes) -> _EvictionRequest:
    return _request.decode(body)


def _is_own(found: _EvictionRequest, pod_uid: str) -> bool:
    pod = found.spec.target.pod
    return pod is not None and pod.uid == pod_uid and REQUESTER in (found.spec.requester, found.spec.requester_name)


def _check_intent(found: _EvictionRequest, pod_uid: str, intent: str) -> None:
    """Raises UnreadableError: the answer does not show this agent's request with this intent."""
    if not _is_own(found, pod_uid) or found.spec.intent != intent:
        raise objects.UnreadableError(f"the answer shows no EvictionRequest of this agent with the intent {intent}")


def _is_certain(error: ApiError) -> bool:
    """Whether nothing was made. A 404 without a Status is the API server's for a group that it does not serve."""
    if error.uncertain:
        return False
    if error.status is None:
        return error.kind is OutcomeKind.UNREACHABLE
    return 400 <= error.status < 500 and (error.from_api or error.status == 404)


def _failed(found: _EvictionRequest) -> _Condition | None:
    """The condition Failed, if the controller has set it for the present intent."""
    if (found.status.observed_generation or 0) < found.metadata.generation:
        return None
    return next(
        (each for each in found.status.conditions or () if each.type == "Failed" and each.status == "True"), None
    )

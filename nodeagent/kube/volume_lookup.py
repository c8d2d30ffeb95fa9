"""Which pods are bound to this node by the data in a local PersistentVolume.

Promises:

1. Only claims that pods of this node mount are looked up, one GET at a time, in a thread that starts with the first
   claim. No decision waits for it.
2. While the location of a claim's volume is unknown, `Pod.claims_unknown` has the reason and `claims_asked_at` the
   start of the look-up: the pod may be bound. The soft tier waits, the hard tier for a moment only. While pressure is
   near (`hurry`), no look-up waits for the spread, and the next one follows soon after a refusal.
3. What is stored is bounded by the claims of the present pods, and by `MAX_CLAIMS`.

Theory of operation. A pod lists its claims, a bound claim has its volume, and a volume lists where it can be mounted.
None of that changes while a pod runs, so each claim is looked up once: two GETs. Single objects, never lists: a
kubelet's credentials may read the claims and volumes of the pods on their node, but list none (Node authorizer).

Local is a volume of type `local`, one whose node affinity selects this node alone, by any label, and a `hostPath`
volume, whose data is nowhere else. Claims of generic ephemeral volumes end with their pod and bind none.
"""

import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple
from urllib.parse import quote

from nodeagent.kube import objects, placement
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.joined_pods import JoinedPods
from nodeagent.kube.transport import Transport
from nodeagent.model import Pod
from nodeagent.runtime import clock, workers

MAX_CLAIMS: Final = 1024
"""Claims that are looked up for one node: ten for each of 110 pods. Further ones stay unknown."""
CLAIM_RETRY_S: Final = 60.0
"""Wait before a claim that does not exist, or is not bound yet, is looked up again."""
MAX_WAIT_S: Final = 300.0
"""Longest wait after refusals and timeouts: a role without the right costs 12 requests per hour and node."""
HURRY_FOR_S: Final = 10.0
"""Pressure counts as near for so long after the last `hurry`."""
HURRY_S: Final = 2.0
"""Longest wait between look-ups while pressure is near: the hard tier waits as long for an answer. Half a request per
second and node, and only while the node is under pressure."""
UNRELATED_S: Final = 5.0
"""For so long after its first look-up is due, a claim may be unrelated to the node: the Node authorizer learns of it
from its own watch, a moment after the pod is bound."""
NOT_LOOKED_UP: Final = "not looked up yet"
_UNRELATED: Final = "no relationship found between node"
"""In the Node authorizer's 403 (plugin/pkg/auth/authorizer/node/node_authorizer.go)."""

_claim_decoder = objects.Decoder(objects.ClaimObject)
_volume_decoder = objects.Decoder(objects.VolumeObject)

Claim = tuple[str, str]
"""Namespace and name."""


class ClaimLocation(NamedTuple):
    """The location of a claim's data."""

    local: str = ""
    """The volume, if its data is on this node alone; empty if it can be mounted elsewhere."""
    unknown: str = NOT_LOOKED_UP
    """Why the location is unknown; empty if it is known."""
    retry_at: float = 0.0
    """CLOCK_BOOTTIME of the next look-up, while it is unknown."""
    asked_at: float | None = None
    """When the first look-up became due; None without a thread that looks up."""


def look_up(transport: Transport, claim: Claim, *, node_name: str) -> ClaimLocation:
    """The location of this claim's data, by two GETs. Raises `ApiError`, but not for a missing claim or volume."""
    namespace, name = claim
    path = f"/api/v1/namespaces/{quote(namespace)}/persistentvolumeclaims/{quote(name)}"
    try:
        bound_to = _claim_decoder.decode(transport.request("GET", path).body).spec.volume_name
        if not bound_to:
            return ClaimLocation(unknown="it is not bound to a volume yet")
        path = f"/api/v1/persistentvolumes/{quote(bound_to)}"
        volume = _volume_decoder.decode(transport.request("GET", path).body).spec
    except ApiError as error:
        if error.status == 404:
            return ClaimLocation(unknown=error.message)
        raise
    except objects.UnreadableError as error:
        return ClaimLocation(unknown=f"its API object cannot be read: {error}")
    required = volume.node_affinity.required if volume.node_affinity else None
    is_local = volume.local is not None or volume.host_path is not None
    is_local = is_local or placement.single_node(required, node_name=node_name) != ""
    return ClaimLocation(bound_to if is_local else "", unknown="")


def with_locations(pod: Pod, locations: Callable[[Claim], ClaimLocation]) -> Pod:
    """The pod with the locations of its claims; the same object if they change nothing."""
    unknown, asked_at = "", None
    for name in pod.claims:
        location = locations((pod.namespace or "", name))
        if location.local:
            bound = f"its claim {name} is on the local PersistentVolume {location.local}"
            return pod._replace(node_bound=pod.node_bound or bound)
        if location.unknown:
            asked_at = max(asked_at or 0.0, location.asked_at) if location.asked_at is not None else asked_at
            unknown = unknown or f"its claim {name} may be a local PersistentVolume: {location.unknown}"
    return pod._replace(claims_unknown=unknown, claims_asked_at=asked_at) if unknown else pod


def claims_of(pods: Iterable[Pod]) -> list[Claim]:
    """Each claim that the pods mount, once, in their order, except those of pods that are bound anyway."""
    claims = {
        (pod.namespace or "", name): None for pod in pods if not (pod.node_bound or pod.finished) for name in pod.claims
    }
    return list(claims)


def look_up_all(
    transport: Transport, pods: tuple[Pod, ...], *, node_name: str, known: dict[Claim, ClaimLocation], for_s: float
) -> tuple[tuple[Pod, ...], str]:
    """The pods with the locations of their claims, looked up within about `for_s` seconds, and why some are missing.

    For a report, which may wait. `known`: the locations of earlier calls; new ones are added.
    """
    until, trouble = clock.boottime() + for_s, ""
    for claim in claims_of(pods):
        if not known.get(claim, ClaimLocation()).unknown:
            continue
        if clock.boottime() >= until:
            trouble = "not all claims could be looked up in time"
            break
        try:
            known[claim] = look_up(transport, claim, node_name=node_name)
        except ApiError as error:
            trouble = error.message
            break
    missing = ClaimLocation(unknown=trouble or NOT_LOOKED_UP)
    return tuple([with_locations(pod, lambda claim: known.get(claim, missing)) for pod in pods]), trouble


class VolumeLookup:
    """The locations of the claims of this node's pods, looked up in a thread."""

    def __init__(
        self,
        transport: Transport,
        node_name: str,
        *,
        clock: Callable[[], float] = clock.boottime,
        backoff: RetryBackoff | None = None,
        spread_s: float = 0.0,
    ) -> None:
        """`spread_s`: the first look-up waits for a random part of this, because a whole fleet may start at once."""
        self._transport = transport
        self._node_name = node_name
        self._clock = clock
        self._backoff = backoff or RetryBackoff(last_s=MAX_WAIT_S)
        self._first_wait_s = random.uniform(0.0, spread_s)  # noqa: S311 - spreads load, guards nothing
        self._condition = threading.Condition()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._locations: dict[Claim, ClaimLocation] = {}
        self._hurry_at = float("-inf")
        self._hurry_backoff = RetryBackoff(first_s=0.25, last_s=HURRY_S)
        self._reason = ""
        self._changes = 0
        self._joined = JoinedPods()
        self._wanted_for: tuple[Pod, ...] = ()
        """Pods of the last call of `with_claims`."""

    @property
    def reason(self) -> str:
        """Why look-ups fail now; empty if they do not."""
        return self._reason

    def with_claims(self, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        """The pods with the locations of their claims; unknown ones are looked up from now on. The same pods give the
        same tuple until a location changes. Called by one thread."""
        return self._joined.joined(pods, self._changes, self._join)

    def _join(self, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        if pods is not self._wanted_for:
            self._wanted_for = pods
            self._want(claims_of(pods))
        beyond = ClaimLocation(unknown=f"more than {MAX_CLAIMS} claims on this node")
        with self._condition:
            return tuple([with_locations(pod, lambda claim: self._locations.get(claim, beyond)) for pod in pods])

    def hurry(self) -> None:
        """Pressure is near: look up now, and soon again after a refusal. Returns at once."""
        with self._condition:
            starts = not self._hurries()
            self._hurry_at = self._clock()
            if starts:
                self._condition.notify_all()

    def _hurries(self) -> bool:
        return self._clock() - self._hurry_at < HURRY_FOR_S

    def stop(self) -> None:
        """End the thread, if there is one, after its present request."""
        self._stopping.set()
        with self._condition:
            self._condition.notify_all()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _want(self, claims: list[Claim]) -> None:
        wanted = claims[:MAX_CLAIMS]
        with self._condition:
            new = ClaimLocation(asked_at=self._clock())
            self._locations = {claim: self._locations.get(claim, new) for claim in wanted}
            self._condition.notify_all()
        if wanted and self._thread is None:
            self._thread = workers.make_thread(self._run, name="volumes")
            workers.start(self._thread)

    def _run(self) -> None:
        self._wait(self._first_wait_s, hurried_s=0.0)
        while not self._stopping.is_set():
            claim = self._next()
            if claim is not None:
                self._wait(*self._look_up(claim))

    def _wait(self, wait_s: float, hurried_s: float) -> None:
        """Wait before the next request, at most `hurried_s` once pressure is near."""
        began = time.monotonic()
        with self._condition:
            while not self._stopping.is_set():
                left_s = began - time.monotonic() + (min(wait_s, hurried_s) if self._hurries() else wait_s)
                if left_s <= 0.0:
                    return
                self._condition.wait(left_s)

    def _next(self) -> Claim | None:
        """The claim to look up now; None after a wait, to be called again."""
        with self._condition:
            pending = [(location.retry_at, claim) for claim, location in self._locations.items() if location.unknown]
            if pending:
                retry_at, claim = min(pending)
                wait_s = retry_at - self._clock() - (CLAIM_RETRY_S - HURRY_S if self._hurries() else 0.0)
                if wait_s <= 0:
                    return claim
                self._condition.wait(wait_s)
            elif not self._stopping.is_set():
                self._condition.wait()
            return None

    def _look_up(self, claim: Claim) -> tuple[float, float]:
        """Look up one claim. Returns the wait before the next request, and the wait while pressure is near, in
        seconds."""
        try:
            location = look_up(self._transport, claim, node_name=self._node_name)
        except ApiError as error:
            early = _UNRELATED in error.message and self._asked_s(claim) < UNRELATED_S
            self._store(claim, ClaimLocation(unknown=error.message, retry_at=self._clock()))
            self._reason = self._reason if early else error.message
            hurried_s = max(self._hurry_backoff.failed(), error.retry_after_s or 0.0)
            return self._backoff.failed(error.retry_after_s), hurried_s
        self._backoff.succeeded()
        self._hurry_backoff.succeeded()
        self._reason = ""
        self._store(claim, location._replace(retry_at=self._clock() + CLAIM_RETRY_S) if location.unknown else location)
        return 0.0, 0.0

    def _asked_s(self, claim: Claim) -> float:
        """For how long the first look-up of this claim has been due."""
        with self._condition:
            location = self._locations.get(claim)
        asked_at = location.asked_at if location is not None else None
        return self._clock() - asked_at if asked_at is not None else 0.0

    def _store(self, claim: Claim, location: ClaimLocation) -> None:
        with self._condition:
            before = self._locations.get(claim)
            if before is None:  # its pods are gone
                return
            self._locations[claim] = location._replace(asked_at=before.asked_at)
            self._changes += before[:2] != location[:2]

"""Which pods are bound to this node by the data in a local PersistentVolume.

Promises:

1. Asked is only about claims that pods of this node mount, one GET at a time, in a thread that does not exist before
   there is one. No decision waits for it.
2. While it is not known where a claim's volume is, `Pod.claims_unknown` says why and `claims_asked_at` since when: the
   pod may be bound, and the policy waits, the hard tier for a moment only. Near pressure (`hurry`) no question waits
   until a fleet has spread out, and the next one comes soon after a refusal.
3. What is remembered is bounded by the claims of the pods that are here, and by `MOST_CLAIMS`.

Theory of operation. A pod names its claims, a bound claim names its volume, and a volume says where it can be mounted.
None of that changes while a pod is running, so each claim is asked about once: two GETs. Single objects, never lists: a
kubelet's credentials may read the claims and volumes of the pods on their node, but list none (Node authorizer).

Local is a volume of type `local`, one whose node affinity names this node alone, whatever the label, and a `hostPath`
one, whose data is nowhere else. Claims of generic ephemeral volumes end with their pod and bind nobody.
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
from nodeagent.kube.timestamps import boottime
from nodeagent.kube.transport import Transport
from nodeagent.model import Pod
from nodeagent.runtime import workers

MOST_CLAIMS: Final = 1024
"""Claims that are looked up for one node: ten for each of 110 pods. Those beyond are not known."""
AGAIN_S: Final = 60.0
"""How long until a claim that could not be told is asked about again: it does not exist, or is not bound yet."""
LAST_S: Final = 300.0
"""Longest wait after refusals and silence: a role without the right costs 12 requests an hour and node."""
HURRY_FOR_S: Final = 10.0
"""How long pressure counts as near after the last hint."""
HURRY_S: Final = 2.0
"""Longest wait between questions while pressure is near: the hard tier waits for an answer as long
(`policy.reach.CLAIMS_WAIT_S`). Half a request a second and node, and only while the node is in trouble."""
NOT_YET: Final = "not looked up yet"

_claim_decoder = objects.Decoder(objects.ClaimObject)
_volume_decoder = objects.Decoder(objects.VolumeObject)

Claim = tuple[str, str]
"""Namespace and name."""


class ClaimLocation(NamedTuple):
    """Where a claim's data is."""

    local: str = ""
    """The volume, when its data is on this node alone; empty when it can be mounted elsewhere."""
    unknown: str = NOT_YET
    """Why that is not known; empty when it is."""
    again_at: float = 0.0
    """CLOCK_BOOTTIME at which to ask again, while it is not known."""
    asked_at: float | None = None
    """When it was first to be asked; None where nobody asks."""


def look_up(transport: Transport, claim: Claim, *, node_name: str) -> ClaimLocation:
    """Where this claim's data is: two GETs. Raises `ApiError`; a claim or volume that does not exist is no error."""
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
        return ClaimLocation(unknown=f"what the API says of it cannot be read: {error}")
    required = volume.node_affinity.required if volume.node_affinity else None
    here = volume.local is not None or volume.host_path is not None
    here = here or placement.the_one_node(required, node_name=node_name) != ""
    return ClaimLocation(bound_to if here else "", unknown="")


def placed(pod: Pod, places: Callable[[Claim], ClaimLocation]) -> Pod:
    """The pod with what is known of its claims; the same object when that says nothing."""
    unknown, asked_at = "", None
    for name in pod.claims:
        place = places((pod.namespace or "", name))
        if place.local:
            bound = f"its claim {name} is on the local PersistentVolume {place.local}"
            return pod._replace(node_bound=pod.node_bound or bound)
        if place.unknown:
            asked_at = max(asked_at or 0.0, place.asked_at) if place.asked_at is not None else asked_at
            unknown = unknown or f"whether its claim {name} is a local PersistentVolume is not known: {place.unknown}"
    return pod._replace(claims_unknown=unknown, claims_asked_at=asked_at) if unknown else pod


def claims_of(pods: Iterable[Pod]) -> list[Claim]:
    """Each claim that the pods mount, once, in their order, without those of pods that are bound anyway."""
    found = {
        (pod.namespace or "", name): None for pod in pods if not (pod.node_bound or pod.finished) for name in pod.claims
    }
    return list(found)


def look_up_all(
    transport: Transport, pods: tuple[Pod, ...], *, node_name: str, known: dict[Claim, ClaimLocation], for_s: float
) -> tuple[tuple[Pod, ...], str]:
    """The pods with what can be found out of their claims in about `for_s` seconds, and why that is not everything.

    For a report, which may wait. `known` is what earlier looks found, and is added to.
    """
    until, trouble = boottime() + for_s, ""
    for claim in claims_of(pods):
        if not known.get(claim, ClaimLocation()).unknown:
            continue
        if boottime() >= until:
            trouble = "there are more claims than there was time to look up"
            break
        try:
            known[claim] = look_up(transport, claim, node_name=node_name)
        except ApiError as error:
            trouble = error.message
            break
    missing = ClaimLocation(unknown=trouble or NOT_YET)
    return tuple([placed(pod, lambda claim: known.get(claim, missing)) for pod in pods]), trouble


class VolumeLookup:
    """What is known of the claims of this node's pods."""

    def __init__(
        self,
        transport: Transport,
        node_name: str,
        *,
        clock: Callable[[], float] = boottime,
        backoff: RetryBackoff | None = None,
        spread_s: float = 0.0,
    ) -> None:
        """`spread_s`: the first question waits for a random part of this, where a whole fleet may start at once."""
        self._transport = transport
        self._node_name = node_name
        self._clock = clock
        self._backoff = backoff or RetryBackoff(last_s=LAST_S)
        self._first_wait_s = random.uniform(0.0, spread_s)  # noqa: S311 - spreads load, guards nothing
        self._condition = threading.Condition()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._places: dict[Claim, ClaimLocation] = {}
        self._hurried_at = float("-inf")
        self._hurried = RetryBackoff(first_s=0.25, last_s=HURRY_S)
        self._reason = ""
        self._changes = 0
        self._filled: tuple[tuple[Pod, ...], int, tuple[Pod, ...]] = ((), -1, ())
        """The last answer of `fill`, for which pods and after how many changes."""

    @property
    def reason(self) -> str:
        """Why nothing can be looked up now; empty while it can."""
        return self._reason

    def fill(self, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        """The pods with what is known of their claims; the rest is looked up from now on. The same pods get the same
        answer, object by object, until more is known. Called by one thread."""
        changes = self._changes
        known, at, answer = self._filled
        if known is pods and at == changes:
            return answer
        if known is not pods:
            self._want(claims_of(pods))
        beyond = ClaimLocation(unknown=f"more than {MOST_CLAIMS} claims on this node")
        with self._condition:
            answer = tuple([placed(pod, lambda claim: self._places.get(claim, beyond)) for pod in pods])
        self._filled = pods, changes, answer
        return answer

    def hurry(self) -> None:
        """Pressure is near: ask now, and again soon what was refused. Returns at once."""
        with self._condition:
            begins = not self._hurries()
            self._hurried_at = self._clock()
            if begins:
                self._condition.notify_all()

    def _hurries(self) -> bool:
        return self._clock() - self._hurried_at < HURRY_FOR_S

    def stop(self) -> None:
        """End the thread, if there is one, after the request that it is in."""
        self._stopping.set()
        with self._condition:
            self._condition.notify_all()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _want(self, claims: list[Claim]) -> None:
        wanted = claims[:MOST_CLAIMS]
        with self._condition:
            new = ClaimLocation(asked_at=self._clock())
            self._places = {claim: self._places.get(claim, new) for claim in wanted}
            self._condition.notify_all()
        if wanted and self._thread is None:
            self._thread = workers.make_thread(self._run, name="volumes")
            workers.start(self._thread)

    def _run(self) -> None:
        self._pause(self._first_wait_s, hurried_s=0.0)
        while not self._stopping.is_set():
            claim = self._next()
            if claim is not None:
                self._pause(*self._ask(claim))

    def _pause(self, wait_s: float, hurried_s: float) -> None:
        """Leave the server alone for so long; for `hurried_s` at most where pressure is near, or comes meanwhile."""
        began = time.monotonic()
        with self._condition:
            while not self._stopping.is_set():
                left_s = began - time.monotonic() + (min(wait_s, hurried_s) if self._hurries() else wait_s)
                if left_s <= 0.0:
                    return
                self._condition.wait(left_s)

    def _next(self) -> Claim | None:
        """A claim to ask about now; None after a wait, when somebody should look again."""
        with self._condition:
            open_ = [(place.again_at, claim) for claim, place in self._places.items() if place.unknown]
            if open_:
                again_at, claim = min(open_)
                wait_s = again_at - self._clock() - (AGAIN_S - HURRY_S if self._hurries() else 0.0)
                if wait_s <= 0:
                    return claim
                self._condition.wait(wait_s)
            elif not self._stopping.is_set():
                self._condition.wait()
            return None

    def _ask(self, claim: Claim) -> tuple[float, float]:
        """Ask about one claim. Returns how long to leave the server alone, and how long while pressure is near, in
        seconds."""
        try:
            place = look_up(self._transport, claim, node_name=self._node_name)
        except ApiError as error:
            self._learn(claim, ClaimLocation(unknown=error.message, again_at=self._clock()))
            self._reason = error.message
            hurried_s = max(self._hurried.failed(), error.retry_after_s or 0.0)
            return self._backoff.failed(error.retry_after_s), hurried_s
        self._backoff.succeeded()
        self._hurried.succeeded()
        self._reason = ""
        self._learn(claim, place._replace(again_at=self._clock() + AGAIN_S) if place.unknown else place)
        return 0.0, 0.0

    def _learn(self, claim: Claim, place: ClaimLocation) -> None:
        with self._condition:
            before = self._places.get(claim)
            if before is None:  # its pods have gone meanwhile
                return
            self._places[claim] = place._replace(asked_at=before.asked_at)
            self._changes += before[:2] != place[:2]

"""EvictionRequests of the soft tier: for which pod one is made, how it ends, and when it is withdrawn.

Promises:

1. Only the soft tier makes one (`evictionRequest.enabled`), for the pod that it would evict now, after every other
   check, with the tokens of that eviction. The state has both before the request is sent, so that no crash makes two.
2. The hard tier and the limits of pods never wait for one: they decide as if there were none (`without_requests`), with
   the tokens that it took (`lend_tokens`), and evict the same pod themselves.
3. While it is open the pod counts as an eviction in flight of the soft tier. It ends with the pod, at the latest at its
   deadline. A pod whose request failed or reached the deadline is evicted through the Eviction API from then on.
4. An ended request is withdrawn until the API server confirms it, across restarts, unless its pod is leaving. Only
   requests of this agent are: their names are made from the pod's UID.

Theory of operation. A `Request` is added with the decision, beside its eviction in flight (`InFlightEviction.request_s`
is the deadline). `advance` compares the two: an eviction in flight that its pod has left (accepted, gone) ends the
request well; one that is no longer there ended it without an eviction. The tokens of a request that failed or reached
its deadline return, because the decision that finds this takes them again for the eviction; those of a request that is
withdrawn after a recovery do not, because a responder may still finish what it has begun. An eviction that overtakes a
request takes its tokens for itself; a request of another pod stays open only if its tokens can be taken again.
"""

import enum
from collections.abc import Container, Iterable, Mapping
from typing import Final, NamedTuple

from nodeagent.config.schema import Config, RateLimits
from nodeagent.model import (
    EvictionRequestOrder,
    Method,
    NodeSnapshot,
    Note,
    NoteKind,
    Outcome,
    OutcomeKind,
    Pod,
    Refusal,
    Signal,
    Victim,
)
from nodeagent.policy import in_flight, rate_limits
from nodeagent.policy.in_flight import EvictionEvent, EvictionStage, InFlightEviction, InFlightState
from nodeagent.policy.rate_limits import RateLimitState

AGAIN_S: Final = 3600.0
"""How long after a request that failed no other is made for the same pod. A pod that is still there after that is one
that its responders and the Eviction API do not evict."""
MAX_REQUESTS: Final = 1000
"""Requests that are remembered; the oldest is dropped. The rate limit of the node allows far fewer in `AGAIN_S`."""


class RequestEnd(enum.StrEnum):
    """How a request ended without an eviction."""

    REFUSED = "refused"
    FAILED = "failed"
    TIMED_OUT = "timed-out"
    RECOVERED = "recovered"
    OVERTAKEN = "overtaken"


_MEANINGS: Final = {
    RequestEnd.REFUSED: "the API server accepts none for it; the Eviction API is used",
    RequestEnd.FAILED: "it failed; it is withdrawn, and the Eviction API is used",
    RequestEnd.TIMED_OUT: "the pod was not evicted in time; it is withdrawn, and the Eviction API is used",
    RequestEnd.RECOVERED: "the pressure ended before the pod was evicted; it is withdrawn",
    RequestEnd.OVERTAKEN: "another eviction of the pod did not wait for it; it is withdrawn",
}
_TO_EVICT: Final = frozenset({RequestEnd.REFUSED, RequestEnd.FAILED, RequestEnd.TIMED_OUT})
"""After these the pod is evicted through the Eviction API."""
_OPEN: Final = frozenset({OutcomeKind.REQUESTED, OutcomeKind.REQUEST_UNCERTAIN})
"""Outcomes after which the request exists, or may exist."""


class Request(NamedTuple):
    """The last EvictionRequest for one pod."""

    plan_id: str
    pod: str
    """`namespace/name`, for texts."""
    namespace: str
    signal: Signal
    buckets: tuple[str, ...]
    """The buckets that its tokens came from."""
    end: RequestEnd | None = None
    """None: it is open."""
    ended_at: float = 0.0
    withdrawn: bool = False
    """The API server has confirmed that, or there is nothing to withdraw."""


class RequestState(NamedTuple):
    requests: Mapping[str, Request] = {}
    """By pod UID."""


class LentTokens(NamedTuple):
    """The rate limits as if no request were open."""

    limit_state: RateLimitState
    buckets: Mapping[str, tuple[str, ...]]
    """By pod UID of a request: the buckets that have a token of it back."""


class Advanced(NamedTuple):
    """What a snapshot changes."""

    state: RequestState
    in_flight: InFlightState
    returned: tuple[tuple[str, ...], ...] = ()
    """The buckets whose tokens return, for each request."""
    notes: tuple[Note, ...] = ()


def advance(
    state: RequestState,
    in_flight_state: InFlightState,
    snapshot: NodeSnapshot,
    *,
    left: Container[str],
    healthy: Container[Signal],
    now: float,
    config: Config,
) -> Advanced:
    """The state after a snapshot that `in_flight.advance` has seen. `left`: the UIDs of the pods whose eviction it
    proves. `healthy`: signals above all their thresholds."""
    if not state.requests:
        return Advanced(state, in_flight_state)
    listed = None if snapshot.pods_synced_at is None else {view.pod.uid for view in snapshot.pods}
    kept: dict[str, Request] = {}
    returned: list[tuple[str, ...]] = []
    notes: list[Note] = []
    for uid, before in state.requests.items():
        request = before
        if (listed is not None and uid not in listed) or (request.end is None and uid in left):
            continue  # the API server removes the request with its pod, which owns it
        if request.end is None:
            entry = in_flight.entry_for(in_flight_state, plan_id=request.plan_id, pod_uid=uid)
            if entry is not None and not entry.awaits_others:
                continue  # its pod is leaving
            end = _end(request, entry, healthy=healthy, config=config)
            if end is not None:
                request = request._replace(end=end, ended_at=now)
                notes.append(Note(NoteKind.EVICTION_REQUESTS, _describe(request)))
            if end is RequestEnd.TIMED_OUT:
                returned.append(request.buckets)
            if end is not None and entry is not None:
                in_flight_state = in_flight.apply_outcome(in_flight_state, entry, EvictionEvent.REQUEST_ENDED, now=now)
        if not _is_over(request, now=now):
            kept[uid] = request
    return Advanced(RequestState(kept), in_flight_state, tuple(returned), tuple(notes))


def _end(
    request: Request, entry: InFlightEviction | None, *, healthy: Container[Signal], config: Config
) -> RequestEnd | None:
    if entry is None or not config.eviction_request.enabled:
        return RequestEnd.TIMED_OUT
    sent = entry.stage is not EvictionStage.PLANNED
    return RequestEnd.RECOVERED if sent and request.signal in healthy else None


def _is_over(request: Request, *, now: float) -> bool:
    """Whether nothing is left to do or to remember. An end in the future is another boot's."""
    if request.end is None or not request.withdrawn:
        return False
    return request.end not in _TO_EVICT or not 0 <= now - request.ended_at < AGAIN_S


def apply_outcome(state: RequestState, outcome: Outcome) -> RequestState:
    """The state after the outcome of a request, or of its withdrawal."""
    request = state.requests.get(outcome.pod_uid)
    if request is None or request.plan_id != outcome.plan_id or outcome.kind in _OPEN:
        return state
    is_open = request.end is None
    if outcome.kind is OutcomeKind.REQUEST_WITHDRAWN:
        return _with(state, outcome.pod_uid, request if is_open else request._replace(withdrawn=True))
    if outcome.kind is OutcomeKind.REQUEST_FAILED:
        ended = request._replace(end=RequestEnd.FAILED, ended_at=outcome.at)
        return _with(state, outcome.pod_uid, ended if is_open else request)
    if outcome.kind is OutcomeKind.NOT_REQUESTED:
        ended = request._replace(end=RequestEnd.REFUSED, ended_at=outcome.at) if is_open else request
        return _with(state, outcome.pod_uid, ended._replace(withdrawn=True))
    # Nothing was sent (a dry run, a refusal of the recheck): the next decision may make one.
    return RequestState({uid: each for uid, each in state.requests.items() if uid != outcome.pod_uid})


def _with(state: RequestState, uid: str, request: Request) -> RequestState:
    return RequestState({**state.requests, uid: request})


def method_for(pod: Pod, state: RequestState, snapshot: NodeSnapshot, config: Config) -> Method:
    """How the soft tier evicts this pod."""
    wanted = config.eviction_request.enabled and snapshot.eviction_requests and pod.uid not in state.requests
    return Method.REQUEST if wanted else Method.EVICT


def outcome_of(entry: InFlightEviction, *, now: float) -> Outcome:
    """The outcome of a request whose pod others have evicted."""
    message = f"{max(0.0, now - entry.planned_at):.0f}s after the decision"
    return Outcome(entry.plan_id, entry.pod_uid, OutcomeKind.EVICTED_BY_OTHERS, message, now)


def after_choice(
    state: RequestState,
    victims: Iterable[tuple[Victim, InFlightEviction]],
    *,
    overtaken: Iterable[str],
    now: float,
) -> tuple[RequestState, tuple[Note, ...]]:
    """The state with the requests of these victims, and notes. `overtaken`: the UIDs of `settle_tokens`, whose requests
    end; so does that of a pod that is evicted otherwise."""
    requests = dict(state.requests)
    ended = dict.fromkeys(overtaken)
    for victim, entry in victims:
        pod = victim.pod
        if victim.method is Method.REQUEST:
            requests[pod.uid] = Request(
                entry.plan_id, pod.key, pod.namespace or "", victim.threshold.signal, entry.buckets
            )
        else:
            ended[pod.uid] = None
    notes = []
    for uid in ended:
        earlier = requests.get(uid)
        if earlier is not None and earlier.end is None:
            requests[uid] = earlier._replace(end=RequestEnd.OVERTAKEN, ended_at=now)
            notes.append(Note(NoteKind.EVICTION_REQUESTS, _describe(requests[uid])))
    if requests == state.requests:
        return state, ()
    return RequestState(dict(list(requests.items())[-MAX_REQUESTS:])), tuple(notes)


def orders(state: RequestState) -> tuple[EvictionRequestOrder, ...]:
    """What the actuator does with each request that is open, or not withdrawn yet."""
    return tuple(
        [
            EvictionRequestOrder(request.plan_id, uid, request.namespace, withdraw=request.end is not None)
            for uid, request in state.requests.items()
            if not request.withdrawn
        ]
    )


def is_pending(state: RequestState) -> bool:
    """True if a request is open, or not withdrawn yet."""
    return any(not request.withdrawn for request in state.requests.values())


def without_requests(state: InFlightState) -> InFlightState:
    """The evictions in flight as the hard tier sees them: without those that others are to carry out."""
    if not any(entry.awaits_others for entry in state.entries):
        return state
    return state._replace(entries=tuple([entry for entry in state.entries if not entry.awaits_others]))


def without_overtaken(state: InFlightState, overtaken: Container[str]) -> InFlightState:
    """The evictions in flight after `settle_tokens`."""
    entries = [entry for entry in state.entries if not (entry.awaits_others and entry.pod_uid in overtaken)]
    return state if len(entries) == len(state.entries) else state._replace(entries=tuple(entries))


def lend_tokens(
    in_flight_state: InFlightState, limit_state: RateLimitState, *, now: float, limits: RateLimits
) -> LentTokens:
    """The tokens of the requests, for a decision that does not wait for them."""
    lent: dict[str, tuple[str, ...]] = {}
    for entry in in_flight_state.entries:
        if entry.awaits_others:
            before = limit_state
            limit_state = rate_limits.return_tokens(before, entry.buckets, now=now, limits=limits)
            # A bucket that is full by now has no token of the request any more.
            lent[entry.pod_uid] = tuple(
                [key for key in entry.buckets if _gained(key, before, limit_state, now, limits)]
            )
    return LentTokens(limit_state, lent)


def _gained(key: str, before: RateLimitState, after: RateLimitState, now: float, limits: RateLimits) -> bool:
    earlier = rate_limits.level(before, key, now=now, limits=limits)
    return rate_limits.level(after, key, now=now, limits=limits).tokens > earlier.tokens


def settle_tokens(
    lent: LentTokens, limit_state: RateLimitState, victims: Iterable[Victim], *, now: float, limits: RateLimits
) -> tuple[RateLimitState, frozenset[str]]:
    """The rate limits after a decision with these victims (at least one) took its tokens from `lent`, and the UIDs of
    the pods whose requests it overtakes: those of the victims, and those for which no token is left."""
    evicted = {victim.pod.uid for victim in victims}
    overtaken = set()
    for uid, buckets in lent.buckets.items():
        taken = None
        if uid not in evicted:
            taken = rate_limits.take_tokens(limit_state, buckets, now=now, limits=limits)
        if taken is None or isinstance(taken, Refusal):
            overtaken.add(uid)
        else:
            limit_state = taken
    return limit_state, frozenset(overtaken)


def _describe(request: Request) -> str:
    assert request.end is not None
    return f"EvictionRequest for {request.pod} by {request.plan_id}: {_MEANINGS[request.end]}"

"""How the request for a victim ended, and what that means for every report."""

import enum
from typing import Final, NamedTuple


class _Attributes(NamedTuple):
    """What a kind is declared with."""

    good: bool = False
    evicted: bool = False
    of_request: bool = False
    followed: bool = False


_FAILED: Final = _Attributes()
_GOOD: Final = _Attributes(good=True)
_EVICTED: Final = _Attributes(good=True, evicted=True)


class OutcomeKind(enum.StrEnum):
    """How the eviction of a victim ended (KUBELET-CONTRACT, API results), with its attributes."""

    good: bool
    """As it should be: nothing was refused, and nothing failed."""
    evicted: bool
    """The pod was evicted, by this agent or for its EvictionRequest."""
    of_request: bool
    """Of an EvictionRequest."""
    followed: bool
    """Another outcome of the same victim follows, as far as is known."""

    def __new__(cls, word: str, attributes: _Attributes = _FAILED) -> "OutcomeKind":
        member = str.__new__(cls, word)
        member._value_ = word
        member.good = attributes.good
        member.evicted = attributes.evicted
        member.of_request = attributes.of_request
        member.followed = attributes.followed
        return member

    ACCEPTED = "accepted", _EVICTED
    """200, 201 or 202 with the answer that the API defines: the pod is terminating."""
    DRY_RUN = "dry-run", _GOOD
    """Nothing was sent."""
    BLOCKED_BY_PDB = "blocked-by-pdb"
    """429 with cause DisruptionBudget."""
    TOO_MANY_REQUESTS = "too-many-requests"
    """429 without that cause: API priority and fairness."""
    PDB_CONFLICT = "pdb-conflict"
    """500: more than one PodDisruptionBudget matches."""
    NOT_FOUND = "not-found", _GOOD
    """400, 404, 409 or 422, and the API server no longer lists the pod."""
    CONFLICT = "conflict"
    """409, twice: the version of the pod moved. Or 400, 409 or 422, and another pod (UID) has its name now."""
    INVALID = "invalid"
    """400 or 422, twice: a wrong request, a defect of the agent or of the server. Or 404 twice for a pod that the API
    server lists."""
    DENIED = "denied-by-admission"
    """An admission policy (403) or webhook (any status) denied the eviction of this pod, or that webhook failed."""
    FORBIDDEN = "forbidden"
    """403."""
    UNAUTHORIZED = "unauthorized"
    """401."""
    SERVER_ERROR = "server-error"
    """Other 5xx, or an answer that is not the API's (a redirect, a proxy's page): the pod may be terminating. Or 404
    twice, and the list of the pods was not answered: the pod may exist."""
    TIMED_OUT = "timed-out"
    """No complete answer in time, after bytes of the request may have left: the pod may be terminating."""
    UNREACHABLE = "unreachable"
    """Nothing left the node: no connection, a deadline that passed before, a defect of the agent."""
    RECHECK_REFUSED = "recheck-refused"
    """The recheck right before acting refused it."""
    KILLED = "killed", _EVICTED
    """Its processes were killed through its cgroup. The API server is not informed yet."""
    NOT_KILLED = "not-killed"
    """The kernel refused the kill; no process was killed."""
    REQUESTED = "requested", _Attributes(good=True, of_request=True, followed=True)
    """The EvictionRequest exists: others are to evict the pod."""
    NOT_REQUESTED = "not-requested", _Attributes(of_request=True)
    """It is certain that no EvictionRequest was made: the Eviction API is used."""
    REQUEST_UNCERTAIN = "request-uncertain", _Attributes(of_request=True, followed=True)
    """No complete answer: the EvictionRequest may exist."""
    REQUEST_FAILED = "request-failed", _Attributes(of_request=True, followed=True)
    """The EvictionRequest has the condition Failed, or somebody else deleted or withdrew it."""
    REQUEST_WITHDRAWN = "request-withdrawn", _Attributes(good=True, of_request=True)
    """The EvictionRequest is withdrawn, or gone."""
    EVICTED_BY_OTHERS = "evicted-by-others", _Attributes(good=True, evicted=True, of_request=True)
    """A sample shows that others have evicted the pod of an EvictionRequest: it is terminating, or gone."""


GOOD_OUTCOMES: Final[frozenset[str]] = frozenset(kind for kind in OutcomeKind if kind.good)
"""For words of a record."""
EVICTED_OUTCOMES: Final[frozenset[str]] = frozenset(kind for kind in OutcomeKind if kind.evicted)


class Outcome(NamedTuple):
    """The outcome of one victim."""

    plan_id: str
    pod_uid: str
    kind: OutcomeKind
    message: str
    at: float
    retry_after_s: float | None = None
    http_status: int | None = None

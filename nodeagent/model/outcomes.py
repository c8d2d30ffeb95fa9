"""How the request for a victim ended."""

import enum
from typing import NamedTuple


class OutcomeKind(enum.StrEnum):
    """How the eviction of a victim ended (KUBELET-CONTRACT, API results)."""

    ACCEPTED = "accepted"
    """200, 201 or 202 with the answer that the API defines: the pod is terminating."""
    DRY_RUN = "dry-run"
    """Nothing was sent."""
    BLOCKED_BY_PDB = "blocked-by-pdb"
    """429 with cause DisruptionBudget."""
    TOO_MANY_REQUESTS = "too-many-requests"
    """429 without that cause: API priority and fairness."""
    PDB_CONFLICT = "pdb-conflict"
    """500: more than one PodDisruptionBudget matches."""
    NOT_FOUND = "not-found"
    """404, and the API server no longer lists the pod."""
    CONFLICT = "conflict"
    """409: another pod (UID) has this name now, or its version moved."""
    INVALID = "invalid"
    """400 or 422, twice: a wrong request, a defect of the agent or of the server. Or 404 twice for a pod that the API
    server lists. Or 403 of an admission policy or webhook for this pod."""
    FORBIDDEN = "forbidden"
    """403."""
    UNAUTHORIZED = "unauthorized"
    """401."""
    SERVER_ERROR = "server-error"
    """Other 5xx, or an answer that is not the API's (a redirect, a proxy's page): the pod may be terminating."""
    TIMED_OUT = "timed-out"
    """No complete answer in time, after bytes of the request may have left: the pod may be terminating."""
    UNREACHABLE = "unreachable"
    """Nothing left the node: no connection, a deadline that passed before, a defect of the agent."""
    RECHECK_REFUSED = "recheck-refused"
    """The recheck right before acting refused it."""
    KILLED = "killed"
    """Its processes were killed through its cgroup. The API server is not informed yet."""
    NOT_KILLED = "not-killed"
    """The kernel refused the kill; no process was killed."""
    REQUESTED = "requested"
    """The EvictionRequest exists: others are to evict the pod."""
    NOT_REQUESTED = "not-requested"
    """It is certain that no EvictionRequest was made: the Eviction API is used."""
    REQUEST_UNCERTAIN = "request-uncertain"
    """No complete answer: the EvictionRequest may exist."""
    REQUEST_FAILED = "request-failed"
    """The EvictionRequest has the condition Failed, or somebody else deleted or withdrew it."""
    REQUEST_WITHDRAWN = "request-withdrawn"
    """The EvictionRequest is withdrawn, or gone."""


class Outcome(NamedTuple):
    """The outcome of one victim."""

    plan_id: str
    pod_uid: str
    kind: OutcomeKind
    message: str
    at: float
    retry_after_s: float | None = None
    http_status: int | None = None

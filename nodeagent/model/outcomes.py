"""How the request for a victim ended."""

import enum
from typing import NamedTuple


class OutcomeKind(enum.StrEnum):
    """How an eviction request ended (KUBELET-CONTRACT, API results)."""

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
    """404, and the API server does not list the pod any more."""
    CONFLICT = "conflict"
    """409: another pod (UID) has this name now, or its version moved."""
    INVALID = "invalid"
    """400 or 422, twice: the request was wrong; a defect of ours or of the server. Or 404 twice for a pod that the API
    server lists. Or 403 of an admission policy or webhook, which refuses this pod."""
    FORBIDDEN = "forbidden"
    """403."""
    UNAUTHORIZED = "unauthorized"
    """401."""
    SERVER_ERROR = "server-error"
    """Other 5xx, or an answer that is not the API's (a redirect, a proxy's page): it may or may not be terminating."""
    TIMED_OUT = "timed-out"
    """No complete answer in time, once bytes of the request may have left: the pod may or may not be terminating."""
    UNREACHABLE = "unreachable"
    """Nothing left this machine: no connection, a deadline that passed before, a defect of ours."""
    RECHECK_REFUSED = "recheck-refused"
    """The sample taken right before acting no longer asked for it."""
    KILLED = "killed"
    """Its processes were ended through its cgroup. The API knows nothing of it yet."""
    NOT_KILLED = "not-killed"
    """The kernel refused that; nothing was ended."""


class Outcome(NamedTuple):
    """What became of one victim."""

    plan_id: str
    pod_uid: str
    kind: OutcomeKind
    message: str
    at: float
    retry_after_s: float | None = None
    http_status: int | None = None

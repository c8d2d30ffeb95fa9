"""Resizes of pods in place: what is requested of the API server, and what came of it."""

import enum
from typing import Final, NamedTuple


class ResizeResult(enum.StrEnum):
    """What came of a resize: the answer of the API server, then what the kubelet has made of it."""

    ACCEPTED = "accepted"
    """The API server has changed the pod's spec. The kubelet decides what comes of it."""
    DRY_RUN = "dry-run"
    """Nothing was sent."""
    REFUSED = "refused"
    """400, 409, 422, or 403 of an admission plugin, policy or webhook: a quota, a LimitRange, another version of the
    pod."""
    FORBIDDEN = "forbidden"
    """401, or 403 of the authorizer."""
    NOT_SERVED = "not-served"
    """404 or 405 that is not about the pod: the API server has no `pods/resize`."""
    NOT_FOUND = "not-found"
    """404: there is no such pod any more."""
    NOT_SENT = "not-sent"
    """Nothing left the node, or API priority and fairness refused it (429)."""
    UNCERTAIN = "uncertain"
    """No complete answer, 5xx, or no answer of the API: the spec may have been changed."""
    RESIZED = "resized"
    """The kubelet reports the new limit."""
    RESTORED = "restored"
    """The kubelet reports the limit from before the first raise."""
    DEFERRED = "deferred"
    """The node has not enough allocatable memory now, for several seconds."""
    INFEASIBLE = "infeasible"
    """The kubelet will not carry it out."""
    FAILED = "failed"
    """The kubelet or the runtime failed to carry it out."""
    NO_RESULT = "no-result"
    """The kubelet has reported nothing in time."""
    SUPERSEDED = "superseded"
    """Another client has changed the container's limit, which is no longer this agent's to restore."""


GOOD_RESIZES: Final = frozenset(
    {ResizeResult.ACCEPTED, ResizeResult.DRY_RUN, ResizeResult.RESIZED, ResizeResult.RESTORED}
)
"""Results without a failure."""


class MemoryAmounts(NamedTuple):
    """The memory of a container's resources, in bytes."""

    limit: int
    request: int | None = None
    """None: as it is. Changed for a Guaranteed pod, whose class would change otherwise."""


class ResizeOrder(NamedTuple):
    """A resize of one container to request now."""

    pod_uid: str
    namespace: str
    name: str
    resource_version: str
    """Of the pod that was decided on: the API server refuses the request for any other."""
    container: str
    sidecar: bool
    """It stands among the init containers of the spec."""
    before: MemoryAmounts
    to: MemoryAmounts
    lowers: bool
    """It restores an earlier limit."""
    message: str

    @property
    def key(self) -> str:
        """`namespace/name`, for texts."""
        return f"{self.namespace}/{self.name}"


class ResizeOutcome(NamedTuple):
    """What came of a resize."""

    plan_id: str
    """The decision that ordered it."""
    pod_uid: str
    namespace: str
    name: str
    container: str
    result: ResizeResult
    message: str
    at: float
    retry_after_s: float | None = None
    http_status: int | None = None

    @property
    def key(self) -> str:
        """`namespace/name`, for texts."""
        return f"{self.namespace}/{self.name}"

"""The stages of a raised memory limit. Their guards, what a pod shows and what a server answers, are in `resizes`."""

import enum
from collections.abc import Mapping
from typing import Final

from nodeagent.model import machines
from nodeagent.model.machines import Machine


class ResizeStage(enum.StrEnum):
    """Where the resize of a container stands."""

    PLANNED = "planned"
    """The raise is being requested."""
    REQUESTED = "requested"
    """The spec has the raised limit; the kubelet decides."""
    RAISED = "raised"
    """The kubelet has carried it out."""
    TO_WITHDRAW = "to-withdraw"
    """The kubelet has not carried it out: the spec must get the carried-out limit again."""
    WITHDRAWING = "withdrawing"
    RESTORING = "restoring"
    """The first limit is being requested again."""
    BACKED_OFF = "backed-off"
    """The last raise failed."""
    KEPT = "kept"
    """It cannot be lowered: the API server refuses that (before Kubernetes 1.34), or it would restart the container."""
    DRY_RUN = "dry-run"


class ResizeEvent(enum.StrEnum):
    """What happens to the resize of a container."""

    ACCEPTED = "accepted"
    NOT_SENT = "not-sent"
    REFUSED = "refused"
    CANNOT_LOWER = "cannot-lower"
    CARRIED_OUT = "carried-out"
    NOT_CARRIED_OUT = "not-carried-out"
    LOWERING = "lowering"
    WITHDRAWN = "withdrawn"
    LATE_RAISE = "late-raise"
    LATE_RESTORATION = "late-restoration"
    LATE_WITHDRAWAL = "late-withdrawal"
    TIME_UP = "time-up"
    NOTHING_RAISED = "nothing-raised"
    SUPERSEDED = "superseded"


_S, _E = ResizeStage, ResizeEvent
_SEEN_LATE: Final = {
    "LATE_RAISE": _S.REQUESTED,
    "LATE_RESTORATION": _S.RESTORING,
    "LATE_WITHDRAWAL": _S.WITHDRAWING,
    "SUPERSEDED": None,
}
"""What the spec of a pod changes in every stage after a request."""


def _row(
    stage: ResizeStage, **changes: ResizeStage | None
) -> dict[tuple[ResizeStage, ResizeEvent], ResizeStage | None]:
    return machines.row(stage, ResizeEvent, changes)


TRANSITIONS: Final[Mapping[tuple[ResizeStage, ResizeEvent], ResizeStage | None]] = {
    **_row(
        _S.PLANNED,
        **_SEEN_LATE,
        ACCEPTED=_S.REQUESTED,
        NOT_SENT=_S.DRY_RUN,
        REFUSED=_S.BACKED_OFF,
        CARRIED_OUT=_S.RAISED,
        NOT_CARRIED_OUT=_S.TO_WITHDRAW,
    ),
    **_row(_S.REQUESTED, **_SEEN_LATE, REFUSED=_S.BACKED_OFF, CARRIED_OUT=_S.RAISED, NOT_CARRIED_OUT=_S.TO_WITHDRAW),
    **_row(_S.RAISED, **_SEEN_LATE, LOWERING=_S.RESTORING, CANNOT_LOWER=_S.KEPT),
    **_row(
        _S.TO_WITHDRAW,
        **_SEEN_LATE,
        LOWERING=_S.WITHDRAWING,
        CANNOT_LOWER=_S.KEPT,
        REFUSED=_S.BACKED_OFF,
        CARRIED_OUT=_S.RAISED,
    ),
    **_row(_S.WITHDRAWING, **_SEEN_LATE, WITHDRAWN=_S.BACKED_OFF, REFUSED=_S.TO_WITHDRAW, CANNOT_LOWER=_S.KEPT),
    **_row(_S.RESTORING, **_SEEN_LATE, CARRIED_OUT=None, NOT_CARRIED_OUT=None, REFUSED=_S.RAISED, CANNOT_LOWER=_S.KEPT),
    **_row(_S.BACKED_OFF, **_SEEN_LATE, TIME_UP=_S.RAISED, NOTHING_RAISED=None),
    **_row(_S.KEPT, **_SEEN_LATE),
    **_row(_S.DRY_RUN, TIME_UP=_S.BACKED_OFF, SUPERSEDED=None),
}

MACHINE: Final = Machine(
    "Raised memory limits",
    "nodeagent/policy/resize_stages.py",
    ResizeStage,
    ResizeEvent,
    TRANSITIONS,
    meanings={
        _E.ACCEPTED: "200: the spec has what was requested",
        _E.NOT_SENT: "dry run",
        _E.REFUSED: "the answer proves that nothing was changed, or no answer came and the spec stayed as it was",
        _E.CANNOT_LOWER: "422 to a request for less, or the resizePolicy of the container would restart it",
        _E.CARRIED_OUT: "the kubelet reports the limit of the spec",
        _E.NOT_CARRIED_OUT: "the kubelet calls it infeasible, defers it, reports an error, or reports nothing in time",
        _E.LOWERING: "a request for less is sent",
        _E.WITHDRAWN: "the spec has the carried-out limit again",
        _E.LATE_RAISE: "the spec has the higher limit of a request that was given up",
        _E.LATE_RESTORATION: "the same, for a request for the first limit",
        _E.LATE_WITHDRAWAL: "the same, for a request for the carried-out limit",
        _E.TIME_UP: "the back-off is over and a raise is in force; the time of a dry run is over",
        _E.NOTHING_RAISED: "the back-off is over and the container has its first limit",
        _E.SUPERSEDED: "another client has changed the limit",
    },
    remarks={
        (_S.PLANNED, _E.REFUSED): "its token returns, except if no answer came",
        (_S.RESTORING, _E.NOT_CARRIED_OUT): "the spec has the first limit, and the kubelet goes on to lower it",
    },
)

OPEN: Final = frozenset({_S.PLANNED, _S.REQUESTED, _S.TO_WITHDRAW, _S.WITHDRAWING, _S.RESTORING})
"""Something is awaited or due now."""

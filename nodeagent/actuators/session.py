"""What the loop needs of the API server: pods in; conditions, taints, evictions and Events out; outcomes in.

`NoCluster` is the session without credentials, so that the loop needs no `if`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from nodeagent.actuators.conditions import ConditionConflict, OwnedCondition
from nodeagent.actuators.event_writer import EventReason
from nodeagent.kube.cluster_readers import WatchCounts
from nodeagent.kube.node_identity import Identity
from nodeagent.kube.pod_watch import PodsView
from nodeagent.model import (
    ConditionType,
    ConditionVerdict,
    EvictionRequestOrder,
    Note,
    NoteKind,
    OomReport,
    Outcome,
    Plan,
    PodView,
    Refusal,
    ResizeOrder,
    ResizeOutcome,
    Victim,
)


class Counts(NamedTuple):
    """Counters of a session's threads, for the metrics."""

    pods_synced_at: float | None = None
    watches: tuple[WatchCounts, ...] = ()
    condition_writes: int = 0
    events_dropped: int = 0
    in_flight: int = 0
    api_identity: str = ""
    """Whose rights the requests for pods use: `node` or `serviceAccount`; empty until the API server has answered."""


class Session(Protocol):
    """What the loop needs of the API server."""

    def start(self) -> None: ...
    def pods(self) -> PodsView: ...
    def report_missing(self, cgroup_uids: frozenset[str]) -> None: ...
    def soft_tier_block(self) -> Refusal | None: ...
    def announce(self, plan: Plan) -> None: ...
    def evict(self, plan_id: str, victim: Victim) -> None: ...
    def eviction_requests_served(self) -> bool: ...
    def follow_eviction_requests(self, orders: Sequence[EvictionRequestOrder]) -> None: ...
    def announce_kill(self, plan_id: str, victim: Victim) -> None: ...
    def resize(self, plan_id: str, order: ResizeOrder) -> None: ...
    def resize_outcomes(self) -> tuple[ResizeOutcome, ...]: ...
    def announce_resize(self, outcome: ResizeOutcome) -> None: ...
    def emit_node_event(self, reason: EventReason, note: str, *, action: str, plan_id: str = "") -> None: ...
    def announce_oom_kills(self, report: OomReport, pods: Mapping[str, PodView]) -> None: ...
    def outcomes(self) -> tuple[Outcome, ...]: ...
    def publish(self, verdicts: Iterable[ConditionVerdict]) -> None: ...
    def prewarm(self) -> None: ...
    def identity(self) -> Identity | None: ...
    def node_labels(self) -> Mapping[str, str] | None: ...
    def read_configz(self) -> str: ...
    def k3s_arguments(self) -> tuple[str, ...]: ...
    def owned(self) -> tuple[OwnedCondition, ...]: ...
    def conflicts(self) -> tuple[ConditionConflict, ...]: ...
    def tainted(self, pressure: ConditionType) -> bool: ...
    def counts(self) -> Counts: ...
    def notes(self) -> tuple[Note, ...]: ...
    def finish_requests(self) -> None: ...
    def stop(self, *, clear: bool, mark: bool = False, withdraw: bool = False, confirm_s: float = 1.0) -> str: ...


class NoCluster:
    """No credentials: the agent decides, and nothing is read from or written to an API server."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def start(self) -> None: ...

    def pods(self) -> PodsView:
        return PodsView((), None, self._reason, awaited=False)

    def report_missing(self, cgroup_uids: frozenset[str]) -> None: ...

    def soft_tier_block(self) -> Refusal | None:
        return None

    def announce(self, plan: Plan) -> None: ...

    def evict(self, plan_id: str, victim: Victim) -> None:
        raise RuntimeError(f"plan {plan_id} has the victim {victim.pod.key}, but there is no API server")

    def eviction_requests_served(self) -> bool:
        return False

    def follow_eviction_requests(self, orders: Sequence[EvictionRequestOrder]) -> None: ...

    def announce_kill(self, plan_id: str, victim: Victim) -> None: ...

    def resize(self, plan_id: str, order: ResizeOrder) -> None:
        raise RuntimeError(f"plan {plan_id} resizes {order.key}, but there is no API server")

    def resize_outcomes(self) -> tuple[ResizeOutcome, ...]:
        return ()

    def announce_resize(self, outcome: ResizeOutcome) -> None: ...

    def emit_node_event(self, reason: EventReason, note: str, *, action: str, plan_id: str = "") -> None: ...

    def announce_oom_kills(self, report: OomReport, pods: Mapping[str, PodView]) -> None: ...

    def outcomes(self) -> tuple[Outcome, ...]:
        return ()

    def publish(self, verdicts: Iterable[ConditionVerdict]) -> None: ...

    def prewarm(self) -> None: ...

    def identity(self) -> Identity | None:
        return None

    def node_labels(self) -> Mapping[str, str] | None:
        return None

    def read_configz(self) -> str:
        return ""

    def k3s_arguments(self) -> tuple[str, ...]:
        return ()

    def owned(self) -> tuple[OwnedCondition, ...]:
        return ()

    def conflicts(self) -> tuple[ConditionConflict, ...]:
        return ()

    def tainted(self, pressure: ConditionType) -> bool:  # noqa: ARG002 - a protocol's method
        return False

    def counts(self) -> Counts:
        return Counts()

    def notes(self) -> tuple[Note, ...]:
        return (Note(NoteKind.API, self._reason),)

    def finish_requests(self) -> None: ...

    def stop(
        self,
        *,
        clear: bool,  # noqa: ARG002 - of a protocol's method, as all of these
        mark: bool = False,  # noqa: ARG002
        withdraw: bool = False,  # noqa: ARG002
        confirm_s: float = 1.0,  # noqa: ARG002
    ) -> str:
        return ""

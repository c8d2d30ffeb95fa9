"""The API server as the loop uses it: pods in; conditions, taints, evictions and Events out; outcomes in.

Promises:

1. No call but `read_configz` waits for the API server. Threads confirm the node's identity, list, watch and write.
2. Until the node's identity is confirmed, nothing is written, and the view of the pods is empty with the reason.
3. The taint is requested in the sync of the crossing. The hard tier does not wait for it: its eviction is handed over
   first. The soft tier waits until the taint is present on the Node, at most `TAINT_WAIT_S`, until the
   PodDisruptionBudgets are listed, and, if the fleet has eviction slots, until this node has one (`soft_tier_block`).
   It evicts nothing while the Node is under maintenance.
4. No call waits for an Event.
5. `NoCluster` is the session without credentials, so that the loop needs no `if`.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from nodeagent.actuators import api_writers, event_writer, oom_events, pod_events, taints
from nodeagent.actuators.api_writers import ApiWriters
from nodeagent.actuators.conditions import ConditionConflict, OwnedCondition
from nodeagent.actuators.event_writer import EventReason, KubernetesEvent
from nodeagent.actuators.eviction_requests import EvictionRequests
from nodeagent.actuators.pod_events import RankedVictim
from nodeagent.actuators.taints import NodeTaints
from nodeagent.config.schema import ClusterIdentity, Config, Mode
from nodeagent.kube import identity_probe, kubelet_configz, node_identity, node_maintenance, pod_decoder
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.node_fit import NodeFitReader
from nodeagent.kube.node_identity import Identity, IdentityError
from nodeagent.kube.node_watch import NodeWatch
from nodeagent.kube.owner_lookup import OwnerReader
from nodeagent.kube.pdb_watch import PdbWatch
from nodeagent.kube.pod_watch import PodsView, PodWatch
from nodeagent.kube.transport import Transport
from nodeagent.kube.volume_lookup import VolumeLookup
from nodeagent.model import (
    SIGNAL_TABLE,
    ConditionStatus,
    ConditionType,
    ConditionVerdict,
    EvictionRequestOrder,
    Method,
    Note,
    NoteKind,
    OomReport,
    Outcome,
    OutcomeKind,
    Plan,
    Pod,
    PodView,
    RankedPod,
    Refusal,
    RefusalCode,
    ResizeOrder,
    ResizeOutcome,
    Tier,
    Victim,
)
from nodeagent.runtime import clock, workers

TAINT_WAIT_S: Final = 2.0
"""Longest wait of the soft tier for its taint. It is present 5 to 20 ms after the request; two seconds include a 409 or
two and a slow API server, and are short compared with a grace period."""
WANT_PDBS_S: Final = 10.0
"""How often the namespaces of the pods are passed on while a threshold is near and the pods stay the same."""
PDB_SPREAD_S: Final = 10.0
"""Longest wait before the first list of PodDisruptionBudgets: 5,000 nodes with five namespaces each send 5,000 requests
a second instead of 50,000 (benchmarks/fleet.py)."""
VOLUME_SPREAD_S: Final = 3.0
"""Longest wait before the first claim is looked up while no pressure is near."""
_MAX_KILLS: Final = 20
_MAX_RANKS: Final = 64
"""Ranks of victims that are stored for their Events; a hard decision has at most five victims by default."""
_CHANGE_REASONS: Final = {
    (ConditionType.MEMORY_PRESSURE, True): EventReason.NODE_HAS_INSUFFICIENT_MEMORY,
    (ConditionType.MEMORY_PRESSURE, False): EventReason.NODE_HAS_SUFFICIENT_MEMORY,
    (ConditionType.DISK_PRESSURE, True): EventReason.NODE_HAS_DISK_PRESSURE,
    (ConditionType.DISK_PRESSURE, False): EventReason.NODE_HAS_NO_DISK_PRESSURE,
    (ConditionType.PID_PRESSURE, True): EventReason.NODE_HAS_INSUFFICIENT_PID,
    (ConditionType.PID_PRESSURE, False): EventReason.NODE_HAS_SUFFICIENT_PID,
}
"""By condition and whether it is True: the reasons of the kubelet's Events on the Node (KUBELET-CONTRACT §7)."""


class WatchCounts(NamedTuple):
    """Counters of one list and watch since the start."""

    name: str
    failures: int
    relists: int


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
    def owned(self) -> tuple[OwnedCondition, ...]: ...
    def conflicts(self) -> tuple[ConditionConflict, ...]: ...
    def tainted(self, pressure: ConditionType) -> bool: ...
    def counts(self) -> Counts: ...
    def notes(self) -> tuple[Note, ...]: ...
    def stop(self, *, clear: bool, mark: bool = False) -> str: ...


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

    def stop(self, *, clear: bool, mark: bool = False) -> str:  # noqa: ARG002 - a protocol's method
        return ""


class ClusterSession:
    """The session with one API server for one node."""

    def __init__(
        self,
        transport: Transport,
        config: Config,
        guess: Identity,
        *,
        wake: Callable[[], None],
        owned: Sequence[OwnedCondition] = (),
        backoff: RetryBackoff | None = None,
        probe_backoff: RetryBackoff | None = None,
        clock: Callable[[], float] = clock.boottime,
    ) -> None:
        """`guess`: the node's name before it is confirmed. `owned`: the conditions that an earlier process set on the
        Node. Its taints are not stored: their keys belong to nodeagent alone."""
        self._transport = transport
        self._config = config
        self._guess = guess
        self._wake = wake
        self._owned = tuple(owned)
        self._backoff = backoff or RetryBackoff()
        self._probe_backoff = probe_backoff or identity_probe.backoff()
        self._clock = clock
        self._stopping = threading.Event()
        self._trouble = "the API server has not answered yet"
        self._confirmed: Identity | None = None
        self._pods: PodWatch | None = None
        self._pdbs: PdbWatch | None = None
        self._pdbs_wanted_at = float("-inf")
        self._volumes: VolumeLookup | None = None
        self._owners: OwnerReader | None = None
        self._node_fit: NodeFitReader | None = None
        self._eviction_requests: EvictionRequests | None = None
        """None unless they are configured, or those of an earlier configuration are not withdrawn yet. A dry run
        discovers, and writes nothing."""
        self._mirrors: tuple[tuple[Pod, ...], str, tuple[Pod, ...]] = ((), "", ())
        """Pods and Node UID of the last call of `_own_mirrors`, and its result."""
        self._pdbs_wanted_for: tuple[Pod, ...] = ()
        self._writers: ApiWriters | None = None
        self._node: NodeWatch | None = None
        """The own Node: with writers theirs; in a dry run for profiles, maintenance and resizes."""
        self._statuses: dict[ConditionType, ConditionStatus] = {}
        """Of the last `publish`."""
        self._taint_wanted_since: dict[ConditionType, float] = {}
        """When each wanted taint was first requested."""
        self._ranks: dict[tuple[str, str], RankedPod] = {}
        """Of the last victims, by plan and UID: a victim is handed over before its plan is announced."""
        self._unanswered: dict[tuple[str, str], Victim] = {}
        """Victims without an outcome, by plan and UID."""
        self._kills: list[tuple[str, Victim, float]] = []
        """Plan id, victim and wall time of kills, whose Events are sent when the API server is reachable again."""
        self._thread = workers.make_thread(self._confirm, name="identity")

    def start(self) -> None:
        """Start to confirm the node's identity, then watch; returns at once."""
        workers.start(self._thread)

    def pods(self) -> PodsView:
        """The pods with their volumes, and with their PodDisruptionBudgets once those were wanted."""
        unreachable_since = self._transport.reach.unreachable_since
        if self._pods is None:
            return PodsView((), None, self._trouble, unreachable_since=unreachable_since)
        view = self._pods.view()
        pods = self._own_mirrors(view.pods)
        pods = self._volumes.with_claims(pods) if self._volumes else pods
        pods = self._owners.with_replicas(pods) if self._owners else pods
        pods = self._node_fit.with_node_fit(pods) if self._node_fit else pods
        pods = self._pdbs.with_pdbs(pods) if self._pdbs else pods
        node = self._node.view() if self._node is not None else None
        allocatable = node.allocatable_memory if node is not None else None
        return view._replace(pods=pods, unreachable_since=unreachable_since, allocatable_memory=allocatable)

    def _own_mirrors(self, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        """The pods, with mirror pods of another Node object as ordinary ones. The Node's UID is known only once the
        Node was read; until then the owner reference counts by the Node's name."""
        node = self._writers.node.view() if self._writers else None
        if node is None or not node.uid:
            return pods
        last_pods, uid, result = self._mirrors
        if last_pods is not pods or uid != node.uid:
            result = pod_decoder.with_mirrors_of(pods, node.uid)
            self._mirrors = pods, node.uid, result
        return result

    def report_missing(self, cgroup_uids: frozenset[str]) -> None:
        """The node runs these pods and `pods` contains none of them: list again."""
        if self._pods is not None:
            self._pods.report_missing(cgroup_uids)

    def soft_tier_block(self) -> Refusal | None:
        """What the soft tier waits for now; None: nothing. The hard tier never waits."""
        if (maintenance := self._maintenance()) is not None:
            return maintenance
        waits = (
            (RefusalCode.WAITS_FOR_TAINT, self._taint_wait),
            (RefusalCode.WAITS_FOR_PDBS, self._pdbs_wait),
            (RefusalCode.WAITS_FOR_LEASE, self._slot_wait),
        )
        blocks = (Refusal(code, f"the soft tier waits for {why}") for code, wait in waits if (why := wait()))
        return next(blocks, None)

    def announce(self, plan: Plan) -> None:
        """Read what the plan needs of owners and other nodes, request an eviction slot if it needs one, and emit the
        Node Event."""
        if self._owners is not None and plan.owner_lookups:
            self._owners.want(plan.owner_lookups)
        if self._node_fit is not None and plan.node_fit_lookups:
            self._node_fit.want(plan.node_fit_lookups)
        writers = self._writers
        if writers is None:
            return
        soft = any(victim.tier is Tier.SOFT and not victim.limit for victim in plan.victims)
        if writers.slots is not None and (soft or any(refusal.code.wants_slot for refusal in plan.refusals)):
            writers.slots.want()
        if plan.victims:
            ranks = {**self._ranks, **pod_events.ranks_of(plan)}
            self._ranks = dict(list(ranks.items())[-_MAX_RANKS:])
        if any(not victim.limit for victim in plan.victims):
            resource = SIGNAL_TABLE[plan.victims[0].threshold.signal].resource
            self.emit_node_event(
                EventReason.EVICTION_THRESHOLD_MET,
                f"Attempting to reclaim {resource}",
                action="Evicting",
                plan_id=plan.id,
            )

    def evict(self, plan_id: str, victim: Victim) -> None:
        """Hand over a victim; `outcomes` returns what came of it."""
        if self._writers is None:
            raise RuntimeError("a plan has victims before the node's identity is confirmed")
        self._unanswered[plan_id, victim.pod.uid] = victim
        if victim.method is Method.REQUEST and self._eviction_requests is not None:
            self._eviction_requests.submit(plan_id, victim)
        else:
            self._writers.evictions.submit(plan_id, victim)

    def eviction_requests_served(self) -> bool:
        """True if the soft tier may use EvictionRequests: configured, and served by the API server."""
        wanted = self._config.eviction_request.enabled
        return wanted and self._eviction_requests is not None and self._eviction_requests.served

    def follow_eviction_requests(self, orders: Sequence[EvictionRequestOrder]) -> None:
        """Read, or withdraw, the EvictionRequests that are not over; `outcomes` returns what came of it. Nothing in a
        dry run. Without `evictionRequest.enabled` too: an earlier process may have left some."""
        if self._confirmed is None or self._writers is None:
            return
        if self._eviction_requests is None and orders:
            self._eviction_requests = EvictionRequests(self._transport, wake=self._wake, clock=self._clock)
            self._eviction_requests.start()
        if self._eviction_requests is not None:
            self._eviction_requests.follow(orders)

    def resize(self, plan_id: str, order: ResizeOrder) -> None:
        """Hand over a resize; `resize_outcomes` returns the answer."""
        if self._writers is None:
            raise RuntimeError("a plan has resizes before the node's identity is confirmed")
        self._writers.resizes.submit(plan_id, order)

    def resize_outcomes(self) -> tuple[ResizeOutcome, ...]:
        """The answers since the last call."""
        return self._writers.resizes.take() if self._writers is not None else ()

    def announce_resize(self, outcome: ResizeOutcome) -> None:
        """Emit the Event about what came of a resize, on its pod; not in a dry run."""
        if self._writers is not None and (event := pod_events.resized(outcome)) is not None:
            self._writers.events.emit(event)

    def announce_kill(self, plan_id: str, victim: Victim) -> None:
        """Store the Events of a kill until the API server is reachable again. The last 20 are stored; the flight
        recorder has all of them."""
        self._kills = [*self._kills, (plan_id, victim, time.time())][-_MAX_KILLS:]

    def emit_node_event(self, reason: EventReason, note: str, *, action: str, plan_id: str = "") -> None:
        """Emit an Event on the Node; not in a dry run."""
        if self._writers is None:
            return
        name = self._writers.node.node_name
        # As the kubelet: an Event on a Node has its name as UID, and `kubectl describe` searches for that.
        annotations = {event_writer.PLAN_ANNOTATION: plan_id} if plan_id else {}
        event = KubernetesEvent("Node", "", name, name, reason, note, action=action, annotations=annotations)
        self._writers.events.emit(event)

    def announce_oom_kills(self, report: OomReport, pods: Mapping[str, PodView]) -> None:
        """Emit the Events of OOM kills at once, on the pods, their owners and the node; not in a dry run. `pods`: by
        the UID in the cgroup's name."""
        writers = self._writers
        if writers is not None:
            for event in oom_events.events(report, pods, node_name=writers.node.node_name):
                writers.events.emit(event)

    def outcomes(self) -> tuple[Outcome, ...]:
        """The outcomes since the last call. An accepted eviction gets Events on its pod and the owner."""
        writers = self._writers
        if writers is None:
            return ()
        node = writers.node.node_name
        if self._kills and self._transport.reach.unreachable_since is None:
            kills, self._kills = self._kills, []
            for plan_id, killed, at_wall in kills:
                ranked = RankedVictim(killed, self._ranks.get((plan_id, killed.pod.uid)))
                for event in pod_events.killed(plan_id, ranked, node=node, at_wall=at_wall):
                    writers.events.emit(event)
        requested = self._eviction_requests.take() if self._eviction_requests is not None else ()
        outcomes = (*writers.evictions.take(), *requested)
        for outcome in outcomes:
            victim = self._unanswered.pop((outcome.plan_id, outcome.pod_uid), None)
            if victim is not None and outcome.kind is OutcomeKind.ACCEPTED:
                ranked = RankedVictim(victim, self._ranks.get((outcome.plan_id, outcome.pod_uid)))
                for event in pod_events.evicted(outcome.plan_id, ranked, node=node):
                    writers.events.emit(event)
        return outcomes

    def publish(self, verdicts: Iterable[ConditionVerdict]) -> None:
        """Publish the verdicts as conditions and taints. In a dry run nothing is written."""
        verdicts = tuple(verdicts)
        if any(verdict.status is ConditionStatus.TRUE for verdict in verdicts):
            self._want_pdbs()
        writers = self._writers
        if writers is None:
            return
        writers.conditions.publish(verdicts)
        statuses = {verdict.type: verdict.status for verdict in verdicts}
        if statuses != self._statuses:
            self._emit_changes(statuses)
            self._statuses = statuses
        if writers.taints is not None:
            self._want_taints(writers.taints)

    def prewarm(self) -> None:
        """Pressure is near: open connections, list PodDisruptionBudgets and look up volumes now."""
        if self._writers is not None:
            self._writers.evictions.prewarm()
        if self._volumes is not None:
            self._volumes.hurry()
        self._want_pdbs()

    def _want_pdbs(self) -> None:
        """Want those of all pods' namespaces: every `WANT_PDBS_S`, and for each new view of the pods."""
        if self._pdbs is None or self._pods is None:
            return
        now, pods = self._clock(), self._pods.view().pods
        if pods is not self._pdbs_wanted_for or now - self._pdbs_wanted_at >= WANT_PDBS_S:
            self._pdbs_wanted_for, self._pdbs_wanted_at = pods, now
            self._pdbs.want({pod.namespace for pod in pods if pod.namespace})

    def identity(self) -> Identity | None:
        """The node's identity; None until the API server confirmed it."""
        return self._confirmed

    def node_labels(self) -> Mapping[str, str] | None:
        """The labels of the Node object; the same object while it has not changed. None before it was read, and if it
        does not exist."""
        view = self._node.view() if self._node is not None else None
        return view.labels if view is not None else None

    def read_configz(self) -> str:
        """The kubelet's own configuration, read through the API server; empty until the node's identity is confirmed.
        Waits for the answer: not for the loop. Raises ApiError."""
        return kubelet_configz.fetch(self._transport, self._confirmed.name) if self._confirmed else ""

    def owned(self) -> tuple[OwnedCondition, ...]:
        """The standard conditions that this agent has set True and must clear, for the saved state."""
        return self._writers.conditions.owned if self._writers else self._owned

    def conflicts(self) -> tuple[ConditionConflict, ...]:
        return self._writers.conditions.conflicts() if self._writers else ()

    def tainted(self, pressure: ConditionType) -> bool:
        """True if the taint for this pressure is present on the Node."""
        taints = self._writers.taints if self._writers else None
        return taints is not None and pressure in taints.present()

    def counts(self) -> Counts:
        """Counters of the threads; from any thread."""
        pods, writers = self._pods, self._writers
        node = self._node
        watches = (("pods", pods), ("node", node))
        return Counts(
            pods_synced_at=pods.view().synced_at if pods is not None else None,
            watches=tuple(WatchCounts(name, each.failures, each.relists) for name, each in watches if each is not None),
            condition_writes=writers.conditions.writes if writers is not None else 0,
            events_dropped=writers.events.dropped if writers is not None else 0,
            in_flight=writers.evictions.in_flight if writers is not None else 0,
            api_identity=self._api_identity(),
        )

    def _api_identity(self) -> str:
        if self._confirmed is None:
            return ""
        as_node = self._confirmed.node_credentials or self._transport.impersonation.complete
        return (ClusterIdentity.NODE if as_node else ClusterIdentity.SERVICE_ACCOUNT).value

    def notes(self) -> tuple[Note, ...]:
        """The troubles with the API server now."""
        view = self.pods()
        parts = [(NoteKind.API, view.reason), (NoteKind.CREDENTIALS, self._transport.trouble)]
        parts.append((NoteKind.IDENTITY, self._transport.impersonation.note))
        if self._node:
            parts.append((NoteKind.NODE_OBJECT, self._node.reason))
        if self._writers:
            parts.append((NoteKind.NODE_CONDITIONS, self._writers.conditions.reason))
            parts.append((NoteKind.TAINTS, self._taints_trouble(self._writers.taints)))
            parts.append((NoteKind.EVENTS, self._writers.events.reason))
        parts.append((NoteKind.OWNERS, self._owners.reason if self._owners else ""))
        parts.append((NoteKind.NODE_FIT, self._node_fit.reason if self._node_fit else ""))
        requests = self._eviction_requests
        parts.append((NoteKind.EVICTION_REQUESTS, requests.reason if requests is not None else ""))
        parts.append((NoteKind.VOLUMES, self._volumes.reason if self._volumes else ""))
        pdb_notes = self._pdbs.notes() if self._pdbs else ()
        return (*[Note(kind, reason) for kind, reason in parts if reason], *pdb_notes, *view.notes)

    def stop(self, *, clear: bool, mark: bool = False) -> str:
        """End all threads. `clear` removes from the Node what this agent has set. Otherwise it stays: with `mark` it
        gets the reason that the agent has stopped, without `mark` the next session continues it. Returns what could not
        be cleared or marked."""
        self._stopping.set()
        self._transport.impersonation.doubted.set()
        workers.join(self._thread, 1.0)
        failed = self._writers.stop(clear=clear, mark=mark) if self._writers else ""
        node = self._node if self._writers is None else None
        for part in (
            self._eviction_requests,
            self._volumes,
            self._owners,
            self._node_fit,
            self._pdbs,
            self._pods,
            node,
        ):
            if part:
                part.stop()
        self._transport.close()
        return failed

    # --- what blocks the soft tier -------------------------------------------------------------------------------

    def _maintenance(self) -> Refusal | None:
        """The node is under maintenance; None if it is not, or if that is not known: before the Node was read, and if
        its last version is too old."""
        node = self._node if self._config.protection.node_maintenance else None
        view, synced_at = (node.view(), node.synced_at) if node is not None else (None, None)
        if view is None or synced_at is None or self._clock() - synced_at > self._config.cluster.pods_max_age_s:
            return None
        reason = node_maintenance.reason(view)
        if not reason:
            return None
        code = RefusalCode.NODE_SHUTDOWN if node_maintenance.shutdown(view) else RefusalCode.NODE_MAINTENANCE
        return Refusal(code, f"the node is under maintenance: {reason}")

    def _pdbs_wait(self) -> str:
        namespace = self._pdbs.unlisted_namespace() if self._pdbs is not None else ""
        return f"the PodDisruptionBudgets of {namespace}, which are being listed" if namespace else ""

    def _slot_wait(self) -> str:
        slots = self._writers.slots if self._writers is not None else None
        if slots is None or slots.held():
            return ""
        return f"an eviction slot of its zone: {slots.reason}"

    def _want_taints(self, taints: NodeTaints) -> None:
        """Want the taints of the conditions that are True. An unknown condition keeps its taint."""
        wanted: set[ConditionType] = set()
        if self._config.conditions.taint:
            wanted.update(kind for kind, status in self._statuses.items() if status is ConditionStatus.TRUE)
            unknown = {kind for kind, status in self._statuses.items() if status is ConditionStatus.UNKNOWN}
            wanted.update(unknown & taints.present())
        # With `taint: false` none is wanted: the taints of an earlier configuration are removed.
        now = self._clock()
        self._taint_wanted_since = {kind: self._taint_wanted_since.get(kind, now) for kind in wanted}
        taints.want(wanted)

    def _taint_wait(self) -> str:
        worker = self._writers.taints if self._writers is not None else None
        if worker is None:
            return ""
        present, now = worker.present(), self._clock()
        for kind, since in self._taint_wanted_since.items():
            left_s = since + TAINT_WAIT_S - now
            if kind not in present and left_s > 0:
                return f"the taint {taints.TAINT_KEYS[kind]}, which is not on the node yet; at most {left_s:.1f}s more"
        return ""

    def _taints_trouble(self, taints: NodeTaints | None) -> str:
        if taints is not None:
            return taints.reason
        return node_identity.NO_TAINT_RIGHTS if self._config.conditions.taint else ""

    # --- Events on the Node -----------------------------------------------------------------------------------------

    def _emit_changes(self, statuses: dict[ConditionType, ConditionStatus]) -> None:
        for kind, status in statuses.items():
            before = self._statuses.get(kind, ConditionStatus.FALSE)
            if status is not before and ConditionStatus.UNKNOWN not in (status, before):
                reason = _CHANGE_REASONS[kind, status is ConditionStatus.TRUE]
                name = self._writers.node.node_name if self._writers else ""
                self.emit_node_event(reason, f"Node {name} status is now: {reason}", action="Observing")

    # --- the identity thread ----------------------------------------------------------------------------------------

    def _confirm(self) -> None:
        """Repeat until the identity is confirmed: the Node may be created later, and the API server may be
        unreachable. Then probe the identity of the requests from time to time."""
        mode, evicts = self._config.cluster.identity, self._config.mode is Mode.ENFORCE
        while not self._stopping.is_set() and self._confirmed is None:
            try:
                confirmed = node_identity.confirm_identity(self._transport, self._guess, mode=mode, evicts=evicts)
            except Exception as error:
                self._trouble = str(error) or type(error).__name__
                self._wake()
                if not isinstance(error, IdentityError | ApiError):
                    raise  # a defect of the agent: it is reported and the thread starts again
                retry_after_s = error.retry_after_s if isinstance(error, ApiError) else None
                self._stopping.wait(self._backoff.failed(retry_after_s))
                continue
            self._open(confirmed)
        if self._confirmed is not None and mode is ClusterIdentity.AUTO:
            node, backoff = self._confirmed.name, self._probe_backoff
            identity_probe.run(self._transport, node, evicts=evicts, stopping=self._stopping, backoff=backoff)

    def _open(self, confirmed: Identity) -> None:
        config, transport = self._config, self._transport
        # If this fails half-way, it is repeated from the start.
        node = NodeWatch(transport, confirmed.name, clock=self._clock)
        if config.profiles:
            node.listen(self._wake)
        if config.mode is Mode.ENFORCE and self._writers is None:
            self._writers = api_writers.start_writers(
                transport, config, confirmed, node=node, owned=self._owned, wake=self._wake, clock=self._clock
            )
            self._node = node
        elif self._node is None and (
            config.profiles or config.protection.node_maintenance or config.own_limit.resize.enabled
        ):
            node.start()
            self._node = node
        if config.protection.disruption_budgets:
            self._pdbs = PdbWatch(transport, wake=self._wake, clock=self._clock, spread_s=_pdb_spread_s(config))
        if config.protection.replacement_wait_s:
            self._owners = OwnerReader(transport, wake=self._wake, clock=self._clock)
        if config.protection.node_fit:
            self._node_fit = NodeFitReader(transport, confirmed.name, wake=self._wake, clock=self._clock)
        if config.eviction_request.enabled and self._eviction_requests is None:
            self._eviction_requests = EvictionRequests(transport, wake=self._wake, clock=self._clock)
            self._eviction_requests.start()
        if config.protection.node_bound:
            self._volumes = VolumeLookup(transport, confirmed.name, clock=self._clock, spread_s=VOLUME_SPREAD_S)
        keys = config.protection.annotations
        pods = PodWatch(transport, confirmed.name, wake=self._wake, keep_annotations=keys, clock=self._clock)
        pods.start()
        self._confirmed = confirmed
        self._pods = pods
        self._wake()


def _pdb_spread_s(config: Config) -> float:
    """Only the soft tier reads PodDisruptionBudgets, so half of the shortest grace period is early enough to list them.
    Nodes that cross a threshold in the same second do not list in the same second."""
    graces = [threshold.grace_period_s for threshold in config.thresholds if not threshold.hard]
    return min(PDB_SPREAD_S, 0.5 * min(graces, default=0.0))

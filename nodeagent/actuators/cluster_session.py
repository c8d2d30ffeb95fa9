"""The session with an API server: readers, writers and Events together, once the node's identity is confirmed.

Promises:

1. No call but `read_configz` waits for the API server. Threads confirm the node's identity, list, watch and write.
2. Until the node's identity is confirmed, nothing is written, and the view of the pods is empty with the reason.
3. The taint is requested in the sync of the crossing. The hard tier does not wait for it: its eviction is handed over
   first. What the soft tier waits for: `soft_tier_block`.
4. No call waits for an Event.
5. A session that replaces another one returns the outcomes that are still to come, and emits their Events. Until the
   API server has answered it, an outage goes on, with the pods that the API server listed last.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from nodeagent.actuators import api_writers, decision_events, evictions, oom_events, pod_events, soft_tier_block
from nodeagent.actuators.api_writers import ApiWriters
from nodeagent.actuators.conditions import ConditionConflict, OwnedCondition
from nodeagent.actuators.decision_events import DecisionEvents
from nodeagent.actuators.event_writer import EventReason
from nodeagent.actuators.eviction_requests import EvictionRequests
from nodeagent.actuators.session import Counts
from nodeagent.config.schema import ClusterIdentity, Config, Mode
from nodeagent.kube import identity_probe, kubelet_configz, node_identity
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.cluster_readers import ClusterReaders
from nodeagent.kube.node_identity import Identity, IdentityError
from nodeagent.kube.node_watch import NodeView, NodeWatch
from nodeagent.kube.pod_watch import PodsView
from nodeagent.kube.transport import Transport
from nodeagent.model import (
    ConditionStatus,
    ConditionType,
    ConditionVerdict,
    EvictionRequestOrder,
    Method,
    Note,
    NoteKind,
    OomReport,
    Outcome,
    Plan,
    PodView,
    Refusal,
    RefusalCode,
    ResizeOrder,
    ResizeOutcome,
    ResizeResult,
    Victim,
)
from nodeagent.runtime import clock, workers


def session_inputs(config: Config) -> tuple[object, ...]:
    """The configuration that a session is built from: if it changes, the agent needs another session."""
    protection = config.protection
    return (
        config.mode,
        config.cluster,
        config.conditions,
        config.fleet,
        *_pod_inputs(config),
        protection.node_maintenance,
        bool(config.profiles),
        config.own_limit.resize.enabled,
        config.eviction_request.enabled,
    )


def _pod_inputs(config: Config) -> tuple[object, ...]:
    """What the view of the pods depends on. One with other inputs may lack what protects a pod now."""
    protection = config.protection
    return (
        protection.annotations,
        protection.disruption_budgets,
        protection.replacement_wait_s > 0,
        protection.node_bound,
        protection.node_fit,
    )


class _Lasting(NamedTuple):
    """What a session leaves to the one that replaces it. Requests in flight are answered later."""

    outcomes: queue.SimpleQueue[Outcome]
    resize_outcomes: queue.SimpleQueue[ResizeOutcome]
    events: DecisionEvents


def _lasting(config: Config, previous: _Lasting | None) -> _Lasting:
    """A dry run emits no Events, and leaves none to a later session."""
    if previous is None:
        return _Lasting(queue.SimpleQueue(), queue.SimpleQueue(), DecisionEvents())
    return previous if config.mode is Mode.ENFORCE else previous._replace(events=DecisionEvents())


class _Opened(NamedTuple):
    """What a session works with once the node's identity is confirmed."""

    identity: Identity
    readers: ClusterReaders
    writers: ApiWriters | None
    """None in a dry run."""


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
        previous: "ClusterSession | None" = None,
        backoff: RetryBackoff | None = None,
        probe_backoff: RetryBackoff | None = None,
        clock: Callable[[], float] = clock.boottime,
    ) -> None:
        """`guess`: the node's name before it is confirmed. `owned`: the conditions that an earlier process set on the
        Node. Its taints are not stored: their keys belong to nodeagent alone. `previous`: the session that this one
        replaces."""
        self._transport = transport
        self._config = config
        self._guess = guess
        self._wake = wake
        self._owned = tuple(owned)
        self._backoff = backoff or RetryBackoff()
        self._probe_backoff = probe_backoff or identity_probe.backoff()
        self._clock = clock
        self._stopping = threading.Event()
        self._opening = threading.Lock()
        """A session that is stopped does not open afterwards."""
        self._confirmed_late: Identity | None = None
        """The identity that was confirmed when the session was stopped already."""
        self._trouble = "the API server has not answered yet"
        self._opened: _Opened | None = None
        """One assignment by the identity thread, so that others see all of it or nothing."""
        self._eviction_requests: EvictionRequests | None = None
        """None unless they are configured, or those of an earlier configuration are not withdrawn yet. A dry run
        discovers, and writes nothing."""
        self._lasting: _Lasting = _lasting(config, previous._lasting if previous is not None else None)
        self._events = self._lasting.events
        self._last_pods: PodsView | None = None
        """Those of the previous session, until the API server has listed them again."""
        if previous is not None and previous._continues(transport, config):
            transport.reach.continue_outage(previous._transport.reach)
            self._last_pods = previous._listed_pods()
        self._thread = workers.make_thread(self._confirm, name="identity")

    def start(self) -> None:
        """Start to confirm the node's identity, then watch; returns at once."""
        workers.start(self._thread)

    def pods(self) -> PodsView:
        """The pods with their volumes, and with their PodDisruptionBudgets once those were wanted."""
        if self._opened is not None:
            view = self._opened.readers.view()
        else:
            view = PodsView((), None, self._trouble, unreachable_since=self._transport.reach.unreachable_since)
        last = self._last_pods  # once: another thread may clear it
        if view.synced_at is not None:
            self._last_pods = None
        elif last is not None and view.unreachable_since is not None:
            return last._replace(reason=view.reason, unreachable_since=view.unreachable_since)
        return view

    @property
    def transport(self) -> Transport:
        """Its requests, for a session that replaces this one."""
        return self._transport

    def _continues(self, transport: Transport, config: Config) -> bool:
        """True if the pods of this session are those of another one, with all that protects them, and a failure of the
        other one is an outage: with other credentials it may be theirs."""
        return (
            self._transport.server == transport.server
            and self._config.cluster.kubeconfig == config.cluster.kubeconfig
            and _pod_inputs(self._config) == _pod_inputs(config)
        )

    def _listed_pods(self) -> PodsView | None:
        """The pods, whatever the API server does now; None if it has never listed them."""
        view = self._opened.readers.view() if self._opened is not None else None
        return view if view is not None and view.synced_at is not None else self._last_pods

    def report_missing(self, cgroup_uids: frozenset[str]) -> None:
        """The node runs these pods and `pods` contains none of them: list again."""
        if self._opened is not None:
            self._opened.readers.pods.report_missing(cgroup_uids)

    def soft_tier_block(self) -> Refusal | None:
        """What the soft tier waits for now; None: nothing. The hard tier never waits."""
        if self._last_pods is not None:
            return Refusal(RefusalCode.PODS_NEVER_SYNCED, "the soft tier waits for the list of the pods after a reload")
        if self._opened is None:
            return None
        readers, writers, now = self._opened.readers, self._opened.writers, self._clock()
        if self._config.protection.node_maintenance:
            max_age_s = self._config.cluster.pods_max_age_s
            if (pause := soft_tier_block.maintenance(readers.node, now=now, max_age_s=max_age_s)) is not None:
                return pause
        return soft_tier_block.first_wait(
            worker=writers.taints if writers is not None else None,
            pdbs=readers.pdbs,
            slots=writers.slots if writers is not None else None,
            now=now,
        )

    def announce(self, plan: Plan) -> None:
        """Read what the plan needs of owners and other nodes, request an eviction slot if it needs one, and emit the
        Node Event. The outcomes of the plan get the Events of those that `outcomes` returns."""
        self._events.store_outcomes(plan.outcomes)
        if self._opened is None:
            return
        self._opened.readers.want(owners=plan.owner_lookups, node_fits=plan.node_fit_lookups)
        writers = self._opened.writers
        if writers is None:
            return
        if writers.slots is not None and plan.wants_slot:
            writers.slots.want()
        self._events.emit_plan(plan, writers.events)

    def evict(self, plan_id: str, victim: Victim) -> None:
        """Hand over a victim; `outcomes` returns what came of it."""
        if self._writers is None:
            kind, message = evictions.not_sent_kind(victim), f"not sent: {self._trouble}"
            self._lasting.outcomes.put(Outcome(plan_id, victim.pod.uid, kind, message, self._clock()))
            self._wake()
            return
        self._events.store_victim(plan_id, victim)
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
        if self._writers is None:
            return
        if self._eviction_requests is None and orders:
            self._eviction_requests = self._make_eviction_requests()
            self._eviction_requests.start()
        if self._eviction_requests is not None:
            self._eviction_requests.follow(orders)

    def resize(self, plan_id: str, order: ResizeOrder) -> None:
        """Hand over a resize; `resize_outcomes` returns the answer."""
        if self._writers is None:
            where = (order.pod_uid, order.namespace, order.name, order.container)
            message = f"not sent: {self._trouble}"
            answer = ResizeOutcome(plan_id, *where, ResizeResult.NOT_SENT, message, self._clock())
            self._lasting.resize_outcomes.put(answer)
            return
        self._writers.resizes.submit(plan_id, order)

    def resize_outcomes(self) -> tuple[ResizeOutcome, ...]:
        """The answers since the last call."""
        return workers.drain(self._lasting.resize_outcomes)

    def announce_resize(self, outcome: ResizeOutcome) -> None:
        """Emit the Event about what came of a resize, on its pod; not in a dry run."""
        if self._writers is not None and (event := pod_events.resized(outcome)) is not None:
            self._writers.events.emit(event)

    def announce_kill(self, plan_id: str, victim: Victim) -> None:
        """Emit the Events of a kill once the API server is reachable again."""
        self._events.store_kill(plan_id, victim)

    def emit_node_event(self, reason: EventReason, note: str, *, action: str, plan_id: str = "") -> None:
        """Emit an Event on the Node; not in a dry run."""
        if (writers := self._writers) is not None:
            node = writers.events.node_name
            writers.events.emit(decision_events.on_node(node, reason, note, action=action, plan_id=plan_id))

    def announce_oom_kills(self, report: OomReport, pods: Mapping[str, PodView]) -> None:
        """Emit the Events of OOM kills at once, on the pods, their owners and the node; not in a dry run. `pods`: by
        the UID in the cgroup's name."""
        if (writers := self._writers) is not None:
            for event in oom_events.events(report, pods, node_name=writers.events.node_name):
                writers.events.emit(event)

    def outcomes(self) -> tuple[Outcome, ...]:
        """The outcomes since the last call. An accepted eviction gets Events on its pod and the owner."""
        outcomes = workers.drain(self._lasting.outcomes)
        self._events.store_outcomes(outcomes)
        if (writers := self._writers) is not None:
            if self._transport.reach.unreachable_since is None:
                self._events.emit_kills(writers.events)
            self._events.emit_evictions(writers.events)
        return outcomes

    def publish(self, verdicts: Iterable[ConditionVerdict]) -> None:
        """Publish the verdicts as conditions and taints. In a dry run nothing is written."""
        verdicts = tuple(verdicts)
        if self._opened is None:
            return
        readers, writers = self._opened.readers, self._opened.writers
        if any(verdict.status is ConditionStatus.TRUE for verdict in verdicts):
            readers.want_pdbs()
        if writers is None:
            return
        writers.conditions.publish(verdicts)
        statuses = {verdict.type: verdict.status for verdict in verdicts}
        self._events.emit_changes(statuses, writers.events)
        if writers.taints is not None:
            # With `taint: false` none is wanted: the taints of an earlier configuration are removed.
            writers.taints.publish(statuses if self._config.conditions.taint else {})

    def prewarm(self) -> None:
        """Pressure is near: open connections, list PodDisruptionBudgets and look up volumes now."""
        if self._writers is not None:
            self._writers.evictions.prewarm()
        if self._opened is not None:
            self._opened.readers.hurry()

    def identity(self) -> Identity | None:
        """The node's identity; None until the API server confirmed it."""
        return self._opened.identity if self._opened is not None else None

    def node_labels(self) -> Mapping[str, str] | None:
        """The labels of the Node object; the same object while it has not changed. None before it was read, and if it
        does not exist."""
        view = self._node_view()
        return view.labels if view is not None else None

    def k3s_arguments(self) -> tuple[str, ...]:
        """The arguments of k3s in an annotation of the Node; empty without it, and before the Node was read."""
        view = self._node_view()
        return view.k3s_arguments if view is not None else ()

    def _node_view(self) -> NodeView | None:
        return self._opened.readers.node.view() if self._opened is not None else None

    def read_configz(self) -> str:
        """The kubelet's own configuration, read through the API server; empty until the node's identity is confirmed.
        Waits for the answer: not for the loop. Raises ApiError."""
        return kubelet_configz.fetch(self._transport, self._opened.identity.name) if self._opened else ""

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
        if self._opened is None:
            return Counts()
        confirmed, readers, writers = self._opened
        as_node = confirmed.node_credentials or self._transport.impersonation.complete
        return Counts(
            pods_synced_at=readers.pods.view().synced_at,
            watches=readers.counts(),
            condition_writes=writers.conditions.writes if writers is not None else 0,
            events_dropped=writers.events.dropped if writers is not None else 0,
            in_flight=writers.evictions.in_flight if writers is not None else 0,
            api_identity=(ClusterIdentity.NODE if as_node else ClusterIdentity.SERVICE_ACCOUNT).value,
        )

    def notes(self) -> tuple[Note, ...]:
        """The troubles with the API server now."""
        view = self.pods()
        parts = [(NoteKind.API, view.reason), (NoteKind.CREDENTIALS, self._transport.trouble)]
        parts.append((NoteKind.IDENTITY, self._transport.impersonation.note))
        if self._opened is None:
            return tuple(Note(kind, reason) for kind, reason in parts if reason)
        _, readers, writers = self._opened
        parts.append((NoteKind.NODE_OBJECT, readers.node.reason))
        if writers is not None:
            parts.append((NoteKind.NODE_CONDITIONS, writers.conditions.reason))
            parts.append((NoteKind.TAINTS, self._taints_trouble(writers)))
            parts.append((NoteKind.EVENTS, writers.events.reason))
        requests = self._eviction_requests
        parts.append((NoteKind.OWNERS, readers.owners.reason if readers.owners is not None else ""))
        parts.append((NoteKind.NODE_FIT, readers.node_fit.reason if readers.node_fit is not None else ""))
        parts.append((NoteKind.EVICTION_REQUESTS, requests.reason if requests is not None else ""))
        parts.append((NoteKind.VOLUMES, readers.volumes.reason if readers.volumes is not None else ""))
        pdb_notes = readers.pdbs.notes() if readers.pdbs is not None else ()
        return (*[Note(kind, reason) for kind, reason in parts if reason], *pdb_notes, *view.notes)

    def _taints_trouble(self, writers: ApiWriters) -> str:
        if writers.taints is not None:
            return writers.taints.reason
        return node_identity.NO_TAINT_RIGHTS if self._config.conditions.taint else ""

    def finish_requests(self) -> None:
        """Wait for the answers to the evictions and resizes in flight, which `outcomes` and `resize_outcomes` return
        then. Nothing is evicted or resized afterwards."""
        if self._writers is not None:
            self._writers.finish_requests()

    def stop(self, *, clear: bool, mark: bool = False, withdraw: bool = False, confirm_s: float = 1.0) -> str:
        """End all threads. `clear` removes from the Node what this agent has set. Otherwise it stays: with `mark` it
        gets the reason that the agent has stopped, without `mark` the next session continues it. `confirm_s`: how long
        to wait for the answers about the node's identity. `withdraw`: open EvictionRequests are withdrawn; otherwise
        the next process follows them. Returns what could not be cleared, marked or withdrawn: a call
        with the same arguments tries that again."""
        with self._opening:
            self._stopping.set()
        self._transport.impersonation.doubted.set()
        workers.join(self._thread, confirm_s if self._opened is None else 1.0)
        if self._writers is not None:
            failed = self._writers.stop(clear=clear, mark=mark)
        else:
            failed = self._end_leftover(clear=clear, mark=mark) if clear or mark else ""
        if self._eviction_requests is not None:
            self._eviction_requests.stop()
            if withdraw:
                failed = "; ".join(each for each in (failed, self._eviction_requests.withdraw_all()) if each)
        if self._opened is not None:
            self._opened.readers.stop()
        self._transport.close()
        return failed

    def _end_leftover(self, *, clear: bool, mark: bool) -> str:
        """Clear or mark what an earlier session has set: this one never opened."""
        if self._config.mode is not Mode.ENFORCE:
            return ""
        if self._confirmed_late is None:
            return f"conditions and taints not {'marked' if mark else 'cleared'}: {self._trouble}"
        node = NodeWatch(self._transport, self._confirmed_late.name, clock=self._clock)
        try:
            return self._start_writers(self._confirmed_late, node).stop(clear=clear, mark=mark)
        finally:
            node.stop()

    @property
    def _writers(self) -> ApiWriters | None:
        return self._opened.writers if self._opened is not None else None

    # --- the identity thread ----------------------------------------------------------------------------------------

    def _confirm(self) -> None:
        """Repeat until the identity is confirmed: the Node may be created later, and the API server may be
        unreachable. Then probe the identity of the requests from time to time."""
        mode, evicts = self._config.cluster.identity, self._config.mode is Mode.ENFORCE
        while not self._stopping.is_set() and self._opened is None:
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
            with self._opening:
                if self._stopping.is_set():
                    self._confirmed_late = confirmed
                    return
                self._open(confirmed)
        if self._opened is not None and mode is ClusterIdentity.AUTO:
            node, backoff = self._opened.identity.name, self._probe_backoff
            identity_probe.run(self._transport, node, evicts=evicts, stopping=self._stopping, backoff=backoff)

    def _open(self, confirmed: Identity) -> None:
        config, transport, wake, clock = self._config, self._transport, self._wake, self._clock
        # Nothing is started yet: if this fails, it is repeated from the start.
        node = NodeWatch(transport, confirmed.name, clock=clock)
        readers = ClusterReaders(transport, config, node, wake=wake, clock=clock)
        requests = self._make_eviction_requests() if config.eviction_request.enabled else None
        writers = None
        if config.mode is Mode.ENFORCE:
            writers = self._start_writers(confirmed, node)
        else:
            node.start()
        if requests is not None:
            requests.start()
            self._eviction_requests = requests
        readers.pods.start()
        self._opened = _Opened(confirmed, readers, writers)
        wake()

    def _start_writers(self, confirmed: Identity, node: NodeWatch) -> ApiWriters:
        return api_writers.start_writers(
            self._transport,
            self._config,
            confirmed,
            node=node,
            owned=self._owned,
            outcomes=self._lasting.outcomes,
            resize_outcomes=self._lasting.resize_outcomes,
            wake=self._wake,
            clock=self._clock,
        )

    def _make_eviction_requests(self) -> EvictionRequests:
        return EvictionRequests(self._transport, wake=self._wake, clock=self._clock, outcomes=self._lasting.outcomes)

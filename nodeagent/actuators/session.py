"""The cluster as the loop sees it: the pods, a place to hand victims and conditions to, and what came of them.

Promises:

1. No call waits for the API server. Finding out which node this is, listing, watching and writing are threads' work.
2. Until the node's identity is confirmed nothing is sent but questions, and the view of the pods is empty and says why.
3. The fence is asked for before the first victim is handed over. The hard tier does not wait for it: its eviction
   follows at once. The soft tier waits until the taint was seen back on the Node, at most `FENCE_WAIT_S`, until the
   pods' budgets are known, and, where the fleet has seats, until this node has one (`soft_wait`).
4. What is told to people (Events) is never waited for.
5. `NoCluster` takes the place where there are no credentials, so that the loop has no `if`.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from nodeagent.actuators.api_writers import ApiWriters, start_writers
from nodeagent.actuators.conditions import ConditionConflict, OwnedCondition
from nodeagent.actuators.event_writer import KubernetesEvent
from nodeagent.actuators.taints import KEYS, NodeTaints
from nodeagent.config.schema import Config, Mode
from nodeagent.kube import node_identity
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.node_identity import NO_TAINT_RIGHTS, Identity, IdentityError
from nodeagent.kube.pdb_watch import PdbWatch
from nodeagent.kube.pod_decoder import with_mirrors_of
from nodeagent.kube.pod_watch import PodsView, PodWatch
from nodeagent.kube.timestamps import boottime
from nodeagent.kube.transport import Transport
from nodeagent.kube.volume_lookup import VolumeLookup
from nodeagent.model import (
    SIGNAL_TABLE,
    ConditionStatus,
    ConditionType,
    ConditionVerdict,
    Note,
    NoteKind,
    Outcome,
    OutcomeKind,
    Plan,
    Pod,
    Refusal,
    RefusalCode,
    Tier,
    Victim,
)
from nodeagent.runtime import workers

FENCE_WAIT_S: Final = 2.0
"""Longest wait of the soft tier for its taint. It was seen back 5 to 20 ms after it was asked for; two seconds are what
a 409 or two and a slow API server make of that, and little against a grace period."""
WANT_BUDGETS_S: Final = 10.0
"""How often the namespaces with budgets are looked over while a threshold is near and the pods stay the same."""
SPREAD_S: Final = 10.0
"""Longest wait before the budgets are first listed: of 5,000 nodes with five namespaces each 5,000 requests a second
instead of 50,000 (benchmarks/fleet.py)."""
SPREAD_VOLUMES_S: Final = 3.0
"""Longest wait before the first claim is looked up, where no pressure is near."""
PLAN: Final = "nodeagent.io/plan"
"""Annotation of Events: the id of the decision, as in the log, the record and the metrics."""
_NEWS: Final = {
    (ConditionType.MEMORY_PRESSURE, True): "NodeHasInsufficientMemory",
    (ConditionType.MEMORY_PRESSURE, False): "NodeHasSufficientMemory",
    (ConditionType.DISK_PRESSURE, True): "NodeHasDiskPressure",
    (ConditionType.DISK_PRESSURE, False): "NodeHasNoDiskPressure",
    (ConditionType.PID_PRESSURE, True): "NodeHasInsufficientPID",
    (ConditionType.PID_PRESSURE, False): "NodeHasSufficientPID",
}
"""The kubelet's Events on the Node (KUBELET-CONTRACT 7)."""


class WatchCounts(NamedTuple):
    """One list and watch since the start."""

    name: str
    failures: int
    relists: int


class Counts(NamedTuple):
    """What the threads of a session have counted, for the metrics."""

    pods_synced_at: float | None = None
    watches: tuple[WatchCounts, ...] = ()
    condition_writes: int = 0
    events_dropped: int = 0
    in_flight: int = 0


class Session(Protocol):
    """What the loop needs of a cluster."""

    def start(self) -> None: ...
    def pods(self) -> PodsView: ...
    def report_missing(self, cgroup_uids: frozenset[str]) -> None: ...
    def soft_tier_block(self) -> Refusal | None: ...
    def announce(self, plan: Plan) -> None: ...
    def evict(self, plan_id: str, victim: Victim) -> None: ...
    def announce_kill(self, plan_id: str, victim: Victim) -> None: ...
    def emit_node_event(
        self, reason: str, note: str, *, action: str, plan_id: str = "", warning: bool = True
    ) -> None: ...
    def outcomes(self) -> tuple[Outcome, ...]: ...
    def publish(self, verdicts: Iterable[ConditionVerdict]) -> None: ...
    def warm(self) -> None: ...
    def identity(self) -> Identity | None: ...
    def owned(self) -> tuple[OwnedCondition, ...]: ...
    def contests(self) -> tuple[ConditionConflict, ...]: ...
    def tainted(self, pressure: ConditionType) -> bool: ...
    def counts(self) -> Counts: ...
    def notes(self) -> tuple[Note, ...]: ...
    def stop(self, *, clear: bool, mark: bool = False) -> str: ...


class NoCluster:
    """No credentials: the node is watched and decided for, nobody is told."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def start(self) -> None:
        """Nothing to start."""

    def pods(self) -> PodsView:
        return PodsView((), None, self._reason, awaited=False)

    def report_missing(self, cgroup_uids: frozenset[str]) -> None:
        """Nobody to ask."""

    def soft_tier_block(self) -> Refusal | None:
        return None

    def announce(self, plan: Plan) -> None:
        """Nobody to tell."""

    def evict(self, plan_id: str, victim: Victim) -> None:
        raise RuntimeError(f"plan {plan_id} wants {victim.pod.key} evicted, but there is no cluster")

    def announce_kill(self, plan_id: str, victim: Victim) -> None:
        """Nobody to tell."""

    def emit_node_event(self, reason: str, note: str, *, action: str, plan_id: str = "", warning: bool = True) -> None:
        """Nobody to tell."""

    def outcomes(self) -> tuple[Outcome, ...]:
        return ()

    def publish(self, verdicts: Iterable[ConditionVerdict]) -> None:
        """Nobody to tell."""

    def warm(self) -> None:
        """No connection to open."""

    def identity(self) -> Identity | None:
        return None

    def owned(self) -> tuple[OwnedCondition, ...]:
        return ()

    def contests(self) -> tuple[ConditionConflict, ...]:
        return ()

    def tainted(self, pressure: ConditionType) -> bool:  # noqa: ARG002 - nothing is ever fenced
        return False

    def counts(self) -> Counts:
        return Counts()

    def notes(self) -> tuple[Note, ...]:
        return (Note(NoteKind.API, self._reason),)

    def stop(self, *, clear: bool, mark: bool = False) -> str:  # noqa: ARG002 - nothing was set
        """Nothing to stop, nothing cleanup incomplete."""
        return ""


class ClusterSession:
    """One API server, one node."""

    def __init__(
        self,
        transport: Transport,
        config: Config,
        guess: Identity,
        *,
        wake: Callable[[], None],
        owned: Sequence[OwnedCondition] = (),
        backoff: RetryBackoff | None = None,
        clock: Callable[[], float] = boottime,
    ) -> None:
        """`guess` is the name that this host goes by; `owned` is what an earlier process had set on the Node. Its
        taints need not be remembered: their keys are nobody else's."""
        self._transport = transport
        self._config = config
        self._guess = guess
        self._wake = wake
        self._owned = tuple(owned)
        self._backoff = backoff or RetryBackoff()
        self._clock = clock
        self._stopping = threading.Event()
        self._trouble = "the API server has not answered yet"
        self._confirmed: Identity | None = None
        self._pods: PodWatch | None = None
        self._budgets: PdbWatch | None = None
        self._budgets_wanted_at = float("-inf")
        self._volumes: VolumeLookup | None = None
        self._mirrors: tuple[tuple[Pod, ...], str, tuple[Pod, ...]] = ((), "", ())
        """The last answer of `_own_mirrors`, for which pods and which Node."""
        self._budgets_wanted_for: tuple[Pod, ...] = ()
        self._writers: ApiWriters | None = None
        self._statuses: dict[ConditionType, ConditionStatus] = {}
        """As last published."""
        self._fence_since: dict[ConditionType, float] = {}
        """When each taint that should be up was first asked for."""
        self._sent: dict[tuple[str, str], Victim] = {}
        """Handed over and not answered yet, by plan and UID."""
        self._untold: list[KubernetesEvent] = []
        """Kills that the API server is told of when it is back."""
        self._thread = workers.make_thread(self._begin, name="identity")

    def start(self) -> None:
        """Begin to find out which node this is, then watch it; returns at once."""
        workers.start(self._thread)

    def pods(self) -> PodsView:
        """What is known of the pods and of the volumes that they mount, with their budgets once those were wanted."""
        lost_at = self._transport.reach.unreachable_since
        if self._pods is None:
            return PodsView((), None, self._trouble, unreachable_since=lost_at)
        view = self._pods.view()
        pods = self._own_mirrors(view.pods)
        pods = self._volumes.fill(pods) if self._volumes else pods
        pods = self._budgets.with_pdbs(pods) if self._budgets else pods
        return view._replace(pods=pods, unreachable_since=lost_at)

    def _own_mirrors(self, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        """The pods, mirror pods of another Node object as ordinary ones, where our Node was read. Only then is its UID
        known; until then the owner reference counts by the Node's name."""
        node = self._writers.node.view() if self._writers else None
        if node is None or not node.uid:
            return pods
        known, uid, answer = self._mirrors
        if known is not pods or uid != node.uid:
            answer = with_mirrors_of(pods, node.uid)
            self._mirrors = pods, node.uid, answer
        return answer

    def report_missing(self, cgroup_uids: frozenset[str]) -> None:
        """The node runs these pods and `pods` has none of them: its view is stale, list again."""
        if self._pods is not None:
            self._pods.report_missing(cgroup_uids)

    def soft_tier_block(self) -> Refusal | None:
        """What the soft tier has to wait for now; None: for nothing. The hard tier waits for nothing."""
        waits = (
            (RefusalCode.WAITS_FOR_TAINT, self._fence_wait),
            (RefusalCode.WAITS_FOR_PDBS, self._budgets_wait),
            (RefusalCode.WAITS_FOR_LEASE, self._seat_wait),
        )
        blocks = (Refusal(code, f"the soft tier waits for {why}") for code, wait in waits if (why := wait()))
        return next(blocks, None)

    def announce(self, plan: Plan) -> None:
        """A plan was made: tell whom it concerns. Before its victims are handed over."""
        writers = self._writers
        if writers is None:
            return
        soft = any(victim.tier is Tier.SOFT for victim in plan.victims)
        if writers.leases is not None and (soft or any(refusal.code.wants_slot for refusal in plan.refusals)):
            writers.leases.want()
        if plan.victims:
            resource = SIGNAL_TABLE[plan.victims[0].threshold.signal].resource
            self.emit_node_event(
                "EvictionThresholdMet", f"Attempting to reclaim {resource}", action="Evicting", plan_id=plan.id
            )

    def evict(self, plan_id: str, victim: Victim) -> None:
        """Hand over a victim; its outcome follows."""
        if self._writers is None:
            raise RuntimeError("a plan with victims was made before the node's identity was confirmed")
        self._sent[plan_id, victim.pod.uid] = victim
        self._writers.evictor.submit(plan_id, victim)

    def announce_kill(self, plan_id: str, victim: Victim) -> None:
        """A victim was ended without the API server, which is told when it is back. What an outage of many kills had
        to say is in the record; here the last ones are kept."""
        event = _about_pod(victim, "Killed", plan_id)._replace(action="Killing", at_wall=time.time())
        self._untold = [*self._untold, event][-20:]

    def emit_node_event(self, reason: str, note: str, *, action: str, plan_id: str = "", warning: bool = True) -> None:
        """An Event on the Node. In a dry run nobody is told."""
        if self._writers is None:
            return
        name = self._writers.node.node_name
        # As the kubelet: an Event on a Node carries its name for a UID, and that is what `kubectl describe` looks for.
        marks = {PLAN: plan_id} if plan_id else {}
        event = KubernetesEvent("Node", "", name, name, reason, note, action=action, warning=warning, annotations=marks)
        self._writers.events.emit(event)

    def outcomes(self) -> tuple[Outcome, ...]:
        """What became of victims since the last call. Those that are going are told of on the pod."""
        writers = self._writers
        if writers is None:
            return ()
        if self._untold and self._transport.reach.unreachable_since is None:
            untold, self._untold = self._untold, []
            for event in untold:
                writers.events.emit(event)
        outcomes = writers.evictor.take()
        for outcome in outcomes:
            victim = self._sent.pop((outcome.plan_id, outcome.pod_uid), None)
            if victim is not None and outcome.kind is OutcomeKind.ACCEPTED:
                # A pod that was terminating already was not evicted by us, or not now.
                reason = "EvictionGraceShortened" if victim.pod.terminating else "Evicted"
                writers.events.emit(_about_pod(victim, reason, outcome.plan_id))
        return outcomes

    def publish(self, verdicts: Iterable[ConditionVerdict]) -> None:
        """These are the verdicts now. In dry-run nothing is written."""
        verdicts = tuple(verdicts)
        if any(verdict.status is ConditionStatus.TRUE for verdict in verdicts):
            self._want_budgets()
        writers = self._writers
        if writers is None:
            return
        writers.conditions.publish(verdicts)
        statuses = {verdict.type: verdict.status for verdict in verdicts}
        if statuses != self._statuses:
            self._tell_changes(statuses)
            self._statuses = statuses
        if writers.fence is not None:
            self._raise_fence(writers.fence)

    def warm(self) -> None:
        """Pressure is near: have connections open and know the budgets and the volumes."""
        if self._writers is not None:
            self._writers.evictor.prewarm()
        if self._volumes is not None:
            self._volumes.hurry()
        self._want_budgets()

    def _want_budgets(self) -> None:
        """Those of all pods' namespaces: now and then, and when there is a new view of the pods."""
        if self._budgets is None or self._pods is None:
            return
        now, pods = self._clock(), self._pods.view().pods
        if pods is not self._budgets_wanted_for or now - self._budgets_wanted_at >= WANT_BUDGETS_S:
            self._budgets_wanted_for, self._budgets_wanted_at = pods, now
            self._budgets.want({pod.namespace for pod in pods if pod.namespace})

    def identity(self) -> Identity | None:
        """Who we are, once the API server confirmed it."""
        return self._confirmed

    def owned(self) -> tuple[OwnedCondition, ...]:
        """What is set on the Node by us and would have to be cleared, for the saved state."""
        return self._writers.conditions.owned if self._writers else self._owned

    def contests(self) -> tuple[ConditionConflict, ...]:
        return self._writers.conditions.conflicts() if self._writers else ()

    def tainted(self, pressure: ConditionType) -> bool:
        """Whether our taint for this pressure was seen on the Node."""
        fence = self._writers.fence if self._writers else None
        return fence is not None and pressure in fence.present()

    def counts(self) -> Counts:
        """What the threads have counted; from any thread."""
        pods, writers = self._pods, self._writers
        node = writers.node if writers is not None else None
        watches = (("pods", pods), ("node", node))
        return Counts(
            pods_synced_at=pods.view().synced_at if pods is not None else None,
            watches=tuple(WatchCounts(name, each.failures, each.relists) for name, each in watches if each is not None),
            condition_writes=writers.conditions.writes if writers is not None else 0,
            events_dropped=writers.events.dropped if writers is not None else 0,
            in_flight=writers.evictor.in_flight if writers is not None else 0,
        )

    def notes(self) -> tuple[Note, ...]:
        """What is wrong with the connection now."""
        view = self.pods()
        parts = [(NoteKind.API, view.reason), (NoteKind.CREDENTIALS, self._transport.trouble)]
        if self._writers:
            parts.append((NoteKind.NODE_OBJECT, self._writers.node.reason))
            parts.append((NoteKind.NODE_CONDITIONS, self._writers.conditions.reason))
            parts.append((NoteKind.TAINTS, self._fence_trouble(self._writers.fence)))
            parts.append((NoteKind.EVENTS, self._writers.events.reason))
        parts.append((NoteKind.VOLUMES, self._volumes.reason if self._volumes else ""))
        budgets = self._budgets.notes() if self._budgets else ()
        return (*[Note(kind, reason) for kind, reason in parts if reason], *budgets, *view.notes)

    def stop(self, *, clear: bool, mark: bool = False) -> str:
        """End all threads. `clear` takes back what we have set on the Node; else it stays, with `mark` with the reason
        that we have stopped, without for the session that follows. Returns what had to be left there."""
        self._stopping.set()
        workers.join(self._thread, 1.0)
        left = self._writers.stop(clear=clear, mark=mark) if self._writers else ""
        for part in (self._volumes, self._budgets, self._pods):
            if part:
                part.stop()
        self._transport.close()
        return left

    # --- what the soft tier waits for -------------------------------------------------------------------------------

    def _budgets_wait(self) -> str:
        namespace = self._budgets.unlisted_namespace() if self._budgets is not None else ""
        return f"the PodDisruptionBudgets of {namespace}, which the API server was asked for" if namespace else ""

    def _seat_wait(self) -> str:
        leases = self._writers.leases if self._writers is not None else None
        if leases is None or leases.held():
            return ""
        return f"a seat among the nodes that may evict at once: {leases.reason}"

    def _raise_fence(self, fence: NodeTaints) -> None:
        """Ask for the taints of the conditions that are True. One that is not known keeps what it has."""
        wanted: set[ConditionType] = set()
        if self._config.conditions.taint:
            wanted.update(kind for kind, status in self._statuses.items() if status is ConditionStatus.TRUE)
            unknown = {kind for kind, status in self._statuses.items() if status is ConditionStatus.UNKNOWN}
            wanted.update(unknown & fence.present())
        # With `taint: false` nothing is wanted: what an earlier configuration put up comes down.
        now = self._clock()
        self._fence_since = {kind: self._fence_since.get(kind, now) for kind in wanted}
        fence.want(wanted)

    def _fence_wait(self) -> str:
        fence = self._writers.fence if self._writers is not None else None
        if fence is None:
            return ""
        up, now = fence.present(), self._clock()
        for kind, since in self._fence_since.items():
            left_s = since + FENCE_WAIT_S - now
            if kind not in up and left_s > 0:
                return f"the taint {KEYS[kind]} is not seen on the node yet; waiting {left_s:.1f}s at most"
        return ""

    def _fence_trouble(self, fence: NodeTaints | None) -> str:
        if fence is not None:
            return fence.reason
        return NO_TAINT_RIGHTS if self._config.conditions.taint else ""

    # --- telling ----------------------------------------------------------------------------------------------------

    def _tell_changes(self, statuses: dict[ConditionType, ConditionStatus]) -> None:
        for kind, status in statuses.items():
            before = self._statuses.get(kind, ConditionStatus.FALSE)
            if status is not before and ConditionStatus.UNKNOWN not in (status, before):
                reason = _NEWS[kind, status is ConditionStatus.TRUE]
                name = self._writers.node.node_name if self._writers else ""
                self.emit_node_event(reason, f"Node {name} status is now: {reason}", action="Observing", warning=False)

    # --- the identity thread ----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Ask until the answer is sure; a node may be younger than its agent, and an API server may be away."""
        while not self._stopping.is_set():
            try:
                confirmed = node_identity.confirm_identity(self._transport, self._guess)
            except Exception as error:
                self._trouble = str(error) or type(error).__name__
                self._wake()
                if not isinstance(error, IdentityError | ApiError):
                    raise  # a defect of ours, which is told as one; the thread starts again
                retry = error.retry_after_s if isinstance(error, ApiError) else None
                self._stopping.wait(self._backoff.failed(retry))
                continue
            self._open(confirmed)
            return

    def _open(self, confirmed: Identity) -> None:
        config, transport = self._config, self._transport
        # This is done again from the start if it fails half-way.
        if config.mode is Mode.ENFORCE and self._writers is None:
            self._writers = start_writers(transport, config, confirmed, owned=self._owned, wake=self._wake)
        if config.protection.disruption_budgets:
            self._budgets = PdbWatch(transport, wake=self._wake, spread_s=_spread_s(config))
        if config.protection.node_bound:
            self._volumes = VolumeLookup(transport, confirmed.name, spread_s=SPREAD_VOLUMES_S)
        pods = PodWatch(transport, confirmed.name, wake=self._wake, keep_annotations=config.protection.annotations)
        pods.start()
        self._confirmed = confirmed
        self._pods = pods
        self._wake()


def _spread_s(config: Config) -> float:
    """Only the soft tier looks at budgets, so half of the shortest grace is time enough to ask for them, and a fleet
    that crosses a threshold in the same second does not ask in the same second."""
    graces = [threshold.grace_period_s for threshold in config.thresholds if not threshold.hard]
    return min(SPREAD_S, 0.5 * min(graces, default=0.0))


def _about_pod(victim: Victim, reason: str, plan_id: str) -> KubernetesEvent:
    pod: Pod = victim.pod
    marks = {**victim.annotations, PLAN: plan_id}
    return KubernetesEvent(
        "Pod", pod.namespace or "", pod.name or "", pod.uid, reason, victim.message, annotations=marks
    )

"""The Events about decisions and what came of them: on the Node, on evicted and killed pods, and on their owners.

Promises:

1. No call waits: `EventWriter` has the thread.
2. The Events of an eviction follow the answer of the API server that accepted it, or the sample that shows that others
   have evicted the pod for an EvictionRequest. Those of a kill follow once the API server is reachable again; the last
   `MAX_KILLS` are stored, the flight recorder has all of them.
3. A change of a condition has the Event of the kubelet.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Final

from nodeagent.actuators import event_writer, pod_events
from nodeagent.actuators.event_writer import EventReason, EventWriter, KubernetesEvent
from nodeagent.actuators.pod_events import RankedVictim
from nodeagent.model import SIGNAL_TABLE, ConditionStatus, ConditionType, Outcome, Plan, RankedPod, Victim

MAX_KILLS: Final = 20
MAX_RANKS: Final = 64
"""Victims, and their ranks, that are stored for their Events; a hard decision has at most five victims by default."""
_CHANGE_REASONS: Final = {
    (ConditionType.MEMORY_PRESSURE, True): EventReason.NODE_HAS_INSUFFICIENT_MEMORY,
    (ConditionType.MEMORY_PRESSURE, False): EventReason.NODE_HAS_SUFFICIENT_MEMORY,
    (ConditionType.DISK_PRESSURE, True): EventReason.NODE_HAS_DISK_PRESSURE,
    (ConditionType.DISK_PRESSURE, False): EventReason.NODE_HAS_NO_DISK_PRESSURE,
    (ConditionType.PID_PRESSURE, True): EventReason.NODE_HAS_INSUFFICIENT_PID,
    (ConditionType.PID_PRESSURE, False): EventReason.NODE_HAS_SUFFICIENT_PID,
}
"""By condition and whether it is True: the reasons of the kubelet's Events on the Node (KUBELET-CONTRACT §7)."""


def on_node(node: str, reason: EventReason, note: str, *, action: str, plan_id: str = "") -> KubernetesEvent:
    """An Event on the Node."""
    # As the kubelet: an Event on a Node has its name as UID, and `kubectl describe` searches for that.
    annotations = {event_writer.PLAN_ANNOTATION: plan_id} if plan_id else {}
    return KubernetesEvent("Node", "", node, node, reason, note, action=action, annotations=annotations)


class DecisionEvents:
    """What is stored until the Events can be emitted. Only the loop calls it."""

    def __init__(self) -> None:
        self._statuses: Mapping[ConditionType, ConditionStatus] = {}
        """Of the last `emit_changes`."""
        self._ranks: dict[tuple[str, str], RankedPod] = {}
        """Of the last victims, by plan and UID: a victim is handed over before its plan is announced."""
        self._unanswered: dict[tuple[str, str], Victim] = {}
        """The last victims without a last outcome, by plan and UID."""
        self._kills: list[tuple[str, Victim, float]] = []
        """Plan id, victim and wall time of kills without Events."""
        self._evicted: list[tuple[str, Victim, float]] = []
        """The same of evictions that were carried out."""

    def emit_changes(self, statuses: Mapping[ConditionType, ConditionStatus], writer: EventWriter) -> None:
        """Emit the Events of the conditions that have changed since the last call."""
        for kind, status in statuses.items():
            before = self._statuses.get(kind, ConditionStatus.FALSE)
            if status is not before and ConditionStatus.UNKNOWN not in (status, before):
                reason = _CHANGE_REASONS[kind, status is ConditionStatus.TRUE]
                note = f"Node {writer.node_name} status is now: {reason}"
                writer.emit(on_node(writer.node_name, reason, note, action="Observing"))
        self._statuses = statuses

    def emit_plan(self, plan: Plan, writer: EventWriter) -> None:
        """Store the ranks of the victims and emit the Event that the Node is about to evict."""
        if plan.victims:
            ranks = {**self._ranks, **pod_events.ranks_of(plan)}
            self._ranks = dict(list(ranks.items())[-MAX_RANKS:])
        if any(not victim.limit for victim in plan.victims):
            note = f"Attempting to reclaim {SIGNAL_TABLE[plan.victims[0].threshold.signal].resource}"
            reason = EventReason.EVICTION_THRESHOLD_MET
            writer.emit(on_node(writer.node_name, reason, note, action="Evicting", plan_id=plan.id))

    def store_victim(self, plan_id: str, victim: Victim) -> None:
        """Store the victim until its last outcome is known."""
        self._unanswered = dict([*self._unanswered.items(), ((plan_id, victim.pod.uid), victim)][-MAX_RANKS:])

    def store_kill(self, plan_id: str, victim: Victim) -> None:
        """Store a kill until the API server is reachable again."""
        self._kills = [*self._kills, (plan_id, victim, time.time())][-MAX_KILLS:]

    def emit_kills(self, writer: EventWriter) -> None:
        """Emit the Events of the stored kills, on the pods and their owners: the API server is reachable."""
        kills, self._kills = self._kills, []
        for plan_id, victim, at_wall in kills:
            ranked = self._ranked(plan_id, victim)
            for event in pod_events.killed(plan_id, ranked, node=writer.node_name, at_wall=at_wall):
                writer.emit(event)

    def store_outcomes(self, outcomes: Iterable[Outcome]) -> None:
        """Store the evictions that were carried out until there is a writer."""
        for outcome in outcomes:
            key = outcome.plan_id, outcome.pod_uid
            victim = self._unanswered.get(key) if outcome.kind.followed else self._unanswered.pop(key, None)
            if victim is not None and outcome.kind.evicted:
                self._evicted = [*self._evicted, (outcome.plan_id, victim, time.time())][-MAX_RANKS:]

    def emit_evictions(self, writer: EventWriter) -> None:
        """Emit the Events of the evictions that were carried out, on the pods and their owners."""
        evicted, self._evicted = self._evicted, []
        for plan_id, victim, at_wall in evicted:
            for event in pod_events.evicted(plan_id, self._ranked(plan_id, victim), node=writer.node_name):
                writer.emit(event._replace(at_wall=at_wall))

    def _ranked(self, plan_id: str, victim: Victim) -> RankedVictim:
        return RankedVictim(victim, self._ranks.get((plan_id, victim.pod.uid)))

"""What is stored until Events can be emitted leaves once, with its own time."""

from nodeagent.actuators.decision_events import MAX_KILLS, MAX_RANKS, DecisionEvents
from nodeagent.actuators.event_writer import EventWriter, KubernetesEvent
from nodeagent.model import Method, Outcome, OutcomeKind
from tests.fake_kube import pod
from tests.support.victims import victim_of

KILL = victim_of(pod("web", owner=("ReplicaSet", "web")), method=Method.KILL)

REQUEST = KILL._replace(method=Method.REQUEST)


class Emitted(EventWriter):
    """An `EventWriter` that writes nothing."""

    def __init__(self) -> None:
        self.node_name = "lab-node"
        self.events: list[KubernetesEvent] = []

    def emit(self, event: KubernetesEvent) -> None:
        self.events.append(event)


def test_the_events_of_a_kill_are_emitted_once() -> None:
    stored, writer = DecisionEvents(), Emitted()
    stored.store_kill("run-8", KILL)
    stored.emit_kills(writer)
    emitted = len(writer.events)
    assert {event.reason.value for event in writer.events} == {"Killed", "PodEvicted"}
    stored.emit_kills(writer)
    assert len(writer.events) == emitted


def test_the_last_kills_of_an_outage_are_stored() -> None:
    stored, writer = DecisionEvents(), Emitted()
    for number in range(MAX_KILLS + 5):
        stored.store_kill(f"run-{number}", KILL)
    stored.emit_kills(writer)
    plans = [event.annotations["nodeagent.io/plan"] for event in writer.events if event.kind == "Pod"]
    assert plans == [f"run-{number}" for number in range(5, MAX_KILLS + 5)]


def test_a_pod_that_others_evict_for_an_eviction_request_has_the_events_of_an_eviction_once() -> None:
    stored, writer = DecisionEvents(), Emitted()
    stored.store_victim("run-8", REQUEST)
    reasons = []
    for kind in (OutcomeKind.REQUEST_UNCERTAIN, OutcomeKind.REQUESTED, OutcomeKind.EVICTED_BY_OTHERS):
        stored.store_outcomes([Outcome("run-8", REQUEST.pod.uid, kind, "", 1.0)])
        stored.emit_evictions(writer)
        reasons.append([event.reason.value for event in writer.events])
    assert reasons == [[], [], ["Evicted", "PodEvicted"]]


def test_victims_whose_last_outcome_never_comes_are_dropped() -> None:
    stored, writer = DecisionEvents(), Emitted()
    for number in range(MAX_RANKS + 1):
        stored.store_victim(f"run-{number}", REQUEST)
    for number in (0, 1):
        outcome = Outcome(f"run-{number}", REQUEST.pod.uid, OutcomeKind.ACCEPTED, "", 1.0)
        stored.store_outcomes([outcome])
    stored.emit_evictions(writer)
    assert {event.annotations["nodeagent.io/plan"] for event in writer.events} == {"run-1"}

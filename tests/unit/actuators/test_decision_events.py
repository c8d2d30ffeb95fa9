"""What is stored until Events can be emitted leaves once, with its own time."""

from nodeagent.actuators.decision_events import MAX_KILLS, DecisionEvents
from nodeagent.actuators.event_writer import EventWriter, KubernetesEvent
from nodeagent.model import Method
from tests.fake_kube import pod
from tests.support.victims import victim_of

KILL = victim_of(pod("web", owner=("ReplicaSet", "web")), method=Method.KILL)


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

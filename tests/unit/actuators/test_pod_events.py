"""The Events of an eviction, on the pod and on its owner."""

from nodeagent.actuators import pod_events
from nodeagent.actuators.event_writer import MAX_NOTE_BYTES, KubernetesEvent
from nodeagent.actuators.pod_events import RankedVictim
from nodeagent.model import Owner, Plan, Signal
from nodeagent.policy import engine, ranking
from nodeagent.policy.state import initial
from tests.support import victims
from tests.support.nodes import GI, MI, NOW, config, hard, snapshot, view

OWNER = Owner("StatefulSet", "db", "uid-db", "apps/v1")


def decided() -> Plan:
    node = snapshot(
        view("db-0", 3 * GI, request=512 * MI, owner=OWNER),
        view("web", GI),
        available={Signal.MEMORY: GI},
    )
    plan, _ = engine.decide(node, initial("abc", now=NOW), now=NOW, config=config(hard(value=2 * GI)))
    assert [victim.pod.name for victim in plan.victims] == ["db-0"]
    return ranking.with_key_texts(plan)


def events(plan: Plan) -> list[KubernetesEvent]:
    victim = victims.with_rank(plan.victims[0], plan)
    return list(pod_events.evicted(plan.id, victim, node="node-1"))


def test_the_owner_learns_pod_node_reason_usage_and_request() -> None:
    pod, owner = events(decided())
    assert (pod.kind, pod.reason) == ("Pod", "Evicted")
    assert (owner.kind, owner.api_version, owner.namespace, owner.name, owner.uid) == (
        "StatefulSet",
        "apps/v1",
        "shop",
        "db",
        "uid-db",
    )
    assert owner.reason == "PodEvicted"
    assert owner.note == (
        "Pod db-0 was evicted from node node-1 because the node was low on memory. It used 3Gi of memory, 2.5Gi more "
        "than its request of 512Mi. The scheduler reserves what a pod requests, and no more."
    )
    assert owner.annotations["nodeagent.io/plan"] == "abc-1"
    assert owner.annotations["starved_resource"] == "memory"


def test_an_owner_that_the_admission_policy_does_not_know_gets_no_event() -> None:
    for owner in (
        None,
        OWNER._replace(kind="Deployment"),
        OWNER._replace(api_version="evil.example/v1"),
        OWNER._replace(kind="Secret", api_version="v1"),
    ):
        plan = decided()
        victim = plan.victims[0]
        plan = plan._replace(victims=(victim._replace(pod=victim.pod._replace(owner=owner)),))
        assert [event.kind for event in events(plan)] == ["Pod"], owner


def test_the_owner_gets_no_event_of_a_shortened_grace_period() -> None:
    plan = decided()
    victim = plan.victims[0]
    gone = victim._replace(pod=victim.pod._replace(deletion_wall=1.0))
    (event,) = pod_events.evicted(plan.id, victims.with_rank(gone, plan), node="node-1")
    assert event.reason == "EvictionGraceShortened"


def test_evictions_of_one_owner_for_one_resource_are_one_series() -> None:
    first = events(decided())[1]
    second = first._replace(note=first.note.replace("db-0", "db-1"))
    assert first.series == second.series == "memory.available"


def test_a_kill_is_an_event_on_pod_and_owner_at_its_own_time() -> None:
    plan = decided()
    pod, owner = pod_events.killed(plan.id, victims.with_rank(plan.victims[0], plan), node="node-1", at_wall=5.0)
    assert (pod.reason, owner.reason) == ("Killed", "PodEvicted")
    assert {(event.action, event.at_wall) for event in (pod, owner)} == {("Killing", 5.0)}


def test_a_rank_for_another_resource_is_not_quoted() -> None:
    plan = decided()
    assert victims.with_rank(plan.victims[0], plan._replace(ranked_for=Signal.PID)).ranked is None
    _, event = pod_events.evicted("p", RankedVictim(plan.victims[0], None), node="n")
    assert event.note == "Pod db-0 was evicted from node n because the node was low on memory."


def test_the_longest_names_leave_the_note_whole() -> None:
    assert len(events(decided())[1].note) + 253 + 253 < MAX_NOTE_BYTES


def test_the_end_of_a_hook_is_an_annotation_of_the_pods_event() -> None:
    plan = decided()
    assert "nodeagent.io/hook" not in events(plan)[0].annotations
    plan = plan._replace(victims=(plan.victims[0]._replace(hook="done after 2s"),))
    pod, owner = events(plan)
    assert pod.annotations["nodeagent.io/hook"] == "done after 2s"
    assert pod.note == plan.victims[0].message, "the kubelet's message, byte for byte"
    assert owner.note.endswith(" Hook before the eviction: done after 2s.")

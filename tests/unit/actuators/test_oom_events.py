"""Which objects get an Event for an OOM kill, and what it has."""

from typing import Any

import pytest

from nodeagent.actuators import event_writer, oom_events
from nodeagent.actuators.event_writer import EventReason, KubernetesEvent
from nodeagent.model import (
    LostRace,
    MemorySample,
    OomCause,
    OomKill,
    OomLevel,
    OomPlace,
    OomProcess,
    OomReport,
    Owner,
    PodSource,
    PodView,
    RaceLoss,
)
from tests.support import nodes

MI = nodes.MI
POD = nodes.pod("web", owner=Owner("ReplicaSet", "web-1", "uid-rs"))
PLACE = OomPlace("/kubepods/podu/c", OomLevel.CONTAINER, POD.cgroup_uid, "c" * 64)
RACE = LostRace(RaceLoss.NOT_MET, "200Mi", 120 * MI, 0.2, met=False, victims=("shop/large",))
SAMPLE = MemorySample(99.0, 300 * MI, 80 * MI, 10.0, 5.0)


def kill(cause: OomCause = OomCause.CONTAINER_LIMIT, **more: Any) -> OomKill:
    values: dict[str, Any] = {
        "place": PLACE,
        "pod": POD.key,
        "container": "main",
        "processes": (OomProcess(7, "python3", MI, 1.0),),
    }
    return OomKill(1, cause, **(values | more))


def events(*kills: OomKill, pods: tuple[PodView, ...] = (PodView(POD, None),), **more: Any) -> list[KubernetesEvent]:
    race = RACE if any(each.cause.race for each in kills) else None
    report = OomReport("i-oom1", 100.0, 99.5, kills, (SAMPLE,), race)._replace(**more)
    return list(oom_events.events(report, {each.pod.cgroup_uid: each for each in pods}, node_name="node-1"))


def test_a_pod_and_its_owner_get_an_event_at_once() -> None:
    pod, owner = events(kill())
    assert (pod.kind, pod.namespace, pod.name, pod.uid) == ("Pod", "shop", "web", POD.uid)
    assert (owner.kind, owner.api_version, owner.namespace, owner.name, owner.uid) == (
        "ReplicaSet",
        "apps/v1",
        "shop",
        "web-1",
        "uid-rs",
    )
    for event in (pod, owner):
        assert event.reason is EventReason.OOM_KILL_OBSERVED
        assert event.urgent
        assert event.annotations == {event_writer.PLAN_ANNOTATION: "i-oom1"}
    assert pod.note == ("Container main: OOM kill of 1 process (python3): the container reached its own memory limit")
    assert owner.note.startswith("pod shop/web, container main: ")


def test_the_same_kill_again_has_the_same_note_so_that_it_is_a_series() -> None:
    first = events(kill())
    again = events(kill(processes=(OomProcess(8, "python3", 2 * MI, 9.0),)), id="i-oom2", at=300.0)
    assert [each.note for each in first] == [each.note for each in again]


def test_kills_of_one_container_for_one_cause_are_one_series_whatever_its_processes_are_called() -> None:
    first = events(kill(OomCause.ALLOCATABLE))
    named = kill(OomCause.ALLOCATABLE, processes=(OomProcess(8, "other", MI, 9.0),))._replace(number=40)
    sample = SAMPLE._replace(mem_available=MI)
    again = events(named, id="i-oom2", samples=(sample,))
    assert [each.series for each in first] == [each.series for each in again]
    assert all(each.note != other.note for each, other in zip(first, again, strict=True))
    assert {each.series for each in first}.isdisjoint({each.series for each in events(kill())}), "another cause"
    assert {each.series for each in first}.isdisjoint({each.series for each in events(kill(container="side"))})


def test_a_shortage_of_the_node_has_both_figures_the_deficit_and_the_victim_and_is_on_the_node_too() -> None:
    pod, owner, node = events(kill(OomCause.NODE))
    assert (node.kind, node.namespace, node.name) == ("Node", "", "node-1")
    for event in (pod, owner, node):
        assert "memory.available 300Mi as the kubelet computes it, 80Mi by the kernel (MemAvailable)" in event.note
        assert "120Mi below the threshold of 200Mi 200ms before the kill" in event.note
        assert "the victim would have been shop/large" in event.note


def test_a_kill_outside_pods_is_on_the_node_alone() -> None:
    service = kill(OomCause.HOST_LIMIT, place=OomPlace("/system.slice/db.service", OomLevel.HOST), pod="", container="")
    [event] = events(service)
    assert event.kind == "Node"
    assert event.note.startswith("cgroup /system.slice/db.service: OOM kill of 1 process")
    [event] = events(kill(OomCause.UNKNOWN, place=None, pod="", container=""))
    assert event.kind == "Node"


@pytest.mark.parametrize(
    ("owner", "kinds"),
    [
        (None, ["Pod"]),
        (Owner("Rollout", "web", "u", "argoproj.io/v1alpha1"), ["Pod"]),
        (Owner("ReplicaSet", "web", "u", "evil.example/v1"), ["Pod"]),
        (Owner("Node", "node-1", "u", "v1"), ["Pod"]),
        (Owner("Job", "web", "u", "batch/v1"), ["Pod", "Job"]),
    ],
)
def test_only_owners_that_the_admission_policy_allows_get_one(owner: Owner | None, kinds: list[str]) -> None:
    view = PodView(POD._replace(owner=owner), None)
    assert [event.kind for event in events(kill(), pods=(view,))] == kinds


def test_a_pod_that_only_the_host_knows_gets_none() -> None:
    view = PodView(POD._replace(source=PodSource.HOST), None)
    assert events(kill(), pods=(view,)) == []


def test_many_kills_at_once_are_bounded() -> None:
    assert len(events(*[kill()] * 50)) == 2 * oom_events.MAX_KILLS


def test_a_kill_while_the_agent_was_down_says_so() -> None:
    assert "while the agent was not running" in events(kill(), while_down=True)[0].note

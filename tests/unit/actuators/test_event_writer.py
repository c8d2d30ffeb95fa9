"""Events are written once, counted when repeated, limited, and never waited for."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.actuators.event_writer import (
    CONTROLLER,
    EVENT_BURST,
    EVENTS_PER_S,
    MAX_QUEUE,
    REFRESH_S,
    EventReason,
    EventWriter,
    KubernetesEvent,
)
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.transport import connect
from tests.fake_kube import ApiServer

EVICTED = KubernetesEvent(
    "Pod",
    "default",
    "hog",
    "uid-1",
    EventReason.EVICTED,
    "The node was low on resource: memory. ",
    annotations={"x": "y"},
)


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server


@pytest.fixture
def writer(api: ApiServer, tmp_path: Path) -> Iterator[EventWriter]:
    transport = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))), request_timeout_s=5.0)
    writer = EventWriter(transport, "lab-node")
    writer.start()
    yield writer
    writer.stop()


def _wait(event: threading.Event) -> None:
    event.wait(60)


def test_an_event_about_a_pod_is_in_its_namespace(api: ApiServer, writer: EventWriter) -> None:
    writer.emit(EVICTED)
    assert api.wait_for(lambda: api.sent("POST"), 30)
    (request,) = api.sent("POST")
    assert request.path == "/apis/events.k8s.io/v1/namespaces/default/events"
    body = request.body
    assert (body["reason"], body["type"], body["note"]) == ("Evicted", "Warning", EVICTED.note)
    assert body["regarding"] == {
        "kind": "Pod",
        "apiVersion": "v1",
        "namespace": "default",
        "name": "hog",
        "uid": "uid-1",
    }
    assert body["metadata"]["annotations"] == {"x": "y"}
    assert body["reportingInstance"] == "lab-node"
    assert len(api.store.objects["events"]) == 1


def test_an_event_about_the_node_is_in_default(api: ApiServer, writer: EventWriter) -> None:
    writer.emit(
        KubernetesEvent(
            "Node", "", "lab-node", "lab-node", EventReason.EVICTION_THRESHOLD_MET, "Attempting to reclaim memory"
        )
    )
    assert api.wait_for(lambda: api.store.objects["events"], 30)
    assert "namespace" not in api.sent("POST")[0].body["regarding"]


def test_a_repetition_extends_the_series(api: ApiServer, writer: EventWriter) -> None:
    for _ in range(10):
        writer.emit(EVICTED)
    writer.emit(EVICTED._replace(uid="uid-2"))
    writer.stop(timeout_s=30.0)
    assert len(api.sent("POST")) == 2
    assert not api.sent("PATCH"), "a series is written at most once in 30 s"


def test_repetitions_without_end_keep_no_other_event_from_being_written(api: ApiServer, writer: EventWriter) -> None:
    """A container whose processes the kernel kills every second, each with another name."""
    oom = EVICTED._replace(reason=EventReason.OOM_KILL_OBSERVED, series="container main: container-limit", urgent=True)
    writer.emit(oom._replace(note="OOM kill of 1 process (first)"))
    assert api.wait_for(lambda: api.sent("POST"), 30)
    for n in range(MAX_QUEUE - 10):
        writer.emit(oom._replace(note=f"OOM kill of {n} processes (name-{n})"))
    writer.emit(EVICTED)
    assert api.wait_for(lambda: len(api.sent("POST")) == 2, 30), "one a second would take minutes"
    assert [request.body["reason"] for request in api.sent("POST")] == ["OOMKillObserved", "Evicted"]
    assert writer.dropped == 0


def test_emit_never_waits_for_an_api_server_that_hangs(api: ApiServer, writer: EventWriter) -> None:
    answered = threading.Event()
    api.at_request = lambda _request, _done: _wait(answered)
    began = time.monotonic()
    for n in range(MAX_QUEUE * 2):
        writer.emit(EVICTED._replace(uid=str(n)))
    assert time.monotonic() - began < 5, "one request alone is waited for 5 s"
    assert writer.dropped >= MAX_QUEUE - 2
    assert len(writer._queue) <= MAX_QUEUE
    answered.set()


def test_a_refused_event_is_counted_and_the_next_one_is_written(api: ApiServer, writer: EventWriter) -> None:
    api.forbid("create", "events")
    writer.emit(EVICTED)
    assert api.wait_for(lambda: api.sent("POST"), 30)
    for _ in range(3000):
        if writer.dropped:
            break
        threading.Event().wait(0.01)
    assert writer.dropped == 1
    assert "forbidden" in writer.reason
    api.allow("create", "events")
    writer.emit(EVICTED)
    assert api.wait_for(lambda: api.store.objects["events"], 30)


def test_a_note_is_cut_to_the_servers_limit(api: ApiServer, writer: EventWriter) -> None:
    writer.emit(EVICTED._replace(note="ä" * 2000))
    assert api.wait_for(lambda: api.sent("POST"), 30)
    assert len(api.sent("POST")[0].body["note"].encode()) == 1024


def test_with_a_nodes_credentials_events_are_in_the_core_group(
    api: ApiServer, writer: EventWriter, tmp_path: Path
) -> None:
    """The Node authorizer of 1.36 allows both groups; older ones are taken to allow no events.k8s.io."""
    api.minor = 35
    api.tokens[api.token] = "system:node:lab-node"
    writer.emit(EVICTED)
    assert api.wait_for(lambda: api.sent("POST"), 5)
    writer.stop()
    assert 'in API group "events.k8s.io"' in writer.reason

    now = [0.0]
    transport = connect(find_credentials(str(api.kubeconfig(tmp_path / "node"))), request_timeout_s=0.5)
    core = EventWriter(transport, "lab-node", core=True, clock=lambda: now[0])
    core.start()
    core.emit(EVICTED)
    assert api.wait_for(lambda: api.store.objects["events"], 5)
    now[0] = REFRESH_S + 1
    core.emit(EVICTED)
    core.stop()
    assert core.reason == ""
    [event] = api.store.objects["events"].values()
    assert event["involvedObject"] == {
        "kind": "Pod",
        "apiVersion": "v1",
        "namespace": "default",
        "name": "hog",
        "uid": "uid-1",
    }
    assert (event["message"], event["reportingComponent"]) == (EVICTED.note, CONTROLLER)
    assert event["series"]["count"] == 2
    assert {request.path for request in api.sent("POST")[1:]} == {"/api/v1/namespaces/default/events"}


@pytest.mark.parametrize("last", ["a", "-", ".", "-.-"])
def test_the_name_of_an_event_is_valid_wherever_a_long_pod_name_is_cut(
    api: ApiServer, writer: EventWriter, last: str
) -> None:
    name = "a" * (200 - len(last)) + last + "b" * 50
    writer.emit(EVICTED._replace(name=name))
    assert api.wait_for(lambda: api.store.objects["events"], 5)
    [(_, event_name)] = api.store.objects["events"]
    assert len(event_name) <= 253
    assert all(re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", part) for part in event_name.split(".")), event_name
    assert api.sent("POST")[0].body["regarding"]["name"] == name


def _storm(writer: EventWriter) -> None:
    """400 Events in four seconds."""
    for number in range(400):
        writer.emit(KubernetesEvent("Node", "", "lab-node", "u", EventReason.EVICTION_THRESHOLD_MET, f"note {number}"))
        threading.Event().wait(0.01)


def test_a_storm_of_events_is_a_burst_and_then_one_per_second(api: ApiServer, writer: EventWriter) -> None:
    began = time.monotonic()
    _storm(writer)
    assert (
        EVENT_BURST <= len(api.sent("POST", "/events")) <= EVENT_BURST + EVENTS_PER_S * (time.monotonic() - began) + 1
    )


def test_a_server_that_refuses_events_gets_fewer_and_fewer_requests(api: ApiServer, writer: EventWriter) -> None:
    api.forbid("create", "events")
    _storm(writer)
    assert 2 <= len(api.sent("POST", "/events")) <= 8
    assert writer.dropped > 100


def test_an_urgent_event_does_not_wait_for_the_spread_and_is_about_an_object_of_any_kind(
    api: ApiServer, tmp_path: Path
) -> None:
    transport = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))), request_timeout_s=5.0)
    writer = EventWriter(transport, "lab-node", spread_s=3600.0)
    writer.start()
    writer.emit(EVICTED)
    assert not api.wait_for(lambda: api.sent("POST"), 0.3), "spread over an hour"
    owner = EVICTED._replace(
        kind="ReplicaSet", api_version="apps/v1", reason=EventReason.OOM_KILL_OBSERVED, urgent=True
    )
    writer.emit(owner)
    assert api.wait_for(lambda: len(api.sent("POST")) == 2, 30)
    assert api.sent("POST")[1].body["regarding"]["apiVersion"] == "apps/v1"
    writer.stop()

"""EvictionRequests of the soft tier, with real processes: others evict, nobody does, or the pressure ends first."""

import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_kube import ApiServer, eviction, eviction_requests, pod
from tests.support.livenode import HARD, Kubepods, StartAgent, configuration, needs_cgroup_v1, until

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

HOG = str(uuid.uuid4())


@pytest.fixture
def api(kubepods: Kubepods) -> Iterator[ApiServer]:
    with ApiServer(node="lab-node", pods=[pod("hog", uid=HOG, owner=("ReplicaSet", "hog"))], linger_s=None) as server:
        server.eviction_requests = "requester"
        kubepods.start(HOG, qos="besteffort")
        yield server


def soft(**more: Any) -> dict[str, Any]:
    """The threshold of HARD as a soft one, and EvictionRequests with the shortest deadline."""
    return {
        **HARD,
        "evictionHard": {},
        "evictionSoft": HARD["evictionHard"],
        "evictionSoftGracePeriod": dict.fromkeys(HARD["evictionHard"], "200ms"),
        "protection": {"minimumAge": "0s"},
        "startup": {"freshSamples": 1},
        "evictionRequest": {"enabled": True, "deadline": "10s"},
        **more,
    }


def intent(api: ApiServer) -> str:
    found = eviction_requests.of_pod(api, HOG)
    return str(found["spec"]["intent"]) if found is not None else ""


def respond(api: ApiServer) -> None:
    """A responder ends the pod, as with the eviction subresource."""
    with api.store.changed:
        eviction.terminate(api, api.store.objects["pods"]["default", "hog"], {}, eviction=True)


def test_a_responder_evicts_the_pod_and_the_agent_sends_no_eviction(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent
) -> None:
    kubepods.eat(HOG, 400)
    agent = start_agent(**soft())
    assert api.wait_for(lambda: intent(api) == "Eviction", 60), agent.events()
    [line] = agent.wait_for_log("evicting")
    plan = api.sent("POST", "/evictionrequests")[0].body["metadata"]["annotations"]["nodeagent.io/plan"]
    assert (line["method"], line["id"]) == ("request", plan)
    agent.wait_for_log("eviction requested")
    respond(api)
    kubepods.kill(HOG)
    api.delete_pod("default", "hog")

    def reliefs() -> list[str]:
        return [each["message"] for each in agent.logged("note") if each["subject"] == "relief"]

    until(reliefs, "the measured relief")
    [line] = agent.wait_for_log("eviction evicted-by-others")
    assert (line["pod"], line["id"]) == ("default/hog", plan)
    time.sleep(11)
    assert not api.sent("POST", "/eviction")
    assert not api.sent("PATCH", f"/nodeagent-{HOG}"), "the pod is gone: nothing is withdrawn"
    reasons = [event.body["reason"] for event in api.sent("POST", "/events")]
    assert (reasons.count("Evicted"), reasons.count("PodEvicted")) == (1, 1)
    assert agent.stop() == 0


def test_if_nobody_evicts_the_pod_the_agent_does_and_withdraws_its_request(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent
) -> None:
    kubepods.eat(HOG, 400)
    agent = start_agent(**soft())
    assert api.wait_for(lambda: api.sent("POST", "/evictionrequests"), 60), agent.events()
    assert api.wait_for(lambda: api.sent("POST", "/eviction"), 60), agent.events()
    requested, evicted = api.sent("POST", "/evictionrequests"), api.sent("POST", "/eviction")
    assert len(requested) == 1
    assert evicted[0].at - requested[0].at >= 10.0
    assert api.wait_for(lambda: intent(api) == "Withdrawn", 30), agent.events()
    agent.wait_for_log("eviction request-withdrawn")
    assert agent.stop() == 0


def test_an_agent_that_is_killed_makes_no_second_request_and_goes_on_with_the_first(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent
) -> None:
    kubepods.eat(HOG, 400)
    first = start_agent(**soft())
    assert api.wait_for(lambda: intent(api) == "Eviction", 60), first.events()
    first.wait_for_log("eviction requested")
    first.kill()
    second = start_agent(**soft())
    assert api.wait_for(lambda: api.sent("POST", "/eviction"), 60), second.events()
    assert len(api.sent("POST", "/evictionrequests")) == 1
    assert api.wait_for(lambda: intent(api) == "Withdrawn", 30), second.events()
    assert second.stop() == 0


def test_when_the_pressure_ends_first_the_request_is_withdrawn_and_the_pod_stays(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent
) -> None:
    """Another pod ends by itself."""
    other = str(uuid.uuid4())
    api.add_pod(pod("other", uid=other, priority=1000))
    kubepods.start(other, qos="besteffort")
    kubepods.eat(other, 200)
    kubepods.eat(HOG, 150)
    agent = start_agent(**soft(evictionRequest={"enabled": True, "deadline": "10m"}))
    assert api.wait_for(lambda: intent(api) == "Eviction", 60), agent.events()
    kubepods.kill(other)
    api.delete_pod("default", "other")
    assert api.wait_for(lambda: intent(api) == "Withdrawn", 60), agent.events()
    notes = [each["message"] for each in agent.wait_for_log("note", subject="eviction requests")]
    assert any("the pressure ended before the pod was evicted" in each for each in notes), notes
    assert not api.sent("POST", "/eviction")
    assert agent.stop() == 0


def test_a_server_without_the_api_gets_evictions_and_a_note_tells_why(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent
) -> None:
    api.eviction_requests = ""
    kubepods.eat(HOG, 400)
    agent = start_agent(**soft())
    assert api.wait_for(lambda: api.sent("POST", "/eviction"), 60), agent.events()
    assert not api.sent("POST", "/evictionrequests")
    notes = [each["message"] for each in agent.wait_for_log("note", subject="eviction requests")]
    assert notes == [
        "the API server serves no evictionrequests in /apis/lifecycle.k8s.io/v1alpha1: the Eviction API is used"
    ]
    assert agent.stop() == 0


def test_a_reload_to_a_dry_run_withdraws_what_is_open(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, tmp_path: Path
) -> None:
    kubepods.eat(HOG, 400)
    settings = soft(evictionRequest={"enabled": True, "deadline": "10m"})
    agent = start_agent(**settings)
    assert api.wait_for(lambda: intent(api) == "Eviction", 60), agent.events()
    agent.wait_for_log("eviction requested")
    configuration(tmp_path, kubepods, **{**settings, "mode": "dry-run"})
    agent.process.send_signal(signal.SIGHUP)
    assert api.wait_for(lambda: intent(api) == "Withdrawn", 60), agent.events()
    agent.wait_for_log("eviction request-withdrawn")
    assert not api.sent("POST", "/eviction")
    assert agent.stop() == 0


def test_a_dry_run_names_the_method_and_writes_nothing(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent
) -> None:
    kubepods.eat(HOG, 400)
    agent = start_agent(**soft(mode="dry-run"))
    lines = agent.wait_for_log("would evict")
    assert lines[0]["method"] == "request", agent.events()
    time.sleep(2)
    assert not [each for each in api.requests if each.method in ("POST", "PATCH") and "eviction" in each.path]
    assert agent.stop() == 0

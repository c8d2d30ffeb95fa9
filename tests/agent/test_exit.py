"""A clean exit leaves on the Node what the configuration requests, and the next agent takes it over. A dry run leaves
nothing."""

import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_kube import ApiServer, Json, pod
from tests.support.livenode import Kubepods, StartAgent, configuration, needs_cgroup_v1, until

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

HOG = str(uuid.uuid4())
PATIENT: dict[str, Any] = {"evictionSoftGracePeriod": {"allocatableMemory.available": "10m"}}


@pytest.fixture
def api(kubepods: Kubepods) -> Iterator[ApiServer]:
    with ApiServer(node="lab-node", pods=[pod("hog", uid=HOG, owner=("ReplicaSet", "hog"))], linger_s=None) as server:
        yield server


def _condition(api: ApiServer, kind: str) -> Json:
    return api.condition(kind) or {"status": "", "reason": "", "message": ""}


def _tainted(api: ApiServer) -> bool:
    return "nodeagent.io/memory-pressure" in [taint["key"] for taint in api.node()["spec"].get("taints", ())]


def test_conditions_that_stay_report_the_stopped_agent_and_the_next_one_clears_them(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent
) -> None:
    kubepods.start(HOG, qos="besteffort")
    kubepods.eat(HOG, 400)
    agent = start_agent(**PATIENT, conditions={"onExit": "keep"})
    assert api.wait_for(lambda: _condition(api, "MemoryPressure")["status"] == "True" and _tainted(api), 30)
    since = _condition(api, "MemoryPressure")["lastTransitionTime"]
    assert agent.stop() == 0
    for kind in ("MemoryPressure", "NodeAgentMemoryPressure"):
        left = _condition(api, kind)
        assert (left["status"], left["reason"]) == ("True", "NodeAgentStopped")
        assert left["message"].startswith("nodeagent has stopped; before: ")
    assert _condition(api, "MemoryPressure")["lastTransitionTime"] == since, "that is no transition"
    assert _condition(api, "NodeAgentDiskPressure")["reason"] == "NodeAgentStopped"
    assert _condition(api, "DiskPressure")["reason"] == "KubeletHasNoDiskPressure", "what is not ours is left alone"
    assert _tainted(api)

    kubepods.kill(HOG)
    api.delete_pod("default", "hog")
    agent = start_agent(**PATIENT)
    assert api.wait_for(lambda: _condition(api, "MemoryPressure")["status"] == "False", 30), agent.events()
    assert api.wait_for(lambda: not _tainted(api), 30)
    until(lambda: _condition(api, "NodeAgentMemoryPressure")["status"] == "False", "our own type is kept up again")
    assert agent.stop() == 0
    assert api.condition("NodeAgentMemoryPressure") is None


def test_what_is_set_on_the_node_is_removed_after_an_outage_in_which_the_agent_became_a_dry_run(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, tmp_path: Path
) -> None:
    kubepods.start(HOG, qos="besteffort")
    kubepods.eat(HOG, 400)
    agent = start_agent(**PATIENT)
    assert api.wait_for(lambda: _condition(api, "MemoryPressure")["status"] == "True" and _tainted(api), 30)
    api.go_down()
    configuration(tmp_path, kubepods, **PATIENT, mode="dry-run")
    agent.process.send_signal(signal.SIGHUP)
    agent.wait_for_log("cleanup incomplete")
    assert _tainted(api)
    api.come_back()
    assert api.wait_for(lambda: _condition(api, "MemoryPressure")["status"] == "False", 60), agent.events()
    assert api.wait_for(lambda: not _tainted(api), 60)
    assert api.wait_for(lambda: api.condition("NodeAgentMemoryPressure") is None, 60)
    assert agent.stop() == 0

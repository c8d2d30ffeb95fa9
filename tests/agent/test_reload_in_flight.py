"""A reload, or the end of the agent, between the request of an eviction and its answer: the answer counts."""

import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_kube import ApiServer, Request, pod
from tests.support.livenode import HARD, Kubepods, StartAgent, configuration, needs_cgroup_v1, until

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

HOG = str(uuid.uuid4())
SETTINGS: dict[str, Any] = {**HARD, "escalation": {"brake": "freeze", "brakeDeadline": "10m"}}


@pytest.fixture
def api(kubepods: Kubepods) -> Iterator[ApiServer]:
    hog = pod("hog", uid=HOG, owner=("ReplicaSet", "hog"), labels={"app": "hog"})
    with ApiServer(node="lab-node", pods=[hog], linger_s=None) as server:
        yield server


class Held:
    """The request of an eviction, which is carried out once it is released."""

    def __init__(self, api: ApiServer) -> None:
        self.arrived, self._over = threading.Event(), threading.Event()
        api.at_request = self._hold

    def _hold(self, request: Request, done: bool) -> None:
        if not done and request.path.endswith("/eviction"):
            self.arrived.set()
            self._over.wait(60)

    def release(self) -> None:
        self._over.set()


@pytest.mark.parametrize("mode", ["enforce", "dry-run"])
def test_the_refusal_of_a_request_that_was_sent_before_a_reload_counts(
    kubepods: Kubepods, api: ApiServer, run: StartAgent, tmp_path: Path, mode: str
) -> None:
    api.set_pdb("one", {"app": "hog"}, allowed=0)
    kubepods.start(HOG, qos="burstable")
    agent = run(**SETTINGS)
    eviction = Held(api)
    kubepods.eat(HOG, 400, to_the_end=False)
    assert eviction.arrived.wait(60)
    configuration(tmp_path, kubepods, **SETTINGS, mode=mode, conditions={"heartbeat": "100s"})
    agent.process.send_signal(signal.SIGHUP)
    agent.wait_for_log("configuration changed", key="conditions.heartbeat")
    eviction.release()
    agent.wait_for_log("eviction blocked-by-pdb", uid=HOG)
    assert len(api.sent("POST", "/eviction")) == 1, "it is the answer to the first one"
    until(lambda: not kubepods.frozen(HOG, qos="burstable"), "the end of the brake")
    assert agent.stop() == 0


@pytest.mark.parametrize("mode", ["enforce", "dry-run"])
def test_a_pod_whose_eviction_is_accepted_after_a_reload_is_killed_only_if_the_agent_still_acts(
    kubepods: Kubepods, api: ApiServer, run: StartAgent, tmp_path: Path, mode: str
) -> None:
    settings = {**HARD, "escalation": {"hardKill": "cgroup"}}
    kubepods.start(HOG, qos="burstable")
    agent = run(**settings)
    eviction = Held(api)
    kubepods.eat(HOG, 400)
    assert eviction.arrived.wait(60)
    configuration(tmp_path, kubepods, **settings, mode=mode, conditions={"heartbeat": "100s"})
    agent.process.send_signal(signal.SIGHUP)
    agent.wait_for_log("configuration changed", key="conditions.heartbeat")
    eviction.release()
    agent.wait_for_log("eviction accepted", uid=HOG)
    if mode == "enforce":
        until(lambda: not kubepods.running(HOG), "its end")
    assert agent.stop() == 0
    assert kubepods.running(HOG) is (mode == "dry-run")


def test_the_answer_to_a_request_that_was_sent_before_the_end_of_the_agent_is_reported(
    kubepods: Kubepods, api: ApiServer, run: StartAgent
) -> None:
    kubepods.start(HOG, qos="burstable")
    agent = run(**HARD)
    eviction = Held(api)
    kubepods.eat(HOG, 400)
    assert eviction.arrived.wait(60)
    agent.process.send_signal(signal.SIGTERM)
    agent.wait_for_log("stopping")
    eviction.release()
    assert agent.process.wait(40) == 0
    assert len(agent.logged("eviction accepted")) == 1, agent.log_end()
    noted = [
        request.body["note"] for request in api.sent("POST", "/events") if request.body["regarding"]["name"] == "hog"
    ]
    assert noted, "the Event of the pod"

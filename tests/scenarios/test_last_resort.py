"""The API server is gone while a pod eats the node: with the last resort the pod is ended, without it it is not."""

import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_kube import ApiServer, Request, pod
from tests.support.livenode import HARD, Kubepods, StartAgent, configuration, needs_cgroup_v1, until

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

HOG, SPARED = str(uuid.uuid4()), str(uuid.uuid4())
LAST_RESORT = {"escalation": {"lastResort": "cgroupKill", "lastResortAfter": "2s"}}


@pytest.fixture
def api(kubepods: Kubepods) -> Iterator[ApiServer]:
    pods = [
        pod("hog", uid=HOG, owner=("ReplicaSet", "hog"), requests={"memory": "50Mi"}),
        pod("spared", uid=SPARED, namespace="kube-system", owner=("ReplicaSet", "spared")),
    ]
    with ApiServer(node="lab-node", pods=pods, linger_s=None) as server:
        yield server


def killed_events(api: ApiServer) -> list[Request]:
    return [r for r in api.sent("POST", "/namespaces/default/events") if r.body["reason"] == "Killed"]


def test_a_hog_is_killed_through_its_cgroup_and_the_event_is_sent_when_the_api_server_is_back(
    kubepods: Kubepods, api: ApiServer, run: StartAgent
) -> None:
    kubepods.start(HOG, qos="burstable")
    kubepods.start(SPARED, qos="besteffort")
    kubepods.eat(SPARED, 50)
    agent = run(**HARD, **LAST_RESORT)
    down_at = time.monotonic()
    api.go_down()
    kubepods.eat(HOG, 400)
    until(lambda: not kubepods.running(HOG), "the hog has ended")
    assert time.monotonic() - down_at >= 2.0
    assert kubepods.running(SPARED)
    until(lambda: agent.logged("eviction killed"), "the kill in the log")
    [line] = agent.logged("eviction killed")
    calm = ["False"]
    until(
        lambda: [c["status"] for c in agent.logged("condition changed") if c["type"] == "MemoryPressure"][-1:] == calm,
        "calm",
    )

    api.come_back()
    assert api.wait_for(lambda: killed_events(api), 60), agent.events()
    [request] = killed_events(api)
    assert request.body["regarding"]["uid"] == HOG
    assert request.body["metadata"]["annotations"]["nodeagent.io/plan"] == line["id"]
    assert not api.sent("POST", "/eviction"), "what an outage wanted is not sent after it"
    assert agent.stop() == 0


def test_a_configuration_that_is_loaded_during_the_outage_ends_neither_the_outage_nor_the_last_resort(
    kubepods: Kubepods, api: ApiServer, run: StartAgent, tmp_path: Path
) -> None:
    kubepods.start(HOG, qos="burstable")
    agent = run(**HARD, **LAST_RESORT)
    api.go_down()
    until(lambda: any("cannot connect" in str(line) for line in agent.events()), "the outage")
    configuration(tmp_path, kubepods, **HARD, **LAST_RESORT, conditions={"heartbeat": "100s"})
    agent.process.send_signal(signal.SIGHUP)
    agent.wait_for_log("configuration changed", key="conditions.heartbeat")
    kubepods.eat(HOG, 400)
    until(lambda: not kubepods.running(HOG), "the hog has ended")
    agent.wait_for_log("eviction killed")
    api.come_back()
    assert api.wait_for(lambda: killed_events(api), 60), agent.events()
    assert agent.stop() == 0


def test_a_pod_whose_kubelet_restarts_it_is_evicted_as_soon_as_a_request_is_possible(
    kubepods: Kubepods, api: ApiServer, run: StartAgent
) -> None:
    kubepods.start(HOG, qos="burstable")
    agent = run(**HARD, **LAST_RESORT)
    api.go_down()
    kubepods.eat(HOG, 400)
    until(lambda: agent.logged("eviction killed"), "the kill")
    kubepods.kill(HOG)
    kubepods.start(HOG, qos="burstable")  # the same pod with a new container, and as greedy as the last one
    kubepods.eat(HOG, 400)
    api.come_back()
    assert api.wait_for(lambda: api.sent("POST", "/eviction"), 60), agent.events()
    [request] = api.sent("POST", "/eviction")
    assert request.body["deleteOptions"]["preconditions"] == {"uid": HOG}
    assert len(agent.logged("eviction killed")) == 1
    assert agent.stop() == 0


def test_without_the_last_resort_no_pod_is_killed_however_long_the_outage(
    kubepods: Kubepods, api: ApiServer, run: StartAgent
) -> None:
    kubepods.start(HOG, qos="burstable")
    agent = run(**HARD, escalation={"lastResort": "none", "lastResortAfter": "1s"})
    api.go_down()
    kubepods.eat(HOG, 400)
    until(lambda: len(agent.logged("eviction unreachable")) >= 3, "three attempts, seconds apart")
    assert kubepods.running(HOG)
    assert not agent.logged("eviction killed")
    assert agent.stop() == 0


def test_the_rate_limit_of_kills_outlives_the_process(kubepods: Kubepods, api: ApiServer, run: StartAgent) -> None:
    again = str(uuid.uuid4())
    api.add_pod(pod("again", uid=again, owner=("ReplicaSet", "again"), requests={"memory": "50Mi"}))
    kubepods.start(HOG, qos="burstable")
    kubepods.start(again, qos="burstable")
    once = {**LAST_RESORT, "rateLimits": {"lastResort": {"burst": 1, "perHour": 1}}}
    first = run(**HARD, **once)
    api.go_down()
    kubepods.eat(HOG, 400)
    until(lambda: not kubepods.running(HOG), "the first hog has ended")
    until(lambda: first.logged("eviction killed"), "the kill in the log")
    first.process.kill()
    first.process.wait()
    api.come_back()
    second = run(**HARD, **once)
    until(lambda: any(e["state"] == "ok" for e in second.logged("signal changed")), "it sees the node")
    api.go_down()
    kubepods.eat(again, 400)
    until(lambda: any(e["code"] == "rate-limit-last-resort" for e in second.logged("not evicting")), "the empty bucket")
    assert kubepods.running(again)
    assert second.stop() == 0

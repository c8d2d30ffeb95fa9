"""The API server away, slow or silent: the node is watched on, and nothing that is no longer true is ever sent."""

import datetime as dt
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_kube import ApiServer, pod
from tests.support.livenode import HARD, Kubepods, Run, StartAgent, configuration, needs_cgroup_v1, until

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

HOG, OTHER = str(uuid.uuid4()), str(uuid.uuid4())


@pytest.fixture
def api(kubepods: Kubepods) -> Iterator[ApiServer]:
    pods = [pod("hog", uid=HOG, owner=("ReplicaSet", "hog"), requests={"memory": "50Mi"})]
    with ApiServer(node="lab-node", pods=pods, linger_s=None) as server:
        yield server


def calm(agent: Run) -> bool:
    """The last condition that the agent logged for memory is False."""
    reported = [line["status"] for line in agent.logged("condition changed") if line["type"] == "MemoryPressure"]
    return reported[-1:] == ["False"]


def logged_at(agent: Run, event: str) -> float:
    """When the agent first logged this, as a Unix time."""
    return dt.datetime.fromisoformat(agent.logged(event)[0]["timestamp"]).timestamp()


def condition(api: ApiServer, kind: str) -> str:
    found = api.condition(kind)
    return found["status"] if found else ""


def test_pressure_that_came_and_went_during_an_outage_is_never_sent(
    kubepods: Kubepods, api: ApiServer, run: StartAgent
) -> None:
    kubepods.start(HOG, qos="burstable")
    agent = run(**HARD)
    api.go_down()
    kubepods.eat(HOG, 400)
    until(lambda: agent.logged("eviction unreachable"), "an eviction that reaches no server")
    kubepods.kill(HOG)
    until(lambda: calm(agent), "recovery")
    seen = len(api.requests)
    api.come_back()
    assert api.wait_for(lambda: api.watched("/api/v1/pods", since=seen), 60)
    assert agent.stop() == 0
    after = [r for r in api.requests[seen:] if r.method != "GET"]
    assert not [r for r in after if r.path.endswith("/eviction")]
    written = [c for r in after if r.path.endswith("/status") for c in r.body["status"]["conditions"]]
    assert not [c for c in written if c.get("status") == "True"], written
    tainted = [r for r in after if r.path == "/api/v1/nodes/lab-node" and r.body.get("spec", {}).get("taints")]
    assert not tainted


def test_pressure_that_outlasts_an_outage_is_decided_on_a_fresh_sample(
    kubepods: Kubepods, api: ApiServer, run: StartAgent
) -> None:
    api.add_pod(pod("other", uid=OTHER, owner=("ReplicaSet", "other"), requests={"memory": "50Mi"}))
    kubepods.start(HOG, qos="burstable")
    kubepods.start(OTHER, qos="burstable")
    agent = run(**HARD)
    api.go_down()
    kubepods.eat(HOG, 400)
    until(lambda: agent.logged("eviction unreachable"), "an eviction that reaches no server")
    # During the outage the hog ends by itself and another pod replaces it.
    kubepods.kill(HOG)
    kubepods.eat(OTHER, 400)
    with api.store.changed:
        api.delete_pod("default", "hog")
    api.come_back()
    assert api.wait_for(lambda: api.sent("POST", "/other/eviction"), 60), agent.events()
    assert not api.sent("POST", "/hog/eviction")
    assert api.wait_for(lambda: condition(api, "NodeAgentMemoryPressure") == "True", 30)
    assert agent.stop() == 0


def test_a_slow_api_server_slows_nothing_down_but_its_own_answers(
    kubepods: Kubepods, api: ApiServer, run: StartAgent
) -> None:
    kubepods.start(HOG, qos="burstable")
    agent = run(**HARD, cluster={"requestTimeout": "5s", "evictionTimeout": "10s"})
    api.delay_s = 30.0
    kubepods.eat(HOG, 400)
    ate_at = time.time()
    until(lambda: agent.logged("evicting"), "the decision")
    decided_at = logged_at(agent, "evicting")
    assert decided_at - ate_at < 1.5, "decided although nothing is answered"
    # The loop goes on while the request is on its way: what happens on the node is seen before it is given up.
    kubepods.kill(HOG)
    until(lambda: calm(agent), "recovery")
    assert not [line for line in agent.events() if line["event"].startswith("eviction ")]
    until(lambda: agent.logged("eviction timed-out"), "the end of its deadline")
    assert logged_at(agent, "eviction timed-out") - decided_at > 9, "an eviction has more time than another request"
    api.delay_s = 0.0
    assert agent.stop() == 0


def test_a_silent_watch_stops_evictions_when_its_view_is_too_old_and_is_no_outage(
    kubepods: Kubepods, api: ApiServer, run: StartAgent
) -> None:
    """The double sends a bookmark a minute, so a view that may be 3 s old grows too old while all is well otherwise."""
    kubepods.start(HOG, qos="burstable")
    agent = run(**HARD, cluster={"podsMaxAge": "3s"}, escalation={"lastResort": "cgroupKill", "lastResortAfter": "1s"})
    threading.Event().wait(3.5)  # the view grows old
    kubepods.eat(HOG, 400)
    until(lambda: any(line["code"] == "pods-stale" for line in agent.logged("not evicting")), "why no pod is evicted")
    assert api.wait_for(lambda: condition(api, "NodeAgentMemoryPressure") == "True", 30), "the condition is published"
    assert not api.sent("POST", "/eviction")
    # The watch sees any change at once, and then the hog is evicted.
    api.modify_pod("default", "hog", lambda entry: entry["metadata"]["annotations"].update(touched="1"))
    assert api.wait_for(lambda: api.sent("POST", "/hog/eviction"), 30), agent.events()
    assert kubepods.running(HOG)
    assert agent.stop() == 0


def test_an_agent_that_starts_without_the_api_server_evicts_nothing_and_connects_later(
    kubepods: Kubepods, api: ApiServer, tmp_path: Path
) -> None:
    kubepods.start(HOG, qos="burstable")
    kubepods.eat(HOG, 400)
    config = configuration(tmp_path, kubepods, **HARD)
    kubeconfig = api.kubeconfig(tmp_path / "kubeconfig")
    api.go_down()
    agent = Run(
        "--config", str(config), "--kubeconfig", str(kubeconfig), "--node-name", "lab-node", log=tmp_path / "log"
    )
    try:
        until(
            lambda: any(line["code"] == "pods-never-synced" for line in agent.logged("not evicting")),
            "why no pod is evicted",
        )
        assert not agent.logged("evicting")
        api.come_back()
        assert api.wait_for(lambda: api.sent("POST", "/hog/eviction"), 60), agent.events()
        assert agent.stop() == 0
    finally:
        if agent.process.poll() is None:
            agent.process.kill()
            agent.process.wait()

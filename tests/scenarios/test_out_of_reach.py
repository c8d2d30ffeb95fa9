"""A real agent, a real hog and a cluster in trouble: no smaller pod is evicted instead of the hog."""

import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fake_kube import ApiServer, pod
from tests.support.livenode import HARD, Kubepods, StartAgent, needs_cgroup_v1

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

HOG, ONE, TWO = (str(uuid.uuid4()) for _ in range(3))
CLAIM = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]}
NETWORK = {"csi": {"driver": "ebs.csi.aws.com", "volumeHandle": "vol-1"}}


def hog(**more: Any) -> dict[str, Any]:
    return pod("hog", uid=HOG, owner=("ReplicaSet", "hog"), qos="Burstable", requests={"memory": "50Mi"}, **more)


@pytest.fixture
def api(kubepods: Kubepods) -> Iterator[ApiServer]:
    """With two innocents that together hold what is going to be missing, and less than they ask for."""
    innocents = [(ONE, "one"), (TWO, "two")]
    pods = [
        pod(name, uid=uid, owner=("ReplicaSet", name), qos="Burstable", requests={"memory": "100Mi"})
        for uid, name in innocents
    ]
    with ApiServer(node="lab-node", pods=pods, linger_s=None) as server:
        for uid, _ in innocents:
            kubepods.start(uid, qos="burstable")
            kubepods.eat(uid, 70)
        kubepods.start(HOG, qos="burstable")
        yield server


def evicted(api: ApiServer) -> set[str]:
    return {request.path.split("/")[-2] for request in api.sent("POST", "/eviction")}


@pytest.mark.parametrize("trouble", ["forbidden", "missing", "slow"])
@pytest.mark.parametrize("when", ["before the start", "later"])
def test_a_claim_that_cannot_be_looked_up_evicts_no_other_pod(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, trouble: str, when: str
) -> None:
    api.add_pod(hog(spec=CLAIM))
    if trouble != "missing":
        api.set_volume("data", NETWORK)
    if trouble == "forbidden":
        api.forbid("get", "persistentvolumeclaims")
    elif trouble == "slow":
        api.at_request = lambda request, done: (
            time.sleep(1.5) if not done and "persistentvolume" in request.path else None
        )
    if when == "before the start":
        kubepods.eat(HOG, 260)
    agent = start_agent(**HARD)
    if when == "later":
        assert api.wait_for(lambda: api.condition("NodeAgentMemoryPressure"), 30), agent.events()
        kubepods.eat(HOG, 260)
    assert api.wait_for(lambda: evicted(api), 30), agent.events()
    time.sleep(1.0)
    assert evicted(api) == {"hog"}
    assert agent.stop() == 0


def test_a_pod_that_a_silent_watch_misses_is_listed_and_evicted_and_no_pod_before_it(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent
) -> None:
    agent = start_agent(**HARD)
    assert api.wait_for(lambda: api.condition("NodeAgentMemoryPressure"), 30), agent.events()
    api.add_pod_untold(hog())
    kubepods.eat(HOG, 260)
    assert api.wait_for(lambda: evicted(api), 20), agent.events()
    assert evicted(api) == {"hog"}
    assert agent.stop() == 0

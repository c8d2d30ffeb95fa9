"""What the hard tier does when it is blocked: by a PDB, or by a pod that terminates slowly."""

import time
import uuid
from collections.abc import Iterator

import pytest

from tests.fake_kube import ApiServer, Json, pod
from tests.support.livenode import HARD, Kubepods, StartAgent, needs_cgroup_v1, until

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

HOG, NEXT = str(uuid.uuid4()), str(uuid.uuid4())


@pytest.fixture
def api(kubepods: Kubepods) -> Iterator[ApiServer]:
    pods = [
        pod("hog", uid=HOG, owner=("ReplicaSet", "hog"), labels={"app": "hog"}),
        pod("next", uid=NEXT, owner=("ReplicaSet", "next"), requests={"memory": "50Mi"}),
    ]
    with ApiServer(node="lab-node", pods=pods, linger_s=None) as server:
        yield server


def test_a_pod_that_its_pdb_blocks_is_marked_and_deleted_if_configured(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent
) -> None:
    api.set_pdb("hog", {"app": "hog"}, allowed=0)
    kubepods.start(HOG, qos="besteffort")
    kubepods.eat(HOG, 400)
    agent = start_agent(**HARD, escalation={"onBlocked": "delete"})
    assert api.wait_for(lambda: api.sent("DELETE"), 30), agent.events()
    [refused] = api.sent("POST", "/eviction")
    [mark] = api.sent("PATCH", "/pods/hog/status")
    [delete] = api.sent("DELETE")
    assert refused.at < mark.at < delete.at
    [condition] = mark.body["status"]["conditions"]
    assert (condition["type"], condition["status"]) == ("DisruptionTarget", "True")
    assert mark.body["metadata"] == {"uid": HOG}
    assert delete.path == "/api/v1/namespaces/default/pods/hog"
    assert delete.query == {}
    assert delete.body == {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "gracePeriodSeconds": 1,
        "preconditions": {"uid": HOG},
    }
    until(lambda: agent.logged("eviction accepted"), "the outcome")
    assert agent.stop() == 0
    assert len(api.sent("DELETE")) == 1


def test_otherwise_the_next_candidate_is_evicted(kubepods: Kubepods, api: ApiServer, start_agent: StartAgent) -> None:
    api.set_pdb("hog", {"app": "hog"}, allowed=0)
    kubepods.start(HOG, qos="besteffort")
    kubepods.start(NEXT, qos="burstable")
    kubepods.eat(HOG, 190)
    kubepods.eat(NEXT, 190)
    agent = start_agent(**HARD)
    assert api.wait_for(lambda: api.sent("POST", "/next/eviction"), 30), agent.events()
    assert api.sent("POST", "/hog/eviction")[0].at < api.sent("POST", "/next/eviction")[0].at
    assert agent.stop() == 0
    assert not api.sent("DELETE")


def _leaving(entry: Json) -> None:
    until_wall = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 600))
    entry["metadata"].update(deletionTimestamp=until_wall, deletionGracePeriodSeconds=600)


def test_a_terminating_pod_that_holds_the_deficit_gets_a_shorter_grace_period(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent
) -> None:
    api.modify_pod("default", "hog", _leaving)
    kubepods.start(HOG, qos="besteffort")
    kubepods.start(NEXT, qos="burstable")
    kubepods.eat(HOG, 400)
    agent = start_agent(**HARD)
    assert api.wait_for(lambda: api.sent("POST", "/eviction"), 30), agent.events()
    until(lambda: agent.logged("eviction accepted"), "the outcome")
    [request] = api.sent("POST", "/eviction")
    assert request.path.endswith("/hog/eviction")
    assert request.body["deleteOptions"]["gracePeriodSeconds"] == 1
    left = api.get_pod("default", "hog")
    assert left is not None
    assert left["metadata"]["deletionGracePeriodSeconds"] == 1
    assert api.wait_for(lambda: [r for r in api.sent("POST", "/events") if r.body["regarding"].get("uid") == HOG], 30)
    [reported] = [r.body for r in api.sent("POST", "/events") if r.body["regarding"].get("uid") == HOG]
    assert reported["reason"] == "EvictionGraceShortened", "another client had deleted it"
    assert agent.stop() == 0


def test_its_grace_is_left_alone_where_that_is_wanted(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent
) -> None:
    api.modify_pod("default", "hog", _leaving)
    kubepods.start(HOG, qos="besteffort")
    kubepods.eat(HOG, 400)
    agent = start_agent(**HARD, escalation={"shortenTerminating": False})
    until(lambda: agent.logged("not evicting"), "why no pod is evicted")
    assert agent.stop() == 0
    assert not api.sent("POST", "/eviction")

"""Least privilege: the agent lives its whole life with the rights of daemonset.yaml, is refused nothing, uses all."""

import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import yaml

from nodeagent.actuators.event_writer import REFRESH_S, EventReason, EventWriter, KubernetesEvent
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.transport import connect
from tests.fake_kube import ApiServer, pod
from tests.support.livenode import Kubepods, Run, StartAgent, needs_cgroup_v1, until
from tests.support.paths import REPOSITORY

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

DAEMONSET: Final = REPOSITORY / "daemonset.yaml"
FLEET: Final = REPOSITORY / "examples" / "fleet-leases.yaml"
HOG, BLOCKED = str(uuid.uuid4()), str(uuid.uuid4())


class Right(NamedTuple):
    """One verb on one resource; an empty namespace is all of them."""

    verb: str
    group: str
    resource: str
    namespace: str = ""


class Rbac:
    """RBAC as the API server evaluates it: whoever is not allowed is refused. Keeps what was asked for."""

    def __init__(self, rights: set[Right]) -> None:
        self.rights = rights
        self.used: set[Right] = set()
        self.refused: list[Right] = []

    def __call__(self, verb: str, group: str, resource: str, namespace: str) -> bool:
        matches = {
            right
            for right in self.rights
            if right[:3] == (verb, group, resource) and right.namespace in ("", namespace)
        }
        self.used |= matches
        if not matches:
            self.refused.append(Right(verb, group, resource, namespace))
        return bool(matches)


def rights_of(rules: list[dict[str, Any]], namespace: str = "") -> set[Right]:
    return {
        Right(verb, group, resource, namespace)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


EVICT_AS_NODE: Final = Right("impersonate-on:associated-node:create", "", "pods/eviction")
ONLY_CHECK: Final = Right("impersonate-on:associated-node:create", "authorization.k8s.io", "selfsubjectaccessreviews")
"""What `nodeagent check --rights` alone asks for."""
CONFIGZ: Final = Right("get", "", "nodes/proxy")
"""Requested only beside a kubelet whose files cannot be read (tests/unit/loop/test_kubelet_watch.py)."""


def manifest(*, optional: bool) -> set[Right]:
    """The rights in daemonset.yaml that an agent uses; with `optional` also those that stand there commented out, and a
    fleet's."""
    text = DAEMONSET.read_text(encoding="utf-8")
    if optional:
        text = re.sub(r"^( +)# (- apiGroups|  (?:resources|verbs):)", r"\1\2", text, flags=re.MULTILINE)
        text += "\n---\n" + FLEET.read_text(encoding="utf-8")
    found: set[Right] = set()
    for document in yaml.safe_load_all(text):
        if document["kind"] == "ClusterRole":
            found |= rights_of(document["rules"])
        elif document["kind"] == "Role":
            found |= rights_of(document["rules"], document["metadata"]["namespace"])
    return found - {ONLY_CHECK, CONFIGZ}


@pytest.fixture
def api(kubepods: Kubepods) -> Iterator[ApiServer]:
    pods = [
        pod("hog", uid=HOG, owner=("ReplicaSet", "hog"), requests={"memory": "50Mi"}, grace=3),
        pod("blocked", uid=BLOCKED, owner=("ReplicaSet", "blocked"), labels={"app": "blocked"}),
        pod("db", spec={"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]}),
    ]
    with ApiServer(node="lab-node", pods=pods, linger_s=None) as server:
        server.token_nodes[server.token] = "lab-node"
        server.set_pdb("blocked", {"app": "blocked"}, allowed=0)
        server.set_volume("data", {"local": {"path": "/mnt/disk1"}})
        yield server


def reports_no_pressure(api: ApiServer) -> bool:
    own = api.condition("NodeAgentMemoryPressure")
    return own is not None and own["status"] == "False"


def soft_episode(kubepods: Kubepods, api: ApiServer, agent: Run) -> None:
    """Calm, pressure, taint, an eviction, recovery, the taint removed."""
    assert api.wait_for(lambda: api.sent("GET", "/persistentvolumes/pv-data"), 60), agent.events()
    kubepods.eat(HOG, 400)
    assert api.wait_for(lambda: api.sent("POST", "/hog/eviction"), 60), agent.events()
    [asked] = api.sent("POST", "/hog/eviction")
    taints = api.sent("PATCH", "/nodes/lab-node")
    assert taints[0].at < asked.at, "the taint is added before the first eviction"
    kubepods.kill(HOG)
    api.delete_pod("default", "hog")
    assert api.wait_for(lambda: reports_no_pressure(api), 60), agent.events()
    assert api.wait_for(lambda: not api.node()["spec"].get("taints"), 60), agent.events()


def repeat_an_event(api: ApiServer, tmp_path: Path) -> None:
    """What repeats for half a minute is one Event that is written again."""
    now = [0.0]
    transport = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))))
    writer = EventWriter(transport, "lab-node", clock=lambda: now[0])
    writer.start()
    event = KubernetesEvent(
        "Node", "", "lab-node", "lab-node", EventReason.EVICTION_THRESHOLD_MET, "Attempting to reclaim memory"
    )
    before = len(api.sent("POST", "/events"))
    writer.emit(event)
    assert api.wait_for(lambda: len(api.sent("POST", "/events")) > before, 30)
    now[0] = REFRESH_S + 1
    writer.emit(event)
    assert api.wait_for(lambda: [r for r in api.requests if r.method == "PATCH" and "/events/" in r.path], 30)
    writer.stop()
    transport.close()


def test_a_run_with_the_defaults_needs_exactly_the_granted_rights(
    kubepods: Kubepods, api: ApiServer, run: StartAgent, tmp_path: Path
) -> None:
    rbac = api.rights = Rbac(manifest(optional=False))
    kubepods.start(HOG, qos="burstable")
    agent = run()
    soft_episode(kubepods, api, agent)
    assert agent.stop() == 0
    repeat_an_event(api, tmp_path)
    assert rbac.refused == []
    assert rbac.rights - rbac.used == set()


def test_a_run_with_everything_enabled_needs_exactly_the_optional_rights_too(
    kubepods: Kubepods, api: ApiServer, run: StartAgent, tmp_path: Path
) -> None:
    rbac = api.rights = Rbac(manifest(optional=True))
    kubepods.start(HOG, qos="burstable")
    kubepods.start(BLOCKED, qos="besteffort")
    agent = run(
        evictionHard={"allocatableMemory.available": "100Mi"},
        escalation={"onBlocked": "delete", "brake": "freeze", "hardKill": "cgroup"},
        fleet={"maxConcurrentEvictions": 1},
    )
    soft_episode(kubepods, api, agent)
    [((namespace, _), slot)] = api.store.objects["leases"].items()
    assert (namespace, slot["spec"]["holderIdentity"]) == ("nodeagent", "lab-node")

    kubepods.eat(BLOCKED, 520, to_the_end=False)
    assert api.wait_for(lambda: api.sent("DELETE", "/pods/blocked"), 60), agent.events()
    until(lambda: not kubepods.running(BLOCKED), "the end of the blocked pod")
    api.delete_pod("default", "blocked")
    assert api.wait_for(lambda: reports_no_pressure(api), 60), agent.events()
    assert agent.stop() == 0
    assert api.store.objects["leases"]["nodeagent", slot["metadata"]["name"]]["spec"]["holderIdentity"] == ""
    repeat_an_event(api, tmp_path)
    assert rbac.refused == []
    assert rbac.rights - rbac.used == set()


def test_a_missing_right_is_logged(kubepods: Kubepods, api: ApiServer, run: StartAgent) -> None:
    """The evaluator itself: without the right to evict the request is forbidden, and that is logged."""
    rbac = api.rights = Rbac(manifest(optional=False))
    kubepods.start(HOG, qos="burstable")
    agent = run()
    assert api.wait_for(lambda: api.sent("PATCH", "/nodes/lab-node/status"), 60), agent.events()
    rbac.rights.remove(EVICT_AS_NODE)
    kubepods.eat(HOG, 400)
    until(lambda: agent.logged("eviction forbidden"), "the refusal")
    assert agent.stop() == 0
    assert set(rbac.refused) >= {
        EVICT_AS_NODE._replace(namespace="default"),
        Right("create", "", "pods/eviction", "default"),
    }

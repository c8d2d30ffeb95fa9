"""daemonset.yaml on a real API server: its rights and admission policies hold a pod's token to its own node, and, with
an image (NODEAGENT_E2E_IMAGE, or one on the node that is called nodeagent), its DaemonSet becomes ready and answers.

Everything is installed under names of the run's own, so that an installation that is there is not touched, and is
removed again. Requests that try the rights have dryRun: if one is allowed, it changes nothing all the same. Two
evictions are real, of pods that the run has made.

With constrained impersonation (Kubernetes 1.36) the token acts as its node; without it, the rights of
examples/kubernetes-1.35.yaml are added. A claim about the other kind of server is reported as not tried.
"""

import os
from collections.abc import Iterator
from typing import Final, NamedTuple

import pytest

from nodeagent.config.schema import Config, FleetConfig, Mode
from nodeagent.kube import rights_review
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.rights_review import RequestMode
from nodeagent.kube.transport import Transport
from tests.e2e import daemonset
from tests.e2e import installation as setup
from tests.e2e.cluster import Cluster, Json, server_minor, sleeping_pod
from tests.e2e.installation import PATHS, Agent, Installation, Places, Try
from tests.e2e.this_node import at_work, configured_sampling, marks, wipe

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

DAEMONSET_S: Final = 240.0
"""For a pod of the DaemonSet, with the pull of its image and its start on a slow node."""
PODS: Final = "/api/v1/pods"
OWN_PODS: Final = f"{PODS}?fieldSelector=spec.nodeName%3DNODE"
OTHERS_PODS: Final = f"{PODS}?fieldSelector=spec.nodeName%3DOTHER"
WATCH: Final = "watch=1&timeoutSeconds=1"
STATUS: Final = "/api/v1/nodes/NODE/status?dryRun=All"
NODE: Final = "/api/v1/nodes/NODE?dryRun=All"
OWN_TAINT: Final = {"key": "nodeagent.io/pid-pressure", "effect": "NoSchedule"}
CONDITION: Final = {"status": {"conditions": [{"type": "NodeAgentPIDPressure", "status": "False"}]}}
SELECTED: Final = "can only list/watch pods with spec.nodeName field selector"
ITS_OWN: Final = "can only evict pods with spec.nodeName set to itself"


def eviction(namespace: str, name: str, **options: object) -> Try:
    wanted = {"gracePeriodSeconds": 1, "preconditions": {"uid": "UID"}, "dryRun": ["All"], **options}
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name},
        "deleteOptions": {key: value for key, value in wanted.items() if value is not None},
    }
    return Try("POST", f"/api/v1/namespaces/{namespace}/pods/{name}/eviction", body)


def event(namespace: str, regarding: Json, *, instance: str = "NODE", reason: str = "Evicted") -> Try:
    body = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": "nodeagent-e2e"},
        "eventTime": "2026-11-20T23:17:01.000000Z",
        "reportingController": "nodeagent.io/nodeagent",
        "reportingInstance": instance,
        "action": "Evicting",
        "reason": reason,
        "type": "Normal",
        "regarding": {"apiVersion": "v1", **regarding},
    }
    return Try("POST", f"/apis/events.k8s.io/v1/namespaces/{namespace}/events?dryRun=All", body)


def lease(holder: str, *, name: str = "nodeagent-evictions-e2e-0", lasts_s: int = 60) -> Try:
    body = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name},
        "spec": {"holderIdentity": holder, "leaseDurationSeconds": lasts_s},
    }
    return Try("POST", "/apis/coordination.k8s.io/v1/namespaces/{}/leases?dryRun=All", body)


OWNER: Final = {
    "apiVersion": "apps/v1",
    "kind": "ReplicaSet",
    "namespace": "TENANT",
    "name": "tenant",
    "uid": "UID",
}

READ: Final = {
    "list the pods of the node": Try("GET", f"{OWN_PODS}&limit=1"),
    "watch the pods of the node": Try("GET", f"{OWN_PODS}&{WATCH}"),
    "read its own Node": Try("GET", "/api/v1/nodes/NODE"),
    "watch its own Node": Try("GET", f"/api/v1/nodes?fieldSelector=metadata.name%3DNODE&{WATCH}"),
    "evict a pod of the node": eviction("TENANT", "tenant"),
}
"""As the node with constrained impersonation, as the account without it."""
ALLOWED: Final = {
    "budgets": Try("GET", "/apis/policy/v1/namespaces/{}/poddisruptionbudgets?limit=1"),
    "a condition of its own": Try("PATCH", STATUS, CONDITION),
    "a pressure condition": Try(
        "PATCH", STATUS, {"status": {"conditions": [{"type": "PIDPressure", "status": "True", "reason": "Test"}]}}
    ),
    "a taint of its own": Try("PATCH", NODE, {"spec": {"taints": ["ALL", OWN_TAINT]}}),
    "an Event about a pod": event("TENANT", {"kind": "Pod", "namespace": "TENANT", "name": "tenant", "uid": "UID"}),
    "an Event about the owner of an evicted pod": event("TENANT", OWNER, reason="PodEvicted"),
    "an Event about its node": event("default", {"kind": "Node", "name": "NODE", "uid": "NODE"}),
    "a Lease": lease("NODE"),
}
REFUSED: Final = {
    "a label": Try("PATCH", NODE, {"metadata": {"labels": {"nodeagent.io/e2e": "x"}}}),
    "a label by the status": Try("PATCH", STATUS, {"metadata": {"labels": {"nodeagent.io/e2e": "x"}}}),
    "an annotation": Try("PATCH", NODE, {"metadata": {"annotations": {"nodeagent.io/e2e": "x"}}}),
    "a cordon": Try("PATCH", NODE, {"spec": {"unschedulable": True}}),
    "a foreign taint": Try("PATCH", NODE, {"spec": {"taints": ["ALL", {"key": "e2e/x", "effect": "NoSchedule"}]}}),
    "an own taint that drives pods out": Try(
        "PATCH", NODE, {"spec": {"taints": ["ALL", OWN_TAINT | {"effect": "NoExecute"}]}}
    ),
    "a foreign condition": Try("PATCH", STATUS, {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}),
    "a capacity": Try("PATCH", STATUS, {"status": {"capacity": {"nodeagent.io/e2e": "1"}}}),
    "the status of another node": Try("PATCH", STATUS.replace("NODE", "OTHER"), CONDITION),
    "a taint of another node": Try("PATCH", NODE.replace("NODE", "OTHER"), {"spec": {"taints": [OWN_TAINT]}}),
    "an Event about another node": event("default", {"kind": "Node", "name": "OTHER"}),
    "an Event in another one's name": event(
        "TENANT", {"kind": "Pod", "namespace": "TENANT", "name": "tenant"}, instance="OTHER"
    ),
    "an Event about an owner in another namespace": event("default", OWNER, reason="PodEvicted"),
    "an Event about an object that owns no pod": event("TENANT", OWNER | {"kind": "Deployment"}, reason="PodEvicted"),
    "a Lease for another node": lease("OTHER"),
    "another Lease": lease("NODE", name="nodeagent-e2e"),
    "a Lease for ever": lease("NODE", lasts_s=1 << 30),
    "secrets": Try("GET", "/api/v1/namespaces/{}/secrets?limit=1"),
    "a pod's deletion": Try("DELETE", "/api/v1/namespaces/{}/pods/bearer?dryRun=All"),
}
FORMS: Final = {
    "an eviction without a grace period": eviction("TENANT", "tenant", gracePeriodSeconds=None),
    "an eviction that leaves no second": eviction("TENANT", "tenant", gracePeriodSeconds=0),
    "an eviction of whichever pod has the name": eviction("TENANT", "tenant", preconditions=None),
    "an eviction from its own namespace": eviction("{}", "bearer"),
}
"""Evictions that are refused whichever identity sends them."""
AS_ITS_NODE: Final = {
    "list all pods": Try("GET", f"{PODS}?limit=1").by("NODE", SELECTED),
    "list the pods of another node": Try("GET", f"{OTHERS_PODS}&limit=1").by("NODE", SELECTED),
    "list the pods of a namespace": Try("GET", "/api/v1/namespaces/TENANT/pods?limit=1").by("NODE", SELECTED),
    "watch all pods": Try("GET", f"{PODS}?{WATCH}").by("NODE", SELECTED),
    "watch the pods of another node": Try("GET", f"{OTHERS_PODS}&{WATCH}").by("NODE", SELECTED),
    "evict a pod of another node": eviction("TENANT", "neighbour").by("NODE", ITS_OWN),
    "read another Node": Try("GET", "/api/v1/nodes/OTHER").by("NODE", "only its own Node object"),
    "list all Nodes": Try("GET", "/api/v1/nodes?limit=1").by("NODE", "only its own Node object"),
    "write its own status": Try("PATCH", STATUS, CONDITION).by("NODE", "impersonate-on:associated-node:patch"),
    "write the status of another node": Try("PATCH", STATUS.replace("NODE", "OTHER"), CONDITION).by("NODE"),
    "write a taint": Try("PATCH", NODE, {"spec": {"taints": ["ALL", OWN_TAINT]}}).by("NODE"),
    "list budgets": ALLOWED["budgets"].by("NODE", "impersonate-on:associated-node:list"),
    "list secrets": REFUSED["secrets"].by("NODE", "impersonate-on:associated-node:list"),
    "read a claim that no pod of the node mounts": Try(
        "GET", "/api/v1/namespaces/TENANT/persistentvolumeclaims/none"
    ).by("NODE", "no relationship found between node"),
    "delete a pod of the node": Try("DELETE", "/api/v1/namespaces/TENANT/pods/tenant?dryRun=All").by("NODE"),
    **{what: attempt.by("NODE") for what, attempt in FORMS.items()},
}
AS_ANOTHER_NODE: Final = {
    what: attempt.by("OTHER", "impersonate")
    for what, attempt in {
        "list all pods": Try("GET", f"{PODS}?limit=1"),
        "list its pods": Try("GET", f"{OTHERS_PODS}&limit=1"),
        "watch its pods": Try("GET", f"{OTHERS_PODS}&{WATCH}"),
        "list the pods of the token's node": READ["list the pods of the node"],
        "evict its pod": eviction("TENANT", "neighbour"),
        "evict a pod of the token's node": READ["evict a pod of the node"],
        "read its Node": Try("GET", "/api/v1/nodes/OTHER"),
        "write its status": REFUSED["the status of another node"],
        "write its taint": REFUSED["a taint of another node"],
        "list secrets": REFUSED["secrets"],
    }.items()
}


# --- the installation ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installation(cluster: Cluster) -> Iterator[Installation]:
    """Rights and policies; the DaemonSet is made by the test that needs it."""
    if server_minor(cluster) < 30:
        pytest.skip("the admission policies need Kubernetes 1.30")
    made = Installation(cluster)
    try:
        for document in made.documents:
            if document["kind"] not in ("ConfigMap", "DaemonSet"):
                made.make(document)
        yield made
    finally:
        made.remove()


@pytest.fixture(scope="module")
def places(cluster: Cluster) -> Iterator[Places]:
    """Pods of another user in a namespace of their own: `tenant` on the node, `neighbour` on another one. They need not
    run."""
    name = f"{cluster.namespace}-tenant"
    pods = f"/api/v1/namespaces/{name}/pods"
    try:
        cluster.make_namespace(name)
        with setup.another_node(cluster) as other:
            try:
                tenant = cluster.make_pod(sleeping_pod("tenant", cluster.node_name), namespace=name)
                cluster.make_pod(sleeping_pod("neighbour", other), namespace=name)
                uid = tenant["metadata"]["uid"]
                yield Places(cluster.namespace, name, uid, cluster.node_name, other)
            finally:
                # Without a kubelet nothing else removes the second one.
                cluster.delete_all([f"{pods}/{pod}" for pod in ("tenant", "neighbour")], grace_s=0)
    finally:
        cluster.delete(f"/api/v1/namespaces/{name}")


class Account(NamedTuple):
    """The agent's account with the rights that this API server needs."""

    transport: Transport
    """With the token of a pod on the node."""
    constrained: bool
    """Whether the API server has constrained impersonation."""


@pytest.fixture(scope="module")
def account(cluster: Cluster, installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Account:
    assert installation.made, "the account is there"
    transport = setup.token_of_a_pod(cluster, tmp_path_factory.mktemp("agent"))
    constrained = setup.has_constrained_impersonation(transport, cluster.node_name)
    if not constrained:
        for document in installation.read(setup.DIRECT):
            installation.make(document)
    return Account(transport, constrained)


@pytest.fixture(scope="module")
def agent(cluster: Cluster, account: Account, places: Places) -> Agent:
    """The API server with the account's token, when it has taken in the roles and the policies."""
    constrained = account.constrained
    made = Agent(cluster, account.transport, places, constrained)
    # A new role takes a moment to be known, a new policy to be enforced. What is allowed before that proves nothing.
    first = READ["list the pods of the node"].by("NODE" if constrained else "")
    assert cluster.until(lambda: made.ask(first) is None, timeout_s=60), made.ask(first)
    assert cluster.until(lambda: made.is_refused(REFUSED["a label"]), timeout_s=60), "by the policy"
    return made


@pytest.fixture
def constrained(agent: Agent) -> Agent:
    """Skips on an API server without constrained impersonation."""
    if not agent.constrained:
        version = server_minor(agent.cluster)
        pytest.skip(f"this API server (1.{version}) has no constrained impersonation: 1.36 has, unless its gate is off")
    return agent


@pytest.fixture
def unconstrained(agent: Agent) -> Agent:
    """Skips on an API server with constrained impersonation."""
    if agent.constrained:
        version = server_minor(agent.cluster)
        pytest.skip(f"this API server (1.{version}) has constrained impersonation; the claim is about one without it")
    return agent


def assert_allowed(agent: Agent, attempt: Try) -> None:
    # One of several API servers may know of the role later than the one that was asked first; also below.
    assert agent.cluster.until(lambda: agent.ask(attempt) is None, timeout_s=30), agent.ask(attempt)


def assert_refused(agent: Agent, attempt: Try) -> None:
    assert agent.cluster.until(lambda: agent.is_refused(attempt), timeout_s=60), agent.ask(attempt)


# --- whatever the API server -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ALLOWED)
def test_a_pods_token_may_do_on_its_own_node(agent: Agent, what: str) -> None:
    assert_allowed(agent, ALLOWED[what])


@pytest.mark.parametrize("what", [*REFUSED, *FORMS])
def test_a_pods_token_may_not_do(agent: Agent, what: str) -> None:
    assert_refused(agent, (REFUSED | FORMS)[what])


@pytest.mark.parametrize("what", AS_ANOTHER_NODE)
def test_as_another_node_a_pods_token_may_not(agent: Agent, what: str) -> None:
    assert_refused(agent, AS_ANOTHER_NODE[what])


def test_the_report_of_the_rights_finds_none_missing(agent: Agent) -> None:
    """`check --rights` with this token. A cluster may give every account more than the installation does."""
    fleet = FleetConfig(max_concurrent_evictions=1, lease_namespace=agent.places.namespace)
    config = Config(mode=Mode.ENFORCE, node_name=agent.places.node, fleet=fleet)
    found = rights_review.review(agent.transport, config, host_name="")
    assert (found.cannot_act, found.missing, found.unknown) == ("", (), ())
    wanted = RequestMode.IMPERSONATION if agent.constrained else RequestMode.ACCOUNT
    assert found.mode is wanted
    through = {each.right.name: each.through for each in found.rights}
    assert f"{agent.places.namespace}-nodeagent" in through["patch nodes"], through
    of_pods = {"*", "pods", "pods/eviction", "pods/status", "secrets"}
    assert not [rule for rule in found.beyond if rule.resource in of_pods], found.beyond


# --- with constrained impersonation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", READ)
def test_as_its_node_a_pods_token_may(constrained: Agent, what: str) -> None:
    assert_allowed(constrained, READ[what].by("NODE"))


@pytest.mark.parametrize("what", AS_ITS_NODE)
def test_as_its_node_a_pods_token_may_not(constrained: Agent, what: str) -> None:
    assert_refused(constrained, AS_ITS_NODE[what])


@pytest.mark.parametrize("what", [*READ, "list all pods", "watch all pods", "evict a pod of another node"])
def test_as_itself_a_pods_token_may_not(constrained: Agent, what: str) -> None:
    assert_refused(constrained, (AS_ITS_NODE | READ)[what].by("", f'User "system:serviceaccount:{{}}:{setup.ACCOUNT}"'))


def test_as_its_node_a_pods_token_evicts_no_pod_of_kube_system(constrained: Agent) -> None:
    selector = f"fieldSelector=spec.nodeName%3D{constrained.places.node}"
    pods = constrained.cluster.get(f"/api/v1/namespaces/kube-system/pods?{selector}&limit=1")["items"]
    if not pods:
        pytest.skip("the node has no pod of kube-system")
    metadata = pods[0]["metadata"]
    attempt = eviction("kube-system", metadata["name"], preconditions={"uid": metadata["uid"]})
    assert_refused(constrained, attempt.by("NODE", "may evict no pods of kube-system"))


def test_no_pod_of_another_node_can_be_listed_or_evicted(constrained: Agent) -> None:
    """All pods of other nodes, fifty at most, by the three identities that the token can try."""
    cluster, node = constrained.cluster, constrained.places.node
    pods = cluster.get(f"{PODS}?fieldSelector=spec.nodeName%21%3D{node}&limit=50")["items"]
    there = [pod for pod in pods if pod["spec"].get("nodeName") not in (None, "", node)]
    assert "neighbour" in {pod["metadata"]["name"] for pod in there} or len(pods) == 50
    evicted = []
    for pod in there:
        namespace, name, uid = (pod["metadata"][field] for field in ("namespace", "name", "uid"))
        attempts = [eviction(namespace, name, preconditions={"uid": uid}).by(user) for user in ("", "NODE", "OTHER")]
        evicted += [(namespace, name, each.user) for each in attempts if constrained.ask(each) is None]
    lists = [Try("GET", path).by(user) for path in (PODS, OTHERS_PODS) for user in ("", "NODE", "OTHER")]
    assert (evicted, [each for each in lists if not constrained.is_refused(each)]) == ([], [])


def test_as_its_node_a_pods_token_really_evicts_its_own_pods_only(constrained: Agent) -> None:
    """Without dryRun: the pod of the node terminates, that of another node stays as it is."""
    cluster, places = constrained.cluster, constrained.places
    path = f"/api/v1/namespaces/{places.tenant_namespace}/pods"
    made = {}
    try:
        for name, node in (("leaves", places.node), ("stays", places.other)):
            pod = cluster.make_pod(sleeping_pod(name, node), namespace=places.tenant_namespace)
            made[name] = pod["metadata"]["uid"]

        def evict(name: str) -> Try:
            return eviction("TENANT", name, preconditions={"uid": made[name]}, dryRun=None)

        # NodeRestriction answers 404 until its own copy of the pods has the new ones.
        assert_allowed(constrained, evict("leaves").by("NODE"))
        assert_refused(constrained, evict("stays").by("NODE", ITS_OWN))
        # A pod without a running container may be removed at once.
        left = {pod["metadata"]["name"]: pod["metadata"] for pod in cluster.get(path)["items"]}
        assert "deletionTimestamp" in left.get("leaves", {"deletionTimestamp": ""})
        assert "deletionTimestamp" not in left["stays"]
    finally:
        cluster.delete_all([f"{path}/{name}" for name in made], grace_s=0)


# --- without it ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", READ)
def test_without_constrained_impersonation_a_pods_token_may(unconstrained: Agent, what: str) -> None:
    assert_allowed(unconstrained, READ[what])


@pytest.mark.parametrize("what", READ)
def test_without_constrained_impersonation_a_pods_token_may_not_act_as_its_node(
    unconstrained: Agent, what: str
) -> None:
    assert_refused(unconstrained, READ[what].by("NODE", 'cannot impersonate resource "users"'))


def test_without_constrained_impersonation_no_pod_of_kube_system_can_be_evicted(unconstrained: Agent) -> None:
    assert_refused(unconstrained, eviction("kube-system", "nodeagent-e2e-none"))


# --- the DaemonSet ---------------------------------------------------------------------------------------------------


def image(cluster: Cluster) -> str:
    """The image to install. Skips when there is none."""
    if named := os.environ.get("NODEAGENT_E2E_IMAGE"):
        return named
    names = [name for each in cluster.node()["status"].get("images", ()) for name in each.get("names") or ()]
    here = [name for name in names if name.rpartition("/")[2].startswith("nodeagent:")]
    if not here:
        pytest.skip("NODEAGENT_E2E_IMAGE names no image, and the node has none that is called nodeagent")
    return str(here[0])


def test_the_daemonset_becomes_ready_answers_and_publishes_its_conditions(
    cluster: Cluster, installation: Installation, account: Account
) -> None:
    assert account, "it has its rights"
    named = image(cluster)
    if reason := at_work(cluster):
        pytest.skip(reason)
    path = f"{PATHS['DaemonSet'].format(cluster.namespace)}/nodeagent"

    def agent() -> Json:
        pods = cluster.get(cluster.pod_path())["items"]
        return next((p for p in pods if p["metadata"].get("labels", {}).get("app.kubernetes.io/name")), {})

    def ready() -> bool:
        conditions = agent().get("status", {}).get("conditions", ())
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def blocked() -> str:
        events = cluster.get(f"/api/v1/namespaces/{cluster.namespace}/events")["items"]
        return daemonset.why_not_started(agent(), events)

    unreachable = ""

    def page(name: str) -> str:
        nonlocal unreachable
        path = f"{cluster.pod_path(agent()['metadata']['name'])}:9655/proxy/{name}"
        try:
            body: bytes = cluster.transport.request("GET", path, accept="text/plain").body
        except ApiError as error:  # a proxy in between may close the connection; the caller requests the page again
            unreachable = error.message
            return ""
        unreachable = ""
        return body.decode()

    def has_page(name: str, text: str = "") -> bool:
        return cluster.until(lambda: text in page(name) and not unreachable, timeout_s=60)

    try:
        node, sampling, others = cluster.node(), configured_sampling(), cluster.other_namespaces()
        for document in installation.documents:
            if document["kind"] in ("ConfigMap", "DaemonSet"):
                installation.make(daemonset.on_one_node(document, node, sampling, named, others))
        cluster.until(lambda: ready() or blocked(), timeout_s=DAEMONSET_S)
        if not ready() and (why := blocked()):
            pytest.skip(f"the agent's pod does not start on {cluster.node_name}: {why}")
        assert ready(), agent().get("status")
        for kind in ("NodeAgentMemoryPressure", "NodeAgentDiskPressure", "NodeAgentPIDPressure"):
            assert cluster.until(lambda kind=kind: cluster.condition(kind), timeout_s=60)  # type: ignore[misc]
        answers = has_page("readyz")
        # Ready needs the pods; the watch of the node may be a moment later.
        for watch in ("pods", "node") if answers else ():
            assert has_page("metrics", f'nodeagent_api_relists_total{{watch="{watch}"}}'), watch
        cluster.delete(path)
        assert cluster.until(lambda: not marks(cluster.node()), timeout_s=90), "a clean end takes everything back"
    finally:
        try:
            cluster.delete(path)
            cluster.until(lambda: not agent(), timeout_s=90)
        finally:
            wipe(cluster)
    if not answers:
        pytest.skip(f"all but its pages: the API server does not reach the pod's port: {unreachable}")

"""daemonset.yaml on a real API server: its rights and admission policies hold a pod's token to its own node, and, with
an image (NODEAGENT_E2E_IMAGE, or one on the node that is called nodeagent), its DaemonSet becomes ready and speaks.

Everything is installed under names of the run's own, so that an installation that is there is not touched, and is taken
away again. What tries the rights is asked for with dryRun: should it be allowed, it changes nothing all the same.
"""

import json
import os
from collections.abc import Iterator
from typing import Final, NamedTuple

import pytest
import yaml

from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.node_identity import Identity, confirm_identity
from nodeagent.kube.transport import JSON, STRATEGIC_MERGE, Transport, connect
from tests.e2e.cluster import Cluster, Json, has_service_account, with_token
from tests.e2e.this_node import at_work, marks, wipe
from tests.support.paths import REPOSITORY

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

DAEMONSET: Final = REPOSITORY / "daemonset.yaml"
DIRECT: Final = REPOSITORY / "examples" / "kubernetes-1.35.yaml"
"""The rights for API servers without constrained impersonation."""
LEASES: Final = DAEMONSET.parent / "examples" / "fleet-leases.yaml"
ACCOUNT: Final = "nodeagent"
NODE_CLAIM: Final = "authentication.kubernetes.io/node-name"
PATHS: Final = {
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "DaemonSet": "/apis/apps/v1/namespaces/{}/daemonsets",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "ValidatingAdmissionPolicy": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
}


class Try(NamedTuple):
    """A request of the agent's token. `{}` is the run's namespace, which is the agent's own, `TENANT` that of the pod
    `tenant`, `UID` that pod's, `NODE` the node's name, `SYSTEM` a pod of kube-system on it; in the body only as a whole
    value."""

    method: str
    path: str
    body: Json | None = None


STATUS: Final = "/api/v1/nodes/NODE/status?dryRun=All"
NODE: Final = "/api/v1/nodes/NODE?dryRun=All"
OWN_TAINT: Final = {"key": "nodeagent.io/pid-pressure", "effect": "NoSchedule"}


def eviction(namespace: str, name: str, **options: object) -> Try:
    wanted = {"gracePeriodSeconds": 1, "preconditions": {"uid": "UID"}, "dryRun": ["All"], **options}
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name},
        "deleteOptions": {key: value for key, value in wanted.items() if value is not None},
    }
    return Try("POST", f"/api/v1/namespaces/{namespace}/pods/{name}/eviction", body)


def event(namespace: str, regarding: Json, *, instance: str = "NODE") -> Try:
    body = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": "nodeagent-e2e"},
        "eventTime": "2026-11-20T23:17:01.000000Z",
        "reportingController": "nodeagent.io/nodeagent",
        "reportingInstance": instance,
        "action": "Evicting",
        "reason": "Evicted",
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


ALLOWED: Final = {
    "pods of the node": Try("GET", "/api/v1/pods?fieldSelector=spec.nodeName%3DNODE&limit=1"),
    "its own object": Try("GET", "/api/v1/nodes/NODE"),
    "budgets": Try("GET", "/apis/policy/v1/namespaces/{}/poddisruptionbudgets?limit=1"),
    "a condition of its own": Try(
        "PATCH", STATUS, {"status": {"conditions": [{"type": "NodeAgentPIDPressure", "status": "False"}]}}
    ),
    "a pressure condition": Try(
        "PATCH", STATUS, {"status": {"conditions": [{"type": "PIDPressure", "status": "True", "reason": "Test"}]}}
    ),
    "a taint of its own": Try("PATCH", NODE, {"spec": {"taints": ["ALL", OWN_TAINT]}}),
    "an eviction": eviction("TENANT", "tenant"),
    "an Event about a pod": event("TENANT", {"kind": "Pod", "namespace": "TENANT", "name": "tenant", "uid": "UID"}),
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
    "another node": Try(
        "PATCH", STATUS.replace("NODE", "OTHER"), {"status": {"conditions": [{"type": "NodeAgentPIDPressure"}]}}
    ),
    "an eviction without a grace period": eviction("TENANT", "tenant", gracePeriodSeconds=None),
    "an eviction that leaves no second": eviction("TENANT", "tenant", gracePeriodSeconds=0),
    "an eviction of whoever has the name": eviction("TENANT", "tenant", preconditions=None),
    "an eviction from its own namespace": eviction("{}", "bearer"),
    "an eviction from kube-system": eviction("kube-system", "SYSTEM"),
    "an Event about another node": event("default", {"kind": "Node", "name": "nodeagent-e2e-none"}),
    "an Event in another one's name": event(
        "TENANT", {"kind": "Pod", "namespace": "TENANT", "name": "tenant"}, instance="nodeagent-e2e-none"
    ),
    "a Lease for another node": lease("nodeagent-e2e-none"),
    "another Lease": lease("NODE", name="nodeagent-e2e"),
    "a Lease for ever": lease("NODE", lasts_s=1 << 30),
    "secrets": Try("GET", "/api/v1/namespaces/{}/secrets?limit=1"),
    "a pod's deletion": Try("DELETE", "/api/v1/namespaces/{}/pods/bearer?dryRun=All"),
}


def minor_of(cluster: Cluster) -> int:
    return int(cluster.get("/version")["minor"].rstrip("+"))


class Installation:
    """The documents of daemonset.yaml, and what a fleet needs beside it, under the run's names."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.made: list[str] = []
        older = (DIRECT,) if minor_of(cluster) < 36 else ()
        text = "---\n".join(file.read_text(encoding="utf-8") for file in (DAEMONSET, LEASES, *older))
        user = f"system:serviceaccount:{cluster.namespace}:{ACCOUNT}"
        text = text.replace("system:serviceaccount:nodeagent:nodeagent", user)
        self.documents = [self._moved(each) for each in yaml.safe_load_all(text) if each["kind"] != "Namespace"]

    def _moved(self, document: Json) -> Json:
        ours = self._cluster.namespace
        metadata = document["metadata"]
        if "namespace" in metadata:
            metadata["namespace"] = ours
        else:
            metadata["name"] = f"{ours}-{metadata['name']}"
        for subject in document.get("subjects", ()):
            subject["namespace"] = ours
        if document.get("roleRef", {}).get("kind") == "ClusterRole":
            document["roleRef"]["name"] = f"{ours}-{document['roleRef']['name']}"
        if "policyName" in document.get("spec", {}):
            document["spec"]["policyName"] = f"{ours}-{document['spec']['policyName']}"
        return document

    def make(self, document: Json) -> None:
        path = PATHS[document["kind"]].format(self._cluster.namespace)
        self._cluster.post(path, document)
        self.made.append(f"{path}/{document['metadata']['name']}")

    def remove(self) -> None:
        for path in reversed(self.made):
            self._cluster.delete(path)


@pytest.fixture(scope="module")
def installation(cluster: Cluster) -> Iterator[Installation]:
    """Rights and policies; the DaemonSet is made by the test that needs it."""
    if minor_of(cluster) < 30:
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
def tenant(cluster: Cluster) -> Iterator[Json]:
    """A pod of another user on the node, in a namespace of its own. It need not run."""
    name = f"{cluster.namespace}-tenant"
    namespaces = f"/api/v1/namespaces/{name}"
    cluster.post("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    try:
        assert cluster.until(lambda: has_service_account(cluster, name), timeout_s=60)
        spec = {
            "nodeName": cluster.node_name,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "c", "image": "nodeagent.invalid/none", "imagePullPolicy": "Never"}],
        }
        made = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "tenant"}, "spec": spec}
        yield cluster.post(f"{namespaces}/pods", made)
        cluster.delete(f"{namespaces}/pods/tenant", grace_s=0)
    finally:
        cluster.delete(namespaces)


@pytest.fixture(scope="module")
def agents(
    cluster: Cluster, installation: Installation, tenant: Json, tmp_path_factory: pytest.TempPathFactory
) -> Transport:
    """The API server with the token that a pod of the DaemonSet would have on the node."""
    container = {"name": "c", "image": "nodeagent.invalid/none", "imagePullPolicy": "Never"}
    spec = {
        "nodeName": cluster.node_name,
        "serviceAccountName": ACCOUNT,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "tolerations": [{"operator": "Exists"}],
        "containers": [container],
    }
    bearer = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "bearer"}, "spec": spec}
    assert installation.made, "the account is there"
    pod = cluster.post(cluster.pod_path(), bearer)
    bound = {"kind": "Pod", "apiVersion": "v1", "name": "bearer", "uid": pod["metadata"]["uid"]}
    answer = cluster.post(
        f"/api/v1/namespaces/{cluster.namespace}/serviceaccounts/{ACCOUNT}/token",
        {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 3600, "boundObjectRef": bound},
        },
    )
    directory = tmp_path_factory.mktemp("agent")
    transport = connect(with_token(cluster, answer["status"]["token"], directory), request_timeout_s=15.0)
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    body = json.dumps(review).encode()
    me = json.loads(transport.request("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", body=body).body)
    if NODE_CLAIM not in me["status"]["userInfo"].get("extra", {}):
        pytest.skip("this API server does not write the node into a pod's token (Kubernetes 1.30 does)")
    # A new role takes a moment to be known, a new policy to be enforced. What is allowed before that proves nothing.
    assert cluster.until(lambda: chosen(cluster, transport), timeout_s=60), transport.impersonation.note
    get = ALLOWED["its own object"]
    assert cluster.until(lambda: ask(cluster, transport, get, tenant) is None, timeout_s=60)
    label = REFUSED["a label"]
    assert cluster.until(lambda: is_refused(cluster, transport, label, tenant), timeout_s=60), "by the policy"
    return transport


def chosen(cluster: Cluster, transport: Transport) -> bool:
    """Whether the requests have the identity that this API server allows."""
    confirm_identity(transport, Identity(cluster.node_name, "--node-name"))
    return transport.impersonation.complete is (minor_of(cluster) >= 36)


def ask(cluster: Cluster, agents: Transport, what: Try, tenant: Json) -> ApiError | None:
    """What the API server has against it."""
    names = {
        "{}": cluster.namespace,
        "NODE": cluster.node_name,
        "TENANT": tenant["metadata"]["namespace"],
        "UID": tenant["metadata"]["uid"],
    }
    if "SYSTEM" in what.path:
        names["SYSTEM"] = system_pod(cluster)
    path = what.path
    text = "" if what.body is None else json.dumps(_with_all_taints(cluster, what.body))
    for mark, name in names.items():
        path = path.replace(mark, name)
        text = text.replace(f'"{mark}"', f'"{name}"')
    kind = STRATEGIC_MERGE if what.method == "PATCH" else JSON
    try:
        agents.request(what.method, path, body=text.encode() or None, content_type=kind)
    except ApiError as error:
        return error
    return None


def system_pod(cluster: Cluster) -> str:
    """The name of a pod of kube-system on the node; empty if there is none."""
    listed = cluster.get(
        f"/api/v1/namespaces/kube-system/pods?fieldSelector=spec.nodeName%3D{cluster.node_name}&limit=1"
    )
    return next((str(each["metadata"]["name"]) for each in listed["items"]), "")


def is_refused(cluster: Cluster, agents: Transport, what: Try, tenant: Json) -> bool:
    """By a missing right or a policy, whose messages differ."""
    error = ask(cluster, agents, what, tenant)
    return error is not None and error.status == 403


def _with_all_taints(cluster: Cluster, body: Json) -> Json:
    taints = body.get("spec", {}).get("taints", ())
    if "ALL" not in taints:
        return body
    there = cluster.node()["spec"].get("taints", [])
    return {"spec": {"taints": [*there, *(taint for taint in taints if taint != "ALL")]}}


@pytest.mark.parametrize("what", ALLOWED)
def test_a_pods_token_may_do_on_its_own_node(cluster: Cluster, agents: Transport, tenant: Json, what: str) -> None:
    def allowed() -> bool:
        return ask(cluster, agents, ALLOWED[what], tenant) is None

    # One of several API servers may know of the role later than the one that was asked first; also below.
    assert cluster.until(allowed, timeout_s=30), ask(cluster, agents, ALLOWED[what], tenant)


@pytest.mark.parametrize("what", REFUSED)
def test_a_pods_token_may_not_do(cluster: Cluster, agents: Transport, tenant: Json, what: str) -> None:
    attempt = REFUSED[what]
    if "OTHER" in attempt.path:
        names = {node["metadata"]["name"] for node in cluster.get("/api/v1/nodes?limit=2")["items"]}
        if not (others := sorted(names - {cluster.node_name})):
            pytest.skip("the cluster has one node")
        attempt = attempt._replace(path=attempt.path.replace("OTHER", others[0]))
    if "SYSTEM" in attempt.path and not system_pod(cluster):
        # As a node, a pod that does not exist is not found before the policy is asked.
        pytest.skip("no pod of kube-system is on the node")

    def refused() -> bool:
        return is_refused(cluster, agents, attempt, tenant)

    assert cluster.until(refused, timeout_s=60), ask(cluster, agents, attempt, tenant)


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


def on_one_node(cluster: Cluster, document: Json, named: str) -> Json:
    """The DaemonSet on the test's node alone; a configuration that can evict only the run's own pods."""
    if document["kind"] == "DaemonSet":
        pod = document["spec"]["template"]["spec"]
        pod["affinity"] = _only(cluster.node_name)
        pod["containers"][0]["image"] = named
        return document
    config = yaml.safe_load(document["data"]["config.yaml"])
    namespaces = {each["metadata"]["name"] for each in cluster.get("/api/v1/namespaces?limit=1000")["items"]}
    config["protection"] = {"namespaces": sorted({"kube-system", *namespaces} - {cluster.namespace})}
    document["data"]["config.yaml"] = json.dumps(config)
    return document


def _only(node: str) -> Json:
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    terms = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def test_the_daemonset_becomes_ready_answers_and_publishes_its_conditions(
    cluster: Cluster, installation: Installation
) -> None:
    named = image(cluster)
    if reason := at_work(cluster):
        pytest.skip(reason)

    def agent() -> Json:
        pods = cluster.get(cluster.pod_path())["items"]
        return next((p for p in pods if p["metadata"].get("labels", {}).get("app.kubernetes.io/name")), {})

    def ready() -> bool:
        conditions = agent().get("status", {}).get("conditions", ())
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def page(name: str) -> str:
        path = f"{cluster.pod_path(agent()['metadata']['name'])}:9655/proxy/{name}"
        try:
            body: bytes = cluster.transport.request("GET", path, accept="text/plain").body
        except ApiError:  # a proxy in between may close the connection; the caller requests the page again
            return ""
        return body.decode()

    try:
        for document in installation.documents:
            if document["kind"] in ("ConfigMap", "DaemonSet"):
                installation.make(on_one_node(cluster, document, named))
        assert cluster.until(ready, timeout_s=240), agent().get("status")
        assert cluster.until(lambda: page("readyz").strip(), timeout_s=60)
        # Ready needs the pods; the watch of the node may be a moment later.
        for watch in ("pods", "node"):
            family = f'nodeagent_api_relists_total{{watch="{watch}"}}'
            assert cluster.until(lambda family=family: family in page("metrics"), timeout_s=60), family  # type: ignore[misc]
        for kind in ("NodeAgentMemoryPressure", "NodeAgentDiskPressure", "NodeAgentPIDPressure"):
            assert cluster.until(lambda kind=kind: cluster.condition(kind), timeout_s=60)  # type: ignore[misc]
        cluster.delete(f"{PATHS['DaemonSet'].format(cluster.namespace)}/nodeagent")
        assert cluster.until(lambda: not marks(cluster.node()), timeout_s=90), "a clean end takes everything back"
    finally:
        cluster.delete(f"{PATHS['DaemonSet'].format(cluster.namespace)}/nodeagent")
        cluster.until(lambda: not agent(), timeout_s=90)
        wipe(cluster)

"""daemonset.yaml installed under names of the run's own, a pod's token on the node, requests that try its rights."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import yaml

from nodeagent.config.schema import ClusterIdentity
from nodeagent.kube import rights
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.transport import JSON, STRATEGIC_MERGE, Transport
from tests.e2e.cluster import RUN_LABEL, SELF_REVIEW, SELF_REVIEW_BODY, Cluster, Json, as_account, sleeping_pod
from tests.support.paths import REPOSITORY

DAEMONSET: Final = REPOSITORY / "daemonset.yaml"
LEASES: Final = REPOSITORY / "examples" / "fleet-leases.yaml"
DIRECT: Final = REPOSITORY / "examples" / "kubernetes-1.35.yaml"
"""The rights of the ServiceAccount itself, for API servers without constrained impersonation."""
ACCOUNT: Final = "nodeagent"
CLOUD_S: Final = 15.0
"""Three periods of a cloud's node lifecycle controller (k8s.io/cloud-provider, 5 s)."""
NODE_CLAIM: Final = "authentication.kubernetes.io/node-name"
NODE_USER: Final = "system:node:"
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
CLUSTER_WIDE: Final = [path for path in reversed(PATHS.values()) if "{}" not in path]
"""Bindings before what they bind."""


class Try(NamedTuple):
    """A request of the agent's token. In paths and, as whole values, in the body: `{}` is the run's namespace, which is
    the agent's own, `TENANT` that of the pods `tenant` and `neighbour`, `UID` the UID of the first, `NODE` the node's
    name, `OTHER` that of the node of `neighbour`, `ALL` the Node's taints."""

    method: str
    path: str
    body: Json | None = None
    user: str = ""
    """`NODE` or `OTHER`: impersonate that node."""
    refusal: str = ""
    """Part of the refusal's message."""

    def by(self, user: str, refusal: str = "") -> "Try":
        return self._replace(user=user, refusal=refusal)


class Places(NamedTuple):
    """What the marks of a `Try` stand for."""

    namespace: str
    tenant_namespace: str
    tenant_uid: str
    node: str
    other: str

    def fill(self, text: str, *, quoted: bool = False) -> str:
        names = {
            "{}": self.namespace,
            "TENANT": self.tenant_namespace,
            "UID": self.tenant_uid,
            "NODE": self.node,
            "OTHER": self.other,
        }
        for mark, name in names.items():
            text = text.replace(f'"{mark}"', f'"{name}"') if quoted else text.replace(mark, name)
        return text


class Agent(NamedTuple):
    """The API server with the token that a pod of the DaemonSet would have on the node."""

    cluster: Cluster
    transport: Transport
    places: Places
    constrained: bool
    """Whether the API server has constrained impersonation."""

    def ask(self, what: Try) -> ApiError | None:
        """What the API server has against it."""
        path = self.places.fill(what.path)
        text = "" if what.body is None else json.dumps(self._with_all_taints(what.body))
        user = f"{NODE_USER}{self.places.fill(what.user)}" if what.user else ""
        try:
            if "watch=1" in path:
                self._watch(path, user)
            else:
                self.transport.request(
                    what.method,
                    path,
                    body=self.places.fill(text, quoted=True).encode() or None,
                    content_type=STRATEGIC_MERGE if what.method == "PATCH" else JSON,
                    user=user,
                )
        except ApiError as error:
            return error
        return None

    def is_refused(self, what: Try) -> bool:
        """By a missing right, NodeRestriction or a policy, whose messages differ."""
        error = self.ask(what)
        return error is not None and error.status == 403 and self.places.fill(what.refusal) in error.message

    def _watch(self, path: str, user: str) -> None:
        """Opened and closed: its status is the answer."""
        identity = self.transport.impersonation
        if user:
            identity.act_as(user.removeprefix(NODE_USER), ClusterIdentity.NODE)
        else:
            identity.fall_back("a test")
        try:
            with self.transport.stream(path, idle_s=15.0, total_s=15.0):
                pass
        finally:
            identity.fall_back("a test")

    def _with_all_taints(self, body: Json) -> Json:
        taints = body.get("spec", {}).get("taints", ())
        if "ALL" not in taints:
            return body
        there = self.cluster.node()["spec"].get("taints", [])
        return {"spec": {"taints": [*there, *(taint for taint in taints if taint != "ALL")]}}


class Installation:
    """The documents of daemonset.yaml, and what a fleet needs beside it, under the run's names."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.made: list[str] = []
        self.documents = [each for file in (DAEMONSET, LEASES) for each in self.read(file)]

    def read(self, file: Path) -> list[Json]:
        """The documents of a manifest, for the run's namespace and account."""
        text = file.read_text(encoding="utf-8")
        user = f"system:serviceaccount:{self._cluster.namespace}:{ACCOUNT}"
        text = text.replace("system:serviceaccount:nodeagent:nodeagent", user)
        return [self._moved(each) for each in yaml.safe_load_all(text) if each["kind"] != "Namespace"]

    def _moved(self, document: Json) -> Json:
        ours = self._cluster.namespace
        metadata = document["metadata"]
        if "namespace" in metadata:
            metadata["namespace"] = ours
        else:
            metadata["name"] = f"{ours}-{metadata['name']}"
        if document.get("roleRef", {}).get("kind") == "ClusterRole":
            document["roleRef"]["name"] = f"{ours}-{document['roleRef']['name']}"
        if "policyName" in document.get("spec", {}):
            document["spec"]["policyName"] = f"{ours}-{document['spec']['policyName']}"
        return document

    def make(self, document: Json) -> None:
        path = PATHS[document["kind"]].format(self._cluster.namespace)
        metadata = document["metadata"]
        metadata["labels"] = {**metadata.get("labels", {}), **self._cluster.labels}
        # First: a request whose answer is lost may have been carried out.
        self.made.append(f"{path}/{metadata['name']}")
        self._cluster.post(path, document)

    def remove(self) -> None:
        """Everything is tried; what has the run's label after that is tried again."""
        try:
            self._cluster.delete_all(reversed(self.made))
        finally:
            selector = f"{RUN_LABEL}%3D{self._cluster.namespace}"
            self._cluster.delete_all(labelled(self._cluster, CLUSTER_WIDE, selector))


def labelled(cluster: Cluster, collections: Iterable[str], selector: str) -> list[str]:
    """The paths of the objects of cluster-wide collections that a label selector matches."""
    return [
        f"{path}/{entry['metadata']['name']}"
        for path in collections
        for entry in cluster.get(f"{path}?labelSelector={selector}")["items"]
    ]


def remove_lost_runs(cluster: Cluster) -> None:
    """What runs have made that could not remove it. Not while another run is at work."""
    cluster.delete_all(labelled(cluster, [*CLUSTER_WIDE, "/api/v1/nodes", "/api/v1/namespaces"], RUN_LABEL))


def has_node(cluster: Cluster, name: str) -> bool:
    return any(node["metadata"]["name"] == name for node in cluster.get("/api/v1/nodes")["items"])


@contextmanager
def another_node(cluster: Cluster) -> Iterator[str]:
    """The name of another node of the cluster; with one node that of a Node object without a machine, which is removed.

    It has the run's label alone, so that no usual DaemonSet selects it, and repels what does not tolerate everything.
    Skips where such an object does not stay: a cloud's controller removes Nodes that have no machine."""
    names = {node["metadata"]["name"] for node in cluster.get("/api/v1/nodes?limit=2")["items"]}
    if others := sorted(names - {cluster.node_name}):
        yield others[0]
        return
    name = f"{cluster.namespace}-node"
    taint = {"key": "nodeagent.io-e2e/no-machine", "effect": "NoExecute"}
    spec = {"unschedulable": True, "taints": [taint]}
    metadata = {"name": name, "labels": cluster.labels}
    cluster.post("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": spec})
    try:
        if cluster.node()["spec"].get("providerID") and cluster.until(
            lambda: not has_node(cluster, name), timeout_s=CLOUD_S
        ):
            pytest.skip("the cluster has one node, and its cloud removes a Node object without a machine")
        yield name
    finally:
        cluster.delete(f"/api/v1/nodes/{name}")


def token_of_a_pod(cluster: Cluster, directory: Path) -> Transport:
    """The API server with the token of the pod `bearer` of the agent's account, on the node. Skips if the token does
    not name its node."""
    pod = cluster.make_pod(sleeping_pod("bearer", cluster.node_name, serviceAccountName=ACCOUNT))
    bound = {"kind": "Pod", "apiVersion": "v1", "name": "bearer", "uid": pod["metadata"]["uid"]}
    answer = cluster.post(
        f"/api/v1/namespaces/{cluster.namespace}/serviceaccounts/{ACCOUNT}/token",
        {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 3600, "boundObjectRef": bound},
        },
    )
    transport = as_account(cluster, answer["status"]["token"], directory)
    me = json.loads(transport.request("POST", SELF_REVIEW, body=json.dumps(SELF_REVIEW_BODY).encode()).body)
    if me["status"]["userInfo"].get("extra", {}).get(NODE_CLAIM) != [cluster.node_name]:
        pytest.skip("this API server does not write the node into a pod's token (Kubernetes 1.30 does)")
    return transport


def has_constrained_impersonation(transport: Transport, node: str) -> bool:
    """Whether the API server asks for the rights of constrained impersonation: its refusal names the first right that
    is missing, which without the feature is the old `impersonate`."""
    try:
        transport.request("GET", f"/api/v1/nodes/{node}", user=f"{NODE_USER}{node}")
    except ApiError as error:
        denied = rights.denied(error.message)
        if error.status != 403 or denied is None:
            raise
        return denied.rule.verb != "impersonate"
    return True

"""The cluster that the suite runs against, and the pods that it makes there."""

import json
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.credentials import Credentials, find_credentials
from nodeagent.kube.node_identity import host_addresses
from nodeagent.kube.transport import Transport, connect
from nodeagent.model import OutcomeKind

KUBECONFIG = "NODEAGENT_E2E_KUBECONFIG"


NODE = "NODEAGENT_E2E_NODE"


POD_IMAGE = "NODEAGENT_E2E_POD_IMAGE"
"""An image that waits when it is started, for a node that has no `pause` or may not use the one it has."""


Json = dict[str, Any]


WIPE = "NODEAGENT_E2E_WIPE"
"""Set: before the tests begin, what an agent has put on the node is taken off, and what earlier runs have made is
deleted. For what a lost one has left."""


RUN_LABEL = "nodeagent.io/e2e-run"
"""On everything outside the run's namespaces, and on these: the run that made it."""


START_S = 100.0
"""For a pod that the kubelet knows of: two to ten seconds were seen, an emulated node needs more. Two images of it are
within a test's limit."""


SELF_REVIEW = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
SELF_REVIEW_BODY = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}


SCHEDULER = "nodeagent-e2e"
"""No scheduler has this name, so that only the tests bind their pods."""


HOPELESS = frozenset(
    {
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "ErrImageNeverPull",
        "ImageInspectError",
        "ImagePullBackOff",
        "InvalidImageName",
    }
)
"""Why a container waits that will go on waiting (pkg/kubelet/images/types.go, pkg/kubelet/container/sync_result.go).
Failing to create or to run a container may pass."""


class Cluster:
    """The API server with an administrator's rights, and the node that the tests use."""

    def __init__(self, transport: Transport, kubeconfig: str) -> None:
        self.transport = transport
        self.kubeconfig = kubeconfig
        self.namespace = f"nodeagent-e2e-{uuid.uuid4().hex[:8]}"
        self.labels = {RUN_LABEL: self.namespace}
        self.node_name = os.environ.get(NODE) or self._some_node()

    def get(self, path: str) -> Json:
        loaded: Json = json.loads(self.transport.request("GET", path).body)
        return loaded

    def post(self, path: str, body: Json) -> Json:
        loaded: Json = json.loads(self.transport.request("POST", path, body=json.dumps(body).encode()).body)
        return loaded

    def delete(self, path: str, *, grace_s: int | None = None) -> None:
        body = None if grace_s is None else json.dumps({"gracePeriodSeconds": grace_s}).encode()
        try:
            self.transport.request("DELETE", path, body=body)
        except ApiError as error:
            if error.kind is not OutcomeKind.NOT_FOUND:
                raise

    def delete_all(self, paths: Iterable[str], *, grace_s: int | None = None) -> None:
        """Every one is tried, also after a failure; raises what failed at the end."""
        failed = []
        for path in paths:
            try:
                self.delete(path, grace_s=grace_s)
            except ApiError as error:
                failed.append(f"{path}: {error.message}")
        if failed:
            raise RuntimeError(f"not deleted: {'; '.join(failed)}")

    def make_namespace(self, name: str) -> None:
        """For pods of any form: some share the host's process ids (this_node.py), which the level `baseline` refuses.
        Raises where no pod could be made in it."""
        labels = {**self.labels, "pod-security.kubernetes.io/enforce": "privileged"}
        metadata = {"name": name, "labels": labels}
        self.post("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        # Pods need their namespace's service account, which a controller makes.
        if not self.until(lambda: has_service_account(self, name), timeout_s=60):
            raise RuntimeError(f"no controller has made the service account of the namespace {name}")

    def other_namespaces(self) -> list[str]:
        """All but the run's own, whose pods alone may be evicted."""
        names = (each["metadata"]["name"] for each in self.get("/api/v1/namespaces")["items"])
        return sorted({"kube-system", *names} - {self.namespace})

    def make_pod(self, pod: Json, *, namespace: str = "") -> Json:
        """Skips where the cluster allows no such pod: by Pod Security, a policy, a webhook, a quota."""
        try:
            return self.post(f"/api/v1/namespaces/{namespace or self.namespace}/pods", pod)
        except ApiError as error:
            if error.status != 403:
                raise
            pytest.skip(f"the cluster allows no such pod: {error.message}")

    def node(self) -> Json:
        return self.get(f"/api/v1/nodes/{self.node_name}")

    def condition(self, kind: str) -> Json | None:
        return next((c for c in self.node()["status"]["conditions"] if c["type"] == kind), None)

    def pod_path(self, name: str = "") -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods" + (f"/{name}" if name else "")

    def start_pod(
        self,
        name: str,
        *,
        labels: dict[str, str] | None = None,
        spec: Json | None = None,
        container: Json | None = None,
    ) -> Json:
        """A pod that does nothing, from an image that the node already has; `spec` and `container` are merged into its
        own. Skips when it does not start.

        It is bound as a scheduler binds, so that it does not require this node: a pod that names its
        node itself is spared (`protection.nodeBound`)."""
        problems = []
        for image, policy in self._images():
            more = {"imagePullPolicy": policy, **(container or {})}
            self.make_pod(self._pod(name, image, labels or {}, spec or {}, more))
            self.bind(name)
            self.until(lambda: self._ready(name) or self._hopeless(name), timeout_s=START_S)
            if self._ready(name):
                return self.get(self.pod_path(name))
            problems.append(f"{image}: {self._hopeless(name) or self.get(self.pod_path(name))['status']}"[:500])
            self.delete(self.pod_path(name), grace_s=0)
            self.until(lambda: self._gone(name), timeout_s=30)
        pytest.skip(
            f"no pod starts on {self.node_name} from an image it has ({POD_IMAGE} may name one): "
            f"{problems or 'none is called pause'}"
        )

    def bind(self, name: str) -> None:
        """What the scheduler does with a pod that has named no node."""
        target = {"apiVersion": "v1", "kind": "Node", "name": self.node_name}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        self.post(f"{self.pod_path(name)}/binding", binding)

    def until(self, holds: Callable[[], object], *, timeout_s: float) -> bool:
        """Ask twice a second until it holds."""
        pause, end = threading.Event(), time.monotonic() + timeout_s
        while not (held := holds()) and time.monotonic() < end:
            pause.wait(0.5)
        return bool(held)

    def _ready(self, name: str) -> bool:
        status = self.get(self.pod_path(name))["status"]
        return any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", ()))

    def _hopeless(self, name: str) -> str:
        """Why the pod will not become ready; empty while it may."""
        status = self.get(self.pod_path(name))["status"]
        if status.get("phase") in ("Failed", "Succeeded"):
            return f"{status['phase']} {status.get('reason', '')} {status.get('message', '')}".strip()
        states = (entry.get("state", {}).get("waiting", {}) for entry in status.get("containerStatuses", ()))
        why = (f"{each['reason']}: {each.get('message', '')}" for each in states if each.get("reason") in HOPELESS)
        return next(why, "")

    def _gone(self, name: str) -> bool:
        try:
            self.get(self.pod_path(name))
        except ApiError as error:
            return error.kind is OutcomeKind.NOT_FOUND
        return False

    def _images(self) -> list[tuple[str, str]]:
        """Images that only wait, and when they may be pulled: the one that was named, or what the node has. An image
        whose entry point ends at once is no use."""
        if named := os.environ.get(POD_IMAGE):
            return [(named, "IfNotPresent")]
        images = [image["names"][-1] for image in self.node()["status"].get("images", ()) if image.get("names")]
        return [(image, "Never") for image in sorted((i for i in images if "pause" in i), key=len)[:2]]

    def _pod(self, name: str, image: str, labels: dict[str, str], extra: Json, more: Json) -> Json:
        container = {"name": "c", "image": image, **more}
        spec: Json = {
            "schedulerName": SCHEDULER,
            "containers": [container],
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "tolerations": [{"operator": "Exists"}],
            **extra,
        }
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}

    def _some_node(self) -> str:
        usable = usable_nodes(self.get("/api/v1/nodes")["items"])
        if not usable:
            pytest.skip("no Linux node of the cluster is Ready")
        here = next((n for n in usable if is_this_machine(n)), usable[0])
        return str(here["metadata"]["name"])


def usable_nodes(nodes: list[Json]) -> list[Json]:
    """The Linux nodes that are Ready, those first that any pod may be scheduled to."""

    def reserved(node: Json) -> bool:
        spec = node.get("spec", {})
        return bool(spec.get("unschedulable") or any(t["effect"] != "PreferNoSchedule" for t in spec.get("taints", ())))

    def usable(node: Json) -> bool:
        labels = node["metadata"].get("labels") or {}
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", ()))
        virtual = labels.get("type") == "virtual-kubelet"
        return ready and not virtual and labels.get("kubernetes.io/os", "linux") == "linux"

    return sorted(filter(usable, nodes), key=reserved)


def minor_of(version: str) -> int:
    """The 36 of `v1.36.2+k3s1`."""
    found = re.match(r"v?\d+\.(\d+)", version)
    assert found, version
    return int(found[1])


def server_minor(cluster: Cluster) -> int:
    return minor_of(cluster.get("/version")["gitVersion"])


def sleeping_pod(name: str, node: str, **spec: object) -> Json:
    """A pod on this node whose image does not exist, so that it never runs. The level `restricted` allows it."""
    container = {
        "name": "c",
        "image": "nodeagent.invalid/none",
        "imagePullPolicy": "Never",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "nodeName": node,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            "tolerations": [{"operator": "Exists"}],
            "securityContext": {"runAsNonRoot": True, "runAsUser": 65534, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            **spec,
        },
    }


def is_this_machine(node: Json) -> bool:
    """Whether the tests seem to run on this node itself: its name is the host's, or its address one of the host's."""
    internal = {a["address"] for a in node["status"].get("addresses", ()) if a["type"] == "InternalIP"}
    return node["metadata"]["name"] == os.uname().nodename.lower() or bool(internal & set(host_addresses()))


def has_service_account(cluster: Cluster, namespace: str) -> bool:
    """Whether pods can be made in it."""
    try:
        cluster.get(f"/api/v1/namespaces/{namespace}/serviceaccounts/default")
    except ApiError as error:
        if error.kind is OutcomeKind.NOT_FOUND:
            return False
        raise
    return True


def as_account(cluster: Cluster, token: str, directory: Path) -> Transport:
    """The API server with a service account's token. Skips where the kubeconfig names a proxy that takes none."""
    transport = connect(with_token(cluster, token, directory), request_timeout_s=15.0)
    try:
        transport.request("POST", SELF_REVIEW, body=json.dumps(SELF_REVIEW_BODY).encode())
    except ApiError as error:
        if error.kind is not OutcomeKind.UNAUTHORIZED:
            raise
        pytest.skip(f"{transport.server} takes no token of a service account: {error.message}")
    return transport


def with_token(cluster: Cluster, token: str, directory: Path) -> Credentials:
    """The cluster's kubeconfig with other credentials."""
    config = yaml.safe_load(Path(cluster.kubeconfig).read_text())
    for user in config["users"]:
        user["user"] = {"token": token}
    # Relative paths in it are relative to the file.
    for entry in config["clusters"]:
        authority = entry["cluster"].get("certificate-authority")
        if authority:
            entry["cluster"]["certificate-authority"] = str(Path(cluster.kubeconfig).parent / authority)
    path = directory / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return find_credentials(str(path))

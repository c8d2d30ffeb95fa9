"""The kubectl plugin with a real kubectl, as far as `exec`: the API double has no SPDY and no WebSocket."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fake_kube import ApiServer, pod
from tests.fake_kube.messages import Answer, Request
from tests.support.kubectl import PLUGIN

KUBECTL = shutil.which("kubectl")
pytestmark = pytest.mark.skipif(KUBECTL is None, reason="needs kubectl")
AGENT, NODE = "nodeagent-abcde", "lab-node"
RESOURCES = [("pods", "Pod", True), ("nodes", "Node", False)]
DISCOVERY: dict[str, Any] = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [
            {
                "name": name,
                "singularName": kind.lower(),
                "namespaced": namespaced,
                "kind": kind,
                "verbs": ["get", "list"],
            }
            for name, kind, namespaced in RESOURCES
        ],
    },
}
REFUSAL = {
    "kind": "Status",
    "apiVersion": "v1",
    "status": "Failure",
    "message": "exec ends here",
    "reason": "Forbidden",
    "code": 403,
}


class Ran(NamedTuple):
    code: int
    out: str
    error: str
    executed: list[str]
    """Paths of exec requests."""


class Cluster:
    """The double, with what kubectl alone asks for."""

    def __init__(self, api: ApiServer, home: Path) -> None:
        self.api, self._home = api, home
        self._executed: list[str] = []
        api.instead = self._instead
        api.kubeconfig(home / "kubeconfig")

    def _instead(self, request: Request) -> Answer | None:
        request.headers.setdefault("authorization", f"Bearer {self.api.token}")  # kubectl sends none without TLS
        if request.path in DISCOVERY:
            return Answer(200, json.dumps(DISCOVERY[request.path]).encode())
        if request.path.endswith("/exec"):
            self._executed.append(request.path)
            return Answer(403, json.dumps(REFUSAL).encode())
        return None

    def run(self, *words: str) -> Ran:
        self._executed.clear()
        environ = {**os.environ, "HOME": str(self._home), "KUBECTL": str(KUBECTL)}
        command = ["sh", str(PLUGIN), "--kubeconfig", str(self._home / "kubeconfig"), *words]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
        return Ran(done.returncode, done.stdout, done.stderr, list(self._executed))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    agent = pod(AGENT, node=NODE, namespace="nodeagent")
    agent["metadata"]["labels"] = {"app.kubernetes.io/name": "nodeagent"}
    agent["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    with ApiServer(node=NODE, pods=[agent]) as api:
        yield Cluster(api, tmp_path)


def test_the_agents_pod_on_the_node_is_found_and_the_command_sent_there(cluster: Cluster) -> None:
    ran = cluster.run("check", NODE)
    assert ran.executed
    assert set(ran.executed) == {f"/api/v1/namespaces/nodeagent/pods/{AGENT}/exec"}
    assert (ran.code, ran.out) == (1, "")
    assert "exec ends here" in ran.error


def test_a_node_without_an_agent_is_named_with_what_was_looked_for(cluster: Cluster) -> None:
    ran = cluster.run("--namespace=tools", "check", NODE)
    assert (ran.code, ran.out, ran.executed) == (3, "", [])
    assert ran.error == (
        f"kubectl nodeagent: no agent on node {NODE}: namespace tools has no running pod there with the label "
        "app.kubernetes.io/name=nodeagent\n"
    )


def test_a_node_that_does_not_exist_is_reported_as_kubectl_does(cluster: Cluster) -> None:
    ran = cluster.run("check", "other")
    assert (ran.code, ran.out, ran.executed) == (3, "", [])
    assert 'nodes "other" not found' in ran.error
    assert ran.error.endswith("kubectl nodeagent: no agent on node other\n")


def test_a_pod_that_is_not_ready_is_used_with_a_warning(cluster: Cluster) -> None:
    def unready(agent: Any) -> None:
        agent["status"]["conditions"][0]["status"] = "False"

    cluster.api.modify_pod("nodeagent", AGENT, unready)
    ran = cluster.run("explain", NODE)
    assert ran.executed
    assert f"pod {AGENT} is not ready; trying anyway" in ran.error

"""A real kubectl: the plugin, as far as `exec`, because the API double has no SPDY and no WebSocket; the commands that
remove the agent."""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nodeagent.actuators.conditions import OWN_PREFIX
from nodeagent.model import ConditionType
from tests.fake_kube import ApiServer, pod
from tests.fake_kube.messages import Answer, Request
from tests.support.kubectl import PLUGIN
from tests.support.paths import REPOSITORY

KUBECTL = shutil.which("kubectl")
pytestmark = pytest.mark.skipif(KUBECTL is None, reason="needs kubectl")
AGENT, NODE = "nodeagent-abcde", "lab-node"
RESOURCES = [("pods", "Pod", True), ("nodes", "Node", False), ("nodes/status", "Node", False)]
DAEMONSETS = "/apis/apps/v1/namespaces/nodeagent/daemonsets"
DAEMONSET: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "DaemonSet",
    "metadata": {"name": "nodeagent", "namespace": "nodeagent", "uid": "1", "resourceVersion": "1"},
}
DISCOVERY: dict[str, Any] = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [
            {
                "name": "apps",
                "versions": [{"groupVersion": "apps/v1", "version": "v1"}],
                "preferredVersion": {"groupVersion": "apps/v1", "version": "v1"},
            }
        ],
    },
    "/apis/apps/v1": {
        "kind": "APIResourceList",
        "groupVersion": "apps/v1",
        "resources": [
            {
                "name": "daemonsets",
                "singularName": "daemonset",
                "namespaced": True,
                "kind": "DaemonSet",
                "verbs": ["get", "list", "watch", "delete"],
            }
        ],
    },
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [
            {
                "name": name,
                "singularName": kind.lower(),
                "namespaced": namespaced,
                "kind": kind,
                "verbs": ["get", "list", "patch"],
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
        self.deletions: list[Any] = []
        """The options of each DELETE of the DaemonSet."""
        self.waited = False
        """Whether kubectl watched the DaemonSet after that."""
        api.instead = self._instead
        api.kubeconfig(home / "kubeconfig")

    def _instead(self, request: Request) -> Answer | None:
        request.headers.setdefault("authorization", f"Bearer {self.api.token}")  # kubectl sends none without TLS
        if request.path in DISCOVERY:
            return Answer(200, json.dumps(DISCOVERY[request.path]).encode())
        if request.path.endswith("/exec"):
            self._executed.append(request.path)
            return Answer(403, json.dumps(REFUSAL).encode())
        return self._daemonset(request) if request.path.startswith(DAEMONSETS) else None

    def _daemonset(self, request: Request) -> Answer:
        """An object that is gone at the end of the first watch."""
        if request.method == "DELETE":
            self.deletions.append(request.body)
            return Answer(200, json.dumps(DAEMONSET).encode())
        if request.query.get("watch"):
            self.waited = bool(self.deletions)
            return Answer(200, json.dumps({"type": "DELETED", "object": DAEMONSET}).encode() + b"\n")
        if request.path == DAEMONSETS:
            found = {"kind": "DaemonSetList", "apiVersion": "apps/v1", "metadata": {"resourceVersion": "1"}}
            return Answer(200, json.dumps({**found, "items": [DAEMONSET]}).encode())
        return Answer(200, json.dumps(DAEMONSET).encode())

    def kubectl(self, command: str) -> None:
        """Run a command as a text has it."""
        name, *words = shlex.split(command, comments=True)
        assert name == "kubectl"
        whole = [str(KUBECTL), "--kubeconfig", str(self._home / "kubeconfig"), *words]
        environ = {**os.environ, "HOME": str(self._home)}
        done = subprocess.run(whole, env=environ, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr

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


# --- removal ---------------------------------------------------------------------------------------------------------

REMOVE = "kubectl -n nodeagent delete daemonset nodeagent --cascade=foreground"
TEXTS = ("daemonset.yaml", "docs/start.md", "charts/nodeagent/README.md", "charts/nodeagent/templates/NOTES.txt")


def test_the_pods_end_before_the_command_that_removes_the_daemonset_does(cluster: Cluster) -> None:
    """Their rights go only after that, so that they remove their conditions and taints."""
    cluster.kubectl(REMOVE)
    assert [each["propagationPolicy"] for each in cluster.deletions] == ["Foreground"]
    assert cluster.waited


@pytest.mark.parametrize("name", TEXTS)
def test_each_text_about_a_removal_has_that_command(name: str) -> None:
    text = (REPOSITORY / name).read_text("utf-8").replace("{{ .Release.Namespace }}", "nodeagent")
    assert REMOVE in text


def test_what_a_removal_left_on_a_node_is_removed_by_the_commands_of_the_chart(cluster: Cluster) -> None:
    text = (REPOSITORY / "charts" / "nodeagent" / "README.md").read_text("utf-8")
    untaint, patch = re.findall(r"^kubectl (?:taint|patch) node NODE .*$", text, re.MULTILINE)
    for kind in ConditionType:
        cluster.api.write_condition(OWN_PREFIX + kind.value, "True", "test")
    cluster.kubectl(f"kubectl taint node {NODE} example.com/other=:NoSchedule nodeagent.io/memory-pressure=:NoSchedule")
    cluster.kubectl(untaint.replace("NODE", NODE))
    cluster.kubectl(patch.replace("NODE", NODE))
    node = cluster.api.node()
    assert [each["key"] for each in node["spec"]["taints"]] == ["example.com/other"]
    assert {each["type"] for each in node["status"]["conditions"]} == {*ConditionType}

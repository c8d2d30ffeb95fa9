"""With `protection.nodeFit` a report says which node takes the first pods, and reads other nodes only for that."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.commands import check
from nodeagent.report.json_document import to_json
from tests.fake_kube import ApiServer
from tests.fake_kube.objects import node_object, pod
from tests.support import schemas
from tests.support.trees import Node, TreePod, write_node

TREE_POD = TreePod("default/web")
CONFIG = """
apiVersion: nodeagent.io/v1alpha1
kind: NodeAgentConfiguration
aboveKubelet: false
mergeDefaultEvictionSettings: false
evictionSoft: {{memory.available: "{value}"}}
evictionSoftGracePeriod: {{memory.available: 1h}}
protection: {{nodeFit: {on}}}
"""


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer(node="lab-node") as server:
        entry = node_object("worker-1")
        entry["status"]["conditions"].append({"type": "Ready", "status": "True"})
        entry["status"]["allocatable"] = {"memory": "4Gi", "pods": "10"}
        server.add_node(entry)
        server.add_pod_untold(
            pod("web", uid=TREE_POD.cgroup_uid, owner=("ReplicaSet", "web"), requests={"memory": "1Gi"})
        )
        yield server


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "node"
    path.mkdir()
    write_node(path, Node(pods=(TREE_POD,)))
    return path


def report(
    root: Path,
    api: ApiServer | None,
    *,
    value: str = "99%",
    on: str = "true",
    signal: str | None = None,
) -> dict[str, Any]:
    config = root.parent / "config.yaml"
    config.write_text(CONFIG.format(value=value, on=on))
    kubeconfig = str(api.kubeconfig(root.parent / "kubeconfig")) if api is not None else None
    options = check.options_from(
        host_root=str(root),
        config_file=str(config),
        kubeconfig=kubeconfig,
        node_name="lab-node",
        api="never" if api is None else "always",
        signal=signal,
    )
    checker = check.NodeChecker(options)
    try:
        checker.make_report()
        document = to_json(checker.make_report())
    finally:
        checker.close()
    assert list(schemas.strict().iter_errors(document)) == []
    return document


def fit_notes(document: dict[str, Any]) -> list[str]:
    return [each["message"] for each in document["notes"] if each["subject"] == "node fit"]


def other_nodes_listed(api: ApiServer) -> int:
    return len([each for each in api.sent("GET", "/nodes") if not each.query.get("fieldSelector")])


def test_while_a_soft_threshold_is_met_the_node_that_takes_a_pod_is_named(root: Path, api: ApiServer) -> None:
    assert fit_notes(report(root, api)) == ["default/web: node worker-1 takes it"]
    assert other_nodes_listed(api) == 1, "the second report of the same checker uses the first one's reading"


def test_why_no_node_takes_it_is_said_too(root: Path, api: ApiServer) -> None:
    api.add_pod_untold(pod("big", node="worker-1", requests={"memory": "4Gi"}))
    assert fit_notes(report(root, api)) == ["default/web: none of 1 other nodes takes it (1 too little memory)"]


def test_nothing_is_read_without_the_option_or_without_pressure(root: Path, api: ApiServer) -> None:
    assert fit_notes(report(root, api, on="false")) == []
    assert fit_notes(report(root, api, value="1Ki")) == []
    assert other_nodes_listed(api) == 0
    assert fit_notes(report(root, api, value="1Ki", signal="memory.available")) == [
        "default/web: node worker-1 takes it"
    ]


def test_a_missing_right_is_said_and_the_report_is_made(root: Path, api: ApiServer) -> None:
    api.forbid("list", "nodes")
    (note,) = fit_notes(report(root, api))
    assert note.startswith("whether another node takes a pod is unknown: ")


def test_without_an_api_server_it_is_unknown(root: Path) -> None:
    (note,) = fit_notes(report(root, None, signal="memory.available"))
    assert note == "whether another node takes a pod is unknown: no API server"

"""A report keeps our thresholds above the kubelet's, which the API server gives where the host shows none."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.commands import check
from nodeagent.report.json_document import to_json
from tests.fake_kube import ApiServer
from tests.support import schemas
from tests.support.trees import MI, Node, TreePod, write_node


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer() as server:
        server.kubelet_configuration = {"evictionHard": {"memory.available": "500Mi"}}
        yield server


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A node with a pod, and without a visible kubelet."""
    path = tmp_path / "node"
    path.mkdir()
    write_node(path, Node(pods=(TreePod("default/web"),)))
    return path


def report(root: Path, api: ApiServer | None) -> dict[str, Any]:
    kubeconfig = str(api.kubeconfig(root.parent / "kubeconfig")) if api is not None else None
    options = check.options_from(
        host_root=str(root), kubeconfig=kubeconfig, node_name="lab-node", api="never" if api is None else "always"
    )
    checker = check.NodeChecker(options)
    try:
        checker.make_report()
        document = to_json(checker.make_report())
    finally:
        checker.close()
    assert list(schemas.strict().iter_errors(document)) == []
    return document


def memory_thresholds(document: dict[str, Any]) -> dict[str, tuple[int, str | None]]:
    (memory,) = [each for each in document["signals"] if each["name"] == "memory.available"]
    return {each["tier"]: (each["value"], each["raisedAbove"]) for each in memory["thresholds"]}


def test_the_kubelets_own_answer_raises_the_thresholds_and_is_asked_for_once(root: Path, api: ApiServer) -> None:
    document = report(root, api)
    assert memory_thresholds(document) == {"hard": (750 * MI, "500Mi"), "soft": (1000 * MI, "500Mi")}
    assert (document["kubelet"]["configuration"], document["kubelet"]["assumed"]) == (
        "configz, from the API server",
        False,
    )
    assert len(api.sent("GET", "/proxy/configz")) == 1


def test_a_refusal_leaves_the_thresholds_and_says_that_the_kubelets_are_not_known(root: Path, api: ApiServer) -> None:
    api.forbid("get", "nodes/proxy")
    document = report(root, api)
    assert memory_thresholds(document) == {"hard": (200 * MI, None), "soft": (300 * MI, None)}
    assert document["kubelet"]["assumed"] is True
    assert "nodes/proxy" in document["kubelet"]["reason"]
    (note,) = [each["message"] for each in document["notes"] if each["subject"] == "kubelet"]
    assert note.startswith("configuration not known, defaults assumed: ")


def test_without_an_api_server_the_kubelet_of_a_node_with_pods_is_not_known(root: Path) -> None:
    document = report(root, None)
    assert document["kubelet"]["assumed"] is True
    assert memory_thresholds(document)["hard"] == (200 * MI, None)


def test_a_readable_file_is_enough(root: Path, api: ApiServer) -> None:
    file = root / "var/lib/kubelet/config.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("evictionHard: {memory.available: 400Mi}\n")
    assert memory_thresholds(report(root, api))["hard"] == (600 * MI, "400Mi")
    assert api.sent("GET", "/proxy/configz") == []


def test_a_threshold_of_half_the_capacity_is_reported_and_not_followed(root: Path, api: ApiServer) -> None:
    api.kubelet_configuration = {"evictionHard": {"memory.available": "90%"}}
    document = report(root, api)
    assert memory_thresholds(document)["hard"] == (200 * MI, None)
    messages = [each["message"] for each in document["notes"] if each["subject"] == "kubelet"]
    assert any("memory.available<90% is half of the capacity or more" in message for message in messages)

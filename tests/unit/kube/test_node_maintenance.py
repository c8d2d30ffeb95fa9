"""What the Node object says about maintenance, on a recorded Node."""

import json
from typing import Any

import pytest

from nodeagent.kube import node_maintenance, node_watch
from nodeagent.kube.node_watch import NodeView
from tests.support.paths import RECORDINGS


def reason(**changes: Any) -> str:
    return node_maintenance.reason(node_with(**changes))


def shutdown(**changes: Any) -> str:
    return node_maintenance.shutdown(node_with(**changes))


def node_with(**changes: Any) -> NodeView:
    """The recorded Node with these fields of its spec, and `conditions` in addition."""
    recorded = json.loads((RECORDINGS / "get-node.json").read_text("utf-8"))
    node = json.loads(recorded["response"]["body"])
    added = changes.pop("conditions", [])
    kinds = {each["type"] for each in added}
    kept = [each for each in node["status"]["conditions"] if each["type"] not in kinds]
    node["status"]["conditions"] = [*kept, *added]
    node["spec"] |= changes
    return node_watch.decode_node(json.dumps(node).encode())


def condition(name: str, status: str, why: str = "", message: str = "") -> dict[str, str]:
    return {"type": name, "status": status, "reason": why, "message": message}


def test_an_ordinary_node_is_not_under_maintenance() -> None:
    assert reason() == ""
    assert reason(unschedulable=False) == ""
    assert reason(taints=[{"key": "nodeagent.io/memory-pressure", "effect": "NoSchedule"}]) == ""


def test_a_cordoned_node_is() -> None:
    assert reason(unschedulable=True) == "it is cordoned"


@pytest.mark.parametrize("name", node_maintenance.LIFECYCLE_CONDITIONS)
def test_a_lifecycle_condition_counts_while_it_is_true(name: str) -> None:
    assert reason(conditions=[condition(name, "True", "Upgrade")]) == f"its condition {name} is True (Upgrade)"
    assert reason(conditions=[condition(name, "True")]) == f"its condition {name} is True"
    for status in ("False", "Unknown"):
        assert reason(conditions=[condition(name, status, "Upgrade")]) == ""


def test_maintenance_that_is_planned_does_not_count() -> None:
    assert reason(conditions=[condition("MaintenancePlanned", "True")]) == ""


def test_a_graceful_shutdown_is_recognised_by_the_kubelets_words() -> None:
    down = "its kubelet shuts it down"
    text = "node is shutting down"
    assert reason(conditions=[condition("Ready", "False", "KubeletNotReady", text)]) == down
    assert reason(conditions=[condition("Ready", "False", "KubeletNotReady", f"[container runtime, {text}]")]) == down
    assert reason(conditions=[condition("Ready", "False", text)]) == down
    assert reason(conditions=[condition("Ready", "False", "KubeletNotReady", "PLEG is not healthy")]) == ""
    assert reason(conditions=[condition("Ready", "True", "KubeletReady", f"no longer: {text}")]) == ""


@pytest.mark.parametrize("key", list(node_maintenance.TAINTS))
def test_a_taint_of_a_tool_that_empties_the_node_counts(key: str) -> None:
    assert reason(taints=[{"key": key, "effect": "NoSchedule"}]).endswith(f"(taint {key})")


def test_the_condition_is_named_before_the_cordon() -> None:
    assert "DrainInProgress" in reason(unschedulable=True, conditions=[condition("DrainInProgress", "True")])


def test_a_shutdown_is_told_apart_and_named_before_a_drain() -> None:
    drain = condition("DrainInProgress", "True")
    ready = condition("Ready", "False", "KubeletNotReady", "node is shutting down")
    graceful = condition(node_maintenance.GRACEFUL_SHUTDOWN, "True")
    assert shutdown() == shutdown(unschedulable=True, conditions=[drain]) == ""
    for kind, text in ((ready, "its kubelet shuts it down"), (graceful, f"its condition {graceful['type']} is True")):
        assert shutdown(conditions=[drain, kind]) == reason(conditions=[drain, kind]) == text
    assert shutdown(conditions=[condition(node_maintenance.GRACEFUL_SHUTDOWN, "False")]) == ""

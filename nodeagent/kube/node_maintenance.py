"""Whether the own Node object says that the node is under maintenance: cordoned, drained, shutting down, upgraded.

Only what Kubernetes, the cluster autoscaler and Karpenter document counts. A condition counts while it is True, not
while it is False or Unknown (https://kubernetes.io/docs/reference/node/node-lifecycle-conditions/).
"""

from collections.abc import Mapping
from typing import Final

from nodeagent.kube.node_watch import NodeView

GRACEFUL_SHUTDOWN: Final = "GracefulNodeShutdownInProgress"
LIFECYCLE_CONDITIONS: Final = ("DrainInProgress", "Drained", "MaintenanceInProgress", GRACEFUL_SHUTDOWN)
"""KEP-5683, alpha in Kubernetes 1.37. MaintenancePlanned is about the future."""
SHUTTING_DOWN: Final = "node is shutting down"
"""The kubelet's Ready condition during a graceful node shutdown contains this
(https://kubernetes.io/docs/concepts/cluster-administration/node-shutdown/)."""
TAINTS: Final[Mapping[str, str]] = {
    "node.kubernetes.io/out-of-service": "it is out of service",
    "ToBeDeletedByClusterAutoscaler": "the cluster autoscaler removes it",
    "karpenter.sh/disrupted": "Karpenter removes it",
}
"""Taints that only a tool which empties the node sets, and what they mean."""


def reason(node: NodeView) -> str:
    """Why the node is under maintenance, as the rest of `the node is under maintenance: ...`; empty if it is not."""
    if down := shutdown(node):
        return down
    for name in LIFECYCLE_CONDITIONS:
        if text := _true_condition(node, name):
            return text
    for taint in node.taints:
        if taint.key in TAINTS:
            return f"{TAINTS[taint.key]} (taint {taint.key})"
    return "it is cordoned" if node.unschedulable else ""


def shutdown(node: NodeView) -> str:
    """The same if the kubelet shuts the node down, and with that ends its pods itself, with preStop and a grace period;
    else empty."""
    ready = node.conditions.get("Ready")
    if ready is not None and ready.status != "True" and SHUTTING_DOWN in f"{ready.reason} {ready.message}":
        return "its kubelet shuts it down"
    return _true_condition(node, GRACEFUL_SHUTDOWN)


def _true_condition(node: NodeView, name: str) -> str:
    condition = node.conditions.get(name)
    if condition is None or condition.status != "True":
        return ""
    return f"its condition {name} is True{f' ({condition.reason})' if condition.reason else ''}"

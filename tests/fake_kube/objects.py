"""Pods and nodes as a kubelet and an API server keep them."""

import uuid
from typing import Any

from tests.fake_kube.messages import Json

KUBELET_FALSE = {
    "MemoryPressure": ("KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
    "DiskPressure": ("KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    "PIDPressure": ("KubeletHasSufficientPID", "kubelet has sufficient PID available"),
}


def pod(name: str, *, namespace: str = "default", node: str = "lab-node", uid: str = "", **fields: Any) -> Json:
    """A running pod. Fields: labels, annotations, owner (kind, name), priority, qos, requests, limits, phase, grace,
    spec (merged in), status (merged in)."""
    requests, limits = fields.get("requests", {}), fields.get("limits", {})
    metadata: Json = {
        "name": name,
        "namespace": namespace,
        "uid": uid or str(uuid.uuid4()),
        "creationTimestamp": fields.get("created", "2026-11-20T23:13:40Z"),
        "labels": fields.get("labels", {}),
        "annotations": fields.get("annotations", {}),
    }
    if owner := fields.get("owner"):
        metadata["ownerReferences"] = [
            {"apiVersion": "apps/v1", "kind": owner[0], "name": owner[1], "uid": f"uid-{owner[1]}", "controller": True}
        ]
    return {
        "metadata": metadata,
        "spec": {
            "containers": [{"name": "c", "image": "x", "resources": {"requests": requests, "limits": limits}}],
            "nodeName": node,
            "priority": fields.get("priority", 0),
            "terminationGracePeriodSeconds": fields.get("grace", 30),
            **fields.get("spec", {}),
        },
        "status": {
            "phase": fields.get("phase", "Running"),
            "qosClass": fields.get("qos", "BestEffort" if not requests else "Burstable"),
            "startTime": "2026-11-20T23:13:49Z",
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-20T23:13:53Z"}],
            "containerStatuses": [
                {
                    "name": "c",
                    "state": {"running": {"startedAt": "2026-11-20T23:13:53Z"}},
                    "restartCount": 0,
                    "containerID": f"containerd://{uuid.uuid4().hex}",
                }
            ],
            **fields.get("status", {}),
        },
    }


def node_object(name: str, *, address: str = "10.0.2.15") -> Json:
    """A Node as a kubelet without pressure keeps it."""
    then = "2026-11-20T23:12:04Z"
    conditions = [
        {
            "type": kind,
            "status": "False",
            "lastHeartbeatTime": then,
            "lastTransitionTime": then,
            "reason": reason,
            "message": message,
        }
        for kind, (reason, message) in KUBELET_FALSE.items()
    ]
    addresses = [{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": name}]
    return {
        "kind": "Node",
        "apiVersion": "v1",
        "metadata": {"name": name, "uid": str(uuid.uuid4()), "labels": {"kubernetes.io/hostname": name}},
        "spec": {},
        "status": {"conditions": conditions, "addresses": addresses},
    }


def is_ready(pod: Json) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))

"""daemonset.yaml's ConfigMap and DaemonSet for one node of any distribution, and why its pod may not start there."""

import json
from collections.abc import Iterable
from typing import Final

import yaml

from tests.e2e.cluster import HOPELESS, Json

USUAL_IMAGES: Final = ("/var/lib/containerd", "/var/lib/containers", "/var/lib/docker")
"""What the agent finds by itself: containerd, CRI-O, Docker."""
RUNTIMES: Final = dict(zip(("containerd", "cri-o", "docker"), USUAL_IMAGES, strict=True))
EMBEDDED: Final = {
    "+k3s": "/var/lib/rancher/k3s/agent/containerd",
    "+rke2": "/var/lib/rancher/rke2/agent/containerd",
}
"""By a part of the kubelet's version: these bring a containerd of their own."""
VOLUMES: Final = {"kubeletDir": "kubelet", "imageDir": "images", "podLogsDir": "pod-logs"}
"""Keys of `sampling`, and the volumes of daemonset.yaml with what they name."""
UNREACHABLE: Final = {
    "evictionHard": {
        **dict.fromkeys(("memory.available", "nodefs.available", "imagefs.available"), "1Mi"),
        **dict.fromkeys(("nodefs.inodesFree", "imagefs.inodesFree", "pid.available"), "1"),
    },
    "evictionSoft": {},
    "evictionSoftGracePeriod": {},
    "aboveKubelet": False,
}
"""Thresholds that no node which runs the test meets: also a pod of a namespace that is made during it is safe."""
REFUSALS: Final = ("is forbidden", "denied the request", "insufficient quota")
"""In a FailedCreate: Pod Security, SecurityContextConstraints and quotas; webhooks; GKE's limit of a priority class."""
IMAGE_REASONS: Final = HOPELESS - {"CrashLoopBackOff", "CreateContainerConfigError"}


def image_dir(node: Json, sampling: Json) -> str:
    """Where the node's container runtime keeps its images, as far as its status tells."""
    info = node["status"].get("nodeInfo", {})
    runtime = info.get("containerRuntimeVersion", "").partition("://")[0]
    embedded = (path for mark, path in EMBEDDED.items() if mark in info.get("kubeletVersion", ""))
    found = next(embedded, "") if runtime == "containerd" else ""
    return str(sampling.get("imageDir") or found or RUNTIMES.get(runtime, USUAL_IMAGES[0]))


def on_one_node(document: Json, node: Json, sampling: Json, image: str, protected: Iterable[str]) -> Json:
    """The DaemonSet on this node alone, with the directories that `sampling` or the node's status name.

    Its pod has no priority class: with system-node-critical the scheduler would evict a stranger's pods from a full
    node, and GKE wants a quota for it. `protected`: the namespaces whose pods it never evicts."""
    places = {**sampling, "imageDir": image_dir(node, sampling)}
    if document["kind"] == "ConfigMap":
        config = {**yaml.safe_load(document["data"]["config.yaml"]), **UNREACHABLE}
        own = {key: value for key, value in places.items() if value not in USUAL_IMAGES}
        config["protection"] = {"namespaces": list(protected)}
        config["sampling"] = {**config.get("sampling", {}), **own}
        document["data"]["config.yaml"] = json.dumps(config)
        return document
    pod = document["spec"]["template"]["spec"]
    pod["affinity"] = _only(node["metadata"]["name"])
    del pod["priorityClassName"]
    [container] = pod["containers"]
    container["image"] = image
    for key, volume in VOLUMES.items():
        for mounted in [each for each in pod["volumes"] if each["name"] == volume and key in places]:
            mounted["hostPath"]["path"] = places[key]
            mount = next(each for each in container["volumeMounts"] if each["name"] == volume)
            mount["mountPath"] = f"/host{places[key]}"
    return document


def _only(node: str) -> Json:
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    terms = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def why_not_started(pod: Json, events: Iterable[Json]) -> str:
    """What of the cluster keeps the pod from starting: a refusal of the pod, a missing directory, a full node, an image
    that cannot be had. Empty for anything else."""
    for event in events:
        reason, message = event.get("reason"), event.get("message", "")
        refused = reason == "FailedCreate" and any(each in message for each in REFUSALS)
        if refused or (reason == "FailedMount" and "hostPath type check failed" in message):
            return f"{reason}: {message}"
    status = pod.get("status", {})
    for condition in status.get("conditions", ()):
        message = str(condition.get("message", ""))
        if condition["type"] == "PodScheduled" and ("Insufficient " in message or "Too many pods" in message):
            return message
    states = (entry.get("state", {}).get("waiting", {}) for entry in status.get("containerStatuses", ()))
    without = (f"{each['reason']}: {each.get('message', '')}" for each in states if each.get("reason") in IMAGE_REASONS)
    return next(without, "")

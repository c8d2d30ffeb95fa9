"""A pod that can only run on this node is distinguished from one that can run elsewhere."""

import json
from typing import Any

import pytest

from nodeagent.kube.pod_decoder import decode_pod
from nodeagent.model import Pod
from tests.fake_kube import pod
from tests.support.paths import DATA

Json = dict[str, Any]
PLACEMENTS = DATA / "cluster"


def read(*, owner: tuple[str, str] = ("ReplicaSet", "r"), **fields: Any) -> Pod:
    return decode_pod(json.dumps(pod("p", owner=owner, **fields)).encode())


@pytest.mark.parametrize(
    ("spec", "bound"),
    [
        ({}, False),
        ({"nodeSelector": {"kubernetes.io/hostname": "lab-node"}}, True),
        ({"nodeSelector": {"disk": "ssd"}}, False),
        ([[("matchFields", "metadata.name", "In", ["lab-node"])]], True),
        ([[("matchExpressions", "kubernetes.io/hostname", "In", ["lab-node"])]], True),
        ([[("matchExpressions", "kubernetes.io/hostname", "In", ["a", "lab-node"])]], False),
        ([[("matchExpressions", "kubernetes.io/hostname", "NotIn", ["a"])]], False),
        ([[("matchFields", "metadata.name", "In", ["a"])], [("matchExpressions", "zone", "In", ["z"])]], False),
        ([[("matchFields", "metadata.name", "In", ["a"])], [("matchFields", "metadata.name", "In", ["b"])]], False),
    ],
)
def test_a_pod_that_can_only_run_on_this_node_has_the_reason(spec: Any, bound: bool) -> None:
    if isinstance(spec, list):
        terms = []
        for term in spec:
            built: dict[str, list[Json]] = {}
            for kind, key, operator, values in term:
                built.setdefault(kind, []).append({"key": key, "operator": operator, "values": values})
            terms.append(built)
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        spec = {"affinity": {"nodeAffinity": required}}
    assert bool(read(spec=spec).node_bound) == bound
    assert read(spec=spec, owner=("DaemonSet", "d")).node_bound == ""


def created(*fields: str, manager: str = "kube-controller-manager", **more: Any) -> Json:
    """An entry of managedFields as a create leaves it."""
    spec: Json = {"f:containers": {}, "f:restartPolicy": {}, **{f"f:{name}": {} for name in fields}}
    managed: Json = {"f:metadata": {"f:labels": {}}, "f:spec": spec}
    return {"manager": manager, "operation": "Update", "apiVersion": "v1", "fieldsV1": managed, **more}


def test_a_node_name_in_the_template_binds_and_the_schedulers_choice_does_not() -> None:
    def bound(owner: str, *entries: Json) -> str:
        entry = pod("p", owner=(owner, "o"))
        entry["metadata"]["managedFields"] = list(entries)
        return decode_pod(json.dumps(entry).encode()).node_bound

    kubelet = {"manager": "kubelet", "subresource": "status", "fieldsV1": {"f:status": {"f:phase": {}}}}
    assert bound("ReplicaSet", created("nodeName"), kubelet) == "nodeName lab-node in its template"
    assert bound("ReplicaSet", created(), kubelet) == ""
    assert bound("ReplicaSet") == ""
    assert bound("DaemonSet", created("nodeName")) == ""


def test_no_recorded_pod_that_a_scheduler_placed_is_bound() -> None:
    """The metadata of real pods (1.36.2), each placed by the scheduler, a DaemonSet's too."""
    recorded = json.loads((PLACEMENTS / "scheduled-pods.json").read_text())
    assert len(recorded) > 5
    for name, metadata in recorded.items():
        entry = pod(name)
        entry["metadata"] |= metadata
        assert any("f:spec" in each["fieldsV1"] for each in metadata["managedFields"])
        assert decode_pod(json.dumps(entry).encode()).node_bound == ""

"""The admission policies hold a token to its own node: their expressions, evaluated over requests as the API server
sees them."""

import copy
import json
import re
from pathlib import Path
from typing import Any, Final

import pytest

from tests.deploy.manifests import Document, documents

celpy = pytest.importorskip("celpy", reason="needs cel-python (dependency group test)")

AGENT: Final = "system:serviceaccount:nodeagent:nodeagent"
NODE: Final[Document] = {
    "metadata": {"name": "node-a", "labels": {"kubernetes.io/hostname": "node-a"}},
    "spec": {"taints": [{"key": "node.kubernetes.io/memory-pressure", "effect": "NoSchedule"}]},
    "status": {
        "capacity": {"memory": "2984840Ki", "pods": "110"},
        "allocatable": {"memory": "2882440Ki", "pods": "110"},
        "addresses": [{"type": "InternalIP", "address": "192.0.2.7"}],
        "conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": "True"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
        "nodeInfo": {"kubeletVersion": "v1.36.2", "machineID": "1"},
        "images": [{"names": ["registry.k8s.io/pause:3.10"], "sizeBytes": 320368}],
        "runtimeHandlers": [{"name": "runc", "features": {"userNamespaces": True}}],
        "features": {"supplementalGroupsPolicy": True},
    },
}
POD: Final[Document] = {"metadata": {"name": "web", "namespace": "shop"}, "spec": {"nodeName": "node-a"}}


def request(
    resource: str, *, sub: str = "", verb: str = "UPDATE", user: str = AGENT, token_node: str | None = "node-a"
) -> Document:
    """What policies know as `request`: an AdmissionReview's, in which an empty subResource is left out."""
    extra = {} if token_node is None else {"extra": {"authentication.kubernetes.io/node-name": [token_node]}}
    return {
        "operation": verb,
        "resource": {"group": "", "version": "v1", "resource": resource},
        **({"subResource": sub} if sub else {}),
        "userInfo": {"username": user, **extra},
    }


def evaluate(expression: str, known: dict[str, Any]) -> Any:
    environment = celpy.Environment()
    program = environment.program(environment.compile(expression))
    return program.evaluate({name: celpy.json_to_cel(value) for name, value in known.items()})


def matches(policy: Document, asked: Document) -> bool:
    """Whether one of the policy's rules is about this request."""
    name = "/".join([asked["resource"]["resource"], *([asked["subResource"]] if "subResource" in asked else [])])
    return any(
        asked["resource"]["group"] in rule["apiGroups"]
        and asked["resource"]["version"] in rule["apiVersions"]
        and asked["operation"] in rule["operations"]
        and name in rule["resources"]
        for rule in policy["spec"]["matchConstraints"]["resourceRules"]
    )


def refused(
    asked: Document, *, old: Document, new: Document | None = None, made: list[Document] | None = None
) -> list[str]:
    """The messages of the validations that fail, of every policy with a binding in `made` (daemonset.yaml); empty when
    the request passes."""
    made = documents() if made is None else made
    bound = {each["spec"]["policyName"] for each in made if each["kind"] == "ValidatingAdmissionPolicyBinding"}
    policies = [each for each in made if each["kind"] == "ValidatingAdmissionPolicy" and matches(each, asked)]
    assert policies, "a request that no policy is about"
    messages = []
    for policy in (each for each in policies if each["metadata"]["name"] in bound):
        known: dict[str, Any] = {"request": asked, "oldObject": old, "object": new}
        if not all(evaluate(condition["expression"], known) for condition in policy["spec"]["matchConditions"]):
            continue
        known["variables"] = {}
        for variable in policy["spec"]["variables"]:
            known["variables"][variable["name"]] = evaluate(variable["expression"], known)
        messages += [
            rule["message"] for rule in policy["spec"]["validations"] if not evaluate(rule["expression"], known)
        ]
    return messages


def changed(node: Document, part: str, **values: Any) -> Document:
    """A copy with other values in `metadata`, `spec` or `status`; None takes a field away."""
    other = copy.deepcopy(node)
    other[part].update(values)
    other[part] = {name: value for name, value in other[part].items() if value is not None}
    return other


OWN_NODE: Final = "nodeagent may change only its own node"
OWN_PODS: Final = "nodeagent may change only pods of its own node"
METADATA: Final = "nodeagent may not change a node's metadata, cordon it or say which machine it is"
TAINTS: Final = "nodeagent may change no taints but nodeagent.io/* with NoSchedule"
STATUS: Final = "nodeagent may change nothing of a node's status but conditions"
CONDITIONS: Final = "nodeagent may change no conditions but those of memory, disk and PID pressure"
FENCE: Final = {"key": "nodeagent.io/memory-pressure", "effect": "NoSchedule"}


def test_pressure_conditions_of_the_own_node_may_come_change_and_go() -> None:
    ready = NODE["status"]["conditions"][1]
    pressed = changed(
        NODE,
        "status",
        conditions=[
            {"type": "MemoryPressure", "status": "True"},
            ready,
            {"type": "NodeAgentMemoryPressure", "status": "True"},
        ],
    )
    assert refused(request("nodes", sub="status"), old=NODE, new=pressed) == []
    assert refused(request("nodes", sub="status"), old=pressed, new=NODE) == []
    bare = changed(NODE, "status", conditions=None)
    assert refused(request("nodes", sub="status"), old=bare, new=bare) == []


def test_every_condition_that_the_agent_publishes_may_be_published() -> None:
    from nodeagent.cluster.conditions import OWN_PREFIX
    from nodeagent.model import ConditionType

    ready = NODE["status"]["conditions"][1]
    for kind in ConditionType:
        for name in (kind.value, OWN_PREFIX + kind.value):
            new = changed(NODE, "status", conditions=[ready, {"type": name, "status": "True"}])
            assert refused(request("nodes", sub="status"), old=NODE, new=new) == [], name


@pytest.mark.parametrize("sub", ["", "status"])
def test_another_node_may_not_be_touched(sub: str) -> None:
    other = changed(NODE, "metadata", name="node-b")
    assert refused(request("nodes", sub=sub), old=other, new=other) == [OWN_NODE]


def test_a_token_that_names_no_node_may_change_none() -> None:
    """Tokens of before Kubernetes 1.30, or made by `kubectl create token`."""
    assert refused(request("nodes", sub="status", token_node=None), old=NODE, new=NODE) == [OWN_NODE]
    assert refused(request("nodes", sub="status", token_node=""), old=NODE, new=NODE) == [OWN_NODE]
    other_claims = request("nodes", token_node=None)
    other_claims["userInfo"]["extra"] = {"authentication.kubernetes.io/pod-name": ["nodeagent-x"]}
    assert refused(other_claims, old=NODE, new=NODE) == [OWN_NODE]


def test_others_are_no_concern_of_the_policies() -> None:
    other = changed(NODE, "metadata", name="node-b")
    assert refused(request("nodes", user="system:node:node-b"), old=other, new=changed(other, "spec", taints=[])) == []
    assert refused(request("pods", verb="DELETE", user="system:node:node-b"), old=POD) == []


def test_an_own_taint_may_come_and_go() -> None:
    fenced = changed(NODE, "spec", taints=[*NODE["spec"]["taints"], FENCE])
    assert refused(request("nodes"), old=NODE, new=fenced) == []
    assert refused(request("nodes"), old=fenced, new=NODE) == []
    bare = changed(NODE, "spec", taints=None)
    assert refused(request("nodes"), old=bare, new=changed(NODE, "spec", taints=[FENCE])) == []
    assert refused(request("nodes"), old=changed(NODE, "spec", taints=[FENCE]), new=bare) == []


def test_a_foreign_taint_may_neither_come_nor_go() -> None:
    assert refused(request("nodes"), old=NODE, new=changed(NODE, "spec", taints=None)) == [TAINTS]
    drained = changed(
        NODE, "spec", taints=[*NODE["spec"]["taints"], {"key": "nodeagent.example", "effect": "NoExecute"}]
    )
    assert refused(request("nodes"), old=NODE, new=drained) == [TAINTS]


def test_an_own_taint_may_not_drive_out_the_pods_that_run() -> None:
    for effect in ("NoExecute", "PreferNoSchedule"):
        driven = changed(NODE, "spec", taints=[*NODE["spec"]["taints"], {**FENCE, "effect": effect}])
        assert refused(request("nodes"), old=NODE, new=driven) == [TAINTS]


def test_the_policy_knows_every_field_of_a_nodes_status() -> None:
    """Conditions have a rule of their own."""
    schemas = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate (dependency group test)")
    [versions] = Path(schemas.__file__).parent.glob("kubernetes-json-schema")
    [policy] = [d for d in documents() if d["kind"].endswith("Policy") and d["metadata"]["name"].endswith("-node")]
    [rule] = [each["expression"] for each in policy["spec"]["validations"] if each["message"] == STATUS]
    compared = set(re.findall(r"[(! ]object\.status\.(\w+)", rule)) & set(re.findall(r"oldObject\.status\.(\w+)", rule))
    newest = max(versions.glob("v1.*"), key=lambda path: int(path.name.split(".")[1]))
    fields = json.loads((newest / "nodestatus-v1.json").read_text())["properties"].keys()
    assert compared == fields - {"conditions"}, newest.name


@pytest.mark.parametrize("sub", ["", "status"])
@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("spec", {"unschedulable": True}),
        ("spec", {"providerID": "aws:///us-east-1a/i-0123"}),
        ("spec", {"podCIDR": "10.0.0.0/24", "podCIDRs": ["10.0.0.0/24"]}),
        ("metadata", {"labels": {"kubernetes.io/hostname": "node-a", "tier": "gold"}}),
        ("metadata", {"labels": None}),
        ("metadata", {"annotations": {"a": "b"}}),
        ("metadata", {"finalizers": ["example.com/never"]}),
        ("metadata", {"ownerReferences": [{"kind": "ConfigMap", "name": "gone", "uid": "1"}]}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_metadata_may_not_change_by_either_way(part: str, values: Document, sub: str) -> None:
    """A patch of the status reaches labels and annotations too."""
    assert refused(request("nodes", sub=sub), old=NODE, new=changed(NODE, part, **values)) == [METADATA]


@pytest.mark.parametrize(
    "values",
    [
        {"capacity": {"memory": "1Ti", "pods": "110"}},
        {"allocatable": {"memory": "0", "pods": "110"}},
        {"addresses": [{"type": "InternalIP", "address": "192.0.2.66"}]},
        {"images": []},
        {"volumesInUse": ["kubernetes.io/csi/x"]},
        {"volumesAttached": [{"name": "x", "devicePath": "y"}]},
        {"nodeInfo": {"kubeletVersion": "v1.0.0", "machineID": "1"}},
        {"daemonEndpoints": {"kubeletEndpoint": {"Port": 1}}},
        {"runtimeHandlers": [{"name": "kata"}]},
        {"runtimeHandlers": None},
        {"declaredFeatures": ["InPlacePodVerticalScaling"]},
        {"features": {"supplementalGroupsPolicy": False}},
        {"features": None},
        {"config": {"error": "x"}},
        {"phase": "Running"},
    ],
    ids=lambda values: "-".join(f"{name}-gone" if value is None else name for name, value in values.items()),
)
def test_nothing_else_of_the_status_may_change(values: Document) -> None:
    assert refused(request("nodes", sub="status"), old=NODE, new=changed(NODE, "status", **values)) == [STATUS]


def test_a_condition_of_somebody_else_may_neither_change_nor_go() -> None:
    pressure, ready = NODE["status"]["conditions"]
    for conditions in ([pressure, {**ready, "status": "False"}], [pressure], None):
        new = changed(NODE, "status", conditions=conditions)
        assert refused(request("nodes", sub="status"), old=NODE, new=new) == [CONDITIONS]


def test_a_pod_of_the_own_node_may_be_marked_and_deleted_and_another_may_not() -> None:
    assert refused(request("pods", verb="DELETE"), old=POD) == []
    assert refused(request("pods", sub="status"), old=POD, new=POD) == []
    for token_node in ("node-b", "", None):
        assert refused(request("pods", verb="DELETE", token_node=token_node), old=POD) == [OWN_PODS]
        assert refused(request("pods", sub="status", token_node=token_node), old=POD, new=POD) == [OWN_PODS]


def test_a_pod_that_is_not_scheduled_is_nobodys() -> None:
    pending: Document = {"metadata": {"name": "web"}, "spec": {}}
    assert refused(request("pods", verb="DELETE"), old=pending) == [OWN_PODS]

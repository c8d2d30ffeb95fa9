"""The admission policy holds a token to its own node: its expressions, evaluated over requests as the API server sees
them."""

import copy
from typing import Any, Final

import pytest

from tests.deploy.manifests import Document, the

celpy = pytest.importorskip("celpy", reason="needs cel-python (dependency group test)")

AGENT: Final = "system:serviceaccount:nodeagent:nodeagent"
NODE: Final[Document] = {
    "metadata": {"name": "node-a", "labels": {"kubernetes.io/hostname": "node-a"}},
    "spec": {"taints": [{"key": "node.kubernetes.io/memory-pressure", "effect": "NoSchedule"}]},
}
POD: Final[Document] = {"metadata": {"name": "web", "namespace": "shop"}, "spec": {"nodeName": "node-a"}}


def request(
    resource: str, name: str, *, sub: str = "", user: str = AGENT, token_node: str | None = "node-a"
) -> Document:
    extra = {} if token_node is None else {"extra": {"authentication.kubernetes.io/node-name": [token_node]}}
    return {
        "name": name,
        "resource": {"group": "", "version": "v1", "resource": resource},
        "subResource": sub,
        "userInfo": {"username": user, **extra},
    }


def evaluate(expression: str, known: dict[str, Any]) -> Any:
    environment = celpy.Environment()
    program = environment.program(environment.compile(expression))
    return program.evaluate({name: celpy.json_to_cel(value) for name, value in known.items()})


def refused(asked: Document, *, old: Document, new: Document | None = None) -> list[str]:
    """The messages of the validations that fail; empty when the request passes."""
    spec = the("ValidatingAdmissionPolicy")["spec"]
    known: dict[str, Any] = {"request": asked, "oldObject": old, "object": new}
    if not all(evaluate(condition["expression"], known) for condition in spec["matchConditions"]):
        return []
    known["variables"] = {}
    for variable in spec["variables"]:
        known["variables"][variable["name"]] = str(evaluate(variable["expression"], known))
    return [rule["message"] for rule in spec["validations"] if not evaluate(rule["expression"], known)]


def changed(node: Document, **spec: Any) -> Document:
    other = copy.deepcopy(node)
    other["spec"].update(spec)
    return other


OWN_ONLY: Final = "nodeagent may change only its own node and the pods on it"


def test_the_status_of_the_own_node_may_be_patched() -> None:
    assert refused(request("nodes", "node-a", sub="status"), old=NODE, new=NODE) == []


def test_another_nodes_status_may_not() -> None:
    assert refused(request("nodes", "node-b", sub="status"), old=NODE, new=NODE) == [OWN_ONLY]


def test_a_token_that_names_no_node_may_change_none() -> None:
    """Tokens of before Kubernetes 1.30, or made by `kubectl create token`."""
    assert refused(request("nodes", "node-a", sub="status", token_node=None), old=NODE, new=NODE) == [OWN_ONLY]


def test_others_are_no_concern_of_the_policy() -> None:
    assert refused(request("nodes", "node-b", user="system:node:node-b"), old=NODE, new=NODE) == []


def test_an_own_taint_may_come_and_go() -> None:
    fenced = changed(
        NODE, taints=[*NODE["spec"]["taints"], {"key": "nodeagent.io/memory-pressure", "effect": "NoSchedule"}]
    )
    assert refused(request("nodes", "node-a"), old=NODE, new=fenced) == []
    assert refused(request("nodes", "node-a"), old=fenced, new=NODE) == []


def test_a_foreign_taint_may_not_be_taken_away() -> None:
    bare = changed(NODE)
    del bare["spec"]["taints"]
    assert refused(request("nodes", "node-a"), old=NODE, new=bare) == [
        "nodeagent may change no taints but nodeagent.io/*"
    ]


def test_a_node_may_not_be_cordoned_or_relabelled() -> None:
    message = "nodeagent may not change a node's labels or cordon it"
    assert refused(request("nodes", "node-a"), old=NODE, new=changed(NODE, unschedulable=True)) == [message]
    relabelled = copy.deepcopy(NODE)
    relabelled["metadata"]["labels"]["tier"] = "gold"
    assert refused(request("nodes", "node-a"), old=NODE, new=relabelled) == [message]


def test_a_pod_of_the_own_node_may_be_deleted_and_another_may_not() -> None:
    assert refused(request("pods", "web"), old=POD) == []
    assert refused(request("pods", "web", token_node="node-b"), old=POD) == [OWN_ONLY]


def test_a_pod_that_is_not_scheduled_is_nobodys() -> None:
    pending: Document = {"metadata": {"name": "web"}, "spec": {}}
    assert refused(request("pods", "web"), old=pending) == [OWN_ONLY]

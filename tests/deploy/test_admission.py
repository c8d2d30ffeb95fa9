"""The admission policies hold a token to its own node and to what the agent does: their expressions, evaluated over
requests as the API server sees them."""

import copy
import functools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from nodeagent.actuators import pod_events
from nodeagent.actuators.event_writer import REFRESH_S, EventReason, EventWriter, KubernetesEvent
from nodeagent.actuators.eviction_requests import EvictionRequests
from nodeagent.actuators.eviction_slots import EvictionSlots
from nodeagent.actuators.evictions import EvictionSender
from nodeagent.config.schema import ProtectionConfig
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.node_identity import Identity, confirm_identity
from nodeagent.kube.pod_decoder import decode_pod
from nodeagent.kube.transport import Transport, connect
from nodeagent.model import Amount, EvictionRequestOrder, Method, Outcome, OutcomeKind, Signal, Threshold, Tier, Victim
from tests.fake_kube import ApiServer, pod
from tests.support.manifests import Document, direct_rights, document_of, documents, read_documents
from tests.support.paths import REPOSITORY

celpy = pytest.importorskip("celpy", reason="needs cel-python (dependency group test)")

AGENT: Final = "system:serviceaccount:nodeagent:nodeagent"
NODE: Final[Document] = {
    "metadata": {
        "name": "node-a",
        "labels": {"kubernetes.io/hostname": "node-a"},
        "finalizers": ["example.com/machine"],
        "ownerReferences": [{"kind": "Machine", "name": "m-1", "uid": "1"}],
        "resourceVersion": "7",
    },
    "spec": {
        "podCIDR": "10.0.0.0/24",
        "taints": [{"key": "node.kubernetes.io/memory-pressure", "effect": "NoSchedule"}],
    },
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
    resource: str,
    *,
    sub: str = "",
    verb: str = "UPDATE",
    user: str = AGENT,
    token_node: str | None = "node-a",
    namespace: str = "shop",
    group: str = "",
    extra: Document | None = None,
) -> Document:
    """What policies know as `request`: an AdmissionReview's, in which an empty subResource or extra is left out. A user
    who is no ServiceAccount has the extra that is given."""
    if extra is None:
        of_no_pod = token_node is None or user.startswith("system:node:")
        extra = {} if of_no_pod else {"authentication.kubernetes.io/node-name": [token_node]}
    return {
        "operation": verb,
        "resource": {"group": group, "version": "v1", "resource": resource},
        "namespace": "" if resource == "nodes" else namespace,
        **({"subResource": sub} if sub else {}),
        "userInfo": {"username": user, **({"extra": extra} if extra else {})},
    }


@functools.cache
def compiled(expression: str) -> Any:
    environment = celpy.Environment()
    return environment.program(environment.compile(expression))


def evaluate(expression: str, known: dict[str, Any]) -> Any:
    return compiled(expression).evaluate({name: celpy.json_to_cel(value) for name, value in known.items()})


def matches(policy: Document, asked: Document) -> bool:
    """Whether one of the policy's rules is about this request."""
    name = "/".join([asked["resource"]["resource"], *([asked["subResource"]] if "subResource" in asked else [])])
    return any(
        asked["resource"]["group"] in rule["apiGroups"]
        and {asked["resource"]["version"], "*"} & {*rule["apiVersions"]}
        and asked["operation"] in rule["operations"]
        and name in rule["resources"]
        for rule in policy["spec"]["matchConstraints"]["resourceRules"]
    )


def refused(
    asked: Document, *, old: Document | None, new: Document | None = None, made: list[Document] | None = None
) -> list[str]:
    """The messages of the validations that fail, of every policy with a binding in `made` (the manifests); empty when
    the request passes."""
    return [message for _, message in refusals(asked, old=old, new=new, made=made)]


def refusals(
    asked: Document, *, old: Document | None, new: Document | None = None, made: list[Document] | None = None
) -> list[tuple[str, str]]:
    """With the name of the policy."""
    made = [*documents(), *leases(), *eviction_request_rights(), *resizes()] if made is None else made
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
            (policy["metadata"]["name"], rule["message"])
            for rule in policy["spec"]["validations"]
            if not evaluate(rule["expression"], known)
        ]
    return messages


def denied(asked: Document, old: Document | None, new: Document | None, made: list[Document]) -> list[str]:
    """The API server's messages (plugin/policy/validating/dispatcher.go); empty if no policy applies."""
    if not any(each["kind"] == "ValidatingAdmissionPolicy" and matches(each, asked) for each in made):
        return []
    return [
        f"ValidatingAdmissionPolicy '{name}' with binding '{name}' denied request: {message}"
        for name, message in refusals(asked, old=old, new=new, made=made)
    ]


def leases() -> list[Document]:
    return read_documents(REPOSITORY / "examples" / "fleet-leases.yaml")


def eviction_request_rights() -> list[Document]:
    return read_documents(REPOSITORY / "examples" / "eviction-request.yaml")


def resizes() -> list[Document]:
    return read_documents(REPOSITORY / "examples" / "resize.yaml")


def changed(node: Document, part: str, **values: Any) -> Document:
    """A copy with other values in `metadata`, `spec` or `status`; None takes a field away."""
    other = copy.deepcopy(node)
    other[part].update(values)
    other[part] = {name: value for name, value in other[part].items() if value is not None}
    return other


OWN_NODE: Final = "nodeagent may change only its own node"
OWN_PODS: Final = "nodeagent may change only pods of its own node"
METADATA: Final = "nodeagent may not change a node's metadata"
SPEC: Final = "nodeagent may change nothing of a node's spec but taints"
TAINTS: Final = "nodeagent may change no taints but nodeagent.io/* with NoSchedule"
STATUS: Final = "nodeagent may change nothing of a node's status but conditions"
CONDITIONS: Final = "nodeagent may change no conditions but those of memory, disk and PID pressure"
TAINT: Final = {"key": "nodeagent.io/memory-pressure", "effect": "NoSchedule"}


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
    from nodeagent.actuators.conditions import OWN_PREFIX
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


def test_the_policies_do_not_apply_to_other_clients() -> None:
    other = changed(NODE, "metadata", name="node-b")
    assert refused(request("nodes", user="system:node:node-b"), old=other, new=changed(other, "spec", taints=[])) == []
    assert refused(request("pods", verb="DELETE", user="system:node:node-b"), old=POD) == []


def test_an_own_taint_may_come_and_go() -> None:
    tainted = changed(NODE, "spec", taints=[*NODE["spec"]["taints"], TAINT])
    assert refused(request("nodes"), old=NODE, new=tainted) == []
    assert refused(request("nodes"), old=tainted, new=NODE) == []
    bare = changed(NODE, "spec", taints=None)
    assert refused(request("nodes"), old=bare, new=changed(NODE, "spec", taints=[TAINT])) == []
    assert refused(request("nodes"), old=changed(NODE, "spec", taints=[TAINT]), new=bare) == []


def test_a_foreign_taint_may_neither_come_nor_go() -> None:
    assert refused(request("nodes"), old=NODE, new=changed(NODE, "spec", taints=None)) == [TAINTS]
    drained = changed(
        NODE, "spec", taints=[*NODE["spec"]["taints"], {"key": "nodeagent.example", "effect": "NoExecute"}]
    )
    assert refused(request("nodes"), old=NODE, new=drained) == [TAINTS]


def test_an_own_taint_may_not_drive_out_the_pods_that_run() -> None:
    for effect in ("NoExecute", "PreferNoSchedule"):
        driven = changed(NODE, "spec", taints=[*NODE["spec"]["taints"], {**TAINT, "effect": effect}])
        assert refused(request("nodes"), old=NODE, new=driven) == [TAINTS]


@pytest.mark.parametrize("sub", ["", "status"])
@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("spec", {"unschedulable": True}),
        ("spec", {"providerID": "aws:///us-east-1a/i-0123"}),
        ("spec", {"podCIDR": "10.1.0.0/24"}),
        ("spec", {"podCIDR": None}),
        ("spec", {"podCIDRs": ["10.0.0.0/24"]}),
        ("spec", {"fieldOfTomorrow": {}}),
        ("metadata", {"ownerReferences": [{"kind": "ConfigMap", "name": "other", "uid": "2"}]}),
        ("metadata", {"ownerReferences": None}),
        ("metadata", {"finalizers": None}),
        ("metadata", {"fieldOfTomorrow": "x"}),
        ("metadata", {"labels": {"kubernetes.io/hostname": "node-a", "tier": "gold"}}),
        ("metadata", {"labels": None}),
        ("metadata", {"annotations": {"a": "b"}}),
        ("metadata", {"finalizers": ["example.com/never"]}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_metadata_and_spec_may_not_change_by_either_way(part: str, values: Document, sub: str) -> None:
    """A patch of the status reaches labels and annotations too."""
    why = [METADATA if part == "metadata" else SPEC]
    assert refused(request("nodes", sub=sub), old=NODE, new=changed(NODE, part, **values)) == why


def test_what_the_server_writes_itself_is_not_the_agents() -> None:
    noted = {"resourceVersion": "8", "generation": 3, "managedFields": [{"manager": "nodeagent"}]}
    assert refused(request("nodes"), old=NODE, new=changed(NODE, "metadata", **noted)) == []


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
        {"fieldOfTomorrow": ["x"]},
    ],
    ids=lambda values: "-".join(f"{name}-gone" if value is None else name for name, value in values.items()),
)
def test_nothing_else_of_the_status_may_change(values: Document) -> None:
    assert refused(request("nodes", sub="status"), old=NODE, new=changed(NODE, "status", **values)) == [STATUS]


def test_an_unknown_field_of_another_writer_is_no_obstacle_and_may_not_be_removed() -> None:
    tomorrow = changed(NODE, "status", fieldOfTomorrow=["x"])
    pressed = copy.deepcopy(tomorrow)
    pressed["status"]["conditions"][0]["status"] = "True"
    assert refused(request("nodes", sub="status"), old=tomorrow, new=pressed) == []
    assert refused(request("nodes", sub="status"), old=tomorrow, new=NODE) == [STATUS]


def test_a_condition_of_another_writer_may_neither_change_nor_be_removed() -> None:
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


def test_a_pod_that_is_not_scheduled_belongs_to_no_node() -> None:
    pending: Document = {"metadata": {"name": "web"}, "spec": {}}
    assert refused(request("pods", verb="DELETE"), old=pending) == [OWN_PODS]


OWN_NAMESPACES: Final = "nodeagent may change no pods of kube-system or of its own namespace"
MARK: Final = "nodeagent may change nothing of a pod but its condition DisruptionTarget"


@pytest.mark.parametrize("namespace", ["kube-system", "nodeagent"])
def test_no_pod_of_the_cluster_itself_or_of_the_agents_namespace_may_be_deleted(namespace: str) -> None:
    theirs = changed(POD, "metadata", namespace=namespace)
    assert refused(request("pods", verb="DELETE", namespace=namespace), old=theirs) == [OWN_NAMESPACES]


def test_a_pod_may_be_given_no_status_but_that_it_is_disrupted() -> None:
    ready, target = {"type": "Ready", "status": "True"}, {"type": "DisruptionTarget", "status": "True"}
    entry: Document = {**POD, "status": {"phase": "Running", "conditions": [ready]}}
    asked = request("pods", sub="status")
    assert refused(asked, old=entry, new=changed(entry, "status", conditions=[target, ready])) == []
    for values in ({"phase": "Failed"}, {"conditions": [target]}, {"conditions": None}, {"fieldOfTomorrow": "x"}):
        assert refused(asked, old=entry, new=changed(entry, "status", **values)) == [MARK], values
    assert refused(asked, old=entry, new=changed(entry, "metadata", labels={"app": "x"})) == [MARK]


# --- evictions -------------------------------------------------------------------------------------------------------

TOKEN: Final = "nodeagent may evict pods only with a token that names its node"
NAMESPACES: Final = "nodeagent may evict no pods of kube-system or of its own namespace"
GRACE: Final = "nodeagent may evict pods only with a grace period of at least a second"
UID: Final = "nodeagent may evict pods only by their UID"
OPTIONS: Final[Document] = {"gracePeriodSeconds": 1, "preconditions": {"uid": "u"}}


def eviction(options: Document | None) -> Document:
    about: Document = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "web"}}
    return about if options is None else about | {"deleteOptions": options}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (OPTIONS, []),
        (OPTIONS | {"gracePeriodSeconds": 300}, []),
        (OPTIONS | {"dryRun": ["All"]}, []),
        (OPTIONS | {"gracePeriodSeconds": 0}, [GRACE]),
        (OPTIONS | {"gracePeriodSeconds": -1}, [GRACE]),
        ({"preconditions": {"uid": "u"}}, [GRACE]),
        (OPTIONS | {"preconditions": {}}, [UID]),
        (OPTIONS | {"preconditions": {"uid": ""}}, [UID]),
        (OPTIONS | {"preconditions": {"resourceVersion": "7"}}, [UID]),
        ({"gracePeriodSeconds": 1}, [UID]),
        (None, [GRACE, UID]),
    ],
)
def test_an_eviction_names_the_pods_uid_and_leaves_a_second(options: Document | None, why: list[str]) -> None:
    asked = request("pods", sub="eviction", verb="CREATE")
    assert refused(asked, old=None, new=eviction(options)) == why


def test_no_pod_of_the_cluster_itself_or_of_the_agents_namespace_may_be_evicted() -> None:
    for namespace, why in {
        "kube-system": [NAMESPACES],
        "nodeagent": [NAMESPACES],
        "nodeagent-shop": [],
        "node": [],
        "kube-system-x": [],
    }.items():
        asked = request("pods", sub="eviction", verb="CREATE", namespace=namespace)
        assert refused(asked, old=None, new=eviction(OPTIONS)) == why, namespace


def test_a_token_that_names_no_node_evicts_no_pod() -> None:
    for token_node in (None, ""):
        asked = request("pods", sub="eviction", verb="CREATE", token_node=token_node)
        assert refused(asked, old=None, new=eviction(OPTIONS)) == [TOKEN]


def test_the_configuration_protects_by_default_the_pods_that_the_policy_refuses() -> None:
    """Or the agent would choose a victim that it may not evict."""
    protected = ProtectionConfig().namespaces
    for namespace in protected:
        asked = request("pods", sub="eviction", verb="CREATE", namespace=namespace)
        assert refused(asked, old=None, new=eviction(OPTIONS)) == [NAMESPACES]
    assert {"kube-system", document_of("DaemonSet")["metadata"]["namespace"]} == set(protected)
    assert "protection" not in yaml.safe_load(document_of("ConfigMap")["data"]["config.yaml"])


# --- evictions as the node -------------------------------------------------------------------------------------------

NODE_USER: Final = "system:node:node-a"
CERTIFICATE: Final[Document] = {"authentication.kubernetes.io/credential-id": ["X509SHA256=0"]}
as_node = functools.partial(request, "pods", sub="eviction", verb="CREATE", user=NODE_USER)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (OPTIONS, []),
        (OPTIONS | {"dryRun": ["All"]}, []),
        (OPTIONS | {"gracePeriodSeconds": 0}, [GRACE]),
        ({"preconditions": {"uid": "u"}}, [GRACE]),
        (OPTIONS | {"preconditions": {"uid": ""}}, [UID]),
        (OPTIONS | {"preconditions": {"resourceVersion": "7"}}, [UID]),
        (None, [GRACE, UID]),
    ],
)
def test_an_eviction_as_the_node_has_the_same_form(options: Document | None, why: list[str]) -> None:
    assert refused(as_node(), old=None, new=eviction(options)) == why


def test_as_the_node_no_pod_of_the_cluster_itself_or_of_the_agents_namespace_may_be_evicted() -> None:
    for namespace, why in {"kube-system": [NAMESPACES], "nodeagent": [NAMESPACES], "shop": [], "node": []}.items():
        assert refused(as_node(namespace=namespace), old=None, new=eviction(OPTIONS)) == why, namespace


@pytest.mark.parametrize("extra", [CERTIFICATE, {"sessionName": ["i-0123456789abcdef0"]}])
def test_an_eviction_with_a_nodes_own_credentials_is_not_the_agents(extra: Document) -> None:
    assert refused(as_node(namespace="kube-system", extra=extra), old=None, new=eviction(None)) == []


def test_no_policy_is_about_what_a_kubelet_writes() -> None:
    """With and without an extra: a kubelet whose status is refused loses its node."""
    ready = changed(NODE, "status", conditions=[{"type": "Ready", "status": "True"}], capacity={"pods": "1"})
    for extra in (CERTIFICATE, {}):
        by_kubelet = functools.partial(request, user=NODE_USER, extra=extra)
        assert refused(by_kubelet("nodes", sub="status"), old=NODE, new=ready) == []
        assert refused(by_kubelet("nodes"), old=NODE, new=changed(NODE, "metadata", labels={"a": "b"})) == []
        assert refused(by_kubelet("pods", verb="DELETE", namespace="kube-system"), old=POD) == []
        assert refused(by_kubelet("pods", sub="status"), old=POD, new={**POD, "status": {"phase": "Failed"}}) == []
        assert refused(by_kubelet("events", group="events.k8s.io", verb="CREATE"), old=None, new={"metadata": {}}) == []


# --- Events ----------------------------------------------------------------------------------------------------------

NAME: Final = "nodeagent may write Events only in the name of its own node"
ABOUT: Final = "nodeagent may write Events only about its own node, and about pods and their owners in their namespace"
SERIES: Final = "nodeagent may change nothing of an Event but its series"
EVENT: Final[Document] = {
    "apiVersion": "events.k8s.io/v1",
    "kind": "Event",
    "metadata": {"name": "web.1", "namespace": "shop"},
    "reportingController": "nodeagent.io/nodeagent",
    "reportingInstance": "node-a",
    "regarding": {"kind": "Pod", "namespace": "shop", "name": "web", "uid": "u"},
    "reason": "Evicted",
    "note": "The node was low on resource: memory. ",
}
about_events = functools.partial(request, "events", group="events.k8s.io")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, []),
        ({"reportingInstance": "node-b"}, [NAME]),
        ({"reportingInstance": "node"}, [NAME]),
        ({"reportingController": "kubelet"}, [NAME]),
        ({"regarding": {"kind": "Pod", "namespace": "bank", "name": "web"}}, [ABOUT]),
        ({"regarding": {"kind": "Deployment", "namespace": "shop", "name": "web"}}, [ABOUT]),
        ({"regarding": {"kind": "Node", "name": "node-a"}}, [ABOUT]),
        ({"regarding": {}}, [ABOUT]),
    ],
)
def test_an_event_is_written_in_the_own_name_about_a_pod_of_its_namespace(values: Document, why: list[str]) -> None:
    assert refused(about_events(verb="CREATE"), old=None, new=EVENT | values) == why


OWNED: Final[Document] = {
    "kind": "ReplicaSet",
    "apiVersion": "apps/v1",
    "namespace": "shop",
    "name": "web-1",
    "uid": "u",
}


@pytest.mark.parametrize(
    ("reason", "values", "why"),
    [
        ("OOMKillObserved", {}, []),
        ("PodEvicted", {}, []),
        ("PodEvicted", {"kind": "StatefulSet"}, []),
        ("PodEvicted", {"namespace": "bank"}, [ABOUT]),
        ("PodEvicted", {"kind": "Deployment"}, [ABOUT]),
        ("OOMKillObserved", {"kind": "Job", "apiVersion": "batch/v1"}, []),
        ("OOMKillObserved", {"kind": "ReplicationController", "apiVersion": "v1"}, []),
        ("OOMKillObserved", {"namespace": "bank"}, [ABOUT]),
        ("OOMKillObserved", {"kind": "Deployment"}, [ABOUT]),
        ("OOMKillObserved", {"apiVersion": "evil.example/v1"}, [ABOUT]),
        ("OOMKillObserved", {"kind": "Secret", "apiVersion": "v1"}, [ABOUT]),
        ("Evicted", {}, [ABOUT]),
    ],
)
def test_only_an_eviction_and_an_oom_kill_are_also_reported_on_the_owner_of_the_pod(
    reason: str, values: Document, why: list[str]
) -> None:
    entry = EVENT | {"reason": reason, "regarding": OWNED | values}
    assert refused(about_events(verb="CREATE"), old=None, new=entry) == why


def test_an_event_about_an_owner_names_its_api_version() -> None:
    regarding = {key: value for key, value in OWNED.items() if key != "apiVersion"}
    entry = EVENT | {"reason": "OOMKillObserved", "regarding": regarding}
    assert refused(about_events(verb="CREATE"), old=None, new=entry) == [ABOUT]


def test_the_owners_that_get_an_event_are_those_that_the_policy_allows() -> None:
    for api_version, kind in pod_events.OWNERS:
        entry = EVENT | {"reason": "OOMKillObserved", "regarding": OWNED | {"apiVersion": api_version, "kind": kind}}
        assert refused(about_events(verb="CREATE"), old=None, new=entry) == [], kind


def test_an_event_about_a_node_is_about_the_own_one() -> None:
    for name, why in {"node-a": [], "node-b": [ABOUT]}.items():
        entry = EVENT | {"regarding": {"kind": "Node", "name": name, "uid": name}}
        assert refused(about_events(verb="CREATE", namespace="default"), old=None, new=entry) == why


def test_a_long_node_name_is_cut_in_an_event() -> None:
    name = "a" * 150
    for instance, why in {name[:128]: [], name[:127]: [NAME], "b" * 128: [NAME], name: []}.items():
        asked = about_events(verb="CREATE", token_node=name)
        assert refused(asked, old=None, new=EVENT | {"reportingInstance": instance}) == why


def test_nothing_of_an_event_changes_but_its_series() -> None:
    more = EVENT | {"series": {"count": 2}}
    assert refused(about_events(), old=EVENT, new=more) == []
    assert refused(about_events(), old=more, new=more | {"series": {"count": 3}}) == []
    for values in ({"note": "x"}, {"reason": "Killed"}, {"fieldOfTomorrow": "x"}):
        assert refused(about_events(), old=EVENT, new=EVENT | values) == [SERIES], values
    assert refused(about_events(), old=EVENT, new=changed(EVENT, "metadata", labels={"a": "b"})) == [SERIES]
    # A Lease of another node cannot be taken over.
    assert refused(about_events(), old=EVENT | {"reportingInstance": "node-b"}, new=EVENT) == [SERIES]


# --- Leases ----------------------------------------------------------------------------------------------------------

WHICH: Final = "nodeagent may write only the Leases that its evictions share"
HOLDER: Final = "nodeagent may write only its own node into a Lease, and take only its own out"
LASTS: Final = "nodeagent may hold a Lease for an hour at most without renewing it"


def lease(holder: str | None, *, name: str = "nodeagent-evictions-z-0", lasts_s: int | None = 60) -> Document:
    spec = {"holderIdentity": holder, "leaseDurationSeconds": lasts_s}
    return {"metadata": {"name": name}, "spec": {key: value for key, value in spec.items() if value is not None}}


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (None, lease("node-a"), []),
        (None, lease("node-b"), [HOLDER]),
        (None, lease("node-a", name="other-controller"), [WHICH]),
        (None, lease("node-a", lasts_s=3600), []),
        (None, lease("node-a", lasts_s=3601), [LASTS]),
        (None, lease("node-a", lasts_s=None), [LASTS]),
        (lease(""), lease("node-a"), []),
        (lease("node-a"), lease("node-a"), []),
        (lease("node-a"), lease(""), []),
        (lease("node-b"), lease("node-a"), []),
        (lease("node-b"), lease(""), [HOLDER]),
        (lease("node-b"), lease(None), [HOLDER]),
        (lease("node-a"), lease("node-b"), [HOLDER]),
        (lease(""), lease("node-b"), [HOLDER]),
    ],
)
def test_a_lease_gets_the_own_node_and_loses_no_other(old: Document | None, new: Document, why: list[str]) -> None:
    verb = "CREATE" if old is None else "UPDATE"
    asked = request("leases", group="coordination.k8s.io", namespace="nodeagent", verb=verb)
    assert refused(asked, old=old, new=new) == why


# --- EvictionRequests ------------------------------------------------------------------------------------------------

_UID: Final = "8a6b0a7e-5d3c-4a54-9c55-3f2d3b1a0c11"


def eviction_request(
    requester: str = "nodeagent.io/nodeagent", *, field: str = "requester", name: str = f"nodeagent-{_UID}"
) -> Document:
    target = {"pod": {"name": "web", "uid": _UID}}
    return {"metadata": {"name": name}, "spec": {"target": target, field: requester, "intent": "Eviction"}}


@pytest.mark.parametrize(
    ("new", "asked", "why"),
    [
        (eviction_request(), {}, ""),
        (eviction_request(field="requesterName"), {}, ""),
        (eviction_request(), {"user": "someone"}, ""),
        (eviction_request(), {"token_node": None}, "only with a token that names its node"),
        (eviction_request(), {"namespace": "kube-system"}, "of no pods of kube-system or of its own namespace"),
        (eviction_request(), {"namespace": "nodeagent"}, "of no pods of kube-system or of its own namespace"),
        (eviction_request("example.com/drain"), {}, "only EvictionRequests of its own"),
        (eviction_request(name="drain"), {}, "only by the pod's UID"),
    ],
)
@pytest.mark.parametrize("verb", ["CREATE", "UPDATE"])
def test_an_eviction_request_is_one_of_the_agents_own(
    new: Document, asked: dict[str, Any], why: str, verb: str
) -> None:
    made = request("evictionrequests", group="lifecycle.k8s.io", verb=verb, **asked)
    messages = refused(made, old=new if verb == "UPDATE" else None, new=new)
    assert [why in each for each in messages] == ([True] if why else [])


# --- what the agent itself sends -------------------------------------------------------------------------------------


@pytest.fixture(params=[36, 35])
def api(request: pytest.FixtureRequest) -> Iterator[ApiServer]:
    """An API server with the manifests' rights and policies: of 1.36, and of 1.35 with the direct rights."""
    pods = [pod("web", namespace=namespace, node="node-a") for namespace in ("shop", "kube-system", "nodeagent")]
    with ApiServer(node="node-a", pods=pods, linger_s=None, minor=request.param) as server:
        server.add_pod(pod("web", namespace="bank", node="node-b"))
        made = [*documents(), *leases(), *eviction_request_rights(), *(direct_rights() if request.param < 36 else ())]
        for each in made:
            if each["kind"].endswith(("Role", "RoleBinding")):
                server.store.put(f"{each['kind'].lower()}s", each, "ADDED")
        server.admit = lambda asked, old, new: denied(asked, old, new, made)
        yield server


@pytest.fixture
def transport(api: ApiServer, tmp_path: Path) -> Transport:
    """As a pod of the DaemonSet on node-a, with the identity that the server allows."""
    token = api.token_of("nodeagent", "nodeagent", node="node-a")
    made = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig", token=token))))
    confirm_identity(made, Identity("node-a", "$NODE_NAME"))
    assert made.impersonation.complete is (api.minor >= 36)
    return made


def evict(api: ApiServer, transport: Transport, namespace: str, method: Method) -> Outcome:
    entry = api.get_pod(namespace, "web")
    threshold = Threshold(Signal.MEMORY, Amount(100 << 20, None, "100Mi"))
    victim = Victim(decode_pod(json.dumps(entry).encode()), "", threshold, Tier.HARD, method, 0.2, "low", {}, None)
    answered = threading.Event()
    evictor = EvictionSender(transport, wake=answered.set)
    evictor.submit("plan", victim)
    assert answered.wait(30)
    evictor.stop()
    [outcome] = evictor.take()
    return outcome


def test_what_the_agent_asks_for_when_it_evicts_is_allowed(api: ApiServer, transport: Transport) -> None:
    assert evict(api, transport, "shop", Method.EVICT).kind is OutcomeKind.ACCEPTED


@pytest.mark.parametrize("namespace", ["kube-system", "nodeagent"])
def test_a_refused_eviction_affects_this_pod_alone_and_names_the_policy(
    api: ApiServer, transport: Transport, namespace: str
) -> None:
    """Not a missing right, which would keep the agent from every other pod, too."""
    outcome = evict(api, transport, namespace, Method.EVICT)
    assert outcome.kind is OutcomeKind.DENIED
    assert NAMESPACES in outcome.message
    assert f"nodeagent-{'node-' if api.minor >= 36 else ''}evictions" in outcome.message


def status_of(transport: Transport, method: str, path: str, body: Document | None = None, *, user: str) -> int:
    """The status of the answer; 200 for every success."""
    try:
        transport.request(method, path, body=None if body is None else json.dumps(body).encode(), user=user)
    except ApiError as error:
        return error.status or 0
    return 200


def on_another_node(api: ApiServer) -> dict[str, tuple[str, str, Document | None]]:
    """Requests for pods of node-b."""
    uid = (api.get_pod("bank", "web") or {})["metadata"]["uid"]
    options = {"gracePeriodSeconds": 1, "preconditions": {"uid": uid}, "dryRun": ["All"]}
    return {
        "all pods": ("GET", "/api/v1/pods", None),
        "the pods of node-b": ("GET", "/api/v1/pods?fieldSelector=spec.nodeName%3Dnode-b", None),
        "the pods of a namespace": ("GET", "/api/v1/namespaces/bank/pods", None),
        "one pod in a list": ("GET", "/api/v1/namespaces/bank/pods?fieldSelector=metadata.name%3Dweb", None),
        "an eviction": ("POST", "/api/v1/namespaces/bank/pods/web/eviction", eviction(options)),
    }


@pytest.mark.parametrize("api", [36], indirect=True)
@pytest.mark.parametrize("user", ["", NODE_USER, "system:node:node-b", "system:node:", "system:admin"])
def test_a_stolen_token_reaches_no_pod_of_another_node(api: ApiServer, transport: Transport, user: str) -> None:
    watch = {"a watch": ("GET", "/api/v1/pods?watch=1", None)}
    for what, (method, path, body) in (on_another_node(api) | watch).items():
        assert status_of(transport, method, path, body, user=user) == 403, what


@pytest.mark.parametrize("api", [35], indirect=True)
def test_before_1_36_a_stolen_token_reaches_every_pod(api: ApiServer, transport: Transport) -> None:
    """What docs/security.md says of it: the direct rights have no limit but the form of an eviction."""
    for what, (method, path, body) in on_another_node(api).items():
        assert status_of(transport, method, path, body, user="") == 200, what


def test_a_token_of_no_pod_evicts_none_and_from_1_36_on_lists_none(api: ApiServer, tmp_path: Path) -> None:
    token = api.token_of("nodeagent", "nodeagent")
    stolen = connect(find_credentials(str(api.kubeconfig(tmp_path / "other", token=token))))
    body = eviction(OPTIONS | {"dryRun": ["All"]})
    path = "/api/v1/namespaces/shop/pods/web/eviction"
    for user in ("", "system:node:node-a"):
        assert status_of(stolen, "POST", path, body, user=user) == 403
    own = "/api/v1/pods?fieldSelector=spec.nodeName%3Dnode-a"
    assert status_of(stolen, "GET", own, user=NODE_USER) == 403
    assert status_of(stolen, "GET", own, user="") == (403 if api.minor >= 36 else 200)


def test_what_the_agent_asks_for_when_it_deletes_is_allowed(api: ApiServer, transport: Transport) -> None:
    rules = api.store.objects["clusterroles"]["", "nodeagent"]["rules"]
    rules += [{"apiGroups": [""], "resources": ["pods/status", "pods"], "verbs": ["patch", "delete"]}]
    assert evict(api, transport, "shop", Method.DELETE).kind is OutcomeKind.ACCEPTED
    entry = api.get_pod("shop", "web")
    assert entry is not None
    assert any(c["type"] == "DisruptionTarget" for c in entry["status"]["conditions"])


def test_the_events_of_the_agent_are_allowed(api: ApiServer, transport: Transport) -> None:
    now = [1000.0]
    writer = EventWriter(transport, "node-a", clock=lambda: now[0])
    for event in (
        KubernetesEvent("Pod", "shop", "web", "u", EventReason.EVICTED, "low", annotations={"nodeagent.io/plan": "p"}),
        KubernetesEvent("Node", "", "node-a", "node-a", EventReason.EVICTION_THRESHOLD_MET, "low"),
    ):
        writer._write(event, 1000.0)
        now[0] += REFRESH_S + 1
        writer._write(event, 1031.0)
    assert len(api.sent("POST", "/events")) == 2
    assert len([r for r in api.sent("PATCH") if "/events/" in r.path]) == 2
    assert {each["series"]["count"] for each in api.store.objects["events"].values()} == {2}


def test_what_the_agent_does_with_leases_is_allowed(api: ApiServer, transport: Transport) -> None:
    now = [1000.0]
    slots = EvictionSlots(
        transport,
        holder="node-a",
        zone=lambda: "z",
        slots=1,
        namespace="nodeagent",
        duration_s=60.0,
        clock=lambda: now[0],
        poll_s=(0.0, 0.0),
    )
    slots.want()
    slots.step()
    assert slots.held(), slots.reason
    now[0] += 21.0
    slots.want()
    slots.step()
    assert slots.held(), slots.reason
    slots.stop()
    [made] = api.store.objects["leases"].values()
    assert made["spec"]["holderIdentity"] == ""


@pytest.mark.parametrize("namespace", ["shop", "kube-system"])
def test_what_the_agent_does_with_eviction_requests_is_allowed(
    api: ApiServer, transport: Transport, namespace: str
) -> None:
    api.eviction_requests = "requester"
    victim = Victim(
        decode_pod(json.dumps(api.get_pod(namespace, "web")).encode()),
        "",
        Threshold(Signal.MEMORY, Amount(100 << 20, None, "100Mi")),
        Tier.SOFT,
        Method.REQUEST,
        30.0,
        "low",
        {},
        None,
    )
    arrived = threading.Event()
    worker = EvictionRequests(transport, wake=arrived.set, poll_s=0.05)
    worker.start()

    def outcome() -> Outcome:
        while not (found := worker.take()):
            arrived.clear()
            assert arrived.wait(30)
        [one] = found
        return one

    worker.submit("plan", victim)
    made = outcome()
    if namespace == "shop":
        assert made.kind is OutcomeKind.REQUESTED, made.message
        worker.follow([EvictionRequestOrder("plan", victim.pod.uid, namespace, withdraw=True)])
        assert outcome().kind is OutcomeKind.REQUEST_WITHDRAWN
    else:
        assert made.kind is OutcomeKind.NOT_REQUESTED
        assert "nodeagent-eviction-requests" in made.message
    worker.stop()
    assert worker.reason == ""


RESIZED_POD: Final[Document] = {
    "metadata": {"name": "web", "namespace": "shop", "labels": {"app": "web"}, "resourceVersion": "7"},
    "spec": {
        "nodeName": "node-a",
        "priority": 5,
        "initContainers": [{"name": "proxy", "image": "p", "restartPolicy": "Always"}],
        "containers": [
            {
                "name": "app",
                "image": "a",
                "resources": {"limits": {"cpu": "1", "memory": "128Mi"}, "requests": {"cpu": "1", "memory": "64Mi"}},
            },
            {"name": "side", "image": "s", "resources": {"limits": {"memory": "32Mi"}}},
        ],
    },
}
ONLY_RESOURCES: Final = "nodeagent may change nothing of a pod but the resources of its containers"
ONLY_MEMORY: Final = "nodeagent may change no resource of a container but its memory"


def resized(path: tuple[str | int, ...], value: Any) -> Document:
    """The pod with another value, or without it (None), at this place."""
    new = copy.deepcopy(RESIZED_POD)
    at: Any = new
    for key in path[:-1]:
        at = at[key]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return new


RESOURCES: Final = ("spec", "containers", 0, "resources")


def test_the_memory_of_a_pod_of_the_own_node_may_be_resized_and_that_of_another_may_not() -> None:
    raised = resized((*RESOURCES, "limits", "memory"), "160Mi")
    asked = functools.partial(request, "pods", sub="resize")
    assert refused(asked(), old=RESIZED_POD, new=raised) == []
    assert refused(asked(), old=RESIZED_POD, new=resized((*RESOURCES, "requests", "memory"), "96Mi")) == []
    for token_node in ("node-b", "", None):
        found = refused(asked(token_node=token_node), old=RESIZED_POD, new=raised)
        assert found == ["nodeagent may resize only pods of its own node"]
    for namespace in ("kube-system", "nodeagent"):
        found = refused(asked(namespace=namespace), old=RESIZED_POD, new=raised)
        assert found == ["nodeagent may resize no pods of kube-system or of its own namespace"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((*RESOURCES, "limits", "cpu"), "2", ONLY_MEMORY),
        ((*RESOURCES, "limits", "cpu"), None, ONLY_MEMORY),
        ((*RESOURCES, "requests", "nvidia.com/gpu"), "1", ONLY_MEMORY),
        ((*RESOURCES, "requests"), None, ONLY_MEMORY),
        ((*RESOURCES, "limits", "memory"), None, ONLY_MEMORY),
        ((*RESOURCES, "claims"), [{"name": "gpu"}], ONLY_MEMORY),
        (("spec", "containers", 0, "image"), "evil", ONLY_RESOURCES),
        (("spec", "containers", 1, "resizePolicy"), [{"resourceName": "memory"}], ONLY_RESOURCES),
        (("spec", "initContainers", 0, "image"), "evil", ONLY_RESOURCES),
        (("spec", "priority"), 9, ONLY_RESOURCES),
        (("spec", "fieldOfTomorrow"), "x", ONLY_RESOURCES),
        (("metadata", "labels"), {"app": "other"}, ONLY_RESOURCES),
    ],
)
def test_a_resize_may_change_nothing_but_memory(path: tuple[str | int, ...], value: Any, message: str) -> None:
    assert refused(request("pods", sub="resize"), old=RESIZED_POD, new=resized(path, value)) == [message]


def test_a_server_may_have_counted_a_version_meanwhile() -> None:
    new = resized(("metadata", "resourceVersion"), "8")
    assert refused(request("pods", sub="resize"), old=RESIZED_POD, new=new) == []

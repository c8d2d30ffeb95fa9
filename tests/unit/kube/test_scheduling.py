"""A node takes a pod by the checks of the descheduler's NodeFit; what is not understood means that it does not."""

import json
from typing import Any

import pytest

from nodeagent.kube import objects, scheduling
from nodeagent.kube.scheduling import NodeOffer

GI = 1 << 30
ROOM = {"cpu": "4", "memory": "8Gi", "ephemeral-storage": "100Gi", "pods": "110"}


def pod(name: str = "web", *, requests: Any = None, labels: Any = None, status: Any = None, **spec: Any) -> Any:
    """As decoded from the API server's JSON."""
    containers = spec.pop("containers", [{"name": "c", "resources": {"requests": requests or {}}}])
    body = {
        "metadata": {"name": name, "namespace": spec.pop("namespace", "shop"), "uid": name, "labels": labels or {}},
        "spec": {"containers": containers, **spec},
        "status": status or {"phase": "Running"},
    }
    return scheduling.decode_pod(json.dumps(body).encode())


def node(*, labels: Any = None, taints: Any = None, allocatable: Any = None, ready: str = "True", **more: Any) -> Any:
    body = {
        "metadata": {"name": "worker-1", "labels": labels or {}, **more.pop("metadata", {})},
        "spec": {"taints": taints or [], **more.pop("spec", {})},
        "status": {
            "allocatable": ROOM if allocatable is None else allocatable,
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }
    return scheduling.decode_node(json.dumps(body).encode())


def offered(to: Any, on: Any) -> str:
    """Why the node does not take the pod by its own object; empty if it may."""
    offer = scheduling.offer(on, scheduling.needs_of(to))
    return "" if isinstance(offer, NodeOffer) else offer


def beside(to: Any, on: Any, *others: Any) -> str:
    needs = scheduling.needs_of(to)
    offer = scheduling.offer(on, needs)
    assert isinstance(offer, NodeOffer)
    keys = scheduling.label_keys([needs])
    return scheduling.refusal(offer, scheduling.load_of(others, label_keys=keys), needs)


def affinity(*terms: Any) -> Any:
    required = {"nodeSelectorTerms": list(terms)}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def expression(key: str, operator: str, *values: str) -> Any:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


def test_a_ready_and_schedulable_node_with_room_takes_a_pod() -> None:
    assert offered(pod(requests={"cpu": "4", "memory": "8Gi"}), node()) == ""


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (node(spec={"unschedulable": True}), scheduling.UNSCHEDULABLE),
        (node(ready="False"), scheduling.NOT_READY),
        (node(ready="Unknown"), scheduling.NOT_READY),
        (node(metadata={"deletionTimestamp": "2026-11-20T23:13:40Z"}), scheduling.NOT_READY),
        (node(allocatable={**ROOM, "memory": "8GiB"}), scheduling.UNREADABLE),
    ],
    ids=["cordoned", "not ready", "unreachable", "being deleted", "malformed quantity"],
)
def test_a_node_that_takes_no_pods(of: Any, expected: str) -> None:
    assert offered(pod(requests={"memory": "1Gi"}), of) == expected


def test_a_node_without_the_condition_ready_is_not_ready() -> None:
    body = {"metadata": {"name": "n"}, "status": {"allocatable": ROOM}}
    assert offered(pod(), scheduling.decode_node(json.dumps(body).encode())) == scheduling.NOT_READY


LABELS = {"zone": "a", "gen": "7", "empty": ""}


@pytest.mark.parametrize(
    ("spec", "takes"),
    [
        ({"nodeSelector": {"zone": "a"}}, True),
        ({"nodeSelector": {"zone": "b"}}, False),
        ({"nodeSelector": {"zone": "a", "disk": "ssd"}}, False),
        ({"affinity": affinity(expression("zone", "In", "b", "a"))}, True),
        ({"affinity": affinity(expression("disk", "In", "ssd"))}, False),
        ({"affinity": affinity(expression("zone", "NotIn", "b"))}, True),
        ({"affinity": affinity(expression("zone", "NotIn", "a"))}, False),
        ({"affinity": affinity(expression("disk", "NotIn", "ssd"))}, True),
        ({"affinity": affinity(expression("empty", "Exists"))}, True),
        ({"affinity": affinity(expression("disk", "Exists"))}, False),
        ({"affinity": affinity(expression("disk", "DoesNotExist"))}, True),
        ({"affinity": affinity(expression("zone", "DoesNotExist"))}, False),
        ({"affinity": affinity(expression("gen", "Gt", "6"))}, True),
        ({"affinity": affinity(expression("gen", "Gt", "7"))}, False),
        ({"affinity": affinity(expression("gen", "Lt", "8"))}, True),
        ({"affinity": affinity(expression("gen", "Lt", "-8"))}, False),
        ({"affinity": affinity(expression("zone", "Gt", "6"))}, False),
        ({"affinity": affinity(expression("gen", "Gt", "1_0"))}, False),
        ({"affinity": affinity(expression("disk", "Lt", "8"))}, False),
        ({"affinity": affinity(expression("zone", "Near", "a"))}, False),
        ({"affinity": affinity(expression("zone", "In", "b"), expression("gen", "Exists"))}, True),
        ({"affinity": affinity({})}, False),
        ({"affinity": affinity()}, False),
        ({"affinity": affinity({"matchFields": [
            {"key": "metadata.name", "operator": "In", "values": ["worker-1"]}]})}, True),
        ({"affinity": affinity({"matchFields": [
            {"key": "metadata.name", "operator": "NotIn", "values": ["worker-1"]}]})}, False),
        ({"affinity": affinity({"matchFields": [
            {"key": "spec.providerID", "operator": "In", "values": ["worker-1"]}]})}, False),
        ({"nodeSelector": {"zone": "a"}, "affinity": affinity(expression("zone", "In", "b"))}, False),
    ],
)  # fmt: skip
def test_node_selector_and_affinity(spec: Any, takes: bool) -> None:
    assert offered(pod(**spec), node(labels=LABELS)) == ("" if takes else scheduling.SELECTOR)


def test_all_expressions_of_a_term_must_be_met() -> None:
    both = {"matchExpressions": [*expression("zone", "In", "a")["matchExpressions"],
                                 *expression("gen", "Gt", "9")["matchExpressions"]]}  # fmt: skip
    assert offered(pod(affinity=affinity(both)), node(labels=LABELS)) == scheduling.SELECTOR


TAINT = {"key": "dedicated", "value": "gpu", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("taint", "toleration", "takes"),
    [
        (TAINT, None, False),
        ({**TAINT, "effect": "NoExecute"}, None, False),
        ({**TAINT, "effect": "PreferNoSchedule"}, None, True),
        (TAINT, {"key": "dedicated", "value": "gpu"}, True),
        (TAINT, {"key": "dedicated", "operator": "Equal", "value": "gpu", "effect": "NoSchedule"}, True),
        (TAINT, {"key": "dedicated", "operator": "Equal", "value": "cpu"}, False),
        (TAINT, {"key": "dedicated", "operator": "Exists", "effect": "NoExecute"}, False),
        (TAINT, {"key": "other", "operator": "Exists"}, False),
        (TAINT, {"operator": "Exists"}, True),
        ({**TAINT, "value": "5"}, {"key": "dedicated", "operator": "Gt", "value": "4"}, True),
        ({**TAINT, "value": "5"}, {"key": "dedicated", "operator": "Lt", "value": "4"}, False),
        (TAINT, {"key": "dedicated", "operator": "Gt", "value": "4"}, False),
        (TAINT, {"key": "dedicated", "operator": "Like", "value": "gpu"}, False),
    ],
)
def test_taints_and_tolerations(taint: Any, toleration: Any, takes: bool) -> None:
    tolerations = [] if toleration is None else [toleration]
    assert offered(pod(tolerations=tolerations), node(taints=[taint])) == ("" if takes else scheduling.TAINTS)


def test_every_taint_must_be_tolerated() -> None:
    tolerations = [{"key": "dedicated", "operator": "Exists"}]
    taints = [TAINT, {"key": "node.kubernetes.io/disk-pressure", "effect": "NoSchedule"}]
    assert offered(pod(tolerations=tolerations), node(taints=taints)) == scheduling.TAINTS


@pytest.mark.parametrize("resource", ["cpu", "memory", "ephemeral-storage", "example.com/gpu", "hugepages-2Mi"])
def test_a_resource_that_is_not_there_or_is_taken_is_too_little(resource: str) -> None:
    asks = pod(requests={resource: "3"})
    offers = node(allocatable={**ROOM, resource: "5"})
    assert offered(asks, node(allocatable={"pods": "110"})) == f"too little {resource}"
    assert beside(asks, offers, pod("other", requests={resource: "2"})) == ""
    assert beside(asks, offers, pod("other", requests={resource: "3"})) == f"too little {resource}"


def test_a_node_has_a_limit_of_pods() -> None:
    offers = node(allocatable={**ROOM, "pods": "2"})
    assert beside(pod(), offers, pod("one")) == ""
    assert beside(pod(), offers, pod("one"), pod("two")) == "too little pods"
    done = pod("done", status={"phase": "Succeeded"})
    assert beside(pod(), offers, pod("one"), done) == "", "a finished pod counts nothing"
    assert offered(pod(), node(allocatable={})) == "too little pods"


def test_a_pod_that_requests_nothing_fits_on_a_full_node() -> None:
    assert beside(pod(requests={"memory": "0"}), node(), pod("all", requests={"memory": "9Gi"})) == ""


def container(name: str, memory: str, **more: Any) -> Any:
    return {"name": name, "resources": {"requests": {"memory": memory}}, **more}


def test_what_the_scheduler_counts_for_a_pod() -> None:
    """KEP-753 (sidecars), KEP-2837 (requests of the pod), KEP-1287 (resize), RuntimeClass overhead."""
    init = [
        container("large", "3Gi"),
        container("sidecar", "1Gi", restartPolicy="Always"),
        container("after", "4Gi"),
    ]
    many = pod(containers=[container("a", "1Gi"), container("b", "2Gi")], initContainers=init, overhead={"cpu": "250m"})
    assert scheduling.requests_of(many) == {"memory": 5 * GI, "cpu": 250}, "sidecar + after, not a + b + sidecar"
    plain = pod(containers=[container("a", "3Gi"), container("b", "2Gi")], initContainers=init)
    assert scheduling.requests_of(plain) == {"memory": 6 * GI}
    whole = pod(containers=[container("a", "3Gi")], resources={"requests": {"memory": "7Gi"}}, overhead={"memory": "1"})
    assert scheduling.requests_of(whole) == {"memory": 7 * GI + 1}
    grown = {"phase": "Running", "containerStatuses": [{"name": "a", "allocatedResources": {"memory": "6Gi"}}]}
    assert scheduling.requests_of(pod(containers=[container("a", "3Gi")], status=grown)) == {"memory": 6 * GI}


def apart(topology: str = "kubernetes.io/hostname", **term: Any) -> Any:
    required = [{"topologyKey": topology, "labelSelector": {"matchLabels": {"app": "db"}}, **term}]
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


HOST = {"kubernetes.io/hostname": "worker-1"}
DB = {"app": "db"}


@pytest.mark.parametrize(
    ("anti", "other", "refused"),
    [
        (apart(), pod("db-1", labels=DB), True),
        (apart(), pod("db-1", labels={"app": "web"}), False),
        (apart(), pod("db-1", labels=DB, namespace="lab"), False),
        (apart(namespaces=["lab"]), pod("db-1", labels=DB, namespace="lab"), True),
        (apart(namespaceSelector={}), pod("db-1", labels=DB, namespace="lab"), True),
        (apart("rack"), pod("db-1", labels=DB), False),
        (apart(labelSelector=None), pod("db-1", labels=DB), False),
        (apart(labelSelector={}), pod("db-1"), True),
        (apart(labelSelector={"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["db"]}]}),
         pod("db-1", labels=DB), False),
        (apart(labelSelector={"matchExpressions": [{"key": "app", "operator": "Future"}]}), pod("x"), True),
        (apart(), pod("db-0", labels=DB), False),
    ],
)  # fmt: skip
def test_required_anti_affinity_to_pods_of_the_node(anti: Any, other: Any, refused: bool) -> None:
    asks = pod("db-0", labels=DB, affinity=anti)
    assert beside(asks, node(labels=HOST), other) == (scheduling.ANTI_AFFINITY if refused else "")


def test_a_quantity_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="plain digits"):
        scheduling.needs_of(pod(requests={"memory": "much"}))
    with pytest.raises(ValueError, match="plain digits"):
        scheduling.load_of([pod(requests={"memory": "much"})], label_keys=None)
    with pytest.raises(objects.UnreadableError):
        scheduling.decode_pod(b'{"metadata": {"name": 1}}')


def test_only_the_labels_that_an_anti_affinity_reads_are_kept() -> None:
    """A tenant can write 1.5 MiB of labels on each of its pods."""
    other = pod("db-1", labels={"app": "db", "tier": "x", "huge": "x" * 63})
    expressions = {"matchExpressions": [{"key": "tier", "operator": "Exists"}]}
    asks = [scheduling.needs_of(pod(affinity=each)) for each in (apart(), apart(labelSelector=expressions))]
    keys = scheduling.label_keys(asks)
    assert keys == frozenset({"app", "tier"})
    assert scheduling.load_of([other], label_keys=keys).pods == (("shop", "db-1", {"app": "db", "tier": "x"}),)
    assert scheduling.label_keys([scheduling.needs_of(pod())]) is None
    assert scheduling.load_of([other], label_keys=None).pods == ()


def test_the_constraints_of_a_pod_are_counted() -> None:
    few = scheduling.needs_of(pod())
    assert scheduling.constraints(few) == 1, "the number of pods"
    many = pod(
        requests={"cpu": "1"},
        nodeSelector={"zone": "a"},
        tolerations=[{"operator": "Exists"}],
        affinity={**affinity(expression("zone", "In", "a", "b")), **apart(namespaces=["lab"])},
    )
    assert scheduling.constraints(scheduling.needs_of(many)) == 2 + 1 + 1 + (1 + 1 + 2) + (1 + 1 + 1)

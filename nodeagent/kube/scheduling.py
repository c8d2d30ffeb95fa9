"""Whether a node takes a pod, by the checks of the descheduler's NodeFit, which are a part of the scheduler's.

They are, in this order: the node is schedulable and ready; nodeSelector and required node affinity; taints with
NoSchedule or NoExecute; what the pod requests of each resource against allocatable minus the requests of the pods
there, and the number of pods; required anti-affinity of the pod to pods on that node.

What is not understood (an operator of the future, an unreadable quantity) means that the node does not take the pod:
the result protects pods and must not promise room that is not there. Not checked, as in the descheduler: volumes and
their zones, host ports, affinity to pods, topology spread, resource claims, pods that wait to be scheduled.
"""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from nodeagent.config import quantity
from nodeagent.kube import objects
from nodeagent.kube import scheduling_objects as shapes

PODS: Final = "pods"
"""The resource that counts pods."""
_EFFECTS: Final = frozenset({"NoSchedule", "NoExecute"})
_FINISHED: Final = frozenset({"Succeeded", "Failed"})

UNSCHEDULABLE: Final = "unschedulable"
NOT_READY: Final = "not ready"
SELECTOR: Final = "node selector or affinity"
TAINTS: Final = "taints"
ANTI_AFFINITY: Final = "anti-affinity"
UNREADABLE: Final = "unreadable"

Requests = Mapping[str, int]
"""By the resource's name: millicores of CPU, bytes or whole units of the others."""

_pod_decoder = objects.Decoder(shapes.ScheduledPod)
_node_decoder = objects.Decoder(shapes.OfferingNode)


class PodNeeds(NamedTuple):
    """What a pod needs of a node."""

    namespace: str
    name: str
    requests: Requests
    node_selector: Mapping[str, str]
    affinity: objects.NodeSelector | None
    tolerations: tuple[shapes.Toleration, ...]
    apart_from: tuple[shapes.PodAffinityTerm, ...]
    """Terms of its required anti-affinity to pods."""


class NodeOffer(NamedTuple):
    """A node that takes the pod if its pods leave enough."""

    name: str
    allocatable: Requests
    labels: frozenset[str]
    """The keys of its labels."""


class NodeLoad(NamedTuple):
    """The pods of a node that hold something there."""

    requests: Requests
    """Their sum."""
    pods: tuple[tuple[str, str, Mapping[str, str]], ...]
    """Namespace, name and the labels of each that an anti-affinity reads; empty if none does."""


# --- decoding --------------------------------------------------------------------------------------------------------


def decode_pod(item: bytes) -> shapes.ScheduledPod:
    """Raises `objects.UnreadableError`."""
    return _pod_decoder.decode(item)


def decode_node(item: bytes) -> shapes.OfferingNode:
    """Raises `objects.UnreadableError`."""
    return _node_decoder.decode(item)


def needs_of(pod: shapes.ScheduledPod) -> PodNeeds:
    """Raises ValueError for a quantity that is none."""
    spec = pod.spec
    affinity = spec.affinity or shapes.Affinity()
    return PodNeeds(
        pod.metadata.namespace,
        pod.metadata.name,
        {**requests_of(pod), PODS: 1},
        spec.node_selector or {},
        affinity.node_affinity.required if affinity.node_affinity else None,
        tuple(spec.tolerations or ()),
        tuple(affinity.pod_anti_affinity.required or ()) if affinity.pod_anti_affinity else (),
    )


def constraints(needs: PodNeeds) -> int:
    """How many selectors, expressions, values and tolerations the needs have: what one node costs to check."""
    terms = (needs.affinity.node_selector_terms or []) if needs.affinity else []
    lists = [*(term.match_expressions or [] for term in terms), *(term.match_fields or [] for term in terms)]
    lists += [each.label_selector.match_expressions or [] for each in needs.apart_from if each.label_selector]
    labels = sum(len(each.label_selector.match_labels or {}) for each in needs.apart_from if each.label_selector)
    namespaces = sum(1 + len(each.namespaces or ()) for each in needs.apart_from)
    expressions = sum(1 + len(each.values or ()) for each_list in lists for each in each_list)
    parts = len(needs.node_selector) + len(needs.tolerations) + len(needs.requests)
    return parts + len(terms) + expressions + labels + namespaces


def label_keys(needs: Iterable[PodNeeds]) -> frozenset[str] | None:
    """The labels of pods that the anti-affinities read; None without any."""
    terms = [term for each in needs for term in each.apart_from]
    selectors = [term.label_selector for term in terms if term.label_selector is not None]
    keys = {key for selector in selectors for key in selector.match_labels or ()}
    keys.update(each.key for selector in selectors for each in selector.match_expressions or ())
    return frozenset(keys) if terms else None


def requests_of(pod: shapes.ScheduledPod) -> dict[str, int]:
    """What the scheduler counts for a pod: the containers that run together or the largest init container, the request
    of the whole pod if it has one, and the overhead. Raises ValueError."""
    spec, status = pod.spec, pod.status
    statuses = (*(status.container_statuses or ()), *(status.init_container_statuses or ()))
    allocated = {each.name: each.allocated_resources or {} for each in statuses}
    running: dict[str, int] = {}
    for container in spec.containers or ():
        _add(running, _container_requests(container, allocated))
    sidecars: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in spec.init_containers or ():
        own = _container_requests(container, allocated)
        if container.restart_policy == "Always":
            _add(sidecars, own)
            own = {}
        at_start = dict(own)
        _add(at_start, sidecars)
        peak = {name: max(peak.get(name, 0), at_start.get(name, 0)) for name in {*peak, *at_start}}
    _add(running, sidecars)
    total = {name: max(running.get(name, 0), peak.get(name, 0)) for name in {*running, *peak}}
    if spec.resources is not None:
        total.update(amounts(spec.resources.requests))
    _add(total, amounts(spec.overhead))
    return total


def _container_requests(container: shapes.Container, allocated: Mapping[str, shapes.Amounts]) -> dict[str, int]:
    """The larger of what it asks for and what the kubelet has given it, as after a resize."""
    asked = amounts(container.resources.requests if container.resources else None)
    given = amounts(allocated.get(container.name))
    return {name: max(asked.get(name, 0), given.get(name, 0)) for name in {*asked, *given}}


def amounts(quantities: Mapping[str, str | int] | None) -> dict[str, int]:
    """Raises ValueError."""
    return {
        name: quantity.parse_milli(str(text)) if name == "cpu" else quantity.parse_quantity(str(text))
        for name, text in (quantities or {}).items()
    }


def _add(total: dict[str, int], more: Requests) -> None:
    for name, amount in more.items():
        total[name] = total.get(name, 0) + amount


# --- a node by its own object ----------------------------------------------------------------------------------------


def offer(node: shapes.OfferingNode, needs: PodNeeds) -> NodeOffer | str:
    """The node as one that may take the pod, or why it does not take it, whatever its pods leave."""
    if node.spec.unschedulable:
        return UNSCHEDULABLE
    ready = any(each.type == "Ready" and each.status == "True" for each in node.status.conditions or ())
    if not ready or node.metadata.deletion_timestamp is not None:
        return NOT_READY
    labels = node.metadata.labels or {}
    if not _selected(needs, labels, node.metadata.name):
        return SELECTOR
    for taint in node.spec.taints or ():
        if taint.effect in _EFFECTS and not any(_tolerates(each, taint) for each in needs.tolerations):
            return TAINTS
    try:
        allocatable = amounts(
            {name: text for name, text in (node.status.allocatable or {}).items() if name in needs.requests}
        )
    except ValueError:
        return UNREADABLE
    return lacking(allocatable, {}, needs.requests) or NodeOffer(node.metadata.name, allocatable, frozenset(labels))


def _selected(needs: PodNeeds, labels: Mapping[str, str], name: str) -> bool:
    if any(labels.get(key) != value for key, value in needs.node_selector.items()):
        return False
    if needs.affinity is None:
        return True
    # The terms are alternatives, the expressions of one are not. A term without any selects no node.
    for term in needs.affinity.node_selector_terms or ():
        expressions, fields = term.match_expressions or [], term.match_fields or []
        if not expressions and not fields:
            continue
        by_field = all(each.key == "metadata.name" and _field_meets(each, name) for each in fields)
        if by_field and all(meets(each, labels) for each in expressions):
            return True
    return False


def _field_meets(requirement: objects.Requirement, name: str) -> bool:
    values = requirement.values or []
    match requirement.operator:
        case "In":
            return name in values
        case "NotIn":
            return bool(values) and name not in values
    return False


def meets(requirement: objects.Requirement, labels: Mapping[str, str]) -> bool:
    """Whether labels meet one expression of a node selector."""
    value, values = labels.get(requirement.key), requirement.values or []
    match requirement.operator:
        case "In":
            return value is not None and value in values
        case "NotIn":
            return value is None or value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt":
            return len(values) == 1 and _compares(requirement.operator, value or "", values[0])
    return False


def _tolerates(toleration: shapes.Toleration, taint: objects.Taint) -> bool:
    if toleration.effect not in ("", taint.effect) or toleration.key not in ("", taint.key):
        return False
    match toleration.operator:
        case "" | "Equal":
            return toleration.value == taint.value
        case "Exists":
            return True
        case "Gt" | "Lt":
            return _compares(toleration.operator, taint.value, toleration.value)
    return False


def _compares(operator: str, value: str, limit: str) -> bool:
    """Whether the value of the node is greater (`Gt`) or less than the limit. False if one is no integer."""
    left, right = _integer(value), _integer(limit)
    if left is None or right is None:
        return False
    return left > right if operator == "Gt" else left < right


def _integer(text: str) -> int | None:
    digits = text[1:] if text[:1] in ("-", "+") else text
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) <= 19 else None


# --- a node with its pods --------------------------------------------------------------------------------------------


def load_of(pods: Iterable[shapes.ScheduledPod], *, label_keys: frozenset[str] | None) -> NodeLoad:
    """The sum of what pods request. Finished pods count nothing, terminating pods still do. `label_keys`: the labels to
    keep, because a tenant can write 1.5 MiB of them; None: the pods are not kept. Raises ValueError."""
    total: dict[str, int] = {}
    kept = []
    for pod in pods:
        if pod.status.phase in _FINISHED:
            continue
        _add(total, requests_of(pod))
        _add(total, {PODS: 1})
        if label_keys is not None:
            labels = {key: value for key, value in (pod.metadata.labels or {}).items() if key in label_keys}
            kept.append((pod.metadata.namespace, pod.metadata.name, labels))
    return NodeLoad(total, tuple(kept))


def refusal(node: NodeOffer, load: NodeLoad, needs: PodNeeds) -> str:
    """Why the node does not take the pod beside its pods; empty if it does."""
    missing = lacking(node.allocatable, load.requests, needs.requests)
    if missing:
        return missing
    for term in needs.apart_from:
        # Of other nodes in the same zone the pods are not known: a term applies to the pods of this node.
        if term.topology_key in node.labels and any(_conflicts(term, needs, pod) for pod in load.pods):
            return ANTI_AFFINITY
    return ""


def lacking(allocatable: Requests, taken: Requests, requests: Requests) -> str:
    """Of which resource a node has too little; empty if it has enough of each. A request of nothing needs nothing."""
    for name, amount in requests.items():
        if amount > 0 and amount > allocatable.get(name, 0) - taken.get(name, 0):
            return f"too little {name}"
    return ""


def _conflicts(term: shapes.PodAffinityTerm, needs: PodNeeds, pod: tuple[str, str, Mapping[str, str]]) -> bool:
    namespace, name, labels = pod
    if (namespace, name) == (needs.namespace, needs.name):
        return False
    # The labels of namespaces are not known: with a selector of namespaces, those of every namespace count.
    if term.namespace_selector is None and namespace not in (term.namespaces or [needs.namespace]):
        return False
    selector = term.label_selector
    if selector is None:
        return False
    if any(labels.get(key) != value for key, value in (selector.match_labels or {}).items()):
        return False
    return all(_may_meet(each, labels) for each in selector.match_expressions or ())


def _may_meet(requirement: objects.Requirement, labels: Mapping[str, str]) -> bool:
    """As `meets`; an unknown operator counts as met, because a match excludes the node."""
    known = requirement.operator in ("In", "NotIn", "Exists", "DoesNotExist")
    return not known or meets(requirement, labels)

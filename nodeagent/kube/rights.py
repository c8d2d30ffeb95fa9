"""The rights in the API that the agent uses: one table, for `check --rights`, for the note about a 403, and for the
tests of the manifests.

A right is what RBAC calls a verb on a resource. Its `identity` states which identity sends the request where the API
server supports constrained impersonation (KEP-5284, on by default from Kubernetes 1.36 on): the own node, whose
requests the Node authorizer and NodeRestriction limit to its own pods, or the ServiceAccount. Without impersonation the
ServiceAccount sends them all; with a node's own credentials the node does.

RBAC for a request that impersonates the own node needs two verbs of the ServiceAccount, and none for the request itself
(k8s.io/apiserver, pkg/endpoints/filters/impersonation/mode.go, read at 1.36):

* `impersonate-on:associated-node:VERB` on the resource of the request;
* `impersonate:associated-node` on `nodes` of authentication.k8s.io, without resourceNames: the server asks for the name
  `*`, so that its answer holds for every node.

The ServiceAccount itself sends what the node may not send (taints, PodDisruptionBudgets, Leases), and what the
admission policies of daemonset.yaml limit more than the server limits a node. `nodes/status`: the six conditions of the
own node; a node may write its whole status. `pods/status` and `pods` delete: pods of the own node outside kube-system,
and only the condition DisruptionTarget. `pods/resize`: pods of the own node outside kube-system, and only memory;
NodeRestriction refuses this subresource to every node. Events: in the own node's name; NodeRestriction does not limit
Events at all. A policy cannot limit a node instead: it would limit a kubelet whose credentials give its user no extra
as well.
"""

import enum
import re
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from nodeagent.config.schema import Config, Mode, OnBlocked, StandardConditions

AUTHENTICATION: Final = "authentication.k8s.io"
AUTHORIZATION: Final = "authorization.k8s.io"
IMPERSONATE: Final = "impersonate:associated-node"
IMPERSONATE_ON: Final = "impersonate-on:associated-node:"
_FORBIDDEN: Final = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>\S+) resource "(?P<resource>[^"]*)" in API group "(?P<group>[^"]*)"'
)
"""A 403 of the authorizer (k8s.io/apiserver, pkg/endpoints/handlers/responsewriters/errors.go). A 403 of admission has
another text."""


class RequestIdentity(enum.StrEnum):
    """Which identity sends a request, where the API server lets the ServiceAccount impersonate its node."""

    NODE = "node"
    SERVICE_ACCOUNT = "serviceAccount"


class Need(enum.StrEnum):
    """What fails if a right is missing."""

    REQUIRED = "required"
    """Evictions or conditions."""
    FEATURE = "feature"
    """One feature; evictions and conditions work without it."""
    CHECK = "check"
    """Nothing of the agent: `check --rights` knows less."""


class Scope(enum.StrEnum):
    """The objects that the requests are about."""

    ALL = "all"
    PODS_OF_NODE = "pods of the node"
    """With the field selector `spec.nodeName`."""
    OTHER_NODES = "other nodes"
    """All Nodes, and the pods of any of them."""
    OWN_NODE = "own node"
    """The Node by its name, or by the field selector `metadata.name`."""
    LEASE_NAMESPACE = "namespace of the Leases"
    """`fleet.leaseNamespace` alone."""
    MOUNTED = "mounted by pods of the node"
    """Single claims and volumes of the node's pods."""
    EVERY_NAME = "every name"
    """A check of the API server for the name `*`."""


class Rule(NamedTuple):
    """A right as a rule of RBAC grants it."""

    verb: str
    group: str
    resource: str


class Right(NamedTuple):
    """One verb on one resource, and what needs it."""

    verb: str
    group: str
    """API group; empty for the core group."""
    resource: str
    """With its subresource: `pods/eviction`."""
    purpose: str
    """What needs it."""
    without: str
    """What fails without it."""
    need: Need
    identity: RequestIdentity
    scope: Scope = Scope.ALL
    used: Callable[[Config], bool] = lambda _: True
    """Whether this configuration uses it."""

    @property
    def name(self) -> str:
        """For people: `list pods`, `create events.events.k8s.io`."""
        return f"{self.verb} {resource_name(self.group, self.resource)}"

    @property
    def rule(self) -> "Rule":
        return Rule(self.verb, self.group, self.resource)

    @property
    def granted_to_all(self) -> bool:
        """Whether every authenticated identity has it."""
        return self.verb == "create" and (self.group, self.resource) in EVERYBODY

    @property
    def impersonated(self) -> "Right":
        """The verb that the ServiceAccount needs to send this as its node."""
        return self._replace(verb=IMPERSONATE_ON + self.verb)


def _enforce(config: Config) -> bool:
    return config.mode is Mode.ENFORCE


def _publishes(config: Config) -> bool:
    return _enforce(config) and (config.conditions.own or config.conditions.standard is not StandardConditions.OFF)


def _taints(config: Config) -> bool:
    return _enforce(config) and config.conditions.taint


def _deletes(config: Config) -> bool:
    return _enforce(config) and config.escalation.on_blocked is OnBlocked.DELETE


def _resizes(config: Config) -> bool:
    return _enforce(config) and config.own_limit.enabled and config.own_limit.resize.enabled


def _leases(config: Config) -> bool:
    return _enforce(config) and config.fleet.max_concurrent_evictions > 0


def _node_bound(config: Config) -> bool:
    return config.protection.node_bound


def _pdbs(config: Config) -> bool:
    return config.protection.disruption_budgets


def _replacements(config: Config) -> bool:
    return config.protection.replacement_wait_s > 0


def _node_fit(config: Config) -> bool:
    return config.protection.node_fit


def _eviction_requests(config: Config) -> bool:
    return _enforce(config) and config.eviction_request.enabled


def _finds_node_by_address(config: Config) -> bool:
    return not config.node_name


_NODE: Final = RequestIdentity.NODE
_ACCOUNT: Final = RequestIdentity.SERVICE_ACCOUNT
_PODS = ("the pods of this node", "no pod is evicted: the agent does not know the pods of the node")
_OWN_NODE = (
    "this node's own object",
    "no conditions, taints, eviction slots or profiles, and no pause for maintenance: the Node is not read",
)
_PDBS = ("PodDisruptionBudgets (protection.disruptionBudgets)", "the soft tier requests evictions that a PDB refuses")
_VOLUMES = (
    "local volumes (protection.nodeBound)",
    "the soft tier waits for pods with claims; the hard tier evicts them after 2 s, local volumes included",
)
_OWNERS = (
    "missing replicas (protection.replacementWait)",
    "the soft tier waits protection.replacementWait before each eviction: the replicas of the owner are unknown",
)
_NODE_FIT = (
    "room on other nodes (protection.nodeFit)",
    "the soft tier evicts nothing: whether another node takes a pod is unknown",
)
_EVENTS = ("Events on pods and the Node", "no Events: acts are in the log and the records only")
_OVERRIDE = ("escalation.onBlocked: delete", "the hard tier does not evict a pod that a PDB protects")
_REQUESTS = (
    "EvictionRequests of the soft tier (evictionRequest)",
    "the soft tier evicts through the Eviction API at once, and withdraws no EvictionRequest",
)
_RESIZES = (
    "raises of memory limits (ownLimit.resize)",
    "no memory limit is raised; pods that are near theirs are evicted if they opted in to that",
)
_SLOTS = ("eviction slots (fleet.maxConcurrentEvictions)", "the soft tier evicts nothing: it has no eviction slot")

EVICT: Final = Right(
    "create", "", "pods/eviction", "evictions", "no pod is evicted", Need.REQUIRED, _NODE, used=_enforce
)
FIND_NODE: Final = "finding the Node by this host's addresses (no nodeName)"
"""Of no use with credentials that belong to one node."""
EVENTS: Final = tuple(
    Right(verb, "events.k8s.io", "events", *_EVENTS, Need.FEATURE, _ACCOUNT, used=_enforce)
    for verb in ("create", "patch")
)
TAINT: Final = Right(
    "patch",
    "",
    "nodes",
    "taints (conditions.taint)",
    "no taints: new pods arrive during an eviction, and the soft tier waits 2 s for the taint",
    Need.FEATURE,
    _ACCOUNT,
    Scope.OWN_NODE,
    _taints,
)

RIGHTS: Final = (
    Right("list", "", "pods", *_PODS, Need.REQUIRED, _NODE, Scope.PODS_OF_NODE),
    Right("watch", "", "pods", *_PODS, Need.REQUIRED, _NODE, Scope.PODS_OF_NODE),
    EVICT,
    Right(
        "get",
        "",
        "nodes",
        "confirming the node's name",
        "the agent does not start: the node's name is not confirmed",
        Need.REQUIRED,
        _NODE,
        Scope.OWN_NODE,
    ),
    Right("list", "", "nodes", *_OWN_NODE, Need.REQUIRED, _NODE, Scope.OWN_NODE),
    Right("watch", "", "nodes", *_OWN_NODE, Need.REQUIRED, _NODE, Scope.OWN_NODE),
    Right(
        "list",
        "",
        "nodes",
        FIND_NODE,
        "a Node with another name than the host is not found; set nodeName",
        Need.FEATURE,
        _ACCOUNT,
        used=_finds_node_by_address,
    ),
    Right(
        "patch",
        "",
        "nodes/status",
        "pressure conditions",
        "no pressure condition: the scheduler goes on placing pods on the node",
        Need.REQUIRED,
        _ACCOUNT,
        Scope.OWN_NODE,
        _publishes,
    ),
    TAINT,
    Right("list", "policy", "poddisruptionbudgets", *_PDBS, Need.FEATURE, _ACCOUNT, used=_pdbs),
    Right("watch", "policy", "poddisruptionbudgets", *_PDBS, Need.FEATURE, _ACCOUNT, used=_pdbs),
    Right("get", "", "persistentvolumeclaims", *_VOLUMES, Need.FEATURE, _NODE, Scope.MOUNTED, _node_bound),
    Right("get", "", "persistentvolumes", *_VOLUMES, Need.FEATURE, _NODE, Scope.MOUNTED, _node_bound),
    Right("get", "apps", "replicasets", *_OWNERS, Need.FEATURE, _ACCOUNT, used=_replacements),
    Right("get", "apps", "statefulsets", *_OWNERS, Need.FEATURE, _ACCOUNT, used=_replacements),
    Right("list", "", "nodes", *_NODE_FIT, Need.FEATURE, _ACCOUNT, Scope.OTHER_NODES, _node_fit),
    Right("list", "", "pods", *_NODE_FIT, Need.FEATURE, _ACCOUNT, Scope.OTHER_NODES, _node_fit),
    *[
        Right(verb, "lifecycle.k8s.io", "evictionrequests", *_REQUESTS, Need.FEATURE, _ACCOUNT, used=_eviction_requests)
        for verb in ("create", "get", "patch")
    ],
    *EVENTS,
    Right("patch", "", "pods/status", *_OVERRIDE, Need.FEATURE, _ACCOUNT, used=_deletes),
    Right("delete", "", "pods", *_OVERRIDE, Need.FEATURE, _ACCOUNT, used=_deletes),
    Right("patch", "", "pods/resize", *_RESIZES, Need.FEATURE, _ACCOUNT, used=_resizes),
    Right("list", "coordination.k8s.io", "leases", *_SLOTS, Need.REQUIRED, _ACCOUNT, Scope.LEASE_NAMESPACE, _leases),
    Right("create", "coordination.k8s.io", "leases", *_SLOTS, Need.REQUIRED, _ACCOUNT, Scope.LEASE_NAMESPACE, _leases),
    Right("update", "coordination.k8s.io", "leases", *_SLOTS, Need.REQUIRED, _ACCOUNT, Scope.LEASE_NAMESPACE, _leases),
    Right(
        "create",
        AUTHORIZATION,
        "selfsubjectaccessreviews",
        "`check --rights` about the node's own rights",
        "`check --rights` cannot ask what the node itself may do",
        Need.CHECK,
        _NODE,
    ),
)
"""Every right that some configuration uses, in the order of a report."""

IMPERSONATION: Final = Right(
    IMPERSONATE,
    AUTHENTICATION,
    "nodes",
    "requests as the own node",
    "the agent sends every request as its ServiceAccount, whose rights are not limited to its node",
    Need.FEATURE,
    _ACCOUNT,
    Scope.EVERY_NAME,
)
"""The right that every impersonated request needs besides its own `impersonate-on` verb."""

CONFIGZ: Final = Right(
    "get",
    "",
    "nodes/proxy",
    "the kubelet's thresholds where its files cannot be read (aboveKubelet)",
    "aboveKubelet, where the kubelet's files cannot be read: its thresholds are not known, defaults assumed",
    Need.FEATURE,
    _ACCOUNT,
    Scope.OWN_NODE,
)
"""No configuration requires it, and no manifest grants it: it also allows to run commands in every pod of a node."""

NODE_EVENTS: Final = tuple(
    Right(verb, "", "events", *_EVENTS, Need.FEATURE, _NODE, used=_enforce) for verb in ("create", "patch")
)
"""Instead of those of events.k8s.io with a node's own credentials, which older API servers give only these."""

EVERYBODY: Final = frozenset(
    {
        (AUTHENTICATION, "selfsubjectreviews"),
        (AUTHORIZATION, "selfsubjectaccessreviews"),
        (AUTHORIZATION, "selfsubjectrulesreviews"),
    }
)
"""(group, resource) that every authenticated identity may create (ClusterRole system:basic-user)."""


class Denied(NamedTuple):
    """A 403 of the authorizer."""

    rule: Rule
    """The missing rule."""
    user: str
    right: Right | None
    """The right that needs it; None for a request that the table does not have."""


def resource_name(group: str, resource: str) -> str:
    """`pods`, `events.events.k8s.io`, `pods/eviction`."""
    return f"{resource}.{group}" if group else resource


def used_by(config: Config) -> tuple[Right, ...]:
    """The rights that this configuration uses, whichever identity sends them."""
    return tuple(right for right in RIGHTS if right.used(config))


def direct_rules(rights: Iterable[Right]) -> frozenset[Rule]:
    """What RBAC must grant to an identity that sends these requests as itself."""
    return frozenset(right.rule for right in rights if not right.granted_to_all)


def impersonation_rules(rights: Iterable[Right]) -> frozenset[Rule]:
    """What RBAC must grant to a ServiceAccount that sends these requests, as its node where `identity` says so."""
    rights = tuple(rights)
    as_node = [right.impersonated for right in rights if right.identity is _NODE]
    as_itself = [right for right in rights if right.identity is _ACCOUNT]
    return direct_rules((*as_node, *([IMPERSONATION] if as_node else ()), *as_itself))


def denied(message: str) -> Denied | None:
    """The rule that is missing according to the message of a 403; None if the message is not the authorizer's.

    For `impersonate-on:...` and `impersonate:...` the rule is the ServiceAccount's, otherwise that of the user in it.
    """
    match = _FORBIDDEN.search(message)
    if match is None:
        return None
    rule = Rule(match["verb"], match["group"], match["resource"])
    if rule == IMPERSONATION.rule:
        return Denied(rule, match["user"], IMPERSONATION)
    asked = rule._replace(verb=rule.verb.removeprefix(IMPERSONATE_ON))
    needed = (right for right in (*RIGHTS, *NODE_EVENTS, CONFIGZ) if right.rule == asked)
    return Denied(rule, match["user"], next(needed, None))


def missing_rule(message: str) -> str:
    """A sentence with the missing rule and what fails without it; empty if the message is not a 403 of the
    authorizer."""
    found = denied(message)
    if found is None:
        return ""
    without = f"; without it: {found.right.without}" if found.right is not None else ""
    return f"missing rule for {found.user}: {rule_text(found.rule)}{without}"


def rule_text(rule: Rule) -> str:
    """The rule as a role has it."""
    return f'apiGroups: ["{rule.group}"], resources: [{rule.resource}], verbs: [{_quoted(rule.verb)}]'


def _quoted(verb: str) -> str:
    """A verb for YAML in flow style, where a colon needs quotes."""
    return f'"{verb}"' if ":" in verb else verb

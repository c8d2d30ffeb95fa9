"""Who may do what: the Node authorizer, RBAC by the stored bindings, and the tests' own switches.

`AGENT` may do everything that no test takes away, except impersonating others than its own node; any other service
account has what bindings grant. Sources of rules and reasons: plugin/pkg/auth/authorizer/node/node_authorizer.go,
plugin/pkg/auth/authorizer/rbac and its bootstrappolicy/policy.go (NodeRules, system:basic-user).
"""

from typing import TYPE_CHECKING, NamedTuple

from tests.fake_kube.messages import Json, RefusedError, Request, Target

if TYPE_CHECKING:
    from tests.fake_kube.server import ApiServer

AGENT = "system:serviceaccount:kube-system:nodeagent"
AGENTS_REASON = (
    'RBAC: allowed by ClusterRoleBinding "nodeagent" of ClusterRole "nodeagent" to ServiceAccount '
    '"nodeagent/kube-system"'
)
ACCOUNT_USER = "system:serviceaccount:"
NODE_USER = "system:node:"
SELF_REVIEWS = {
    ("authentication.k8s.io", "selfsubjectreviews"),
    ("authorization.k8s.io", "selfsubjectaccessreviews"),
    ("authorization.k8s.io", "selfsubjectrulesreviews"),
}
"""What ClusterRole system:basic-user lets every authenticated user create."""
NODE_RULES = {
    ("create", "", "events"),
    ("patch", "", "events"),
}
"""What NodeRules have for objects without a rule of their own in the Node authorizer, as far as an agent asks."""
NODE_RULES_OF_136 = {
    ("create", "events.k8s.io", "events"),
    ("patch", "events.k8s.io", "events"),
}
"""Measured on 1.36.2; older servers are assumed to have only those of the core group."""


class Attributes(NamedTuple):
    """What a request asks for."""

    verb: str
    group: str
    resource: str
    """With its subresource."""
    namespace: str = ""
    name: str = ""
    fields: frozenset[tuple[str, str]] = frozenset()
    """Field selector: (field, value)."""


class Decision(NamedTuple):
    allowed: bool
    reason: str = ""


def attributes_of(request: Request, target: Target) -> Attributes:
    verb = {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}.get(request.method)
    if verb is None:
        watching = request.query.get("watch") in ("1", "true")
        verb = "get" if target.name else ("watch" if watching else "list")
    resource = target.resource + (f"/{target.subresource}" if target.subresource else "")
    terms = (term.partition("=") for term in request.query.get("fieldSelector", "").split(",") if term)
    fields = frozenset((field, value) for field, _, value in terms)
    # A list of one object by its name counts as named (k8s.io/apiserver, pkg/endpoints/request/requestinfo.go).
    name = target.name or dict(fields).get("metadata.name", "")
    return Attributes(verb, target.group, resource, target.namespace, name, fields)


def authorize(api: "ApiServer", user: str, asked: Attributes) -> None:
    """Raises RefusedError."""
    decision = decide(api, user, asked)
    if not decision.allowed:
        raise forbidden(user, asked, decision.reason)


def forbidden(user: str, asked: Attributes, reason: str = "") -> RefusedError:
    """pkg/endpoints/handlers/responsewriters/errors.go, ForbiddenStatusError. Recorded without a reason."""
    where = f'in the namespace "{asked.namespace}"' if asked.namespace else "at the cluster scope"
    resource = asked.resource.partition("/")[0]
    subject = f"{resource}.{asked.group}" if asked.group else resource
    details: Json = {"name": asked.name} if asked.name else {}
    if asked.group:
        details["group"] = asked.group
    details["kind"] = resource
    return RefusedError(
        403,
        "Forbidden",
        (f'{subject} "{asked.name}"' if asked.name else subject)
        + f' is forbidden: User "{user}" cannot {asked.verb} resource "{asked.resource}" '
        f'in API group "{asked.group}" {where}' + (f": {reason}" if reason else ""),
        details=details,
    )


def decide(api: "ApiServer", user: str, asked: Attributes) -> Decision:
    if user != "system:anonymous" and asked.verb == "create" and (asked.group, asked.resource) in SELF_REVIEWS:
        role = "system:basic-user"
        who = 'Group "system:authenticated"'
        return Decision(True, f'RBAC: allowed by ClusterRoleBinding "{role}" of ClusterRole "{role}" to {who}')
    if (asked.verb, asked.resource) in api.forbidden:
        return Decision(False)
    if user.startswith(NODE_USER):
        return _node_decides(api, user.removeprefix(NODE_USER), asked)
    decision = _rbac_decides(api, user, asked)
    if decision.allowed and api.rights is not None:
        return Decision(api.rights(asked.verb, asked.group, asked.resource, asked.namespace))
    return decision


# --- nodes -----------------------------------------------------------------------------------------------------------


def _node_decides(api: "ApiServer", node: str, asked: Attributes) -> Decision:
    resource, _, subresource = asked.resource.partition("/")
    if api.minor < 32 and asked.resource in ("pods", "nodes") and asked.verb in ("get", "list", "watch"):
        return Decision(True)  # AuthorizeNodeWithSelectors is off
    if not asked.group and resource == "pods":
        return _pods_of(api, node, asked, subresource)
    if not asked.group and resource == "nodes":
        return _own_node(node, asked, subresource)
    if not asked.group and resource in ("persistentvolumeclaims", "persistentvolumes"):
        if asked.verb != "get":
            return Decision(False, "can only get individual resources of this type")
        if not asked.name:
            return Decision(False, "No Object name found")
        return _related(_mounted_on(api, node, resource, asked.namespace, asked.name), node)
    if not asked.group and resource in ("secrets", "configmaps"):
        if not asked.namespace:
            return Decision(False, "can only read namespaced object of this type")
        return _related(False, node) if asked.name else Decision(False, "No Object name found")
    if resource == "leases":
        return Decision(False, 'can only access leases in the "kube-node-lease" system namespace')
    rule = asked[:3]
    return Decision(rule in NODE_RULES or (api.minor >= 36 and rule in NODE_RULES_OF_136))


def _pods_of(api: "ApiServer", node: str, asked: Attributes, subresource: str) -> Decision:
    if asked.verb in ("list", "watch") and not subresource:
        if ("spec.nodeName", node) in asked.fields:
            return Decision(True)
        if asked.name:
            return _related(_runs_on(api, node, asked), node)
        return Decision(False, "can only list/watch pods with spec.nodeName field selector")
    if asked.verb == "get" and not subresource:
        return _related(_runs_on(api, node, asked), node)
    allowed = {"": ("create", "delete"), "status": ("update", "patch"), "eviction": ("create",)}
    # Of which pods, NodeRestriction decides.
    return Decision(asked.verb in allowed.get(subresource, ()))


def _own_node(node: str, asked: Attributes, subresource: str) -> Decision:
    if subresource:
        return Decision(subresource == "status" and asked.verb in ("update", "patch"))
    if asked.verb in ("get", "list", "watch"):
        if asked.name == node:
            return Decision(True)
        what = f"'{asked.name}'" if asked.name else "all nodes"
        return Decision(False, f"node '{node}' cannot read {what}, only its own Node object")
    # Which node, NodeRestriction decides.
    return Decision(asked.verb in ("create", "update", "patch"))


def _related(found: bool, node: str) -> Decision:
    return Decision(found, "" if found else f"no relationship found between node '{node}' and this object")


def _runs_on(api: "ApiServer", node: str, asked: Attributes) -> bool:
    pod = api.store.objects["pods"].get((asked.namespace, asked.name))
    return pod is not None and pod["spec"].get("nodeName") == node


def _mounted_on(api: "ApiServer", node: str, resource: str, namespace: str, name: str) -> bool:
    """The Node authorizer's graph: pod of the node, its claims, their volumes."""
    claims = {
        (pod_namespace, volume["persistentVolumeClaim"]["claimName"])
        for (pod_namespace, _), pod in api.store.objects["pods"].items()
        if pod["spec"].get("nodeName") == node
        for volume in pod["spec"].get("volumes", ())
        if "persistentVolumeClaim" in volume
    }
    if resource == "persistentvolumeclaims":
        return (namespace, name) in claims
    bound = (api.store.objects["persistentvolumeclaims"].get(claim, {}) for claim in claims)
    return any(claim.get("spec", {}).get("volumeName") == name for claim in bound)


# --- RBAC ------------------------------------------------------------------------------------------------------------


def _rbac_decides(api: "ApiServer", user: str, asked: Attributes) -> Decision:
    if user == AGENT or not user.startswith(ACCOUNT_USER):
        own = ("impersonate:associated-node", "impersonate-on:associated-node:")
        others = asked.verb.startswith("impersonate") and not asked.verb.startswith(own)
        return Decision(True, AGENTS_REASON) if user != "system:anonymous" and not others else Decision(False)
    for binding, rule in rules_of(api, user, asked.namespace):
        if _covers(rule, asked):
            kind = "RoleBinding" if "namespace" in binding["metadata"] else "ClusterRoleBinding"
            name, role = binding["metadata"]["name"], binding["roleRef"]
            subject = next(_shown(each) for each in binding["subjects"] if _user_of(each) == user)
            shown = f'{kind} "{name}' + (f'/{asked.namespace}"' if kind == "RoleBinding" else '"')
            reason = f'RBAC: allowed by {shown} of {role["kind"]} "{role["name"]}" to {subject}'
            return Decision(True, reason)
    return Decision(False)


def rules_of(api: "ApiServer", user: str, namespace: str) -> list[tuple[Json, Json]]:
    """(binding, rule) of the bindings that name this service account: cluster-wide ones, then the namespace's."""
    bindings = [("clusterroles", "", each) for each in api.store.objects["clusterrolebindings"].values()]
    bindings += [
        ("roles", namespace, each)
        for (where, _), each in api.store.objects["rolebindings"].items()
        if where == namespace
    ]
    return [
        (binding, rule)
        for kind, where, binding in bindings
        if user in map(_user_of, binding["subjects"])
        for rule in api.store.objects[kind][where, binding["roleRef"]["name"]]["rules"]
    ]


def _user_of(subject: Json) -> str:
    """The account that a subject names (appliesToUser): a service account or a user; no groups here."""
    return f"{ACCOUNT_USER}{subject['namespace']}:{subject['name']}" if "namespace" in subject else subject["name"]


def _shown(subject: Json) -> str:
    """describeSubject of the same file."""
    where = f"/{subject['namespace']}" if "namespace" in subject else ""
    return f'{subject["kind"]} "{subject["name"]}{where}"'


def _covers(rule: Json, asked: Attributes) -> bool:
    """RuleAllows (plugin/pkg/auth/authorizer/rbac/rbac.go): a name is compared only if the rule has names."""
    names = rule.get("resourceNames") or [asked.name]
    return (
        bool({asked.verb, "*"} & set(rule["verbs"]))
        and bool({asked.group, "*"} & set(rule["apiGroups"]))
        and bool({asked.resource, "*"} & set(rule["resources"]))
        and asked.name in names
    )

"""Authentication, the Node authorizer, RBAC, reviews and tokens."""

import time
import uuid
from typing import TYPE_CHECKING

from tests.fake_kube import messages, writes
from tests.fake_kube.messages import Answer, Json, RefusedError, Request, Target

if TYPE_CHECKING:
    from tests.fake_kube.server import ApiServer

AGENT = "system:serviceaccount:kube-system:nodeagent"
NODE_USER = "system:node:"
NODE_RULES = {
    ("patch", "", "nodes"),
    ("patch", "", "nodes/status"),
    ("create", "", "pods/eviction"),
    ("patch", "", "pods/status"),
    ("delete", "", "pods"),
    ("create", "", "events"),
    ("patch", "", "events"),
}
"""What a node's credentials may do whatever the object. No events.k8s.io, no PDBs, no Leases of others."""
NOBODY = "system:serviceaccount:default:nobody-sa"


def authenticate(api: "ApiServer", request: Request) -> str:
    authorization = request.headers.get("authorization", "")
    if not authorization:
        return "system:anonymous"
    user = api.tokens.get(authorization.partition(" ")[2])
    if user is None:
        raise RefusedError(401, "Unauthorized", "Unauthorized")
    return user


def authorize(api: "ApiServer", request: Request, user: str, target: Target) -> None:
    verb = {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}.get(request.method)
    if verb is None:
        watching = request.query.get("watch") in ("1", "true")
        verb = "get" if target.name else ("watch" if watching else "list")
    resource = target.resource + (f"/{target.subresource}" if target.subresource else "")
    unknown = user == "system:anonymous" or (user.startswith("system:serviceaccount:") and user != AGENT)
    unknown = unknown and not granted(api, user, verb, target.group, resource, target.namespace)
    allowed = not unknown and (verb, resource) not in api.forbidden
    if allowed and user.startswith(NODE_USER):
        allowed = node_may(api, user.removeprefix(NODE_USER), verb, resource, request, target)
    if allowed and api.rights is not None and resource != "selfsubjectreviews":
        allowed = api.rights(verb, target.group, resource, target.namespace)
    if allowed or resource == "selfsubjectreviews":
        return
    where = f'in the namespace "{target.namespace}"' if target.namespace else "at the cluster scope"
    subject = f'{target.group_resource} "{target.name}"' if target.name else target.group_resource
    details: Json = {"name": target.name} if target.name else {}
    if target.group:
        details["group"] = target.group
    details["kind"] = target.resource
    raise RefusedError(
        403,
        "Forbidden",
        f'{subject} is forbidden: User "{user}" cannot {verb} resource "{resource}" '
        f'in API group "{target.group}" {where}',
        details=details,
    )


def node_may(api: "ApiServer", node: str, verb: str, resource: str, request: Request, target: Target) -> bool:
    """The Node authorizer (plugin/pkg/auth/authorizer/node/node_authorizer.go) and the rules that it falls back to
    (plugin/pkg/auth/authorizer/rbac/bootstrappolicy/policy.go, NodeRules), as far as an agent asks."""
    if resource in ("persistentvolumeclaims", "persistentvolumes"):
        return verb == "get" and mounted_on(api, node, target)
    if resource in ("nodes", "pods") and verb in ("list", "watch"):
        field = "metadata.name" if resource == "nodes" else "spec.nodeName"
        return request.query.get("fieldSelector") == f"{field}={node}"
    if resource == "nodes" and verb == "get":
        return target.name == node
    return (verb, target.group, resource) in NODE_RULES


def mounted_on(api: "ApiServer", node: str, target: Target) -> bool:
    """The Node authorizer's graph: pod of the node, its claims, their volumes."""
    claims = {
        (namespace, volume["persistentVolumeClaim"]["claimName"])
        for (namespace, _), pod in api.store.objects["pods"].items()
        if pod["spec"].get("nodeName") == node
        for volume in pod["spec"].get("volumes", ())
        if "persistentVolumeClaim" in volume
    }
    if target.resource == "persistentvolumeclaims":
        return (target.namespace, target.name) in claims
    bound = (api.store.objects["persistentvolumeclaims"].get(claim, {}) for claim in claims)
    return any(claim.get("spec", {}).get("volumeName") == target.name for claim in bound)


def granted(api: "ApiServer", user: str, verb: str, group: str, resource: str, namespace: str) -> bool:
    """Whether a ClusterRoleBinding, or a RoleBinding of the namespace, gives this right to a service account."""
    bindings = [("clusterroles", "", each) for each in api.store.objects["clusterrolebindings"].values()]
    bindings += [
        ("roles", namespace, each)
        for (where, _), each in api.store.objects["rolebindings"].items()
        if where == namespace
    ]
    for kind, where, binding in bindings:
        subjects = (f"system:serviceaccount:{s['namespace']}:{s['name']}" for s in binding["subjects"])
        if user in subjects:
            rules = api.store.objects[kind][where, binding["roleRef"]["name"]]["rules"]
            if any(group in r["apiGroups"] and resource in r["resources"] and verb in r["verbs"] for r in rules):
                return True
    return False


def review(api: "ApiServer", request: Request, user: str, target: Target) -> Answer:
    body: Json = {"kind": target.kind, "apiVersion": target.api_version, "metadata": {}}
    spec = {k: v for k, v in (request.body.get("spec") or {}).items() if v is not None}
    writes.set_managers({**body, "spec": spec}, {}, request, target)
    if target.resource == "selfsubjectreviews":
        body["metadata"] = {"creationTimestamp": messages.rfc3339()}
        body["status"] = {"userInfo": user_info(api, user, request)}
    elif target.resource == "tokenreviews":
        known = api.tokens.get(spec["token"])
        body["spec"] = spec
        body["status"] = {"user": {}, "error": "invalid bearer token"}
        if known:
            audiences = ["https://kubernetes.default.svc"]
            body["status"] = {"authenticated": True, "user": user_info(api, known), "audiences": audiences}
    else:
        attributes = spec["resourceAttributes"]
        resource = "/".join(filter(None, (attributes["resource"], attributes.get("subresource"))))
        allowed = spec["user"] not in (NOBODY, "system:anonymous")
        allowed = allowed and (attributes["verb"], resource) not in api.forbidden
        body["spec"] = spec
        body["status"] = {"allowed": allowed}
        if allowed:
            body["status"]["reason"] = (
                'RBAC: allowed by ClusterRoleBinding "nodeagent" of ClusterRole "nodeagent" '
                'to ServiceAccount "nodeagent/kube-system"'
            )
    return Answer(201, body)


def user_info(api: "ApiServer", user: str, request: Request | None = None) -> Json:
    if not user.startswith("system:serviceaccount:"):
        groups = ["system:nodes"] if user.startswith("system:node:") else []
        return {"username": user, "groups": [*groups, "system:authenticated"]}
    namespace = user.split(":")[2]
    extra = {"authentication.kubernetes.io/credential-id": [f"JTI={uuid.uuid4()}"]}
    token = request.headers.get("authorization", "").partition(" ")[2] if request is not None else ""
    if token in api.token_nodes:
        extra["authentication.kubernetes.io/node-name"] = [api.token_nodes[token]]
    return {
        "username": user,
        "uid": str(uuid.uuid4()),
        "groups": ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"],
        "extra": extra,
    }


def request_token(api: "ApiServer", request: Request, target: Target) -> Answer:
    bound = request.body["spec"].get("boundObjectRef")
    pod = api.store.objects["pods"][target.namespace, bound["name"]] if bound else {"spec": {"nodeName": ""}}
    token = api.token_of(target.namespace, target.name, node=pod["spec"]["nodeName"])
    seconds = request.body["spec"]["expirationSeconds"]
    metadata = {"name": target.name, "namespace": target.namespace, "uid": str(uuid.uuid4())}
    writes.set_managers({**request.body, "metadata": metadata}, {}, request, target)
    spec = {"audiences": ["https://kubernetes.default.svc"], "expirationSeconds": seconds, "boundObjectRef": None}
    return Answer(
        201,
        {
            "kind": "TokenRequest",
            "apiVersion": "authentication.k8s.io/v1",
            "metadata": {**metadata, "creationTimestamp": messages.rfc3339()},
            "spec": spec,
            "status": {"token": token, "expirationTimestamp": messages.rfc3339(time.time() + seconds)},
        },
    )

"""Admission: NodeRestriction, admission policies, and what validation refuses."""

from typing import TYPE_CHECKING, Any

from tests.fake_kube import auth, watch
from tests.fake_kube.authorizer import NODE_USER
from tests.fake_kube.messages import Json, RefusedError, Request, Target

if TYPE_CHECKING:
    from tests.fake_kube.server import ApiServer


def admit(api: "ApiServer", request: Request, target: Target, old: Json | None, new: Json | None) -> None:
    user = auth.acting_user(api, request)
    if user.startswith(NODE_USER):
        node = user.removeprefix(NODE_USER)
        if target.resource == "nodes" and old is not None and new is not None:
            restrict_node(node, target, old, new)
        elif target.resource == "pods":
            restrict_pod(api, node, target, deleted=new is None)
    if api.admit is None:
        return
    asked: Json = {
        "operation": "CREATE" if old is None else "UPDATE" if new is not None else "DELETE",
        "resource": {"group": target.group, "version": target.version, "resource": target.resource},
        "namespace": target.namespace,
        "userInfo": auth.user_info(api, user, request),
        **({"subResource": target.subresource} if target.subresource else {}),
    }
    if messages := api.admit(asked, old, new):
        subject = f'{target.group_resource} "{target.name}" is forbidden'
        raise RefusedError(403, "Forbidden", f"{subject}: {messages[0]}", details=target.details())


def restrict_pod(api: "ApiServer", node: str, target: Target, *, deleted: bool) -> None:
    """NodeRestriction (plugin/pkg/admission/noderestriction/admission.go, admitPod, admitPodStatus, admitPodEviction):
    evictions, deletions and status only of the node's own pods."""
    pod = watch.stored_object(api, target._replace(subresource=""))
    if pod["spec"].get("nodeName") == node and target.subresource in ("", "status", "eviction"):
        return
    only = f"unexpected pod subresource \"{target.subresource}\", only 'status' and 'eviction' are allowed"
    why = {
        "eviction": f"node {node} can only evict pods with spec.nodeName set to itself",
        "status": f'node "{node}" can only update pod status for pods with spec.nodeName set to itself',
        "": f'node "{node}" can only {"delete" if deleted else "create"} pods with spec.nodeName set to itself',
    }.get(target.subresource, only)
    subject = f'{target.group_resource} "{target.name}" is forbidden'
    raise RefusedError(403, "Forbidden", f"{subject}: {why}", details=target.details())


def restrict_node(node: str, target: Target, old: Json, new: Json) -> None:
    """NodeRestriction (the same file, admitNode)."""
    why = ""
    if target.name != node:
        why = f'node "{node}" is not allowed to modify node "{target.name}"'
    elif old["spec"].get("taints") != new["spec"].get("taints"):
        why = f'node "{node}" is not allowed to modify taints'
    if why:
        subject = f'{target.group_resource} "{target.name}" is forbidden'
        raise RefusedError(403, "Forbidden", f"{subject}: {why}", details=target.details())


def check_pod_patch(api: "ApiServer", entry: Json, patch: Json) -> None:
    uid = patch.get("metadata", {}).get("uid", entry["metadata"]["uid"])
    if uid != entry["metadata"]["uid"]:
        name = entry["metadata"]["name"]
        text = f'Invalid value: "{uid}": field is immutable'
        cause = {"reason": "FieldValueInvalid", "message": text, "field": "metadata.uid"}
        raise RefusedError(
            422,
            "Invalid",
            f'Pod "{name}" is invalid: metadata.uid: {text}',
            details={"name": name, "kind": "Pod", "causes": [cause, cause]},
        )


def check_version(entry: Json, patch: Any, target: Target) -> None:
    asked = patch.get("metadata", {}).get("resourceVersion") if isinstance(patch, dict) else None
    if asked and asked != entry["metadata"]["resourceVersion"]:
        raise RefusedError(
            409,
            "Conflict",
            f'Operation cannot be fulfilled on {target.group_resource} "{target.name}": the object has been modified; '
            "please apply your changes to the latest version and try again",
            details=target.details(),
        )


def check_node_patch(name: str, patch: Json) -> None:
    conditions = patch.get("status", {}).get("conditions", [])
    if not isinstance(conditions, list):
        text = f'Invalid value: "map[status:map[conditions:{conditions}]]": cannot restore slice from string'
        cause = {"reason": "FieldValueInvalid", "message": text, "field": "patch"}
        raise RefusedError(422, "Invalid", f' "" is invalid: patch: {text}', details={"causes": [cause]})
    for condition in conditions:
        if "type" not in condition:
            shown = " ".join(f"{key}:{value}" for key, value in condition.items())
            raise RefusedError(500, "", f"map: map[{shown}] does not contain declared merge key: type")
    for resource, amount in patch.get("status", {}).get("capacity", {}).items():
        if str(amount).startswith("-"):
            field = f"status.capacity.{resource}"
            text = f'Invalid value: "{amount}": must be greater than or equal to 0'
            cause = {"reason": "FieldValueInvalid", "message": text, "field": field}
            raise RefusedError(
                422,
                "Invalid",
                f'Node "{name}" is invalid: {field}: {text}',
                details={"name": name, "kind": "Node", "causes": [cause]},
            )


def check_event(entry: Json, target: Target) -> None:
    """pkg/apis/core/validation/events.go: what an Event of the new kind must have, in either group."""
    modern = bool(entry.get("eventTime"))
    controller = "reportingController" if target.group else "reportingComponent"
    problems = []
    if target.group and not modern:
        problems.append(("eventTime", "Required value"))
    for field in (controller, "reportingInstance", "action", "reason") if modern else ():
        if not entry.get(field):
            problems.append((field, "Required value"))
        elif len(entry[field]) > 128 and field != controller:
            problems.append((field, 'Invalid value: "": can have at most 128 characters'))
    if modern and len(entry.get("note" if target.group else "message", "").encode()) > 1024:
        problems.append(("message", 'Invalid value: "": can have at most 1024 characters'))
    if target.group and entry.get("series") and entry["series"]["count"] < 2:
        problems.append(("series.count", 'Invalid value: "": should be at least 2'))
    about = entry.get("regarding" if target.group else "involvedObject", {}).get("namespace") or "default"
    if about != target.namespace:
        problems.append(("involvedObject.namespace", f'Invalid value: "{about}": does not match event.namespace'))
    if not problems:
        return
    name = entry["metadata"]["name"]
    reasons = {True: "FieldValueRequired", False: "FieldValueInvalid"}
    causes = [{"reason": reasons[t.startswith("Required")], "message": t, "field": f} for f, t in problems]
    text = "; ".join(f"{field}: {message}" for field, message in problems)
    raise RefusedError(
        422,
        "Invalid",
        f'Event "{name}" is invalid: {text}',
        details={"name": name, "kind": "Event", "causes": causes},
    )

"""Creates, patches, replaces and binds: strategic merge, `managedFields`."""

import uuid
from typing import TYPE_CHECKING

from tests.fake_kube import admission, eviction_requests, managed_fields, messages, objects, watch
from tests.fake_kube.messages import Answer, Json, RefusedError, Request, Target

if TYPE_CHECKING:
    from tests.fake_kube.server import ApiServer

STRATEGIC = "application/strategic-merge-patch+json"


def bind(api: "ApiServer", request: Request, target: Target) -> Answer:
    """What a scheduler does (BindingREST, pkg/registry/core/pod/storage/storage.go). It leaves no managedFields."""
    entry = watch.stored_object(api, target._replace(subresource=""))
    message = ""
    if "deletionTimestamp" in entry["metadata"]:
        message = f"pod {target.name} is being deleted, cannot be assigned to a host"
    elif node := entry["spec"].get("nodeName"):
        message = f'pod {target.name} is already assigned to node "{node}"'
    if message:
        subject = f'Operation cannot be fulfilled on pods/binding "{target.name}"'
        raise RefusedError(409, "Conflict", f"{subject}: {message}", details=target.details())

    def place(pod: Json) -> None:
        pod["spec"]["nodeName"] = request.body["target"]["name"]
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": messages.rfc3339()}
        pod["status"]["conditions"] = [{**scheduled, "lastProbeTime": None}]

    api.modify_pod(target.namespace, target.name, place)
    return Answer(201, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201})


def create(api: "ApiServer", request: Request, target: Target) -> Answer:
    entry = messages.copy_of(request.body)
    metadata = entry.setdefault("metadata", {})
    if not metadata.get("name"):
        metadata["name"] = metadata.get("generateName", "") + uuid.uuid4().hex[:5]
    if target.namespace:
        metadata["namespace"] = target.namespace
    set_managers(entry, {}, request, target)
    admission.admit(api, request, target, None, entry)
    if target.resource == "events":
        complete_event(api, entry, target)
    elif target.resource == "pods":
        entry["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
    elif target.resource == "nodes":
        entry["status"] = {}
    elif target.resource == "poddisruptionbudgets":
        complete_pdb(api, entry, target)
    elif target.resource == eviction_requests.RESOURCE:
        eviction_requests.complete(api, entry, target)
    elif target.resource == "namespaces":
        account = {"metadata": {"name": "default", "namespace": metadata["name"]}}
        api.store.put("serviceaccounts", account, "ADDED")
    if (target.namespace, metadata["name"]) in api.store.objects.setdefault(target.resource, {}):
        message = f'{target.group_resource} "{metadata["name"]}" already exists'
        raise RefusedError(409, "AlreadyExists", message, details=target._replace(name=metadata["name"]).details())
    stored = entry if request.query.get("dryRun") == "All" else api.store.put(target.resource, entry, "ADDED")
    return Answer(201, {"kind": target.kind, "apiVersion": target.api_version, **stored})


def complete_pdb(api: "ApiServer", entry: Json, target: Target) -> None:
    """The status that the disruption controller writes for a new PDB."""
    labels = entry["spec"]["selector"]["matchLabels"].items()
    pods = [
        pod
        for (namespace, _), pod in api.store.objects["pods"].items()
        if namespace == target.namespace and labels <= (pod["metadata"].get("labels") or {}).items()
    ]
    healthy = sum(map(objects.is_ready, pods))
    needed = entry["spec"]["minAvailable"]
    entry["metadata"]["generation"] = 1
    entry["status"] = {
        "observedGeneration": 1,
        "disruptionsAllowed": max(0, healthy - needed),
        "currentHealthy": healthy,
        "desiredHealthy": needed,
        "expectedPods": len(pods),
    }


def complete_event(api: "ApiServer", entry: Json, target: Target) -> None:
    admission.check_event(entry, target)
    if target.group:
        entry.update(deprecatedSource={}, deprecatedFirstTimestamp=None, deprecatedLastTimestamp=None)
    elif not entry.get("eventTime"):
        entry.update(eventTime=None, reportingComponent="", reportingInstance="")


def patch(api: "ApiServer", request: Request, target: Target) -> Answer:
    entry = messages.copy_of(watch.stored_object(api, target._replace(subresource="")))
    content_type = request.headers.get("content-type", "").partition(";")[0]
    if content_type not in (STRATEGIC, "application/merge-patch+json", "application/json-patch+json"):
        raise RefusedError(415, "UnsupportedMediaType", "415: Unsupported Media Type", details={})
    patch = request.body
    admission.check_version(entry, patch, target)
    if target.resource == "nodes":
        admission.check_node_patch(target.name, patch)
        new = messages.copy_of(entry)
        change_node(new, patch, target.subresource)
        admission.admit(api, request, target, entry, new)
        if request.query.get("dryRun") == "All":
            return Answer(200, new)
        stored = patch_node(api, target.name, patch, target.subresource, request)
    elif target.resource == "pods":
        admission.check_pod_patch(api, entry, patch)
        stored = api.store.objects["pods"][target.namespace, target.name]
        if target.subresource == "status":
            new = messages.copy_of(entry)
            merge(
                new["metadata"],
                {k: v for k, v in patch.get("metadata", {}).items() if k in ("labels", "annotations")},
            )
            merge_status(new, patch.get("status", {}))
            admission.admit(api, request, target, entry, new)
        if target.subresource == "status" and request.query.get("dryRun") != "All":
            merge_status(stored, patch.get("status", {}), new={"lastProbeTime": None})
            set_managers(stored, entry, request, target)
            api.store.record("pods", stored, "MODIFIED")
    else:
        stored = api.store.objects[target.resource][target.namespace, target.name]
        changes = {k: v for k, v in patch.items() if k != "metadata"}
        new = messages.copy_of(entry)
        merge(new, changes)
        if target.resource == "events":
            admission.check_event(new, target)
        admission.admit(api, request, target, entry, new)
        merge(stored, changes)
        set_managers(stored, entry, request, target)
        api.store.record(target.resource, stored, "MODIFIED")
    return Answer(200, {"kind": target.kind, "apiVersion": target.api_version, **stored})


def patch_node(api: "ApiServer", name: str, patch: Json, subresource: str, request: Request | None = None) -> Json:
    """Without a request: by the kubelet or the control plane."""
    stored = api.store.objects["nodes"]["", name]
    before = messages.copy_of(stored)
    change_node(stored, patch, subresource)
    set_managers(stored, before, request, Target("", "v1", "", "nodes", name, subresource))
    if _content(before) != _content(stored):
        api.store.record("nodes", stored, "MODIFIED")
    return stored


def _content(entry: Json) -> Json:
    """Without what a server itself writes."""
    metadata = {name: entry["metadata"].get(name) or {} for name in ("labels", "annotations")}
    return {**entry, "metadata": metadata}


def replace(api: "ApiServer", request: Request, target: Target) -> Answer:
    entry = watch.stored_object(api, target._replace(subresource=""))
    admission.check_version(entry, request.body, target)
    new = messages.copy_of({**entry, **request.body})
    admission.admit(api, request, target, entry, new)
    set_managers(new, entry, request, target)
    stored = api.store.put(target.resource, new, "MODIFIED")
    return Answer(200, stored)


def set_managers(new: Json, old: Json, request: Request | None, target: Target) -> None:
    """Record in managedFields which client has changed which field: by its field manager, or by its name."""
    manager = "kube-controller-manager" if target.subresource == "" else "kubelet"
    if request is not None:
        client = request.headers.get("user-agent", "").partition("/")[0][:128]
        manager = request.query.get("fieldManager") or client or "unknown"
    parts: tuple[str, ...] = ()
    if target.resource in ("pods", "nodes", "poddisruptionbudgets"):
        # A status has a way of its own; what comes the other way is dropped.
        parts = ("metadata", "status" if target.subresource == "status" else "spec")
    # A subresource may be of another version than what it belongs to.
    version = target.api_version if target.subresource != "token" else new["apiVersion"]
    managers = managed_fields.changed(
        old, new, manager=manager, api_version=version, subresource=target.subresource, parts=parts
    )
    if managers:
        new["metadata"]["managedFields"] = managers


def change_node(node: Json, patch: Json, subresource: str) -> None:
    for field, added in patch.get("metadata", {}).items():
        if field in ("labels", "annotations"):
            node["metadata"].setdefault(field, {}).update(added)
    if subresource == "status":
        merge_status(node, patch.get("status", {}))
        return
    node["spec"].update({key: value for key, value in patch.get("spec", {}).items() if key != "taints"})
    taints = patch.get("spec", {}).get("taints")
    # An atomic list: it is replaced as a whole. A directive inside it is not understood and nothing happens.
    if taints is not None and not any("$patch" in taint for taint in taints):
        node["spec"]["taints"] = messages.copy_of(taints)
        if not taints:
            del node["spec"]["taints"]


def merge_status(stored: Json, status: Json, *, new: Json | None = None) -> None:
    """Strategic merge of a status: conditions by type (a new one starts as `new`), everything else replaced."""
    new = new or {}
    for key, value in status.items():
        if key != "conditions":
            stored["status"][key] = value
            if value is None:
                del stored["status"][key]
            continue
        conditions = stored["status"].setdefault("conditions", [])
        for change in value:
            old = next((c for c in conditions if c["type"] == change["type"]), None)
            if change.get("$patch") == "delete":
                if old is not None:
                    conditions.remove(old)
            elif old is not None:
                old.update(change)
            else:
                conditions.insert(0, {**new, **change})


def merge(stored: Json, patch: Json) -> None:
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(stored.get(key), dict):
            merge(stored[key], value)
        elif value is None:
            stored.pop(key, None)
        else:
            stored[key] = value

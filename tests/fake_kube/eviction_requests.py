"""EvictionRequests of the double (`lifecycle.k8s.io/v1alpha1`), and what their controller does to them.

Written from the types of KEP-4563 (kubernetes/enhancements at 64765b4b, keps/sig-node/4563-eviction-request-api), never
recorded. `Serving` is how the server names the requester: the KEP `requesterName`, the API as released in Kubernetes
1.37 `requester`. A field that the server does not know is dropped, as with `fieldValidation: Warn`, its default.
"""

import re
from typing import TYPE_CHECKING, Any

from tests.fake_kube import admission, messages, watch
from tests.fake_kube.messages import Answer, Json, RefusedError, Request, Target

if TYPE_CHECKING:
    from tests.fake_kube.server import ApiServer

GROUP = "lifecycle.k8s.io"
ROOT = f"/apis/{GROUP}/v1alpha1"
RESOURCE = "evictionrequests"
INTENTS = ("Eviction", "Withdrawn")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_DOMAIN_PREFIXED = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")


def discovery() -> Answer:
    verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
    resources = [
        {"name": RESOURCE, "singularName": "evictionrequest", "namespaced": True, "kind": "EvictionRequest",
         "verbs": verbs},
        {"name": f"{RESOURCE}/status", "singularName": "", "namespaced": True, "kind": "EvictionRequest",
         "verbs": ["get", "patch", "update"]},
    ]  # fmt: skip
    return Answer(
        200,
        {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{GROUP}/v1alpha1", "resources": resources},
    )


def not_served() -> Answer:
    """A path of a group that the server does not have."""
    return Answer(404, b"404 page not found\n", "text/plain; charset=utf-8")


def complete(api: "ApiServer", entry: Json, target: Target) -> None:
    """A new object: fields that the type has, its first generation, an empty status. Raises RefusedError."""
    field = api.eviction_requests
    spec = entry.get("spec") or {}
    entry["spec"] = {key: value for key, value in spec.items() if key in ("target", "intent", field)}
    entry["status"] = {}
    entry["metadata"]["generation"] = 1
    name = entry["metadata"]["name"]
    spec = entry["spec"]
    pod = (spec.get("target") or {}).get("pod") or {}
    problems = [
        (f"spec.{field}", "Required value") if not spec.get(field) else None,
        (f"spec.{field}", "Invalid value") if spec.get(field) and not _is_requester(spec[field]) else None,
        ("spec.target.pod.name", "Required value") if not pod.get("name") else None,
        ("spec.target.pod.uid", "Invalid value") if not _UUID.fullmatch(pod.get("uid", "")) else None,
        ("spec.intent", "Unsupported value") if spec.get("intent") not in INTENTS else None,
    ]
    _refuse(target, name, [each for each in problems if each is not None])


def patch(api: "ApiServer", request: Request, target: Target) -> Answer:
    """A JSON merge patch of the spec. The target and the requester are immutable; a change is a new generation."""
    stored = api.store.objects[RESOURCE].get((target.namespace, target.name))
    watch.stored_object(api, target)
    assert stored is not None
    if request.headers.get("content-type", "").partition(";")[0] != "application/merge-patch+json":
        # Also strategic merge for built-in types; no client of this project sends one.
        raise RefusedError(415, "UnsupportedMediaType", "415: Unsupported Media Type", details={})
    old, new = messages.copy_of(stored), messages.copy_of(stored)
    field = api.eviction_requests
    changes = {key: value for key, value in request.body.get("spec", {}).items() if key in ("target", "intent", field)}
    new["spec"].update(changes)
    changed = [key for key in ("target", field) if new["spec"].get(key) != old["spec"].get(key)]
    problems = [(f"spec.{key}", "Invalid value: field is immutable") for key in changed]
    if new["spec"].get("intent") not in INTENTS:
        problems.append(("spec.intent", "Unsupported value"))
    _refuse(target, target.name, problems)
    admission.admit(api, request, target, old, new)
    if new["spec"] != old["spec"]:
        stored["spec"] = new["spec"]
        stored["metadata"]["generation"] += 1
        api.store.record(RESOURCE, stored, "MODIFIED")
    return Answer(200, {"kind": target.kind, "apiVersion": target.api_version, **stored})


def _is_requester(name: str) -> bool:
    domain = name.partition("/")[0]
    reserved = domain.endswith((".k8s.io", ".kubernetes.io")) or domain in ("k8s.io", "kubernetes.io")
    return bool(_DOMAIN_PREFIXED.fullmatch(name)) and not reserved


def _refuse(target: Target, name: str, problems: list[tuple[str, str]]) -> None:
    if not problems:
        return
    causes = [{"reason": "FieldValueInvalid", "message": text, "field": field} for field, text in problems]
    field, text = problems[0]
    details = {"name": name, "group": GROUP, "kind": "EvictionRequest", "causes": causes}
    message = f'EvictionRequest.{GROUP} "{name}" is invalid: {field}: {text}'
    raise RefusedError(422, "Invalid", message, details=details)


# --- what others do: the controller, responders, other clients -------------------------------------------------------


def of_pod(api: "ApiServer", uid: str) -> Json | None:
    """The request for this pod; None without one."""
    with api.store.changed:
        found = (each for each in api.store.objects[RESOURCE].values() if each["spec"]["target"]["pod"]["uid"] == uid)
        return messages.copy_of(next(found, None))


def set_condition(api: "ApiServer", uid: str, kind: str, reason: str, message: str = "", *, observed: int = 0) -> None:
    """The controller sets a condition to True. `observed`: the generation that it has seen; 0: the present one."""
    with api.store.changed:
        entry = next(e for e in api.store.objects[RESOURCE].values() if e["spec"]["target"]["pod"]["uid"] == uid)
        generation = observed or entry["metadata"]["generation"]
        condition: dict[str, Any] = {
            "type": kind,
            "status": "True",
            "reason": reason,
            "message": message,
            "observedGeneration": generation,
            "lastTransitionTime": messages.rfc3339(),
        }
        entry["status"] = {"observedGeneration": generation, "conditions": [condition]}
        api.store.record(RESOURCE, entry, "MODIFIED")


def delete(api: "ApiServer", uid: str) -> None:
    """Another client deletes the request."""
    with api.store.changed:
        objects = api.store.objects[RESOURCE]
        key = next(key for key, each in objects.items() if each["spec"]["target"]["pod"]["uid"] == uid)
        api.store.record(RESOURCE, objects.pop(key), "DELETED")

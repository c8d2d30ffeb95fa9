"""The subresource `resize` of a pod, and what a kubelet makes of a resize.

None of these answers is recorded: no API server with the subresource was at hand (tests/e2e/test_resize.py tries the
same on one). They are written from the sources of Kubernetes: the order and the texts of the refusals from
ValidatePodResize (pkg/apis/core/validation/validation.go, of 1.33), what a patch may change from podResizeStrategy
(pkg/registry/core/pod/strategy.go: resources and resizePolicy, the rest is dropped), the refusal of nodes from
NodeRestriction (plugin/pkg/admission/noderestriction/admission.go), the conditions from the kubelet
(pkg/kubelet/allocation) and KEP-1287. From 1.36 on a request
above the node's allocatable amount is refused at once, by the admission plugin PodResizeValidator
(plugin/pkg/admission/podresize/admission.go; its text began with a capital before the release); here only where the
Node has an allocatable amount. Lowering a memory limit is refused before 1.34. Before 1.33 the subresource does not
exist, because its feature gate is off; that the answer is then plain text is assumed. Only what this agent sends is
understood: a strategic merge patch with memory of containers.
"""

from typing import TYPE_CHECKING, Any, Final

from nodeagent.config import quantity
from tests.fake_kube import admission, messages, watch
from tests.fake_kube.messages import Answer, Json, RefusedError, Request, Target

if TYPE_CHECKING:
    from tests.fake_kube.server import ApiServer

FIRST_MINOR: Final = 33
LOWERS_SINCE: Final = 34
REFUSES_MORE_THAN_ALLOCATABLE_SINCE: Final = 36
REPORTS_ALLOCATED_SINCE: Final = 35
"""1.36 does (recorded). In 1.33 and 1.34 the gate InPlacePodVerticalScalingAllocatedStatus is off by default
(pkg/features/kube_features.go); of 1.35 it is assumed."""
STRATEGIC: Final = "application/strategic-merge-patch+json"
LISTS: Final = ("containers", "initContainers")


def patch(api: "ApiServer", request: Request, target: Target) -> Answer:
    if api.minor < FIRST_MINOR:
        # A path that no route has: the mux of the API server answers, not the API.
        return Answer(404, b"404 page not found\n", "text/plain; charset=utf-8")
    if request.method != "PATCH":
        raise RefusedError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
    stored = watch.stored_object(api, target._replace(subresource=""))
    if request.headers.get("content-type", "").partition(";")[0] != STRATEGIC:
        raise RefusedError(415, "UnsupportedMediaType", "415: Unsupported Media Type", details={})
    body = request.body
    admission.check_version(stored, body, target)
    admission.check_pod_patch(api, stored, body)
    new = messages.copy_of(stored)
    for field in LISTS:
        for change in body.get("spec", {}).get(field, ()):
            container = next(each for each in new["spec"][field] if each["name"] == change["name"])
            resources = container.setdefault("resources", {})
            for kind, amounts in change.get("resources", {}).items():
                resources.setdefault(kind, {}).update(amounts)
    _validate(api, stored, new)
    if api.minor >= REFUSES_MORE_THAN_ALLOCATABLE_SINCE and new["spec"] != stored["spec"]:
        _check_allocatable(api, new, target)
    admission.admit(api, request, target, stored, new)
    if request.query.get("dryRun") == "All":
        return Answer(200, new)
    new["metadata"]["generation"] = new["metadata"].get("generation", 1) + 1
    api.store.put("pods", new, "MODIFIED")
    if api.on_resize:
        api.on_resize(messages.copy_of(new))
    return Answer(200, {"kind": "Pod", "apiVersion": "v1", **new})


def _validate(api: "ApiServer", old: Json, new: Json) -> None:
    spec = old["spec"]
    problems: list[tuple[str, str]] = []
    if any(spec.get("resources", {}).values()):
        problems.append(("", "pods with pod-level resources cannot be resized"))
    elif "kubernetes.io/config.mirror" in (old["metadata"].get("annotations") or {}):
        problems.append(("", "static pods cannot be resized"))
    else:
        problems += _limits_below_requests(new)
        if _class(old) != _class(new):
            problems.append(("spec", "Pod QOS Class may not change as a result of resizing"))
        running = [each for each in old["status"].get("containerStatuses", ()) if "running" in each.get("state", {})]
        if running and "resources" not in running[0]:
            problems.append(("spec", "Pod running on node without support for resize"))
        if api.minor < LOWERS_SINCE:
            problems += _lowered(old, new)
    if problems:
        name = old["metadata"]["name"]
        causes = [{"reason": "FieldValueForbidden", "message": f"Forbidden: {t}", "field": f} for f, t in problems]
        text = ", ".join(f"{field}: Forbidden: {text}" for field, text in problems)
        details = {"name": name, "kind": "Pod", "causes": causes}
        raise RefusedError(422, "Invalid", f'Pod "{name}" is invalid: {text}', details=details)


def _check_allocatable(api: "ApiServer", pod: Json, target: Target) -> None:
    node = api.store.objects["nodes"].get(("", pod["spec"].get("nodeName", "")), {})
    amount = node.get("status", {}).get("allocatable", {}).get("memory")
    allocatable = None if amount is None else quantity.parse_quantity(amount)
    requested = sum(_memory(each, "requests") or 0 for each in pod["spec"]["containers"])
    if allocatable is not None and requested > allocatable:
        raise RefusedError(
            403,
            "Forbidden",
            f'pods "{target.name}" is forbidden: node didn\'t have enough allocatable resources: '
            f"memory, requested: {requested}, allocatable: {allocatable}",
            details={**target.details(), "causes": [{"reason": "NodeCapacity"}]},
        )


def _limits_below_requests(pod: Json) -> list[tuple[str, str]]:
    found = []
    for index, each in enumerate(pod["spec"]["containers"]):
        limit, request = _memory(each, "limits"), _memory(each, "requests")
        if limit is not None and request is not None and request > limit:
            field = f"spec.containers[{index}].resources.requests"
            found.append((field, "must be less than or equal to memory limit"))
    return found


def _lowered(old: Json, new: Json) -> list[tuple[str, str]]:
    found = []
    for index, (one, other) in enumerate(zip(old["spec"]["containers"], new["spec"]["containers"], strict=True)):
        policies = {each["resourceName"]: each["restartPolicy"] for each in one.get("resizePolicy", ())}
        before, after = _memory(one, "limits"), _memory(other, "limits")
        lowered = before is not None and after is not None and after < before
        if lowered and policies.get("memory", "NotRequired") == "NotRequired":
            text = "memory limits cannot be decreased unless resizePolicy is RestartContainer"
            found.append((f"spec.containers[{index}].resources.limits[memory]", text))
    return found


def _memory(container: Json, kind: str) -> int | None:
    amount = container.get("resources", {}).get(kind, {}).get("memory")
    return None if amount is None else quantity.parse_quantity(amount)


def _class(pod: Json) -> str:
    """ComputePodQOS (pkg/apis/core/v1/helper/qos)."""
    containers = [each.get("resources", {}) for field in LISTS for each in pod["spec"].get(field, ())]
    if not any(each.get(kind) for each in containers for kind in ("requests", "limits")):
        return "BestEffort"
    for each in containers:
        for name in ("cpu", "memory"):
            limit, request = (each.get(kind, {}).get(name) for kind in ("limits", "requests"))
            if limit is None or request is None:
                return "Burstable"
            if quantity.parse_milli(limit) != quantity.parse_milli(request):
                return "Burstable"
    return "Guaranteed"


# --- the kubelet -----------------------------------------------------------------------------------------------------


def carry_out(pod: Json, *, minor: int = 36) -> None:
    """The kubelet of this version has allocated and actuated what the spec asks for."""
    resources = {each["name"]: each["resources"] for each in pod["spec"]["containers"]}
    for status in pod["status"]["containerStatuses"]:
        status["resources"] = messages.copy_of(resources[status["name"]])
        if minor >= REPORTS_ALLOCATED_SINCE:
            status["allocatedResources"] = messages.copy_of(resources[status["name"]].get("requests", {}))
    _set_condition(pod, "PodResizePending", None)
    _set_condition(pod, "PodResizeInProgress", None)


def defer(pod: Json, message: str = "Node didn't have enough resource: memory") -> None:
    _set_condition(pod, "PodResizePending", {"reason": "Deferred", "message": message})


def call_infeasible(pod: Json, message: str = "In-place resize of containers with swap is not supported") -> None:
    _set_condition(pod, "PodResizePending", {"reason": "Infeasible", "message": message})


def fail(pod: Json, message: str) -> None:
    """The limit is below what is used, or the runtime failed."""
    _set_condition(pod, "PodResizeInProgress", {"reason": "Error", "message": message})


def withdrawn(pod: Json) -> None:
    """The spec asks for what is allocated again: nothing is pending."""
    _set_condition(pod, "PodResizePending", None)


def _set_condition(pod: Json, kind: str, fields: dict[str, Any] | None) -> None:
    conditions = [each for each in pod["status"].get("conditions", ()) if each["type"] != kind]
    if fields is not None:
        generation = pod["metadata"].get("generation", 1)
        now = messages.rfc3339()
        conditions.append(
            {"type": kind, "status": "True", "lastTransitionTime": now, "observedGeneration": generation, **fields}
        )
    pod["status"]["conditions"] = conditions

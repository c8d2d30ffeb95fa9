"""Evictions and deletions: PodDisruptionBudgets, preconditions, grace periods."""

import threading
import time
from typing import TYPE_CHECKING

from tests.fake_kube import admission, messages, objects, watch
from tests.fake_kube.messages import Answer, Json, RefusedError, Request, Target

if TYPE_CHECKING:
    from tests.fake_kube.server import ApiServer


def evict(api: "ApiServer", request: Request, target: Target) -> Answer:
    body = request.body
    if not isinstance(body, dict):
        text = body.decode("utf-8", "replace") if isinstance(body, bytes) else ""
        raise RefusedError(
            400,
            "BadRequest",
            "the object provided is unrecognized (must be of type Eviction): couldn't get version/kind; json parse "
            f"error: invalid character 'n' looking for beginning of object key string ({text})",
        )
    if body["metadata"]["name"] != target.name:
        raise RefusedError(400, "BadRequest", "name in URL does not match name in Eviction object")
    admission.admit(api, request, target, None, body)
    entry = watch.stored_object(api, target._replace(subresource=""))
    options = body.get("deleteOptions") or {}
    dry = options.get("dryRun") == ["All"] or request.query.get("dryRun") == "All"
    terminating = "deletionTimestamp" in entry["metadata"]
    if not terminating and entry["status"].get("phase") not in ("Pending", "Succeeded", "Failed"):
        spend_pdb(api, entry, dry=dry)
    check_preconditions(entry, options)
    if not dry:
        terminate(api, entry, options, eviction=True)
        if api.on_eviction:
            api.on_eviction(messages.copy_of(entry), body)
    return Answer(201, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201})


def spend_pdb(api: "ApiServer", entry: Json, *, dry: bool) -> None:
    labels = entry["metadata"].get("labels") or {}
    pdbs = [
        pdb
        for (namespace, _), pdb in api.store.objects["poddisruptionbudgets"].items()
        if namespace == entry["metadata"]["namespace"]
        and pdb["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ]
    if len(pdbs) > 1:
        raise RefusedError(
            500,
            "",
            "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.",
        )
    for pdb in pdbs:
        name, status = pdb["metadata"]["name"], pdb["status"]
        if not objects.is_ready(entry) and unready_pod_may_be_evicted(pdb):
            continue
        message = "Cannot evict pod as it would violate the pod's disruption budget."
        if status["observedGeneration"] < pdb["metadata"].get("generation", 1):
            text = f"The disruption budget {name} is still being processed by the server."
            details = {"causes": [{"reason": "DisruptionBudget", "message": text}], "retryAfterSeconds": 10}
            raise RefusedError(429, "TooManyRequests", message, details=details, retry=10)
        if status["disruptionsAllowed"] <= 0:
            needed, healthy = status["desiredHealthy"], status["currentHealthy"]
            text = f"The disruption budget {name} needs {needed} healthy pods and has {healthy} currently"
            details = {"causes": [{"reason": "DisruptionBudget", "message": text}]}
            raise RefusedError(429, "TooManyRequests", message, details=details)
        if not dry:
            status["disruptionsAllowed"] -= 1
            api.store.record("poddisruptionbudgets", pdb, "MODIFIED")


def terminate(api: "ApiServer", entry: Json, options: Json, *, eviction: bool) -> Json:
    stored = api.store.objects["pods"][entry["metadata"]["namespace"], entry["metadata"]["name"]]
    metadata = stored["metadata"]
    own = stored["spec"].get("terminationGracePeriodSeconds", 30)
    grace = int(options.get("gracePeriodSeconds", own))
    grace = 1 if grace < 0 else grace
    if "deletionTimestamp" in metadata:
        grace = min(grace, metadata["deletionGracePeriodSeconds"])
    metadata["deletionTimestamp"] = messages.rfc3339(time.time() + grace)
    metadata["deletionGracePeriodSeconds"] = grace
    metadata["generation"] = metadata.get("generation", 1) + 1
    if eviction:
        message = "Eviction API: evicting"
        conditions = [c for c in stored["status"].get("conditions", ()) if c["type"] != "DisruptionTarget"]
        target = {
            "type": "DisruptionTarget",
            "status": "True",
            "lastProbeTime": None,
            "lastTransitionTime": messages.rfc3339(),
            "reason": "EvictionByEvictionAPI",
            "message": message,
        }
        stored["status"]["conditions"] = [*conditions, target]
    api.store.record("pods", stored, "MODIFIED")
    namespace, name = metadata["namespace"], metadata["name"]
    if grace == 0:
        api.delete_pod(namespace, name)
    elif api.linger_s is not None:
        timer = threading.Timer(grace if api.linger_s < 0 else api.linger_s, api.delete_pod, (namespace, name))
        timer.daemon = True
        api.timers.append(timer)
        timer.start()
    return stored


def delete(api: "ApiServer", request: Request, target: Target) -> Answer:
    entry = watch.stored_object(api, target)
    options = request.body if isinstance(request.body, dict) else {}
    if "gracePeriodSeconds" not in options and not request.body and "gracePeriodSeconds" in request.query:
        options = {**options, "gracePeriodSeconds": int(request.query["gracePeriodSeconds"])}
    check_preconditions(entry, options)
    if target.resource != "pods":
        api.store.record(
            target.resource, api.store.objects[target.resource].pop((target.namespace, target.name)), "DELETED"
        )
        return Answer(200, entry)
    admission.admit(api, request, target, entry, None)
    if "All" in (*options.get("dryRun", ()), request.query.get("dryRun")):
        return Answer(200, entry)
    stored = terminate(api, entry, options, eviction=False)
    if api.on_eviction:
        api.on_eviction(messages.copy_of(stored), options)
    return Answer(200, {"kind": target.kind, "apiVersion": target.api_version, **stored})


def unready_pod_may_be_evicted(pdb: Json) -> bool:
    """Whether a pod that is not ready is evicted whatever the allowance, without spending any of it
    (pkg/registry/core/pod/storage/eviction.go): the rest is healthy enough, or the policy allows it always."""
    if pdb["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow":
        return True
    status = pdb["status"]
    return bool(status["currentHealthy"] >= status["desiredHealthy"] > 0)


def check_preconditions(entry: Json, options: Json) -> None:
    name, metadata = entry["metadata"]["name"], entry["metadata"]
    wanted = options.get("preconditions") or {}
    text = ""
    if wanted.get("uid", metadata["uid"]) != metadata["uid"]:
        text = (
            f"the UID in the precondition ({wanted['uid']}) does not match the UID in record ({metadata['uid']}). "
            "The object might have been deleted and then recreated"
        )
    elif wanted.get("resourceVersion", metadata["resourceVersion"]) != metadata["resourceVersion"]:
        text = (
            f"the ResourceVersion in the precondition ({wanted['resourceVersion']}) does not match the ResourceVersion "
            f"in record ({metadata['resourceVersion']}). The object might have been modified"
        )
    if text:
        message = f'Operation cannot be fulfilled on Pod "{name}": {text}'
        raise RefusedError(409, "Conflict", message, details={"name": name, "kind": "Pod"})

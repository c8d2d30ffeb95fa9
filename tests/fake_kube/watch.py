"""Reads: get, list with selectors and pages, watch with bookmarks and 410."""

import base64
import json
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from urllib.request import urlopen

from tests.fake_kube.messages import Answer, Json, RefusedError, Request, Target

if TYPE_CHECKING:
    from tests.fake_kube.server import ApiServer


def get(api: "ApiServer", request: Request, target: Target) -> Answer:
    if target.subresource == "proxy" and target.resource == "pods":
        with urlopen(api.pod_ports[target.name] + request.path.partition("/proxy")[2], timeout=10) as page:
            return Answer(200, page.read(), page.headers["Content-Type"])
    if target.subresource == "proxy" and request.path.endswith("/configz"):
        return Answer(200, {"kubeletconfig": api.kubelet_configuration})
    if target.subresource == "proxy":
        return Answer(200, {"node": {"nodeName": target.name}, "pods": []})
    return Answer(200, stored_object(api, target))


def stored_object(api: "ApiServer", target: Target) -> Json:
    entry = api.store.objects.get(target.resource, {}).get((target.namespace, target.name))
    if entry is None:
        raise RefusedError(
            404, "NotFound", f'{target.group_resource} "{target.name}" not found', details=target.details()
        )
    return {"kind": target.kind, "apiVersion": target.api_version, **entry}


def list_objects(api: "ApiServer", request: Request, target: Target) -> Answer:
    wanted, labelled = field_selector(request, target), label_selector(request)
    asked = request.query.get("resourceVersion", "")
    if (
        request.query.get("resourceVersionMatch") == "NotOlderThan"
        and asked.isdigit()
        and int(asked) > api.store.version
    ):
        message = f"Too large resource version: {asked}, current: {api.store.version}"
        causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
        details = {"causes": causes, "retryAfterSeconds": 1}
        raise RefusedError(504, "Timeout", f"Timeout: {message}", details=details, retry=1)
    if request.query.get("resourceVersionMatch") == "Exact" and int(asked) < api.store.oldest:
        raise RefusedError(410, "Expired", "The resourceVersion for the provided list is too old.")
    entries = [
        (f"/{namespace}/{name}" if not target.namespace else f"/{name}", entry)
        for (namespace, name), entry in sorted(api.store.objects[target.resource].items())
        if target.namespace in ("", namespace) and wanted(entry) and labelled(entry)
    ]
    version, start = api.store.version, ""
    if token := request.query.get("continue"):
        version, start = continued(api, token)
        entries = [(key, entry) for key, entry in entries if key > start]
    metadata: Json = {"resourceVersion": str(version)}
    limit = int(request.query.get("limit", 0))
    if limit and len(entries) > limit and asked != "0":
        last = json.dumps({"v": "meta.k8s.io/v1", "rv": version, "start": entries[limit - 1][0] + "\0"})
        metadata["continue"] = base64.urlsafe_b64encode(last.encode()).decode().rstrip("=")
        if not request.query.get("fieldSelector"):
            metadata["remainingItemCount"] = len(entries) - limit
        entries = entries[:limit]
    if "as=PartialObjectMetadataList" in request.headers.get("accept", ""):
        items = [
            {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": entry["metadata"]}
            for _, entry in entries
        ]
        kind, api_version = "PartialObjectMetadataList", "meta.k8s.io/v1"
    else:
        items = [{k: v for k, v in entry.items() if k not in ("kind", "apiVersion")} for _, entry in entries]
        kind, api_version = f"{target.kind}List", target.api_version
    return Answer(200, {"kind": kind, "apiVersion": api_version, "metadata": metadata, "items": items})


def continued(api: "ApiServer", token: str) -> tuple[int, str]:
    try:
        decoded = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        version, start = int(decoded["rv"]), str(decoded["start"]).rstrip("\0")
    except (ValueError, KeyError, TypeError):
        raise RefusedError(
            400,
            "BadRequest",
            "invalid continue token: continue key is not valid: "
            "invalid character '\\u0081' looking for beginning of value",
        ) from None
    if version < api.store.oldest:
        again = json.dumps({"v": "meta.k8s.io/v1", "rv": -1, "start": start + "\0"})
        failure = RefusedError(
            410,
            "Expired",
            "The provided continue parameter is too old to display a consistent list result. You can start a new "
            "list without the continue parameter, or use the continue token in this response to retrieve the "
            "remainder of the results. Continuing with the provided token results in an inconsistent list - "
            "objects that were created, modified, or deleted between the time the first chunk was returned and now "
            "may show up in the list.",
        )
        failure.answer.body["metadata"] = {"continue": base64.urlsafe_b64encode(again.encode()).decode().rstrip("=")}
        raise failure
    return version, "/" + start.lstrip("/")


def watch(api: "ApiServer", request: Request, target: Target) -> Iterator[bytes | None]:
    wanted = field_selector(request, target)
    asked = request.query.get("resourceVersion", "")
    if asked and not asked.isdigit():
        raise RefusedError(
            500,
            "",
            f'resourceVersion: Invalid value: "{asked}": strconv.ParseUint: parsing "{asked}": invalid syntax',
        )
    initial = request.query.get("sendInitialEvents") == "true"
    return events(
        api,
        target,
        wanted,
        after=api.store.version if initial or asked in ("", "0") else int(asked),
        initial=initial or asked in ("", "0"),
        end_of_initial=initial,
        bookmarks=request.query.get("allowWatchBookmarks") in ("1", "true"),
        until=time.monotonic() + float(request.query.get("timeoutSeconds", 1800)),
        generation=api.store.watch_generation,
    )


def events(
    api: "ApiServer",
    target: Target,
    wanted: Callable[[Json], bool],
    *,
    after: int,
    initial: bool,
    end_of_initial: bool,
    bookmarks: bool,
    until: float,
    generation: int,
) -> Iterator[bytes | None]:
    def event(kind: str, entry: Json) -> bytes:
        body = {"kind": target.kind, "apiVersion": target.api_version, **entry}
        return json.dumps({"type": kind, "object": body}, separators=(",", ":")).encode() + b"\n"

    def bookmark(annotations: Json | None = None) -> bytes:
        metadata: Json = {"resourceVersion": str(after)}
        if annotations:
            metadata["annotations"] = annotations
        empty = {"metadata": metadata, "spec": {"containers": None}, "status": {}}
        return event("BOOKMARK", empty if target.kind == "Pod" else {"metadata": metadata})

    yield None
    if after < api.store.oldest:
        status = RefusedError(410, "Expired", f"too old resource version: {after} ({api.store.oldest})").answer.body
        yield json.dumps({"type": "ERROR", "object": status}, separators=(",", ":")).encode() + b"\n"
        return
    with api.store.changed:
        present = list(api.store.objects[target.resource].values()) if initial else []
    for entry in present:
        if wanted(entry) and target.namespace in ("", entry["metadata"].get("namespace", "")):
            yield event("ADDED", entry)
    if end_of_initial and bookmarks:
        yield bookmark({"k8s.io/initial-events-end": "true"})
    next_bookmark = time.monotonic() + api.bookmark_s
    while True:
        with api.store.changed:
            if not (api.store.closing or api.store.watch_generation != generation or api.store.version > after):
                api.store.changed.wait(max(0.0, min(until, next_bookmark) - time.monotonic()))
            ended = api.store.closing or api.store.watch_generation != generation
            if after < api.store.oldest - 1 and not api.store.history:
                ended = True
            news = [h for h in api.store.history if h[0] > after]
        for version, kind, what, entry in news:
            after = version
            here = target.namespace in ("", entry["metadata"].get("namespace", ""))
            if kind == target.resource and here and wanted(entry):
                yield event(what, entry)
        now = time.monotonic()
        if bookmarks and now >= next_bookmark:
            next_bookmark = now + api.bookmark_s
            yield bookmark()
        if ended:
            return
        if now >= until:
            return


def label_selector(request: Request) -> Callable[[Json], bool]:
    """Of `key` and `key=value` alone."""
    terms = [term.partition("=") for term in request.query.get("labelSelector", "").split(",") if term]

    def wanted(entry: Json) -> bool:
        labels = entry["metadata"].get("labels") or {}
        return all(key in labels and (not equals or labels[key] == value) for key, equals, value in terms)

    return wanted


def field_selector(request: Request, target: Target) -> Callable[[Json], bool]:
    text = request.query.get("fieldSelector", "")
    known = {
        "metadata.name": lambda entry: entry["metadata"]["name"],
        "spec.nodeName": lambda entry: entry.get("spec", {}).get("nodeName"),
        "status.phase": lambda entry: entry.get("status", {}).get("phase"),
    }
    terms = (term.partition("=") for term in text.split(",") if term)
    wanted = [(field.removesuffix("!"), value, not field.endswith("!")) for field, _, value in terms]
    for field, _, _ in wanted:
        if field not in known or (field in ("spec.nodeName", "status.phase") and target.resource != "pods"):
            raise RefusedError(400, "BadRequest", f"field label not supported: {field}")
    return lambda entry: all((known[field](entry) == value) is same for field, value, same in wanted)

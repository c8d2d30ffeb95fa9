"""The HTTP double answers every recorded request as the real API server did."""

import base64
import copy
import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.fake_kube import NOBODY, ApiServer
from tests.fake_kube.messages import Request
from tests.support.paths import RECORDINGS

Json = dict[str, Any]

NAMES = sorted(path.stem for path in RECORDINGS.glob("*.json"))

KUBELET_SIDE = {
    "kubelet-401",
    "kubelet-401-badtoken",
    "kubelet-403",
    "kubelet-configz-200",
    "kubelet-healthz-200",
    "kubelet-metrics-resource-200",
    "kubelet-pods-200",
    "kubelet-stats-summary-200",
    "kubelet-stats-summary-cpu-memory-200",
}
"""Answers of a kubelet on its own port: the agent asks the API server only, so the double does not serve them."""

UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


def recording(name: str) -> Json:
    loaded: Json = json.loads((RECORDINGS / f"{name}.json").read_text())
    return loaded


def body_of(name: str) -> Json:
    loaded: Json = json.loads(recording(name)["response"]["body"])
    return loaded


@pytest.fixture
def api() -> Iterator[ApiServer]:
    """The world in which the recordings were made."""
    world = body_of("list-pods-fieldselector")
    with ApiServer(node=body_of("get-node"), linger_s=None) as server:
        for entry in world["items"]:
            server.add_pod(entry)
        pdb = body_of("pdb-get")
        server.store.put("poddisruptionbudgets", pdb, "ADDED")
        yield server


# --- what has to be true before a request, where the world alone does not do -----------------------------------------


def throttled(api: ApiServer) -> None:
    api.throttle(2)


def quiet_terminates(api: ApiServer) -> None:
    ask(api, recording("eviction-success-201"))


def hogs_run(api: ApiServer) -> None:
    """The list was recorded while they were starting, when no PDB covers them yet."""
    ready = [{"type": "Ready", "status": "True"}]
    for namespace, name in list(api.store.objects["pods"]):
        api.modify_pod(namespace, name, lambda pod: pod["status"].update(phase="Running", conditions=ready))


def hogs_have_started(api: ApiServer) -> None:
    """The list was recorded a little later than the world: the kubelet has written the second one's status, too."""
    for item in body_of("list-pods-metadata-only")["items"]:
        metadata = api.store.objects["pods"]["default", item["metadata"]["name"]]["metadata"]
        metadata["managedFields"] = item["metadata"]["managedFields"]


def unobserved_budget(api: ApiServer) -> None:
    hogs_run(api)
    api.set_pdb("pdb-hog", {"app": "pdb-hog"}, allowed=0, observed=False)


def second_budget(api: ApiServer) -> None:
    hogs_run(api)
    api.set_pdb("another", {"app": "pdb-hog"}, allowed=1)


def event_exists(api: ApiServer) -> None:
    assert ask(api, recording("event-v1-create-201"))[0] == 201


def lab_condition(api: ApiServer) -> None:
    assert ask(api, recording("node-status-patch-200"))[0] == 200


def lab_taint(api: ApiServer) -> None:
    assert ask(api, recording("node-taint-patch-200"))[0] == 200


def compacted(api: ApiServer) -> None:
    api.store.version = 779
    api.compact()


def disruption_target(api: ApiServer) -> None:
    """As it was when the pod was deleted: the kubelet had taken the phase back, and kept the condition."""
    marked = recording("pod-status-patch-failed-200")
    assert ask(api, marked)[0] == 200
    # They are in the order of time, by the second.
    ours = api.store.objects["pods"]["default", "cni-pod"]["metadata"]["managedFields"][-1]
    assert ours["manager"] == "lab-recorder"
    ours["time"] = "2026-11-20T23:16:53Z"
    marked["request"]["headers"]["User-Agent"] = "kubelet/v1.36.2 (linux/amd64) kubernetes/8e16b12"
    marked["request"]["body"] = json.dumps({"status": {"phase": "Running", "reason": None, "message": None}})
    assert ask(api, marked)[0] == 200


def three_hogs(api: ApiServer) -> None:
    """Three pods that come after `ds-hog` in the namespace, the first as recorded."""
    api.store.version = 760
    (first,) = body_of("list-continue-expired-410-cache")["items"]
    for key in [key for key in api.store.objects["pods"] if key[1] > "ds-hog-z4fp8"]:
        del api.store.objects["pods"][key]
    for name in (first["metadata"]["name"], "p", "q"):
        entry = copy.deepcopy(first)
        entry["metadata"]["name"] = name
        api.add_pod(entry)


def known_token(api: ApiServer) -> None:
    api.tokens["<redacted-jwt>"] = NOBODY


def after_failed(api: ApiServer) -> None:
    api.add_pod(body_of("get-pod-after-status-failed"))


BEFORE: dict[str, Callable[[ApiServer], None]] = {
    "apf-429-eviction": throttled,
    "apf-429-retry-after": throttled,
    "delete-pod-200": disruption_target,
    "eviction-already-terminating": quiet_terminates,
    "eviction-pdb-429": hogs_run,
    "eviction-pdb-429-dryrun": hogs_run,
    "eviction-pdb-429-not-observed": unobserved_budget,
    "eviction-two-pdbs-500": second_budget,
    "event-v1-create-409": event_exists,
    "get-pod-after-status-failed": after_failed,
    "get-pod-terminating": quiet_terminates,
    "list-continue-expired-410": compacted,
    "list-continue-expired-410-cache": three_hogs,
    "list-pods-metadata-only": hogs_have_started,
    "list-rv-exact-expired-410": compacted,
    "node-status-patch-delete-cond": lab_condition,
    "node-taint-delete": lab_taint,
    "tokenreview-201-authenticated": known_token,
    "watch-rv-old-410": compacted,
}


# --- asking and comparing --------------------------------------------------------------------------------------------


def token_for(name: str) -> str | None:
    if name.startswith("anonymous"):
        return None
    if name.startswith("unauthorized"):
        return "wrong"
    return "nobody-token" if "-403" in name else "agent-token"


def ask(api: ApiServer, record: Json) -> tuple[int, dict[str, str], bytes]:
    """Send the recorded request; a watch is cut to one second."""
    request = record["request"]
    headers = {k: v for k, v in (request.get("headers") or {}).items() if k != "Authorization"}
    if token := token_for(record["name"]):
        headers["Authorization"] = f"Bearer {token}"
    path = re.sub(r"timeoutSeconds=\d+", "timeoutSeconds=1", request["path"])
    if "watch=1" in path and "timeoutSeconds" not in path:
        path += "&timeoutSeconds=1"
    connection = http.client.HTTPConnection(urlsplit(api.url).netloc, timeout=10)
    try:
        connection.request(request["method"], path, body=request.get("body"), headers=headers)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def plain(value: Any, *, key: str = "") -> Any:
    """Without what differs from one run to the next: UIDs, versions, times, generated names and tokens."""
    if isinstance(value, dict):
        return {k: plain(v, key=k) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    if key == "continue":
        return "token"
    if key in ("token", "extra", "generation", "gitCommit"):
        return key
    if isinstance(value, str):
        text = STAMP.sub("<time>", UUID.sub("<uid>", value))
        text = re.sub(r"(lab-node\.|x-)[0-9a-z]{5}\b", r"\1<name>", text)
        text = re.sub(r"(too old resource version|in record|current)(:?) \(?\d+( \(\d+)?", r"\1\2 <version>", text)
        return "<version>" if key == "resourceVersion" else text
    return value


def comparable(body: str | bytes | None) -> Any:
    text = body.decode() if isinstance(body, bytes) else body or ""
    try:
        return plain(json.loads(text))
    except ValueError:
        return text


def test_every_recording_is_either_replayed_or_named_as_the_kubelets() -> None:
    assert NAMES, "no recordings found"
    assert set(NAMES) >= KUBELET_SIDE
    assert all(name.startswith("kubelet-") == (name in KUBELET_SIDE) for name in NAMES)
    assert set(BEFORE) <= set(NAMES) - KUBELET_SIDE


@pytest.mark.parametrize(
    "name", [n for n in NAMES if n not in KUBELET_SIDE and "lines" not in recording(n)["response"]]
)
def test_the_double_answers_as_recorded(api: ApiServer, name: str) -> None:
    record = recording(name)
    if name in BEFORE:
        BEFORE[name](api)
    status, headers, body = ask(api, record)
    recorded = record["response"]
    expected_headers = dict(recorded["headers"])
    assert status == recorded["status"]
    assert headers["Content-Type"] == expected_headers["Content-Type"]
    assert headers.get("Retry-After") == expected_headers.get("Retry-After")
    if recorded["body"] is not None:
        assert comparable(body) == comparable(recorded["body"])
        assert body.endswith(b"\n") == recorded["body"].endswith("\n")


@pytest.mark.parametrize(
    "name",
    [n for n in NAMES if n not in KUBELET_SIDE and "lines" in recording(n)["response"] and n != "watch-pods-stream"],
)
def test_the_double_watches_as_recorded(api: ApiServer, name: str) -> None:
    record = recording(name)
    if name == "watch-sendInitialEvents":
        pods = [json.loads(x["line"])["object"] for x in record["response"]["lines"] if x["line"]][:-1]
        api.store.objects["pods"].clear()
        for pod in pods:
            api.add_pod(pod)
    if name == "watch-apiserver-shutdown":
        api.store.version = 772
        api.end_watches()
    if name in BEFORE:
        BEFORE[name](api)
    status, headers, body = ask(api, record)
    lines = [entry["line"] for entry in record["response"]["lines"] if entry["line"]]
    assert status == record["response"]["status"]
    assert headers["Content-Type"] == dict(record["response"]["headers"])["Content-Type"]
    assert [comparable(line) for line in body.decode().splitlines()] == [comparable(line) for line in lines]


def test_a_watch_sends_all_versions_of_a_pod_as_recorded(api: ApiServer) -> None:
    record = recording("watch-pods-stream")
    lines = [entry["line"] for entry in record["response"]["lines"] if entry["line"]]
    events = [json.loads(line) for line in lines]
    start = api.store.version
    for event in events:
        if event["type"] in ("ADDED", "MODIFIED"):
            api.store.put("pods", event["object"], event["type"])
        elif event["type"] == "DELETED":
            api.store.put("pods", event["object"], "MODIFIED")
            api.store.version -= 1
            api.store.history.pop()
            api.delete_pod("default", event["object"]["metadata"]["name"])
    api.bookmark_s = 0.3
    record["request"]["path"] = record["request"]["path"].replace("resourceVersion=663", f"resourceVersion={start}")
    status, _, body = ask(api, record)
    assert status == 200
    got = [comparable(line) for line in body.decode().splitlines()]
    expected = [comparable(line) for line in lines]
    changes = [event for event in got if event["type"] != "BOOKMARK"]
    assert changes == [event for event in expected if event["type"] != "BOOKMARK"]
    assert len(got) > len(changes), "a bookmark comes while nothing happens"
    assert {json.dumps(e) for e in got if e["type"] == "BOOKMARK"} == {
        json.dumps(e) for e in expected if e["type"] == "BOOKMARK"
    }


def test_a_continue_token_leads_to_the_next_page(api: ApiServer) -> None:
    first = recording("list-pods-limit1-page1")
    token = json.loads(ask(api, first)[2])["metadata"]["continue"]
    recorded = json.loads(first["response"]["body"])["metadata"]["continue"]
    names = []
    for text in (token, recorded):
        decoded = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        names.append((decoded["v"], decoded["start"]))
    assert names[0] == names[1]


# --- what no recorded request shows ----------------------------------------------------------------------------------


def send(api: ApiServer, method: str, path: str, body: Json, *, agent: str = "lab-recorder") -> tuple[int, Json]:
    headers = {"User-Agent": agent, "Content-Type": "application/json"}
    request = {"method": method, "path": path, "headers": headers, "body": json.dumps(body)}
    status, _, answer = ask(api, {"name": "", "request": request})
    return status, json.loads(answer)


def chosen(value: Any, fields: Json) -> Any:
    """What a fieldsV1 names of an object."""
    if not fields:
        return value
    steps = [(step, below) for step, below in fields.items() if step != "."]
    if isinstance(value, dict):
        return {step[2:]: chosen(value[step[2:]], below) for step, below in steps}
    keys = [(json.loads(step[2:]), below) for step, below in steps]
    return [chosen(item, below) for key, below in keys for item in value if key.items() <= item.items()]


@pytest.mark.parametrize("item", body_of("list-pods-fieldselector")["items"], ids=lambda item: item["metadata"]["name"])
def test_the_creator_of_a_pod_owns_the_fields_that_a_real_server_records(item: Json) -> None:
    """What the creator of each recorded pod has sent is made from what the server wrote down, and sent again."""
    [created] = [e for e in item["metadata"]["managedFields"] if "f:spec" in e["fieldsV1"]]
    sent = chosen(item, created["fieldsV1"])
    sent["metadata"]["name"] = item["metadata"]["name"]
    with ApiServer() as api:
        status, stored = send(api, "POST", "/api/v1/namespaces/default/pods", sent, agent=f"{created['manager']}/v1")
    assert status == 201
    assert plain(stored["metadata"]["managedFields"]) == [plain(created)]


def test_a_name_of_a_node_is_noted_when_it_is_sent_and_not_when_it_is_bound(api: ApiServer) -> None:
    pods, spec = "/api/v1/namespaces/default/pods", {"containers": [{"name": "c", "image": "x"}]}
    named = {"metadata": {"name": "named"}, "spec": {**spec, "nodeName": "lab-node"}}
    assert send(api, "POST", pods, named)[0] == 201
    assert send(api, "POST", pods, {"metadata": {"name": "scheduled"}, "spec": spec})[0] == 201
    binding = {"metadata": {"name": "scheduled"}, "target": {"kind": "Node", "name": "lab-node"}}
    assert send(api, "POST", f"{pods}/scheduled/binding", binding)[0] == 201
    assert send(api, "POST", f"{pods}/scheduled/binding", binding)[0] == 409
    for name, noted in (("named", True), ("scheduled", False)):
        entry = api.store.objects["pods"]["default", name]
        assert entry["spec"]["nodeName"] == "lab-node"
        assert [("f:nodeName" in each["fieldsV1"]["f:spec"]) for each in entry["metadata"]["managedFields"]] == [noted]


@pytest.mark.parametrize(
    ("phase", "ready", "policy", "healthy", "needed", "status"),
    [
        ("Running", True, "IfHealthyBudget", 2, 1, 429),
        ("Running", False, "IfHealthyBudget", 2, 2, 201),
        ("Running", False, "IfHealthyBudget", 1, 2, 429),
        ("Running", False, "IfHealthyBudget", 0, 0, 429),
        ("Running", False, None, 2, 2, 201),
        ("Running", False, "AlwaysAllow", 0, 2, 201),
        ("Running", True, "AlwaysAllow", 2, 2, 429),
        ("Pending", False, None, 0, 2, 201),
        ("Failed", False, None, 0, 2, 201),
    ],
)
def test_an_exhausted_pdb_admits_the_eviction_of_an_unready_pod_where_a_real_one_does(
    api: ApiServer, phase: str, ready: bool, policy: str | None, healthy: int, needed: int, status: int
) -> None:
    """pkg/registry/core/pod/storage/eviction.go: a pod that is not ready does not count for the PDB."""
    name = "pdb-hog-6769c8fb56-hgpn8"
    conditions = [{"type": "Ready", "status": str(ready)}]
    api.modify_pod("default", name, lambda pod: pod["status"].update(phase=phase, conditions=conditions))
    pdb = api.set_pdb("pdb-hog", {"app": "pdb-hog"}, allowed=0, healthy=healthy, needed=needed)
    if policy:
        pdb["spec"]["unhealthyPodEvictionPolicy"] = policy
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": "default"}}
    assert send(api, "POST", f"/api/v1/namespaces/default/pods/{name}/eviction", body)[0] == status
    assert pdb["status"]["disruptionsAllowed"] == 0


def test_a_request_is_recorded_when_its_eviction_is_seen(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    note = api.note

    def note_late(request: Request) -> None:
        time.sleep(0.3)
        note(request)

    evicted: list[Json] = []
    api.on_eviction = lambda entry, _body: evicted.append(entry)
    monkeypatch.setattr(api, "note", note_late)
    sender = threading.Thread(target=ask, args=(api, recording("eviction-success-201")))
    sender.start()
    assert api.wait_for(lambda: evicted, 10)
    assert len(api.sent("POST", "/eviction")) == 1
    sender.join()

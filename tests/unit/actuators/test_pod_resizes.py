"""A resize has the memory of one container and what it was decided on, and every answer becomes what it proves."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.actuators.pod_resizes import PodResizer
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.transport import connect
from nodeagent.model import MemoryAmounts, ResizeOrder, ResizeOutcome, ResizeResult
from tests.fake_kube import Answer, ApiServer, pod, resize

MI = 1 << 20
MORE = MemoryAmounts(160 * MI)


@pytest.fixture
def api() -> Iterator[ApiServer]:
    entry = pod("web", requests={"memory": "64Mi"}, limits={"memory": "128Mi"})
    resize.carry_out(entry)
    with ApiServer(pods=[entry]) as server:
        yield server


def order(api: ApiServer, to: MemoryAmounts = MORE, **more: Any) -> ResizeOrder:
    metadata = (api.get_pod("default", "web") or {})["metadata"]
    before = MemoryAmounts(128 * MI)
    made = ResizeOrder(
        metadata["uid"], "default", "web", metadata["resourceVersion"], "c", False, before, to, False, "because"
    )
    return made._replace(**more)


def outcome(api: ApiServer, tmp_path: Path, wanted: ResizeOrder, *, timeout_s: float = 10.0) -> ResizeOutcome:
    transport = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))))
    there = threading.Event()
    resizer = PodResizer(transport, wake=there.set, timeout_s=timeout_s)
    resizer.submit("plan-1", wanted)
    assert there.wait(30)
    [found] = resizer.take()
    resizer.stop()
    transport.close()
    assert (found.plan_id, found.pod_uid, found.container) == ("plan-1", wanted.pod_uid, "c")
    return found


def limits(api: ApiServer) -> dict[str, Any]:
    resources: dict[str, Any] = (api.get_pod("default", "web") or {})["spec"]["containers"][0]["resources"]
    return resources


def test_the_request_names_the_pod_its_version_and_one_memory_limit(api: ApiServer, tmp_path: Path) -> None:
    wanted = order(api)
    assert outcome(api, tmp_path, wanted).result is ResizeResult.ACCEPTED
    [request] = api.sent("PATCH", "/api/v1/namespaces/default/pods/web/resize")
    assert request.headers["content-type"] == "application/strategic-merge-patch+json"
    assert request.body == {
        "metadata": {"uid": wanted.pod_uid, "resourceVersion": wanted.resource_version},
        "spec": {"containers": [{"name": "c", "resources": {"limits": {"memory": "160Mi"}}}]},
    }
    assert limits(api) == {"limits": {"memory": "160Mi"}, "requests": {"memory": "64Mi"}}


def test_a_request_of_the_container_goes_with_the_limit_where_it_must(api: ApiServer, tmp_path: Path) -> None:
    assert outcome(api, tmp_path, order(api, MemoryAmounts(160 * MI, 100 * MI))).result is ResizeResult.ACCEPTED
    assert limits(api) == {"limits": {"memory": "160Mi"}, "requests": {"memory": "100Mi"}}


def test_another_version_another_pod_and_another_class_are_refused(api: ApiServer, tmp_path: Path) -> None:
    stale = outcome(api, tmp_path, order(api, resource_version="1"))
    assert (stale.result, stale.http_status) == (ResizeResult.REFUSED, 409)
    other = outcome(api, tmp_path, order(api, pod_uid="8d426f32-5112-4eac-89e1-57c5ad0db74b"))
    assert (other.result, other.http_status) == (ResizeResult.REFUSED, 422)
    below = outcome(api, tmp_path, order(api, MemoryAmounts(32 * MI)))
    assert (below.result, below.http_status) == (ResizeResult.REFUSED, 422)
    assert limits(api)["limits"] == {"memory": "128Mi"}


def test_1_33_lowers_no_memory_limit(api: ApiServer, tmp_path: Path) -> None:
    api.minor = 33
    lower = outcome(api, tmp_path, order(api, MemoryAmounts(96 * MI)))
    assert (lower.result, lower.http_status) == (ResizeResult.REFUSED, 422)
    assert "cannot be decreased" in lower.message
    api.minor = 34
    assert outcome(api, tmp_path, order(api, MemoryAmounts(96 * MI))).result is ResizeResult.ACCEPTED


def test_from_1_36_on_a_request_above_the_nodes_allocatable_is_refused_at_once(api: ApiServer, tmp_path: Path) -> None:
    node = api.node()
    node["status"]["allocatable"] = {"memory": "1Gi"}
    api.put_node(node)
    beyond = order(api, MemoryAmounts(2048 * MI, 2048 * MI))
    refused = outcome(api, tmp_path, beyond)
    assert (refused.result, refused.http_status) == (ResizeResult.REFUSED, 403)
    assert refused.message == (
        'pods "web" is forbidden: node didn\'t have enough allocatable resources: '
        "memory, requested: 2147483648, allocatable: 1073741824"
    )
    assert limits(api)["limits"] == {"memory": "128Mi"}
    api.minor = 35
    assert outcome(api, tmp_path, beyond).result is ResizeResult.ACCEPTED


def test_a_server_without_the_subresource_is_known_from_a_pod_that_is_gone(api: ApiServer, tmp_path: Path) -> None:
    wanted = order(api)
    api.minor = 32
    assert outcome(api, tmp_path, wanted).result is ResizeResult.NOT_SERVED
    api.minor = 36
    api.delete_pod("default", "web")
    assert outcome(api, tmp_path, wanted).result is ResizeResult.NOT_FOUND


def test_a_missing_right_is_forbidden_and_a_policy_a_refusal(api: ApiServer, tmp_path: Path) -> None:
    api.forbid("patch", "pods/resize")
    assert outcome(api, tmp_path, order(api)).result is ResizeResult.FORBIDDEN
    api.allow("patch", "pods/resize")
    api.admit = lambda *_: ["exceeded quota: q"]
    quota = outcome(api, tmp_path, order(api))
    assert (quota.result, quota.http_status) == (ResizeResult.REFUSED, 403)
    assert "exceeded quota" in quota.message


def status(code: int, message: str = "no") -> Answer:
    body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message}
    return Answer(code, body | {"code": code}, headers=(("Retry-After", "7"),) if code == 429 else ())


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (status(400), ResizeResult.REFUSED),
        (status(401), ResizeResult.FORBIDDEN),
        (status(404, "the server could not find the requested resource"), ResizeResult.NOT_SERVED),
        (status(404, 'pods "web" not found'), ResizeResult.NOT_FOUND),
        (status(405, "the server does not allow this method on the requested resource"), ResizeResult.NOT_SERVED),
        (status(429), ResizeResult.NOT_SENT),
        (status(500), ResizeResult.UNCERTAIN),
        (status(503), ResizeResult.UNCERTAIN),
        (Answer(403, b"<html>", "text/html"), ResizeResult.UNCERTAIN),
        (Answer(200, b"<html>", "text/html"), ResizeResult.UNCERTAIN),
        (Answer(200, {"kind": "Pod", "metadata": {"uid": "another"}}), ResizeResult.UNCERTAIN),
    ],
)
def test_an_answer_proves_only_what_it_says(
    api: ApiServer, tmp_path: Path, answer: Answer, result: ResizeResult
) -> None:
    api.instead = lambda request: answer if request.path.endswith("/resize") else None
    found = outcome(api, tmp_path, order(api))
    assert found.result is result, json.dumps(found.message)
    assert found.retry_after_s == (7.0 if answer.status == 429 else None)
    assert limits(api)["limits"] == {"memory": "128Mi"}


def test_no_answer_is_uncertain_and_no_connection_is_certain(api: ApiServer, tmp_path: Path) -> None:
    wanted = order(api)
    api.delay_s = 3.0
    assert outcome(api, tmp_path, wanted, timeout_s=0.5).result is ResizeResult.UNCERTAIN
    api.go_down()
    assert outcome(api, tmp_path, wanted).result is ResizeResult.NOT_SENT


def test_orders_behind_a_slow_answer_are_not_sent_after_their_deadline(api: ApiServer, tmp_path: Path) -> None:
    transport = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))))
    there = threading.Semaphore(0)
    resizer = PodResizer(transport, wake=there.release, timeout_s=0.5)
    api.delay_s = 2.0
    for name in ("plan-1", "plan-2", "plan-3"):
        resizer.submit(name, order(api))
    assert all(there.acquire(timeout=30) for _ in range(3))
    found = resizer.take()
    resizer.stop()
    transport.close()
    assert [(each.plan_id, each.result) for each in found] == [
        ("plan-1", ResizeResult.UNCERTAIN),
        ("plan-2", ResizeResult.NOT_SENT),
        ("plan-3", ResizeResult.NOT_SENT),
    ]
    assert len(api.sent("PATCH", "/api/v1/namespaces/default/pods/web/resize")) <= 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'{"kind": "Pod", "metadata": null}',
        b'{"kind": "Pod", "metadata": {"uid": 7}}',
        b'{"kind": "Pod"',
        b"[" * 200_000,
        b'{"kind": "Status", "status": "Success"}',
        b"\xff\xfe",
    ],
)
def test_garbage_in_an_answer_is_uncertain_and_ends_no_worker(api: ApiServer, tmp_path: Path, body: bytes) -> None:
    api.instead = lambda request: Answer(200, body, "application/json") if request.path.endswith("/resize") else None
    assert outcome(api, tmp_path, order(api)).result is ResizeResult.UNCERTAIN

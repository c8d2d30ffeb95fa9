"""Parsers of what an API server sends, and of requests to our own port."""

import contextlib
import itertools
import json
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

from nodeagent.config.schema import PageAccess
from nodeagent.kube import (
    access_reviews,
    api_errors,
    api_responses,
    identity_probe,
    kubelet_configz,
    node_identity,
    node_watch,
    pdb_watch,
    pod_decoder,
    pod_list_file,
    pod_watch,
    rights,
    user_review,
    volume_lookup,
)
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.deadline_http import RequestLimits
from nodeagent.kube.impersonation import Impersonation
from nodeagent.kube.line_stream import LineStream
from nodeagent.kube.list_stream import Listing
from nodeagent.kube.list_watch import ListWatch
from nodeagent.kube.node_identity import Identity, IdentityError
from nodeagent.kube.pod_list_file import PodListError
from nodeagent.kube.transport import Transport
from nodeagent.model import OutcomeKind, PodView, Signal
from nodeagent.policy import requests
from nodeagent.telemetry import http_server
from nodeagent.telemetry.endpoint import may_see_page
from tests.fuzz import scratch
from tests.fuzz.engine import Target
from tests.support.paths import REPOSITORY

_RECORDINGS: Final = REPOSITORY / "tests" / "data" / "recordings"


class EndOfInput(BaseException):
    """Raised into a watch that asks for more than the input has."""


class Answers:
    """A transport whose answers are the parts of the input, one after the other."""

    request_timeout_s = 5.0

    def __init__(self, *bodies: bytes, again: bool = False) -> None:
        self._bodies = list(bodies)
        self._again = again
        self.impersonation = Impersonation()

    def _next(self) -> bytes:
        if not self._bodies:
            raise EndOfInput
        return self._bodies[0] if self._again and len(self._bodies) == 1 else self._bodies.pop(0)

    def request(self, *_: object, **__: object) -> api_responses.Response:
        body = self._next()
        api_responses.check_object(200, body)
        return api_responses.Response(200, {}, body)

    @contextlib.contextmanager
    def stream(self, *_: object, **__: object) -> Iterator[LineStream]:
        response = cast("Any", _Chunks(self._next()))
        yield LineStream(response, RequestLimits(deadline=0.0, idle_s=1.0))


class _Chunks:
    """The body of a streamed answer, in uneven chunks."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._sizes = (1, 7, 4096, 65536)
        self._number = 0

    def read1(self, size: int, **_: object) -> bytes:
        self._number += 1
        size = min(size, self._sizes[self._number % len(self._sizes)])
        chunk, self._body = self._body[:size], self._body[size:]
        return chunk


def _transport(*bodies: bytes, again: bool = False) -> Transport:
    return cast("Transport", Answers(*bodies, again=again))


def _pod(data: bytes) -> None:
    pod = pod_decoder.decode_pod(data)
    requests.ephemeral_storage_limit(pod)
    requests.ranking_request(PodView(pod, None), signal=Signal.MEMORY)
    pod_decoder.with_mirrors_of((pod,), "u")
    volume_lookup.claims_of((pod,))
    assert sum(len(key) + len(value) for key, value in pod.labels.items()) <= pod_decoder.MAX_TEXT


def _node(data: bytes) -> None:
    watch = node_watch.NodeWatch(_transport(data, again=True), "lab-node")
    watch.update(data)
    watch.update(data)
    if (view := watch.view()) is not None:
        assert isinstance(view.conditions, dict)
    node_watch.decode_node(data)


def _pod_list(data: bytes) -> None:
    """A list of pods, then a watch of them, until the input ends."""
    listed, _, watched = data.partition(b"\0")
    watch = pod_watch.PodWatch(_transport(), "lab-node")
    store = watch._store
    _drive(store, "/api/v1/pods", listed, watched)
    watch.view()
    watch.report_missing(frozenset({"a"}))


def _node_stream(data: bytes) -> None:
    listed, _, watched = data.partition(b"\0")
    watch = node_watch.NodeWatch(_transport(), "lab-node")
    _drive(watch, "/api/v1/nodes", listed, watched)
    watch.view()


def _pdb_stream(data: bytes) -> None:
    listed, _, watched = data.partition(b"\0")
    pod = pod_decoder.decode_pod(b'{"metadata": {"uid": "u", "labels": {"app": "a"}}, "spec": {}, "status": {}}')
    namespace = pdb_watch._Namespace(_transport(), "n", lambda: None, lambda: 1.0, 0.0)
    _drive(namespace, "/apis/policy/v1/poddisruptionbudgets", listed, watched)
    assert all(each.disruptions_allowed >= 0 for each in namespace.pdbs_of(pod))


def _drive(handler: Any, path: str, listed: bytes, watched: bytes) -> None:
    """List and watch until everything is read; what is unreadable is a reason, never an exception."""
    transport = _transport(listed, watched, listed)
    watch = ListWatch(transport, path, handler, backoff=RetryBackoff(first_s=0.0, last_s=0.0))
    with contextlib.suppress(EndOfInput):
        watch._run()


def _listing(data: bytes) -> None:
    listing = Listing(_transport(*data.split(b"\0"), again=True), "/api/v1/pods", {})
    for item in listing:
        assert item[:1] == b"{"
        assert item[-1:] == b"}"


def _error(data: bytes) -> None:
    """An answer of 400 and above, in each status, and one below."""
    retry_after, _, body = data.partition(b"\0")
    headers = {"Retry-After": retry_after.decode("latin-1"), "Content-Type": "application/json"}
    for status in (400, 401, 403, 404, 409, 410, 422, 429, 500, 503, 504):
        error = api_errors.from_response(status, headers, body)
        assert isinstance(error.kind, OutcomeKind)
        assert error.kind is not OutcomeKind.ACCEPTED
        RetryBackoff().failed(error.retry_after_s)
    api_responses.check_object(201, body)


def _answers(data: bytes) -> None:
    """Each request of the agent whose answer is one object. Raises ApiError."""
    for call in (
        lambda: access_reviews.may(_transport(data, again=True), rights.RIGHTS[0], node="n"),
        lambda: access_reviews.rules_in(_transport(data, again=True), "n", timeout_s=1.0),
        lambda: user_review.fetch_user(_transport(data, again=True)),
        lambda: volume_lookup.look_up(_transport(data, again=True), ("n", "c"), node_name="lab-node"),
        lambda: kubelet_configz.fetch(_transport(data, again=True), "lab-node"),
        lambda: identity_probe.probe(_transport(data, again=True), "lab-node", evicts=True),
        lambda: node_identity.confirm_identity(
            _transport(data, again=True), Identity("lab-node", "hostname"), addresses=lambda: ("10.0.0.1",)
        ),
    ):
        with contextlib.suppress(ApiError, IdentityError):
            call()


_directory = tempfile.TemporaryDirectory(dir=scratch.PARENT)
_file = Path(_directory.name) / "pods.json"


def _pod_file(data: bytes) -> None:
    _file.write_bytes(data)
    pod_list_file.read_pod_list(str(_file))


_http: list[http_server.Server] = []
_failed: list[str] = []
_peers = itertools.count()


def _http_request(data: bytes) -> None:
    """A request to our own port. The client comes from one address after another, because each has a rate limit."""
    if not _http:
        page = http_server.Page(b"page\n")
        pages = {name: lambda request: _page(page, request) for name in ("/", "/metrics", "/healthz", "/readyz")}
        _http.append(http_server.Server("127.0.0.1:0", pages, failed=_failed.append))
    peer = next(_peers) % 60_000
    with socket.socket() as client:
        client.settimeout(5.0)
        client.bind((f"127.1.{peer // 250}.{peer % 250 + 1}", 0))
        client.connect(("127.0.0.1", _http[0].port))
        answer = b""
        with contextlib.suppress(OSError):  # closed unread, above a rate limit
            client.sendall(data[:20_000])
            client.shutdown(socket.SHUT_WR)
            while piece := client.recv(65536):
                answer += piece
    assert not _failed, _failed
    assert not answer or answer.startswith(b"HTTP/1.1 ")


def _page(page: http_server.Page, request: http_server.Request) -> http_server.Page:
    may_see_page(request, PageAccess.LOOPBACK)
    return page


def _recorded(*names: str) -> tuple[bytes, ...]:
    """The bodies of recorded answers."""
    found = []
    for name in names:
        for path in sorted(_RECORDINGS.glob(f"{name}.json")):
            response = json.loads(path.read_text())["response"]
            lines = "".join(each["line"] or "" for each in response.get("lines", ()))
            found.append((response.get("body") or lines).encode())
    return tuple([each for each in found if each])


_PODS: Final = _recorded("list-pods-fieldselector", "list-pods-limit1-page1")
_WATCH: Final = _recorded("watch-pods-stream", "watch-rv-old-410", "watch-sendInitialEvents")
_NODE: Final = _recorded("get-node")
_PDBS: Final = _recorded("pdb-get")
_ITEMS: Final = b'{"kind":"List","metadata":{"resourceVersion":"5"},"items":[%s]}'
_EVENT: Final = b'{"type":"MODIFIED","object":%s}\n'
_TOKENS: Final = (
    b'"items":',
    b'"metadata":',
    b'"resourceVersion":"9"',
    b'"type":"ERROR"',
    b'"type":"BOOKMARK"',
    b'"type":"DELETED"',
    b"\0",
    b"null",
    b'"continue":"a"',
    b'{"kind":"Status","status":"Failure","code":410}',
    b'"uid":"u"',
)

TARGETS: Final = (
    Target("api-pods", _pod, (ValueError,), seeds=_recorded("get-pod", "get-pod-terminating"), tokens=_TOKENS),
    Target("api-nodes", _node, (ValueError, OverflowError), seeds=_NODE, tokens=_TOKENS),
    Target(
        "watch-pods",
        _pod_list,
        seeds=tuple([_PODS[0] + b"\0" + each for each in _WATCH]),
        tokens=_TOKENS,
    ),
    Target(
        "watch-nodes",
        _node_stream,
        seeds=tuple([_ITEMS % each + b"\0" + _EVENT % each.replace(b"\n", b"") for each in _NODE]),
        tokens=_TOKENS,
    ),
    Target(
        "watch-pdbs",
        _pdb_stream,
        seeds=tuple([_ITEMS % each + b"\0" + _EVENT % each.replace(b"\n", b"") for each in _PDBS]),
        tokens=(*_TOKENS, b'"operator":"NotIn"', b'"matchExpressions":[{}]'),
    ),
    Target("api-lists", _listing, (ApiError,), seeds=_PODS, tokens=_TOKENS),
    Target(
        "api-errors",
        _error,
        (ApiError,),
        seeds=tuple([b"1\0" + each for each in _recorded("eviction-*-4*", "eviction-*-5*", "apf-429*", "forbidden*")]),
        tokens=(*_TOKENS, b'"causes":[{"reason":"DisruptionBudget"}]', b'"retryAfterSeconds":1e9'),
    ),
    Target(
        "api-answers",
        _answers,
        seeds=(
            *_recorded("selfsubjectreview", "sar-201*", "get-node", "tokenreview*"),
            b'{"spec":{"volumeName":"v","nodeAffinity":{"required":{"nodeSelectorTerms":[{"matchExpressions":'
            b'[{"key":"kubernetes.io/hostname","operator":"In","values":["lab-node"]}]}]}},"local":{}}}',
            b'{"status":{"resourceRules":[{"verbs":["get"],"apiGroups":[""],"resources":["pods"]}]}}',
            _ITEMS % b'{"metadata":{"name":"a"},"status":{"addresses":[{"type":"InternalIP","address":"10.0.0.1"}]}}',
        ),
        tokens=(*_TOKENS, b'"allowed":true', b'"username":"system:node:a"'),
    ),
    Target("pod-files", _pod_file, (PodListError,), seeds=_PODS, tokens=_TOKENS),
    Target(
        "http-requests",
        _http_request,
        seeds=(
            b"GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: application/openmetrics-text\r\n\r\n",
            b"HEAD / HTTP/1.0\nhost: [::1]:9\n\n",
            b"GET /?still HTTP/1.1\r\nHost: localhost:8080\r\n\r\n",
            b"POST /healthz HTTP/1.1\r\nContent-Length: 5\r\n\r\nabcde",
        ),
        tokens=(b"\r\n\r\n", b"GET ", b" HTTP/1.1", b"Host: ", b"Transfer-Encoding: chunked\r\n", b"A: " + b"b" * 9000),
    ),
)

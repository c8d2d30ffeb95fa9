"""Requests have limits, failures have kinds, and credentials are read again."""

import ctypes
import json
import os
import re
import shutil
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.kube import api_errors
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.credentials import Credentials, CredentialsError, CredentialSource, find_credentials
from nodeagent.kube.transport import STRATEGIC_MERGE, STUCK_AFTER_S, Transport, connect
from nodeagent.model import OutcomeKind
from nodeagent.runtime import workers
from tests.fake_kube import AGENT, ApiServer, pod
from tests.support.certificates import make, server_context
from tests.support.paths import RECORDINGS
from tests.support.rawserver import CHUNKED, RawServer, chunk, read_request, response


def transport_to(server: ApiServer | RawServer, tmp_path: Path, *, timeout_s: float = 5.0) -> Transport:
    path = server.kubeconfig(tmp_path / "kubeconfig")
    return connect(find_credentials(str(path)), request_timeout_s=timeout_s)


def failure(call: Callable[[], object]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call()
    return caught.value


# --- what answers mean -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "retry_after_s"),
    [
        ("eviction-pdb-429", OutcomeKind.BLOCKED_BY_PDB, None),
        ("eviction-pdb-429-not-observed", OutcomeKind.BLOCKED_BY_PDB, 10.0),
        ("apf-429-eviction", OutcomeKind.TOO_MANY_REQUESTS, 2.0),
        ("eviction-two-pdbs-500", OutcomeKind.PDB_CONFLICT, None),
        ("eviction-404", OutcomeKind.NOT_FOUND, None),
        ("eviction-uid-mismatch-409", OutcomeKind.CONFLICT, None),
        ("eviction-rv-mismatch-409", OutcomeKind.CONFLICT, None),
        ("eviction-name-mismatch-400", OutcomeKind.INVALID, None),
        ("eviction-badjson-400", OutcomeKind.INVALID, None),
        ("eviction-403", OutcomeKind.FORBIDDEN, None),
        ("unauthorized-401", OutcomeKind.UNAUTHORIZED, None),
        ("list-pods-rv-future", OutcomeKind.SERVER_ERROR, 1.0),
        ("node-status-patch-missing-type", OutcomeKind.SERVER_ERROR, None),
        ("node-status-patch-422", OutcomeKind.INVALID, None),
    ],
)
def test_each_recorded_refusal_has_its_kind(name: str, kind: OutcomeKind, retry_after_s: float | None) -> None:
    recorded = json.loads((RECORDINGS / f"{name}.json").read_text())["response"]
    error = api_errors.from_response(recorded["status"], dict(recorded["headers"]), recorded["body"].encode())
    assert (error.kind, error.retry_after_s, error.status) == (kind, retry_after_s, recorded["status"])
    assert error.message


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        (403, "Forbidden", 'poddisruptionbudget.policy "web" is forbidden: pdb disruptions allowed is negative'),
        (
            403,
            "Forbidden",
            'poddisruptionbudget.policy "web" is forbidden: DisruptedPods map too big - too many evictions not '
            "confirmed by PDB controller",
        ),
        (504, "Timeout", 'Timeout: couldn\'t update PodDisruptionBudget "web" due to conflicts'),
    ],
)
def test_a_pdb_that_cannot_be_computed_is_no_error_of_the_server(status: int, reason: str, message: str) -> None:
    """Not recorded: they take a thousand evictions at once."""
    body = {"kind": "Status", "status": "Failure", "message": message, "reason": reason, "code": status}
    error = api_errors.from_response(status, {"Retry-After": "10"}, json.dumps(body).encode())
    assert (error.kind, error.retry_after_s) == (OutcomeKind.BLOCKED_BY_PDB, 10.0)
    assert "web" in error.message


def test_a_missing_right_on_pdbs_is_no_refusal_of_a_pdb() -> None:
    message = 'poddisruptionbudgets.policy is forbidden: User "x" cannot list resource "poddisruptionbudgets"'
    assert api_errors.from_response(403, {}, json.dumps({"message": message}).encode()).kind is OutcomeKind.FORBIDDEN


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (
            "pods \"web\" is forbidden: ValidatingAdmissionPolicy 'nodeagent-evictions' with binding "
            "'nodeagent-evictions' denied request: nodeagent may evict no pods of kube-system",
            OutcomeKind.DENIED,
        ),
        ('admission webhook "hold.example.com" denied the request: not now', OutcomeKind.DENIED),
        ('admission webhook "hold.example.com" denied the request without explanation', OutcomeKind.DENIED),
        (
            'pods "web" is forbidden: unable to create new content in namespace shop because it is being terminated',
            OutcomeKind.DENIED,
        ),
        ('pods "web" is forbidden: not yet ready to handle request', OutcomeKind.DENIED),
        ('nodes "n1" is forbidden: User "system:node:n1" cannot get path "/metrics"', OutcomeKind.FORBIDDEN),
        (
            'pods "denied-request" is forbidden: User "denied" cannot create resource "pods/eviction" in API group "" '
            'in the namespace "denied-the-request"',
            OutcomeKind.FORBIDDEN,
        ),
    ],
)
def test_a_refusal_by_admission_is_no_missing_right(message: str, kind: OutcomeKind) -> None:
    """The texts of k8s.io/apiserver: plugin/policy/validating/dispatcher.go, plugin/webhook/errors/statuserror.go,
    plugin/namespace/lifecycle/admission.go, plugin/policy/generic/plugin.go."""
    body = {"kind": "Status", "status": "Failure", "message": message, "reason": "Forbidden", "code": 403}
    error = api_errors.from_response(403, {}, json.dumps(body).encode())
    assert (error.kind, error.status, error.message) == (kind, 403, message)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, 'admission webhook "x" denied the request: no'),
        (
            429,
            'admission webhook "virt-launcher-eviction-interceptor.kubevirt.io" denied the request: Eviction triggered '
            'evacuation of VMI "a/b"',
        ),
        (
            500,
            'admission webhook "strimzi-drain-cleaner.strimzi.io" denied the request: The pod will be rolled by the '
            "Strimzi Cluster Operator",
        ),
        (
            500,
            'Internal error occurred: failed calling webhook "x": failed to call webhook: Post "https://a.b.svc:443/": '
            "dial tcp: connect: connection refused",
        ),
        (503, 'admission webhook "x" denied the request: later'),
    ],
)
def test_a_webhook_may_deny_with_any_status(status: int, message: str) -> None:
    body = {"kind": "Status", "status": "Failure", "message": message, "code": status}
    error = api_errors.from_response(status, {}, json.dumps(body).encode())
    assert (error.kind, error.status, error.from_api) == (OutcomeKind.DENIED, status, True)
    page = api_errors.from_response(status, {"Content-Type": "text/html"}, f"<p>{message}</p>".encode())
    assert page.kind is not OutcomeKind.DENIED, "not an answer of the API server"


def test_a_refusal_by_a_pdb_has_its_name_and_reason() -> None:
    recorded = json.loads((RECORDINGS / "eviction-pdb-429.json").read_text())["response"]
    assert "pdb-hog needs 2 healthy pods" in api_errors.from_response(429, {}, recorded["body"].encode()).message


@pytest.mark.parametrize("body", [b"", b"\xff\xfe", b"[1]", b'{"message": 3}', b'{"message":"m","details":[]}', b"{"])
def test_a_body_that_is_no_status_still_makes_an_error(body: bytes) -> None:
    assert api_errors.from_response(429, {}, body).kind is OutcomeKind.TOO_MANY_REQUESTS
    assert api_errors.from_response(503, {"Retry-After": "Fri, 20 Nov 2026 23:16:51 GMT"}, body).retry_after_s is None


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_a_request_arrives_in_one_piece(tmp_path: Path) -> None:
    """An agent that is killed during a request has sent all of it, or nothing."""
    pieces: list[bytes] = []

    def answer(connection: socket.socket, number: int) -> None:
        while piece := connection.recv(1 << 20):
            pieces.append(piece)
            connection.sendall(response(b"{}"))

    body = json.dumps({"kind": "Eviction", "padding": "x" * 2000}).encode()
    with RawServer(answer) as server:
        transport = transport_to(server, tmp_path)
        for _ in range(20):
            transport.request("POST", "/api/v1/namespaces/default/pods/hog/eviction", body=body)
    assert len(pieces) == 20
    assert all(piece.startswith(b"POST /api/v1/") and piece.endswith(body) for piece in pieces)


@pytest.mark.parametrize("prefix", ["", "/", "/k8s/clusters/c-m-1", "/k8s/clusters/c-m-1/"])
def test_every_request_has_the_path_of_the_kubeconfigs_server_in_front(tmp_path: Path, prefix: str) -> None:
    """As those of kubectl: Rancher and other proxies choose the cluster by it."""
    targets: list[str] = []

    def answer(connection: socket.socket, number: int) -> None:
        while request := read_request(connection):
            targets.append(request.split()[1].decode())
            connection.sendall(response(b"{}"))

    with RawServer(answer) as server:
        path = server.kubeconfig(tmp_path / "kubeconfig")
        path.write_text(path.read_text().replace(server.url, server.url + prefix))
        transport = connect(find_credentials(str(path)))
        transport.request("GET", "/api/v1/pods?fieldSelector=spec.nodeName%3Dn1")
        with transport.stream("/api/v1/pods?watch=1", idle_s=5.0, total_s=5.0) as stream:
            list(stream.lines())
        transport.prewarm(1)
    expected = ["/api/v1/pods?fieldSelector=spec.nodeName%3Dn1", "/api/v1/pods?watch=1", "/version"]
    assert targets == [prefix.rstrip("/") + target for target in expected]


def test_a_closed_port_is_unreachable(tmp_path: Path) -> None:
    with RawServer(lambda connection, number: None) as server:
        transport = transport_to(server, tmp_path)
    assert failure(lambda: transport.request("GET", "/version")).kind is OutcomeKind.UNREACHABLE


def test_a_half_open_connection_times_out(tmp_path: Path) -> None:
    with RawServer(lambda connection, number: server.over.wait()) as server:
        transport = transport_to(server, tmp_path, timeout_s=1.0)
        began = time.monotonic()
        assert failure(lambda: transport.request("GET", "/version")).kind is OutcomeKind.TIMED_OUT
        assert time.monotonic() - began < 3


DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A classic BPF program, `ret #0`: the kernel drops what arrives at the socket, and acknowledges none of it."""
SO_ATTACH_FILTER = 26


def test_kept_connections_whose_other_end_vanished_are_replaced_before_the_deadline(tmp_path: Path) -> None:
    numbers = []

    def drive(connection: socket.socket, number: int) -> None:
        while read_request(connection):
            numbers.append(number)
            if number <= 2:
                program = ctypes.create_string_buffer(DROP_ALL)
                header = struct.pack("HL", 1, ctypes.addressof(program))
                connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, header)
            connection.sendall(response(b"{}"))
            if number <= 2:
                server.over.wait()

    with RawServer(drive) as server:
        transport = transport_to(server, tmp_path, timeout_s=30.0)
        assert transport.prewarm(2) == 2
        began = time.monotonic()
        assert transport.request("GET", "/version").status == 200
        assert 3 < time.monotonic() - began < 20
        transport.close()
    assert numbers == [1, 2, 3]


def test_a_request_far_past_its_deadline_is_reported_as_stuck(tmp_path: Path) -> None:
    with RawServer(lambda connection, number: server.over.wait()) as server:
        transport = transport_to(server, tmp_path, timeout_s=5.0)
        thread = workers.start_thread(lambda: failure(lambda: transport.request("GET", "/version?x=1")), name="request")
        assert thread is not None
        messages: list[str] = []
        while not messages and thread.is_alive():
            much_later = time.monotonic() + 5.0 + STUCK_AFTER_S
            messages = [each.message for each in workers.stuck_workers(much_later) if each.name == "request"]
        assert messages == ["stuck in GET /version for more than 45s"]
        assert not [each for each in workers.stuck_workers() if each.name == "request"]
    thread.join(20)


@pytest.mark.parametrize("suspended", [False, True])
def test_nothing_is_sent_after_the_deadline_however_long_connecting_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suspended: bool
) -> None:
    """A DNS look-up has no limit of its own; a suspend ends in it at any time."""
    received: list[bytes] = []
    look_up, read_clock, slept_s = socket.getaddrinfo, time.clock_gettime, [0.0]

    def look_up_slowly(*args: Any, **kwargs: Any) -> list[Any]:
        if suspended:
            slept_s[0] = 3600.0
        else:
            time.sleep(0.6)
        return look_up(*args, **kwargs)

    def clock_gettime(which: int) -> float:
        return read_clock(which) + (slept_s[0] if which == time.CLOCK_BOOTTIME else 0.0)

    with RawServer(lambda connection, number: received.append(read_request(connection))) as server:
        transport = transport_to(server, tmp_path, timeout_s=5.0 if suspended else 0.3)
        monkeypatch.setattr(socket, "getaddrinfo", look_up_slowly)
        monkeypatch.setattr(time, "clock_gettime", clock_gettime)
        error = failure(lambda: transport.request("POST", "/api/v1/namespaces/a/pods/p/eviction", body=b"{}"))
        assert (error.kind, error.message) == (OutcomeKind.UNREACHABLE, f"cannot connect to {server.url}: timed out")
        deadline = time.monotonic() + 20
        while not received and time.monotonic() < deadline:
            time.sleep(0.01)
        assert received == [b""]


@pytest.mark.parametrize("what", ["headers", "body"])
def test_a_slow_server_cannot_exceed_the_deadline(tmp_path: Path, what: str) -> None:
    def drip(connection: socket.socket, number: int) -> None:
        read_request(connection)
        if what == "body":
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n")
        else:
            connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
        while not server.over.wait(0.05):
            connection.sendall(b"x")

    with RawServer(drip) as server:
        transport = transport_to(server, tmp_path, timeout_s=1.0)
        began = time.monotonic()
        assert failure(lambda: transport.request("GET", "/version")).kind is OutcomeKind.TIMED_OUT
        assert time.monotonic() - began < 3


def test_an_endless_body_is_cut_off(tmp_path: Path) -> None:
    sent = [0]

    def flood(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 5368709120\r\n\r\n")
        while True:
            sent[0] += connection.send(bytes(1 << 16))

    with RawServer(flood) as server:
        transport = transport_to(server, tmp_path)
        error = failure(lambda: transport.request("GET", "/api/v1/pods", max_bytes=1 << 20))
    assert error.kind is OutcomeKind.SERVER_ERROR
    assert "larger than 1 MiB" in error.message
    assert sent[0] < 32 << 20


@pytest.mark.parametrize("status", ["500 Oops", "404 Not Found", "429 Too Many"])
def test_an_endless_refusal_is_cut_off_and_still_a_refusal(tmp_path: Path, status: str) -> None:
    sent = [0]

    def flood(connection: socket.socket, number: int) -> None:
        read_request(connection)
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: 5368709120\r\n\r\n"
        connection.sendall(head.encode())
        while True:
            sent[0] += connection.send(b"[" * (1 << 16))

    with RawServer(flood) as server:
        transport = transport_to(server, tmp_path)
        error = failure(lambda: transport.request("GET", "/api/v1/pods"))
    assert error.status == int(status[:3])
    assert not error.from_api
    assert sent[0] < 32 << 20


def test_an_endless_line_is_cut_off(tmp_path: Path) -> None:
    def flood(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(CHUNKED)
        while True:
            connection.sendall(chunk(b"x" * (1 << 16)))

    with RawServer(flood) as server, transport_to(server, tmp_path).stream("/w", idle_s=5, total_s=30) as stream:
        assert "larger than" in failure(lambda: list(stream.lines())).message


@pytest.mark.parametrize("garbage", [b"\0\1\2\3\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Le"])
def test_garbage_instead_of_http_is_a_broken_connection(tmp_path: Path, garbage: bytes) -> None:
    def spit(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(garbage)

    with RawServer(spit) as server:
        transport = transport_to(server, tmp_path)
        assert failure(lambda: transport.request("GET", "/x")).kind is OutcomeKind.TIMED_OUT


def test_an_answer_that_breaks_off_is_no_answer(tmp_path: Path) -> None:
    def cut(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(response(b"{}" * 50)[:-20])

    with RawServer(cut) as server:
        transport = transport_to(server, tmp_path)
        assert failure(lambda: transport.request("GET", "/x")).kind is OutcomeKind.TIMED_OUT


# --- streams ---------------------------------------------------------------------------------------------------------


def test_lines_arrive_as_they_are_sent_whatever_the_chunks(tmp_path: Path) -> None:
    def watch(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(CHUNKED + chunk(b"one\ntw") + chunk(b"o\n\nthree\n") + chunk(b"unfinished") + chunk(b""))

    with RawServer(watch) as server, transport_to(server, tmp_path).stream("/w", idle_s=5, total_s=30) as stream:
        assert list(stream.lines()) == [b"one", b"two", b"three"]


def test_a_silent_stream_is_noticed(tmp_path: Path) -> None:
    def watch(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(CHUNKED + chunk(b"one\n"))
        server.over.wait()

    with RawServer(watch) as server, transport_to(server, tmp_path).stream("/w", idle_s=1.0, total_s=30) as stream:
        lines = stream.lines()
        assert next(lines) == b"one"
        assert failure(lambda: next(lines)).kind is OutcomeKind.TIMED_OUT


def test_an_endless_slow_stream_is_ended(tmp_path: Path) -> None:
    def watch(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(CHUNKED)
        while not server.over.wait(0.05):
            connection.sendall(chunk(b"x"))

    with RawServer(watch) as server, transport_to(server, tmp_path).stream("/w", idle_s=20, total_s=1.0) as stream:
        began = time.monotonic()
        assert failure(lambda: list(stream.lines())).kind is OutcomeKind.TIMED_OUT
        assert time.monotonic() - began < 3


def test_a_stream_can_be_aborted_from_another_thread(tmp_path: Path) -> None:
    def watch(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(CHUNKED + chunk(b"one\n"))
        server.over.wait()

    with RawServer(watch) as server, transport_to(server, tmp_path).stream("/w", idle_s=30, total_s=30) as stream:
        lines = stream.lines()
        assert next(lines) == b"one"
        threading.Timer(0.1, stream.abort).start()
        assert list(lines) == []


# --- connections -----------------------------------------------------------------------------------------------------


def test_connections_are_kept_open_and_prewarm_opens_as_many_as_requested(tmp_path: Path) -> None:
    with ApiServer() as api:
        transport = transport_to(api, tmp_path)
        for _ in range(5):
            transport.request("GET", "/version")
        assert len({r.connection for r in api.requests}) == 1
        assert transport.prewarm(4) == 4
        assert len({r.connection for r in api.requests}) == 4


def test_a_kept_connection_that_the_server_closed_costs_one_new_one_and_no_failure(tmp_path: Path) -> None:
    closed = threading.Event()

    def one_each(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(response(b"{}"))
        if number == 1:
            # The next request arrives, and is not answered any more.
            read_request(connection)
            closed.set()

    with RawServer(one_each) as server:
        transport = transport_to(server, tmp_path)
        assert transport.request("GET", "/a").status == 200
        assert transport.request("POST", "/b", body=b"{}").status == 200
        assert closed.is_set()
        assert server.connections == 2


def test_a_server_that_closes_every_connection_gets_two_requests(tmp_path: Path) -> None:
    with RawServer(lambda connection, number: read_request(connection)) as server:
        transport = transport_to(server, tmp_path)
        assert failure(lambda: transport.request("POST", "/a", body=b"{}")).kind is OutcomeKind.TIMED_OUT
        assert server.connections == 2


# --- credentials -----------------------------------------------------------------------------------------------------


def test_a_rotated_token_is_read_again_after_a_401(tmp_path: Path) -> None:
    with ApiServer() as api:
        transport = transport_to(api, tmp_path)
        transport.request("GET", "/version")
        api.tokens = {"second": AGENT}
        api.kubeconfig(tmp_path / "kubeconfig", token="second")
        assert transport.request("GET", "/version").status == 200
        assert [r.headers["authorization"] for r in api.requests][-1] == "Bearer second"


def test_a_token_that_stays_wrong_causes_no_flood_of_requests(tmp_path: Path) -> None:
    with ApiServer() as api:
        transport = transport_to(api, tmp_path)
        api.tokens = {}
        for _ in range(5):
            assert failure(lambda: transport.request("GET", "/version")).kind is OutcomeKind.UNAUTHORIZED
        assert len(api.requests) == 5


def test_a_token_file_is_read_again_every_minute_and_its_newline_removed(tmp_path: Path) -> None:
    now = [0.0]
    token = tmp_path / "token"
    token.write_text("agent-token\n")
    with ApiServer() as api:
        path = api.kubeconfig(tmp_path / "kubeconfig")
        config = json.loads(path.read_text())
        config["users"][0]["user"] = {"tokenFile": str(token)}
        path.write_text(json.dumps(config))
        transport = Transport(find_credentials(str(path)), request_timeout_s=5, clock=lambda: now[0])
        transport.request("GET", "/version")
        api.tokens["rotated"] = AGENT
        token.write_text("rotated\n")
        transport.request("GET", "/version")
        now[0] = 61.0
        transport.request("GET", "/version")
        tokens = [r.headers["authorization"] for r in api.requests]
        assert tokens == ["Bearer agent-token", "Bearer agent-token", "Bearer rotated"]


def test_a_token_file_that_is_being_replaced_does_no_harm(tmp_path: Path) -> None:
    now = [0.0]
    token = tmp_path / "token"
    token.write_text("agent-token")
    with ApiServer() as api:
        path = api.kubeconfig(tmp_path / "kubeconfig")
        config = json.loads(path.read_text())
        config["users"][0]["user"] = {"tokenFile": str(token)}
        path.write_text(json.dumps(config))
        transport = Transport(find_credentials(str(path)), request_timeout_s=5, clock=lambda: now[0])
        token.unlink()
        now[0] = 61.0
        assert transport.request("GET", "/version").status == 200


def plugin(tmp_path: Path, body: str) -> Path:
    script = tmp_path / "plugin"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def with_plugin(api: ApiServer, tmp_path: Path, script: Path) -> Credentials:
    path = api.kubeconfig(tmp_path / "kubeconfig")
    config = json.loads(path.read_text())
    run = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(script), "interactiveMode": "Never"}
    config["users"][0]["user"] = {"exec": run}
    path.write_text(json.dumps(config))
    return find_credentials(str(path))


def test_an_exec_plugin_returns_the_token_and_runs_again_only_after_a_401(tmp_path: Path) -> None:
    answer = '{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{"token":"%s"}}'
    script = plugin(tmp_path, f"echo x >> {tmp_path}/runs; printf '{answer}' \"$(cat {tmp_path}/token)\"")
    (tmp_path / "token").write_text("agent-token")
    with ApiServer() as api:
        transport = connect(with_plugin(api, tmp_path, script))
        for _ in range(3):
            transport.request("GET", "/version")
        assert (tmp_path / "runs").read_text() == "x\n"
        api.tokens = {"second": AGENT}
        (tmp_path / "token").write_text("second")
        assert transport.request("GET", "/version").status == 200
        assert (tmp_path / "runs").read_text() == "x\nx\n"


def test_a_session_that_replaces_another_one_runs_the_plugin_only_for_other_credentials(tmp_path: Path) -> None:
    answer = '{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{"token":"agent-token"}}'
    script = plugin(tmp_path, f"echo x >> {tmp_path}/runs; printf '{answer}'")
    with ApiServer() as api:
        credentials = with_plugin(api, tmp_path, script)
        first = connect(credentials)
        second = connect(credentials, request_timeout_s=7, previous=first)
        assert (tmp_path / "runs").read_text() == "x\n"
        first.close()
        assert second.request("GET", "/version").status == 200
        second.close()
        assert connect(credentials, previous=second).request("GET", "/version").status == 200
        assert (tmp_path / "runs").read_text() == "x\n"
        path = Path(credentials.kubeconfig)
        path.write_text(path.read_text() + "\n")
        connect(credentials, previous=second)
        assert (tmp_path / "runs").read_text() == "x\nx\n"


def test_an_exec_plugin_that_fails_is_an_error_with_its_source(tmp_path: Path) -> None:
    with ApiServer() as api, pytest.raises(CredentialsError, match="exec plugin"):
        connect(with_plugin(api, tmp_path, plugin(tmp_path, "exit 1")))


@pytest.mark.parametrize("text", ["", "{", "current-context: x\n", "- 1\n", "current-context: 3\nclusters: 7\n"])
def test_a_broken_kubeconfig_is_a_credentials_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(CredentialsError):
        connect(find_credentials(str(path)))


def test_a_service_account_is_used_as_the_official_package_does(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("projected\n")
    (tmp_path / "ca.crt").write_text("not read before a connection is made")
    credentials = Credentials(
        CredentialSource.SERVICE_ACCOUNT, service_account_dir=str(tmp_path), server="10.96.0.1:443"
    )
    transport = connect(credentials)
    assert transport.server == "https://10.96.0.1:443"


def with_token_file(api: ApiServer, tmp_path: Path, token: Path) -> Credentials:
    path = api.kubeconfig(tmp_path / "kubeconfig")
    config = json.loads(path.read_text())
    config["users"][0]["user"] = {"tokenFile": str(token)}
    path.write_text(json.dumps(config))
    return find_credentials(str(path))


def test_a_token_that_is_rotated_right_after_it_was_refused_is_used_by_the_next_request(tmp_path: Path) -> None:
    """The API server may refuse the old token before the kubelet has written the new one."""
    token = tmp_path / "token"
    token.write_text("agent-token")
    with ApiServer() as api:
        transport = connect(with_token_file(api, tmp_path, token))
        api.tokens = {"rotated": AGENT}
        for _ in range(2):
            assert failure(lambda: transport.request("GET", "/version")).kind is OutcomeKind.UNAUTHORIZED
        token.write_text("rotated")
        assert transport.request("GET", "/version").status == 200
        assert len(api.requests) == 4, "each refused request was sent once, the last one twice"


@pytest.mark.parametrize("what", ["list", "watch", "evict", "patch"])
def test_every_request_reads_a_rotated_token_at_its_first_401_and_is_sent_again(tmp_path: Path, what: str) -> None:
    token = tmp_path / "token"
    token.write_text("agent-token")
    with ApiServer(pods=[pod("hog")], linger_s=None) as api:
        transport = connect(with_token_file(api, tmp_path, token))
        transport.request("GET", "/version")
        api.tokens = {"rotated": AGENT}
        token.write_text("rotated")
        pods = "/api/v1/namespaces/default/pods"
        if what == "watch":
            api.end_watches()
            with transport.stream(f"{pods}?watch=1&resourceVersion=0", idle_s=5, total_s=5):
                pass
        elif what == "evict":
            transport.request("POST", f"{pods}/hog/eviction", body=b'{"metadata":{"name":"hog"}}')
        elif what == "patch":
            transport.request("PATCH", "/api/v1/nodes/lab-node/status", body=b"{}", content_type=STRATEGIC_MERGE)
        else:
            transport.request("GET", pods)
        sent = [r.headers["authorization"] for r in api.requests]
        assert sent == ["Bearer agent-token", "Bearer agent-token", "Bearer rotated"]


def test_many_threads_with_a_401_at_once_read_the_token_and_continue(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("agent-token")
    with ApiServer() as api:
        transport = connect(with_token_file(api, tmp_path, token))
        transport.prewarm(6)
        api.tokens = {"rotated": AGENT}
        token.write_text("rotated")
        statuses: list[int] = []
        threads = [
            threading.Thread(target=lambda: statuses.append(transport.request("GET", "/version").status))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert statuses == [200] * 6


def _as_directory(path: Path) -> None:
    path.mkdir()


def _as_fifo(path: Path) -> None:
    os.mkfifo(path)


def _as_dangling_link(path: Path) -> None:
    path.symlink_to("..data-that-is-not-there")


def _nothing(path: Path) -> None:
    """As in the moment between two files."""


UNUSABLE = [
    (b"one\ntwo", "more than one line"),
    (b"one\r\nX-Remote-User: admin", "more than one line"),
    ("t\u00f6ken".encode(), "no visible ASCII"),
    ("to\u20acken".encode(), "no visible ASCII"),
    ("\ufefftoken".encode(), "no visible ASCII"),
    (b"\xff\xfetoken", "no visible ASCII"),
    (b"to\0ken", "no visible ASCII"),
    (b"to ken", "no visible ASCII"),
    (b"", "is empty"),
    (b" \r\n\r\n", "is empty"),
    (b"x" * 70000, "larger than 64 KiB"),
    (_as_directory, "Is a directory|no regular file"),
    (_as_fifo, "no regular file"),
    (_as_dangling_link, "cannot be read: No such file"),
    (_nothing, "cannot be read: No such file"),
]


def spoil(path: Path, how: bytes | Callable[[Path], None]) -> None:
    path.unlink()
    if isinstance(how, bytes):
        path.write_bytes(how)
    else:
        how(path)


@pytest.fixture
def service_account(tmp_path: Path) -> Iterator[tuple[ApiServer, Credentials]]:
    """An API server with TLS, and a directory as the kubelet mounts it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    made = make(tmp_path)
    with ApiServer(tls=server_context(made), pods=[pod("hog")], linger_s=None) as api:
        (tmp_path / "token").write_text("agent-token")
        server = api.url.partition("//")[2]
        yield api, Credentials(CredentialSource.SERVICE_ACCOUNT, service_account_dir=str(tmp_path), server=server)


@pytest.mark.parametrize(("how", "flaw"), UNUSABLE)
def test_an_unusable_token_file_leaves_the_old_token_in_use_and_is_reported(
    service_account: tuple[ApiServer, Credentials], tmp_path: Path, how: bytes | Callable[[Path], None], flaw: str
) -> None:
    api, credentials = service_account
    token, now = tmp_path / "token", [0.0]
    transport = Transport(credentials, request_timeout_s=5, clock=lambda: now[0])
    spoil(token, how)
    now[0] += 61.0
    assert transport.request("GET", "/version").status == 200, "the old token is still good"
    first = transport.trouble
    assert re.search(flaw, first), first
    assert str(token) in first
    assert "one" not in first.replace("one line", ""), "no part of a token is shown"
    now[0] += 61.0
    transport.request("GET", "/version")
    assert transport.trouble == first, "one text for one trouble"

    api.tokens = {"rotated": AGENT}
    assert failure(lambda: transport.request("GET", "/version")).kind is OutcomeKind.UNAUTHORIZED

    if token.is_dir():
        token.rmdir()
    else:
        token.unlink(missing_ok=True)
    token.write_bytes(b"\n rotated\r\n")
    assert transport.request("GET", "/version").status == 200
    assert not transport.trouble


@pytest.mark.parametrize(("how", "flaw"), UNUSABLE)
def test_a_start_with_an_unusable_token_file_fails_with_its_path_and_reason(
    tmp_path: Path, how: bytes | Callable[[Path], None], flaw: str
) -> None:
    (tmp_path / "ca.crt").write_text("not read before a connection is made")
    (tmp_path / "token").write_text("")
    spoil(tmp_path / "token", how)
    credentials = Credentials(CredentialSource.SERVICE_ACCOUNT, service_account_dir=str(tmp_path), server="10.0.0.1:1")
    with pytest.raises(CredentialsError, match=flaw) as refused:
        connect(credentials)
    assert str(tmp_path / "token") in str(refused.value)


@pytest.mark.parametrize("content", [b"one\ntwo", "t\u00f6ken".encode(), b"\xff\xfetoken", b"", b"to\0ken"])
def test_an_unusable_token_file_of_a_kubeconfig_leaves_the_old_token_in_use_as_well(
    tmp_path: Path, content: bytes
) -> None:
    token, now = tmp_path / "token", [0.0]
    token.write_text("agent-token")
    with ApiServer() as api:
        credentials = with_token_file(api, tmp_path, token)
        transport = Transport(credentials, request_timeout_s=5, clock=lambda: now[0])
        token.write_bytes(content)
        now[0] += 61.0
        assert transport.request("GET", "/version").status == 200
        assert "kubeconfig" in transport.trouble
        api.tokens = {"rotated": AGENT}
        assert failure(lambda: transport.request("GET", "/version")).kind is OutcomeKind.UNAUTHORIZED
        token.write_text("rotated")
        assert transport.request("GET", "/version").status == 200
        assert not transport.trouble


def test_a_token_that_is_rotated_as_by_the_kubelet_is_read_complete(
    service_account: tuple[ApiServer, Credentials], tmp_path: Path
) -> None:
    """`token` -> `..data/token`, and `..data` is a link that is replaced."""
    api, credentials = service_account
    token = tmp_path / "token"
    for version in ("1", "2"):
        (tmp_path / f"..{version}").mkdir()
        (tmp_path / f"..{version}" / "token").write_text("agent-token" if version == "1" else "rotated")
    (tmp_path / "..data").symlink_to("..1")
    token.unlink()
    token.symlink_to("..data/token")
    transport = connect(credentials)
    assert transport.request("GET", "/version").status == 200
    api.tokens = {"rotated": AGENT}
    (tmp_path / "..new").symlink_to("..2")
    (tmp_path / "..new").rename(tmp_path / "..data")
    assert transport.request("GET", "/version").status == 200


def test_an_exec_plugin_that_fails_later_ends_no_thread(tmp_path: Path) -> None:
    answer = (
        '{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential",'
        '"status":{"token":"%s","expirationTimestamp":"2020-01-01T00:00:00Z"}}'
    )
    script = plugin(tmp_path, f"printf '{answer}' \"$(cat {tmp_path}/token)\"")
    (tmp_path / "token").write_text("agent-token")
    now = [0.0]
    with ApiServer() as api:
        transport = Transport(with_plugin(api, tmp_path, script), request_timeout_s=5, clock=lambda: now[0])
        for broken in ("exit 1", "printf nonsense", f"printf '{answer}' 'a\\u00e4'"):
            plugin(tmp_path, broken)
            now[0] += 61.0
            assert transport.request("GET", "/version").status == 200


def test_the_whole_package_works_like_its_parts(tmp_path: Path) -> None:
    with ApiServer() as api:
        path = api.kubeconfig(tmp_path / "kubeconfig")
        transport = connect(find_credentials(str(path)), light=False)
        assert not transport.light
        assert transport.request("GET", "/version").status == 200

"""Each answer to an eviction: accepted only as the API defines it, not evicted only if that is certain."""

import json
import shutil
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeagent.actuators.evictions import EvictionSender
from nodeagent.config.schema import ClusterIdentity, Config
from nodeagent.kube.api_errors import NOT_ON_NODE, ApiError
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.transport import Transport, connect
from nodeagent.model import Method, Outcome, OutcomeKind, Victim
from tests.fake_kube import Answer, ApiServer, pod
from tests.support import victims
from tests.support.certificates import make, server_context
from tests.support.paths import RECORDINGS
from tests.support.rawserver import RawServer, read_request, response

UID = "8d426f32-5112-4eac-89e1-57c5ad0db74b"
SUCCESS = b'{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Success","code":201}\n'
FAILURE = b'{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"no","code":500}'
HTML = b"<html><body><h1>Sign in</h1></body></html>"


def recorded(name: str) -> tuple[int, bytes]:
    answer = json.loads((RECORDINGS / f"{name}.json").read_text())["response"]
    return answer["status"], answer["body"].encode()


def refusal(status: int, reason: str, message: str = "try again") -> bytes:
    return json.dumps(
        {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        | {"message": message, "reason": reason, "code": status}
    ).encode()


def http(status: int | str, body: bytes = b"", *, kind: str = "application/json", extra: bytes = b"") -> bytes:
    head = f"HTTP/1.1 {status}{' X' if isinstance(status, int) else ''}\r\nContent-Type: {kind}\r\n"
    return head.encode() + extra + b"Content-Length: %d\r\n\r\n" % len(body) + body


def victim(uid: str = UID, *, name: str = "quiet", method: Method = Method.EVICT) -> Victim:
    return victims.victim_of(pod(name, uid=uid), method=method)


def transport_to(server: RawServer | ApiServer, tmp_path: Path, *, timeout_s: float = 10.0) -> Transport:
    return connect(find_credentials(str(server.kubeconfig(tmp_path / "kubeconfig"))), request_timeout_s=timeout_s)


def outcome_of(transport: Transport, target: Victim, *, node_name: str = "") -> Outcome:
    """The outcome of one worker, which must be alive and idle afterwards."""
    there = threading.Event()
    evictor = EvictionSender(transport, node_name=node_name, threads=1, wake=there.set)
    evictor.submit("plan-1", target)
    assert there.wait(30)
    (outcome,) = evictor.take()
    assert evictor.in_flight == 0
    assert all(thread.is_alive() for thread in evictor._threads)
    evictor.stop()
    return outcome


def always(*answers: bytes) -> Callable[[socket.socket, int], None]:
    """Answers each request with the next of these, and all later ones with the last."""
    left = list(answers)

    def drive(connection: socket.socket, number: int) -> None:
        while read_request(connection):
            connection.sendall(left[0] if len(left) == 1 else left.pop(0))

    return drive


def ask(transport: Transport, method: str) -> None:
    if method == "WATCH":
        with transport.stream("/w", idle_s=5, total_s=5) as stream:
            list(stream.lines())
    else:
        transport.request(method, "/x", body=None if method == "GET" else b"{}")


# --- one answer ------------------------------------------------------------------------------------------------------

DENIAL = json.dumps(
    {"kind": "Status", "status": "Failure", "message": 'admission webhook "hold.example.com" denied the request: no'}
).encode()
ACCEPTED, UNKNOWN, LATE = OutcomeKind.ACCEPTED, OutcomeKind.SERVER_ERROR, OutcomeKind.TIMED_OUT


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (http(*recorded("eviction-success-201")), ACCEPTED),
        (http(*recorded("eviction-already-terminating")), ACCEPTED),
        (http(200, SUCCESS), ACCEPTED),
        (http(202, SUCCESS), ACCEPTED),
        (http(201, SUCCESS, kind="application/json; charset=utf-8"), ACCEPTED),
        (http(201, FAILURE), UNKNOWN),
        (http(200, FAILURE), UNKNOWN),
        (http(201, SUCCESS.replace(b'"Success"', b"{}")), UNKNOWN),
        (http(201, b'{"kind":"Status"}'), UNKNOWN),
        (http(201, SUCCESS.replace(b'"Status"', b'"Eviction"')), UNKNOWN),
        (http(200, *recorded("delete-pod-200")[1:]), UNKNOWN),
        (http(201, b"{}"), UNKNOWN),
        (http(201, b"[]"), UNKNOWN),
        (http(201, b'"Success"'), UNKNOWN),
        (http(201, b""), UNKNOWN),
        (http(201, SUCCESS[:40]), UNKNOWN),
        (http(201, SUCCESS + SUCCESS), UNKNOWN),
        (http(201, b"\xff\xfe" + SUCCESS), UNKNOWN),
        (http(201, b"[" * 5000), UNKNOWN),
        (http(201, b'{"kind":"Status","status":' + b"[" * 5000), UNKNOWN),
        (http(201, b'{"kind":"Status","status":' + b"9" * 5000 + b"}"), UNKNOWN),
        (http(200, HTML, kind="text/html"), UNKNOWN),
        (http(201, SUCCESS, kind="text/html"), UNKNOWN),
        (http(201, SUCCESS, kind="text/plain"), UNKNOWN),
        (http(201, SUCCESS, kind=""), UNKNOWN),
        (http(203, SUCCESS), UNKNOWN),
        (http(206, SUCCESS), UNKNOWN),
        (http(204), UNKNOWN),
        (http(304), UNKNOWN),
        (http(101), UNKNOWN),
        (http(103) + http(201, SUCCESS), UNKNOWN),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + http(201, SUCCESS), ACCEPTED),
        (http(302, SUCCESS, extra=b"Location: http://127.0.0.1:1/\r\n"), UNKNOWN),
        (http(307, SUCCESS, extra=b"Location: http://127.0.0.1:1/\r\n"), UNKNOWN),
        (http(308, HTML, kind="text/html", extra=b"Location: /login\r\n"), UNKNOWN),
        (http(201, SUCCESS)[:-10], LATE),
        (b"HTTP/1.1 201 Created\r\nContent-Ty", LATE),
        (b"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\n\r\n" + SUCCESS, LATE),
        (b"\x00\x01\x02\r\n\r\n", LATE),
        (b"HTTP/1.1 999999 Created\r\n\r\n", LATE),
        (http(500, FAILURE), UNKNOWN),
        (http(502, HTML, kind="text/html"), UNKNOWN),
        (http(504, b"upstream timed out", kind="text/plain"), UNKNOWN),
        (http(504, b"couldn't update PodDisruptionBudget", kind="text/plain"), UNKNOWN),
        (http(401, HTML, kind="text/html"), UNKNOWN),
        (http(403, HTML, kind="text/html"), UNKNOWN),
        (http(403, b'{"message":"forbidden by the firewall"}'), UNKNOWN),
        (http(429, HTML, kind="text/html"), UNKNOWN),
        (http(404, b"404 page not found\n", kind="text/plain"), UNKNOWN),
        (http(400, HTML, kind="text/html"), UNKNOWN),
        (http(*recorded("unauthorized-401")), OutcomeKind.UNAUTHORIZED),
        (http(*recorded("eviction-403")), OutcomeKind.FORBIDDEN),
        (http(*recorded("eviction-pdb-429")), OutcomeKind.BLOCKED_BY_PDB),
        (http(*recorded("eviction-two-pdbs-500")), OutcomeKind.PDB_CONFLICT),
        (http(*recorded("apf-429-eviction"), kind="text/plain; charset=utf-8"), OutcomeKind.TOO_MANY_REQUESTS),
        (http(*recorded("eviction-badjson-400")), OutcomeKind.INVALID),
        (http(*recorded("eviction-rv-mismatch-409")), OutcomeKind.CONFLICT),
        *[(http(status, DENIAL), OutcomeKind.DENIED) for status in (400, 403, 429, 500, 503)],
        # Both the eviction and the list of pods are answered so: whether the pod is gone is not known.
        (http(*recorded("eviction-404")), UNKNOWN),
    ],
)
def test_an_eviction_is_accepted_only_by_the_answer_that_the_api_defines(
    tmp_path: Path, answer: bytes, kind: OutcomeKind
) -> None:
    def once(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(answer)

    with RawServer(once) as server:
        outcome = outcome_of(transport_to(server, tmp_path), victim())
    assert outcome.kind is kind, outcome
    assert "<" not in outcome.message


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (http(200, SUCCESS), ACCEPTED),
        (http(200, json.dumps(pod("quiet", uid=UID) | {"kind": "Pod"}).encode()), ACCEPTED),
        (http(202, json.dumps(pod("quiet", uid=UID) | {"kind": "Pod"}).encode()), ACCEPTED),
        (http(*recorded("delete-pod-200")), UNKNOWN),
        (http(200, json.dumps(pod("quiet", uid=UID) | {"kind": "Node"}).encode()), UNKNOWN),
        (http(200, FAILURE), UNKNOWN),
        (http(200, HTML, kind="text/html"), UNKNOWN),
        (http(302), UNKNOWN),
    ],
)
def test_a_deletion_is_accepted_by_a_status_or_by_the_pod_itself(
    tmp_path: Path, answer: bytes, kind: OutcomeKind
) -> None:
    with RawServer(always(http(200, b'{"kind":"Pod"}'), answer)) as server:
        outcome = outcome_of(transport_to(server, tmp_path), victim(method=Method.DELETE))
    assert outcome.kind is kind, outcome


@pytest.mark.parametrize("status", ["301", "302", "303", "307", "308"])
@pytest.mark.parametrize("method", ["GET", "POST", "PATCH", "PUT", "DELETE", "WATCH"])
def test_no_redirect_is_ever_followed(tmp_path: Path, status: str, method: str) -> None:
    with RawServer(always(response(b"{}"))) as target:
        away = response(b"{}", status=f"{status} Away", headers=f"Location: {target.url}/\r\n".encode())
        with RawServer(always(away)) as server:
            transport = transport_to(server, tmp_path)
            with pytest.raises(ApiError, match=f"HTTP {status}") as refused:
                ask(transport, method)
        assert refused.value.kind is UNKNOWN
        assert target.connections == 0


@pytest.mark.parametrize("method", ["GET", "PATCH", "WATCH"])
@pytest.mark.parametrize(
    "answer",
    [http(200, HTML, kind="text/html"), http(200, b'{"kind":"Node"}', kind="text/html"), http(204), http(304)],
)
def test_a_proxys_page_never_counts_as_an_object(tmp_path: Path, method: str, answer: bytes) -> None:
    with RawServer(always(answer)) as server:
        transport = transport_to(server, tmp_path)
        with pytest.raises(ApiError, match="no answer of the Kubernetes API"):
            ask(transport, method)


def test_what_follows_an_early_hint_is_not_the_answer_to_the_next_request(tmp_path: Path) -> None:
    """Else the pod of the second eviction counts as evicted, and with `hardKill: cgroup` is killed."""
    late = threading.Event()

    def hint(connection: socket.socket, number: int) -> None:
        read_request(connection)
        if number == 1:
            connection.sendall(b"HTTP/1.1 103 Early Hints\r\n\r\n")
            late.wait(30)
            connection.sendall(http(201, SUCCESS))
        else:
            connection.sendall(http(*recorded("eviction-pdb-429")))

    with RawServer(hint) as server:
        transport = transport_to(server, tmp_path)
        assert outcome_of(transport, victim()).kind is UNKNOWN
        late.set()
        assert outcome_of(transport, victim(name="other")).kind is OutcomeKind.BLOCKED_BY_PDB


HEADERS = st.lists(
    st.tuples(
        st.sampled_from(
            ["Content-Type", "Content-Length", "Transfer-Encoding", "Location", "Retry-After", "Connection"]
        ),
        st.one_of(
            st.sampled_from(["application/json", "text/html", "chunked", "0", "80", "-1", "http://127.0.0.1:1/"]),
            st.text(st.characters(codec="latin-1"), max_size=20),
        ),
    ),
    max_size=4,
)
BODIES = st.one_of(
    st.sampled_from([SUCCESS, FAILURE, HTML, b"{}", b"", b"0\r\n\r\n", b'{"kind":"PodList","items":[]}']),
    st.binary(max_size=200),
    st.tuples(st.sampled_from([SUCCESS, FAILURE]), st.integers(0, 90), st.binary(max_size=3)).map(
        lambda t: t[0][: t[1]] + t[2] + t[0][t[1] :]
    ),
)
STATUSES = st.one_of(st.sampled_from([200, 201, 202, 204, 302, 304, 404, 409]), st.integers(0, 1200))


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(status=STATUSES, headers=HEADERS, body=BODIES, length=st.booleans(), raw=st.none() | st.binary(max_size=300))
def test_only_an_answer_of_the_api_makes_an_eviction_accepted(
    status: int, headers: list[tuple[str, str]], body: bytes, length: bool, raw: bytes | None, tmp_path: Path
) -> None:
    head = f"HTTP/1.1 {status} X\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers)
    if length:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    answer = head.encode("latin-1") + b"\r\n" + body if raw is None else raw

    def once(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(answer)

    with RawServer(once) as server:
        outcome = outcome_of(transport_to(server, tmp_path), victim())
    if outcome.kind is ACCEPTED:
        # An inserted blank, or a byte after a length that was given.
        assert b"Success" in answer
        assert b"20" in answer[:13]
    else:
        assert outcome.kind is not OutcomeKind.UNREACHABLE, "the request was received"
        assert outcome.kind is not OutcomeKind.NOT_FOUND, "the pods were not listed"
        assert outcome.message
        json.dumps(outcome.message).encode()


# --- a connection that breaks ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    return make(tmp_path_factory.mktemp("tls"))


def over_tls(server: RawServer, certificates: Path, tmp_path: Path, *, timeout_s: float = 10.0) -> Transport:
    path = server.kubeconfig(tmp_path / "kubeconfig")
    config = json.loads(path.read_text())
    cluster = config["clusters"][0]["cluster"]
    cluster["server"] = cluster["server"].replace("http:", "https:")
    cluster["certificate-authority"] = str(certificates / "ca.crt")
    path.write_text(json.dumps(config))
    return connect(find_credentials(str(path)), request_timeout_s=timeout_s)


ALERT = b"\x15\x03\x03\x00\x02\x02\x50"
"""A plain fatal alert, internal_error; under TLS 1.3 it is a bad record as well."""
BAD_RECORD = b"\x17\x03\x03\x00\x20" + b"\x00" * 32


@pytest.mark.parametrize("last", [ALERT, BAD_RECORD, b"garbage that is no record", b"", None])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_that_breaks_after_the_request_leaves_it_uncertain(
    certificates: Path, tmp_path: Path, last: bytes | None, version: ssl.TLSVersion
) -> None:
    """The eviction is done, and then a middlebox breaks the connection: its token must not come back."""
    context = server_context(certificates)
    context.minimum_version = context.maximum_version = version
    evicted = []

    def drive(connection: socket.socket, number: int) -> None:
        with context.wrap_socket(connection.dup(), server_side=True) as secured:
            if read_request(secured):
                evicted.append(number)
            if last is None:
                reset(connection)
            else:
                connection.sendall(last)

    with RawServer(drive) as server:
        outcome = outcome_of(over_tls(server, certificates, tmp_path), victim())
    assert evicted
    assert outcome.kind is LATE, outcome


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("breaks", ["silence", "alert", "reset", "no TLS"])
def test_a_failure_before_the_end_of_the_tls_handshake_is_not_sent(
    certificates: Path, tmp_path: Path, breaks: str
) -> None:
    def drive(connection: socket.socket, number: int) -> None:
        if breaks == "silence":
            server.over.wait()
        connection.recv(1)
        if breaks == "alert":
            connection.sendall(ALERT)
        elif breaks == "reset":
            reset(connection)
        else:
            connection.sendall(http(201, SUCCESS))

    with RawServer(drive) as server:
        outcome = outcome_of(over_tls(server, certificates, tmp_path, timeout_s=1.0), victim())
    assert outcome.kind is OutcomeKind.UNREACHABLE, outcome


def test_a_handshake_that_hangs_is_not_tried_twice(certificates: Path, tmp_path: Path) -> None:
    with RawServer(lambda connection, number: server.over.wait()) as server:
        outcome = outcome_of(over_tls(server, certificates, tmp_path, timeout_s=12.0), victim())
        assert (outcome.kind, server.connections) == (OutcomeKind.UNREACHABLE, 1)


def test_a_reset_after_the_request_leaves_it_uncertain(tmp_path: Path) -> None:
    def drive(connection: socket.socket, number: int) -> None:
        read_request(connection)
        reset(connection)

    with RawServer(drive) as server:
        assert outcome_of(transport_to(server, tmp_path), victim()).kind is LATE


def test_a_second_try_that_cannot_connect_does_not_undo_the_first(tmp_path: Path) -> None:
    """The kept-alive connection broke after the request was sent, and then the port is closed."""
    down = threading.Event()

    def drive(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(response(b"{}"))
        read_request(connection)
        server._listener.shutdown(socket.SHUT_RDWR)
        server._listener.close()
        down.set()

    server = RawServer(drive)
    transport = transport_to(server, tmp_path)
    transport.request("GET", "/version")
    outcome = outcome_of(transport, victim())
    assert down.is_set()
    assert outcome.kind is LATE, outcome
    for connection in server._open:
        connection.close()


@pytest.mark.parametrize("name", ["eviction-pdb-429", "eviction-404", "eviction-403", "eviction-two-pdbs-500"])
def test_a_refusal_of_the_second_try_proves_nothing_about_the_first(tmp_path: Path, name: str) -> None:
    def drive(connection: socket.socket, number: int) -> None:
        read_request(connection)
        if number > 1:
            connection.sendall(http(*recorded(name)))

    with RawServer(drive) as server:
        outcome = outcome_of(transport_to(server, tmp_path), victim())
    assert outcome.kind is LATE, outcome
    assert "sent again" in outcome.message


@pytest.mark.parametrize("status", [400, 403, 429, 500])
def test_what_admission_denies_is_not_sent_again_at_once(api: ApiServer, tmp_path: Path, status: int) -> None:
    left = [Answer(status, DENIAL)]
    api.instead = lambda request: left.pop() if left and request.path.endswith("/eviction") else None
    transport = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))))
    outcome = outcome_of(transport, victim(name="hog"))
    assert (outcome.kind, outcome.http_status) == (OutcomeKind.DENIED, status)
    assert "hold.example.com" in outcome.message
    assert len(api.sent("POST", "/eviction")) == 1


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        ([(500, FAILURE)], ACCEPTED),
        ([(503, FAILURE)], ACCEPTED),
        ([(500, FAILURE), (500, FAILURE)], UNKNOWN),
        ([(504, FAILURE), (429, recorded("eviction-pdb-429")[1])], UNKNOWN),
        ([(502, HTML)], UNKNOWN),
    ],
)
def test_after_an_error_of_the_api_server_the_eviction_is_sent_once_more(
    api: ApiServer, tmp_path: Path, answers: list[tuple[int, bytes]], kind: OutcomeKind
) -> None:
    left = [Answer(*answer) for answer in answers]
    api.instead = lambda request: left.pop(0) if left and request.path.endswith("/eviction") else None
    transport = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))))
    outcome = outcome_of(transport, victim(name="hog"))
    assert outcome.kind is kind, outcome
    sent = api.sent("POST", "/eviction")
    assert len(sent) == (1 if answers[0][1] is HTML else 2)
    assert {request.body["deleteOptions"]["preconditions"]["uid"] for request in sent} == {victim(name="hog").pod.uid}


def test_an_accepted_second_try_counts_and_both_contain_the_same_uid(tmp_path: Path) -> None:
    requests: list[bytes] = []

    def drive(connection: socket.socket, number: int) -> None:
        requests.append(read_request(connection))
        if number > 1:
            connection.sendall(http(201, SUCCESS))

    with RawServer(drive) as server:
        assert outcome_of(transport_to(server, tmp_path), victim()).kind is ACCEPTED
    assert len(requests) == 2
    for request in requests:
        body = json.loads(request.partition(b"\r\n\r\n")[2])
        assert body["deleteOptions"]["preconditions"] == {"uid": UID}


# --- a refusal that may be a moment's --------------------------------------------------------------------------------


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer(pods=[pod("hog", uid=UID)], linger_s=None) as server:
        yield server


def refusing(api: ApiServer, *answers: bytes, then: Callable[[], object] = lambda: None) -> RawServer:
    """A proxy before the API server that answers the first evictions and deletions by itself; `then` after each."""
    left = list(answers)

    def drive(connection: socket.socket, number: int) -> None:
        while request := read_request(connection):
            evicts = request.startswith((b"POST", b"DELETE"))
            if evicts and left:
                connection.sendall(left.pop(0))
                then()
                continue
            with socket.create_connection(("127.0.0.1", int(api.url.rpartition(":")[2]))) as real:
                real.sendall(request.replace(b"Bearer t\r\n", b"Bearer agent-token\r\nConnection: close\r\n"))
                while data := real.recv(65536):
                    connection.sendall(data)

    return RawServer(drive)


@pytest.mark.parametrize("method", [Method.EVICT, Method.DELETE])
@pytest.mark.parametrize(
    "answer",
    [
        *(
            http(status, refusal(status, reason))
            for status, reason in ((400, "BadRequest"), (404, "NotFound"), (409, "Conflict"), (422, "Invalid"))
        ),
        http(404, HTML, kind="text/html"),
    ],
)
def test_the_eviction_of_a_listed_pod_is_sent_once_more(
    api: ApiServer, tmp_path: Path, answer: bytes, method: Method
) -> None:
    with refusing(api, answer) as server:
        outcome = outcome_of(transport_to(server, tmp_path), victim(name="hog", method=method), node_name="lab-node")
    assert outcome.kind is ACCEPTED, outcome
    stored = api.get_pod("default", "hog")
    assert stored is not None
    assert stored["metadata"]["deletionTimestamp"]
    (listed,) = api.sent("GET")
    assert listed.query == {"fieldSelector": "metadata.name=hog,spec.nodeName=lab-node"}


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (400, "BadRequest", OutcomeKind.INVALID),
        (404, "NotFound", OutcomeKind.INVALID),
        (409, "Conflict", OutcomeKind.CONFLICT),
        (422, "Invalid", OutcomeKind.INVALID),
    ],
)
def test_the_second_refusal_is_reported_and_no_listed_pod_counts_as_gone(
    api: ApiServer, tmp_path: Path, status: int, reason: str, kind: OutcomeKind
) -> None:
    answer = http(status, refusal(status, reason))
    with refusing(api, answer, answer) as server:
        outcome = outcome_of(transport_to(server, tmp_path), victim(name="hog"))
    assert (outcome.kind, outcome.http_status) == (kind, status)
    assert not api.sent("POST")


@pytest.mark.parametrize("status", [400, 404, 409, 422])
def test_the_eviction_of_a_pod_that_is_gone_is_not_repeated(api: ApiServer, tmp_path: Path, status: int) -> None:
    answer = http(status, refusal(status, "X"))
    with refusing(api, answer, then=lambda: api.delete_pod("default", "hog")) as server:
        outcome = outcome_of(transport_to(server, tmp_path), victim(name="hog"))
    assert outcome.kind is OutcomeKind.NOT_FOUND, outcome
    assert not api.sent("POST")


def as_node(transport: Transport) -> Transport:
    transport.impersonation.act_as("lab-node", ClusterIdentity.AUTO)
    return transport


def test_as_the_node_a_new_pod_of_the_same_name_on_another_node_is_a_pod_that_is_gone(
    api: ApiServer, tmp_path: Path
) -> None:
    """NodeRestriction refuses before the UID is compared. That is no missing right: other victims are evicted."""
    api.token_nodes[api.token] = "lab-node"
    api.modify_pod("default", "hog", lambda entry: entry["spec"].update(nodeName="other-node"))
    transport = as_node(connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig")))))
    outcome = outcome_of(transport, victim("another-uid", name="hog"), node_name="lab-node")
    assert outcome.kind is OutcomeKind.NOT_FOUND, outcome
    assert len(api.sent("POST", "/eviction")) == 1
    assert (api.get_pod("default", "hog") or {})["metadata"].get("deletionTimestamp") is None
    assert transport.impersonation.complete


@pytest.mark.parametrize(("refusals", "kind"), [(1, OutcomeKind.ACCEPTED), (2, OutcomeKind.INVALID)])
def test_as_the_node_a_pod_that_the_server_does_not_know_to_be_bound_yet_is_requested_once_more(
    api: ApiServer, tmp_path: Path, refusals: int, kind: OutcomeKind
) -> None:
    api.token_nodes[api.token] = "lab-node"
    message = f'pods "hog" is forbidden: node lab-node can only evict {NOT_ON_NODE}'
    left = [Answer(403, refusal(403, "Forbidden", message)) for _ in range(refusals)]
    api.instead = lambda request: left.pop() if left and request.path.endswith("/eviction") else None
    transport = as_node(connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig")))))
    outcome = outcome_of(transport, victim(name="hog"), node_name="lab-node")
    assert outcome.kind is kind, outcome
    assert len(api.sent("POST", "/eviction")) == 2
    assert transport.impersonation.complete


@pytest.mark.parametrize(("status", "kind"), [(404, OutcomeKind.NOT_FOUND), (409, OutcomeKind.CONFLICT)])
def test_a_new_pod_of_the_same_name_gets_no_eviction(
    api: ApiServer, tmp_path: Path, status: int, kind: OutcomeKind
) -> None:
    with refusing(api, http(status, refusal(status, "X"))) as server:
        outcome = outcome_of(transport_to(server, tmp_path), victim("another-uid", name="hog"))
    assert outcome.kind is kind, outcome
    assert not api.sent("POST")


def test_a_proxys_page_leaves_the_eviction_uncertain_when_the_pod_is_gone(api: ApiServer, tmp_path: Path) -> None:
    page = http(404, HTML, kind="text/html")
    with refusing(api, page, then=lambda: api.delete_pod("default", "hog")) as server:
        outcome = outcome_of(transport_to(server, tmp_path), victim(name="hog"))
    assert outcome.kind is UNKNOWN, outcome


def test_a_refusal_of_the_api_does_not_undo_a_proxys_page(api: ApiServer, tmp_path: Path) -> None:
    blocked = http(*recorded("eviction-pdb-429"))
    with refusing(api, http(404, HTML, kind="text/html"), blocked) as server:
        outcome = outcome_of(transport_to(server, tmp_path), victim(name="hog"))
    assert outcome.kind is UNKNOWN, outcome


def test_without_the_right_to_list_pods_the_eviction_is_repeated_all_the_same(api: ApiServer, tmp_path: Path) -> None:
    api.forbid("list", "pods")
    with refusing(api, http(404, refusal(404, "NotFound"))) as server:
        outcome = outcome_of(transport_to(server, tmp_path), victim(name="hog"))
    assert outcome.kind is ACCEPTED, outcome


def test_an_eviction_that_is_accepted_costs_one_request(api: ApiServer, tmp_path: Path) -> None:
    assert outcome_of(transport_to(api, tmp_path), victim(name="hog")).kind is ACCEPTED
    assert len(api.requests) == 1


# --- defects of our own ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [{"grace_period_s": float("nan")}, {"grace_period_s": float("inf")}, {"pod": victim().pod._replace(uid="\ud800")}],
    ids=["nan", "inf", "surrogate"],
)
def test_a_victim_that_cannot_be_encoded_has_an_outcome_and_nothing_is_sent(
    api: ApiServer, tmp_path: Path, change: dict[str, Any]
) -> None:
    outcome = outcome_of(transport_to(api, tmp_path), victim(name="hog")._replace(**change))
    assert outcome.kind is OutcomeKind.UNREACHABLE, outcome
    assert not api.requests


def test_a_victim_without_a_uid_is_never_sent(api: ApiServer, tmp_path: Path) -> None:
    target = victim(name="hog")
    outcome = outcome_of(transport_to(api, tmp_path), target._replace(pod=target.pod._replace(uid="")))
    assert outcome.kind is OutcomeKind.INVALID
    assert not api.requests


def test_a_loop_that_cannot_be_woken_costs_no_worker(api: ApiServer, tmp_path: Path) -> None:
    woken = threading.Semaphore(0)

    def wake() -> None:
        woken.release()
        raise OSError(32, "the pipe is closed")

    evictor = EvictionSender(transport_to(api, tmp_path), threads=1, wake=wake)
    for _ in range(3):
        evictor.submit("plan", victim(name="hog"))
        assert woken.acquire(timeout=30)
    assert [outcome.kind for outcome in evictor.take()] == [ACCEPTED] * 3
    evictor.stop()


def test_a_name_that_no_request_line_can_contain_is_not_sent(api: ApiServer, tmp_path: Path) -> None:
    target = victim(name="hog")
    for name in ("a b", "a\r\nX: y", "\u2028", "../../../secrets"):
        outcome = outcome_of(transport_to(api, tmp_path), target._replace(pod=target.pod._replace(name=name)))
        assert outcome.kind is not ACCEPTED


def test_a_stop_does_not_wait_for_a_webhook(api: ApiServer, tmp_path: Path) -> None:
    asked, over = threading.Event(), threading.Event()

    def hang(_: object, answered: bool) -> None:
        if not answered:
            asked.set()
            over.wait(60)

    api.at_request = hang
    evictor = EvictionSender(transport_to(api, tmp_path, timeout_s=60.0), threads=3)
    evictor.submit("plan-1", victim())
    assert asked.wait(30)
    began = time.monotonic()
    evictor.stop()
    evictor.stop()
    took_s = time.monotonic() - began
    over.set()
    assert took_s < 20


def test_an_eviction_has_more_time_than_a_webhook_has_by_default() -> None:
    """timeoutSeconds of a webhook is 10 by default (admissionregistration.k8s.io/v1)."""
    assert Config().cluster.eviction_timeout_s > 10

"""Messages of failed connections: readable, and the same whenever the same failure repeats."""

import contextlib
import json
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.transport import connect
from nodeagent.model import OutcomeKind
from tests.support.certificates import make, server_context
from tests.support.rawserver import RawServer, read_request, response

Server = tuple[str, str]
"""URLs of the API server and of a proxy before it, "" for none."""


@contextlib.contextmanager
def no_listener() -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    yield f"http://127.0.0.1:{port}", ""


@contextlib.contextmanager
def no_accept() -> Iterator[Server]:
    """The listener's queue is full: packets are dropped, as by a broken route."""
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", ""


@contextlib.contextmanager
def unknown_host_name() -> Iterator[Server]:
    yield "https://no-such-host.invalid:6443", ""


@contextlib.contextmanager
def no_tls() -> Iterator[Server]:
    with RawServer(lambda connection, _: connection.sendall(response(b"{}"))) as server:
        yield server.url.replace("http:", "https:"), ""


@contextlib.contextmanager
def tls_alert() -> Iterator[Server]:
    def drive(connection: socket.socket, number: int) -> None:
        connection.recv(1)
        connection.sendall(b"\x15\x03\x03\x00\x02\x02\x28")

    with RawServer(drive) as server:
        yield server.url.replace("http:", "https:"), ""


@contextlib.contextmanager
def no_trust() -> Iterator[Server]:
    with contextlib.ExitStack() as opened:
        made = make(Path(opened.enter_context(tempfile.TemporaryDirectory())))
        context = server_context(made)

        def drive(connection: socket.socket, number: int) -> None:
            context.wrap_socket(connection.dup(), server_side=True).close()

        server = opened.enter_context(RawServer(drive))
        yield server.url.replace("http:", "https:"), ""


@contextlib.contextmanager
def no_proxy() -> Iterator[Server]:
    with no_listener() as (proxy, _):
        yield "https://10.0.0.1:443", proxy


@contextlib.contextmanager
def a_proxy_that_answers(answer: bytes) -> Iterator[Server]:
    def drive(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(answer % {b"n": number} if b"%" in answer else answer)

    with RawServer(drive) as proxy:
        yield "https://10.0.0.1:443", proxy.url


def texts(server: Server, tmp_path: Path) -> tuple[list[ApiError], list[str]]:
    """The messages of two tries, each with its own connection."""
    path = tmp_path / "kubeconfig"
    cluster = {"server": server[0], **({"proxy-url": server[1]} if server[1] else {})}
    path.write_text(
        json.dumps(
            {
                "current-context": "raw",
                "clusters": [{"name": "raw", "cluster": cluster}],
                "users": [{"name": "raw", "user": {"token": "secret-token"}}],
                "contexts": [{"name": "raw", "context": {"cluster": "raw", "user": "raw"}}],
            }
        )
    )
    found = []
    for _ in range(2):
        transport = connect(find_credentials(str(path)), request_timeout_s=0.5)
        with pytest.raises(ApiError) as caught:
            transport.request("GET", "/version")
        found.append(caught.value)
    return found, [error.message for error in found]


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (no_listener, "Connection refused"),
        (no_accept, "timed out"),
        (unknown_host_name, "cannot be resolved"),
        (no_tls, "TLS: "),
        (tls_alert, "TLS: "),
        pytest.param(
            no_trust,
            "CERTIFICATE_VERIFY_FAILED: ",
            marks=pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates"),
        ),
        (no_proxy, "through its proxy: Connection refused"),
        (lambda: a_proxy_that_answers(b"HTTP/1.1 403 Forbidden\r\n\r\n"), "403 Forbidden"),
        (lambda: a_proxy_that_answers(b"HTTP/1.1 502 <object at 0x%(n)d>\r\n\r\n"), "through its proxy: "),
        (lambda: a_proxy_that_answers(b"\0\1%(n)d\r\n\r\n"), "through its proxy: "),
        (lambda: a_proxy_that_answers(b""), "through its proxy: "),
    ],
)
def test_an_unreachable_server_has_a_constant_message(
    tmp_path: Path, trouble: Callable[[], contextlib.AbstractContextManager[Server]], words: str
) -> None:
    with trouble() as server:
        errors, messages = texts(server, tmp_path)
        assert messages[0].startswith(f"cannot connect to {server[0]}")
    assert {error.kind for error in errors} == {OutcomeKind.UNREACHABLE}
    assert messages[0] == messages[1]
    assert words in messages[0]
    plain(messages[0])


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\0\1%d\r\n\r\n",
        b"HTTP/1.1 %d\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1%d0\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n<%d>\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 9\r\n\r\n<html>%d>>",
        b"HTTP/1.1 502 Bad\r\nContent-Type: text/html\r\nContent-Length: 9\r\n\r\n<html>%d>>",
        b'HTTP/1.1 503 Busy\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"id":%d }',
        b"HTTP/1.1 302 Away\r\nLocation: /login?id=%d\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_a_broken_answer_and_a_proxys_page_have_constant_messages(tmp_path: Path, answer: bytes) -> None:
    tries = [0]

    def drive(connection: socket.socket, number: int) -> None:
        read_request(connection)
        tries[0] = min(9, tries[0] + 1)
        connection.sendall(answer % tries[0] if b"%d" in answer else answer)

    with RawServer(drive) as server:
        _, messages = texts((server.url, ""), tmp_path)
    assert messages[0] == messages[1]
    plain(messages[0])


def plain(message: str) -> None:
    assert message.isprintable()
    for mark in ("<", ">", " at 0x", "('", "Error(", "secret-token"):
        assert mark not in message, message

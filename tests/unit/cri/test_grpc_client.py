"""Unary calls over a Unix socket, against a server that speaks HTTP/2 by the library's other side."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.cri import grpc_client
from nodeagent.cri.grpc_client import GrpcClient, GrpcError
from tests.support.cri_server import CriServer, Failure, serving


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CriServer]:
    answers = {
        "/a.Echo/Say": lambda request: request,
        "/a.Echo/Much": lambda _request: b"x" * (3 << 20),
        "/a.Echo/TooMuch": lambda _request: b"x" * (grpc_client.MAX_ANSWER + 1),
        "/a.Echo/Fail": lambda _request: Failure(5, "image \u201cx\u201d not found"),
    }
    with serving(tmp_path / "s", answers) as made:
        yield made


def test_a_call_returns_the_message_of_the_answer(server: CriServer) -> None:
    with GrpcClient(server.path) as client:
        assert client.call("/a.Echo/Say", b"hello", timeout_s=10) == b"hello"
        assert client.call("/a.Echo/Say", b"", timeout_s=10) == b""
    assert server.calls == [("/a.Echo/Say", b"hello"), ("/a.Echo/Say", b"")]


def test_an_answer_that_is_larger_than_the_window_comes_whole(server: CriServer) -> None:
    with GrpcClient(server.path) as client:
        assert client.call("/a.Echo/Much", b"", timeout_s=20) == b"x" * (3 << 20)


def test_an_answer_above_the_limit_is_an_error(server: CriServer) -> None:
    with GrpcClient(server.path) as client, pytest.raises(GrpcError, match="more than 16777216 bytes"):
        client.call("/a.Echo/TooMuch", b"", timeout_s=30)


def test_an_error_of_the_server_has_its_code_and_message_and_keeps_the_connection(server: CriServer) -> None:
    with GrpcClient(server.path) as client:
        with pytest.raises(GrpcError, match="image “x” not found") as caught:
            client.call("/a.Echo/Fail", b"", timeout_s=10)
        assert caught.value.code == "5"
        with pytest.raises(GrpcError, match="unknown method Nope") as caught:
            client.call("/a.Echo/Nope", b"", timeout_s=10)
        assert caught.value.code == "12"
        assert client.call("/a.Echo/Say", b"still", timeout_s=10) == b"still"


def test_a_server_that_does_not_answer_ends_the_call_at_its_deadline(server: CriServer) -> None:
    server.delay_s = 1.0
    began = time.monotonic()
    with GrpcClient(server.path) as client, pytest.raises(GrpcError, match=r"no answer in 0.2s") as caught:
        client.call("/a.Echo/Say", b"", timeout_s=0.2)
    assert caught.value.code == grpc_client.DEADLINE_EXCEEDED
    assert time.monotonic() - began < 0.9


def test_after_a_deadline_the_next_call_connects_again(server: CriServer) -> None:
    with GrpcClient(server.path) as client:
        server.delay_s = 0.5
        with pytest.raises(GrpcError):
            client.call("/a.Echo/Say", b"late", timeout_s=0.1)
        server.delay_s = 0.0
        assert client.call("/a.Echo/Say", b"soon", timeout_s=10) == b"soon"


def test_without_a_server_the_error_names_the_socket(tmp_path: Path) -> None:
    with GrpcClient(str(tmp_path / "none")) as client, pytest.raises(GrpcError, match="none: No such file") as caught:
        client.call("/a.Echo/Say", b"", timeout_s=1)
    assert caught.value.code == grpc_client.UNAVAILABLE


def test_a_server_that_speaks_another_protocol_is_unavailable(tmp_path: Path) -> None:
    path = str(tmp_path / "s")

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        other = threading.Thread(target=answer, args=(listener,))
        other.start()
        with GrpcClient(path) as client, pytest.raises(GrpcError) as caught:
            client.call("/a.Echo/Say", b"", timeout_s=10)
        other.join()
    assert caught.value.code == grpc_client.UNAVAILABLE


def test_a_server_that_says_nothing_ends_the_call_at_its_deadline(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()  # the kernel accepts the connection
        with GrpcClient(path) as client, pytest.raises(GrpcError) as caught:
            client.call("/a.Echo/Say", b"", timeout_s=0.1)
    assert caught.value.code == grpc_client.DEADLINE_EXCEEDED

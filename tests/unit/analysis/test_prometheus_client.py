"""Whatever a server answers, reading a Prometheus gives series or one clear error."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeagent.analysis import prometheus_client
from nodeagent.analysis.prometheus_client import PrometheusClient, PrometheusError, Server


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers every request with the same status, headers and body, and keeps the requests."""

    status: ClassVar[int] = 200
    body: ClassVar[bytes] = b""
    location: ClassVar[str] = ""
    seen: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization")))
        self.send_response(self.status)
        if self.location:
            self.send_header("Location", self.location)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


def ask(server: str, status: int, body: bytes, *, location: str = "", **more: Any) -> list[Any]:
    Answers.status, Answers.body, Answers.location = status, body, location
    Answers.seen.clear()
    return PrometheusClient(Server(server, **more)).query_range("up", start=100.0, step_s=10.0, count=3)


def matrix(*values: Any) -> bytes:
    result = [{"metric": {"instance": "a"}, "values": list(values)}]
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}).encode()


def test_values_are_read_by_their_step_and_what_is_no_number_is_left_out(server: str) -> None:
    [series] = ask(server, 200, matrix([100, "1"], [110, "NaN"], [120, "+Inf"], [130, "5"], [109.999, "2"], ["x", "1"]))
    assert series.points == {0: 1.0, 1: 2.0}
    assert series.labels == {"instance": "a"}


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b"<html>login</html>", "the answer is not one of a Prometheus API"),
        (200, b"[" * 100_000, "the answer is not one of a Prometheus API"),
        (200, b'{"status":"success","data":{"resultType":"vector","result":[]}}', "is no matrix"),
        (
            422,
            b'{"status":"error","errorType":"execution","error":"too many samples"}',
            "HTTP 422, execution: too many",
        ),
        (503, b"no healthy upstream", "HTTP 503, and the answer is not one of a Prometheus API"),
        (401, b"", "HTTP 401: the credentials are missing"),
        (403, b"forbidden", "HTTP 403: the credentials are missing"),
    ],
)
def test_a_wrong_answer_is_one_error_with_the_address(server: str, status: int, body: bytes, message: str) -> None:
    with pytest.raises(PrometheusError, match=message) as caught:
        ask(server, status, body)
    assert str(caught.value).startswith(server)


def test_a_redirect_is_not_followed(server: str) -> None:
    with pytest.raises(PrometheusError, match="a redirect, which is not followed"):
        ask(server, 302, b"", location=f"{server}/elsewhere", header=("Authorization", "Bearer secret"))
    assert len(Answers.seen) == 1


def test_the_header_of_the_file_is_sent(server: str, tmp_path: Path) -> None:
    file = tmp_path / "header"
    for content, sent in (("secret\n", "Bearer secret"), ("Authorization: Basic abc\n", "Basic abc")):
        file.write_text(content, "utf-8")
        ask(server, 200, matrix(), header=prometheus_client.read_header(str(file)))
        assert Answers.seen[0][1] == sent


@pytest.mark.parametrize("content", [b"", b"two\nlines", b"\xff\xfe", b"a\x00b", b"x" * (1 << 17)])
def test_a_file_without_one_header_is_an_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "header"
    file.write_bytes(content)
    with pytest.raises(PrometheusError, match=str(file)):
        prometheus_client.read_header(str(file))


@pytest.mark.parametrize(
    "url", ["prometheus:9090", "file:///etc/passwd", "http://", "http://host/?x=1", "http://user:password@host"]
)
def test_an_address_that_is_none_is_refused_and_no_password_is_shown(url: str) -> None:
    with pytest.raises(PrometheusError) as caught:
        PrometheusClient(Server(url))
    assert "user:password" not in str(caught.value)


any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("data", "result", "resultType", "values", "metric")), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(any_json, any_json)
def test_any_answer_gives_series_or_an_error(server: str, data: object, result: object) -> None:
    for answer in (data, {"status": "success", "data": {"resultType": "matrix", "result": result}}):
        try:
            found = ask(server, 200, json.dumps(answer).encode())
        except PrometheusError:
            continue
        assert all(0 <= number < 3 for series in found for number in series.points)

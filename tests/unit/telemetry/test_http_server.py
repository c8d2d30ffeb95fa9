"""The endpoint answers well-behaved clients whatever other clients do; sockets, clients and Prometheus are real."""

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeagent.config.schema import Config
from nodeagent.model import Signal
from nodeagent.policy import engine
from nodeagent.policy.state import initial
from nodeagent.telemetry import http_server
from nodeagent.telemetry.endpoint import Endpoint, build_pages
from nodeagent.telemetry.http_server import AddressError, Page, Request, Server
from nodeagent.telemetry.metrics import Metrics
from nodeagent.telemetry.runtime_counters import RuntimeCounters
from tests.support.nodes import GI, NOW, hard, snapshot, view
from tests.support.nodes import config as make_config

CONFIG: Config = make_config(hard(value=2 * GI))


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


class Ground:
    """A server with its metrics and a manual clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.synced_at: float | None = NOW
        self.failures: list[str] = []
        self.metrics = Metrics(
            CONFIG, boottime=self.clock, runtime_counters=lambda: RuntimeCounters(pods_synced_at=self.synced_at)
        )
        self.served = threading.Event()
        made = dict(build_pages(self.metrics, config=lambda: CONFIG, boottime=self.clock))
        made["/broken"] = self._broken
        made["/big"] = lambda _: Page(b"x" * 20_000_000)
        made["/metrics"] = self._counted(made["/metrics"])
        self.server = Server("127.0.0.1:0", made, failed=self.failures.append)

    def _broken(self, _: Request) -> Page:
        raise ValueError("on purpose")

    def _counted(self, maker: Callable[[Request], Page]) -> Callable[[Request], Page]:
        def make(request: Request) -> Page:
            self.served.set()
            return maker(request)

        return make

    def sampled(self) -> None:
        seen = snapshot(view("pod", GI), at=self.clock.now, available={Signal.MEMORY: 8 * GI})
        plan, _ = engine.decide(seen, initial("a", now=NOW), now=self.clock.now, config=CONFIG)
        self.metrics.observe_plan(plan, seen)
        self.metrics.observe_sync(at=self.clock.now)

    def get(self, path: str, *, method: str = "GET", accept: str = "") -> tuple[int, str, dict[str, str]]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.server.port}{path}", method=method)
        if accept:
            request.add_header("Accept", accept)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode(), dict(answer.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode(), dict(error.headers)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=30)


@pytest.fixture
def ground() -> Iterator[Ground]:
    made = Ground()
    yield made
    made.server.close()


def everything(sock: socket.socket) -> bytes:
    """All bytes until the other side ends the connection."""
    parts = []
    try:
        while part := sock.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


# --- pages -----------------------------------------------------------------------------------------------------------


def test_metrics_have_the_requested_format(ground: Ground) -> None:
    status, text, headers = ground.get("/metrics")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert "nodeagent_syncs_total 0" in text
    asked = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,*/*;q=0.1"
    _, text, headers = ground.get("/metrics", accept=asked)
    assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")


def test_alive_means_that_the_last_sync_is_recent(ground: Ground) -> None:
    assert ground.get("/healthz")[:2] == (200, "ok\n")
    ground.clock.now += 12.9
    assert ground.get("/healthz")[0] == 200
    ground.clock.now += 0.2
    status, text, _ = ground.get("/healthz")
    assert (status, text) == (503, "loop: last sync 13.1s ago, at most 13s\n")
    ground.metrics.observe_sync(at=ground.clock.now)
    assert ground.get("/healthz")[0] == 200


def test_ready_lists_everything_that_is_missing(ground: Ground) -> None:
    ground.synced_at = None
    status, text, _ = ground.get("/readyz")
    assert status == 503
    assert text.splitlines() == ["samples: none yet", "pods: never listed by the API server"]
    ground.synced_at = NOW
    ground.sampled()
    assert ground.get("/readyz")[:2] == (200, "ok\n")
    ground.clock.now += 31.0
    ground.metrics.observe_sync(at=ground.clock.now)
    assert ground.get("/readyz")[:2] == (503, "samples: the last is 31.0s old, at most 30s\n")
    ground.clock.now += 100.0
    ground.sampled()
    assert ground.get("/readyz")[:2] == (503, "pods: last current 131.0s ago, at most 120s\n")
    assert ground.get("/healthz")[0] == 200, "a restart does not help against an API server that does not answer"


def test_a_sample_without_a_single_signal_is_not_ready(ground: Ground) -> None:
    seen = snapshot(available=dict.fromkeys(Signal))
    plan, _ = engine.decide(seen, initial("a", now=NOW), now=NOW, config=CONFIG)
    ground.metrics.observe_plan(plan, seen)
    assert ground.get("/readyz")[:2] == (503, "samples: no signal is readable\n")


# --- HTTP ------------------------------------------------------------------------------------------------------------


def test_head_is_get_without_the_body(ground: Ground) -> None:
    status, text, headers = ground.get("/healthz", method="HEAD")
    assert (status, text, headers["Content-Length"]) == (200, "", "3")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed_from_outside(ground: Ground, method: str) -> None:
    status, _, headers = ground.get("/healthz", method=method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_a_page_that_is_not_there_names_those_that_are(ground: Ground) -> None:
    status, text, _ = ground.get("/etc/passwd")
    assert status == 404
    assert "/metrics" in text
    assert ground.get("/healthz?verbose=1")[0] == 200


def test_a_failing_page_is_logged_and_the_other_pages_are_served(ground: Ground) -> None:
    status, text, _ = ground.get("/broken")
    assert (status, "ValueError" in text) == (500, False)
    assert ground.failures == ["/broken: ValueError: on purpose"]
    assert ground.get("/healthz")[0] == 200


@pytest.mark.parametrize("line", [b"hello", b"GET /healthz", b"GET /healthz SPDY/3", b"\xff\xfe \x00 HTTP/1.1"])
def test_a_request_that_is_not_http_gets_a_400(ground: Ground, line: bytes) -> None:
    with ground.connect() as sock:
        sock.sendall(line + b"\r\n\r\n")
        assert everything(sock).split(b" ")[1] in (b"400", b"405")


def test_a_request_without_end_is_cut_off(ground: Ground) -> None:
    with ground.connect() as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nX: ".ljust(http_server.MAX_REQUEST_BYTES + 1, b"x"))
        assert everything(sock).startswith(b"HTTP/1.1 431 ")


def test_a_request_may_come_byte_by_byte(ground: Ground) -> None:
    with ground.connect() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"GET /healthz HTTP/1.0\r\n\r\n":
            sock.sendall(bytes([byte]))
        assert everything(sock).endswith(b"\r\n\r\nok\n")


# --- bad neighbours --------------------------------------------------------------------------------------------------


def test_clients_that_never_finish_do_not_keep_a_probe_from_its_answer(ground: Ground) -> None:
    slow_clients = [ground.connect() for _ in range(http_server.MAX_CONNECTIONS + 5)]
    for sock in slow_clients:
        sock.sendall(b"GET /healthz HTTP/1.1\r\n")
    began = time.monotonic()
    assert ground.get("/healthz")[0] == 200
    assert everything(slow_clients[0]) == b"", "the slowest client was closed for the new one"
    assert time.monotonic() - began < http_server.MAX_CONNECTION_S / 2, "it did not wait for their deadline"
    for sock in slow_clients:
        sock.close()


def test_a_client_that_never_finishes_is_disconnected(ground: Ground) -> None:
    began = time.monotonic()
    with ground.connect() as sock:
        sock.sendall(b"GET ")
        assert everything(sock) == b""
        assert http_server.MAX_CONNECTION_S * 0.9 < time.monotonic() - began < http_server.MAX_CONNECTION_S + 2.0


def test_a_client_that_does_not_read_its_answer_blocks_no_other(ground: Ground) -> None:
    with ground.connect() as sock:
        sock.sendall(b"GET /big HTTP/1.1\r\n\r\n")
        assert sock.recv(1, socket.MSG_PEEK)  # the answer has begun and fills every buffer on the way
        assert ground.get("/healthz")[0] == 200


def test_pages_are_rate_limited(ground: Ground) -> None:
    began = time.monotonic()
    answers = [ground.get("/metrics")[0] for _ in range(40)]
    seconds = time.monotonic() - began
    assert set(answers) == {200, 429}
    assert answers.count(200) <= http_server.PEER_PAGES_PER_S * (seconds + 2)
    assert ground.get("/healthz")[0] == 200
    for _ in range(40):
        ground.get("/healthz")
    assert ground.get("/healthz")[0] == 200, "a probe is none of them"


FLOOD = """
import socket, struct, sys, time
port, per_s, kind = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
addresses, opened, number = sys.argv[4:], [], 0
asked = {"probe": b"GET /healthz HTTP/1.1\\r\\n\\r\\n", "page": b"GET /metrics HTTP/1.1\\r\\n\\r\\n", "slow": b"G"}
print("up", flush=True)
began = time.monotonic()
while True:
    while number < (time.monotonic() - began) * per_s:
        sock = socket.socket()
        sock.setblocking(False)
        # No port stays taken afterwards: another test may want it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.bind((addresses[number % len(addresses)], 0))
        number += 1
        try:
            sock.connect_ex(("127.0.0.1", port))
            opened.append(sock)
        except OSError:
            pass
    time.sleep(0.002)
    for sock in opened[-20:] if kind != "idle" else ():
        try:
            sock.send(asked[kind])
        except OSError:
            pass
    while len(opened) > 400:
        opened.pop(0).close()
"""
PODS = [f"127.0.1.{number}" for number in range(1, 60)]
FLOODED_S = 6.0
PROBE_TIMEOUT_S = 5.0
"""`timeoutSeconds` of the probes in daemonset.yaml."""


@pytest.mark.parametrize(
    "floods",
    [
        pytest.param([(300, "idle", PODS[:1])], id="one address connects 300 times a second"),
        pytest.param([(1000, "page", PODS[:3]), (500, "idle", PODS[3:4])], id="four addresses, 1500 times"),
        pytest.param([(300, "slow", PODS), (300, "page", PODS[:2])], id="slow ones of 59 addresses"),
        pytest.param([(300, "probe", ["127.0.0.1"])], id="probes of the kubelet's own address"),
    ],
)
def test_a_flood_does_not_block_a_kubelet_or_a_prometheus(
    ground: Ground, floods: list[tuple[float, str, list[str]]]
) -> None:
    lateness: list[float] = []
    over = threading.Event()

    def tick() -> None:
        before = time.monotonic()
        while not over.wait(0.01):
            now = time.monotonic()
            lateness.append(now - before - 0.01)
            before = now

    def ask(path: str, address: str) -> bool:
        with socket.create_connection(
            ("127.0.0.1", ground.server.port), timeout=PROBE_TIMEOUT_S, source_address=(address, 0)
        ) as sock:
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: n\r\n\r\n".encode())
            return everything(sock).startswith(b"HTTP/1.1 200 ")

    ticking = threading.Thread(target=tick)
    flooding = [
        subprocess.Popen(
            [sys.executable, "-c", FLOOD, str(ground.server.port), str(per_s), kind, *addresses],
            stdout=subprocess.PIPE,
        )
        for per_s, kind, addresses in floods
    ]
    try:
        for process in flooding:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
        ticking.start()
        until = time.monotonic() + FLOODED_S
        while time.monotonic() < until:
            assert ask("/healthz", "127.0.0.1")
            assert ask("/readyz", "127.0.0.1") is False, "nothing was sampled here"
            assert ask("/metrics", "127.0.0.2")
            over.wait(0.5)
    finally:
        over.set()
        for process in flooding:
            process.kill()
            process.communicate()
        ticking.join()
    assert sorted(lateness)[int(len(lateness) * 0.95)] < 0.1, "the loop is not delayed"


# --- addresses -------------------------------------------------------------------------------------------------------


def test_an_address_that_cannot_be_bound_is_an_error_with_its_reason(ground: Ground) -> None:
    for address in (f"127.0.0.1:{ground.server.port}", "192.0.2.1:1", "no-port", "127.0.0.1:70000", "127.0.0.1:-1"):
        with pytest.raises(AddressError, match=address.replace(".", r"\.")):
            Server(address, {}, failed=ground.failures.append)


def test_without_a_host_every_address_is_served() -> None:
    serving = Server(":0", {"/": lambda _: Page(b"ok\n")}, failed=lambda _: None)
    try:
        with socket.create_connection(("127.0.0.1", serving.port), timeout=30) as sock:
            sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert everything(sock).endswith(b"ok\n")
    finally:
        serving.close()


def test_a_closed_server_gives_its_port_back(ground: Ground) -> None:
    ground.server.close()
    again = Server(f"127.0.0.1:{ground.server.port}", {}, failed=ground.failures.append)
    again.close()


def test_the_pages_move_with_the_configuration_and_stay_when_they_cannot() -> None:
    def answered(port: int | None) -> bool:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
            sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return everything(sock).endswith(b"ok\n")

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = Endpoint({"/": lambda _: Page(b"ok\n")}, failed=lambda _: None)
    try:
        assert endpoint.port is None
        endpoint.move(f"127.0.0.1:{port}")
        assert answered(port)
        endpoint.move(f":{port}")
        assert answered(port)
        with pytest.raises(AddressError):
            endpoint.move("192.0.2.1:1")
        assert (endpoint.port, answered(port)) == (port, True)
        endpoint.move("")
        assert endpoint.port is None
        with pytest.raises(ConnectionRefusedError):
            answered(port)
    finally:
        endpoint.close()


# --- a real Prometheus -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus (Debian package) is not installed")
def test_a_real_prometheus_scrapes_it(ground: Ground, tmp_path: Path) -> None:
    ground.sampled()
    settings = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s"},
        "scrape_configs": [
            {"job_name": "nodeagent", "static_configs": [{"targets": [f"127.0.0.1:{ground.server.port}"]}]}
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(settings))  # YAML is a superset
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
             f"--web.listen-address=127.0.0.1:{port}"],
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        assert ground.served.wait(60), (tmp_path / "log").read_text()
        await_answer(port, 'up{job="nodeagent"}', "1")
        await_answer(port, 'nodeagent_signal_available_bytes{signal="memory.available"}', str(8 * GI))
        await_answer(port, 'sum(nodeagent_signal_state{signal="memory.available"})', "1")
        await_answer(port, 'nodeagent_stage_duration_seconds_count{stage="decide"}', "0")
    finally:
        process.terminate()
        process.wait(30)


def await_answer(port: int, query: str, value: str) -> None:
    """Until Prometheus has this one value. It is not ready at once, and on a busy machine it misses a scrape."""
    url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    patience, deadline = threading.Event(), time.monotonic() + 60
    found: object = None
    while found != [value]:
        assert time.monotonic() < deadline, (query, found)
        patience.wait(0.1)
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                found = [row["value"][1] for row in json.load(answer)["data"]["result"]]
        except OSError as error:
            found = error

"""Hooks before evictions: real programs and a real HTTP server on loopback."""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from nodeagent.actuators import eviction_hook_jobs
from nodeagent.actuators.reclaim_runner import JobResult, ReclaimRunner
from nodeagent.config.schema import BeforeEvictionHook
from nodeagent.model import HookOrder, HookOutcome, HookResult, NoteKind, ReclaimResult, Signal
from tests.support import certificates

ORDER = HookOrder("u-1", "shop", "web-0", "/kubepods/podu-1", Signal.MEMORY, 1234, 99, 17.0)


def run(hook: BeforeEvictionHook, order: HookOrder = ORDER, *, within_s: float = 30.0, **more: Any) -> JobResult:
    job = eviction_hook_jobs.build_job(hook, order, plan_id="t-7", node="n1", deadline_s=within_s, **more)
    return job(time.monotonic() + within_s)


def script(text: str) -> BeforeEvictionHook:
    return BeforeEvictionHook(command=(sys.executable, "-c", text))


def test_a_command_gets_the_pod_on_standard_input_and_as_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", "s3cret")
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/x")
    ended = run(script("import json, os, sys; print(json.dumps([json.load(sys.stdin), dict(os.environ)]))"))
    assert ended.result is ReclaimResult.DONE
    content, environ = json.loads(ended.message)
    assert content == {
        "apiVersion": "nodeagent.io/v1alpha1",
        "kind": "BeforeEviction",
        "plan": "t-7",
        "node": "n1",
        "tier": "soft",
        "signal": "memory.available",
        "resource": "memory",
        "deficit": 1234,
        "available": 99,
        "deadlineSeconds": 30.0,
        "pod": {"namespace": "shop", "name": "web-0", "uid": "u-1", "cgroup": "/kubepods/podu-1"},
    }
    ours = {name: value for name, value in environ.items() if name.startswith("NODEAGENT_")}
    assert ours == {
        "NODEAGENT_PLAN": "t-7",
        "NODEAGENT_NODE": "n1",
        "NODEAGENT_TIER": "soft",
        "NODEAGENT_SIGNAL": "memory.available",
        "NODEAGENT_RESOURCE": "memory",
        "NODEAGENT_DEFICIT": "1234",
        "NODEAGENT_AVAILABLE": "99",
        "NODEAGENT_DEADLINE_SECONDS": "30",
        "NODEAGENT_POD_NAMESPACE": "shop",
        "NODEAGENT_POD_NAME": "web-0",
        "NODEAGENT_POD_UID": "u-1",
        "NODEAGENT_POD_CGROUP": "/kubepods/podu-1",
    }
    assert not {"DATABASE_PASSWORD", "NOTIFY_SOCKET", "HOME"} & set(environ), "nothing else of the agent"
    assert environ["PATH"] == os.environ["PATH"]


def test_a_command_has_no_descriptor_of_the_agent() -> None:
    kept = os.memfd_create("secret", 0)
    os.set_inheritable(kept, False)
    try:
        ended = run(
            script(
                "import os; print(sorted(os.listdir('/proc/self/fd'), key=int)[:3], len(os.listdir('/proc/self/fd')))"
            )
        )
        assert ended.message == "['0', '1', '2'] 4"  # and that of the listed directory
    finally:
        os.close(kept)


@pytest.mark.parametrize(
    "hostile",
    [
        {"name": "$(reboot)"},
        {"name": "web; rm -rf /"},
        {"name": "web\nNODEAGENT_TIER=hard"},
        {"name": "web\x00"},
        {"name": "../../etc"},
        {"name": "-rf"},
        {"name": ""},
        {"name": "a" * 254},
        {"namespace": "shop`id`"},
        {"pod_uid": "u 1"},
        {"cgroup": "/kubepods/$(id)"},
        {"cgroup": "kubepods"},
    ],
)
def test_a_hostile_name_reaches_no_program(hostile: dict[str, Any], tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    ended = run(script(f"open({str(ran)!r}, 'w')"), ORDER._replace(**hostile))
    assert ended.result is ReclaimResult.FAILED
    assert ended.message.startswith("not run: the pod's ")
    assert not ran.exists()


def test_a_command_that_reads_nothing_ends_well() -> None:
    assert run(script("")) == JobResult(ReclaimResult.DONE, "")


def test_a_failing_command_reports_its_exit_code_and_a_slow_one_is_killed_at_the_deadline() -> None:
    ended = run(script("import sys; print('no space'); sys.exit(3)"))
    assert (ended.result, ended.message) == (ReclaimResult.FAILED, "exit code 3: no space")
    began = time.monotonic()
    ended = run(script("import time; print('begun', flush=True); time.sleep(600)"), within_s=3.0)
    assert ended.result is ReclaimResult.TIMED_OUT
    assert time.monotonic() - began < 20


def test_a_stopping_agent_ends_a_command() -> None:
    began = time.monotonic()
    run(script("import time; time.sleep(600)"), within_s=300.0, stop=lambda: True)
    assert time.monotonic() - began < 60


class Answers(BaseHTTPRequestHandler):
    """Answers by the path."""

    received: "list[tuple[str, dict[str, str], Any]]"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.received.append((self.path, dict(self.headers), body))  # type: ignore[attr-defined]
        if self.path == "/slow":
            for letter in b"HTTP/1.1 200 OK\r\n" * 100:
                time.sleep(0.2)
                try:
                    self.wfile.write(bytes([letter]))
                except OSError:
                    return
            return
        if self.path == "/broken":
            self.wfile.write(b"\x00\xff nonsense\r\n\r\n")
            return
        self.send_response({"/ok": 204, "/moved": 307}.get(self.path, 503))
        self.send_header("Location", "/ok")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Answers) as made:
        made.received = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def call(server: HTTPServer, path: str, *, within_s: float = 30.0) -> JobResult:
    return run(BeforeEvictionHook(url=f"http://127.0.0.1:{server.server_port}{path}"), within_s=within_s)


def test_a_request_has_the_same_content_and_no_credential(server: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert call(server, "/ok") == JobResult(ReclaimResult.DONE, "HTTP 204")
    [(path, headers, body)] = server.received  # type: ignore[attr-defined]
    assert path == "/ok"
    assert body["pod"] == {"namespace": "shop", "name": "web-0", "uid": "u-1", "cgroup": "/kubepods/podu-1"}
    assert set(headers) == {"Host", "Accept-Encoding", "Content-Length", "Content-Type", "User-Agent", "Connection"}


def test_a_request_is_sent_on_a_node_that_was_suspended(server: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    read_clock = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda which: read_clock(which) + 3600 * (which == time.CLOCK_BOOTTIME))
    assert call(server, "/ok") == JobResult(ReclaimResult.DONE, "HTTP 204")


def test_another_answer_is_a_failure_and_a_redirect_is_not_followed(server: HTTPServer) -> None:
    assert call(server, "/moved") == JobResult(ReclaimResult.FAILED, "HTTP 307")
    assert call(server, "/other") == JobResult(ReclaimResult.FAILED, "HTTP 503")
    assert call(server, "/broken").result is ReclaimResult.FAILED
    assert len(server.received) == 3, "one request each"  # type: ignore[attr-defined]


def test_a_server_that_sends_byte_after_byte_is_left_at_the_deadline(server: HTTPServer) -> None:
    began = time.monotonic()
    assert call(server, "/slow", within_s=1.0).result is ReclaimResult.TIMED_OUT
    assert time.monotonic() - began < 5


def test_a_server_that_is_not_there_is_a_failure() -> None:
    with HTTPServer(("127.0.0.1", 0), Answers) as closed:
        port = closed.server_port
    ended = run(BeforeEvictionHook(url=f"http://127.0.0.1:{port}/"))
    assert ended.result is ReclaimResult.FAILED
    assert "refused" in ended.message


def test_an_address_that_is_not_allowed_is_not_called() -> None:
    ended = run(BeforeEvictionHook(url="http://169.254.169.254/"))
    assert ended.result is ReclaimResult.FAILED
    assert "unencrypted" in ended.message


def test_a_certificate_that_the_system_does_not_trust_is_a_failure(server: HTTPServer, tmp_path: Path) -> None:
    context = certificates.server_context(certificates.make(tmp_path))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    ended = run(BeforeEvictionHook(url=f"https://127.0.0.1:{server.server_port}/ok"))
    assert ended.result is ReclaimResult.FAILED
    assert "certificate verify failed" in ended.message
    assert not server.received, "nothing was sent"  # type: ignore[attr-defined]


def test_the_runner_returns_the_outcome_of_the_pod() -> None:
    woken = threading.Event()
    runner = ReclaimRunner(boottime=lambda: 7.0, wake=woken.set, kind="hook")
    job = eviction_hook_jobs.build_job(script("print('dumped')"), ORDER, plan_id="t-7", node="n1", deadline_s=30.0)
    runner.start("t-7", ORDER.pod_uid, job, timeout_s=30.0)
    assert woken.wait(60)
    [ended] = runner.finished()
    assert eviction_hook_jobs.outcome(ended) == HookOutcome("t-7", "u-1", HookResult.DONE, "dumped", 7.0)


def test_a_missing_program_is_reported_before_it_is_needed() -> None:
    assert eviction_hook_jobs.notes(BeforeEvictionHook()) == ()
    assert eviction_hook_jobs.notes(BeforeEvictionHook(url="https://host/")) == ()
    assert eviction_hook_jobs.notes(script("")) == ()
    [note] = eviction_hook_jobs.notes(BeforeEvictionHook(command=("no-such-program",)))
    assert (note.kind, note.message) == (
        NoteKind.HOOKS,
        "hooks.beforeEviction will fail: no program no-such-program where the agent runs",
    )

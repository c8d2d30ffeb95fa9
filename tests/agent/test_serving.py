"""A running agent serves its figures and its health, and a second address after a reload."""

import http.client
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.livenode import Run, until


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


def _write(path: Path, port: int) -> None:
    settings = {
        "apiVersion": "nodeagent.io/v1alpha1",
        "kind": "NodeAgentConfiguration",
        "logging": {"format": "json"},
        "stateDir": str(path.parent / "state"),
        "metrics": {"address": f"127.0.0.1:{port}"},
    }
    written = path.with_name("next")
    written.write_text(json.dumps(settings))
    written.replace(path)


@pytest.fixture
def port() -> int:
    return _free_port()


@pytest.fixture
def agent(tmp_path: Path, port: int) -> Iterator[Run]:
    _write(tmp_path / "config.yaml", port)
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(sys.path)}
    arguments = ("--config", str(tmp_path / "config.yaml"), "--node-name", "n")
    run = Run(*arguments, log=tmp_path / "log", environ=environ)
    until(lambda: run.logged("started"), "the start")
    yield run
    run.process.kill()
    run.process.wait()


def test_metrics_of_this_node_can_be_scraped(agent: Run, port: int) -> None:
    until(lambda: "nodeagent_signal_available" in _get(port, "/metrics")[1], "a first sample")
    status, body = _get(port, "/metrics")
    assert status == 200
    lines = body.splitlines()
    assert any(line.startswith("nodeagent_build_info{") for line in lines)
    assert any(line.startswith('nodeagent_signal_available_bytes{signal="memory.available"}') for line in lines)
    assert agent.stop() == 0


def test_the_live_page_shows_this_node_to_a_client_of_this_host(agent: Run, port: int) -> None:
    until(lambda: "Available, against the thresholds" in _get(port, "/")[1], "a first sample")
    status, body = _get(port, "/")
    assert status == 200
    assert body.startswith("<!DOCTYPE html>")
    assert "PODS" in body
    assert agent.stop() == 0


def test_the_agent_is_healthy_while_the_loop_syncs_and_ready_once_the_pods_are_listed(agent: Run, port: int) -> None:
    assert _get(port, "/healthz") == (200, "ok\n")
    status, body = _get(port, "/readyz")
    assert status == 503
    assert "pods" in body
    agent.process.send_signal(signal.SIGSTOP)
    agent.process.send_signal(signal.SIGCONT)
    assert _get(port, "/healthz")[0] == 200
    assert agent.stop() == 0


def test_a_reload_moves_the_address(agent: Run, port: int, tmp_path: Path) -> None:
    other = _free_port()
    _write(tmp_path / "config.yaml", other)
    agent.process.send_signal(signal.SIGHUP)
    until(lambda: agent.logged("configuration changed"), "the change")
    assert _get(other, "/healthz")[0] == 200
    with pytest.raises(ConnectionRefusedError):
        _get(port, "/healthz")
    assert agent.stop() == 0


def test_an_address_in_use_is_rejected_at_the_start_with_its_key(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        _write(tmp_path / "config.yaml", taken.getsockname()[1])
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(sys.path)}
        arguments = ("--config", str(tmp_path / "config.yaml"), "--node-name", "n")
        run = Run(*arguments, log=tmp_path / "log", environ=environ)
        assert run.process.wait(60) == 78
    assert "metrics.address" in (tmp_path / "log").read_text()

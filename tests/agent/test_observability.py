"""A running agent is scraped and probed, and its decisions are explained afterwards. Process and node are real."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nodeagent.commands import cli
from tests.support.livenode import until
from tests.support.paths import REPOSITORY


class Running:
    """`nodeagent run --dry-run` on this machine, with a memory threshold that is already crossed."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.state = directory / "state"
        self.config = directory / "config.yaml"
        self.configure("99.9%")
        dropped = ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "NODE_NAME", "NODEAGENT_MODE", "HOME")
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        self.log = (directory / "log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nodeagent", "run", "--dry-run", "--config", str(self.config)],
            env={**kept, "PYTHONPATH": str(REPOSITORY)},
            stdout=self.log,
            stderr=self.log,
        )

    def configure(self, threshold: str) -> None:
        written = self.config.with_name("next")
        written.write_text(
            "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n"
            f"stateDir: {self.state}\nmetrics: {{address: '127.0.0.1:{self.port}'}}\n"
            f"evictionHard: {{memory.available: {threshold}}}\n"
        )
        written.replace(self.config)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def figure(self, name: str, **labels: str) -> float | None:
        for family in text_string_to_metric_families(self.get("/metrics")[1]):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        return None

    def wait_for(self, name: str, value: float, **labels: str) -> None:
        patience, deadline = threading.Event(), time.monotonic() + 60
        while (seen := self.figure(name, **labels) if self.get("/healthz")[0] else None) is None or seen < value:
            assert time.monotonic() < deadline, (name, seen)
            assert self.process.poll() is None
            patience.wait(0.2)  # an address gets ten pages a second


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    agent = Running(tmp_path)
    yield agent
    agent.process.terminate()
    assert agent.process.wait(30) == 0
    agent.log.close()


def test_a_running_agent_is_scraped_probed_explained_and_replayed(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    running.wait_for("nodeagent_refusals_total", 1, code="pods-never-synced")
    assert running.get("/healthz") == (200, "ok\n")
    assert running.get("/readyz") == (503, "pods: never listed by the API server\n")
    running.wait_for("nodeagent_signal_state", 1, signal="memory.available", state="hard")
    running.wait_for("nodeagent_stage_duration_seconds_count", 1, stage="decide")
    running.wait_for("nodeagent_stage_duration_seconds_count", 1, stage="save")
    running.wait_for("nodeagent_wakeups_total", 1, reason="timer")

    assert cli.main(["explain", "last", "--state-dir", str(running.state)]) == 0
    output = capsys.readouterr().out
    assert "memory.available (hard): no pod to evict" in output
    assert "pods-never-synced: the API server has not listed the pods of this node yet" in output
    assert cli.main(["replay", str(running.state), "--config", str(running.config), "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["decisions"]
    assert rows
    assert not [row for row in rows if row["differs"] or row["reason"]]


def test_a_reload_is_counted_and_a_rejected_one_is_reported(running: Running) -> None:
    running.wait_for("nodeagent_syncs_total", 1)
    running.configure("nonsense")
    running.process.send_signal(signal.SIGHUP)
    running.wait_for("nodeagent_config_reloads_total", 1, result="invalid")
    until(lambda: running.figure("nodeagent_config_last_reload_successful") == 0, "the refused one")
    running.configure("1%")
    running.process.send_signal(signal.SIGHUP)
    running.wait_for("nodeagent_config_reloads_total", 1, result="applied")
    until(lambda: running.figure("nodeagent_config_last_reload_successful") == 1, "the good one")

"""What the loop of the real program reports about itself."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.records import status_file
from tests.support.livenode import Run, until

CONFIG = "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\nlogging: {format: json}\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "nodeagent.yaml"
    path.write_text(f"{CONFIG}stateDir: {tmp_path / 'state'}\n")
    return path


@pytest.fixture
def agent(config: Path, tmp_path: Path) -> Iterator[Run]:
    dropped = ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "NODE_NAME", "NODEAGENT_MODE", "HOME")
    environ = {name: value for name, value in os.environ.items() if name not in dropped}
    run = Run("--dry-run", "--config", str(config), log=tmp_path / "log", environ=environ)
    until(lambda: run.logged("started"), "the start")
    yield run
    run.kill()


def _notes(agent: Run, subject: str) -> list[str]:
    return [line["message"] for line in agent.logged("note") if line["subject"] == subject]


def test_a_late_sync_is_logged(agent: Run) -> None:
    until(lambda: agent.logged("signal changed"), "the first sync")
    agent.process.send_signal(signal.SIGSTOP)
    threading.Event().wait(2.0)
    agent.process.send_signal(signal.SIGCONT)
    until(lambda: _notes(agent, "loop"), "the late sync")
    assert _notes(agent, "loop")[0].startswith("sync started at least ")
    assert agent.stop() == 0


def test_check_reports_a_rejected_configuration(agent: Run, config: Path) -> None:
    config.write_text(config.read_text() + "mode: enforced\n")
    agent.process.send_signal(signal.SIGHUP)
    state = str(config.parent / "state")
    until(
        lambda: "new configuration rejected, still using the old one" in str(status_file.read_status(state, now=1e12)),
        "the refusal",
    )
    assert agent.stop() == 0
    assert not status_file.read_status(state, now=1e12), "removed when the agent ends"

"""An agent that starts while a fork bomb leaves hardly a PID lives, and has everything once the bomb is over."""

import json
import subprocess
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fake_kube import ApiServer, pod
from tests.support.livenode import (
    HIERARCHIES,
    Kubepods,
    Run,
    StartAgent,
    configuration,
    needs_cgroup_v1,
    remove_cgroup,
    until,
)

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

OTHERS = 8
"""Processes that hold the other PIDs of the cgroup."""


@pytest.fixture
def api(kubepods: Kubepods) -> Iterator[ApiServer]:
    with ApiServer(node="lab-node", pods=[pod("one", uid=str(uuid.uuid4()))]) as server:
        yield server


class Scarce:
    """A pids cgroup in which other processes leave so many PIDs, until `release`."""

    def __init__(self, free: int) -> None:
        self._directory = HIERARCHIES[1] / f"nodeagent-test-{uuid.uuid4().hex[:12]}"
        self._directory.mkdir()
        self.procs = self._directory / "cgroup.procs"
        self._others = [subprocess.Popen(["sleep", "600"]) for _ in range(OTHERS)]
        for each in self._others:
            self.procs.write_text(str(each.pid))
        (self._directory / "pids.max").write_text(str(OTHERS + free))

    def refused(self) -> int:
        """How often the kernel has refused a PID here."""
        return int((self._directory / "pids.events").read_text().split()[1])

    def release(self) -> None:
        for each in self._others:
            each.kill()
            each.wait()
        self._others = []
        # The agent's own threads are more than what was left to it.
        (self._directory / "pids.max").write_text("max")

    def close(self) -> None:
        self.release()
        remove_cgroup(self._directory)


@pytest.fixture
def scarce(request: pytest.FixtureRequest) -> Iterator[Scarce]:
    made = Scarce(request.param)
    yield made
    made.close()


def _page(port: int, name: str) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}", timeout=30) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return f"{error.code}: {error.read().decode()}"
    except OSError as error:
        return str(error)


def _stuck(port: int) -> list[str]:
    return [line for line in _page(port, "metrics").splitlines() if line.startswith("nodeagent_workers_stuck{")]


def _port(agent: Run) -> int:
    """The address on which it listens."""
    (port,) = (
        each.laddr.port
        for each in psutil.Process(agent.process.pid).net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    )
    return int(port)


@pytest.mark.parametrize("scarce", [1, 2, 3, 4, 6, 9, 12, 15, 18], indirect=True)
def test_it_lives_without_pids_and_has_everything_when_there_are_some_again(
    scarce: Scarce, api: ApiServer, start_agent: StartAgent
) -> None:
    thresholds = {"memory.available": "1Mi", "nodefs.available": "1Ki"}
    agent = start_agent(procs=scarce.procs, metrics={"address": "127.0.0.1:0"}, evictionHard=thresholds)
    until(lambda: agent.logged("started") or agent.process.poll() is not None, "the start")
    until(lambda: scarce.refused() or agent.process.poll() is not None, "a refusal")
    until(lambda: agent.logged("signal changed") or agent.process.poll() is not None, "the first decision")
    assert agent.process.poll() is None, agent.events()

    scarce.release()
    assert api.wait_for(lambda: api.condition("NodeAgentMemoryPressure"), 30), agent.events()
    assert api.wait_for(lambda: api.watched("/api/v1/pods"), 30), agent.events()
    port = _port(agent)
    until(lambda: _page(port, "readyz") == "ok\n", "the view of the pods")
    until(lambda: not _stuck(port), f"every thread: {_stuck(port)}", 20)
    for signal_ in thresholds:
        known = f'nodeagent_signal_state{{signal="{signal_}",state="ok"}} 1'
        until(lambda: known in _page(port, "metrics"), _page(port, "metrics"), 30)  # noqa: B023 - called at once
    assert agent.stop() == 0


@pytest.mark.parametrize("scarce", [1], indirect=True)
def test_credentials_of_a_plugin_are_waited_for(
    scarce: Scarce, api: ApiServer, kubepods: Kubepods, tmp_path: Path
) -> None:
    credential = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": api.token},
    }
    plugin = tmp_path / "plugin"
    plugin.write_text(f"#!/bin/sh\necho '{json.dumps(credential)}'\n")
    plugin.chmod(0o755)
    kubeconfig = api.kubeconfig(tmp_path / "kubeconfig")
    reported = json.loads(kubeconfig.read_text())
    reported["users"][0]["user"] = {
        "exec": {"apiVersion": credential["apiVersion"], "command": str(plugin), "interactiveMode": "Never"}
    }
    kubeconfig.write_text(json.dumps(reported))
    config = configuration(tmp_path, kubepods)
    arguments = ("--config", str(config), "--kubeconfig", str(kubeconfig), "--node-name", "lab-node")
    agent = Run(*arguments, log=tmp_path / "log", procs=scarce.procs)
    try:
        until(lambda: agent.logged("waiting for a PID") or agent.process.poll() is not None, "the wait")
        assert agent.process.poll() is None, agent.events()
        scarce.release()
        assert api.wait_for(lambda: api.condition("NodeAgentMemoryPressure"), 30), agent.events()
        assert agent.stop() == 0
    finally:
        agent.kill()

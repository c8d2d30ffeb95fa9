"""A running agent uses the profiles of its node's labels, follows them, and remembers them without an API server."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.records import status_file
from tests.fake_kube import ApiServer
from tests.support.livenode import Run, until

POOLS = """
apiVersion: nodeagent.io/v1alpha1
kind: NodeAgentConfiguration
mode: {mode}
logging: {{format: json}}
stateDir: {state}
sampling: {{cgroupRoot: /no-such-cgroup}} # no lock in common with another agent on this machine
profiles:
  - name: gpu
    nodeSelector: {{pool: gpu}}
    mode: {gpu}
    evictionHard: {{memory.available: 123Mi}}
  - name: spot
    nodeSelector: {{spot: "true"}}
    rateLimits: {{node: {{burst: 9}}}}
"""
Start = Callable[..., Run]


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer(node="lab-node", pods=[], linger_s=None) as server:
        yield server


@pytest.fixture
def start(tmp_path: Path, api: ApiServer) -> Iterator[Start]:
    """Starts an agent with this mode of the file and of the profile `gpu`."""
    started: list[Run] = []
    kubeconfig = str(api.kubeconfig(tmp_path / "kubeconfig"))

    def run(mode: str, gpu: str) -> Run:
        config = tmp_path / "config.yaml"
        config.write_text(POOLS.format(mode=mode, gpu=gpu, state=tmp_path / "state"))
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(sys.path)}
        options = ("--config", str(config), "--kubeconfig", kubeconfig, "--node-name", "lab-node")
        started.append(Run(*options, log=tmp_path / f"log-{len(started)}", environ=environ))
        return started[-1]

    yield run
    for each in started:
        each.kill()


def label(api: ApiServer, **labels: str | None) -> None:
    api.patch_node({"metadata": {"labels": labels}})


def changes(agent: Run) -> list[tuple[Any, Any]]:
    return [(line["before"], line["after"]) for line in agent.logged("profiles changed")]


def writes(api: ApiServer) -> list[Any]:
    """Everything that an agent writes about its node."""
    return [*api.sent("PATCH"), *api.sent("PUT")]


UNKNOWN = "the labels of the node are not known, so no profile applies"
NOTHING = f"{UNKNOWN} and nothing is enforced"


def test_an_agent_enforces_once_it_knows_that_its_profile_wants_that(api: ApiServer, start: Start) -> None:
    label(api, pool="cpu")
    agent = start("enforce", "dry-run")
    until(lambda: changes(agent) == [(NOTHING, "none of gpu, spot matches this node")], "the labels")
    assert [line["mode"] for line in agent.logged("started")] == ["dry-run"]
    assert api.wait_for(lambda: api.condition("NodeAgentMemoryPressure"), 60), agent.events()
    label(api, pool="gpu", spot="true")
    until(lambda: len(changes(agent)) == 2, "the changed labels")
    assert changes(agent)[1] == ("none of gpu, spot matches this node", "gpu, spot")
    until(lambda: len(agent.logged("configuration changed")) >= 4, "the changed keys")
    changed = {line["key"]: line["after"] for line in agent.logged("configuration changed")}
    assert (changed["evictionHard.memory.available"], changed["rateLimits.node.burst"]) == ("123Mi", "9")
    # What the agent has set on the node is removed, as with a reload to `mode: dry-run`.
    assert api.wait_for(lambda: api.condition("NodeAgentMemoryPressure") is None, 60), agent.events()
    assert agent.stop() == 0


def test_a_file_that_was_rejected_stays_so_when_the_labels_change(api: ApiServer, start: Start, tmp_path: Path) -> None:
    label(api, pool="gpu")
    agent = start("dry-run", "dry-run")
    until(lambda: changes(agent) == [(UNKNOWN, "gpu")], "the labels")
    file = tmp_path / "config.yaml"
    valid = file.read_text()
    file.write_text(valid.replace("mode: dry-run", "mode: enforced"))
    agent.process.send_signal(signal.SIGHUP)
    agent.wait_for_log("configuration rejected")
    label(api, spot="true")
    until(lambda: len(changes(agent)) == 2, "the changed labels")

    def status() -> str:
        return str(status_file.read_status(str(tmp_path / "state"), now=1e12))

    rejected = "new configuration rejected"
    until(lambda: "message='gpu, spot" in status(), "a status with the new labels")
    assert rejected in status()
    file.write_text(valid)
    agent.process.send_signal(signal.SIGHUP)
    until(lambda: rejected not in status(), "a status with the valid file")
    assert agent.stop() == 0


def test_a_pool_that_is_a_dry_run_writes_nothing_also_before_its_labels_are_known(api: ApiServer, start: Start) -> None:
    label(api, pool="gpu")
    agent = start("enforce", "dry-run")
    assert api.wait_for(lambda: changes(agent), 60), agent.events()
    assert changes(agent) == [(NOTHING, "gpu")]
    until(lambda: [line for line in agent.logged("note") if line.get("message") == "gpu"], "the note")
    assert agent.stop() == 0
    assert writes(api) == []


def test_labels_that_were_seen_apply_after_a_restart_without_an_api_server(api: ApiServer, start: Start) -> None:
    label(api, pool="gpu")
    first = start("dry-run", "enforce")
    until(lambda: changes(first) == [(UNKNOWN, "gpu")], "the labels")
    assert api.wait_for(lambda: api.condition("NodeAgentMemoryPressure"), 60), first.events()
    assert first.stop() == 0
    api.go_down()
    second = start("dry-run", "enforce")
    until(lambda: second.logged("started"), "the start")
    assert [line["mode"] for line in second.logged("started")] == ["enforce"]
    remembered = "gpu; by the labels that an earlier process saw, until the API server answers"
    until(lambda: [line for line in second.logged("note") if line.get("message") == remembered], "the note")
    api.come_back()
    until(lambda: [line for line in second.logged("note") if line.get("message") == "gpu"], "the answer")
    assert changes(second) == []
    assert second.stop() == 0

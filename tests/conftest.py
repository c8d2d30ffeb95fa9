"""What the end-to-end tests share: pods in real cgroups, and the program as a process that ends with the test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.apiserver import ApiServer
from tests.livenode import MIB, Kubepods, Run, StartAgent, configuration


@pytest.fixture
def kubepods() -> Iterator[Kubepods]:
    """A node's pods, which may have 600 MiB together."""
    made = Kubepods(limit=600 * MIB)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def start_agent(tmp_path: Path, kubepods: Kubepods, api: ApiServer) -> Iterator[StartAgent]:
    """Starts `nodeagent run` against `api`, which the module brings; the keywords are keys of the configuration."""
    started: list[Run] = []

    def start(*arguments: str, **changes: object) -> Run:
        config = configuration(tmp_path, kubepods, **changes)
        kubeconfig = api.kubeconfig(tmp_path / "kubeconfig")
        common = ("--config", str(config), "--kubeconfig", str(kubeconfig), "--node-name", "lab-node")
        started.append(Run(*common, *arguments, log=tmp_path / f"log-{len(started)}"))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.fixture
def run(start_agent: StartAgent, api: ApiServer) -> StartAgent:
    """The same, and returns when the agent has published its first verdict."""

    def start(*arguments: str, **changes: object) -> Run:
        agent = start_agent(*arguments, **changes)
        assert api.wait_for(lambda: api.condition("NodeAgentMemoryPressure"), 30), agent.events()
        return agent

    return start

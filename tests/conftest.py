"""What tests share: how properties are tried, pods in real cgroups, the program as a process that ends with a test."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.e2e import claims
from tests.fake_kube import ApiServer
from tests.support import scheduler
from tests.support.livenode import MIB, Kubepods, Run, StartAgent, configuration

# The same examples in every run, however busy the machine is. `--hypothesis-profile=search` searches for others.
settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", settings.get_profile("steady"), derandomize=False, max_examples=1000)
settings.load_profile("steady")


def pytest_configure() -> None:
    """A shell lets what it starts in the background ignore Ctrl-C, and so would every program that a test starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """With `-n` of pytest-xdist. A run without it never calls this and needs no xdist."""
    return scheduler.make_scheduler(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `-n`: what takes longest starts first. One after the other, the quick tests are first."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: scheduler.rank(item.nodeid))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """With `-n`: the tests that wait for real machines and agents come before the others."""
    if hasattr(item.config, "workerinput"):
        scheduler.set_priority(item.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists what the suite for a cluster claims and this run did not try."""
    lines = claims.not_tried(terminalreporter.stats.get("skipped", ()))
    if lines:
        terminalreporter.section("not tried, because it needs a cluster (tests/e2e)")
        terminalreporter.write_line("\n".join(lines))


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

    def start(*arguments: str, procs: Path | None = None, **changes: object) -> Run:
        config = configuration(tmp_path, kubepods, **changes)
        kubeconfig = api.kubeconfig(tmp_path / "kubeconfig")
        common = ("--config", str(config), "--kubeconfig", str(kubeconfig), "--node-name", "lab-node")
        started.append(Run(*common, *arguments, log=tmp_path / f"log-{len(started)}", procs=procs))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        print(each.log_end())  # shown if the test failed


@pytest.fixture
def run(start_agent: StartAgent, api: ApiServer) -> StartAgent:
    """The same, and returns when the agent has published its first verdict and knows its pods."""

    def start(*arguments: str, **changes: object) -> Run:
        seen = len(api.requests)
        agent = start_agent(*arguments, **changes)
        assert api.wait_for(lambda: api.condition("NodeAgentMemoryPressure"), 60), agent.events()
        assert api.wait_for(lambda: api.watched("/api/v1/pods", since=seen), 60), agent.events()
        return agent

    return start

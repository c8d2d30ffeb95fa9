"""A running agent keeps its thresholds above those of the kubelet, also when the kubelet's change."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.livenode import Run, until
from tests.support.trees import GI, MI, Node, TreePod, write_node

KUBELET = "kind: KubeletConfiguration\nevictionHard: {memory.available: %s}\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A node of 8 GiB with 600 MiB available, whose kubelet evicts at 100Mi."""
    path = tmp_path / "node"
    path.mkdir()
    uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
    write_node(
        path, Node(uptime=uptime, memory_total=8 * GI, memory_available=600 * MI, pods=(TreePod("default/web"),))
    )
    kubelet(path, "100Mi")
    return path


def kubelet(root: Path, memory: str) -> None:
    target = root / "var/lib/kubelet/config.yaml"
    target.parent.mkdir(parents=True, exist_ok=True)
    replacement = target.with_name("next")
    replacement.write_text(KUBELET % memory)
    replacement.replace(target)


@pytest.fixture
def agent(root: Path, tmp_path: Path) -> Iterator[Run]:
    config = tmp_path / "nodeagent.yaml"
    config.write_text(
        "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n"
        f"stateDir: {tmp_path / 'state'}\nlogging: {{format: json}}\n"
    )
    dropped = ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "NODE_NAME", "NODEAGENT_MODE", "HOME")
    environ = {name: value for name, value in os.environ.items() if name not in dropped}
    run = Run("--dry-run", "--config", str(config), "--host-root", str(root), log=tmp_path / "log", environ=environ)
    yield run
    run.kill()


def memory_states(agent: Run) -> list[tuple[str, object]]:
    """(state, value of the threshold that is met) of memory.available, each time it changed."""
    lines = [line for line in agent.logged("signal changed") if line["signal"] == "memory.available"]
    return [(line["state"], line.get("threshold_value")) for line in lines]


def test_a_kubelet_that_evicts_earlier_raises_the_thresholds_of_the_running_agent(agent: Run, root: Path) -> None:
    until(lambda: memory_states(agent) == [("ok", None)], "the first decision")
    assert [line["thresholds"] for line in agent.logged("kubelet thresholds")] == ["memory.available<100Mi"]
    kubelet(root, "500Mi")
    agent.process.send_signal(signal.SIGHUP)  # as a reload; otherwise within a minute
    until(lambda: agent.logged("kubelet thresholds changed"), "the kubelet's new threshold")
    (changed,) = agent.logged("kubelet thresholds changed")
    assert (changed["before"], changed["after"]) == ("memory.available<100Mi", "memory.available<500Mi")
    until(lambda: len(memory_states(agent)) == 2, "the decision by the raised threshold")
    assert memory_states(agent)[1] == ("hard", 750 * MI)
    assert agent.stop() == 0


def test_a_kubelet_whose_file_breaks_changes_nothing(agent: Run, root: Path) -> None:
    until(lambda: memory_states(agent) == [("ok", None)], "the first decision")
    (root / "var/lib/kubelet/config.yaml").write_text("evictionHard: [")
    agent.process.send_signal(signal.SIGHUP)
    until(
        lambda: [line for line in agent.logged("note") if "no longer readable" in str(line["message"])],
        "the note about the file",
    )
    assert agent.logged("kubelet thresholds changed") == []
    assert agent.stop() == 0

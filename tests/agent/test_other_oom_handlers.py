"""The report and the start of the agent name the other programs that kill or evict on the node."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.livenode import Run, until
from tests.support.trees import Node, TreePod, write_node

KUBELET = "kind: KubeletConfiguration\nevictionHard: {memory.available: 500Mi}\n"


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A node with an earlyoom and a kubelet that evicts."""
    root = tmp_path / "node"
    root.mkdir()
    write_node(root, Node(uptime=time.clock_gettime(time.CLOCK_BOOTTIME), pods=(TreePod("default/web"),)))
    process = root / "proc/400"
    process.mkdir()
    (process / "comm").write_text("earlyoom\n")
    (process / "cmdline").write_bytes(b"/usr/bin/earlyoom\0-m\0007\0")
    (process / "cgroup").write_text("0::/system.slice/earlyoom.service\n")
    config = root / "var/lib/kubelet/config.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(KUBELET)
    return root


def _environment() -> dict[str, str]:
    dropped = ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "NODE_NAME", "NODEAGENT_MODE", "HOME")
    return {name: value for name, value in os.environ.items() if name not in dropped}


def test_check_names_the_other_oom_handlers_without_a_running_agent(node: Path) -> None:
    command = [sys.executable, "-m", "nodeagent", "check", "--no-api", "--output", "json", "--host-root", str(node)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=_environment())
    messages = [note["message"] for note in json.loads(ran.stdout)["notes"] if note["subject"] == "other OOM handlers"]
    assert len(messages) == 1
    assert messages[0].startswith("earlyoom runs (PID 400)")


def test_the_start_of_the_agent_logs_the_other_oom_handlers_and_the_kubelets_eviction(
    node: Path, tmp_path: Path
) -> None:
    config = tmp_path / "nodeagent.yaml"
    config.write_text(
        "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n"
        f"stateDir: {tmp_path / 'state'}\nlogging: {{format: json}}\n"
        "reclaim: {actions: [{name: tidy, command: [no-such-program]}]}\n"
    )
    arguments = ("--dry-run", "--config", str(config), "--host-root", str(node))
    agent = Run(*arguments, log=tmp_path / "log", environ=_environment())
    try:
        until(lambda: len(_oom_handlers(agent)) == 2, "the other OOM handlers")
        killer, kubelet = _oom_handlers(agent)
        assert killer.startswith("earlyoom runs (PID 400)")
        assert [line["message"].split(":")[0] for line in agent.logged("note") if line["subject"] == "reclaim"] == [
            "tidy will fail"
        ]
        assert kubelet.startswith("the kubelet's own eviction is on (memory.available<500Mi)")
        assert agent.stop() == 0
    finally:
        agent.kill()


def test_the_agent_does_not_assume_the_kubelets_defaults(node: Path, tmp_path: Path) -> None:
    """As on a real node on which the kubelet's eviction was off, by a file that was not mounted."""
    (node / "var/lib/kubelet/config.yaml").unlink()
    (node / "var/lib/kubelet/config.yaml").symlink_to("/not/mounted.yaml")
    process = node / "proc/77"
    process.mkdir()
    (process / "cmdline").write_bytes(b"/usr/bin/kubelet\0--config=/not/mounted.yaml\0")
    service = node / "sys/fs/cgroup/system.slice/kubelet.service"
    service.mkdir(parents=True)
    (service / "cgroup.procs").write_text("77\n")
    config = tmp_path / "nodeagent.yaml"
    config.write_text(
        "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n"
        f"stateDir: {tmp_path / 'state'}\nlogging: {{format: json}}\n"
    )
    arguments = ("--dry-run", "--config", str(config), "--host-root", str(node))
    agent = Run(*arguments, log=tmp_path / "log", environ=_environment())
    try:
        until(lambda: len(_oom_handlers(agent)) == 2, "the other OOM handlers")
        assert _oom_handlers(agent)[1].startswith("kubelet eviction not known, defaults assumed (")
        assert agent.stop() == 0
    finally:
        agent.kill()


def _oom_handlers(agent: Run) -> list[str]:
    return [line["message"] for line in agent.logged("note") if line["subject"] == "other OOM handlers"]

"""How the rooms are put together for `nodeagent run`."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from nodeagent.journal.state import StateFile
from nodeagent.keeper import AgentState
from tests.trees import Node, TreePod, write_node


def test_the_jitter_of_conditions_is_drawn_by_the_nodes_name_when_it_is_the_hostname(tmp_path: Path) -> None:
    """A fleet whose nodes nobody names would otherwise release its conditions in the same second."""
    config = tmp_path / "nodeagent.yaml"
    settings = {
        "apiVersion": "nodeagent.io/v1alpha1",
        "kind": "NodeAgentConfiguration",
        "stateDir": str(tmp_path / "s"),
    }
    config.write_text(json.dumps(settings))
    kept = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "LANG")
    environ = {name: os.environ[name] for name in kept if name in os.environ} | {"HOME": str(tmp_path)}
    command = [sys.executable, "-m", "nodeagent", "run", "--once", "--dry-run", "--config", str(config)]
    subprocess.run(command, env=environ, check=True, timeout=60, capture_output=True)
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    loaded = StateFile(tmp_path / "s" / "state", shape=AgentState, boot_id=boot_id).load()
    assert loaded.value.policy.conditions.seed == socket.gethostname().lower(), loaded.message


def test_one_round_of_the_loop_decides_without_waiting_for_the_api(tmp_path: Path) -> None:
    root = tmp_path / "node"
    root.mkdir()
    write_node(root, Node(pods=(TreePod("a/b"),)))
    config = tmp_path / "nodeagent.json"
    settings = {"apiVersion": "nodeagent.io/v1alpha1", "kind": "NodeAgentConfiguration", "logging": {"format": "json"}}
    config.write_text(json.dumps(settings | {"stateDir": str(tmp_path / "s")}))
    command = [sys.executable, "-m", "nodeagent", "run", "--once", "--dry-run", "--host-root", str(root)]
    kept = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "LANG")
    environ = {name: os.environ[name] for name in kept if name in os.environ} | {"HOME": str(tmp_path)}
    ran = subprocess.run(
        [*command, "--config", str(config)], env=environ, check=True, timeout=60, capture_output=True, text=True
    )
    said = [json.loads(line) for line in (ran.stdout + ran.stderr).splitlines() if line.startswith("{")]
    assert {line["type"] for line in said if line["event"] == "condition"} == {
        "MemoryPressure",
        "DiskPressure",
        "PIDPressure",
    }

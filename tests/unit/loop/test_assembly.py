"""How the rooms are put together for `nodeagent run`."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from nodeagent.commands import exit_codes
from nodeagent.loop.state_store import AgentState
from nodeagent.records.state_file import StateFile
from tests.support.trees import Node, TreePod, write_node


def rehearse(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One round of the loop, by a user who has no credentials."""
    kept = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "LANG")
    environ = {name: os.environ[name] for name in kept if name in os.environ} | {"HOME": str(home)}
    command = [sys.executable, "-m", "nodeagent", "run", "--once", "--dry-run", *arguments]
    return subprocess.run(command, env=environ, check=False, timeout=60, capture_output=True, text=True)


def test_the_jitter_of_conditions_is_drawn_by_the_nodes_name_when_it_is_the_hostname(tmp_path: Path) -> None:
    """A fleet whose nodes nobody names would otherwise release its conditions in the same second."""
    config = tmp_path / "nodeagent.yaml"
    settings = {
        "apiVersion": "nodeagent.io/v1alpha1",
        "kind": "NodeAgentConfiguration",
        "stateDir": str(tmp_path / "s"),
    }
    config.write_text(json.dumps(settings))
    rehearse(tmp_path, "--config", str(config)).check_returncode()
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
    ran = rehearse(tmp_path, "--host-root", str(root), "--config", str(config))
    ran.check_returncode()
    said = [json.loads(line) for line in (ran.stdout + ran.stderr).splitlines() if line.startswith("{")]
    assert {line["type"] for line in said if line["event"] == "condition changed"} == {
        "MemoryPressure",
        "DiskPressure",
        "PIDPressure",
    }


def test_a_kubeconfig_that_was_named_and_is_not_there_is_an_error_in_a_rehearsal_too(tmp_path: Path) -> None:
    config = tmp_path / "nodeagent.yaml"
    head = "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n"
    config.write_text(f"{head}stateDir: {tmp_path / 's'}\n")
    ran = rehearse(tmp_path, "--config", str(config), "--kubeconfig", str(tmp_path / "nowhere"))
    assert ran.returncode == exit_codes.CONFIG
    assert f"kubeconfig: {tmp_path / 'nowhere'} does not exist" in ran.stderr

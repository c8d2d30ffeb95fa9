"""How the agent of `nodeagent run` is built."""

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


def dry_run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One sync, by a user without credentials."""
    kept = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "LANG")
    environ = {name: os.environ[name] for name in kept if name in os.environ} | {"HOME": str(home)}
    command = [sys.executable, "-m", "nodeagent", "run", "--once", "--dry-run", *arguments]
    return subprocess.run(command, env=environ, check=False, timeout=60, capture_output=True, text=True)


def test_the_jitter_of_conditions_is_drawn_from_the_nodes_name_also_if_that_is_the_hostname(tmp_path: Path) -> None:
    """Otherwise a fleet without configured names would release its conditions in the same second."""
    config = tmp_path / "nodeagent.yaml"
    settings = {
        "apiVersion": "nodeagent.io/v1alpha1",
        "kind": "NodeAgentConfiguration",
        "stateDir": str(tmp_path / "s"),
    }
    config.write_text(json.dumps(settings))
    dry_run(tmp_path, "--config", str(config)).check_returncode()
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    loaded = StateFile(tmp_path / "s" / "state", shape=AgentState, boot_id=boot_id).load()
    assert loaded.value.policy.conditions.seed == socket.gethostname().lower(), loaded.message


def test_one_sync_decides_without_waiting_for_the_api_server(tmp_path: Path) -> None:
    root = tmp_path / "node"
    root.mkdir()
    write_node(root, Node(pods=(TreePod("a/b"),)))
    config = tmp_path / "nodeagent.json"
    settings = {"apiVersion": "nodeagent.io/v1alpha1", "kind": "NodeAgentConfiguration", "logging": {"format": "json"}}
    config.write_text(json.dumps(settings | {"stateDir": str(tmp_path / "s")}))
    ran = dry_run(tmp_path, "--host-root", str(root), "--config", str(config))
    ran.check_returncode()
    logged = [json.loads(line) for line in (ran.stdout + ran.stderr).splitlines() if line.startswith("{")]
    assert {line["type"] for line in logged if line["event"] == "condition changed"} == {
        "MemoryPressure",
        "DiskPressure",
        "PIDPressure",
    }


def test_a_named_kubeconfig_that_does_not_exist_is_an_error_in_a_dry_run_too(tmp_path: Path) -> None:
    config = tmp_path / "nodeagent.yaml"
    head = "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n"
    config.write_text(f"{head}stateDir: {tmp_path / 's'}\n")
    ran = dry_run(tmp_path, "--config", str(config), "--kubeconfig", str(tmp_path / "nowhere"))
    assert ran.returncode == exit_codes.CONFIG
    assert f"kubeconfig: {tmp_path / 'nowhere'} does not exist" in ran.stderr


def test_an_agent_does_not_load_what_only_reads_recordings() -> None:
    """Each module is memory on every node: reading recordings and building snapshot files need 1.5 MiB."""
    unneeded = ("recording", "recording_lean", "snapshot_file", "snapshot_build", "snapshot_documents", "pseudonyms")
    code = (
        "import sys, nodeagent.commands.cli, nodeagent.commands.run\n"
        "assert 'nodeagent.records.sample_recorder' in sys.modules\n"
        f"unneeded = {{f'nodeagent.records.{{name}}' for name in {unneeded!r}}} & set(sys.modules)\n"
        "assert not unneeded, unneeded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

"""How the rooms are put together for `nodeagent run`."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from nodeagent.journal.state import StateFile
from nodeagent.keeper import AgentState


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

"""A fork bomb leaves no PID for a thread: what wants to begin one goes on without, and tries again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.rawserver import RawServer

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give up root")

LAST_PIDS = """
import encodings.idna  # which the first connection imports, and nobody may read after setuid
import os, resource, sys
from nodeagent.kube.pdb_watch import BudgetWatch
from nodeagent.kube.credentials import find_credentials
from nodeagent.actuators.evictions import Evictor
from nodeagent.kube.list_watch import ListWatch
from nodeagent.kube.transport import connect
from nodeagent.runtime import workers

transport = connect(find_credentials(sys.argv[1]), request_timeout_s=1.0)
evictor = Evictor(transport)
soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
os.setuid(65534)  # the limit on processes does not hold for root
resource.setrlimit(resource.RLIMIT_NPROC, (0, hard))
"""


def _run(program: str, tmp_path: Path) -> list[str]:
    with RawServer(lambda connection, number: None) as server:
        path = tmp_path / "kubeconfig"
        server.kubeconfig(path)
        ran = subprocess.run(
            [sys.executable, "-c", LAST_PIDS + program, str(path)], check=True, capture_output=True, text=True
        )
    return ran.stdout.splitlines()


def test_connections_stay_cold_and_it_is_tried_again(tmp_path: Path) -> None:
    program = """
evictor.warm()
print([each.name for each in workers.stuck()])
resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
while workers.stuck():
    evictor.warm()
print("warmed")
"""
    assert _run(program, tmp_path) == ["['warm']", "warmed"]


def test_budgets_are_watched_when_there_is_a_pid_again(tmp_path: Path) -> None:
    program = """
budgets = BudgetWatch(transport, wake=lambda: None)
budgets.want(["default"])
print(*[note.message for note in budgets.notes()])
resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
budgets.want(["default"])
while "no PID" in str(budgets.notes()): pass
print("begun")
"""
    assert _run(program, tmp_path) == ["there is no PID left for its thread", "begun"]

"""A fork bomb leaves no PID for a thread: the agent continues without the thread and starts it later."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.rawserver import RawServer

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give up root")

LAST_PIDS = """
import encodings.idna  # the first connection imports it, which setuid forbids
import os, resource, sys
from nodeagent.kube.pdb_watch import PdbWatch
from nodeagent.kube.credentials import find_credentials
from nodeagent.actuators.evictions import EvictionSender
from nodeagent.kube.list_watch import ListWatch
from nodeagent.kube.transport import connect
from nodeagent.runtime import workers

transport = connect(find_credentials(sys.argv[1]), request_timeout_s=1.0)
evictor = EvictionSender(transport)
soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
os.setuid(65534)  # the limit on processes does not apply to root
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


def test_connections_stay_closed_and_prewarm_is_repeated(tmp_path: Path) -> None:
    program = """
evictor.prewarm()
print([each.name for each in workers.stuck_workers()])
resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
while workers.stuck_workers():
    evictor.prewarm()
print("prewarmed")
"""
    assert _run(program, tmp_path) == ["['prewarm']", "prewarmed"]


def test_pdbs_are_watched_when_there_is_a_pid_again(tmp_path: Path) -> None:
    program = """
pdbs = PdbWatch(transport, wake=lambda: None)
pdbs.want(["default"])
print(*[note.message for note in pdbs.notes()])
resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
pdbs.want(["default"])
while "no PID" in str(pdbs.notes()): pass
print("started")
"""
    assert _run(program, tmp_path) == ["no PID left for its thread", "started"]

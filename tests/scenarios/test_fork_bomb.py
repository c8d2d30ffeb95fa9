"""A fork bomb whose children live for milliseconds: no sample sees more than a few of them, and yet it is found."""

import json
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.sampling.events.fork_meter import NoForks, open_meter
from nodeagent.sampling.hostfs.host import Host
from tests.fake_kube import ApiServer, pod
from tests.support.livenode import Kubepods, StartAgent, needs_cgroup_v1, until

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

BOMB, STILL = str(uuid.uuid4()), str(uuid.uuid4())
STILL_PROCESSES = 40

FORKING = """
import os, sys
def fork():
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)

sys.stdin.readline()
fork()
print('forks', flush=True)
while True:
    fork()
"""
STANDING = f"""
import os, sys
for _ in range({STILL_PROCESSES - 1}):
    if not os.fork():
        sys.stdin.read()
        os._exit(0)
print('up', flush=True)
sys.stdin.read()
"""


@pytest.fixture
def api(kubepods: Kubepods) -> Iterator[ApiServer]:
    pods = [
        pod("bomb", uid=BOMB, owner=("ReplicaSet", "bomb"), requests={"memory": "50Mi"}, qos="Burstable"),
        pod("still", uid=STILL, owner=("ReplicaSet", "still"), qos="BestEffort"),
    ]
    with ApiServer(node="lab-node", pods=pods, linger_s=None) as server:
        yield server


def _start(kubepods: Kubepods, uid: str, program: str, *, qos: str) -> "subprocess.Popen[str]":
    """One that waits for its first line until it is in its cgroup."""
    waiting = "import sys; sys.stdin.readline()\n" + program
    process = subprocess.Popen(
        [sys.executable, "-c", waiting], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    kubepods.adopt(uid, process, qos=qos)
    _go(process)
    return process


def _go(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def _first(state: Path) -> str:
    """The first pod of the newest decision about PIDs that was recorded."""
    file = state / "decisions.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    decisions = [record for record in map(json.loads, lines) if record.get("rankedFor") == "pid.available"]
    return str(decisions[-1]["ranking"][0]["name"]) if decisions and decisions[-1]["ranking"] else ""


def test_the_pod_that_forks_is_found_before_the_one_that_has_more_processes(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, tmp_path: Path
) -> None:
    meter, why = open_meter(Host("/"))
    meter.close()
    if isinstance(meter, NoForks):
        pytest.skip(f"the process connector cannot be used here: {why}")
    bomb = _start(kubepods, BOMB, FORKING, qos="burstable")
    still = _start(kubepods, STILL, STANDING, qos="besteffort")
    assert still.stdout is not None
    assert still.stdout.readline() == "up\n"
    most = min(int(Path(f"/proc/sys/kernel/{name}").read_text()) for name in ("pid_max", "threads-max"))
    plenty = {"burst": 1000, "perHour": 100_000}
    settings: dict[str, Any] = {
        "evictionHard": {"pid.available": str(most)},
        "evictionSoft": {},
        "evictionSoftGracePeriod": {},
        # Both are victims of the first decision, since all their processes are not what is missing: the order counts.
        "relief": {"onFutile": "evict", "minimumRelief": "1", "failuresBeforeStop": 100_000},
        # On a busy host a pod that forks all the time may do nothing for some samples.
        "startup": {"freshSamples": 10},
        "rateLimits": {**dict.fromkeys(("node", "namespace", "owner", "signal"), plenty), "ownerBackoff": "0s"},
    }
    agent = start_agent("--dry-run", **settings)
    until(lambda: _first(tmp_path / "state") == "still", "without forks the number of processes counts")
    assert agent.stop() == 0
    # A decision that refuses the same pods for the same reason is not recorded again, so a new agent decides.
    shutil.rmtree(tmp_path / "state")
    _go(bomb)
    assert bomb.stdout is not None
    assert bomb.stdout.readline() == "forks\n"
    agent = start_agent("--dry-run", **settings)
    until(lambda: _first(tmp_path / "state") == "bomb", "the forking pod is ranked first")
    assert agent.stop() == 0

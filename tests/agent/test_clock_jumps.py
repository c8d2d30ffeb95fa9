"""The wall clock jumps forward, back and back again while a grace period runs, in an odd time zone: nothing changes."""

import datetime as dt
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_kube import ApiServer, pod
from tests.support.livenode import Kubepods, configuration, needs_cgroup_v1

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

HOG = str(uuid.uuid4())
GRACE_S = 4.0
DAY_S = 86400.0

LAUNCH = """
import pathlib, sys, time
clock, jumped = time.time, pathlib.Path(sys.argv.pop(1))
time.time = lambda: clock() + float(jumped.read_text())
from nodeagent.commands.cli import main
sys.exit(main())
"""
"""The program, with a wall clock that a file moves. No process can have the machine's to itself."""


@pytest.fixture
def api(kubepods: Kubepods) -> Iterator[ApiServer]:
    hog = pod("hog", uid=HOG, owner=("ReplicaSet", "hog"), requests={"memory": "50Mi"}, qos="Burstable")
    with ApiServer(node="lab-node", pods=[hog], linger_s=None) as server:
        yield server


def _jump(file: Path, seconds: float) -> None:
    replacement = file.with_name("next")
    replacement.write_text(str(seconds))
    replacement.replace(file)


def _condition(api: ApiServer, status: str) -> bool:
    return (api.condition("NodeAgentMemoryPressure") or {}).get("status") == status


def test_a_jump_of_the_wall_clock_changes_no_grace_period(kubepods: Kubepods, api: ApiServer, tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    _jump(clock, 0.0)
    soft = {"allocatableMemory.available": f"{GRACE_S:g}s"}
    config = configuration(tmp_path, kubepods, evictionSoftGracePeriod=soft)
    kubepods.start(HOG, qos="burstable")
    command = [sys.executable, "-c", LAUNCH, str(clock), "run", "--config", str(config), "--node-name", "lab-node"]
    kubeconfig = api.kubeconfig(tmp_path / "kubeconfig")
    with (tmp_path / "log").open("wb") as log:
        agent = subprocess.Popen(
            [*command, "--kubeconfig", str(kubeconfig)],
            stdout=log,
            stderr=log,
            env={**os.environ, "TZ": "Pacific/Kiritimati"},  # UTC+14
        )
    try:
        assert api.wait_for(lambda: _condition(api, "False"), 30)
        stamp = (api.condition("NodeAgentMemoryPressure") or {})["lastHeartbeatTime"]
        age = dt.datetime.now(dt.UTC) - dt.datetime.fromisoformat(stamp)
        assert abs(age.total_seconds()) < 60, "stamps are UTC wherever the node is"

        crossed_at = time.monotonic()
        kubepods.eat(HOG, 400)
        assert api.wait_for(lambda: _condition(api, "True"), 30)
        for jump_s in (DAY_S, -2 * DAY_S, 0.0):
            _jump(clock, jump_s)
            api.wait_for(lambda: api.sent("POST", "/eviction"), GRACE_S / 5)
        assert api.wait_for(lambda: api.sent("POST", "/eviction"), 30)
        [eviction] = api.sent("POST", "/eviction")
        assert eviction.at - crossed_at >= GRACE_S, "a day forward did not end it; two back would have lengthened it"
        assert _condition(api, "True"), "and the condition stays"
        agent.terminate()
        assert agent.wait(40) == 0
    finally:
        agent.kill()
        agent.wait()

"""A thread that hangs in the kernel is reported by log, metric and `check`, and the loop goes on and evicts."""

import socket
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_kube import ApiServer, pod
from tests.support.livenode import HARD, Kubepods, StartAgent, needs_cgroup_v1, until
from tests.support.mounts import silent_fuse

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

HOG = str(uuid.uuid4())


@pytest.fixture
def api(kubepods: Kubepods) -> Iterator[ApiServer]:
    with ApiServer(node="lab-node", pods=[pod("hog", uid=HOG, owner=("ReplicaSet", "hog"))], linger_s=None) as server:
        yield server


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_a_dead_mount_is_reported_everywhere_and_stops_nothing(
    kubepods: Kubepods, api: ApiServer, run: StartAgent, tmp_path: Path
) -> None:
    kubepods.start(HOG, qos="besteffort")
    port = _free_port()
    with silent_fuse(tmp_path / "dead") as dead:
        sampling = {"interval": "200ms", "cgroupRoot": f"/{kubepods.root}", "imageDir": str(dead)}
        agent = run(**HARD, sampling=sampling, metrics={"address": f"127.0.0.1:{port}"})
        kubepods.eat(HOG, 400)
        assert api.wait_for(lambda: api.sent("POST", "/eviction"), 30), agent.events()

        text = f"thread statvfs {dead} stuck in statvfs for more than"
        until(lambda: text in str([line for line in agent.logged("note") if line["subject"] == "workers"]), "the note")
        until(lambda: b'nodeagent_workers_stuck{worker="statvfs"} 1' in _metrics(port), "the metric")
        until(lambda: text in (tmp_path / "state" / "status").read_text(), "the note for check")
    assert text in _check(tmp_path)
    assert agent.stop() == 0


def _metrics(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return bytes(answer.read())


def _check(directory: Path) -> str:
    command = [sys.executable, "-m", "nodeagent", "check", "--no-api", "--config", str(directory / "nodeagent.yaml")]
    ran = subprocess.run([*command, "--output", "json"], check=False, capture_output=True, text=True, timeout=60)
    return ran.stdout

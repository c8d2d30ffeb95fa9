"""A real process that fills its own memory limit: evicted with preStop by the real agent, or killed by the kernel.

A quarter of 512 MiB at a quarter of the speed: the times are those of the whole.
"""

import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from nodeagent.commands import cli
from tests.fake_kube import ApiServer, pod
from tests.support.livenode import HIERARCHIES, MIB, Kubepods, StartAgent, container_id, needs_cgroup_v1, until

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

WEB: Final = str(uuid.uuid4())
LIMIT_MIB: Final = 128
PRE_STOP_S: Final = 1.0
ON: Final[dict[str, Any]] = {
    "evictionHard": {},
    "evictionSoft": {},
    "evictionSoftGracePeriod": {},
    "ownLimit": {"enabled": True, "namespaces": ["default"]},
    "sampling": {},
}
RAMP: Final = """
import os, sys, time
held, per_s = [], float(sys.argv[1])
for line in sys.stdin:
    kind, mib = line.split()
    if kind == "file":
        with open(sys.argv[2], "wb") as file:
            for written in range(int(mib)):
                file.write(bytes(1 << 20))
                if written % 8 == 0:  # cgroup v1 kills for page cache that a slow disk has not got yet
                    os.fsync(file)
        print("done", flush=True)
        continue
    due = time.monotonic()
    for _ in range(int(mib) * 4):
        held.append(bytearray(b"x") * (1 << 18))
        if kind == "ramp":
            due += 0.25 / per_s
            time.sleep(max(0.0, due - time.monotonic()))
    print("done", flush=True)
"""


class Web:
    """The pod: one process with a limit of its own, and what a kubelet does once its eviction is accepted."""

    def __init__(self, kubepods: Kubepods, api: ApiServer, scratch: Path, *, per_s: float) -> None:
        self.api = api
        self.process = subprocess.Popen(
            [sys.executable, "-c", RAMP, str(per_s), str(scratch / "file")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        kubepods.adopt(WEB, self.process, qos="burstable")
        [directory] = (HIERARCHIES[0] / kubepods.root / "kubepods").glob(f"*/pod{WEB}")
        (directory / container_id(WEB) / "memory.limit_in_bytes").write_text(str(LIMIT_MIB * MIB))
        self.pre_stop_ended = threading.Event()
        self.graces: list[int] = []
        api.on_eviction = self._evicted

    def tell(self, kind: str, mib: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{kind} {mib}\n")
        self.process.stdin.flush()

    def wait_done(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "done\n"

    def _evicted(self, _entry: dict[str, Any], body: dict[str, Any]) -> None:
        self.graces.append(body["deleteOptions"]["gracePeriodSeconds"])
        threading.Thread(target=self._terminate, daemon=True).start()

    def _terminate(self) -> None:
        time.sleep(PRE_STOP_S)
        if self.process.poll() is None:
            self.pre_stop_ended.set()
        self.process.send_signal(signal.SIGTERM)


@pytest.fixture
def api(kubepods: Kubepods) -> Iterator[ApiServer]:
    web = pod("web", uid=WEB, owner=("ReplicaSet", "web"), requests={"memory": "64Mi"}, grace=40)
    with ApiServer(node="lab-node", pods=[web], linger_s=None) as server:
        yield server


def started(kubepods: Kubepods, api: ApiServer, tmp_path: Path) -> Web:
    made = Web(kubepods, api, tmp_path, per_s=12.5)
    made.tell("hold", 40)
    made.wait_done()
    return made


def watched(kubepods: Kubepods) -> dict[str, Any]:
    return {**ON, "sampling": {"cgroupRoot": f"/{kubepods.root}"}}


def test_a_ramp_to_its_own_limit_ends_with_pre_stop_and_sigterm(
    kubepods: Kubepods, api: ApiServer, run: StartAgent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    web = started(kubepods, api, tmp_path)
    agent = run(**watched(kubepods))
    time.sleep(3.0)  # of a pod that is known
    web.tell("ramp", 200)
    assert web.process.wait(30) == -signal.SIGTERM, agent.events()
    assert web.pre_stop_ended.is_set()
    assert web.graces == [40], "the whole grace period of the pod"
    [line] = agent.wait_for_log("evicting")
    assert line["signal"] == "memory.max"
    assert "memory limit 128Mi" in line["message"]
    assert api.wait_for(lambda: any(r.body["reason"] == "PodEvicted" for r in api.sent("POST", "/events")), 30)
    notes = {r.body["reason"]: r.body for r in api.sent("POST", "/events")}
    assert "about to reach a memory limit of its own, not for the node. Container " in notes["PodEvicted"]["note"]
    assert "EvictionThresholdMet" not in notes
    condition = api.condition("NodeAgentMemoryPressure")
    assert condition is not None
    assert condition["status"] == "False"
    kubepods.kill(WEB)
    api.delete_pod("default", "web")
    assert agent.stop() == 0
    assert cli.main(["explain", line["id"], "--state-dir", str(tmp_path / "state")]) == 0
    assert "memory.max of the pod's own" in capsys.readouterr().out


def test_a_dry_run_says_so_and_the_kernel_kills(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, tmp_path: Path
) -> None:
    web = started(kubepods, api, tmp_path)
    agent = start_agent(**watched(kubepods), mode="dry-run")
    assert api.wait_for(lambda: api.watched("/api/v1/pods"), 60)
    until(lambda: agent.logged("signal changed"), "the first decision")
    time.sleep(3.0)
    web.tell("ramp", 200)
    assert web.process.wait(30) == -signal.SIGKILL
    [line] = agent.wait_for_log("would evict")
    assert line["signal"] == "memory.max"
    assert agent.stop() == 0
    assert not api.sent("POST", "/eviction")


def test_a_pod_full_of_its_own_page_cache_stays(
    kubepods: Kubepods, api: ApiServer, run: StartAgent, tmp_path: Path
) -> None:
    web = started(kubepods, api, tmp_path)
    agent = run(**watched(kubepods))
    web.tell("file", 200)
    web.wait_done()
    [usage] = (HIERARCHIES[0] / kubepods.root / "kubepods").glob(f"*/pod{WEB}/*/memory.usage_in_bytes")
    assert int(usage.read_text()) > 0.9 * LIMIT_MIB * MIB, "full"
    web.tell("file", 200)
    web.wait_done()
    time.sleep(12.0)  # a calm agent reads the pods every 10 s
    assert web.process.poll() is None
    assert agent.stop() == 0
    assert not api.sent("POST", "/eviction")

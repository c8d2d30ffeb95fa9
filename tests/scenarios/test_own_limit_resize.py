"""A real process that fills its own memory limit: the real agent raises it in place, and a kubelet of the double acts.

The double answers `pods/resize` from the sources of Kubernetes (tests/fake_kube/resize.py); the cgroups are real.
"""

import json
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from nodeagent.commands import cli
from nodeagent.config import quantity
from tests.fake_kube import ApiServer, pod, resize
from tests.support.livenode import (
    EATER,
    HIERARCHIES,
    MIB,
    Kubepods,
    StartAgent,
    container_id,
    needs_cgroup_v1,
    until,
)

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

WEB: Final = str(uuid.uuid4())
ON: Final[dict[str, Any]] = {
    "evictionHard": {},
    "evictionSoft": {},
    "evictionSoftGracePeriod": {},
    "ownLimit": {
        "enabled": True,
        "namespaces": ["default"],
        "share": 0.85,
        "resize": {"enabled": True, "namespaces": ["default"], "undoAfter": "60s"},
    },
}


class Web:
    """The pod: a process that eats what it is given, and a kubelet that carries resizes out in its cgroup."""

    def __init__(self, kubepods: Kubepods, api: ApiServer) -> None:
        self.api = api
        self.start()
        kubepods.adopt(WEB, self.process, qos="burstable")
        [directory] = (HIERARCHIES[0] / kubepods.root / "kubepods").glob(f"*/pod{WEB}")
        self.limit_file = directory / container_id(WEB) / "memory.limit_in_bytes"
        self.limit_file.write_text(str(128 * MIB))
        self.kubelet: Callable[[dict[str, Any]], None] = self.carry_out
        api.on_resize = lambda entry: threading.Thread(target=self.kubelet, args=(entry,), daemon=True).start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", EATER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._answer() == "up"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def eat(self, mib: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{mib}\n")
        self.process.stdin.flush()
        assert self._answer() == "ate"

    def carry_out(self, entry: dict[str, Any]) -> None:
        time.sleep(0.2)
        wanted = entry["spec"]["containers"][0]["resources"]["limits"]["memory"]
        self.limit_file.write_text(str(quantity.parse_quantity(wanted)))
        self.api.modify_pod("default", "web", resize.carry_out)

    def defer(self, entry: dict[str, Any]) -> None:
        wanted = entry["spec"]["containers"][0]["resources"]["limits"]["memory"]
        change = resize.withdrawn if wanted == "128Mi" else resize.defer
        self.api.modify_pod("default", "web", change)

    @property
    def limit(self) -> int:
        return int(self.limit_file.read_text()) // MIB


@pytest.fixture
def api() -> Iterator[ApiServer]:
    web = pod(
        "web",
        uid=WEB,
        owner=("ReplicaSet", "web"),
        requests={"memory": "64Mi"},
        limits={"memory": "128Mi"},
        status={},
    )
    web["status"]["containerStatuses"][0]["containerID"] = f"containerd://{container_id(WEB)}"
    resize.carry_out(web)
    node: dict[str, Any] = {"allocatable": {"memory": "64Gi"}}
    with ApiServer(node="lab-node", pods=[web], linger_s=None) as server:
        server.put_node({**server.node(), "status": {**server.node()["status"], **node}})
        yield server


@pytest.fixture
def web(kubepods: Kubepods, api: ApiServer) -> Iterator[Web]:
    found = Web(kubepods, api)
    yield found
    found.end()


def settings(kubepods: Kubepods) -> dict[str, Any]:
    return {**ON, "sampling": {"cgroupRoot": f"/{kubepods.root}"}}


def known(api: ApiServer) -> None:
    """The agent has the pods, and has read them once."""
    assert api.wait_for(lambda: api.watched("/api/v1/pods"), 60)
    time.sleep(3.0)


def test_the_limit_is_raised_and_nobody_is_evicted(
    kubepods: Kubepods, api: ApiServer, web: Web, run: StartAgent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    web.eat(60)
    agent = run(**settings(kubepods))
    known(api)
    web.eat(50)
    [ordered] = agent.wait_for_log("resizing pod")
    assert (ordered["limit_before"], ordered["limit"]) == (128 * MIB, 160 * MIB)
    [done] = agent.wait_for_log("resize resized")
    assert done["id"] == ordered["id"]
    assert web.limit == 160
    web.eat(25)
    assert web.process.poll() is None, "over its first limit"
    assert api.wait_for(lambda: any(r.body["reason"] == "MemoryLimitRaised" for r in api.sent("POST", "/events")), 30)
    assert not api.sent("POST", "/eviction")
    assert agent.stop() == 0
    state = ["--state-dir", str(tmp_path / "state")]
    assert cli.main(["explain", ordered["id"], *state]) == 0
    text = capsys.readouterr().out
    assert "RESIZES" in text
    assert "default/web, container c: resized: its memory limit is 160Mi, was 128Mi" in text
    assert cli.main(["explain", ordered["id"], *state, "-o", "json"]) == 0
    outcomes = json.loads(capsys.readouterr().out)["resizeOutcomes"]
    assert [each["result"] for each in outcomes] == ["accepted", "resized"]


def test_a_deferred_raise_is_withdrawn_and_the_pod_evicted(
    kubepods: Kubepods, api: ApiServer, web: Web, run: StartAgent
) -> None:
    web.kubelet = web.defer
    web.eat(60)
    agent = run(**settings(kubepods))
    known(api)
    web.eat(50)
    agent.wait_for_log("resize deferred")
    agent.wait_for_log("evicting")
    until(lambda: len(api.sent("PATCH", "/resize")) == 2, "the withdrawal")
    wanted = [each.body["spec"]["containers"][0]["resources"]["limits"] for each in api.sent("PATCH", "/resize")]
    assert wanted == [{"memory": "160Mi"}, {"memory": "128Mi"}]
    assert agent.stop() == 0


@pytest.mark.timeout(300)  # `undoAfter` is a minute
def test_a_calm_container_gets_its_first_limit_again(
    kubepods: Kubepods, api: ApiServer, web: Web, run: StartAgent
) -> None:
    """The agent is stopped and started in between: the state has what is to be undone."""
    web.eat(60)
    agent = run(**settings(kubepods))
    known(api)
    web.eat(50)
    agent.wait_for_log("resize resized")
    assert agent.stop() == 0
    # The container restarts with little; its cgroup keeps the raised limit.
    web.end()
    web.start()
    (web.limit_file.parent / "cgroup.procs").write_text(str(web.process.pid))
    again = run(**settings(kubepods))
    until(lambda: again.logged("resize restored"), "the first limit again", timeout_s=150)
    assert web.limit == 128
    assert again.stop() == 0


def test_a_dry_run_sends_nothing(kubepods: Kubepods, api: ApiServer, web: Web, start_agent: StartAgent) -> None:
    web.eat(60)
    agent = start_agent(**settings(kubepods), mode="dry-run")
    until(lambda: agent.logged("signal changed"), "the first decision")
    known(api)
    web.eat(50)
    agent.wait_for_log("would resize pod")
    agent.wait_for_log("resize dry-run")
    assert agent.stop() == 0
    assert not api.sent("PATCH")

"""A real OOM kill is reported by the real agent: on the pod and its owner, in the log, in `explain` and in `check`."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.commands import cli
from nodeagent.records import status_file
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.node.kernel_log import KernelLog
from tests.fake_kube import ApiServer, pod
from tests.support.livenode import HIERARCHIES, MIB, Kubepods, Run, StartAgent, container_id, needs_cgroup_v1, until

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

HOG, NEXT = str(uuid.uuid4()), str(uuid.uuid4())
NEVER: dict[str, Any] = {"evictionHard": {}, "evictionSoft": {}, "evictionSoftGracePeriod": {}}


@pytest.fixture
def api(kubepods: Kubepods) -> Iterator[ApiServer]:
    pods = [pod("hog", uid=HOG, owner=("ReplicaSet", "hog-1")), pod("next", uid=NEXT, owner=("ReplicaSet", "next-1"))]
    with ApiServer(node="lab-node", pods=pods, linger_s=None) as server:
        yield server


def limit(kubepods: Kubepods, uid: str, mib: int) -> None:
    """The container's own limit."""
    [pod_cgroup] = (HIERARCHIES[0] / kubepods.root / "kubepods").glob(f"*/pod{uid}")
    (pod_cgroup / container_id(uid) / "memory.limit_in_bytes").write_text(str(mib * MIB))


def observed(api: ApiServer) -> list[dict[str, Any]]:
    return [r.body for r in api.sent("POST", "/events") if r.body["reason"] == "OOMKillObserved"]


def log_readable() -> bool:
    log = KernelLog(Host("/"))
    log.close()
    return not log.reason


def kill(kubepods: Kubepods, uid: str) -> None:
    kubepods.eat(uid, 300, to_the_end=False)
    until(lambda: not kubepods.running(uid), "the OOM kill")


def state_of(agent: Run, tmp_path: Path) -> str:
    until(lambda: agent.logged("signal changed"), "the first decision")
    return str(tmp_path / "state")


def test_a_kill_is_reported_on_the_pod_and_its_owner_and_explained(
    kubepods: Kubepods, api: ApiServer, run: StartAgent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kubepods.start(HOG, qos="burstable")
    agent = run(**NEVER)
    limit(kubepods, HOG, 64)
    state = state_of(agent, tmp_path)
    kill(kubepods, HOG)
    assert api.wait_for(lambda: len(observed(api)) == 2, 30), agent.events()
    regarding = {(event["regarding"]["kind"], event["regarding"]["name"]) for event in observed(api)}
    assert regarding == {("Pod", "hog"), ("ReplicaSet", "hog-1")}
    [line] = agent.logged("OOM kill")
    cause = "container-limit" if log_readable() else "unknown"
    assert (line["pod"], line["cause"], line["number"]) == ("default/hog", cause, 1)
    assert observed(api)[0]["metadata"]["annotations"] == {"nodeagent.io/plan": line["id"]}
    assert cli.main(["explain", line["id"], "--state-dir", state, "-o", "json"]) == 0
    story = json.loads(capsys.readouterr().out)
    assert story["kills"][0]["pod"] == "default/hog"
    assert story["race"] is None
    until(lambda: any("default/hog" in note.message for note in status_file.read_status(state, now=1e12)), "the note")
    assert not api.sent("POST", "/eviction"), "a kill is never a reason to evict"
    assert agent.stop() == 0


def test_what_is_killed_while_no_agent_runs_is_reported_by_the_next_one(
    kubepods: Kubepods, api: ApiServer, run: StartAgent, tmp_path: Path
) -> None:
    kubepods.start(HOG, qos="burstable")
    first = run(**NEVER)
    limit(kubepods, HOG, 64)
    state_of(first, tmp_path)
    assert first.stop() == 0
    kill(kubepods, HOG)
    second = run(**NEVER)
    [line] = second.wait_for_log("OOM kill")
    assert line["pod"] == "default/hog"
    assert api.wait_for(lambda: observed(api), 30)
    assert "while the agent was not running" in observed(api)[0]["note"]
    assert second.stop() == 0
    third = run(**NEVER)
    state_of(third, tmp_path)
    assert third.stop() == 0
    assert not third.logged("OOM kill"), "once"


def test_a_dry_run_logs_it_and_sends_nothing(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, tmp_path: Path
) -> None:
    if not log_readable():
        pytest.skip("cgroup v1 needs the kernel log for the cause")
    kubepods.start(HOG, qos="burstable")
    agent = start_agent(**NEVER, mode="dry-run")
    state_of(agent, tmp_path)
    assert api.wait_for(lambda: api.watched("/api/v1/pods"), 60)
    kubepods.eat(HOG, 700, to_the_end=False)  # more than all pods may have
    until(lambda: not kubepods.running(HOG), "the OOM kill")
    [line] = agent.wait_for_log("OOM kill")
    assert (line["pod"], line["cause"]) == ("default/hog", "allocatable")
    [race] = agent.wait_for_log("eviction too late")
    assert race["loss"] == "no-threshold"
    assert agent.stop() == 0
    assert not api.sent("POST", "/events")

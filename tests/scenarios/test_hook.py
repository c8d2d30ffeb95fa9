"""A hook before an eviction of the soft tier, with real processes: it runs first, and a killed agent runs it once."""

import json
import os
import shlex
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_kube import ApiServer, pod
from tests.support.livenode import HARD, Kubepods, StartAgent, needs_cgroup_v1, until

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

HOG = str(uuid.uuid4())


@pytest.fixture
def api(kubepods: Kubepods) -> Iterator[ApiServer]:
    with ApiServer(node="lab-node", pods=[pod("hog", uid=HOG, owner=("ReplicaSet", "hog"))], linger_s=None) as server:
        yield server


def soft(tmp_path: Path, script: str) -> dict[str, Any]:
    """The threshold of HARD as a soft one, and a hook that appends a line to `ran`."""
    ran = shlex.quote(str(tmp_path / "ran"))
    hook = {"command": ["/bin/sh", "-c", f"cat >>{ran}; {script}"], "deadline": "6s"}
    return {
        **HARD,
        "evictionHard": {},
        "evictionSoft": HARD["evictionHard"],
        "evictionSoftGracePeriod": dict.fromkeys(HARD["evictionHard"], "200ms"),
        "protection": {"minimumAge": "0s"},
        "startup": {"freshSamples": 1},
        "hooks": {"beforeEviction": hook},
    }


def test_the_hook_runs_before_the_request_and_is_told_in_the_event(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, tmp_path: Path
) -> None:
    kubepods.start(HOG, qos="besteffort")
    kubepods.eat(HOG, 400)
    agent = start_agent(**soft(tmp_path, "sleep 1"))
    assert api.wait_for(lambda: api.sent("POST", "/eviction"), 60), agent.events()
    [ran] = (tmp_path / "ran").read_text().splitlines()
    assert json.loads(ran)["pod"]["uid"] == HOG
    [done] = agent.wait_for_log("hook done")
    assert agent.logged("hook started")[0]["id"] == done["id"]
    assert api.wait_for(lambda: [e for e in api.sent("POST", "/events") if e.body["reason"] == "Evicted"], 30)
    [event] = [e for e in api.sent("POST", "/events") if e.body["reason"] == "Evicted"]
    assert event.body["metadata"]["annotations"]["nodeagent.io/hook"].startswith("done after ")
    assert agent.stop() == 0


def test_an_agent_that_is_killed_while_the_hook_runs_does_not_run_it_again(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, tmp_path: Path
) -> None:
    kubepods.start(HOG, qos="besteffort")
    kubepods.eat(HOG, 400)
    leader = tmp_path / "leader"
    changes = soft(tmp_path, f"echo $$ >{shlex.quote(str(leader))}; sleep 30")
    first = start_agent(**changes)
    until(lambda: leader.exists() and leader.read_text().endswith("\n"), "the hook")
    first.kill()
    os.killpg(int(leader.read_text()), signal.SIGKILL)  # nobody is left to end it
    assert not api.sent("POST", "/eviction")
    second = start_agent(**changes)
    assert api.wait_for(lambda: api.sent("POST", "/eviction"), 60), second.events()
    assert len((tmp_path / "ran").read_text().splitlines()) == 1
    assert not second.logged("hook started")
    assert second.stop() == 0

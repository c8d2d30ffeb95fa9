"""Where the state cannot be saved the soft tier waits, because its budgets would not survive a crash."""

import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.apiserver import ApiServer, pod
from tests.livenode import HARD, Kubepods, StartAgent, needs_cgroup_v1, until
from tests.sampling.disk.mounts import mounted

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

HOG = str(uuid.uuid4())


@pytest.fixture
def api(kubepods: Kubepods) -> Iterator[ApiServer]:
    hog = pod("hog", uid=HOG, owner=("ReplicaSet", "hog"), requests={"memory": "50Mi"}, qos="Burstable")
    with ApiServer(node="lab-node", pods=[hog], linger_s=None) as server:
        yield server


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=256k", "tmpfs") as place:
        yield place


def test_the_soft_tier_evicts_nobody_until_the_disk_has_room_again(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, small_disk: Path
) -> None:
    kubepods.start(HOG, qos="burstable")
    agent = start_agent(stateDir=str(small_disk / "state"))
    assert api.wait_for(lambda: api.condition("NodeAgentMemoryPressure"), 30), agent.events()
    filler = small_disk / "filler"
    subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=4k"], check=False, capture_output=True)
    kubepods.eat(HOG, 400)
    until(lambda: agent.said("eviction recheck-refused"), "the refusal")
    assert agent.said("eviction recheck-refused")[0]["message"] == "the state could not be saved"
    assert agent.heard("state not saved")
    assert not api.sent("POST", "/eviction")
    filler.unlink()
    assert api.wait_for(lambda: api.sent("POST", "/eviction"), 30), agent.events()
    assert agent.stop() == 0


def test_without_a_state_directory_the_soft_tier_says_so_at_the_start_and_does_not_act(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no directory")
    kubepods.start(HOG, qos="burstable")
    kubepods.eat(HOG, 400)
    agent = start_agent(stateDir=str(tmp_path / "file" / "state"))
    until(lambda: agent.said("eviction recheck-refused"), "the refusal")
    assert "the soft tier does not act" in str(agent.events())
    assert not api.sent("POST", "/eviction")
    assert agent.stop() == 0


def test_what_was_held_though_it_could_not_be_saved_is_let_go_by_the_next_agent(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, small_disk: Path
) -> None:
    """The state that it finds is whole, and from before the hold: only the mark tells of it."""
    changes = {**HARD, "escalation": {"brake": "freeze", "brakeDeadline": "10m"}, "stateDir": str(small_disk / "state")}
    kubepods.start(HOG, qos="burstable")
    agent = start_agent(**changes)
    assert api.wait_for(lambda: api.condition("NodeAgentMemoryPressure"), 30), agent.events()
    filler = small_disk / "filler"
    subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=4k"], check=False, capture_output=True)
    api.delay_s = 2.0  # the request hangs in the server while the agent dies
    kubepods.eat(HOG, 400, to_the_end=False)
    until(lambda: kubepods.frozen(HOG, qos="burstable"), "the pod is held")
    agent.kill()
    filler.unlink()
    agent = start_agent(**{**changes, "escalation": {"brake": "none"}})
    until(lambda: not kubepods.frozen(HOG, qos="burstable"), "the pod is let go")
    assert [line["trust"] for line in agent.heard("state")] == ["restored"]
    assert agent.stop() == 0

"""Where the state cannot be saved the soft tier waits, and the hard tier spends no token twice, whoever dies."""

import errno
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_kube import ApiServer, pod
from tests.support.livenode import HARD, Kubepods, Run, StartAgent, needs_cgroup_v1, until
from tests.support.mounts import mounted

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


def test_the_soft_tier_does_not_evict_until_the_disk_has_space_again(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, small_disk: Path
) -> None:
    kubepods.start(HOG, qos="burstable")
    agent = start_agent(stateDir=str(small_disk / "state"))
    assert api.wait_for(lambda: api.condition("NodeAgentMemoryPressure"), 30), agent.events()
    filler = small_disk / "filler"
    subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=4k"], check=False, capture_output=True)
    kubepods.eat(HOG, 400)
    until(lambda: agent.logged("eviction recheck-refused"), "the refusal")
    assert (
        agent.logged("eviction recheck-refused")[0]["message"]
        == "state not saved: only hard evictions through the API may act"
    )
    assert agent.wait_for_log("state not saved")
    assert not api.sent("POST", "/eviction")
    filler.unlink()
    assert api.wait_for(lambda: api.sent("POST", "/eviction"), 30), agent.events()
    assert agent.stop() == 0


def test_without_a_state_directory_the_soft_tier_does_not_act_and_the_start_logs_that(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no directory")
    kubepods.start(HOG, qos="burstable")
    kubepods.eat(HOG, 400)
    # The tokens that an earlier agent spent are unknown: every rate limit begins empty.
    soon = {kind: {"burst": 1, "perHour": 7200} for kind in ("node", "namespace", "owner", "signal")}
    agent = start_agent(stateDir=str(tmp_path / "file" / "state"), rateLimits=soon)
    until(lambda: agent.logged("eviction recheck-refused"), "the refusal")
    assert "no state directory, soft evictions are off" in str(agent.events())
    assert not api.sent("POST", "/eviction")
    assert agent.stop() == 0


def test_a_brake_that_was_not_saved_is_released_by_the_next_agent(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, small_disk: Path
) -> None:
    """The state was wiped, because it lacked the eviction: only the mark names the brake."""
    changes = {**HARD, "escalation": {"brake": "freeze", "brakeDeadline": "10m"}, "stateDir": str(small_disk / "state")}
    kubepods.start(HOG, qos="burstable")
    agent = start_agent(**changes)
    assert api.wait_for(lambda: api.condition("NodeAgentMemoryPressure"), 30), agent.events()
    filler = small_disk / "filler"
    subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=4k"], check=False, capture_output=True)
    api.delay_s = 2.0  # the request hangs in the server while the agent dies
    kubepods.eat(HOG, 400, to_the_end=False)
    until(lambda: kubepods.frozen(HOG, qos="burstable"), "the pod is frozen")
    until(lambda: not (small_disk / "state" / "state").stat().st_size, "the state is wiped")
    agent.kill()
    filler.unlink()
    agent = start_agent(**{**changes, "escalation": {"brake": "none"}})
    until(lambda: not kubepods.frozen(HOG, qos="burstable"), "the pod is released")
    assert [line["trust"] for line in agent.wait_for_log("state loaded")] == ["lost"]
    assert agent.stop() == 0


@pytest.mark.parametrize("failure", ["full", "read-only", "removed"])
def test_five_processes_with_a_failing_directory_evict_no_more_than_one(
    failure: str, kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, small_disk: Path
) -> None:
    """Each is killed after its decision. The API server accepts, but no pod ends: there is always a candidate."""
    settings: dict[str, Any] = {
        **HARD,
        "stateDir": str(small_disk / "state"),
        "rateLimits": {"node": {"burst": 2, "perHour": 1}},
        "startup": {"freshSamples": 1},
    }
    hogs = {str(uuid.uuid4()): f"hog-{n}" for n in range(6)}
    for uid, name in hogs.items():
        api.add_pod(pod(name, uid=uid, owner=("ReplicaSet", name), qos="Burstable"))
        kubepods.start(uid, qos="burstable")
    agent = start_agent(**settings)
    assert api.wait_for(lambda: api.condition("NodeAgentMemoryPressure"), 30), agent.events()
    until((small_disk / "state" / "state").exists, "the first state")
    if failure == "full":
        subprocess.run(["dd", "if=/dev/zero", f"of={small_disk}/filler", "bs=4k"], check=False, capture_output=True)
    elif failure == "read-only":
        until(lambda: _read_only(small_disk), "the remount")
    else:
        until(lambda: _removed(small_disk / "state"), "the removal")
    for uid in hogs:
        kubepods.eat(uid, 70)
    for life in range(5):
        _await_decision(agent)
        agent.kill()
        for name in hogs.values():
            api.modify_pod("default", name, lambda entry: entry["metadata"].pop("deletionTimestamp", None))
        if life == 3:  # the directory is well again
            subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
            (small_disk / "filler").unlink(missing_ok=True)
        agent = start_agent(**settings)
    _await_decision(agent)
    assert agent.stop() == 0
    assert len(api.sent("POST", "/eviction")) <= 2


def _read_only(mount: Path) -> bool:
    """Mount it so. False: it is busy, because the agent writes a file of it."""
    return subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=False).returncode == 0


def _removed(directory: Path) -> bool:
    """Remove it as a whole. False: the agent wrote or replaced a file of it meanwhile."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
            raise
        return False
    return True


def _await_decision(agent: Run) -> None:
    """A pod is evicted, or would be without a failing state or a rate limit."""
    until(
        lambda: (
            agent.logged("eviction accepted")
            or agent.logged("eviction recheck-refused")
            or any(line["code"].startswith("rate-limit-") for line in agent.logged("not evicting"))
        ),
        "a decision",
    )

"""The agent raises oom_score_adj of the next victim under pressure, and no end of it leaves a raised one behind."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.fake_kube import ApiServer, pod
from tests.support.livenode import HIERARCHIES, Kubepods, StartAgent, needs_cgroup_v1, until

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

HOG: Final = str(uuid.uuid4())
IN_ITS_GRACE: Final[dict[str, Any]] = {
    "evictionSoftGracePeriod": {"allocatableMemory.available": "1h"},
    "escalation": {"oomScoreAdj": True},
}
"""The threshold is met as long as the pod has its memory, and no pod is evicted for it."""


@pytest.fixture
def api(kubepods: Kubepods) -> Iterator[ApiServer]:
    hog = pod("hog", uid=HOG, owner=("ReplicaSet", "hog"), requests={"memory": "64Mi"})
    with ApiServer(node="lab-node", pods=[hog], linger_s=None) as server:
        yield server


@pytest.fixture
def score(kubepods: Kubepods) -> Path:
    """oom_score_adj of the pod's process, which holds two thirds of what all pods may have."""
    kubepods.start(HOG, qos="burstable")
    [procs] = (HIERARCHIES[0] / kubepods.root / "kubepods").glob(f"*/pod{HOG}/*/cgroup.procs")
    path = Path(f"/proc/{procs.read_text().strip()}/oom_score_adj")
    path.write_text("500")
    kubepods.eat(HOG, 400)
    return path


def test_a_clean_stop_puts_back_what_was_raised(start_agent: StartAgent, score: Path) -> None:
    agent = start_agent(**IN_ITS_GRACE)
    until(lambda: score.read_text() == "999\n", "the raise")
    assert agent.stop() == 0
    assert score.read_text() == "500\n"
    notes = [line["message"] for line in agent.logged("note") if line["subject"].startswith("OOM scores")]
    assert notes == ["raised oom_score_adj from 500 to 999"]


def test_the_next_agent_puts_back_what_a_killed_one_has_raised(start_agent: StartAgent, score: Path) -> None:
    first = start_agent(**IN_ITS_GRACE)
    until(lambda: score.read_text() == "999\n", "the raise")
    first.kill()
    assert score.read_text() == "999\n"
    second = start_agent(**{**IN_ITS_GRACE, "escalation": {}})
    until(lambda: score.read_text() == "500\n", "the first sync of the next agent")
    assert second.stop() == 0


def test_a_dry_run_reports_it_and_raises_nothing(start_agent: StartAgent, score: Path) -> None:
    agent = start_agent(**IN_ITS_GRACE, mode="dry-run")
    until(lambda: [line for line in agent.logged("note") if line["subject"] == "OOM scores default/hog"], "the note")
    assert score.read_text() == "500\n"
    assert agent.stop() == 0
    assert score.read_text() == "500\n"

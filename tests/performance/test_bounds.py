"""What the whole agent may cost, in counts: tests/data/performance/bounds.json has the most of each, by number of pods.

Counts of system calls, requests, bytes and kept memory are the same on every machine, times are not. RSS has slack,
because builds of Python and libc differ. A change that costs more on purpose raises the number in the file, and the
commit says why.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.fake_kube import ApiServer, Json, pod
from tests.fuzz import scratch
from tests.support import counted_agent
from tests.support.paths import REPOSITORY

BOUNDS: dict[str, dict[str, int]] = json.loads(
    (REPOSITORY / "tests" / "data" / "performance" / "bounds.json").read_text(encoding="utf-8")
)
SIZES = (0, 30, 110, 500)


def listed(count: int) -> list[Json]:
    """The pods as the API server has them."""
    found = []
    for each in counted_agent.tree_pods(count):
        name = each.key.partition("/")[2]
        owner, requests = ("ReplicaSet", name), {"memory": "40Mi"}
        found.append(pod(name, uid=each.cgroup_uid, node=counted_agent.NODE, owner=owner, requests=requests))
    return found


def beyond(figures: dict[str, int], pods: int) -> list[str]:
    """Every figure above its bound, as a line with what it was and what is allowed."""
    allowed = {name: row[str(pods)] for name, row in BOUNDS.items()}
    lines = [
        f"{name}: was {value}, allowed {allowed.get(name, 0)}"
        for name, value in figures.items()
        if value > allowed.get(name, 0)
    ]
    return [*lines, *(f"{name}: not counted" for name in allowed if name not in figures and "soft" not in name)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("pods", SIZES)
def test_the_agent_costs_no_more_than_its_bounds(pods: int) -> None:
    with (
        ApiServer(node=counted_agent.NODE, pods=listed(pods), linger_s=None) as api,
        tempfile.TemporaryDirectory(dir=scratch.PARENT) as directory,
    ):
        kubeconfig = api.kubeconfig(Path(directory) / "kubeconfig")
        command = [sys.executable, "-m", "tests.support.counted_agent", str(pods), str(kubeconfig), directory]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=dict(os.environ), capture_output=True, text=True, check=False
        )
        requests = len(api.requests)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    figures = json.loads(done.stdout) | {"requests": requests}
    assert beyond(figures, pods) == []


def test_a_figure_above_its_bound_is_found() -> None:
    good = {name: row["30"] for name, row in BOUNDS.items()}
    assert beyond(good, 30) == []
    reads = good["calm: pread"]
    assert beyond(good | {"calm: pread": reads + 1}, 30) == [f"calm: pread: was {reads + 1}, allowed {reads}"]
    assert beyond(good | {"calm: mkdir": 1}, 30) == ["calm: mkdir: was 1, allowed 0"]
    del good["calm: pread"]
    assert beyond(good, 30) == ["calm: pread: not counted"]


def test_the_slack_is_less_than_one_more_read_of_each_pod() -> None:
    """In each full sample of a calm minute."""
    per_pod = (BOUNDS["calm: pread"]["500"] - BOUNDS["calm: pread"]["0"]) / 500
    measured_per_pod = 9.0  # six full samples, and memory.stat and pids.current at their own pace
    assert per_pod - measured_per_pod < 6.0

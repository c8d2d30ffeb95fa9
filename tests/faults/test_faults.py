"""Faults in system calls, kernel files, state, recordings, answers of the API server and the life of the process: no
wrong eviction, no lost rate limit, no hang, no traceback."""

import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.fake_kube import ApiServer
from tests.faults import api, api_faults, api_scene, clocks, injected, lifecycle, replaced_node, runs
from tests.faults.api import Case
from tests.faults.clocks import Observed
from tests.faults.processes import SYNC, Inject
from tests.faults.runs import Table
from tests.faults.scene import CALM, HOG, PODS, PRESSED, WEB, Scene, scene
from tests.support.paths import REPOSITORY


def test_a_sample_of_all_faults_has_no_bad_end() -> None:
    """`python -m tests.faults` injects all of them."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults", "--quick"],
        cwd=REPOSITORY,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


# --- a judge that finds nothing proves something only if it would find something --------------------------------------


def _judged(pressed: bool, change: object) -> tuple[str, str]:
    with scene(CALM) as world:
        for _ in range(runs.WARM_SYNCS):
            world.sync()
        if pressed:
            world.write(PRESSED)
        return runs.judge(world, [lambda: change(world), world.sync], pressed=pressed)  # type: ignore[operator]


def test_a_finding_is_reported_at_once() -> None:
    reported: list[str] = []
    table = Table(reported.append)
    table.add("meminfo", "empty", "calm")
    assert reported == []
    table.add("meminfo", "negative", "hang", "7 s")
    assert reported == ["hang: meminfo, negative: 7 s"]


def test_the_judge_reports_what_may_not_happen() -> None:
    def evict(*names: str) -> object:
        return lambda world: world.cluster.evicted.extend(names)

    def fail(world: Scene) -> None:
        raise OSError

    def lose_memory(world: Scene) -> None:
        for path in ("proc/meminfo", "sys/fs/cgroup/memory.stat"):
            (world.root / path).write_bytes(b"")

    assert _judged(False, evict(HOG))[0] == "wrong eviction"
    assert _judged(True, evict(WEB))[0] == "wrong eviction"
    assert _judged(True, evict(HOG, HOG, HOG))[0] == "lost rate limit"
    assert _judged(True, fail)[0] == "traceback"
    assert _judged(False, lose_memory)[0] == "not recovered"
    assert _judged(True, lambda world: None)[0] == "evicted in a later sync"


def test_the_judge_reports_an_agent_that_has_not_recovered_from_an_answer() -> None:
    under_pressure = Case("first sync, under pressure", "list pods", "")
    no_answer = api_faults.INSTEAD["no answer at all"]
    assert api.inject(under_pressure, no_answer, recover_s=0.0).result == "not recovered", "no time to recover"
    assert api.inject(under_pressure, no_answer).result == "evicted in a later sync"


def test_the_judge_reports_a_refused_eviction_of_the_wrong_pod() -> None:
    with api_scene.api_scene() as world:
        world.api.forbid("create", "pods/eviction")
        request = urllib.request.Request(f"{world.api.url}/api/v1/namespaces/shop/pods/web/eviction", b"{}")
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(request)
        assert runs.judge(world, [lambda: None], pressed=True)[0] == "wrong eviction"


def test_the_judge_reports_a_pod_of_a_new_node_that_is_evicted_and_a_condition_that_is_missing() -> None:
    def evict(api: ApiServer) -> None:
        replaced_node.replace_pods(api)
        options = {"preconditions": {"uid": f"new-{PODS[0].cgroup_uid}"}}
        body = {"metadata": {"name": "hog", "namespace": "shop"}, "deleteOptions": options}
        request = urllib.request.Request(
            f"{api.url}/api/v1/namespaces/shop/pods/hog/eviction",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {api.token}", "Content-Type": "application/json"},
        )
        urllib.request.urlopen(request)

    kind = replaced_node.Kind((evict,), pods_too=True)
    assert replaced_node.run(CALM, CALM, kind, recover_s=2.0)[0] == "wrong eviction"
    kind = replaced_node.Kind((lambda api: api.forbid("patch", "nodes/status"),))
    assert replaced_node.run(CALM, PRESSED, kind, recover_s=2.0)[0] == "not recovered"


def test_the_judge_reports_more_evictions_than_the_limit_and_a_sync_that_waits() -> None:
    with api_scene.api_scene() as world:
        assert world.until(lambda: not world.unknown, within_s=60.0, step_s=0.1)
        world.write(PRESSED)
        world.carried_out.extend([HOG, HOG])
        recover = [lambda: world.recover(pressed=True)]
        assert runs.judge(world, recover, pressed=True)[0] == "lost rate limit"
        with world.measured():
            api_scene.pause(2 * api_scene.BLOCKED_S)
        assert world.blocked_s > api_scene.BLOCKED_S


def test_the_judge_reports_a_token_that_two_processes_spend() -> None:
    with lifecycle.in_phase(lifecycle.PHASES["sync after the eviction"]) as (world, process):
        process.now.kill()
        assert world.cluster.evicted == [HOG]
        shutil.rmtree(world.state)  # what it has left, as if the directory were not kept
        world.state.mkdir()
        assert lifecycle.next_agent(world)[0] == "lost rate limit"


def test_a_process_is_killed_at_the_call_with_the_number_and_its_eviction_is_known() -> None:
    phase = lifecycle.PHASES["sync that evicts"]
    with lifecycle.in_phase(phase) as (world, process):
        done = process.now.do(SYNC)
        assert done is not None
        assert world.cluster.evicted == [HOG]
        last = len(done.calls) - 1
    with lifecycle.in_phase(phase) as (world, process):
        assert process.now.do(SYNC, Inject(last, "kill")) is None
        assert world.cluster.evicted == [HOG]
    with lifecycle.in_phase(phase) as (world, process):
        assert process.now.do(SYNC, Inject(last + 1000, "kill")) is not None


def test_the_judge_reports_an_eviction_within_the_grace_period_and_a_changed_scenario() -> None:
    scenario = clocks.SCENARIOS["soft"]
    expected = clocks.run(scenario, -1, "")
    at = expected.evicted.index(1)

    def observed(first: int, blocked_s: float = 0.0) -> Observed:
        evicted = tuple(int(number >= first) for number in range(len(scenario.steps)))
        return Observed(evicted, blocked_s, "evicted in a later sync", "")

    assert clocks.judged(observed(at), expected, scenario, 3, "wall clock at 1970")[0] == "evicted as without it"
    assert clocks.judged(observed(at - 1), expected, scenario, 3, "wall clock at 1970")[0] == "not recovered"
    assert clocks.judged(observed(at + 1), expected, scenario, 3, clocks.HANGING)[0] == "not recovered"
    assert clocks.judged(observed(at, 1.5), expected, scenario, 3, clocks.HANGING)[0] == "hang"
    seen_at = scenario.steps.index(clocks.PRESS) + 1
    soonest = seen_at + round(clocks.GRACE_S)
    assert (
        clocks.judged(observed(soonest - 1), expected, scenario, seen_at, "suspended for a day")[0] == "wrong eviction"
    )
    assert "sooner" in clocks.judged(observed(soonest), expected, scenario, seen_at, "suspended for a day")[0]


def test_a_full_disk_refuses_what_needs_space_in_its_directory_alone(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "old").write_bytes(b"x")
    with injected.full(tmp_path / "disk", first=1) as calls:
        fd = os.open(tmp_path / "disk" / "new", os.O_WRONLY | os.O_CREAT)
        with pytest.raises(OSError, match="No space left"):
            os.write(fd, b"x")
        with pytest.raises(OSError, match="No space left"), os.fdopen(fd, "wb") as file:
            file.write(b"x")
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "disk" / "directory").mkdir()
        os.truncate(tmp_path / "disk" / "old", 0)
        (tmp_path / "elsewhere").mkdir()
    assert calls == ["open", "write", "write", "mkdir"]


def test_the_call_with_the_number_fails_and_no_other_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with injected.counted() as calls:
        (tmp_path / "file").stat()
        (tmp_path / "file").read_text()
    assert [call.name for call in calls] == ["stat", "open"]
    with injected.failing(1, "EMFILE"):
        (tmp_path / "file").stat()
        with pytest.raises(OSError, match="Too many open files"):
            (tmp_path / "file").read_text()
        (tmp_path / "file").read_text()


def test_the_table_lists_findings() -> None:
    table = Table()
    table.add("state file", "cut", "refused")
    table.add("state file", "cut", "lost rate limit", "why")
    assert table.findings == ["lost rate limit: state file, cut: why"]
    assert table.text().splitlines()[-1] == (
        "| all | 1 kinds x places | 2 | wrong eviction 0, lost rate limit 1, hang 0, traceback 0, not recovered 0 |"
    )

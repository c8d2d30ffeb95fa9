"""Faults in system calls, kernel files, state and recordings: no wrong eviction, no lost rate limit, no traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import injected, runs
from tests.faults.runs import Table
from tests.faults.scene import CALM, HOG, PRESSED, WEB, Scene, scene
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

"""At most one process holds the lock of a node."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nodeagent.runtime.agent_lock import AgentLock
from tests.support.paths import REPOSITORY

HOLDER = """
import sys, time
from nodeagent.runtime.agent_lock import AgentLock
lock = AgentLock(state_dir=sys.argv[1], kubepods=lambda: sys.argv[2])
print(lock.take(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def kubepods(tmp_path: Path) -> Path:
    (tmp_path / "kubepods").mkdir()
    return tmp_path / "kubepods"


def lock_of(state_dir: Path, kubepods: Path | None) -> AgentLock:
    state_dir.mkdir(exist_ok=True)
    return AgentLock(state_dir=str(state_dir), kubepods=lambda: str(kubepods) if kubepods else None)


@pytest.mark.parametrize("other", ["same", "other"], ids=["one state directory", "two state directories"])
def test_the_second_agent_gets_the_holder_until_the_first_is_killed(other: str, kubepods: Path, tmp_path: Path) -> None:
    second = lock_of(tmp_path / other, kubepods)
    (tmp_path / "same").mkdir(exist_ok=True)
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "same"), str(kubepods)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "\n"
        assert second.take() == f"{kubepods} is locked by process {first.pid}"
        os.kill(first.pid, signal.SIGKILL)
    assert second.take() == ""
    second.release()


def test_without_pods_the_lock_of_the_state_directory_suffices(kubepods: Path, tmp_path: Path) -> None:
    found: list[Path] = []
    first = AgentLock(state_dir=str(tmp_path), kubepods=lambda: str(found[0]) if found else None)
    second = lock_of(tmp_path, kubepods)
    assert first.take() == ""
    assert str(tmp_path) in second.take()
    found.append(kubepods)
    assert first.take() == "", "the waiting agent has released the directory that was free"
    assert str(kubepods) in second.take()
    first.release()
    assert second.take() == ""
    second.release()


def test_a_replaced_directory_is_locked_again(kubepods: Path, tmp_path: Path) -> None:
    first, second = lock_of(tmp_path / "state", None), lock_of(tmp_path / "state", None)
    assert first.take() == ""
    (tmp_path / "state").rename(tmp_path / "away")
    (tmp_path / "state").mkdir()
    assert first.take() == ""
    assert second.take()
    (tmp_path / "state").rename(tmp_path / "away-too")
    (tmp_path / "state").mkdir()
    assert second.take() == ""
    assert first.take(), "the other agent was first"
    with first.writing() as writable:
        assert not writable
    first.release()
    second.release()


def test_a_dry_run_writes_only_without_an_acting_agent_and_does_not_block_one(kubepods: Path, tmp_path: Path) -> None:
    dry_run, acting = lock_of(tmp_path / "state", kubepods), lock_of(tmp_path / "state", kubepods)
    with dry_run.writing() as writable:
        assert writable
    assert acting.take() == ""
    with dry_run.writing() as writable:
        assert not writable
    with acting.writing() as writable:
        assert writable
    assert acting.take() == "", "the lock stays"
    acting.release()


def test_a_missing_directory_needs_no_lock(tmp_path: Path) -> None:
    lock = AgentLock(state_dir=str(tmp_path / "nowhere"), kubepods=lambda: None)
    assert lock.take() == ""
    lock.release()

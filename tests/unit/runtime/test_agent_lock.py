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
def test_the_second_agent_is_told_who_has_it_until_the_first_is_killed(
    other: str, kubepods: Path, tmp_path: Path
) -> None:
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


def test_before_there_are_pods_the_state_directory_alone_tells_two_agents_apart(kubepods: Path, tmp_path: Path) -> None:
    places: list[Path] = []
    first = AgentLock(state_dir=str(tmp_path), kubepods=lambda: str(places[0]) if places else None)
    second = lock_of(tmp_path, kubepods)
    assert first.take() == ""
    assert str(tmp_path) in second.take()
    places.append(kubepods)
    assert first.take() == "", "the one that waits has let go of the directory that it could have"
    assert str(kubepods) in second.take()
    first.release()
    assert second.take() == ""
    second.release()


def test_a_directory_that_was_replaced_is_locked_anew(kubepods: Path, tmp_path: Path) -> None:
    first, second = lock_of(tmp_path / "state", None), lock_of(tmp_path / "state", None)
    assert first.take() == ""
    (tmp_path / "state").rename(tmp_path / "away")
    (tmp_path / "state").mkdir()
    assert first.take() == ""
    assert second.take()
    (tmp_path / "state").rename(tmp_path / "away-too")
    (tmp_path / "state").mkdir()
    assert second.take() == ""
    assert first.take(), "it was too late"
    with first.writing() as ours:
        assert not ours
    first.release()
    second.release()


def test_a_rehearsal_writes_only_where_nobody_acts_and_keeps_nobody_from_it(kubepods: Path, tmp_path: Path) -> None:
    rehearsal, acting = lock_of(tmp_path / "state", kubepods), lock_of(tmp_path / "state", kubepods)
    with rehearsal.writing() as ours:
        assert ours
    assert acting.take() == ""
    with rehearsal.writing() as ours:
        assert not ours
    with acting.writing() as ours:
        assert ours
    assert acting.take() == "", "it is kept"
    acting.release()


def test_what_is_not_there_is_locked_by_nobody(tmp_path: Path) -> None:
    lock = AgentLock(state_dir=str(tmp_path / "nowhere"), kubepods=lambda: None)
    assert lock.take() == ""
    lock.release()

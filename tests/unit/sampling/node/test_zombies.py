"""Zombies are counted by their parents, from real processes and from any content of /proc."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.node import zombies
from nodeagent.sampling.node.zombies import ParentZombies, ZombieCounter, Zombies

PARENT = """
import os, sys
for _ in range(3):
    if os.fork() == 0:
        os._exit(0)
print("ready", flush=True)
sys.stdin.read()
"""
LEADER = """
import ctypes, sys, threading
def other():
    print("ready", flush=True)
    sys.stdin.read()
threading.Thread(target=other, daemon=True).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def put(root: Path, pid: int, state: str, *, parent: int, threads: int = 1, command: str = "sh") -> None:
    (root / f"proc/{pid}").mkdir(parents=True)
    rest = "0 -1 4227084 94 0 0 0 0 0 0 0 20 0"  # fields 7 to 19, of which nothing is read
    (root / f"proc/{pid}/stat").write_text(f"{pid} ({command}) {state} {parent} 1 1 {rest} {threads} 0 45937 0\n")


def run(program: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def careless() -> Iterator[subprocess.Popen[bytes]]:
    """A process with three zombies."""
    yield from run(PARENT)


@pytest.fixture
def without_its_first_thread() -> Iterator[subprocess.Popen[bytes]]:
    """A process whose first thread has ended."""
    yield from run(LEADER)


def of(pid: int) -> list[int]:
    found = zombies.count_zombies(Host("/"))
    assert found is not None
    assert found.complete
    assert found.total == sum(each.zombies for each in found.parents)
    return [each.zombies for each in found.parents if each.pid == pid]


def test_the_zombies_of_a_real_process_are_its_own(careless: subprocess.Popen[bytes]) -> None:
    until(lambda: of(careless.pid) == [3])


def until(condition: Callable[[], bool]) -> None:
    for _ in range(200):
        if condition():
            return
        os.sched_yield()
    raise AssertionError("not within 200 counts")


def test_a_process_whose_first_thread_has_ended_is_no_zombie(
    without_its_first_thread: subprocess.Popen[bytes],
) -> None:
    stat = Path(f"/proc/{without_its_first_thread.pid}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
    assert of(os.getpid()) == []


def test_the_parent_with_the_most_zombies_is_the_first(tmp_path: Path) -> None:
    put(tmp_path, 1, "S", parent=0)
    put(tmp_path, 20, "Z", parent=7, command="a) Z 9 (")
    for pid in (21, 22):
        put(tmp_path, pid, "Z", parent=8)
    put(tmp_path, 23, "Z", parent=0, threads=0)
    put(tmp_path, 24, "Z", parent=9, threads=2)
    put(tmp_path, 25, "R", parent=9, command="Z")
    (tmp_path / "proc/26").mkdir()  # it ends meanwhile
    parents = (ParentZombies(8, 2), ParentZombies(0, 1), ParentZombies(7, 1))
    assert zombies.count_zombies(Host(str(tmp_path))) == Zombies(4, parents, complete=True)


def test_a_count_is_bounded_in_processes_and_in_time(tmp_path: Path) -> None:
    for pid in range(1, zombies.CHUNK + 10):
        put(tmp_path, pid, "Z", parent=7)
    host = Host(str(tmp_path))
    pauses: list[float] = []
    few = zombies.count_zombies(host, max_processes=5, pause=pauses.append)
    assert few == Zombies(5, (ParentZombies(7, 5),), complete=False)
    assert pauses == []
    clock = iter((0.0, 10.0))
    slow = zombies.count_zombies(host, max_s=9.0, pause=pauses.append, monotonic=lambda: next(clock))
    assert slow == Zombies(zombies.CHUNK, (ParentZombies(7, zombies.CHUNK),), complete=False)
    every = zombies.count_zombies(host, pause=pauses.append)
    assert every == Zombies(zombies.CHUNK + 9, (ParentZombies(7, zombies.CHUNK + 9),), complete=True)
    assert pauses == [zombies.PAUSE_S]


def test_without_proc_nothing_is_known(tmp_path: Path) -> None:
    assert zombies.count_zombies(Host(str(tmp_path))) is None
    counter = ZombieCounter(Host(str(tmp_path)))
    assert counter.latest is None
    counter.step()
    assert counter.latest is None


@given(content=st.binary(max_size=80) | st.from_regex(rb"1 \(a\) Z[ 0-9a-z\xff]{0,60}\Z"))
def test_any_content_of_a_file_is_a_zombie_or_none(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("node")
    (root / "proc/1").mkdir(parents=True)
    (root / "proc/1/stat").write_bytes(content)
    found = zombies.count_zombies(Host(str(root)))
    assert found is not None
    assert found.total in (0, 1)


def test_counts_take_at_most_their_share_of_a_core(tmp_path: Path) -> None:
    put(tmp_path, 5, "Z", parent=7)
    now = [0.0]
    cpu: list[float] = []
    counter = ZombieCounter(
        Host(str(tmp_path)), monotonic=lambda: now[0], thread_time=lambda: cpu.pop(0) if cpu else 0.0
    )

    def total_after(at: float) -> int:
        now[0] = at
        counter.step()
        assert counter.latest is not None
        return counter.latest.total

    assert total_after(0.0) == 1
    put(tmp_path, 6, "Z", parent=7)
    assert total_after(zombies.EVERY_S - 5) == 1
    cpu += [0.0, 0.02]  # this count takes 20 ms
    assert total_after(zombies.EVERY_S) == 2
    put(tmp_path, 7, "Z", parent=7)
    assert total_after(2 * zombies.EVERY_S) == 2
    assert total_after(zombies.EVERY_S + 0.02 / zombies.CPU_SHARE) == 3


def test_an_old_count_is_not_known(tmp_path: Path) -> None:
    put(tmp_path, 5, "Z", parent=7)
    now = [0.0]
    counter = ZombieCounter(Host(str(tmp_path)), monotonic=lambda: now[0])
    counter.step()
    now[0] = zombies.OLD_S
    assert counter.latest is not None
    now[0] += 1
    assert counter.latest is None


def test_while_pids_are_short_they_are_counted_sooner(tmp_path: Path) -> None:
    put(tmp_path, 5, "Z", parent=7)
    now = [0.0]
    counter = ZombieCounter(Host(str(tmp_path)), monotonic=lambda: now[0])
    counter.step()
    put(tmp_path, 6, "Z", parent=7)
    now[0] = zombies.SHORT_S - 1
    assert not counter.due_soon()
    counter.step()
    assert counter.latest is not None
    assert counter.latest.total == 1
    now[0] = zombies.SHORT_S
    assert counter.due_soon()
    counter.step()
    assert counter.latest.total == 2
    now[0] += 1
    put(tmp_path, 8, "Z", parent=7)
    counter.step()
    assert counter.latest.total == 2

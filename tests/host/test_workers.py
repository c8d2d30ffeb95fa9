"""A thread that hangs or has died is told of by name, and only then."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from nodeagent.host import workers
from tests.livenode import until


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """What hanging threads wait for; set at the end."""
    event = threading.Event()
    yield event
    event.set()


def _named(name: str) -> list[str]:
    return [each.message for each in workers.stuck() if each.name == name]


def test_a_thread_that_waits_for_work_is_not_stuck(release: threading.Event) -> None:
    thread = workers.begin(release.wait, name="idle-1")
    assert thread is not None
    assert _named("idle-1") == []


def test_a_step_that_takes_longer_than_it_may_is_told_with_its_name_until_it_ends(release: threading.Event) -> None:
    def work() -> None:
        with workers.at("a walk", limit_s=0.0):
            release.wait()

    thread = workers.begin(work, name="walker-7")
    assert thread is not None
    until(lambda: _named("walker-7"), "the stuck thread", 20.0)
    [found] = [each for each in workers.stuck() if each.name == "walker-7"]
    assert found.kind == "walker"
    assert found.message == "has been at a walk for more than 0s"
    assert "the thread walker-7 has been at a walk" in str(workers.notes())
    release.set()
    thread.join(20)
    assert _named("walker-7") == []


def test_a_step_within_its_limit_is_not_told(release: threading.Event) -> None:
    inside = threading.Event()

    def work() -> None:
        with workers.at("a request", limit_s=3600.0):
            inside.set()
            release.wait()

    workers.begin(work, name="patient")
    assert inside.wait(20)
    assert _named("patient") == []


def test_a_step_inside_a_step_leaves_the_outer_one_running(release: threading.Event) -> None:
    def work() -> None:
        with workers.at("the whole", limit_s=0.0):
            with workers.at("a part", limit_s=3600.0):
                pass
            release.wait()

    workers.begin(work, name="nested")
    until(lambda: _named("nested"), "the stuck thread", 20.0)
    assert "the whole" in _named("nested")[0]


def test_a_thread_that_died_is_told_with_its_error_until_a_successor_is_begun(release: threading.Event) -> None:
    def work() -> None:
        raise ValueError("no such thing")

    thread = workers.begin(work, name="mortal")
    assert thread is not None
    thread.join(20)
    assert _named("mortal") == ["has died: ValueError: no such thing"]
    workers.begin(release.wait, name="mortal")
    until(lambda: not _named("mortal"), "the successor", 20.0)


def test_a_thread_that_ends_by_itself_is_not_told() -> None:
    thread = workers.begin(lambda: None, name="done")
    assert thread is not None
    thread.join(20)
    assert _named("done") == []


def test_steps_of_the_main_thread_are_not_watched() -> None:
    with workers.at("anything", limit_s=0.0):
        assert _named(threading.current_thread().name) == []


PROGRAM = """
import os, resource
from nodeagent.host import workers
from tests.livenode import until
os.setuid(65534)  # the limit on processes does not hold for root
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
print(workers.begin(lambda: None, name="late"), [each.message[:18] for each in workers.stuck()])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give up root")
def test_no_pid_left_for_a_thread_is_told_and_raises_nothing() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    assert ran.stdout == "None ['could not be begun']\n"

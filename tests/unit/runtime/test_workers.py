"""A thread that hangs or has died is reported by name, and no other thread."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from nodeagent.runtime import workers
from tests.support.livenode import until


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Hanging threads wait for it; set at the end."""
    event = threading.Event()
    yield event
    event.set()


def _named(name: str) -> list[str]:
    return [each.message for each in workers.stuck_workers() if each.name == name]


def test_a_thread_that_waits_for_work_is_not_stuck(release: threading.Event) -> None:
    thread = workers.start_thread(release.wait, name="idle-1")
    assert thread is not None
    assert _named("idle-1") == []


def test_a_step_beyond_its_limit_is_reported_with_its_name_until_it_ends(release: threading.Event) -> None:
    def work() -> None:
        with workers.step("a walk", limit_s=0.0):
            release.wait()

    thread = workers.start_thread(work, name="walker-7")
    assert thread is not None
    until(lambda: _named("walker-7"), "the stuck thread", 20.0)
    [found] = [each for each in workers.stuck_workers() if each.name == "walker-7"]
    assert found.kind == "walker"
    assert found.message == "stuck in a walk for more than 0s"
    assert "thread walker-7 stuck in a walk" in str(workers.stuck_notes())
    release.set()
    thread.join(20)
    assert _named("walker-7") == []


def test_a_step_within_its_limit_is_not_reported(release: threading.Event) -> None:
    inside = threading.Event()

    def work() -> None:
        with workers.step("a request", limit_s=3600.0):
            inside.set()
            release.wait()

    workers.start_thread(work, name="patient")
    assert inside.wait(20)
    assert _named("patient") == []


def test_a_step_inside_a_step_leaves_the_outer_one_running(release: threading.Event) -> None:
    def work() -> None:
        with workers.step("the outer step", limit_s=0.0):
            with workers.step("a part", limit_s=3600.0):
                pass
            release.wait()

    workers.start_thread(work, name="nested")
    until(lambda: _named("nested"), "the stuck thread", 20.0)
    assert "the outer step" in _named("nested")[0]


def test_a_dead_thread_is_reported_with_its_error_until_its_successor_starts(release: threading.Event) -> None:
    def work() -> None:
        raise ValueError("no such thing")

    thread = workers.start_thread(work, name="mortal")
    assert thread is not None
    thread.join(20)
    assert _named("mortal") == ["has died: ValueError: no such thing"]
    workers.start_thread(release.wait, name="mortal")
    until(lambda: not _named("mortal"), "the successor", 20.0)


def test_a_thread_that_ends_by_itself_is_not_reported() -> None:
    thread = workers.start_thread(lambda: None, name="done")
    assert thread is not None
    thread.join(20)
    assert _named("done") == []


def test_steps_of_the_main_thread_are_not_watched() -> None:
    with workers.step("anything", limit_s=0.0):
        assert _named(threading.current_thread().name) == []


PROGRAM = """
import os, resource
from nodeagent.runtime import workers
os.setuid(65534)  # root has no process limit
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
print(workers.start_thread(lambda: None, name="late"), [each.message[:20] for each in workers.stuck_workers()])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give up root")
def test_a_thread_without_a_free_pid_is_reported_without_an_error() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    assert run.stdout == "None ['could not be started']\n"


def test_a_lasting_worker_runs_again_in_the_same_thread_until_it_ends_by_itself() -> None:
    threads: list[int] = []

    def work() -> None:
        threads.append(threading.get_ident())
        if len(threads) < 3:
            raise MemoryError

    before = workers.failure_counts().get("phoenix", 0)
    thread = workers.make_thread(work, name="phoenix-2")
    assert workers.start(thread)
    thread.join(60)
    assert len(threads) == 3
    assert len(set(threads)) == 1
    assert workers.failure_counts()["phoenix"] == before + 2
    assert "fails and runs again" in _named("phoenix-2")[0]
    assert not workers.failing_workers()
    soon = time.monotonic() + workers.MAX_WORKER_RETRY_S + workers.RECOVERED_AFTER_S
    assert "phoenix-2" not in [each.name for each in workers.stuck_workers(soon)], "it has recovered"


def test_a_worker_that_fails_for_five_minutes_is_listed_as_failing_but_a_hanging_one_is_not(
    release: threading.Event,
) -> None:
    def hang() -> None:
        with workers.step("a dead mount", limit_s=0.0):
            release.wait()

    def work() -> None:
        if not release.is_set():
            raise ValueError("for ever")

    hanging, failing = (workers.make_thread(each, name=name) for each, name in ((hang, "hangs"), (work, "fails")))
    assert workers.start(hanging)
    assert workers.start(failing)
    until(lambda: _named("fails"), "the failure", 20.0)
    assert workers.failing_workers() == ()
    # At that time it would have recovered: a failing worker fails at least once per minute.
    assert workers.failing_workers(time.monotonic() + workers.FAILED_S + 1) == ()
    workers._registry.failing["fails"] = workers._registry.failing["fails"]._replace(
        since=time.monotonic() - workers.FAILED_S - 1
    )
    [reason] = workers.failing_workers()
    assert reason.startswith("worker fails failing for 301s, limit 300s: ValueError: for ever")
    release.set()
    failing.join(60)


WAITS = """
import os, resource, threading
from nodeagent.runtime import workers
soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (0, hard))
ran = []
threads = [workers.make_thread(lambda n=n: ran.append(n), name=f"late-{n}") for n in range(3)]
print([workers.start(each) for each in threads], len(workers.stuck_workers()), workers.failing_workers())
print([workers.start_waiting(now) for now in (0.0, 0.1, 0.5, 1.5, 3.5, 7.5, 12.5)])
workers.join(threads[1], 0.0)
resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
print(workers.start_waiting(100.0), [each.join() for each in (threads[0], threads[2])], ran, workers.stuck_workers())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give up root")
def test_a_thread_without_a_pid_is_started_later_with_longer_waits_unless_it_was_joined() -> None:
    run = subprocess.run([sys.executable, "-c", WAITS], check=True, capture_output=True, text=True)
    first, second, third = run.stdout.splitlines()
    assert first == "[False, False, False] 3 ()"
    assert second == "[0.5, 0.4, 1.0, 2.0, 4.0, 5.0, 5.0]"
    assert third == "inf [None, None] [0, 2] ()"

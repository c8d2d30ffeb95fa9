"""Slow calls run beside the loop, and a failed call keeps the last result."""

import threading

from nodeagent.runtime.periodic import Periodic
from tests.support.livenode import until


def test_the_first_result_stays_until_the_next_one_and_a_failure_keeps_the_last() -> None:
    answers = iter([1, 2])
    more = threading.Semaphore(0)

    def work() -> int:
        more.acquire()
        return next(answers)

    periodic = Periodic(work, first=0, every_s=0.001, name="test")
    assert periodic.latest == 0
    more.release()
    until(lambda: periodic.latest == 1, "the first answer")
    more.release()
    until(lambda: periodic.latest == 2, "the second answer")
    more.release()
    until(lambda: periodic.failure, "the failure")
    assert "StopIteration" in periodic.failure
    assert periodic.latest == 2
    periodic.close()
    more.release()


def test_a_call_that_is_wanted_soon_does_not_wait_for_the_interval() -> None:
    calls: list[int] = []
    called = threading.Event()

    def work() -> None:
        calls.append(1)
        called.set()

    periodic = Periodic(work, first=None, every_s=3600.0, name="soon")
    try:
        assert called.wait(10)
        called.clear()
        periodic.call_soon()
        assert called.wait(10)
        assert len(calls) == 2
    finally:
        periodic.close()

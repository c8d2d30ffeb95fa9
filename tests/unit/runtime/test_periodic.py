"""What is slow is done beside the loop, and its failures keep the last answer."""

import threading

from nodeagent.runtime.periodic import Periodic
from tests.support.livenode import until


def test_the_first_answer_is_there_until_there_is_another_and_a_failure_keeps_the_last() -> None:
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

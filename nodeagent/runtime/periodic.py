"""Something slow that is done now and then, by a thread of its own, so that the loop never waits for it."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from nodeagent.runtime import workers

T = TypeVar("T")

LOOK_S = 60.0
"""A call that takes longer is told: what is done here takes milliseconds."""


class Periodic(Generic[T]):
    """Calls `work` at once and then every `every_s`; `latest` is its last answer.

    A call that never ends keeps the last answer and costs one sleeping thread. A call that fails keeps it as well, and
    `failure` says why.
    """

    def __init__(self, work: Callable[[], T], *, first: T, every_s: float, name: str) -> None:
        self.latest = first
        self.failure = ""
        self._work = work
        self._every_s = every_s
        self._stopping = threading.Event()
        self._thread = workers.make_thread(self._run, name=name)
        workers.start(self._thread)

    def close(self) -> None:
        """No further call; one that is under way is left to itself."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with workers.step("one look", limit_s=LOOK_S):
                    self.latest = self._work()
                self.failure = ""
            except Exception as error:
                self.failure = f"{type(error).__name__}: {error}"
            self._stopping.wait(self._every_s)

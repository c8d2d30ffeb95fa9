"""Calls a slow function repeatedly in a thread of its own, so that the loop never waits for it."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from nodeagent.runtime import workers

T = TypeVar("T")

MAX_CALL_S = 60.0
"""A longer call is reported as stuck. The calls take milliseconds."""


class Periodic(Generic[T]):
    """Calls `work` at once and then every `every_s`; `latest` is its last result.

    A call that never ends keeps the last result and costs one sleeping thread. A failed call keeps it as well, and
    `failure` has the reason.
    """

    def __init__(self, work: Callable[[], T], *, first: T, every_s: float, name: str) -> None:
        self.latest = first
        self.failure = ""
        self._work = work
        self._every_s = every_s
        self._stopping = threading.Event()
        self._due = threading.Event()
        self._thread = workers.make_thread(self._run, name=name)
        workers.start(self._thread)

    def call_soon(self) -> None:
        """Call now, or right after the running call."""
        self._due.set()

    def close(self) -> None:
        """Begin no further call. Does not wait for a running one."""
        self._stopping.set()
        self._due.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._due.clear()
            try:
                with workers.step("a periodic call", limit_s=MAX_CALL_S):
                    self.latest = self._work()
                self.failure = ""
            except Exception as error:
                self.failure = f"{type(error).__name__}: {error}"
            self._due.wait(self._every_s)

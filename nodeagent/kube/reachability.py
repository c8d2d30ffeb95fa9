"""Since when the API server has been unreachable.

Only requests count: a silent stream may be a watch without changes, so the next request finds out. Any HTTP answer
counts as an answer, whatever its status. Time that the machine was suspended does not count as an outage.
"""

import threading
import time
from collections.abc import Callable

from nodeagent.model import MIN_SUSPEND_S
from nodeagent.runtime import clock


class ApiReachability:
    """The outage of one API server, if there is one. Safe to use from any thread."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, boot: Callable[[], float] = clock.boottime
    ) -> None:
        """`clock` stops while the machine is suspended, `boot` does not."""
        self.clock = clock
        self._boot = boot
        self._suspended_s = boot() - clock()
        self._lock = threading.Lock()
        self._answered_at = float("-inf")
        self._unanswered_since: float | None = None
        """On `clock`."""
        self._earlier_since: float | None = None
        """The same of `continue_outage`, until the first request."""

    def continue_outage(self, earlier: "ApiReachability") -> None:
        """An outage that `earlier` saw of the same server goes on, if the first request is not answered either."""
        since = earlier._unanswered_since
        self._earlier_since = earlier._earlier_since if since is None else since

    @property
    def unreachable_since(self) -> float | None:
        """CLOCK_BOOTTIME at which the first of the unanswered requests began, plus the time of later suspends; None if
        the last request was answered, or none was sent."""
        since = self._unanswered_since
        if since is None:
            return None
        suspended_s = self._boot() - self.clock()
        if suspended_s > self._suspended_s + MIN_SUSPEND_S:
            self._suspended_s = suspended_s
        return since + self._suspended_s

    def answered(self) -> bool:
        """A request was answered now. True if that ends an outage."""
        with self._lock:
            was_out = self._unanswered_since is not None
            self._answered_at = self.clock()
            self._unanswered_since = self._earlier_since = None
        return was_out

    def unanswered(self, begun_at: float) -> None:
        """A request that began at `begun_at` on `clock` was given up. It does not count if another request was answered
        since then."""
        with self._lock:
            if self._unanswered_since is None and begun_at >= self._answered_at:
                self._unanswered_since = begun_at if self._earlier_since is None else self._earlier_since

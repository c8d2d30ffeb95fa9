"""Waiting longer after each failure, with jitter, up to a limit."""

import random
from typing import Final

FIRST_S: Final = 0.5
"""A restarted API server answers again within a second or two; most single failures are over sooner."""
LAST_S: Final = 30.0
"""An hour of outage costs 120 attempts per worker; after it the agent is back within half a minute."""


class Backoff:
    """Full jitter: each wait is uniform between half and all of a delay that doubles, so that a fleet spreads out."""

    def __init__(self, *, first_s: float = FIRST_S, last_s: float = LAST_S, rng: random.Random | None = None) -> None:
        self._first_s = first_s
        self._last_s = last_s
        self._rng = rng or random.Random()  # noqa: S311 - spreads load, guards nothing
        self._failures = 0

    def succeeded(self) -> None:
        """The next failure is a first one again."""
        self._failures = 0

    def failed(self, retry_after_s: float | None = None) -> float:
        """Seconds to wait after one more failure; never less than the server asked for, up to the limit."""
        delay = min(self._last_s, self._first_s * 2.0 ** min(self._failures, 30))
        self._failures += 1
        wait = delay * self._rng.uniform(0.5, 1.0)
        return max(wait, min(retry_after_s or 0.0, self._last_s))

"""Longer waits after each failure, and before each repetition of a write that another client undoes; with jitter."""

import random
from typing import Final

FIRST_S: Final = 0.5
"""A restarted API server answers again within two seconds; most single failures are shorter."""
LAST_S: Final = 30.0
"""An outage of an hour costs 120 attempts per worker; after it the agent continues within half a minute."""


class RetryBackoff:
    """Each wait is uniform between half and all of a delay that doubles, so that a fleet spreads out."""

    def __init__(self, *, first_s: float = FIRST_S, last_s: float = LAST_S, rng: random.Random | None = None) -> None:
        self._first_s = first_s
        self._last_s = last_s
        self._rng = rng or random.Random()  # noqa: S311 - spreads load, guards nothing
        self._failures = 0

    def succeeded(self) -> None:
        """Reset: the next wait is a first one."""
        self._failures = 0

    def failed(self, retry_after_s: float | None = None) -> float:
        """Seconds to wait after one more failure; at least `retry_after_s`, at most the limit."""
        delay = min(self._last_s, self._first_s * 2.0 ** min(self._failures, 30))
        self._failures += 1
        wait = delay * self._rng.uniform(0.5, 1.0)
        return max(wait, min(retry_after_s or 0.0, self._last_s))


UNDELAYED_REPEATS: Final = 5
"""Repetitions without a wait: the answer to a kubelet that resets a condition takes 0.1 s, also to two."""
REPEAT_FIRST_S: Final = 1.0
REPEAT_LAST_S: Final = 30.0
"""Wait between two repetitions beyond the burst, first and last: 11 writes in the first minute of a conflict, then 2 to
4 a minute; 5,000 nodes then send 170 to 330 writes a second."""
RECOVERY_S: Final = 5.0
"""A write that stayed for so long removes one repetition: a kubelet resets every 10 s, so it never uses up the
burst."""


class Restraint:
    """Limits how often the same value is written to the same object again while another client undoes it.

    The first `UNDELAYED_REPEATS` repetitions do not wait. Each further one waits twice as long as the one before. Only
    the time for which the last write stayed counts, not the wait: a slow conflict does not become fast again.
    """

    def __init__(self, *, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()  # noqa: S311 - spreads load, guards nothing
        self._level = 0.0
        """Repetitions that were undone."""
        self._wrote_at = float("-inf")
        self._due = False
        self._not_before = float("-inf")

    def wait_s(self, now: float) -> float:
        """Seconds until the next repetition may be written; 0: now, and it counts as written."""
        if not self._due:
            self._due = True
            self._level = max(0.0, self._level - (now - self._wrote_at) / RECOVERY_S)
            over = self._level - UNDELAYED_REPEATS
            delay_s = min(REPEAT_LAST_S, REPEAT_FIRST_S * 2.0 ** min(over, 30.0)) if over >= 0.0 else 0.0
            self._not_before = now + delay_s * self._rng.uniform(0.5, 1.0)
        if now < self._not_before:
            return self._not_before - now
        self._level += 1.0
        self._wrote_at, self._due = now, False
        return 0.0

    @property
    def exhausted(self) -> bool:
        """True if the burst is used up: each repetition waits longer."""
        return self._level >= UNDELAYED_REPEATS

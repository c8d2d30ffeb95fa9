"""Waiting longer after each failure, and before each repetition of what does not stay written, with jitter."""

import random
from typing import Final

FIRST_S: Final = 0.5
"""A restarted API server answers again within a second or two; most single failures are over sooner."""
LAST_S: Final = 30.0
"""An hour of outage costs 120 attempts per worker; after it the agent is back within half a minute."""


class RetryBackoff:
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


BURST: Final = 5
"""Repetitions at once: a kubelet that resets a condition is answered within 0.1 s (FIELD.md 6), and so are two."""
REPEAT_FIRST_S: Final = 1.0
REPEAT_LAST_S: Final = 30.0
"""Between two repetitions beyond the burst, first and last: 11 writes in the first minute of a fight, then 2 to 4 a
minute; 5,000 nodes then make 170 to 330 writes a second."""
HELD_S: Final = 5.0
"""What stayed for so long takes one repetition back: a kubelet resets every 10 s, so that it never fills the burst."""


class Restraint:
    """Bounds how often the same thing is written to the same object again, when somebody takes it away each time.

    The first `BURST` repetitions are free. Beyond them each waits twice as long as the one before. What counts is how
    long the last write stayed, not how long this one waited: a fight does not become quick again by being slow.
    """

    def __init__(self, *, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()  # noqa: S311 - spreads load, guards nothing
        self._level = 0.0
        """Repetitions that did not stay."""
        self._wrote_at = float("-inf")
        self._due = False
        self._not_before = float("-inf")

    def ask(self, now: float) -> float:
        """It has to be written again. Returns the seconds until it may; 0: now, and it counts as written."""
        if not self._due:
            self._due = True
            self._level = max(0.0, self._level - (now - self._wrote_at) / HELD_S)
            over = self._level - BURST
            wait_s = min(REPEAT_LAST_S, REPEAT_FIRST_S * 2.0 ** min(over, 30.0)) if over >= 0.0 else 0.0
            self._not_before = now + wait_s * self._rng.uniform(0.5, 1.0)
        if now < self._not_before:
            return self._not_before - now
        self._level += 1.0
        self._wrote_at, self._due = now, False
        return 0.0

    @property
    def contested(self) -> bool:
        """Whether the burst is used up: it is written more and more seldom."""
        return self._level >= BURST


class Tokens:
    """A token bucket."""

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._tokens = burst
        self._at: float | None = None

    def take(self, now: float) -> bool:
        """Take one, if there is one."""
        if self._at is not None:
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_s)
        self._at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

"""CLOCK_BOOTTIME, the clock of every interval in the agent."""

import time


def boottime() -> float:
    """Seconds on CLOCK_BOOTTIME: monotonic, counts suspend, the same across restarts of the process."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)

"""The two clocks: CLOCK_BOOTTIME for everything that is compared, wall time for stamps that API objects carry."""

import time
from datetime import UTC, datetime


def boottime() -> float:
    """Seconds on CLOCK_BOOTTIME: monotonic, counts suspend, the same across restarts of the process."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def rfc3339(epoch_s: float) -> str:
    """`metav1.Time`: RFC 3339 in UTC with whole seconds, as the API server writes it."""
    return datetime.fromtimestamp(int(epoch_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_stamp(epoch_s: float) -> str:
    """`metav1.MicroTime`: RFC 3339 in UTC with microseconds, as events.k8s.io wants its eventTime."""
    return datetime.fromtimestamp(epoch_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

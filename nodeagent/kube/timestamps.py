"""Wall time in the form of the API's objects."""

from datetime import UTC, datetime


def rfc3339(epoch_s: float) -> str:
    """`metav1.Time`: RFC 3339 in UTC with whole seconds, as the API server writes it."""
    return datetime.fromtimestamp(int(epoch_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rfc3339_micro(epoch_s: float) -> str:
    """`metav1.MicroTime`: RFC 3339 in UTC with microseconds, as eventTime and the times of a Lease require."""
    return datetime.fromtimestamp(epoch_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

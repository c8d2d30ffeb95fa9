"""The hook before an eviction of the soft tier: what is ordered, and how it ended."""

import enum
from typing import NamedTuple

from nodeagent.model.signals import Signal


class HookResult(enum.StrEnum):
    """How a hook ended."""

    DONE = "done"
    """Exit code 0, or an answer of HTTP 2xx."""
    FAILED = "failed"
    """Another exit code or answer, or it could not be started."""
    TIMED_OUT = "timed-out"
    """It was ended at its deadline, or its result was lost in a restart of the agent."""
    DRY_RUN = "dry-run"
    """Nothing ran."""


class HookOrder(NamedTuple):
    """A hook to run before this pod is evicted."""

    pod_uid: str
    namespace: str
    name: str
    cgroup: str
    """Of the pod, below the hierarchy's root."""
    signal: Signal
    deficit: int
    """What must be released."""
    available: int
    until: float
    """CLOCK_BOOTTIME of its deadline."""

    @property
    def key(self) -> str:
        """`namespace/name`, for texts."""
        return f"{self.namespace}/{self.name}"


class HookOutcome(NamedTuple):
    """The end of a hook."""

    plan_id: str
    """The decision that ordered it."""
    pod_uid: str
    result: HookResult
    message: str
    """Exit code and the end of its output, the HTTP status, or why it did not run."""
    at: float
    ordered_again: bool = False
    """It was not started, because the state could not be saved: a later decision orders it again."""

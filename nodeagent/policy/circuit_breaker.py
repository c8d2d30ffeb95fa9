"""The circuit breaker of each signal: it opens after evictions in a row that released less than half of the
prediction."""

from collections.abc import Mapping
from typing import NamedTuple

from nodeagent.config.schema import Config
from nodeagent.model import Refusal, RefusalCode, Signal


class Failures(NamedTuple):
    """Evictions in a row that released less than half of the prediction."""

    times: int
    last: float


def with_failures(
    failures: Mapping[str, Failures], signal: Signal, times: int, *, now: float, config: Config
) -> Mapping[str, Failures]:
    """The failures by signal with so many more of this one."""
    earlier = failures.get(signal.value)
    if earlier is not None and not 0 <= now - earlier.last <= config.relief.failure_memory_s:
        earlier = None
    return {**failures, signal.value: Failures((earlier.times if earlier else 0) + times, now)}


def refusal(state: Mapping[str, Failures], signal: Signal, *, now: float, config: Config) -> Refusal | None:
    """Why no more pods are evicted for `signal` after evictions without enough relief, or None. `state`: by signal."""
    failures = state.get(signal.value)
    if failures is None or failures.times < config.relief.failures_before_stop:
        return None
    since_s = now - failures.last
    if not 0 <= since_s <= config.relief.failure_memory_s:
        return None
    return Refusal(
        RefusalCode.CIRCUIT_BREAKER,
        f"{signal.value}: {failures.times} evictions in a row released less than half of the prediction; "
        f"stopped for {config.relief.failure_memory_s - since_s:.0f}s more",
    )

"""The samples that a threshold reads, one stream for each signal and memory model: plausible, new, in a row.

A sample is unknown if its reader reports so, and also if it cannot be true: not a whole number, negative where nothing
can be, more available than there is, no or an implausible capacity, read too long ago, or read in the future.
"""

from typing import NamedTuple

from nodeagent.config.schema import Config
from nodeagent.model import Observation
from nodeagent.policy import stall, trend


class StreamMemory(NamedTuple):
    """What one judgement leaves of a stream to the next."""

    read_at: float | None = None
    """Of its last good sample."""
    good_samples: int = 0
    """New good samples in a row since the start; stays at `startup.freshSamples` once there."""
    unknown_since: float | None = None
    history: trend.History = ()


class StreamSample(NamedTuple):
    """One stream at this judgement."""

    name: str
    observation: Observation
    unknown: str
    """Why the sample is unknown; empty if it is good."""
    is_new: bool
    """Read later than the previous good sample."""
    good_samples: int
    history: trend.History
    stopped_s: float
    """How long the clocks of its thresholds stood still: the stream was unknown until now."""
    is_continuous: bool
    """It was not unknown for too long: the stages of its thresholds still count."""


def unusable(observation: Observation, *, now: float, stale_after_s: float) -> str:
    """Why a sample is unknown; empty if it is plausible. Comparisons are written so that NaN fails them."""
    if implausible := observation.implausible:
        return implausible
    age = now - observation.read_at
    if not age <= stale_after_s:
        return f"its sample is {age:.1f}s old, limit {stale_after_s:g}s"
    if not age >= -stall.CLOCK_SLACK_S:
        return f"its sample is from {-age:.1f}s in the future"
    return ""


def fresh_samples(config: Config) -> int:
    """Good samples in a row that a threshold needs after the start before it is due."""
    return 0 if config.ranking.kubelet else config.startup.fresh_samples


def read_stream(
    name: str, observation: Observation, memory: StreamMemory, *, now: float, config: Config
) -> StreamSample:
    """The stream with this observation; `memory` is what the previous judgement left of it."""
    stale_after_s = config.sampling.stale_after_s
    unknown = unusable(observation, now=now, stale_after_s=stale_after_s)
    tolerance_s = 0.0 if config.ranking.kubelet else stale_after_s
    since = _unknown_since(memory, now=now, tolerance_s=tolerance_s)
    good, history = memory.good_samples, memory.history
    if unknown:
        still_starting = good < fresh_samples(config)
        return StreamSample(
            name,
            observation,
            unknown,
            is_new=False,
            good_samples=0 if still_starting else good,
            history=history,
            stopped_s=0.0,
            is_continuous=now - since < tolerance_s,
        )
    previous = memory.read_at
    # A time in the future is from before a reboot: it must not make every sample seem old.
    is_new = previous is None or observation.read_at > previous or previous > now + stall.CLOCK_SLACK_S
    available = observation.available
    assert available is not None
    return StreamSample(
        name,
        observation,
        unknown,
        is_new=is_new,
        good_samples=min(good + is_new, max(good, fresh_samples(config))),
        history=trend.extend(history, read_at=observation.read_at, available=available) if is_new else history,
        stopped_s=now - since,
        is_continuous=now - since <= tolerance_s,
    )


def _unknown_since(memory: StreamMemory, *, now: float, tolerance_s: float) -> float:
    """Since when a stream is unknown; `now` if it is known. Too long without a sample (the machine was suspended, the
    agent was not running) counts as unknown too."""
    since = memory.unknown_since if memory.unknown_since is not None else now
    last = memory.read_at if memory.read_at is not None else now
    if tolerance_s and now - last > tolerance_s:
        since = min(since, last)
    return min(since, now)

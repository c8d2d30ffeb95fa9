"""Snapshots and thresholds in one line each, for the tests of the policy's state machines."""

from collections.abc import Mapping

from nodeagent.config.schema import Config, RankingConfig, StartupConfig
from nodeagent.model import (
    Amount,
    MemoryModel,
    NodeSnapshot,
    Observation,
    PodView,
    Signal,
    SignalVerdict,
    Stall,
    Threshold,
    ThresholdVerdict,
)
from nodeagent.policy.thresholds import ThresholdState, judge

MI = 1 << 20
GI = 1 << 30

KUBELET = Config(ranking=RankingConfig(kubelet=True))
"""Kubelet-compatible mode: no observe-only, no damping, unknown is forgotten."""

EAGER = Config(startup=StartupConfig(fresh_samples=1))
"""Our own mode, acting on the first good sample."""


def quantity(amount: int) -> Amount:
    return Amount(amount, None, str(amount))


def percent(value: float) -> Amount:
    return Amount(None, value, f"{value:g}%")


def hard(signal: Signal, value: Amount | int, *, reclaim: Amount | int | None = None) -> Threshold:
    return soft(signal, value, grace_s=0.0, reclaim=reclaim)


def soft(signal: Signal, value: Amount | int, *, grace_s: float, reclaim: Amount | int | None = None) -> Threshold:
    return Threshold(
        signal,
        quantity(value) if isinstance(value, int) else value,
        grace_s,
        quantity(reclaim) if isinstance(reclaim, int) else reclaim,
    )


def sample(
    signal: Signal, available: int | None, *, capacity: int | None = 8 * GI, read_at: float, reason: str = "unreadable"
) -> Observation:
    return Observation(signal, available, capacity, read_at, "test", "" if available is not None else reason)


def snapshot(
    at: float,
    *observations: Observation,
    mem_available: Observation | None = None,
    stalls: tuple[Stall, ...] = (),
    pods: tuple[PodView, ...] = (),
) -> NodeSnapshot:
    """A snapshot with these observations; every other signal is healthy."""
    healthy: Mapping[Signal, Observation] = {each: sample(each, 4 * GI, read_at=at) for each in Signal}
    seen = {**healthy, **{each.signal: each for each in observations}}
    return NodeSnapshot("node-1", at, 1.7e9 + at, seen, mem_available or seen[Signal.MEMORY], stalls=stalls, pods=pods)


class Judge:
    """`judge` with the state kept between calls."""

    def __init__(self, *thresholds: Threshold, config: Config = EAGER) -> None:
        self.thresholds = thresholds
        self.config = config
        self.state = ThresholdState()

    def see(self, at: float, shot: NodeSnapshot) -> dict[Signal, SignalVerdict]:
        verdicts, self.state = judge(shot, self.state, now=at, config=self.config, thresholds=self.thresholds)
        return {verdict.signal: verdict for verdict in verdicts}

    def memory(self, at: float, available: int | None, *, read_at: float | None = None) -> ThresholdVerdict:
        """The verdict on the first memory threshold when so much memory is available."""
        seen = sample(Signal.MEMORY, available, read_at=at if read_at is None else read_at)
        return self.see(at, snapshot(at, seen))[Signal.MEMORY].thresholds[0]


MEM_AVAILABLE = MemoryModel.MEM_AVAILABLE

"""The labels of counters that begin at 0, before anything was counted.

`increase` in a Prometheus sees the step from 0 to 1, but not the step from no series to 1: without these series the
first eviction of an agent would be on no dashboard. They are bounded: three for each threshold in force, by the outcome
of the mode (six for a soft one with EvictionRequests), and the words of fixed lists. The other outcomes would be
many times as many, so that they begin when they happen.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from nodeagent.config.schema import Config, Mode
from nodeagent.model import OomCause, OutcomeKind, Plan, QOSClass, RaceLoss, Tier
from nodeagent.policy import own_limits
from nodeagent.policy.local_storage_limits import StorageLimit

Labels = tuple[str, ...]

DECISIONS: Final = ("calm", "evict", "refuse")
RELOADS: Final = ("applied", "invalid")
LOST_RACES: Final = tuple(RaceLoss)
OOM_KILLS: Final = tuple((cause, victim) for cause in OomCause for victim in ("pod", "host", "unattributed"))


def single(words: Iterable[str]) -> tuple[Labels, ...]:
    """The labels of a counter with one label."""
    return tuple((word,) for word in words)


def evictions(config: Config, plan: Plan) -> Iterator[Labels]:
    """Signal, QoS class, tier and outcome of each victim that this configuration allows, if all goes well."""
    outcome = OutcomeKind.ACCEPTED if config.mode is Mode.ENFORCE else OutcomeKind.DRY_RUN
    reasons: list[tuple[str, Tier]] = [
        (verdict.signal, Tier.HARD if each.threshold.hard else Tier.SOFT)
        for verdict in plan.signals
        for each in verdict.thresholds
    ]
    if config.local_storage_limits:
        reasons += [(limit, Tier.HARD) for limit in StorageLimit]
    if config.own_limit.enabled:
        reasons.append((own_limits.OWN_LIMIT, Tier.SOFT))
    for reason, tier in reasons:
        for qos in QOSClass:
            yield reason, qos, tier, outcome
            if config.mode is Mode.ENFORCE and config.eviction_request.enabled and tier is Tier.SOFT:
                yield reason, qos, tier, OutcomeKind.EVICTED_BY_OTHERS


def relief(plan: Plan) -> Iterator[Labels]:
    """The signals that have a threshold."""
    for verdict in plan.signals:
        if verdict.thresholds:
            yield (verdict.signal,)

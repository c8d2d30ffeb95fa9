"""Which pods the kernel's OOM killer should prefer: those that would be evicted next.

Theory of operation. The kernel may be faster than an eviction. While a memory threshold is met, the first candidates of
the eviction order are the targets; a pod that is being evicted stays one until it is gone. A pod that frees less than
the minimum relief of the shortage is none: the kernel would kill it and then go on.
"""

from typing import Final, NamedTuple

from nodeagent.config.schema import Config
from nodeagent.model import MEMORY_SIGNALS, Plan, PodSource, QOSClass, RankedPod, RefusalCode
from nodeagent.policy import relief

MAX_TARGETS: Final = 3
"""A kill ends one process or container; with the next ones the kernel has as many choices as it may need before the
next decision. Each costs reading all its processes once a second."""
_ENDING: Final = frozenset({RefusalCode.EVICTION_IN_FLIGHT, RefusalCode.TERMINATING})
"""Refusals of a pod that would be a candidate if it were not on its way out already."""


class OomTarget(NamedTuple):
    """A pod that the OOM killer should prefer."""

    pod: str
    """`namespace/name`, for people."""
    pod_uid: str
    cgroup: str
    qos_class: QOSClass


def targets(plan: Plan, *, config: Config) -> tuple[OomTarget, ...] | None:
    """The targets, the first one to be killed first; none without a shortage of memory. None: this plan does not tell,
    because it ranks the pods for another resource."""
    if not config.escalation.oom_score_adj:
        return ()
    shortage = max(
        [
            each.value - verdict.observation.available
            for verdict in plan.signals
            if verdict.signal in MEMORY_SIGNALS and verdict.observation.available is not None
            for each in verdict.thresholds
            if each.met and each.value is not None
        ],
        default=None,
    )
    if shortage is None:
        return ()
    if plan.ranked_for not in MEMORY_SIGNALS:
        return None
    least = relief.minimum_relief(config.relief, max(0, shortage))
    found = [target for ranked in plan.ranking if (target := _target(ranked, least)) is not None]
    return tuple(found[:MAX_TARGETS])


def _target(ranked: RankedPod, least: int) -> OomTarget | None:
    pod, usage = ranked.view.pod, ranked.view.usage
    if pod.source is not PodSource.API or usage is None or usage.qos_class is not pod.qos_class:
        return None
    if any(refusal.code not in _ENDING for refusal in ranked.refusals):
        return None
    if ranked.relief is None or ranked.relief < least:
        return None
    return OomTarget(pod.key, pod.uid, usage.cgroup, pod.qos_class)

"""Which page cache is reclaimed before pods are evicted: whose, how much, and when.

Promises:

1. A pod's usage stays at or above its memory request and what memory.min or memory.low protects, and no amount is
   negative. An unknown amount is left out.
2. Pods that are critical for the node are left out (`CRITICAL`), and so is the agent's own pod. So are pods that the
   API server has not listed, because nobody knows whether they are critical. Other protections concern evictions only:
   reclaim evicts no pod.
3. It never starts for a shortage of MemAvailable, which counts page cache as available already.

Theory of operation. The kubelet counts active file pages as used (KUBELET-CONTRACT 1), so a pod that reads files can
bring `memory.available` below a threshold while the kernel could drop these pages at any moment. `memory.reclaim` of
the pod's cgroup drops them now. There are two reasons to do that. A soft eviction waits for it, if the working-set
figure is the lower one (`before_soft_eviction`). And a threshold that is met by page cache alone (`page_cache_only`) is
cleared by it, before a kubelet evicts for the same figure: the kubelet's hard eviction has no grace period.
"""

from typing import Final, NamedTuple

from nodeagent.config import resolve
from nodeagent.config.schema import Config, ReclaimAction, ReclaimKind
from nodeagent.model import (
    MEMORY_SIGNALS,
    MemoryModel,
    NodeSnapshot,
    Note,
    NoteKind,
    Observation,
    Pod,
    PodSource,
    PodView,
    ReclaimResult,
    ReclaimTarget,
    RefusalCode,
    Signal,
    Threshold,
    ThresholdVerdict,
    Tier,
)
from nodeagent.policy import memory_shortage, plausibility, protection, requests

CRITICAL: Final = frozenset(
    {
        RefusalCode.STATIC_POD,
        RefusalCode.MIRROR_POD,
        RefusalCode.SYSTEM_NODE_CRITICAL,
        RefusalCode.CRITICAL_PRIORITY,
        RefusalCode.UNKNOWN_POD,
    }
)
"""Protections that page cache has too. A control plane's etcd lives from its page cache, and a slow CNI plugin or
kube-proxy slows every pod."""

STEP: Final = 16 << 20
"""The smallest amount that is reclaimed from a pod: less changes nothing, and each pod costs some system calls."""
MAX_TARGETS: Final = 32
"""Pods of one order, largest first. With 110 pods the rest holds little, and each one is in the record."""
MARGIN: Final = 64 << 20
"""The least distance above the threshold at which the reclaim ends. Less would make it run again at once, more drops
pages that are read again."""
MARGIN_SHARE: Final = 0.25
"""The same, as a share of the threshold's value."""

ACTION: Final = ReclaimAction(
    ReclaimKind.PAGE_CACHE.value,
    ReclaimKind.PAGE_CACHE,
    signals=tuple(signal for signal in Signal if signal in MEMORY_SIGNALS),
    timeout_s=10.0,
    min_interval_s=0.25,
)
"""The built-in action. 10 s is a kubelet's sync interval. Below a soft threshold there is a decision every 0.25 s. A
pod that reads 400 MiB/s takes 100 MiB in that time, more than `MARGIN`."""
PAUSE_S: Final = {
    ReclaimResult.STOPPED: 5.0,
    ReclaimResult.TIMED_OUT: 30.0,
    ReclaimResult.FAILED: 600.0,
    ReclaimResult.DRY_RUN: 60.0,
}
"""Least time from the start of a run with this result to the next one. Pods that stalled get a pause; what the kernel
refused it will refuse again."""
HARD_PAUSE_S: Final = {ReclaimResult.STOPPED: 1.0, ReclaimResult.TIMED_OUT: ACTION.timeout_s + 1.0}
"""The same while a hard threshold is met: the kubelet's is next, and a few milliseconds of each second cost a pod less
than its eviction. In an emulated machine under load a pod that reads 400 MiB/s passed both thresholds in a pause of
5 s."""


def action(last: ReclaimResult | None, *, config: Config, hard: bool = False) -> ReclaimAction | None:
    """The built-in action after a run with this result; None if it is off. The kubelet's order has no such step.
    `hard`: a hard threshold is met by page cache."""
    if not config.reclaim.page_cache or config.ranking.kubelet:
        return None
    if last is None:
        return ACTION
    pauses_s = PAUSE_S | HARD_PAUSE_S if hard else PAUSE_S
    return ACTION._replace(min_interval_s=pauses_s.get(last, ACTION.min_interval_s))


def note(blocked: str, *, config: Config) -> tuple[Note, ...]:
    """Why page cache is not reclaimed although that is on. `blocked`: `NodeSnapshot.page_cache_blocked`."""
    if action(None, config=config) is None or not blocked:
        return ()
    return (Note(NoteKind.RECLAIM, f"page cache of pods is not reclaimed: {blocked}"),)


# --- whose and how much ----------------------------------------------------------------------------------------------


class Reclaimable(NamedTuple):
    """The page cache that reclaim may drop."""

    amount: int
    pods: int
    blocked: str = ""
    """Why it is not reclaimed; empty if it is."""


def reclaimable(snapshot: NodeSnapshot, *, config: Config) -> Reclaimable:
    """The sum over all pods, whether or not it is reclaimed here."""
    found = _targets(snapshot, config=config)
    blocked = snapshot.page_cache_blocked
    if action(None, config=config) is None:
        blocked = "ranking.order is kubelet" if config.ranking.kubelet else "reclaim.pageCache is false"
    return Reclaimable(sum(target.amount for target in found), len(found), blocked)


def targets(snapshot: NodeSnapshot, *, config: Config) -> tuple[ReclaimTarget, ...]:
    """The pods of one order, largest amount first; empty if the host cannot reclaim page cache."""
    return () if snapshot.page_cache_blocked else _targets(snapshot, config=config)[:MAX_TARGETS]


def _targets(snapshot: NodeSnapshot, *, config: Config) -> tuple[ReclaimTarget, ...]:
    limit = plausibility.usage_limit(snapshot, Signal.MEMORY, config=config)
    found = [
        target
        for view in snapshot.pods
        if not _critical(view.pod, snapshot, config) and (target := _target(view, limit=limit)) is not None
    ]
    return tuple(sorted(found, key=lambda target: (-target.amount, target.pod)))


def _critical(pod: Pod, snapshot: NodeSnapshot, config: Config) -> bool:
    if pod.source is PodSource.HOST or snapshot.own_pod_uid in (pod.uid, pod.cgroup_uid):
        return True
    return any(refusal.code in CRITICAL for refusal in protection.object_refusals(pod, config.protection))


def _target(view: PodView, *, limit: int) -> ReclaimTarget | None:
    """None if nothing worth a step may be reclaimed, or an amount is unknown."""
    usage = view.usage
    if usage is None:
        return None
    cache = plausibility.plausible(usage.memory_file_cache, limit=limit)
    used = plausibility.plausible(usage.memory_usage, limit=limit)
    protected = plausibility.plausible(usage.memory_protected)
    request = plausibility.plausible(requests.ranking_request(view, signal=Signal.MEMORY))
    if cache is None or used is None or protected is None or request is None:
        return None
    keep = max(request, protected)
    amount = min(cache, used - keep)
    return ReclaimTarget(view.pod.key, usage.cgroup, amount, keep) if amount >= STEP else None


# --- when ------------------------------------------------------------------------------------------------------------


def by_working_set(snapshot: NodeSnapshot, signal: Signal) -> Observation:
    """The figure that page cache lowers and reclaim raises: the kubelet's."""
    return snapshot.observe(signal, MemoryModel.WORKING_SET)


def level(threshold: Threshold, value: int, *, capacity: int | None) -> int:
    """The amount by the working set at which reclaim for this threshold ends."""
    margin = max(MARGIN, int(value * MARGIN_SHARE))
    return value + resolve.resolve_reclaim(threshold, capacity=capacity) + margin


def before_soft_eviction(snapshot: NodeSnapshot, threshold: Threshold) -> bool:
    """True if page cache can help this threshold before a pod is evicted: it is soft, its shortage is one of the
    working-set figure, and the kernel's figure is not lower still."""
    if threshold.hard or not _reads_working_set(threshold):
        return False
    working_set, by_kernel = snapshot.memory_figures(threshold.signal)
    if working_set is None:
        return False
    return not memory_shortage.uses_both(threshold) if by_kernel is None else working_set < by_kernel


def page_cache_only(snapshot: NodeSnapshot, verdict: ThresholdVerdict) -> bool:
    """True if this threshold is met by page cache alone."""
    threshold, value = verdict.threshold, verdict.value
    if not verdict.met or value is None or not _reads_working_set(threshold):
        return False
    figures = snapshot.memory_figures(threshold.signal)
    if figures.working_set is None or figures.by_kernel is None:
        return False
    needed = value
    if figures.working_set >= value:  # minimum reclaim keeps it met
        capacity = by_working_set(snapshot, threshold.signal).capacity
        needed += resolve.resolve_reclaim(threshold, capacity=capacity)
    if figures.working_set >= needed:
        return False
    refusal = memory_shortage.page_cache_refusal(threshold.signal, figures, level=needed)
    return refusal is not None and refusal.code is RefusalCode.PAGE_CACHE_ONLY


def tier(threshold: Threshold) -> Tier:
    return Tier.HARD if threshold.hard else Tier.SOFT


def _reads_working_set(threshold: Threshold) -> bool:
    return threshold.signal in MEMORY_SIGNALS and threshold.memory_model is not MemoryModel.MEM_AVAILABLE

"""Wait for disk usage that was measured after the crossing.

Near a threshold pods are measured every 10 s (`sampling/disk/monitor`), and a file system can fill in less. By such a
measurement the pod that filled it holds nothing yet, all pods look equal, and the first by name would be evicted. The
measurement that starts at the crossing takes a fraction of a second for most nodes, so the decision waits for it.

The wait ends after `RECOUNT_WAIT_S`, or earlier as a share of the time until the disk is full; then the available
measurement decides. One measurement does not show what grows, so the second one is awaited for longer. Without any
measurement the hard tier then ranks by write rate (`RankedPods.by_writes`), unless the fastest writer may write to a
volume that no eviction frees: a database is not evicted for its writes, nor another pod in its place. With
`ranking.order: kubelet` no newer measurement is awaited, as in a kubelet.

What fills a disk may be in no pod: deleted files held open where the kernel does not show them, or files of the host.
No pod is evicted for it: while more of the recent growth is unattributed than in pods, and the threshold would not be
crossed without it or the disk will soon be full of it, the refusal is `unattributed`. What the disk held before is part
of the node (images, its system) and no evidence. A host that stops growing counts as part of the node minutes later.
"""

from typing import Final

from nodeagent.config.schema import Config
from nodeagent.model import (
    DISK_SIGNALS,
    SIGNAL_TABLE,
    DiskPoint,
    DiskTrace,
    NodeSnapshot,
    Refusal,
    RefusalCode,
    Signal,
    ThresholdVerdict,
    Trend,
    Unit,
    units,
)
from nodeagent.policy.candidates import RankedPods

RECOUNT_WAIT_S: Final = 3.0
"""Under pressure a measurement is published after at most 2 s with what it has found, and one that started before the
crossing is ended first."""
SECOND_WALK_WAIT_S: Final = 8.0
"""The first walk may end 2 s after the crossing, and the next one begins after a pause of 2 s and takes 2 s."""
RECOUNT_WAIT_SHARE: Final = 0.25
"""Each wait is at most this share of the time until the disk is full."""
MIN_GROWTH_SHARE: Final = 0.001
"""Share of the threshold's value that counts as growth: logs of the host and metadata of the file system vary."""
SOON_FULL_S: Final = 600.0
"""Unattributed growth that fills the rest of the disk within this time is the cause of the pressure, even if the agent
started after the growth began."""
DEEP_DEFICIT_SHARE: Final = 0.5
"""With a larger deficit, as a share of the threshold's value, pods that fill the disk now are evicted, even if the host
caused the rest."""
TRACE_MAX_AGE_S: Final = 120.0
"""An older trace is no evidence."""


def wait_for_recount(
    snapshot: NodeSnapshot, verdict: ThresholdVerdict, trend: Trend | None, *, now: float, config: Config
) -> Refusal | None:
    """Why no pod is evicted for this threshold yet: disk usage is older than the crossing, or the growth is in no pod.

    `trend` is that of the signal.
    """
    signal, met_at = verdict.threshold.signal, verdict.active_since
    if signal not in DISK_SIGNALS or met_at is None or config.ranking.kubelet:
        return None
    trace = _trace(snapshot, signal)
    unattributed = _unattributed_growth(snapshot, verdict, trace, now=now) if trace is not None else None
    if unattributed is not None:
        return unattributed
    measured_once = trace is not None and trace.first.at == trace.last.at and (trend is None or trend.rate_per_s < 0)
    if measured_once and not _wait_is_over(met_at, trend, now=now, at_most_s=SECOND_WALK_WAIT_S):
        message = f"{signal.value}: disk usage measured once; measuring again to find what grows"
        return Refusal(RefusalCode.WAITS_FOR_RECOUNT, message)
    if _wait_is_over(met_at, trend, now=now):
        return None
    qualities = [usage.disk_usage_quality for _, usage in snapshot.pods if usage is not None]
    measured_at = [quality.read_at for quality in qualities if quality is not None]
    if not measured_at or (len(measured_at) == len(qualities) and min(measured_at) >= met_at):
        return None
    age_s = now - min(measured_at)
    return Refusal(
        RefusalCode.WAITS_FOR_RECOUNT,
        f"{signal.value}: disk usage is older than the crossing ({age_s:.0f}s); measuring again",
    )


def newest_trace(snapshot: NodeSnapshot, signal: Signal, *, now: float) -> DiskTrace | None:
    """How the file system fills; None if that is unknown or too old."""
    trace = _trace(snapshot, signal)
    return trace if trace is not None and now - trace.last.at <= TRACE_MAX_AGE_S else None


def _trace(snapshot: NodeSnapshot, signal: Signal) -> DiskTrace | None:
    traces = [trace for trace in snapshot.disk_traces if signal in trace.signals]
    return max(traces, key=lambda trace: trace.last.at, default=None)


def wait_for_first_walk(
    ranked_pods: RankedPods, verdict: ThresholdVerdict, trend: Trend | None, *, now: float
) -> Refusal | None:
    """Why no pod is evicted for its writes before any disk usage is measured, or None."""
    if not ranked_pods.by_writes or not ranked_pods.pods or verdict.active_since is None:
        return None
    reason = ""
    fastest = ranked_pods.pods[0]
    if not _wait_is_over(verdict.active_since, trend, now=now):
        reason = "first walk awaited"
    elif fastest.usage is not None and fastest.view.pod.writes_elsewhere:
        reason = f"{fastest.view.pod.key} writes fastest and has volumes that are not its local storage"
    if not reason:
        return None
    message = f"{ranked_pods.signal.value}: disk usage of the pods is not measured yet; {reason}"
    return Refusal(RefusalCode.WAITS_FOR_RECOUNT, message)


def _wait_is_over(met_at: float, trend: Trend | None, *, now: float, at_most_s: float = RECOUNT_WAIT_S) -> bool:
    left_s = trend.to_exhaustion_s if trend is not None and trend.to_exhaustion_s is not None else float("inf")
    return now - met_at >= min(at_most_s, left_s * RECOUNT_WAIT_SHARE)


def _unattributed_growth(
    snapshot: NodeSnapshot, verdict: ThresholdVerdict, trace: DiskTrace, *, now: float
) -> Refusal | None:
    """The refusal if the threshold is crossed because of growth that is in no pod."""
    signal, value = verdict.threshold.signal, verdict.value
    available = snapshot.observations[signal].available
    if value is None or type(available) is not int or now - trace.last.at > TRACE_MAX_AGE_S:
        return None
    rest, pods = growth(trace.first, trace, signal)
    deficit = max(0, value - available)
    recent_rest, recent_pods = growth(trace.recent, trace, signal)
    recent_s = trace.last.at - trace.recent.at
    soon_full = recent_s > 0 and recent_rest > recent_pods and recent_rest / recent_s * SOON_FULL_S >= available
    if rest <= pods or rest < value * MIN_GROWTH_SHARE or (rest < deficit and not soon_full):
        return None
    if deficit > value * DEEP_DEFICIT_SHARE and recent_pods > max(0, recent_rest):
        return None
    unit = SIGNAL_TABLE[signal].unit
    unknown = "" if trace.deleted_known else "; deleted files held open are not all attributable (CAP_SYS_PTRACE)"
    return Refusal(
        RefusalCode.UNATTRIBUTED,
        f"{signal.value}: grew by {units.format_amount(rest, unit)} in no pod and "
        f"{units.format_amount(max(0, pods), unit)} in pods within {trace.last.at - trace.first.at:.0f}s; "
        f"{units.format_amount(deficit, unit)} missing to the threshold{unknown}",
    )


def growth(since: DiskPoint, trace: DiskTrace, signal: Signal) -> tuple[int, int]:
    """Growth of the file system since a point: in no pod, and in pods."""
    last = trace.last
    if SIGNAL_TABLE[signal].unit is Unit.BYTES:
        used, pods = last.used_bytes - since.used_bytes, last.attributed_bytes - since.attributed_bytes
    else:
        used, pods = last.used_inodes - since.used_inodes, last.attributed_inodes - since.attributed_inodes
    return used - pods, pods

"""Who fills a disk is told by a count that began after it ran short, not by one from before.

Near a threshold pods are counted every 10 s (`sampling/disk/watch.py`), and in less a file system can run short of
something. By such a count the pod that did it holds nothing yet, all look alike, and those who come first by name go.
Once a threshold is crossed the next count begins at once, and most take a fraction of a second: it is waited for.

Not longer than `COUNT_S`, though, nor than a share of the time that is left until nothing is: what is known by then
decides. While nothing was counted at all there is nothing to wait out; the hard tier goes by who writes
(`Lineup.by_writes`). With `ranking.order: kubelet` nothing is waited for, as in a kubelet.

What fills a disk may be in no pod: deleted files that are held open where the kernel does not show them, or the host's
own. Whoever holds it is unknown, and that is no reason to evict somebody else: while more of what has come lately is in
no pod than in pods, and the threshold would not be crossed without it or the disk will soon be full of it, no pod goes.
What was there before is part of the node (images, its system), and says nothing. A host that stops growing is taken as
it is some minutes later.
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

COUNT_S: Final = 3.0
"""A count under pressure is published after 2 s at most, of what it has seen until then, and one from before that is
under way is ended first."""
SHARE: Final = 0.25
"""Of the time until the disk is full."""
LEAST: Final = 0.001
"""Share of the threshold's value that must have come to count as growth: logs of the host and the file system's own
books come and go."""
SOON_S: Final = 600.0
"""What fills the rest of the disk within this time at its present rate is the reason for the pressure, also where the
agent has started since, and nobody knows what it was when it began."""
DEEP: Final = 0.5
"""Share of the threshold's value. When so much of it is gone, pods that fill the disk now go for what others did."""
OLD_S: Final = 120.0
"""A trace that ends so long ago says nothing of now."""


def wait_for_recount(
    snapshot: NodeSnapshot, verdict: ThresholdVerdict, trend: Trend | None, *, now: float, config: Config
) -> Refusal | None:
    """Why nobody goes for this threshold yet: what the pods hold was counted before it was crossed, or what has filled
    the disk is in none of them. `trend` is that of its signal."""
    signal, since = verdict.threshold.signal, verdict.active_since
    if signal not in DISK_SIGNALS or since is None or config.ranking.kubelet:
        return None
    traces = [trace for trace in snapshot.disk_traces if signal in trace.signals]
    trace = max(traces, key=lambda trace: trace.last.at, default=None)
    held = _in_no_pod(snapshot, verdict, trace, now=now) if trace is not None else None
    if held is not None:
        return held
    left_s = trend.to_exhaustion_s if trend is not None and trend.to_exhaustion_s is not None else float("inf")
    if now - since >= min(COUNT_S, left_s * SHARE):
        return None
    if trace is not None and trace.first.at == trace.last.at and (trend is None or trend.rate_per_s < 0):
        message = f"{signal.value}: pods were counted once, and a second count has to say whether they fill it"
        return Refusal(RefusalCode.WAITS_FOR_RECOUNT, message)
    sights = [usage.disk_usage_quality for _, usage in snapshot.pods if usage is not None]
    counted = [sight.read_at for sight in sights if sight is not None]
    if not counted or (len(counted) == len(sights) and min(counted) >= since):
        return None
    ago_s = now - min(counted)
    return Refusal(
        RefusalCode.WAITS_FOR_RECOUNT,
        f"{signal.value}: pods were counted {ago_s:.0f}s ago, before it ran short, and are being counted anew",
    )


def _in_no_pod(snapshot: NodeSnapshot, verdict: ThresholdVerdict, trace: DiskTrace, *, now: float) -> Refusal | None:
    """Why nobody goes: the threshold is crossed because of what is in no pod."""
    signal, value = verdict.threshold.signal, verdict.value
    available = snapshot.observations[signal].available
    if value is None or type(available) is not int or now - trace.last.at > OLD_S:
        return None
    rest, pods = _grown(trace.first, trace, signal)
    short = max(0, value - available)
    rest_now, pods_now = _grown(trace.recent, trace, signal)
    over_s = trace.last.at - trace.recent.at
    soon = over_s > 0 and rest_now > pods_now and rest_now / over_s * SOON_S >= available
    if rest <= pods or rest < value * LEAST or (rest < short and not soon):
        return None
    if short > value * DEEP and pods_now > max(0, rest_now):
        return None
    unit = SIGNAL_TABLE[signal].unit
    why = "" if trace.deleted_known else "; not every deleted file that is held open can be attributed (CAP_SYS_PTRACE)"
    return Refusal(
        RefusalCode.UNATTRIBUTED,
        f"{signal.value}: in {trace.last.at - trace.first.at:.0f}s {units.format_amount(rest, unit)} have come that "
        f"are in no pod, and {units.format_amount(max(0, pods), unit)} in pods; {units.format_amount(short, unit)} are "
        f"missing to the threshold{why}",
    )


def _grown(since: DiskPoint, trace: DiskTrace, signal: Signal) -> tuple[int, int]:
    """What has come that is in no pod, and in pods."""
    last = trace.last
    if SIGNAL_TABLE[signal].unit is Unit.BYTES:
        used, pods = last.used_bytes - since.used_bytes, last.attributed_bytes - since.attributed_bytes
    else:
        used, pods = last.used_inodes - since.used_inodes, last.attributed_inodes - since.attributed_inodes
    return used - pods, pods

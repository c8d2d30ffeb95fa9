"""Who fills a disk is told by a count that began after it ran short, not by one from before.

Near a threshold pods are counted every 10 s (`sampling/disk/watch.py`), and in less a file system can run short of
something. By such a count the pod that did it holds nothing yet, all look alike, and those who come first by name go.
Once a threshold is crossed the next count begins at once, and most take a fraction of a second: it is waited for.

Not longer than `COUNT_S`, though, nor than a share of the time that is left until nothing is: what is known by then
decides. While nothing was counted at all there is nothing to wait out; the hard tier goes by who writes
(`Lineup.by_writes`). With `ranking.order: kubelet` nothing is waited for, as in a kubelet.
"""

from nodeagent.config.schema import Config
from nodeagent.lean import Final
from nodeagent.model import NodeSnapshot, Refusal, ThresholdVerdict, Trend
from nodeagent.policy import ranking

COUNT_S: Final = 3.0
"""A count under pressure is published after 2 s at most, of what it has seen until then, and one from before that is
under way is ended first."""
SHARE: Final = 0.25
"""Of the time until the disk is full."""


def waits(
    snapshot: NodeSnapshot, verdict: ThresholdVerdict, trend: Trend | None, *, now: float, config: Config
) -> Refusal | None:
    """Why nobody goes for this threshold yet: what the pods hold was counted before it was crossed. `trend` is that of
    its signal."""
    signal, since = verdict.threshold.signal, verdict.active_since
    if signal not in ranking.DISKS or since is None or config.ranking.kubelet:
        return None
    sights = [usage.disk_sight for _, usage in snapshot.pods if usage is not None]
    counted = [sight.read_at for sight in sights if sight is not None]
    if not counted or (len(counted) == len(sights) and min(counted) >= since):
        return None
    left_s = trend.to_exhaustion_s if trend is not None and trend.to_exhaustion_s is not None else float("inf")
    if now - since >= min(COUNT_S, left_s * SHARE):
        return None
    ago_s = now - min(counted)
    return Refusal(
        "counting-anew",
        f"{signal.value}: pods were counted {ago_s:.0f}s ago, before it ran short, and are being counted anew",
    )

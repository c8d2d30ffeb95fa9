"""What one report is made of, and what can be said from it without looking at anything again.

A `Report` is one snapshot with the plan that policy made of it. Text, terminal and JSON are three ways of writing the
same report; whatever more than one of them says (headroom, which signals share a file system, how a kubelet compares)
is worked out here.
"""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from nodeagent.model import (
    NodeSnapshot,
    Note,
    Plan,
    PodSource,
    PodView,
    RankedPod,
    Signal,
    SignalState,
    SignalVerdict,
    Threshold,
    ThresholdVerdict,
)
from nodeagent.policy import amounts, requests

_DISK_SIGNALS: Final = (
    (Signal.NODEFS, Signal.IMAGEFS, Signal.CONTAINERFS),
    (Signal.NODEFS_INODES, Signal.IMAGEFS_INODES, Signal.CONTAINERFS_INODES),
)

_CONTAINERFS: Final = (Signal.CONTAINERFS, Signal.CONTAINERFS_INODES)


class KubeletView(NamedTuple):
    """The kubelet's own eviction thresholds, from its configuration on this host."""

    path: str
    """The file they were read from, below the host root."""
    thresholds: tuple[Threshold, ...]
    """Effective: defaults, merging and allocatable memory are already worked in."""


class Report(NamedTuple):
    """One look at one node."""

    snapshot: NodeSnapshot
    plan: Plan
    mode: str
    """`dry-run` or `enforce`: what the agent would do with this plan."""
    config_source: str
    """`built-in defaults`, or the file."""
    pods_source: str
    """Where the pods come from: the API server's address, a file, or this host alone with the reason."""
    kubelet: KubeletView | None = None
    notes: tuple[Note, ...] = ()
    """All notes: those of the snapshot, of the plan, and of making this report."""


# --- the state of the whole node -------------------------------------------------------------------------------------


def state(report: Report) -> SignalState:
    """The worst state that a configured threshold gives: hard, then soft, then unknown, then ok.

    A signal counts as unknown only when a threshold looks at it. Two are judged by what they are copies of: containerfs
    thresholds, which no one configures, and `allocatableMemory.available` on a node whose `memory.available` could be
    read (there it is missing when the pods' cgroup has no limit, which is no fault).
    """
    verdicts = {verdict.signal: verdict for verdict in report.plan.signals}
    states = {verdict.state for verdict in verdicts.values()}
    for worst in (SignalState.HARD, SignalState.SOFT):
        if worst in states:
            return worst
    if any(blind(verdict, verdicts) for verdict in verdicts.values()):
        return SignalState.UNKNOWN
    return SignalState.OK


def blind(verdict: SignalVerdict, verdicts: Mapping[Signal, SignalVerdict]) -> bool:
    """The signal is unknown, and that leaves the node partly unjudged."""
    if verdict.state is not SignalState.UNKNOWN or not verdict.thresholds or verdict.signal in _CONTAINERFS:
        return False
    memory = verdicts.get(Signal.MEMORY)
    covered = memory is not None and memory.state is not SignalState.UNKNOWN
    return not (covered and verdict.signal is Signal.ALLOCATABLE_MEMORY)


# --- signals ---------------------------------------------------------------------------------------------------------


def available(snapshot: NodeSnapshot, threshold: Threshold) -> int | None:
    """What this threshold looks at: for memory that depends on its model."""
    return snapshot.observe(threshold.signal, threshold.memory_model).available


def headroom(snapshot: NodeSnapshot, verdict: ThresholdVerdict) -> int | None:
    """How much may still be used before the threshold is met; negative below it, None when either side is unknown."""
    seen = available(snapshot, verdict.threshold)
    return None if seen is None or verdict.value is None else seen - verdict.value


def nearest(snapshot: NodeSnapshot, verdict: SignalVerdict) -> ThresholdVerdict | None:
    """The threshold with the least headroom: the next to be met, or the one furthest behind. None without any."""
    known = [(room, each) for each in verdict.thresholds if (room := headroom(snapshot, each)) is not None]
    return min(known, key=lambda pair: pair[0])[1] if known else None


def shared_file_systems(snapshot: NodeSnapshot) -> Mapping[Signal, Signal]:
    """For every disk signal on a file system that an earlier one already stands for: that earlier signal."""
    shared: dict[Signal, Signal] = {}
    for group in _DISK_SIGNALS:
        first_on: dict[int, Signal] = {}
        for signal in group:
            device = snapshot.observations[signal].device
            if device is not None and first_on.setdefault(device, signal) is not signal:
                shared[signal] = first_on[device]
    return shared


# --- pods ------------------------------------------------------------------------------------------------------------


class Known(NamedTuple):
    """A number with who said so; `source` is empty when the number is None."""

    value: int | None
    source: str


def memory_request(view: PodView) -> Known:
    """The pod's memory request in bytes, from the API or else the host's estimate."""
    request = requests.ranking_request(view, signal=Signal.MEMORY)
    if request is None:
        return Known(None, "")
    return Known(request, "api" if view.pod.source is PodSource.API else "estimate")


def counts(ranking: Iterable[RankedPod]) -> tuple[int, int]:
    """How many pods are candidates, and how many are protected."""
    total = protected = 0
    for ranked in ranking:
        total += 1
        protected += bool(ranked.refusals)
    return total - protected, protected


# --- beside the kubelet ----------------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """One threshold of the kubelet, and whether we act before it."""

    threshold: Threshold
    value: int | None
    """In the signal's unit; None for a percentage of an unknown capacity."""
    ours: Threshold | None
    """Our threshold that answers it: the one that acts earliest at no longer grace; None when there is none."""
    our_value: int | None
    verdict: str
    """`ours first`, `kubelet first`, `same level`, or `unknown`."""


OURS_FIRST: Final = "ours first"
KUBELET_FIRST: Final = "kubelet first"
SAME_LEVEL: Final = "same level"
UNKNOWN: Final = "unknown"


def compare(report: Report) -> tuple[Comparison, ...]:
    """Every threshold of the kubelet beside ours.

    We are first when one of ours with at most the same grace is met at a higher level. The levels of two different
    memory models cannot be compared in general; the numbers of this moment are used.
    """
    if report.kubelet is None:
        return ()
    ours = [each for verdict in report.plan.signals for each in verdict.thresholds]
    return tuple(_compared(report.snapshot, each, ours) for each in report.kubelet.thresholds)


def _compared(snapshot: NodeSnapshot, theirs: Threshold, ours: Iterable[ThresholdVerdict]) -> Comparison:
    value = amounts.resolve(theirs.value, snapshot.observe(theirs.signal).capacity)
    rivals = [
        (level, each)
        for each in ours
        if each.threshold.signal is theirs.signal and each.threshold.grace_period_s <= theirs.grace_period_s
        if (level := _level(snapshot, each)) is not None
    ]
    if not rivals:
        same_signal = any(each.threshold.signal is theirs.signal for each in ours)
        return Comparison(theirs, value, None, None, UNKNOWN if value is None and same_signal else KUBELET_FIRST)
    level, best = max(rivals, key=lambda pair: pair[0])
    if value is None:
        verdict = UNKNOWN
    else:
        verdict = OURS_FIRST if level > value else SAME_LEVEL if level == value else KUBELET_FIRST
    return Comparison(theirs, value, best.threshold, best.value, verdict)


def _level(snapshot: NodeSnapshot, ours: ThresholdVerdict) -> int | None:
    """Where ours is met on the kubelet's scale: MemAvailable ones are shifted by how far the models differ now."""
    if ours.value is None:
        return None
    kubelets = snapshot.observe(ours.threshold.signal).available
    mine = available(snapshot, ours.threshold)
    return ours.value if kubelets is None or mine is None else ours.value + kubelets - mine

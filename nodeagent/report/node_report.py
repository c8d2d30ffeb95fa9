"""What one report is made of, and what can be said from it without looking at anything again.

A `Report` is one snapshot with the plan that policy made of it. Text, terminal and JSON are three ways of writing the
same report; whatever more than one of them says (headroom, which signals share a file system, how a kubelet compares)
is worked out here.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from nodeagent.config.resolve import resolve
from nodeagent.model import (
    DiskLayout,
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
from nodeagent.policy import requests

if TYPE_CHECKING:
    from nodeagent.config.kubelet import EarlierThreshold, KubeletThresholds

_DISK_SIGNALS: Final = (
    (Signal.NODEFS, Signal.IMAGEFS, Signal.CONTAINERFS),
    (Signal.NODEFS_INODES, Signal.IMAGEFS_INODES, Signal.CONTAINERFS_INODES),
)

_CONTAINERFS: Final = (Signal.CONTAINERFS, Signal.CONTAINERFS_INODES)
_IMAGEFS: Final = (Signal.IMAGEFS, Signal.IMAGEFS_INODES)


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
    kubelet: "KubeletThresholds | None" = None
    notes: tuple[Note, ...] = ()
    """All notes: those of the snapshot, of the plan, and of making this report."""


# --- the state of the whole node -------------------------------------------------------------------------------------


def state(report: Report) -> SignalState:
    """The worst state that a configured threshold gives: hard, then soft, then unknown, then ok.

    A signal counts as unknown only when a threshold looks at it and there is something to be known: see `blind`.
    """
    verdicts = {verdict.signal: verdict for verdict in report.plan.signals}
    states = {verdict.state for verdict in verdicts.values()}
    for worst in (SignalState.HARD, SignalState.SOFT):
        if worst in states:
            return worst
    if any(blind(verdict, verdicts, report.snapshot) for verdict in verdicts.values()):
        return SignalState.UNKNOWN
    return SignalState.OK


def blind(verdict: SignalVerdict, verdicts: Mapping[Signal, SignalVerdict], snapshot: NodeSnapshot) -> bool:
    """The signal is unknown, and that leaves the node partly unjudged.

    Not so: containerfs, whose thresholds are copies of nodefs' or imagefs'; allocatableMemory where memory could be
    read (it is missing when the pods' cgroup has no limit); imagefs on a machine without container runtime and pods.
    """
    if verdict.state is not SignalState.UNKNOWN or not verdict.thresholds or verdict.signal in _CONTAINERFS:
        return False
    if verdict.signal in _IMAGEFS:
        return bool(snapshot.pods) or snapshot.layout is not DiskLayout.UNKNOWN
    memory = verdicts.get(Signal.MEMORY)
    covered = memory is not None and memory.state is not SignalState.UNKNOWN
    return not (covered and verdict.signal is Signal.ALLOCATABLE_MEMORY)


# --- signals ---------------------------------------------------------------------------------------------------------


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


class SourcedValue(NamedTuple):
    """A number with who said so; `source` is empty when the number is None."""

    value: int | None
    source: str


def memory_request(view: PodView) -> SourcedValue:
    """The pod's memory request in bytes, from the API or else the host's estimate."""
    request = requests.ranking_request(view, signal=Signal.MEMORY)
    if request is None:
        return SourcedValue(None, "")
    return SourcedValue(request, "api" if view.pod.source is PodSource.API else "estimate")


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
    answer: ThresholdVerdict | None
    """Our highest threshold on the same signal with no longer grace, else the highest; None when there is none."""
    verdict: str
    """One of the six words below."""
    message: str = ""
    """The numbers, where the kubelet is not later than we are."""
    soft: ThresholdVerdict | None = None
    """Our highest threshold that is met before the kubelet's, but has to be for longer; None when there is none, or
    `answer` is it, or is in time."""
    without_soft: str = ""
    """The verdict if it had none; empty unless `verdict` is SOFT_FIRST."""


OURS_FIRST: Final = "ours first"
SOFT_FIRST: Final = "soft first"
"""Our soft threshold is met before the kubelet's: who acts first is a matter of its grace period."""
KUBELET_FIRST: Final = "kubelet first"
SAME_LEVEL: Final = "same level"
NEVER_MET: Final = "never met"
"""The kubelet's threshold is zero: this is how its eviction is switched off."""
UNKNOWN: Final = "unknown"
"""A percentage and a quantity, and the capacity is not known."""


def compare_with_kubelet(report: Report) -> tuple[Comparison, ...]:
    """Every threshold of the kubelet beside ours. Who is sooner is judged by `config.kubelet`."""
    if report.kubelet is None:
        return ()
    from nodeagent.config import kubelet

    capacities = {signal: seen.capacity for signal, seen in report.snapshot.observations.items()}
    ours = [each for verdict in report.plan.signals for each in verdict.thresholds]
    sooner = {
        each.kubelet: each
        for each in kubelet.find_earlier_thresholds(
            [each.threshold for each in ours],
            report.kubelet.thresholds,
            capacities=capacities,
            enforce_node_allocatable=False,  # the verdicts have the copies already
        )
    }
    return tuple(
        _compared(theirs, sooner.get(theirs), ours, capacities[theirs.signal]) for theirs in report.kubelet.thresholds
    )


def _compared(
    theirs: Threshold, sooner: "EarlierThreshold | None", ours: Iterable[ThresholdVerdict], capacity: int | None
) -> Comparison:
    value = resolve(theirs.value, capacity=capacity)
    mine = [each for each in ours if each.threshold.signal is theirs.signal]
    # What answers a hard threshold is a hard one, however much higher a soft one may be.
    in_time = [each for each in mine if each.threshold.grace_period_s <= theirs.grace_period_s]
    answer = max(in_time or mine, key=lambda each: each.value or 0, default=None)
    level = answer.value if answer else None
    if value == 0 or theirs.value.percentage == 0:
        return Comparison(theirs, value, answer, NEVER_MET)
    if sooner is None:
        comparable = value is not None and level is not None
        return Comparison(theirs, value, answer, OURS_FIRST if comparable else UNKNOWN)
    same = bool(in_time) and value is not None and level == value
    verdict = SAME_LEVEL if same else KUBELET_FIRST
    above = [each for each in mine if each not in in_time and value is not None and (each.value or 0) > value]
    if not above:
        return Comparison(theirs, value, answer, verdict, sooner.message)
    soft = max(above, key=lambda each: each.value or 0) if in_time else None
    return Comparison(theirs, value, answer, SOFT_FIRST, sooner.message, soft, verdict)

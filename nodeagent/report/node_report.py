"""The values of one report, and what text and JSON derive from them.

A `Report` is one snapshot with its plan. Text, terminal and JSON are three forms of the same report. Whatever more than
one of them contains (shared file systems, the comparison with the kubelet) is computed here, without new samples.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from nodeagent.config import resolve
from nodeagent.model import (
    CONTAINERFS_SIGNALS,
    IMAGEFS_SIGNALS,
    DiskLayout,
    ImageStoreUsage,
    MemoryVolume,
    NodeSnapshot,
    Note,
    OomKill,
    Plan,
    PodSource,
    PodView,
    Signal,
    SignalState,
    SignalVerdict,
    Threshold,
    ThresholdVerdict,
)
from nodeagent.policy import requests
from nodeagent.policy.page_cache import Reclaimable

if TYPE_CHECKING:
    from nodeagent.config.kubelet import EarlierThreshold, KubeletThresholds

_DISK_SIGNALS_BY_UNIT: Final = (
    (Signal.NODEFS, Signal.IMAGEFS, Signal.CONTAINERFS),
    (Signal.NODEFS_INODES, Signal.IMAGEFS_INODES, Signal.CONTAINERFS_INODES),
)


class Report(NamedTuple):
    """One sample of one node with its plan."""

    snapshot: NodeSnapshot
    plan: Plan
    mode: str
    """`dry-run` or `enforce`: what the agent would do with this plan."""
    config_source: str
    """`built-in defaults`, or the file."""
    pods_source: str
    """The source of the pods: the API server's address, a file, or this host alone with the reason."""
    kubelet: "KubeletThresholds | None" = None
    oom_kills: tuple[OomKill, ...] = ()
    """OOM kills in the cgroups that exist, since each of them was made."""
    notes: tuple[Note, ...] = ()
    """All notes: of the snapshot, the plan and the report itself."""
    page_cache: Reclaimable = Reclaimable(0, 0)
    """Page cache of pods that reclaim may drop."""
    memory_volumes: tuple[MemoryVolume, ...] = ()
    """The memory-backed emptyDirs of the pods."""
    image_store: ImageStoreUsage | None = None
    """What fills the image store; None: not measured."""
    recording: str = ""
    """The recording that the sample is from, and from when; empty for the live node."""


# --- the state of the whole node -------------------------------------------------------------------------------------


def state(report: Report) -> SignalState:
    """The worst state of a signal with a threshold: hard, then soft, then unknown, then ok.

    An unknown signal counts only if `is_blind`.
    """
    verdicts = {verdict.signal: verdict for verdict in report.plan.signals}
    states = {verdict.state for verdict in verdicts.values()}
    for worst in (SignalState.HARD, SignalState.SOFT):
        if worst in states:
            return worst
    if any(is_blind(verdict, verdicts, report.snapshot) for verdict in verdicts.values()):
        return SignalState.UNKNOWN
    return SignalState.OK


def is_blind(verdict: SignalVerdict, verdicts: Mapping[Signal, SignalVerdict], snapshot: NodeSnapshot) -> bool:
    """True if the signal is unknown and no other signal covers it.

    Covered are: containerfs, whose thresholds are copies of those of nodefs or imagefs; allocatableMemory if memory is
    known (it is missing if the pods' cgroup has no limit); imagefs on a machine without container runtime and pods.
    """
    if verdict.state is not SignalState.UNKNOWN or not verdict.thresholds or verdict.signal in CONTAINERFS_SIGNALS:
        return False
    if verdict.signal in IMAGEFS_SIGNALS:
        return bool(snapshot.pods) or snapshot.layout is not DiskLayout.UNKNOWN
    memory = verdicts.get(Signal.MEMORY)
    covered = memory is not None and memory.state is not SignalState.UNKNOWN
    return not (covered and verdict.signal is Signal.ALLOCATABLE_MEMORY)


# --- signals ---------------------------------------------------------------------------------------------------------


def shared_file_systems(snapshot: NodeSnapshot) -> Mapping[Signal, Signal]:
    """For every disk signal on the file system of an earlier disk signal: that earlier signal."""
    shared: dict[Signal, Signal] = {}
    for group in _DISK_SIGNALS_BY_UNIT:
        first_on: dict[int, Signal] = {}
        for signal in group:
            device = snapshot.observations[signal].device
            if device is not None and first_on.setdefault(device, signal) is not signal:
                shared[signal] = first_on[device]
    return shared


# --- pods ------------------------------------------------------------------------------------------------------------


class SourcedValue(NamedTuple):
    """A number with its source, which is empty if the number is None."""

    value: int | None
    source: str


def memory_request(view: PodView) -> SourcedValue:
    """The pod's memory request in bytes, from the API server or estimated by the host."""
    request = requests.ranking_request(view, signal=Signal.MEMORY)
    if request is None:
        return SourcedValue(None, "")
    return SourcedValue(request, "api" if view.pod.source is PodSource.API else "estimate")


# --- comparison with the kubelet -------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """One threshold of the kubelet, and whether the agent acts before it."""

    threshold: Threshold
    value: int | None
    """In the signal's unit; None for a percentage of an unknown capacity."""
    answer: ThresholdVerdict | None
    """The agent's highest threshold on the signal with no longer grace period, else its highest; None: none."""
    verdict: str
    """One of the six verdicts below."""
    message: str = ""
    """The numbers, if the kubelet acts first or at the same level."""
    soft: ThresholdVerdict | None = None
    """The agent's highest threshold that is met before the kubelet's, but has a longer grace period; None: none, or
    `answer` is in time."""
    without_soft: str = ""
    """The verdict without `soft`; empty unless `verdict` is SOFT_FIRST."""


OURS_FIRST: Final = "ours first"
SOFT_FIRST: Final = "soft first"
"""The agent's soft threshold is met before the kubelet's: its grace period decides which acts first."""
KUBELET_FIRST: Final = "kubelet first"
SAME_LEVEL: Final = "same level"
NEVER_MET: Final = "never met"
"""The kubelet's threshold is zero, which disables its eviction."""
CAPACITY_UNKNOWN: Final = "unknown"
"""A percentage and a quantity cannot be compared, because the capacity is unknown."""


def compare_with_kubelet(report: Report) -> tuple[Comparison, ...]:
    """Every threshold of the kubelet beside the agent's. `config.kubelet` finds the earlier one."""
    if report.kubelet is None:
        return ()
    from nodeagent.config import kubelet

    capacities = {signal: seen.capacity for signal, seen in report.snapshot.observations.items()}
    ours = [each for verdict in report.plan.signals for each in verdict.thresholds]
    earlier = {
        each.kubelet: each
        for each in kubelet.find_earlier_thresholds(
            [each.threshold for each in ours],
            report.kubelet.thresholds,
            capacities=capacities,
            enforce_node_allocatable=False,  # the verdicts already contain the copies
        )
    }
    return tuple(
        _compared(theirs, earlier.get(theirs), ours, capacities[theirs.signal]) for theirs in report.kubelet.thresholds
    )


def _compared(
    theirs: Threshold, earlier: "EarlierThreshold | None", ours: Iterable[ThresholdVerdict], capacity: int | None
) -> Comparison:
    value = resolve.resolve_amount(theirs.value, capacity=capacity)
    mine = [each for each in ours if each.threshold.signal is theirs.signal]
    # Only a hard threshold acts in time before a hard one, however high a soft one is.
    in_time = [each for each in mine if each.threshold.grace_period_s <= theirs.grace_period_s]
    answer = max(in_time or mine, key=lambda each: each.value or 0, default=None)
    level = answer.value if answer else None
    if value == 0 or theirs.value.percentage == 0:
        return Comparison(theirs, value, answer, NEVER_MET)
    if earlier is None:
        comparable = value is not None and level is not None
        return Comparison(theirs, value, answer, OURS_FIRST if comparable else CAPACITY_UNKNOWN)
    same = bool(in_time) and value is not None and level == value
    verdict = SAME_LEVEL if same else KUBELET_FIRST
    above = [each for each in mine if each not in in_time and value is not None and (each.value or 0) > value]
    if not above:
        return Comparison(theirs, value, answer, verdict, earlier.message)
    soft = max(above, key=lambda each: each.value or 0) if in_time else None
    return Comparison(theirs, value, answer, SOFT_FIRST, earlier.message, soft, verdict)


# --- volumes in memory -----------------------------------------------------------------------------------------------


def memory_volumes(report: Report) -> list[tuple[str, MemoryVolume, int | None]]:
    """(pod, volume, its sizeLimit or None) of the memory-backed emptyDirs that hold something, largest first."""
    pods = {view.pod.uid: view.pod for view in report.snapshot.pods}
    found = []
    for volume in report.memory_volumes:
        if volume.used_bytes == 0:
            continue
        pod = pods.get(volume.pod_uid)
        limits = {each.name: each.size_limit for each in pod.empty_dirs} if pod is not None else {}
        found.append((pod.key if pod is not None else f"uid/{volume.pod_uid}", volume, limits.get(volume.name)))
    return found

"""One decision: the verdict on every signal and condition, the victims, and the refusals."""

import enum
from collections.abc import Mapping
from typing import NamedTuple

from nodeagent.model.notes import Note
from nodeagent.model.pods import Pod, PodView
from nodeagent.model.refusals import Refusal
from nodeagent.model.signals import ConditionType, Signal, Threshold, Tier
from nodeagent.model.snapshot import Observation


class SignalState(enum.StrEnum):
    """State of a signal in reports. Order of severity: OK, SOFT, HARD; UNKNOWN is never pressure."""

    OK = "ok"
    SOFT = "soft"
    HARD = "hard"
    UNKNOWN = "unknown"


class Trend(NamedTuple):
    """Where a signal is heading, from the recent samples."""

    rate_per_s: float
    """Change of `available` per second; negative while it is being used up."""
    to_threshold_s: float | None
    """Seconds until the nearest threshold that is not met yet; None when not approaching it."""
    to_exhaustion_s: float | None
    confidence: float
    """0 (no idea) to 1 (every sample on one line)."""


class ThresholdVerdict(NamedTuple):
    """One threshold against one snapshot."""

    threshold: Threshold
    value: int | None
    """The threshold's quantity for this capacity; None when it is a percentage of an unknown capacity."""
    met: bool
    """Below the value, or kept met by minimum reclaim."""
    active_since: float | None
    """First observed at; None when not met."""
    due: bool
    """Met for its grace period and every second key holds: the threshold may act."""
    not_due_reason: str = ""
    """Why a met threshold is not due: its grace, a stall that is missing, a stale sample, observe-only."""


class SignalVerdict(NamedTuple):
    """One signal, judged."""

    observation: Observation
    state: SignalState
    thresholds: tuple[ThresholdVerdict, ...]
    trend: Trend | None = None

    @property
    def signal(self) -> Signal:
        return self.observation.signal


class ConditionStatus(enum.StrEnum):
    """Status of a node condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class ConditionVerdict(NamedTuple):
    """What a pressure condition should say."""

    type: ConditionType
    status: ConditionStatus
    reason: str
    """CamelCase, the kubelet's (`KubeletHasInsufficientMemory`) only where we stand in for it; ours otherwise."""
    message: str
    since: float
    """When the status last changed, CLOCK_BOOTTIME."""


class Deficit(NamedTuple):
    """How much of a starved resource must come back: value + minimum reclaim - available - pending release, at least
    0."""

    signal: Signal
    amount: int
    pending_release: int


class RankKey(NamedTuple):
    """One key that put a pod where it stands. Smaller values are evicted first."""

    name: str
    value: float
    text: str
    """For people: `uses 212Mi over its request`."""


class RankedPod(NamedTuple):
    """A pod at its place in the eviction order."""

    view: PodView
    rank: int
    """1 is evicted first. Protected pods keep their rank: it says when they would have gone."""
    keys: tuple[RankKey, ...]
    """Empty in a fresh plan, because texts for 500 pods cost more than the decision. For a report or a record
    `policy.ranking.with_key_texts(plan)` fills them from `values`."""
    usage: int | None
    """Of the ranked resource: bytes, inodes or processes."""
    request: int | None
    """None where the resource has no request (inodes, PIDs)."""
    relief: int | None
    """What evicting the pod is expected to free."""
    refusals: tuple[Refusal, ...] = ()
    """Why it would not be evicted; empty for a candidate."""
    values: tuple[float, ...] = ()
    """The value of each key of `Plan.rank_order`, in that order; smaller goes first."""


class Method(enum.StrEnum):
    """How a victim is to go."""

    EVICT = "evict"
    """The Eviction API: budgets are respected."""
    DELETE = "delete"
    """DELETE with a DisruptionTarget condition: only hard, only with `onBlocked: delete`."""
    KILL = "kill"
    """No request: its processes are ended through its cgroup. Only hard, only with `lastResort: cgroupKill`, only while
    the API server is out of reach."""


class Victim(NamedTuple):
    """A pod that is to be evicted now, and everything the API request needs."""

    pod: Pod
    cgroup: str
    """Empty when the pod has no cgroup."""
    threshold: Threshold
    tier: Tier
    method: Method
    grace_period_s: float
    message: str
    """The kubelet's eviction message."""
    annotations: Mapping[str, str]
    """The kubelet's event annotations."""
    predicted_relief: int | None
    limit: str = ""
    """The limit of its own that the pod exceeds (`emptydirfs.limit` ...); `threshold` is then that limit, not one of
    the node. Empty for an eviction under pressure."""


class ReliefReport(NamedTuple):
    """What one decision's evictions brought back, once their cgroups were gone, against what was predicted."""

    plan_id: str
    signal: Signal
    pod_uids: tuple[str, ...]
    predicted: int
    """Bytes, inodes or threads that the decision expected."""
    measured: int
    """Change of `available` from the decision's sample to the first sample after the last victim's cgroup was gone;
    negative when others took more than was released."""
    took_s: float
    """From the decision to that sample."""


class ReclaimOrder(NamedTuple):
    """An action that is to be tried before pods are evicted."""

    name: str
    """Of the configured action."""
    signal: Signal
    tier: Tier
    deficit: int
    """How much is missing."""
    available: int
    until: float
    """CLOCK_BOOTTIME at which it is ended."""


class ReclaimResult(enum.StrEnum):
    """How an action ended."""

    DONE = "done"
    FAILED = "failed"
    """It could not be started, or its exit code was not 0."""
    TIMED_OUT = "timed-out"
    DRY_RUN = "dry-run"
    """Nothing was run."""


class ReclaimOutcome(NamedTuple):
    """What became of an order."""

    plan_id: str
    name: str
    result: ReclaimResult
    message: str
    """Exit code and the end of its output, or why it could not be run."""
    at: float


class ReclaimReport(NamedTuple):
    """What an action brought back, by the first sample after its end."""

    plan_id: str
    name: str
    signal: Signal
    result: ReclaimResult
    gained: int
    """Change of `available` since the decision; negative when others took more."""
    took_s: float
    """From the decision to the end of the action."""


class Plan(NamedTuple):
    """One decision: what was seen, what is to be done, and why everything else is not. One id for log, Event,
    metric."""

    id: str
    made_at: float
    snapshot_taken_at: float
    signals: tuple[SignalVerdict, ...]
    conditions: tuple[ConditionVerdict, ...]
    acting_on: ThresholdVerdict | None = None
    """The threshold that is being served; None when nothing is due."""
    deficit: Deficit | None = None
    ranking: tuple[RankedPod, ...] = ()
    """Always filled: the order for the most urgent resource, memory when none is starved."""
    ranked_for: Signal = Signal.MEMORY
    victims: tuple[Victim, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    """Why nobody, or not more, is evicted although a threshold is due."""
    notes: tuple[Note, ...] = ()
    rank_order: tuple[str, ...] = ()
    """Names of the keys that made `ranking`, most significant first; ties go by namespace, name and UID."""
    relief_reports: tuple[ReliefReport, ...] = ()
    """Earlier evictions whose relief this snapshot measured."""
    reclaims: tuple[ReclaimOrder, ...] = ()
    """What is to be tried now."""
    reclaim_reports: tuple[ReclaimReport, ...] = ()
    """Earlier actions whose gain this snapshot measured."""
    recount: tuple[str, ...] = ()
    """UIDs (of cgroups) of pods whose disk must be counted anew before anything is done to them."""

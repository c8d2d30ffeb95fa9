"""One decision: the verdict on every signal and condition, the victims, and the refusals."""

import enum
from collections.abc import Mapping
from typing import NamedTuple

from nodeagent.model.hooks import HookOrder
from nodeagent.model.notes import Note
from nodeagent.model.outcomes import Outcome
from nodeagent.model.pods import NodeFitLookup, OwnerLookup, Pod, PodView
from nodeagent.model.refusals import Refusal, RefusalCode, RefusalKind
from nodeagent.model.resizes import ResizeOrder, ResizeOutcome
from nodeagent.model.signals import ConditionType, Signal, Threshold, Tier
from nodeagent.model.snapshot import MemoryFigures, Observation


class SignalState(enum.StrEnum):
    """State of a signal in reports. Order of severity: OK, SOFT, HARD; UNKNOWN is never pressure."""

    OK = "ok"
    SOFT = "soft"
    HARD = "hard"
    UNKNOWN = "unknown"


class Trend(NamedTuple):
    """The trend of a signal, from its last samples."""

    rate_per_s: float
    """Change of `available` per second; negative while it is being used up."""
    to_threshold_s: float | None
    """Seconds until the nearest threshold that is not met yet; None if it is not approached."""
    to_exhaustion_s: float | None
    confidence: float
    """0 (no line fits) to 1 (every sample on one line)."""


class ThresholdVerdict(NamedTuple):
    """One threshold against one snapshot."""

    threshold: Threshold
    value: int | None
    """The threshold's quantity for this capacity; None when it is a percentage of an unknown capacity."""
    met: bool
    """Below the value, or kept met by minimum reclaim."""
    active_since: float | None
    """When it was first observed met; None if it is not met. `MemoryModel.LOWER`: once more than page cache is short,
    since when that is so."""
    due: bool
    """Past its grace, and everything else that it requires holds: pods may be evicted for it."""
    not_due_reason: str = ""
    """Why a met threshold is not due: its grace, page cache only, bytes that run out before inodes, a missing stall, an
    old sample, observe-only."""
    not_due_code: RefusalCode | None = None
    """The refusal that keeps a threshold past its grace from being due, if it is one: `page-cache-only`,
    `page-cache-unknown`, `bytes-first`, or `stable-disk` or `images-first`, which also keep it from being met."""


class SignalVerdict(NamedTuple):
    """The verdict on one signal."""

    observation: Observation
    state: SignalState
    thresholds: tuple[ThresholdVerdict, ...]
    trend: Trend | None = None
    figures: MemoryFigures | None = None
    """Both figures of a memory signal; None for other signals."""

    @property
    def signal(self) -> Signal:
        return self.observation.signal


class ConditionStatus(enum.StrEnum):
    """Status of a node condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class ConditionVerdict(NamedTuple):
    """The status that a pressure condition should have."""

    type: ConditionType
    status: ConditionStatus
    reason: str
    """CamelCase, the kubelet's (`KubeletHasInsufficientMemory`) only where this agent replaces it, else our own."""
    message: str
    since: float
    """When the status last changed, CLOCK_BOOTTIME."""


class Deficit(NamedTuple):
    """How much of a resource must be released: value + minimum reclaim - available - pending release, at least
    0."""

    signal: Signal
    amount: int
    pending_release: int


class RankKey(NamedTuple):
    """One sort key of a ranked pod. Smaller values are evicted first."""

    name: str
    value: float
    text: str
    """For people: `uses 212Mi over its request`."""


class RankedPod(NamedTuple):
    """A pod at its rank in the eviction order."""

    view: PodView
    rank: int
    """1 is evicted first. Protected pods have a rank too."""
    keys: tuple[RankKey, ...]
    """Empty in a fresh plan, because texts for 500 pods cost more than the decision. For a report or a record
    `policy.ranking.with_key_texts(plan)` fills them from `values`."""
    usage: int | None
    """Of the ranked resource: bytes, inodes or PIDs, in the kubelet's order processes. Memory includes `swap`."""
    request: int | None
    """None where the resource has no request (inodes, PIDs)."""
    relief: int | None
    """What its eviction is expected to free."""
    refusals: tuple[Refusal, ...] = ()
    """Why it would not be evicted; empty for a candidate."""
    values: tuple[float, ...] = ()
    """The value of each key of `Plan.rank_order`, in that order; smaller is evicted first."""
    swap: int = 0
    """The part of a memory usage that is in swap."""


class Method(enum.StrEnum):
    """How a victim is evicted."""

    EVICT = "evict"
    """The Eviction API: PodDisruptionBudgets are respected."""
    REQUEST = "request"
    """An EvictionRequest (KEP-4563), which others carry out: only soft, only with `evictionRequest.enabled`."""
    DELETE = "delete"
    """DELETE with a DisruptionTarget condition: only hard, only with `onBlocked: delete`."""
    KILL = "kill"
    """No request: its processes are killed through its cgroup. Only hard, only with `lastResort: cgroupKill`, only
    while the API server is unreachable."""


class Victim(NamedTuple):
    """A pod to evict now, and everything that its request needs."""

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
    hook: str = ""
    """How the hook before this eviction ended, or why it did not run; empty without a hook."""


class EvictionRequestOrder(NamedTuple):
    """What becomes of an EvictionRequest that was made: it is followed, or withdrawn."""

    plan_id: str
    """The decision that made it."""
    pod_uid: str
    namespace: str
    withdraw: bool


class ReliefReport(NamedTuple):
    """The measured relief of one decision's evictions, beside the prediction."""

    plan_id: str
    signal: Signal
    pod_uids: tuple[str, ...]
    predicted: int
    """Bytes, inodes or threads that the decision predicted."""
    measured: int
    """Change of `available` from the decision's sample to the first sample after the last victim's cgroup was gone;
    negative if more was taken than released."""
    took_s: float
    """From the decision to that sample."""


class ReclaimTarget(NamedTuple):
    """A pod whose page cache may be reclaimed."""

    pod: str
    """`namespace/name`, for people."""
    cgroup: str
    """Below the hierarchy's root, starting with `/`."""
    amount: int
    """The most that may be reclaimed, in bytes."""
    keep: int
    """Its usage stays at or above this: the larger of its memory request and what memory.min or memory.low protects."""


class ReclaimOrder(NamedTuple):
    """A reclaim action to run before pods are evicted."""

    name: str
    """Of the configured action, or `pageCache`."""
    signal: Signal
    tier: Tier
    deficit: int
    """What must be released."""
    available: int
    until: float
    """CLOCK_BOOTTIME of its deadline."""
    level: int | None = None
    """Page cache: the amount of `signal` by the working set at which the reclaim ends."""
    targets: tuple[ReclaimTarget, ...] = ()
    """Page cache: the pods, in this order. Empty for every other action."""


class ReclaimResult(enum.StrEnum):
    """How a reclaim action ended."""

    DONE = "done"
    """It ran to its end. Page cache: the level is reached."""
    STOPPED = "stopped"
    """Page cache: it ended below the level, because the pods have no more of it or began to stall."""
    FAILED = "failed"
    """It could not be started, its exit code was not 0, or the kernel refused it."""
    TIMED_OUT = "timed-out"
    DRY_RUN = "dry-run"
    """Nothing ran."""


class ReclaimOutcome(NamedTuple):
    """The end of a reclaim order."""

    plan_id: str
    name: str
    result: ReclaimResult
    message: str
    """Exit code and the end of its output, or why it did not run. Page cache: the bytes of each pod."""
    at: float
    reclaimed: int = 0
    """Page cache: the bytes that were reclaimed."""


class ReclaimReport(NamedTuple):
    """The gain of a reclaim action, by the first sample after its end."""

    plan_id: str
    name: str
    signal: Signal
    result: ReclaimResult
    gained: int
    """Change of `available` since the decision; negative if more was taken than freed."""
    took_s: float
    """From the decision to the end of the action."""
    message: str = ""
    """Of its outcome; empty if that was lost."""


class Plan(NamedTuple):
    """One decision: verdicts, victims, and refusals for what is not done. One id for log, Event and metric."""

    id: str
    made_at: float
    snapshot_taken_at: float
    signals: tuple[SignalVerdict, ...]
    conditions: tuple[ConditionVerdict, ...]
    acting_on: ThresholdVerdict | None = None
    """The threshold that the plan acts on; None if none is due."""
    deficit: Deficit | None = None
    ranking: tuple[RankedPod, ...] = ()
    """The order for the most urgent resource, memory if no threshold is met."""
    ranked_for: Signal = Signal.MEMORY
    victims: tuple[Victim, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    """Why no pod, or not more, is evicted although a threshold is due or a pod is near its own limit, and why memory
    limits are not raised."""
    notes: tuple[Note, ...] = ()
    rank_order: tuple[str, ...] = ()
    """Names of the sort keys of `ranking`, most significant first; then namespace, name and UID."""
    relief_reports: tuple[ReliefReport, ...] = ()
    """Earlier evictions whose relief this snapshot measured."""
    outcomes: tuple[Outcome, ...] = ()
    """Of earlier EvictionRequests, by this snapshot: others have evicted the pod."""
    reclaims: tuple[ReclaimOrder, ...] = ()
    """The actions to run now."""
    reclaim_reports: tuple[ReclaimReport, ...] = ()
    """Earlier actions whose gain this snapshot measured."""
    recount: tuple[str, ...] = ()
    """UIDs (of cgroups) of pods whose disk usage must be measured again before they can be evicted."""
    hooks: tuple[HookOrder, ...] = ()
    """The hooks to run now, before the soft tier evicts."""
    owner_lookups: tuple[OwnerLookup, ...] = ()
    """The owners whose replicas a later decision needs."""
    node_fit_lookups: tuple[NodeFitLookup, ...] = ()
    """The pods of which a later decision needs to know whether another node takes them."""
    resizes: tuple[ResizeOrder, ...] = ()
    """The resizes to request now (`ownLimit.resize`)."""
    resize_reports: tuple[ResizeOutcome, ...] = ()
    """What the kubelet has made of earlier ones, by this snapshot."""
    soft_eviction_in_flight: bool = False
    """The soft tier evicts a pod for the node, or has evicted one that is not gone yet."""

    @property
    def eviction_refusals(self) -> tuple[Refusal, ...]:
        """Without those that are only about raises of memory limits."""
        return tuple([each for each in self.refusals if each.code.kind is not RefusalKind.RESIZE])

    @property
    def wants_slot(self) -> bool:
        """Whether the node needs an eviction slot of its zone: the soft tier evicts, would evict, or has evicted a pod
        that is not gone yet."""
        return self.soft_eviction_in_flight or any(refusal.code.wants_slot for refusal in self.refusals)

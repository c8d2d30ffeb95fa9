"""The nouns that pass between the rooms of the house: plain, immutable facts.

Facts flow one way: sampling/ and cluster/ make a `NodeSnapshot`, policy/ turns it into a `Plan`, the actuators in
cluster/ answer with `Outcome`s, and journal/ and report/ tell what happened. This module imports no other room.

Conventions, everywhere in the project:

* Bytes, inodes and processes are `int`; durations are `float` seconds named `..._s`.
* An instant named `..._at` is seconds on CLOCK_BOOTTIME (monotonic, counts suspend, survives a restart of the process).
  `wall_time` is seconds since the epoch and is only for stamps that people and API objects read.
* `None` means *not known*, never zero. Whatever is unknown carries a reason beside it, and unknown is never pressure.

The classes are NamedTuples: immutable, without a `__dict__`, and cheap to define, which `nodeagent check` pays for on
every start: 30 of them take 4 ms with typing, where the same dataclasses take 24 (python 3.11), and less with
`nodeagent.lean`. For the same reason the annotations here are real objects, not strings.
"""

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple

from nodeagent.model.notes import Note as Note
from nodeagent.model.notes import NoteKind as NoteKind


class Signal(enum.StrEnum):
    """An eviction signal, by the name that the kubelet's configuration gives it."""

    MEMORY = "memory.available"
    ALLOCATABLE_MEMORY = "allocatableMemory.available"
    NODEFS = "nodefs.available"
    NODEFS_INODES = "nodefs.inodesFree"
    IMAGEFS = "imagefs.available"
    IMAGEFS_INODES = "imagefs.inodesFree"
    CONTAINERFS = "containerfs.available"
    CONTAINERFS_INODES = "containerfs.inodesFree"
    PID = "pid.available"


class ConditionType(enum.StrEnum):
    """A pressure condition of a Node object."""

    MEMORY_PRESSURE = "MemoryPressure"
    DISK_PRESSURE = "DiskPressure"
    PID_PRESSURE = "PIDPressure"


class Unit(enum.StrEnum):
    """What a signal counts."""

    BYTES = "bytes"
    INODES = "inodes"
    PIDS = "pids"


class SignalFacts(NamedTuple):
    """One row of the signal table."""

    signal: Signal
    resource: str
    """The resource name in the kubelet's texts (KUBELET-CONTRACT: `The node was low on resource: ...`)."""
    condition: ConditionType
    unit: Unit
    urgency: int
    """Order in which starved resources are served: memory 0, disk bytes 1, inodes 2, PIDs 3."""


SIGNAL_TABLE: Final[Mapping[Signal, SignalFacts]] = {
    facts.signal: facts
    for facts in (
        SignalFacts(Signal.MEMORY, "memory", ConditionType.MEMORY_PRESSURE, Unit.BYTES, 0),
        SignalFacts(Signal.ALLOCATABLE_MEMORY, "memory", ConditionType.MEMORY_PRESSURE, Unit.BYTES, 0),
        SignalFacts(Signal.NODEFS, "ephemeral-storage", ConditionType.DISK_PRESSURE, Unit.BYTES, 1),
        SignalFacts(Signal.NODEFS_INODES, "inodes", ConditionType.DISK_PRESSURE, Unit.INODES, 2),
        SignalFacts(Signal.IMAGEFS, "ephemeral-storage", ConditionType.DISK_PRESSURE, Unit.BYTES, 1),
        SignalFacts(Signal.IMAGEFS_INODES, "inodes", ConditionType.DISK_PRESSURE, Unit.INODES, 2),
        SignalFacts(Signal.CONTAINERFS, "ephemeral-storage", ConditionType.DISK_PRESSURE, Unit.BYTES, 1),
        SignalFacts(Signal.CONTAINERFS_INODES, "inodes", ConditionType.DISK_PRESSURE, Unit.INODES, 2),
        SignalFacts(Signal.PID, "pids", ConditionType.PID_PRESSURE, Unit.PIDS, 3),
    )
}

MEMORY_SIGNALS: Final = frozenset({Signal.MEMORY, Signal.ALLOCATABLE_MEMORY})
DISK_BYTE_SIGNALS: Final = frozenset({Signal.NODEFS, Signal.IMAGEFS, Signal.CONTAINERFS})
DISK_INODE_SIGNALS: Final = frozenset({Signal.NODEFS_INODES, Signal.IMAGEFS_INODES, Signal.CONTAINERFS_INODES})
DISK_SIGNALS: Final = DISK_BYTE_SIGNALS | DISK_INODE_SIGNALS


# --- thresholds (made by config/, judged by policy/) -----------------------------------------------------------------


class MemoryModel(enum.StrEnum):
    """Which number `memory.available` is."""

    WORKING_SET = "workingset"
    """The kubelet's: MemTotal - (usage - inactive_file) of the root cgroup."""
    MEM_AVAILABLE = "memavailable"
    """The kernel's own estimate: MemAvailable of /proc/meminfo."""


class Amount(NamedTuple):
    """A threshold value as configured: either a quantity or a percentage of the signal's capacity."""

    quantity: int | None
    """Bytes, inodes or PIDs, rounded up to a whole number; None when this is a percentage."""
    percentage: float | None
    """Percent, 0 to 100 and above, as written (`10%` is 10.0); None when this is a quantity."""
    text: str
    """As the user wrote it, for reports and messages."""


class StallScope(enum.StrEnum):
    """Whose pressure stall information (PSI) is meant."""

    NODE = "node"
    KUBEPODS = "kubepods"
    SYSTEM = "system"


class StallRequirement(NamedTuple):
    """A second key beside the level: the threshold acts only while this stall is seen as well."""

    scope: StallScope
    resource: str
    """`memory` or `io`; never `cpu`."""
    kind: str
    """`some` or `full`."""
    window: str
    """`avg10` or `avg60`."""
    at_least: float
    """Percent of wall time stalled, 0 to 100."""


class Threshold(NamedTuple):
    """One eviction threshold. Its identity is (signal, grace period, value), as in the kubelet."""

    signal: Signal
    value: Amount
    grace_period_s: float = 0.0
    min_reclaim: Amount | None = None
    memory_model: MemoryModel = MemoryModel.WORKING_SET
    require_stall: StallRequirement | None = None
    exhaustion_within_s: float | None = None
    """Soft thresholds only: also met when the trend says the resource is exhausted within this time."""

    @property
    def hard(self) -> bool:
        """A threshold without grace is hard, whichever map it was configured in (the kubelet's rule)."""
        return self.grace_period_s == 0.0


# --- observations of the node (made by sampling/) --------------------------------------------------------------------


class Observation(NamedTuple):
    """What one signal read."""

    signal: Signal
    available: int | None
    """May be negative for `pid.available`. None: could not be read, see `reason`."""
    capacity: int | None
    """What a percentage is a percentage of."""
    read_at: float
    source: str
    """Where the numbers come from, for people: `/proc/meminfo - /sys/fs/cgroup/memory.stat`."""
    reason: str = ""
    """Why `available` is None."""
    device: int | None = None
    """st_dev of the file system behind a disk signal, so that signals on one device can be told to be the same."""


class HugePages(NamedTuple):
    """One HugeTLB pool of the node. Pre-allocated pages are invisible to `memory.available`."""

    page_size: int
    total: int
    free: int
    reserved: int


class NodeMemory(NamedTuple):
    """/proc/meminfo in bytes, and what the report shows beside the working set."""

    total: int
    free: int
    mem_available: int | None
    buffers: int
    cached: int
    anon: int
    shmem: int
    dirty: int
    slab_reclaimable: int
    slab_unreclaimable: int
    kernel_stack: int
    page_tables: int
    swap_total: int
    swap_free: int
    hugepages: tuple[HugePages, ...] = ()
    hugetlb: int = 0


class Stall(NamedTuple):
    """Pressure stall information of one scope and resource: percent of wall time, and the running total in us."""

    scope: StallScope
    resource: str
    some_avg10: float
    some_avg60: float
    some_total_us: int
    full_avg10: float | None
    full_avg60: float | None
    full_total_us: int | None
    read_at: float


class DiskLayout(enum.StrEnum):
    """Which file systems the node's disk signals stand for (KUBELET-CONTRACT: single, dedicated imagefs, split)."""

    SINGLE = "single"
    DEDICATED_IMAGEFS = "dedicated-imagefs"
    SPLIT = "split"
    UNKNOWN = "unknown"


class CgroupUsage(NamedTuple):
    """A cgroup outside kubepods, for saying where a resource is when it is not in pods."""

    path: str
    memory_working_set: int | None
    process_count: int | None


# --- pods ------------------------------------------------------------------------------------------------------------


class QOSClass(enum.StrEnum):
    """Kubernetes QoS class."""

    BEST_EFFORT = "BestEffort"
    BURSTABLE = "Burstable"
    GUARANTEED = "Guaranteed"


class DiskUsage(NamedTuple):
    """What one pod or container holds on disk. None: not measured."""

    rootfs_bytes: int | None = None
    rootfs_inodes: int | None = None
    logs_bytes: int | None = None
    logs_inodes: int | None = None
    volumes_bytes: int | None = None
    """Local volumes: disk-backed emptyDir, configMap, gitRepo. 0 for a container."""
    volumes_inodes: int | None = None
    other_bytes: int | None = None
    """etc-hosts and files directly in the pod's log directory: the kubelet counts them against the pod's limit, but not
    in ranking. None for a container."""
    other_inodes: int | None = None
    deleted_layer_bytes: int | None = None
    """Files of the layers that have no name any more but are held open, in no number above. None: not looked for, or
    for a container."""
    deleted_layer_inodes: int | None = None
    deleted_volume_bytes: int | None = None
    """The same of its volumes and of everything else on a disk of the node."""
    deleted_volume_inodes: int | None = None


class DiskUsageQuality(NamedTuple):
    """How well it is known what a pod holds on disk."""

    read_at: float
    """When the oldest of its numbers was read."""
    complete: bool
    """Every place was found and walked to its end. False: the sums are lower bounds."""
    unknown: tuple[str, ...] = ()
    """What is not counted, or only in part, and why."""
    deleted_bytes: int | None = None
    """Deleted files that the pod holds open. They count in `DiskUsage.deleted_...`, except where a project quota tells
    what a volume or layer holds: it has them already. None: not looked for."""
    deleted_pid: int | None = None
    """The process that holds the largest of them."""
    periodic: bool = False
    """Counted in its turn, and not because a decision has asked for it (`Plan.count_anew`)."""


class WriteRate(NamedTuple):
    """What a pod writes to disks, between two walks."""

    bytes_per_s: float
    """Between the last two samples; never negative."""
    written: int
    """Bytes since the agent began to watch it."""
    watched_s: float
    read_at: float


class ContainerUsage(NamedTuple):
    """What one container uses now. Containers are known to the kernel by id, to the API by name."""

    container_id: str
    name: str | None
    """None until the API or the log directory tells which container this id is."""
    memory_working_set: int | None
    process_count: int | None
    disk: DiskUsage = DiskUsage()


class VolumeUsage(NamedTuple):
    """One local volume of a pod."""

    name: str
    used_bytes: int | None
    used_inodes: int | None
    memory_backed: bool


class PodUsage(NamedTuple):
    """What one pod uses now, as the kernel counts it. Keyed by the UID in its cgroup's name."""

    cgroup_uid: str
    """metadata.uid, except for static pods, whose cgroup carries the config hash (API: annotation config.mirror)."""
    qos_class: QOSClass
    """From the cgroup's place in the tree."""
    cgroup: str
    """Path of the pod cgroup below the hierarchy's root, starting with `/`."""
    read_at: float
    memory_working_set: int | None = None
    """max(0, usage - inactive_file) of the pod cgroup."""
    memory_usage: int | None = None
    """memory.current (v2) or memory.usage_in_bytes (v1): page cache included."""
    memory_unreclaimable: int | None = None
    """What killing the pod frees and reclaim alone would not: anon + shmem + unreclaimable kernel memory + dirty
    file pages."""
    memory_limit: int | None = None
    """The pod cgroup's own limit; None when it has none, it could not be read, or nobody needs it."""
    memory_stall_some_avg10: float | None = None
    memory_request_estimate: int | None = None
    """Bytes, reckoned from oom_score_adj (Burstable, to 0.1% of the node) or the cgroup limit (Guaranteed); 0 for
    BestEffort. Of a pod that the API tells of it may be None because nobody asked: nothing goes by it there."""
    process_count: int | None = None
    """Sum of cgroup.procs over the pod's cgroups: processes, not threads."""
    thread_count: int | None = None
    """pids.current of the pod cgroup."""
    started_at: float | None = None
    """When the pod's sandbox was made; for a pod that the API tells of it may be status.startTime, a little earlier."""
    forks_per_s: float | None = None
    """New processes and threads a second over the last few, however short they live. None: none, or not known."""
    disk: DiskUsage = DiskUsage()
    containers: tuple[ContainerUsage, ...] = ()
    volumes: tuple[VolumeUsage, ...] = ()
    disk_usage_quality: DiskUsageQuality | None = None
    """None: nothing of its disk was measured."""
    writing: WriteRate | None = None
    """None: its writes are not watched, or were looked at only once."""


class ContainerKind(enum.StrEnum):
    """Where in the pod's spec a container stands."""

    REGULAR = "regular"
    INIT = "init"
    SIDECAR = "sidecar"
    """An init container with restartPolicy Always."""


class Resources(NamedTuple):
    """Amounts of the resources that eviction looks at. None: not set. CPU in millicores, the others in bytes."""

    cpu_milli: int | None = None
    memory: int | None = None
    ephemeral_storage: int | None = None
    others: bool = False
    """Some further resource (hugepages, extended) is set."""


NO_RESOURCES: Final = Resources()


class Container(NamedTuple):
    """A container as its pod's spec and status have it."""

    name: str
    kind: ContainerKind = ContainerKind.REGULAR
    requests: Resources = NO_RESOURCES
    limits: Resources = NO_RESOURCES
    allocated: Resources | None = None
    """status.containerStatuses[].allocatedResources; None when not reported."""
    actual: Resources | None = None
    """status.containerStatuses[].resources.requests; None when not reported."""
    actual_limits: Resources | None = None
    container_id: str = ""
    """Without the runtime's prefix (`containerd://`); empty before the container was made."""
    restart_count: int = 0
    running: bool = False


class Owner(NamedTuple):
    """The controller that owns a pod."""

    kind: str
    name: str
    uid: str
    api_version: str = "apps/v1"


class EmptyDir(NamedTuple):
    """An emptyDir volume of a pod's spec."""

    name: str
    memory_backed: bool
    size_limit: int | None


class DisruptionBudget(NamedTuple):
    """A PodDisruptionBudget that selects a pod."""

    name: str
    disruptions_allowed: int


class PodSource(enum.StrEnum):
    """Who told us about a pod."""

    API = "api"
    HOST = "host"
    """Only the node itself: cgroup tree, /var/log/pods, oom_score_adj. Names may be missing and requests are
    estimates."""


class Pod(NamedTuple):
    """A pod of this node: what is wanted of it, as opposed to what it uses (`PodUsage`)."""

    uid: str
    """metadata.uid; the cgroup's UID when only the host told of the pod."""
    cgroup_uid: str
    """The UID in cgroup and log directory names. It differs from `uid` only for a mirror pod that the host confirms."""
    namespace: str | None
    name: str | None
    source: PodSource
    qos_class: QOSClass
    priority: int | None = None
    """spec.priority; None when not set or not known. Missing counts as 0 in ranking."""
    priority_class: str = ""
    phase: str = ""
    resource_version: str = ""
    created_wall: float | None = None
    """metadata.creationTimestamp, epoch seconds."""
    started_wall: float | None = None
    """status.startTime, epoch seconds."""
    deletion_wall: float | None = None
    """metadata.deletionTimestamp, epoch seconds: when its grace ends. Set means the pod is terminating."""
    deletion_grace_s: float | None = None
    """metadata.deletionGracePeriodSeconds."""
    termination_grace_s: float = 30.0
    """spec.terminationGracePeriodSeconds."""
    containers: tuple[Container, ...] = ()
    pod_requests: Resources | None = None
    """spec.resources.requests; None when spec.resources is not set, empty when it is set without requests."""
    pod_limits: Resources | None = None
    overhead: Resources = NO_RESOURCES
    resize_infeasible: bool = False
    ephemeral: bool = False
    """The spec has ephemeral containers, which `containers` leaves out: they ask for nothing."""
    host_pid: bool = False
    """spec.hostPID: its processes see those of the whole node."""
    owner: Owner | None = None
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    """Only those that decisions read: pod-deletion-cost, nodeagent.io/*, those of `protection.annotations`."""
    ready: bool = False
    node_bound: str = ""
    """Why the pod could only come back to this very node (nodeName set at creation, hostname selector or affinity,
    local PersistentVolume); empty when it is free to go elsewhere, as far as is known."""
    claims: tuple[str, ...] = ()
    """The PersistentVolumeClaims that it mounts, without those that end with it."""
    claims_unknown: str = ""
    """Why it is not known whether one of them binds the pod to this node; empty when it is known, or nobody asked."""
    claims_asked_at: float | None = None
    """CLOCK_BOOTTIME at which the claim that is not known was first asked for; None when nobody asked."""
    empty_dirs: tuple[EmptyDir, ...] = ()
    disruption_budgets: tuple[DisruptionBudget, ...] = ()
    static: str = ""
    """Where the kubelet itself has the pod from when it is not the API server: `file` or `http` in the kubelet's own
    list, `cgroup` when the cgroup carries a config hash. Empty for every pod that an API server lists."""
    mirror_of: str = ""
    """UID of the static pod that this mirror pod represents. Decoded only with the owner reference and the hashes that
    a kubelet writes, and cleared where the host or the Node object contradicts them."""

    @property
    def key(self) -> str:
        """`namespace/name`, or the UID where the name is not known."""
        return f"{self.namespace}/{self.name}" if self.namespace and self.name else f"uid/{self.uid}"

    @property
    def terminating(self) -> bool:
        return self.deletion_wall is not None

    @property
    def finished(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


class PodView(NamedTuple):
    """A pod and its usage; either side may be unknown, never both."""

    pod: Pod
    usage: PodUsage | None
    """None: no cgroup found (not started yet, already gone, or not readable)."""


class HostDirectory(NamedTuple):
    """A directory of the host, less what in it is some pod's."""

    path: str
    bytes: int
    inodes: int
    complete: bool
    """False: a lower bound."""


class UnattributedDisk(NamedTuple):
    """What of a file system is in no pod."""

    signals: tuple[Signal, ...]
    """The signals that this file system is behind."""
    used_bytes: int
    attributed_bytes: int
    used_inodes: int
    attributed_inodes: int
    largest: tuple[HostDirectory, ...]
    """Largest first, as far as there was time."""
    read_at: float

    @property
    def unattributed_bytes(self) -> int:
        return max(0, self.used_bytes - self.attributed_bytes)

    @property
    def unattributed_inodes(self) -> int:
        return max(0, self.used_inodes - self.attributed_inodes)


class DiskPoint(NamedTuple):
    """What a file system held at one moment."""

    at: float
    used_bytes: int
    attributed_bytes: int
    """What the pods were found to hold there."""
    used_inodes: int
    attributed_inodes: int


class DiskTrace(NamedTuple):
    """How what a file system holds has changed, and how much of the change is some pod's."""

    signals: tuple[Signal, ...]
    """The signals that this file system is behind."""
    first: DiskPoint
    """Some minutes ago, or when it was first counted."""
    recent: DiskPoint
    """Some seconds ago."""
    last: DiskPoint
    deleted_known: bool
    """The open files of all pods could be looked at. False: what is in deleted files may be some pod's."""


class Refusal(NamedTuple):
    """Why something was not done. `code` is a stable word for metrics and tests, `message` has the numbers."""

    code: str
    message: str


class NodeSnapshot(NamedTuple):
    """Everything one decision may look at. Made by sampling/, joined with the pods that cluster/ knows."""

    node: str
    taken_at: float
    wall_time: float
    observations: Mapping[Signal, Observation]
    """One for each signal, always; those that could not be read have `available` None and a reason."""
    mem_available: Observation
    """`memory.available` by the MemAvailable model."""
    memory: NodeMemory | None = None
    stalls: tuple[Stall, ...] = ()
    layout: DiskLayout = DiskLayout.UNKNOWN
    pods: tuple[PodView, ...] = ()
    pods_synced_at: float | None = None
    """When the API's view of the pods was last known to be current; None: pods come from the host alone."""
    cgroups: tuple[CgroupUsage, ...] = ()
    notes: tuple[Note, ...] = ()
    own_pod_uid: str = ""
    """metadata.uid of the pod this agent runs in; empty when it does not run in a pod."""
    api_unreachable_since: float | None = None
    """Since when every request to the API server has gone without any answer. None: the last one was answered, or none
    was sent (a watch on which nothing happens is no sign of trouble), or there is no API server to ask."""
    soft_tier_blocked_by: Refusal | None = None
    """What the soft tier has to wait for before it evicts: the fence, the fleet. None: for nothing."""
    unattributed_disks: tuple[UnattributedDisk, ...] = ()
    """What of each file system is in no pod; empty where nobody looked."""
    disk_traces: tuple[DiskTrace, ...] = ()
    """How each file system has filled; empty where nobody counted."""
    suspended_s: float = 0.0
    """For how long the machine was suspended since it booted, in all."""

    def with_surroundings(
        self, *, own_pod_uid: str, api_unreachable_since: float | None, soft_tier_blocked_by: Refusal | None
    ) -> "NodeSnapshot":
        """The snapshot with what only the loop knows. Every sample that is judged goes through here, so that the second
        one right before acting cannot leave anything out."""
        return self._replace(
            own_pod_uid=own_pod_uid,
            api_unreachable_since=api_unreachable_since,
            soft_tier_blocked_by=soft_tier_blocked_by,
        )

    def observe(self, signal: Signal, model: MemoryModel = MemoryModel.WORKING_SET) -> Observation:
        """The observation that a threshold with this memory model looks at."""
        if signal is Signal.MEMORY and model is MemoryModel.MEM_AVAILABLE:
            return self.mem_available
        return self.observations[signal]


# --- decisions (made by policy/) -------------------------------------------------------------------------------------


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
    """Empty in a fresh plan, because texts for 500 pods cost more than the decision: `policy.ranking.explained(plan)`
    fills them from `values` for whoever shows or records the plan."""
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


class Tier(enum.StrEnum):
    SOFT = "soft"
    HARD = "hard"


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


# --- outcomes (made by cluster/) -------------------------------------------------------------------------------------


class OutcomeKind(enum.StrEnum):
    """How an eviction request ended (KUBELET-CONTRACT, API results)."""

    ACCEPTED = "accepted"
    """200, 201 or 202 with the answer that the API defines: the pod is terminating."""
    DRY_RUN = "dry-run"
    """Nothing was sent."""
    BLOCKED_BY_PDB = "blocked-by-pdb"
    """429 with cause DisruptionBudget."""
    TOO_MANY_REQUESTS = "too-many-requests"
    """429 without that cause: API priority and fairness."""
    PDB_CONFLICT = "pdb-conflict"
    """500: more than one PodDisruptionBudget matches."""
    NOT_FOUND = "not-found"
    """404, and the API server does not list the pod any more."""
    CONFLICT = "conflict"
    """409: another pod (UID) has this name now, or its version moved."""
    INVALID = "invalid"
    """400 or 422, twice: the request was wrong; a defect of ours or of the server. Or 404 twice for a pod that the API
    server lists. Or 403 of an admission policy or webhook, which refuses this pod."""
    FORBIDDEN = "forbidden"
    """403."""
    UNAUTHORIZED = "unauthorized"
    """401."""
    SERVER_ERROR = "server-error"
    """Other 5xx, or an answer that is not the API's (a redirect, a proxy's page): it may or may not be terminating."""
    TIMED_OUT = "timed-out"
    """No complete answer in time, once bytes of the request may have left: the pod may or may not be terminating."""
    UNREACHABLE = "unreachable"
    """Nothing left this machine: no connection, a deadline that passed before, a defect of ours."""
    RECHECK_REFUSED = "recheck-refused"
    """The sample taken right before acting no longer asked for it."""
    KILLED = "killed"
    """Its processes were ended through its cgroup. The API knows nothing of it yet."""
    NOT_KILLED = "not-killed"
    """The kernel refused that; nothing was ended."""


class Outcome(NamedTuple):
    """What became of one victim."""

    plan_id: str
    pod_uid: str
    kind: OutcomeKind
    message: str
    at: float
    retry_after_s: float | None = None
    http_status: int | None = None

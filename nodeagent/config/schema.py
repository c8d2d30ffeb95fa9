"""Define the configuration as immutable values with built-in defaults.

A field name is the YAML key in snake_case. A duration ends in `_s` here and is a Go duration (`1m30s`) in the file. The
string below a field is its documentation, and what is `Annotated` to its type limits its value. The loader, the JSON
Schema and `docs/configuration.md` read both here. The top level of the file has the keys of `EvictionConfig` and
`Config`.

Keys that exist in KubeletConfiguration have the kubelet's names and meanings. `load.py` turns files into these values,
and `policy` interprets them.
"""

import enum
from collections.abc import Mapping
from typing import Annotated, Final, NamedTuple

from nodeagent.model import Amount, MemoryModel, Signal, StallScope, Threshold

API_VERSION: Final = "nodeagent.io/v1alpha1"
KIND: Final = "NodeAgentConfiguration"
DROPPED: Final = ("0%", "100%")
"""Thresholds written exactly so are no thresholds at all: how a kubelet's default is switched off."""


# --- what bounds a value ---------------------------------------------------------------------------------------------


class Range(NamedTuple):
    """Smallest and largest number; seconds for a duration."""

    minimum: float
    maximum: float


class OneOf(NamedTuple):
    """The words that a string may be."""

    words: tuple[str, ...]


class Shape(NamedTuple):
    """The form of a string."""

    pattern: str
    says: str
    """For messages: `must be ...`."""


class Mark(enum.Enum):
    DERIVED = "derived"
    """Not a key of the file."""
    WHOLE_SECONDS = "whole seconds"
    """A plain number of seconds in the file, as the kubelet has it, although all other durations have units."""
    NOT_EMPTY = "not empty"
    MAY_REPEAT = "may repeat"
    """A list in which the same word may stand twice."""


class AmountRule(enum.Enum):
    """What an amount is for, which decides what zero and more than all mean."""

    THRESHOLD = "threshold"
    """Above zero; a percentage from 0% to 100%."""
    RECLAIM = "minimum reclaim"
    """A quantity may be 0, a percentage must be above 0% and may be above 100%."""
    SHARE = "share"
    """A quantity may be 0, a percentage is from 0% to 100%."""


LONGEST_S: Final = 31_536_000.0
"""A year: no duration of the agent makes sense above it, and a slip such as 300h for 300m still passes."""
ANY_DURATION: Final = Range(0, LONGEST_S)
SOME_DURATION: Final = Range(0.001, LONGEST_S)
SHARE: Final = Range(0, 1)
COUNT: Final = Range(1, 100_000)
NAMESPACES: Final = Shape(
    r"\*|[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "a namespace (lower-case letters, digits and '-') or `*`"
)
DNS_LABEL: Final = Shape(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "a namespace: lower-case letters, digits and '-'")
NODE_NAME: Final = Shape(
    r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?", "a node name: lower-case letters, digits, '-' and '.'"
)
DIRECTORY: Final = Shape(r"/[^\x00-\x1f]*", "an absolute path")
DIRECTORY_OR_NONE: Final = Shape(r"(/[^\x00-\x1f]*)?", "an absolute path, or empty")
FILE_OR_NONE: Final = Shape(r"[^\x00-\x1f]*", "a path")
SELECTOR: Final = Shape(r"[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?(=[^\x00-\x1f]*)?", "`key` or `key=value`")


# --- sections --------------------------------------------------------------------------------------------------------


class Mode(enum.StrEnum):
    DRY_RUN = "dry-run"
    ENFORCE = "enforce"


class StandardConditions(enum.StrEnum):
    """What to do with MemoryPressure, DiskPressure and PIDPressure, which a live kubelet owns as well."""

    REASSERT = "reassert"
    ONCE = "once"
    OFF = "off"


class OnExit(enum.StrEnum):
    CLEAR = "clear"
    KEEP = "keep"


class OnBlocked(enum.StrEnum):
    WAIT = "wait"
    DELETE = "delete"


class OnFutile(enum.StrEnum):
    """What the hard tier does when all candidates together cannot clear the deficit."""

    STOP = "stop"
    EVICT = "evict"


class BrakeMode(enum.StrEnum):
    """How a victim is held until it goes."""

    NONE = "none"
    THROTTLE = "throttle"
    FREEZE = "freeze"


class HardKill(enum.StrEnum):
    NONE = "none"
    CGROUP = "cgroup"


class LastResort(enum.StrEnum):
    NONE = "none"
    CGROUP_KILL = "cgroupKill"


class RankingKey(enum.StrEnum):
    QOS = "qos"
    EXCEEDS_REQUEST = "exceedsRequest"
    PRIORITY = "priority"
    USAGE_OVER_REQUEST = "usageOverRequest"
    USAGE = "usage"
    GROWTH = "growth"
    POD_DELETION_COST = "podDeletionCost"
    AGE = "age"
    DUPLICATE_ON_NODE = "duplicateOnNode"
    RESTART_COUNT = "restartCount"


class RankingConfig(NamedTuple):
    order: Annotated[tuple[RankingKey, ...], Mark.NOT_EMPTY] = (
        RankingKey.QOS,
        RankingKey.EXCEEDS_REQUEST,
        RankingKey.PRIORITY,
        RankingKey.USAGE_OVER_REQUEST,
    )
    """Keys that put pods in eviction order, most significant first. `kubelet` instead of a list gives the kubelet's own
    order for each resource."""
    kubelet: Annotated[bool, Mark.DERIVED] = False
    """Set by `order: kubelet`; not a key of its own."""


class ReliefConfig(NamedTuple):
    minimum_relief: Annotated[Amount, AmountRule.SHARE] = Amount(None, 1.0, "1%")
    """A pod whose eviction frees less than this share of the deficit (or this quantity) is never chosen for being
    first in rank."""
    max_victims: Annotated[int, Range(1, 1000)] = 5
    """Most pods that one hard decision evicts at once. The soft tier always takes one and looks again."""
    on_futile: OnFutile = OnFutile.STOP
    """Hard tier only: what to do when all candidates together cannot clear the deficit. `stop` evicts nobody and
    reports where the resource is; `evict` takes them anyway. The soft tier always stops."""
    failures_before_stop: Annotated[int, COUNT] = 3
    """After this many evictions in a row whose measured relief was less than half of the predicted one, stop and
    alarm."""
    failure_memory_s: Annotated[float, ANY_DURATION] = 600.0
    """How long such failures are held against the resource."""


class DampingConfig(NamedTuple):
    """Flap damping of the published conditions, after RFC 2439."""

    penalty: Annotated[float, Range(1, 1_000_000)] = 1000.0
    """Added each time a condition goes from False to True."""
    suppress_above: Annotated[float, Range(1, 1_000_000)] = 2000.0
    """While the penalty is above this, a True condition is held."""
    release_below: Annotated[float, Range(1, 1_000_000)] = 750.0
    """A held condition is released when its penalty has decayed below this."""
    half_life_s: Annotated[float, SOME_DURATION] = 300.0
    """The penalty halves in this time."""
    max_hold_s: Annotated[float, ANY_DURATION] = 1800.0
    """No condition is held longer than this after it was last observed."""
    jitter: Annotated[float, SHARE] = 0.1
    """A release is delayed by up to this share of the transition period, so that a fleet does not release at once."""
    max_transitions_per_hour: Annotated[int, Range(2, 100_000)] = 12
    """Bound on changes of one condition, whatever the signal does; a change to True is never refused by it."""


class StartupConfig(NamedTuple):
    fresh_samples: Annotated[int, COUNT] = 3
    """After a start or a change of configuration only observe until this many samples in a row were complete."""


class ProtectionConfig(NamedTuple):
    """Pods that are never victims. Static, mirror, own, system-node-critical pods and priorities of 2000000000 and
    above
    are protected whatever stands here."""

    daemon_sets: bool = True
    """Protect pods whose controller is a DaemonSet of the API group `apps`."""
    namespaces: Annotated[tuple[str, ...], DNS_LABEL] = ("kube-system", "nodeagent")
    """Protect every pod in these namespaces. daemonset.yaml's admission policy lets nobody be evicted from kube-system
    and from the agent's own namespace, whatever stands here."""
    bare_pods: bool = True
    """Protect pods that no controller would bring back."""
    node_bound: bool = True
    """Protect pods that could only come back to this very node: by `nodeName` in their template, a hostname selector or
    affinity, or a local PersistentVolume. While it is not known whether a volume is local, its pod is protected."""
    minimum_age_s: Annotated[float, ANY_DURATION] = 60.0
    """Soft tier: protect pods younger than this. In the hard tier the youngest is often the culprit."""
    disruption_budgets: bool = True
    """Soft tier: protect pods whose PodDisruptionBudget allows no disruption now."""
    labels: Annotated[tuple[str, ...], SELECTOR] = ()
    """Protect pods with any of these labels, `key` or `key=value`, in `trustedNamespaces`: whoever may create a pod
    writes its labels."""
    annotations: Annotated[tuple[str, ...], SELECTOR] = ()
    """Protect pods with any of these annotations, `key` or `key=value`, in `trustedNamespaces`."""
    trusted_namespaces: Annotated[tuple[str, ...], NAMESPACES] = ()
    """Namespaces whose pods may protect themselves: by `labels` and `annotations` in both tiers, by the annotation
    `nodeagent.io/evict: never|prefer|avoid` in the soft tier. Elsewhere these are ignored. `"*"`: every namespace."""
    unknown_pods: bool = True
    """Protect pods that the API has not told about: nobody knows what they are."""


class TokenBucket(NamedTuple):
    """A token bucket: `burst` evictions at once, refilled at `per_hour`."""

    burst: Annotated[int, COUNT]
    """Most evictions at once."""
    per_hour: Annotated[float, Range(0, 100_000)]
    """Evictions that become possible again in an hour."""


class RateLimits(NamedTuple):
    node: TokenBucket = TokenBucket(5, 30.0)
    """Evictions on this node."""
    namespace: TokenBucket = TokenBucket(3, 20.0)
    """Evictions in one namespace."""
    owner: TokenBucket = TokenBucket(2, 6.0)
    """Evictions of one owner's pods (Deployment's ReplicaSet, StatefulSet, Job)."""
    signal: TokenBucket = TokenBucket(5, 30.0)
    """Evictions for one signal."""
    last_resort: TokenBucket = TokenBucket(1, 6.0)
    """Kills of `escalation.lastResort`."""
    owner_backoff_s: Annotated[float, ANY_DURATION] = 60.0
    """After an eviction its owner's other pods are spared this long; doubled each time."""
    owner_backoff_max_s: Annotated[float, ANY_DURATION] = 1800.0
    """Longest such back-off; forgotten after twice this time without an eviction."""


class ReclaimKind(enum.StrEnum):
    """What a reclaim action is."""

    COMMAND = "command"
    IMAGES = "images"
    JOURNAL = "journal"
    CONTAINER_LOGS = "containerLogs"


class ReclaimAction(NamedTuple):
    name: Annotated[str, Shape(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", "a name: letters, digits, `-_.`")]
    """Names the action in the log, in records and in budgets."""
    kind: ReclaimKind = ReclaimKind.COMMAND
    """`command` runs `command`; `images` runs `crictl rmi --prune`, `journal` runs `journalctl --vacuum-size=200M`,
    unless `command` says otherwise; `containerLogs` removes the logs of containers that have ended."""
    command: Annotated[tuple[str, ...], Mark.MAY_REPEAT, Shape(r"[^\x00]+", "a word")] = ()
    """The program and its arguments; no shell. NODEAGENT_RESOURCE, NODEAGENT_SIGNAL, NODEAGENT_DEFICIT and
    NODEAGENT_AVAILABLE are in its environment."""
    signals: Annotated[tuple[Signal, ...], Mark.NOT_EMPTY] = (
        Signal.NODEFS,
        Signal.NODEFS_INODES,
        Signal.IMAGEFS,
        Signal.IMAGEFS_INODES,
        Signal.CONTAINERFS,
        Signal.CONTAINERFS_INODES,
    )
    """The signals that it may help. `images` and `containerLogs` are not run for those of a file system that has none
    of them."""
    timeout_s: Annotated[float, Range(0.1, 3600)] = 30.0
    """It is ended, with all processes of its group, after this; no decision waits longer for it."""
    min_interval_s: Annotated[float, ANY_DURATION] = 600.0
    """It is not run again before this has passed since its last start. While a threshold is met its evictions wait for
    it once only, so that a short interval costs commands, not evictions."""


class ReclaimConfig(NamedTuple):
    actions: tuple[ReclaimAction, ...] = ()
    """What is tried before pods are evicted, one after another in this order."""
    wait_for_kubelet_s: Annotated[float, Range(0, 600)] = 10.0
    """Soft tier, disks: how long a threshold that is due waits for the kubelet's own image garbage collection; the
    kubelet looks every 10 s."""


class EscalationConfig(NamedTuple):
    hard_grace_period_s: Annotated[float, Range(1, LONGEST_S)] = 1.0
    """Grace asked for in the hard tier. The kubelet uses at least 1 s."""
    on_blocked: OnBlocked = OnBlocked.WAIT
    """Hard tier: what to do with a victim whose PodDisruptionBudget refuses: `wait` and take the next one, or
    `delete` it."""
    shorten_terminating: bool = True
    """Hard tier: shorten the grace of a terminating pod that holds what is missing."""
    brake: BrakeMode = BrakeMode.NONE
    """Hard tier: hold a victim by its cgroup from the decision until it is gone, so that it cannot outrun the API.
    `throttle` sets memory.high to what it uses (cgroup v2, memory only), `freeze` stops all its processes. On cgroup v2
    with either, memory.high of who would have to go keeps it from outrunning the agent from shortly before the
    threshold on."""
    brake_deadline_s: Annotated[float, Range(0.1, 600)] = 10.0
    """A held victim is let go after this, whatever happened."""
    hard_kill: HardKill = HardKill.NONE
    """Hard tier: `cgroup` ends a victim's processes at once when the API has accepted its eviction; its grace is not
    waited for."""
    last_resort: LastResort = LastResort.NONE
    """Hard tier: `cgroupKill` ends a victim's processes through its cgroup when the API server has been out of reach
    for `lastResortAfter`."""
    last_resort_after_s: Annotated[float, Range(1, LONGEST_S)] = 30.0
    """How long the API server must have been out of reach."""


class ConditionsConfig(NamedTuple):
    standard: StandardConditions = StandardConditions.REASSERT
    """MemoryPressure and its sisters: `reassert` puts our True back when a kubelet overwrites it, `once` writes it
    once, `off` never."""
    own: bool = True
    """Publish NodeAgentMemoryPressure, NodeAgentDiskPressure and NodeAgentPIDPressure, which no kubelet touches."""
    heartbeat_s: Annotated[float, Range(1, LONGEST_S)] = 300.0
    """How often unchanged conditions are written again."""
    on_exit: OnExit = OnExit.CLEAR
    """What a clean exit does with the conditions and taints that we have set: `clear` takes them back, `keep` leaves
    them, the conditions with the reason NodeAgentStopped, so that a node under pressure stays fenced while the agent is
    replaced. Whoever removes the agent for good then has to remove them as well."""
    taint: bool = True
    """Put up a NoSchedule taint of our own (`nodeagent.io/memory-pressure` and its sisters) before the first eviction,
    and take it down with the condition. Node credentials may not; then only the conditions speak."""


class FleetConfig(NamedTuple):
    max_concurrent_evictions: Annotated[int, Range(0, 1000)] = 0
    """Soft tier: before evicting take one of this many Leases of the node's zone, so that one bad release cannot make
    all nodes evict at once. 0 switches it off; hard evictions never wait for it."""
    lease_namespace: Annotated[str, DNS_LABEL] = "nodeagent"
    """Where the Leases are."""
    lease_duration_s: Annotated[float, Range(1, 3600)] = 60.0
    """How long one is held; an agent that died gives it back by not renewing it."""


class MetricsConfig(NamedTuple):
    address: Annotated[str, Shape(r"([^\s/]*:[0-9]{1,5})?", "`host:port`, `:port`, or empty")] = ""
    """Where /metrics, /healthz and /readyz are served, `127.0.0.1:9655`; empty: nowhere."""


class SamplingConfig(NamedTuple):
    interval_s: Annotated[float, Range(0.02, 60)] = 1.0
    """Time between looks at the node while no threshold is near; the nearer one is, the shorter. While none is crossed
    the pods are looked at every 10 s at most, and so are disks that are far from their thresholds."""
    cgroup_root: Annotated[str, DIRECTORY_OR_NONE] = ""
    """Cgroup that holds `kubepods`, as the kubelet's cgroupRoot; found by itself when empty."""
    kubelet_dir: Annotated[str, DIRECTORY] = "/var/lib/kubelet"
    """The kubelet's root directory: nodefs is its file system."""
    image_dir: Annotated[str, DIRECTORY_OR_NONE] = ""
    """The runtime's image store: imagefs is its file system; found by itself when empty (containerd, CRI-O)."""
    pod_logs_dir: Annotated[str, DIRECTORY] = "/var/log/pods"
    """Where the kubelet keeps pod logs."""
    stale_after_s: Annotated[float, SOME_DURATION] = 30.0
    """A sample or a view of the pods older than this is unknown, and unknown is never pressure."""


class ClusterConfig(NamedTuple):
    kubeconfig: Annotated[str, FILE_OR_NONE] = ""
    """Kubeconfig file; --kubeconfig and $KUBECONFIG replace it. When empty: the pod's service account,
    ~/.kube/config."""
    request_timeout_s: Annotated[float, Range(0.05, 300)] = 5.0
    """Deadline of one API request."""
    pods_max_age_s: Annotated[float, SOME_DURATION] = 120.0
    """When the view of the pods is older, nobody is evicted until it is fresh again."""


class LoggingConfig(NamedTuple):
    level: Annotated[str, OneOf(("debug", "info", "warning", "error"))] = "info"
    """debug, info, warning or error."""
    format: Annotated[str, OneOf(("auto", "json", "console"))] = "auto"
    """`json`, `console`, or `auto`: console on a terminal, JSON elsewhere."""


class RequireStall(NamedTuple):
    at_least: Annotated[float, Range(0, 100)]
    """Percent of wall time stalled."""
    scope: StallScope = StallScope.NODE
    """Whose stall: the whole `node`, `kubepods` (all pods), or `system` (everything else)."""
    resource: Annotated[str, OneOf(("memory", "io"))] = "memory"
    """Stalled on what. CPU pressure is never used."""
    kind: Annotated[str, OneOf(("some", "full"))] = "some"
    """`some`: at least one task waits. `full`: all do."""
    window: Annotated[str, OneOf(("avg10", "avg60"))] = "avg10"
    """The kernel's average over 10 or 60 seconds."""


class Refinement(NamedTuple):
    memory_model: MemoryModel | None = None
    """Only for memory.available: `workingset` (as the kubelet, the default) or `memavailable` (the kernel's own
    estimate)."""
    require_stall: RequireStall | None = None
    """A second key: the threshold acts only while this pressure stall (PSI) is seen as well. A stall alone never
    acts."""
    exhaustion_within_s: Annotated[float | None, SOME_DURATION] = None
    """Soft thresholds only: also met when the trend says that the resource is exhausted within this time."""


class SignalRefinement(NamedTuple):
    memory_model: MemoryModel | None = None
    """Only for memory.available: `workingset` (as the kubelet, the default) or `memavailable` (the kernel's own
    estimate)."""
    require_stall: RequireStall | None = None
    """A second key: the thresholds act only while this pressure stall (PSI) is seen as well. A stall alone never
    acts."""
    exhaustion_within_s: Annotated[float | None, SOME_DURATION] = None
    """Soft thresholds: also met when the trend says that the resource is exhausted within this time."""
    hard: Refinement = Refinement()
    """Replaces the keys above for the signal's hard threshold."""
    soft: Refinement = Refinement()
    """Replaces the keys above for the signal's soft threshold."""


class EvictionConfig(NamedTuple):
    """The keys from which `Config.thresholds` is made, as the file has them; the kubelet's names and meanings."""

    eviction_hard: Annotated[Mapping[Signal, Amount], AmountRule.THRESHOLD] = {}
    """Thresholds that act at once: a quantity (`200Mi`) or a percentage of the capacity (`12%`) of what must stay
    available. Setting this drops the built-in hard and soft thresholds; setting only evictionSoft drops the soft ones.
    `0%` and `100%` switch a signal off."""
    eviction_soft: Annotated[Mapping[Signal, Amount], AmountRule.THRESHOLD] = {}
    """Thresholds that act when they were met for their grace period."""
    eviction_soft_grace_period: Annotated[Mapping[Signal, float], ANY_DURATION] = {}
    """How long each soft threshold must be met before it acts; every one needs an entry. With `0s` it is a hard one."""
    eviction_minimum_reclaim: Annotated[Mapping[Signal, Amount], AmountRule.RECLAIM] = {}
    """How far above its threshold a signal must rise before the threshold is no longer met: a quantity or a percentage
    of the capacity."""
    merge_default_eviction_settings: bool = False
    """Add nodeagent's built-in hard thresholds for the signals that evictionHard does not name."""
    enforce_node_allocatable: Annotated[
        tuple[str, ...],
        OneOf(
            (
                "pods",
                "system-reserved",
                "system-reserved-compressible",
                "kube-reserved",
                "kube-reserved-compressible",
                "none",
            )
        ),
    ] = ("pods",)
    """As the kubelet has it. With `pods` every hard memory.available threshold also guards
    allocatableMemory.available."""
    signals: Mapping[Signal, SignalRefinement] = {}
    """What the kubelet's keys cannot say, for each signal."""


class Config(NamedTuple):
    mode: Mode = Mode.DRY_RUN
    """`dry-run` decides and tells, `enforce` acts. --mode and $NODEAGENT_MODE replace it."""
    node_name: Annotated[str, NODE_NAME] = ""
    """Name of this node's object; --node-name and $NODE_NAME replace it. When empty: the hostname, this host's
    addresses."""
    thresholds: Annotated[tuple[Threshold, ...], Mark.DERIVED] = ()
    """Made from evictionHard, evictionSoft, evictionSoftGracePeriod, evictionMinimumReclaim and `signals`."""
    eviction_pressure_transition_period_s: Annotated[float, ANY_DURATION] = 300.0
    """How long a condition stays True after pressure was last seen. 0s means 5m, as in the kubelet."""
    eviction_max_pod_grace_period_s: Annotated[float, Range(0, 86_400), Mark.WHOLE_SECONDS] = 30.0
    """Soft tier: longest grace a pod gets, in whole seconds; its own terminationGracePeriodSeconds if that is
    shorter."""
    enforce_node_allocatable: Annotated[bool, Mark.DERIVED] = True
    """The kubelet's enforceNodeAllocatable contains `pods`: hard memory.available also guards
    allocatableMemory.available."""
    local_storage_limits: bool = False
    """Evict pods that exceed their own local-storage limits (emptyDir sizeLimit, ephemeral-storage limits). A kubelet
    does this by itself; set it only where localStorageCapacityIsolation is off."""
    ranking: RankingConfig = RankingConfig()
    """In which order pods are evicted."""
    relief: ReliefConfig = ReliefConfig()
    """How much an eviction must free, and what to do when evictions do not help."""
    damping: DampingConfig = DampingConfig()
    """How flapping conditions are damped, after RFC 2439."""
    startup: StartupConfig = StartupConfig()
    """What must be seen before anything is done."""
    protection: ProtectionConfig = ProtectionConfig()
    """Which pods are never evicted. Static, mirror, own, system-node-critical pods and priorities of 2000000000 and
    above never are, whatever stands here."""
    rate_limits: RateLimits = RateLimits()
    """How many pods may be evicted in which time."""
    reclaim: ReclaimConfig = ReclaimConfig()
    """What is tried before pods are evicted."""
    escalation: EscalationConfig = EscalationConfig()
    """What the hard tier may do that the soft one may not."""
    conditions: ConditionsConfig = ConditionsConfig()
    """Which node conditions are published."""
    fleet: FleetConfig = FleetConfig()
    """What agents of different nodes agree on."""
    metrics: MetricsConfig = MetricsConfig()
    """What can be scraped and probed."""
    sampling: SamplingConfig = SamplingConfig()
    """What is read on the node, where and how often."""
    cluster: ClusterConfig = ClusterConfig()
    """How the API server is reached."""
    logging: LoggingConfig = LoggingConfig()
    """What is logged, and how."""
    state_dir: Annotated[str, DIRECTORY] = "/run/nodeagent"
    """Where state that must survive a restart is kept: on a file system in memory, for an eviction waits until it is
    written."""

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

from nodeagent.config import bounds
from nodeagent.config.bounds import AmountRule, Mark, OneOf, Range
from nodeagent.config.own_limit import OwnLimitConfig
from nodeagent.model import Amount, MemoryModel, Signal, StallScope, Threshold

API_VERSION: Final = "nodeagent.io/v1alpha1"
CONFIG_KIND: Final = "NodeAgentConfiguration"
DROPPED: Final = ("0%", "100%")
"""A threshold with exactly this text does not exist. It switches a default of the kubelet off."""


# --- sections --------------------------------------------------------------------------------------------------------


class Mode(enum.StrEnum):
    DRY_RUN = "dry-run"
    ENFORCE = "enforce"


class StandardConditions(enum.StrEnum):
    """How MemoryPressure, DiskPressure and PIDPressure are written, which a live kubelet writes as well."""

    REASSERT = "reassert"
    ONCE = "once"
    OFF = "off"


class ClusterIdentity(enum.StrEnum):
    """Which identity a ServiceAccount's token uses for requests about the own node and its pods."""

    AUTO = "auto"
    NODE = "node"
    SERVICE_ACCOUNT = "serviceAccount"


class OnExit(enum.StrEnum):
    CLEAR = "clear"
    KEEP = "keep"


class OnBlocked(enum.StrEnum):
    WAIT = "wait"
    DELETE = "delete"


class OnFutile(enum.StrEnum):
    """What the hard tier does if all candidates together cannot clear the deficit."""

    STOP = "stop"
    EVICT = "evict"


class NamespaceProtection(enum.StrEnum):
    """In which tiers the pods of a namespace are protected."""

    NONE = "none"
    SOFT = "soft"
    ALL = "all"


class BrakeMode(enum.StrEnum):
    """What brakes a victim until its processes have ended."""

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
    """The keys of the eviction order, most significant first. `kubelet` in place of the list selects the kubelet's own
    order for each resource."""
    kubelet: Annotated[bool, Mark.DERIVED] = False
    """Set by `order: kubelet`; not a key of the file."""


class ReliefConfig(NamedTuple):
    minimum_relief: Annotated[Amount, AmountRule.SHARE] = Amount(None, 1.0, "1%")
    """Least relief of a victim: a share of the deficit or a quantity. A pod that frees less is not selected, whatever
    its rank."""
    max_victims: Annotated[int, Range(1, 1000)] = 5
    """Most pods that one hard decision evicts. A soft decision evicts one pod and waits for its release."""
    on_futile: OnFutile = OnFutile.STOP
    """Hard tier, if all candidates together cannot clear the deficit. `stop` evicts no pod and reports the largest
    other holders; `evict` evicts them anyway. The soft tier always stops."""
    failures_before_stop: Annotated[int, bounds.COUNT] = 3
    """Evictions stop, with an alarm, after this many in a row whose measured relief was less than half of the predicted
    one."""
    failure_memory_s: Annotated[float, bounds.ANY_DURATION] = 600.0
    """How long such failures count."""


class DampingConfig(NamedTuple):
    """Flap damping of the published conditions, after RFC 2439."""

    penalty: Annotated[float, Range(1, 1_000_000)] = 1000.0
    """Added each time a condition goes from False to True."""
    suppress_above: Annotated[float, Range(1, 1_000_000)] = 2000.0
    """Above this penalty a True condition stays True."""
    release_below: Annotated[float, Range(1, 1_000_000)] = 750.0
    """Below this penalty a held condition may become False."""
    half_life_s: Annotated[float, bounds.POSITIVE_DURATION] = 300.0
    """The penalty halves in this time."""
    max_hold_s: Annotated[float, bounds.ANY_DURATION] = 1800.0
    """Longest hold after pressure was last observed."""
    jitter: Annotated[float, bounds.SHARE] = 0.1
    """Largest random delay of a release, as a share of the transition period. It keeps a fleet from releasing at one
    moment."""
    max_transitions_per_hour: Annotated[int, Range(2, 100_000)] = 12
    """Most changes of one condition in an hour. A change to True is never limited."""


class StartupConfig(NamedTuple):
    fresh_samples: Annotated[int, bounds.COUNT] = 3
    """After a start or a configuration change the agent acts only after this many complete samples in a row."""


class NamespaceRule(NamedTuple):
    """What differs for the pods of one namespace."""

    protect: NamespaceProtection = NamespaceProtection.NONE
    """`all`: no pod of it is evicted, as with `namespaces`. `soft`: the soft tier evicts no pod of it, the hard tier
    may. `none`: as in every other namespace."""
    bare_pods: bool | None = None
    """Replaces `protection.barePods` for this namespace."""
    minimum_age_s: Annotated[float | None, bounds.ANY_DURATION] = None
    """Replaces `protection.minimumAge` for this namespace."""


class ProtectionConfig(NamedTuple):
    """Pods that are never victims. Static, mirror, own and system-node-critical pods and priorities of 2000000000 and
    above are always protected."""

    daemon_sets: bool = True
    """Protect pods whose controller is a DaemonSet of the API group `apps`."""
    namespaces: Annotated[tuple[str, ...], bounds.DNS_LABEL] = ("kube-system", "nodeagent")
    """Protect every pod in these namespaces. The admission policy of daemonset.yaml refuses evictions in kube-system
    and in the agent's own namespace, whatever this list contains."""
    namespace_rules: Annotated[Mapping[str, NamespaceRule], bounds.NAMESPACE_KEY] = {}
    """What differs for single namespaces. `namespaces` protects a namespace whatever its rule is."""
    bare_pods: bool = True
    """Protect pods that no controller would replace."""
    node_bound: bool = True
    """Protect pods whose replacement could run on this node only: `nodeName` in the template, a hostname selector or
    affinity, a local PersistentVolume. A pod is also protected until its volume is known not to be local."""
    minimum_age_s: Annotated[float, bounds.ANY_DURATION] = 60.0
    """Soft tier: protect pods younger than this. The hard tier does not, because the youngest pod is often the
    cause."""
    disruption_budgets: bool = True
    """Soft tier: protect pods whose PodDisruptionBudget allows no disruption now."""
    labels: Annotated[tuple[str, ...], bounds.SELECTOR] = ()
    """Protect pods with any of these labels, `key` or `key=value`, in `trustedNamespaces` only, because the author of a
    pod writes its labels."""
    annotations: Annotated[tuple[str, ...], bounds.SELECTOR] = ()
    """Protect pods with any of these annotations, `key` or `key=value`, in `trustedNamespaces` only."""
    trusted_namespaces: Annotated[tuple[str, ...], bounds.NAMESPACES] = ()
    """Namespaces whose pods may protect themselves: by `labels` and `annotations` in both tiers, by the annotation
    `nodeagent.io/evict: never|prefer|avoid` in the soft tier. Elsewhere these are ignored. `"*"`: every namespace."""
    replacement_wait_s: Annotated[float, bounds.ANY_DURATION] = 0.0
    """Soft tier: protect the pods of a ReplicaSet or StatefulSet that lacks ready replicas elsewhere, such as the
    replacement of an earlier victim that no node takes, at most this long; also while its replicas are unknown. `0s`:
    off. Needs the rights of examples/replacements.yaml."""
    node_fit: bool = False
    """Soft tier: evict only a pod that another node takes, by the checks of the descheduler's `nodeFit`; none while
    that is unknown. Needs the rights of examples/node-fit.yaml, and a ServiceAccount."""
    unknown_pods: bool = True
    """Protect pods that the API server does not list."""
    node_maintenance: bool = True
    """Soft tier: evict no pod while the Node object says that the node is cordoned, drained, shutting down or being
    replaced, because its pods leave anyway. The hard tier evicts them. Evictions of `ownLimit` pause only while it is
    shutting down."""
    system_partition: bool = True
    """Protect pods in the kubelet's system partition (`systemPartition`, KEP-5894): their cgroups are below
    `kubepods/system`."""


class TokenBucket(NamedTuple):
    """A token bucket of evictions."""

    burst: Annotated[int, bounds.COUNT]
    """Most evictions at once: the size of the bucket."""
    per_hour: Annotated[float, Range(0, 100_000)]
    """Refill: evictions that become possible again in an hour."""


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
    hook: TokenBucket = TokenBucket(5, 30.0)
    """Runs of `hooks.beforeEviction`."""
    own_limit: TokenBucket = TokenBucket(2, 12.0)
    """Evictions of pods near their own memory limit (`ownLimit`). They take no token from the other buckets."""
    resize: TokenBucket = TokenBucket(4, 12.0)
    """Raises of memory limits (`ownLimit.resize`). Restoring a limit takes no token."""
    owner_backoff_s: Annotated[float, bounds.ANY_DURATION] = 60.0
    """Time after an eviction before the next pod of the same owner is evicted; doubles with each eviction. Lengthened
    by up to 25%, differently on each node."""
    owner_backoff_max_s: Annotated[float, bounds.ANY_DURATION] = 1800.0
    """Longest owner back-off, before it is lengthened; it starts again at `ownerBackoff` after twice this time without
    an eviction."""
    namespaces: Annotated[Mapping[str, TokenBucket], bounds.NAMESPACE_KEY] = {}
    """Replace `namespace` for single namespaces. To evict no pod of one, protect it instead (`protection`): an empty
    bucket also delays the eviction of other pods."""


class ReclaimKind(enum.StrEnum):
    """How a reclaim action frees the resource."""

    COMMAND = "command"
    IMAGES = "images"
    JOURNAL = "journal"
    CONTAINER_LOGS = "containerLogs"
    PAGE_CACHE = "pageCache"
    """Built in: `ReclaimConfig.page_cache` switches it."""


class ReclaimAction(NamedTuple):
    name: Annotated[str, bounds.ACTION_NAME]
    """The name of the action in the log and in records."""
    kind: ReclaimKind = ReclaimKind.COMMAND
    """`command` runs `command`. `images` removes unused images through `sampling.criSocket`, or without that runs
    `crictl rmi --prune`; `journal` runs `journalctl --vacuum-size=200M`; both run `command` instead if it is set.
    `containerLogs` removes the logs of ended containers."""
    command: Annotated[tuple[str, ...], Mark.MAY_REPEAT, bounds.ARGUMENT] = ()
    """The program and its arguments, without a shell. Its environment has NODEAGENT_RESOURCE, NODEAGENT_SIGNAL,
    NODEAGENT_DEFICIT and NODEAGENT_AVAILABLE."""
    signals: Annotated[tuple[Signal, ...], Mark.NOT_EMPTY] = (
        Signal.NODEFS,
        Signal.NODEFS_INODES,
        Signal.IMAGEFS,
        Signal.IMAGEFS_INODES,
        Signal.CONTAINERFS,
        Signal.CONTAINERFS_INODES,
    )
    """The signals for which the action runs. `images` and `containerLogs` do not run for a file system that holds no
    images or logs."""
    timeout_s: Annotated[float, Range(0.1, 3600)] = 30.0
    """After this time the action and its process group are killed. Evictions wait at most this long for it."""
    min_interval_s: Annotated[float, bounds.ANY_DURATION] = 600.0
    """Least time between two starts. Evictions wait for an action once while a threshold is met, so a short interval
    costs more runs, not later evictions."""


class ReclaimConfig(NamedTuple):
    actions: tuple[ReclaimAction, ...] = ()
    """Actions that run before evictions, one after another in this order."""
    wait_for_kubelet_s: Annotated[float, Range(0, 600)] = 10.0
    """Soft tier, disks: how long a due threshold waits for the kubelet's image garbage collection. The kubelet checks
    every 10 s. With 0s the built-in thresholds also count on a disk that pods do not fill."""
    page_cache: bool = True
    """Reclaim page cache of pods (`memory.reclaim`) before a soft eviction for memory, and when memory is short by page
    cache alone, for which a kubelet evicts. No pod falls below its memory request. Needs cgroup v2, Linux 5.19 and
    write access to cgroups; without them a note reports what is missing. Has no effect with `ranking.order:
    kubelet`."""


class EscalationConfig(NamedTuple):
    hard_grace_period_s: Annotated[float, Range(1, bounds.MAX_DURATION_S)] = 1.0
    """Grace period of a hard eviction. The kubelet uses at least 1 s."""
    on_blocked: OnBlocked = OnBlocked.WAIT
    """Hard tier, if a PodDisruptionBudget refuses a victim: `wait` until it allows the eviction, or `delete` the victim
    in spite of it."""
    shorten_terminating: bool = True
    """Hard tier: shorten the grace of a terminating pod that holds the deficit."""
    brake: BrakeMode = BrakeMode.NONE
    """Hard tier: brake a victim through its cgroup from the decision until it has ended, because it may allocate faster
    than the API server answers. `throttle` sets memory.high to its usage (cgroup v2, memory only), `freeze` stops all
    its processes. On cgroup v2 either value also sets growth caps: shortly before the threshold memory.high of the
    predicted victim is lowered. Costs write access to cgroups."""
    brake_deadline_s: Annotated[float, Range(0.1, 600)] = 10.0
    """A brake is released after this, whatever the result."""
    hard_kill: HardKill = HardKill.NONE
    """Hard tier: `cgroup` kills a victim's processes as soon as the API server has accepted its eviction, without its
    grace period."""
    last_resort: LastResort = LastResort.NONE
    """Hard tier: `cgroupKill` kills a victim's processes through its cgroup if the API server has been unreachable for
    `lastResortAfter`."""
    last_resort_after_s: Annotated[float, Range(1, bounds.MAX_DURATION_S)] = 30.0
    """How long the API server must have been unreachable."""
    oom_score_adj: bool = False
    """While a memory threshold is met: raise `oom_score_adj` of the processes of the three pods that would be evicted
    next, up to 999 and for Burstable pods only, so that the kernel's OOM killer chooses one of them if it is faster.
    It is put back when the pressure ends. Costs write access to other users' files in /proc (CAP_DAC_OVERRIDE)."""


class HookFailure(enum.StrEnum):
    """What the soft tier does with a pod whose hook did not end well."""

    EVICT = "evict"
    SKIP = "skip"


class BeforeEvictionHook(NamedTuple):
    command: Annotated[tuple[str, ...], Mark.MAY_REPEAT, bounds.ARGUMENT] = ()
    """The program and its arguments, without a shell. It gets the pod as JSON on standard input and as variables
    (NODEAGENT_POD_NAMESPACE, NODEAGENT_POD_NAME, NODEAGENT_POD_UID, NODEAGENT_POD_CGROUP, NODEAGENT_SIGNAL...), and of
    the agent's own environment only PATH and the language. Exit code 0 is success."""
    url: Annotated[str, bounds.URL_OR_NONE] = ""
    """In place of a command: the same JSON is sent here by POST, and an answer of 2xx is success. `https://` to any
    host, `http://` to this host only (`localhost`, 127.0.0.0/8, `[::1]`). No redirect is followed, no proxy is used,
    and no credential is sent."""
    deadline_s: Annotated[float, Range(0.1, 600)] = 10.0
    """After this time the command and its process group are killed, or the request is given up."""
    on_failure: HookFailure = HookFailure.EVICT
    """If the hook fails, reaches its deadline, or `rateLimits.hook` is reached: `evict` the pod all the same, or `skip`
    it in the soft tier. The hard tier runs no hook and waits for none."""
    repeat_after_s: Annotated[float, Range(1, bounds.MAX_DURATION_S)] = 600.0
    """The result of a hook counts for its pod this long; only then may the hook run again for this pod."""

    @property
    def enabled(self) -> bool:
        return bool(self.command or self.url)


class HooksConfig(NamedTuple):
    before_eviction: BeforeEvictionHook = BeforeEvictionHook()
    """Soft tier: what runs before a pod is evicted, such as a heap dump or a deregistration. Off without `command` and
    `url`. The eviction waits for its end, at most until its deadline; one hook runs at a time. In a dry run nothing
    runs."""


class EvictionRequestConfig(NamedTuple):
    enabled: bool = False
    """Soft tier: ask for a pod's eviction with an EvictionRequest (KEP-4563, `lifecycle.k8s.io/v1alpha1`, alpha in
    Kubernetes 1.37), so that its responders can move it first. Where the API server does not serve that, the
    Eviction API is used as before. Needs rights of its own (examples/eviction-request.yaml)."""
    deadline_s: Annotated[float, Range(10, 3600)] = 120.0
    """A pod that was not evicted by then is evicted through the Eviction API, and the request is withdrawn. The
    hard tier never waits for a request."""


class ConditionsConfig(NamedTuple):
    standard: StandardConditions = StandardConditions.REASSERT
    """MemoryPressure, DiskPressure and PIDPressure: `reassert` writes True again after a kubelet overwrites it, `once`
    writes it once, `off` never; it only clears a True of the agent from before. `reassert` costs one API request for
    each overwrite."""
    own: bool = True
    """Publish NodeAgentMemoryPressure, NodeAgentDiskPressure and NodeAgentPIDPressure, which no kubelet writes. `false`
    removes those from before."""
    heartbeat_s: Annotated[float, Range(1, bounds.MAX_DURATION_S)] = 300.0
    """How often unchanged conditions are written again."""
    on_exit: OnExit = OnExit.CLEAR
    """What a clean exit does with the agent's conditions and taints. `clear` removes them; for an uninstallation the
    DaemonSet goes first, because the agent needs its rights for it (docs/start.md). `keep` leaves them, the conditions
    with the reason NodeAgentStopped, so that a node under pressure stays tainted while the agent is replaced. With
    `keep` they must be removed by hand after the agent is uninstalled."""
    taint: bool = True
    """Add a NoSchedule taint (`nodeagent.io/memory-pressure`, `disk-pressure`, `pid-pressure`) with the
    condition, before a soft eviction, and remove it with the condition. Node credentials cannot add taints. With the
    cluster autoscaler its `--status-taint` must name them (docs/escalation.md); where it cannot: false."""


class FleetConfig(NamedTuple):
    max_concurrent_evictions: Annotated[int, Range(0, 1000)] = 0
    """Soft tier: number of eviction slots (Leases) of the node's zone. An agent takes one before it evicts and
    keeps it until the pod is gone, so that one bad release cannot make all nodes evict at once. 0: no limit. Hard
    evictions never wait for a slot."""
    lease_namespace: Annotated[str, bounds.DNS_LABEL] = "nodeagent"
    """The namespace of the Leases."""
    lease_duration_s: Annotated[float, Range(1, 3600)] = 60.0
    """A slot is free this long after its holder stopped renewing it."""


class PageAccess(enum.StrEnum):
    """Who may read the live page, which contains names of pods."""

    LOOPBACK = "loopback"
    ALL = "all"
    OFF = "off"


class PerPodConfig(NamedTuple):
    top: Annotated[int, Range(0, 100)] = 0
    """How many pods have series of their own: those with the most disk usage, the most inodes, and the most memory
    above their request. 0: none. The labels are names of pods, which every client of the endpoint may read, and each
    new pod is a new series in the Prometheus; a scrape has at most three times this number."""


class MetricsConfig(NamedTuple):
    address: Annotated[str, bounds.ADDRESS] = ""
    """Address of /metrics, /healthz and /readyz, such as `127.0.0.1:9655`. Empty: no endpoint."""
    page: PageAccess = PageAccess.LOOPBACK
    """Who may read the live page at `/` of that address, which contains names of pods: clients on this host or in the
    agent's pod (`loopback`, also `kubectl port-forward`), every client (`all`), nobody (`off`)."""
    per_pod: PerPodConfig = PerPodConfig()
    """Series of single pods, off by default."""


class SamplingConfig(NamedTuple):
    interval_s: Annotated[float, Range(0.02, 60)] = 1.0
    """Longest time between two node samples; it becomes shorter as a threshold comes nearer. While no threshold is
    crossed, pods and distant disks are read only every 10 s."""
    cgroup_root: Annotated[str, bounds.DIRECTORY_OR_NONE] = ""
    """The cgroup above `kubepods`, as the kubelet's cgroupRoot. Empty: detected."""
    kubelet_dir: Annotated[str, bounds.DIRECTORY] = "/var/lib/kubelet"
    """The kubelet's root directory. Its file system is nodefs."""
    image_dir: Annotated[str, bounds.DIRECTORY_OR_NONE] = ""
    """The image store of the container runtime. Its file system is imagefs. Empty: detected (containerd, CRI-O)."""
    cri_socket: Annotated[str, bounds.FILE_OR_NONE] = ""
    """Socket of the container runtime (CRI v1) on the host. `check --image-store` reads it; empty: the usual ones of
    containerd, k3s and CRI-O. If set, a reclaim action of the kind `images` removes unused images through it."""
    pod_logs_dir: Annotated[str, bounds.DIRECTORY] = "/var/log/pods"
    """The kubelet's directory of pod logs."""
    stale_after_s: Annotated[float, bounds.POSITIVE_DURATION] = 30.0
    """An older sample is unknown, and unknown is never pressure."""


class ClusterConfig(NamedTuple):
    kubeconfig: Annotated[str, bounds.FILE_OR_NONE] = ""
    """Kubeconfig file; --kubeconfig and $KUBECONFIG replace it. Empty: the pod's service account, then
    ~/.kube/config."""
    request_timeout_s: Annotated[float, Range(0.05, 300)] = 5.0
    """Deadline of one API request."""
    eviction_timeout_s: Annotated[float, Range(0.05, 300)] = 12.0
    """Deadline of one eviction. The API server aborts one that is given up while an admission webhook hangs, whatever
    the webhook's failurePolicy is, so this is longer than the 10 s that a webhook has by default."""
    pods_max_age_s: Annotated[float, bounds.POSITIVE_DURATION] = 120.0
    """No pod is evicted while the API server's list of the pods is older than this."""
    identity: ClusterIdentity = ClusterIdentity.AUTO
    """How a ServiceAccount reads and evicts pods. `node`: as its own node, so that the API server refuses pods of other
    nodes (Kubernetes 1.36); without that nothing is evicted. `serviceAccount`: with its own rights. `auto`: `node`
    where the API server allows it, else `serviceAccount` with a note. `node` costs the API server up to two more
    authorization checks for each of these requests."""


class LoggingConfig(NamedTuple):
    level: Annotated[str, OneOf(("debug", "info", "warning", "error"))] = "info"
    """Lowest level that is logged: debug, info, warning or error."""
    format: Annotated[str, OneOf(("auto", "json", "console"))] = "auto"
    """`json`, `console`, or `auto`: console on a terminal, otherwise JSON."""


class SnapshotsConfig(NamedTuple):
    max: Annotated[int, Range(0, 100)] = 5
    """Most snapshot files that the agent keeps by itself; the oldest is removed. 0: it writes none."""
    max_bytes: Annotated[Amount, AmountRule.SIZE] = Amount(20 << 20, None, "20Mi")
    """Most bytes of all of them. In the default directory at most 4 MiB, whatever this is."""


class RecorderConfig(NamedTuple):
    enabled: bool = True
    """Record samples of the node: every 10 s, and each second near a threshold (docs/recorder.md)."""
    dir: Annotated[str, bounds.DIRECTORY_OR_NONE] = ""
    """Directory of the recording. Empty: `samples` below stateDir, which is usually in memory and then at most 8 MiB,
    whatever `maxBytes` is. A directory on a disk survives a reboot. A symbolic link is refused."""
    max_bytes: Annotated[Amount, AmountRule.SIZE] = Amount(40 << 20, None, "40Mi")
    """Most bytes of the recording; the oldest samples are dropped. 110 pods need no more for a day."""
    snapshots: SnapshotsConfig = SnapshotsConfig()
    """Snapshot files that the agent writes after an eviction, a lost race and a refusal that lasted a minute, into
    `snapshots` below `dir`, or below stateDir (docs/snapshot.md)."""


class RequireStall(NamedTuple):
    at_least: Annotated[float, Range(0, 100)]
    """Percent of wall time stalled."""
    scope: StallScope = StallScope.NODE
    """The tasks that stall: of the whole `node`, of `kubepods` (all pods), or of `system` (everything else)."""
    resource: Annotated[str, OneOf(("memory", "io"))] = "memory"
    """The resource that the tasks wait for. CPU pressure is never used."""
    kind: Annotated[str, OneOf(("some", "full"))] = "some"
    """`some`: at least one task waits. `full`: all tasks wait."""
    window: Annotated[str, OneOf(("avg10", "avg60"))] = "avg10"
    """The kernel's average over 10 or 60 seconds."""


class Refinement(NamedTuple):
    memory_model: MemoryModel | None = None
    """Only for memory.available and allocatableMemory.available, which follows it: `workingset` (the kubelet's figure,
    the default with `ranking.order: kubelet`), `memavailable` (the kernel's), or `lower` (whichever is lower, the
    default), which evicts no pod while only page cache is short."""
    require_stall: RequireStall | None = None
    """The threshold acts only while this pressure stall (PSI) is measured as well. A stall alone never acts."""
    exhaustion_within_s: Annotated[float | None, bounds.POSITIVE_DURATION] = None
    """Soft thresholds: end the grace period early if the trend exhausts the resource within this time."""


class SignalRefinement(NamedTuple):
    memory_model: MemoryModel | None = None
    """Only for memory.available and allocatableMemory.available, which follows it: `workingset` (the kubelet's figure,
    the default with `ranking.order: kubelet`), `memavailable` (the kernel's), or `lower` (whichever is lower, the
    default), which evicts no pod while only page cache is short."""
    require_stall: RequireStall | None = None
    """The thresholds act only while this pressure stall (PSI) is measured as well. A stall alone never acts."""
    exhaustion_within_s: Annotated[float | None, bounds.POSITIVE_DURATION] = None
    """Soft thresholds: end the grace period early if the trend exhausts the resource within this time."""
    hard: Refinement = Refinement()
    """Replaces the keys above for the signal's hard threshold."""
    soft: Refinement = Refinement()
    """Replaces the keys above for the signal's soft threshold."""


class EvictionConfig(NamedTuple):
    """The keys of the file that become `Config.thresholds`; names and meanings are the kubelet's."""

    eviction_hard: Annotated[Mapping[Signal, Amount], AmountRule.THRESHOLD] = {}
    """Thresholds that act at once: least available quantity (`200Mi`) or share of the capacity, which may have bounds
    (`12%`; `2%, at least 200Mi, at most 1Gi`). This key replaces all built-in hard and soft thresholds; evictionSoft
    alone replaces the soft ones. `0%` and `100%` switch a signal off."""
    eviction_soft: Annotated[Mapping[Signal, Amount], AmountRule.THRESHOLD] = {}
    """Thresholds that act after they were met for their grace period."""
    eviction_soft_grace_period: Annotated[Mapping[Signal, float], bounds.ANY_DURATION] = {}
    """How long a soft threshold must be met before it acts; each needs an entry. `0s` makes it a hard threshold."""
    eviction_minimum_reclaim: Annotated[Mapping[Signal, Amount], AmountRule.RECLAIM] = {}
    """How far a signal must rise above its threshold before the threshold is no longer met: a quantity or a percentage
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
    """As in the kubelet. With `pods` each hard memory.available threshold also applies to
    allocatableMemory.available."""
    signals: Mapping[Signal, SignalRefinement] = {}
    """Settings for each signal that the kubelet's keys do not have."""


class Profile(NamedTuple):
    """What differs on the nodes with certain labels. The keys that it overrides stand beside these two
    (`config.profiles`)."""

    name: Annotated[str, bounds.PROFILE_NAME]
    """The name in `config show`, the log, notes and metrics."""
    node_selector: Annotated[Mapping[str, str], bounds.LABEL_KEY, bounds.LABEL_VALUE, Mark.NOT_EMPTY]
    """Labels that the Node must have, all of them, with these values."""


class Config(NamedTuple):
    mode: Mode = Mode.DRY_RUN
    """`dry-run` decides and logs, `enforce` also acts. --dry-run and $NODEAGENT_MODE replace it."""
    node_name: Annotated[str, bounds.NODE_NAME] = ""
    """Name of this Node; --node-name and $NODE_NAME replace it. Empty: found by the hostname, then by the host's
    addresses."""
    thresholds: Annotated[tuple[Threshold, ...], Mark.DERIVED] = ()
    """Made from evictionHard, evictionSoft, evictionSoftGracePeriod, evictionMinimumReclaim and `signals`."""
    eviction_pressure_transition_period_s: Annotated[float, bounds.ANY_DURATION] = 300.0
    """How long a condition stays True after pressure was last observed. 0s means 5m, as in the kubelet."""
    eviction_max_pod_grace_period_s: Annotated[float, Range(0, 86_400), Mark.WHOLE_SECONDS] = 30.0
    """Soft tier: longest grace period of a victim, in whole seconds. A shorter terminationGracePeriodSeconds of the pod
    applies."""
    enforce_node_allocatable: Annotated[bool, Mark.DERIVED] = True
    """True if enforceNodeAllocatable contains `pods`: hard memory.available thresholds also apply to
    allocatableMemory.available."""
    above_kubelet: bool = True
    """Keep each threshold above the kubelet's own, also one that this file sets, so that the agent acts first: where
    the kubelet's thresholds can be read, from its files or its flags. Memory: 50% above them (100Mi to 512Mi), disks,
    inodes and PIDs 2% of the capacity. A soft grace period ends 10 s before the kubelet's, but is at least two
    thirds of it. Off with `ranking.order: kubelet`."""
    local_storage_limits: bool = False
    """Evict pods that exceed their own local-storage limits (emptyDir sizeLimit, ephemeral-storage limits). The kubelet
    does this already; set it only where localStorageCapacityIsolation is off. Costs a walk every minute."""
    ranking: RankingConfig = RankingConfig()
    """The eviction order of pods."""
    relief: ReliefConfig = ReliefConfig()
    """How much an eviction must free, and when evictions stop because they do not help."""
    damping: DampingConfig = DampingConfig()
    """Damping of flapping conditions, after RFC 2439."""
    startup: StartupConfig = StartupConfig()
    """Samples that are necessary before the agent acts."""
    protection: ProtectionConfig = ProtectionConfig()
    """Pods that are never evicted. Static, mirror, own and system-node-critical pods and priorities of 2000000000 and
    above are always protected."""
    rate_limits: RateLimits = RateLimits()
    """Limits on the number of evictions, as token buckets and back-offs."""
    reclaim: ReclaimConfig = ReclaimConfig()
    """Actions that run before pods are evicted."""
    escalation: EscalationConfig = EscalationConfig()
    """Acts of the hard tier that the soft tier never uses."""
    hooks: HooksConfig = HooksConfig()
    """Commands and HTTP calls of the soft tier."""
    eviction_request: EvictionRequestConfig = EvictionRequestConfig()
    """Evictions of the soft tier that others carry out."""
    own_limit: OwnLimitConfig = OwnLimitConfig()
    """Pods near a memory limit of their own, whatever the node has available."""
    conditions: ConditionsConfig = ConditionsConfig()
    """The node conditions and taints that are published."""
    fleet: FleetConfig = FleetConfig()
    """Limits across the nodes of a zone."""
    metrics: MetricsConfig = MetricsConfig()
    """Metrics and probes."""
    sampling: SamplingConfig = SamplingConfig()
    """Where and how often the node is sampled."""
    cluster: ClusterConfig = ClusterConfig()
    """The connection to the API server."""
    logging: LoggingConfig = LoggingConfig()
    """Level and format of the log."""
    recorder: RecorderConfig = RecorderConfig()
    """The recording of samples."""
    state_dir: Annotated[str, bounds.DIRECTORY] = "/run/nodeagent"
    """Directory of the state that survives a restart. Use a file system in memory, because an eviction waits until the
    state is written."""
    profiles: Annotated[tuple[Profile, ...], Mark.MAY_REPEAT] = ()
    """What differs on nodes with certain labels (docs/profiles.md). Of two that match a node and set the same key, the
    later one wins. Until the node's labels are known, nothing is enforced: the other keys apply as a dry run."""

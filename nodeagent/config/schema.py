"""The configuration as the program uses it: immutable values with sound defaults.

Field names are the YAML keys in snake_case; durations end in `_s` here and are Go durations (`1m30s`) in the file. The
string under a field is its documentation: `docs/configuration.md` and the JSON Schema are generated from it.

Keys that exist in KubeletConfiguration have the kubelet's names and meanings. How files become these values is in
`load.py`; what the values mean for a decision is policy's business.
"""

import enum
from typing import Final, NamedTuple

from nodeagent.model import Amount, Threshold

API_VERSION: Final = "nodeagent.io/v1alpha1"
KIND: Final = "NodeAgentConfiguration"


class Mode(enum.StrEnum):
    DRY_RUN = "dry-run"
    ENFORCE = "enforce"


class StandardConditions(enum.StrEnum):
    """What to do with MemoryPressure, DiskPressure and PIDPressure, which a live kubelet owns as well."""

    REASSERT = "reassert"
    ONCE = "once"
    OFF = "off"


class OnBlocked(enum.StrEnum):
    WAIT = "wait"
    DELETE = "delete"


class OnFutile(enum.StrEnum):
    """What the hard tier does when all candidates together cannot clear the deficit."""

    STOP = "stop"
    EVICT = "evict"


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


class Ranking(NamedTuple):
    order: tuple[RankingKey, ...] = (
        RankingKey.QOS,
        RankingKey.EXCEEDS_REQUEST,
        RankingKey.PRIORITY,
        RankingKey.USAGE_OVER_REQUEST,
    )
    """Keys that put pods in eviction order, most significant first. `kubelet` instead of a list gives the kubelet's own
    order for each resource."""
    kubelet: bool = False
    """Set by `order: kubelet`; not a key of its own."""


class Relief(NamedTuple):
    minimum_relief: Amount = Amount(None, 1.0, "1%")
    """A pod whose eviction frees less than this share of the deficit (or this quantity) is never chosen for being
    first in rank."""
    max_victims: int = 5
    """Most pods that one hard decision evicts at once. The soft tier always takes one and looks again."""
    on_futile: OnFutile = OnFutile.STOP
    """Hard tier only: what to do when all candidates together cannot clear the deficit. `stop` evicts nobody and
    reports where the
    resource is; `evict` takes them anyway. The soft tier always stops."""
    failures_before_stop: int = 3
    """After this many evictions in a row whose measured relief was less than half of the predicted one, stop and
    alarm."""
    failure_memory_s: float = 600.0
    """How long such failures are held against the resource."""


class Damping(NamedTuple):
    """Flap damping of the published conditions, after RFC 2439."""

    penalty: float = 1000.0
    """Added each time a condition goes from False to True."""
    suppress_above: float = 2000.0
    """While the penalty is above this, a True condition is held."""
    release_below: float = 750.0
    """A held condition is released when its penalty has decayed below this."""
    half_life_s: float = 300.0
    """The penalty halves in this time."""
    max_hold_s: float = 1800.0
    """No condition is held longer than this after it was last observed."""
    jitter: float = 0.1
    """A release is delayed by up to this share of the transition period, so that a fleet does not release at once."""
    max_transitions_per_hour: int = 12
    """Bound on changes of one condition, whatever the signal does; a change to True is never refused by it."""


class Startup(NamedTuple):
    fresh_samples: int = 3
    """After a start or a change of configuration only observe until this many samples in a row were complete."""


class Protection(NamedTuple):
    """Pods that are never victims. Static, mirror, own, system-node-critical pods and priorities of 2000000000 and
    above
    are protected whatever stands here."""

    daemon_sets: bool = True
    """Protect pods owned by a DaemonSet."""
    namespaces: tuple[str, ...] = ("kube-system",)
    """Protect every pod in these namespaces."""
    bare_pods: bool = True
    """Protect pods that no controller would bring back."""
    node_bound: bool = True
    """Protect pods that could only come back to this very node."""
    minimum_age_s: float = 60.0
    """Protect pods younger than this."""
    disruption_budgets: bool = True
    """Soft tier: protect pods whose PodDisruptionBudget allows no disruption now."""
    labels: tuple[str, ...] = ()
    """Protect pods with any of these labels: `key` or `key=value`."""
    annotations: tuple[str, ...] = ()
    """Protect pods with any of these annotations: `key` or `key=value`."""
    trusted_namespaces: tuple[str, ...] = ()
    """Namespaces whose pods may say `nodeagent.io/evict: never|prefer|avoid`; elsewhere, and in the hard tier, it is
    ignored."""
    unknown_pods: bool = True
    """Protect pods that the API has not told about: nobody knows what they are."""


class Bucket(NamedTuple):
    """A token bucket: `burst` evictions at once, refilled at `per_hour`."""

    burst: int
    per_hour: float


class Budgets(NamedTuple):
    node: Bucket = Bucket(5, 30.0)
    """Evictions on this node."""
    namespace: Bucket = Bucket(3, 20.0)
    """Evictions in one namespace."""
    owner: Bucket = Bucket(2, 6.0)
    """Evictions of one owner's pods (Deployment's ReplicaSet, StatefulSet, Job)."""
    signal: Bucket = Bucket(5, 30.0)
    """Evictions for one signal."""
    owner_backoff_s: float = 60.0
    """After an eviction its owner's other pods are spared this long; doubled each time."""
    owner_backoff_max_s: float = 1800.0
    """Longest such back-off; forgotten after twice this time without an eviction."""


class Escalation(NamedTuple):
    hard_grace_period_s: float = 1.0
    """Grace asked for in the hard tier. The kubelet uses at least 1 s."""
    on_blocked: OnBlocked = OnBlocked.WAIT
    """Hard tier: what to do with a victim whose PodDisruptionBudget refuses: `wait` and take the next one, or
    `delete` it."""
    shorten_terminating: bool = True
    """Hard tier: shorten the grace of a terminating pod that holds what is missing."""


class Conditions(NamedTuple):
    standard: StandardConditions = StandardConditions.REASSERT
    """MemoryPressure and its sisters: `reassert` puts our True back when a kubelet overwrites it, `once` writes it
    once, `off` never."""
    own: bool = True
    """Publish NodeAgentMemoryPressure, NodeAgentDiskPressure and NodeAgentPIDPressure, which no kubelet touches."""
    heartbeat_s: float = 300.0
    """How often unchanged conditions are written again."""


class Sampling(NamedTuple):
    interval_s: float = 1.0
    """Time between samples while no threshold is near."""
    cgroup_root: str = ""
    """Cgroup that holds `kubepods`, as the kubelet's cgroupRoot; found by itself when empty."""
    kubelet_dir: str = "/var/lib/kubelet"
    """The kubelet's root directory: nodefs is its file system."""
    image_dir: str = ""
    """The runtime's image store: imagefs is its file system; found by itself when empty (containerd, CRI-O)."""
    pod_logs_dir: str = "/var/log/pods"
    """Where the kubelet keeps pod logs."""
    stale_after_s: float = 30.0
    """A sample or a view of the pods older than this is unknown, and unknown is never pressure."""


class Cluster(NamedTuple):
    kubeconfig: str = ""
    """Kubeconfig file; when empty: $KUBECONFIG, the pod's service account, ~/.kube/config."""
    request_timeout_s: float = 5.0
    """Deadline of one API request."""
    pods_max_age_s: float = 120.0
    """When the view of the pods is older, nobody is evicted until it is fresh again."""


class Logging(NamedTuple):
    level: str = "info"
    """debug, info, warning or error."""
    format: str = "auto"
    """`json`, `console`, or `auto`: console on a terminal, JSON elsewhere."""


class Config(NamedTuple):
    mode: Mode = Mode.DRY_RUN
    """`dry-run` decides and tells, `enforce` acts."""
    node_name: str = ""
    """Name of this node's object; when empty: --node-name, $NODE_NAME, the hostname, this host's addresses."""
    thresholds: tuple[Threshold, ...] = ()
    """Made from evictionHard, evictionSoft, evictionSoftGracePeriod, evictionMinimumReclaim and `signals`."""
    eviction_pressure_transition_period_s: float = 300.0
    """How long a condition stays True after pressure was last seen. 0s means 5m, as in the kubelet."""
    eviction_max_pod_grace_period_s: float = 30.0
    """Soft tier: longest grace a pod gets, in whole seconds; its own terminationGracePeriodSeconds if that is
    shorter."""
    enforce_node_allocatable: bool = True
    """The kubelet's enforceNodeAllocatable contains `pods`: hard memory.available also guards
    allocatableMemory.available."""
    ranking: Ranking = Ranking()
    relief: Relief = Relief()
    damping: Damping = Damping()
    startup: Startup = Startup()
    protection: Protection = Protection()
    budgets: Budgets = Budgets()
    escalation: Escalation = Escalation()
    conditions: Conditions = Conditions()
    sampling: Sampling = Sampling()
    cluster: Cluster = Cluster()
    logging: Logging = Logging()
    state_dir: str = "/run/nodeagent"
    """Where state that must survive a restart is kept."""

"""Why something is not done: every refusal code, what it means, and what to do about it.

`docs/reasons.md`, the metric labels and the request of an eviction slot read the attributes of `RefusalCode`. A code is
made from no parts and compared with no string: code compares members.
"""

import enum
from typing import Final, NamedTuple

from nodeagent.model.signals import Tier

BOTH_TIERS: Final = frozenset(Tier)
SOFT_TIER: Final = frozenset({Tier.SOFT})
HARD_TIER: Final = frozenset({Tier.HARD})


class RefusalKind(enum.StrEnum):
    """What a refusal is about."""

    PROTECTION = "protection"
    """The pod is no candidate."""
    LIMIT = "limit"
    """The pod is a candidate and is not evicted now."""
    DECISION = "decision"
    """The decision evicts no pod, or not more."""
    RESIZE = "resize"
    """The memory limit of the pod is not raised, or not raised again. The decision may evict the pod, or others."""
    RECHECK = "recheck"
    """The recheck right before acting refuses the victim."""


class _Attributes(NamedTuple):
    """What a code is declared with."""

    kind: RefusalKind
    meaning: str
    remedy: str = ""
    tiers: frozenset[Tier] = BOTH_TIERS
    config_key: str = ""
    wants_slot: bool = False


def _protection(
    meaning: str, remedy: str = "", *, config_key: str = "", tiers: frozenset[Tier] = BOTH_TIERS
) -> _Attributes:
    return _Attributes(RefusalKind.PROTECTION, meaning, remedy, tiers, config_key)


def _limit(meaning: str, remedy: str = "", *, config_key: str = "", tiers: frozenset[Tier] = BOTH_TIERS) -> _Attributes:
    return _Attributes(RefusalKind.LIMIT, meaning, remedy, tiers, config_key)


def _decision(
    meaning: str,
    remedy: str = "",
    *,
    config_key: str = "",
    tiers: frozenset[Tier] = BOTH_TIERS,
    wants_slot: bool = False,
) -> _Attributes:
    return _Attributes(RefusalKind.DECISION, meaning, remedy, tiers, config_key, wants_slot)


def _resize(meaning: str, remedy: str = "", *, config_key: str) -> _Attributes:
    return _Attributes(RefusalKind.RESIZE, meaning, remedy, config_key=config_key)


def _recheck(meaning: str, *, tiers: frozenset[Tier] = BOTH_TIERS) -> _Attributes:
    return _Attributes(RefusalKind.RECHECK, meaning, tiers=tiers)


class RefusalCode(enum.StrEnum):
    """A stable word for metrics, records and tests, with its attributes."""

    kind: RefusalKind
    meaning: str
    remedy: str
    """What to do about it; empty where there is nothing to do."""
    tiers: frozenset[Tier]
    """The tiers in which it is given."""
    config_key: str
    """The configuration key that changes it; empty when it is compiled in."""
    wants_slot: bool
    """The soft tier would evict, now or after what is in flight: the node requests its eviction slot."""

    def __new__(cls, word: str, attributes: _Attributes) -> "RefusalCode":
        member = str.__new__(cls, word)
        member._value_ = word
        member.kind = attributes.kind
        member.meaning = attributes.meaning
        member.remedy = attributes.remedy
        member.tiers = attributes.tiers
        member.config_key = attributes.config_key
        member.wants_slot = attributes.wants_slot
        return member

    OWN_POD = "own-pod", _protection("The agent itself runs in it.")
    STATIC_POD = (
        "static-pod",
        _protection("A static pod, by the kubelet's own list or its cgroup: only its manifest on the node removes it."),
    )
    MIRROR_POD = (
        "mirror-pod",
        _protection(
            "The API's mirror of a static pod, confirmed by owner, hashes and cgroup: the kubelet recreates it when it "
            "is deleted."
        ),
    )
    SYSTEM_NODE_CRITICAL = (
        "system-node-critical",
        _protection("Its priority class is system-node-critical, and its priority is not below 2000000000."),
    )
    CRITICAL_PRIORITY = (
        "critical-priority",
        _protection("Its priority is 2000000000 or above. The kubelet evicts no such pod."),
    )
    UNNAMED_POD = (
        "unnamed-pod",
        _protection(
            "Its namespace, name or UID is unknown, so no eviction can be requested.",
            "See `notes` of the report: is the log directory readable, does the API server answer?",
        ),
    )
    FINISHED = (
        "finished",
        _protection("Its phase is Succeeded or Failed: it holds nothing that an eviction would free."),
    )
    UNKNOWN_POD = (
        "unknown-pod",
        _protection(
            "Found on the host alone: its owner, priority and PodDisruptionBudgets are unknown.",
            "In `check`: use the API. In the agent: does the pod belong to a node of another name, or is it too new "
            "for the watch?",
            config_key="protection.unknownPods",
        ),
    )
    DAEMON_SET = (
        "daemon-set",
        _protection("Its DaemonSet would recreate it on this node.", config_key="protection.daemonSets"),
    )
    NAMESPACE = "namespace", _protection("Its namespace is protected.", config_key="protection.namespaces")
    NAMESPACE_SOFT_TIER = (
        "namespace-soft-tier",
        _protection(
            "Its namespace is protected in the soft tier (`protect: soft`).",
            config_key="protection.namespaceRules",
            tiers=SOFT_TIER,
        ),
    )
    BARE_POD = "bare-pod", _protection("No controller would recreate it.", config_key="protection.barePods")
    NODE_BOUND = (
        "node-bound",
        _protection(
            "It could only be scheduled to this node again: nodeName in its template, hostname selector or affinity, "
            "local volume.",
            config_key="protection.nodeBound",
        ),
    )
    CLAIMS_UNKNOWN = (
        "claims-unknown",
        _protection(
            "It is unknown (yet) whether a volume that it mounts is local. The soft tier waits for the answer and "
            "evicts no other pod instead; the hard tier waits at most 2 seconds, then the pod is a candidate.",
            "See the note `volumes`: may the agent get PersistentVolumeClaims and PersistentVolumes?",
            config_key="protection.nodeBound",
        ),
    )
    LABEL = (
        "label",
        _protection("It has a protected label, in a trusted namespace.", config_key="protection.labels"),
    )
    ANNOTATION = (
        "annotation",
        _protection("It has a protected annotation, in a trusted namespace.", config_key="protection.annotations"),
    )
    TERMINATING = (
        "terminating",
        _protection("It is terminating already; its release counts against the deficit."),
    )
    NOT_RUNNING = (
        "not-running",
        _protection("No cgroup was found: not started yet, already gone, or not readable."),
    )
    SYSTEM_PARTITION = (
        "system-partition",
        _protection(
            "Its cgroup is below kubepods/system: the kubelet's `systemPartition` counts it among the system pods of "
            "the node, with a memory limit of their own.",
            config_key="protection.systemPartition",
        ),
    )
    USAGE_UNKNOWN = (
        "usage-unknown",
        _protection(
            "Its usage of the starved resource is unknown, so the relief of its eviction is too.",
            "For disks: the walk has not reached it yet. Else see `notes`.",
        ),
    )
    TOO_YOUNG = (
        "too-young",
        _protection(
            "Soft tier: it has run for less than the minimum age, or its age is unknown.",
            config_key="protection.minimumAge",
            tiers=SOFT_TIER,
        ),
    )
    WITHIN_REQUEST = (
        "within-request",
        _protection(
            "`allocatableMemory.available`: it uses no more memory than it requests. The requests of all pods fit into "
            "the node's allocatable memory, so the cause is in pods that use more than that.",
            "See the pods that use more than they request, also those that are protected.",
        ),
    )
    DISRUPTION_BUDGET = (
        "disruption-budget",
        _protection(
            "Soft tier: its PodDisruptionBudget allows no disruption now.",
            config_key="protection.disruptionBudgets",
            tiers=SOFT_TIER,
        ),
    )
    EVICT_NEVER = (
        "evict-never",
        _protection(
            "Soft tier: its annotation `nodeagent.io/evict` is `never`, in a trusted namespace.",
            config_key="protection.trustedNamespaces",
            tiers=SOFT_TIER,
        ),
    )

    BELOW_MINIMUM_RELIEF = (
        "below-minimum-relief",
        _limit("Its eviction would free too little of the deficit.", config_key="relief.minimumRelief"),
    )
    SHORT_LIVED_RELIEF = (
        "short-lived-relief",
        _limit(
            "It comes first in the order, but pods that grow, use more than they request and have no higher priority "
            "would use up what its eviction frees, or what the threshold reserves if that is less: memory within five "
            "minutes, a disk or PIDs within an hour. They are evicted instead."
        ),
    )
    EVICTION_IN_FLIGHT = "eviction-in-flight", _limit("An earlier decision is evicting it already.")
    RATE_LIMIT_NODE = (
        "rate-limit-node",
        _limit("The token bucket of the node is empty.", config_key="rateLimits.node"),
    )
    RATE_LIMIT_NAMESPACE = (
        "rate-limit-namespace",
        _limit("The token bucket of its namespace is empty.", config_key="rateLimits.namespace"),
    )
    RATE_LIMIT_OWNER = (
        "rate-limit-owner",
        _limit("The token bucket of its owner is empty.", config_key="rateLimits.owner"),
    )
    RATE_LIMIT_SIGNAL = (
        "rate-limit-signal",
        _limit("The token bucket of the signal is empty.", config_key="rateLimits.signal"),
    )
    OWNER_INCOMPLETE = (
        "owner-incomplete",
        _limit(
            "Soft tier: its owner (ReplicaSet, StatefulSet) wants more replicas than are ready, without those that "
            "wait on this node: a replacement is not created, not scheduled or not started. At most "
            "`protection.replacementWait`.",
            "`kubectl describe` the owner and its pending pods: no node takes them, a quota, an image?",
            config_key="protection.replacementWait",
            tiers=SOFT_TIER,
        ),
    )
    NO_NODE_FITS = (
        "no-node-fits",
        _limit(
            "Soft tier: no other node takes it, by the checks of the descheduler's `nodeFit`: schedulable and ready, "
            "node selector and affinity, taints, requests against what is allocatable and left, anti-affinity.",
            "The message counts the nodes by what they lack: add a node, or make the pod's requests and constraints "
            "such that another node takes it.",
            config_key="protection.nodeFit",
            tiers=SOFT_TIER,
        ),
    )
    RATE_LIMIT_HOOK = (
        "rate-limit-hook",
        _limit(
            "Soft tier: the token bucket of hooks is empty, and with `onFailure: skip` no pod is evicted without its "
            "hook. No other pod is evicted in its place.",
            "Raise the limit, or let `onFailure: evict` evict without the hook.",
            config_key="rateLimits.hook",
            tiers=SOFT_TIER,
        ),
    )
    HOOK_FAILED = (
        "hook-failed",
        _limit(
            "Soft tier: the hook before its eviction failed or reached its deadline, and `onFailure` is `skip`. It may "
            "run again after `repeatAfter`. The hard tier evicts the pod as any other.",
            "The message has the exit code, or the HTTP status; `nodeagent explain` shows the output.",
            config_key="hooks.beforeEviction.onFailure",
            tiers=SOFT_TIER,
        ),
    )
    RATE_LIMIT_LAST_RESORT = (
        "rate-limit-last-resort",
        _limit("The token bucket of kills of last resort is empty.", config_key="rateLimits.lastResort"),
    )
    RATE_LIMIT_OWN_LIMIT = (
        "rate-limit-own-limit",
        _limit(
            "The token bucket of evictions of pods near their own memory limit is empty.",
            config_key="rateLimits.ownLimit",
        ),
    )
    RATE_LIMIT_RESIZE = (
        "rate-limit-resize",
        _resize("The token bucket of raises of memory limits is empty.", config_key="rateLimits.resize"),
    )
    RESIZE_IMPOSSIBLE = (
        "resize-impossible",
        _resize(
            "The memory limit of the container cannot be raised in place: its resizePolicy restarts it, the limit is "
            "the pod's, the pod is static, the kubelet reports no resources, or another resize of the pod is pending. "
            "The pod is evicted if it opted in to that.",
            "Set `resizePolicy` NotRequired for memory, or opt in to evictions as well.",
            config_key="ownLimit.resize",
        ),
    )
    RESIZE_CEILING = (
        "resize-ceiling",
        _resize(
            "The memory limit of the container is at `ceiling` or `nodeShare`. The pod is evicted if it opted in to "
            "that.",
            "The pod leaks, or its limit is too low: the message has the limit before the first raise.",
            config_key="ownLimit.resize.ceiling",
        ),
    )
    RESIZE_NO_HEADROOM = (
        "resize-no-headroom",
        _resize(
            "The node does not have what the raise would add, above its memory thresholds and beyond the requests of "
            "its pods, or that is unknown. The pod is evicted if it opted in to that.",
            config_key="ownLimit.resize.step",
        ),
    )
    RESIZE_FAILED = (
        "resize-failed",
        _resize(
            "The API server or the kubelet did not carry out the last raise of this container, or the API server does "
            "not serve `pods/resize`; the message has the reason and the next time. The pod is evicted if it opted in "
            "to that.",
            "`nodeagent check --rights` names a missing right; `kubectl describe pod` shows PodResizePending.",
            config_key="ownLimit.resize",
        ),
    )
    WAITS_FOR_RESIZE = (
        "waits-for-resize",
        _resize(
            "A raise of this container's memory limit was requested, and the kubelet carries it out. The pod is not "
            "evicted meanwhile.",
            config_key="ownLimit.resize",
        ),
    )
    OWNER_BACKOFF = (
        "owner-backoff",
        _limit(
            "A pod of the same owner was evicted lately. The owner's other pods are not evicted for a while, and no "
            "other pod is evicted in their place.",
            config_key="rateLimits.ownerBackoff",
        ),
    )
    BLOCKED_BY_PDB = (
        "blocked-by-pdb",
        _limit("The last request for this pod was refused by its PodDisruptionBudget; the message has the next time."),
    )
    PDB_CONFLICT = (
        "pdb-conflict",
        _limit("The last request for this pod failed because more than one PodDisruptionBudget selects it."),
    )
    NOT_FOUND = (
        "not-found",
        _limit(
            "The API server answered 400, 404, 409 or 422 for this pod and does not list it, and the pod still runs; "
            "retried soon."
        ),
    )
    CONFLICT = "conflict", _limit("The API server answered 409 for this pod, and the pod still runs; retried soon.")
    INVALID = (
        "invalid",
        _limit("The API server answered 400, 422, or 404 although it lists the pod, which still runs; retried soon."),
    )
    DENIED = (
        "denied-by-admission",
        _limit(
            "An admission policy or webhook denied the last request for this pod, or its webhook failed; the message "
            "names it and has the next time."
        ),
    )
    NOT_KILLED = "not-killed", _limit("The kernel refused the last kill of this pod.")

    SNAPSHOT_STALE = (
        "snapshot-stale",
        _decision(
            "The sample is older than `sampling.staleAfter`.",
            "The loop was delayed: see the stage durations in /metrics.",
            config_key="sampling.staleAfter",
        ),
    )
    PODS_NEVER_SYNCED = (
        "pods-never-synced",
        _decision(
            "The API server has not listed the pods of this node yet.",
            "Credentials, network, node name: see the log and `check`.",
        ),
    )
    PODS_STALE = (
        "pods-stale",
        _decision(
            "The API server's list of the pods is older than `cluster.podsMaxAge`.",
            "The API server is unreachable.",
            config_key="cluster.podsMaxAge",
        ),
    )
    PAGE_CACHE_ONLY = (
        "page-cache-only",
        _decision(
            "Memory: only the kubelet's figure is below the threshold, and the kernel's is above it by half of it, or "
            "by 256Mi if that is less. The difference is page cache, which the kernel drops when memory is needed. No "
            "pod is evicted for it; the condition is True, because a kubelet with such a threshold evicts.",
            "Reclaim page cache before the kubelet evicts for it: docs/memory.md.",
            config_key="signals.memoryModel",
        ),
    )
    BYTES_FIRST = (
        "bytes-first",
        _decision(
            "Inodes: each free block of 4 KiB has a free inode, and a threshold of the same file system's bytes is "
            "met. Bytes run out first (XFS makes inodes out of free space), so only the threshold of bytes evicts.",
            "See why the threshold of bytes evicts no pod, or wait for its release.",
        ),
    )
    STABLE_DISK = (
        "stable-disk",
        _decision(
            "Disks: a built-in threshold is crossed, and pods do not fill the disk: not within an hour at the rate of "
            "the last ten minutes, nor within ten minutes at the present one. Many healthy nodes are 85% to 90% full "
            "for months. The threshold counts as not met, also for the condition, until less is left than the "
            "kubelet's own threshold: 10%, for inodes 5%, where its configuration is not known. Reports have this code "
            "at the threshold; no decision is refused for it.",
            "Nothing, or set another value, which is judged as it is written.",
            config_key="reclaim.waitForKubelet",
        ),
    )
    IMAGES_FIRST = (
        "images-first",
        _decision(
            "Disks: a built-in threshold is crossed, at least 14% of the disk are left (1% less than the kubelet's own "
            "threshold, if that is above 15%), pods fill it, and the images that no pod uses would free enough. A "
            "kubelet keeps these until the disk is 85% full. The threshold counts as not met, also for the condition. "
            "Reports have this code at the threshold; no decision is refused for it.",
            "Remove images earlier (`reclaim.actions` of kind `images`, or `imageGCHighThresholdPercent` of the "
            "kubelet), or set another value, which is judged as it is written.",
            config_key="reclaim.waitForKubelet",
        ),
    )
    PAGE_CACHE_UNKNOWN = (
        "page-cache-unknown",
        _decision(
            "Memory: the kubelet's figure is below the threshold, and the kernel's is unknown, so whether anything but "
            "page cache is short is unknown. No pod is evicted for the kubelet's figure alone.",
            "See the reason of the unknown figure in `check`. `memoryModel: workingset` acts on the kubelet's figure "
            "alone.",
            config_key="signals.memoryModel",
        ),
    )
    NO_DEFICIT = "no-deficit", _decision("The deficit is zero.")
    PENDING_RELEASE = "pending-release", _decision("Terminating pods are releasing the whole deficit already.")
    WAITS_FOR_RELEASE = (
        "waits-for-release",
        _decision(
            "Soft tier, and `ranking.order: kubelet`: an eviction is in flight. Its relief is measured before the next "
            "one.",
            wants_slot=True,
        ),
    )
    NODE_MAINTENANCE = (
        "node-maintenance",
        _decision(
            "Soft tier: the node is cordoned, drained or being replaced; the message says which.",
            "Nothing, if that is intended. Else uncordon the node, or remove the condition or the taint.",
            config_key="protection.nodeMaintenance",
            tiers=SOFT_TIER,
        ),
    )
    NODE_SHUTDOWN = (
        "node-shutdown",
        _decision(
            "Soft tier, and evictions of `ownLimit`: the kubelet shuts the node down and ends its pods itself.",
            "Nothing.",
            config_key="protection.nodeMaintenance",
            tiers=SOFT_TIER,
        ),
    )
    WAITS_FOR_TAINT = (
        "waits-for-taint",
        _decision(
            "Soft tier: the node does not show our taint yet; two seconds at most.",
            config_key="conditions.taint",
            tiers=SOFT_TIER,
            wants_slot=True,
        ),
    )
    WAITS_FOR_PDBS = (
        "waits-for-pdbs",
        _decision(
            "Soft tier: the PodDisruptionBudgets of the pods are requested and not listed yet; half the grace and 15 "
            "seconds at most.",
            config_key="protection.disruptionBudgets",
            tiers=SOFT_TIER,
        ),
    )
    WAITS_FOR_LEASE = (
        "waits-for-lease",
        _decision(
            "Soft tier: all eviction slots of the zone are taken; the message lists the holders.",
            config_key="fleet.maxConcurrentEvictions",
            tiers=SOFT_TIER,
            wants_slot=True,
        ),
    )
    WAITS_FOR_RECLAIM = (
        "waits-for-reclaim",
        _decision(
            "An action of `reclaim.actions` runs first, at most until its deadline; its gain is measured.",
            config_key="reclaim.actions",
        ),
    )
    WAITS_FOR_KUBELET = (
        "waits-for-kubelet",
        _decision(
            "Soft tier, disks: the kubelet's image garbage collection runs first.",
            config_key="reclaim.waitForKubelet",
            tiers=SOFT_TIER,
        ),
    )
    WAITS_FOR_OWNER = (
        "waits-for-owner",
        _decision(
            "Soft tier: the replicas of the victim's owner are being read, or cannot be read; at most "
            "`protection.replacementWait`.",
            "See the note `owners`: may the agent get replicasets and statefulsets (examples/replacements.yaml)?",
            config_key="protection.replacementWait",
            tiers=SOFT_TIER,
            wants_slot=True,
        ),
    )
    WAITS_FOR_NODES = (
        "waits-for-nodes",
        _decision(
            "Soft tier: whether another node takes the victim is being read, or cannot be read. The soft tier evicts "
            "nothing until it is known, however long that takes; a hard threshold does not wait for it.",
            "See the note `node fit`: may the ServiceAccount list nodes and pods (examples/node-fit.yaml)?",
            config_key="protection.nodeFit",
            tiers=SOFT_TIER,
        ),
    )
    WAITS_FOR_HOOK = (
        "waits-for-hook",
        _decision(
            "Soft tier: the hook before an eviction runs, at most until its deadline. The message names the pod. A "
            "hard threshold evicts meanwhile and does not wait for it.",
            "Make the hook faster, or shorten `deadline`.",
            config_key="hooks.beforeEviction.deadline",
            tiers=SOFT_TIER,
            wants_slot=True,
        ),
    )
    WAITS_FOR_RECOUNT = (
        "waits-for-recount",
        _decision(
            "Disks: the disk usage of the pods is older than the crossing of the threshold, or measured once, which "
            "does not show what grows. It is measured again, for at most 3 or 8 seconds, and at most a quarter of the "
            "time until the disk is full. Or no pod is measured yet and the one that writes fastest may write to a "
            "volume that no eviction frees. Or a pod exceeds a limit of its own "
            "by a periodic measurement; it is evicted if a measurement made for this decision confirms it."
        ),
    )
    UNATTRIBUTED = (
        "unattributed",
        _decision(
            "Disks: the growth of the last minutes that crossed the threshold is in no pod: deleted files that are "
            "held open where the agent may not read, or files of the host. It is larger than the growth in pods; no "
            "pod is evicted for it until it stops growing for some minutes.",
            "See `deletedOpenBytes` and the host directories in the report; docs/disk.md lists the rights that show "
            "more.",
        ),
    )
    HOST_ZOMBIES = (
        "host-zombies",
        _decision(
            "PIDs: zombies of processes outside of pods hold at least what is missing, and more than any candidate. "
            "The message names the service that does not wait for its children. No eviction frees these PIDs.",
            "Restart that service. Its zombies end with it.",
        ),
    )
    NO_CANDIDATES = (
        "no-candidates",
        _decision(
            "No candidate frees enough; the message lists the largest other holders.",
            "Examine what is outside the pods, and the protections.",
        ),
    )
    FUTILE = (
        "futile",
        _decision(
            "All candidates together cannot free the deficit; the message lists the largest other holders.",
            "As above. In the hard tier `relief.onFutile: evict` evicts anyway.",
            config_key="relief.onFutile",
        ),
    )
    OUT_OF_REACH = (
        "out-of-reach",
        _decision(
            "The pod that holds most of the deficit cannot be evicted now: its usage is unreadable, only the host "
            "lists it, a PodDisruptionBudget forbids it, or its eviction is stuck. Other pods are evicted in its place "
            "only if they alone cover the deficit and what is used up within 60 seconds, at most once in 10 minutes. "
            "Or a protected pod that uses more than it requests causes the loss, and would take within 60 seconds what "
            "others free.",
            "Examine the pod that the message names.",
        ),
    )
    CIRCUIT_BREAKER = (
        "circuit-breaker",
        _decision(
            "Several evictions in a row freed less than half of their predicted relief.",
            "Something else takes what is freed. Evictions go on after `relief.failureMemory`.",
            config_key="relief.failuresBeforeStop",
        ),
    )
    TOO_MANY_REQUESTS = (
        "too-many-requests",
        _decision("The API server throttled the last request; the message has the next time."),
    )
    FORBIDDEN = (
        "forbidden",
        _decision(
            "The API server answered 403 to the last request; the message has the next time.",
            "`nodeagent check --rights` names the missing rule.",
        ),
    )
    UNAUTHORIZED = (
        "unauthorized",
        _decision("The API server answered 401 to the last request; the message has the next time."),
    )
    SERVER_ERROR = (
        "server-error",
        _decision(
            "The API server failed to answer the last request, or answered 404 but not the list of the pods; the "
            "message has the next time."
        ),
    )
    TIMED_OUT = (
        "timed-out",
        _decision("The last request had no complete answer in time; the message has the next time."),
    )
    UNREACHABLE = (
        "unreachable",
        _decision("The last request did not leave the node; the message has the next time."),
    )

    NOT_PLANNED = (
        "not-planned",
        _recheck("The victim has no planned eviction in flight any more: another outcome came first."),
    )
    RECHECK_NOT_NEWER = "recheck-not-newer", _recheck("The second sample is not newer than the decision's.")
    SIGNAL_UNKNOWN = "signal-unknown", _recheck("The signal is unreadable in the second sample.")
    RECOVERED = "recovered", _recheck("The signal has recovered between the two samples.")
    POD_GONE = "pod-gone", _recheck("No pod with this UID is on the node any more.")
    API_REACHABLE = (
        "api-reachable",
        _recheck("A kill of last resort is unnecessary: the API server answers again.", tiers=HARD_TIER),
    )


class Refusal(NamedTuple):
    """Why something is not done."""

    code: RefusalCode
    message: str
    """Subject, state, number, limit."""

"""What every word means that the agent gives as a reason: codes of refusals, reasons of Events.

The codes are where the decisions are made; the sentences for people are here, once. `docs/reasons.md` and
`docs/events.md` are generated from this, and a test holds it to the code: a code that is not explained here, or is
explained and does not exist, fails it.
"""

from typing import Final, NamedTuple


class RefusalMeaning(NamedTuple):
    """One code."""

    meaning: str
    remedy: str = ""
    """What to do about it, where there is something to do."""


PROTECTIONS: Final = {
    "own-pod": RefusalMeaning("The agent itself runs in it."),
    "static-pod": RefusalMeaning(
        "A static pod, by the kubelet's own list or its cgroup: only its manifest on the node can remove it."
    ),
    "mirror-pod": RefusalMeaning(
        "The API's mirror of a static pod, as owner, hashes and cgroup confirm: deleting it changes nothing, the "
        "kubelet brings it back."
    ),
    "system-node-critical": RefusalMeaning(
        "Its priority class is system-node-critical, and its priority is not below 2000000000."
    ),
    "critical-priority": RefusalMeaning(
        "Its priority is 2000000000 or above, as that of no pod that a kubelet evicts."
    ),
    "unnamed-pod": RefusalMeaning(
        "Its namespace, name or UID is not known: the API could not be asked to evict it.",
        "See `notes` of the report: is the log directory readable, does the API answer?",
    ),
    "finished": RefusalMeaning("Its phase is Succeeded or Failed: it holds nothing that an eviction would free."),
    "unknown-pod": RefusalMeaning(
        "Only the host knows it: its owner, priority and budgets are not known.",
        "In `check`: use the API. In the agent: is it the pod of another node's name, or too new for the watch?",
    ),
    "daemon-set": RefusalMeaning("Its DaemonSet would bring it back to this very node."),
    "namespace": RefusalMeaning("Its namespace is protected."),
    "bare-pod": RefusalMeaning("No controller would bring it back."),
    "node-bound": RefusalMeaning(
        "It could only come back to this very node: nodeName in its template, hostname selector or affinity, local "
        "volume."
    ),
    "claims-unknown": RefusalMeaning(
        "Whether a volume that it mounts is local was not found out (yet). The soft tier waits for that and evicts no "
        "other pod in its place; the hard tier waits at most 2 seconds, then the pod is a candidate.",
        "See the note `volumes`: may the agent get PersistentVolumeClaims and PersistentVolumes?",
    ),
    "label": RefusalMeaning("It has a protected label, in a trusted namespace."),
    "annotation": RefusalMeaning("It has a protected annotation, in a trusted namespace."),
    "terminating": RefusalMeaning("It is on its way out already; what it releases counts against the deficit."),
    "not-running": RefusalMeaning("No cgroup was found: not started yet, already gone, or not readable."),
    "usage-unknown": RefusalMeaning(
        "What it uses of the starved resource is not known, so nobody can say that its eviction would help.",
        "For disk: the walk has not reached it yet. Else see `notes`.",
    ),
    "too-young": RefusalMeaning("It has not been running for the minimum age, or its age is not known."),
    "disruption-budget": RefusalMeaning("Soft tier: its PodDisruptionBudget allows no disruption now."),
    "evict-never": RefusalMeaning("Soft tier: it says `nodeagent.io/evict: never` in a namespace that may."),
}
"""Why a pod is not a candidate."""

LIMITS: Final = {
    "below-minimum-relief": RefusalMeaning("Its eviction would free too little of what is missing to matter."),
    "eviction-in-flight": RefusalMeaning("An earlier decision is evicting it already."),
    "rate-limit-node": RefusalMeaning("The node's bucket of evictions is empty."),
    "rate-limit-namespace": RefusalMeaning("The bucket of its namespace is empty."),
    "rate-limit-owner": RefusalMeaning("The bucket of its owner is empty."),
    "rate-limit-signal": RefusalMeaning("The bucket of the signal is empty."),
    "rate-limit-last-resort": RefusalMeaning("The bucket of kills of last resort is empty."),
    "owner-backoff": RefusalMeaning(
        "A pod of the same owner was evicted lately; its siblings are not evicted for a while, and no other pod is in "
        "their place."
    ),
}
"""Why a candidate does not go now."""

DECISIONS: Final = {
    "snapshot-stale": RefusalMeaning(
        "The sample is older than `sampling.staleAfter`.", "The loop was held up: see the stage durations in /metrics."
    ),
    "pods-never-synced": RefusalMeaning(
        "The API has not told which pods run here.", "Credentials, network, node name: see the log and `check`."
    ),
    "pods-stale": RefusalMeaning(
        "The API's view of the pods is older than `cluster.podsMaxAge`.", "The API server is out of reach."
    ),
    "no-deficit": RefusalMeaning("Nothing is missing any more."),
    "pending-release": RefusalMeaning("What is missing is already being released by terminating pods."),
    "waits-for-release": RefusalMeaning(
        "Soft tier: an eviction is under way, its relief is looked at before the next."
    ),
    "waits-for-taint": RefusalMeaning("Soft tier: our taint was not seen on the node yet; two seconds at most."),
    "waits-for-pdbs": RefusalMeaning(
        "Soft tier: the PodDisruptionBudgets of the pods were asked for and are not known yet; half the grace and 15 "
        "seconds at most."
    ),
    "waits-for-lease": RefusalMeaning(
        "Soft tier: the node holds no seat of its zone (`fleet.maxConcurrentEvictions`); the message says who does."
    ),
    "waits-for-reclaim": RefusalMeaning(
        "An action of `reclaim.actions` is tried first, at most until its deadline; what it brings back is measured."
    ),
    "waits-for-kubelet": RefusalMeaning(
        "Soft tier, disks: the kubelet's own image garbage collection has its turn first (`reclaim.waitForKubelet`)."
    ),
    "waits-for-recount": RefusalMeaning(
        "Disks: what pods hold was counted before the threshold was crossed; a new count is waited for, at most 3 "
        "seconds and a quarter of the time until the disk is full. Or a pod exceeds a limit of its own by a count made "
        "in its turn; it goes if one made for it says the same."
    ),
    "unattributed": RefusalMeaning(
        "Disks: the threshold is crossed because of what has come in the last minutes and is in no pod: deleted files "
        "that are held open where the agent may not look, or files of the host. More of it than in pods; nobody is "
        "evicted in place of whoever holds it, until it stops growing for some minutes.",
        "See `deletedOpenBytes` and the host directories in the report; docs/disk.md says which rights show more.",
    ),
    "no-candidates": RefusalMeaning(
        "No pod may be evicted for it; the message says where the resource is instead.",
        "Look at what is outside the pods, or at the protections.",
    ),
    "futile": RefusalMeaning(
        "All candidates together could not free what is missing; the message says where it is instead.",
        "As above. In the hard tier `relief.onFutile: evict` evicts anyway.",
    ),
    "out-of-reach": RefusalMeaning(
        "The pod that holds most of what is missing cannot be evicted now: its usage cannot be read, only the host "
        "knows it, a PodDisruptionBudget forbids it, or its eviction is stuck. Others are evicted in its place only if "
        "they alone cover what is missing and what is used up within 60 seconds, at most once in 10 minutes.",
        "Look at the pod that the message names.",
    ),
    "circuit-breaker": RefusalMeaning(
        "Several evictions in a row brought back less than half of what was predicted.",
        "Something else takes what is freed. Evictions go on after `relief.failureMemory`.",
    ),
}
"""Why a decision evicts nobody, or not more."""

RECHECKS: Final = {
    "not-planned": RefusalMeaning("It is not written down as planned: another outcome came first."),
    "recheck-not-newer": RefusalMeaning("The second sample is not newer than the decision's."),
    "signal-unknown": RefusalMeaning("The signal could not be read any more."),
    "recovered": RefusalMeaning("The signal has recovered between the two samples."),
    "pod-gone": RefusalMeaning("No pod with this UID is on the node any more."),
    "api-reachable": RefusalMeaning("A kill of last resort is not needed: the API server answers again."),
}
"""Why a victim is let go right before acting (outcome `recheck-refused`); protections are asked again as well."""

REFUSALS: Final = {**PROTECTIONS, **LIMITS, **DECISIONS, **RECHECKS}


class EventReason(NamedTuple):
    """One reason of an Event."""

    reason: str
    object: str
    type: str
    meaning: str


EVENTS: Final = (
    EventReason(
        "Evicted",
        "Pod",
        "Warning",
        "The API server accepted the pod's eviction. The note is the kubelet's message, the annotations are the "
        "kubelet's (`starved_resource`, `offending_containers`...).",
    ),
    EventReason("EvictionGraceShortened", "Pod", "Warning", "Hard tier: the pod was terminating, its grace was cut."),
    EventReason("Killed", "Pod", "Warning", "Last resort: its processes were ended while the API was out of reach."),
    EventReason("EvictionThresholdMet", "Node", "Warning", "Pods are about to be evicted for the named resource."),
    EventReason("ConfigurationRejected", "Node", "Warning", "A changed configuration is not valid; the old one stays."),
    EventReason("NodeHasInsufficientMemory", "Node", "Normal", "MemoryPressure has become True."),
    EventReason("NodeHasSufficientMemory", "Node", "Normal", "MemoryPressure has become False."),
    EventReason("NodeHasDiskPressure", "Node", "Normal", "DiskPressure has become True."),
    EventReason("NodeHasNoDiskPressure", "Node", "Normal", "DiskPressure has become False."),
    EventReason("NodeHasInsufficientPID", "Node", "Normal", "PIDPressure has become True."),
    EventReason("NodeHasSufficientPID", "Node", "Normal", "PIDPressure has become False."),
)

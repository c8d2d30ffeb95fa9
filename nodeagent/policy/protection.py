"""Decide which pods are protected, and why: each protection is one function that returns its reason or None.

Promises:

1. No configuration removes a compiled-in protection (`RefusalCode.config_key` is empty): static, mirror, the agent's
   own pod, system-node-critical, priorities of 2000000000 and above, pods without namespace, name or UID, and pods that
   cannot be candidates (finished, terminating, not running, usage unknown).
2. An unknown protects: a pod of unknown age is too young, a pod that the API server does not list is protected. A pod
   whose volumes could not be looked up is protected too, in the hard tier for 2 s at most (`out_of_reach`).
3. Labels and annotations, which a pod's author writes, protect it only in `trustedNamespaces`, and the annotation
   `nodeagent.io/evict` never in the hard tier. Static and mirror pods are recognised by the kubelet's own objects
   (`kube.pod_watch`, `sampling.pods.pod_join`), whatever a pod's annotations contain.

Theory of operation. `OBJECT_RULES` read only the pod's object and the configuration, so `candidates.RankingCache` keeps
their refusals for each version of a pod. `MOMENTARY_RULES` also read the time, the tier and the usage and are evaluated
in every decision. Reports list the reasons in the order of the tables.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from nodeagent.config.schema import NamespaceProtection, NamespaceRule, ProtectionConfig
from nodeagent.model import Pod, PodSource, PodUsage, Refusal, RefusalCode, Tier

EVICT_ANNOTATION: Final = "nodeagent.io/evict"
CRITICAL_CLASS: Final = "system-node-critical"
CRITICAL_PRIORITY: Final = 2_000_000_000
"""The lowest priority that the kubelet never evicts (KUBELET-CONTRACT 5)."""
EVERY_NAMESPACE: Final = "*"
_NO_RULE: Final = NamespaceRule()
PREFERENCES: Final[Mapping[str, float]] = {"prefer": -1.0, "avoid": 1.0}
"""Values of the ranking key `evictionPreference`, by the annotation's value."""


class RuleContext(NamedTuple):
    """What momentary rules read beside the pod."""

    rules: ProtectionConfig
    tier: Tier
    resource: str
    taken_at: float
    wall_time: float


class RuleInput(NamedTuple):
    """One pod at one instant."""

    pod: Pod
    usage: PodUsage | None
    used: int | None
    """Of the starved resource; None if unknown."""
    context: RuleContext


class ObjectRule(NamedTuple):
    """A protection that depends on the pod's object and the configuration alone."""

    code: RefusalCode
    reason: Callable[[Pod, ProtectionConfig], str | None]


class MomentaryRule(NamedTuple):
    """A protection that depends on the time, the tier or the usage."""

    code: RefusalCode
    reason: Callable[[RuleInput], str | None]


# --- object rules ----------------------------------------------------------------------------------------------------


def _static(pod: Pod, _rules: ProtectionConfig) -> str | None:
    return f"static pod from {pod.static}: only its manifest can remove it" if pod.static else None


def _mirror(pod: Pod, _rules: ProtectionConfig) -> str | None:
    return "mirror of a static pod: the kubelet recreates it at once" if pod.mirror_of else None


def _critical_class(pod: Pod, _rules: ProtectionConfig) -> str | None:
    # Admission resolves the class to its priority. With a smaller number the class name is only the author's text.
    if pod.priority_class != CRITICAL_CLASS or (type(pod.priority) is int and pod.priority < CRITICAL_PRIORITY):
        return None
    return f"priority class {CRITICAL_CLASS}"


def _critical_priority(pod: Pod, _rules: ProtectionConfig) -> str | None:
    priority = pod.priority
    if priority is None:
        return None
    if type(priority) is not int:
        return f"priority {priority!r} is not a number"
    return f"priority {priority} is at least {CRITICAL_PRIORITY}" if priority >= CRITICAL_PRIORITY else None


def _unnamed(pod: Pod, _rules: ProtectionConfig) -> str | None:
    return None if pod.namespace and pod.name and pod.uid else "without namespace, name and UID the API cannot evict it"


def _finished(pod: Pod, _rules: ProtectionConfig) -> str | None:
    return f"finished: phase {pod.phase}" if pod.finished else None


def _unknown(pod: Pod, rules: ProtectionConfig) -> str | None:
    if rules.unknown_pods and pod.source is PodSource.HOST:
        return "the API server does not list this pod: owner, priority and PDBs unknown"
    return None


def _daemon_set(pod: Pod, rules: ProtectionConfig) -> str | None:
    owner = pod.owner
    # Only the real DaemonSet API counts: an author may name any owner, and the garbage collector removes pods of a
    # missing owner only if it serves the owner's API.
    if rules.daemon_sets and owner is not None and owner.kind == "DaemonSet" and owner.api_version.startswith("apps/"):
        return f"DaemonSet {owner.name} recreates it on this node"
    return None


def _namespace(pod: Pod, rules: ProtectionConfig) -> str | None:
    if pod.namespace in rules.namespaces or namespace_rule(pod, rules).protect is NamespaceProtection.ALL:
        return f"namespace {pod.namespace} is protected"
    return None


def namespace_rule(pod: Pod, rules: ProtectionConfig) -> NamespaceRule:
    """What differs for pods of this pod's namespace."""
    return rules.namespace_rules.get(pod.namespace or "", _NO_RULE)


def _bare(pod: Pod, rules: ProtectionConfig) -> str | None:
    own = namespace_rule(pod, rules).bare_pods
    protects = rules.bare_pods if own is None else own
    if protects and pod.owner is None and pod.source is PodSource.API:
        return "bare pod: no controller recreates it"
    return None


def _node_bound(pod: Pod, rules: ProtectionConfig) -> str | None:
    if not rules.node_bound:
        return None
    return f"can only run on this node: {pod.node_bound}" if pod.node_bound else None


def _claims_unknown(pod: Pod, rules: ProtectionConfig) -> str | None:
    if not rules.node_bound or pod.node_bound or not pod.claims_unknown:
        return None
    return f"may be bound to this node: {pod.claims_unknown}"


def _label(pod: Pod, rules: ProtectionConfig) -> str | None:
    match = _first_match(pod.labels, rules.labels) if trusted(pod, rules) else None
    return f"label {match}" if match else None


def _annotation(pod: Pod, rules: ProtectionConfig) -> str | None:
    match = _first_match(pod.annotations, rules.annotations) if trusted(pod, rules) else None
    return f"annotation {match}" if match else None


def trusted(pod: Pod, rules: ProtectionConfig) -> bool:
    """True if pods of this namespace may protect themselves by labels and annotations."""
    return pod.namespace in rules.trusted_namespaces or EVERY_NAMESPACE in rules.trusted_namespaces


def _first_match(metadata: Mapping[str, str], patterns: tuple[str, ...]) -> str | None:
    """The first pattern (`key` or `key=value`) that the labels or annotations match."""
    for pattern in patterns:
        key, equals, value = pattern.partition("=")
        if key in metadata and (not equals or metadata[key] == value):
            return pattern
    return None


OBJECT_RULES: Final = (
    ObjectRule(RefusalCode.STATIC_POD, _static),
    ObjectRule(RefusalCode.MIRROR_POD, _mirror),
    ObjectRule(RefusalCode.SYSTEM_NODE_CRITICAL, _critical_class),
    ObjectRule(RefusalCode.CRITICAL_PRIORITY, _critical_priority),
    ObjectRule(RefusalCode.UNNAMED_POD, _unnamed),
    ObjectRule(RefusalCode.FINISHED, _finished),
    ObjectRule(RefusalCode.UNKNOWN_POD, _unknown),
    ObjectRule(RefusalCode.DAEMON_SET, _daemon_set),
    ObjectRule(RefusalCode.NAMESPACE, _namespace),
    ObjectRule(RefusalCode.BARE_POD, _bare),
    ObjectRule(RefusalCode.NODE_BOUND, _node_bound),
    ObjectRule(RefusalCode.CLAIMS_UNKNOWN, _claims_unknown),
    ObjectRule(RefusalCode.LABEL, _label),
    ObjectRule(RefusalCode.ANNOTATION, _annotation),
)

OWN_POD: Final = Refusal(RefusalCode.OWN_POD, "the agent runs in it")
"""Compiled in as well; a rule cannot give it, because only the snapshot contains the agent's pod UID."""

WITHIN_REQUEST: Final = Refusal(
    RefusalCode.WITHIN_REQUEST,
    "uses no more than it requests, and the requests of all pods fit into allocatable memory: others use more",
)
"""For allocatable memory alone: the scheduler and the kubelet admit no pod whose request does not fit into it. The
memory of the node may also be short because of what is outside of pods."""


def object_refusals(pod: Pod, rules: ProtectionConfig) -> tuple[Refusal, ...]:
    """Every reason in the pod's object not to evict it."""
    return tuple(
        [Refusal(rule.code, reason) for rule in OBJECT_RULES if (reason := rule.reason(pod, rules)) is not None]
    )


# --- momentary rules -------------------------------------------------------------------------------------------------


def _terminating(now: RuleInput) -> str | None:
    if now.pod.deletion_wall is None:
        return None
    return f"terminating: {max(0.0, now.pod.deletion_wall - now.context.wall_time):.0f}s of its grace left"


def _not_running(now: RuleInput) -> str | None:
    return "no cgroup found: not started, already gone, or not readable" if now.usage is None else None


def _system_partition(now: RuleInput) -> str | None:
    if not now.context.rules.system_partition or now.usage is None or not now.usage.system_partition:
        return None
    return f"in the system partition of the kubelet, {now.usage.cgroup}"


def _usage_unknown(now: RuleInput) -> str | None:
    return f"{now.context.resource} usage unknown" if now.usage is not None and now.used is None else None


def _too_young(now: RuleInput) -> str | None:
    minimum_s = minimum_age_s(now.pod, now.context.rules)
    if now.context.tier is Tier.HARD or minimum_s <= 0:
        # The youngest pod is often the cause of hard pressure; protecting it would cost another one.
        return None
    started = now.pod.started_wall if now.pod.started_wall is not None else now.pod.created_wall
    if now.usage is not None and now.usage.started_at is not None:
        age_s = now.context.taken_at - now.usage.started_at
    elif started is not None:
        age_s = now.context.wall_time - started
    else:
        return f"age unknown, minimum {minimum_s:.0f}s"
    return None if age_s >= minimum_s else f"{age_s:.0f}s old, minimum {minimum_s:.0f}s"


def _namespace_soft(now: RuleInput) -> str | None:
    if now.context.tier is Tier.HARD:
        return None
    protected = namespace_rule(now.pod, now.context.rules).protect is NamespaceProtection.SOFT
    return f"namespace {now.pod.namespace} is protected in the soft tier" if protected else None


def minimum_age_s(pod: Pod, rules: ProtectionConfig) -> float:
    """`minimumAge` of the pod's namespace."""
    own_s = namespace_rule(pod, rules).minimum_age_s
    return rules.minimum_age_s if own_s is None else own_s


def _disruption_budget(now: RuleInput) -> str | None:
    if now.context.tier is Tier.HARD or not now.context.rules.disruption_budgets:
        return None
    for pdb in now.pod.disruption_budgets:
        if not pdb.disruptions_allowed > 0 and (now.pod.ready or not pdb.unready_allowed):
            return f"PodDisruptionBudget {pdb.name} allows {pdb.disruptions_allowed} disruptions"
    return None


def _evict_never(now: RuleInput) -> str | None:
    if now.context.tier is Tier.HARD or not trusted(now.pod, now.context.rules):
        return None
    return f"annotation {EVICT_ANNOTATION}=never" if now.pod.annotations.get(EVICT_ANNOTATION) == "never" else None


MOMENTARY_RULES: Final = (
    MomentaryRule(RefusalCode.TERMINATING, _terminating),
    MomentaryRule(RefusalCode.NOT_RUNNING, _not_running),
    MomentaryRule(RefusalCode.SYSTEM_PARTITION, _system_partition),
    MomentaryRule(RefusalCode.USAGE_UNKNOWN, _usage_unknown),
    MomentaryRule(RefusalCode.TOO_YOUNG, _too_young),
    MomentaryRule(RefusalCode.NAMESPACE_SOFT_TIER, _namespace_soft),
    MomentaryRule(RefusalCode.DISRUPTION_BUDGET, _disruption_budget),
    MomentaryRule(RefusalCode.EVICT_NEVER, _evict_never),
)


def momentary_refusals(pod: Pod, usage: PodUsage | None, used: int | None, context: RuleContext) -> tuple[Refusal, ...]:
    """Every reason of this instant not to evict the pod. `used` is its usage of the starved resource."""
    now = RuleInput(pod, usage, used, context)
    return tuple([Refusal(rule.code, reason) for rule in MOMENTARY_RULES if (reason := rule.reason(now)) is not None])


def eviction_preference(pod: Pod, rules: ProtectionConfig, *, tier: Tier) -> float:
    """The pod's own preference: -1 to be evicted first, 1 last, 0 without one or where it does not count."""
    if tier is Tier.HARD or not trusted(pod, rules):
        return 0.0
    return PREFERENCES.get(pod.annotations.get(EVICT_ANNOTATION, ""), 0.0)

"""Which pods are not victims, and why: each protection is one small function that returns its reason or None.

Promises:

1. What is compiled in (a code without `config_key`) no configuration can take away: static, mirror, the agent's own
   pod, system-node-critical, priorities of 2000000000 and above, pods that the API could not name, and pods that are no
   candidates at all (finished, terminating, not running, usage unknown).
2. A protection that does not know protects: an age that cannot be told is too young, a pod that nobody vouches for is
   left alone. A pod whose volumes could not be looked up is too, but by the hard tier only for a moment (`reach`).
3. What a pod's author writes into labels and annotations protects it only in `trustedNamespaces`, and the annotation
   `nodeagent.io/evict` never in the hard tier. Static and mirror pods are those that a kubelet's own objects prove
   (`cluster.pods`, `sampling.who`), whatever a pod's annotations say.

Theory of operation. STANDING protections depend on the pod's object and the configuration alone, so their answer is
kept for as long as both are the same objects; MOMENTARY ones depend on the instant, the tier and the usage and are
asked each time. Both tables are in the order in which reasons are shown.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from nodeagent.config.schema import ProtectionConfig as Rules
from nodeagent.model import Pod, PodSource, PodUsage, Refusal, RefusalCode, Tier

WISH_ANNOTATION: Final = "nodeagent.io/evict"
CRITICAL_CLASS: Final = "system-node-critical"
CRITICAL_PRIORITY: Final = 2_000_000_000
"""The lowest priority that the kubelet never evicts (KUBELET-CONTRACT 5)."""
EVERY_NAMESPACE: Final = "*"
WISHES: Final[Mapping[str, float]] = {"prefer": -1.0, "avoid": 1.0}
"""Values of the `wish` key of the ranking."""


class RuleContext(NamedTuple):
    """What momentary protections look at beside the pod."""

    rules: Rules
    tier: Tier
    resource: str
    taken_at: float
    wall_time: float


class ObjectRule(NamedTuple):
    """One row of the table of protections that depend on the pod and the configuration alone."""

    code: RefusalCode
    reason: Callable[[Pod, Rules], str | None]


class MomentaryRule(NamedTuple):
    """One row of the table of protections that depend on the instant."""

    code: RefusalCode
    reason: Callable[[Pod, PodUsage | None, int | None, RuleContext], str | None]


# --- standing --------------------------------------------------------------------------------------------------------


def _static(pod: Pod, rules: Rules) -> str | None:  # noqa: ARG001
    return f"static pod from {pod.static}: only its manifest can remove it" if pod.static else None


def _mirror(pod: Pod, rules: Rules) -> str | None:  # noqa: ARG001
    return "mirror of a static pod: the kubelet would bring it back at once" if pod.mirror_of else None


def _critical_class(pod: Pod, rules: Rules) -> str | None:  # noqa: ARG001
    # Admission resolves the class to its priority. A class name beside a smaller number is what somebody wrote.
    if pod.priority_class != CRITICAL_CLASS or (type(pod.priority) is int and pod.priority < CRITICAL_PRIORITY):
        return None
    return f"priority class {CRITICAL_CLASS}"


def _critical_priority(pod: Pod, rules: Rules) -> str | None:  # noqa: ARG001
    priority = pod.priority
    if priority is None:
        return None
    if type(priority) is not int:
        return f"priority {priority!r} is no number"
    return f"priority {priority} is at least {CRITICAL_PRIORITY}" if priority >= CRITICAL_PRIORITY else None


def _nameless(pod: Pod, rules: Rules) -> str | None:  # noqa: ARG001
    return None if pod.namespace and pod.name and pod.uid else "without namespace, name and UID the API cannot evict it"


def _finished(pod: Pod, rules: Rules) -> str | None:  # noqa: ARG001
    return f"finished: phase {pod.phase}" if pod.finished else None


def _unknown(pod: Pod, rules: Rules) -> str | None:
    if rules.unknown_pods and pod.source is PodSource.HOST:
        return "only the host knows this pod: its owner, priority and budgets are not known"
    return None


def _daemon_set(pod: Pod, rules: Rules) -> str | None:
    owner = pod.owner
    # The garbage collector removes the pods of an owner that does not exist, but only if it knows the owner's API.
    if rules.daemon_sets and owner is not None and owner.kind == "DaemonSet" and owner.api_version.startswith("apps/"):
        return f"DaemonSet {owner.name} would bring it back to this node"
    return None


def _namespace(pod: Pod, rules: Rules) -> str | None:
    return f"namespace {pod.namespace} is protected" if pod.namespace in rules.namespaces else None


def _bare(pod: Pod, rules: Rules) -> str | None:
    if rules.bare_pods and pod.owner is None and pod.source is PodSource.API:
        return "bare pod: no controller would bring it back"
    return None


def _node_bound(pod: Pod, rules: Rules) -> str | None:
    if not rules.node_bound:
        return None
    return f"could only come back to this node: {pod.node_bound}" if pod.node_bound else None


def _claims_unknown(pod: Pod, rules: Rules) -> str | None:
    if not rules.node_bound or pod.node_bound or not pod.claims_unknown:
        return None
    return f"may be bound to this node: {pod.claims_unknown}"


def _label(pod: Pod, rules: Rules) -> str | None:
    mark = _marked(pod.labels, rules.labels) if trusted(pod, rules) else None
    return f"label {mark}" if mark else None


def _annotation(pod: Pod, rules: Rules) -> str | None:
    mark = _marked(pod.annotations, rules.annotations) if trusted(pod, rules) else None
    return f"annotation {mark}" if mark else None


def trusted(pod: Pod, rules: Rules) -> bool:
    """Whether the administrator lets the pods of this namespace protect themselves by labels and annotations."""
    return pod.namespace in rules.trusted_namespaces or EVERY_NAMESPACE in rules.trusted_namespaces


def _marked(marks: Mapping[str, str], wanted: tuple[str, ...]) -> str | None:
    """The first of `wanted` (`key` or `key=value`) that is among `marks`."""
    for text in wanted:
        key, equals, value = text.partition("=")
        if key in marks and (not equals or marks[key] == value):
            return text
    return None


STANDING: Final = (
    ObjectRule(RefusalCode.STATIC_POD, _static),
    ObjectRule(RefusalCode.MIRROR_POD, _mirror),
    ObjectRule(RefusalCode.SYSTEM_NODE_CRITICAL, _critical_class),
    ObjectRule(RefusalCode.CRITICAL_PRIORITY, _critical_priority),
    ObjectRule(RefusalCode.UNNAMED_POD, _nameless),
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


def object_refusals(pod: Pod, rules: Rules) -> tuple[Refusal, ...]:
    """Every standing reason why `pod` is not to be evicted."""
    refusals: tuple[Refusal, ...] = ()
    for code, reason in STANDING:
        text = reason(pod, rules)
        if text is not None:
            refusals = (*refusals, Refusal(code, text))
    return refusals


# --- momentary -------------------------------------------------------------------------------------------------------


def _terminating(pod: Pod, usage: PodUsage | None, used: int | None, scene: RuleContext) -> str | None:  # noqa: ARG001
    if pod.deletion_wall is None:
        return None
    return f"terminating already, {max(0.0, pod.deletion_wall - scene.wall_time):.0f}s of its grace left"


def _not_running(pod: Pod, usage: PodUsage | None, used: int | None, scene: RuleContext) -> str | None:  # noqa: ARG001
    return "no cgroup found: not started yet, already gone, or not readable" if usage is None else None


def _not_measured(pod: Pod, usage: PodUsage | None, used: int | None, scene: RuleContext) -> str | None:  # noqa: ARG001
    return f"its use of {scene.resource} is not known" if usage is not None and used is None else None


def _young(pod: Pod, usage: PodUsage | None, used: int | None, scene: RuleContext) -> str | None:  # noqa: ARG001
    minimum_s = scene.rules.minimum_age_s
    if scene.tier is Tier.HARD or minimum_s <= 0:
        # The pod that has just started is often the one that takes the node down; sparing it would cost an innocent.
        return None
    if usage is not None and usage.started_at is not None:
        age_s = scene.taken_at - usage.started_at
    elif (started := pod.started_wall if pod.started_wall is not None else pod.created_wall) is not None:
        age_s = scene.wall_time - started
    else:
        return f"its age is not known, at least {minimum_s:.0f}s are asked for"
    return None if age_s >= minimum_s else f"{age_s:.0f}s old, younger than {minimum_s:.0f}s"


def _disruption_budget(pod: Pod, usage: PodUsage | None, used: int | None, scene: RuleContext) -> str | None:  # noqa: ARG001
    if scene.tier is Tier.HARD or not scene.rules.disruption_budgets:
        return None
    for budget in pod.disruption_budgets:
        if not budget.disruptions_allowed > 0:
            return f"PodDisruptionBudget {budget.name} allows {budget.disruptions_allowed} disruptions"
    return None


def _wish(pod: Pod, usage: PodUsage | None, used: int | None, scene: RuleContext) -> str | None:  # noqa: ARG001
    if scene.tier is Tier.HARD or not trusted(pod, scene.rules):
        return None
    return f"asks for it: {WISH_ANNOTATION}=never" if pod.annotations.get(WISH_ANNOTATION) == "never" else None


_ALWAYS: Final = (
    MomentaryRule(RefusalCode.TERMINATING, _terminating),
    MomentaryRule(RefusalCode.NOT_RUNNING, _not_running),
    MomentaryRule(RefusalCode.USAGE_UNKNOWN, _not_measured),
)
"""Asked in every scene. They say nothing of a pod that is not terminating and whose usage is known, and but for
`terminating` they do not look at the time."""
MOMENTARY: Final = (
    *_ALWAYS,
    MomentaryRule(RefusalCode.TOO_YOUNG, _young),
    MomentaryRule(RefusalCode.DISRUPTION_BUDGET, _disruption_budget),
    MomentaryRule(RefusalCode.EVICT_NEVER, _wish),
)

Asked = tuple[MomentaryRule, ...]
_OTHERS: Final[Asked] = MOMENTARY[len(_ALWAYS) :]


def applicable_rules(scene: RuleContext) -> Asked:
    """The rows of MOMENTARY, beside those asked in every scene, that could say anything in this one: so that 500 pods
    are not asked in vain."""
    soft = scene.tier is Tier.SOFT
    silent = {
        RefusalCode.TOO_YOUNG: not (soft and scene.rules.minimum_age_s > 0),
        RefusalCode.DISRUPTION_BUDGET: not (soft and scene.rules.disruption_budgets),
        RefusalCode.EVICT_NEVER: not (soft and scene.rules.trusted_namespaces),
    }
    return tuple([row for row in _OTHERS if not silent[row.code]])


def momentary(
    pod: Pod, usage: PodUsage | None, used: int | None, scene: RuleContext, rows: Asked = _OTHERS
) -> tuple[Refusal, ...]:
    """Every reason of this instant why `pod` is not to be evicted. `used` is its usage of the starved resource, `rows`
    the answer of `asked`."""
    refusals: tuple[Refusal, ...] = ()
    if used is None or pod.deletion_wall is not None:
        rows = (*_ALWAYS, *rows)
    for code, reason in rows:
        text = reason(pod, usage, used, scene)
        if text is not None:
            refusals = (*refusals, Refusal(code, text))
    return refusals


def eviction_preference(pod: Pod, rules: Rules, *, tier: Tier) -> float:
    """Where the pod asks to stand: -1 first, 0 no wish (or none that counts), 1 last."""
    if tier is Tier.HARD or not trusted(pod, rules):
        return 0.0
    return WISHES.get(pod.annotations.get(WISH_ANNOTATION, ""), 0.0)

"""Compute the eviction order of pods for one resource.

Promises:

1. The order is total and stable: it depends on the pods alone, never on the order in which they are listed. Ties are
   broken by namespace, name and UID.
2. Every key sorts ascending: the smallest value is evicted first. More usage never moves a pod back.
3. A pod of unknown usage is never first because of that: at the first key that needs usage it comes after every pod of
   known usage that is equal on the keys before.

Theory of operation. A key is a function from a `RankingInput` to a float, in one row of `KEYS`. `ranking.order` lists
names of rows. For PIDs the order begins with `projectedUsage`, because QoS or priority would put fifty other pods
before one fork bomb. While no disk usage is measured, the hard tier begins with `writeRate`. `order: kubelet` selects
the kubelet's keys for the resource (KUBELET-CONTRACT 5), with three differences where the kubelet's order is a quirk:

* a pod without stats is last in comparisons of usage, where the kubelet puts it first;
* inodes are compared with inodes, where the kubelet subtracts a request in bytes;
* imagefs of a split layout holds no pod's data: priority, then name, where the kubelet prefers the smallest request.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.config.schema import RankingConfig, RankingKey
from nodeagent.model import (
    SIGNAL_TABLE,
    DiskLayout,
    Plan,
    Pod,
    PodSource,
    PodView,
    QOSClass,
    RankedPod,
    RankKey,
    Signal,
    Unit,
    units,
)
from nodeagent.policy import pod_usage, usage_growth

SORTED_LAST: Final = float(2**63)
"""Sorts after every real value. Not infinity, which JSON cannot carry."""
DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"

EVICTION_PREFERENCE: Final = "evictionPreference"
PROJECTED_USAGE: Final = "projectedUsage"
WRITE_RATE: Final = "writeRate"


class RankingInput(NamedTuple):
    """One pod with everything that a key reads."""

    view: PodView
    pod: Pod
    usage: int | None
    request: int | None
    eviction_preference: float
    growth: float
    """Units per second; 0 without an earlier sample."""
    only_replica: bool
    """No other pod of its owner runs on this node."""
    wall_time: float


# --- the keys: for each the value, and its text for people -----------------------------------------------------------


_QOS_VALUE: Final = {QOSClass.BEST_EFFORT: 0.0, QOSClass.BURSTABLE: 1.0, QOSClass.GUARANTEED: 2.0}


def _qos(ranked: RankingInput) -> float:
    return _QOS_VALUE[ranked.pod.qos_class]


def _qos_text(_value: float, pod: RankedPod, _unit: Unit) -> str:
    return pod.view.pod.qos_class.value


def _exceeds_request(ranked: RankingInput) -> float:
    if ranked.usage is None:
        return 2.0
    return 0.0 if ranked.usage > (ranked.request or 0) else 1.0


def _exceeds_request_text(value: float, pod: RankedPod, unit: Unit) -> str:
    if value == 2.0:
        return "usage unknown"
    if pod.request is None:
        return "request unknown" if value == 0.0 else "request unknown, no usage"
    return f"{'over' if value == 0.0 else 'within'} its request of {units.format_amount(pod.request, unit)}"


def _priority(ranked: RankingInput) -> float:
    priority = ranked.pod.priority
    return float(priority) if type(priority) is int else 0.0


def _priority_text(value: float, pod: RankedPod, _unit: Unit) -> str:
    # A priority that only the API server has is ranked as 0, but it is not reported as 0.
    known = pod.view.pod.priority is not None or pod.view.pod.source is PodSource.API
    return f"priority {value:.0f}" if known else "priority unknown"


def _usage_over_request(ranked: RankingInput) -> float:
    return SORTED_LAST if ranked.usage is None else float((ranked.request or 0) - ranked.usage)


def _usage_over_request_text(value: float, pod: RankedPod, unit: Unit) -> str:
    amount = units.format_amount(int(abs(value)), unit)
    if pod.request is None:
        return f"uses {amount}{_swap_text(pod)}"
    return f"uses {amount} {'over' if value <= 0 else 'less than'} its request{_swap_text(pod)}"


def _swap_text(pod: RankedPod) -> str:
    return f", {units.format_amount(pod.swap)} of its usage in swap" if pod.swap else ""


def _usage(ranked: RankingInput) -> float:
    return SORTED_LAST if ranked.usage is None else float(-ranked.usage)


def _usage_text(value: float, pod: RankedPod, unit: Unit) -> str:
    return f"uses {units.format_amount(int(-value), unit)}{_swap_text(pod)}"


def _growth(ranked: RankingInput) -> float:
    return SORTED_LAST if ranked.usage is None else 0.0 - ranked.growth


def _growth_text(value: float, _pod: RankedPod, unit: Unit) -> str:
    return f"grows by {units.format_amount(int(-value), unit)} a second"


def _projected_usage(ranked: RankingInput) -> float:
    if ranked.usage is None:
        return SORTED_LAST
    return -(ranked.usage + max(0.0, ranked.growth) * usage_growth.PROJECTION_S)


def _projected_usage_text(value: float, _pod: RankedPod, unit: Unit) -> str:
    return f"{units.format_amount(int(-value), unit)} in {usage_growth.PROJECTION_S:.0f}s at its growth or fork rate"


def _write_rate(ranked: RankingInput) -> float:
    writing = ranked.view.usage.writing if ranked.view.usage is not None else None
    # `usage` is what it wrote.
    return SORTED_LAST if writing is None or ranked.usage is None else 0.0 - writing.bytes_per_s


def _write_rate_text(value: float, _pod: RankedPod, _unit: Unit) -> str:
    return f"writes {units.format_amount(int(-value))} a second; disk usage not measured yet"


def _pod_deletion_cost(ranked: RankingInput) -> float:
    text = ranked.pod.annotations.get(DELETION_COST, "0")
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 10:
        return 0.0  # as the ReplicaSet controller does with an invalid cost
    return float(text)


def _pod_deletion_cost_text(value: float, _pod: RankedPod, _unit: Unit) -> str:
    return f"deletion cost {value:.0f}"


def _age(ranked: RankingInput) -> float:
    started = ranked.pod.started_wall if ranked.pod.started_wall is not None else ranked.pod.created_wall
    age_s = ranked.wall_time - started if started is not None else SORTED_LAST
    return age_s if 0.0 <= age_s < SORTED_LAST else SORTED_LAST  # a start in the future, or NaN, is unknown


def _age_text(value: float, _pod: RankedPod, _unit: Unit) -> str:
    return f"started {value:.0f}s ago"


def _duplicate_on_node(ranked: RankingInput) -> float:
    return 1.0 if ranked.only_replica else 0.0


def _duplicate_on_node_text(value: float, _pod: RankedPod, _unit: Unit) -> str:
    return "another replica on this node" if value == 0.0 else "only replica on this node"


def _restart_count(ranked: RankingInput) -> float:
    return 0.0 - sum(container.restart_count for container in ranked.pod.containers)


def _restart_count_text(value: float, _pod: RankedPod, _unit: Unit) -> str:
    return f"{abs(value):.0f} restarts"


def _eviction_preference(ranked: RankingInput) -> float:
    return ranked.eviction_preference


def _eviction_preference_text(value: float, _pod: RankedPod, _unit: Unit) -> str:
    return ("prefers eviction", "no preference", "avoids eviction")[int(value) + 1]


class KeyFunctions(NamedTuple):
    """One row of `KEYS`."""

    value: Callable[[RankingInput], float]
    """The smallest is evicted first."""
    text: Callable[[float, RankedPod, Unit], str]
    """The value for people."""
    unknown: str = "usage unknown"
    """The text of the value `SORTED_LAST`."""


KEYS: Final[Mapping[str, KeyFunctions]] = {
    # name                          value and text                                          evicted first
    RankingKey.QOS: KeyFunctions(_qos, _qos_text),  #                                       BestEffort
    RankingKey.EXCEEDS_REQUEST: KeyFunctions(_exceeds_request, _exceeds_request_text),  #   over its request
    RankingKey.PRIORITY: KeyFunctions(_priority, _priority_text),  #                        lowest priority
    RankingKey.USAGE_OVER_REQUEST: KeyFunctions(_usage_over_request, _usage_over_request_text),  # most over it
    RankingKey.USAGE: KeyFunctions(_usage, _usage_text),  #                                 most usage
    RankingKey.GROWTH: KeyFunctions(_growth, _growth_text),  #                              fastest growth
    RankingKey.POD_DELETION_COST: KeyFunctions(_pod_deletion_cost, _pod_deletion_cost_text),  # cheapest deletion
    RankingKey.AGE: KeyFunctions(_age, _age_text, "age unknown"),  #                        youngest
    RankingKey.DUPLICATE_ON_NODE: KeyFunctions(_duplicate_on_node, _duplicate_on_node_text),  # has a second replica
    RankingKey.RESTART_COUNT: KeyFunctions(_restart_count, _restart_count_text),  #         most restarts
    # Not configurable: `order_for` and `candidates.rank_pods` put these first.
    EVICTION_PREFERENCE: KeyFunctions(_eviction_preference, _eviction_preference_text),  #  `prefer`
    PROJECTED_USAGE: KeyFunctions(_projected_usage, _projected_usage_text),  #              most PIDs in 10 s
    WRITE_RATE: KeyFunctions(_write_rate, _write_rate_text, "write rate unknown"),  #       fastest writer
}
"""All keys, by the name that `ranking.order` and reports use."""


# --- the order -------------------------------------------------------------------------------------------------------


class SortKey(NamedTuple):
    """The place of a pod in the order: pods are sorted by it, ascending."""

    values: tuple[float, ...]
    """Of each key in the order."""
    namespace: str
    name: str
    uid: str


def order_for(ranking: RankingConfig, signal: Signal, layout: DiskLayout, *, preferences: bool) -> tuple[str, ...]:
    """Names of the keys for one resource, most significant first. `preferences`: the pods' own preferences count."""
    if ranking.kubelet:
        if signal is Signal.PID:
            return (RankingKey.PRIORITY, RankingKey.USAGE)
        if pod_usage.holds_no_pod_data(signal, layout):
            return (RankingKey.PRIORITY,)
        return (RankingKey.EXCEEDS_REQUEST, RankingKey.PRIORITY, RankingKey.USAGE_OVER_REQUEST)
    order: tuple[str, ...] = tuple(ranking.order)
    if signal is Signal.PID:
        order = (PROJECTED_USAGE, *order)
    return (EVICTION_PREFERENCE, *order) if preferences else order


def sort_keys(inputs: Iterable[RankingInput], order: Sequence[str]) -> list[SortKey]:
    """The place of each pod by the keys in `order`."""
    functions = [KEYS[name].value for name in order]
    return [
        SortKey(
            tuple([function(each) for function in functions]),
            each.pod.namespace or "",
            each.pod.name or "",
            each.pod.uid,
        )
        for each in inputs
    ]


def count_replicas(pods: Iterable[PodView]) -> Mapping[str, int]:
    """The number of running pods of each owner on this node, by the owner's UID."""
    counts: dict[str, int] = {}
    for view in pods:
        pod = view.pod
        if pod.owner is not None and view.usage is not None and pod.deletion_wall is None and not pod.finished:
            counts[pod.owner.uid] = counts.get(pod.owner.uid, 0) + 1
    return counts


# --- texts -----------------------------------------------------------------------------------------------------------


def with_key_texts(plan: Plan) -> Plan:
    """The plan with `RankedPod.keys` filled: every key by name, with its value and its text."""
    unit = SIGNAL_TABLE[plan.ranked_for].unit
    return plan._replace(
        ranking=tuple([pod._replace(keys=rank_keys(pod, plan.rank_order, unit=unit)) for pod in plan.ranking])
    )


def rank_keys(pod: RankedPod, order: Sequence[str], *, unit: Unit) -> tuple[RankKey, ...]:
    """The keys of the order with the pod's values and their texts."""
    return tuple(
        [RankKey(name, value, _key_text(name, value, pod, unit)) for name, value in zip(order, pod.values, strict=True)]
    )


def _key_text(name: str, value: float, pod: RankedPod, unit: Unit) -> str:
    return KEYS[name].unknown if value == SORTED_LAST else KEYS[name].text(value, pod, unit)

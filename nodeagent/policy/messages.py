"""Write the messages of evictions and conditions.

An eviction that a kubelet also makes has the kubelet's message, byte for byte, because tools match on it; it ends in a
full stop and a space. A condition has the agent's own reason and message.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.config import above_kubelet
from nodeagent.model import (
    SIGNAL_TABLE,
    Amount,
    ConditionStatus,
    ConditionType,
    ContainerUsage,
    MemoryFigures,
    Observation,
    Pod,
    PodView,
    RefusalCode,
    Signal,
    SignalVerdict,
    ThresholdVerdict,
    Unit,
    units,
)
from nodeagent.policy import memory_shortage, requests


class EvictionText(NamedTuple):
    """The texts of one eviction."""

    message: str
    annotations: Mapping[str, str]
    """Of the pod's event; empty if the pod's usage is unknown."""


# --- evictions -------------------------------------------------------------------------------------------------------


def eviction_text(
    view: PodView,
    *,
    verdict: ThresholdVerdict,
    observation: Observation,
    swap: int = 0,
    figures: MemoryFigures | None = None,
) -> EvictionText:
    """The kubelet's message and event annotations for evicting this pod for this threshold.

    `verdict` is the threshold acted on, `observation` the sample it was judged by. For memory and ephemeral storage the
    message lists the containers above their request, in the order of the usage. What the pod has in `swap`, which the
    kubelet does not count, is appended, and so are both `figures` of a threshold that uses both.
    """
    signal = verdict.threshold.signal
    resource = SIGNAL_TABLE[signal].resource
    message = f"The node was low on resource: {resource}. "
    if verdict.value is not None and observation.available is not None:
        threshold = threshold_quantity(verdict.threshold.value, value=verdict.value)
        message += f"Threshold quantity: {threshold}, available: {available_quantity(observation)}. "
    both = ""
    if figures is not None and memory_shortage.uses_both(verdict.threshold):
        both = f"Measured: {memory_shortage.figures_text(signal, figures)}. "
    usage = view.usage
    if usage is None:
        return EvictionText(message + both, {})
    annotations: dict[str, str] = {}
    pod_request = _pod_memory_request(view.pod, signal)
    if pod_request is not None and usage.memory_working_set is not None:
        used = units.format_quantity(usage.memory_working_set)
        message += _larger_consumption(f"Pod {view.pod.name}", used, pod_request, resource)
        annotations |= {"offending_pod": view.pod.name or "", "offending_pod_usage": used}
    over_request: list[tuple[str, str]] = []
    for name, used_units, request in _over_request(view, signal):
        used = units.format_quantity(used_units)
        message += _larger_consumption(f"Container {name}", used, request, resource)
        over_request.append((name, used))
    if swap:
        message += f"Pod {view.pod.name} has {units.format_quantity(swap)} of its usage in swap. "
    annotations |= {
        "offending_containers": ",".join(name for name, _ in over_request),
        "offending_containers_usage": ",".join(used for _, used in over_request),
        "starved_resource": resource,
    }
    return EvictionText(message + both, annotations)


def empty_dir_over_limit(volume: str, *, limit: int) -> str:
    return f'Usage of EmptyDir volume "{volume}" exceeds the limit "{units.format_spec_quantity(limit)}". '


def pod_over_storage_limit(*, limit: int) -> str:
    return (
        f"Pod ephemeral local storage usage exceeds the total limit of containers {units.format_spec_quantity(limit)}. "
    )


def container_over_storage_limit(container: str, *, limit: int) -> str:
    return f'Container {container} exceeded its local ephemeral storage limit "{units.format_spec_quantity(limit)}". '


def _larger_consumption(subject: str, used: str, request: int | None, resource: str) -> str:
    requested = units.format_spec_quantity(request or 0)
    return f"{subject} was using {used}, request is {requested}, has larger consumption of {resource}. "


def _pod_memory_request(pod: Pod, signal: Signal) -> int | None:
    """The pod's own memory request; for other resources the kubelet's message has no line for the pod."""
    if SIGNAL_TABLE[signal].resource != "memory" or pod.pod_requests is None:
        return None
    return pod.pod_requests.memory


def _over_request(view: PodView, signal: Signal) -> Iterable[tuple[str, int, int | None]]:
    """(name, usage, request) of each container of the spec that uses more than its own request."""
    if view.usage is None or SIGNAL_TABLE[signal].unit is not Unit.BYTES:
        return
    by_name = {container.name: container for container in view.pod.containers}
    by_id = {container.container_id: container for container in view.pod.containers if container.container_id}
    for each in view.usage.containers:
        container = by_name.get(each.name) if each.name is not None else by_id.get(each.container_id)
        used = _container_usage(each, signal)
        if container is None or used is None:
            continue
        request = requests.container_request(container, signal=signal)
        if used > (request or 0):
            yield container.name, used, request


def _container_usage(usage: ContainerUsage, signal: Signal) -> int | None:
    """The memory working set, or writable layer plus logs; None if a part is unknown."""
    if SIGNAL_TABLE[signal].resource == "memory":
        return usage.memory_working_set
    if usage.disk.rootfs_bytes is None or usage.disk.logs_bytes is None:
        return None
    return usage.disk.rootfs_bytes + usage.disk.logs_bytes


# --- quantities as the kubelet writes them ---------------------------------------------------------------------------


def threshold_quantity(configured: Amount, *, value: int) -> str:
    """The threshold in the kubelet's form: a quantity in the format of the configuration, a percentage as the computed
    amount, which the kubelet always formats as bytes."""
    text = configured.text.strip()
    if configured.quantity is None:
        return units.format_quantity(value)
    if text.endswith("i"):
        return units.format_quantity(value)
    if _has_exponent(text):
        mantissa, unit = units.factored(value, 1000)
        return f"{mantissa}e{3 * unit}" if unit else str(mantissa)
    return (_milli(text) if value == configured.quantity else "") or units.format_quantity(value, binary=False)


def available_quantity(observation: Observation) -> str:
    """The available amount in the kubelet's form: bytes in binary units, counts in decimal ones."""
    assert observation.available is not None
    return units.format_quantity(observation.available, binary=SIGNAL_TABLE[observation.signal].unit is Unit.BYTES)


def _has_exponent(text: str) -> bool:
    """True for `1e3` and `1E3`; a bare `1E` is exa."""
    head, _, tail = text.replace("E", "e").partition("e")
    return bool(head) and tail.lstrip("+-").isdigit()


def _milli(text: str) -> str:
    """A decimal quantity in thousandths: `1500m` for 1.5. Empty for whole numbers and for finer fractions."""
    number, dot, fraction = text.partition(".")
    if not dot or not fraction.isdigit() or len(fraction) > 3 or not fraction.strip("0"):
        return ""
    return f"{int(number or '0') * 1000 + int(fraction.ljust(3, '0'))}m"


# --- conditions ------------------------------------------------------------------------------------------------------


CONDITION_REASONS: Final[Mapping[tuple[ConditionType, ConditionStatus], str]] = {
    (ConditionType.MEMORY_PRESSURE, ConditionStatus.TRUE): "NodeAgentHasInsufficientMemory",
    (ConditionType.MEMORY_PRESSURE, ConditionStatus.FALSE): "NodeAgentHasSufficientMemory",
    (ConditionType.MEMORY_PRESSURE, ConditionStatus.UNKNOWN): "NodeAgentCannotReadMemory",
    (ConditionType.DISK_PRESSURE, ConditionStatus.TRUE): "NodeAgentHasDiskPressure",
    (ConditionType.DISK_PRESSURE, ConditionStatus.FALSE): "NodeAgentHasNoDiskPressure",
    (ConditionType.DISK_PRESSURE, ConditionStatus.UNKNOWN): "NodeAgentCannotReadDisk",
    (ConditionType.PID_PRESSURE, ConditionStatus.TRUE): "NodeAgentHasInsufficientPID",
    (ConditionType.PID_PRESSURE, ConditionStatus.FALSE): "NodeAgentHasSufficientPID",
    (ConditionType.PID_PRESSURE, ConditionStatus.UNKNOWN): "NodeAgentCannotReadPID",
}
"""The prefix distinguishes them from the kubelet's reasons on the same Node."""


def condition_message(status: ConditionStatus, verdicts: Sequence[SignalVerdict]) -> str:
    """Why a condition has this status, with the numbers. `verdicts` are its signals that have thresholds."""
    if not verdicts:
        return "no threshold configured"
    if status is ConditionStatus.TRUE:
        return "; ".join(_met(verdict) for verdict in verdicts if any(each.met for each in verdict.thresholds))
    if status is ConditionStatus.UNKNOWN:
        return "; ".join(f"{each.signal.value} unknown: {each.observation.reason}" for each in verdicts)
    return "; ".join(_available(each) for each in verdicts if each.observation.available is not None)


def _met(verdict: SignalVerdict) -> str:
    """The most urgent threshold that is met: a hard one, else the highest."""
    met = [each for each in verdict.thresholds if each.met]
    worst = max(met, key=lambda each: (each.threshold.hard, each.value or 0))
    tier = "hard" if worst.threshold.hard else f"soft, {worst.threshold.grace_period_s:g}s"
    available = verdict.observation.available
    below = available is not None and (worst.value or 0) > available
    relation = "below" if below else "minimum reclaim not reached above"
    level = above_kubelet.describe_value(
        worst.threshold, capacity=verdict.observation.capacity, unit=SIGNAL_TABLE[verdict.signal].unit
    )
    cache = ": page cache only, evicts no pod" if worst.not_due_code is RefusalCode.PAGE_CACHE_ONLY else ""
    return f"{_available(verdict)}, {relation} {level} ({tier}){cache}"


def _available(verdict: SignalVerdict) -> str:
    available = verdict.observation.available
    if available is None:
        return f"{verdict.signal.value} unknown"
    amount = units.format_amount(available, SIGNAL_TABLE[verdict.signal].unit)
    if verdict.figures is None or not any(memory_shortage.uses_both(each.threshold) for each in verdict.thresholds):
        return f"{verdict.signal.value} is {amount}"
    return f"{verdict.signal.value} is {amount} ({memory_shortage.figures_text(verdict.signal, verdict.figures)})"

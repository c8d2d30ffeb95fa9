"""Compute a pod's QoS class from its spec, as the API server does (KUBELET-CONTRACT, QoS).

Call this only if `status.qosClass` is missing: the kubelet places the pod's cgroup by that field.
"""

from collections.abc import Iterable
from typing import Final

from nodeagent.model import NO_RESOURCES, Pod, PodSource, QOSClass, Resources


def qos_class(pod: Pod) -> QOSClass:
    """The QoS class by the pod's resources; for a pod that only the host shows, by its cgroup.

    Only CPU and memory above zero count. If the pod itself has resources, they decide alone; else regular, init and
    sidecar containers decide. Empty resources of the pod (`resources: {}`) count as none, so the containers decide; the
    kubelet calls such a pod BestEffort.
    """
    if pod.source is PodSource.HOST:
        return pod.qos_class
    pod_requests, pod_limits = pod.pod_requests or NO_RESOURCES, pod.pod_limits or NO_RESOURCES
    if pod_requests == NO_RESOURCES and pod_limits == NO_RESOURCES:
        parts = [(container.requests, container.limits) for container in pod.containers]
    else:
        parts = [(pod_requests, pod_limits)]
    return _classify(parts)


_NOTHING: Final = (0, 0)


def _classify(parts: list[tuple[Resources, Resources]]) -> QOSClass:
    """Only the sums are compared: one container may request less than its limit if another requests more."""
    requests, limits = _total(part[0] for part in parts), _total(part[1] for part in parts)
    if requests == _NOTHING and limits == _NOTHING:
        return QOSClass.BEST_EFFORT
    limited = all(all(_counted_amounts(part[1])) for part in parts)
    return QOSClass.GUARANTEED if limited and requests == limits else QOSClass.BURSTABLE


def _counted_amounts(resources: Resources) -> tuple[int, int]:
    return max(0, resources.cpu_milli or 0), max(0, resources.memory or 0)


def _total(resource_list: Iterable[Resources]) -> tuple[int, int]:
    counted = [_counted_amounts(resources) for resources in resource_list]
    return sum(cpu for cpu, _ in counted), sum(memory for _, memory in counted)

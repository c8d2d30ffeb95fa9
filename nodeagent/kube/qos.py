"""A pod's QoS class from its spec, as the API server reckons it (KUBELET-CONTRACT, QoS).

`status.qosClass` wins where it is set: the kubelet placed the pod's cgroup by it. Call this only where it is missing.
"""

from collections.abc import Iterable
from typing import Final

from nodeagent.model import NO_RESOURCES, Pod, PodSource, QOSClass, Resources


def qos_class(pod: Pod) -> QOSClass:
    """The QoS class that the pod's resources give it; of a pod known by the host alone, its cgroup's.

    Only CPU and memory above zero count. Where the pod itself has resources they decide alone; else regular and init
    containers do (sidecars included). Empty resources of the pod (`resources: {}`) say nothing and the containers
    decide, where the kubelet calls such a pod BestEffort.
    """
    if pod.source is PodSource.HOST:
        return pod.qos_class
    pod_requests, pod_limits = pod.pod_requests or NO_RESOURCES, pod.pod_limits or NO_RESOURCES
    if _empty(pod_requests) and _empty(pod_limits):
        parts = [(container.requests, container.limits) for container in pod.containers]
    else:
        parts = [(pod_requests, pod_limits)]
    return _classify(parts)


_NOTHING: Final = (0, 0)


def _classify(parts: list[tuple[Resources, Resources]]) -> QOSClass:
    """Only the sums are compared: one container may request less than its limit if another makes up for it."""
    requests, limits = _total(part[0] for part in parts), _total(part[1] for part in parts)
    if requests == _NOTHING and limits == _NOTHING:
        return QOSClass.BEST_EFFORT
    limited = all(all(_counted(part[1])) for part in parts)
    return QOSClass.GUARANTEED if limited and requests == limits else QOSClass.BURSTABLE


def _counted(resources: Resources) -> tuple[int, int]:
    return max(0, resources.cpu_milli or 0), max(0, resources.memory or 0)


def _total(each: Iterable[Resources]) -> tuple[int, int]:
    counted = [_counted(resources) for resources in each]
    return sum(cpu for cpu, _ in counted), sum(memory for _, memory in counted)


def _empty(resources: Resources) -> bool:
    return resources == NO_RESOURCES

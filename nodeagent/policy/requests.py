"""What a pod has asked for: effective requests and limits, and the request that ranking holds its usage against.

Two answers, because the kubelet has two (KUBELET-CONTRACT, effective requests and limits):

* `effective_requests` and `effective_limits` are the scheduler's: regular containers and sidecars together, or the
  highest peak of the init phase; an in-place resize counts at the larger of what is wanted, allocated and actual.
* `ranking_request` is eviction's: the same shape, but of what the kubelet has *allocated*, and overhead counts only
  beside a request.

Where the kubelet ignores all containers as soon as the pod itself has any resources, the pod's values here replace
the containers' only for the resources that the pod gives (docs/kubelet-differences.md).
"""

from collections.abc import Callable, Iterable
from typing import Final

from nodeagent.model import (
    NO_RESOURCES,
    SIGNAL_TABLE,
    Container,
    ContainerKind,
    Pod,
    PodSource,
    PodView,
    Resources,
    Signal,
    Unit,
)


def effective_requests(pod: Pod) -> Resources:
    """What the pod occupies on the node, overhead included. None in a field: nothing asks for that resource."""
    containers = _aggregate(pod.containers, lambda each: _resized_requests(each, infeasible=pod.resize_infeasible))
    return _add(_overridden(containers, pod.pod_requests), pod.overhead)


def effective_limits(pod: Pod) -> Resources:
    """What the pod may use at most, overhead included where there is a limit. Containers without a limit add nothing,
    so this caps a pod only if all its containers have one. None in a field: not limited."""
    containers = _aggregate(pod.containers, lambda each: _resized_limits(each, infeasible=pod.resize_infeasible))
    limits = _overridden(containers, pod.pod_limits)
    return _combine(limits, pod.overhead, lambda limit, more: limit + more if limit else limit)


def ranking_request(view: PodView, *, signal: Signal) -> int | None:
    """The request, in the signal's unit, that a pod's usage is held against when pods are ranked.

    0: the pod asks for nothing. None: the resource has no request (inodes, PIDs), or nobody told it: a pod known by
    the host alone has an estimate of its memory request, if that, and nothing about its disk.
    """
    facts = SIGNAL_TABLE[signal]
    if facts.unit is not Unit.BYTES:
        return None
    is_memory = facts.resource == "memory"
    if view.pod.source is PodSource.HOST:
        return view.usage.memory_request_estimate if is_memory and view.usage is not None else None
    requests = _overridden(_aggregate(view.pod.containers, allocated_requests), view.pod.pod_requests)
    request = (requests.memory if is_memory else requests.ephemeral_storage) or 0
    overhead = (view.pod.overhead.memory if is_memory else view.pod.overhead.ephemeral_storage) or 0
    return request + overhead if request else 0


def allocated_requests(container: Container) -> Resources:
    """What the kubelet has allocated to a container: its spec, except while a resize is under way."""
    return _overridden(container.requests, container.allocated)


# --- one container ---------------------------------------------------------------------------------------------------


def _resized_requests(container: Container, *, infeasible: bool) -> Resources:
    """max(spec, allocated, actual); without the spec when the node has refused the resize. An init container that
    runs to completion cannot be resized."""
    reported = [each for each in (container.allocated, container.actual) if each is not None]
    if container.kind is ContainerKind.INIT or not reported:
        return container.requests
    return _maximum(reported if infeasible else [container.requests, *reported])


def _resized_limits(container: Container, *, infeasible: bool) -> Resources:
    if container.kind is ContainerKind.INIT or container.actual_limits is None:
        return container.limits
    return container.actual_limits if infeasible else _maximum([container.limits, container.actual_limits])


# --- all of them -----------------------------------------------------------------------------------------------------


def _aggregate(containers: Iterable[Container], of: Callable[[Container], Resources]) -> Resources:
    """max(containers that run together, peak of the init phase), for each resource.

    Init containers start one after the other in the order of the spec, each beside the sidecars started before it;
    sidecars keep running beside the regular containers.
    """
    together = NO_RESOURCES
    sidecars = NO_RESOURCES
    peak = NO_RESOURCES
    for container in containers:
        own = of(container)
        if container.kind is ContainerKind.REGULAR:
            together = _add(together, own)
        elif container.kind is ContainerKind.SIDECAR:
            sidecars = _add(sidecars, own)
            peak = _maximum([peak, sidecars])
        else:
            peak = _maximum([peak, _add(own, sidecars)])
    return _maximum([_add(together, sidecars), peak])


_FIELDS: Final = ("cpu_milli", "memory", "ephemeral_storage")


def _combine(a: Resources, b: Resources, how: Callable[[int, int], int]) -> Resources:
    """Field by field; a resource that only one of the two has is passed through `how` with 0 for the other, unless
    the result would be 0 for a resource that `a` does not have."""
    values: list[int | None] = []
    for field in _FIELDS:
        left: int | None = getattr(a, field)
        right: int | None = getattr(b, field)
        if left is None and right is None:
            values.append(None)
        else:
            value = how(left or 0, right or 0)
            values.append(None if left is None and value == 0 else value)
    return Resources(values[0], values[1], values[2], a.others or b.others)


def _add(a: Resources, b: Resources) -> Resources:
    return _combine(a, b, lambda x, y: x + y)


def _maximum(each: Iterable[Resources]) -> Resources:
    result = NO_RESOURCES
    for resources in each:
        result = _combine(result, resources, max)
    return result


def _overridden(below: Resources, above: Resources | None) -> Resources:
    """`above` where it says something, else `below`."""
    if above is None:
        return below
    return Resources(
        below.cpu_milli if above.cpu_milli is None else above.cpu_milli,
        below.memory if above.memory is None else above.memory,
        below.ephemeral_storage if above.ephemeral_storage is None else above.ephemeral_storage,
        below.others or above.others,
    )

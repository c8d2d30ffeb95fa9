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

from nodeagent.model import SIGNAL_TABLE, Container, ContainerKind, Pod, PodSource, PodView, Resources, Signal, Unit


def effective_requests(pod: Pod) -> Resources:
    """What the pod occupies on the node, overhead included. None in a field: nothing asks for that resource."""

    def field(read: _Field) -> int | None:
        containers = _together(
            (each.kind, _resized_request(each, read, infeasible=pod.resize_infeasible)) for each in pod.containers
        )
        request = _first_known(_of_the_pod(pod.pod_requests, read), containers)
        overhead = read(pod.overhead)
        return request if overhead is None else (request or 0) + overhead

    return Resources(field(_cpu), field(_memory), field(_ephemeral_storage))


def effective_limits(pod: Pod) -> Resources:
    """What the pod may use at most, overhead included where there is a limit above 0. A container without a limit adds
    nothing, so this is a ceiling only where all of them have one. None in a field: no limit."""

    def field(read: _Field) -> int | None:
        containers = _together(
            (each.kind, _resized_limit(each, read, infeasible=pod.resize_infeasible)) for each in pod.containers
        )
        limit = _first_known(_of_the_pod(pod.pod_limits, read), containers)
        return limit + (read(pod.overhead) or 0) if limit else limit

    return Resources(field(_cpu), field(_memory), field(_ephemeral_storage))


def ranking_request(view: PodView, *, signal: Signal) -> int | None:
    """The request, in the signal's unit, that a pod's usage is held against when pods are ranked.

    0: the pod asks for nothing. None: the resource has no request (inodes, PIDs), or nobody told it: a pod known by
    the host alone has an estimate of its memory request, if that, and nothing about its disk.
    """
    facts = SIGNAL_TABLE[signal]
    if facts.unit is not Unit.BYTES:
        return None
    is_memory = facts.resource == "memory"
    pod = view.pod
    if pod.source is PodSource.HOST:
        return view.usage.memory_request_estimate if is_memory and view.usage is not None else None
    read = _memory if is_memory else _ephemeral_storage
    own = _of_the_pod(pod.pod_requests, read)
    if own is None:
        own = _together([(each.kind, allocated_request(each, read)) for each in pod.containers])
    return own + (read(pod.overhead) or 0) if own else 0


def container_request(container: Container, *, signal: Signal) -> int | None:
    """A container's own request for the signal's resource, as allocated. None: it has none, or no such thing exists."""
    facts = SIGNAL_TABLE[signal]
    if facts.unit is not Unit.BYTES:
        return None
    return allocated_request(container, _memory if facts.resource == "memory" else _ephemeral_storage)


_Field = Callable[[Resources], int | None]


def _cpu(resources: Resources) -> int | None:
    return resources.cpu_milli


def _memory(resources: Resources) -> int | None:
    return resources.memory


def _ephemeral_storage(resources: Resources) -> int | None:
    return resources.ephemeral_storage


def _of_the_pod(resources: Resources | None, read: _Field) -> int | None:
    """What the pod as a whole is given: CPU and memory. Disk is its containers' affair, whatever stands there."""
    return None if resources is None or read is _ephemeral_storage else read(resources)


# --- one container ---------------------------------------------------------------------------------------------------


def allocated_request(container: Container, read: _Field) -> int | None:
    """What the kubelet has allocated to a container: its spec, except while a resize is under way."""
    if container.allocated is not None:
        allocated = read(container.allocated)
        if allocated is not None:
            return allocated
    return read(container.requests)


def _resized_request(container: Container, read: _Field, *, infeasible: bool) -> int | None:
    """max(spec, allocated, actual); without the spec when the node has refused the resize. An init container that
    runs to completion cannot be resized."""
    reported = [each for each in (container.allocated, container.actual) if each is not None]
    if container.kind is ContainerKind.INIT or not reported:
        return read(container.requests)
    return _largest([*([] if infeasible else [read(container.requests)]), *(read(each) for each in reported)])


def _resized_limit(container: Container, read: _Field, *, infeasible: bool) -> int | None:
    if container.kind is ContainerKind.INIT or container.actual_limits is None:
        return read(container.limits)
    return _largest([*([] if infeasible else [read(container.limits)]), read(container.actual_limits)])


def _largest(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


def _first_known(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


# --- all of them -----------------------------------------------------------------------------------------------------


def _together(amounts: Iterable[tuple[ContainerKind, int | None]]) -> int | None:
    """max(what runs together, peak of the init phase); None when no container names an amount.

    Init containers start one after the other in the order of the spec, each beside the sidecars started before it;
    sidecars keep running beside the regular containers.
    """
    regular = sidecars = peak = 0
    known = False
    for kind, amount in amounts:
        if amount is None:
            continue
        known = True
        if kind is ContainerKind.REGULAR:
            regular += amount
        elif kind is ContainerKind.SIDECAR:
            sidecars += amount
        elif amount + sidecars > peak:
            peak = amount + sidecars
    return max(regular + sidecars, peak) if known else None

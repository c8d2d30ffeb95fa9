"""Compute the request that a pod's usage is compared with, and its ephemeral-storage limit.

As in the kubelet (KUBELET-CONTRACT, effective requests and limits), regular containers and sidecars count together, or
the highest peak of the init phase if that is more. The ranking request counts what the kubelet has allocated, and
overhead only beside a request; the limit of a resize counts at the larger of desired and actual.

The kubelet ignores all containers as soon as the pod itself has any resources. Here the pod's values replace the
containers' only for the resources that the pod has (docs/kubelet-differences.md).
"""

from collections.abc import Callable, Iterable

from nodeagent.model import SIGNAL_TABLE, Container, ContainerKind, Pod, PodSource, PodView, Resources, Signal, Unit

_Field = Callable[[Resources], int | None]


def _memory(resources: Resources) -> int | None:
    return resources.memory


def _ephemeral_storage(resources: Resources) -> int | None:
    return resources.ephemeral_storage


def _field_of(signal: Signal) -> _Field | None:
    """The requested resource of a signal; None for inodes and PIDs, which have no request."""
    facts = SIGNAL_TABLE[signal]
    if facts.unit is not Unit.BYTES:
        return None
    return _memory if facts.resource == "memory" else _ephemeral_storage


def ranking_request(view: PodView, *, signal: Signal) -> int | None:
    """The request, in the signal's unit, that the pod's usage is compared with in ranking.

    0: the pod requests nothing. None: the resource has no request (inodes, PIDs), or the request is unknown: a pod that
    only the host shows has at most an estimate of its memory request.
    """
    field = _field_of(signal)
    if field is None:
        return None
    pod = view.pod
    if pod.source is PodSource.HOST:
        return view.usage.memory_request_estimate if field is _memory and view.usage is not None else None
    request = None
    if field is _memory and pod.pod_requests is not None:  # pods have no ephemeral storage of their own
        request = pod.pod_requests.memory
    if request is None:
        request = _pod_total([(each.kind, _allocated_request(each, field)) for each in pod.containers])
    return request + (field(pod.overhead) or 0) if request else 0


def container_request(container: Container, *, signal: Signal) -> int | None:
    """A container's own allocated request for the signal's resource; None if it has none, or the resource has none."""
    field = _field_of(signal)
    return _allocated_request(container, field) if field is not None else None


def ephemeral_storage_limit(pod: Pod) -> int | None:
    """What the pod may use of ephemeral storage, overhead included where the limit is above 0; None without a limit.

    A container without a limit adds nothing, so this is an upper bound only if every container has one.
    """
    limits = [(each.kind, _storage_limit(each, infeasible=pod.resize_infeasible)) for each in pod.containers]
    limit = _pod_total(limits)
    return limit + (pod.overhead.ephemeral_storage or 0) if limit else limit


def _allocated_request(container: Container, field: _Field) -> int | None:
    """What the kubelet has allocated to a container: its spec, except during a resize. A pod whose owner asks for more
    memory than the node gives has what it had, which may be nothing. Ephemeral storage cannot be resized."""
    allocated = field(container.allocated) if container.allocated is not None else None
    if allocated is None and (container.allocated is None or field is not _memory):
        return field(container.requests)
    return allocated


def _storage_limit(container: Container, *, infeasible: bool) -> int | None:
    """max(spec, actual); without the spec if the node refused the resize. An init container cannot be resized."""
    desired = container.limits.ephemeral_storage
    if container.kind is ContainerKind.INIT or container.actual_limits is None:
        return desired
    actual = container.actual_limits.ephemeral_storage
    known = [limit for limit in (actual, None if infeasible else desired) if limit is not None]
    return max(known, default=None)


def _pod_total(amounts: Iterable[tuple[ContainerKind, int | None]]) -> int | None:
    """max(sum of what runs together, peak of the init phase); None if no container has an amount.

    Init containers run one after the other in the order of the spec, each beside the sidecars started before it;
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
        else:
            peak = max(peak, amount + sidecars)
    return max(regular + sidecars, peak) if known else None

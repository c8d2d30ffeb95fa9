"""A pod's usage is compared with its allocated request; its storage limit is the sum over its containers."""

from typing import Any

import pytest

from nodeagent.model import Container, ContainerKind, Pod, PodSource, PodUsage, PodView, QOSClass, Resources, Signal
from nodeagent.policy import requests

INIT, SIDECAR = ContainerKind.INIT, ContainerKind.SIDECAR


def memory(amount: int) -> Resources:
    return Resources(memory=amount)


def storage(amount: int | None) -> Resources:
    return Resources(ephemeral_storage=amount)


def regular(request: int, name: str = "c") -> Container:
    return Container(name, requests=memory(request))


def init(request: int, kind: ContainerKind = INIT, name: str = "i") -> Container:
    return Container(name, kind, memory(request))


def pod(*containers: Container, **more: Any) -> Pod:
    return Pod("u", "u", "ns", "p", PodSource.API, QOSClass.BURSTABLE, containers=containers)._replace(**more)


def ranked(made: Pod, signal: Signal = Signal.MEMORY) -> int | None:
    return requests.ranking_request(PodView(made, None), signal=signal)


# --- the shape of a pod -----------------------------------------------------------------------------------------------

SHAPES = [
    ((), None),
    ((regular(100), regular(50)), 150),
    ((regular(100), init(70)), 100),
    ((regular(100), init(120)), 120),
    ((regular(100), init(120), init(130)), 130),  # one after the other
    ((regular(100), init(30, SIDECAR)), 130),
    ((init(30, SIDECAR), init(120), regular(100)), 150),  # the init container runs beside the sidecar
    ((init(120), init(30, SIDECAR), regular(10)), 120),  # this one ran before it
    ((init(30, SIDECAR), init(40, SIDECAR), regular(10)), 80),
    ((init(100), init(30, SIDECAR), init(90), regular(10)), 120),  # smaller than the first, but beside the sidecar
]


@pytest.mark.parametrize(("containers", "expected"), SHAPES)
def test_the_request_is_what_runs_together_or_the_peak_of_the_init_phase(
    containers: tuple[Container, ...], expected: int | None
) -> None:
    assert ranked(pod(*containers)) == (expected or 0)
    limited = [each._replace(requests=Resources(), limits=storage(each.requests.memory)) for each in containers]
    assert requests.ephemeral_storage_limit(pod(*limited)) == expected


def test_each_resource_is_computed_separately() -> None:
    both = pod(
        Container("c", requests=Resources(cpu_milli=500, memory=10)),
        Container("i", INIT, Resources(cpu_milli=100, memory=90, ephemeral_storage=7)),
    )
    assert (ranked(both), ranked(both, Signal.NODEFS)) == (90, 7)


def test_overhead_is_added_to_a_limit_only_if_there_is_one() -> None:
    limited = pod(Container("c", limits=storage(100)), overhead=storage(8))
    assert requests.ephemeral_storage_limit(limited) == 108
    assert requests.ephemeral_storage_limit(pod(Container("c", limits=storage(0)), overhead=storage(8))) == 0
    assert requests.ephemeral_storage_limit(pod(Container("c"), overhead=storage(8))) is None


# --- a resize in progress ---------------------------------------------------------------------------------------------


def test_a_limit_in_a_resize_counts_at_the_larger_of_desired_and_actual() -> None:
    container = Container("c", limits=storage(300), actual_limits=storage(400))
    assert requests.ephemeral_storage_limit(pod(container)) == 400
    smaller = container._replace(actual_limits=storage(200))
    assert requests.ephemeral_storage_limit(pod(smaller)) == 300
    assert requests.ephemeral_storage_limit(pod(smaller, resize_infeasible=True)) == 200


def test_an_init_container_cannot_be_resized() -> None:
    resized = Container("i", INIT, limits=storage(100), actual_limits=storage(900))
    assert requests.ephemeral_storage_limit(pod(resized)) == 100


# --- the ranking request ----------------------------------------------------------------------------------------------


def test_ranking_uses_the_allocated_request() -> None:
    growing = Container("c", requests=memory(300), allocated=memory(100))
    shrinking = Container("d", requests=memory(50), allocated=memory(100))
    assert ranked(pod(growing, shrinking)) == 200


def test_a_resize_that_the_node_has_not_allocated_adds_no_request() -> None:
    asked = Container("c", requests=memory(300), allocated=Resources(10))
    assert ranked(pod(asked)) == 0
    stored = Container("c", requests=storage(300), allocated=Resources(10))
    assert ranked(pod(stored), Signal.NODEFS) == 300, "it cannot be resized"


def test_ranking_adds_overhead_only_to_a_request() -> None:
    assert ranked(pod(regular(100), overhead=memory(8))) == 108
    assert ranked(pod(regular(0), overhead=memory(8))) == 0
    assert ranked(pod(Container("c"), overhead=memory(8))) == 0


def test_init_peaks_count_for_the_whole_life_of_a_pod() -> None:
    assert ranked(pod(init(900), regular(10), phase="Running")) == 900


@pytest.mark.parametrize("signal", [Signal.NODEFS, Signal.IMAGEFS, Signal.CONTAINERFS])
def test_disk_bytes_are_compared_with_the_ephemeral_storage_request(signal: Signal) -> None:
    assert ranked(pod(Container("c", requests=Resources(memory=5, ephemeral_storage=70))), signal) == 70


@pytest.mark.parametrize("signal", [Signal.NODEFS_INODES, Signal.IMAGEFS_INODES, Signal.CONTAINERFS_INODES, Signal.PID])
def test_inodes_and_pids_have_no_request(signal: Signal) -> None:
    made = pod(Container("c", requests=Resources(memory=5, ephemeral_storage=70)))
    assert ranked(made, signal) is None
    assert requests.container_request(made.containers[0], signal=signal) is None


def test_ephemeral_storage_of_the_pod_itself_does_not_count() -> None:
    """KUBELET-CONTRACT 12: pod-level values are for CPU, memory and huge pages."""
    whole = pod(
        Container("c", requests=storage(5), limits=storage(7)), pod_requests=storage(1000), pod_limits=storage(1000)
    )
    assert ranked(whole, Signal.NODEFS) == 5
    assert requests.ephemeral_storage_limit(whole) == 7


def test_resources_of_the_pod_replace_its_containers_only_for_what_the_pod_has() -> None:
    made = pod(
        Container("c", requests=Resources(cpu_milli=5, memory=100, ephemeral_storage=70)),
        pod_requests=Resources(cpu_milli=500),
        pod_limits=Resources(cpu_milli=500),
    )
    assert ranked(made) == 100
    assert ranked(made, Signal.NODEFS) == 70
    assert ranked(made._replace(pod_requests=memory(300))) == 300


def test_a_pod_that_only_the_host_knows_has_the_estimate_of_its_request() -> None:
    host = pod(source=PodSource.HOST)
    usage = PodUsage("u", QOSClass.BURSTABLE, "/p", 0.0, memory_request_estimate=123)
    assert requests.ranking_request(PodView(host, usage), signal=Signal.MEMORY) == 123
    assert requests.ranking_request(PodView(host, usage), signal=Signal.NODEFS) is None
    assert requests.ranking_request(PodView(host, None), signal=Signal.MEMORY) is None

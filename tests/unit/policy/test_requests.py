from typing import Any

import pytest

from nodeagent.model import Container, ContainerKind, Pod, PodSource, PodUsage, PodView, QOSClass, Resources, Signal
from nodeagent.policy.requests import container_request, effective_limits, effective_requests, ranking_request

INIT, SIDECAR = ContainerKind.INIT, ContainerKind.SIDECAR


def memory(amount: int) -> Resources:
    return Resources(memory=amount)


def regular(request: int, name: str = "c") -> Container:
    return Container(name, requests=memory(request))


def init(request: int, kind: ContainerKind = INIT, name: str = "i") -> Container:
    return Container(name, kind, memory(request))


def pod(*containers: Container, **more: Any) -> Pod:
    return Pod("u", "u", "ns", "p", PodSource.API, QOSClass.BURSTABLE, containers=containers)._replace(**more)


def ranked(made: Pod, signal: Signal = Signal.MEMORY) -> int | None:
    return ranking_request(PodView(made, None), signal=signal)


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
    assert effective_requests(pod(*containers)).memory == expected
    assert ranked(pod(*containers)) == (expected or 0)
    swapped = [each._replace(requests=Resources(), limits=each.requests) for each in containers]
    assert effective_limits(pod(*swapped)).memory == expected


def test_each_resource_is_reckoned_by_itself() -> None:
    both = pod(
        Container("c", requests=Resources(cpu_milli=500, memory=10)),
        Container("i", INIT, Resources(cpu_milli=100, memory=90, ephemeral_storage=7)),
    )
    assert effective_requests(both) == Resources(cpu_milli=500, memory=90, ephemeral_storage=7)


def test_resources_of_the_pod_replace_those_of_its_containers_for_what_it_names() -> None:
    made = pod(
        Container("c", requests=Resources(cpu_milli=500, memory=10, ephemeral_storage=3), limits=memory(20)),
        pod_requests=memory(300),
        pod_limits=memory(400),
    )
    assert effective_requests(made) == Resources(cpu_milli=500, memory=300, ephemeral_storage=3)
    assert effective_limits(made) == memory(400)


def test_overhead_is_added_to_requests_always_and_to_limits_only_where_there_is_one() -> None:
    made = pod(
        Container("c", requests=memory(100), limits=Resources(cpu_milli=200)),
        overhead=Resources(cpu_milli=50, memory=8),
    )
    assert effective_requests(made) == Resources(cpu_milli=50, memory=108)
    assert effective_limits(made) == Resources(cpu_milli=250)
    zero = pod(Container("c", limits=memory(0)), overhead=memory(8))
    assert effective_limits(zero).memory == 0


# --- a resize under way -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "allocated", "actual", "infeasible", "expected"),
    [
        (100, None, None, False, 100),
        (100, 200, 150, False, 200),
        (300, 200, 150, False, 300),
        (300, 200, 250, True, 250),
        (300, None, None, True, 300),  # nothing is reported: the spec is all there is
        (None, 200, None, False, 200),
    ],
)
def test_a_resize_counts_at_the_larger_of_wanted_allocated_and_actual(
    spec: int | None, allocated: int | None, actual: int | None, infeasible: bool, expected: int
) -> None:
    container = Container(
        "c",
        requests=Resources(memory=spec),
        allocated=None if allocated is None else memory(allocated),
        actual=None if actual is None else memory(actual),
    )
    assert effective_requests(pod(container, resize_infeasible=infeasible)).memory == expected


def test_limits_of_a_resize_count_alike() -> None:
    container = Container("c", limits=memory(300), actual_limits=memory(400))
    assert effective_limits(pod(container)).memory == 400
    smaller = container._replace(actual_limits=memory(200))
    assert effective_limits(pod(smaller)).memory == 300
    assert effective_limits(pod(smaller, resize_infeasible=True)).memory == 200


def test_an_init_container_cannot_be_resized() -> None:
    assert effective_requests(pod(init(100)._replace(allocated=memory(900)))).memory == 100


# --- the ranking request ----------------------------------------------------------------------------------------------


def test_ranking_goes_by_what_is_allocated() -> None:
    growing = Container("c", requests=memory(300), allocated=memory(100), actual=memory(100))
    shrinking = Container("d", requests=memory(50), allocated=memory(100), actual=memory(100))
    assert ranked(pod(growing, shrinking)) == 200


def test_ranking_adds_overhead_only_to_a_request() -> None:
    assert ranked(pod(regular(100), overhead=memory(8))) == 108
    assert ranked(pod(regular(0), overhead=memory(8))) == 0
    assert ranked(pod(Container("c"), overhead=memory(8))) == 0


def test_init_peaks_count_for_the_whole_life_of_a_pod() -> None:
    assert ranked(pod(init(900), regular(10), phase="Running")) == 900


@pytest.mark.parametrize("signal", [Signal.NODEFS, Signal.IMAGEFS, Signal.CONTAINERFS])
def test_disk_bytes_are_held_against_the_ephemeral_storage_request(signal: Signal) -> None:
    assert ranked(pod(Container("c", requests=Resources(memory=5, ephemeral_storage=70))), signal) == 70


@pytest.mark.parametrize("signal", [Signal.NODEFS_INODES, Signal.IMAGEFS_INODES, Signal.CONTAINERFS_INODES, Signal.PID])
def test_inodes_and_pids_have_no_request(signal: Signal) -> None:
    made = pod(Container("c", requests=Resources(memory=5, ephemeral_storage=70)))
    assert ranked(made, signal) is None
    assert container_request(made.containers[0], signal=signal) is None


def test_the_disk_of_a_pod_is_its_containers_affair_whatever_the_pod_itself_is_given() -> None:
    """KUBELET-CONTRACT 12: pod-level values are for CPU, memory and huge pages."""
    each = Container("c", requests=Resources(ephemeral_storage=5), limits=Resources(ephemeral_storage=7))
    given = Resources(ephemeral_storage=1000)
    whole = pod(each, pod_requests=given, pod_limits=given)
    assert effective_requests(whole).ephemeral_storage == 5
    assert effective_limits(whole).ephemeral_storage == 7
    assert ranking_request(PodView(whole, None), signal=Signal.NODEFS) == 5


def test_resources_of_the_pod_hide_its_containers_only_for_what_it_names() -> None:
    made = pod(
        Container("c", requests=Resources(cpu_milli=5, memory=100, ephemeral_storage=70)),
        pod_requests=Resources(cpu_milli=500),
        pod_limits=Resources(cpu_milli=500),
    )
    assert ranked(made) == 100
    assert ranked(made, Signal.NODEFS) == 70
    assert ranked(made._replace(pod_requests=memory(300))) == 300


def test_a_pod_known_by_the_host_alone_has_the_estimate_of_its_request() -> None:
    host = pod(source=PodSource.HOST)
    usage = PodUsage("u", QOSClass.BURSTABLE, "/p", 0.0, memory_request_estimate=123)
    assert ranking_request(PodView(host, usage), signal=Signal.MEMORY) == 123
    assert ranking_request(PodView(host, usage), signal=Signal.NODEFS) is None
    assert ranking_request(PodView(host, None), signal=Signal.MEMORY) is None

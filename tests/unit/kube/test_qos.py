import json
from typing import Any

import pytest

from nodeagent.kube.qos import qos_class
from nodeagent.model import Container, ContainerKind, Pod, PodSource, QOSClass, Resources
from tests.support.paths import DATA

BEST_EFFORT, BURSTABLE, GUARANTEED = QOSClass.BEST_EFFORT, QOSClass.BURSTABLE, QOSClass.GUARANTEED
BOTH = Resources(cpu_milli=100, memory=1 << 20)
NOTHING = Resources()


def pod(*containers: Container, **more: Any) -> Pod:
    return Pod("u", "u", "ns", "p", PodSource.API, BEST_EFFORT, containers=containers)._replace(**more)


def one(requests: Resources = NOTHING, limits: Resources = NOTHING, name: str = "c") -> Container:
    return Container(name, requests=requests, limits=limits)


@pytest.mark.parametrize(
    ("containers", "expected"),
    [
        ((), BEST_EFFORT),
        ((one(),), BEST_EFFORT),
        ((one(BOTH, BOTH),), GUARANTEED),
        ((one(BOTH, BOTH), one(BOTH, BOTH, "d")), GUARANTEED),
        ((one(BOTH),), BURSTABLE),
        ((one(Resources(memory=1)),), BURSTABLE),
        ((one(Resources(memory=5), Resources(memory=5)),), BURSTABLE),  # no CPU limit
        ((one(BOTH, Resources(cpu_milli=100, memory=2 << 20)),), BURSTABLE),
        ((one(BOTH, BOTH), one(name="d")), BURSTABLE),
        # A limit without a request: the API server copies it, so this is an object it has not seen.
        ((one(NOTHING, BOTH),), BURSTABLE),
        # Zero is as good as not set.
        ((one(Resources(cpu_milli=0, memory=0), Resources(cpu_milli=0)),), BEST_EFFORT),
        ((one(BOTH, Resources(cpu_milli=100, memory=0)),), BURSTABLE),
        # Neither storage nor extended resources count.
        ((one(Resources(ephemeral_storage=1, others=True), Resources(ephemeral_storage=1, others=True)),), BEST_EFFORT),
        ((one(BOTH._replace(ephemeral_storage=1), BOTH),), GUARANTEED),
    ],
)
def test_the_class_follows_from_the_containers(containers: tuple[Container, ...], expected: QOSClass) -> None:
    assert qos_class(pod(*containers)) is expected


def test_only_the_sums_of_requests_and_limits_are_compared() -> None:
    less = Resources(cpu_milli=50, memory=1 << 20)
    more = Resources(cpu_milli=150, memory=1 << 20)
    assert qos_class(pod(one(less, BOTH), one(more, BOTH, "d"))) is GUARANTEED


@pytest.mark.parametrize("kind", [ContainerKind.INIT, ContainerKind.SIDECAR])
def test_init_containers_and_sidecars_count(kind: ContainerKind) -> None:
    assert qos_class(pod(one(BOTH, BOTH), Container("init", kind))) is BURSTABLE
    assert qos_class(pod(one(), Container("init", kind, BOTH, BOTH))) is BURSTABLE


def test_resources_of_the_pod_itself_decide_alone() -> None:
    assert qos_class(pod(one(), pod_requests=BOTH, pod_limits=BOTH)) is GUARANTEED
    assert qos_class(pod(one(BOTH, BOTH), pod_requests=Resources(memory=1), pod_limits=NOTHING)) is BURSTABLE
    assert qos_class(pod(one(), pod_requests=BOTH, pod_limits=Resources(memory=1 << 20))) is BURSTABLE


def test_empty_resources_of_the_pod_leave_the_decision_to_its_containers() -> None:
    assert qos_class(pod(one(BOTH, BOTH), pod_requests=NOTHING, pod_limits=NOTHING)) is GUARANTEED
    assert qos_class(pod(one(), pod_requests=NOTHING, pod_limits=NOTHING)) is BEST_EFFORT


def test_a_pod_known_by_the_host_alone_has_the_class_of_its_cgroup() -> None:
    assert qos_class(pod(source=PodSource.HOST, qos_class=GUARANTEED)) is GUARANTEED


def test_it_agrees_with_the_class_that_a_kubelet_reported() -> None:
    path = DATA / "policy" / "kubelet-evictions.json"
    for recorded in json.loads(path.read_text())["pods"]:
        (container,) = recorded["spec"]["containers"]
        assert container["resources"] == {}
        assert qos_class(pod(one())).value == recorded["status"]["qosClass"]

"""Resizes of pods in place against a real API server and kubelet: what `ownLimit.resize` sends and reads.

Needs a node on which a pod starts, and Kubernetes 1.33 or later.
"""

import threading
from collections.abc import Callable
from typing import Final

import pytest

from nodeagent.actuators.pod_resizes import PodResizer
from nodeagent.kube.pod_watch import list_pods
from nodeagent.model import Container, MemoryAmounts, Pod, ResizeOrder, ResizeOutcome, ResizeResult
from tests.e2e.cluster import Cluster, minor_of, server_minor

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MI: Final = 1 << 20
FIRST, MORE = MemoryAmounts(64 * MI), MemoryAmounts(96 * MI)
REQUEST: Final = 32 * MI
BEYOND_ANY_NODE: Final = MemoryAmounts(1 << 50, 1 << 50)
KUBELET_S: Final = 120.0
"""For what the kubelet makes of a resize; a second or a few on an idle node, twice its syncFrequency at most."""
TRIES: Final = 10


@pytest.fixture(scope="module")
def minor(cluster: Cluster) -> int:
    """The older minor version of the API server and the kubelet, which may be three behind."""
    server = server_minor(cluster)
    kubelet = cluster.node()["status"].get("nodeInfo", {}).get("kubeletVersion", "")
    found = min(server, minor_of(kubelet)) if kubelet else server
    if found < 33:
        pytest.skip(f"API server 1.{server}, kubelet {kubelet}: pods/resize is on by default from 1.33 on in both")
    return found


@pytest.fixture(scope="module")
def resized(cluster: Cluster, minor: int) -> str:
    """The name of a pod with a memory limit; `minor` skips the tests of an older server."""
    resources = {"requests": {"memory": str(REQUEST)}, "limits": {"memory": str(FIRST.limit)}}
    cluster.start_pod("resized", container={"resources": resources})
    return "resized"


def pod_named(cluster: Cluster, name: str) -> Pod:
    pods = list_pods(cluster.transport, cluster.node_name).pods
    return next(pod for pod in pods if (pod.namespace, pod.name) == (cluster.namespace, name))


def container_of(pod: Pod) -> Container:
    return next(each for each in pod.containers if each.name == "c")


def order(pod: Pod, to: MemoryAmounts, *, uid: str = "", version: str = "") -> ResizeOrder:
    before = MemoryAmounts(container_of(pod).limits.memory or 0)
    return ResizeOrder(
        uid or pod.uid,
        pod.namespace or "",
        pod.name or "",
        version or pod.resource_version,
        "c",
        sidecar=False,
        before=before,
        to=to,
        lowers=to.limit < before.limit,
        message="nodeagent end-to-end test",
    )


def send(cluster: Cluster, wanted: ResizeOrder) -> ResizeOutcome:
    answered = threading.Event()
    resizer = PodResizer(cluster.transport, wake=answered.set)
    resizer.submit("e2e", wanted)
    assert answered.wait(30)
    resizer.stop()
    [outcome] = resizer.take()
    return outcome


def answer(cluster: Cluster, name: str, to: MemoryAmounts) -> ResizeOutcome:
    """Resize until the pod was not changed between reading and writing it, as the policy does from sample to sample."""
    for _ in range(TRIES):
        outcome = send(cluster, order(pod_named(cluster, name), to))
        if outcome.http_status != 409:
            break
    return outcome


def resize(cluster: Cluster, name: str, to: MemoryAmounts) -> None:
    outcome = answer(cluster, name, to)
    assert outcome.result is ResizeResult.ACCEPTED, outcome


def reported(cluster: Cluster, name: str, holds: Callable[[Pod], object]) -> bool:
    return cluster.until(lambda: holds(pod_named(cluster, name)), timeout_s=KUBELET_S)


def has_limit(limit: int) -> Callable[[Pod], bool]:
    """The spec has it, and the kubelet reports it."""

    def holds(pod: Pod) -> bool:
        container = container_of(pod)
        actual = container.actual_limits
        return container.limits.memory == limit and actual is not None and actual.memory == limit

    return holds


def skip_if_infeasible(cluster: Cluster, name: str) -> None:
    """Skips where the kubelet resizes no such pod: one with swap, for example."""
    conditions = cluster.get(cluster.pod_path(name))["status"].get("conditions", ())
    for each in conditions:
        if each["type"] == "PodResizePending" and each.get("reason") == "Infeasible":
            pytest.skip(f"the kubelet resizes no such pod: {each.get('message')}")


def test_a_memory_limit_is_raised_and_restored_without_a_restart(cluster: Cluster, minor: int, resized: str) -> None:
    assert reported(cluster, resized, has_limit(FIRST.limit)), pod_named(cluster, resized)
    resize(cluster, resized, MORE)
    is_raised = has_limit(MORE.limit)
    assert reported(cluster, resized, lambda pod: is_raised(pod) or pod.resize_pending == "Infeasible")
    skip_if_infeasible(cluster, resized)
    assert reported(cluster, resized, is_raised), pod_named(cluster, resized)
    raised = pod_named(cluster, resized)
    assert container_of(raised).requests.memory == REQUEST
    assert container_of(raised).restart_count == 0
    if minor < 34:
        pytest.skip(f"Kubernetes 1.{minor} does not lower a memory limit")
    resize(cluster, resized, FIRST)
    assert reported(cluster, resized, has_limit(FIRST.limit)), pod_named(cluster, resized)
    assert container_of(pod_named(cluster, resized)).restart_count == 0


def test_a_resize_of_another_pod_or_an_older_version_is_refused(cluster: Cluster, resized: str) -> None:
    pod = pod_named(cluster, resized)
    other = send(cluster, order(pod, MORE, uid="00000000-0000-0000-0000-000000000000"))
    older = send(cluster, order(pod, MORE, version="1"))
    assert (other.result, older.result) == (ResizeResult.REFUSED, ResizeResult.REFUSED), (other, older)
    assert container_of(pod_named(cluster, resized)).limits.memory == container_of(pod).limits.memory


def test_a_pod_that_is_gone_is_gone(cluster: Cluster, resized: str) -> None:
    gone = order(pod_named(cluster, resized), MORE)._replace(name="no-such-pod")
    assert send(cluster, gone).result is ResizeResult.NOT_FOUND


def test_a_request_beyond_the_node_is_refused_or_infeasible_until_it_is_withdrawn(
    cluster: Cluster, minor: int, resized: str
) -> None:
    before = container_of(pod_named(cluster, resized)).limits.memory
    assert before is not None
    if server_minor(cluster) >= 36:
        outcome = answer(cluster, resized, BEYOND_ANY_NODE)
        assert (outcome.result, outcome.http_status) == (ResizeResult.REFUSED, 403), outcome
        assert "enough allocatable resources: memory" in outcome.message
        after = container_of(pod_named(cluster, resized))
        assert (after.limits.memory, after.requests.memory) == (before, REQUEST)
        return
    resize(cluster, resized, BEYOND_ANY_NODE)
    assert reported(cluster, resized, lambda pod: pod.resize_pending == "Infeasible"), pod_named(cluster, resized)
    if minor < 34:
        pytest.skip(f"Kubernetes 1.{minor} does not lower a memory limit")
    resize(cluster, resized, MemoryAmounts(before, REQUEST))
    assert reported(cluster, resized, lambda pod: not pod.resize_pending), pod_named(cluster, resized)
    assert container_of(pod_named(cluster, resized)).restart_count == 0

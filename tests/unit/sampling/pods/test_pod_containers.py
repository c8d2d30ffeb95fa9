"""Containers of a pod: the sandbox, the process counts and the request estimate."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import Container, NodeSnapshot, Pod, PodSource, PodUsage, PodView, QOSClass
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.pods.pod_containers import estimate_request
from nodeagent.sampling.sampler import Sampler
from tests.support.trees import GI, Node, TreeContainer, TreePod, container_id, pod_cgroup, write_node


def _sample(root: str) -> NodeSnapshot:
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
        return sampler.sample()


def _usage(view: PodView) -> PodUsage:
    assert view.usage is not None
    return view.usage


def _api_pod(tree: TreePod, uid: str = "") -> Pod:
    namespace, name = tree.key.split("/")
    return Pod(uid or tree.cgroup_uid, tree.cgroup_uid, namespace, name, PodSource.API, tree.qos)


def test_a_sandbox_is_recognized_by_its_score_without_log_links(tmp_path: Path) -> None:
    pod = TreePod("a/b", containers=(TreeContainer("x", 2),), logs=False)
    usage = _usage(_sample(write_node(tmp_path, Node(pods=(pod,)))).pods[0])
    assert usage.process_count == 2
    assert [container.container_id for container in usage.containers] == [container_id(pod, TreeContainer("x"))]


def test_a_pod_with_only_its_sandbox_has_no_processes(tmp_path: Path) -> None:
    usage = _usage(_sample(write_node(tmp_path, Node(pods=(TreePod("a/b", containers=()),)))).pods[0])
    assert (usage.process_count, usage.containers) == (0, ())


def test_processes_of_cgroups_inside_a_container_count_as_its_own(tmp_path: Path) -> None:
    pod, node = TreePod("a/b"), Node()
    root = write_node(tmp_path, node._replace(pods=(pod,)))
    scope = f"cri-containerd-{container_id(pod, TreeContainer())}.scope"
    inner = tmp_path / f"sys/fs/cgroup{pod_cgroup(node, pod)}/{scope}/init.scope/deeper"
    inner.mkdir(parents=True)
    (inner.parent / "cgroup.procs").write_text("5001\n5002\n")
    (inner / "cgroup.procs").write_text("5003\n")
    assert _usage(_sample(root).pods[0]).process_count == 4


def test_processes_that_v2_lists_as_zero_are_counted_too(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node(pods=(TreePod("a/b", containers=(TreeContainer("c", 3),)),)))
    for procs in (tmp_path / "sys/fs/cgroup").rglob("cgroup.procs"):
        procs.write_text("0\n" * len(procs.read_text().split()))
    usage = _usage(_sample(root).pods[0])
    assert usage.process_count == 3
    assert usage.memory_request_estimate is None


def _running(tree: TreePod) -> Pod:
    containers = tuple(Container(each.name, container_id=container_id(tree, each)) for each in tree.containers)
    return _api_pod(tree)._replace(containers=containers)


def test_a_container_that_the_api_server_does_not_list_yet_is_not_taken_for_the_sandbox(tmp_path: Path) -> None:
    """A runtime without sandboxes has just made the second container again; it has no name yet."""
    old, new = TreeContainer("old"), TreeContainer("new", processes=4)
    pod = TreePod("a/pod", containers=(TreeContainer("x"), new), sandbox=False, logs=False)
    known = _running(pod._replace(containers=(TreeContainer("x"), old)))
    with Sampler(open_host(write_node(tmp_path, Node(pods=(pod,)))), SamplingConfig(), node_name="n") as sampler:
        [view] = sampler.sample([known]).pods
    assert _usage(view).process_count == 5


@pytest.mark.parametrize("capacity", [2 * GI, 64 * GI])
@given(requests=st.lists(st.integers(0, 1000), min_size=1, max_size=4))
def test_an_estimate_inverts_the_kubelets_formula_to_a_thousandth(capacity: int, requests: list[int]) -> None:
    amounts = [capacity * permille // 1000 for permille in requests]
    scores = [min(999, max(3, 1000 - 1000 * amount // capacity)) for amount in amounts]
    estimate = estimate_request(QOSClass.BURSTABLE, scores, None, capacity)
    assert estimate is not None
    # The clamp to 3..999 costs up to three thousandths more.
    assert abs(estimate - sum(amounts)) <= capacity * 3 // 1000 * len(requests) + len(requests)


@pytest.mark.parametrize("score", [None, -997, -1000, 0, 2, 1000])
def test_a_score_outside_the_burstable_range_makes_the_estimate_unknown(score: int | None) -> None:
    assert estimate_request(QOSClass.BURSTABLE, [983, score], None, GI) is None


def test_without_a_score_or_a_limit_the_request_is_unknown() -> None:
    assert estimate_request(QOSClass.BURSTABLE, [], None, GI) is None
    assert estimate_request(QOSClass.BURSTABLE, [983], None, None) is None
    assert estimate_request(QOSClass.GUARANTEED, [-997], None, GI) is None

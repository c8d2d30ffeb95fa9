"""The recheck reads the node as it is now, with the requested pods alone."""

from pathlib import Path

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import NodeSnapshot, Pod, PodSource, QOSClass, Signal
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.sampler import Sampler
from nodeagent.sampling.snapshot import SnapshotParts, assemble_snapshot
from tests.support.trees import GI, MI, Node, TreePod, write_node

A, B = TreePod("default/a", working_set=100 * MI), TreePod("default/b", working_set=200 * MI)


def _api(pod: TreePod) -> Pod:
    namespace, name = pod.key.split("/")
    return Pod(pod.cgroup_uid, pod.cgroup_uid, namespace, name, PodSource.API, QOSClass.BURSTABLE)


def _again(
    sampler: Sampler, before: NodeSnapshot, pods: list[Pod], synced_at: float, *, pod_uids: frozenset[str], disks: bool
) -> NodeSnapshot:
    """As a recheck does."""
    reading = sampler.read_again(before.pods, pods, pod_uids=pod_uids)
    return assemble_snapshot(SnapshotParts(sampler.sample_node(disks=disks), reading, pods_synced_at=synced_at))


def test_a_recheck_has_new_signals_and_only_the_requested_pods(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node(pods=(A, B)))
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
        before = sampler.sample([_api(A), _api(B)], 1.0)
        (tmp_path / "proc/loadavg").write_text("0 0 0 1/7777 1\n")
        again = _again(sampler, before, [_api(A), _api(B)], 2.0, pod_uids=frozenset({B.cgroup_uid}), disks=True)
    assert [view.pod.name for view in again.pods] == ["b"]
    assert again.pods[0].usage is not None
    assert again.pods[0].usage.memory_working_set == 200 * MI
    assert again.pods_synced_at == 2.0
    pids = again.observations[Signal.PID]
    assert pids.available is not None
    assert pids.capacity is not None
    assert pids.capacity - pids.available == 7777


def test_memory_that_was_added_since_the_decision_is_in_the_recheck(tmp_path: Path) -> None:
    node = Node(memory_total=8 * GI, memory_available=100 * MI, allocatable_limit=7 * GI, pods=(A,))
    with Sampler(open_host(write_node(tmp_path, node)), SamplingConfig(), node_name="n") as sampler:
        before = sampler.sample([_api(A)], 1.0)
        more = node._replace(memory_total=9 * GI, memory_available=GI + 100 * MI, allocatable_limit=8 * GI)
        write_node(tmp_path, more)
        again = _again(sampler, before, [_api(A)], 1.0, pod_uids=frozenset({A.cgroup_uid}), disks=False)
    seen = again.observations
    assert (seen[Signal.MEMORY].available, seen[Signal.MEMORY].capacity) == (GI + 100 * MI, 9 * GI)
    assert seen[Signal.ALLOCATABLE_MEMORY].capacity == 8 * GI


def test_in_a_recheck_a_pod_without_a_cgroup_has_no_usage_and_an_unlisted_pod_is_left_out(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node(pods=(A, B)))
    both = frozenset({A.cgroup_uid, B.cgroup_uid})
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
        before = sampler.sample([_api(A), _api(B)], 1.0)
        write_node(tmp_path, Node(pods=(A,)))
        gone = _again(sampler, before, [_api(A), _api(B)], 1.0, pod_uids=both, disks=True)
        lost = _again(sampler, before, [_api(A)], 1.0, pod_uids=both, disks=True)
    assert {view.pod.name: view.usage is None for view in gone.pods} == {"a": False, "b": True}
    assert [view.pod.name for view in lost.pods] == ["a"]

"""The sampler: when it detects the layout of the host again, and how it combines its parts."""

import contextlib
import errno
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import DiskLayout, Pod, PodSource, PodUsage, PodView, Signal
from nodeagent.sampling.hostfs.host import FileSystem, Unreadable, open_host
from nodeagent.sampling.hostfs.statvfs_timeout import StatvfsWithTimeout
from nodeagent.sampling.sampler import Sampler
from nodeagent.sampling.snapshot import SnapshotParts, assemble_snapshot
from tests.support.trees import GI, MI, Node, TreePod, write_node


def _usage(view: PodView) -> PodUsage:
    assert view.usage is not None
    return view.usage


def _api_pod(tree: TreePod, uid: str = "") -> Pod:
    namespace, name = tree.key.split("/")
    return Pod(uid or tree.cgroup_uid, tree.cgroup_uid, namespace, name, PodSource.API, tree.qos)


def test_the_newest_pods_of_the_api_server_are_joined_with_cached_readings(tmp_path: Path) -> None:
    pod = TreePod("a/pod")
    root, api = write_node(tmp_path, Node(pods=(pod,))), _api_pod(pod)
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
        sampler.sample([api], 1.0)
        [view] = sampler.sample([api._replace(priority=7)], 2.0, fresh=False).pods
        assert view.pod.priority == 7
        assert view.usage is not None


def test_a_sample_uses_the_node_reading_that_it_is_given(tmp_path: Path) -> None:
    root, now = write_node(tmp_path, Node(memory_available=GI, pods=(TreePod("a/pod"),))), 100.0
    with Sampler(open_host(root), SamplingConfig(), node_name="n", boottime=lambda: now) as sampler:
        node = sampler.sample_node()
        now = 101.0
        snapshot = sampler.sample(node=node)
        assert (snapshot.taken_at, snapshot.observations) == (100.0, node.observations)
        assert len(snapshot.pods) == 1


def test_the_node_can_be_read_after_its_pods(tmp_path: Path) -> None:
    pod, now = TreePod("a/pod", working_set=300 * MI), 100.0
    root = write_node(tmp_path, Node(memory_available=GI, pods=(pod,)))
    with Sampler(open_host(root), SamplingConfig(), node_name="n", boottime=lambda: now) as sampler:
        node = sampler.sample_node()
        parts = SnapshotParts(node, sampler.read_pods(node))
        snapshot, now = assemble_snapshot(parts), 101.0
        write_node(tmp_path, Node(memory_available=GI + 300 * MI, pods=(pod._replace(working_set=0),)))
        after = assemble_snapshot(parts._replace(node=sampler.sample_node()))
        memory = [each.observations[Signal.MEMORY] for each in (snapshot, after)]
        assert [each.read_at for each in memory] == [100.0, 101.0]
        assert (memory[1].available or 0) - (memory[0].available or 0) == 300 * MI
        assert (after.mem_available.available or 0) - (snapshot.mem_available.available or 0) == 300 * MI
        assert (after.taken_at, after.pods) == (101.0, snapshot.pods)


def test_a_removed_kubepods_is_a_note_and_is_found_again_a_second_after_its_return(tmp_path: Path) -> None:
    node = Node(pods=(TreePod("a/b"),))
    root = write_node(tmp_path, node)
    now = 100.0
    with Sampler(open_host(root), SamplingConfig(), node_name="n", boottime=lambda: now) as sampler:
        assert len(sampler.sample().pods) == 1
        shutil.rmtree(tmp_path / "sys/fs/cgroup/kubepods.slice")
        gone = sampler.sample()
        assert gone.pods == ()
        assert any(note.subject == "pods" for note in gone.notes)
        sampler.sample()
        write_node(tmp_path, node)
        now += 1.0
        assert len(sampler.sample().pods) == 1


@contextlib.contextmanager
def without_descriptors() -> Iterator[None]:
    """The kernel opens nothing more for this process; what is open can be read."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("after_s", [0.02, 61.0])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_pods_that_cannot_be_listed_keep_their_readings_with_their_time(
    tmp_path: Path, version: str, after_s: float
) -> None:
    """A pod without a usage counts as gone, and nothing takes that back. `after_s`: also if the layout is due."""
    pods = (TreePod("a/one"), TreePod("a/two"))
    root = write_node(tmp_path, Node(cgroup=version, pods=pods))
    now, api = 100.0, [_api_pod(pod) for pod in pods]
    with Sampler(open_host(root), SamplingConfig(), node_name="n", boottime=lambda: now) as sampler:
        before = sampler.sample(api, 1.0)
        for _ in range(3):
            now += after_s
            with without_descriptors():
                failed = sampler.sample(api, 1.0)
            assert failed.pods == before.pods
            assert {_usage(view).read_at for view in failed.pods} == {100.0}
            [note] = [note.message for note in failed.notes if note.subject == "pods"]
            assert "cannot be listed" in note
            assert note.endswith("Too many open files")
        now += 1.0
        assert {_usage(view).read_at for view in sampler.sample(api, 1.0).pods} == {now}
        write_node(tmp_path, Node(cgroup=version, pods=pods[:1]))
        assert [view.usage is not None for view in sampler.sample(api, 1.0).pods] == [True, False]


def test_an_agent_that_starts_before_the_kubelet_lists_its_pods_a_second_after_they_started(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node(kubepods=False))
    now = 1000.0
    with Sampler(open_host(root), SamplingConfig(), node_name="n", boottime=lambda: now) as sampler:
        assert sampler.sample().pods == ()
        assert sampler.host_layout().kubepods is None
        write_node(tmp_path, Node(pods=(TreePod("default/late", working_set=100 * MI),)))
        now += 1.0
        [view] = sampler.sample().pods
    assert view.usage is not None
    assert view.usage.memory_working_set == 100 * MI


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_detection_of_the_same_layout_keeps_descriptors_and_readings(tmp_path: Path, version: str) -> None:
    root = write_node(tmp_path, Node(cgroup=version, pods=(TreePod("default/a"),)))
    now = 1000.0
    with Sampler(open_host(root), SamplingConfig(), node_name="n", boottime=lambda: now) as sampler:
        sampler.sample()
        layout = sampler.host_layout()
        now += 57.0
        before = sampler.sample()
        now += 4.0  # sooner than any pod is due
        after = sampler.sample(fresh=False)
        assert sampler.host_layout() == layout._replace(detected_at=now)
        assert after.pods[0].usage is before.pods[0].usage


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.ETIMEDOUT])
def test_a_detection_without_an_answer_keeps_the_known_file_systems(tmp_path: Path, error: int) -> None:
    host, answers, now = open_host(write_node(tmp_path, Node())), True, 1000.0

    def statvfs(path: str) -> FileSystem:
        if not answers:
            raise Unreadable(path, error, "no answer")
        return host.statvfs(path)

    with Sampler(host, SamplingConfig(), node_name="n", boottime=lambda: now, statvfs=statvfs) as sampler:
        before, notes = sampler.host_layout().layout, sampler.sample().notes
        answers, now = False, now + 60.0
        snapshot = sampler.sample()
        assert sampler.host_layout().layout is before
        assert (snapshot.layout, snapshot.notes) == (DiskLayout.SINGLE, notes)
        assert snapshot.observations[Signal.NODEFS].available is None


@pytest.mark.parametrize("error", [errno.ENOENT, errno.EIO])
def test_a_detection_finds_that_a_store_is_gone(tmp_path: Path, error: int) -> None:
    host, answers, now = open_host(write_node(tmp_path, Node())), True, 1000.0

    def statvfs(path: str) -> FileSystem:
        if not answers and "containerd" in path:
            raise Unreadable(path, error, "gone")
        return host.statvfs(path)

    with Sampler(host, SamplingConfig(), node_name="n", boottime=lambda: now, statvfs=statvfs) as sampler:
        assert sampler.sample().layout is DiskLayout.SINGLE
        answers, now = False, now + 60.0
        assert sampler.sample().layout is DiskLayout.UNKNOWN


def test_file_systems_that_were_too_slow_at_the_start_are_known_seconds_later(tmp_path: Path) -> None:
    host, now = open_host(write_node(tmp_path, Node())), 1000.0
    busy = threading.Event()

    def slow(path: str) -> FileSystem:
        if not busy.is_set():
            busy.wait(10.0)
        return host.statvfs(path)

    statvfs = StatvfsWithTimeout(slow, deadline_s=0.02)
    with Sampler(host, SamplingConfig(), node_name="n", boottime=lambda: now, statvfs=statvfs) as sampler:
        assert sampler.sample().layout is DiskLayout.UNKNOWN
        busy.set()
        while statvfs.hanging:
            time.sleep(0.001)
        now += 0.9
        assert sampler.sample().layout is DiskLayout.UNKNOWN, "a detection with timeouts is not repeated at once"
        now += 9.0
        assert sampler.sample().layout is DiskLayout.SINGLE
    statvfs.close()

"""Pods are read from the cgroup tree, and read again where they changed."""

import os
from pathlib import Path

import pytest

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import Container, NodeSnapshot, NoteKind, Pod, PodSource, PodUsage, PodView, QOSClass, Tier
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.sampler import Sampler
from tests.support.trees import GI, MI, Node, TreeContainer, TreePod, container_id, pod_cgroup, write_node

STATIC = "40752f5e63399d9c92ea85f4b6e74059"


def _sample(root: str) -> NodeSnapshot:
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
        return sampler.sample()


def _usage(view: PodView) -> PodUsage:
    assert view.usage is not None
    return view.usage


def _api_pod(tree: TreePod, uid: str = "") -> Pod:
    namespace, name = tree.key.split("/")
    return Pod(uid or tree.cgroup_uid, tree.cgroup_uid, namespace, name, PodSource.API, tree.qos)


@pytest.mark.parametrize("version", ["v1", "v2", "hybrid"])
@pytest.mark.parametrize("systemd", [True, False])
def test_pods_of_every_qos_class_are_found_with_both_drivers(tmp_path: Path, version: str, systemd: bool) -> None:
    pods = (
        TreePod("a/guaranteed", QOSClass.GUARANTEED, working_set=30 * MI, request=100 * MI),
        TreePod("a/burstable.with.dots", QOSClass.BURSTABLE, working_set=20 * MI, inactive_file=5 * MI, request=1 * GI),
        TreePod("a/besteffort", QOSClass.BEST_EFFORT, containers=(TreeContainer("x", 3), TreeContainer("y", 2))),
        TreePod("kube-system/static-n", uid=STATIC, request=0),
    )
    views = {v.pod.key: v for v in _sample(write_node(tmp_path, Node(version, systemd, pods=pods))).pods}
    assert views.keys() == {pod.key for pod in pods}
    for pod in pods:
        usage = _usage(views[pod.key])
        assert usage.cgroup_uid == pod.cgroup_uid
        assert usage.qos_class is pod.qos
        assert usage.cgroup == pod_cgroup(Node(version, systemd), pod)
        assert usage.memory_working_set == pod.working_set
        assert usage.memory_usage == pod.working_set + pod.inactive_file
        assert usage.process_count == sum(container.processes for container in pod.containers)
        assert usage.thread_count == sum(container.processes for container in pod.containers) + 1
        assert [c.name for c in usage.containers] == sorted(
            (c.name for c in pod.containers), key=lambda name: container_id(pod, TreeContainer(name))
        )
        assert usage.started_at == 100_000.0 - 3600.0
    assert _usage(views["a/guaranteed"]).memory_request_estimate == 100 * MI
    assert _usage(views["a/guaranteed"]).memory_limit == 100 * MI
    assert _usage(views["a/besteffort"]).memory_request_estimate == 0
    assert _usage(views["a/besteffort"]).memory_limit is None


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_pod_that_ends_is_not_reported_as_outside_our_pid_namespace(tmp_path: Path, version: str) -> None:
    """A process that has ended counts in pids.current until its parent waits for it; cgroup.procs does not list it."""
    pods = (
        TreePod("a/ends"),
        TreePod("a/stays"),
        TreePod("a/hidden", containers=(TreeContainer("x", 0),), sandbox=False),
    )
    root = write_node(tmp_path, Node(version, pods=pods))
    for current in tmp_path.rglob("pids.current"):
        current.write_text("2\n")  # the kernel counts every process, visible or not
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
        first = sampler.sample(fresh=True)
        for procs in tmp_path.rglob(f"*{pods[0].cgroup_uid[:8]}*/**/cgroup.procs"):
            procs.write_text("")
        later = [sampler.sample(fresh=True) for _ in range(3)]
    for snapshot in (first, *later):
        notes = [note.subject for note in snapshot.notes if "outside our PID namespace" in note.message]
        assert notes == [f"pod {pods[2].cgroup_uid}"]
    for snapshot in later:
        counts = {view.pod.key: _usage(view).process_count for view in snapshot.pods}
        assert counts == {"a/ends": 0, "a/stays": _usage(first.pods[0]).process_count, "a/hidden": None}


def test_processes_outside_our_pid_namespace_are_unknown_not_zero(tmp_path: Path) -> None:
    """v1's cgroup.procs leaves out what the reader's PID namespace cannot see."""
    pod, node = TreePod("a/b"), Node("v1")
    root = write_node(tmp_path, node._replace(pods=(pod,)))
    for procs in (tmp_path / "sys/fs/cgroup").rglob("cgroup.procs"):
        procs.write_text("")
    snapshot = _sample(root)
    assert _usage(snapshot.pods[0]).process_count is None
    assert any("PID namespace" in note.message for note in snapshot.notes)


@pytest.mark.parametrize("broken", [b"", b"-1\n", b"garbage", b"max\n", b"\xff\xfe", b"9" * 30])
def test_a_pod_with_broken_memory_files_is_listed_with_unknown_memory(tmp_path: Path, broken: bytes) -> None:
    pods = (TreePod("a/broken"), TreePod("a/whole"))
    root = write_node(tmp_path, Node(pods=pods))
    (tmp_path / f"sys/fs/cgroup{pod_cgroup(Node(), pods[0])}/memory.current").write_bytes(broken)
    snapshot = _sample(root)
    usages = {view.pod.name: _usage(view) for view in snapshot.pods}
    assert usages["broken"].memory_usage is None
    assert usages["broken"].memory_working_set is None
    assert usages["broken"].process_count == 1
    assert usages["whole"].memory_working_set == 10 * MI
    assert any(pods[0].cgroup_uid in note.subject for note in snapshot.notes)


def test_file_cache_swap_and_protection_of_a_pod_are_read_on_v2(tmp_path: Path) -> None:
    pod = TreePod(
        "a/b", working_set=300 * MI, inactive_file=50 * MI, active_file=90 * MI, dirty_file=10 * MI, swap=70 * MI
    )
    pods = (pod._replace(memory_min=20 * MI, memory_low=30 * MI), TreePod("a/plain"))
    node = Node(swap_total=2 * GI, swap_free=1 * GI, pods=pods)
    usages = {view.pod.name: _usage(view) for view in _sample(write_node(tmp_path, node)).pods}
    assert usages["b"].memory_file_cache == 130 * MI
    assert usages["b"].memory_swap == 70 * MI
    assert usages["b"].memory_protected == 30 * MI
    plain = usages["plain"]
    assert (plain.memory_file_cache, plain.memory_swap, plain.memory_protected) == (0, 0, 0)


@pytest.mark.parametrize("version", ["v1", "hybrid"])
def test_on_v1_swap_is_read_from_memory_stat_and_file_cache_and_protection_are_unknown(
    tmp_path: Path, version: str
) -> None:
    pod = TreePod("a/b", inactive_file=50 * MI, active_file=5 * MI, swap=70 * MI)
    [view] = _sample(write_node(tmp_path, Node(version, swap_total=2 * GI, pods=(pod,)))).pods
    usage = _usage(view)
    assert (usage.memory_swap, usage.memory_file_cache, usage.memory_protected) == (70 * MI, None, None)


@pytest.mark.parametrize("version", ["v1", "v2", "hybrid"])
def test_without_swap_accounting_the_swap_of_a_pod_is_unknown_without_a_note(tmp_path: Path, version: str) -> None:
    node = Node(version, swap_total=2 * GI, swap_accounting=False, pods=(TreePod("a/b"), TreePod("a/c")))
    snapshot = _sample(write_node(tmp_path, node))
    assert [_usage(view).memory_swap for view in snapshot.pods] == [None, None]
    assert all(_usage(view).memory_working_set == 10 * MI for view in snapshot.pods)
    assert not [note for note in snapshot.notes if note.kind is NoteKind.POD]


def test_a_node_without_swap_has_no_pod_in_swap_and_no_file_is_read_for_it(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node(pods=(pod := TreePod("a/b"),)))
    (tmp_path / f"sys/fs/cgroup{pod_cgroup(Node(), pod)}/memory.swap.current").write_text("4096\n")
    assert _usage(_sample(root).pods[0]).memory_swap == 0


def test_swap_is_read_again_with_the_memory_of_a_pod_also_after_swapon(tmp_path: Path) -> None:
    pod, node = TreePod("a/b", working_set=300 * MI), Node()
    root, times = write_node(tmp_path, node._replace(pods=(pod,))), iter([100.0, 101.0, 102.0, 122.0])
    with Sampler(open_host(root), SamplingConfig(), node_name="n", boottime=times.__next__) as sampler:
        assert _usage(sampler.sample().pods[0]).memory_swap == 0
        swapped = pod._replace(working_set=100 * MI, swap=200 * MI)
        write_node(tmp_path, node._replace(swap_total=1 * GI, pods=(swapped,)))
        assert _usage(sampler.sample(fresh=False).pods[0]).memory_swap == 200 * MI
        write_node(tmp_path, node._replace(swap_total=1 * GI, pods=(swapped._replace(swap=150 * MI),)))
        assert _usage(sampler.sample(fresh=False).pods[0]).memory_swap == 200 * MI
        assert _usage(sampler.sample(fresh=False).pods[0]).memory_swap == 150 * MI


@pytest.mark.parametrize(
    ("low", "expected"), [(b"max\n", 1 << 62), (b"", 4096), (b"-1\n", 4096), (b"9" * 30, 4096), (b"8192\n", 8192)]
)
def test_a_protection_is_the_larger_one_that_is_a_number(tmp_path: Path, low: bytes, expected: int) -> None:
    root = write_node(tmp_path, Node(pods=(pod := TreePod("a/b", memory_min=4096),)))
    (tmp_path / f"sys/fs/cgroup{pod_cgroup(Node(), pod)}/memory.low").write_bytes(low)
    assert _usage(_sample(root).pods[0]).memory_protected == expected


def test_a_pod_that_barely_moved_keeps_its_reading_and_its_time(tmp_path: Path) -> None:
    still, moving = TreePod("a/still"), TreePod("a/moving")
    root, times = write_node(tmp_path, Node(pods=(still, moving))), iter([100.0, 101.0, 102.0, 122.0])
    with Sampler(open_host(root), SamplingConfig(), node_name="n", boottime=times.__next__) as sampler:
        sampler.sample()
        write_node(tmp_path, Node(pods=(still, moving._replace(working_set=30 * MI))))
        second = {view.pod.name: _usage(view) for view in sampler.sample(fresh=False).pods}
        assert (second["still"].read_at, second["moving"].read_at) == (100.0, 101.0)
        assert second["moving"].memory_working_set == 30 * MI
        assert {_usage(view).read_at for view in sampler.sample().pods} == {102.0}
        assert {_usage(view).read_at for view in sampler.sample(fresh=False).pods} == {122.0}


def test_while_memory_or_pids_are_short_a_level_usage_hides_no_change(tmp_path: Path) -> None:
    """At its own limit a heap displaces page cache, and the usage stays the same."""
    pod, node = TreePod("a/hog", working_set=100 * MI, inactive_file=900 * MI), Node()
    root, now = write_node(tmp_path, node._replace(pods=(pod,))), 100.0
    with Sampler(open_host(root), SamplingConfig(), node_name="n", boottime=lambda: now) as sampler:

        def read(at: float, *, short: Tier | None) -> tuple[int | None, int | None]:
            nonlocal now
            now = at
            [view] = sampler.read_pods(sampler.sample_node(), fresh=False, short=short).pods
            return _usage(view).memory_working_set, _usage(view).thread_count

        assert read(100.0, short=None) == (100 * MI, 2)
        write_node(tmp_path, node._replace(pods=(pod._replace(working_set=800 * MI, inactive_file=200 * MI),)))
        (tmp_path / f"sys/fs/cgroup{pod_cgroup(node, pod)}/pids.current").write_text("900\n")
        assert read(101.5, short=None) == (100 * MI, 2), "a calm node does not pay for it"
        assert read(101.5, short=Tier.HARD) == (800 * MI, 900)


def test_while_memory_is_short_no_reading_is_older_than_a_second_and_few_are_due_at_once(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node(pods=tuple(TreePod(f"a/p{number}") for number in range(40))))
    now, read = 100.0, []
    with Sampler(open_host(root), SamplingConfig(), node_name="n", boottime=lambda: now) as sampler:
        for _ in range(80):
            views = sampler.read_pods(sampler.sample_node(), fresh=False, short=Tier.HARD).pods
            assert all(now - _usage(view).read_at < 1.0 for view in views)
            read.append(sum(_usage(view).read_at == now for view in views))
            now += 1 / 16
    assert max(read[1:]) < 10
    assert sum(read[-16:]) == 40, "each once a second"


def test_no_reading_is_older_than_two_thirds_of_stale_after(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node(pods=(TreePod("a/still"),)))
    now = 100.0
    config = SamplingConfig(stale_after_s=4.0)
    with Sampler(open_host(root), config, node_name="n", boottime=lambda: now) as sampler:
        for _ in range(40):
            now += 0.5
            [view] = sampler.sample(fresh=False).pods
            assert now - _usage(view).read_at < 4.0 * 2 / 3


def test_pods_that_did_not_move_are_not_all_due_in_one_sample_after_rare_samples(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node(pods=tuple(TreePod(f"a/p{number}") for number in range(40))))
    now, read = 100.0, []
    with Sampler(open_host(root), SamplingConfig(), node_name="n", boottime=lambda: now) as sampler:
        for step in range(400):
            now += 10.0 if step < 60 else 1.0
            views = sampler.sample(fresh=False).pods
            read.append(sum(_usage(view).read_at == now for view in views))
        assert max(read[10:60]) < 28, "half of them in each"
        assert max(read[60:]) < 12, "when they are frequent again"


def test_containers_are_read_again_after_a_change_of_the_counts_or_after_their_age(tmp_path: Path) -> None:
    one, other = TreeContainer("one"), TreeContainer("other", processes=5)
    pod, moves = TreePod("a/pod", containers=(one,)), [0]
    root, now = write_node(tmp_path, Node(pods=(pod,))), 100.0
    place = tmp_path / f"sys/fs/cgroup{pod_cgroup(Node(), pod)}"
    [inside] = place.glob(f"*{container_id(pod, one)}*")

    def counted(sampler: Sampler, *, moved: bool = False) -> int | None:
        if moved:
            moves[0] += 10 * MI
            (place / "memory.current").write_text(f"{pod.working_set + moves[0]}\n")
        [view] = sampler.sample(fresh=False).pods
        assert _usage(view).read_at == now
        return _usage(view).process_count

    with Sampler(open_host(root), SamplingConfig(), node_name="n", boottime=lambda: now) as sampler:
        sampler.sample()
        now = 120.0  # its score is settled now
        assert counted(sampler) == 1
        (inside / "cgroup.procs").write_text("1\n2\n")
        now = 140.0
        assert counted(sampler, moved=True) == 1, "no value that is read shows it"
        (place / "pids.current").write_text("3\n")
        now = 160.0
        assert counted(sampler) == 1, "threads are not counted while memory did not move"
        now = 165.0
        assert counted(sampler, moved=True) == 2, "other threads"
        write_node(tmp_path, Node(pods=(pod._replace(containers=(one, other)),)))
        (place / "pids.current").write_text("3\n")
        now = 180.0
        assert counted(sampler, moved=True) == 6, "another container"
        now = 205.0
        assert counted(sampler) == 6
        (inside / "cgroup.procs").write_text("1\n2\n3\n")
        now = 230.0
        assert counted(sampler) == 6
        now = 270.0
        assert counted(sampler) == 8, "a minute later in any case"


def _running(tree: TreePod) -> Pod:
    containers = tuple(Container(each.name, container_id=container_id(tree, each)) for each in tree.containers)
    return _api_pod(tree)._replace(containers=containers)


def test_containers_of_a_listed_pod_are_read_again_with_a_new_version_or_after_five_minutes(tmp_path: Path) -> None:
    one = TreeContainer("one")
    pod = TreePod("a/pod", containers=(one,))
    root, now = write_node(tmp_path, Node(pods=(pod,))), 100_000.0
    [inside] = (tmp_path / f"sys/fs/cgroup{pod_cgroup(Node(), pod)}").glob(f"*{container_id(pod, one)}*")
    known = [_running(pod)]

    def counted(sampler: Sampler) -> int | None:
        [view] = sampler.sample(known, now, fresh=False).pods
        assert _usage(view).read_at == now
        return _usage(view).process_count

    with Sampler(open_host(root), SamplingConfig(), node_name="n", boottime=lambda: now) as sampler:
        assert counted(sampler) == 1
        now += 25.0  # its first process is no longer young
        assert counted(sampler) == 1
        (inside / "cgroup.procs").write_text("1\n2\n")
        now += 250.0
        assert counted(sampler) == 1, "no value that is read shows it"
        known = [known[0]._replace(ready=False)]
        now += 25.0
        assert counted(sampler) == 2, "another version of the pod"
        (inside / "cgroup.procs").write_text("1\n2\n3\n")
        now += 250.0
        assert counted(sampler) == 2
        now += 60.0
        assert counted(sampler) == 3, "five minutes later in any case"


def test_a_removed_and_remade_cgroup_is_read_as_another_pod(tmp_path: Path) -> None:
    pod, node = TreePod("a/b", working_set=10 * MI), Node()
    root = write_node(tmp_path, node._replace(pods=(pod,)))
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
        assert _usage(sampler.sample().pods[0]).memory_working_set == 10 * MI
        kept = len(sampler._files)
        place = tmp_path / f"sys/fs/cgroup{pod_cgroup(node, pod)}"
        place.rename(tmp_path / "gone")  # keeps the inode in use, so that the new one differs
        write_node(tmp_path, node._replace(pods=(pod._replace(working_set=11 * MI),)))
        assert _usage(sampler.sample(fresh=False).pods[0]).memory_working_set == 11 * MI
        assert len(sampler._files) == kept


def test_descriptors_are_closed_when_their_pod_is_removed(tmp_path: Path) -> None:
    pods = tuple(TreePod(f"a/p{i}") for i in range(20))
    root = write_node(tmp_path, Node(pods=pods))
    before = len(os.listdir("/proc/self/fd"))
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
        sampler.sample()
        full = len(sampler._files)
        write_node(tmp_path, Node(pods=pods[:5]))
        assert len(sampler.sample(fresh=False).pods) == 5
        assert len(sampler._files) == full - 15
    assert len(os.listdir("/proc/self/fd")) == before

"""Pods from the cgroup tree, their names from the logs, and the join with what the API says."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config.schema import Sampling
from nodeagent.model import (
    Container,
    NodeSnapshot,
    Pod,
    PodSource,
    PodUsage,
    PodView,
    QOSClass,
)
from nodeagent.sampling.host import open_host
from nodeagent.sampling.pods import PodName, estimate_request, join, parse_log_directory, parse_log_link
from nodeagent.sampling.sampler import Sampler
from tests.trees import GI, MI, Node, TreeContainer, TreePod, container_id, pod_cgroup, write_node

STATIC = "40752f5e63399d9c92ea85f4b6e74059"


def _sample(root: str) -> NodeSnapshot:
    with Sampler(open_host(root), Sampling(), node_name="n") as sampler:
        return sampler.sample()


def _usage(view: PodView) -> PodUsage:
    assert view.usage is not None
    return view.usage


def _api_pod(tree: TreePod, uid: str = "") -> Pod:
    namespace, name = tree.key.split("/")
    return Pod(uid or tree.cgroup_uid, tree.cgroup_uid, namespace, name, PodSource.API, tree.qos)


# --- from the tree


@pytest.mark.parametrize("version", ["v1", "v2", "hybrid"])
@pytest.mark.parametrize("systemd", [True, False])
def test_pods_of_every_class_are_found_with_both_drivers(tmp_path: Path, version: str, systemd: bool) -> None:
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


def test_a_sandbox_is_told_by_its_score_where_there_are_no_log_links(tmp_path: Path) -> None:
    pod = TreePod("a/b", containers=(TreeContainer("x", 2),), logs=False)
    usage = _usage(_sample(write_node(tmp_path, Node(pods=(pod,)))).pods[0])
    assert usage.process_count == 2
    assert [container.container_id for container in usage.containers] == [container_id(pod, TreeContainer("x"))]


def test_a_pod_that_has_only_its_sandbox_runs_nothing(tmp_path: Path) -> None:
    usage = _usage(_sample(write_node(tmp_path, Node(pods=(TreePod("a/b", containers=()),)))).pods[0])
    assert (usage.process_count, usage.containers) == (0, ())


def test_processes_of_cgroups_inside_a_container_are_its_own(tmp_path: Path) -> None:
    pod, node = TreePod("a/b"), Node()
    root = write_node(tmp_path, node._replace(pods=(pod,)))
    scope = f"cri-containerd-{container_id(pod, TreeContainer())}.scope"
    inner = tmp_path / f"sys/fs/cgroup{pod_cgroup(node, pod)}/{scope}/init.scope/deeper"
    inner.mkdir(parents=True)
    (inner.parent / "cgroup.procs").write_text("5001\n5002\n")
    (inner / "cgroup.procs").write_text("5003\n")
    assert _usage(_sample(root).pods[0]).process_count == 4


def test_processes_outside_our_pid_namespace_are_unknown_not_none(tmp_path: Path) -> None:
    """v1's cgroup.procs leaves out what the reader's PID namespace cannot see."""
    pod, node = TreePod("a/b"), Node("v1")
    root = write_node(tmp_path, node._replace(pods=(pod,)))
    for procs in (tmp_path / "sys/fs/cgroup").rglob("cgroup.procs"):
        procs.write_text("")
    snapshot = _sample(root)
    assert _usage(snapshot.pods[0]).process_count is None
    assert any("PID namespace" in note.message for note in snapshot.notes)


def test_processes_that_v2_shows_as_zero_are_counted_all_the_same(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node(pods=(TreePod("a/b", containers=(TreeContainer("c", 3),)),)))
    for procs in (tmp_path / "sys/fs/cgroup").rglob("cgroup.procs"):
        procs.write_text("0\n" * len(procs.read_text().split()))
    usage = _usage(_sample(root).pods[0])
    assert usage.process_count == 3
    assert usage.memory_request_estimate is None


@pytest.mark.parametrize("broken", [b"", b"-1\n", b"garbage", b"max\n", b"\xff\xfe", b"9" * 30])
def test_a_pod_with_broken_memory_files_is_there_with_unknown_memory(tmp_path: Path, broken: bytes) -> None:
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


def test_a_pod_without_a_log_directory_has_no_name_but_is_there(tmp_path: Path) -> None:
    pod = TreePod("a/b", logs=False)
    view = _sample(write_node(tmp_path, Node(pods=(pod,)))).pods[0]
    assert (view.pod.namespace, view.pod.name, view.pod.key) == (None, None, f"uid/{pod.cgroup_uid}")


# --- request estimates


@pytest.mark.parametrize("capacity", [2 * GI, 64 * GI])
@given(requests=st.lists(st.integers(0, 1000), min_size=1, max_size=4))
def test_an_estimate_turns_the_kubelets_formula_round_to_a_thousandth(capacity: int, requests: list[int]) -> None:
    amounts = [capacity * permille // 1000 for permille in requests]
    scores = [min(999, max(3, 1000 - 1000 * amount // capacity)) for amount in amounts]
    estimate = estimate_request(QOSClass.BURSTABLE, scores, None, capacity)
    assert estimate is not None
    # The clamp to 3..999 costs up to three thousandths more.
    assert abs(estimate - sum(amounts)) <= capacity * 3 // 1000 * len(requests) + len(requests)


@pytest.mark.parametrize("score", [None, -997, -1000, 0, 2, 1000])
def test_a_score_that_no_burstable_container_gets_makes_the_estimate_unknown(score: int | None) -> None:
    assert estimate_request(QOSClass.BURSTABLE, [983, score], None, GI) is None


def test_nothing_to_go_by_is_an_unknown_request() -> None:
    assert estimate_request(QOSClass.BURSTABLE, [], None, GI) is None
    assert estimate_request(QOSClass.BURSTABLE, [983], None, None) is None
    assert estimate_request(QOSClass.GUARANTEED, [-997], None, GI) is None


# --- names


@pytest.mark.parametrize(
    ("directory", "expected"),
    [
        ("default_web_2fc932ce", ("2fc932ce", PodName("default", "web"))),
        ("kube-system_coredns-1.2.3_x", ("x", PodName("kube-system", "coredns-1.2.3"))),
        ("default_web", None),
        ("a_b_c_d", None),
        ("__", None),
        ("lost+found", None),
    ],
)
def test_a_log_directory_tells_namespace_name_and_uid(directory: str, expected: object) -> None:
    assert parse_log_directory(directory) == expected


@given(st.text())
def test_any_name_is_a_log_directory_or_link_or_not(name: str) -> None:
    parse_log_directory(name)
    parse_log_link(name)


# --- again and again


def test_a_pod_that_barely_moved_keeps_its_reading_and_the_time_of_it(tmp_path: Path) -> None:
    still, moving = TreePod("a/still"), TreePod("a/moving")
    root, times = write_node(tmp_path, Node(pods=(still, moving))), iter([100.0, 101.0, 102.0, 120.0])
    with Sampler(open_host(root), Sampling(), node_name="n", boottime=times.__next__) as sampler:
        sampler.sample()
        write_node(tmp_path, Node(pods=(still, moving._replace(working_set=30 * MI))))
        second = {view.pod.name: _usage(view) for view in sampler.sample(fresh=False).pods}
        assert (second["still"].read_at, second["moving"].read_at) == (100.0, 101.0)
        assert second["moving"].memory_working_set == 30 * MI
        assert {_usage(view).read_at for view in sampler.sample().pods} == {102.0}
        assert {_usage(view).read_at for view in sampler.sample(fresh=False).pods} == {120.0}


def test_nothing_older_than_half_of_what_a_decision_believes_is_handed_out_again(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node(pods=(TreePod("a/still"),)))
    now = 100.0
    config = Sampling(stale_after_s=4.0)
    with Sampler(open_host(root), config, node_name="n", boottime=lambda: now) as sampler:
        for _ in range(40):
            now += 0.5
            [view] = sampler.sample(fresh=False).pods
            assert now - _usage(view).read_at < 2.0


@pytest.mark.parametrize("stale_after_s", [30.0, 6.0, 0.5])
def test_in_haste_a_pod_that_did_not_move_keeps_its_reading_a_little_longer(
    tmp_path: Path, stale_after_s: float
) -> None:
    root = write_node(tmp_path, Node(pods=tuple(TreePod(f"a/p{number}") for number in range(9))))
    now, config = 100.0, Sampling(stale_after_s=stale_after_s)
    ages: dict[float, list[float]] = {}
    with Sampler(open_host(root), config, node_name="n", boottime=lambda: now) as sampler:
        for late_s in (0.0, 5.0):
            sampler.sample()
            ages[late_s] = []
            for _ in range(120):
                now += stale_after_s / 60
                views = sampler.sample(fresh=False, late_s=late_s).pods
                ages[late_s] += [now - _usage(view).read_at for view in views]
    assert max(ages[0.0]) < stale_after_s * 0.51
    assert max(ages[0.0]) < max(ages[5.0]) < stale_after_s * 0.68


def test_pods_that_were_looked_at_lately_are_not_looked_at_while_it_is_calm(tmp_path: Path) -> None:
    pod, new = TreePod("a/pod"), TreePod("a/new")
    root, now = write_node(tmp_path, Node(pods=(pod,))), 100.0
    with Sampler(open_host(root), Sampling(), node_name="n", boottime=lambda: now) as sampler:
        assert sampler.sample().pods_seen_at == 100.0
        write_node(tmp_path, Node(pods=(pod._replace(working_set=30 * MI), new)))
        now = 104.0
        calm = sampler.sample(fresh=False, pods_within_s=5.0)
        assert (calm.taken_at, calm.pods_seen_at) == (104.0, 100.0)
        assert [_usage(view).memory_working_set for view in calm.pods] == [10 * MI]
        near = sampler.sample(fresh=False)
        assert near.pods_seen_at == 104.0
        assert {view.pod.name: _usage(view).memory_working_set for view in near.pods} == {
            "pod": 30 * MI,
            "new": 10 * MI,
        }
        now = 109.0
        assert sampler.sample(fresh=False, pods_within_s=5.0).pods_seen_at == 109.0
        assert sampler.sample(pods_within_s=5.0).pods_seen_at == 109.0


def test_the_api_servers_newest_view_is_joined_with_pods_that_were_looked_at_before(tmp_path: Path) -> None:
    pod = TreePod("a/pod")
    root, api = write_node(tmp_path, Node(pods=(pod,))), _api_pod(pod)
    with Sampler(open_host(root), Sampling(), node_name="n") as sampler:
        sampler.sample([api], 1.0)
        [view] = sampler.sample([api._replace(priority=7)], 2.0, fresh=False, pods_within_s=60.0).pods
        assert view.pod.priority == 7
        assert view.usage is not None


def test_a_sample_takes_the_look_at_the_node_that_it_is_given(tmp_path: Path) -> None:
    root, now = write_node(tmp_path, Node(memory_available=GI, pods=(TreePod("a/pod"),))), 100.0
    with Sampler(open_host(root), Sampling(), node_name="n", boottime=lambda: now) as sampler:
        node = sampler.sample_node()
        now = 101.0
        snapshot = sampler.sample(node=node)
        assert (snapshot.taken_at, snapshot.pods_seen_at, snapshot.observations) == (100.0, 100.0, node.observations)
        assert len(snapshot.pods) == 1


def test_containers_are_read_again_when_anything_shows_that_they_changed(tmp_path: Path) -> None:
    one, other = TreeContainer("one"), TreeContainer("other", processes=5)
    pod = TreePod("a/pod", containers=(one,))
    root, now = write_node(tmp_path, Node(pods=(pod,))), 100.0
    place = tmp_path / f"sys/fs/cgroup{pod_cgroup(Node(), pod)}"
    [inside] = place.glob(f"*{container_id(pod, one)}*")

    def counted(sampler: Sampler) -> int | None:
        [view] = sampler.sample(fresh=False).pods
        assert _usage(view).read_at == now
        return _usage(view).process_count

    with Sampler(open_host(root), Sampling(), node_name="n", boottime=lambda: now) as sampler:
        sampler.sample()
        now = 120.0  # its score is settled now
        assert counted(sampler) == 1
        (inside / "cgroup.procs").write_text("1\n2\n")
        now = 140.0
        assert counted(sampler) == 1, "nothing shows it"
        (place / "pids.current").write_text("3\n")
        now = 160.0
        assert counted(sampler) == 2, "other threads"
        write_node(tmp_path, Node(pods=(pod._replace(containers=(one, other)),)))
        (place / "pids.current").write_text("3\n")
        now = 180.0
        assert counted(sampler) == 6, "another container"
        (inside / "cgroup.procs").write_text("1\n2\n3\n")
        now = 200.0
        counted(sampler)
        now = 270.0
        assert counted(sampler) == 8, "a minute later in any case"


def test_a_removed_and_remade_cgroup_is_read_anew(tmp_path: Path) -> None:
    pod, node = TreePod("a/b", working_set=10 * MI), Node()
    root = write_node(tmp_path, node._replace(pods=(pod,)))
    with Sampler(open_host(root), Sampling(), node_name="n") as sampler:
        assert _usage(sampler.sample().pods[0]).memory_working_set == 10 * MI
        held = sampler.kept_descriptors
        place = tmp_path / f"sys/fs/cgroup{pod_cgroup(node, pod)}"
        place.rename(tmp_path / "gone")  # keeps the inode in use, so that the new one differs
        write_node(tmp_path, node._replace(pods=(pod._replace(working_set=11 * MI),)))
        assert _usage(sampler.sample(fresh=False).pods[0]).memory_working_set == 11 * MI
        assert sampler.kept_descriptors == held


def test_descriptors_are_closed_when_their_pod_goes(tmp_path: Path) -> None:
    pods = tuple(TreePod(f"a/p{i}") for i in range(20))
    root = write_node(tmp_path, Node(pods=pods))
    before = len(os.listdir("/proc/self/fd"))
    with Sampler(open_host(root), Sampling(), node_name="n") as sampler:
        sampler.sample()
        full = sampler.kept_descriptors
        write_node(tmp_path, Node(pods=pods[:5]))
        assert len(sampler.sample(fresh=False).pods) == 5
        assert sampler.kept_descriptors == full - 15
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_kubepods_that_vanishes_is_a_note_and_its_return_is_noticed_at_once(tmp_path: Path) -> None:
    node = Node(pods=(TreePod("a/b"),))
    root = write_node(tmp_path, node)
    with Sampler(open_host(root), Sampling(), node_name="n") as sampler:
        assert len(sampler.sample().pods) == 1
        shutil.rmtree(tmp_path / "sys/fs/cgroup/kubepods.slice")
        gone = sampler.sample()
        assert gone.pods == ()
        assert any(note.subject == "pods" for note in gone.notes)
        sampler.sample()
        write_node(tmp_path, node)
        sampler.relook()
        assert len(sampler.sample().pods) == 1


# --- join


def test_a_mirror_pod_has_the_usage_of_the_cgroup_with_its_config_hash(tmp_path: Path) -> None:
    static = TreePod("kube-system/etcd-n", uid=STATIC)
    usages = [_usage(view) for view in _sample(write_node(tmp_path, Node(pods=(static,)))).pods]
    views = join(usages, [_api_pod(static, uid="mirror-uid")], names={}, wall_offset=0.0).views
    assert [(view.pod.uid, view.usage) for view in views] == [("mirror-uid", usages[0])]


def test_every_pod_that_either_side_knows_is_there_once(tmp_path: Path) -> None:
    both, unknown, starting = TreePod("a/both"), TreePod("a/unknown"), TreePod("a/starting")
    root = write_node(tmp_path, Node(pods=(both, unknown)))
    with Sampler(open_host(root), Sampling(), node_name="n") as sampler:
        snapshot = sampler.sample([_api_pod(both), _api_pod(starting)], pods_synced_at=99_999.0)
    told = {view.pod.name: (view.pod.source, view.usage is not None) for view in snapshot.pods}
    assert told == {
        "both": (PodSource.API, True),
        "starting": (PodSource.API, False),
        "unknown": (PodSource.HOST, True),
    }
    assert snapshot.pods_synced_at == 99_999.0


def test_without_the_api_every_pod_is_the_hosts(tmp_path: Path) -> None:
    snapshot = _sample(write_node(tmp_path, Node(pods=(TreePod("a/b"),))))
    assert [view.pod.source for view in snapshot.pods] == [PodSource.HOST]
    assert snapshot.pods_synced_at is None


def test_the_api_names_containers_that_the_logs_do_not(tmp_path: Path) -> None:
    pod = TreePod("a/b", logs=False)
    usages = [_usage(view) for view in _sample(write_node(tmp_path, Node(pods=(pod,)))).pods]
    known = Container("web", container_id=container_id(pod, TreeContainer()))
    views = join(usages, [_api_pod(pod)._replace(containers=(known,))], names={}, wall_offset=0.0).views
    assert [container.name for container in _usage(views[0]).containers] == ["web"]

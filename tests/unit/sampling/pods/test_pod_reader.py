"""Pods from the cgroup tree, their names from the logs, and the join with what the API says."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import Container, ContainerKind, NodeSnapshot, Pod, PodSource, PodUsage, PodView, QOSClass, Signal
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.pods.pod_containers import api_pod_facts, certain_sandbox, estimate_request
from nodeagent.sampling.pods.pod_names import PodName, join_pods, parse_log_directory, parse_log_link
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


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_pod_that_ends_is_not_taken_for_one_whose_processes_cannot_be_seen(tmp_path: Path, version: str) -> None:
    """What has ended counts in pids.current until its parent knows; cgroup.procs lists it no more."""
    pods = (
        TreePod("a/ends"),
        TreePod("a/stays"),
        TreePod("a/hidden", containers=(TreeContainer("x", 0),), sandbox=False),
    )
    root = write_node(tmp_path, Node(version, pods=pods))
    for current in tmp_path.rglob("pids.current"):
        current.write_text("2\n")  # the kernel counts, whoever may see
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
    root, times = write_node(tmp_path, Node(pods=(still, moving))), iter([100.0, 101.0, 102.0, 122.0])
    with Sampler(open_host(root), SamplingConfig(), node_name="n", boottime=times.__next__) as sampler:
        sampler.sample()
        write_node(tmp_path, Node(pods=(still, moving._replace(working_set=30 * MI))))
        second = {view.pod.name: _usage(view) for view in sampler.sample(fresh=False).pods}
        assert (second["still"].read_at, second["moving"].read_at) == (100.0, 101.0)
        assert second["moving"].memory_working_set == 30 * MI
        assert {_usage(view).read_at for view in sampler.sample().pods} == {102.0}
        assert {_usage(view).read_at for view in sampler.sample(fresh=False).pods} == {122.0}


def test_nothing_older_than_two_thirds_of_what_a_decision_believes_is_handed_out_again(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node(pods=(TreePod("a/still"),)))
    now = 100.0
    config = SamplingConfig(stale_after_s=4.0)
    with Sampler(open_host(root), config, node_name="n", boottime=lambda: now) as sampler:
        for _ in range(40):
            now += 0.5
            [view] = sampler.sample(fresh=False).pods
            assert now - _usage(view).read_at < 4.0 * 2 / 3


@pytest.mark.parametrize("stale_after_s", [30.0, 6.0, 0.5])
def test_in_haste_a_pod_that_did_not_move_keeps_its_reading_a_little_longer(
    tmp_path: Path, stale_after_s: float
) -> None:
    root = write_node(tmp_path, Node(pods=tuple(TreePod(f"a/p{number}") for number in range(9))))
    now, config = 100.0, SamplingConfig(stale_after_s=stale_after_s)
    ages: dict[float, list[float]] = {}
    with Sampler(open_host(root), config, node_name="n", boottime=lambda: now) as sampler:
        for late_s in (0.0, 10.0):
            sampler.sample()
            ages[late_s] = []
            for _ in range(120):
                now += stale_after_s / 60
                views = sampler.sample(fresh=False, late_s=late_s).pods
                ages[late_s] += [now - _usage(view).read_at for view in views]
    assert max(ages[0.0]) < stale_after_s * 0.67
    assert max(ages[0.0]) < max(ages[10.0]) < stale_after_s * 0.94, "and is not too old for the decision"


def test_pods_that_did_not_move_do_not_come_due_at_once_after_rare_samples(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node(pods=tuple(TreePod(f"a/p{number}") for number in range(40))))
    now, read = 100.0, []
    with Sampler(open_host(root), SamplingConfig(), node_name="n", boottime=lambda: now) as sampler:
        for step in range(400):
            now += 10.0 if step < 60 else 1.0
            views = sampler.sample(fresh=False).pods
            read.append(sum(_usage(view).read_at == now for view in views))
        assert max(read[10:60]) < 28, "half of them in each"
        assert max(read[60:]) < 12, "when they are frequent again"
        now += 10.0
        views = sampler.sample(fresh=False, late_s=10.0).pods
        read_anew = sum(_usage(view).read_at == now for view in views)
        assert read_anew < 6, "nor where there is haste after a rare one"


def test_the_api_servers_newest_view_is_joined_with_pods_that_were_looked_at_before(tmp_path: Path) -> None:
    pod = TreePod("a/pod")
    root, api = write_node(tmp_path, Node(pods=(pod,))), _api_pod(pod)
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
        sampler.sample([api], 1.0)
        [view] = sampler.sample([api._replace(priority=7)], 2.0, fresh=False).pods
        assert view.pod.priority == 7
        assert view.usage is not None


def test_a_sample_takes_the_look_at_the_node_that_it_is_given(tmp_path: Path) -> None:
    root, now = write_node(tmp_path, Node(memory_available=GI, pods=(TreePod("a/pod"),))), 100.0
    with Sampler(open_host(root), SamplingConfig(), node_name="n", boottime=lambda: now) as sampler:
        node = sampler.sample_node()
        now = 101.0
        snapshot = sampler.sample(node=node)
        assert (snapshot.taken_at, snapshot.observations) == (100.0, node.observations)
        assert len(snapshot.pods) == 1


def test_the_node_can_be_looked_at_after_its_pods(tmp_path: Path) -> None:
    pod, now = TreePod("a/pod", working_set=300 * MI), 100.0
    root = write_node(tmp_path, Node(memory_available=GI, pods=(pod,)))
    with Sampler(open_host(root), SamplingConfig(), node_name="n", boottime=lambda: now) as sampler:
        snapshot, now = sampler.sample(), 101.0
        write_node(tmp_path, Node(memory_available=GI + 300 * MI, pods=(pod._replace(working_set=0),)))
        after = sampler.node_last(snapshot)
        seen = [each.observations[Signal.MEMORY] for each in (snapshot, after)]
        assert [each.read_at for each in seen] == [100.0, 101.0]
        assert (seen[1].available or 0) - (seen[0].available or 0) == 300 * MI
        assert (after.mem_available.available or 0) - (snapshot.mem_available.available or 0) == 300 * MI
        assert (after.taken_at, after.pods) == (101.0, snapshot.pods)


def test_containers_are_read_again_when_anything_shows_that_they_changed(tmp_path: Path) -> None:
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
        assert counted(sampler, moved=True) == 1, "nothing shows it"
        (place / "pids.current").write_text("3\n")
        now = 160.0
        assert counted(sampler) == 1, "nor does anything where the memory stands still: not even threads are counted"
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


def test_containers_of_a_pod_that_the_api_tells_of_are_read_again_when_it_tells_something_new(tmp_path: Path) -> None:
    one = TreeContainer("one")
    pod = TreePod("a/pod", containers=(one,))
    root, now = write_node(tmp_path, Node(pods=(pod,))), 100_000.0
    [inside] = (tmp_path / f"sys/fs/cgroup{pod_cgroup(Node(), pod)}").glob(f"*{container_id(pod, one)}*")
    known = [_running(pod)]

    def counted(sampler: Sampler) -> int | None:
        [view] = sampler.sample(known, now, fresh=False).pods
        assert _usage(view).read_at == now
        return _usage(view).process_count

    wall = STARTED + 3600.0 - now
    with Sampler(
        open_host(root),
        SamplingConfig(),
        node_name="n",
        boottime=lambda: now,
        wall=lambda: now + wall,
        pod_limits=False,
    ) as sampler:
        assert counted(sampler) == 1
        (inside / "cgroup.procs").write_text("1\n2\n")
        now += 250.0
        assert counted(sampler) == 1, "nothing shows it"
        known = [known[0]._replace(ready=False)]
        now += 25.0
        assert counted(sampler) == 2, "another version of the pod"
        (inside / "cgroup.procs").write_text("1\n2\n3\n")
        now += 250.0
        assert counted(sampler) == 2
        now += 60.0
        assert counted(sampler) == 3, "five minutes later in any case"


def test_a_removed_and_remade_cgroup_is_read_anew(tmp_path: Path) -> None:
    pod, node = TreePod("a/b", working_set=10 * MI), Node()
    root = write_node(tmp_path, node._replace(pods=(pod,)))
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
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
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
        sampler.sample()
        full = sampler.kept_descriptors
        write_node(tmp_path, Node(pods=pods[:5]))
        assert len(sampler.sample(fresh=False).pods) == 5
        assert sampler.kept_descriptors == full - 15
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_kubepods_that_vanishes_is_a_note_and_its_return_is_noticed_at_once(tmp_path: Path) -> None:
    node = Node(pods=(TreePod("a/b"),))
    root = write_node(tmp_path, node)
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
        assert len(sampler.sample().pods) == 1
        shutil.rmtree(tmp_path / "sys/fs/cgroup/kubepods.slice")
        gone = sampler.sample()
        assert gone.pods == ()
        assert any(note.subject == "pods" for note in gone.notes)
        sampler.sample()
        write_node(tmp_path, node)
        sampler.relook()
        assert len(sampler.sample().pods) == 1


# --- what the API tells


STARTED = 1_800_000_000.0 - 3600.0
"""Wall clock, an hour before the moment of the trees."""


def _running(tree: TreePod) -> Pod:
    """As the API has a pod that runs."""
    containers = tuple(Container(each.name, container_id=container_id(tree, each)) for each in tree.containers)
    return _api_pod(tree)._replace(started_wall=STARTED, containers=containers)


def _without_processes(root: Path) -> None:
    """Nothing can be asked of any process."""
    for pid in range(1000, 1100):
        shutil.rmtree(root / f"proc/{pid}", ignore_errors=True)


@pytest.mark.parametrize("logs", [True, False])
def test_of_a_pod_that_the_api_tells_of_no_process_is_asked(tmp_path: Path, logs: bool) -> None:
    pod = TreePod("a/pod", request=GI, containers=(TreeContainer("x", 3), TreeContainer("y", 2)), logs=logs)
    root = write_node(tmp_path, Node(pods=(pod,)))
    _without_processes(tmp_path)
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
        [view] = sampler.sample([_running(pod)], 1.0).pods
    usage = _usage(view)
    assert (usage.process_count, usage.started_at) == (5, 100_000.0 - 3600.0)
    assert {container.name for container in usage.containers} == {"x", "y"}
    assert usage.memory_request_estimate is None


@pytest.mark.parametrize("view", ["lost", "without the pod", "without its start"])
def test_when_the_api_tells_of_a_pod_no_more_its_processes_are_asked_at_once(tmp_path: Path, view: str) -> None:
    pod, other = TreePod("a/pod", request=GI, started_s_ago=100.0), TreePod("a/other")
    root = write_node(tmp_path, Node(pods=(pod, other)))
    known, now = [_running(pod), _running(other)], 100_000.0
    then = {"lost": None, "without the pod": known[1:], "without its start": [known[0]._replace(started_wall=None)]}
    with Sampler(
        open_host(root),
        SamplingConfig(),
        node_name="n",
        boottime=lambda: now,
        wall=lambda: now + STARTED + 3600.0 - 100_000.0,
        pod_limits=False,
    ) as sampler:
        for _ in range(3):
            now += 1.0
            before = _usage(sampler.sample(known, now, fresh=False).pods[0])
        assert (before.started_at, before.memory_request_estimate) == (100_000.0 - 3600.0, None)
        now += 1.0
        after = {each.pod.cgroup_uid: _usage(each) for each in sampler.sample(then[view], now, fresh=False).pods}
        asked = after[pod.cgroup_uid]
        assert asked.started_at == 100_000.0 - 100.0
        assert asked.memory_request_estimate == pytest.approx(GI, abs=8 * GI // 1000)
        assert asked.process_count == 1


def test_the_limit_of_a_pod_that_the_api_tells_of_is_read_only_for_who_needs_it(tmp_path: Path) -> None:
    pod, stranger = (TreePod(f"a/{name}", QOSClass.GUARANTEED, request=100 * MI) for name in ("pod", "stranger"))
    root = write_node(tmp_path, Node(pods=(pod, stranger)))
    limits = {}
    for needed in (True, False):
        with Sampler(open_host(root), SamplingConfig(), node_name="n", pod_limits=needed) as sampler:
            limits[needed] = {view.pod.name: _usage(view).memory_limit for view in sampler.sample([_running(pod)]).pods}
            if not needed:
                assert {_usage(view).memory_limit for view in sampler.sample(fresh=False).pods} == {100 * MI}
    assert limits == {
        True: {"pod": 100 * MI, "stranger": 100 * MI},
        False: {"pod": None, "stranger": 100 * MI},
    }


def test_a_container_that_the_api_does_not_know_yet_is_not_taken_for_the_sandbox(tmp_path: Path) -> None:
    """A runtime without sandboxes has just made the second container again; nobody names it."""
    old, new = TreeContainer("old"), TreeContainer("new", processes=4)
    pod = TreePod("a/pod", containers=(TreeContainer("x"), new), sandbox=False, logs=False)
    known = _running(pod._replace(containers=(TreeContainer("x"), old)))
    with Sampler(open_host(write_node(tmp_path, Node(pods=(pod,)))), SamplingConfig(), node_name="n") as sampler:
        [view] = sampler.sample([known]).pods
    assert _usage(view).process_count == 5


def test_what_was_taken_for_the_sandbox_is_looked_at_again_when_a_log_link_names_it(tmp_path: Path) -> None:
    first, second = TreeContainer("first"), TreeContainer("second", processes=4)
    pod = TreePod("a/pod", containers=(first, second), sandbox=False, logs=False)
    known = _running(pod)._replace(containers=(Container("first", container_id=container_id(pod, first)),))
    root, now = write_node(tmp_path, Node(pods=(pod,))), 100_000.0
    with Sampler(open_host(root), SamplingConfig(), node_name="n", boottime=lambda: now) as sampler:
        [view] = sampler.sample([known], fresh=False).pods
        assert _usage(view).process_count == 1, "as far as anybody could tell"
        links = tmp_path / "var/log/containers"
        links.mkdir(parents=True, exist_ok=True)
        (links / f"pod_a_second-{container_id(pod, second)}.log").symlink_to("nowhere")
        now += 30.0
        assert _usage(sampler.sample([known], fresh=False).pods[0]).process_count == 5


@pytest.mark.parametrize(
    ("found", "names", "containers", "ephemeral", "sandbox"),
    [
        ("sa", "", "a", False, "s"),
        ("sab", "", "ab", False, "s"),
        ("sab", "b", "ab", False, "s"),
        ("sa", "s", "a", False, None),  # a log link names it
        ("a", "", "a", False, None),  # no sandbox
        ("sn", "", "a", False, None),  # a new one that the API does not have yet
        ("sna", "", "a", False, None),  # two without a name
        ("san", "n", "a", False, "s"),
        ("sa", "", "ab", False, None),  # one of the two does not run
        ("sa", "", "a-", False, None),  # one was never made
        ("sa", "", "a", True, None),
        ("s", "", "", False, None),
    ],
)
def test_the_sandbox_is_told_where_nobody_else_can_be_without_a_name(
    found: str, names: str, containers: str, ephemeral: bool, sandbox: str | None
) -> None:
    known = tuple(Container(name, container_id="" if name == "-" else name) for name in containers)
    pod = _api_pod(TreePod("a/b"))._replace(containers=known, ephemeral=ephemeral)
    assert certain_sandbox(list(found), dict.fromkeys(names, "named"), pod) == sandbox


def test_an_init_container_that_is_through_does_not_hide_the_sandbox() -> None:
    known = (Container("a", container_id="a"), Container("i", ContainerKind.INIT, container_id="i"))
    pod = _api_pod(TreePod("a/b"))._replace(containers=known)
    assert certain_sandbox(["s", "a"], {}, pod) == "s"
    assert certain_sandbox(["s", "a", "i"], {}, pod) == "s"
    sidecar = pod._replace(containers=(known[0], known[1]._replace(kind=ContainerKind.SIDECAR)))
    assert certain_sandbox(["s", "a"], {}, sidecar) is None


def test_a_start_that_cannot_be_in_this_boot_is_not_believed() -> None:
    pod = _api_pod(TreePod("a/b"))
    for wall, start in ((1000.0, 0.0), (1500.0, 500.0), (999.0, None), (1501.0, None), (None, None)):
        known = api_pod_facts([pod._replace(started_wall=wall)], now=500.0, wall_offset=1000.0, before={})
        assert [each.started_at for each in known.values()] == ([] if start is None else [start])


def test_a_start_stays_where_it_was_when_the_wall_clock_jumps() -> None:
    pod = _api_pod(TreePod("a/b"))._replace(started_wall=1300.0)
    first = api_pod_facts([pod], now=500.0, wall_offset=1000.0, before={})
    newer = pod._replace(priority=7)
    [kept] = api_pod_facts([newer], now=510.0, wall_offset=0.0, before=first).values()
    assert (kept.started_at, kept.pod) == (300.0, newer)
    [again] = api_pod_facts([pod._replace(started_wall=1400.0)], now=510.0, wall_offset=1000.0, before=first).values()
    assert again.started_at == 400.0


# --- join


def test_a_mirror_pod_has_the_usage_of_the_cgroup_with_its_config_hash(tmp_path: Path) -> None:
    static = TreePod("kube-system/etcd-n", uid=STATIC)
    usages = [_usage(view) for view in _sample(write_node(tmp_path, Node(pods=(static,)))).pods]
    views = join_pods(usages, [_api_pod(static, uid="mirror-uid")], names={}, wall_offset=0.0).views
    assert [(view.pod.uid, view.usage) for view in views] == [("mirror-uid", usages[0])]


def test_every_pod_that_either_side_knows_is_there_once(tmp_path: Path) -> None:
    both, unknown, starting = TreePod("a/both"), TreePod("a/unknown"), TreePod("a/starting")
    root = write_node(tmp_path, Node(pods=(both, unknown)))
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
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
    views = join_pods(usages, [_api_pod(pod)._replace(containers=(known,))], names={}, wall_offset=0.0).views
    assert [container.name for container in _usage(views[0]).containers] == ["web"]

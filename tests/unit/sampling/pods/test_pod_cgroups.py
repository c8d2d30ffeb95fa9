"""The pod cgroups below kubepods, in each driver's tree and with a system partition."""

import errno
import os
from pathlib import Path

import pytest

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import QOSClass
from nodeagent.sampling.hostfs import cgroups, processes
from nodeagent.sampling.hostfs.host import Host, Unreadable, open_host
from nodeagent.sampling.pods import pod_cgroups
from nodeagent.sampling.sampler import Sampler
from tests.support.trees import GI, MI, Node, TreePod, pod_cgroup, write_node

PODS = (
    TreePod("a/guaranteed", QOSClass.GUARANTEED, request=100 * MI),
    TreePod("a/burstable"),
    TreePod("a/besteffort", QOSClass.BEST_EFFORT),
    TreePod("kube-system/guaranteed", QOSClass.GUARANTEED, request=100 * MI, system=True),
    TreePod("kube-system/burstable", request=1 * GI, system=True),
    TreePod("kube-system/besteffort", QOSClass.BEST_EFFORT, system=True),
)
LAYOUTS = [(version, systemd, root) for version in ("v1", "v2") for systemd in (True, False) for root in ("", "/a-b")]


@pytest.mark.parametrize(("version", "systemd", "root"), LAYOUTS)
def test_pods_of_the_system_partition_are_sampled_with_their_qos_class(
    tmp_path: Path, version: str, systemd: bool, root: str
) -> None:
    node = Node(version, systemd, root, pods=PODS)
    with Sampler(open_host(write_node(tmp_path, node)), SamplingConfig(), node_name="n") as sampler:
        views = {view.pod.key: view.usage for view in sampler.sample().pods}
    assert views.keys() == {pod.key for pod in PODS}
    for pod in PODS:
        usage = views[pod.key]
        assert usage is not None
        assert usage.cgroup == pod_cgroup(node, pod)
        assert (usage.qos_class, usage.system_partition) == (pod.qos, pod.system)
        assert usage.memory_working_set == pod.working_set


@pytest.mark.parametrize(
    ("systemd", "path"),
    [
        (False, "/kubepods/system/burstable/pod"),
        (True, "/kubepods.slice/kubepods-system.slice/kubepods-system-burstable.slice/kubepods-system-burstable-pod"),
    ],
)
def test_the_tree_of_a_system_partition_is_the_one_of_the_enhancement(tmp_path: Path, systemd: bool, path: str) -> None:
    host = open_host(write_node(tmp_path, Node(systemd=systemd, pods=PODS)))
    hierarchy = cgroups.detect_hierarchy(host)
    kubepods, _ = cgroups.find_kubepods(host, hierarchy)
    assert kubepods is not None
    pods = {pod.uid: pod for pod in pod_cgroups.list_pods(host, hierarchy, kubepods).pods}
    found = pods[PODS[4].cgroup_uid]
    assert found.path.startswith(path)
    assert (found.qos, found.system) == (QOSClass.BURSTABLE, True)
    assert len({parent.path for parent in cgroups.pod_parents(host, f"{hierarchy.memory}{kubepods.path}")}) == 6


@pytest.mark.parametrize("systemd", [True, False])
def test_pods_of_the_system_partition_count_in_the_choice_of_kubepods(tmp_path: Path, systemd: bool) -> None:
    write_node(tmp_path, Node(systemd=not systemd, pods=PODS[:2]))
    host = open_host(write_node(tmp_path, Node(systemd=systemd, pods=PODS[3:])))
    found, _ = cgroups.find_kubepods(host, cgroups.detect_hierarchy(host))
    assert found is not None
    assert found.systemd is systemd
    assert "has 3 pods" in found.why


@pytest.mark.parametrize("systemd", [True, False])
def test_a_process_of_the_system_partition_belongs_to_its_pod(tmp_path: Path, systemd: bool) -> None:
    node = Node(systemd=systemd, pods=PODS)
    host = open_host(write_node(tmp_path, node))
    for pid, pod in enumerate(PODS, 50):
        (tmp_path / f"proc/{pid}").mkdir()
        (tmp_path / f"proc/{pid}/cgroup").write_text(f"0::{pod_cgroup(node, pod)}/container\n")
        assert processes.pod_uid_of_process(host, pid) == pod.cgroup_uid


@pytest.mark.parametrize("systemd", [True, False])
def test_other_directories_are_ignored(tmp_path: Path, systemd: bool) -> None:
    node = Node(systemd=systemd, pods=PODS)
    root = write_node(tmp_path, node)
    kubepods = next((tmp_path / "sys/fs/cgroup").glob("kubepods*"))
    inner = PODS[0].cgroup_uid.replace("-", "_") if systemd else PODS[0].cgroup_uid
    strange = f"kubepods-other-pod{inner}.slice" if systemd else f"pod{inner}"
    system = next(path for path in kubepods.iterdir() if "system" in path.name)
    for parent in (kubepods, system):
        (parent / "other" / strange).mkdir(parents=True)
        (parent / "system.slice" / strange).mkdir(parents=True)
    (system / system.name / strange).mkdir(parents=True)
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
        assert len(sampler.sample().pods) == len(PODS)


def test_a_system_partition_that_appears_and_goes_is_followed(tmp_path: Path) -> None:
    times = iter([100.0, 101.0, 102.0])
    root = write_node(tmp_path, Node(pods=PODS[:3]))
    with Sampler(open_host(root), SamplingConfig(), node_name="n", boottime=times.__next__) as sampler:
        counts = [len(sampler.sample(fresh=False).pods)]
        write_node(tmp_path, Node(pods=PODS))
        counts.append(len(sampler.sample(fresh=False).pods))
        write_node(tmp_path, Node(pods=PODS[3:]))
        counts.append(len(sampler.sample(fresh=False).pods))
    assert counts == [3, 6, 3]


class FailingHost(Host):
    """A kernel that fails to list one directory."""

    def __init__(self, root: str, name: str, number: int) -> None:
        super().__init__(root)
        self._name, self._number = name, number

    def subdirectories(self, path: str) -> list[tuple[str, int]]:
        if path.endswith(self._name):
            raise Unreadable(path, self._number, os.strerror(self._number))
        return super().subdirectories(path)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO])
def test_a_qos_class_that_cannot_be_listed_is_not_taken_for_one_without_pods(tmp_path: Path, number: int) -> None:
    host = FailingHost(write_node(tmp_path, Node(pods=PODS)), "burstable.slice", number)
    hierarchy = cgroups.detect_hierarchy(host)
    kubepods, _ = cgroups.find_kubepods(host, hierarchy)
    assert kubepods is not None
    with pytest.raises(Unreadable):
        pod_cgroups.list_pods(host, hierarchy, kubepods)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENODEV])
def test_a_qos_class_that_was_removed_meanwhile_has_no_pods(tmp_path: Path, number: int) -> None:
    host = FailingHost(write_node(tmp_path, Node(pods=PODS[:3])), "burstable.slice", number)
    hierarchy = cgroups.detect_hierarchy(host)
    kubepods, _ = cgroups.find_kubepods(host, hierarchy)
    assert kubepods is not None
    assert len(pod_cgroups.list_pods(host, hierarchy, kubepods).pods) == 2

"""Page cache that memory.min protects is not available, as far as the protection is effective."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import MemoryModel, NodeSnapshot, QOSClass, Signal
from nodeagent.sampling.hostfs import cgroups
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.pods import protected_cache
from nodeagent.sampling.pods.protected_cache import ProtectedPod
from nodeagent.sampling.sampler import Sampler
from tests.support.trees import GI, MI, Node, TreePod, cgroup_path, pod_cgroup, write_node

GUARANTEED = TreePod(
    "a/guaranteed",
    QOSClass.GUARANTEED,
    working_set=900 * MI,
    active_file=600 * MI,
    inactive_file=100 * MI,
    request=GI,
    memory_min=GI,
)
"""Uses 1,000 MiB, 700 of them page cache: all of it is below its request."""
NODE = Node(mem_available=3 * GI, pods=(GUARANTEED,))


def _set_minimum(root: Path, node: Node, amount: str, *parts: str) -> None:
    path = cgroup_path(node.cgroup_root, "kubepods", *parts, systemd=node.systemd)
    (root / f"sys/fs/cgroup{path}/memory.min").write_text(amount)


def _set_usage(root: Path, node: Node, amount: int, *parts: str) -> None:
    path = cgroup_path(node.cgroup_root, "kubepods", *parts, systemd=node.systemd)
    (root / f"sys/fs/cgroup{path}/memory.current").write_text(f"{amount}\n")


def _sample(root: str) -> NodeSnapshot:
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
        return sampler.sample()


def _protected(root: Path, node: Node, kubepods: str = "4294967296\n") -> int:
    write_node(root, node)
    _set_minimum(root, node, kubepods)
    return _sample(str(root)).protected_cache


@pytest.mark.parametrize("systemd", [True, False])
@pytest.mark.parametrize("system", [True, False])
def test_the_page_cache_of_a_pod_below_its_request_is_not_available(
    tmp_path: Path, systemd: bool, system: bool
) -> None:
    node = NODE._replace(systemd=systemd, pods=(GUARANTEED._replace(system=system),))
    write_node(tmp_path, node)
    _set_minimum(tmp_path, node, "4294967296\n")
    if system:
        _set_minimum(tmp_path, node, "4294967296\n", "system")
        _set_usage(tmp_path, node, GI, "system")
    snapshot = _sample(str(tmp_path))
    observation = snapshot.observe(Signal.MEMORY, MemoryModel.MEM_AVAILABLE)
    assert snapshot.protected_cache == 700 * MI
    assert observation.available == 3 * GI - 700 * MI
    assert observation.source.endswith("MemAvailable - page cache below memory.min")
    assert snapshot.memory is not None
    assert snapshot.memory.mem_available == 3 * GI
    allocatable = snapshot.observe(Signal.ALLOCATABLE_MEMORY, MemoryModel.MEM_AVAILABLE)
    assert allocatable.available == 7 * GI - 1000 * MI + 700 * MI - 700 * MI


def test_node_samples_between_full_samples_and_after_a_change_agree(tmp_path: Path) -> None:
    root = write_node(tmp_path, NODE)
    _set_minimum(tmp_path, NODE, "max\n")
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
        assert sampler.sample_node().mem_available.available == 3 * GI, "no pod was read yet"
        assert sampler.sample().mem_available.available == 3 * GI - 700 * MI
        assert sampler.sample_node().mem_available.available == 3 * GI - 700 * MI
        write_node(tmp_path, NODE._replace(pods=(TreePod("a/other"),)))
        after = sampler.sample()
        assert (after.mem_available.available, after.protected_cache) == (3 * GI, 0)
        assert after.mem_available.source == "/proc/meminfo MemAvailable"
        assert sampler.sample_node().mem_available.available == 3 * GI


def test_page_cache_that_a_heap_displaced_at_a_level_usage_is_not_subtracted_twice(tmp_path: Path) -> None:
    root, now = write_node(tmp_path, NODE), 100.0
    _set_minimum(tmp_path, NODE, "max\n")
    with Sampler(open_host(root), SamplingConfig(), node_name="n", boottime=lambda: now) as sampler:
        assert sampler.sample(fresh=False).mem_available.available == 3 * GI - 700 * MI
        displaced = GUARANTEED._replace(working_set=1000 * MI, active_file=0, inactive_file=0)
        write_node(tmp_path, NODE._replace(mem_available=3 * GI - 700 * MI, pods=(displaced,)))
        _set_minimum(tmp_path, NODE, "max\n")
        now += 0.02
        assert sampler.sample(fresh=False).mem_available.available == 3 * GI - 700 * MI
        assert sampler.sample_node().mem_available.available == 3 * GI - 700 * MI


def test_more_protected_cache_than_is_available_leaves_nothing(tmp_path: Path) -> None:
    write_node(tmp_path, NODE._replace(mem_available=500 * MI))
    _set_minimum(tmp_path, NODE, "max\n")
    assert _sample(str(tmp_path)).mem_available.available == 0


def test_other_memory_uses_up_the_protection_first(tmp_path: Path) -> None:
    pod = GUARANTEED._replace(memory_min=500 * MI)
    assert _protected(tmp_path, NODE._replace(pods=(pod,))) == 200 * MI
    assert _protected(tmp_path, NODE._replace(pods=(pod._replace(memory_min=300 * MI),))) == 0
    assert _protected(tmp_path, NODE._replace(pods=(pod._replace(memory_min=0),))) == 0


def test_memory_low_is_available_when_nothing_else_is_left(tmp_path: Path) -> None:
    assert _protected(tmp_path, NODE._replace(pods=(GUARANTEED._replace(memory_min=0, memory_low=GI),))) == 0


@pytest.mark.parametrize("kubepods", ["0\n", "", "garbage\n", "-1\n"])
def test_a_protection_that_kubepods_does_not_have_or_that_is_not_readable_counts_nothing(
    tmp_path: Path, kubepods: str
) -> None:
    """A kubelet whose feature gate was switched off resets that of kubepods alone."""
    assert _protected(tmp_path, NODE, kubepods) == 0


def test_pods_that_claim_more_than_kubepods_has_share_it(tmp_path: Path) -> None:
    """Each claims 1,000 MiB of 1,500: 750 are effective, 450 of them for page cache."""
    pods = (GUARANTEED, GUARANTEED._replace(key="a/second"))
    assert _protected(tmp_path, NODE._replace(pods=pods), f"{1500 * MI}\n") == 2 * 450 * MI


def test_a_burstable_pod_is_protected_as_far_as_its_class_is(tmp_path: Path) -> None:
    node = NODE._replace(pods=(GUARANTEED._replace(qos=QOSClass.BURSTABLE),))
    assert _protected(tmp_path, node) == 0
    _set_minimum(tmp_path, node, "max\n", "burstable")
    _set_usage(tmp_path, node, 800 * MI, "burstable")
    assert _sample(str(tmp_path)).protected_cache == 500 * MI


def test_a_cgroup_above_kubepods_limits_the_protection_too(tmp_path: Path) -> None:
    node = NODE._replace(cgroup_root="/kubelet", systemd=False)
    assert _protected(tmp_path, node) == 0
    (tmp_path / "sys/fs/cgroup/kubelet/memory.min").write_text(f"{900 * MI}\n")
    (tmp_path / "sys/fs/cgroup/kubelet/memory.current").write_text(f"{2 * GI}\n")
    assert _sample(str(tmp_path)).protected_cache == 600 * MI
    (tmp_path / "sys/fs/cgroup/memory.min").write_text("0\n")
    assert _sample(str(tmp_path)).protected_cache == 0


@pytest.mark.parametrize("version", ["v1", "hybrid"])
def test_v1_has_no_protection(tmp_path: Path, version: str) -> None:
    snapshot = _sample(write_node(tmp_path, NODE._replace(cgroup=version)))
    assert (snapshot.protected_cache, snapshot.mem_available.available) == (0, 3 * GI)


AMOUNT = st.integers(0, 4 * GI)


@given(st.lists(st.tuples(AMOUNT, AMOUNT, AMOUNT), max_size=4), st.integers(0, 6 * GI))
def test_no_more_is_protected_than_the_pods_cache_and_kubepods_has(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[tuple[int, int, int]], minimum: int
) -> None:
    root = tmp_path_factory.mktemp("node")
    pods = tuple(TreePod(f"a/p{index}", QOSClass.GUARANTEED) for index in range(len(numbers)))
    node = Node(pods=pods)
    host = open_host(write_node(root, node))
    _set_minimum(root, node, f"{minimum}\n")
    _set_usage(root, node, 5 * GI)
    hierarchy = cgroups.detect_hierarchy(host)
    kubepods, _ = cgroups.find_kubepods(host, hierarchy)
    assert kubepods is not None
    read = [
        ProtectedPod(pod_cgroup(node, pod), usage, min(cache, usage), claim)
        for pod, (usage, cache, claim) in zip(pods, numbers, strict=True)
    ]
    amount = protected_cache.protected_cache(host, hierarchy, kubepods, read)
    assert 0 <= amount <= min(minimum, 5 * GI, sum(min(pod.file_cache, pod.minimum) for pod in read))

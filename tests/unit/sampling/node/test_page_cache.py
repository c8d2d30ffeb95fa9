"""Whether page cache of pods can be reclaimed, and the figure that ends the reclaim."""

from pathlib import Path

import pytest

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import Signal
from nodeagent.sampling.hostfs import cgroups
from nodeagent.sampling.hostfs.host import Host, open_host
from nodeagent.sampling.node import page_cache
from nodeagent.sampling.sampler import Sampler
from tests.support import mounts
from tests.support.trees import GI, MI, Node, TreePod, write_node

PODS = (TreePod("shop/web", working_set=200 * MI),)
RECLAIM = "sys/fs/cgroup/kubepods.slice/memory.reclaim"


def blocked(root: Path) -> str:
    """Of the tree as a live host: a recording is never written to."""
    host = Host(str(root))
    hierarchy = cgroups.detect_hierarchy(host)
    kubepods, _ = cgroups.find_kubepods(host, hierarchy)
    return page_cache.reclaim_blocked(host, hierarchy, kubepods)


def test_a_writable_memory_reclaim_is_enough(tmp_path: Path) -> None:
    write_node(tmp_path, Node(pods=PODS))
    (tmp_path / RECLAIM).touch()
    assert blocked(tmp_path) == ""


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("v1", "memory.reclaim needs cgroup v2, and the memory controller of this host is on v1"),
        ("hybrid", "memory.reclaim needs cgroup v2, and the memory controller of this host is on v1"),
        ("v2", "this kernel has no memory.reclaim, which needs Linux 5.19"),
    ],
)
def test_the_reason_names_what_is_missing(tmp_path: Path, version: str, reason: str) -> None:
    write_node(tmp_path, Node(cgroup=version, pods=PODS))
    assert blocked(tmp_path) == reason


@mounts.root_only
def test_read_only_cgroups_are_named_with_the_remedy(tmp_path: Path) -> None:
    write_node(tmp_path / "node", Node(pods=PODS))
    (tmp_path / "node" / RECLAIM).touch()
    with mounts.mounted(tmp_path / "host", "--bind", "-o", "ro", tmp_path / "node"):
        reason = blocked(tmp_path / "host")
    assert reason == (
        "cgroups are mounted read-only: apply examples/daemonset-brake.yaml (DaemonSet) or "
        "systemd/drop-ins/brake.conf (unit)"
    )


def test_a_node_without_pods_and_a_recording_have_no_reason(tmp_path: Path) -> None:
    write_node(tmp_path, Node(kubepods=False))
    assert blocked(tmp_path) == ""
    root = write_node(tmp_path / "recorded", Node(pods=PODS))
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
        assert sampler.sample().page_cache_blocked == ""


@pytest.mark.parametrize("version", ["v2", "v1"])
@pytest.mark.parametrize("signal", [Signal.MEMORY, Signal.ALLOCATABLE_MEMORY])
def test_the_reader_reads_what_a_sample_reads(tmp_path: Path, version: str, signal: Signal) -> None:
    root = write_node(tmp_path, Node(cgroup=version, pods=PODS, memory_available=3 * GI))
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
        read = sampler.working_set_reader(signal)
        assert read() == sampler.sample().observations[signal].available is not None
        write_node(tmp_path, Node(cgroup=version, pods=PODS, memory_available=2 * GI))
        assert read() == sampler.sample().observations[signal].available


def test_a_figure_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node(pods=PODS))
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
        read = sampler.working_set_reader(Signal.MEMORY)
        (tmp_path / "sys/fs/cgroup/memory.stat").unlink()
        assert read() is None

"""What a pod holds of a file system depends on the layout, and what it holds of memory on the figure that is short."""

import pytest

from nodeagent.config.schema import RankingConfig
from nodeagent.model import DiskLayout, DiskUsage, MemoryModel, PodView, Signal
from nodeagent.policy import engine, pod_usage, state
from tests.support.nodes import GI, MI, NOW, config, hard, snapshot, view


@pytest.mark.parametrize(
    ("layout", "signal", "expected"),
    [
        (DiskLayout.SINGLE, Signal.NODEFS, 111),
        (DiskLayout.SINGLE, Signal.IMAGEFS, 111),
        (DiskLayout.SINGLE, Signal.CONTAINERFS, 111),
        (DiskLayout.DEDICATED_IMAGEFS, Signal.NODEFS, 110),
        (DiskLayout.DEDICATED_IMAGEFS, Signal.IMAGEFS, 1),
        (DiskLayout.DEDICATED_IMAGEFS, Signal.CONTAINERFS, 1),
        (DiskLayout.SPLIT, Signal.NODEFS, 111),
        (DiskLayout.SPLIT, Signal.IMAGEFS, 0),
        (DiskLayout.SPLIT, Signal.CONTAINERFS, 111),
        (DiskLayout.UNKNOWN, Signal.NODEFS, None),
    ],
)
def test_measured_disk_depends_on_the_layout(layout: DiskLayout, signal: Signal, expected: int | None) -> None:
    disk_usage = DiskUsage(rootfs_bytes=1, logs_bytes=10, volumes_bytes=100)
    assert pod_usage.disk_usage(disk_usage, signal, layout) == expected


@pytest.mark.parametrize(
    ("layout", "kubelet", "expected"),
    [
        (DiskLayout.SINGLE, False, 101),
        (DiskLayout.DEDICATED_IMAGEFS, False, 100),
        (DiskLayout.SPLIT, False, 101),
        (DiskLayout.SINGLE, True, 111),
    ],
)
def test_logs_on_a_file_system_of_their_own_are_freed_nowhere_else(
    layout: DiskLayout, kubelet: bool, expected: int
) -> None:
    disk = DiskUsage(rootfs_bytes=1, logs_bytes=10, volumes_bytes=100, logs_on_nodefs=False)
    assert pod_usage.disk_usage(disk, Signal.NODEFS, layout, kubelet=kubelet) == expected
    inodes = DiskUsage(rootfs_inodes=1, logs_inodes=10, volumes_inodes=100, logs_on_nodefs=False)
    assert pod_usage.disk_usage(inodes, Signal.NODEFS_INODES, layout, kubelet=kubelet) == expected


def test_disk_usage_with_an_unmeasured_part_is_the_sum_of_the_rest() -> None:
    assert pod_usage.disk_usage(DiskUsage(logs_bytes=10), Signal.NODEFS, DiskLayout.SINGLE) == 10
    assert pod_usage.disk_usage(DiskUsage(), Signal.NODEFS, DiskLayout.SINGLE) is None


def reader(name: str, *, kept: int | None) -> PodView:
    """It reads files: 7 GiB of its working set are page cache, except for what is `kept`."""
    return view(name, 7 * GI, usage_more={"memory_unreclaimable": kept})


@pytest.mark.parametrize(
    ("model", "kubelet", "kept", "usage"),
    [
        (MemoryModel.LOWER, False, 60 * MI, 60 * MI),
        (MemoryModel.MEM_AVAILABLE, False, 60 * MI, 60 * MI),
        (MemoryModel.LOWER, False, 9 * GI, 7 * GI),
        (MemoryModel.LOWER, False, None, 7 * GI),
        (MemoryModel.LOWER, False, -1, 7 * GI),
        (MemoryModel.WORKING_SET, False, 60 * MI, 7 * GI),
        (MemoryModel.WORKING_SET, True, 60 * MI, 7 * GI),
    ],
)
def test_page_cache_counts_only_where_the_working_set_decides(
    model: MemoryModel, kubelet: bool, kept: int | None, usage: int
) -> None:
    settings = config(hard(memory_model=model), ranking=RankingConfig(kubelet=kubelet))
    rule = pod_usage.memory_rule(snapshot(), config=settings)
    pod = reader("files", kept=kept)
    assert pod.usage is not None
    assert pod_usage.memory_usage(pod.usage, rule) == usage


def test_a_pod_that_reads_files_is_not_evicted_for_the_memory_of_another() -> None:
    node = snapshot(reader("files", kept=60 * MI), view("hog", 2 * GI), available={Signal.MEMORY: 100 * MI})
    settings = config(hard(memory_model=MemoryModel.LOWER))
    plan, _ = engine.decide(node, state.initial("test", now=NOW), now=NOW, config=settings)
    assert [victim.pod.name for victim in plan.victims] == ["hog"]
    assert [ranked.view.pod.name for ranked in plan.ranking] == ["hog", "files"]

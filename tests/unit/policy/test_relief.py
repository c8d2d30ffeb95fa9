"""What evictions free, and the least harmful set that covers a deficit."""

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.config.schema import ReliefConfig
from nodeagent.model import (
    Amount,
    CgroupUsage,
    DiskLayout,
    DiskUsage,
    DiskUsageQuality,
    HostDirectory,
    Signal,
    UnattributedDisk,
)
from nodeagent.policy import relief
from tests.support.nodes import CAPACITY, GI, MI, NOW, pod, snapshot, usage, view

# --- what an eviction frees -------------------------------------------------------------------------------------------


def test_clean_page_cache_is_no_relief() -> None:
    hog = usage(pod("cache-hog"), 4 * GI, memory_unreclaimable=20 * MI)
    assert relief.predicted_relief(hog, Signal.MEMORY, DiskLayout.SINGLE) == 20 * MI


def test_half_of_the_working_set_counts_where_memory_stat_could_not_be_read() -> None:
    unread = usage(pod("a"), 4 * GI, memory_unreclaimable=None)
    assert relief.predicted_relief(unread, Signal.MEMORY, DiskLayout.SINGLE) == 2 * GI


def test_the_relief_of_pids_is_threads() -> None:
    of = usage(pod("a"), 1, process_count=3, thread_count=400)
    assert relief.predicted_relief(of, Signal.PID, DiskLayout.SINGLE) == 400
    assert relief.predicted_relief(of._replace(thread_count=None), Signal.PID, DiskLayout.SINGLE) == 3


def test_the_relief_of_disk_is_on_its_own_file_system() -> None:
    of = usage(pod("a"), 1, disk=DiskUsage(rootfs_bytes=5, logs_bytes=10, volumes_bytes=20))
    assert relief.predicted_relief(of, Signal.IMAGEFS, DiskLayout.DEDICATED_IMAGEFS) == 5
    assert relief.predicted_relief(of, Signal.NODEFS, DiskLayout.DEDICATED_IMAGEFS) == 30


@pytest.mark.parametrize("bad", [None, -1, float("nan"), 1 << 63, "4Gi", True])
def test_an_implausible_number_is_no_relief(bad: object) -> None:
    of = usage(pod("a"), None, memory_unreclaimable=bad)
    assert relief.predicted_relief(of, Signal.MEMORY, DiskLayout.SINGLE, limit=16 * GI) is None


def test_the_minimum_relief_is_a_share_of_the_deficit_or_a_quantity_and_at_least_one() -> None:
    assert relief.minimum_relief(ReliefConfig(), GI) == GI // 100
    assert relief.minimum_relief(ReliefConfig(minimum_relief=Amount(MI, None, "1Mi")), GI) == MI
    assert relief.minimum_relief(ReliefConfig(minimum_relief=Amount(0, None, "0")), GI) == 1
    assert relief.minimum_relief(ReliefConfig(), 5) == 1


# --- the set ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reliefs", "deficit", "expected"),
    [
        ([10], 10, (0,)),
        ([10, 10], 10, (0,)),
        ([6, 1, 5], 10, (0, 2)),  # the middle one is superfluous
        ([4, 5, 6], 10, (0, 2)),  # two suffice; of all pairs that cover, the first in order
        ([1, 2, 100, 900], 100, (2,)),  # the third makes the small ones superfluous; no pod behind it is selected
        ([50, 50, 1000], 100, (0, 1)),  # the large one behind the cut is left alone
    ],
)
def test_the_least_harmful_set(reliefs: list[int], deficit: int, expected: tuple[int, ...]) -> None:
    assert relief.least_harmful_set(reliefs, deficit, max_pods=5) == expected


def test_if_more_pods_are_needed_than_allowed_the_largest_of_them_are_selected() -> None:
    assert relief.least_harmful_set([3, 1, 2, 9, 50], 15, max_pods=2) == (0, 3)


some_reliefs = st.lists(st.integers(1, 30), min_size=1, max_size=8)


@settings(deadline=None)
@given(some_reliefs, st.integers(1, 120), st.integers(1, 8))
def test_the_set_is_minimal_and_first_by_comparison_with_every_other_set(
    reliefs: list[int], deficit: int, most: int
) -> None:
    chosen = relief.least_harmful_set(reliefs, deficit, max_pods=most)
    prefix = next((size for size in range(1, len(reliefs) + 1) if sum(reliefs[:size]) >= deficit), None)
    assert list(chosen) == sorted(set(chosen))
    assert len(chosen) <= most
    if prefix is None:
        return
    covering = [
        indices
        for size in range(1, prefix + 1)
        for indices in combinations(range(prefix), size)
        if sum(reliefs[index] for index in indices) >= deficit
    ]
    smallest = min(len(indices) for indices in covering)
    if smallest <= most:
        assert chosen == min(indices for indices in covering if len(indices) == smallest)
        for dropped in chosen:
            assert sum(reliefs[index] for index in chosen if index != dropped) < deficit
    else:
        assert sorted(reliefs[index] for index in chosen) == sorted(reliefs[:prefix], reverse=True)[:most][::-1]


# --- the other holders ------------------------------------------------------------------------------------------------


def test_a_futile_refusal_lists_the_holders_of_memory_with_amounts() -> None:
    node = snapshot(
        view("small", 100 * MI),
        available={Signal.MEMORY: 200 * MI},
        cgroups=(CgroupUsage("/system.slice/db.service", 11 * GI, 40), CgroupUsage("/user.slice", GI, 3)),
    )
    assert node.memory is not None
    node = node._replace(memory=node.memory._replace(shmem=300 * MI, slab_unreclaimable=GI, hugetlb=2 * GI))
    refusal = relief.futility_refusal(Signal.MEMORY, deficit=GI, evictable=100 * MI, candidates=1, snapshot=node)
    assert refusal.code == "futile"
    for part in (
        "1Gi missing",
        "all 1 candidates would free 100Mi",
        "/system.slice/db.service 11Gi",
        "slab 1Gi",
        "hugepages 2Gi",
        "shmem 300Mi",
        "not attributed 3.71Gi",
    ):
        assert part in refusal.message


def test_a_futile_refusal_lists_how_much_disk_no_pod_holds() -> None:
    holder = view("a", usage_more={"disk": DiskUsage(rootfs_bytes=GI, logs_bytes=0, volumes_bytes=0)})
    node = snapshot(holder, available={Signal.NODEFS: CAPACITY[Signal.NODEFS] // 100})
    where = relief.other_holders(Signal.NODEFS, node)
    assert where == ("pods 1Gi", "not attributed to pods 98Gi")


def test_a_futile_refusal_does_not_count_unknown_usage_as_zero() -> None:
    node = snapshot(view("a"), available={Signal.NODEFS: CAPACITY[Signal.NODEFS] // 100})
    assert relief.other_holders(Signal.NODEFS, node) == ("99Gi in use, disk usage of pods unknown",)


def test_a_futile_refusal_lists_the_holders_of_processes() -> None:
    node = snapshot(view("a"), cgroups=(CgroupUsage("/system.slice/cron.service", None, 30_000),))
    assert relief.other_holders(Signal.PID, node) == ("/system.slice/cron.service 30000", "all pods 1")


@pytest.mark.parametrize("bad", [1e300, float("nan"), 1 << 63, -1, "4Gi"])
def test_a_futile_refusal_omits_implausible_directories_and_deleted_files(bad: Any) -> None:
    of = view(
        "a",
        usage_more={"disk": DiskUsage(GI, 1, 0, 0, 0, 0), "disk_usage_quality": DiskUsageQuality(NOW, True, (), bad)},
    )
    found = (HostDirectory("/absurd", bad, bad, True), HostDirectory("/var/log", GI, 9, False))
    rest = UnattributedDisk((Signal.NODEFS, Signal.NODEFS_INODES), 0, 0, 0, 0, found, NOW)
    node = snapshot(of, available={Signal.NODEFS: 0}, unattributed_disks=(rest,))
    assert relief.other_holders(Signal.NODEFS, node)[2:] == ("/var/log at least 1Gi",)
    assert relief.other_holders(Signal.NODEFS_INODES, node)[2:] == ("/var/log at least 9",)


@pytest.mark.parametrize("field", ["total", "shmem", "slab_unreclaimable", "hugetlb"])
def test_a_futile_refusal_omits_implausible_node_memory(field: str) -> None:
    node = snapshot(view("small", 100 * MI), available={Signal.MEMORY: 200 * MI})
    assert node.memory is not None
    absurd: dict[str, Any] = {field: 1e300}
    node = node._replace(memory=node.memory._replace(**absurd))
    assert relief.other_holders(Signal.MEMORY, node)[0] == "pods 100Mi"

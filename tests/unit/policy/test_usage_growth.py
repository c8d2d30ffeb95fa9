"""Growth of a pod is measured between kept samples that are far enough apart."""

from collections.abc import Mapping
from typing import Any

import pytest

from nodeagent.model import (
    DiskLayout,
    DiskUsage,
    DiskUsageQuality,
    PodView,
    Signal,
    WriteRate,
)
from nodeagent.policy import usage_growth
from tests.support.nodes import MI, NOW, snapshot, view


def processes(name: str, count: int, **more: Any) -> PodView:
    return view(name, usage_more={"process_count": count, "thread_count": count}, **more)


def test_growth_is_measured_over_at_least_half_the_sample_distance() -> None:
    growth = usage_growth.GrowthState()
    for second in range(8):
        growth = usage_growth.record_sample(growth, snapshot(processes("one", 100 + second), at=NOW + second))
    rate = usage_growth.growth_rate(growth, Signal.PID, DiskLayout.SINGLE, at=NOW + 8)
    now = processes("one", 108).usage
    assert rate(now, 108) == pytest.approx(1.0)


@pytest.mark.parametrize("ranked_by", [1, 160])
def test_growth_is_of_the_threads_also_where_the_order_counts_processes(ranked_by: int) -> None:
    growth = usage_growth.GrowthState()
    for second in (0, 6):
        leak = view("leak", usage_more={"process_count": 1, "thread_count": 100 + 5 * second})
        growth = usage_growth.record_sample(growth, snapshot(leak, at=NOW + second))
    now = view("leak", usage_more={"process_count": 1, "thread_count": 160}).usage
    assert usage_growth.certain_growth_rate(growth, Signal.PID, at=NOW + 12)(now, ranked_by) == pytest.approx(5.0)


def grown(name: str, mib_by_second: Mapping[int, int], *, at: int) -> float:
    """MiB a second by which the pod certainly grows at that second, after a sample in each of the others."""
    growth = usage_growth.GrowthState()
    for second, mib in mib_by_second.items():
        growth = usage_growth.record_sample(growth, snapshot(view(name, mib * MI), at=NOW + second))
    used = mib_by_second[at] * MI
    rate = usage_growth.certain_growth_rate(growth, Signal.MEMORY, at=NOW + at)
    return rate(view(name, used).usage, used) / MI


@pytest.mark.parametrize("at", [24, 27, 30])
def test_usage_that_swings_is_no_growth(at: int) -> None:
    sawtooth = {second: 800 + 20 * (second % 12) for second in range(0, at + 1, 3)}
    assert grown("collects-garbage", sawtooth, at=at) == 0
    leak = {second: 800 + 20 * second for second in range(0, at + 1, 3)}
    assert grown("leak", leak, at=at) == pytest.approx(20)


def test_a_pod_that_started_ten_seconds_ago_grows_since_then() -> None:
    growth = usage_growth.GrowthState()
    for second in range(0, 31, 5):
        young = [view("young", 10 * (second - 20) * MI)] if second >= 20 else []
        growth = usage_growth.record_sample(growth, snapshot(view("old", MI), *young, at=NOW + second))
    rate = usage_growth.certain_growth_rate(growth, Signal.MEMORY, at=NOW + 33)
    assert rate(view("young").usage, 130 * MI) == pytest.approx(10 * MI)
    assert rate(view("younger").usage, 130 * MI) == 0


def on_disk(
    name: str,
    mib: int,
    *,
    walked_at: float,
    wrote_mib: int = 0,
    writes_mib_per_s: float = 0.0,
    counted_at: float = NOW,
) -> PodView:
    """A pod whose writes are watched for ten seconds."""
    disk = DiskUsage(rootfs_bytes=mib * MI, logs_bytes=0, volumes_bytes=0)
    writing = WriteRate(writes_mib_per_s * MI, wrote_mib * MI, 10.0, counted_at)
    quality = DiskUsageQuality(walked_at, complete=True)
    return view(name, usage_more={"disk": disk, "disk_usage_quality": quality, "writing": writing})


@pytest.mark.parametrize(
    ("loss_mib_per_s", "expected"),
    [(20.0, [0.0, 20.0, 0.0]), (141.0, [10.0, 5.0, 0.0]), (None, [10.0, 5.0, 0.0])],
    ids=["writes explain the loss", "most of the loss is not written by pods", "loss unknown"],
)
def test_growth_on_a_disk_is_what_walks_and_writes_both_show(
    loss_mib_per_s: float | None, expected: list[float]
) -> None:
    """Between two walks one pod has written much and is idle since, one has begun ten seconds ago, and a database
    writes over what it holds."""
    before = snapshot(*[on_disk(name, 50, walked_at=NOW - 60.0) for name in ("idle", "filler", "database")])
    growth = usage_growth.record_sample(usage_growth.GrowthState(), before)
    now = snapshot(
        on_disk("idle", 650, walked_at=NOW),
        on_disk("filler", 350, walked_at=NOW, wrote_mib=200),
        on_disk("database", 50, walked_at=NOW, wrote_mib=500),
    )
    loss = None if loss_mib_per_s is None else loss_mib_per_s * MI
    rate = usage_growth.measured_growth_rate(growth, Signal.NODEFS, now, loss_per_s=loss)
    found = [rate(usage, usage.disk.rootfs_bytes) / MI for _, usage in now.pods if usage is not None]
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("counted_s_ago", "expected"), [(1.0, [0.0, 20.0]), (6.0, [100.0, 50.0])], ids=["new", "too old"]
)
def test_of_two_pods_that_have_grown_the_one_that_writes_now_counts_while_its_counters_are_new(
    counted_s_ago: float, expected: list[float]
) -> None:
    """One has written more between the last two walks and is idle since."""
    before = snapshot(*[on_disk(name, 50, walked_at=NOW - 6.0) for name in ("idle", "filler")])
    growth = usage_growth.record_sample(usage_growth.GrowthState(), before)
    counted_at = NOW - counted_s_ago
    now = snapshot(
        on_disk("idle", 650, walked_at=NOW, counted_at=counted_at),
        on_disk("filler", 350, walked_at=NOW, writes_mib_per_s=20.0, counted_at=counted_at),
    )
    rate = usage_growth.measured_growth_rate(growth, Signal.NODEFS, now, loss_per_s=25.0 * MI)
    found = [rate(usage, usage.disk.rootfs_bytes) / MI for _, usage in now.pods if usage is not None]
    assert found == pytest.approx(expected)


def with_files(name: str, files: int, *, walked_at: float) -> PodView:
    disk = DiskUsage(rootfs_inodes=files, logs_inodes=0, volumes_inodes=0)
    return view(name, usage_more={"disk": disk, "disk_usage_quality": DiskUsageQuality(walked_at, complete=True)})


@pytest.mark.parametrize(
    ("loss_per_s", "expected"),
    [(100.0, [0.0, 100.0]), (1000.0, [600 / 60.0, 330 / 60.0])],
    ids=["the last two walks explain the loss", "they do not"],
)
def test_the_last_two_walks_count_if_they_explain_the_loss(loss_per_s: float, expected: list[float]) -> None:
    growth = usage_growth.GrowthState()
    for seconds_ago, idle, filler in ((60.0, 0, 0), (3.0, 600, 30)):
        at = NOW - seconds_ago
        walked = snapshot(with_files("idle", idle, walked_at=at), with_files("filler", filler, walked_at=at), at=at)
        growth = usage_growth.record_sample(growth, walked)
    now = snapshot(with_files("idle", 600, walked_at=NOW), with_files("filler", 330, walked_at=NOW))
    rate = usage_growth.measured_growth_rate(growth, Signal.NODEFS_INODES, now, loss_per_s=loss_per_s)
    found = [rate(usage, usage.disk.rootfs_inodes) for _, usage in now.pods if usage is not None]
    assert found == pytest.approx(expected)

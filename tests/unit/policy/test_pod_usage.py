"""What a pod holds of a file system depends on the layout; an unmeasured part lowers the sum."""

import pytest

from nodeagent.model import (
    DiskLayout,
    DiskUsage,
    Signal,
)
from nodeagent.policy import pod_usage


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


def test_disk_usage_with_an_unmeasured_part_is_the_sum_of_the_rest() -> None:
    assert pod_usage.disk_usage(DiskUsage(logs_bytes=10), Signal.NODEFS, DiskLayout.SINGLE) == 10
    assert pod_usage.disk_usage(DiskUsage(), Signal.NODEFS, DiskLayout.SINGLE) is None

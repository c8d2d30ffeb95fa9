"""A path that cannot be counted to its end keeps its last complete usage for some minutes."""

import contextlib
import itertools
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.disk_trees import EMPTY_DIR, measure, meter, node, pod


@contextlib.contextmanager
def few_descriptors(number: int) -> Iterator[None]:
    """This process can open only this many files more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(fd) for fd in os.listdir("/proc/self/fd")}
    free = (fd for fd in itertools.count() if fd not in used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, number, None)), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_walk_that_cannot_read_a_part_does_not_replace_a_larger_complete_usage(tmp_path: Path) -> None:
    path = node(tmp_path) / f"var/lib/kubelet/pods/u1/{EMPTY_DIR}/v"
    deep = path.joinpath(*["d"] * 40)
    deep.mkdir(parents=True)
    (deep / "file").write_bytes(b"x" * 1_000_000)
    pod_meter = meter(tmp_path)

    def measure_now() -> int | None:
        return pod_meter.measure([pod("u1")], until=time.monotonic() + 60)["u1"].disk.volumes_bytes

    whole = measure_now()
    found_whole = pod_meter.complete
    with few_descriptors(20):
        assert measure_now() == whole
        found_partial = pod_meter.complete
    assert (found_whole, found_partial) == (True, False), "a number comes from an earlier measurement"
    with few_descriptors(20):
        partial = measure(tmp_path, pod("u1"))["u1"]
    assert partial.disk.volumes_bytes is not None
    assert whole is not None
    assert partial.disk.volumes_bytes < whole - 1_000_000
    assert "Too many open files" in str(partial.unknown)
    (deep / "file").unlink()
    assert measure_now() == whole - 1_003_520
    with few_descriptors(20):
        (path / "more").write_bytes(b"x" * 2_000_000)
        assert (measure_now() or 0) > 2_000_000, "a lower bound above the earlier usage counts"
    pod_meter.close()

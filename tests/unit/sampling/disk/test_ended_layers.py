"""The layers of ended containers stay with their pod until the container runtime removes them."""

import shutil
import time
from pathlib import Path

from nodeagent.model import DiskLayout, Signal
from nodeagent.policy import local_storage_limits, pod_usage
from nodeagent.sampling.disk import unattributed
from nodeagent.sampling.disk.ended_layers import EndedLayers
from nodeagent.sampling.disk.pod_disk import with_disk_usage
from nodeagent.sampling.disk.pod_paths import Kind, Part, PodPart, PodPath, PodPaths
from nodeagent.sampling.disk.unattributed import PodDirectories
from nodeagent.sampling.hostfs.mounts import parse_mounts
from tests.support.disk_trees import ID, live_meter, node, pod
from tests.support.mounts import mounted, root_only

OTHER = "2" * 64


def overlay(top: Path, container: str, number: str) -> tuple[Path, str]:
    """Where containerd mounts a container's layer, and the options of the mount."""
    snapshot = top / "store" / "snapshots" / number
    for directory in (top / "store" / "lower", snapshot / "fs", snapshot / "work"):
        directory.mkdir(parents=True, exist_ok=True)
    options = f"lowerdir={top}/store/lower,upperdir={snapshot}/fs,workdir={snapshot}/work"
    return top / f"run/containerd/io.containerd.runtime.v2.task/k8s.io/{container}/rootfs", options


@root_only
def test_the_layer_of_an_ended_container_counts_for_its_pod_until_it_is_removed(tmp_path: Path) -> None:
    node(tmp_path)
    meter, store = live_meter(tmp_path), f"{tmp_path}/store"
    before, after = pod("u1", (ID, "main")), pod("u1", (OTHER, "main"))
    point, options = overlay(tmp_path, ID, "7")
    with mounted(point, "-t", "overlay", "overlay", "-o", options):
        (point / "written").write_bytes(b"x" * 1_000_000)
        running = meter.measure([before], until=time.monotonic() + 60)["u1"]
    point, options = overlay(tmp_path, OTHER, "8")
    with mounted(point, "-t", "overlay", "overlay", "-o", options):
        restarted = meter.measure([after], until=time.monotonic() + 60)["u1"]
        counted_again = meter.measure([after], until=time.monotonic() + 60, recount=True)["u1"]
        shutil.rmtree(tmp_path / "store/snapshots/7")
        meter.measure([after], until=time.monotonic() + 60)
        removed = meter.measure([after], until=time.monotonic() + 60)["u1"]
    meter.close()
    size = running.disk.rootfs_bytes
    assert size is not None
    assert size > 1_000_000
    assert restarted.complete
    assert (restarted.disk.rootfs_bytes, restarted.disk.ended_layer_bytes) == (4096, size)
    assert counted_again.disk == restarted.disk
    assert (removed.disk.rootfs_bytes, removed.disk.ended_layer_bytes) == (4096, None)
    directories = PodDirectories("/kubelet", "/logs", store)
    part = PodPart("u1", Part.CONTAINERS)
    parts = [unattributed.parts_on(each, directories, frozenset([store]))[part] for each in (running, restarted)]
    assert [each.bytes for each in parts] == [size, size + 4096]
    assert [each.inodes for each in parts] == [2, 3]
    usage = with_disk_usage(after, restarted)
    assert pod_usage.disk_usage(usage.disk, Signal.NODEFS, DiskLayout.SINGLE) == size + 4096
    assert pod_usage.disk_usage(usage.disk, Signal.NODEFS_INODES, DiskLayout.SINGLE) == 3
    assert local_storage_limits.pod_ephemeral_storage(usage) == 4096, "the kubelet's limit has running containers alone"


def layer(uid: str, container: str, number: int) -> PodPath:
    return PodPath(uid, Kind.LAYER, container, f"/store/snapshots/{number}", ("fs",))


def paths(*found: PodPath) -> PodPaths:
    """The layers of running containers, with their mounts."""
    mounts = {}
    for path in found:
        line = f"1 1 0:45 / /{path.name} rw - overlay overlay rw,upperdir={path.base}/fs"
        [mounts[path.name]] = parse_mounts(line.encode())
    return PodPaths(found, {}, mounts, ())


def test_a_layer_that_is_mounted_for_another_container_is_dropped() -> None:
    layers = EndedLayers()
    one, two = layer("a", "first", 1), layer("b", "second", 1)
    layers.add_to(paths(one), ["a", "b"], all_pods=True, now=10.0)
    assert layers.add_to(paths(two), ["a", "b"], all_pods=True, now=20.0).paths == (two,)
    assert layers.add_to(paths(), ["a", "b"], all_pods=True, now=30.0).paths == (two,)
    layers.remove(two)
    assert layers.add_to(paths(), ["a", "b"], all_pods=True, now=40.0).paths == ()


def test_a_layer_is_dropped_with_its_pod_and_after_a_long_time_without_a_measurement() -> None:
    layers, one, two = EndedLayers(), layer("a", "first", 1), layer("b", "second", 2)
    layers.add_to(paths(one, two), ["a", "b"], all_pods=True, now=10.0)
    assert layers.add_to(paths(), ["b"], all_pods=False, now=20.0).paths == (two,)
    assert layers.add_to(paths(), ["a"], all_pods=True, now=30.0).paths == (one,)
    assert layers.add_to(paths(), ["a", "b"], all_pods=True, now=40.0).paths == (one,)
    assert layers.add_to(paths(), ["a", "b"], all_pods=True, now=700.0).paths == ()


def test_of_a_pod_that_restarts_without_end_the_newest_layers_are_remembered() -> None:
    layers, most = EndedLayers(), 64
    for number in range(3 * most):
        running = layer("a", f"{number}", number)
        found = layers.add_to(paths(running), ["a"], all_pods=True, now=10.0 * number).paths
    assert found == (running, *(layer("a", f"{number}", number) for number in range(2 * most - 1, 3 * most - 1)))

"""What fills the store: database and images of a real containerd 1.6, with files of known sizes in its snapshots."""

import gzip
import subprocess
import time
from pathlib import Path
from typing import Final

import pytest

from nodeagent.cri.runtime import Container, Image, RuntimeFacts
from nodeagent.model import ImageStoreUsage, StoreClass
from nodeagent.sampling.disk import containerd_store, image_store
from nodeagent.sampling.hostfs.host import Host, Unreadable
from nodeagent.sampling.node.filesystems import ImageStore
from tests.support.paths import REPOSITORY

DATA: Final = REPOSITORY / "tests/data/containerd"
ROOT: Final = "/var/lib/containerd"
SNAPSHOTS: Final = f"{ROOT}/io.containerd.snapshotter.v1.overlayfs/snapshots"
KIB: Final = 1024
LIVE, ENDED = "a1" * 32, "e2" * 32
"""Containers that have a writable layer in the database, above the image `used`."""
PAUSE: Final = Image(
    "sha256:7fc26824940a126a63b98ace2846690791c0a3623af13577ca25a234b11c77af", ("registry.k8s.io/pause:3.6",), 1, False
)
USED: Final = Image(
    "sha256:502138d9c3cd94e23b507b7e4fd30c3eff1f8e87e160cbd386c33f2708028359", ("docker.io/library/used:1",), 2, False
)
UNUSED: Final = Image(
    "sha256:fe640119fbf8293a690da66817f4ec226976e676292310a8b4b8a000e3fe6e37", ("docker.io/library/unused:1",), 3, False
)
CONTAINERS: Final = (
    Container(LIVE, "shop/web", live=True, image_ids=frozenset({USED.id})),
    Container(ENDED, "shop/done", live=False, image_ids=frozenset({USED.id})),
)
FACTS: Final = RuntimeFacts((PAUSE, USED, UNUSED), CONTAINERS, "registry.k8s.io/pause:3.6")
LAYERS: Final = {"1": 16, "2": 32, "3": 64, "5": 128, "6": 256, "7": 4, "8": 8, "9": 12}
"""Directory -> KiB in its file. 1 to 3 are the layers of the images from the bottom: pause, used and unused share 1,
used and unused share 2. 5 and 6 are the containers', 7 and 8 belong to namespace `build`, 9 is being unpacked."""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A host with this store."""
    root = tmp_path / ROOT.lstrip("/")
    blobs = root / "io.containerd.content.v1.content/blobs/sha256"
    blobs.mkdir(parents=True)
    for config in DATA.glob("*.json"):
        (blobs / config.stem).write_bytes(config.read_bytes())
    (blobs / "layer").write_bytes(b"x" * 512 * KIB)
    snapshots = tmp_path / SNAPSHOTS.lstrip("/")
    for name, size in LAYERS.items():
        (snapshots / name / "fs").mkdir(parents=True)
        (snapshots / name / "fs" / "file").write_bytes(b"x" * size * KIB)
    (snapshots.parent / "metadata.db").write_bytes(gzip.decompress((DATA / "small.db.gz").read_bytes()))
    (root / "io.containerd.metadata.v1.bolt").mkdir()
    (root / "io.containerd.metadata.v1.bolt/meta.db").write_bytes(b"x" * 20 * KIB)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text("")
    (tmp_path / "proc/1").mkdir()
    (tmp_path / "proc/1/mountinfo").write_text("")
    return tmp_path


def measure(
    tree: Path, facts: RuntimeFacts | None = FACTS, *, pods: dict[str, str] | None = None, within_s: float = 60.0
) -> ImageStoreUsage:
    store = ImageStore("containerd", SNAPSHOTS.rpartition("/")[0], SNAPSHOTS.rpartition("/")[0])
    return image_store.measure_image_store(
        Host(str(tree)), store, facts, pods=pods or {}, until=time.monotonic() + within_s
    )


def sums(usage: ImageStoreUsage) -> dict[StoreClass, int]:
    """KiB of each class, without its directories (4 KiB each, two for each snapshot)."""
    return {part.kind: part.bytes // KIB for part in usage.parts}


def items(usage: ImageStoreUsage, kind: StoreClass) -> dict[str, int]:
    return {item.name: item.bytes // KIB for part in usage.parts if part.kind is kind for item in part.items}


def directories(number: int) -> int:
    return number * 2 * 4


def test_the_sum_of_the_classes_is_what_du_counts(tree: Path) -> None:
    usage = measure(tree)
    root = str(tree / ROOT.lstrip("/"))
    du = subprocess.check_output(["du", "-s", "--block-size=1", root]).split()[0]
    inodes = subprocess.check_output(["du", "-s", "--inodes", root]).split()[0]
    assert (usage.bytes, usage.inodes) == (int(du), int(inodes))
    assert usage.unknown == ()
    assert all(part.complete for part in usage.parts)


def test_layers_count_once_where_their_most_used_image_is(tree: Path) -> None:
    usage = measure(tree)
    found = sums(usage)
    assert found[StoreClass.IMAGES_IN_USE] == 16 + 32 + directories(2)
    assert found[StoreClass.UNUSED_IMAGES] == 64 + directories(1)
    assert items(usage, StoreClass.UNUSED_IMAGES) == {"docker.io/library/unused:1": 64 + directories(1)}


def test_writable_layers_are_named_by_pod_and_by_whether_they_run(tree: Path) -> None:
    usage = measure(tree)
    assert items(usage, StoreClass.LIVE_LAYERS) == {"shop/web": 128 + directories(1)}
    assert items(usage, StoreClass.ENDED_CONTAINERS) == {"shop/done": 256 + directories(1)}


def test_other_namespaces_and_unpacking_are_no_images(tree: Path) -> None:
    found = items(measure(tree), StoreClass.OTHER)
    assert found["snapshots of namespace build"] == 4 + 8 + directories(2)
    assert [size for name, size in found.items() if name.startswith("snapshot extract-")] == [12 + directories(1)]
    assert found["io.containerd.metadata.v1.bolt"] == 24


def test_the_content_store_is_a_class_of_its_own(tree: Path) -> None:
    assert sums(measure(tree))[StoreClass.CONTENT_STORE] >= 512


def test_a_directory_that_the_database_lacks_is_an_orphan(tree: Path) -> None:
    assert StoreClass.ORPHANED_SNAPSHOTS not in sums(measure(tree))
    orphan = tree / SNAPSHOTS.lstrip("/") / "77/fs"
    orphan.mkdir(parents=True)
    (orphan / "left").write_bytes(b"x" * 40 * KIB)
    assert items(measure(tree), StoreClass.ORPHANED_SNAPSHOTS) == {"snapshots/77": 40 + directories(1)}
    assert (orphan / "left").exists()


def test_an_image_without_a_container_is_unused_and_a_pinned_one_is_not(tree: Path) -> None:
    (tree / SNAPSHOTS.lstrip("/")).parent.joinpath("metadata.db").write_bytes(
        gzip.decompress((DATA / "small.db.gz").read_bytes())
    )
    pinned = FACTS._replace(images=(PAUSE, USED, UNUSED._replace(pinned=True)))
    usage = measure(tree, pinned)
    assert StoreClass.UNUSED_IMAGES not in sums(usage)
    assert "docker.io/library/unused:1 (kept without a container)" in items(usage, StoreClass.IMAGES_IN_USE)


def test_layers_that_no_image_has_are_no_unused_image(tree: Path) -> None:
    usage = measure(tree, FACTS._replace(images=(PAUSE, USED)))
    assert StoreClass.UNUSED_IMAGES not in sums(usage)
    assert items(usage, StoreClass.OTHER)["layers without an image"] == 64 + directories(1)


def test_the_layers_below_a_container_are_in_use_also_without_their_image(tree: Path) -> None:
    usage = measure(tree, FACTS._replace(images=(UNUSED,)))
    assert sums(usage)[StoreClass.IMAGES_IN_USE] == 16 + 32 + directories(2)


def test_without_the_runtime_images_are_not_told_apart(tree: Path) -> None:
    usage = measure(tree, None, pods={LIVE: "shop/web"})
    found = sums(usage)
    assert found[StoreClass.IMAGES] == 16 + 32 + 64 + directories(3)
    assert StoreClass.UNUSED_IMAGES not in found
    assert items(usage, StoreClass.ENDED_CONTAINERS) == {
        "shop/web": 128 + directories(1),
        f"container {ENDED[:12]}": 256 + directories(1),
    }
    assert "the container runtime did not answer" in usage.unknown[0]


def test_without_the_runtime_a_mounted_layer_is_live(tree: Path) -> None:
    mount = (
        f"90 1 0:50 / /run/containerd/io.containerd.runtime.v2.task/k8s.io/{LIVE}/rootfs rw - overlay overlay "
        f"rw,upperdir={SNAPSHOTS}/5/fs\n"
    )
    (tree / "proc/1/mountinfo").write_text(mount)
    usage = measure(tree, None, pods={LIVE: "shop/web"})
    assert items(usage, StoreClass.LIVE_LAYERS) == {"shop/web": 128 + directories(1)}


def test_without_time_layers_count_as_containerd_recorded_them(tree: Path) -> None:
    usage = measure(tree, within_s=-1.0)
    parts = {part.kind: part for part in usage.parts}
    assert not parts[StoreClass.UNUSED_IMAGES].complete
    assert parts[StoreClass.UNUSED_IMAGES].bytes == 12_587_008
    assert parts[StoreClass.LIVE_LAYERS].bytes == 0
    assert not parts[StoreClass.LIVE_LAYERS].complete


def test_a_damaged_database_makes_no_orphans(tree: Path) -> None:
    (tree / SNAPSHOTS.lstrip("/")).parent.joinpath("metadata.db").write_bytes(b"no database")
    usage = measure(tree)
    assert StoreClass.ORPHANED_SNAPSHOTS not in sums(usage)
    assert usage.unknown == ("snapshots are not told apart: no bolt database",)
    assert "io.containerd.snapshotter.v1.overlayfs" in items(usage, StoreClass.OTHER)


def test_a_store_of_another_kind_is_named_by_its_directories(tmp_path: Path) -> None:
    (tmp_path / "var/lib/containers/storage/overlay").mkdir(parents=True)
    (tmp_path / "var/lib/containers/storage/overlay/file").write_bytes(b"x" * 64 * KIB)
    path = "/var/lib/containers/storage"
    usage = image_store.measure_image_store(
        Host(str(tmp_path)), ImageStore("cri-o", path, path), FACTS, pods={}, until=time.monotonic() + 60
    )
    assert items(usage, StoreClass.OTHER) == {"overlay": 68}
    assert usage.unknown == ("no io.containerd.snapshotter.v1.overlayfs: snapshots are not told apart",)


def test_a_store_that_cannot_be_listed_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(Unreadable):
        measure(tmp_path)


def test_the_layers_of_an_image_are_those_that_containerd_unpacked(tree: Path) -> None:
    host = Host(str(tree))
    snapshots = containerd_store.read_snapshots(host, ROOT)
    for image, ids in ((PAUSE, ["1"]), (USED, ["2", "1"]), (UNUSED, ["3", "2", "1"])):
        key = next(
            each.key for each in snapshots.values() if each.name == containerd_store.top_layer(host, ROOT, image.id)
            and each.namespace == "k8s.io"
        )  # fmt: skip
        assert [each.id for each in containerd_store.chain_below(key, snapshots)] == ids


@pytest.mark.parametrize("image_id", ["sha256:../../x", "sha256:none", "", "::"])
def test_an_image_without_its_configuration_has_no_layers(tree: Path, image_id: str) -> None:
    assert containerd_store.top_layer(Host(str(tree)), ROOT, image_id) == ""


@pytest.mark.parametrize("text", ["", "[]", '{"rootfs": 7}', "[" * 100_000, '{"rootfs": {"diff_ids": 5}}'])
def test_a_malformed_configuration_has_no_layers(tree: Path, text: str) -> None:
    blob = tree / ROOT.lstrip("/") / "io.containerd.content.v1.content/blobs/sha256/ab"
    blob.write_text(text)
    assert containerd_store.top_layer(Host(str(tree)), ROOT, "sha256:ab") == ""

"""What fills the image store of a real containerd is named by class, at least 99% of its bytes, orphans included.

Images, sandboxes and containers are made through the CRI, as a kubelet makes them; the orphan by killing containerd
while it removes the files of an image. Unused images are then removed through the CRI's socket.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests.vm.machine import Machine

pytestmark = [pytest.mark.vm, pytest.mark.timeout(1500)]

STORE: Final = "/var/lib/containerd"
SNAPSHOTS: Final = f"{STORE}/io.containerd.snapshotter.v1.overlayfs/snapshots"
MIB: Final = 1 << 20
SCRIPT: Final = "/run/vm/cri_pods.py"
FILES: Final = 1_500
"""Empty files of the image whose removal is interrupted. Of 20,000 containerd had removed 29."""
UNUSED_MIB: Final = 12
"""Of the one layer that no other image has, in the content store and unpacked."""


class Usage(NamedTuple):
    """The store, as `du` counts it."""

    bytes: int
    inodes: int


class Store(NamedTuple):
    """What was seen of the store before and after the removal of unused images."""

    orphan: str
    """The directory that containerd left."""
    files_left: int
    """Right after containerd was killed."""
    report: dict[str, Any]
    text: str
    usage: Usage
    files_after_reports: int
    removed: dict[str, Any]
    usage_after_removal: Usage
    orphan_after_removal: bool

    def classes(self) -> dict[str, dict[str, Any]]:
        return {each["name"]: each for each in self.report["classes"]}


def call(machine: Machine, *words: str) -> dict[str, Any]:
    """One call of `cri_pods.py`."""
    output = machine.run(["/opt/nodeagent/bin/python", SCRIPT, *words], timeout_s=900).stdout
    found: dict[str, Any] = json.loads(output)
    return found


def check(machine: Machine, *options: str) -> str:
    words = ["/opt/nodeagent/bin/nodeagent", "check", "--image-store", "--api", "never", *options]
    return machine.run(words, check=False, timeout_s=400).stdout


def used(machine: Machine) -> Usage:
    bytes_, _, inodes, _ = machine.run(f"du -s --block-size=1 {STORE}; du -s --inodes {STORE}").stdout.split()
    return Usage(int(bytes_), int(inodes))


def empty(machine: Machine) -> None:
    """Remove all containers and images, also those of other tests in this machine."""
    machine.run(
        "for c in $(ctr -n k8s.io containers ls -q); do ctr -n k8s.io tasks delete --force $c; "
        "ctr -n k8s.io containers delete $c; done; "
        "for i in $(ctr -n k8s.io images ls -q); do ctr -n k8s.io images rm --sync $i; done",
        check=False,
        timeout_s=400,
    )


@pytest.fixture(scope="module")
def store(machine: Machine) -> Iterator[Store]:
    machine.write(SCRIPT, Path(__file__).with_name("cri_pods.py").read_bytes())
    machine.run("systemctl start containerd", timeout_s=400)
    empty(machine)
    try:
        made = call(machine, "setup", str(FILES))
        report = json.loads(check(machine, "-o", "json"))["imageStore"]
        usage = used(machine)
        text = check(machine, "--color", "never")
        after = machine.run(f"find {SNAPSHOTS}/{made['orphan']} -type f | wc -l").stdout
        removed = call(machine, "remove")
        left = machine.run(f"test -e {SNAPSHOTS}/{made['orphan']}", check=False).returncode == 0
        yield Store(made["orphan"], made["left"], report, text, usage, int(after), removed, used(machine), left)
    finally:
        empty(machine)
        machine.run(
            "systemctl stop containerd; rm -rf /var/log/pods/shop_web_uid-web /var/log/pods/shop_done_uid-done",
            timeout_s=400,
        )


def test_every_byte_of_the_store_is_named_by_class(store: Store) -> None:
    assert store.report["unknown"] == []
    classes = store.classes()
    assert list(classes) == [
        "images in use",
        "unused images",
        "live layers",
        "ended containers",
        "orphaned snapshots",
        "content store",
        "other",
    ]
    assert all(each["complete"] for each in classes.values())
    named = sum(each["bytes"] for name, each in classes.items() if name != "other")
    assert named >= 0.95 * store.usage.bytes, classes
    assert abs(store.report["bytes"] - store.usage.bytes) <= store.usage.bytes // 100
    assert abs(store.report["inodes"] - store.usage.inodes) <= store.usage.inodes // 100
    print(f"STORE | { ({name: each['bytes'] for name, each in classes.items()}) } | du {store.usage}")


def test_classes_name_their_images_pods_and_directories(store: Store) -> None:
    classes = store.classes()
    items = {name: {item["name"]: item["bytes"] for item in each["items"]} for name, each in classes.items()}
    assert list(items["unused images"]) == ["docker.io/library/unused:1"]
    assert UNUSED_MIB * MIB <= items["unused images"]["docker.io/library/unused:1"] < (UNUSED_MIB + 1) * MIB
    assert 8 * MIB <= classes["images in use"]["bytes"] < 12 * MIB
    assert 8 * MIB <= items["live layers"]["shop/web"] < 9 * MIB
    assert 4 * MIB <= items["ended containers"]["shop/done"] < 5 * MIB
    assert list(items["orphaned snapshots"]) == [f"snapshots/{store.orphan}"]
    assert classes["orphaned snapshots"]["inodes"] >= store.files_left


def test_an_orphan_is_reported_and_left_in_place(store: Store) -> None:
    assert 0 < store.files_left < FILES, "containerd was killed in the middle of the removal"
    assert f"snapshots/{store.orphan}" in store.text
    assert "Orphans are not removed by nodeagent" in store.text
    assert store.files_after_reports == store.files_left


def test_unused_images_are_removed_through_the_socket_and_others_are_kept(store: Store) -> None:
    removed = store.removed
    assert (removed["images"], removed["left"]) == (1, 0)
    names = set(removed["names"])
    assert "docker.io/library/used:1" in names
    assert any(each.startswith("registry.k8s.io/pause:") for each in names)
    assert "docker.io/library/unused:1" not in names
    gained = store.usage.bytes - store.usage_after_removal.bytes
    print(f"REMOVED | {removed} | gained {gained} bytes")
    assert gained >= 2 * UNUSED_MIB * MIB, "in the content store and unpacked"
    assert not store.orphan_after_removal, "by containerd, as the report says"

"""`check --image-store`: what it asks, and what it prints."""

import gzip
import json
from pathlib import Path

import pytest

from nodeagent.commands import check_image_store, cli, exit_codes
from nodeagent.model import DiskLayout, ImageStoreUsage, StoreClass, StoreItem, StorePart
from nodeagent.report import text
from nodeagent.report.json_document import to_json
from nodeagent.report.sections import sections
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.node.filesystems import ImageStore, Layout
from tests.support import reports, schemas
from tests.support.paths import REPOSITORY

MIB = 1 << 20
STORE = "/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs"
LAYOUT = Layout(DiskLayout.SINGLE, "/var/lib/kubelet", ImageStore("containerd", STORE, STORE))
USAGE = ImageStoreUsage(
    "containerd",
    "/var/lib/containerd",
    (
        StorePart(StoreClass.IMAGES_IN_USE, 300 * MIB, 900, tuple(StoreItem(f"i{n}", MIB, 1) for n in range(7))),
        StorePart(StoreClass.UNUSED_IMAGES, 200 * MIB, 500, (StoreItem("evil\x1b[2J", 200 * MIB, 500),), False),
        StorePart(StoreClass.ORPHANED_SNAPSHOTS, 40 * MIB, 12, (StoreItem("snapshots/77", 40 * MIB, 12),)),
    ),
    ("socket: permission denied",),
)


def test_the_report_names_each_class_with_its_largest_holders() -> None:
    printed = text.render(sections(reports.report()._replace(image_store=USAGE)))
    assert "IMAGE STORE of containerd (/var/lib/containerd, 540Mi)" in printed
    assert "i0 1Mi, i1 1Mi, i2 1Mi, i3 1Mi, i4 1Mi, 2 more" in printed
    assert "snapshots/77 40Mi" in printed
    assert "Orphans are not removed by nodeagent" in printed
    assert "not measured in time" in printed
    assert "socket: permission denied" in printed
    assert "\x1b" not in printed


def test_the_document_has_the_classes_and_null_without_the_option() -> None:
    document = json.loads(json.dumps(to_json(reports.report()._replace(image_store=USAGE))))
    assert list(schemas.strict().iter_errors(document)) == []
    store = document["imageStore"]
    assert (store["bytes"], store["inodes"], store["unknown"]) == (540 * MIB, 1412, ["socket: permission denied"])
    assert [each["name"] for each in store["classes"]] == ["images in use", "unused images", "orphaned snapshots"]
    assert store["classes"][2]["items"] == [{"name": "snapshots/77", "bytes": 40 * MIB, "inodes": 12}]
    without = json.loads(json.dumps(to_json(reports.report())))
    assert without["imageStore"] is None
    assert list(schemas.strict().iter_errors(without)) == []


@pytest.fixture
def host(tmp_path: Path) -> Host:
    snapshots = tmp_path / STORE.lstrip("/") / "snapshots"
    snapshots.mkdir(parents=True)
    database = gzip.decompress((REPOSITORY / "tests/data/containerd/small.db.gz").read_bytes())
    (snapshots.parent / "metadata.db").write_bytes(database)
    return Host(str(tmp_path))


@pytest.mark.parametrize(
    ("socket", "reason"),
    [
        ("", "no socket of a container runtime (/run/containerd/containerd.sock"),
        ("/run/own.sock", "/run/own.sock: "),
    ],
)
def test_without_an_answer_the_reason_is_reported(host: Host, socket: str, reason: str) -> None:
    found = check_image_store.measure(host, LAYOUT, reports.report().snapshot, socket=socket)
    assert found.bytes
    assert found.unknown[0].startswith("the container runtime did not answer")
    assert found.unknown[-1].startswith(reason)


def test_without_a_container_runtime_the_reason_is_reported(host: Host) -> None:
    layout = Layout(DiskLayout.UNKNOWN, "/", None, "no container runtime on this machine")
    found = check_image_store.measure(host, layout, reports.report().snapshot, socket="")
    assert (found.parts, found.unknown) == ((), ("no container runtime on this machine",))


def test_a_store_that_is_gone_is_reported(tmp_path: Path) -> None:
    found = check_image_store.measure(Host(str(tmp_path)), LAYOUT, reports.report().snapshot, socket="")
    assert found.parts == ()
    assert "/var/lib/containerd" in found.unknown[0]


def test_a_recording_has_no_image_store(capsys: pytest.CaptureFixture[str]) -> None:
    recorded = next(path for path in sorted((REPOSITORY / "tests/data/nodes").iterdir()) if path.is_dir())
    assert cli.main(["check", "--image-store", "--host-root", str(recorded)]) == exit_codes.USAGE
    assert "a recording contains no image store" in capsys.readouterr().err

"""Disk usage in the report: of pods, of host directories, and its completeness."""

import fcntl
import json
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from nodeagent.commands import cli
from nodeagent.model import DiskUsage, DiskUsageQuality, HostDirectory, Signal, UnattributedDisk, WriteRate
from nodeagent.report import text
from nodeagent.report.json_document import to_json
from nodeagent.report.node_report import Report
from nodeagent.report.sections import sections
from tests.support import reports, schemas
from tests.support.livenode import MIB, Kubepods, needs_cgroup_v1
from tests.support.reports import GIB, TAKEN_AT

DISK = DiskUsage(3 * GIB, 10, 5 * MIB, 2, None, None, 4096, 1)
REST = UnattributedDisk(
    signals=(Signal.NODEFS, Signal.NODEFS_INODES, Signal.IMAGEFS),
    used_bytes=90 * GIB,
    attributed_bytes=4 * GIB,
    used_inodes=5000,
    attributed_inodes=1000,
    largest=(HostDirectory("/var/log/jour\nnal", 40 * GIB, 300, complete=False),),
    read_at=TAKEN_AT - 3,
)


def disks_report() -> Report:
    view = reports.pod_view("web", working_set=5 * MIB)
    assert view.usage is not None
    quality = DiskUsageQuality(
        TAKEN_AT - 2, complete=False, unknown=("volume v: not measured in time",), deleted_bytes=7 * MIB
    )
    usage = view.usage._replace(disk=DISK, disk_usage_quality=quality, writing=WriteRate(1000.0, 9000, 9.0, TAKEN_AT))
    made = reports.report(pods=(reports.ranked(view._replace(usage=usage), 1),))
    snapshot = made.snapshot._replace(unattributed_disks=(REST,), pods=(view._replace(usage=usage),))
    return made._replace(snapshot=snapshot)


def test_the_document_has_disk_usage_its_age_and_its_unknown_parts() -> None:
    document = json.loads(json.dumps(to_json(disks_report()), allow_nan=False))
    assert list(schemas.strict().iter_errors(document)) == []
    [pod] = document["pods"]
    disk = pod["disk"]
    assert (disk["rootfsBytes"], disk["volumesBytes"], disk["otherBytes"]) == (3 * GIB, None, 4096)
    assert (disk["complete"], disk["unknown"]) == (False, ["volume v: not measured in time"])
    assert (disk["deletedOpenBytes"], disk["writtenBytesPerSecond"]) == (7 * MIB, 1000.0)
    [rest] = document["disks"]
    assert rest["signals"] == ["nodefs.available", "nodefs.inodesFree", "imagefs.available"]
    assert (rest["unattributedBytes"], rest["unattributedInodes"]) == (86 * GIB, 4000)
    assert rest["largest"] == [{"path": "/var/log/jour\nnal", "bytes": 40 * GIB, "inodes": 300, "complete": False}]


def test_the_text_has_a_table_of_pods_and_one_of_each_file_systems_rest() -> None:
    shown = text.render(sections(disks_report()))
    assert "ON DISK" in shown
    [row] = [line for line in shown.splitlines() if "not measured in time" in line]
    assert row.split()[:5] == ["default/web", "3Gi", "5Mi", "?", "12"]
    assert "IN NO POD ON nodefs, imagefs (86Gi of 90Gi used, 4000 inodes)" in shown
    assert [line for line in shown.splitlines() if "/var/log/jour" in line and "at least" in line]


def test_without_a_walk_the_report_has_no_disk_usage() -> None:
    shown = text.render(sections(reports.report()))
    assert "ON DISK" not in shown
    assert "IN NO POD" not in shown


@pytest.fixture
def holder(tmp_path: Path, kubepods: Kubepods) -> Path:
    """A pod with 1 MiB on disk, and the configuration that finds it."""
    uid = "6f1c2f6e-0f6e-4b52-9d3a-111111111111"
    volume = tmp_path / f"kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/data"
    volume.mkdir(parents=True)
    (volume / "file").write_bytes(b"x" * MIB)
    for name in ("logs", "images"):
        (tmp_path / name).mkdir()
    kubepods.start(uid, qos="burstable")
    config = tmp_path / "config.yaml"
    places = {"kubeletDir": f"{tmp_path}/kubelet", "imageDir": f"{tmp_path}/images", "podLogsDir": f"{tmp_path}/logs"}
    settings = {
        "apiVersion": "nodeagent.io/v1alpha1",
        "kind": "NodeAgentConfiguration",
        "evictionHard": {"nodefs.available": "1Ki"},
        "sampling": {"cgroupRoot": f"/{kubepods.root}", **places},
    }
    config.write_text(json.dumps(settings))
    return config


@pytest.mark.real_cgroup
@needs_cgroup_v1
@pytest.mark.parametrize(("arguments", "measured"), [(("--signal", "nodefs.available"), True), ((), False)])
def test_a_check_measures_disks_only_with_a_reason(
    holder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], measured: bool
) -> None:
    code = cli.main(["check", "--no-api", "-o", "json", "--config", str(holder), *arguments])
    assert code == 0
    [pod] = json.loads(capsys.readouterr().out)["pods"]
    [volume] = holder.parent.glob("kubelet/pods/*/volumes/*/data")
    assert pod["disk"]["volumesBytes"] == (MIB + os.stat(volume).st_blocks * 512 if measured else None)


@pytest.mark.real_cgroup
@needs_cgroup_v1
def test_a_long_walk_shows_its_progress_on_a_terminal_and_erases_it(holder: Path) -> None:
    command = [sys.executable, "-m", "nodeagent", "check", "--no-api", "-o", "json", "--disk", "--config", str(holder)]
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, timeout=100, check=True)
    os.close(theirs)
    written = os.read(ours, 1 << 16).decode()
    os.close(ours)
    first, *_, last, nothing = written.split("\x1b[K")
    assert re.fullmatch(r"\rmeasuring pods on disk: \d+ of \d+ paths, \d+ files", first)
    assert all(len(line) <= 60 for line in written.split("\x1b[K"))
    assert (last, nothing) == ("\r", "")
    assert json.loads(done.stdout)["kind"] == "NodeReport"

"""What records and `check` tell of processes."""

import os
import subprocess
import sys
from pathlib import Path

from nodeagent.model import PodUsage, QOSClass
from nodeagent.sampling.hostfs import cgroups
from nodeagent.sampling.hostfs.host import Host, open_host
from nodeagent.sampling.hostfs.processes import largest
from tests.support.paths import RECORDED_NODES


def test_the_largest_process_of_a_recorded_pod_is_told() -> None:
    host = open_host(str(RECORDED_NODES / "cgroupv2-memory-pressure"))
    path = next((RECORDED_NODES / "cgroupv2-memory-pressure/sys/fs/cgroup").rglob("*pod0b073eb9*")).relative_to(
        RECORDED_NODES / "cgroupv2-memory-pressure/sys/fs/cgroup"
    )
    usage = PodUsage("0b073eb9", QOSClass.BEST_EFFORT, f"/{path}", read_at=0.0)
    found = largest(host, cgroups.detect_hierarchy(host), usage)
    assert [process.name for process in found] == ["hog", "pause"]
    assert found[0].rss >= 1599 << 20  # its argument


def test_living_processes_are_asked_through_psutil(tmp_path: Path) -> None:
    code = "import sys; x = b'x' * (32 << 20); print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        place = tmp_path / "cgroup/pod"
        place.mkdir(parents=True)
        (place / "cgroup.procs").write_text(f"{os.getpid()}\n{child.pid}\n4194305\n0\n")
        hierarchy = cgroups.Hierarchy("v2", str(tmp_path / "cgroup"), cgroups.MemoryV2(), None, None)
        found = largest(Host("/"), hierarchy, PodUsage("u", QOSClass.BURSTABLE, "/pod", read_at=0.0))
        sizes = {process.pid: process.rss for process in found}
        assert sizes.keys() == {os.getpid(), child.pid}
        assert sizes[child.pid] >= 32 << 20
        child.communicate()

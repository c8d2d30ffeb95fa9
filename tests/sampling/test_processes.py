"""What records and `check` tell of processes."""

import os
import subprocess
import sys
from pathlib import Path

from nodeagent.model import PodUsage, QOSClass
from nodeagent.sampling import cgroup
from nodeagent.sampling.host import Host, open_host
from nodeagent.sampling.processes import kubelet_command_line, largest

NODES = Path(__file__).parents[1] / "data" / "nodes"


def _kubelet(root: Path, pid: int, comm: str, *words: str) -> None:
    place = root / f"proc/{pid}"
    place.mkdir(parents=True)
    (place / "comm").write_text(f"{comm}\n")
    (place / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))


def test_the_kubelets_command_line_is_found_with_its_arguments(tmp_path: Path) -> None:
    _kubelet(tmp_path, 1, "systemd", "/sbin/init")
    _kubelet(tmp_path, 900, "kubelet", "/usr/bin/kubelet", "--config=/a b.yaml", "")
    _kubelet(tmp_path, 1200, "kubelet", "/other/kubelet")
    assert kubelet_command_line(Host(str(tmp_path))) == ("/usr/bin/kubelet", "--config=/a b.yaml")


def test_a_process_that_only_calls_itself_kubelet_is_none(tmp_path: Path) -> None:
    _kubelet(tmp_path, 900, "kubelet", "/opt/evil", "--config=/x")
    assert kubelet_command_line(Host(str(tmp_path))) is None
    assert kubelet_command_line(Host(str(tmp_path / "nowhere"))) is None


def test_the_largest_process_of_a_recorded_pod_is_told() -> None:
    host = open_host(str(NODES / "cgroupv2-memory-pressure"))
    path = next((NODES / "cgroupv2-memory-pressure/sys/fs/cgroup").rglob("*pod0b073eb9*")).relative_to(
        NODES / "cgroupv2-memory-pressure/sys/fs/cgroup"
    )
    usage = PodUsage("0b073eb9", QOSClass.BEST_EFFORT, f"/{path}", read_at=0.0)
    found = largest(host, cgroup.detect(host), usage)
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
        hierarchy = cgroup.Hierarchy("v2", str(tmp_path / "cgroup"), cgroup.MemoryV2(), None, None)
        found = largest(Host("/"), hierarchy, PodUsage("u", QOSClass.BURSTABLE, "/pod", read_at=0.0))
        sizes = {process.pid: process.rss for process in found}
        assert sizes.keys() == {os.getpid(), child.pid}
        assert sizes[child.pid] >= 32 << 20
        child.communicate()

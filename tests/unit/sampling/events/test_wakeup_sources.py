"""All wake-up sources of a host: real cgroups, thresholds moved by a thread."""

import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nodeagent.model import Signal
from nodeagent.sampling.events.wakeup_sources import WakeupSources
from nodeagent.sampling.hostfs.cgroup_memory import V1
from nodeagent.sampling.hostfs.cgroups import Hierarchy, Kubepods
from nodeagent.sampling.hostfs.host import Host

MEMORY = Path("/sys/fs/cgroup/memory")
MIB = 1 << 20
EATER = """
import sys
sys.stdin.read()
print(len(bytearray(b"x") * (40 << 20)), file=sys.stderr)
"""

real_v1 = pytest.mark.skipif(
    os.geteuid() != 0 or not os.access(MEMORY / "cgroup.procs", os.W_OK),
    reason="needs root and a writable cgroup v1 memory hierarchy",
)


def _open(cgroup: Path) -> WakeupSources:
    wakeups = WakeupSources(Host("/"))
    wakeups.open(*_cgroups(cgroup))
    return wakeups


def _cgroups(cgroup: Path) -> tuple[Hierarchy, Kubepods]:
    return Hierarchy("v1", str(MEMORY), V1, None, None), Kubepods(f"/{cgroup.name}", systemd=False)


def _armers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "memcg thresholds"]


def _ready(wakeups: WakeupSources, timeout_s: float) -> bool:
    [source] = [each for each in wakeups.sources if Signal.ALLOCATABLE_MEMORY in each.name]
    with select.epoll() as epoll:
        epoll.register(source.fd, source.events)
        return bool(epoll.poll(timeout_s))


@pytest.mark.real_cgroup
@real_v1
def test_a_thread_arms_the_thresholds_and_ends_with_the_sources(cgroup: Path) -> None:
    wakeups = _open(cgroup)
    assert _armers() == []
    wakeups.arm({Signal.ALLOCATABLE_MEMORY: 20 * MIB})
    assert len(_armers()) == 1
    with subprocess.Popen([sys.executable, "-c", EATER], stdin=subprocess.PIPE) as eater:
        (cgroup / "cgroup.procs").write_text(str(eater.pid))
        eater.communicate(b"go")
    assert _ready(wakeups, 60)
    wakeups.close()
    assert _armers() == []


@pytest.mark.real_cgroup
@real_v1
def test_arming_does_not_wait_for_the_kernel(cgroup: Path) -> None:
    wakeups = _open(cgroup)
    times = []
    for growth in range(20):
        began = time.monotonic()
        wakeups.arm({Signal.ALLOCATABLE_MEMORY: (40 - 2 * growth) * MIB})
        times.append(time.monotonic() - began)
    wakeups.close()
    # The kernel takes 16 to 36 ms for each except the first.
    assert sorted(times)[10] < 0.005


@pytest.mark.real_cgroup
@real_v1
def test_a_cgroup_that_is_gone_makes_the_sources_stale_without_an_error(cgroup: Path) -> None:
    """With an error the loop would never open them again."""
    wakeups = _open(cgroup)
    cgroups = _cgroups(cgroup)
    assert not wakeups.stale(*cgroups)
    cgroup.rmdir()
    wakeups.arm({Signal.ALLOCATABLE_MEMORY: 20 * MIB})
    assert wakeups.stale(*cgroups)
    wakeups.open(*cgroups)
    assert any("no memcg threshold" in note.message for note in wakeups.notes)
    wakeups.arm({Signal.ALLOCATABLE_MEMORY: 20 * MIB})
    assert not wakeups.stale(*cgroups), "not opened again in every sync"
    cgroup.mkdir()
    wakeups.open(*cgroups)
    assert not any("no memcg threshold" in note.message for note in wakeups.notes)
    wakeups.close()


# --- PSI: the host's file, or the process's own file of the same kernel -----------------------------------------------

PRESSURE = "proc/pressure/memory"
BOOT_ID = "proc/sys/kernel/random/boot_id"


def _root(directory: Path, *, boot_id: str, pressure: bool) -> Host:
    for path in (PRESSURE, BOOT_ID):
        (directory / path).parent.mkdir(parents=True)
    (directory / BOOT_ID).write_text(boot_id, encoding="ascii")
    if pressure:
        (directory / PRESSURE).touch()
    return Host(str(directory))


def _open_pressure(host: Host, own: Host) -> WakeupSources:
    wakeups = WakeupSources(host, own=own)
    wakeups.open(Hierarchy("none", None, V1, None, None), None)
    wakeups.close()
    return wakeups


def test_the_hosts_own_pressure_file_comes_first(tmp_path: Path) -> None:
    host = _root(tmp_path / "host", boot_id="a\n", pressure=True)
    own = _root(tmp_path / "own", boot_id="a\n", pressure=True)
    assert _open_pressure(host, own).notes == ()
    assert (tmp_path / "host" / PRESSURE).read_bytes()
    assert (tmp_path / "own" / PRESSURE).read_bytes() == b""


def test_where_the_hosts_procfs_refuses_the_containers_own_one_gets_the_trigger(tmp_path: Path) -> None:
    host = _root(tmp_path / "host", boot_id="a\n", pressure=False)
    own = _root(tmp_path / "own", boot_id="a\n", pressure=True)
    assert _open_pressure(host, own).notes == ()
    assert (tmp_path / "own" / PRESSURE).read_bytes()


def test_the_pressure_of_another_kernel_is_not_the_nodes(tmp_path: Path) -> None:
    host = _root(tmp_path / "host", boot_id="a\n", pressure=False)
    own = _root(tmp_path / "own", boot_id="b\n", pressure=True)
    [note] = _open_pressure(host, own).notes
    assert note.message == f"no PSI trigger on {tmp_path}/host/{PRESSURE}: No such file or directory"
    assert (tmp_path / "own" / PRESSURE).read_bytes() == b""


def test_a_host_whose_boot_is_unknown_is_not_taken_for_this_one(tmp_path: Path) -> None:
    host = _root(tmp_path / "host", boot_id="a\n", pressure=False)
    own = _root(tmp_path / "own", boot_id="a\n", pressure=True)
    (tmp_path / "host" / BOOT_ID).unlink()
    assert len(_open_pressure(host, own).notes) == 1
    assert (tmp_path / "own" / PRESSURE).read_bytes() == b""


@pytest.mark.parametrize("parent", ["", "burstable", "besteffort", "system", "system/burstable", "system/besteffort"])
def test_a_pod_that_appears_anywhere_below_kubepods_wakes_the_loop(tmp_path: Path, parent: str) -> None:
    for each in ("burstable", "besteffort", "system/burstable", "system/besteffort"):
        (tmp_path / "cgroup/kubepods" / each).mkdir(parents=True)
    wakeups = WakeupSources(Host(str(tmp_path)))
    wakeups.open(Hierarchy("v1", "/cgroup", V1, None, None), Kubepods("/kubepods", systemd=False))
    [source] = [each for each in wakeups.sources if each.name == "cgroup"]
    with select.epoll() as epoll:
        epoll.register(source.fd, source.events)
        assert not epoll.poll(0)
        (tmp_path / "cgroup/kubepods" / parent / "pod1").mkdir()
        assert epoll.poll(5)
    wakeups.close()

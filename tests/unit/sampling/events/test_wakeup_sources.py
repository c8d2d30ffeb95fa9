"""The wake-ups of a host as a whole: real cgroups, moved by a thread of their own."""

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
from nodeagent.sampling.hostfs.cgroups import V1, Hierarchy, Kubepods
from nodeagent.sampling.hostfs.host import Host

MEMORY = Path("/sys/fs/cgroup/memory")
MIB = 1 << 20
EATER = """
import sys
sys.stdin.read()
print(len(bytearray(b"x") * (40 << 20)), file=sys.stderr)
"""

pytestmark = [
    pytest.mark.real_cgroup,
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.access(MEMORY / "cgroup.procs", os.W_OK),
        reason="needs root and a writable cgroup v1 memory hierarchy",
    ),
]


def _open(cgroup: Path) -> WakeupSources:
    alarms = WakeupSources(Host("/"))
    alarms.open(*_where(cgroup))
    return alarms


def _where(cgroup: Path) -> tuple[Hierarchy, Kubepods]:
    return Hierarchy("v1", str(MEMORY), V1, None, None), Kubepods(f"/{cgroup.name}", systemd=False)


def _armers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "memory levels"]


def _ready(alarms: WakeupSources, timeout_s: float) -> bool:
    [source] = [each for each in alarms.sources if Signal.ALLOCATABLE_MEMORY in each.name]
    with select.epoll() as epoll:
        epoll.register(source.fd, source.events)
        return bool(epoll.poll(timeout_s))


def test_a_level_is_armed_by_a_thread_of_its_own_which_ends_with_the_alarms(cgroup: Path) -> None:
    alarms = _open(cgroup)
    assert _armers() == []
    alarms.arm({Signal.ALLOCATABLE_MEMORY: 20 * MIB})
    assert len(_armers()) == 1
    with subprocess.Popen([sys.executable, "-c", EATER], stdin=subprocess.PIPE) as eater:
        (cgroup / "cgroup.procs").write_text(str(eater.pid))
        eater.communicate(b"go")
    assert _ready(alarms, 60)
    alarms.close()
    assert _armers() == []


def test_asking_for_a_level_does_not_wait_for_the_kernel(cgroup: Path) -> None:
    alarms = _open(cgroup)
    times = []
    for growth in range(20):
        began = time.monotonic()
        alarms.arm({Signal.ALLOCATABLE_MEMORY: (40 - 2 * growth) * MIB})
        times.append(time.monotonic() - began)
    alarms.close()
    # The kernel takes 16 to 36 ms for each but the first.
    assert sorted(times)[10] < 0.005


def test_a_cgroup_that_is_gone_makes_the_sources_stale_and_fails_nobody(cgroup: Path) -> None:
    """A loop that failed for it would never come to open them anew."""
    alarms = _open(cgroup)
    where = _where(cgroup)
    assert not alarms.stale(*where)
    cgroup.rmdir()
    alarms.arm({Signal.ALLOCATABLE_MEMORY: 20 * MIB})
    assert alarms.stale(*where)
    alarms.open(*where)
    assert any("no memory level" in note.message for note in alarms.notes)
    alarms.arm({Signal.ALLOCATABLE_MEMORY: 20 * MIB})
    assert not alarms.stale(*where), "and it is not tried again in every turn"
    cgroup.mkdir()
    alarms.open(*where)
    assert not any("no memory level" in note.message for note in alarms.notes)
    alarms.close()

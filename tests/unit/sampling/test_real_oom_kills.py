"""Real OOM kills in real v1 cgroups, laid out as a kubelet does: found, and attributed as the kernel did it."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from nodeagent.model import OomCause, OomKill, OomLevel, PodView
from nodeagent.policy import oom_attribution
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.node import oom_counters, oom_sources
from nodeagent.sampling.node.kernel_log import OomLogParser
from nodeagent.sampling.node.oom_sources import OomSources
from nodeagent.sampling.sampler import Sampler
from tests.support.kubelet_cgroups import MEMORY, KubeletCgroups
from tests.support.livenode import until

MI: Final = 1 << 20
LIMIT: Final = 32 * MI
OVER_THE_LIMIT: Final = """
import sys
print('ready', flush=True); sys.stdin.readline()
held = bytearray(256 << 20)
for at in range(0, len(held), 4096): held[at] = 1
sys.stdin.read()
"""
CHILD_OVER_THE_LIMIT: Final = """
import os, sys
print('ready', flush=True); sys.stdin.readline()
if not os.fork():
    with open('/proc/self/oom_score_adj', 'w') as file: file.write('1000')
    held = bytearray(256 << 20)
    for at in range(0, len(held), 4096): held[at] = 1
    os._exit(0)
os.wait(); sys.stdin.read()
"""

pytestmark = pytest.mark.real_cgroup


class Kills:
    """The sources of this machine, and what they have attributed so far."""

    def __init__(self, kubelet: KubeletCgroups) -> None:
        self.host = Host("/")
        self.kubelet = kubelet
        self.sampler = Sampler(self.host, kubelet.config(), node_name="n")
        self.sources: OomSources = oom_sources.open_sources(self.host)
        self.parser = OomLogParser()
        self.pods: dict[str, PodView] = {}
        self.total = self.sources.counter.read()
        self.read()

    @property
    def kubepods(self) -> str:
        kubepods = self.sampler.host_layout().kubepods
        assert kubepods is not None
        return kubepods.path

    def read(self) -> tuple[OomKill, ...]:
        """The kills in the scratch subtree since the last call. Other programs of this machine may be killed too."""
        total, before = self.sources.counter.read(), self.total
        assert total is not None
        assert before is not None
        self.total = total
        counts = self.sources.cgroups.read(self.sampler.host_layout().hierarchy, self.kubepods)
        lines = self.parser.parse(
            self.sources.log.read(time.monotonic()), lambda path: oom_counters.place_of(path, self.kubepods)
        )
        result = oom_attribution.attribute(total - before, counts, lines, self.pods)
        return tuple(kill for kill in result.kills if kill.place is None or kill.place.level is not OomLevel.HOST)

    def sample(self) -> None:
        self.pods = {view.pod.cgroup_uid: view for view in self.sampler.sample().pods}

    def close(self) -> None:
        self.sampler.close()
        self.sources.close()


@pytest.fixture
def kills(kubelet: KubeletCgroups) -> Iterator[Kills]:
    made = Kills(kubelet)
    yield made
    made.close()


def over_the_limit(kills: Kills, code: str, *, limited: str = "container") -> subprocess.Popen[bytes]:
    """A container that takes more than it, or its pod, may have, until the kernel has killed."""
    uid = kills.kubelet.pod("web")
    container = kills.kubelet.container(uid, code, name="main")
    directory = Path(container).parent if limited == "pod" else Path(container)
    (MEMORY / str(directory).lstrip("/") / "memory.limit_in_bytes").write_text(str(LIMIT))
    kills.sample()
    process = kills.kubelet.processes[-1]
    assert process.stdin is not None
    process.stdin.write(b"go\n")
    process.stdin.flush()
    control = MEMORY / container.lstrip("/") / "memory.oom_control"
    until(lambda: "oom_kill 1" in control.read_text(), "an OOM kill")
    return process


def test_a_container_over_its_own_limit(kills: Kills) -> None:
    process = over_the_limit(kills, OVER_THE_LIMIT)
    [kill] = kills.read()
    assert process.wait(30) == -9
    assert (kill.number, kill.pod, kill.container) == (1, "default/web", "main")
    if not kills.sources.log.reason:
        assert kill.cause is OomCause.CONTAINER_LIMIT
        assert [each.pid for each in kill.processes] == [process.pid]
    else:
        assert kill.cause is OomCause.UNKNOWN
    assert kills.read() == ()


def test_the_limit_of_the_pod(kills: Kills) -> None:
    over_the_limit(kills, OVER_THE_LIMIT, limited="pod")
    [kill] = kills.read()
    assert (kill.number, kill.pod, kill.container) == (1, "default/web", "main")
    assert kill.cause is (OomCause.UNKNOWN if kills.sources.log.reason else OomCause.POD_LIMIT)


def test_a_child_process_whose_container_survives(kills: Kills) -> None:
    process = over_the_limit(kills, CHILD_OVER_THE_LIMIT)
    [kill] = kills.read()
    assert process.poll() is None
    assert (kill.number, kill.pod, kill.container) == (1, "default/web", "main")
    assert process.pid not in [each.pid for each in kill.processes]


def test_a_pod_whose_cgroups_are_gone_is_attributed_by_the_kernel_log(kills: Kills) -> None:
    if kills.sources.log.reason:
        pytest.skip(f"needs the kernel log: {kills.sources.log.reason}")
    process = over_the_limit(kills, OVER_THE_LIMIT)
    process.wait(30)
    container = next(path for path in kills.kubelet.made if len(path.name) == 64 and MEMORY in path.parents)
    until(lambda: not (container / "cgroup.procs").read_text(), "an empty container")
    os.rmdir(container)
    os.rmdir(container.parent)
    [kill] = kills.read()
    assert (kill.number, kill.pod, kill.container) == (1, "default/web", "main")
    assert kill.cause is OomCause.CONTAINER_LIMIT

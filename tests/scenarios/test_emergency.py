"""On a dying node the eviction request still goes out: no memory, no disk, no descriptors, and no reader of the log."""

import itertools
import os
import resource
import select
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_kube import ApiServer, pod
from tests.support.livenode import (
    HARD,
    HIERARCHIES,
    MIB,
    Kubepods,
    configuration,
    needs_cgroup_v1,
    remove_cgroup,
    until,
)

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

HOG = str(uuid.uuid4())
SETTINGS: dict[str, Any] = {
    **HARD,
    "escalation": {"brake": "freeze", "hardKill": "cgroup"},
    "logging": {"format": "json", "level": "debug"},
}
SPARE = 2 * MIB
"""Memory that the agent may take beyond what it has: the sync that acts takes 0.7 to 1.2 MiB (measured), most of it the
stacks and heaps of threads that had nothing to do before."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with 256 KiB."""
    directory = tmp_path / "small"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", directory], check=True)
    yield directory
    subprocess.run(["umount", directory], check=True)


@pytest.fixture
def own_cgroup() -> Iterator[Path]:
    """A memory cgroup with a hard limit for the agent itself."""
    directory = HIERARCHIES[0] / f"nodeagent-test-{uuid.uuid4().hex[:12]}"
    directory.mkdir()
    yield directory
    remove_cgroup(directory)


def test_the_request_goes_out_without_memory_disk_descriptors_or_a_reader_of_the_log(
    tmp_path: Path, small_disk: Path, own_cgroup: Path
) -> None:
    kubepods = Kubepods(limit=600 * MIB)
    hog = pod("hog", uid=HOG, owner=("ReplicaSet", "hog"), qos="BestEffort")
    with ApiServer(node="lab-node", pods=[hog], linger_s=None) as api:
        frozen_at_request: list[bool] = []
        api.on_eviction = lambda _entry, _body: frozen_at_request.append(kubepods.frozen(HOG, qos="besteffort"))
        try:
            kubepods.start(HOG, qos="besteffort")
            config = configuration(tmp_path, kubepods, **SETTINGS, stateDir=str(small_disk / "state"))
            reader, writer = os.pipe()
            agent = _start_in(own_cgroup, config, api.kubeconfig(tmp_path / "kubeconfig"), writer)
            os.close(writer)
            try:
                calm = lambda: (api.condition("NodeAgentMemoryPressure") or {}).get("status") == "False"  # noqa: E731
                assert api.wait_for(calm, 30)

                log = stop_reading(agent.pid)
                take_memory(own_cgroup)
                fill(small_disk)
                saved = (small_disk / "state" / "state").read_bytes()
                limit = take_descriptors(agent.pid)

                kubepods.eat(HOG, 400, to_the_end=False)
                assert api.wait_for(lambda: api.sent("POST", "/eviction"), 30), _last(reader)
                [request] = api.sent("POST", "/eviction")
                assert request.body["deleteOptions"]["preconditions"] == {"uid": HOG}
                assert frozen_at_request == [True], "it is held as well"
                until(lambda: not kubepods.running(HOG), "and ended")

                # All of it was in force to the end, together.
                assert agent.poll() is None
                assert is_full(log), "no process has read the log"
                assert (small_disk / "state" / "state").read_bytes() != saved, "wiped, as it lacked the eviction"
                disk = os.statvfs(small_disk)
                assert disk.f_bavail * disk.f_frsize <= len(saved) + disk.f_frsize, "the rest of the disk is full"
                assert int((own_cgroup / "memory.max_usage_in_bytes").read_text()) <= _limit(own_cgroup)
                assert resource.prlimit(agent.pid, resource.RLIMIT_NOFILE) == (limit, limit)
            finally:
                agent.kill()
                agent.wait()
                os.close(reader)
        finally:
            kubepods.close()


def _start_in(cgroup: Path, config: Path, kubeconfig: Path, log: int) -> "subprocess.Popen[bytes]":
    """The agent, all of whose memory is charged to this cgroup."""
    agent = [sys.executable, "-m", "nodeagent", "run", "--config", str(config), "--node-name", "lab-node"]
    enter = f'echo $$ > {cgroup}/cgroup.procs && exec "$@"'
    return subprocess.Popen(["sh", "-c", enter, "sh", *agent, "--kubeconfig", str(kubeconfig)], stdout=log, stderr=log)


def stop_reading(pid: int) -> int:
    """Fill the pipe of its log, which no process reads; returns an end of it."""
    log = os.open(f"/proc/{pid}/fd/1", os.O_WRONLY | os.O_NONBLOCK)
    with pytest.raises(BlockingIOError):
        _write_for_ever(log)
    return log


def is_full(log: int) -> bool:
    with open(log, "wb"):
        return not select.select([], [log], [], 0)[1]


def take_memory(cgroup: Path) -> None:
    """Next to nothing beyond what it has."""
    (cgroup / "memory.limit_in_bytes").write_text(str(_usage(cgroup) + SPARE))
    (cgroup / "memory.max_usage_in_bytes").write_text("0")


def fill(disk: Path) -> None:
    filler = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="No space left"):
        _write_for_ever(filler)
    os.close(filler)


def take_descriptors(pid: int) -> int:
    """Not one more than it has now; returns the limit."""
    used = {int(fd) for fd in os.listdir(f"/proc/{pid}/fd")}
    lowest_free = next(number for number in itertools.count() if number not in used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, lowest_free))
    return lowest_free


def _usage(cgroup: Path) -> int:
    return int((cgroup / "memory.usage_in_bytes").read_text())


def _limit(cgroup: Path) -> int:
    return int((cgroup / "memory.limit_in_bytes").read_text())


def _write_for_ever(fd: int) -> None:
    while True:
        os.write(fd, b"x" * 4096)


def _last(reader: int) -> str:
    return os.read(reader, 1 << 20).decode(errors="replace")[-3000:]

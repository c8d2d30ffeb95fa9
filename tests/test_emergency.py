"""On a dying node the eviction request still goes out: no memory, no disk, no descriptors, and nobody reads the log."""

import os
import resource
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.apiserver import ApiServer, pod
from tests.livenode import HIERARCHIES, MIB, Kubepods, configuration, needs_cgroup_v1, until

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

HOG = str(uuid.uuid4())
HARD: dict[str, object] = {
    "evictionHard": {"allocatableMemory.available": "300Mi"},
    "evictionSoft": {},
    "evictionSoftGracePeriod": {},
    "logging": {"format": "json", "level": "debug"},
}


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
    until(lambda: _removed(directory), "the agent's cgroup is empty")


def _removed(directory: Path) -> bool:
    try:
        directory.rmdir()
    except OSError:
        return not directory.exists()
    return True


def test_the_request_goes_out_without_memory_disk_descriptors_or_a_reader_of_the_log(
    tmp_path: Path, small_disk: Path, own_cgroup: Path
) -> None:
    kubepods = Kubepods(limit=600 * MIB)
    hog = pod("hog", uid=HOG, owner=("ReplicaSet", "hog"), qos="BestEffort")
    with ApiServer(node="lab-node", pods=[hog], linger_s=None) as api:
        try:
            kubepods.start(HOG, qos="besteffort")
            config = configuration(tmp_path, kubepods, **HARD, stateDir=str(small_disk / "state"))
            reader, writer = os.pipe()
            command = [sys.executable, "-m", "nodeagent", "run", "--config", str(config), "--node-name", "lab-node"]
            kubeconfig = api.kubeconfig(tmp_path / "kubeconfig")
            agent = subprocess.Popen([*command, "--kubeconfig", str(kubeconfig)], stdout=writer, stderr=writer)
            os.close(writer)
            try:
                calm = lambda: (api.condition("NodeAgentMemoryPressure") or {}).get("status") == "False"  # noqa: E731
                assert api.wait_for(calm, 30)

                # Nobody reads the log: its pipe is full from now on.
                filler = os.open(f"/proc/{agent.pid}/fd/1", os.O_WRONLY | os.O_NONBLOCK)
                with pytest.raises(BlockingIOError):
                    _write_for_ever(filler)
                os.close(filler)
                # No memory beyond what it has.
                (own_cgroup / "cgroup.procs").write_text(str(agent.pid))
                (own_cgroup / "memory.limit_in_bytes").write_text(str(8 * MIB))
                # No disk for its state and records.
                filler = os.open(small_disk / "filler", os.O_WRONLY | os.O_CREAT)
                with pytest.raises(OSError, match="No space left"):
                    _write_for_ever(filler)
                os.close(filler)
                # Not one descriptor more than it has now.
                in_use = max(int(fd) for fd in os.listdir(f"/proc/{agent.pid}/fd")) + 1
                resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (in_use, in_use))

                kubepods.eat(HOG, 400)
                assert api.wait_for(lambda: api.sent("POST", "/eviction"), 30), _last(reader)
                [request] = api.sent("POST", "/eviction")
                assert request.body["deleteOptions"]["preconditions"] == {"uid": HOG}
                assert agent.poll() is None
            finally:
                agent.kill()
                agent.wait()
                os.close(reader)
        finally:
            kubepods.close()


def _write_for_ever(fd: int) -> None:
    while True:
        os.write(fd, b"x" * 4096)


def _last(reader: int) -> str:
    return os.read(reader, 1 << 20).decode(errors="replace")[-3000:]

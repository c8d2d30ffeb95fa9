"""A brake holds real processes in a real cgroup, lets them go again, and a kill ends all of them."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeagent.host.brake import BrakeKind, CgroupBrake, HoldError

FREEZER = Path("/sys/fs/cgroup/freezer")

real_v1 = pytest.mark.skipif(
    os.geteuid() != 0 or not os.access(FREEZER / "cgroup.procs", os.W_OK),
    reason="needs root and a writable cgroup v1 freezer hierarchy",
)


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"never seen: {what}"
        os.sched_yield()


@pytest.fixture
def pod() -> Iterator[Path]:
    """A cgroup of the v1 freezer with a child, as a pod with a container."""
    directory = FREEZER / f"nodeagent-test-{uuid.uuid4().hex}"
    (directory / "container").mkdir(parents=True)
    yield directory
    CgroupBrake(unified=None, freezer=FREEZER).kill("/" + directory.name)
    for place in (directory / "container", directory):
        _until(lambda place=place: _removed(place), f"{place} is empty")  # type: ignore[misc]


def _removed(directory: Path) -> bool:
    try:
        directory.rmdir()
    except OSError:
        return not directory.exists()
    return True


def _start(pod: Path, program: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    (pod / "container" / "cgroup.procs").write_text(str(process.pid))
    return process


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.real_cgroup
@real_v1
def test_a_frozen_pod_stands_still_and_goes_on_when_released(pod: Path) -> None:
    brake = CgroupBrake(unified=None, freezer=FREEZER)
    with _start(pod, "while True: pass") as process:
        hold = brake.plan_hold("/" + pod.name, BrakeKind.FREEZE, pod_uid="u", until=0.0)
        assert (pod / "freezer.state").read_text().strip() == "THAWED", "planning must change nothing"
        assert brake.apply(hold)
        _until(lambda: (pod / "freezer.state").read_text().strip() == "FROZEN", "the pod is frozen")
        before = _cpu_ticks(process.pid)
        assert [_cpu_ticks(process.pid) for _ in range(2000)] == [before] * 2000
        assert brake.release(hold)
        _until(lambda: _cpu_ticks(process.pid) > before, "the process runs again")
        process.kill()


@pytest.mark.real_cgroup
@real_v1
def test_a_kill_ends_every_process_of_the_subtree_even_while_it_forks(pod: Path) -> None:
    forks = "import os, time\nos.fork(); os.fork()\nos.write(1, b'up\\n')\nwhile True: time.sleep(60)\n"
    with _start(pod, forks) as process:
        assert process.stdout is not None
        for _ in range(4):
            assert process.stdout.readline() == b"up\n"
        CgroupBrake(unified=None, freezer=FREEZER).kill("/" + pod.name)
        assert process.wait(20) == -9
    _until(lambda: not (pod / "container" / "cgroup.procs").read_text(), "no process is left")


@pytest.mark.real_cgroup
@real_v1
def test_without_a_freezer_the_kill_still_signals_everyone(pod: Path) -> None:
    with _start(pod, "import time\nprint('up', flush=True)\ntime.sleep(600)") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        CgroupBrake(unified=None, freezer=None, procs_roots=(FREEZER,)).kill("/" + pod.name)
        assert process.wait(20) == -9


def test_a_cgroup_that_is_gone_holds_nothing(tmp_path: Path) -> None:
    pod = tmp_path / "pod"
    pod.mkdir()
    (pod / "memory.high").write_text("max\n")
    (pod / "memory.current").write_text("4096\n")
    brake = CgroupBrake(unified=tmp_path, freezer=None)
    hold = brake.plan_hold("/pod", BrakeKind.THROTTLE, pod_uid="u", until=1.0)
    assert (hold.previous, hold.value) == ("max", "4096")
    assert brake.apply(hold)
    assert (pod / "memory.high").read_text() == "4096"
    for file in pod.iterdir():
        file.unlink()
    pod.rmdir()
    assert not brake.apply(hold)
    assert not brake.release(hold)
    with pytest.raises(HoldError, match="No such file"):
        brake.plan_hold("/pod", BrakeKind.THROTTLE, pod_uid="u", until=1.0)


def test_v1_says_that_it_cannot_throttle() -> None:
    with pytest.raises(HoldError, match=r"memory\.high"):
        CgroupBrake(unified=None, freezer=FREEZER).plan_hold("/x", BrakeKind.THROTTLE, pod_uid="u", until=0.0)


@pytest.mark.parametrize("cgroup", ["", "/", "/kubepods/../../system.slice"])
def test_only_a_pods_cgroup_can_be_held(cgroup: str, tmp_path: Path) -> None:
    with pytest.raises(HoldError, match="not a pod's cgroup"):
        CgroupBrake(unified=tmp_path, freezer=None).plan_hold(cgroup, BrakeKind.FREEZE, pod_uid="u", until=0.0)


def test_a_host_that_lists_no_processes_does_not_claim_to_have_ended_any() -> None:
    with pytest.raises(HoldError, match="no hierarchy"):
        CgroupBrake(unified=None, freezer=None).kill("/kubepods/podx")


@pytest.mark.real_cgroup
@real_v1
def test_a_cgroup_counts_as_frozen_only_by_its_own_file(pod: Path) -> None:
    brake = CgroupBrake(unified=None, freezer=FREEZER)
    assert brake.frozen("/" + pod.name, pod_uid="u", until=0.0) is None
    (pod / "freezer.state").write_text("FROZEN")
    hold = brake.frozen("/" + pod.name, pod_uid="u", until=0.0)
    assert hold is not None
    assert brake.frozen(f"/{pod.name}/container", pod_uid="u", until=0.0) is None
    brake.release(hold)
    _until(lambda: (pod / "freezer.state").read_text().strip() == "THAWED", "it is thawed")
    assert brake.frozen("/gone", pod_uid="u", until=0.0) is None

"""A brake stops real processes in a real cgroup, a release lets them run again, and a kill ends all of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nodeagent.actuators.cgroup_brake import XATTR, BrakeError, BrakeKind, CgroupBrake, NoXattrError
from tests.support import freezer_cgroups
from tests.support.freezer_cgroups import FREEZER, cpu_ticks, real_v1, real_v2, removed, start_in, until
from tests.support.mounts import mounted


@pytest.mark.real_cgroup
@real_v1
def test_a_frozen_pod_gets_no_cpu_time_and_runs_again_when_released(pod: Path) -> None:
    brake = CgroupBrake(unified=None, freezer=FREEZER)
    with start_in(pod, "while True: pass") as process:
        planned = brake.plan_brake("/" + pod.name, BrakeKind.FREEZE, pod_uid="u", until=0.0)
        assert (pod / "freezer.state").read_text().strip() == "THAWED", "planning must change nothing"
        assert brake.apply(planned)
        until(lambda: (pod / "freezer.state").read_text().strip() == "FROZEN", "the pod is frozen")
        before = cpu_ticks(process.pid)
        assert [cpu_ticks(process.pid) for _ in range(2000)] == [before] * 2000
        assert brake.release(planned)
        until(lambda: cpu_ticks(process.pid) > before, "the process runs again")
        process.kill()


@pytest.mark.real_cgroup
@real_v1
def test_a_kill_ends_every_process_of_the_subtree_even_while_it_forks(pod: Path) -> None:
    forks = "import os, time\nos.fork(); os.fork()\nos.write(1, b'up\\n')\nwhile True: time.sleep(60)\n"
    with start_in(pod, forks) as process:
        assert process.stdout is not None
        for _ in range(4):
            assert process.stdout.readline() == b"up\n"
        CgroupBrake(unified=None, freezer=FREEZER).kill("/" + pod.name)
        assert process.wait(20) == -9
    until(lambda: not (pod / "container" / "cgroup.procs").read_text(), "no process is left")


@pytest.mark.real_cgroup
@real_v2
@pytest.mark.parametrize("brake_before", [False, True])
def test_without_cgroup_kill_every_process_of_a_v2_pod_is_signalled(tmp_path: Path, brake_before: bool) -> None:
    with freezer_cgroups.pod_of_linux_5_13(tmp_path) as pod:
        brake = CgroupBrake(unified=tmp_path, freezer=None)
        assert brake.freezes_to_kill("/pod")
        with start_in(pod, "import os\nos.fork()\nos.write(1, b'up\\n')\nwhile True: pass\n") as process:
            assert process.stdout is not None
            assert [process.stdout.readline() for _ in range(2)] == [b"up\n"] * 2
            if brake_before:
                brake.apply(brake.plan_brake("/pod", BrakeKind.FREEZE, pod_uid="u", until=0.0))
            brake.kill("/pod")
            assert process.wait(20) == -9
        until(lambda: not (pod / "container/cgroup.procs").read_text(), "no process is left")
        assert (pod / "cgroup.freeze").read_text() == "0\n"


@pytest.mark.real_cgroup
@real_v2
def test_without_cgroup_kill_no_fork_outruns_the_signals(tmp_path: Path) -> None:
    """Each process ends as soon as it has made the next one."""
    with freezer_cgroups.pod_of_linux_5_13(tmp_path) as pod:
        program = "import os\nos.write(1, b'up\\n')\nos.close(1)\nwhile True:\n  if os.fork(): os._exit(0)\n"
        with start_in(pod, program) as process:
            assert process.stdout is not None
            assert process.stdout.read() == b"up\n"
            process.wait(20)
        CgroupBrake(unified=tmp_path, freezer=None).kill("/pod")
        until(lambda: not (pod / "container/cgroup.procs").read_text(), "no process is left")


def test_a_v2_pod_whose_processes_cannot_be_signalled_is_not_killed(unified: Path) -> None:
    """In a PID namespace of its own the agent reads each of them as 0."""
    (unified / "pod/cgroup.kill").unlink()
    (unified / "pod/cgroup.procs").write_text("0\n0\n")
    with pytest.raises(BrakeError, match="PID namespace"):
        CgroupBrake(unified=unified, freezer=None).kill("/pod")
    assert (unified / "pod/cgroup.freeze").read_text().strip() == "0"


def test_the_kill_of_a_v2_cgroup_that_is_gone_is_a_success(tmp_path: Path) -> None:
    CgroupBrake(unified=tmp_path, freezer=None).kill("/kubepods/podx")


@pytest.mark.real_cgroup
@real_v1
def test_without_a_freezer_the_kill_still_signals_every_process(pod: Path) -> None:
    with start_in(pod, "import time\nprint('up', flush=True)\ntime.sleep(600)") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        CgroupBrake(unified=None, freezer=None, procs_roots=(FREEZER,)).kill("/" + pod.name)
        assert process.wait(20) == -9


@pytest.mark.real_cgroup
@real_v1
def test_a_kill_reaches_a_process_below_a_thousand_cgroups(pod: Path) -> None:
    chain = [pod / "container"]
    for _ in range(1100):  # more than Python recurses
        chain.append(chain[-1] / "n")
        chain[-1].mkdir()
    try:
        with start_in(pod, "import time\nprint('up', flush=True)\ntime.sleep(600)") as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            (chain[-1] / "cgroup.procs").write_text(str(process.pid))
            CgroupBrake(unified=None, freezer=FREEZER).kill("/" + pod.name)
            assert process.wait(20) == -9
    finally:
        for path in reversed(chain[1:]):
            until(lambda path=path: removed(path), f"{path} is empty")  # type: ignore[misc]


def test_a_cgroup_that_is_gone_has_no_brake(tmp_path: Path) -> None:
    pod = tmp_path / "pod"
    pod.mkdir()
    (pod / "memory.high").write_text("max\n")
    (pod / "memory.current").write_text("4096\n")
    brake = CgroupBrake(unified=tmp_path, freezer=None)
    planned = brake.plan_brake("/pod", BrakeKind.THROTTLE, pod_uid="u", until=1.0)
    assert (planned.previous, planned.value) == ("max", "4096")
    assert brake.apply(planned)
    assert (pod / "memory.high").read_text() == "4096"
    for file in pod.iterdir():
        file.unlink()
    pod.rmdir()
    assert not brake.apply(planned)
    assert not brake.release(planned)
    with pytest.raises(BrakeError, match="No such file"):
        brake.plan_brake("/pod", BrakeKind.THROTTLE, pod_uid="u", until=1.0)


def test_cgroup_v1_refuses_to_throttle() -> None:
    with pytest.raises(BrakeError, match=r"memory\.high"):
        CgroupBrake(unified=None, freezer=FREEZER).plan_brake("/x", BrakeKind.THROTTLE, pod_uid="u", until=0.0)


@pytest.mark.parametrize("cgroup", ["", "/", "/kubepods/../../system.slice"])
def test_only_a_pods_cgroup_can_be_braked(cgroup: str, tmp_path: Path) -> None:
    with pytest.raises(BrakeError, match="not a pod's cgroup"):
        CgroupBrake(unified=tmp_path, freezer=None).plan_brake(cgroup, BrakeKind.FREEZE, pod_uid="u", until=0.0)


def test_a_host_that_lists_no_processes_reports_no_kill() -> None:
    with pytest.raises(BrakeError, match="no hierarchy"):
        CgroupBrake(unified=None, freezer=None).kill("/kubepods/podx")


@pytest.mark.real_cgroup
@real_v1
def test_a_cgroup_counts_as_frozen_only_by_its_own_file(pod: Path) -> None:
    brake = CgroupBrake(unified=None, freezer=FREEZER)
    assert brake.frozen("/" + pod.name, pod_uid="u", until=0.0) is None
    (pod / "freezer.state").write_text("FROZEN")
    planned = brake.frozen("/" + pod.name, pod_uid="u", until=0.0)
    assert planned is not None
    assert brake.frozen(f"/{pod.name}/container", pod_uid="u", until=0.0) is None
    brake.release(planned)
    until(lambda: (pod / "freezer.state").read_text().strip() == "THAWED", "it is thawed")
    assert brake.frozen("/gone", pod_uid="u", until=0.0) is None


@pytest.mark.real_cgroup
@real_v1
def test_a_braked_cgroup_is_marked_until_it_is_released(pod: Path) -> None:
    brake = CgroupBrake(unified=None, freezer=FREEZER)
    cgroup = "/" + pod.name
    planned = brake.plan_brake(cgroup, BrakeKind.FREEZE, pod_uid="u", until=0.0)
    assert brake.read_xattr(cgroup, pod_uid="u", until=0.0) is None, "planning must change nothing"
    brake.write_xattr(planned)
    assert (pod / "freezer.state").read_text() == "THAWED\n", "nor does the mark brake"
    brake.apply(planned)
    assert brake.read_xattr(cgroup, pod_uid="u", until=0.0) == planned
    assert brake.read_xattr(f"{cgroup}/container", pod_uid="u", until=0.0) is None, (
        "the mark does not include its children"
    )
    assert brake.release(planned)
    assert XATTR not in os.listxattr(pod)


WITHOUT_CAPABILITIES = """
import sys
from pathlib import Path
from nodeagent.actuators.cgroup_brake import BrakeKind, CgroupBrake
brake = CgroupBrake(unified=None, freezer=Path(sys.argv[1]))
planned = brake.plan_brake(sys.argv[2], BrakeKind.FREEZE, pod_uid="u", until=0.0)
brake.write_xattr(planned)
brake.apply(planned)
assert brake.read_xattr(sys.argv[2], pod_uid="u", until=0.0) == planned
brake.release(planned)
assert brake.read_xattr(sys.argv[2], pod_uid="u", until=0.0) is None
print(Path("/proc/self/status").read_text())
"""


@pytest.mark.real_cgroup
@real_v1
def test_root_needs_no_capability_to_brake_to_mark_and_to_release(pod: Path) -> None:
    program = [sys.executable, "-c", WITHOUT_CAPABILITIES, str(FREEZER), "/" + pod.name]
    command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *program]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert "CapEff:\t0000000000000000" in ran.stdout


def test_the_mark_of_a_throttled_pod_records_the_previous_limit(unified: Path) -> None:
    brake = CgroupBrake(unified=unified, freezer=None)
    (unified / "pod" / "memory.high").write_text("500\n")
    planned = brake.plan_brake("/pod", BrakeKind.THROTTLE, pod_uid="u", until=0.0)
    brake.write_xattr(planned)
    brake.apply(planned)
    found = brake.read_xattr("/pod", pod_uid="u", until=0.0)
    assert found == planned
    assert found.previous == "500"


@pytest.mark.parametrize(("limit", "value"), [("max", "819"), ("900", "819"), ("500", "500")])
def test_a_throttle_never_raises_the_limit_of_a_pod(unified: Path, limit: str, value: str) -> None:
    (unified / "pod" / "memory.high").write_text(f"{limit}\n")
    brake = CgroupBrake(unified=unified, freezer=None)
    planned = brake.plan_brake("/pod", BrakeKind.THROTTLE, pod_uid="u", until=1.0)
    assert (planned.previous, planned.value) == (limit, value)


def test_a_limit_that_another_program_has_set_since_is_kept(unified: Path) -> None:
    """A pod that was resized in place while no agent ran to release it."""
    brake = CgroupBrake(unified=unified, freezer=None)
    planned = brake.plan_brake("/pod", BrakeKind.THROTTLE, pod_uid="u", until=0.0)
    brake.write_xattr(planned)
    brake.apply(planned)
    (unified / "pod" / "memory.high").write_text("524288000\n")
    found = brake.read_xattr("/pod", pod_uid="u", until=0.0)
    assert found is not None
    brake.release(found)
    assert (unified / "pod" / "memory.high").read_text().strip() == "524288000"
    assert brake.read_xattr("/pod", pod_uid="u", until=0.0) is None


@pytest.mark.parametrize(
    "mark",
    [
        b"",
        b"throttle",
        b"2 throttle max 8192",
        b"1 squeeze max 8192",
        b"1 throttle  8192",
        b"1 throttle lots 8192",
        b"1 throttle -1 8192",
        b"1 throttle 1e9 8192",
        b"1 throttle max 8192 more",
        b"1 throttle max\n8192 x",
        "1 throttle \N{ARABIC-INDIC DIGIT FOUR} 8192".encode(),
        b"1 throttle " + b"9" * 100 + b" 8192",
        b"1 freeze 1 0",
        b"1 freeze THAWED FROZEN",
        b"\xff\xfe",
    ],
)
def test_a_mark_that_no_agent_writes_is_an_error(unified: Path, mark: bytes) -> None:
    os.setxattr(unified / "pod", XATTR, mark)
    with pytest.raises(BrakeError, match=XATTR) as raised:
        CgroupBrake(unified=unified, freezer=None).read_xattr("/pod", pod_uid="u", until=0.0)
    assert len(str(raised.value)) < 400


@pytest.mark.real_cgroup
@real_v1
def test_a_mark_of_a_throttle_is_an_error_on_cgroup_v1(pod: Path) -> None:
    os.setxattr(pod, XATTR, b"1 throttle max 8192")
    with pytest.raises(BrakeError, match=XATTR):
        CgroupBrake(unified=None, freezer=FREEZER).read_xattr("/" + pod.name, pod_uid="u", until=0.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_a_kernel_that_stores_no_marks_brakes_all_the_same(tmp_path: Path) -> None:
    with mounted(tmp_path / "ram", "-t", "ramfs", "ramfs") as root:
        (root / "pod").mkdir()
        (root / "pod" / "cgroup.freeze").write_text("0\n")
        brake = CgroupBrake(unified=root, freezer=None)
        planned = brake.plan_brake("/pod", BrakeKind.FREEZE, pod_uid="u", until=0.0)
        brake.write_xattr(planned)
        assert brake.apply(planned)
        with pytest.raises(NoXattrError):
            brake.read_xattr("/pod", pod_uid="u", until=0.0)
        assert brake.release(planned)


@pytest.mark.parametrize(("limit", "high", "value"), [(900, "max", "900"), (700, "max", "819"), (900, "850", "850")])
def test_a_limit_is_never_below_the_usage_nor_above_the_previous_limit(
    unified: Path, limit: int, high: str, value: str
) -> None:
    (unified / "pod/memory.high").write_text(high + "\n")
    brake = CgroupBrake(unified=unified, freezer=None)
    planned = brake.plan_brake("/pod", BrakeKind.THROTTLE, pod_uid="u", until=0.0, limit=limit)
    assert (planned.previous, planned.value) == (high, value)

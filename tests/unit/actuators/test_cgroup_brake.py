"""A brake holds real processes in a real cgroup, lets them go again, and a kill ends all of them."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeagent.actuators.cgroup_brake import XATTR, BrakeError, BrakeKind, CgroupBrake, NoXattrError
from tests.support.mounts import mounted

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
        hold = brake.plan_brake("/" + pod.name, BrakeKind.FREEZE, pod_uid="u", until=0.0)
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


@pytest.mark.real_cgroup
@real_v1
def test_a_kill_reaches_whoever_is_below_a_thousand_cgroups(pod: Path) -> None:
    chain = [pod / "container"]
    for _ in range(1100):  # more than Python recurses
        chain.append(chain[-1] / "n")
        chain[-1].mkdir()
    try:
        with _start(pod, "import time\nprint('up', flush=True)\ntime.sleep(600)") as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            (chain[-1] / "cgroup.procs").write_text(str(process.pid))
            CgroupBrake(unified=None, freezer=FREEZER).kill("/" + pod.name)
            assert process.wait(20) == -9
    finally:
        for place in reversed(chain[1:]):
            _until(lambda place=place: _removed(place), f"{place} is empty")  # type: ignore[misc]


def test_a_cgroup_that_is_gone_holds_nothing(tmp_path: Path) -> None:
    pod = tmp_path / "pod"
    pod.mkdir()
    (pod / "memory.high").write_text("max\n")
    (pod / "memory.current").write_text("4096\n")
    brake = CgroupBrake(unified=tmp_path, freezer=None)
    hold = brake.plan_brake("/pod", BrakeKind.THROTTLE, pod_uid="u", until=1.0)
    assert (hold.previous, hold.value) == ("max", "4096")
    assert brake.apply(hold)
    assert (pod / "memory.high").read_text() == "4096"
    for file in pod.iterdir():
        file.unlink()
    pod.rmdir()
    assert not brake.apply(hold)
    assert not brake.release(hold)
    with pytest.raises(BrakeError, match="No such file"):
        brake.plan_brake("/pod", BrakeKind.THROTTLE, pod_uid="u", until=1.0)


def test_v1_says_that_it_cannot_throttle() -> None:
    with pytest.raises(BrakeError, match=r"memory\.high"):
        CgroupBrake(unified=None, freezer=FREEZER).plan_brake("/x", BrakeKind.THROTTLE, pod_uid="u", until=0.0)


@pytest.mark.parametrize("cgroup", ["", "/", "/kubepods/../../system.slice"])
def test_only_a_pods_cgroup_can_be_held(cgroup: str, tmp_path: Path) -> None:
    with pytest.raises(BrakeError, match="not a pod's cgroup"):
        CgroupBrake(unified=tmp_path, freezer=None).plan_brake(cgroup, BrakeKind.FREEZE, pod_uid="u", until=0.0)


def test_a_host_that_lists_no_processes_does_not_claim_to_have_ended_any() -> None:
    with pytest.raises(BrakeError, match="no hierarchy"):
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


@pytest.mark.real_cgroup
@real_v1
def test_a_held_cgroup_says_so_itself_until_it_is_let_go(pod: Path) -> None:
    brake = CgroupBrake(unified=None, freezer=FREEZER)
    cgroup = "/" + pod.name
    hold = brake.plan_brake(cgroup, BrakeKind.FREEZE, pod_uid="u", until=0.0)
    assert brake.read_xattr(cgroup, pod_uid="u", until=0.0) is None, "planning must change nothing"
    brake.write_xattr(hold)
    assert (pod / "freezer.state").read_text() == "THAWED\n", "nor does the mark hold anything"
    brake.apply(hold)
    assert brake.read_xattr(cgroup, pod_uid="u", until=0.0) == hold
    assert brake.read_xattr(f"{cgroup}/container", pod_uid="u", until=0.0) is None, "it says nothing of its children"
    assert brake.release(hold)
    assert XATTR not in os.listxattr(pod)


WITHOUT_POWERS = """
import sys
from pathlib import Path
from nodeagent.actuators.cgroup_brake import BrakeKind, CgroupBrake
brake = CgroupBrake(unified=None, freezer=Path(sys.argv[1]))
hold = brake.plan_hold(sys.argv[2], BrakeKind.FREEZE, pod_uid="u", until=0.0)
brake.mark(hold)
brake.apply(hold)
assert brake.marked(sys.argv[2], pod_uid="u", until=0.0) == hold
brake.release(hold)
assert brake.marked(sys.argv[2], pod_uid="u", until=0.0) is None
print(Path("/proc/self/status").read_text())
"""


@pytest.mark.real_cgroup
@real_v1
def test_root_needs_no_capability_to_hold_to_mark_and_to_let_go(pod: Path) -> None:
    program = [sys.executable, "-c", WITHOUT_POWERS, str(FREEZER), "/" + pod.name]
    command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *program]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert "CapEff:\t0000000000000000" in ran.stdout


@pytest.fixture
def unified(tmp_path: Path) -> Path:
    """A v2 pod cgroup as plain files: what is written must be as long as what was there."""
    pod = tmp_path / "pod"
    pod.mkdir()
    for name, text in {"memory.high": "max", "memory.current": "819", "cgroup.freeze": "0"}.items():
        (pod / name).write_text(text + "\n")
    try:
        os.setxattr(pod, "user.any", b"")
    except OSError as error:
        pytest.skip(f"{tmp_path} keeps no extended attributes: {error.strerror}")
    return tmp_path


def test_the_mark_of_a_throttled_pod_tells_what_to_put_back(unified: Path) -> None:
    brake = CgroupBrake(unified=unified, freezer=None)
    (unified / "pod" / "memory.high").write_text("500\n")
    hold = brake.plan_brake("/pod", BrakeKind.THROTTLE, pod_uid="u", until=0.0)
    brake.write_xattr(hold)
    brake.apply(hold)
    found = brake.read_xattr("/pod", pod_uid="u", until=0.0)
    assert found == hold
    assert found.previous == "500"


@pytest.mark.parametrize(("limit", "held"), [("max", "819"), ("900", "819"), ("500", "500")])
def test_a_throttled_pod_is_never_given_more_than_it_had(unified: Path, limit: str, held: str) -> None:
    (unified / "pod" / "memory.high").write_text(f"{limit}\n")
    brake = CgroupBrake(unified=unified, freezer=None)
    hold = brake.plan_brake("/pod", BrakeKind.THROTTLE, pod_uid="u", until=1.0)
    assert (hold.previous, hold.value) == (limit, held)


def test_a_limit_that_somebody_has_set_since_is_not_overwritten(unified: Path) -> None:
    """A pod that was resized in place while nobody lived who could have let it go."""
    brake = CgroupBrake(unified=unified, freezer=None)
    hold = brake.plan_brake("/pod", BrakeKind.THROTTLE, pod_uid="u", until=0.0)
    brake.write_xattr(hold)
    brake.apply(hold)
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
def test_a_mark_that_no_agent_writes_is_an_error_and_nothing_to_go_by(unified: Path, mark: bytes) -> None:
    os.setxattr(unified / "pod", XATTR, mark)
    with pytest.raises(BrakeError, match=XATTR) as raised:
        CgroupBrake(unified=unified, freezer=None).read_xattr("/pod", pod_uid="u", until=0.0)
    assert len(str(raised.value)) < 400


@pytest.mark.real_cgroup
@real_v1
def test_a_mark_of_a_throttle_is_impossible_where_nothing_can_be_throttled(pod: Path) -> None:
    os.setxattr(pod, XATTR, b"1 throttle max 8192")
    with pytest.raises(BrakeError, match=XATTR):
        CgroupBrake(unified=None, freezer=FREEZER).read_xattr("/" + pod.name, pod_uid="u", until=0.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_a_kernel_that_keeps_no_marks_holds_all_the_same(tmp_path: Path) -> None:
    with mounted(tmp_path / "ram", "-t", "ramfs", "ramfs") as root:
        (root / "pod").mkdir()
        (root / "pod" / "cgroup.freeze").write_text("0\n")
        brake = CgroupBrake(unified=root, freezer=None)
        hold = brake.plan_brake("/pod", BrakeKind.FREEZE, pod_uid="u", until=0.0)
        brake.write_xattr(hold)
        assert brake.apply(hold)
        with pytest.raises(NoXattrError):
            brake.read_xattr("/pod", pod_uid="u", until=0.0)
        assert brake.release(hold)


@pytest.mark.parametrize(("limit", "high", "value"), [(900, "max", "900"), (700, "max", "819"), (900, "850", "850")])
def test_a_limit_is_never_below_what_is_used_nor_above_what_was_set(
    unified: Path, limit: int, high: str, value: str
) -> None:
    (unified / "pod/memory.high").write_text(high + "\n")
    brake = CgroupBrake(unified=unified, freezer=None)
    hold = brake.plan_brake("/pod", BrakeKind.THROTTLE, pod_uid="u", until=0.0, limit=limit)
    assert (hold.previous, hold.value) == (high, value)

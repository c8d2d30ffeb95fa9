"""Whatever happens to a held pod's eviction, the pod is let go; a real frozen process is the witness."""

import os
from pathlib import Path

import pytest

from nodeagent.actuators.brakes import ActiveBrakes, leftover_brakes
from nodeagent.actuators.cgroup_brake import XATTR, BrakeKind, CgroupBrake
from nodeagent.loop.state_store import AgentState
from nodeagent.policy import state as policy_state
from nodeagent.records.state_file import StateFile
from tests.support.mounts import mounted
from tests.unit.actuators.test_cgroup_brake import FREEZER, _cpu_ticks, _start, _until, pod, real_v1, unified  # noqa: F401 - fixtures

NOW = 100.0


def _state(cgroup: Path) -> str:
    return (cgroup / "freezer.state").read_text().strip()


def _frozen(cgroup: Path) -> ActiveBrakes:
    holds = ActiveBrakes(CgroupBrake(unified=None, freezer=FREEZER))
    holds.plan("/" + cgroup.name, BrakeKind.FREEZE, pod_uid="u", until=NOW + 10)
    assert _state(cgroup) == "THAWED", "a plan changes nothing"
    assert holds.apply("u", saved=False)
    _until(lambda: _state(cgroup) == "FROZEN", "the pod is frozen")
    return holds


@pytest.mark.real_cgroup
@real_v1
def test_a_pod_is_held_until_its_deadline_and_not_longer(pod: Path) -> None:  # noqa: F811
    with _start(pod, "while True: pass") as process:
        holds = _frozen(pod)
        holds.expire(now=NOW + 9.9)
        assert _state(pod) == "FROZEN"
        holds.expire(now=NOW + 10)
        assert not holds.active
        before = _cpu_ticks(process.pid)
        _until(lambda: _cpu_ticks(process.pid) > before, "the process runs again")
        process.kill()


@pytest.mark.real_cgroup
@real_v1
def test_a_pod_whose_request_failed_is_let_go_at_once(pod: Path) -> None:  # noqa: F811
    with _start(pod, "while True: pass") as process:
        holds = _frozen(pod)
        holds.release("u")
        _until(lambda: _state(pod) == "THAWED", "the pod is thawed")
        assert not holds.active
        process.kill()


@pytest.mark.real_cgroup
@real_v1
def test_the_next_process_lets_go_what_the_last_one_held(pod: Path) -> None:  # noqa: F811
    with _start(pod, "while True: pass") as process:
        left_behind = _frozen(pod).active
        restarted = ActiveBrakes(CgroupBrake(unified=None, freezer=FREEZER), left_behind)
        restarted.expire(now=0.0)
        _until(lambda: _state(pod) == "THAWED", "the pod is thawed")
        assert restarted.active == ()
        process.kill()


@pytest.mark.real_cgroup
@real_v1
def test_an_accepted_victim_is_ended_although_it_is_frozen(pod: Path) -> None:  # noqa: F811
    with _start(pod, "while True: pass") as process:
        holds = _frozen(pod)
        holds.kill("/" + pod.name, pod_uid="u")
        assert process.wait(20) == -9
        assert not holds.active


@pytest.mark.real_cgroup
@real_v1
def test_ending_a_pod_that_is_not_held_is_written_down_first_because_it_freezes(pod: Path) -> None:  # noqa: F811
    with _start(pod, "while True: pass") as process:
        holds = ActiveBrakes(CgroupBrake(unified=None, freezer=FREEZER))
        assert holds.plan_kill("/" + pod.name, pod_uid="u")
        [hold] = holds.active
        assert (hold.cgroup, hold.previous) == ("/" + pod.name, "THAWED")
        assert not holds.plan_kill("/" + pod.name, pod_uid="u"), "what is held is written down already"
        assert holds.kill("/" + pod.name, pod_uid="u") == ""
        assert process.wait(20) == -9
        assert not holds.active


def test_ending_a_pod_on_cgroup_v2_freezes_nothing_and_needs_no_writing(files: Path) -> None:
    holds = ActiveBrakes(CgroupBrake(unified=files, freezer=None))
    assert not holds.plan_kill("/pod", pod_uid="u")
    assert not holds.active


def test_what_is_held_can_be_saved_and_read_back_also_when_it_is_overdue(files: Path, tmp_path: Path) -> None:
    holds = ActiveBrakes(CgroupBrake(unified=files, freezer=None))
    holds.plan("/pod", BrakeKind.THROTTLE, pod_uid="u", until=NOW)
    store = StateFile(tmp_path / "state", shape=AgentState, boot_id="boot")
    for held in (holds.active, ActiveBrakes(CgroupBrake(unified=files, freezer=None), holds.active).active):
        saved = AgentState(policy_state.initial("i", now=NOW), brakes=held)
        store.save(saved)
        assert store.load().value == saved


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A v2 pod cgroup as plain files: what is written can be read back."""
    (tmp_path / "pod").mkdir()
    (tmp_path / "pod" / "memory.high").write_text("max\n")
    (tmp_path / "pod" / "memory.current").write_text("4096\n")
    return tmp_path


def test_a_cgroup_that_is_gone_is_not_held_any_more(files: Path) -> None:
    holds = ActiveBrakes(CgroupBrake(unified=files, freezer=None))
    holds.plan("/pod", BrakeKind.THROTTLE, pod_uid="u", until=NOW)
    for file in (files / "pod").iterdir():
        file.unlink()
    holds.apply("u", saved=True)
    assert not holds.active
    assert holds.notes == []


def test_what_the_kernel_refuses_to_let_go_is_told_and_tried_again(files: Path) -> None:
    holds = ActiveBrakes(CgroupBrake(unified=files, freezer=None))
    holds.plan("/pod", BrakeKind.THROTTLE, pod_uid="u", until=NOW)
    holds.apply("u", saved=True)
    control = files / "pod" / "memory.high"
    control.unlink()
    control.mkdir()  # what cannot be opened for writing, not even by root
    holds.release("u")
    assert [hold.pod_uid for hold in holds.active] == ["u"]
    assert "trying again" in holds.notes[0].message
    control.rmdir()
    control.touch()
    holds.expire(now=0.0)
    assert not holds.active
    assert control.read_text() == "max"


def test_a_host_that_cannot_brake_is_a_note_and_the_eviction_goes_on() -> None:
    holds = ActiveBrakes(CgroupBrake(unified=None, freezer=None))
    holds.plan("/pod", BrakeKind.FREEZE, pod_uid="u", until=NOW)
    holds.apply("u", saved=True)
    assert not holds.active
    assert "no freezer" in holds.notes[0].message


def _let_go(brake: CgroupBrake, *, saved: bool = False, acts: bool = True) -> list[str]:
    """What a new process finds and lets go of `/pod`. Returns what there was to say."""
    held, notes = leftover_brakes(brake, [("/pod", "u")], saved=() if saved else None, acts=acts)
    holds = ActiveBrakes(brake, held, notes=notes)
    holds.expire(now=0.0)
    assert holds.active == ()
    return [note.message for note in holds.notes]


@pytest.mark.parametrize("kind", list(BrakeKind))
@pytest.mark.parametrize("saved", [False, True], ids=["no state", "a state from before the hold"])
def test_what_is_marked_is_let_go_without_a_saved_hold(unified: Path, kind: BrakeKind, saved: bool) -> None:  # noqa: F811
    brake, control = CgroupBrake(unified=unified, freezer=None), unified / "pod"
    dead = ActiveBrakes(brake)
    dead.plan("/pod", kind, pod_uid="u", until=NOW)
    assert dead.apply("u", saved=False)
    assert ((control / "memory.high").read_text().strip(), (control / "cgroup.freeze").read_text().strip()) != (
        "max",
        "0",
    )
    assert _let_go(brake, saved=saved) == []
    assert (control / "memory.high").read_text().strip() == "max"
    assert (control / "cgroup.freeze").read_text().strip() == "0"
    assert XATTR not in os.listxattr(control)


@pytest.mark.parametrize("saved", [False, True])
def test_what_somebody_else_has_frozen_stays_so(unified: Path, saved: bool) -> None:  # noqa: F811
    (unified / "pod" / "cgroup.freeze").write_text("1\n")
    said = _let_go(CgroupBrake(unified=unified, freezer=None), saved=saved)
    assert (unified / "pod" / "cgroup.freeze").read_text() == "1\n"
    assert said == ([] if saved else ["/pod is frozen, and not by this agent: it is left as it is"])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
@pytest.mark.parametrize("saved", [False, True])
def test_where_the_kernel_keeps_no_marks_what_is_frozen_is_let_go_if_the_state_was_lost(
    tmp_path: Path, saved: bool
) -> None:
    with mounted(tmp_path / "ram", "-t", "ramfs", "ramfs") as root:
        (root / "pod").mkdir()
        control = root / "pod" / "cgroup.freeze"
        control.write_text("0\n")
        brake = CgroupBrake(unified=root, freezer=None)
        dead = ActiveBrakes(brake)
        dead.plan("/pod", BrakeKind.FREEZE, pod_uid="u", until=NOW)
        assert not dead.apply("u", saved=False)
        assert control.read_text() == "0\n"
        assert dead.apply("u", saved=True)
        assert control.read_text().strip() == "1"
        assert _let_go(brake, saved=saved) == []
        assert (root / "pod" / "cgroup.freeze").read_text().strip() == ("1" if saved else "0")


def test_a_mark_that_says_nonsense_is_one_note_and_nothing_is_written(unified: Path) -> None:  # noqa: F811
    pod = unified / "pod"  # noqa: F811
    os.setxattr(pod, XATTR, b"1 throttle lots 8192")
    before = {file.name: (file.read_text(), file.stat().st_mtime_ns) for file in pod.iterdir()}
    [said] = _let_go(CgroupBrake(unified=unified, freezer=None))
    assert said.startswith("/pod is left as it is: ")
    assert "lots" in said
    assert {file.name: (file.read_text(), file.stat().st_mtime_ns) for file in pod.iterdir()} == before
    assert os.getxattr(pod, XATTR) == b"1 throttle lots 8192"


def test_a_dry_run_says_what_is_held_and_lets_nothing_go(unified: Path) -> None:  # noqa: F811
    brake = CgroupBrake(unified=unified, freezer=None)
    dead = ActiveBrakes(brake)
    dead.plan("/pod", BrakeKind.THROTTLE, pod_uid="u", until=NOW)
    assert dead.apply("u", saved=False)
    assert _let_go(brake, acts=False) == ["/pod is marked as held (throttle): a dry run does not let it go"]
    assert (unified / "pod" / "memory.high").read_text().strip() == "819"


def test_what_was_saved_is_let_go_as_it_was_saved(unified: Path) -> None:  # noqa: F811
    brake = CgroupBrake(unified=unified, freezer=None)
    dead = ActiveBrakes(brake)
    dead.plan("/pod", BrakeKind.THROTTLE, pod_uid="of the API", until=NOW)
    assert dead.apply("of the API", saved=False)
    held, notes = leftover_brakes(brake, [("/pod", "of the cgroup")], saved=dead.active)
    assert (held, notes) == (dead.active, ())


@pytest.mark.real_cgroup
@real_v1
def test_a_pod_is_marked_for_as_long_as_it_is_held(pod: Path) -> None:  # noqa: F811
    holds = _frozen(pod)
    assert XATTR in os.listxattr(pod)
    holds.release("u")
    assert XATTR not in os.listxattr(pod)
    holds.plan_kill("/" + pod.name, pod_uid="u")
    assert XATTR not in os.listxattr(pod)
    holds.kill("/" + pod.name, pod_uid="u")
    assert XATTR not in os.listxattr(pod)


@pytest.mark.real_cgroup
@real_v1
def test_what_cannot_be_marked_is_held_once_it_is_saved_and_told(pod: Path) -> None:  # noqa: F811
    for number in range(128):  # as many as the kernel keeps of one cgroup
        os.setxattr(pod, f"user.{number}", b"")
    holds = ActiveBrakes(CgroupBrake(unified=None, freezer=FREEZER))
    holds.plan("/" + pod.name, BrakeKind.FREEZE, pod_uid="u", until=NOW + 10)
    assert not holds.apply("u", saved=False)
    assert _state(pod) == "THAWED", "nothing would tell the next process of it"
    assert holds.apply("u", saved=True)
    _until(lambda: _state(pod) == "FROZEN", "the pod is frozen")
    assert ["cannot be marked" in note.message for note in holds.notes] == [True]
    holds.release("u")
    _until(lambda: _state(pod) == "THAWED", "the pod is thawed")


def test_a_throttled_pod_that_was_ended_is_let_go_for_the_containers_that_come_after(unified: Path) -> None:  # noqa: F811
    """The last resort ends processes, not pods: without an API server nobody takes the cgroup away."""
    brake, control = CgroupBrake(unified=unified, freezer=None), unified / "pod"
    (control / "cgroup.kill").write_text("")
    for kind in BrakeKind:
        holds = ActiveBrakes(brake)
        holds.plan("/pod", kind, pod_uid="u", until=NOW)
        holds.apply("u", saved=True)
        assert holds.kill("/pod", pod_uid="u") == ""
        assert (control / "cgroup.kill").read_text() == "1"
        assert (control / "memory.high").read_text().strip() == "max"
        assert (control / "cgroup.freeze").read_text().strip() == "0"
        assert not holds.active


def _high(unified: Path) -> str:  # noqa: F811
    return (unified / "pod/memory.high").read_text().strip()


def test_a_guarded_pod_may_grow_to_its_limit_until_its_time_is_up(unified: Path) -> None:  # noqa: F811
    holds = ActiveBrakes(CgroupBrake(unified=unified, freezer=None))
    holds.cap_growth("/pod", 900, pod_uid="u", until=NOW + 1)
    assert (_high(unified), [hold.until for hold in holds.active]) == ("900", [NOW + 1])
    holds.cap_growth("/pod", 950, pod_uid="u", until=NOW + 2)
    assert (_high(unified), [hold.until for hold in holds.active]) == ("950", [NOW + 2])
    holds.expire(now=NOW + 1)
    assert _high(unified) == "950"
    holds.expire(now=NOW + 2)
    assert (_high(unified), holds.active, os.listxattr(unified / "pod")) == ("max", (), ["user.any"])


def test_a_guard_gives_way_to_the_hold_of_a_victim_and_takes_none_away(unified: Path) -> None:  # noqa: F811
    holds = ActiveBrakes(CgroupBrake(unified=unified, freezer=None))
    holds.cap_growth("/pod", 900, pod_uid="u", until=NOW + 1)
    holds.plan("/pod", BrakeKind.FREEZE, pod_uid="u", until=NOW + 10)
    assert holds.apply("u", saved=False)
    [hold] = holds.active
    assert (hold.kind, hold.until) == (BrakeKind.FREEZE, NOW + 10)
    assert (_high(unified), (unified / "pod/cgroup.freeze").read_text().strip()) == ("max", "1")
    holds.cap_growth("/pod", 900, pod_uid="u", until=NOW + 1)
    holds.uncap_others(but=())
    assert (_high(unified), holds.active) == ("max", (hold,))


def test_who_is_not_foreseen_any_more_is_let_go(unified: Path) -> None:  # noqa: F811
    holds = ActiveBrakes(CgroupBrake(unified=unified, freezer=None))
    holds.cap_growth("/pod", 900, pod_uid="u", until=NOW + 1)
    holds.uncap_others(but=["u"])
    assert _high(unified) == "900"
    holds.uncap_others(but=["another"])
    assert (_high(unified), holds.active) == ("max", ())


def test_the_next_process_lets_go_what_the_last_one_guarded(unified: Path) -> None:  # noqa: F811
    brake = CgroupBrake(unified=unified, freezer=None)
    ActiveBrakes(brake).cap_growth("/pod", 900, pod_uid="u", until=NOW + 1)
    assert _high(unified) == "900"
    assert _let_go(brake) == []
    assert _high(unified) == "max"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_where_the_kernel_keeps_no_marks_nobody_is_guarded(tmp_path: Path) -> None:
    with mounted(tmp_path / "ram", "-t", "ramfs", "ramfs") as root:
        (root / "pod").mkdir()
        for name, text in {"memory.high": "max", "memory.current": "819"}.items():
            (root / "pod" / name).write_text(text + "\n")
        holds = ActiveBrakes(CgroupBrake(unified=root, freezer=None))
        holds.cap_growth("/pod", 900, pod_uid="u", until=NOW + 1)
        assert (_high(root), holds.active, holds.notes) == ("max", (), [])


def test_cgroup_v1_has_nothing_to_guard_with() -> None:
    assert not ActiveBrakes(CgroupBrake(unified=None, freezer=FREEZER)).can_cap_growth


def test_a_guarded_pod_whose_cgroup_goes_is_forgotten(unified: Path) -> None:  # noqa: F811
    holds = ActiveBrakes(CgroupBrake(unified=unified, freezer=None))
    holds.cap_growth("/pod", 900, pod_uid="u", until=NOW + 1)
    for file in (unified / "pod").iterdir():
        file.unlink()
    (unified / "pod").rmdir()
    holds.cap_growth("/pod", 900, pod_uid="u", until=NOW + 1)
    assert holds.active == ()
    holds.uncap_others(but=())

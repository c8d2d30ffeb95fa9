"""Every brake is released, whatever happens to the eviction; a real frozen process proves it."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.actuators.brakes import MACHINE, TRANSITIONS, ActiveBrakes, BrakeState, leftover_brakes
from nodeagent.actuators.cgroup_brake import XATTR, BrakeKind, CgroupBrake
from nodeagent.loop.state_store import AgentState
from nodeagent.policy import state as policy_state
from nodeagent.records.state_file import StateFile
from tests.support import freezer_cgroups
from tests.support.freezer_cgroups import FREEZER, cpu_ticks, real_v1, start_in, until
from tests.support.mounts import mounted

NOW = 100.0


def _state(cgroup: Path) -> str:
    return (cgroup / "freezer.state").read_text().strip()


def _freeze(cgroup: Path) -> ActiveBrakes:
    brakes = ActiveBrakes(CgroupBrake(unified=None, freezer=FREEZER))
    brakes.plan("/" + cgroup.name, BrakeKind.FREEZE, pod_uid="u", until=NOW + 10)
    assert _state(cgroup) == "THAWED", "a plan changes nothing"
    assert brakes.apply("u", saved=False)
    until(lambda: _state(cgroup) == "FROZEN", "the pod is frozen")
    return brakes


@pytest.mark.real_cgroup
@real_v1
def test_a_pod_is_braked_until_its_deadline_and_not_longer(pod: Path) -> None:
    with start_in(pod, "while True: pass") as process:
        brakes = _freeze(pod)
        brakes.expire(now=NOW + 9.9)
        assert _state(pod) == "FROZEN"
        brakes.expire(now=NOW + 10)
        assert not brakes.active
        before = cpu_ticks(process.pid)
        until(lambda: cpu_ticks(process.pid) > before, "the process runs again")
        process.kill()


@pytest.mark.real_cgroup
@real_v1
def test_a_pod_whose_request_failed_is_released_at_once(pod: Path) -> None:
    with start_in(pod, "while True: pass") as process:
        brakes = _freeze(pod)
        brakes.release("u")
        until(lambda: _state(pod) == "THAWED", "the pod is thawed")
        assert not brakes.active
        process.kill()


@pytest.mark.real_cgroup
@real_v1
def test_the_next_process_releases_the_brakes_of_the_last_one(pod: Path) -> None:
    with start_in(pod, "while True: pass") as process:
        leftover = _freeze(pod).active
        restarted = ActiveBrakes(CgroupBrake(unified=None, freezer=FREEZER), leftover)
        restarted.expire(now=0.0)
        until(lambda: _state(pod) == "THAWED", "the pod is thawed")
        assert restarted.active == ()
        process.kill()


@pytest.mark.real_cgroup
@real_v1
def test_an_accepted_victim_is_killed_although_it_is_frozen(pod: Path) -> None:
    with start_in(pod, "while True: pass") as process:
        brakes = _freeze(pod)
        brakes.kill("/" + pod.name, pod_uid="u")
        assert process.wait(20) == -9
        assert not brakes.active


@pytest.mark.real_cgroup
@real_v1
def test_killing_a_pod_without_a_brake_is_planned_first_because_it_freezes(pod: Path) -> None:
    with start_in(pod, "while True: pass") as process:
        brakes = ActiveBrakes(CgroupBrake(unified=None, freezer=FREEZER))
        assert brakes.plan_kill("/" + pod.name, pod_uid="u")
        [each] = brakes.active
        assert (each.cgroup, each.previous) == ("/" + pod.name, "THAWED")
        assert not brakes.plan_kill("/" + pod.name, pod_uid="u"), "an active brake is recorded already"
        assert brakes.kill("/" + pod.name, pod_uid="u") == ""
        assert process.wait(20) == -9
        assert not brakes.active


def test_killing_a_pod_with_cgroup_kill_freezes_nothing_and_needs_no_plan(unified: Path) -> None:
    brakes = ActiveBrakes(CgroupBrake(unified=unified, freezer=None))
    assert not brakes.plan_kill("/pod", pod_uid="u")
    assert not brakes.active


@pytest.mark.parametrize("throttled", [False, True])
def test_before_linux_5_14_the_kill_of_a_v2_pod_is_planned_and_takes_the_place_of_a_throttle(
    unified: Path, throttled: bool
) -> None:
    (unified / "pod/cgroup.kill").unlink()
    brakes = ActiveBrakes(CgroupBrake(unified=unified, freezer=None))
    if throttled:
        brakes.plan("/pod", BrakeKind.THROTTLE, pod_uid="u", until=NOW)
        brakes.apply("u", saved=True)
    assert brakes.plan_kill("/pod", pod_uid="u")
    assert [(each.kind, each.previous) for each in brakes.active] == [(BrakeKind.FREEZE, "0")]
    assert _high(unified) == "max"
    (unified / "pod/cgroup.procs").write_text("0\n")
    failure = brakes.kill("/pod", pod_uid="u")
    assert "PID namespace" in failure
    assert [note.message for note in brakes.take_notes()] == [f"/pod: kill failed: {failure}"]
    brakes.expire(now=NOW)
    assert not brakes.active


def test_a_brake_can_be_saved_and_loaded_also_when_it_is_overdue(files: Path, tmp_path: Path) -> None:
    brakes = ActiveBrakes(CgroupBrake(unified=files, freezer=None))
    brakes.plan("/pod", BrakeKind.THROTTLE, pod_uid="u", until=NOW)
    store = StateFile(tmp_path / "state", shape=AgentState, boot_id="boot")
    for active in (brakes.active, ActiveBrakes(CgroupBrake(unified=files, freezer=None), brakes.active).active):
        saved = AgentState(policy_state.initial("i", now=NOW), brakes=active)
        store.save(saved)
        assert store.load().value == saved


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A v2 pod cgroup as plain files."""
    (tmp_path / "pod").mkdir()
    (tmp_path / "pod" / "memory.high").write_text("max\n")
    (tmp_path / "pod" / "memory.current").write_text("4096\n")
    return tmp_path


def test_a_cgroup_that_is_gone_has_no_brake(files: Path) -> None:
    brakes = ActiveBrakes(CgroupBrake(unified=files, freezer=None))
    brakes.plan("/pod", BrakeKind.THROTTLE, pod_uid="u", until=NOW)
    for file in (files / "pod").iterdir():
        file.unlink()
    brakes.apply("u", saved=True)
    assert not brakes.active
    assert brakes.take_notes() == ()


def test_a_release_that_the_kernel_refuses_is_a_note_and_repeated(files: Path) -> None:
    brakes = ActiveBrakes(CgroupBrake(unified=files, freezer=None))
    brakes.plan("/pod", BrakeKind.THROTTLE, pod_uid="u", until=NOW)
    brakes.apply("u", saved=True)
    control = files / "pod" / "memory.high"
    control.unlink()
    control.mkdir()  # cannot be opened for writing, not even by root
    brakes.release("u")
    assert [each.pod_uid for each in brakes.active] == ["u"]
    assert brakes.state("u") is BrakeState.OVERDUE
    assert "trying again" in brakes.take_notes()[0].message
    control.rmdir()
    control.touch()
    brakes.expire(now=0.0)
    assert not brakes.active
    assert control.read_text() == "max"


def test_a_host_that_cannot_brake_is_a_note_and_the_eviction_goes_on() -> None:
    brakes = ActiveBrakes(CgroupBrake(unified=None, freezer=None))
    brakes.plan("/pod", BrakeKind.FREEZE, pod_uid="u", until=NOW)
    brakes.apply("u", saved=True)
    assert not brakes.active
    assert "no freezer" in brakes.take_notes()[0].message


def _release_leftovers(brake: CgroupBrake, *, saved: bool = False, acts: bool = True) -> list[str]:
    """A new process finds `/pod` and releases it. Returns its notes."""
    leftover, notes = leftover_brakes(brake, [("/pod", "u")], saved=() if saved else None, acts=acts)
    brakes = ActiveBrakes(brake, leftover, notes=notes)
    brakes.expire(now=0.0)
    assert brakes.active == ()
    return [note.message for note in brakes.take_notes()]


@pytest.mark.parametrize("kind", list(BrakeKind))
@pytest.mark.parametrize("saved", [False, True], ids=["no state", "a state from before the brake"])
def test_a_marked_cgroup_is_released_without_a_saved_brake(unified: Path, kind: BrakeKind, saved: bool) -> None:
    brake, control = CgroupBrake(unified=unified, freezer=None), unified / "pod"
    dead = ActiveBrakes(brake)
    dead.plan("/pod", kind, pod_uid="u", until=NOW)
    assert dead.apply("u", saved=False)
    assert ((control / "memory.high").read_text().strip(), (control / "cgroup.freeze").read_text().strip()) != (
        "max",
        "0",
    )
    assert _release_leftovers(brake, saved=saved) == []
    assert (control / "memory.high").read_text().strip() == "max"
    assert (control / "cgroup.freeze").read_text().strip() == "0"
    assert XATTR not in os.listxattr(control)


@pytest.mark.parametrize("saved", [False, True])
def test_a_cgroup_that_another_program_froze_stays_frozen(unified: Path, saved: bool) -> None:
    (unified / "pod" / "cgroup.freeze").write_text("1\n")
    notes = _release_leftovers(CgroupBrake(unified=unified, freezer=None), saved=saved)
    assert (unified / "pod" / "cgroup.freeze").read_text() == "1\n"
    assert notes == ([] if saved else ["/pod: frozen by another program; left unchanged"])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
@pytest.mark.parametrize("saved", [False, True])
def test_without_marks_a_frozen_cgroup_is_released_if_the_state_was_lost(tmp_path: Path, saved: bool) -> None:
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
        assert _release_leftovers(brake, saved=saved) == []
        assert (root / "pod" / "cgroup.freeze").read_text().strip() == ("1" if saved else "0")


def test_an_unreadable_mark_is_one_note_and_nothing_is_written(unified: Path) -> None:
    pod = unified / "pod"
    os.setxattr(pod, XATTR, b"1 throttle lots 8192")
    before = {file.name: (file.read_text(), file.stat().st_mtime_ns) for file in pod.iterdir()}
    [note] = _release_leftovers(CgroupBrake(unified=unified, freezer=None))
    assert note.startswith("/pod: left unchanged: ")
    assert "lots" in note
    assert {file.name: (file.read_text(), file.stat().st_mtime_ns) for file in pod.iterdir()} == before
    assert os.getxattr(pod, XATTR) == b"1 throttle lots 8192"


def test_a_dry_run_reports_a_leftover_brake_and_releases_nothing(unified: Path) -> None:
    brake = CgroupBrake(unified=unified, freezer=None)
    dead = ActiveBrakes(brake)
    dead.plan("/pod", BrakeKind.THROTTLE, pod_uid="u", until=NOW)
    assert dead.apply("u", saved=False)
    assert _release_leftovers(brake, acts=False) == [
        "/pod: marked with a brake (throttle); a dry run does not release it"
    ]
    assert (unified / "pod" / "memory.high").read_text().strip() == "819"


def test_a_saved_brake_wins_over_its_mark(unified: Path) -> None:
    brake = CgroupBrake(unified=unified, freezer=None)
    dead = ActiveBrakes(brake)
    dead.plan("/pod", BrakeKind.THROTTLE, pod_uid="of the API", until=NOW)
    assert dead.apply("of the API", saved=False)
    leftover, notes = leftover_brakes(brake, [("/pod", "of the cgroup")], saved=dead.active)
    assert (leftover, notes) == (dead.active, ())


@pytest.mark.real_cgroup
@real_v1
def test_a_pod_is_marked_for_as_long_as_it_is_braked(pod: Path) -> None:
    brakes = _freeze(pod)
    assert XATTR in os.listxattr(pod)
    brakes.release("u")
    assert XATTR not in os.listxattr(pod)
    brakes.plan_kill("/" + pod.name, pod_uid="u")
    assert XATTR not in os.listxattr(pod)
    brakes.kill("/" + pod.name, pod_uid="u")
    assert XATTR not in os.listxattr(pod)


@pytest.mark.real_cgroup
@real_v1
def test_a_cgroup_that_cannot_be_marked_is_braked_once_the_plan_is_saved(pod: Path) -> None:
    for number in range(128):  # the kernel stores no more for one cgroup
        os.setxattr(pod, f"user.{number}", b"")
    brakes = ActiveBrakes(CgroupBrake(unified=None, freezer=FREEZER))
    brakes.plan("/" + pod.name, BrakeKind.FREEZE, pod_uid="u", until=NOW + 10)
    assert not brakes.apply("u", saved=False)
    assert _state(pod) == "THAWED", "the next process could not find the brake"
    assert brakes.apply("u", saved=True)
    until(lambda: _state(pod) == "FROZEN", "the pod is frozen")
    assert ["cannot be marked" in note.message for note in brakes.take_notes()] == [True]
    brakes.release("u")
    until(lambda: _state(pod) == "THAWED", "the pod is thawed")


def test_a_killed_pod_is_released_for_its_next_containers(unified: Path) -> None:
    """The last resort kills processes, not pods: without an API server the kubelet keeps the cgroup."""
    brake, control = CgroupBrake(unified=unified, freezer=None), unified / "pod"
    for kind in BrakeKind:
        brakes = ActiveBrakes(brake)
        brakes.plan("/pod", kind, pod_uid="u", until=NOW)
        brakes.apply("u", saved=True)
        assert brakes.kill("/pod", pod_uid="u") == ""
        assert (control / "cgroup.kill").read_text() == "1"
        assert (control / "memory.high").read_text().strip() == "max"
        assert (control / "cgroup.freeze").read_text().strip() == "0"
        assert not brakes.active


def _high(unified: Path) -> str:
    return (unified / "pod/memory.high").read_text().strip()


def test_a_capped_pod_may_grow_to_its_limit_until_the_deadline(unified: Path) -> None:
    brakes = ActiveBrakes(CgroupBrake(unified=unified, freezer=None))
    brakes.cap_growth("/pod", 900, pod_uid="u", until=NOW + 1)
    assert (_high(unified), [each.until for each in brakes.active]) == ("900", [NOW + 1])
    brakes.cap_growth("/pod", 950, pod_uid="u", until=NOW + 2)
    assert (_high(unified), [each.until for each in brakes.active]) == ("950", [NOW + 2])
    brakes.expire(now=NOW + 1)
    assert _high(unified) == "950"
    brakes.expire(now=NOW + 2)
    assert (_high(unified), brakes.active, os.listxattr(unified / "pod")) == ("max", (), ["user.any"])


def test_a_growth_cap_gives_way_to_the_brake_of_a_victim_and_replaces_none(unified: Path) -> None:
    brakes = ActiveBrakes(CgroupBrake(unified=unified, freezer=None))
    brakes.cap_growth("/pod", 900, pod_uid="u", until=NOW + 1)
    brakes.plan("/pod", BrakeKind.FREEZE, pod_uid="u", until=NOW + 10)
    assert brakes.apply("u", saved=False)
    [each] = brakes.active
    assert (each.kind, each.until) == (BrakeKind.FREEZE, NOW + 10)
    assert (_high(unified), (unified / "pod/cgroup.freeze").read_text().strip()) == ("max", "1")
    brakes.cap_growth("/pod", 900, pod_uid="u", until=NOW + 1)
    brakes.uncap_others(keep=())
    assert (_high(unified), brakes.active) == ("max", (each,))


def test_a_pod_that_is_not_predicted_any_more_is_uncapped(unified: Path) -> None:
    brakes = ActiveBrakes(CgroupBrake(unified=unified, freezer=None))
    brakes.cap_growth("/pod", 900, pod_uid="u", until=NOW + 1)
    brakes.uncap_others(keep=["u"])
    assert _high(unified) == "900"
    brakes.uncap_others(keep=["another"])
    assert (_high(unified), brakes.active) == ("max", ())


def test_the_next_process_releases_the_growth_caps_of_the_last_one(unified: Path) -> None:
    brake = CgroupBrake(unified=unified, freezer=None)
    ActiveBrakes(brake).cap_growth("/pod", 900, pod_uid="u", until=NOW + 1)
    assert _high(unified) == "900"
    assert _release_leftovers(brake) == []
    assert _high(unified) == "max"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_without_marks_no_growth_is_capped(tmp_path: Path) -> None:
    with mounted(tmp_path / "ram", "-t", "ramfs", "ramfs") as root:
        (root / "pod").mkdir()
        for name, text in {"memory.high": "max", "memory.current": "819"}.items():
            (root / "pod" / name).write_text(text + "\n")
        brakes = ActiveBrakes(CgroupBrake(unified=root, freezer=None))
        brakes.cap_growth("/pod", 900, pod_uid="u", until=NOW + 1)
        assert (_high(root), brakes.active, brakes.take_notes()) == ("max", (), ())


def test_cgroup_v1_cannot_cap_growth() -> None:
    assert not ActiveBrakes(CgroupBrake(unified=None, freezer=FREEZER)).can_cap_growth


def test_a_capped_pod_whose_cgroup_is_removed_has_no_brake(unified: Path) -> None:
    brakes = ActiveBrakes(CgroupBrake(unified=unified, freezer=None))
    brakes.cap_growth("/pod", 900, pod_uid="u", until=NOW + 1)
    for file in (unified / "pod").iterdir():
        file.unlink()
    (unified / "pod").rmdir()
    brakes.cap_growth("/pod", 900, pod_uid="u", until=NOW + 1)
    assert brakes.active == ()
    brakes.uncap_others(keep=())


def test_every_state_lists_every_event() -> None:
    assert MACHINE.missing() == []
    made = {after for (before, _), after in TRANSITIONS.items() if before is not after}
    assert made == set(BrakeState) - {BrakeState.LEFTOVER}, "only a start makes a leftover"


OPERATIONS: Final[dict[str, Callable[[ActiveBrakes], object]]] = {
    "cap": lambda brakes: brakes.cap_growth("/pod", 900, pod_uid="u", until=NOW + 1),
    "uncap": lambda brakes: brakes.uncap_others(keep=()),
    "throttle": lambda brakes: brakes.plan("/pod", BrakeKind.THROTTLE, pod_uid="u", until=NOW + 10),
    "freeze": lambda brakes: brakes.plan("/pod", BrakeKind.FREEZE, pod_uid="u", until=NOW + 10),
    "apply": lambda brakes: brakes.apply("u", saved=False),
    "apply saved": lambda brakes: brakes.apply("u", saved=True),
    "release": lambda brakes: brakes.release("u"),
    "expire": lambda brakes: brakes.expire(now=NOW + 1),
}


@given(st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), st.booleans()), max_size=12), st.booleans())
def test_whatever_happens_a_brake_is_recorded_until_it_is_released(
    steps: list[tuple[str, bool]], leftover: bool
) -> None:
    """`works`: whether the kernel accepts writes to the control files during the operation."""
    with tempfile.TemporaryDirectory() as directory:
        freezer_cgroups.make_unified_pod(Path(directory))
        pod = Path(directory) / "pod"
        mechanism = CgroupBrake(unified=Path(directory), freezer=None)
        first = ActiveBrakes(mechanism)
        first.plan("/pod", BrakeKind.FREEZE, pod_uid="u", until=NOW)
        brakes = ActiveBrakes(mechanism, first.active if leftover else ())
        for name, works in steps:
            with contextlib.nullcontext() if works else _refusing(pod):
                OPERATIONS[name](brakes)
            assert (brakes.state("u") is BrakeState.NONE) == (brakes.active == ())
            braked = ((pod / "memory.high").read_text().strip(), (pod / "cgroup.freeze").read_text().strip())
            assert brakes.active or braked == ("max", "0"), "every braked cgroup is on record"
        brakes.close()
        assert (brakes.active, brakes.state("u")) == ((), BrakeState.NONE)
        assert ((pod / "memory.high").read_text().strip(), (pod / "cgroup.freeze").read_text().strip()) == ("max", "0")
        assert XATTR not in os.listxattr(pod)


@contextlib.contextmanager
def _refusing(pod: Path) -> Iterator[None]:
    """Control files that cannot be opened, not even by root: directories stand in their place."""
    names = ("memory.high", "cgroup.freeze")
    for name in names:
        (pod / name).rename(pod / f"{name}.kept")
        (pod / name).mkdir()
    try:
        yield
    finally:
        for name in names:
            (pod / name).rmdir()
            (pod / f"{name}.kept").rename(pod / name)

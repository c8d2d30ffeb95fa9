"""Whatever happens to a held pod's eviction, the pod is let go; a real frozen process is the witness."""

from pathlib import Path

import pytest

from nodeagent.host.brake import BrakeKind, CgroupBrake
from nodeagent.host.holds import Holds
from nodeagent.journal.state import StateFile
from nodeagent.keeper import AgentState
from nodeagent.policy import state as policy_state
from tests.host.test_brake import FREEZER, _cpu_ticks, _start, _until, pod, real_v1  # noqa: F401 - a fixture

NOW = 100.0


def _state(cgroup: Path) -> str:
    return (cgroup / "freezer.state").read_text().strip()


def _frozen(cgroup: Path) -> Holds:
    holds = Holds(CgroupBrake(unified=None, freezer=FREEZER))
    holds.plan("/" + cgroup.name, BrakeKind.FREEZE, pod_uid="u", until=NOW + 10)
    assert _state(cgroup) == "THAWED", "a plan changes nothing"
    holds.apply("u")
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
        assert not holds.held
        before = _cpu_ticks(process.pid)
        _until(lambda: _cpu_ticks(process.pid) > before, "the process runs again")
        process.kill()


@pytest.mark.real_cgroup
@real_v1
def test_a_pod_whose_request_failed_is_let_go_at_once(pod: Path) -> None:  # noqa: F811
    with _start(pod, "while True: pass") as process:
        holds = _frozen(pod)
        holds.drop("u")
        _until(lambda: _state(pod) == "THAWED", "the pod is thawed")
        assert not holds.held
        process.kill()


@pytest.mark.real_cgroup
@real_v1
def test_the_next_process_lets_go_what_the_last_one_held(pod: Path) -> None:  # noqa: F811
    with _start(pod, "while True: pass") as process:
        left_behind = _frozen(pod).held
        restarted = Holds(CgroupBrake(unified=None, freezer=FREEZER), left_behind)
        restarted.expire(now=0.0)
        _until(lambda: _state(pod) == "THAWED", "the pod is thawed")
        assert restarted.held == ()
        process.kill()


@pytest.mark.real_cgroup
@real_v1
def test_an_accepted_victim_is_ended_although_it_is_frozen(pod: Path) -> None:  # noqa: F811
    with _start(pod, "while True: pass") as process:
        holds = _frozen(pod)
        holds.end("/" + pod.name, pod_uid="u")
        assert process.wait(20) == -9
        assert not holds.held


@pytest.mark.real_cgroup
@real_v1
def test_ending_a_pod_that_is_not_held_is_written_down_first_because_it_freezes(pod: Path) -> None:  # noqa: F811
    with _start(pod, "while True: pass") as process:
        holds = Holds(CgroupBrake(unified=None, freezer=FREEZER))
        assert holds.plan_end("/" + pod.name, pod_uid="u")
        [hold] = holds.held
        assert (hold.cgroup, hold.previous) == ("/" + pod.name, "THAWED")
        assert not holds.plan_end("/" + pod.name, pod_uid="u"), "what is held is written down already"
        assert holds.end("/" + pod.name, pod_uid="u") == ""
        assert process.wait(20) == -9
        assert not holds.held


def test_ending_a_pod_on_cgroup_v2_freezes_nothing_and_needs_no_writing(files: Path) -> None:
    holds = Holds(CgroupBrake(unified=files, freezer=None))
    assert not holds.plan_end("/pod", pod_uid="u")
    assert not holds.held


def test_what_is_held_can_be_saved_and_read_back_also_when_it_is_overdue(files: Path, tmp_path: Path) -> None:
    holds = Holds(CgroupBrake(unified=files, freezer=None))
    holds.plan("/pod", BrakeKind.THROTTLE, pod_uid="u", until=NOW)
    store = StateFile(tmp_path / "state", shape=AgentState, boot_id="boot")
    for held in (holds.held, Holds(CgroupBrake(unified=files, freezer=None), holds.held).held):
        saved = AgentState(policy_state.initial("i", now=NOW), holds=held)
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
    holds = Holds(CgroupBrake(unified=files, freezer=None))
    holds.plan("/pod", BrakeKind.THROTTLE, pod_uid="u", until=NOW)
    for file in (files / "pod").iterdir():
        file.unlink()
    holds.apply("u")
    assert not holds.held
    assert holds.notes == []


def test_what_the_kernel_refuses_to_let_go_is_told_and_tried_again(files: Path) -> None:
    holds = Holds(CgroupBrake(unified=files, freezer=None))
    holds.plan("/pod", BrakeKind.THROTTLE, pod_uid="u", until=NOW)
    holds.apply("u")
    control = files / "pod" / "memory.high"
    control.unlink()
    control.mkdir()  # what cannot be opened for writing, not even by root
    holds.drop("u")
    assert [hold.pod_uid for hold in holds.held] == ["u"]
    assert "trying again" in holds.notes[0].message
    control.rmdir()
    control.touch()
    holds.expire(now=0.0)
    assert not holds.held
    assert control.read_text() == "max"


def test_a_host_that_cannot_brake_is_a_note_and_the_eviction_goes_on() -> None:
    holds = Holds(CgroupBrake(unified=None, freezer=None))
    holds.plan("/pod", BrakeKind.FREEZE, pod_uid="u", until=NOW)
    holds.apply("u")
    assert not holds.held
    assert "no freezer" in holds.notes[0].message

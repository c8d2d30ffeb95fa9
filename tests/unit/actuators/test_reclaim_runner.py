"""Reclaim commands are real processes, killed with all their children."""

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from nodeagent.actuators.reclaim_runner import (
    JobResult,
    ReclaimJob,
    ReclaimRunner,
    build_job,
    command,
    missing_programs,
    run_command,
)
from nodeagent.config.schema import ReclaimAction, ReclaimKind
from nodeagent.model import Note, NoteKind, ReclaimOrder, ReclaimOutcome, ReclaimResult, Signal, Tier

ORDER = ReclaimOrder("a", Signal.NODEFS, Tier.SOFT, 1234, 99, 0.0)


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def script(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def no_logs() -> str:
    raise AssertionError("not used")


def job(action: ReclaimAction) -> ReclaimJob:
    return build_job(action, ORDER, pod_logs_dir=no_logs, cri_socket=lambda: "", ended=lambda _: False)


def test_a_command_gets_resource_signal_deficit_and_available() -> None:
    names = "RESOURCE SIGNAL DEFICIT AVAILABLE"
    text = f"import os; print([os.environ['NODEAGENT_' + n] for n in '{names}'.split()])"
    ended = job(ReclaimAction("a", command=script(text)))(soon())
    assert ended == JobResult(ReclaimResult.DONE, "['ephemeral-storage', 'nodefs.available', '1234', '99']")


def test_a_built_in_command_can_be_replaced() -> None:
    ended = job(ReclaimAction("a", kind=ReclaimKind.IMAGES, command=script("print('mine')")))(soon())
    assert ended.message == "mine"


def test_a_missing_program_is_reported_before_it_is_needed(tmp_path: Path) -> None:
    plain = tmp_path / "no-program"
    plain.touch(mode=0o644)
    actions = [
        ReclaimAction("python", command=(sys.executable, "-c", "")),
        ReclaimAction("shell", command=("sh", "-c", "")),
        ReclaimAction("logs", kind=ReclaimKind.CONTAINER_LOGS),
        ReclaimAction("gone", kind=ReclaimKind.IMAGES, command=("no-such-program", "rmi", "--prune")),
        ReclaimAction("plain", command=(str(plain),)),
        ReclaimAction("folder", command=(str(tmp_path),)),
    ]
    notes = missing_programs(actions, cri_socket="")
    assert [note.message.split()[0] for note in notes] == ["gone", "plain", "folder"]
    assert notes[0] == Note(NoteKind.RECLAIM, "gone will fail: no program no-such-program where the agent runs")


def test_a_failure_has_its_exit_code_and_its_last_output() -> None:
    ended = run_command(script("import sys; print('x' * 9000 + 'the end'); sys.exit(3)"), {}, until=soon())
    assert ended.result is ReclaimResult.FAILED
    assert ended.message.startswith("exit code 3: x")
    assert ended.message.endswith("the end")
    assert len(ended.message) < 2100


@pytest.mark.parametrize("words", [("/no/such/program",), ("/etc/hostname",), ("a\0b",)])
def test_a_command_that_cannot_start_has_failed(words: tuple[str, ...]) -> None:
    ended = run_command(words, {}, until=soon())
    assert ended.result is ReclaimResult.FAILED
    assert ended.message


def test_at_the_deadline_the_command_and_its_children_are_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    text = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.fork()\n"
        f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}} ')\n"
        "while True: time.sleep(60)\n"
    )
    began = time.monotonic()
    ended = run_command(script(text), {}, until=soon(6.0))
    assert ended.result is ReclaimResult.TIMED_OUT
    assert time.monotonic() - began < 14
    [one, other] = [int(word) for word in pids.read_text().split()]
    for pid in (one, other):
        until = time.monotonic() + 20
        while _lives(pid):
            assert time.monotonic() < until, f"{pid} still runs"
            os.sched_yield()


def test_processes_that_a_command_leaves_running_are_killed_and_do_not_delay_it() -> None:
    text = "import os, time\npid = os.fork()\nif pid: print(pid)\nelse: time.sleep(300)"
    began = time.monotonic()
    ended = run_command(script(text), {}, until=soon(60.0))
    assert time.monotonic() - began < 30, "the child keeps the pipe open, the command does not wait for it"
    assert ended.result is ReclaimResult.DONE
    until = time.monotonic() + 20
    while _lives(int(ended.message)):
        assert time.monotonic() < until
        os.sched_yield()


def _lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # it may not be reaped yet


def test_endless_output_neither_blocks_nor_is_kept() -> None:
    text = "import sys\nfor _ in range(200): sys.stdout.write('y' * 65536)\nprint('done')"
    ended = run_command(script(text), {}, until=soon(60))
    assert ended.result is ReclaimResult.DONE
    assert ended.message.endswith("ydone")


def test_a_command_is_not_protected_from_the_oom_killer_and_has_no_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/x")
    text = (
        "import os, sys\nsys.stdin.read()\n"
        "print(os.environ.get('NOTIFY_SOCKET'), os.getsid(0) == os.getpid(), sorted(os.listdir('/proc/self/fd')))\n"
    )
    ended = run_command(script(text), {}, until=soon())
    assert ended.message == "None True ['0', '1', '2', '3']", "3 is the listing itself"


def test_no_call_waits_for_a_job_and_its_outcome_wakes_the_loop() -> None:
    woken, go = threading.Event(), threading.Event()
    hooks = ReclaimRunner(boottime=lambda: 7.0, wake=woken.set)

    def slow(_until: float) -> JobResult:
        assert go.wait(20)
        return JobResult(ReclaimResult.DONE, "did it")

    hooks.start("p-1", "slow", slow, timeout_s=20)
    assert hooks.finished() == []
    hooks.start("p-2", "slow", slow, timeout_s=20)
    [refused] = hooks.finished()
    assert (refused.plan_id, refused.result, refused.message) == ("p-2", ReclaimResult.FAILED, "still running")
    go.set()
    assert woken.wait(20)
    [outcome] = hooks.finished()
    assert outcome == ReclaimOutcome("p-1", "slow", ReclaimResult.DONE, "did it", 7.0)
    assert hooks.finished() == []


def test_a_job_that_fails_is_an_outcome() -> None:
    woken = threading.Event()
    hooks = ReclaimRunner(boottime=lambda: 7.0, wake=woken.set)

    def broken(_until: float) -> JobResult:
        raise KeyError("x")

    hooks.start("p-1", "broken", broken, timeout_s=1)
    assert woken.wait(20)
    assert hooks.finished()[0].message == "KeyError: 'x'"


def test_a_command_runs_as_a_job() -> None:
    woken = threading.Event()
    hooks = ReclaimRunner(boottime=time.monotonic, wake=woken.set)
    hooks.start("p-1", "echo", command(script("print(1)"), {}), timeout_s=20)
    assert woken.wait(20)
    assert hooks.finished()[0].message == "1"


def test_running_jobs_end_with_the_agent() -> None:
    hooks = ReclaimRunner(boottime=time.monotonic)
    text = "import sys, time; print('up', flush=True); time.sleep(300)"
    hooks.start("p-1", "long", command(script(text), {}, stop=hooks.closing), timeout_s=300)
    began = time.monotonic()
    hooks.close(timeout_s=30)
    assert time.monotonic() - began < 20
    assert hooks.finished()[0].result is ReclaimResult.TIMED_OUT

"""What the process asks of its host for itself is what the kernel then says of it."""

import json
import os
import resource
import subprocess
import sys

import pytest

from nodeagent.runtime import self_protection

ASK = """
import json, os, sys
import psutil
from nodeagent.runtime import self_protection
if sys.argv[1] == "nobody":  # after the imports: another user may not be able to read the interpreter's library
    os.setgid(65534); os.setuid(65534)
def status(key):
    for line in open("/proc/self/status"):
        if line.startswith(key + ":"):
            return int(line.split()[1])
before = status("VmRSS")
notes = self_protection.protect_process()
self_protection.freeze_collector()
print(json.dumps({
    "notes": [note.message for note in notes],
    "oom_score_adj": int(open("/proc/self/oom_score_adj").read()),
    "nice": os.getpriority(os.PRIO_PROCESS, 0),
    "locked": status("VmLck"),
    "grown": status("VmRSS") - before,
}))
"""


def _ask(user: str) -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", ASK, user], capture_output=True, check=True, text=True)
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to raise priorities and lock memory")
def test_a_privileged_process_is_protected_or_says_what_it_may_not() -> None:
    told = _ask("root")
    refused = " ".join(str(note) for note in told["notes"])  # type: ignore[attr-defined]
    assert told["oom_score_adj"] == -999 or "oom_score_adj" in refused
    assert told["nice"] == -10 or "nice" in refused
    locked = told["locked"]
    assert isinstance(locked, int)
    assert locked > 0 or "mlockall" in refused


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to lock memory beyond the limit")
def test_locking_memory_does_not_touch_pages_that_are_not_used() -> None:
    told = _ask("root")
    grown = told["grown"]
    assert isinstance(grown, int)
    assert grown < 20_000, "KiB; mlockall without MCL_ONFAULT adds about 30 MiB"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_process_without_rights_runs_on_and_says_what_is_missing() -> None:
    told = _ask("nobody")
    notes = told["notes"]
    assert isinstance(notes, list)
    assert any("oom_score_adj" in note for note in notes)
    assert any("nice" in note for note in notes)


def test_spare_descriptors_are_given_up_when_there_are_no_others_and_taken_back_later() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = self_protection.SpareDescriptors()
    assert spare.check() is None
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        with pytest.raises(OSError, match="Too many open files"):
            _take_all(taken)
        note = spare.check()
        assert note is not None
        assert "out of file descriptors" in note.message
        os.listdir("/")  # there is one for this now
        assert spare.check() is not None
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert spare.check() is None
    spare.close()


def _take_all(taken: list[int]) -> None:
    while True:
        taken.append(os.dup(0))


def test_threads_that_are_busy_do_not_keep_the_loop_waiting_for_its_turn() -> None:
    took = (
        "import sys; from nodeagent.runtime import self_protection; self_protection.protect_process();"
        " print(sys.getswitchinterval())"
    )
    done = subprocess.run([sys.executable, "-c", took], capture_output=True, check=True, text=True)
    assert float(done.stdout) == pytest.approx(self_protection.SWITCH_S)
    assert sys.getswitchinterval() / 5 > self_protection.SWITCH_S, "far below Python's own"

"""The protection that the process requests is the one that the kernel reports."""

import json
import os
import resource
import subprocess
import sys

import pytest

from nodeagent.runtime import self_protection

PROGRAM = """
import json, os, sys
import psutil
from nodeagent.runtime import self_protection
if sys.argv[1] == "nobody":  # after the imports, because another user may be unable to read the library
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


def _protect(user: str) -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, user], capture_output=True, check=True, text=True)
    result: dict[str, object] = json.loads(done.stdout)
    return result


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to raise priorities and lock memory")
def test_a_privileged_process_is_protected_or_has_a_note_for_each_refusal() -> None:
    result = _protect("root")
    refused = " ".join(str(note) for note in result["notes"])  # type: ignore[attr-defined]
    assert result["oom_score_adj"] == -999 or "oom_score_adj" in refused
    assert result["nice"] == -10 or "nice" in refused
    locked = result["locked"]
    assert isinstance(locked, int)
    assert locked > 0 or "mlockall" in refused


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to lock memory beyond the limit")
def test_locking_memory_does_not_load_unused_pages() -> None:
    result = _protect("root")
    grown = result["grown"]
    assert isinstance(grown, int)
    assert grown < 20_000, "KiB; mlockall without MCL_ONFAULT adds about 30 MiB"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_process_without_rights_continues_with_notes() -> None:
    result = _protect("nobody")
    notes = result["notes"]
    assert isinstance(notes, list)
    assert any("oom_score_adj" in note for note in notes)
    assert any("nice" in note for note in notes)


def test_spare_descriptors_are_closed_when_no_other_is_free_and_opened_again_later() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = self_protection.SpareDescriptors()
    assert spare.check() is None
    taken: list[int] = []
    try:
        # Above every descriptor that is open: a closed one above the limit could not be used again.
        limit = max(map(int, os.listdir("/proc/self/fd"))) + 64
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, limit), hard))
        with pytest.raises(OSError, match="Too many open files"):
            _take_all(taken)
        note = spare.check()
        assert note is not None
        assert "no free file descriptor" in note.message
        os.listdir("/")  # a spare one is free for this
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


def test_busy_threads_do_not_delay_the_loop() -> None:
    program = (
        "import sys; from nodeagent.runtime import self_protection; self_protection.protect_process();"
        " print(sys.getswitchinterval())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert float(done.stdout) == pytest.approx(self_protection.SWITCH_S)
    assert sys.getswitchinterval() / 5 > self_protection.SWITCH_S, "far below Python's own"

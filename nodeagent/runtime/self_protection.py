"""Protects the process under pressure: OOM score, priority, locked memory, spare descriptors.

Each step is independent. A step that the host refuses is a note, never a failure: the agent works without
CAP_SYS_NICE.
"""

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from nodeagent.model import Note, NoteKind

MCL_CURRENT: Final = 1
MCL_FUTURE: Final = 2
MCL_ONFAULT: Final = 4
"""Lock pages when they are used. With this flag mlockall did not change RSS, without it RSS grew from 18 to 47 MiB."""

OOM_SCORE_ADJ: Final = -999
"""As the kubelet and the container runtime. -1000 would exempt the agent even from its own memory limit, so that a leak
could use up the node."""
NICE: Final = -10
"""Above ordinary pods, below the threads of the kernel. The agent sleeps most of the time; under pressure it must
run."""
SWITCH_S: Final = 0.0005
"""How long a thread may keep the interpreter while another one waits for it (Python's default: 5 ms). The loop releases
it at each of about twenty reads of a sample. With busy API threads, as at the start of pressure, each read would cost
up to 5 ms."""
IOPRIO_CLASS_BE: Final = 2
IOPRIO_HIGHEST: Final = 0


def protect_process() -> tuple[Note, ...]:
    """Protect this process against pressure. Returns a note for each step that the host refused."""
    steps: tuple[tuple[str, Callable[[], None]], ...] = (
        ("oom_score_adj", _oom_score),
        ("nice", _nice),
        ("ionice", _io_priority),
        ("mlockall", _lock_memory),
        ("switch interval", _share_interpreter),
    )
    notes = []
    for name, step in steps:
        try:
            step()
        except OSError as error:
            notes.append(Note(NoteKind.SELF_PROTECTION, f"{name} not set: {error.strerror}"))
    return tuple(notes)


class SpareDescriptors:
    """Spare descriptors for a process that has no free ones: even a directory list needs one.

    `check` detects that no descriptor is free and closes the spare ones. It opens them again when enough are free. One
    check costs 1 us.
    """

    SPARE: Final = 16
    """A sync needs fewer at once: a directory, the files of a cgroup, the state file and its directory."""

    def __init__(self) -> None:
        self._spare: list[int] = []
        self._open_spare()

    def check(self) -> Note | None:
        """A note if no descriptor is free, else None. Call it once per sync."""
        if not self._spare:
            self._open_spare()
            return None if self._spare else self._note()
        try:
            os.close(os.dup(self._spare[0]))
        except OSError:
            self.close()
            return self._note()
        return None

    def close(self) -> None:
        while self._spare:
            os.close(self._spare.pop())

    def _open_spare(self) -> None:
        try:
            while len(self._spare) < 2 * self.SPARE:  # as many must stay free
                self._spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            self.close()
        while len(self._spare) > self.SPARE:
            os.close(self._spare.pop())

    def _note(self) -> Note:
        return Note(NoteKind.SELF_PROTECTION, f"no free file descriptor; continuing with {self.SPARE} spare ones")


def freeze_collector() -> None:
    """Exclude all objects of the start-up from garbage collection: they live until the process ends."""
    gc.collect()
    gc.freeze()


def _oom_score() -> None:
    file = Path("/proc/self/oom_score_adj")
    if int(file.read_text()) > OOM_SCORE_ADJ:
        file.write_text(str(OOM_SCORE_ADJ))


def _nice() -> None:
    if os.getpriority(os.PRIO_PROCESS, 0) > NICE:
        os.setpriority(os.PRIO_PROCESS, 0, NICE)


def _io_priority() -> None:
    import psutil

    try:
        psutil.Process().ionice(IOPRIO_CLASS_BE, IOPRIO_HIGHEST)
    except psutil.AccessDenied as error:
        raise PermissionError(1, "not permitted") from error


def _share_interpreter() -> None:
    sys.setswitchinterval(SWITCH_S)


def _lock_memory() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

"""Makes the process hard to kill and cheap to keep, and says what the host did not allow.

Each step is tried by itself; one that the host refuses is a note, never a failure: a DaemonSet without CAP_SYS_NICE is
still an agent.
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
"""Lock pages as they are touched: with it mlockall did not grow the process, without it RSS went from 18 to 47 MiB."""

OOM_SCORE_ADJ: Final = -999
"""Last but one for the OOM killer: the kubelet and the runtime run at -999 as well; -1000 would exempt us even from a
limit of our own, so that a leak of ours could take the node."""
NICE: Final = -10
"""Above ordinary pods, below the kernel's own threads. The agent sleeps nearly always; this is for when it must not."""
SWITCH_S: Final = 0.0005
"""How long a thread may keep the interpreter while another one wants it (Python's default: 5 ms). The loop gives it up
at each of some twenty reads of a sample; with the API's threads busy, as they are when pressure begins, each of those
cost it up to 5 ms."""
IOPRIO_CLASS_BE: Final = 2
IOPRIO_HIGHEST: Final = 0


def protect_process() -> tuple[Note, ...]:
    """Guard this process against the pressure it is there to relieve. Returns what could not be done."""
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
            notes.append(Note(NoteKind.SELF_PROTECTION, f"{name}: {error.strerror}"))
    return tuple(notes)


class SpareDescriptors:
    """A few descriptors kept for the moment when there are no more: listing a directory needs one.

    `check` notices that the process has run out, and gives the spare ones up; they are taken back when there are enough
    again. One probe costs 1 us.
    """

    KEPT: Final = 16
    """A turn of the loop needs a handful at once at most: a directory, a cgroup's files, the state, its directory."""

    def __init__(self) -> None:
        self._spare: list[int] = []
        self._take()

    def check(self) -> Note | None:
        """What is wrong, or None. Call it once a turn."""
        if not self._spare:
            self._take()
            return None if self._spare else self._note()
        try:
            os.close(os.dup(self._spare[0]))
        except OSError:
            self.close()
            return self._note()
        return None

    def close(self) -> None:
        """Give them up."""
        while self._spare:
            os.close(self._spare.pop())

    def _take(self) -> None:
        try:
            while len(self._spare) < 2 * self.KEPT:  # as many again must be free, or taking them back would be the end
                self._spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            self.close()
        while len(self._spare) > self.KEPT:
            os.close(self._spare.pop())

    def _note(self) -> Note:
        return Note(NoteKind.SELF_PROTECTION, f"out of file descriptors; going on with the {self.KEPT} kept for this")


def freeze_collector() -> None:
    """After start-up: what lives now lives for ever, so the collector need not look at it under pressure."""
    gc.collect()
    gc.freeze()


def _oom_score() -> None:
    file = Path("/proc/self/oom_score_adj")
    if int(file.read_text()) > OOM_SCORE_ADJ:  # a service manager may have set it lower, and lowering needs a right
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

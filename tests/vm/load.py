"""What the processes of a test pod do. Runs in the machine: `load.py READY_FIFO WHAT FIRST SECOND`.

Writes a line to the FIFO when it is as it was asked to be, and then stays so until it is killed; what goes on growing
begins with SIGUSR1, except `ramp`, which does not wait.
"""

import ctypes
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20
STEPS_PER_S = 100
"""A fast ramp grows in this many pieces a second: fewer than a MiB each are not worth a turn under emulation."""


def hold(mebibytes: int, processes: int) -> None:
    """This much anonymous memory, touched, and this many processes in all."""
    if mebibytes:
        touch(mebibytes)
    for _ in range(processes - 1):
        if os.fork() == 0:
            signal.pause()
            os._exit(0)


def ramp(mebibytes: int, per_second: int) -> None:
    """Grows to so much, at so many MiB a second."""
    began = time.monotonic()
    held = 0
    while held < mebibytes:
        piece = min(max(1, per_second // STEPS_PER_S), mebibytes - held)
        touch(piece)
        held += piece
        time.sleep(max(0.0, began + held / per_second - time.monotonic()))


def fill(leave: int) -> None:
    """Grows until the node has only so many MiB available."""
    while (available := mem_available()) > leave:
        touch(min(64, available - leave))


def touch(mebibytes: int) -> None:
    """Private anonymous memory that is really there: written to, by C."""
    ctypes.memset(_ADDRESS + sum(_pieces) * MIB, 1, mebibytes * MIB)
    _pieces.append(mebibytes)


def mem_available() -> int:
    """MiB."""
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) // 1024


# Reserved at once and in one piece, so that the kernel gives huge pages as it does to a large heap: only so first touch
# reaches 1 GiB/s under emulation (4 KiB pages: a fifth of it).
_MAP_NORESERVE = 0x4000
_memory = mmap.mmap(-1, 64 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
_memory.madvise(mmap.MADV_HUGEPAGE)
_ADDRESS = ctypes.addressof(ctypes.c_char.from_buffer(_memory))
_pieces: list[int] = []


def main() -> None:
    fifo, what, first, second = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    later: Callable[[], None] | None = None
    if what == "hold":
        hold(first, second)
    elif what == "flood":
        # FIRST: MiB to leave before the start. SECOND: MiB a second.
        fill(first)
        later = lambda: ramp(1 << 20, second)  # noqa: E731
    with open(fifo, "w") as ready:
        ready.write("ready\n")
    if what == "ramp":
        ramp(first, second)
    if later is not None:
        signal.sigwait({signal.SIGUSR1})
        later()
    while True:
        signal.pause()


if __name__ == "__main__":
    main()

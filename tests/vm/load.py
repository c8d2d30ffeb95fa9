"""What the processes of a test pod do. Runs in the machine: `load.py READY_FIFO hold MIB PROCESSES`.

Writes a line to the FIFO when it is as it was asked to be, and then stays so until it is killed.
"""

import mmap
import os
import signal
import sys
import time

MIB = 1 << 20


def hold(mebibytes: int, processes: int) -> None:
    """This much anonymous memory, touched, and this many processes in all."""
    memory = mmap.mmap(-1, max(mebibytes, 1) * MIB)
    for offset in range(0, mebibytes * MIB, mmap.PAGESIZE):
        memory[offset] = 1
    for _ in range(processes - 1):
        if os.fork() == 0:
            signal.pause()
            os._exit(0)
    _kept.append(memory)


def ramp(mebibytes: int, per_second: int) -> None:
    """Grows to so much, at so many MiB a second."""
    began = time.monotonic()
    for step in range(mebibytes):
        piece = mmap.mmap(-1, MIB)
        for offset in range(0, MIB, mmap.PAGESIZE):
            piece[offset] = 1
        _kept.append(piece)
        time.sleep(max(0.0, began + (step + 1) / per_second - time.monotonic()))


_kept: list[mmap.mmap] = []


def main() -> None:
    fifo, what, first, second = sys.argv[1:]
    if what == "ramp":
        with open(fifo, "w") as ready:
            ready.write("ready\n")
        ramp(int(first), int(second))
    else:
        hold(int(first), int(second))
        with open(fifo, "w") as ready:
            ready.write("ready\n")
    while True:
        signal.pause()


if __name__ == "__main__":
    main()

"""What the processes of a test pod do. Runs in the machine: `load.py READY_FIFO WHAT ARGUMENT...`.

Writes a line to the FIFO when it is as it was asked to be, and then stays so until it is killed; what goes on growing
begins with SIGUSR1, except `ramp`, which does not wait.
"""

import _thread
import ctypes
import functools
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20
CATCH_UP_S = 0.05
DENIED_S = 0.05
THREAD_STACK = 32 << 10
"""A thread takes a tenth of the memory of a process of Python."""
DEPLETE_AT_ONCE = 100
"""Between two readings of what is left."""
STEPS_PER_S = 100
"""A fast ramp grows in this many pieces a second: fewer than a MiB each are not worth a step under emulation."""


def hold(mebibytes: int, processes: int) -> None:
    """This much anonymous memory, touched, and this many processes in all."""
    if mebibytes:
        touch(mebibytes)
    for _ in range(processes - 1):
        if os.fork() == 0:
            signal.pause()
            os._exit(0)


def noise(mebibytes: int) -> None:
    """This much anonymous memory that does not compress, in small pages."""
    block = os.urandom(MIB)
    memory = mmap.mmap(-1, mebibytes * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for start in range(0, mebibytes * MIB, MIB):
        memory[start : start + MIB] = block
    _noise.append(memory)


def ramp(mebibytes: int, per_second: int) -> None:
    """Grows to so much, at so many MiB a second."""
    held, due = 0, time.monotonic()
    while held < mebibytes:
        piece = min(max(1, per_second // STEPS_PER_S), mebibytes - held)
        touch(piece)
        held += piece
        due = wait(due + piece / per_second)


def fill(leave: int) -> None:
    """Grows until the node has only so many MiB available."""
    while (available := mem_available()) > leave:
        touch(min(64, available - leave))


def wait(due: float) -> float:
    """Until then; returns from when the next piece counts. What a host that stood still has cost is not made up for:
    after that it would come all at once."""
    time.sleep(max(0.0, due - time.monotonic()))
    return max(due, time.monotonic() - CATCH_UP_S)


def touch(mebibytes: int) -> None:
    """Private anonymous memory that is really there: written to, by C."""
    ctypes.memset(_ADDRESS + sum(_pieces) * MIB, 1, mebibytes * MIB)
    _pieces.append(mebibytes)


def bomb(most: int) -> None:
    """Forks as fast as it can, up to so many; what it may not have, it asks for again."""
    for _ in range(most):
        while True:
            try:
                child = os.fork()
                break
            except BlockingIOError:  # pids.max
                time.sleep(0.05)
        if child == 0:
            signal.pause()
            os._exit(0)


def breed(mebibytes: int) -> None:
    """A child takes so much at once; its parent only waits. The kernel prefers to kill the child."""
    if os.fork() == 0:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
        touch(mebibytes)
        os._exit(0)


def write(directory: str, per_second: int) -> None:
    """Writes a file, at so many MiB a second, until the disk is full."""
    piece, due = bytes(MIB), time.monotonic()
    with open(f"{directory}/grows", "wb", buffering=0) as file:
        while True:
            file.write(piece)
            due = wait(due + 1 / per_second)


def litter(directory: str, per_second: int) -> None:
    """Makes empty files, so many a second."""
    made, due = 0, time.monotonic()
    while True:
        os.close(os.open(f"{directory}/{made}", os.O_CREAT | os.O_WRONLY))
        made += 1
        due = wait(due + 1 / per_second)


def deplete(what: str, directory: str, leave: int, per_second: int) -> None:
    """Takes MiB or inodes of the directory's file system, or PIDs: at once until so many are left, and so many a second
    from SIGUSR1 on. What it may not have, it asks for again."""
    if what == "bytes" and (mebibytes := left(what, directory) - leave) > 0:
        with open(f"{directory}/held", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, mebibytes * MIB)
    if what == "pids" and os.fork() == 0:  # a child has the threads: each fork would copy what Python knows of them
        threading.stack_size(THREAD_STACK)
        while left(what, directory) > leave:
            _thread.start_new_thread(_never.acquire, ())
        _never.acquire()
    while what == "pids" and left(what, directory) > leave:
        time.sleep(DENIED_S)
    made = 0
    while left(what, directory) > leave:
        for _ in range(min(DEPLETE_AT_ONCE, left(what, directory) - leave)):
            made += take(what, directory, made)
    ready(sys.argv[1])
    signal.sigwait({signal.SIGUSR1})
    due = time.monotonic()
    while True:
        made += take(what, directory, made)
        due = wait(due + 1 / per_second)


def left(what: str, directory: str) -> int:
    """MiB, inodes or PIDs."""
    if what == "pids":
        limit = min(int(Path(f"/proc/sys/kernel/{name}").read_text()) for name in ("pid_max", "threads-max"))
        return limit - int(Path("/proc/loadavg").read_text().split()[3].split("/")[1])
    numbers = os.statvfs(directory)
    return numbers.f_ffree if what == "inodes" else numbers.f_bavail * numbers.f_frsize // MIB


def take(what: str, directory: str, number: int) -> bool:
    """One MiB, inode or PID. False: there was none."""
    try:
        if what == "bytes":
            with open(f"{directory}/grows", "ab", buffering=0) as file:
                file.write(_ONE_MIB)
        elif what == "inodes":
            os.close(os.open(f"{directory}/{number}", os.O_CREAT | os.O_WRONLY))
        elif os.fork() == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
            while True:
                signal.pause()
    except OSError:
        time.sleep(DENIED_S)
        return False
    return True


def read(path: str, times: int) -> None:
    """Reads a file so many times, from its beginning to its end."""
    for _ in range(times):
        with open(path, "rb", buffering=0) as file:
            while file.read(4 * MIB):
                pass


def stream(directory: str, files: int, mebibytes: int, times: int, per_second: int, held: int = 0) -> None:
    """Reads so many files of this size, each so many times, at so many MiB a second, and holds so many MiB. A page that
    is read again is active, which a kubelet counts as used. The files are sparse: their pages are as real as any,
    without a disk."""
    hold(held, 1)
    piece, due = bytearray(4 * MIB), time.monotonic()
    for number in range(files):
        with open(f"{directory}/stream-{number}", "w+b", buffering=0) as file:
            file.truncate(mebibytes * MIB)
            for _ in range(times):
                file.seek(0)
                while size := file.readinto(piece):
                    due = wait(due + size / MIB / per_second)


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
_noise: list[mmap.mmap] = []
_ONE_MIB = bytes(MIB)
_never = _thread.allocate_lock()
_never.acquire()


def main() -> None:
    fifo, what, *arguments = sys.argv[1:]
    numbers = [int(each) for each in arguments if each.isdigit()]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    later: Callable[[], None] | None = None
    if what == "hold":
        hold(*numbers)
    elif what == "noise":
        noise(*numbers)
    elif what == "flood":
        # MiB to leave before the start, MiB a second, 1 to ignore SIGTERM.
        if numbers[2:] == [1]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        fill(numbers[0])
        later = functools.partial(ramp, 1 << 20, numbers[1])
    elif what in ("eat", "breed"):
        later = functools.partial({"eat": touch, "breed": breed}[what], *numbers)
    elif what == "bomb":
        later = functools.partial(bomb, *numbers)
    elif what == "deplete":
        deplete(arguments[0], arguments[1], int(arguments[2]), int(arguments[3]))
    elif what == "stream":
        later = functools.partial(stream, arguments[0], *numbers)
    elif what in ("write", "litter", "read"):
        later = functools.partial({"write": write, "litter": litter, "read": read}[what], arguments[0], numbers[0])
    ready(fifo)
    if what == "ramp":
        ramp(*numbers)
    if later is not None:
        signal.sigwait({signal.SIGUSR1})
        later()
    if what in ("read", "stream"):
        ready(f"{fifo}.done")
    while True:
        signal.pause()


def ready(fifo: str) -> None:
    with open(fifo, "w") as output:
        output.write("ready\n")


if __name__ == "__main__":
    main()

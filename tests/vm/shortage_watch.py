"""Runs in the machine: sees how few bytes, inodes or PIDs are left, and when.

    shortage_watch.py bytes|inodes|pids DIRECTORY LIMIT

LIMIT is in bytes, inodes or PIDs. Commands come one a line on stdin:

    mark      now is when the first pod was evicted
    report    -> {"lowest", "then", "crossed_at", "zero_at", "marked_at", "back_at", "now"} as a JSON line; `then` is
              what was left at the mark, times are CLOCK_BOOTTIME, null: has not happened

It must run when nothing else can: locked in memory, with the highest priority, and it creates no process.
"""

import ctypes
import json
import os
import select
import sys
import time
from pathlib import Path

EVERY_S = 0.01
MCL_CURRENT, MCL_FUTURE = 1, 2


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def left(what: str, directory: str) -> int:
    if what == "pids":
        return _pids_max() - int(os.pread(_LOADAVG, 100, 0).split()[3].split(b"/")[1])
    numbers = os.statvfs(directory)
    return numbers.f_bavail * numbers.f_frsize if what == "bytes" else numbers.f_ffree


def _pids_max() -> int:
    return min(int(Path(f"/proc/sys/kernel/{name}").read_text()) for name in ("pid_max", "threads-max"))


def main() -> None:
    what, directory, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
    ctypes.CDLL(None).mlockall(MCL_CURRENT | MCL_FUTURE)
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    Path("/proc/self/oom_score_adj").write_text("-1000")
    lowest = left(what, directory)
    at: dict[str, float | None] = dict.fromkeys(("crossed_at", "zero_at", "marked_at", "back_at"))
    then: int | None = None
    print(json.dumps({"now": now()}), flush=True)
    while True:
        if select.select([0], [], [], EVERY_S)[0]:
            data = os.read(0, 4096)
            if not data:
                return
            for line in data.decode().split():
                if line == "mark" and at["marked_at"] is None:
                    at["marked_at"], then = now(), left(what, directory)
                elif line == "report":
                    print(json.dumps({"lowest": lowest, "then": then, "now": now(), **at}), flush=True)
        available = left(what, directory)
        lowest = min(lowest, available)
        if available < limit:
            at["crossed_at"] = at["crossed_at"] or now()
            at["back_at"] = None
        elif at["crossed_at"] is not None and at["back_at"] is None:
            at["back_at"] = now()
        if available <= 0 and at["zero_at"] is None:
            at["zero_at"] = now()


_LOADAVG = os.open("/proc/loadavg", os.O_RDONLY)

if __name__ == "__main__":
    main()

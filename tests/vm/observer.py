"""Runs in the machine: sees how far memory goes down, and does the kubelet's part of an eviction.

Commands come one a line on stdin, answers go as JSON lines to stdout:

    watch BYTES ABOVE    begin again: how low MemAvailable gets, and how long it is below so many bytes
    report               -> {"lowest", "crossed_at", "back_at", "per_s", "stall_s", "system_stall_s", "oom_kills"};
                         times are CLOCK_BOOTTIME, per_s is how fast it went from ABOVE to BYTES, the stalls (PSI) are
                         from crossed_at to back_at: every process of the node, any of system.slice; null: has not
                         happened
    rest                 end the watch: this process then uses no CPU time of the machine
    trace                -> {"trace"}: since `watch`, ten times a second, [time, MemAvailable, full stall of the node in
                         seconds, OOM kills]
    kill CGROUP SECONDS  end the pod's processes after so long -> {"gone": CGROUP, "at"} when they are
    term CGROUP SECONDS  send them SIGTERM after so long

It must run when nothing else can: locked in memory, with the highest priority.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

EVERY_S = 0.01
"""A sample takes 1.5 to 2.2 ms of an emulated core; 1 GiB/s is 10 MiB in this time."""
TRACE_EVERY_S = 0.1
TRACE_POINTS = 6000
"""Ten minutes."""
MCL_CURRENT, MCL_FUTURE = 1, 2


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Observer:
    def __init__(self) -> None:
        self.meminfo = os.open("/proc/meminfo", os.O_RDONLY)
        self.kills: list[tuple[float, str]] = []
        self.terms: list[tuple[float, str]] = []
        self.ending: list[str] = []
        self.watch(0, 0)
        self.watching = False

    @property
    def busy(self) -> bool:
        return self.watching or bool(self.terms or self.kills or self.ending)

    def watch(self, limit: int, above: int) -> None:
        self.watching = True
        self.limit = limit
        self.above = above
        self.above_at: tuple[float, int] | None = None
        self.per_s: float | None = None
        self.lowest = 1 << 62
        self.crossed_at: float | None = None
        self.back_at: float | None = None
        self.stalled_before = 0.0, 0.0
        self.stall_s: float | None = None
        self.system_stall_s: float | None = None
        self.oom_kills_before = oom_kills()
        self.trace: list[tuple[float, int, float, int]] = []

    def sample(self) -> None:
        data = os.pread(self.meminfo, 200, 0)
        start = data.index(b"MemAvailable:") + 13
        available = int(data[start : data.index(b"kB", start)]) * 1024
        self.lowest = min(self.lowest, available)
        if not self.trace or (now() >= self.trace[-1][0] + TRACE_EVERY_S and len(self.trace) < TRACE_POINTS):
            self.trace.append((now(), available, stalls_s()[0], oom_kills() - self.oom_kills_before))
        if available >= self.above:
            self.above_at = now(), available
        if available < self.limit:
            if self.crossed_at is None:
                self.crossed_at = now()
                self.stalled_before = stalls_s()
                if self.above_at is not None:
                    self.per_s = (self.above_at[1] - available) / (self.crossed_at - self.above_at[0])
            self.back_at = self.stall_s = self.system_stall_s = None
        elif self.crossed_at is not None and self.back_at is None:
            self.back_at = now()
            node, system = stalls_s()
            self.stall_s, self.system_stall_s = node - self.stalled_before[0], system - self.stalled_before[1]

    def act(self) -> None:
        for due, cgroup in [each for each in self.terms if each[0] <= now()]:
            self.terms.remove((due, cgroup))
            for pid in processes(cgroup):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        for due, cgroup in [each for each in self.kills if each[0] <= now()]:
            self.kills.remove((due, cgroup))
            with contextlib.suppress(FileNotFoundError):  # it has ended already
                Path(cgroup, "cgroup.kill").write_text("1")
            self.ending.append(cgroup)
        for cgroup in [each for each in self.ending if not populated(each)]:
            self.ending.remove(cgroup)
            report(gone=cgroup, at=now())

    def command(self, line: str) -> None:
        word, *rest = line.split()
        if word == "watch":
            self.watch(int(rest[0]), int(rest[1]))
            report(watching=True)
        elif word == "rest":
            self.watching = False
        elif word == "report":
            report(
                lowest=self.lowest,
                crossed_at=self.crossed_at,
                back_at=self.back_at,
                per_s=self.per_s,
                stall_s=self.stall_s,
                system_stall_s=self.system_stall_s,
                oom_kills=oom_kills() - self.oom_kills_before,
            )
        elif word == "trace":
            report(trace=self.trace)
        elif word in ("kill", "term"):
            orders = self.kills if word == "kill" else self.terms
            orders.append((now() + float(rest[1]), "/sys/fs/cgroup" + rest[0]))


def populated(cgroup: str) -> bool:
    try:
        return "populated 1" in Path(cgroup, "cgroup.events").read_text()
    except OSError:  # ENOENT or ENODEV: the cgroup has gone
        return False


def processes(cgroup: str) -> list[int]:
    """Of all containers of a pod."""
    found: list[int] = []
    for listed in Path(cgroup).glob("*/cgroup.procs"):
        with contextlib.suppress(OSError):
            found += map(int, listed.read_text().split())
    return found


def oom_kills() -> int:
    """Processes that the kernel's OOM killer has ended since boot."""
    return int(Path("/proc/vmstat").read_text().split("\noom_kill ")[1].split("\n")[0])


def stalls_s() -> tuple[float, float]:
    """Time since boot in which every process that was not idle waited for memory, and any process of system.slice."""
    node = Path("/proc/pressure/memory").read_text().split("full ")[1]
    system = Path("/sys/fs/cgroup/system.slice/memory.pressure").read_text().split("full ")[0]
    return int(node.split("total=")[1]) / 1e6, int(system.split("total=")[1]) / 1e6


def report(**values: object) -> None:
    os.write(1, json.dumps(values).encode() + b"\n")


def main() -> None:
    ctypes.CDLL(None).mlockall(MCL_CURRENT | MCL_FUTURE)
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    Path("/proc/self/oom_score_adj").write_text("-1000")
    observer = Observer()
    report(ready=True)
    pending = b""
    while True:
        if select.select([0], [], [], EVERY_S if observer.busy else None)[0]:
            data = os.read(0, 4096)
            if not data:
                sys.exit(0)
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                observer.command(line.decode())
        if observer.watching:
            observer.sample()
        observer.act()


if __name__ == "__main__":
    main()

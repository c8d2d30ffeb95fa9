"""CPU time of the fork meter during a storm: `python -m benchmarks.forks [forks per second...]`.

A C program (compiled here; without a compiler Python's os.fork, which is slower) creates processes at a steady rate,
each with vfork, exit and wait. Three readers run one after the other, each during its own storm:

* `meter`: `ConnectorMeter` behind an epoll, as in the agent's loop: batches, attributed to pods;
* `recv`: the same socket with one `recv` per message, without further work;
* `C`: recvmmsg every 0.1 s, without further work: the lower limit.

The figure is the CPU time of the reader (user and system) in percent of one core, without the cost of the forking
side. `lost` is the number of events that the kernel could not queue.
"""

import os
import resource
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from nodeagent.sampling.events import fork_meter, process_connector
from nodeagent.sampling.events.fork_meter import ConnectorMeter
from nodeagent.sampling.events.process_connector import ConnectorError
from nodeagent.sampling.hostfs.host import Host

RATES = (5_000, 23_000)
SECONDS = 4.0

STORM_C = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec / 1e9; }
int main(int argc, char **argv) {
    double rate = atof(argv[1]), seconds = atof(argv[2]), begin = now();
    long made = 0;
    for (double t = 0; t < seconds; t = now() - begin) {
        for (long due = t * rate; made < due && now() - begin < seconds; made++) {
            pid_t child = vfork();
            if (child == 0) _exit(0);
            waitpid(child, NULL, 0);
        }
        usleep(500);
    }
    printf("%ld %f\n", made, now() - begin);
}
"""
STORM_PYTHON = """
import os, sys, time
rate, seconds, begin, made = float(sys.argv[1]), float(sys.argv[2]), time.monotonic(), 0
while (t := time.monotonic() - begin) < seconds:
    while made < t * rate and time.monotonic() - begin < seconds:
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        made += 1
    time.sleep(0.0005)
print(made, time.monotonic() - begin)
"""
DRAIN_C = r"""
#define _GNU_SOURCE
#include <linux/cn_proc.h>
#include <linux/connector.h>
#include <linux/filter.h>
#include <linux/netlink.h>
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#define BATCH 512
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec / 1e9; }
int main(int argc, char **argv) {
    int fd = socket(AF_NETLINK, SOCK_DGRAM, NETLINK_CONNECTOR), size = 4 << 20;
    struct sock_filter code[] = {{0x20, 0, 0, 36}, {0x15, 0, 1, htonl(1)}, {6, 0, 0, -1}, {6, 0, 0, 0}};
    struct sock_fprog program = {4, code};
    struct sockaddr_nl address = {.nl_family = AF_NETLINK, .nl_groups = 1};
    struct { struct nlmsghdr header; struct cn_msg message; unsigned action; } __attribute__((packed)) listen = {
        {40, NLMSG_DONE, 0, 0, getpid()}, {{1, 1}, 0, 0, 4, 0}, 1};
    static char buffer[BATCH][76];
    static struct mmsghdr messages[BATCH];
    static struct iovec vectors[BATCH];
    for (int i = 0; i < BATCH; i++) {
        vectors[i] = (struct iovec){buffer[i], 76};
        messages[i].msg_hdr.msg_iov = &vectors[i];
        messages[i].msg_hdr.msg_iovlen = 1;
    }
    setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof size);
    if (bind(fd, (struct sockaddr *)&address, sizeof address) || send(fd, &listen, sizeof listen, 0) < 0) return 1;
    puts("ready");
    fflush(stdout);
    long seen = 0;
    for (double end = now() + atof(argv[1]); now() < end;) {
        usleep(100000);
        for (int n; (n = recvmmsg(fd, messages, BATCH, MSG_DONTWAIT, NULL)) > 0;) seen += n;
    }
    unsigned info[9] = {0};
    socklen_t length = sizeof info;
    getsockopt(fd, SOL_SOCKET, SO_MEMINFO, info, &length);
    printf("%ld %u\n", seen, info[8]);
}
"""


class Result(NamedTuple):
    events: int
    lost: int
    cpu_s: float


Maker = Callable[[], subprocess.Popen[str]]
Reader = Callable[[Maker], Result]


class Storm(NamedTuple):
    """The command of the storm, and of the C reader (None without a compiler)."""

    command: list[str]
    drain: str | None


def prepare(directory: Path) -> Storm:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return Storm([sys.executable, "-S", "-E", "-c", STORM_PYTHON], None)
    for name, source in (("storm", STORM_C), ("drain", DRAIN_C)):
        (directory / f"{name}.c").write_text(source)
        subprocess.run([compiler, "-O2", "-o", directory / name, directory / f"{name}.c"], check=True)
    return Storm([str(directory / "storm")], str(directory / "drain"))


def read_storm(storm: subprocess.Popen[str], read_events: Callable[[], None]) -> float:
    """Read until the storm is over. Returns the CPU seconds of this process."""
    begin = time.process_time()
    while storm.poll() is None:
        read_events()
    read_events()
    return time.process_time() - begin


def by_meter(storm: Maker) -> Result:
    meter = ConnectorMeter(process_connector.open_connector(), Host("/"))
    source, poll = meter.source(), select.epoll()
    assert source is not None
    poll.register(source.fd, source.events)

    def read_events() -> None:
        if poll.poll(1.0):
            source.drain()

    try:
        source.drain()
        before, cpu = meter.events, read_storm(storm(), read_events)
        after = meter.events
    finally:
        poll.close()
        meter.close()
    events = after.forks + after.threads - before.forks - before.threads
    return Result(events, after.lost - before.lost, cpu)


def by_recv(storm: Maker) -> Result:
    connector = process_connector.open_connector()
    raw = socket.socket(fileno=os.dup(connector.fileno()))
    events = 0

    def read_events() -> None:
        nonlocal events
        time.sleep(fork_meter.STORM_DRAIN_S)
        try:
            while raw.recv(4096, socket.MSG_DONTWAIT):
                events += 1
        except BlockingIOError:
            return

    try:
        cpu = read_storm(storm(), read_events)
        lost = connector.drain().lost
    finally:
        raw.close()
        connector.close()
    return Result(events, lost, cpu)


def by_c(drain: str, storm: Maker) -> Result:
    reader = subprocess.Popen([drain, str(SECONDS + 0.3)], stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    reader.stdout.readline()
    making = storm()
    making.wait()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    events, lost = reader.stdout.read().split()
    reader.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Result(int(events), int(lost), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main(arguments: list[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    rates = [int(each) for each in arguments] or list(RATES)
    with tempfile.TemporaryDirectory() as directory:
        ready = prepare(Path(directory))
        readers: dict[str, Reader] = {"meter": by_meter, "recv": by_recv}
        if ready.drain is not None:
            drain = ready.drain
            readers["C"] = lambda storm: by_c(drain, storm)
        columns = "wanted/s", "made/s", "reader", "events", "lost", "us each", "core", "to C"
        print(" ".join(f"{name:>8}" for name in columns))
        for rate in rates:
            measure(rate, ready, readers)


def measure(rate: int, ready: Storm, readers: dict[str, Reader]) -> None:
    rows = []
    for name, reader in readers.items():
        made: list[subprocess.Popen[str]] = []

        def storm(made: list[subprocess.Popen[str]] = made) -> subprocess.Popen[str]:
            command = [*ready.command, str(rate), str(SECONDS)]
            made.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            return made[0]

        result = reader(storm)
        assert made[0].stdout is not None
        forks, seconds = made[0].stdout.read().split()
        made[0].stdout.close()
        rows.append((name, int(forks) / float(seconds), result, result.cpu_s / float(seconds)))
    limit = rows[-1][3] if rows[-1][0] == "C" else None
    for name, per_s, result, core in rows:
        each = 1e6 * result.cpu_s / max(1, result.events)
        ratio = f"{core / limit:.2f}" if limit else "-"
        print(
            f"{rate:>8} {per_s:>8.0f} {name:>8} {result.events:>8} {result.lost:>8} {each:>8.2f} {core:>8.2%} "
            f"{ratio:>8}"
        )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConnectorError as error:
        raise SystemExit(str(error)) from error

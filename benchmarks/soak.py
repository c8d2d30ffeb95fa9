"""Compressed churn against the whole agent: what grows?

    python -m benchmarks.soak [--quick | --part 0.5] [--minutes N] [--log FILE]

A node of 30 pods in a directory, an API server in another process, the agent's sleep skipped (`benchmarks.soak_world`).
A whole run has 10^6 samples, 10^5 pods (two watch events each), 10^3 evictions, 100 reloads that make sampler, disks
and session again, and 100 outages of the API server; --quick has 1/200 of it, --part as much as given. Each eviction
must be of the right pod. Readings of the agent's process:

* `RSS`; `blocks`: memory blocks that Python has allocated; `descriptors`, `threads`;
* `kernel`: kernel memory of its cgroup (root and cgroup v1, else none), which includes the files of the node;
* `state`: the state file; `recorder`: everything else in its directory, samples and decisions.

The last lines are the slope of each column (least squares over the readings after the first fifth) for 10^5 samples,
and what grew beyond its limit; then the exit code is 1.
"""

import argparse
import contextlib
import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks import soak_world
from benchmarks.soak_world import WHOLE, Plan, SkippingWakeups, SoakError, World
from nodeagent.loop import assembly, auto_snapshots, sample_recording
from nodeagent.records import flight_recorder

QUICK: Final = 1 / 200
ROWS: Final = 20
"""Of the table, at most. There is a reading after each eviction."""
WARM: Final = 0.2
"""Part of a run in which caches fill: its readings do not count."""
CGROUPS: Final = Path("/sys/fs/cgroup/memory")
KIB, MIB = 1 << 10, 1 << 20


class Reading(NamedTuple):
    """One row. Bytes, except for descriptors and threads."""

    samples: int
    rss: int
    blocks: int
    """Allocated by Python, after a collection: what the agent holds, without what the allocators keep."""
    descriptors: int
    threads: int
    kernel: int | None
    state: int
    recorder: int


LIMITS: Final = {
    "rss": 8 * MIB,
    "blocks": 20_000,
    "descriptors": 2,
    "threads": 2,
    "kernel": MIB,
    "state": 16 * KIB,
}
"""How much the median of the last third may be above that of the first third after the warm-up. Threads and descriptors
of a session that a reload replaced, and of a request, may be there at one reading and not at the next."""
MAX_RECORDER: Final = (
    sample_recording.MAX_BYTES_IN_MEMORY + auto_snapshots.MAX_BYTES_IN_MEMORY + 2 * flight_recorder.MAX_FILE_BYTES
)
"""The limits of the agent itself: samples and snapshot files in memory, and two files of recorded decisions."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1/200 of the whole")
    parser.add_argument("--part", type=float, default=1.0, help="this part of the whole")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end early, after this time")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="write the log of the agent to this file")
    options = parser.parse_args(arguments)
    plan = WHOLE.scaled(QUICK if options.quick else options.part)
    began = time.monotonic()
    try:
        readings, world = run(plan, options.log, for_s=60.0 * options.minutes)
    except SoakError as error:
        print(f"failed: {error}")
        return 1
    done = world.done
    print(
        f"{done.samples} samples, {done.pods} pods, {world.events} watch events, {done.evictions} evictions, "
        f"{done.reloads} reloads, {done.outages} outages in {time.monotonic() - began:.0f} s"
    )
    print(table(readings))
    grown = growth(readings)
    for line in grown:
        print(line)
    return 1 if grown else 0


def run(plan: Plan, log_file: Path, *, for_s: float) -> tuple[list[Reading], World]:
    """Run the agent through the plan. Raises SoakError."""
    readings: list[Reading] = []

    def read(world: World) -> None:
        readings.append(take_reading(world, group))
        print(f"{world.done.samples} of {plan.samples} samples", file=sys.stderr, flush=True)

    with contextlib.ExitStack() as stack:
        parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-", dir=parent)))
        world = World(scratch, plan, read, for_s=for_s)
        stack.callback(world.server.close)
        group = stack.enter_context(_own_cgroup())
        agent, wakeups = soak_world.build_agent(stack, world.host, world.config, log_file)
        world.agent = agent
        try:
            agent.run(SkippingWakeups(wakeups, world.clock, world.script(), count=world.count_sample))
        finally:
            agent.stop()
    return readings, world


def take_reading(world: World, group: Path | None) -> Reading:
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    state = world.state / assembly.STATE_FILE
    # A snapshot file that is being written is beside the finished ones until the oldest of them is removed.
    files = [path for path in world.state.rglob("*") if path.is_file() and path.suffix != ".partial"]
    return Reading(
        world.done.samples,
        int(status["VmRSS"].split()[0]) * KIB,
        sys.getallocatedblocks(),
        len(os.listdir("/proc/self/fd")),
        int(status["Threads"]),
        int((group / "memory.kmem.usage_in_bytes").read_text()) if group else None,
        state.stat().st_size,
        sum(path.stat().st_size for path in files) - state.stat().st_size,
    )


# --- figures ---------------------------------------------------------------------------------------------------------


def table(readings: Sequence[Reading]) -> str:
    """The readings and the slope of each column."""
    lines = [
        f"{'samples':>9} {'RSS MiB':>9} {'blocks':>8} {'descriptors':>11} {'threads':>8} {'kernel MiB':>10} "
        f"{'state KiB':>10} {'recorder MiB':>12}"
    ]
    for each in readings[:: -(-len(readings) // ROWS)]:
        kernel = "-" if each.kernel is None else f"{each.kernel / MIB:.2f}"
        lines.append(
            f"{each.samples:>9} {each.rss / MIB:>9.2f} {each.blocks:>8} {each.descriptors:>11} {each.threads:>8} "
            f"{kernel:>10} {each.state / KIB:>10.1f} {each.recorder / MIB:>12.2f}"
        )
    slopes = [slope(readings, column) for column in Reading._fields[1:]]
    cells = ["-" if each is None else f"{each:+.3g}" for each in slopes]
    units = ("B RSS", "blocks", "descriptors", "threads", "B kernel", "B state", "B recorder")
    lines.append("slope for 10^5 samples: " + ", ".join(f"{c} {u}" for c, u in zip(cells, units, strict=True)))
    return "\n".join(lines)


def counted(readings: Sequence[Reading]) -> Sequence[Reading]:
    """Without the warm-up."""
    return readings[int(len(readings) * WARM) :]


def slope(readings: Sequence[Reading], column: str) -> float | None:
    """Least squares, for 10^5 samples; None without readings."""
    points = [(each.samples / 1e5, getattr(each, column)) for each in counted(readings)]
    if len(points) < 2 or any(value is None for _, value in points):
        return None
    middle = sum(x for x, _ in points) / len(points)
    mean = sum(y for _, y in points) / len(points)
    spread = sum((x - middle) ** 2 for x, _ in points)
    return sum((x - middle) * (y - mean) for x, y in points) / spread if spread else None


def growth(readings: Sequence[Reading]) -> list[str]:
    """What grew beyond its limit: was and may be."""
    rows = counted(readings)
    third = max(1, len(rows) // 3)
    found = []
    for column, limit in LIMITS.items():
        early, late = (_median([getattr(each, column) for each in part]) for part in (rows[:third], rows[-third:]))
        if early is not None and late is not None and late - early > limit:
            found.append(f"{column} grew from {early} to {late}, allowed is {limit} more")
    largest = max((each.recorder for each in readings), default=0)
    if largest > MAX_RECORDER:
        found.append(f"recorder has {largest} bytes, allowed is {MAX_RECORDER}")
    return found


def _median(values: Sequence[int | None]) -> int | None:
    known = sorted(value for value in values if value is not None)
    return known[len(known) // 2] if known else None


# --- this process ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _own_cgroup() -> Iterator[Path | None]:
    """A memory cgroup for this process alone, if there can be one."""
    group = CGROUPS / f"nodeagent-soak-{os.getpid()}"
    before = next(
        (line.rpartition(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line),
        "",
    )
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text("0")
        (group / "memory.kmem.usage_in_bytes").read_text()
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        yield None
        return
    try:
        yield group
    finally:
        (CGROUPS / before.lstrip("/") / "cgroup.procs").write_text("0")
        group.rmdir()


if __name__ == "__main__":
    sys.exit(main())

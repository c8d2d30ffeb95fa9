"""What the agent itself costs the node, and what to do about too much of it.

Promises:

1. `judge` is pure: two readings and a budget give a verdict. CPU above the budget stretches the sampling interval, and
   as soon as there is room it goes back; resident memory above it is given back to the kernel as far as it is free.
   Either is told.
2. The stretch is for calm times. Near a threshold the loop samples as fast as it must, whatever it costs: that is what
   it is there for.
3. Descriptors have a bound of our own below the host's, so that a leak of ours ends in an error here and not with a
   node that has none left.
"""

import ctypes
import gc
import resource
from typing import Final, NamedTuple

from nodeagent.model import Note, NoteKind

READ_EVERY_S: Final = 30.0
"""A reading takes 0.2 ms; a share of CPU over less than some seconds says little."""
DESCRIPTORS: Final = 4096
"""Two kept files for each of 1,000 pods, as many again for everything else; the kernel takes 4.3 KiB for each."""
MOST_STRETCH: Final = 10.0
"""At the default interval of 1 s a calm node is then sampled every 10 s, as a kubelet does."""
LONGEST_S: Final = 10.0
"""No interval is stretched beyond this: the probes would take an agent that is only dear for one that is stuck."""
_FULL: Final = 0.8
"""Share of the descriptor limit from which it is told."""
_FAULTS_PER_S: Final = 10.0
"""Major faults: each is a read from disk, ms when the disk is the trouble. A locked process has none."""


class ProcessCost(NamedTuple):
    """One reading of this process. Counters count from its start."""

    read_at: float
    rss: int
    """Resident set in bytes, shared pages included."""
    cpu_s: float
    """User and system time, all threads."""
    threads: int
    descriptors: int
    descriptor_limit: int
    major_faults: int
    minor_faults: int
    voluntary_switches: int
    """It slept or waited: about one for each wake-up of a thread."""
    involuntary_switches: int
    """Somebody else was more important."""


class CostLimits(NamedTuple):
    """What the agent may cost."""

    cpu_share: float = 0.03
    """Of one core, over the time between two readings. Measured (benchmarks/loop.py --rss, forks.py): 0.3% at 110 pods
    and 0.8% at 500, at 1 Hz; 2.2% in a fork storm of 23,000/s."""
    rss: int = 64 << 20
    """Bytes. The goal is 40 MiB at 110 pods and 45 at 500; the manifests' limit is above this."""


class Verdict(NamedTuple):
    """What a reading means."""

    cpu_share: float | None
    """Of one core since the reading before; None at the first one, or when the clock stood still."""
    interval_factor: float
    """Of the calm sampling interval, 1 to `MOST_STRETCH`: see `stretched`."""
    trim: bool
    """Give memory back: `trim()`."""
    notes: tuple[Note, ...]


def read(now: float) -> ProcessCost:
    """Read this process. One thread only: psutil's /proc is a global, which sampling/processes.py changes for the time
    of a call."""
    import psutil

    process = psutil.Process()
    with process.oneshot():
        times, switches = process.cpu_times(), process.num_ctx_switches()
        rss, threads = process.memory_info().rss, process.num_threads()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return ProcessCost(
        read_at=now,
        rss=rss,
        cpu_s=times.user + times.system,
        threads=threads,
        descriptors=process.num_fds(),
        descriptor_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        major_faults=usage.ru_majflt,
        minor_faults=usage.ru_minflt,
        voluntary_switches=switches.voluntary,
        involuntary_switches=switches.involuntary,
    )


def stretched(interval_s: float, stretch: float, *, stale_after_s: float) -> float:
    """The calm sampling interval under a stretch, seconds: no sample is to be stale before the next one, however dear
    they are."""
    return max(interval_s, min(interval_s * stretch, LONGEST_S, stale_after_s / 2))


def assess_cost(before: ProcessCost | None, after: ProcessCost, budget: CostLimits, *, stretch: float = 1.0) -> Verdict:
    """What to do after a reading. `before` is the reading before (None: there is none) and `stretch` what applied
    between the two.

    A sample costs the same at any interval, so with CPU share c under stretch s the share without would be c * s, and
    c * s / budget brings it into the budget.
    """
    passed = after.read_at - before.read_at if before is not None else 0.0
    share = None
    notes: list[Note] = []
    if before is not None and passed > 0:
        share = max(0.0, after.cpu_s - before.cpu_s) / passed
        stretch = min(MOST_STRETCH, max(1.0, share * stretch / budget.cpu_share))
        if share > budget.cpu_share:
            notes.append(_note(f"{share:.1%} of a core, over the budget of {budget.cpu_share:.1%}: calm samples are "
                               f"taken {stretch:.1f} times as rarely"))  # fmt: skip
        faults = after.major_faults - before.major_faults
        if faults > _FAULTS_PER_S * passed:
            notes.append(_note(f"{faults} pages of the agent were read back from disk in {passed:.0f} s: every "
                               "decision waits for that; let it lock its memory (CAP_IPC_LOCK)"))  # fmt: skip
    if after.rss > budget.rss:
        notes.append(_note(f"{after.rss / 2**20:.0f} MiB resident, over the budget of {budget.rss / 2**20:.0f}"))
    if after.descriptor_limit >= 0 and after.descriptors > _FULL * after.descriptor_limit:
        notes.append(_note(f"{after.descriptors} descriptors of {after.descriptor_limit} are open"))
    return Verdict(share, stretch, after.rss > budget.rss, tuple(notes))


def trim() -> None:
    """Collect garbage and give free memory back to the kernel. Takes some ms: not under pressure."""
    gc.collect()
    trimmed = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trimmed is not None:
        trimmed(0)


def bound_descriptors(wanted: int = DESCRIPTORS) -> tuple[int, tuple[Note, ...]]:
    """Let this process have so many descriptors and no more; call it before anything is kept open. Returns the limit
    that holds, and a note when the host allows only fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        return most, (_note(f"only {most} descriptors are allowed (LimitNOFILE=, ulimit -n), {wanted} are wanted: of "
                            "many pods fewer files are kept open, and a sample takes longer"),)  # fmt: skip
    return most, ()


def _note(message: str) -> Note:
    return Note(NoteKind.COST, message)
